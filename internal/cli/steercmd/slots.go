// SPDX-License-Identifier: Apache-2.0

package steercmd

import (
	"fmt"
	"io"
	"net/url"
	"time"

	"github.com/spf13/cobra"

	"sockeye/internal/api"
	"sockeye/internal/cli/command"
)

func (c *commands) slotsCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "slots",
		Short: "List slots with their members and counters",
		Long: `Slots lists the slots with their members and counters. The column READY shows
"waits" while packets for an empty slot wait for its next member, and "fills"
while the new member receives these packets (when_empty and takeover of the
policy).

The second table shows the waiting rooms. WAITING counts the datagrams that
wait now, DATAGRAMS the datagrams stored since the pins were created, and SYNS
the connection requests that were answered or held. REFUSED counts datagrams
that found the room full; REFUSED of the slot includes them. REPLAYED and LOST
count datagrams that were sent to a member or discarded after the wait, since
the start of the agent.`,
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
					command.Percentage(s.Share), readiness(&s), pid, s.Sessions,
					s.Connections, s.Datagrams, refused, s.Diverted, command.OrDash(command.Shorten(s.Command, 50)))
			}
			c.pins(w, slots)
			rooms(w, slots)
		})
	}
	return cmd
}

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

// readiness returns yes or no, or what becomes of the packets for an empty slot in the meantime.
func readiness(s *api.SlotStatus) string {
	switch {
	case s.Room != nil && s.Room.Filling:
		return "fills"
	case s.Room != nil && s.Room.Until != nil:
		return "waits"
	}
	return command.YesNo(s.Ready)
}

// rooms prints the waiting rooms that have received packets.
func rooms(w io.Writer, slots []api.SlotStatus) {
	heading := "\nSERVICE\tWAITING ROOM\tENDS IN\tWAITING\tDATAGRAMS\tSYNS\tREFUSED\tREPLAYED\tLOST"
	for _, s := range slots {
		r := s.Room
		if r == nil || r.Until == nil && r.Datagrams+r.Connections+r.Full == 0 {
			continue
		}
		if heading != "" {
			fmt.Fprintln(w, heading)
			heading = ""
		}
		ends := "-"
		if r.Until != nil {
			ends = time.Until(*r.Until).Round(time.Second).String()
		}
		fmt.Fprintf(w, "%s\tslot %d\t%s\t%d\t%d\t%d\t%d\t%d\t%d\n", s.Service, s.Slot, ends, r.Waiting, r.Datagrams, r.Connections, r.Full, r.Replayed, r.Lost)
	}
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
			inForce := command.YesNo(p.InForce)
			if p.Problem != "" {
				inForce += ": " + p.Problem
			}
			fmt.Fprintf(w, "%s\t%s\t%d\t%s\t%s\n", s.Service, p.Device, s.Slot, inForce, until)
		}
	}
}
