// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

var (
	linkA = []netip.Prefix{netip.MustParsePrefix("10.90.0.1/24"), netip.MustParsePrefix("fd90::1/64")}
	linkB = []netip.Prefix{netip.MustParsePrefix("10.90.0.2/24"), netip.MustParsePrefix("fd90::2/64")}
)

// connected is a lab with a link.
type connected struct {
	*Link
	lab  *Lab
	a, b *Namespace
}

func connect(tb testing.TB, l *Lab, o LinkOptions) connected {
	tb.Helper()
	c := connected{lab: l}
	for name, n := range map[string]**Namespace{"a": &c.a, "b": &c.b} {
		var err error
		if *n, err = l.Namespace(name); err != nil {
			tb.Fatal(err)
		}
	}
	var err error
	if c.Link, err = l.Connect(c.a, c.b, o, linkA, linkB); err != nil {
		tb.Fatal(err)
	}
	return c
}

func newLink(t *testing.T, o LinkOptions) (connected, context.Context) {
	t.Helper()
	l, ctx := newLab(t, Options{})
	return connect(t, l, o), ctx
}

// pair returns both ends of a TCP connection from a to b, and the duration of the handshake.
func (c connected) pair(ctx context.Context, to netip.Addr) (client, server *net.TCPConn, took time.Duration, err error) {
	listen := net.ListenConfig{}
	listen.SetMultipathTCP(false)
	var ln net.Listener
	err = c.b.Do(func() (err error) {
		ln, err = listen.Listen(ctx, "tcp", netip.AddrPortFrom(to, 0).String())
		return err
	})
	if err != nil {
		return nil, nil, 0, err
	}
	defer ln.Close()
	dial := net.Dialer{}
	dial.SetMultipathTCP(false)
	var conn net.Conn
	err = c.a.Do(func() (err error) {
		start := time.Now()
		conn, err = dial.DialContext(ctx, "tcp", ln.Addr().String())
		took = time.Since(start)
		return err
	})
	if err != nil {
		return nil, nil, 0, err
	}
	client = conn.(*net.TCPConn)
	deadline, _ := ctx.Deadline()
	_ = ln.(*net.TCPListener).SetDeadline(deadline)
	accepted, err := ln.Accept()
	if err != nil {
		client.Close()
		return nil, nil, 0, err
	}
	server = accepted.(*net.TCPConn)
	return client, server, took, errors.Join(client.SetDeadline(deadline), server.SetDeadline(deadline))
}

func (c connected) mustPair(ctx context.Context, t *testing.T, to netip.Addr) (client, server *net.TCPConn, took time.Duration) {
	t.Helper()
	client, server, took, err := c.pair(ctx, to)
	must(t, err)
	t.Cleanup(func() { client.Close(); server.Close() })
	return client, server, took
}

// datagrams returns an IPv4 UDP socket in a that is connected to a socket in b.
func (c connected) datagrams(ctx context.Context, t *testing.T) (from, to net.Conn) {
	t.Helper()
	address := netip.AddrPortFrom(linkB[0].Addr(), 4000)
	must(t, c.b.Do(func() error {
		u, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(address))
		to = u
		return err
	}))
	must(t, c.a.Do(func() (err error) {
		from, err = net.Dial("udp", address.String())
		return err
	}))
	t.Cleanup(func() { from.Close(); to.Close() })
	deadline, _ := ctx.Deadline()
	must(t, errors.Join(to.SetDeadline(deadline), from.SetDeadline(deadline)))
	return from, to
}

// send sends numbered datagrams, each an IP packet of size bytes.
func send(t *testing.T, conn net.Conn, first, last, size int) {
	t.Helper()
	b := make([]byte, size-20-8)
	for i := first; i <= last; i++ {
		binary.BigEndian.PutUint32(b, uint32(i))
		_, err := conn.Write(b)
		must(t, err)
	}
}

// receive returns the numbers of the next n datagrams.
func receive(t *testing.T, conn net.Conn, n int) []int {
	t.Helper()
	var numbers []int
	for b := make([]byte, 65536); len(numbers) < n; {
		_, err := conn.Read(b)
		must(t, err)
		numbers = append(numbers, int(binary.BigEndian.Uint32(b)))
	}
	return numbers
}

// settle waits until n packets were sent from a to b and none is in transit, and returns the counts.
func (c connected) settle(ctx context.Context, t *testing.T, sent uint64) DirectionCounts {
	t.Helper()
	must(t, c.lab.WaitFor(ctx, "packets", func() (bool, error) {
		n := c.Counts().AToB
		return n.Sent == sent && n.Delivered+n.Lost+n.Overflowed+n.Dropped+n.Refused == sent, nil
	}))
	return c.Counts().AToB
}

func inOrder(t *testing.T, numbers []int) {
	t.Helper()
	for i := 1; i < len(numbers); i++ {
		if numbers[i] <= numbers[i-1] {
			t.Fatalf("%d came after %d", numbers[i], numbers[i-1])
		}
	}
}

// forFamilies runs f for the IPv4 and the IPv6 address of b.
func forFamilies(t *testing.T, f func(t *testing.T, to netip.Addr)) {
	for i, name := range []string{"IPv4", "IPv6"} {
		t.Run(name, func(t *testing.T) { f(t, linkB[i].Addr()) })
	}
}

func TestLinkDelay(t *testing.T) {
	const delay = 20 * time.Millisecond
	c, ctx := newLink(t, LinkOptions{Delay: delay})
	forFamilies(t, func(t *testing.T, to netip.Addr) {
		client, server, took := c.mustPair(ctx, t, to)
		if took < 2*delay {
			t.Errorf("connected in %v", took)
		}
		go func() { _, _ = io.Copy(server, server) }()
		least := time.Duration(math.MaxInt64)
		for tries := 0; tries < 10 || least > 3*delay && tries < 1000; tries++ { // a busy host delays each of some
			start := time.Now()
			_, err := client.Write([]byte{1})
			must(t, err)
			_, err = io.ReadFull(client, make([]byte, 1))
			must(t, err)
			least = min(least, time.Since(start))
		}
		if least < 2*delay || least > 3*delay {
			t.Errorf("least round trip %v, want %v", least, 2*delay)
		}
		var info *unix.TCPInfo
		raw, err := client.SyscallConn()
		must(t, err)
		must(t, raw.Control(func(fd uintptr) { info, err = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO) }))
		must(t, err)
		rtt, shortest := time.Duration(info.Rtt)*time.Microsecond, time.Duration(info.Min_rtt)*time.Microsecond
		if rtt < 2*delay || shortest < 2*delay || shortest > 3*delay {
			t.Errorf("the kernel's round trip time %v, least %v, want %v", rtt, shortest, 2*delay)
		}
		t.Logf("connected in %v, least round trip %v, the kernel's %v", took, least, shortest)
	})
}

func TestLinkIsQuiet(t *testing.T) {
	c, ctx := newLink(t, LinkOptions{Delay: 5 * time.Millisecond})
	from, to := c.datagrams(ctx, t)
	// The kernel would send its first solicitations and reports within a second.
	sent := 0
	for start := time.Now(); time.Since(start) < 1500*time.Millisecond; sent++ {
		send(t, from, 1, 1, 100)
		receive(t, to, 1)
	}
	if n := c.settle(ctx, t, uint64(sent)); n.Bytes != uint64(100*sent) {
		t.Errorf("counts: %+v", n)
	}
	if n := c.Counts().BToA; n != (DirectionCounts{}) {
		t.Errorf("unexpected packets: %+v", n)
	}
}

// isSYN reports whether a packet begins a TCP connection.
func isSYN(p []byte) bool {
	header, protocol := 20, p[9]
	if p[0]>>4 == 6 {
		header, protocol = 40, p[6]
	}
	return protocol == unix.IPPROTO_TCP && p[header+13]&0x12 == 0x02
}

func TestLinkDropsFirstSYN(t *testing.T) {
	var syns atomic.Int32
	c, ctx := newLink(t, LinkOptions{Drop: func(d Direction, p []byte) bool {
		return d == AToB && isSYN(p) && syns.Add(1) == 1
	}})
	for i := range linkB {
		syns.Store(0)
		_, _, took := c.mustPair(ctx, t, linkB[i].Addr())
		if n := syns.Load(); n != 2 || took < 900*time.Millisecond { // the kernel's timeout is 1 s minus up to one jiffy
			t.Errorf("%v: connected in %v with %d SYNs", linkB[i].Addr(), took, n)
		}
		if n := c.Counts(); n.AToB.Dropped != uint64(i+1) || n.BToA.Dropped != 0 {
			t.Errorf("counts: %+v", n)
		}
	}
}

// A process that is being started has the descriptors of all files for a moment.
func TestLinkCloseWhileForked(t *testing.T) {
	l, _ := newLab(t, Options{})
	c := connect(t, l, LinkOptions{})
	files, err := c.files[0].SyscallConn()
	must(t, err)
	held := -1
	must(t, errors.Join(files.Control(func(fd uintptr) { held, err = unix.Dup(int(fd)) }), err))
	defer unix.Close(held)
	must(t, c.Close())
	again := connect(t, l, LinkOptions{})
	must(t, again.Close())
}

func TestLinkLoss(t *testing.T) {
	l, ctx := newLab(t, Options{})
	const sent, share = 1000, 0.2
	lose := func(seed uint64) []int {
		c := connect(t, l, LinkOptions{Loss: share, Seed: seed})
		defer func() { must(t, c.Close()) }()
		from, to := c.datagrams(ctx, t)
		defer from.Close()
		defer to.Close()
		var arrived []int
		for first := 1; first <= sent; first += 100 { // at most the capacity of the receive buffer
			send(t, from, first, first+99, 100)
			n := c.settle(ctx, t, uint64(first+99))
			arrived = append(arrived, receive(t, to, int(n.Delivered)-len(arrived))...)
		}
		inOrder(t, arrived)
		n := c.Counts().AToB
		if n.Lost+n.Delivered != sent || n.Bytes != 100*n.Delivered || int(n.Delivered) != len(arrived) {
			t.Errorf("%d arrived; counts: %+v", len(arrived), n)
		}
		// Five standard deviations.
		if d := math.Abs(float64(n.Lost) - sent*share); d > 5*math.Sqrt(sent*share*(1-share)) {
			t.Errorf("lost %d of %d", n.Lost, sent)
		}
		return arrived
	}
	first, again, other := fmt.Sprint(lose(1)), fmt.Sprint(lose(1)), fmt.Sprint(lose(2))
	if first != again {
		t.Error("with the same seed, other packets are lost")
	}
	if first == other {
		t.Error("with another seed, the same packets are lost")
	}
}

// TestLinkReorder checks that a packet overtakes at most eight others, and that none is lost.
func TestLinkReorder(t *testing.T) {
	const count = 2000
	for _, o := range []LinkOptions{
		{Delay: 20 * time.Millisecond},
		{Delay: 20 * time.Millisecond, Reorder: 0.1},
		// 256 us per packet, so that also a slow host fills the queue. Packets overtake only packets in a queue.
		{Rate: 1e6, Limit: 1 << 20, Reorder: 0.1},
	} {
		t.Run(fmt.Sprintf("%v %v %v", o.Delay, o.Rate, o.Reorder), func(t *testing.T) {
			c, ctx := newLink(t, o)
			from, to := c.datagrams(ctx, t)
			var early int
			var next uint32
			waiting := make(map[uint32]bool) // overtaken packets
			for sent := range uint32(count) {
				must(t, binary.Write(from, binary.BigEndian, sent))
				if sent%100 != 99 {
					continue
				}
				for range 100 {
					var n uint32
					must(t, binary.Read(to, binary.BigEndian, &n))
					if waiting[n] {
						delete(waiting, n)
						continue
					}
					if n != next {
						early++
					}
					for ; next < n; next++ {
						waiting[next] = true
					}
					next = n + 1
					if len(waiting) > maxOvertaken*(maxOvertaken+1) {
						t.Fatalf("packet %d: %d earlier packets have not arrived", n, len(waiting))
					}
				}
			}
			if len(waiting) > 0 || next != count {
				t.Errorf("%d of %d packets arrived in order, %d have not arrived", next, count, len(waiting))
			}
			if most := int(o.Reorder * count * 1.3); early > most || o.Reorder > 0 && early < int(o.Reorder*count*0.3) {
				t.Errorf("%d of %d packets were overtaking, Reorder is %v", early, count, o.Reorder)
			}
			t.Logf("%d of %d have overtaken", early, count)
		})
	}
}

func TestLinkLimit(t *testing.T) {
	const size, rate, limit = 1000, 8_000_000, 10_500
	c, ctx := newLink(t, LinkOptions{Rate: rate, Limit: limit})
	from, to := c.datagrams(ctx, t)
	start := time.Now()
	send(t, from, 1, 200, size)
	n := c.settle(ctx, t, 200)
	took := time.Since(start)
	arrived := receive(t, to, int(n.Delivered))
	inOrder(t, arrived)
	// Ten packets fit into the queue. Later packets fit at the configured rate.
	if most := 10 + 1 + int(took.Seconds()*rate/8/size); len(arrived) < 10 || len(arrived) > most || arrived[9] != 10 {
		t.Errorf("%d packets arrived within %v: %v", len(arrived), took, arrived)
	}
	if n.Overflowed == 0 || n.Overflowed+n.Delivered != 200 {
		t.Errorf("counts: %+v", n)
	}

	// The queue is empty now.
	send(t, from, 201, 210, size)
	inOrder(t, receive(t, to, 10))

	// An idle link forwards a packet that exceeds the limit.
	o := c.Options()
	o.Limit = size / 2
	must(t, c.Set(o))
	send(t, from, 211, 211, size)
	if got := receive(t, to, 1); got[0] != 211 {
		t.Errorf("got %v", got)
	}
}

func TestLinkRate(t *testing.T) {
	for _, offload := range []bool{false, true} {
		t.Run(fmt.Sprintf("offload=%v", offload), func(t *testing.T) {
			const rate = 40_000_000
			c, ctx := newLink(t, LinkOptions{Rate: rate, Delay: 5 * time.Millisecond, Offload: offload})
			client, server, _ := c.mustPair(ctx, t, linkB[0].Addr())
			start := time.Now()
			go func() {
				_, _ = client.Write(make([]byte, 4_000_000))
				_ = client.CloseWrite()
			}()
			got, err := io.Copy(io.Discard, server)
			must(t, err)
			took := time.Since(start)
			mbit := float64(got) * 8 / 1e6 / took.Seconds()
			t.Logf("%.1f Mbit/s", mbit)
			if got != 4_000_000 {
				t.Errorf("got %d bytes", got)
			}
			must(t, c.lab.WaitFor(ctx, "counts", func() (bool, error) { return c.Counts().AToB.Bytes > 4_000_000, nil }))
			if mbit > rate/1e6 {
				t.Errorf("%.1f Mbit/s, more than the rate", mbit)
			}
		})
	}
}

func TestLinkDataIsUnchanged(t *testing.T) {
	for _, offload := range []bool{false, true} {
		for _, loss := range []float64{0, 0.01} {
			t.Run(fmt.Sprintf("offload=%v,loss=%v", offload, loss), func(t *testing.T) {
				var largest atomic.Int64
				c, ctx := newLink(t, LinkOptions{
					Delay: 2 * time.Millisecond, Loss: loss, Reorder: 5 * loss, Seed: 1, Offload: offload,
					Drop: func(_ Direction, p []byte) bool {
						for n := int64(len(p)); ; {
							if old := largest.Load(); n <= old || largest.CompareAndSwap(old, n) {
								return false
							}
						}
					},
				})
				forFamilies(t, func(t *testing.T, to netip.Addr) {
					largest.Store(0)
					client, server, _ := c.mustPair(ctx, t, to)
					for _, way := range []struct{ from, to *net.TCPConn }{{client, server}, {server, client}} {
						data := make([]byte, 5<<20)
						_, _ = rand.NewChaCha8([32]byte{1}).Read(data)
						go func() {
							_, _ = way.from.Write(data)
							_ = way.from.CloseWrite()
						}()
						hash := sha256.New()
						got, err := io.Copy(hash, way.to)
						must(t, err)
						if want := sha256.Sum256(data); got != int64(len(data)) || !bytes.Equal(hash.Sum(nil), want[:]) {
							t.Errorf("sent %d bytes, received %d bytes with different content", len(data), got)
						}
					}
					if large := largest.Load() > 1500; large != offload {
						t.Errorf("largest packet: %d", largest.Load())
					}
				})
				n := c.Counts()
				if lost := n.AToB.Lost > 0 && n.BToA.Lost > 0; lost != (loss > 0) {
					t.Errorf("counts: %+v", n)
				}
				for _, ns := range []*Namespace{c.a, c.b} {
					dev, err := ns.Netlink().LinkByName("link0")
					must(t, err)
					if s := dev.Attrs().Statistics; s.TxDropped != 0 || s.RxDropped != 0 || s.RxErrors != 0 {
						t.Errorf("the interface in %s dropped packets: %+v", ns.Name(), s)
					}
				}
			})
		}
	}
}

func TestLinkSet(t *testing.T) {
	c, ctx := newLink(t, LinkOptions{Delay: 300 * time.Millisecond})
	from, to := c.datagrams(ctx, t)
	set := func(change func(o *LinkOptions)) {
		t.Helper()
		o := c.Options()
		change(&o)
		must(t, c.Set(o))
	}
	wait := func(what string, ok func(n DirectionCounts) bool) {
		t.Helper()
		must(t, c.lab.WaitFor(ctx, what, func() (bool, error) { return ok(c.Counts().AToB), nil }))
	}

	// With a shorter delay, later packets do not overtake the packet in transit.
	start := time.Now()
	send(t, from, 1, 1, 100)
	wait("first packet", func(n DirectionCounts) bool { return n.Sent == 1 })
	set(func(o *LinkOptions) { o.Delay = 0 })
	send(t, from, 2, 10, 100)
	inOrder(t, receive(t, to, 10))
	if took := time.Since(start); took < 300*time.Millisecond {
		t.Errorf("arrived in %v", took)
	}

	// At 8 bit/s, the queued packets would take 15 minutes. The new rate applies to them.
	set(func(o *LinkOptions) { o.Rate = 8 })
	start = time.Now()
	send(t, from, 11, 19, 100)
	wait("waiting packets", func(n DirectionCounts) bool { return n.Sent == 19 })
	set(func(o *LinkOptions) { o.Rate = 8000 })
	inOrder(t, receive(t, to, 9))
	if took := time.Since(start); took < 9*100*time.Millisecond {
		t.Errorf("arrived in %v", took)
	}
	set(func(o *LinkOptions) { o.Rate, o.Loss = 0, 1 })
	send(t, from, 20, 29, 100)
	if n := c.settle(ctx, t, 29); n.Lost != 10 {
		t.Errorf("counts: %+v", n)
	}
	set(func(o *LinkOptions) { o.Loss, o.Drop = 0, func(d Direction, _ []byte) bool { return d == AToB } })
	send(t, from, 30, 39, 100)
	if n := c.settle(ctx, t, 39); n.Dropped != 10 {
		t.Errorf("counts: %+v", n)
	}
	set(func(o *LinkOptions) { o.Drop = nil })
	send(t, from, 40, 40, 100)
	if got := receive(t, to, 1); got[0] != 40 {
		t.Errorf("got %v", got)
	}

	// Packets that the receiving interface refuses are counted.
	dev, err := c.b.Netlink().LinkByName("link0")
	must(t, err)
	must(t, c.b.Netlink().LinkSetDown(dev))
	send(t, from, 41, 41, 100)
	if n := c.settle(ctx, t, 41); n.Refused != 1 {
		t.Errorf("counts: %+v", n)
	}
}

// TestLinkRateIsNotMadeUpFor checks that the time at a lower rate does not allow a burst at a higher rate.
func TestLinkRateIsNotMadeUpFor(t *testing.T) {
	const waited = 65 * time.Second
	k := &Link{start: time.Now().Add(-waited)}
	k.options.Store(&LinkOptions{MTU: 1500, Rate: 80, Delay: time.Second})
	for d := range k.ways {
		w, err := newWay(k, Direction(d), nil, nil)
		must(t, err)
		defer w.timer.Close()
		for range 10 {
			if !w.offer(packet{data: make([]byte, vnetHeader+100)}) { // at 0; 10 s each
				t.Fatal("not queued")
			}
		}
		k.ways[d] = w
	}
	o := k.Options()
	o.Rate = 8000
	must(t, k.Set(o))
	for _, w := range k.ways {
		w.advance(time.Hour)
		for i := range uint64(10) {
			due := time.Duration(i+1)*10*time.Second + o.Delay
			if i >= 6 {
				due = waited + time.Duration(i-5)*100*time.Millisecond + o.Delay
			}
			if got := w.packet(i).at; got < due || got > due+4*time.Second {
				t.Errorf("packet %d is due at %v, want %v", i, got, due)
			}
		}
	}
}

func TestLinkRefuses(t *testing.T) {
	c, _ := newLink(t, LinkOptions{Name: "wan", Seed: 7})
	for want, o := range map[string]LinkOptions{
		"MTU 67":        {MTU: 67},
		"MTU 65536":     {MTU: 65536},
		"delay -1ns":    {Delay: -1},
		"rate -1":       {Rate: -1},
		"limit -1":      {Limit: -1},
		"loss -0.1":     {Loss: -0.1},
		"loss 1.1":      {Loss: 1.1},
		"loss NaN":      {Loss: math.NaN()},
		"reorder 1.1":   {Reorder: 1.1},
		"busy":          {Name: "wan"},
		"make tun name": {Name: "name-of-16-bytes"},
	} {
		_, err := c.lab.Connect(c.a, c.b, o, nil, nil)
		if err == nil || !strings.HasPrefix(err.Error(), "connect a and b: ") || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v", o, err)
		}
	}
	for _, change := range []func(o *LinkOptions){
		func(o *LinkOptions) { o.Name = "" }, func(o *LinkOptions) { o.MTU++ }, func(o *LinkOptions) { o.Seed++ },
		func(o *LinkOptions) { o.Offload = true }, func(o *LinkOptions) { o.Loss = 2 },
	} {
		o := c.Options()
		change(&o)
		if err := c.Set(o); err == nil {
			t.Errorf("set to %+v", o)
		}
	}
	if o := c.Options(); o.Name != "wan" || o.MTU != 1500 || o.Seed != 7 || o.Loss != 0 {
		t.Errorf("options: %+v", o)
	}
	must(t, c.lab.Close())
	if _, err := c.lab.Connect(c.a, c.b, LinkOptions{}, nil, nil); err == nil {
		t.Error("a closed lab connects")
	}
}

// linkParts counts the descriptors and goroutines of links in this process.
func linkParts(t *testing.T) (descriptors, goroutines int) {
	t.Helper()
	fds, err := filepath.Glob("/proc/self/fd/*")
	must(t, err)
	for _, fd := range fds {
		if to, _ := os.Readlink(fd); to == "/dev/net/tun" || to == "anon_inode:[timerfd]" {
			descriptors++
		}
	}
	stacks := make([]byte, 1<<20)
	all := string(stacks[:runtime.Stack(stacks, true)])
	return descriptors, strings.Count(all, "lab.(*way).read(") + strings.Count(all, "lab.(*way).deliver(")
}

// TestLinkCloseLeavesNothing checks that Close closes all descriptors and stops all goroutines of links. It is not
// parallel, because other tests would create links.
func TestLinkCloseLeavesNothing(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("network namespaces need root")
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	assertParts := func(when string, descriptors, goroutines int) {
		t.Helper()
		if d, g := linkParts(t); d != descriptors || g != goroutines {
			t.Errorf("%s: %d descriptors and %d goroutines", when, d, g)
		}
	}
	assertParts("before", 0, 0)
	l, err := New(ctx, Options{})
	must(t, err)
	defer l.Close()
	c := connect(t, l, LinkOptions{Delay: time.Hour})
	from, to := c.datagrams(ctx, t)
	send(t, from, 1, 100, 100)
	must(t, l.WaitFor(ctx, "packets", func() (bool, error) { return c.Counts().AToB.Sent == 100, nil }))
	assertParts("while up", 4, 4)
	if _, err := l.Connect(c.a, c.b, LinkOptions{Name: "bad"}, []netip.Prefix{{}}, nil); err == nil {
		t.Error("an invalid address is accepted")
	}
	assertParts("after a failed Connect", 4, 4)
	start := time.Now()
	must(t, c.Close())
	must(t, c.Close())
	if took := time.Since(start); took > 20*time.Second {
		t.Errorf("Close took %v", took)
	}
	assertParts("after Close", 0, 0)
	for _, n := range []*Namespace{c.a, c.b} {
		if links, err := n.Netlink().LinkList(); err != nil || len(links) != 1 {
			t.Errorf("links in %s: %v, %v", n.Name(), links, err)
		}
	}
	if n := c.Counts().AToB; n.Sent != 100 || n.Delivered != 0 {
		t.Errorf("counts: %+v", n)
	}
	from.Close()
	to.Close()

	// Close closes links during traffic, and reports links that have stopped before.
	c = connect(t, l, LinkOptions{})
	client, server, _, err := c.pair(ctx, linkB[1].Addr())
	must(t, err)
	defer client.Close()
	defer server.Close()
	go func() { _, _ = client.Write(make([]byte, 1<<30)) }()
	_, err = io.CopyN(io.Discard, server, 1<<20)
	must(t, err)
	broken, err := l.Connect(c.a, c.b, LinkOptions{Name: "broken"}, nil, nil)
	must(t, err)
	dev, err := c.a.Netlink().LinkByName("broken")
	must(t, err)
	must(t, c.a.Netlink().LinkDel(dev))
	must(t, l.WaitFor(ctx, "end of the link", func() (bool, error) {
		broken.mu.Lock()
		defer broken.mu.Unlock()
		return len(broken.failed) > 0, nil
	}))
	if err := l.Close(); err == nil || !strings.Contains(err.Error(), "read packet") {
		t.Errorf("close: %v", err)
	}
	assertParts("after the lab", 0, 0)
}

// BenchmarkLink measures the throughput of one TCP connection with a delay of 15 ms one way.
func BenchmarkLink(b *testing.B) {
	if os.Geteuid() != 0 {
		b.Skip("network namespaces need root")
	}
	for _, offload := range []bool{false, true} {
		b.Run(fmt.Sprintf("offload=%v", offload), func(b *testing.B) {
			ctx, cancel := context.WithTimeout(b.Context(), 30*time.Second)
			defer cancel()
			l, err := New(ctx, Options{})
			if err != nil {
				b.Fatal(err)
			}
			defer l.Close()
			c := connect(b, l, LinkOptions{Delay: 15 * time.Millisecond, Offload: offload})
			client, server, _, err := c.pair(ctx, linkB[0].Addr())
			if err != nil {
				b.Fatal(err)
			}
			defer client.Close()
			defer server.Close()
			const size = 1 << 20
			go func() {
				for data := make([]byte, size); ; {
					if _, err := client.Write(data); err != nil {
						return
					}
				}
			}()
			if _, err := io.CopyN(io.Discard, server, 32*size); err != nil { // past slow start
				b.Fatal(err)
			}
			b.SetBytes(size)
			b.ReportAllocs()
			data := make([]byte, size)
			start, n := time.Now(), 0
			for b.Loop() {
				if _, err := io.ReadFull(server, data); err != nil {
					b.Fatal(err)
				}
				n++
			}
			b.ReportMetric(float64(n)*size*8/1e6/time.Since(start).Seconds(), "Mbit/s")
		})
	}
}

// TestAddressesAreLocal connects namespaces while other processes want the CPUs: the kernel adds the routes of IPv6
// addresses in a work queue.
func TestAddressesAreLocal(t *testing.T) {
	for range 2 * runtime.NumCPU() {
		busy := exec.Command("sh", "-c", "while :; do :; done")
		must(t, busy.Start())
		t.Cleanup(func() {
			_ = busy.Process.Kill()
			_ = busy.Wait()
		})
	}
	l, _ := newLab(t, Options{})
	for i := range 40 {
		var ends [2]*Namespace
		for side := range ends {
			var err error
			ends[side], err = l.Namespace(fmt.Sprintf("end-%d-%d", side, i))
			must(t, err)
		}
		k, err := l.Connect(ends[0], ends[1], LinkOptions{}, linkA, linkB)
		must(t, err)
		for side, address := range []netip.Addr{linkA[1].Addr(), linkB[1].Addr()} {
			routes, err := ends[side].Netlink().RouteGet(address.AsSlice())
			must(t, err)
			if routes[0].Type != unix.RTN_LOCAL {
				t.Errorf("link %d: packets to %v are not delivered", i, address)
			}
		}
		must(t, k.Close())
	}
}

// TestBridgeKeepsAddress adds ports to a bridge: its neighbors know its link-layer address.
func TestBridgeKeepsAddress(t *testing.T) {
	l, _ := newLab(t, Options{})
	router, err := l.Namespace("router")
	must(t, err)
	must(t, router.Bridge("hosts"))
	address := func() string {
		link, err := router.Netlink().LinkByName("hosts")
		must(t, err)
		return link.Attrs().HardwareAddr.String()
	}
	before := address()
	for i := range 12 {
		host, err := l.Namespace(fmt.Sprintf("host-%d", i))
		must(t, err)
		must(t, router.Port("hosts", fmt.Sprintf("port-%d", i), host, "eth0"))
		if now := address(); now != before {
			t.Fatalf("with %d ports, the address is %s, was %s", i+1, now, before)
		}
	}
}
