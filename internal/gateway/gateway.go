// SPDX-License-Identifier: Apache-2.0

// Package gateway joins a network namespace to the host's own sockets. It reads IP
// packets from a TUN interface in the namespace (the guest), speaks TCP, UDP and ICMP
// echo to it, and copies payload into and out of ordinary sockets. It needs no
// privilege, and keeps no data: what a socket has not taken is not acknowledged to the
// guest, and what the guest has not acknowledged stays in the socket.
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
	yielded   time.Time
	seed      maphash.Seed // of sequence numbers
	windShift uint8        // of the windows that the guest is told

	handlers      []registered // by descriptor
	registrations int32        // how many descriptors were registered so far
	conns         map[flow]*conn
	flows         udpFlows
	outgoing      int // connections that the guest began and that have a socket
	warned        [warnings]time.Time
	maxFiles      uint64 // descriptors that the process may have
	bound         boundSockets
	inbox         *receiveBatch
	partial       map[fragmentKey][]byte // of packets that came in fragments, so far
	guestSockets  *guestSockets          // nil where no forward is for later
	failed        error                  // what ends the gateway
	ending        bool                   // the guest's program has ended
	fragmentID    uint32                 // identification of the last datagram that was sent in fragments
	echoes        map[flow]*echo
	timers        timerQueue
	ackQueue      []*conn         // that have something to acknowledge
	outputQueue   []*conn         // that have more to send than fit into their turn
	outputTurn    []*conn         // those of the turn before
	readBuffer    []byte          // of the guest, that were read in this turn
	gso           gsoBatch        // of datagrams of these to send
	flushQueue    []*conn         // that these are of
	freeBatches   []*segmentBatch // not in use
	writeBuffer   []byte          // for what is sent to the guest
	backlog       int             // bytes that are kept of segments which sockets did not take whole
	memory        sendMemory
	openingTime   timeShare
	counts        [reasons]atomic.Uint64
}

// flow names a connection: the guest's end, and the other one. Of ICMP the port of
// the guest is the identifier.
type flow struct{ guest, remote netip.AddrPort }

const (
	defaultConnections = 65536
	maxPacket          = 1 << 16
	readSize           = vnetHeader + maxPacket + maxHeaders
	tunBudget          = 64 // packets that are read in a turn: what comes together goes to a socket together
)

// New makes a gateway. It owns the descriptors of the configuration from here on.
func New(c Config) (_ *Gateway, err error) {
	g := &Gateway{
		config: c, log: c.Log, epoll: -1, wake: -1, clock: time.Now, now: time.Now(), seed: maphash.MakeSeed(), windShift: chooseWindShift(),
		conns: map[flow]*conn{}, flows: udpFlows{all: map[flow]*udpFlow{}, sources: map[netip.AddrPort]*source{}}, echoes: map[flow]*echo{},
		bound: boundSockets{}, inbox: newReceiveBatch(), partial: map[fragmentKey][]byte{},
		readBuffer: make([]byte, tunBudget*readSize), writeBuffer: make([]byte, readSize),
	}
	g.memory = sendMemory{g: g, limit: cmp.Or(c.Memory, defaultMemory()), waiting: map[*conn]bool{}}
	g.memory.timer.owner = &g.memory
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

// serve has what comes to a socket of the host go inside.
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
	// minWindShift and mostScale are the window scales that the guest gets: the smallest
	// that a whole send buffer fits in, as its steps are what rounding costs. Bytes of
	// windows: up to 64 KB shifted so far.
	minWindShift = 6
	maxWindShift = 14 // RFC 7323, section 2.3
)

// chooseWindShift is by how much a send buffer may grow.
func chooseWindShift() uint8 {
	text, err := os.ReadFile("/proc/sys/net/ipv4/tcp_wmem")
	if fields := strings.Fields(string(text)); err == nil && len(fields) == 3 {
		if most, err := strconv.ParseUint(fields[2], 10, 32); err == nil && most > 0 {
			return uint8(min(max(bits.Len64((most-1)>>16), minWindShift), maxWindShift))
		}
	}
	return minWindShift
}

// endConnections ends those of TCP, at both ends. A program that has ended leaves sockets inside, with what they
// could not send; their network namespace and their memory would stay for minutes.
func (g *Gateway) endConnections() {
	for _, c := range g.conns {
		if c.fd < 0 {
			continue
		}
		c.resetGuest()
		if !c.state.finReceived() {
			c.resetHost() // what the guest sent was not all
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
