// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/fleet/forward"
	"sockeye/internal/testenv"
)

const everyDomain = `services:
  telemetry:
    slots: 3
    listeners:
      - {protocol: tcp, address: "[::]:1790"}
      - {protocol: udp, address: "[::]:4739"}
    user: nobody
    cgroup: CGROUP
  logs:
    slots: 2
    steering: lookup
    user: nobody
    listeners:
      - {protocol: udp, address: "0.0.0.0:5514", member_ports: 25514-25515}
    cgroup: CGROUP
tune:
  - name: near
    cgroup: CGROUP/work
    match: {port: 1790}
    set: {sndbuf: 150KB, initial_cwnd: {explore: [10, 20]}}
    trial: {control: 10%}
trace:
  - {name: bmp, cgroup: CGROUP/work, group_by: remote/24}
bigtcp:
  - {interface: hard0, ipv6: 128KB}
fleet: {host: one, interfaces: [hard0], addresses: [192.0.2.53], file: hosts.yaml}
metrics: {listen: "127.0.0.1:9732"}
`

// hardenedHosts has a host that is reached through the tunnel.
const hardenedHosts = `epoch: 1
nonce: 7
hosts:
  - {name: one, addresses: [198.51.100.1]}
  - {name: two, addresses: [203.0.113.2]}
`

// workCgroup creates a cgroup for members below the tests' cgroup.
func workCgroup(t testing.TB) (dir string, change func(*exec.Cmd)) {
	t.Helper()
	dir = filepath.Join(testenv.Cgroup(), "work")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		f.Close()
		for range 500 {
			if err = unix.Rmdir(dir); err == nil {
				return
			}
			time.Sleep(10 * time.Millisecond)
		}
		t.Errorf("remove %s: %v", dir, err)
	})
	return dir, func(cmd *exec.Cmd) {
		asNobody(cmd)
		cmd.SysProcAttr.UseCgroupFD, cmd.SysProcAttr.CgroupFD = true, int(f.Fd())
	}
}

// routeThrough sets up a veth pair, and leads the route to host two through it.
func routeThrough(name, peer string) error {
	far, err := netlink.LinkByName(peer)
	if err != nil {
		return err
	}
	link, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	near := &net.IPNet{IP: net.IP{198, 51, 100, 1}, Mask: net.CIDRMask(24, 32)}
	if err := errors.Join(netlink.LinkSetUp(far), netlink.LinkSetUp(link), netlink.AddrAdd(link, &netlink.Addr{IPNet: near})); err != nil {
		return err
	}
	to := &net.IPNet{IP: net.IP{203, 0, 113, 0}, Mask: net.CIDRMask(24, 32)}
	return netlink.RouteAdd(&netlink.Route{Dst: to, Gw: net.IP{198, 51, 100, 254}, LinkIndex: link.Attrs().Index})
}

// TestHardenedUnit runs the agent in the sandbox of the installed unit, with rules of every domain, and runs every
// command.
func TestHardenedUnit(t *testing.T) {
	_, inWork := workCgroup(t)
	veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "hard0"}, PeerName: "hard1"}
	ownServices(t)
	if err := netlink.LinkAdd(veth); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := netlink.LinkDel(veth); err != nil {
			t.Error(err)
		}
		if tunnel, err := netlink.LinkByName(forward.TunnelName); err == nil {
			if err := netlink.LinkDel(tunnel); err != nil {
				t.Error(err)
			}
		}
	})
	if err := routeThrough("hard0", "hard1"); err != nil {
		t.Fatal(err)
	}
	h := newHost(t, everyDomain)
	h.write("hosts.yaml", hardenedHosts)
	h.sandbox = h.harden()
	h.start()

	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", h.agent.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"\nNoNewPrivs:\t1\n", "\nSeccomp:\t2\n", "\nCapBnd:\t000000c000083005\n"} {
		if !strings.Contains(string(text), want) {
			t.Errorf("the agent's status lacks %q:\n%s", want, text)
		}
	}
	var pids []int
	var ends []func()
	for slot := range 3 {
		pid, end := h.member(inWork, "tcp [::]:1790", "udp [::]:4739")
		must[api.Membership](h, "register", "--service", "telemetry", "--slot", strconv.Itoa(slot), "--pid", strconv.Itoa(pid))
		pids, ends = append(pids, pid), append(ends, end)
	}
	ok := func(args ...string) string {
		t.Helper()
		r := h.sockeye(args...)
		if r.code != 0 || r.err != "" {
			t.Errorf("sockeye %q: %+v", args, r)
		}
		return r.out
	}
	epoch := uint64(1)
	whole := func(when string) {
		t.Helper()
		h.eventually(when+": the table of the fleet", func() bool {
			s := must[api.FleetStatus](h, "fleet")
			return s.Epoch == epoch && s.Connected && len(s.Hosts) == 2 && len(s.Problems) == 0 && s.Hosts[1].Path == "tunnel"
		})
		status := must[api.Status](h, "status")
		if status.PolicyProblem != "" {
			t.Errorf("%s: %s", when, status.PolicyProblem)
		}
		for _, s := range status.Services {
			if s.Problem != "" || !s.PortsSteered {
				t.Errorf("%s: service %s: held %v, %s", when, s.Name, s.PortsSteered, s.Problem)
			}
		}
		for _, c := range status.Tune {
			if !c.Attached || c.Problem != "" {
				t.Errorf("%s: tune %s: attached %v, %s", when, c.Cgroup, c.Attached, c.Problem)
			}
		}
		for _, c := range status.Trace {
			if !c.Attached || c.Problem != "" {
				t.Errorf("%s: trace %s: attached %v, %s", when, c.Cgroup, c.Attached, c.Problem)
			}
		}
		if len(status.Services) != 2 || len(status.Tune) != 1 || len(status.Trace) != 1 || len(status.BigTCP) != 1 || status.BigTCP[0].Problem != "" || status.BigTCP[0].Applied != 1 {
			t.Errorf("%s: %+v", when, status)
		}
		answers := make(map[string]bool)
		for n := 1; n <= 40; n++ {
			tcp, udp := ask("tcp", fmt.Sprintf("127.0.0.%d", n)), ask("udp", fmt.Sprintf("127.0.0.%d", n))
			if tcp != udp {
				t.Errorf("%s: device %d: tcp by %s, udp by %s", when, n, tcp, udp)
			}
			answers[tcp] = true
		}
		for _, pid := range pids {
			if !answers[strconv.Itoa(pid)] {
				t.Errorf("%s: member %d has no devices: %v", when, pid, answers)
			}
		}
	}
	whole("started")

	var d net.Dialer
	d.SetMultipathTCP(false)
	open, err := d.Dial("tcp", "127.0.0.1:1790")
	if err != nil {
		t.Fatal(err)
	}
	defer open.Close()
	commands := [][]string{
		{"status"}, {"slots"}, {"devices"}, {"where", "192.0.2.1"}, {"why", "192.0.2.1"}, {"devices", "--missing"}, {"check", h.policy}, {"plan"}, {"sockets"},
		{"tune"}, {"tune", "explain", "127.0.0.1:1790", "127.0.0.2:999"}, {"tune", "trial", "near"}, {"tune", "learned"},
		{"apply", "--live"}, {"tune", "revert"}, {"trace"}, {"trace", "slow"}, {"bigtcp"}, {"fleet"}, {"version"}, {"metrics"},
		{"unregister", "--service", "telemetry", "--slot", "2"}, {"register", "--service", "telemetry", "--slot", "2", "--pid", strconv.Itoa(pids[2])},
	}
	for _, args := range commands {
		if args[0] == "metrics" {
			answer, err := http.Get("http://127.0.0.1:9732/metrics")
			if err != nil {
				t.Error(err)
				continue
			}
			body, err := io.ReadAll(answer.Body)
			answer.Body.Close()
			if err != nil || answer.StatusCode != 200 || !strings.Contains(string(body), "sockeye_tune_attached") {
				t.Errorf("metrics: %s, %v: %.300s", answer.Status, err, body)
			}
			continue
		}
		out := ok(args...)
		if strings.Contains(out, "not permitted") || strings.Contains(out, "denied") || strings.Contains(out, "read-only") {
			t.Errorf("sockeye %q: %s", args, out)
		}
	}
	// The command of ExecReload= runs in the same sandbox.
	reload := func() result { return h.child(nil, "hardened", h.sandbox, "sockeye", "--run-dir", h.run, "apply") }
	h.write("policy.yaml", strings.Replace(everyDomain, "150KB", "160KB", 1)+"# applied\n")
	if r := reload(); r.code != 0 || !strings.Contains(r.out, "160") {
		t.Errorf("reload: %+v", r)
	}
	h.write("policy.yaml", strings.Replace(everyDomain, "150KB", "nonsense", 1))
	if r := reload(); r.code != 2 {
		t.Errorf("reload of a broken policy: %+v", r)
	}
	h.write("policy.yaml", everyDomain)
	ok("apply")
	ok("apply", "--previous")
	ok("apply")
	whole("applied")

	// The next agent adopts a keeper in the same sandbox.
	h.kill()
	ends[1]()
	h.start()
	pid, _ := h.member(inWork, "tcp [::]:1790", "udp [::]:4739")
	must[api.Membership](h, "register", "--service", "telemetry", "--slot", "1", "--pid", strconv.Itoa(pid))
	pids[1] = pid
	whole("restarted")

	// The agent has dropped its rights, and opens the data path of the fleet again: with another policy, and with a table before and
	// after a stop.
	h.write("policy.yaml", strings.Replace(everyDomain, "[192.0.2.53]", `[192.0.2.53, "2001:db8::53"]`, 1))
	if out := ok("apply"); !strings.Contains(out, "fleet main") {
		t.Errorf("apply: %s", out)
	}
	whole("another fleet")
	epoch = 2
	h.write("hosts.yaml", strings.Replace(hardenedHosts, "epoch: 1", "epoch: 2", 1))
	whole("another table")
	if err := h.agent.Process.Signal(unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	h.agent.Wait()
	h.start()
	whole("stopped and started")
	log, err := os.ReadFile(h.log)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(log)) {
		if strings.Contains(line, `sndbuf: must be a size such as 150KB, is \"nonsense\"`) {
			continue // the policy that was refused above
		}
		if strings.Contains(line, "level=WARN") || strings.Contains(line, "level=ERROR") {
			t.Error(line)
		}
	}
}

// attacks lists the actions that a compromised agent may try. Each returns nil if it succeeds.
var attacks = map[string]func(dir string) error{
	"write to /etc":                    func(string) error { return os.WriteFile("/etc/sockeye-test-attack", nil, 0o600) },
	"write to a directory of root":     func(dir string) error { return os.WriteFile(filepath.Join(dir, "attack"), nil, 0o600) },
	"change the policy":                func(dir string) error { return os.WriteFile(filepath.Join(dir, "policy.yaml"), nil, 0o600) },
	"open the memory of its parent":    func(string) error { return openFor(fmt.Sprintf("/proc/%d/mem", os.Getppid())) },
	"open a kernel parameter":          func(string) error { return openFor("/proc/sys/kernel/core_pattern") },
	"create a cgroup":                  func(string) error { return os.Mkdir(filepath.Join(testenv.Cgroup(), "attack"), 0o755) },
	"pin outside of the pin directory": func(dir string) error { return os.Mkdir(filepath.Join(dir, "bpffs-attack"), 0o700) },
	"create a user namespace":          func(string) error { return unix.Unshare(unix.CLONE_NEWUSER) },
	"create a mount namespace":         func(string) error { return unix.Unshare(unix.CLONE_NEWNS) },
	"mount":                            func(string) error { return unix.Mount("tmpfs", "/tmp", "tmpfs", 0, "") },
	"load a kernel module":             func(string) error { return called(unix.SYS_INIT_MODULE) },
	"trace its parent":                 func(string) error { return unix.PtraceSeize(os.Getppid()) },
	"write to its parent's memory":     func(string) error { return called(unix.SYS_PROCESS_VM_WRITEV) },
	"become another user":              func(string) error { return unix.Setresuid(1, 1, 1) },
	"create a set-user-ID file":        func(dir string) error { return unix.Chmod(filepath.Join(dir, "state"), 0o4700) },
	"map memory to write and execute":  mapped,
	"open a packet socket":             func(string) error { return socketOf(unix.AF_PACKET) },
	"open a vsock socket":              func(string) error { return socketOf(unix.AF_VSOCK) },
	"open an io_uring":                 func(string) error { return called(unix.SYS_IO_URING_SETUP) },
	"set the clock":                    func(string) error { return unix.Settimeofday(&unix.Timeval{Sec: 1}) },
	"reboot":                           func(string) error { return unix.Reboot(unix.LINUX_REBOOT_CMD_CAD_OFF) },
	"read the kernel's addresses":      func(string) error { return readable("/proc/kallsyms") },
	"kill a process of another user":   killed,
	"make a device": func(dir string) error {
		return unix.Mknod(filepath.Join(dir, "state", "mem"), unix.S_IFCHR|0o600, 1<<8|1)
	},
	"open physical memory": func(string) error { return openFor("/dev/mem") },
}

func openFor(path string) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err == nil {
		f.Close()
	}
	return err
}

func readable(path string) error {
	text, err := os.ReadFile(path)
	if err == nil && len(text) == 0 {
		return os.ErrNotExist
	}
	return err
}

func socketOf(family int) error {
	fd, err := unix.Socket(family, unix.SOCK_DGRAM, 0)
	if err == nil {
		unix.Close(fd)
	}
	return err
}

// called makes a system call without arguments. A call that the filter permits fails with another error.
func called(number uintptr) error {
	_, _, errno := unix.Syscall6(number, 0, 0, 0, 0, 0, 0)
	if errno == unix.EPERM || errno == unix.ENOSYS {
		return errno
	}
	return nil
}

func mapped(string) error {
	page, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_WRITE|unix.PROT_EXEC, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err == nil {
		_ = unix.Munmap(page)
	}
	return err
}

// killed sends signal 0 to a process of user nobody. The file victim in dir has its PID.
func killed(dir string) error {
	text, err := os.ReadFile(filepath.Join(dir, "victim"))
	if err != nil {
		return nil
	}
	pid, err := strconv.Atoi(string(text))
	if err != nil {
		return nil
	}
	return unix.Kill(pid, 0)
}

// tryAttacks prints the attacks that succeed.
func tryAttacks(args []string) {
	for name, attack := range attacks {
		if attack(args[0]) == nil {
			fmt.Println(name)
		}
	}
	os.Exit(0)
}

// TestHardenedExecutable is that the agent admits members by their executable in the unit, whose filter rejects openat2(2).
func TestHardenedExecutable(t *testing.T) {
	h := newHost(t, theft("steering: lookup", ownPorts, "user: root", "cgroup: CGROUP", "members: [{match: {executable: DIR/program}, namespaces: any, slot: 0}]"))
	program := h.program("program", 0o755)
	h.sandbox = h.harden()
	h.start()
	member, _ := h.member(func(cmd *exec.Cmd) { cmd.Path = program }, firstSpecs...)
	h.served(0, member)
}

// TestHardenedUnitHolds checks that a process with the capabilities of a compromised agent cannot gain control of the
// host.
func TestHardenedUnitHolds(t *testing.T) {
	h := newHost(t, "services: {}\n")
	sandbox := h.harden()
	victim, _ := h.member(asNobody)
	h.write("victim", strconv.Itoa(victim))
	r := h.child(nil, "hardened", sandbox, "attacks", h.dir)
	if r.code != 0 || r.err != "" {
		t.Fatalf("%+v", r)
	}
	for name := range strings.Lines(r.out) {
		t.Errorf("succeeds: %s", name)
	}
}

// TestHardenedDropIns applies policies that need more than the unit permits: agent and doctor name the drop-in, and
// with the drop-in the policy is applied.
func TestHardenedDropIns(t *testing.T) {
	top := fmt.Sprintf("/sockeye-hardened-%d", os.Getpid())
	t.Cleanup(func() {
		if err := unix.Rmdir(filepath.Join(filepath.Dir(testenv.Cgroup()), top)); err != nil && !errors.Is(err, unix.ENOENT) {
			t.Error(err)
		}
	})
	for _, c := range []struct {
		dropIn, policy string
		starts         bool // without the drop-in, too
	}{
		{"netns.conf", strings.Replace(oneService, "user: root", "user: root\n    netns: DIR/blue", 1), false},
		{"ports.conf", strings.Replace(oneService, "1790", "514", 1), true},
		{"cgroups.conf", "tune: [{name: top, cgroup: " + top + ", set: {sndbuf: 150KB}}]\n", true},
	} {
		t.Run(c.dropIn, func(t *testing.T) {
			h := newHost(t, c.policy)
			h.newNetns("blue", func() error {
				lo, err := netlink.LinkByName("lo")
				if err == nil {
					err = netlink.LinkSetUp(lo)
				}
				return err
			})
			problems := func() (list []string) {
				status := must[api.Status](h, "status")
				for _, s := range status.Services {
					if !s.PortsSteered {
						list = append(list, s.Problem+": "+s.Hint)
					}
				}
				for _, s := range status.Tune {
					if !s.Attached {
						list = append(list, s.Problem+": "+s.Hint)
					}
				}
				return list
			}
			doctor := func() string { return h.sockeye("doctor", "--policy", h.policy, "--pins", h.pins).out }
			if out := doctor(); !strings.Contains(out, c.dropIn) {
				t.Errorf("without an agent, doctor names no drop-in:\n%s", out)
			}
			h.sandbox = h.harden()
			if !c.starts {
				r := h.child(nil, "hardened", append([]string{h.sandbox, "sockeye"}, h.agentArgs()...)...)
				if r.code != 4 || !strings.Contains(r.err, c.dropIn+" /etc/systemd/system/sockeye.service.d/") {
					t.Errorf("the agent does not name the drop-in: %+v", r)
				}
			} else {
				h.start()
				if list := problems(); len(list) != 1 || !strings.Contains(list[0], c.dropIn+" /etc/systemd/system/") {
					t.Errorf("problems %q, want the drop-in", list)
				}
				if out := doctor(); !strings.Contains(out, "the agent lacks it") || !strings.Contains(out, c.dropIn) {
					t.Errorf("doctor names no drop-in:\n%s", out)
				}
				h.kill()
			}
			h.sandbox = h.harden(c.dropIn)
			h.start()
			if list := problems(); len(list) > 0 {
				t.Errorf("with the drop-in: %q", list)
			}
			if out := doctor(); strings.Contains(out, "sockeye.service.d/") {
				t.Errorf("with the drop-in doctor names it:\n%s", out)
			}
			if c.dropIn == "cgroups.conf" {
				h.write("policy.yaml", "tune: []\n")
				must[api.Plan](h, "apply") // removes the cgroup
			}
		})
	}
}
