// SPDX-License-Identifier: Apache-2.0

package procsock_test

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"sockeye/internal/config"
	"sockeye/internal/procsock"
	"sockeye/internal/sockaddr"
	"sockeye/internal/testenv"
)

// visited returns the sockets of the tests' cgroup, by cookie.
func visited(t testing.TB) map[uint64]procsock.Socket {
	t.Helper()
	all := make(map[uint64]procsock.Socket)
	problems, err := procsock.Walk(testenv.Cgroup(), func(s *procsock.Socket) error {
		if got := cookie(t, s.FD); got != s.Cookie {
			t.Errorf("the descriptor of %v refers to socket %#x, want %#x", s, got, s.Cookie)
		}
		if _, ok := all[s.Cookie]; ok {
			t.Errorf("%v is visited twice", s)
		}
		all[s.Cookie] = *s
		return nil
	})
	if err != nil || len(problems) > 0 {
		t.Fatalf("%v, problems %v", err, problems)
	}
	return all
}

func TestWalk(t *testing.T) {
	had := descriptors(t)
	self := os.Getpid()
	type want struct {
		family int
		role   config.Role
	}
	wanted := make(map[uint64]want)
	listening := make(map[uint64]netip.AddrPort)
	ends := make(map[uint64]*net.TCPConn)
	for _, c := range []struct {
		listener, to string
		family       int // family of the accepted socket
	}{
		{"127.0.0.1:0", "127.0.0.1", unix.AF_INET},
		{"[::1]:0", "[::1]", unix.AF_INET6},
		{"[::]:0", "127.0.0.1", unix.AF_INET6},
	} {
		l := testenv.Listen(t, c.listener)
		_, port, _ := net.SplitHostPort(l.Addr().String())
		p := connectTo(t, l, c.to+":"+port)
		listening[testenv.Cookie(t, l)] = addrPort(l.Addr())
		family := unix.AF_INET
		if strings.HasPrefix(c.to, "[") {
			family = unix.AF_INET6
		}
		for _, e := range []struct {
			c *net.TCPConn
			want
		}{{p.connected, want{family, config.RoleConnect}}, {p.accepted, want{c.family, config.RoleAccept}}} {
			id := testenv.Cookie(t, e.c)
			wanted[id], ends[id] = e.want, e.c
		}
	}
	child := testenv.StartServer(t, testenv.Subgroup(t, "child"), "127.0.0.1:0", 0)
	c, err := net.Dial("tcp", child.Address)
	check(t, err)
	defer c.Close()

	// A process that has a different descriptor number for a socket of this process.
	var files []*os.File
	for _, end := range ends {
		f, err := end.File()
		check(t, err)
		defer f.Close()
		files = append(files, f)
	}
	shared := testenv.StartServer(t, testenv.Cgroup(), "127.0.0.1:0", 0, files...)

	unused, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	check(t, err)
	defer unix.Close(unused)
	udp, err := net.ListenPacket("udp", "127.0.0.1:0")
	check(t, err)
	defer udp.Close()

	open := descriptors(t)
	// The server accepts asynchronously.
	var accepted *procsock.Socket
	testenv.Within(t, "the child accepts", func() bool {
		for _, s := range visited(t) {
			if s.PID == child.Process.Pid && !s.Listening {
				accepted = &s
			}
		}
		return accepted != nil
	})
	if got := descriptors(t); got != open || open <= had {
		t.Errorf("%d open descriptors, want %d", got, open)
	}
	if accepted.Role != config.RoleAccept || accepted.Local.String() != child.Address || accepted.Remote != addrPort(c.LocalAddr()) ||
		!strings.Contains(accepted.Command, "-test.run=^TestServer$") {
		t.Errorf("connection of the child: %+v", accepted)
	}
	all := visited(t)
	if _, ok := all[cookie(t, unused)]; ok {
		t.Error("a socket that was never bound is visited")
	}
	for id, w := range wanted {
		s, ok := all[id]
		if !ok {
			t.Errorf("%v is not visited", ends[id].LocalAddr())
			continue
		}
		if s.Family != w.family || s.Role != w.role || s.Listening || s.MPTCP || s.State != unix.BPF_TCP_ESTABLISHED ||
			s.Local != addrPort(ends[id].LocalAddr()) || s.Remote != addrPort(ends[id].RemoteAddr()) {
			t.Errorf("%v -> %v is %+v, want %+v", ends[id].LocalAddr(), ends[id].RemoteAddr(), s, w)
		}
		if s.PID != self && s.PID != shared.Process.Pid {
			t.Errorf("%v belongs to pid %d", &s, s.PID)
		}
		taken, err := procsock.Take(s.PID, s.Number)
		if err != nil {
			t.Error(err)
			continue
		}
		if taken.Cookie != id || taken.FD == s.Number {
			t.Errorf("descriptor %d of pid %d refers to %v, want %v", s.Number, s.PID, taken, &s)
		}
		check(t, taken.Close())
	}
	for id, local := range listening {
		if s := all[id]; !s.Listening || s.Role != "" || s.Remote.IsValid() || s.Local != local {
			t.Errorf("listener %v: %+v", local, s)
		}
	}
	for _, s := range all {
		if name := (&s).String(); !strings.HasPrefix(name, s.Local.String()) || !strings.HasSuffix(name, fmt.Sprintf("(descriptor %d of pid %d)", s.Number, s.PID)) {
			t.Errorf("name of %+v: %s", s, name)
		}
	}
	t.Run("MPTCP", func(t *testing.T) { testMPTCP(t) })
}

func testMPTCP(t *testing.T) {
	var config net.ListenConfig
	config.SetMultipathTCP(true)
	l, err := config.Listen(t.Context(), "tcp", "127.0.0.1:0")
	check(t, err)
	defer l.Close()
	if protocol := protocolOf(t, l.(*net.TCPListener)); protocol != unix.IPPROTO_MPTCP {
		t.Skipf("kernel: no MPTCP: protocol %d", protocol)
	}
	var d net.Dialer
	d.SetMultipathTCP(true)
	c, err := d.DialContext(t.Context(), "tcp", l.Addr().String())
	check(t, err)
	defer c.Close()
	a, err := l.Accept()
	check(t, err)
	defer a.Close()
	all := visited(t)
	for name, end := range map[string]syscall.Conn{"listener": l.(*net.TCPListener), "connected": c.(*net.TCPConn), "accepted": a.(*net.TCPConn)} {
		s, ok := all[testenv.Cookie(t, end)]
		if !ok || !s.MPTCP || s.Listening != (name == "listener") {
			t.Errorf("%s: visited %v, %+v", name, ok, s)
		}
	}
	find := func(local, remote net.Addr) (list []procsock.Subflow, fellBack bool) {
		t.Helper()
		s, err := procsock.Find(testenv.Cgroup(), addrPort(local), addrPort(remote))
		check(t, err)
		defer s.Close()
		list, fellBack, err = s.Subflows()
		check(t, err)
		return list, fellBack
	}
	for _, end := range []net.Conn{c, a} {
		want := procsock.Subflow{Local: addrPort(end.LocalAddr()), Remote: addrPort(end.RemoteAddr())}
		if list, fellBack := find(end.LocalAddr(), end.RemoteAddr()); fellBack || !slices.Equal(list, []procsock.Subflow{want}) {
			t.Errorf("subflows %v, fell back %v, want %v", list, fellBack, want)
		}
	}
	plain, err := d.DialContext(t.Context(), "tcp", testenv.Listen(t, "[::]:0").Addr().String())
	check(t, err)
	defer plain.Close()
	want := procsock.Subflow{Local: addrPort(plain.LocalAddr()), Remote: addrPort(plain.RemoteAddr())}
	if list, fellBack := find(plain.LocalAddr(), plain.RemoteAddr()); !fellBack || !slices.Equal(list, []procsock.Subflow{want}) {
		t.Errorf("after a fallback: subflows %v, fell back %v, want %v", list, fellBack, want)
	}
}

// TestRoleByListener opens connections whose local port is that of a listener that cannot have accepted them.
func TestRoleByListener(t *testing.T) {
	other := testenv.Listen(t, "127.0.0.1:0")
	for _, c := range []struct {
		name     string
		listener string // with a port
		v6only   bool
		netns    uintptr
		role     config.Role
	}{
		{"another address", "127.0.0.2:%d", false, 0, config.RoleConnect},
		{"another family", "[::]:%d", true, 0, config.RoleConnect},
		{"another network namespace", "127.0.0.1:%d", false, unix.CLONE_NEWNET, config.RoleConnect},
		{"all addresses", "[::]:%d", false, 0, config.RoleAccept},
		{"all IPv4 addresses", "0.0.0.0:%d", false, 0, config.RoleAccept},
	} {
		t.Run(c.name, func(t *testing.T) {
			if _, err := unix.GetsockoptUint64(testenv.TCPSocket(t, unix.AF_INET), unix.SOL_SOCKET, unix.SO_NETNS_COOKIE); c.netns != 0 && errors.Is(err, unix.ENOPROTOOPT) {
				t.Skip("kernel: no SO_NETNS_COOKIE")
			}
			var fd int
			// Another socket may use the port.
			testenv.Within(t, "bind", func() bool {
				fd = testenv.TCPSocket(t, unix.AF_INET)
				check(t, unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1))
				check(t, unix.Bind(fd, sockaddr.Of(netip.MustParseAddrPort("127.0.0.1:0"))))
				at := fmt.Sprintf(c.listener, testenv.Port(t, fd))
				if c.netns != 0 {
					testenv.StartServer(t, testenv.Cgroup(), at, c.netns)
					return true
				}
				return listenToo(t, netip.MustParseAddrPort(at), c.v6only)
			})
			err := unix.Connect(fd, sockaddr.Of(addrPort(other.Addr())))
			for errors.Is(err, unix.EINTR) {
				err = unix.Connect(fd, sockaddr.Of(addrPort(other.Addr())))
			}
			check(t, err)
			a, err := other.AcceptTCP()
			check(t, err)
			defer a.Close()
			if s := visited(t)[cookie(t, fd)]; s.Role != c.role {
				t.Errorf("role %q, want %q", s.Role, c.role)
			}
		})
	}
}

// listenToo listens on a port to which another socket of this test is bound. It returns false if another process uses
// the address.
func listenToo(t testing.TB, at netip.AddrPort, v6only bool) bool {
	t.Helper()
	domain := unix.AF_INET
	if at.Addr().Is6() {
		domain = unix.AF_INET6
	}
	l := testenv.TCPSocket(t, domain)
	check(t, unix.SetsockoptInt(l, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1))
	if v6only {
		check(t, unix.SetsockoptInt(l, unix.SOL_IPV6, unix.IPV6_V6ONLY, 1))
	}
	if err := unix.Bind(l, sockaddr.Of(at)); errors.Is(err, unix.EADDRINUSE) {
		return false
	} else if err != nil {
		t.Fatal(os.NewSyscallError("bind", err))
	}
	check(t, unix.Listen(l, 1))
	return true
}

func TestWalkEndsWithAnError(t *testing.T) {
	l := testenv.Listen(t, "127.0.0.1:0")
	connect(t, l)
	had, stop, visits := descriptors(t), errors.New("stop"), 0
	_, err := procsock.Walk(testenv.Cgroup(), func(*procsock.Socket) error {
		visits++
		return stop
	})
	if !errors.Is(err, stop) || visits != 1 {
		t.Errorf("%v after %d visits, want %v after 1", err, visits, stop)
	}
	if _, err := procsock.Walk(filepath.Join(testenv.Cgroup(), "none"), nil); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("missing cgroup: %v, want %v", err, fs.ErrNotExist)
	}
	if got := descriptors(t); got != had {
		t.Errorf("%d open descriptors, want %d", got, had)
	}
}

func TestFind(t *testing.T) {
	l := testenv.Listen(t, "[::]:0")
	_, port, _ := net.SplitHostPort(l.Addr().String())
	p := connectTo(t, l, "127.0.0.1:"+port)
	had := descriptors(t)
	for end, c := range map[config.Role]*net.TCPConn{config.RoleConnect: p.connected, config.RoleAccept: p.accepted} {
		local, remote := addrPort(c.LocalAddr()), addrPort(c.RemoteAddr())
		mapped := netip.AddrPortFrom(netip.AddrFrom16(local.Addr().As16()), local.Port())
		for _, local := range []netip.AddrPort{local, mapped} {
			s, err := procsock.Find(testenv.Cgroup(), local, remote)
			if err != nil {
				t.Fatal(err)
			}
			if s.Cookie != testenv.Cookie(t, c) || cookie(t, s.FD) != s.Cookie || s.Role != end {
				t.Errorf("%v -> %v is %+v", local, remote, s)
			}
			check(t, s.Close())
		}
	}
	local := addrPort(l.Addr())
	if s, err := procsock.Find(testenv.Cgroup(), local, netip.AddrPort{}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("Find returns a listener: %v, %v", s, err)
	}
	nobody := netip.MustParseAddrPort("192.0.2.1:80")
	if s, err := procsock.Find(testenv.Cgroup(), local, nobody); !errors.Is(err, fs.ErrNotExist) || strings.Contains(err.Error(), "\n") {
		t.Errorf("%v, %v, want %v on one line", s, err, fs.ErrNotExist)
	}
	if got := descriptors(t); got != had {
		t.Errorf("%d open descriptors, want %d", got, had)
	}
}

func TestTakeRefuses(t *testing.T) {
	udp, err := net.ListenPacket("udp", "127.0.0.1:0")
	check(t, err)
	defer udp.Close()
	raw, err := udp.(*net.UDPConn).SyscallConn()
	check(t, err)
	had := descriptors(t)
	check(t, raw.Control(func(fd uintptr) {
		if s, err := procsock.Take(os.Getpid(), int(fd)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("UDP socket: %v, %v", s, err)
		}
	}))
	if s, err := procsock.Take(os.Getpid(), 9999); !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), "descriptor 9999 of process") {
		t.Errorf("closed descriptor: %v, %v", s, err)
	}
	if s, err := procsock.Take(1<<22, 0); err == nil {
		t.Errorf("missing process: %v", s)
	}
	if got := descriptors(t); got != had {
		t.Errorf("%d open descriptors, want %d", got, had)
	}
}

// TestWalkWithoutRights checks that Walk visits the sockets of processes that it may trace, and reports the others.
func TestWalkWithoutRights(t *testing.T) {
	l := testenv.Listen(t, "127.0.0.1:0")
	child := testenv.StartServer(t, testenv.Cgroup(), "127.0.0.1:0", 0)
	had, mine := descriptors(t), testenv.Cookie(t, l)
	testenv.WithoutRights(t, func() {
		found := false
		problems, err := procsock.Walk(testenv.Cgroup(), func(s *procsock.Socket) error {
			found = found || s.Cookie == mine
			return nil
		})
		if err != nil || !found {
			t.Errorf("%v, own listener visited: %v", err, found)
		}
		if len(problems) != 1 || !errors.Is(problems[0], fs.ErrPermission) || !strings.Contains(problems[0].Error(), fmt.Sprintf("pid %d", child.Process.Pid)) {
			t.Errorf("problems %v, want one of pid %d", problems, child.Process.Pid)
		}
		_, err = procsock.Find(testenv.Cgroup(), addrPort(l.Addr()), addrPort(l.Addr()))
		if !errors.Is(err, fs.ErrPermission) || !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("connection that may belong to the child: %v", err)
		}
	})
	if got := descriptors(t); got != had {
		t.Errorf("%d open descriptors, want %d", got, had)
	}
}

// TestWalkOfProcessesThatEnd visits sockets while their processes are killed.
func TestWalkOfProcessesThatEnd(t *testing.T) {
	had := descriptors(t)
	for range killings {
		func() {
			killed := make(chan struct{})
			var servers []*testenv.Server
			for range 3 {
				s := testenv.StartServer(t, testenv.Cgroup(), "127.0.0.1:0", 0)
				for range 20 {
					c, err := net.Dial("tcp", s.Address)
					check(t, err)
					defer c.Close()
				}
				servers = append(servers, s)
			}
			first := true
			for ended := false; !ended; {
				select {
				case <-killed:
					ended = true
				default:
				}
				problems, err := procsock.Walk(testenv.Cgroup(), func(s *procsock.Socket) error {
					if first && s.PID == servers[0].Process.Pid {
						first = false
						go func() {
							defer close(killed)
							for _, s := range servers {
								s.Kill()
							}
						}()
					}
					return nil
				})
				if err != nil || len(problems) > 0 {
					t.Fatalf("%v, problems %v", err, problems)
				}
			}
			for _, s := range servers {
				s.Stop.Close()
			}
		}()
	}
	if got := descriptors(t); got != had {
		t.Errorf("%d open descriptors, want %d", got, had)
	}
}
