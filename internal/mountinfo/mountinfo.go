// SPDX-License-Identifier: Apache-2.0

// Package mountinfo reads the mounts of a mount namespace.
package mountinfo

import (
	"os"
	"strconv"
	"strings"
)

// Mount is a line of /proc/PID/mountinfo (proc_pid_mountinfo(5)).
type Mount struct {
	ID      uint64
	Root    string // the directory of the file system that is at Point
	Point   string
	Options []string // of the mount, not of the file system: nosuid
	Type    string   // of the file system: cgroup2
}

// unescape decodes the characters that the kernel escapes (mangle_path in fs/seq_file.c).
var unescape = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)

// Read returns the mounts that this process sees, in the order of the kernel.
func Read() ([]Mount, error) {
	text, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	return Parse(string(text)), nil
}

// Parse returns the mounts of the text of a /proc/PID/mountinfo. It skips malformed lines.
func Parse(text string) []Mount {
	var mounts []Mount
	for line := range strings.Lines(text) {
		// ID PARENT MAJOR:MINOR ROOT MOUNTPOINT OPTIONS [FIELDS] - TYPE SOURCE OPTIONS
		before, after, _ := strings.Cut(line, " - ")
		fields := strings.Fields(before)
		kind, _, found := strings.Cut(after, " ")
		if len(fields) < 6 || !found {
			continue
		}
		if id, err := strconv.ParseUint(fields[0], 10, 64); err == nil {
			mounts = append(mounts, Mount{id, unescape.Replace(fields[3]), unescape.Replace(fields[4]), strings.Split(fields[5], ","), kind})
		}
	}
	return mounts
}
