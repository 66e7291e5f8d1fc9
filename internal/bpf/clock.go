// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Hz is the number of the kernel's ticks in a second. The coarse clocks move
// once a tick (hrtimer_get_res in kernel/time/hrtimer.c, Linux 6.18), so that
// no kernel configuration needs to be found.
func Hz() (uint32, error) {
	var resolution unix.Timespec
	if err := unix.ClockGetres(unix.CLOCK_MONOTONIC_COARSE, &resolution); err != nil {
		return 0, fmt.Errorf("read resolution of coarse clock: %w", err)
	}
	ns := resolution.Nano()
	if ns <= 0 {
		return 0, errors.New("read resolution of coarse clock: it is 0")
	}
	return uint32((int64(time.Second) + ns/2) / ns), nil
}

// bootTime is CLOCK_BOOTTIME, as bpf_ktime_get_boot_ns reads it.
func bootTime() time.Duration {
	var now unix.Timespec
	// It cannot fail for a clock that every kernel has.
	_ = unix.ClockGettime(unix.CLOCK_BOOTTIME, &now)
	return time.Duration(now.Nano())
}

// Stamping has the kernel note when packets reach the host, as long as it is
// open: for all packets of the host, and all network namespaces.
type Stamping struct{ fd int }

// OpenStamping needs no privilege.
func OpenStamping() (*Stamping, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open socket for arrival times: %w", err)
	}
	// It need not be bound (sock_enable_timestamp in net/core/sock.c).
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TIMESTAMPNS, 1); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("ask for arrival times: %w", os.NewSyscallError("setsockopt", err))
	}
	return &Stamping{fd}, nil
}

// Close lets the kernel stop, unless another socket asks for arrival times.
func (s *Stamping) Close() error { return unix.Close(s.fd) }

// RefreshClock tells the programs how CLOCK_REALTIME, in which arrivals are
// stamped, relates to CLOCK_MONOTONIC. It changes only when the clock is set.
func (t *Trace) RefreshClock() error {
	return t.setState(func(s *TraceState) { s.Clock = int64(ClockOffset()) })
}

// ClockOffset is CLOCK_REALTIME less CLOCK_MONOTONIC, to a fraction of a
// microsecond: of some tries, the one that took least.
func ClockOffset() time.Duration {
	const tries = 16
	var offset, least int64
	for i := range tries {
		before, real, after := monotonic(), clock(unix.CLOCK_REALTIME), monotonic()
		if took := after - before; i == 0 || took < least {
			least, offset = took, real-before-took/2
		}
	}
	return time.Duration(offset)
}

// monotonic is CLOCK_MONOTONIC in nanoseconds, as bpf_ktime_get_ns reads it.
func monotonic() int64 { return clock(unix.CLOCK_MONOTONIC) }

func clock(id int32) int64 {
	var now unix.Timespec
	// It cannot fail for a clock that every kernel has.
	_ = unix.ClockGettime(id, &now)
	return now.Nano()
}
