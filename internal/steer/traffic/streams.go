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
	at        time.Time
	last      map[bpf.Address]lastDatagram
	connected map[deviceKey]bool
	tcp, udp  int // devices with this stream alone
}

// deviceKey identifies a device: by its name in the device map, or else by its address. Unlike session.Key, it needs no
// memory.
type deviceKey struct {
	name    string
	address netip.Addr
}

// lastDatagram is the last known count of datagrams of an address, and the time at which it changed. The fields are small,
// because there is one lastDatagram for each entry of the table of devices.
type lastDatagram struct {
	datagrams uint32 // the lowest bits
	at        uint32 // seconds since 1970
	since     uint32 // time of the update that has added the address, in seconds since 1970
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
			last.at, last.since = uint32(monotonic.Add(time.Duration(seen.LastSeen)).Unix()), uint32(now.Unix())
		case last.datagrams != uint32(seen.Datagrams):
			last.at = uint32(now.Unix())
		}
		last.datagrams = uint32(seen.Datagrams)
		next[address] = last
		if last.recent(now) {
			if device := key(placement.Addr(address)); connected[device] || device.name != "" {
				sending[device] = true
			} else {
				t.udp++
			}
		}
	}
	t.at, t.last, t.connected = now, next, connected
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

// recent reports whether an address counts as one that sends datagrams.
func (l *lastDatagram) recent(now time.Time) bool { return now.Sub(unixTime(l.at)) < silence }

func unixTime(seconds uint32) time.Time { return time.Unix(int64(seconds), 0) }

// hasStream reports whether the service has a listener of a protocol, and the agent knows who sends to it.
func (s *service) hasStream(protocol config.Protocol) bool {
	return (protocol == config.TCP || s.Config.TrackDevices > 0) &&
		slices.ContainsFunc(s.Config.Listeners, func(l config.Listener) bool { return l.Protocol == protocol })
}

// hasBothStreams reports whether the devices of the service send TCP and UDP, and are counted.
func (s *service) hasBothStreams() bool {
	return s.Config.TrackDevices > 0 && s.hasStream(config.TCP) && s.hasStream(config.UDP)
}

// deviceKey returns the device of an address.
func (s *service) deviceKey(address netip.Addr) deviceKey {
	if id, ok := s.Mapping.Devices.Lookup(address); ok {
		return deviceKey{name: s.Mapping.Devices.Devices()[id]}
	}
	return deviceKey{address: address}
}

// updateStreams updates streams and the learned devices, unless the last update is more recent than an interval.
func (s *service) updateStreams(interval time.Duration) error {
	now := time.Now()
	if !s.streams.at.IsZero() && now.Sub(s.streams.at) < interval {
		return nil
	}
	list, err := s.ReadSessions()
	if err != nil {
		return err
	}
	connected := make(map[deviceKey]bool)
	for i := range list {
		if list[i].State == sockdiag.Established {
			connected[s.deviceKey(list[i].Address)] = true
		}
	}
	s.streams.update(now, monotonicZero(), s.trackedDevices(), s.deviceKey, connected)
	s.learned.update(&s.streams, s.deviceKey)
	s.saveLearned()
	return nil
}

// trackedDevices yields the table of devices, or nothing if the policy does not track devices: the table then has one
// entry, for any address.
func (s *service) trackedDevices() iter.Seq2[bpf.Address, bpf.Seen] {
	if s.Config.TrackDevices == 0 {
		return func(func(bpf.Address, bpf.Seen) bool) {}
	}
	return s.Path.Devices()
}
