// SPDX-License-Identifier: Apache-2.0

//go:build !vm

package trace

import (
	"bytes"
	"errors"
	"io"
	"log/slog"
	"math"
	"net"
	"net/http"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"

	"sockeye/internal/bpf"
	"sockeye/internal/bpf/pin"
	"sockeye/internal/domain/domaintest"
	"sockeye/internal/scope"
	"sockeye/internal/testenv"
)

const tracePolicy = `trace:
  - name: bmp
    cgroup: CGROUP/telemetry
    match: {port: 1790}
    messages: 1/10
    stages: [stack, qdisc, network, rx_stack, reader]
  - name: rest
    cgroup: CGROUP/telemetry
    messages: 100/s
    group_by: remote/24
`

// traceRunner runs the domain with cgroups that are not tuned.
func traceRunner(t testing.TB, dir, pins string) *domaintest.Runner {
	t.Helper()
	h := domaintest.Host(t, dir, pins, slog.DiscardHandler)
	return domaintest.New(h, New(h, untuned{}))
}

type untuned struct{}

func (untuned) Pins(string) string { return "" }

func (untuned) RuleNames(string) map[uint32]string { return nil }

func tracingOf(r *domaintest.Runner) *Domain { return r.Domains[0].(*Domain) }

// TestPlanTrace checks the texts of plans that change rules.
func TestPlanTrace(t *testing.T) {
	dir := t.TempDir()
	a := traceRunner(t, dir, testenv.BPFFS(t)+"/sockeye")
	defer a.Stop()
	a.Start(t, domaintest.Policy(tracePolicy))
	defer a.Retire(t)
	name := testenv.CgroupPath() + "/telemetry"
	for _, c := range []struct {
		name    string
		replace []string
		want    []string
	}{
		{"nothing", nil, nil},
		{"sampling", []string{"1/10", "1/20"}, []string{"change trace bmp (counts restart at 0)"}},
		{"match", []string{"1790", "1791"}, []string{"change trace bmp (counts restart at 0)"}},
		{"rename", []string{"name: bmp", "name: bgp"}, []string{"remove trace bmp (its counts are deleted)",
			"add trace bgp: 1/1 of connections, 1/10 of their messages (of port 1790)"}},
		{"elsewhere", []string{"/telemetry\n    messages", "/other\n    messages"}, []string{
			"add cgroup (the cgroup is created, and removed when the policy no longer names it)",
			"add trace rest: 1/1 of connections, 100/s of their messages (of all)",
			"remove trace rest (its counts are deleted)"}},
		{"a unit", []string{"CGROUP/telemetry\n    messages", "sockeye-test-none.service\n    messages"}, []string{
			"add unit (the unit does not run now; it is traced as soon as it starts)",
			"add trace rest: 1/1 of connections, 100/s of their messages (of all)",
			"remove trace rest (its counts are deleted)"}},
	} {
		changes, err := a.Plan(domaintest.Policy(tracePolicy, c.replace...))
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		var got []string
		for _, change := range changes {
			got = append(got, change.Action+" "+change.What+" ("+change.Effect+")")
		}
		slices.Sort(got)
		slices.Sort(c.want)
		if !slices.Equal(got, c.want) {
			t.Errorf("%s:\ngot  %q\nwant %q", c.name, got, c.want)
		}
	}
	if changes, err := a.Plan(domaintest.Policy("tune: []\n")); err != nil || len(changes) != 2 || changes[0].Cgroup != name {
		t.Errorf("the end: %+v, %v", changes, err)
	}
}

// TestStartWithoutTrace checks that the agent starts although this host cannot apply the trace rules, that status
// shows the reason, and that a policy that the host supports clears it.
func TestStartWithoutTrace(t *testing.T) {
	a := traceRunner(t, t.TempDir(), testenv.BPFFS(t)+"/sockeye")
	defer a.Stop()
	depth := func(most string) {
		t.Helper()
		if err := os.WriteFile(testenv.Cgroup()+"/cgroup.max.depth", []byte(most), 0); err != nil {
			t.Fatal(err)
		}
	}
	depth("0")
	defer depth("max")
	a.Start(t, domaintest.Policy(tracePolicy))
	defer a.Retire(t)
	status, err := tracingOf(a).Cgroups("")
	if err != nil || len(status.Cgroups) != 1 || status.Cgroups[0].Attached || !strings.Contains(status.Cgroups[0].Problem, "create cgroup") {
		t.Errorf("%+v, %v", status, err)
	}
	depth("max")
	if _, err := a.Apply(domaintest.Policy(tracePolicy, "1/10", "1/20")); err != nil {
		t.Error(err)
	}
	if status, err = tracingOf(a).Cgroups(""); err != nil || !status.Cgroups[0].Attached || status.Cgroups[0].Problem != "" {
		t.Errorf("then: %+v, %v", status, err)
	}
}

// TestTraceKilledBetween kills the agent between the start of the new tracing and the end of the old one, which
// leaves both; the next agent has the state of the policy.
func TestTraceKilledBetween(t *testing.T) {
	pins := testenv.BPFFS(t) + "/sockeye"
	a := traceRunner(t, t.TempDir(), pins)
	a.Start(t, domaintest.Policy(tracePolicy))
	dir := a.Host.Root.Tracing(scope.PinName(testenv.CgroupPath() + "/telemetry"))
	a.Stop()
	if err := bpf.MoveTrace(dir, dir+asidePins); err != nil {
		t.Fatal(err)
	}
	b := traceRunner(t, t.TempDir(), pins)
	defer b.Stop()
	b.Start(t, domaintest.Policy(tracePolicy))
	defer b.Retire(t)
	if left, err := pin.Pinned(dir + asidePins); left || err != nil {
		t.Errorf("pins of the rules before: %v, %v", left, err)
	}
	if status, err := tracingOf(b).Cgroups(""); err != nil || !status.Cgroups[0].Attached {
		t.Errorf("%+v, %v", status, err)
	}
}

// talk sends messages over a connection of this process, with a reply to each.
func talk(t *testing.T, messages int) {
	t.Helper()
	var lc net.ListenConfig
	lc.SetMultipathTCP(false)
	l, err := lc.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	var d net.Dialer
	d.SetMultipathTCP(false)
	c, err := d.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	s, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for range messages {
		for _, way := range [][2]net.Conn{{c, s}, {s, c}} {
			if _, err := way[0].Write(make([]byte, 100)); err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadFull(way[1], make([]byte, 100)); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// sliceByHand restarts the history and ends no slice by time: a slow host would be too late.
func sliceByHand(d *Domain) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.history.close()
	d.history = &traceHistory{stop: make(chan struct{})}
}

// TestTraceHistory checks that the history has each message once, in the slice in which it was sampled, across
// changes of cgroup, rules and agent.
func TestTraceHistory(t *testing.T) {
	pins := testenv.BPFFS(t) + "/sockeye"
	policy := domaintest.Policy(tracePolicy, "/telemetry\n", "\n", "    match: {port: 1790}\n", "", "1/10", "1/1", "  - name: rest\n    cgroup: CGROUP/telemetry\n    messages: 100/s\n    group_by: remote/24\n", "")
	a := traceRunner(t, t.TempDir(), pins)
	a.Start(t, policy)
	sliceByHand(tracingOf(a))
	a.Host.Watch.Close() // a cgroup that another process makes would let the tracer be renewed
	name := testenv.CgroupPath()
	slice := func(a *domaintest.Runner) {
		t.Helper()
		d := tracingOf(a)
		d.mu.Lock()
		defer d.mu.Unlock()
		if err := d.endSlice(d.history); err != nil {
			t.Error(err)
		}
	}
	check := func(when string, a *domaintest.Runner, want ...uint64) {
		t.Helper()
		h, err := tracingOf(a).History(url.Values{})
		if err != nil {
			t.Fatal(err)
		}
		var got []uint64
		var to time.Time
		for _, p := range h.Slices {
			var chosen uint64
			for _, r := range p.Results {
				chosen += r.Chosen
			}
			got = append(got, chosen)
			if p.To.Before(p.From) || p.From.Before(to) {
				t.Errorf("%s: a slice from %v to %v, after one to %v", when, p.From, p.To, to)
			}
			to = p.To
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s: slices have %d messages, want %d", when, got, want)
		}
	}
	talk(t, 5)
	check("the first slice", a, 10)
	slice(a)
	talk(t, 3)
	slice(a)
	check("two slices", a, 10, 6, 0)

	// The cgroup is removed and created again, with its counts.
	tracer := tracingOf(a).tracers[name]
	talk(t, 2)
	tracer.mu.Lock()
	tracer.closeLocked()
	tracer.mu.Unlock()
	slice(a)
	check("gone", a, 10, 6, 0, 0)
	tracer.renew()
	talk(t, 1)
	check("back", a, 10, 6, 0, 6)
	slice(a)

	// Other rules, another cgroup.
	talk(t, 4)
	other := strings.Replace(policy, "1/1", "1000/s", 1) + "  - {name: beside, cgroup: " + name + "/beside}\n"
	if _, err := a.Apply(other); err != nil {
		t.Fatal(err)
	}
	check("other rules", a, 10, 6, 0, 6, 8, 0)
	talk(t, 1)
	if _, err := a.Apply(policy); err != nil {
		t.Fatal(err)
	}
	talk(t, 1)
	slice(a)
	// A slice ends for each of the two cgroups.
	check("the rules before", a, 10, 6, 0, 6, 8, 2, 0, 2, 0)

	// Another agent.
	talk(t, 1)
	a.Stop()
	talk(t, 7)
	b := traceRunner(t, t.TempDir(), pins)
	defer b.Stop()
	b.Start(t, policy)
	sliceByHand(tracingOf(b))
	defer b.Retire(t)
	talk(t, 2)
	check("another agent", b, 4)
	slice(b)
	talk(t, 1)
	slice(b)
	check("another agent", b, 4, 2, 0)
	results, err := tracingOf(b).Results(url.Values{})
	if err != nil || len(results.Results) != 1 || results.Results[0].Chosen != 2+2+14+4+2 || results.Partial {
		t.Errorf("since the rules are in force: %+v, %v", results, err)
	}
	for since, partial := range map[string]bool{"1h": true, "1us": false} {
		if results, err := tracingOf(b).Results(url.Values{"since": {since}}); err != nil || results.Partial != partial {
			t.Errorf("since %s: partial %v, %v", since, results.Partial, err)
		}
	}
}

// TestTraceMetrics checks names and labels of the metrics, and that the counters continue after a restart of the
// agent.
func TestTraceMetrics(t *testing.T) {
	dir, pins := t.TempDir(), testenv.BPFFS(t)+"/sockeye"
	const address = "127.0.0.1:9734"
	policy := domaintest.Policy(tracePolicy, "/telemetry\n", "\n", "1790", "9734", "1/10", "1/1")
	a := traceRunner(t, dir, pins)
	a.Start(t, policy)
	stop := a.Serve(t, address)
	acked := regexp.MustCompile(`sockeye_trace_messages_total\{.*outcome="acked".*rule="bmp".*\} (\d+)\n`)
	messages := func(text string) (n int) {
		if m := acked.FindStringSubmatch(text); m != nil {
			n, _ = strconv.Atoi(m[1]) // digits
		}
		return n
	}
	text := ""
	// The kernel begins to stamp received packets some time after the programs are attached: net_enable_timestamp
	// switches the static branch in a work item. Until then there are no times of the stage rx_stack.
	stamped := func(text string) bool { return strings.Contains(text, `stage="rx_stack"`) }
	for deadline := time.Now().Add(time.Minute); (messages(text) < 4 || !stamped(text)) && time.Now().Before(deadline); {
		text = domaintest.Scrape(t, address) // connections and messages of its own
	}
	mine := regexp.MustCompile(`(?m)^(# (HELP|TYPE) )?sockeye_trace_.*\n`)
	text = strings.Join(mine.FindAllString(text, -1), "")
	problems, err := promlint.New(strings.NewReader(text)).Lint()
	if err != nil || len(problems) > 0 {
		t.Errorf("promlint: %v %v", problems, err)
	}
	// A busy host may retransmit a message, or coalesce two.
	other := regexp.MustCompile(`(?m)^sockeye_trace_(messages|received)_total\{.*outcome="([^"]*)".*\n`)
	text = other.ReplaceAllStringFunc(text, func(line string) string {
		if outcome := other.FindStringSubmatch(line)[2]; outcome != "acked" && outcome != "read" {
			return ""
		}
		return line
	})
	got := regexp.MustCompile(`(?m)^(sockeye_.*) \S+$`).ReplaceAllString(text, "$1 N")
	got = strings.ReplaceAll(got, testenv.CgroupPath(), "CGROUP")
	const file = "testdata/metrics.golden"
	if os.Getenv("UPDATE") != "" {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("the metrics changed; run with UPDATE=1 if they should, and mend docs/metrics.md.\ngot\n%s\nwant\n%s", got, want)
	}
	checkNative(t, address)

	// Read metrics while policies change.
	for i := range 6 {
		text := policy
		if i%2 == 0 {
			text = strings.Replace(policy, "100/s", "200/s", 1)
		}
		var applying sync.WaitGroup
		applying.Go(func() {
			if _, err := a.Apply(text); err != nil {
				t.Error(err)
			}
		})
		domaintest.Scrape(t, address)
		applying.Wait()
	}

	before := messages(domaintest.Scrape(t, address))
	stop()
	a.Stop()
	b := traceRunner(t, dir, pins)
	defer b.Stop()
	b.Start(t, policy)
	defer b.Serve(t, address)()
	defer b.Retire(t)
	if after := messages(domaintest.Scrape(t, address)); after < before || before == 0 {
		t.Errorf("%d messages after a restart, %d before", after, before)
	}
}

// checkNative decodes the histograms as Prometheus does, each as classic and native histogram.
func checkNative(t *testing.T, address string) {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+address+"/metrics", nil)
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("Accept", string(expfmt.NewFormat(expfmt.TypeProtoDelim)))
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	if err != nil {
		t.Fatal(err)
	}
	histograms := 0
	decoder := expfmt.NewDecoder(bytes.NewReader(body), expfmt.ResponseFormat(answer.Header))
	for {
		var family dto.MetricFamily
		if err := decoder.Decode(&family); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		if family.GetName() != "sockeye_trace_stage_seconds" {
			continue
		}
		for _, m := range family.GetMetric() {
			h := m.GetHistogram()
			histograms++
			if h.GetSchema() != traceSchema || h.GetZeroThreshold() <= 0 || h.GetSampleCount() == 0 || h.GetSampleSum() <= 0 {
				t.Errorf("%v", m)
			}
			classic := h.GetBucket()
			if len(classic) != len(traceBounds) || classic[len(classic)-1].GetCumulativeCount() != h.GetSampleCount() {
				t.Errorf("classic buckets of %v", m)
			}
			// The native histogram, decoded from spans and deltas, has every message, in the range of its classic
			// bucket.
			all, count, at := h.GetZeroCount(), int64(0), 0
			deltas := h.GetPositiveDelta()
			below := func(index int) uint64 {
				bound := math.Exp2(float64(index) / 8)
				for _, b := range classic {
					if b.GetUpperBound() >= bound {
						return b.GetCumulativeCount()
					}
				}
				return h.GetSampleCount()
			}
			for _, span := range h.GetPositiveSpan() {
				at += int(span.GetOffset())
				for range span.GetLength() {
					if len(deltas) == 0 {
						t.Fatalf("more spans than buckets: %v", m)
					}
					count += deltas[0]
					deltas = deltas[1:]
					if count <= 0 {
						t.Errorf("a bucket of %d in %v", count, m)
					}
					all += uint64(count)
					if all > below(at+1) {
						t.Errorf("%d below bucket %d, %d in the classic ones: %v", all, at, below(at+1), m)
					}
					at++
				}
			}
			if all != h.GetSampleCount() || len(deltas) > 0 {
				t.Errorf("native buckets have %d of %d: %v", all, h.GetSampleCount(), m)
			}
		}
	}
	if histograms < 4 {
		t.Errorf("%d histograms", histograms)
	}
}
