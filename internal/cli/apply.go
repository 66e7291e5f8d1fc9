// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"io"

	"github.com/spf13/cobra"

	"sockeye/internal/api"
	"sockeye/internal/cli/command"
	"sockeye/internal/cli/tunecmd"
	"sockeye/internal/fault"
)

func (c *commands) applyCommand() *cobra.Command {
	var candidate api.Candidate
	cmd := &cobra.Command{
		Use:   "apply [FILE]",
		Short: "Make the agent's policy file true, or another one",
		Long: `Apply reads the agent's policy file again and changes what differs; sockeye plan
shows it first. An error in the file changes nothing. Apply --previous goes
back to the policy before the last apply; the file is left as it is.

Apply FILE makes another policy file true, until the next apply or the agent's
next start: the agent's own file is left as it is, and sockeye status tells that
it differs from what is in force.

Rules of tune are for new connections. With --live the open ones get them too,
as far as an open connection can be changed; sockeye tune revert takes it back.`,
		Args: command.Arguments(0, 1, ""),
		RunE: func(cmd *cobra.Command, args []string) error {
			if candidate.Previous && len(args) > 0 {
				return fault.Usage(errors.New("--previous and FILE do not go together"), "usage: "+cmd.UseLine())
			}
			if len(args) == 1 {
				live := candidate.Live
				var err error
				if candidate, err = candidateOf(args[0]); err != nil {
					return err
				}
				candidate.Live = live
			}
			var plan api.Plan
			if err := c.Client().Post(cmd.Context(), "/v1/apply", candidate, &plan); err != nil {
				return err
			}
			return c.Show(&plan, func(w io.Writer) {
				changes(w, plan.Changes, "nothing changed")
				if plan.Live != nil {
					tunecmd.WriteLive(w, plan.Live)
				}
			})
		},
	}
	cmd.Flags().BoolVar(&candidate.Previous, "previous", false, "go back to the policy before the last apply")
	cmd.Flags().BoolVar(&candidate.Live, "live", false, "tune connections that are open, too")
	return cmd
}
