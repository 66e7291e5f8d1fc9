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
		Short: "Apply the agent's policy file, or another policy file",
		Long: `Apply reads the agent's policy file and applies its differences to the policy in
force; sockeye plan shows them. If the file has an error, nothing changes.
Apply --previous rolls back to the policy before the last apply and does not
change the file. Only the text of the policy is kept: device maps and other
files that the policy names are read as they are now.

Apply FILE applies another policy file until the next apply or the next start
of the agent. It does not change the agent's own file; sockeye status shows
that the policy in force differs from the file.

Tune rules apply to new connections. With --live they are also applied to open
connections, as far as possible; sockeye tune revert reverts these changes.`,
		Args: command.Arguments(0, 1, ""),
		RunE: func(cmd *cobra.Command, args []string) error {
			if candidate.Previous && len(args) > 0 {
				return fault.Usage(errors.New("--previous and FILE are mutually exclusive"), "usage: "+cmd.UseLine())
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
				command.WriteChanges(w, plan.Changes, "nothing changed")
				if plan.Live != nil {
					tunecmd.WriteLive(w, plan.Live)
				}
			})
		},
	}
	cmd.Flags().BoolVar(&candidate.Previous, "previous", false, "roll back to the policy before the last apply")
	cmd.Flags().BoolVar(&candidate.Live, "live", false, "also apply tune rules to open connections")
	return cmd
}
