// SPDX-License-Identifier: Apache-2.0

//go:build linux

package room

import (
	"testing"

	"golang.org/x/sys/unix"
)

// TestWithoutMeminfo checks that the estimate without SO_MEMINFO is not larger than the estimate with it.
func TestWithoutMeminfo(t *testing.T) {
	p, err := connect4()
	if err != nil {
		t.Fatal(err)
	}
	defer p.close()
	if err := unix.SetNonblock(p.from, true); err != nil {
		t.Fatal(err)
	}
	for range 300 {
		if _, err := unix.Write(p.from, make([]byte, 7001)); err != nil {
			break
		}
		s, err := ReadSnapshot(p.from)
		if err != nil {
			t.Fatal(err)
		}
		guessed := s
		guessed.boundQueued()
		if guessed.Queued < s.Queued {
			t.Fatalf("upper bound %+v of %+v", guessed, s)
		}
	}
}
