// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"errors"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
)

// bound is a socket of the host that is bound to a port for the guest.
type bound struct {
	g *Gateway
	Forward
	v6    bool
	peers map[netip.AddrPort]*known // as the guest knows them
	timer timer
	pace  pace
}

// known is a peer of a bound socket.
type known struct {
	seen time.Time
	message
}

// bounds are those by the guest's port.
type bounds map[uint16][]*bound

// maxPeers bounds how many peers of a socket may be answered. Anybody can pretend to be
// many: one more has another one be forgotten, and comes through.
const maxPeers = 1 << 16

func newBound(g *Gateway, f Forward) (*bound, error) {
	family, err := unix.GetsockoptInt(f.FD, unix.SOL_SOCKET, unix.SO_DOMAIN)
	if err != nil {
		return nil, err
	}
	b := &bound{g: g, Forward: f, v6: family == unix.AF_INET6, peers: map[netip.AddrPort]*known{}}
	b.timer.owner = b
	b.pace.b, b.pace.timer.owner = b, &b.pace
	level, option := unix.IPPROTO_IP, unix.IP_PKTINFO
	if b.v6 {
		level, option = unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO
	}
	return b, unix.SetsockoptInt(f.FD, level, option, 1)
}

// answerer is the socket by which a peer sent to the guest, of several the last one, if a
// datagram of the guest goes there.
func (all bounds) answerer(s *segment, now time.Time) (by *bound, to *known) {
	for _, b := range all[s.from.Port()] {
		if k := b.peers[s.to]; k != nil && now.Sub(k.seen) < udpIdle && (to == nil || k.seen.After(to.seen)) {
			by, to = b, k
		}
	}
	return by, to
}

// from is the socket for what the guest sends by itself from a port that leads to it.
func (all bounds) from(s *segment, to netip.AddrPort) *bound {
	for _, b := range all[s.from.Port()] {
		if to == s.to && (b.v6 && !b.v6Only() || b.v6 == to.Addr().Is6()) {
			return b
		}
	}
	return nil
}

func (b *bound) v6Only() bool {
	only, err := unix.GetsockoptInt(b.FD, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY)
	return err == nil && only != 0
}

func (b *bound) send(s *segment, k *known) {
	err := k.send(b.FD, s.payload)
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EADDRNOTAVAIL) || errors.Is(err, unix.ENETUNREACH) {
		k.control = k.control[:0] // the address was a broadcast's, or is gone
		err = k.send(b.FD, s.payload)
	}
	if err != nil {
		b.g.refuseDatagram(s, err)
	}
}

func (b *bound) event(uint32) {
	in := b.g.inbox
	for range udpBudget / inboxSize {
		most := b.pace.most()
		if most == 0 {
			return
		}
		n, err := in.read(b.FD, most)
		if errors.Is(err, unix.EAGAIN) {
			return
		}
		for i := range n {
			peer := in.peer(i)
			remote := b.g.seen(peer)
			guest := b.g.guest(remote.Addr())
			if !peer.IsValid() || !guest.IsValid() {
				continue
			}
			// The sender's address may be a forged one, and whom the guest answers.
			if o := &b.g.config.Outbound; o.named(remote) && !o.Allowed(unix.IPPROTO_UDP, remote) {
				b.g.count(NotAllowed)
				continue
			}
			b.know(remote, in.name(i), in.control(i))
			f, payload := flow{netip.AddrPortFrom(guest, b.Port), remote}, int(in.messages[i].Len)
			b.g.deliver(in.buffers[i], f, payload)
			b.pace.delivered(f, payload)
		}
		if n < most {
			return
		}
	}
}

// know remembers a peer: its name for the socket, and the control message that has a
// datagram sent from where it sent to.
func (b *bound) know(remote netip.AddrPort, name, control []byte) *known {
	k := b.peers[remote]
	if k == nil {
		if len(b.peers) >= maxPeers {
			for other := range b.peers {
				delete(b.peers, other)
				break
			}
		}
		if len(b.peers) == 0 {
			b.g.timers.set(&b.timer, b.g.now.Add(udpIdle))
		}
		k = &known{}
		b.peers[remote] = k
	}
	k.seen = b.g.now
	k.name, k.control = append(k.name[:0], name...), append(k.control[:0], control...)
	return k
}

// expired forgets peers that have been quiet.
func (b *bound) expired() {
	for peer, k := range b.peers {
		if b.g.now.Sub(k.seen) >= udpIdle {
			delete(b.peers, peer)
		}
	}
	if len(b.peers) > 0 {
		b.g.timers.set(&b.timer, b.g.now.Add(udpIdle))
	}
}
