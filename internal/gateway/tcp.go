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
	// synPending: the guest has sent a SYN, and the host's socket is not connected yet.
	synPending state = iota
	// answered: the guest has got a SYN-ACK.
	synReceived
	// calling: the guest has got a SYN, for a connection that the host accepted.
	synSent
	// open: both ends have agreed. Which of them has ended is in the flags.
	established
	// over: both ends have ended, and the socket is closed. The guest may not know yet that
	// its FIN was taken.
	timeWait
)

// conn is a TCP connection of the guest, joined to a socket of the host.
type conn struct {
	g     *Gateway
	flow  flow
	fd    int // the host's socket; -1: closed
	state state
	timer timer

	snd   sendSide
	rcv   receiveSide
	rtx   retransmission
	alive keepalive

	queued        queued
	outgoing      bool // the guest opened the connection, which occupies a port of the host
	windowScaling bool // both ends sent the window scale option (RFC 7323, section 2.2)
	hostFailed    bool // the host's socket has an error: what it has still goes to the guest
	hostErrorRead bool // the error was read already, so that the end of the socket's data looks like an orderly one
}

// sendSide is what goes to the guest. The data from SND.UNA on are in the receive queue of the host's socket.
type sendSide struct {
	una uint32 // SND.UNA
	nxt uint32 // SND.NXT
	wnd uint32 // SND.WND, bytes
	wl1 uint32 // SND.WL1

	mss       uint16 // SMSS (RFC 5681)
	windShift uint8  // Snd.Wind.Shift (RFC 7323)

	// unconsumed is how many bytes before SND.UNA, which the guest has acknowledged, are in the socket's receive queue until
	// the end of the turn.
	unconsumed int
	peekOffset bool // the kernel keeps the offset of MSG_PEEK (SO_PEEK_OFF)
	drained    bool // the receive queue had nothing behind SND.NXT, and no event came since
	blocked    bool // SND.WND is too small to send
	finSent    bool
}

// receiveSide is what comes from the guest and goes to the host's socket with send(2).
type receiveSide struct {
	nxt  uint32 // RCV.NXT: the socket has accepted all before
	edge uint32 // RCV.NXT + RCV.WND as the guest was told, the right edge of the window

	mss         uint16       // MSS option that the guest was sent
	recentWrite int          // mean size of recent writes to the socket, bytes: room's estimate depends on it
	tracker     room.Tracker // of the estimate
	memory      connMemory   // share of the guest's send memory

	batch   *segmentBatch // payload of this turn, from RCV.NXT on
	backlog []byte        // payload from RCV.NXT on that the socket did not accept; then there is no batch

	armed       bool // EPOLLOUT will come
	moreFollows bool // the last segment had neither PSH nor FIN
	ackAll      bool // the guest repeats acknowledged data: acknowledge exactly RCV.NXT
	finReceived bool // the guest's FIN is in the batch, in the backlog, or before RCV.NXT
	finPassed   bool // the FIN was passed on to the socket by shutdown(2)
}

// retransmission is the state of timeouts and loss recovery toward the guest.
type retransmission struct {
	recover       uint32 // recover of RFC 6582: SND.NXT when the recovery began
	highRxt       uint32 // HighRxt of RFC 6675: end of the last retransmission
	dupAcks       uint8  // duplicate acknowledgements in a row, 4 at most
	backoff       uint8  // doublings of the RTO since the guest acknowledged something or opened its window
	unanswered    uint8  // timeouts since the guest sent anything
	maybeSpurious bool   // a timeout without a duplicate acknowledgement began the recovery: the guest may have all data
}

// keepalive is what the gateway knows of the guest's keepalive (RFC 9293, section 3.8.4).
type keepalive struct {
	lastHeard time.Time // when the guest sent something last
	idle      uint16    // TCP_KEEPIDLE of the host's socket, seconds; 0: the host's default
}

// queued tells which of the gateway's queues have the connection.
type queued struct{ ack, output, flush bool }

// tcpArrives takes a segment of the guest.
func (g *Gateway) tcpArrives(s *segment) {
	f := flow{s.from, s.to}
	if c := g.conns[f]; c != nil {
		c.segmentArrives(s)
		return
	}
	switch {
	case s.flags&flagRST != 0:
	case s.flags&(flagSYN|flagACK|flagFIN) == flagSYN:
		g.acceptSYN(f, s)
	default:
		g.sendReset(s)
	}
}

// newConn has a socket's events handled; nil if that cannot be, and the socket closed.
func (g *Gateway) newConn(f flow, fd int, s state) *conn {
	c := &conn{g: g, flow: f, fd: fd, state: s, snd: sendSide{mss: defaultMSS4}, rcv: receiveSide{recentWrite: maxPacket}}
	if f.guest.Addr().Is6() {
		c.snd.mss = defaultMSS6
	}
	c.timer.owner = c
	// By clock and flow (RFC 6528), so that a guest takes a SYN of a flow that it still
	// waits for stragglers of.
	c.snd.una = uint32(g.now.UnixMicro()/4) + uint32(maphash.Comparable(g.seed, f))
	c.snd.nxt, c.rtx.recover = c.snd.una, c.snd.una
	// Segments come as the guest's own TCP has decided. Urgent data of the host's peer are
	// data like others: apart they would leave a hole that SO_PEEK_OFF does not count.
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_OOBINLINE, 1)
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1)
	c.snd.peekOffset = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PEEK_OFF, 0) == nil
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
	case synPending:
		if events&(unix.EPOLLOUT|unix.EPOLLERR|unix.EPOLLHUP) != 0 {
			c.connected()
		}
		return
	case synReceived, synSent:
		if events&unix.EPOLLERR != 0 && c.takeHostError() {
			c.abort()
		}
		return
	}
	if events&unix.EPOLLERR != 0 {
		if c.snd.finSent {
			if c.takeHostError() {
				c.abort()
			}
			return
		}
		// What was received before goes first; then output meets the error.
		c.hostFailed = true
	}
	if events&^unix.EPOLLOUT != 0 {
		c.snd.drained = false
	}
	if events&unix.EPOLLOUT != 0 && (c.rcv.armed || len(c.rcv.backlog) > 0) {
		c.hostWritable()
	}
	if c.fd >= 0 && events&(unix.EPOLLIN|unix.EPOLLRDHUP|unix.EPOLLHUP|unix.EPOLLERR) != 0 {
		c.output()
	}
}

// takeHostError takes the socket's error.
func (c *conn) takeHostError() bool {
	code, err := unix.GetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_ERROR)
	return err != nil || code != 0
}
