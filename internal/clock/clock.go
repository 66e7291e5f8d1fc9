// SPDX-License-Identifier: Apache-2.0

// Package clock reads the clocks of the kernel as BPF programs see them.
package clock

import (
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Hz returns the kernel's CONFIG_HZ, in ticks per second, from the resolution of the coarse clocks, which advance once a
// tick (hrtimer_get_res, Linux 6.18).
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

// Boottime returns CLOCK_BOOTTIME, which bpf_ktime_get_boot_ns reads.
func Boottime() time.Duration { return read(unix.CLOCK_BOOTTIME) }

// BootTime returns the time at which CLOCK_BOOTTIME was 0.
func BootTime() time.Time { return time.Now().Add(-Boottime()) }

// MonotonicZero returns the time at which CLOCK_MONOTONIC was 0.
func MonotonicZero() time.Time { return time.Now().Add(-Monotonic()) }

// StartedAt converts the start time of a process, in clock ticks since boot. USER_HZ is 100 on all architectures.
func StartedAt(startTime uint64, boot time.Time) time.Time {
	return boot.Add(time.Duration(startTime) * 10 * time.Millisecond)
}

// Stamping makes the kernel timestamp all received packets of the host, in all network namespaces, until Close.
type Stamping struct{ fd int }

// OpenStamping enables receive timestamps by a socket with SO_TIMESTAMPNS. It needs no privilege.
func OpenStamping() (*Stamping, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open socket for arrival times: %w", err)
	}
	// The socket need not be bound (sock_enable_timestamp in net/core/sock.c).
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TIMESTAMPNS, 1); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("ask for arrival times: %w", os.NewSyscallError("setsockopt", err))
	}
	return &Stamping{fd}, nil
}

// Close disables receive timestamps unless another socket requests them.
func (s *Stamping) Close() error { return unix.Close(s.fd) }

// Offset returns CLOCK_REALTIME minus CLOCK_MONOTONIC, with an error below a microsecond: the fastest of 16 readings.
func Offset() time.Duration {
	const tries = 16
	var offset, least time.Duration
	for i := range tries {
		before, real, after := Monotonic(), read(unix.CLOCK_REALTIME), Monotonic()
		if took := after - before; i == 0 || took < least {
			least, offset = took, real-before-took/2
		}
	}
	return offset
}

// Monotonic returns CLOCK_MONOTONIC, which bpf_ktime_get_ns reads.
func Monotonic() time.Duration { return read(unix.CLOCK_MONOTONIC) }

func read(id int32) time.Duration {
	var now unix.Timespec
	// clock_gettime fails for unknown clocks only.
	_ = unix.ClockGettime(id, &now)
	return time.Duration(now.Nano())
}
