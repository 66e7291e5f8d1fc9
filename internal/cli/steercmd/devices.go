// SPDX-License-Identifier: Apache-2.0

package steercmd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"sockeye/internal/api"
	"sockeye/internal/cli/command"
	"sockeye/internal/fault"
	"sockeye/internal/format"
)

func (c *commands) devicesCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "devices",
		Short: "List devices with their slots and counters",
		Long: `Devices lists the source addresses of received traffic with their slots and
counters, at most track_devices of the policy. When half of the table is full,
as in a flood of forged sources, the kernel adds new sources slowly. SESSIONS
counts the open TCP connections. SPLIT marks a device with a session at another
member than the one that receives its datagrams, and is followed by the slots of
its sessions (? for a process that is not a member).
DROPPED counts datagrams that the member's receive buffer had no space for,
since the start of the agent; the column appears with the first one (Linux 6.10
or later).

With --missing, the command lists the expected devices that do not send, or send
only one of TCP and UDP: a device sends TCP while it has a connection, and UDP
if it has sent a datagram in the last 10 minutes. The expected devices are those
of the device map, and others that the agent has learned: those with a
connection, and those that have sent datagrams for 10 minutes. The agent forgets
a learned device that has been silent for 30 days.`,
		Example: `  sockeye devices --service telemetry
  sockeye devices --missing`,
	}
	query := serviceFlag(cmd)
	missing := cmd.Flags().Bool("missing", false, "list the expected devices that do not send, or send only one stream")
	limit := cmd.Flags().Int("limit", api.DefaultMissing, "maximum number of devices of a service, with --missing")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if *missing {
			q := query()
			q.Set("limit", strconv.Itoa(*limit))
			return c.missing(cmd.Context(), q)
		}
		if cmd.Flags().Changed("limit") {
			return fault.Usage(errors.New("--limit requires --missing"), "usage: "+cmd.UseLine())
		}
		var devices []api.DeviceStatus
		if err := c.Client().Get(cmd.Context(), "/v1/devices", query(), &devices); err != nil {
			return err
		}
		return c.Show(devices, func(w io.Writer) {
			if len(devices) == 0 {
				fmt.Fprintln(w, "no devices seen yet (a service with track_devices off records no devices)")
				return
			}
			// The column is there only if it says something.
			anyDropped := slices.ContainsFunc(devices, func(d api.DeviceStatus) bool { return d.Dropped != nil && *d.Dropped > 0 })
			column := func(text string) string {
				if anyDropped {
					return text + "\t"
				}
				return ""
			}
			fmt.Fprintln(w, "SERVICE\tADDRESS\tDEVICE\tSLOT\tLAST SLOT\tSESSIONS\tCONNECTIONS\tDATAGRAMS\tREFUSED\t"+column("DROPPED")+"LAST SEEN")
			for _, d := range devices {
				served := "-"
				if d.LastSlot != nil {
					served = fmt.Sprint(*d.LastSlot)
				}
				slot := fmt.Sprint(d.Slot)
				if d.Pinned {
					slot += " pinned"
				}
				dropped := "-"
				if d.Dropped != nil {
					dropped = fmt.Sprint(*d.Dropped)
				}
				fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\t%d\t%d\t%d\t%s%s ago\n", d.Service, d.Address, command.OrDash(d.Device), slot,
					served, sessions(&d), d.Connections, d.Datagrams, d.Refused, column(dropped), max(0, c.Now().Sub(d.LastSeen)).Round(time.Second))
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

// missing shows the expected devices that do not send all streams.
func (c *commands) missing(ctx context.Context, q url.Values) error {
	var list []api.Missing
	if err := c.Client().Get(ctx, "/v1/missing", q, &list); err != nil {
		return err
	}
	return c.Show(list, func(w io.Writer) {
		any := false
		for i := range list {
			m := &list[i]
			for j := range m.Devices {
				if !any {
					fmt.Fprintln(w, "SERVICE\tDEVICE\tADDRESS\tSLOT\tMISSING\tSINCE\tLAST SEEN")
				}
				any = true
				c.writeMissing(w, m.Service, &m.Devices[j])
			}
		}
		for i := range list {
			if any || i > 0 {
				fmt.Fprintln(w)
			}
			m := &list[i]
			fmt.Fprintf(w, "%s: %d of %s missing\n", m.Service, m.Missing, format.Count(m.Expected, "expected device is", "expected devices are"))
			if m.Omitted > 0 {
				fmt.Fprintf(w, "%d of them are not listed\nhint: --limit %d lists more\n", m.Omitted, min(m.Missing, api.MostMissing))
			}
			if m.Problem != "" {
				fmt.Fprintf(w, "%s: %s\n", m.Service, m.Problem)
			}
		}
	})
}

// writeMissing writes the row of a device.
func (c *commands) writeMissing(w io.Writer, service string, d *api.MissingDevice) {
	address := d.Prefix
	if d.Address != nil {
		address = d.Address.String()
	}
	ago := func(times ...*time.Time) string {
		var last time.Time
		for _, t := range times {
			if t != nil && t.After(last) {
				last = *t
			}
		}
		if last.IsZero() {
			return "never"
		}
		return age(c.Now(), last) + " ago"
	}
	since := ago(d.Since)
	if since == "never" {
		since = "always"
	}
	fmt.Fprintf(w, "%s\t%s\t%s\t%d\t%s\t%s\t%s\n", service, command.OrDash(d.Device), address, d.Slot, strings.Join(d.Missing, ","),
		since, ago(d.LastConnection, d.LastDatagram))
}
