// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"os"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestCPUTime tests that CPUTime counts the CPU time of a thread that has exited.
func TestCPUTime(t *testing.T) {
	before, err := CPUTime(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	const work = 30 * time.Millisecond
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // never unlocked, so that the thread exits
		var now unix.Timespec
		_ = unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &now)
		for end := now.Nano() + int64(work); now.Nano() < end; {
			_ = unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &now)
		}
	}()
	<-done
	after, err := CPUTime(os.Getpid())
	if err != nil || after-before < work {
		t.Errorf("CPUTime counted %v of %v (%v)", after-before, work, err)
	}
}
