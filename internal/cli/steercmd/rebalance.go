// SPDX-License-Identifier: Apache-2.0

package steercmd

import (
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"sockeye/internal/api"
	"sockeye/internal/cli/command"
	"sockeye/internal/fault"
	"sockeye/internal/format"
)

// maxMeasure is the maximum time of a measurement: the agent answers within a minute.
const maxMeasure = 45 * time.Second

func (c *commands) rebalanceCommand() *cobra.Command {
	var r api.RebalanceRequest
	cmd := &cobra.Command{
		Use:   "rebalance [--apply] [--measure DURATION] [--service S]",
		Short: "Propose moves of devices that even out the load of the slots",
		Long: `Rebalance measures the datagrams and the TCP bytes of each device for some
seconds, and proposes the fewest moves of devices that even out the load of the
slots according to their weights. The load of a device is the mean of its share
of the datagrams and its share of the bytes. Devices that are pinned already do
not move.

With --apply, the devices are pinned to the proposed slots, as by sockeye move.`,
		Args: command.Arguments(0, 0, ""),
	}
	measure := cmd.Flags().String("measure", "5s", "time of the measurement, 1s to 45s")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		duration, err := time.ParseDuration(*measure)
		if err != nil || duration < time.Second || duration > maxMeasure {
			return fault.Usage(fmt.Errorf("--measure is %q", *measure), "1s to 45s, as in 10s")
		}
		r.Seconds = duration.Seconds()
		var list []api.Rebalance
		if err := c.Client().Post(cmd.Context(), "/v1/rebalance", r, &list); err != nil {
			return err
		}
		return c.Show(list, func(w io.Writer) { writeRebalance(w, list, r.Apply) })
	}
	cmd.Flags().StringVar(&r.Service, "service", "", "service; optional if there is only one")
	c.CompleteService(cmd)
	cmd.Flags().BoolVar(&r.Apply, "apply", false, "pin the devices to the proposed slots")
	return cmd
}

func writeRebalance(w io.Writer, list []api.Rebalance, applied bool) {
	for i := range list {
		r := &list[i]
		fmt.Fprintf(w, "%s: %s datagrams/s, %s/s of TCP, %s\n", r.Service, command.Digits(r.Datagrams), command.Bytes(int64(r.Bytes)), format.Count(r.Devices, "device", "devices"))
		fmt.Fprintln(w, "SLOT\tFAIR SHARE\tLOAD\tLOAD AFTER")
		for _, s := range r.Slots {
			fmt.Fprintf(w, "%d\t%s\t%s\t%s\n", s.Slot, command.Percentage(s.Fair), command.Percentage(s.Before), command.Percentage(s.After))
		}
		if len(r.Moves) == 0 {
			fmt.Fprintln(w, "\nno move of a device makes the load more even")
			continue
		}
		heading := "\nDEVICE\tFROM\tTO\tLOAD"
		if applied {
			heading = "\nPINNED DEVICE\tFROM\tTO\tLOAD"
		}
		fmt.Fprintln(w, heading)
		for _, m := range r.Moves {
			fmt.Fprintf(w, "%s\t%d\t%d\t%s\n", m.Device, m.From, m.To, command.Percentage(m.Load))
		}
	}
}
