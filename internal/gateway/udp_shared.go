// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"errors"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"sockeye/internal/gateway/access"
)

// maxConnectedFlows is the maximum number of flows with connected sockets per port of the guest. Connected sockets are faster,
// because the kernel looks up the route once. Clients have few flows per port; pollers and scanners have many.
const maxConnectedFlows = 8

const (
	// sharedSendBuffer is the requested send buffer of a shared socket, bytes.
	sharedSendBuffer = 4 << 20
	// replyTruesize is the kernel memory of a received datagram of 1400 bytes, in bytes.
	replyTruesize = 2304
)

// sharedSocket is an unconnected socket of the host that several flows of one port of the guest share. The number of flows is
// limited so that the receive buffer has space if all peers reply simultaneously. Datagrams from other addresses are dropped, as by
// a connected socket (RFC 4787, section 5: address and port-dependent filtering).
type sharedSocket struct {
	g      *Gateway
	guest  netip.AddrPort
	fd     int
	hops   hopLimit
	byPeer map[netip.AddrPort]*udpFlow // by the destination on the host's side, the source of replies
	limit  int                         // maximum number of flows
}

// source counts the sockets of an address and port of the guest. Flows that must not share a socket are not counted.
type source struct {
	connected int             // flows with connected sockets
	shared    int             // shared sockets
	free      []*sharedSocket // shared sockets below their limit of flows
}

// sharable returns whether the flow may share a socket. DNS queries may not: the source port protects against forged replies.
func (u *udpFlow) sharable() bool {
	return u.class != classDNS && u.endpoints.remote.Port() != access.DNSPort
}

// sharedFor returns the shared socket for a flow; nil if the flow gets a connected socket.
func (g *Gateway) sharedFor(u *udpFlow, to netip.AddrPort) (*sharedSocket, error) {
	from := g.flows.sources[u.endpoints.guest]
	if !u.sharable() || from == nil || from.connected < maxConnectedFlows {
		return nil, nil
	}
	if g.flows.shared.n >= maxSharing {
		g.evictAndWarn(g.flows.shared.victim(), "UDP flows that share sockets", maxSharing)
	}
	if n := len(from.free); n > 0 {
		s := from.free[n-1]
		if s.byPeer[to] != nil {
			return nil, nil // two destinations of the guest are one on the host's side: replies would be ambiguous
		}
		return s, nil
	}
	if g.flows.sockets >= g.config.Outgoing/sharedDivisor {
		return nil, nil
	}
	return g.openShared(u.endpoints.guest)
}

// openShared opens a shared socket for a port of the guest. The first datagram binds the socket to a port.
func (g *Gateway) openShared(guest netip.AddrPort) (*sharedSocket, error) {
	g.evictForSocket()
	fd, err := g.openSocket(guest.Addr(), unix.SOCK_DGRAM, 0)
	if err != nil {
		return nil, err
	}
	s := &sharedSocket{g: g, guest: guest, fd: fd, byPeer: map[netip.AddrPort]*udpFlow{}}
	if err := s.prepare(); err != nil {
		unix.Close(fd)
		return nil, err
	}
	from := g.flows.source(guest)
	from.free = append(from.free, s)
	from.shared++
	g.flows.sockets++
	return s, nil
}

// source returns the entry of an address and port of the guest, adding it if necessary.
func (l *udpFlows) source(guest netip.AddrPort) *source {
	from := l.sources[guest]
	if from == nil {
		from = &source{}
		l.sources[guest] = from
	}
	return from
}

// prepare sets the options of the socket and registers it.
func (s *sharedSocket) prepare() error {
	if s.guest.Addr().Is6() {
		if err := unix.SetsockoptInt(s.fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1); err != nil {
			return err
		}
	}
	if err := enableErrorQueue(s.fd, s.guest.Addr()); err != nil {
		return err
	}
	growReceiveBuffer(s.fd)
	_ = unix.SetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_SNDBUF, sharedSendBuffer) // bounded by net.core.wmem_max
	buffer, err := unix.GetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_RCVBUF)
	if err != nil {
		return err
	}
	s.limit = max(buffer/replyTruesize, 1)
	return s.g.register(s.fd, unix.EPOLLIN, s)
}

// join adds a flow to the socket, which must be the last in its source's free list.
func (s *sharedSocket) join(u *udpFlow, to netip.AddrPort) {
	u.shared, u.fd, u.destination = s, s.fd, messageTo(to.Addr().Is6(), to)
	s.byPeer[to] = u
	if len(s.byPeer) == s.limit {
		from := s.g.flows.sources[s.guest]
		from.free = from.free[:len(from.free)-1]
	}
}

// remove removes a flow from the socket, and closes the socket after the last flow.
func (s *sharedSocket) remove(u *udpFlow) {
	l := &s.g.flows
	from := l.sources[s.guest]
	if len(s.byPeer) == s.limit {
		from.free = append(from.free, s)
	}
	delete(s.byPeer, s.g.config.Outbound.Translate(u.endpoints.remote))
	if len(s.byPeer) > 0 {
		return
	}
	i := slices.Index(from.free, s)
	from.free = slices.Delete(from.free, i, i+1)
	from.shared--
	l.sockets--
	l.removeUnused(s.guest)
	s.g.closeFD(s.fd)
}

// removeUnused removes the entry of a source without sockets.
func (l *udpFlows) removeUnused(guest netip.AddrPort) {
	if from := l.sources[guest]; from.connected+from.shared == 0 {
		delete(l.sources, guest)
	}
}

func (s *sharedSocket) event(events uint32) {
	if events&unix.EPOLLERR != 0 {
		s.forwardErrors()
	}
	in := s.g.received
	for range udpBudget / receiveBatchSize {
		n, err := in.read(s.fd, receiveBatchSize)
		if err != nil && (errors.Is(err, unix.EAGAIN) || !s.forwardErrors()) {
			return
		}
		for i := range n {
			u := s.byPeer[in.peer(i)]
			if u == nil {
				s.g.count(Unsolicited)
				continue
			}
			s.g.flows.touch(u, s.g.now, true)
			s.g.deliver(in.buffers[i], u.endpoints, int(in.messages[i].Len))
		}
		if n < receiveBatchSize {
			return
		}
	}
}

// forwardErrors forwards the pending ICMP errors of the socket to its flows. It returns false if there were none.
func (s *sharedSocket) forwardErrors() bool {
	return s.g.forwardErrors(s.fd, unix.IPPROTO_UDP, func(to netip.AddrPort) (f endpoints, ok bool) {
		u := s.byPeer[to]
		if u == nil {
			return f, false // the flow was removed
		}
		s.g.flows.touch(u, s.g.now, false)
		return u.endpoints, true
	})
}
