// SPDX-License-Identifier: Apache-2.0

package member

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"sockeye/internal/testenv"
)

func TestHandle(t *testing.T) {
	c := start(t, "sleep", nil, nil)
	h, err := Open(c.pid())
	check(t, err)
	defer h.Close()
	if h.Ended() {
		t.Error("a running process has ended")
	}
	waiting := make(chan error, 1)
	go func() { waiting <- h.Wait() }()
	check(t, h.Kill())
	check(t, within(t, "Wait", func() error { return <-waiting }))
	if !h.Ended() {
		t.Error("a killed process has not ended")
	}
	c.Wait()
	// The process has exited, and its id may be reused.
	if !h.Ended() {
		t.Error("a process that was waited for has not ended")
	}
	check(t, within(t, "Wait again", h.Wait))
	if err := h.Kill(); err == nil {
		t.Error("a process that has ended was killed")
	}
	if sockets, err := h.Sockets(all); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("its sockets: %v, %v", sockets, err)
	}

	c = start(t, "sleep", nil, nil)
	h, err = Open(c.pid())
	check(t, err)
	go func() { waiting <- h.Wait() }()
	check(t, h.Close())
	if err := within(t, "Wait", func() error { return <-waiting }); err == nil {
		t.Error("Wait says that a process has ended whose handle was closed")
	}
}

func all(*Socket) bool { return true }

// opened is a socket of the child, or the error.
type opened struct {
	FD     int
	Cookie uint64
	Error  string
}

// openSockets opens the kinds of sockets that members have, and others.
func openSockets() (any, error) {
	result := make(map[string]opened)
	for _, s := range []struct {
		name, address         string
		domain, kind, proto   int
		reuseport, v6only     bool
		bind, listen, connect bool
	}{
		{name: "udp", address: "127.0.0.1:4739", domain: unix.AF_INET, kind: unix.SOCK_DGRAM, bind: true},
		{name: "udp6", address: "[::]:4740", domain: unix.AF_INET6, kind: unix.SOCK_DGRAM | unix.SOCK_NONBLOCK, bind: true, reuseport: true},
		{name: "udp6only", address: "[::]:4741", domain: unix.AF_INET6, kind: unix.SOCK_DGRAM, bind: true, v6only: true},
		{name: "udp connected", address: "127.0.0.1:4742", domain: unix.AF_INET, kind: unix.SOCK_DGRAM, bind: true, connect: true},
		{name: "udp unbound", domain: unix.AF_INET, kind: unix.SOCK_DGRAM},
		{name: "tcp", address: "[::1]:1790", domain: unix.AF_INET6, kind: unix.SOCK_STREAM, bind: true, listen: true, reuseport: true},
		{name: "tcp nonblocking", address: "127.0.0.1:1791", domain: unix.AF_INET, kind: unix.SOCK_STREAM | unix.SOCK_NONBLOCK, bind: true, listen: true},
		{name: "tcp bound", address: "0.0.0.0:1792", domain: unix.AF_INET, kind: unix.SOCK_STREAM, bind: true},
		{name: "tcp unbound", domain: unix.AF_INET, kind: unix.SOCK_STREAM},
		{name: "mptcp", address: "127.0.0.1:1793", domain: unix.AF_INET, kind: unix.SOCK_STREAM, proto: unix.IPPROTO_MPTCP, bind: true, listen: true},
		{name: "raw", domain: unix.AF_INET, kind: unix.SOCK_RAW, proto: unix.IPPROTO_ICMP},
		{name: "unix", domain: unix.AF_UNIX, kind: unix.SOCK_STREAM},
		{name: "netlink", domain: unix.AF_NETLINK, kind: unix.SOCK_RAW},
	} {
		fd, err := unix.Socket(s.domain, s.kind, s.proto)
		if err != nil {
			if s.proto != unix.IPPROTO_MPTCP {
				return nil, fmt.Errorf("%s: %w", s.name, err)
			}
			result[s.name] = opened{Error: err.Error()}
			continue
		}
		var errs []error
		if s.reuseport {
			errs = append(errs, unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1))
		}
		if s.v6only {
			errs = append(errs, unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1))
		}
		if s.bind {
			a := netip.MustParseAddrPort(s.address)
			var sa unix.Sockaddr = &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
			if a.Addr().Is4() {
				sa = &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
			}
			errs = append(errs, unix.Bind(fd, sa))
			if s.connect {
				errs = append(errs, unix.Connect(fd, &unix.SockaddrInet4{Port: 9, Addr: [4]byte{127, 0, 0, 1}}))
			}
		}
		if s.listen {
			errs = append(errs, unix.Listen(fd, 1))
		}
		cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_COOKIE)
		if err := errors.Join(append(errs, err)...); err != nil {
			return nil, fmt.Errorf("%s: %w", s.name, err)
		}
		result[s.name] = opened{FD: fd, Cookie: cookie}
	}
	// The same socket twice.
	if _, err := unix.Dup(result["udp"].FD); err != nil {
		return nil, err
	}
	return result, nil
}

// flags returns the status flags of all descriptors of a process.
func flags(t testing.TB, pid int) map[string]string {
	t.Helper()
	dir := fmt.Sprintf("/proc/%d/fdinfo", pid)
	entries, err := os.ReadDir(dir)
	check(t, err)
	all := make(map[string]string)
	for _, e := range entries {
		text, err := os.ReadFile(dir + "/" + e.Name())
		check(t, err)
		for line := range strings.Lines(string(text)) {
			if value, ok := strings.CutPrefix(line, "flags:"); ok {
				all[e.Name()] = strings.TrimSpace(value)
			}
		}
	}
	return all
}

func descriptors(t testing.TB) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	check(t, err)
	return len(entries)
}

// TestManySockets checks that a process with thousands of sockets on a port does not take the descriptors of the agent.
func TestManySockets(t *testing.T) {
	var sockets []int
	defer func() {
		for _, fd := range sockets {
			check(t, unix.Close(fd))
		}
	}()
	for range 600 {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		check(t, err)
		sockets = append(sockets, fd)
		check(t, unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1))
		check(t, unix.Bind(fd, &unix.SockaddrInet4{Port: 4799, Addr: [4]byte{127, 0, 0, 1}}))
	}
	h, err := Open(os.Getpid())
	check(t, err)
	defer h.Close()
	had := descriptors(t)
	copies, err := h.Sockets(func(s *Socket) bool { return s.Local.Port() == 4799 })
	if err != nil || len(copies) != 512 {
		t.Errorf("%d sockets, %v", len(copies), err)
	}
	CloseAll(copies)
	if now := descriptors(t); now != had {
		t.Errorf("%d descriptors, had %d", now, had)
	}
}

func TestSockets(t *testing.T) {
	var there map[string]opened
	c := start(t, "sockets", &there, nil)
	before, had := flags(t, c.pid()), descriptors(t)
	if len(before) < len(there) {
		t.Fatalf("only %d descriptors: %v", len(before), before)
	}
	h, err := Open(c.pid())
	check(t, err)
	sockets, err := h.Sockets(all)
	check(t, err)

	want := map[string]Socket{
		"udp":             {Protocol: unix.IPPROTO_UDP, Local: netip.MustParseAddrPort("127.0.0.1:4739"), Listening: true},
		"udp6":            {Protocol: unix.IPPROTO_UDP, Local: netip.MustParseAddrPort("[::]:4740"), Listening: true, ReusePort: true},
		"udp6only":        {Protocol: unix.IPPROTO_UDP, Local: netip.MustParseAddrPort("[::]:4741"), Listening: true, V6Only: true, IPv6Alone: true},
		"udp connected":   {Protocol: unix.IPPROTO_UDP, Local: netip.MustParseAddrPort("127.0.0.1:4742"), Listening: true, Connected: true},
		"tcp":             {Protocol: unix.IPPROTO_TCP, Local: netip.MustParseAddrPort("[::1]:1790"), Listening: true, ReusePort: true, IPv6Alone: true},
		"tcp nonblocking": {Protocol: unix.IPPROTO_TCP, Local: netip.MustParseAddrPort("127.0.0.1:1791"), Listening: true},
		"tcp bound":       {Protocol: unix.IPPROTO_TCP, Local: netip.MustParseAddrPort("0.0.0.0:1792")},
		"mptcp":           {Protocol: unix.IPPROTO_MPTCP, Local: netip.MustParseAddrPort("127.0.0.1:1793"), Listening: true},
	}
	if there["mptcp"].Error != "" {
		delete(want, "mptcp")
	}
	for name, w := range want {
		i := slices.IndexFunc(sockets, func(s *Socket) bool { return s.Cookie == there[name].Cookie })
		if i < 0 {
			t.Errorf("%s is not found", name)
			continue
		}
		got := *sockets[i]
		if cookie, err := unix.GetsockoptUint64(got.FD(), unix.SOL_SOCKET, unix.SO_COOKIE); err != nil || cookie != got.Cookie {
			t.Errorf("%s: the copy has cookie %#x, %v", name, cookie, err)
		}
		if flags, err := unix.FcntlInt(uintptr(got.FD()), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
			t.Errorf("%s: a child of this process inherits the copy: %v", name, err)
		}
		w.fd, w.Number, w.Cookie = got.fd, there[name].FD, got.Cookie
		if name == "udp" { // which has two
			w.Number = got.Number
		}
		if got != w {
			t.Errorf("%s: %+v, want %+v", name, got, w)
		}
	}
	if len(sockets) != len(want) {
		t.Errorf("%d sockets, want %d: %v", len(sockets), len(want), sockets)
	}
	i := slices.IndexFunc(sockets, func(s *Socket) bool { return s.Cookie == there["tcp"].Cookie })
	if got := sockets[i].String(); got != "tcp [::1]:1790" {
		t.Errorf("it is called %s", got)
	}
	testBacklog(t, sockets[i])
	CloseAll(sockets)

	none, err := h.Sockets(func(*Socket) bool { return false })
	if err != nil || len(none) != 0 {
		t.Errorf("none wanted: %v, %v", none, err)
	}
	one, err := h.Sockets(func(s *Socket) bool { return s.Local.Port() == 1790 })
	if err != nil || len(one) != 1 || one[0].Cookie != there["tcp"].Cookie {
		t.Errorf("one wanted: %v, %v", one, err)
	}
	CloseAll(one)
	for port, has := range map[uint16]bool{4739: true, 4740: true, 4742: true, 1790: true, 1791: true, 1792: false, 1793: there["mptcp"].Error == "", 9: false} { // 1792 does not listen, 1793 is MPTCP
		if got := h.HasSocket(func(s *Socket) bool { return s.Local.Port() == port }); got != has {
			t.Errorf("port %d: %v", port, got)
		}
	}
	check(t, h.Close())
	if got := descriptors(t); got != had {
		t.Errorf("%d open files, had %d", got, had)
	}
	after := flags(t, c.pid())
	for fd, f := range before {
		if after[fd] != f {
			t.Errorf("descriptor %s has flags %s, had %s", fd, after[fd], f)
		}
	}
	if len(after) != len(before) {
		t.Errorf("the process has %d descriptors, had %d", len(after), len(before))
	}
	t.Run("MPTCP", func(t *testing.T) {
		if reason := there["mptcp"].Error; reason != "" {
			t.Skipf("kernel: no MPTCP: %s", reason)
		}
	})
}

func TestTake(t *testing.T) {
	var there map[string]opened
	c := start(t, "sockets", &there, nil)
	h, err := Open(c.pid())
	check(t, err)
	defer h.Close()
	had := descriptors(t)
	s, err := h.OpenSocket(there["tcp"].FD)
	check(t, err)
	if s.Cookie != there["tcp"].Cookie || s.Number != there["tcp"].FD || s.String() != "tcp [::1]:1790" {
		t.Errorf("descriptor %d is %+v, want the socket %#x", there["tcp"].FD, s, there["tcp"].Cookie)
	}
	check(t, s.Close())
	for name, number := range map[string]int{"none": 999, "a pipe": 0, "a UNIX socket": there["unix"].FD, "unbound": there["tcp unbound"].FD} {
		if _, err := h.OpenSocket(number); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: %v, want %v", name, err, fs.ErrNotExist)
		}
	}
	testenv.WithoutRights(t, func() {
		if _, err := h.OpenSocket(there["tcp"].FD); !errors.Is(err, fs.ErrPermission) {
			t.Errorf("without rights: %v, want %v", err, fs.ErrPermission)
		}
	})
	if got := descriptors(t); got != had {
		t.Errorf("%d open files, had %d", got, had)
	}
	check(t, h.Kill())
	c.Wait()
	if _, err := h.OpenSocket(there["tcp"].FD); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("of a process that has ended: %v, want %v", err, fs.ErrNotExist)
	}
}

// testBacklog raises the backlog of a listener and reads it from TCP_INFO.
func testBacklog(t *testing.T, s *Socket) {
	t.Helper()
	backlog := func() uint32 {
		info, err := unix.GetsockoptTCPInfo(s.FD(), unix.IPPROTO_TCP, unix.TCP_INFO)
		check(t, err)
		return info.Sacked
	}
	if got := backlog(); got != 1 {
		t.Errorf("backlog %d, want 1", got)
	}
	const path = "/proc/sys/net/core/somaxconn"
	most, err := os.ReadFile(path)
	check(t, err)
	for set, want := range map[int]string{64: "64", 1<<31 - 1: strings.TrimSpace(string(most))} {
		check(t, s.Listen(set))
		if got := fmt.Sprint(backlog()); got != want {
			t.Errorf("backlog %d gives %s, want %s", set, got, want)
		}
	}
}

// TestSocketsWithoutRights checks that missing capabilities give an error, not an empty list.
func TestSocketsWithoutRights(t *testing.T) {
	c := start(t, "sockets", nil, nil)
	h, err := Open(c.pid())
	check(t, err)
	defer h.Close()
	had := descriptors(t)
	testenv.WithoutRights(t, func() {
		if sockets, err := h.Sockets(all); !errors.Is(err, fs.ErrPermission) {
			t.Errorf("%v, %v, want %v", sockets, err, fs.ErrPermission)
		}
	})
	if got := descriptors(t); got != had {
		t.Errorf("%d open files, had %d", got, had)
	}
}

// TestSocketsOfAProcessThatEnds copies sockets while the process is killed.
func TestSocketsOfAProcessThatEnds(t *testing.T) {
	had := descriptors(t)
	for range 10 {
		func() {
			c := start(t, "sockets", nil, nil)
			h, err := Open(c.pid())
			check(t, err)
			defer h.Close()
			go h.Kill()
			for {
				sockets, err := h.Sockets(all)
				CloseAll(sockets)
				if errors.Is(err, fs.ErrNotExist) || err == nil && h.Ended() {
					break
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			c.Wait()
		}()
	}
	if got := descriptors(t); got != had {
		t.Errorf("%d open files, had %d", got, had)
	}
}

func TestInspectTakesOver(t *testing.T) {
	had := descriptors(t)
	for _, kind := range []int{unix.SOCK_DGRAM, unix.SOCK_STREAM} {
		fd, err := unix.Socket(unix.AF_INET, kind|unix.SOCK_CLOEXEC, 0)
		check(t, err)
		if s, ok := InspectSocket(fd); ok {
			t.Errorf("an unbound socket is %s", s)
		}
	}
	fd, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	check(t, err)
	if s, ok := InspectSocket(fd); ok {
		t.Errorf("a file is %s", s)
	}
	if got := descriptors(t); got != had {
		t.Errorf("%d open files, had %d", got, had)
	}
}
