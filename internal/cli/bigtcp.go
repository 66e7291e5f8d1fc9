// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"sockeye/internal/agent"
	"sockeye/internal/bigtcp/compat"
	"sockeye/internal/bigtcp/netif"
	"sockeye/internal/bigtcp/sizing"
	"sockeye/internal/config"
)

// bigtcpShown is the answer of bigtcp -o json.
type bigtcpShown struct {
	Netns             string                   `json:"netns,omitempty"`
	Support           netif.Support            `json:"support"`
	Interfaces        []bigtcpInterface        `json:"interfaces"`
	Incompatibilities []compat.Incompatibility `json:"troubles"`
	Problems          []string                 `json:"problems"` // what could not be seen, and why
}

type bigtcpInterface struct {
	netif.Interface
	Bound             bigtcpBound              `json:"bound"`
	Wanted            *bigtcpWanted            `json:"wanted,omitempty"`
	Verdict           netif.Verdict            `json:"verdict"`
	Incompatibilities []compat.Incompatibility `json:"troubles"`
}

// bigtcpBound is what bounds the packets that an interface sends.
type bigtcpBound struct {
	Size uint32 `json:"size,omitempty"` // bytes; 0 where the kernel does not say
	By   string `json:"by,omitempty"`
}

// bigtcpWanted is what somebody asked for.
type bigtcpWanted struct {
	sizing.Want
	By    string `json:"by"`    // an owner, or byFile
	State string `json:"state"` // wantedSet, wantedChanged or wantedUnset
	// For names the interfaces above, for one that was not asked for itself.
	For []string `json:"for,omitempty"`
}

const (
	byFile        = "file"    // the policy file; nobody has set it
	wantedSet     = "set"     // the sizes are those that were set
	wantedChanged = "changed" // somebody else has changed them since
	wantedUnset   = "unset"
)

func (c *command) bigtcpCommand() *cobra.Command {
	var (
		all    bool
		policy string
		where  bigtcpPlace
	)
	cmd := &cobra.Command{
		Use:   "bigtcp [INTERFACE...]",
		Short: "Show how large packets may be inside this host",
		Long: `Bigtcp shows how large the packets may be that the kernel builds for and from
each interface (BIG TCP): in bytes, to send and to receive, for IPv6 and for
IPv4, and what was asked for. TSO MAX is the most that the device takes. Below
an interface stand a verdict, the devices that it is bound to, and what does not
go well with large packets there; at the end stands that of the whole host.

It needs no agent, and no rights for what the caller may see.`,
		Example: `  sockeye bigtcp
  sockeye bigtcp eth0 --netns /run/netns/blue
  sockeye bigtcp plan eth0
  sockeye bigtcp apply eth0 --ipv6 192KB --ipv4 off
  sockeye bigtcp verify eth0`,
		Args:              arguments(0, -1, ""),
		ValidArgsFunction: where.interfaces,
		RunE: func(cmd *cobra.Command, args []string) error {
			shown, err := inspectBigTCP(cmd, args, where, policy)
			if err != nil {
				return err
			}
			return c.print(shown, func(t *text) { bigtcpText(t, shown, all || len(args) > 0) })
		},
	}
	where.flags(cmd)
	policyFlag(cmd, &policy)
	cmd.Flags().BoolVar(&all, "all", false, "each interface on its own, and those too that are not in use")
	cmd.AddCommand(c.bigtcpPlanCommand(), c.bigtcpApplyCommand(), c.bigtcpRevertCommand(), c.bigtcpVerifyCommand())
	return cmd
}

// bigtcpPlace is where interfaces and records are.
type bigtcpPlace struct{ netns, state string }

func (p *bigtcpPlace) flags(cmd *cobra.Command) {
	cmd.Flags().StringVar(&p.netns, "netns", "", "network namespace, as in /run/netns/NAME; the caller's own by default")
	cmd.Flags().StringVar(&p.state, "state-dir", defaultStateDir, "directory of what was set, and of what was there before")
}

func policyFlag(cmd *cobra.Command, file *string) {
	cmd.Flags().StringVar(file, "policy", defaultPolicy, "policy file")
}

// interfaces completes names of interfaces that are not there yet.
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

// bigtcpLook looks at the interfaces that are named, or at all.
func inspectBigTCP(cmd *cobra.Command, names []string, where bigtcpPlace, policy string) (*bigtcpShown, error) {
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
	shown := &bigtcpShown{Netns: where.netns, Support: network.Support(), Interfaces: []bigtcpInterface{}, Incompatibilities: []compat.Incompatibility{}, Problems: []string{}}
	see := func(what string, err error) {
		if err != nil {
			shown.Problems = append(shown.Problems, fmt.Sprintf("%s: %v", what, err))
		}
	}
	troubles, ofInterfaces, err := compat.Find(network, list, shown.Support)
	see("what does not go well with large packets", err)
	shown.Incompatibilities = append(shown.Incompatibilities, troubles...)
	records, damaged, err := recordsOf(network, where.state)
	see("what was set", err)
	for _, path := range damaged {
		see("what was set", fmt.Errorf("%s is no record, and cannot be taken back", path))
	}
	rules, err := bigtcpRules(policy)
	var flaws config.Errors
	switch {
	case errors.As(err, &flaws):
		see("what the policy wants", fmt.Errorf("%s has %s; sockeye check %s shows them", policy, count(len(flaws), "error", "errors"), policy))
	case cmd.Flags().Changed("policy") || !errors.Is(err, os.ErrNotExist):
		see("what the policy wants", err)
	}
	rules = rulesOf(network, rules)
	for _, i := range list {
		if len(names) > 0 && !slices.Contains(named, i.Index) {
			continue
		}
		one := bigtcpInterface{Interface: i, Verdict: i.Verdict(shown.Support), Incompatibilities: ofInterfaces[i.Name], Wanted: wantedOf(&i, list, records, rules)}
		one.Bound.Size, one.Bound.By = i.Bound()
		if one.Incompatibilities == nil {
			one.Incompatibilities = []compat.Incompatibility{}
		}
		shown.Interfaces = append(shown.Interfaces, one)
	}
	return shown, nil
}

// bigtcpNamed finds the indexes of interfaces that are named. A first one that there is not
// may be a command.
func bigtcpNamed(cmd *cobra.Command, network *netif.Namespace, names []string) ([]int, error) {
	var indexes []int
	for n, name := range names {
		i, err := network.Interface(name)
		if err != nil {
			for _, sub := range cmd.Commands() {
				if n == 0 && config.Nearest(name, []string{sub.Name()}) != "" {
					return nil, noCommand(cmd, names)
				}
			}
			return nil, err
		}
		indexes = append(indexes, i.Index)
	}
	return indexes, nil
}

// recordsOf reads what was set in a namespace, by the index of the interface, and the
// paths of what cannot be read.
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

// bigtcpRules reads the rules of a policy file.
func bigtcpRules(file string) ([]config.BigTCPRule, error) {
	policy, err := config.Load(file)
	if err != nil {
		return nil, err
	}
	return policy.BigTCP, nil
}

// rulesOf are the rules for a namespace. Those for one that is not there, or that the
// caller may not enter, are for another.
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

// wantedOf is what is wanted of an interface of the list: by a record, else by the
// first rule that matches; nil for nothing.
func wantedOf(i *netif.Interface, list []netif.Interface, records map[int]*sizing.Record, rules []config.BigTCPRule) *bigtcpWanted {
	if r := records[i.Index]; r != nil {
		w := &bigtcpWanted{Want: r.Want, By: string(r.Owner), State: wantedSet}
		if i.Sizes != r.Applied {
			w.State = wantedChanged
		}
		if !slices.Contains(r.For, i.Index) {
			w.For = namesOf(list, r.For)
		}
		return w
	}
	for _, r := range rules {
		if r.Matches(i.Name) {
			return &bigtcpWanted{Want: sizing.Want{IPv6: r.IPv6, IPv4: r.IPv4}, By: byFile, State: wantedUnset}
		}
	}
	return nil
}

// namesOf are the names of those of the list that have one of the indexes.
func namesOf(list []netif.Interface, indexes []int) []string {
	var names []string
	for _, i := range list {
		if slices.Contains(indexes, i.Index) {
			names = append(names, i.Name)
		}
	}
	return names
}

// maySet refuses who may not set sizes, before anything is changed.
func checkMaySet() error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var has [2]unix.CapUserData
	if err := unix.Capget(&header, &has[0]); err != nil {
		return fmt.Errorf("read capabilities: %w", err)
	}
	if has[0].Effective&(1<<unix.CAP_NET_ADMIN) == 0 {
		return &agent.Error{Err: errors.New("setting the sizes of interfaces needs CAP_NET_ADMIN"), Hint: "run as root, or with that capability", Code: agent.CodeNotPermitted}
	}
	return nil
}

// flagged gives a hint about force the name of the flag.
func flagHint(err error) error {
	if known, ok := errors.AsType[*netif.Error](err); ok && strings.HasPrefix(known.Hint, "force ") {
		return &netif.Error{Kind: known.Kind, Err: err, Hint: "--" + known.Hint}
	}
	return err
}
