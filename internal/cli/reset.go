// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"sockeye/internal/agent"
)

// removal is the answer of reset -o json.
type removal struct {
	Removed string `json:"removed"`
}

func (c *command) resetCommand() *cobra.Command {
	var pins string
	cmd := &cobra.Command{
		Use:   "reset",
		Short: "Stop steering and tuning: remove all pins, programs and keepers",
		Long: `Reset undoes what agents did to the host, of whatever version they were: it
takes the programs off the members' ports, which the kernel's own hash then
serves, ends tuning, and removes the pins and the cgroups that were made for
it. Open connections keep what was set on them. No agent may run. The state
directory, with the nonce, stays.`,
		RunE: func(*cobra.Command, []string) error {
			removed, err := agent.Reset(pins)
			if err != nil {
				return err
			}
			if !removed {
				pins = ""
			}
			return c.show(removal{pins}, func(w io.Writer) {
				if removed {
					fmt.Fprintln(w, "removed", pins)
				} else {
					fmt.Fprintln(w, "there was nothing to remove")
				}
			})
		},
	}
	cmd.Flags().StringVar(&pins, "pins", defaultPins, "directory of the pins, in a bpffs")
	return cmd
}
