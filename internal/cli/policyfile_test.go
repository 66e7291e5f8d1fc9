// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"os"
	"strings"
	"testing"

	"sockeye/internal/agent"
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

// TestBrokenPolicyAtStart ends an agent, breaks its policy file in several ways,
// and starts the next one: it goes on with the policy that was applied last, and
// says so in its log, in status, and in JSON.
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
		status := must[agent.Status](h, "status")
		if len(status.Services) != 1 || status.Services[0].Slots != 4 {
			t.Errorf("%s: services %+v", name, status.Services)
		}
		if !strings.Contains(status.PolicyProblem, "applied last") || !strings.Contains(status.PolicyHint, "sockeye check") || strings.Contains(status.PolicyProblem, "\n") {
			t.Errorf("%s: problem %q, hint %q", name, status.PolicyProblem, status.PolicyHint)
		}
		if r := h.sockeye("status"); !strings.Contains(r.out, status.PolicyProblem+"\nhint: ") {
			t.Errorf("%s: status shows %s", name, r.out)
		}
		log, err := os.ReadFile(h.log)
		if err != nil || !strings.Contains(string(log), "level=ERROR") || strings.Count(string(log), "applied last") != 1 {
			t.Errorf("%s: log %s, %v", name, log, err)
		}
		// What ExecReload= runs.
		if r := h.sockeye("apply"); r.code == 0 {
			t.Errorf("%s: apply: %+v", name, r)
		}
	}
	h.write("policy.yaml", strings.Replace(mappedService, "slots: 4", "slots: 3", 1))
	if status := must[agent.Status](h, "status"); !strings.Contains(status.PolicyProblem, "differs") {
		t.Errorf("corrected: problem %q", status.PolicyProblem)
	}
	must[agent.Plan](h, "apply")
	if status := must[agent.Status](h, "status"); status.PolicyProblem != "" || status.Services[0].Slots != 3 {
		t.Errorf("applied: problem %q, %+v", status.PolicyProblem, status.Services)
	}
}

// TestFirstPolicyBroken has no policy that was applied: there is nothing to start
// with, and the error says what to do.
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
	if r.code != 2 || !strings.Contains(r.err, "no such file") || !strings.Contains(r.err, "hint: write one (sockeye check") {
		t.Errorf("%+v", r)
	}
}

// TestStatusTellsOfPolicyFile changes the policy file, and a file that it names,
// without applying them.
func TestStatusTellsOfPolicyFile(t *testing.T) {
	h := newHost(t, mappedService)
	h.write("devices.csv", "127.0.0.1,edge\n")
	h.start()
	expect := func(want string) {
		t.Helper()
		problem := h.plain(must[agent.Status](h, "status").PolicyProblem)
		if want == "" && problem != "" || !strings.Contains(problem, want) {
			t.Errorf("problem %q, want %q", problem, want)
		}
	}
	expect("")
	h.write("policy.yaml", mappedService+"# a remark\n")
	expect("the policy file differs from the policy in force")
	must[agent.Plan](h, "apply")
	expect("")
	h.write("devices.csv", "127.0.0.1,edge\n127.0.0.2,edge\n")
	expect("DIR/devices.csv, which the policy names, has changed since it was applied")
	must[agent.Plan](h, "apply")
	expect("")
	h.write("policy.yaml", strings.Replace(mappedService, "slots: 4", "slots: none", 1))
	expect("the policy file is not in force, it is broken: DIR/policy.yaml:3:12")
	if r := h.sockeye("apply"); r.code != 2 {
		t.Errorf("apply: %+v", r)
	}
	if err := os.Remove(h.policy); err != nil {
		t.Fatal(err)
	}
	expect("read policy file: open DIR/policy.yaml: no such file")
	h.write("policy.yaml", mappedService)
	expect("differs")
	must[agent.Plan](h, "apply")
	expect("")
}
