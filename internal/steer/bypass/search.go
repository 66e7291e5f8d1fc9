// SPDX-License-Identifier: Apache-2.0

package bypass

import (
	"fmt"
	"maps"
	"net/netip"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/config"
	"sockeye/internal/events"
	"sockeye/internal/member"
	"sockeye/internal/netns"
	"sockeye/internal/sockdiag"
	"sockeye/internal/steer/core"
)

const (
	firstSearch    = time.Second      // time from the start of the agent to the first search
	searchInterval = 10 * time.Second // time between two searches
	statusInterval = time.Second      // minimum time between two searches for status
	mostSockets    = 100              // sockets that are reported
	mostLogged     = 3                // sockets that are logged in a search
	// logPatience is the time for which the message about a socket waits for the process.
	logPatience = 10 * time.Second
	// scanPatience is the time for which a search waits for the processes of its sockets. A later search has them.
	scanPatience = time.Second / 2
	// scanShare limits the CPU time of scans: the time between two of them is so many times that of the last one.
	scanShare = 20
	// confirmShare is the same for a scan that confirms that a socket has no process. The scan after such a one waits longer again.
	confirmShare = 4
	// mostScans is the number of scans from which a socket without a process counts as hidden: it may have been closed during a scan.
	mostScans = 2
)

// search is the state of the searches, which run one at a time and without the lock of the service: the search for the processes of
// sockets takes as long as the host has descriptors.
type search struct {
	running   sync.Mutex
	at        time.Time                     // end of the last search
	processes map[uint64][]sockdiag.Process // by cookie of their socket
	scan      *scan                         // nil: no scan runs
	nextScan  time.Time
	confirms  bool            // the next scan confirms the last one
	scans     map[uint64]int  // scans that have not found a process, by cookie
	outside   map[uint64]bool // sockets that have left their group, by cookie
}

// scan is a search for the processes of sockets.
type scan struct {
	inodes  map[uint32]uint64 // of the sockets, with their cookies
	byInode map[uint32][]sockdiag.Process
	took    time.Duration // CPU time
	done    chan struct{}
}

// found is a socket with its process, if there is one.
type found struct {
	Socket
	process *sockdiag.Process
	member  string    // as in "member of slot 1", if the process is one or a descendant of one
	since   time.Time // of the first search that found the socket
	noted   bool      // logged, or one of too many
}

// String returns the socket with its process.
func (f *found) String() string {
	if f.process == nil {
		return f.Socket.String()
	}
	command := strings.Join(strings.Fields(f.process.Command), " ") // a process chooses its name, which may have several lines
	if f.member != "" {
		command += ", " + f.member
	}
	return fmt.Sprintf("%s of process %d (%s)", &f.Socket, f.process.PID, command)
}

// canTakeFrom reports whether the socket can receive packets of an address.
func (f *found) canTakeFrom(address netip.Addr) bool {
	if f.Remote.IsValid() && f.Remote.Addr() != address {
		return false
	}
	return f.Local.Addr().Is4() == address.Is4() || f.Local.Addr() == netip.IPv6Unspecified()
}

// searchLater searches after a time, and then regularly until the service ends.
func (w *Watch) searchLater(after time.Duration) {
	time.AfterFunc(after, func() {
		w.search.running.Lock()
		w.searchSockets()
		w.search.running.Unlock()
		w.Mu.Lock()
		defer w.Mu.Unlock()
		if !w.Removed {
			w.searchLater(searchInterval)
		}
	})
}

// Search searches for status, unless a search is running or has just ended. The caller does not hold the lock of the service.
func (w *Watch) Search() {
	if !w.search.running.TryLock() {
		return
	}
	defer w.search.running.Unlock()
	if time.Since(w.search.at) >= statusInterval {
		w.searchSockets()
	}
}

// base is what a search compares sockets with.
type base struct {
	conn       *sockdiag.Conn
	links      *netlink.Handle
	netns      uint64
	listeners  map[int]config.Listener
	served     []config.Listener // of all services in the network namespace
	lookup     bool
	registered map[uint64]bool // cookies
	members    map[int]string  // members and former members by process id, as in "member of slot 1"
	related    map[int]string  // results of relative
}

// searchSockets looks for the sockets that the kernel prefers to those of the service. The caller holds w.search.running.
func (w *Watch) searchSockets() {
	defer func() { w.search.at = time.Now() }()
	base, err := w.readBase()
	if err != nil {
		w.Log.Debug("sockets not searched", "error", err)
		return
	}
	if base == nil {
		return
	}
	defer base.close()
	sockets, err := find(base.conn, base.listeners, base.lookup, base.isKnown)
	if err != nil {
		w.Log.Debug("sockets not searched", "error", err)
		return
	}
	w.findProcesses(sockets)
	w.forget(sockets)
	// A policy may have added services during the search.
	base.served = append(base.served, w.servedIn(base.netns)...)
	var all []found
	for _, one := range sockets {
		processes := w.search.processes[one.Cookie]
		switch {
		case len(all) == mostSockets:
		case one.Outside && !w.isOutside(&one, processes):
		// A member has a socket for each device.
		case one.Remote.IsValid() && (len(processes) == 0 && w.search.scans[one.Cookie] == 0 || base.memberOf(processes) != ""):
		case base.isServed(&one):
		case len(processes) > 0:
			all = append(all, found{Socket: one, process: &processes[0], member: base.memberOf(processes[:1])})
		default:
			all = append(all, found{Socket: one})
		}
	}
	nameInterfaces(base.links, all)
	w.Mu.Lock()
	defer w.Mu.Unlock()
	if w.CheckOpen() != nil {
		return
	}
	registered := w.registeredSockets() // by now
	w.note(slices.DeleteFunc(all, func(one found) bool { return registered[one.Cookie] }))
}

// nameInterfaces sets the names of the interfaces. The caller does not hold the lock of the service: the kernel may be busy with other
// changes of interfaces (rtnl_lock).
func nameInterfaces(links *netlink.Handle, sockets []found) {
	names := make(map[uint32]string)
	for i := range sockets {
		one := &sockets[i]
		if one.Ifindex == 0 {
			continue
		}
		if _, known := names[one.Ifindex]; !known {
			names[one.Ifindex] = strconv.FormatUint(uint64(one.Ifindex), 10)
			if link, err := links.LinkByIndex(int(one.Ifindex)); err == nil {
				names[one.Ifindex] = link.Attrs().Name
			}
		}
		one.Interface = names[one.Ifindex]
	}
}

// readBase returns nil if the service is closed.
func (w *Watch) readBase() (*base, error) {
	w.Mu.Lock()
	if w.CheckOpen() != nil {
		w.Mu.Unlock()
		return nil, nil
	}
	b := &base{
		netns: w.NetnsInode, listeners: maps.Clone(w.Listeners), lookup: w.UsesLookup(), registered: w.registeredSockets(),
		members: make(map[int]string), related: make(map[int]string),
	}
	for _, seat := range w.Formers {
		b.members[seat.Process.PID] = fmt.Sprintf("former member of slot %d", seat.Slot)
	}
	for _, seat := range w.Seats {
		b.members[seat.Process.PID] = fmt.Sprintf("member of slot %d", seat.Slot)
	}
	err := netns.Do(w.SocketNetns(), func() (err error) {
		if b.conn, err = sockdiag.Open(); err != nil {
			return err
		}
		if b.links, err = netlink.NewHandle(unix.NETLINK_ROUTE); err != nil {
			b.conn.Close()
		}
		return err
	})
	w.Mu.Unlock()
	if err != nil {
		return nil, err
	}
	b.served = w.servedIn(b.netns)
	return b, nil
}

func (b *base) close() {
	b.conn.Close()
	b.links.Close()
}

// registeredSockets returns the cookies of the keeper sockets and of the sockets of the members and of former members.
func (w *Watch) registeredSockets() map[uint64]bool {
	cookies := make(map[uint64]bool)
	for seat := range w.eachSeat {
		for _, socket := range seat.Sockets {
			cookies[socket.Cookie] = true
		}
	}
	for _, fd := range w.KeeperSockets {
		if cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_COOKIE); err == nil {
			cookies[cookie] = true
		}
	}
	return cookies
}

// eachSeat calls f for each member and each former member, until f returns false.
func (w *Watch) eachSeat(f func(*core.Seat) bool) {
	for _, seat := range w.Seats {
		if !f(seat) {
			return
		}
	}
	for _, seat := range w.Formers {
		if !f(seat) {
			return
		}
	}
}

// servedIn returns the listeners of all services in a network namespace. The caller does not hold the lock of the service.
func (w *Watch) servedIn(netns uint64) []config.Listener {
	if w.Host.Listeners == nil {
		return nil
	}
	return w.Host.Listeners(netns)
}

// isKnown reports whether a socket is registered, or has the address of another service.
func (b *base) isKnown(s *Socket) bool { return b.registered[s.Cookie] || b.isServed(s) }

// isServed reports whether a socket has the address of a listener of another service.
func (b *base) isServed(s *Socket) bool {
	return !s.Outside && !s.Remote.IsValid() && s.Ifindex == 0 && slices.ContainsFunc(b.served, func(l config.Listener) bool {
		return l.Protocol == s.Protocol && l.Address == s.Local
	})
}

// mostHolders limits the processes that have a socket and are compared with the members.
const mostHolders = 8

// memberOf returns the first member of which one of the processes is a descendant, or which is one of them, or "".
func (b *base) memberOf(processes []sockdiag.Process) string {
	for _, process := range processes[:min(len(processes), mostHolders)] {
		text, known := b.related[process.PID]
		if !known {
			text = b.relative(process.PID)
			b.related[process.PID] = text
		}
		if text != "" {
			return text
		}
	}
	return ""
}

func (b *base) relative(pid int) string {
	p, err := member.Read(pid)
	if err != nil {
		return ""
	}
	for _, one := range append([]int{p.PID}, core.Ancestors(p)...) {
		if text := b.members[one]; text != "" {
			return text
		}
	}
	return ""
}

// findProcesses finds the processes of sockets. For sockets that have no known process, it starts a scan, and does not wait long for it: a scan reads the
// descriptors of all processes.
func (w *Watch) findProcesses(sockets []Socket) {
	known := make(map[uint64][]sockdiag.Process)
	missing := make(map[uint32]uint64)
	for _, s := range sockets {
		processes := slices.DeleteFunc(w.search.processes[s.Cookie], func(p sockdiag.Process) bool { return !p.Has(s.Inode) })
		if len(processes) > 0 {
			known[s.Cookie] = processes
		} else if s.Inode != 0 {
			missing[s.Inode] = s.Cookie
		}
	}
	w.search.processes = known
	w.takeScan(missing, 0)
	if len(missing) == 0 || w.search.scan != nil || time.Now().Before(w.search.nextScan) {
		return
	}
	one := &scan{inodes: maps.Clone(missing), done: make(chan struct{})}
	w.search.scan = one
	go func() {
		defer close(one.done)
		runtime.LockOSThread() // for the CPU time of the thread
		defer runtime.UnlockOSThread()
		began := threadTime()
		one.byInode = scanProcesses(one.inodes)
		one.took = threadTime() - began
	}()
	w.takeScan(missing, scanPatience)
}

// threadTime returns the CPU time of the thread.
func threadTime() time.Duration {
	var usage unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_THREAD, &usage); err != nil {
		return 0
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

// takeScan takes the result of a scan that ends within a time, and removes the sockets that it has found from missing.
func (w *Watch) takeScan(missing map[uint32]uint64, patience time.Duration) {
	one := w.search.scan
	if one == nil {
		return
	}
	select {
	case <-one.done:
	case <-time.After(patience):
		return
	}
	w.search.scan = nil
	unconfirmed := false
	for inode, cookie := range one.inodes {
		switch processes := one.byInode[inode]; {
		case missing[inode] != cookie: // it has been closed
		case len(processes) > 0:
			w.search.processes[cookie] = processes
			delete(missing, inode)
		default:
			w.search.scans[cookie]++
			unconfirmed = unconfirmed || w.search.scans[cookie] < mostScans
		}
	}
	w.search.confirms = unconfirmed && !w.search.confirms
	share := time.Duration(scanShare)
	if w.search.confirms {
		share = confirmShare
	}
	w.search.nextScan = time.Now().Add(share * one.took)
}

// scanProcesses returns the processes of sockets by their inodes. Those of threads come second, because few threads have descriptors of
// their own.
func scanProcesses(inodes map[uint32]uint64) map[uint32][]sockdiag.Process {
	wanted := func(inode uint32) bool { return inodes[inode] != 0 }
	found, _, err := sockdiag.ReadProcesses(wanted)
	if err != nil || len(found) == len(inodes) {
		return found
	}
	if more, err := sockdiag.ReadThreads(func(inode uint32) bool { return wanted(inode) && len(found[inode]) == 0 }); err == nil {
		maps.Copy(found, more)
	}
	return found
}

// forget forgets the sockets that were closed.
func (w *Watch) forget(sockets []Socket) {
	open := make(map[uint64]bool)
	for _, s := range sockets {
		open[s.Cookie] = true
	}
	maps.DeleteFunc(w.search.scans, func(cookie uint64, _ int) bool { return !open[cookie] })
	maps.DeleteFunc(w.search.outside, func(cookie uint64, _ bool) bool { return !open[cookie] })
}

// isOutside reports whether a socket with the address of a listener has left the SO_REUSEPORT group, or shares the address without
// SO_REUSEPORT, so that the kernel can select the socket itself. A socket that cannot be copied counts as outside: its descriptor is hidden, in
// a message of a Unix socket or in a thread before Linux 6.9.
func (w *Watch) isOutside(s *Socket, processes []sockdiag.Process) bool {
	if w.search.outside[s.Cookie] {
		return true // also if it has shared its address with another one since
	}
	for _, p := range processes {
		fd, err := p.Open(s.Cookie)
		if err != nil {
			continue
		}
		outside := w.hasLeft(fd)
		unix.Close(fd)
		if outside {
			w.search.outside[s.Cookie] = true
		}
		delete(w.search.scans, s.Cookie)
		return outside
	}
	if len(processes) > 0 {
		w.search.scans[s.Cookie]++
		delete(w.search.processes, s.Cookie)
	}
	return w.search.scans[s.Cookie] >= mostScans
}

func (w *Watch) hasLeft(fd int) bool {
	if shares, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT); err != nil || shares == 0 {
		return err == nil
	}
	w.Mu.Lock()
	defer w.Mu.Unlock()
	if w.CheckOpen() != nil {
		return false
	}
	in, err := w.Path.IsInGroup(fd)
	return err == nil && !in
}

// note notes sockets, and logs those that were not logged before. A socket without a process is logged when the process was searched for,
// or after logPatience.
func (w *Watch) note(sockets []found) {
	before, now := make(map[uint64]*found), time.Now()
	for i := range w.sockets {
		before[w.sockets[i].Cookie] = &w.sockets[i]
	}
	messages := 0
	for i := range sockets {
		one := &sockets[i]
		one.since = now
		if b := before[one.Cookie]; b != nil {
			one.since, one.noted = b.since, b.noted
		}
		if one.noted || one.process == nil && one.Inode != 0 && w.search.scans[one.Cookie] == 0 && now.Sub(one.since) < logPatience {
			continue
		}
		one.noted = true
		if messages++; messages <= mostLogged {
			status := one.status()
			w.Log.Warn("a socket can bypass the service", events.SocketBypasses, "socket", status.Socket, "takes", status.Takes, "pid", status.PID, "command", status.Command)
		}
	}
	if len(sockets) == 0 && slices.ContainsFunc(w.sockets, func(one found) bool { return one.noted }) {
		w.Log.Info("no socket bypasses the service any more", events.NoneBypasses)
	}
	w.sockets = sockets
}

// status returns the socket as in api.ServiceStatus.
func (f *found) status() api.BypassStatus {
	s := api.BypassStatus{Socket: f.Socket.String(), Takes: f.Takes(), Cookie: f.Cookie}
	if f.process != nil {
		s.PID, s.Command = f.process.PID, f.process.Command
	}
	return s
}
