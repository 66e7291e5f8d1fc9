// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"cmp"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"sockeye/internal/api"
	"sockeye/internal/cli/command"
	"sockeye/internal/format"
)

func (c *commands) statusCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "status",
		Short: "Show the agent's state and problems of services, cgroups and interfaces",
		RunE: func(cmd *cobra.Command, _ []string) error {
			var s api.Status
			if err := c.Client().Get(cmd.Context(), "/v1/status", nil, &s); err != nil {
				return err
			}
			return c.Show(&s, func(w io.Writer) { c.status(w, &s) })
		},
	}
}

// mostFleetProblems is the number of problems of the fleet that status shows.
const mostFleetProblems = 5

func (c *commands) status(w io.Writer, s *api.Status) {
	fmt.Fprintf(w, "agent %s, pid %d, up %s, policy %s\n\n", s.Version, s.PID,
		c.Now().Sub(s.Started).Round(time.Second), s.Policy)
	if s.PolicyProblem != "" {
		fmt.Fprintln(w, s.PolicyProblem)
		command.Hint(w, s.PolicyHint)
		fmt.Fprintln(w)
	}
	if s.EventsProblem != "" {
		fmt.Fprintln(w, "events are not recorded: "+command.Printable(s.EventsProblem))
		command.Hint(w, "make space in the state directory, or remove what is in the way")
		fmt.Fprintln(w)
	}
	if f := s.Fleet; f != nil {
		problems := f.Problems
		if !f.Healthy {
			problems = append([]string{"this host is not healthy: " + f.Reason}, problems...)
		}
		for i, problem := range problems {
			if i == mostFleetProblems {
				fmt.Fprintf(w, "and %d more\n", len(problems)-i)
				break
			}
			fmt.Fprintf(w, "fleet %s: %s\n", f.Fleet, command.Printable(problem))
		}
		if len(problems) > 0 {
			command.Hint(w, "sockeye fleet shows the hosts")
			fmt.Fprintln(w)
		}
	}
	if len(s.Services) > 0 {
		fmt.Fprintln(w, "SERVICE\tSTEERING\tREADY\tWHEN EMPTY\tHELD\tLISTENERS")
	}
	for _, v := range s.Services {
		fmt.Fprintf(w, "%s\t%s\t%d of %d\t%s\t%s\t%s\n", v.Name, v.Steering, v.Ready, v.Slots,
			v.WhenEmpty, command.YesNo(v.PortsSteered), some(v.Listeners, 4))
	}
	for _, v := range s.Services {
		if v.DeviceMap != nil {
			fmt.Fprintf(w, "\n%s: device map %s, %s of %s\n", v.Name, v.DeviceMap.Path,
				format.Count(v.DeviceMap.Prefixes, "prefix", "prefixes"), format.Count(v.DeviceMap.Devices, "device", "devices"))
		}
		for i, note := range v.Notes {
			if i == 0 {
				fmt.Fprintln(w)
			}
			fmt.Fprintf(w, "%s: %s\n", v.Name, note)
		}
		if v.Problem != "" {
			fmt.Fprintf(w, "\n%s: %s\n", v.Name, v.Problem)
			command.Hint(w, v.Hint)
		}
		for _, m := range v.Waiting {
			fmt.Fprintf(w, "\n%s\n", command.WaitingLine(v.Name, &m))
			command.Hint(w, m.Hint)
		}
		for _, r := range v.Refused {
			fmt.Fprintf(w, "\n%s\n", command.RefusedLine(v.Name, &r))
			command.Hint(w, r.Hint)
		}
	}
	for _, v := range s.Services {
		for _, d := range v.Drops {
			what, limit := format.Count(d.Dropped, "datagram", "datagrams"), "receive buffer "+command.Bytes(d.Limit)
			if d.Protocol == "tcp" {
				what, limit = format.Count(d.Dropped, "connection request", "connection requests"), fmt.Sprintf("backlog %d", d.Limit)
			}
			fmt.Fprintf(w, "\n%s: the kernel has dropped %s at process %d in slot %d, the last ones %s ago (%s)\n", v.Name, what, d.PID, d.Slot,
				max(0, c.Now().Sub(d.Last)).Round(time.Second), limit)
			if len(d.Devices) > 0 {
				most := &d.Devices[0]
				fmt.Fprintf(w, "most of them are of %s (%d since the start of the agent)\n", cmp.Or(most.Device, most.Address.String()), most.Dropped)
			}
			command.Hint(w, d.Hint)
		}
	}
	for i, t := range s.Tune {
		if i == 0 && len(s.Services) > 0 {
			fmt.Fprintln(w)
		}
		if i == 0 {
			fmt.Fprintln(w, "TUNED CGROUP\tRULES\tATTACHED")
		}
		fmt.Fprintf(w, "%s\t%d\t%s\n", t.Cgroup, t.Rules, command.YesNo(t.Attached))
	}
	for i, t := range s.Trace {
		if i == 0 && len(s.Services)+len(s.Tune) > 0 {
			fmt.Fprintln(w)
		}
		if i == 0 {
			fmt.Fprintln(w, "TRACED CGROUP\tRULES\tATTACHED")
		}
		fmt.Fprintf(w, "%s\t%d\t%s\n", t.Cgroup, len(t.Rules), command.YesNo(t.Attached))
	}
	c.sized(w, s)
	for _, t := range s.Tune {
		if t.Problem != "" {
			fmt.Fprintf(w, "\n%s: %s\n", t.Cgroup, t.Problem)
			command.Hint(w, t.Hint)
		}
	}
	for _, t := range s.Trace {
		if t.Problem != "" {
			fmt.Fprintf(w, "\n%s: %s\n", t.Cgroup, t.Problem)
			command.Hint(w, t.Hint)
		}
	}
}

// sized prints the state of the bigtcp rules by network namespace.
func (c *commands) sized(w io.Writer, s *api.Status) {
	for i, n := range s.BigTCP {
		if i == 0 && len(s.Services)+len(s.Tune)+len(s.Trace) > 0 {
			fmt.Fprintln(w)
		}
		if i == 0 {
			fmt.Fprintln(w, "BIG TCP IN\tRULES\tAPPLIED\tCHANGED\tIMPOSSIBLE\tCONFLICT\tWAITING")
		}
		fmt.Fprintf(w, "%s\t%d\t%d\t%d\t%d\t%d\t%d\n", networkName(n.Netns), n.Rules, n.Applied, n.Changed, n.Impossible, n.Conflict, n.Waiting)
	}
	for _, n := range s.BigTCP {
		if n.Problem != "" {
			fmt.Fprintf(w, "\n%s: %s\n", networkName(n.Netns), n.Problem)
			command.Hint(w, n.Hint)
			continue
		}
		for _, i := range n.Problems {
			name := i.Interface
			if n.Netns != "" {
				name += " of " + n.Netns
			}
			fmt.Fprintf(w, "\n%s: %s: %s\n", name, i.State, i.Problem)
			command.Hint(w, i.Hint)
		}
		if more := n.Changed + n.Impossible + n.Conflict + n.Waiting - len(n.Problems); more > 0 && len(n.Problems) > 0 {
			fmt.Fprintf(w, "\nand %d more\n", more)
		}
	}
}

// networkName returns the name of a network namespace in a table.
func networkName(path string) string {
	if path == "" {
		return "this network namespace"
	}
	return path
}

// some lists the first names and counts the others.
func some(list []string, most int) string {
	if len(list) <= most {
		return strings.Join(list, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(list[:most-1], ", "), len(list)-most+1)
}
