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
	inspectionPeriod = time.Second
	// maxLooks bounds the looks at a process in a period at its binds. A member
	// binds each listener once or twice.
	maxInspections = 2 * bpf.MaxListeners
	// maxLooking bounds the processes, and so the timers. Beyond them there is a
	// scan.
	maxInspected = 1024
)

// looks are those at one process in the period that runs.
type inspections struct {
	count     int  // at binds
	again     bool // there was a bind after the first of the period
	wasMember bool // it was a member when it bound
}

// look considers a process that bound a socket or listens on one, and once more
// when its period has ended, unless it is a member by then: nfacctd takes the
// name by which a rule may know it only after its last bind, and before Linux
// 5.16 the hook runs before the socket has its port.
func (s *service) inspect(pid int) {
	l := s.inspected[pid]
	if l == nil && len(s.inspected) >= maxInspected {
		s.scanRateLimited()
		return
	}
	if l == nil {
		l = new(inspections)
		s.inspected[pid] = l
		s.afterInspectionPeriod(func() { s.inspectAgain(pid, l) })
	} else {
		l.again = true
	}
	l.wasMember = l.wasMember || s.seatOf(pid) != nil
	if l.count < maxInspections {
		l.count++
		s.evaluatePID(pid)
	}
}

// lookAgain ends a period. Binds in it after the first have another one: the
// last look comes at least a period after the last bind.
func (s *service) inspectAgain(pid int, l *inspections) {
	if s.inspected[pid] != l {
		return
	}
	if seat := s.seatOf(pid); seat == nil {
		s.evaluatePID(pid)
	} else if l.wasMember {
		s.findDuplicate(seat)
	}
	if !l.again {
		delete(s.inspected, pid)
		return
	}
	*l = inspections{}
	s.afterInspectionPeriod(func() { s.inspectAgain(pid, l) })
}

// scanOnce scans now, or when a period has passed since the last scan of this
// kind.
func (s *service) scanRateLimited() {
	switch {
	case s.scannedRecently:
		s.scanPending = true
		return
	case s.path == nil:
		return
	}
	s.scannedRecently, s.scanPending = true, false
	if err := s.scan(); err != nil {
		s.log.Error("scan failed", "error", err)
	}
	s.afterInspectionPeriod(func() {
		s.scannedRecently = false
		if s.scanPending {
			s.scanRateLimited()
		}
	})
}

// afterPeriod calls f with the lock held, unless the service is closed by then.
func (s *service) afterInspectionPeriod(f func()) {
	time.AfterFunc(inspectionPeriod, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.events != nil {
			f()
		}
	})
}
