// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"encoding/json"
	"io"
	"net"
	"net/http"
	"os"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/spf13/cobra"

	"sockeye/internal/api"
	"sockeye/internal/doctor"
	"sockeye/internal/fault"
	"sockeye/internal/match"
	"sockeye/internal/tune/trial"
)

// fake is a fake agent that records requests.
type fake struct {
	*host
	mu      sync.Mutex     // held by tests whose client is another process
	answers map[string]any // by method and path, as GET /v1/tune
	asked   []string       // method, path, query and body
}

// newFake starts a fake. Answers of type api.Failure are sent as failures; answers of type http.HandlerFunc are
// called.
func newFake(t *testing.T) *fake {
	t.Helper()
	f := &fake{host: newHost(t, "services: {}\n"), answers: make(map[string]any)}
	if err := os.Mkdir(f.run, 0o755); err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("unix", api.SocketPath(f.run))
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: f}
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(func() { server.Close() })
	return f
}

func (f *fake) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		f.t.Error(err)
	}
	f.mu.Lock()
	f.asked = append(f.asked, strings.TrimSpace(r.Method+" "+r.URL.Path+" "+queryText(r)+string(body)))
	answer, ok := f.answers[r.Method+" "+r.URL.Path]
	f.mu.Unlock()
	if !ok {
		answer = api.Failure{Error: "the agent has no " + r.URL.Path, Code: fault.CodeUsage}
	}
	switch answer := answer.(type) {
	case http.HandlerFunc:
		answer(w, r)
		return
	case api.Failure:
		w.WriteHeader(http.StatusBadRequest)
	}
	if err := json.NewEncoder(w).Encode(answer); err != nil {
		f.t.Error(err)
	}
}

// queryText returns a decoded query, sorted by key.
func queryText(r *http.Request) string {
	var parts []string
	for key, values := range r.URL.Query() {
		parts = append(parts, key+"="+strings.Join(values, ","))
	}
	slices.Sort(parts)
	return strings.Join(parts, " ")
}

// asks runs a command that must print want after one request, and compares its JSON output with the answer.
func asks[T any](f *fake, answer T, request, want string, args ...string) {
	f.t.Helper()
	method, rest, _ := strings.Cut(request, " ")
	path, _, _ := strings.Cut(rest, " ")
	f.answers[method+" "+path] = answer
	f.asked = nil
	f.shows(want, nil, args...)
	if !slices.Equal(f.asked, []string{request}) {
		f.t.Errorf("sockeye %q asked %q, want %q", args, f.asked, request)
	}
	r := f.sockeye(append([]string{"-o", "json"}, args...)...)
	var got T
	d := json.NewDecoder(strings.NewReader(r.out))
	d.DisallowUnknownFields()
	if err := d.Decode(&got); err != nil || d.More() || r.code != 0 || r.err != "" {
		f.t.Errorf("sockeye %q -o json: %v, %+v", args, err, r)
	}
	if !reflect.DeepEqual(got, answer) {
		f.t.Errorf("sockeye %q -o json: got %+v\nwant %+v", args, got, answer)
	}
}

func tuned() []api.TuneStatus {
	return []api.TuneStatus{{
		Cgroup: "telemetry.slice", Path: "/main.slice/telemetry.slice", Attached: true,
		Foreign: []api.TuneForeign{
			{ID: 812, Cgroup: "/", Order: "after", Effect: "may override sndbuf, cwnd_clamp"},
			{ID: 7, Cgroup: "/main.slice/telemetry.slice/a", Order: "before", Effect: "a rule overrides what it sets"},
		},
		Rules: []api.TuneRuleStatus{{
			Name: "same-datacentre", Match: "same_prefix 44; port 1790", Set: []string{"sndbuf 150KB", "cwnd_clamp 100"},
			React: "rtos > 2, sample 1/100: congestion reno", Reactions: 1, Trial: "control 10%", Control: 119,
			Skipped:     []api.TuneSkipped{{Option: "rto_max", Needs: "Linux 6.15 or later"}},
			Failures:    []api.TuneFailure{{Option: "congestion", Error: "ENOENT", Count: 1}, {Option: "sndbuf", Error: "EPERM", Count: 12}},
			Connections: 1234, Established: 1200, Closed: 1183, TunedLive: 2, OptionsSet: 2230, Bytes: 1 << 40, Segments: 1_000_000,
			Retransmits: 31, RTOs: 3, Tags: 4, Older: 1, Observe: "live",
			RTT: &api.TuneSpread{P50: 312.4, P90: 400, P99: 9000}, Connect: &api.TuneSpread{P50: 400, P90: 500, P99: 600},
		}, {
			Name: "bulk", Match: "remote 2001:db8:1234:5678:9abc:def0:1234:5678/128, 9999 more; port 20000-20003; role accept",
			Set: []string{"initial_cwnd explore 10, 40 by remote/24, share 10%, probe 2%, bytes 64KB, evidence 8, forget 1h"}, Skipped: []api.TuneSkipped{},
			Failures: []api.TuneFailure{}, Connections: 40, Established: 30, Closed: 31, OptionsSet: 0, Segments: 10, Retransmits: 2, RTOs: 1, Observe: "close",
			RTT: &api.TuneSpread{P50: 1_234_567},
		}, {
			Name: "rest", Match: "all", Set: []string{}, Trial: "control 50%", Control: 1, Skipped: []api.TuneSkipped{}, Failures: []api.TuneFailure{}, Connections: 2,
			Observe: "off",
		}},
	}, {
		Cgroup: "/lab", Path: "/lab", Attached: true, Created: true, Foreign: []api.TuneForeign{},
		Rules: []api.TuneRuleStatus{{Name: "lab", Match: "all", Set: []string{"nodelay true"}, Skipped: []api.TuneSkipped{}, Failures: []api.TuneFailure{}, Observe: "live"}},
	}, {
		Cgroup: "gone.service", Problem: "there is no unit gone.service", Hint: "its connections are tuned from the moment it starts", Foreign: []api.TuneForeign{},
		Rules: []api.TuneRuleStatus{{Name: "gone", Match: "all", Set: []string{"nodelay true"}, Skipped: []api.TuneSkipped{}, Failures: []api.TuneFailure{}, Observe: "live"}},
	}}
}

const tunedText = `telemetry.slice (/main.slice/telemetry.slice): attached
program 812 of another owner, in /, runs after the rules: may override sndbuf, cwnd_clamp
program 7 of another owner, in /main.slice/telemetry.slice/a, runs before the rules: a rule overrides what it sets

RULE             MATCH                                               CONNECTIONS  OPEN  OPTIONS SET  FAILED  RETRANSMITS    RTOS  RTT
same-datacentre  same_prefix 44; port 1790                           1234         51    2230         13      31 (< 0.01 %)  3     312 µs
  set sndbuf 150KB, cwnd_clamp 100
  react rtos > 2, sample 1/100: congestion reno; 1 reaction
  trial control 10%; 119 connections in the control arm
  2 connections tuned while open
  4 connections matched by the peer's tag
  1 older version may still apply to open connections
bulk             remote 2001:db8:…re; port 20000-20003; role accept  40           9     0            0       2 (20 %)       1     1.23 s
  match remote 2001:db8:1234:5678:9abc:def0:1234:5678/128, 9999 more; port 20000-20003; role accept
  set initial_cwnd explore 10, 40 by remote/24, share 10%, probe 2%, bytes 64KB, evidence 8, forget 1h
  observe close
rest             all                                                 2            -     0            0       -              -     -
  trial control 50%; 1 connection in the control arm
  observe off

rule same-datacentre: congestion failed 1 time: ENOENT
rule same-datacentre: sndbuf failed 12 times: EPERM
rule same-datacentre: rto_max is skipped: it needs Linux 6.15 or later

/lab: attached, created by the agent

RULE  MATCH  CONNECTIONS  OPEN  OPTIONS SET  FAILED  RETRANSMITS  RTOS  RTT
lab   all    0            0     0            0       0            0     -
  set nodelay true

gone.service: not attached: there is no unit gone.service
hint: its connections are tuned from the moment it starts

RULE  MATCH  CONNECTIONS  OPEN  OPTIONS SET  FAILED  RETRANSMITS  RTOS  RTT
gone  all    0            0     0            0       0            0     -
  set nodelay true
`

func TestTune(t *testing.T) {
	f := newFake(t)
	asks(f, tuned(), "GET /v1/tune", gaps.ReplaceAllString(tunedText, "  "), "tune")
	if r := f.sockeye("tune"); r.out != tunedText {
		t.Errorf("the columns are\n%s\nwant\n%s", r.out, tunedText)
	}
	asks(f, []api.TuneStatus{}, "GET /v1/tune cgroup=/lab", "there are no tune rules\n", "tune", "--cgroup", "/lab")
}

func TestTuneExplain(t *testing.T) {
	f := newFake(t)
	miss := match.Step{Rule: "same-datacentre", Why: "addresses share 21 bits, not 44"}
	hit := match.Step{Rule: "bulk", Matches: true, Why: "remote 10.1.2.3 is in 10.0.0.0/8"}
	asks(f, []api.TuneExplanation{{Cgroup: "/lab", Role: "accept", Rule: "bulk", Steps: []match.Step{miss, hit}, Set: []string{"sndbuf 150KB", "cwnd_clamp 100"}}},
		"GET /v1/tune/explain cgroup=/lab local=10.0.0.1:1790 remote=10.1.2.3:40000 role=accept tag=rack 12", `
/lab, accept

RULE  MATCHES  WHY
same-datacentre  no  addresses share 21 bits, not 44
bulk  yes  remote 10.1.2.3 is in 10.0.0.0/8

rule bulk: sndbuf 150KB, cwnd_clamp 100
`, "tune", "explain", "10.0.0.1:1790", "10.1.2.3:40000", "--role", "accept", "--tag", "rack 12", "--cgroup", "/lab")

	// A role that changes no value is not repeated, and IPv4-mapped addresses are shown as IPv4.
	both := func(cgroup, rule string, s ...match.Step) []api.TuneExplanation {
		return []api.TuneExplanation{{Cgroup: cgroup, Role: "connect", Rule: rule, Steps: s, Set: []string{}}, {Cgroup: cgroup, Role: "accept", Rule: rule, Steps: s, Set: []string{}}}
	}
	differs := both("/c", "", miss)
	differs[1].Steps = []match.Step{{Rule: "same-datacentre", Why: "role is accept, not connect"}}
	asks(f, slices.Concat(both("/a", "bulk", hit), both("/b", "", miss), differs),
		"GET /v1/tune/explain local=10.0.0.1:0 remote=10.1.2.3:0 tag=0x5eed", `
/a, connect or accept

RULE  MATCHES  WHY
bulk  yes  remote 10.1.2.3 is in 10.0.0.0/8

rule bulk, sets no options

/b, connect or accept

RULE  MATCHES  WHY
same-datacentre  no  addresses share 21 bits, not 44

no rule matches: the kernel's defaults apply

/c, connect

RULE  MATCHES  WHY
same-datacentre  no  addresses share 21 bits, not 44

no rule matches: the kernel's defaults apply

/c, accept

RULE  MATCHES  WHY
same-datacentre  no  role is accept, not connect

no rule matches: the kernel's defaults apply

no local port given: rules that match the local port do not apply

no remote port given: rules that match the remote port do not apply
`, "tune", "explain", "::ffff:10.0.0.1", "10.1.2.3:0", "--tag", "0x5eed")
	asks(f, []api.TuneExplanation{}, "GET /v1/tune/explain local=[fe80::1]:0 remote=[2001:db8::1]:1790 role=connect",
		"there are no tune rules\n", "tune", "explain", "fe80::1%eth0", "[2001:db8::1]:1790", "--role", "connect")
}

func TestTuneExplainSocket(t *testing.T) {
	f := newFake(t)
	window := 40
	s := api.TuneSocket{
		PID: 812, FD: 7, Command: "nfacctd -f /etc/pmacct/nfacctd-2.conf", Local: "10.0.0.1:1790", Remote: "192.0.2.1:40000", Role: "accept",
		Cgroup: "/lab",
		Tuned: api.Tuned{
			Rule: "bulk", Current: true, Arm: "treated", Candidate: &window,
			Values: []api.TuneValue{
				{Option: "sndbuf", Requested: "1.5MB", Effective: "425984B", Source: "SO_SNDBUF", Note: "capped by net.core.wmem_max 212992", Differs: true},
				{Option: "cwnd_clamp", Requested: "100", Effective: "80", Source: "TCP_INFO snd_cwnd_clamp", Differs: true},
				{Option: "initial_rwnd", Requested: "40", Note: "only at the start of a connection"},
				{Option: "nodelay", Requested: "true", Effective: "true", Source: "TCP_NODELAY"},
			},
			Steps: []match.Step{{Rule: "bulk", Matches: true, Why: "all match"}},
		},
	}
	asks(f, s, "GET /v1/tune/socket fd=7 pid=812", `
10.0.0.1:1790 to 192.0.2.1:40000, accept: descriptor 7 of process 812 (nfacctd -f /etc/pmacct/nfacctd-2.conf)
cgroup /lab, rule bulk, initial window 40

OPTION  REQUESTED  EFFECTIVE  READ FROM  NOTE
sndbuf  1.5MB  425984B  SO_SNDBUF  capped by net.core.wmem_max 212992
cwnd_clamp  100  80  TCP_INFO snd_cwnd_clamp  differs
initial_rwnd  40  -  -  only at the start of a connection
nodelay  true  true  TCP_NODELAY  -
`, "tune", "explain", "--socket", "812:7")

	// For a rule that was removed, the options of the current rules are shown too.
	s.Current, s.TunedLive, s.Reacted, s.Arm, s.Candidate, s.Values = false, true, true, "control", nil, []api.TuneValue{}
	s.Steps = []match.Step{{Rule: "rest", Why: "port 1790 is not 80"}}
	asks(f, s, "GET /v1/tune/socket local=10.0.0.1:1790 remote=192.0.2.1:40000", `
10.0.0.1:1790 to 192.0.2.1:40000, accept: descriptor 7 of process 812 (nfacctd -f /etc/pmacct/nfacctd-2.conf)
cgroup /lab, rule bulk, no longer in force, control arm of its trial, applied while open, has reacted

by the rules in force:
RULE  MATCHES  WHY
rest  no  port 1790 is not 80
`, "tune", "explain", "--socket", "10.0.0.1:1790,192.0.2.1:40000")
	s = api.TuneSocket{PID: 1, FD: 0, Command: "x", Local: "[::1]:1", Remote: "[::1]:2", Role: "connect", Cgroup: "", Tuned: api.Tuned{Values: []api.TuneValue{}, Steps: []match.Step{}}}
	asks(f, s, "GET /v1/tune/socket local=[::1]:1 remote=[::1]:2", `
[::1]:1 to [::1]:2, connect: descriptor 0 of process 1 (x)
cgroup -, no rule
`, "tune", "explain", "--socket=[::1]:1,[::1]:2")
}

func TestTuneTrial(t *testing.T) {
	f := newFake(t)
	bulk := trial.Row{Name: "retransmits", Unit: "per million segments", Treated: new(12.5), Control: new(139.0), Difference: new(-91.0), Low: new(-95.2), High: new(-84.0), Verdict: trial.Lower}
	asks(f, api.TuneTrial{
		Cgroup: "/lab", Rule: "bulk", Share: 0.1, Summary: "treated connections lose 91 % fewer segments",
		Comparison: trial.Comparison{Treated: 900, Control: 100, Rows: []trial.Row{
			{Name: "connect_median", Unit: "us", Treated: new(312.4), Control: new(31_240.0), Difference: new(0.001), Low: new(-0.5), High: new(5.25), Verdict: trial.NoDifference},
			{Name: "rtt_p99", Unit: "us", Treated: new(3_124_000.0), Verdict: trial.NotEnough, More: 1300},
			{Name: "rate_median", Unit: "kB/s", Treated: new(124.0), Control: new(1_250_000.0), Difference: new(150.0), Low: new(12.0), Verdict: trial.Higher},
			bulk,
			{Name: "rtos", Unit: "per 1000 connections", Treated: new(0.0), Control: new(0.0), High: new(12.0), Verdict: trial.NotEnough, More: 1},
			{Name: "bytes", Unit: "bytes per connection", Treated: new(999.0), Control: new(1.5e9), Verdict: trial.NotEnough},
		}},
	}, "GET /v1/tune/trial rule=bulk", `
rule bulk of /lab: 900 connections tuned, 100 in the control arm (10 %)

FIGURE  TUNED  CONTROL  DIFFERENCE  95 % INTERVAL  VERDICT
connect median  312 µs  31.2 ms  0 %  -0.5 % to +5.25 %  no difference shown
RTT p99  3.12 s  -  -  -  not enough data: about 1300 more connections needed
rate median  124 KB/s  1.25 GB/s  +150 %  +12 % and more  higher
retransmits per million segments  12.5  139  -91 %  -95.2 % to -84 %  lower
RTOs per 1000 connections  0  0  -  +12 % and less  not enough data: about 1 more connection needed
bytes per connection  999 B  1.5 GB  -  -  not enough data

treated connections lose 91 % fewer segments
`, "tune", "trial", "bulk")

	// A real comparison of very few connections.
	c := trial.Compare(trial.Sample{Connections: 1}, trial.Sample{}, trial.Options{})
	f.answers["GET /v1/tune/trial"] = api.TuneTrial{Cgroup: "/lab", Rule: "bulk", Share: 0.001, Comparison: c, Summary: c.Summary()}
	r := f.sockeye("tune", "trial", "bulk")
	if !strings.HasPrefix(r.out, "rule bulk of /lab: 1 connection tuned, 0 in the control arm (0.1 %)\n") || r.code != 0 ||
		strings.Count(r.out, "  not enough data") != len(c.Rows) || !strings.HasSuffix(r.out, "\n\n"+c.Summary()+"\n") {
		t.Errorf("%+v", r)
	}
}

func TestTuneLearned(t *testing.T) {
	f := newFake(t)
	last := time.Now().Add(-90 * time.Minute).Round(0).UTC()
	asks(f, []api.TuneLearned{
		{Cgroup: "/lab", Rule: "bulk", Prefix: "192.0.2.0/24", Settled: true, Window: 40, Last: last, Candidates: []api.TuneCandidate{
			{Window: 10, Tries: 14, Connections: 12, Lossy: 1, Time: 31}, {Window: 40, Tries: 400, Connections: 400, Time: 1234.5}, {Window: 48, Tries: 1}, {Window: 64},
		}},
		{Cgroup: "/lab", Rule: "bulk", Prefix: "2001:db8::/48", Last: last.Add(3 * time.Hour), Candidates: []api.TuneCandidate{}},
	}, "GET /v1/tune/learned", `
CGROUP  RULE  PREFIX  WINDOW  SETTLED  LAST  EVIDENCE
/lab  bulk  192.0.2.0/24  40  yes  1h30m0s ago  10: 14 tries, 12 timed, 8.33 % lossy, 31 ms
  40: 400 tries, 400 timed, 0 % lossy, 1.23 s
  48: 1 try, none timed
  64: not tried
/lab  bulk  2001:db8::/48  kernel's  no  0s ago  -
`, "tune", "learned")
	asks(f, []api.TuneLearned{}, "GET /v1/tune/learned rule=bulk", "nothing learned yet; only rules with explore learn\n", "tune", "learned", "bulk")
}

// live returns the answer of an apply --live that changed nothing.
func live() api.TuneLive {
	return api.TuneLive{Rules: map[string]int{}, Failures: []api.TuneLiveFailure{}, NotReverted: []api.TuneNotReverted{}, Problems: []string{}}
}

func TestTuneRevert(t *testing.T) {
	f := newFake(t)
	l := live()
	asks(f, l, "POST /v1/tune/revert {}", "0 open connections reverted, 0 options\n", "tune", "revert")
	l.Reverted, l.Options = 1, 1
	asks(f, l, `POST /v1/tune/revert {"rules":["rpc","bulk"]}`, "1 open connection reverted, 1 option\n", "tune", "revert", "rpc", "bulk")
	l.Reverted, l.Options, l.Gone = 12, 34, 5
	l.NotReverted = []api.TuneNotReverted{{Rule: "bulk", Option: "pacing_rate", Reason: "pacing goes on", Connections: 2}, {Rule: "rpc", Option: "nodelay", Reason: "changed since", Connections: 1}}
	l.Problems = []string{"process 812: permission denied"}
	asks(f, l, "POST /v1/tune/revert {}", `
12 open connections reverted, 34 options; 5 closed in the meantime
rule bulk: pacing_rate on 2 connections: pacing goes on
rule rpc: nodelay on 1 connection: changed since
problem: process 812: permission denied
`, "tune", "revert")
}

func TestApplyLive(t *testing.T) {
	f := newFake(t)
	list := []api.Change{
		{Service: "telemetry", Action: "change", What: "slots: 4 -> 6", Effect: "1 of 8 devices seen move"},
		{Cgroup: "/lab", Action: "remove", What: "rule bulk", Effect: "open connections keep what they have"},
		{Cgroup: "telemetry.slice", Action: "add", What: "rule rpc: sndbuf 150KB"},
		{Action: "change", What: "metrics: none -> 127.0.0.1:9732"},
	}
	table := `
WHERE  ACTION  WHAT  EFFECT
telemetry  change  slots: 4 -> 6  1 of 8 devices seen move
cgroup /lab  remove  rule bulk  open connections keep what they have
cgroup telemetry.slice  add  rule rpc: sndbuf 150KB  -
-  change  metrics: none -> 127.0.0.1:9732  -
`
	asks(f, api.Plan{Policy: "/p", Changes: list}, "POST /v1/plan {}", table, "plan")
	asks(f, api.Plan{Policy: "/p", Changes: list}, "POST /v1/apply {}", table, "apply")
	l := live()
	l.Rules, l.Options, l.Already, l.NoRule = map[string]int{"rpc": 2, "bulk": 10}, 34, 3, 40
	l.Failures = []api.TuneLiveFailure{{Rule: "bulk", Option: "congestion", Error: "no such file or directory", Count: 10}}
	l.Problems = []string{"process 812: permission denied"}
	asks(f, api.Plan{Policy: "/p", Changes: list, Live: &l}, `POST /v1/apply {"live":true}`, table+`
12 open connections got a rule (bulk 10, rpc 2), 34 options set; 3 had theirs already, no rule matches 40
rule bulk: congestion failed 10 times: no such file or directory
problem: process 812: permission denied
`, "apply", "--live")
	l = live()
	asks(f, api.Plan{Policy: "/p", Changes: []api.Change{}, Live: &l}, `POST /v1/apply {"previous":true,"live":true}`, `
nothing changed

0 open connections got a rule, 0 options set; 0 had theirs already, no rule matches 0
`, "apply", "--live", "--previous")
}

const tuneOnly = "tune:\n  - {name: bulk, cgroup: /lab, set: {sndbuf: 150KB}}\n"

func TestCheckTune(t *testing.T) {
	f := newFake(t)
	f.answers["GET /v1/tune/options"] = []api.TuneSkipped{}
	f.shows("DIR/tune.yaml is valid, 1 tune rule\n", nil, "check", f.write("tune.yaml", tuneOnly))
	both := f.write("both.yaml", oneService+tuneOnly+"  - {name: rest, cgroup: /other, set: {nodelay: true}}\n")
	f.shows("DIR/both.yaml is valid, 1 service, 2 tune rules\n", nil, "check", both)
	if got, want := must[checked](f.host, "check", both), (checked{File: both, Valid: true, Services: 1, TuneRules: 2, Errors: []checkedFlaw{}, Notes: []string{}}); !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
	f.answers["GET /v1/tune/options"] = []api.TuneSkipped{{Option: "sndbuf", Needs: "Linux 4.13 or later"}}
	f.refused(3, "rule bulk: this kernel cannot set sndbuf: it needs Linux 4.13 or later", "remove it, or set optional: true in the rule to skip it", nil, "check", both)
	skips := f.write("skips.yaml", strings.Replace(tuneOnly, "set:", "optional: true, set:", 1))
	f.shows("DIR/skips.yaml is valid, 1 tune rule\nrule bulk skips sndbuf, which needs Linux 4.13 or later\n", nil, "check", skips)
	f.answers["GET /v1/status"] = api.Status{}
	f.shows("there are no services\n", nil, "where", "192.0.2.1", "--plan", f.dir+"/tune.yaml")
}

// TestDoctorTune checks that doctor reports the agent's findings about tune rules.
func TestDoctorTune(t *testing.T) {
	f := newFake(t)
	f.answers["GET /v1/status"] = api.Status{PID: 812}
	f.answers["GET /v1/tune"] = tuned()
	ask := func() (list []doctor.Finding) {
		t.Helper()
		for _, found := range must[[]doctor.Finding](f.host, "doctor", "--policy", f.write("tune.yaml", tuneOnly), "--pins", f.pins) {
			if strings.HasPrefix(found.Area, "tune") {
				list = append(list, found)
			}
		}
		return list
	}
	slice := "tune telemetry.slice"
	want := []doctor.Finding{
		{Area: slice, Check: "attached", Result: "ok", Detail: "3 rules"},
		{Area: slice, Check: "foreign programs", Result: "warning", Detail: "program 812 of another owner, in /, runs after the rules: may override sndbuf, cwnd_clamp"},
		{Area: slice, Check: "foreign programs", Result: "note", Detail: "program 7 of another owner, in /main.slice/telemetry.slice/a, runs before the rules: a rule overrides what it sets"},
		{Area: slice, Check: "rule same-datacentre", Result: "warning", Detail: "congestion failed 1 time: ENOENT"},
		{Area: slice, Check: "rule same-datacentre", Result: "warning", Detail: "sndbuf failed 12 times: EPERM"},
		{Area: slice, Check: "rule same-datacentre", Result: "note", Detail: "rto_max is skipped: it needs Linux 6.15 or later"},
		{Area: "tune /lab", Check: "attached", Result: "ok", Detail: "1 rule"},
		{Area: "tune gone.service", Check: "attached", Result: "warning", Detail: "there is no unit gone.service", Hint: "its connections are tuned from the moment it starts"},
	}
	if got := ask(); !slices.Equal(got, want) {
		t.Errorf("got\n%+v\nwant\n%+v", got, want)
	}
	f.answers["GET /v1/tune"] = []api.TuneStatus{{Cgroup: "/lab"}}
	if got, want := ask(), []doctor.Finding{{Area: "tune /lab", Check: "attached", Result: "warning", Detail: "no"}}; !slices.Equal(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
	delete(f.answers, "GET /v1/tune")
	if got, want := ask(), []doctor.Finding{{Area: "tune", Check: "rules", Result: "warning", Detail: "not known: the agent has no /v1/tune"}}; !slices.Equal(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

func TestTuneRefusals(t *testing.T) {
	f := newFake(t)
	address := "as in 192.0.2.1, 192.0.2.1:1790 or [2001:db8::1]:1790"
	explain := "usage: sockeye tune explain LOCAL REMOTE [flags]"
	family := "a connection has two IPv4 or two IPv6 addresses"
	tag := "1 to 16 printable ASCII characters, or 0x and 1 to 16 bytes in hexadecimal"
	socket := "PID:FD as in 812:7, or LOCAL,REMOTE as in 10.0.0.1:1790,192.0.2.1:40000"
	ports := "give both ports, as in 10.0.0.1:1790,192.0.2.1:40000"
	for _, c := range []struct{ args, message, hint string }{
		{"tune tral", `unknown command "tral"`, "did you mean sockeye tune trial?"},
		{"tune bulk --cgroup /lab", `unknown command "bulk"`, "sockeye tune --help lists the commands"},
		{"tune --cgruop /lab", "unknown flag: --cgruop", "did you mean --cgroup?"},
		{"tune --cgroup", "flag needs an argument: --cgroup", "sockeye tune --help lists the flags"},
		{"tune -o yaml", `--output is "yaml"`, "table or json"},
		{"help tune tral", `unknown command "tral"`, "did you mean sockeye tune trial?"},

		{"tune explain", "LOCAL is missing", explain},
		{"tune explain 192.0.2.1", "REMOTE is missing", explain},
		{"tune explain 192.0.2.1 192.0.2.2 192.0.2.3", `unexpected argument "192.0.2.3"`, explain},
		{"tune explain router 192.0.2.2", `"router" is not an IP address or IP:port`, address},
		{"tune explain 192.0.2.1 192.0.2.0/24", `"192.0.2.0/24" is not an IP address or IP:port`, address},
		{"tune explain 192.0.2.1:70000 192.0.2.2", `"192.0.2.1:70000" is not an IP address or IP:port`, address},
		{"tune explain 192.0.2.1 [2001:db8::1]", `"[2001:db8::1]" is not an IP address or IP:port`, address},
		{"tune explain 192.0.2.1 :1790", `":1790" is not an IP address or IP:port`, address},
		{"tune explain 192.0.2.1:1 [2001:db8::1]:2", "192.0.2.1 and 2001:db8::1 are of different families", family},
		{"tune explain ::1 192.0.2.1", "::1 and 192.0.2.1 are of different families", family},
		{"tune explain 192.0.2.1 192.0.2.2 --role server", `--role is "server"`, "connect or accept"},
		{"tune explain 192.0.2.1 192.0.2.2 --role=", `--role is ""`, "connect or accept"},
		{"tune explain 192.0.2.1 192.0.2.2 --tag=", `--tag is ""`, tag},
		{"tune explain 192.0.2.1 192.0.2.2 --tag=seventeen--bytes-", `--tag is "seventeen--bytes-"`, tag},
		{"tune explain 192.0.2.1 192.0.2.2 --tag=straße", `--tag is "straße"`, tag},
		{"tune explain 192.0.2.1 192.0.2.2 --tag=0x5ee", `--tag is "0x5ee"`, tag},
		{"tune explain 192.0.2.1 192.0.2.2 --tag=0x", `--tag is "0x"`, tag},
		{"tune explain 192.0.2.1 192.0.2.2 --cgroup", "flag needs an argument: --cgroup", "sockeye tune explain --help lists the flags"},

		{"tune explain --socket", "flag needs an argument: --socket", "sockeye tune explain --help lists the flags"},
		{"tune explain --socket=", `--socket is ""`, socket},
		{"tune explain --socket 812", `--socket is "812"`, socket},
		{"tune explain --socket 812:", `--socket is "812:"`, socket},
		{"tune explain --socket 0:7", `--socket is "0:7"`, socket},
		{"tune explain --socket 812:-1", `--socket is "812:-1"`, socket},
		{"tune explain --socket 192.0.2.1:1", `--socket is "192.0.2.1:1"`, socket},
		{"tune explain --socket 192.0.2.1:1,", `"" is not an IP address or IP:port`, address},
		{"tune explain --socket 192.0.2.1:1,192.0.2.2:2,x", `"192.0.2.2:2,x" is not an IP address or IP:port`, address},
		{"tune explain --socket 192.0.2.1:1,[::1]:2", "192.0.2.1 and ::1 are of different families", family},
		{"tune explain --socket 192.0.2.1,192.0.2.2:2", "a port is missing in --socket", ports},
		{"tune explain --socket 192.0.2.1:1,192.0.2.2:0", "a port is missing in --socket", ports},
		{"tune explain --socket 812:7 192.0.2.1", `unexpected argument "192.0.2.1"`, explain},
		{"tune explain --socket 812:7 --role accept", "--socket and --role are mutually exclusive", "these are properties of the open connection"},
		{"tune explain --socket 812:7 --tag x", "--socket and --tag are mutually exclusive", "these are properties of the open connection"},
		{"tune explain --socket 812:7 --cgroup /lab", "--socket and --cgroup are mutually exclusive", "these are properties of the open connection"},

		{"tune trial", "RULE is missing", "usage: sockeye tune trial RULE [flags]"},
		{"tune trial bulk rest", `unexpected argument "rest"`, "usage: sockeye tune trial RULE [flags]"},
		{"tune trial EMPTY", `RULE is ""`, "sockeye tune lists the rules"},
		{"tune trial bulk --rule x", "unknown flag: --rule", "sockeye tune trial --help lists the flags"},
		{"tune learned bulk rest", `unexpected argument "rest"`, "usage: sockeye tune learned [RULE] [flags]"},
		{"tune learned EMPTY", `RULE is ""`, "sockeye tune lists the rules"},
		{"tune revert bulk EMPTY", `RULE is ""`, "sockeye tune lists the rules"},
		{"apply --live=maybe", `--live is "maybe"`, "sockeye apply --help lists the flags"},
		{"plan --live", "unknown flag: --live", "sockeye plan --help lists the flags"},
	} {
		t.Run(strings.ReplaceAll(c.args, "/", "_"), func(t *testing.T) {
			h := *f.host
			h.t = t
			args := strings.Fields(c.args)
			for i := range args {
				if args[i] == "EMPTY" {
					args[i] = ""
				}
			}
			if strings.Contains(c.args, "-o yaml") {
				if r := h.sockeye(args...); r.code != 2 || r.err != "sockeye: "+c.message+"\nhint: "+c.hint+"\n" || r.out != "" {
					t.Errorf("%+v", r)
				}
				return
			}
			h.refused(2, c.message, c.hint, nil, args...)
		})
	}
	if len(f.asked) > 0 {
		t.Errorf("requests to the agent: %q", f.asked)
	}
	// The agent's own error passes through with its code.
	for _, args := range []string{"tune", "tune explain ::1 ::1", "tune explain --socket 812:7", "tune trial bulk", "tune learned", "tune revert"} {
		for _, key := range []string{"GET /v1/tune", "GET /v1/tune/explain", "GET /v1/tune/socket", "GET /v1/tune/trial", "GET /v1/tune/learned", "POST /v1/tune/revert"} {
			f.answers[key] = api.Failure{Error: "this kernel cannot", Hint: "another may", Code: fault.CodeUnsupported}
		}
		f.refused(3, "this kernel cannot", "another may", nil, strings.Fields(args)...)
	}
}

func TestTuneWithoutAgent(t *testing.T) {
	h := newHost(t, "services: {}\n")
	for _, args := range []string{"tune", "tune explain ::1 ::1", "tune explain --socket 1:2", "tune trial bulk", "tune learned", "tune revert", "apply --live"} {
		h.refused(1, "no agent answers on DIR/run/agent.sock",
			"start it with sockeye agent, or name its directory with --run-dir; services that were set up are still steered", nil, strings.Fields(args)...)
	}
}

// TestTuneCompletion checks that the shell completes rules and roles, and no files.
func TestTuneCompletion(t *testing.T) {
	f := newFake(t)
	f.answers["GET /v1/tune"] = tuned()[:1]
	for args, want := range map[string]string{
		"tune tr":                  "trial\n:4\n",
		"tune trial ":              "same-datacentre\nbulk\nrest\n:4\n",
		"tune trial bulk ":         ":4\n",
		"tune learned b":           "same-datacentre\nbulk\nrest\n:4\n",
		"tune revert bulk ":        "same-datacentre\nrest\n:4\n",
		"tune explain ":            ":4\n",
		"tune explain --role ":     "connect\naccept\n:4\n",
		"tune explain --socket ":   ":4\n",
		"tune explain --tag ":      ":4\n",
		"tune explain --cgroup ":   ":4\n",
		"tune explain ::1 ::1 --r": "--role\n:4\n",
	} {
		words := strings.Split(args, " ")
		r := f.sockeye(append([]string{cobra.ShellCompNoDescRequestCmd}, words...)...)
		if r.code != 0 || r.out != want {
			t.Errorf("completion of %q: %q, want %q: %+v", args, r.out, want, r)
		}
	}
}

// TestHelp checks that the help text of each tune and trace command fits a terminal and has an example, and that a
// command with subcommands has an action of its own.
func TestHelp(t *testing.T) {
	f := newFake(t)
	root := Root(Host())
	var all []*cobra.Command
	for _, noun := range []string{"tune", "trace"} {
		cmd, _, err := root.Find([]string{noun})
		if err != nil || len(cmd.Commands()) == 0 {
			t.Fatalf("%s: %v, %v", noun, err, cmd.Commands())
		}
		all = append(append(all, cmd), cmd.Commands()...)
	}
	for _, cmd := range all {
		if cmd.Short == "" || strings.HasSuffix(cmd.Short, ".") || cmd.Long == "" || cmd.Example == "" {
			t.Errorf("%s: %q, %q, %q", cmd.CommandPath(), cmd.Short, cmd.Long, cmd.Example)
		}
		words := strings.Fields(cmd.CommandPath())[1:]
		a, b := f.sockeye(append([]string{"help"}, words...)...), f.sockeye(append(words, "--help")...)
		if a != b || a.code != 0 || a.err != "" || !strings.HasPrefix(a.out, cmd.Long) {
			t.Errorf("help of %s:\n%+v\n--help:\n%+v", cmd.CommandPath(), a, b)
		}
		for line := range strings.Lines(a.out) {
			if len(line) > 81 && !strings.HasPrefix(strings.TrimSpace(line), "-") {
				t.Errorf("%s: a line of %d characters: %s", cmd.CommandPath(), len(line), line)
			}
		}
	}
	if r := f.sockeye("completion"); r.code != 0 || !strings.Contains(r.out, "Usage:\n") {
		t.Errorf("completion: %+v", r)
	}
	if len(f.asked) > 0 {
		t.Errorf("requests to the agent: %q", f.asked)
	}
}
