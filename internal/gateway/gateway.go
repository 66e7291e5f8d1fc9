// SPDX-License-Identifier: Apache-2.0

// Package gateway is a packet engine: TCP, UDP and ICMP echo between a TUN interface and ordinary sockets of the host. The network
// stack behind the TUN interface is called the guest. The package needs no privilege, knows nothing of namespaces, and stores no
// payload: data that the host's socket has not accepted are not acknowledged to the guest, and data that the guest has not
// acknowledged stay in the host's socket.
//
// A reader may begin with loop.go, the event loop; tun.go, where packets of the guest arrive; tcp.go, the theory of operation of
// TCP; and udp.go.
package gateway

import (
	"cmp"
	"fmt"
	"hash/maphash"
	"log/slog"
	"math/bits"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/gateway/access"
	"sockeye/internal/gateway/timer"
	"sockeye/room"
)

// Config describes what a gateway joins.
type Config struct {
	TUN int // of an interface with IFF_TUN, IFF_NO_PI and IFF_VNET_HDR; the gateway closes it
	MTU int // of the TUN interface, bytes
	// Guest4 and Guest6 are the addresses of the guest; the zero value for none.
	Guest4, Guest6 netip.Addr
	// Host4 and Host6 replace source addresses of the host that the guest could not answer: loopback, and the guest's own.
	Host4, Host6 netip.Addr
	Forwards     []Forward
	// Diag is a sock_diag socket of the guest's network namespace (sockdiag.OpenSocket), for pacing datagrams by the guest's
	// receive buffers; 0: no pacing. A Forward with Later requires a socket that watches closed sockets.
	Diag     int
	Outbound access.Outbound
	Kernel   room.Kernel
	// Connections bounds the TCP connections, whichever end opens them. Default: 65536.
	Connections int
	// Outgoing bounds the TCP connections that the guest opens, and separately the UDP sockets: each occupies a port of the host.
	// A connection beyond the bound is refused; a socket beyond the bound evicts the oldest flow with a socket of its own.
	// Default: a quarter of the host's port range.
	Outgoing int
	// Memory bounds the send buffers of the host's sockets together, in bytes; each may hold 64 KB in any case. Default: a
	// quarter of the low mark of net.ipv4.tcp_mem.
	Memory int
	// Linger is how long Run continues after its context has ended, to deliver what programs of the guest sent before they
	// exited. 0: not at all.
	Linger time.Duration
	Log    *slog.Logger
}

// Forward is a socket of the host that the gateway serves for the guest.
type Forward struct {
	FD       int   // listening for TCP, bound for UDP; not blocking; the gateway closes it
	Protocol uint8 // unix.IPPROTO_TCP or IPPROTO_UDP
	Port     uint16
	// Later delays the forward until the guest listens on the ports of all such forwards: then a UDP socket is bound to the first
	// of these addresses that is free, and a TCP socket, bound already, listens. Empty: the socket is bound or listens already.
	Later []netip.AddrPort
}

// Gateway is a running gateway. All fields but the counts belong to the goroutine of Run.
type Gateway struct {
	config Config
	log    *slog.Logger
	epoll  int
	wake   int // eventfd that ends the loop

	// Of the event loop.
	clock         func() time.Time
	now           time.Time // of this turn
	yielded       time.Time // when other goroutines last had an occasion to run
	timers        timer.Queue
	handlers      []registered // by descriptor
	registrations int32        // number of descriptors registered so far
	failed        error        // the error that Run returns
	ending        bool         // the context of Run has ended

	// Of packets.
	readBuffer  []byte                 // packets of the guest that were read in this turn
	writeBuffer []byte                 // for a packet to the guest
	partial     map[fragmentKey][]byte // datagrams of the guest of which fragments are missing
	fragmentID  uint32                 // identification of the last datagram to the guest that was fragmented

	// Of TCP.
	conns       map[flow]*conn
	outgoing    int             // connections that the guest opened and that have a socket
	seed        maphash.Seed    // of initial sequence numbers
	windShift   uint8           // Rcv.Wind.Shift of every connection with window scaling
	ackQueue    []*conn         // connections that acknowledge at the end of the turn
	outputQueue []*conn         // connections with more to send than their budget of a turn
	outputTurn  []*conn         // the output queue of the previous turn
	flushQueue  []*conn         // connections that write to, or consume from, their socket when the TUN's packets are read
	freeBatches []*segmentBatch // for reuse
	backlog     int             // bytes of all backlogs
	memory      sendMemory

	// Of UDP and ICMP.
	flows        udpFlows
	bound        boundSockets
	inbox        *receiveBatch
	gso          gsoBatch      // datagrams of this turn that are not sent yet
	guestSockets *guestSockets // nil: the guest's sockets are not known
	openingTime  timeShare
	echoes       map[flow]*echo

	maxFiles uint64 // RLIMIT_NOFILE
	warned   [warnings]time.Time
	counts   [reasons]atomic.Uint64
}

// flow identifies a connection by the guest's end and the remote end. For ICMP the guest's port is the identifier of the echo.
type flow struct{ guest, remote netip.AddrPort }

const (
	defaultConnections = 65536
	maxPacket          = 1 << 16
	readSize           = vnetHeader + maxPacket + maxHeaders
	tunBudget          = 64 // packets that are read in a turn: what comes together goes to a socket together
)

// New makes a gateway, which owns the descriptors of the configuration from the call on, and closes them if New fails.
func New(c Config) (_ *Gateway, err error) {
	g := &Gateway{
		config: c, log: c.Log, epoll: -1, wake: -1, clock: time.Now, now: time.Now(), seed: maphash.MakeSeed(), windShift: chooseWindShift(),
		conns: map[flow]*conn{}, flows: udpFlows{all: map[flow]*udpFlow{}, sources: map[netip.AddrPort]*source{}}, echoes: map[flow]*echo{},
		bound: boundSockets{}, inbox: newReceiveBatch(), partial: map[fragmentKey][]byte{},
		readBuffer: make([]byte, tunBudget*readSize), writeBuffer: make([]byte, readSize),
	}
	g.memory = sendMemory{g: g, limit: cmp.Or(c.Memory, defaultMemory()), waiting: map[*conn]bool{}}
	g.memory.timer.Owner = &g.memory
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
		g.guestSockets = newGuestSockets(g)
		if err := g.register(c.Diag, unix.EPOLLIN, g.guestSockets); err != nil {
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

// serve registers a socket of the host whose connections or datagrams go to the guest.
func (g *Gateway) serve(f Forward) error {
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

const (
	// minWindShift and maxWindShift bound Rcv.Wind.Shift: the smallest shift with which a whole send buffer can be advertised, as
	// a larger one makes the rounding coarser.
	minWindShift = 6
	maxWindShift = 14 // RFC 7323, section 2.3
)

// chooseWindShift is the window scale for the largest send buffer that the host allows (net.ipv4.tcp_wmem).
func chooseWindShift() uint8 {
	text, err := os.ReadFile("/proc/sys/net/ipv4/tcp_wmem")
	if fields := strings.Fields(string(text)); err == nil && len(fields) == 3 {
		if most, err := strconv.ParseUint(fields[2], 10, 32); err == nil && most > 0 {
			return uint8(min(max(bits.Len64((most-1)>>16), minWindShift), maxWindShift))
		}
	}
	return minWindShift
}

// endConnections resets all TCP connections at the guest. A program that has exited leaves sockets with unsent data in the guest's
// kernel, which would keep their memory and the network namespace for minutes.
func (g *Gateway) endConnections() {
	for _, c := range g.conns {
		if c.fd < 0 {
			continue
		}
		c.resetGuest()
		if !c.state.finReceived() {
			c.resetHost() // the peer must not take the end for an orderly one
		}
		unix.Close(c.fd)
		c.fd = -1
	}
}

func (g *Gateway) close() {
	g.endConnections()
	for _, u := range g.flows.all {
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
