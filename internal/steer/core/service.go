// SPDX-License-Identifier: Apache-2.0

// Package core defines the data of a service that the parts of its reconciliation share: the policy, the data path, the
// mapping in force, and the members in their slots.
package core

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/config"
	"sockeye/internal/fault"
	"sockeye/internal/member"
	"sockeye/internal/placement"
	"sockeye/internal/sockdiag"
	"sockeye/internal/steer/stored"
)

// Service is the data of a service that the parts of its reconciliation share. The caller holds Mu to read or write the data. Methods for
// requests take it themselves, and say so; all others are called with it held.
type Service struct {
	Host    *Host
	Log     *slog.Logger
	Actions Actions
	Name    string // never changes, and is read without Mu

	Mu        sync.Mutex
	Config    config.Service
	Users     []uint32           // owners of the members and their sockets; empty: the first claim decides
	Target    *placement.Mapping // the mapping that the policy, the settings of the slots, and the pins lead to, without the pins
	Mapping   *placement.Mapping // the mapping in force
	State     stored.State
	Path      *bpf.Steer
	Events    *bpf.Events // nil: the service is closed
	Removed   bool        // the service is closed for good
	Restoring bool        // the members of an earlier agent or of a new policy are being registered

	Netns      *os.File
	NetnsInode uint64                         // inode of Netns
	Rows       [bpf.MaxListeners]bpf.Listener // listeners by row; zero: free row
	Listeners  map[int]config.Listener        // by row

	Seats         map[int]*Seat       // by slot
	Formers       map[member.ID]*Seat // running processes whose slot another process has taken over
	Strangers     Strangers
	KeeperSockets map[int]int    // descriptors by row
	Conn          *sockdiag.Conn // nil before the first use
}

// Actions are what one part of the reconciliation asks of the others.
type Actions interface {
	// IsFilling reports whether the member of a slot receives the waiting packets.
	IsFilling(slot int) bool
	// VacateSlot closes a slot and forgets its member.
	VacateSlot(slot int, reason string)
	// Advance moves buckets toward the target mapping.
	Advance() error
	// InstallMapping replaces the mapping of the data path by the mapping in force.
	InstallMapping() error
	// CheckSoon schedules a check of the connections.
	CheckSoon()
}

// StatePath returns the path of the state file.
func (s *Service) StatePath() string { return s.Host.StateFile(s.Name) }

// SocketNetns returns the network namespace for new sockets; nil is the agent's own, which needs no capability to
// enter.
func (s *Service) SocketNetns() *os.File {
	if s.Config.Netns == "" {
		return nil
	}
	return s.Netns
}

// UsesLookup reports whether sk_lookup steers the service.
func (s *Service) UsesLookup() bool { return s.Config.Steering == config.Lookup }

// SlotState returns the setting of a slot.
func (s *Service) SlotState(slot int) stored.Setting { return s.State.Setting(slot) }

// CheckOpen returns an error if the service is closed: a policy has removed it since a request found it, or its data path
// could not be replaced.
func (s *Service) CheckOpen() error {
	switch {
	case s.Removed:
		return fault.Usage(fmt.Errorf("there is no service %q", s.Name), "a policy has just removed it")
	case s.Events == nil:
		return &fault.Error{Err: errors.New("the data path is not open"),
			Hint: "sockeye apply opens it again; the log of the agent has the reason", Code: fault.CodeFailed}
	}
	return nil
}

// IsReady reports whether a slot receives traffic: the slot has a member that has received the waiting packets, and is not in
// maint.
func (s *Service) IsReady(slot int) bool {
	return s.Seats[slot] != nil && s.SlotState(slot).State != stored.Maint && !s.Actions.IsFilling(slot)
}

// ReadySlots returns IsReady for each slot of the data path.
func (s *Service) ReadySlots() [bpf.MaxSlots]bool {
	var ready [bpf.MaxSlots]bool
	for slot := range s.Seats {
		ready[slot] = s.IsReady(slot)
	}
	return ready
}

// ErrSocketClosed means that a member has closed a socket, or has exited. The release hook has closed the slot, and an event
// follows.
var ErrSocketClosed = errors.New("was closed")

// SetReady writes the member of a slot and the ready flag. If a socket of the member was closed, SetReady leaves the slot
// closed and returns ErrSocketClosed: the close of a socket of a slot that is not ready does not close the slot.
func (s *Service) SetReady(seat *Seat) error {
	value := bpf.Slot{Pid: uint32(seat.Process.PID), StartTime: seat.Process.StartTime}
	if s.SlotState(seat.Slot).State == stored.Maint || s.Actions.IsFilling(seat.Slot) {
		return s.Path.SetSlot(seat.Slot, value)
	}
	open := value
	open.Ready = seat.Place.Ready()
	err := s.checkOpen(seat)
	if err == nil {
		if err = s.Path.SetSlot(seat.Slot, open); err != nil {
			return err
		}
		err = s.checkOpen(seat)
	}
	if err != nil {
		return fault.Join(err, s.Path.SetSlot(seat.Slot, value))
	}
	return nil
}

// checkOpen returns ErrSocketClosed if a registered socket of a member was closed.
func (s *Service) checkOpen(seat *Seat) error {
	for row, socket := range seat.Sockets {
		cookie, err := s.Path.Cookie(row, seat.Place)
		if err != nil {
			return err
		}
		if cookie != socket.Cookie {
			return fmt.Errorf("its socket %s %w", socket.Local, ErrSocketClosed)
		}
	}
	return nil
}

// SlotRange returns the error for a slot that the policy does not have.
func (s *Service) SlotRange(slot int) error {
	return fault.Usage(fmt.Errorf("slot %d is out of range", slot),
		fmt.Sprintf("service %s has slots 0 to %d", s.Name, s.Config.Slots-1))
}

// InUse reports whether the mapping in force has devices in a slot.
func (s *Service) InUse(slot int) bool {
	return slices.Contains(s.Mapping.Table.Bucket[:], uint16(slot))
}

// Paced reports whether devices with sessions wait for their turn.
func (s *Service) Paced() bool {
	return s.Config.Pace != nil && s.Config.OnMove == config.CloseMoved
}

// CanClose returns nil if the agent can close connections of other processes.
func (s *Service) CanClose() error {
	conn, err := s.Diag()
	if err == nil {
		err = conn.CanDestroy()
	}
	return err
}

// Gateable reports whether slots have gates: the agent must see the SYNs.
func (s *Service) Gateable() bool {
	return s.Paced() && !s.Config.SharesSlots && s.Config.TrackDevices > 0
}

// HasDevices reports whether devices can have a slot.
func (s *Service) HasDevices(slot int) bool {
	return s.InUse(slot) || slices.ContainsFunc(s.State.Pins, func(p stored.Pin) bool { return p.Slot == slot })
}

// GroupOwner returns the user that owns all sockets of a SO_REUSEPORT group. known is false with lookup, and until the
// policy or the first claim determines the user.
func (s *Service) GroupOwner() (uid uint32, known bool) {
	switch {
	case s.UsesLookup():
		return 0, false
	case len(s.Users) > 0:
		return s.Users[0], true
	case s.State.ClaimedUID != nil:
		return *s.State.ClaimedUID, true
	}
	return 0, false
}

// Attach attaches the program of a row to the SO_REUSEPORT group of a socket. The group of the keeper socket has the program already,
// and keeps the one that the agent watches.
func (s *Service) Attach(row, fd int) error {
	if keeper, kept := s.KeeperSockets[row]; kept && s.Path.IsWatched(row) && s.listens(row, keeper) {
		// Sockets of an interface are in a group of their own.
		if device, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_BINDTOIFINDEX); err == nil && device == 0 {
			return nil
		}
	}
	return s.Path.Attach(row, fd)
}

// listens reports whether the socket of a row receives packets. A TCP socket is in a group only while it listens.
func (s *Service) listens(row, fd int) bool {
	if s.Listeners[row].Protocol == config.UDP {
		return true
	}
	accepts, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ACCEPTCONN)
	return err == nil && accepts == 1
}

// Backlog returns the backlog for listen(2).
func (s *Service) Backlog() int {
	if s.Config.Backlog > 0 {
		return s.Config.Backlog
	}
	// The kernel limits the value to net.core.somaxconn.
	return 1<<31 - 1
}

// ClosePlace removes the sockets of a place.
func (s *Service) ClosePlace(place bpf.Place) error {
	var errs []error
	for row := range bpf.MaxListeners {
		errs = append(errs, s.Path.Delete(row, place))
	}
	return fault.Join(errs...)
}

// PinsInForce returns the pins of the mapping in force.
func (s *Service) PinsInForce() placement.Pins {
	return s.State.PinsFor(s.Config.Slots, func(*stored.Pin) bool { return false })
}
