// SPDX-License-Identifier: Apache-2.0

// Package bigtcpcmd implements the commands of sockeye bigtcp.
package bigtcpcmd

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"sockeye/internal/bigtcp/compat"
	"sockeye/internal/bigtcp/netif"
	"sockeye/internal/bigtcp/sizing"
	"sockeye/internal/cli/command"
	"sockeye/internal/config"
	"sockeye/internal/fault"
	"sockeye/internal/format"
)

// Shown is the output of bigtcp -o json.
type Shown struct {
	Netns             string                   `json:"netns,omitempty"`
	Support           netif.Support            `json:"support"`
	Interfaces        []Interface              `json:"interfaces"`
	Incompatibilities []compat.Incompatibility `json:"incompatibilities"`
	Problems          []string                 `json:"problems"` // read errors
}

// Interface is a network interface with its verdict and its known incompatibilities.
type Interface struct {
	netif.Interface
	Bound             Bound                    `json:"bound"`
	Requested         *Requested               `json:"requested,omitempty"`
	Verdict           netif.Verdict            `json:"verdict"`
	Incompatibilities []compat.Incompatibility `json:"incompatibilities"`
}

// Bound is the upper bound of the GSO sizes, and the interface that causes it.
type Bound struct {
	Size uint32 `json:"size,omitempty"` // bytes; 0 if the kernel does not report tso_max_size
	By   string `json:"by,omitempty"`
}

// Requested is the request for an interface.
type Requested struct {
	sizing.Want
	By    string `json:"by"`    // an owner, or byFile
	State string `json:"state"` // requestSet, requestChanged or requestUnset
	// For names the upper interfaces for which the sizes were requested, if not for
	// the interface itself.
	For []string `json:"for,omitempty"`
}

const (
	byFile         = "file"    // the policy file; not applied
	requestSet     = "set"     // the current sizes match the record
	requestChanged = "changed" // the sizes were changed by another program
	requestUnset   = "unset"
)

// commands has the state of one invocation.
type commands struct{ *command.Command }

// New returns `sockeye bigtcp`.
func New(c *command.Command) *cobra.Command { return (&commands{c}).bigtcpCommand() }

func (c *commands) bigtcpCommand() *cobra.Command {
	var (
		all    bool
		policy string
		where  bigtcpPlace
	)
	cmd := &cobra.Command{
		Use:   "bigtcp [INTERFACE...]",
		Short: "Show the GSO and GRO maximum sizes of interfaces (BIG TCP)",
		Long: `Bigtcp shows the GSO (send) and GRO (receive) maximum sizes of each interface in
bytes, for IPv6 and IPv4, and the requested sizes. TSO MAX is the largest size
that the interface supports (tso_max_size). Each interface is followed by a
verdict, its lower, peer and upper interfaces and known incompatibilities.
Incompatibilities of the whole host are listed at the end.

It needs no agent and no privileges. Data that the caller may not read is listed
as "not read".`,
		Example: `  sockeye bigtcp
  sockeye bigtcp eth0 --netns /run/netns/blue
  sockeye bigtcp plan eth0
  sockeye bigtcp apply eth0 --ipv6 192KB --ipv4 off
  sockeye bigtcp verify eth0`,
		Args:              command.Arguments(0, -1, ""),
		ValidArgsFunction: where.interfaces,
		RunE: func(cmd *cobra.Command, args []string) error {
			shown, err := inspectBigTCP(cmd, args, where, policy)
			if err != nil {
				return err
			}
			return c.Print(shown, func(t *command.Text) { bigtcpText(t, shown, all || len(args) > 0) })
		},
	}
	where.flags(cmd)
	policyFlag(cmd, &policy)
	cmd.Flags().BoolVar(&all, "all", false, "show all interfaces, one row each")
	cmd.AddCommand(c.bigtcpPlanCommand(), c.bigtcpApplyCommand(), c.bigtcpRevertCommand(), c.bigtcpVerifyCommand())
	return cmd
}

// bigtcpPlace is the namespace and the state directory of a command.
type bigtcpPlace struct{ netns, state string }

func (p *bigtcpPlace) flags(cmd *cobra.Command) {
	cmd.Flags().StringVar(&p.netns, "netns", "", "path of a network namespace, as in /run/netns/NAME (default: the current namespace)")
	cmd.Flags().StringVar(&p.state, "state-dir", command.DefaultStateDir, "state directory with the records of changed sizes")
}

func policyFlag(cmd *cobra.Command, file *string) {
	cmd.Flags().StringVar(file, "policy", command.DefaultPolicy, "policy file")
}

// interfaces completes the names of interfaces that are not yet arguments.
func (p *bigtcpPlace) interfaces(_ *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
	network, err := netif.OpenNamespace(p.netns)
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	defer network.Close()
	list, err := network.Interfaces()
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	var names []cobra.Completion
	for _, i := range list {
		if !slices.Contains(args, i.Name) {
			names = append(names, cobra.CompletionWithDesc(i.Name, interfaceKind(i.Kind, i.Driver)))
		}
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}

// inspectBigTCP inspects the named interfaces, or all interfaces if names is empty.
func inspectBigTCP(cmd *cobra.Command, names []string, where bigtcpPlace, policy string) (*Shown, error) {
	network, err := netif.OpenNamespace(where.netns)
	if err != nil {
		return nil, err
	}
	defer network.Close()
	list, err := network.Interfaces()
	if err != nil {
		return nil, err
	}
	named, err := bigtcpNamed(cmd, network, names)
	if err != nil {
		return nil, err
	}
	shown := &Shown{Netns: where.netns, Support: network.Support(), Interfaces: []Interface{}, Incompatibilities: []compat.Incompatibility{}, Problems: []string{}}
	see := func(what string, err error) {
		if err != nil {
			shown.Problems = append(shown.Problems, fmt.Sprintf("%s: %v", what, err))
		}
	}
	incompatibilities, ofInterfaces, err := compat.Find(network, list, shown.Support)
	see("incompatibilities", err)
	shown.Incompatibilities = append(shown.Incompatibilities, incompatibilities...)
	records, damaged, err := recordsOf(network, where.state)
	see("records of changed sizes", err)
	for _, path := range damaged {
		see("records of changed sizes", fmt.Errorf("%s is not a valid record and cannot be reverted", path))
	}
	rules, err := bigtcpRules(policy)
	var flaws config.Errors
	switch {
	case errors.As(err, &flaws):
		see("rules of the policy", fmt.Errorf("%s has %s; sockeye check %s shows them", policy, format.Count(len(flaws), "error", "errors"), policy))
	case cmd.Flags().Changed("policy") || !errors.Is(err, os.ErrNotExist):
		see("rules of the policy", err)
	}
	rules = rulesOf(network, rules)
	for _, i := range list {
		if len(names) > 0 && !slices.Contains(named, i.Index) {
			continue
		}
		one := Interface{Interface: i, Verdict: i.Verdict(shown.Support), Incompatibilities: ofInterfaces[i.Name], Requested: requestOf(&i, list, records, rules)}
		one.Bound.Size, one.Bound.By = i.Bound()
		if one.Incompatibilities == nil {
			one.Incompatibilities = []compat.Incompatibility{}
		}
		shown.Interfaces = append(shown.Interfaces, one)
	}
	return shown, nil
}

// bigtcpNamed returns the indexes of named interfaces. An unknown first name may be a
// mistyped subcommand.
func bigtcpNamed(cmd *cobra.Command, network *netif.Namespace, names []string) ([]int, error) {
	var indexes []int
	for n, name := range names {
		i, err := network.Interface(name)
		if err != nil {
			for _, sub := range cmd.Commands() {
				if n == 0 && config.Nearest(name, []string{sub.Name()}) != "" {
					return nil, command.NoCommand(cmd, names)
				}
			}
			return nil, err
		}
		indexes = append(indexes, i.Index)
	}
	return indexes, nil
}

// recordsOf returns the records of a namespace by interface index, and the paths of
// damaged records.
func recordsOf(network *netif.Namespace, stateDir string) (records map[int]*sizing.Record, damaged []string, err error) {
	store, err := sizing.OpenStore(stateDir)
	if err != nil {
		return nil, nil, err
	}
	list, err := store.Records()
	if err != nil {
		return nil, nil, err
	}
	if damaged, err = store.Damaged(); err != nil {
		return nil, nil, err
	}
	records = make(map[int]*sizing.Record)
	for i, r := range list {
		if r.NetnsID == network.ID() {
			records[r.Index] = &list[i]
		}
	}
	return records, damaged, nil
}

// bigtcpRules returns the bigtcp rules of a policy file.
func bigtcpRules(file string) ([]config.BigTCPRule, error) {
	policy, err := config.Load(file)
	if err != nil {
		return nil, err
	}
	return policy.BigTCP, nil
}

// rulesOf returns the rules of a namespace. It omits rules whose namespace does not
// exist or is not accessible.
func rulesOf(network *netif.Namespace, rules []config.BigTCPRule) []config.BigTCPRule {
	same := map[string]bool{network.Path(): true}
	return slices.DeleteFunc(slices.Clone(rules), func(r config.BigTCPRule) bool {
		if _, known := same[r.Netns]; !known {
			same[r.Netns] = false
			if other, err := netif.OpenNamespace(r.Netns); err == nil {
				same[r.Netns] = other.ID() == network.ID()
				other.Close()
			}
		}
		return !same[r.Netns]
	})
}

// requestOf returns the request for an interface from its record, otherwise from the
// first matching rule; nil if neither exists.
func requestOf(i *netif.Interface, list []netif.Interface, records map[int]*sizing.Record, rules []config.BigTCPRule) *Requested {
	if r := records[i.Index]; r != nil {
		w := &Requested{Want: r.Want, By: string(r.Owner), State: requestSet}
		if i.Sizes != r.Applied {
			w.State = requestChanged
		}
		if !slices.Contains(r.For, i.Index) {
			w.For = namesOf(list, r.For)
		}
		return w
	}
	for _, r := range rules {
		if r.Matches(i.Name) {
			return &Requested{Want: sizing.Want{IPv6: r.IPv6, IPv4: r.IPv4}, By: byFile, State: requestUnset}
		}
	}
	return nil
}

// namesOf returns the names of the interfaces with the indexes.
func namesOf(list []netif.Interface, indexes []int) []string {
	var names []string
	for _, i := range list {
		if slices.Contains(indexes, i.Index) {
			names = append(names, i.Name)
		}
	}
	return names
}

// checkMaySet returns an error if the caller lacks the capability to set sizes.
func checkMaySet() error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var has [2]unix.CapUserData
	if err := unix.Capget(&header, &has[0]); err != nil {
		return fmt.Errorf("read capabilities: %w", err)
	}
	if has[0].Effective&(1<<unix.CAP_NET_ADMIN) == 0 {
		return &fault.Error{Err: errors.New("setting the sizes of interfaces needs CAP_NET_ADMIN"), Hint: "run as root, or with that capability", Code: fault.CodeNotPermitted}
	}
	return nil
}

// flagHint adds the dashes of the flag to a hint about force.
func flagHint(err error) error {
	if hint := fault.Hint(err); strings.HasPrefix(hint, "force ") {
		return fault.WithHint(err, "--"+hint)
	}
	return err
}
