// SPDX-License-Identifier: Apache-2.0

package nlattr

import (
	"bytes"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

func TestAppendAndVisit(t *testing.T) {
	b := Append(nil, 1, []byte("abcde\x00"))
	b = Append(b, 2|unix.NLA_F_NESTED, Append(nil, 7, []byte{0, 0, 1, 0}))
	if len(b)%unix.NLA_ALIGNTO != 0 {
		t.Fatalf("%d bytes", len(b))
	}
	var kinds []uint16
	if err := Visit(b, func(kind uint16, _ []byte) { kinds = append(kinds, kind) }); err != nil || !slices.Equal(kinds, []uint16{1, 2}) {
		t.Errorf("%v, %v", kinds, err)
	}
	if s := String(b, 1); s != "abcde" {
		t.Errorf("%q", s)
	}
	if n, ok := Uint32(Find(b, 2), 7); n != 256 || !ok {
		t.Errorf("%d, %v", n, ok)
	}
	if Find(b, 3) != nil {
		t.Error("found an attribute that is not there")
	}
	if n := testing.AllocsPerRun(10, func() { _ = Visit(b, func(uint16, []byte) {}) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// The kernel's answers are trusted as little as any other input.
func FuzzVisit(f *testing.F) {
	f.Add(Append(Append(nil, 1, []byte{1}), 2, []byte{1, 2, 3, 4}))
	f.Add([]byte{3, 0, 2, 0})
	f.Add([]byte{200, 0, 2, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		var visited, yielded [][]byte
		err := Visit(b, func(_ uint16, value []byte) { visited = append(visited, value) })
		for _, value := range Attributes(b).All {
			yielded = append(yielded, value)
		}
		if !slices.EqualFunc(visited, yielded, bytes.Equal) {
			t.Errorf("Visit has %d attributes, All %d (%v)", len(visited), len(yielded), err)
		}
	})
}
