// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"encoding/binary"
	"net/netip"

	"golang.org/x/sys/unix"
)

// TCP flags.
const (
	flagFIN = 1 << iota
	flagSYN
	flagRST
	flagPSH
	flagACK
	flagURG
)

// segment is a TCP segment, UDP datagram or ICMP message of the guest. The slices payload and network point into the packet.
type segment struct {
	protocol uint8 // unix.IPPROTO_*
	from, to netip.AddrPort
	// TCP only.
	seq, ack uint32
	flags    uint8
	window   uint16 // SEG.WND, not scaled
	options  synOptions
	payload  []byte // for ICMP the whole message
	network  []byte // the packet from its IP header on
}

// synOptions are the options of a SYN; absent options are zero.
type synOptions struct {
	mss           uint16
	windShift     uint8
	windowScaling bool
}

const (
	ipv4Header = 20
	ipv6Header = 40
	tcpHeader  = 20
	udpHeader  = 8
	maxHeaders = vnetHeader + ipv6Header + tcpHeader + 8
)

// parse parses an IP packet. It returns false for a packet that is malformed, truncated, a fragment, or of an unsupported protocol.
func parse(p []byte) (s segment, ok bool) {
	if len(p) < 1 {
		return s, false
	}
	var from, to netip.Addr
	var rest []byte
	switch p[0] >> 4 {
	case 4:
		header := int(p[0]&0xf) * 4
		if len(p) < ipv4Header || header < ipv4Header {
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
		s.protocol, s.network, rest = p[9], p[:total], p[header:total]
	case 6:
		if len(p) < ipv6Header {
			return s, false
		}
		length := int(binary.BigEndian.Uint16(p[4:]))
		if length == 0 {
			length = len(p) - ipv6Header
		}
		if length > len(p)-ipv6Header {
			return s, false
		}
		from, to = netip.AddrFrom16([16]byte(p[8:24])), netip.AddrFrom16([16]byte(p[24:40]))
		s.network = p[:ipv6Header+length]
		if s.protocol, rest, ok = skipExtensions(p[6], p[ipv6Header:ipv6Header+length]); !ok {
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

func (s segment) transport(from, to netip.Addr, p []byte) (segment, bool) {
	ports := func() bool {
		if len(p) < udpHeader {
			return false
		}
		s.from = netip.AddrPortFrom(from, binary.BigEndian.Uint16(p))
		s.to = netip.AddrPortFrom(to, binary.BigEndian.Uint16(p[2:]))
		return true
	}
	switch s.protocol {
	case unix.IPPROTO_TCP:
		if len(p) < tcpHeader || !ports() {
			return s, false
		}
		header := int(p[12]>>4) * 4
		if header < tcpHeader || header > len(p) {
			return s, false
		}
		s.seq, s.ack = binary.BigEndian.Uint32(p[4:]), binary.BigEndian.Uint32(p[8:])
		s.flags, s.window = p[13], binary.BigEndian.Uint16(p[14:])
		if s.flags&flagSYN != 0 {
			s.options = parseOptions(p[tcpHeader:header])
		}
		s.payload = p[header:]
		return s, true
	case unix.IPPROTO_UDP:
		if !ports() {
			return s, false
		}
		length := int(binary.BigEndian.Uint16(p[4:]))
		if length < udpHeader || length > len(p) {
			return s, false
		}
		s.payload = p[udpHeader:length]
		return s, true
	case unix.IPPROTO_ICMP, unix.IPPROTO_ICMPV6:
		if len(p) < 8 || from.Is4() != (s.protocol == unix.IPPROTO_ICMP) {
			return s, false
		}
		s.from, s.to, s.payload = netip.AddrPortFrom(from, 0), netip.AddrPortFrom(to, 0), p
		return s, true
	}
	return s, false
}

// parseOptions parses TCP options until one is truncated.
func parseOptions(p []byte) (o synOptions) {
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
			o.mss = binary.BigEndian.Uint16(value)
		case p[0] == 3 && len(value) == 1:
			o.windShift, o.windowScaling = min(value[0], 14), true // RFC 7323, section 2.3
		}
		p = p[p[1]:]
	}
	return o
}

// length returns SEG.LEN of RFC 9293.
func (s *segment) length() uint32 {
	n := uint32(len(s.payload))
	if s.flags&flagSYN != 0 {
		n++
	}
	if s.flags&flagFIN != 0 {
		n++
	}
	return n
}

// before compares sequence numbers (RFC 9293, section 3.4).
func before(a, b uint32) bool { return int32(a-b) < 0 }

// struct virtio_net_hdr, which precedes each packet on the TUN (IFF_VNET_HDR).
const (
	vnetHeader    = 10
	vnetNeedsCsum = 1
	vnetGSOTCPv4  = 1
	vnetGSOTCPv6  = 4
)

// outSegment is a TCP segment to the guest.
type outSegment struct {
	from, to      netip.AddrPort // remote, guest
	seq, ack      uint32
	flags         uint8
	window        uint16
	mss           uint16 // in a SYN the MSS option; otherwise the GSO segment size
	windShift     uint8  // in a SYN the window scale option
	windowScaling bool
}

// headers returns the length of the headers, including struct virtio_net_hdr, in bytes.
func (a *outSegment) headers() int {
	n := vnetHeader + ipv4Header + tcpHeader
	if a.to.Addr().Is6() {
		n += ipv6Header - ipv4Header
	}
	if a.flags&flagSYN != 0 {
		n += 4
		if a.windowScaling {
			n += 4
		}
	}
	return n
}

// write writes the headers for a payload of that many bytes. The TCP checksum is partial (CHECKSUM_PARTIAL): kernels complete it
// only when a packet leaves the host, which packets to the guest never do.
func (a *outSegment) write(b []byte, payload int) {
	headers := a.headers()
	clear(b[:headers])
	v6 := a.to.Addr().Is6()
	network := b[vnetHeader:]
	ip := ipv4Header
	if v6 {
		ip = ipv6Header
	}
	tcp := network[ip:]
	length := headers - vnetHeader - ip + payload // of the TCP segment
	b[0] = vnetNeedsCsum
	if payload > int(a.mss) && a.flags&flagSYN == 0 {
		b[1] = vnetGSOTCPv4
		if v6 {
			b[1] = vnetGSOTCPv6
		}
		binary.NativeEndian.PutUint16(b[2:], uint16(headers-vnetHeader))
		binary.NativeEndian.PutUint16(b[4:], a.mss)
	}
	binary.NativeEndian.PutUint16(b[6:], uint16(ip))
	binary.NativeEndian.PutUint16(b[8:], 16)
	writeIP(network, a.from.Addr(), a.to.Addr(), unix.IPPROTO_TCP, length)
	binary.BigEndian.PutUint16(tcp, a.from.Port())
	binary.BigEndian.PutUint16(tcp[2:], a.to.Port())
	binary.BigEndian.PutUint32(tcp[4:], a.seq)
	binary.BigEndian.PutUint32(tcp[8:], a.ack)
	tcp[12] = uint8((headers - vnetHeader - ip) / 4 << 4)
	tcp[13] = a.flags
	binary.BigEndian.PutUint16(tcp[14:], a.window)
	if a.flags&flagSYN != 0 {
		tcp[20], tcp[21] = 2, 4
		binary.BigEndian.PutUint16(tcp[22:], a.mss)
		if a.windowScaling {
			tcp[24], tcp[25], tcp[26], tcp[27] = 1, 3, 3, a.windShift
		}
	}
	binary.BigEndian.PutUint16(tcp[16:], fold(pseudo(a.from.Addr(), a.to.Addr(), unix.IPPROTO_TCP, length)))
}

// hops is the TTL and hop limit of packets to the guest.
const hops = 64

// writeIP writes an IP header for a transport payload of length bytes.
func writeIP(p []byte, from, to netip.Addr, protocol uint8, length int) {
	if from.Is4() {
		p[0] = 0x45
		binary.BigEndian.PutUint16(p[2:], uint16(ipv4Header+length))
		p[6] = 0x40 // DF
		p[8], p[9] = hops, protocol
		f, t := from.As4(), to.As4()
		copy(p[12:], f[:])
		copy(p[16:], t[:])
		binary.BigEndian.PutUint16(p[10:], ^fold(sum(p[:ipv4Header])))
		return
	}
	p[0] = 0x60
	binary.BigEndian.PutUint16(p[4:], uint16(length))
	p[6], p[7] = protocol, hops
	f, t := from.As16(), to.As16()
	copy(p[8:], f[:])
	copy(p[24:], t[:])
}

// sum adds 16-bit words (RFC 1071).
func sum(p []byte) (n uint64) {
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

func fold(n uint64) uint16 {
	for n > 0xffff {
		n = n>>16 + n&0xffff
	}
	return uint16(n)
}

// pseudo returns the sum of the pseudo header (RFC 9293, section 3.1; RFC 8200, section 8.1).
func pseudo(from, to netip.Addr, protocol uint8, length int) uint64 {
	f, t := from.As16(), to.As16()
	n := uint64(protocol) + uint64(length)
	if from.Is4() {
		return n + sum(f[12:]) + sum(t[12:])
	}
	return n + sum(f[:]) + sum(t[:])
}

// segmentSum returns the initial sum of an ICMP checksum: only ICMPv6 has a pseudo header.
func segmentSum(from, to netip.Addr, protocol uint8, length int) uint64 {
	if protocol == unix.IPPROTO_ICMP {
		return 0
	}
	return pseudo(from, to, protocol, length)
}

func withPort(a netip.AddrPort, port uint16) netip.AddrPort {
	return netip.AddrPortFrom(a.Addr(), port)
}

// syntheticSYN rebuilds the part of a SYN that an ICMP error quotes, the IP header and the first eight bytes, because the gateway
// does not store the SYN.
func syntheticSYN(b []byte, s *segment) []byte {
	clear(b)
	ip := ipv6Header
	if s.from.Addr().Is4() {
		ip = ipv4Header
	}
	writeIP(b, s.from.Addr(), s.to.Addr(), unix.IPPROTO_TCP, tcpHeader)
	binary.BigEndian.PutUint16(b[ip:], s.from.Port())
	binary.BigEndian.PutUint16(b[ip+2:], s.to.Port())
	binary.BigEndian.PutUint32(b[ip+4:], s.seq)
	return b[:ip+8]
}
