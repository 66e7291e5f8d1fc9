// SPDX-License-Identifier: Apache-2.0

//go:build !vm

package tune

import (
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sockeye/internal/api"
	"sockeye/internal/domain/domaintest"
	"sockeye/internal/fault"
	"sockeye/internal/testenv"
)

const tunePolicy = `tune:
  - name: bmp
    cgroup: CGROUP/telemetry
    match: {port: 1790}
    set: {sndbuf: 150KB, syn_rto: 10ms}
  - name: rest
    cgroup: CGROUP/telemetry
    set: {congestion: reno}
`

// testRunner runs the domain.
func testRunner(t testing.TB, dir, pins string) *domaintest.Runner {
	t.Helper()
	h := domaintest.Host(t, dir, pins, slog.DiscardHandler)
	return domaintest.New(h, New(h))
}

func tuningOf(r *domaintest.Runner) *Domain { return r.Domains[0].(*Domain) }

// TestPlanTune checks the texts of plans that change rules.
func TestPlanTune(t *testing.T) {
	dir := t.TempDir()
	a := testRunner(t, dir, testenv.BPFFS(t)+"/sockeye")
	defer a.Stop()
	a.Start(t, domaintest.Policy(tunePolicy))
	cgroup := filepath.Join(testenv.Cgroup(), "telemetry")
	if _, err := os.Stat(cgroup); err != nil {
		t.Errorf("the cgroup that the policy names: %v", err)
	}
	name := testenv.CgroupPath() + "/telemetry"
	const later = " (new connections get a later rule or the kernel's defaults, open ones keep what they have)"
	for _, c := range []struct {
		name    string
		replace []string
		want    []string
	}{
		{"nothing", nil, nil},
		{"value", []string{"150KB", "200KB"}, []string{"change rule bmp: sndbuf: 150KB -> 200KB (for new connections)"}},
		{"another option", []string{"sndbuf: 150KB, ", ""}, []string{"change rule bmp: sndbuf: 150KB -> unset (for new connections)"}},
		{"match", []string{"1790", "1791"}, []string{"change rule bmp: match: port 1790 -> port 1791 (for new connections)"}},
		{"prefixes that the text does not show", []string{"port: 1790", `port: [1790, 1], remote: [192.0.2.0/24]`},
			[]string{"change rule bmp: match: port 1790 -> remote 192.0.2.0/24; port 1790, 1 more (for new connections)"}},
		{"trial", []string{"    set: {congestion", "    trial: {control: 5%}\n    set: {congestion"}, []string{"change rule rest: trial: none -> control 5% (for new connections)"}},
		{"tag", []string{"    set: {congestion", "    tag: rack\n    set: {congestion"}, []string{`change rule rest: tag: none -> "rack" (for new connections)`}},
		{"rename", []string{"name: bmp", "name: bgp"}, []string{"remove rule bmp" + later, "add rule bgp: syn_rto 10ms, sndbuf 150KB (for new connections: port 1790)"}},
		{"elsewhere", []string{"/telemetry\n    set", "/other\n    set"}, []string{
			"add cgroup (the cgroup is created, and removed when the policy no longer names it)",
			"add rule rest: congestion reno (for new connections: all)",
			"remove rule rest" + later}},
	} {
		changes, err := a.Plan(domaintest.Policy(tunePolicy, c.replace...))
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		var got []string
		for _, change := range changes {
			if change.Service != "" || change.Cgroup != name && change.Cgroup != testenv.CgroupPath()+"/other" {
				t.Errorf("%s: of %q and %q", c.name, change.Service, change.Cgroup)
			}
			got = append(got, change.Action+" "+change.What+" ("+change.Effect+")")
		}
		slices.Sort(got)
		slices.Sort(c.want)
		if !slices.Equal(got, c.want) {
			t.Errorf("%s:\ngot  %q\nwant %q", c.name, got, c.want)
		}
	}

	swapped := "tune:\n" + strings.Join(append(strings.SplitAfter(tunePolicy, "\n")[5:8], strings.SplitAfter(tunePolicy, "\n")[1:5]...), "")
	// A rule for all connections, in first place, would match everything.
	swapped = strings.Replace(swapped, "set: {congestion", "match: {role: accept}\n    set: {congestion", 1)
	changes, err := a.Plan(domaintest.Policy(swapped))
	if err != nil || len(changes) != 2 || changes[1].What != "order: bmp, rest -> rest, bmp" {
		t.Errorf("order: %+v, %v", changes, err)
	}

	for text, code := range map[string]int{
		domaintest.Policy(tunePolicy, "reno", "westwood"):                 fault.CodeUnsupported,
		domaintest.Policy(tunePolicy, "/telemetry\n    set", "\n    set"): fault.CodeConflict,
	} {
		if _, err := a.Plan(text); fault.Code(err) != code || fault.Hint(err) == "" {
			t.Errorf("%s: code %d: %v, hint %q", text, fault.Code(err), err, fault.Hint(err))
		}
	}
	if _, err := a.Apply(domaintest.Policy("tune: []\nmetrics: {listen: \"127.0.0.1:0\"}\n")); err == nil {
		t.Error("a policy of nothing was applied")
	}
	if _, err := a.Apply(domaintest.Policy(strings.Replace(tunePolicy, "reno", "westwood}\n    optional: true # {", 1))); err != nil {
		t.Fatal(err)
	}
	status, err := tuningOf(a).Cgroups("")
	if err != nil || len(status) != 1 || !status[0].Attached || !status[0].Created {
		t.Fatalf("%+v, %v", status, err)
	}
	if s := status[0].Rules[1].Skipped; len(s) != 1 || s[0] != (api.TuneSkipped{Option: "congestion", Needs: "the module tcp_westwood, loaded"}) {
		t.Errorf("skipped: %+v", s)
	}
	a.Retire(t)
	if _, err := os.Stat(cgroup); !os.IsNotExist(err) {
		t.Errorf("the cgroup after the policy: %v", err)
	}
}

// TestLiveInterrupted checks that the next agent reverts what apply --live had changed when the agent was killed.
func TestLiveInterrupted(t *testing.T) {
	dir, pins := t.TempDir(), testenv.BPFFS(t)+"/sockeye"
	cgroup := filepath.Join(testenv.Cgroup(), "live")
	if err := os.Mkdir(cgroup, 0o755); err != nil {
		t.Fatal(err)
	}
	defer testenv.Within(t, "the cgroup is removed", func() bool { return os.Remove(cgroup) == nil })
	server := testenv.StartServer(t, cgroup, "127.0.0.1:0", 0)
	defer server.Stop.Close()
	c, err := net.Dial("tcp", server.Address)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	policy := domaintest.Policy("tune:\n  - {name: all, cgroup: CGROUP/live, set: {user_timeout: 5s}}\n")
	a := testRunner(t, dir, pins)
	a.Start(t, policy)
	for _, tuner := range tuningOf(a).tuners {
		journal, err := tuner.openJournal()
		if err != nil {
			t.Fatal(err)
		}
		// The file system was full for a moment.
		if _, err := journal.WriteString("{\"boot"); err != nil {
			t.Fatal(err)
		}
		testenv.Within(t, "the connection has its rule", func() bool {
			r, err := Apply(tuner.tune, tuner.scope.Path, nil, journal.record)
			return err == nil && r.TunedLive == 1
		})
		journal.Close()
	}
	a.Stop()
	a = testRunner(t, dir, pins)
	defer a.Stop()
	a.Start(t, policy)
	got, err := tuningOf(a).Revert(api.TuneRevert{})
	if err != nil || got.Reverted != 1 || got.Options != 1 || len(got.NotReverted) > 0 {
		t.Errorf("reverted %+v, %v", got, err)
	}
	if got, err = tuningOf(a).Revert(api.TuneRevert{}); err != nil || got.Reverted+got.Gone != 0 {
		t.Errorf("again: %+v, %v", got, err)
	}
	a.Retire(t)
}

// TestStartWithoutTune checks that the agent starts although this host cannot apply the tune rules, and that status
// shows the reason. Of two nested cgroups, the outer one is tuned.
func TestStartWithoutTune(t *testing.T) {
	for problem, policy := range map[string]string{
		"congestion": domaintest.Policy(tunePolicy, "reno", "westwood"),
		"override":   domaintest.Policy(tunePolicy, "/telemetry\n    set", "\n    set"),
	} {
		a := testRunner(t, t.TempDir(), testenv.BPFFS(t)+"/sockeye")
		a.Start(t, policy)
		status, err := tuningOf(a).Cgroups("")
		if err != nil || len(status) == 0 {
			t.Fatalf("%+v, %v", status, err)
		}
		for _, s := range status {
			if outer := s.Cgroup == testenv.CgroupPath() && problem == "override"; outer {
				if !s.Attached || s.Problem != "" {
					t.Errorf("the outer cgroup: %+v", s)
				}
			} else if s.Attached || !strings.Contains(s.Problem, problem) || s.Hint == "" {
				t.Errorf("%s: %+v", problem, s)
			}
		}
		// A policy that the host can apply clears the error.
		if _, err := a.Apply(domaintest.Policy(tunePolicy)); err != nil {
			t.Error(err)
		}
		if status, err = tuningOf(a).Cgroups(""); err != nil || len(status) != 1 || !status[0].Attached || status[0].Problem != "" {
			t.Errorf("%s, then: %+v, %v", problem, status, err)
		}
		a.Retire(t)
		a.Stop()
	}
}
