// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// OpenDiag opens a socket of sock_diag, in the network namespace of the calling thread. If it
// watches, it is told of sockets that are closed.
func OpenDiag(watches bool) (int, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_SOCK_DIAG)
	if err != nil {
		return -1, fmt.Errorf("open sock_diag: %w", err)
	}
	if !watches {
		return fd, nil
	}
	var groups uint32
	for _, g := range []int{unix.SKNLGRP_INET_TCP_DESTROY, unix.SKNLGRP_INET_UDP_DESTROY, unix.SKNLGRP_INET6_TCP_DESTROY, unix.SKNLGRP_INET6_UDP_DESTROY} {
		groups |= 1 << (g - 1)
	}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: groups}); err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("watch sockets: %w", err)
	}
	return fd, nil
}

// guestSockets asks the guest's kernel for its sockets. It has the host's listen while the guest
// does: from when it listens on all ports of forwards that are for later, until one of its
// sockets there is closed.
type guestSockets struct {
	g            *Gateway
	dump         int // the question that is being answered, of questions
	found        map[port]bool
	waiting      bool // for an answer
	stale        bool // something was closed meanwhile
	listening    bool
	ended        bool
	endReason    string       // it has ended, until that is said
	bound        map[int]bool // of UDP, by descriptor
	bindDeadline time.Time    // when a port must be free
	timer        timer
	buffer       []byte
	reply        receiveMemory // what was answered last of one socket
}

type port struct {
	protocol uint8
	number   uint16
}

// dumps are the dumps that tell on which ports the guest listens.
var dumps = []struct{ family, protocol, state uint8 }{
	{unix.AF_INET, unix.IPPROTO_TCP, tcpListen}, {unix.AF_INET6, unix.IPPROTO_TCP, tcpListen},
	{unix.AF_INET, unix.IPPROTO_UDP, tcpClose}, {unix.AF_INET6, unix.IPPROTO_UDP, tcpClose},
}

// States of sockets (net/tcp_states.h). One of UDP that is not connected is closed.
const (
	tcpClose  = 7
	tcpListen = 10
)

// dumpInterval is how often the guest is asked until it listens. The kernel tells of
// sockets that are closed, not of those that are opened.
const dumpInterval = 50 * time.Millisecond

// bindPatience is how long a port may be taken when the guest listens: the member before may
// not be gone.
const bindPatience = 10 * time.Second

// exitPatience is how long a program may take to end when it has closed a socket, which is no
// reason for a warning then.
const exitPatience = 2 * time.Second

// Sizes of struct inet_diag_req_v2 and inet_diag_msg, in bytes.
const (
	diagRequest = 56
	diagMessage = 72
)

func newGuestSockets(g *Gateway) *guestSockets {
	p := &guestSockets{g: g, bound: map[int]bool{}, buffer: make([]byte, 1<<16)}
	p.timer.owner = p
	if slices.ContainsFunc(g.config.Forwards, func(f Forward) bool { return len(f.Later) > 0 }) {
		g.now = g.clock()
		g.timers.set(&p.timer, g.now)
	}
	return p
}

// expired begins to ask, or says why it does no more.
func (p *guestSockets) expired() {
	if p.endReason != "" {
		level := slog.LevelWarn
		if p.g.ending { // as every program does that ends
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

// sendDump asks the next question.
func (p *guestSockets) sendDump() {
	q := dumps[p.dump]
	var m [unix.NLMSG_HDRLEN + diagRequest]byte
	binary.NativeEndian.PutUint32(m[:], uint32(len(m)))
	binary.NativeEndian.PutUint16(m[4:], unix.SOCK_DIAG_BY_FAMILY)
	binary.NativeEndian.PutUint16(m[6:], unix.NLM_F_REQUEST|unix.NLM_F_DUMP)
	m[unix.NLMSG_HDRLEN], m[unix.NLMSG_HDRLEN+1] = q.family, q.protocol
	binary.NativeEndian.PutUint32(m[unix.NLMSG_HDRLEN+4:], 1<<q.state)
	p.waiting = true
	if err := unix.Sendto(p.g.config.Diag, m[:], unix.MSG_DONTWAIT, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		p.waiting = false
		p.retry()
	}
}

func (p *guestSockets) retry() { p.g.timers.set(&p.timer, p.g.now.Add(dumpInterval)) }

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

// read takes messages of the kernel: answers, and sockets that were closed.
func (p *guestSockets) read(b []byte) {
	for len(b) >= unix.NLMSG_HDRLEN {
		length := int(binary.NativeEndian.Uint32(b))
		if length < unix.NLMSG_HDRLEN || length > len(b) {
			return
		}
		kind, flags, body := binary.NativeEndian.Uint16(b[4:]), binary.NativeEndian.Uint16(b[6:]), b[unix.NLMSG_HDRLEN:length]
		switch {
		case binary.NativeEndian.Uint32(b[8:]) == memorySequence:
			p.reply = memoryOf(kind, body)
		case kind == unix.NLMSG_DONE:
			p.dumpDone()
		case kind == unix.NLMSG_ERROR:
			p.dumpFailed(body)
		case kind == unix.SOCK_DIAG_BY_FAMILY && len(body) >= diagMessage:
			number, peer := binary.BigEndian.Uint16(body[4:]), binary.BigEndian.Uint16(body[6:])
			if flags&unix.NLM_F_MULTI != 0 && p.waiting {
				p.found[port{dumps[p.dump].protocol, number}] = true
			} else if peer == 0 && p.isWanted(number) {
				p.socketClosed()
			}
		}
		b = b[min(len(b), (length+unix.NLMSG_ALIGNTO-1)&^(unix.NLMSG_ALIGNTO-1)):]
	}
}

func (p *guestSockets) isWanted(number uint16) bool {
	return slices.ContainsFunc(p.g.config.Forwards, func(f Forward) bool { return len(f.Later) > 0 && f.Port == number })
}

// receiveMemory is the receive buffer of a socket, in bytes as the kernel counts them.
type receiveMemory struct {
	allocated, limit int
	known            bool
}

// memorySequence is the sequence number of the question for the memory of one socket. Others, and what the
// kernel tells by itself, have 0.
const memorySequence = 1

// memoryFor asks for the guest's socket that datagrams of a flow come to. The kernel answers before
// this returns.
func (p *guestSockets) memoryFor(f flow) receiveMemory {
	var m [unix.NLMSG_HDRLEN + diagRequest]byte
	binary.NativeEndian.PutUint32(m[:], uint32(len(m)))
	binary.NativeEndian.PutUint16(m[4:], unix.SOCK_DIAG_BY_FAMILY)
	binary.NativeEndian.PutUint16(m[6:], unix.NLM_F_REQUEST)
	binary.NativeEndian.PutUint32(m[8:], memorySequence)
	q := m[unix.NLMSG_HDRLEN:]
	q[0], q[1], q[2] = unix.AF_INET, unix.IPPROTO_UDP, 1<<(inetDiagSKMemInfo-1)
	if f.guest.Addr().Is6() {
		q[0] = unix.AF_INET6
	}
	// Of UDP source and destination are those of the datagram, not of the socket.
	id := q[8:]
	binary.BigEndian.PutUint16(id, f.remote.Port())
	binary.BigEndian.PutUint16(id[2:], f.guest.Port())
	copy(id[4:20], f.remote.Addr().AsSlice())
	copy(id[20:36], f.guest.Addr().AsSlice())
	binary.NativeEndian.PutUint64(id[40:], ^uint64(0)) // any cookie
	p.reply = receiveMemory{}
	if err := unix.Sendto(p.g.config.Diag, m[:], unix.MSG_DONTWAIT, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err == nil {
		p.event(0)
	}
	return p.reply
}

// inetDiagSKMemInfo is INET_DIAG_SKMEMINFO (linux/inet_diag.h): the attribute with what SO_MEMINFO gives.
const inetDiagSKMemInfo = 7

// memoryOf reads an answer, which may be an error.
func memoryOf(kind uint16, body []byte) receiveMemory {
	if kind != unix.SOCK_DIAG_BY_FAMILY || len(body) < diagMessage {
		return receiveMemory{}
	}
	for b := body[diagMessage:]; len(b) >= unix.SizeofRtAttr; {
		length := int(binary.NativeEndian.Uint16(b))
		if length < unix.SizeofRtAttr || length > len(b) {
			break
		}
		value := b[unix.SizeofRtAttr:length]
		if binary.NativeEndian.Uint16(b[2:]) == inetDiagSKMemInfo && len(value) >= 4*(unix.SK_MEMINFO_RCVBUF+1) {
			return receiveMemory{
				allocated: int(binary.NativeEndian.Uint32(value[4*unix.SK_MEMINFO_RMEM_ALLOC:])),
				limit:     int(binary.NativeEndian.Uint32(value[4*unix.SK_MEMINFO_RCVBUF:])),
				known:     true,
			}
		}
		b = b[min(len(b), (length+unix.RTA_ALIGNTO-1)&^(unix.RTA_ALIGNTO-1)):]
	}
	return receiveMemory{}
}

// dumpFailed takes a question that was not answered.
func (p *guestSockets) dumpFailed(body []byte) {
	if len(body) < 4 || !p.waiting {
		return
	}
	p.waiting = false
	err := syscall.Errno(-int32(binary.NativeEndian.Uint32(body)))
	if errors.Is(err, unix.ENOENT) { // no module for it
		p.fail(fmt.Errorf("ask the guest for its sockets (tcp_diag, udp_diag): %w", err))
		return
	}
	p.retry()
}

// socketClosed looks again, as a socket of a port was closed.
func (p *guestSockets) socketClosed() {
	if p.listening && !p.ended {
		if p.stale = p.waiting; !p.waiting {
			p.expired()
		}
	}
}

// dumpDone is called when a question is answered.
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
		p.expired()
	case listens && !p.listening:
		p.beginListening()
	case !listens && p.listening:
		p.stopListening("a socket of the program was closed")
	case !listens:
		p.retry()
	}
}

// beginListening has the host's sockets listen, those of UDP first: one of TCP that listens says that
// all do.
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

// isBound tells whether a socket has a port already.
func isBound(fd int) bool {
	name, err := unix.Getsockname(fd)
	if err != nil {
		return false
	}
	at, ok := addrPort(name)
	return ok && at.Port() != 0
}

// fail ends the gateway.
func (p *guestSockets) fail(err error) {
	p.ended = true
	p.g.failed = err
}

// stopListening closes the host's sockets, for good: what is to come goes to no program that does
// not listen to all of it.
func (p *guestSockets) stopListening(why string) {
	p.ended, p.endReason = true, why
	p.g.timers.set(&p.timer, p.g.now.Add(exitPatience))
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
