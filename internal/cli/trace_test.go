// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"math"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/cli/clitest"
	"sockeye/internal/cli/command"
	"sockeye/internal/cli/tracecmd"
	"sockeye/internal/config"
	"sockeye/internal/trace/measure"
)

// noon is the clock of the trace tests.
var noon = time.Date(2026, 3, 14, 12, 0, 0, 0, time.UTC)

// at runs a command at noon.
func (f *fake) at(args ...string) result {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	return f.during(ctx, args...)
}

// during runs a command at noon until ctx is done.
func (f *fake) during(ctx context.Context, args ...string) result {
	var out, err bytes.Buffer
	code := Run(ctx, append([]string{"--run-dir", f.run}, args...), command.Environment{
		Out: &out, Err: &err, In: strings.NewReader(""), Now: func() time.Time { return noon },
		Exec: func(string, []string, []string) error { return unix.ENOEXEC },
	})
	return result{code, out.String(), err.String()}
}

// printsGolden runs a command and compares its output with a golden file.
func (f *fake) printsGolden(name string, args ...string) {
	f.t.Helper()
	r := f.at(args...)
	if r.code != 0 || r.err != "" {
		f.t.Errorf("sockeye %q: %d %s", args, r.code, r.err)
	}
	clitest.Golden(f.t, name, r.out)
	clitest.PrintableOnly(f.t, r.out)
}

// counted counts each duration n times in a histogram.
func counted(n int, times ...time.Duration) *measure.Histogram {
	h := &measure.Histogram{}
	for _, d := range times {
		for range n {
			h.Observe(uint64(d))
		}
	}
	return h
}

// telemetry is a traced cgroup.
func telemetry() api.TracedCgroup {
	return api.TracedCgroup{
		Cgroup: "telemetry.slice", Path: "/main.slice/telemetry.slice", Attached: true, Since: noon.Add(-time.Hour), Programs: []string{"trace_sockops"}, Memory: 1 << 20,
		Rules: []api.TraceRuleStatus{{
			Name: "replies", Match: "port 1790", Connections: "1/10", Messages: "1/100", GroupBy: []string{"remote/24", "port"}, Groups: 2, Limit: 64,
			Stages: []string{"stack", "qdisc", "network"}, Protocols: []string{"tcp"},
			Skipped: []api.TraceSkipped{{Stage: "send", Needs: "fentry, which this architecture lacks"}},
		}, {
			Name: "flows", Match: "all", Connections: "1/1", Messages: "100/s", GroupBy: []string{}, Groups: 1, Limit: 1, Stages: []string{"rx_stack", "reader"},
			Protocols: []string{"udp"}, Skipped: []api.TraceSkipped{},
		}},
	}
}

func tracedStatus(cgroups ...api.TracedCgroup) api.TraceStatus {
	return api.TraceStatus{Timestamps: true, Cgroups: cgroups}
}

// oldKernel is the status on a kernel without BPF timestamps.
func oldKernel(cgroups ...api.TracedCgroup) api.TraceStatus {
	return api.TraceStatus{Needs: "BPF timestamping, Linux 6.15 or later", Cgroups: append([]api.TracedCgroup{}, cgroups...)}
}

const untimedText = "this kernel cannot trace messages sent over TCP: this needs BPF timestamping, Linux 6.15 or later"

func replies(remote string) measure.Group {
	return measure.Group{Rule: "replies", Protocol: config.TCP, Remote: netip.MustParsePrefix(remote), Port: 1790}
}

// measurements has groups of all kinds.
func measurements() measure.Period {
	ns, us, ms := time.Nanosecond, time.Microsecond, time.Millisecond
	return measure.Period{From: noon.Add(-time.Hour), To: noon, Results: []measure.Result{{
		Group: replies("192.0.2.0/24"), Chosen: 12400, InFlight: 5, Bytes: 1 << 30, Unqueued: 12,
		Outcomes: map[measure.Outcome]uint64{measure.Acked: 12345, measure.Retransmitted: 30, measure.Coalesced: 20},
		Stages: map[config.Stage]*measure.Histogram{
			config.StageStack: counted(4115, 12*us, 13*us, 1240*us), config.StageQdisc: counted(6187, 850*ns, 900*ns),
			config.StageNetwork: counted(4125, 10*ms, 11*ms, 2100*ms), measure.Total: counted(4125, 10*ms, 11*ms, 2101*ms),
		},
	}, {
		Group: replies("2001:db8::/48"), Chosen: 3, InFlight: 3, Stages: map[config.Stage]*measure.Histogram{},
	}, {
		Group: measure.Group{Rule: "replies", Other: true}, Chosen: math.MaxUint64, Outcomes: map[measure.Outcome]uint64{measure.Acked: math.MaxUint64 - 1, "vanished_at_sea": 1}, Undriven: 7,
		Stages: map[config.Stage]*measure.Histogram{config.StageStack: {Count: math.MaxUint64, Sum: math.MaxUint64, Max: math.MaxUint64, Buckets: [512]uint64{511: math.MaxUint64}}},
	}, {
		Group:    measure.Group{Rule: "flows", Protocol: config.UDP, Service: clitest.Hostile, Cgroup: "/x\x1b]0;y\x07"},
		RXChosen: 500, RXOutcomes: map[measure.Outcome]uint64{measure.Read: 490, measure.Dropped: 3}, RXWaiting: 7, RXOldest: 1234 * ms, RXUnstamped: 1,
		Stages: map[config.Stage]*measure.Histogram{config.StageRXStack: counted(500, 4*us), config.StageReader: counted(245, 20*us, 900*ms)},
	}, {
		Group: measure.Group{Rule: "flows", Protocol: config.UDP}, RXChosen: 2, RXOutcomes: map[measure.Outcome]uint64{measure.Read: 2},
		Stages: map[config.Stage]*measure.Histogram{config.StageReader: counted(1, 0, 16*ns)},
	}}}
}

// tracing sets the answers of the fake agent to measurements.
func tracing(t *testing.T) *fake {
	f := newFake(t)
	f.answers["GET /v1/trace"] = tracedStatus(telemetry())
	f.answers["GET /v1/trace/results"] = api.TraceResults{Period: measurements()}
	return f
}

func (f *fake) wasAsked(want ...string) {
	f.t.Helper()
	if !slices.Equal(f.asked, want) {
		f.t.Errorf("requests to the agent: %q, want %q", f.asked, want)
	}
	f.asked = nil
}

func TestTrace(t *testing.T) {
	f := tracing(t)
	f.printsGolden("trace", "trace")
	f.wasAsked("GET /v1/trace", "GET /v1/trace/results")
	got := must[tracecmd.Traced](f.host, "trace", "--since", "5m", "--select", "rule=replies,remote=192.0.2.0/24")
	f.wasAsked("GET /v1/trace", "GET /v1/trace/results select=rule=replies,remote=192.0.2.0/24 since=5m0s")
	if len(got.Results) != 5 || !got.Timestamps || got.Cgroups[0].Rules[1].Messages != "100/s" || got.Results[0].Stages[config.StageQdisc].Count != 12374 {
		t.Errorf("%+v", got)
	}

	// With one stage selected, a group without that stage is left out.
	f.printsGolden("trace-stage", "trace", "--stage", "reader", "--stage", "network")
	f.asked = nil

	// With one cgroup selected.
	other := telemetry()
	other.Cgroup, other.Path, other.Created, other.Attached = "/lab", "/lab", true, false
	other.Problem, other.Hint = "attach: "+clitest.Hostile, "try\x1b[A"
	other.Rules = other.Rules[1:]
	f.answers["GET /v1/trace"] = tracedStatus(other)
	some := measurements()
	some.Results = some.Results[3:]
	f.answers["GET /v1/trace/results"] = api.TraceResults{Period: some, Partial: true}
	f.printsGolden("trace-cgroup", "trace", "--cgroup", "/lab", "--since=1h30m")
	f.wasAsked("GET /v1/trace cgroup=/lab", "GET /v1/trace/results cgroup=/lab since=1h30m0s")

	// Messages that were already in flight, and inconsistent counts.
	f.answers["GET /v1/trace"] = tracedStatus(telemetry())
	f.answers["GET /v1/trace/results"] = api.TraceResults{Period: measure.Period{From: noon.Add(-time.Minute), To: noon, Results: []measure.Result{
		{Group: replies("192.0.2.0/24"), Chosen: 10, Outcomes: map[measure.Outcome]uint64{measure.Acked: 12}, InFlight: 1},
		{Group: replies("198.51.100.0/24"), Chosen: 10, Outcomes: map[measure.Outcome]uint64{measure.Acked: 7}, InFlight: 1},
		{Group: replies("203.0.113.0/24"), RXChosen: 10, RXOutcomes: map[measure.Outcome]uint64{measure.Read: 10, measure.RXFull: 3}},
	}}}
	r := f.at("trace", "--since", "1m")
	for _, want := range []string{
		"\nthe last 1m0s\n", "\n  10 chosen + 3 in flight before = 12 acked + 1 in flight\n", "\n  10 chosen = 7 acked + 1 in flight + 2 not accounted for\n",
		"\n  10 received + 3 waiting before = 10 read + 3 rx full\n",
	} {
		if !strings.Contains(r.out, want) || r.code != 0 {
			t.Errorf("%q is not in %+v", want, r)
		}
	}
}

// TestTraceNothing checks the output if nothing is traced or measured.
func TestTraceNothing(t *testing.T) {
	f := newFake(t)
	f.answers["GET /v1/trace/results"] = api.TraceResults{Period: measure.Period{Results: []measure.Result{}}}
	f.answers["GET /v1/trace/slow"] = []api.TraceSlow{}
	rules := "there are no trace rules\nhint: add one to the policy, as in trace: [{cgroup: telemetry.slice, group_by: remote/24}], and run sockeye apply\n"
	f.answers["GET /v1/trace"] = tracedStatus([]api.TracedCgroup{}...)
	f.shows(rules, nil, "trace")
	f.shows(rules, nil, "trace", "slow")

	f.answers["GET /v1/trace"] = tracedStatus(api.TracedCgroup{Cgroup: "/lab", Path: "/lab", Attached: true, Rules: []api.TraceRuleStatus{{Name: "lab", Connections: "1/1", Messages: "1/1", Limit: 64, Stages: []string{"stack"}}}})
	lab := "/lab: attached\n  rule lab: 1/1 of the connections, 1/1 of their messages\n\n"
	f.shows(lab+"no message was chosen yet\n", nil, "trace")
	f.shows("no chosen message was completed in this period\n", nil, "trace", "slow")
	f.answers["GET /v1/trace/results"] = api.TraceResults{Period: measure.Period{From: time.Now().Add(-90 * time.Second), To: time.Now(), Results: []measure.Result{}}}
	f.shows(lab+"the last 5m0s: no message was chosen\n", nil, "trace", "--since", "5m")
	f.shows(lab+"the last 5m0s: no such message was chosen\n", nil, "trace", "--since", "5m", "--select", "rule=x")
	if r := f.at("trace", "--stage", "nic"); !strings.HasSuffix(r.out, ": no such message was chosen\n") || r.code != 0 {
		t.Errorf("%+v", r)
	}

	// On a kernel without BPF timestamps, the receive stages are shown if a rule asks for them.
	works := "this kernel can trace rx_stack, reader and datagrams, and the packets of a connection (sockeye trace packets)"
	send := telemetry()
	send.Rules = send.Rules[:1]
	send.Rules[0].Stages = []string{}
	for _, s := range []api.TraceStatus{oldKernel(), oldKernel(send)} {
		f.answers["GET /v1/trace"] = s
		for _, args := range []string{"trace", "trace slow", "trace samples", "trace report DIR/x.html", "trace compare rule=a rule=b", "trace compare --trial x"} {
			f.refused(3, untimedText, works, nil, strings.Fields(strings.ReplaceAll(args, "DIR", f.dir))...)
		}
		if r := f.at("trace", "--watch"); r.code != 3 || r.err != "sockeye: "+untimedText+"\nhint: "+works+"\n" || r.out != "" {
			t.Errorf("%+v", r)
		}
	}
	if _, err := os.Stat(f.dir + "/x.html"); !os.IsNotExist(err) {
		t.Errorf("file of a refused report: %v", err)
	}
	f.answers["GET /v1/trace"] = oldKernel(telemetry())
	f.answers["GET /v1/trace/results"] = api.TraceResults{Period: measure.Period{From: noon, To: noon, Results: measurements().Results[4:]}}
	r := f.at("trace")
	if !strings.HasPrefix(r.out, untimedText+"\ntelemetry.slice (") || !strings.Contains(r.out, "\n  reader      2") || r.code != 0 {
		t.Errorf("%+v", r)
	}
	f.refused(3, untimedText, "sockeye trace shows the available stages", nil, "trace", "slow")
}

func TestTraceWatch(t *testing.T) {
	f := tracing(t)
	ctx, stop := context.WithTimeout(context.Background(), 20*time.Second)
	defer stop()
	screens := 0
	f.answers["GET /v1/trace/results"] = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if screens++; screens == 3 {
			stop()
			return
		}
		writeJSON(t, w, api.TraceResults{Period: measurements()})
	})
	r := f.during(ctx, "trace", "--watch")
	once, err := os.ReadFile("testdata/trace.golden")
	if err != nil {
		t.Fatal(err)
	}
	screen := "\x1b[?7l\x1b[H" + strings.ReplaceAll(string(once), "\n", "\x1b[K\n") + "\x1b[J"
	if want := screen + screen + "\x1b[?7h"; r.out != want || r.code != 0 || r.err != "" {
		t.Errorf("got %d %s\n%q\nwant\n%q", r.code, r.err, r.out, want)
	}

	// An error during the display ends the command and resets the terminal.
	screens = 0
	f.answers["GET /v1/trace/results"] = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if screens++; screens == 2 {
			w.WriteHeader(http.StatusInternalServerError)
			writeJSON(t, w, api.Failure{Error: "no more", Code: 1})
			return
		}
		writeJSON(t, w, api.TraceResults{Period: measurements()})
	})
	if r := f.at("trace", "--watch"); r.out != screen+"\x1b[?7h" || r.code != 1 || r.err != "sockeye: no more\n" {
		t.Errorf("%+v", r)
	}
}

// TestTraceCompletion checks that the shell completes stages, cgroups, keys and rules, and files only for report.
func TestTraceCompletion(t *testing.T) {
	f := tracing(t)
	f.answers["GET /v1/tune"] = tuned()[:1]
	keys := "rule=\nprotocol=tcp\nprotocol=udp\nremote=\nport=\nservice=\ncgroup=\ntune_rule=\narm=treated\narm=control\nother=true\n:6\n"
	for args, want := range map[string]string{
		"trace sl":                           "slow\n:4\n",
		"trace --stage ":                     "send\nstack\nqdisc\nnic\nnetwork\ntotal\nrx_stack\nreader\n:4\n",
		"trace --cgroup ":                    "telemetry.slice\n:4\n",
		"trace samples --cgroup ":            "telemetry.slice\n:4\n",
		"trace --select ":                    keys,
		"trace compare ":                     strings.Replace(keys, ":6", ":2", 1), // or files
		"trace slow --select rule=x,":        "rule=x," + strings.ReplaceAll(strings.TrimSuffix(keys, "\n:6\n"), "\n", "\nrule=x,") + "\n:6\n",
		"trace compare --trial ":             "same-datacentre\nbulk\nrest\n:4\n",
		"trace compare --period-a ":          ":4\n",
		"trace samples --buffer ":            ":4\n",
		"trace packets --pid ":               ":4\n",
		"trace report ":                      ":0\n",
		"trace save ":                        ":0\n",
		"trace compare --svg ":               ":0\n",
		"trace packets --write ":             ":0\n",
		"trace packets --pid 1 --fd 2 --lim": "--limit\n:4\n",
	} {
		r := f.sockeye(append([]string{cobra.ShellCompNoDescRequestCmd}, strings.Split(args, " ")...)...)
		if r.code != 0 || r.out != want {
			t.Errorf("completion of %q: %q, want %q: %+v", args, r.out, want, r)
		}
	}
}

func TestTraceWithoutAgent(t *testing.T) {
	h := newHost(t, "services: {}\n")
	for _, args := range []string{"trace", "trace slow", "trace samples", "trace samples -o jsonl", "trace report DIR/x.html", "trace save DIR/x.json", "trace compare rule=a rule=b",
		"trace compare --period-a -2m..-1m --period-b -1m..", "trace packets --pid 1 --fd 2", "trace packets --pid 1 --fd 2 -w DIR/x.pcapng"} {
		words := strings.Fields(strings.ReplaceAll(args, "DIR", h.dir))
		message, hint := "no agent answers on DIR/run/agent.sock", "start it with sockeye agent, or name its directory with --run-dir; services that were set up are still steered"
		if strings.Contains(args, "jsonl") {
			if r := h.sockeye(words...); r.code != 1 || h.plain(r.err) != "sockeye: "+message+"\nhint: "+hint+"\n" || r.out != "" {
				t.Errorf("%+v", r)
			}
			continue
		}
		h.refused(1, message, hint, nil, words...)
	}
	left, err := os.ReadDir(h.dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range left {
		if strings.Contains(file.Name(), "x.") {
			t.Errorf("%s was left", file.Name())
		}
	}
}

// TestStatusTrace checks that status lists the traced cgroups.
func TestStatusTrace(t *testing.T) {
	f := newFake(t)
	gone := api.TracedCgroup{Cgroup: "gone.service", Problem: "there is no unit gone.service", Hint: "it is traced from the moment it starts"}
	f.answers["GET /v1/status"] = api.Status{Version: "1", PID: 812, Started: noon, Policy: "/p", Trace: []api.TracedCgroup{telemetry(), gone}}
	want := `agent 1, pid 812, up 0s, policy /p

TRACED CGROUP    RULES  ATTACHED
telemetry.slice  2      yes
gone.service     0      no

gone.service: there is no unit gone.service
hint: it is traced from the moment it starts
`
	if r := f.at("status"); r.out != want || r.code != 0 {
		t.Errorf("got\n%s\nwant\n%s", r.out, want)
	}
}

func writeJSON(t testing.TB, w http.ResponseWriter, v any) {
	t.Helper()
	if err := json.NewEncoder(w).Encode(v); err != nil {
		t.Error(err)
	}
}
