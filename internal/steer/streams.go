// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"iter"
	"net/netip"
	"slices"
	"time"

	"sockeye/internal/bpf"
	"sockeye/internal/config"
	"sockeye/internal/sockdiag"
	"sockeye/internal/steer/placement"
)

const (
	// silence is the time without datagrams after which a device counts as one that sends none. Routers repeat the
	// templates of IPFIX and NetFlow v9 every 10 minutes, or more often.
	silence = 10 * time.Minute
	// streamsInterval is the minimum time between two readings of the table of devices, which has up to a million entries.
	streamsInterval = 30 * time.Second
)

// streams finds the devices that send only one of the two streams of a service: that have a TCP connection and send no
// datagrams, or the reverse. The kernel has one time for both streams, so streams compares the counts of datagrams.
type streams struct {
	at       time.Time
	last     map[bpf.Address]lastDatagram
	tcp, udp int // devices with this stream alone
}

// deviceKey identifies a device: by its name in the device map, or else by its address. Unlike session.Key, it needs no
// memory.
type deviceKey struct {
	name    string
	address netip.Addr
}

// lastDatagram is the last known count of datagrams of an address, and the time at which it changed. Both are small,
// because there is one for each entry of the table of devices.
type lastDatagram struct {
	datagrams uint32 // the lowest bits
	at        uint32 // seconds since 1970
}

// update reads the table of devices. key names the device of an address, connected has the devices with an open
// connection, and monotonic is the time of the zero of Seen.LastSeen.
func (t *streams) update(now, monotonic time.Time, devices iter.Seq2[bpf.Address, bpf.Seen], key func(netip.Addr) deviceKey, connected map[deviceKey]bool) {
	next := make(map[bpf.Address]lastDatagram, len(t.last))
	t.tcp, t.udp = 0, 0
	sending := make(map[deviceKey]bool) // without devices that have one address and no connection: there may be a million
	for address, seen := range devices {
		if seen.Datagrams == 0 {
			continue
		}
		last, known := t.last[address]
		switch {
		case !known:
			// The datagrams came at this time, or before.
			last.at = uint32(monotonic.Add(time.Duration(seen.LastSeen)).Unix())
		case last.datagrams != uint32(seen.Datagrams):
			last.at = uint32(now.Unix())
		}
		last.datagrams = uint32(seen.Datagrams)
		next[address] = last
		if now.Sub(time.Unix(int64(last.at), 0)) < silence {
			if device := key(placement.Addr(address)); connected[device] || device.name != "" {
				sending[device] = true
			} else {
				t.udp++
			}
		}
	}
	t.at, t.last = now, next
	for device := range connected {
		if !sending[device] {
			t.tcp++
		}
	}
	for device := range sending {
		if !connected[device] {
			t.udp++
		}
	}
}

// hasBothStreams reports whether the devices of the service send TCP and UDP, and are counted.
func (s *service) hasBothStreams() bool {
	has := func(protocol config.Protocol) bool {
		return slices.ContainsFunc(s.Config.Listeners, func(l config.Listener) bool { return l.Protocol == protocol })
	}
	return s.Config.TrackDevices > 0 && has(config.TCP) && has(config.UDP)
}

// updateStreams updates streams unless the last update is recent.
func (s *service) updateStreams() error {
	now := time.Now()
	if !s.streams.at.IsZero() && now.Sub(s.streams.at) < streamsInterval {
		return nil
	}
	list, err := s.ReadSessions()
	if err != nil {
		return err
	}
	key := func(address netip.Addr) deviceKey {
		if name := s.Mapping.Locate(address).Device; name != "" {
			return deviceKey{name: name}
		}
		return deviceKey{address: address}
	}
	connected := make(map[deviceKey]bool)
	for i := range list {
		if list[i].State == sockdiag.Established {
			connected[key(list[i].Address)] = true
		}
	}
	s.streams.update(now, monotonicZero(), s.Path.Devices(), key, connected)
	return nil
}
