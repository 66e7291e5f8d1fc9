// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"hash/maphash"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/gateway/packet"
	"sockeye/internal/gateway/timer"
	"sockeye/room"
)

// # Theory of operation
//
// The gateway joins each TCP connection of the guest (the programs in the network namespace) to one TCP socket of the host.
// Toward the guest the gateway is a TCP endpoint itself and exchanges segments over the TUN interface; toward the network the
// endpoint is the host's kernel. The TUN interface is a link inside one host: the link drops packets only when a queue is
// full, never reorders packets, and has a round-trip time of microseconds. Variables and states have their names of RFC 9293:
// SND.* describe what the gateway sends to the guest, RCV.* what the gateway receives from the guest.
//
//	program <-> guest's TCP <-> TUN <-> this file <-> host's socket <-> network <-> peer
//	                        RCV ->  send(2)
//	                        SND <-  recv(2), MSG_PEEK
//
// # No buffer
//
// The gateway stores no payload. The host's socket is the buffer of both directions:
//
//   - From the guest: payload goes from the TUN to send(2) in the turn of the event loop that read the packet. RCV.NXT
//     advances by the return value of send(2), so that the gateway acknowledges only what the socket has accepted.
//     (tcp_tohost.go)
//   - To the guest: MSG_PEEK copies payload and leaves the payload in the socket's receive queue until the guest acknowledges
//     it. The receive queue begins with bytes that are acknowledged but not yet consumed; SND.UNA follows them. The kernel
//     keeps the position of SND.NXT as the peek offset (SO_PEEK_OFF; before Linux 6.9 each peek skips the bytes before
//     SND.NXT). An acknowledgement advances SND.UNA; recv(2) with MSG_TRUNC consumes the acknowledged bytes once per turn.
//     A retransmission peeks at the head of the queue. (tcp_output.go, tcp_retransmit.go)
//
// Flow control is therefore end to end: if a program does not read, the receive queue fills and the host's kernel closes the
// window toward the peer; if a peer does not read, the send buffer fills and RCV.WND closes. If the gateway crashes, no
// acknowledged byte is lost with its memory: the host's socket has them all, as after the crash of a native program.
//
// The exception is the backlog: under memory pressure, send(2) may accept less than the advertised window. The backlog holds
// the rest, unacknowledged, up to maxBacklog per connection and maxBacklogs in total. Payload beyond these is dropped, and
// the guest retransmits.
//
// # The receive window
//
// RCV.WND must equal the number of bytes that send(2) will accept. With a smaller window the kernel has no reason to grow the
// send buffer, and the connection stays slow; with a larger window send(2) is partial. Package room computes the number from
// the kernel's accounting; its safe estimate bounds RCV.WND. A writable socket accepts at least one segment. When the socket
// is not writable, poll(2) requests EPOLLOUT, and that event recomputes the window; until then, increases below the smaller
// of an eighth of the send buffer and 64 KB are withheld (silly-window avoidance, RFC 9293, section 3.8.6.2.2). The right
// edge of the window (RCV.NXT + RCV.WND) never moves left (section 3.8.6). sendMemory bounds the send buffers of all
// connections of the guest together. (tcp_window.go, tcp_memory.go)
//
// # Opening
//
// Active open by the guest: the SYN starts connect(2) on a socket of the host. The SYN-ACK is withheld until connect(2) has
// succeeded (synPending); retransmissions of the SYN are ignored meanwhile. If connect(2) fails, the guest gets the RST or
// ICMP error that corresponds to the errno; after ETIMEDOUT the guest gets nothing and times out itself.
//
// Active open by a peer: accept(2) returns an established connection, and the gateway sends a SYN to the guest (synSent) with
// a short retransmission timeout, because a listener with a full accept queue drops SYNs. If the guest refuses the
// connection, the gateway resets the host's socket. (tcp_handshake.go, tcp_listen.go)
//
// # States
//
// The states are those of RFC 9293, section 3.3.2, of the gateway's end toward the guest. LISTEN and CLOSED have no conn.
// synPending is an addition: SYN-RECEIVED before the SYN-ACK is sent. A connection in CLOSING skips TIME-WAIT.
//
//	guest's SYN -> synPending -> (host's socket connected) synReceived -> (ACK) established
//	accept(2) -------------------------------------------> synSent -> (SYN-ACK) ----^
//
//	established -> (socket at end of data: FIN sent) finWait1 -> (ACK) finWait2 -> (FIN) timeWait -> removed
//	established -> (FIN of the guest) closeWait -> (FIN sent) lastAck -> (ACK) removed
//	finWait1    -> (FIN of the guest) closing -> (ACK) removed
//
// The guest's FIN becomes shutdown(SHUT_WR) when the socket has accepted all payload before the FIN. A half-closed connection
// has no timeout. In timeWait the socket is closed, and the gateway acknowledges retransmissions of the guest's FIN for two
// seconds instead of two MSL: the guest's kernel retransmits the FIN at least three times within these, and a link inside a
// host has no old duplicates. (tcp_close.go)
//
// # Errors
//
// A RST of the guest resets the host's socket (SO_LINGER 0) after the payload of the same turn is written. An error of the
// host's socket resets the guest's connection after the data that the socket received before the error are delivered. Urgent
// data of the guest reset both ends, because the gateway cannot pass the urgent pointer on; urgent data of the peer are
// delivered in line.
//
// # Loss toward the guest
//
// The TUN interface drops a packet when its queue is full. Three duplicate acknowledgements or a retransmission timeout start
// a recovery: the gateway retransmits the first unacknowledged packet, and the next one on each partial acknowledgement, up
// to SND.NXT at the start of the recovery (NewReno, RFC 6582). A timeout without duplicate acknowledgements may be spurious:
// then an acknowledgement beyond the retransmitted packet shows that the guest had received more, and ends the recovery.
//
// The retransmission timeout is 200 ms and doubles up to 60 s (RFC 6298, section 5.5); the round-trip time is not measured.
// The same timer probes a zero window (RFC 9293, section 3.8.6.1), retransmits SYN, SYN-ACK and FIN, and sends a keepalive
// after two idle hours (section 3.8.4). The gateway answers the guest's keepalives itself, and sets their interval on the
// host's socket. (tcp_retransmit.go, tcp_timers.go)
//
// # Omissions
//
// Toward the guest there is no congestion control: the link is a queue in one host, and SND.WND is the bound. The gateway
// offers neither SACK nor timestamps and drops out-of-order segments: the guest's kernel sends in order and passes up to
// 64 KB as one packet (IFF_VNET_HDR, TUN_F_TSO4/6), so that losses are rare and their recovery is cheap. One turn of
// the event loop reads up to 64 packets and sends one acknowledgement per connection; only those of requests are delayed (tcp_ack.go).
// The host's socket has TCP_NODELAY, because the guest's TCP has applied Nagle's algorithm already.

// state is the connection state (RFC 9293, section 3.3.2) of the gateway's end toward the guest. The methods compare states
// by their order.
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

// finSent returns whether the gateway has sent a FIN: the host's socket is at the end of its data.
func (s state) finSent() bool { return s >= finWait1 }

// finReceived returns whether the guest's FIN was processed: the write side of the host's socket is shut down.
func (s state) finReceived() bool { return s == closeWait || s >= closing }

// conn is a TCP connection of the guest, joined to a socket of the host.
type conn struct {
	g         *Gateway
	endpoints endpoints
	fd        int // the host's socket; -1: closed
	state     state
	timer     timer.Timer

	snd       sendSide
	rcv       receiveSide
	rtx       retransmission
	keepalive keepalive

	hostError     hostError
	queued        queued
	outgoing      bool // opened by the guest; the host's socket occupies an ephemeral port
	windowScaling bool // both ends sent the window scale option (RFC 7323, section 2.2)
}

// sendSide is the direction to the guest. The bytes from SND.UNA on are in the receive queue of the host's socket.
type sendSide struct {
	iss uint32 // ISS
	una uint32 // SND.UNA
	nxt uint32 // SND.NXT
	wnd uint32 // SND.WND, bytes
	wl1 uint32 // SND.WL1

	mss       uint16 // SMSS (RFC 5681)
	windShift uint8  // Snd.Wind.Shift (RFC 7323)

	// unconsumed is the number of bytes that the guest has acknowledged and that are still in the receive queue, before
	// SND.UNA. flush removes them.
	unconsumed int
	peekOffset bool // the kernel keeps the offset of MSG_PEEK (SO_PEEK_OFF, for TCP since Linux 6.9)
	drained    bool // the receive queue ended at SND.NXT, and epoll has reported no event since
	readToEnd  bool // the last event reported more than data: recv(2) is repeated until it returns 0 or an error
	blocked    bool // SND.WND is too small to send
}

// receiveSide is the direction from the guest to the host's socket.
type receiveSide struct {
	irs uint32 // IRS
	nxt uint32 // RCV.NXT: the host's socket has accepted all bytes before
	adv uint32 // RCV.NXT + RCV.WND, the right edge of the advertised window

	mss         uint16       // MSS option sent to the guest (RMSS of RFC 5681)
	recentWrite int          // moving average of payload per segment, bytes; an input of room's estimate
	tracker     room.Tracker // state of room's estimates
	memory      connMemory   // share of the guest's send memory

	batch   *segmentBatch // payload of this turn, from RCV.NXT on; nil: none
	backlog []byte        // payload from RCV.NXT on that the socket did not accept; excludes a batch

	lastWindow  uint32    // RCV.WND when it was computed last
	received    time.Time // time of the last payload
	request     bool      // the last payload was small and complete, as a request is
	delayCredit int       // above 0: acknowledgements are delayed; see tcp_ack.go
	acked       bool      // a segment to the guest has acknowledged all payload

	armed       bool // the kernel will report EPOLLOUT
	moreFollows bool // the last segment had neither PSH nor FIN: the guest has more to send
	exactAck    bool // the guest retransmits: the next SEG.ACK must be RCV.NXT, not rounded
	finPending  bool // the guest's FIN was received, and the socket has not accepted all payload before it
}

// wnd returns RCV.WND in bytes: 0 if RCV.NXT is beyond the window, as after a FIN.
func (r *receiveSide) wnd() uint32 {
	if packet.Before(r.adv, r.nxt) {
		return 0
	}
	return r.adv - r.nxt
}

// retransmission is the state of the retransmission timeout and of loss recovery toward the guest.
type retransmission struct {
	recover       uint32 // recover of RFC 6582: SND.NXT at the start of the recovery
	highRxt       uint32 // HighRxt of RFC 6675: end of the last retransmission
	dupAcks       uint8  // consecutive duplicate acknowledgements, at most 4
	backoff       uint8  // doublings of the timeout since SND.UNA advanced or SND.WND grew
	timeouts      uint8  // timeouts since the last segment of the guest
	maybeSpurious bool   // the recovery began with a timeout without duplicate acknowledgements
}

// keepalive is the state from which copyKeepalive derives the guest's keepalive time (RFC 9293, section 3.8.4).
type keepalive struct {
	lastReceived time.Time // time of the guest's last segment
	idle         uint16    // TCP_KEEPIDLE of the host's socket, seconds; 0: the host's default
}

// hostError is the error state of the host's socket.
type hostError uint8

const (
	hostOK        hostError = iota
	hostFailed              // recv(2) returns the error after the remaining data
	hostErrorRead           // send(2) has returned the error: recv(2) returns 0 after the remaining data, as after a FIN
)

// queued marks the queues of the event loop that contain the connection.
type queued struct{ ack, delayedAck, output, flush bool }

// tcpArrives processes a TCP segment of the guest.
func (g *Gateway) tcpArrives(s *packet.Segment) {
	f := endpoints{s.From, s.To}
	if c := g.conns[f]; c != nil {
		c.segmentArrives(s)
		return
	}
	switch {
	case s.Flags&packet.RST != 0:
	case s.Flags&(packet.SYN|packet.ACK|packet.FIN) == packet.SYN:
		g.acceptSYN(f, s)
	default:
		g.sendReset(s)
	}
}

// newConn returns a connection for a socket of the host. If the socket cannot be registered with epoll, newConn closes the
// socket and returns nil.
func (g *Gateway) newConn(f endpoints, fd int, s state) *conn {
	c := &conn{g: g, endpoints: f, fd: fd, state: s, snd: sendSide{mss: defaultMSS4}, rcv: receiveSide{recentWrite: packet.MaxSize}}
	c.snd.drained = true // registering the socket reports data that are there already
	if f.guest.Addr().Is6() {
		c.snd.mss = defaultMSS6
	}
	c.timer.Owner = c
	// The ISS grows with the clock (RFC 6528), so that the guest accepts a SYN for a flow in TIME-WAIT.
	c.snd.iss = uint32(g.now.UnixMicro()/4) + uint32(maphash.Comparable(g.seed, f))
	c.snd.una, c.snd.nxt, c.rtx.recover = c.snd.iss, c.snd.iss, c.snd.iss
	// The guest's TCP has applied Nagle's algorithm already. Urgent data of the peer stay in line: removed from the stream,
	// they would leave a hole that SO_PEEK_OFF does not count.
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_OOBINLINE, 1)
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1)
	c.snd.peekOffset = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PEEK_OFF, 0) == nil
	if err := g.register(fd, unix.EPOLLIN|unix.EPOLLOUT|unix.EPOLLPRI|unix.EPOLLRDHUP|unix.EPOLLET, c); err != nil {
		g.log.Warn("cannot register the socket of a connection", "error", err)
		unix.Close(fd)
		return nil
	}
	g.conns[f] = c
	g.count(Opened)
	return c
}

// event processes events of the host's socket.
func (c *conn) event(events uint32) {
	if events&^unix.EPOLLOUT != 0 {
		c.snd.drained = false
	}
	c.snd.readToEnd = events&^(unix.EPOLLIN|unix.EPOLLOUT) != 0
	switch c.state {
	case synPending:
		if events&(unix.EPOLLOUT|unix.EPOLLERR|unix.EPOLLHUP) != 0 {
			c.checkConnect()
		}
		return
	case synReceived, synSent:
		if events&unix.EPOLLERR != 0 && c.readHostError() {
			c.abort()
		}
		return
	}
	if events&unix.EPOLLERR != 0 {
		if c.state.finSent() {
			if c.readHostError() {
				c.abort()
			}
			return
		}
		c.hostError = max(c.hostError, hostFailed)
	}
	if events&unix.EPOLLOUT != 0 && (c.rcv.armed || len(c.rcv.backlog) > 0) {
		c.hostWritable()
	}
	if c.fd >= 0 && events&^unix.EPOLLOUT != 0 {
		c.output()
	}
}

// readHostError reads and clears the error of the host's socket (SO_ERROR), and returns whether there was one.
func (c *conn) readHostError() bool {
	code, err := unix.GetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_ERROR)
	return err != nil || code != 0
}
