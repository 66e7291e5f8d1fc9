// SPDX-License-Identifier: Apache-2.0

package trace_test

import (
	"errors"
	"fmt"
	"path/filepath"
	"testing"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/testenv"
	"sockeye/internal/trace"
	"sockeye/internal/trace/measure"
	"sockeye/lab"
)

// runs returns how often the program of a tracing has run, with BPF statistics enabled.
func (k *tracing) runs() (n uint64, each time.Duration) {
	k.t.Helper()
	id, err := k.ProgramID()
	check(k.t, err)
	p, err := ebpf.NewProgramFromID(ebpf.ProgramID(id))
	check(k.t, err)
	defer p.Close()
	stats, err := p.Stats()
	check(k.t, err)
	if stats.RunCount > 0 {
		each = stats.Runtime / time.Duration(stats.RunCount)
	}
	return stats.RunCount, each
}

func countRuns(t testing.TB) {
	t.Helper()
	counting, err := ebpf.EnableStats(uint32(unix.BPF_STATS_RUN_TIME))
	check(t, err)
	t.Cleanup(func() { check(t, counting.Close()) })
}

// TestNoInterference uses connections outside the traced cgroup, some of which were traced before: no program runs for
// them.
func TestNoInterference(t *testing.T) {
	countRuns(t)
	fs := testenv.BPFFS(t)
	inside := testenv.Subgroup(t, "inside")
	k := openTracing(t, everything, inside, filepath.Join(fs, "trace_inside"), "")
	w := loopback(t)
	exchange := func(c ends, messages int) {
		t.Helper()
		b := make([]byte, 100)
		for range messages {
			for _, way := range [][2]int{{c.connected, c.accepted}, {c.accepted, c.connected}} {
				check(t, send(way[0], b, 0))
				_, err := retry(func() (int, error) { return unix.Read(way[1], b) })
				check(t, err)
			}
		}
	}
	outside := w.connect(unix.AF_INET)
	exchange(outside, 1000)
	shut(outside.connected, outside.accepted)
	if n, _ := k.runs(); n != 0 {
		t.Errorf("the program ran %d times for a connection outside of its cgroup", n)
	}

	var traced ends
	inCgroup(t, inside, func() { traced = w.connect(unix.AF_INET) })
	const messages = 10_000 / fewer
	exchange(traced, messages)
	n, each := k.runs()
	t.Logf("for %d messages the program has run %d times, %v each", messages, n, each)
	// At the return of sendmsg, in the queue, at the driver, at the acknowledgement, and on both sides when the
	// connection was established.
	if r := k.settled(); n < 4*messages || r.Chosen != messages {
		t.Errorf("the program has run %d times for %s", n, account(r))
	}

	// The connection keeps its flag.
	check(t, errors.Join(bpf.RemoveTrace(k.dir), k.Close()))
	other := openTracing(t, everything, testenv.Subgroup(t, "other"), filepath.Join(fs, "trace_other"), "")
	exchange(traced, 1000)
	if n, _ := other.runs(); n != 0 {
		t.Errorf("the program of another cgroup has run %d times for a connection that was traced before", n)
	}
	// A tracing that does not sample a connection does not count its messages.
	again := openTracing(t, "trace: [{cgroup: CGROUP, match: {port: 1}, messages: 1/1}]", inside, filepath.Join(fs, "trace_again"), "")
	exchange(traced, 1000)
	if r := again.result(); r.Chosen != 0 {
		t.Errorf("of a connection that was not chosen %s", account(r))
	}
	// A tracing of received data only does not count what is sent.
	received := openTracing(t, "trace: [{cgroup: CGROUP, messages: 1/1, stages: [rx_stack]}]", inside, filepath.Join(fs, "trace_received"), "")
	adopted, err := trace.SelectOpen(received.Trace, testenv.Cgroup()) // where the process is
	check(t, err)
	if adopted.Chosen != 2 {
		t.Errorf("%d connections adopted, want both ends of one", adopted.Chosen)
	}
	exchange(traced, 1000)
	if r := received.result(); r.Chosen != 0 {
		t.Errorf("of what is received %s", account(r))
	}
	shut(traced.connected, traced.accepted)
}

// TestTwoTracings lets two tracings sample the same messages, with one timestamp key for both: each account is exact.
// When one ends, the other keeps its connections, once they are adopted again.
func TestTwoTracings(t *testing.T) {
	fs := testenv.BPFFS(t)
	inner := testenv.Subgroup(t, "inner")
	all := openTracing(t, everything, testenv.Cgroup(), filepath.Join(fs, "trace_all"), "")
	some := openTracing(t, "trace: [{cgroup: CGROUP, match: {role: connect}, messages: 1/3}]", inner, filepath.Join(fs, "trace_some"), "")
	w := linked(t, lab.LinkOptions{Delay: time.Millisecond, Loss: 0.01, Seed: 9})
	local := loopback(t)
	var calls uint64
	inCgroup(t, inner, func() {
		calls = sending{connections: 4, messages: 2000, domain: unix.AF_INET, flags: func(i int) int { return i % 5 / 4 * unix.MSG_EOR }}.run(w)
		// Here many packets are merged before they are sent.
		calls += sending{connections: 2, messages: 2000, domain: unix.AF_INET, length: func(int) int { return 1 << 16 }}.run(local)
	})
	one, two := all.settled(), some.settled()
	t.Log(account(one))
	t.Log(account(two))
	if n := one.Outcomes[measure.Missed] + two.Outcomes[measure.Missed]; n > 0 {
		t.Errorf("%d messages were missed", n)
	}
	if n := one.Undriven + two.Undriven; n > 0 {
		t.Errorf("of %d messages it is not known when the driver had them", n)
	}
	if one.Chosen != calls || calls < 12_000 {
		t.Errorf("%d chosen of %d calls", one.Chosen, calls)
	}
	about(t, "1/3", two.Chosen, float64(calls)/3, float64(calls)/9)

	listener, at := local.listen(unix.AF_INET)
	var c ends
	inCgroup(t, inner, func() { c = local.connectTo(listener, at) })
	done := drain(c.accepted)
	check(t, trace.DeselectOpen(some.Trace, testenv.Cgroup())) // where the process is
	adopted, err := trace.SelectOpen(all.Trace, testenv.Cgroup())
	check(t, err)
	if adopted.Chosen != 1 {
		t.Errorf("%d connections are traced, want 1", adopted.Chosen)
	}
	for range 10 {
		check(t, send(c.connected, make([]byte, 100), 0))
		acknowledged(t, c.connected)
	}
	shut(c.connected)
	<-done
	if r := all.settled(); r.Chosen != one.Chosen+10 {
		t.Errorf("%d messages after the other tracing released the connection, want 10", r.Chosen-one.Chosen)
	}
}

// TestForeignProgram uses another sock_ops program on the cgroup, which enables callbacks of its own.
func TestForeignProgram(t *testing.T) {
	const (
		callbackFlags = 84 // offset of bpf_sock_ops_cb_flags in struct bpf_sock_ops
		rttCallback   = 1 << 3
	)
	foreign, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SockOps, License: "GPL", Instructions: asm.Instructions{
		asm.LoadMem(asm.R2, asm.R1, callbackFlags, asm.Word),
		asm.Or.Imm(asm.R2, rttCallback),
		asm.FnSockOpsCbFlagsSet.Call(),
		asm.Mov.Imm(asm.R0, 1),
		asm.Return(),
	}})
	check(t, err)
	defer foreign.Close()
	attach := func() link.Link {
		l, err := link.AttachCgroup(link.CgroupOptions{Path: testenv.Cgroup(), Attach: ebpf.AttachCGroupSockOps, Program: foreign})
		check(t, err)
		return l
	}
	for _, before := range []bool{true, false} {
		t.Run(fmt.Sprintf("before %v", before), func(t *testing.T) {
			if before {
				defer attach().Close()
			}
			k := newTracing(t, everything)
			if !before {
				defer attach().Close()
			}
			w, lost := hole(t, lab.LinkOptions{})
			c := w.connect(unix.AF_INET, noDelay)
			done := drain(c.accepted)
			for range 20 {
				check(t, send(c.connected, make([]byte, 100), 0))
				acknowledged(t, c.connected)
			}
			lost.Store(true)
			for range 10 {
				check(t, send(c.connected, make([]byte, 100), unix.MSG_EOR))
			}
			check(t, unix.SetsockoptLinger(c.connected, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}))
			shut(c.connected)
			<-done
			if r := k.settled(); r.Chosen != 30 || r.Outcomes[measure.Unacknowledged] != 10 {
				t.Errorf("%s, want 10 of 30 to be unacknowledged", account(r))
			}
		})
	}
}

// TestSamplesLost reads samples through a buffer that is too small: lost samples are counted.
func TestSamplesLost(t *testing.T) {
	k := newTracing(t, everything)
	reader, err := k.Samples(1 << 13)
	check(t, err)
	defer reader.Close()
	const messages = 500
	calls := sending{connections: 1, messages: messages, domain: unix.AF_INET,
		before: func(fd, _ int) { acknowledged(t, fd) }}.run(loopback(t))
	r := k.settled()
	if r.Chosen != calls {
		t.Errorf("%s, want %d", account(r), calls)
	}
	var read uint64
	for {
		_, err := reader.Read(time.Now().Add(100 * time.Millisecond))
		if err != nil {
			break
		}
		read++
	}
	lost, err := reader.Lost()
	check(t, err)
	if read == 0 || lost == 0 || read+lost != messages {
		t.Errorf("%d samples read and %d lost, of %d", read, lost, messages)
	}
}

// ring is an io_uring of eight entries, for one request at a time.
type ring struct {
	fd      int
	params  uringParams
	queue   []byte // both rings
	entries []byte
}

// uringParams is struct io_uring_params.
type uringParams struct {
	sqEntries, cqEntries, flags, cpu, idle, features, wq uint32
	_                                                    [3]uint32
	sq                                                   struct {
		head, tail, mask, entries, flags, dropped, array, _ uint32
		_                                                   uint64
	}
	cq struct {
		head, tail, mask, entries, overflow, cqes, flags, _ uint32
		_                                                   uint64
	}
}

func newRing(t testing.TB) *ring {
	t.Helper()
	r := &ring{}
	fd, _, errno := unix.Syscall(unix.SYS_IO_URING_SETUP, 8, uintptr(unsafe.Pointer(&r.params)), 0)
	if errno == unix.ENOSYS || errno == unix.EPERM {
		t.Skipf("kernel: io_uring: %v", errno)
	}
	if errno != 0 {
		t.Fatal(errno)
	}
	r.fd = int(fd)
	t.Cleanup(func() { unix.Close(r.fd) })
	size := max(int(r.params.sq.array)+8*4, int(r.params.cq.cqes)+16*16)
	var err error
	r.queue, err = unix.Mmap(r.fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE)
	check(t, err)
	t.Cleanup(func() { check(t, unix.Munmap(r.queue)) })
	r.entries, err = unix.Mmap(r.fd, 0x10000000, 8*64, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE)
	check(t, err)
	t.Cleanup(func() { check(t, unix.Munmap(r.entries)) })
	return r
}

func (r *ring) at(offset uint32) *uint32 { return (*uint32)(unsafe.Pointer(&r.queue[offset])) }

// send sends b and waits for the completion.
func (r *ring) send(t testing.TB, fd int, b []byte) {
	t.Helper()
	tail := *r.at(r.params.sq.tail)
	i := tail & *r.at(r.params.sq.mask)
	entry := (*struct {
		opcode, flags uint8
		ioprio        uint16
		fd            int32
		offset, addr  uint64
		len           uint32
		_             [36]byte
	})(unsafe.Pointer(&r.entries[64*i]))
	entry.opcode = 26 // IORING_OP_SEND
	entry.fd, entry.addr, entry.len = int32(fd), uint64(uintptr(unsafe.Pointer(&b[0]))), uint32(len(b))
	*r.at(r.params.sq.array + 4*i) = i
	*r.at(r.params.sq.tail) = tail + 1
	const getEvents = 1
	_, _, errno := unix.Syscall6(unix.SYS_IO_URING_ENTER, uintptr(r.fd), 1, 1, getEvents, 0, 0)
	if errno != 0 {
		t.Fatal(errno)
	}
	head := *r.at(r.params.cq.head)
	result := int32(*r.at(r.params.cq.cqes + 16*(head&*r.at(r.params.cq.mask)) + 8))
	if int(result) != len(b) {
		t.Fatalf("sent %d of %d", result, len(b))
	}
	*r.at(r.params.cq.head) = head + 1
}
