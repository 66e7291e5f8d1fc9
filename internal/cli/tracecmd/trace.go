// SPDX-License-Identifier: Apache-2.0

// Package tracecmd implements the commands of sockeye trace.
package tracecmd

import (
	"context"
	"errors"
	"fmt"
	"net/url"
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
)

// Traced is the JSON output of trace.
type Traced struct {
	api.TraceStatus
	api.TraceResults
}

// traceView has the selection of the measurements to be shown.
type traceView struct {
	cgroup, selector string
	since            time.Duration
	stages           []config.Stage
}

// commands are the commands of one invocation.
type commands struct{ *command.Command }

// New returns `sockeye trace`.
func New(c *command.Command) *cobra.Command { return (&commands{c}).traceCommand() }

func (c *commands) traceCommand() *cobra.Command {
	var v traceView
	var names []string
	var watch bool
	cmd := &cobra.Command{
		Use:   "trace",
		Short: "Show the latency of messages by stage",
		Long: `Trace shows the time in each stage for the messages that trace rules choose, by
group. Stages of sent messages are send (the sendmsg call), stack (until the
queueing discipline), qdisc (until the driver), nic (until the hardware
timestamp; part of network), network (from the driver until the acknowledgement)
and total. Stages of received messages are rx_stack (from arrival at the host
until the socket) and reader (until the application reads the data).

Each group is followed by the outcomes of its messages, and by the age of the
oldest unread data. Counters start when the rules come into force; --since
limits them to the last DURATION, at most one hour.`,
		Example: `  sockeye trace
  sockeye trace --watch --since 1m
  sockeye trace --since 5m --select rule=replies,port=1790 --stage network`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var err error
			if v.stages, err = readStages(names); err != nil {
				return err
			}
			if v.since, err = command.Interval(cmd, "since"); err != nil {
				return err
			}
			if err := selection("--select", v.selector); err != nil {
				return err
			}
			if !watch {
				t, err := c.traced(cmd.Context(), v)
				if err != nil {
					return err
				}
				return c.Print(t, func(l *command.Text) { c.tracing(l, t, v) })
			}
			if c.Output == "json" {
				return fault.Usage(errors.New("--watch and --output json are mutually exclusive"), "without --watch there is one answer")
			}
			return c.Watch(cmd.Context(), func() (*command.Text, error) {
				t, err := c.traced(cmd.Context(), v)
				if err != nil {
					return nil, err
				}
				var l command.Text
				c.tracing(&l, t, v)
				return &l, nil
			})
		},
	}
	cmd.Flags().BoolVar(&watch, "watch", false, "refresh every second, until Ctrl-C")
	cmd.Flags().String("since", "", "show only measurements of the last DURATION, as in 5m")
	cmd.Flags().StringSliceVar(&names, "stage", nil, "show only this stage; can be repeated")
	cmd.Flags().StringVar(&v.cgroup, "cgroup", "", "show only this cgroup, named as in the policy")
	selectFlag(cmd, &v.selector)
	command.CompleteFlag(cmd, "since")
	var words []cobra.Completion
	for _, s := range measure.Stages {
		words = append(words, string(s))
	}
	command.CompleteFlag(cmd, "stage", words...)
	_ = cmd.RegisterFlagCompletionFunc("cgroup", c.tracedCgroups)
	cmd.AddCommand(c.traceSlowCommand(), c.traceSamplesCommand(), c.traceReportCommand(), c.traceSaveCommand(), c.traceCompareCommand(), c.tracePacketsCommand())
	return cmd
}

// tracedCgroups completes names of cgroups.
func (c *commands) tracedCgroups(cmd *cobra.Command, _ []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
	var s api.TraceStatus
	if err := c.Client().Get(cmd.Context(), "/v1/trace", nil, &s); err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	var names []cobra.Completion
	for _, g := range s.Cgroups {
		names = append(names, g.Cgroup)
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}

// lacksTimestamps returns the error for a kernel without timestamps.
func lacksTimestamps(s *api.TraceStatus, hint string) error {
	return &fault.Error{Err: errors.New(untimed(s)), Hint: hint, Code: fault.CodeUnsupported}
}

func untimed(s *api.TraceStatus) string {
	return "this kernel cannot trace messages sent over TCP: this needs " + s.Needs
}

func (c *commands) traced(ctx context.Context, v traceView) (*Traced, error) {
	status, err := c.traceStatus(ctx, v.cgroup)
	if err != nil {
		return nil, err
	}
	t := &Traced{TraceStatus: *status}
	q := command.Query("since", spanText(v.since), "select", v.selector, "cgroup", v.cgroup)
	if err := c.Client().Get(ctx, "/v1/trace/results", q, &t.TraceResults); err != nil {
		return nil, err
	}
	return t, nil
}

// traceStatus requests the status. The error has exit code 3 if this kernel supports no stage of the rules.
func (c *commands) traceStatus(ctx context.Context, cgroup string) (*api.TraceStatus, error) {
	var s api.TraceStatus
	if err := c.Client().Get(ctx, "/v1/trace", command.Query("cgroup", cgroup), &s); err != nil {
		return nil, err
	}
	if s.Timestamps {
		return &s, nil
	}
	for _, g := range s.Cgroups {
		for _, r := range g.Rules {
			if len(r.Stages) > 0 {
				return &s, nil
			}
		}
	}
	return nil, lacksTimestamps(&s, "this kernel can trace rx_stack, reader and datagrams, and the packets of a connection (sockeye trace packets)")
}

// tracing writes the status and the measurements.
func (c *commands) tracing(l *command.Text, t *Traced, v traceView) {
	if !t.Timestamps {
		l.Line("%s", untimed(&t.TraceStatus))
	}
	if len(t.Cgroups) == 0 {
		noRules(l)
		return
	}
	for _, g := range t.Cgroups {
		c.tracedCgroup(l, &g)
	}
	shown := slices.DeleteFunc(slices.Clone(t.Results), func(r measure.Result) bool {
		return !slices.ContainsFunc(v.stages, func(s config.Stage) bool { return measuredIn(&r, s) }) && len(v.stages) < len(measure.Stages)
	})
	l.Line("")
	l.Line("%s", c.period(t, v, len(shown)))
	if len(shown) == 0 {
		return
	}
	rows := [][]string{{"STAGE", "COUNT", "P50", "P90", "P99", "P99.9", "MAX"}}
	for i := range shown {
		r := &shown[i]
		rows = append(rows, []string{""}, []string{r.Group.Label()})
		for _, s := range v.stages {
			if measuredIn(r, s) {
				rows = append(rows, stageRow(s, r.Stages[s]))
			}
		}
		for _, note := range accounts(r) {
			rows = append(rows, []string{"  " + note})
		}
	}
	l.Line("")
	l.Table("lrrrrrr", rows)
}

// noRules writes how to add a rule.
func noRules(l *command.Text) {
	l.Line("there are no trace rules")
	l.Hint("add one to the policy, as in trace: [{cgroup: telemetry.slice, group_by: remote/24}], and run sockeye apply")
}

func stageRow(s config.Stage, h *measure.Histogram) []string {
	row := []string{"  " + string(s), fmt.Sprint(h.Count)}
	for _, q := range []float64{0.5, 0.9, 0.99, 0.999} {
		row = append(row, command.Duration(h.Quantile(q)))
	}
	return append(row, command.Duration(time.Duration(min(h.Max, 1<<63-1))))
}

// period formats the time of the figures.
func (c *commands) period(t *Traced, v traceView, groups int) string {
	var words string
	switch {
	case v.since > 0:
		words = "the last " + v.since.String()
		if t.Partial {
			words += ", of which measurements are available since " + c.Clock(t.From)
		}
	case t.From.IsZero():
		return "no message was chosen yet"
	default:
		words = "since " + c.Clock(t.From) + ", for " + t.To.Sub(t.From).Round(time.Second).String()
	}
	if groups > 0 {
		return words
	}
	if v.selector != "" || len(v.stages) < len(measure.Stages) {
		return words + ": no such message was chosen"
	}
	return words + ": no message was chosen"
}

// tracedCgroup writes a cgroup and its rules.
func (c *commands) tracedCgroup(l *command.Text, g *api.TracedCgroup) {
	words := g.Cgroup
	if g.Path != "" && g.Path != g.Cgroup {
		words += " (" + g.Path + ")"
	}
	words += ": "
	if !g.Attached {
		words += "not "
	}
	words += "attached"
	if g.Created {
		words += ", created by the agent"
	}
	if g.Problem != "" {
		words += ": " + g.Problem
	}
	l.Line("%s", words)
	l.Hint(g.Hint)
	for _, r := range g.Rules {
		words := fmt.Sprintf("  rule %s: %s of the connections, %s of their messages", r.Name, r.Connections, r.Messages)
		if strings.HasSuffix(r.Messages, "/s") {
			words = fmt.Sprintf("  rule %s: %s of the connections, %s messages of each", r.Name, r.Connections, r.Messages)
		}
		if len(r.GroupBy) > 0 {
			words += fmt.Sprintf(", by %s; %d of %s in use", strings.Join(r.GroupBy, ", "), r.Groups, format.Count(r.Limit, "group", "groups"))
		}
		l.Line("%s", words)
		for _, s := range r.Skipped {
			l.Line("  rule %s: %s is skipped: it needs %s", r.Name, s.Stage, s.Needs)
		}
	}
}

// accounts formats the outcomes of a group's messages, and the numbers of messages with unknown stages.
func accounts(r *measure.Result) []string {
	var notes []string
	if r.Chosen > 0 || r.InFlight > 0 || len(r.Outcomes) > 0 {
		notes = append(notes, balance(r.Chosen, "chosen", r.Outcomes, measure.Outcomes, r.InFlight, "in flight"))
	}
	for _, lack := range []struct {
		n    uint64
		Text string
	}{
		{r.Unqueued, "stack and qdisc are unknown for %d, sent before they could be marked"},
		{r.Undriven, "qdisc, nic and network are unknown for %d without a driver timestamp"},
	} {
		if lack.n > 0 {
			notes = append(notes, fmt.Sprintf(lack.Text, lack.n))
		}
	}
	if r.RXChosen == 0 && r.RXWaiting == 0 && len(r.RXOutcomes) == 0 {
		return notes
	}
	received := balance(r.RXChosen, "received", r.RXOutcomes, measure.RXOutcomes, r.RXWaiting, "waiting")
	switch {
	case r.RXWaiting > 0:
		received += "; the reader is " + command.Duration(r.RXOldest) + " behind"
	case measuredIn(r, config.StageReader):
		received += "; the reader is not behind"
	}
	notes = append(notes, received)
	if r.RXUnstamped > 0 {
		notes = append(notes, fmt.Sprintf("rx_stack is unknown for %d without a receive timestamp", r.RXUnstamped))
	}
	return notes
}

func measuredIn(r *measure.Result, s config.Stage) bool {
	h := r.Stages[s]
	return h != nil && h.Count > 0
}

// query returns the query parameters for a period and a selector of groups.
func query(since time.Duration, selector string) url.Values {
	return command.Query("since", spanText(since), "select", selector)
}
