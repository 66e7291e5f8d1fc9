// SPDX-License-Identifier: Apache-2.0

package capture_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"sockeye/internal/bpf/load"
	"sockeye/internal/testenv"
	"sockeye/internal/trace/capture"
)

func control(t testing.TB, c syscall.Conn, f func(fd int) error) {
	t.Helper()
	raw, err := c.SyscallConn()
	check(t, err)
	check(t, raw.Control(func(fd uintptr) { err = f(int(fd)) }))
	check(t, err)
}

func openPackets(t testing.TB, c syscall.Conn) *capture.Capture {
	t.Helper()
	p, err := capture.Open(testenv.Cookie(t, c), 1<<20)
	if err != nil {
		t.Fatalf("%+v", err)
	}
	t.Cleanup(func() { check(t, p.Close()) })
	if missing := p.Missing(); len(missing) > 0 {
		t.Errorf("tracepoints are missing: %v", missing)
	}
	return p
}

// readPacket returns the next event with a copy of its bytes.
func readPacket(t testing.TB, p *capture.Capture) *capture.Event {
	t.Helper()
	e := &capture.Event{}
	if err := p.Read(time.Now().Add(patience), e); err != nil {
		t.Fatalf("%+v", err)
	}
	e.Bytes = append([]byte(nil), e.Bytes...)
	return e
}

// nextPacket returns the next event of a kind.
func nextPacket(t testing.TB, p *capture.Capture, kind uint8) *capture.Event {
	t.Helper()
	for {
		if e := readPacket(t, p); e.Kind == kind {
			return e
		}
	}
}

// rest stops the events and returns the remaining ones.
func rest(t testing.TB, p *capture.Capture) (all []capture.Event) {
	t.Helper()
	check(t, p.Stop())
	for {
		var e capture.Event
		err := p.Read(time.Now().Add(patience), &e)
		if errors.Is(err, io.EOF) {
			return all
		}
		check(t, err)
		all = append(all, e)
	}
}

func exchange(t testing.TB, from, to net.Conn, n int) {
	t.Helper()
	_, err := from.Write(make([]byte, n))
	check(t, err)
	_, err = io.ReadFull(to, make([]byte, n))
	check(t, err)
}

// TestPacketsLeftOut checks tracepoints that a process and a softirq reach: the kernel skips a program that would
// interrupt itself, so each such tracepoint has two programs, each of which reports all events alone.
func TestPacketsLeftOut(t *testing.T) {
	const messages = 50
	for _, tracepoint := range []string{"tcp_probe", "inet_sock_set_state", "tcp_retransmit_skb"} {
		for but := range 2 {
			t.Run(fmt.Sprintf("%s/%d", tracepoint, but), func(t *testing.T) {
				other, client := testenv.TCPPair(t, "127.0.0.1", "127.0.0.1")
				p := openPackets(t, client)
				for i := range messages {
					if i == messages/2 {
						p.LeaveOut(t, tracepoint, but)
					}
					exchange(t, other, client, 100)
				}
				check(t, client.Close())
				received, states := 0, 0
				for _, e := range rest(t, p) {
					switch {
					case e.Kind == capture.Receive && e.Length > 0:
						received++
					case e.Kind == capture.State:
						states++
					}
				}
				if received != messages || states == 0 || states > 3 {
					t.Errorf("%d packets received, %d states", received, states)
				}
			})
		}
	}
}

// TestPackets follows a message and its reply to the end of the connection, in each family.
func TestPackets(t *testing.T) {
	for _, test := range []struct {
		name, listener, to string
		ip, tcp            int // bytes of headers
	}{
		{"IPv4", "127.0.0.1", "127.0.0.1", 20, 32},
		{"IPv6", "::1", "::1", 40, 32},
		{"IPv4 by an IPv6 socket", "::", "127.0.0.1", 20, 32},
	} {
		t.Run(test.name, func(t *testing.T) {
			other, client := testenv.TCPPair(t, test.listener, test.to)
			p := openPackets(t, client) // the accepted end: of IPv6 in the last case
			exchange(t, client, other, 1000)

			q := nextPacket(t, p, capture.Queue)
			headers := test.ip + test.tcp
			if q.Flags != capture.TCP || q.Length != 1000 || int(q.Size) != 1000+headers || q.Tcp != 0x18 || q.State != 1 || len(q.Bytes) < headers {
				t.Fatalf("queued %+v", q)
			}
			local := client.LocalAddr().(*net.TCPAddr)
			tcp := q.Bytes[test.ip:]
			if port := binary.BigEndian.Uint16(tcp); int(port) != local.Port || binary.BigEndian.Uint32(tcp[4:]) != q.Seq || binary.BigEndian.Uint32(tcp[8:]) != q.Ack {
				t.Errorf("header %x of %+v", tcp, q)
			}
			if name := interfaceOf(q); name != "lo" || q.Ifindex != 1 {
				t.Errorf("interface %d %s", q.Ifindex, name)
			}
			if shift := windowShift(t, client); q.Window != uint32(binary.BigEndian.Uint16(tcp[14:]))<<shift || shift == 0 {
				t.Errorf("window %d, of %d shifted by %d", q.Window, binary.BigEndian.Uint16(tcp[14:]), shift)
			}
			d := nextPacket(t, p, capture.Driver)
			if d.Skb != q.Skb || d.Seq != q.Seq || d.Length != q.Length || d.Time < q.Time || interfaceOf(d) != "lo" {
				t.Errorf("queued %+v, driver %+v", q, d)
			}
			r := nextPacket(t, p, capture.Receive)
			if r.Flags != capture.TCP || r.Ack != q.Seq+1000 || r.Seq != q.Ack || r.Length != 0 || int(r.Size) != headers || len(r.Bytes) != headers || r.Time < d.Time || r.Ifindex != 1 {
				t.Errorf("received %+v", r)
			}

			// From here on TCP has no tracepoint for received segments.
			check(t, client.CloseWrite())
			s := nextPacket(t, p, capture.State)
			if s.State != 4 || s.Flags != capture.TCP || s.Ack != q.Seq+1000 {
				t.Errorf("state %+v", s)
			}
			if fin := nextPacket(t, p, capture.Queue); fin.Tcp != 0x11 || fin.State != 4 {
				t.Errorf("queued %+v", fin)
			}
			r = nextPacket(t, p, capture.Receive)
			if r.Flags != capture.TCP|capture.Early || r.Ack != q.Seq+1001 || r.Length != 0 || int(r.Size) != headers || len(r.Bytes) != headers || interfaceOf(r) != "lo" {
				t.Errorf("received %+v", r)
			}
			exchange(t, other, client, 7)
			r = nextPacket(t, p, capture.Receive)
			if r.Flags != capture.TCP|capture.Early || r.Length != 7 || r.Seq != q.Ack || windowShift(t, other) == 0 ||
				r.Window != uint32(binary.BigEndian.Uint16(r.Bytes[test.ip+14:]))<<windowShift(t, other) {
				t.Errorf("received %+v", r)
			}
			check(t, other.Close())
			for s.State != 7 {
				s = nextPacket(t, p, capture.State)
			}
			if left := rest(t, p); len(left) > 0 {
				t.Errorf("after the end: %+v", left)
			}
		})
	}
}

func interfaceOf(e *capture.Event) string {
	var b strings.Builder
	for _, c := range e.Name {
		if c == 0 {
			break
		}
		b.WriteByte(byte(c))
	}
	return b.String()
}

// windowShift returns the window scale of a socket, as the socket reports it.
func windowShift(t testing.TB, c syscall.Conn) (shift uint8) {
	t.Helper()
	control(t, c, func(fd int) error {
		info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
		if err == nil {
			// The byte that unix.TCPInfo leaves out has tcpi_snd_wscale, which is the peer's scale, and in its upper
			// bits tcpi_rcv_wscale.
			shift = (*[8]byte)(unsafe.Pointer(info))[6] >> 4
		}
		return err
	})
	return shift
}

// TestPacketsPeerCloses sends after the peer has closed its side: received segments are seen from the first sent
// packet on.
func TestPacketsPeerCloses(t *testing.T) {
	client, server := testenv.TCPPair(t, "127.0.0.1", "127.0.0.1")
	check(t, server.CloseWrite())
	_, err := client.Read(make([]byte, 1))
	if !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
	p := openPackets(t, client)
	exchange(t, client, server, 10)
	q := nextPacket(t, p, capture.Queue)
	if r := nextPacket(t, p, capture.Receive); r.Ack != q.Seq+10 || r.Flags&capture.Early == 0 {
		t.Errorf("sent %+v, received %+v", q, r)
	}
}

// TestPacketsOfOthers checks that packets of other connections are not reported.
func TestPacketsOfOthers(t *testing.T) {
	client, server := testenv.TCPPair(t, "127.0.0.1", "127.0.0.1")
	a, b := testenv.TCPPair(t, "127.0.0.1", "127.0.0.1")
	p := openPackets(t, client)
	for range 10 {
		exchange(t, a, b, 100)
		exchange(t, b, a, 100)
	}
	check(t, a.Close())
	check(t, b.Close())
	exchange(t, server, client, 1) // of the connection, the other way
	ours := 0
	for _, e := range rest(t, p) {
		switch {
		case e.Kind == capture.Receive && e.Length == 1, e.Kind == capture.Queue && e.Length == 0, e.Kind == capture.Driver && e.Length == 0:
			ours++
		default:
			t.Errorf("an event of another connection: %+v", e)
		}
	}
	if ours == 0 {
		t.Error("no event")
	}
}

// TestPacketsLost counts events without space in the ring; nothing reads it.
func TestPacketsLost(t *testing.T) {
	client, server := testenv.TCPPair(t, "127.0.0.1", "127.0.0.1")
	page := os.Getpagesize()
	p, err := capture.Open(testenv.Cookie(t, client), page)
	check(t, err)
	defer p.Close()
	for range 100 {
		exchange(t, client, server, 1)
	}
	read := len(rest(t, p))
	lost, err := p.Lost()
	check(t, err)
	// Each exchange has at least one packet, its driver event, and its acknowledgement or a shared one.
	if read == 0 || read > page/72 || lost < 200-uint64(read) || lost > 1000 {
		t.Errorf("read %d events, lost %d", read, lost)
	}
	check(t, p.Close())
	if after, err := p.Lost(); err != nil || after != lost {
		t.Errorf("lost %d, after Close %d, %v", lost, after, err)
	}
}

// TestPacketsDeadline checks that the events end at the deadline.
func TestPacketsDeadline(t *testing.T) {
	client, server := testenv.TCPPair(t, "127.0.0.1", "127.0.0.1")
	p := openPackets(t, client)
	start := time.Now()
	deadline := start.Add(100 * time.Millisecond)
	exchange(t, client, server, 1)
	var e capture.Event
	n := 0
	var err error
	for ; err == nil; n++ {
		err = p.Read(deadline, &e)
	}
	if took := time.Since(start); !errors.Is(err, io.EOF) || n < 3 || took < 100*time.Millisecond || took > patience {
		t.Errorf("%d events, then %v, after %v", n-1, err, took)
	}
	// The programs are detached.
	exchange(t, client, server, 1)
	if err := p.Read(time.Now().Add(patience), &e); !errors.Is(err, io.EOF) {
		t.Errorf("after the end: %+v, %v", e, err)
	}
}

// TestPacketsClose ends a Read from another goroutine.
func TestPacketsClose(t *testing.T) {
	for name, end := range map[string]func(*capture.Capture) error{"stop": (*capture.Capture).Stop, "close": (*capture.Capture).Close} {
		client, _ := testenv.TCPPair(t, "127.0.0.1", "127.0.0.1")
		p := openPackets(t, client)
		var reading sync.WaitGroup
		reading.Go(func() {
			var e capture.Event
			if err := p.Read(time.Now().Add(time.Hour), &e); !errors.Is(err, io.EOF) && !errors.Is(err, os.ErrClosed) {
				t.Errorf("%s: read %+v, %v", name, e, err)
			}
		})
		check(t, end(p))
		reading.Wait()
		check(t, p.Close())
		if err := p.Read(time.Now(), &capture.Event{}); !errors.Is(err, os.ErrClosed) {
			t.Errorf("after Close: %v", err)
		}
	}
}

// TestPacketsLeavesNothing counts descriptors and programs.
func TestPacketsLeavesNothing(t *testing.T) {
	client, _ := testenv.TCPPair(t, "127.0.0.1", "127.0.0.1")
	descriptors := func() int {
		entries, err := os.ReadDir("/proc/self/fd")
		check(t, err)
		return len(entries)
	}
	check(t, openPackets(t, client).Close()) // what the first one leaves is caches
	before := descriptors()
	p := openPackets(t, client)
	ids := p.ProgramIDs()
	if len(ids) != 9 {
		t.Errorf("%d programs", len(ids))
	}
	check(t, p.Close())
	if after := descriptors(); after != before {
		t.Errorf("%d descriptors, %d before", after, before)
	}
	// The kernel frees them some time later.
	for _, id := range ids {
		until(t, "the program is gone", func() bool {
			p, err := ebpf.NewProgramFromID(id)
			if err == nil {
				p.Close()
			}
			return errors.Is(err, os.ErrNotExist)
		})
	}
}

// TestPacketsCapabilities runs with the capabilities that an agent keeps.
func TestPacketsCapabilities(t *testing.T) {
	client, server := testenv.TCPPair(t, "127.0.0.1", "127.0.0.1")
	cookie := testenv.Cookie(t, client)
	for _, test := range []struct {
		name string
		caps []int
		ok   bool
	}{
		{"BPF and PERFMON", []int{unix.CAP_BPF, unix.CAP_PERFMON}, true},
		{"BPF", []int{unix.CAP_BPF}, false},
		{"none", nil, false},
	} {
		testenv.WithRights(t, test.caps, func() {
			p, err := capture.Open(cookie, 1<<16)
			if !test.ok {
				if !errors.Is(err, unix.EPERM) || errors.Is(err, ebpf.ErrNotSupported) || errors.As(err, new(*load.BufferError)) {
					t.Errorf("%s: %v, want %v", test.name, err, unix.EPERM)
				}
				return
			}
			if err != nil {
				t.Errorf("%s: %+v", test.name, err)
				return
			}
			exchange(t, client, server, 1)
			if q := nextPacket(t, p, capture.Queue); q.Length != 1 {
				t.Errorf("%s: %+v", test.name, q)
			}
			check(t, p.Close())
		})
	}
}

func TestPacketsRefuses(t *testing.T) {
	if _, err := capture.Open(0, 1<<20); err == nil || !strings.Contains(err.Error(), "cookie 0") {
		t.Errorf("no cookie: %v", err)
	}
	page := os.Getpagesize()
	for size, advice := range map[int]string{
		-1: "take 4096", 0: "take 4096", 1: "take 4096", page / 2: "take 4096", 5000: "take 8192", 1<<20 + page: "take 2097152", 1 << 32: "take 2147483648",
	} {
		var e *load.BufferError
		_, err := capture.Open(1, size)
		if !errors.As(err, &e) || e.Size != size || page == 4096 && !strings.Contains(err.Error(), advice) {
			t.Errorf("buffer of %d bytes: %v", size, err)
		}
	}
}

// TestPacketsLockedMemory sets a low RLIMIT_MEMLOCK on kernels that charge maps to it.
func TestPacketsLockedMemory(t *testing.T) {
	client, _ := testenv.TCPPair(t, "127.0.0.1", "127.0.0.1")
	cookie := testenv.Cookie(t, client)
	var before unix.Rlimit
	check(t, unix.Getrlimit(unix.RLIMIT_MEMLOCK, &before))
	low := before
	low.Cur = 1 << 20
	check(t, unix.Setrlimit(unix.RLIMIT_MEMLOCK, &low))
	defer func() { check(t, unix.Setrlimit(unix.RLIMIT_MEMLOCK, &before)) }()
	p, err := capture.Open(cookie, 1<<22)
	if err == nil {
		check(t, p.Close())
		t.Skip("kernel: maps are not charged to the limit of locked memory")
	}
	var e *load.BufferError
	if !errors.As(err, &e) || !errors.Is(err, unix.EPERM) || !strings.Contains(err.Error(), "limit of locked memory is 1048576 bytes") {
		t.Errorf("%v", err)
	}
	p, err = capture.Open(cookie, 1<<14)
	check(t, err)
	check(t, p.Close())
}

// TestPacketsMissing simulates a kernel without a tracepoint.
func TestPacketsMissing(t *testing.T) {
	client, server := testenv.TCPPair(t, "127.0.0.1", "127.0.0.1")
	restore := capture.RenameTracepoint("tcp_probe", "tcp_probe_of_old")
	p, err := capture.Open(testenv.Cookie(t, client), 1<<16)
	restore()
	check(t, err)
	defer p.Close()
	if missing := p.Missing(); len(missing) != 1 || missing[0] != "tcp_probe_of_old" {
		t.Errorf("missing %v", missing)
	}
	exchange(t, client, server, 1)
	nextPacket(t, p, capture.Driver)

	defer capture.RenameTracepoint("net_dev_queue", "net_dev_queue_of_old")()
	if _, err = capture.Open(testenv.Cookie(t, client), 1<<16); !errors.Is(err, ebpf.ErrNotSupported) || !strings.Contains(err.Error(), "no tracepoint net_dev_queue_of_old") {
		t.Errorf("%v", err)
	}
}
