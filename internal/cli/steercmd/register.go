// SPDX-License-Identifier: Apache-2.0

// Package steercmd implements the commands for members, slots and devices: run, register, unregister, slots, slot, devices,
// where, why, move, moves and rebalance.
package steercmd

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"sockeye/internal/api"
	"sockeye/internal/cli/command"
)

// commands has the state of one invocation.
type commands struct{ *command.Command }

// New returns the commands for members, slots and devices.
func New(c *command.Command) []*cobra.Command {
	s := &commands{c}
	return []*cobra.Command{
		s.runCommand(), s.registerCommand(), s.unregisterCommand(), s.slotsCommand(), s.slotCommand(), s.devicesCommand(), s.templatesCommand(), s.whereCommand(), s.whyCommand(),
		s.moveCommand(), s.movesCommand(), s.rebalanceCommand(),
	}
}

func (c *commands) registerCommand() *cobra.Command {
	var m api.Membership
	var slot int
	cmd := &cobra.Command{
		Use:   "register --pid PID [--service S] [--slot N]",
		Short: "Register a running process as a member of a service",
		Long: `Register registers the sockets of a running process in a slot. The process must
have sockets for all listeners of the service. The process and its sockets must
belong to a user of the service.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if cmd.Flags().Changed("slot") {
				m.Slot = &slot
			}
			var got api.Membership
			if err := c.Client().Post(cmd.Context(), "/v1/register", m, &got); err != nil {
				return err
			}
			return c.Show(&got, func(w io.Writer) {
				fmt.Fprintf(w, "process %d registered in slot %d of %s\n", got.PID, *got.Slot, got.Service)
			})
		},
	}
	cmd.Flags().StringVar(&m.Service, "service", "", "service; optional if there is only one")
	cmd.Flags().IntVar(&slot, "slot", 0, "slot number; default: first free slot")
	cmd.Flags().IntVar(&m.PID, "pid", 0, "PID of the process")
	return cmd
}
