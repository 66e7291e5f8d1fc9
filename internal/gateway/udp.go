// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// udpIdle is how long a flow of datagrams is remembered (RFC 4787, REQ-5: at least
	// two minutes; it lets well-known ports have less).
	udpIdle = 3 * time.Minute
	// dnsIdle is for questions to name servers, each of which is a flow.
	dnsIdle   = 20 * time.Second
	udpBudget = 64 // datagrams that are read in a turn
)

// udpFlow is datagrams between a port of the guest and another place, which the guest began to send.
type udpFlow struct {
	g         *Gateway
	addresses flow
	fd        int
	hops      hopLimit // of a socket of its own
	// shared is the socket, if the flow has none of its own, and name the destination, as struct sockaddr.
	shared      *sharedSocket
	destination []byte
	noGSO       bool // its datagrams cannot be sent at once
	lastUsed    time.Time
	timer       timer
	// The place among the flows of its class.
	class        class
	older, newer *udpFlow
}

// udpArrives takes a datagram of the guest.
func (g *Gateway) udpArrives(s *segment) {
	if b, k := g.bound.forReply(s, g.now); b != nil {
		// Where the guest may go nowhere by itself, only what comes from the peer keeps it
		// known: its address may be a forged one.
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
	if g.config.Outbound.nameServer(f.remote.Addr()) != nil {
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
	u.timer.owner = u
	g.timers.set(&u.timer, g.now.Add(u.idle()))
	return u
}

// connectFlow gives a flow a socket of its own.
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
			g.count(TooMany) // the host has no port
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
	if u.addresses.remote.Port() == dnsPort {
		return dnsIdle
	}
	return udpIdle
}

// connectTold connects a socket that is told all that the network says of its datagrams.
func connectTold(fd int, to netip.AddrPort) error {
	if err := askErrors(fd, to.Addr()); err != nil {
		return err
	}
	return unix.Connect(fd, sockaddr(to))
}

// askErrors has a socket, which sends to addresses of a family, be told all that the network says of its datagrams.
func askErrors(fd int, to netip.Addr) error {
	level, option := unix.IPPROTO_IP, unix.IP_RECVERR
	if to.Is6() {
		level, option = unix.IPPROTO_IPV6, unix.IPV6_RECVERR
	}
	return unix.SetsockoptInt(fd, level, option, 1)
}

// hopLimit is what a socket's datagrams have, if not the host's default.
type hopLimit uint8

// set has a socket send with the guest's hop limit, as traceroute(8) sets it. The guest's
// default is the host's.
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
	_ = unix.SetsockoptInt(fd, level, option, value) // what is left is the datagram with another one
}

// hops is the TTL, or hop limit.
func (s *segment) hops() uint8 {
	if s.network[0]>>4 == 4 {
		return s.network[8]
	}
	return s.network[7]
}

// refuseDatagram tells the guest why a socket without connections did not take a
// datagram.
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

// passErrors passes on what the network told of datagrams that were sent. It is false if it
// told nothing.
func (u *udpFlow) passErrors() bool {
	if u.shared != nil {
		return u.shared.passErrors()
	}
	return u.g.passErrors(u.fd, unix.IPPROTO_UDP, u.addresses.always)
}

func (u *udpFlow) expired() {
	if end := u.lastUsed.Add(u.idle()); end.After(u.g.now) {
		u.g.timers.set(&u.timer, end)
		return
	}
	u.end()
}

// end forgets a flow.
func (u *udpFlow) end() {
	u.g.flows.remove(u)
	if u.shared != nil {
		u.shared.leave(u)
		return
	}
	u.g.closeFD(u.fd)
}

// headroom is what a datagram's buffer has before it: the headers of IPv6 are the longest.
const headroom = vnetHeader + ipv6Header + udpHeader

// deliver gives the guest a datagram, which stands in a buffer behind the headroom. What
// exceeds the MTU of the guest's interface is sent in fragments.
func (g *Gateway) deliver(buffer []byte, f flow, payload int) {
	ip := ipv6Header
	if f.guest.Addr().Is4() {
		ip = ipv4Header
	}
	length := udpHeader + payload
	if ip == ipv4Header && ip+length > maxPacket-1 {
		return // from a name server with IPv6
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
