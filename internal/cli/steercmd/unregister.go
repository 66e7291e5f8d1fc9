// SPDX-License-Identifier: Apache-2.0

package steercmd

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"sockeye/internal/api"
)

func (c *commands) unregisterCommand() *cobra.Command {
	var m api.Membership
	var slot int
	cmd := &cobra.Command{
		Use:   "unregister --slot N [--service S]",
		Short: "Remove a member from its slot",
		Long: `Unregister removes the member of a slot. Afterwards the slot is empty, and the
traffic of its devices is refused, steered to the standby slot, or waits, as
when_empty of the policy says. With when_empty: reject, open connections of the
member continue. The agent does not register the process again until sockeye
register is called or the program is restarted.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if cmd.Flags().Changed("slot") {
				m.Slot = &slot
			}
			var got api.Membership
			if err := c.Client().Post(cmd.Context(), "/v1/unregister", m, &got); err != nil {
				return err
			}
			return c.Show(&got, func(w io.Writer) { fmt.Fprintf(w, "slot %d of %s is empty\n", slot, got.Service) })
		},
	}
	cmd.Flags().StringVar(&m.Service, "service", "", "service; optional if there is only one")
	cmd.Flags().IntVar(&slot, "slot", 0, "slot number")
	return cmd
}
