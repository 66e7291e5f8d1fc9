// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"hash/maphash"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/room"
)

// state is that of the gateway's end toward the guest.
type state uint8

const (
	// connecting: the guest has sent a SYN, and the host's socket is not connected yet.
	connecting state = iota
	// answered: the guest has got a SYN-ACK.
	answered
	// calling: the guest has got a SYN, for a connection that the host accepted.
	calling
	// open: both ends have agreed. Which of them has ended is in the flags.
	open
	// over: both ends have ended, and the socket is closed. The guest may not know yet that
	// its FIN was taken.
	over
)

// conn is a TCP connection of the guest, and the host's socket that it is joined to.
type conn struct {
	g     *Gateway
	flow  flow
	fd    int // -1: gone
	state state
	timer timer

	// What goes to the guest. It lies in the socket's receive queue from una on.
	una, nxt uint32
	spent    int    // bytes before una that the socket still has, until the end of the turn
	recover  uint32 // what is not acknowledged before it is sent again, hole by hole (RFC 6582)
	again    uint32 // end of what was sent again last
	window   uint32 // of the guest, bytes
	wl1      uint32 // segment that it is from (RFC 9293, SND.WL1)
	mss      uint16
	scale    uint8
	dupAcks  uint8
	tries    uint8 // since the guest acknowledged something, or opened its window
	silent   uint8 // of them, since the guest sent anything
	// What comes from the guest.
	rcv  uint32 // the socket has taken all before
	edge uint32 // right edge of the window that the guest knows of
	// usual is how large writes to the socket are of late, in bytes, which is what room
	// depends on; grain the MSS that the guest was told.
	usual  int
	grain  uint16
	memory holding // as sendMemory knows it
	// spill is what the socket did not take of what is at rcv.
	spill   []byte
	held    *batch // what came in this turn, at rcv, if there is no spill
	tracker room.Tracker
	// heard is when the guest sent something last; keepalive for how long nothing has to come
	// before the socket asks its peer, in seconds. 0: as the host has it.
	heard     time.Time
	keepalive uint16

	dirty, queued, holds bool // in the gateway's lists
	ours                 bool // the guest began it, and it takes a port of the host
	armed                bool // EPOLLOUT will come
	more                 bool // the guest has more to send already
	asked                bool // the guest waits for an acknowledgement of all
	blocked              bool // by the guest's window
	late                 bool // the guest was, before recover: it may have got all of it
	drained              bool // the socket had nothing more, and no event came since
	hasScale             bool
	peeks                bool // the socket keeps the offset of MSG_PEEK itself
	finSent              bool // to the guest, after all that the socket had
	guestEnded           bool // its FIN is at rcv, or before
	shut                 bool // it was passed on
	broken               bool // the socket has an error: what it has still goes to the guest
	lost                 bool // the error was read already, so that the socket's end looks like an orderly one
}

// tcp takes a segment of the guest.
func (g *Gateway) tcp(s *segment) {
	f := flow{s.from, s.to}
	if c := g.conns[f]; c != nil {
		c.input(s)
		return
	}
	switch {
	case s.flags&flagRST != 0:
	case s.flags&(flagSYN|flagACK|flagFIN) == flagSYN:
		g.connect(f, s)
	default:
		g.reset(s)
	}
}

// newConn has a socket's events handled; nil if that cannot be, and the socket closed.
func (g *Gateway) newConn(f flow, fd int, s state) *conn {
	c := &conn{g: g, flow: f, fd: fd, state: s, mss: defaultMSS4, usual: maxPacket}
	if f.guest.Addr().Is6() {
		c.mss = defaultMSS6
	}
	c.timer.owner = c
	// By clock and flow (RFC 6528), so that a guest takes a SYN of a flow that it still
	// waits for stragglers of.
	c.una = uint32(g.now.UnixMicro()/4) + uint32(maphash.Comparable(g.seed, f))
	c.nxt, c.recover = c.una, c.una
	// Segments come as the guest's own TCP has decided. Urgent data of the host's peer are
	// data like others: apart they would leave a hole that SO_PEEK_OFF does not count.
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_OOBINLINE, 1)
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1)
	c.peeks = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PEEK_OFF, 0) == nil
	if err := g.register(fd, unix.EPOLLIN|unix.EPOLLOUT|unix.EPOLLRDHUP|unix.EPOLLET, c); err != nil {
		g.log.Warn("connection not joined", "error", err)
		unix.Close(fd)
		return nil
	}
	g.conns[f] = c
	g.count(Opened)
	return c
}

// event takes what happens to the host's socket.
func (c *conn) event(events uint32) {
	switch c.state {
	case connecting:
		if events&(unix.EPOLLOUT|unix.EPOLLERR|unix.EPOLLHUP) != 0 {
			c.connected()
		}
		return
	case answered, calling:
		if events&unix.EPOLLERR != 0 && c.failed() {
			c.abort()
		}
		return
	}
	if events&unix.EPOLLERR != 0 {
		if c.finSent {
			if c.failed() {
				c.abort()
			}
			return
		}
		// What was received before goes first; then output meets the error.
		c.broken = true
	}
	if events&^unix.EPOLLOUT != 0 {
		c.drained = false
	}
	if events&unix.EPOLLOUT != 0 && (c.armed || len(c.spill) > 0) {
		c.writable()
	}
	if c.fd >= 0 && events&(unix.EPOLLIN|unix.EPOLLRDHUP|unix.EPOLLHUP|unix.EPOLLERR) != 0 {
		c.output()
	}
}

// failed takes the socket's error.
func (c *conn) failed() bool {
	code, err := unix.GetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_ERROR)
	return err != nil || code != 0
}
