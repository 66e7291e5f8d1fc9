// SPDX-License-Identifier: Apache-2.0

package isolate

import (
	"testing"

	"golang.org/x/sys/unix"
)

func TestRemoved(t *testing.T) {
	event := func(mask uint32, name string) []byte {
		p := make([]byte, unix.SizeofInotifyEvent+16)
		p[4], p[5], p[6], p[7] = byte(mask), byte(mask>>8), byte(mask>>16), byte(mask>>24)
		p[12] = 16
		copy(p[16:], name)
		return p
	}
	for _, test := range []struct {
		events []byte
		want   bool
	}{
		{nil, false},
		{event(unix.IN_DELETE, "other"), false},
		{event(unix.IN_DELETE, "netns1"), false},
		{event(unix.IN_DELETE, "netns"), true},
		{append(event(unix.IN_DELETE, "other"), event(unix.IN_MOVED_FROM, "netns")...), true},
		{event(unix.IN_DELETE_SELF, ""), true},
		{event(unix.IN_DELETE, "other")[:20], true},
	} {
		if got := removed(test.events, "netns"); got != test.want {
			t.Errorf("%q: %v", test.events, got)
		}
	}
}
