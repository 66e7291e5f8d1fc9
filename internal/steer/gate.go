// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/config"
	"sockeye/internal/netns"
	"sockeye/internal/steer/core"
	"sockeye/internal/steer/keeper"
	"sockeye/internal/steer/placement"
	"sockeye/internal/steer/session"
)

// With pace, the slot of a newly registered member has a gate, so that not all its devices send their initial dump at
// the same time. The gate lets a number of SYNs pass, and holds the others: a listening socket of the agent, whose socket
// filter drops all packets, receives them. The device gets no answer and sends its SYN again after 1, 3, 7 s, and so on
// (RFC 6298); it is not refused. Datagrams pass.
//
// Every moveInterval, the agent counts the devices that are connected and send their initial dump, and lets as many SYNs
// pass as there is room for: pace.devices for each member. Forged SYNs, which lead to no connection, take room for one
// interval only. The gate opens when no device has waited for gateIdle, if most SYNs lead to no connection, or after
// gateLimit in any case. Without an agent the gate is open.

const (
	// gateIdle is the time without a waiting device after which the gate opens. It is shorter than the interval between the
	// SYNs of a waiting device.
	gateIdle = 10 * time.Second
	// heldTime is the age of a held SYN after which the device is considered gone. The longest interval between two
	// SYNs is 64 s (TCP_RTO_INITIAL, net.ipv4.tcp_syn_retries 6).
	heldTime = 70 * time.Second
	// gateLimit is the maximum time for which a gate is closed, in multiples of pace.timeout.
	gateLimit = 16
	// The gate opens if forgedSYNs SYNs have passed and less than one in forgedShare has led to a connection.
	forgedSYNs  = 64
	forgedShare = 8
)

// gate contains the closed gates of a service.
type gate struct {
	closed   map[int]time.Time // time at which a device was last waiting, by slot
	since    map[int]time.Time // time at which the gate closed, by slot
	admitted map[uint16]bool   // buckets of devices that are connected
	given    map[int]int       // passes of the present interval, by slot
	passed   map[int]int       // SYNs that have passed, by slot
	arrived  map[int]int       // devices that have connected, by slot
	waiting  int               // devices whose SYNs are held
	sockets  map[int]int       // descriptors by row
}

// closeGate closes the gate of a slot whose member was just registered.
func (s *service) closeGate(slot int) {
	if !s.Gateable() || s.Restoring {
		return
	}
	if err := s.openGateSockets(); err != nil {
		s.Log.Warn("devices are admitted at once", "slot", slot, "error", err)
		return
	}
	if err := s.Path.SetPasses(slot, s.Config.Pace.Devices); err != nil {
		s.Log.Warn("devices are admitted at once", "slot", slot, "error", err)
		return
	}
	s.gate.closed[slot], s.gate.since[slot] = time.Now(), time.Now()
	s.gate.given[slot], s.gate.passed[slot], s.gate.arrived[slot] = s.Config.Pace.Devices, 0, 0
	for bucket, of := range s.Mapping.Table.Bucket {
		if int(of) == slot {
			delete(s.gate.admitted, uint16(bucket))
		}
	}
	list, err := s.ReadSessions()
	if err != nil {
		s.Log.Warn("sessions not read", "error", err)
	}
	for _, d := range session.ByDevice(s.Mapping, list) {
		s.gate.admitted[uint16(d.Location.Bucket)] = true
	}
}

// shutBefore closes the gate of a slot before the slot is ready, so that no device passes in between.
func (s *service) shutBefore(slot int) error {
	s.closeGate(slot)
	if _, closed := s.gate.closed[slot]; !closed || s.Mapping == nil {
		return nil
	}
	if !s.moves.active() {
		s.moves.begin(fmt.Sprintf("the member of slot %d is new", slot), "")
	}
	s.scheduleMoves()
	return s.installMapping()
}

// gatedTable returns the bucket table in force with the flag of the closed gates.
func (s *service) gatedTable() *bpf.Table {
	table := s.Mapping.Table
	if len(s.gate.closed) == 0 {
		return &table
	}
	for bucket, slot := range table.Bucket {
		if _, closed := s.gate.closed[int(slot)]; closed && !s.gate.admitted[uint16(bucket)] {
			table.Bucket[bucket] |= bpf.Gated
		}
	}
	return &table
}

// controlGates notes the devices that have passed a gate, lets further SYNs pass, and opens the gates to which no further
// devices come. It reports whether the table must be installed.
func (s *service) controlGates() (changed bool) {
	s.gate.waiting = 0
	if len(s.gate.closed) == 0 {
		return false
	}
	list, err := s.ReadSessions()
	if err != nil {
		s.Log.Warn("sessions not read", "error", err)
		return false
	}
	connected := session.ByDevice(s.Mapping, list)
	for key, d := range connected {
		bucket := uint16(d.Location.Bucket)
		if _, closed := s.gate.closed[d.Location.Slot]; !closed || d.Location.Pinned || s.gate.admitted[bucket] {
			continue
		}
		s.gate.admitted[bucket], changed = true, true
		s.gate.arrived[d.Location.Slot]++
		if s.moves.running[key] == nil {
			s.moves.running[key] = &move{device: d.String(), slot: d.Location.Slot, gated: true, since: time.Now()}
		}
	}
	now := core.Since(unix.CLOCK_MONOTONIC)
	for address, seen := range s.Path.Devices() {
		age := now - time.Duration(uint64(seen.Held)<<30)
		if seen.Held == 0 || age > heldTime {
			continue
		}
		addr := placement.Addr(address)
		at := s.Mapping.Locate(addr)
		if _, closed := s.gate.closed[at.Slot]; !closed || at.Pinned || connected[session.Key(at.Device, addr)] != nil {
			continue
		}
		s.gate.waiting++
		s.gate.closed[at.Slot] = time.Now()
	}
	free := s.freeMoves()
	for slot, last := range s.gate.closed {
		limit := gateLimit * time.Duration(s.timeoutOfMoves()) * time.Microsecond
		left, err := s.Path.Passes(slot)
		if err != nil {
			s.Log.Error("devices wait", "slot", slot, "error", err)
		}
		s.gate.passed[slot] += max(0, s.gate.given[slot]-left)
		forged := s.gate.passed[slot] >= forgedSYNs && s.gate.arrived[slot]*forgedShare < s.gate.passed[slot]
		if forged || time.Since(last) >= gateIdle || time.Since(s.gate.since[slot]) >= limit {
			delete(s.gate.closed, slot)
			changed = true
			s.Log.Info("gate opened", "slot", slot, "closed", time.Since(s.gate.since[slot]).Round(time.Second).String(),
				"passed", s.gate.passed[slot], "connected", s.gate.arrived[slot])
			continue
		}
		s.gate.given[slot] = max(0, free[slot])
		if err := s.Path.SetPasses(slot, s.gate.given[slot]); err != nil {
			s.Log.Error("devices wait", "slot", slot, "error", err)
		}
	}
	if len(s.gate.closed) == 0 {
		s.closeGateSockets()
	}
	return changed
}

// openGateSockets opens the socket of the gate for each TCP listener.
func (s *service) openGateSockets() error {
	for row, l := range s.Listeners {
		if _, open := s.gate.sockets[row]; open || l.Protocol != config.TCP {
			continue
		}
		fd, err := s.openGateSocket(row)
		if err != nil {
			s.closeGateSockets()
			return fmt.Errorf("open the gate socket of %s: %w", l, err)
		}
		s.gate.sockets[row] = fd
	}
	return nil
}

// dropAll is a socket filter that drops all packets: return 0.
var dropAll = []unix.SockFilter{{Code: unix.BPF_RET | unix.BPF_K}}

func (s *service) openGateSocket(row int) (fd int, err error) {
	drop := func(fd int) error { return keeper.AttachFilter(fd, dropAll) }
	if s.UsesLookup() {
		err = netns.Do(s.SocketNetns(), func() error {
			fd, err = keeper.OpenAnywhere(s.Rows[row], drop)
			return err
		})
	} else {
		owner, known := s.GroupOwner()
		if !known {
			return -1, errors.New("the user of the members is not known")
		}
		fd, err = keeper.OpenSocket(s.Rows[row], owner, s.SocketNetns(), func(fd int) error {
			return errors.Join(drop(fd), s.Path.Attach(row, fd))
		})
	}
	if err != nil {
		return -1, err
	}
	if err := s.Path.InsertGate(row, fd); err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

func (s *service) closeGateSockets() {
	for row, fd := range s.gate.sockets {
		unix.Close(fd)
		delete(s.gate.sockets, row)
	}
	clear(s.gate.admitted)
	clear(s.gate.closed)
}

// freeMoves returns the number of devices that may begin to move to each slot.
func (s *service) freeMoves() map[int]int {
	free := make(map[int]int)
	for slot := range s.Config.Slots {
		free[slot] = s.Config.Pace.Devices
	}
	for _, m := range s.moves.running {
		free[m.slot]--
	}
	return free
}

// closedGates returns the slots with a closed gate.
func (s *service) closedGates() []int {
	return slices.AppendSeq([]int{}, slices.Values(slices.Sorted(maps.Keys(s.gate.closed))))
}
