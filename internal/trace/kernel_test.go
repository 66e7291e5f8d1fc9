// SPDX-License-Identifier: Apache-2.0

package trace_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/config"
	"sockeye/internal/sockaddr"
	"sockeye/internal/testenv"
	"sockeye/internal/trace/measure"
	"sockeye/lab"
)

// checkSamples checks that the times of messages are in order, and that no stage is longer than the whole.
func checkSamples(t testing.TB, k *tracing, samples []bpf.TraceSample) {
	t.Helper()
	translate, err := k.names.Translator(k.Trace, k.compiled.Rules)
	check(t, err)
	for _, raw := range samples {
		m := raw.Message
		times := []uint64{m.Started, m.Sent, m.Queued, m.Requeued, m.Driver, raw.Ended}
		known := slices.DeleteFunc(times, func(at uint64) bool { return at == 0 })
		if !slices.IsSorted(known) {
			t.Errorf("times %v are not in their order", known)
		}
		s := translate(&raw)
		stamps := s.Outcome == measure.Acked || s.Outcome == measure.Retransmitted || s.Outcome == measure.Coalesced
		if stamps && s.Stages[config.StageStack]+s.Stages[config.StageQdisc]+s.Requeued+s.Stages[config.StageNetwork] > s.Stages[measure.Total] {
			t.Errorf("stages of %v are longer than all: %v", s.Outcome, s.Stages)
		}
		if s.Outcome == measure.Acked && s.Repeats != 0 || s.Outcome == measure.Retransmitted && (s.Repeats == 0 || s.Retransmits == 0) {
			t.Errorf("%s, and was sent %d times more, of %d retransmits", s.Outcome, s.Repeats, s.Retransmits)
		}
	}
}

// queueing adds a queueing discipline to the link of a world.
func (w *world) queueing(attach func(netlink.Link) netlink.Qdisc) {
	w.t.Helper()
	nl := w.a.Netlink()
	dev, err := nl.LinkByName(w.link.Options().Name)
	check(w.t, err)
	check(w.t, nl.QdiscReplace(attach(dev)))
}

// tbf limits the rate with a queue of the given bytes.
func tbf(rate uint64, bytes uint32) func(netlink.Link) netlink.Qdisc {
	return func(dev netlink.Link) netlink.Qdisc {
		return &netlink.Tbf{
			QdiscAttrs: netlink.QdiscAttrs{LinkIndex: dev.Attrs().Index, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT},
			Rate:       rate, Limit: bytes, Buffer: netlink.Xmittime(rate, 2000),
		}
	}
}

// dropFirst limits the link's queue to three packets: a fourth packet causes the first to be dropped.
func (w *world) dropFirst() {
	w.t.Helper()
	nl := w.a.Netlink()
	dev, err := nl.LinkByName(w.link.Options().Name)
	check(w.t, err)
	index, length := dev.Attrs().Index, dev.Attrs().TxQLen
	root := netlink.NewHtb(netlink.QdiscAttrs{LinkIndex: index, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT})
	root.Defcls = 1
	class := netlink.NewHtbClass(netlink.ClassAttrs{LinkIndex: index, Handle: netlink.MakeHandle(1, 1), Parent: netlink.MakeHandle(1, 0)},
		netlink.HtbClassAttrs{Rate: 8 << 20, Buffer: 2000, Cbuffer: 2000})
	// Its length is taken from the device when it is created.
	fifo := &netlink.GenericQdisc{QdiscType: "pfifo_head_drop",
		QdiscAttrs: netlink.QdiscAttrs{LinkIndex: index, Handle: netlink.MakeHandle(2, 0), Parent: netlink.MakeHandle(1, 1)}}
	check(w.t, errors.Join(nl.QdiscReplace(root), nl.ClassAdd(class), nl.LinkSetTxQLen(dev, 3), nl.QdiscAdd(fifo), nl.LinkSetTxQLen(dev, length)))
}

// TestWorlds sends over paths that delay, drop, split and merge packets.
func TestWorlds(t *testing.T) {
	offload := lab.LinkOptions{Delay: time.Millisecond, Offload: true}
	bulk := func(w *world, c ends) {
		for range 200 / fewer {
			check(w.t, send(c.connected, make([]byte, 1<<16), 0))
		}
	}
	records := func(w *world, c ends) {
		for range 1000 {
			check(w.t, send(c.connected, make([]byte, 1000), unix.MSG_EOR))
		}
	}
	for _, test := range []struct {
		name    string
		link    lab.LinkOptions
		domain  int
		prepare func(w *world)
		options []option
		run     func(w *world, c ends)
		checks  func(t *testing.T, r measure.Result, samples []measure.Sample)
	}{
		{name: "large packets", link: offload, domain: unix.AF_INET, run: bulk, checks: driven},
		// The host splits them after the queueing discipline.
		{name: "split packets", link: lab.LinkOptions{Delay: time.Millisecond}, domain: unix.AF_INET6, run: bulk, checks: driven},
		{name: "loss of large packets", link: lab.LinkOptions{Delay: time.Millisecond, Offload: true, Loss: 0.03, Seed: 3}, domain: unix.AF_INET, run: bulk},
		{name: "reordering", link: lab.LinkOptions{Delay: 5 * time.Millisecond, Reorder: 0.2, Seed: 4}, domain: unix.AF_INET, run: records},
		{name: "without SACK", link: lab.LinkOptions{Delay: time.Millisecond, Loss: 0.02, Seed: 5}, domain: unix.AF_INET,
			prepare: func(w *world) { check(w.t, w.a.Sysctl("ipv4.tcp_sack", "0")) }, run: records},
		{name: "rate", link: lab.LinkOptions{}, domain: unix.AF_INET, options: []option{noDelay},
			prepare: func(w *world) { w.queueing(tbf(1<<20, 1<<20)) }, run: records, checks: inQueue},
		{name: "drops of the host", link: lab.LinkOptions{Delay: time.Millisecond}, domain: unix.AF_INET, options: []option{noDelay},
			prepare: func(w *world) { w.queueing(tbf(2<<20, 2000)) }, run: records, checks: dropped},
		// The host drops packets that TCP counts as sent.
		{name: "drops from the queue", link: lab.LinkOptions{Delay: time.Millisecond}, domain: unix.AF_INET, options: []option{noDelay},
			prepare: (*world).dropFirst, run: records, checks: dropped},
		{name: "smaller packets on the way", link: lab.LinkOptions{Delay: time.Millisecond}, domain: unix.AF_INET, run: func(w *world, c ends) {
			bulk(w, c)
			nl := w.a.Netlink()
			dev, err := nl.LinkByName("link0")
			check(w.t, err)
			check(w.t, nl.LinkSetMTU(dev, 600))
			bulk(w, c)
		}},
		{name: "small segments", link: lab.LinkOptions{Delay: time.Millisecond}, domain: unix.AF_INET,
			options: []option{with(unix.SOL_TCP, unix.TCP_MAXSEG, 200)}, run: bulk},
		{name: "mapped", link: lab.LinkOptions{Delay: time.Millisecond}, run: records}, // IPv6 sockets, IPv4 packets
	} {
		t.Run(test.name, func(t *testing.T) {
			k := newTracing(t, everything)
			s := k.samples()
			w := linked(t, test.link)
			if test.prepare != nil {
				test.prepare(w)
			}
			var c ends
			if test.domain != 0 {
				c = w.connect(test.domain, test.options...)
			} else {
				listener, at := w.listen(unix.AF_INET)
				var fd int
				w.inA(func() { fd = newSocket(t, unix.AF_INET6) })
				check(t, connect(fd, &unix.SockaddrInet6{Port: int(at.Port()), Addr: at.Addr().As16()}))
				c = ends{fd, accept(t, listener)}
			}
			done := drain(c.accepted)
			test.run(w, c)
			shut(c.connected)
			<-done
			r := k.settled()
			t.Log(account(r))
			if r.Outcomes[measure.Missed]+r.Outcomes[measure.Unacknowledged]+r.Outcomes[measure.Refused]+r.Outcomes[measure.Application] > 0 {
				t.Errorf("%s, want them to be acknowledged", account(r))
			}
			raw := s.wait(int(r.Chosen - r.Outcomes[measure.Full]))
			checkSamples(t, k, raw)
			translate, err := k.names.Translator(k.Trace, k.compiled.Rules)
			check(t, err)
			var samples []measure.Sample
			for i := range raw {
				samples = append(samples, translate(&raw[i]))
			}
			if test.checks != nil {
				test.checks(t, r, samples)
			}
		})
	}
}

// driven: the driver's timestamp exists, also for packets that are split.
func driven(t *testing.T, r measure.Result, _ []measure.Sample) {
	t.Helper()
	if r.Undriven > 0 || r.Unqueued > 0 {
		t.Errorf("%s, want all to have all stamps", account(r))
	}
}

// inQueue: the time is spent in the queue.
func inQueue(t *testing.T, r measure.Result, samples []measure.Sample) {
	t.Helper()
	if p50 := r.Stages[config.StageQdisc].Quantile(0.5); p50 < time.Millisecond {
		t.Errorf("half of the messages were in the queue for %v at most", p50)
	}
	// The time in the queue is not part of that in the network. On a busy machine, the receiver often acknowledges late, but not
	// always.
	early := 0
	for _, one := range samples {
		if one.Stages[config.StageNetwork] < one.Stages[config.StageQdisc] {
			early++
		}
	}
	t.Logf("%d of %d messages were longer in the queue than in the network", early, len(samples))
	if early < len(samples)/20 {
		t.Errorf("only %d of %d messages were longer in the queue than in the network", early, len(samples))
	}
}

// dropped: packets that the host dropped before the driver are no loss of the network, and did not wait that long in
// the queue.
func dropped(t *testing.T, r measure.Result, samples []measure.Sample) {
	t.Helper()
	var again int
	for _, s := range samples {
		if s.Requeued == 0 {
			continue
		}
		again++
		// The queue of 2000 bytes takes 1 ms.
		if s.Stages[config.StageQdisc] > 50*time.Millisecond {
			t.Errorf("%v in the queue: %+v", s.Stages[config.StageQdisc], s)
		}
	}
	t.Logf("%d messages were dropped by the host", again)
	if again == 0 {
		t.Errorf("no message was dropped by the host, %s", account(r))
	}
}

// TestStacked uses a bridge in front of the link's device: packets pass through two queueing disciplines, and are not
// counted as sent twice.
func TestStacked(t *testing.T) {
	k := newTracing(t, everything)
	l := newLab(t)
	a, err := l.Namespace("a")
	check(t, err)
	b, err := l.Namespace("b")
	check(t, err)
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "port"
	check(t, a.Netlink().LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "link0"}))
	peer, err := a.Netlink().LinkByName("link0")
	check(t, err)
	check(t, b.Do(func() error {
		self, err := os.Open("/proc/thread-self/ns/net")
		if err != nil {
			return err
		}
		defer self.Close()
		return a.Netlink().LinkSetNsFd(peer, int(self.Fd()))
	}))
	bridge := netlink.NewLinkAttrs()
	bridge.Name = "br0"
	if err := a.Netlink().LinkAdd(&netlink.Bridge{LinkAttrs: bridge}); errors.Is(err, unix.EOPNOTSUPP) {
		t.Skip("kernel: no bridge")
	} else {
		check(t, err)
	}
	master, err := a.Netlink().LinkByName("br0")
	check(t, err)
	port, err := a.Netlink().LinkByName("port")
	check(t, err)
	other, err := b.Netlink().LinkByName("link0")
	check(t, err)
	check(t, errors.Join(a.Netlink().LinkSetMaster(port, master), a.Netlink().LinkSetUp(port), a.Netlink().LinkSetUp(master),
		b.Netlink().LinkSetUp(other), a.AddAddress("br0", linkA[0]), b.AddAddress("link0", linkB[0])))
	s := k.samples()
	w := &world{t: t, a: a, b: b}
	c := w.connect(unix.AF_INET, noDelay)
	const messages = 100
	buffer := make([]byte, 100)
	for range messages {
		check(t, send(c.connected, make([]byte, 100), 0))
		_, err := retry(func() (int, error) { return unix.Read(c.accepted, buffer) })
		check(t, err)
		acknowledged(t, c.connected)
	}
	retransmits := tcpInfo(t, c.connected).Total_retrans
	shut(c.connected)
	r := k.settled()
	if n := r.Outcomes[measure.Retransmitted]; r.Chosen != messages || n > uint64(retransmits) {
		t.Errorf("%s, and %d retransmits", account(r), retransmits)
	}
	checkSamples(t, k, s.wait(messages))
	driven(t, r, nil)
}

// TestZeroWindow uses a peer that does not read until the window is closed, and then reads.
func TestZeroWindow(t *testing.T) {
	k := newTracing(t, everything)
	s := k.samples()
	w := loopback(t)
	listener, at := w.listen(unix.AF_INET)
	with(unix.SOL_SOCKET, unix.SO_RCVBUF, 4096)(t, listener)
	c := w.connectTo(listener, at, with(unix.SOL_SOCKET, unix.SO_SNDBUF, 1<<18))
	const messages = 60
	for range messages {
		check(t, send(c.connected, make([]byte, 1000), unix.MSG_EOR))
	}
	// The window stays closed at least that long by the kernel's own account.
	const closed = 100 * time.Millisecond
	testenv.Within(t, "a closed window", func() bool {
		info := tcpInfo(t, c.connected)
		return info.Notsent_bytes > 0 && time.Duration(info.Rwnd_limited)*time.Microsecond > closed
	})
	done := drain(c.accepted)
	shut(c.connected)
	<-done
	r := k.settled()
	t.Log(account(r))
	raw := s.wait(int(r.Chosen - r.Outcomes[measure.Full]))
	checkSamples(t, k, raw)
	translate, err := k.names.Translator(k.Trace, k.compiled.Rules)
	check(t, err)
	var held int
	for i := range raw {
		s := translate(&raw[i])
		stack := s.Stages[config.StageStack]
		if stack < closed/2 {
			continue
		}
		held++
		if s.WindowLimited < stack*8/10 || s.WindowLimited > stack+20*time.Millisecond {
			t.Errorf("held for %v, and limited by the peer's window for %v", stack, s.WindowLimited)
		}
	}
	if held < messages/3 {
		t.Errorf("%d of %d messages were held by the peer's window", held, messages)
	}
}

// TestWaysToSend sends by every system call that can send.
func TestWaysToSend(t *testing.T) {
	const messages = 50
	file, err := os.Create(t.TempDir() + "/file")
	check(t, err)
	defer file.Close()
	check(t, file.Truncate(1<<20))
	for _, way := range []struct {
		name string
		// send sends all messages, of 4000 bytes each.
		send func(t *testing.T, fd int)
	}{
		{"write", func(t *testing.T, fd int) {
			for range messages {
				_, err := unix.Write(fd, make([]byte, 4000))
				check(t, err)
			}
		}},
		{"writev", func(t *testing.T, fd int) {
			for range messages {
				_, err := unix.Writev(fd, [][]byte{make([]byte, 1000), make([]byte, 3000)})
				check(t, err)
			}
		}},
		{"sendfile", func(t *testing.T, fd int) {
			for range messages {
				offset := int64(0)
				_, err := unix.Sendfile(fd, int(file.Fd()), &offset, 4000)
				check(t, err)
			}
		}},
		{"splice", func(t *testing.T, fd int) {
			r, w, err := os.Pipe()
			check(t, err)
			defer r.Close()
			defer w.Close()
			for range messages {
				_, err := w.Write(make([]byte, 4000))
				check(t, err)
				_, err = unix.Splice(int(r.Fd()), nil, fd, nil, 4000, 0)
				check(t, err)
			}
		}},
		{"zerocopy", func(t *testing.T, fd int) {
			with(unix.SOL_SOCKET, unix.SO_ZEROCOPY, 1)(t, fd)
			b := make([]byte, 4000)
			for range messages {
				check(t, send(fd, b, unix.MSG_ZEROCOPY))
			}
			acknowledged(t, fd)
		}},
		{"urgent", func(t *testing.T, fd int) {
			for range messages {
				check(t, send(fd, make([]byte, 4000), unix.MSG_OOB))
			}
		}},
		{"sendmmsg", sendMany},
		{"io_uring", func(t *testing.T, fd int) {
			r := newRing(t)
			for range messages {
				r.send(t, fd, make([]byte, 4000))
			}
		}},
	} {
		t.Run(way.name, func(t *testing.T) {
			k := newTracing(t, everything)
			s := k.samples()
			w := linked(t, lab.LinkOptions{Delay: time.Millisecond})
			c := w.connect(unix.AF_INET, with(unix.SOL_SOCKET, unix.SO_SNDBUF, 1<<20))
			done := drain(c.accepted)
			way.send(t, c.connected)
			shut(c.connected)
			<-done
			r := k.settled()
			t.Log(account(r))
			if r.Chosen != messages {
				t.Errorf("%d chosen, want %d", r.Chosen, messages)
			}
			samples := s.wait(messages)
			checkSamples(t, k, samples)
			for _, s := range samples {
				if s.Message.Length != 4000 {
					t.Errorf("a message has %d bytes", s.Message.Length)
				}
			}
		})
	}
}

// sendMany sends five messages of 4000 bytes per call.
func sendMany(t *testing.T, fd int) {
	b := make([]byte, 4000)
	iov := unix.Iovec{Base: &b[0], Len: 4000}
	type mmsghdr struct {
		header unix.Msghdr
		_      [8]byte // the length that the kernel fills in
	}
	for range 10 {
		var headers [5]mmsghdr
		for i := range headers {
			headers[i].header = unix.Msghdr{Iov: &iov, Iovlen: 1}
		}
		n, _, errno := unix.Syscall6(unix.SYS_SENDMMSG, uintptr(fd), uintptr(unsafe.Pointer(&headers)), 5, 0, 0, 0)
		if errno != 0 || n != 5 {
			t.Fatalf("%d of 5 messages, %v", n, errno)
		}
	}
}

// TestFastOpen sends data in the SYN: it is sent before the connection is established and is not a message. The next
// messages have their own lengths.
func TestFastOpen(t *testing.T) {
	k := newTracing(t, everything)
	s := k.samples()
	w := loopback(t)
	sysctl(t, "net/ipv4/tcp_fastopen", "1543") // both sides, without a cookie
	listener, at := w.listen(unix.AF_INET)
	with(unix.SOL_TCP, unix.TCP_FASTOPEN, 10)(t, listener)
	for range 2 {
		fd := newSocket(t, unix.AF_INET)
		_, err := retry(func() (int, error) {
			return unix.SendmsgN(fd, make([]byte, 300), nil, sockaddr.Of(at), unix.MSG_FASTOPEN)
		})
		check(t, err)
		accepted := accept(t, listener)
		done := drain(accepted)
		acknowledged(t, fd)
		for i := range 3 {
			check(t, send(fd, make([]byte, 100+i), 0))
			acknowledged(t, fd)
		}
		shut(fd)
		if got := <-done; got != 603 {
			t.Errorf("%d bytes arrived", got)
		}
	}
	for i, s := range s.wait(6) {
		if want := uint32(100 + i%3); s.Message.Length != want {
			t.Errorf("message %d has %d bytes, want %d", i, s.Message.Length, want)
		}
	}
	if r := k.settled(); r.Chosen != 6 {
		t.Errorf("%s, want 6", account(r))
	}
}

// TestState compares a sample's state of its connection with TCP_INFO, read just before the message was sent, on an
// idle connection.
func TestState(t *testing.T) {
	k := newTracing(t, everything)
	s := k.samples()
	w, lost := hole(t, lab.LinkOptions{Delay: 3 * time.Millisecond})
	// Nothing is retransmitted for a while, so that the state does not change between two calls.
	check(t, w.a.Sysctl("ipv4.tcp_early_retrans", "0"))
	for _, pacing := range []int{0, 1_000_000} {
		c := w.connect(unix.AF_INET, noDelay, with(unix.SOL_SOCKET, unix.SO_SNDBUF, 1<<20))
		if pacing > 0 {
			with(unix.SOL_SOCKET, unix.SO_MAX_PACING_RATE, pacing)(t, c.connected)
		}
		done := drain(c.accepted)
		var before []*unix.TCPInfo
		var lengths []uint32
		one := func(length int) {
			// The first call waits for the end of what has changed the state.
			tcpInfo(t, c.connected)
			before = append(before, tcpInfo(t, c.connected))
			lengths = append(lengths, uint32(length))
			check(t, send(c.connected, make([]byte, length), unix.MSG_EOR))
		}
		for i := range 20 {
			one(100 * (i + 1))
			acknowledged(t, c.connected)
		}
		if pacing == 0 {
			// Some messages are in flight, and the congestion window holds others.
			lost.Store(true)
			for range 30 {
				one(1000)
			}
			lost.Store(false)
		}
		shut(c.connected)
		<-done
		samples := s.wait(len(before))
		slices.SortFunc(samples, func(a, b bpf.TraceSample) int { return int(int32(a.Message.Key - b.Message.Key)) })
		for i, sample := range samples {
			m, info := sample.Message, before[i]
			got := fmt.Sprint(m.Length, m.Cwnd, m.InFlight, m.Unsent, m.Window, m.Mss, m.Srtt, m.MinRtt, m.Outstanding > 0)
			want := fmt.Sprint(lengths[i], info.Snd_cwnd, info.Unacked-info.Sacked-info.Lost+info.Retrans, info.Notsent_bytes+lengths[i],
				info.Snd_wnd, info.Snd_mss, info.Rtt, info.Min_rtt, info.Unacked > 0)
			if got != want {
				t.Errorf("message %d has %s, TCP_INFO %s", i, got, want)
			}
			if m.Pacing != info.Pacing_rate {
				t.Errorf("message %d has a pacing rate of %d, TCP_INFO %d", i, m.Pacing, info.Pacing_rate)
			}
			if paced := m.Flags&bpf.TraceMessagePaced != 0; paced != (pacing > 0) || m.Flags&bpf.TraceMessageNagle != 0 {
				t.Errorf("message %d: paced %v, flags %#x", i, paced, m.Flags)
			}
		}
	}
}

// TestStateInRecovery compares samples with TCP_INFO during loss and retransmission, where the state has not changed
// meanwhile.
func TestStateInRecovery(t *testing.T) {
	k := newTracing(t, everything)
	s := k.samples()
	w := linked(t, lab.LinkOptions{Delay: 2 * time.Millisecond, Loss: 0.05, Seed: 7})
	c := w.connect(unix.AF_INET, noDelay, with(unix.SOL_SOCKET, unix.SO_SNDBUF, 1<<15))
	done := drain(c.accepted)
	var before, after []*unix.TCPInfo
	for range 1000 {
		_, err := retry(func() (int, error) {
			return unix.Poll([]unix.PollFd{{Fd: int32(c.connected), Events: unix.POLLOUT}}, -1)
		})
		check(t, err)
		before = append(before, tcpInfo(t, c.connected))
		check(t, send(c.connected, make([]byte, 500), unix.MSG_EOR))
		after = append(after, tcpInfo(t, c.connected))
	}
	acknowledged(t, c.connected)
	shut(c.connected)
	<-done
	r := k.settled()
	byKey := make(map[uint32]bpf.TraceMessage)
	samples := s.wait(int(r.Chosen - r.Outcomes[measure.Full]))
	first := samples[0].Message.Key
	for _, sample := range samples {
		byKey[(sample.Message.Key-first)/500] = sample.Message
	}
	var compared int
	for i, info := range before {
		then := after[i]
		m, ok := byKey[uint32(i)]
		if !ok || info.Sacked+info.Lost+info.Retrans == 0 ||
			info.Bytes_acked != then.Bytes_acked || info.Sacked != then.Sacked || info.Lost != then.Lost || info.Retrans != then.Retrans {
			continue
		}
		compared++
		if want := info.Unacked - info.Sacked - info.Lost + info.Retrans; m.InFlight != want {
			t.Errorf("message %d has %d packets in flight, TCP_INFO %d", i, m.InFlight, want)
		}
	}
	t.Logf("%d messages in recovery", compared)
	if compared < 10 {
		t.Errorf("%d messages in recovery", compared)
	}
}

// sent records the segments with data on a link, with their times.
type sent struct {
	mu       sync.Mutex
	segments []segment
}

type segment struct {
	seq, length uint32
	at          uint64 // monotonic, in nanoseconds
}

// note records an IPv4 packet.
func (s *sent) note(packet []byte) {
	header := int(packet[0]&15) * 4
	if packet[0]>>4 != 4 || len(packet) < header+20 {
		return
	}
	data := header + int(packet[header+12]>>4)*4
	if len(packet) <= data {
		return
	}
	var now unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &now)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.segments = append(s.segments, segment{binary.BigEndian.Uint32(packet[header+4:]), uint32(len(packet) - data), uint64(now.Nano())})
}

func (s *sent) reset() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.segments = nil
}

// first returns when a byte was first on the link.
func (s *sent) first(key uint32) (at uint64, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, g := range s.segments {
		if key-g.seq < g.length {
			return g.at, true
		}
	}
	return 0, false
}

// TestCoalescedTimes checks that no byte is on the link before its message reaches the queueing discipline, where
// messages share packets. TCP merges the packets of its queue when it sends them (tcp_grow_skb), and a small window splits
// them again. Whether the window ends within a merged packet depends on when the receiver reads, so at least 20
// connections are opened, until there were messages of both kinds. The driver's timestamp is not compared: where the host
// segments a packet, it is that of the last segment.
func TestCoalescedTimes(t *testing.T) {
	k := newTracing(t, everything)
	s := k.samples()
	var packets sent
	w := linked(t, lab.LinkOptions{MTU: 1500, Drop: func(d lab.Direction, packet []byte) bool {
		if d == lab.AToB {
			packets.note(packet)
		}
		return false
	}})
	var r measure.Result
	for connection := 1; connection <= 20 || r.Outcomes[measure.Coalesced] == 0 || r.Outcomes[measure.Parted] == 0; connection++ {
		if connection > 50 {
			t.Fatalf("%s, want some to be coalesced and some parted", account(r))
		}
		packets.reset()
		listener, at := w.listen(unix.AF_INET)
		with(unix.SOL_SOCKET, unix.SO_RCVBUF, 8<<10)(t, listener)
		c := w.connectTo(listener, at, noDelay, with(unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, 1<<20))
		shut(listener)
		const messages = 60 // fewer than TRACE_IN_FLIGHT
		for i := range messages {
			check(t, send(c.connected, make([]byte, 500+i*1237%7000), 0))
		}
		if connection%2 == 0 { // the window grows: fewer packets are split
			with(unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 4<<20)(t, c.accepted)
		}
		done := drain(c.accepted)
		acknowledged(t, c.connected)
		shut(c.connected)
		<-done
		r = k.settled()
		t.Log(account(r))
		for _, sample := range s.wait(messages) {
			if sample.Message.Queued == 0 {
				continue
			}
			at, ok := packets.first(sample.Message.Key)
			if !ok {
				t.Fatalf("the link had no packet with byte %d", sample.Message.Key)
			}
			if late := time.Duration(sample.Message.Queued - at); late > 0 {
				t.Errorf("message %d reaches the queueing discipline %v later than the link", sample.Message.Key, late)
			}
		}
	}
}
