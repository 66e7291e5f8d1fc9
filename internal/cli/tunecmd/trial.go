// SPDX-License-Identifier: Apache-2.0

package tunecmd

import (
	"fmt"
	"io"
	"math"
	"strings"

	"github.com/spf13/cobra"

	"sockeye/internal/api"
	"sockeye/internal/cli/command"
	"sockeye/internal/fault"
	"sockeye/internal/format"
	"sockeye/internal/tune/trial"
)

func (c *commands) tuneTrialCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "trial RULE",
		Short: "Compare the tuned connections of a rule with its control arm",
		Long: `Trial compares the arms of a rule with a trial: the tuned connections, and the
randomly selected control connections. DIFFERENCE is in percent of the control
arm, with its 95 % confidence interval. The verdicts are corrected for multiple
comparisons: if the arms do not differ, one of 20 trials has a verdict "lower"
or "higher". If there is not enough data, the verdict has the estimated number
of additional connections that are needed.`,
		Example:           "  sockeye tune trial same-datacentre",
		Args:              command.Arguments(1, 1, "RULE"),
		ValidArgsFunction: c.RuleNames(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			rule, err := ruleName(args[0])
			if err != nil {
				return err
			}
			var t api.TuneTrial
			if err := c.Client().Get(cmd.Context(), "/v1/tune/trial", command.Query("rule", rule), &t); err != nil {
				return err
			}
			return c.Show(&t, func(w io.Writer) { trialTable(w, &t) })
		},
	}
}

// ruleName returns name, or an error if it is empty: an empty query parameter selects all rules.
func ruleName(name string) (string, error) {
	if name == "" {
		return "", fault.Usage(fmt.Errorf("RULE is %q", name), "sockeye tune lists the rules")
	}
	return name, nil
}

func trialTable(w io.Writer, t *api.TuneTrial) {
	fmt.Fprintf(w, "rule %s of %s: %s tuned, %d in the control arm (%s)\n\n", t.Rule, t.Cgroup,
		format.Count(t.Comparison.Treated, "connection", "connections"), t.Comparison.Control, command.Percentage(t.Share))
	fmt.Fprintln(w, "FIGURE\tTUNED\tCONTROL\tDIFFERENCE\t95 % INTERVAL\tVERDICT")
	for _, r := range t.Comparison.Rows {
		verdict := string(r.Verdict)
		if r.More > 0 {
			verdict += fmt.Sprintf(": about %s needed", format.Count(r.More, "more connection", "more connections"))
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\n", figure(r), measured(r.Treated, r.Unit), measured(r.Control, r.Unit),
			change(r.Difference), interval(r.Low, r.High), verdict)
	}
	if t.Summary != "" {
		fmt.Fprintf(w, "\n%s\n", t.Summary)
	}
}

// figure formats the figure of a row, as "connect median" or "retransmits per million segments".
func figure(r trial.Row) string {
	name := strings.NewReplacer("_", " ", "rtt", "RTT", "rtos", "RTOs").Replace(r.Name)
	if _, per, ok := strings.Cut(r.Unit, "per "); ok {
		name += " per " + per
	}
	return name
}

// measured formats a value in the unit of its row.
func measured(v *float64, unit string) string {
	switch {
	case v == nil:
		return "-"
	case unit == "us":
		return command.Microseconds(*v)
	case unit == "kB/s":
		return command.InUnits(*v, "KB/s", "MB/s", "GB/s", "TB/s")
	case strings.HasPrefix(unit, "bytes"):
		return command.InUnits(*v, "B", "KB", "MB", "GB", "TB")
	}
	return command.Digits(*v)
}

func interval(low, high *float64) string {
	switch {
	case low == nil && high == nil:
		return "-"
	case high == nil:
		return change(low) + " and more"
	case low == nil:
		return change(high) + " and less"
	}
	return change(low) + " to " + change(high)
}

// change formats a difference in percent with its sign.
func change(percent *float64) string {
	if percent == nil {
		return "-"
	}
	size := command.Digits(math.Abs(*percent))
	switch {
	case size == "0":
		return "0 %"
	case *percent < 0:
		return "-" + size + " %"
	}
	return "+" + size + " %"
}
