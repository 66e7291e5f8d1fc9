// SPDX-License-Identifier: Apache-2.0

// Package split keeps all TCP and UDP of a device at one member: it finds the connections at another member than the one
// that receives the datagrams of the device, and closes them.
package split

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/config"
	"sockeye/internal/events"
	"sockeye/internal/fault"
	"sockeye/internal/format"
	"sockeye/internal/member"
	"sockeye/internal/sockdiag"
	"sockeye/internal/steer/core"
	"sockeye/internal/steer/moves"
	"sockeye/internal/steer/rooms"
	"sockeye/internal/steer/session"
	"sockeye/internal/steer/stored"
)

// All TCP and UDP of a device must be at one member. A device is split if one of its TCP connections is with another
// process than the member that receives its datagrams. The slot of a device changes with the bucket table, the device
// map, the pins, and with the members of its slot and of the standby slot. After each such change, a check compares the
// owner of each connection (see owners.go) with the member that serves the device, and acts on the others: on_move
// governs connections that the member accepted as a registered member, and on_start the connections that it accepted
// before. The check depends on the present state only, so that it also finishes the work of an agent that was killed
// between a change and its check.
//
// The connections of a device stay open while no member serves the device, if they are all at one process: if they were
// closed, the device would be refused. A slot in maint is the exception, because its devices shall be refused.

// checkPasses are the delays between the passes of a check after a change. The later passes find connections whose SYN
// was processed before the change.
var checkPasses = []time.Duration{0, 20 * time.Millisecond, 40 * time.Millisecond, 240 * time.Millisecond, 700 * time.Millisecond, 2 * time.Second}

const (
	// checkInterval is the time between two checks without a change.
	checkInterval = 10 * time.Second
	// labelInterval is the minimum time between two scans of /proc.
	labelInterval = time.Second
	// maxScans is the maximum number of scans for the owner of one connection.
	maxScans = 10
	// maxNamed is the maximum number of devices in a message.
	maxNamed = 3
)

// Checks is the state of the connection checks of one service.
type Checks struct {
	*core.Service
	rooms *rooms.Rooms
	moves *moves.Moves

	timer   *time.Timer // timer of the next pass; nil while a check runs and no change has scheduled another one
	turn    int         // number of the scheduled check: a check that fired late gives way to a later one
	running bool        // a pass runs
	// flipping is set while a mapping is being installed: the check must not install another one.
	flipping bool
	passes   []time.Duration
	// served is the decision of the data path at the last pass.
	served *core.Serving
	// placed are the connections under on_start that have been at the right member once: on_move governs them.
	placed map[uint64]bool
	// missed counts the scans that found no owner of a connection. After maxScans, or if the owner has nothing to do with
	// the service, the connection is ignored.
	missed   map[uint64]int
	sought   map[uint64]bool // unlabeled connections that were looked for among the members
	labeled  time.Time       // end of the last scan of /proc
	split    []splitDevice
	closed   uint64                  // closed connections since the start of the agent
	err      error                   // error of the last SOCK_DESTROY
	adopters map[*member.Handle]bool // handles of former members that have adopted devices
}

// New returns the checks of a service.
func New(s *core.Service, r *rooms.Rooms, m *moves.Moves) *Checks {
	return &Checks{Service: s, rooms: r, moves: m, adopters: make(map[*member.Handle]bool)}
}

// Close stops the timer and closes the descriptors.
func (c *Checks) Close() {
	if c.timer != nil {
		c.timer.Stop()
	}
	for handle := range c.adopters {
		handle.Close()
	}
}

// Suspend lets no check run before resume is called.
func (c *Checks) Suspend() (resume func()) {
	c.running = true
	return func() { c.running = false }
}

// SplitDevices returns the number of split devices.
func (c *Checks) SplitDevices() int { return len(c.split) }

// SplitSessions returns the number of misplaced sessions of split devices.
func (c *Checks) SplitSessions() (n int) {
	for _, d := range c.split {
		n += len(d.Sessions)
	}
	return n
}

// ClosedSessions returns the number of connections that were closed since the start of the agent.
func (c *Checks) ClosedSessions() uint64 { return c.closed }

// Soon schedules the passes of a check after a change.
func (c *Checks) Soon() {
	if c.Events == nil {
		return
	}
	c.passes = checkPasses
	c.scheduleCheck()
}

func (c *Checks) scheduleCheck() {
	if c.timer != nil {
		c.timer.Stop()
	}
	delay := checkInterval
	if len(c.passes) > 0 {
		delay, c.passes = c.passes[0], c.passes[1:]
	}
	c.turn++
	turn := c.turn
	c.timer = time.AfterFunc(delay, func() { c.check(turn) })
}

// scheduleNext schedules the next pass at the end of a check, unless a change has scheduled one in the meantime.
func (c *Checks) scheduleNext() {
	if c.timer == nil {
		c.scheduleCheck()
	}
}

// check runs one pass, finds the owners of unlabeled connections, and schedules the next pass.
func (c *Checks) check(turn int) {
	c.Mu.Lock()
	if c.Events == nil || turn != c.turn {
		c.Mu.Unlock()
		return
	}
	c.timer = nil
	c.PruneAdopted()
	c.moves.ExpirePins()
	c.rooms.DeliverLate()
	missing := c.checkNow()
	seats := c.SeatIDs()
	scan := len(missing.sessions) > 0 && time.Since(c.labeled) >= labelInterval
	c.Mu.Unlock()
	if scan {
		c.label(missing.sessions, seats)
	}
	c.Mu.Lock()
	defer c.Mu.Unlock()
	if c.Events == nil {
		return
	}
	if scan {
		c.labeled = time.Now()
		missing = c.checkNow()
	}
	if (len(missing.sessions) > 0 || missing.waiting) && len(c.passes) == 0 {
		c.passes = []time.Duration{labelInterval}
	}
	c.scheduleNext()
}

// Moved runs a pass right after a change of the mapping, unless the members are not known yet, or the pass itself
// makes the change.
func (c *Checks) Moved() {
	if c.Events != nil && !c.Restoring && !c.running {
		c.flipping = true
		c.checkNow()
		c.flipping = false
	}
}

// checkNow runs one pass, and returns the connections whose owner is not known.
func (c *Checks) checkNow() unlabeled {
	c.running = true
	defer func() { c.running = false }()
	list, err := c.ReadSessions()
	if err != nil {
		c.Log.Warn("connections not checked", "error", err)
		return unlabeled{}
	}
	list = c.closeElsewhere(list)
	c.rooms.NoteSessions(list)
	c.rooms.NoteConnected(list)
	c.rooms.ReplayMoved()
	missing := c.findUnlabeled(list)
	if c.labelMembers(missing.sessions) {
		if again, err := c.ReadSessions(); err == nil {
			list = c.closeElsewhere(again)
			missing = c.findUnlabeled(list)
		}
	}
	unknown := make(map[uint64]bool)
	for _, one := range missing.sessions {
		unknown[one.Cookie] = true
	}
	now := c.rooms.ServingConnections()
	split := c.findSplit(now, list, unknown)
	if c.Config.OnStart == config.Adopt && !c.flipping && c.adoptDevices(split) {
		now = c.rooms.ServingConnections()
		split = c.findSplit(now, list, unknown)
	}
	misplaced := c.misplacedSessions(now, list, split, unknown)
	c.served = now
	if len(misplaced) > 0 {
		c.destroy(misplaced)
		split = c.remaining(split, misplaced)
	}
	if len(split) > 0 && len(split) != len(c.split) {
		c.Log.Warn("devices are split", events.DevicesSplit, "devices", len(split), "first", split[0].String(), "slot", split[0].slot, "at", fmt.Sprint(split[0].at))
	}
	if len(split) == 0 && len(c.split) > 0 {
		c.Log.Info("no device is split any more", events.DevicesRepaired, "devices", len(c.split))
	}
	c.split = split
	return missing
}

// splitDevice is a device with connections at other processes than the member that serves the device.
type splitDevice struct {
	session.Device       // only the misplaced sessions
	slot           int   // serving slot
	at             []int // slots of the other members; -1: no member
	partly         bool  // other sessions of the device are at the right member
}

// findSplit returns the split devices with their misplaced sessions, sorted by address.
func (c *Checks) findSplit(now *core.Serving, list []session.Session, unknown map[uint64]bool) (split []splitDevice) {
	slots := make(map[member.ID]int)
	for slot, seat := range c.Seats {
		slots[seat.ID()] = slot
	}
	placed := make(map[uint64]bool)
	for _, d := range session.ByDevice(now.Mapping, list) {
		slot, ok := now.Slot(d.Location.Slot)
		wrong := splitDevice{Device: *d, slot: slot}
		wrong.Sessions = nil
		divided := !ok && d.Owners(unknown) > 1
		for _, one := range d.Sessions {
			switch {
			case !one.Owned || unknown[one.Cookie] || one.Inode == 0 && !member.Alive(one.Owner.PID, one.Owner.StartTime):
			case !ok && !divided || ok && one.OwnerID() == now.Members[slot]:
				wrong.partly = true
				if !one.Owner.Steered && (ok || c.placed[one.Cookie]) {
					placed[one.Cookie] = true
				}
			default:
				at, seated := slots[one.OwnerID()]
				if !seated {
					at = -1
				}
				if !slices.Contains(wrong.at, at) {
					wrong.at = append(wrong.at, at)
				}
				if c.placed[one.Cookie] {
					placed[one.Cookie] = true
				}
				wrong.Sessions = append(wrong.Sessions, one)
			}
		}
		if len(wrong.Sessions) > 0 {
			slices.Sort(wrong.at)
			split = append(split, wrong)
		}
	}
	c.placed = placed
	slices.SortFunc(split, func(a, b splitDevice) int { return a.Address.Compare(b.Address) })
	return split
}

// underOnStart reports whether on_start governs a misplaced session, and not on_move.
func (c *Checks) underOnStart(one *session.Session) bool {
	return !one.Owner.Steered && !c.placed[one.Cookie]
}

// actsOnStart reports whether on_start closes connections now: devices that can be adopted are adopted by the next pass
// after a flip.
func (c *Checks) actsOnStart() bool {
	return c.Config.OnStart == config.Reset || c.Config.OnStart == config.Adopt && !c.flipping
}

// misplacedSessions returns the misplaced sessions that must be closed: those that on_start or on_move closes, handshakes of devices
// that have moved since the last pass from a member that still runs, and the sessions at slots in maint.
func (c *Checks) misplacedSessions(now *core.Serving, list []session.Session, split []splitDevice, unknown map[uint64]bool) (misplaced []session.Session) {
	for i := range split {
		for _, one := range split[i].Sessions {
			if c.underOnStart(&one) && c.actsOnStart() || !c.underOnStart(&one) && c.Config.OnMove == config.CloseMoved {
				misplaced = append(misplaced, one)
			}
		}
	}
	if c.Config.OnMove != config.CloseMoved {
		return misplaced
	}
	maint := make(map[member.ID]bool)
	for slot, seat := range c.Seats {
		if c.SlotState(slot).State == stored.Maint {
			maint[seat.ID()] = true
		}
	}
	before := c.served
	for _, one := range list {
		server, ok := now.Server(one.Address)
		switch {
		case one.State == sockdiag.SynRecv:
			if before == nil {
				continue
			}
			// A handshake cannot be at a process that no longer exists: the kernel has given it to the member that serves
			// the device now (tcp_migrate_req), or it began there before the agent noticed the exit.
			if was, did := before.Server(one.Address); did && was != server && (ok || maint[was]) && member.Alive(was.PID, was.StartTime) {
				misplaced = append(misplaced, one)
			}
		case !ok && one.Owned && !unknown[one.Cookie] && maint[one.OwnerID()]:
			misplaced = append(misplaced, one)
		}
	}
	return misplaced
}

// closedDevice is a device whose sessions were closed.
type closedDevice struct {
	name        string
	address     netip.Addr
	slot, from  int // from is -1 if the process has no slot
	connections int
}

// destroy closes sessions by SOCK_DESTROY.
func (c *Checks) destroy(list []session.Session) {
	conn, err := c.Diag()
	began, closed := time.Now(), 0
	slots := make(map[member.ID]int)
	for slot, seat := range c.Seats {
		slots[seat.ID()] = slot
	}
	devices := make(map[string]*closedDevice)
	for i := range list {
		if err == nil {
			err = conn.Destroy(&list[i].Socket)
		}
		if err != nil {
			break
		}
		closed++
		slot, name := c.Mapping.Slot(list[i].Address)
		key := session.Key(name, list[i].Address)
		if devices[key] == nil {
			devices[key] = &closedDevice{name: name, address: list[i].Address, slot: slot, from: -1}
		}
		devices[key].connections++
		if from, seated := slots[list[i].OwnerID()]; seated {
			devices[key].from = from
		}
	}
	for _, key := range slices.Sorted(maps.Keys(devices)) {
		d := devices[key]
		attrs := []any{events.DeviceMoved, "device", cmp.Or(d.name, d.address.String()), "address", d.address.String(), "slot", d.slot, "connections", d.connections}
		if d.from >= 0 {
			attrs = append(attrs, "from", d.from)
		}
		c.Log.Info("connections closed at the member of another slot", attrs...)
	}
	c.closed += uint64(closed)
	if closed > 0 {
		c.Log.Info("closed connections at a member of another slot", events.DevicesMoved, "devices", len(devices), "connections", closed,
			"first", list[0].Address.String(), "took", time.Since(began).Round(10*time.Microsecond).String())
	}
	if err != nil && c.err == nil {
		c.Log.Error("cannot close connections of split devices", "connections", len(list)-closed, "error", err)
	}
	c.err = err
}

// remaining returns the split devices without the sessions that were closed.
func (c *Checks) remaining(split []splitDevice, misplaced []session.Session) (list []splitDevice) {
	if c.err != nil {
		return split
	}
	closed := make(map[uint64]bool)
	for i := range misplaced {
		closed[misplaced[i].Cookie] = true
	}
	for _, d := range split {
		d.Sessions = slices.DeleteFunc(d.Sessions, func(one session.Session) bool { return closed[one.Cookie] })
		if len(d.Sessions) > 0 {
			list = append(list, d)
		}
	}
	return list
}

// Problem returns an error that names the split devices, or a connection of a stranger, or nil.
func (c *Checks) Problem() error {
	devices := c.split
	if len(devices) == 0 {
		return c.strangersProblem()
	}
	var names []string
	byOnStart := false
	for i := range devices {
		byOnStart = byOnStart || slices.ContainsFunc(devices[i].Sessions, func(one session.Session) bool { return c.underOnStart(&one) })
		if i < maxNamed {
			names = append(names, devices[i].String())
		}
	}
	if more := len(devices) - maxNamed; more > 0 {
		names = append(names, fmt.Sprintf("and %d more", more))
	}
	what := fmt.Sprintf("%s TCP connections at another member than their slot's: %s",
		format.Count(len(devices), "device has", "devices have"), strings.Join(names, ", "))
	hint := "sockeye devices marks them; they are closed within seconds"
	switch {
	case errors.Is(c.err, unix.EPERM):
		what += ": " + c.err.Error()
		hint = "the agent needs CAP_NET_ADMIN"
	case c.err != nil:
		what += ": " + c.err.Error()
		hint = "restart these members, so that their devices connect again"
	case byOnStart && c.Config.OnStart == config.Report:
		hint = "set on_start: reset, which closes such connections, or adopt, which leaves the device with that member; or restart the member"
	case !byOnStart && c.Config.OnMove == config.KeepMoved:
		hint = "set on_move: reset, which closes such connections; or restart the member"
	}
	return fault.WithHint(errors.New(what), hint)
}

// strangersTime is the time for which the connections of other users are taken for those of the last reading.
const strangersTime = 5 * time.Second

// strangersProblem returns an error if processes of other users have connections with the port of the service, or nil. Such a process may
// have accepted a device while nothing steered the port.
func (c *Checks) strangersProblem() error {
	if time.Since(c.Strangers.Read) > strangersTime {
		if _, err := c.ReadSessions(); err != nil {
			return nil // reported by the next check
		}
	}
	n, first := c.Strangers.Count, &c.Strangers.First
	if n == 0 {
		return nil
	}
	return fault.WithHint(fmt.Errorf("%s with the port of the service at a process of user %s, who has no members: %s to %s", format.Count(n, "connection", "connections"),
		member.UserName(first.UID), first.Remote, first.Local), "ss -tnp shows the process; end it, or add its user to the policy")
}
