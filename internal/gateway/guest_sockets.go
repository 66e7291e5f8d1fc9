// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"sockeye/internal/gateway/timer"
	"sockeye/internal/sockdiag"
)

// guestSockets reads the guest's sockets by sock_diag(7). The deferred forwards listen on the host while the guest listens: from
// the time when the guest has a socket on each of their ports until the guest closes one of these sockets.
type guestSockets struct {
	g            *Gateway
	dump         int // index of the current request in dumps
	found        map[port]bool
	waiting      bool // for the reply to the current request
	stale        bool // a socket was closed after the first of the dumps
	listening    bool
	closed       bool
	closeReason  string       // why the forwards were closed; "" once logged
	bound        map[int]bool // forwards that listen, by descriptor
	bindDeadline time.Time    // end of bindTimeout
	timer        timer.Timer
	buffer       []byte // for replies
	request      [sockdiag.RequestSize]byte
	reply        receiveMemory // last reply to memoryFor
}

type port struct {
	protocol uint8
	number   uint16
}

// dumps are the requests for the ports on which the guest listens. The state of an unconnected UDP socket is TCP_CLOSE.
var dumps = []sockdiag.Request{
	dumpOf(unix.AF_INET, unix.IPPROTO_TCP, sockdiag.Listening), dumpOf(unix.AF_INET6, unix.IPPROTO_TCP, sockdiag.Listening),
	dumpOf(unix.AF_INET, unix.IPPROTO_UDP, sockdiag.Closed), dumpOf(unix.AF_INET6, unix.IPPROTO_UDP, sockdiag.Closed),
}

func dumpOf(family, protocol uint8, state sockdiag.State) sockdiag.Request {
	return sockdiag.Request{
		Type: unix.SOCK_DIAG_BY_FAMILY, Flags: unix.NLM_F_DUMP, Family: family, Protocol: protocol, States: sockdiag.States(0).With(state),
	}
}

func newGuestSockets(g *Gateway) *guestSockets {
	s := &guestSockets{g: g, bound: map[int]bool{}, buffer: make([]byte, 1<<16)}
	s.timer.Owner = s
	if slices.ContainsFunc(g.config.Forwards, func(f Forward) bool { return len(f.Deferred) > 0 }) {
		g.now = g.clock()
		g.timers.Set(&s.timer, g.now)
	}
	return s
}

// Expired logs why the forwards were closed, or starts the dumps.
func (s *guestSockets) Expired() {
	if s.closeReason != "" {
		level := slog.LevelWarn
		if s.g.stopping { // an exiting program closes its sockets
			level = slog.LevelInfo
		}
		s.g.log.Log(context.Background(), level, "published ports closed", "reason", s.closeReason)
		s.closeReason = ""
	}
	s.startDumps()
}

// dumpInterval is the polling interval until the guest listens. The kernel notifies of closed sockets, not of new ones.
const dumpInterval = 50 * time.Millisecond

// retry repeats the dumps after dumpInterval.
func (s *guestSockets) retry() { s.g.timers.Set(&s.timer, s.g.now.Add(dumpInterval)) }

func (s *guestSockets) isWanted(number uint16) bool {
	return slices.ContainsFunc(s.g.config.Forwards, func(f Forward) bool { return len(f.Deferred) > 0 && f.Port == number })
}

// receiveMemory is the receive buffer of a socket, in bytes of kernel memory.
type receiveMemory struct {
	allocated, limit int
	known            bool
}

// memorySequence is the sequence number of a request of memoryFor. Other requests, and notifications, have 0.
const memorySequence = 1

// memoryFor returns the receive buffer of the guest's socket that receives datagrams of a flow. The kernel replies before write(2)
// returns, so that the reply can be read without waiting.
func (s *guestSockets) memoryFor(f endpoints) receiveMemory {
	r := sockdiag.Request{
		Type: unix.SOCK_DIAG_BY_FAMILY, Sequence: memorySequence, Family: unix.AF_INET, Protocol: unix.IPPROTO_UDP,
		Attributes: sockdiag.WithReceiveMemory, Source: f.remote, Destination: f.guest, Cookie: sockdiag.AnyCookie,
	}
	if f.guest.Addr().Is6() {
		r.Family = unix.AF_INET6
	}
	s.reply = receiveMemory{}
	if s.send(&r) == nil {
		s.event(0)
	}
	return s.reply
}

func (s *guestSockets) event(uint32) {
	for range udpBudget {
		var from unix.RawSockaddrNetlink
		size := uint32(unix.SizeofSockaddrNetlink)
		n, _, errno := unix.RawSyscall6(unix.SYS_RECVFROM, uintptr(s.g.config.Diag), uintptr(unsafe.Pointer(unsafe.SliceData(s.buffer))),
			uintptr(len(s.buffer)), unix.MSG_DONTWAIT, uintptr(unsafe.Pointer(&from)), uintptr(unsafe.Pointer(&size)))
		if errno == unix.ENOBUFS {
			s.socketClosed() // a notification may be missing
			continue
		}
		if errno != 0 {
			return
		}
		if from.Family == unix.AF_NETLINK && from.Pid == 0 {
			s.read(s.buffer[:n])
		}
	}
}

// read processes messages of the kernel: replies, and notifications of closed sockets.
func (s *guestSockets) read(b []byte) {
	for len(b) >= sockdiag.HeaderSize {
		m, rest, err := sockdiag.NextMessage(b)
		if err != nil {
			return
		}
		b = rest
		switch {
		case m.Sequence == memorySequence:
			s.reply.allocated, s.reply.limit, s.reply.known = m.ReceiveMemory()
		case m.Type == unix.NLMSG_DONE:
			s.dumpDone()
		case m.Type == unix.NLMSG_ERROR:
			s.dumpFailed(&m)
		default:
			local, remote, ok := m.Ports()
			switch {
			case !ok:
			case m.Flags&unix.NLM_F_MULTI != 0 && s.waiting:
				s.found[port{dumps[s.dump].Protocol, local}] = true
			case remote == 0 && s.isWanted(local):
				s.socketClosed()
			}
		}
	}
}

// dumpFailed processes an error reply to a dump.
func (s *guestSockets) dumpFailed(m *sockdiag.Message) {
	errno := m.Errno()
	if errno == 0 || !s.waiting {
		return
	}
	s.waiting = false
	if errno == unix.ENOENT { // the kernel has no module for the protocol
		s.fail(fmt.Errorf("list the sockets of the guest (tcp_diag, udp_diag): %w", errno))
		return
	}
	s.retry()
}

// socketClosed restarts the dumps after a socket on one of the ports was closed.
func (s *guestSockets) socketClosed() {
	if s.listening && !s.closed {
		if s.stale = s.waiting; !s.waiting {
			s.startDumps()
		}
	}
}

// dumpDone sends the next dump, or evaluates the result after the last.
func (s *guestSockets) dumpDone() {
	if !s.waiting {
		return
	}
	s.waiting = false
	if s.dump++; s.dump < len(dumps) {
		s.sendDump()
		return
	}
	listens := true
	for _, f := range s.g.config.Forwards {
		listens = listens && (len(f.Deferred) == 0 || s.found[port{f.Protocol, f.Port}])
	}
	switch {
	case s.stale:
		s.startDumps()
	case listens && !s.listening:
		s.startListening()
	case !listens && s.listening:
		s.stopListening("a socket of the program was closed")
	case !listens:
		s.retry()
	}
}

// startDumps sends the first request of dumps, unless a dump is running or the forwards are closed.
func (s *guestSockets) startDumps() {
	if s.waiting || s.closed {
		return
	}
	s.found, s.dump, s.stale = map[port]bool{}, 0, false
	s.sendDump()
}

// sendDump sends the next request of dumps.
func (s *guestSockets) sendDump() {
	s.waiting = true
	if err := s.send(&dumps[s.dump]); err != nil {
		s.waiting = false
		s.retry()
	}
}

// send sends a request. event reads the reply.
func (s *guestSockets) send(r *sockdiag.Request) error {
	_, err := sendTo(s.g.config.Diag, r.Append(s.request[:0]))
	return err
}

// bindTimeout is how long a port of the host may be in use when the guest listens: the previous member may not have exited yet.
const bindTimeout = 10 * time.Second

// startListening binds the UDP sockets and then makes the TCP sockets listen: a peer that can connect may assume that all ports are
// open.
func (s *guestSockets) startListening() {
	if s.bindDeadline.IsZero() {
		s.bindDeadline = s.g.now.Add(bindTimeout)
	}
	for _, protocol := range []uint8{unix.IPPROTO_UDP, unix.IPPROTO_TCP} {
		for _, f := range s.g.config.Forwards {
			if len(f.Deferred) == 0 || f.Protocol != protocol || s.bound[f.FD] {
				continue
			}
			at, err := s.listen(f)
			switch {
			case errors.Is(err, unix.EADDRINUSE) && s.g.now.Before(s.bindDeadline):
				s.retry()
				return
			case err != nil:
				s.fail(&ListenError{at, protocol, err})
				return
			}
		}
	}
	s.listening = true
	s.g.log.Info("the program listens")
}

func (s *guestSockets) listen(f Forward) (at netip.AddrPort, err error) {
	at = f.Deferred[0]
	if f.Protocol == unix.IPPROTO_TCP {
		err = unix.Listen(f.FD, unix.SOMAXCONN)
	} else if !hasPort(f.FD) {
		at, err = bindFirst(f.FD, f.Deferred)
	}
	if err == nil {
		s.bound[f.FD] = true
		err = s.g.addForward(f)
	}
	return at, err
}

// fail makes Run return err.
func (s *guestSockets) fail(err error) {
	s.closed = true
	s.g.failed = err
}

// exitGracePeriod is the time that a program has to exit after closing a socket, without a warning.
const exitGracePeriod = 2 * time.Second

// stopListening closes the sockets of all deferred forwards permanently, because the program no longer listens on all ports.
func (s *guestSockets) stopListening(why string) {
	s.closed, s.closeReason = true, why
	s.g.timers.Set(&s.timer, s.g.now.Add(exitGracePeriod))
	for i := range s.g.config.Forwards {
		if f := &s.g.config.Forwards[i]; len(f.Deferred) > 0 {
			s.g.closeFD(f.FD)
			f.FD = -1
		}
	}
	for number, list := range s.g.bound {
		s.g.bound[number] = slices.DeleteFunc(list, func(b *boundSocket) bool { return len(b.Deferred) > 0 })
	}
}
