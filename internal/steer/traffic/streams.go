// SPDX-License-Identifier: Apache-2.0

package traffic

import (
	"iter"
	"net/netip"
	"slices"
	"time"

	"sockeye/internal/bpf"
	"sockeye/internal/clock"
	"sockeye/internal/config"
	"sockeye/internal/placement"
	"sockeye/internal/sockdiag"
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

// recent reports whether an address counts as one that sends datagrams.
func (l *lastDatagram) recent(now time.Time) bool { return now.Sub(unixTime(l.at)) < silence }

func unixTime(seconds uint32) time.Time { return time.Unix(int64(seconds), 0) }

// OneStream returns the number of devices that send one of both streams only. known is false unless the devices of the
// service send TCP and UDP, and are counted. The caller holds the lock.
func (t *Traffic) OneStream() (tcp, udp int, known bool, err error) {
	if t.Config.TrackDevices == 0 || !t.hasStream(config.TCP) || !t.hasStream(config.UDP) {
		return 0, 0, false, nil
	}
	err = t.updateStreams(streamsInterval)
	return t.streams.tcp, t.streams.udp, true, err
}

// hasStream reports whether the service has a listener of a protocol, and the agent knows who sends to it.
func (t *Traffic) hasStream(protocol config.Protocol) bool {
	return (protocol == config.TCP || t.Config.TrackDevices > 0) &&
		slices.ContainsFunc(t.Config.Listeners, func(l config.Listener) bool { return l.Protocol == protocol })
}

// updateStreams updates streams and the learned devices, unless the last update is more recent than an interval.
func (t *Traffic) updateStreams(interval time.Duration) error {
	now := time.Now()
	if !t.streams.at.IsZero() && now.Sub(t.streams.at) < interval {
		return nil
	}
	list, err := t.ReadSessions()
	if err != nil {
		return err
	}
	connected := make(map[deviceKey]bool)
	for i := range list {
		if list[i].State == sockdiag.Established {
			connected[t.deviceKey(list[i].Address)] = true
		}
	}
	t.streams.update(now, clock.MonotonicZero(), t.trackedDevices(), t.deviceKey, connected)
	t.learned.update(&t.streams, t.deviceKey)
	t.saveLearned()
	return nil
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

// deviceKey returns the device of an address.
func (t *Traffic) deviceKey(address netip.Addr) deviceKey {
	if id, ok := t.Mapping.Devices.Lookup(address); ok {
		return deviceKey{name: t.Mapping.Devices.Devices()[id]}
	}
	return deviceKey{address: address}
}

// trackedDevices yields the table of devices, or nothing if the policy does not track devices: the table then has one
// entry, for any address.
func (t *Traffic) trackedDevices() iter.Seq2[bpf.Address, bpf.Seen] {
	if t.Config.TrackDevices == 0 {
		return func(func(bpf.Address, bpf.Seen) bool) {}
	}
	return t.Path.Devices()
}
