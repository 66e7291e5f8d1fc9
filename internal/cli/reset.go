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
	// Reverted are the interfaces that have the sizes from before again.
	Reverted []string `json:"reverted"`
}

func (c *command) resetCommand() *cobra.Command {
	var pins, stateDir string
	cmd := &cobra.Command{
		Use:   "reset",
		Short: "Stop steering, tuning and tracing, and take BIG TCP back: remove all pins, programs and keepers",
		Long: `Reset undoes what agents did to the host, of whatever version they were: it
takes the programs off the members' ports, which the kernel's own hash then
serves, ends tuning, and removes the pins and the cgroups that were made for
it. Open connections keep what was set on them. Interfaces get the sizes back
that they had before bigtcp, of agents and commands. No agent may run. The
state directory, with the nonce, stays.`,
		RunE: func(*cobra.Command, []string) error {
			removed, err := agent.Reset(pins)
			if err != nil {
				return err
			}
			reverted, err := agent.RevertSizes(stateDir)
			if err != nil {
				return err
			}
			if !removed {
				pins = ""
			}
			return c.show(&removal{pins, reverted}, func(w io.Writer) {
				if removed {
					fmt.Fprintln(w, "removed", pins)
				}
				if len(reverted) > 0 {
					fmt.Fprintln(w, "took the sizes back of", some(reverted, 8))
				}
				if !removed && len(reverted) == 0 {
					fmt.Fprintln(w, "there was nothing to remove")
				}
			})
		},
	}
	cmd.Flags().StringVar(&pins, "pins", defaultPins, "directory of the pins, in a bpffs")
	cmd.Flags().StringVar(&stateDir, "state-dir", defaultStateDir, "directory of what was there before bigtcp")
	return cmd
}
