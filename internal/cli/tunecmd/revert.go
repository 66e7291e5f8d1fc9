// SPDX-License-Identifier: Apache-2.0

package tunecmd

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"sockeye/internal/api"
	"sockeye/internal/cli/command"
	"sockeye/internal/format"
	"sockeye/internal/tune"
)

func (c *commands) tuneRevertCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "revert [RULE...]",
		Short: "Revert the changes of apply --live to open connections",
		Long: `Revert restores the values that open connections had before apply --live, for
the named rules or for all rules. It lists values that cannot be reverted, or
that the application has changed. The policy remains in force: its rules still
apply to new connections.`,
		Example: `  sockeye tune revert
  sockeye tune revert same-datacentre`,
		Args:              command.Arguments(0, -1, ""),
		ValidArgsFunction: c.RuleNames(-1),
		RunE: func(cmd *cobra.Command, args []string) error {
			for _, arg := range args {
				if _, err := ruleName(arg); err != nil {
					return err
				}
			}
			var l api.TuneLive
			if err := c.Client().Post(cmd.Context(), "/v1/tune/revert", api.TuneRevert{Rules: args}, &l); err != nil {
				return err
			}
			return c.Show(&l, func(w io.Writer) { reverted(w, &l) })
		},
	}
}

func reverted(w io.Writer, l *api.TuneLive) {
	fmt.Fprintf(w, "%s reverted, %s", format.Count(l.Reverted, "open connection", "open connections"), format.Count(l.Options, "option", "options"))
	if l.Gone > 0 {
		fmt.Fprintf(w, "; %d closed in the meantime", l.Gone)
	}
	fmt.Fprintln(w)
	for _, k := range l.NotReverted {
		fmt.Fprintf(w, "rule %s: %s on %s: %s\n", k.Rule, k.Option, format.Count(k.Connections, "connection", "connections"), k.Reason)
	}
	problems(w, l)
}

// WriteLive writes the changes to open connections.
func WriteLive(w io.Writer, l *api.TuneLive) {
	n := 0
	for _, connections := range l.Rules {
		n += connections
	}
	fmt.Fprintf(w, "\n%s got a rule%s, %s set; %d had theirs already, no rule matches %d\n",
		format.Count(n, "open connection", "open connections"), byRule(l), format.Count(l.Options, "option", "options"), l.Already, l.NoRule)
	problems(w, l)
}

// byRule formats the connections of each rule as " (bulk 10, rpc 2)".
func byRule(l *api.TuneLive) string {
	if len(l.Rules) == 0 {
		return ""
	}
	var parts []string
	for _, rule := range slices.Sorted(maps.Keys(l.Rules)) {
		parts = append(parts, fmt.Sprintf("%s %d", rule, l.Rules[rule]))
	}
	return " (" + strings.Join(parts, ", ") + ")"
}

func problems(w io.Writer, l *api.TuneLive) {
	for _, f := range l.Failures {
		fmt.Fprintf(w, "rule %s: %s\n", f.Rule, tune.FailureText(api.TuneFailure{Option: f.Option, Error: f.Error, Count: f.Count}))
	}
	for _, p := range l.Problems {
		fmt.Fprintln(w, "problem:", p)
	}
}
