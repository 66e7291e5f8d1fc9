// SPDX-License-Identifier: Apache-2.0

package packet

import (
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"
)

// FuzzParse checks that no part of a parsed packet is outside of it, and that the packet is what its headers say.
func FuzzParse(f *testing.F) {
	for _, a := range []string{"10.95.0.1:1", "[fd95::1]:1"} {
		from := netip.MustParseAddrPort(a)
		p := build(from, from, 1, 2, SYN, 3, []byte("payload"))
		f.Add(p)
		f.Add(p[:len(p)-8])
	}
	f.Fuzz(func(t *testing.T, p []byte) {
		s, ok := Parse(p)
		if !ok {
			return
		}
		if len(s.Network) > len(p) || len(s.Payload) > len(s.Network) {
			t.Fatalf("payload of %d bytes in a packet of %d bytes, parsed from %d bytes", len(s.Payload), len(s.Network), len(p))
		}
		if s.From.Addr().Is4() != s.To.Addr().Is4() || !s.From.IsValid() {
			t.Fatalf("invalid addresses: from %v to %v", s.From, s.To)
		}
		switch s.Protocol {
		case unix.IPPROTO_TCP:
			// The serialization of a parsed packet must equal the packet.
			q := build(s.From, s.To, s.Seq, s.Ack, s.Flags, s.Window, s.Payload[:min(len(s.Payload), 1000)])
			if r, ok := Parse(q); !ok || r.Seq != s.Seq || r.Ack != s.Ack || r.Flags != s.Flags || r.From != s.From || r.To != s.To {
				t.Fatalf("%+v, after serialization %+v", s, r)
			}
		case unix.IPPROTO_UDP, unix.IPPROTO_ICMP, unix.IPPROTO_ICMPV6:
		default:
			t.Fatalf("protocol %d", s.Protocol)
		}
	})
}
