// SPDX-License-Identifier: Apache-2.0

package tracecmd

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"

	"sockeye/internal/api"
	"sockeye/internal/cli/command"
	"sockeye/internal/format"
	"sockeye/internal/trace/measure"
	"sockeye/internal/trace/report"
)

// Report is the JSON output of trace report.
type Report struct {
	File     string    `json:"file"`
	Bytes    int64     `json:"bytes"`
	From     time.Time `json:"from"`
	To       time.Time `json:"to"`
	Slices   int       `json:"slices"`
	Groups   int       `json:"groups"`
	Messages uint64    `json:"messages"`
	Slow     int       `json:"slow"`
	Partial  bool      `json:"partial"`
}

func (c *commands) traceReportCommand() *cobra.Command {
	var selector string
	var force bool
	cmd := &cobra.Command{
		Use:   "report FILE",
		Short: "Write the measurements to an HTML page",
		Long: `Report writes a self-contained HTML page with the distributions of all stages by
group and over time, the slowest messages with explanations, and the delay of
readers. The agent keeps one hour of history in slices of 10 s; --since limits
the report to the most recent part.`,
		Example: `  sockeye trace report trace.html
  sockeye trace report trace.html --since 15m --select rule=replies --force`,
		Args: command.Arguments(1, 1, "FILE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			w, err := writeMeasurements(cmd, args[0], selector, force, c.traceReport)
			if err != nil {
				return err
			}
			return c.Print(w, func(l *command.Text) { c.reported(l, w) })
		},
	}
	cmd.Flags().String("since", "", "show only measurements of the last DURATION, as in 15m")
	cmd.Flags().BoolVar(&force, "force", false, "replace an existing file")
	selectFlag(cmd, &selector)
	command.CompleteFlag(cmd, "since")
	return cmd
}

// reportSlow is the number of slowest messages in a report.
const reportSlow = 200

// traceReport requests the data of a report and writes it.
func (c *commands) traceReport(ctx context.Context, file *newFile, since time.Duration, selector string) (*Report, error) {
	status, err := c.traceStatus(ctx, "")
	if err != nil {
		return nil, err
	}
	var history api.TraceHistory
	if err := c.Client().Get(ctx, "/v1/trace/history", query(since, selector), &history); err != nil {
		return nil, err
	}
	r := report.Report{Version: command.Version, Periods: history.Slices, Notes: c.reportNotes(status, &history, since, selector)}
	if r.Host, err = os.Hostname(); err != nil {
		return nil, fmt.Errorf("write %s: %w", file.path, err)
	}
	var list []api.TraceSlow
	q := query(since, selector)
	q.Set("n", fmt.Sprint(reportSlow))
	if err := c.Client().Get(ctx, "/v1/trace/slow", q, &list); err != nil {
		return nil, err
	}
	for _, m := range list {
		r.Slow = append(r.Slow, m.Sample)
	}
	out := bufio.NewWriter(file)
	if err := report.WriteReport(out, r); err != nil {
		return nil, fmt.Errorf("write %s: %w", file.path, err)
	}
	if err := out.Flush(); err != nil {
		return nil, fmt.Errorf("write %s: %w", file.path, err)
	}
	info, err := file.Stat()
	if err != nil {
		return nil, fmt.Errorf("write %s: %w", file.path, err)
	}
	whole := measure.Merge(history.Slices)
	w := &Report{File: file.path, Bytes: info.Size(), From: whole.From, To: whole.To, Slices: len(history.Slices),
		Groups: len(whole.Results), Slow: len(list), Partial: history.Partial}
	for _, result := range whole.Results {
		w.Messages += result.Chosen + result.RXChosen
	}
	return w, nil
}

// reportNotes returns the notes for the reader of a report.
func (c *commands) reportNotes(status *api.TraceStatus, history *api.TraceHistory, since time.Duration, selector string) []string {
	var notes []string
	note := func(format string, args ...any) { notes = append(notes, fmt.Sprintf(format, args...)) }
	if history.Partial && len(history.Slices) > 0 {
		note("The last %s were requested. Measurements before %s are not available.", since, c.Clock(history.Slices[0].From))
	}
	if selector != "" {
		note("Only groups with %s are shown.", selector)
	}
	return append(notes, report.Notes(status)...)
}

func (c *commands) reported(l *command.Text, w *Report) {
	if w.Slices == 0 {
		l.Line("%s: nothing was measured; %s", w.File, command.Bytes(w.Bytes))
		return
	}
	l.Line("%s: %s of %s, from %s to %s; %s", w.File, format.Count(w.Messages, "message", "messages"), format.Count(w.Groups, "group", "groups"),
		c.Clock(w.From), c.Clock(w.To), command.Bytes(w.Bytes))
	if w.Partial {
		l.Line("earlier measurements are not available")
	}
}
