// SPDX-License-Identifier: Apache-2.0

package packets_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/cilium/ebpf/rlimit"
	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/trace/packets"
	"sockeye/lab"
)

func TestMain(m *testing.M) {
	// Kernels before 5.11 charge maps to RLIMIT_MEMLOCK.
	if err := rlimit.RemoveMemlock(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

var (
	linkA = []netip.Prefix{netip.MustParsePrefix("10.91.0.1/24"), netip.MustParsePrefix("fd91::1/64")}
	linkB = []netip.Prefix{netip.MustParsePrefix("10.91.0.2/24"), netip.MustParsePrefix("fd91::2/64")}
)

// world is two namespaces and the link between them.
type world struct {
	*lab.Link
	a, b *lab.Namespace
	ctx  context.Context
}

func newWorld(t testing.TB, o lab.LinkOptions) *world {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	l, err := lab.New(ctx, lab.Options{Dir: t.TempDir()})
	check(t, err)
	t.Cleanup(func() { check(t, l.Close()) })
	w := &world{ctx: ctx}
	for name, n := range map[string]**lab.Namespace{"a": &w.a, "b": &w.b} {
		*n, err = l.Namespace(name)
		check(t, err)
	}
	w.Link, err = l.Connect(w.a, w.b, o, linkA, linkB)
	check(t, err)
	return w
}

// pair is a connection from a to b.
func (w *world) pair(t testing.TB, to netip.Addr) (client, server *net.TCPConn) {
	t.Helper()
	listen := net.ListenConfig{}
	listen.SetMultipathTCP(false)
	var l net.Listener
	check(t, w.b.Do(func() (err error) {
		l, err = listen.Listen(w.ctx, "tcp", netip.AddrPortFrom(to, 0).String())
		return err
	}))
	defer l.Close()
	dial := net.Dialer{}
	dial.SetMultipathTCP(false)
	var c net.Conn
	check(t, w.a.Do(func() (err error) {
		c, err = dial.DialContext(w.ctx, "tcp", l.Addr().String())
		return err
	}))
	s, err := l.Accept()
	check(t, err)
	t.Cleanup(func() { c.Close(); s.Close() })
	return c.(*net.TCPConn), s.(*net.TCPConn)
}

func cookieOf(t testing.TB, c *net.TCPConn) (cookie uint64) {
	t.Helper()
	raw, err := c.SyscallConn()
	check(t, err)
	check(t, raw.Control(func(fd uintptr) {
		cookie, err = unix.GetsockoptUint64(int(fd), unix.SOL_SOCKET, unix.SO_COOKIE)
	}))
	check(t, err)
	return cookie
}

// capture follows a connection while f runs, and to its end.
func capture(t testing.TB, c *net.TCPConn, f func() error) ([]*packets.Packet, *packets.Summary) {
	t.Helper()
	p, err := bpf.OpenPackets(cookieOf(t, c), 8<<20)
	if err != nil {
		t.Fatalf("%+v", err)
	}
	defer func() { check(t, p.Close()) }()
	done := make(chan error, 1)
	go func() { done <- f() }()
	var all []*packets.Packet
	summary, err := packets.Capture(t.Context(), p, packets.Options{Deadline: time.Now().Add(30 * time.Second)}, func(p *packets.Packet) error {
		all = append(all, p)
		return nil
	})
	check(t, errors.Join(err, <-done))
	if summary.LostEvents != 0 {
		t.Errorf("%d events were lost", summary.LostEvents)
	}
	return all, summary
}

func TestLook(t *testing.T) {
	w := newWorld(t, lab.LinkOptions{Delay: 20 * time.Millisecond, Loss: 0.03, Seed: 3})
	client, server := w.pair(t, linkB[0].Addr())
	all, s := capture(t, client, func() error {
		go io.Copy(io.Discard, server)
		client.Write(make([]byte, 200_000))
		client.Close()
		time.Sleep(time.Second)
		return server.Close()
	})
	for _, p := range all {
		fmt.Println(p.Number, p.Time.Format("05.000000"), p.Interface, p.Seq, p.Ack, p.Length, p.Size, p.Flags, p.Window, "|", p.Comment())
	}
	fmt.Printf("%+v\n%+v\n", s, w.Counts())
}
