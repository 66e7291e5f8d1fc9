// SPDX-License-Identifier: Apache-2.0

package bigtcpcmd

import (
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/spf13/cobra"

	"sockeye/internal/bigtcp/netif"
	"sockeye/internal/bigtcp/sizing"
	"sockeye/internal/cli/command"
	"sockeye/internal/config"
	"sockeye/internal/fault"
)

// Changes is the output of bigtcp plan and bigtcp apply.
type Changes struct {
	Changes []sizing.Change `json:"changes"` // in the order in which they are made
	Skipped []Skipped       `json:"skipped"`
	// Problems are read errors.
	Problems []string `json:"problems"`
}

// Skipped is an interface or rule of the policy that is not applied.
type Skipped struct {
	Netns     string `json:"netns,omitempty"`
	Interface string `json:"interface"` // name, or the glob of the rule
	Reason    string `json:"reason"`
}

// bigtcpRequest has the flags of plan and apply.
type bigtcpRequest struct {
	bigtcpPlace
	ipv6, ipv4, policy string
	force              bool
}

// bigtcpSize is the default size of a family.
const bigtcpSize = "192KB"

func (c *commands) bigtcpPlanCommand() *cobra.Command {
	var request bigtcpRequest
	cmd := &cobra.Command{
		Use:   "plan [INTERFACE...]",
		Short: "Show the changes that bigtcp apply would make",
		Long: `Plan shows the sizes that bigtcp apply would set on the named interfaces and
their lower interfaces, in the order of the changes, or the error that bigtcp
apply would return. Without INTERFACE it plans the bigtcp section of the policy
file.`,
		Example: `  sockeye bigtcp plan eth0
  sockeye bigtcp plan --policy new-policy.yaml`,
		RunE: func(cmd *cobra.Command, args []string) error {
			aims, skipped, err := request.tasks(cmd, args)
			if err != nil {
				return err
			}
			defer aims.close()
			answer, err := aims.plan(&request)
			if err != nil {
				return err
			}
			answer.Skipped = skipped
			return c.bigtcpChanged(*answer, "would change")
		},
	}
	request.flags(cmd)
	return cmd
}

func (r *bigtcpRequest) flags(cmd *cobra.Command) {
	cmd.Args = command.Arguments(0, -1, "")
	cmd.ValidArgsFunction = r.interfaces
	r.bigtcpPlace.flags(cmd)
	policyFlag(cmd, &r.policy)
	const size = "maximum packet size for %s: 65536 to 524280 bytes, as in 192KB or 192KiB, or off (default " + bigtcpSize + " if neither --ipv6 nor --ipv4 is given)"
	cmd.Flags().StringVar(&r.ipv6, "ipv6", "", fmt.Sprintf(size, "IPv6"))
	cmd.Flags().StringVar(&r.ipv4, "ipv4", "", fmt.Sprintf(size, "IPv4"))
	command.CompleteFlag(cmd, "ipv6", bigtcpSize, "off")
	command.CompleteFlag(cmd, "ipv4", bigtcpSize, "off")
	cmd.Flags().BoolVar(&r.force, "force", false, "also change sizes that the agent has set, or that somebody else has changed")
}

// bigtcpChanged prints changes.
func (c *commands) bigtcpChanged(answer Changes, verb string) error {
	return c.Print(answer, func(t *command.Text) { changesText(t, &answer, verb) })
}

// bigtcpTask is the targets of one namespace.
type bigtcpTask struct {
	network *netif.Namespace
	targets []sizing.Target
}

type bigtcpTasks []bigtcpTask

// plan plans all tasks. If the caller may not read the records, plan does not detect
// conflicts.
func (a bigtcpTasks) plan(r *bigtcpRequest) (*Changes, error) {
	store, err := sizing.OpenStore(r.state)
	if err != nil {
		return nil, err
	}
	answer := &Changes{[]sizing.Change{}, nil, []string{}}
	for _, aim := range a {
		changes, err := store.Plan(aim.network, sizing.ByCommand, aim.targets, r.force)
		if errors.Is(err, os.ErrPermission) {
			answer.Problems = []string{fmt.Sprintf("owners of the sizes: %v", err)}
			changes, err = sizing.Plan(aim.network, aim.targets)
		}
		if err != nil {
			return nil, flagHint(err)
		}
		answer.Changes = append(answer.Changes, changes...)
	}
	return answer, nil
}

// tasks returns the named interfaces as targets, or the interfaces that match the rules
// of the policy file.
func (r *bigtcpRequest) tasks(cmd *cobra.Command, names []string) (bigtcpTasks, []Skipped, error) {
	want, err := r.want(cmd)
	if err != nil {
		return nil, nil, err
	}
	changed := cmd.Flags().Changed
	usage := "usage: " + cmd.UseLine()
	switch {
	case len(names) > 0 && changed("policy"):
		return nil, nil, fault.Usage(errors.New("--policy and INTERFACE are mutually exclusive"), usage)
	case len(names) > 0:
		network, err := netif.OpenNamespace(r.netns)
		if err != nil {
			return nil, nil, err
		}
		aim := bigtcpTask{network: network}
		for _, name := range names {
			aim.targets = append(aim.targets, sizing.Target{Interface: name, Want: want})
		}
		return bigtcpTasks{aim}, []Skipped{}, nil
	}
	for _, flag := range []string{"ipv6", "ipv4", "netns"} {
		if changed(flag) {
			return nil, nil, fault.Usage(fmt.Errorf("--%s requires INTERFACE", flag), usage)
		}
	}
	rules, err := bigtcpRules(r.policy)
	switch {
	case errors.Is(err, os.ErrNotExist) && !changed("policy"):
		return nil, nil, fault.Usage(fmt.Errorf("INTERFACE is missing, and there is no %s", r.policy), usage)
	case err != nil:
		if _, ok := errors.AsType[*os.PathError](err); ok {
			err = fault.Unreadable(err, "name a policy file")
		}
		return nil, nil, err
	case len(rules) == 0:
		return nil, nil, fault.Usage(fmt.Errorf("%s has no bigtcp rules", r.policy), "name an interface, or another file with --policy")
	}
	return tasksOfRules(rules)
}

// want parses the sizes. If neither --ipv6 nor --ipv4 is given, both have the default.
func (r *bigtcpRequest) want(cmd *cobra.Command) (want sizing.Want, err error) {
	if !cmd.Flags().Changed("ipv6") && !cmd.Flags().Changed("ipv4") {
		r.ipv6, r.ipv4 = bigtcpSize, bigtcpSize
	}
	for _, f := range []struct {
		flag, value string
		size        *uint32
	}{{"ipv6", r.ipv6, &want.IPv6}, {"ipv4", r.ipv4, &want.IPv4}} {
		if f.value == "" && !cmd.Flags().Changed(f.flag) {
			continue
		}
		if *f.size, err = config.ParseBigTCPSize(f.value); err != nil {
			return want, fault.Usage(fmt.Errorf("--%s is %q", f.flag, f.value), "65536 to 524280 bytes, as in 192KB or 192KiB, or off")
		}
	}
	return want, nil
}

// tasksOfRules finds the interfaces of rules. Like the agent, it skips namespaces and
// interfaces that do not exist, and interfaces of a glob that do not support large packets.
func tasksOfRules(rules []config.BigTCPRule) (aims bigtcpTasks, skipped []Skipped, err error) {
	skipped = []Skipped{}
	byNetns := make(map[string][]config.BigTCPRule)
	var order []string
	for _, r := range rules {
		if byNetns[r.Netns] == nil {
			order = append(order, r.Netns)
		}
		byNetns[r.Netns] = append(byNetns[r.Netns], r)
	}
	for _, netns := range order {
		network, err := netif.OpenNamespace(netns)
		if errors.Is(err, os.ErrNotExist) {
			for _, r := range byNetns[netns] {
				skipped = append(skipped, Skipped{netns, r.Interface, "there is no such network namespace"})
			}
			continue
		}
		if err == nil {
			var out []Skipped
			aim := bigtcpTask{network: network}
			aim.targets, out, err = targetsOfRules(network, byNetns[netns])
			aims = append(aims, aim)
			skipped = append(skipped, out...)
		}
		if err != nil {
			aims.close()
			return nil, nil, err
		}
	}
	return aims, skipped, nil
}

func (a bigtcpTasks) close() {
	for _, aim := range a {
		aim.network.Close()
	}
}

func targetsOfRules(network *netif.Namespace, rules []config.BigTCPRule) (targets []sizing.Target, skipped []Skipped, err error) {
	list, err := network.Interfaces()
	if err != nil {
		return nil, nil, err
	}
	skip := func(name, reason string) {
		skipped = append(skipped, Skipped{network.Path(), name, reason})
	}
	support := network.Support()
	matched := make([]bool, len(rules))
	for _, i := range list {
		at := slices.IndexFunc(rules, func(r config.BigTCPRule) bool { return r.Matches(i.Name) })
		if at < 0 {
			continue
		}
		matched[at] = true
		want := sizing.Want{IPv6: rules[at].IPv6, IPv4: rules[at].IPv4}
		verdict := i.Verdict(support)
		if !rules[at].Named() && verdict.State == netif.Impossible && max(want.IPv6, want.IPv4) > netif.Legacy {
			skip(i.Name, verdict.Text)
			continue
		}
		targets = append(targets, sizing.Target{Interface: i.Name, Want: want})
	}
	for at, r := range rules {
		if !matched[at] {
			skip(r.Interface, "there is no such interface")
		}
	}
	return targets, skipped, nil
}
