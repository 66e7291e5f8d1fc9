// SPDX-License-Identifier: Apache-2.0

// Package packet parses and builds the IP packets between the gateway and the guest: headers of IP, TCP and UDP,
// checksums, and fragments.
package packet

import (
	"encoding/binary"
	"net/netip"

	"golang.org/x/sys/unix"
)

// Flags of a TCP segment.
const (
	FIN = 1 << iota
	SYN
	RST
	PSH
	ACK
	URG
)

// Segment is a TCP segment, UDP datagram or ICMP message of the guest. The slices Payload and Network point into the packet.
type Segment struct {
	Protocol uint8 // unix.IPPROTO_*
	From, To netip.AddrPort
	// TCP only.
	Seq, Ack uint32
	Flags    uint8
	Window   uint16 // SEG.WND, not scaled
	Options  SYNOptions
	Payload  []byte // for ICMP the whole message
	Network  []byte // the packet from its IP header on
}

// SYNOptions are the options of a SYN; absent options are zero.
type SYNOptions struct {
	MSS           uint16
	WindShift     uint8
	WindowScaling bool
}

// Lengths of headers in bytes, without options and extension headers.
const (
	IPv4Header = 20
	IPv6Header = 40
	TCPHeader  = 20
	UDPHeader  = 8
	// MaxHeaders is the maximum length of the headers of an [Outgoing] segment, with struct virtio_net_hdr.
	MaxHeaders = VnetHeader + IPv6Header + TCPHeader + 8
)

// MaxSize is the maximum size of a packet in bytes, rounded up: the largest one has a byte less.
const MaxSize = 1 << 16

// Parse parses an IP packet. It returns false for a packet that is malformed, truncated, a fragment, or of an unsupported protocol.
func Parse(p []byte) (s Segment, ok bool) {
	if len(p) < 1 {
		return s, false
	}
	var from, to netip.Addr
	var rest []byte
	switch p[0] >> 4 {
	case 4:
		header := int(p[0]&0xf) * 4
		if len(p) < IPv4Header || header < IPv4Header {
			return s, false
		}
		total := int(binary.BigEndian.Uint16(p[2:]))
		if total == 0 { // larger than 64 KB
			total = len(p)
		}
		fragment := binary.BigEndian.Uint16(p[6:])
		if total < header || total > len(p) || fragment&0x3fff != 0 {
			return s, false
		}
		from, to = netip.AddrFrom4([4]byte(p[12:16])), netip.AddrFrom4([4]byte(p[16:20]))
		s.Protocol, s.Network, rest = p[9], p[:total], p[header:total]
	case 6:
		if len(p) < IPv6Header {
			return s, false
		}
		length := int(binary.BigEndian.Uint16(p[4:]))
		if length == 0 {
			length = len(p) - IPv6Header
		}
		if length > len(p)-IPv6Header {
			return s, false
		}
		from, to = netip.AddrFrom16([16]byte(p[8:24])), netip.AddrFrom16([16]byte(p[24:40]))
		s.Network = p[:IPv6Header+length]
		if s.Protocol, rest, ok = skipExtensions(p[6], p[IPv6Header:IPv6Header+length]); !ok {
			return s, false
		}
	default:
		return s, false
	}
	return s.transport(from, to, rest)
}

// maxExtensions bounds the IPv6 extension headers of a packet.
const maxExtensions = 8

// skipExtensions skips IPv6 extension headers.
func skipExtensions(next uint8, p []byte) (protocol uint8, rest []byte, ok bool) {
	for range maxExtensions {
		switch next {
		case unix.IPPROTO_HOPOPTS, unix.IPPROTO_DSTOPTS:
			if len(p) < 8 || len(p) < 8+int(p[1])*8 {
				return 0, nil, false
			}
			next, p = p[0], p[8+int(p[1])*8:]
		default:
			return next, p, true
		}
	}
	return 0, nil, false
}

func (s Segment) transport(from, to netip.Addr, p []byte) (Segment, bool) {
	ports := func() bool {
		if len(p) < UDPHeader {
			return false
		}
		s.From = netip.AddrPortFrom(from, binary.BigEndian.Uint16(p))
		s.To = netip.AddrPortFrom(to, binary.BigEndian.Uint16(p[2:]))
		return true
	}
	switch s.Protocol {
	case unix.IPPROTO_TCP:
		if len(p) < TCPHeader || !ports() {
			return s, false
		}
		header := int(p[12]>>4) * 4
		if header < TCPHeader || header > len(p) {
			return s, false
		}
		s.Seq, s.Ack = binary.BigEndian.Uint32(p[4:]), binary.BigEndian.Uint32(p[8:])
		s.Flags, s.Window = p[13], binary.BigEndian.Uint16(p[14:])
		if s.Flags&SYN != 0 {
			s.Options = parseOptions(p[TCPHeader:header])
		}
		s.Payload = p[header:]
		return s, true
	case unix.IPPROTO_UDP:
		if !ports() {
			return s, false
		}
		length := int(binary.BigEndian.Uint16(p[4:]))
		if length < UDPHeader || length > len(p) {
			return s, false
		}
		s.Payload = p[UDPHeader:length]
		return s, true
	case unix.IPPROTO_ICMP, unix.IPPROTO_ICMPV6:
		if len(p) < 8 || from.Is4() != (s.Protocol == unix.IPPROTO_ICMP) {
			return s, false
		}
		s.From, s.To, s.Payload = netip.AddrPortFrom(from, 0), netip.AddrPortFrom(to, 0), p
		return s, true
	}
	return s, false
}

// parseOptions parses TCP options until one is truncated.
func parseOptions(p []byte) (o SYNOptions) {
	for len(p) > 0 {
		switch p[0] {
		case 0:
			return o
		case 1:
			p = p[1:]
			continue
		}
		if len(p) < 2 || p[1] < 2 || int(p[1]) > len(p) {
			return o
		}
		switch value := p[2:p[1]]; {
		case p[0] == 2 && len(value) == 2:
			o.MSS = binary.BigEndian.Uint16(value)
		case p[0] == 3 && len(value) == 1:
			o.WindShift, o.WindowScaling = min(value[0], 14), true // RFC 7323, section 2.3
		}
		p = p[p[1]:]
	}
	return o
}

// Length returns SEG.LEN of RFC 9293.
func (s *Segment) Length() uint32 {
	n := uint32(len(s.Payload))
	if s.Flags&SYN != 0 {
		n++
	}
	if s.Flags&FIN != 0 {
		n++
	}
	return n
}

// Hops returns the TTL or hop limit.
func (s *Segment) Hops() uint8 {
	if s.Network[0]>>4 == 4 {
		return s.Network[8]
	}
	return s.Network[7]
}

// Before compares sequence numbers (RFC 9293, section 3.4).
func Before(a, b uint32) bool { return int32(a-b) < 0 }

// Fields of struct virtio_net_hdr, which precedes each packet on the TUN (IFF_VNET_HDR).
const (
	VnetHeader    = 10 // length in bytes
	VnetNeedsCsum = 1  // VIRTIO_NET_HDR_F_NEEDS_CSUM
	vnetGSOTCPv4  = 1
	vnetGSOTCPv6  = 4
)

// Outgoing is a TCP segment to the guest.
type Outgoing struct {
	From, To      netip.AddrPort // remote, guest
	Seq, Ack      uint32
	Flags         uint8
	Window        uint16
	MSS           uint16 // in a SYN the MSS option; otherwise the GSO segment size
	WindShift     uint8  // in a SYN the window scale option
	WindowScaling bool
}

// Write writes the headers for a payload of that many bytes. The TCP checksum is partial (CHECKSUM_PARTIAL): kernels complete it
// only when a packet leaves the host, which packets to the guest never do.
func (a *Outgoing) Write(b []byte, payload int) {
	headers := a.Headers()
	clear(b[:headers])
	v6 := a.To.Addr().Is6()
	network := b[VnetHeader:]
	ip := IPv4Header
	if v6 {
		ip = IPv6Header
	}
	tcp := network[ip:]
	length := headers - VnetHeader - ip + payload // of the TCP segment
	b[0] = VnetNeedsCsum
	if payload > int(a.MSS) && a.Flags&SYN == 0 {
		b[1] = vnetGSOTCPv4
		if v6 {
			b[1] = vnetGSOTCPv6
		}
		binary.NativeEndian.PutUint16(b[2:], uint16(headers-VnetHeader))
		binary.NativeEndian.PutUint16(b[4:], a.MSS)
	}
	binary.NativeEndian.PutUint16(b[6:], uint16(ip))
	binary.NativeEndian.PutUint16(b[8:], 16)
	WriteIP(network, a.From.Addr(), a.To.Addr(), unix.IPPROTO_TCP, length)
	binary.BigEndian.PutUint16(tcp, a.From.Port())
	binary.BigEndian.PutUint16(tcp[2:], a.To.Port())
	binary.BigEndian.PutUint32(tcp[4:], a.Seq)
	binary.BigEndian.PutUint32(tcp[8:], a.Ack)
	tcp[12] = uint8((headers - VnetHeader - ip) / 4 << 4)
	tcp[13] = a.Flags
	binary.BigEndian.PutUint16(tcp[14:], a.Window)
	if a.Flags&SYN != 0 {
		tcp[20], tcp[21] = 2, 4
		binary.BigEndian.PutUint16(tcp[22:], a.MSS)
		if a.WindowScaling {
			tcp[24], tcp[25], tcp[26], tcp[27] = 1, 3, 3, a.WindShift
		}
	}
	binary.BigEndian.PutUint16(tcp[16:], Fold(Pseudo(a.From.Addr(), a.To.Addr(), unix.IPPROTO_TCP, length)))
}

// Headers returns the length of the headers, including struct virtio_net_hdr, in bytes.
func (a *Outgoing) Headers() int {
	n := VnetHeader + IPv4Header + TCPHeader
	if a.To.Addr().Is6() {
		n += IPv6Header - IPv4Header
	}
	if a.Flags&SYN != 0 {
		n += 4
		if a.WindowScaling {
			n += 4
		}
	}
	return n
}

// ICMPSum returns the initial sum of an ICMP checksum: only ICMPv6 has a pseudo header.
func ICMPSum(from, to netip.Addr, protocol uint8, length int) uint64 {
	if protocol == unix.IPPROTO_ICMP {
		return 0
	}
	return Pseudo(from, to, protocol, length)
}

// Pseudo returns the sum of the pseudo header (RFC 9293, section 3.1; RFC 8200, section 8.1).
func Pseudo(from, to netip.Addr, protocol uint8, length int) uint64 {
	f, t := from.As16(), to.As16()
	n := uint64(protocol) + uint64(length)
	if from.Is4() {
		return n + Sum(f[12:]) + Sum(t[12:])
	}
	return n + Sum(f[:]) + Sum(t[:])
}

// SyntheticSYN rebuilds the part of a SYN that an ICMP error quotes, the IP header and the first eight bytes, because the gateway
// does not store the SYN.
func SyntheticSYN(b []byte, s *Segment) []byte {
	clear(b)
	ip := IPv6Header
	if s.From.Addr().Is4() {
		ip = IPv4Header
	}
	WriteIP(b, s.From.Addr(), s.To.Addr(), unix.IPPROTO_TCP, TCPHeader)
	binary.BigEndian.PutUint16(b[ip:], s.From.Port())
	binary.BigEndian.PutUint16(b[ip+2:], s.To.Port())
	binary.BigEndian.PutUint32(b[ip+4:], s.Seq)
	return b[:ip+8]
}

// DefaultHops is the TTL and hop limit of packets to the guest.
const DefaultHops = 64

// WriteIP writes an IP header for a transport payload of length bytes.
func WriteIP(p []byte, from, to netip.Addr, protocol uint8, length int) {
	if from.Is4() {
		p[0] = 0x45
		binary.BigEndian.PutUint16(p[2:], uint16(IPv4Header+length))
		p[6] = 0x40 // DF
		p[8], p[9] = DefaultHops, protocol
		f, t := from.As4(), to.As4()
		copy(p[12:], f[:])
		copy(p[16:], t[:])
		binary.BigEndian.PutUint16(p[10:], ^Fold(Sum(p[:IPv4Header])))
		return
	}
	p[0] = 0x60
	binary.BigEndian.PutUint16(p[4:], uint16(length))
	p[6], p[7] = protocol, DefaultHops
	f, t := from.As16(), to.As16()
	copy(p[8:], f[:])
	copy(p[24:], t[:])
}

// Sum adds 16-bit words (RFC 1071).
func Sum(p []byte) (n uint64) {
	for ; len(p) >= 8; p = p[8:] {
		w := binary.BigEndian.Uint64(p)
		n += w>>48 + w>>32&0xffff + w>>16&0xffff + w&0xffff
	}
	for ; len(p) >= 2; p = p[2:] {
		n += uint64(binary.BigEndian.Uint16(p))
	}
	if len(p) == 1 {
		n += uint64(p[0]) << 8
	}
	return n
}

// Fold adds the carries of a sum (RFC 1071).
func Fold(n uint64) uint16 {
	for n > 0xffff {
		n = n>>16 + n&0xffff
	}
	return uint16(n)
}
