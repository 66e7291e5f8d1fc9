// SPDX-License-Identifier: Apache-2.0

package steercmd

import (
	"fmt"
	"io"
	"net/url"

	"github.com/spf13/cobra"

	"sockeye/internal/api"
	"sockeye/internal/cli/command"
)

// serviceFlag adds --service to a read-only command, and returns a function that returns the query parameters of the
// flag.
func serviceFlag(cmd *cobra.Command) func() url.Values {
	service := cmd.Flags().String("service", "", "show only this service")
	return func() url.Values {
		if *service == "" {
			return url.Values{}
		}
		return url.Values{"service": {*service}}
	}
}

func (c *commands) slotsCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "slots",
		Short: "List slots with their members and counters",
	}
	query := serviceFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		var slots []api.SlotStatus
		if err := c.Client().Get(cmd.Context(), "/v1/slots", query(), &slots); err != nil {
			return err
		}
		return c.Show(slots, func(w io.Writer) {
			if len(slots) == 0 {
				fmt.Fprintln(w, "there are no services")
				return
			}
			fmt.Fprintln(w, "SERVICE\tSLOT\tSTATE\tWEIGHT\tSHARE\tREADY\tPID\tSESSIONS\tCONNECTIONS\tDATAGRAMS\tREFUSED\tDIVERTED\tCOMMAND")
			for _, s := range slots {
				var refused uint64
				for _, n := range s.Refused {
					refused += n
				}
				pid := "-"
				if s.PID != 0 {
					pid = fmt.Sprint(s.PID)
				}
				fmt.Fprintf(w, "%s\t%d\t%s\t%d\t%s\t%s\t%s\t%d\t%d\t%d\t%d\t%d\t%s\n", s.Service, s.Slot, s.State, s.Weight,
					command.Percentage(s.Share), command.YesNo(s.Ready), pid, s.Sessions,
					s.Connections, s.Datagrams, refused, s.Diverted, command.OrDash(command.Shorten(s.Command, 50)))
			}
			c.pins(w, slots)
		})
	}
	return cmd
}

// pins prints the pinned devices.
func (c *commands) pins(w io.Writer, slots []api.SlotStatus) {
	heading := "\nSERVICE\tPINNED DEVICE\tSLOT\tIN FORCE\tUNTIL"
	for _, s := range slots {
		for _, p := range s.Pins {
			if heading != "" {
				fmt.Fprintln(w, heading)
				heading = ""
			}
			until := "-"
			if p.Until != nil {
				until = c.Clock(*p.Until)
			}
			fmt.Fprintf(w, "%s\t%s\t%d\t%s\t%s\n", s.Service, p.Device, s.Slot, command.YesNo(p.InForce), until)
		}
	}
}
