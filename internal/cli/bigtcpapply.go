// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"slices"

	"github.com/spf13/cobra"

	"sockeye/internal/bigtcp/sizing"
)

func (c *command) bigtcpApplyCommand() *cobra.Command {
	var request bigtcpRequest
	cmd := &cobra.Command{
		Use:   "apply [INTERFACE...]",
		Short: "Set how large packets may be inside this host",
		Long: `Apply sets how large packets may be on the interfaces named and on the devices
below them: all of them, or none if one fails or the command is interrupted.
What was there before is kept in the state directory, for bigtcp revert; nothing
outlives a reboot. Without INTERFACE it sets what the bigtcp section of the
policy file says, once and without an agent.

A size that a device does not take is bounded, and that is told. What somebody
else has changed since, and what the agent set, is refused without --force.

It is for new connections: those that are open keep their size until their route
is looked up again.`,
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
			// What would be refused is refused before the first change.
			if _, err := aims.plan(&request); err != nil {
				return err
			}
			if err := cmd.Context().Err(); err != nil {
				return fmt.Errorf("set sizes: %w", err)
			}
			// An interrupt does not end what follows.
			changes, err := aims.apply(&request)
			if err != nil {
				return err
			}
			return c.bigtcpChanged(bigtcpChanges{changes, skipped, []string{}}, "changed")
		},
	}
	request.flags(cmd)
	return cmd
}

// apply reaches all aims, each of them whole or not at all.
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
			return nil, fmt.Errorf("%w; what was set in other network namespaces before stays, until sockeye bigtcp revert", err)
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
