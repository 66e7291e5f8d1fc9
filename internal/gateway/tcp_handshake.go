// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"errors"
	"net/netip"
	"syscall"

	"golang.org/x/sys/unix"

	"sockeye/room"
)

const (
	minMSS      = 88  // TCP_MIN_MSS of Linux, bytes
	defaultMSS4 = 536 // RFC 9293, section 3.7.1
	defaultMSS6 = 1220
)

// acceptSYN starts a connection to the destination of the guest's SYN. connected replies to the guest when connect(2) has
// succeeded or failed.
func (g *Gateway) acceptSYN(f flow, s *segment) {
	if !g.config.Outbound.Allowed(unix.IPPROTO_TCP, f.remote) {
		g.count(NotAllowed)
		g.unreachable(s, prohibited)
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
		g.unreachable(s, noNetwork) // not a RST: the destination has not refused the connection
		return
	}
	if err := unix.Connect(fd, sockaddr(to)); err != nil && !errors.Is(err, unix.EINPROGRESS) {
		unix.Close(fd)
		g.refuseSYN(s, err)
		return
	}
	if c := g.newConn(f, fd, synPending); c != nil {
		c.outgoing = true
		g.outgoing++
		c.acceptSYN(s)
	}
}

// refuseSYN replies to a SYN with the RST or ICMP error that corresponds to an error of connect(2).
func (g *Gateway) refuseSYN(s *segment, err error) {
	g.count(Refused)
	switch {
	case errors.Is(err, unix.EHOSTUNREACH), errors.Is(err, unix.EHOSTDOWN):
		g.unreachable(s, noHost)
	case errors.Is(err, unix.ENETUNREACH), errors.Is(err, unix.EADDRNOTAVAIL), errors.Is(err, unix.EAFNOSUPPORT):
		g.unreachable(s, noNetwork)
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		g.unreachable(s, prohibited)
	case errors.Is(err, unix.ETIMEDOUT):
		// No reply: the guest's connect(2) times out itself.
	default:
		g.sendReset(s)
	}
}

// acceptSYN initializes the receive side and the options from the guest's SYN.
func (c *conn) acceptSYN(s *segment) {
	c.setOptions(s)
	c.rcv.irs = s.seq
	c.rcv.nxt = s.seq + 1
	c.rcv.adv = c.rcv.nxt
}

// setOptions applies the options and the window of the guest's SYN or SYN-ACK.
func (c *conn) setOptions(s *segment) {
	if s.options.mss != 0 {
		c.snd.mss = max(s.options.mss, minMSS)
	}
	c.snd.mss = min(c.snd.mss, c.g.mss(c.flow.guest.Addr()))
	c.snd.windShift, c.windowScaling = s.options.windShift, s.options.windowScaling
	c.snd.wnd = uint32(s.window) // not scaled in a SYN (RFC 7323, section 2.2)
	c.snd.wl1 = s.seq
}

// mss returns the largest TCP payload that fits the MTU of the guest's interface, in bytes.
func (g *Gateway) mss(a netip.Addr) uint16 {
	headers := ipv4Header + tcpHeader
	if a.Is6() {
		headers = ipv6Header + tcpHeader
	}
	return uint16(g.config.MTU - headers)
}

// chooseMSS chooses the MSS option for the guest. The guest's kernel waits for a window of a whole segment, but the free
// space of the host's socket grows by segments of the path's MSS, at first to a third of the send buffer: the guest could
// wait forever for the space of a larger segment. A multiple of the path's MSS avoids a small last segment per write.
func (c *conn) chooseMSS(s room.Snapshot) {
	c.rcv.mss = c.g.mss(c.flow.guest.Addr())
	if s.MSS > 0 {
		mss := min(int(c.rcv.mss), max(s.SendBuffer/8, s.MSS))
		if mss > s.MSS {
			mss -= mss % s.MSS
		}
		c.rcv.mss = uint16(mss)
	}
}

// connected replies to the guest's SYN when connect(2) of the host's socket has succeeded or failed.
func (c *conn) connected() {
	if s, err := room.ReadSnapshot(c.fd); err == nil && !s.Closed {
		c.acceptedByHost(s)
		return
	}
	if code, err := unix.GetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_ERROR); err != nil || code != 0 {
		s := segment{from: c.flow.guest, to: c.flow.remote, flags: flagSYN, seq: c.rcv.irs, protocol: unix.IPPROTO_TCP}
		var short [ipv6Header + 8]byte
		s.network = syntheticSYN(short[:], &s)
		c.remove()
		c.g.refuseSYN(&s, syscall.Errno(code))
		return
	}
	if _, err := unix.Getpeername(c.fd); err != nil {
		return // in progress
	}
	c.acceptedByHost(room.Snapshot{})
}

// acceptedByHost sends the SYN-ACK of a connection that the guest opens.
func (c *conn) acceptedByHost(s room.Snapshot) {
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
	a := outSegment{
		from: c.flow.remote, to: c.flow.guest, seq: c.snd.iss, flags: flagSYN, mss: c.rcv.mss, windShift: c.g.windShift, windowScaling: c.windowScaling,
		window: uint16(min(c.rcv.wnd(), 65535)), // not scaled
	}
	if c.state == synReceived {
		a.flags |= flagACK
		a.ack = c.rcv.nxt
	}
	c.rcv.adv = c.rcv.nxt + uint32(a.window)
	c.transmit(&a, nil)
	c.startRetransmitTimer()
}

// establish processes the guest's acknowledgement of the SYN.
func (c *conn) establish(s *segment) {
	c.state = established
	c.snd.una, c.rtx.recover = s.ack, s.ack
	c.rtx.backoff, c.rtx.timeouts = 0, 0
	c.keepalive.lastReceived = c.g.now
	c.startIdleTimer()
}

// synSentArrives processes a segment in SYN-SENT (RFC 9293, section 3.10.7.3).
func (c *conn) synSentArrives(s *segment) {
	if s.flags&flagACK != 0 && s.ack != c.snd.nxt {
		if s.flags&flagRST == 0 {
			c.g.sendReset(s)
		}
		return
	}
	switch {
	case s.flags&(flagRST|flagACK) == flagRST|flagACK:
		c.g.count(Refused)
		c.resetHost()
		c.remove()
	case s.flags&(flagSYN|flagACK|flagRST) == flagSYN|flagACK:
		advertised := c.rcv.wnd()
		c.setOptions(s)
		c.rcv.irs = s.seq
		c.rcv.nxt = s.seq + 1
		c.rcv.adv = c.rcv.nxt + advertised
		c.establish(s)
		c.acknowledge()
		c.output()
	}
}
