// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/cli/command"
	"sockeye/internal/doctor"
)

// examine runs doctor as a child process and returns its findings and its exit code.
func (h *host) examine(change func(*exec.Cmd), role ...string) ([]doctor.Finding, int) {
	h.t.Helper()
	args := append(role[1:], "doctor", "--run-dir", h.run, "--policy", h.policy, "--pins", h.pins, "-o", "json")
	r := h.child(change, role[0], args...)
	var findings []doctor.Finding
	if err := json.Unmarshal([]byte(r.out), &findings); err != nil || r.err != "" {
		h.t.Fatalf("doctor: %v in %+v", err, r)
	}
	return findings, r.code
}

// TestDoctorFindings creates the condition of each finding on a real host.
func TestDoctorFindings(t *testing.T) {
	tcp, udp := "tcp [::]:1790", "udp [::]:4739"
	other := func(cmd *exec.Cmd) { asNobody(cmd) }
	for _, c := range []struct {
		name    string
		prepare func(t *testing.T, h *host)
		want    doctor.Finding
	}{
		{"no sockets", nil,
			doctor.Finding{Area: "service telemetry", Check: tcp, Result: "ok", Detail: "0 sockets"}},
		{"a member", func(_ *testing.T, h *host) { h.member(nil, tcp, udp) },
			doctor.Finding{Area: "service telemetry", Check: udp, Result: "ok", Detail: "1 socket"}},
		{"small backlog", func(_ *testing.T, h *host) { h.member(nil, tcp, udp) },
			doctor.Finding{Area: "service telemetry", Check: tcp, Result: "note", Detail: "tcp [::]:1790 of process PID (collector) has a backlog of 1", Hint: "the agent raises it when the member is registered"}},
		{"no SO_REUSEPORT", func(_ *testing.T, h *host) { h.member(nil, tcp+" alone", udp) },
			doctor.Finding{Area: "service telemetry", Check: tcp, Result: "warning", Detail: "tcp [::]:1790 of process PID (collector) lacks SO_REUSEPORT: it keeps the port for itself", Hint: "make the program set it before bind, and keep it, or use steering: lookup"}},
		{"both wildcards", func(_ *testing.T, h *host) {
			h.member(nil, "udp 0.0.0.0:4739")
			h.member(nil, udp)
		},
			doctor.Finding{Area: "service telemetry", Check: udp, Result: "warning", Detail: "0.0.0.0 and [::] are both bound: two groups, IPv4 goes to the first", Hint: "bind all members to [::], which serves IPv4 too"}},
		{"several users", func(_ *testing.T, h *host) {
			h.member(nil, "udp [::1]:4739")
			h.member(other, "udp 127.0.0.1:4739")
		},
			doctor.Finding{Area: "service telemetry", Check: udp, Result: "warning", Detail: "sockets of several users: 0, 65534", Hint: "a SO_REUSEPORT group has one user; use steering: lookup"}},
		{"not of the users", func(_ *testing.T, h *host) {
			h.write("policy.yaml", strings.Replace(twoServices, "user: root", `steering: lookup
    user: [root, daemon]
    members: [{match: {command_line: x}, slot: free}, {match: {user: daemon}, slot: free}, {match: {user: bin}, slot: free}]`, 1))
			h.member(other, "udp 127.0.0.1:4739")
		},
			doctor.Finding{Area: "service telemetry", Check: udp, Result: "warning", Detail: "udp 127.0.0.1:4739 of process PID (collector) belongs to user nobody, members to root, daemon or bin", Hint: "start the program as that user, or name the owner in user of the service"}},
		{"would be refused", func(_ *testing.T, h *host) {
			h.write("policy.yaml", strings.Replace(twoServices, "user: root", "user: root\n    members: [{match: {command_line: collector}, slot: free}]", 1))
			h.member(other, "udp 127.0.0.1:4739")
		},
			doctor.Finding{Area: "service telemetry", Check: "members", Result: "warning", Detail: "process PID (collector) would be refused: it runs as user nobody, not as root", Hint: "run it as that user, or name its user in the policy"}},
		{"would be admitted", func(_ *testing.T, h *host) {
			h.write("policy.yaml", strings.Replace(twoServices, "user: root", "user: root\n    members: [{match: {command_line: collector}, slot: free}]", 1))
			h.member(nil, udp)
			h.member(nil, udp)
		},
			doctor.Finding{Area: "service telemetry", Check: "members", Result: "ok", Detail: "2 processes with sockets: a rule matches"}},
		{"inherited sockets", func(_ *testing.T, h *host) {
			h.write("policy.yaml", strings.Replace(twoServices, "user: root", "user: root\n    members: [{match: {command_line: collector}, slot: free}]", 1))
			parent, _ := h.as("parent", collector, udp)
			childOf(h, parent)
		},
			doctor.Finding{Area: "service telemetry", Check: "members", Result: "ok", Detail: "1 process with sockets: a rule matches"}},
		{"one slot twice", func(_ *testing.T, h *host) {
			h.write("policy.yaml", strings.Replace(twoServices, "user: root", "user: root\n    members: [{match: {command_line: collector}, slot: 3}]", 1))
			h.member(nil, udp)
			h.member(nil, udp)
		},
			doctor.Finding{Area: "service telemetry", Check: "members", Result: "warning", Detail: "process PID (collector) would not get a slot: another process has slot 3", Hint: "end one of the processes, or give it another slot"}},
		{"no slot left", func(_ *testing.T, h *host) {
			h.write("policy.yaml", strings.NewReplacer("user: root", "user: root\n    members: [{match: {command_line: collector}, slot: free}]", "slots: 4", "slots: 1").Replace(twoServices))
			h.member(nil, udp)
			h.member(nil, udp)
		},
			doctor.Finding{Area: "service telemetry", Check: "members", Result: "warning", Detail: "process PID (collector) would not get a slot: the service has 1", Hint: "raise slots in the policy"}},
		{"no rule", func(_ *testing.T, h *host) {
			h.write("policy.yaml", strings.Replace(twoServices, "user: root", "user: root\n    members: [{match: {command_line: nfacctd}, slot: free}]", 1))
			h.member(nil, udp)
		},
			doctor.Finding{Area: "service telemetry", Check: "members", Result: "note", Detail: "1 process with sockets: no rule matches", Hint: "add a rule to members, or use sockeye register"}},
		{"would have no slot", func(_ *testing.T, h *host) {
			h.write("policy.yaml", strings.Replace(twoServices, "user: root", "user: root\n    members: [{match: {command_line: collector}, slot: environment}]", 1))
			h.member(nil, udp)
		},
			doctor.Finding{Area: "service telemetry", Check: "members", Result: "warning", Detail: "process PID (collector) would not get a slot: the environment has no SOCKEYE_SLOT"}},
		{"another group", func(_ *testing.T, h *host) { h.member(nil, "udp [::1]:4739") },
			doctor.Finding{Area: "service telemetry", Check: udp, Result: "warning", Detail: "udp [::1]:4739 of process PID (collector) can take the packets to ::1 past the service", Hint: "end the process, or make it bind the address of the listener"}},
		{"a connection that was reset", func(t *testing.T, h *host) {
			h.member(nil, udp)
			config := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) (err error) {
				return errors.Join(raw.Control(func(fd uintptr) {
					err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1)
				}), err)
			}}
			config.SetMultipathTCP(false)
			l, err := config.Listen(t.Context(), "tcp", "[::]:1790")
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { l.Close() })
			client, err := net.Dial("tcp", "127.0.0.1:1790")
			if err != nil {
				t.Fatal(err)
			}
			server, err := l.Accept()
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { server.Close() })
			if err := errors.Join(client.(*net.TCPConn).SetLinger(0), client.Close()); err != nil {
				t.Fatal(err)
			}
		},
			doctor.Finding{Area: "service telemetry", Check: tcp, Result: "ok", Detail: "1 socket"}},
		{"MPTCP", func(_ *testing.T, h *host) { h.member(nil, tcp+" mptcp") },
			doctor.Finding{Area: "service telemetry", Check: tcp, Result: "warning", Detail: "mptcp [::]:1790 of process PID (collector) is MPTCP, which the kernel does not steer", Hint: "programs in Go: GODEBUG=multipathtcp=0"}},
		{"foreign sk_lookup", func(t *testing.T, _ *host) {
			id := load(t, ebpf.SkLookup, true)
			t.Setenv("FOREIGN", id)
		},
			doctor.Finding{Area: "service telemetry", Check: "foreign programs", Result: "warning", Detail: "SkLookup program FOREIGN (stranger) of another owner", Hint: "if it decides about the same ports, the last one attached wins"}},
		{"foreign sk_reuseport", func(t *testing.T, _ *host) {
			id := load(t, ebpf.SkReuseport, false)
			t.Setenv("FOREIGN", id)
		},
			doctor.Finding{Area: "service telemetry", Check: "foreign programs", Result: "note", Detail: "SkReuseport program FOREIGN (stranger) of another owner, attached to sockets somewhere on this host", Hint: "if it decides about the same ports, the last one attached wins"}},
		{"small somaxconn", func(t *testing.T, _ *host) { sysctl(t, "net/core/somaxconn", "128") },
			doctor.Finding{Area: "sysctl", Check: "net.core.somaxconn", Result: "warning", Detail: "128; it bounds the members' backlogs", Hint: "sysctl -w net.core.somaxconn=4096, or more than devices that may connect at once"}},
		{"tcp_migrate_req", func(t *testing.T, _ *host) { sysctl(t, "net/ipv4/tcp_migrate_req", "1") },
			doctor.Finding{Area: "sysctl", Check: "net.ipv4.tcp_migrate_req", Result: "ok", Detail: "1; the program decides about migration"}},
		{"no bpffs", func(_ *testing.T, h *host) { h.pins = h.dir + "/bpf/sockeye" },
			doctor.Finding{Area: "mounts", Check: "bpffs", Result: "note", Detail: "DIR/bpf is not a bpffs, the agent mounts one"}},
		{"no TUN", func(t *testing.T, _ *host) {
			if err := unix.Mount("none", "/dev/net", "tmpfs", 0, ""); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if err := unix.Unmount("/dev/net", 0); err != nil {
					t.Error(err)
				}
			})
		},
			doctor.Finding{Area: "host", Check: "/dev/net/tun", Result: "note", Detail: "sockeye isolate needs this device", Hint: "modprobe tun; in a container, add the device to the container"}},
		{"TUN", func(t *testing.T, _ *host) { makeTUN(t, 0o666) }, doctor.Finding{Area: "host", Check: "/dev/net/tun", Result: "ok"}},
		{"TUN of root", func(t *testing.T, _ *host) { makeTUN(t, 0o600) },
			doctor.Finding{Area: "host", Check: "/dev/net/tun", Result: "note", Detail: "mode 0600: sockeye isolate works only for root, and for the owner and the group of the device", Hint: "chmod 0666 /dev/net/tun, as udev does"}},
		{"open pin directory", func(t *testing.T, h *host) {
			if err := os.Mkdir(h.pins, 0o700); err != nil {
				t.Fatal(err)
			}
			if err := os.Chmod(h.pins, 0o755); err != nil {
				t.Fatal(err)
			}
		},
			doctor.Finding{Area: "mounts", Check: "pin directory", Result: "warning", Detail: "PINS has mode 0755", Hint: "chmod 700 PINS"}},
		{"pin directory elsewhere", func(t *testing.T, h *host) {
			h.pins = h.dir + "/elsewhere"
			if err := os.Mkdir(h.pins, 0o755); err != nil {
				t.Fatal(err)
			}
		},
			doctor.Finding{Area: "mounts", Check: "pin directory", Result: "failure", Code: 2, Detail: "DIR/elsewhere is not in a bpffs", Hint: "give --pins a directory in a bpffs, as in /sys/fs/bpf/sockeye"}},
		{"no agent", nil,
			doctor.Finding{Area: "agent", Check: "running", Result: "note", Detail: "no agent answers on DIR/run/agent.sock", Hint: "start it with sockeye agent, or name its directory with --run-dir; services that were set up are still steered"}},
		{"no namespace", func(_ *testing.T, h *host) {
			h.write("policy.yaml", strings.Replace(twoServices, "user: root", "netns: DIR/netns", 1))
		},
			doctor.Finding{Area: "service telemetry", Check: "network namespace", Result: "failure", Detail: "open network namespace: open DIR/netns: no such file or directory", Hint: "create it, or correct netns", Code: 2}},
		{"broken policy", func(_ *testing.T, h *host) { h.write("policy.yaml", "services: []\nspeed: fast\n") },
			doctor.Finding{Area: "policy", Check: "DIR/policy.yaml", Result: "failure", Detail: "2 errors; its services are not checked", Hint: "sockeye check DIR/policy.yaml", Code: 2}},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := newHost(t, twoServices)
			if c.prepare != nil {
				c.prepare(t, h)
			}
			findings, code := h.examine(nil, "sockeye")
			for i := range findings {
				f := &findings[i]
				f.Check, f.Hint = h.plain(f.Check), h.plain(f.Hint)
				f.Detail = h.plain(processOf.ReplaceAllString(f.Detail, "process PID (collector)"))
				if id := os.Getenv("FOREIGN"); id != "" {
					f.Detail = strings.ReplaceAll(f.Detail, " "+id+" ", " FOREIGN ")
				}
			}
			if !slices.Contains(findings, c.want) {
				t.Errorf("want %+v in", c.want)
				for _, f := range findings {
					t.Errorf("%+v", f)
				}
			}
			if code != c.want.Code {
				t.Errorf("exit code %d, want %d", code, c.want.Code)
			}
		})
	}
}

// TestDoctorFailures checks that doctor names a missing capability or mount and exits with its code.
func TestDoctorFailures(t *testing.T) {
	h := newHost(t, twoServices)
	find := func(findings []doctor.Finding, want doctor.Finding) {
		t.Helper()
		if !slices.Contains(findings, want) {
			t.Errorf("want %+v in\n%+v", want, findings)
		}
	}
	right := "run as root, or give these capabilities to the agent's service"
	findings, code := h.examine(nil, "limited", fmt.Sprint(unix.CAP_SYS_PTRACE))
	find(findings, doctor.Finding{Area: "rights", Check: "capabilities", Result: "failure", Code: 4, Detail: "missing CAP_SYS_PTRACE", Hint: right})
	if code != 4 {
		t.Errorf("exit code %d, want 4", code)
	}
	findings, code = h.examine(asNobody, "sockeye")
	find(findings, doctor.Finding{Area: "rights", Check: "capabilities", Result: "failure", Code: 4, Hint: right,
		Detail: "missing CAP_BPF, CAP_NET_ADMIN, CAP_NET_RAW, CAP_PERFMON, CAP_SYS_PTRACE, CAP_DAC_READ_SEARCH, CAP_CHOWN"})
	find(findings, doctor.Finding{Area: "kernel", Check: "sk_reuseport programs", Result: "warning", Detail: "not known: the check needs CAP_BPF, CAP_NET_ADMIN, CAP_PERFMON"})
	find(findings, doctor.Finding{Area: "service telemetry", Check: "foreign programs", Result: "warning", Detail: "not known: the check needs CAP_SYS_ADMIN", Hint: "run sockeye doctor as root"})
	for _, f := range findings {
		if strings.Contains(f.Detail, "load program") || strings.Contains(f.Detail, "MEMLOCK") || strings.Contains(f.Detail, "detect support") || strings.Contains(f.Detail, "PROG_QUERY") {
			t.Errorf("the text of a library: %+v", f)
		}
	}
	if code != 4 {
		t.Errorf("exit code %d, want 4", code)
	}
	findings, code = h.examine(func(cmd *exec.Cmd) { cmd.SysProcAttr.Cloneflags = unix.CLONE_NEWNS }, "without-cgroups")
	find(findings, doctor.Finding{Area: "mounts", Check: "cgroup v2", Result: "failure", Code: 3, Detail: "find cgroup v2: it is not mounted",
		Hint: "mount -t cgroup2 none /sys/fs/cgroup/unified"})
	if code != 3 {
		t.Errorf("exit code %d, want 3", code)
	}
}

// makeTUN makes the device of TUN interfaces with a mode, for the test.
func makeTUN(t *testing.T, mode os.FileMode) {
	t.Helper()
	if err := unix.Mount("none", "/dev/net", "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount("/dev/net", 0); err != nil {
			t.Error(err)
		}
	})
	const device = "/dev/net/tun" // character device 10:200 (Documentation/admin-guide/devices.txt)
	if err := errors.Join(unix.Mknod(device, unix.S_IFCHR|0o600, int(unix.Mkdev(10, 200))), os.Chmod(device, mode)); err != nil {
		t.Fatal(err)
	}
}

// TestDoctorOfSilentAgent checks that doctor does not wait for an agent that accepts connections and does not answer, as one that is stopped.
func TestDoctorOfSilentAgent(t *testing.T) {
	dir := t.TempDir()
	l, err := net.Listen("unix", api.SocketPath(dir))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c := &commands{&command.Command{RunDir: dir}}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	known, failed := c.known(ctx)
	if known != nil || !errors.Is(failed, api.ErrSilent) {
		t.Fatalf("%+v, %v", known, failed)
	}
	want := doctor.Finding{Area: "agent", Check: "running", Result: "warning", Detail: "the agent does not answer on " + api.SocketPath(dir), Hint: "it is stopped or overloaded: look at its process, and at its log"}
	if got := c.askAgent(t.Context(), nil, failed); len(got) != 1 || got[0] != want {
		t.Errorf("%+v, want %+v", got, want)
	}
	// The command support gives each command less time after the first one without an answer.
	if packed, late := c.outputOf(t.Context(), []string{"status"}, []string{"--run-dir", dir, "-o", "json"}, 50*time.Millisecond); !late || !strings.Contains(packed.Problem, "the agent does not answer") {
		t.Errorf("support: late %v, %+v", late, packed)
	}
	if packed, late := c.outputOf(t.Context(), []string{"version"}, []string{"-o", "json"}, time.Minute); late || packed.Problem != "" {
		t.Errorf("support: late %v, %+v", late, packed)
	}
}

// TestDoctorAsksAgent checks that doctor reports the missing listeners of candidates that the agent has found.
func TestDoctorAsksAgent(t *testing.T) {
	h, _ := running(t)
	findings, code := h.examine(nil, "sockeye")
	for _, want := range []doctor.Finding{
		{Area: "agent", Check: "running", Result: "ok", Detail: fmt.Sprintf("pid %d", h.agent.Process.Pid)},
		{Area: "service telemetry", Check: "tcp [::]:1790", Result: "ok", Detail: "4 sockets"},
		{Area: "service spare", Check: "port steering", Result: "warning", Detail: "the members' user is not known before the first member; until then the ports are not held", Hint: "set user of the service"},
	} {
		if !slices.Contains(findings, want) {
			t.Errorf("want %+v in\n%+v", want, findings)
		}
	}
	if code != 0 {
		t.Errorf("exit code %d", code)
	}
	r := h.sockeye("doctor", "--policy", h.policy, "--pins", h.pins)
	if r.code != 0 || !strings.HasPrefix(r.out, "RESULT ") || !strings.Contains(r.out, "\nwarning ") {
		t.Errorf("%+v", r)
	}
	for line := range strings.Lines(r.out) {
		if strings.TrimRight(line, " \n") != strings.TrimSuffix(line, "\n") {
			t.Errorf("the line %q has trailing spaces", line)
		}
	}
}

// load loads a program that is not Sockeye's and returns its id.
func load(t *testing.T, kind ebpf.ProgramType, attach bool) string {
	t.Helper()
	spec := &ebpf.ProgramSpec{Name: "stranger", Type: kind, License: "GPL", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 1), asm.Return()}}
	if attach {
		spec.AttachType = ebpf.AttachSkLookup
	}
	p, err := ebpf.NewProgram(spec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	if attach {
		netns, err := os.Open("/proc/thread-self/ns/net")
		if err != nil {
			t.Fatal(err)
		}
		defer netns.Close()
		l, err := link.AttachNetNs(int(netns.Fd()), p)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
	}
	info, err := p.Info()
	if err != nil {
		t.Fatal(err)
	}
	id, _ := info.ID()
	return fmt.Sprint(uint32(id))
}

// sysctl sets a sysctl of the tests' network namespace until the test ends.
func sysctl(t *testing.T, name, value string) {
	t.Helper()
	path := "/proc/sys/" + name
	old, err := os.ReadFile(path)
	if err == nil {
		err = os.WriteFile(path, []byte(value), 0)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.WriteFile(path, old, 0); err != nil {
			t.Error(err)
		}
	})
}
