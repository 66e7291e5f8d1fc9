// SPDX-License-Identifier: Apache-2.0

package packet

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

// Partial has the incomplete datagrams of the guest, as far as their fragments have arrived.
type Partial map[fragmentKey][]byte

// fragmentHeader is the length of the IPv6 fragment header, in bytes.
const fragmentHeader = 8

// Reassemble returns a packet of the guest unchanged if it is not a fragment, and the reassembled packet for the last fragment.
// Otherwise the result is nil: fragments are missing, or this one is malformed. Out-of-order fragments are dropped as malformed:
// the guest's kernel sends fragments in order.
func (all Partial) Reassemble(p []byte) (whole []byte, malformed bool) {
	var key fragmentKey
	var data []byte
	var offset, most int
	var more bool
	header := IPv4Header
	switch {
	case len(p) >= IPv4Header && p[0]>>4 == 4:
		field := binary.BigEndian.Uint16(p[6:])
		if field&0x3fff == 0 {
			return p, false
		}
		start, total := int(p[0]&0xf)*4, int(binary.BigEndian.Uint16(p[2:]))
		if start < IPv4Header || total < start || total > len(p) {
			return p, false
		}
		key = fragmentKey{netip.AddrFrom4([4]byte(p[12:])), netip.AddrFrom4([4]byte(p[16:])), p[9], uint32(binary.BigEndian.Uint16(p[4:]))}
		offset, more, data = int(field&0x1fff)*8, field&0x2000 != 0, p[start:total]
		most = MaxSize - 1 - IPv4Header
	case len(p) >= IPv6Header+fragmentHeader && p[0]>>4 == 6 && p[6] == unix.IPPROTO_FRAGMENT:
		length := int(binary.BigEndian.Uint16(p[4:]))
		if length < fragmentHeader || IPv6Header+length > len(p) {
			return p, false
		}
		header = IPv6Header
		f := p[IPv6Header:]
		field := binary.BigEndian.Uint16(f[2:])
		key = fragmentKey{netip.AddrFrom16([16]byte(p[8:])), netip.AddrFrom16([16]byte(p[24:])), f[0], binary.BigEndian.Uint32(f[4:])}
		offset, more, data = int(field&^7), field&1 != 0, f[fragmentHeader:length]
		most = MaxSize - 1
	default:
		return p, false
	}
	b, known := all[key]
	switch {
	case offset == 0:
		if !known && len(all) >= maxPartial {
			for other := range all {
				delete(all, other)
				break
			}
		}
		b = append(make([]byte, 0, 2*(header+len(data))), p[:header]...)
	case !known:
		return nil, true
	}
	if len(b)-header != offset || offset+len(data) > most || len(data) == 0 || more && len(data)%8 != 0 {
		delete(all, key)
		return nil, true
	}
	b = append(b, data...)
	if more {
		all[key] = b
		return nil, false
	}
	delete(all, key)
	if header == IPv4Header {
		b[0] = 0x45
		binary.BigEndian.PutUint16(b[2:], uint16(len(b)))
		b[6], b[7] = 0, 0
	} else {
		b[6] = key.protocol
		binary.BigEndian.PutUint16(b[4:], uint16(len(b)-IPv6Header))
	}
	return b, false
}

// Fragment writes the fragment of an IP payload that begins at an offset, preceded by struct virtio_net_hdr. The buffer has
// the size of that struct and the MTU. Fragment returns the packet, and the offset of the next fragment.
func Fragment(b []byte, from, to netip.Addr, protocol uint8, id uint32, payload []byte, at int) (p []byte, next int) {
	v6 := to.Is6()
	headers := IPv4Header
	if v6 {
		headers = IPv6Header + fragmentHeader
	}
	most := (len(b) - VnetHeader - headers) &^ 7
	n := min(most, len(payload)-at)
	clear(b)
	p = b[VnetHeader : VnetHeader+headers+n]
	more := at+n < len(payload)
	if v6 {
		WriteIP(p, from, to, unix.IPPROTO_FRAGMENT, fragmentHeader+n)
		p[IPv6Header] = protocol
		offset := uint16(at)
		if more {
			offset |= 1
		}
		binary.BigEndian.PutUint16(p[IPv6Header+2:], offset)
		binary.BigEndian.PutUint32(p[IPv6Header+4:], id)
	} else {
		WriteIP(p, from, to, protocol, n)
		offset := uint16(at / 8)
		if more {
			offset |= 0x2000
		}
		binary.BigEndian.PutUint16(p[4:], uint16(id))
		binary.BigEndian.PutUint16(p[6:], offset)
		p[10], p[11] = 0, 0
		binary.BigEndian.PutUint16(p[10:], ^Fold(Sum(p[:IPv4Header])))
	}
	copy(p[headers:], payload[at:at+n])
	return b[:VnetHeader+headers+n], at + n
}
