// SPDX-License-Identifier: Apache-2.0

package steercmd

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"sockeye/internal/api"
	"sockeye/internal/cli/command"
	"sockeye/internal/fault"
	"sockeye/internal/format"
)

func (c *commands) moveCommand() *cobra.Command {
	var m api.DeviceMove
	cmd := &cobra.Command{
		Use:   "move DEVICE SLOT|home [--for DURATION] | --all home [--service S]",
		Short: "Pin a device to a slot, or return it to its own slot",
		Long: `Move pins a device to a slot: all its TCP and UDP traffic is steered to that
slot, and its sessions at another member are closed. DEVICE is a name of the
device map, or an address or a prefix that the device map does not name. Of
several prefixes, the longest applies.

Move DEVICE home removes the pin. Move --all home removes all pins, also those
of sockeye rebalance. With --for, the pin ends after a time. Pins survive
restarts of the agent and reboots; sockeye slots lists them. The pins of a slot
that drains are not applied until the slot is ready again.`,
		Example: `  sockeye move 192.0.2.7 3
  sockeye move edge-router-1 0 --for 2h
  sockeye move 192.0.2.7 home
  sockeye move --all home`,
		Args: command.Arguments(1, 2, "DEVICE SLOT|home"),
	}
	period := cmd.Flags().String("for", "", "time until the pin ends; default: no end")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		to := args[len(args)-1]
		switch {
		case m.All && (len(args) > 1 || to != "home"):
			return fault.Usage(errors.New("--all requires home"), "as in sockeye move --all home")
		case !m.All && len(args) < 2:
			return fault.Usage(errors.New("no slot given"), "usage: "+cmd.UseLine())
		case !m.All:
			m.Device = args[0]
		}
		if to != "home" {
			slot, err := parseSlot(to)
			if err != nil {
				return fault.WithHint(err, "a number, as sockeye slots lists them, or home")
			}
			m.Slot = &slot
		}
		duration, err := command.Interval(cmd, "for")
		if err != nil {
			return err
		}
		if duration > 0 && duration < time.Second {
			return fault.Usage(fmt.Errorf("--for is %q", *period), "1s or more, as in 2h")
		}
		m.For = int64(duration / time.Second)
		var plan api.Plan
		if err := c.Client().Post(cmd.Context(), "/v1/move", m, &plan); err != nil {
			return err
		}
		return c.showChanges(&plan, m.DryRun)
	}
	cmd.Flags().StringVar(&m.Service, "service", "", "service; optional if there is only one")
	cmd.ValidArgsFunction = c.complete(c.deviceNames, c.slotsAnd("home"))
	c.CompleteService(cmd)
	cmd.Flags().BoolVar(&m.All, "all", false, "remove all pins, with home")
	cmd.Flags().BoolVar(&m.DryRun, "dry-run", false, "show the effect and change nothing")
	return cmd
}

func (c *commands) movesCommand() *cobra.Command {
	var wait, cancel, resume bool
	cmd := &cobra.Command{
		Use:   "moves [--wait | --cancel | --resume] [--service S]",
		Short: "Show, stop or continue the moves of devices between slots",
		Long: `Moves shows the devices that move to other slots: those that are done, those
that run (they connect and send their initial dump to the new member), and those
that wait for their turn (pace in the policy). A slot without a member blocks
the moves to it.

With --cancel, the remaining devices stay where they are until --resume or the
next change, also after a restart of the agent. Moves that were not cancelled
continue after a restart.`,
		Args: command.Arguments(0, 0, ""),
	}
	service := cmd.Flags().String("service", "", "service; optional for one service, and for showing all")
	timeout := cmd.Flags().String("timeout", "", "maximum time to wait, with --wait; default: no limit")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		limit, err := command.Interval(cmd, "timeout")
		if err != nil {
			return err
		}
		if wait && cancel || wait && resume || cancel && resume {
			return fault.Usage(errors.New("--wait, --cancel and --resume are mutually exclusive"), "usage: "+cmd.UseLine())
		}
		if limit > 0 && !wait {
			return fault.Usage(fmt.Errorf("--timeout %s requires --wait", *timeout), "usage: "+cmd.UseLine())
		}
		if cancel || resume {
			var status api.MovesStatus
			if err := c.Client().Post(cmd.Context(), "/v1/moves", api.MovesRequest{Service: *service, Stop: cancel}, &status); err != nil {
				return err
			}
			return c.Show(&status, func(w io.Writer) { writeMoves(w, []api.MovesStatus{status}) })
		}
		if wait {
			err := c.waitFor(cmd.Context(), limit, func() (string, error) {
				left, _, err := c.moving(cmd.Context(), *service)
				return left, err
			})
			if err != nil {
				return err
			}
		}
		var list []api.MovesStatus
		if err := c.Client().Get(cmd.Context(), "/v1/moves", ofService(*service), &list); err != nil {
			return err
		}
		return c.Show(list, func(w io.Writer) { writeMoves(w, list) })
	}
	c.CompleteService(cmd)
	cmd.Flags().BoolVar(&wait, "wait", false, "wait until no devices move")
	cmd.Flags().BoolVar(&cancel, "cancel", false, "stop the moves")
	cmd.Flags().BoolVar(&resume, "resume", false, "continue the moves")
	return cmd
}

// barWidth is the width of a progress bar in characters.
const barWidth = 30

func writeMoves(w io.Writer, list []api.MovesStatus) {
	if len(list) == 0 {
		fmt.Fprintln(w, "there are no services")
	}
	for i := range list {
		m := &list[i]
		if m.State == "none" {
			fmt.Fprintf(w, "%s: no devices move\n", m.Service)
			continue
		}
		if total := m.Done + len(m.Running) + m.Waiting; total > 0 {
			full := barWidth * m.Done / total
			fmt.Fprintf(w, "%s: [%s%s] %s\n", m.Service, strings.Repeat("#", full), strings.Repeat("-", barWidth-full), describeMoves(m))
		} else if len(m.Blocked) == 0 || m.State == "stopped" {
			fmt.Fprintf(w, "%s: %s\n", m.Service, describeMoves(m))
		}
		for _, b := range m.Blocked {
			fmt.Fprintf(w, "%s: slot %d %s; %s of the devices stay where they are\n", m.Service, b.Slot, b.Reason, command.Percentage(b.Share))
		}
		for j, d := range m.Running {
			if j == 0 {
				fmt.Fprintln(w, "DEVICE\tTO SLOT\tSINCE\tRECEIVED\tRATE")
			}
			fmt.Fprintf(w, "%s\t%d\t%s\t%s\t%s/s\n", d.Device, d.Slot, d.Since.Format(time.TimeOnly), command.Bytes(d.Received), command.Bytes(int64(d.Rate)))
		}
	}
}

// describeMoves describes the progress in one line.
func describeMoves(m *api.MovesStatus) string {
	var parts []string
	if total := m.Done + len(m.Running) + m.Waiting; total > 0 {
		parts = append(parts, fmt.Sprintf("%d of %s done, %d running, %d waiting", m.Done, format.Count(total, "device", "devices"), len(m.Running), m.Waiting))
	}
	if len(parts) == 0 && len(m.Blocked) > 0 {
		parts = append(parts, fmt.Sprintf("slot %d %s", m.Blocked[0].Slot, m.Blocked[0].Reason))
	}
	if m.Remaining != nil {
		parts = append(parts, fmt.Sprintf("about %s left", time.Duration(*m.Remaining*float64(time.Second)).Round(time.Second)))
	}
	if m.State == "stopped" {
		parts = append(parts, "stopped; sockeye moves --resume continues")
	}
	return strings.Join(parts, "; ")
}
