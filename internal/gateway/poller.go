// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// While no goroutine runs, the monitor of the Go runtime sleeps (sysmon in runtime/proc.go, Go 1.26). The next system call that is
// not raw wakes the monitor, which then runs sixty times within milliseconds. A gateway whose packets come in bursts, for example with
// a round-trip time of 100 ms, spent half of its CPU time on the monitor. The loop therefore waits in the runtime's poller, where an
// event does not wake the monitor, and makes raw system calls for packets and their data.

const (
	// shortWait is how long the loop waits in a raw system call before it waits in the runtime's poller. A raw system call keeps
	// the runtime's processor, which takes less time than its release, but no other goroutine can run.
	shortWait = 8 * time.Millisecond
	// yieldInterval is the time after which other goroutines may run. The runtime preempts a goroutine after 10 ms by a signal.
	yieldInterval = 8 * time.Millisecond
	// monitorInterval is the time without a wait in the runtime's poller after which the loop wakes the monitor: until then nobody
	// polls for other goroutines.
	monitorInterval = 100 * time.Millisecond
)

// A poller waits for the events of an epoll instance.
type poller struct {
	epoll int
	file  *os.File // owns epoll
	conn  syscall.RawConn

	yielded   time.Time // end of the last runtime.Gosched
	waited    time.Time // end of the last wait in the runtime's poller
	monitored bool      // the monitor was woken since then
}

func newPoller() (*poller, error) {
	epoll, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("make epoll: %w", err)
	}
	if err := unix.SetNonblock(epoll, true); err != nil { // otherwise os.NewFile does not use the runtime's poller
		unix.Close(epoll)
		return nil, fmt.Errorf("make epoll non-blocking: %w", err)
	}
	p := &poller{epoll: epoll, file: os.NewFile(uintptr(epoll), "epoll")}
	if p.conn, err = p.file.SyscallConn(); err == nil {
		err = p.file.SetReadDeadline(time.Time{})
	}
	if err != nil {
		p.close()
		return nil, fmt.Errorf("wait in the runtime's poller: %w", err)
	}
	return p, nil
}

func (p *poller) close() { p.file.Close() }

// wait waits up to timeout milliseconds for events (-1: without limit). It returns the number of events, and the time.
func (p *poller) wait(events []unix.EpollEvent, timeout int, clock func() time.Time) (n int, now time.Time, err error) {
	short := int(shortWait / time.Millisecond)
	if timeout >= 0 {
		short = min(short, timeout)
	}
	n, err = p.poll(events, short)
	now = clock()
	if n == 0 && err == nil && short != timeout {
		n, err = p.waitLong(events, max(timeout-short, -1))
		now = clock()
		p.yielded, p.waited, p.monitored = now, now, false
		return n, now, err
	}
	if now.Sub(p.yielded) >= yieldInterval {
		p.yielded = now
		if now.Sub(p.waited) >= monitorInterval && !p.monitored {
			p.monitored = true
			_, _, _ = unix.Syscall(unix.SYS_GETPID, 0, 0, 0)
		}
		runtime.Gosched()
	}
	return n, now, err
}

// waitLong waits in the runtime's poller.
func (p *poller) waitLong(events []unix.EpollEvent, timeout int) (n int, err error) {
	var deadline time.Time
	if timeout >= 0 {
		deadline = time.Now().Add(time.Duration(timeout) * time.Millisecond)
	}
	if err := p.file.SetReadDeadline(deadline); err != nil {
		return 0, err
	}
	failed := p.conn.Read(func(uintptr) bool {
		n, err = p.poll(events, 0)
		return n > 0 || err != nil
	})
	if failed != nil && !errors.Is(failed, os.ErrDeadlineExceeded) {
		return 0, failed
	}
	return n, err
}

// poll calls epoll_pwait(2) without releasing the runtime's processor.
func (p *poller) poll(events []unix.EpollEvent, timeout int) (n int, err error) {
	ready, _, errno := unix.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(p.epoll), uintptr(unsafe.Pointer(unsafe.SliceData(events))),
		uintptr(len(events)), uintptr(timeout), 0, 0)
	if errno != 0 {
		return 0, errno
	}
	return int(ready), nil
}
