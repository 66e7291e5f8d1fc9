// SPDX-License-Identifier: Apache-2.0

package mountinfo_test

import (
	"reflect"
	"testing"

	"sockeye/internal/mountinfo"
)

func TestParse(t *testing.T) {
	for text, want := range map[string][]mountinfo.Mount{
		"31 25 0:26 / /sys/fs/cgroup ro shared:9 master:3 - tmpfs tmpfs ro,mode=755\n" +
			"32 31 0:27 /../.. /b rw,nosuid,nodev - cgroup2 cgroup2 rw,nsdelegate\n": {
			{31, "/", "/sys/fs/cgroup", []string{"ro"}, "tmpfs"},
			{32, "/../..", "/b", []string{"rw", "nosuid", "nodev"}, "cgroup2"},
		},
		`1 2 0:1 /r\134t /a\040b\011c\012d\134040 rw - ext4 /dev/sda1 rw`: {{1, `/r\t`, "/a b\tc\nd\\040", []string{"rw"}, "ext4"}},
		`1 2 0:1 / /a\043b rw - ext4 x rw`:                                {{1, "/", `/a\043b`, []string{"rw"}, "ext4"}}, // only in sources
		"":                                                                nil,
		"x\n\n - \n":                                                      nil,
		"1 - cgroup2 x":                                                   nil,
		"1 2 0:1 / /a rw":                                                 nil,
		"1 2 0:1 / /a - ext4 x rw":                                        nil,
		"1 2 0:1 / /a rw - ext4":                                          nil,
		"a 2 0:1 / /a rw - ext4 x rw":                                     nil,
		"-1 2 0:1 / /a rw - ext4 x rw":                                    nil,
		"x\n1 2 0:1 / /a rw - ext4 x rw\ny - z":                           {{1, "/", "/a", []string{"rw"}, "ext4"}},
	} {
		if got := mountinfo.Parse(text); !reflect.DeepEqual(got, want) {
			t.Errorf("%q: got %v, want %v", text, got, want)
		}
	}
}

func TestRead(t *testing.T) {
	mounts, err := mountinfo.Read()
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range mounts {
		if m.Point == "/proc" && m.Type == "proc" {
			return
		}
	}
	t.Errorf("no /proc among %v", mounts)
}
