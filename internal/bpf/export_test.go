// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
)

// Program is the program of a row, or the one for all rows with sk_lookup.
func (s *Steer) Program(row int) *ebpf.Program { return s.programs[row] }

// Maps are the maps that are pinned under their own names.
func (s *Steer) Maps() []*ebpf.Map {
	return []*ebpf.Map{
		s.tables, s.deviceMaps, s.slots, s.counters, s.devices,
		s.sockets, s.cookies, s.events, s.lost, s.listeners,
	}
}

// Links are the links of both kinds, pinned and not.
func (s *Steer) Links() []link.Link { return s.links }

// LacksHelper is what tells an older kernel from a broken program.
var LacksHelper = lacksHelper

// LoadSteering gives the programs that select sockets.
var (
	LoadSteerReuseport = loadSteerReuseport
	LoadSteerLookup    = loadSteerLookup
	LoadSteerMembers   = loadSteerMembers
)
