// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/bpf"
	"sockeye/internal/doctor"
	"sockeye/internal/member"
)

func TestNoAgent(t *testing.T) {
	h := newHost(t, twoServices)
	for _, args := range [][]string{{"status"}, {"slots"}, {"devices"}, {"where", "192.0.2.1"}, {"why", "192.0.2.1"}, {"plan"}, {"apply"},
		{"register", "--pid", "1"}, {"unregister", "--slot", "1"}, {"run", "--", "true"}} {
		h.refused(1, "no agent answers on DIR/run/agent.sock",
			"start it with sockeye agent, or name its directory with --run-dir; services that were set up are still steered", nil, args...)
	}
}

// TestSecondAgent checks that a second agent gets neither the pins, nor the socket, nor the ports of the first.
func TestSecondAgent(t *testing.T) {
	h, _ := running(t)
	before := h.standing()
	none := h.write("none.yaml", "services: {}\n")
	second := func(run, pins, policy string) result {
		return h.child(nil, "sockeye", "agent", "-o", "json", "--run-dir", run, "--state-dir", h.dir+"/state2", "--pins", pins, "--policy", policy)
	}
	h.isFailure(second(h.dir+"/run2", h.pins, h.policy), 5, "lock PINS: another agent holds the pin directory",
		"one agent works with a pin directory; see sockeye status")
	h.isFailure(second(h.run, h.pins+"2", none), 5, "listen on DIR/run/agent.sock: another agent listens there", "give this one its own --run-dir")
	// With pins of its own, the second agent would replace the program of the SO_REUSEPORT groups.
	r := second(h.dir+"/run2", h.pins+"2", h.policy)
	var f api.Failure
	if err := json.Unmarshal([]byte(h.plain(r.out)), &f); err != nil || r.code != 5 || f.Code != 5 ||
		!strings.HasPrefix(f.Error, "service telemetry: tcp [::]:1790 belongs to another agent: its keeper, process ") ||
		f.Hint != "use that agent (sockeye agent --pins PINS), or stop it and run sockeye reset --pins PINS" {
		t.Errorf("an agent with pins of its own: %v, %+v", err, r)
	}
	h.unchanged(before)
	h.missing(h.dir+"/run2", h.dir+"/state2", h.pins+"2")
	if r := h.sockeye("reset", "--state-dir", h.state, "--pins", h.pins+"2"); r.code != 0 || !strings.HasPrefix(r.out, "there was nothing to remove\nkept ") {
		t.Errorf("reset: %+v", r)
	}
}

// missing checks that a refused agent has left no file at the paths.
func (h *host) missing(paths ...string) {
	h.t.Helper()
	for _, path := range paths {
		if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
			h.t.Errorf("%s is there: %v", path, err)
		}
	}
}

// keeperOf returns the process id of the keeper of telemetry.
func keeperOf(h *host) int {
	for _, s := range must[api.Status](h, "status").Services {
		if s.Name == "telemetry" {
			return s.Keeper
		}
	}
	return 0
}

// TestResetOfAnotherBPFFS checks that reset in a mount namespace with another bpffs at the same path does not find the
// agent's keeper: it killed the keeper and detached the program from the group. An agent there is refused the ports.
func TestResetOfAnotherBPFFS(t *testing.T) {
	h, _ := running(t)
	before, keeper := h.standing(), keeperOf(h)
	r := h.child(both(inOwnMounts, inOwnNetwork), "other-bpffs", h.pins, "reset", "--pins", h.pins, "--state-dir", h.dir+"/state2")
	if r.code != 0 || !strings.HasPrefix(h.plain(r.out), "removed PINS\n") {
		t.Errorf("reset: %+v", r)
	}
	r = h.child(inOwnMounts, "other-bpffs", h.pins, "agent", "--run-dir", h.dir+"/run2", "--state-dir", h.dir+"/state2", "--pins", h.pins, "--policy", h.policy)
	if hint := fmt.Sprintf("run nsenter --mount --target %d sockeye reset --pins PINS\n", keeper); r.code != 5 || !strings.HasSuffix(h.plain(r.err), hint) {
		t.Errorf("an agent with another bpffs: %+v, want hint %q", r, hint)
	}
	if now := keeperOf(h); now != keeper {
		t.Errorf("keeper %d, was %d", now, keeper)
	}
	h.unchanged(before)
}

// TestKeeperOfAnEarlierAgent checks that a start that fails leaves the keeper of an earlier agent alone whose pins are gone.
func TestKeeperOfAnEarlierAgent(t *testing.T) {
	h, _ := running(t)
	keeper := keeperOf(h)
	h.kill()
	if err := os.RemoveAll(h.pins); err != nil {
		t.Fatal(err)
	}
	none := h.write("none.yaml", "services: 7\n")
	if r := h.child(nil, "sockeye", "agent", "--run-dir", h.run, "--state-dir", h.dir+"/state2", "--pins", h.pins, "--policy", none); r.code != 2 {
		t.Errorf("%+v", r)
	}
	if err := unix.Kill(keeper, 0); err != nil {
		t.Errorf("keeper %d: %v", keeper, err)
	}
	if err := unix.Kill(keeper, unix.SIGKILL); err != nil {
		t.Error(err)
	}
}

// TestKeeperDetached checks that an agent whose keeper is killed attaches the program to the groups again: whoever
// killed the keeper may have detached the program.
func TestKeeperDetached(t *testing.T) {
	h, _ := running(t)
	before, keeper := h.standing(), keeperOf(h)
	handle, err := member.Open(keeper)
	if err != nil {
		t.Fatal(err)
	}
	defer handle.Close()
	sockets, err := handle.Sockets(func(*member.Socket) bool { return true })
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range sockets {
		if err := bpf.Detach(s.FD()); err != nil {
			t.Error(err)
		}
	}
	member.CloseAll(sockets)
	if err := handle.Kill(); err != nil {
		t.Fatal(err)
	}
	h.eventually("another keeper", func() bool { now := keeperOf(h); return now != 0 && now != keeper })
	h.unchanged(strings.Replace(before, fmt.Sprintf(`"keeper": %d`, keeper), fmt.Sprintf(`"keeper": %d`, keeperOf(h)), 1))
}

// TestSteeringChangedBeforeStart starts an agent whose policy file has the other steering mode than the policy that an
// earlier agent had applied.
func TestSteeringChangedBeforeStart(t *testing.T) {
	h := newHost(t, mappedService)
	h.write("devices.csv", "127.0.0.1,edge\n")
	other := h.write("other.yaml", strings.Replace(mappedService, "user: root", "user: root\n    steering: lookup", 1))
	h.start()
	for _, mode := range []string{"reuseport", "lookup"} {
		nonce := h.service().Nonce
		member, end := h.member(nil, "tcp [::]:1790", "udp [::]:4739")
		must[api.Membership](h, "register", "--slot", "0", "--pid", strconv.Itoa(member))
		if mode == "lookup" {
			other = h.write("first.yaml", mappedService)
		}
		must[api.Plan](h, "apply", other)
		h.kill()
		h.start() // applies the policy file
		s := h.service()
		if s.Steering != mode || s.Nonce != nonce {
			t.Errorf("%s: steering %s, nonce %s, was %s", mode, s.Steering, s.Nonce, nonce)
		}
		end()
		h.kill()
		policy := mappedService
		if mode == "reuseport" {
			policy = strings.Replace(mappedService, "user: root", "user: root\n    steering: lookup", 1)
		}
		h.write("policy.yaml", policy)
		h.start()
	}
}

// TestAgentRefusals checks that an agent that cannot start prints the reason in one line.
func TestAgentRefusals(t *testing.T) {
	h := newHost(t, twoServices)
	h.write("devices.csv", "")
	start := func(change func(*exec.Cmd), role string, args ...string) result {
		return h.child(change, role, append(append(args, h.agentArgs()...), "-o", "json")...)
	}
	missing := "start agent: missing CAP_BPF, CAP_NET_ADMIN, CAP_NET_RAW, CAP_PERFMON, CAP_SYS_PTRACE, CAP_DAC_READ_SEARCH, CAP_CHOWN"
	right := "run as root, or give these capabilities to the service"
	h.isFailure(start(asNobody, "sockeye"), 4, missing, right)
	h.isFailure(start(nil, "limited", fmt.Sprint(unix.CAP_BPF)), 4, "start agent: missing CAP_BPF", right)

	r := h.child(nil, "sockeye", append(h.agentArgs(), "--group", "nosuch", "-o", "json")...)
	h.isFailure(r, 2, "look up group nosuch: group: unknown group nosuch", "create the group, or leave --group out")

	r = h.child(nil, "sockeye", "agent", "--pins", h.dir+"/pins", "--run-dir", h.run, "--state-dir", h.state, "--policy", h.policy, "-o", "json")
	h.isFailure(r, 2, "DIR is not in a bpffs and not empty, so the agent cannot mount a bpffs there", "give --pins a directory in a bpffs, as in /sys/fs/bpf/sockeye")

	r = h.child(nil, "sockeye", "agent", "--pins", h.pins, "--run-dir", h.run, "--state-dir", h.state, "--policy", h.dir+"/none.yaml", "-o", "json")
	h.isFailure(r, 2, "read policy file: open DIR/none.yaml: no such file or directory", "sockeye init --write writes one from the processes that share ports; a file with the line services: {} is a policy that does nothing")

	// The bpffs that such a start mounts is unmounted, unless another program has pins there.
	for _, kept := range []bool{false, true} {
		mounted := filepath.Join(h.dir, fmt.Sprintf("bpffs-%v", kept))
		if kept {
			if err := errors.Join(os.Mkdir(mounted, 0o700), unix.Mount("bpffs", mounted, "bpf", 0, "")); err != nil {
				t.Fatal(err)
			}
			pin(t, filepath.Join(mounted, "theirs"), 1)
		}
		r = h.child(nil, "sockeye", "agent", "--pins", mounted+"/sockeye", "--run-dir", h.run, "--state-dir", h.state, "--policy", h.dir+"/none.yaml", "-o", "json")
		if _, err := os.Stat(mounted + "/theirs"); r.code != 2 || kept != (err == nil) {
			t.Errorf("%+v, their pin: %v", r, err)
		}
		if !kept {
			h.missing(mounted)
			continue
		}
		h.missing(mounted + "/sockeye")
		if err := unix.Unmount(mounted, 0); err != nil {
			t.Error(err)
		}
	}

	file := h.write("file", "")
	r = h.child(nil, "sockeye", "agent", "--pins", h.pins, "--run-dir", h.run, "--state-dir", file, "--policy", h.policy, "-o", "json")
	h.isFailure(r, 1, "check directory DIR/file: not a directory", "")

	h.missing(h.state, h.run, h.pins)

	for _, option := range []string{"--state-dir", "--run-dir", "--pins", "--policy"} {
		r = h.child(nil, "sockeye", append(h.agentArgs(), option, "", "-o", "json")...)
		h.isFailure(r, 2, option+" is empty", "name a path, or leave the option out")
	}
	// A directory of others keeps its mode and its files.
	others := filepath.Join(h.dir, "others")
	if err := errors.Join(os.Mkdir(others, 0o755), os.WriteFile(filepath.Join(others, "data"), nil, 0o644)); err != nil {
		t.Fatal(err)
	}
	r = h.child(nil, "sockeye", append(h.agentArgs(), "--state-dir", others, "-o", "json")...)
	h.isFailure(r, 2, "the state directory DIR/others has files that are not of an agent, for example data", "name a directory of the agent's own with --state-dir")
	if info, err := os.Stat(others); err != nil || info.Mode().Perm() != 0o755 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
	if entries, err := os.ReadDir(others); err != nil || len(entries) != 1 {
		t.Errorf("%v, %v", entries, err)
	}
	// Nor does an agent claim the home directory of a user, whose mode is that of a state directory.
	if err := os.Chmod(others, 0o700); err != nil {
		t.Fatal(err)
	}
	r = h.child(nil, "sockeye", append(h.agentArgs(), "--state-dir", others, "-o", "json")...)
	h.isFailure(r, 2, "the state directory DIR/others has files that are not of an agent, for example data", "name a directory of the agent's own with --state-dir")

	err := os.Mkdir(h.state, 0o700)
	if err == nil {
		err = os.WriteFile(filepath.Join(h.state, "spare.json"), []byte(`{"nonce": 7`), 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	h.isFailure(start(nil, "sockeye"), 1, "service spare: read state DIR/state/spare.json: unexpected end of JSON input",
		"remove the file: the nonce is also pinned, and members are found again; states and weights of slots and pins of devices are lost")
	h.missing(h.run, h.pins)

	// systemd makes the directories of its unit before the start.
	if err := os.Mkdir(h.pins, 0o700); err != nil {
		t.Fatal(err)
	}
	if r := start(nil, "sockeye"); r.code != 1 {
		t.Errorf("%+v", r)
	}
	if left, err := os.ReadDir(h.pins); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
	if err := os.Remove(filepath.Join(h.state, "spare.json")); err != nil {
		t.Errorf("the state of an earlier agent is gone: %v", err)
	}

	if r := h.sockeye("reset", "--state-dir", h.state, "--pins", h.pins); r.code != 0 {
		t.Errorf("reset: %+v", r)
	}
}

// TestMetricsPortTaken checks that the agent steers without metrics while another program has the port, reports the
// conflict, and binds the port at the next apply.
func TestMetricsPortTaken(t *testing.T) {
	busy, err := net.Listen("tcp", "127.0.0.1:9732")
	if err != nil {
		t.Fatal(err)
	}
	defer busy.Close()
	h := newHost(t, twoServices+"metrics: {listen: \"127.0.0.1:9732\"}\n")
	h.write("devices.csv", "")
	h.start()
	const problem = "serve metrics: listen tcp 127.0.0.1:9732: bind: address already in use"
	if s := must[api.Status](h, "status"); s.PolicyProblem != problem || s.PolicyHint != "set metrics.listen to a free address, then sockeye apply" {
		t.Errorf("status: %q, hint %q", s.PolicyProblem, s.PolicyHint)
	}
	if r := h.sockeye("apply"); r.code != 5 || !strings.Contains(r.err, problem) {
		t.Errorf("apply while the port is taken: %+v", r)
	}
	busy.Close()
	if r := h.sockeye("apply"); r.code != 0 {
		t.Errorf("apply: %+v", r)
	}
	if s := must[api.Status](h, "status"); s.PolicyProblem != "" {
		t.Errorf("status: %q", s.PolicyProblem)
	}
	c, err := net.Dial("tcp", "127.0.0.1:9732")
	if err != nil {
		t.Fatalf("the endpoint: %v", err)
	}
	c.Close()
}

// TestOtherSchema checks that pins of another schema are refused, and that the command of the hint removes them.
func TestOtherSchema(t *testing.T) {
	h := newHost(t, twoServices)
	h.write("devices.csv", "")
	if err := os.Mkdir(h.pins, 0o700); err != nil {
		t.Fatal(err)
	}
	pin(t, filepath.Join(h.pins, "schema"), 99)
	for range 2 {
		r := h.child(nil, "sockeye", append(h.agentArgs(), "-o", "json")...)
		h.isFailure(r, 5, "adopt pin PINS/schema: schema version 99, this sockeye reads 1",
			"sockeye reset removes the pins of another version; steering stops until the agent starts again")
	}
	if r := h.sockeye("reset", "--state-dir", h.state, "--pins", h.pins); r.code != 0 || h.plain(r.out) != "removed PINS\n" {
		t.Fatalf("reset: %+v", r)
	}
	h.start()
}

// pin pins an array map that holds one number.
func pin(t *testing.T, path string, value uint32) {
	t.Helper()
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1,
		Contents: []ebpf.MapKV{{Key: uint32(0), Value: value}}})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := m.Pin(path); err != nil {
		t.Fatal(err)
	}
}

// TestResetOfOthers checks that reset does not delete pins and files that are not Sockeye's.
func TestResetOfOthers(t *testing.T) {
	h := newHost(t, twoServices)
	other := filepath.Dir(h.pins)
	pin(t, filepath.Join(other, "cilium_state"), 1)
	h.refused(2, h.plain(other)+" is not the pin directory of an agent", "name the agent's directory with --pins", nil, "reset", "--state-dir", h.state, "--pins", other)
	if _, err := os.Stat(filepath.Join(other, "cilium_state")); err != nil {
		t.Error(err)
	}
}

// TestNotPermitted checks that only root can change the state, and that members of the agent's group can read it.
func TestNotPermitted(t *testing.T) {
	h, _ := running(t)
	before := h.standing()
	nobody := func(args ...string) result {
		return h.child(asNobody, "sockeye", append(args, "--run-dir", h.run, "-o", "json")...)
	}
	h.isFailure(nobody("status"), 4, "connect to agent: dial unix DIR/run/agent.sock: connect: permission denied",
		"run as root; a member of the agent's --group may use the commands that only show")
	h.unchanged(before)
	h.kill()
	h.start("--group", "nogroup")
	before = h.standing()
	if r := nobody("status"); r.code != 0 {
		t.Errorf("the group's status: %+v", r)
	}
	if r := nobody("plan"); r.code != 0 {
		t.Errorf("the group's plan: %+v", r)
	}
	findings, code := h.examine(asNobody, "sockeye")
	if want := (doctor.Finding{Area: "rights", Check: "capabilities", Result: "note", Hint: "run doctor as root for all checks",
		Detail: "doctor lacks CAP_BPF, CAP_NET_ADMIN, CAP_NET_RAW, CAP_PERFMON, CAP_SYS_PTRACE, CAP_DAC_READ_SEARCH, CAP_CHOWN; the running agent has its own"}); code != 0 || !slices.Contains(findings, want) {
		t.Errorf("the group's doctor: code %d, %+v", code, findings)
	}
	for _, args := range [][]string{
		{"apply"}, {"apply", "--previous"}, {"plan", h.policy},
		{"register", "--service", "spare", "--pid", "1"}, {"unregister", "--service", "telemetry", "--slot", "0"},
		{"slot", "set", "0", "drain"}, {"move", "192.0.2.1", "0", "--dry-run"}, {"moves", "--cancel"}, {"rebalance"},
		{"tune", "revert"}, {"host", "set", "a", "drain"}, {"host", "set", "a", "drain", "--dry-run"},
	} {
		h.isFailure(nobody(args...), 4, "only root may change the agent, or make it read a file", "run it with sudo")
	}
	h.unchanged(before)
	h.isFailure(nobody("reset", "--state-dir", h.state, "--pins", h.pins), 4, "read pin directory: open PINS: permission denied",
		"run as root, or with the capabilities that sockeye doctor names")
	h.isFailure(nobody("where", "--offline", "--pins", h.pins, "192.0.2.1"), 4, "read pins: open PINS: permission denied",
		"run as root, or with the capabilities that sockeye doctor names")
	h.unchanged(before)
}

// TestManyErrors checks that the first error of a policy file is shown with the number of further errors.
func TestManyErrors(t *testing.T) {
	h, _ := running(t)
	before := h.standing()
	var text strings.Builder
	text.WriteString("services:\n  telemetry:\n    slots: 4\n    listeners: [{protocol: tcp, address: \"[::]:1790\"}]\n")
	for n := range 50 {
		fmt.Fprintf(&text, "    key%d: 1\n", n)
	}
	file := h.write("many.yaml", text.String())
	h.write("policy.yaml", text.String())
	for _, args := range [][]string{{"check", file}, {"plan", file}, {"apply"}} {
		r := h.sockeye(args...)
		if r.code != 2 || strings.Count(r.err, "unknown key") != 20 || !strings.HasSuffix(r.err, "\nand 30 more\n") ||
			!strings.HasPrefix(h.plain(r.err), "sockeye: DIR/"+filepath.Base(map[bool]string{true: h.policy, false: file}[args[0] == "apply"])+":5:5: services.telemetry.key0: unknown key\n") {
			t.Errorf("sockeye %q: %+v", args, r)
		}
		h.unchanged(before)
	}
	var all checked
	r := h.sockeye("check", file, "-o", "json")
	if err := json.Unmarshal([]byte(r.out), &all); err != nil || r.code != 2 || all.Valid || len(all.Errors) != 50 {
		t.Errorf("%v, %+v", err, r)
	}
}

// TestUnknownUsers checks that each user that does not exist on the host is reported with line and column.
func TestUnknownUsers(t *testing.T) {
	h, _ := running(t)
	file := h.write("users.yaml", strings.Replace(twoServices, "user: root", "user: nosuch\n    members: [{match: {command_line: x, user: norsuch}, slot: free}]", 1))
	var all checked
	r := h.sockeye("check", file, "-o", "json")
	if err := json.Unmarshal([]byte(r.out), &all); err != nil || r.code != 2 || all.Valid || len(all.Errors) != 2 {
		t.Fatalf("%v, %+v", err, r)
	}
	for i, want := range []string{"services.telemetry.user", "services.telemetry.members[0].match.user"} {
		if e := all.Errors[i]; e.Path != want || e.Line == 0 || e.Column == 0 || !strings.HasPrefix(e.Message, "there is no user ") {
			t.Errorf("%+v", e)
		}
	}
}

// TestApplyFailsMidway checks that an apply whose last step fails leaves all services unchanged.
func TestApplyFailsMidway(t *testing.T) {
	h, _ := running(t)
	before := h.standing()
	next := strings.Replace(twoServices, "slots: 4", "slots: 6\n    backlog: 64\n    when_empty: {standby: 1}", 1)
	next = strings.Replace(next, "spare:", "zebra:", 1)
	h.write("policy.yaml", next)
	pin(t, filepath.Join(h.pins, "steer_zebra", "slots"), 1)
	h.refused(5, "service zebra: adopt pin PINS/steer_zebra/slots: ValueSize: 4 changed to 16, MaxEntries: 1 changed to 1024: map spec is incompatible with existing map",
		"sockeye reset removes the pins of another version; steering stops until the agent starts again", nil, "apply")
	h.unchanged(before)
	if plan := must[api.Plan](h, "plan"); len(plan.Changes) != 5 {
		t.Errorf("the plan is %+v", plan)
	}
	h.write("policy.yaml", twoServices)
	if r := h.sockeye("plan"); r.out != "nothing would change\n" {
		t.Errorf("plan of the policy in force: %+v", r)
	}
}

// TestFailedServiceLeavesNothing adds a service that fails when its sk_lookup program is attached: a program of a cgroup above
// permits no others below. The ports are free afterwards.
func TestFailedServiceLeavesNothing(t *testing.T) {
	h := newHost(t, "services: {}\n")
	h.start()
	blocker, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.CGroupSock, AttachType: ebpf.AttachCGroupInet4PostBind, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 1), asm.Return()}})
	if err != nil {
		t.Fatal(err)
	}
	defer blocker.Close()
	above, err := os.Open(testCgroup())
	if err != nil {
		t.Fatal(err)
	}
	defer above.Close()
	if err := link.RawAttachProgram(link.RawAttachProgramOptions{Target: int(above.Fd()), Program: blocker, Attach: ebpf.AttachCGroupInet4PostBind}); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := link.RawDetachProgram(link.RawDetachProgramOptions{Target: int(above.Fd()), Program: blocker, Attach: ebpf.AttachCGroupInet4PostBind}); err != nil {
			t.Error(err)
		}
	}()
	h.write("policy.yaml", `services: {logs: {slots: 2, steering: lookup, user: nobody, listeners: [{protocol: udp, address: "0.0.0.0:5514"}], cgroup: CGROUP}}`)
	if r := h.sockeye("apply"); r.code == 0 {
		t.Fatalf("%+v", r)
	}
	if _, err := os.Stat(filepath.Join(h.pins, "steer_logs")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("pins of the service: %v", err)
	}
	receiver, err := net.ListenPacket("udp4", "127.0.0.1:5514")
	if err != nil {
		t.Fatal(err)
	}
	defer receiver.Close()
	sender, err := net.Dial("udp4", "127.0.0.1:5514")
	if err != nil {
		t.Fatal(err)
	}
	defer sender.Close()
	if _, err := sender.Write([]byte("free")); err != nil {
		t.Fatal(err)
	}
	_ = receiver.SetReadDeadline(time.Now().Add(5 * time.Second))
	if _, _, err := receiver.ReadFrom(make([]byte, 10)); err != nil {
		t.Errorf("the port is not free: %v", err)
	}
}

// TestGarbage sends bytes that are not HTTP to the agent's socket and checks the answer.
func TestGarbage(t *testing.T) {
	h, _ := running(t)
	before := h.standing()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", api.SocketPath(h.run))
		}}}
	const hint = "send one JSON object of at most 8 MiB"
	const version = "is it of another version? see sockeye version and status"
	for _, c := range []struct {
		method, path, body string
		status             int
		message, hint      string
	}{
		{"POST", "/v1/register", "{", 400, "read request: unexpected EOF", hint},
		{"POST", "/v1/register", "nonsense", 400, "read request: invalid character 'o' in literal null (expecting 'u')", hint},
		{"POST", "/v1/register", `{"pid": "12"}`, 400, "read request: json: cannot unmarshal string into Go struct field Membership.pid of type int", hint},
		{"POST", "/v1/register", `{"pid": 12, "force": true}`, 400, `read request: json: unknown field "force"`, hint},
		{"POST", "/v1/register", `{"service": "spare", "pid": 12} {}`, 400, "read request: unexpected data after the JSON object", hint},
		{"POST", "/v1/register", `[]`, 400, "read request: json: cannot unmarshal array into Go value of type api.Membership", hint},
		{"POST", "/v1/register", `{"service": "spare", "pid": 99999999999999999999}`, 400, "read request: json: cannot unmarshal number 99999999999999999999 into Go struct field Membership.pid of type int", hint},
		{"POST", "/v1/unregister", `{"service": "telemetry", "slot": -1}`, 400, "slot -1 is out of range", "service telemetry has slots 0 to 3"},
		{"POST", "/v1/unregister", "", 400, "no service given", "name one with --service; the policy has spare, telemetry"},
		{"POST", "/v1/apply", `{"text": "services: ["}`, 400, "", ""},
		{"POST", "/v1/apply", `{"text": "` + strings.Repeat("x", 9<<20) + `"}`, 400, "read request: http: request body too large", hint},
		{"POST", "/v1/plan", `{"path": "/etc/shadow"}`, 400, "/etc/shadow: is empty", ""},
		{"GET", "/v1/apply", "", 400, "the agent has no GET /v1/apply", version},
		{"DELETE", "/v1/status", "", 400, "the agent has no DELETE /v1/status", version},
		{"GET", "/v2/status", "", 400, "the agent has no GET /v2/status", version},
		{"GET", "/", "", 400, "the agent has no GET /", version},
		{"GET", "/v1/where?address=x&address=", "", 400, `"x" is not an IP address`, "as in 192.0.2.1 or 2001:db8::1"},
		{"GET", "/v1/slots?service=%00", "", 400, `there is no service "\x00"`, "the policy has spare, telemetry"},
	} {
		r, err := http.NewRequest(c.method, "http://agent"+c.path, strings.NewReader(c.body))
		if err != nil {
			t.Fatal(err)
		}
		answer, err := client.Do(r)
		if err != nil {
			t.Errorf("%s %s: %v", c.method, c.path, err)
			continue
		}
		text, _ := io.ReadAll(answer.Body)
		answer.Body.Close()
		var f api.Failure
		if err := json.Unmarshal(text, &f); err != nil || answer.StatusCode != c.status || f.Code != 2 ||
			c.message != "" && (f.Error != c.message || f.Hint != c.hint) {
			t.Errorf("%s %s %.60s: %v, %d %s", c.method, c.path, c.body, err, answer.StatusCode, text)
		}
		h.unchanged(before)
	}
	for _, raw := range []string{"\x00\x01\x02\r\n\r\n", "GET\r\n\r\n", "POST /v1/apply HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{}", strings.Repeat("A", 2<<20)} {
		conn, err := net.Dial("unix", api.SocketPath(h.run))
		if err != nil {
			t.Fatal(err)
		}
		// The agent may close the connection before the write ends.
		_, _ = io.Copy(conn, bytes.NewReader([]byte(raw)))
		conn.Close()
		h.unchanged(before)
	}
}

// TestFullDisk starts an agent whose state directory has no space left, with the policy of the last start: steering continues.
func TestFullDisk(t *testing.T) {
	h := newHost(t, twoServices)
	h.write("devices.csv", "127.0.0.1,edge\n")
	if err := errors.Join(os.MkdirAll(h.state, 0o700), unix.Mount("state", h.state, "tmpfs", 0, "size=1m,mode=0700")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(h.state, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	h.start()
	h.kill()
	full, err := os.Create(filepath.Join(h.state, "full"))
	if err != nil {
		t.Fatal(err)
	}
	defer full.Close()
	for chunk := 64 << 10; chunk > 0; {
		if _, err := full.Write(make([]byte, chunk)); errors.Is(err, unix.ENOSPC) {
			chunk /= 2
		} else if err != nil {
			t.Fatal(err)
		}
	}
	h.start()
	if s := must[api.Status](h, "status"); len(s.Services) != 2 || !s.Services[1].PortsSteered {
		t.Errorf("%+v", s)
	}
	if err := os.Remove(full.Name()); err != nil {
		t.Error(err)
	}
}
