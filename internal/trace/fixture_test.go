// SPDX-License-Identifier: Apache-2.0

package trace_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/bpf/probe"
	"sockeye/internal/cgroup"
	"sockeye/internal/config"
	"sockeye/internal/sockaddr"
	"sockeye/internal/testenv"
	"sockeye/internal/trace"
	"sockeye/internal/trace/measure"
	"sockeye/lab"
)

// tracing is the tracing of the tests' own cgroup, or of one below it.
type tracing struct {
	*bpf.Trace
	t        testing.TB
	dir      string
	cgroup   string
	compiled *bpf.TraceRules
	names    measure.Names
}

// everything traces every message of every connection.
const everything = "trace: [{cgroup: CGROUP, match: {role: connect}, messages: 1/1}]"

// newTracing starts tracing with the rules of a policy, in which CGROUP stands for the tests' cgroup.
func newTracing(t testing.TB, policy string) *tracing {
	t.Helper()
	return openTracing(t, policy, testenv.Cgroup(), filepath.Join(testenv.BPFFS(t), "trace_test"), "")
}

// needsTimestamps skips a test of sent TCP messages on a kernel that cannot trace them.
func needsTimestamps(t testing.TB) {
	t.Helper()
	if err := probe.HaveTimestamps(); errors.Is(err, ebpf.ErrNotSupported) {
		t.Skipf("kernel: %v", err)
	}
}

func openTracing(t testing.TB, policy, cgroup, dir, tuning string) *tracing {
	t.Helper()
	needsTimestamps(t)
	p, err := config.Parse([]byte(strings.ReplaceAll(policy, "CGROUP", testenv.CgroupPath())), "policy.yaml")
	check(t, err)
	compiled, err := trace.Compile(p.Trace, p.Services)
	check(t, err)
	k := &tracing{t: t, dir: dir, cgroup: cgroup, compiled: compiled, names: measure.Names{
		Rules: p.Trace, Services: p.Services,
		TuneRule: func(uint32) string { return "" },
		Cgroup:   func(uint64) string { return "" },
	}}
	k.open(bpf.TraceConfig{Dir: dir, Cgroup: cgroup, Rules: compiled, Tuning: tuning})
	t.Cleanup(func() {
		if err := errors.Join(bpf.RemoveTrace(dir), k.Close()); err != nil {
			t.Error(err)
		}
	})
	return k
}

func (k *tracing) open(c bpf.TraceConfig) {
	k.t.Helper()
	opened, err := bpf.OpenTrace(c)
	if err != nil {
		k.t.Fatalf("%+v", err)
	}
	k.Trace = opened
}

// results returns the results of all groups.
func (k *tracing) results() []measure.Result {
	k.t.Helper()
	results, err := k.names.Results(k.Trace, k.compiled.Rules)
	check(k.t, err)
	return results
}

// result returns the sum of all groups.
func (k *tracing) result() measure.Result {
	k.t.Helper()
	return sum(k.results())
}

func sum(results []measure.Result) measure.Result {
	sum := measure.Result{Outcomes: make(map[measure.Outcome]uint64), Stages: make(map[config.Stage]*measure.Histogram)}
	for _, r := range results {
		sum.Chosen += r.Chosen
		sum.InFlight += r.InFlight
		sum.Bytes += r.Bytes
		sum.Unqueued += r.Unqueued
		sum.Undriven += r.Undriven
		for outcome, n := range r.Outcomes {
			sum.Outcomes[outcome] += n
		}
		for stage, h := range r.Stages {
			if sum.Stages[stage] == nil {
				sum.Stages[stage] = &measure.Histogram{}
			}
			sum.Stages[stage].Add(h)
		}
	}
	return sum
}

// settled waits until all messages have ended, and checks that each is accounted for.
func (k *tracing) settled() measure.Result {
	k.t.Helper()
	testenv.Within(k.t, "the end of all messages", func() bool { return k.result().InFlight == 0 })
	r := k.result()
	checkAccount(k.t, r)
	if r.InFlight != 0 {
		k.t.Errorf("%d messages never end, of %s", r.InFlight, account(r))
	}
	return r
}

// stamped are the outcomes of messages that are in the histograms.
var stamped = []measure.Outcome{measure.Acked, measure.Retransmitted, measure.Coalesced}

// checkAccount checks that each message has one outcome or is in flight, and that the histograms contain those with
// timestamps.
func checkAccount(t testing.TB, r measure.Result) {
	t.Helper()
	var ended, timed uint64
	for outcome, n := range r.Outcomes {
		ended += n
		if slices.Contains(stamped, outcome) {
			timed += n
		}
	}
	if r.Chosen != ended+r.InFlight {
		t.Errorf("%d chosen, %d ended and %d in flight", r.Chosen, ended, r.InFlight)
	}
	for stage, want := range map[config.Stage]uint64{
		measure.Total: timed, config.StageStack: timed - r.Unqueued, config.StageNetwork: timed - r.Undriven,
	} {
		var got uint64
		if h := r.Stages[stage]; h != nil {
			got = h.Count
		}
		if r.InFlight == 0 && got != want {
			t.Errorf("histogram of %s has %d messages, want %d of %s", stage, got, want, account(r))
		}
	}
}

// account describes the outcomes of messages.
func account(r measure.Result) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d chosen", r.Chosen)
	for _, outcome := range measure.Outcomes {
		if n := r.Outcomes[outcome]; n > 0 {
			fmt.Fprintf(&b, ", %s %d (%.2f %%)", outcome, n, 100*float64(n)/float64(r.Chosen))
		}
	}
	for _, more := range []struct {
		name string
		n    uint64
	}{{"in flight", r.InFlight}, {"without a stamp of the queue", r.Unqueued}, {"of the driver", r.Undriven}} {
		if more.n > 0 {
			fmt.Fprintf(&b, ", %s %d", more.name, more.n)
		}
	}
	return b.String()
}

// sampler collects the samples of all messages since its creation.
type sampler struct {
	k      *tracing
	reader *bpf.TraceReader
	done   chan struct{}

	mu      sync.Mutex
	samples []bpf.TraceSample
	taken   int
}

func (k *tracing) samples() *sampler {
	k.t.Helper()
	reader, err := k.Samples(16 << 20)
	check(k.t, err)
	s := &sampler{k: k, reader: reader, done: make(chan struct{})}
	go func() {
		defer close(s.done)
		for {
			sample, err := reader.Read(time.Time{})
			if err != nil {
				return
			}
			s.mu.Lock()
			s.samples = append(s.samples, *sample)
			s.mu.Unlock()
		}
	}()
	k.t.Cleanup(func() { s.close() })
	return s
}

func (s *sampler) close() {
	// The second time, it is closed already.
	_ = s.reader.Close()
	<-s.done
}

// wait returns the next samples once there are n.
func (s *sampler) wait(n int) []bpf.TraceSample {
	s.k.t.Helper()
	var got []bpf.TraceSample
	testenv.Within(s.k.t, fmt.Sprintf("%d samples", n), func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		got = slices.Clone(s.samples[s.taken:])
		return len(got) >= n
	})
	s.taken += len(got)
	if lost, err := s.reader.Lost(); err != nil || lost != 0 {
		s.k.t.Errorf("%d samples lost, %v", lost, err)
	}
	return got
}

// world is where connections run: loopback of the tests' own namespace, or two namespaces with a link between them.
type world struct {
	t    testing.TB
	link *lab.Link
	a, b *lab.Namespace
}

var (
	linkA = []netip.Prefix{netip.MustParsePrefix("10.92.0.1/24"), netip.MustParsePrefix("fd92::1/64")}
	linkB = []netip.Prefix{netip.MustParsePrefix("10.92.0.2/24"), netip.MustParsePrefix("fd92::2/64")}
)

func loopback(t testing.TB) *world { return &world{t: t} }

func newLab(t testing.TB) *lab.Lab {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	l, err := lab.New(ctx, lab.Options{Dir: t.TempDir()})
	check(t, err)
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	return l
}

func linked(t testing.TB, o lab.LinkOptions) *world {
	t.Helper()
	l := newLab(t)
	w := &world{t: t}
	var err error
	for name, n := range map[string]**lab.Namespace{"a": &w.a, "b": &w.b} {
		*n, err = l.Namespace(name)
		check(t, err)
	}
	w.link, err = l.Connect(w.a, w.b, o, linkA, linkB)
	check(t, err)
	// The default queueing discipline of some hosts paces.
	check(t, w.a.Sysctl("ipv4.tcp_congestion_control", "reno"))
	return w
}

// inA and inB run f in the namespace of the connecting and of the accepting side.
func (w *world) inA(f func()) { w.do(w.a, f) }
func (w *world) inB(f func()) { w.do(w.b, f) }

func (w *world) do(n *lab.Namespace, f func()) {
	w.t.Helper()
	if n == nil {
		f()
		return
	}
	check(w.t, n.Do(func() error {
		f()
		return nil
	}))
}

func (w *world) addr(domain int) netip.Addr {
	switch {
	case w.b != nil && domain == unix.AF_INET:
		return linkB[0].Addr()
	case w.b != nil:
		return linkB[1].Addr()
	case domain == unix.AF_INET:
		return netip.MustParseAddr("127.0.0.1")
	}
	return netip.IPv6Loopback()
}

// ends are the sockets of a connection: the connecting and the accepting one. Unlike the sockets of package net, they
// have default options.
type ends struct{ connected, accepted int }

// newSocket opens a TCP socket with a timeout, and closes it when the test ends.
func newSocket(t testing.TB, domain int) int {
	t.Helper()
	fd, err := unix.Socket(domain, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
	if err != nil {
		t.Fatal(os.NewSyscallError("socket", err))
	}
	closeAfter(t, fd)
	for _, name := range []int{unix.SO_SNDTIMEO, unix.SO_RCVTIMEO} {
		check(t, os.NewSyscallError("setsockopt", unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, name, &unix.Timeval{Sec: int64(patience / time.Second)})))
	}
	return fd
}

// open lists the descriptors to close when the test ends; the kernel reuses numbers.
var open struct {
	sync.Mutex
	fds map[int]bool
}

func closeAfter(t testing.TB, fd int) {
	open.Lock()
	defer open.Unlock()
	if open.fds == nil {
		open.fds = make(map[int]bool)
	}
	open.fds[fd] = true
	t.Cleanup(func() { shut(fd) })
}

// shut closes a socket once.
func shut(fds ...int) {
	open.Lock()
	defer open.Unlock()
	for _, fd := range fds {
		if open.fds[fd] {
			delete(open.fds, fd)
			unix.Close(fd)
		}
	}
}

// listen opens a listener.
func (w *world) listen(domain int) (fd int, at netip.AddrPort) {
	w.t.Helper()
	w.inB(func() { fd = newSocket(w.t, domain) })
	addr := w.addr(domain)
	check(w.t, os.NewSyscallError("bind", unix.Bind(fd, sockaddr.Of(netip.AddrPortFrom(addr, 0)))))
	check(w.t, os.NewSyscallError("listen", unix.Listen(fd, 4096)))
	return fd, netip.AddrPortFrom(addr, testenv.Port(w.t, fd))
}

// connect opens a connection. Options are set before it connects.
func (w *world) connect(domain int, options ...option) ends {
	w.t.Helper()
	listener, at := w.listen(domain)
	defer shut(listener)
	return w.connectTo(listener, at, options...)
}

func (w *world) connectTo(listener int, at netip.AddrPort, options ...option) ends {
	w.t.Helper()
	domain := unix.AF_INET6
	if at.Addr().Is4() {
		domain = unix.AF_INET
	}
	var fd int
	w.inA(func() { fd = newSocket(w.t, domain) })
	for _, o := range options {
		o(w.t, fd)
	}
	check(w.t, connect(fd, sockaddr.Of(at)))
	return ends{fd, accept(w.t, listener)}
}

func connect(fd int, to unix.Sockaddr) error {
	_, err := retry(func() (int, error) { return 0, unix.Connect(fd, to) })
	return os.NewSyscallError("connect", err)
}

func accept(t testing.TB, listener int) int {
	t.Helper()
	fd, err := retry(func() (int, error) {
		fd, _, err := unix.Accept4(listener, unix.SOCK_CLOEXEC)
		return fd, err
	})
	check(t, os.NewSyscallError("accept", err))
	closeAfter(t, fd)
	return fd
}

// option is a socket option.
type option func(t testing.TB, fd int)

func with(level, name, value int) option {
	return func(t testing.TB, fd int) {
		t.Helper()
		check(t, os.NewSyscallError("setsockopt", unix.SetsockoptInt(fd, level, name, value)))
	}
}

var noDelay = with(unix.SOL_TCP, unix.TCP_NODELAY, 1)

// firstSeq sets the sequence number of the first byte of a connection.
func firstSeq(seq uint32) option {
	return func(t testing.TB, fd int) {
		t.Helper()
		with(unix.SOL_TCP, unix.TCP_REPAIR, 1)(t, fd)
		with(unix.SOL_TCP, unix.TCP_REPAIR_QUEUE, 2)(t, fd) // TCP_SEND_QUEUE
		// The SYN occupies one sequence number.
		with(unix.SOL_TCP, unix.TCP_QUEUE_SEQ, int(int32(seq-1)))(t, fd)
		with(unix.SOL_TCP, unix.TCP_REPAIR, 0)(t, fd)
	}
}

// retry repeats a call that a signal interrupted.
func retry(call func() (int, error)) (int, error) {
	for {
		n, err := call()
		if !errors.Is(err, unix.EINTR) {
			return n, err
		}
	}
}

// send sends one message, or several if a signal interrupts sendmsg.
func send(fd int, b []byte, flags int) error {
	_, err := sendAll(fd, b, flags)
	return err
}

// sendAll sends all of b and returns the number of messages.
func sendAll(fd int, b []byte, flags int) (messages uint64, err error) {
	for len(b) > 0 {
		n, err := retry(func() (int, error) { return unix.SendmsgN(fd, b, nil, nil, flags|unix.MSG_NOSIGNAL) })
		if err != nil {
			return messages, os.NewSyscallError("sendmsg", err)
		}
		b = b[n:]
		messages++
	}
	return messages, nil
}

// drain reads until the other side closes and returns the number of bytes.
func drain(fd int) <-chan int {
	done := make(chan int, 1)
	go func() {
		b, sum := make([]byte, 1<<18), 0
		for {
			n, err := retry(func() (int, error) { return unix.Read(fd, b) })
			if err != nil || n == 0 {
				done <- sum
				return
			}
			sum += n
		}
	}()
	return done
}

func tcpInfo(t testing.TB, fd int) *unix.TCPInfo {
	t.Helper()
	info, err := unix.GetsockoptTCPInfo(fd, unix.SOL_TCP, unix.TCP_INFO)
	check(t, os.NewSyscallError("getsockopt", err))
	return info
}

// inCgroup runs f with the process in a cgroup, to which the sockets that f opens belong.
func inCgroup(t testing.TB, dir string, f func()) {
	t.Helper()
	move := func(dir string) { check(t, cgroup.Move(dir, 0)) }
	move(dir)
	defer move(testenv.Cgroup())
	f()
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// sysctl sets a sysctl of the tests' own namespace until the test ends.
func sysctl(t testing.TB, name, value string) {
	t.Helper()
	path := "/proc/sys/" + name
	before, err := os.ReadFile(path)
	check(t, err)
	check(t, os.WriteFile(path, []byte(value), 0))
	t.Cleanup(func() { check(t, os.WriteFile(path, before, 0)) })
}
