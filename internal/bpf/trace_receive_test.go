// SPDX-License-Identifier: Apache-2.0

package bpf_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/clock"
	"sockeye/internal/netns"
	"sockeye/internal/sockaddr"
	"sockeye/internal/testenv"
)

// allRX requests every measurement of received data.
const allRX = bpf.TraceRuleTCP | bpf.TraceRuleUDP | bpf.TraceRuleRX | bpf.TraceRuleReader

// rxRules is one rule for all connections and datagrams, with a sampling rate of one in n. Its groups are TCP, UDP
// and "other", index 0.
func rxRules(flags uint32, messages uint32) *bpf.TraceRules {
	r := &bpf.TraceRules{Groups: 3, Rules: []bpf.TraceRule{{Connections: 1, Messages: messages, Flags: flags, Groups: 2}}}
	r.Ruleset.Terms = 1
	r.Ruleset.Rule[0] = 1
	for role := range r.Ruleset.Role {
		r.Ruleset.Role[role].Word[0] = 1
	}
	r.Ruleset.Untagged.Word[0] = 1
	return r
}

// traced is a traced cgroup.
type traced struct {
	*bpf.Trace
	t      testing.TB
	config bpf.TraceConfig
	// before contains the counts to subtract, by protocol.
	before map[int]bpf.TraceRXStats
}

func trace(t testing.TB, rules *bpf.TraceRules) *traced {
	t.Helper()
	// Each write is one segment.
	check(t, os.WriteFile("/proc/sys/net/ipv4/tcp_autocorking", []byte("0"), 0))
	stamping, err := clock.OpenStamping()
	check(t, err)
	t.Cleanup(func() { check(t, stamping.Close()) })
	tr := &traced{t: t, before: make(map[int]bpf.TraceRXStats), config: bpf.TraceConfig{
		Dir: filepath.Join(testenv.BPFFS(t), "trace_test"), Cgroup: newCgroup(t, "trace"), Rules: rules}}
	tr.open()
	t.Cleanup(func() {
		check(t, tr.Close())
		check(t, bpf.RemoveTrace(tr.config.Dir))
	})
	return tr
}

func (tr *traced) open() {
	tr.t.Helper()
	var err error
	if tr.Trace, err = bpf.OpenTrace(tr.config); err != nil {
		var refused *ebpf.VerifierError
		if errors.As(err, &refused) {
			tr.t.Logf("%+v", refused)
		}
		tr.t.Fatalf("%+v", err)
	}
}

// newCgroup creates a cgroup below the tests' own cgroup.
func newCgroup(t testing.TB, name string) string {
	t.Helper()
	dir := filepath.Join(testenv.Cgroup(), name)
	check(t, os.Mkdir(dir, 0o755))
	t.Cleanup(func() { check(t, os.Remove(dir)) })
	return dir
}

// inside runs f with this process in a cgroup: a socket belongs to the cgroup in which it was created.
func inside(t testing.TB, cgroup string, f func()) {
	t.Helper()
	enter := func(dir string) { check(t, os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte("0"), 0)) }
	enter(cgroup)
	defer enter(testenv.Cgroup())
	f()
}

// ends is a sender and its receiver in the traced cgroup.
type ends struct{ sender, receiver int }

// rxEnds creates a pair of sockets in two cgroups.
func rxEnds(t testing.TB, senders, receivers string, protocol int, v6 bool) ends {
	t.Helper()
	at := netip.MustParseAddr("127.0.0.1")
	if v6 {
		at = netip.IPv6Loopback()
	}
	return rxEndsAt(t, at, protocol,
		func(f func()) { inside(t, senders, f) }, func(f func()) { inside(t, receivers, f) })
}

// rxEndsAt creates a pair of sockets in the given cgroups.
func rxEndsAt(t testing.TB, at netip.Addr, protocol int, sending, receiving func(func())) ends {
	t.Helper()
	domain, kind := unix.AF_INET, unix.SOCK_DGRAM
	if at.Is6() {
		domain = unix.AF_INET6
	}
	if protocol == unix.IPPROTO_TCP {
		kind = unix.SOCK_STREAM
	}
	var listener, sender int
	receiving(func() {
		var err error
		listener, err = unix.Socket(domain, kind|unix.SOCK_CLOEXEC, protocol)
		check(t, err)
		check(t, unix.Bind(listener, sockaddr.Of(netip.AddrPortFrom(at, 0))))
		if kind == unix.SOCK_STREAM {
			check(t, unix.Listen(listener, 1))
		}
	})
	to, err := unix.Getsockname(listener)
	check(t, err)
	sending(func() {
		var err error
		sender, err = unix.Socket(domain, kind|unix.SOCK_CLOEXEC, protocol)
		check(t, err)
		check(t, unix.Connect(sender, to))
	})
	e := ends{sender, listener}
	if kind == unix.SOCK_STREAM {
		check(t, unix.SetsockoptInt(sender, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1))
		e.receiver, _, err = unix.Accept4(listener, unix.SOCK_CLOEXEC)
		check(t, err)
		check(t, unix.Close(listener))
	}
	t.Cleanup(func() {
		// The test may have closed them.
		unix.Close(e.sender)
		unix.Close(e.receiver)
	})
	return e
}

func (tr *traced) ends(protocol int, v6 bool) ends {
	tr.t.Helper()
	return rxEnds(tr.t, testenv.Cgroup(), tr.config.Cgroup, protocol, v6)
}

// send sends writes of the given sizes.
func (e ends) send(t testing.TB, pieces, bytes int) {
	t.Helper()
	for range pieces {
		n, err := unix.Write(e.sender, make([]byte, bytes))
		check(t, err)
		if n != bytes {
			t.Fatalf("sent %d of %d bytes", n, bytes)
		}
	}
}

// read reads the given number of bytes, for UDP one datagram after the other.
func (e ends) read(t testing.TB, bytes int) {
	t.Helper()
	buf := make([]byte, 1<<16)
	for bytes > 0 {
		n, err := unix.Read(e.receiver, buf[:min(bytes, len(buf))])
		check(t, err)
		if n == 0 {
			t.Fatalf("the stream ends %d bytes too early", bytes)
		}
		bytes -= n
	}
}

// counts contains the received and the waiting samples of one group.
type rxCounts struct {
	*bpf.TraceRXStats
	waiting bpf.TraceWaiting
}

// received returns the counts of a protocol's group, or zeros.
func (tr *traced) received(protocol int) rxCounts {
	tr.t.Helper()
	groups, err := tr.Groups()
	check(tr.t, err)
	waiting, err := tr.RXWaiting()
	check(tr.t, err)
	for index, g := range groups {
		if int(g.Protocol) == protocol {
			s, err := tr.RXStats(index)
			check(tr.t, err)
			before := tr.before[protocol]
			s.Chosen -= before.Chosen
			s.Unstamped -= before.Unstamped
			for i := range s.Outcome {
				s.Outcome[i] -= before.Outcome[i]
			}
			for i := range s.Stage {
				for k := range s.Stage[i].Bucket {
					s.Stage[i].Bucket[k] -= before.Stage[i].Bucket[k]
				}
			}
			return rxCounts{s, waiting[index]}
		}
	}
	return rxCounts{TraceRXStats: &bpf.TraceRXStats{}}
}

// forget subtracts the present counts from all later ones.
func (tr *traced) forget() {
	for _, protocol := range []int{unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
		delete(tr.before, protocol)
		tr.before[protocol] = *tr.received(protocol).TraceRXStats
	}
}

func (c rxCounts) String() string {
	return fmt.Sprintf("chosen %d, read %d, dropped %d, unread %d, full %d, unstamped %d, waiting %+v", c.Chosen,
		c.Outcome[bpf.TraceRXRead], c.Outcome[bpf.TraceRXDropped], c.Outcome[bpf.TraceRXUnread], c.Outcome[bpf.TraceRXFull],
		c.Unstamped, c.waiting)
}

// expect fails the test unless all samples are accounted for, with the given counts.
func (c rxCounts) expect(t testing.TB, chosen, read, dropped, unread, full, waiting int) {
	t.Helper()
	want := bpf.TraceRXStats{Chosen: uint64(chosen)}
	want.Outcome[bpf.TraceRXRead] = uint64(read)
	want.Outcome[bpf.TraceRXDropped] = uint64(dropped)
	want.Outcome[bpf.TraceRXUnread] = uint64(unread)
	want.Outcome[bpf.TraceRXFull] = uint64(full)
	if c.Chosen != want.Chosen || c.Outcome != want.Outcome || c.waiting.Count != uint64(waiting) {
		t.Errorf("%v; want chosen %d, read %d, dropped %d, unread %d, full %d, waiting %d",
			c, chosen, read, dropped, unread, full, waiting)
	}
}

// span returns the number of values in a histogram and bounds of all values, with a precision of 1/16.
func span(h bpf.TraceHistogram) (count uint64, least, most time.Duration) {
	bound := func(i int) time.Duration {
		if i < 16 {
			return time.Duration(i * 16)
		}
		return time.Duration(16+i%16) << ((i-16)/16 + 4)
	}
	for i, n := range h.Bucket {
		if n == 0 {
			continue
		}
		if count == 0 {
			least = bound(i)
		}
		count, most = count+n, bound(i+1)
	}
	return count, least, most
}

func (c rxCounts) span(stage int) (count uint64, least, most time.Duration) {
	return span(bpf.TraceHistogram(c.Stage[stage]))
}

// families runs a test for both protocols and both families.
func families(t *testing.T, tr *traced, f func(t *testing.T, protocol int, v6 bool)) {
	for name, protocol := range map[string]int{"tcp": unix.IPPROTO_TCP, "udp": unix.IPPROTO_UDP} {
		for family, v6 := range map[string]bool{"4": false, "6": true} {
			t.Run(name+family, func(t *testing.T) {
				tr.forget()
				f(t, protocol, v6)
			})
		}
	}
}

// TestRXStoppedReader checks that a reader that has stopped is visible while it stops, and is counted in the stage
// reader once it goes on.
func TestRXStoppedReader(t *testing.T) {
	tr := trace(t, rxRules(allRX, 1))
	families(t, tr, func(t *testing.T, protocol int, v6 bool) {
		const pieces, bytes, stop = 5, 1000, 80 * time.Millisecond
		e := tr.ends(protocol, v6)
		start := time.Now()
		e.send(t, pieces, bytes)
		sent := time.Since(start)
		until(t, "samples wait that long", func() bool { return tr.received(protocol).waiting.Oldest > stop })
		tr.received(protocol).expect(t, pieces, 0, 0, 0, 0, pieces)
		if protocol == unix.IPPROTO_TCP {
			e.read(t, bytes/2)
			tr.received(protocol).expect(t, pieces, 0, 0, 0, 0, pieces)
			e.read(t, pieces*bytes-bytes/2)
		} else {
			buf := make([]byte, bytes)
			_, _, err := unix.Recvfrom(e.receiver, buf, unix.MSG_PEEK)
			check(t, err)
			tr.received(protocol).expect(t, pieces, 0, 0, 0, 0, pieces)
			e.read(t, pieces*bytes)
		}
		elapsed := time.Since(start)
		c := tr.received(protocol)
		c.expect(t, pieces, pieces, 0, 0, 0, 0)
		// Buckets are 1/16 wide.
		if n, least, most := c.span(bpf.TraceRXReader); n != pieces || least < (stop-sent)*15/16 || most > elapsed*17/16 || most < stop {
			t.Errorf("reader: %d times of %v to %v, want %d of %v to %v", n, least, most, pieces, stop-sent, elapsed)
		}
		// A reader that waits when data arrives.
		for range 100 {
			e.send(t, 1, bytes)
			e.read(t, bytes)
		}
		after := tr.received(protocol)
		after.expect(t, pieces+100, pieces+100, 0, 0, 0, 0)
		if n, least, _ := after.span(bpf.TraceRXReader); n != pieces+100 || least > time.Millisecond {
			t.Errorf("reader: %d times, %v at least", n, least)
		}
		if n, least, most := after.span(bpf.TraceRXStack); n != pieces+100 || least > time.Millisecond || most > time.Second || after.Unstamped != 0 {
			t.Errorf("stack: %d times of %v to %v, %d unstamped", n, least, most, after.Unstamped)
		}
	})
}

// TestRXBeside checks that reading one socket does not affect samples of another one, and that reading a part of a
// segment does not complete it.
func TestRXBeside(t *testing.T) {
	tr := trace(t, rxRules(allRX, 1))
	tcp, udp, other := tr.ends(unix.IPPROTO_TCP, false), tr.ends(unix.IPPROTO_UDP, false), tr.ends(unix.IPPROTO_UDP, true)
	for _, e := range []ends{tcp, udp, other} {
		e.send(t, 2, 100)
	}
	tcp.read(t, 50)
	tr.received(unix.IPPROTO_TCP).expect(t, 2, 0, 0, 0, 0, 2)
	udp.read(t, 100)
	tr.received(unix.IPPROTO_TCP).expect(t, 2, 0, 0, 0, 0, 2)
	tr.received(unix.IPPROTO_UDP).expect(t, 4, 1, 0, 0, 0, 3)
	tcp.read(t, 100)
	tr.received(unix.IPPROTO_TCP).expect(t, 2, 1, 0, 0, 0, 1)
	check(t, unix.Close(other.receiver))
	until(t, "the socket ends", func() bool { return tr.received(unix.IPPROTO_UDP).waiting.Count == 1 })
	tr.received(unix.IPPROTO_UDP).expect(t, 4, 1, 0, 2, 0, 1)
	tcp.read(t, 50)
	udp.read(t, 100)
	tr.received(unix.IPPROTO_TCP).expect(t, 2, 2, 0, 0, 0, 0)
	tr.received(unix.IPPROTO_UDP).expect(t, 4, 2, 0, 2, 0, 0)
}

// TestRXUnread checks that data in a socket that is closed counts as unread.
func TestRXUnread(t *testing.T) {
	tr := trace(t, rxRules(allRX, 1))
	families(t, tr, func(t *testing.T, protocol int, v6 bool) {
		for round := range 3 {
			e := tr.ends(protocol, v6)
			e.send(t, 4, 100)
			e.read(t, 100)
			tr.received(protocol).expect(t, 4*(round+1), round+1, 0, 3*round, 0, 3)
			check(t, unix.Close(e.receiver))
			until(t, "the socket ends", func() bool { return tr.received(protocol).waiting.Count == 0 })
			tr.received(protocol).expect(t, 4*(round+1), round+1, 0, 3*(round+1), 0, 0)
			if readers := tr.Readers(); readers != 0 {
				t.Errorf("%d sockets are remembered", readers)
			}
		}
	})
}

// TestRXFull checks that a socket has a bounded number of samples; further segments are only counted.
func TestRXFull(t *testing.T) {
	tr := trace(t, rxRules(allRX, 1))
	families(t, tr, func(t *testing.T, protocol int, v6 bool) {
		e, room := tr.ends(protocol, v6), bpf.TraceReaderSamples
		if bySocket, err := bpf.HaveTracepoint("sock_recv_length"); err != nil || !bySocket && protocol == unix.IPPROTO_UDP {
			check(t, err)
			room += 8 // datagrams wait by themselves
		}
		over := bpf.TraceReaderSamples + 8 - room
		for round := range 3 {
			for range room + over {
				// While an acknowledgement is delayed, TCP might merge them.
				before := tr.received(protocol).Chosen
				e.send(t, 1, 10)
				until(t, "it has come", func() bool { return tr.received(protocol).Chosen > before })
			}
			tr.received(protocol).expect(t, (room+over)*(round+1), room*round, 0, 0, over*(round+1), room)
			e.read(t, 10*(room+over))
			tr.received(protocol).expect(t, (room+over)*(round+1), room*(round+1), 0, 0, over*(round+1), 0)
		}
	})
}

// TestRXStackOnly requests only the time to the socket: nothing waits, and no program is attached that other sockets
// would run.
func TestRXStackOnly(t *testing.T) {
	tr := trace(t, rxRules(allRX&^bpf.TraceRuleReader, 1))
	families(t, tr, func(t *testing.T, protocol int, v6 bool) {
		programs, err := tr.RXPrograms()
		check(t, err)
		if _, ok := programs["link_rx"]; !ok || len(programs) != 1 {
			t.Errorf("programs %v", programs)
		}
		e := tr.ends(protocol, v6)
		e.send(t, 10, 100)
		c := tr.received(protocol)
		c.expect(t, 10, 10, 0, 0, 0, 0)
		if n, _, most := c.span(bpf.TraceRXStack); n != 10 || most > time.Second {
			t.Errorf("%d times, at most %v", n, most)
		}
		if n, _, _ := c.span(bpf.TraceRXReader); n != 0 {
			t.Errorf("%d times of the reader", n)
		}
	})
}

// TestRXStackDelay checks that a packet whose timestamp is a known time old has that delay.
func TestRXStackDelay(t *testing.T) {
	tr := trace(t, rxRules(allRX, 1))
	families(t, tr, func(t *testing.T, protocol int, v6 bool) {
		// Programs of a cgroup run before those of its ancestors.
		below := newCgroup(t, "trace/late")
		for _, test := range []struct {
			late     time.Duration
			measured bool
		}{{3 * time.Millisecond, true}, {time.Minute, true}, {2 * time.Hour, false}, {-time.Second, false}} {
			const offset = 152 // of tstamp in struct __sk_buff
			p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
				Type: ebpf.CGroupSKB, AttachType: ebpf.AttachCGroupInetIngress, License: "Dual BSD/GPL",
				Instructions: asm.Instructions{
					asm.LoadMem(asm.R2, asm.R1, offset, asm.DWord),
					asm.LoadImm(asm.R3, int64(test.late), asm.DWord),
					asm.Sub.Reg(asm.R2, asm.R3),
					asm.StoreMem(asm.R1, offset, asm.R2, asm.DWord),
					asm.Mov.Imm(asm.R0, 1), asm.Return(),
				},
			})
			check(t, err)
			defer p.Close()
			l, err := link.AttachCgroup(link.CgroupOptions{Path: below, Attach: ebpf.AttachCGroupInetIngress, Program: p})
			check(t, err)
			defer l.Close()
			e := rxEnds(t, testenv.Cgroup(), below, protocol, v6)
			tr.forget()
			e.send(t, 5, 100)
			e.read(t, 500)
			c := tr.received(protocol)
			c.expect(t, 5, 5, 0, 0, 0, 0)
			n, least, most := c.span(bpf.TraceRXStack)
			if !test.measured && (n != 0 || c.Unstamped != 5) ||
				test.measured && (n != 5 || c.Unstamped != 0 || least < test.late*15/16 || most > (test.late+100*time.Millisecond)*17/16) {
				t.Errorf("%v: %d times of %v to %v, %d unstamped", test.late, n, least, most, c.Unstamped)
			}
			check(t, l.Close())
		}
	})
}

// TestRXDatagramsExact accounts for every one of many datagrams, by kind, while most are dropped; also with several
// senders and readers, and more than may wait.
func TestRXDatagramsExact(t *testing.T) {
	const sent = exactly
	tr := trace(t, rxRules(allRX, 1))
	for _, test := range []struct{ threads, buffer int }{{1, 4096}, {2, 4096}, {2, 1 << 20}} {
		t.Run(fmt.Sprintf("%d,%d", test.threads, test.buffer), func(t *testing.T) {
			tr.forget()
			e := tr.ends(unix.IPPROTO_UDP, false)
			check(t, unix.SetsockoptInt(e.receiver, unix.SOL_SOCKET, unix.SO_RCVBUF, test.buffer))
			var senders, readers sync.WaitGroup
			var read atomic.Uint64
			for range test.threads {
				senders.Go(func() { e.send(t, sent/test.threads, 64) })
				readers.Go(func() {
					buf := make([]byte, 100)
					for {
						n, err := unix.Read(e.receiver, buf)
						if err != nil || n == 1 {
							return
						}
						read.Add(1)
					}
				})
			}
			senders.Wait()
			until(t, "the socket is empty", func() bool { return queued(t, e.receiver) == 0 })
			// The readers end by this.
			for range test.threads {
				e.send(t, 1, 1)
			}
			readers.Wait()
			c := tr.received(unix.IPPROTO_UDP)
			t.Logf("%d of %d read; %v", read.Load(), sent, c)
			var sum uint64
			for _, n := range c.Outcome {
				sum += n
			}
			all := sent + uint64(test.threads)
			dropped := sent - read.Load()
			if c.Chosen != all || sum != all || c.waiting.Count != 0 || c.Outcome[bpf.TraceRXUnread] != 0 || c.Outcome[bpf.TraceRXDropped] > dropped {
				t.Errorf("%v; want chosen %d, dropped %d at most", c, all, dropped)
			}
			// See TestUDPExact. A datagram whose drop was not seen counts as read.
			if test.threads == 1 && (c.Outcome[bpf.TraceRXFull] != 0 || c.Outcome[bpf.TraceRXDropped]+sent/1000 < dropped) {
				t.Errorf("%v; want dropped %d, full 0", c, dropped)
			}
		})
	}
}

// TestRXOvertaken checks that a datagram that is read before one that reached the host earlier, on another CPU, is
// reported as read at that time.
func TestRXOvertaken(t *testing.T) {
	if runtime.NumCPU() < 2 {
		t.Skip("CPU: there is one")
	}
	const overtaking, slow = 20, 1000
	tr := trace(t, rxRules(allRX, 1))
	// Programs of a cgroup run before those of its ancestors: this one delays a large datagram after it was sampled.
	const length = 0 // of len in struct __sk_buff
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.CGroupSKB, AttachType: ebpf.AttachCGroupInetIngress, License: "Dual BSD/GPL",
		Instructions: asm.Instructions{
			asm.LoadMem(asm.R2, asm.R1, length, asm.Word),
			asm.JLT.Imm(asm.R2, slow, "out"),
			asm.Mov.Imm(asm.R6, 50_000),
			asm.FnKtimeGetNs.Call().WithSymbol("again"),
			asm.Sub.Imm(asm.R6, 1),
			asm.JNE.Imm(asm.R6, 0, "again"),
			asm.Mov.Imm(asm.R0, 1).WithSymbol("out"), asm.Return(),
		},
	})
	check(t, err)
	defer p.Close()
	l, err := link.AttachCgroup(link.CgroupOptions{Path: testenv.Cgroup(), Attach: ebpf.AttachCGroupInetIngress, Program: p})
	check(t, err)
	defer l.Close()
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); {
		e := tr.ends(unix.IPPROTO_UDP, false)
		other := ends{receiver: e.receiver}
		to, err := unix.Getsockname(e.receiver)
		check(t, err)
		other.sender, err = unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		check(t, err)
		check(t, unix.Connect(other.sender, to))
		tr.forget()
		var late sync.WaitGroup
		late.Go(func() { onCPU(t, 1, func() { e.send(t, 1, slow) }) })
		onCPU(t, 0, func() {
			for tr.received(unix.IPPROTO_UDP).Chosen == 0 {
			}
			other.send(t, overtaking, 10)
		})
		buf := make([]byte, 2*slow)
		var last int
		for range overtaking + 1 {
			last, err = unix.Read(e.receiver, buf)
			check(t, err)
		}
		late.Wait()
		c := tr.received(unix.IPPROTO_UDP)
		check(t, unix.Close(other.sender))
		c.expect(t, overtaking+1, overtaking+1, 0, 0, 0, 0)
		if last == slow {
			return
		}
	}
	t.Error("no datagram was overtaken")
}

// TestRXFirstDatagrams checks that the first datagrams of a socket that arrive at the same time, on two CPUs, are
// both counted.
func TestRXFirstDatagrams(t *testing.T) {
	const sockets = 500
	tr := trace(t, rxRules(allRX, 1))
	for range sockets {
		e := tr.ends(unix.IPPROTO_UDP, false)
		var senders sync.WaitGroup
		var ready atomic.Int32
		for range 2 {
			senders.Go(func() {
				for ready.Add(1); ready.Load() < 2; {
				}
				e.send(t, 1, 10)
			})
		}
		senders.Wait()
		e.read(t, 20)
		check(t, errors.Join(unix.Close(e.sender), unix.Close(e.receiver)))
	}
	tr.received(unix.IPPROTO_UDP).expect(t, 2*sockets, 2*sockets, 0, 0, 0, 0)
}

// queued returns the number of bytes in a socket's receive queue.
func queued(t testing.TB, fd int) int {
	t.Helper()
	n, err := unix.IoctlGetInt(fd, unix.SIOCINQ)
	check(t, err)
	return n
}

// segmented sends each segment of at most the given size through lo separately.
func segmented(t testing.TB, mtu int) {
	t.Helper()
	lo, err := netlink.LinkByName("lo")
	check(t, err)
	was := lo.Attrs().MTU
	check(t, netlink.LinkSetMTU(lo, mtu))
	setTSO(t, "lo", 0)
	t.Cleanup(func() {
		check(t, netlink.LinkSetMTU(lo, was))
		setTSO(t, "lo", 1)
	})
}

func setTSO(t testing.TB, device string, on uint32) {
	t.Helper()
	const ethtoolSetTSO = 0x1f
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	check(t, err)
	defer unix.Close(fd)
	command := [2]uint32{ethtoolSetTSO, on}
	request := struct {
		name [unix.IFNAMSIZ]byte
		data unsafe.Pointer
		_    [16]byte
	}{data: unsafe.Pointer(&command)}
	copy(request.name[:], device)
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&request))); errno != 0 {
		t.Fatalf("set TSO of %s: %v", device, errno)
	}
}

// TestRXSegmentsExact accounts for every one of many segments: read, or unread when connections are closed, with a
// receiver whose buffer is too small.
func TestRXSegmentsExact(t *testing.T) {
	const connections, segment, segments = 4, 1280 - 40 - 32, exactly / 4
	segmented(t, 1280)
	tr := trace(t, rxRules(allRX, 1))
	var busy sync.WaitGroup
	for i := range connections {
		e := tr.ends(unix.IPPROTO_TCP, i%2 == 1)
		check(t, unix.SetsockoptInt(e.receiver, unix.SOL_SOCKET, unix.SO_RCVBUF, 1<<16))
		busy.Go(func() {
			piece := make([]byte, segment*50)
			for range segments / 50 {
				// The write fails once the reader has given up.
				if _, err := unix.Write(e.sender, piece); err != nil {
					break
				}
			}
			_ = unix.Shutdown(e.sender, unix.SHUT_WR)
		})
		busy.Go(func() {
			buf := make([]byte, 1777)
			for sum := 0; ; {
				n, err := unix.Read(e.receiver, buf)
				sum += n
				if n <= 0 || err != nil || i == 3 && sum > segment*segments*3/4 {
					break
				}
			}
			unix.Close(e.receiver)
		})
	}
	busy.Wait()
	until(t, "nothing waits", func() bool { return tr.received(unix.IPPROTO_TCP).waiting.Count == 0 })
	c := tr.received(unix.IPPROTO_TCP)
	t.Log(c)
	var sum uint64
	for _, n := range c.Outcome {
		sum += n
	}
	if n, _, _ := c.span(bpf.TraceRXReader); sum != c.Chosen || c.Chosen < connections*segments*3/4 || n > c.Outcome[bpf.TraceRXRead] {
		t.Errorf("%d chosen, %d ends, %d times", c.Chosen, sum, n)
	}
}

// TestRXShare checks that the requested share is sampled.
func TestRXShare(t *testing.T) {
	const sent, share = 20_000, 50
	tr := trace(t, rxRules(allRX, share))
	families(t, tr, func(t *testing.T, protocol int, v6 bool) {
		e := tr.ends(protocol, v6)
		for range sent {
			e.send(t, 1, 10)
			e.read(t, 10)
		}
		c := tr.received(protocol)
		// Ten standard deviations.
		if n := int(c.Chosen); n < 250 || n > 550 {
			t.Errorf("%d of %d chosen, want %d", n, sent, sent/share)
		}
		c.expect(t, int(c.Chosen), int(c.Chosen), 0, 0, 0, 0)
	})
}

// runs returns how often each program of openRX has run.
func (tr *traced) runs() map[string]uint64 {
	tr.t.Helper()
	ids, err := tr.RXPrograms()
	check(tr.t, err)
	runs := make(map[string]uint64)
	for name, id := range ids {
		p, err := ebpf.NewProgramFromID(id)
		check(tr.t, err)
		stats, err := p.Stats()
		check(tr.t, err)
		runs[name] = stats.RunCount
		check(tr.t, p.Close())
	}
	return runs
}

// TestRXOthers checks that sockets of other cgroups have no samples and do not run the programs of the cgroup. When
// tracing ends, its programs are gone.
func TestRXOthers(t *testing.T) {
	tr := trace(t, rxRules(allRX|bpf.TraceRuleUDPTX, 1))
	stats, err := ebpf.EnableStats(unix.BPF_STATS_RUN_TIME)
	check(t, err)
	defer stats.Close()
	for _, protocol := range []int{unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
		e := rxEnds(t, testenv.Cgroup(), testenv.Cgroup(), protocol, false)
		e.send(t, 100, 100)
		e.read(t, 100*100)
		tr.received(protocol).expect(t, 0, 0, 0, 0, 0, 0)
	}
	tr.expectSent(0, 0, 0, 0, 0, 0)
	runs := tr.runs()
	for _, name := range []string{"link_rx", "link_udp"} {
		if n, ok := runs[name]; n != 0 || !ok {
			t.Errorf("%s ran %d times: %v", name, n, runs)
		}
	}
	// The counting itself is not the cause.
	e := tr.ends(unix.IPPROTO_UDP, false)
	e.send(t, 1, 1)
	if n := tr.runs()["link_rx"]; n != 1 {
		t.Errorf("link_rx ran %d times, want 1", n)
	}

	ids, err := tr.RXPrograms()
	check(t, err)
	check(t, tr.Close())
	check(t, bpf.RemoveTrace(tr.config.Dir))
	for name, id := range ids {
		until(t, name+" ends", func() bool {
			p, err := ebpf.NewProgramFromID(id)
			if err == nil {
				p.Close()
			}
			return errors.Is(err, os.ErrNotExist)
		})
	}
	cgroup, err := os.Open(tr.config.Cgroup)
	check(t, err)
	defer cgroup.Close()
	for _, at := range []ebpf.AttachType{ebpf.AttachCGroupInetIngress, ebpf.AttachCGroupInetEgress, ebpf.AttachCgroupInetSockRelease} {
		attached, err := link.QueryPrograms(link.QueryOptions{Target: int(cgroup.Fd()), Attach: at})
		if err != nil || len(attached.Programs) > 0 {
			t.Errorf("%v: %v, %v", at, attached, err)
		}
	}
}

// TestRXAdopted checks that sampling goes on without the agent, and that the next agent continues the counts with the
// agent's capabilities only.
func TestRXAdopted(t *testing.T) {
	tr := trace(t, rxRules(allRX|bpf.TraceRuleUDPTX, 1))
	sockets := map[int]ends{}
	for _, protocol := range []int{unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
		sockets[protocol] = tr.ends(protocol, true)
		sockets[protocol].send(t, 1, 100)
	}
	check(t, tr.Close())
	for _, e := range sockets {
		e.send(t, 1, 100)
	}
	tr.config.Adopt = true
	testenv.WithRights(t, []int{unix.CAP_BPF, unix.CAP_NET_ADMIN, unix.CAP_PERFMON}, tr.open)
	for protocol, e := range sockets {
		tr.received(protocol).expect(t, 2, 0, 0, 0, 0, 2)
		e.read(t, 200)
		tr.received(protocol).expect(t, 2, 2, 0, 0, 0, 0)
		e.send(t, 1, 100)
		e.read(t, 100)
		tr.received(protocol).expect(t, 3, 3, 0, 0, 0, 0)
	}
}

// TestRXGroups counts received and sent data by peer, by the port that was connected to and by cgroup, on both sides.
// Beyond the maximal number of groups, data is counted as "other".
func TestRXGroups(t *testing.T) {
	rules := rxRules(allRX|bpf.TraceRuleUDPTX, 1)
	rule := &rules.Rules[0]
	rule.GroupBy = bpf.TraceByRemote | bpf.TraceByPort | bpf.TraceByCgroup
	rule.Bits4, rule.Bits6 = 96+24, 64
	rule.Groups, rules.Groups = 4, 5
	tr := trace(t, rules)
	var stat unix.Stat_t
	check(t, unix.Stat(tr.config.Cgroup, &stat))

	type group struct {
		remote         string
		port, protocol int
	}
	var want []group
	for _, protocol := range []int{unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
		// Both ends are traced.
		e := rxEnds(t, tr.config.Cgroup, tr.config.Cgroup, protocol, protocol == unix.IPPROTO_TCP)
		e.send(t, 3, 10)
		e.read(t, 30)
		to, err := unix.Getpeername(e.sender)
		check(t, err)
		remote := "::"
		if protocol == unix.IPPROTO_UDP {
			remote = "127.0.0.0"
		} else {
			_, err := unix.Write(e.receiver, make([]byte, 5))
			check(t, err)
			_, err = unix.Read(e.sender, make([]byte, 5))
			check(t, err)
		}
		want = append(want, group{remote, int(sockaddr.AddrPort(to).Port()), protocol})
	}
	groups, err := tr.Groups()
	check(t, err)
	var udp uint32
	for index, g := range groups {
		got := group{bpf.UnmappedAddress(g.Remote).String(), int(g.Port), int(g.Protocol)}
		i := slices.Index(want, got)
		if i < 0 || g.Rule != 1 || g.Cgroup != stat.Ino {
			t.Errorf("group %+v", g)
			continue
		}
		want = slices.Delete(want, i, i+1)
		if g.Protocol == unix.IPPROTO_UDP {
			udp = index
		}
	}
	if len(want) > 0 {
		t.Errorf("no groups %v", want)
	}
	s, err := tr.Stats(udp)
	check(t, err)
	received, err := tr.RXStats(udp)
	check(t, err)
	if s.Outcome[bpf.TraceSent] != 3 || received.Outcome[bpf.TraceRXRead] != 3 {
		t.Errorf("UDP: %v sent, %v received", s.Outcome, received.Outcome)
	}

	// Two groups are left for these ports.
	for range 4 {
		e := tr.ends(unix.IPPROTO_UDP, false)
		e.send(t, 1, 1)
		e.read(t, 1)
	}
	other, err := tr.RXStats(rule.First)
	check(t, err)
	if groups, err := tr.Groups(); err != nil || len(groups) != 4 || other.Outcome[bpf.TraceRXRead] != 2 {
		t.Errorf("%d groups, %v read of other, %v", len(groups), other.Outcome, err)
	}
}

// newVeth creates a network namespace behind a veth interface with 10.8.0.1 and fd08::1; the peer has .2 and ::2. It
// returns a function that runs another function in the namespace.
func newVeth(t testing.TB) (there func(func())) {
	t.Helper()
	here, err := os.Open("/proc/self/ns/net")
	check(t, err)
	defer here.Close()
	address := func(host byte) {
		link, err := netlink.LinkByName("veth")
		check(t, err)
		check(t, netlink.LinkSetUp(link))
		for _, prefix := range []string{"10.8.0.%d/24", "fd08::%d/64"} {
			a, err := netlink.ParseAddr(fmt.Sprintf(prefix, host))
			check(t, err)
			if a.IP.To4() == nil {
				a.Flags = unix.IFA_F_NODAD
			}
			check(t, netlink.AddrAdd(link, a))
		}
	}
	var other *os.File
	check(t, netns.Thread(func() error {
		check(t, unix.Unshare(unix.CLONE_NEWNET))
		other, err = os.Open("/proc/thread-self/ns/net")
		check(t, err)
		check(t, netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "veth"}, PeerName: "veth", PeerNamespace: netlink.NsFd(here.Fd())}))
		address(2)
		return nil
	}))
	address(1)
	local := func(text string) error {
		return netns.AwaitLocal(&netlink.Handle{}, netip.MustParseAddr(text), time.Minute)
	}
	check(t, local("fd08::1"))
	check(t, netns.Do(other, func() error { return local("fd08::2") }))
	t.Cleanup(func() {
		link, err := netlink.LinkByName("veth")
		check(t, err)
		check(t, netlink.LinkDel(link))
		check(t, other.Close()) // then: with the namespace, the kernel deletes its devices
	})
	return func(f func()) {
		check(t, netns.Thread(func() error {
			check(t, unix.Setns(int(other.Fd()), unix.CLONE_NEWNET))
			f()
			return nil
		}))
	}
}

// TestRXClocks checks that transmit times of a sender, of whatever clock, are not taken for arrival times, neither
// over lo nor from another namespace.
func TestRXClocks(t *testing.T) {
	tr := trace(t, rxRules(allRX, 1))
	expect := func(t *testing.T, protocol, n int) {
		t.Helper()
		c := tr.received(protocol)
		if c.Chosen != uint64(n) || c.Unstamped != 0 {
			t.Errorf("%v", c)
		}
		if times, _, most := c.span(bpf.TraceRXStack); times != uint64(n) || most > time.Second {
			t.Errorf("%d times, at most %v", times, most)
		}
	}
	t.Run("txtime", func(t *testing.T) {
		tr.forget()
		// Clocks of struct sock_txtime, for the time of SCM_TXTIME.
		const soTxtime = 61
		for i, clock := range []int32{unix.CLOCK_MONOTONIC, unix.CLOCK_TAI, unix.CLOCK_REALTIME} {
			e := tr.ends(unix.IPPROTO_UDP, i == 1)
			txtime := struct {
				clock int32
				flags uint32
			}{clock: clock}
			check(t, unix.SetsockoptString(e.sender, unix.SOL_SOCKET, soTxtime, unsafe.String((*byte)(unsafe.Pointer(&txtime)), unsafe.Sizeof(txtime))))
			var now unix.Timespec
			check(t, unix.ClockGettime(clock, &now))
			control := make([]byte, unix.CmsgSpace(8))
			header := (*unix.Cmsghdr)(unsafe.Pointer(&control[0]))
			header.Level, header.Type = unix.SOL_SOCKET, soTxtime
			header.SetLen(unix.CmsgLen(8))
			binary.NativeEndian.PutUint64(control[unix.CmsgLen(0):], uint64(now.Nano()))
			check(t, unix.Sendmsg(e.sender, make([]byte, 10), control, nil, 0))
			e.read(t, 10)
			expect(t, unix.IPPROTO_UDP, i+1)
		}
	})
	t.Run("paced", func(t *testing.T) {
		tr.forget()
		e := tr.ends(unix.IPPROTO_TCP, false)
		check(t, unix.SetsockoptInt(e.sender, unix.SOL_SOCKET, unix.SO_MAX_PACING_RATE, 10_000_000))
		e.send(t, 1, 1_000)
		e.read(t, 1_000)
		expect(t, unix.IPPROTO_TCP, 1)
	})
	t.Run("veth", func(t *testing.T) {
		there := newVeth(t)
		for _, protocol := range []int{unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
			tr.forget()
			at := netip.MustParseAddr("fd08::1")
			if protocol == unix.IPPROTO_UDP {
				at = netip.MustParseAddr("10.8.0.1")
			}
			e := rxEndsAt(t, at, protocol, there, func(f func()) { inside(t, tr.config.Cgroup, f) })
			for range 10 {
				e.send(t, 1, 100)
				e.read(t, 100)
			}
			expect(t, protocol, 10)
		}
	})
}
