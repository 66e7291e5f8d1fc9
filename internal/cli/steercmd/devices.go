// SPDX-License-Identifier: Apache-2.0

package steercmd

import (
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"sockeye/internal/api"
	"sockeye/internal/cli/command"
)

func (c *commands) devicesCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "devices",
		Short: "List devices with their slots and counters",
		Long: `Devices lists the source addresses of received traffic with their slots and
counters. The kernel keeps the most recent addresses, at most track_devices of
the policy.`,
	}
	query := serviceFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		var devices []api.DeviceStatus
		if err := c.Client().Get(cmd.Context(), "/v1/devices", query(), &devices); err != nil {
			return err
		}
		return c.Show(devices, func(w io.Writer) {
			if len(devices) == 0 {
				fmt.Fprintln(w, "no devices seen yet (a service with track_devices off records no devices)")
				return
			}
			fmt.Fprintln(w, "SERVICE\tADDRESS\tDEVICE\tSLOT\tLAST SLOT\tCONNECTIONS\tDATAGRAMS\tREFUSED\tLAST SEEN")
			for _, d := range devices {
				served := "-"
				if d.LastSlot != nil {
					served = fmt.Sprint(*d.LastSlot)
				}
				fmt.Fprintf(w, "%s\t%s\t%s\t%d\t%s\t%d\t%d\t%d\t%s ago\n", d.Service, d.Address, command.OrDash(d.Device), d.Slot,
					served, d.Connections, d.Datagrams, d.Refused, max(0, c.Now().Sub(d.LastSeen)).Round(time.Second))
			}
		})
	}
	return cmd
}
