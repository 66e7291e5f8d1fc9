// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/internal/gateway"
	"sockeye/internal/gateway/access"
	"sockeye/internal/testenv"
	"sockeye/internal/tun"
	"sockeye/lab"
	"sockeye/room"
)

func TestMain(m *testing.M) { testenv.Main(m) }

var (
	guest4 = netip.MustParseAddr("10.95.0.1")
	host4  = netip.MustParseAddr("10.96.0.1") // of the host, on lo
)

// listen opens a listener on a free port of an IPv4 address.
func listen(a netip.Addr) (fd int, at netip.AddrPort, err error) {
	list, err := gateway.Listen([]access.ForwardSpec{{Address: a, Protocol: unix.IPPROTO_TCP}})
	if err != nil {
		return -1, at, err
	}
	own, err := unix.Getsockname(list[0].FD)
	if err != nil {
		return -1, at, err
	}
	return list[0].FD, netip.AddrPortFrom(a, uint16(own.(*unix.SockaddrInet4).Port)), nil
}

var anywhere = access.Outbound{All: true}

// roleVariable has the role in which the test binary enters a sandbox.
const roleVariable = "SOCKEYE_TEST_SANDBOX"

// TestSandboxRole is the entry point of the process in a sandbox. Without roleVariable, it returns immediately.
func TestSandboxRole(*testing.T) {
	role, name, _ := strings.Cut(os.Getenv(roleVariable), " ")
	switch role {
	case "":
	case "try":
		tryAll()
	case "die":
		enterOrExit(Gateway{Outbound: anywhere})
		call := deadlyCalls[name]
		_, _, errno := unix.RawSyscall6(call[0], call[1], call[2], 0, 0, 0, 0)
		fmt.Println("alive:", errno)
		os.Exit(3)
	case "landlock":
		tryLandlock()
	case "gateway":
		if err := confinedGateway(); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		os.Exit(0)
	}
}

func enterOrExit(s Gateway) {
	missing, err := s.Enter()
	if err != nil || slices.Contains(missing, "seccomp") {
		fmt.Println("enter:", missing, err)
		os.Exit(1)
	}
}

// inRole runs the test binary in a role, with files as descriptors from 3 on.
func inRole(t *testing.T, role string, files ...*os.File) *exec.Cmd {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, "/proc/self/exe", "-test.run=^TestSandboxRole$")
	cmd.Env = append(os.Environ(), roleVariable+"="+role)
	cmd.ExtraFiles = files
	return cmd
}

// tries lists system calls of an attacker, each with the error that it must fail with, or 0 for none.
var tries = map[string]struct {
	try  func() error
	want syscall.Errno
}{
	"open": {func() error {
		_, err := unix.Open("/etc/hostname", unix.O_RDONLY, 0)
		return err
	}, unix.EPERM},
	"create":         {func() error { _, err := unix.Open("/tmp/x", unix.O_CREAT|unix.O_WRONLY, 0o600); return err }, unix.EPERM},
	"stat":           {func() error { return unix.Stat("/", &unix.Stat_t{}) }, unix.EPERM},
	"unlink":         {func() error { return unix.Unlink("/nosuch") }, unix.EPERM},
	"Unix socket":    {trySocket(unix.AF_UNIX, unix.SOCK_STREAM, 0), unix.EPERM},
	"netlink socket": {trySocket(unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_ROUTE), unix.EPERM},
	"packet socket":  {trySocket(unix.AF_PACKET, unix.SOCK_RAW, 0), unix.EPERM},
	"raw socket":     {trySocket(unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_ICMP), unix.EPERM},
	"MPTCP socket":   {trySocket(unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_MPTCP), unix.EPERM},
	"TCP socket":     {trySocket(unix.AF_INET6, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0), 0},
	"UDP socket":     {trySocket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0), 0},
	"bind":           {func() error { return unix.Bind(0, &unix.SockaddrInet4{}) }, unix.EPERM},
	"listen":         {func() error { return unix.Listen(0, 1) }, unix.EPERM},
	"kill parent":    {func() error { return unix.Kill(os.Getppid(), 0) }, unix.EPERM},
	"kill group":     {func() error { return unix.Kill(0, 0) }, unix.EPERM},
	"kill itself":    {func() error { return unix.Kill(os.Getpid(), 0) }, 0},
	"kill a thread of another": {func() error {
		return unix.Tgkill(1, 1, 0)
	}, unix.EPERM},
	"new code": {func() error {
		_, err := unix.Mmap(-1, 0, 4096, unix.PROT_EXEC, unix.MAP_ANON|unix.MAP_PRIVATE)
		return err
	}, unix.EPERM},
	"type on the terminal": {func() error { return unix.IoctlSetInt(0, unix.TIOCSTI, 0) }, unix.EPERM},
	"TUN":                  {func() error { return unix.IoctlSetInt(0, unix.TUNSETOFFLOAD, 0) }, unix.EPERM},
	"capset":               {func() error { return unix.Capset(&unix.CapUserHeader{}, nil) }, unix.EPERM},
	"setuid":               {errnoOf(unix.SYS_SETUID, 0), unix.EPERM},
	"second process":       {errnoOf(unix.SYS_CLONE, uintptr(unix.SIGCHLD)), unix.EPERM},
	"clone3":               {errnoOf(unix.SYS_CLONE3, 0), unix.ENOSYS},
	"dumpable":             {errnoOf(unix.SYS_PRCTL, unix.PR_SET_DUMPABLE), unix.EPERM},
	"memfd":                {errnoOf(unix.SYS_MEMFD_CREATE, 0), unix.EPERM},
	"unknown":              {errnoOf(1000, 0), unix.EPERM},
}

func trySocket(domain, kind, protocol int) func() error {
	return func() error {
		fd, err := unix.Socket(domain, kind, protocol)
		if err == nil {
			unix.Close(fd)
		}
		return err
	}
}

func errnoOf(number, argument uintptr) func() error {
	return func() error {
		if _, _, errno := unix.RawSyscall6(number, argument, 0, 0, 0, 0, 0); errno != 0 {
			return errno
		}
		return nil
	}
}

// tryAll makes all system calls from threads that started before and after the sandbox was set up. It prints the
// threads and calls that succeeded unexpectedly, and exits when its standard input is closed.
func tryAll() {
	const threads = 8
	start, results := make(chan struct{}), make(chan map[string]string, threads)
	on := func() {
		runtime.LockOSThread()
		<-start
		wrong := map[string]string{}
		for name, t := range tries {
			err := t.try()
			if t.want == 0 && err != nil || t.want != 0 && !errors.Is(err, t.want) {
				wrong[name] = fmt.Sprint(err)
			}
		}
		results <- wrong
		select {} // keep the thread
	}
	for range threads / 2 {
		go on()
	}
	enterOrExit(Gateway{Outbound: anywhere})
	for range threads / 2 {
		go on()
	}
	close(start)
	wrong := map[string]string{}
	for range threads {
		maps.Copy(wrong, <-results)
	}
	runtime.GC()
	if err := json.NewEncoder(os.Stdout).Encode(wrong); err != nil {
		os.Exit(1)
	}
	_, _ = io.Copy(io.Discard, os.Stdin)
	os.Exit(0)
}

// TestSandboxRefuses checks that system calls that a gateway does not need fail in every thread, and that no thread
// has a capability.
func TestSandboxRefuses(t *testing.T) {
	cmd := inRole(t, "try")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var wrong map[string]string
	if err := json.NewDecoder(out).Decode(&wrong); err != nil {
		t.Fatalf("the process ended: %v", err)
	}
	for name, err := range wrong {
		t.Errorf("%s: %s, want %v", name, err, tries[name].want)
	}
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", cmd.Process.Pid))
	if err != nil || len(files) < 8 {
		t.Fatalf("%d threads, %v", len(files), err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, want := range []string{
			"CapInh:\t0000000000000000", "CapPrm:\t0000000000000000", "CapEff:\t0000000000000000", "CapAmb:\t0000000000000000",
			"NoNewPrivs:\t1", "Seccomp:\t2",
		} {
			if !bytes.Contains(text, []byte(want)) {
				t.Errorf("%s has no %q", file, want)
			}
		}
	}
	in.Close()
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
}

// deadlyCalls lists some of the system calls that kill the process, with two arguments each.
var deadlyCalls = map[string][3]uintptr{
	"execve":   {unix.SYS_EXECVE},
	"execveat": {unix.SYS_EXECVEAT},
	"ptrace":   {unix.SYS_PTRACE, unix.PTRACE_ATTACH, 1},
	"readv":    {unix.SYS_PROCESS_VM_READV, 1},
	"bpf":      {unix.SYS_BPF},
	"mount":    {unix.SYS_MOUNT},
	"unshare":  {unix.SYS_UNSHARE, unix.CLONE_NEWUSER},
	"setns":    {unix.SYS_SETNS},
	"io_uring": {unix.SYS_IO_URING_SETUP, 1},
}

// TestSandboxKills checks that a system call that only an attacker makes kills the process with SIGSYS.
func TestSandboxKills(t *testing.T) {
	for name := range deadlyCalls {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			out, err := inRole(t, "die "+name).CombinedOutput()
			exit, ok := errors.AsType[*exec.ExitError](err)
			if !ok || exit.Sys().(syscall.WaitStatus).Signal() != unix.SIGSYS {
				t.Errorf("%v, want SIGSYS: %s", err, out)
			}
		})
	}
}

// tryLandlock prints one word for each action that Landlock alone refuses.
func tryLandlock() {
	var at [2]netip.AddrPort
	for i := range at {
		var err error
		if _, at[i], err = listen(netip.AddrFrom4([4]byte{127, 0, 0, 1})); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
	}
	box := Gateway{Outbound: access.Outbound{Rules: []access.Rule{{
		Prefix: netip.PrefixFrom(at[0].Addr(), 32), Protocol: unix.IPPROTO_TCP, First: at[0].Port(), Last: at[0].Port(),
	}}}}
	if err := dropCapabilities(); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	if err := box.landlock(); isUnsupported(err) {
		fmt.Println("kernel: no landlock:", err)
		os.Exit(0)
	} else if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	_, _, err := listen(netip.AddrFrom4([4]byte{127, 0, 0, 1}))
	got := []any{errors.Is(err, unix.EACCES)}
	for _, to := range at {
		err := trySocket(unix.AF_INET, unix.SOCK_STREAM, 0)()
		if fd, failed := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0); failed == nil {
			err = unix.Connect(fd, &unix.SockaddrInet4{Addr: to.Addr().As4(), Port: int(to.Port())})
		}
		got = append(got, errors.Is(err, unix.EACCES))
	}
	// The last action runs in several threads.
	for range 4 {
		denied := make(chan bool)
		go func() {
			runtime.LockOSThread()
			_, err := os.Open("/")
			denied <- errors.Is(err, unix.EACCES)
		}()
		got = append(got, <-denied)
	}
	fmt.Println(got...)
	os.Exit(0)
}

// TestLandlock checks that Landlock alone, without the seccomp filter, refuses the file system, new listeners, and
// ports that are not allowed.
func TestLandlock(t *testing.T) {
	out, err := inRole(t, "landlock").CombinedOutput()
	text := strings.TrimSpace(string(out))
	if reason, ok := strings.CutPrefix(text, "kernel: "); ok {
		t.Skip("kernel: " + reason)
	}
	abi, _, _ := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, 0, 0, unix.LANDLOCK_CREATE_RULESET_VERSION)
	if want := fmt.Sprintf("%v false %v true true true true", abi >= 4, abi >= 4); err != nil || text != want {
		t.Errorf("%q, %v, want %q", text, err, want)
	}
}

func TestHandled(t *testing.T) {
	for _, test := range []struct {
		abi  int
		want ruleset
	}{
		{1, ruleset{files: 0x1fff}},
		{2, ruleset{files: 0x3fff}},
		{3, ruleset{files: 0x7fff}},
		{4, ruleset{files: 0x7fff, net: 1}},
		{5, ruleset{files: 0xffff, net: 1}},
		{6, ruleset{files: 0xffff, net: 1, scoped: 1}},
		{99, ruleset{files: 0xffff, net: 1, scoped: 1}},
	} {
		if got, _ := (Gateway{Outbound: anywhere}).handled(test.abi); got != test.want {
			t.Errorf("ABI %d: %+v, want %+v", test.abi, got, test.want)
		}
	}
	for _, test := range []struct {
		rules string
		dns   []access.NameServer
		net   uint64
		ports []uint16
	}{
		{"", nil, 3, nil},
		{"", []access.NameServer{{}}, 3, []uint16{53}},
		{"10.0.0.0/8:80-81/tcp 10.0.0.0/8:90 10.0.0.0/8/udp 10.0.0.0/8/icmp", nil, 3, []uint16{80, 81, 90}},
		{"10.0.0.0/8:80/tcp 10.0.0.0/8", nil, 1, nil},
		{"10.0.0.0/8:1-1024", nil, 3, nil},
		{"10.0.0.0/8:1-1025", nil, 1, nil},
		{"10.0.0.0/8:1-1024 10.0.0.0/8:2000", nil, 1, nil},
	} {
		out := access.Outbound{DNS: test.dns}
		for _, text := range strings.Fields(test.rules) {
			r, err := access.ParseRule(text)
			if err != nil {
				t.Fatal(err)
			}
			out.Rules = append(out.Rules, r)
		}
		got, ports := (Gateway{Outbound: out}).handled(4)
		if got.net != test.net || test.ports != nil && !slices.Equal(ports, test.ports) || test.net == 1 && ports != nil {
			t.Errorf("%s: %+v, ports %v", test.rules, got, ports)
		}
	}
}

// confinedGateway runs a gateway in its sandbox: descriptor 3 is the TUN device, descriptor 4 a listener. It exits
// when its standard input is closed. Garbage collections and threads that start and exit run all the time.
func confinedGateway() error {
	kernel, err := room.Calibrate()
	if err != nil {
		return err
	}
	for _, fd := range []int{3, 4} {
		if err := unix.SetNonblock(fd, true); err != nil {
			return err
		}
	}
	g, err := gateway.New(gateway.Config{
		TUN: 3, MTU: 65520, Guest4: guest4, Outbound: anywhere, Kernel: kernel,
		Forwards: []gateway.Forward{{FD: 4, Protocol: unix.IPPROTO_TCP, Port: 1790}},
	})
	if err != nil {
		return err
	}
	child := exec.Command("/proc/self/exe", "-test.run=^$")
	child.Env = append(os.Environ(), roleVariable+"=")
	if err := child.Start(); err != nil {
		return err
	}
	enterOrExit(Gateway{Child: child.Process.Pid, Outbound: anywhere})
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- g.Run(ctx) }()
	for range 4 {
		go func() {
			for n := 0; ctx.Err() == nil; n++ {
				go func() {
					runtime.LockOSThread() // and never unlocked: the thread ends
					keep = make([]byte, 1<<20)
				}()
				if n%8 == 0 {
					runtime.GC()
				}
				time.Sleep(time.Millisecond)
			}
		}()
	}
	fmt.Println("ready")
	_, err = io.Copy(io.Discard, os.Stdin)
	stop()
	return errors.Join(err, <-ended, child.Wait())
}

var keep []byte

// TestSandboxedGateway checks connections from and to the guest through a gateway in its sandbox, while the Go
// runtime uses all of its system calls.
func TestSandboxedGateway(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	l, err := lab.New(ctx, lab.Options{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	guest, err := l.Namespace("guest")
	if err != nil {
		t.Fatal(err)
	}
	var device int
	if err := guest.Do(func() (err error) {
		device, err = tun.Open(tun.Interface{Name: "gw0", MTU: 65520, Addresses: []netip.Addr{guest4}})
		return err
	}); err != nil {
		t.Fatal(err)
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.AddrReplace(lo, &netlink.Addr{IPNet: &net.IPNet{IP: host4.AsSlice(), Mask: net.CIDRMask(32, 32)}}); err != nil {
		t.Fatal(err)
	}
	inbound, published, err := listen(host4)
	if err != nil {
		t.Fatal(err)
	}
	files := []*os.File{os.NewFile(uintptr(device), "tun"), os.NewFile(uintptr(inbound), "listener")}
	cmd := inRole(t, "gateway", files...)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		f.Close()
	}
	ready := make([]byte, 6)
	if _, err := io.ReadFull(out, ready); err != nil {
		t.Fatalf("the gateway ended: %v", err)
	}
	outside, err := net.Listen("tcp4", net.JoinHostPort(host4.String(), "0"))
	if err != nil {
		t.Fatal(err)
	}
	defer outside.Close()
	var inside net.Listener
	if err := guest.Do(func() (err error) { inside, err = net.Listen("tcp4", ":1790"); return err }); err != nil {
		t.Fatal(err)
	}
	defer inside.Close()
	for _, listener := range []net.Listener{outside, inside} {
		go echoBack(listener)
	}
	data := bytes.Repeat([]byte("0123456789abcdef"), 1<<14)
	for end := time.Now().Add(2 * time.Second); time.Now().Before(end); {
		var conn net.Conn
		err := guest.Do(func() (err error) {
			conn, err = (&net.Dialer{Timeout: 20 * time.Second}).Dial("tcp4", outside.Addr().String())
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		exchange(t, conn, data)
		if conn, err = net.DialTimeout("tcp4", published.String(), 20*time.Second); err != nil {
			t.Fatal(err)
		}
		exchange(t, conn, data)
	}
	in.Close()
	if rest, _ := io.ReadAll(out); len(rest) > 0 {
		t.Errorf("%s", rest)
	}
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
}

// echoBack returns the data that it receives.
func echoBack(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer c.Close()
			_, _ = io.Copy(c, c)
		}()
	}
}

func exchange(t *testing.T, c net.Conn, data []byte) {
	t.Helper()
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	go func() {
		_, _ = c.Write(data)
		_ = c.(*net.TCPConn).CloseWrite()
	}()
	got, err := io.ReadAll(c)
	if err != nil || !bytes.Equal(got, data) {
		t.Fatalf("received %d of %d bytes: %v", len(got), len(data), err)
	}
}

// TestFilter checks that no jump leads beyond the end of the filter, and that no system call is listed twice: the
// second entry would have no effect.
func TestFilter(t *testing.T) {
	for _, s := range []Gateway{{}, {Child: 7, Outbound: anywhere}, {Listens: true}} {
		p := s.filter(1)
		for i, instruction := range p {
			if instruction.Code&0x07 == unix.BPF_JMP && i+1+int(max(instruction.Jt, instruction.Jf)) >= len(p) {
				t.Errorf("%+v: instruction %d jumps beyond the end", s, i)
			}
		}
		seen := slices.Concat(fatalCalls, archFatal)
		for _, c := range s.calls(1) {
			if slices.Contains(seen, c.number) {
				t.Errorf("%+v: call %d is listed twice", s, c.number)
			}
			seen = append(seen, c.number)
		}
	}
	for _, allowUserns := range []bool{false, true} {
		p := programFilter(allowUserns)
		for i, instruction := range p {
			if instruction.Code&0x07 == unix.BPF_JMP && i+1+int(max(instruction.Jt, instruction.Jf)) >= len(p) {
				t.Errorf("program filter: instruction %d jumps beyond the end", i)
			}
		}
	}
}
