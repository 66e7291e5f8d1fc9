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
	leastMSS    = 88  // that Linux takes (TCP_MIN_MSS)
	defaultMSS4 = 536 // RFC 9293, section 3.7.1
	defaultMSS6 = 1220
)

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

// opened: the guest has acknowledged the SYN.
func (c *conn) opened(s *segment) {
	c.state = open
	c.una, c.recover = s.ack, s.ack
	c.tries, c.silent = 0, 0
	c.heard = c.g.now
	c.rest()
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
