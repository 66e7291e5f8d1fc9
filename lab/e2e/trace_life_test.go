// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"

	"sockeye/internal/api"
	"sockeye/lab"
)

// tracePins returns the pin directories of tracings.
func (h *tuned) tracePins() []string {
	h.Helper()
	found, err := filepath.Glob(filepath.Join(h.pins, "trace_*"))
	h.must(err)
	return found
}

// calls attaches a program that counts the messages for which the kernel calls the programs of a cgroup, and returns a
// function that reads the count.
func (h *tuned) calls(dir string) (read func() uint64) {
	h.Helper()
	const sendmsg = 20 // BPF_SOCK_OPS_TSTAMP_SENDMSG_CB
	counts, err := ebpf.NewMap(&ebpf.MapSpec{Name: "calls", Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1})
	h.must(err)
	h.Cleanup(func() { counts.Close() })
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "calls", Type: ebpf.SockOps, AttachType: ebpf.AttachCGroupSockOps, License: "Apache-2.0",
		Instructions: asm.Instructions{
			asm.LoadMem(asm.R2, asm.R1, 0, asm.Word), // op
			asm.JNE.Imm(asm.R2, sendmsg, "out"),
			asm.StoreImm(asm.R10, -4, 0, asm.Word),
			asm.LoadMapPtr(asm.R1, counts.FD()),
			asm.Mov.Reg(asm.R2, asm.R10),
			asm.Add.Imm(asm.R2, -4),
			asm.FnMapLookupElem.Call(),
			asm.JEq.Imm(asm.R0, 0, "out"),
			asm.Mov.Imm(asm.R1, 1),
			asm.StoreXAdd(asm.R0, asm.R1, asm.DWord),
			asm.Mov.Imm(asm.R0, 1).WithSymbol("out"),
			asm.Return(),
		},
	})
	h.must(err)
	h.Cleanup(func() { p.Close() })
	l, err := link.AttachCgroup(link.CgroupOptions{Path: dir, Attach: ebpf.AttachCGroupSockOps, Program: p})
	h.must(err)
	h.Cleanup(func() { l.Close() })
	return func() uint64 {
		h.Helper()
		b, err := counts.LookupBytes(uint32(0))
		h.must(err)
		return binary.NativeEndian.Uint64(b)
	}
}

// exchanges exchanges n messages on all connections of a peer.
func (p *peer) exchanges(count int) {
	p.h.Helper()
	p.do(order{Do: "exchanges", Parallel: 8, Up: 1000, traceOrder: traceOrder{Count: count}})
}

// TestTraceLifecycle applies a series of policies. Plan announces each change and the counts that restart. The last
// policy removes all programs and pins.
func TestTraceLifecycle(t *testing.T) {
	t.Parallel()
	h := newTuned(t, lab.LinkOptions{})
	near := h.makeGroup("near")
	made, other := h.group("made/deeper"), h.group("other")
	base := "{name: base, cgroup: " + near + ", messages: 1/1}"
	fresh := "{name: fresh, cgroup: " + made + ", messages: 100/s, group_by: [remote/24, port]}"
	h.setPolicyText("tune: []\n")
	h.startAgent()
	p, far := h.startNear("near"), h.startFar()
	far.listen(tracePort)
	both := at(tracePort, far4, far6)
	p.connect(4, both...)
	for _, command := range [][]string{{"trace"}, {"trace", "slow"}} {
		if out, errs, code := h.cli(command...); code != 0 || !strings.Contains(out, "there are no trace rules") || !strings.Contains(out, "hint:") {
			t.Errorf("sockeye %v without rules: exit code %d: %s%s", command, code, out, errs)
		}
	}

	// Open connections are traced from now on.
	h.setTrace(base, fresh)
	var plan, applied api.Plan
	h.show(&plan, "plan")
	for what, want := range map[[2]string]string{
		{near, "trace base: 1/1 of connections, 1/1 of their messages"}: "add: of all",
		{made, "cgroup"}: "add: the cgroup is created",
		{made, "trace fresh: 1/1 of connections, 100/s of their messages"}: "add: of all",
	} {
		if effect := h.change(plan, what[0], what[1]); !strings.HasPrefix(effect, want) {
			t.Errorf("plan: %s of %s: %q, want %q", what[1], what[0], effect, want)
		}
	}
	if h.exists(h.groupDir("made")) || len(h.tracePins()) > 0 {
		t.Error("plan created a cgroup or pins")
	}
	h.show(&applied, "apply")
	if !slices.Equal(applied.Changes, plan.Changes) {
		t.Errorf("changes of apply %+v, of plan %+v", applied.Changes, plan.Changes)
	}
	for cgroup, created := range map[string]bool{near: false, made: true} {
		s := h.traced(cgroup)
		if !s.Attached || s.Created != created || s.Path != cgroup || s.Problem != "" || len(s.Rules) != 1 || !slices.Contains(s.Programs, "trace_sockops") || s.Memory == 0 {
			t.Errorf("sockeye trace: %+v", s)
		}
	}
	p.exchanges(5)
	h.ended("rule=base", 20)
	p.connect(2, both...)
	if r := h.ended("rule=base", 22); r.Chosen != 22 || r.Bytes != 22*1008 {
		t.Errorf("of 22 messages: %+v", r)
	}
	h.show(&applied, "apply")
	if len(applied.Changes) > 0 {
		t.Errorf("apply again: %+v", applied.Changes)
	}

	// Rules change while messages are in transit: all counts restart, and only messages in transit are lost.
	smaller := strings.Replace(base, "1/1}", "1/1, group_by: port}", 1)
	elsewhere := "{name: elsewhere, cgroup: " + other + "}"
	h.setTrace(smaller, elsewhere)
	h.show(&plan, "plan")
	for what, want := range map[[2]string]string{
		{near, "trace base"}:                     "change: counts restart at 0",
		{made, "trace fresh"}:                    "remove: its counts are deleted",
		{other, "cgroup"}:                        "add: the cgroup is created",
		{other, "trace elsewhere: 1/1 of conne"}: "add: of all",
	} {
		if effect := h.change(plan, what[0], what[1]); !strings.HasPrefix(effect, want) {
			t.Errorf("plan: %s of %s: %q, want %q", what[1], what[0], effect, want)
		}
	}
	since := h.traced(near).Since
	done := make(chan struct{})
	go func() {
		defer close(done)
		h.show(&applied, "apply")
	}()
	for busy := true; busy; {
		select {
		case <-done:
			busy = false
		default:
			p.exchanges(20)
		}
	}
	p.exchanges(1)
	if !slices.Equal(applied.Changes, plan.Changes) {
		t.Errorf("changes of apply %+v, of plan %+v", applied.Changes, plan.Changes)
	}
	if !h.traced(near).Since.After(since) || h.exists(h.groupDir("made")) || !h.exists(h.groupDir("other")) {
		t.Errorf("after apply: since %v, before %v", h.traced(near).Since, since)
	}
	r := h.ended(fmt.Sprintf("port=%d", tracePort), 6)
	p.exchanges(3)
	if later := h.ended(fmt.Sprintf("port=%d", tracePort), r.Chosen+18); later.Chosen != r.Chosen+18 {
		t.Errorf("after apply: %d messages, then %d, want 18 more", r.Chosen, later.Chosen)
	}

	// A policy that cannot be applied changes nothing, including the counts.
	before := h.results("rule=base")
	since = h.traced(near).Since
	for _, wrong := range []struct {
		rule  string
		code  int
		words []string
	}{
		{"{name: base, cgroup: " + near + ", messages: 1/0}", 2, []string{"policy.yaml:2:", "messages", "hint:"}},
		{"{name: base, cgroup: " + near + ", stages: [stack, qdisk]}", 2, []string{"policy.yaml:2:", "qdisk", "did you mean qdisc?"}},
	} {
		h.setTrace(wrong.rule, elsewhere)
		h.refuse(wrong.code, wrong.words, "plan")
		h.refuse(wrong.code, wrong.words, "apply")
	}
	for _, obstacle := range []struct {
		name  string
		in    func() (out func())
		of    string // the cgroup that fails
		stays bool   // no earlier step was applied
	}{
		{"a program that takes no other", func() func() { return attachAlone(t, h.lab.Cgroup()) }, near, true},
		{"no deeper cgroups", func() func() { return h.noDeeperThan(2) }, h.group("zz/deeper/still"), false},
	} {
		pins := h.tracePins()
		h.setTrace(base, elsewhere, "{name: zz, cgroup: "+h.group("zz/deeper/still")+"}")
		away := obstacle.in()
		if _, errs, code := h.cli("apply"); code == 0 || !strings.Contains(errs, "trace "+obstacle.of) {
			t.Errorf("%s: exit code %d: %s", obstacle.name, code, errs)
		}
		away()
		if h.exists(h.groupDir("zz")) || !slices.Equal(pins, h.tracePins()) {
			t.Errorf("%s: a failed policy left a cgroup or pins: %v, before %v", obstacle.name, h.tracePins(), pins)
		}
		if s := h.traced(near); !s.Attached || s.Problem != "" || len(s.Rules[0].GroupBy) != 1 || s.Since.Equal(since) != obstacle.stays {
			t.Errorf("%s: %+v, before since %v", obstacle.name, s, since)
		}
		p.exchanges(1)
		want := uint64(6)
		if obstacle.stays {
			want += before.Chosen
		}
		if r := h.ended("rule=base", want); r.Chosen != want {
			t.Errorf("%s: %d messages, want %d", obstacle.name, r.Chosen, want)
		}
	}

	// Roll back, and apply again.
	h.setTrace(smaller)
	h.show(&applied, "apply")
	h.show(&applied, "apply", "--previous")
	if !h.traced(other).Attached || !h.exists(h.groupDir("other")) {
		t.Error("apply --previous did not restore the previous policy")
	}

	// If another process removes a cgroup, the agent does not create it again. If another process creates it again, the
	// agent does not remove it.
	h.must(os.Remove(h.groupDir("other")))
	h.eventually("the removal of the cgroup to be noticed", func() error {
		if s := h.traced(other); s.Attached || s.Created || !strings.Contains(s.Problem, "there is no cgroup") || h.exists(h.groupDir("other")) {
			return fmt.Errorf("%+v", s)
		}
		return nil
	})
	h.must(os.Mkdir(h.groupDir("other"), 0o755))
	h.eventually("the new cgroup to be traced", func() error {
		if s := h.traced(other); !s.Attached || s.Created || s.Problem != "" {
			return fmt.Errorf("%+v", s)
		}
		return nil
	})
	again := h.startNear("other")
	again.connect(3, both...)
	h.ended("rule=elsewhere", 0)
	h.must(again.Kill())
	h.eventually("its cgroup to be empty", func() error { return os.Remove(again.CgroupDir()) })

	// A removed rule leaves no program, no pin and no state of open connections.
	calls := h.calls(h.groupDir("near"))
	p.exchanges(1)
	if n := calls(); n != 6 {
		t.Errorf("the kernel called the program for %d messages, want 6", n)
	}
	n := calls()
	h.applyTrace(strings.Replace(base, "messages", "match: {port: 1}, messages", 1), elsewhere)
	p.exchanges(1)
	if more := calls() - n; more != 0 {
		t.Errorf("the kernel called the program for %d messages of connections that the rule no longer matches", more)
	}
	h.applyTrace(base, elsewhere)
	n = calls()
	p.exchanges(1)
	if more := calls() - n; more != 6 {
		t.Errorf("the kernel called the program for %d messages of connections that the rule matches again, want 6", more)
	}
	h.applyTrace(elsewhere)
	if n := len(sockOps(t, h.groupDir("near"))); n != 1 || len(h.tracePins()) != 1 {
		t.Errorf("removed rule: %d programs, pins %v", n, h.tracePins())
	}
	n = calls()
	p.exchanges(5)
	if more := calls() - n; more != 0 {
		t.Errorf("the kernel still called the program for %d messages of connections that were traced before", more)
	}

	// An agent that starts with another policy removes the pins of the previous one.
	h.applyTrace(base)
	n = calls()
	p.exchanges(1)
	if calls() != n+6 {
		t.Errorf("traced again: the kernel calls for %d messages, want 6", calls()-n)
	}
	h.stopAgent()
	h.must(os.Remove(h.groupDir("other")))
	h.setTrace(elsewhere)
	h.startAgent()
	if n := len(sockOps(t, h.groupDir("near"))); n != 1 || len(h.tracePins()) != 1 {
		t.Errorf("a new agent with another policy: %d programs, pins %v", n, h.tracePins())
	}
	n = calls()
	p.exchanges(1)
	if more := calls() - n; more != 0 {
		t.Errorf("a new agent with another policy: the kernel still calls for %d messages", more)
	}
	h.stopAgent()
	if out, errs, code := h.cli("reset", "--pins", h.pins); code != 0 {
		t.Fatalf("reset: exit code %d: %s%s", code, out, errs)
	}
	if h.exists(h.groupDir("other")) || h.exists(h.pins) {
		t.Error("reset left a cgroup or pins")
	}
}

// TestTraceAgentKilled kills the agent while messages are in transit. The measurement continues, and the next agent
// adopts the counts and reports that it has no history.
func TestTraceAgentKilled(t *testing.T) {
	t.Parallel()
	h := newTuned(t, lab.LinkOptions{Delay: time.Millisecond})
	near := h.makeGroup("near")
	h.setTrace("{name: all, cgroup: " + near + ", messages: 1/1}")
	h.startAgent()
	p, far := h.startNear("near"), h.startFar()
	far.listen(tracePort)
	p.connect(4, at(tracePort, far4, far6)...)
	p.exchanges(10)
	h.ended("", 44)
	if r := h.ended("", 44, "since", "1m"); r.Chosen != 44 {
		t.Errorf("the last minute: %+v", r)
	}
	var results api.TraceResults
	h.query("/results", &results, "since", "1h")
	if !results.Partial {
		t.Error("an agent that has just started returns an hour of history")
	}
	since := h.traced(near).Since
	running := p.order(order{Do: "exchanges", Parallel: 4, Up: 1000, traceOrder: traceOrder{Count: 200}})
	h.eventually("some of the messages", func() error {
		if r := h.results(""); r.Chosen < 100 {
			return fmt.Errorf("%d", r.Chosen)
		}
		return nil
	})
	h.killAgent()
	p.order(order{Do: "look"})
	running()
	h.startAgent()
	p.out.Close()
	r := h.ended("", 844)
	if r.Chosen != 844 || r.Bytes != 844*1008 || !h.traced(near).Since.Equal(since) {
		t.Errorf("a new agent: %+v since %v, before since %v", r, h.traced(near).Since, since)
	}
	h.query("/results", &results, "since", "1m")
	if !results.Partial || ended(h.results("", "since", "1m").Outcomes) != 0 {
		t.Errorf("a new agent returns history of an earlier agent: %+v", results)
	}
	if out, _, code := h.cli("trace", "--since", "1m"); code != 0 || !strings.Contains(out, "of which measurements are available") {
		t.Errorf("sockeye trace --since 1m of a new agent: exit code %d:\n%s", code, out)
	}
	if list := h.slowest("", 10); len(list) == 0 {
		t.Error("the slowest messages of the previous agent are lost")
	}
}

// TestTraceUnit checks that a rule for a unit waits for the unit, finds it in any cgroup, and continues its counts.
func TestTraceUnit(t *testing.T) {
	t.Parallel()
	h := newTuned(t, lab.LinkOptions{})
	unit := h.unit(".service")
	h.setTrace("{name: beside, cgroup: " + h.makeGroup("beside") + "}")
	h.startAgent()
	rule := "{name: unit, cgroup: " + unit + ", messages: 1/1}"
	h.setTrace(rule)
	var plan api.Plan
	h.show(&plan, "plan")
	if effect := h.change(plan, unit, "unit"); !strings.Contains(effect, "it is traced as soon as it starts") {
		t.Errorf("plan of a missing unit: %q", effect)
	}
	h.show(&plan, "apply")
	waiting := func() {
		t.Helper()
		h.eventually("the unit to be reported as missing", func() error {
			if s := h.traced(unit); s.Attached || s.Path != "" || !strings.Contains(s.Problem, "there is no unit "+unit) || s.Hint == "" {
				return fmt.Errorf("%+v", s)
			}
			return nil
		})
	}
	waiting()
	if out, _, _ := h.cli("trace"); !strings.Contains(out, unit+": not attached: there is no unit") || !strings.Contains(out, "hint:") {
		t.Errorf("sockeye trace does not show the missing unit:\n%s", out)
	}
	far := h.startFar()
	far.listen(tracePort)
	var all uint64
	for i, dir := range []string{"", h.slice("deep", "down", "here"), h.slice("deep", "down", "here"), h.slice("elsewhere")} {
		h.makeGroup(dir + unit)
		h.eventually("the unit to be traced", func() error {
			if s := h.traced(unit); !s.Attached || s.Path != h.group(dir+unit) || s.Problem != "" {
				return fmt.Errorf("%+v", s)
			}
			return nil
		})
		p := h.startPeer(h.collectors, dir+unit, "member")
		p.connect(4, at(tracePort, far4, far6)...)
		all += 4
		if r := h.ended("rule=unit", all); r.Chosen != all {
			t.Errorf("unit in %q: %d messages, want %d", dir, r.Chosen, all)
		}
		// The history has each message once, although the unit did not exist in between.
		remembered := all
		if i == 3 {
			remembered = 4
		}
		if r := h.ended("rule=unit", remembered, "since", "10m"); r.Chosen != remembered {
			t.Errorf("unit in %q: in the last minutes %d messages, want %d", dir, r.Chosen, remembered)
		}
		if i == 2 {
			h.killAgent()
		}
		h.must(p.Kill())
		h.eventually("the cgroup to be empty", func() error { return os.Remove(p.CgroupDir()) })
		h.must(os.Remove(filepath.Dir(p.CgroupDir())))
		if i == 2 {
			h.startAgent()
		}
		waiting()
	}
	h.makeGroup(h.slice("deep") + unit)
	h.makeGroup(h.slice("elsewhere") + unit)
	h.refuse(5, []string{unit, "there are 2", "hint:"}, "plan")
}

// TestTraceNested checks that cgroups have separate rules and counts, including nested cgroups that are removed in any
// order. Tune and trace rules may have different cgroups.
func TestTraceNested(t *testing.T) {
	t.Parallel()
	h := newTuned(t, lab.LinkOptions{})
	outer, inner, beside := h.makeGroup("outer"), h.makeGroup("outer/inner"), h.makeGroup("outer-not")
	rule := func(name, cgroup string) string {
		return "{name: " + name + ", cgroup: " + cgroup + ", messages: 1/1, group_by: cgroup}"
	}
	tune := policySection("tune", "{name: tuned, cgroup: "+inner+", set: {sndbuf: 50KB}}")
	h.setPolicyText(traceText(rule("outer", outer), rule("beside", beside)) + tune)
	h.startAgent()
	far := h.startFar()
	far.listen(tracePort)
	both := at(tracePort, far4, far6)
	a, b := h.startPeer(h.collectors, "outer/inner", "a"), h.startPeer(h.collectors, "outer-not", "b")
	h.has("the inner cgroup", a.connect(3, both...), "sndbuf", 100_000)
	b.connect(2, both...)
	counts := func(when string, want map[string]uint64) {
		t.Helper()
		for name, n := range want {
			if r := h.ended("rule="+name, n); r.Chosen != n {
				t.Errorf("%s: %d messages of rule %s, want %d", when, r.Chosen, name, n)
			}
		}
	}
	counts("beside each other", map[string]uint64{"outer": 3, "beside": 2})
	if r := h.results("cgroup=" + inner + "/a"); r.Chosen != 3 {
		t.Errorf("%d messages of the inner cgroup, want 3", r.Chosen)
	}
	for cgroup, want := range map[string]uint64{outer: 3, beside: 2} {
		for _, since := range []string{"", "10m"} {
			if r := h.results("", "cgroup", cgroup, "since", since); r.Chosen != want {
				t.Errorf("cgroup %s, since %q: %d messages, want %d", cgroup, since, r.Chosen, want)
			}
		}
	}

	// Nested cgroups: both count the message.
	both2 := traceText(rule("outer", outer), rule("inner", inner))
	apply := func(text string) {
		t.Helper()
		h.setPolicyText(text)
		var plan api.Plan
		h.show(&plan, "apply")
	}
	apply(both2)
	a.exchanges(2)
	counts("one in the other", map[string]uint64{"outer": 9, "inner": 6})
	// The outer cgroup is created again and removed. The inner cgroup continues.
	apply(strings.Replace(both2, "1/1", "1/2", 1))
	a.exchanges(2)
	counts("the outer one begins anew", map[string]uint64{"inner": 12})
	apply(traceText(rule("inner", inner)))
	a.exchanges(2)
	counts("the outer one ends", map[string]uint64{"inner": 18})
	apply(both2)
	a.exchanges(2)
	counts("the outer one is back", map[string]uint64{"inner": 24, "outer": 6})
	apply(traceText(rule("outer", outer)))
	a.exchanges(2)
	counts("the inner one ends", map[string]uint64{"outer": 12})
}

// TestTraceNothingLeft checks that tracing leaves nothing on a closed host.
func TestTraceNothingLeft(t *testing.T) {
	t.Parallel()
	var (
		programs []ebpf.ProgramID
		pins     []string
	)
	t.Run("host", func(t *testing.T) {
		h := newTuned(t, lab.LinkOptions{})
		h.setTrace("{name: near, cgroup: "+h.makeGroup("near")+", stages: [stack, qdisc, network, rx_stack, reader], protocols: [tcp, udp]}",
			"{name: made, cgroup: "+h.group("made/deeper")+"}")
		h.startAgent()
		far := h.startFar()
		far.listen(tracePort)
		for _, group := range []string{"near", "made/deeper"} {
			h.startNear(group).connect(4, at(tracePort, far4, far6)...)
		}
		programs = h.links()
		h.killAgent()
		h.startAgent()
		programs = append(programs, h.links()...)
		if pins = h.tracePins(); len(programs) < 2*7 || len(pins) != 2 {
			t.Errorf("programs %v, pins %v", programs, pins)
		}
	})
	host := &host{T: t}
	host.eventually("everything to go", func() error {
		for _, program := range programs {
			if p, err := ebpf.NewProgramFromID(program); err == nil {
				p.Close()
				return fmt.Errorf("program %d", program)
			}
		}
		for _, path := range pins {
			if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
				return fmt.Errorf("%s is still there", path)
			}
		}
		return nil
	})
}

// TestTraceOthers checks that connections outside of the cgroup do not run programs of Sockeye.
func TestTraceOthers(t *testing.T) {
	t.Parallel()
	stats, err := ebpf.EnableStats(0) // BPF_STATS_RUN_TIME
	if err != nil {
		t.Fatal(err)
	}
	defer stats.Close()
	h := newTuned(t, lab.LinkOptions{})
	near := h.makeGroup("near")
	h.setTrace("{name: all, cgroup: " + near + ", messages: 1/1}")
	h.startAgent()
	inside, outside, far := h.startNear("near"), h.startNear("outside"), h.startFar()
	far.listen(tracePort)
	both := at(tracePort, far4, far6)
	runs := func() (n uint64) {
		t.Helper()
		for _, attached := range sockOps(t, h.groupDir("near")) {
			p, err := ebpf.NewProgramFromID(attached.ID)
			h.must(err)
			defer p.Close()
			s, err := p.Stats()
			h.must(err)
			n += s.RunCount
		}
		return n
	}
	inside.connect(2, both...)
	h.ended("", 2)
	before := runs()
	if before < 2*5 { // established, sent, queued, driven, acknowledged
		t.Errorf("%d runs for 2 connections with a message each", before)
	}
	outside.connect(20, both...)
	outside.exchanges(20)
	outside.do(order{Do: "close"})
	if after := runs(); after != before {
		t.Errorf("%d runs for others", after-before)
	}
	inside.exchanges(1)
	h.ended("", 4)
	if after := runs(); after < before+2*4 {
		t.Errorf("%d runs for 2 messages", after-before)
	}
}
