// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"sockeye/internal/api"
)

func (c *command) statusCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "status",
		Short: "Show the agent, its services, tuned and traced cgroups, sized interfaces, and what is wrong",
		RunE: func(cmd *cobra.Command, _ []string) error {
			var s api.Status
			if err := c.client().Get(cmd.Context(), "/v1/status", nil, &s); err != nil {
				return err
			}
			return c.show(&s, func(w io.Writer) { c.status(w, &s) })
		},
	}
}

func (c *command) status(w io.Writer, s *api.Status) {
	fmt.Fprintf(w, "agent %s, pid %d, up %s, policy %s\n\n", s.Version, s.PID,
		c.Now().Sub(s.Started).Round(time.Second), s.Policy)
	if s.PolicyProblem != "" {
		fmt.Fprintln(w, s.PolicyProblem)
		hint(w, s.PolicyHint)
		fmt.Fprintln(w)
	}
	if len(s.Services) > 0 {
		fmt.Fprintln(w, "SERVICE\tSTEERING\tREADY\tWHEN EMPTY\tHELD\tLISTENERS")
	}
	for _, v := range s.Services {
		fmt.Fprintf(w, "%s\t%s\t%d of %d\t%s\t%s\t%s\n", v.Name, v.Steering, v.Ready, v.Slots,
			v.WhenEmpty, yesNo(v.Held), some(v.Listeners, 4))
	}
	for _, v := range s.Services {
		if v.DeviceMap != nil {
			fmt.Fprintf(w, "\n%s: device map %s, %s of %s\n", v.Name, v.DeviceMap.Path,
				count(v.DeviceMap.Prefixes, "prefix", "prefixes"), count(v.DeviceMap.Devices, "device", "devices"))
		}
		if v.Problem != "" {
			fmt.Fprintf(w, "\n%s: %s\n", v.Name, v.Problem)
			hint(w, v.Hint)
		}
		for _, m := range v.Waiting {
			fmt.Fprintf(w, "\n%s: process %d (%s) is not ready: %s\n", v.Name, m.PID, shorten(m.Command, 50), m.Problem)
			hint(w, m.Hint)
		}
		for _, r := range v.Refused {
			fmt.Fprintf(w, "\n%s: process %d (%s) is refused as a member: %s\n", v.Name, r.PID, shorten(r.Command, 50), r.Problem)
			hint(w, r.Hint)
		}
	}
	for i, t := range s.Tune {
		if i == 0 && len(s.Services) > 0 {
			fmt.Fprintln(w)
		}
		if i == 0 {
			fmt.Fprintln(w, "TUNED CGROUP\tRULES\tATTACHED")
		}
		fmt.Fprintf(w, "%s\t%d\t%s\n", t.Cgroup, t.Rules, yesNo(t.Attached))
	}
	for i, t := range s.Trace {
		if i == 0 && len(s.Services)+len(s.Tune) > 0 {
			fmt.Fprintln(w)
		}
		if i == 0 {
			fmt.Fprintln(w, "TRACED CGROUP\tRULES\tATTACHED")
		}
		fmt.Fprintf(w, "%s\t%d\t%s\n", t.Cgroup, len(t.Rules), yesNo(t.Attached))
	}
	c.sized(w, s)
	for _, t := range s.Tune {
		if t.Problem != "" {
			fmt.Fprintf(w, "\n%s: %s\n", t.Cgroup, t.Problem)
			hint(w, t.Hint)
		}
	}
	for _, t := range s.Trace {
		if t.Problem != "" {
			fmt.Fprintf(w, "\n%s: %s\n", t.Cgroup, t.Problem)
			hint(w, t.Hint)
		}
	}
}

// sized shows what the bigtcp rules have come to, by network namespace.
func (c *command) sized(w io.Writer, s *api.Status) {
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
			hint(w, n.Hint)
			continue
		}
		for _, i := range n.Problems {
			name := i.Interface
			if n.Netns != "" {
				name += " of " + n.Netns
			}
			fmt.Fprintf(w, "\n%s: %s: %s\n", name, i.State, i.Problem)
			hint(w, i.Hint)
		}
		if more := n.Changed + n.Impossible + n.Conflict + n.Waiting - len(n.Problems); more > 0 && len(n.Problems) > 0 {
			fmt.Fprintf(w, "\nand %d more\n", more)
		}
	}
}

// networkName names a network namespace in a table.
func networkName(path string) string {
	if path == "" {
		return "this network namespace"
	}
	return path
}

// some lists the first of many things, and says how many more there are.
func some(list []string, most int) string {
	if len(list) <= most {
		return strings.Join(list, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(list[:most-1], ", "), len(list)-most+1)
}
