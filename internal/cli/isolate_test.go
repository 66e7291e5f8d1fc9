// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/internal/isolate"
	"sockeye/internal/netns"
	"sockeye/internal/testenv"
)

// becomeInside runs one action of an isolated program with its arguments. Its first output ends with a line feed.
func becomeInside(args []string) {
	if err := inside(args[0], args[1:]); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	os.Exit(0)
}

// answerTime is the time for which a program waits for an answer: a busy host loses a first segment or datagram, and TCP sends it again after
// 1, 2 and 4 s.
const answerTime = 20 * time.Second

func inside(what string, args []string) error {
	switch what {
	case "dial": // connect to an address of a network, and print the response
		c, err := net.DialTimeout(args[0], args[1], answerTime)
		if err != nil {
			return err
		}
		defer c.Close()
		if err := c.SetDeadline(time.Now().Add(answerTime)); err != nil {
			return err
		}
		if _, err := c.Write([]byte("hello\n")); err != nil {
			return err
		}
		line, err := bufio.NewReader(c).ReadString('\n')
		fmt.Print(line)
		return err
	case "scan": // connect to many ports of an address, each from another port, then open a connection with a response
		to := netip.MustParseAddrPort(args[0])
		for port := range 300 {
			c, err := net.ListenUDP("udp4", nil)
			if err != nil {
				return err
			}
			if _, err := c.WriteToUDPAddrPort([]byte("?"), netip.AddrPortFrom(to.Addr(), uint16(20000+port))); err != nil {
				return err
			}
			c.Close()
		}
		return inside("dial", []string{"tcp", args[0]})
	case "many": // open connections to an address until a connection is refused
		var held []net.Conn
		for {
			c, err := net.DialTimeout("tcp", args[0], 5*time.Second)
			if err != nil {
				fmt.Println(len(held), err)
				return nil
			}
			held = append(held, c)
		}
	case "serve": // serve networks and ports until the end of standard input
		for i := 0; i < len(args); i += 2 {
			if _, err := tellPeers(args[i], ":"+args[i+1]); err != nil {
				return err
			}
		}
		fmt.Println("ready", os.Getpid())
		_, err := io.Copy(io.Discard, os.Stdin)
		return err
	case "ping": // ping an IPv4 address
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, unix.IPPROTO_ICMP)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		to := unix.SockaddrInet4{Addr: netip.MustParseAddr(args[0]).As4()}
		timeout := unix.Timeval{Sec: int64(answerTime / time.Second)}
		if err := errors.Join(unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &timeout), unix.Connect(fd, &to)); err != nil {
			return err
		}
		if err := unix.Send(fd, []byte{8, 0, 0, 0, 0, 0, 0, 1}, 0); err != nil {
			return err
		}
		_, err = unix.Read(fd, make([]byte, 64))
		return err
	case "escape":
		return escape(args)
	case "lookup": // resolve a name
		list, err := net.DefaultResolver.LookupHost(context.Background(), args[0])
		fmt.Println(list)
		return err
	case "signals": // print received signals, and lines of standard input until its end
		got := make(chan os.Signal, 8)
		signal.Notify(got, unix.SIGINT, unix.SIGTERM, unix.SIGHUP, unix.SIGUSR1)
		fmt.Println("ready", os.Getpid())
		lines := make(chan string)
		go func() {
			defer close(lines)
			for in := bufio.NewScanner(os.Stdin); in.Scan(); {
				lines <- in.Text()
			}
		}()
		for {
			select {
			case s := <-got:
				fmt.Println(s)
			case line, ok := <-lines:
				if !ok {
					return nil
				}
				fmt.Println("got", line)
			}
		}
	}
	return fmt.Errorf("unknown action %s", what)
}

// tellPeers answers each peer with the address of the peer.
func tellPeers(network, address string) (io.Closer, error) {
	if network == "udp" {
		c, err := net.ListenPacket(network, address)
		if err != nil {
			return nil, err
		}
		go func() {
			b := make([]byte, 1500)
			for {
				_, peer, err := c.ReadFrom(b)
				if err != nil {
					return
				}
				_, _ = fmt.Fprintln(packetWriter{c, peer}, peer.(*net.UDPAddr).AddrPort().Addr().Unmap())
			}
		}()
		return c, nil
	}
	l, err := net.Listen(network, address)
	if err != nil {
		return nil, err
	}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				_, _ = bufio.NewReader(c).ReadString('\n')
				fmt.Fprintln(c, c.RemoteAddr().(*net.TCPAddr).AddrPort().Addr().Unmap())
			}()
		}
	}()
	return l, nil
}

type packetWriter struct {
	net.PacketConn
	to net.Addr
}

func (w packetWriter) Write(p []byte) (int, error) { return w.WriteTo(p, w.to) }

// addresses of the tests' host, on lo.
var (
	own4 = netip.MustParseAddr("192.0.2.10")
	own6 = netip.MustParseAddr("2001:db8::10")
)

func addAddresses(t *testing.T) {
	t.Helper()
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range []netip.Addr{own4, own6} {
		err := netlink.AddrReplace(lo, &netlink.Addr{
			IPNet: &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(a.BitLen(), a.BitLen())}, Flags: unix.IFA_F_NODAD,
		})
		if err != nil {
			t.Fatal(err)
		}
		awaitLocal(t, a)
	}
}

func awaitLocal(t *testing.T, a netip.Addr) {
	t.Helper()
	if err := netns.AwaitLocal(&netlink.Handle{}, a, patience); err != nil {
		t.Fatal(err)
	}
}

// ordinary returns a command that runs sockeye as an ordinary user with access to the TUN device, as on most hosts. A
// shell prepares a private mount namespace.
func ordinary(t *testing.T, prepare string, args ...string) *exec.Cmd {
	t.Helper()
	return prepared(t, `mount -t tmpfs none /mnt && mknod /mnt/tun c 10 200 && chmod 666 /mnt/tun &&
		mkdir -p /dev/net && { test -e /dev/net/tun || touch /dev/net/tun; } && mount --bind /mnt/tun /dev/net/tun || exit 99
		`+prepare, "setpriv --reuid 65534 --regid 65534 --clear-groups --inh-caps=-all", args...)
}

// prepared returns a command that runs sockeye behind another command after a script, in a private mount namespace.
// Descriptor 9 is the binary, whose path other users may be unable to open.
func prepared(t *testing.T, script, by string, args ...string) *exec.Cmd {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	t.Cleanup(cancel)
	self, err := unix.Open("/proc/self/exe", unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	file := os.NewFile(uintptr(self), "itself")
	t.Cleanup(func() { file.Close() })
	cmd := exec.CommandContext(ctx, "unshare", append([]string{"-m", "--propagation", "private", "sh", "-c",
		"exec 9<&3 3<&-\n" + script + "\nexec " + by + ` /proc/self/fd/9 sockeye "$@"`, "sh"}, args...)...)
	cmd.Dir = "/"
	cmd.ExtraFiles = []*os.File{file}
	cmd.WaitDelay = 5 * time.Second
	cmd.SysProcAttr = &syscall.SysProcAttr{}
	return cmd
}

// itself is the path of this binary inside; the program is started by it.
const itself = "/proc/self/exe"

// resultOf runs a command and returns its output and exit code.
func resultOf(t *testing.T, cmd *exec.Cmd) (stdout, stderr string, code int) {
	t.Helper()
	var out, err bytes.Buffer
	if cmd.Stdout == nil {
		cmd.Stdout = &out
	}
	cmd.Stderr = &err
	if failed := cmd.Run(); failed != nil && cmd.ProcessState == nil {
		t.Fatal(failed)
	}
	if cmd.ProcessState.ExitCode() < 0 {
		t.Fatalf("%v: %v\n%s", cmd.Args, cmd.ProcessState, err.String())
	}
	said := err.String()
	if !scopesSignals() {
		said = strings.ReplaceAll(said, "sockeye: the sandbox is incomplete: "+lacksScopes+"\n", "")
	}
	return out.String(), said, cmd.ProcessState.ExitCode()
}

// lacksScopes is the warning that is always printed before Linux 6.12.
const lacksScopes = "the program can send signals to its process group outside: this needs landlock of Linux 6.12"

func scopesSignals() bool {
	abi, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, 0, 0, unix.LANDLOCK_CREATE_RULESET_VERSION)
	return errno == 0 && abi >= 6
}

// guestOf starts a command, waits until its program is ready, and returns the process id of the program.
type guestOf struct {
	*exec.Cmd
	In     io.WriteCloser
	Out    *bufio.Reader
	Err    *bytes.Buffer
	Inside int // process id of the program
}

func started(t *testing.T, cmd *exec.Cmd) *guestOf {
	t.Helper()
	g := &guestOf{Cmd: cmd, Err: &bytes.Buffer{}}
	var err error
	if g.In, err = cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = g.Err
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	g.Out = bufio.NewReader(out)
	inside, err := strconv.Atoi(strings.TrimSpace(strings.TrimPrefix(g.line(t), "ready ")))
	if err != nil {
		t.Fatal(err)
	}
	g.Inside = outsidePID(t, cmd.Process.Pid, inside)
	return g
}

// outsidePID translates a process id of a guest's PID namespace into an id of the tests' namespace, among the
// descendants of one process.
func outsidePID(t *testing.T, ancestor, number int) int {
	t.Helper()
	for _, pid := range append(descendants(ancestor), ancestor) {
		if numbers := strings.Fields(statusOf(pid, "NSpid")); len(numbers) > 0 && numbers[len(numbers)-1] == strconv.Itoa(number) {
			return pid
		}
	}
	t.Fatalf("no process has PID %d inside", number)
	return 0
}

// statusOf returns a line of /proc/PID/status, or "" if the process is gone.
func statusOf(pid int, name string) string {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	for line := range strings.Lines(string(text)) {
		if value, ok := strings.CutPrefix(line, name+":"); ok {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// descendants returns the children of a process and their descendants.
func descendants(pid int) (list []int) {
	files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	for _, file := range files {
		text, _ := os.ReadFile(file)
		for _, child := range strings.Fields(string(text)) {
			if n, err := strconv.Atoi(child); err == nil {
				list = append(append(list, n), descendants(n)...)
			}
		}
	}
	return list
}

func (g *guestOf) line(t *testing.T) string {
	t.Helper()
	line, err := g.Out.ReadString('\n')
	if err != nil {
		_ = g.Wait()
		t.Fatalf("it ended: %v, %q\n%s", g.ProcessState, line, g.Err)
	}
	return strings.TrimSuffix(line, "\n")
}

// end waits until the gateway exits and returns its exit code, or -1 if a signal terminated it.
func (g *guestOf) end(t *testing.T) int {
	t.Helper()
	_ = g.Wait()
	return g.ProcessState.ExitCode()
}

// gone waits until a process has exited.
func gone(t *testing.T, pid int) {
	t.Helper()
	fd, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	for deadline := time.Now().Add(patience); ; {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, int(max(0, time.Until(deadline).Milliseconds())))
		if errors.Is(err, unix.EINTR) { // because of signals of the Go runtime
			continue
		}
		if n != 1 || err != nil {
			t.Fatalf("process %d goes on: %v", pid, err)
		}
		return
	}
}

// TestIsolateProgram checks that the program has its own network namespace, sees the files of the host, and
// determines the exit code of the command.
func TestIsolateProgram(t *testing.T) {
	addAddresses(t)
	// A process of the same user, outside.
	other := exec.Command("sleep", "60")
	other.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	if err := other.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = other.Process.Kill()
		_ = other.Wait()
	}()
	for _, test := range []struct {
		name, script string
		in           string
		want         string
		code         int
	}{
		{"standard streams", "cat; echo to stderr >&2", "in\n", "in\n", 0},
		{"exit code", "exit 7", "", "", 7},
		{"signal", "kill -9 $$", "", "", 137},
		{"bytes that are not text", "printf '%s' \"$BYTES\" | od -An -tx1", "", " ff 0a e9\n", 0},
		{"directory", "pwd; ls -d tmp", "", "/\ntmp\n", 0},
		{"environment", "echo $KEPT; env | grep -c SOCKEYE_", "", "kept\n0\n", 1},
		{"descriptors", "ls /proc/self/fd | grep -vE '^[0-3]$'", "", "", 1},
		{"rights", "grep -E '^(Cap[^B]|NoNew)' /proc/self/status", "", `CapInh:	0000000000000000
CapPrm:	0000000000000000
CapEff:	0000000000000000
CapAmb:	0000000000000000
NoNewPrivs:	1
`, 0},
		{"no more rights", "setpriv --ambient-caps=+net_admin true 2>/dev/null; unshare -r true 2>/dev/null || cat /proc/sys/net/ipv4/ip_unprivileged_port_start", "", "0\n", 0},
		{"signals to its own", "sleep 60 & kill $!; wait $!", "", "", 143},
		{"signals to others", "test -n \"$OTHER\" && kill -0 $OTHER 2>/dev/null", "", "", 1},
		{"interfaces", "ls /sys/class/net 2>/dev/null; cut -s -d: -f1 /proc/net/dev", "", "", 0},
		{"user", "id -u; id -g", "", "65534\n65534\n", 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			cmd := ordinary(t, "", "isolate", "--", "sh", "-c", test.script)
			cmd.Env = append(os.Environ(), "SOCKEYE_SLOT=3", "KEPT=kept", fmt.Sprintf("OTHER=%d", other.Process.Pid), "BYTES=\xff\n\xe9")
			cmd.Stdin = strings.NewReader(test.in)
			out, stderr, code := resultOf(t, cmd)
			if test.name == "interfaces" {
				names := strings.Fields(out)
				if slices.Sort(names); !slices.Contains(names, "lo") || !slices.Contains(names, "sockeye0") {
					t.Errorf("interfaces %v", names)
				}
				return
			}
			if out != test.want || code != test.code {
				t.Errorf("%q, code %d, want %q, %d\n%s", out, code, test.want, test.code, stderr)
			}
			if strings.Contains(stderr, "sockeye:") {
				t.Errorf("standard error: %q", stderr)
			}
		})
	}
}

// TestIsolateFileCapabilities checks that a file with capabilities, such as ping, runs without them.
func TestIsolateFileCapabilities(t *testing.T) {
	addAddresses(t)
	cat, err := os.ReadFile("/bin/cat")
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "cat")
	if err := os.WriteFile(file, cat, 0o755); err != nil {
		t.Fatal(err)
	}
	// Version 2 of vfs_cap_data: CAP_NET_RAW, permitted and effective.
	asks := []byte{1, 0, 0, 2, 0, 1 << (unix.CAP_NET_RAW - 8), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}
	if err := unix.Setxattr(file, "security.capability", asks, 0); err != nil {
		t.Fatal(err)
	}
	out, stderr, code := resultOf(t, ordinary(t, "cp --preserve=all "+file+" /mnt/cat || exit 98", "isolate", "--", "/mnt/cat", "/proc/self/status"))
	if !strings.Contains(out, "CapEff:\t0000000000000000") || code != 0 {
		t.Errorf("code %d\n%s%s", code, out, stderr)
	}
}

// TestIsolateLeavesNothing checks that no process, interface, or visible mount of a guest is left.
func TestIsolateLeavesNothing(t *testing.T) {
	addAddresses(t)
	mounts := func() string {
		text, err := os.ReadFile("/proc/self/mountinfo")
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	processes := func() []string {
		text, err := os.ReadFile(filepath.Join(testenv.Cgroup(), "cgroup.procs"))
		if err != nil {
			t.Fatal(err)
		}
		return strings.Fields(string(text))
	}
	before, had := mounts(), processes()
	// A process of an earlier test may still end while this one runs.
	added := func() []string {
		return slices.DeleteFunc(processes(), func(id string) bool { return slices.Contains(had, id) })
	}
	for _, test := range []struct {
		name string
		end  func(g *guestOf) // of a gateway whose program is at work
		code int
	}{
		{"end of the program", func(g *guestOf) { g.In.Close() }, 0},
		{"kill -9 of the program", func(g *guestOf) { _ = unix.Kill(g.Inside, unix.SIGKILL) }, 137},
		{"kill -9 of the gateway", func(g *guestOf) { _ = g.Process.Kill() }, -1},
		{"SIGTERM", func(g *guestOf) { _ = g.Process.Signal(unix.SIGTERM) }, 143},
		{"Ctrl-C", func(g *guestOf) { _ = unix.Kill(-g.Process.Pid, unix.SIGINT) }, 130},
	} {
		t.Run(test.name, func(t *testing.T) {
			cmd := ordinary(t, "", "isolate", "-p", "127.0.0.1:7080:80", "--", itself, "inside", "serve", "tcp", "80")
			cmd.SysProcAttr.Setpgid = true
			g := started(t, cmd)
			network, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/net", g.Inside))
			if err != nil {
				t.Fatal(err)
			}
			if answer := hello(t, "tcp", "127.0.0.1:7080"); answer != isolate.Host4.String() {
				t.Errorf("inside, the host is %q", answer)
			}
			test.end(g)
			if code := g.end(t); code != test.code {
				t.Errorf("code %d, want %d\n%s", code, test.code, g.Err)
			}
			gone(t, g.Inside)
			// The processes of the guest are killed one after the other, and the agent of another test may inspect
			// the namespace.
			deadline := time.Now().Add(patience)
			for len(holders(network)) > 0 || len(added()) > 0 {
				if time.Now().After(deadline) {
					t.Fatalf("processes with its network namespace: %q; new processes: %v", holders(network), added())
				}
				time.Sleep(10 * time.Millisecond)
			}
			if mounts() != before {
				t.Error("mounts still exist")
			}
			c, err := net.Listen("tcp4", "127.0.0.1:7080")
			if err != nil {
				t.Fatalf("the port is not free: %v", err)
			}
			c.Close()
		})
	}
}

// holders returns the processes in a namespace and the descriptors that refer to it.
func holders(namespace string) (list []string) {
	for _, pattern := range []string{"/proc/[0-9]*/ns/net", "/proc/[0-9]*/fd/*"} {
		paths, _ := filepath.Glob(pattern)
		for _, path := range paths {
			if to, err := os.Readlink(path); err == nil && to == namespace {
				list = append(list, path)
			}
		}
	}
	return list
}

// hello sends a line to a server and returns the line that it answers.
func hello(t *testing.T, network, address string) string {
	t.Helper()
	c, err := net.DialTimeout(network, address, answerTime)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(answerTime)); err != nil {
		t.Fatal(err)
	}
	if _, err := fmt.Fprintln(c, "hello"); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(c).ReadString('\n')
	if err != nil {
		t.Fatalf("%s %s: %v", network, address, err)
	}
	return strings.TrimSuffix(line, "\n")
}

// TestIsolatePublish checks that published ports reach the program over both protocols and families, with the real
// address of the peer.
func TestIsolatePublish(t *testing.T) {
	addAddresses(t)
	started(t, ordinary(t, "", "isolate", "--no-outbound",
		"-p", "7000-7001:80-81", "-p", "127.0.0.1:7002/tcp", "-p", "7000:53/udp", "-p", "[2001:db8::10]:7003:80",
		"--", itself, "inside", "serve", "tcp", "80", "tcp", "81", "tcp", "7002", "udp", "53"))
	for _, test := range []struct{ network, to, sees string }{
		{"tcp", "192.0.2.10:7000", "192.0.2.10"},
		{"tcp", "192.0.2.10:7001", "192.0.2.10"},
		{"tcp", "[2001:db8::10]:7000", "2001:db8::10"},
		{"tcp", "[2001:db8::10]:7003", "2001:db8::10"},
		{"tcp", "[::1]:7001", isolate.Host6.String()},
		{"tcp", "127.0.0.1:7002", isolate.Host4.String()},
		{"udp", "192.0.2.10:7000", "192.0.2.10"},
		{"udp", "[2001:db8::10]:7000", "2001:db8::10"},
		{"udp", "127.0.0.1:7000", isolate.Host4.String()},
	} {
		if got := hello(t, test.network, test.to); got != test.sees {
			t.Errorf("%s %s: peer inside %q, want %q", test.network, test.to, got, test.sees)
		}
	}
	for _, closed := range []string{"192.0.2.10:7002", "192.0.2.10:7003"} {
		if c, err := net.DialTimeout("tcp", closed, time.Second); err == nil {
			c.Close()
			t.Errorf("%s is open", closed)
		}
	}
}

// TestIsolateOutbound checks that the program reaches the allowed destinations only.
func TestIsolateOutbound(t *testing.T) {
	addAddresses(t)
	for _, at := range []string{"192.0.2.10:7100", "[2001:db8::10]:7100", "192.0.2.10:7101", "127.0.0.1:7102"} {
		l, err := net.Listen("tcp", at)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				fmt.Fprintln(c, "welcome")
				c.Close()
			}
		}()
	}
	for _, test := range []struct {
		flags, to string
		ok        bool
	}{
		{"", "192.0.2.10:7100", true},
		{"", "[2001:db8::10]:7100", true},
		{"", "169.254.53.53:7102", false},
		{"--no-outbound", "192.0.2.10:7100", false},
		{"--allow=169.254.53.1:7102", "169.254.53.1:7102", true},
		{"--allow=169.254.53.1:7102", "169.254.53.1:7103", false},
		{"--allow=169.254.53.0/24:7102", "169.254.53.1:7102", false},
		{"", "169.254.53.1:7102", false},
		{"--allow=192.0.2.0/24:7100/tcp", "192.0.2.10:7100", true},
		{"--allow=192.0.2.0/24:7100/tcp", "192.0.2.10:7101", false},
		{"--allow=192.0.2.0/24:7100/udp", "192.0.2.10:7100", false},
		{"--allow=192.0.2.0/24", "[2001:db8::10]:7100", false},
		{"--allow=[2001:db8::/32]:7100", "[2001:db8::10]:7100", true},
		{"--mtu=1280", "[2001:db8::10]:7100", true},
	} {
		args := []string{"isolate"}
		if test.flags != "" {
			args = append(args, test.flags)
		}
		out, stderr, code := resultOf(t, ordinary(t, "", append(args, "--", itself, "inside", "dial", "tcp", test.to)...))
		if ok := out == "welcome\n" && code == 0; ok != test.ok {
			t.Errorf("%s %s: %q, code %d\n%s", test.flags, test.to, out, code, stderr)
		}
	}
}

// TestIsolateVerbose checks that --verbose reports refused destinations.
func TestIsolateVerbose(t *testing.T) {
	addAddresses(t)
	for _, to := range []string{"192.0.2.10:7109", "[2001:db8::10]:7109"} {
		_, stderr, code := resultOf(t, ordinary(t, "", "isolate", "--verbose", "--allow", "192.0.2.0/24:80", "--", itself, "inside", "dial", "tcp", to))
		refused := strings.Count(stderr, `msg="destination not allowed" protocol=tcp to=`+to+"\n")
		// An ICMP error that arrives while connect(2) holds the socket does not end the connection (tcp_v4_err,
		// tcp_v6_err); the kernel then repeats the SYN after 1 s.
		if ended := fmt.Sprintf("msg=ended not_allowed=%d\n", refused); code != 1 || refused < 1 || refused > 2 || !strings.Contains(stderr, ended) {
			t.Errorf("code %d, %d refused\n%s", code, refused, stderr)
		}
	}
}

const pingGroups = "/proc/sys/net/ipv4/ping_group_range"

// keepFile restores a sysctl when the test ends.
func keepFile(t *testing.T, name string) {
	t.Helper()
	old, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.WriteFile(name, old, 0); err != nil {
			t.Error(err)
		}
	})
}

// TestIsolatePingForbidden checks that the gateway reports a host that forbids echo requests.
func TestIsolatePingForbidden(t *testing.T) {
	addAddresses(t)
	keepFile(t, pingGroups)
	for allowed, want := range map[string]int{"0 65535": 0, "1 0": 1} {
		if err := os.WriteFile(pingGroups, []byte(allowed), 0); err != nil {
			t.Fatal(err)
		}
		out, stderr, code := resultOf(t, ordinary(t, "", "isolate", "--", itself, "inside", "ping", own4.String()))
		said := strings.Count(stderr, "the host denies ping sockets to this user; see sysctl net.ipv4.ping_group_range")
		if code != want || said != want {
			t.Errorf("%s: %q, code %d, want %d\n%s", allowed, out, code, want, stderr)
		}
	}
}

// dnsServer answers every query with 203.0.113.7, over UDP and TCP.
func dnsServer(t *testing.T, at string) {
	t.Helper()
	packets, err := net.ListenPacket("udp", at)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { packets.Close() })
	go func() {
		b := make([]byte, 1500)
		for {
			n, peer, err := packets.ReadFrom(b)
			if err != nil {
				return
			}
			_, _ = packets.WriteTo(dnsAnswer(b[:n]), peer)
		}
	}()
	l, err := net.Listen("tcp", at)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				var length [2]byte
				for {
					if _, err := io.ReadFull(c, length[:]); err != nil {
						return
					}
					question := make([]byte, binary.BigEndian.Uint16(length[:]))
					if _, err := io.ReadFull(c, question); err != nil {
						return
					}
					answer := dnsAnswer(question)
					_, _ = c.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(answer))), answer...))
				}
			}()
		}
	}()
}

// dnsAnswer answers a query for an A record; other queries get an empty answer.
func dnsAnswer(question []byte) []byte {
	end := 12
	for end < len(question) && question[end] != 0 {
		end += int(question[end]) + 1
	}
	end += 5
	if end > len(question) {
		return nil
	}
	p := append([]byte{}, question[:end]...)
	copy(p[2:], []byte{0x81, 0x80, 0, 1, 0, 0, 0, 0, 0, 0})
	if binary.BigEndian.Uint16(question[end-4:]) == 1 {
		p[7] = 1
		p = append(p, 0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4, 203, 0, 113, 7)
	}
	return p
}

// TestIsolateNames checks that names resolve inside as on the host, with different forms of resolv.conf.
func TestIsolateNames(t *testing.T) {
	addAddresses(t)
	for _, at := range []string{"127.0.0.1:53", "127.0.0.53:53", "[2001:db8::10]:53", "192.0.2.10:53"} {
		dnsServer(t, at)
	}
	const found, etc = "[203.0.113.7]\n", "mount -t tmpfs none /etc || exit 98\n"
	for _, test := range []struct {
		name, prepare string
		flags         []string
		want          string
	}{
		{"of loopback", etc + "echo nameserver 127.0.0.53 >/etc/resolv.conf", nil, found},
		{"a link into /run", etc + "mkdir /mnt/run; mount --bind /mnt/run /run; echo nameserver 127.0.0.53 >/run/stub; ln -s ../run/stub /etc/resolv.conf", nil, found},
		{"of systemd-resolved", etc + "mkdir -p /mnt/run/systemd/resolve; mount --bind /mnt/run /run; cd /run/systemd/resolve; echo nameserver 127.0.0.53 >stub-resolv.conf; ln -s ../run/systemd/resolve/stub-resolv.conf /etc/resolv.conf; cd /", nil, found},
		{"a link that leads into /tmp", etc + "mkdir /mnt/tmp; mount --bind /mnt/tmp /tmp; chmod 755 /tmp; echo nameserver 127.0.0.53 >/tmp/stub; ln -s /tmp/stub /etc/resolv.conf", nil, found},
		{"IPv6 only", etc + "echo nameserver 2001:db8::10 >/etc/resolv.conf", nil, found},
		{"IPv6 with a zone", etc + "echo nameserver ::1%lo >/etc/resolv.conf", nil, "[203.0.113.7]\n"},
		{"an address of the host", etc + "echo nameserver 192.0.2.10 >/etc/resolv.conf", nil, found},
		{"over TCP", etc + "printf 'nameserver 127.0.0.53\\noptions use-vc\\n' >/etc/resolv.conf", nil, found},
		{"the first is dead", etc + "printf 'nameserver 127.0.0.7\\nnameserver 127.0.0.53\\noptions timeout:1\\n' >/etc/resolv.conf", nil, found},
		{"none named", etc + "echo '# nothing' >/etc/resolv.conf", nil, found},
		{"with an allow list", etc + "echo nameserver 127.0.0.53 >/etc/resolv.conf", []string{"--allow", "203.0.113.0/24"}, found},
		{"no file", etc, nil, ""},
		{"no DNS", etc + "echo nameserver 127.0.0.53 >/etc/resolv.conf", []string{"--no-dns"}, ""},
		{"no outbound", etc + "echo nameserver 127.0.0.53 >/etc/resolv.conf", []string{"--no-outbound"}, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			if test.name == "IPv6 with a zone" {
				dnsServer(t, "[::1]:53")
			}
			args := append(append([]string{"isolate"}, test.flags...), "--", itself, "inside", "lookup", "name.example.")
			out, stderr, code := resultOf(t, ordinary(t, test.prepare, args...))
			if test.want == "" {
				if code != 1 || strings.Contains(stderr, "sockeye:") {
					t.Errorf("%q, code %d\n%s", out, code, stderr)
				}
			} else if out != test.want || code != 0 {
				t.Errorf("%q, code %d, want %q\n%s", out, code, test.want, stderr)
			}
		})
	}
}

// TestIsolateNoDNS checks that --no-dns also blocks the address of the host's name server, including the upstream
// server of systemd-resolved.
func TestIsolateNoDNS(t *testing.T) {
	addAddresses(t)
	const own, other = "203.0.113.53", "203.0.113.54"
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{own, other} {
		address := &netlink.Addr{IPNet: &net.IPNet{IP: net.ParseIP(text).To4(), Mask: net.CIDRMask(32, 32)}}
		if err := netlink.AddrReplace(lo, address); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := netlink.AddrDel(lo, address); err != nil {
				t.Error(err)
			}
		})
		for _, network := range []string{"tcp", "udp"} {
			for _, port := range []string{"53", "853", "7180"} {
				l, err := tellPeers(network, net.JoinHostPort(text, port))
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { l.Close() })
			}
		}
	}
	const (
		etc      = "mount -t tmpfs none /etc || exit 98\n"
		named    = etc + "echo nameserver " + own + " >/etc/resolv.conf"
		resolved = etc + "mkdir -p /mnt/run/systemd/resolve; mount --bind /mnt/run /run; echo nameserver 127.0.0.53 >/etc/resolv.conf; echo nameserver " + own + " >/run/systemd/resolve/resolv.conf"
		refused  = "name server of the host: with --no-dns, only --allow with exactly this address permits it"
	)
	for _, test := range []struct {
		prepare, flags, to string
		ok                 bool
	}{
		{named, "", own + ":53", true},
		{named, "--no-dns", own + ":53", false},
		{named, "--no-dns", own + ":853", false},
		{named, "--no-dns --allow 203.0.113.0/24", own + ":53", false},
		{named, "--no-dns --allow 203.0.113.53:53", own + ":53", true},
		{named, "--no-dns", own + ":7180", true},
		{named, "--no-dns", other + ":53", true},
		{resolved, "--no-dns", own + ":53", false},
	} {
		for _, network := range []string{"tcp", "udp"} {
			args := append(strings.Fields("isolate --verbose "+test.flags), "--", itself, "inside", "dial", network, test.to)
			out, stderr, code := resultOf(t, ordinary(t, test.prepare, args...))
			if ok := code == 0; ok != test.ok || ok == strings.Contains(stderr, refused) {
				t.Errorf("%q %s %s: %q, code %d\n%s", test.flags, network, test.to, out, code, stderr)
			}
		}
	}
}

// TestIsolateSignals checks that the program receives each signal once.
func TestIsolateSignals(t *testing.T) {
	addAddresses(t)
	g := started(t, ordinary(t, "", "isolate", "--", itself, "inside", "signals"))
	for _, s := range []unix.Signal{unix.SIGUSR1, unix.SIGINT, unix.SIGHUP, unix.SIGTERM, unix.SIGINT} {
		if err := g.Process.Signal(s); err != nil {
			t.Fatal(err)
		}
		if got := g.line(t); got != s.String() {
			t.Errorf("%s, want %s", got, s)
		}
	}
	g.In.Close()
	if code := g.end(t); code != 0 {
		t.Errorf("code %d\n%s", code, g.Err)
	}
	for s, code := range map[unix.Signal]int{unix.SIGTERM: 143, unix.SIGINT: 130} {
		g = started(t, ordinary(t, "", "isolate", "--", "sh", "-c", "echo ready $$; exec sleep 60"))
		if err := g.Process.Signal(s); err != nil {
			t.Fatal(err)
		}
		if got := g.end(t); got != code {
			t.Errorf("%v: code %d, want %d\n%s", s, got, code, g.Err)
		}
		gone(t, g.Inside)
	}
}

// TestIsolateEarlySignals checks that a signal during the start of the program is not lost, whether only the gateway
// receives it or, as from a terminal, the process inside too.
func TestIsolateEarlySignals(t *testing.T) {
	addAddresses(t)
	for range 5 {
		for s, code := range map[unix.Signal]int{unix.SIGTERM: 143, -unix.SIGINT: 130} {
			cmd := ordinary(t, "", "isolate", "--", "sleep", "60")
			var said bytes.Buffer
			cmd.Stderr = &said
			cmd.SysProcAttr.Setpgid = true
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			waitInside(t, cmd.Process.Pid)
			to := cmd.Process.Pid
			if s < 0 {
				to, s = -to, -s
			}
			if err := unix.Kill(to, s); err != nil {
				t.Fatal(err)
			}
			_ = cmd.Wait()
			if got := cmd.ProcessState.ExitCode(); got != code || said.Len() > 0 {
				t.Errorf("%v: code %d, want %d\n%s", s, got, code, &said)
			}
		}
	}
}

// waitInside waits until the process that prepares the guest exists.
func waitInside(t *testing.T, pid int) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); {
		lists, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
		for _, list := range lists {
			children, _ := os.ReadFile(list)
			for _, child := range strings.Fields(string(children)) {
				line, _ := os.ReadFile("/proc/" + child + "/cmdline")
				// On a busy host the child may have executed the program already.
				if bytes.Contains(line, []byte(isolate.InsideCommand)) || bytes.HasPrefix(line, []byte("sleep")) {
					return
				}
			}
		}
	}
	t.Fatal("the process inside does not exist")
}

// TestIsolateIgnoredSignals checks that the program ignores the signals that nohup made the command ignore.
func TestIsolateIgnoredSignals(t *testing.T) {
	addAddresses(t)
	g := started(t, ordinary(t, "trap '' HUP", "isolate", "--", "sh", "-c", "echo ready $$; read line; echo got $line"))
	for _, pid := range []int{g.Process.Pid, g.Inside} {
		if err := unix.Kill(pid, unix.SIGHUP); err != nil {
			t.Fatal(err)
		}
	}
	fmt.Fprintln(g.In, "a line")
	if got := g.line(t); got != "got a line" {
		t.Error(got)
	}
	if code := g.end(t); code != 0 {
		t.Errorf("code %d\n%s", code, g.Err)
	}
}

// TestIsolateTerminal checks that the program is in the foreground of its terminal: it receives a signal from the
// keyboard once, and reads the typed input.
func TestIsolateTerminal(t *testing.T) {
	addAddresses(t)
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer master.Close()
	control, err := master.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var number int
	if err := errors.Join(control.Control(func(fd uintptr) {
		err = errors.Join(unix.IoctlSetPointerInt(int(fd), unix.TIOCSPTLCK, 0))
		if err == nil {
			number, err = unix.IoctlGetInt(int(fd), unix.TIOCGPTN)
		}
	}), err); err != nil {
		t.Fatal(err)
	}
	slave, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer slave.Close()
	// The terminal of an ordinary user belongs to the user.
	if err := slave.Chown(65534, 65534); err != nil {
		t.Fatal(err)
	}
	cmd := ordinary(t, "", "isolate", "--", itself, "inside", "signals")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = slave, slave, slave
	cmd.SysProcAttr.Setsid, cmd.SysProcAttr.Setctty = true, true
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if err := master.SetReadDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	screen := bufio.NewReader(master)
	var seen []string
	see := func(want string) {
		t.Helper()
		for {
			line, err := screen.ReadString('\n')
			if err != nil {
				t.Fatalf("no %q: %q, %v", want, line, err)
			}
			seen = append(seen, strings.TrimRight(line, "\r\n"))
			if strings.Contains(line, want) {
				return
			}
		}
	}
	see("ready")
	fmt.Fprintln(master, "one")
	see("got one")
	_, _ = master.Write([]byte{3})
	see("interrupt")
	fmt.Fprintln(master, "two")
	see("got two")
	if n := strings.Count(strings.Join(seen, " "), "interrupt"); n != 1 {
		t.Errorf("%d interrupts: %q", n, seen)
	}
	_, _ = master.Write([]byte{4}) // the end of input
	_ = cmd.Wait()
	if code := cmd.ProcessState.ExitCode(); code != 0 {
		t.Errorf("code %d", code)
	}
}

// TestIsolateRefusals checks that a wrong command prints one line and a hint, and leaves nothing behind.
func TestIsolateRefusals(t *testing.T) {
	addAddresses(t)
	busy, err := net.Listen("tcp", "192.0.2.10:7200")
	if err != nil {
		t.Fatal(err)
	}
	defer busy.Close()
	other := "touch /mnt/net; mount --bind " + newNetns(t) + " /mnt/net || exit 98"
	tun := "mount --bind /mnt/none /dev/net/tun || exit 98"
	for _, test := range []struct {
		args, prepare string
		code          int
		message, hint string
	}{
		{"", "", 2, "PROGRAM is missing", "name a program after --, or an existing namespace with --netns or --pid"},
		{"-- nosuchprogram", "", 2, "find program nosuchprogram: executable file not found in $PATH", "name a program in PATH, or a path"},
		{"-- /nosuch/program", "", 2, "find program /nosuch/program: no such file or directory", "name a program in PATH, or a path"},
		{"-- /etc/passwd", "", 2, "find program /etc/passwd: permission denied", "name a program in PATH, or a path"},
		{"-- /mnt/noscript", "printf '#!/nosuch\\n' >/mnt/noscript; chmod 755 /mnt/noscript", 2, "start /mnt/noscript: no such file or directory", ""},
		{"-- /mnt/noformat", "printf 'x\\n' >/mnt/noformat; chmod 755 /mnt/noformat", 2, "start /mnt/noformat: exec format error", ""},

		{"-p 0 -- true", "", 2, `--publish "0": "0" is not a port (1 to 65535)`, "as in 1790:1790/tcp, 127.0.0.1:8080:80 or 9000-9010/udp"},
		{"-p 80/sctp -- true", "", 2, `--publish "80/sctp": the protocol must be tcp or udp`, "as in 1790:1790/tcp, 127.0.0.1:8080:80 or 9000-9010/udp"},
		{"-p 7000-7005 -p 7005:80 -- true", "", 2, "--publish 7000-7005:7000-7005/tcp and 7005:80/tcp overlap", "publish each port of the host once"},
		{"--allow nowhere -- true", "", 2, `--allow "nowhere": "nowhere" is not a prefix`, "as in 10.0.0.0/8:9092/tcp, 192.0.2.1 or [2001:db8::/32]:443"},
		{"--allow 10.0.0.1/8 -- true", "", 2, `--allow "10.0.0.1/8": 10.0.0.1/8 has bits set after its length: write 10.0.0.0/8, or 10.0.0.1 for that address`, "as in 10.0.0.0/8:9092/tcp, 192.0.2.1 or [2001:db8::/32]:443"},
		{"--allow 127.0.0.1:6379 -- true", "", 2, `--allow "127.0.0.1:6379": is not an outside destination`, "the loopback addresses of the host are 169.254.53.1 and fd53:6f63:6b65:7965::1 inside"},
		{"--allow 169.254.53.2:80 -- true", "", 2, `--allow "169.254.53.2:80": the address belongs to the program itself inside`, "the loopback addresses of the host are 169.254.53.1 and fd53:6f63:6b65:7965::1 inside"},
		{"--allow 10.0.0.0/8 --no-outbound -- true", "", 2, "--no-outbound and --allow are mutually exclusive", "--allow alone denies all other destinations"},
		{"--mtu 1000 -- true", "", 2, "--mtu is 1000", "1280 to 65520 bytes"},
		{"--mtu 65521 -- true", "", 2, "--mtu is 65521", "1280 to 65520 bytes"},

		{"--pid 4194304", "", 2, "there is no process 4194304", "it may have ended; name another with --pid"},
		{"--pid 0", "", 2, "there is no process 0", "it may have ended; name another with --pid"},
		{"--pid 1", "", 4, "open network namespace of process 1: open /proc/1/ns/net: permission denied", "the process must belong to you"},
		{"--pid 1 --netns /run/netns/x", "", 2, "--netns and --pid are mutually exclusive", "name one namespace"},
		{"--netns /nosuch/netns", "", 2, "there is no namespace /nosuch/netns", "as in /run/netns/NAME; ip netns lists them"},
		{"--netns /etc/passwd", "", 2, "/etc/passwd is not a network namespace", "as in /run/netns/NAME; ip netns lists them"},
		{"--netns /proc/4194304/ns/net", "", 2, "there is no namespace /proc/4194304/ns/net", "as in /run/netns/NAME; ip netns lists them"},
		{"--netns /proc/self/ns/net", "", 2, "/proc/self/ns/net is the network namespace of this process", "as in /run/netns/NAME; ip netns lists them"},
		{"--netns /mnt/net -- true", other, 2, "PROGRAM and an existing namespace are mutually exclusive", "start the program in the namespace with nsenter or ip netns exec"},

		{"--netns /mnt/net", other, 4, "join the namespace: operation not permitted", "you must be root in the namespace's user namespace"},

		{"-p 192.0.2.10:7200 -- true", "", 5, "listen on tcp 192.0.2.10:7200: address already in use", "publish another port of the host, as in -p 15200:7200"},
		{"-p 7200:80 -- true", "", 5, "listen on tcp port 7200: address already in use", "publish another port of the host, as in -p 15200:7200"},
		{"-p 80 -- true", "", 4, "listen on tcp port 80: permission denied", "ports below 1024 need root (sysctl net.ipv4.ip_unprivileged_port_start); publish another port of the host, as in -p 8080:80"},
		{"-p 198.51.100.1:8080 -- true", "", 2, "listen on tcp 198.51.100.1:8080: cannot assign requested address", "the host has no such address"},
		{"-p 20000-20200 -- true", "ulimit -n 100", 1, "listen on tcp port PORT: too many open files", "publish fewer ports, or raise the limit of open files (ulimit -Hn)"},

		{"-- true", "chmod 600 /dev/net/tun", 4, "open /dev/net/tun: permission denied", "on most hosts all users may open it: chmod 0666 /dev/net/tun"},
		{"-- true", "mount -t tmpfs none /dev/net || exit 98", 3, "open /dev/net/tun: no such file or directory", "load the module with modprobe tun; in a container, add the device"},
		{"-- true", "mknod -m 666 /mnt/none c 10 254;" + tun, 3, "open /dev/net/tun: no such device", "load the module with modprobe tun; in a container, add the device"},
	} {
		cmd := ordinary(t, test.prepare, append([]string{"isolate"}, strings.Fields(test.args)...)...)
		out, stderr, code := resultOf(t, cmd)
		want := "sockeye: " + test.message + "\n"
		if test.hint != "" {
			want += "hint: " + test.hint + "\n"
		}
		if before, after, ok := strings.Cut(want, "PORT:"); ok {
			if strings.HasPrefix(stderr, before) {
				_, rest, _ := strings.Cut(strings.TrimPrefix(stderr, before), ":")
				stderr, want = rest, after
			}
		}
		if out != "" || stderr != want || code != test.code {
			t.Errorf("%s: code %d, want %d\n%s%s---- want\n%s", test.args, code, test.code, out, stderr, want)
		}
	}
}

// TestIsolateFewFiles checks that the gateway raises its soft descriptor limit to the hard limit.
func TestIsolateFewFiles(t *testing.T) {
	addAddresses(t)
	out, stderr, code := resultOf(t, ordinary(t, "ulimit -Sn 64", "isolate", "-p", "20000-20200", "--", "sh", "-c", "ulimit -Sn"))
	if out != "64\n" || code != 0 {
		t.Errorf("%q, code %d\n%s", out, code, stderr)
	}
}

// TestIsolateNoFilesLeft checks that TCP still works if UDP flows use all descriptors of the gateway. If TCP uses all
// descriptors, the gateway logs a warning, and connections fail with an error that a server cannot cause.
func TestIsolateNoFilesLeft(t *testing.T) {
	addAddresses(t)
	at := net.JoinHostPort(own4.String(), "7110")
	listener, err := net.Listen("tcp", at)
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	var held []net.Conn
	var accepting sync.WaitGroup
	accepting.Go(func() {
		for {
			c, err := listener.Accept()
			if err != nil {
				return
			}
			held = append(held, c)
			_, _ = c.Write([]byte("hello\n"))
		}
	})
	defer func() {
		listener.Close()
		accepting.Wait()
		for _, c := range held {
			c.Close()
		}
	}()
	for what, want := range map[string]string{"scan": "hello\n", "many": "connect: network is unreachable\n"} {
		out, stderr, code := resultOf(t, ordinary(t, "ulimit -n 64", "isolate", "--", itself, "inside", what, at))
		if !strings.HasSuffix(out, want) || code != 0 || strings.Count(stderr, "no file descriptors left") != 1 {
			t.Errorf("%s: %q, code %d\n%s", what, out, code, stderr)
		}
	}
}

// TestIsolateAsRoot checks that root needs no other options than an ordinary user.
func TestIsolateAsRoot(t *testing.T) {
	addAddresses(t)
	g := started(t, prepared(t, "", "", "isolate", "--as-root", "-p", "192.0.2.10:81:80", "--", itself, "inside", "serve", "tcp", "80"))
	if got := hello(t, "tcp", "192.0.2.10:81"); got != "192.0.2.10" {
		t.Errorf("inside it is %q", got)
	}
	withoutRights(t, g.Process.Pid, "Seccomp:\t2")
	withoutRights(t, g.Inside)
	g.In.Close()
	if code := g.end(t); code != 0 {
		t.Errorf("code %d\n%s", code, g.Err)
	}
}

// withoutRights checks that no thread of a process has or can gain a capability.
func withoutRights(t *testing.T, pid int, also ...string) {
	t.Helper()
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
	if err != nil || len(files) == 0 {
		t.Fatalf("process %d has no threads: %v", pid, err)
	}
	for _, file := range files {
		status, err := os.ReadFile(file)
		if errors.Is(err, unix.ESRCH) || errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		const none = ":\t0000000000000000"
		for _, want := range append([]string{"CapInh" + none, "CapPrm" + none, "CapEff" + none, "CapAmb" + none, "NoNewPrivs:\t1"}, also...) {
			if !bytes.Contains(status, []byte(want)) {
				t.Errorf("%s has no %q:\n%s", file, want, status)
			}
		}
	}
}

// TestIsolateWithoutNetwork checks that a host whose lo is down and that has no address can isolate a program.
func TestIsolateWithoutNetwork(t *testing.T) {
	cmd := ordinary(t, "", "isolate", "--", "sh", "-c", "grep -c sockeye0 /proc/net/dev")
	cmd.SysProcAttr.Unshareflags = unix.CLONE_NEWNET
	if out, stderr, code := resultOf(t, cmd); out != "1\n" || code != 0 {
		t.Errorf("%q, code %d\n%s", out, code, stderr)
	}
	cmd = ordinary(t, "", "isolate", "--", itself, "inside", "dial", "tcp", "192.0.2.10:80")
	cmd.SysProcAttr.Unshareflags = unix.CLONE_NEWNET
	start := time.Now()
	// Without the gateway's answer, TCP gives up after two minutes. While other namespaces come and go, the kernel needs seconds for
	// the addresses of the program.
	if out, stderr, code := resultOf(t, cmd); !strings.Contains(out, "unreachable") || code != 1 || time.Since(start) > time.Minute {
		t.Errorf("%q, code %d after %v\n%s", out, code, time.Since(start), stderr)
	}
}

// newNetns creates a network namespace and returns its path.
func newNetns(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "netns")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := netns.Thread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return err
		}
		return unix.Mount("/proc/thread-self/ns/net", path, "", unix.MS_BIND, "")
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(path, unix.MNT_DETACH) })
	return path
}

// attached starts a command that joins a namespace, and waits until it has joined.
func attached(t *testing.T, cmd *exec.Cmd) *guestOf {
	t.Helper()
	g := &guestOf{Cmd: cmd, Err: &bytes.Buffer{}}
	cmd.Stderr = g.Err
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	g.Out = bufio.NewReader(out)
	if got := g.line(t); got != "joined by sockeye0; interrupt to stop" {
		t.Fatal(got)
	}
	return g
}

// TestIsolateNetns checks that the gateway joins an existing namespace, and leaves it when the namespace is deleted
// or the gateway exits.
func TestIsolateNetns(t *testing.T) {
	addAddresses(t)
	l, err := net.Listen("tcp", "192.0.2.10:7300")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			fmt.Fprintln(c, "welcome")
			c.Close()
		}
	}()
	path := newNetns(t)
	self := exec.Command(pathOfItself(t), "sockeye", "isolate", "--pid", strconv.Itoa(os.Getpid()))
	want := fmt.Sprintf("sockeye: the network namespace of process %d is the network namespace of this process\nhint: name a process in another network namespace\n", os.Getpid())
	if _, stderr, code := resultOf(t, self); stderr != want || code != 2 {
		t.Errorf("its own network: code %d\n%s", code, stderr)
	}
	in := func(args ...string) string {
		t.Helper()
		out, _ := exec.Command("nsenter", append([]string{"--net=" + path, "--"}, args...)...).Output()
		return string(out)
	}
	in("ip", "route", "add", "unreachable", "default")
	_, stderr, code := resultOf(t, prepared(t, "", "", "isolate", "--netns", path))
	if want := "sockeye: set up interface sockeye0: add default route: file exists\nhint: the namespace must not have an interface sockeye0 (of another gateway) or a default route\n"; stderr != want || code != 5 {
		t.Errorf("with a default route: code %d\n%s", code, stderr)
	}
	in("ip", "route", "del", "unreachable", "default")
	join := []string{"isolate", "--netns", path, "-p", "192.0.2.10:7301:80"}
	g := attached(t, prepared(t, "", "", join...))
	if got := in(pathOfItself(t), "inside", "dial", "tcp", "192.0.2.10:7300"); got != "welcome\n" {
		t.Errorf("dial: %q", got)
	}
	server := exec.Command("nsenter", "--net="+path, "--", pathOfItself(t), "inside", "serve", "tcp", "80")
	s := started(t, server)
	if got := hello(t, "tcp", "192.0.2.10:7301"); got != "192.0.2.10" {
		t.Errorf("inside it is %q", got)
	}
	_, stderr, code = resultOf(t, prepared(t, "", "", "isolate", "--netns", path))
	if want := "sockeye: make interface sockeye0: device or resource busy\nhint: the namespace must not have an interface sockeye0 (of another gateway) or a default route\n"; stderr != want || code != 5 {
		t.Errorf("a second gateway: code %d\n%s", code, stderr)
	}
	c, err := net.Dial("tcp", "192.0.2.10:7301")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	interrupted := time.Now()
	if err := g.Process.Signal(unix.SIGINT); err != nil {
		t.Fatal(err)
	}
	if code := g.end(t); code != 0 || time.Since(interrupted) > answerTime {
		t.Errorf("interrupted: code %d after %v\n%s", code, time.Since(interrupted), g.Err)
	}
	if got := in("cat", "/proc/net/dev"); strings.Contains(got, "sockeye0") {
		t.Errorf("the interface still exists:\n%s", got)
	}

	// The path is deleted, as by ip netns del.
	g = attached(t, prepared(t, "", "", join...))
	s.In.Close()
	s.end(t)
	if err := unix.Unmount(path, unix.MNT_DETACH); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if code := g.end(t); code != 0 {
		t.Errorf("after the removal of the path: code %d\n%s", code, g.Err)
	}
}

// pathOfItself is the path of this binary that other users can open.
func pathOfItself(t *testing.T) string {
	t.Helper()
	path, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// TestIsolatePID checks that an ordinary user can join the network namespace of an own process, and that the gateway
// exits with that process.
func TestIsolatePID(t *testing.T) {
	addAddresses(t)
	sleeper := exec.Command("unshare", "-rn", "sh", "-c", "echo ready; exec sleep 60")
	sleeper.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	out, err := sleeper.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := sleeper.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = sleeper.Process.Kill()
		_ = sleeper.Wait()
	})
	if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	pid := strconv.Itoa(sleeper.Process.Pid)
	devices := func() string {
		dev, err := os.ReadFile("/proc/" + pid + "/net/dev")
		if err != nil {
			t.Fatal(err)
		}
		return string(dev)
	}
	killed := attached(t, ordinary(t, "", "isolate", "--pid", pid))
	withoutRights(t, killed.Process.Pid, "Seccomp:\t2")
	_ = killed.Process.Kill()
	killed.end(t)
	if dev := devices(); strings.Contains(dev, "sockeye0") {
		t.Errorf("kill -9 leaves\n%s", dev)
	}
	for _, flags := range [][]string{{"--pid", pid}, {"--netns", "/proc/" + pid + "/ns/net"}} {
		g := attached(t, ordinary(t, "", append([]string{"isolate"}, flags...)...))
		if dev := devices(); !strings.Contains(dev, "sockeye0") {
			t.Errorf("%v\n%s", flags, dev)
		}
		if flags[0] == "--pid" {
			if err := g.Process.Signal(unix.SIGTERM); err != nil {
				t.Fatal(err)
			}
		} else if err := sleeper.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		if code := g.end(t); code != 0 {
			t.Errorf("code %d\n%s", code, g.Err)
		}
	}
}

// TestIsolateMetadata checks that metadata services of clouds are unreachable unless they are named.
func TestIsolateMetadata(t *testing.T) {
	addAddresses(t)
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	addresses := []string{"169.254.169.254", "fd00:ec2::254", "64:ff9b::a9fe:a9fe"}
	for _, text := range addresses {
		a := netip.MustParseAddr(text)
		address := &netlink.Addr{IPNet: &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(a.BitLen(), a.BitLen())}}
		if a.Is6() {
			address.Flags = unix.IFA_F_NODAD
		}
		if err := netlink.AddrReplace(lo, address); err != nil {
			t.Fatal(err)
		}
		awaitLocal(t, a)
		for _, network := range []string{"tcp", "udp"} {
			l, err := tellPeers(network, net.JoinHostPort(text, "7180"))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { l.Close() })
		}
		t.Cleanup(func() {
			if err := netlink.AddrDel(lo, address); err != nil {
				t.Error(err)
			}
		})
	}
	everything := []string{"--allow", "0.0.0.0/0", "--allow", "::/0", "--allow", "169.254.0.0/16"}
	for _, a := range addresses {
		at := net.JoinHostPort(a, "7180")
		for _, network := range []string{"tcp", "udp"} {
			for _, c := range []struct {
				flags []string
				ok    bool
			}{
				{nil, false},
				{everything, false},
				{append(everything, "--allow", "["+a+"]:7180"), true},
			} {
				out, stderr, code := resultOf(t, ordinary(t, "", append(append([]string{"isolate", "--verbose"}, c.flags...), "--", itself, "inside", "dial", network, at)...))
				if ok := code == 0; ok != c.ok || !ok && !strings.Contains(stderr, "cloud metadata address") {
					t.Errorf("%v %s %s: %q, code %d\n%s", c.flags, network, at, out, code, stderr)
				}
			}
		}
	}
	keepFile(t, pingGroups)
	if err := os.WriteFile(pingGroups, []byte("0 65535"), 0); err != nil {
		t.Fatal(err)
	}
	for flag, want := range map[string]int{"--allow=0.0.0.0/0": 1, "--allow=169.254.169.254": 0} {
		if out, stderr, code := resultOf(t, ordinary(t, "", "isolate", "--verbose", flag, "--", itself, "inside", "ping", "169.254.169.254")); code != want {
			t.Errorf("ping with %s: %q, code %d\n%s", flag, out, code, stderr)
		}
	}
}

// TestIsolateWithoutUserNamespaces checks that the error names the setting that forbids user namespaces.
func TestIsolateWithoutUserNamespaces(t *testing.T) {
	addAddresses(t)
	cmd := prepared(t, "", "unshare -Ur sh -c 'echo 0 >/proc/sys/user/max_user_namespaces && exec \"$@\"' sh", "isolate", "--as-root", "--", "true")
	_, stderr, code := resultOf(t, cmd)
	const want = "sockeye: create namespaces: no space left on device\nhint: raise sysctl user.max_user_namespaces, which is 0; or, inside an isolated program, start that program with --allow-userns\n"
	if stderr != want || code != 4 {
		t.Errorf("code %d\n%s", code, stderr)
	}
}
