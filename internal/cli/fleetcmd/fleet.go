// SPDX-License-Identifier: Apache-2.0

// Package fleetcmd implements the commands sockeye fleet, sockeye host and sockeye health.
package fleetcmd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"sockeye/internal/api"
	"sockeye/internal/cli/command"
	"sockeye/internal/fault"
)

// commands has the state of one invocation.
type commands struct{ *command.Command }

// New returns the commands.
func New(c *command.Command) []*cobra.Command {
	f := &commands{c}
	return []*cobra.Command{f.fleetCommand(), f.hostCommand(), f.healthCommand()}
}

func (c *commands) fleetCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "fleet",
		Short: "Show the hosts that share the devices",
		Long: `Fleet shows the hosts of the fleet, as this host knows them: the state that the
operator has set, whether the host renews its lease and its services can serve
devices, its share of the devices, the epoch of its table, with "behind" if
there is a newer one, and how this host reaches it. The second table counts the
packets to the services that this host has received, by outcome:

  local          this host serves the device
  forwarded      sent to the host that serves the device
  second_chance  no socket here: sent to the other host of a device that moves
  disagreed      another host sent the packet here in error; it was served

Packets that no host can serve are dropped: no_table, no_owner, ttl,
unreachable; and those of strangers: untrusted.`,
		Args: command.Arguments(0, 0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			var s api.FleetStatus
			if err := c.Client().Get(cmd.Context(), "/v1/fleet", nil, &s); err != nil {
				return err
			}
			return c.Show(&s, func(w io.Writer) { writeFleet(w, &s) })
		},
	}
}

func writeFleet(w io.Writer, s *api.FleetStatus) {
	connected := s.Store
	switch {
	case s.Connected:
	case s.Store == "file":
		connected += " is refused"
	default:
		connected += " does not answer"
	}
	fmt.Fprintf(w, "fleet %s, this host %s, epoch %d, %s", s.Fleet, s.Host, s.Epoch, connected)
	if s.Leader != "" {
		fmt.Fprintf(w, ", leader %s", s.Leader)
	}
	if s.Moving > 0 {
		fmt.Fprintf(w, ", %d buckets move", s.Moving)
	}
	if !s.Healthy {
		fmt.Fprintf(w, "\nthis host is not healthy: %s", command.Printable(s.Reason))
	}
	fmt.Fprint(w, "\n\n")
	if len(s.Hosts) > 0 {
		fmt.Fprintln(w, "HOST\tSTATE\tALIVE\tCAN SERVE\tWEIGHT\tSHARE\tEPOCH\tPATH\tADDRESSES")
	}
	for _, h := range s.Hosts {
		epoch := "-" // a dead host says nothing
		if h.Alive {
			epoch = strconv.FormatUint(h.Epoch, 10)
		}
		if h.Behind {
			epoch += " (behind)"
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%d\t%.1f %%\t%s\t%s\t%s\n", command.Printable(h.Name), h.State, command.YesNo(h.Alive), command.YesNo(h.Healthy),
			h.Weight, 100*h.Share, epoch, h.Path, command.OrDash(strings.Join(h.Addresses, " ")))
	}
	fmt.Fprintln(w, "\nPACKETS AT THIS HOST\tCOUNT")
	for _, outcome := range []string{"local", "forwarded", "second_chance", "disagreed", "no_table", "no_owner", "ttl", "unreachable", "untrusted"} {
		if n := s.Packets[outcome]; n > 0 || outcome == "local" || outcome == "forwarded" {
			fmt.Fprintf(w, "%s\t%d\n", outcome, n)
		}
	}
	for i, problem := range s.Problems {
		if i == 0 {
			fmt.Fprintln(w)
		}
		fmt.Fprintln(w, command.Printable(problem))
	}
}

func (c *commands) hostCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "host",
		Short: "Change the state or the weight of a host of the fleet",
	}
	cmd.AddCommand(c.hostSetCommand())
	return cmd
}

func (c *commands) hostSetCommand() *cobra.Command {
	var change api.FleetHostChange
	var weight int
	cmd := &cobra.Command{
		Use:   "set HOST [ready|drain|maint|removed] [--weight N]",
		Short: "Set the state or the weight of a host of the fleet",
		Long: `Set gives a host of the fleet a state, or a weight, or both:

  ready    the host serves its share of the devices (the default)
  drain    the devices of the host move to the other hosts, some at a time
  maint    the host keeps its devices, and gets no others
  removed  the host is no longer part of the fleet: its devices move, at once
           if the host does not run

The weight determines the share of the devices relative to the weights of the
other hosts; 0 stands for the weight in the policy of the host. The change is
made in etcd, so any host of the fleet can make it, for itself or for another
one; with a file of hosts, edit the file instead. sockeye fleet shows how the
devices move.`,
		Example: `  sockeye host set collector2 drain
  sockeye host set collector2 ready
  sockeye host set collector3 --weight 200 --dry-run`,
		Args: command.Arguments(1, 2, "HOST [STATE]"),
	}
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		change.Host = args[0]
		if len(args) == 2 {
			change.State = args[1]
		}
		if cmd.Flags().Changed("weight") {
			change.Weight = &weight
		}
		if change.State == "" && change.Weight == nil {
			return fault.Usage(errors.New("neither a state nor a weight is given"), "usage: "+cmd.UseLine())
		}
		var plan api.Plan
		if err := c.Client().Post(cmd.Context(), "/v1/fleet/host", change, &plan); err != nil {
			return err
		}
		none := "nothing changed"
		if change.DryRun {
			none = "nothing would change"
		}
		return c.Show(&plan, func(w io.Writer) { command.WriteChanges(w, plan.Changes, none) })
	}
	cmd.Flags().IntVar(&weight, "weight", 0, "weight of the host, 1 to 1000; 0: that of its policy")
	cmd.Flags().BoolVar(&change.DryRun, "dry-run", false, "show the effect and change nothing")
	return cmd
}

// healthPatience is the time in which an agent must tell whether it is healthy: devices must not wait for the answer.
const healthPatience = 5 * time.Second

func (c *commands) healthCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "health",
		Short: "Report whether routers should send packets to this host",
		Long: `Health exits with 0 while routers should send packets for the services to this
host, and with 1 otherwise. A routing daemon announces the addresses as
long as the exit code is 0.

In a fleet, a host is healthy from the moment at which it has devices until the
last one has moved away, while its services have ready slots. A host that gets
no answer from etcd stays healthy: it serves what the last table gives it.
Without a fleet, a host is healthy while all services have ready slots. An agent
that does not answer within five seconds is not healthy.`,
		Args: command.Arguments(0, 0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			var h api.Health
			ctx, cancel := context.WithTimeout(cmd.Context(), healthPatience)
			defer cancel()
			if err := c.Client().Get(ctx, "/v1/health", nil, &h); err != nil {
				return err
			}
			text := "healthy"
			if !h.Healthy {
				text = "not healthy: " + command.Printable(h.Reason)
			}
			if err := c.Show(&h, func(w io.Writer) { fmt.Fprintln(w, text) }); err != nil || h.Healthy {
				return err
			}
			return &command.Reported{Err: errors.New("not healthy: " + h.Reason)}
		},
	}
}
