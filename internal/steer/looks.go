// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"time"

	"sockeye/internal/bpf"
)

// What a process reports by binding sockets is looked at at once, as members
// must be found within milliseconds. But any user may bind in a loop, so each
// process has a bounded number of looks a second, and so have scans.

const (
	// lookPeriod is the time that a bound is for, and how long after a bind a
	// process is looked at once more.
	lookPeriod = time.Second
	// maxLooks bounds the looks at a process in a period at its binds. A member
	// binds each listener once or twice.
	maxLooks = 2 * bpf.MaxListeners
	// maxLooking bounds the processes, and so the timers. Beyond them there is a
	// scan.
	maxLooking = 1024
)

// looks are those at one process in the period that runs.
type looks struct {
	count int  // at binds
	more  bool // there was a bind after the first of the period
	late  bool // it was a member when it bound
}

// look considers a process that bound a socket or listens on one, and once more
// when its period has ended, unless it is a member by then: nfacctd takes the
// name by which a rule may know it only after its last bind, and before Linux
// 5.16 the hook runs before the socket has its port.
func (s *service) look(pid int) {
	l := s.looking[pid]
	if l == nil && len(s.looking) >= maxLooking {
		s.scanOnce()
		return
	}
	if l == nil {
		l = new(looks)
		s.looking[pid] = l
		s.afterPeriod(func() { s.lookAgain(pid, l) })
	} else {
		l.more = true
	}
	l.late = l.late || s.seatOf(pid) != nil
	if l.count < maxLooks {
		l.count++
		s.considerPID(pid)
	}
}

// lookAgain ends a period. Binds in it after the first have another one: the
// last look comes at least a period after the last bind.
func (s *service) lookAgain(pid int, l *looks) {
	if s.looking[pid] != l {
		return
	}
	if seat := s.seatOf(pid); seat == nil {
		s.considerPID(pid)
	} else if l.late {
		s.findTwin(seat)
	}
	if !l.more {
		delete(s.looking, pid)
		return
	}
	*l = looks{}
	s.afterPeriod(func() { s.lookAgain(pid, l) })
}

// scanOnce scans now, or when a period has passed since the last scan of this
// kind.
func (s *service) scanOnce() {
	switch {
	case s.scanning:
		s.scanMore = true
		return
	case s.path == nil:
		return
	}
	s.scanning, s.scanMore = true, false
	if err := s.scan(); err != nil {
		s.log.Error("scan failed", "error", err)
	}
	s.afterPeriod(func() {
		s.scanning = false
		if s.scanMore {
			s.scanOnce()
		}
	})
}

// afterPeriod calls f with the lock held, unless the service is closed by then.
func (s *service) afterPeriod(f func()) {
	time.AfterFunc(lookPeriod, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.events != nil {
			f()
		}
	})
}
