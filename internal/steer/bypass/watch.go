// SPDX-License-Identifier: Apache-2.0

package bypass

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"sockeye/internal/api"
	"sockeye/internal/bpf/watched"
	"sockeye/internal/config"
	"sockeye/internal/events"
	"sockeye/internal/fault"
	"sockeye/internal/format"
	"sockeye/internal/member"
	"sockeye/internal/sockdiag"
	"sockeye/internal/steer/core"
	"sockeye/internal/steer/keeper"
)

// With reuseport, a process of the members' user can open a socket on the service's port, and so direct packets past the
// service: it replaces or detaches the program of the group, or binds an address that the kernel prefers. The agent looks
// for both. The program is attached again; sockets are reported.

const (
	programInterval  = time.Second      // time between two checks of the programs
	bypassInterval   = 10 * time.Second // time between two dumps of the sockets
	mostLogged       = 3                // sockets that are logged in a search
	replacedLogEvery = time.Minute      // minimum time between two messages about replaced programs
	// replacedShown is the time for which status reports a program that was replaced.
	replacedShown = 10 * time.Minute
)

// Watch looks for what directs packets past a service.
type Watch struct {
	*core.Service
	formers map[member.ID]*core.Seat
	isRoom  func(row int) bool

	replaced   uint64 // programs since the start of the agent
	last       time.Time
	lastAt     config.Listener
	logged     time.Time
	counted    bool // kernel.bpf_stats_enabled at the last check
	notWatched bool // the reason was logged

	searched time.Time
	found    []Socket
	sockets  []api.BypassStatus // by index of found
}

// New returns the watch of a service. formers are the processes whose slot another process has taken over, and isRoom reports whether the
// keeper socket of a row is a waiting room.
func New(s *core.Service, formers map[member.ID]*core.Seat, isRoom func(row int) bool) *Watch {
	return &Watch{Service: s, formers: formers, isRoom: isRoom}
}

// Start starts the checks, which end with the service. The caller holds the lock.
func (w *Watch) Start() {
	time.AfterFunc(programInterval, func() {
		w.Mu.Lock()
		defer w.Mu.Unlock()
		if w.Removed {
			return
		}
		if w.CheckOpen() == nil {
			w.checkPrograms()
			if time.Since(w.searched) >= bypassInterval {
				w.findBypass()
			}
		}
		w.Start()
	})
}

// Attach attaches the program of a row to the group of a socket, and watches the program.
func (w *Watch) Attach(row, fd int) error {
	unwatched, err := w.Path.AttachWatched(row, fd)
	if unwatched != nil && !w.notWatched {
		w.notWatched = true
		w.Log.Warn("a program that another process replaces will not be noticed", "error", unwatched)
	}
	return err
}

// Ensure attaches the program of a row to the group of its keeper socket, unless the group has it.
func (w *Watch) Ensure(row, fd int) error {
	if attached, err := w.Path.IsAttached(row); err == nil && attached && w.Path.IsWatched(row) {
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
			if err = w.Attach(row, fd); err == nil {
				w.noteReplaced(w.Listeners[row])
			}
			err = fault.Join(err, w.rejectQueued(row, fd))
		}
		if err != nil {
			w.Log.Error("program not attached", "listener", w.Listeners[row].String(), "error", err)
		}
	}
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

// findBypass looks for the sockets that the kernel prefers to those of the service.
func (w *Watch) findBypass() {
	w.searched = time.Now()
	conn, err := w.Diag()
	var found []Socket
	if err == nil {
		found, err = Find(conn, w.Listeners, w.UsesLookup(), w.registeredSockets())
	}
	if err != nil {
		w.Log.Debug("sockets not searched", "error", err)
		return
	}
	if all := w.Host.Listeners.Load(); all != nil {
		found = slices.DeleteFunc(found, func(one Socket) bool {
			return !one.Remote.IsValid() && one.Device == 0 && slices.ContainsFunc(*all, func(l config.Listener) bool { return l.Protocol == one.Protocol && l.Address == one.Local })
		})
	}
	before := w.found
	w.found, w.sockets = nil, nil
	if len(found) > 0 {
		w.noteBypass(before, found)
	}
	if len(w.found) == 0 && len(before) > 0 {
		w.Log.Info("no socket bypasses the service any more", events.NoneBypasses)
	}
}

// noteBypass notes sockets with their processes, and logs those that are not among the sockets found before.
func (w *Watch) noteBypass(before, found []Socket) {
	processes, _, err := sockdiag.ReadProcesses(func(inode uint32) bool {
		return slices.ContainsFunc(found, func(one Socket) bool { return one.Inode == inode })
	})
	if err != nil {
		w.Log.Debug("processes not searched", "error", err)
	}
	logged := 0
	for _, one := range found {
		of := processes[one.Inode]
		if one.Remote.IsValid() && slices.ContainsFunc(of, func(p sockdiag.Process) bool { return w.isOfMember(p.PID) }) {
			continue // a member has a socket for each device
		}
		status := api.BypassStatus{Socket: one.String(), Takes: one.Takes()}
		if len(of) > 0 {
			status.PID, status.Command = of[0].PID, of[0].Command
		}
		w.found, w.sockets = append(w.found, one), append(w.sockets, status)
		if logged < mostLogged && !slices.ContainsFunc(before, func(b Socket) bool { return b.Cookie == one.Cookie }) {
			logged++
			w.Log.Warn("a socket bypasses the service", events.SocketBypasses, "socket", status.Socket, "takes", status.Takes, "pid", status.PID, "command", status.Command)
		}
	}
}

// isOfMember reports whether a process is a member, or a descendant of one.
func (w *Watch) isOfMember(pid int) bool {
	p, err := member.Read(pid)
	if err != nil {
		return false
	}
	up := core.Ancestors(p)
	for _, seat := range w.Seats {
		if seat.Process.PID == pid || slices.Contains(up, seat.Process.PID) {
			return true
		}
	}
	return false
}

// registeredSockets returns the cookies of the sockets of the members and of former members.
func (w *Watch) registeredSockets() map[uint64]bool {
	cookies := make(map[uint64]bool)
	note := func(seat *core.Seat) {
		for _, socket := range seat.Sockets {
			cookies[socket.Cookie] = true
		}
	}
	for _, seat := range w.Seats {
		note(seat)
	}
	for _, former := range w.formers {
		note(former)
	}
	return cookies
}

// Reason returns which packets of an address reach another socket, as a further reason, or "".
func (w *Watch) Reason(address netip.Addr) string {
	for i, one := range w.found {
		if one.Remote.IsValid() && one.Remote.Addr() != address || one.Local.Addr().Is4() != address.Is4() && one.Local.Addr() != netip.IPv6Unspecified() {
			continue
		}
		by := w.sockets[i]
		return fmt.Sprintf(", except that %s takes %s", owned(&by), by.Takes)
	}
	return ""
}

// WriteStatus sets what status shows of the watch.
func (w *Watch) WriteStatus(status *api.ServiceStatus) {
	if time.Since(w.searched) >= programInterval {
		w.findBypass()
	}
	status.ProgramsReplaced, status.Bypass = w.replaced, slices.Clone(w.sockets)
}

// Problem returns the error that status shows for packets past the service.
func (w *Watch) Problem() error {
	if w.replaced > 0 && time.Since(w.last) < replacedShown {
		times := ""
		if w.replaced > 1 {
			times = fmt.Sprintf(", %s since the agent started", format.Count(int(w.replaced), "time", "times"))
		}
		return fault.WithHint(fmt.Errorf("another process has replaced or detached the program of %s at %s%s; the agent has attached it again",
			w.lastAt, w.last.Format(time.TimeOnly), times),
			"a process of the members' user did this: sockeye doctor names sockets on the ports that are in no slot; steering: lookup is not affected")
	}
	if len(w.sockets) == 0 {
		return nil
	}
	first := w.sockets[0]
	more := ""
	if n := len(w.sockets) - 1; n > 0 {
		more = fmt.Sprintf(", and %s more", format.Count(n, "socket", "sockets"))
	}
	return fault.WithHint(fmt.Errorf("%s takes %s past the service%s", owned(&first), first.Takes, more),
		"end the process, or make it bind the address of the listener")
}

// owned returns a socket with its process.
func owned(b *api.BypassStatus) string {
	if b.PID == 0 {
		return b.Socket
	}
	command := strings.Join(strings.Fields(b.Command), " ") // a process chooses its name, which may have several lines
	return fmt.Sprintf("%s of process %d (%s)", b.Socket, b.PID, command)
}
