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
	minMSS      = 88  // that Linux takes (TCP_MIN_MSS)
	defaultMSS4 = 536 // RFC 9293, section 3.7.1
	defaultMSS6 = 1220
)

// acceptSYN has the host connect to where the guest wants to. The guest gets its answer
// when it is known.
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
		g.warn(warnRefused, "too many TCP connections: more are refused", "most", g.config.Outgoing)
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
		g.unreachable(s, noNetwork) // nobody has refused it
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

// refuseSYN tells the guest why its SYN leads nowhere.
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
		// As a network that answers nothing: the guest has its own patience.
	default:
		g.sendReset(s)
	}
}

// acceptSYN starts a connection from the guest's SYN.
func (c *conn) acceptSYN(s *segment) {
	c.takeOptions(s)
	c.rcv.nxt = s.seq + 1
	c.rcv.edge = c.rcv.nxt
}

// takeOptions takes the options of the guest's SYN.
func (c *conn) takeOptions(s *segment) {
	if s.options.mss != 0 {
		c.snd.mss = max(s.options.mss, minMSS)
	}
	c.snd.mss = min(c.snd.mss, c.g.mss(c.flow.guest.Addr()))
	c.snd.windShift, c.windowScaling = s.options.windShift, s.options.windowScaling
	c.snd.wnd = uint32(s.window) // that of a SYN is not scaled
	c.snd.wl1 = s.seq
}

// mss is the largest segment that the guest's interface carries.
func (g *Gateway) mss(a netip.Addr) uint16 {
	headers := ipv4Header + tcpHeader
	if a.Is6() {
		headers = ipv6Header + tcpHeader
	}
	return uint16(g.config.MTU - headers)
}

// chooseMSS decides the MSS that the guest is told. Its kernel waits until a window takes a
// whole segment, and the room of a socket grows by segments of the host's path, beginning
// with a third of its buffer: larger ones would make it wait for what does not come. What
// is no multiple of these leaves a small one behind each packet.
func (c *conn) chooseMSS() {
	c.rcv.mss = c.g.mss(c.flow.guest.Addr())
	if s, err := room.Take(c.fd); err == nil && s.MSS > 0 {
		grain := min(int(c.rcv.mss), max(s.SendBuffer/8, s.MSS))
		if grain > s.MSS {
			grain -= grain % s.MSS
		}
		c.rcv.mss = uint16(grain)
	}
}

// connected answers the guest, now that the host's socket is connected or has failed.
func (c *conn) connected() {
	if code, err := unix.GetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_ERROR); err != nil || code != 0 {
		s := segment{from: c.flow.guest, to: c.flow.remote, flags: flagSYN, seq: c.rcv.nxt - 1, protocol: unix.IPPROTO_TCP}
		var short [ipv6Header + 8]byte
		s.network = syntheticSYN(short[:], &s)
		c.remove()
		c.g.refuseSYN(&s, syscall.Errno(code))
		return
	}
	if _, err := unix.Getpeername(c.fd); err != nil {
		return // not yet
	}
	c.state = synReceived
	c.snd.nxt = c.snd.una + 1
	c.sendSYN()
}

// sendSYN sends the SYN-ACK of a connection that the guest opens, or the SYN of one
// that the host has accepted.
func (c *conn) sendSYN() {
	c.chooseMSS()
	c.advanceWindow()
	a := outSegment{
		from: c.flow.remote, to: c.flow.guest, seq: c.snd.una, flags: flagSYN, mss: c.rcv.mss, windShift: c.g.windShift, windowScaling: c.windowScaling,
		window: uint16(min(c.rcv.edge-c.rcv.nxt, 65535)), // not scaled
	}
	if c.state == synReceived {
		a.flags |= flagACK
		a.ack = c.rcv.nxt
	}
	c.rcv.edge = c.rcv.nxt + uint32(a.window)
	c.transmit(&a, nil)
	c.startRetransmitTimer()
}

// establish: the guest has acknowledged the SYN.
func (c *conn) establish(s *segment) {
	c.state = established
	c.snd.una, c.rtx.recover = s.ack, s.ack
	c.rtx.backoff, c.rtx.unanswered = 0, 0
	c.alive.lastHeard = c.g.now
	c.startIdleTimer()
}

// synSentArrives takes the guest's answer to a SYN.
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
		told := c.rcv.edge - c.rcv.nxt
		c.takeOptions(s)
		c.rcv.nxt = s.seq + 1
		c.rcv.edge = c.rcv.nxt + told
		c.establish(s)
		c.acknowledge()
		c.output()
	}
}
