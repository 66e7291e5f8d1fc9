// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"io"

	"github.com/spf13/cobra"

	"sockeye/internal/agent"
)

func (c *command) applyCommand() *cobra.Command {
	var previous bool
	cmd := &cobra.Command{
		Use:   "apply",
		Short: "Make the agent's policy file true",
		Long: `Apply reads the agent's policy file again and changes what differs; sockeye plan
shows it first. An error in the file changes nothing. Apply --previous goes
back to the policy before the last apply; the file is left as it is.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var plan agent.Plan
			if err := c.client().Post(cmd.Context(), "/v1/apply", agent.Candidate{Previous: previous}, &plan); err != nil {
				return err
			}
			return c.show(plan, func(w io.Writer) { changes(w, plan.Changes, "nothing changed") })
		},
	}
	cmd.Flags().BoolVar(&previous, "previous", false, "go back to the policy before the last apply")
	return cmd
}
