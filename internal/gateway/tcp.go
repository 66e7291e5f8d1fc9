// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"errors"
	"hash/maphash"
	"math/rand/v2"
	"net/netip"
	"syscall"
	"time"
	"unsafe"

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

const (
	// maxSpill and maxSpilled bound what is kept of segments that sockets did not take, in
	// bytes: of a connection, and of all together.
	maxSpill   = 256 << 10
	maxSpilled = 16 << 20
	// outputBudget is how many packets a connection sends in a turn.
	outputBudget = 8

	firstRTO      = 200 * time.Millisecond
	maxRTO        = 60 * time.Second
	maxTries      = 12                    // some six minutes
	answerTries   = 6                     // of a SYN-ACK, some twelve seconds
	firstCall     = 10 * time.Millisecond // a guest whose program accepts slowly drops SYNs
	maxCall       = 320 * time.Millisecond
	callTries     = 30                  // of a SYN, some twelve seconds
	mostKeepalive = 32767 * time.Second // MAX_TCP_KEEPIDLE
	// keepaliveEvery is the kernel's own time between two probes that are not answered
	// (TCP_KEEPALIVE_INTVL).
	keepaliveEvery = 75 * time.Second
	idleTime       = 2 * time.Hour   // before the guest is asked whether it is there (RFC 9293, section 3.8.4)
	overTime       = 2 * time.Second // the guest sends its FIN three times at least
	leastMSS       = 88              // that Linux takes (TCP_MIN_MSS)
	defaultMSS4    = 536             // RFC 9293, section 3.7.1
	defaultMSS6    = 1220
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

// reset answers a segment that belongs to no connection (RFC 9293, section 3.10.7.1).
func (g *Gateway) reset(s *segment) {
	a := answer{from: s.to, to: s.from, flags: flagRST}
	if s.flags&flagACK != 0 {
		a.seq = s.ack
	} else {
		a.flags |= flagACK
		a.ack = s.seq + s.length()
	}
	var b [maxHeaders]byte
	a.write(b[:], 0)
	g.send(b[:a.headers()])
}

// connect has the host connect to where the guest wants to. The guest gets its answer
// when it is known.
func (g *Gateway) connect(f flow, s *segment) {
	if !g.config.Outbound.Allowed(unix.IPPROTO_TCP, f.remote) {
		g.count(NotAllowed)
		g.unreachable(s, prohibited)
		return
	}
	if len(g.conns) >= g.config.Connections {
		g.count(TooMany)
		g.reset(s)
		return
	}
	if g.outgoing >= g.config.Outgoing {
		g.count(TooMany)
		g.warnOf(warnRefused, "too many TCP connections: more are refused", "most", g.config.Outgoing)
		g.reset(s)
		return
	}
	to := g.config.Outbound.Translate(f.remote)
	fd, err := g.hostSocket(to.Addr(), unix.SOCK_STREAM, 0)
	switch {
	case errors.Is(err, unix.EAFNOSUPPORT):
		g.refuse(s, err)
		return
	case err != nil:
		g.count(TooMany)
		g.unreachable(s, noNetwork) // nobody has refused it
		return
	}
	if err := unix.Connect(fd, sockaddr(to)); err != nil && !errors.Is(err, unix.EINPROGRESS) {
		unix.Close(fd)
		g.refuse(s, err)
		return
	}
	if c := g.newConn(f, fd, connecting); c != nil {
		c.ours = true
		g.outgoing++
		c.begin(s)
	}
}

// refuse tells the guest why its SYN leads nowhere.
func (g *Gateway) refuse(s *segment, err error) {
	g.count(Refused)
	switch {
	case errors.Is(err, unix.EHOSTUNREACH), errors.Is(err, unix.EHOSTDOWN):
		g.unreachable(s, noHost)
	case errors.Is(err, unix.ENETUNREACH), errors.Is(err, unix.EADDRNOTAVAIL), errors.Is(err, unix.EAFNOSUPPORT):
		g.unreachable(s, noNetwork)
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		g.unreachable(s, prohibited)
	case errors.Is(err, unix.ETIMEDOUT):
		// As a network that answers nothing: the guest has its own patience.
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

// begin starts a connection from the guest's SYN.
func (c *conn) begin(s *segment) {
	c.agree(s)
	c.rcv = s.seq + 1
	c.edge = c.rcv
}

// agree takes the options of the guest's SYN.
func (c *conn) agree(s *segment) {
	if s.options.mss != 0 {
		c.mss = max(s.options.mss, leastMSS)
	}
	c.mss = min(c.mss, c.g.mss(c.flow.guest.Addr()))
	c.scale, c.hasScale = s.options.scale, s.options.hasScale
	c.window = uint32(s.window) // that of a SYN is not scaled
	c.wl1 = s.seq
}

// mss is the largest segment that the guest's interface carries.
func (g *Gateway) mss(a netip.Addr) uint16 {
	headers := ipv4Header + tcpHeader
	if a.Is6() {
		headers = ipv6Header + tcpHeader
	}
	return uint16(g.config.MTU - headers)
}

// settle decides the MSS that the guest is told. Its kernel waits until a window takes a
// whole segment, and the room of a socket grows by segments of the host's path, beginning
// with a third of its buffer: larger ones would make it wait for what does not come. What
// is no multiple of these leaves a small one behind each packet.
func (c *conn) settle() {
	c.grain = c.g.mss(c.flow.guest.Addr())
	if s, err := room.Take(c.fd); err == nil && s.MSS > 0 {
		grain := min(int(c.grain), max(s.SendBuffer/8, s.MSS))
		if grain > s.MSS {
			grain -= grain % s.MSS
		}
		c.grain = uint16(grain)
	}
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

// connected answers the guest, now that the host's socket is connected or has failed.
func (c *conn) connected() {
	if code, err := unix.GetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_ERROR); err != nil || code != 0 {
		s := segment{from: c.flow.guest, to: c.flow.remote, flags: flagSYN, seq: c.rcv - 1, protocol: unix.IPPROTO_TCP}
		var short [ipv6Header + 8]byte
		s.network = syntheticSYN(short[:], &s)
		c.drop()
		c.g.refuse(&s, syscall.Errno(code))
		return
	}
	if _, err := unix.Getpeername(c.fd); err != nil {
		return // not yet
	}
	c.state = answered
	c.nxt = c.una + 1
	c.answer()
}

// answer sends the SYN-ACK of a connection that the guest opens, or the SYN of one
// that the host has accepted.
func (c *conn) answer() {
	c.settle()
	c.advance()
	a := answer{
		from: c.flow.remote, to: c.flow.guest, seq: c.una, flags: flagSYN, mss: c.grain, scale: c.g.scale, hasScale: c.hasScale,
		window: uint16(min(c.edge-c.rcv, 65535)), // not scaled
	}
	if c.state == answered {
		a.flags |= flagACK
		a.ack = c.rcv
	}
	c.edge = c.rcv + uint32(a.window)
	c.transmit(&a, nil)
	c.arm()
}

// input takes a segment of the guest (RFC 9293, section 3.10.7).
func (c *conn) input(s *segment) {
	switch c.state {
	case connecting:
		switch {
		case s.flags&flagRST != 0 && s.seq == c.rcv:
			c.abandon()
		case s.flags&(flagRST|flagSYN|flagACK|flagFIN) == flagSYN && s.seq+1 != c.rcv:
			c.begin(s) // the guest has given up the first one
		}
		return
	case calling:
		c.called(s)
		return
	case over:
		c.recalled(s)
		return
	}
	if s.flags&flagRST != 0 {
		switch {
		case s.seq == c.expected() || s.seq == c.rcv:
			c.abandon()
		case before(c.rcv, s.seq) && before(s.seq, c.edge):
			c.acknowledge() // RFC 5961, section 3.2
		}
		return
	}
	if s.flags&flagSYN != 0 {
		if c.state == answered && s.flags&flagACK == 0 && s.seq+1 == c.rcv {
			c.answer()
			return
		}
		c.acknowledge() // RFC 5961, section 4.2
		return
	}
	if s.flags&flagACK == 0 {
		return
	}
	if before(c.nxt, s.ack) {
		c.acknowledge()
		return
	}
	if c.state == answered {
		if s.ack != c.nxt {
			c.g.reset(s)
			return
		}
		c.opened(s)
	}
	if s.flags&flagURG != 0 {
		c.g.count(UrgentData)
		c.abort()
		return
	}
	if c.silent > 0 {
		c.silent = 0
		if c.una == c.nxt && !c.blocked {
			c.tries = 0
			c.rest()
		}
	}
	c.acked(s)
	if c.fd >= 0 {
		c.data(s)
	}
	c.heard = c.g.now
	if c.fd >= 0 {
		c.output()
	}
}

// opened: the guest has acknowledged the SYN.
func (c *conn) opened(s *segment) {
	c.state = open
	c.una, c.recover = s.ack, s.ack
	c.tries, c.silent = 0, 0
	c.heard = c.g.now
	c.rest()
}

// expected is the sequence number of the guest's next segment.
func (c *conn) expected() uint32 {
	n := c.rcv + uint32(len(c.spill))
	if c.held != nil {
		n += uint32(c.held.bytes)
	}
	if c.guestEnded && !c.shut {
		n++
	}
	return n
}

// called takes the guest's answer to a SYN.
func (c *conn) called(s *segment) {
	if s.flags&flagACK != 0 && s.ack != c.nxt {
		if s.flags&flagRST == 0 {
			c.g.reset(s)
		}
		return
	}
	switch {
	case s.flags&(flagRST|flagACK) == flagRST|flagACK:
		c.g.count(Refused)
		c.resetSocket()
		c.drop()
	case s.flags&(flagSYN|flagACK|flagRST) == flagSYN|flagACK:
		told := c.edge - c.rcv
		c.agree(s)
		c.rcv = s.seq + 1
		c.edge = c.rcv + told
		c.opened(s)
		c.acknowledge()
		c.output()
	}
}

// recalled takes what the guest sends after both ends have ended.
func (c *conn) recalled(s *segment) {
	switch {
	case s.flags&flagRST != 0:
		c.drop()
	case s.flags&(flagSYN|flagACK) == flagSYN:
		c.drop()
		c.g.tcp(s)
	case s.length() > 0:
		c.tell()
	}
}

// acked takes the guest's acknowledgement and its window.
func (c *conn) acked(s *segment) {
	if before(s.ack, c.una) {
		return
	}
	window, told := uint32(s.window), c.window
	if c.hasScale {
		window <<= c.scale
	}
	n := s.ack - c.una
	// A segment that was sent again may have a new one, as it has a new acknowledgement. None
	// overtakes another.
	if n > 0 || !before(s.seq, c.wl1) {
		c.window, c.wl1 = window, s.seq
	}
	if window > told && c.tries > 0 {
		c.tries = 0
		c.arm()
	}
	switch {
	case n > 0:
		c.una = s.ack
		c.dupAcks, c.tries = 0, 0
		if c.finSent && c.una == c.nxt {
			n-- // the FIN
		}
		c.spent += int(n)
		c.hold()
		if c.una == c.nxt {
			c.rest()
		} else {
			c.arm()
		}
		if before(c.una, c.recover) && (!c.late || !before(c.again, c.una)) {
			c.resend()
		} else {
			c.recover = c.una
		}
	case c.una != c.nxt && window == told && len(s.payload) == 0 && s.flags&flagFIN == 0 && s.seq == c.expected():
		if c.dupAcks = min(c.dupAcks+1, 4); c.dupAcks == 3 && !before(c.una, c.recover) {
			c.recover, c.late = c.nxt, false
			c.resend()
		}
	}
	if c.fd >= 0 && c.ended() {
		c.g.count(Closed)
		c.drop()
	}
}

// ended tells whether both ends have ended, and know it.
func (c *conn) ended() bool { return c.finSent && c.una == c.nxt && c.shut }

// data takes the payload of a segment, and its FIN.
func (c *conn) data(s *segment) {
	if s.length() == 0 {
		// A keepalive or a probe of a closed window is from before it.
		if before(s.seq, c.rcv) {
			if c.edge != c.rcv {
				c.ask()
			}
			c.acknowledge()
		}
		return
	}
	if len(c.spill) > 0 {
		if c.flush(); c.fd < 0 {
			return
		}
	}
	payload, fin := s.payload, s.flags&flagFIN != 0
	expected := c.expected()
	if before(expected, s.seq) {
		c.g.count(OutOfOrder)
		c.acknowledge()
		return
	}
	if old := expected - s.seq; old > 0 {
		if old >= s.length() {
			c.asked = true
			c.acknowledge()
			return
		}
		payload = payload[min(int(old), len(payload)):]
	}
	c.mark()
	if c.guestEnded || c.broken {
		return
	}
	c.more = s.flags&(flagPSH|flagFIN) == 0
	if n := c.fits(expected, len(payload)); n < len(payload) {
		payload, fin = payload[:n], false
	}
	if len(payload) > 0 && !c.take(payload) {
		return
	}
	if fin {
		c.guestEnded = true
		c.finish()
	}
}

// ask has the socket ask its peer whether it is there, as the guest does, after the same
// time without a word: a guest that would find out natively that its peer is gone would
// hear from the gateway for ever.
func (c *conn) ask() {
	idle := uint16(min(max(c.g.now.Sub(c.heard).Round(time.Second), time.Second), mostKeepalive) / time.Second)
	if idle == c.keepalive {
		return
	}
	c.keepalive = idle
	// The interval first: if the time is over, the kernel asks at once.
	every := min(int(idle), int(keepaliveEvery/time.Second))
	_ = unix.SetsockoptInt(c.fd, unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, every)
	_ = unix.SetsockoptInt(c.fd, unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, int(idle))
}

// fits is how many bytes from a sequence number on are inside the window.
func (c *conn) fits(seq uint32, n int) int {
	if n > int(int32(c.edge-seq)) {
		c.advance() // as a probe asks for
	}
	return min(n, max(int(int32(c.edge-seq)), 0))
}

// mark has what came acknowledged at the end of the turn.
func (c *conn) mark() {
	if !c.dirty {
		c.dirty = true
		c.g.dirty = append(c.g.dirty, c)
	}
}

// batch is payload that a socket is given in one call. It stands where it was read.
type batch struct {
	parts []unix.Iovec
	bytes int
}

// take has payload given to the socket at the end of the turn. If the socket did not take
// all before it, it is kept, up to a bound: then it is false, and is to be sent again.
func (c *conn) take(payload []byte) bool {
	if len(c.spill) > 0 {
		return c.keep(payload)
	}
	c.usual += (len(payload) - c.usual) / 4
	if c.held == nil {
		c.held = c.g.batch()
		c.hold()
	}
	c.held.add(payload)
	return true
}

// hold has conclude called at the end of the turn.
func (c *conn) hold() {
	if !c.holds {
		c.holds = true
		c.g.holding = append(c.g.holding, c)
	}
}

// conclude does what was left for the end of the turn.
func (c *conn) conclude() {
	c.holds = false
	c.push()
	if c.fd >= 0 && !c.discard() {
		c.abort()
	}
}

// batch is an empty one.
func (g *Gateway) batch() *batch {
	last := len(g.batches) - 1
	if last < 0 {
		return &batch{parts: make([]unix.Iovec, 0, tunBudget)}
	}
	b := g.batches[last]
	g.batches = g.batches[:last]
	return b
}

func (b *batch) add(payload []byte) {
	part := unix.Iovec{Base: unsafe.SliceData(payload)}
	part.SetLen(len(payload))
	b.parts = append(b.parts, part)
	b.bytes += len(payload)
}

// send gives it to a socket, which neither waits nor raises SIGPIPE.
func (b *batch) send(fd int) (int, error) {
	if len(b.parts) == 1 {
		return sendTo(fd, unsafe.Slice(b.parts[0].Base, b.bytes))
	}
	h := unix.Msghdr{Iov: &b.parts[0]}
	h.SetIovlen(len(b.parts))
	return sendMessage(fd, &h)
}

// push gives the socket what came in this turn. What it does not take is kept.
func (c *conn) push() {
	b := c.held
	if b == nil {
		return
	}
	n, err := b.send(c.fd)
	if err != nil && !errors.Is(err, unix.EAGAIN) {
		c.lose()
		return
	}
	c.rcv += uint32(n)
	c.tracker.Wrote(n, b.bytes)
	if n < b.bytes {
		c.g.count(PartialSend)
		for _, part := range b.parts {
			payload := unsafe.Slice(part.Base, part.Len)
			taken := min(n, len(payload))
			if n -= taken; !c.keep(payload[taken:]) {
				c.guestEnded = false // what is before its FIN comes again
				break
			}
		}
	}
	c.unhold()
	c.finish()
}

// unhold gives back what held the payload of this turn.
func (c *conn) unhold() {
	if b := c.held; b != nil {
		clear(b.parts)
		b.parts, b.bytes = b.parts[:0], 0
		c.held, c.g.batches = nil, append(c.g.batches, b)
	}
}

// keep keeps what the socket did not take; false if that is too much.
func (c *conn) keep(payload []byte) bool {
	if len(c.spill)+len(payload) > maxSpill || c.g.spilled+len(payload) > maxSpilled {
		return false
	}
	c.spill = append(c.spill, payload...)
	c.g.spilled += len(payload)
	return true
}

// finish passes the guest's FIN on, when all before it is in the socket.
func (c *conn) finish() {
	if !c.guestEnded || c.shut || c.held != nil || len(c.spill) > 0 {
		return
	}
	c.shut = true
	c.rcv++
	if err := unix.Shutdown(c.fd, unix.SHUT_WR); err != nil {
		c.lose()
		return
	}
	if !c.ended() {
		c.mark()
		return
	}
	c.tell()
	c.g.count(Closed)
	c.release()
	c.state = over
	c.g.timers.set(&c.timer, c.g.now.Add(overTime))
}

// lose: a send has met the socket's error. What it has received before is still for the
// guest.
func (c *conn) lose() {
	c.broken, c.lost, c.drained = true, true, false
	c.unhold()
	c.unspill()
	if c.finSent {
		c.abort()
		return
	}
	c.output()
}

// flush gives the socket what it did not take before.
func (c *conn) flush() {
	n, err := sendTo(c.fd, c.spill)
	if err != nil && !errors.Is(err, unix.EAGAIN) {
		c.lose()
		return
	}
	c.rcv += uint32(n)
	c.g.spilled -= n
	c.tracker.Wrote(n, len(c.spill))
	if c.spill = c.spill[n:]; len(c.spill) == 0 {
		c.spill = nil
		c.finish()
	}
}

func (c *conn) unspill() {
	c.g.spilled -= len(c.spill)
	c.spill = nil
}

// writable is called when the socket has room again.
func (c *conn) writable() {
	rcv, edge := c.rcv, c.edge
	if len(c.spill) > 0 && !c.broken {
		if c.flush(); c.fd < 0 {
			return
		}
	}
	c.advance()
	if c.rcv != rcv || c.edge != edge {
		c.tell()
	}
}

// open tells the guest of a larger window, if there is one.
func (c *conn) open() {
	edge := c.edge
	if c.advance(); c.edge != edge {
		c.tell()
	}
}

// advance moves the right edge of the window as far as the socket has room. An edge
// that the guest knows of stays.
func (c *conn) advance() {
	if c.shut || c.broken || len(c.spill) > 0 {
		return
	}
	s, err := room.Take(c.fd)
	if err != nil {
		return
	}
	c.armed = false
	if s.Arming() || s.NotSentLowat > 0 && 2*s.Unsent >= s.NotSentLowat {
		// As room.Arm. What left the socket since then wakes nobody.
		if c.armed = !writable(c.fd); !c.armed {
			if s, err = room.Take(c.fd); err != nil {
				return
			}
		}
	}
	safe := c.g.config.Kernel.Estimate(s, c.usual, &c.tracker).Safe
	if !c.armed {
		// The kernel takes a packet whole while it is writable at all, and nothing would
		// say later that there is more room.
		safe = max(safe, int(c.grain))
	}
	safe = c.g.memory.allow(c, s.Queued, safe)
	window := min(safe, 65535<<c.shift())
	// In units of the scale, so that rounding takes no edge further.
	if whole := window &^ (1<<c.shift() - 1); whole >= int(c.grain) {
		window = whole
	}
	gain := int(int32(c.rcv + uint32(window) - c.edge))
	if gain <= 0 || c.armed && gain < min(s.SendBuffer/8, maxPacket) {
		return // crumbs (RFC 9293, section 3.8.6.2.2): more comes with EPOLLOUT
	}
	c.edge += uint32(gain)
}

// shift is the scale of the window that the guest is told.
func (c *conn) shift() uint8 {
	if !c.hasScale {
		return 0
	}
	return c.g.scale
}

// writable tells whether a socket takes anything. If not, EPOLLOUT comes when it does, and
// its buffer grows if the connection could use more.
func writable(fd int) bool {
	fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
	n, err := unix.Poll(fds, 0)
	return err == nil && n > 0 && fds[0].Revents&unix.POLLOUT != 0
}

// acknowledge tells the guest what the socket has taken, and how much more it takes.
func (c *conn) acknowledge() {
	c.advance()
	c.tell()
}

// tell sends the guest the state of the other direction.
func (c *conn) tell() { a := c.segment(c.nxt, flagACK); c.transmit(&a, nil) }

// segment is one to the guest.
func (c *conn) segment(seq uint32, flags uint8) answer {
	return answer{from: c.flow.remote, to: c.flow.guest, seq: seq, ack: c.rcv, flags: flags, mss: c.mss}
}

// transmit sends a segment with what the guest is to know of the other direction. The
// payload, if any, stands behind the headers in the gateway's buffer.
func (c *conn) transmit(a *answer, payload []byte) {
	headers := a.headers()
	b := c.g.buffer[:headers+len(payload)]
	var own [maxHeaders]byte
	if payload == nil {
		b = own[:headers]
	}
	if a.flags&flagSYN == 0 {
		window := c.edge - c.rcv
		if before(c.edge, c.rcv) {
			window = 0
		}
		shift := c.shift()
		unit := uint32(1) << shift
		if (c.armed || c.more) && !c.asked && !c.shut {
			// Rounded up, the window would move the edge further by each segment, and the
			// socket has no room for that. What is too much for a whole number is
			// acknowledged with what follows, when there is room, or if it comes again.
			over := -window % unit
			a.ack, window = a.ack-over, window+over
		}
		// Rounded up, as the kernel does it (tcp_select_window): an edge is not taken back.
		told := min((window+unit-1)>>shift, 65535)
		a.window = uint16(told)
		if edge := a.ack + told<<shift; before(c.edge, edge) {
			c.edge = edge
		}
		c.asked = false
	}
	a.write(b, len(payload))
	c.g.send(b)
}

// output sends to the guest what the socket has, as far as its window goes.
func (c *conn) output() {
	if c.state != open {
		return
	}
	for range outputBudget {
		if c.finSent || c.drained {
			return
		}
		free := int(int32(c.una + c.window - c.nxt))
		// A window that opens by crumbs is let open further, while something is under way.
		if c.blocked = free <= 0 || c.una != c.nxt && free < min(int(c.mss), defaultMSS4); c.blocked {
			if c.una == c.nxt {
				c.arm() // to probe its window
			}
			return
		}
		a := c.segment(c.nxt, flagACK|flagPSH)
		headers := a.headers()
		n, err := c.peek(c.g.buffer[headers : headers+min(free, c.packet(headers))])
		switch {
		case errors.Is(err, unix.EAGAIN):
			c.drained = true
			return
		case err != nil, n == 0 && c.lost:
			c.abort()
			return
		case n == 0:
			c.finSent = true
			a.flags = flagACK | flagFIN
			c.transmit(&a, nil)
			c.nxt++
			c.arm()
			if c.broken {
				c.abort()
			}
			return
		}
		c.transmit(&a, c.g.buffer[headers:headers+n])
		idle := c.una == c.nxt
		c.nxt += uint32(n)
		if idle {
			c.arm()
		}
	}
	if !c.queued {
		c.queued = true
		c.g.ready = append(c.g.ready, c)
	}
}

// packet is the largest payload of a packet to the guest: of whole segments.
func (c *conn) packet(headers int) int {
	most := maxPacket - 1 - (headers - vnetHeader)
	return most - most%int(c.mss)
}

// peek reads what the socket has behind what was sent, and leaves it there.
func (c *conn) peek(p []byte) (int, error) {
	if c.peeks {
		return receive(c.fd, p, unix.MSG_PEEK|unix.MSG_DONTWAIT)
	}
	return receiveBehind(c.fd, c.spent+int(c.nxt-c.una), p)
}

// peekAgain reads the first of what was sent.
func (c *conn) peekAgain(p []byte, sent int) (n int, err error) {
	if !c.peeks {
		return receive(c.fd, p, unix.MSG_PEEK|unix.MSG_DONTWAIT)
	}
	if err := unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_PEEK_OFF, 0); err != nil {
		return 0, err
	}
	if n, err = receive(c.fd, p, unix.MSG_PEEK|unix.MSG_DONTWAIT); err != nil {
		return 0, err
	}
	return n, unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_PEEK_OFF, sent)
}

// discard takes what the guest has acknowledged out of the socket. It is false if that
// has less.
func (c *conn) discard() bool {
	for c.spent > 0 { // an urgent mark splits it
		n, _, errno := unix.RawSyscall6(unix.SYS_RECVFROM, uintptr(c.fd), 0, uintptr(c.spent), unix.MSG_TRUNC|unix.MSG_DONTWAIT, 0, 0)
		switch {
		case errno == unix.EINTR:
		case errno != 0 || n == 0:
			return false
		default:
			c.spent -= int(n)
		}
	}
	return true
}

// resend sends the first packet again that the guest has not acknowledged.
func (c *conn) resend() {
	c.g.count(Retransmitted)
	if c.state != open {
		c.answer()
		return
	}
	if !c.discard() {
		c.abort()
		return
	}
	sent := int(c.nxt - c.una)
	if c.finSent {
		sent--
	}
	a := c.segment(c.una, flagACK|flagPSH)
	c.again = c.nxt
	if sent == 0 {
		a.flags = flagACK | flagFIN
		c.transmit(&a, nil)
		return
	}
	headers := a.headers()
	// A guest that took back its window gets one segment, which probes it.
	n := min(sent, c.packet(headers), int(max(c.window, uint32(c.mss))))
	n, err := c.peekAgain(c.g.buffer[headers:headers+n], sent)
	if err != nil || n == 0 {
		c.abort()
		return
	}
	if c.finSent && n == sent {
		a.flags |= flagFIN
	}
	c.again = c.una + uint32(n)
	c.transmit(&a, c.g.buffer[headers:headers+n])
}

// rest sets the timer for a connection with nothing under way.
func (c *conn) rest() { c.g.timers.set(&c.timer, c.g.now.Add(idleTime)) }

// arm sets the timer for what the guest has not acknowledged, or for its window.
func (c *conn) arm() {
	wait := min(firstRTO<<min(c.tries, 16), maxRTO)
	if c.state == calling {
		wait = min(firstCall<<min(c.tries, 16), maxCall)
		wait += rand.N(wait) // not all that a short queue had no place for at once
	}
	c.g.timers.set(&c.timer, c.g.now.Add(wait))
}

// expired is called when the guest has not answered in time.
func (c *conn) expired() {
	if c.state == over {
		c.drop()
		return
	}
	// A guest that answers, but reads nothing, may take as long as it likes.
	c.tries, c.silent = min(c.tries+1, maxTries), c.silent+1
	if c.silent > c.patience() {
		c.abort()
		return
	}
	if c.state == open && c.una == c.nxt {
		// A segment from before its window has the guest answer.
		a := c.segment(c.una-1, flagACK)
		c.transmit(&a, nil)
		c.arm()
		return
	}
	c.recover, c.late = c.nxt, c.dupAcks == 0
	c.resend()
	if c.fd >= 0 {
		c.arm()
	}
}

// patience is how often the guest is asked in vain.
func (c *conn) patience() uint8 {
	switch c.state {
	case answered:
		return answerTries
	case calling:
		return callTries
	}
	return maxTries
}

// abort ends the connection at both ends, after an error of the socket or a guest that
// is gone.
func (c *conn) abort() {
	c.g.count(Reset)
	c.resetGuest()
	c.resetSocket()
	c.drop()
}

// resetGuest ends the connection at the guest, whose socket gives its memory back.
func (c *conn) resetGuest() {
	if c.state == connecting {
		return
	}
	a := c.segment(c.nxt, flagRST|flagACK)
	if c.state == calling {
		a.flags = flagRST
	}
	c.transmit(&a, nil)
}

// abandon ends the connection after the guest's RST. What it sent before goes first.
func (c *conn) abandon() {
	if c.push(); c.fd < 0 {
		return
	}
	c.g.count(Reset)
	c.resetSocket()
	c.drop()
}

// resetSocket has the host's peer get an RST when the socket is closed.
func (c *conn) resetSocket() { resetOnClose(c.fd) }

func resetOnClose(fd int) {
	_ = unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
}

// release gives back what the connection holds of the host.
func (c *conn) release() {
	c.g.memory.forget(c)
	c.discard() // what is left there would be answered with an RST
	c.g.forget(c.fd)
	c.unhold()
	c.unspill()
	c.fd = -1
	if c.ours {
		c.g.outgoing--
	}
}

// drop forgets the connection.
func (c *conn) drop() {
	c.g.timers.stop(&c.timer)
	delete(c.g.conns, c.flow)
	if c.fd >= 0 {
		c.release()
	}
}

// listener accepts connections for the guest.
type listener struct {
	g *Gateway
	Forward
	timer timer
}

const (
	// acceptBudget is how many connections are accepted in a turn.
	acceptBudget = 64
	// acceptPause is how long nobody is accepted after the host had no descriptor or
	// memory for one. They wait in the backlog.
	acceptPause = 100 * time.Millisecond
)

func (l *listener) event(uint32) {
	for range acceptBudget {
		fd, peer, err := unix.Accept4(l.FD, unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
		switch {
		case err == nil:
			l.accepted(fd, peer)
		case errors.Is(err, unix.EAGAIN):
			return
		case errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE), errors.Is(err, unix.ENOBUFS), errors.Is(err, unix.ENOMEM),
			errors.Is(err, unix.EINVAL):
			if noDescriptor(err) && l.g.spare() {
				continue
			}
			l.g.count(TooMany)
			l.watch(0)
			l.timer.owner = l
			l.g.timers.set(&l.timer, l.g.now.Add(acceptPause))
			return
		}
		// All other errors are of the connection (accept(2)).
	}
}

// expired ends a pause.
func (l *listener) expired() { l.watch(unix.EPOLLIN) }

func (l *listener) watch(events uint32) {
	// That fails for a descriptor only that is not registered.
	_ = l.g.watch(unix.EPOLL_CTL_MOD, l.FD, events)
}

// aliasPorts is how many ports are tried for a connection of the host itself.
const aliasPorts = 64

func (l *listener) accepted(fd int, peer unix.Sockaddr) {
	from, ok := addrPort(peer)
	remote := l.g.seen(from)
	guest := l.g.guest(remote.Addr())
	f := flow{netip.AddrPortFrom(guest, l.Port), remote}
	if remote != from {
		// Several addresses have become one.
		for i := 1; i < aliasPorts && l.g.conns[f] != nil; i++ {
			f.remote = withPort(remote, max(remote.Port()+uint16(i), 1))
		}
	}
	if c := l.g.conns[f]; c != nil && c.state == over {
		c.drop()
	}
	if !ok || !guest.IsValid() || len(l.g.conns) >= l.g.config.Connections || l.g.conns[f] != nil {
		l.g.count(TooMany)
		resetOnClose(fd)
		unix.Close(fd)
		return
	}
	c := l.g.newConn(f, fd, calling)
	if c == nil {
		return
	}
	c.nxt = c.una + 1
	c.hasScale = true // unless the guest has none
	c.answer()
}

// sendTo is send(2), which neither waits nor raises SIGPIPE.
func sendTo(fd int, p []byte) (int, error) {
	return direct(unix.SYS_SENDTO, fd, p, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
}

// sendNamed is sendto(2), which neither waits nor raises SIGPIPE; without a name, to where the socket is connected.
func sendNamed(fd int, p, name []byte) error {
	for {
		_, _, errno := unix.RawSyscall6(unix.SYS_SENDTO, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(p))), uintptr(len(p)),
			unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL, uintptr(unsafe.Pointer(unsafe.SliceData(name))), uintptr(len(name)))
		switch errno {
		case 0:
			return nil
		case unix.EINTR:
		default:
			return errno
		}
	}
}

// receive is recv(2). The flags have MSG_DONTWAIT.
func receive(fd int, p []byte, flags int) (int, error) {
	return direct(unix.SYS_RECVFROM, fd, p, flags)
}

// direct is a system call that does not wait, so that the Go runtime need not know of it.
func direct(trap uintptr, fd int, p []byte, flags int) (int, error) {
	for {
		n, _, errno := unix.RawSyscall6(trap, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(p))), uintptr(len(p)), uintptr(flags), 0, 0)
		switch errno {
		case 0:
			return int(n), nil
		case unix.EINTR:
		default:
			return 0, errno
		}
	}
}
