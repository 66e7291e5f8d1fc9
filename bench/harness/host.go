// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

func KernelRelease() string {
	var u unix.Utsname
	_ = unix.Uname(&u)
	return unix.ByteSliceToString(u.Release[:])
}

// MachineCPU is what all CPUs have worked since the start, in ticks of 10 ms.
func MachineCPU() time.Duration {
	b, _ := os.ReadFile("/proc/stat")
	line, _, _ := strings.Cut(string(b), "\n")
	var ticks int64
	for i, f := range strings.Fields(line) { // cpu user nice system idle iowait irq softirq
		if n, err := strconv.ParseInt(f, 10, 64); err == nil && slices.Contains([]int{1, 2, 3, 6, 7}, i) {
			ticks += n
		}
	}
	return time.Duration(ticks) * 10 * time.Millisecond
}

// Snmp is a counter of /proc/net/snmp, 0 if it is not there: a line of names,
// then one of values, for each protocol.
func Snmp(text, protocol, name string) uint64 {
	var names []string
	for line := range strings.Lines(text) {
		f := strings.Fields(line)
		if len(f) == 0 || f[0] != protocol+":" {
			continue
		}
		if names == nil {
			names = f
			continue
		}
		for i := range min(len(f), len(names)) {
			if names[i] == name {
				v, _ := strconv.ParseUint(f[i], 10, 64)
				return v
			}
		}
	}
	return 0
}

func BuildSockeye(ctx context.Context, dir string) (string, error) {
	binary := filepath.Join(dir, "sockeye")
	build := exec.CommandContext(ctx, "go", "build", "-o", binary, "./cmd/sockeye")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build sockeye: %w (run this in the repository, or give -sockeye)\n%s", err, out)
	}
	return binary, nil
}
