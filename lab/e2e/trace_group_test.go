// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"sockeye/internal/api"
	"sockeye/internal/config"
	"sockeye/internal/trace/measure"
	"sockeye/lab"
)

// groups are the groups of a rule, with their numbers of messages.
func (h *tuned) groups(rule string) map[measure.Group]uint64 {
	h.Helper()
	var r api.TraceResults
	h.query("/results", &r, "select", "rule="+rule)
	groups := map[measure.Group]uint64{}
	for _, result := range r.Results {
		if groups[result.Group] > 0 {
			h.Errorf("two results of group %+v", result.Group)
		}
		groups[result.Group] = result.Chosen
	}
	return groups
}

// TestTraceGroups checks that messages are counted by the group_by of their rule. Messages beyond the maximum number of
// groups are counted in the group other.
func TestTraceGroups(t *testing.T) {
	t.Parallel()
	h := newTuned(t, lab.LinkOptions{})
	for prefix, gateway := range map[string]netip.Addr{"10.91.0.0/16": far4, "fd91::/16": far6} {
		h.must(h.devices.Own(netip.MustParsePrefix(prefix)))
		h.must(h.collectors.AddRoute(netip.MustParsePrefix(prefix), gateway))
	}
	near := h.makeGroup("near")
	h.setTrace(
		fmt.Sprintf("{name: few, cgroup: %s, match: {port: %d, role: connect}, messages: 1/1, group_by: remote/24, groups: 4}", near, tracePort),
		fmt.Sprintf("{name: bits, cgroup: %s, match: {port: %d, role: connect}, messages: 1/1, group_by: [{remote: {ipv4: 20, ipv6: 32}}, port]}", near, tracePort+1),
		fmt.Sprintf("{name: accepts, cgroup: %s, match: {role: accept}, messages: 1/1, group_by: [port, cgroup]}", near),
	)
	h.startAgent()
	p, far := h.startNear("near"), h.startFar()
	for port := range uint16(2) {
		far.listen(tracePort + port)
		p.listen(tracePort + port)
	}
	var to []netip.Addr
	for i := range 6 {
		to = append(to, netip.MustParseAddr(fmt.Sprintf("10.91.%d.1", 8*i)), netip.MustParseAddr(fmt.Sprintf("fd91:%d::1", i)))
	}
	p.connect(24, at(tracePort, to...)...)
	h.ended("rule=few", 24)
	groups := h.groups("few")
	other, all := uint64(0), uint64(0)
	for g, n := range groups {
		all += n
		switch {
		case g.Other:
			other = n
		case n != 2 || !g.Remote.IsValid() || g.Remote.Addr().Is4() != (g.Remote.Bits() == 24) || g.Remote.Addr().Is6() != (g.Remote.Bits() == 48):
			t.Errorf("%+v: %d messages", g, n)
		}
	}
	if len(groups) != 5 || all != 24 || other != 16 {
		t.Errorf("%d groups with %d messages, %d of them in other: %v", len(groups), all, other, groups)
	}
	if s := h.traced(near).Rules[0]; s.Groups != 4 || s.Limit != 4 {
		t.Errorf("sockeye trace: %+v", s)
	}
	if out, _, _ := h.cli("trace", "--select", "rule=few,other=true"); !strings.Contains(out, "few other") || !strings.Contains(out, "16 chosen = ") {
		t.Errorf("sockeye trace shows no other:\n%s", out)
	}

	p.connect(12, at(tracePort+1, to...)...)
	h.ended("rule=bits", 12)
	want := map[measure.Group]uint64{
		{Rule: "bits", Protocol: config.TCP, Port: tracePort + 1, Remote: netip.MustParsePrefix("10.91.0.0/20")}:  2,
		{Rule: "bits", Protocol: config.TCP, Port: tracePort + 1, Remote: netip.MustParsePrefix("10.91.16.0/20")}: 2,
		{Rule: "bits", Protocol: config.TCP, Port: tracePort + 1, Remote: netip.MustParsePrefix("10.91.32.0/20")}: 2,
	}
	for i := range 6 {
		want[measure.Group{Rule: "bits", Protocol: config.TCP, Port: tracePort + 1, Remote: netip.MustParsePrefix(fmt.Sprintf("fd91:%x::/32", i))}] = 1
	}
	if got := h.groups("bits"); fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("groups: %v\nwant %v", got, want)
	}

	far.connect(6, at(tracePort, near4, near6)...)
	far.connect(4, at(tracePort+1, near4, near6)...)
	h.ended("rule=accepts", 10)
	want = map[measure.Group]uint64{
		{Rule: "accepts", Protocol: config.TCP, Port: tracePort, Cgroup: near + "/near"}:     6,
		{Rule: "accepts", Protocol: config.TCP, Port: tracePort + 1, Cgroup: near + "/near"}: 4,
	}
	if got := h.groups("accepts"); fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("groups: %v\nwant %v", got, want)
	}

	// Counts survive a new agent and a new cgroup.
	before := h.groups("few")
	h.killAgent()
	h.startAgent()
	if got := h.groups("few"); fmt.Sprint(got) != fmt.Sprint(before) {
		t.Errorf("a new agent: %v, before %v", got, before)
	}
}

// TestTraceArms checks that the arms of a tune trial are separate groups, and that compare finds the stage that
// differs, also after a change of the tune rule. The metrics continue.
func TestTraceArms(t *testing.T) {
	t.Parallel()
	h := newTuned(t, lab.LinkOptions{Delay: 3 * time.Millisecond})
	near := h.makeGroup("near")
	tune := "{name: window, cgroup: " + near + ", set: {cwnd_clamp: 3, sndbuf: 1MB}, trial: {control: 50%}}"
	set := func(tune string) {
		h.setPolicyText(policySection("tune", tune) +
			traceText("{name: all, cgroup: "+near+", messages: 1/1, group_by: [rule, arm]}") + "metrics: {listen: \"127.0.0.1:9732\"}\n")
	}
	set(tune)
	h.startAgent()
	p, far := h.startNear("near"), h.startFar()
	far.listen(tracePort)
	exchange := func(connections int) {
		t.Helper()
		p.do(order{Do: "connect", N: connections, Parallel: 8, To: at(tracePort, far4, far6), Up: 14_000, Keep: true})
		p.do(order{Do: "exchanges", Parallel: 8, Up: 14_000, traceOrder: traceOrder{Count: 4}})
		p.do(order{Do: "close"})
	}
	const connections = 40
	exchange(connections)
	h.ended("", 5*connections)
	control := h.rule("window").Control
	arms := func(when string, want map[string]uint64) {
		t.Helper()
		got := map[string]uint64{}
		for g, n := range h.groups("all") {
			if g.TuneRule != "window" {
				t.Errorf("%s: %+v", when, g)
			}
			got[g.Arm] += n
		}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%s: %v messages, want %v", when, got, want)
		}
	}
	arms("at first", map[string]uint64{"control": 5 * control, "treated": 5 * (connections - control)})
	// A pause of the host while messages are in transit is in the network stage of all of them, and the explanation names it. A pause of
	// more than 200 ms expires the retransmission timer, and the explanation names the retransmission: the link itself loses nothing.
	slow := h.slowest("arm=treated", 100)
	held := slices.DeleteFunc(slices.Clone(slow), func(m api.TraceSlow) bool {
		return m.Explanation.Stage == config.StageNetwork && m.Stages[config.StageNetwork] > m.Stages[config.StageStack] ||
			m.Explanation.Cause == measure.CauseLoss && m.Retransmits > 0
	})
	small := slices.DeleteFunc(slices.Clone(held), func(m api.TraceSlow) bool {
		return m.Cwnd != 3 || m.Explanation.Cause != measure.CauseCwnd
	})
	if len(slow) == 0 || len(held) > 0 && len(small) <= len(held)/2 {
		t.Errorf("slowest messages with the small window: %d of %d are explained by the window: %+v", len(small), len(held), slow)
	}
	var compared struct {
		Comparison measure.Comparison `json:"comparison"`
		Summary    string             `json:"summary"`
	}
	h.show(&compared, "trace", "compare", "--trial", "window")
	i := slices.IndexFunc(compared.Comparison.Rows, func(r measure.Row) bool { return r.Stage == config.StageStack && r.Figure == "p50" })
	if i < 0 || compared.Comparison.Rows[i].Verdict != measure.Real || compared.Comparison.Rows[i].B < 12*time.Millisecond || compared.Comparison.Rows[i].A > 3*time.Millisecond {
		t.Errorf("a window of 3 packets: %+v", compared)
	}
	if !strings.Contains(compared.Summary, "stack") {
		t.Errorf("summary: %q", compared.Summary)
	}
	h.refuse(2, []string{"hint:"}, "trace", "compare", "--trial", "windows")
	page := filepath.Join(h.dir, "trace.html")
	if out, errs, code := h.cli("trace", "report", page); code != 0 {
		t.Errorf("sockeye trace report: exit code %d: %s%s", code, out, errs)
	}
	if b, err := os.ReadFile(page); err != nil || !strings.Contains(string(b), "arm=control") || !strings.Contains(string(b), "the congestion window, 3 packets") {
		t.Errorf("sockeye trace report: %v, %d bytes", err, len(b))
	}
	h.refuse(2, []string{"both", "the group", "hint:"}, "trace", "compare", "arm=control", "tune_rule=window")

	// A new version of the rule has another number and the same name.
	set(strings.Replace(tune, "cwnd_clamp: 3", "cwnd_clamp: 4", 1))
	var plan api.Plan
	h.show(&plan, "apply")
	for _, c := range plan.Changes {
		if strings.Contains(c.What, "trace") {
			t.Errorf("a change of tune changed the tracing: %+v", c)
		}
	}
	exchange(10)
	h.ended("", 5*(connections+10))
	control += h.rule("window").Control
	want := map[string]uint64{"control": 5 * control, "treated": 5 * (connections + 10 - control)}
	arms("another version of the rule", want)
	agrees := func(when string) {
		t.Helper()
		metrics := h.scrape("127.0.0.1:9732")
		for arm, n := range want {
			name := fmt.Sprintf("sockeye_trace_chosen_total{arm=%q,cgroup=%q,group_cgroup=\"\",port=\"\",protocol=\"tcp\",remote=\"\",rule=\"all\",service=\"\",tune_rule=\"window\"}", arm, near)
			if got := uint64(metrics[name]); got != n {
				t.Errorf("%s: %s is %d, want %d", when, name, got, n)
			}
		}
	}
	agrees("another version of the rule")
	h.killAgent()
	h.startAgent()
	arms("a new agent", want)
	agrees("a new agent")

	// Remove tune, and add it again. The rules have new numbers, so that all counts restart.
	h.setTrace("{name: all, cgroup: " + near + ", messages: 1/1, group_by: [rule, arm]}")
	h.show(&plan, "apply")
	p.connect(3, at(tracePort, far4)...)
	if r := h.ended("tune_rule=none,arm=none", 3); r.Chosen != 3 {
		t.Errorf("without tune: %+v", r)
	}
	set(tune)
	h.show(&plan, "apply")
	p.connect(4, at(tracePort, far4)...)
	if r := h.ended("", 4); r.Chosen != 4 || r.Group.TuneRule != "window" {
		t.Errorf("with tune again: %+v", r)
	}
	// A policy that fails in a late step changes neither domain.
	text, err := os.ReadFile(h.policyPath())
	h.must(err)
	h.setTrace("{name: all, cgroup: "+near+", messages: 1/1, group_by: [rule, arm]}", "{name: zz, cgroup: "+h.group("zz/deeper/still")+"}")
	more := h.noDeeperThan(2)
	if _, errs, code := h.cli("apply"); code == 0 {
		t.Errorf("an impossible policy was applied: %s", errs)
	}
	more()
	h.must(os.WriteFile(h.policyPath(), text, 0o644))
	n := h.results("tune_rule=window").Chosen
	p.connect(4, at(tracePort, far4)...)
	h.ended("tune_rule=window", n+4)
}

// TestTraceService checks that the listeners of a service select its messages.
func TestTraceService(t *testing.T) {
	t.Parallel()
	h := newHost(t, config.Reuseport)
	h.setPolicy(2)
	text, err := os.ReadFile(h.policyPath())
	h.must(err)
	h.must(os.WriteFile(h.policyPath(), append(text, fmt.Sprintf(
		"trace:\n  - {name: served, cgroup: /%[1]s, match: {service: telemetry}, messages: 1/1, group_by: [service, port]}\n  - {name: rest, cgroup: /%[1]s, messages: 1/1, group_by: service}\n",
		h.lab.CgroupPath())...), 0o644))
	h.startAgent()
	h.start(0, 1)
	h.ready(0, 1)
	all := addresses(20)
	h.lands("with rules", all, h.homes(2))
	traced := &tuned{host: h}
	r := traced.ended("rule=served", 20)
	want := measure.Group{Rule: "served", Protocol: config.TCP, Service: "telemetry", Port: bmpPort}
	if r.Chosen != 20 || r.Group != want {
		t.Errorf("%d messages of %+v, want 20 of %+v", r.Chosen, r.Group, want)
	}
}
