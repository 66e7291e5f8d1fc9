// SPDX-License-Identifier: Apache-2.0

package steercmd

import (
	"fmt"
	"io"
	"strings"
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
the policy. SESSIONS counts the open TCP connections. SPLIT marks a device with
a session at another member than the one that receives its datagrams, and is
followed by the slots of its sessions (? for a process that is no member).`,
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
			fmt.Fprintln(w, "SERVICE\tADDRESS\tDEVICE\tSLOT\tLAST SLOT\tSESSIONS\tCONNECTIONS\tDATAGRAMS\tREFUSED\tLAST SEEN")
			for _, d := range devices {
				served := "-"
				if d.LastSlot != nil {
					served = fmt.Sprint(*d.LastSlot)
				}
				slot := fmt.Sprint(d.Slot)
				if d.Pinned {
					slot += " pinned"
				}
				fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\t%d\t%d\t%d\t%s ago\n", d.Service, d.Address, command.OrDash(d.Device), slot,
					served, sessions(&d), d.Connections, d.Datagrams, d.Refused, max(0, c.Now().Sub(d.LastSeen)).Round(time.Second))
			}
			for i := range devices {
				if devices[i].Problem != "" {
					fmt.Fprintf(w, "\n%s: %s\n", devices[i].Service, devices[i].Problem)
					break
				}
			}
		})
	}
	return cmd
}

// sessions describes the sessions of a device.
func sessions(d *api.DeviceStatus) string {
	if !d.Split {
		return fmt.Sprint(d.Sessions)
	}
	var at []string
	for _, slot := range d.SessionSlots {
		if slot < 0 {
			at = append(at, "?")
		} else {
			at = append(at, fmt.Sprint(slot))
		}
	}
	return fmt.Sprintf("%d SPLIT at %s", d.Sessions, strings.Join(at, ","))
}
