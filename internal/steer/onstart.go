// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/config"
	"sockeye/internal/fault"
	"sockeye/internal/format"
	"sockeye/internal/member"
	"sockeye/internal/netns"
	"sockeye/internal/sockdiag"
	"sockeye/internal/steer/placement"
)

// A device is split if its TCP connections are with another process than the member of its slot, which receives its
// datagrams. Most devices are split if the agent starts after members and devices, because the kernel's hash has
// distributed the connections. A check finds split devices by sock_diag once members are registered, and acts as
// on_start of the policy requires.
//
// A check considers a connection if its socket belongs to a member, to another process that listens on the port of the
// service, or to a descendant of either. Other processes may use the same local port for other purposes. The connections
// of a device whose slot has no member stay open: if they were closed, the device would be refused.
//
// Only suspects are repaired: connections that were open when the agent started, or when the slot of their process
// opened for the first time. Connections that a later policy splits are only counted.

const (
	// checkDelay is the delay of a check after its trigger, because many slots open at the same time.
	checkDelay = 200 * time.Millisecond
	// repairInterval is the time between two repairing checks, while some connections cannot be assigned yet, for
	// example because no process has accepted them.
	repairInterval = time.Second
	// maxChecks is the maximum number of repairing checks after a trigger.
	maxChecks = 10
	// countInterval is the time between two counting checks, while a device is split.
	countInterval = 10 * time.Second
	// maxNamed is the maximum number of devices in a problem message.
	maxNamed = 3
)

// adoptedDevice is a device that is assigned to another member than that of its slot by the hash, until that member
// exits.
type adoptedDevice struct {
	member.ID
	Device  string     `json:"device,omitempty"` // name in the device map
	Address netip.Addr `json:"address"`          // address of a device without a name
	Slot    int        `json:"slot"`
}

// checks is the state of the connection checks of one service.
type checks struct {
	timer *time.Timer // timer of the next check; nil if none is due
	left  int         // remaining repairing checks
	// all makes all connections suspects; fresh makes those of slots that have just opened suspects.
	all      bool
	fresh    map[int]bool
	suspects map[uint64]bool // by cookie
	split    []splitDevice
	err      error // error of the last repair
}

// splitDevice is a split device and its connections with other processes than the member of its slot.
type splitDevice struct {
	name        string     // name in the device map, or ""
	address     netip.Addr // remote address of one connection
	slot        int
	memberSlots map[int]bool // slots whose members have its connections; -1: no member
	connections []sockdiag.Socket
}

func (d *splitDevice) String() string {
	if d.name != "" {
		return d.name
	}
	return d.address.String()
}

// suspectAll schedules checks that repair all open connections.
func (s *service) suspectAll() {
	s.checks.all = true
	s.checks.left = maxChecks
	s.scheduleCheck(checkDelay)
}

// suspectSlot schedules checks that repair the connections of a slot's member, and earlier suspects whose devices have
// that slot.
func (s *service) suspectSlot(slot int) {
	s.checks.fresh[slot] = true
	s.checks.left = maxChecks
	s.scheduleCheck(checkDelay)
}

// clearSuspects clears the suspects before a policy change, which may move devices: until then the connections were
// with the right member.
func (s *service) clearSuspects() {
	s.checks.all, s.checks.suspects = false, nil
	clear(s.checks.fresh)
}

func (s *service) scheduleCheck(delay time.Duration) {
	if s.checks.timer != nil {
		s.checks.timer.Stop()
	}
	// The check runs without the lock, because it takes about 1 s on a host with many processes.
	s.checks.timer = time.AfterFunc(delay, s.checkConnections)
}

// connectionScan contains the established connections to the service and the slots of their processes.
type connectionScan struct {
	connections []sockdiag.Socket
	slots       map[uint32][]int // of the owners of each by inode; -1: no member that is known
	unaccepted  bool             // some connections are not accepted yet
}

func (s *service) checkConnections() {
	s.mu.Lock()
	if s.events == nil {
		s.mu.Unlock()
		return
	}
	s.checks.timer = nil
	s.pruneAdopted()
	conn, err := s.openDiag()
	seats, registrations, mapping := s.seatPIDs(), s.registrations, s.mapping
	source := slices.Collect(maps.Values(s.listeners))
	s.mu.Unlock()
	if err != nil {
		s.log.Warn("connections not checked", "error", err)
		return
	}
	defer conn.Close()
	found, err := findConnections(conn, source, seats)

	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.events == nil:
		return
	case err != nil:
		s.log.Warn("connections not checked", "error", err)
		return
	case registrations != s.registrations || mapping != s.mapping || !maps.Equal(seats, s.seatPIDs()):
		s.scheduleCheck(checkDelay) // the members have changed during the scan
		return
	}
	s.updateSuspects(found)
	devices := s.findSplitDevices(found)
	again := found.unaccepted
	if suspects := s.suspectDevices(devices); s.checks.left > 0 && len(suspects) > 0 {
		var mended bool
		mended, s.checks.err = s.repair(conn, suspects)
		again = again || mended
	}
	s.checks.split = devices
	s.checks.left--
	if !found.unaccepted || s.checks.left <= 0 {
		s.checks.all = false
		clear(s.checks.fresh)
	}
	switch {
	case again && s.checks.left > 0:
		s.scheduleCheck(repairInterval)
	case len(devices) > 0:
		s.scheduleCheck(countInterval)
	}
}

// updateSuspects adds new suspects, and deletes closed connections.
func (s *service) updateSuspects(found *connectionScan) {
	before := s.checks.suspects
	s.checks.suspects = make(map[uint64]bool)
	for _, c := range found.connections {
		fresh := slices.ContainsFunc(found.slots[c.Inode], func(slot int) bool { return s.checks.fresh[slot] })
		if s.checks.all || fresh || before[c.Cookie] {
			s.checks.suspects[c.Cookie] = true
		}
	}
}

// suspectDevices returns the devices that have suspect connections, with these connections only.
func (s *service) suspectDevices(devices []splitDevice) (list []splitDevice) {
	for _, d := range devices {
		d.connections = slices.DeleteFunc(slices.Clone(d.connections), func(c sockdiag.Socket) bool { return !s.checks.suspects[c.Cookie] })
		if len(d.connections) > 0 {
			list = append(list, d)
		}
	}
	return list
}

// openDiag opens sock_diag in the service's network namespace.
func (s *service) openDiag() (conn *sockdiag.Conn, err error) {
	err = netns.Do(s.socketNetns(), func() error {
		conn, err = sockdiag.Open()
		return err
	})
	return conn, err
}

// seatPIDs returns the slots of the members by process id.
func (s *service) seatPIDs() map[int]int {
	pids := make(map[int]int)
	for slot, seat := range s.seats {
		pids[seat.process.PID] = slot
	}
	return pids
}

// findConnections reads the established connections to listeners, and finds the slots of their processes.
func findConnections(conn *sockdiag.Conn, source []config.Listener, seats map[int]int) (*connectionScan, error) {
	var found connectionScan
	listening := make(map[uint32]bool)
	wanted := make(map[uint32]bool)
	states := sockdiag.States(0).With(sockdiag.Established).With(sockdiag.Listening)
	var before []sockdiag.Socket
	for _, l := range source {
		if l.Protocol != config.TCP {
			continue
		}
		begin := func() { found.connections = slices.Clone(before) }
		err := conn.Dump(sockdiag.Query{States: states, LocalPort: l.Address.Port()}, begin, func(socket *sockdiag.Socket) {
			switch {
			case !acceptedBy(l, socket):
			case socket.State == sockdiag.Listening:
				listening[socket.Inode] = true
			case socket.Inode == 0:
				found.unaccepted = true
			default:
				wanted[socket.Inode] = true
				found.connections = append(found.connections, *socket)
			}
		})
		if err != nil {
			return nil, err
		}
		before = found.connections
	}
	if len(found.connections) == 0 {
		return &found, nil
	}
	owners, _, err := sockdiag.ReadProcesses(func(inode uint32) bool { return wanted[inode] || listening[inode] })
	if err != nil {
		return nil, err
	}
	listeners := make(map[int]bool)
	for inode := range listening {
		for _, p := range owners[inode] {
			listeners[p.PID] = true
		}
	}
	family := processTree{seats: seats, listeners: listeners, parents: make(map[int]int)}
	found.slots = make(map[uint32][]int)
	for inode := range wanted {
		for _, p := range owners[inode] {
			if slot, ok := family.slot(p.PID); ok {
				found.slots[inode] = append(found.slots[inode], slot)
			}
		}
	}
	return &found, nil
}

// acceptedBy reports whether the local address of a TCP socket belongs to a listener.
func acceptedBy(l config.Listener, socket *sockdiag.Socket) bool {
	addr := socket.Local.Addr()
	switch {
	case l.Address.Addr() == netip.IPv4Unspecified():
		return addr.Is4()
	case l.Address.Addr() == netip.IPv6Unspecified():
		return !l.V6Only || addr.Is6()
	}
	return addr.WithZone("") == l.Address.Addr()
}

// processTree finds the member that is an ancestor of a process.
type processTree struct {
	seats     map[int]int
	listeners map[int]bool
	parents   map[int]int
}

// slot returns the slot of a process: that of the process itself or of its nearest ancestor that is a member, or -1 if
// no ancestor is a member and one listens on the port of the service. ok is false if neither is the case.
func (f *processTree) slot(pid int) (slot int, ok bool) {
	const generations = 32
	for range generations {
		if slot, seated := f.seats[pid]; seated {
			return slot, true
		}
		ok = ok || f.listeners[pid]
		parent, read := f.parents[pid]
		if !read {
			if p, err := member.Read(pid); err == nil {
				parent = p.Parent
			}
			f.parents[pid] = parent
		}
		if parent <= 1 {
			break
		}
		pid = parent
	}
	return -1, ok
}

// servingSlot returns the slot that serves an address at present: its slot, or the standby slot. ok is false if no
// member serves the address.
func (s *service) servingSlot(addr netip.Addr) (slot int, device string, ok bool) {
	slot, device = s.mapping.Slot(addr)
	if s.seats[slot] == nil && s.config.Standby != nil {
		slot = *s.config.Standby
	}
	return slot, device, s.seats[slot] != nil
}

// findSplitDevices returns the split devices with all their misplaced connections, and deletes the others from the
// suspects.
func (s *service) findSplitDevices(found *connectionScan) []splitDevice {
	devices := make(map[string]*splitDevice)
	split := make(map[string]bool)
	for _, c := range found.connections {
		slots := found.slots[c.Inode]
		addr := c.Remote.Addr().WithZone("")
		slot, name, ok := s.servingSlot(addr)
		if len(slots) == 0 || !ok {
			continue
		}
		key := addr.String()
		if name != "" {
			key = name + "/" // differs from all addresses
		}
		d := devices[key]
		if d == nil {
			d = &splitDevice{name: name, address: addr, slot: slot, memberSlots: make(map[int]bool)}
			devices[key] = d
		}
		if slices.Contains(slots, slot) {
			d.memberSlots[slot] = true
			delete(s.checks.suspects, c.Cookie)
			continue
		}
		split[key] = true
		d.memberSlots[slots[0]] = true
		d.connections = append(d.connections, c)
	}
	var list []splitDevice
	for key := range split {
		list = append(list, *devices[key])
	}
	slices.SortFunc(list, func(a, b splitDevice) int { return a.address.Compare(b.address) })
	return list
}

// repair acts on split devices as on_start requires, and returns whether it changed anything.
func (s *service) repair(conn *sockdiag.Conn, devices []splitDevice) (bool, error) {
	if s.config.OnStart == config.Report {
		if len(devices) != len(s.checks.split) {
			s.log.Warn("devices have connections at a member of another slot", "devices", len(devices), "first", devices[0].String())
		}
		return false, nil
	}
	if s.config.OnStart == config.Adopt {
		devices = s.adoptDevices(devices)
	}
	closed := 0
	for i := range devices {
		for j := range devices[i].connections {
			if err := conn.Destroy(&devices[i].connections[j]); err != nil {
				s.log.Error("cannot close connections of split devices", "devices", len(devices), "error", err)
				return false, err
			}
			closed++
		}
	}
	if closed > 0 {
		s.log.Warn("closed connections at a member of another slot", "devices", len(devices), "connections", closed, "first", devices[0].String())
	}
	return true, nil
}

// adoptDevices assigns each device whose connections are all with one member to the slot of that member, and returns
// the other devices.
func (s *service) adoptDevices(devices []splitDevice) (others []splitDevice) {
	before := slices.Clone(s.state.Adopted)
	for _, d := range devices {
		at := slices.Collect(maps.Keys(d.memberSlots))
		if len(at) != 1 || s.seats[at[0]] == nil {
			others = append(others, d)
			continue
		}
		p := s.seats[at[0]].process
		a := adoptedDevice{ID: member.ID{PID: p.PID, StartTime: p.StartTime}, Device: d.name, Slot: at[0]}
		if d.name == "" {
			a.Address = d.address
		}
		s.state.Adopted = append(s.state.Adopted, a)
	}
	count := len(s.state.Adopted) - len(before)
	if count == 0 {
		return others
	}
	// The state is saved first: after a crash before installMapping, the next agent installs the same mapping.
	err := s.state.save(s.statePath())
	if err == nil {
		err = s.installMapping()
	}
	if err != nil {
		s.log.Error("cannot adopt devices", "devices", count, "error", err)
		s.state.Adopted = before
		return others
	}
	s.log.Warn("devices adopted by the member that has their connections", "devices", count)
	return others
}

// pruneAdopted returns adopted devices to their own slots after the exit of their member, which has closed all their
// connections.
func (s *service) pruneAdopted() {
	kept := slices.DeleteFunc(slices.Clone(s.state.Adopted), func(a adoptedDevice) bool {
		if seat := s.seats[a.Slot]; seat != nil {
			return seat.process.PID != a.PID || seat.process.StartTime != a.StartTime
		}
		return !member.Alive(a.PID, a.StartTime)
	})
	if len(kept) == len(s.state.Adopted) {
		return
	}
	s.log.Info("devices returned to their own slot", "devices", len(s.state.Adopted)-len(kept))
	s.state.Adopted = kept
	if s.path == nil {
		return
	}
	if err := errors.Join(s.installMapping(), s.state.save(s.statePath())); err != nil {
		s.log.Error("cannot return devices to their own slot", "error", err)
	}
}

// hasAdoptedDevices reports whether devices are adopted for a member.
func (s *service) hasAdoptedDevices(seat *seat) bool {
	return slices.ContainsFunc(s.state.Adopted, func(a adoptedDevice) bool {
		return a.PID == seat.process.PID && a.StartTime == seat.process.StartTime
	})
}

// forgetAdopter releases the adopted devices of a member that has exited.
func (s *service) forgetAdopter(handle *member.Handle) {
	if s.adopters[handle] {
		delete(s.adopters, handle)
		handle.Close()
	}
	s.pruneAdopted()
}

// exceptions returns the adopted devices for the mapping.
func (s *service) exceptions() placement.Exceptions {
	e := placement.Exceptions{Names: make(map[string]int), Addresses: make(map[netip.Addr]int)}
	for _, a := range s.state.Adopted {
		if a.Device != "" {
			e.Names[a.Device] = a.Slot
		} else {
			e.Addresses[a.Address] = a.Slot
		}
	}
	return e
}

// splitProblem returns an error that names the split devices, or nil.
func (s *service) splitProblem() error {
	devices := s.checks.split
	if len(devices) == 0 {
		return nil
	}
	var names []string
	for i := range devices {
		if i == maxNamed {
			names = append(names, fmt.Sprintf("and %d more", len(devices)-maxNamed))
			break
		}
		names = append(names, devices[i].String())
	}
	what := fmt.Sprintf("%s TCP connections at another member than their slot's: %s",
		format.Count(len(devices), "device has", "devices have"), strings.Join(names, ", "))
	hint := fmt.Sprintf("restart the agent, and on_start: %s acts on them; or restart the member", s.config.OnStart)
	switch {
	case s.config.OnStart == config.Report:
		hint = "set on_start: reset, which closes such connections, or adopt, which leaves the device with that member, and restart the agent; or restart the member"
	case s.checks.left > 0 && len(s.suspectDevices(devices)) > 0:
		hint = fmt.Sprintf("on_start: %s acts on them within seconds", s.config.OnStart)
	}
	if s.checks.err != nil {
		what += ": " + s.checks.err.Error()
		hint = "restart these members, so that their devices connect again"
		if errors.Is(s.checks.err, unix.EPERM) {
			hint = "the agent needs CAP_NET_ADMIN"
		}
	}
	return fault.WithHint(errors.New(what), hint)
}
