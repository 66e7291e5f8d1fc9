// SPDX-License-Identifier: Apache-2.0

package trace_test

import (
	"errors"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/cilium/ebpf/features"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/internal/sockaddr"
	"sockeye/internal/testenv"
	"sockeye/internal/trace"
	"sockeye/internal/trace/measure"
	"sockeye/lab"
)

// sending describes the messages on each of several connections.
type sending struct {
	connections int
	messages    int // of a connection
	domain      int
	options     []option
	// length and flags are those of each message; nil means 100 bytes and 0.
	length func(i int) int
	flags  func(i int) int
	before func(fd, i int)
	// after ends the connection; nil closes it when everything has arrived.
	after func(c ends)
}

// run sends the messages and returns the number of sendmsg calls.
func (s sending) run(w *world) uint64 {
	w.t.Helper()
	listener, at := w.listen(s.domain)
	defer shut(listener)
	var (
		wait  sync.WaitGroup
		calls atomic.Uint64
	)
	for range s.connections {
		c := w.connectTo(listener, at, s.options...)
		var done <-chan int
		if s.after == nil {
			done = drain(c.accepted)
		}
		wait.Go(func() {
			b := make([]byte, 1<<16)
			for i := range s.messages {
				length, flags := 100, 0
				if s.length != nil {
					length = s.length(i)
				}
				if s.flags != nil {
					flags = s.flags(i)
				}
				if s.before != nil {
					s.before(c.connected, i)
				}
				n, err := sendAll(c.connected, b[:length], flags)
				if err != nil {
					w.t.Errorf("message %d: %v", i, err)
					return
				}
				calls.Add(n)
			}
			if s.after != nil {
				s.after(c)
				return
			}
			shut(c.connected)
			<-done
			shut(c.accepted)
		})
	}
	wait.Wait()
	return calls.Load()
}

// watch reads the counts until it is stopped and checks each reading: no count decreases, and the messages in flight
// are within the limit of the connections.
func (k *tracing) watch(connections int) (stop func()) {
	ended, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		var last measure.Result
		for tick := time.NewTicker(10 * time.Millisecond); ; {
			select {
			case <-ended:
				tick.Stop()
				return
			case <-tick.C:
			}
			results, err := k.names.Results(k.Trace, k.compiled.Rules)
			if err != nil {
				k.t.Error(err)
				return
			}
			r := sum(results)
			// Messages that end while the per-CPU counts are read.
			const meanwhile = 5000
			if most := uint64(64*connections + meanwhile); r.InFlight > most {
				k.t.Errorf("%d in flight, at most %d can be", r.InFlight, most)
			}
			if r.Chosen < last.Chosen {
				k.t.Errorf("%d chosen after %d", r.Chosen, last.Chosen)
			}
			for outcome, n := range last.Outcomes {
				if r.Outcomes[outcome] < n {
					k.t.Errorf("%d %s after %d", r.Outcomes[outcome], outcome, n)
				}
			}
			last = r
		}
	}()
	return func() {
		close(ended)
		<-done
	}
}

// TestAccounting sends a million messages over paths that lose their timestamp keys, and accounts for every message.
func TestAccounting(t *testing.T) {
	needsTimestamps(t)
	lossy := func(t *testing.T) *world {
		return linked(t, lab.LinkOptions{Delay: time.Millisecond, Loss: 0.01, Reorder: 0.05, Seed: 1})
	}
	local := func(t *testing.T) *world { return loopback(t) }
	mixed := func(int) int { return 1 + rand.IntN(3000) }
	var total uint64
	for _, test := range []struct {
		name  string
		world func(*testing.T) *world
		sending
		// split: the kernel sends a part of an unfinished message.
		want []measure.Outcome // that must be there
	}{
		{"small", local, sending{connections: 4, messages: 120_000},
			[]measure.Outcome{measure.Overwritten}},
		{"nodelay", local, sending{connections: 4, messages: 50_000, options: []option{noDelay}},
			nil},
		{"records", local, sending{connections: 4, messages: 30_000, flags: func(int) int { return unix.MSG_EOR }},
			nil},
		{"large", local, sending{connections: 2, messages: 20_000, length: func(int) int { return 1 << 16 }},
			nil},
		{"more", local, sending{connections: 4, messages: 20_000, flags: func(i int) int {
			if i%10 == 9 {
				return 0
			}
			return unix.MSG_MORE
		}}, []measure.Outcome{measure.Overwritten}},
		{"cork", local, sending{connections: 4, messages: 20_000, before: func(fd, i int) {
			if i%20 == 0 || i%20 == 15 {
				_ = unix.SetsockoptInt(fd, unix.SOL_TCP, unix.TCP_CORK, 1-i%20/15) // it is always there
			}
		}}, []measure.Outcome{measure.Overwritten}},
		{"wrap", local, sending{connections: 10, messages: 5_000, options: []option{noDelay, firstSeq(0xfffc0000)}},
			nil},
		// The same number under emulation, or no marked packet is lost.
		{"loss", lossy, sending{connections: 8, messages: 5_000 * fewer, domain: unix.AF_INET6, length: mixed},
			[]measure.Outcome{measure.Retransmitted, measure.Overwritten}},
		{"records, loss", lossy, sending{connections: 8, messages: 5_000, options: []option{noDelay},
			flags: func(int) int { return unix.MSG_EOR }},
			[]measure.Outcome{measure.Retransmitted, measure.Full}},
		{"a few records, loss", lossy, sending{connections: 8, messages: 3_000,
			options: []option{noDelay, with(unix.SOL_SOCKET, unix.SO_SNDBUF, 1<<13)}, length: mixed,
			flags: func(int) int { return unix.MSG_EOR }},
			[]measure.Outcome{measure.Retransmitted}},
	} {
		t.Run(test.name, func(t *testing.T) {
			k := newTracing(t, everything)
			if test.domain == 0 {
				test.domain = unix.AF_INET
			}
			test.messages /= fewer
			w := test.world(t)
			stop := k.watch(test.connections)
			start := time.Now()
			calls := test.run(w)
			stop()
			r := k.settled()
			t.Logf("%v for %s", time.Since(start).Round(time.Millisecond), account(r))
			// The data of an interrupted call may have left already: then no packet is left to mark, or the packet
			// has no timestamp.
			if cut := calls - uint64(test.connections*test.messages); r.Chosen > calls || calls-r.Chosen > cut || r.Unqueued > cut {
				t.Errorf("%d chosen of %d calls, %d of them cut short, %d gone before", r.Chosen, calls, cut, r.Unqueued)
			}
			for _, outcome := range append(test.want, measure.Acked) {
				if r.Outcomes[outcome] == 0 {
					t.Errorf("none is %s", outcome)
				}
			}
			for _, outcome := range []measure.Outcome{measure.Application, measure.Refused, measure.Missed, measure.Unacknowledged} {
				if n := r.Outcomes[outcome]; n > 0 {
					t.Errorf("%d are %s", n, outcome)
				}
			}
			total += r.Chosen
		})
	}
	if total < 1_000_000/fewer && !t.Failed() {
		t.Errorf("%d messages, want a million", total)
	}
}

// TestPartialWrites uses a non-blocking application: the data that the kernel took may have left before sendmsg
// returns, and then only a packet that waits for its acknowledgement can be marked.
func TestPartialWrites(t *testing.T) {
	k := newTracing(t, everything)
	w := loopback(t)
	c := w.connect(unix.AF_INET, with(unix.SOL_SOCKET, unix.SO_SNDBUF, 1<<16))
	done := drain(c.accepted)
	b := make([]byte, 1<<20)
	var calls, partial uint64
	for calls < 20_000/fewer {
		n, err := unix.SendmsgN(c.connected, b, nil, nil, unix.MSG_DONTWAIT)
		if errors.Is(err, unix.EAGAIN) {
			poll := []unix.PollFd{{Fd: int32(c.connected), Events: unix.POLLOUT}}
			_, err := retry(func() (int, error) { return unix.Poll(poll, -1) })
			check(t, err)
			continue
		}
		check(t, err)
		calls++
		if n < len(b) {
			partial++
		}
	}
	shut(c.connected)
	<-done
	r := k.settled()
	t.Logf("of %d calls, %d of them partial: %s", calls, partial, account(r))
	version, err := features.LinuxVersionCode()
	check(t, err)
	if version < 6<<16|18<<8|18 && r.Unqueued == 0 && r.Chosen < calls/2 {
		t.Skipf("kernel: marks nothing that has left: %d messages of %d calls (until Linux 6.18.18)", r.Chosen, calls)
	}
	if r.Chosen > calls || r.Unqueued == 0 {
		t.Errorf("%d chosen of %d calls, want some that were sent before", r.Chosen, calls)
	}
	// The driver's timestamp is still known.
	if r.Undriven > 0 {
		t.Errorf("of %d it is not known when the driver had them", r.Undriven)
	}
}

// hole is a link that drops all data from A to B while it is open.
func hole(t testing.TB, o lab.LinkOptions) (w *world, open *atomic.Bool) {
	t.Helper()
	open = &atomic.Bool{}
	o.Drop = func(d lab.Direction, packet []byte) bool {
		const headers = 20 + 60 // of a segment over IPv4, with options
		return d == lab.AToB && open.Load() && len(packet) > headers
	}
	return linked(t, o), open
}

// TestFull uses more messages of a connection in flight than can be tracked, and reads the counts while nothing moves.
func TestFull(t *testing.T) {
	k := newTracing(t, everything)
	w, lost := hole(t, lab.LinkOptions{})
	c := w.connect(unix.AF_INET, noDelay, with(unix.SOL_SOCKET, unix.SO_SNDBUF, 1<<20))
	done := drain(c.accepted)
	lost.Store(true)
	for range 100 {
		check(t, send(c.connected, make([]byte, 100), unix.MSG_EOR))
	}
	r := k.result()
	if r.Chosen != 100 || r.InFlight != 64 || r.Outcomes[measure.Full] != 36 {
		t.Errorf("%s, want 64 in flight of 100, the rest full", account(r))
	}
	testenv.Within(t, "packets that are lost", func() bool { return w.link.Counts().AToB.Dropped > 0 })
	lost.Store(false)
	shut(c.connected)
	<-done
	if r := k.settled(); r.Chosen != 100 || r.Outcomes[measure.Full] != 36 || r.Outcomes[measure.Retransmitted] == 0 ||
		r.Outcomes[measure.Acked]+r.Outcomes[measure.Retransmitted]+r.Outcomes[measure.Coalesced] != 64 {
		t.Errorf("at the end %s", account(r))
	}
}

// TestKeys checks sequence numbers that wrap, and the key 0.
func TestKeys(t *testing.T) {
	const length = 100
	k := newTracing(t, everything)
	s := k.samples()
	w := loopback(t)
	var want []uint32
	for _, first := range []uint32{1 << 31, 1<<32 - length, 1<<32 - length + 1, 1<<32 - length - 1, 1<<32 - 1} {
		c := w.connect(unix.AF_INET, noDelay, firstSeq(first))
		done := drain(c.accepted)
		for i := range uint32(5) {
			check(t, send(c.connected, make([]byte, length), 0))
			acknowledged(t, c.connected)
			want = append(want, first+(i+1)*length-1)
		}
		shut(c.connected)
		<-done
	}
	if !slices.Contains(want, 0) {
		t.Fatal("no key is 0")
	}
	for i, sample := range s.wait(len(want)) {
		m := sample.Message
		if m.Key != want[i] || m.Length != length || sample.Outcome != 0 {
			t.Errorf("message %d has key %#x, want %#x, length %d, outcome %d", i, m.Key, want[i], m.Length, sample.Outcome)
		}
	}
	if r := k.settled(); r.Outcomes[measure.Acked] != uint64(len(want)) {
		t.Errorf("%s, want all of %d to be acked", account(r), len(want))
	}
}

// acknowledged waits until nothing is in flight, and until the kernel has processed the last acknowledgement.
func acknowledged(t testing.TB, fd int) {
	t.Helper()
	tick := time.NewTicker(50 * time.Microsecond)
	defer tick.Stop()
	for deadline := time.Now().Add(patience); ; <-tick.C {
		left, err := unix.IoctlGetInt(fd, unix.SIOCOUTQ)
		check(t, os.NewSyscallError("ioctl", err))
		if left == 0 {
			tcpInfo(t, fd) // which waits for the socket's lock
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d bytes are not acknowledged", left)
		}
	}
}

// TestEnds ends connections in every way with messages in flight.
func TestEnds(t *testing.T) {
	const messages = 30
	reset := func(fd int) {
		check(t, os.NewSyscallError("setsockopt", unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})))
		shut(fd)
	}
	for _, test := range []struct {
		name string
		end  func(w *world, c ends, lost *atomic.Bool)
		lost bool // all that is under way
	}{
		{"closed", func(_ *world, c ends, lost *atomic.Bool) {
			shut(c.connected)
			lost.Store(false)
		}, false},
		{"reset", func(_ *world, c ends, _ *atomic.Bool) { reset(c.connected) }, true},
		{"reset by peer", func(_ *world, c ends, _ *atomic.Bool) { reset(c.accepted) }, true},
		{"timed out", func(_ *world, c ends, _ *atomic.Bool) {
			with(unix.SOL_TCP, unix.TCP_USER_TIMEOUT, 400)(t, c.connected)
		}, true},
		{"destroyed", func(w *world, c ends, _ *atomic.Bool) { w.inA(func() { destroy(t, c.connected) }) }, true},
		{"disconnected", func(_ *world, c ends, _ *atomic.Bool) { disconnect(t, c.connected) }, true},
		{"shut down", func(_ *world, c ends, lost *atomic.Bool) {
			check(t, unix.Shutdown(c.connected, unix.SHUT_WR))
			lost.Store(false)
			<-drain(c.accepted)
			shut(c.accepted)
		}, false},
		{"nobody reads", func(_ *world, c ends, lost *atomic.Bool) {
			lost.Store(false)
			acknowledged(t, c.connected)
			shut(c.accepted) // with data that it has not read: it resets
		}, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			k := newTracing(t, everything)
			w, lost := hole(t, lab.LinkOptions{Delay: time.Millisecond})
			c := w.connect(unix.AF_INET, noDelay)
			check(t, send(c.connected, make([]byte, 100), 0))
			acknowledged(t, c.connected)
			lost.Store(true)
			for range messages {
				check(t, send(c.connected, make([]byte, 100), unix.MSG_EOR))
			}
			testenv.Within(t, "packets that are lost", func() bool { return w.link.Counts().AToB.Dropped > 0 })
			test.end(w, c, lost)
			r := k.settled()
			t.Log(account(r))
			unacknowledged := uint64(0)
			if test.lost {
				unacknowledged = messages
			}
			if r.Chosen != messages+1 || r.Outcomes[measure.Unacknowledged] != unacknowledged {
				t.Errorf("%s, want %d to be unacknowledged of %d", account(r), unacknowledged, messages+1)
			}
		})
	}
}

// destroy ends a connection by SOCK_DESTROY, as ss -K does.
func destroy(t testing.TB, fd int) {
	t.Helper()
	from, err := unix.Getsockname(fd)
	check(t, err)
	to, err := unix.Getpeername(fd)
	check(t, err)
	tcp := func(sa unix.Sockaddr) *net.TCPAddr {
		a := sa.(*unix.SockaddrInet4)
		return &net.TCPAddr{IP: a.Addr[:], Port: a.Port}
	}
	check(t, netlink.SocketDestroy(tcp(from), tcp(to)))
}

// disconnect ends a connection and makes its socket connectable again.
func disconnect(t testing.TB, fd int) {
	t.Helper()
	unspecified := unix.RawSockaddr{Family: unix.AF_UNSPEC}
	_, _, errno := unix.Syscall(unix.SYS_CONNECT, uintptr(fd), uintptr(unsafe.Pointer(&unspecified)), unsafe.Sizeof(unspecified))
	if errno != 0 {
		t.Fatal(os.NewSyscallError("connect", errno))
	}
}

// senderVariable makes the test binary a process that connects to an address and sends until it is killed.
const senderVariable = "SOCKEYE_TEST_SENDER"

// TestSender is the entry point of that process.
func TestSender(t *testing.T) {
	address := os.Getenv(senderVariable)
	if address == "" {
		return
	}
	fd := newSocket(t, unix.AF_INET)
	check(t, connect(fd, sockaddr.Of(netip.MustParseAddrPort(address))))
	for send(fd, make([]byte, 1000), 0) == nil {
	}
}

// TestKilled kills a process while it sends.
func TestKilled(t *testing.T) {
	k := newTracing(t, everything)
	listener, at := loopback(t).listen(unix.AF_INET)
	for _, read := range []bool{true, false} {
		cmd := exec.Command("/proc/self/exe", "-test.run=^TestSender$")
		cmd.Env = append(os.Environ(), senderVariable+"="+at.String())
		before := k.result().Chosen
		check(t, cmd.Start())
		accepted := accept(t, listener)
		var done <-chan int
		if read {
			done = drain(accepted)
		}
		testenv.Within(t, "sending", func() bool { return k.result().Chosen > before+100 })
		check(t, cmd.Process.Kill())
		_ = cmd.Wait() // it was killed
		if read {
			<-done
		}
		shut(accepted)
		t.Log(account(k.settled()))
	}
}

// TestAdoptedWhileSending adopts, releases and adopts connections again while they send.
func TestAdoptedWhileSending(t *testing.T) {
	newTracing(t, "trace: [{cgroup: CGROUP, match: {port: 1}}]")
	w := loopback(t)
	const connections = 2
	var (
		wait sync.WaitGroup
		stop atomic.Bool
	)
	listener, at := w.listen(unix.AF_INET)
	for range connections {
		c := w.connectTo(listener, at, noDelay)
		done := drain(c.accepted)
		wait.Go(func() {
			for !stop.Load() {
				if err := send(c.connected, make([]byte, 500), unix.MSG_EOR); err != nil {
					t.Error(err)
					return
				}
			}
			shut(c.connected)
			<-done
		})
	}
	// The tracing of these connections starts only now.
	k := newTracing(t, everything)
	if r := k.result(); r.Chosen != 0 {
		t.Errorf("before %s", account(r))
	}
	for range 2 {
		adopted, err := trace.SelectOpen(k.Trace, k.cgroup)
		check(t, err)
		if adopted.Chosen != connections || len(adopted.Problems) > 0 {
			t.Errorf("%d connections adopted, want %d: %v", adopted.Chosen, connections, adopted.Problems)
		}
		before := k.result().Chosen
		testenv.Within(t, "messages", func() bool { return k.result().Chosen > before+10_000/fewer })
		check(t, trace.DeselectOpen(k.Trace, k.cgroup))
		// All messages in flight have ended when their connections were released.
		r := k.settled()
		if again := k.result(); again.Chosen != r.Chosen {
			t.Errorf("%d chosen after the connections were let go", again.Chosen-r.Chosen)
		}
	}
	_, err := trace.SelectOpen(k.Trace, k.cgroup)
	check(t, err)
	// Adopt again: connections that are traced already go on.
	again, err := trace.SelectOpen(k.Trace, k.cgroup)
	check(t, err)
	if again.Chosen != connections {
		t.Errorf("%d connections adopted again, want %d", again.Chosen, connections)
	}
	before := k.result().Chosen
	testenv.Within(t, "messages", func() bool { return k.result().Chosen > before+10_000/fewer })
	stop.Store(true)
	wait.Wait()
	r := k.settled()
	t.Log(account(r))
	if n := r.Outcomes[measure.Unacknowledged]; n > 2*64*connections {
		t.Errorf("%d messages were under way when their connections were let go", n)
	}
}
