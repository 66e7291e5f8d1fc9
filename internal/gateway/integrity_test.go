// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/gateway/access"
	"sockeye/internal/gateway/packet"
	"sockeye/internal/tun"
	"sockeye/lab"
	"sockeye/room"
)

// site consists of a guest with its own kernel, a gateway on a host, and a remote host behind a link.
type site struct {
	testing.TB
	guest, host, far *lab.Namespace
	link             *lab.Link
	g                *Gateway
	stop             func()        // stops the gateway and waits
	done             chan struct{} // closed when the gateway has exited
}

var (
	siteHost = []netip.Prefix{netip.MustParsePrefix("10.97.0.1/24"), netip.MustParsePrefix("fd97::1/64")}
	siteFar  = []netip.Prefix{netip.MustParsePrefix("10.97.0.2/24"), netip.MustParsePrefix("fd97::2/64")}
)

// sitePort is forwarded to the guest's innerPort.
const sitePort = 1790

// linger is how long the gateways of most tests linger.
const linger = 5 * time.Second

// newSite creates a site. When the gateway is stopped, it lingers for the given time.
func newSite(t testing.TB, mtu int, o lab.LinkOptions, linger time.Duration) *site {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	l, err := lab.New(ctx, lab.Options{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cancel()
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	s := &site{TB: t, done: make(chan struct{})}
	for name, n := range map[string]**lab.Namespace{"guest": &s.guest, "host": &s.host, "far": &s.far} {
		if *n, err = l.Namespace(name); err != nil {
			t.Fatal(err)
		}
	}
	if s.link, err = l.Connect(s.host, s.far, o, siteHost, siteFar); err != nil {
		t.Fatal(err)
	}
	kernel, err := room.Calibrate()
	if err != nil {
		t.Fatal(err)
	}
	config := Config{
		MTU: mtu, Guest4: guest4, Guest6: guest6, Host4: alias4, Host6: alias6, Kernel: kernel,
		Outbound: access.Outbound{All: true}, Linger: linger,
	}
	if err := s.guest.Do(func() (err error) {
		config.TUN, err = tun.Open(tun.Interface{Name: "guest0", MTU: mtu, Addresses: []netip.Addr{guest4, guest6}})
		return err
	}); err != nil {
		t.Fatal(err)
	}
	ready := make(chan error, 1)
	go func() {
		defer close(s.done)
		err := s.host.Do(func() error {
			fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
			if err == nil {
				err = errors.Join(unix.Bind(fd, &unix.SockaddrInet6{Port: sitePort}), unix.Listen(fd, unix.SOMAXCONN))
			}
			if err == nil {
				config.Forwards = []Forward{{FD: fd, Protocol: unix.IPPROTO_TCP, Port: innerPort}}
				s.g, err = New(config)
			}
			ready <- err
			if err != nil {
				return err
			}
			return s.g.Run(ctx)
		})
		if err != nil {
			t.Error(err)
		}
	}()
	if err := <-ready; err != nil {
		t.Fatal(err)
	}
	s.stop = sync.OnceFunc(func() {
		cancel()
		<-s.done
	})
	t.Cleanup(s.stop)
	return s
}

// listen accepts connections in a namespace until the test ends.
func (s *site) listen(n *lab.Namespace, port int, serve func(*net.TCPConn)) net.Listener {
	s.Helper()
	var c net.ListenConfig
	c.SetMultipathTCP(false)
	var l net.Listener
	if err := n.Do(func() (err error) {
		l, err = c.Listen(context.Background(), "tcp", fmt.Sprintf("[::]:%d", port))
		return err
	}); err != nil {
		s.Fatal(err)
	}
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			serving.Go(func() { serve(c.(*net.TCPConn)) })
		}
	})
	s.Cleanup(func() {
		l.Close()
		serving.Wait()
	})
	return l
}

func dialIn(n *lab.Namespace, to string) (c *net.TCPConn, err error) {
	err = n.Do(func() error {
		conn, err := (&net.Dialer{Timeout: 20 * time.Second}).Dial("tcp", to)
		if err == nil {
			c = conn.(*net.TCPConn)
		}
		return err
	})
	return c, err
}

// settled waits until the gateway has closed all connections that it opened.
func (s *site) settled(within time.Duration) {
	s.Helper()
	var c [reasons]uint64
	for end := time.Now().Add(within); time.Now().Before(end); time.Sleep(time.Millisecond) {
		if c = s.g.Counts(); c[Opened] == c[Closed]+c[Reset]+c[Refused] {
			return
		}
	}
	s.Errorf("remaining connections: %v", c)
}

// plan describes the behaviour of both ends of a connection. Both ends have a copy.
type plan struct {
	id   uint64
	ends [2]endPlan
}

type endPlan struct {
	size  int // bytes to send
	write int // maximum bytes per write
	pause int // number of writes or reads between pauses; 0: no pauses
	long  time.Duration
	most  int  // maximum number of pauses, separately for sending and receiving
	reset int  // number of sent bytes after which the end resets the connection; -1: never
	late  bool // the end sends after it has received all data
}

func newPlan(rng *rand.Rand, id uint64) *plan {
	p := &plan{id: id}
	for i := range p.ends {
		e := &p.ends[i]
		e.size = int(float64(uint64(1)<<rng.IntN(22)) * rng.Float64())
		e.write = 1 + rng.IntN(1<<rng.IntN(18))
		e.size = min(e.size, e.write*3000)
		e.reset = -1
		if rng.IntN(3) == 0 {
			e.pause, e.long, e.most = 1+rng.IntN(200), time.Duration(rng.IntN(20))*time.Millisecond, 20
		}
		if rng.IntN(20) == 0 {
			e.pause, e.long, e.most = 1+rng.IntN(20), 500*time.Millisecond, 2
		}
	}
	switch rng.IntN(10) {
	case 0:
		p.ends[0].reset = rng.IntN(p.ends[0].size + 1)
	case 1:
		p.ends[1].reset = rng.IntN(p.ends[1].size + 1)
	}
	if rng.IntN(2) == 0 {
		p.ends[rng.IntN(2)].late = true
	}
	return p
}

// stream returns the data that an end sends.
func (p *plan) stream(end int) *rand.ChaCha8 {
	var seed [32]byte
	binary.LittleEndian.PutUint64(seed[:], p.id)
	seed[8] = byte(end)
	return rand.NewChaCha8(seed)
}

// errReset is the result of an end that resets the connection according to its plan.
var errReset = errors.New("reset by plan")

// play runs one end of a plan and compares the received data with the data that the other end sends.
func (p *plan) play(c *net.TCPConn, end int) error {
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		return err
	}
	// The link may lose a RST, which is not retransmitted.
	if err := c.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: 2 * time.Second, Interval: 2 * time.Second, Count: 9}); err != nil {
		return err
	}
	me, other := p.ends[end], p.ends[1-end]
	received := make(chan error, 1)
	go func() { received <- p.receive(c, end, me, other) }()
	early := false
	if me.late {
		if err := <-received; err != nil {
			return err
		}
		early = true
	}
	err := p.send(c, end, me)
	if errors.Is(err, errReset) {
		_ = c.SetLinger(0)
		c.Close()
	}
	if !early {
		if r := <-received; err == nil {
			err = r
		}
	}
	return err
}

func (p *plan) send(c *net.TCPConn, end int, me endPlan) error {
	source := p.stream(end)
	b := make([]byte, me.write)
	for sent, writes := 0, 0; sent < me.size; writes++ {
		n := min(len(b), me.size-sent)
		if me.reset >= 0 {
			if sent >= me.reset {
				return errReset
			}
			n = min(n, me.reset-sent)
		}
		_, _ = source.Read(b[:n]) // cannot fail
		if _, err := c.Write(b[:n]); err != nil {
			return fmt.Errorf("after sending %d of %d bytes: %w", sent, me.size, err)
		}
		sent += n
		if me.pause > 0 && writes%me.pause == 0 && writes/me.pause < me.most {
			time.Sleep(me.long)
		}
	}
	if me.reset >= 0 {
		return errReset
	}
	return c.CloseWrite()
}

func (p *plan) receive(c *net.TCPConn, end int, me, other endPlan) error {
	source := p.stream(1 - end)
	b, want := make([]byte, 1<<16), make([]byte, 1<<16)
	for got, reads := 0, 0; ; reads++ {
		n, err := c.Read(b)
		_, _ = source.Read(want[:n]) // cannot fail
		if !bytes.Equal(b[:n], want[:n]) {
			return fmt.Errorf("wrong data after %d bytes", got)
		}
		switch got += n; {
		case errors.Is(err, io.EOF):
			if got != other.size || other.reset >= 0 {
				return fmt.Errorf("FIN after %d of %d bytes", got, other.size)
			}
			return nil
		case err != nil:
			return fmt.Errorf("after receiving %d of %d bytes: %w", got, other.size, err)
		}
		if me.pause > 0 && reads%me.pause == 0 && reads/me.pause < me.most {
			time.Sleep(me.long)
		}
	}
}

// verdict returns an error if the plan does not permit the result of an end.
func (p *plan) verdict(err error) error {
	resets := p.ends[0].reset >= 0 || p.ends[1].reset >= 0
	switch {
	case err == nil && !resets:
		return nil
	case resets && (errors.Is(err, errReset) || errors.Is(err, unix.ECONNRESET) || errors.Is(err, unix.EPIPE) || errors.Is(err, unix.ENOTCONN) || errors.Is(err, net.ErrClosed)):
		return nil
	case err == nil:
		return errors.New("no error, although the plan has a reset")
	}
	return err
}

// TestIntegrity runs random transfers through a gateway in both directions, over a link that delays, loses and reorders
// packets, and compares all data. SOCKEYE_INTEGRITY is the duration in minutes; the default is a few seconds.
func TestIntegrity(t *testing.T) {
	duration := 12 * time.Second
	if v := os.Getenv("SOCKEYE_INTEGRITY"); v != "" {
		n, err := strconv.ParseFloat(v, 64)
		if err != nil {
			t.Fatal(err)
		}
		duration = time.Duration(n * float64(time.Minute))
	}
	for _, mtu := range []int{1500, 65520} {
		t.Run(fmt.Sprint("MTU ", mtu), func(t *testing.T) { integrity(t, mtu, duration/2) })
	}
}

func integrity(t *testing.T, mtu int, duration time.Duration) {
	o := lab.LinkOptions{MTU: 1500, Delay: time.Millisecond, Rate: 1e9, Offload: true, Seed: 1}
	s := newSite(t, mtu, o, linger)
	o = s.link.Options()
	var plans sync.Map
	var served sync.WaitGroup
	var bytesMoved, failed atomic.Int64
	report := func(p *plan, end int, err error) {
		if err = p.verdict(err); err != nil && failed.Add(1) <= 10 {
			t.Errorf("end %d of %+v: %v", end, *p, err)
		}
	}
	serve := func(c *net.TCPConn) {
		var id [8]byte
		if _, err := io.ReadFull(c, id[:]); err != nil {
			c.Close() // reset before the first data
			return
		}
		v, ok := plans.Load(binary.LittleEndian.Uint64(id[:]))
		if !ok {
			t.Errorf("connection without a plan: % x", id)
			c.Close()
			return
		}
		served.Add(1)
		defer served.Done()
		p := v.(*plan)
		report(p, 1, p.play(c, 1))
	}
	s.listen(s.far, 7000, serve)
	s.listen(s.guest, innerPort, serve)
	routes := []struct {
		from *lab.Namespace
		to   string
	}{
		{s.guest, "10.97.0.2:7000"}, {s.guest, "[fd97::2]:7000"}, {s.far, "10.97.0.1:1790"}, {s.far, "[fd97::1]:1790"},
	}
	before := descriptors(t)
	end := time.Now().Add(duration)
	var workers sync.WaitGroup
	for w := range 24 {
		workers.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(w), uint64(mtu)))
			for i := 0; time.Now().Before(end); i++ {
				p := newPlan(rng, uint64(w)<<32|uint64(i))
				plans.Store(p.id, p)
				route := routes[rng.IntN(len(routes))]
				c, err := dialIn(route.from, route.to)
				if err != nil {
					t.Errorf("connect to %s: %v", route.to, err)
					return
				}
				if _, err = c.Write(binary.LittleEndian.AppendUint64(nil, p.id)); err == nil {
					err = p.play(c, 0)
				}
				report(p, 0, err)
				bytesMoved.Add(int64(p.ends[0].size + p.ends[1].size))
			}
		})
	}
	// The quality of the link changes during the transfers.
	rng := rand.New(rand.NewPCG(9, 9))
	for time.Now().Before(end) {
		time.Sleep(500 * time.Millisecond)
		o.Loss = []float64{0, 0.001, 0.01}[rng.IntN(3)]
		o.Reorder = []float64{0, 0.01}[rng.IntN(2)]
		o.Delay = time.Duration(rng.IntN(10)) * time.Millisecond
		if err := s.link.Set(o); err != nil {
			t.Fatal(err)
		}
	}
	o.Loss, o.Reorder = 0, 0
	if err := s.link.Set(o); err != nil {
		t.Fatal(err)
	}
	workers.Wait()
	served.Wait()
	s.settled(20 * time.Second)
	// A connection that was reset before its first data is closed by serve, which nobody waits for.
	now := descriptors(t)
	for deadline := time.Now().Add(patience); now > before && time.Now().Before(deadline); now = descriptors(t) {
		time.Sleep(10 * time.Millisecond)
	}
	if now > before {
		var open []string
		links, _ := filepath.Glob("/proc/self/fd/*")
		for _, link := range links {
			to, _ := os.Readlink(link)
			open = append(open, to)
		}
		t.Errorf("%d descriptors before, %d after: %q", before, now, open)
	}
	s.stop()
	for _, c := range s.g.conns {
		if c.state != timeWait {
			t.Errorf("remaining connection: %v", c.endpoints)
		}
	}
	if s.g.backlog != 0 {
		t.Errorf("%d bytes remain in the backlog", s.g.backlog)
	}
	t.Logf("%d MB planned, counts %v", bytesMoved.Load()>>20, s.g.Counts())
}

// TestPeerGone checks that a program that uses keepalive detects that its peer is gone, even if the network lost the
// peer's RST.
func TestPeerGone(t *testing.T) {
	var lost atomic.Bool
	s := newSite(t, 65520, lab.LinkOptions{
		Delay: time.Millisecond, Offload: true,
		Drop: func(_ lab.Direction, raw []byte) bool {
			segment, ok := packet.Parse(raw)
			return ok && segment.Protocol == unix.IPPROTO_TCP && segment.Flags&packet.RST != 0 && lost.CompareAndSwap(false, true)
		},
	}, linger)
	s.listen(s.far, 7000, func(c *net.TCPConn) {
		if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
			t.Error(err)
		}
		if err := errors.Join(c.SetLinger(0), c.Close()); err != nil {
			t.Error(err)
		}
	})
	c, err := dialIn(s.guest, "10.97.0.2:7000")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: time.Second, Interval: time.Second, Count: 9}); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if err := c.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("reads %v", err)
	}
	if !lost.Load() {
		t.Error("no RST was lost")
	}
}

// TestSlowReader checks that a peer that reads slowly does not stall its connection: that would delay each part by a timer
// of 200 ms.
func TestSlowReader(t *testing.T) {
	const size, part = 8 << 20, 32 << 10
	s := newSite(t, 65520, lab.LinkOptions{Delay: time.Millisecond, Rate: 1e9, Offload: true}, linger)
	stalled := make(chan int, 1)
	s.listen(s.far, 7000, func(c *net.TCPConn) {
		defer c.Close()
		_ = c.SetReadBuffer(64 << 10)
		n := 0
		b := make([]byte, part)
		for {
			start := time.Now()
			if _, err := io.ReadFull(c, b); err != nil {
				break
			}
			if time.Since(start) > 100*time.Millisecond {
				n++
			}
			time.Sleep(time.Millisecond)
		}
		stalled <- n
	})
	c, err := dialIn(s.guest, "10.97.0.2:7000")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Write(make([]byte, size)); err != nil {
		t.Fatal(err)
	}
	c.Close()
	// A busy host delays some parts, too.
	if n := <-stalled; n > size/part/8 {
		t.Errorf("%d of %d parts took more than 100 ms", n, size/part)
	}
	s.settled(patience)
	if counts := s.g.Counts(); counts[PartialSend]+counts[Retransmitted]+counts[OutOfOrder] != 0 {
		t.Errorf("counts %v", counts)
	}
}

// TestInterfaceGone checks that Run returns without an error when the guest's interface is deleted.
func TestInterfaceGone(t *testing.T) {
	s := newSite(t, 1500, lab.LinkOptions{}, linger)
	_, err := dialIn(s.guest, "10.97.0.2:7000")
	if !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("closed port: %v", err)
	}
	dev, err := s.guest.Netlink().LinkByName("guest0")
	if err != nil {
		t.Fatal(err)
	}
	if err := s.guest.Netlink().LinkDel(dev); err != nil {
		t.Fatal(err)
	}
	select {
	case <-s.done:
	case <-time.After(patience):
		t.Error("Run does not return")
	}
}

// TestStop checks that data that a program sent before it exited is delivered, and that an incomplete stream ends with
// a RST.
func TestStop(t *testing.T) {
	const size = 4 << 20
	s := newSite(t, 65520, lab.LinkOptions{Delay: 5 * time.Millisecond, Rate: 1e9, Offload: true}, patience)
	got := make(chan error, 2)
	s.listen(s.far, 7000, func(c *net.TCPConn) {
		defer c.Close()
		n, err := io.Copy(io.Discard, c)
		if err == nil && n != size {
			err = fmt.Errorf("FIN after %d bytes", n)
		}
		got <- err
	})
	for range 2 {
		c, err := dialIn(s.guest, "10.97.0.2:7000")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.Write(make([]byte, size)); err != nil {
			t.Fatal(err)
		}
		c.Close()
	}
	start := time.Now()
	s.stop()
	for range 2 {
		if err := <-got; err != nil {
			t.Error(err)
		}
	}
	if took := time.Since(start); took > patience {
		t.Errorf("took %v", took)
	}
}

// TestStopConnecting checks that a stopping gateway does not wait for connections that are not established, because
// they have no data to deliver.
func TestStopConnecting(t *testing.T) {
	var silent atomic.Bool
	s := newSite(t, 65520, lab.LinkOptions{Drop: func(_ lab.Direction, raw []byte) bool {
		segment, ok := packet.Parse(raw)
		return ok && segment.Protocol == unix.IPPROTO_TCP && segment.Flags&packet.SYN != 0 && !silent.Swap(true) || silent.Load()
	}}, patience)
	if err := s.guest.Do(func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		t.Cleanup(func() { unix.Close(fd) })
		if err := unix.Connect(fd, &unix.SockaddrInet4{Addr: [4]byte{10, 97, 0, 2}, Port: 7000}); !errors.Is(err, unix.EINPROGRESS) {
			return fmt.Errorf("connect: %w", err)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	for start := time.Now(); !silent.Load(); time.Sleep(time.Millisecond) {
		if time.Since(start) > patience {
			t.Fatal("no SYN was sent")
		}
	}
	start := time.Now()
	s.stop()
	if took := time.Since(start); took > patience/2 {
		t.Errorf("took %v", took)
	}
}

// TestStopInTheMiddle checks that a connection that the guest has not closed ends with a RST and not with a FIN.
func TestStopInTheMiddle(t *testing.T) {
	s := newSite(t, 65520, lab.LinkOptions{Delay: time.Millisecond}, 0)
	got := make(chan error, 1)
	s.listen(s.far, 7000, func(c *net.TCPConn) {
		defer c.Close()
		_, err := io.Copy(io.Discard, c)
		got <- err
	})
	c, err := dialIn(s.guest, "10.97.0.2:7000")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Write(make([]byte, 1000)); err != nil {
		t.Fatal(err)
	}
	s.stop()
	if err := <-got; !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("peer reads %v", err)
	}
}
