// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"errors"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/gateway/packet"
	"sockeye/internal/gateway/timer"
)

// boundSocket is the UDP socket of a Forward.
type boundSocket struct {
	g *Gateway
	Forward
	v6    bool
	peers map[netip.AddrPort]*boundPeer // by the address inside (remoteAddr)
	timer timer.Timer
	pacer pacer
}

// boundPeer is a peer to which the guest may reply, because the peer has sent a datagram to the bound socket.
type boundPeer struct {
	lastSeen time.Time
	destination
}

// boundSockets are the bound sockets by the guest's port.
type boundSockets map[uint16][]*boundSocket

// maxPeers is the maximum number of peers of a socket. Another peer replaces any of them, since source addresses can be forged.
const maxPeers = 1 << 16

func newBound(g *Gateway, f Forward) (*boundSocket, error) {
	family, err := unix.GetsockoptInt(f.FD, unix.SOL_SOCKET, unix.SO_DOMAIN)
	if err != nil {
		return nil, err
	}
	b := &boundSocket{g: g, Forward: f, v6: family == unix.AF_INET6, peers: map[netip.AddrPort]*boundPeer{}}
	b.timer.Owner = b
	b.pacer.b, b.pacer.timer.Owner = b, &b.pacer
	level, option := unix.IPPROTO_IP, unix.IP_PKTINFO
	if b.v6 {
		level, option = unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO
	}
	return b, unix.SetsockoptInt(f.FD, level, option, 1)
}

// findReply returns the socket on which the destination of the guest's datagram was last seen as a peer; nil if there is none.
func (all boundSockets) findReply(s *packet.Segment, now time.Time) (by *boundSocket, to *boundPeer) {
	for _, b := range all[s.From.Port()] {
		if k := b.peers[s.To]; k != nil && now.Sub(k.lastSeen) < udpIdle && (to == nil || k.lastSeen.After(to.lastSeen)) {
			by, to = b, k
		}
	}
	return by, to
}

// findSource returns the socket bound to the source port of a datagram that is not a reply; nil: the datagram opens a flow.
func (all boundSockets) findSource(s *packet.Segment, to netip.AddrPort) *boundSocket {
	for _, b := range all[s.From.Port()] {
		if to == s.To && (b.v6 && !b.v6Only() || b.v6 == to.Addr().Is6()) {
			return b
		}
	}
	return nil
}

func (b *boundSocket) v6Only() bool {
	only, err := unix.GetsockoptInt(b.FD, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY)
	return err == nil && only != 0
}

func (b *boundSocket) send(s *packet.Segment, k *boundPeer) {
	err := k.send(b.FD, s.Payload)
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EADDRNOTAVAIL) || errors.Is(err, unix.ENETUNREACH) {
		k.control = k.control[:0] // the local address was a broadcast address, or was removed
		err = k.send(b.FD, s.Payload)
	}
	if err != nil {
		b.g.refuseDatagram(s, err)
	}
}

func (b *boundSocket) event(uint32) {
	in := b.g.received
	for range udpBudget / receiveBatchSize {
		most := b.pacer.allowed()
		if most == 0 {
			return
		}
		n, err := in.read(b.FD, most)
		if errors.Is(err, unix.EAGAIN) {
			return
		}
		for i := range n {
			peer := in.peer(i)
			remote := b.g.remoteAddr(peer)
			guest := b.g.guestAddr(remote.Addr())
			if !peer.IsValid() || !guest.IsValid() {
				continue
			}
			// The source address may be forged, and the guest would reply to it.
			if o := &b.g.config.Outbound; o.Named(remote) && !o.Allowed(unix.IPPROTO_UDP, remote) {
				b.g.count(NotAllowed)
				continue
			}
			b.addPeer(remote, in.name(i), in.control(i))
			f, payload := endpoints{netip.AddrPortFrom(guest, b.Port), remote}, int(in.messages[i].Len)
			b.g.deliver(in.buffers[i], f, payload)
			b.pacer.delivered(f, payload)
		}
		if n < most {
			return
		}
	}
}

// addPeer adds or refreshes a peer. With control, replies have the local address to which the peer has sent.
func (b *boundSocket) addPeer(remote netip.AddrPort, name, control []byte) *boundPeer {
	k := b.peers[remote]
	if k == nil {
		if len(b.peers) >= maxPeers {
			for other := range b.peers {
				delete(b.peers, other)
				break
			}
		}
		if len(b.peers) == 0 {
			b.g.timers.Set(&b.timer, b.g.now.Add(udpIdle))
		}
		k = &boundPeer{}
		b.peers[remote] = k
	}
	k.lastSeen = b.g.now
	k.name, k.control = append(k.name[:0], name...), append(k.control[:0], control...)
	return k
}

// Expired removes idle peers.
func (b *boundSocket) Expired() {
	for peer, k := range b.peers {
		if b.g.now.Sub(k.lastSeen) >= udpIdle {
			delete(b.peers, peer)
		}
	}
	if len(b.peers) > 0 {
		b.g.timers.Set(&b.timer, b.g.now.Add(udpIdle))
	}
}
