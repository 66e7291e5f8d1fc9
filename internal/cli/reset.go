// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"sockeye/internal/api"
	"sockeye/internal/cli/command"
	"sockeye/internal/statedir"
)

// removal is the JSON output of reset.
type removal struct {
	Removed string `json:"removed"`
	// Socket is the removed socket of an agent that was killed.
	Socket string `json:"socket,omitempty"`
	// Reverted are the interfaces with restored sizes.
	Reverted []string `json:"reverted"`
	// State is the existing state directory, and StateRemoved reports whether it was removed.
	State        string `json:"state,omitempty"`
	StateRemoved bool   `json:"state_removed"`
}

func (c *commands) resetCommand() *cobra.Command {
	var pins, stateDir string
	var state bool
	cmd := &cobra.Command{
		Use:   "reset",
		Short: "Remove all pins, BPF programs and keepers, and restore the sizes of interfaces",
		Long: `Reset reverts all changes of agents of any version. It detaches the programs
from the members' ports, after which the kernel selects sockets by its own hash.
It stops tuning and tracing, removes the pins and the cgroups that agents
created, and restores the sizes of interfaces. Open connections keep their
options until they are closed. Stop the agent before reset.

Without --state, the state directory is kept, so that the next agent assigns
each device to its previous slot.`,
		RunE: func(*cobra.Command, []string) (err error) {
			if stateDir != "" { // os.RemoveAll refuses "."
				if stateDir, err = filepath.Abs(stateDir); err != nil {
					return err
				}
			}
			if _, err := os.Stat(stateDir); state && err == nil {
				if err := statedir.CheckRemove(stateDir); err != nil {
					return err
				}
			}
			removed, dead, err := resetPins(pins, c.RunDir)
			if err != nil {
				return err
			}
			reverted := []string{}
			for _, d := range domains() {
				if d.revert != nil {
					names, err := d.revert(stateDir)
					if err != nil {
						return err
					}
					reverted = append(reverted, names...)
				}
			}
			if !removed {
				pins = ""
			}
			r := removal{Removed: pins, Reverted: reverted}
			if dead {
				r.Socket = api.SocketPath(c.RunDir)
			}
			if statedir.Is(stateDir) == nil {
				r.State = stateDir
			}
			if _, err := os.Stat(stateDir); state && err == nil {
				if err := statedir.Remove(stateDir); err != nil {
					return err
				}
				r.State, r.StateRemoved = stateDir, true
			}
			return c.Show(&r, func(w io.Writer) {
				if removed {
					fmt.Fprintln(w, "removed", pins)
				}
				if dead {
					fmt.Fprintln(w, "removed", r.Socket)
				}
				if len(reverted) > 0 {
					fmt.Fprintln(w, "restored the sizes of", some(reverted, 8))
				}
				if !removed && !dead && len(reverted) == 0 && !r.StateRemoved {
					fmt.Fprintln(w, "there was nothing to remove")
				}
				switch {
				case r.StateRemoved:
					fmt.Fprintln(w, "removed", r.State)
				case r.State != "":
					fmt.Fprintf(w, "kept %s: devices keep their slots; --state removes it\n", r.State)
				}
			})
		},
	}
	cmd.Flags().StringVar(&pins, "pins", command.DefaultPins, "pin directory, in a bpffs")
	cmd.Flags().BoolVar(&state, "state", false, "also remove the state directory")
	cmd.Flags().StringVar(&stateDir, "state-dir", command.DefaultStateDir, "persistent state directory")
	return cmd
}
