// SPDX-License-Identifier: Apache-2.0

//go:build !vm

package report

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"sockeye/internal/chart"
	"sockeye/internal/config"
	"sockeye/internal/trace/measure"
)

// A world creates the slices of an hour like an agent.
type world struct {
	random *rand.Rand
	from   time.Time
	slice  time.Duration
	open   map[measure.Group]uint64
}

func newWorld() *world {
	return &world{rand.New(rand.NewPCG(1, 2)), time.Date(2026, 11, 21, 14, 0, 0, 0, time.UTC), 10 * time.Second, map[measure.Group]uint64{}}
}

// around returns a random time from a distribution with a long tail.
func (w *world) around(middle time.Duration, spread float64) time.Duration {
	return time.Duration(float64(middle) * math.Exp(spread*w.random.NormFloat64()))
}

// sent returns the result of n messages. message returns the times of the stages of one message.
func (w *world) sent(g measure.Group, n int, message func() map[config.Stage]time.Duration) measure.Result {
	r := measure.Result{Group: g, Chosen: uint64(n), Outcomes: map[measure.Outcome]uint64{}, Stages: map[config.Stage]*measure.Histogram{}}
	before := w.open[g]
	r.InFlight = w.random.Uint64N(6)
	w.open[g] = r.InFlight
	for range before + r.Chosen - min(r.InFlight, before+r.Chosen) {
		switch dice := w.random.IntN(1000); {
		case dice < 12:
			r.Outcomes[measure.Coalesced]++
		case dice < 16:
			r.Outcomes[measure.Overwritten]++
			continue
		case dice < 17:
			r.Outcomes[measure.Missed]++
			continue
		case dice < 25:
			r.Outcomes[measure.Retransmitted]++
		default:
			r.Outcomes[measure.Acked]++
		}
		r.Bytes += 1 + w.random.Uint64N(16000)
		var total time.Duration
		for stage, d := range message() {
			observe(&r, stage, d)
			if stage != config.StageNIC {
				total += d
			}
		}
		observe(&r, measure.Total, total)
	}
	r.InFlight = before + r.Chosen - sumOf(r.Outcomes)
	w.open[g] = r.InFlight
	return r
}

func (w *world) received(g measure.Group, n int, waiting uint64, oldest time.Duration, message func() map[config.Stage]time.Duration) measure.Result {
	before := w.open[g]
	r := measure.Result{Group: g, RXChosen: uint64(n), RXOutcomes: map[measure.Outcome]uint64{}, RXWaiting: min(waiting, before+uint64(n)), RXOldest: oldest, Stages: map[config.Stage]*measure.Histogram{}}
	w.open[g] = r.RXWaiting
	for range before + r.RXChosen - r.RXWaiting {
		if oldest > time.Second && w.random.IntN(6) == 0 {
			r.RXOutcomes[measure.Dropped]++
			continue
		}
		r.RXOutcomes[measure.Read]++
		for stage, d := range message() {
			observe(&r, stage, d)
		}
	}
	return r
}

func observe(r *measure.Result, stage config.Stage, d time.Duration) {
	if r.Stages[stage] == nil {
		r.Stages[stage] = &measure.Histogram{}
	}
	r.Stages[stage].Observe(uint64(d))
}

func bmpGroup(remote, arm string) measure.Group {
	return measure.Group{Rule: "replies", Protocol: config.TCP, Remote: netip.MustParsePrefix(remote), Port: 1790, Service: "telemetry", TuneRule: "far", Arm: arm}
}

// hour returns an hour of a collector: a remote group with two paths, of which one is congested on the host for 4
// minutes; the other arm; a near group; datagrams whose reader stops for some time; a group with few messages. The
// agent did not run for two minutes.
func hour() Report {
	const slices = 360
	w := newWorld()
	far, control := bmpGroup("198.51.100.0/24", "treated"), bmpGroup("198.51.100.0/24", "control")
	near := bmpGroup("192.0.2.0/24", "")
	near.TuneRule = ""
	few := bmpGroup("2001:db8:7::/48", "")
	flows := measure.Group{Rule: "flows", Protocol: config.UDP, Port: 4739, Service: "telemetry", Cgroup: "telemetry.slice/nfacctd@2.service"}
	r := Report{Host: "collector-3.example.net", Version: "1.4.0"}
	for i := range slices {
		if i >= 270 && i < 282 {
			continue
		}
		from := w.from.Add(time.Duration(i) * w.slice)
		p := measure.Period{From: from, To: from.Add(w.slice)}
		incident := i >= 150 && i < 174
		tide := 1 + 0.4*math.Sin(float64(i)/40)
		way := func(scale float64, congested bool) func() map[config.Stage]time.Duration {
			return func() map[config.Stage]time.Duration {
				m := map[config.Stage]time.Duration{
					config.StageSend:    w.around(4*time.Microsecond, 0.4),
					config.StageStack:   w.around(18*time.Microsecond, 0.7),
					config.StageQdisc:   w.around(3*time.Microsecond, 0.6),
					config.StageNIC:     w.around(9*time.Microsecond, 0.25),
					config.StageNetwork: w.around(time.Duration(scale*tide*float64(11*time.Millisecond)), 0.09),
				}
				if w.random.IntN(3) == 0 {
					m[config.StageNetwork] = w.around(time.Duration(scale*float64(46*time.Millisecond)), 0.06)
				}
				if w.random.IntN(25) == 0 {
					m[config.StageStack] = w.around(time.Duration(scale*float64(20*time.Millisecond)), 0.5)
				}
				if congested && w.random.IntN(4) > 0 {
					m[config.StageQdisc] = w.around(170*time.Millisecond, 0.35)
				}
				return m
			}
		}
		p.Results = append(p.Results,
			w.sent(far, 260+w.random.IntN(80), way(1, incident)),
			w.sent(control, 240+w.random.IntN(80), way(1.25, false)),
			w.sent(near, 160+w.random.IntN(50), func() map[config.Stage]time.Duration {
				return map[config.Stage]time.Duration{
					config.StageStack:   w.around(9*time.Microsecond, 0.5),
					config.StageQdisc:   w.around(2*time.Microsecond, 0.5),
					config.StageNetwork: w.around(210*time.Microsecond, 0.45),
				}
			}))
		if i%40 == 7 {
			p.Results = append(p.Results, w.sent(few, 3, way(3, false)))
		}
		behind := time.Duration(0)
		waiting := w.random.Uint64N(12)
		if i >= 320 {
			behind, waiting = time.Duration(i-319)*100*time.Millisecond, uint64(i-319)*14
		}
		p.Results = append(p.Results, w.received(flows, 220+w.random.IntN(60), waiting, behind+w.around(90*time.Microsecond, 0.3), func() map[config.Stage]time.Duration {
			return map[config.Stage]time.Duration{
				config.StageRXStack: w.around(14*time.Microsecond, 0.5),
				config.StageReader:  time.Duration(w.random.Float64()*float64(behind)) + w.around(70*time.Microsecond, 0.8),
			}
		}))
		r.Periods = append(r.Periods, p)
	}
	r.Notes = []string{"The stage send is not measured in flows: this kernel does not allow fentry programs."}
	r.Slow = slowSamples(w, far, near, few)
	return r
}

func slowSamples(w *world, far, near, few measure.Group) []measure.Sample {
	base := func(g measure.Group, minute float64, remote string, stages map[config.Stage]time.Duration) measure.Sample {
		s := measure.Sample{
			Ended: w.from.Add(time.Duration(minute * float64(time.Minute))), Group: g, Cookie: 0x5103, Local: netip.MustParseAddrPort("203.0.113.10:1790"),
			Remote: netip.MustParseAddrPort(remote), Role: config.RoleAccept, Outcome: measure.Acked, Key: 88210, Length: 4096, Stages: stages,
			Cwnd: 42, InFlight: 6, Outstanding: 8688, Unsent: 4096, Window: 262144, MSS: 1448, SRTT: 12600 * time.Microsecond, MinRTT: 10900 * time.Microsecond,
		}
		for _, leg := range legsOut {
			stages[measure.Total] += stages[leg]
		}
		return s
	}
	times := func(send, stack, qdisc, nic, network time.Duration) map[config.Stage]time.Duration {
		return map[config.Stage]time.Duration{config.StageSend: send, config.StageStack: stack, config.StageQdisc: qdisc, config.StageNIC: nic, config.StageNetwork: network}
	}
	us, ms := time.Microsecond, time.Millisecond
	queued := base(far, 27.31, "198.51.100.17:41822", times(5*us, 40*us, 431*ms, 9*us, 13*ms))
	window := base(far, 12.04, "198.51.100.40:40110", times(5*us, 188*ms, 4*us, 10*us, 12*ms))
	window.Cwnd, window.InFlight, window.Outstanding, window.Unsent = 10, 10, 14480, 196608
	receiver := base(far, 44.6, "198.51.100.9:51514", times(6*us, 92*ms, 3*us, 9*us, 14*ms))
	receiver.Window, receiver.Outstanding, receiver.Unsent, receiver.WindowLimited = 16384, 15928, 65536, 88*ms
	lost := base(few, 33.9, "[2001:db8:7::53]:50122", times(4*us, 22*us, 3*us, 8*us, 742*ms))
	lost.Outcome, lost.Repeats, lost.Retransmits, lost.SRTT, lost.MinRTT = measure.Retransmitted, 2, 3, 139*ms, 131*ms
	ended := base(near, 51.2, "192.0.2.77:33900", map[config.Stage]time.Duration{config.StageStack: 12 * us, config.StageQdisc: 2 * us})
	ended.Outcome = measure.Unacknowledged
	ended.Stages[measure.Total] = 3200 * ms
	paced := base(near, 58.8, "192.0.2.14:42214", map[config.Stage]time.Duration{config.StageStack: 31 * ms, config.StageQdisc: 2 * us, config.StageNetwork: 230 * us})
	paced.PacingRate, paced.Unsent, paced.SRTT, paced.MinRTT = 2_000_000, 65536, 240*us, 180*us
	return []measure.Sample{queued, window, receiver, lost, ended, paced}
}

func render(t *testing.T, r Report) string {
	t.Helper()
	var b bytes.Buffer
	if err := WriteReport(&b, r); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// pageText returns the visible text of a page, without the labels of drawings.
func pageText(t *testing.T, page string) string {
	t.Helper()
	elements := parsePage(t, page)
	var b strings.Builder
	for _, e := range elements {
		b.WriteString(e.text + "\n")
	}
	return strings.Join(strings.Fields(b.String()), " ")
}

// element is a start tag and the text that follows it.
type element struct {
	name  string
	attrs map[string]string
	text  string
}

var inlined = regexp.MustCompile(`(?s)(<(style|script)>).*?(</(?:style|script)>)`)

// parsePage parses a page strictly: every element must be closed in place and every attribute quoted.
func parsePage(t *testing.T, page string) []element {
	t.Helper()
	body, ok := strings.CutPrefix(page, "<!doctype html>")
	if !ok {
		t.Fatalf("the page does not begin with a doctype: %.60q", page)
	}
	d := xml.NewDecoder(strings.NewReader(inlined.ReplaceAllString(body, "$1$3")))
	var elements []element
	for {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatalf("the page is not well-formed: %v", err)
		}
		switch token := token.(type) {
		case xml.StartElement:
			e := element{name: token.Name.Local, attrs: map[string]string{}}
			for _, a := range token.Attr {
				if _, twice := e.attrs[a.Name.Local]; twice {
					t.Errorf("<%s> has %s twice", e.name, a.Name.Local)
				}
				e.attrs[a.Name.Local] = a.Value
			}
			elements = append(elements, e)
		case xml.CharData:
			if len(elements) > 0 {
				elements[len(elements)-1].text += string(token)
			}
		}
	}
	return elements
}

// contained checks that a page loads no other file, and that its internal references exist.
func contained(t *testing.T, page string) []element {
	t.Helper()
	elements := parsePage(t, page)
	ids := map[string]bool{}
	for _, e := range elements {
		if id, ok := e.attrs["id"]; ok {
			if ids[id] {
				t.Errorf("several elements have the id %q", id)
			}
			ids[id] = true
		}
	}
	for _, e := range elements {
		if slices.Contains([]string{"link", "img", "image", "iframe", "object", "embed", "base", "use", "form", "audio", "video", "source"}, e.name) {
			t.Errorf("the page contains a <%s>", e.name)
		}
		for name, value := range e.attrs {
			switch {
			case name == "href":
				if !strings.HasPrefix(value, "#") || !ids[value[1:]] {
					t.Errorf("<%s> refers to %q, which does not exist in the page", e.name, value)
				}
			case name == "for" || name == "aria-labelledby":
				if !ids[value] {
					t.Errorf("<%s %s=%q> refers to no element of the page", e.name, name, value)
				}
			case name == "src" || name == "srcset" || name == "action" || name == "style" || strings.HasPrefix(name, "on"):
				t.Errorf("<%s> has %s=%q", e.name, name, value)
			case strings.Contains(value, "url("):
				t.Errorf("<%s %s> contains a reference: %q", e.name, name, value)
			case value == "ZgotmplZ" || strings.Contains(value, "NaN") || strings.Contains(value, "Inf"):
				t.Errorf("<%s %s=%q> is not a value", e.name, name, value)
			}
		}
	}
	for _, part := range inlined.FindAllString(page, -1) {
		for _, external := range []string{"http:", "https:", "url(", "@import", "fetch(", "XMLHttpRequest", "import("} {
			if strings.Contains(part, external) {
				t.Errorf("a style or script contains %q", external)
			}
		}
	}
	return elements
}

func count(elements []element, name string) (n int) {
	for _, e := range elements {
		if e.name == name {
			n++
		}
	}
	return n
}

// find returns the first element with an attribute of the given value.
func find(t *testing.T, elements []element, attr, value string) element {
	t.Helper()
	for _, e := range elements {
		if e.attrs[attr] == value {
			return e
		}
	}
	t.Fatalf("no element with %s=%q", attr, value)
	return element{}
}

func TestReportNeedsNothingElse(t *testing.T) {
	elements := contained(t, render(t, hour()))
	if count(elements, "script") != 1 || count(elements, "style") != 1 {
		t.Error("want one script and one style in the page")
	}
	for _, id := range []string{"overview", "accounting", "groups", "readers", "slow", "reading"} {
		find(t, elements, "id", id)
	}
	if n := count(elements, "article"); n != 5 {
		t.Errorf("%d groups have plots, want 5", n)
	}
}

// TestReportPolicy checks that the content security policy permits the page's own script and style, which browsers
// would block otherwise.
func TestReportPolicy(t *testing.T) {
	page := render(t, hour())
	policy := find(t, parsePage(t, page), "http-equiv", "Content-Security-Policy").attrs["content"]
	for _, name := range []string{"script", "style"} {
		_, after, _ := strings.Cut(page, "<"+name+">")
		text, _, ok := strings.Cut(after, "</"+name+">")
		sum := sha256.Sum256([]byte(text))
		if want := name + "-src 'sha256-" + base64.StdEncoding.EncodeToString(sum[:]) + "'"; !ok || !strings.Contains(policy, want) {
			t.Errorf("the policy %q does not contain %s", policy, want)
		}
	}
	if !strings.HasPrefix(policy, "default-src 'none';") {
		t.Errorf("the policy %q does not begin with default-src 'none'", policy)
	}
}

func TestReportIsDetermined(t *testing.T) {
	first, second := hour(), hour()
	random := rand.New(rand.NewPCG(3, 4))
	for _, p := range second.Periods {
		random.Shuffle(len(p.Results), func(i, j int) { p.Results[i], p.Results[j] = p.Results[j], p.Results[i] })
	}
	random.Shuffle(len(second.Slow), func(i, j int) { second.Slow[i], second.Slow[j] = second.Slow[j], second.Slow[i] })
	page := render(t, first)
	if render(t, first) != page {
		t.Error("two pages of the same report differ")
	}
	if render(t, second) != page {
		t.Error("the order of results and samples changes the page")
	}
}

func TestReportEscapes(t *testing.T) {
	const script, image = `</script><script>alert(1)</script>`, `"><img src=x onerror=alert(1)>`
	hostile := measure.Group{Rule: script, Protocol: config.TCP, Service: image, Cgroup: "a' onclick='x' \u202e\x00\x1b[31m\xff", TuneRule: "{{.Host}}<!--", Arm: "</style>&amp;"}
	h := &measure.Histogram{}
	for i := range uint64(2000) {
		h.Observe(1000 + i*i)
	}
	w := newWorld()
	r := Report{Host: script, Version: image, Notes: []string{script, image, "javascript:alert(1)\x1b\u202e"}}
	for i := range 12 {
		from := w.from.Add(time.Duration(i) * w.slice)
		r.Periods = append(r.Periods, measure.Period{From: from, To: from.Add(w.slice), Results: []measure.Result{{
			Group: hostile, Chosen: 2000, Outcomes: map[measure.Outcome]uint64{measure.Acked: 2000}, RXChosen: 3, RXOutcomes: map[measure.Outcome]uint64{measure.Read: 3},
			Stages: map[config.Stage]*measure.Histogram{measure.Total: h, config.StageNetwork: h, config.StageReader: h}}}})
	}
	r.Slow = []measure.Sample{{Ended: w.from, Group: hostile, Role: config.Role(image), Outcome: measure.Outcome(script), Stages: map[config.Stage]time.Duration{measure.Total: 5}}}
	page := render(t, r)
	if n := count(contained(t, page), "script"); n != 1 {
		t.Errorf("%d scripts in the page, want 1", n)
	}
	for _, c := range page {
		if c == '\u202e' || c < ' ' && c != '\n' && c != '\t' {
			t.Errorf("the page contains the character %U", c)
		}
	}
	text := pageText(t, page)
	for _, shown := range []string{script, image, "javascript:alert(1)"} {
		if !strings.Contains(text, shown) {
			t.Errorf("the page does not show %q literally", shown)
		}
	}
}

func TestReportWithoutData(t *testing.T) {
	at := newWorld().from
	quiet := measure.Period{From: at, To: at.Add(10 * time.Second), Results: []measure.Result{{Group: bmpGroup("192.0.2.0/24", "")}}}
	for _, test := range []struct {
		name   string
		report Report
		want   string
	}{
		{"nothing", Report{Host: "a"}, "No measurements exist for this time"},
		{"no group", Report{Host: "a", Periods: []measure.Period{{From: at, To: at.Add(time.Minute)}}}, "No message was chosen between 2026-11-21 14:00:00 and 14:01:00 UTC"},
		{"silence", Report{Host: "a", Periods: []measure.Period{quiet, quiet}}, "No message was chosen"},
	} {
		t.Run(test.name, func(t *testing.T) {
			page := render(t, test.report)
			elements := contained(t, page)
			if text := pageText(t, page); !strings.Contains(text, test.want) {
				t.Errorf("the page does not contain %q: %s", test.want, text)
			}
			if count(elements, "table") > 0 || count(elements, "svg") > 0 {
				t.Error("the page contains tables or plots without data")
			}
		})
	}
	only := Report{Slow: slowSamples(newWorld(), bmpGroup("198.51.100.0/24", ""), bmpGroup("192.0.2.0/24", ""), bmpGroup("2001:db8::/48", ""))}
	if text := pageText(t, render(t, only)); strings.Contains(text, "No measurements") || !strings.Contains(text, "Slowest messages") {
		t.Errorf("slow messages without slices are not shown: %s", text)
	}
}

// tables returns the cells of the tables in a part of a page.
func tables(t *testing.T, part string) [][][]string {
	t.Helper()
	var all [][][]string
	for _, table := range regexp.MustCompile(`(?s)<table.*?</table>`).FindAllString(part, -1) {
		var rows [][]string
		for _, row := range regexp.MustCompile(`(?s)<tr.*?</tr>`).FindAllString(table, -1) {
			var cells []string
			for _, cell := range regexp.MustCompile(`(?s)<t[dh][ >].*?</t[dh]>`).FindAllString(row, -1) {
				var text strings.Builder
				for _, e := range parsePage(t, "<!doctype html>"+cell) {
					if e.name != "title" {
						text.WriteString(e.text + " ")
					}
				}
				cells = append(cells, oneLine(text.String()))
			}
			rows = append(rows, cells)
		}
		all = append(all, rows)
	}
	return all
}

func oneLine(text string) string { return strings.Join(strings.Fields(text), " ") }

func section(t *testing.T, page, id string) string {
	t.Helper()
	_, after, ok := strings.Cut(page, `<section id="`+id+`">`)
	part, _, closed := strings.Cut(after, "</section>")
	if !ok || !closed {
		t.Fatalf("section %s does not exist", id)
	}
	return part
}

func number(t *testing.T, text string) uint64 {
	t.Helper()
	n, err := strconv.ParseUint(strings.ReplaceAll(text, ",", ""), 10, 64)
	if err != nil {
		t.Fatalf("%q is not a number", text)
	}
	return n
}

// ledgerSums adds up the lines of a ledger. It returns the incoming and outgoing sums, the displayed sums, and the
// lines.
func ledgerSums(t *testing.T, rows [][]string) (in, out, sumIn, sumOut uint64, lines map[string]uint64) {
	t.Helper()
	lines = map[string]uint64{}
	into, sum := &in, &sumIn
	for _, row := range rows {
		n := number(t, row[1])
		switch row[0] {
		case "sum":
			*sum = n
			into, sum = &out, &sumOut
		case "stamped", "lost":
			lines[row[0]] = n
		default:
			lines[row[0]] = n
			*into += n
		}
	}
	return in, out, sumIn, sumOut, lines
}

func TestReportAddsUp(t *testing.T) {
	r := hour()
	var chosen, received, stamped, lost uint64
	for _, p := range r.Periods {
		for _, result := range p.Results {
			chosen += result.Chosen
			received += result.RXChosen
			for outcome, n := range result.Outcomes {
				if slices.Contains(measure.Stamped, outcome) {
					stamped += n
				} else {
					lost += n
				}
			}
		}
	}
	page := render(t, r)
	ledgers := tables(t, section(t, page, "accounting"))
	if len(ledgers) != 2 {
		t.Fatalf("%d ledgers", len(ledgers))
	}
	for i, want := range []uint64{chosen, received} {
		in, out, sumIn, sumOut, lines := ledgerSums(t, ledgers[i])
		if in != want || sumIn != want || out != want || sumOut != want || lines["chosen in this time"] != want {
			t.Errorf("ledger %d: %d chosen; in %d (displayed %d), out %d (displayed %d)", i, want, in, sumIn, out, sumOut)
		}
		if i == 0 && (lines["stamped"] != stamped || lines["lost"] != lost) {
			t.Errorf("%d stamped and %d lost displayed as %d and %d", stamped, lost, lines["stamped"], lines["lost"])
		}
	}
	if text := pageText(t, page); !strings.Contains(text, "both sums match") || strings.Contains(text, "not accounted for") {
		t.Error("the page does not report that both sums match")
	}
}

// TestReportInFlight checks a report that starts with messages in flight, and reports with missing slices.
func TestReportInFlight(t *testing.T) {
	at := newWorld().from
	g := bmpGroup("192.0.2.0/24", "")
	slice := func(i int, chosen, acked, lost, open uint64) measure.Period {
		from := at.Add(time.Duration(i) * 10 * time.Second)
		return measure.Period{From: from, To: from.Add(10 * time.Second), Results: []measure.Result{{Group: g, Chosen: chosen, InFlight: open,
			Outcomes: map[measure.Outcome]uint64{measure.Acked: acked, measure.Overwritten: lost}}}}
	}
	for _, test := range []struct {
		name    string
		periods []measure.Period
		want    map[string]uint64
		absent  string
	}{
		{"before", []measure.Period{slice(0, 10, 12, 1, 4), slice(1, 5, 5, 1, 3)},
			map[string]uint64{"chosen in this time": 15, "in flight before chosen before this time": 7, "in flight at the end of this time": 3, "stamped": 17, "lost": 2}, "not accounted for"},
		{"silent slice", []measure.Period{slice(0, 10, 7, 0, 3), {From: at.Add(10 * time.Second), To: at.Add(20 * time.Second)}, slice(2, 1, 4, 0, 0)},
			map[string]uint64{"chosen in this time": 11, "in flight at the end of this time": 0, "stamped": 11}, "not accounted for"},
		{"gap", []measure.Period{slice(0, 10, 2, 0, 8), slice(9, 10, 9, 0, 1)},
			map[string]uint64{"not accounted for chosen, but without an outcome in any slice": 8, "in flight at the end of this time": 1}, "both sums match"},
		{"other gap", []measure.Period{slice(0, 10, 10, 0, 0), slice(9, 10, 14, 0, 1)},
			map[string]uint64{"not accounted for ended, but not counted as chosen in any slice": 5}, "both sums match"},
	} {
		t.Run(test.name, func(t *testing.T) {
			page := render(t, Report{Periods: test.periods})
			in, out, sumIn, sumOut, lines := ledgerSums(t, tables(t, section(t, page, "accounting"))[0])
			if in != out || sumIn != in || sumOut != out {
				t.Errorf("in %d (displayed %d), out %d (displayed %d)", in, sumIn, out, sumOut)
			}
			for name, n := range test.want {
				if got, ok := lines[name]; got != n || !ok {
					t.Errorf("%s: %d, want %d; lines: %v", name, got, n, lines)
				}
			}
			text := pageText(t, page)
			if strings.Contains(text, test.absent) {
				t.Errorf("the page contains %q", test.absent)
			}
			if complete := test.absent == "not accounted for"; strings.Contains(text, "exactly one outcome") != complete {
				t.Errorf("complete: %t, but the page contains \"exactly one outcome\": %t", complete, !complete)
			}
		})
	}
}

func TestReportStages(t *testing.T) {
	h, few := &measure.Histogram{}, &measure.Histogram{}
	for range 1000 {
		h.Observe(10_000_000)
	}
	few.Observe(700)
	at := newWorld().from
	p := measure.Period{From: at, To: at.Add(time.Minute), Results: []measure.Result{{Group: bmpGroup("192.0.2.0/24", ""), Chosen: 1000, Bytes: 1_500_000, Undriven: 3,
		Outcomes: map[measure.Outcome]uint64{measure.Acked: 1000}, Stages: map[config.Stage]*measure.Histogram{config.StageNetwork: h, config.StageQdisc: few, measure.Total: h}}}}
	page := render(t, Report{Periods: []measure.Period{p}})
	groups := section(t, page, "groups")
	var stages []string
	for _, row := range tables(t, groups)[0][1:] {
		stages = append(stages, row[0])
		if row[0] == "qdisc" {
			if row[1] != "1" || row[6] != "700 ns" {
				t.Errorf("qdisc: %v", row)
			}
			continue
		}
		if row[1] != "1,000" || row[6] != "10.0 ms" {
			t.Errorf("%s: %v", row[0], row)
		}
		for _, cell := range row[2:6] {
			if v, err := strconv.ParseFloat(strings.TrimSuffix(cell, " ms"), 64); err != nil || v < 9.4 || v > 10 {
				t.Errorf("%s: %v, want 1000 messages of 10 ms", row[0], row)
			}
		}
	}
	if want := []string{"qdisc", "network", "total"}; !slices.Equal(stages, want) {
		t.Errorf("stages %v, want %v", stages, want)
	}
	text := pageText(t, page)
	for _, want := range []string{"1.50 MB acknowledged", "3 messages have no timestamp of the driver", "only one time slice"} {
		if !strings.Contains(text, want) {
			t.Errorf("the page does not contain %q", want)
		}
	}
	if !strings.Contains(groups, `title="based on 1 value only"`) {
		t.Error("a percentile based on one value is not marked")
	}
	if strings.Contains(groups, `class="plot map"`) {
		t.Error("the page plots a single slice over time")
	}
}

// points parses a path of M, L, H and V commands with absolute coordinates.
func points(t *testing.T, path string) [][2]float64 {
	t.Helper()
	var at [2]float64
	var all [][2]float64
	for _, step := range regexp.MustCompile(`([MLHV])([-0-9. ]+)`).FindAllStringSubmatch(path, -1) {
		var numbers []float64
		for _, text := range strings.Fields(step[2]) {
			v, err := strconv.ParseFloat(text, 64)
			if err != nil {
				t.Fatalf("path %q: %v", path, err)
			}
			numbers = append(numbers, v)
		}
		switch step[1] {
		case "H":
			at[0] = numbers[0]
		case "V":
			at[1] = numbers[0]
		default:
			at = [2]float64{numbers[0], numbers[1]}
		}
		all = append(all, at)
	}
	return all
}

func TestDistributionPlot(t *testing.T) {
	h := &measure.Histogram{}
	for range 300 {
		h.Observe(1_000_000)
	}
	for range 700 {
		h.Observe(100_000_000)
	}
	d := newDistribution("", map[config.Stage]*measure.Histogram{config.StageNetwork: h})
	axis := logAxis{d.First, d.Last, plotInnerWidth}
	height := func(path string, at time.Duration) float64 {
		x := axis.at(place(uint64(at)))
		corners := points(t, path)
		for i := 1; i < len(corners); i++ {
			a, b := corners[i-1], corners[i]
			if a[0] <= x && x <= b[0] && a[0] < b[0] {
				return 1 - (a[1]+(b[1]-a[1])*(x-a[0])/(b[0]-a[0]))/plotInnerHeight
			}
		}
		t.Fatalf("the curve does not reach %v", at)
		return 0
	}
	for at, want := range map[time.Duration]float64{2 * time.Millisecond: 0.3, 50 * time.Millisecond: 0.3, 101 * time.Millisecond: 1} {
		if got := height(d.Curves[0].Even, at); math.Abs(got-want) > 0.005 {
			t.Errorf("share of messages up to %[2]v: %.3[1]f, want %.3[3]f", got, at, want)
		}
	}
	// A share of 30 % is at -log10(0.7) of three steps.
	if got, want := height(d.Curves[0].Tail, 50*time.Millisecond), -math.Log10(0.7)/3; math.Abs(got-want) > 0.005 {
		t.Errorf("height of the tail: %.3f, want %.3f", got, want)
	}
	corners := points(t, d.Curves[0].Even)
	for i := 1; i < len(corners); i++ {
		if corners[i][0] < corners[i-1][0] || corners[i][1] > corners[i-1][1] {
			t.Fatalf("the curve is not monotonic at %v", corners[i])
		}
	}
	if newDistribution("", map[config.Stage]*measure.Histogram{config.StageNetwork: {}}) != nil {
		t.Error("newDistribution returns a plot without data")
	}
}

// cellsOf parses the strokes of a heat map. It returns the level of each cell, by column and by row from the top.
func cellsOf(t *testing.T, levels []level) map[[2]int]int {
	t.Helper()
	cells := map[[2]int]int{}
	for _, l := range levels {
		var x, y int
		for _, step := range regexp.MustCompile(`([Mm])(-?\d+) (\d+)(?:\.5)?h(\d+)`).FindAllStringSubmatch(l.Path, -1) {
			a, _ := strconv.Atoi(step[2])
			b, _ := strconv.Atoi(step[3])
			length, _ := strconv.Atoi(step[4])
			if step[1] == "M" {
				x, y = a, b
			} else {
				x, y = x+a, y+b
			}
			for range length {
				if cells[[2]int{x, y}] != 0 {
					t.Fatalf("cell %d,%d is drawn twice", x, y)
				}
				cells[[2]int{x, y}] = l.Number
				x++
			}
		}
	}
	return cells
}

func TestHeatMap(t *testing.T) {
	at := newWorld().from
	var periods []measure.Period
	for i := range 6 {
		if i == 3 {
			continue
		}
		from := at.Add(time.Duration(i) * 10 * time.Second)
		periods = append(periods, measure.Period{From: from, To: from.Add(10 * time.Second)})
	}
	axis := newTimeAxis(periods)
	if axis.columns != 6 {
		t.Fatalf("%d columns for 6 slices", axis.columns)
	}
	random := rand.New(rand.NewPCG(5, 6))
	columns := make([]*measure.Histogram, axis.columns)
	for _, c := range []int{0, 1, 2, 5} {
		columns[c] = &measure.Histogram{}
		for range 300 * (c + 1) {
			columns[c].Observe(uint64(float64(uint64(1)<<(14+c)) * math.Exp(random.NormFloat64())))
		}
	}
	d := newHeat(measure.Total, axis, columns, nil)
	cells := cellsOf(t, d.Levels)
	var most uint64
	counts := map[[2]int]uint64{}
	for c, h := range columns {
		if h == nil {
			continue
		}
		for i, n := range h.Buckets {
			if n > 0 {
				cell := [2]int{c, d.Rows - 1 - (i-d.First)/d.Each}
				counts[cell] += n
				most = max(most, counts[cell])
			}
		}
	}
	if len(cells) != len(counts) {
		t.Errorf("%d cells are drawn, %d contain messages", len(cells), len(counts))
	}
	for cell, n := range counts {
		want := 1 + int(math.Log(float64(n))/math.Log(float64(most))*(heatLevels-0.001))
		if cells[cell] != want {
			t.Errorf("cell %v with %d of %d messages has level %d, want %d", cell, n, most, cells[cell], want)
		}
	}
	if d.Gaps != "M3 0h1v1h-1z" {
		t.Errorf("the gap is drawn as %q", d.Gaps)
	}
	dataset := strings.Split(d.Cells, ";")
	for c, h := range columns {
		if h == nil {
			if dataset[c] != "" {
				t.Errorf("empty column %d has data %q", c, dataset[c])
			}
			continue
		}
		parts := strings.Split(dataset[c], ":")
		var sum uint64
		for _, n := range strings.Split(parts[0], ",")[1:] {
			if n != "" {
				sum += number(t, n)
			}
		}
		if sum != h.Count || number(t, parts[1]) != uint64(h.Quantile(0.5)) || number(t, parts[3]) != h.Max {
			t.Errorf("column %d has %q: %d of %d messages", c, dataset[c], sum, h.Count)
		}
	}
	y := logAxis{float64(d.First), float64(d.First + d.Rows*d.Each), plotInnerHeight}
	if got, want := points(t, d.Median)[0][1], plotInnerHeight-y.at(place(uint64(columns[0].Quantile(0.5)))); math.Abs(got-want) > 0.1 {
		t.Errorf("the median is at %v, want %v", got, want)
	}
}

func TestTimeAxis(t *testing.T) {
	at := newWorld().from.In(time.FixedZone("IST", 5*3600+1800))
	row := func(n int, length time.Duration) (periods []measure.Period) {
		for i := range n {
			from := at.Add(time.Duration(i) * length)
			periods = append(periods, measure.Period{From: from, To: from.Add(length)})
		}
		return periods
	}
	for _, test := range []struct {
		periods []measure.Period
		columns int
		width   time.Duration // 0: any
	}{
		{row(1, time.Hour), 1, time.Hour},
		{row(6, 10*time.Second), 6, 10 * time.Second},
		{row(360, 10*time.Second), 120, 30 * time.Second},
		{row(361, 10003*time.Millisecond), 120, 3 * 10003 * time.Millisecond},
		{row(8640, 10*time.Second), 96, 15 * time.Minute},
		{append(row(1, time.Second), measure.Period{From: at.AddDate(1, 0, 0), To: at.AddDate(1, 0, 0).Add(time.Second)}), 120, 0},
	} {
		axis := newTimeAxis(test.periods)
		if axis.columns != test.columns || test.width != 0 && axis.width != test.width {
			t.Errorf("%d slices: %d columns of %v", len(test.periods), axis.columns, axis.width)
		}
		last := -1
		for _, p := range test.periods {
			c := axis.middle(p)
			if c < last || !axis.covered[c] {
				t.Fatalf("the slice from %v is in column %d, the previous one in %d, covered %v", p.From, c, last, axis.covered[c])
			}
			last = c
		}
	}
	var texts []string
	ticks := newTimeAxis(row(360, 10*time.Second)).ticks(600)
	for _, tick := range ticks {
		texts = append(texts, tick.Text)
	}
	if want := "19:30 19:40 19:50 20:00 20:10 20:20 20:30"; strings.Join(texts, " ") != want || ticks[1].At != 100 {
		t.Errorf("ticks %v, second tick at %v", texts, ticks[1].At)
	}
}

func TestLogAxisTicks(t *testing.T) {
	for first := 0; first < 511; first += 7 {
		for last := first; last < 512; last += 13 {
			axis := newLogAxis(first, last, plotInnerWidth)
			if axis.first > float64(first) || axis.last < float64(last+1) {
				t.Fatalf("axis for %d to %d: from %v to %v", first, last, axis.first, axis.last)
			}
			end, written := -1.0, -100.0
			for _, tick := range axis.ticks(46) {
				if tick.At <= end {
					t.Fatalf("%d to %d: ticks at %v and %v", first, last, end, tick.At)
				}
				end = tick.At
				if tick.Text == "" {
					continue
				}
				if tick.At-written < 40 {
					t.Fatalf("%d to %d: text %q is %v from the previous text", first, last, tick.Text, tick.At-written)
				}
				written = tick.At
			}
			if written < 0 {
				t.Fatalf("%d to %d: no tick has a label", first, last)
			}
		}
	}
}

func TestReportAnomalies(t *testing.T) {
	_, peaks, _ := strings.Cut(section(t, render(t, hour()), "overview"), `<div class="peaks">`)
	peaks, _, _ = strings.Cut(peaks, "</div>")
	lines := regexp.MustCompile(`(?s)<li>.*?</li>`).FindAllString(peaks, -1)
	wants := []string{
		`treated From 14:25:00 to 14:29:00, p99 of total rose to \d+ ms; its typical value is [67]\d\.\d ms\. The stage qdisc rose most`,
		`nfacctd@2\.service From 14:5[23]:[03]0 to 15:00:00, p99 of reader rose to 3\.\d\d s`,
	}
	if len(lines) != len(wants) {
		t.Fatalf("%d anomalies, want the congestion and the reader: %v", len(lines), lines)
	}
	for i, want := range wants {
		if text := pageText(t, "<!doctype html>"+lines[i]); !regexp.MustCompile(want).MatchString(text) {
			t.Errorf("%q does not match %s", text, want)
		}
	}
}

// TestPeakIsNotChance uses times with a long tail and few messages per column. Some column is always high; the report
// must not show this column as a peak.
func TestPeakIsNotChance(t *testing.T) {
	random := rand.New(rand.NewPCG(9, 10))
	world := func(slow func(column int) bool) map[config.Stage][]*measure.Histogram {
		columns := map[config.Stage][]*measure.Histogram{}
		for c := range 120 {
			total, stack, network := &measure.Histogram{}, &measure.Histogram{}, &measure.Histogram{}
			for range 60 {
				a, b := math.Exp(9+random.NormFloat64()), math.Exp(13+2*random.NormFloat64())
				if slow(c) && random.IntN(3) == 0 {
					a += 1e9
				}
				stack.Observe(uint64(a))
				network.Observe(uint64(b))
				total.Observe(uint64(a + b))
			}
			columns[measure.Total] = append(columns[measure.Total], total)
			columns[config.StageStack] = append(columns[config.StageStack], stack)
			columns[config.StageNetwork] = append(columns[config.StageNetwork], network)
		}
		return columns
	}
	for range 20 {
		if p := findPeak(world(func(int) bool { return false }), measure.Total); p != nil {
			t.Errorf("peak without a change in the distribution: columns %d to %d, %v, typical %v", p.first, p.last, p.worst, p.typical)
		}
		p := findPeak(world(func(c int) bool { return c >= 70 && c <= 73 }), measure.Total)
		if p == nil || p.first > 70 || p.last < 73 || p.first < 65 || p.last > 78 || p.cause != config.StageStack {
			t.Errorf("found peak %+v, want columns 70 to 73", p)
		}
	}
}

func TestReportReaders(t *testing.T) {
	r := hour()
	rows := tables(t, section(t, render(t, r), "readers"))[0]
	results := r.Periods[len(r.Periods)-1].Results
	flows := results[slices.IndexFunc(results, func(result measure.Result) bool { return result.RXChosen > 0 })]
	label, waiting, oldest := flows.Group.Label(), countText(flows.RXWaiting), oneLine(durationText(flows.RXOldest))
	if len(rows) != 2 || strings.ReplaceAll(rows[1][0], "= ", "=") != label || rows[1][1] != waiting || rows[1][2] != oldest {
		t.Errorf("readers %q, want %s with %s waiting, oldest %s", rows[1:], label, waiting, oldest)
	}
	for i := range r.Periods {
		r.Periods[i].Results = slices.DeleteFunc(r.Periods[i].Results, func(result measure.Result) bool { return result.RXChosen > 0 })
	}
	if page := render(t, r); strings.Contains(page, `id="readers"`) || strings.Contains(page, "Received") {
		t.Error("the page shows readers without received messages")
	}
}

func TestReportSlowMessages(t *testing.T) {
	r := hour()
	page := render(t, r)
	slow := section(t, page, "slow")
	at := -1
	for _, want := range []string{"3.20\u00a0s", "742\u00a0ms", "444\u00a0ms", "200\u00a0ms", "106\u00a0ms", "31.2\u00a0ms"} {
		i := strings.Index(slow, "<b>"+want+"</b>")
		if i <= at {
			t.Errorf("%s is missing or not in order", want)
		}
		at = i
	}
	if n := strings.Count(slow, `<svg class="way"`); n != len(r.Slow) {
		t.Errorf("%d of %d messages have a bar", n, len(r.Slow))
	}
	text := pageText(t, page)
	for i := range r.Slow {
		e := measure.Explain(&r.Slow[i])
		if !strings.Contains(text, oneLine(sentence(e.Text))) || !strings.Contains(text, string(e.Cause)) {
			t.Errorf("the page does not explain: %s: %s", e.Cause, e.Text)
		}
	}
	var many []measure.Sample
	for i := range 100 {
		for _, g := range []string{"192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24"} {
			many = append(many, measure.Sample{Ended: newWorld().from, Group: bmpGroup(g, ""), Outcome: measure.Acked, Key: uint32(i), Stages: map[config.Stage]time.Duration{measure.Total: time.Duration(i) * time.Millisecond}})
		}
	}
	page = render(t, Report{Slow: many})
	if n := strings.Count(section(t, page, "slow"), `<div class="head">`); n != 3*reportAlike {
		t.Errorf("%d messages are shown, want %d of each group", n, reportAlike)
	}
	if text := pageText(t, page); !strings.Contains(text, "18 of 300 recorded messages, at most 6 per group") {
		t.Error("the page does not report the omitted messages")
	}
}

func TestSentence(t *testing.T) {
	for text, want := range map[string]string{
		"":                                     "",
		"12.3 µs of 1.5 s in the bus: 3 usual": "12.3\u00a0µs of 1.5 s in the bus: 3 usual.",
		"given up":                             "Given up.",
	} {
		if got := sentence(text); got != want {
			t.Errorf("sentence(%q) = %q, want %q", text, got, want)
		}
	}
}

func TestWayOfMessage(t *testing.T) {
	ms := time.Millisecond
	for _, test := range []struct {
		name   string
		sample measure.Sample
		want   string // stages, and their percentage of the bar
	}{
		{"all", measure.Sample{Outcome: measure.Acked, Stages: map[config.Stage]time.Duration{config.StageSend: 10 * ms, config.StageStack: 20 * ms, config.StageQdisc: 30 * ms, config.StageNIC: 5 * ms, config.StageNetwork: 40 * ms, measure.Total: 100 * ms}},
			"send 10, stack 20, qdisc 30, network 40, nic inside 5"},
		{"no driver", measure.Sample{Outcome: measure.Acked, Stages: map[config.Stage]time.Duration{config.StageStack: 25 * ms, measure.Total: 100 * ms}}, "stack 25, ? 75"},
		{"given up", measure.Sample{Outcome: measure.Unacknowledged, Stages: map[config.Stage]time.Duration{config.StageStack: 1 * ms, config.StageQdisc: 9 * ms, measure.Total: 100 * ms}}, "stack 1, qdisc 9, ? 90"},
		{"dropped here", measure.Sample{Outcome: measure.Acked, Requeued: 60 * ms, Stages: map[config.Stage]time.Duration{config.StageStack: 0, config.StageQdisc: 10 * ms, config.StageNetwork: 30 * ms, measure.Total: 100 * ms}}, "stack 0, qdisc 60, qdisc 10, network 30"},
		{"no total", measure.Sample{Outcome: measure.Acked, Stages: map[config.Stage]time.Duration{config.StageStack: 5 * ms, config.StageQdisc: 5 * ms, config.StageNetwork: 10 * ms}}, "stack 25, qdisc 25, network 50"},
		{"nothing", measure.Sample{Outcome: measure.Acked}, ""},
	} {
		parts, ticks := wayOf(&test.sample)
		var texts []string
		at := 0.0
		for _, p := range parts {
			name := string(p.Stage)
			if name == "" {
				name = "?"
			}
			if p.Inside {
				texts = append(texts, name+" inside "+chart.Coordinate(p.Length/wayWidth*100))
				continue
			}
			if math.Abs(p.At-at) > 1e-6 {
				t.Errorf("%s: %s begins at %v, want %v", test.name, name, p.At, at)
			}
			at = p.At + p.Length
			texts = append(texts, name+" "+chart.Coordinate(p.Length/wayWidth*100))
		}
		if got := strings.Join(texts, ", "); got != test.want {
			t.Errorf("%s: %s, not %s", test.name, got, test.want)
		}
		if len(parts) > 0 && (math.Abs(at-wayWidth) > 1e-6 || len(ticks) < 3 || len(ticks) > 9) {
			t.Errorf("%s: the bar ends at %v and has %d ticks", test.name, at, len(ticks))
		}
	}
}

// TestReportIsBounded creates a report of an hour with 64 groups that have long names and widely spread times in each
// stage, and with 70 more groups for a part of the hour.
func TestReportIsBounded(t *testing.T) {
	random := rand.New(rand.NewPCG(7, 8))
	var pool []*measure.Histogram
	for range 40 {
		h := &measure.Histogram{}
		for range 4000 {
			h.Observe(uint64(math.Exp(random.Float64() * 26)))
		}
		pool = append(pool, h)
	}
	var groups []measure.Group
	for i := range 134 {
		groups = append(groups, measure.Group{Rule: "r", Protocol: config.TCP, Port: uint16(1000 + i), Cgroup: fmt.Sprintf("%s/%d", strings.Repeat("a-long-name/", 300), i)})
	}
	w := newWorld()
	r := Report{Host: "h"}
	var messages uint64
	for i := range 360 {
		from := w.from.Add(time.Duration(i) * w.slice)
		p := measure.Period{From: from, To: from.Add(w.slice)}
		for j, g := range groups {
			if j >= 64 && i > 0 {
				break
			}
			result := measure.Result{Group: g, Chosen: 4000 + uint64(j), Outcomes: map[measure.Outcome]uint64{measure.Acked: 4000 + uint64(j)}, RXChosen: 4000, RXOutcomes: map[measure.Outcome]uint64{measure.Read: 4000}, Stages: map[config.Stage]*measure.Histogram{}}
			for _, stage := range measure.Stages {
				result.Stages[stage] = pool[random.IntN(len(pool))]
			}
			messages += result.Chosen + result.RXChosen
			p.Results = append(p.Results, result)
			if i%6 == 0 {
				r.Slow = append(r.Slow, measure.Sample{Ended: from, Group: g, Stages: map[config.Stage]time.Duration{measure.Total: time.Duration(i)}})
			}
		}
		r.Periods = append(r.Periods, p)
	}
	page := render(t, r)
	if len(page) > 5_000_000 {
		t.Errorf("page size %d bytes", len(page))
	}
	elements := contained(t, page)
	rows := tables(t, section(t, page, "overview"))[0][1:]
	if len(rows) != 65 || !strings.HasPrefix(rows[64][0], "70 further groups, total") {
		t.Fatalf("%d rows, the last %v", len(rows), rows[len(rows)-1])
	}
	var sum uint64
	for _, row := range rows {
		sum += number(t, row[1]) + number(t, row[2])
	}
	if sum != messages {
		t.Errorf("the rows contain %d of %d messages", sum, messages)
	}
	cards := count(elements, "article") - 1
	if cards < 5 || cards > reportCards {
		t.Errorf("%d groups have plots", cards)
	}
	text := pageText(t, page)
	for _, want := range []string{
		"The table shows the 64 groups with the most messages; the last row is the total of the other 70.",
		fmt.Sprintf("Plots show the %d groups with the most messages, and the total of the other %d: ", cards, 134-cards),
		"40 of 3,910 recorded messages",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("the page does not contain %q", want)
		}
	}
	t.Logf("%d bytes, %d groups with plots", len(page), cards)
}

type brokenWriter struct{ err error }

func (w brokenWriter) Write([]byte) (int, error) { return 0, w.err }

func TestReportWriteError(t *testing.T) {
	full := errors.New("no space left")
	if err := WriteReport(brokenWriter{full}, Report{}); !errors.Is(err, full) || !strings.HasPrefix(err.Error(), "write the report: ") {
		t.Errorf("error: %v", err)
	}
}

func TestReportTexts(t *testing.T) {
	for d, want := range map[time.Duration]string{
		0: "0", 1: "1 ns", 999: "999 ns", 1000: "1.00 µs", 12345: "12.3 µs", 999_400: "999 µs", 999_600: "1.00 ms", 9_996_000: "10.0 ms",
		99_960_000: "100 ms", 999_600_000: "1.00 s", 75 * time.Second: "75.0 s", 549 * time.Second: "549 s",
	} {
		if got := strings.ReplaceAll(durationText(d), "\u00a0", " "); got != want {
			t.Errorf("%d ns: %q, want %q", d, got, want)
		}
	}
	for _, test := range []struct {
		n, of uint64
		want  string
	}{{0, 0, ""}, {0, 9, "0 %"}, {9, 9, "100 %"}, {1, 1_000_000, "< 0.01 %"}, {999_999, 1_000_000, "> 99.99 %"}, {1, 200, "0.50 %"}, {1, 3, "33.3 %"}, {997, 1000, "99.70 %"}} {
		if got := strings.ReplaceAll(shareText(test.n, test.of), "\u00a0", " "); got != test.want {
			t.Errorf("%d of %d: %q, want %q", test.n, test.of, got, test.want)
		}
	}
	for n, want := range map[uint64]string{0: "0", 999: "999", 1000: "1,000", 1234567: "1,234,567", 100000: "100,000"} {
		if got := countText(n); got != want {
			t.Errorf("%d: %q, want %q", n, got, want)
		}
	}
	for d, want := range map[time.Duration]string{time.Hour: "1 h", 90 * time.Second: "1 min 30 s", 3 * time.Millisecond: "3.00 ms", 25*time.Hour + 5*time.Second: "1 d 1 h", 10 * time.Second: "10 s"} {
		if got := strings.ReplaceAll(spanText(d), "\u00a0", " "); got != want {
			t.Errorf("%v: %q, want %q", d, got, want)
		}
	}
}
