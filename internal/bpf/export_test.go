// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"errors"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"sockeye/internal/bpf/pin"
)

// Program returns the program of a row, or with sk_lookup the program of all rows.
func (s *Steer) Program(row int) *ebpf.Program { return s.programs[row] }

// Maps returns the maps that are pinned under their own names.
func (s *Steer) Maps() []*ebpf.Map {
	return []*ebpf.Map{
		s.tables, s.deviceMaps, s.hostMaps, s.slots, s.counters, s.devices,
		s.sockets, s.cookies, s.events, s.lost, s.listeners,
	}
}

// PendingPlaces returns the number of per-CPU entries that hold an address.
func (s *Steer) PendingPlaces(tb testing.TB) (used int) {
	tb.Helper()
	for i := range pendingSize {
		var perCPU []Pending
		if err := s.pending.Lookup(uint32(i), &perCPU); err != nil {
			tb.Fatal(err)
		}
		for _, p := range perCPU {
			if p.Address != (Address{}) {
				used++
			}
		}
	}
	return used
}

// Links returns the links of both kinds, pinned or not.
func (s *Steer) Links() []link.Link { return s.links }

// These functions return the programs that select sockets.
var (
	LoadSteerReuseport = loadSteerReuseport
	LoadSteerLookup    = loadSteerLookup
	LoadSteerMembers   = loadSteerMembers
)

// LoadTuneSockops and LoadTraceSockops return the maps of a tuning and a tracing.
var (
	LoadTuneSockops  = loadTuneSockops
	LoadTraceSockops = loadTraceSockops
)

// LayoutHash returns the hash of maps.
func LayoutHash(specs map[string]*ebpf.MapSpec) string { return pin.LayoutHash(specs, nil) }

// Maps returns the pinned maps of a tuning, by name.
func (t *Tune) Maps() map[string]*ebpf.Map { return t.maps }

// Dir returns the pin directory of a tuning with this layout.
func (t *Tune) Dir() string { return t.dir }

// Dir returns the pin directory of a tracing with this layout.
func (t *Trace) Dir() string { return t.dir }

// Maps returns the pinned maps of a tracing, by name.
func (t *Trace) Maps() map[string]*ebpf.Map { return t.maps }

// Links returns the links of a tracing, by the name of their pins.
func (t *Trace) Links() map[string]link.Link { return t.links }

// State returns the state that user space sets for the programs.
func (t *Trace) State(tb testing.TB) TraceState {
	tb.Helper()
	var s TraceState
	if err := t.maps["state"].Lookup(uint32(0), &s); err != nil {
		tb.Fatal(err)
	}
	return s
}

// AgeSlowest fills the entries of all minutes up to the given one with messages that took an hour.
func (t *Trace) AgeSlowest(tb testing.TB, group uint32, last uint64) {
	tb.Helper()
	var s TraceSlowest
	for minute := last; minute+uint64(TraceMinutes) > last; minute-- {
		m := &s.Minute[minute%uint64(TraceMinutes)]
		m.Minute, m.Count, m.Least = minute, uint32(len(m.Sample)), uint64(time.Hour)
		for i := range m.Sample {
			m.Sample[i].Total, m.Sample[i].Ended = uint64(time.Hour), minute*uint64(time.Minute)
		}
	}
	if err := t.maps["slowest"].Update(group, &s, ebpf.UpdateLock); err != nil {
		tb.Fatal(err)
	}
}

// DoubleMaps makes OpenSteer behave as a version with another layout of some maps, separated by commas.
func DoubleMaps(tb testing.TB, names string) {
	tb.Helper()
	doubledMaps = names
	tb.Cleanup(func() { doubledMaps = "" })
}

// SteerPins returns the name of a service's directory in this layout, and the names of the pins by map.
func SteerPins(tb testing.TB, base string, lookup bool) (dir string, names map[string]string) {
	tb.Helper()
	l, err := steerLayout(lookup)
	if err != nil {
		tb.Fatal(err)
	}
	return l.dir(base), l.names
}

// Hosts returns the map in force for prefixes of one address, nil if there is none, and whether next_hosts has a map.
func (s *Steer) Hosts(tb testing.TB) (hosts *ebpf.Map, next bool) {
	tb.Helper()
	var id ebpf.MapID
	next = s.nextHosts.Lookup(uint32(0), &id) == nil
	if err := s.hostMaps.Lookup(uint32(0), &id); errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil, next
	} else if err != nil {
		tb.Fatal(err)
	}
	hosts, err := ebpf.NewMapFromID(id)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { hosts.Close() })
	return hosts, next
}
