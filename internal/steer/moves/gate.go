// SPDX-License-Identifier: Apache-2.0

package moves

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/clock"
	"sockeye/internal/config"
	"sockeye/internal/events"
	"sockeye/internal/fault"
	"sockeye/internal/netns"
	"sockeye/internal/placement"
	"sockeye/internal/steer/keeper"
	"sockeye/internal/steer/session"
)

// With pace, the slot of a newly registered member has a gate, so that not all its devices send their initial dump at
// the same time. The gate lets a number of SYNs pass, and holds the others: a listening socket of the agent, whose socket
// filter drops all packets, receives them. The device gets no answer and sends its SYN again after 1, 3, 7 s, and so on
// (RFC 6298); it is not refused. Datagrams pass.
//
// Every moveInterval, the agent counts the devices that are connected and send their initial dump, and lets as many SYNs
// pass as there is room for: pace.devices for each member. A SYN takes room until the end of the next interval: its connection may take a
// round trip. Forged SYNs lead to no connection, and take room for no longer. The gate opens when no device has waited for gateIdle, if most SYNs lead to no connection, or after
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
	forgedSYNs  = 32
	forgedShare = 8
)

// gate contains the closed gates of a service.
type gate struct {
	closed   map[int]time.Time // time at which a device was last waiting, by slot
	since    map[int]time.Time // time at which the gate closed, by slot
	admitted map[uint16]bool   // buckets of devices that are connected
	given    map[int]int       // passes of the present interval, by slot
	pending  map[int]int       // SYNs that have passed in the last interval, and whose devices have not connected, by slot
	passed   map[int]int       // SYNs that have passed, by slot
	arrived  map[int]int       // devices that have connected, by slot
	waiting  int               // devices whose SYNs are held
	sockets  map[int]int       // descriptors by row
}

// ShutBefore closes the gate of a slot before the slot is ready, so that no device passes in between.
func (m *Moves) ShutBefore(slot int) error {
	m.closeGate(slot)
	if _, closed := m.gate.closed[slot]; !closed || m.Mapping == nil {
		return nil
	}
	if !m.active() {
		m.Begin(fmt.Sprintf("the member of slot %d is new", slot), "")
	}
	m.scheduleMoves()
	return m.Actions.InstallMapping()
}

// closeGate closes the gate of a slot whose member was just registered.
func (m *Moves) closeGate(slot int) {
	if !m.Gateable() || m.Restoring {
		return
	}
	if err := m.openGateSockets(); err != nil {
		m.Log.Warn("devices are admitted at once", "slot", slot, "error", err)
		return
	}
	if err := m.Path.SetPasses(slot, m.Config.Pace.Devices); err != nil {
		m.Log.Warn("devices are admitted at once", "slot", slot, "error", err)
		return
	}
	m.gate.closed[slot], m.gate.since[slot] = time.Now(), time.Now()
	m.gate.given[slot], m.gate.pending[slot], m.gate.passed[slot], m.gate.arrived[slot] = m.Config.Pace.Devices, 0, 0, 0
	for bucket, of := range m.Mapping.Table.Bucket {
		if int(of) == slot {
			delete(m.gate.admitted, uint16(bucket))
		}
	}
	list, err := m.ReadSessions()
	if err != nil {
		m.Log.Warn("sessions not read", "error", err)
	}
	for _, d := range session.ByDevice(m.Mapping, list) {
		m.gate.admitted[uint16(d.Location.Bucket)] = true
	}
}

// GatedTable returns the bucket table in force with the flag of the closed gates.
func (m *Moves) GatedTable() *bpf.Table {
	table := m.Mapping.Table
	if len(m.gate.closed) == 0 {
		return &table
	}
	for bucket, slot := range table.Bucket {
		if _, closed := m.gate.closed[int(slot)]; closed && !m.gate.admitted[uint16(bucket)] {
			table.Bucket[bucket] |= bpf.Gated
		}
	}
	return &table
}

// controlGates notes the devices that have passed a gate, lets further SYNs pass, and opens the gates to which no further
// devices come. It reports whether the table must be installed.
func (m *Moves) controlGates() (changed bool) {
	m.gate.waiting = 0
	if len(m.gate.closed) == 0 {
		return false
	}
	list, err := m.ReadSessions()
	if err != nil {
		m.Log.Warn("sessions not read", "error", err)
		return false
	}
	connected, arrived := session.ByDevice(m.Mapping, list), make(map[int]int)
	for key, d := range connected {
		bucket := uint16(d.Location.Bucket)
		if _, closed := m.gate.closed[d.Location.Slot]; !closed || d.Location.Pinned || m.gate.admitted[bucket] {
			continue
		}
		m.gate.admitted[bucket], changed = true, true
		m.gate.arrived[d.Location.Slot]++
		arrived[d.Location.Slot]++
		if m.running[key] == nil {
			m.running[key] = &move{device: d.String(), slot: d.Location.Slot, gated: true, since: time.Now()}
		}
	}
	now := clock.Monotonic()
	for address, seen := range m.Path.Devices() {
		age := now - time.Duration(uint64(seen.Held)<<30)
		if seen.Held == 0 || age > heldTime {
			continue
		}
		addr := placement.Addr(address)
		at := m.Mapping.Locate(addr)
		if _, closed := m.gate.closed[at.Slot]; !closed || at.Pinned || connected[session.Key(at.Device, addr)] != nil {
			continue
		}
		m.gate.waiting++
		m.gate.closed[at.Slot] = time.Now()
	}
	free := m.freeMoves()
	for slot, last := range m.gate.closed {
		limit := gateLimit * time.Duration(m.timeoutOfMoves()) * time.Microsecond
		left, err := m.Path.Passes(slot)
		if err != nil {
			m.Log.Error("devices wait", "slot", slot, "error", err)
		}
		passed := max(0, m.gate.given[slot]-left)
		m.gate.passed[slot] += passed
		m.gate.pending[slot] = pendingSYNs(m.gate.pending[slot], passed, arrived[slot])
		settled := m.gate.passed[slot] - m.gate.pending[slot]
		forged := settled >= forgedSYNs && m.gate.arrived[slot]*forgedShare < settled
		if forged || time.Since(last) >= gateIdle || time.Since(m.gate.since[slot]) >= limit {
			delete(m.gate.closed, slot)
			changed = true
			m.Log.Info("gate opened", events.GateOpened, "slot", slot, "closed", time.Since(m.gate.since[slot]).Round(time.Second).String(),
				"passed", m.gate.passed[slot], "connected", m.gate.arrived[slot])
			continue
		}
		m.gate.given[slot] = max(0, free[slot]-m.gate.pending[slot])
		if err := m.Path.SetPasses(slot, m.gate.given[slot]); err != nil {
			m.Log.Error("devices wait", "slot", slot, "error", err)
		}
	}
	if len(m.gate.closed) == 0 {
		m.CloseGateSockets()
	}
	return changed
}

// pendingSYNs returns the number of SYNs that have passed a gate in an interval, and whose devices may still connect. before is the number
// of the interval before: these devices connect first.
func pendingSYNs(before, passed, arrived int) int {
	return min(passed, max(0, before+passed-arrived))
}

// openGateSockets opens the socket of the gate for each TCP listener.
func (m *Moves) openGateSockets() error {
	for row, l := range m.Listeners {
		if _, open := m.gate.sockets[row]; open || l.Protocol != config.TCP {
			continue
		}
		fd, err := m.openGateSocket(row)
		if err != nil {
			m.CloseGateSockets()
			return fmt.Errorf("open the gate socket of %s: %w", l, err)
		}
		m.gate.sockets[row] = fd
	}
	return nil
}

// dropAll is a socket filter that drops all packets: return 0.
var dropAll = []unix.SockFilter{{Code: unix.BPF_RET | unix.BPF_K}}

func (m *Moves) openGateSocket(row int) (fd int, err error) {
	drop := func(fd int) error { return keeper.AttachFilter(fd, dropAll) }
	if m.UsesLookup() {
		err = netns.Do(m.SocketNetns(), func() error {
			fd, err = keeper.OpenAnywhere(m.Rows[row], drop)
			return err
		})
	} else {
		owner, known := m.GroupOwner()
		if !known {
			return -1, errors.New("the user of the members is not known")
		}
		fd, err = keeper.OpenSocket(m.Rows[row], owner, m.SocketNetns(), func(fd int) error {
			return fault.Join(drop(fd), m.Attach(row, fd))
		})
	}
	if err != nil {
		return -1, err
	}
	if err := m.Path.InsertGate(row, fd); err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// CloseGateSockets opens all gates.
func (m *Moves) CloseGateSockets() {
	for row, fd := range m.gate.sockets {
		unix.Close(fd)
		delete(m.gate.sockets, row)
	}
	clear(m.gate.admitted)
	clear(m.gate.closed)
}

// closedGates returns the slots with a closed gate.
func (m *Moves) closedGates() []int {
	return slices.AppendSeq([]int{}, slices.Values(slices.Sorted(maps.Keys(m.gate.closed))))
}
