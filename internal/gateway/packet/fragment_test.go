// SPDX-License-Identifier: Apache-2.0

package packet

import (
	"encoding/binary"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"
)

// TestFragments checks that fragments that are malformed, too long or incomplete are dropped and their memory is freed.
func TestFragments(t *testing.T) {
	all := Partial{}
	from, to := netip.MustParseAddr("10.95.0.1"), netip.MustParseAddr("192.0.2.1")
	piece := func(id uint16, at, n int, more bool) []byte {
		b := make([]byte, IPv4Header+n)
		WriteIP(b, from, to, unix.IPPROTO_UDP, n)
		field := uint16(at / 8)
		if more {
			field |= 0x2000
		}
		binary.BigEndian.PutUint16(b[4:], id)
		binary.BigEndian.PutUint16(b[6:], field)
		return b
	}
	pieces := func(list ...[]byte) (whole []byte) {
		for _, b := range list {
			if w, _ := all.Reassemble(b); w != nil {
				whole = w
			}
		}
		return whole
	}
	if w := pieces(piece(1, 0, 800, true), piece(2, 0, 16, true), piece(1, 800, 7, false)); len(w) != IPv4Header+807 {
		t.Errorf("reassembled packet of two fragments has %d bytes", len(w))
	}
	for name, w := range map[string][]byte{
		"a hole":                 pieces(piece(3, 0, 800, true), piece(3, 808, 8, false)),
		"overlap":                pieces(piece(4, 0, 800, true), piece(4, 792, 8, false)),
		"missing first fragment": pieces(piece(5, 800, 8, false)),
		"odd length":             pieces(piece(6, 0, 801, true), piece(6, 800, 8, false)),
		"nothing":                pieces(piece(7, 0, 0, true)),
		"ping of death":          pieces(piece(8, 0, 65512, true), piece(8, 65512, 100, false)),
	} {
		if w != nil {
			t.Errorf("%s: %d bytes", name, len(w))
		}
	}
	for i := range 1000 {
		pieces(piece(uint16(1000+i), 0, 8, true))
	}
	if n := len(all); n > maxPartial {
		t.Errorf("%d incomplete packets remain", n)
	}
}
