// SPDX-License-Identifier: Apache-2.0

package transfers

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// A cpuClock counts the CPU time of the calling thread in nanoseconds, and optionally
// that of the softirq thread of its CPU. The time includes interrupts during the
// thread's execution, but not interrupts of an idle CPU.
type cpuClock struct {
	softirq int32 // clock of the softirq thread; 0: none
}

func openCPUClock(cpu int, withSoftirq bool) cpuClock {
	if !withSoftirq {
		return cpuClock{}
	}
	names, _ := filepath.Glob("/proc/[0-9]*/comm")
	for _, name := range names {
		b, _ := os.ReadFile(name)
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(name)))
		if err == nil && string(b) == fmt.Sprintf("ksoftirqd/%d\n", cpu) {
			const scheduler = 2 // CPUCLOCK_SCHED in include/linux/posix-timers_types.h, Linux 6.18
			return cpuClock{int32(^pid<<3 | scheduler)}
		}
	}
	return cpuClock{}
}

func (c cpuClock) now() time.Duration {
	var own, softirq unix.Timespec
	// Both clocks exist; a clock that cannot be read counts as 0.
	_ = unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &own)
	if c.softirq != 0 {
		_ = unix.ClockGettime(c.softirq, &softirq)
	}
	return time.Duration(own.Nano() + softirq.Nano())
}

// lastCPUs returns the last two CPUs that this process may use. They are equal if the
// process may use one CPU only.
func lastCPUs() (last, other int, err error) {
	var all unix.CPUSet
	if err := unix.SchedGetaffinity(0, &all); err != nil {
		return 0, 0, fmt.Errorf("read CPU affinity: %w", err)
	}
	last, other = -1, -1
	for cpu := range len(all) * 64 {
		if all.IsSet(cpu) {
			last, other = cpu, last
		}
	}
	if other < 0 {
		other = last
	}
	return last, other, nil
}
