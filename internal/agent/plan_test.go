// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sockeye/internal/api"
	"sockeye/internal/fault"
	"sockeye/internal/testenv"
)

const onePolicy = `services:
  telemetry:
    slots: 4
    listeners:
      - {protocol: tcp, address: "[::]:1790"}
      - {protocol: udp, address: "[::]:4739"}
    user: root
    cgroup: CGROUP
`

func policyText(text string, replace ...string) string {
	return strings.NewReplacer(append(replace, "CGROUP", testenv.CgroupPath())...).Replace(text)
}

// The text of a plan for each policy key.
func TestPlanTexts(t *testing.T) {
	dir := t.TempDir()
	a := testAgent(t, dir, testenv.BPFFS(t)+"/sockeye")
	defer a.stop()
	a.begin(t, policyText(onePolicy))
	defer retire(t, a)
	if err := os.WriteFile(filepath.Join(dir, "token"), []byte(testToken), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "devices.csv"), []byte("192.0.2.0/24,edge\n198.51.100.1,edge\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name    string
		replace []string
		want    []string
	}{
		{"nothing", nil, nil},
		{"slots", []string{"slots: 4", "slots: 5"}, []string{"telemetry change slots: 4 -> 5 (0 of 0 devices seen move; the devices of slot 4 stay until a member is registered there)"}},
		{"standby", []string{"slots: 4", "slots: 4\n    when_empty: {standby: 2}"}, []string{"telemetry change when_empty: reject -> standby 2 ()"}},
		{"on start", []string{"slots: 4", "slots: 4\n    on_start: adopt"}, []string{"telemetry change on_start: reset -> adopt ()"}},
		{"steering", []string{"slots: 4", "slots: 4\n    steering: lookup"}, []string{"telemetry change steering: reuseport -> lookup (all traffic is refused until the members are registered again, immediately)"}},
		{"listeners", []string{"4739", "2055"}, []string{
			"telemetry add listener udp [::]:2055 (slots are not ready until their members listen on it)",
			"telemetry remove listener udp [::]:4739 (the kernel's hash decides there from then on)"}},
		{"device map", []string{"slots: 4", "slots: 4\n    device_map: devices.csv"}, []string{"telemetry change device_map: none -> 2 prefixes of 1 device (0 of 0 devices seen move)"}},
		{"tracking", []string{"slots: 4", "slots: 4\n    track_devices: off"}, []string{"telemetry change track_devices: 65536 -> 0 (the devices seen so far are forgotten)"}},
		{"backlog", []string{"slots: 4", "slots: 4\n    backlog: 64"}, []string{"telemetry change backlog: 0 -> 64 ()"}},
		{"user", []string{"user: root", "user: nobody"}, []string{"telemetry change user: root -> nobody (no member loses its slot; the ports are held for that user)"}},
		{"cgroup", []string{"CGROUP", "/"}, []string{"telemetry change cgroup: " + testenv.CgroupPath() + " -> / (no member loses its slot)"}},
		{"members", []string{"slots: 4", "slots: 4\n    members: [{match: {user: root, command_line: collector}, slot: free}]"}, []string{"telemetry change members (no member loses its slot)"}},
		{"rename", []string{"telemetry:", "collectors:"}, []string{"telemetry remove service (the kernel's hash decides from then on)", "collectors add service ()"}},
		{"metrics", []string{"services:", "metrics: {listen: \"127.0.0.1:9732\"}\nservices:"}, []string{" change metrics: none -> 127.0.0.1:9732 ()"}},
		{"web page", []string{"services:", "ui: {listen: \"127.0.0.1:9733\", token_file: token}\nservices:"}, []string{" change web page: none -> 127.0.0.1:9733, token ()"}},
		{"two", []string{"slots: 4", "slots: 3\n    backlog: 9"}, []string{"telemetry change slots: 4 -> 3 (0 of 0 devices seen move)", "telemetry change backlog: 0 -> 9 ()"}},
	} {
		plan, err := a.Plan(api.Candidate{Text: policyText(onePolicy, c.replace...), Path: a.options.Policy})
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		var got []string
		for _, change := range plan.Changes {
			got = append(got, change.Service+" "+change.Action+" "+change.What+" ("+change.Effect+")")
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%s:\ngot  %q\nwant %q", c.name, got, c.want)
		}
	}
}

// Apply and apply --previous swap the applied and the previous policy.
func TestPreviousPolicy(t *testing.T) {
	dir := t.TempDir()
	a := testAgent(t, dir, testenv.BPFFS(t)+"/sockeye")
	defer a.stop()
	a.begin(t, policyText(onePolicy))
	defer retire(t, a)
	if _, err := a.Apply(api.Candidate{Previous: true}); fault.Code(err) != fault.CodeUsage {
		t.Errorf("without a previous policy: %v", err)
	}
	next := policyText(onePolicy, "slots: 4", "slots: 2")
	for _, want := range []int{2, 4, 2} {
		c := api.Candidate{Previous: true}
		if want == 2 && a.policy.Services[0].Slots == 4 && !exists(filepath.Join(dir, previousFile)) {
			c = api.Candidate{Text: next, Path: a.options.Policy}
		}
		if _, err := a.Apply(c); err != nil {
			t.Fatal(err)
		}
		status, err := a.Status()
		if err != nil || status.Services[0].Slots != want {
			t.Errorf("want %d slots in %+v, %v", want, status, err)
		}
	}
	if _, err := a.Apply(api.Candidate{}); fault.Code(err) != fault.CodeUsage || !strings.Contains(err.Error(), "no such file") {
		t.Errorf("without a policy file: %v", err)
	}
	if a.policy.Services[0].Slots != 2 {
		t.Errorf("the policy is %+v", a.policy)
	}
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
