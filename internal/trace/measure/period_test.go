// SPDX-License-Identifier: Apache-2.0

//go:build !vm

package measure

import (
	"encoding/json"
	"errors"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"sockeye/internal/config"
)

// at returns a time of day by its seconds since midnight.
func at(seconds int) time.Time {
	return time.Date(2026, 1, 2, 3, 0, 0, 0, time.UTC).Add(time.Duration(seconds) * time.Second)
}

func inJSON(t *testing.T, v any) string {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func find1(t *testing.T, p Period, label string) Result {
	t.Helper()
	for _, r := range p.Results {
		if r.Group.Label() == label {
			return r
		}
	}
	t.Fatalf("no group %s in %s", label, inJSON(t, p))
	return Result{}
}

func TestMerge(t *testing.T) {
	near := Group{Rule: "a", Protocol: config.TCP, Remote: netip.MustParsePrefix("9.0.0.0/24")}
	far := Group{Rule: "a", Protocol: config.TCP, Remote: netip.MustParsePrefix("10.0.0.0/24")}
	other := Group{Rule: "a", Other: true}
	periods := []Period{
		{From: at(0), To: at(10), Results: []Result{
			{Group: other, Chosen: 1, Outcomes: map[Outcome]uint64{Acked: 1}},
			{Group: far, Chosen: 10, Outcomes: map[Outcome]uint64{Acked: 6, Coalesced: 1}, InFlight: 3, Bytes: 100, Unqueued: 1, Undriven: 2,
				RXChosen: 7, RXOutcomes: map[Outcome]uint64{Read: 4}, RXWaiting: 3, RXOldest: time.Second, RXUnstamped: 1,
				Stages: map[config.Stage]*Histogram{config.StageStack: counted(100, 3000), Total: counted(5000), config.StageNIC: nil}},
		}},
		{From: at(10), To: at(20), Results: []Result{
			{Group: far, Chosen: 5, Outcomes: map[Outcome]uint64{Acked: 6, Retransmitted: 1}, InFlight: 1, Bytes: 50, Unqueued: 1, Undriven: 1,
				RXChosen: 2, RXOutcomes: map[Outcome]uint64{Read: 3, Dropped: 1}, RXWaiting: 1, RXOldest: time.Millisecond, RXUnstamped: 1,
				Stages: map[config.Stage]*Histogram{config.StageStack: counted(200), config.StageQdisc: counted(9)}},
			{Group: near, Chosen: 2},
		}},
	}
	before := inJSON(t, periods)
	m := Merge(periods)
	if !m.From.Equal(at(0)) || !m.To.Equal(at(20)) {
		t.Errorf("from %v to %v", m.From, m.To)
	}
	var labels []string
	for _, r := range m.Results {
		labels = append(labels, r.Group.Label())
	}
	if want := []string{"a 9.0.0.0/24", "a 10.0.0.0/24", "a other"}; !slices.Equal(labels, want) {
		t.Errorf("groups %q, want %q", labels, want)
	}
	got := inJSON(t, find1(t, m, "a 10.0.0.0/24"))
	want := inJSON(t, Result{Group: far, Chosen: 15, Outcomes: map[Outcome]uint64{Acked: 12, Coalesced: 1, Retransmitted: 1}, InFlight: 1, Bytes: 150, Unqueued: 2, Undriven: 3,
		RXChosen: 9, RXOutcomes: map[Outcome]uint64{Read: 7, Dropped: 1}, RXWaiting: 1, RXOldest: time.Millisecond, RXUnstamped: 2,
		Stages: map[config.Stage]*Histogram{config.StageStack: counted(100, 3000, 200), Total: counted(5000), config.StageQdisc: counted(9)}})
	if got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	m.Results[1].Stages[Total].Observe(1)
	m.Results[1].Outcomes[Acked]++
	if after := inJSON(t, periods); after != before {
		t.Errorf("the periods were changed: %s", after)
	}
	reversed := slices.Clone(periods)
	slices.Reverse(reversed)
	if a, b := inJSON(t, Merge(periods)), inJSON(t, Merge(reversed)); a != b {
		t.Errorf("in another order: %s, want %s", b, a)
	}
	if empty := Merge(nil); inJSON(t, empty.Results) != "[]" {
		t.Errorf("of nothing: %s", inJSON(t, empty))
	}
}

func TestMergeOfOneTime(t *testing.T) {
	g := Group{Rule: "a", Protocol: config.TCP}
	p := func(inFlight, waiting uint64, oldest time.Duration) Period {
		return Period{From: at(0), To: at(10), Results: []Result{{Group: g, InFlight: inFlight, RXWaiting: waiting, RXOldest: oldest}}}
	}
	if r := Merge([]Period{p(2, 3, 4), p(5, 6, 1)}).Results[0]; r.InFlight != 7 || r.RXWaiting != 9 || r.RXOldest != 4 {
		t.Errorf("under way %d, waiting %d, oldest %d", r.InFlight, r.RXWaiting, r.RXOldest)
	}
}

// TestDiff splits a growing count into slices and checks that they add up to the whole.
func TestDiff(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	groups := []Group{{Rule: "a", Protocol: config.TCP}, {Rule: "a", Protocol: config.TCP, Port: 80}, {Rule: "b", Other: true}}
	now := Period{From: at(0), To: at(0)}
	begin := Period{From: at(0), To: at(0)}
	before := begin
	var parts []Period
	for i := range 30 {
		grown := Merge([]Period{now})
		grown.To = at(10 * (i + 1))
		for _, g := range groups[:1+i/10] { // groups come later
			messages := uint64(r.IntN(5))
			add := Result{Group: g, Chosen: messages, Outcomes: map[Outcome]uint64{}, Stages: map[config.Stage]*Histogram{}}
			for range messages {
				add.Outcomes[Outcomes[r.IntN(3)]]++
				h := &Histogram{}
				h.Observe(uint64(r.IntN(1e9)))
				add.Stages[config.StageStack] = h
			}
			grown = Merge([]Period{grown, {From: at(0), To: at(10 * (i + 1)), Results: []Result{add}}})
		}
		text := inJSON(t, grown)
		part := Diff(before, grown)
		if !part.From.Equal(before.To) || !part.To.Equal(grown.To) {
			t.Fatalf("from %v to %v", part.From, part.To)
		}
		parts = append(parts, part)
		if inJSON(t, grown) != text {
			t.Fatal("the period was changed")
		}
		now, before = grown, grown
	}
	sum := Merge(parts)
	for _, want := range now.Results {
		got := find1(t, sum, want.Group.Label())
		if inJSON(t, got.Outcomes) != inJSON(t, want.Outcomes) || got.Chosen != want.Chosen {
			t.Errorf("%s: %s, want %s", want.Group.Label(), inJSON(t, got), inJSON(t, want))
		}
		for stage, h := range want.Stages {
			if g := got.Stages[stage]; g.Buckets != h.Buckets || g.Sum != h.Sum || g.Count != h.Count || g.Max != h.Max {
				t.Errorf("%s: %s is %s, want %s", want.Group.Label(), stage, inJSON(t, g), inJSON(t, h))
			}
		}
	}
}

func TestDiffOfWhatIsSo(t *testing.T) {
	g := Group{Rule: "a", Protocol: config.TCP}
	earlier := Period{To: at(10), Results: []Result{{Group: g, Chosen: 4, InFlight: 3, RXWaiting: 2, RXOldest: 9, Outcomes: map[Outcome]uint64{Acked: 1, Missed: 0},
		Stages: map[config.Stage]*Histogram{config.StageStack: counted(100), config.StageNIC: {}}}}}
	later := Period{To: at(20), Results: []Result{{Group: g, Chosen: 4, InFlight: 1, RXWaiting: 1, RXOldest: 5, Outcomes: map[Outcome]uint64{Acked: 3},
		Stages: map[config.Stage]*Histogram{config.StageStack: counted(100), config.StageQdisc: counted(7), Total: nil}}}}
	got := inJSON(t, Diff(earlier, later).Results)
	want := inJSON(t, []Result{{Group: g, InFlight: 1, RXWaiting: 1, RXOldest: 5, Outcomes: map[Outcome]uint64{Acked: 2}, Stages: map[config.Stage]*Histogram{config.StageQdisc: counted(7)}}})
	if got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

// TestDiffOfANewCount uses counts that restart, as after the programs were replaced.
func TestDiffOfANewCount(t *testing.T) {
	g := Group{Rule: "a", Protocol: config.TCP}
	base := Result{Group: g, Chosen: 4, RXChosen: 4, Bytes: 10, Outcomes: map[Outcome]uint64{Acked: 4}, RXOutcomes: map[Outcome]uint64{Read: 4},
		Stages: map[config.Stage]*Histogram{config.StageStack: counted(100, 100)}}
	for name, change := range map[string]func(*Result){
		"chosen":      func(r *Result) { r.Chosen = 3 },
		"rx_chosen":   func(r *Result) { r.RXChosen = 3 },
		"bytes":       func(r *Result) { r.Bytes = 9 },
		"outcomes":    func(r *Result) { r.Outcomes = map[Outcome]uint64{Missed: 4} },
		"no outcomes": func(r *Result) { r.Outcomes = nil },
		"rx_outcomes": func(r *Result) { r.RXOutcomes = map[Outcome]uint64{Read: 3} },
		"stages":      func(r *Result) { r.Stages = map[config.Stage]*Histogram{config.StageStack: counted(100)} },
		"no stages":   func(r *Result) { r.Stages = map[config.Stage]*Histogram{} },
	} {
		anew := Merge([]Period{{Results: []Result{base}}}).Results[0]
		change(&anew)
		got := Diff(Period{Results: []Result{base}}, Period{Results: []Result{anew}}).Results[0]
		if inJSON(t, got) != inJSON(t, anew) {
			t.Errorf("%s: got %s, want %s", name, inJSON(t, got), inJSON(t, anew))
		}
	}
}

func TestTrim(t *testing.T) {
	var periods []Period
	for i := range 6 {
		periods = append(periods, Period{From: at(10 * i), To: at(10*i + 10)})
	}
	for name, test := range map[string]struct {
		from, to    time.Time
		first, past int
	}{
		"all":          {time.Time{}, time.Time{}, 0, 6},
		"since":        {at(30), time.Time{}, 3, 6},
		"until":        {time.Time{}, at(30), 0, 3},
		"between":      {at(10), at(40), 1, 4},
		"most of one":  {at(12), at(47), 1, 5},
		"less of one":  {at(16), at(44), 2, 4},
		"nothing":      {at(100), at(200), 0, 0},
		"from too far": {at(-100), at(5), 0, 0},
	} {
		var want []Period
		want = append(want, periods[test.first:test.past]...)
		if got := Trim(periods, test.from, test.to); !slices.EqualFunc(got, want, func(a, b Period) bool { return a.From.Equal(b.From) }) {
			t.Errorf("%s: got %v, want %v", name, got, want)
		}
	}
	for cut := range 60 {
		if n := len(Trim(periods, time.Time{}, at(cut))) + len(Trim(periods, at(cut), time.Time{})); n != 6 {
			t.Errorf("cut at %d s: both sides have %d periods of 6", cut, n)
		}
	}
}

func TestFind(t *testing.T) {
	result := func(port uint16, arm string, chosen, v uint64) Result {
		return Result{Group: Group{Rule: "a", Protocol: config.TCP, Port: port, Arm: arm}, Chosen: chosen, InFlight: 1,
			Stages: map[config.Stage]*Histogram{config.StageStack: counted(v)}}
	}
	periods := []Period{
		{To: at(10), Results: []Result{result(80, "treated", 1, 100), result(80, "control", 2, 200), result(443, "treated", 4, 300)}},
		{To: at(20), Results: []Result{result(80, "control", 8, 400)}},
		{To: at(30), Results: []Result{result(443, "treated", 16, 500), result(22, "treated", 32, 600)}},
	}
	before := inJSON(t, periods)
	found, err := Find(periods, "arm=treated")
	if err != nil {
		t.Fatal(err)
	}
	shared := Group{Rule: "a", Protocol: config.TCP, Arm: "treated"}
	want := inJSON(t, []*Result{
		{Group: shared, Chosen: 5, InFlight: 2, Stages: map[config.Stage]*Histogram{config.StageStack: counted(100, 300)}},
		{Group: shared},
		{Group: shared, Chosen: 48, InFlight: 2, Stages: map[config.Stage]*Histogram{config.StageStack: counted(500, 600)}},
	})
	if got := inJSON(t, found); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	if found, err = Find(periods, "port=80,arm=control"); err != nil || found[1].Group.Label() != "a :80 arm=control" || found[1].Chosen != 8 {
		t.Errorf("one group: %s, %v", inJSON(t, found), err)
	}
	if inJSON(t, periods) != before {
		t.Error("the periods were changed")
	}
	_, err = Find(periods, "port=81")
	if err == nil || err.Error() != "selector \"port=81\": no group matches\n  hint: groups: a :22 arm=treated; a :80 arm=control; a :80 arm=treated; a :443 arm=treated" {
		t.Errorf("no such group: %v", err)
	}
	for port := range uint16(4) {
		periods[0].Results = append(periods[0].Results, result(1000+port, "control", 1, 1))
	}
	if _, err = Find(periods, "port=81"); err == nil || !strings.HasSuffix(err.Error(), "; a :1000 arm=control; and 3 more") {
		t.Errorf("of many groups: %v", err)
	}
	if _, err = Find(nil, ""); err == nil || !strings.HasSuffix(err.Error(), "hint: no measurements exist for this time") {
		t.Errorf("no group at all: %v", err)
	}
	var refused *SelectorError
	if _, err = Find(periods, "prt=81"); !errors.As(err, &refused) || refused.Hint != "did you mean port?" {
		t.Errorf("a wrong key: %v", err)
	}
}

// counted counts times.
func counted(times ...uint64) *Histogram {
	h := &Histogram{}
	for _, v := range times {
		h.Observe(v)
	}
	return h
}
