// SPDX-License-Identifier: Apache-2.0

//go:build !vm

package trace

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/rlimit"

	"sockeye/internal/api"
	"sockeye/internal/bpf"
	"sockeye/internal/bpf/pin"
	"sockeye/internal/bpf/probe"
	"sockeye/internal/config"
	"sockeye/internal/domain/domaintest"
	"sockeye/internal/fault"
	"sockeye/internal/scope"
	"sockeye/internal/testenv"
)

const (
	needsTimestamps = "BPF timestamping, Linux 6.15 or later"
	needsSend       = "fentry programs, which this kernel does not allow"
)

// lacks lists what this kernel lacks, by the text that reports it.
func lacks(t *testing.T) map[string]bool {
	t.Helper()
	// Before Linux 5.11, maps and programs are charged to RLIMIT_MEMLOCK.
	if err := rlimit.RemoveMemlock(); err != nil {
		t.Fatal(err)
	}
	lacks := make(map[string]bool)
	for needs, err := range map[string]error{needsTimestamps: probe.HaveTimestamps(), needsSend: bpf.HaveSend()} {
		lacks[needs] = errors.Is(err, ebpf.ErrNotSupported)
		if err != nil && !lacks[needs] {
			t.Fatal(err)
		}
	}
	return lacks
}

// TestCheckTrace checks that each stage is measured, or skipped with the kernel that it would need. A rule without a
// stage that can be measured is refused in one line.
func TestCheckTrace(t *testing.T) {
	lacks := lacks(t)
	send := needsTimestamps
	if lacks[needsSend] {
		send = needsSend
	}
	for _, test := range []struct {
		rule string
		// needs returns the requirements of the stages of a rule, in their order.
		stages []string
		needs  []string
		all    bool // each of its stages needs something
	}{
		{"stages: [stack, qdisc, network]", []string{"stack", "qdisc", "network"}, []string{needsTimestamps, needsTimestamps, needsTimestamps}, true},
		{"stages: [send]", []string{"send"}, []string{send}, true},
		{"stages: [send, reader]", []string{"send"}, []string{send}, false},
		{"stages: [stack, rx_stack, reader]", []string{"stack"}, []string{needsTimestamps}, false},
		{"stages: [rx_stack, reader]", nil, nil, false},
		{"stages: [stack, qdisc], protocols: [udp]", nil, nil, false},
		{"stages: [stack, network], protocols: [tcp, udp]", []string{"network"}, []string{needsTimestamps}, false},
	} {
		policy, err := config.Parse([]byte("trace: [{name: x, cgroup: /x, "+test.rule+"}]"), "policy.yaml")
		if err != nil {
			t.Fatal(err)
		}
		var want []api.TraceSkipped
		for i, stage := range test.stages {
			if lacks[test.needs[i]] {
				want = append(want, api.TraceSkipped{Stage: stage, Needs: test.needs[i]})
			}
		}
		skipped, err := SkippedStages(policy.Trace)
		if fmt.Sprint(skipped["x"]) != fmt.Sprint(want) {
			t.Errorf("%s: skipped are %v, want %v", test.rule, skipped["x"], want)
		}
		if !test.all || len(want) == 0 {
			if err != nil {
				t.Errorf("%s: %v", test.rule, err)
			}
			continue
		}
		checkNothingLeft(t, err, want[0])
	}
}

func checkNothingLeft(t *testing.T, err error, first api.TraceSkipped) {
	t.Helper()
	text := fmt.Sprintf("trace rule x: this kernel cannot measure any of its stages: %s requires %s", first.Stage, first.Needs)
	if err == nil || err.Error() != text || fault.Code(err) != fault.CodeUnsupported || !strings.Contains(fault.Hint(err), "sockeye trace packets") {
		t.Errorf("%v, code %d, hint %q; want %s", err, fault.Code(err), fault.Hint(err), text)
	}
}

// TestNothingLeft checks the result for rules on a kernel without timestamps, whatever this kernel has.
func TestNothingLeft(t *testing.T) {
	policy, err := config.Parse([]byte("trace: [{name: y, cgroup: /x, match: {port: 1}, stages: [stack, reader]}, {name: x, cgroup: /x, stages: [stack, network]}]"), "policy.yaml")
	if err != nil {
		t.Fatal(err)
	}
	stack, network := api.TraceSkipped{Stage: "stack", Needs: needsTimestamps}, api.TraceSkipped{Stage: "network", Needs: needsTimestamps}
	if err := unmeasurable(policy.Trace, map[string][]api.TraceSkipped{"y": {stack}, "x": {network}}); err != nil {
		t.Error(err)
	}
	checkNothingLeft(t, unmeasurable(policy.Trace, map[string][]api.TraceSkipped{"y": {stack}, "x": {stack, network}}), stack)
}

// TestTraceUnsupportedStages starts an agent whose policy has stages that this kernel cannot measure: it traces the
// others, reports these, and refuses an apply that adds more of them.
func TestTraceUnsupportedStages(t *testing.T) {
	lacks := lacks(t)
	if !lacks[needsSend] && !lacks[needsTimestamps] {
		t.Skip("kernel: it can measure all")
	}
	a := traceRunner(t, t.TempDir(), testenv.BPFFS(t)+"/sockeye")
	defer a.Stop()
	a.Start(t, domaintest.Policy("trace:\n  - {name: x, cgroup: CGROUP, messages: 1/1, stages: [send, stack, rx_stack]}\n"))
	defer a.Retire(t)
	status, err := tracingOf(a).Cgroups("")
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"stack", "rx_stack"}
	if lacks[needsTimestamps] {
		want = want[1:]
	}
	if c := status.Cgroups[0]; !c.Attached || c.Problem != "" || fmt.Sprint(c.Rules[0].Stages) != fmt.Sprint(want) {
		t.Errorf("%+v, want stages %v", c, want)
	}
	if status.Timestamps == lacks[needsTimestamps] || !status.Timestamps && status.Needs != needsTimestamps {
		t.Errorf("timestamps %v, %q", status.Timestamps, status.Needs)
	}
	talk(t, 3)
	results, err := tracingOf(a).Results(nil)
	if err != nil {
		t.Fatal(err)
	}
	var sent, received uint64
	for _, r := range results.Results {
		sent += r.Chosen
		received += r.RXChosen
	}
	if lacks[needsTimestamps] != (sent == 0) || received == 0 {
		t.Errorf("%d messages sent and %d segments received are counted", sent, received)
	}
	_, err = a.Apply(domaintest.Policy("trace:\n  - {name: x, cgroup: CGROUP, stages: [send]}\n"))
	first := api.TraceSkipped{Stage: "send", Needs: needsTimestamps}
	if lacks[needsSend] {
		first.Needs = needsSend
	}
	checkNothingLeft(t, err, first)
	if status, err = tracingOf(a).Cgroups(""); err != nil || fmt.Sprint(status.Cgroups[0].Rules[0].Stages) != fmt.Sprint(want) {
		t.Errorf("after a policy that was refused: %+v, %v", status, err)
	}
}

// TestTraceOnlyUnsupportedStages starts an agent whose policy has no stage that this kernel can measure: it
// starts, reports that, and attaches nothing.
func TestTraceOnlyUnsupportedStages(t *testing.T) {
	lacks := lacks(t)
	first := api.TraceSkipped{Stage: "send", Needs: needsTimestamps}
	switch {
	case lacks[needsSend]:
		first.Needs = needsSend
	case !lacks[needsTimestamps]:
		t.Skip("kernel: it can measure all")
	}
	a := traceRunner(t, t.TempDir(), testenv.BPFFS(t)+"/sockeye")
	defer a.Stop()
	a.Start(t, domaintest.Policy("trace:\n  - {name: x, cgroup: CGROUP, messages: 1/1, stages: [send]}\n"))
	defer a.Retire(t)
	status, err := tracingOf(a).Cgroups("")
	if err != nil {
		t.Fatal(err)
	}
	c := status.Cgroups[0]
	if c.Attached || len(c.Programs) > 0 || len(c.Rules[0].Stages) > 0 {
		t.Errorf("%+v", c)
	}
	checkNothingLeft(t, &fault.Error{Err: errors.New(c.Problem), Hint: c.Hint, Code: fault.CodeUnsupported}, first)
	if left, err := pin.Pinned(a.Host.Root.Tracing(scope.PinName(testenv.CgroupPath()))); left || err != nil {
		t.Errorf("pins: %v", err)
	}
	// A policy that the kernel supports clears the error.
	policy := domaintest.Policy("trace:\n  - {name: x, cgroup: CGROUP, messages: 1/1, stages: [rx_stack]}\n")
	if _, err := a.Apply(policy); err != nil {
		t.Error(err)
	}
	if status, err = tracingOf(a).Cgroups(""); err != nil || !status.Cgroups[0].Attached || status.Cgroups[0].Problem != "" {
		t.Errorf("then: %+v, %v", status, err)
	}
}
