// SPDX-License-Identifier: Apache-2.0

// Package gateway joins a network namespace to the host's own sockets. It reads IP
// packets from a TUN interface in the namespace (the guest), speaks TCP, UDP and ICMP
// echo to it, and copies payload into and out of ordinary sockets. It needs no
// privilege, and keeps no data: what a socket has not taken is not acknowledged to the
// guest, and what the guest has not acknowledged stays in the socket.
package gateway

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"log/slog"
	"math/bits"
	"net/netip"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"sockeye/room"
)

// Config is what a gateway joins.
type Config struct {
	TUN int // of an interface with IFF_TUN, IFF_NO_PI and IFF_VNET_HDR; the gateway closes it
	MTU int // of the TUN interface, bytes
	// Guest4 and Guest6 are the addresses of the guest; the zero value for none.
	Guest4, Guest6 netip.Addr
	// Host4 and Host6 are from where the guest sees connections of the host itself come,
	// which it could not answer otherwise: from loopback, or the guest's own addresses.
	Host4, Host6 netip.Addr
	Forwards     []Forward
	// Diag is a socket of the guest's sock_diag, by which datagrams go inside no faster than
	// they are read; 0: none. Where a forward is for later, there must be one, which listens
	// to what is closed (SKNLGRP_INET_TCP_DESTROY and its like).
	Diag     int
	Outbound Outbound
	Kernel   room.Kernel
	// Connections bounds those of TCP, whoever begins them. Default: 65536.
	Connections int
	// Outgoing bounds the TCP connections that the guest begins, and the sockets of UDP, each:
	// they take ports of the host. One more connection is refused, one more socket takes the
	// place of the oldest flow that has one to itself. Default: a quarter of the host's port range.
	Outgoing int
	// Memory bounds what the host's sockets of the guest's connections hold to send together, in bytes; each may
	// hold 64 KB even so. Default: a quarter of the low mark of net.ipv4.tcp_mem.
	Memory int
	// Linger is how long Run goes on after its context has ended, for what programs of
	// the guest sent before they ended. 0: not at all.
	Linger time.Duration
	Log    *slog.Logger
}

// Forward is a socket of the host that the gateway serves for the guest.
type Forward struct {
	FD       int   // listening for TCP, bound for UDP; not blocking; the gateway closes it
	Protocol uint8 // unix.IPPROTO_TCP or IPPROTO_UDP
	Port     uint16
	// Later is where a socket of UDP is bound, at the first of them that is free, and one of
	// TCP, which is bound, listens, once the guest does on all such ports. None: it does so
	// already.
	Later []netip.AddrPort
}

// Gateway is a gateway at work.
type Gateway struct {
	config Config
	log    *slog.Logger
	epoll  int
	wake   int // eventfd that ends the loop
	clock  func() time.Time
	now    time.Time
	// yielded is when other goroutines could run last.
	yielded time.Time
	seed    maphash.Seed // of sequence numbers
	scale   uint8        // of the windows that the guest is told

	handlers  []registered // by descriptor
	registers int32        // how many descriptors were registered so far
	conns     map[flow]*conn
	datagram  flows
	outgoing  int // connections that the guest began and that have a socket
	warned    [warnings]time.Time
	files     uint64 // descriptors that the process may have
	bounds    bounds
	inbox     *inbox
	parts     map[partsOf][]byte // of packets that came in fragments, so far
	ports     *guestPorts        // nil where no forward is for later
	failed    error              // what ends the gateway
	ending    bool               // the guest's program has ended
	fragments uint32             // identification of the last datagram that was sent in fragments
	echoes    map[flow]*echo
	timers    timers
	dirty     []*conn  // that have something to acknowledge
	ready     []*conn  // that have more to send than fit into their turn
	turned    []*conn  // those of the turn before
	packets   []byte   // of the guest, that were read in this turn
	train     train    // of datagrams of these to send
	holding   []*conn  // that these are of
	batches   []*batch // not in use
	buffer    []byte   // for what is sent to the guest
	spilled   int      // bytes that are kept of segments which sockets did not take whole
	memory    sendMemory
	opening   opening
	counts    [reasons]atomic.Uint64
}

// flow names a connection: the guest's end, and the other one. Of ICMP the port of
// the guest is the identifier.
type flow struct{ guest, remote netip.AddrPort }

// handler takes the events of a descriptor.
type handler interface{ event(events uint32) }

// registered is the handler of a descriptor, with a number that its events bear: those of
// one that was closed, and whose number another descriptor has got, are nobody's.
type registered struct {
	handler
	number int32
}

// Reason is why something was counted.
type Reason int

// The reasons.
const (
	Malformed     Reason = iota // packets that are none, or of a protocol that is not joined
	NotAllowed                  // to where the guest may not go
	TooMany                     // connections, or no descriptor or port for another one
	PartialSend                 // a socket took less than it was given
	Retransmitted               // segments to the guest, again
	OutOfOrder                  // segments of the guest that were dropped, as one before is missing
	Opened                      // connections
	Refused                     // connections that the other end did not take
	Reset                       // connections that ended by RST or an error
	Closed                      // connections that ended in order
	TUNFull                     // packets that the guest's interface did not take
	UrgentData                  // connections ended for it
	Evicted                     // flows of UDP that others took the place of
	Unsolicited                 // datagrams from where the guest did not send to, or not for long
	reasons
)

// Counts are how often each thing happened.
func (g *Gateway) Counts() (c [reasons]uint64) {
	for i := range c {
		c[i] = g.counts[i].Load()
	}
	return c
}

func (g *Gateway) count(r Reason) { g.counts[r].Add(1) }

const (
	defaultConnections = 65536
	maxPacket          = 1 << 16
	mostRead           = vnetHeader + maxPacket + maxHeaders
	tunBudget          = 64 // packets that are read in a turn: what comes together goes to a socket together
)

// New makes a gateway. It owns the descriptors of the configuration from here on.
func New(c Config) (_ *Gateway, err error) {
	g := &Gateway{
		config: c, log: c.Log, epoll: -1, wake: -1, clock: time.Now, now: time.Now(), seed: maphash.MakeSeed(), scale: windowScale(),
		conns: map[flow]*conn{}, datagram: flows{by: map[flow]*udpFlow{}, sources: map[netip.AddrPort]*source{}}, echoes: map[flow]*echo{},
		bounds: bounds{}, inbox: newInbox(), parts: map[partsOf][]byte{},
		packets: make([]byte, tunBudget*mostRead), buffer: make([]byte, mostRead),
	}
	g.memory = sendMemory{g: g, most: cmp.Or(c.Memory, mostMemory()), waiting: map[*conn]bool{}}
	g.memory.timer.owner = &g.memory
	if g.log == nil {
		g.log = slog.New(slog.DiscardHandler)
	}
	if g.config.Connections == 0 {
		g.config.Connections = defaultConnections
	}
	if g.config.Outgoing == 0 {
		g.config.Outgoing = portsOf()
	}
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return nil, fmt.Errorf("read the limit of descriptors: %w", err)
	}
	g.files = limit.Cur
	defer func() {
		if err != nil {
			g.close()
		}
	}()
	if g.epoll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return nil, fmt.Errorf("make epoll: %w", err)
	}
	if g.wake, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return nil, fmt.Errorf("make eventfd: %w", err)
	}
	if err := g.register(g.wake, unix.EPOLLIN, wakeHandler{}); err != nil {
		return nil, err
	}
	if err := g.register(c.TUN, unix.EPOLLIN, (*guestPackets)(g)); err != nil {
		return nil, err
	}
	if c.Diag != 0 {
		g.ports = newGuestPorts(g)
		if err := g.register(c.Diag, unix.EPOLLIN, g.ports); err != nil {
			return nil, err
		}
	}
	for _, f := range c.Forwards {
		if len(f.Later) > 0 {
			continue
		}
		if err := g.serve(f); err != nil {
			return nil, err
		}
	}
	return g, nil
}

// serve has what comes to a socket of the host go inside.
func (g *Gateway) serve(f Forward) error {
	var h handler = &listener{g: g, Forward: f}
	if f.Protocol == unix.IPPROTO_UDP {
		b, err := newBound(g, f)
		if err != nil {
			return fmt.Errorf("read family of socket: %w", err)
		}
		g.bounds[f.Port] = append(g.bounds[f.Port], b)
		h = b
	}
	return g.register(f.FD, unix.EPOLLIN, h)
}

const (
	// leastScale and mostScale are the window scales that the guest gets: the smallest
	// that a whole send buffer fits in, as its steps are what rounding costs. Bytes of
	// windows: up to 64 KB shifted so far.
	leastScale = 6
	mostScale  = 14 // RFC 7323, section 2.3
)

// windowScale is by how much a send buffer may grow.
func windowScale() uint8 {
	text, err := os.ReadFile("/proc/sys/net/ipv4/tcp_wmem")
	if fields := strings.Fields(string(text)); err == nil && len(fields) == 3 {
		if most, err := strconv.ParseUint(fields[2], 10, 32); err == nil && most > 0 {
			return uint8(min(max(bits.Len64((most-1)>>16), leastScale), mostScale))
		}
	}
	return leastScale
}

type wakeHandler struct{}

func (wakeHandler) event(uint32) {}

// register has events of a descriptor handled. EPOLLET is up to the caller.
func (g *Gateway) register(fd int, events uint32, h handler) error {
	for fd >= len(g.handlers) {
		g.handlers = append(g.handlers, registered{})
	}
	g.registers++
	g.handlers[fd] = registered{h, g.registers}
	if err := g.watch(unix.EPOLL_CTL_ADD, fd, events); err != nil {
		g.handlers[fd] = registered{}
		return fmt.Errorf("watch descriptor: %w", err)
	}
	return nil
}

// watch is epoll_ctl(2) for a descriptor that is registered.
func (g *Gateway) watch(operation, fd int, events uint32) error {
	return unix.EpollCtl(g.epoll, operation, fd, &unix.EpollEvent{Events: events, Fd: int32(fd), Pad: g.handlers[fd].number})
}

// ignore has events of a descriptor handled no more.
func (g *Gateway) ignore(fd int) {
	g.handlers[fd] = registered{}
	// That fails for a descriptor only that is not registered.
	_ = unix.EpollCtl(g.epoll, unix.EPOLL_CTL_DEL, fd, nil)
}

// forget closes a descriptor.
func (g *Gateway) forget(fd int) {
	if fd < len(g.handlers) {
		g.handlers[fd] = registered{}
	}
	unix.Close(fd)
}

// OwnProcess prepares a process that does little else than to run a gateway: the Go
// runtime gets one processor, and has no reason to look for work for others, which
// would take a fifth of the CPU time.
func OwnProcess() { runtime.GOMAXPROCS(1) }

// Run joins until ctx ends or the guest's interface is gone, which is no error.
func (g *Gateway) Run(ctx context.Context) error {
	defer g.close()
	woken := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(woken)
		var one = [8]byte{1}
		_, _ = unix.Write(g.wake, one[:]) // it is never full
	})
	defer func() {
		if !stop() {
			<-woken
		}
	}()
	events := make([]unix.EpollEvent, 256)
	var end time.Time // when it lingers
	for {
		if ctx.Err() != nil && end.IsZero() {
			g.ending, end = true, g.clock().Add(g.config.Linger)
			g.ignore(g.wake)
		}
		n, err := g.poll(events, g.timeout(end))
		switch {
		case errors.Is(err, errGone):
			return nil
		case err != nil:
			return err
		case !end.IsZero() && (!g.now.Before(end) || n == 0 && !g.unfinished()):
			return nil
		}
	}
}

// errGone is what poll returns when the guest's interface is gone.
var errGone = errors.New("the interface of the guest is gone")

// poll waits for events, in milliseconds, and handles them. It returns how many there were.
func (g *Gateway) poll(events []unix.EpollEvent, timeout int) (n int, err error) {
	n, err = g.wait(events, timeout)
	if err != nil && !errors.Is(err, unix.EINTR) {
		return 0, fmt.Errorf("wait for events: %w", err)
	}
	n = max(n, 0)
	for _, e := range events[:n] {
		h := g.handlers[e.Fd]
		if h.handler == nil || h.number != e.Pad {
			continue // closed in this turn
		}
		if e.Fd == int32(g.config.TUN) && e.Events&(unix.EPOLLERR|unix.EPOLLHUP) != 0 && e.Events&unix.EPOLLIN == 0 {
			return 0, errGone
		}
		h.event(e.Events)
	}
	g.turn()
	return n, g.failed
}

const (
	// brief is how long the loop waits with its processor of the Go runtime. To hand that
	// over, as it is done for system calls that may block, has the runtime look around many
	// times, which takes more CPU time than packets do.
	brief = 48 * time.Millisecond
	// longestTurn is after what time the loop lets other goroutines run. The runtime sends a
	// signal to who keeps a processor for 10 ms.
	longestTurn = 8 * time.Millisecond
)

// wait is epoll_wait(2). It tells the time after it.
func (g *Gateway) wait(events []unix.EpollEvent, timeout int) (n int, err error) {
	for short := 0; short < int(brief/time.Millisecond); short += int(longestTurn / time.Millisecond) {
		part := int(longestTurn / time.Millisecond)
		if timeout >= 0 {
			part = min(part, timeout-short)
		}
		ready, _, errno := unix.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(g.epoll), uintptr(unsafe.Pointer(unsafe.SliceData(events))),
			uintptr(len(events)), uintptr(part), 0, 0)
		if errno != 0 {
			return 0, errno
		}
		if g.now = g.clock(); g.now.Sub(g.yielded) >= longestTurn {
			g.yielded = g.now
			runtime.Gosched()
		}
		if ready > 0 || timeout >= 0 && short+part >= timeout {
			return int(ready), nil
		}
	}
	if timeout > 0 {
		timeout -= int(brief / time.Millisecond)
	}
	n, err = unix.EpollWait(g.epoll, events, timeout)
	g.now = g.clock()
	g.yielded = g.now
	return n, err
}

// lingerTurn is how often Run looks whether it has to linger any more.
const lingerTurn = 20 * time.Millisecond

// timeout is for epoll_wait(2), in milliseconds.
func (g *Gateway) timeout(end time.Time) int {
	if len(g.ready) > 0 {
		return 0
	}
	next, ok := g.timers.next()
	if !end.IsZero() {
		soon := g.clock().Add(lingerTurn)
		if soon.After(end) {
			soon = end
		}
		if !ok || soon.Before(next) {
			next, ok = soon, true
		}
	}
	if !ok {
		return -1
	}
	return int(max(next.Sub(g.clock())+time.Millisecond-1, 0) / time.Millisecond)
}

// unfinished tells whether there is a connection that the guest has not ended. One that is not
// established yet has nothing to deliver.
func (g *Gateway) unfinished() bool {
	for _, c := range g.conns {
		if c.fd >= 0 && !c.shut && c.state != connecting {
			return true
		}
	}
	return false
}

// turn does what has come together: acknowledgements, what is left to be sent, timers.
func (g *Gateway) turn() {
	for _, c := range g.dirty {
		c.dirty = false
		if c.fd >= 0 {
			c.acknowledge()
		}
	}
	clear(g.dirty)
	g.dirty = g.dirty[:0]
	g.ready, g.turned = g.turned[:0], g.ready
	for _, c := range g.turned {
		c.queued = false
		if c.fd >= 0 {
			c.output()
		}
	}
	clear(g.turned)
	g.timers.run(g.now)
}

// endConnections ends those of TCP, at both ends. A program that has ended leaves sockets inside, with what they
// could not send; their network namespace and their memory would stay for minutes.
func (g *Gateway) endConnections() {
	for _, c := range g.conns {
		if c.fd < 0 {
			continue
		}
		c.resetGuest()
		if !c.shut {
			c.resetSocket() // what the guest sent was not all
		}
		unix.Close(c.fd)
		c.fd = -1
	}
}

func (g *Gateway) close() {
	g.endConnections()
	for _, u := range g.datagram.by {
		u.end()
	}
	for _, e := range g.echoes {
		unix.Close(e.fd)
	}
	for _, f := range g.config.Forwards {
		if f.FD >= 0 {
			unix.Close(f.FD)
		}
	}
	if g.config.Diag != 0 {
		unix.Close(g.config.Diag)
	}
	for _, fd := range []int{g.config.TUN, g.epoll, g.wake} {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
}

// guestPackets handles the packets of the guest.
type guestPackets Gateway

func (t *guestPackets) event(uint32) {
	g := (*Gateway)(t)
	for i, free := 0, g.packets; i < tunBudget; i++ {
		n, err := direct(unix.SYS_READ, g.config.TUN, free[:mostRead], 0)
		if err != nil || n <= vnetHeader {
			break
		}
		g.input(free[vnetHeader:n])
		free = free[n:]
	}
	g.train.send()
	for _, c := range g.holding {
		c.conclude()
	}
	clear(g.holding)
	g.holding = g.holding[:0]
}

// input takes a packet of the guest, from its IP header on.
func (g *Gateway) input(p []byte) {
	p, ok := g.whole(p)
	if !ok {
		return
	}
	s, ok := parse(p)
	if !ok || !g.isGuest(s.from.Addr()) {
		g.count(Malformed)
		return
	}
	switch s.protocol {
	case unix.IPPROTO_TCP:
		g.tcp(&s)
	case unix.IPPROTO_UDP:
		g.udp(&s)
	case unix.IPPROTO_ICMP, unix.IPPROTO_ICMPV6:
		g.icmp(&s)
	}
}

func (g *Gateway) isGuest(a netip.Addr) bool {
	return a.IsValid() && (a == g.config.Guest4 || a == g.config.Guest6)
}

// guest is the guest's address of the family of another.
func (g *Gateway) guest(remote netip.Addr) netip.Addr {
	if remote.Is4() {
		return g.config.Guest4
	}
	return g.config.Guest6
}

// seen is the address by which the guest knows a peer.
func (g *Gateway) seen(peer netip.AddrPort) netip.AddrPort {
	a := peer.Addr()
	if !a.IsLoopback() && !g.isGuest(a) {
		return peer
	}
	if a.Is4() {
		return netip.AddrPortFrom(g.config.Host4, peer.Port())
	}
	return netip.AddrPortFrom(g.config.Host6, peer.Port())
}

// send gives a packet to the guest, with the header of the TUN. What the interface
// does not take now is dropped, as a network does.
func (g *Gateway) send(p []byte) {
	if _, err := direct(unix.SYS_WRITE, g.config.TUN, p, 0); err != nil {
		g.count(TUNFull)
	}
}
