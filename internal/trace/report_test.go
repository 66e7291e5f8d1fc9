// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"bytes"
	"encoding/xml"
	"errors"

	"io"
	"math"
	"math/rand/v2"
	"net/netip"
	"regexp"

	"strings"
	"testing"
	"time"

	"sockeye/internal/config"
)

// A world makes the slices of an hour as an agent would have them.
type world struct {
	random *rand.Rand
	from   time.Time
	slice  time.Duration
	open   map[Group]uint64
}

func newWorld() *world {
	return &world{rand.New(rand.NewPCG(1, 2)), time.Date(2026, 11, 21, 14, 0, 0, 0, time.UTC), 10 * time.Second, map[Group]uint64{}}
}

// around is a time with a long tail.
func (w *world) around(middle time.Duration, spread float64) time.Duration {
	return time.Duration(float64(middle) * math.Exp(spread*w.random.NormFloat64()))
}

// sent is a result of n messages, of which message gives the stages' times.
func (w *world) sent(g Group, n int, message func() map[config.Stage]time.Duration) Result {
	r := Result{Group: g, Chosen: uint64(n), Outcomes: map[Outcome]uint64{}, Stages: map[config.Stage]*Histogram{}}
	before := w.open[g]
	r.InFlight = w.random.Uint64N(6)
	w.open[g] = r.InFlight
	for range before + r.Chosen - min(r.InFlight, before+r.Chosen) {
		switch dice := w.random.IntN(1000); {
		case dice < 12:
			r.Outcomes[Coalesced]++
			continue
		case dice < 16:
			r.Outcomes[Overwritten]++
			continue
		case dice < 17:
			r.Outcomes[Missed]++
			continue
		case dice < 25:
			r.Outcomes[Retransmitted]++
		default:
			r.Outcomes[Acked]++
		}
		r.Bytes += 1 + w.random.Uint64N(16000)
		var total time.Duration
		for stage, d := range message() {
			observe(&r, stage, d)
			if stage != config.StageNIC {
				total += d
			}
		}
		observe(&r, Total, total)
	}
	r.InFlight = before + r.Chosen - sumOf(r.Outcomes)
	w.open[g] = r.InFlight
	return r
}

func (w *world) received(g Group, n int, waiting uint64, oldest time.Duration, message func() map[config.Stage]time.Duration) Result {
	before := w.open[g]
	r := Result{Group: g, RXChosen: uint64(n), RXOutcomes: map[Outcome]uint64{}, RXWaiting: min(waiting, before+uint64(n)), RXOldest: oldest, Stages: map[config.Stage]*Histogram{}}
	w.open[g] = r.RXWaiting
	for range before + r.RXChosen - r.RXWaiting {
		if oldest > time.Second && w.random.IntN(6) == 0 {
			r.RXOutcomes[Dropped]++
			continue
		}
		r.RXOutcomes[Read]++
		for stage, d := range message() {
			observe(&r, stage, d)
		}
	}
	return r
}

func observe(r *Result, stage config.Stage, d time.Duration) {
	if r.Stages[stage] == nil {
		r.Stages[stage] = &Histogram{}
	}
	r.Stages[stage].Observe(uint64(d))
}

func bmpGroup(remote, arm string) Group {
	return Group{Rule: "replies", Protocol: config.TCP, Remote: netip.MustParsePrefix(remote), Port: 1790, Service: "telemetry", TuneRule: "far", Arm: arm}
}

// An hour of a collector: a far group with two ways to it, of which one is
// congested on the host for 4 minutes; the other arm; a near group; datagrams whose
// reader stops for a while; a group with few messages. The agent did not run for
// two minutes.
func hour() Report {
	const slices = 360
	w := newWorld()
	far, control := bmpGroup("198.51.100.0/24", "treated"), bmpGroup("198.51.100.0/24", "control")
	near := bmpGroup("192.0.2.0/24", "")
	near.TuneRule = ""
	few := bmpGroup("2001:db8:7::/48", "")
	flows := Group{Rule: "flows", Protocol: config.UDP, Port: 4739, Service: "telemetry", Cgroup: "telemetry.slice/nfacctd@2.service"}
	r := Report{Host: "collector-3.example.net", Version: "1.4.0"}
	for i := range slices {
		if i >= 270 && i < 282 {
			continue
		}
		from := w.from.Add(time.Duration(i) * w.slice)
		p := Period{From: from, To: from.Add(w.slice)}
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

func slowSamples(w *world, far, near, few Group) []Sample {
	base := func(g Group, minute float64, remote string, stages map[config.Stage]time.Duration) Sample {
		s := Sample{
			Ended: w.from.Add(time.Duration(minute * float64(time.Minute))), Group: g, Cookie: 0x5103, Local: netip.MustParseAddrPort("203.0.113.10:1790"),
			Remote: netip.MustParseAddrPort(remote), Role: config.RoleAccept, Outcome: Acked, Key: 88210, Length: 4096, Stages: stages,
			Cwnd: 42, InFlight: 6, Outstanding: 8688, Unsent: 4096, Window: 262144, MSS: 1448, SRTT: 12600 * time.Microsecond, MinRTT: 10900 * time.Microsecond,
		}
		for _, leg := range legsOut {
			stages[Total] += stages[leg]
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
	lost.Outcome, lost.Repeats, lost.Retransmits, lost.SRTT, lost.MinRTT = Retransmitted, 2, 3, 139*ms, 131*ms
	ended := base(near, 51.2, "192.0.2.77:33900", map[config.Stage]time.Duration{config.StageStack: 12 * us, config.StageQdisc: 2 * us})
	ended.Outcome = Unacknowledged
	ended.Stages[Total] = 3200 * ms
	paced := base(near, 58.8, "192.0.2.14:42214", map[config.Stage]time.Duration{config.StageStack: 31 * ms, config.StageQdisc: 2 * us, config.StageNetwork: 230 * us})
	paced.PacingRate, paced.Unsent, paced.SRTT, paced.MinRTT = 2_000_000, 65536, 240*us, 180*us
	return []Sample{queued, window, receiver, lost, ended, paced}
}

func render(t *testing.T, r Report) string {
	t.Helper()
	var b bytes.Buffer
	if err := WriteReport(&b, r); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// text is what a reader of a page sees, without the words of drawings.
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

// parsePage reads a page strictly: each element is closed where it should be, each
// attribute quoted, nothing is left to a browser's mercy.
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
