// SPDX-License-Identifier: Apache-2.0

package bigtcpcmd

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"sockeye/internal/bigtcp/netif"
	"sockeye/internal/bigtcp/sizing"
	"sockeye/internal/cli/command"
	"sockeye/internal/fault"
)

// Reverted is the output of bigtcp revert.
type Reverted struct {
	Reverted []sizing.Reverted `json:"reverted"`
	// Error, Hint and Code describe the sizes that were not reverted.
	Error string `json:"error,omitempty"`
	Hint  string `json:"hint,omitempty"`
	Code  int    `json:"code,omitempty"`
}

func (c *commands) bigtcpRevertCommand() *cobra.Command {
	var (
		where bigtcpPlace
		force bool
	)
	cmd := &cobra.Command{
		Use:   "revert [INTERFACE...]",
		Short: "Restore the sizes from before bigtcp apply",
		Long: `Revert restores the previous sizes of the named interfaces and of their lower
interfaces. Without INTERFACE, it reverts all changes by bigtcp apply. It can be
called at any time, also after a crash, and removes the records of interfaces
that no longer exist.

Without --force it does not change sizes that the agent has set for its policy,
or that somebody else has changed.`,
		Example: `  sockeye bigtcp revert
  sockeye bigtcp revert eth0`,
		Args:              command.Arguments(0, -1, ""),
		ValidArgsFunction: where.interfaces,
		RunE: func(cmd *cobra.Command, args []string) error {
			done, err := bigtcpRevert(cmd, args, where, force)
			if err != nil && len(done) == 0 {
				return err
			}
			answer := Reverted{Reverted: append([]sizing.Reverted{}, done...)}
			if err != nil {
				answer.Error, answer.Hint, answer.Code = fault.Message(err), fault.Hint(err), fault.Code(err)
			}
			if failed := c.Print(answer, func(t *command.Text) { revertedText(t, &answer) }); failed != nil {
				return failed
			}
			if err != nil && c.Output == "json" {
				return &command.Reported{Err: err}
			}
			return err
		},
	}
	where.flags(cmd)
	cmd.Flags().BoolVar(&force, "force", false, "also restore sizes that somebody else has changed and, of the named interfaces, sizes that the agent has set")
	return cmd
}

func bigtcpRevert(cmd *cobra.Command, names []string, where bigtcpPlace, force bool) ([]sizing.Reverted, error) {
	store, err := sizing.OpenStore(where.state)
	if err != nil {
		return nil, err
	}
	records, err := store.Records()
	if err != nil {
		return nil, err
	}
	chosen := func(r sizing.Record) bool { return r.Owner != sizing.ByPolicy }
	if len(names) > 0 || where.netns != "" {
		if chosen, err = chooseRecords(records, names, where.netns, force); err != nil {
			return nil, err
		}
	}
	if slices.ContainsFunc(records, chosen) {
		if err := checkMaySet(); err != nil {
			return nil, err
		}
	}
	if err := cmd.Context().Err(); err != nil {
		return nil, fmt.Errorf("revert sizes: %w", err)
	}
	done, err := store.Revert(chosen, force)
	return done, flagHint(err)
}

// chooseRecords returns a function that selects the records of the named interfaces, or
// all records of a network namespace. Without force, it returns an error for records of
// the agent and for lower interfaces of other recorded interfaces.
func chooseRecords(records []sizing.Record, names []string, netns string, force bool) (func(sizing.Record) bool, error) {
	network, err := netif.OpenNamespace(netns)
	here := func(r sizing.Record) bool { return r.Netns == netns }
	switch {
	case err == nil:
		defer network.Close()
		id := network.ID()
		here = func(r sizing.Record) bool { return r.NetnsID == id }
	case !errors.Is(err, os.ErrNotExist):
		return nil, err
	}
	if len(names) == 0 {
		return func(r sizing.Record) bool { return here(r) && r.Owner != sizing.ByPolicy }, nil
	}
	var present []int
	var gone []string
	for _, name := range names {
		recorded := slices.ContainsFunc(records, func(r sizing.Record) bool { return here(r) && r.Interface == name })
		if network == nil && !recorded {
			return nil, err
		}
		if network != nil {
			i, err := network.Interface(name)
			if err == nil {
				present = append(present, i.Index)
				continue
			}
			if !recorded {
				return nil, err
			}
		}
		gone = append(gone, name)
	}
	chosen := func(r sizing.Record) bool {
		return here(r) && (slices.Contains(present, r.Index) || slices.Contains(gone, r.Interface))
	}
	if force {
		return chosen, nil
	}
	for _, r := range records {
		if !chosen(r) {
			continue
		}
		if r.Owner == sizing.ByPolicy {
			return nil, fault.Conflict(fmt.Errorf("%s was set by the agent for its policy", r.Interface),
				"remove its rule from the policy file and run sockeye apply, or use --force")
		}
		if network == nil || slices.Contains(r.For, r.Index) || slices.ContainsFunc(r.For, func(index int) bool { return slices.Contains(present, index) }) {
			continue
		}
		list, err := network.Interfaces()
		if err != nil {
			return nil, err
		}
		if above := namesOf(list, r.For); len(above) > 0 {
			return nil, fault.Conflict(fmt.Errorf("%s was set as a lower interface of %s", r.Interface, strings.Join(above, ", ")),
				"revert the upper interface, or use --force")
		}
	}
	return chosen, nil
}
