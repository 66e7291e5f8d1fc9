// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/gateway/access"
	"sockeye/internal/gateway/packet"
	"sockeye/internal/gateway/timer"
)

const (
	// udpIdle is the idle timeout of a flow (RFC 4787, REQ-5: at least two minutes, except for well-known ports).
	udpIdle = 3 * time.Minute
	// dnsIdle is the idle timeout of a flow to port 53. Each DNS query is a flow.
	dnsIdle   = 20 * time.Second
	udpBudget = 64 // maximum number of datagrams read from a socket in a turn
)

// udpFlow is a UDP flow that the guest opened by sending a datagram to a destination.
type udpFlow struct {
	g         *Gateway
	endpoints endpoints
	fd        int
	hops      hopLimit // of a connected socket
	// shared is the socket that the flow shares with others; nil: the flow has a connected socket. destination is the struct
	// sockaddr of the peer, for a shared socket.
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
func (g *Gateway) udpArrives(s *packet.Segment) {
	if b, k := g.bound.findReply(s, g.now); b != nil {
		// If the guest may not open flows to the peer, only datagrams of the peer refresh the entry: the address may be forged.
		if g.now.Sub(k.lastSeen) > udpIdle/2 && g.config.Outbound.Allowed(unix.IPPROTO_UDP, s.To) {
			k.lastSeen = g.now
		}
		b.send(s, k)
		return
	}
	f := endpoints{s.From, s.To}
	u := g.flows.all[f]
	if u == nil {
		if !g.config.Outbound.Allowed(unix.IPPROTO_UDP, s.To) {
			g.count(NotAllowed)
			g.sendICMPError(s, prohibited)
			return
		}
		if b := g.bound.findSource(s, g.config.Outbound.Translate(s.To)); b != nil {
			b.send(s, b.addPeer(s.To, messageTo(b.v6, s.To), nil))
			return
		}
		if u = g.newUDP(f, s); u == nil {
			return
		}
	} else {
		g.flows.touch(u, g.now, true)
	}
	g.gso.add(u, s)
}

func (g *Gateway) newUDP(f endpoints, s *packet.Segment) *udpFlow {
	c := classTransient
	if g.config.Outbound.NameServer(f.remote.Addr()) != nil {
		c = classDNS
	}
	if c == classTransient {
		begin := g.clock()
		if !g.openBudget.available(begin) {
			g.count(TooMany)
			g.warn(warnOpening, "too many new UDP flows: datagrams to new destinations are dropped")
			return nil
		}
		defer func() { g.openBudget.charge(g.clock().Sub(begin)) }()
	}
	u := &udpFlow{g: g, endpoints: f, lastUsed: g.now, class: c}
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

// connectFlow opens a connected socket for a flow. It returns false if that fails.
func (g *Gateway) connectFlow(u *udpFlow, to netip.AddrPort, s *packet.Segment) bool {
	g.evictForFlow(u.class)
	fd, err := g.openSocket(to.Addr(), unix.SOCK_DGRAM, 0)
	if err != nil {
		g.count(TooMany)
		return false
	}
	if err := connectWithErrorQueue(fd, to); err != nil {
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

// refuseDatagram replies to a datagram that could not be sent with the ICMP error that corresponds to the errno.
func (g *Gateway) refuseDatagram(s *packet.Segment, err error) {
	if why, ok := failureOf(err); ok {
		g.sendICMPError(s, why)
	}
}

func (u *udpFlow) event(events uint32) {
	u.g.flows.touch(u, u.g.now, false)
	if events&unix.EPOLLERR != 0 {
		u.forwardErrors()
	}
	for range udpBudget / receiveBatchSize {
		n, err := u.g.received.read(u.fd, receiveBatchSize)
		if err != nil && (errors.Is(err, unix.EAGAIN) || !u.forwardErrors()) {
			return
		}
		u.g.flows.touch(u, u.g.now, true)
		for i := range n {
			u.g.deliver(u.g.received.buffers[i], u.endpoints, int(u.g.received.messages[i].Len))
		}
		if n < receiveBatchSize {
			return
		}
	}
}

// forwardErrors forwards the pending ICMP errors of the flow's socket to the guest. It returns false if there were none.
func (u *udpFlow) forwardErrors() bool {
	if u.shared != nil {
		return u.shared.forwardErrors()
	}
	return u.g.forwardErrors(u.fd, unix.IPPROTO_UDP, u.endpoints.anyDestination)
}

func (u *udpFlow) Expired() {
	if end := u.lastUsed.Add(u.idle()); end.After(u.g.now) {
		u.g.timers.Set(&u.timer, end)
		return
	}
	u.remove()
}

func (u *udpFlow) idle() time.Duration {
	if u.endpoints.remote.Port() == access.DNSPort {
		return dnsIdle
	}
	return udpIdle
}

// remove removes the flow, and closes the socket if no other flow uses it.
func (u *udpFlow) remove() {
	u.g.flows.remove(u)
	if u.shared != nil {
		u.shared.remove(u)
		return
	}
	u.g.closeFD(u.fd)
}

// headroom is the space before a datagram's payload in a buffer, for the IPv6 headers.
const headroom = packet.VnetHeader + packet.IPv6Header + packet.UDPHeader

// deliver sends a datagram to the guest. The payload follows the headroom in buffer. Packets larger than the MTU are fragmented.
func (g *Gateway) deliver(buffer []byte, f endpoints, payload int) {
	ip := packet.IPv6Header
	if f.guest.Addr().Is4() {
		ip = packet.IPv4Header
	}
	length := packet.UDPHeader + payload
	if ip == packet.IPv4Header && ip+length > packet.MaxSize-1 {
		return // too large for IPv4: an IPv6 datagram of a name server with an IPv4 alias
	}
	p := buffer[packet.IPv6Header-ip : headroom+payload]
	clear(p[:packet.VnetHeader+ip+packet.UDPHeader])
	network := p[packet.VnetHeader:]
	packet.WriteIP(network, f.remote.Addr(), f.guest.Addr(), unix.IPPROTO_UDP, length)
	udp := network[ip:]
	binary.BigEndian.PutUint16(udp, f.remote.Port())
	binary.BigEndian.PutUint16(udp[2:], f.guest.Port())
	binary.BigEndian.PutUint16(udp[4:], uint16(length))
	partial := packet.Pseudo(f.remote.Addr(), f.guest.Addr(), unix.IPPROTO_UDP, length)
	if ip+length <= g.config.MTU {
		p[0] = packet.VnetNeedsCsum
		binary.NativeEndian.PutUint16(p[6:], uint16(ip))
		binary.NativeEndian.PutUint16(p[8:], 6)
		binary.BigEndian.PutUint16(udp[6:], packet.Fold(partial))
		g.send(p)
		return
	}
	check := ^packet.Fold(partial + packet.Sum(udp[:length]))
	if check == 0 {
		check = 0xffff
	}
	binary.BigEndian.PutUint16(udp[6:], check)
	g.fragment(f, unix.IPPROTO_UDP, udp[:length])
}
