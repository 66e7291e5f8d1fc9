// SPDX-License-Identifier: Apache-2.0

package bypass

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"sockeye/internal/api"
	"sockeye/internal/bpf/watched"
	"sockeye/internal/config"
	"sockeye/internal/events"
	"sockeye/internal/fault"
	"sockeye/internal/format"
	"sockeye/internal/steer/core"
	"sockeye/internal/steer/keeper"
)

// With reuseport, a process of the members' user can open a socket on the service's port, and so direct packets past the
// service: it replaces or detaches the program of the group, or binds an address that the kernel prefers. The agent looks
// for both. The program is attached again; sockets are reported.

const (
	programInterval  = time.Second // time between two checks of the programs
	replacedLogEvery = time.Minute // minimum time between two messages about replaced programs
	// replacedShown is the time for which status reports a program that was replaced.
	replacedShown = 10 * time.Minute
)

// Watch looks for what directs packets past a service. Except for Search, the caller holds the lock of the service.
type Watch struct {
	*core.Service
	isRoom func(row int) bool

	replaced   uint64 // programs since the start of the agent
	last       time.Time
	lastAt     config.Listener
	logged     time.Time
	counted    bool // kernel.bpf_stats_enabled at the last check
	notWatched bool // the reason was logged

	sockets []found
	search  search
}

// New returns the watch of a service. isRoom reports whether the keeper socket of a row is a waiting room.
func New(s *core.Service, isRoom func(row int) bool) *Watch {
	return &Watch{Service: s, isRoom: isRoom, search: search{scans: make(map[uint64]int), outside: make(map[uint64]bool)}}
}

// Start starts the checks, which end with the service.
func (w *Watch) Start() {
	w.checkProgramsLater()
	w.searchLater(firstSearch)
}

func (w *Watch) checkProgramsLater() {
	time.AfterFunc(programInterval, func() {
		w.Mu.Lock()
		defer w.Mu.Unlock()
		if w.Removed {
			return
		}
		if w.CheckOpen() == nil {
			w.checkPrograms()
		}
		w.checkProgramsLater()
	})
}

// Ensure attaches the program of a row to the group of its keeper socket, unless the group has it.
func (w *Watch) Ensure(row, fd int) error {
	attached, err := w.Path.IsAttached(row)
	switch {
	case err == nil && !attached:
		return w.restore(row, fd)
	case err == nil && w.Path.IsWatched(row):
		return nil
	}
	return w.Attach(row, fd)
}

// checkPrograms attaches the programs that another process has replaced or detached, and rejects the connections that the keeper
// sockets have received meanwhile.
func (w *Watch) checkPrograms() {
	if w.Path == nil || w.UsesLookup() {
		return
	}
	counted := watched.CountsRuns()
	again := counted != w.counted
	w.counted = counted
	for row, fd := range w.KeeperSockets {
		attached, err := w.Path.IsAttached(row)
		switch {
		case err != nil: // the witness is of no use any more
			err = w.Attach(row, fd)
		case attached && (again || !counted && !w.Path.IsWatched(row)):
			err = w.Attach(row, fd) // again, if it could not be watched
		case !attached:
			err = w.restore(row, fd)
		}
		if err != nil {
			w.Log.Error("program not attached", "listener", w.Listeners[row].String(), "error", err)
		}
	}
}

// restore attaches the program of a row that another process has replaced or detached.
func (w *Watch) restore(row, fd int) error {
	err := w.Attach(row, fd)
	if err == nil {
		w.noteReplaced(w.Listeners[row])
	}
	return fault.Join(err, w.rejectQueued(row, fd))
}

// Reattach attaches the programs to the groups of the keeper sockets again, and rejects what these have received: the process that
// killed the keeper may have detached the programs.
func (w *Watch) Reattach() error {
	if w.Path == nil || w.UsesLookup() {
		return nil
	}
	var errs []error
	for row, fd := range w.KeeperSockets {
		errs = append(errs, w.Attach(row, fd), w.rejectQueued(row, fd))
	}
	return fault.Join(errs...)
}

// Attach attaches the program of a row to the group of a socket, and watches the program.
func (w *Watch) Attach(row, fd int) error {
	unwatched, err := w.Path.AttachWatched(row, fd)
	if unwatched != nil && !w.notWatched {
		w.notWatched = true
		w.Log.Warn("the replacement of a steering program will not be detected", "error", unwatched)
	}
	return err
}

// rejectQueued rejects what a keeper socket that is not a waiting room has received without the program.
func (w *Watch) rejectQueued(row, fd int) error {
	if w.isRoom(row) {
		return nil
	}
	return keeper.RejectQueued(fd)
}

func (w *Watch) noteReplaced(l config.Listener) {
	now := time.Now()
	w.replaced, w.last, w.lastAt = w.replaced+1, now, l
	if now.Sub(w.logged) >= replacedLogEvery {
		w.logged = now
		w.Log.Warn("another process has replaced or detached the steering program; it is attached again", events.ProgramReplaced,
			"listener", l.String(), "replaced", w.replaced)
	}
	// The connections that the kernel's hash, or another program, has assigned.
	w.Actions.CheckSoon()
}

// Reason returns which packets of an address reach other sockets, as a further reason, or "".
func (w *Watch) Reason(address netip.Addr) string {
	var takes []string
	for i := range w.sockets {
		if one := &w.sockets[i]; one.canTakeFrom(address) {
			takes = append(takes, fmt.Sprintf("%s can take %s", one, one.Takes()))
		}
	}
	if len(takes) == 0 {
		return ""
	}
	return ", except that " + firstOf(takes)
}

// WriteStatus sets what status shows of the watch.
func (w *Watch) WriteStatus(status *api.ServiceStatus) {
	status.ProgramsReplaced, status.Bypass = w.replaced, nil
	for i := range w.sockets {
		status.Bypass = append(status.Bypass, w.sockets[i].status())
	}
}

// Problem returns the error that status shows for packets past the service: the sockets first, which are still open.
func (w *Watch) Problem() error {
	sockets, program := w.socketProblem(), w.programProblem()
	if sockets == nil || program == nil {
		return fault.Join(sockets, program)
	}
	return fault.WithHint(fault.Join(sockets, program), fmt.Sprintf("%s. Replaced program: %s", fault.Hint(sockets), fault.Hint(program)))
}

func (w *Watch) programProblem() error {
	if w.replaced == 0 || time.Since(w.last) >= replacedShown {
		return nil
	}
	times := ""
	if w.replaced > 1 {
		times = fmt.Sprintf(", %s since the agent started", format.Count(int(w.replaced), "time", "times"))
	}
	return fault.WithHint(fmt.Errorf("another process has replaced or detached the program of %s at %s%s; the agent has attached it again",
		w.lastAt, w.last.Format(time.TimeOnly), times),
		"a process of the members' user did this: while it runs, sockeye doctor lists its socket as one in no slot; steering: lookup is not affected")
}

func (w *Watch) socketProblem() error {
	if len(w.sockets) == 0 {
		return nil
	}
	var takes []string
	for i := range w.sockets {
		takes = append(takes, fmt.Sprintf("%s can take %s past the service", &w.sockets[i], w.sockets[i].Takes()))
	}
	return fault.WithHint(errors.New(firstOf(takes)), w.sockets[0].advice())
}

// mostNamed limits the sockets that a message names.
const mostNamed = 3

// firstOf returns the first of several clauses about sockets as one sentence.
func firstOf(clauses []string) string {
	more := ""
	if n := len(clauses) - mostNamed; n > 0 {
		clauses, more = clauses[:mostNamed], fmt.Sprintf(", and %s more", format.Count(n, "socket", "sockets"))
	}
	return strings.Join(clauses, ", ") + more
}
