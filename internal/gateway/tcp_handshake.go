// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"bytes"
	"errors"
	"net/netip"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/gateway/packet"
	"sockeye/internal/sockaddr"
	"sockeye/room"
)

const (
	minMSS      = 88  // TCP_MIN_MSS of Linux, bytes
	defaultMSS4 = 536 // RFC 9293, section 3.7.1
	defaultMSS6 = 1220
)

const (
	// connectBudget is the time that a turn spends on opening connections, twice: for SYNs that arrive, and for deferred ones. If few ports
	// of the host are free, connect(2) searches one for more than a millisecond, and the packets of other flows wait.
	connectBudget = time.Millisecond
	// maxDeferredSYNs bounds the deferred SYNs. The guest sends others again.
	maxDeferredSYNs = 4096
)

// acceptSYN opens a connection for the guest's SYN, or defers the SYN to a later turn if this one has spent its time.
func (g *Gateway) acceptSYN(f endpoints, s *packet.Segment) {
	switch {
	case len(g.deferredSYNs) == 0 && g.connecting < connectBudget:
		g.openConnection(f, s)
	case len(g.deferredSYNs) < maxDeferredSYNs:
		g.deferredSYNs = append(g.deferredSYNs, bytes.Clone(s.Network))
	default:
		g.count(TooMany)
	}
}

// resumeSYNs opens connections for deferred SYNs.
func (g *Gateway) resumeSYNs() {
	for g.connecting = 0; len(g.deferredSYNs) > 0 && g.connecting < connectBudget; g.deferredSYNs = g.deferredSYNs[1:] {
		s, ok := packet.Parse(g.deferredSYNs[0])
		f := endpoints{s.From, s.To}
		if ok && g.conns[f] == nil { // a SYN that the guest has sent again may be in the queue twice
			g.openConnection(f, &s)
		}
	}
	if len(g.deferredSYNs) == 0 {
		g.deferredSYNs = nil
	}
}

// openConnection starts a connection to the destination of the guest's SYN. checkConnect replies to the guest when connect(2) has
// succeeded or failed.
func (g *Gateway) openConnection(f endpoints, s *packet.Segment) {
	begin := g.clock()
	defer func() { g.connecting += g.clock().Sub(begin) }()
	if !g.config.Outbound.Allowed(unix.IPPROTO_TCP, f.remote) {
		g.count(NotAllowed)
		g.sendICMPError(s, prohibited)
		return
	}
	if len(g.conns) >= g.config.Connections {
		g.count(TooMany)
		g.sendReset(s)
		return
	}
	if g.outgoing >= g.config.Outgoing {
		g.count(TooMany)
		g.warn(warnRefused, "too many TCP connections: new connections are refused", "limit", g.config.Outgoing)
		g.sendReset(s)
		return
	}
	to := g.config.Outbound.Translate(f.remote)
	fd, err := g.openSocket(to.Addr(), unix.SOCK_STREAM, 0)
	switch {
	case errors.Is(err, unix.EAFNOSUPPORT):
		g.refuseSYN(s, err)
		return
	case err != nil:
		g.count(TooMany)
		g.sendICMPError(s, noNetwork) // not a RST: the destination has not refused the connection
		return
	}
	if err := unix.Connect(fd, sockaddr.Of(to)); err != nil && !errors.Is(err, unix.EINPROGRESS) {
		unix.Close(fd)
		g.refuseSYN(s, err)
		return
	}
	if c := g.newConn(f, fd, synPending); c != nil {
		c.outgoing = true
		g.outgoing++
		c.initFromSYN(s)
	}
}

// initFromSYN initializes the receive side and the options from the guest's SYN.
func (c *conn) initFromSYN(s *packet.Segment) {
	c.setOptions(s)
	c.rcv.irs = s.Seq
	c.rcv.nxt = s.Seq + 1
	c.rcv.adv = c.rcv.nxt
}

// checkConnect replies to the guest's SYN when connect(2) of the host's socket has succeeded or failed.
func (c *conn) checkConnect() {
	if s, err := room.ReadSnapshot(c.fd); err == nil && !s.Closed {
		c.sendSYNACK(s)
		return
	}
	if code, err := unix.GetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_ERROR); err != nil || code != 0 {
		s := packet.Segment{From: c.endpoints.guest, To: c.endpoints.remote, Flags: packet.SYN, Seq: c.rcv.irs, Protocol: unix.IPPROTO_TCP}
		var short [packet.IPv6Header + 8]byte
		s.Network = packet.SyntheticSYN(short[:], &s)
		c.remove()
		c.g.refuseSYN(&s, syscall.Errno(code))
		return
	}
	if _, err := unix.Getpeername(c.fd); err != nil {
		return // in progress
	}
	c.sendSYNACK(room.Snapshot{})
}

// refuseSYN replies to a SYN with the RST or ICMP error that corresponds to an error of connect(2).
func (g *Gateway) refuseSYN(s *packet.Segment, err error) {
	g.count(Refused)
	switch {
	case errors.Is(err, unix.EHOSTUNREACH), errors.Is(err, unix.EHOSTDOWN):
		g.sendICMPError(s, noHost)
	case errors.Is(err, unix.ENETUNREACH), errors.Is(err, unix.EADDRNOTAVAIL), errors.Is(err, unix.EAFNOSUPPORT):
		g.sendICMPError(s, noNetwork)
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		g.sendICMPError(s, prohibited)
	case errors.Is(err, unix.ETIMEDOUT):
		// No reply: the guest's connect(2) times out itself.
	default:
		g.sendReset(s)
	}
}

// sendSYNACK sends the SYN-ACK of a connection that the guest opens, and enters SYN-RECEIVED.
func (c *conn) sendSYNACK(s room.Snapshot) {
	c.state = synReceived
	c.snd.nxt = c.snd.iss + 1
	c.sendSYN(s)
}

// resendSYN sends the SYN-ACK or the SYN again.
func (c *conn) resendSYN() {
	s, _ := room.ReadSnapshot(c.fd) // the SYN advertises a whole segment if there is no snapshot
	c.sendSYN(s)
}

// sendSYN sends the SYN-ACK of a connection that the guest opens, or the SYN of a connection that the host accepted, with a window
// for a snapshot of the host's socket.
func (c *conn) sendSYN(s room.Snapshot) {
	c.chooseMSS(s)
	c.advanceWindowTo(s)
	a := packet.Outgoing{
		From: c.endpoints.remote, To: c.endpoints.guest, Seq: c.snd.iss, Flags: packet.SYN, MSS: c.rcv.mss, WindShift: c.g.windShift, WindowScaling: c.windowScaling,
		Window: uint16(min(c.rcv.wnd(), 65535)), // not scaled
	}
	if c.state == synReceived {
		a.Flags |= packet.ACK
		a.Ack = c.rcv.nxt
	}
	c.rcv.adv = c.rcv.nxt + uint32(a.Window)
	c.transmit(&a, nil)
	c.startRetransmitTimer()
}

// chooseMSS chooses the MSS option for the guest. The guest's kernel waits for a window of a whole segment, but the free
// space of the host's socket grows by segments of the path's MSS, at first to a third of the send buffer: the guest could
// wait forever for the space of a larger segment. A multiple of the path's MSS avoids a small last segment per write.
func (c *conn) chooseMSS(s room.Snapshot) {
	c.rcv.mss = c.g.mss(c.endpoints.guest.Addr())
	if s.MSS > 0 {
		mss := min(int(c.rcv.mss), max(s.SendBuffer/8, s.MSS))
		if mss > s.MSS {
			mss -= mss % s.MSS
		}
		c.rcv.mss = uint16(mss)
	}
}

// synSentArrives processes a segment in SYN-SENT (RFC 9293, section 3.10.7.3).
func (c *conn) synSentArrives(s *packet.Segment) {
	if s.Flags&packet.ACK != 0 && s.Ack != c.snd.nxt {
		if s.Flags&packet.RST == 0 {
			c.g.sendReset(s)
		}
		return
	}
	switch {
	case s.Flags&(packet.RST|packet.ACK) == packet.RST|packet.ACK:
		c.g.count(Refused)
		resetOnClose(c.fd)
		c.remove()
	case s.Flags&(packet.SYN|packet.ACK|packet.RST) == packet.SYN|packet.ACK:
		advertised := c.rcv.wnd()
		c.setOptions(s)
		c.rcv.irs = s.Seq
		c.rcv.nxt = s.Seq + 1
		c.rcv.adv = c.rcv.nxt + advertised
		c.establish(s)
		c.acknowledge()
		c.output()
	}
}

// setOptions applies the options and the window of the guest's SYN or SYN-ACK.
func (c *conn) setOptions(s *packet.Segment) {
	if s.Options.MSS != 0 {
		c.snd.mss = max(s.Options.MSS, minMSS)
	}
	c.snd.mss = min(c.snd.mss, c.g.mss(c.endpoints.guest.Addr()))
	c.snd.windShift, c.windowScaling = s.Options.WindShift, s.Options.WindowScaling
	c.snd.wnd = uint32(s.Window) // not scaled in a SYN (RFC 7323, section 2.2)
	c.snd.wl1 = s.Seq
}

// mss returns the largest TCP payload that fits the MTU of the guest's interface, in bytes.
func (g *Gateway) mss(a netip.Addr) uint16 {
	headers := packet.IPv4Header + packet.TCPHeader
	if a.Is6() {
		headers = packet.IPv6Header + packet.TCPHeader
	}
	return uint16(g.config.MTU - headers)
}

// establish processes the guest's acknowledgement of the SYN.
func (c *conn) establish(s *packet.Segment) {
	c.state = established
	c.snd.una, c.rtx.recover = s.Ack, s.Ack
	c.rtx.backoff, c.rtx.timeouts = 0, 0
	c.keepalive.lastReceived = c.g.now
	c.startIdleTimer()
}
