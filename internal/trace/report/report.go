// SPDX-License-Identifier: Apache-2.0

// Package report writes the measurements of trace as one HTML page.
package report

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	_ "embed" // embeds the files of the report
	"encoding/base64"
	"fmt"
	"html/template"
	"io"
	"maps"
	"math"
	"slices"
	"strings"
	"time"
	"unicode"

	"sockeye/internal/chart"
	"sockeye/internal/config"
	"sockeye/internal/histogram"
	"sockeye/internal/trace/measure"
)

// Report is the input of WriteReport.
type Report struct {
	Host    string
	Version string // version of Sockeye
	// Periods are the slices of the reported time, oldest first. An agent records slices of 10 s. Times are shown in
	// the time zone of the first slice. Gauges (in flight, waiting) are the values at the end of a slice.
	Periods []measure.Period
	Slow    []measure.Sample // in any order
	Notes   []string         // notes, one sentence each
}

// Limits of a page. Data beyond a limit is summed up or omitted, with a note on the page.
const (
	reportRows  = 64        // rows of the overview
	reportCards = 16        // groups with plots
	reportPlots = 3_000_000 // size of the plots in bytes above which no further group has plots
	reportSlow  = 40        // number of slowest messages
	reportAlike = 6         // number of slowest messages per group
	reportLabel = 120       // maximum length of an external name in characters
	reportNotes = 50
)

var (
	//go:embed report.html
	reportHTML string
	//go:embed report.css
	reportStyle string
	//go:embed report.js
	reportScript string
)

// WriteReport writes one self-contained HTML page. The plots need no script. The same report results in the same page.
func WriteReport(w io.Writer, r Report) error {
	page, err := template.New("report").Funcs(plotFunctions).Parse(reportHTML)
	if err != nil {
		return fmt.Errorf("parse the report's template: %w", err)
	}
	view := newReportPage(r)
	view.Style, view.Script = template.CSS(reportStyle), template.JS(reportScript)
	view.Policy = ContentPolicy()
	var out bytes.Buffer
	if err := page.Execute(&out, view); err != nil {
		return fmt.Errorf("fill the report's template: %w", err)
	}
	if _, err := out.WriteTo(w); err != nil {
		return fmt.Errorf("write the report: %w", err)
	}
	return nil
}

// ContentPolicy returns the content security policy of a page. A server of the page may send it as a header.
func ContentPolicy() string {
	return fmt.Sprintf("default-src 'none'; style-src '%s'; script-src '%s'; base-uri 'none'; form-action 'none'",
		hashSource(reportStyle), hashSource(reportScript))
}

// hashSource returns the hash of a script or a style for the content security policy.
func hashSource(text string) string {
	sum := sha256.Sum256([]byte(text))
	return "sha256-" + base64.StdEncoding.EncodeToString(sum[:])
}

// reportPage is the input of the template. Strings are ready for display.
type reportPage struct {
	Style          template.CSS
	Script         template.JS
	Policy         string
	Host, Version  string
	From, To, Span string
	Slices         string
	Empty          string // reason why the report is empty
	Notes          []string
	Figures        []reportFigure
	Peaks          []reportPeak
	Ledgers        []ledger
	Rows           []overviewRow
	Sends, Reads   bool // the table has the columns for sent and received messages
	Courses        bool // the table has a column of sparklines
	RowsLeft       string
	Cards          []groupCard
	CardsLeft      string
	Slow           []slowMessage
	SlowLeft       string
	Readers        []readerRow
	Stages         []stageMeaning
}

type reportFigure struct{ Name, Value, Note string }

type reportPeak struct{ ID, Label, Text string }

type stageMeaning struct {
	Stage         config.Stage
	Name, Meaning string
}

// ledger compares the chosen messages with their outcomes.
type ledger struct {
	Title string
	In    []entry
	Out   []endings
	Sum   string
	None  string // names of the outcomes without messages
	Off   bool   // the counts differ
}

// endings contains the outcomes of one kind and their sum. Name is empty for messages without an outcome.
type endings struct {
	Name, Count, Share string
	Entries            []entry
}

type entry struct {
	Name, Meaning string
	Count, Share  string
	Kind          string // stamped, lost, open or off
	Width         string // width of the bar, in percent
}

// overviewRow is a group of the overview.
type overviewRow struct {
	ID        string // ID of the group's card; "": none
	Label     string
	Messages  string
	Share     string
	Whole     string // stage of the figures unless it is total
	P50       figure
	P99       figure
	Max       figure
	Course    *spark
	Typical   []part
	Slow      []part
	Received  string
	ReaderP99 figure
	// Sort keys: Many, Read and Sum.
	Many, Read, Sum uint64
}

// figure is a formatted time, with its value for sorting. Few is a warning that the quantile is based on too few
// values.
type figure struct {
	Text string
	Sort int64
	Few  string
}

// groupCard shows a group with all its stages.
type groupCard struct {
	ID, Label string
	Facts     []string
	Notes     []string
	Stages    []stageRow
	Bars      []*bars
	CDF       *distribution
	Heats     []*heat
	Whole     config.Stage // stage shown first
	Peak      string
	Ends      []entry // outcomes of the messages
}

type stageRow struct {
	Stage                    config.Stage
	Name, Meaning            string
	Count                    string
	P50, P90, P99, P999, Max figure
	Inside                   bool // the stage is a part of the network stage
}

type slowMessage struct {
	Rank                 int
	Total, When          string
	Label, Local, Remote string
	Role, Length         string
	Ended                string // outcome, unless acknowledged
	Cause, Text          string
	Details              []string
	X                    []tick
	Parts                []part
}

type readerRow struct {
	ID, Label       string
	Waiting, Oldest string
	Behind          bool
	// Sort keys.
	WaitingSort, OldestSort, DroppedSort int64
	Course                               *spark
	Stack, Reader                        figure
	ReaderP50                            figure
	Dropped                              string
}

const timeLayout = "2006-01-02 15:04:05"

// series contains the slices of one group over time, or of a sum of groups.
type series struct {
	measure.Sum
	label   string
	several bool
	slices  []slice
}

// slice is one period of a series.
type slice struct {
	period *measure.Period
	result *measure.Result
}

var stageMeanings = map[config.Stage]string{
	config.StageSend:    "in sendmsg(2)",
	config.StageStack:   "from sendmsg(2) to the queueing discipline: windows, pacing, buffer",
	config.StageQdisc:   "in the queueing discipline, until the driver receives the packet",
	config.StageNIC:     "from the driver to the hardware timestamp; part of network",
	config.StageNetwork: "from the driver to the acknowledgement by the peer",
	measure.Total:       "all stages, until the acknowledgement by the peer",
	config.StageRXStack: "receive path: from arrival at the host to arrival at the socket",
	config.StageReader:  "receive path: in the socket, until the application reads the data",
}

func newReportPage(r Report) *reportPage {
	page := &reportPage{Host: plainText(r.Host), Version: plainText(r.Version)}
	for _, note := range r.Notes[:min(len(r.Notes), reportNotes)] {
		page.Notes = append(page.Notes, plainText(note))
	}
	if left := len(r.Notes) - len(page.Notes); left > 0 {
		page.Notes = append(page.Notes, fmt.Sprintf("%d more notes are omitted.", left))
	}
	axis := newTimeAxis(r.Periods)
	location := time.UTC
	if len(r.Periods) > 0 {
		location = r.Periods[0].From.Location()
		axis.from, axis.to = axis.from.In(location), axis.to.In(location)
		page.From, page.To = axis.from.Format(timeLayout), axis.to.Format(timeLayout+" MST")
		if axis.from.Format(time.DateOnly) == axis.to.Format(time.DateOnly) {
			page.To = axis.to.Format("15:04:05 MST")
		}
		page.Span = spanText(axis.to.Sub(axis.from))
		if measured := measured(r.Periods); axis.to.Sub(axis.from)-measured > axis.slice {
			page.Span += ", " + spanText(measured) + " of it measured"
		}
		page.Slices = countOf(len(r.Periods), "time slice", "time slices")
	} else if len(r.Slow) > 0 {
		location = r.Slow[0].Ended.Location()
	}
	all := newSeries(r.Periods)
	page.fillSlow(r.Slow, location)
	var chosen uint64
	for _, s := range all {
		chosen += s.messages()
	}
	switch {
	case chosen > 0:
	case len(r.Periods) == 0 && len(r.Slow) == 0:
		page.Empty = "No measurements exist for this time. Check that the policy has a trace rule, and that the agent was running."
	case len(r.Periods) > 0:
		page.Empty = fmt.Sprintf("No message was chosen between %s and %s. Either the traced connections sent and received no data, or no connection matches a trace rule.", page.From, page.To)
	}
	if chosen == 0 {
		return page
	}
	page.fillGroups(all, axis)
	page.fillLedgers(all)
	page.fillReaders(all, axis)
	for _, stage := range measure.Stages {
		if slices.ContainsFunc(all, func(s *series) bool { return s.has(stage) }) {
			page.Stages = append(page.Stages, stageMeaning{stage, stageName(stage), stageMeanings[stage]})
		}
	}
	return page
}

// newSeries returns the series of all groups, sorted by descending number of messages.
func newSeries(periods []measure.Period) []*series {
	ordered := make([]*measure.Period, len(periods))
	for i := range periods {
		ordered[i] = &periods[i]
	}
	slices.SortStableFunc(ordered, func(a, b *measure.Period) int { return a.From.Compare(b.From) })
	byGroup := map[measure.Group]*series{}
	for _, p := range ordered {
		for i := range p.Results {
			result := &p.Results[i]
			s := byGroup[result.Group]
			if s == nil {
				s = &series{Sum: measure.Sum{Result: measure.Result{Group: result.Group}}, label: labelText(result.Group.Label())}
				byGroup[result.Group] = s
			}
			s.append(slice{p, result})
		}
	}
	all := slices.Collect(maps.Values(byGroup))
	slices.SortFunc(all, func(a, b *series) int {
		return cmp.Or(cmp.Compare(b.messages(), a.messages()), cmp.Compare(a.label, b.label),
			cmp.Compare(fmt.Sprint(a.Group), fmt.Sprint(b.Group)))
	})
	return all
}

func (s *series) messages() uint64 { return s.Chosen + s.RXChosen }

func (s *series) has(stage config.Stage) bool { h := s.Stages[stage]; return h != nil && h.Count > 0 }

func (page *reportPage) fillGroups(all []*series, axis timeAxis) {
	var chosen, received uint64
	for _, s := range all {
		chosen += s.Chosen
		received += s.RXChosen
	}
	page.Sends, page.Reads, page.Courses = chosen > 0, received > 0, axis.columns > 1
	page.fillFigures(all)

	shown, size := 0, 0
	for i, s := range all {
		if i == reportCards || size > reportPlots || s.messages() == 0 {
			break
		}
		size += page.addCard(s, axis)
		shown++
	}
	rows := all
	if len(rows) > reportRows {
		rows = rows[:reportRows]
	}
	for i, s := range rows {
		id := ""
		if i < shown {
			id = page.Cards[i].ID
		}
		page.Rows = append(page.Rows, newOverviewRow(s, id, axis, chosen+received))
	}
	if rest := all[len(rows):]; len(rest) > 0 {
		page.Rows = append(page.Rows, newOverviewRow(together(rest), "", axis, chosen+received))
		page.RowsLeft = fmt.Sprintf("The table shows the %d groups with the most messages; the last row is the total of the other %s.", len(rows), countText(uint64(len(rest))))
	}
	if rest := all[shown:]; len(rest) > 0 {
		others := together(rest)
		if others.messages() > 0 {
			page.addCard(others, axis)
		}
		page.CardsLeft = fmt.Sprintf("Plots show the %s with the most messages, and the total of the other %s: %s of %s messages.",
			countOf(shown, "group", "groups"), countText(uint64(len(rest))), countText(others.messages()), countText(chosen+received))
	}
}

// fillFigures sets the figures of the total of all groups.
func (page *reportPage) fillFigures(all []*series) {
	whole := together(all)
	if n := whole.Chosen; n > 0 {
		var stamped uint64
		for _, o := range measure.Stamped {
			stamped += whole.Outcomes[o]
		}
		ended := sumOf(whole.Outcomes)
		lost := "no timestamps lost"
		if ended > stamped {
			lost = countText(ended-stamped) + " without timestamps, see Accounting"
		}
		page.Figures = append(page.Figures,
			reportFigure{"Messages sent", countText(n), "in " + countOf(len(all), "group", "groups")},
			reportFigure{"Stamped", cmp.Or(shareText(stamped, ended), "none"), lost})
	}
	if h := whole.Stages[measure.Total]; h != nil && h.Count > 0 {
		page.Figures = append(page.Figures,
			reportFigure{"Typical", durationText(h.Quantile(0.5)), "p50 of total"},
			reportFigure{"Slow", durationText(h.Quantile(0.99)), "p99; maximum " + durationText(time.Duration(h.Max))})
	}
	if n := whole.RXChosen; n > 0 {
		room := "none dropped"
		if dropped := whole.RXOutcomes[measure.Dropped]; dropped > 0 {
			room = countText(dropped) + " dropped: receive buffer full"
		}
		page.Figures = append(page.Figures, reportFigure{"Received", countText(n), room})
		if h := whole.Stages[config.StageReader]; h != nil && h.Count > 0 {
			page.Figures = append(page.Figures, reportFigure{"Waiting for the reader", durationText(h.Quantile(0.99)), "p99; maximum " + durationText(time.Duration(h.Max))})
		}
	}
}

// Stages of the send path and of the receive path. The time of the NIC is part of the network stage.
var (
	legsOut = []config.Stage{config.StageSend, config.StageStack, config.StageQdisc, config.StageNetwork}
	legsIn  = []config.Stage{config.StageRXStack, config.StageReader}
)

func newOverviewRow(s *series, id string, axis timeAxis, of uint64) overviewRow {
	whole := s.whole()
	h := s.Stages[whole]
	row := overviewRow{
		ID: id, Label: s.label, Many: s.Chosen, Messages: countOrNone(s.Chosen), Share: shareText(s.messages(), of),
		P50: newFigure(h, 0.5), P99: newFigure(h, 0.99), Max: newMaxFigure(h),
		Sum: s.messages(), Read: s.RXChosen, Received: countOrNone(s.RXChosen), ReaderP99: newFigure(s.Stages[config.StageReader], 0.99),
	}
	if whole != measure.Total {
		row.Whole = stageName(whole)
	}
	values := course(s.columns(whole, axis), func(h *measure.Histogram) float64 { return float64(h.Quantile(0.99)) })
	row.Course = newSpark(values, "p99 over time, maximum "+durationText(time.Duration(slices.Max(append(known(values), 0)))))
	legs := legsOut
	if s.Chosen == 0 {
		legs = legsIn
	}
	row.Typical, row.Slow = composition(s.Stages, legs, 0.5), composition(s.Stages, legs, 0.99)
	return row
}

// course returns a figure of each column, and NaN for columns without values.
func course(columns []*measure.Histogram, of func(*measure.Histogram) float64) []float64 {
	values := make([]float64, len(columns))
	for c, h := range columns {
		values[c] = math.NaN()
		if h != nil {
			values[c] = of(h)
		}
	}
	return values
}

func known(values []float64) []float64 {
	return slices.DeleteFunc(slices.Clone(values), math.IsNaN)
}

// composition returns the shares of the stages in the sum of their quantiles, in units of 1/160.
func composition(stages map[config.Stage]*measure.Histogram, legs []config.Stage, q float64) []part {
	const width = 160
	sum := 0.0
	for _, leg := range legs {
		if h := stages[leg]; h != nil {
			sum += float64(h.Quantile(q))
		}
	}
	var parts []part
	at := 0.0
	for _, leg := range legs {
		h := stages[leg]
		if h == nil || sum == 0 {
			continue
		}
		v := h.Quantile(q)
		length := float64(v) / sum * width
		parts = append(parts, part{Stage: leg, At: at, Length: length, Title: stageName(leg) + " " + durationText(v)})
		at += length
	}
	return parts
}

// peak is an interval in which a stage was slower than usual.
type peak struct {
	first, last int // columns
	worst       time.Duration
	typical     time.Duration // median of the 99th percentiles of the columns
	// cause is the stage whose 99th percentile rose most, or "".
	cause           config.Stage
	within, outside time.Duration
}

var outcomeNames = map[measure.Outcome]string{
	measure.Acked: "acknowledged", measure.Retransmitted: "retransmitted", measure.Overwritten: "overwritten", measure.Coalesced: "coalesced", measure.Missed: "missed",
	measure.Unacknowledged: "unacknowledged", measure.Full: "too many in flight", measure.Application: "application's", measure.Refused: "refused",
	measure.Sent: "sent", measure.Discarded: "discarded", measure.Split: "split", measure.Parted: "parted",
	measure.Read: "read", measure.Dropped: "dropped", measure.Unread: "unread", measure.RXFull: "too many waiting",
}

var outcomeMeanings = map[measure.Outcome]string{
	measure.Acked:          "stamped, and acknowledged by the peer",
	measure.Retransmitted:  "stamped, and acknowledged after a retransmission of the last segment",
	measure.Overwritten:    "a later message in the same packet replaced its timestamp request before transmission",
	measure.Coalesced:      "stamped in the packet of a later message, with which its packet was merged",
	measure.Missed:         "acknowledged without timestamps",
	measure.Unacknowledged: "the connection closed before the acknowledgement",
	measure.Full:           "too many messages of the connection were in flight",
	measure.Application:    "the application uses timestamps itself",
	measure.Refused:        "the kernel refused the timestamp request",
	measure.Sent:           "datagram stamped until the driver",
	measure.Discarded:      "datagram dropped by the host before a driver",
	measure.Split:          "datagram split into packets that were not recognized",
	measure.Parted:         "acknowledged; TCP merged and split packets, and the last byte was sent in a packet without the message's key",
	measure.Read:           "read by the application, or queued in the socket if the rule does not trace the reader",
	measure.Dropped:        "receive buffer full",
	measure.Unread:         "the connection closed before the data was read",
	measure.RXFull:         "too many traced messages were waiting in the socket",
}

// addCard adds a card and returns the size of its drawings in bytes.
func (page *reportPage) addCard(s *series, axis timeAxis) int {
	card := groupCard{ID: fmt.Sprintf("g%d", len(page.Cards)+1), Label: s.label, Whole: s.whole()}
	if s.Chosen > 0 {
		card.Facts = append(card.Facts, countText(s.Chosen)+" messages sent", bytesText(s.Bytes)+" acknowledged")
		if n := s.Outcomes[measure.Retransmitted]; n > 0 {
			card.Facts = append(card.Facts, countText(n)+" retransmitted")
		}
	}
	if s.RXChosen > 0 {
		card.Facts = append(card.Facts, countText(s.RXChosen)+" received")
	}
	for _, lack := range []struct {
		n    uint64
		text string
	}{
		{s.Unqueued, "messages were sent before they could be marked: their time in stack and qdisc is unknown."},
		{s.Undriven, "messages have no timestamp of the driver: their time in qdisc, nic and network is unknown."},
		{s.RXUnstamped, "received messages have no timestamp of the host: their time in rx_stack is unknown."},
	} {
		if lack.n > 0 {
			card.Notes = append(card.Notes, countText(lack.n)+" "+lack.text)
		}
	}
	for _, outcome := range slices.Concat(measure.Outcomes, measure.RXOutcomes) {
		if n := s.Outcomes[outcome] + s.RXOutcomes[outcome]; n > 0 {
			card.Ends = append(card.Ends, entry{Name: outcomeNames[outcome], Meaning: outcomeMeanings[outcome], Count: countText(n)})
		}
	}
	columns := map[config.Stage][]*measure.Histogram{}
	for _, stage := range measure.Stages {
		h := s.Stages[stage]
		if !s.has(stage) {
			continue
		}
		columns[stage] = s.columns(stage, axis)
		card.Stages = append(card.Stages, stageRow{
			Stage: stage, Name: stageName(stage), Meaning: stageMeanings[stage], Count: countText(h.Count),
			P50: newFigure(h, 0.5), P90: newFigure(h, 0.9), P99: newFigure(h, 0.99), P999: newFigure(h, 0.999), Max: newMaxFigure(h),
			Inside: stage == config.StageNIC,
		})
	}
	quantiles := []quantile{{"typical (p50)", 0.5}, {"slow (p99)", 0.99}}
	for _, side := range []struct {
		title string
		legs  []config.Stage
		whole config.Stage
	}{{"Sent", legsOut, measure.Total}, {"Received", legsIn, ""}} {
		if chart := newBars(side.title, s.Stages, side.legs, side.whole, quantiles...); chart != nil {
			card.Bars = append(card.Bars, chart)
		}
	}
	peak := findPeak(columns, card.Whole)
	if peak != nil {
		card.Peak = peak.text(axis, card.Whole)
		page.Peaks = append(page.Peaks, reportPeak{card.ID, card.Label, card.Peak})
	}
	card.CDF = newDistribution("Distribution of the stages of "+s.label, s.Stages)
	for _, row := range card.Stages {
		d := newHeat(row.Stage, axis, columns[row.Stage], peak)
		if d == nil {
			continue
		}
		d.Title = fmt.Sprintf("%s over time, of %s: p50 %s, p99 %s, max %s", row.Name, s.label, row.P50.Text, row.P99.Text, row.Max.Text)
		card.Heats = append(card.Heats, d)
	}
	page.Cards = append(page.Cards, card)
	return card.drawingSize()
}

// whole returns the main stage of a series: total if it is known, otherwise the stage with most values.
func (s *series) whole() config.Stage {
	for _, stage := range []config.Stage{measure.Total, config.StageNetwork, config.StageStack, config.StageQdisc, config.StageSend, config.StageReader, config.StageRXStack} {
		if s.has(stage) {
			return stage
		}
	}
	return measure.Total
}

// columns returns the sums of a stage over the columns of a time axis. A column without values is nil.
func (s *series) columns(stage config.Stage, axis timeAxis) []*measure.Histogram {
	columns := make([]*measure.Histogram, axis.columns)
	for _, part := range s.slices {
		h := part.result.Stages[stage]
		if h == nil || h.Count == 0 {
			continue
		}
		c := axis.middle(*part.period)
		if columns[c] == nil {
			columns[c] = &measure.Histogram{}
		}
		columns[c].Add(h)
	}
	return columns
}

func newMaxFigure(h *measure.Histogram) figure {
	if h == nil || h.Count == 0 {
		return figure{Text: "–", Sort: -1}
	}
	return figure{Text: durationText(time.Duration(h.Max)), Sort: int64(h.Max)}
}

// findPeak finds columns whose 99th percentile is at least 3 times the typical one, and their slow adjacent columns. It
// returns the slowest statistically significant peak, or nil.
func findPeak(columns map[config.Stage][]*measure.Histogram, whole config.Stage) *peak {
	const minColumns, minValues, factor = 8, 50, 3
	of := columns[whole]
	p99 := make([]time.Duration, len(of))
	var ordered []int
	for c, h := range of {
		if h != nil && h.Count >= minValues {
			p99[c] = h.Quantile(0.99)
			ordered = append(ordered, c)
		}
	}
	if len(ordered) < minColumns {
		return nil
	}
	slices.SortStableFunc(ordered, func(a, b int) int { return cmp.Compare(p99[b], p99[a]) })
	usual := p99[ordered[(len(ordered)-1)/2]]
	above := usual * factor / 2
	var found *peak
	for _, c := range ordered {
		if p99[c] == 0 || p99[c] < factor*usual {
			return nil
		}
		found = &peak{first: c, last: c, worst: p99[c], typical: usual}
		for found.first > 0 && p99[found.first-1] > above {
			found.first--
		}
		for found.last+1 < len(p99) && p99[found.last+1] > above {
			found.last++
		}
		in, out := found.split(of)
		if moreThanChance(countAbove(in, above), in.Count, countAbove(out, above), out.Count) {
			break
		}
	}
	for _, stage := range measure.Stages {
		if stage == whole || stage == config.StageNIC || slices.Contains(legsIn, stage) != slices.Contains(legsIn, whole) {
			continue
		}
		within, outside := found.split(columns[stage])
		in, out := within.Quantile(0.99), outside.Quantile(0.99)
		if in-out > found.within-found.outside {
			found.cause, found.within, found.outside = stage, in, out
		}
	}
	return found
}

// split returns the sums of the columns inside and outside of the peak.
func (p *peak) split(columns []*measure.Histogram) (within, outside *measure.Histogram) {
	within, outside = &measure.Histogram{}, &measure.Histogram{}
	for c, h := range columns {
		switch {
		case h == nil:
		case c >= p.first && c <= p.last:
			within.Add(h)
		default:
			outside.Add(h)
		}
	}
	return within, outside
}

func countAbove(h *measure.Histogram, d time.Duration) uint64 {
	var n uint64
	for _, count := range h.Buckets[histogram.Bucket[histogram.Times](uint64(d))+1:] {
		n += count
	}
	return n
}

// moreThanChance returns whether k of n is significantly more than other of others, the counts of the remaining time.
// It uses Chernoff's bound for the Poisson distribution with an error probability below 2e-9, because many columns of
// many groups are tested.
func moreThanChance(k, n, other, others uint64) bool {
	expected := float64(n) * float64(other+1) / float64(others+1)
	seen := float64(k)
	return seen > expected && seen*math.Log(seen/expected)-(seen-expected) > 20
}

func (p *peak) text(axis timeAxis, whole config.Stage) string {
	layout := "15:04:05"
	text := fmt.Sprintf("From %s to %s, p99 of %s rose to %s; its typical value is %s.", axis.start(p.first).Format(layout),
		axis.start(p.last+1).Format(layout), stageName(whole), durationText(p.worst), durationText(p.typical))
	if p.cause != "" {
		text += fmt.Sprintf(" The stage %s rose most: p99 %s, outside this time %s.", stageName(p.cause), durationText(p.within), durationText(p.outside))
	}
	return text
}

// balance contains the accounting of one series: the messages in flight before its first slice and after its last
// slice, and the messages that the slices do not account for.
type balance struct {
	start, end     uint64
	missing, extra uint64 // chosen messages without an outcome; outcomes of messages that were not counted as chosen
}

func (page *reportPage) fillLedgers(all []*series) {
	whole := together(all)
	sides := []struct {
		title    string
		chosen   uint64
		outcomes map[measure.Outcome]uint64
		order    []measure.Outcome
		stamped  []measure.Outcome
		open     string
		of       func(*measure.Result) (chosen, ended, open uint64)
	}{
		{"Messages sent", whole.Chosen, whole.Outcomes, measure.Outcomes, measure.Stamped, "in flight",
			func(r *measure.Result) (uint64, uint64, uint64) { return r.Chosen, sumOf(r.Outcomes), r.InFlight }},
		{"Received", whole.RXChosen, whole.RXOutcomes, measure.RXOutcomes, []measure.Outcome{measure.Read}, "waiting",
			func(r *measure.Result) (uint64, uint64, uint64) { return r.RXChosen, sumOf(r.RXOutcomes), r.RXWaiting }},
	}
	for _, side := range sides {
		if side.chosen == 0 {
			continue
		}
		var b balance
		for _, s := range all {
			one := s.balance(side.of)
			b.start += one.start
			b.end += one.end
			b.missing += one.missing
			b.extra += one.extra
		}
		count := side.chosen + b.start + b.extra
		l := ledger{Title: side.title, Sum: countText(count), Off: b.missing+b.extra > 0}
		add := func(to *[]entry, name, meaning, kind string, n uint64) {
			*to = append(*to, entry{Name: name, Meaning: meaning, Kind: kind, Count: countText(n), Share: shareText(n, count), Width: chart.Coordinate(100 * float64(n) / float64(count))})
		}
		add(&l.In, "chosen", "in this time", "chosen", side.chosen)
		if b.start > 0 {
			add(&l.In, side.open+" before", "chosen before this time", "open", b.start)
		}
		if b.extra > 0 {
			add(&l.In, "not accounted for", "ended, but not counted as chosen in any slice", "off", b.extra)
		}
		var none []string
		var stamped, lost endings
		var sums [2]uint64
		for _, outcome := range side.order {
			n := side.outcomes[outcome]
			switch {
			case n == 0:
				none = append(none, outcomeNames[outcome])
			case slices.Contains(side.stamped, outcome):
				add(&stamped.Entries, outcomeNames[outcome], outcomeMeanings[outcome], "stamped", n)
				sums[0] += n
			default:
				add(&lost.Entries, outcomeNames[outcome], outcomeMeanings[outcome], "lost", n)
				sums[1] += n
			}
		}
		stamped.Name, stamped.Count, stamped.Share = "stamped", countText(sums[0]), shareText(sums[0], count)
		lost.Name, lost.Count, lost.Share = "lost", countText(sums[1]), shareText(sums[1], count)
		var open endings
		add(&open.Entries, side.open, "at the end of this time", "open", b.end)
		if b.missing > 0 {
			add(&open.Entries, "not accounted for", "chosen, but without an outcome in any slice", "off", b.missing)
		}
		l.Out = []endings{stamped, lost, open}
		l.None = strings.Join(none, ", ")
		page.Ledgers = append(page.Ledgers, l)
	}
}

// together returns the sum of several series.
func together(all []*series) *series {
	joined := &series{several: true, label: countOf(len(all), "further group", "further groups") + ", total"}
	for _, s := range all {
		for _, part := range s.slices {
			joined.append(part)
		}
	}
	return joined
}

func (s *series) append(part slice) {
	s.slices = append(s.slices, part)
	s.Add(part.result, part.period.To)
}

// balance checks each slice: in flight before + chosen = ended + in flight after. A group that is missing in a slice
// has not changed.
func (s *series) balance(of func(*measure.Result) (chosen, ended, open uint64)) balance {
	var b balance
	for i, part := range s.slices {
		chosen, ended, open := of(part.result)
		before, after := b.end+chosen, ended+open
		switch {
		case i == 0 && after > before:
			b.start = after - before
		case after > before:
			b.extra += after - before
		default:
			b.missing += before - after
		}
		b.end = open
	}
	return b
}

func sumOf(outcomes map[measure.Outcome]uint64) uint64 {
	var all uint64
	for _, n := range outcomes {
		all += n
	}
	return all
}

func (page *reportPage) fillReaders(all []*series, axis timeAxis) {
	for i, s := range all {
		if s.RXChosen == 0 || len(page.Readers) == reportRows {
			continue
		}
		row := readerRow{Label: s.label, Stack: newFigure(s.Stages[config.StageRXStack], 0.99),
			ReaderP50: newFigure(s.Stages[config.StageReader], 0.5), Reader: newFigure(s.Stages[config.StageReader], 0.99), Dropped: countText(s.RXOutcomes[measure.Dropped])}
		if i < len(page.Rows) && page.Rows[i].Label == s.label {
			row.ID = page.Rows[i].ID
		}
		last := s.slices[len(s.slices)-1].result
		row.Waiting, row.Oldest, row.Behind = countText(last.RXWaiting), durationText(last.RXOldest), last.RXWaiting > 0
		row.WaitingSort, row.OldestSort, row.DroppedSort = int64(last.RXWaiting), int64(last.RXOldest), int64(s.RXOutcomes[measure.Dropped])
		oldest := slices.Repeat([]float64{math.NaN()}, axis.columns)
		var most time.Duration
		for _, part := range s.slices {
			c := axis.middle(*part.period)
			if v := float64(part.result.RXOldest); math.IsNaN(oldest[c]) || v > oldest[c] {
				oldest[c] = v
			}
			most = max(most, part.result.RXOldest)
		}
		row.Course = newSpark(oldest, "oldest waiting message over time, maximum "+durationText(most))
		page.Readers = append(page.Readers, row)
	}
}

func newFigure(h *measure.Histogram, q float64) figure {
	if h == nil || h.Count == 0 {
		return figure{Text: "–", Sort: -1}
	}
	v := h.Quantile(q)
	f := figure{Text: durationText(v), Sort: int64(v)}
	if need := 1 / (1 - q); q < 1 && float64(h.Count) < need-0.5 {
		f.Few = fmt.Sprintf("based on %s only", countOf(int(h.Count), "value", "values"))
	}
	return f
}

func (page *reportPage) fillSlow(samples []measure.Sample, location *time.Location) {
	ordered := make([]*measure.Sample, len(samples))
	for i := range samples {
		ordered[i] = &samples[i]
	}
	slices.SortStableFunc(ordered, func(a, b *measure.Sample) int {
		return cmp.Or(cmp.Compare(b.Stages[measure.Total], a.Stages[measure.Total]), a.Ended.Compare(b.Ended), cmp.Compare(a.Cookie, b.Cookie), cmp.Compare(a.Key, b.Key))
	})
	alike := map[measure.Group]int{}
	for _, s := range ordered {
		if len(page.Slow) == reportSlow {
			break
		}
		if alike[s.Group]++; alike[s.Group] > reportAlike {
			continue
		}
		page.Slow = append(page.Slow, newSlowMessage(s, len(page.Slow)+1, location))
	}
	if len(page.Slow) < len(samples) {
		page.SlowLeft = fmt.Sprintf("%d of %s recorded messages, at most %d per group.", len(page.Slow), countText(uint64(len(samples))), reportAlike)
	}
}

func newSlowMessage(s *measure.Sample, rank int, location *time.Location) slowMessage {
	explanation := measure.Explain(s)
	m := slowMessage{
		Rank: rank, Total: durationText(s.Stages[measure.Total]), When: s.Ended.In(location).Format("15:04:05.000"),
		Label: labelText(s.Group.Label()), Local: s.Local.String(), Remote: s.Remote.String(), Role: plainText(string(s.Role)),
		Length: bytesText(uint64(s.Length)), Cause: plainText(string(explanation.Cause)), Text: sentence(explanation.Text),
	}
	if s.Outcome != measure.Acked && string(s.Outcome) != string(explanation.Cause) {
		m.Ended = cmp.Or(outcomeNames[s.Outcome], plainText(string(s.Outcome)))
	}
	stages := s.State()[0] // the bar shows them
	for _, detail := range explanation.Details {
		if detail != stages {
			m.Details = append(m.Details, sentence(detail))
		}
	}
	m.Parts, m.X = wayOf(s)
	return m
}

// wayWidth is the length of a message's bar.
const wayWidth = 640

// wayOf returns the stages of a message as a bar with its own axis. The time of the NIC is part of the network stage
// and is drawn inside it.
func wayOf(s *measure.Sample) ([]part, []tick) {
	legs := s.Legs()
	var sum time.Duration
	for _, l := range legs {
		sum += l.Took
	}
	whole := max(s.Stages[measure.Total], sum)
	if whole <= 0 {
		return nil, nil
	}
	scale := float64(wayWidth) / float64(whole)
	var parts []part
	at := 0.0
	for _, l := range legs {
		p := part{Stage: l.Stage, At: at, Length: float64(l.Took) * scale, Title: l.Name + ": " + durationText(l.Took)}
		if l.Stage == measure.Total {
			p.Stage = ""
			if s.Outcome == measure.Unacknowledged {
				p.Title = "not acknowledged: " + durationText(l.Took)
			}
		}
		parts = append(parts, p)
		if nic, ok := s.Stages[config.StageNIC]; ok && l.Stage == config.StageNetwork {
			parts = append(parts, part{Stage: config.StageNIC, At: at, Length: float64(min(max(nic, 0), l.Took)) * scale, Inside: true,
				Title: "nic, part of network: " + durationText(nic)})
		}
		at += p.Length
	}
	return parts, evenTicks(whole, wayWidth, 8)
}

// sentence converts a text for terminals to a sentence. A number and its unit remain on one line.
func sentence(text string) string {
	text = strings.ReplaceAll(plainText(text), " µs", "\u00a0µs")
	if text != "" {
		text = strings.ToUpper(text[:1]) + text[1:] + "."
	}
	return text
}

// labelText returns the plain text of a label. It omits the middle of long labels.
func labelText(s string) string {
	runes := []rune(plainText(s))
	if len(runes) > reportLabel {
		half := reportLabel / 2
		runes = slices.Concat(runes[:half], []rune("…"), runes[len(runes)-half+1:])
	}
	return string(runes)
}

// plainText removes control characters and characters that change the writing direction from external text.
func plainText(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return unicode.ReplacementChar
	}, strings.ToValidUTF8(s, string(unicode.ReplacementChar)))
}

// labelWord is a word of a group's label: key=value, or a value without a key.
type labelWord struct{ Key, Value string }

func labelWords(label string) []labelWord {
	var words []labelWord
	for text := range strings.SplitSeq(label, " ") {
		if key, value, ok := strings.Cut(text, "="); ok {
			words = append(words, labelWord{key + "=", value})
		} else {
			words = append(words, labelWord{"", text})
		}
	}
	return words
}

func countOrNone(n uint64) string {
	if n == 0 {
		return "–"
	}
	return countText(n)
}

func countOf(n int, one, several string) string {
	if n == 1 {
		return "1 " + one
	}
	return countText(uint64(n)) + " " + several
}

// measured returns the sum of the lengths of the periods.
func measured(periods []measure.Period) time.Duration {
	var sum time.Duration
	for _, p := range periods {
		sum += p.To.Sub(p.From)
	}
	return sum
}

// spanText formats a duration with at most two units.
func spanText(d time.Duration) string {
	if d < time.Second {
		return durationText(d)
	}
	var parts []string
	for _, u := range []struct {
		unit time.Duration
		name string
	}{{24 * time.Hour, "d"}, {time.Hour, "h"}, {time.Minute, "min"}, {time.Second, "s"}} {
		if n := d / u.unit; n > 0 && len(parts) < 2 {
			parts = append(parts, fmt.Sprintf("%d\u00a0%s", n, u.name))
		}
		d %= u.unit
	}
	return strings.Join(parts, " ")
}

// stageName returns the name of a stage.
func stageName(s config.Stage) string { return string(s) }
