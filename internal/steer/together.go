// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/config"
	"sockeye/internal/fault"
	"sockeye/internal/format"
	"sockeye/internal/member"
	"sockeye/internal/sockdiag"
	"sockeye/internal/steer/core"
	"sockeye/internal/steer/session"
	"sockeye/internal/steer/stored"
)

// All TCP and UDP of a device must be at one member. A device is split if one of its TCP connections is with another
// process than the member that receives its datagrams. The slot of a device changes with the bucket table, the device
// map, the pins, and with the members of its slot and of the standby slot. After each such change, a check compares the
// owner of each connection (see sessions.go) with the member that serves the device, and acts on the others: on_move
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

// checks is the state of the connection checks of one service.
type checks struct {
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
	missed  map[uint64]int
	sought  map[uint64]bool // unlabeled connections that were looked for among the members
	labeled time.Time       // end of the last scan of /proc
	split   []splitDevice
	closed  uint64 // closed connections since the start of the agent
	err     error  // error of the last SOCK_DESTROY
}

// splitDevice is a device with connections at other processes than the member that serves the device.
type splitDevice struct {
	session.Device       // only the misplaced sessions
	slot           int   // serving slot
	at             []int // slots of the other members; -1: no member
	partly         bool  // other sessions of the device are at the right member
}

// CheckSoon schedules the passes of a check after a change.
func (s *service) CheckSoon() {
	if s.Events == nil {
		return
	}
	s.checks.passes = checkPasses
	s.scheduleCheck()
}

func (s *service) scheduleCheck() {
	if s.checks.timer != nil {
		s.checks.timer.Stop()
	}
	delay := checkInterval
	if len(s.checks.passes) > 0 {
		delay, s.checks.passes = s.checks.passes[0], s.checks.passes[1:]
	}
	s.checks.turn++
	turn := s.checks.turn
	s.checks.timer = time.AfterFunc(delay, func() { s.check(turn) })
}

// scheduleNext schedules the next pass at the end of a check, unless a change has scheduled one in the meantime.
func (s *service) scheduleNext() {
	if s.checks.timer == nil {
		s.scheduleCheck()
	}
}

// check runs one pass, finds the owners of unlabeled connections, and schedules the next pass.
func (s *service) check(turn int) {
	s.Mu.Lock()
	if s.Events == nil || turn != s.checks.turn {
		s.Mu.Unlock()
		return
	}
	s.checks.timer = nil
	s.pruneAdopted()
	s.moves.ExpirePins()
	s.rooms.ReleaseLate()
	missing := s.checkNow()
	seats := s.SeatIDs()
	scan := len(missing.sessions) > 0 && time.Since(s.checks.labeled) >= labelInterval
	s.Mu.Unlock()
	if scan {
		s.label(missing.sessions, seats)
	}
	s.Mu.Lock()
	defer s.Mu.Unlock()
	if s.Events == nil {
		return
	}
	if scan {
		s.checks.labeled = time.Now()
		missing = s.checkNow()
	}
	if (len(missing.sessions) > 0 || missing.waiting) && len(s.checks.passes) == 0 {
		s.checks.passes = []time.Duration{labelInterval}
	}
	s.scheduleNext()
}

// checkMoved runs a pass right after a change of the mapping, unless the members are not known yet, or the pass itself
// makes the change.
func (s *service) checkMoved() {
	if s.Events != nil && !s.Restoring && !s.checks.running {
		s.checks.flipping = true
		s.checkNow()
		s.checks.flipping = false
	}
}

// checkNow runs one pass, and returns the connections whose owner is not known.
func (s *service) checkNow() unlabeled {
	s.checks.running = true
	defer func() { s.checks.running = false }()
	list, err := s.ReadSessions()
	if err != nil {
		s.Log.Warn("connections not checked", "error", err)
		return unlabeled{}
	}
	s.rooms.NoteSessions(list)
	s.rooms.NoteConnected(list)
	s.rooms.ReplayMoved()
	missing := s.findUnlabeled(list)
	if s.labelMembers(missing.sessions) {
		if again, err := s.ReadSessions(); err == nil {
			list = again
			missing = s.findUnlabeled(list)
		}
	}
	unknown := make(map[uint64]bool)
	for _, one := range missing.sessions {
		unknown[one.Cookie] = true
	}
	now := s.rooms.ServingConnections()
	split := s.findSplit(now, list, unknown)
	if s.Config.OnStart == config.Adopt && !s.checks.flipping && s.adoptDevices(split) {
		now = s.rooms.ServingConnections()
		split = s.findSplit(now, list, unknown)
	}
	doomed := s.doomedSessions(now, list, split, unknown)
	s.checks.served = now
	if len(doomed) > 0 {
		s.destroy(doomed)
		split = s.remaining(split, doomed)
	}
	if len(split) > 0 && len(split) != len(s.checks.split) {
		s.Log.Warn("devices are split", "devices", len(split), "first", split[0].String(), "slot", split[0].slot, "at", fmt.Sprint(split[0].at))
	}
	s.checks.split = split
	return missing
}

// findSplit returns the split devices with their misplaced sessions, sorted by address.
func (s *service) findSplit(now *core.Serving, list []session.Session, unknown map[uint64]bool) (split []splitDevice) {
	slots := make(map[member.ID]int)
	for slot, seat := range s.Seats {
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
				if !one.Owner.Steered && (ok || s.checks.placed[one.Cookie]) {
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
				if s.checks.placed[one.Cookie] {
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
	s.checks.placed = placed
	slices.SortFunc(split, func(a, b splitDevice) int { return a.Address.Compare(b.Address) })
	return split
}

// underOnStart reports whether on_start governs a misplaced session, and not on_move.
func (s *service) underOnStart(one *session.Session) bool {
	return !one.Owner.Steered && !s.checks.placed[one.Cookie]
}

// actsOnStart reports whether on_start closes connections now: devices that can be adopted are adopted by the next pass
// after a flip.
func (s *service) actsOnStart() bool {
	return s.Config.OnStart == config.Reset || s.Config.OnStart == config.Adopt && !s.checks.flipping
}

// doomedSessions returns the sessions that must be closed: misplaced ones by on_start or on_move, handshakes of devices
// that have moved since the last pass, and the sessions at slots in maint.
func (s *service) doomedSessions(now *core.Serving, list []session.Session, split []splitDevice, unknown map[uint64]bool) (doomed []session.Session) {
	for i := range split {
		for _, one := range split[i].Sessions {
			if s.underOnStart(&one) && s.actsOnStart() || !s.underOnStart(&one) && s.Config.OnMove == config.CloseMoved {
				doomed = append(doomed, one)
			}
		}
	}
	if s.Config.OnMove != config.CloseMoved {
		return doomed
	}
	maint := make(map[member.ID]bool)
	for slot, seat := range s.Seats {
		if s.SlotState(slot).State == stored.Maint {
			maint[seat.ID()] = true
		}
	}
	before := s.checks.served
	for _, one := range list {
		server, ok := now.Server(one.Address)
		switch {
		case one.State == sockdiag.SynRecv:
			if before == nil {
				continue
			}
			if was, did := before.Server(one.Address); did && was != server && (ok || maint[was]) {
				doomed = append(doomed, one)
			}
		case !ok && one.Owned && !unknown[one.Cookie] && maint[one.OwnerID()]:
			doomed = append(doomed, one)
		}
	}
	return doomed
}

// destroy closes sessions by SOCK_DESTROY.
func (s *service) destroy(list []session.Session) {
	conn, err := s.Diag()
	began, closed := time.Now(), 0
	devices := make(map[string]bool)
	for i := range list {
		if err == nil {
			err = conn.Destroy(&list[i].Socket)
		}
		if err != nil {
			break
		}
		closed++
		_, name := s.Mapping.Slot(list[i].Address)
		devices[session.Key(name, list[i].Address)] = true
	}
	s.checks.closed += uint64(closed)
	if closed > 0 {
		s.Log.Info("closed connections at a member of another slot", "devices", len(devices), "connections", closed,
			"first", list[0].Address.String(), "took", time.Since(began).Round(10*time.Microsecond).String())
	}
	if err != nil && s.checks.err == nil {
		s.Log.Error("cannot close connections of split devices", "connections", len(list)-closed, "error", err)
	}
	s.checks.err = err
}

// remaining returns the split devices without the sessions that were closed.
func (s *service) remaining(split []splitDevice, doomed []session.Session) (list []splitDevice) {
	if s.checks.err != nil {
		return split
	}
	closed := make(map[uint64]bool)
	for i := range doomed {
		closed[doomed[i].Cookie] = true
	}
	for _, d := range split {
		d.Sessions = slices.DeleteFunc(d.Sessions, func(one session.Session) bool { return closed[one.Cookie] })
		if len(d.Sessions) > 0 {
			list = append(list, d)
		}
	}
	return list
}

// splitProblem returns an error that names the split devices, or nil.
func (s *service) splitProblem() error {
	devices := s.checks.split
	if len(devices) == 0 {
		return nil
	}
	var names []string
	byOnStart := false
	for i := range devices {
		byOnStart = byOnStart || slices.ContainsFunc(devices[i].Sessions, func(one session.Session) bool { return s.underOnStart(&one) })
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
	case errors.Is(s.checks.err, unix.EPERM):
		what += ": " + s.checks.err.Error()
		hint = "the agent needs CAP_NET_ADMIN"
	case s.checks.err != nil:
		what += ": " + s.checks.err.Error()
		hint = "restart these members, so that their devices connect again"
	case byOnStart && s.Config.OnStart == config.Report:
		hint = "set on_start: reset, which closes such connections, or adopt, which leaves the device with that member; or restart the member"
	case !byOnStart && s.Config.OnMove == config.KeepMoved:
		hint = "set on_move: reset, which closes such connections; or restart the member"
	}
	return fault.WithHint(errors.New(what), hint)
}
