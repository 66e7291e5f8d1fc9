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

// guestSockets reads the guest's sockets by sock_diag(7). The forwards with Later listen on the host while the guest listens: from
// when the guest has a socket on each of their ports, until the guest closes one of these.
type guestSockets struct {
	g            *Gateway
	dump         int // index of the request in dumps that is being answered
	found        map[port]bool
	waiting      bool // for the answer
	stale        bool // a socket was closed since the first of the dumps
	listening    bool
	ended        bool
	endReason    string       // why the forwards were closed, until that is logged
	bound        map[int]bool // forwards that listen, by descriptor
	bindDeadline time.Time    // until when a port of the host may be in use
	timer        timer.Timer
	buffer       []byte // for answers
	request      [sockdiag.RequestSize]byte
	reply        receiveMemory // the last answer to memoryFor
}

type port struct {
	protocol uint8
	number   uint16
}

// dumps are the requests that tell on which ports the guest listens. A socket of UDP that is not connected is closed.
var dumps = []sockdiag.Request{
	dumpOf(unix.AF_INET, unix.IPPROTO_TCP, sockdiag.Listening), dumpOf(unix.AF_INET6, unix.IPPROTO_TCP, sockdiag.Listening),
	dumpOf(unix.AF_INET, unix.IPPROTO_UDP, sockdiag.Closed), dumpOf(unix.AF_INET6, unix.IPPROTO_UDP, sockdiag.Closed),
}

func dumpOf(family, protocol uint8, state sockdiag.State) sockdiag.Request {
	return sockdiag.Request{
		Type: unix.SOCK_DIAG_BY_FAMILY, Flags: unix.NLM_F_DUMP, Family: family, Protocol: protocol, States: sockdiag.States(0).With(state),
	}
}

// dumpInterval is the time between dumps until the guest listens. The kernel notifies of closed sockets, not of new ones.
const dumpInterval = 50 * time.Millisecond

// bindPatience is how long a port may be in use when the guest listens: the previous member may not have exited yet.
const bindPatience = 10 * time.Second

// exitPatience is how long a program may take to exit after closing a socket, without a warning.
const exitPatience = 2 * time.Second

func newGuestSockets(g *Gateway) *guestSockets {
	p := &guestSockets{g: g, bound: map[int]bool{}, buffer: make([]byte, 1<<16)}
	p.timer.Owner = p
	if slices.ContainsFunc(g.config.Forwards, func(f Forward) bool { return len(f.Later) > 0 }) {
		g.now = g.clock()
		g.timers.Set(&p.timer, g.now)
	}
	return p
}

// Expired starts the dumps, or logs why there are none any more.
func (p *guestSockets) Expired() {
	if p.endReason != "" {
		level := slog.LevelWarn
		if p.g.ending { // every program that exits closes its sockets
			level = slog.LevelInfo
		}
		p.g.log.Log(context.Background(), level, "nothing more goes inside", "reason", p.endReason)
		p.endReason = ""
	}
	if p.waiting || p.ended {
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

// send sends a request, whose answer is read by event.
func (p *guestSockets) send(r *sockdiag.Request) error {
	_, err := unix.Write(p.g.config.Diag, r.Append(p.request[:0]))
	return err
}

// retry sends the dumps again after a time.
func (p *guestSockets) retry() { p.g.timers.Set(&p.timer, p.g.now.Add(dumpInterval)) }

func (p *guestSockets) event(uint32) {
	for range udpBudget {
		n, from, err := unix.Recvfrom(p.g.config.Diag, p.buffer, unix.MSG_DONTWAIT)
		if errors.Is(err, unix.ENOBUFS) {
			p.socketClosed() // perhaps
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

// read processes messages of the kernel: answers, and sockets that were closed.
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
	return slices.ContainsFunc(p.g.config.Forwards, func(f Forward) bool { return len(f.Later) > 0 && f.Port == number })
}

// receiveMemory is the receive buffer of a socket, in bytes of kernel memory.
type receiveMemory struct {
	allocated, limit int
	known            bool
}

// memorySequence is the sequence number of the question for the memory of one socket. Others, and what the
// kernel tells by itself, have 0.
const memorySequence = 1

// memoryFor asks for the receive buffer of the guest's socket that datagrams of a flow arrive at. The kernel answers before
// write(2) returns, so that the answer is read at once.
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

// dumpFailed processes the error that answers a dump.
func (p *guestSockets) dumpFailed(m *sockdiag.Message) {
	errno := m.Errno()
	if errno == 0 || !p.waiting {
		return
	}
	p.waiting = false
	if errno == unix.ENOENT { // the kernel has no module for the protocol
		p.fail(fmt.Errorf("ask the guest for its sockets (tcp_diag, udp_diag): %w", errno))
		return
	}
	p.retry()
}

// socketClosed starts the dumps again, because a socket on one of the ports was closed.
func (p *guestSockets) socketClosed() {
	if p.listening && !p.ended {
		if p.stale = p.waiting; !p.waiting {
			p.Expired()
		}
	}
}

// dumpDone processes the end of a dump: the next one follows, or the result of all is known.
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
		listens = listens && (len(f.Later) == 0 || p.found[port{f.Protocol, f.Port}])
	}
	switch {
	case p.stale:
		p.Expired()
	case listens && !p.listening:
		p.beginListening()
	case !listens && p.listening:
		p.stopListening("a socket of the program was closed")
	case !listens:
		p.retry()
	}
}

// beginListening makes the host's sockets listen, those of UDP first: a peer takes a TCP socket that listens as a sign that all do.
func (p *guestSockets) beginListening() {
	if p.bindDeadline.IsZero() {
		p.bindDeadline = p.g.now.Add(bindPatience)
	}
	for _, protocol := range []uint8{unix.IPPROTO_UDP, unix.IPPROTO_TCP} {
		for _, f := range p.g.config.Forwards {
			if len(f.Later) == 0 || f.Protocol != protocol || p.bound[f.FD] {
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
	at = f.Later[0]
	if f.Protocol == unix.IPPROTO_TCP {
		err = unix.Listen(f.FD, unix.SOMAXCONN)
	} else if !isBound(f.FD) {
		at, err = bindFirst(f.FD, f.Later)
	}
	if err == nil {
		p.bound[f.FD] = true
		err = p.g.serve(f)
	}
	return at, err
}

// isBound returns whether a socket has a port.
func isBound(fd int) bool {
	name, err := unix.Getsockname(fd)
	if err != nil {
		return false
	}
	at, ok := addrPort(name)
	return ok && at.Port() != 0
}

// fail makes Run return an error.
func (p *guestSockets) fail(err error) {
	p.ended = true
	p.g.failed = err
}

// stopListening closes the host's sockets for good: a program that does not listen on all ports gets nothing.
func (p *guestSockets) stopListening(why string) {
	p.ended, p.endReason = true, why
	p.g.timers.Set(&p.timer, p.g.now.Add(exitPatience))
	for i := range p.g.config.Forwards {
		if f := &p.g.config.Forwards[i]; len(f.Later) > 0 {
			p.g.closeFD(f.FD)
			f.FD = -1
		}
	}
	for number, list := range p.g.bound {
		p.g.bound[number] = slices.DeleteFunc(list, func(b *boundSocket) bool { return len(b.Later) > 0 })
	}
}
