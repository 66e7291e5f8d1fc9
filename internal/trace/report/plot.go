// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"
	"html/template"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"sockeye/internal/chart"
	"sockeye/internal/config"
	"sockeye/internal/histogram"
	"sockeye/internal/trace/measure"
)

// Sizes of the plots in units of their viewBox. All plots have the same frame.
const (
	plotWidth, plotHeight = 600, 300
	plotLeft, plotRight   = 66, 12
	plotTop, plotBottom   = 14, 30
	plotInnerWidth        = plotWidth - plotLeft - plotRight
	plotInnerHeight       = plotHeight - plotTop - plotBottom
)

const (
	heatColumns = 120 // maximum
	heatRows    = 44  // maximum, minus one
	heatLevels  = 8   // levels of colour

	// minP99 is the minimum number of values for a 99th percentile.
	minP99 = 20
)

// tick is a mark on an axis. A faint tick has no label.
type tick struct {
	At   float64
	Text string
}

// logAxis is a logarithmic time axis between two places.
type logAxis struct {
	first, last float64
	length      float64
}

func (a logAxis) at(place float64) float64 {
	return (min(max(place, a.first), a.last) - a.first) / (a.last - a.first) * a.length
}

// ticks returns marks at 1, 2 and 5 of each power of ten that do not overlap. Marks with at least room have a label.
func (a logAxis) ticks(room float64) []tick {
	const apart = 5
	var ticks []tick
	for power := uint64(1); power <= 1e11; power *= 10 {
		for _, m := range []uint64{1, 2, 5} {
			if where := place(m * power); where >= a.first && where <= a.last {
				ticks = append(ticks, tick{At: a.at(where), Text: roundText(time.Duration(m * power))})
			}
		}
	}
	distance := func(i int, written []int) float64 {
		least := math.Inf(1)
		for _, w := range written {
			least = min(least, math.Abs(ticks[i].At-ticks[w].At))
		}
		return least
	}
	var written, kept []int
	for _, powers := range []bool{true, false} {
		for i, t := range slices.Backward(ticks) {
			if strings.HasPrefix(t.Text, "1") == powers && distance(i, written) >= room {
				written = append(written, i)
			}
		}
	}
	kept = slices.Clone(written)
	for i := range ticks {
		if slices.Contains(written, i) {
			continue
		}
		ticks[i].Text = ""
		if distance(i, kept) >= apart {
			kept = append(kept, i)
		}
	}
	slices.Sort(kept)
	shown := make([]tick, len(kept))
	for i, k := range kept {
		shown[i] = ticks[k]
	}
	return shown
}

// curve is the distribution of a stage.
type curve struct {
	Stage config.Stage
	Name  string
	// Even is the path on a linear scale. Tail is the path on a scale on which each step is a tenth of the remaining
	// share.
	Even, Tail string
	// Data contains the buckets as "index count,...", and Count their sum.
	Data  string
	Count uint64
}

// distribution is the plot of the cumulative distributions of all stages.
type distribution struct {
	Title       string
	X           []tick
	Even, Tail  []tick
	First, Last float64 // ends of the time axis (see place)
	Curves      []curve
}

func newDistribution(title string, stages map[config.Stage]*measure.Histogram) *distribution {
	lo, hi := math.MaxInt, -1
	var most uint64
	for _, h := range stages {
		if first, last, ok := buckets(h); ok {
			lo, hi = min(lo, first), max(hi, last)
			most = max(most, h.Count)
		}
	}
	if hi < 0 {
		return nil
	}
	axis := newLogAxis(lo, hi, plotInnerWidth)
	nines := min(max(math.Ceil(math.Log10(float64(most))-0.3), 2), 6)
	d := &distribution{Title: title, First: axis.first, Last: axis.last, X: axis.ticks(46)}
	for share := 0; share <= 100; share += 25 {
		d.Even = append(d.Even, tick{evenHeight(float64(share) / 100), strconv.Itoa(share) + " %"})
	}
	d.Tail = append(d.Tail, tick{tailHeight(0, nines), "0 %"}, tick{tailHeight(0.5, nines), "50 %"})
	for n := 1; n <= int(nines); n++ {
		share := 1 - math.Pow10(-n)
		d.Tail = append(d.Tail, tick{tailHeight(share, nines), strconv.FormatFloat(100*share, 'f', max(n-2, 0), 64) + " %"})
	}
	for _, stage := range measure.Stages {
		h := stages[stage]
		if h == nil || h.Count == 0 {
			continue
		}
		d.Curves = append(d.Curves, newCurve(stage, h, axis, nines))
	}
	return d
}

func evenHeight(share float64) float64 { return (1 - share) * plotInnerHeight }

func tailHeight(share, nines float64) float64 {
	return (1 - min(-math.Log10(max(1-share, 1e-9)), nines)/nines) * plotInnerHeight
}

func newCurve(stage config.Stage, h *measure.Histogram, axis logAxis, nines float64) curve {
	var even, tail, data strings.Builder
	command := "M"
	for _, p := range h.CDF() {
		x := chart.Coordinate(axis.at(place(uint64(p.Time))))
		fmt.Fprintf(&even, "%s%s %s", command, x, chart.Coordinate(evenHeight(p.Share)))
		// The tail scale ends below 100 %.
		fmt.Fprintf(&tail, "%s%s %s", command, x, chart.Coordinate(tailHeight(min(p.Share, 1-1/float64(2*h.Count)), nines)))
		command = "L"
	}
	fmt.Fprintf(&even, "H%s", chart.Coordinate(axis.length))
	separator := ""
	for i, n := range h.Buckets {
		if n > 0 {
			fmt.Fprintf(&data, "%s%d %d", separator, i, n)
			separator = ","
		}
	}
	return curve{Stage: stage, Name: stageName(stage), Even: even.String(), Tail: tail.String(), Data: data.String(), Count: h.Count}
}

// timeAxis divides the time of a report into columns of equal width.
type timeAxis struct {
	from, to time.Time
	slice    time.Duration // length of most periods
	width    time.Duration
	columns  int
	covered  []bool // columns that contain measurements
}

// span is a part of the time axis.
type span struct{ At, Length float64 }

// newTimeAxis returns columns of one or several slices, at most heatColumns.
func newTimeAxis(periods []measure.Period) timeAxis {
	if len(periods) == 0 {
		return timeAxis{}
	}
	axis := timeAxis{from: periods[0].From, to: periods[0].To}
	lengths := make([]time.Duration, len(periods))
	for i, p := range periods {
		if p.From.Before(axis.from) {
			axis.from = p.From
		}
		if p.To.After(axis.to) {
			axis.to = p.To
		}
		lengths[i] = p.To.Sub(p.From)
	}
	slices.Sort(lengths)
	slice := max(lengths[len(lengths)/2], time.Millisecond)
	span := axis.to.Sub(axis.from)
	for _, several := range []time.Duration{1, 2, 3, 6, 12, 18, 30, 60, 90, 180, 360} {
		axis.width = several * slice
		if axis.columns = int(math.Round(float64(span) / float64(axis.width))); axis.columns <= heatColumns {
			break
		}
	}
	if axis.columns > heatColumns {
		axis.columns, axis.width = heatColumns, (span+heatColumns-1)/heatColumns
	}
	axis.slice, axis.columns = slice, max(axis.columns, 1)
	axis.covered = make([]bool, axis.columns)
	for _, p := range periods {
		for c := axis.column(p.From.Add(slice / 2)); c <= axis.column(p.To.Add(-slice/2)); c++ {
			axis.covered[c] = true
		}
		axis.covered[axis.middle(p)] = true
	}
	return axis
}

func (a timeAxis) column(t time.Time) int {
	return min(max(int(t.Sub(a.from)/a.width), 0), a.columns-1)
}

// middle returns the column of the middle of a slice.
func (a timeAxis) middle(p measure.Period) int { return a.column(p.From.Add(p.To.Sub(p.From) / 2)) }

// start returns the start of column c. The start of the column after the last one is the end of the axis.
func (a timeAxis) start(c int) time.Time {
	if c >= a.columns {
		return a.to
	}
	return a.from.Add(time.Duration(c) * a.width)
}

// ticks returns marks at whole seconds, minutes or hours.
func (a timeAxis) ticks(length float64) []tick {
	span := a.width * time.Duration(a.columns)
	step := 7 * 24 * time.Hour
	for _, s := range []time.Duration{time.Second, 2 * time.Second, 5 * time.Second, 10 * time.Second, 30 * time.Second,
		time.Minute, 2 * time.Minute, 5 * time.Minute, 10 * time.Minute, 15 * time.Minute, 30 * time.Minute,
		time.Hour, 2 * time.Hour, 6 * time.Hour, 12 * time.Hour, 24 * time.Hour} {
		if span/s <= 8 {
			step = s
			break
		}
	}
	layout := "15:04"
	switch {
	case span > 48*time.Hour:
		layout = "Jan 2 15:04"
	case step < time.Minute:
		layout = "15:04:05"
	}
	_, offset := a.from.Zone()
	shift := time.Duration(offset) * time.Second
	at := a.from.Add(shift).Truncate(step).Add(-shift)
	var ticks []tick
	for ; !at.After(a.from.Add(span)); at = at.Add(step) {
		if at.Before(a.from) {
			continue
		}
		ticks = append(ticks, tick{float64(at.Sub(a.from)) / float64(span) * length, at.Format(layout)})
	}
	return ticks
}

// level is the path of the cells of one colour.
type level struct {
	Number int // starts at 1
	Path   string
	From   string // minimum count
}

// heat is a heat map: the distribution of a stage over time. A cell is a slice of time and of latency.
type heat struct {
	Stage          config.Stage
	Name           string
	Title          string
	Columns, Rows  int
	ScaleX, ScaleY float64 // size of a cell
	X, Y           []tick
	Levels         []level
	Most           string // maximum count of a cell
	Gaps           string // columns without data
	Median, P99    string
	Peak           *span
	// Values for the script. First and Each are the buckets of the rows, from the bottom. Start and Step are the times
	// of the columns in milliseconds of local time. Cells contains "first row,count,count...:p50:p99:max" in
	// nanoseconds for each column.
	First, Each int
	Start, Step int64
	Cells       string
}

// newHeat returns the heat map of the histograms of a time axis's columns, in which a nil histogram is empty. The
// result is nil if there is only one column.
func newHeat(stage config.Stage, axis timeAxis, columns []*measure.Histogram, peak *peak) *heat {
	lo, hi := math.MaxInt, -1
	for _, h := range columns {
		if h == nil {
			continue
		}
		if first, last, ok := buckets(h); ok {
			lo, hi = min(lo, first), max(hi, last)
		}
	}
	if hi < 0 || axis.columns < 2 {
		return nil
	}
	y := newLogAxis(lo, hi, plotInnerHeight)
	each := max(int(math.Ceil((y.last-y.first)/heatRows)), 1)
	first := int(y.first) / each * each
	rows := (int(y.last) - first + each - 1) / each
	y.first, y.last = float64(first), float64(first+rows*each)

	cells := make([][]uint64, axis.columns)
	var most uint64
	for c, h := range columns {
		cells[c] = make([]uint64, rows)
		if h == nil {
			continue
		}
		for i := first; i < min(first+rows*each, len(h.Buckets)); i++ {
			cells[c][(i-first)/each] += h.Buckets[i]
		}
		most = max(most, slices.Max(cells[c]))
	}

	d := &heat{
		Stage: stage, Name: stageName(stage), Columns: axis.columns, Rows: rows,
		ScaleX: float64(plotInnerWidth) / float64(axis.columns), ScaleY: float64(plotInnerHeight) / float64(rows),
		X: axis.ticks(plotInnerWidth), Most: countText(most), First: first, Each: each,
		Step: axis.width.Milliseconds(),
	}
	_, offset := axis.from.Zone()
	d.Start = axis.from.UnixMilli() + int64(offset)*1000
	for _, t := range y.ticks(20) {
		d.Y = append(d.Y, tick{plotInnerHeight - t.At, t.Text})
	}
	d.Levels = newLevels(cells, most)
	d.Gaps = chart.Gaps(axis.covered)
	d.Median = quantileLine(axis, y, columns, 0.5, 1)
	d.P99 = quantileLine(axis, y, columns, 0.99, minP99)
	d.Cells = cellData(cells, columns)
	if peak != nil {
		wide := float64(plotInnerWidth) / float64(axis.columns)
		d.Peak = &span{float64(peak.first) * wide, float64(peak.last+1-peak.first) * wide}
	}
	return d
}

// newLogAxis returns an axis that contains the buckets first to last and at least three octaves.
func newLogAxis(first, last int, length float64) logAxis {
	const octaves = 3 * 16
	lo, hi := first, last+1
	if lack := octaves - (hi - lo); lack > 0 {
		lo = max(lo-lack/2, 0)
		hi = lo + octaves
	}
	return logAxis{first: float64(lo), last: float64(min(hi, len(measure.Histogram{}.Buckets))), length: length}
}

// buckets returns the first and the last non-empty bucket.
func buckets(h *measure.Histogram) (first, last int, ok bool) {
	first = -1
	for i, n := range h.Buckets {
		if n == 0 {
			continue
		}
		if first < 0 {
			first = i
		}
		last = i
	}
	return first, last, first >= 0
}

// newLevels groups the cells by the logarithm of their count.
func newLevels(cells [][]uint64, most uint64) []level {
	of := func(count uint64) uint8 {
		switch {
		case count == 0:
			return 0
		case most < 2:
			return heatLevels
		}
		return 1 + uint8(math.Log(float64(count))/math.Log(float64(most))*(heatLevels-0.001))
	}
	rows := make([][]uint8, len(cells[0])) // from the top, cells are from the bottom
	for row := range rows {
		rows[row] = make([]uint8, len(cells))
		for c := range cells {
			rows[row][c] = of(cells[c][len(rows)-1-row])
		}
	}
	var levels []level
	for l, path := range chart.Cells(rows, heatLevels) {
		from := uint64(math.Ceil(math.Pow(float64(max(most, 1)), float64(l)/(heatLevels-0.001)) - 1e-9))
		levels = append(levels, level{Number: l + 1, Path: path, From: countText(from)})
	}
	return levels
}

// quantileLine returns the path of a quantile over the columns that contain at least least values.
func quantileLine(axis timeAxis, y logAxis, columns []*measure.Histogram, q float64, least uint64) string {
	wide := float64(plotInnerWidth) / float64(axis.columns)
	var b strings.Builder
	pen := false
	for c, h := range columns {
		if h == nil || h.Count < least {
			pen = false
			continue
		}
		height := plotInnerHeight - y.at(place(uint64(h.Quantile(q))))
		from, to := float64(c)*wide, float64(c+1)*wide
		if pen {
			fmt.Fprintf(&b, "V%sH%s", chart.Coordinate(height), chart.Coordinate(to))
		} else {
			fmt.Fprintf(&b, "M%s %sH%s", chart.Coordinate(from), chart.Coordinate(height), chart.Coordinate(to))
		}
		pen = true
	}
	return b.String()
}

// place returns the position of a time on the log axis: the index of its bucket plus the fraction within the bucket.
// Histograms are drawn with their own buckets.
func place(ns uint64) float64 {
	i := histogram.Bucket[histogram.Times](ns)
	lo, hi := histogram.Bounds[histogram.Times](i)
	return float64(i) + min(float64(ns-lo)/float64(hi-lo), 1)
}

func cellData(cells [][]uint64, columns []*measure.Histogram) string {
	var b strings.Builder
	for c, counts := range cells {
		if c > 0 {
			b.WriteByte(';')
		}
		h := columns[c]
		if h == nil || h.Count == 0 {
			continue
		}
		first, last := 0, len(counts)
		for counts[first] == 0 {
			first++
		}
		for counts[last-1] == 0 {
			last--
		}
		fmt.Fprintf(&b, "%d", first)
		for _, n := range counts[first:last] {
			b.WriteByte(',')
			if n > 0 {
				fmt.Fprintf(&b, "%d", n)
			}
		}
		fmt.Fprintf(&b, ":%d:%d:%d", h.Quantile(0.5), h.Quantile(0.99), h.Max)
	}
	return b.String()
}

// spark is a sparkline of a figure over time, in a box of chart.SparkWidth x chart.SparkHeight.
type spark struct {
	Path, Title string
}

func newSpark(values []float64, title string) *spark {
	path := chart.Spark(values)
	if path == "" {
		return nil
	}
	return &spark{Path: path, Title: title}
}

// drawingSize returns the approximate size of the drawings in bytes.
func (c *groupCard) drawingSize() int {
	n := 0
	if c.CDF != nil {
		for _, v := range c.CDF.Curves {
			n += len(v.Even) + len(v.Tail) + len(v.Data)
		}
	}
	for _, d := range c.Heats {
		n += len(d.Cells) + len(d.Gaps) + 2*len(d.Median) + 2*len(d.P99)
		for _, l := range d.Levels {
			n += len(l.Path)
		}
	}
	return n
}

// part is a part of a bar, in units of the bar's box.
type part struct {
	Stage  config.Stage // "" for time without a known stage
	At     float64
	Length float64
	Title  string
	Inside bool // inside the previous part
}

// bar is a row of a bar chart.
type bar struct {
	Name  string
	Parts []part
	Mark  float64 // end of the total; 0 if unknown
	After float64 // position of the text
	Text  string  // total, or the longest part
}

// bars is a chart of the time per stage, on a linear scale from 0.
type bars struct {
	Title string
	X     []tick
	Rows  []bar
}

const barsWidth = 455

// quantile is a quantile with its name.
type quantile struct {
	name  string
	share float64
}

// newBars returns stacked quantiles of the stages. The time of the NIC is a part of the network stage and is drawn
// inside it.
func newBars(title string, stages map[config.Stage]*measure.Histogram, order []config.Stage, whole config.Stage, quantiles ...quantile) *bars {
	most := 0.0
	type length struct{ parts, whole float64 }
	sums := make([]length, len(quantiles))
	any := false
	for i, q := range quantiles {
		for _, stage := range order {
			if h := stages[stage]; h != nil && h.Count > 0 {
				any = true
				sums[i].parts += float64(h.Quantile(q.share))
			}
		}
		if h := stages[whole]; h != nil && h.Count > 0 {
			sums[i].whole = float64(h.Quantile(q.share))
		}
		most = max(most, sums[i].parts, sums[i].whole)
	}
	if !any || most == 0 {
		return nil
	}
	scale := barsWidth / most
	drawing := &bars{Title: title, X: evenTicks(time.Duration(most), barsWidth, 6)}
	for i, q := range quantiles {
		row := bar{Name: q.name, After: max(sums[i].parts, sums[i].whole)*scale + 8, Mark: sums[i].whole * scale, Text: stageName(whole) + " " + durationText(time.Duration(sums[i].whole))}
		longest := time.Duration(-1)
		at := 0.0
		for _, stage := range order {
			h := stages[stage]
			if h == nil || h.Count == 0 {
				continue
			}
			v := h.Quantile(q.share)
			if longest = max(longest, v); longest == v && row.Mark == 0 {
				row.Text = stageName(stage) + " " + durationText(v)
			}
			length := float64(v) * scale
			row.Parts = append(row.Parts, part{Stage: stage, At: at, Length: length, Title: stageName(stage) + ": " + durationText(v)})
			if nic := stages[config.StageNIC]; stage == config.StageNetwork && nic != nil && nic.Count > 0 {
				inside := nic.Quantile(q.share)
				row.Parts = append(row.Parts, part{Stage: config.StageNIC, At: at, Length: min(float64(inside)*scale, length), Inside: true,
					Title: stageName(config.StageNIC) + ", part of network: " + durationText(inside)})
			}
			at += length
		}
		drawing.Rows = append(drawing.Rows, row)
	}
	return drawing
}

// evenTicks returns at most n ticks at round values, and a tick at 0.
func evenTicks(most time.Duration, length float64, n int) []tick {
	step := time.Duration(1)
	for factors, i := []time.Duration{2, 5, 10}, 0; most/step > time.Duration(n); i++ {
		step = factors[i%3] * time.Duration(math.Pow10(i/3))
	}
	var ticks []tick
	for v := time.Duration(0); v <= most; v += step {
		ticks = append(ticks, tick{float64(v) / float64(most) * length, roundText(v)})
	}
	return ticks
}

// roundText formats a duration like durationText, but without trailing zeros.
func roundText(d time.Duration) string {
	number, unit, _ := strings.Cut(durationText(d), "\u00a0")
	if strings.Contains(number, ".") {
		number = strings.TrimRight(strings.TrimRight(number, "0"), ".")
	}
	if unit == "" {
		return number
	}
	return number + "\u00a0" + unit
}

// durationText formats a duration with three digits and a unit.
func durationText(d time.Duration) string {
	v, unit := float64(d), "ns"
	switch {
	case d <= 0:
		return "0"
	case d >= 999500*time.Microsecond:
		v, unit = v/1e9, "s"
	case d >= 999500:
		v, unit = v/1e6, "ms"
	case d >= 1000:
		v, unit = v/1e3, "µs"
	}
	if unit == "ns" {
		return strconv.FormatInt(int64(d), 10) + "\u00a0ns"
	}
	return digits(v) + "\u00a0" + unit
}

// countText formats a number with thousands separators.
func countText(n uint64) string {
	text := strconv.FormatUint(n, 10)
	for i := len(text) - 3; i > 0; i -= 3 {
		text = text[:i] + "," + text[i:]
	}
	return text
}

func bytesText(n uint64) string {
	v, unit := float64(n), "B"
	for _, larger := range []string{"KB", "MB", "GB", "TB", "PB"} {
		if v < 999.5 {
			break
		}
		v, unit = v/1000, larger
	}
	return digits(v) + "\u00a0" + unit
}

// digits rounds to three digits.
func digits(v float64) string {
	decimals := 0
	switch {
	case v >= 99.95:
	case v >= 9.995:
		decimals = 1
	default:
		decimals = 2
	}
	return strconv.FormatFloat(v, 'f', decimals, 64)
}

// shareText formats a share in percent. A share below 1 is never rounded up to 100 %, and a share above 0 never down to
// 0.
func shareText(n, of uint64) string {
	switch {
	case of == 0:
		return ""
	case n == 0:
		return "0\u00a0%"
	case n == of:
		return "100\u00a0%"
	}
	percent := 100 * float64(n) / float64(of)
	switch {
	case percent < 0.01:
		return "<\u00a00.01\u00a0%"
	case percent > 99.99:
		return ">\u00a099.99\u00a0%"
	case percent < 1 || percent > 99:
		return strconv.FormatFloat(percent, 'f', 2, 64) + "\u00a0%"
	}
	return strconv.FormatFloat(percent, 'f', 1, 64) + "\u00a0%"
}

var plotFunctions = template.FuncMap{
	"coordinate": chart.Coordinate,
	"words":      labelWords,
	"frame": func() map[string]int {
		return map[string]int{"Width": plotWidth, "Height": plotHeight, "Left": plotLeft, "Top": plotTop,
			"Right": plotLeft + plotInnerWidth, "Bottom": plotTop + plotInnerHeight,
			"InnerWidth": plotInnerWidth, "InnerHeight": plotInnerHeight}
	},
}
