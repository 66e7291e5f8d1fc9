// SPDX-License-Identifier: Apache-2.0

package bigtcp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/bigtcp/netif"
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

// sizer keeps the sizes of the interfaces of one network namespace in step with the
// policy.
type sizer struct {
	store *sizing.Store
	log   *slog.Logger
	netns string // path; "" for the agent's own

	mu         sync.Mutex
	rules      []config.BigTCPRule
	network    *netif.Namespace // nil while there is none
	leave      func()           // ends the watch of it
	place      placeID
	problem    error                           // of the namespace
	since      time.Time                       // of the problem
	interfaces map[int]*sized                  // by index
	unmatched  map[config.BigTCPRule]time.Time // since when no interface matches
	recheck    *time.Timer
	tried      map[int]attempt
	changes    uint64 // by somebody else, that were seen
}

// sized is an interface that a rule is for, or that is below one.
type sized struct {
	name     string
	index    int
	rule     *config.BigTCPRule // nil: none is for it any more
	target   bool               // the rule is for itself
	because  string             // the interface above it, of one that is no target
	want     sizing.Want
	from, to netif.Sizes // that it has, and is to have
	notes    []string
	planned  bool
	todo     bool // it is to be set
	force    bool // it has somebody else's sizes
	state    string
	err      error
	since    time.Time
}

// attempt is what was tried to set.
type attempt struct {
	from, to netif.Sizes
	err      error
}

// placeID tells what is at a path: another namespace has another one.
type placeID struct{ device, inode uint64 }

func placeOf(path string) (placeID, error) {
	if path == "" {
		return placeID{}, nil
	}
	info, err := os.Stat(path)
	if err != nil {
		return placeID{}, err
	}
	stat := info.Sys().(*syscall.Stat_t)
	return placeID{stat.Dev, stat.Ino}, nil
}

// where names a network namespace in a message.
func where(netns string) string { return cmp.Or(netns, "the agent's network namespace") }

// enter opens the namespace and watches it. One that is not there is waited for.
func (s *sizer) enter() error {
	place, err := placeOf(s.netns)
	if errors.Is(err, fs.ErrNotExist) {
		s.fail(fault.WithHint(fmt.Errorf("there is no network namespace %s", s.netns), "its interfaces are set when it appears"))
		return nil
	}
	if err != nil {
		return fmt.Errorf("find network namespace: %w", err)
	}
	network, err := netif.OpenNamespace(s.netns)
	if errors.Is(err, fs.ErrPermission) && !rights.Has(unix.CAP_SYS_ADMIN) {
		return noEntry()
	}
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	changes, err := network.Watch(ctx)
	if err != nil {
		cancel()
		network.Close()
		return err
	}
	s.network, s.leave, s.place, s.problem = network, cancel, place, nil
	s.recheck = time.NewTimer(recheckAfter)
	go s.follow(ctx, network, changes, s.recheck.C)
	// Another namespace may have been here before.
	return s.giveBack(func(r sizing.Record) bool { return r.Netns == s.netns && r.NetnsID != network.ID() })
}

// recheckAfter is when to look again after sizes were set: later than the watch has
// read them. Were they set back before that, it would see nothing.
const recheckAfter = 6 * time.Second

// noEntry is the error of an agent without CAP_SYS_ADMIN.
func noEntry() error {
	return &fault.Error{Err: errors.New("the agent has no right to enter network namespaces"), Code: fault.CodeNotPermitted,
		Hint: rights.MissingHint(unix.CAP_SYS_ADMIN, "restart the agent; it keeps that right if the policy names a netns then")}
}

// follow looks again whenever an interface has changed, until ctx ends, and closes
// the network.
func (s *sizer) follow(ctx context.Context, network *netif.Namespace, changes <-chan struct{}, recheck <-chan time.Time) {
	defer network.Close()
	for {
		more := true
		select {
		case _, more = <-changes:
		case <-recheck:
		}
		s.mu.Lock()
		switch {
		case ctx.Err() != nil:
		case more:
			clear(s.tried)
			s.settle()
		default:
			s.exit()
			s.fail(errors.New("its interfaces can not be watched any more"))
			s.log.Warn("interfaces not watched", "netns", s.netns)
		}
		s.mu.Unlock()
		if !more {
			return
		}
	}
}

// exit lets go of the namespace, which nothing keeps alive then.
func (s *sizer) exit() {
	if s.network == nil {
		return
	}
	s.leave()
	s.recheck.Stop()
	s.network, s.interfaces, s.unmatched, s.tried = nil, nil, nil, nil
}

// fail notes what is wrong with the namespace.
func (s *sizer) fail(err error) {
	if s.problem == nil || s.problem.Error() != err.Error() {
		s.since = time.Now()
	}
	s.problem = err
}

// renew enters the namespace that is at the path now, if it is another one or has
// appeared, and leaves one that has vanished.
func (s *sizer) renew() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.netns == "" {
		return
	}
	place, err := placeOf(s.netns)
	if s.network != nil && err == nil && place == s.place {
		return
	}
	if s.network != nil {
		id := s.network.ID()
		s.exit()
		s.log.Info("network namespace has vanished", "netns", s.netns)
		// Nobody can give back what was in there.
		if err := s.giveBack(func(r sizing.Record) bool { return r.NetnsID == id }); err != nil {
			s.log.Debug("records of a network namespace not removed", "netns", s.netns, "error", err)
		}
	}
	before := s.problem
	if err := s.enter(); err != nil {
		s.fail(err)
		if before == nil || before.Error() != err.Error() {
			s.log.Info("network namespace not entered", "netns", s.netns, "error", err)
		}
		return
	}
	if s.network != nil {
		s.log.Info("network namespace entered", "netns", s.netns)
		s.settle()
	}
}

// entered tells whether the network namespace is looked after.
func (s *sizer) entered() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.network != nil
}

// again looks again, as records have changed.
func (s *sizer) again() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.network != nil {
		s.settle()
	}
}

// settle sets what is to be set by the rules, and nothing that somebody else has set.
func (s *sizer) settle() {
	if err := s.reconcile(false); err != nil {
		if s.problem == nil || s.problem.Error() != err.Error() {
			s.log.Warn("sizes not set", "netns", s.netns, "error", err)
		}
		s.fail(err)
	}
}

// maxRounds bounds how often is looked whether all is done.
const maxRounds = 3

// reconcile makes the rules true. If that is explicit, what somebody else has set is
// set again, and what cannot be done is an error.
func (s *sizer) reconcile(explicit bool) error {
	o, err := s.outlook(s.network, s.rules, explicit)
	if err != nil {
		return err
	}
	for range maxRounds {
		acted, err := s.act(o, explicit)
		if err != nil {
			return err
		}
		if !acted {
			break
		}
		s.recheck.Reset(recheckAfter)
		explicit = false
		if o, err = s.outlook(s.network, s.rules, false); err != nil {
			return err
		}
	}
	s.note(o)
	s.problem = nil
	return nil
}

// act does what is to be done, and tells whether there was anything.
func (s *sizer) act(o *outlook, explicit bool) (bool, error) {
	lost := len(o.gone)+len(o.unwanted) > 0
	if lost {
		err := s.giveBack(func(r sizing.Record) bool {
			return r.NetnsID == s.network.ID() && o.interfaces[r.Index] == nil && !o.needs(r)
		})
		if err != nil && explicit {
			return false, err
		}
		if err != nil {
			s.log.Warn("sizes not taken back", "netns", s.netns, "error", err)
		}
	}
	var paths []*sizedPath
	for _, p := range o.paths {
		if explicit || !s.failed(o, p) {
			paths = append(paths, p)
		}
	}
	return lost || len(paths) > 0, s.set(o, paths, explicit)
}

// giveBack takes the policy's records back that are chosen. What somebody else has
// set since is left.
func (s *sizer) giveBack(only func(sizing.Record) bool) error {
	done, err := s.store.Revert(func(r sizing.Record) bool { return r.Owner == sizing.ByPolicy && only(r) }, false)
	for _, r := range done {
		if r.Result == sizing.ResultReverted {
			s.log.Info("sizes taken back", "netns", r.Netns, "interface", r.Interface)
		}
	}
	if fault.Code(err) == fault.CodeConflict {
		s.log.Warn("sizes not taken back", "netns", s.netns, "reason", err)
		return nil
	}
	return err
}

// set sets the interfaces of each path, or none of it.
func (s *sizer) set(o *outlook, paths []*sizedPath, explicit bool) error {
	if len(paths) == 0 {
		return nil
	}
	// All at once is cheapest, and mostly goes well.
	if explicit || len(paths) > 1 {
		if err := s.setPaths(o, paths); err == nil || explicit {
			return err
		}
	}
	for _, p := range paths {
		if err := s.setPaths(o, []*sizedPath{p}); err != nil {
			s.log.Warn("sizes not set", "netns", s.netns, "interface", p.targets[0].Interface, "error", err)
		}
	}
	return nil
}

// failed tells whether the same was tried before, and nothing has changed since.
func (s *sizer) failed(o *outlook, p *sizedPath) bool {
	for _, index := range p.members {
		i := o.interfaces[index]
		if last, ok := s.tried[index]; i.todo && (!ok || last.from != i.from || last.to != i.to) {
			return false
		}
	}
	return true
}

func (s *sizer) setPaths(o *outlook, paths []*sizedPath) error {
	var targets []sizing.Target
	force := false
	for _, p := range paths {
		targets = append(targets, p.targets...)
		force = force || p.force
	}
	_, err := s.store.Apply(s.network, sizing.ByPolicy, targets, force)
	if s.tried == nil {
		s.tried = make(map[int]attempt)
	}
	again := fault.Code(err) == fault.CodeConflict
	for _, p := range paths {
		for _, index := range p.members {
			i := o.interfaces[index]
			if again {
				delete(s.tried, index)
			} else if i.todo {
				s.tried[index] = attempt{i.from, i.to, err}
			}
		}
	}
	return err
}

// note keeps what was found, and tells of what has become different.
func (s *sizer) note(o *outlook) {
	now := time.Now()
	for index, i := range o.interfaces {
		before := s.interfaces[index]
		i.since = now
		if i.todo {
			i.err = errors.New("it is not set yet")
			if last, ok := s.tried[index]; ok && last.err != nil {
				i.err = last.err
			}
		}
		told := before != nil && before.state == i.state
		if told {
			i.since = before.since
		}
		if i.state == api.SizesChanged && (!told || before.from != i.from) {
			s.changes++
			told = false
		}
		if told {
			continue
		}
		log := s.log.With("netns", s.netns, "interface", i.name)
		switch i.state {
		case api.SizesApplied:
			log.Info("sizes as the policy says", "gso_max_size", i.from.GSO, "gro_max_size", i.from.GRO,
				"gso_ipv4_max_size", i.from.GSOIPv4, "gro_ipv4_max_size", i.from.GROIPv4)
		case api.SizesChanged:
			log.Warn("sizes changed by somebody else, and left", "gso_max_size", i.from.GSO, "gro_max_size", i.from.GRO,
				"gso_ipv4_max_size", i.from.GSOIPv4, "gro_ipv4_max_size", i.from.GROIPv4, "hint", fault.Hint(i.err))
		default:
			log.Warn("sizes not set", "state", i.state, "error", i.err)
		}
	}
	unmatched := make(map[config.BigTCPRule]time.Time)
	for _, rule := range o.unmatched {
		if unmatched[rule] = s.unmatched[rule]; unmatched[rule].IsZero() {
			unmatched[rule] = now
		}
	}
	s.interfaces, s.unmatched = o.interfaces, unmatched
}

// close lets go of the namespace. What is set stays.
func (s *sizer) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.exit()
}

// retire gives back what the rules have set.
func (s *sizer) retire() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.rules = nil
	defer s.exit()
	if s.network == nil {
		return s.giveBack(func(r sizing.Record) bool { return r.Netns == s.netns })
	}
	return s.reconcile(true)
}

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

// begin makes rules true in a namespace that had none.
func (s *sizer) begin(rules []config.BigTCPRule, explicit bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.rules = rules
	if err := s.enter(); err != nil || s.network == nil {
		return err
	}
	return s.reconcile(explicit)
}

// change makes other rules true. It returns what takes that back, with the sizes that
// somebody else had set.
func (s *sizer) change(rules []config.BigTCPRule) (back func() error, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	before := s.rules
	foreign := make(map[int]netif.Sizes)
	for index, i := range s.interfaces {
		if i.state == api.SizesChanged && i.rule != nil {
			foreign[index] = i.from
		}
	}
	back = func() error {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.become(before, foreign)
	}
	if err := s.become(rules, nil); err != nil {
		return nil, fault.Join(err, s.become(before, foreign))
	}
	return back, nil
}

// become makes rules true, and gives interfaces the sizes of somebody else.
func (s *sizer) become(rules []config.BigTCPRule, foreign map[int]netif.Sizes) error {
	s.rules = rules
	if s.network == nil {
		if err := s.enter(); err != nil || s.network == nil {
			return err
		}
	}
	if err := s.reconcile(true); err != nil {
		return err
	}
	var errs []error
	for index, sizes := range foreign {
		errs = append(errs, s.network.Set(index, sizes))
	}
	if len(foreign) > 0 {
		errs = append(errs, s.reconcile(false))
	}
	return fault.Join(errs...)
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

func ofNetwork(netns string, err error) error {
	return &fault.Error{Err: fmt.Errorf("bigtcp in %s: %w", where(netns), err), Hint: fault.Hint(err), Code: fault.Code(err)}
}

// recordsDir is where the records of sizes are, those of commands too.
func (d *Domain) recordsDir() string { return filepath.Join(d.host.StateDir, "bigtcp") }

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
