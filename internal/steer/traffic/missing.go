// SPDX-License-Identifier: Apache-2.0

package traffic

import (
	"cmp"
	"iter"
	"net/netip"
	"slices"
	"time"

	"sockeye/internal/api"
	"sockeye/internal/config"
)

// Missing returns the expected devices that do not send all streams. A device map of a million names takes some tenths of a
// second.
func (t *Traffic) Missing(limit int) ([]api.Missing, error) {
	t.Mu.Lock()
	defer t.Mu.Unlock()
	if err := t.CheckOpen(); err != nil {
		return nil, err
	}
	if err := t.updateStreams(0); err != nil {
		return nil, err
	}
	m := api.Missing{Service: t.Name, Streams: []string{}, Devices: []api.MissingDevice{}}
	for _, protocol := range []config.Protocol{config.TCP, config.UDP} {
		if t.hasStream(protocol) {
			m.Streams = append(m.Streams, string(protocol))
		}
	}
	if t.Config.TrackDevices == 0 && slices.ContainsFunc(t.Config.Listeners, func(l config.Listener) bool { return l.Protocol == config.UDP }) {
		m.Problem = "track_devices is off, so the agent does not know who sends datagrams"
	}
	if len(m.Streams) == 0 {
		return []api.Missing{m}, nil
	}
	sending := t.streams.sending(t.deviceKey, t.learned.devices)
	lacks := func(device deviceKey) (streams []string) {
		if slices.Contains(m.Streams, "tcp") && !t.streams.connected[device] {
			streams = append(streams, "tcp")
		}
		if slices.Contains(m.Streams, "udp") && !sending[device] {
			streams = append(streams, "udp")
		}
		return streams
	}
	var seen, never []deviceKey
	for device := range t.expected() {
		m.Expected++
		if len(lacks(device)) == 0 {
			continue
		}
		m.Missing++
		if _, known := t.learned.devices[device]; known {
			seen = append(seen, device)
		} else if len(never) < limit {
			never = append(never, device)
		}
	}
	last := func(device deviceKey) uint32 {
		one := t.learned.devices[device]
		return max(one.tcp, one.udp)
	}
	slices.SortFunc(seen, func(a, b deviceKey) int {
		return cmp.Or(cmp.Compare(last(b), last(a)), cmp.Compare(a.name, b.name), a.address.Compare(b.address))
	})
	listed := append(seen, never...)
	listed = listed[:min(len(listed), limit)]
	m.Omitted = m.Missing - len(listed)
	prefixes := t.firstPrefixes(listed)
	for _, device := range listed {
		m.Devices = append(m.Devices, t.missingDevice(device, lacks(device), prefixes[device.name]))
	}
	return []api.Missing{m}, nil
}

// expected returns the devices that this host expects to send: those of the device map, and those that the agent has learned, without
// those that another host of the fleet serves.
func (t *Traffic) expected() iter.Seq[deviceKey] {
	isElsewhere := t.elsewhere()
	return func(yield func(deviceKey) bool) {
		for _, name := range t.Mapping.Devices.Devices() {
			if device := (deviceKey{name: name}); !isElsewhere(device) && !yield(device) {
				return
			}
		}
		for device := range t.learned.devices {
			// The device map may have changed since the device was learned.
			if device.name == "" && t.deviceKey(device.address) == device && !isElsewhere(device) && !yield(device) {
				return
			}
		}
	}
}

// elsewhere returns a function that tells whether another host of the fleet serves a device. The first prefix of a named device decides.
func (t *Traffic) elsewhere() func(deviceKey) bool {
	if t.Host.Fleet.Load() == nil {
		return func(deviceKey) bool { return false }
	}
	names := t.Mapping.Devices.Devices()
	first := make(map[string]netip.Addr, len(names))
	for prefix, id := range t.Mapping.Devices.All() {
		if _, known := first[names[id]]; !known {
			first[names[id]] = prefix.Addr()
		}
	}
	return func(device deviceKey) bool {
		address := device.address
		if device.name != "" {
			address = first[device.name]
		}
		by := t.Host.ServedBy(&t.Config, address)
		return by.Host != "" && !by.Here
	}
}

// missingDevice describes a device that lacks streams.
func (t *Traffic) missingDevice(device deviceKey, lacks []string, prefix string) api.MissingDevice {
	one := api.MissingDevice{Device: device.name, Prefix: prefix, Missing: lacks}
	if device.name != "" {
		one.Slot = t.Mapping.LocateName(device.name).Slot
	} else {
		one.Slot, _ = t.Mapping.Slot(device.address)
		one.Address = &device.address
	}
	moment := func(seconds uint32) *time.Time {
		if seconds == 0 {
			return nil
		}
		t := unixTime(seconds)
		return &t
	}
	known := t.learned.devices[device]
	one.LastConnection, one.LastDatagram = moment(known.tcp), moment(known.udp)
	since := uint32(0)
	if slices.Contains(lacks, "tcp") {
		since = known.tcp
	}
	if slices.Contains(lacks, "udp") {
		since = max(since, known.udp)
	}
	one.Since = moment(since)
	return one
}

// firstPrefixes returns the first prefix of each named device.
func (t *Traffic) firstPrefixes(devices []deviceKey) map[string]string {
	prefixes := make(map[string]string)
	for _, device := range devices {
		if device.name != "" {
			prefixes[device.name] = ""
		}
	}
	left := len(prefixes)
	if left == 0 {
		return prefixes
	}
	names := t.Mapping.Devices.Devices()
	for prefix, id := range t.Mapping.Devices.All() {
		if first, wanted := prefixes[names[id]]; wanted && first == "" {
			prefixes[names[id]] = prefix.String()
			if left--; left == 0 {
				break
			}
		}
	}
	return prefixes
}
