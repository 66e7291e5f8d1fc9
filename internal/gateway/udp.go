// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/gateway/access"
	"sockeye/internal/gateway/timer"
)

const (
	// udpIdle is after which idle time a flow is forgotten (RFC 4787, REQ-5: at least two minutes, except for well-known ports).
	udpIdle = 3 * time.Minute
	// dnsIdle is the same for queries to name servers, each of which is a flow.
	dnsIdle   = 20 * time.Second
	udpBudget = 64 // datagrams that are read from a socket in a turn
)

// udpFlow is the datagrams between a port of the guest and a destination that the guest sent to first.
type udpFlow struct {
	g         *Gateway
	addresses flow
	fd        int
	hops      hopLimit // of a socket of its own
	// shared is the socket that the flow shares with others; nil: it has one of its own. destination is a struct sockaddr for a
	// shared socket.
	shared      *sharedSocket
	destination []byte
	noGSO       bool // UDP_SEGMENT fails for the flow's datagrams
	lastUsed    time.Time
	timer       timer.Timer
	// Links of the flow in flowLRU.
	class        class
	older, newer *udpFlow
}

// udpArrives processes a datagram of the guest.
func (g *Gateway) udpArrives(s *segment) {
	if b, k := g.bound.forReply(s, g.now); b != nil {
		// If the guest may not send there by itself, only datagrams of the peer refresh the peer: its address may be forged.
		if g.now.Sub(k.lastSeen) > udpIdle/2 && g.config.Outbound.Allowed(unix.IPPROTO_UDP, s.to) {
			k.lastSeen = g.now
		}
		b.send(s, k)
		return
	}
	f := flow{s.from, s.to}
	u := g.flows.all[f]
	if u == nil {
		if !g.config.Outbound.Allowed(unix.IPPROTO_UDP, s.to) {
			g.count(NotAllowed)
			g.unreachable(s, prohibited)
			return
		}
		if b := g.bound.forSource(s, g.config.Outbound.Translate(s.to)); b != nil {
			b.send(s, b.remember(s.to, messageTo(b.v6, s.to), nil))
			return
		}
		if u = g.newUDP(f, s); u == nil {
			return
		}
	} else {
		g.flows.used(u, g.now, true)
	}
	g.gso.add(u, s)
}

func (g *Gateway) newUDP(f flow, s *segment) *udpFlow {
	c := passing
	if g.config.Outbound.NameServer(f.remote.Addr()) != nil {
		c = naming
	}
	if c == passing {
		begin := g.clock()
		if !g.openingTime.allows(begin) {
			g.count(TooMany)
			g.warn(warnOpening, "too many new UDP flows: datagrams to other places are dropped, so that the rest goes on")
			return nil
		}
		defer func() { g.openingTime.spend(g.clock().Sub(begin)) }()
	}
	u := &udpFlow{g: g, addresses: f, lastUsed: g.now, class: c}
	to := g.config.Outbound.Translate(f.remote)
	shared, err := g.sharedFor(u, to)
	switch {
	case err != nil:
		g.count(TooMany)
		return nil
	case shared != nil:
		shared.join(u, to)
	case !g.connectFlow(u, to, s):
		return nil
	}
	g.flows.add(u)
	u.timer.Owner = u
	g.timers.Set(&u.timer, g.now.Add(u.idle()))
	return u
}

// connectFlow opens a connected socket for a flow.
func (g *Gateway) connectFlow(u *udpFlow, to netip.AddrPort, s *segment) bool {
	g.makeRoomForFlow(u.class)
	fd, err := g.openSocket(to.Addr(), unix.SOCK_DGRAM, 0)
	if err != nil {
		g.count(TooMany)
		return false
	}
	if err := connectTold(fd, to); err != nil {
		unix.Close(fd)
		if errors.Is(err, unix.EAGAIN) {
			g.count(TooMany) // the host has no free port
		}
		g.refuseDatagram(s, err)
		return false
	}
	if err := g.register(fd, unix.EPOLLIN, u); err != nil {
		unix.Close(fd)
		g.count(TooMany)
		return false
	}
	u.fd = fd
	return true
}

func (u *udpFlow) idle() time.Duration {
	if u.addresses.remote.Port() == access.DNSPort {
		return dnsIdle
	}
	return udpIdle
}

// connectTold connects a socket whose error queue gets the ICMP errors of the socket's datagrams.
func connectTold(fd int, to netip.AddrPort) error {
	if err := askErrors(fd, to.Addr()); err != nil {
		return err
	}
	return unix.Connect(fd, sockaddr(to))
}

// askErrors enables the error queue of a socket that sends to addresses of one family (IP_RECVERR, IPV6_RECVERR).
func askErrors(fd int, to netip.Addr) error {
	level, option := unix.IPPROTO_IP, unix.IP_RECVERR
	if to.Is6() {
		level, option = unix.IPPROTO_IPV6, unix.IPV6_RECVERR
	}
	return unix.SetsockoptInt(fd, level, option, 1)
}

// hopLimit is the TTL or hop limit that was set on a socket; 0: the host's default.
type hopLimit uint8

// set sets the hop limit of the guest's datagram on the socket, as traceroute(8) needs. The guest's default becomes the host's
// default.
func (h *hopLimit) set(fd int, s *segment) {
	limit := s.hops()
	if limit == hops {
		limit = 0
	}
	if hopLimit(limit) == *h {
		return
	}
	*h = hopLimit(limit)
	value := int(limit)
	if limit == 0 {
		value = -1 // the default
	}
	level, option := unix.IPPROTO_IP, unix.IP_TTL
	if family, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN); err == nil && family == unix.AF_INET6 {
		level, option = unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS
	}
	_ = unix.SetsockoptInt(fd, level, option, value) // an error leaves the datagram with another hop limit
}

// hops returns the TTL or hop limit.
func (s *segment) hops() uint8 {
	if s.network[0]>>4 == 4 {
		return s.network[8]
	}
	return s.network[7]
}

// refuseDatagram answers a datagram that the host's socket did not send with the ICMP error for the socket's errno.
func (g *Gateway) refuseDatagram(s *segment, err error) {
	if why, ok := failureOf(err); ok {
		g.unreachable(s, why)
	}
}

func (u *udpFlow) event(events uint32) {
	u.g.flows.used(u, u.g.now, false)
	if events&unix.EPOLLERR != 0 {
		u.passErrors()
	}
	for range udpBudget / receiveBatchSize {
		n, err := u.g.inbox.read(u.fd, receiveBatchSize)
		if err != nil && (errors.Is(err, unix.EAGAIN) || !u.passErrors()) {
			return
		}
		u.g.flows.used(u, u.g.now, true)
		for i := range n {
			u.g.deliver(u.g.inbox.buffers[i], u.addresses, int(u.g.inbox.messages[i].Len))
		}
		if n < receiveBatchSize {
			return
		}
	}
}

// passErrors forwards the ICMP errors of the flow's socket to the guest. It returns false if there were none.
func (u *udpFlow) passErrors() bool {
	if u.shared != nil {
		return u.shared.passErrors()
	}
	return u.g.passErrors(u.fd, unix.IPPROTO_UDP, u.addresses.always)
}

func (u *udpFlow) Expired() {
	if end := u.lastUsed.Add(u.idle()); end.After(u.g.now) {
		u.g.timers.Set(&u.timer, end)
		return
	}
	u.end()
}

// end removes the flow, and closes the socket that no other flow uses.
func (u *udpFlow) end() {
	u.g.flows.remove(u)
	if u.shared != nil {
		u.shared.leave(u)
		return
	}
	u.g.closeFD(u.fd)
}

// headroom is the space in a buffer before a datagram's payload, for the longest headers, those of IPv6.
const headroom = vnetHeader + ipv6Header + udpHeader

// deliver sends the guest a datagram whose payload is behind the headroom in buffer. A packet larger than the MTU of the guest's
// interface is fragmented.
func (g *Gateway) deliver(buffer []byte, f flow, payload int) {
	ip := ipv6Header
	if f.guest.Addr().Is4() {
		ip = ipv4Header
	}
	length := udpHeader + payload
	if ip == ipv4Header && ip+length > maxPacket-1 {
		return // too large for IPv4: the datagram came by IPv6 from a name server that has an IPv4 alias
	}
	p := buffer[ipv6Header-ip : headroom+payload]
	clear(p[:vnetHeader+ip+udpHeader])
	network := p[vnetHeader:]
	writeIP(network, f.remote.Addr(), f.guest.Addr(), unix.IPPROTO_UDP, length)
	udp := network[ip:]
	binary.BigEndian.PutUint16(udp, f.remote.Port())
	binary.BigEndian.PutUint16(udp[2:], f.guest.Port())
	binary.BigEndian.PutUint16(udp[4:], uint16(length))
	partial := pseudo(f.remote.Addr(), f.guest.Addr(), unix.IPPROTO_UDP, length)
	if ip+length <= g.config.MTU {
		p[0] = vnetNeedsCsum
		binary.NativeEndian.PutUint16(p[6:], uint16(ip))
		binary.NativeEndian.PutUint16(p[8:], 6)
		binary.BigEndian.PutUint16(udp[6:], fold(partial))
		g.send(p)
		return
	}
	check := ^fold(partial + sum(udp[:length]))
	if check == 0 {
		check = 0xffff
	}
	binary.BigEndian.PutUint16(udp[6:], check)
	g.fragment(f, unix.IPPROTO_UDP, udp[:length])
}
