// SPDX-License-Identifier: Apache-2.0

// Package moves decides which slot each device has: by the settings of the slots and the pins that commands make, and one
// device after the other when a change moves devices.
package moves

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"sockeye/internal/api"
	"sockeye/internal/bpf"
	"sockeye/internal/events"
	"sockeye/internal/fault"
	"sockeye/internal/placement"
	"sockeye/internal/steer/core"
	"sockeye/internal/steer/rooms"
	"sockeye/internal/steer/session"
	"sockeye/internal/steer/stored"
)

// The target mapping follows from the policy, the settings of the slots, and the pins. The mapping in force becomes the
// target step by step:
//
//   - A bucket stays at its slot while the target slot has no member or is in maint, so that a new slot refuses no
//     device.
//   - With pace, a bucket or pin with open sessions waits until its device may connect to the target member: at most
//     pace.devices devices at a time per member.
//
// The kernel has the mapping in force. A new agent reads the pinned table and continues.

// Moves brings the mapping in force to the target.
type Moves struct {
	*core.Service
	rooms *rooms.Rooms
	progress
	gate     gate
	pinTimer *time.Timer // timer of the next end of a pin; nil: none is due
}

// progress is the progress of the moves to the target mapping.
type progress struct {
	cause   string           // change that caused the moves
	of      string           // slot or device of that change; see checkNoMoves
	started time.Time        // of the first move
	running map[string]*move // devices that connect and send their initial dump, by session.Key
	waiting int              // devices with sessions that wait for their turn
	stopped int              // devices with sessions that stay because the moves are stopped
	blocked map[int]int      // buckets and pins that wait for a member, by target slot
	done    int              // devices
	more    bool             // further devices move by the next write of the table
	timer   *time.Timer
	// announced: the log has the begin of the moves, and not yet their end.
	announced bool
}

// New returns the moves of a service, whose packets wait in the rooms.
func New(s *core.Service, r *rooms.Rooms) *Moves {
	return &Moves{
		Service: s, rooms: r, progress: progress{running: make(map[string]*move)},
		gate: gate{
			closed: make(map[int]time.Time), since: make(map[int]time.Time), admitted: make(map[uint16]bool),
			given: make(map[int]int), pending: make(map[int]int), passed: make(map[int]int), arrived: make(map[int]int),
			sockets: make(map[int]int),
		},
	}
}

// Close stops the timers and opens the gates.
func (m *Moves) Close() {
	for _, timer := range []*time.Timer{m.timer, m.pinTimer} {
		if timer != nil {
			timer.Stop()
		}
	}
	m.CloseGateSockets()
}

// Begin records the change of a slot, a device or the policy that causes the next moves.
func (p *progress) Begin(cause, of string) {
	p.cause, p.of = cause, of
	if p.ungated() == 0 {
		p.started, p.done = time.Now(), 0
	}
}

// Count returns the numbers of devices that move, and that wait for their turn.
func (p *progress) Count() (running, waiting int) { return len(p.running), p.waiting }

// CountStopped returns the number of devices that stay because the moves are stopped.
func (p *progress) CountStopped() int { return p.stopped }

func (p *progress) active() bool { return len(p.running)+p.waiting > 0 }

// moving reports whether devices move or wait at a gate.
func (m *Moves) moving() bool { return m.active() || len(m.gate.closed) > 0 }

// checkNoMoves returns an error while devices move because of another change. of is the slot or device of the new
// change.
func (m *Moves) checkNoMoves(of string) error {
	left := m.ungated()
	if left == 0 || of == m.of {
		return nil
	}
	return fault.Conflict(fmt.Errorf("devices move because of another change (%s): %d done, %d running, %d waiting",
		m.cause, m.done, left-m.waiting, m.waiting),
		"sockeye moves --wait waits for the end, sockeye moves --cancel stops them")
}

// Stop stops the moves, or continues them.
func (m *Moves) Stop(stop bool) error {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	if err := m.CheckOpen(); err != nil {
		return err
	}
	if stop && m.ungated()+len(m.blocked) == 0 {
		if gates := m.closedGates(); len(gates) > 0 {
			return fault.Conflict(fmt.Errorf("no devices move; %s admits devices in turn, which cannot be stopped", SlotNames(gates)),
				"a policy without pace admits them at once")
		}
		return fault.Conflict(errors.New("no devices move"), "sockeye moves shows the moves")
	}
	if !stop && !m.State.MovesStopped {
		return fault.Conflict(errors.New("the moves are not stopped"), "sockeye moves shows the moves")
	}
	m.State.MovesStopped = stop
	if err := m.State.Save(m.StatePath()); err != nil {
		return err
	}
	return m.Advance()
}

// ungated returns the number of devices that move, without those that were admitted at a gate.
func (p *progress) ungated() int {
	n := p.waiting
	for _, one := range p.running {
		if !one.gated {
			n++
		}
	}
	return n
}

// Advance moves buckets toward the target mapping, and closes the connections of the devices that have moved.
func (m *Moves) Advance() error {
	const most = bpf.Buckets
	for range most {
		if err := m.advanceSome(); err != nil || !m.more {
			return err
		}
	}
	return nil
}

func (m *Moves) advanceSome() error {
	m.more = false
	if m.Path == nil || m.Restoring {
		return nil
	}
	next, pins := m.nextStep()
	if next.Table == m.Mapping.Table && next.SamePins(m.Mapping) && next.Devices == m.Mapping.Devices {
		return m.finishAdvance(pins)
	}
	before := m.Mapping
	m.Mapping = next
	if err := m.Actions.InstallMapping(); err != nil {
		m.Mapping = before
		return err
	}
	m.rooms.DeliverMoved(before)
	m.Actions.CheckSoon()
	return m.finishAdvance(pins)
}

// finishAdvance saves the pins that are in force now, schedules the next step, and clears the slots that the policy no longer
// has and that have no devices.
func (m *Moves) finishAdvance(pins []int) error {
	m.scheduleMoves()
	if len(pins) > 0 {
		for _, i := range pins {
			m.State.Pins[i].InForce = true
		}
		if err := m.State.Save(m.StatePath()); err != nil {
			return err
		}
	}
	for _, slot := range slices.Sorted(maps.Keys(m.Seats)) {
		if slot >= m.Config.Slots && !m.InUse(slot) {
			m.Actions.VacateSlot(slot, "slot removed")
		}
	}
	return nil
}

// nextStep returns the next mapping, and the indexes of the pins that it puts in force.
func (m *Moves) nextStep() (next *placement.Mapping, pins []int) {
	m.waiting, m.stopped, m.blocked = 0, 0, make(map[int]int)
	if m.movesAtOnce() {
		for i := range m.State.Pins {
			if !m.State.Pins[i].InForce {
				pins = append(pins, i)
			}
		}
		return m.Target.WithPins(m.State.PinsFor(m.Config.Slots, nil)), pins
	}
	ready := m.ReadySlots()
	table := m.Mapping.Table.Bucket
	var candidates, stopped, free []int
	for bucket, want := range m.Target.Table.Bucket {
		is := table[bucket]
		switch {
		case is == want:
		case m.isBlocked(is, ready[want]):
			m.blocked[int(want)]++
		case m.State.MovesStopped:
			stopped = append(stopped, bucket)
		case m.Paced() && m.Seats[int(is)] != nil:
			candidates = append(candidates, bucket)
		default:
			free = append(free, bucket)
		}
	}
	for _, bucket := range m.limitFlip(free) {
		table[bucket] = m.Target.Table.Bucket[bucket]
	}
	var wantedPins []int
	for i := range m.State.Pins {
		switch one := &m.State.Pins[i]; {
		case one.InForce || one.Slot >= m.Config.Slots || m.SlotState(one.Slot).State == stored.Drain:
		case !ready[one.Slot]:
			m.blocked[one.Slot]++
		case m.State.MovesStopped:
		case m.Paced():
			wantedPins = append(wantedPins, i)
		default:
			pins = append(pins, i)
		}
	}
	if len(stopped) > 0 {
		m.stopped = m.countIn(stopped)
	}
	if len(candidates)+len(wantedPins) > 0 {
		var chosen []int
		chosen, pins = m.admit(candidates, wantedPins)
		for _, bucket := range chosen {
			table[bucket] = m.Target.Table.Bucket[bucket]
		}
	}
	inForce := func(p *stored.Pin) bool {
		return slices.ContainsFunc(pins, func(i int) bool { return &m.State.Pins[i] == p })
	}
	return m.Target.WithBuckets(&table).WithPins(m.State.PinsFor(m.Config.Slots, inForce)), pins
}

// movesAtOnce returns whether all buckets move in one step.
func (m *Moves) movesAtOnce() bool {
	return m.Config.SharesSlots || m.Mapping.Table.Nonce != m.Target.Table.Nonce
}

// isBlocked returns whether a bucket that moves stays in its slot because the slot of the target has no member; ready reports whether that
// slot has one.
func (m *Moves) isBlocked(is uint16, ready bool) bool {
	return !ready && (m.Seats[int(is)] != nil || int(is) < m.Config.Slots)
}

// scheduleMoves schedules the next step while devices move.
func (m *Moves) scheduleMoves() {
	if m.moving() && !m.announced {
		m.announced = true
		m.Log.Info("moves have begun", events.MovesBegun, "cause", m.cause, "moving", len(m.running), "waiting", m.waiting)
	}
	if m.moving() && m.timer == nil && m.Events != nil {
		m.timer = time.AfterFunc(moveInterval, m.continueMoves)
	}
}

// continueMoves ends the moves of the devices whose initial dump is over, and begins the next ones.
func (m *Moves) continueMoves() {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	m.timer = nil
	if m.Events == nil {
		return
	}
	m.sampleMoves()
	var err error
	if m.controlGates() {
		err = m.Actions.InstallMapping()
	}
	if err = fault.Join(err, m.Advance()); err != nil {
		m.Log.Error("devices not moved", "error", err)
	}
	if !m.moving() {
		m.announced = false
		m.Log.Info("moves have ended", events.MovesEnded, "devices", m.done, "took", time.Since(m.started).Round(time.Millisecond).String())
	}
}

// Status returns the progress of the moves.
func (m *Moves) Status() api.MovesStatus {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	status := api.MovesStatus{
		Service: m.Name, State: "none", Cause: m.cause, Done: m.done, Running: []api.MovingDevice{},
		Waiting: m.waiting + m.gate.waiting, Gates: m.closedGates(), Blocked: []api.BlockedMoves{}, Paced: m.Paced(), OnMove: string(m.Config.OnMove),
	}
	for _, slot := range slices.Sorted(maps.Keys(m.blocked)) {
		reason := "has no member"
		if m.SlotState(slot).State == stored.Maint {
			reason = "is in maint"
		}
		status.Blocked = append(status.Blocked, api.BlockedMoves{Slot: slot, Reason: reason, Share: float64(m.blocked[slot]) / float64(bpf.Buckets)})
	}
	for _, key := range slices.Sorted(maps.Keys(m.running)) {
		one := m.running[key]
		status.Running = append(status.Running, api.MovingDevice{Device: one.device, Slot: one.slot, Since: one.since, Received: one.received, Rate: one.rate})
	}
	switch {
	case m.State.MovesStopped && !slices.Equal(m.Mapping.Table.Bucket[:], m.Target.Table.Bucket[:]):
		status.State, status.Waiting = "stopped", m.stopped
	case m.active() || m.gate.waiting > 0:
		status.State = "running"
	case len(m.blocked) > 0:
		status.State = "blocked"
	}
	if status.State == "running" {
		started := m.started
		status.Started = &started
		if m.done > 0 {
			left := time.Since(started).Seconds() / float64(m.done) * float64(len(m.running)+status.Waiting)
			status.Remaining = &left
		}
	}
	return status
}

// countIn returns the number of devices with sessions in some buckets.
func (m *Moves) countIn(buckets []int) (n int) {
	list, err := m.ReadSessions()
	if err != nil {
		m.Log.Warn("sessions not read", "error", err)
	}
	for _, d := range session.ByDevice(m.Mapping, list) {
		if !d.Location.Pinned && slices.Contains(buckets, d.Location.Bucket) {
			n++
		}
	}
	return n
}
