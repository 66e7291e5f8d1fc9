// SPDX-License-Identifier: Apache-2.0

package bigtcpcmd

import (
	"fmt"
	"slices"

	"github.com/spf13/cobra"

	"sockeye/internal/bigtcp/sizing"
)

func (c *commands) bigtcpApplyCommand() *cobra.Command {
	var request bigtcpRequest
	cmd := &cobra.Command{
		Use:   "apply [INTERFACE...]",
		Short: "Set GSO and GRO maximum sizes (BIG TCP)",
		Long: `Apply sets the GSO and GRO maximum sizes of the named interfaces and of their
lower interfaces. If one interface fails or the command is interrupted, it
changes none. The previous sizes are recorded in the state directory for bigtcp
revert; sizes do not survive a reboot. Without INTERFACE it applies the bigtcp
section of the policy file once; no agent is needed.

Sizes are limited to tso_max_size of the interface; the output has a note if a
size was reduced. Without --force, apply does not change sizes that the agent
has set, or that somebody else has changed.

Only new connections use the new sizes. Open connections keep their size until
the kernel looks up their route again.`,
		Example: `  sockeye bigtcp apply eth0
  sockeye bigtcp apply veth1 veth2 --ipv6 192KB
  sockeye bigtcp apply eth0 --ipv4 off`,
		RunE: func(cmd *cobra.Command, args []string) error {
			aims, skipped, err := request.tasks(cmd, args)
			if err != nil {
				return err
			}
			defer aims.close()
			if err := checkMaySet(); err != nil {
				return err
			}
			// Conflicts are reported before the first change.
			if _, err := aims.plan(&request); err != nil {
				return err
			}
			if err := cmd.Context().Err(); err != nil {
				return fmt.Errorf("set sizes: %w", err)
			}
			// The following steps are not interruptible.
			changes, err := aims.apply(&request)
			if err != nil {
				return err
			}
			return c.bigtcpChanged(Changes{changes, skipped, []string{}}, "changed")
		},
	}
	request.flags(cmd)
	return cmd
}

// apply applies all tasks. Each task is applied completely or not at all.
func (a bigtcpTasks) apply(r *bigtcpRequest) ([]sizing.Change, error) {
	store, err := sizing.OpenStore(r.state)
	if err != nil {
		return nil, err
	}
	all := []sizing.Change{}
	for _, aim := range a {
		changes, err := store.Apply(aim.network, sizing.ByCommand, aim.targets, r.force)
		err = flagHint(err)
		if err != nil && changesAny(all) {
			return nil, fmt.Errorf("%w; sizes that were already set in other network namespaces stay until sockeye bigtcp revert", err)
		}
		if err != nil {
			return nil, err
		}
		all = append(all, changes...)
	}
	return all, nil
}

func changesAny(changes []sizing.Change) bool {
	return slices.ContainsFunc(changes, func(c sizing.Change) bool { return c.From != c.To })
}
