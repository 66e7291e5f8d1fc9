// SPDX-License-Identifier: Apache-2.0

package packet

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"
)

// build returns a TCP segment of the guest. A SYN has an MSS of 1460 and a window scale of 7.
func build(from, to netip.AddrPort, seq, ack uint32, flags uint8, window uint16, payload []byte) []byte {
	a := Outgoing{From: from, To: to, Seq: seq, Ack: ack, Flags: flags, Window: window, MSS: 1460, WindShift: 7, WindowScaling: true}
	b := make([]byte, a.Headers()+len(payload))
	a.Write(b, len(payload))
	copy(b[a.Headers():], payload)
	return b[VnetHeader:]
}

// text returns bytes of which neighbours differ.
func text(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i>>8 ^ i)
	}
	return b
}

func TestParse(t *testing.T) {
	from4, to4 := netip.MustParseAddrPort("10.95.0.1:1234"), netip.MustParseAddrPort("192.0.2.1:80")
	from6, to6 := netip.MustParseAddrPort("[fd95::1]:1234"), netip.MustParseAddrPort("[2001:db8::1]:80")
	payload := []byte("payload")
	tcp4 := build(from4, to4, 1, 2, SYN, 3, payload)
	tcp6 := build(from6, to6, 1, 2, SYN, 3, payload)
	change := func(p []byte, f func(p []byte)) []byte {
		p = bytes.Clone(p)
		f(p)
		return p
	}
	with := func(headers ...[]byte) []byte { // extension headers before TCP
		p := bytes.Clone(tcp6[:IPv6Header])
		for _, h := range headers {
			p = append(p, h...)
		}
		p = append(p, tcp6[IPv6Header:]...)
		binary.BigEndian.PutUint16(p[4:], uint16(len(p)-IPv6Header))
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
		{"TCP header of 16 bytes", change(tcp4, func(p []byte) { p[IPv4Header+12] = 0x40 }), false},
		{"TCP header beyond the end", change(tcp6, func(p []byte) { p[IPv6Header+12] = 0xf0 }), false},
		{"SCTP", change(tcp4, func(p []byte) { p[9] = unix.IPPROTO_SCTP }), false},
		{"ICMP in IPv6", change(tcp6, func(p []byte) { p[6] = unix.IPPROTO_ICMP }), false},
		{"UDP with a wrong length", change(tcp4, func(p []byte) { p[9] = unix.IPPROTO_UDP; p[IPv4Header+5] = 200 }), false},
		{"extension headers", with([]byte{unix.IPPROTO_DSTOPTS, 0, 0, 0, 0, 0, 0, 0}, []byte{unix.IPPROTO_TCP, 0, 0, 0, 0, 0, 0, 0}), true},
		{"extension header beyond the end", with([]byte{unix.IPPROTO_TCP, 200, 0, 0, 0, 0, 0, 0}), false},
		{"fragment of IPv6", with([]byte{unix.IPPROTO_FRAGMENT, 0, 0, 0, 0, 0, 0, 0}, []byte{unix.IPPROTO_TCP, 0, 0, 0, 0, 0, 0, 0}), false},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, ok := Parse(c.packet)
			if ok != c.ok {
				t.Fatalf("parsed: %v, want %v", ok, c.ok)
			}
			if !ok {
				return
			}
			if s.From.Port() != 1234 || s.To.Port() != 80 || s.Seq != 1 || s.Ack != 2 || s.Flags != SYN || s.Window != 3 {
				t.Errorf("%+v", s)
			}
			if s.Options != (SYNOptions{MSS: 1460, WindShift: 7, WindowScaling: true}) {
				t.Errorf("options %+v", s.Options)
			}
			if c.name != "larger than 64 KB" && !bytes.Equal(s.Payload, payload) {
				t.Errorf("payload %q", s.Payload)
			}
			if s.Length() != uint32(len(s.Payload))+1 {
				t.Errorf("length %d", s.Length())
			}
		})
	}
}

func TestOptions(t *testing.T) {
	for _, c := range []struct {
		in   []byte
		want SYNOptions
	}{
		{nil, SYNOptions{}},
		{[]byte{2, 4, 5, 180, 3, 3, 14}, SYNOptions{1460, 14, true}},
		{[]byte{1, 1, 3, 3, 255}, SYNOptions{0, 14, true}},                           // RFC 7323: limited to 14
		{[]byte{0, 2, 4, 5, 180}, SYNOptions{}},                                      // end of options
		{[]byte{2, 3, 5, 3, 3, 1}, SYNOptions{0, 1, true}},                           // MSS of one byte
		{[]byte{8, 10, 0, 0, 0, 0, 0, 0, 0, 0, 2, 4, 5, 180}, SYNOptions{MSS: 1460}}, // timestamps
		{[]byte{5, 0, 2, 4, 5, 180}, SYNOptions{}},                                   // length 0
		{[]byte{5, 1, 2, 4, 5, 180}, SYNOptions{}},
		{[]byte{2, 4, 5}, SYNOptions{}}, // truncated
		{[]byte{2}, SYNOptions{}},
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
		a := Outgoing{
			From: netip.MustParseAddrPort(map[bool]string{true: "[2001:db8::1]:80", false: "192.0.2.1:80"}[to[0] == '[']),
			To:   netip.MustParseAddrPort(to), Seq: 0x89abcdef, Ack: 0xfedcba98, Flags: ACK, Window: 0xffff, MSS: 1460,
		}
		b := make([]byte, a.Headers()+len(payload))
		for i := range b {
			b[i] = 0xa5 // remains of an earlier packet
		}
		a.Write(b, len(payload))
		copy(b[a.Headers():], payload)
		network := b[VnetHeader:]
		start, offset := int(binary.NativeEndian.Uint16(b[6:])), int(binary.NativeEndian.Uint16(b[8:]))
		// Complete the checksum as the kernel does for VIRTIO_NET_HDR_F_NEEDS_CSUM.
		binary.BigEndian.PutUint16(network[start+offset:], ^Fold(Sum(network[start:])))
		if got := Fold(Sum(network[start:]) + Pseudo(a.From.Addr(), a.To.Addr(), unix.IPPROTO_TCP, len(network)-start)); got != 0xffff {
			t.Errorf("%s: sum of the TCP segment is %#x", to, got)
		}
		s, ok := Parse(network)
		if !ok || s.Seq != a.Seq || s.Ack != a.Ack || s.Window != a.Window || s.From != a.From || s.To != a.To || !bytes.Equal(s.Payload, payload) {
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
		if got := Fold(Sum(p[:n])); got != uint16(want) {
			t.Errorf("%d bytes: %#x, want %#x", n, got, want)
		}
	}
}

func TestBefore(t *testing.T) {
	for _, c := range []struct {
		a, b uint32
		want bool
	}{{1, 2, true}, {2, 1, false}, {1, 1, false}, {0xffffffff, 0, true}, {0, 0xffffffff, false}} {
		if got := Before(c.a, c.b); got != c.want {
			t.Errorf("%#x before %#x: %v", c.a, c.b, got)
		}
	}
}
