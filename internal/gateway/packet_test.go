// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"
)

func TestParse(t *testing.T) {
	from4, to4 := netip.MustParseAddrPort("10.95.0.1:1234"), netip.MustParseAddrPort("192.0.2.1:80")
	from6, to6 := netip.MustParseAddrPort("[fd95::1]:1234"), netip.MustParseAddrPort("[2001:db8::1]:80")
	payload := []byte("payload")
	tcp4 := build(from4, to4, 1, 2, flagSYN, 3, guestOptions(true), payload)
	tcp6 := build(from6, to6, 1, 2, flagSYN, 3, guestOptions(true), payload)
	change := func(p []byte, f func(p []byte)) []byte {
		p = bytes.Clone(p)
		f(p)
		return p
	}
	with := func(headers ...[]byte) []byte { // extension headers before TCP
		p := bytes.Clone(tcp6[:ipv6Header])
		for _, h := range headers {
			p = append(p, h...)
		}
		p = append(p, tcp6[ipv6Header:]...)
		binary.BigEndian.PutUint16(p[4:], uint16(len(p)-ipv6Header))
		p[6] = unix.IPPROTO_HOPOPTS
		return p
	}
	for _, c := range []struct {
		name   string
		packet []byte
		ok     bool
	}{
		{"IPv4", tcp4, true},
		{"IPv6", tcp6, true},
		{"IPv4 with padding", append(bytes.Clone(tcp4), 0, 0, 0), true},
		{"IPv6 with padding", append(bytes.Clone(tcp6), 0, 0, 0), true},
		{"larger than 64 KB", change(tcp4, func(p []byte) { p[2], p[3] = 0, 0 }), true},
		{"empty", nil, false},
		{"another version", change(tcp4, func(p []byte) { p[0] = 0x55 }), false},
		{"cut", tcp4[:len(tcp4)-1], false},
		{"truncated IPv6", tcp6[:len(tcp6)-1], false},
		{"first fragment", change(tcp4, func(p []byte) { p[6] = 0x20 }), false},
		{"last fragment", change(tcp4, func(p []byte) { p[7] = 1 }), false},
		{"header of 16 bytes", change(tcp4, func(p []byte) { p[0] = 0x44 }), false},
		{"header beyond the end", change(tcp4, func(p []byte) { p[0] = 0x4f }), false},
		{"length within the header", change(tcp4, func(p []byte) { p[2], p[3] = 0, 19 }), false},
		{"TCP header of 16 bytes", change(tcp4, func(p []byte) { p[ipv4Header+12] = 0x40 }), false},
		{"TCP header beyond the end", change(tcp6, func(p []byte) { p[ipv6Header+12] = 0xf0 }), false},
		{"SCTP", change(tcp4, func(p []byte) { p[9] = unix.IPPROTO_SCTP }), false},
		{"ICMP in IPv6", change(tcp6, func(p []byte) { p[6] = unix.IPPROTO_ICMP }), false},
		{"UDP with a wrong length", change(tcp4, func(p []byte) { p[9] = unix.IPPROTO_UDP; p[ipv4Header+5] = 200 }), false},
		{"extension headers", with([]byte{unix.IPPROTO_DSTOPTS, 0, 0, 0, 0, 0, 0, 0}, []byte{unix.IPPROTO_TCP, 0, 0, 0, 0, 0, 0, 0}), true},
		{"extension header beyond the end", with([]byte{unix.IPPROTO_TCP, 200, 0, 0, 0, 0, 0, 0}), false},
		{"fragment of IPv6", with([]byte{unix.IPPROTO_FRAGMENT, 0, 0, 0, 0, 0, 0, 0}, []byte{unix.IPPROTO_TCP, 0, 0, 0, 0, 0, 0, 0}), false},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, ok := parse(c.packet)
			if ok != c.ok {
				t.Fatalf("parsed: %v, want %v", ok, c.ok)
			}
			if !ok {
				return
			}
			if s.from.Port() != 1234 || s.to.Port() != 80 || s.seq != 1 || s.ack != 2 || s.flags != flagSYN || s.window != 3 {
				t.Errorf("%+v", s)
			}
			if s.options != (synOptions{mss: 1460, windShift: 7, windowScaling: true}) {
				t.Errorf("options %+v", s.options)
			}
			if c.name != "larger than 64 KB" && !bytes.Equal(s.payload, payload) {
				t.Errorf("payload %q", s.payload)
			}
			if s.length() != uint32(len(s.payload))+1 {
				t.Errorf("length %d", s.length())
			}
		})
	}
}

func TestOptions(t *testing.T) {
	for _, c := range []struct {
		in   []byte
		want synOptions
	}{
		{nil, synOptions{}},
		{[]byte{2, 4, 5, 180, 3, 3, 14}, synOptions{1460, 14, true}},
		{[]byte{1, 1, 3, 3, 255}, synOptions{0, 14, true}},                           // RFC 7323: limited to 14
		{[]byte{0, 2, 4, 5, 180}, synOptions{}},                                      // end of options
		{[]byte{2, 3, 5, 3, 3, 1}, synOptions{0, 1, true}},                           // MSS of one byte
		{[]byte{8, 10, 0, 0, 0, 0, 0, 0, 0, 0, 2, 4, 5, 180}, synOptions{mss: 1460}}, // timestamps
		{[]byte{5, 0, 2, 4, 5, 180}, synOptions{}},                                   // length 0
		{[]byte{5, 1, 2, 4, 5, 180}, synOptions{}},
		{[]byte{2, 4, 5}, synOptions{}}, // truncated
		{[]byte{2}, synOptions{}},
	} {
		if got := parseOptions(c.in); got != c.want {
			t.Errorf("% x: %+v, want %+v", c.in, got, c.want)
		}
	}
}

// TestChecksums checks that packets have correct checksums after the kernel has completed them.
func TestChecksums(t *testing.T) {
	payload := text(1001)
	for _, to := range []string{"10.95.0.1:5", "[fd95::1]:5"} {
		a := outSegment{
			from: netip.MustParseAddrPort(map[bool]string{true: "[2001:db8::1]:80", false: "192.0.2.1:80"}[to[0] == '[']),
			to:   netip.MustParseAddrPort(to), seq: 0x89abcdef, ack: 0xfedcba98, flags: flagACK, window: 0xffff, mss: 1460,
		}
		b := make([]byte, a.headers()+len(payload))
		for i := range b {
			b[i] = 0xa5 // remains of an earlier packet
		}
		a.write(b, len(payload))
		copy(b[a.headers():], payload)
		network := b[vnetHeader:]
		start, offset := int(binary.NativeEndian.Uint16(b[6:])), int(binary.NativeEndian.Uint16(b[8:]))
		// Complete the checksum as the kernel does for VIRTIO_NET_HDR_F_NEEDS_CSUM.
		binary.BigEndian.PutUint16(network[start+offset:], ^fold(sum(network[start:])))
		if got := fold(sum(network[start:]) + pseudo(a.from.Addr(), a.to.Addr(), unix.IPPROTO_TCP, len(network)-start)); got != 0xffff {
			t.Errorf("%s: sum of the TCP segment is %#x", to, got)
		}
		s, ok := parse(network)
		if !ok || s.seq != a.seq || s.ack != a.ack || s.window != a.window || s.from != a.from || s.to != a.to || !bytes.Equal(s.payload, payload) {
			t.Errorf("%s: parsed after writing: %+v", to, s)
		}
	}
}

func TestSum(t *testing.T) {
	p := text(100)
	p[0], p[1] = 0xff, 0xff
	for n := range p {
		var want uint32
		for i := 0; i < n; i += 2 {
			word := uint32(p[i]) << 8
			if i+1 < n {
				word |= uint32(p[i+1])
			}
			want += word
		}
		for want > 0xffff {
			want = want>>16 + want&0xffff
		}
		if got := fold(sum(p[:n])); got != uint16(want) {
			t.Errorf("%d bytes: %#x, want %#x", n, got, want)
		}
	}
}

func TestBefore(t *testing.T) {
	for _, c := range []struct {
		a, b uint32
		want bool
	}{{1, 2, true}, {2, 1, false}, {1, 1, false}, {0xffffffff, 0, true}, {0, 0xffffffff, false}} {
		if got := before(c.a, c.b); got != c.want {
			t.Errorf("%#x before %#x: %v", c.a, c.b, got)
		}
	}
}
