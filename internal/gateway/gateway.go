// SPDX-License-Identifier: Apache-2.0

// Package gateway translates TCP, UDP and ICMP echo between a TUN interface and ordinary sockets of the host. The network stack
// behind the TUN interface is called the guest. The package needs no privilege, does not depend on namespaces, and does not buffer
// TCP payload: the gateway acknowledges only data that the host's socket has accepted, and data that the guest has not
// acknowledged stay in the host's socket. The exception is described in tcp.go.
//
// Start reading with loop.go, the event loop; poller.go, how the loop waits; tun.go, the input of packets from the guest; tcp.go,
// the theory of operation of TCP; and udp.go.
package gateway

import (
	"cmp"
	"fmt"
	"hash/maphash"
	"log/slog"
	"net/netip"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/gateway/access"
	"sockeye/internal/gateway/packet"
	"sockeye/internal/gateway/timer"
	"sockeye/room"
)

// Config configures a gateway.
type Config struct {
	TUN int // descriptor of an interface with IFF_TUN, IFF_NO_PI and IFF_VNET_HDR; the gateway closes it
	MTU int // of the TUN interface, bytes
	// Guest4 and Guest6 are the addresses of the guest; the zero value for none.
	Guest4, Guest6 netip.Addr
	// Host4 and Host6 replace source addresses to which the guest cannot reply: loopback addresses, and the guest's own.
	Host4, Host6 netip.Addr
	Forwards     []Forward
	// Diag is a sock_diag socket of the guest's network namespace (sockdiag.OpenSocket), for pacing datagrams by the guest's
	// receive buffers; 0: no pacing. A Forward with Deferred requires a socket that watches closed sockets.
	Diag     int
	Outbound access.Outbound
	Kernel   room.Kernel
	Formula  *Formula // nil: the estimate of package room, and full sockets are polled
	// Connections is the maximum number of TCP connections in both directions. Default: 65536.
	Connections int
	// Outgoing is the maximum number of TCP connections that the guest opens, and separately of UDP sockets, each of which
	// occupies a port of the host. Connections beyond the maximum are refused; a socket beyond the maximum evicts the oldest flow
	// that has a connected socket. Default: a quarter of the host's port range.
	Outgoing int
	// Memory is the limit of all send buffers of the host's sockets together, in bytes; each may hold 64 KB regardless of the
	// limit. Default: a quarter of the low mark of net.ipv4.tcp_mem.
	Memory int
	// Linger is how long Run continues after the end of its context, to deliver data that programs of the guest sent before they
	// exited.
	Linger time.Duration
	Log    *slog.Logger
}

// Forward is a socket of the host that the gateway serves for the guest.
type Forward struct {
	FD       int   // listening for TCP, bound for UDP; not blocking; the gateway closes it
	Protocol uint8 // unix.IPPROTO_TCP or IPPROTO_UDP
	Port     uint16
	// Deferred defers the forward until the guest listens on the ports of all deferred forwards: a UDP socket is then bound to
	// the first free address of the list, and a TCP socket, which is bound already, listens. Empty: the socket is bound or
	// listens already.
	Deferred []netip.AddrPort
}

// Gateway is a running gateway. All fields but the counts belong to the goroutine of Run.
type Gateway struct {
	config Config
	log    *slog.Logger
	poller *poller
	wake   int // eventfd that ends the loop

	// Event loop.
	clock         func() time.Time
	now           time.Time // of this turn
	timers        timer.Queue
	handlers      []registered // by descriptor
	registrations int32        // number of descriptors registered so far
	failed        error        // the error that Run returns
	stopping      bool         // the context of Run has ended

	// Packets.
	readBuffer    []byte         // packets of the guest that were read in this turn
	writeBuffer   []byte         // for a packet to the guest
	partial       packet.Partial // incomplete datagrams of the guest
	fragmentID    uint32         // identification of the last fragmented datagram to the guest
	onlyEvent     bool           // the turn has one event
	singlePackets int            // turns since one has read more than one packet

	// TCP.
	conns        map[endpoints]*conn
	outgoing     int             // connections opened by the guest that have a socket
	connecting   time.Duration   // spent on opening connections since the last resumeSYNs
	deferredSYNs [][]byte        // packets of the guest that wait for a later turn, see acceptSYN
	seed         maphash.Seed    // of initial sequence numbers
	windShift    uint8           // Rcv.Wind.Shift of every connection with window scaling
	ackQueue     []*conn         // connections that acknowledge at the end of the turn
	delayedAcks  []delayedAck    // delayed acknowledgements, by time
	outputQueue  []*conn         // connections that exceeded their budget of a turn
	outputTurn   []*conn         // the output queue of the previous turn
	flushQueue   []*conn         // connections to flush when the TUN's packets of the turn are processed
	freeBatches  []*segmentBatch // for reuse
	backlog      int             // bytes of all backlogs
	memory       sendMemory
	windows      windowTimer // with Config.Formula

	// UDP and ICMP.
	flows        udpFlows
	bound        boundSockets
	received     *receiveBatch
	gso          gsoBatch      // datagrams of this turn that are not sent yet
	guestSockets *guestSockets // nil: there is no sock_diag socket
	openBudget   timeBudget
	echoes       map[endpoints]*echo

	maxFiles uint64 // RLIMIT_NOFILE
	warned   [warnings]time.Time
	counts   [reasons]atomic.Uint64
}

// endpoints identifies a connection or a flow by the guest's end and the remote end. For ICMP the guest's port is the identifier of the
// echo.
type endpoints struct{ guest, remote netip.AddrPort }

const (
	defaultConnections = 65536
	readSize           = packet.VnetHeader + packet.MaxSize + packet.MaxHeaders
	tunBudget          = 64 // maximum number of packets read in a turn
	// After minSinglePackets turns that found one packet, a turn reads one packet only: the second read(2) would find the queue
	// empty. Every turn of that number tries again. The cost of a wrong guess is one epoll_wait(2) per packet.
	minSinglePackets = 16
)

// New returns a gateway. The gateway owns the descriptors of the configuration, and New closes them if it fails.
func New(c Config) (_ *Gateway, err error) {
	room.Prepare() // in the sandbox, no file can be opened
	g := &Gateway{
		config: c, log: c.Log, wake: -1, clock: time.Now, now: time.Now(), seed: maphash.MakeSeed(), windShift: chooseWindShift(),
		conns: map[endpoints]*conn{}, echoes: map[endpoints]*echo{},
		flows: udpFlows{all: map[endpoints]*udpFlow{}, sources: map[netip.AddrPort]*source{}},
		bound: boundSockets{}, received: newReceiveBatch(), partial: packet.Partial{},
		readBuffer: make([]byte, tunBudget*readSize), writeBuffer: make([]byte, readSize),
	}
	g.memory = sendMemory{g: g, limit: cmp.Or(c.Memory, defaultMemory()), waiting: map[*conn]bool{}}
	g.memory.timer.Owner = &g.memory
	if c.Formula != nil {
		g.windows.start(g)
	}
	if g.log == nil {
		g.log = slog.New(slog.DiscardHandler)
	}
	if g.config.Connections == 0 {
		g.config.Connections = defaultConnections
	}
	if g.config.Outgoing == 0 {
		g.config.Outgoing = defaultOutgoing()
	}
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return nil, fmt.Errorf("read the limit of descriptors: %w", err)
	}
	g.maxFiles = limit.Cur
	defer func() {
		if err != nil {
			g.close()
		}
	}()
	if g.poller, err = newPoller(); err != nil {
		return nil, err
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
		g.guestSockets = newGuestSockets(g)
		if err := g.register(c.Diag, unix.EPOLLIN, g.guestSockets); err != nil {
			return nil, err
		}
	}
	for _, f := range c.Forwards {
		if len(f.Deferred) > 0 {
			continue
		}
		if err := g.addForward(f); err != nil {
			return nil, err
		}
	}
	return g, nil
}

// addForward registers the socket of a forward with epoll.
func (g *Gateway) addForward(f Forward) error {
	var h handler = &listener{g: g, Forward: f}
	if f.Protocol == unix.IPPROTO_UDP {
		b, err := newBound(g, f)
		if err != nil {
			return fmt.Errorf("read family of socket: %w", err)
		}
		g.bound[f.Port] = append(g.bound[f.Port], b)
		h = b
	}
	return g.register(f.FD, unix.EPOLLIN, h)
}

func (g *Gateway) close() {
	g.resetConnections()
	for _, u := range g.flows.all {
		u.remove()
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
	for _, fd := range []int{g.config.TUN, g.wake} {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
	if g.poller != nil {
		g.poller.close()
	}
}

// resetConnections resets all TCP connections of the guest. Otherwise sockets with unsent data of programs that have exited would
// keep memory of the guest's kernel, and the network namespace, for minutes.
func (g *Gateway) resetConnections() {
	for _, c := range g.conns {
		if c.fd < 0 {
			continue
		}
		c.resetGuest()
		if !c.state.finReceived() {
			resetOnClose(c.fd) // a FIN would tell the peer that the data are complete
		}
		unix.Close(c.fd)
		c.fd = -1
	}
}
