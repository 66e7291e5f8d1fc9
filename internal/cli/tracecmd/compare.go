// SPDX-License-Identifier: Apache-2.0

package tracecmd

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"sockeye/internal/api"
	"sockeye/internal/cli/command"
	"sockeye/internal/config"
	"sockeye/internal/fault"
	"sockeye/internal/format"
	"sockeye/internal/trace/measure"
	"sockeye/internal/trace/report"
)

// Compared is the JSON output of trace compare.
type Compared struct {
	A          comparedSide       `json:"a"`
	B          comparedSide       `json:"b"`
	Partial    bool               `json:"partial"` // the history of the agent is shorter than the requested period
	Overlap    bool               `json:"overlap"` // files of one host, with a common time: some messages are on both sides
	OnlyA      []string           `json:"only_a"`  // groups that match the selection, and only A has, of files and periods
	OnlyB      []string           `json:"only_b"`
	Comparison measure.Comparison `json:"comparison"`
	CDF        []comparedCDF      `json:"cdf"` // stages that both sides have
	Summary    string             `json:"summary"`
	Chart      string             `json:"chart,omitempty"` // file of the distributions

	stages []report.ComparedStage
}

// comparedCDF contains the cumulative distributions of a stage. They are linear between the points.
type comparedCDF struct {
	Stage config.Stage `json:"stage"`
	A     []cdfPoint   `json:"a"`
	B     []cdfPoint   `json:"b"`
}

// cdfPoint is the share of the messages that are not slower than a time.
type cdfPoint struct {
	Time  time.Duration `json:"ns"`
	Share float64       `json:"share"`
}

// comparedSide is one side of the comparison.
type comparedSide struct {
	File   string    `json:"file,omitempty"` // of trace save; "": this host
	Host   string    `json:"host,omitempty"`
	Kernel string    `json:"kernel,omitempty"`
	Select string    `json:"select"`
	Saved  string    `json:"saved_select,omitempty"` // --select of trace save
	From   time.Time `json:"from"`                   // start of the available history
	To     time.Time `json:"to"`

	finder  *measure.Finder // has the measurements
	partial bool            // earlier measurements are not available
}

// unknownGroup is the error for a selector without measurements.
type unknownGroup struct{ selector, hint string }

func (c *commands) traceCompareCommand() *cobra.Command {
	var trial, selector, periodA, periodB, picture string
	var force bool
	cmd := &cobra.Command{
		Use:   "compare {SELECT-A SELECT-B | A.json B.json}",
		Short: "Compare two groups, periods, hosts or days, or the arms of a trial",
		Long: `Compare shows which stages differ between A and B, by how much, and whether the
difference is significant. A and B are one of: two groups, in the syntax of
--select; the control and the treated arm of a tune rule with --trial; two
periods FROM..TO with --period-a and --period-b; or two .json files of trace
save, from other hosts or days, which need no agent. FROM and TO have the format
14:05, RFC 3339, or -10m (10 minutes ago). Without TO, the period ends now.

The distributions of both sides are shown beside each other; --svg writes them
as a picture.

RATIO is B/A with its 95 % confidence interval. The verdicts are corrected for
multiple comparisons: if A and B do not differ, one of 20 comparisons has a row
with the verdict "real". p90 and mean are shown only if they differ. The agent
keeps one hour of history.`,
		Example: `  sockeye trace compare remote=192.0.2.0/24 remote=198.51.100.0/24 --since 15m
  sockeye trace compare --trial same-datacentre
  sockeye trace compare --period-a 13:50..14:05 --period-b 14:05..
  sockeye trace compare --period-a -9m..-5m --period-b -5m.. --select rule=bulk
  sockeye trace compare monday.json tuesday.json --select rule=bmp --svg bmp.svg`,
		Args: func(cmd *cobra.Command, args []string) error {
			for _, flag := range []string{"trial", "period-a", "period-b"} {
				if cmd.Flags().Changed(flag) {
					if slices.ContainsFunc(args, isSaved) {
						return fault.Usage(fmt.Errorf("--%s and files are mutually exclusive", flag), "select groups of the files with --select")
					}
					return command.Arguments(0, 0, "")(cmd, args)
				}
			}
			if len(args) == 1 {
				return command.Arguments(2, 2, "SELECT-B")(cmd, args)
			}
			return command.Arguments(2, 2, "SELECT-A")(cmd, args)
		},
		ValidArgsFunction: func(cmd *cobra.Command, args []string, typed string) ([]cobra.Completion, cobra.ShellCompDirective) {
			keys, _ := completeSelector(cmd, args, typed)
			return keys, cobra.ShellCompDirectiveNoSpace // or files
		},
	}
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		since, err := command.Interval(cmd, "since")
		if err != nil {
			return err
		}
		changed := cmd.Flags().Changed
		var r *Compared
		var file *newFile
		if changed("svg") && picture == "" {
			return fault.Usage(errors.New("--svg names no file"), "usage: "+cmd.UseLine())
		}
		if changed("svg") && slices.ContainsFunc(args, func(arg string) bool { return sameFile(arg, picture) }) {
			return fault.Usage(fmt.Errorf("--svg %s is a file that is compared", picture), "name another file")
		}
		if changed("svg") {
			if file, err = createFile(picture, force, 0o666); err != nil {
				return err
			}
			defer file.discard()
		}
		switch {
		case len(args) == 2 && (isSaved(args[0]) || isSaved(args[1])):
			if changed("since") {
				return fault.Usage(errors.New("--since and files are mutually exclusive"), "use trace save --since")
			}
			r, err = c.compareSaved(selector, args[0], args[1])
		case changed("period-a") || changed("period-b"):
			if !changed("period-a") || !changed("period-b") {
				return fault.Usage(errors.New("--period-a and --period-b must be used together"), "usage: "+cmd.UseLine())
			}
			for _, other := range []string{"trial", "since"} {
				if changed(other) {
					return fault.Usage(fmt.Errorf("--period-a and --%s are mutually exclusive", other), "select groups with --select")
				}
			}
			r, err = c.comparePeriods(cmd.Context(), selector, periodA, periodB)
		case changed("select"):
			return fault.Usage(errors.New("--select requires --period-a and --period-b, or two files"), "without --period-a and --period-b, SELECT-A and SELECT-B select the groups")
		case changed("trial"):
			if trial == "" || strings.Contains(trial, ",") {
				return fault.Usage(fmt.Errorf("--trial is %q", trial), "sockeye tune lists the rules")
			}
			r, err = c.compareGroups(cmd.Context(), since, "tune_rule="+trial+",arm=control", "tune_rule="+trial+",arm=treated")
			if failed, ok := errors.AsType[*unknownGroup](err); ok {
				return fault.Usage(fmt.Errorf("no message of the trial of %s was measured: no group matches %s", trial, failed.selector),
					"add a trace rule with group_by: [rule, arm]; "+failed.hint)
			}
		default:
			for i, name := range []string{"SELECT-A", "SELECT-B"} {
				if err := selection(name, args[i]); err != nil {
					return err
				}
			}
			r, err = c.compareGroups(cmd.Context(), since, args[0], args[1])
		}
		if failed, ok := errors.AsType[*unknownGroup](err); ok {
			return fault.Usage(err, failed.hint)
		}
		if err != nil {
			return err
		}
		if file != nil {
			if err := r.draw(file); err != nil {
				return err
			}
		}
		return c.Print(r, func(l *command.Text) { c.comparison(l, r) })
	}
	cmd.Flags().String("since", "", "show only measurements of the last DURATION, as in 15m")
	cmd.Flags().StringVar(&trial, "trial", "", "compare the arms of the trial of this tune rule")
	cmd.Flags().StringVar(&periodA, "period-a", "", "period of A, FROM..TO")
	cmd.Flags().StringVar(&periodB, "period-b", "", "period of B, FROM..TO")
	cmd.Flags().StringVar(&picture, "svg", "", "write the distributions to this `FILE`")
	cmd.Flags().BoolVar(&force, "force", false, "replace an existing file")
	selectFlag(cmd, &selector)
	_ = cmd.RegisterFlagCompletionFunc("trial", c.RuleNames(-1))
	for _, free := range []string{"since", "period-a", "period-b"} {
		command.CompleteFlag(cmd, free)
	}
	return cmd
}

func (e *unknownGroup) Error() string {
	return fmt.Sprintf("no measured group matches %q", e.selector)
}

// compareGroups compares two selections of groups in the same period.
func (c *commands) compareGroups(ctx context.Context, since time.Duration, a, b string) (*Compared, error) {
	if a == b {
		return nil, fault.Usage(errors.New("both sides are the same"), "name two different groups, or two periods with --period-a and --period-b")
	}
	history, err := c.history(ctx, command.Query("since", spanText(since)))
	if err != nil {
		return nil, err
	}
	for _, p := range history.Slices {
		for _, r := range p.Results {
			inA, err := measure.MatchGroup(a, r.Group)
			if err != nil {
				return nil, err
			}
			inB, err := measure.MatchGroup(b, r.Group)
			if err != nil {
				return nil, err
			}
			if inA && inB {
				return nil, fault.Usage(fmt.Errorf("both sides match the group %s", command.Printable(r.Group.Label())), "use selectors without common groups")
			}
		}
	}
	sideA, err := newSide(a, history.Slices)
	if err != nil {
		return nil, err
	}
	sideB, err := newSide(b, history.Slices)
	if err != nil {
		return nil, err
	}
	return compare(history.Partial, sideA, sideB)
}

// comparePeriods compares the same groups in two periods.
func (c *commands) comparePeriods(ctx context.Context, selector, periodA, periodB string) (*Compared, error) {
	if err := selection("--select", selector); err != nil {
		return nil, err
	}
	fromA, toA, err := c.times("period-a", periodA)
	if err != nil {
		return nil, err
	}
	fromB, toB, err := c.times("period-b", periodB)
	if err != nil {
		return nil, err
	}
	if fromA.Before(toB) && fromB.Before(toA) {
		return nil, fault.Usage(errors.New("--period-a and --period-b overlap"), "use periods without a common part")
	}
	from, to := fromA, toA
	if fromB.Before(from) {
		from, to = fromB, toA
	}
	if toB.After(to) {
		to = toB
	}
	history, err := c.history(ctx, command.Query("from", from.Format(time.RFC3339Nano), "to", to.Format(time.RFC3339Nano), "select", selector))
	if err != nil {
		return nil, err
	}
	var sides [2]comparedSide
	for i, of := range []struct {
		flag     string
		from, to time.Time
	}{{"period-a", fromA, toA}, {"period-b", fromB, toB}} {
		periods := measure.Trim(history.Slices, of.from, of.to)
		if len(periods) == 0 {
			return nil, fault.Usage(fmt.Errorf("the agent has no complete slice in --%s", of.flag), "the agent keeps one hour of history in slices of 10 s: use a later or a longer period")
		}
		if sides[i], err = newSide(selector, periods); err != nil {
			return nil, err
		}
	}
	r, err := compare(history.Partial, sides[0], sides[1])
	if err == nil {
		r.contrast()
	}
	return r, err
}

// newSide returns the side of the groups that a selector matches.
func newSide(selector string, periods []measure.Period) (comparedSide, error) {
	s := comparedSide{Select: selector}
	var err error
	if s.finder, err = measure.NewFinder(selector); err != nil {
		return s, err
	}
	for _, p := range periods {
		s.finder.Begin()
		for i := range p.Results {
			s.finder.Add(&p.Results[i], p.To)
		}
	}
	if n := len(periods); n > 0 {
		s.From, s.To = periods[0].From, periods[n-1].To
	}
	return s, nil
}

// history requests the measurements in slices. The error has exit code 3 if this kernel supports no stage of the rules.
func (c *commands) history(ctx context.Context, q map[string][]string) (*api.TraceHistory, error) {
	if _, err := c.traceStatus(ctx, ""); err != nil {
		return nil, err
	}
	var h api.TraceHistory
	return &h, c.Client().Get(ctx, "/v1/trace/history", q, &h)
}

// isSaved reports whether an argument is the name of a file of trace save: no selector of groups, and ending in .json.
func isSaved(arg string) bool { return strings.HasSuffix(arg, ".json") && selection("", arg) != nil }

// compareSaved compares the same groups in two files of trace save.
func (c *commands) compareSaved(selector, fileA, fileB string) (*Compared, error) {
	if err := selection("--select", selector); err != nil {
		return nil, err
	}
	if fileA == fileB || sameFile(fileA, fileB) {
		return nil, fault.Usage(errors.New("both sides are the same"), "name two different files")
	}
	var sides [2]*comparedSide
	for i, file := range []string{fileA, fileB} {
		if !isSaved(file) {
			return nil, fault.Usage(fmt.Errorf("%s is not a file of trace save", file), "compare two files with names that end in .json, or two groups")
		}
		var err error
		if sides[i], err = readSaved(file, selector); err != nil {
			return nil, err
		}
	}
	a, b := sides[0], sides[1]
	r, err := compare(a.partial || b.partial, *a, *b)
	if failed, ok := errors.AsType[*unknownGroup](err); ok {
		for _, side := range sides {
			if len(side.finder.Groups()) == 0 {
				return nil, fault.Usage(fmt.Errorf("%s: %w", side.File, failed), failed.hint)
			}
		}
	}
	if err != nil {
		return nil, err
	}
	r.Overlap = a.Host == b.Host && a.From.Before(b.To) && b.From.Before(a.To)
	r.contrast()
	return r, nil
}

func compare(partial bool, a, b comparedSide) (*Compared, error) {
	resultsA, err := a.find()
	if err != nil {
		return nil, err
	}
	resultsB, err := b.find()
	if err != nil {
		return nil, err
	}
	r := &Compared{A: a, B: b, Partial: partial, OnlyA: []string{}, OnlyB: []string{}, Comparison: measure.Compare(resultsA, resultsB), CDF: []comparedCDF{}}
	r.Summary = r.Comparison.Summary()
	of := [2]map[config.Stage]*measure.Histogram{measure.StagesOf(resultsA), measure.StagesOf(resultsB)}
	for _, stage := range measure.Stages {
		sides := [2]*measure.Histogram{of[0][stage], of[1][stage]}
		if sides[0] == nil || sides[1] == nil {
			continue
		}
		r.stages = append(r.stages, report.ComparedStage{Stage: stage, A: sides[0], B: sides[1]})
		r.CDF = append(r.CDF, comparedCDF{Stage: stage, A: cdfPoints(sides[0]), B: cdfPoints(sides[1])})
	}
	return r, nil
}

func cdfPoints(h *measure.Histogram) []cdfPoint {
	var points []cdfPoint
	for _, p := range h.CDF() {
		points = append(points, cdfPoint(p))
	}
	return points
}

// sameFile reports whether two paths are of the same file.
func sameFile(a, b string) bool {
	infoA, errA := os.Stat(a)
	infoB, errB := os.Stat(b)
	return errA == nil && errB == nil && os.SameFile(infoA, infoB)
}

// contrast finds the groups that only one side has.
func (r *Compared) contrast() {
	only := func(of, other *comparedSide) []string {
		has := map[measure.Group]bool{}
		for _, g := range other.finder.Groups() {
			has[g] = true
		}
		labels := []string{}
		for _, g := range of.finder.Groups() {
			if !has[g] {
				labels = append(labels, g.Label())
			}
		}
		slices.Sort(labels)
		return labels
	}
	r.OnlyA, r.OnlyB = only(&r.A, &r.B), only(&r.B, &r.A)
}

// draw writes the distributions.
func (r *Compared) draw(file *newFile) error {
	if len(r.stages) == 0 {
		return fault.WithHint(errors.New("there is nothing to draw: no stage was measured on both sides"), "without --svg, the summary shows what is missing")
	}
	err := report.WriteComparison(file, report.Compared{A: command.Printable(r.A.name()), B: command.Printable(r.B.name()), Stages: r.stages})
	if err != nil {
		return fmt.Errorf("write %s: %w", file.path, err)
	}
	r.Chart = file.path
	return file.finish()
}

// find returns the results of a side.
func (s *comparedSide) find() ([]*measure.Result, error) {
	found, err := s.finder.Results()
	if bad, ok := errors.AsType[*measure.SelectorError](err); ok {
		return nil, &unknownGroup{s.Select, command.Printable(bad.Hint)}
	}
	return found, err
}

const timesHint = "FROM..TO in the format 14:05, 2026-01-31T14:05:00Z or -10m; without TO, the period ends now"

// times parses a time range.
func (c *commands) times(flag, text string) (from, to time.Time, err error) {
	refuse := func(why string) error {
		return fault.Usage(fmt.Errorf("--%s is %q%s", flag, text, why), timesHint)
	}
	first, last, ok := strings.Cut(text, "..")
	if !ok {
		return from, to, refuse("")
	}
	if from, ok = c.readMoment(first); !ok {
		return from, to, refuse("")
	}
	if to = c.Now(); last != "" {
		if to, ok = c.readMoment(last); !ok {
			return from, to, refuse("")
		}
	}
	if !from.Before(to) {
		return from, to, refuse(", which ends before it begins")
	}
	return from, to, nil
}

// readMoment parses a time. A time without a date is in the last 24 hours.
func (c *commands) readMoment(text string) (time.Time, bool) {
	now := c.Now()
	if ago, ok := strings.CutPrefix(text, "-"); ok {
		d, err := time.ParseDuration(ago)
		return now.Add(-d), err == nil && d > 0
	}
	for _, layout := range []string{"15:04", time.TimeOnly} {
		at, err := time.Parse(layout, text)
		if err != nil {
			continue
		}
		y, m, d := now.Date()
		moment := time.Date(y, m, d, at.Hour(), at.Minute(), at.Second(), 0, now.Location())
		if moment.After(now) {
			moment = time.Date(y, m, d-1, at.Hour(), at.Minute(), at.Second(), 0, now.Location())
		}
		return moment, true
	}
	at, err := time.Parse(time.RFC3339, text)
	return at, err == nil
}

// cdfShares are the shares of the table of distributions.
var cdfShares = []struct {
	name  string
	share float64
}{{"10 %", 0.1}, {"25 %", 0.25}, {"50 %", 0.5}, {"75 %", 0.75}, {"90 %", 0.9}, {"99 %", 0.99}, {"99.9 %", 0.999}}

func (c *commands) comparison(l *command.Text, r *Compared) {
	for _, side := range []struct {
		name string
		of   *comparedSide
		has  measure.Side
	}{{"A", &r.A, r.Comparison.A}, {"B", &r.B, r.Comparison.B}} {
		l.Line("%s: %s, %s to %s: %s in %s of 10 s", side.name, side.of.name(), c.Clock(side.of.From), c.Clock(side.of.To),
			format.Count(side.has.Messages, "message", "messages"), format.Count(side.has.Slices, "slice", "slices"))
	}
	if r.Partial {
		l.Line("earlier measurements are not available")
	}
	if r.Overlap {
		l.Line("the files are from one host and their periods overlap: messages of the overlap are on both sides")
	}
	for _, side := range []struct {
		name string
		only []string
	}{{"A", r.OnlyA}, {"B", r.OnlyB}} {
		if n := len(side.only); n > 0 {
			const named = 3
			more := ""
			if n > named {
				more = fmt.Sprintf("; and %d more", n-named)
			}
			l.Line("only %s has %s: %s%s", side.name, format.Count(n, "group", "groups"), strings.Join(side.only[:min(n, named)], "; "), more)
		}
	}
	rows := [][]string{{"STAGE", "FIGURE", "A", "B", "RATIO", "95 % INTERVAL", "VERDICT"}}
	for _, row := range r.Comparison.Rows {
		if row.Figure != "p50" && row.Figure != "p99" && row.Verdict != measure.Real {
			continue
		}
		rows = append(rows, []string{string(row.Stage), row.Figure, command.Duration(row.A), command.Duration(row.B), Times(row.Ratio), RatioInterval(row.Low, row.High), string(row.Verdict)})
	}
	if len(rows) > 1 {
		l.Line("")
		l.Table("llrrrll", rows)
	}
	if len(r.stages) > 0 {
		header := []string{"CDF", ""}
		for _, q := range cdfShares {
			header = append(header, q.name)
		}
		table := [][]string{header}
		for _, s := range r.stages {
			for i, side := range []*measure.Histogram{s.A, s.B} {
				row := []string{string(s.Stage), "A"}
				if i == 1 {
					row = []string{"", "B"}
				}
				for _, q := range cdfShares {
					row = append(row, command.Duration(side.Quantile(q.share)))
				}
				table = append(table, row)
			}
		}
		l.Line("")
		l.Table("llrrrrrrr", table)
	}
	l.Line("")
	l.Line("%s", r.Summary)
	if r.Chart != "" {
		l.Line("wrote %s", r.Chart)
	}
}

// name describes a side.
func (s *comparedSide) name() string {
	words := s.Select
	if words == "" {
		words = "all groups"
	}
	if s.File != "" {
		words = fmt.Sprintf("%s, %s, Linux %s, %s", s.File, s.Host, s.Kernel, words)
		if s.Saved != "" {
			words += ", saved with --select " + s.Saved
		}
	}
	return words
}

// RatioInterval formats the confidence interval of a ratio. A bound of nil is unknown.
func RatioInterval(low, high *float64) string {
	switch {
	case low == nil && high == nil:
		return "-"
	case high == nil:
		return Times(low) + " and more"
	case low == nil:
		return Times(high) + " and less"
	}
	return Times(low) + " to " + Times(high)
}

// Times formats a ratio.
func Times(ratio *float64) string {
	switch {
	case ratio == nil:
		return "-"
	case *ratio > 0 && *ratio < 0.005:
		return "< 0.01"
	}
	return command.Digits(*ratio)
}
