// SPDX-License-Identifier: Apache-2.0

package tracecmd

import (
	"context"
	"fmt"
	"math"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"sockeye/internal/api"
	"sockeye/internal/cli/command"
	"sockeye/internal/config"
	"sockeye/internal/fault"
	"sockeye/internal/trace/measure"
)

// maxSlow is the agent's maximum number of messages.
const maxSlow = 1000

func (c *commands) traceSlowCommand() *cobra.Command {
	var number int
	var selector string
	cmd := &cobra.Command{
		Use:   "slow",
		Short: "Show the slowest recent messages, with explanations",
		Long: `Slow shows the slowest messages of the last minutes, slowest first, with the
time in each stage, and an explanation of the longest stage with its evidence.
For each group, the kernel keeps the 8 slowest messages of each of the last 8
periods of 69 s.`,
		Example: `  sockeye trace slow
  sockeye trace slow -n 3 --since 1m --select remote=192.0.2.0/24`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if number < 1 || number > maxSlow {
				return fault.Usage(fmt.Errorf("--number is %d", number), fmt.Sprintf("1 to %d", maxSlow))
			}
			since, err := command.Interval(cmd, "since")
			if err != nil {
				return err
			}
			if err := selection("--select", selector); err != nil {
				return err
			}
			list, status, err := c.slowest(cmd.Context(), query(since, selector), number)
			if err != nil {
				return err
			}
			return c.Print(list, func(l *command.Text) { c.slow(l, list, status) })
		},
	}
	cmd.Flags().IntVarP(&number, "number", "n", 10, "maximum number of messages")
	cmd.Flags().String("since", "", "show only messages of the last DURATION, as in 5m")
	selectFlag(cmd, &selector)
	command.CompleteFlag(cmd, "number")
	command.CompleteFlag(cmd, "since")
	return cmd
}

// slowest requests the slowest messages. If there are none, slowest also returns the status, for the reason.
func (c *commands) slowest(ctx context.Context, q url.Values, number int) ([]api.TraceSlow, *api.TraceStatus, error) {
	q.Set("n", strconv.Itoa(number))
	var list []api.TraceSlow
	if err := c.Client().Get(ctx, "/v1/trace/slow", q, &list); err != nil || len(list) > 0 {
		return list, nil, err
	}
	status, err := c.sendStatus(ctx, "")
	return list, status, err
}

// sendStatus requests the status. The error has exit code 3 if this kernel cannot trace messages sent over TCP.
func (c *commands) sendStatus(ctx context.Context, cgroup string) (*api.TraceStatus, error) {
	s, err := c.traceStatus(ctx, cgroup)
	if err == nil && !s.Timestamps {
		err = lacksTimestamps(s, "sockeye trace shows the available stages")
	}
	return s, err
}

func (c *commands) slow(l *command.Text, list []api.TraceSlow, status *api.TraceStatus) {
	switch {
	case len(list) > 0:
	case len(status.Cgroups) == 0:
		noRules(l)
	default:
		l.Line("no chosen message was completed in this period")
	}
	for i, m := range list {
		if i > 0 {
			l.Line("")
		}
		s := &m.Sample
		l.Line("%d. %s  %s  %s", i+1, command.Duration(s.Stages[measure.Total]), c.moment(s.Ended), s.Group.Label())
		l.Line("   %s to %s, %s, %s, %s", s.Local, s.Remote, s.Role, command.Bytes(s.Length), outcomeText(s.Outcome))
		if bar := wayBar(s); bar != "" {
			l.Line("   %s", bar)
		}
		l.Line("   %s", m.Explanation.Text)
		for _, detail := range m.Explanation.Details {
			l.Line("   - %s", detail)
		}
	}
}

// moment formats a time to the millisecond.
func (c *commands) moment(t time.Time) string {
	return c.Clock(t) + t.Format(".000")
}

// barWidth is the total length of the bars of a message, without the names.
const barWidth = 40

// wayBar formats the share of each stage of the total time as a bar after the name of the stage.
func wayBar(s *measure.Sample) string {
	var parts []string
	total := s.Stages[measure.Total]
	left := total
	add := func(name string, d time.Duration) {
		share := min(max(float64(d)/float64(total), 0), 1)
		parts = append(parts, strings.TrimRight(name+" "+strings.Repeat("█", int(math.Round(barWidth*share))), " "))
	}
	if total <= 0 {
		return ""
	}
	for _, stage := range []config.Stage{config.StageSend, config.StageStack, config.StageQdisc, config.StageNetwork} {
		d, ok := s.Stages[stage]
		if !ok {
			continue
		}
		add(string(stage), d)
		left -= d
		if stage == config.StageQdisc && s.Requeued > 0 {
			add("again", s.Requeued)
			left -= s.Requeued
		}
	}
	if left >= total/barWidth {
		add("not known", left)
	}
	return strings.Join(parts, " ")
}
