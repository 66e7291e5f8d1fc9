// SPDX-License-Identifier: Apache-2.0

package sockdiag_test

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/netns"
	"sockeye/internal/sockdiag"
	"sockeye/internal/testenv"
	"sockeye/room"
)

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func open(t testing.TB) *sockdiag.Conn {
	t.Helper()
	c, err := sockdiag.Open()
	check(t, err)
	t.Cleanup(func() { c.Close() })
	return c
}

// dump returns all sockets, by cookie.
func dump(t testing.TB, c *sockdiag.Conn, q sockdiag.Query) map[uint64]sockdiag.Socket {
	t.Helper()
	var all map[uint64]sockdiag.Socket
	check(t, c.Dump(q, func() { all = make(map[uint64]sockdiag.Socket) }, func(s *sockdiag.Socket) { all[s.Cookie] = *s }))
	return all
}

// TestDump checks that sock_diag reports the same values of a socket as its owner gets by getsockopt(2).
func TestDump(t *testing.T) {
	c := open(t)
	mount, below := filepath.Dir(testenv.Cgroup()), testenv.CgroupPath()
	cgroups, err := sockdiag.ReadCgroups(mount, mount)
	check(t, err)
	for _, test := range []struct{ listen, dial string }{
		{"127.0.0.1:0", "127.0.0.1"}, {"[::1]:0", "::1"}, {"[::]:0", "127.0.0.1"},
	} {
		l := testenv.Listen(t, test.listen)
		port := l.Addr().(*net.TCPAddr).AddrPort().Port()
		from, to := testenv.Connect(t, l, netip.AddrPortFrom(netip.MustParseAddr(test.dial), port).String())
		check(t, from.SetWriteDeadline(time.Now().Add(200*time.Millisecond)))
		for {
			if _, err := from.Write(make([]byte, 9001)); err != nil {
				break
			}
		}
		// TCP may probe the closed window in between, so the socket must be the same before and after the dump.
		var want room.Snapshot
		var all map[uint64]sockdiag.Socket
		for attempt := 0; ; attempt++ {
			want, err = room.ReadSnapshotConn(from)
			check(t, err)
			all = dump(t, c, sockdiag.Query{States: sockdiag.AllStates})
			after, err := room.ReadSnapshotConn(from)
			check(t, err)
			if want == after {
				break
			}
			if attempt == 100 {
				t.Fatalf("%s: the socket changes all the time", test.listen)
			}
		}
		s, ok := all[testenv.Cookie(t, from)]
		if !ok {
			t.Fatalf("%s: socket not found", test.listen)
		}
		if got := s.Snapshot(c.Settings); got != want || want.Queued == 0 || want.Payload == 0 {
			t.Errorf("%s: got %+v, want %+v", test.listen, got, want)
		}
		if s.Local != from.LocalAddr().(*net.TCPAddr).AddrPort() || s.Remote.Port() != port || s.State != sockdiag.Established ||
			s.Congestion == "" || cgroups[s.Cgroup] != below || s.Inode == 0 || s.UID != uint32(os.Getuid()) {
			t.Errorf("%+v, cgroup %q", s, cgroups[s.Cgroup])
		}
		if other := all[testenv.Cookie(t, to)]; other.Remote != s.Local || other.Local != s.Remote || other.Unread == 0 {
			t.Errorf("other end: %+v", other)
		}
		for name, q := range map[string]sockdiag.Query{
			"local port":  {States: sockdiag.Connected, LocalPort: s.Local.Port()},
			"remote port": {States: sockdiag.Connected, RemotePort: s.Local.Port()},
			"listening":   {States: sockdiag.States(0).With(sockdiag.Listening)},
		} {
			var got []sockdiag.Socket
			for _, s := range dump(t, c, q) {
				got = append(got, s)
			}
			switch {
			case name == "listening":
				for _, s := range got {
					if s.State != sockdiag.Listening || s.Payload == 0 || !s.Snapshot(c.Settings).Closed {
						t.Errorf("%s: %+v", name, s)
					}
				}
			case len(got) != 1 || got[0].State != sockdiag.Established || (got[0].Cookie == s.Cookie) != (name == "local port"):
				t.Errorf("%s: %+v", name, got)
			}
		}
		other := all[testenv.Cookie(t, to)]
		for _, end := range []sockdiag.Socket{s, other} {
			one, err := c.Get(&end)
			if err != nil || one == nil || one.Local != end.Local || one.Remote != end.Remote || one.Cookie != end.Cookie || one.Info.Snd_mss == 0 || one.Inode != end.Inode {
				t.Errorf("%+v: %+v, %v", end, one, err)
			}
			if found, err := c.Find(end.Local, end.Remote, 1); err != nil || found == nil || found.Cookie != end.Cookie {
				t.Errorf("%s to %s: %+v, %v", end.Local, end.Remote, found, err)
			}
		}
		later := s
		later.Cookie++
		none := s
		none.Local = netip.AddrPortFrom(s.Local.Addr(), 1)
		for _, ended := range []sockdiag.Socket{later, none} {
			if one, err := c.Get(&ended); one != nil || err != nil {
				t.Errorf("%+v: %+v, %v", ended, one, err)
			}
		}
		if found, err := c.Find(none.Local, none.Remote, 1); found != nil || err != nil {
			t.Errorf("%s to %s: %+v, %v", none.Local, none.Remote, found, err)
		}
		from.Close()
		to.Close()
	}
}

// TestProcesses checks that the process of a socket is found, and that the options that sock_diag does not report are
// read from its descriptor.
func TestProcesses(t *testing.T) {
	l := testenv.Listen(t, "127.0.0.1:0")
	from, to := testenv.Connect(t, l, l.Addr().String())
	check(t, from.SetWriteBuffer(100000))
	all := dump(t, open(t), sockdiag.Query{States: sockdiag.Connected})
	for _, c := range []*net.TCPConn{from, to} {
		s := all[testenv.Cookie(t, c)]
		found, _, err := sockdiag.ReadProcesses(func(inode uint32) bool { return inode == s.Inode })
		check(t, err)
		if len(found) != 1 || len(found[s.Inode]) != 1 || found[s.Inode][0].PID != os.Getpid() || found[s.Inode][0].Command == "" {
			t.Fatalf("%+v", found)
		}
		asked, err := found[s.Inode][0].Ask(s.Cookie)
		check(t, err)
		if asked.Fixed != (c == from) {
			t.Errorf("%+v", asked)
		}
		if _, err := found[s.Inode][0].Ask(s.Cookie + 1); err == nil {
			t.Error("Ask accepts another socket")
		}
	}
}

// TestMany checks that a dump of five thousand sockets needs no more memory than a dump of a few.
func TestMany(t *testing.T) {
	const connections = 2500
	l := testenv.Listen(t, "127.0.0.1:0")
	for range connections {
		testenv.Connect(t, l, l.Addr().String())
	}
	c := open(t)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	start, n := time.Now(), 0
	check(t, c.Dump(sockdiag.Query{States: sockdiag.Connected}, func() { n = 0 }, func(*sockdiag.Socket) { n++ }))
	took := time.Since(start)
	runtime.ReadMemStats(&after)
	if n != 2*connections {
		t.Errorf("%d sockets", n)
	}
	if took > 2*time.Second {
		t.Errorf("dump took %v", took)
	}
	if bytes := after.TotalAlloc - before.TotalAlloc; bytes > 1<<20 {
		t.Errorf("%d bytes were allocated", bytes)
	}
	all := dump(t, c, sockdiag.Query{States: sockdiag.Connected, WithoutInfo: true})
	start = time.Now()
	for _, s := range all {
		if one, err := c.Get(&s); err != nil || one == nil {
			t.Fatalf("%+v: %+v, %v", s, one, err)
		}
	}
	t.Logf("%v for %d sockets, %d bytes; %v one by one", took, n, after.TotalAlloc-before.TotalAlloc, time.Since(start))
}

// TestVanishing checks that sockets that are opened and closed during a dump do not hide permanent ones.
func TestVanishing(t *testing.T) {
	l := testenv.Listen(t, "127.0.0.1:0")
	var stay []uint64
	for range 20 {
		from, to := testenv.Connect(t, l, l.Addr().String())
		stay = append(stay, testenv.Cookie(t, from), testenv.Cookie(t, to))
	}
	busy := testenv.Listen(t, "127.0.0.1:0")
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	var made atomic.Int32
	go func() {
		defer close(done)
		var d net.Dialer
		d.SetMultipathTCP(false)
		for ctx.Err() == nil {
			c, err := d.DialContext(ctx, "tcp", busy.Addr().String())
			if err != nil {
				continue
			}
			if a, err := busy.AcceptTCP(); err == nil {
				_ = a.SetLinger(0) // avoids TIME_WAIT
				a.Close()
			}
			c.Close()
			made.Add(1)
		}
	}()
	c := open(t)
	for end := time.Now().Add(30 * time.Second); made.Load() < 500 && time.Now().Before(end); {
		all := dump(t, c, sockdiag.Query{States: sockdiag.AllStates})
		for _, cookie := range stay {
			if _, ok := all[cookie]; !ok {
				t.Fatal("an open socket was not found")
			}
		}
	}
	cancel()
	<-done
	if made.Load() < 500 {
		t.Errorf("only %d connections were opened and closed", made.Load())
	}
}

// TestNamespaces checks that a Conn returns the sockets of the namespace in which it was opened.
func TestNamespaces(t *testing.T) {
	l := testenv.Listen(t, "127.0.0.1:0")
	testenv.Connect(t, l, l.Addr().String())
	check(t, netns.Thread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return err
		}
		c, err := sockdiag.Open()
		if err != nil {
			return err
		}
		defer c.Close()
		if c.Settings.WriteMemory[2] == 0 || c.Settings.NotSentLowat == 0 {
			t.Errorf("settings %+v", c.Settings)
		}
		return c.Dump(sockdiag.Query{States: sockdiag.AllStates}, func() {}, func(s *sockdiag.Socket) { t.Errorf("%+v", s) })
	}))
}

func TestStates(t *testing.T) {
	for _, name := range sockdiag.StateNames() {
		if s := sockdiag.StateOf(name); s.String() != name || !sockdiag.AllStates.Has(s) {
			t.Errorf("%s is %v", name, s)
		}
	}
	if sockdiag.StateOf("") != 0 || sockdiag.StateOf("estab") != 0 || !strings.Contains(sockdiag.State(77).String(), "77") {
		t.Error("sockets of another namespace were returned")
	}
}

// TestNoCgroups checks that a missing cgroup is an error, and that a cgroup removed during the call is not.
func TestNoCgroups(t *testing.T) {
	deep := t.TempDir()
	testenv.DeepDirectory(t, deep, func(int) error { return nil })
	if all, err := sockdiag.ReadCgroups(deep, deep); err != nil || len(all) < 15 {
		t.Errorf("%d cgroups with paths that are too long: %v", len(all), err)
	}
	if _, err := sockdiag.ReadCgroups("/nowhere", "/nowhere"); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
}

// TestDatagrams checks that a dump of UDP sockets has what waits and what was dropped at a socket.
func TestDatagrams(t *testing.T) {
	c := open(t)
	receiver, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.MustParseAddrPort("[::1]:0")))
	check(t, err)
	defer receiver.Close()
	check(t, receiver.SetReadBuffer(1))
	sender, err := net.DialUDP("udp", nil, receiver.LocalAddr().(*net.UDPAddr))
	check(t, err)
	defer sender.Close()
	const sent = 50
	for range sent {
		_, err := sender.Write(make([]byte, 1000))
		check(t, err)
	}
	at := receiver.LocalAddr().(*net.UDPAddr).AddrPort()
	query := sockdiag.Query{Protocol: unix.IPPROTO_UDP, States: sockdiag.States(0).With(sockdiag.Closed), LocalPort: at.Port()}
	all := dump(t, c, query)
	if len(all) != 1 {
		t.Fatalf("sockets %+v", all)
	}
	for _, s := range all {
		if s.Local != at || !s.HasMemory || s.ReceiveQueued < 1000 || s.ReceiveBuffer == 0 || s.Dropped == 0 || s.Dropped >= sent {
			t.Errorf("%+v", s)
		}
		received := make([]byte, 2000)
		count := 0
		for {
			check(t, receiver.SetReadDeadline(time.Now().Add(100*time.Millisecond)))
			if _, err := receiver.Read(received); err != nil {
				break
			}
			count++
		}
		if count+int(s.Dropped) != sent {
			t.Errorf("%d received and %d dropped, want %d together", count, s.Dropped, sent)
		}
	}
	for _, s := range dump(t, c, query) {
		if s.ReceiveQueued != 0 {
			t.Errorf("%d bytes after all were read", s.ReceiveQueued)
		}
	}
}

// TestZeroWindow checks that only the end that does not read has a closed window, and has it until the end reads.
func TestZeroWindow(t *testing.T) {
	c := open(t)
	l := testenv.Listen(t, "127.0.0.1:0")
	from, to := testenv.Connect(t, l, l.Addr().String())
	states := func() (sender, reader bool) {
		all := dump(t, c, sockdiag.Query{States: sockdiag.Connected})
		return all[testenv.Cookie(t, from)].ZeroWindow, all[testenv.Cookie(t, to)].ZeroWindow
	}
	if sender, reader := states(); sender || reader {
		t.Fatalf("at first: %v, %v", sender, reader)
	}
	check(t, from.SetWriteDeadline(time.Now().Add(time.Minute)))
	written := make(chan error, 1)
	go func() {
		_, err := from.Write(make([]byte, 32<<20))
		written <- err
	}()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		sender, reader := states()
		if sender {
			t.Fatal("the window of the sender is closed")
		}
		if reader {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the window stays open")
		}
	}
	_, err := io.CopyN(io.Discard, to, 32<<20)
	check(t, errors.Join(err, <-written))
	if sender, reader := states(); sender || reader {
		t.Errorf("after all was read: %v, %v", sender, reader)
	}
}

// TestLockedSocket checks that a dump without TCP_INFO does not wait for the lock of a socket, which the owner of the socket can hold for
// as long as it wants.
func TestLockedSocket(t *testing.T) {
	client, _ := testenv.TCPPair(t, "127.0.0.1", "127.0.0.1")
	raw, err := client.SyscallConn()
	check(t, err)
	var release func()
	check(t, raw.Control(func(fd uintptr) { release = testenv.HoldLock(t, int(fd)) }))
	query := sockdiag.Query{States: sockdiag.Connected, LocalPort: client.LocalAddr().(*net.TCPAddr).AddrPort().Port()}
	without := query
	without.WithoutInfo = true
	found := dump(t, open(t), without)
	if len(found) != 1 {
		t.Errorf("%d sockets", len(found))
	}
	for _, s := range found {
		if s.HasInfo || s.State != sockdiag.Established {
			t.Errorf("%+v", s)
		}
	}
	waits := make(chan error, 1)
	go func() {
		c, err := sockdiag.Open()
		if err == nil {
			err = c.Dump(query, func() {}, func(*sockdiag.Socket) {})
			c.Close()
		}
		waits <- err
	}()
	select {
	case err := <-waits:
		t.Fatalf("a dump with TCP_INFO did not wait: %v", err)
	case <-time.After(200 * time.Millisecond):
	}
	release()
	check(t, <-waits)
}
