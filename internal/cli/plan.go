// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"io"
	"path/filepath"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"sockeye/internal/api"
	"sockeye/internal/cli/command"
	"sockeye/internal/config"
	"sockeye/internal/fault"
)

func (c *commands) planCommand() *cobra.Command {
	var previous bool
	cmd := &cobra.Command{
		Use:   "plan [FILE]",
		Short: "Show the changes that apply would make",
		Long: `Plan compares a policy file, by default the agent's own, with the policy in
force, and shows the changes and their effect on devices, members and
connections.`,
		Args: command.Arguments(0, 1, ""),
		RunE: func(cmd *cobra.Command, args []string) error {
			candidate := api.Candidate{Previous: previous}
			if previous && len(args) > 0 {
				return fault.Usage(errors.New("--previous and FILE are mutually exclusive"), "usage: "+cmd.UseLine())
			}
			if len(args) == 1 {
				var err error
				if candidate, err = candidateOf(args[0]); err != nil {
					return err
				}
			}
			var plan api.Plan
			if err := c.Client().Post(cmd.Context(), "/v1/plan", candidate, &plan); err != nil {
				return err
			}
			return c.Show(&plan, func(w io.Writer) { command.WriteChanges(w, plan.Changes, "nothing would change") })
		},
	}
	cmd.Flags().BoolVar(&previous, "previous", false, "show the changes of apply --previous")
	return cmd
}

// candidateOf reads a policy file for the agent, because the agent may have no access to the file.
func candidateOf(file string) (candidate api.Candidate, err error) {
	text, err := config.ReadFile(file)
	if err != nil {
		return candidate, fault.Unreadable(err, "name a policy file")
	}
	if !utf8.Valid(text) {
		// JSON would replace the invalid bytes, and the agent would judge another text.
		_, err := config.Parse(text, file)
		return candidate, err
	}
	candidate.Text = string(text)
	candidate.Path, err = filepath.Abs(file)
	return candidate, err
}
