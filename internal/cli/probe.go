// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"

	"github.com/spf13/cobra"

	"sockeye/internal/tune"
)

// probeCommand is what the agent starts in a cgroup to try what the kernel can
// set.
func (c *command) probeCommand() *cobra.Command {
	return &cobra.Command{
		Use:    tune.ProbeCommand,
		Short:  "Make connections on which the agent tries options",
		Hidden: true,
		RunE: func(*cobra.Command, []string) error {
			families, err := tune.ProbeConnections()
			if err != nil {
				return err
			}
			fmt.Fprintln(c.Out, families)
			return nil
		},
	}
}
