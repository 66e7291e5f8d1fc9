// SPDX-License-Identifier: Apache-2.0

// Package tunecmd implements the commands of sockeye tune.
package tunecmd

import (
	"bytes"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"sockeye/internal/api"
	"sockeye/internal/cli/command"
	"sockeye/internal/config"
	"sockeye/internal/format"
	"sockeye/internal/tune"
)

// commands are the commands of one invocation.
type commands struct{ *command.Command }

// New returns `sockeye tune`.
func New(c *command.Command) *cobra.Command { return (&commands{c}).tuneCommand() }

func (c *commands) tuneCommand() *cobra.Command {
	var cgroup string
	cmd := &cobra.Command{
		Use:   "tune",
		Short: "Show the rules for TCP parameters and their counters",
		Long: `Tune shows the rules for TCP parameters by cgroup, in order: the first rule that
matches a connection applies. Counters start at 0 when the options of a rule
change. OPEN, RETRANSMITS, RTOS and RTT (the median) are available depending on
the key observe of the rule.

Each table is followed by the options that could not be set, with the error of
the kernel, and by the options that the kernel does not support.`,
		Example: `  sockeye tune
  sockeye tune --cgroup telemetry.slice
  sockeye tune explain 10.0.0.1:1790 192.0.2.1 --role accept`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var list []api.TuneStatus
			if err := c.Client().Get(cmd.Context(), "/v1/tune", command.Query("cgroup", cgroup), &list); err != nil {
				return err
			}
			return c.Show(list, func(w io.Writer) {
				if len(list) == 0 {
					fmt.Fprintln(w, "there are no tune rules")
				}
				for i, s := range list {
					if i > 0 {
						fmt.Fprintln(w)
					}
					tuning(w, &s)
				}
			})
		},
	}
	cmd.Flags().StringVar(&cgroup, "cgroup", "", "show only this cgroup, named as in the policy")
	cmd.AddCommand(c.tuneExplainCommand(), c.tuneTrialCommand(), c.tuneLearnedCommand(), c.tuneRevertCommand())
	return cmd
}

// tuning writes a cgroup and its rules.
func tuning(w io.Writer, s *api.TuneStatus) {
	fmt.Fprint(w, s.Cgroup)
	if s.Path != "" && s.Path != s.Cgroup {
		fmt.Fprintf(w, " (%s)", s.Path)
	}
	if s.Attached {
		fmt.Fprint(w, ": attached")
	} else {
		fmt.Fprint(w, ": not attached")
	}
	if s.Created {
		fmt.Fprint(w, ", created by the agent")
	}
	if s.Problem != "" {
		fmt.Fprint(w, ": ", s.Problem)
	}
	fmt.Fprintln(w)
	command.Hint(w, s.Hint)
	for _, f := range s.Foreign {
		fmt.Fprintln(w, tune.ForeignText(f))
	}
	rows := []string{"RULE\tMATCH\tCONNECTIONS\tOPEN\tOPTIONS SET\tFAILED\tRETRANSMITS\tRTOS\tRTT"}
	notes := [][]string{nil}
	var below []string
	for _, r := range s.Rules {
		rows = append(rows, ruleRow(&r))
		notes = append(notes, ruleNotes(&r))
		for _, f := range r.Failures {
			below = append(below, "rule "+r.Name+": "+tune.FailureText(f))
		}
		for _, k := range r.Skipped {
			below = append(below, "rule "+r.Name+": "+tune.SkippedText(k))
		}
	}
	fmt.Fprintln(w)
	annotated(w, rows, notes)
	for i, line := range below {
		if i == 0 {
			fmt.Fprintln(w)
		}
		fmt.Fprintln(w, line)
	}
}

func ruleRow(r *api.TuneRuleStatus) string {
	var failures uint64
	for _, f := range r.Failures {
		failures += f.Count
	}
	open, retransmits, rtos, rtt := "-", "-", "-", "-"
	if r.Observe != string(config.ObserveOff) {
		// Closed includes connections that were never established.
		open = fmt.Sprint(r.Connections - min(r.Closed, r.Connections))
		retransmits = fmt.Sprint(r.Retransmits)
		if r.Retransmits > 0 && r.Segments > 0 {
			retransmits += " (" + command.Percentage(float64(r.Retransmits)/float64(r.Segments)) + ")"
		}
		rtos = fmt.Sprint(r.RTOs)
	}
	if r.RTT != nil {
		rtt = command.Microseconds(r.RTT.P50)
	}
	return fmt.Sprintf("%s\t%s\t%d\t%s\t%d\t%d\t%s\t%s\t%s", r.Name, command.Shorten(r.Match, matchWidth), r.Connections, open,
		r.OptionsSet, failures, retransmits, rtos, rtt)
}

const matchWidth = 50

// ruleNotes returns the notes below a rule: the values that have no column.
func ruleNotes(r *api.TuneRuleStatus) []string {
	var notes []string
	if len(r.Match) > matchWidth {
		notes = append(notes, "match "+r.Match)
	}
	if len(r.Set) > 0 {
		notes = append(notes, "set "+strings.Join(r.Set, ", "))
	}
	if r.React != "" {
		notes = append(notes, fmt.Sprintf("react %s; %s", r.React, format.Count(r.Reactions, "reaction", "reactions")))
	}
	if r.Trial != "" {
		notes = append(notes, fmt.Sprintf("trial %s; %s in the control arm", r.Trial, format.Count(r.Control, "connection", "connections")))
	}
	if r.Observe != string(config.ObserveLive) {
		notes = append(notes, "observe "+r.Observe)
	}
	if r.TunedLive > 0 {
		notes = append(notes, format.Count(r.TunedLive, "connection", "connections")+" tuned while open")
	}
	if r.Tags > 0 {
		notes = append(notes, format.Count(r.Tags, "connection", "connections")+" matched by the peer's tag")
	}
	if r.Older > 0 {
		notes = append(notes, format.Count(r.Older, "older version", "older versions")+" may still apply to open connections")
	}
	return notes
}

// annotated writes a table with indented notes below each row.
func annotated(w io.Writer, rows []string, notes [][]string) {
	var text bytes.Buffer
	table := tabwriter.NewWriter(&text, 0, 0, 2, ' ', 0)
	for _, row := range rows {
		fmt.Fprintln(table, row)
	}
	// Writing to a buffer cannot fail.
	_ = table.Flush()
	for i := range rows {
		line, _ := text.ReadString('\n')
		fmt.Fprint(w, line)
		for _, note := range notes[i] {
			fmt.Fprintln(w, "  "+note)
		}
	}
}
