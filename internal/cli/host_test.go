// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/cgroup"
	"sockeye/internal/cli/command"
	"sockeye/internal/config"
	"sockeye/internal/isolate"
	"sockeye/internal/statedir"
	"sockeye/internal/steer/keeper"
	"sockeye/internal/testenv"
)

// TestMain runs the roles that tests start as separate processes: an agent drops capabilities for good, and members
// are found by process id.
func TestMain(m *testing.M) {
	var role string
	if len(os.Args) > 1 {
		role = os.Args[1]
	}
	if specs, ok := os.LookupEnv(disguised); ok {
		becomeMember(strings.Split(specs, ","))
	}
	switch role {
	case "sockeye":
		os.Exit(Main(os.Args[2:], Host()))
	case keeper.Command, isolate.InsideCommand:
		os.Exit(Main(os.Args[1:], Host()))
	case oldKeeperCommand:
		os.Exit(Main(append([]string{keeper.Command}, os.Args[2:]...), Host()))
	case "inside":
		becomeInside(os.Args[2:])
	case "without-landlock":
		becomeWithoutLandlock(os.Args[2:])
	case "member":
		becomeMember(os.Args[2:])
	case "renamed":
		becomeRenamed(os.Args[2:])
	case "paused":
		pause()
	case "parent":
		becomeParent(os.Args[2:])
	case "duplicate":
		becomeTwin(os.Args[2:])
	case "connector":
		becomeConnector(os.Args[2:])
	case "binder":
		becomeBinder(os.Args[2:])
	case "limited":
		becomeLimited(os.Args[2:])
	case "thief":
		becomeThief(os.Args[2:])
	case "in-cgroup":
		becomeRooted(os.Args[2:])
	case "few-files":
		becomeFew(os.Args[2:])
	case "hardened":
		becomeHardened(os.Args[2:])
	case "attacks":
		tryAttacks(os.Args[2:])
	case "without-cgroups":
		becomeCgroupless(os.Args[2:])
	case "other-bpffs":
		becomeOtherBPFFS(os.Args[2], os.Args[3:])
	}
	testenv.Main(m)
}

// becomeMember opens sockets given as "tcp [::]:1790 flag flag", prints a line when they are open, and answers each
// request with its process id.
func becomeMember(specs []string) {
	for _, spec := range specs {
		if err := openAs(spec); err != nil {
			fmt.Println(spec, err)
			os.Exit(1)
		}
	}
	pause()
}

func pause() {
	fmt.Println("ready")
	for {
		_ = unix.Pause()
	}
}

// becomeRenamed opens sockets and later changes its command line, as nfacctd does.
func becomeRenamed(specs []string) {
	for _, spec := range specs {
		if err := openAs(spec); err != nil {
			fmt.Println(spec, err)
			os.Exit(1)
		}
	}
	time.Sleep(200 * time.Millisecond)
	fmt.Println(unix.Exec("/proc/self/exe", []string{"late name", "paused"}, os.Environ()))
}

func openAs(spec string) error {
	fields := strings.Fields(spec)
	address, flags := netip.MustParseAddrPort(fields[1]), fields[2:]
	has := func(flag string) bool { return slices.Contains(flags, flag) }
	domain, kind, protocol := unix.AF_INET6, unix.SOCK_STREAM, unix.IPPROTO_TCP
	if address.Addr().Is4() {
		domain = unix.AF_INET
	}
	if fields[0] == "udp" {
		kind, protocol = unix.SOCK_DGRAM, unix.IPPROTO_UDP
	}
	if has("mptcp") {
		protocol = unix.IPPROTO_MPTCP
	}
	fd, err := unix.Socket(domain, kind, protocol)
	if err != nil {
		return err
	}
	share := func() error { return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1) }
	if !has("alone") && !has("late") {
		err = share()
	}
	if has("v6only") {
		err = errors.Join(err, unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1))
	}
	var local, peer unix.Sockaddr = &unix.SockaddrInet6{Port: int(address.Port()), Addr: address.Addr().As16()}, &unix.SockaddrInet6{Port: 9, Addr: netip.IPv6Loopback().As16()}
	if domain == unix.AF_INET {
		local, peer = &unix.SockaddrInet4{Port: int(address.Port()), Addr: address.Addr().As4()}, &unix.SockaddrInet4{Port: 9, Addr: [4]byte{127, 0, 0, 1}}
	}
	err = errors.Join(err, unix.Bind(fd, local))
	if has("late") {
		err = errors.Join(err, share())
	}
	if has("connected") {
		err = errors.Join(err, unix.Connect(fd, peer))
	}
	if err != nil {
		return err
	}
	pid := []byte(strconv.Itoa(os.Getpid()))
	if kind == unix.SOCK_DGRAM {
		go func() {
			buffer := make([]byte, 64)
			for {
				if _, from, err := unix.Recvfrom(fd, buffer, 0); err == nil && from != nil {
					_ = unix.Sendto(fd, pid, 0, from)
				}
			}
		}()
		return nil
	}
	if has("deaf") {
		return nil
	}
	if err := unix.Listen(fd, 1); err != nil {
		return err
	}
	if has("handover") {
		// If the child kept the listener, connections to it would never be answered.
		unix.CloseOnExec(fd)
	}
	go func() {
		for {
			if conn, _, err := unix.Accept(fd); err == nil {
				_, _ = unix.Write(conn, pid)
				if has("handover") {
					handOver(conn)
					continue
				}
				// The client closes first: a member in TIME_WAIT would keep the port from later tests.
				go func() {
					_, _ = unix.Read(conn, make([]byte, 1))
					unix.Close(conn)
				}()
			}
		}
	}()
	return nil
}

// children keeps the children of handOver: the garbage collector would close their input, and they would exit.
var children []*exec.Cmd

// handOver gives a connection to a child process and closes its own descriptor, as a server with one process per
// connection does. The child exits with its parent.
func handOver(conn int) {
	file := os.NewFile(uintptr(conn), "connection")
	defer file.Close()
	child := exec.Command("cat")
	child.ExtraFiles = []*os.File{file}
	children = append(children, child)
	_, err := child.StdinPipe()
	if err == nil {
		err = child.Start()
	}
	if err != nil {
		fmt.Println(err)
	}
}

// becomeLimited runs a command without the capability whose number is args[0].
func becomeLimited(args []string) {
	runtime.LockOSThread()
	number, err := strconv.Atoi(args[0])
	if err == nil {
		err = unix.Prctl(unix.PR_CAPBSET_DROP, uintptr(number), 0, 0, 0)
	}
	if err == nil {
		err = unix.Exec("/proc/self/exe", append([]string{"sockeye", "sockeye"}, args[1:]...), os.Environ())
	}
	fmt.Println(err)
	os.Exit(1)
}

// becomeFew runs a command with the descriptor limit args[0].
func becomeFew(args []string) {
	n, err := strconv.ParseUint(args[0], 10, 32)
	if err == nil {
		err = unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: n, Max: n})
	}
	if err == nil {
		err = unix.Exec("/proc/self/exe", append([]string{"sockeye", "sockeye"}, args[1:]...), os.Environ())
	}
	fmt.Println(err)
	os.Exit(1)
}

// becomeCgroupless runs a command in a mount namespace without cgroup v2.
func becomeCgroupless(args []string) {
	mount, err := cgroup.Mount()
	for err == nil {
		if err = unix.Unmount(mount, unix.MNT_DETACH); err == nil {
			mount, err = cgroup.Mount()
		}
	}
	os.Exit(Main(args, Host()))
}

// becomeOtherBPFFS runs a command with another bpffs at the place of the agent's, and an empty pin directory in it.
func becomeOtherBPFFS(pins string, args []string) {
	err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")
	if err == nil {
		err = unix.Mount("bpffs", filepath.Dir(pins), "bpf", 0, "mode=0700")
	}
	if err == nil {
		err = os.Mkdir(pins, 0o700)
	}
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	os.Exit(Main(args, Host()))
}

// host has the directories of one agent.
type host struct {
	t                          testing.TB
	dir, run, state, pins, log string
	policy                     string
	files                      int    // descriptor limit of the agent; 0: the limit of the test
	sandbox                    string // of the agent: file that harden wrote, "" for none
	agent                      *exec.Cmd
}

// newHost creates a host with a policy file. In the policy, DIR is replaced with the directory of the host, and
// CGROUP with the cgroup of the tests.
func newHost(t testing.TB, policy string) *host {
	t.Helper()
	dir, err := os.MkdirTemp("", "sockeye")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	h := &host{t: t, dir: dir, run: dir + "/run", state: dir + "/state", log: dir + "/log",
		pins: testenv.BPFFS(t) + "/sockeye", policy: dir + "/policy.yaml"}
	h.write("policy.yaml", policy)
	return h
}

func (h *host) write(name, text string) string {
	h.t.Helper()
	path := filepath.Join(h.dir, name)
	text = strings.NewReplacer("DIR", h.dir, "CGROUP", testenv.CgroupPath()).Replace(text)
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		h.t.Fatal(err)
	}
	return path
}

func (h *host) agentArgs() []string {
	return []string{"agent", "--run-dir", h.run, "--state-dir", h.state, "--pins", h.pins, "--policy", h.policy}
}

// start runs an agent until the test ends or kill is called.
func (h *host) start(extra ...string) {
	h.t.Helper()
	if info, err := os.Stat(h.policy); err == nil && info.Mode().IsRegular() {
		text, err := os.ReadFile(h.policy)
		var policy *config.Policy
		if err == nil {
			policy, err = config.Parse(text, h.policy)
		}
		if err == nil && slices.ContainsFunc(policy.Services, func(s config.Service) bool { return s.Cgroup == "/" }) {
			h.t.Fatal("a service attaches to the cgroup of the host: add cgroup: CGROUP")
		}
	}
	command := append(h.agentArgs(), extra...)
	switch {
	case h.files > 0:
		h.startBy(process("few-files", append([]string{strconv.Itoa(h.files)}, command...)...))
	case h.sandbox != "":
		h.startBy(process("hardened", append([]string{h.sandbox, "sockeye"}, command...)...))
	default:
		h.startBy(process("sockeye", command...))
	}
}

// startBy is start with a prepared command.
func (h *host) startBy(cmd *exec.Cmd) {
	h.t.Helper()
	log, err := os.OpenFile(h.log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		h.t.Fatal(err)
	}
	defer log.Close()
	first := h.agent == nil
	h.agent = cmd
	h.agent.Stdout, h.agent.Stderr = log, log
	if err := h.agent.Start(); err != nil {
		h.t.Fatal(err)
	}
	if first {
		h.t.Cleanup(func() {
			if h.t.Failed() {
				text, _ := os.ReadFile(h.log)
				h.t.Logf("the agent's log:\n%s", text)
			}
			h.kill()
			if err := statedir.CheckRemove(h.state); statedir.Is(h.state) == nil && err != nil {
				h.t.Errorf("reset --state refuses the agent's own files: %v", err)
			}
			if r := h.sockeye("reset", "--state-dir", h.state, "--pins", h.pins); r.code != 0 {
				h.t.Errorf("reset: %+v", r)
			}
		})
	}
	h.eventually("the agent answers", func() bool { return h.sockeye("status").code == 0 })
}

func (h *host) kill() {
	h.agent.Process.Kill()
	h.agent.Wait()
}

// patience bounds the wait for an event on a busy host.
const patience = time.Minute

func (h *host) eventually(what string, ok func() bool) {
	h.t.Helper()
	for start := time.Now(); !ok(); time.Sleep(testenv.Backoff(start)) {
		if time.Since(start) > patience {
			text, _ := os.ReadFile(h.log)
			h.t.Fatalf("not within %v: %s\n%s", patience, what, text)
		}
	}
}

// process prepares this binary in another role.
func process(role string, args ...string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe", append([]string{role}, args...)...)
	cmd.Args[0] = "sockeye"
	if role == "member" {
		cmd.Args[0] = "collector"
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{}
	return cmd
}

// member starts a process with the given sockets, and returns its process id and a function that ends it. change may
// be nil.
func (h *host) member(change func(*exec.Cmd), specs ...string) (pid int, end func()) {
	h.t.Helper()
	return h.as("member", change, specs...)
}

func (h *host) as(role string, change func(*exec.Cmd), specs ...string) (pid int, end func()) {
	h.t.Helper()
	cmd := process(role, specs...)
	if change != nil {
		change(cmd)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		h.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		h.t.Fatal(err)
	}
	end = func() {
		cmd.Process.Kill()
		cmd.Wait()
	}
	h.t.Cleanup(end)
	line, _ := bufio.NewReader(out).ReadString('\n')
	if line != "ready\n" {
		h.t.Fatalf("member %q: %s", specs, line)
	}
	return cmd.Process.Pid, end
}

type result struct {
	code     int
	out, err string
}

// sockeye runs a command in this process.
func (h *host) sockeye(args ...string) result {
	var out, err bytes.Buffer
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	code := Run(ctx, append([]string{"--run-dir", h.run}, args...), command.Environment{
		Out: &out, Err: &err, In: strings.NewReader(""), Now: time.Now,
		Exec: func(string, []string, []string) error { return unix.ENOEXEC },
	})
	return result{code, out.String(), err.String()}
}

// child runs a command in a child process.
func (h *host) child(change func(*exec.Cmd), role string, args ...string) result {
	h.t.Helper()
	cmd := process(role, args...)
	if change != nil {
		change(cmd)
	}
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	var exit *exec.ExitError
	if err := cmd.Run(); err != nil && !errors.As(err, &exit) {
		h.t.Fatal(err)
	}
	return result{cmd.ProcessState.ExitCode(), out.String(), errs.String()}
}

func asNobody(cmd *exec.Cmd) {
	cmd.SysProcAttr.Credential = &syscall.Credential{Uid: 65534, Gid: 65534}
}

// must runs a command that must succeed and decodes its JSON.
func must[T any](h *host, args ...string) T {
	h.t.Helper()
	var v T
	r := h.sockeye(append(args, "-o", "json")...)
	if r.code != 0 || r.err != "" {
		h.t.Fatalf("sockeye %q: %+v", args, r)
	}
	if err := json.Unmarshal([]byte(r.out), &v); err != nil {
		h.t.Fatalf("sockeye %q: %v in %s", args, err, r.out)
	}
	return v
}

// plain replaces values that differ between runs.
func (h *host) plain(text string, pids ...int) string {
	text = strings.NewReplacer(h.dir, "DIR", h.pins, "PINS", testenv.CgroupPath(), "CGROUP").Replace(text)
	for _, pid := range pids { // no part of a longer number, and no port
		text = regexp.MustCompile(`(^|[^\w:.-])`+strconv.Itoa(pid)+`($|[^\w-])`).ReplaceAllString(text, "${1}PID$2")
	}
	return text
}

// refused runs a command that must fail in the same way with table and JSON output.
func (h *host) refused(code int, message, hint string, pids []int, args ...string) {
	h.t.Helper()
	r := h.sockeye(args...)
	want := "sockeye: " + message + "\n"
	if hint != "" {
		want += "hint: " + hint + "\n"
	}
	if got := h.plain(r.err, pids...); r.code != code || got != want || r.out != "" {
		h.t.Errorf("sockeye %q:\ngot  %d %s%s\nwant %d %s", args, r.code, got, r.out, code, want)
	}
	// The flag comes before "--"; after it, the flag would belong to the program.
	r = h.sockeye(append([]string{"-o", "json"}, args...)...)
	h.isFailure(r, code, message, hint, pids...)
}

func (h *host) isFailure(r result, code int, message, hint string, pids ...int) {
	h.t.Helper()
	var f api.Failure
	d := json.NewDecoder(strings.NewReader(h.plain(r.out, pids...)))
	d.DisallowUnknownFields()
	if err := d.Decode(&f); err != nil {
		h.t.Errorf("%v in %q", err, r.out)
	}
	if want := (api.Failure{Error: message, Hint: hint, Code: code}); f != want || r.code != code || r.err != "" {
		h.t.Errorf("got  %d %+v %s\nwant %d %+v", r.code, f, r.err, code, want)
	}
}

// standing is the state that invalid input must not change: the services in the agent's status, and the members that
// receive packets.
type standing struct {
	Status   []api.ServiceStatus
	Slots    []api.SlotStatus
	Steering map[string]string
}

func (h *host) standing() string {
	h.t.Helper()
	s := standing{Steering: make(map[string]string)}
	s.Status = must[api.Status](h, "status").Services
	for i := range s.Status {
		s.Status[i].Bypass = nil // sockets that a test opens beside the service change nothing
	}
	s.Slots = must[[]api.SlotStatus](h, "slots")
	for i := range s.Slots {
		s.Slots[i].Counts = api.Counts{} // requests of this function are counted, too
		s.Slots[i].Since = nil           // not exact: computed from two clocks
	}
	for n := 1; n <= 6; n++ {
		for _, network := range []string{"tcp", "udp"} {
			address := fmt.Sprintf("127.0.0.%d", n)
			s.Steering[network+" "+address] = ask(network, address)
		}
	}
	text, err := json.MarshalIndent(s, "", " ")
	if err != nil {
		h.t.Fatal(err)
	}
	return string(text)
}

// unchanged fails the test if the state differs from standing.
func (h *host) unchanged(before string) {
	h.t.Helper()
	after := h.standing()
	if after == before {
		return
	}
	was, is := strings.Split(before, "\n"), strings.Split(after, "\n")
	for _, line := range was {
		if !slices.Contains(is, line) {
			h.t.Errorf("changed: was %s", line)
		}
	}
	for _, line := range is {
		if !slices.Contains(was, line) {
			h.t.Errorf("changed: is %s", line)
		}
	}
	h.t.Error("the running services changed")
}

// ask sends a request from an address to the telemetry service, and returns the member that answered.
func ask(network, address string) string {
	if network == "udp" {
		return dial(network, address, "4739")
	}
	return dial(network, address, "1790")
}

func dial(network, address, port string) string {
	local := net.Addr(&net.TCPAddr{IP: net.ParseIP(address)})
	if network == "udp" {
		local = &net.UDPAddr{IP: net.ParseIP(address)}
	}
	d := net.Dialer{LocalAddr: local, Timeout: patience}
	d.SetMultipathTCP(false)
	conn, err := d.Dial(network, net.JoinHostPort("127.0.0.1", port))
	if err != nil {
		return reason(err)
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		return err.Error()
	}
	if network == "udp" {
		if _, err := conn.Write([]byte("?")); err != nil {
			return reason(err)
		}
	}
	answer := make([]byte, 64)
	n, err := conn.Read(answer)
	if err != nil && !errors.Is(err, io.EOF) {
		return reason(err)
	}
	return string(answer[:n])
}

func reason(err error) string {
	var errno syscall.Errno
	if errors.As(err, &errno) {
		return errno.Error()
	}
	return err.Error()
}

const twoServices = `services:
  telemetry:
    slots: 4
    listeners:
      - {protocol: tcp, address: "[::]:1790"}
      - {protocol: udp, address: "[::]:4739"}
    user: root
    cgroup: CGROUP
    device_map: devices.csv
  spare:
    slots: 2
    listeners:
      - {protocol: tcp, address: "[::]:1791"}
      - {protocol: udp, address: "[::]:4740"}
    cgroup: CGROUP
`

// running starts an agent with two services: telemetry has members in slots 0 to 2 of 4, spare has no member. It
// returns the process ids of the members.
func running(t testing.TB, extra ...string) (*host, []int) {
	t.Helper()
	h := newHost(t, twoServices)
	h.write("devices.csv", "127.0.0.1,edge\n127.0.0.2,edge\n")
	h.start(extra...)
	var pids []int
	for slot := range 3 {
		pid, _ := h.member(nil, "tcp [::]:1790", "udp [::]:4739")
		must[api.Membership](h, "register", "--service", "telemetry", "--slot", strconv.Itoa(slot), "--pid", strconv.Itoa(pid))
		pids = append(pids, pid)
	}
	return h, pids
}

func testCgroup() string { return testenv.Cgroup() }
