// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"strings"
	"testing"
	"time"

	"sockeye/internal/api"
	"sockeye/internal/cli/clitest"
	"sockeye/internal/cli/command"
	"sockeye/internal/cli/tracecmd"
	"sockeye/internal/config"
	"sockeye/internal/trace/measure"
)

// twoArms returns slices of a trial whose treated connections are faster in the stack.
func twoArms(n int) api.TraceHistory {
	return hour(n, func(i int) []measure.Result {
		var results []measure.Result
		for _, arm := range []string{"control", "treated"} {
			stack := time.Millisecond
			if arm == "treated" {
				stack /= 2
			}
			jitter := time.Duration(i%7) * 10 * time.Microsecond
			results = append(results, measure.Result{
				Group: measure.Group{Rule: "replies", Protocol: config.TCP, TuneRule: "bulk", Arm: arm}, Chosen: 1000, Outcomes: map[measure.Outcome]uint64{measure.Acked: 1000},
				Stages: map[config.Stage]*measure.Histogram{
					config.StageStack:   counted(100, stack+jitter, stack+2*jitter, stack, stack-jitter/2, stack, stack, stack, stack, stack, 3*stack),
					config.StageNetwork: counted(100, 10*time.Millisecond+jitter, 10*time.Millisecond, 10*time.Millisecond, 10*time.Millisecond, 10*time.Millisecond, 10*time.Millisecond, 10*time.Millisecond, 10*time.Millisecond, 10*time.Millisecond, 30*time.Millisecond),
				},
			})
		}
		return results
	})
}

func TestTraceCompare(t *testing.T) {
	f := newFake(t)
	f.answers["GET /v1/trace"] = tracedStatus(telemetry())
	f.answers["GET /v1/trace/history"] = twoArms(60)
	check := func(args, history string, lines ...string) {
		t.Helper()
		f.asked = nil
		r := f.at(strings.Fields("trace compare " + args)...)
		if r.code != 0 || r.err != "" {
			t.Errorf("%s: %+v", args, r)
		}
		f.wasAsked("GET /v1/trace", strings.TrimSpace("GET /v1/trace/history "+history))
		out := gaps.ReplaceAllString(r.out, "  ")
		for _, line := range lines {
			if !strings.Contains("\n"+out, "\n"+line) {
				t.Errorf("%s: %q is not in\n%s", args, line, r.out)
			}
		}
		clitest.PrintableOnly(t, r.out)
	}

	// Compare two arms.
	c := must[tracecmd.Compared](f.host, "trace", "compare", "--trial", "bulk")
	if c.A.Select != "tune_rule=bulk,arm=control" || c.B.Select != "tune_rule=bulk,arm=treated" || !c.A.From.Equal(noon.Add(-10*time.Minute)) || !c.B.To.Equal(noon) || c.Comparison.A != (measure.Side{Slices: 60, Messages: 60000}) {
		t.Errorf("%+v", c)
	}
	check("--trial bulk", "", "A: tune_rule=bulk,arm=control, 11:50:00 to 12:00:00: 60000 messages in 60 slices of 10 s\n", "B: tune_rule=bulk,arm=treated, 11:50:00 to 12:00:00: 60000 messages",
		"STAGE  FIGURE  A  B  RATIO  95 % INTERVAL  VERDICT\n", "stack  p50  ", "stack  p99  ", "network  p50  ", "\n"+c.Summary+"\n")
	real := 0
	for _, row := range c.Comparison.Rows {
		if row.Stage == config.StageStack && row.Figure == "p50" {
			check("--trial bulk --since 15m", "since=15m0s", strings.Join([]string{"stack", "p50", command.Duration(row.A), command.Duration(row.B), tracecmd.Times(row.Ratio), tracecmd.RatioInterval(row.Low, row.High), "real"}, "  ")+"\n")
			real++
		}
	}
	if real != 1 {
		t.Errorf("%+v", c.Comparison.Rows)
	}

	// Compare two groups, selected by any of their keys.
	check("rule=replies,arm=treated arm=control --since 5m", "since=5m0s", "A: rule=replies,arm=treated, ", "B: arm=control, ")

	// Compare two times.
	check("--period-a 11:51..11:54 --period-b 11:55.. --select arm=control",
		"from=2026-03-14T11:51:00Z select=arm=control to=2026-03-14T12:00:00Z",
		"A: arm=control, 11:51:00 to 11:54:00: 18000 messages in 18 slices of 10 s\n", "B: arm=control, 11:55:00 to 12:00:00: 30000 messages in 30 slices of 10 s\n")
	check("--period-b -10m..-5m30s --period-a 2026-03-14T12:56:00+01:00..2026-03-14T12:57:30+01:00", "from=2026-03-14T11:50:00Z to=2026-03-14T12:57:30+01:00",
		"A: all groups, 11:56:00 to 11:57:30: 18000 messages", "B: all groups, 11:50:00 to 11:54:30: 54000 messages")

	// A time of day in the future means yesterday.
	f.asked = nil
	if r := f.at("trace", "compare", "--period-a", "23:58:30..23:59", "--period-b", "-10m.."); r.code != 2 || r.err != "sockeye: the agent has no complete slice in --period-a\nhint: the agent keeps one hour of history in slices of 10 s: use a later or a longer period\n" {
		t.Errorf("%+v", r)
	}
	f.wasAsked("GET /v1/trace", "GET /v1/trace/history from=2026-03-13T23:58:30Z to=2026-03-14T12:00:00Z")
}

func TestTraceCompareRefusals(t *testing.T) {
	f := newFake(t)
	f.answers["GET /v1/trace"] = tracedStatus(telemetry())
	groups := `groups: replies service="a\x1b[2J\a\nb\u202ec\u009b31m�" tune_rule=bulk arm=control; replies tune_rule=bulk arm=control; replies tune_rule=bulk arm=treated`
	h := twoArms(12)
	h.Slices[3].Results[0].Group.Service = clitest.Hostile
	f.answers["GET /v1/trace/history"] = h
	for _, c := range []struct{ args, message, hint string }{
		{"rule=replies arm=treated", "both sides match the group replies tune_rule=bulk arm=treated", "use selectors without common groups"},
		{"rule=replies arm=control", "both sides match the group replies tune_rule=bulk arm=control", "use selectors without common groups"},
		{"arm=treated rule=x", `no measured group matches "rule=x"`, groups},
		{"--trial nosuch", "no message of the trial of nosuch was measured: no group matches tune_rule=nosuch,arm=control",
			"add a trace rule with group_by: [rule, arm]; " + groups},
		{"--period-a -60m..-50m --period-b -1m..", "the agent has no complete slice in --period-a", "the agent keeps one hour of history in slices of 10 s: use a later or a longer period"},
		{"--period-a -1m.. --period-b -60m..-50m", "the agent has no complete slice in --period-b", "the agent keeps one hour of history in slices of 10 s: use a later or a longer period"},
	} {
		r := f.at(strings.Fields("trace compare " + c.args)...)
		if r.code != 2 || r.err != "sockeye: "+c.message+"\nhint: "+c.hint+"\n" || r.out != "" {
			t.Errorf("%s: got %d %s%s\nwant %s\nhint: %s", c.args, r.code, r.out, r.err, c.message, c.hint)
		}
	}

	// There are no or too few measurements.
	f.answers["GET /v1/trace/history"] = api.TraceHistory{Slices: []measure.Period{}}
	f.refused(2, `no measured group matches "rule=a"`, "no measurements exist for this time", nil, "trace", "compare", "rule=a", "rule=b")
	little := twoArms(1)
	little.Partial = true
	f.answers["GET /v1/trace/history"] = little
	r := f.at("trace", "compare", "arm=control", "arm=treated")
	if r.code != 0 || !strings.Contains(r.out, "1000 messages in 1 slice of 10 s\nearlier measurements are not available\n") || !strings.HasSuffix(r.out, "the significance is overestimated\n") {
		t.Errorf("%+v", r)
	}
	for i := range little.Slices[0].Results {
		little.Slices[0].Results[i].Stages = nil
	}
	f.answers["GET /v1/trace/history"] = little
	if r := f.at("trace", "compare", "arm=control", "arm=treated"); r.code != 0 || !strings.Contains(r.out, "\n\nnot enough data: ") || strings.Contains(r.out, "STAGE") {
		t.Errorf("%+v", r)
	}
}
