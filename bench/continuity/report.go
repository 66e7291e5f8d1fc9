// SPDX-License-Identifier: Apache-2.0

package continuity

import (
	"fmt"
	"slices"

	"sockeye/bench/harness"
	"sockeye/internal/chart"
)

type report struct {
	Options options `json:"options"`
	harness.Run

	runs    []measurement
	memory  []memory
	paced   []pacedRun
	skipped []string // scenarios that were not run, with the reason

	templates *templateCost // nil if not measured
}

// skip notes a scenario that is not run.
func (r *report) skip(name, why string) {
	if text := name + ": " + why; !slices.Contains(r.skipped, text) {
		r.skipped = append(r.skipped, text)
	}
}

// Targets implements harness.Report.
func (r *report) Targets() (all []harness.Target) {
	for _, t := range r.targets() {
		one := harness.Target{Claim: t.Name, Goal: fmt.Sprintf("at most %.0f", t.Limit), Measured: fmt.Sprintf("%.1f", t.Value), Verdict: "met"}
		if !t.Met {
			one.Verdict = "missed"
		}
		all = append(all, one)
	}
	return all
}

// outcome contains the figures of an arm in a scenario. Counts of datagrams and sessions are sums of all rounds. Counts
// of devices, and times, are those of the worst round.
type outcome struct {
	Sent          uint64  `json:"sent"`
	Lost          uint64  `json:"lost"`
	Overflowed    uint64  `json:"overflowed"`
	WithoutRoutes uint64  `json:"without_routes"`
	Closed        int     `json:"sessions_closed"`
	Needless      int     `json:"closed_needlessly"`
	Split         int     `json:"split"`      // devices that were split for longer than splitLimit
	SplitEver     int     `json:"split_ever"` // devices that were split
	SplitMS       float64 `json:"split_ms_max"`
	GapMS         float64 `json:"gap_ms_max"`
	Memory        int     `json:"member_memory_peak_bytes"`
	Undecodable   uint64  `json:"undecodable"`
	FirstDecoded  float64 `json:"first_decoded_s"`
	Refused       int     `json:"syns_refused"`
	InProcess     uint64  `json:"in_process"`
	Rounds        int     `json:"rounds"`
}

const megabyte = 1 << 20

// Print implements harness.Report.
func (r *report) Print(p harness.Printf) {
	o := r.Options
	p("\n%d devices with one BMP session and %d UDP ports each, %.0f datagrams per second of each device; steering: %s; %d rounds, arms in rotating order.\n",
		o.Devices, o.Exporters, o.Rate, o.Steering, o.Rounds)
	p("Linux %s, %d CPUs for devices, members and agent together.\n", r.Kernel, r.CPUs)
	printed := false
	for _, s := range scenarios {
		if s.restarts || r.outcome(s.name, arms[0].name).Rounds == 0 {
			continue
		}
		printed = true
		p("\n%s: %s\n", s.name, s.title)
		p("\tdevices split\tlongest split\tdatagrams lost\twithout routes\tsessions closed\tclosed needlessly\tlongest gap\tmember's memory\n")
		for _, a := range arms {
			o := r.outcome(s.name, a.name)
			p("%s\t%d of %d\t%.1f ms\t%d of %d\t%.1f %%\t%d\t%d\t%.1f ms\t%.1f MB\n", a.title, o.Split, r.Options.Devices, o.SplitMS, o.Lost, o.Sent,
				100*float64(o.WithoutRoutes)/float64(max(1, o.Sent-o.Lost)), o.Closed, o.Needless, o.GapMS, float64(o.Memory)/megabyte)
		}
	}
	if printed {
		p("\nDevices split: datagrams at another member than the session, for longer than %.0f ms; the worst round. Without routes: datagrams at a member that\n", inMS(splitLimit))
		p("had not received the initial dump of the device's session. Longest gap: the longest time of a device without a session. Closed needlessly: the\n")
		p("next session was at the same process. Counts of datagrams and sessions are sums of all rounds, times are those of the worst round.\n")
		p("Without Sockeye only resize and drain change anything: a member starts, or exits.\n")
	}
	r.printRestarts(p)
	if len(r.memory) > 0 {
		p("\nMemory of members: each of %d devices sends %d routes when it connects, %.0f per second; a member processes %.0f per second\n", o.Dump.Devices, o.Dump.Routes, o.Dump.Rate, o.Dump.Process)
		p("\tcold start: queue\tmemory\tseconds\tslot added: queue\tmemory\tseconds\tlost\tlongest split\n")
		for _, m := range r.memory {
			p("%s\t%.1f MB\t%.1f MB\t%.1f\t%.1f MB\t%.1f MB\t%.1f\t%d\t%.1f ms\n", memoryTitle(m.Arm),
				float64(m.Cold.Queue)/megabyte, float64(m.Cold.Memory)/megabyte, m.Cold.Seconds,
				float64(m.Move.Queue)/megabyte, float64(m.Move.Memory)/megabyte, m.Move.Seconds, m.Lost, m.SplitMS)
		}
		p("Peaks of one member: the largest queue of messages that were received and not yet processed, and the largest resident set. Cold start: all\n")
		p("devices try to connect when %d members start. Slot added: the devices of one further slot move.\n", memorySlots)
	}
	r.printPacing(p)
	p("\nTargets of the arm sockeye\n")
	for _, t := range r.targets() {
		verdict := "met"
		if !t.Met {
			verdict = "missed"
		}
		p("%s\t%.1f\tat most %.0f: %s\n", t.Name, t.Value, t.Limit, verdict)
	}
	for _, s := range scenarios {
		for _, a := range s.arms() {
			if o := r.outcome(s.name, a.name); o.Overflowed > 0 {
				p("%s, %s: %d packets were dropped at full queues, which the load of the host causes.\n", s.name, a.title, o.Overflowed)
			}
		}
	}
	for _, text := range r.skipped {
		p("not run: %s\n", text)
	}
	p("\nDuration %s. The longest time in which the devices' process did not run although it was due: %.1f ms; it adds to the times above.\n", r.Took, r.stalled())
}

func memoryTitle(name string) string {
	return memoryArms[slices.IndexFunc(memoryArms, func(a arm) bool { return a.name == name })].title
}

func (r *report) stalled() (longest float64) {
	for _, m := range r.runs {
		longest = max(longest, m.StalledMS)
	}
	return longest
}

// Figures implements harness.Report.
func (r *report) Figures() any {
	figures := map[string]any{
		"split_ms_max": r.targets()[2].Value,
		"aims":         r.targets(),
		"skipped":      append([]string{}, r.skipped...),
		memoryPart:     map[string]any{},
		pacingPart:     r.pacingFigures(),
		"detail":       map[string]any{"run": r, "runs": r.runs, "paced": r.paced},
	}
	for _, s := range scenarios {
		byArm := map[string]any{}
		for _, a := range s.arms() {
			byArm[a.name] = nil
			if o := r.outcome(s.name, a.name); o.Rounds > 0 {
				byArm[a.name] = o
			}
		}
		figures[s.name] = byArm
	}
	figures["template_ns_per_datagram"] = nil
	if r.templates != nil {
		figures["template_ns_per_datagram"], figures[templatesPart] = r.templates.IPFIX.Median, r.templates
	}
	for _, m := range r.memory {
		figures[memoryPart].(map[string]any)[m.Arm] = m
	}
	return figures
}

// target is a goal of the arm sockeye over all scenarios, and of the comparison of memory.
type target struct {
	Name  string  `json:"name"`
	Value float64 `json:"value"`
	Limit float64 `json:"limit"`
	Met   bool    `json:"met"`
}

func (r *report) targets() []target {
	var lost, needless, split, undecodable, refused float64
	for _, s := range scenarios {
		o := r.outcome(s.name, "sockeye")
		if s.restarts {
			undecodable, refused = undecodable+float64(o.Undecodable), refused+float64(o.Refused)
		}
		lost, needless, split = lost+float64(o.Lost), needless+float64(o.Needless), max(split, o.SplitMS)
	}
	for _, m := range r.memory {
		lost, needless, split = lost+float64(m.Lost), needless+float64(m.Needless), max(split, m.SplitMS)
	}
	limit := inMS(splitLimit)
	all := []target{
		{"datagrams lost", lost, 0, lost == 0},
		{"sessions closed needlessly", needless, 0, needless == 0},
		{"longest split of a device, ms", split, limit, split <= limit},
		{"undecodable, member replaced", undecodable, 0, undecodable == 0},
		{"SYNs refused, member replaced", refused, 0, refused == 0},
	}
	if r.templates != nil {
		ns := float64(r.templates.IPFIX.Median)
		all = append(all, target{"template filter, ns", ns, templateLimit, ns <= templateLimit})
	}
	return all
}

// Charts implements harness.Report.
func (r *report) Charts() map[string]chart.Chart {
	charts := map[string]chart.Chart{"": r.chart()}
	if len(r.memory) > 0 {
		charts["-memory"] = r.memoryChart()
	}
	if drawing := r.restartChart(); len(drawing.Panels) > 0 {
		charts["-restart"] = drawing
	}
	return charts
}

// chart draws the devices that changes split.
func (r *report) chart() chart.Chart {
	drawing := chart.Chart{
		Title:  "Devices whose datagrams and session are at two members",
		Legend: []string{fmt.Sprintf("for longer than %.0f ms", inMS(splitLimit)), "for less"},
	}
	for _, s := range scenarios {
		if s.restarts {
			continue
		}
		p := chart.Panel{Title: s.name + ": " + s.title, Most: float64(r.Options.Devices)}
		for _, a := range arms {
			o := r.outcome(s.name, a.name)
			if o.Rounds == 0 {
				continue
			}
			p.Bars = append(p.Bars, chart.Bar{
				Label: a.title, Note: fmt.Sprintf("%d of %d, up to %.0f ms; %d lost", o.Split, r.Options.Devices, o.SplitMS, o.Lost),
				Parts: []float64{float64(o.Split), float64(o.SplitEver - o.Split)},
			})
		}
		if len(p.Bars) > 0 {
			drawing.Panels = append(drawing.Panels, p)
		}
	}
	return drawing
}

// outcome returns the figures of an arm in a scenario; Rounds is 0 if it was not run.
func (r *report) outcome(scenario, arm string) (o outcome) {
	for _, m := range r.runs {
		if m.Scenario != scenario || m.Arm != arm {
			continue
		}
		o.Rounds++
		o.Sent += m.Sent
		o.Lost += m.Lost
		o.Overflowed += m.Overflowed
		o.WithoutRoutes += m.WithoutRoutes
		o.Closed += m.Closed
		o.Needless += m.Needless
		o.Split, o.SplitEver = max(o.Split, m.Split), max(o.SplitEver, m.SplitEver)
		o.SplitMS, o.GapMS = max(o.SplitMS, m.SplitMS), max(o.GapMS, m.GapMS)
		o.Memory = max(o.Memory, m.Memory)
		o.Undecodable += m.Undecodable
		o.FirstDecoded = max(o.FirstDecoded, m.Undecoded)
		o.Refused += m.Retries
		o.InProcess += m.InProcess
	}
	return o
}

// memoryChart draws the queues of members.
func (r *report) memoryChart() chart.Chart {
	drawing := chart.Chart{Title: "Largest queue of a member while devices send their initial dumps, MB"}
	for _, x := range []struct {
		title string
		of    func(memory) peak
	}{{"all members start", func(m memory) peak { return m.Cold }}, {"a slot is added", func(m memory) peak { return m.Move }}} {
		p := chart.Panel{Title: x.title}
		for _, m := range r.memory {
			k := x.of(m)
			p.Bars = append(p.Bars, chart.Bar{
				Label: memoryTitle(m.Arm), Note: fmt.Sprintf("%.1f MB, resident %.1f MB", float64(k.Queue)/megabyte, float64(k.Memory)/megabyte),
				Parts: []float64{float64(k.Queue) / megabyte},
			})
		}
		drawing.Panels = append(drawing.Panels, p)
	}
	return drawing
}
