// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"time"

	"sockeye/internal/bpf"
)

// A process that binds a socket is inspected immediately, because members must be registered within milliseconds. Any
// user may bind sockets in a loop, so the inspections per process and the scans per second are limited.

const (
	// inspectionPeriod is the period of the limits, and the delay of the last inspection after a bind.
	inspectionPeriod = time.Second
	// maxInspections limits the inspections of a process at its binds in a period. A member binds each listener
	// once or twice.
	maxInspections = 2 * bpf.MaxListeners
	// maxInspected limits the processes with a period, and so the timers. Beyond the limit, a scan replaces the
	// inspection.
	maxInspected = 1024
)

// inspections counts the inspections of one process in its current period.
type inspections struct {
	count     int  // at binds
	again     bool // there was a bind after the first of the period
	wasMember bool // it was a member when it bound
}

// inspect evaluates a process that has bound a socket or listens on one. A second inspection follows at the end of the
// period, unless the process is a member by then: nfacctd sets the process title, which a rule may match, after its last
// bind, and before Linux 5.16 the hook runs before the socket has its port.
func (s *service) inspect(pid int) {
	l := s.inspected[pid]
	if l == nil && len(s.inspected) >= maxInspected {
		s.scanRateLimited()
		return
	}
	if l == nil {
		l = new(inspections)
		s.inspected[pid] = l
		s.after(inspectionPeriod, func() { s.inspectAgain(pid, l) })
	} else {
		l.again = true
	}
	l.wasMember = l.wasMember || s.seatOf(pid) != nil
	if l.count < maxInspections {
		l.count++
		s.evaluatePID(pid)
	}
}

// inspectAgain ends a period. If the process has bound more than once, another period follows, so that the last
// inspection is at least one period after the last bind.
func (s *service) inspectAgain(pid int, l *inspections) {
	if s.inspected[pid] != l {
		return
	}
	if seat := s.seatOf(pid); seat == nil {
		s.evaluatePID(pid)
	} else if l.wasMember {
		s.noteDuplicate(seat)
	}
	if !l.again {
		delete(s.inspected, pid)
		return
	}
	*l = inspections{}
	s.after(inspectionPeriod, func() { s.inspectAgain(pid, l) })
}

// scanRateLimited scans all processes now, or one period after the last rate-limited scan.
func (s *service) scanRateLimited() {
	switch {
	case s.scannedRecently:
		s.scanPending = true
		return
	case s.Path == nil:
		return
	}
	s.scannedRecently, s.scanPending = true, false
	if err := s.scan(); err != nil {
		s.Log.Error("scan failed", "error", err)
	}
	s.after(inspectionPeriod, func() {
		s.scannedRecently = false
		if s.scanPending {
			s.scanRateLimited()
		}
	})
}

// after calls f later, with the lock held, unless the service is closed.
func (s *service) after(d time.Duration, f func()) {
	time.AfterFunc(d, func() {
		s.Mu.Lock()
		defer s.Mu.Unlock()
		if s.Events != nil {
			f()
		}
	})
}
