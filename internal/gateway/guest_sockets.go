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

// dumpInterval is the polling interval until the guest listens. The kernel notifies of closed sockets, not of new ones.
const dumpInterval = 50 * time.Millisecond

// bindTimeout is how long a port of the host may be in use when the guest listens: the previous member may not have exited yet.
const bindTimeout = 10 * time.Second

// exitGracePeriod is the time that a program has to exit after closing a socket, without a warning.
const exitGracePeriod = 2 * time.Second

func newGuestSockets(g *Gateway) *guestSockets {
	p := &guestSockets{g: g, bound: map[int]bool{}, buffer: make([]byte, 1<<16)}
	p.timer.Owner = p
	if slices.ContainsFunc(g.config.Forwards, func(f Forward) bool { return len(f.Deferred) > 0 }) {
		g.now = g.clock()
		g.timers.Set(&p.timer, g.now)
	}
	return p
}

// Expired starts the dumps, or logs why the forwards were closed.
func (p *guestSockets) Expired() {
	if p.closeReason != "" {
		level := slog.LevelWarn
		if p.g.stopping { // an exiting program closes its sockets
			level = slog.LevelInfo
		}
		p.g.log.Log(context.Background(), level, "published ports closed", "reason", p.closeReason)
		p.closeReason = ""
	}
	if p.waiting || p.closed {
		return
	}
	p.found, p.dump, p.stale = map[port]bool{}, 0, false
	p.sendDump()
}

// sendDump sends the next request of dumps.
func (p *guestSockets) sendDump() {
	p.waiting = true
	if err := p.send(&dumps[p.dump]); err != nil {
		p.waiting = false
		p.retry()
	}
}

// send sends a request. event reads the reply.
func (p *guestSockets) send(r *sockdiag.Request) error {
	_, err := unix.Write(p.g.config.Diag, r.Append(p.request[:0]))
	return err
}

// retry repeats the dumps after dumpInterval.
func (p *guestSockets) retry() { p.g.timers.Set(&p.timer, p.g.now.Add(dumpInterval)) }

func (p *guestSockets) event(uint32) {
	for range udpBudget {
		n, from, err := unix.Recvfrom(p.g.config.Diag, p.buffer, unix.MSG_DONTWAIT)
		if errors.Is(err, unix.ENOBUFS) {
			p.socketClosed() // a notification may be missing
			continue
		}
		if err != nil {
			return
		}
		if a, ok := from.(*unix.SockaddrNetlink); ok && a.Pid == 0 {
			p.read(p.buffer[:n])
		}
	}
}

// read processes messages of the kernel: replies, and notifications of closed sockets.
func (p *guestSockets) read(b []byte) {
	for len(b) >= sockdiag.HeaderSize {
		m, rest, err := sockdiag.NextMessage(b)
		if err != nil {
			return
		}
		b = rest
		switch {
		case m.Sequence == memorySequence:
			p.reply.allocated, p.reply.limit, p.reply.known = m.ReceiveMemory()
		case m.Type == unix.NLMSG_DONE:
			p.dumpDone()
		case m.Type == unix.NLMSG_ERROR:
			p.dumpFailed(&m)
		default:
			local, remote, ok := m.Ports()
			switch {
			case !ok:
			case m.Flags&unix.NLM_F_MULTI != 0 && p.waiting:
				p.found[port{dumps[p.dump].Protocol, local}] = true
			case remote == 0 && p.isWanted(local):
				p.socketClosed()
			}
		}
	}
}

func (p *guestSockets) isWanted(number uint16) bool {
	return slices.ContainsFunc(p.g.config.Forwards, func(f Forward) bool { return len(f.Deferred) > 0 && f.Port == number })
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
func (p *guestSockets) memoryFor(f flow) receiveMemory {
	r := sockdiag.Request{
		Type: unix.SOCK_DIAG_BY_FAMILY, Sequence: memorySequence, Family: unix.AF_INET, Protocol: unix.IPPROTO_UDP,
		Attributes: sockdiag.WithReceiveMemory, Source: f.remote, Destination: f.guest, Cookie: sockdiag.AnyCookie,
	}
	if f.guest.Addr().Is6() {
		r.Family = unix.AF_INET6
	}
	p.reply = receiveMemory{}
	if p.send(&r) == nil {
		p.event(0)
	}
	return p.reply
}

// dumpFailed processes an error reply to a dump.
func (p *guestSockets) dumpFailed(m *sockdiag.Message) {
	errno := m.Errno()
	if errno == 0 || !p.waiting {
		return
	}
	p.waiting = false
	if errno == unix.ENOENT { // the kernel has no module for the protocol
		p.fail(fmt.Errorf("list the sockets of the guest (tcp_diag, udp_diag): %w", errno))
		return
	}
	p.retry()
}

// socketClosed restarts the dumps after a socket on one of the ports was closed.
func (p *guestSockets) socketClosed() {
	if p.listening && !p.closed {
		if p.stale = p.waiting; !p.waiting {
			p.Expired()
		}
	}
}

// dumpDone sends the next dump, or evaluates the result after the last.
func (p *guestSockets) dumpDone() {
	if !p.waiting {
		return
	}
	p.waiting = false
	if p.dump++; p.dump < len(dumps) {
		p.sendDump()
		return
	}
	listens := true
	for _, f := range p.g.config.Forwards {
		listens = listens && (len(f.Deferred) == 0 || p.found[port{f.Protocol, f.Port}])
	}
	switch {
	case p.stale:
		p.Expired()
	case listens && !p.listening:
		p.startListening()
	case !listens && p.listening:
		p.stopListening("a socket of the program was closed")
	case !listens:
		p.retry()
	}
}

// startListening binds the UDP sockets and then makes the TCP sockets listen: a peer that can connect may assume that all ports are
// open.
func (p *guestSockets) startListening() {
	if p.bindDeadline.IsZero() {
		p.bindDeadline = p.g.now.Add(bindTimeout)
	}
	for _, protocol := range []uint8{unix.IPPROTO_UDP, unix.IPPROTO_TCP} {
		for _, f := range p.g.config.Forwards {
			if len(f.Deferred) == 0 || f.Protocol != protocol || p.bound[f.FD] {
				continue
			}
			at, err := p.listen(f)
			switch {
			case errors.Is(err, unix.EADDRINUSE) && p.g.now.Before(p.bindDeadline):
				p.retry()
				return
			case err != nil:
				p.fail(&ListenError{at, protocol, err})
				return
			}
		}
	}
	p.listening = true
	p.g.log.Info("the program listens")
}

func (p *guestSockets) listen(f Forward) (at netip.AddrPort, err error) {
	at = f.Deferred[0]
	if f.Protocol == unix.IPPROTO_TCP {
		err = unix.Listen(f.FD, unix.SOMAXCONN)
	} else if !hasPort(f.FD) {
		at, err = bindFirst(f.FD, f.Deferred)
	}
	if err == nil {
		p.bound[f.FD] = true
		err = p.g.addForward(f)
	}
	return at, err
}

// fail makes Run return err.
func (p *guestSockets) fail(err error) {
	p.closed = true
	p.g.failed = err
}

// stopListening closes the sockets of all deferred forwards permanently, because the program no longer listens on all ports.
func (p *guestSockets) stopListening(why string) {
	p.closed, p.closeReason = true, why
	p.g.timers.Set(&p.timer, p.g.now.Add(exitGracePeriod))
	for i := range p.g.config.Forwards {
		if f := &p.g.config.Forwards[i]; len(f.Deferred) > 0 {
			p.g.closeFD(f.FD)
			f.FD = -1
		}
	}
	for number, list := range p.g.bound {
		p.g.bound[number] = slices.DeleteFunc(list, func(b *boundSocket) bool { return len(b.Deferred) > 0 })
	}
}
