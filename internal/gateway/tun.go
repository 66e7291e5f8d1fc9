// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"net/netip"

	"golang.org/x/sys/unix"

	"sockeye/internal/gateway/packet"
)

// guestPackets handles events of the TUN descriptor.
type guestPackets Gateway

func (t *guestPackets) event(uint32) {
	g := (*Gateway)(t)
	single := g.onlyEvent && g.singlePackets >= minSinglePackets && g.singlePackets%minSinglePackets != 0
	packets := 0
	for free := g.readBuffer; packets < tunBudget; {
		n, err := direct(unix.SYS_READ, g.config.TUN, free[:readSize], 0)
		if err != nil || n <= packet.VnetHeader {
			break
		}
		packets++
		g.input(free[packet.VnetHeader:n])
		free = free[n:]
		if single && n <= maxRequest {
			break
		}
	}
	if packets > 1 {
		g.singlePackets = 0
	} else {
		g.singlePackets++
	}
	g.gso.send()
	for _, c := range g.flushQueue {
		c.flush()
	}
	clear(g.flushQueue)
	g.flushQueue = g.flushQueue[:0]
}

// input processes a packet of the guest, from its IP header on.
func (g *Gateway) input(p []byte) {
	p, malformed := g.partial.Reassemble(p)
	if p == nil {
		if malformed {
			g.count(Malformed)
		}
		return
	}
	s, ok := packet.Parse(p)
	if !ok || !g.isGuest(s.From.Addr()) {
		g.count(Malformed)
		return
	}
	switch s.Protocol {
	case unix.IPPROTO_TCP:
		g.tcpArrives(&s)
	case unix.IPPROTO_UDP:
		g.udpArrives(&s)
	case unix.IPPROTO_ICMP, unix.IPPROTO_ICMPV6:
		g.icmpArrives(&s)
	}
}

func (g *Gateway) isGuest(a netip.Addr) bool {
	return a.IsValid() && (a == g.config.Guest4 || a == g.config.Guest6)
}

// guestAddr returns the guest's address of the same family as remote.
func (g *Gateway) guestAddr(remote netip.Addr) netip.Addr {
	if remote.Is4() {
		return g.config.Guest4
	}
	return g.config.Guest6
}

// remoteAddr returns the address by which the guest sees a peer: Host4 or Host6 for the host itself, otherwise the peer's address.
func (g *Gateway) remoteAddr(peer netip.AddrPort) netip.AddrPort {
	a := peer.Addr()
	if !a.IsLoopback() && !g.isGuest(a) {
		return peer
	}
	if a.Is4() {
		return netip.AddrPortFrom(g.config.Host4, peer.Port())
	}
	return netip.AddrPortFrom(g.config.Host6, peer.Port())
}

// fragment sends a UDP datagram or ICMP message to the guest in fragments that fit the MTU.
func (g *Gateway) fragment(f endpoints, protocol uint8, transport []byte) {
	g.fragmentID++
	b := make([]byte, packet.VnetHeader+g.config.MTU)
	for at := 0; at < len(transport); {
		var p []byte
		p, at = packet.Fragment(b, f.remote.Addr(), f.guest.Addr(), protocol, g.fragmentID, transport, at)
		g.send(p)
	}
}

// send writes a packet, preceded by a struct virtio_net_hdr, to the TUN. If the interface's queue is full, the packet is dropped.
func (g *Gateway) send(p []byte) {
	if _, err := direct(unix.SYS_WRITE, g.config.TUN, p, 0); err != nil {
		g.count(TUNFull)
	}
}
