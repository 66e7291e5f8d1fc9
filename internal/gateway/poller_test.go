// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"errors"
	"net"
	"os"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/room"
)

func newTestPoller(t *testing.T) *poller {
	t.Helper()
	p, err := newPoller()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.close)
	return p
}

// watchTestFD adds a descriptor to the poller and closes the descriptor at the end of the test.
func watchTestFD(t *testing.T, p *poller, fd int, err error) int {
	t.Helper()
	if err == nil {
		t.Cleanup(func() { unix.Close(fd) })
		err = unix.EpollCtl(p.epoll, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(fd)})
	}
	if err != nil {
		t.Fatal(err)
	}
	return fd
}

// waitFor waits as the loop does: again if a signal of the runtime interrupts the system call.
func waitFor(p *poller, events []unix.EpollEvent, timeout int) (n int, now time.Time, err error) {
	for {
		if n, now, err = p.wait(events, timeout, time.Now); !errors.Is(err, unix.EINTR) {
			return n, now, err
		}
	}
}

// TestPollerWaits is that wait returns events that occur before it, in its raw system call, and in the runtime's poller.
func TestPollerWaits(t *testing.T) {
	p := newTestPoller(t)
	event, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	watchTestFD(t, p, event, err)
	events := make([]unix.EpollEvent, 4)
	one := []byte{1, 0, 0, 0, 0, 0, 0, 0}
	for _, c := range []struct {
		name    string
		after   time.Duration
		timeout int
	}{
		{"before", 0, -1}, {"before, no timeout left", 0, 0}, {"short", shortWait / 4, -1}, {"long", 5 * shortWait, -1},
		{"long, with a timeout", 5 * shortWait, 60_000}, {"long again", 8 * shortWait, 60_000}, {"without a timeout again", 5 * shortWait, -1},
	} {
		if c.after == 0 {
			if _, err := unix.Write(event, one); err != nil {
				t.Fatal(err)
			}
		} else {
			time.AfterFunc(c.after, func() { _, _ = unix.Write(event, one) })
		}
		n, now, err := waitFor(p, events, c.timeout)
		if err != nil || n != 1 || int(events[0].Fd) != event || time.Since(now) < 0 {
			t.Fatalf("%s: wait = %d, %v, %v, want the event", c.name, n, now, err)
		}
		var b [8]byte
		if _, err := unix.Read(event, b[:]); err != nil {
			t.Fatal(err)
		}
	}
	for _, timeout := range []int{0, 1, int(shortWait / time.Millisecond), int(3 * shortWait / time.Millisecond)} {
		begin := time.Now()
		n, _, err := waitFor(p, events, timeout)
		if waited := time.Since(begin); err != nil || n != 0 || waited < time.Duration(timeout)*time.Millisecond {
			t.Fatalf("wait for %d ms = %d, %v after %v, want no event", timeout, n, err, waited)
		}
	}
}

// TestPollerLetsOthersPoll is that a goroutine that waits in the runtime's poller gets its event, although the loop never waits, on
// one processor, and the runtime's monitor sleeps at first.
func TestPollerLetsOthersPoll(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	p := newTestPoller(t)
	read, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer read.Close()
	defer write.Close()
	var got atomic.Bool
	done := make(chan struct{})
	go func() {
		defer close(done)
		var b [1]byte
		_, err := read.Read(b[:])
		got.Store(err == nil)
	}()
	events := make([]unix.EpollEvent, 4)
	timer, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_CLOEXEC|unix.TFD_NONBLOCK)
	watchTestFD(t, p, timer, err)
	fd := int(write.Fd()) // blocking: the first system call after the wait must not wake the monitor
	in := unix.NsecToTimespec(int64(10 * shortWait))
	if err := unix.TimerfdSettime(timer, 0, &unix.ItimerSpec{Value: in}, nil); err != nil {
		t.Fatal(err)
	}
	if n, _, err := waitFor(p, events, -1); n != 1 || err != nil { // the monitor sleeps
		t.Fatalf("wait = %d, %v, want the timer", n, err)
	}
	if n, err := direct(unix.SYS_WRITE, fd, []byte{1}, 0); n != 1 || err != nil {
		t.Fatalf("write = %d, %v", n, err)
	}
	// The timer is not read, so that each wait returns at once.
	for end := time.Now().Add(20 * time.Second); !got.Load() && time.Now().Before(end); {
		if n, _, err := waitFor(p, events, -1); n != 1 || err != nil {
			t.Fatalf("wait = %d, %v, want the timer", n, err)
		}
	}
	if !got.Load() {
		t.Error("another goroutine did not get its event in 20 s")
	}
	write.Close()
	<-done
}

// TestMonitorSleeps is that packets in bursts do not wake the runtime's monitor: with it, the threads of this process would switch
// some sixty times after each wait.
func TestMonitorSleeps(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	p := newTestPoller(t)
	timer, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_CLOEXEC|unix.TFD_NONBLOCK)
	watchTestFD(t, p, timer, err)
	every := unix.NsecToTimespec(int64(4 * shortWait))
	if err := unix.TimerfdSettime(timer, 0, &unix.ItimerSpec{Interval: every, Value: every}, nil); err != nil {
		t.Fatal(err)
	}
	here, there := connectedTCP(t)
	switches := func() int64 {
		var u unix.Rusage
		if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
			t.Fatal(err)
		}
		return u.Nvcsw
	}
	events := make([]unix.EpollEvent, 4)
	var b [64]byte
	const bursts = 50
	begin := switches()
	for range bursts {
		if n, _, err := waitFor(p, events, -1); n != 1 || err != nil {
			t.Fatalf("wait = %d, %v, want the timer", n, err)
		}
		// The system calls for packets and their data.
		if _, err := direct(unix.SYS_READ, timer, b[:8], 0); err != nil {
			t.Fatal(err)
		}
		if _, err := sendTo(here, b[:]); err != nil {
			t.Fatal(err)
		}
		if _, err := peekAt(there, 1, b[:]); err != nil {
			t.Fatal(err)
		}
		if _, err := receive(there, b[:], unix.MSG_DONTWAIT); err != nil {
			t.Fatal(err)
		}
		if _, err := room.ReadSnapshot(here); err != nil {
			t.Fatal(err)
		}
		if writable, err := room.Arm(here); !writable || err != nil || !isWritable(here) {
			t.Fatalf("the socket is not writable: %v", err)
		}
	}
	if n := switches() - begin; n > 12*bursts {
		t.Errorf("%d bursts: %d voluntary context switches, want less than %d", bursts, n, 12*bursts)
	}
}

// connectedTCP returns the blocking descriptors of both ends of a connection.
func connectedTCP(t *testing.T) (here, there int) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	a, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	var fds []int
	for _, c := range []net.Conn{c, a} {
		f, err := c.(*net.TCPConn).File()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
		fds = append(fds, int(f.Fd()))
	}
	return fds[0], fds[1]
}
