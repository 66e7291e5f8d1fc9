// SPDX-License-Identifier: Apache-2.0

package steercmd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"strconv"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/cli/command"
	"sockeye/internal/config"
	"sockeye/internal/fault"
	"sockeye/internal/format"
)

func (c *commands) slotCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "slot",
		Short: "Change the state or the weight of a slot",
	}
	cmd.AddCommand(c.slotSetCommand())
	return cmd
}

func (c *commands) slotSetCommand() *cobra.Command {
	var change api.SlotChange
	var weight int
	var wait bool
	cmd := &cobra.Command{
		Use:   "set SLOT [ready|drain|maint] [--weight N] [--service S]",
		Short: "Set the state or the weight of a slot",
		Long: `Set gives a slot a state, in the words of HAProxy, or a weight, or both:

  ready  the slot serves its devices (the default)
  drain  the devices of the slot move to the other slots
  maint  the devices of the slot are refused, or steered to the standby slot;
         with on_move: reset, the default, their sessions are closed

The weight, 0 to 256, determines the share of the devices relative to the
weights of the other slots. The default is 100.

States and weights survive restarts of the agent and reboots. The command
sockeye slot set SLOT ready --weight 100 undoes all changes of a slot; devices
return to the slots that they had before. With pace in the policy, devices move
in batches; sockeye moves shows the progress.

With --wait, the command waits until no device moves any more and, for drain
and maint, until the member of the slot has no sessions. If --timeout passes
before, the command fails, and the moves continue.`,
		Example: `  sockeye slot set 2 drain --wait --timeout 10m
  sockeye slot set 2 ready
  sockeye slot set 0 --weight 50`,
		Args: command.Arguments(1, 2, "SLOT [STATE]"),
	}
	cmd.Flags().String("timeout", "", "maximum time to wait, with --wait; default: no limit")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		slot, err := parseSlot(args[0])
		if err != nil {
			return err
		}
		change.Slot = &slot
		if len(args) == 2 {
			change.State = args[1]
		}
		if cmd.Flags().Changed("weight") {
			change.Weight = &weight
		}
		limit, err := command.Interval(cmd, "timeout")
		if err != nil {
			return err
		}
		if limit > 0 && !wait {
			return fault.Usage(errors.New("--timeout requires --wait"), "usage: "+cmd.UseLine())
		}
		if wait && change.DryRun {
			return fault.Usage(errors.New("--wait and --dry-run are mutually exclusive"), "usage: "+cmd.UseLine())
		}
		var plan api.Plan
		if err := c.Client().Post(cmd.Context(), "/v1/slot", change, &plan); err != nil {
			return err
		}
		if wait {
			if err := c.waitForSlot(cmd.Context(), change.Service, slot, limit); err != nil {
				return err
			}
		}
		return c.showChanges(&plan, change.DryRun)
	}
	cmd.Flags().StringVar(&change.Service, "service", "", "service; optional if there is only one")
	cmd.Flags().IntVar(&weight, "weight", 0, "weight of the slot, 0 to 256")
	cmd.ValidArgsFunction = c.complete(c.slotsAnd(), words("ready", "drain", "maint"))
	c.CompleteService(cmd)
	cmd.Flags().BoolVar(&wait, "wait", false, "wait until the devices have moved")
	cmd.Flags().BoolVar(&change.DryRun, "dry-run", false, "show the effect and change nothing")
	return cmd
}

func parseSlot(text string) (int, error) {
	slot, err := strconv.Atoi(text)
	if err != nil || slot < 0 {
		return 0, fault.Usage(fmt.Errorf("%q is not a slot", text), "a number, as sockeye slots lists them")
	}
	return slot, nil
}

// showChanges prints the changes of a command.
func (c *commands) showChanges(plan *api.Plan, dryRun bool) error {
	none := "nothing changed"
	if dryRun {
		none = "nothing would change"
	}
	return c.Show(plan, func(w io.Writer) { command.WriteChanges(w, plan.Changes, none) })
}

// waitInterval is the time between two requests of a command that waits.
const waitInterval = 200 * time.Millisecond

// tellInterval is the minimum time between two messages of a command that waits.
const tellInterval = 2 * time.Second

// waitForSlot waits until no device of a service moves and, if the slot drains or is in maint, until its member has no
// sessions; with on_move: keep the sessions stay. limit 0 means no limit.
func (c *commands) waitForSlot(ctx context.Context, service string, slot int, limit time.Duration) error {
	return c.waitFor(ctx, limit, func() (string, error) {
		left, keep, err := c.moving(ctx, service)
		if err != nil || left != "" || keep {
			return left, err
		}
		var slots []api.SlotStatus
		if err := c.Client().Get(ctx, "/v1/slots", ofService(service), &slots); err != nil {
			return "", err
		}
		sessions := 0
		for _, s := range slots {
			if s.Slot == slot && s.State != "ready" {
				sessions += s.Sessions
			}
		}
		if sessions > 0 {
			return fmt.Sprintf("slot %d still has %s", slot, format.Count(sessions, "session", "sessions")), nil
		}
		return "", nil
	})
}

// moving describes the devices that move or cannot move, or returns "". keep is true if sessions stay open
// (on_move: keep).
func (c *commands) moving(ctx context.Context, service string) (left string, keep bool, err error) {
	var list []api.MovesStatus
	if err := c.Client().Get(ctx, "/v1/moves", ofService(service), &list); err != nil {
		return "", false, err
	}
	for i := range list {
		keep = keep || list[i].OnMove == string(config.KeepMoved)
		switch m := &list[i]; m.State {
		case "none":
		case "stopped":
			return "", false, fault.Conflict(fmt.Errorf("wait: the moves of %s are stopped: %s", m.Service, describeMoves(m)), "sockeye moves --resume continues them")
		default:
			return describeMoves(m), keep, nil
		}
	}
	return "", keep, nil
}

// waitFor calls left until it returns "". After limit, the error contains the text of left. Until then, its changes are printed on standard
// error, unless the output is JSON.
func (c *commands) waitFor(ctx context.Context, limit time.Duration, left func() (string, error)) error {
	began, answered := time.Now(), time.Now()
	told, said := began, ""
	for {
		text, err := left()
		switch {
		case err == nil:
			answered = time.Now()
		case isAgentGone(err) && time.Since(answered) < agentTimeout:
			text = err.Error() // another agent continues
		default:
			return err
		}
		if text == "" {
			return nil
		}
		if limit > 0 && time.Since(began) >= limit {
			return fault.WithHint(fmt.Errorf("wait: after %s, %s", limit, text), "the change is in force and the moves continue; sockeye moves shows them")
		}
		if text != said && time.Since(told) >= tellInterval && c.Output != "json" {
			told, said = time.Now(), text
			fmt.Fprintf(c.Err, "waiting: %s\n", text)
		}
		select {
		case <-ctx.Done():
			return fault.WithHint(fmt.Errorf("wait: interrupted: %s", text), "the change is in force and the moves continue; sockeye moves shows them")
		case <-time.After(waitInterval):
		}
	}
}

// isAgentGone reports whether an error means that the agent has ended, or is not there yet.
func isAgentGone(err error) bool {
	return errors.Is(err, api.ErrNoAgent) || errors.Is(err, io.EOF) || errors.Is(err, unix.ECONNRESET)
}

func ofService(service string) url.Values {
	if service == "" {
		return url.Values{}
	}
	return url.Values{"service": {service}}
}
