// SPDX-License-Identifier: Apache-2.0

package tunecmd

import (
	"fmt"
	"io"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"sockeye/internal/api"
	"sockeye/internal/cli/command"
	"sockeye/internal/format"
)

func (c *commands) tuneLearnedCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "learned [RULE]",
		Short: "Show the learned initial windows by prefix",
		Long: `Learned shows the initial window in use for each remote prefix of rules with
explore, and the evidence. For each candidate window, it shows the number of
connections that started with it (tries), the number of these connections with a
measured first flight, sent without a pause (timed), the share of the timed
connections that lost a segment (lossy), and the mean time until the
acknowledgement of the first flight. Until a prefix has settled, its connections
use the kernel's initial window, except the share that tries candidates. Old
evidence decays, therefore the counts can decrease.`,
		Example: `  sockeye tune learned
  sockeye tune learned same-datacentre`,
		Args:              command.Arguments(0, 1, ""),
		ValidArgsFunction: c.RuleNames(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			rule := ""
			if len(args) == 1 {
				var err error
				if rule, err = ruleName(args[0]); err != nil {
					return err
				}
			}
			var list []api.TuneLearned
			if err := c.Client().Get(cmd.Context(), "/v1/tune/learned", command.Query("rule", rule), &list); err != nil {
				return err
			}
			return c.Show(list, func(w io.Writer) { c.learned(w, list) })
		},
	}
}

func (c *commands) learned(w io.Writer, list []api.TuneLearned) {
	if len(list) == 0 {
		fmt.Fprintln(w, "nothing learned yet; only rules with explore learn")
		return
	}
	fmt.Fprintln(w, "CGROUP\tRULE\tPREFIX\tWINDOW\tSETTLED\tLAST\tEVIDENCE")
	for _, l := range list {
		window := "kernel's"
		if l.Settled {
			window = strconv.Itoa(l.Window)
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s ago\t", l.Cgroup, l.Rule, l.Prefix, window, command.YesNo(l.Settled),
			max(0, c.Now().Sub(l.Last)).Round(time.Second))
		for i, e := range l.Candidates {
			if i > 0 {
				fmt.Fprint(w, "\t\t\t\t\t\t")
			}
			fmt.Fprintln(w, evidence(e))
		}
		if len(l.Candidates) == 0 {
			fmt.Fprintln(w, "-")
		}
	}
}

// evidence formats the measurements of an initial window.
func evidence(c api.TuneCandidate) string {
	switch {
	case c.Tries == 0:
		return fmt.Sprintf("%d: not tried", c.Window)
	case c.Connections == 0:
		return fmt.Sprintf("%d: %s, none timed", c.Window, format.Count(c.Tries, "try", "tries"))
	}
	return fmt.Sprintf("%d: %s, %d timed, %s lossy, %s", c.Window, format.Count(c.Tries, "try", "tries"), c.Connections,
		command.Percentage(float64(c.Lossy)/float64(c.Connections)), command.Microseconds(1000*c.Time))
}
