// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/cgroup"
	"sockeye/internal/cli/command"
	"sockeye/internal/cli/socketscmd"
	"sockeye/internal/sockdiag"
	"sockeye/internal/testenv"
	"sockeye/lab"
)

func TestSocketsRefusals(t *testing.T) {
	h := newHost(t, "services: {}\n")
	limits, states := strings.Join(socketscmd.Limits(), ", "), strings.Join(sockdiag.StateNames(), ", ")
	mount, err := cgroup.Mount()
	if err != nil {
		t.Fatal(err)
	}
	netns := "give the path of a network namespace, as in /run/netns/NAME"
	for _, c := range []struct{ args, message, hint string }{
		{"sokcets", `unknown command "sokcets"`, "did you mean sockeye sockets?"},
		{"sockets all", `unexpected argument "all"`, "usage: sockeye sockets [flags]"},
		{"sockets --sate x", "unknown flag: --sate", "did you mean --state?"},
		{"sockets --state establishd", `there is no state "establishd"`, "did you mean established?"},
		{"sockets --state zzzzzzzzzzzz", `there is no state "zzzzzzzzzzzz"`, "one of " + states},
		{"sockets --state listening,", `there is no state ""`, "one of " + states},
		{"sockets --state listening --all", "--all and --state are mutually exclusive", "--all is all states"},
		{"sockets --local here", `--local is "here"`, socketscmd.EndpointHint},
		{"sockets --local=", `--local is ""`, socketscmd.EndpointHint},
		{"sockets --remote 192.0.2.0/33", `--remote is "192.0.2.0/33"`, socketscmd.EndpointHint},
		{"sockets --remote 192.0.2.1:0", `--remote is "192.0.2.1:0"`, socketscmd.EndpointHint},
		{"sockets --remote 192.0.2.1:65536", `--remote is "192.0.2.1:65536"`, socketscmd.EndpointHint},
		{"sockets --remote 192.0.2.1:", `--remote is "192.0.2.1:"`, socketscmd.EndpointHint},
		{"sockets --remote [::1", `--remote is "[::1"`, socketscmd.EndpointHint},
		{"sockets --remote [::1]x", `--remote is "[::1]x"`, socketscmd.EndpointHint},
		{"sockets --remote [::1]:", `--remote is "[::1]:"`, socketscmd.EndpointHint},
		{"sockets --remote fe80::1%lo", `--remote is "fe80::1%lo"`, socketscmd.EndpointHint},
		{"sockets --remote :", `--remote is ":"`, socketscmd.EndpointHint},
		{"sockets --port 0", "--port is 0", "1 to 65535"},
		{"sockets --port 65536", "--port is 65536", "1 to 65535"},
		{"sockets --port bmp", `--port is "bmp"`, "a whole number"},
		{"sockets -n 0", "--number is 0", "1 or more"},
		{"sockets -n -3", "--number is -3", "1 or more"},
		{"sockets --limit-by send_bufer", `there is no limit "send_bufer"`, "did you mean send_buffer?"},
		{"sockets --limit-by zzzzzzzzzzzzzz", `there is no limit "zzzzzzzzzzzzzz"`, "one of " + limits},
		{"sockets --sort queud", `there is no order "queud"`, "did you mean queued?"},
		{"sockets --sort=", `there is no order ""`, "one of " + strings.Join(socketscmd.Orders(), ", ")},
		{"sockets --cgroup nosuch.slice", `there is no cgroup "nosuch.slice"`, "name it by its path below " + mount + ", as in telemetry.slice"},
		{"sockets --cgroup=", `there is no cgroup ""`, "name it by its path below " + mount + ", as in telemetry.slice"},
		{"sockets --netns /run/netns/nosuch", "open network namespace: open /run/netns/nosuch: no such file or directory", netns},
		{"sockets --netns /etc/passwd", "open network namespace: /etc/passwd is not a network namespace", netns},
	} {
		t.Run(strings.ReplaceAll(c.args, "/", "_"), func(t *testing.T) {
			g := *h
			g.t = t
			g.refused(2, c.message, c.hint, nil, strings.Fields(c.args)...)
		})
	}
	h.isFailure(h.sockeye("sockets", "--watch", "-o", "json"), 2, "--watch and --output json are mutually exclusive", "without --watch there is one answer")
}

// stuck is a connection over loopback whose receiver does not read and whose buffers are full.
func stuck(t *testing.T, address string) (from, to *net.TCPConn) {
	t.Helper()
	var listening net.ListenConfig
	listening.SetMultipathTCP(false)
	l, err := listening.Listen(t.Context(), "tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	var d net.Dialer
	d.SetMultipathTCP(false)
	c, err := d.DialContext(t.Context(), "tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	a, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = c.(*net.TCPConn).SetLinger(0) // Close discards queued data
		c.Close()
		a.Close()
	})
	if err := c.SetWriteDeadline(time.Now().Add(200 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	for {
		if _, err := c.Write(make([]byte, 100000)); err != nil {
			return c.(*net.TCPConn), a.(*net.TCPConn)
		}
	}
}

func names(shown socketscmd.Shown) (list []string) {
	for _, s := range shown.Sockets {
		list = append(list, s.State+" "+s.Local+" "+s.Remote)
	}
	return list
}

// TestSockets checks filters and sort orders on real sockets.
func TestSockets(t *testing.T) {
	h := newHost(t, "services: {}\n")
	from, _ := stuck(t, "127.0.0.1:21790")
	from6, _ := stuck(t, "[::1]:21791")
	from4 := from.LocalAddr().String()
	mine := "established " + from4 + " 127.0.0.1:21790"
	other := "established 127.0.0.1:21790 " + from4
	mine6 := "established " + from6.LocalAddr().String() + " [::1]:21791"
	other6 := "established [::1]:21791 " + from6.LocalAddr().String()
	for _, c := range []struct {
		args string
		want []string // in any order
	}{
		{"--remote :21790", []string{mine}},
		{"--local :21790", []string{other}},
		{"--port 21790", []string{mine, other}},
		{"--port 21790 --all", []string{"listening 127.0.0.1:21790 ", mine, other}},
		{"--port 21791 --state listening,established", []string{"listening [::1]:21791 ", mine6, other6}},
		{"--remote 127.0.0.0/8:21790", []string{mine}},
		{"--remote 128.0.0.0/8:21790", nil},
		{"--local ::1 --port 21791", []string{mine6, other6}},
		{"--port 21790 --limit-by receive_window", []string{mine}},
		{"--port 21790 --limit-by application,send_buffer", []string{other}},
		{"--port 21790 --state time-wait", nil},
		{"--port 21790 --state LISTEN", []string{"listening 127.0.0.1:21790 "}},
		{"--port 21790 --state ESTAB", []string{mine, other}},
		{"--port 21790 --cgroup " + testenv.CgroupPath(), []string{mine, other}},
		{"--port 21790 --cgroup " + testenv.Cgroup(), []string{mine, other}},
		{"--port 21790 -n 1", []string{mine}},
		{"--port 21790 -n 1 --sort room", []string{mine}},
	} {
		got := must[socketscmd.Shown](h, append([]string{"sockets"}, strings.Fields(c.args)...)...)
		list := names(got)
		slices.Sort(list)
		slices.Sort(c.want)
		if !slices.Equal(list, c.want) {
			t.Errorf("%s: %q, want %q", c.args, list, c.want)
		}
		if matched := 2; strings.Contains(c.args, "-n 1") && (got.Matched != matched || len(got.Sockets) != 1) {
			t.Errorf("%s: %d of %d", c.args, len(got.Sockets), got.Matched)
		}
		if len(got.Problems) > 0 {
			t.Errorf("%s: %q", c.args, got.Problems)
		}
	}

	shown := must[socketscmd.Shown](h, "sockets", "--remote", ":21790", "--processes")
	s := shown.Sockets[0]
	if s.Cgroup != testenv.CgroupPath() || len(s.Processes) != 1 || s.Processes[0].PID != os.Getpid() || *s.Queued < int(*s.Payload) || *s.Overhead < 1 ||
		*s.Unsent == 0 || s.Room == nil || s.LimitedBy != sockdiag.ReceiveWindow || s.Times.ReceiveWindow == 0 || s.Path.MSS == 0 || shown.ByLimit["receive_window"] != 1 {
		t.Errorf("%+v", s)
	}
	text := h.sockeye("sockets", "--remote", ":21790")
	if text.code != 0 || !strings.Contains(text.out, from4+" -> 127.0.0.1:21790 ") || !strings.Contains(text.out, testenv.CgroupPath()+"\n  receive window") {
		t.Errorf("%+v", text)
	}
	text = h.sockeye("sockets", "--local", ":21790")
	if unread := *must[socketscmd.Shown](h, "sockets", "--local", ":21790").Sockets[0].Unread; unread == 0 || !strings.Contains(text.out, fmt.Sprintf("%s %d unread", from4, unread)) {
		t.Errorf("%d unread: %s", unread, text.out)
	}
	for _, name := range socketscmd.Orders() {
		if r := h.sockeye("sockets", "--sort", name); r.code != 0 {
			t.Errorf("--sort %s: %+v", name, r)
		}
	}
}

// TestSocketsUnprivileged checks that the output for an ordinary user lacks only the processes of other users' sockets.
func TestSocketsUnprivileged(t *testing.T) {
	h := newHost(t, "services: {}\n")
	stuck(t, "127.0.0.1:21792")
	asNobody := func(cmd *exec.Cmd) {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	}
	r := h.child(asNobody, "sockeye", "sockets", "--remote", ":21792")
	if r.code != 0 || r.err != "" || !strings.HasPrefix(r.out, "1 socket, limited by: 1 receive window\n") || !strings.Contains(r.out, testenv.CgroupPath()) {
		t.Errorf("%+v", r)
	}
	r = h.child(asNobody, "sockeye", "sockets", "--remote", ":21792", "--processes")
	if r.code != 0 || !strings.Contains(r.out, "not permitted to inspect") {
		t.Errorf("%+v", r)
	}
	r = h.child(asNobody, "sockeye", "sockets", "--netns", "/proc/1/ns/net")
	if r.code != 4 || !strings.Contains(r.err, "permission denied") {
		t.Errorf("%+v", r)
	}
}

// TestSocketsWithoutLoopback checks that in a namespace whose lo is down all columns but room are shown.
func TestSocketsWithoutLoopback(t *testing.T) {
	h := newHost(t, "services: {}\n")
	stuck(t, "127.0.0.1:21793")
	alone := func(cmd *exec.Cmd) {
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET}
	}
	r := h.child(alone, "sockeye", "sockets")
	if r.code != 0 || !strings.HasPrefix(r.out, "0 sockets\nnot read: SAFE and EXACT: calibrate: ") {
		t.Errorf("%+v", r)
	}
	// The sockets of this process in that namespace.
	r = h.child(alone, "sockeye", "sockets", "--netns", fmt.Sprintf("/proc/%d/ns/net", os.Getpid()), "--remote", ":21793")
	if r.code != 0 || !strings.Contains(r.out, "receive window") || !strings.Contains(r.out, "-  ") {
		t.Errorf("%+v", r)
	}
}

// TestSocketsMany checks that only some of thousands of sockets are shown, without undue delay.
func TestSocketsMany(t *testing.T) {
	const connections = 2500
	h := newHost(t, "services: {}\n")
	var listening net.ListenConfig
	listening.SetMultipathTCP(false)
	l, err := listening.Listen(t.Context(), "tcp", "127.0.0.1:21795")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	var d net.Dialer
	d.SetMultipathTCP(false)
	for i := range connections {
		c, err := d.DialContext(t.Context(), "tcp", "127.0.0.1:21795")
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		a, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		defer a.Close()
		if _, err := c.Write(make([]byte, 1+i)); err != nil {
			t.Fatal(err)
		}
	}
	start := time.Now()
	shown := must[socketscmd.Shown](h, "sockets", "--port", "21795", "-n", "3", "--sort", "unread")
	if took := time.Since(start); took > 20*time.Second { // on a busy host
		t.Errorf("it took %v", took)
	}
	if shown.Matched != 2*connections || len(shown.Sockets) != 3 {
		t.Fatalf("%d of %d", len(shown.Sockets), shown.Matched)
	}
	for i, s := range shown.Sockets {
		if *s.Unread != uint32(connections-i) || s.Local != "127.0.0.1:21795" {
			t.Errorf("%d: %+v", i, s)
		}
	}
}

// TestSocketsAdvice checks that the command shows the process that set a small buffer, with advice, also in another
// namespace.
func TestSocketsAdvice(t *testing.T) {
	h := newHost(t, "services: {}\n")
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	l, err := lab.New(ctx, lab.Options{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	a, errA := l.Namespace("a")
	b, errB := l.Namespace("b")
	if err := errors.Join(errA, errB); err != nil {
		t.Fatal(err)
	}
	near, far := netip.MustParsePrefix("10.96.0.1/24"), netip.MustParsePrefix("10.96.0.2/24")
	if _, err := l.Connect(a, b, lab.LinkOptions{Delay: 10 * time.Millisecond}, []netip.Prefix{near}, []netip.Prefix{far}); err != nil {
		t.Fatal(err)
	}
	var listening net.ListenConfig
	listening.SetMultipathTCP(false)
	var listener net.Listener
	var c net.Conn
	err = b.Do(func() (err error) {
		listener, err = listening.Listen(ctx, "tcp", "10.96.0.2:7000")
		return err
	})
	if err == nil {
		defer listener.Close()
		err = a.Do(func() (err error) {
			var d net.Dialer
			d.SetMultipathTCP(false)
			c, err = d.DialContext(ctx, "tcp", "10.96.0.2:7000")
			return err
		})
	}
	if err == nil {
		err = c.(*net.TCPConn).SetWriteBuffer(50000)
	}
	if err != nil {
		t.Fatal(err)
	}
	peer, err := listener.Accept()
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{}, 2)
	defer func() {
		c.Close()
		peer.Close()
		<-done
		<-done
	}()
	move := func(f func() error) {
		for f() == nil {
		}
		done <- struct{}{}
	}
	data, buffer := make([]byte, 1<<20), make([]byte, 1<<20)
	go move(func() error { _, err := c.Write(data); return err })
	go move(func() error { _, err := peer.Read(buffer); return err })

	within := time.Now().Add(20 * time.Second)
	for {
		shown := must[socketscmd.Shown](h, "sockets", "--netns", a.Path(), "--limit-by", "send_buffer", "--processes")
		if len(shown.Sockets) == 1 {
			s := shown.Sockets[0]
			if s.Advice == nil || s.Advice.Cause != sockdiag.FixedBuffer || !strings.Contains(s.Advice.Detail, "the application set SO_SNDBUF to a buffer of 100000 bytes, at most ") {
				t.Errorf("%+v", s.Advice)
			}
			break
		}
		if time.Now().After(within) {
			t.Fatalf("the send buffer was never the bottleneck: %+v", must[socketscmd.Shown](h, "sockets", "--netns", a.Path()))
		}
	}
	var r result
	for r = h.sockeye("sockets", "--netns", a.Path(), "--limit-by", "send_buffer"); strings.HasPrefix(r.out, "0 sockets") && time.Now().Before(within); {
		r = h.sockeye("sockets", "--netns", a.Path(), "--limit-by", "send_buffer")
	}
	if !strings.HasPrefix(r.out, "1 socket in "+a.Path()+", limited by: 1 send buffer\n") || !strings.Contains(r.out, "\n  hint: ") {
		t.Errorf("%+v", r)
	}
}

// TestSocketsWatch checks that the second screen shows the changes since the first.
func TestSocketsWatch(t *testing.T) {
	h := newHost(t, "services: {}\n")
	stuck(t, "127.0.0.1:21794")
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	screens := make(chan string, 10)
	env := command.Environment{Out: writerFunc(func(b []byte) (int, error) {
		if s := string(b); strings.Contains(s, "socket") {
			screens <- s
		}
		return len(b), nil
	}), Err: os.Stderr, In: strings.NewReader(""), Now: time.Now}
	done := make(chan int, 1)
	go func() {
		done <- Run(ctx, []string{"--run-dir", h.run, "sockets", "--watch", "--remote", ":21794"}, env)
	}()
	<-screens
	if second := <-screens; !regexp.MustCompile(`receive window (100|9\d) %`).MatchString(second) {
		t.Errorf("%s", second)
	}
	cancel()
	if code := <-done; code != 0 {
		t.Errorf("exit code %d", code)
	}
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(b []byte) (int, error) { return f(b) }
