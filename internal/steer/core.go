// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"fmt"
	"log/slog"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/config"
	"sockeye/internal/fault"
	"sockeye/internal/sockdiag"
	"sockeye/internal/steer/placement"
	"sockeye/internal/steer/stored"
)

// coreService is the data of a service that the parts of its reconciliation share. All parts hold the lock.
type coreService struct {
	host    *steerHost
	log     *slog.Logger
	actions actions

	mu        sync.Mutex
	config    config.Service
	users     []uint32           // owners of the members and their sockets; empty: the first claim decides
	target    *placement.Mapping // the mapping that the policy, the settings of the slots, and the pins lead to, without the pins
	mapping   *placement.Mapping // the mapping in force
	state     stored.State
	path      *bpf.Steer
	events    *bpf.Events // nil: the service is closed
	restoring bool        // the members of an earlier agent or of a new policy are being registered

	netns      *os.File
	netnsInode uint64                         // inode of netns
	rows       [bpf.MaxListeners]bpf.Listener // listeners by row; zero: free row
	listeners  map[int]config.Listener        // by row

	seats         map[int]*seat  // by slot
	keeperSockets map[int]int    // descriptors by row
	conn          *sockdiag.Conn // nil before the first use
}

// actions are what one part of the reconciliation asks of the others.
type actions interface {
	// IsFilling reports whether the member of a slot receives what has waited.
	IsFilling(slot int) bool
	// VacateSlot closes a slot and forgets its member.
	VacateSlot(slot int, reason string)
	// Place makes the mapping in force more like the target.
	Place() error
	// CheckSoon schedules a check of the connections.
	CheckSoon()
}

func (s *coreService) statePath() string { return s.host.statePath(s.config.Name) }

// socketNetns returns the network namespace for new sockets; nil is the agent's own, which needs no capability to
// enter.
func (s *coreService) socketNetns() *os.File {
	if s.config.Netns == "" {
		return nil
	}
	return s.netns
}

func (s *coreService) usesLookup() bool { return s.config.Steering == config.Lookup }

// slotState returns the setting of a slot.
func (s *coreService) slotState(slot int) stored.Setting { return s.state.Setting(slot) }

// isReady reports whether a slot receives traffic: the slot has a member that has received what had waited, and is not in
// maint.
func (s *coreService) isReady(slot int) bool {
	return s.seats[slot] != nil && s.slotState(slot).State != stored.Maint && !s.actions.IsFilling(slot)
}

// readySlots returns isReady for each slot of the data path.
func (s *coreService) readySlots() [bpf.MaxSlots]bool {
	var ready [bpf.MaxSlots]bool
	for slot := range s.seats {
		ready[slot] = s.isReady(slot)
	}
	return ready
}

// setReady writes the member of a slot and the ready flag, and checks that the sockets of the member are still open: the
// close of a socket of a slot that is not ready does not close the slot.
func (s *coreService) setReady(seat *seat) error {
	value := bpf.Slot{Pid: uint32(seat.process.PID), StartTime: seat.process.StartTime}
	if s.slotState(seat.slot).State != stored.Maint && !s.actions.IsFilling(seat.slot) {
		value.Ready = seat.place.Ready()
	}
	if err := s.path.SetSlot(seat.slot, value); err != nil {
		return err
	}
	for row, socket := range seat.sockets {
		cookie, err := s.path.Cookie(row, seat.place)
		if err != nil {
			return err
		}
		if cookie != socket.cookie {
			return fmt.Errorf("its socket %s was closed", socket.local)
		}
	}
	return nil
}

func (s *coreService) slotRange(slot int) error {
	return fault.Usage(fmt.Errorf("slot %d is out of range", slot),
		fmt.Sprintf("service %s has slots 0 to %d", s.config.Name, s.config.Slots-1))
}

// inUse reports whether the mapping in force has devices in a slot.
func (s *coreService) inUse(slot int) bool {
	return slices.Contains(s.mapping.Table.Bucket[:], uint16(slot))
}

// paced reports whether devices with sessions wait for their turn.
func (s *coreService) paced() bool {
	return s.config.Pace != nil && s.config.OnMove == config.CloseMoved
}

// canClose returns nil if the agent can close connections of other processes.
func (s *coreService) canClose() error {
	conn, err := s.diag()
	if err == nil {
		err = conn.CanDestroy()
	}
	return err
}

// gateable reports whether slots have gates: the agent must see the SYNs.
func (s *coreService) gateable() bool {
	return s.paced() && !s.config.SharesSlots && s.config.TrackDevices > 0
}

// hasDevices reports whether devices can have a slot.
func (s *coreService) hasDevices(slot int) bool {
	return s.inUse(slot) || slices.ContainsFunc(s.state.Pins, func(p stored.Pin) bool { return p.Slot == slot })
}

// groupOwner returns the user that owns all sockets of a SO_REUSEPORT group. known is false with lookup, and until the
// policy or the first claim determines the user.
func (s *coreService) groupOwner() (uid uint32, known bool) {
	switch {
	case s.usesLookup():
		return 0, false
	case len(s.users) > 0:
		return s.users[0], true
	case s.state.ClaimedUID != nil:
		return *s.state.ClaimedUID, true
	}
	return 0, false
}

// backlog returns the backlog for listen(2).
func (s *coreService) backlog() int {
	if s.config.Backlog > 0 {
		return s.config.Backlog
	}
	// The kernel limits the value to net.core.somaxconn.
	return 1<<31 - 1
}

// closePlace removes the sockets of a place.
func (s *coreService) closePlace(place bpf.Place) error {
	var errs []error
	for row := range bpf.MaxListeners {
		errs = append(errs, s.path.Delete(row, place))
	}
	return fault.Join(errs...)
}

// pinsInForce returns the pins of the mapping in force.
func (s *coreService) pinsInForce() placement.Pins {
	return s.state.PinsFor(s.config.Slots, func(*stored.Pin) bool { return false })
}

func since(clock int32) time.Duration {
	var now unix.Timespec
	if err := unix.ClockGettime(clock, &now); err != nil {
		return 0
	}
	return time.Duration(now.Nano())
}
