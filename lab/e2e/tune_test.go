// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"sockeye/internal/api"
	"sockeye/internal/config"
	process "sockeye/internal/member"
	"sockeye/internal/tune/trial"
	"sockeye/lab"
)

const tunePort = 5000

// change returns the effect of the change whose name has the prefix.
func (h *tuned) change(plan api.Plan, cgroup, what string) string {
	h.Helper()
	for _, c := range plan.Changes {
		if c.Cgroup == cgroup && strings.HasPrefix(c.What, what) {
			return c.Action + ": " + c.Effect
		}
	}
	h.Errorf("nothing about %q of %s: %+v", what, cgroup, plan.Changes)
	return ""
}

// tunePins returns the pin directories of tunings.
func (h *tuned) tunePins() []string {
	h.Helper()
	found, err := filepath.Glob(filepath.Join(h.pins, "tune_*"))
	h.must(err)
	return found
}

// TestTuneLifecycle applies a series of policies. Cgroups are created and removed, plan announces each change without
// side effects, and a policy that cannot be applied changes nothing.
func TestTuneLifecycle(t *testing.T) {
	t.Parallel()
	h := newTuned(t, lab.LinkOptions{})
	near := h.makeGroup("near")
	made, other := h.group("made/deeper"), h.group("other")
	base := fmt.Sprintf("{name: base, cgroup: %s, match: {role: connect}, set: {sndbuf: 50KB, priority: 4}}", near)
	fresh := fmt.Sprintf("{name: fresh, cgroup: %s, set: {nodelay: true}}", made)

	h.setRules(base, fresh)
	h.startAgent()
	for cgroup, created := range map[string]bool{near: false, made: true} {
		if s := h.tuning(cgroup); !s.Attached || s.Created != created || s.Path != cgroup || s.Problem != "" || len(s.Rules) != 1 || len(s.Foreign) != 0 {
			t.Errorf("sockeye tune: %+v", s)
		}
	}
	if !h.exists(h.groupDir("made/deeper")) {
		t.Error("the cgroup was not created")
	}
	if out, errs, code := h.cli("tune"); code != 0 || !strings.Contains(out, made+": attached, created by the agent") {
		t.Errorf("sockeye tune: exit code %d: %s%s", code, out, errs)
	}
	p, far := h.startNear("near"), h.startFar()
	far.listen(tunePort)
	both := at(tunePort, far4, far6)
	first := p.connect(4, both...)
	h.has("the first policy", first, "sndbuf", 100_000)
	h.has("the first policy", first, "priority", 4)

	// Plan announces the changes without applying them.
	elsewhere := fmt.Sprintf("{name: elsewhere, cgroup: %s, set: {nodelay: true}}", other)
	smaller := strings.Replace(base, "50KB", "40KB", 1)
	h.setRules(smaller, elsewhere)
	var plan, applied api.Plan
	h.show(&plan, "plan")
	for what, want := range map[[2]string]string{
		{near, "rule base: sndbuf: 50KB -> 40KB"}: "change: for new connections",
		{made, "rule fresh"}:                      "remove: ",
		{other, "cgroup"}:                         "add: the cgroup is created",
		{other, "rule elsewhere: nodelay true"}:   "add: for new connections",
	} {
		if effect := h.change(plan, what[0], what[1]); !strings.HasPrefix(effect, want) {
			t.Errorf("plan: %s of %s: %q, want %q", what[1], what[0], effect, want)
		}
	}
	if h.exists(h.groupDir("other")) || !h.exists(h.groupDir("made/deeper")) {
		t.Error("plan created or removed a cgroup")
	}
	h.has("after plan", p.connect(2, both...), "sndbuf", 100_000)
	h.show(&applied, "apply")
	if !slices.Equal(applied.Changes, plan.Changes) {
		t.Errorf("changes of apply %+v, of plan %+v", applied.Changes, plan.Changes)
	}
	if !h.exists(h.groupDir("other")) || h.exists(h.groupDir("made")) {
		t.Error("the cgroup of the policy does not exist, or the cgroup of the previous policy still exists")
	}
	h.has("after apply", p.connect(2, both...), "sndbuf", 80_000)
	h.has("connections from before", p.look()[:len(first)], "sndbuf", 100_000)
	if r := h.rule("base"); r.Connections != 2 || r.Older != 1 {
		t.Errorf("changed rule: %+v", r)
	}
	h.show(&applied, "apply")
	if len(applied.Changes) > 0 {
		t.Errorf("apply again: %+v", applied.Changes)
	}

	// Roll back, and apply again.
	h.show(&applied, "apply", "--previous")
	if !h.exists(h.groupDir("made/deeper")) || h.exists(h.groupDir("other")) {
		t.Error("apply --previous did not restore the previous policy")
	}
	h.has("after apply --previous", p.connect(2, both...), "sndbuf", 100_000)
	if r := h.rule("base"); r.Connections != 8 {
		t.Errorf("restored rule: %+v", r)
	}
	h.show(&applied, "apply", "--previous")

	// A policy that cannot be applied changes nothing.
	before := h.tunings()
	for _, wrong := range []struct {
		rule  string
		code  int
		words []string
	}{
		{"{name: base, cgroup: " + near + ", set: {sndbuf: 1}}", 2, []string{"policy.yaml:2:", "sndbuf", "2KiB"}},
		{"{name: base, cgroup: " + near + ", set: {sndbuff: 1MB}}", 2, []string{"sndbuff", "sndbuf"}},
		{"{name: base, cgroup: " + near + ", set: {sndbuf: 1MB, congestion: nosuch}}", 3, []string{"rule base", "congestion", "nosuch", "hint:", "optional"}},
		{"{name: base, cgroup: " + near + ", set: {sndbuf: 1MB}, react: {rtos: \"> 2\", set: {congestion: nosuch}}}", 3, []string{"rule base", "congestion", "hint:"}},
		{"{name: low, cgroup: " + h.group("other/low") + ", set: {nodelay: true}}", 5, []string{h.group("other/low"), other, "hint:"}},
	} {
		h.setRules(wrong.rule, elsewhere)
		h.refuse(wrong.code, wrong.words, "plan")
		h.refuse(wrong.code, wrong.words, "apply")
	}
	// The kernel refuses the program or the cgroup after a part of the policy was applied.
	for _, obstacle := range []struct {
		rest string
		in   func() (out func())
	}{
		{elsewhere, func() func() { return attachAlone(t, h.lab.Cgroup()) }},
		{fresh, func() func() { return h.noDeeperThan(2) }},
	} {
		pins := h.tunePins()
		h.setRules(strings.Replace(base, "50KB", "60KB", 1), obstacle.rest, fmt.Sprintf("{name: zz, cgroup: %s, set: {nodelay: true}}", h.group("zz/deeper/still")))
		away := obstacle.in()
		if _, errs, code := h.cli("apply"); code == 0 || !strings.Contains(errs, h.group("zz/deeper/still")) {
			t.Errorf("apply of a policy that the kernel rejects: exit code %d: %s", code, errs)
		}
		away()
		if h.exists(h.groupDir("zz")) || !slices.Equal(pins, h.tunePins()) {
			t.Errorf("a failed policy left a cgroup or pins: %v, before %v", h.tunePins(), pins)
		}
	}
	if after := h.tunings(); fmt.Sprint(rulesOf(after)) != fmt.Sprint(rulesOf(before)) || !after[0].Attached || !after[1].Attached {
		t.Errorf("after refused policies: %+v, before %+v", after, before)
	}
	h.has("after policies that were refused", p.connect(2, both...), "sndbuf", 80_000)

	// If another process removes a cgroup, the agent does not create it again. If another process creates it again, the
	// agent does not remove it.
	gone := func() {
		t.Helper()
		h.must(os.Remove(h.groupDir("other")))
		h.eventually("the removal of the cgroup to be noticed", func() error {
			if s := h.tuning(other); s.Attached || s.Created || !strings.Contains(s.Problem, "there is no cgroup") || h.exists(h.groupDir("other")) {
				return fmt.Errorf("%+v", s)
			}
			return nil
		})
	}
	for range 2 {
		gone()
		h.must(os.Mkdir(h.groupDir("other"), 0o755))
		h.eventually("the new cgroup to be tuned", func() error {
			if s := h.tuning(other); !s.Attached || s.Created || s.Problem != "" {
				return fmt.Errorf("%+v", s)
			}
			return nil
		})
	}
	// An agent creates missing cgroups at start.
	gone()
	h.killAgent()
	h.setRules(smaller, elsewhere)
	h.startAgent()
	if s := h.tuning(other); !s.Attached || !s.Created {
		t.Errorf("a new agent: %+v", s)
	}

	// Optional values are omitted.
	h.setRules(strings.Replace(smaller, "priority: 4}", "priority: 4, congestion: nosuch}, optional: true", 1), elsewhere)
	h.show(&applied, "apply")
	r := h.rule("base")
	if len(r.Skipped) != 1 || r.Skipped[0].Option != "congestion" || !strings.Contains(r.Skipped[0].Needs, "nosuch") {
		t.Errorf("an option that the kernel does not support: %+v", r)
	}
	if out, _, _ := h.cli("tune"); !strings.Contains(out, "rule base: congestion is skipped: it needs ") {
		t.Errorf("sockeye tune shows no skipped option:\n%s", out)
	}
	for _, e := range p.connect(2, both...) {
		if e.Options["sndbuf"] != 80_000 || e.Congestion != "reno" {
			t.Errorf("a rule with a skipped option: %+v", e)
		}
	}
	if r := h.rule("base"); len(r.Failures) > 0 {
		t.Errorf("a skipped option fails: %+v", r.Failures)
	}

	// An agent that starts with another policy removes the pins of the previous one.
	h.stopAgent()
	h.has("the agent has stopped", p.connect(2, both...), "sndbuf", 80_000)
	h.setRules(fresh)
	h.startAgent()
	if h.exists(h.groupDir("other")) || !h.exists(h.groupDir("made/deeper")) || len(h.tunePins()) != 1 {
		t.Errorf("a new agent with another policy: pins are %v", h.tunePins())
	}
	if e := p.connect(1, both...)[0]; e.Options["sndbuf"] == 80_000 || e.Options["priority"] != 0 {
		t.Errorf("a removed rule still sets its options: %+v", e)
	}
	h.stopAgent()
	if out, errs, code := h.cli("reset", "--pins", h.pins); code != 0 {
		t.Fatalf("reset: exit code %d: %s%s", code, out, errs)
	}
	if h.exists(h.groupDir("made")) || h.exists(h.pins) {
		t.Error("reset left a cgroup or pins")
	}
	if ids := sockOps(t, h.groupDir("near")); len(ids) > 0 {
		t.Errorf("programs are still loaded: %v", ids)
	}
}

// TestTuneAgentKilled kills the agent while connections are open. They keep their options, new connections are tuned,
// and the next agent adopts the counts. A rule that changes in the meantime applies to later connections.
func TestTuneAgentKilled(t *testing.T) {
	t.Parallel()
	h := newTuned(t, lab.LinkOptions{Delay: 5 * time.Millisecond})
	near := h.makeGroup("near")
	rule := "{name: all, cgroup: " + near + ", set: {sndbuf: 50KB, notsent_lowat: 20KB, initial_cwnd: 20}}"
	h.setRules(rule)
	h.startAgent()
	p, far := h.startNear("near"), h.startFar()
	p.listen(tunePort)
	far.listen(tunePort)
	both := at(tunePort, far4, far6)
	tuned := func(when string, ends []connectionEnd, sndbuf int) {
		t.Helper()
		h.has(when, ends, "sndbuf", sndbuf)
		h.has(when, ends, "notsent_lowat", 20_000)
		for _, e := range ends {
			if e.First != 20 {
				t.Errorf("%s: %v -> %v: initial window %d", when, e.Local, e.Remote, e.First)
			}
		}
	}

	first := p.connect(4, both...)
	tuned("before", first, 100_000)
	running := p.order(order{Do: "connect", N: 60, Parallel: 4, To: both, Up: 40_000, Down: 40_000, Keep: true})
	incoming := far.order(order{Do: "connect", N: 40, Parallel: 4, To: at(tunePort, near4, near6), Down: 40_000, Keep: true})
	h.eventually("some of the connections", func() error {
		if n := h.rule("all").Connections; n < 20 {
			return fmt.Errorf("%d", n)
		}
		return nil
	})
	h.killAgent()
	tuned("while the agent dies", running(), 100_000)
	incoming()
	far.do(order{Do: "exchange", Down: 10_000, Parallel: 4})
	tuned("accepted while the agent dies", p.accepted(40), 100_000)
	p.do(order{Do: "exchange", Up: 10_000, Down: 10_000, Parallel: 4})
	tuned("no agent", p.connect(10, both...), 100_000)

	h.startAgent()
	const all = 4 + 60 + 40 + 10
	if r := h.rule("all"); r.Connections != all || r.Established != all || r.Closed != 0 || r.OptionsSet != 3*all || r.Older != 0 {
		t.Errorf("a new agent: %+v, want %d connections", r, all)
	}
	tuned("a new agent", p.connect(2, both...), 100_000)

	// Connections keep the version of a rule that they started with.
	h.apply(strings.Replace(rule, "50KB", "80KB", 1))
	old := p.look()
	tuned("open while the rule changes", old, 100_000)
	fresh := p.connect(2, both...)
	tuned("after the rule changed", fresh, 160_000)
	if r := h.rule("all"); r.Connections != 2 || r.Older != 1 {
		t.Errorf("changed rule: %+v", r)
	}
	if out, _, _ := h.cli("tune"); !strings.Contains(out, "1 older version may still apply to open connections") {
		t.Errorf("sockeye tune shows no older version:\n%s", out)
	}
	for e, current := range map[*connectionEnd]bool{&old[0]: false, &fresh[0]: true} {
		if s := h.socket(p, *e); s.Rule != "all" || s.Current != current || (len(s.Values) == 3) != current {
			t.Errorf("a connection with another version of its rule, %v: %+v", !current, s)
		}
	}
	out, _, _ := h.cli("tune", "explain", "--socket", fmt.Sprintf("%d:%d", p.Pid(), old[0].FD))
	if !strings.Contains(out, "rule all, no longer in force") {
		t.Errorf("sockeye tune explain of a connection with an older version:\n%s", out)
	}
	h.killAgent()
	h.startAgent()
	if r := h.rule("all"); r.Connections != 2 || r.Older != 1 {
		t.Errorf("changed rule, new agent: %+v", r)
	}

	p.do(order{Do: "close"})
	far.do(order{Do: "close"})
	h.eventually("the connections to be closed", func() error {
		if r := h.rule("all"); r.Closed != 2 {
			return fmt.Errorf("%+v", r)
		}
		return nil
	})
}

// unit returns a unique unit name.
func (h *tuned) unit(suffix string) string { return "e2e-" + h.labSlice() + suffix }

func (h *tuned) labSlice() string { return strings.TrimSuffix(h.lab.CgroupPath(), ".slice") }

// slice returns the path that systemd uses for a slice inside the lab's slice, with a trailing slash.
func (h *tuned) slice(words ...string) (path string) {
	name := h.labSlice()
	for _, w := range words {
		name += "-" + w
		path += name + ".slice/"
	}
	return path
}

// waitAttached waits until a tuning is attached to this cgroup directory.
func (h *tuned) waitAttached(cgroup, dir string) {
	h.Helper()
	path := "/" + h.lab.CgroupPath() + "/" + dir
	h.eventually("the unit to be tuned", func() error {
		if s := h.tuning(cgroup); !s.Attached || s.Path != path || s.Problem != "" {
			return fmt.Errorf("%+v", s)
		}
		return nil
	})
}

// TestTuneUnit checks that a rule for a unit waits for the unit, finds it in any cgroup, and finds it again after a
// restart.
func TestTuneUnit(t *testing.T) {
	t.Parallel()
	h := newTuned(t, lab.LinkOptions{})
	unit := h.unit(".service")
	rule := "{name: unit, cgroup: " + unit + ", set: {sndbuf: 50KB}}"
	beside := "{name: beside, cgroup: " + h.makeGroup("beside") + ", set: {sndbuf: 60KB}}"
	h.setRules(beside)
	h.startAgent()
	h.setRules(rule, beside)
	var plan api.Plan
	h.show(&plan, "plan")
	if effect := h.change(plan, unit, "unit"); !strings.Contains(effect, "as soon as it starts") {
		t.Errorf("plan of a missing unit: %q", effect)
	}
	h.show(&plan, "apply")
	waiting := func() {
		t.Helper()
		h.eventually("the unit to be reported as missing", func() error {
			if s := h.tuning(unit); s.Attached || s.Path != "" || !strings.Contains(s.Problem, "there is no unit "+unit) || s.Hint == "" {
				return fmt.Errorf("%+v", s)
			}
			return nil
		})
	}
	waiting()
	if out, _, _ := h.cli("tune"); !strings.Contains(out, unit+": not attached: there is no unit") || !strings.Contains(out, "hint:") {
		t.Errorf("sockeye tune does not show the missing unit:\n%s", out)
	}
	far := h.startFar()
	far.listen(tunePort)
	both := at(tunePort, far4, far6)

	var connections uint64
	for i, dir := range []string{"", h.slice("deep", "down", "here"), h.slice("deep", "down", "here"), h.slice("deep"), h.slice("elsewhere")} {
		h.makeGroup(dir + unit)
		h.waitAttached(unit, dir+unit)
		p := h.startPeer(h.collectors, dir+unit, "member")
		h.has(fmt.Sprintf("unit in %q", dir), p.connect(2, both...), "sndbuf", 100_000)
		connections += 2
		if r := h.rule("unit"); r.Connections != connections {
			t.Errorf("unit in %q: %d connections, want %d", dir, r.Connections, connections)
		}
		if i == 3 {
			h.killAgent()
		}
		h.must(p.Kill())
		h.eventually("the cgroup to be empty", func() error { return os.Remove(p.CgroupDir()) })
		h.must(os.Remove(filepath.Dir(p.CgroupDir())))
		if i == 3 {
			h.startAgent()
		}
		waiting()
	}

	// A unit that exists, and a unit name that exists twice.
	h.apply(beside)
	h.makeGroup(h.slice("elsewhere") + unit)
	h.apply(rule, beside)
	h.waitAttached(unit, h.slice("elsewhere")+unit)
	p := h.startPeer(h.collectors, h.slice("elsewhere")+unit, "member")
	h.has("a unit from before", p.connect(2, both...), "sndbuf", 100_000)
	h.makeGroup(h.slice("deep") + unit)
	h.refuse(5, []string{unit, "there are 2", "hint:"}, "plan")
	h.must(os.Remove(h.groupDir(h.slice("deep") + unit)))
	h.waitAttached(unit, h.slice("elsewhere")+unit)
	h.has("a unit from before, after another", p.connect(2, both...), "sndbuf", 100_000)
	if q := h.startNear("beside"); t.Failed() || len(q.connect(1, both...)) != 1 {
		return
	}
	if r := h.rule("beside"); r.Connections != 1 {
		t.Errorf("the cgroup beside: %+v", r)
	}
}

// TestTuneSlice checks that the name of a slice determines its path: a-b.slice is in a.slice.
func TestTuneSlice(t *testing.T) {
	t.Parallel()
	h := newTuned(t, lab.LinkOptions{})
	mount := filepath.Dir(h.lab.Cgroup())
	name := strings.ReplaceAll(h.unit(""), "-", "")
	slice := name + "-tuned.slice"
	parent := filepath.Join(mount, name+".slice")
	dir := filepath.Join(parent, slice)
	h.removeAtEnd(parent)
	h.setRules("{name: slice, cgroup: " + slice + ", set: {sndbuf: 50KB}}")
	h.startAgent()
	if s := h.tuning(slice); s.Attached || s.Problem == "" {
		t.Errorf("missing slice: %+v", s)
	}
	h.must(os.MkdirAll(dir, 0o755))
	h.eventually("the slice to be tuned", func() error {
		if s := h.tuning(slice); !s.Attached || s.Path != "/"+name+".slice/"+slice {
			return fmt.Errorf("%+v", s)
		}
		return nil
	})
	// A directory of the same name elsewhere is not the slice.
	h.makeGroup(slice)
	h.apply("{name: slice, cgroup: " + slice + ", set: {sndbuf: 60KB}}")
	far := h.startFar()
	far.listen(tunePort)
	inside, outside := h.startPeer(h.collectors, "../"+name+".slice/"+slice, "inside"), h.startPeer(h.collectors, slice, "outside")
	both := at(tunePort, far4, far6)
	h.has("in the slice", inside.connect(2, both...), "sndbuf", 120_000)
	outside.connect(2, both...)
	if r := h.rule("slice"); r.Connections != 2 {
		t.Errorf("%+v", r)
	}
	h.must(inside.Kill())
}

// removeAtEnd removes a cgroup outside of the lab's cgroup and its descendants when the test ends.
func (h *tuned) removeAtEnd(dir string) {
	h.Helper()
	cmd := exec.Command("sh", "-c", `cat
i=0
while [ $i -lt 100 ] && [ -d "$1" ]; do
	find "$1" -depth -type d -exec rmdir {} + 2>/dev/null
	i=$((i + 1))
	[ ! -d "$1" ] || sleep 0.1
done`, "sockeye-e2e", dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	pipe, err := cmd.StdinPipe()
	h.must(err)
	h.must(cmd.Start())
	h.Cleanup(func() {
		pipe.Close()
		h.must(cmd.Wait())
		if h.exists(dir) {
			h.Errorf("%s still exists", dir)
		}
	})
}

// TestTuneNested checks that sibling cgroups have separate rules, and that a cgroup inside a tuned cgroup, or a unit
// that starts in one, is rejected.
func TestTuneNested(t *testing.T) {
	t.Parallel()
	h := newTuned(t, lab.LinkOptions{})
	unit := h.unit(".service")
	in := h.slice("outer")
	outer, inner, beside := h.makeGroup(filepath.Clean(in)), h.makeGroup(in+"inner"), h.makeGroup("outer-not")
	rule := func(name, cgroup, sndbuf string) string {
		return "{name: " + name + ", cgroup: " + cgroup + ", set: {sndbuf: " + sndbuf + "}}"
	}
	h.setRules(rule("a", outer, "50KB"), rule("b", beside, "60KB"))
	h.startAgent()
	for _, nested := range [][]string{{outer, inner}, {inner, outer}, {outer, h.group(in + "not/there")}, {"/" + h.lab.CgroupPath(), beside}, {"/", beside}} {
		h.setRules(rule("a", nested[0], "50KB"), rule("b", nested[1], "60KB"))
		h.refuse(5, []string{" is inside cgroup ", nested[0], nested[1], "hint:"}, "apply")
	}
	far := h.startFar()
	far.listen(tunePort)
	both := at(tunePort, far4, far6)
	a, b := h.startPeer(h.collectors, in+"inner", "a"), h.startPeer(h.collectors, "outer-not", "b")
	h.has("a cgroup", a.connect(2, both...), "sndbuf", 100_000)
	h.has("the cgroup beside", b.connect(2, both...), "sndbuf", 120_000)
	for _, name := range []string{"a", "b"} {
		if r := h.rule(name); r.Connections != 2 {
			t.Errorf("%+v", r)
		}
	}

	h.apply(rule("a", outer, "50KB"), rule("unit", unit, "70KB"))
	h.makeGroup(in + unit)
	h.eventually("the unit to be refused", func() error {
		if s := h.tuning(unit); s.Attached || !strings.Contains(s.Problem, outer) || s.Hint == "" {
			return fmt.Errorf("%+v", s)
		}
		return nil
	})
	c := h.startPeer(h.collectors, in+unit, "c")
	h.has("a unit in another cgroup", c.connect(2, both...), "sndbuf", 100_000)
	h.refuse(5, []string{unit, outer}, "plan")
	h.must(c.Kill())
	h.eventually("the cgroup to be empty", func() error { return os.Remove(c.CgroupDir()) })
	h.must(os.Remove(filepath.Dir(c.CgroupDir())))
	h.makeGroup(h.slice("elsewhere") + unit)
	h.waitAttached(unit, h.slice("elsewhere")+unit)
	d := h.startPeer(h.collectors, h.slice("elsewhere")+unit, "d")
	h.has("the unit elsewhere", d.connect(2, both...), "sndbuf", 140_000)
}

// TestTuneExplain checks that connections of both roles have the values that explain reports for their addresses. For
// sockets, explain reports requested and effective values.
func TestTuneExplain(t *testing.T) {
	t.Parallel()
	h := newTuned(t, lab.LinkOptions{})
	near := h.makeGroup("near")
	other4 := netip.MustParseAddr("10.90.0.7")
	h.must(h.devices.AddAddress("link0", netip.PrefixFrom(other4, 24)))
	h.must(os.WriteFile(filepath.Join(h.dir, "prefixes.txt"), []byte("# of the link\nfd90::/64\n!fd90::7\n"), 0o644))
	h.setRules(
		`{name: large, cgroup: `+near+`, match: {port: 5001, remote: [10.90.0.0/24, "!10.90.0.7"], role: connect}, set: {sndbuf: 16MB, syn_rto: 10ms}}`,
		`{name: same, cgroup: `+near+`, match: {same_prefix: {ipv6: 64}, remote_port: 5000}, set: {notsent_lowat: 20KB, tos: 8}}`,
		`{name: accepts, cgroup: `+near+`, match: {role: accept, local_port: "4990-5000", remote: 10.90.0.0/24}, set: {rcvbuf: 1MB, synack_rto: 10ms}}`,
		`{name: file, cgroup: `+near+`, match: {remote_file: prefixes.txt, local: "fd90::1", port: 5001}, set: {priority: 5, initial_cwnd: 16}}`,
		`{name: tagged, cgroup: `+near+`, match: {tag: nobody}, set: {priority: 6}}`,
		`{name: rest, cgroup: `+near+`, match: {remote: 10.90.0.7}, set: {cwnd_clamp: 50}}`,
	)
	h.startAgent()
	p, far := h.startNear("near"), h.startFar()
	for _, port := range []uint16{tunePort, tunePort + 1} {
		p.listen(port)
		far.listen(port)
		p.connect(3, at(port, far4, far6, other4)...)
		far.connect(2, at(port, near4, near6)...)
	}
	type way struct {
		accepted bool
		port     uint16
		remote   netip.Addr
	}
	want := map[way]string{
		{false, 5000, far4}: "", {false, 5000, far6}: "same", {false, 5000, other4}: "rest",
		{false, 5001, far4}: "large", {false, 5001, far6}: "file", {false, 5001, other4}: "rest",
		{true, 5000, far4}: "accepts", {true, 5000, far6}: "",
		{true, 5001, far4}: "", {true, 5001, far6}: "file",
	}
	p.accepted(4)
	ends := map[string]connectionEnd{}
	for _, e := range p.look() {
		role, port := "connect", e.Remote.Port()
		if e.Accepted {
			role, port = "accept", e.Local.Port()
		}
		k := way{e.Accepted, port, e.Remote.Addr()}
		rule, ok := want[k]
		if !ok {
			t.Errorf("unexpected %+v", k)
			continue
		}
		delete(want, k)
		ends[rule] = e
		var said []api.TuneExplanation
		h.show(&said, "tune", "explain", e.Local.String(), e.Remote.String(), "--role", role)
		if len(said) != 1 || said[0].Rule != rule || said[0].Role != role || said[0].Cgroup != near {
			t.Errorf("explain %+v: %+v, want rule %q", k, said, rule)
		}
		h.show(&said, "tune", "explain", e.Local.String(), e.Remote.String(), "--cgroup", near)
		if len(said) != 2 {
			t.Errorf("explain %+v in both roles: %+v", k, said)
		}
		byNumber := h.socket(p, e)
		var byAddress api.TuneSocket
		h.show(&byAddress, "tune", "explain", "--socket", e.Local.String()+","+e.Remote.String())
		for _, s := range []api.TuneSocket{byNumber, byAddress} {
			if s.Rule != rule || s.Role != role || s.PID != p.Pid() || s.FD != e.FD || s.Local != e.Local.String() || s.Remote != e.Remote.String() ||
				s.Cgroup != near || s.Current != (rule != "") || s.TunedLive || s.Reacted || (rule == "") != (len(s.Values) == 0) {
				t.Errorf("explain --socket %+v: %+v, want rule %q", k, s, rule)
			}
		}
	}
	if len(want) > 0 {
		t.Errorf("no connections: %+v", want)
	}

	// The text output has requested and effective values.
	value := func(rule, option string) api.TuneValue {
		t.Helper()
		s := h.socket(p, ends[rule])
		for _, v := range s.Values {
			if v.Option == option {
				return v
			}
		}
		t.Errorf("rule %s: nothing about %s: %+v", rule, option, s)
		return api.TuneValue{}
	}
	for _, c := range []struct {
		rule, option         string
		requested, effective string
		differs              bool
		note                 string
	}{
		{"large", "sndbuf", "16MB", "8MiB", true, "net.core.wmem_max"},
		{"large", "syn_rto", "10ms", "", false, "jiffies"},
		{"same", "notsent_lowat", "20KB", "20KB", false, ""},
		{"same", "tos", "8", "", false, "IPv4"},
		{"accepts", "rcvbuf", "1MB", "2MB", false, "doubles"},
		{"accepts", "synack_rto", "10ms", "", false, "jiffies"},
		{"file", "priority", "5", "5", false, ""},
		{"rest", "cwnd_clamp", "50", "", false, ""},
	} {
		v := value(c.rule, c.option)
		if v.Requested != c.requested || c.effective != "" && v.Effective != c.effective || v.Differs != c.differs || !strings.Contains(v.Note, c.note) {
			t.Errorf("rule %s: %+v, want %+v", c.rule, v, c)
		}
	}
	out, errs, code := h.cli("tune", "explain", "--socket", fmt.Sprintf("%d:%d", p.Pid(), ends["large"].FD))
	for _, words := range []string{"rule large", "REQUESTED", "16MB", "net.core.wmem_max", "SO_SNDBUF"} {
		if code != 0 || !strings.Contains(out, words) {
			t.Errorf("explain --socket: exit code %d, without %q: %s%s", code, words, out, errs)
		}
	}
	out, errs, code = h.cli("tune", "explain", "10.90.0.1", "10.90.0.7:5001", "--role", "connect")
	for _, words := range []string{"large", "!10.90.0.7", "file", "rule rest: cwnd_clamp 50"} {
		if code != 0 || !strings.Contains(out, words) {
			t.Errorf("explain: exit code %d, without %q: %s%s", code, words, out, errs)
		}
	}
	e := ends["same"]
	h.refuse(2, []string{"hint:"}, "tune", "explain", "--socket", fmt.Sprintf("%d:0", p.Pid()))
	h.refuse(2, []string{"not tuned", "hint:"}, "tune", "explain", "--socket", fmt.Sprintf("%d:3", far.Pid()))
	h.refuse(2, []string{"hint:"}, "tune", "explain", "--socket", fmt.Sprintf("%v,%v", e.Remote, e.Local))
	h.refuse(2, []string{"hint:"}, "tune", "explain", "--socket", "4000000:3")
	p.do(order{Do: "close"})
	h.eventually("the connection to be closed", func() error {
		if _, _, code := h.cli("tune", "explain", "--socket", e.Local.String()+","+e.Remote.String()); code != 2 {
			return fmt.Errorf("exit code %d", code)
		}
		return nil
	})
}

// row returns a row of a trial's table.
func (h *tuned) row(t api.TuneTrial, name string) trial.Row {
	h.Helper()
	i := slices.IndexFunc(t.Comparison.Rows, func(r trial.Row) bool { return r.Name == name })
	if i < 0 {
		h.Fatalf("the trial has no %s: %+v", name, t)
	}
	return t.Comparison.Rows[i]
}

// TestTuneTrial checks that a trial finds the difference of an effective setting, finds no difference for an irrelevant
// setting, and has no verdict with few connections. The link always loses 2 %. A window larger than the queue of the
// path loses more.
func TestTuneTrial(t *testing.T) {
	t.Parallel()
	shallow := &line{depth: 6}
	h := newTuned(t, lab.LinkOptions{Delay: 5 * time.Millisecond, Loss: 0.02, Seed: 1, Drop: onlyData(shallow.drops)})
	near := h.makeGroup("near")
	rule := func(name string, port int, set string) string {
		return fmt.Sprintf("{name: %s, cgroup: %s, match: {port: %d}, set: {%s}, trial: {control: 50%%}}", name, near, port, set)
	}
	// A false positive is allowed in one of 20 trials, but not in all trials of this test.
	without := []string{"priority1", "priority2", "priority3"}
	rules := []string{rule("window", tunePort, "initial_cwnd: 4, cwnd_clamp: 4")}
	for i, name := range without {
		rules = append(rules, rule(name, tunePort+1+i, fmt.Sprintf("priority: %d", 1+i)))
	}
	h.setRules(rules...)
	h.startAgent()
	p, far := h.startNear("near"), h.startFar()
	for i := range rules {
		far.listen(uint16(tunePort + i))
	}
	ask := func(name string) (tr api.TuneTrial) {
		t.Helper()
		h.show(&tr, "tune", "trial", name)
		if tr.Rule != name || tr.Cgroup != near || tr.Share != 0.5 || tr.Summary == "" {
			t.Errorf("trial: %+v", tr)
		}
		return tr
	}
	// connect opens connections and waits until they are counted as closed.
	connect := func(name string, port uint16, n int) {
		t.Helper()
		before := h.rule(name).Closed
		p.do(order{Do: "connect", N: n, Parallel: 16, To: at(port, far4, far6), Up: 40_000})
		h.eventually("all connections to be counted", func() error {
			if r := h.rule(name); r.Closed < before+uint64(n) {
				return fmt.Errorf("%+v", r)
			}
			return nil
		})
	}
	undecided := func(when string) {
		t.Helper()
		tr := ask("window")
		for _, row := range tr.Comparison.Rows {
			if row.Verdict != trial.NotEnough {
				t.Errorf("%s: %+v", when, row)
			}
		}
		if out, _, code := h.cli("tune", "trial", "window"); code != 0 || !strings.Contains(out, "not enough data") {
			t.Errorf("%s: exit code %d: %s", when, code, out)
		}
	}
	undecided("without a connection")
	connect("window", tunePort, 10)
	undecided("with few connections")

	connect("window", tunePort, 150)
	tr := ask("window")
	lost := h.row(tr, "retransmits")
	if lost.Verdict != trial.Lower || lost.High == nil || *lost.High >= 0 || *lost.Treated < 5_000 {
		t.Errorf("window smaller than the queue: %+v: %s", lost, tr.Summary)
	}
	if r := h.rule("window"); tr.Comparison.Treated+tr.Comparison.Control != 160 || r.Connections != 160 || r.Control != tr.Comparison.Control ||
		r.Control < 48 || r.Control > 112 { // 80 ± 5 standard deviations
		t.Errorf("the control arm is not half of the connections: %+v, %+v", r, tr.Comparison)
	}
	if !strings.Contains(tr.Summary, "fewer segments") {
		t.Errorf("summary: %q", tr.Summary)
	}

	var real []string
	for i, name := range without {
		connect(name, uint16(tunePort+1+i), 100)
		tr := ask(name)
		real = nil
		for _, row := range tr.Comparison.Rows {
			if row.Verdict == trial.Lower || row.Verdict == trial.Higher {
				real = append(real, fmt.Sprintf("%s: %+v", tr.Summary, row))
			}
		}
		if v := h.row(tr, "retransmits").Verdict; v == trial.NotEnough {
			t.Errorf("verdict with 100 connections: %+v", tr)
		}
		if len(real) == 0 {
			break
		}
	}
	if len(real) > 0 {
		t.Errorf("each trial found a difference by the priority: %v", real)
	}
	h.refuse(2, []string{`no rule "windows"`, "window"}, "tune", "trial", "windows")
}

// TestTuneLearn checks learning for two networks behind one link, one with a short queue. Connections to each network
// use its best window, also after the agent is killed.
func TestTuneLearn(t *testing.T) {
	t.Parallel()
	network4, network6 := netip.MustParsePrefix("10.91.2.0/24"), netip.MustParsePrefix("fd91:0:2::/48")
	shallow := &line{depth: 25}
	h := newTuned(t, lab.LinkOptions{Delay: 100 * time.Millisecond, Drop: onlyData(func(s segment) bool {
		return (network4.Contains(s.to.Addr()) || network6.Contains(s.to.Addr())) && shallow.drops(s)
	})})
	for prefix, gateway := range map[string]netip.Addr{"10.91.0.0/16": far4, "fd91::/16": far6} {
		h.must(h.devices.Own(netip.MustParsePrefix(prefix)))
		h.must(h.collectors.AddRoute(netip.MustParsePrefix(prefix), gateway))
	}
	near := h.makeGroup("near")
	rule := "{name: learns, cgroup: " + near + ", set: {initial_cwnd: {explore: [10, 40], share: 100%, probe: 0%, bytes: 55KB, evidence: 6}}}"
	h.setRules(rule)
	h.startAgent()
	p, far := h.startNear("near"), h.startFar()
	far.listen(tunePort)
	networks := map[string]struct {
		window    int // best window: fewest round trips without a loss
		addresses []netip.AddrPort
	}{
		"10.91.1.0/24":  {40, at(tunePort, netip.MustParseAddr("10.91.1.1"), netip.MustParseAddr("10.91.1.200"))},
		"10.91.2.0/24":  {10, at(tunePort, netip.MustParseAddr("10.91.2.1"), netip.MustParseAddr("10.91.2.200"))},
		"fd91:0:1::/48": {40, at(tunePort, netip.MustParseAddr("fd91:0:1::1"), netip.MustParseAddr("fd91:0:1:7::1"))},
		"fd91:0:2::/48": {10, at(tunePort, netip.MustParseAddr("fd91:0:2::1"), netip.MustParseAddr("fd91:0:2:7::1"))},
	}
	learned := func() map[string]api.TuneLearned {
		t.Helper()
		var list []api.TuneLearned
		h.show(&list, "tune", "learned", "learns")
		known := map[string]api.TuneLearned{}
		for _, l := range list {
			known[l.Prefix] = l
		}
		return known
	}
	if known := learned(); len(known) > 0 {
		t.Errorf("before any connection: %+v", known)
	}
	var all []netip.AddrPort
	for _, n := range networks {
		all = append(all, n.addresses...)
	}
	windowOf := func(a netip.Addr) int {
		bits := 48
		if a.Is4() {
			bits = 24
		}
		return networks[netip.PrefixFrom(a, bits).Masked().String()].window
	}
	begin := func(when string) {
		t.Helper()
		for _, e := range p.do(order{Do: "connect", N: 2 * len(all), Parallel: 16, To: all, Up: 1000}) {
			if want := windowOf(e.Remote.Addr()); int(e.First) != want {
				t.Errorf("%s: connection to %v: initial window %d, want %d", when, e.Remote, e.First, want)
			}
		}
	}
	settled := func(when string) {
		t.Helper()
		for prefix, l := range learned() {
			n, ok := networks[prefix]
			if !ok || !l.Settled || l.Window != n.window {
				t.Errorf("%s: %+v, want a window of %d", when, l, n.window)
			}
		}
		begin(when)
	}
	h.eventually("all to settle", func() error {
		p.do(order{Do: "connect", N: 2 * len(all), Parallel: 16, To: all, Up: 60_000})
		known := learned()
		if len(known) != len(networks) {
			return fmt.Errorf("%d networks", len(known))
		}
		for prefix, l := range known {
			if !l.Settled {
				return fmt.Errorf("%s: %+v", prefix, l)
			}
		}
		return nil
	})
	settled("at first")
	for prefix, l := range learned() {
		if len(l.Candidates) != 2 || time.Since(l.Last) > patience || l.Rule != "learns" || l.Cgroup != near {
			t.Errorf("%+v", l)
			continue
		}
		for i, c := range l.Candidates {
			if c.Window != []int{10, 40}[i] || c.Connections < 6 || c.Time < 199 || (c.Lossy > c.Connections/2) != (c.Window > networks[prefix].window) {
				t.Errorf("%s: %+v", prefix, c)
			}
		}
	}
	if out, _, code := h.cli("tune", "learned"); code != 0 || !strings.Contains(out, "10.91.2.0/24") || !strings.Contains(out, "lossy") {
		t.Errorf("sockeye tune learned: exit code %d:\n%s", code, out)
	}

	// The other role uses the learned window.
	p.listen(tunePort)
	far.do(order{Do: "connect", N: 4, To: at(tunePort, near4), From: []netip.Addr{netip.MustParseAddr("10.91.2.9"), netip.MustParseAddr("10.91.1.9")}, Down: 1000, Keep: true})
	for _, e := range p.accepted(4) {
		if want := windowOf(e.Remote.Addr()); int(e.First) != want {
			t.Errorf("accepted from %v: initial window %d, want %d", e.Remote, e.First, want)
		}
	}

	h.killAgent()
	begin("no agent")
	h.startAgent()
	settled("a new agent")
	// Learned windows survive a change of the rule.
	h.apply(strings.Replace(rule, "set: {", "set: {nodelay: true, ", 1))
	settled("another version of the rule")
}

// TestTuneLostSYN checks that a lost SYN does not count as a lost data segment in counters, reactions and learning.
func TestTuneLostSYN(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	seen := map[[2]netip.AddrPort]bool{}
	h := newTuned(t, lab.LinkOptions{Delay: 5 * time.Millisecond, Drop: func(_ lab.Direction, packet []byte) bool {
		s, ok := parseSegment(packet)
		if !ok || !s.syn {
			return false
		}
		mu.Lock()
		defer mu.Unlock()
		key := [2]netip.AddrPort{s.from, s.to}
		first := !seen[key] // the SYN, or the SYN-ACK
		seen[key] = true
		return first
	}})
	h.resendLate()
	near := h.makeGroup("near")
	h.setRules("{name: both, cgroup: " + near + `, set: {syn_rto: 50ms, synack_rto: 50ms, initial_cwnd: {explore: [10, 20], share: 100%, bytes: 20KB, evidence: 2}},
		react: {retransmits: "> 1%", rtos: "> 0", set: {congestion: cubic}}}`)
	h.startAgent()
	p, far := h.startNear("near"), h.startFar()
	far.listen(tunePort)
	p.listen(tunePort)
	const n = 8
	p.do(order{Do: "connect", N: n, Parallel: n, To: at(tunePort, far4, far6), Up: 60_000})
	far.do(order{Do: "connect", N: n, Parallel: n, To: at(tunePort, near4, near6), Down: 60_000})
	var r api.TuneRuleStatus
	h.eventually("the connections' ends", func() error {
		if r = h.rule("both"); r.Closed != 2*n {
			return fmt.Errorf("%+v", r)
		}
		return nil
	})
	if r.Retransmits != 0 || r.RTOs != 0 || r.Reactions != 0 || r.Established != 2*n || r.Segments < 2*n*30 {
		t.Errorf("%+v", r)
	}
	var list []api.TuneLearned
	h.show(&list, "tune", "learned")
	timed := uint32(0)
	for _, l := range list {
		for _, c := range l.Candidates {
			timed += c.Connections
			if c.Lossy != 0 {
				t.Errorf("%+v", l)
			}
		}
	}
	// A connection that a busy host lets wait for longer than TUNE_GAP_US has no first flight.
	if timed < 2*n*3/4 {
		t.Errorf("%d of %d timed: %+v", timed, 2*n, list)
	}
}

// TestTuneLearnShort checks that connections that end with the first flight contribute to learning in both roles, and
// that each window is tried equally often. Other connections have the kernel's default window.
func TestTuneLearnShort(t *testing.T) {
	t.Parallel()
	h := newTuned(t, lab.LinkOptions{Delay: 15 * time.Millisecond})
	near := h.makeGroup("near")
	// Each rule learns anew.
	rules := 0
	rule := func() string { return fmt.Sprintf("learns%d", rules) }
	setRule := func() {
		rules++
		h.setRules("{name: " + rule() + ", cgroup: " + near + ", set: {initial_cwnd: {explore: [4, 10, 40], share: 50%, probe: 0%, evidence: 5}}}")
	}
	setRule()
	h.startAgent()
	p, far := h.startNear("near"), h.startFar()
	h.resendLate() // a window with a loss is not learned
	for _, test := range []struct {
		name        string
		from, to    *peer
		at          netip.AddrPort
		up, down    int
		prefix      string
		uncountable order
	}{
		{"connects, sends 70,000 bytes and closes", p, far, netip.AddrPortFrom(far4, tunePort), 70_000, 0, netip.PrefixFrom(far4, 24).Masked().String(), order{Up: 20_000}},
		{"accepts, answers with 80 KB and closes", far, p, netip.AddrPortFrom(near6, tunePort), 100, 80_000, netip.PrefixFrom(far6, 48).Masked().String(), order{Down: 20_000}},
	} {
		t.Run(test.name, func(t *testing.T) {
			test.to.listen(tunePort)
			// Initial windows of the connecting side.
			connect := func(n int, o order) (first map[uint32]int) {
				first = map[uint32]int{}
				o.Do, o.N, o.To = "connect", n, []netip.AddrPort{test.at}
				for _, e := range test.from.do(o) {
					first[e.First]++
				}
				return first
			}
			learned := func() api.TuneLearned {
				t.Helper()
				var list []api.TuneLearned
				h.show(&list, "tune", "learned", rule())
				for _, l := range list {
					if l.Prefix == test.prefix {
						return l
					}
				}
				t.Fatalf("no learned data for %s: %+v", test.prefix, list)
				return api.TuneLearned{}
			}
			// The windows take four, three and two round trips of 30 ms at most. Longer times have pauses of a busy host, and may be in
			// another order.
			paused := func(c []api.TuneCandidate) bool { return c[0].Time > 140 || c[1].Time > 110 || c[2].Time > 80 }
			// learn returns false if TCP counted a loss, or the host paused.
			learn := func() bool {
				// Connections that are too short to be timed try each window equally often.
				test.uncountable.Parallel = 4
				connect(40, test.uncountable)
				l := learned()
				for _, c := range l.Candidates {
					if c.Connections != 0 || c.Tries == 0 {
						t.Errorf("connections that are too short were timed, or a window was not tried: %+v", c)
					}
				}
				// Connections of the control arm also use the kernel's default window of 10.
				if l.Settled || l.Window != 0 || l.Candidates[0].Tries+1 < l.Candidates[2].Tries || l.Candidates[2].Tries+1 < l.Candidates[0].Tries {
					t.Errorf("after 40 short connections: %+v", l)
				}
				windows := map[uint32]int{}
				for range 20 {
					for window, n := range connect(10, order{Up: test.up, Down: test.down, Parallel: 2}) {
						windows[window] += n
					}
					if l = learned(); l.Settled {
						break
					}
				}
				settled := l
				first := connect(10, order{Up: test.up, Down: test.down, Parallel: 2})
				var wrong []string
				if !settled.Settled || settled.Window != 40 {
					wrong = append(wrong, fmt.Sprintf("windows %v, learned %+v, want 40", windows, settled))
				}
				// Fewer round trips mean a shorter time.
				for i, c := range settled.Candidates[1:] {
					if before := settled.Candidates[i]; c.Connections < 5 || c.Time >= before.Time {
						wrong = append(wrong, fmt.Sprintf("%+v, %+v", before, c))
					}
				}
				if test.from == p && first[40] != 10 {
					wrong = append(wrong, fmt.Sprintf("after the prefix has settled: %v", first))
				}
				if slices.ContainsFunc(learned().Candidates, func(c api.TuneCandidate) bool { return c.Lossy > 0 }) || len(wrong) > 0 && paused(settled.Candidates) {
					return false
				}
				for _, text := range wrong {
					t.Error(text)
				}
				if test.from == p && (windows[4] == 0 || windows[10] == 0 || windows[40] == 0) {
					t.Errorf("not all windows were tried: %v", windows)
				}
				return true
			}
			for attempt := 1; !learn(); attempt++ {
				if attempt == 5 {
					t.Fatalf("losses or pauses in all attempts: %+v", learned())
				}
				t.Logf("a loss was counted, or the host paused: %+v", learned())
				setRule()
				h.show(&api.Plan{}, "apply")
			}
		})
	}
}

// TestTuneReact checks that the options of a reaction are set only on connections that lose segments.
func TestTuneReact(t *testing.T) {
	t.Parallel()
	const bad, label = tunePort + 1, 0x5eed0
	type flow struct {
		data int
		last uint32 // flow label
	}
	var mu sync.Mutex
	flows := map[[2]netip.AddrPort]*flow{}
	h := newTuned(t, lab.LinkOptions{Delay: 10 * time.Millisecond, Drop: onlyData(func(s segment) bool {
		mu.Lock()
		defer mu.Unlock()
		key := [2]netip.AddrPort{s.from, s.to}
		if flows[key] == nil {
			flows[key] = &flow{}
		}
		f := flows[key]
		f.data++
		f.last = s.label
		return s.to.Port() == bad && f.data%7 == 0
	})})
	near, sampled := h.makeGroup("near"), h.makeGroup("sampled")
	h.setRules(
		`{name: all, cgroup: `+near+`, react: {retransmits: "> 6%", set: {congestion: cubic, flow_label: 0x5eed0, txrehash: false, sndbuf: 300KB}}}`,
		`{name: some, cgroup: `+sampled+`, react: {retransmits: "> 6%", sample: 1/4, set: {congestion: cubic}}}`,
	)
	h.startAgent()
	p, q, far := h.startNear("near"), h.startNear("sampled"), h.startFar()
	far.listen(tunePort)
	far.listen(bad)
	run := func(p *peer, port uint16, n int) []connectionEnd {
		return p.do(order{Do: "connect", N: n, Parallel: 16, To: at(port, far4, far6), Up: 120_000, Keep: true})
	}
	for _, e := range run(p, tunePort, 8) {
		if e.Congestion != "reno" || e.Options["sndbuf"] == 600_000 {
			t.Errorf("connection without losses: %+v", e)
		}
	}
	if r := h.rule("all"); r.Reactions != 0 {
		t.Errorf("%d reactions to nothing", r.Reactions)
	}
	lossy := run(p, bad, 8)
	for _, e := range lossy {
		mu.Lock()
		last := flows[[2]netip.AddrPort{e.Local, e.Remote}].last
		mu.Unlock()
		if e.Congestion != "cubic" || e.Options["sndbuf"] != 600_000 || e.Remote.Addr().Is6() != (last == label) {
			t.Errorf("connection that loses 1/7 of the segments: %v -> %v: %s, sndbuf %d, flow label %#x", e.Local, e.Remote, e.Congestion, e.Options["sndbuf"], last)
		}
	}
	if r := h.rule("all"); r.Reactions != 8 || r.Connections != 16 {
		t.Errorf("8 of 16 lose: %+v", r)
	}
	if s := h.socket(p, lossy[0]); !s.Reacted || len(s.Values) == 0 {
		t.Errorf("explain of a connection that reacted: %+v", s)
	}
	if out, _, _ := h.cli("tune"); !strings.Contains(out, "8 reactions") {
		t.Errorf("sockeye tune shows no reactions:\n%s", out)
	}

	// A quarter of 64 connections is sampled.
	reacted := 0
	for _, e := range run(q, bad, 64) {
		if e.Congestion == "cubic" {
			reacted++
		}
	}
	if r := h.rule("some"); int(r.Reactions) != reacted || reacted < 2 || reacted > 36 { // 16 - 4 or + 5 standard deviations
		t.Errorf("%d of 64 connections reacted, want a quarter; counter %d", reacted, r.Reactions)
	}
}

// TestTuneLive applies a rule to open connections and reverts it while they carry data. The rule still applies to new
// connections.
func TestTuneLive(t *testing.T) {
	t.Parallel()
	h := newTuned(t, lab.LinkOptions{Delay: time.Millisecond})
	near := h.makeGroup("near")
	rest := "{name: rest, cgroup: " + near + ", match: {remote: 192.0.2.0/24}, set: {nodelay: true}}"
	rule := "{name: live, cgroup: " + near + ", set: {sndbuf: 50KB, priority: 4, user_timeout: 30s, congestion: cubic, initial_cwnd: 20, cwnd_clamp: 60}}"
	h.setRules(rest)
	h.startAgent()
	p, far := h.startNear("near"), h.startFar()
	p.listen(tunePort)
	far.listen(tunePort)
	both := at(tunePort, far4, far6)
	p.connect(6, both...)
	far.connect(4, at(tunePort, near4, near6)...)
	p.accepted(4)
	before := p.look()
	with := func(when string, ends []connectionEnd) {
		t.Helper()
		for option, want := range map[string]int{"sndbuf": 100_000, "priority": 4, "user_timeout": 30_000} {
			h.has(when, ends, option, want)
		}
		for _, e := range ends {
			if e.Congestion != "cubic" {
				t.Errorf("%s: %v -> %v has %s", when, e.Local, e.Remote, e.Congestion)
			}
		}
	}
	without := func(when string, ends []connectionEnd) {
		t.Helper()
		for i, e := range ends {
			if was := before[i]; e.Congestion != "reno" || e.Options["locks"] != 0 || e.Options["priority"] != was.Options["priority"] ||
				e.Options["user_timeout"] != was.Options["user_timeout"] || e.Local != was.Local {
				t.Errorf("%s: %+v, before %+v", when, e, was)
			}
		}
	}
	// busy sends data on all connections while f runs.
	busy := func(f func()) {
		done := []func() []connectionEnd{
			p.order(order{Do: "exchange", Up: 300_000, Down: 100_000, Parallel: 8}), far.order(order{Do: "exchange", Up: 100_000, Down: 300_000, Parallel: 8}),
		}
		f()
		for _, wait := range done {
			wait()
		}
	}

	h.apply(rest, rule)
	without("apply without --live", p.look())
	var plan api.Plan
	busy(func() { h.show(&plan, "apply", "--live") })
	if l := plan.Live; l == nil || l.Rules["live"] != 10 || len(l.Rules) != 1 || l.Already != 0 || l.NoRule != 0 || len(l.Failures) > 0 || len(l.Problems) > 0 {
		t.Errorf("apply --live: %+v", l)
	}
	with("after apply --live", p.look())
	if r := h.rule("live"); r.Connections != 10 || r.TunedLive != 10 || r.Established != 10 {
		t.Errorf("after apply --live: %+v", r)
	}
	for _, e := range []connectionEnd{before[0], before[9]} {
		if s := h.socket(p, e); s.Rule != "live" || !s.TunedLive || !s.Current || s.Role != map[bool]string{true: "accept", false: "connect"}[e.Accepted] {
			t.Errorf("explain of a connection that was open before: %+v", s)
		}
	}
	busy(func() {})
	with("after data", p.look())
	later := p.connect(4, both...)
	with("a connection from after", later)
	out, errs, code := h.cli("apply", "--live")
	if code != 0 || !strings.Contains(out, "14 had theirs already") {
		t.Errorf("apply --live again: exit code %d: %s%s", code, out, errs)
	}

	// A new agent has the previous values.
	h.killAgent()
	h.startAgent()
	h.refuse(2, []string{`no rule "lives"`, "live"}, "tune", "revert", "lives")
	var back api.TuneLive
	busy(func() { h.show(&back, "tune", "revert", "live") })
	if back.Reverted != 10 || len(back.Problems) > 0 {
		t.Errorf("revert: %+v", back)
	}
	all := p.look()
	without("after revert", all[:10])
	with("a connection from after apply, after revert", all[10:])
	if s := h.socket(p, before[0]); s.Rule != "" || len(s.Steps) == 0 {
		t.Errorf("explain of a connection that lost its rule: %+v", s)
	}
	with("a connection from after revert", p.connect(2, both...))
	busy(func() {})
	h.show(&back, "tune", "revert")
	if back.Reverted != 0 || back.Gone != 0 {
		t.Errorf("revert again: %+v", back)
	}

	// After two applications and another version in between, revert restores the original values.
	h.show(&plan, "apply", "--live")
	h.setRules(rest, strings.Replace(rule, "50KB", "70KB", 1))
	h.show(&plan, "apply", "--live")
	if l := plan.Live; l == nil || l.Rules["live"] != 16 {
		t.Errorf("apply --live of another version: %+v", l)
	}
	h.has("another version", p.look(), "sndbuf", 140_000)
	h.show(&back, "tune", "revert")
	without("after two versions", p.look()[:10])

	// Revert also works after the rule was removed.
	h.show(&plan, "apply", "--live")
	h.apply(rest)
	h.has("a rule that is removed", p.look(), "sndbuf", 140_000)
	h.show(&back, "tune", "revert")
	if back.Reverted != 16 {
		t.Errorf("revert of a removed rule: %+v", back)
	}
	without("after the rule is removed", p.look()[:10])
	if e := p.connect(1, both...)[0]; e.Congestion != "reno" || e.Options["locks"] != 0 || e.Options["priority"] != 0 {
		t.Errorf("new connection after the removal of the rule: %+v", e)
	}
}

// TestTuneForeign checks that programs of other tools are listed with their order, and that the last program determines
// the value.
func TestTuneForeign(t *testing.T) {
	t.Parallel()
	h := newTuned(t, lab.LinkOptions{})
	near := h.makeGroup("near")
	const ours, theirs = 5, 3
	rule := fmt.Sprintf("{name: mine, cgroup: %s, set: {priority: %d, sndbuf: 50KB}}", near, ours)
	h.setRules(rule)
	attach := func(dir string) (id uint32, detach func()) {
		t.Helper()
		p := foreignProgram(t, theirs)
		info, err := p.Info()
		h.must(err)
		number, _ := info.ID()
		l, err := link.AttachCgroup(link.CgroupOptions{Path: dir, Attach: ebpf.AttachCGroupSockOps, Program: p})
		h.must(err)
		t.Cleanup(func() { l.Close() })
		// After Close, a process between fork and exec could have the link.
		return uint32(number), func() { t.Helper(); h.must(l.Detach()) }
	}
	earlier, detach := attach(h.groupDir("near"))
	h.startAgent()
	p, far := h.startNear("near"), h.startFar()
	far.listen(tunePort)
	check := func(where string, cgroup, order string, id uint32, priority int) {
		t.Helper()
		h.has(where, p.connect(2, at(tunePort, far4, far6)...), "priority", priority)
		list := h.tuning(near).Foreign
		if id == 0 {
			if len(list) != 0 {
				t.Errorf("%s: %+v", where, list)
			}
			return
		}
		words := "overrides"
		if order == "after" {
			words = "may override sndbuf, priority"
		}
		if len(list) != 1 || list[0].ID != id || list[0].Cgroup != cgroup || list[0].Order != order || !strings.Contains(list[0].Effect, words) {
			t.Errorf("%s: %+v, want program %d of %s, %s", where, list, id, cgroup, order)
		}
		if out, _, _ := h.cli("tune"); !strings.Contains(out, fmt.Sprintf("program %d of another owner, in %s, runs %s", id, cgroup, order)) {
			t.Errorf("%s: sockeye tune does not show the program:\n%s", where, out)
		}
	}
	check("attached before", near, "before", earlier, ours)
	detach()
	check("none", "", "", 0, ours)
	for _, c := range []struct {
		where, dir, cgroup, order string
		priority                  int
	}{
		{"below", p.CgroupDir(), near + "/near", "before", ours},
		{"attached after", h.groupDir("near"), near, "after", theirs},
		{"above", h.lab.Cgroup(), "/" + h.lab.CgroupPath(), "after", theirs},
	} {
		id, detach := attach(c.dir)
		check(c.where, c.cgroup, c.order, id, c.priority)
		if c.order == "after" {
			e := p.connect(1, at(tunePort, far4)...)[0]
			for _, v := range h.socket(p, e).Values {
				if v.Option == "priority" && (!v.Differs || v.Effective != fmt.Sprint(theirs) || !strings.Contains(v.Note, "another program")) {
					t.Errorf("%s: %+v", c.where, v)
				}
			}
		}
		detach()
	}
	check("none again", "", "", 0, ours)
}

// TestTuneMetrics checks that metrics match the output of "sockeye tune", and continue after the agent is killed.
func TestTuneMetrics(t *testing.T) {
	t.Parallel()
	h := newTuned(t, lab.LinkOptions{Delay: 2 * time.Millisecond, Loss: 0.02, Seed: 1})
	near, unit := h.makeGroup("near"), h.unit(".service")
	h.setPolicyText(fmt.Sprintf(`tune:
  - {name: one, cgroup: %[1]s, match: {port: 5000}, set: {sndbuf: 50KB, bind_ifindex: 1}, trial: {control: 50%%}}
  - {name: two, cgroup: %[1]s, set: {initial_cwnd: 20}, react: {retransmits: "> 0.1%%", set: {sndbuf: 300KB}}}
  - {name: absent, cgroup: %[2]s, set: {nodelay: true}}
metrics: {listen: "127.0.0.1:9732"}
`, near, unit))
	h.startAgent()
	// The user nobody cannot change the bound interface of a socket, and a rule cannot either.
	p, far := h.startPeerAs("65534", h.collectors, "near", "near"), h.startFar()
	far.listen(tunePort)
	far.listen(tunePort + 1)
	p.do(order{Do: "connect", N: 20, Parallel: 8, To: at(tunePort, far4, far6), Up: 20_000, Device: "link0"})
	p.do(order{Do: "connect", N: 10, Parallel: 8, To: at(tunePort+1, far4, far6), Up: 200_000})
	p.do(order{Do: "connect", N: 4, Parallel: 8, To: at(tunePort+1, far4, far6), Up: 1000, Keep: true})
	h.eventually("connections to be counted", func() error {
		if one, two := h.rule("one"), h.rule("two"); one.Closed != 20 || two.Closed != 10 {
			return fmt.Errorf("%+v, %+v", one, two)
		}
		return nil
	})
	agrees := func(when string) map[string]float64 {
		t.Helper()
		one, two := h.rule("one"), h.rule("two")
		metrics := h.scrape("127.0.0.1:9732")
		sum := func(name, rule string) (n uint64) {
			t.Helper()
			found := false
			for _, arm := range []string{"control", "treated"} {
				v, ok := metrics[fmt.Sprintf("sockeye_tune_%s{arm=%q,cgroup=%q,rule=%q}", name, arm, near, rule)]
				n += uint64(v)
				found = found || ok
			}
			if !found {
				t.Errorf("%s: no %s of %s", when, name, rule)
			}
			return n
		}
		for _, r := range []api.TuneRuleStatus{one, two} {
			for name, want := range map[string]uint64{
				"connections_total": r.Connections, "established_total": r.Established, "closed_total": r.Closed, "acked_bytes_total": r.Bytes,
				"segments_total": r.Segments, "retransmits_total": r.Retransmits, "rtos_total": r.RTOs, "connect_seconds_count": r.Established,
			} {
				if got := sum(name, r.Name); got != want {
					t.Errorf("%s: %s of %s is %d, in sockeye tune %d", when, name, r.Name, got, want)
				}
			}
			if n := sum("rtt_seconds_count", r.Name); n < r.Closed {
				t.Errorf("%s: %d RTTs of %s", when, n, r.Name)
			}
			for name, want := range map[string]uint64{"options_set_total": r.OptionsSet, "reactions_total": r.Reactions} {
				if got := uint64(metrics[fmt.Sprintf("sockeye_tune_%s{cgroup=%q,rule=%q}", name, near, r.Name)]); got != want {
					t.Errorf("%s: %s of %s is %d, in sockeye tune %d", when, name, r.Name, got, want)
				}
			}
		}
		if one.Control != uint64(metrics[fmt.Sprintf("sockeye_tune_connections_total{arm=\"control\",cgroup=%q,rule=\"one\"}", near)]) || one.Control == 0 || one.Control == 20 {
			t.Errorf("%s: control of %+v", when, one)
		}
		if len(one.Failures) != 1 || one.Failures[0].Option != "bind_ifindex" || one.Failures[0].Error != "EPERM" ||
			one.Failures[0].Count != 20-one.Control || one.OptionsSet != 20-one.Control ||
			one.Failures[0].Count != uint64(metrics[fmt.Sprintf("sockeye_tune_options_failed_total{cgroup=%q,error=\"EPERM\",option=\"bind_ifindex\",rule=\"one\"}", near)]) {
			t.Errorf("%s: failures of %+v", when, one)
		}
		if two.Retransmits == 0 || two.Reactions == 0 || two.Bytes < 10*200_000 || two.Segments < 10*138 {
			t.Errorf("%s: too little of %+v", when, two)
		}
		for cgroup, want := range map[string]float64{near: 1, unit: 0} {
			if got, ok := metrics[fmt.Sprintf("sockeye_tune_attached{cgroup=%q}", cgroup)]; !ok || got != want {
				t.Errorf("%s: attached of %s is %v", when, cgroup, got)
			}
		}
		return metrics
	}
	before := agrees("at first")
	h.killAgent()
	p.do(order{Do: "connect", N: 6, Parallel: 8, To: at(tunePort+1, far4, far6), Up: 1000})
	h.startAgent()
	h.eventually("connections to be counted", func() error {
		if r := h.rule("two"); r.Closed != 16 {
			return fmt.Errorf("%+v", r)
		}
		return nil
	})
	after := agrees("a new agent")
	for name, value := range before {
		if strings.HasPrefix(name, "sockeye_tune_") && after[name] < value {
			t.Errorf("a new agent: %s is %v, before %v", name, after[name], value)
		}
	}
	if name := fmt.Sprintf("sockeye_tune_connections_total{arm=\"treated\",cgroup=%q,rule=\"two\"}", near); after[name] != before[name]+6 {
		t.Errorf("a new agent: %v connections, %v before", after[name], before[name])
	}
	if out, _, _ := h.cli("tune"); !strings.Contains(out, "rule one: bind_ifindex failed ") || !strings.Contains(out, "EPERM") {
		t.Errorf("sockeye tune shows no failure:\n%s", out)
	}
}

// TestTuneTags checks that a tag in the rule of one host selects a rule on another host, in both directions. Hosts
// without tags are not affected.
func TestTuneTags(t *testing.T) {
	t.Parallel()
	h := newTuned(t, lab.LinkOptions{Delay: time.Millisecond})
	servers, clients := h.makeGroup("servers"), h.makeGroup("clients")
	h.setRules(
		"{name: known, cgroup: "+servers+", match: {tag: rack-12, role: accept}, set: {priority: 5}}",
		"{name: answers, cgroup: "+servers+", match: {role: accept, port: 5001}, set: {priority: 2}, tag: 0x00ff10}",
		"{name: unknown, cgroup: "+servers+", set: {priority: 1}}",
		"{name: answered, cgroup: "+clients+", match: {tag: 0x00ff10, role: connect}, set: {priority: 6}}",
		"{name: writes, cgroup: "+clients+", match: {port: 5000}, set: {priority: 3}, tag: rack-12}",
		"{name: silent, cgroup: "+clients+", set: {priority: 4}}",
	)
	h.startAgent()
	server, client, unaware := h.startPeer(h.collectors, "servers", "server"), h.startPeer(h.devices, "clients", "client"), h.startFar()
	for port := range uint16(3) {
		server.listen(tunePort + port)
	}
	n := 0
	check := func(who *peer, port uint16, atServer, atClient int) {
		t.Helper()
		ends := who.connect(4, at(port, near4, near6)...)
		// Data segments may also carry a tag.
		who.do(order{Do: "exchange", Up: 5000, Down: 5000})
		n += 4
		what := fmt.Sprintf("%s to port %d", who.Name, port)
		h.has(what+", at the server", server.accepted(n)[n-4:], "priority", atServer)
		h.has(what+", at the client", ends, "priority", atClient)
	}
	check(client, tunePort, 5, 3)
	check(client, tunePort+1, 2, 6)
	check(client, tunePort+2, 1, 4)
	check(unaware, tunePort, 1, 0)
	check(unaware, tunePort+1, 2, 0)
	h.killAgent()
	check(client, tunePort, 5, 3)
	h.startAgent()
	check(client, tunePort+1, 2, 6)
	for name, want := range map[string][2]uint64{"known": {8, 8}, "answers": {12, 0}, "unknown": {8, 0}, "answered": {8, 8}, "writes": {8, 0}} {
		if r := h.rule(name); r.Connections != want[0] || r.Tags != want[1] {
			t.Errorf("rule %s: %d connections, %d by a tag, want %v", name, r.Connections, r.Tags, want)
		}
	}
	e := server.look()[0]
	if s := h.socket(server, e); s.Rule != "known" || s.Role != "accept" {
		t.Errorf("explain of a connection with a tag: %+v", s)
	}
	var said []api.TuneExplanation
	for tag, rule := range map[string]string{"rack-12": "known", "rack-13": "unknown"} {
		h.show(&said, "tune", "explain", e.Local.String(), e.Remote.String(), "--role", "accept", "--tag", tag, "--cgroup", servers)
		if len(said) != 1 || said[0].Rule != rule {
			t.Errorf("explain of the tag %s: %+v", tag, said)
		}
	}
}

// TestTuneService checks that a rule for a service applies to the service's connections. The programs of steering are
// not listed as programs of other tools.
func TestTuneService(t *testing.T) {
	inBothModes(t, func(t *testing.T, mode config.Steering) {
		h := newHost(t, mode)
		rules := fmt.Sprintf("tune:\n  - {name: served, cgroup: /%[1]s, match: {service: telemetry}, set: {priority: 5}}\n  - {name: rest, cgroup: /%[1]s, set: {priority: 1}}\n", h.lab.CgroupPath())
		setPolicy := func(slots int, lines ...string) {
			t.Helper()
			h.setPolicy(slots, lines...)
			text, err := os.ReadFile(h.policyPath())
			h.must(err)
			h.must(os.WriteFile(h.policyPath(), append(text, rules...), 0o644))
		}
		setPolicy(2)
		h.startAgent()
		h.start(0, 1)
		h.ready(0, 1)
		home, all := h.homes(2), addresses(20)
		h.lands("with rules", all, home)
		served := func() (n, rest uint64, foreign int) {
			t.Helper()
			var list []api.TuneStatus
			h.show(&list, "tune")
			for _, f := range list[0].Foreign {
				if strings.Contains(f.Cgroup, h.lab.CgroupPath()) { // others may attach programs to the root of the hierarchy
					foreign++
				} else {
					t.Logf("program %d of cgroup %s", f.ID, f.Cgroup)
				}
			}
			return list[0].Rules[0].Connections, list[0].Rules[1].Connections, foreign
		}
		const want = 20
		if n, rest, foreign := served(); n != want || rest != 0 || foreign != 0 {
			t.Errorf("%d connections of the service, want %d, %d others, %d foreign programs", n, want, rest, foreign)
		}
		h.killAgent()
		h.lands("no agent", all, home)
		h.startAgent()
		h.ready(0, 1)
		// The new agent is in the cgroup, too, and probes options with two connections.
		const ends = 4
		if n, rest, foreign := served(); n != 2*want || rest != ends || foreign != 0 {
			t.Errorf("a new agent: %d connections of the service, want %d, %d others, want %d, %d foreign programs", n, 2*want, rest, ends, foreign)
		}
		setPolicy(3)
		var plan api.Plan
		h.show(&plan, "apply")
		for _, c := range plan.Changes {
			if c.Cgroup != "" {
				t.Errorf("a change of slots changed the tuning: %+v", c)
			}
		}
	})
}

// TestTuneNothingLeft checks that tuning leaves nothing on a closed host.
func TestTuneNothingLeft(t *testing.T) {
	t.Parallel()
	var (
		processes   []*process.Process
		programs    []link.AttachedProgram
		cgroup, dir string
		pins        []string
	)
	t.Run("host", func(t *testing.T) {
		h := newTuned(t, lab.LinkOptions{})
		unit := h.unit(".service")
		rules := []string{
			"{name: near, cgroup: " + h.group("near") + ", match: {tag: one}, set: {sndbuf: 50KB}}",
			"{name: made, cgroup: " + h.group("made/deeper") + ", set: {sndbuf: 50KB}, tag: one}",
			"{name: unit, cgroup: " + unit + ", set: {sndbuf: 50KB}}",
		}
		h.setRules(rules...)
		h.makeGroup(h.slice("deep") + unit)
		h.startAgent()
		far := h.startFar()
		far.listen(tunePort)
		p, q, r := h.startNear("near"), h.startNear("made/deeper"), h.startPeer(h.collectors, h.slice("deep")+unit, "near")
		for _, p := range []*peer{p, q, r} {
			p.connect(4, at(tunePort, far4, far6)...)
		}
		var plan api.Plan
		h.show(&plan, "apply", "--live")
		h.killAgent()
		h.startAgent()
		for _, p := range []*lab.Process{h.agent, far.Process, p.Process, q.Process, r.Process} {
			processes = append(processes, processesOf(t, p)...)
		}
		for _, dir := range []string{"near", "made/deeper", h.slice("deep") + unit} {
			programs = append(programs, sockOps(t, h.groupDir(dir))...)
		}
		if len(processes) != 5 || len(programs) != 3 {
			t.Errorf("%d processes, programs %v", len(processes), programs)
		}
		cgroup, dir, pins = h.lab.Cgroup(), h.dir, h.tunePins()
		if len(pins) != 3 {
			t.Errorf("pins are %v", pins)
		}
	})
	host := &host{T: t}
	host.eventually("everything to go", func() error {
		if err := allEnded(processes); err != nil {
			return err
		}
		for _, program := range programs {
			if p, err := ebpf.NewProgramFromID(program.ID); err == nil {
				p.Close()
				return fmt.Errorf("program %d", program.ID)
			}
		}
		for _, path := range append(pins, cgroup, dir) {
			if _, err := os.Stat(path); !os.IsNotExist(err) {
				return fmt.Errorf("%s is still there", path)
			}
		}
		return nil
	})
}

// rulesOf returns the part of the output that is constant without changes of the policy and new connections.
func rulesOf(list []api.TuneStatus) (rules []string) {
	for _, s := range list {
		for _, r := range s.Rules {
			rules = append(rules, fmt.Sprint(s.Path, s.Created, r.Name, r.Match, r.Set, r.Connections))
		}
	}
	return rules
}

// sockOps lists the sock_ops programs of a cgroup.
func sockOps(t *testing.T, dir string) []link.AttachedProgram {
	t.Helper()
	f, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	attached, err := link.QueryPrograms(link.QueryOptions{Target: int(f.Fd()), Attach: ebpf.AttachCGroupSockOps})
	if err != nil {
		t.Fatal(err)
	}
	return attached.Programs
}

// noDeeperThan limits the depth of cgroups below the lab's cgroup until the returned function is called.
func (h *tuned) noDeeperThan(levels int) (more func()) {
	h.Helper()
	file := h.groupDir("cgroup.max.depth")
	h.must(os.WriteFile(file, []byte(fmt.Sprint(levels)), 0))
	return func() {
		h.Helper()
		h.must(os.WriteFile(file, []byte("max"), 0))
	}
}

// attachAlone attaches a program without BPF_F_ALLOW_MULTI and BPF_F_ALLOW_OVERRIDE, so that no other program can be
// attached below its cgroup. It returns a function that detaches the program.
func attachAlone(t *testing.T, dir string) (detach func()) {
	t.Helper()
	p := foreignProgram(t, 0)
	f, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := link.RawAttachProgram(link.RawAttachProgramOptions{Target: int(f.Fd()), Program: p, Attach: ebpf.AttachCGroupSockOps}); err != nil {
		t.Fatal(err)
	}
	return func() {
		t.Helper()
		defer f.Close()
		if err := link.RawDetachProgram(link.RawDetachProgramOptions{Target: int(f.Fd()), Program: p, Attach: ebpf.AttachCGroupSockOps}); err != nil {
			t.Fatal(err)
		}
	}
}
