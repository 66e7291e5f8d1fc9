// SPDX-License-Identifier: Apache-2.0

package bigtcp

import (
	"cmp"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"sync"

	"sockeye/internal/api"
	"sockeye/internal/bigtcp/sizing"
	"sockeye/internal/config"
	"sockeye/internal/domain"
	"sockeye/internal/fault"
	"sockeye/internal/rights"
)

// Domain carries out the bigtcp rules of the policy.
type Domain struct {
	host *domain.Host
	log  *slog.Logger

	mu      sync.Mutex
	sizers  map[string]*sizer // by network namespace
	records *sizing.Store     // of sizes that were set
	watch   *networkWatch     // nil while no sizes are set
	closed  bool
}

// New returns the domain without any rules.
func New(h *domain.Host) *Domain {
	return &Domain{host: h, log: h.Log, sizers: make(map[string]*sizer)}
}

// Check finds nothing: what a rule names is waited for, or refused by Plan.
func (d *Domain) Check(*config.Policy) error { return nil }

// Start takes back what an earlier agent has set in network namespaces that are not in the policy, and
// sets the sizes in those that are.
func (d *Domain) Start(policy *config.Policy) error {
	defer d.look()
	d.mu.Lock()
	defer d.mu.Unlock()
	var err error
	if d.records, err = sizing.OpenStore(d.host.StateDir); err != nil {
		return err
	}
	wanted := sizings(policy)
	leftover := &sizer{store: d.records, log: d.log}
	err = leftover.giveBack(func(r sizing.Record) bool {
		return !slices.ContainsFunc(wanted, func(c bigTCPChange) bool { return c.netns == r.Netns })
	})
	if err != nil {
		d.log.Warn("sizes not taken back", "error", err)
	}
	damaged, err := d.records.Damaged()
	if err != nil {
		d.log.Warn("damaged records of sizes not looked for", "error", err)
	}
	for _, path := range damaged {
		d.log.Warn("record of sizes is damaged, what it was about is not taken back", "path", path)
	}
	for _, c := range wanted {
		// What cannot be set today is no reason not to do the rest.
		if err := d.open(c, false); err != nil {
			d.log.Warn("sizes not set", "netns", c.netns, "error", err)
			s := d.sizers[c.netns]
			s.mu.Lock()
			s.fail(err)
			s.mu.Unlock()
		}
	}
	return nil
}

// Applied has nothing to do.
func (d *Domain) Applied(*config.Policy, api.Candidate, *api.Plan) error { return nil }

// Close ends the watch of the interfaces. Their sizes stay.
func (d *Domain) Close() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.closed = true
	if d.watch != nil {
		d.watch.close()
		d.watch = nil
	}
	for _, s := range d.sizers {
		s.close()
	}
}

// Revert gives interfaces the sizes that they had before, whoever had them set,
// and names them.
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
		err = fault.Conflict(err, "sockeye bigtcp revert --force gives back all the same what was there before")
	}
	return reverted, err
}

// Needs lists the capabilities that the bigtcp rules of a policy need beyond those of the unit.
func Needs(policy *config.Policy) []rights.Need {
	var needs []rights.Need
	for _, r := range policy.BigTCP {
		if r.Netns != "" {
			needs = append(needs, rights.Need{Right: rights.SysAdmin, For: "netns " + r.Netns + " of a bigtcp rule"})
		}
	}
	return needs
}

// Needs lists the capabilities that the bigtcp rules of a policy need beyond those of the unit.
func (d *Domain) Needs(policy *config.Policy) []rights.Need { return Needs(policy) }

// bigTCPChange is what a new policy makes of the sizes in one network namespace. Rules
// is nil where there are none any more.
type bigTCPChange struct {
	netns string
	rules []config.BigTCPRule
}

// sizings splits the rules of a policy by network namespace.
func sizings(policy *config.Policy) []bigTCPChange {
	var all []bigTCPChange
	for _, rule := range policy.BigTCP {
		i := slices.IndexFunc(all, func(c bigTCPChange) bool { return c.netns == rule.Netns })
		if i < 0 {
			i = len(all)
			all = append(all, bigTCPChange{netns: rule.Netns})
		}
		all[i].rules = append(all[i].rules, rule)
	}
	return all
}

// apply carries a change out, and returns how to roll it back.
func (d *Domain) apply(c bigTCPChange) (rollback func() error, err error) {
	defer d.look()
	d.mu.Lock()
	defer d.mu.Unlock()
	undo, err := d.become(c)
	if err != nil {
		return nil, ofNetwork(c.netns, err)
	}
	return func() error {
		defer d.look()
		d.mu.Lock()
		defer d.mu.Unlock()
		return undo()
	}, nil
}

// become gives a network namespace the rules of a change. The caller holds the lock, also when it calls
// what is returned.
func (d *Domain) become(c bigTCPChange) (rollback func() error, err error) {
	switch s := d.sizers[c.netns]; {
	case c.rules == nil:
		before := bigTCPChange{c.netns, s.rules}
		rollback = func() error { return d.open(before, true) }
		delete(d.sizers, c.netns)
		if err := s.retire(); err != nil {
			return nil, fault.Join(err, rollback())
		}
	case s == nil:
		rollback = func() error {
			s := d.sizers[c.netns]
			delete(d.sizers, c.netns)
			return s.retire()
		}
		if err := d.open(c, true); err != nil {
			return nil, fault.Join(err, rollback())
		}
	default:
		return s.change(c.rules)
	}
	return rollback, nil
}

// open begins with a network namespace.
func (d *Domain) open(c bigTCPChange, explicit bool) error {
	s := &sizer{store: d.records, log: d.log, netns: c.netns}
	d.sizers[c.netns] = s
	return s.begin(c.rules, explicit)
}

func ofNetwork(netns string, err error) error {
	return &fault.Error{Err: fmt.Errorf("bigtcp in %s: %w", where(netns), err), Hint: fault.Hint(err), Code: fault.Code(err)}
}

// where names a network namespace in a message.
func where(netns string) string { return cmp.Or(netns, "the agent's network namespace") }

// recordsDir is where the records of sizes are, those of commands too.
func (d *Domain) recordsDir() string { return filepath.Join(d.host.StateDir, "bigtcp") }
