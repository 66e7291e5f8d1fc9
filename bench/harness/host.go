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
)

// MachineCPU returns the CPU time of all CPUs since boot without idle time, in steps of 10 ms.
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

// SNMP returns a counter of the text of /proc/net/snmp, and 0 if the counter is missing. The file has a line of names and
// a line of values for each protocol.
func SNMP(text, protocol, name string) uint64 {
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

// BuildSockeye builds the binary from the repository that is the current directory, and returns its path.
func BuildSockeye(ctx context.Context, dir string) (string, error) {
	binary := filepath.Join(dir, "sockeye")
	build := exec.CommandContext(ctx, "go", "build", "-o", binary, "./cmd/sockeye")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build sockeye: %w (run this in the repository, or give -sockeye)\n%s", err, out)
	}
	return binary, nil
}
