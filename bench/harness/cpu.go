// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// CPUTime returns the CPU time of processes, including their ended threads, and of kernel threads, with the interrupts that
// they have served.
func CPUTime(pids ...int) (sum time.Duration, err error) {
	const scheduler = 2 // CPUCLOCK_SCHED in include/linux/posix-timers_types.h, Linux 6.18; see clock_getcpuclockid(3)
	for _, pid := range pids {
		var t unix.Timespec
		if err := unix.ClockGettime(int32(^pid<<3|scheduler), &t); err != nil {
			return 0, fmt.Errorf("read CPU time of process %d: %w", pid, err)
		}
		sum += time.Duration(t.Nano())
	}
	return sum, nil
}

// SoftirqThread returns the ksoftirqd of a CPU, or nothing in a PID namespace that does not show it.
func SoftirqThread(cpu int) []int {
	names, _ := filepath.Glob("/proc/[0-9]*/comm")
	for _, name := range names {
		b, _ := os.ReadFile(name)
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(name)))
		if err == nil && string(b) == fmt.Sprintf("ksoftirqd/%d\n", cpu) {
			return []int{pid}
		}
	}
	return nil
}
