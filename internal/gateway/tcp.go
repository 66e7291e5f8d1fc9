// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"hash/maphash"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/gateway/timer"
	"sockeye/room"
)

// # Theory of operation
//
// A connection of the guest (the programs in the network namespace) is joined to one TCP socket of the host. Toward the
// guest the gateway is a TCP endpoint itself, which sends and receives segments over the TUN interface; toward the network
// the endpoint is the host's kernel. The TUN interface is a link inside one host: packets are lost only where a queue is
// full, are never reordered, and have a round trip of microseconds. Names are those of RFC 9293: SND is what the gateway
// sends to the guest, RCV is what the gateway receives from the guest.
//
//	program <-> guest's TCP <-> TUN <-> this file <-> host's socket <-> network <-> peer
//	                        RCV ->  send(2)
//	                        SND <-  recv(2), MSG_PEEK
//
// # No buffer
//
// The gateway stores no payload. The host's socket is the buffer of both directions:
//
//   - From the guest: payload goes from the TUN to send(2) within the turn of the loop in which it was read, and RCV.NXT
//     advances by what send(2) returned. Only then is it acknowledged. (tcp_receive.go)
//   - To the guest: payload is read with MSG_PEEK and stays in the socket's receive queue until the guest acknowledges it.
//     SND.UNA is the first byte of the receive queue, after unconsumed bytes; SO_PEEK_OFF, kept by the kernel, is SND.NXT.
//     A retransmission peeks at the queue's head again. An acknowledgement moves SND.UNA, and recv(2) with MSG_TRUNC
//     removes what was acknowledged, once per turn. (tcp_output.go, tcp_retransmit.go)
//
// So flow control is end to end: a program that does not read lets the receive queue fill, and the host's kernel closes the
// window of the peer; a peer that does not read lets the send buffer fill, and RCV.WND closes. If the gateway dies, neither
// side was told of a delivery that did not happen.
//
// The exception is the backlog: send(2) may accept less than the window that was advertised, under memory pressure. The rest
// of that turn's payload is kept, up to maxBacklog per connection and maxBacklogs in all, and beyond that dropped
// unacknowledged, as a network does.
//
// # The receive window
//
// RCV.WND must equal what send(2) will accept. Less, and the kernel never has a reason to grow the send buffer, so that the
// connection stays slow; more, and send(2) is partial. Package room computes the number of bytes that the socket accepts,
// as the kernel does its accounting; its safe figure is RCV.WND. Where no free space remains, poll(2) asks the kernel for
// EPOLLOUT, and the window is computed again when that event comes. The right edge (RCV.NXT + RCV.WND) never moves left
// (RFC 9293, section 3.8.6). While EPOLLOUT is to come, increases below an eighth of the send buffer are withheld, to avoid
// silly-window segments (section 3.8.6.2.2). What all connections of the guest hold together is bounded by sendMemory.
// (tcp_window.go, tcp_memory.go)
//
// # Opening
//
// The guest opens: the SYN starts a connect(2) on a socket of the host, and the SYN-ACK is withheld until connect(2) has
// succeeded (synPending). A failure becomes the RST or ICMP error that a native connection would have got, so that
// connect(2) inside fails with the same errno. Meanwhile the guest's retransmissions of the SYN are ignored. The host's peer
// opens: accept(2) returns a connection that is established already, and the gateway sends the guest a SYN (synSent) with a
// short timeout, since a listener inside whose queue is full drops SYNs. A refusal resets the host's socket.
// (tcp_handshake.go, tcp_listen.go)
//
// # States
//
// The states are those of RFC 9293, section 3.3.2, of the gateway's end of the connection with the guest. LISTEN and CLOSED
// have no conn. synPending is an addition: SYN-RECEIVED before the SYN-ACK is sent.
//
//	guest's SYN -> synPending -> (host connected) synReceived -> (ACK) established
//	host accept ----------------------> synSent -> (SYN-ACK) ----^
//
//	established -> (end of the socket's data: FIN sent)  finWait1 -> (ACK) finWait2 -> (FIN) timeWait
//	established -> (guest's FIN)  closeWait -> (FIN sent) lastAck -> (ACK) removed
//	finWait1    -> (guest's FIN)  closing   -> (ACK) removed
//
// The guest's FIN is processed when all payload before it is in the socket, by shutdown(SHUT_WR). Half-closed connections
// remain so for as long as both ends like. In timeWait the socket is closed and only the guest's retransmitted FIN is
// acknowledged, for two seconds instead of two MSL: the guest's kernel retransmits its FIN at least three times in these,
// and a link inside a host has no old duplicates. (tcp_close.go)
//
// # Errors
//
// A RST of the guest resets the host's socket (SO_LINGER 0), after the payload of the same turn was written. An error of the
// host's socket resets the guest, after what the socket had received before was delivered. Urgent data of the guest reset
// both ends, as the host's peer would not learn the urgent pointer; urgent data of the peer are delivered as ordinary data.
//
// # Loss toward the guest
//
// The TUN drops a packet when its queue is full. Three duplicate acknowledgements or the retransmission timeout start a
// recovery: the first unacknowledged packet is sent again, and on each partial acknowledgement the next one (NewReno,
// RFC 6582), until SND.NXT as it was at the start. After a timeout without any duplicate acknowledgement the guest may have
// received everything and answered late; then only acknowledgements that cover the last retransmission trigger the next one.
// The timeout starts at a fixed 200 ms and doubles (RFC 6298, section 5.5); the round trip is not measured. The same timer
// probes a zero window (RFC 9293, section 3.8.6.1), resends the SYN, SYN-ACK and FIN, and after two idle hours probes the
// guest. (tcp_retransmit.go, tcp_timers.go)
//
// # What is left out
//
// There is no congestion control toward the guest: the link is a queue in one host and SND.WND is the bound. No SACK and no
// timestamps are offered, and segments of the guest that arrive out of order are dropped: the guest's kernel sends in order,
// and hands over up to 64 KB as one packet (IFF_VNET_HDR, TUN_F_TSO4/6), so that loss is rare and cheap. There is no delayed
// acknowledgement: one turn of the loop reads up to 64 packets and acknowledges once per connection. The host's socket has
// TCP_NODELAY, because segmentation was decided by the guest's own TCP.

// state is a state of RFC 9293, section 3.3.2, of the gateway's end toward the guest. The order matters to the methods.
type state uint8

const (
	synPending  state = iota // SYN received; the SYN-ACK waits until the host's socket is connected
	synSent                  // SYN-SENT, for a connection that the host accepted
	synReceived              // SYN-RECEIVED: SYN-ACK sent
	established              // ESTABLISHED
	closeWait                // CLOSE-WAIT
	finWait1                 // FIN-WAIT-1
	finWait2                 // FIN-WAIT-2
	closing                  // CLOSING
	lastAck                  // LAST-ACK
	timeWait                 // TIME-WAIT; the socket is closed
)

// finSent returns whether the gateway has sent a FIN: the host's peer has sent all that it will.
func (s state) finSent() bool { return s >= finWait1 }

// finReceived returns whether the guest's FIN was processed and passed on to the host's socket.
func (s state) finReceived() bool { return s == closeWait || s >= closing }

// conn is a TCP connection of the guest, joined to a socket of the host.
type conn struct {
	g     *Gateway
	flow  flow
	fd    int // the host's socket; -1: closed
	state state
	timer timer.Timer

	snd   sendSide
	rcv   receiveSide
	rtx   retransmission
	alive keepalive

	host          hostError
	queued        queued
	outgoing      bool // the guest opened the connection, which occupies a port of the host
	windowScaling bool // both ends sent the window scale option (RFC 7323, section 2.2)
}

// sendSide is what goes to the guest. The bytes from SND.UNA on are in the receive queue of the host's socket.
type sendSide struct {
	iss uint32 // ISS
	una uint32 // SND.UNA
	nxt uint32 // SND.NXT
	wnd uint32 // SND.WND, bytes
	wl1 uint32 // SND.WL1

	mss       uint16 // SMSS (RFC 5681)
	windShift uint8  // Snd.Wind.Shift (RFC 7323)

	// unconsumed is how many bytes before SND.UNA, acknowledged by the guest, are in the receive queue still. They are
	// removed at the end of the turn.
	unconsumed int
	peekOffset bool // the kernel keeps the offset of MSG_PEEK (SO_PEEK_OFF, from Linux 6.9 for TCP)
	drained    bool // the receive queue had nothing behind SND.NXT, and no event came since
	blocked    bool // SND.WND is too small to send
}

// receiveSide is what comes from the guest and goes to the host's socket.
type receiveSide struct {
	irs  uint32 // IRS
	nxt  uint32 // RCV.NXT: the socket has accepted everything before
	edge uint32 // RCV.NXT + RCV.WND, the right edge of the advertised window

	mss         uint16       // MSS option that was sent to the guest (RMSS of RFC 5681)
	recentWrite int          // moving average of the size of a segment's payload, bytes, on which room's estimate depends
	tracker     room.Tracker // of room's estimates
	memory      connMemory   // share of the guest's send memory

	batch   *segmentBatch // payload of this turn, from RCV.NXT on; nil: none
	backlog []byte        // payload from RCV.NXT on that the socket did not accept; then there is no batch

	armed       bool // EPOLLOUT will come
	moreFollows bool // the last segment had neither PSH nor FIN: the guest has more to send
	ackAll      bool // the guest repeats payload: the next acknowledgement must be RCV.NXT itself
	finPending  bool // the guest's FIN was received, and payload before it is not in the socket yet
}

// wnd is RCV.WND, bytes: 0 while the socket has accepted a FIN beyond the edge.
func (r *receiveSide) wnd() uint32 {
	if before(r.edge, r.nxt) {
		return 0
	}
	return r.edge - r.nxt
}

// retransmission is the state of timeouts and loss recovery toward the guest.
type retransmission struct {
	recover       uint32 // recover of RFC 6582: SND.NXT at the start of the recovery
	highRxt       uint32 // HighRxt of RFC 6675: end of the last retransmission
	dupAcks       uint8  // duplicate acknowledgements in a row, at most 4
	backoff       uint8  // doublings of the timeout since the guest acknowledged something or opened its window
	unanswered    uint8  // timeouts since the guest sent anything
	maybeSpurious bool   // a timeout without a duplicate acknowledgement began the recovery
}

// keepalive is what the gateway knows of the guest's keepalive (RFC 9293, section 3.8.4).
type keepalive struct {
	lastHeard time.Time // when the guest sent something last
	idle      uint16    // TCP_KEEPIDLE of the host's socket, seconds; 0: the host's default
}

// hostError is what is known of an error of the host's socket.
type hostError uint8

const (
	hostOK        hostError = iota
	hostFailed              // what the socket has received before is delivered; then recv(2) returns the error
	hostErrorRead           // send(2) has returned the error: after the data, recv(2) returns 0 as at an orderly end
)

// queued tells in which queues of the loop the connection is.
type queued struct{ ack, output, flush bool }

// tcpArrives processes a TCP segment of the guest.
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

// newConn registers a host's socket for events. It returns nil, and closes the socket, if that fails.
func (g *Gateway) newConn(f flow, fd int, s state) *conn {
	c := &conn{g: g, flow: f, fd: fd, state: s, snd: sendSide{mss: defaultMSS4}, rcv: receiveSide{recentWrite: maxPacket}}
	if f.guest.Addr().Is6() {
		c.snd.mss = defaultMSS6
	}
	c.timer.Owner = c
	// By clock and flow (RFC 6528), so that the guest accepts a SYN for a flow that is in its TIME-WAIT.
	c.snd.iss = uint32(g.now.UnixMicro()/4) + uint32(maphash.Comparable(g.seed, f))
	c.snd.una, c.snd.nxt, c.rtx.recover = c.snd.iss, c.snd.iss, c.snd.iss
	// The guest's TCP has decided about segments already. Urgent data of the peer are delivered in line: taken out of the
	// stream they would leave a hole that SO_PEEK_OFF does not count.
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

// event processes events of the host's socket.
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
		if c.state.finSent() {
			if c.takeHostError() {
				c.abort()
			}
			return
		}
		c.host = max(c.host, hostFailed)
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

// takeHostError reads and clears the error of the host's socket, and returns whether there was one.
func (c *conn) takeHostError() bool {
	code, err := unix.GetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_ERROR)
	return err != nil || code != 0
}
