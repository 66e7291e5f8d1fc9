// SPDX-License-Identifier: Apache-2.0

package bigtcp

import (
	"cmp"
	"log/slog"
	"path/filepath"
	"slices"
	"sync"

	"sockeye/internal/api"
	"sockeye/internal/bigtcp/sizing"
	"sockeye/internal/config"
	"sockeye/internal/domain"
	"sockeye/internal/events"
	"sockeye/internal/fault"
	"sockeye/internal/rights"
)

// Domain applies the bigtcp rules of the policy.
type Domain struct {
	host *domain.Host
	log  *slog.Logger

	mu          sync.Mutex
	reconcilers map[string]*reconciler // by network namespace
	records     *sizing.Store          // previous sizes of the interfaces
	watch       *namespaceWatch        // nil until there is a rule
	closed      bool
}

var _ domain.Reverter = (*Domain)(nil)

// New returns a domain without rules.
func New(h *domain.Host) *Domain {
	return &Domain{host: h, log: h.Log, reconcilers: make(map[string]*reconciler)}
}

// Check returns nil: a rule may name interfaces and namespaces that do not exist yet. Plan
// rejects sizes that are not supported.
func (d *Domain) Check(*config.Policy) error { return nil }

// namespaceRules contains the rules of a policy for one network namespace; nil if the
// policy has no rules for it any more.
type namespaceRules struct {
	netns string
	rules []config.BigTCPRule
}

// Start reverts the sizes that an earlier agent has set in network namespaces without
// rules, and applies the rules of the policy.
func (d *Domain) Start(policy *config.Policy) error {
	defer d.updateNamespaces()
	d.mu.Lock()
	defer d.mu.Unlock()
	var err error
	if d.records, err = sizing.OpenStore(d.host.StateDir); err != nil {
		return err
	}
	requested := rulesByNamespace(policy)
	leftover := &reconciler{store: d.records, log: d.log}
	err = leftover.revertRecords(func(r sizing.Record) bool {
		return !slices.ContainsFunc(requested, func(c namespaceRules) bool { return c.netns == r.Netns })
	})
	if err != nil {
		d.log.Warn("sizes not reverted", "error", err)
	}
	damaged, err := d.records.Damaged()
	if err != nil {
		d.log.Warn("damaged records of sizes not listed", "error", err)
	}
	for _, path := range damaged {
		d.log.Warn("record of sizes is damaged, and its interface is not reverted", "path", path)
	}
	for _, c := range requested {
		// A failure does not keep the other namespaces from being configured.
		if err := d.addNamespace(c, false); err != nil {
			d.log.Warn("sizes not set", events.SizesNotSet, "netns", c.netns, "error", err)
			s := d.reconcilers[c.netns]
			s.mu.Lock()
			s.setProblem(err)
			s.mu.Unlock()
		}
	}
	return nil
}

// Applied does nothing.
func (d *Domain) Applied(*config.Policy, api.Candidate, *api.Plan) error { return nil }

// Close stops watching interfaces and namespaces. The sizes stay.
func (d *Domain) Close() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.closed = true
	if d.watch != nil {
		d.watch.close()
		d.watch = nil
	}
	for _, s := range d.reconcilers {
		s.close()
	}
}

// Revert reverts the sizes of all interfaces.
func (d *Domain) Revert() ([]string, error) { return Revert(d.host.StateDir) }

// Revert reverts the sizes of all interfaces, regardless of who set them, and returns the
// names of the interfaces.
func Revert(stateDir string) ([]string, error) {
	store, err := sizing.OpenStore(stateDir)
	if err != nil {
		return nil, err
	}
	done, err := store.Revert(nil, false)
	reverted := []string{}
	for _, r := range done {
		if r.Result != sizing.ResultReverted {
			continue
		}
		name := r.Interface
		if r.Netns != "" {
			name += " of " + r.Netns
		}
		reverted = append(reverted, name)
	}
	if fault.Code(err) == fault.CodeConflict {
		err = fault.Conflict(err, "sockeye bigtcp revert --force restores the previous sizes anyway")
	}
	return reverted, err
}

// Needs lists the capabilities that the bigtcp rules of a policy need beyond those of the
// systemd unit.
func (d *Domain) Needs(policy *config.Policy) []rights.Need { return Needs(policy) }

// Needs lists the capabilities that the bigtcp rules of a policy need beyond those of the
// systemd unit.
func Needs(policy *config.Policy) []rights.Need {
	var needs []rights.Need
	for _, r := range policy.BigTCP {
		if r.Netns != "" {
			needs = append(needs, rights.Need{Right: rights.SysAdmin, For: "netns " + r.Netns + " of a bigtcp rule"})
		}
	}
	return needs
}

// rulesByNamespace groups the rules of a policy by network namespace.
func rulesByNamespace(policy *config.Policy) []namespaceRules {
	var all []namespaceRules
	for _, rule := range policy.BigTCP {
		i := slices.IndexFunc(all, func(c namespaceRules) bool { return c.netns == rule.Netns })
		if i < 0 {
			i = len(all)
			all = append(all, namespaceRules{netns: rule.Netns})
		}
		all[i].rules = append(all[i].rules, rule)
	}
	return all
}

// apply applies the rules of a namespace. rollback restores the previous rules.
func (d *Domain) apply(c namespaceRules) (rollback func() error, err error) {
	defer d.updateNamespaces()
	d.mu.Lock()
	defer d.mu.Unlock()
	undo, err := d.changeRules(c)
	if err != nil {
		return nil, inNamespace(c.netns, err)
	}
	return func() error {
		defer d.updateNamespaces()
		d.mu.Lock()
		defer d.mu.Unlock()
		return undo()
	}, nil
}

// changeRules applies the rules of a namespace. The caller holds mu, also when it calls
// rollback.
func (d *Domain) changeRules(c namespaceRules) (rollback func() error, err error) {
	switch s := d.reconcilers[c.netns]; {
	case c.rules == nil:
		before := namespaceRules{c.netns, s.rules}
		rollback = func() error { return d.addNamespace(before, true) }
		delete(d.reconcilers, c.netns)
		if err := s.retire(); err != nil {
			return nil, fault.Join(err, rollback())
		}
	case s == nil:
		rollback = func() error {
			s := d.reconcilers[c.netns]
			delete(d.reconcilers, c.netns)
			return s.retire()
		}
		if err := d.addNamespace(c, true); err != nil {
			return nil, fault.Join(err, rollback())
		}
	default:
		return s.replaceRules(c.rules)
	}
	return rollback, nil
}

// addNamespace adds a namespace with its first rules.
func (d *Domain) addNamespace(c namespaceRules, explicit bool) error {
	s := &reconciler{store: d.records, log: d.log, netns: c.netns, lost: d.retryNamespaces}
	d.reconcilers[c.netns] = s
	return s.start(c.rules, explicit)
}

// inNamespace adds the network namespace to an error.
func inNamespace(netns string, err error) error {
	return fault.In("bigtcp in "+where(netns), err)
}

// where returns the name of a network namespace for messages.
func where(netns string) string { return cmp.Or(netns, "the agent's network namespace") }

// recordsDir returns the directory of the records of the agent and of commands.
func (d *Domain) recordsDir() string { return filepath.Join(d.host.StateDir, "bigtcp") }
