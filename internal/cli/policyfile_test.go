// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/bpf"
	"sockeye/internal/member"
)

const mappedService = `services:
  telemetry:
    slots: 4
    listeners:
      - {protocol: tcp, address: "[::]:1790"}
      - {protocol: udp, address: "[::]:4739"}
    user: root
    cgroup: CGROUP
    device_map: devices.csv
`

// TestBrokenPolicyAtStart stops an agent, makes its policy file invalid in several ways, and starts the next agent. The
// next agent uses the last applied policy, and reports this in its log, in status, and in JSON.
func TestBrokenPolicyAtStart(t *testing.T) {
	h := newHost(t, mappedService)
	h.write("devices.csv", "127.0.0.1,edge\n")
	h.start()
	for name, broken := range map[string]string{
		"syntax":     strings.Replace(mappedService, "slots: 4", "slots: [4", 1),
		"value":      strings.Replace(mappedService, "slots: 4", "slots: none", 1),
		"user":       strings.Replace(mappedService, "user: root", "user: no-such-user", 1),
		"device map": strings.Replace(mappedService, "devices.csv", "no-such-file.csv", 1),
		"cgroup":     strings.Replace(mappedService, "CGROUP", "/no/such/cgroup", 1),
	} {
		h.kill()
		if err := os.Truncate(h.log, 0); err != nil {
			t.Fatal(err)
		}
		h.write("policy.yaml", broken)
		h.start()
		status := must[api.Status](h, "status")
		if len(status.Services) != 1 || status.Services[0].Slots != 4 {
			t.Errorf("%s: services %+v", name, status.Services)
		}
		if !strings.Contains(status.PolicyProblem, "the agent started with the last applied policy") || !strings.Contains(status.PolicyHint, "sockeye check") || strings.Contains(status.PolicyProblem, "\n") {
			t.Errorf("%s: problem %q, hint %q", name, status.PolicyProblem, status.PolicyHint)
		}
		if r := h.sockeye("status"); !strings.Contains(r.out, status.PolicyProblem+"\nhint: ") {
			t.Errorf("%s: status shows %s", name, r.out)
		}
		log, err := os.ReadFile(h.log)
		if err != nil || !strings.Contains(string(log), "level=ERROR") || strings.Count(string(log), "the last applied policy is in force") != 1 {
			t.Errorf("%s: log %s, %v", name, log, err)
		}
		// The command of ExecReload=.
		if r := h.sockeye("apply"); r.code == 0 {
			t.Errorf("%s: apply: %+v", name, r)
		}
	}
	h.write("policy.yaml", strings.Replace(mappedService, "slots: 4", "slots: 3", 1))
	if status := must[api.Status](h, "status"); !strings.Contains(status.PolicyProblem, "differs") {
		t.Errorf("corrected: problem %q", status.PolicyProblem)
	}
	must[api.Plan](h, "apply")
	if status := must[api.Status](h, "status"); status.PolicyProblem != "" || status.Services[0].Slots != 3 {
		t.Errorf("applied: problem %q, %+v", status.PolicyProblem, status.Services)
	}
}

// TestAppliedPolicyOfAnotherDirectory starts the agent twice with a policy that was applied from a file in another
// directory and names a device map in that directory.
func TestAppliedPolicyOfAnotherDirectory(t *testing.T) {
	h := newHost(t, mappedService)
	h.write("devices.csv", "127.0.0.1,edge\n")
	h.start()
	other := filepath.Join(h.dir, "other")
	if err := os.Mkdir(other, 0o755); err != nil {
		t.Fatal(err)
	}
	h.write("other/devices.csv", "127.0.0.1,core\n127.0.0.2,core\n")
	h.write("other/policy.yaml", mappedService)
	must[api.Plan](h, "apply", filepath.Join(other, "policy.yaml"))
	h.write("policy.yaml", "broken")
	for range 2 {
		h.kill()
		h.start()
		if m := must[api.Status](h, "status").Services[0].DeviceMap; m == nil || m.Prefixes != 2 || m.Path != filepath.Join(other, "devices.csv") {
			t.Errorf("the device map is %+v", m)
		}
	}
}

// TestBothPoliciesBroken starts an agent with an applied policy that this version refuses, such as a policy without a
// user. The error mentions the applied policy, whether the policy file is the same or has another error.
func TestBothPoliciesBroken(t *testing.T) {
	h := newHost(t, mappedService)
	h.write("devices.csv", "127.0.0.1,edge\n")
	h.start()
	h.kill()
	refused := strings.Replace(mappedService, "user: root", "members: [{match: {command_line: x}, slot: free}]", 1)
	h.write("state/.applied.yaml", refused)
	for file, want := range map[string]string{
		refused: "sockeye: the last applied policy has the text of the policy file, and is refused, too: DIR/policy.yaml:7:23: services.telemetry.members[0].match: any user could",
		strings.Replace(mappedService, "slots: 4", "slots: none", 1): "sockeye: the last applied policy (DIR/state/.applied.yaml) is refused, too: " +
			"DIR/state/.applied.yaml:7:23: services.telemetry.members[0].match: any user could start a matching process and take a slot; " +
			"the policy file: DIR/policy.yaml:3:12: services.telemetry.slots: ",
	} {
		h.write("policy.yaml", file)
		if r := h.child(nil, "sockeye", h.agentArgs()...); r.code != 2 || !strings.HasPrefix(h.plain(r.err), want) {
			t.Errorf("code %d\n%s---- want\n%s", r.code, h.plain(r.err), want)
		}
	}
}

// TestFirstPolicyBroken starts without an applied policy: the agent exits, and the error says how to continue.
func TestFirstPolicyBroken(t *testing.T) {
	h := newHost(t, mappedService)
	r := h.child(nil, "sockeye", h.agentArgs()...)
	if r.code != 2 || !strings.Contains(r.err, "devices.csv: no such file") {
		t.Errorf("%+v", r)
	}
	if err := os.Remove(h.policy); err != nil {
		t.Fatal(err)
	}
	r = h.child(nil, "sockeye", h.agentArgs()...)
	if r.code != 2 || !strings.Contains(r.err, "no such file") || !strings.Contains(r.err, "hint: sockeye init --write writes one") {
		t.Errorf("%+v", r)
	}
}

// TestPolicyOfOtherKinds checks that a policy file that is a FIFO without a writer is refused (opening the FIFO blocked
// apply and plan, which then ignored SIGTERM), and one that is not UTF-8.
func TestPolicyOfOtherKinds(t *testing.T) {
	h := newHost(t, mappedService)
	h.write("devices.csv", "127.0.0.1,edge\n")
	h.start()
	fifo := h.dir + "/fifo.yaml"
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, command := range []string{"apply", "plan", "check"} {
		if r := h.sockeye(command, fifo); r.code != 2 || !strings.Contains(r.err, "fifo.yaml: is empty") {
			t.Errorf("%s: %+v", command, r)
		}
	}
	latin := h.write("latin.yaml", mappedService+"# Z\xfcrich\n")
	for _, command := range []string{"apply", "plan", "check"} {
		if r := h.sockeye(command, latin); r.code != 2 || !strings.Contains(r.err, "UTF-8") {
			t.Errorf("%s: %+v", command, r)
		}
	}
	h.kill()
	if err := os.Rename(fifo, h.policy); err != nil {
		t.Fatal(err)
	}
	h.start()
	if problem := must[api.Status](h, "status").PolicyProblem; !strings.Contains(problem, "is empty") {
		t.Errorf("problem %q", problem)
	}
}

// TestStatusTellsOfPolicyFile checks that status reports if the policy file, or a file that it refers to, was changed and
// not applied.
func TestStatusTellsOfPolicyFile(t *testing.T) {
	h := newHost(t, mappedService)
	h.write("devices.csv", "127.0.0.1,edge\n")
	h.start()
	expect := func(want string) {
		t.Helper()
		problem := h.plain(must[api.Status](h, "status").PolicyProblem)
		if want == "" && problem != "" || !strings.Contains(problem, want) {
			t.Errorf("problem %q, want %q", problem, want)
		}
	}
	expect("")
	h.write("policy.yaml", mappedService+"# a remark\n")
	expect("the policy file differs from the policy in force")
	must[api.Plan](h, "apply")
	expect("")
	h.write("devices.csv", "127.0.0.1,edge\n127.0.0.2,edge\n")
	expect("DIR/devices.csv, which the policy names, has changed since it was applied")
	must[api.Plan](h, "apply")
	expect("")
	h.write("policy.yaml", strings.Replace(mappedService, "slots: 4", "slots: none", 1))
	expect("the policy file is invalid and not in force: DIR/policy.yaml:3:12")
	if r := h.sockeye("apply"); r.code != 2 {
		t.Errorf("apply: %+v", r)
	}
	if err := os.Remove(h.policy); err != nil {
		t.Fatal(err)
	}
	expect("read policy file: open DIR/policy.yaml: no such file")
	h.write("policy.yaml", mappedService)
	expect("differs")
	must[api.Plan](h, "apply")
	expect("")
}

// TestCheckRefusesNested checks that check refuses the cgroups that plan refuses.
func TestCheckRefusesNested(t *testing.T) {
	h := newHost(t, "tune:\n  - {name: a, cgroup: sockeye-a.slice, set: {sndbuf: 100KB}}\n  - {name: b, cgroup: sockeye-a-b.slice, set: {sndbuf: 100KB}}\n")
	h.refused(5, "tune: cgroup sockeye-a-b.slice is inside cgroup sockeye-a.slice, whose rules would override the rules of the inner cgroup",
		"use one of the two cgroups for all rules, or use cgroups of which none contains another", nil, "check", h.policy)
}

// TestCheckNotes checks that check names the cgroup and the network namespace that this host lacks, and that apply refuses their policy.
func TestCheckNotes(t *testing.T) {
	h := newHost(t, "services: {}\n")
	h.start()
	ports := `, listeners: [{protocol: tcp, address: "[::]:1790"}]}`
	for text, want := range map[string]string{
		"cgroup: CGROUP/none" + ports: "service telemetry: find cgroup: stat ",
		"netns: DIR/none" + ports:     "service telemetry: open network namespace: open DIR/none: no such file or directory\n",
		"netns: DIR/file" + ports:     "service telemetry: open network namespace: DIR/file is not a network namespace\n",
	} {
		h.write("file", "")
		file := h.write("there.yaml", "services:\n  telemetry: {slots: 2, user: root, "+text+"\n")
		r := h.sockeye("check", file)
		if got := h.plain(r.out); r.code != 0 || !strings.HasPrefix(got, "DIR/there.yaml is valid, 1 service\nsockeye apply refuses the policy on this host: "+want) {
			t.Errorf("check of %s: %d %s%s", text, r.code, got, r.err)
		}
		if c := must[checked](h, "check", file); !c.Valid || len(c.Notes) != 1 {
			t.Errorf("check of %s: %+v", text, c)
		}
		if r := h.sockeye("apply", file); r.code != 2 || !strings.Contains(h.plain(r.err), strings.TrimSpace(want)) {
			t.Errorf("apply of %s: %+v", text, r)
		}
	}
}

// TestApplyFile applies another file from another directory, and then the agent's own file again.
func TestApplyFile(t *testing.T) {
	h := newHost(t, mappedService)
	h.write("devices.csv", "127.0.0.1,edge\n")
	h.start()
	if err := os.Mkdir(h.dir+"/other", 0o755); err != nil {
		t.Fatal(err)
	}
	h.write("other/devices.csv", "127.0.0.1,edge\n127.0.0.2,edge\n")
	other := h.write("other/policy.yaml", strings.Replace(mappedService, "slots: 4", "slots: 3", 1))
	expect := func(when string, slots, prefixes int, differs bool) {
		t.Helper()
		status := must[api.Status](h, "status")
		s := status.Services[0]
		if s.Slots != slots || s.DeviceMap.Prefixes != prefixes || strings.Contains(status.PolicyProblem, "differs") != differs {
			t.Errorf("%s: %d slots, %d prefixes, problem %q", when, s.Slots, s.DeviceMap.Prefixes, status.PolicyProblem)
		}
	}
	expect("started", 4, 1, false)
	if plan := must[api.Plan](h, "apply", other); len(plan.Changes) != 2 {
		t.Errorf("%+v", plan)
	}
	expect("applied the other", 3, 2, true)
	must[api.Plan](h, "apply")
	expect("applied its own", 4, 1, false)
	must[api.Plan](h, "apply", "--previous")
	expect("applied the previous", 3, 2, true)
	h.kill()
	h.write("policy.yaml", "services: [\n")
	h.start()
	expect("started with the other, applied last", 3, 2, false)
	h.refused(2, "--previous and FILE are mutually exclusive", "usage: sockeye apply [FILE] [flags]", nil, "apply", "--previous", other)
	h.refused(2, "read policy file: open DIR/none.yaml: no such file or directory", "name a policy file", nil, "apply", h.dir+"/none.yaml")
}

// TestResetState checks that reset keeps the state directory and prints its path, and removes it with --state.
func TestResetState(t *testing.T) {
	h := newHost(t, mappedService)
	h.write("devices.csv", "127.0.0.1,edge\n")
	h.start()
	h.kill()
	r := h.sockeye("reset", "--state-dir", h.state, "--pins", h.pins)
	if want := "removed PINS\nremoved DIR/run/agent.sock\nkept DIR/state: devices keep their slots; --state removes it\n"; r.code != 0 || h.plain(r.out) != want {
		t.Errorf("got %+v, want %s", r, want)
	}
	if _, err := os.Lstat(api.SocketPath(h.run)); !os.IsNotExist(err) {
		t.Errorf("the socket of the agent that was killed: %v", err)
	}
	h.refused(2, "DIR is not the state directory of an agent: lstat DIR/.agent.json: no such file or directory", "name the agent's directory with --state-dir", nil,
		"reset", "--state", "--state-dir", h.dir, "--pins", h.pins)
	if r := h.sockeye("reset", "--state-dir", h.dir, "--pins", h.pins); r.code != 0 || r.out != "there was nothing to remove\n" {
		t.Errorf("a directory of others: %+v", r)
	}
	r = h.sockeye("reset", "--state", "--state-dir", h.state, "--pins", h.pins)
	if want := "removed DIR/state\n"; r.code != 0 || h.plain(r.out) != want {
		t.Errorf("got %+v, want %s", r, want)
	}
	if _, err := os.Stat(h.state); !os.IsNotExist(err) {
		t.Errorf("the state directory: %v", err)
	}
	if r := h.sockeye("reset", "--state", "--state-dir", h.state, "--pins", h.pins); r.code != 0 || r.out != "there was nothing to remove\n" {
		t.Errorf("%+v", r)
	}
}

// TestResetFilters checks that reset removes the filters that copy templates from the sockets of members, so that the next agent keeps their
// templates too.
func TestResetFilters(t *testing.T) {
	h, pids := running(t)
	filters := func() (n int) {
		for _, pid := range pids {
			p, err := member.Open(pid)
			if err != nil {
				t.Fatal(err)
			}
			sockets, err := p.Sockets(func(s *member.Socket) bool { return s.Protocol == unix.IPPROTO_UDP })
			if err != nil || len(sockets) != 1 {
				t.Fatalf("%v, %v", sockets, err)
			}
			if _, extended, err := bpf.ReadFilter(sockets[0].FD()); err != nil || extended {
				n++
			}
			member.CloseAll(sockets)
			p.Close()
		}
		return n
	}
	if n := filters(); n != len(pids) {
		t.Fatalf("%d of %d members have the filter", n, len(pids))
	}
	h.kill()
	if r := h.sockeye("reset", "--state-dir", h.state, "--pins", h.pins); r.code != 0 {
		t.Fatalf("reset: %+v", r)
	}
	if n := filters(); n != 0 {
		t.Errorf("after reset, %d members have the filter", n)
	}
	h.start()
	for slot, pid := range pids {
		must[api.Membership](h, "register", "--service", "telemetry", "--slot", strconv.Itoa(slot), "--pid", strconv.Itoa(pid))
	}
	if n := filters(); n != len(pids) {
		t.Errorf("the next agent keeps the templates of %d of %d members", n, len(pids))
	}
	if text, err := os.ReadFile(h.log); err != nil || strings.Contains(string(text), "templates of the member are not kept") {
		t.Errorf("%v, %s", err, text)
	}
}

func TestVersionFlag(t *testing.T) {
	h := newHost(t, "services: {}\n")
	if flag, command := h.sockeye("--version"), h.sockeye("version"); flag != command || flag.code != 0 {
		t.Errorf("--version: %+v, version: %+v", flag, command)
	}
}
