// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"sockeye/internal/config"
	"sockeye/internal/fault"
	"sockeye/internal/trace/measure"
)

// text is made of lines that a terminal shows as they are: what comes from outside
// cannot end a line, nor be a command to the terminal.
type text struct{ bytes.Buffer }

// line adds a line.
func (t *text) line(format string, args ...any) {
	t.WriteString(strings.TrimRight(printable(fmt.Sprintf(format, args...)), " ") + "\n")
}

// hint adds what to do about the line before, if there is something.
func (t *text) hint(text string) {
	if text != "" {
		t.line("hint: %s", text)
	}
}

// table adds rows with their columns aligned: to the right where alignment has an
// r. A row of one cell is as long as it is.
func (t *text) table(alignment string, rows [][]string) {
	widths := make([]int, len(alignment))
	for _, row := range rows {
		for i, cell := range row {
			row[i] = printable(cell)
			if len(row) > 1 {
				widths[i] = max(widths[i], utf8.RuneCountInString(row[i]))
			}
		}
	}
	for _, row := range rows {
		var line strings.Builder
		for i, cell := range row {
			if i > 0 {
				line.WriteString("  ")
			}
			pad := strings.Repeat(" ", max(0, widths[i]-utf8.RuneCountInString(cell)))
			if alignment[i] == 'r' && len(row) > 1 {
				line.WriteString(pad + cell)
			} else {
				line.WriteString(cell + pad)
			}
		}
		t.WriteString(strings.TrimRight(line.String(), " ") + "\n")
	}
}

// print prints v as JSON, or else the text that write makes.
func (c *command) print(v any, write func(*text)) error {
	if c.output == "json" {
		return c.json(v)
	}
	var t text
	write(&t)
	_, err := t.WriteTo(c.Out)
	return err
}

// took writes how long something took.
func took(d time.Duration) string {
	if d < 0 {
		return "-" + took(-max(d, -1<<63+1))
	}
	return inUnits(float64(d), "ns", "µs", "ms", "s")
}

// volume writes a number of bytes.
func volume[N int | int64 | uint32 | uint64](n N) string {
	return inUnits(float64(n), "B", "KB", "MB", "GB", "TB", "PB")
}

// clock writes when something was, to the second, on this host's clock.
func (c *command) clock(t time.Time) string {
	at, now := t.In(c.Now().Location()), c.Now()
	if at.Format(time.DateOnly) != now.Format(time.DateOnly) {
		return at.Format(time.DateTime)
	}
	return at.Format(time.TimeOnly)
}

const spanHint = "a length of time, as in 90s, 5m or 1h"

// span reads a flag that is a length of time; it is 0 if it was not given.
func span(cmd *cobra.Command, flag string) (time.Duration, error) {
	if !cmd.Flags().Changed(flag) {
		return 0, nil
	}
	value := cmd.Flag(flag).Value.String()
	d, err := time.ParseDuration(value)
	if err != nil || d <= 0 {
		return 0, fault.Usage(fmt.Errorf("--%s is %q", flag, value), spanHint)
	}
	return d, nil
}

// spanText is a length of time as a request has it; "" for 0.
func spanText(d time.Duration) string {
	if d == 0 {
		return ""
	}
	return d.String()
}

// selection reads what selects groups, called name.
func selection(name, selector string) error {
	_, err := measure.MatchGroup(selector, measure.Group{})
	if bad, ok := errors.AsType[*measure.SelectorError](err); ok {
		return fault.Usage(fmt.Errorf("%s is %q: %s", name, selector, bad.Message), bad.Hint)
	}
	return err
}

const selectUsage = "only these groups: KEY=VALUE,... with the keys rule, protocol, remote, port, service, cgroup, tune_rule, arm, other"

// selectFlag adds --select.
func selectFlag(cmd *cobra.Command, selector *string) {
	cmd.Flags().StringVar(selector, "select", "", selectUsage)
	_ = cmd.RegisterFlagCompletionFunc("select", completeSelector)
}

// completeSelector offers the keys of selectors.
func completeSelector(_ *cobra.Command, _ []string, typed string) ([]cobra.Completion, cobra.ShellCompDirective) {
	before := typed[:strings.LastIndex(typed, ",")+1]
	var offered []cobra.Completion
	for _, word := range []string{"rule=", "protocol=tcp", "protocol=udp", "remote=", "port=", "service=", "cgroup=", "tune_rule=", "arm=treated", "arm=control", "other=true"} {
		offered = append(offered, before+word)
	}
	return offered, cobra.ShellCompDirectiveNoFileComp | cobra.ShellCompDirectiveNoSpace
}

// readStages reads the names of stages; none are all.
func readStages(names []string) ([]config.Stage, error) {
	if len(names) == 0 {
		return measure.Stages, nil
	}
	var known []string
	for _, s := range measure.Stages {
		known = append(known, string(s))
	}
	var stages []config.Stage
	for _, name := range names {
		if !slices.Contains(known, name) {
			hint := "stages: " + strings.Join(known, ", ")
			if near := config.Nearest(name, known); near != "" && name != "" {
				hint = "did you mean " + near + "?"
			}
			return nil, fault.Usage(fmt.Errorf("there is no stage %q", name), hint)
		}
		stages = append(stages, config.Stage(name))
	}
	return stages, nil
}

// outcome writes what became of a message.
func outcome(o measure.Outcome) string { return strings.ReplaceAll(string(o), "_", " ") }

// became writes what became of messages, in the order of known, those that none
// had left out. It has also what this program does not know.
func became(outcomes map[measure.Outcome]uint64, known []measure.Outcome) (parts []string, sum uint64) {
	order := slices.Clone(known)
	for _, o := range slices.Sorted(maps.Keys(outcomes)) {
		if !slices.Contains(known, o) {
			order = append(order, o)
		}
	}
	for _, o := range order {
		if n := outcomes[o]; n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", n, outcome(o)))
			sum += n
		}
	}
	return parts, sum
}

// balance writes that what was chosen is what became of it, and what is open.
func balance(chosen uint64, word string, outcomes map[measure.Outcome]uint64, known []measure.Outcome, open uint64, openWord string) string {
	parts, sum := became(outcomes, known)
	left := fmt.Sprintf("%d %s", chosen, word)
	if open > 0 || len(parts) == 0 {
		parts = append(parts, fmt.Sprintf("%d %s", open, openWord))
	}
	switch sum += open; {
	case sum > chosen:
		left += fmt.Sprintf(" + %d %s before", sum-chosen, openWord)
	case sum < chosen:
		parts = append(parts, fmt.Sprintf("%d not accounted for", chosen-sum))
	}
	return left + " = " + strings.Join(parts, " + ")
}
