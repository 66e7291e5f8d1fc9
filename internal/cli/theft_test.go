// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/cgroup"
	"sockeye/internal/testenv"
)

// The tests in this file try to occupy slots without permission. Each method succeeded in an earlier version.

// becomeThief opens sockets with the method args[0], then waits like a member.
func becomeThief(args []string) {
	var err error
	switch specs := args[1:]; args[0] {
	case "create": // create sockets, and send them over the socket with descriptor 3
		err = handSockets(3, specs)
		if err == nil {
			os.Exit(0)
		}
	case "handed": // use sockets that another process created
		err = takeSockets(3, specs)
		if err == nil {
			pause()
		}
	case "mount": // mount specs[0] over specs[1], and execute it
		if err = unix.Mount(specs[0], specs[1], "", unix.MS_BIND, ""); err == nil {
			err = unix.Exec(specs[1], append([]string{"collector", "member"}, specs[2:]...), os.Environ())
		}
	}
	fmt.Println(args[0], err)
	os.Exit(1)
}

func parseSpec(spec string) (domain, kind int, local unix.Sockaddr) {
	fields := strings.Fields(spec)
	address := netip.MustParseAddrPort(fields[1])
	kind = unix.SOCK_STREAM
	if fields[0] == "udp" {
		kind = unix.SOCK_DGRAM
	}
	if address.Addr().Is4() {
		return unix.AF_INET, kind, &unix.SockaddrInet4{Port: int(address.Port()), Addr: address.Addr().As4()}
	}
	return unix.AF_INET6, kind, &unix.SockaddrInet6{Port: int(address.Port()), Addr: address.Addr().As16()}
}

func handSockets(to int, specs []string) error {
	var fds []int
	for _, spec := range specs {
		domain, kind, _ := parseSpec(spec)
		fd, err := unix.Socket(domain, kind, 0)
		if err != nil {
			return err
		}
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1); err != nil {
			return err
		}
		fds = append(fds, fd)
	}
	return unix.Sendmsg(to, []byte("x"), unix.UnixRights(fds...), nil, 0)
}

// takeSockets receives sockets and binds them. Each socket belongs to the network namespace of its creator.
func takeSockets(from int, specs []string) error {
	oob := make([]byte, unix.CmsgSpace(4*len(specs)))
	_, n, _, _, err := unix.Recvmsg(from, make([]byte, 1), oob, 0)
	if err != nil {
		return err
	}
	messages, err := unix.ParseSocketControlMessage(oob[:n])
	if err != nil || len(messages) != 1 {
		return fmt.Errorf("%d messages, %w", len(messages), err)
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil {
		return err
	}
	for i, fd := range fds {
		_, kind, local := parseSpec(specs[i])
		if err := unix.Bind(fd, local); err != nil {
			return err
		}
		if kind == unix.SOCK_STREAM {
			if err := unix.Listen(fd, 1); err != nil {
				return err
			}
		}
	}
	return nil
}

// becomeRooted runs an agent whose cgroup is the root of the hierarchy that it sees, as in a container.
func becomeRooted(args []string) {
	mount, err := cgroup.Mount()
	if err == nil {
		err = unix.Unmount(mount, unix.MNT_DETACH)
	}
	if err == nil {
		err = unix.Mount("cgroup2", mount, "cgroup2", 0, "")
	}
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	os.Exit(Main(args, Host()))
}

// startRooted starts an agent that sees the tests' cgroup as the root.
func (h *host) startRooted() {
	h.t.Helper()
	cmd := process("in-cgroup", h.agentArgs()...)
	cmd.SysProcAttr.Cloneflags = unix.CLONE_NEWCGROUP | unix.CLONE_NEWNS
	h.startBy(cmd)
}

// inCgroup starts a process in a new cgroup below the tests' cgroup.
func inCgroup(t *testing.T, path string) func(*exec.Cmd) {
	t.Helper()
	dir := filepath.Join(testenv.Cgroup(), path)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	group, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { group.Close() })
	return func(cmd *exec.Cmd) {
		cmd.SysProcAttr.UseCgroupFD, cmd.SysProcAttr.CgroupFD = true, int(group.Fd())
	}
}

// both combines changes to a process.
func both(changes ...func(*exec.Cmd)) func(*exec.Cmd) {
	return func(cmd *exec.Cmd) {
		for _, change := range changes {
			change(cmd)
		}
	}
}

// asRootInside runs a process as root of a new user namespace, and as nobody outside.
func asRootInside(cmd *exec.Cmd) {
	cmd.SysProcAttr.Cloneflags |= unix.CLONE_NEWUSER
	cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: 65534, Size: 1}}
	cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: 65534, Size: 1}}
	cmd.SysProcAttr.Credential = &syscall.Credential{NoSetGroups: true}
}

func inOwnNetwork(cmd *exec.Cmd) { cmd.SysProcAttr.Cloneflags |= unix.CLONE_NEWNET }

func inOwnMounts(cmd *exec.Cmd) { cmd.SysProcAttr.Cloneflags |= unix.CLONE_NEWNS }

func (h *host) service() api.ServiceStatus { return must[api.Status](h, "status").Services[0] }

func (h *host) slotPIDs() (pids []int) {
	for _, slot := range must[[]api.SlotStatus](h, "slots") {
		pids = append(pids, slot.PID)
	}
	return pids
}

// problemOf waits until the agent reports why a process is not a member. It fails the test if the process becomes a
// member.
func (h *host) problemOf(pid int) (problem string) {
	h.t.Helper()
	h.eventually(fmt.Sprintf("process %d is refused", pid), func() bool {
		if slots := h.slotPIDs(); slices.Contains(slots, pid) {
			h.t.Fatalf("the thief, process %d, has a slot: %v", pid, slots)
		}
		status := h.service()
		for _, r := range status.Refused {
			if r.PID == pid {
				problem = r.Problem
			}
		}
		for _, w := range status.Waiting {
			if w.PID == pid {
				problem = w.Problem
			}
		}
		return problem != ""
	})
	return problem
}

// served waits until a process has a slot, and fails the test if one of the others has a slot.
func (h *host) served(slot, pid int, others ...int) {
	h.t.Helper()
	h.eventually(fmt.Sprintf("process %d has slot %d", pid, slot), func() bool {
		slots := h.slotPIDs()
		for _, other := range others {
			if slices.Contains(slots, other) {
				h.t.Fatalf("the thief, process %d, has a slot: %v", other, slots)
			}
		}
		return slots[slot] == pid
	})
}

// askFromAnyPort is ask over UDP for members that answer from another port.
func askFromAnyPort(t *testing.T) string {
	t.Helper()
	conn, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.WriteTo([]byte("?"), net.UDPAddrFromAddrPort(netip.MustParseAddrPort("127.0.0.1:4739"))); err != nil {
		return reason(err)
	}
	answer := make([]byte, 64)
	n, _, err := conn.ReadFrom(answer)
	if err != nil {
		return reason(err)
	}
	return string(answer[:n])
}

func theft(keys ...string) string {
	return "services:\n  telemetry:\n    slots: 1\n    " + strings.Join(keys, "\n    ") + "\n"
}

const (
	sharedPorts = `listeners: [{protocol: tcp, address: "[::]:1790"}, {protocol: udp, address: "[::]:4739"}]`
	ownPorts    = `listeners: [{protocol: tcp, address: "[::]:1790", member_ports: 20000-20009}, {protocol: udp, address: "[::]:4739", member_ports: 21000-21009}]`
)

var (
	sharedSpecs = []string{"tcp [::]:1790", "udp [::]:4739"}
	firstSpecs  = []string{"tcp 127.0.0.1:20001 alone", "udp 127.0.0.1:21001 alone"}
	secondSpecs = []string{"tcp 127.0.0.1:20002 alone", "udp 127.0.0.1:21002 alone"}
)

// TestThiefOfAnotherUser checks that a process of another user with the command line of a member gets no slot,
// neither before the member starts nor after it has exited.
func TestThiefOfAnotherUser(t *testing.T) {
	policy := theft("steering: lookup", ownPorts, "user: root", "cgroup: CGROUP", "members: [{match: {command_line: ^collector}, slot: 0}]")
	h := newHost(t, policy)
	thief, _ := h.member(asNobody, firstSpecs...) // before the agent
	h.start()
	const want = "it runs as user nobody, not as root"
	if got := h.problemOf(thief); got != want {
		t.Errorf("reported problem of the thief: %q, want %q", got, want)
	}
	for range 2 {
		member, end := h.member(nil, secondSpecs...)
		h.served(0, member, thief)
		if got := ask("tcp", "127.0.0.1"); got != fmt.Sprint(member) {
			t.Errorf("tcp: %s answers, want %d", got, member)
		}
		if got := askFromAnyPort(t); got != fmt.Sprint(member) {
			t.Errorf("udp: %s answers, want %d", got, member)
		}
		end()
		h.eventually("the slot is empty", func() bool { return h.slotPIDs()[0] == 0 })
		late, _ := h.member(asNobody, fmt.Sprintf("tcp 127.0.0.1:%d alone", 20003+thief%2), fmt.Sprintf("udp 127.0.0.1:%d alone", 21003+thief%2))
		if got := h.problemOf(late); got != want {
			t.Errorf("reported problem of the thief: %q, want %q", got, want)
		}
		h.served(0, 0, thief, late)
		thief++ // use other ports in the next round
	}
}

// TestThiefBySetUID checks that a set-user-ID program that another user started does not count as a process of the
// file's owner.
func TestThiefBySetUID(t *testing.T) {
	h := newHost(t, theft("steering: lookup", ownPorts, "user: root", "cgroup: CGROUP", "members: [{match: {executable: DIR/program}, slot: 0}]"))
	program := h.program("program", 0o4755)
	h.start()
	thief, _ := h.member(both(asNobody, func(cmd *exec.Cmd) { cmd.Path = program }), firstSpecs...)
	if got, want := h.problemOf(thief), "it runs as user nobody (effective root, saved root), not as root"; got != want {
		t.Errorf("reported problem of the thief: %q, want %q", got, want)
	}
	member, _ := h.member(func(cmd *exec.Cmd) { cmd.Path = program }, secondSpecs...)
	h.served(0, member, thief)
}

// program copies this binary into the directory of the host.
func (h *host) program(name string, mode os.FileMode) string {
	h.t.Helper()
	path := filepath.Join(h.dir, name)
	from, err := os.Open("/proc/self/exe")
	if err != nil {
		h.t.Fatal(err)
	}
	defer from.Close()
	to, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o755)
	if err != nil {
		h.t.Fatal(err)
	}
	_, err = io.Copy(to, from)
	if err := errors.Join(err, to.Close(), unix.Chmod(path, uint32(mode))); err != nil {
		h.t.Fatal(err)
	}
	return path
}

// handed starts a process with sockets that another process created. change modifies the creator.
func (h *host) handed(member, creator func(*exec.Cmd), specs ...string) int {
	h.t.Helper()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		h.t.Fatal(err)
	}
	ends := []*os.File{os.NewFile(uintptr(pair[0]), "pair"), os.NewFile(uintptr(pair[1]), "pair")}
	defer ends[0].Close()
	defer ends[1].Close()
	create := process("thief", append([]string{"create"}, specs...)...)
	create.ExtraFiles = ends[:1]
	creator(create)
	if out, err := create.CombinedOutput(); err != nil {
		h.t.Fatalf("%v: %s", err, out)
	}
	pid, _ := h.as("thief", both(member, func(cmd *exec.Cmd) { cmd.ExtraFiles = ends[1:] }), append([]string{"handed"}, specs...)...)
	return pid
}

// TestThiefWithSocketsOfANamespace checks that sockets of a private network namespace do not open a slot: the BPF
// program would not be called for them, and the slot would reject all traffic.
func TestThiefWithSocketsOfANamespace(t *testing.T) {
	for _, test := range []struct {
		name            string
		member, creator func(*exec.Cmd)
		want            string
	}{
		{"nobody's", asNobody, both(asRootInside, inOwnNetwork), ""}, // status lists refused processes by the sockets of their own namespace
		{"root's", both(), inOwnNetwork, "its socket tcp [::]:1790 was opened in another network namespace than the service's"},
	} {
		t.Run(test.name, func(t *testing.T) {
			h := newHost(t, theft(sharedPorts, "user: root", "cgroup: CGROUP", "members: [{match: {command_line: '^(sockeye|collector)'}, slot: 0}]"))
			h.start()
			thief := h.handed(test.member, test.creator, sharedSpecs...)
			// On kernels where the event has the network namespace, a bind in another namespace is not reported: the
			// agent finds the process in a scan, as at its start.
			h.kill()
			h.start()
			if test.want != "" {
				if got := h.problemOf(thief); got != test.want {
					t.Errorf("reported problem of the thief: %q, want %q", got, test.want)
				}
			}
			member, _ := h.member(nil, sharedSpecs...)
			h.served(0, member, thief)
			if got := ask("tcp", "127.0.0.1"); got != fmt.Sprint(member) {
				t.Errorf("%s answers, want %d", got, member)
			}
		})
	}
}

// TestThiefBehindAMember checks that sockets that another user created do not count as the member's: the member may
// have received them.
func TestThiefBehindAMember(t *testing.T) {
	h := newHost(t, theft("steering: lookup", ownPorts, "user: root", "cgroup: CGROUP", "members: [{match: {command_line: ^sockeye}, slot: 0}]"))
	h.start()
	pid := h.handed(both(), asNobody, "tcp 127.0.0.1:20001", "udp 127.0.0.1:21001")
	if got, want := h.problemOf(pid), "its socket tcp 127.0.0.1:20001 belongs to user nobody, not to root"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	h.write("policy.yaml", theft("steering: lookup", ownPorts, "user: [root, nobody]", "cgroup: CGROUP", "members: [{match: {command_line: ^sockeye}, slot: 0}]"))
	if r := h.sockeye("apply"); r.code != 0 {
		t.Fatalf("apply: %+v", r)
	}
	h.served(0, pid)
	// A member by that policy loses its slot with the policy, also if the agent is restarted.
	h.kill()
	h.write("policy.yaml", theft("steering: lookup", ownPorts, "user: root", "cgroup: CGROUP", "members: [{match: {command_line: ^sockeye}, slot: 0}]"))
	h.start()
	h.problemOf(pid)
}

// TestThiefInAUsersUnit checks that a unit of a user's service manager does not match a rule for the system unit of
// the same name.
func TestThiefInAUsersUnit(t *testing.T) {
	for _, steering := range []string{"reuseport", "lookup"} {
		t.Run(steering, func(t *testing.T) {
			ports, specs := sharedPorts, [][]string{sharedSpecs, sharedSpecs, sharedSpecs}
			if steering == "lookup" {
				ports, specs = ownPorts, [][]string{firstSpecs, secondSpecs, {"tcp 127.0.0.1:20003", "udp 127.0.0.1:21003"}}
			}
			h := newHost(t, theft("steering: "+steering, ports, "user: root", `members: [{match: {systemd_unit: "nfacctd@*.service"}, slot: instance}]`))
			h.startRooted()
			users := inCgroup(t, "user.slice/user-65534.slice/user@65534.service/app.slice/nfacctd@0.service")
			thieves := []int{}
			for i, change := range []func(*exec.Cmd){users, both(users, asNobody)} {
				if i == 1 && steering == "reuseport" {
					break // the bind failed
				}
				thief, _ := h.member(change, specs[i]...)
				thieves = append(thieves, thief)
			}
			member, _ := h.member(inCgroup(t, "system.slice/system-nfacctd.slice/nfacctd@0.service"), specs[2]...)
			h.served(0, member, thieves...)
			if status := h.service(); len(status.Waiting) != 0 || len(status.Refused) != 0 {
				t.Errorf("unexpected candidates: %+v, %+v", status.Waiting, status.Refused)
			}
		})
	}
}

// TestThiefByMount checks that a rule for an executable matches the host's file of that path, not a file that is
// mounted there in the mount namespace of the process.
func TestThiefByMount(t *testing.T) {
	const own = "it is in a mount namespace of its own"
	for _, test := range []struct {
		name, rule string
		thief      func(*exec.Cmd)
		want       string
	}{
		{"nobody's", "slot: 0", both(asRootInside, inOwnMounts), "it runs as user nobody, not as root"},
		{"nobody's in lookup of all users", "slot: 0, user: nobody", both(asRootInside, inOwnMounts), "it is in a user namespace of its own"},
		{"root's", "slot: 0", inOwnMounts, own},
		{"any namespaces", "slot: 0, namespaces: any", inOwnMounts, "its executable is not the host's DIR/program"},
	} {
		t.Run(test.name, func(t *testing.T) {
			rule, user := test.rule, "root"
			if before, ok := strings.CutSuffix(rule, ", user: nobody"); ok {
				rule, user = before, "[root, nobody]"
			}
			h := newHost(t, theft("steering: lookup", ownPorts, "user: "+user, "cgroup: CGROUP", "members: [{match: {executable: DIR/program}, "+rule+"}]"))
			program, evil := h.program("program", 0o755), h.program("evil", 0o755)
			h.start()
			thief, _ := h.as("thief", test.thief, append([]string{"mount", evil, program}, firstSpecs...)...)
			if got := h.plain(h.problemOf(thief)); got != test.want {
				t.Errorf("reported problem of the thief: %q, want %q", got, test.want)
			}
			member, _ := h.member(func(cmd *exec.Cmd) { cmd.Path = program }, secondSpecs...)
			h.served(0, member, thief)
		})
	}
}

// TestOtherNetwork checks that a process in another network namespace, which has no sockets of the service, is not reported as refused.
func TestOtherNetwork(t *testing.T) {
	for _, agentFirst := range []bool{true, false} {
		t.Run(fmt.Sprintf("the agent starts first: %t", agentFirst), func(t *testing.T) {
			h := newHost(t, theft("steering: lookup", ownPorts, "user: root", "cgroup: CGROUP", "members: [{match: {executable: DIR/program}, slot: 0}]"))
			program := h.program("program", 0o755)
			path := func(cmd *exec.Cmd) { cmd.Path = program }
			if agentFirst {
				h.start()
			}
			other, _ := h.member(both(path, both(inOwnMounts, inOwnNetwork)), firstSpecs...)
			if !agentFirst {
				h.start()
			}
			here, _ := h.member(both(path, inOwnMounts), firstSpecs...)
			if got := h.problemOf(here); got != "it is in a mount namespace of its own" {
				t.Errorf("the process with the ports: %q", got)
			}
			for _, r := range h.service().Refused {
				if r.PID == other {
					t.Errorf("the process in another network namespace is reported: %+v", r)
				}
			}
		})
	}
}

// TestSandboxedUnit checks that a process in a mount namespace of the service manager (PrivateTmp=yes) becomes a
// member.
func TestSandboxedUnit(t *testing.T) {
	h := newHost(t, theft(sharedPorts, "user: root", `members: [{match: {systemd_unit: "nfacctd@*.service"}, slot: instance}]`))
	h.startRooted()
	member, _ := h.member(both(inCgroup(t, "system.slice/nfacctd@0.service"), inOwnMounts), sharedSpecs...)
	h.served(0, member)
}

// TestAnyNamespaces checks that a rule can permit containers.
func TestAnyNamespaces(t *testing.T) {
	policy := theft("steering: lookup", ownPorts, "user: nobody", "cgroup: CGROUP", "members: [{match: {command_line: ^collector}, slot: 0}]")
	h := newHost(t, policy)
	h.start()
	member, _ := h.member(asRootInside, firstSpecs...)
	if got := h.problemOf(member); got != "it is in a user namespace of its own" {
		t.Errorf("reported problem: %q", got)
	}
	h.write("policy.yaml", strings.Replace(policy, "slot: 0", "slot: 0, namespaces: any", 1))
	if r := h.sockeye("apply"); r.code != 0 {
		t.Fatalf("apply: %+v", r)
	}
	h.served(0, member)
	if refused := h.service().Refused; len(refused) != 0 {
		t.Errorf("refused: %+v", refused)
	}
}

// TestUpgradedExecutable checks that a member keeps its slot when an upgrade replaces the file of its program, also
// with the next agent.
func TestUpgradedExecutable(t *testing.T) {
	h := newHost(t, theft(sharedPorts, "user: root", "cgroup: CGROUP", "members: [{match: {executable: DIR/program}, slot: 0}]"))
	program := h.program("program", 0o755)
	h.start()
	member, end := h.member(func(cmd *exec.Cmd) { cmd.Path = program }, sharedSpecs...)
	h.served(0, member)
	h.program("next", 0o755)
	if err := os.Rename(filepath.Join(h.dir, "next"), program); err != nil {
		t.Fatal(err)
	}
	h.kill()
	h.start()
	h.served(0, member)
	// An agent that did not see the process before the upgrade cannot identify its executable.
	h.kill()
	if err := os.Remove(filepath.Join(h.state, "telemetry.json")); err != nil {
		t.Fatal(err)
	}
	h.start()
	if got, want := h.plain(h.problemOf(member)), "its executable is not the host's DIR/program"; got != want {
		t.Errorf("reported problem: %q, want %q", got, want)
	}
	end()
	upgraded, _ := h.member(func(cmd *exec.Cmd) { cmd.Path = program }, sharedSpecs...)
	h.served(0, upgraded)
}

// TestClaimOfAnotherUser checks that a registration by command is restricted to processes of the service's user.
func TestClaimOfAnotherUser(t *testing.T) {
	h := newHost(t, theft("steering: lookup", ownPorts, "user: root", "cgroup: CGROUP"))
	h.start()
	pid, _ := h.member(asNobody, firstSpecs...)
	h.refused(5, "make process PID a member: it runs as user nobody, not as root", "run it as that user, or name its user in the policy",
		[]int{pid}, "register", "--pid", fmt.Sprint(pid))
	handed := h.handed(both(), asNobody, "tcp 127.0.0.1:20002", "udp 127.0.0.1:21002")
	h.refused(5, "register process PID in slot 0: its socket tcp 127.0.0.1:20002 belongs to user nobody, not to root",
		"start the program as that user, or name the owner in user of the service", []int{handed}, "register", "--pid", fmt.Sprint(handed))
	if slots := h.slotPIDs(); slots[0] != 0 {
		t.Errorf("process %d has the slot", slots[0])
	}
}

// TestLearnedUser checks that the agent ignores the user that an earlier version stored, because it may be the user of
// any process.
func TestLearnedUser(t *testing.T) {
	h := newHost(t, theft(sharedPorts, "cgroup: CGROUP"))
	if err := os.Mkdir(h.state, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(h.state, "telemetry.json"), []byte(`{"nonce": "7", "uid": 65534, "boot_id": ""}`), 0o600); err != nil {
		t.Fatal(err)
	}
	h.start()
	member, _ := h.member(nil, sharedSpecs...)
	must[api.Membership](h, "register", "--pid", fmt.Sprint(member))
	h.served(0, member)
	if status := h.service(); !status.PortsSteered || status.Problem != "" {
		t.Errorf("status: %+v", status)
	}
}

// TestManyThieves checks that the lists and the log are bounded if many processes look like members.
func TestManyThieves(t *testing.T) {
	h := newHost(t, theft("steering: lookup", ownPorts, "user: root", "cgroup: CGROUP", "members: [{match: {command_line: ^collector}, slot: 0}]"))
	h.start()
	for i := range 24 {
		// Each process has its own addresses.
		address := fmt.Sprintf("127.0.1.%d", i+1)
		h.member(asNobody, "tcp "+address+":20001 alone", "udp "+address+":21001 alone")
	}
	h.eventually("some are refused", func() bool { return len(h.service().Refused) == 16 })
	if live := must[api.Frame](h, "top").Services[0].NotAdmitted; !reflect.DeepEqual(live, h.service().Refused) {
		t.Errorf("top has %+v, status %+v", live, h.service().Refused)
	}
	member, _ := h.member(nil, secondSpecs...)
	h.served(0, member)
	log, err := os.ReadFile(h.log)
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(string(log), "process matches a rule, but is not admitted"); n != 1 {
		t.Errorf("the agent logged %d refusals, want 1", n)
	}
}

// TestPortsHeldLater checks that ports that another user has at the start of the agent are held once that process has
// exited, without a command.
func TestPortsHeldLater(t *testing.T) {
	h := newHost(t, theft(sharedPorts, "user: root", "cgroup: CGROUP", "members: [{match: {command_line: ^collector}, slot: 0}]"))
	thief, end := h.member(asNobody, sharedSpecs...)
	h.start()
	if s := h.service(); s.PortsSteered || !strings.Contains(s.Problem, "for user root: ") || !strings.Contains(s.Hint, "the agent tries again") {
		t.Errorf("process %d has the ports: %+v", thief, s)
	}
	end()
	h.eventually("the ports are held", func() bool { s := h.service(); return s.PortsSteered && s.Problem == "" })
	member, _ := h.member(nil, sharedSpecs...)
	h.served(0, member)
	log, err := os.ReadFile(h.log)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(log), `level=WARN msg="ports not held"`) || !strings.Contains(string(log), `msg="ports held"`) {
		t.Errorf("the log has no such line:\n%s", log)
	}
}
