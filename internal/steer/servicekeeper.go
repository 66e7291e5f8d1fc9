// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/events"
	"sockeye/internal/fault"
	"sockeye/internal/member"
	"sockeye/internal/rights"
	"sockeye/internal/steer/keeper"
)

// needsKeeper reports whether sockets of the service must stay open without an agent, and their user is known.
func (s *service) needsKeeper() bool {
	_, known := s.GroupOwner()
	return known || s.UsesLookup() && s.rooms.Exist()
}

// reconcileKeeper opens the missing keeper sockets, attaches the current program to all of them, and replaces the
// keeper process if its set of sockets has changed. Without a known user of the members, reconcileKeeper opens none:
// a socket of another user would make the members' bind fail.
//
// Errors are logged, and the agent tries again: the process that has a port may close it.
func (s *service) reconcileKeeper() error {
	before := s.keeperProblem
	defer func() { s.noteKeeperProblem(before) }()
	s.keeperProblem = nil
	if s.UsesLookup() && !s.rooms.Exist() {
		return fault.Join(s.rooms.Prepare(), s.killKeeper())
	}
	owner, known := s.GroupOwner()
	if !known && !s.UsesLookup() {
		return nil
	}
	changed := s.keeper == nil
	for row, fd := range s.KeeperSockets {
		if s.Rows[row] == (bpf.Listener{}) || !s.UsesLookup() && socketOwner(fd) != owner {
			unix.Close(fd)
			delete(s.KeeperSockets, row)
			changed = true
		}
	}
	var errs []error
	for row, l := range s.Listeners {
		attach := func(fd int) error { return s.past.Attach(row, fd) }
		if fd, ok := s.KeeperSockets[row]; ok {
			if !s.UsesLookup() {
				errs = append(errs, s.past.Ensure(row, fd))
			}
			continue
		}
		var fd int
		var err error
		if s.UsesLookup() {
			if fd, err = s.rooms.OpenSocket(row); err != nil {
				err = fmt.Errorf("open the waiting room of %s: %w", l, err)
			}
		} else if fd, err = keeper.OpenSocket(s.Rows[row], owner, s.SocketNetns(), attach); err != nil {
			err = fmt.Errorf("hold %s for user %s: %w", l, member.UserName(owner), err)
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		s.KeeperSockets[row] = fd
		changed = true
	}
	errs = append(errs, s.rooms.Prepare())
	if changed {
		errs = append(errs, s.replaceKeeper())
	}
	if s.keeperProblem = fault.Join(errs...); errors.Is(s.keeperProblem, unix.EADDRINUSE) {
		s.keeperProblem = fault.Conflict(s.keeperProblem, "a socket of another user, or without SO_REUSEPORT, has the port: end its process, or set user to the members' user; the agent tries again")
	} else if errors.Is(s.keeperProblem, unix.EACCES) {
		s.keeperProblem = fault.WithHint(s.keeperProblem, rights.MissingHint(unix.CAP_NET_BIND_SERVICE, "restart the agent with CAP_NET_BIND_SERVICE"))
	}
	return nil
}

// keeperRetryInterval is the time between two attempts of reconcileKeeper after a failure.
const keeperRetryInterval = 2 * time.Second

// noteKeeperProblem logs a change of the keeper problem, and schedules the next attempt while there is a problem.
func (s *service) noteKeeperProblem(before error) {
	switch {
	case s.keeperProblem == nil && before != nil:
		s.Log.Info("ports held", events.PortsHeld)
	case s.keeperProblem != nil && (before == nil || before.Error() != s.keeperProblem.Error()):
		s.Log.Warn("ports not held", events.PortsNotHeld, "error", s.keeperProblem)
	}
	if s.keeperProblem == nil || s.keeperRetryPending {
		return
	}
	s.keeperRetryPending = true
	time.AfterFunc(keeperRetryInterval, func() {
		s.Mu.Lock()
		defer s.Mu.Unlock()
		s.keeperRetryPending = false
		if s.Events == nil || s.keeperProblem == nil {
			return // the service is closed, or the problem is solved
		}
		if err := s.reconcileKeeper(); err != nil {
			s.Log.Error("ports not held", events.PortsNotHeld, "error", err)
		}
	})
}

func socketOwner(fd int) uint32 {
	var stat unix.Stat_t
	if err := unix.Fstat(fd, &stat); err != nil {
		return ^uint32(0)
	}
	return stat.Uid
}

// replaceKeeper starts a keeper with the current keeper sockets, then kills the old keeper.
func (s *service) replaceKeeper() error {
	old := s.keeper
	s.keeper = nil
	if len(s.KeeperSockets) > 0 {
		fresh, err := keeper.Start(s.Log, s.Host.Root.Dir, s.Name, slices.Collect(maps.Values(s.KeeperSockets)))
		if err != nil {
			s.keeper = old
			return err
		}
		s.keeper = fresh
		s.Log.Info("keeper started", events.KeeperStarted, "pid", fresh.Self.PID, "sockets", len(s.KeeperSockets))
		s.recordKeeper()
		s.moveKeeperToScope(fresh)
		go s.watchKeeper(fresh, time.Now())
	}
	if old != nil {
		return old.Kill()
	}
	return nil
}

// recordKeeper saves the process id and the start time of the keeper for the next agent.
func (s *service) recordKeeper() {
	s.State.Keeper = &s.keeper.Self
	if err := s.State.Save(s.StatePath()); err != nil {
		s.Log.Error("state not saved", "error", err)
	}
}

// watchKeeper waits for the exit of a keeper and replaces the keeper, after 1 s if the keeper ran for less than 1 s.
func (s *service) watchKeeper(k *keeper.Process, started time.Time) {
	if k.Handle.Wait() != nil {
		return
	}
	s.Mu.Lock()
	defer s.Mu.Unlock()
	if s.keeper != k {
		return
	}
	s.Log.Warn("keeper exited", events.KeeperExited, "pid", k.Self.PID)
	k.Close()
	s.keeper = nil
	if err := s.past.Reattach(); err != nil {
		s.Log.Error("program not attached", "error", err)
	}
	if time.Since(started) < time.Second {
		s.keeperProblem = errors.New("its keeper exits immediately; if the agent exits while there is no keeper, the ports are not held")
		time.AfterFunc(time.Second, s.restartKeeper)
		return
	}
	s.replaceLostKeeper()
}

// replaceLostKeeper starts a keeper in place of one that has exited, or tries again later.
func (s *service) replaceLostKeeper() {
	before := s.keeperProblem
	s.keeperProblem = s.replaceKeeper()
	s.noteKeeperProblem(before)
}

func (s *service) restartKeeper() {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	if s.keeper == nil && len(s.KeeperSockets) > 0 {
		s.replaceLostKeeper()
	}
}

// killKeeper closes the keeper sockets and kills the keeper.
func (s *service) killKeeper() error {
	for row, fd := range s.KeeperSockets {
		unix.Close(fd)
		delete(s.KeeperSockets, row)
	}
	return s.replaceKeeper()
}

// moveKeeperToScope moves a keeper from the agent's unit to a scope unit, in the background.
func (s *service) moveKeeperToScope(k *keeper.Process) {
	m := s.Host.Systemd
	if m == nil {
		return
	}
	go func() {
		unit, err := m.StartScope(context.Background(), k)
		switch {
		case err != nil:
			s.Log.Info("keeper stays in the agent's unit", "pid", k.Self.PID, "error", err)
		case unit != "":
			s.Log.Info("keeper has a unit of its own", "pid", k.Self.PID, "unit", unit)
		}
	}()
}
