// SPDX-License-Identifier: Apache-2.0

package api

import (
	"fmt"
	"strings"
	"testing"
)

// TestReaderLags assigns the lag of traced cgroups to the members that they have.
func TestReaderLags(t *testing.T) {
	lag := func(n int64) *int64 { return &n }
	frame := &Frame{
		Services: []LiveService{{Slots: []LiveSlot{{Cgroup: "/a/b"}, {Cgroup: "/a/bc"}, {Cgroup: "/d"}, {}}}},
		Groups: []LiveGroup{{Path: "/a", Oldest: lag(1)}, {Path: "/a/b", Oldest: lag(5)}, {Path: "/a/b", Oldest: lag(3)}, {Path: "/d"},
			{Path: "/", Oldest: lag(0)}},
	}
	frame.SetReaderLags()
	var got []string
	for _, s := range frame.Services[0].Slots {
		text := "none"
		if s.ReaderLag != nil {
			text = fmt.Sprint(*s.ReaderLag)
		}
		got = append(got, text)
	}
	if want := "5 1 0 none"; strings.Join(got, " ") != want {
		t.Errorf("lags %q, want %q", got, want)
	}
}
