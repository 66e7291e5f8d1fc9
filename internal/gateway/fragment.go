// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"encoding/binary"
	"net/netip"

	"golang.org/x/sys/unix"
)

// maxPartial is the maximum number of incomplete datagrams. Another one replaces any of them.
const maxPartial = 64

// fragmentKey identifies the fragments of a datagram (RFC 791, section 3.2; RFC 8200, section 4.5).
type fragmentKey struct {
	from, to netip.Addr
	protocol uint8
	id       uint32
}

// fragmentHeader is the length of the IPv6 fragment header, in bytes.
const fragmentHeader = 8

// reassemble returns a packet of the guest unchanged if it is not a fragment, and the reassembled packet for the last fragment. It
// returns false while fragments are missing. Out-of-order fragments are dropped: the guest's kernel sends fragments in order.
func (g *Gateway) reassemble(p []byte) ([]byte, bool) {
	var key fragmentKey
	var data []byte
	var offset, most int
	var more bool
	header := ipv4Header
	switch {
	case len(p) >= ipv4Header && p[0]>>4 == 4:
		field := binary.BigEndian.Uint16(p[6:])
		if field&0x3fff == 0 {
			return p, true
		}
		start, total := int(p[0]&0xf)*4, int(binary.BigEndian.Uint16(p[2:]))
		if start < ipv4Header || total < start || total > len(p) {
			return p, true
		}
		key = fragmentKey{netip.AddrFrom4([4]byte(p[12:])), netip.AddrFrom4([4]byte(p[16:])), p[9], uint32(binary.BigEndian.Uint16(p[4:]))}
		offset, more, data = int(field&0x1fff)*8, field&0x2000 != 0, p[start:total]
		most = maxPacket - 1 - ipv4Header
	case len(p) >= ipv6Header+fragmentHeader && p[0]>>4 == 6 && p[6] == unix.IPPROTO_FRAGMENT:
		length := int(binary.BigEndian.Uint16(p[4:]))
		if length < fragmentHeader || ipv6Header+length > len(p) {
			return p, true
		}
		header = ipv6Header
		f := p[ipv6Header:]
		field := binary.BigEndian.Uint16(f[2:])
		key = fragmentKey{netip.AddrFrom16([16]byte(p[8:])), netip.AddrFrom16([16]byte(p[24:])), f[0], binary.BigEndian.Uint32(f[4:])}
		offset, more, data = int(field&^7), field&1 != 0, f[fragmentHeader:length]
		most = maxPacket - 1
	default:
		return p, true
	}
	b, known := g.partial[key]
	switch {
	case offset == 0:
		if !known && len(g.partial) >= maxPartial {
			for other := range g.partial {
				delete(g.partial, other)
				break
			}
		}
		b = append(make([]byte, 0, 2*(header+len(data))), p[:header]...)
	case !known:
		g.count(Malformed)
		return nil, false
	}
	if len(b)-header != offset || offset+len(data) > most || len(data) == 0 || more && len(data)%8 != 0 {
		g.count(Malformed)
		delete(g.partial, key)
		return nil, false
	}
	b = append(b, data...)
	if more {
		g.partial[key] = b
		return nil, false
	}
	delete(g.partial, key)
	if header == ipv4Header {
		b[0] = 0x45
		binary.BigEndian.PutUint16(b[2:], uint16(len(b)))
		b[6], b[7] = 0, 0
	} else {
		b[6] = key.protocol
		binary.BigEndian.PutUint16(b[4:], uint16(len(b)-ipv6Header))
	}
	return b, true
}

// fragment sends a UDP datagram or ICMP message to the guest in fragments that fit the MTU.
func (g *Gateway) fragment(f flow, protocol uint8, transport []byte) {
	g.fragmentID++
	b := make([]byte, vnetHeader+g.config.MTU)
	v6 := f.guest.Addr().Is6()
	headers := ipv4Header
	if v6 {
		headers = ipv6Header + fragmentHeader
	}
	most := (g.config.MTU - headers) &^ 7
	for at := 0; at < len(transport); at += most {
		n := min(most, len(transport)-at)
		clear(b)
		p := b[vnetHeader : vnetHeader+headers+n]
		more := at+n < len(transport)
		if v6 {
			writeIP(p, f.remote.Addr(), f.guest.Addr(), unix.IPPROTO_FRAGMENT, fragmentHeader+n)
			p[ipv6Header] = protocol
			offset := uint16(at)
			if more {
				offset |= 1
			}
			binary.BigEndian.PutUint16(p[ipv6Header+2:], offset)
			binary.BigEndian.PutUint32(p[ipv6Header+4:], g.fragmentID)
		} else {
			writeIP(p, f.remote.Addr(), f.guest.Addr(), protocol, n)
			offset := uint16(at / 8)
			if more {
				offset |= 0x2000
			}
			binary.BigEndian.PutUint16(p[4:], uint16(g.fragmentID))
			binary.BigEndian.PutUint16(p[6:], offset)
			p[10], p[11] = 0, 0
			binary.BigEndian.PutUint16(p[10:], ^fold(sum(p[:ipv4Header])))
		}
		copy(p[headers:], transport[at:at+n])
		g.send(b[:vnetHeader+headers+n])
	}
}
