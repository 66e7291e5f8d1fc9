// SPDX-License-Identifier: Apache-2.0

package sockdiag_test

import (
	"context"
	"errors"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/sockdiag"
	"sockeye/lab"
	"sockeye/room"
)

var (
	senders   = []netip.Prefix{netip.MustParsePrefix("10.95.0.1/24")}
	receivers = []netip.Prefix{netip.MustParsePrefix("10.95.0.2/24")}
)

// scene is a connection with a known bottleneck.
type scene struct {
	name   string
	link   lab.LinkOptions
	sysctl map[string]string
	// prepare sets options of the sender's socket before it connects.
	prepare func(fd int) error
	// write is one turn of the sender, until stop is closed.
	write      func(fd int, stop <-chan struct{}) error
	asleep     bool // the receiver does not read
	want       sockdiag.Limit
	congestion string
	cause      sockdiag.Cause
	contains   string // further text of the advice
	either     bool   // only the process can distinguish two causes
}

// bulk sends as much data as possible with blocking writes.
func bulk(fd int, _ <-chan struct{}) error {
	_, err := unix.Write(fd, make([]byte, 256<<10))
	return err
}

// careful writes the safe amount only, so that no write waits, and does not poll.
func careful(fd int, _ <-chan struct{}) error {
	s, err := room.ReadSnapshot(fd)
	if err != nil {
		return err
	}
	n := room.Kernel{Overhead: 832}.Estimate(s, 0, nil).Safe
	if n == 0 {
		time.Sleep(100 * time.Microsecond)
		return nil
	}
	_, err = unix.Write(fd, make([]byte, n))
	return err
}

func trickle(fd int, stop <-chan struct{}) error {
	select {
	case <-stop:
	case <-time.After(50 * time.Millisecond):
	}
	_, err := unix.Write(fd, make([]byte, 1000))
	return err
}

var errNoCongestionControl = errors.New("no such congestion control")

// run starts the connection, which ends with the test.
func (s *scene) run(t *testing.T) (sender *lab.Namespace, cookie uint64) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	l, err := lab.New(ctx, lab.Options{Dir: t.TempDir()})
	check(t, err)
	t.Cleanup(func() { check(t, l.Close()) })
	a, err := l.Namespace("a")
	check(t, err)
	b, err := l.Namespace("b")
	check(t, err)
	_, err = l.Connect(a, b, s.link, senders, receivers)
	check(t, err)
	for name, value := range s.sysctl {
		check(t, a.Sysctl(name, value))
	}
	at := &unix.SockaddrInet4{Addr: receivers[0].Addr().As4(), Port: 7000}
	var listener, fd int
	check(t, b.Do(func() (err error) {
		if listener, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		return errors.Join(unix.Bind(listener, at), unix.Listen(listener, 1))
	}))
	defer unix.Close(listener)
	err = a.Do(func() (err error) {
		if fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		if err := unix.SetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION, s.congestion); errors.Is(err, unix.ENOENT) {
			return errNoCongestionControl
		} else if err != nil {
			return err
		}
		if s.prepare != nil {
			if err := s.prepare(fd); err != nil {
				return err
			}
		}
		return unix.Connect(fd, at)
	})
	if errors.Is(err, errNoCongestionControl) {
		t.Skipf("kernel: no %s", s.congestion)
	}
	check(t, err)
	to, _, err := unix.Accept4(listener, unix.SOCK_CLOEXEC)
	check(t, err)
	cookie, err = unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_COOKIE)
	check(t, err)
	stop, read, written := make(chan struct{}), make(chan struct{}), make(chan struct{})
	var failed atomic.Value
	go func() {
		defer close(read)
		buffer := make([]byte, 1<<20)
		for !s.asleep {
			if n, err := unix.Read(to, buffer); n <= 0 || err != nil {
				return
			}
		}
	}()
	go func() {
		defer close(written)
		for {
			select {
			case <-stop:
				return
			default:
			}
			if err := s.write(fd, stop); err != nil {
				failed.Store(err)
				return
			}
		}
	}()
	t.Cleanup(func() {
		if err, ok := failed.Load().(error); ok {
			t.Errorf("write: %v", err)
		}
		close(stop)
		// Interrupt a waiting write.
		check(t, unix.Shutdown(fd, unix.SHUT_RDWR))
		<-written
		// close(2) must not wait for queued data.
		_ = unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
		check(t, unix.Close(fd))
		_ = unix.Shutdown(to, unix.SHUT_RDWR)
		<-read
		check(t, unix.Close(to))
	})
	return a, cookie
}

func link(delay time.Duration, rate int64, loss float64) lab.LinkOptions {
	return lab.LinkOptions{MTU: 1500, Delay: delay, Rate: rate, Loss: loss, Seed: 1}
}

// TestLimits compares the current bottleneck and the bottleneck over a time with the known bottlenecks of connections.
func TestLimits(t *testing.T) {
	kernel, err := room.Calibrate()
	check(t, err)
	for _, s := range []scene{
		{name: "application", link: link(10*time.Millisecond, 1e9, 0), write: trickle, want: sockdiag.Application},
		{name: "receiver stopped", link: link(time.Millisecond, 1e9, 0), write: bulk, asleep: true, want: sockdiag.ReceiveWindow},
		{name: "loss", link: link(5*time.Millisecond, 1e8, 0.02), write: bulk, want: sockdiag.CongestionWindow},
		{name: "SO_SNDBUF", link: link(10*time.Millisecond, 1e9, 0), write: bulk,
			prepare: func(fd int) error { return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, 5000) },
			want:    sockdiag.SendBuffer, cause: sockdiag.FixedBuffer, contains: "the application set SO_SNDBUF to a buffer of 10000 bytes, at most "},
		{name: "SO_SNDBUF within the kernel's range", link: link(10*time.Millisecond, 1e9, 0), write: bulk,
			prepare: func(fd int) error { return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, 100000) },
			want:    sockdiag.SendBuffer, cause: sockdiag.FixedBuffer, contains: "SO_SNDBUF was", either: true},
		{name: "tcp_wmem", link: link(20*time.Millisecond, 1e9, 0), write: bulk, sysctl: map[string]string{"ipv4.tcp_wmem": "4096 16384 131072"},
			want: sockdiag.SendBuffer, cause: sockdiag.WriteMemory, contains: "tcp_wmem='4096 16384 262144'"},
		{name: "not armed", link: link(10*time.Millisecond, 1e9, 0), write: careful,
			want: sockdiag.SendBuffer, cause: sockdiag.NotArmed, contains: "poll(2)", either: true},
	} {
		for _, congestion := range []string{"cubic", "bbr"} {
			t.Run(s.name+" "+congestion, func(t *testing.T) {
				s.congestion = congestion
				sender, cookie := s.run(t)
				var c *sockdiag.Conn
				check(t, sender.Do(func() (err error) {
					c, err = sockdiag.Open()
					return err
				}))
				defer c.Close()
				// looks is the number of readings after the start of the connection.
				const looks = 30
				time.Sleep(500 * time.Millisecond)
				var (
					last      sockdiag.Socket
					first     sockdiag.Look
					momentary map[sockdiag.Limit]int
					causes    map[sockdiag.Cause]string
					v         sockdiag.Verdict
					least     float64
				)
				// strange reports whether a reading had another cause than that of the scene.
				strange := func() bool {
					for cause, text := range causes {
						if known := cause == s.cause || s.either && cause == sockdiag.NotGrown; !known || !strings.Contains(text, s.contains) {
							return s.cause != ""
						}
					}
					return false
				}
				// If the link gets no CPU, as on a busy host, the connection has another bottleneck at times. bbr then takes
				// the link for a slow one until its next probe of the bandwidth.
				for attempt := 1; attempt <= 20 && (momentary[s.want] <= looks/2 || v.By != s.want || v.Share < least || strange()); attempt++ {
					momentary, causes = map[sockdiag.Limit]int{}, map[sockdiag.Cause]string{}
					for i := range looks {
						all := dump(t, c, sockdiag.Query{States: sockdiag.Connected, RemotePort: 7000})
						found, ok := all[cookie]
						if !ok {
							t.Fatal("the connection was not found")
						}
						if last = found; i == 0 {
							first = found.Look(time.Now())
						}
						v := last.Judge()
						momentary[v.By]++
						if v.By == sockdiag.SendBuffer {
							advice := last.Advise(c.Settings, kernel, last.Times(), nil)
							causes[advice.Cause] = advice.Detail + "\n" + advice.Hint
						}
						time.Sleep(25*time.Millisecond - time.Duration(i%7)*time.Millisecond)
					}
					look := last.Look(time.Now())
					v = last.JudgeSince(first, look)
					// The bottleneck needs a quarter of the busy time; the share refers to the whole time.
					least = 0.25 * min(1, float64(look.Times.Since(first.Times).Busy)/float64(look.At.Sub(first.At)))
				}
				if momentary[s.want] <= looks/2 {
					t.Errorf("bottlenecks of %d readings: %v", looks, momentary)
				}
				if v.By != s.want || v.Share < least {
					t.Errorf("bottleneck over a time: %+v, times %+v since %+v", v, last.Times(), first.Times)
				}
				t.Logf("%v, %+v, %v", momentary, v, causes)
				if s.cause == "" {
					return
				}
				if strange() {
					t.Errorf("advice %v", causes)
				}
				found, _, err := sockdiag.ReadProcesses(func(inode uint32) bool { return inode == last.Inode })
				check(t, err)
				asked, err := found[last.Inode][0].Ask(cookie)
				check(t, err)
				if advice := last.Advise(c.Settings, kernel, last.Times(), asked); advice.Cause != s.cause {
					t.Errorf("asked %+v: %+v", asked, advice)
				}
			})
		}
	}
}
