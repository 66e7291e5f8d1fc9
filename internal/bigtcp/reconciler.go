// SPDX-License-Identifier: Apache-2.0

package bigtcp

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/bigtcp/netif"
	"sockeye/internal/bigtcp/sizing"
	"sockeye/internal/config"
	"sockeye/internal/events"
	"sockeye/internal/fault"
	"sockeye/internal/rights"
)

// reconciler sets the sizes of the interfaces of one network namespace to those of the
// policy.
type reconciler struct {
	store *sizing.Store
	log   *slog.Logger
	netns string // path; "" for the agent's own
	lost  func() // called when the watch of the interfaces has failed

	mu         sync.Mutex
	rules      []config.BigTCPRule
	network    *netif.Namespace                // nil while the namespace is not open
	stopWatch  func()                          // stops the watch of network
	file       fileID                          // of network
	problem    error                           // why the namespace is not reconciled
	since      time.Time                       // time of problem
	interfaces map[int]*interfaceState         // by interface index
	unmatched  map[config.BigTCPRule]time.Time // time since which no interface matches
	recheck    *time.Timer
	attempts   map[int]attempt // by interface index
	changes    uint64          // observed changes by other programs
}

// interfaceState is an interface that a rule matches, or a lower interface of such an
// interface.
type interfaceState struct {
	name     string
	index    int
	rule     *config.BigTCPRule // nil if no rule matches the interface any more
	target   bool               // the rule matches the interface itself
	upper    string             // the upper interface that the rule matches; "" for a target
	want     sizing.Want
	from, to netif.Sizes // current and requested
	notes    []string
	planned  bool // from, to and notes are those of a plan
	pending  bool // the sizes are to be set
	override bool // another program has set the current sizes
	state    string
	err      error
	since    time.Time
}

// attempt is the last attempt to set the sizes of an interface.
type attempt struct {
	from, to netif.Sizes
	err      error
}

// fileID identifies the file at a path. A path with another namespace has another fileID.
type fileID struct{ device, inode uint64 }

// start applies the first rules of a namespace.
func (s *reconciler) start(rules []config.BigTCPRule, explicit bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.rules = rules
	if err := s.openNamespace(); err != nil || s.network == nil {
		return err
	}
	return s.reconcile(explicit)
}

// replaceRules applies other rules. rollback restores the previous rules, and the sizes
// that other programs had set.
func (s *reconciler) replaceRules(rules []config.BigTCPRule) (rollback func() error, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	before := s.rules
	foreign := make(map[int]netif.Sizes)
	for index, i := range s.interfaces {
		if i.state == api.SizesChanged && i.rule != nil {
			foreign[index] = i.from
		}
	}
	rollback = func() error {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.setRules(before, foreign)
	}
	if err := s.setRules(rules, nil); err != nil {
		return nil, fault.Join(err, s.setRules(before, foreign))
	}
	return rollback, nil
}

// setRules applies rules, and then sets the sizes in foreign, by interface index, which
// other programs had set.
func (s *reconciler) setRules(rules []config.BigTCPRule, foreign map[int]netif.Sizes) error {
	s.rules = rules
	if s.network == nil {
		if err := s.openNamespace(); err != nil || s.network == nil {
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

// retire reverts the sizes that the rules have set, and closes the namespace.
func (s *reconciler) retire() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.rules = nil
	defer s.closeNamespace()
	if s.network == nil {
		return s.revertRecords(func(r sizing.Record) bool { return r.Netns == s.netns })
	}
	return s.reconcile(true)
}

// close closes the namespace. The sizes stay.
func (s *reconciler) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closeNamespace()
}

// updateNamespace opens the namespace at the path if it has appeared or is another one, and
// closes a namespace that has vanished.
func (s *reconciler) updateNamespace() {
	s.mu.Lock()
	defer s.mu.Unlock()
	file, err := statFile(s.netns)
	if s.network != nil && err == nil && file == s.file {
		return
	}
	if s.network != nil {
		id := s.network.ID()
		s.closeNamespace()
		s.log.Info("network namespace has vanished", "netns", s.netns)
		// The sizes vanished with the namespace. Only the records are removed.
		if err := s.revertRecords(func(r sizing.Record) bool { return r.NetnsID == id }); err != nil {
			s.log.Debug("records of a network namespace not removed", "netns", s.netns, "error", err)
		}
	}
	before := s.problem
	if err := s.openNamespace(); err != nil {
		s.setProblem(err)
		if before == nil || before.Error() != err.Error() {
			s.log.Info("network namespace not entered", "netns", s.netns, "error", err)
		}
		return
	}
	if s.network != nil {
		s.log.Info("network namespace entered", "netns", s.netns)
		s.reconcileAndLog()
	}
}

// recheckAfter is the time until sizes are read again after they were set. It exceeds the
// poll interval of netif.Watch, which does not notice sizes that are reset between two
// polls.
const recheckAfter = 6 * time.Second

// openNamespace opens the namespace and watches its interfaces. A namespace that does not
// exist yet is not an error: network stays nil.
func (s *reconciler) openNamespace() error {
	file, err := statFile(s.netns)
	if errors.Is(err, fs.ErrNotExist) {
		s.setProblem(fault.WithHint(fmt.Errorf("there is no network namespace %s", s.netns), "its interfaces are set when the namespace appears"))
		return nil
	}
	if err != nil {
		return fmt.Errorf("find network namespace: %w", err)
	}
	network, err := netif.OpenNamespace(s.netns)
	if errors.Is(err, fs.ErrPermission) && !rights.Has(unix.CAP_SYS_ADMIN) {
		return errMayNotEnter()
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
	s.network, s.stopWatch, s.file, s.problem = network, cancel, file, nil
	s.recheck = time.NewTimer(recheckAfter)
	go s.handleChanges(ctx, network, changes, s.recheck.C)
	// An earlier namespace may have had the same path.
	return s.revertRecords(func(r sizing.Record) bool { return r.Netns == s.netns && r.NetnsID != network.ID() })
}

// errMayNotEnter returns the error of an agent without CAP_SYS_ADMIN.
func errMayNotEnter() error {
	return &fault.Error{Err: errors.New("the agent is not permitted to enter network namespaces"), Code: fault.CodeNotPermitted,
		Hint: rights.MissingHint(unix.CAP_SYS_ADMIN, "restart the agent: it keeps the capability if a bigtcp rule has a netns at startup")}
}

func statFile(path string) (fileID, error) {
	if path == "" {
		return fileID{}, nil
	}
	info, err := os.Stat(path)
	if err != nil {
		return fileID{}, err
	}
	stat := info.Sys().(*syscall.Stat_t)
	return fileID{stat.Dev, stat.Ino}, nil
}

// handleChanges reconciles after each change of an interface until ctx ends, and then
// closes network.
func (s *reconciler) handleChanges(ctx context.Context, network *netif.Namespace, changes <-chan struct{}, recheck <-chan time.Time) {
	defer network.Close()
	for {
		more := true
		select {
		case _, more = <-changes:
		case <-recheck:
		}
		s.mu.Lock()
		ended := ctx.Err() != nil
		switch {
		case ended:
		case more:
			clear(s.attempts)
			s.reconcileAndLog()
		default:
			s.closeNamespace()
			s.setProblem(errors.New("its interfaces are no longer watched"))
			s.log.Warn("interfaces not watched", "netns", s.netns)
		}
		s.mu.Unlock()
		if !more {
			if !ended {
				s.lost()
			}
			return
		}
	}
}

// closeNamespace closes the namespace, so that the agent does not keep it alive.
func (s *reconciler) closeNamespace() {
	if s.network == nil {
		return
	}
	s.stopWatch()
	s.recheck.Stop()
	s.network, s.interfaces, s.unmatched, s.attempts = nil, nil, nil, nil
}

// isOpen reports whether the namespace is open.
func (s *reconciler) isOpen() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.network != nil
}

// update reconciles after a change of the records.
func (s *reconciler) update() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.network != nil {
		s.reconcileAndLog()
	}
}

// reconcileAndLog applies the rules, except to interfaces whose sizes other programs have
// set.
func (s *reconciler) reconcileAndLog() {
	if err := s.reconcile(false); err != nil {
		if s.problem == nil || s.problem.Error() != err.Error() {
			s.log.Warn("sizes not set", events.SizesNotSet, "netns", s.netns, "error", err)
		}
		s.setProblem(err)
	}
}

// setProblem records why the namespace is not reconciled.
func (s *reconciler) setProblem(err error) {
	if s.problem == nil || s.problem.Error() != err.Error() {
		s.since = time.Now()
	}
	s.problem = err
}

// maxPasses bounds the passes of one reconcile.
const maxPasses = 3

// reconcile applies the rules until no changes are left. explicit is set for a change that
// a user requested: sizes that other programs have set are then set again, and the first
// failure is returned.
func (s *reconciler) reconcile(explicit bool) error {
	a, err := s.assess(s.network, s.rules, explicit)
	if err != nil {
		return err
	}
	for range maxPasses {
		acted, err := s.execute(a, explicit)
		if err != nil {
			return err
		}
		if !acted {
			break
		}
		s.recheck.Reset(recheckAfter)
		explicit = false
		if a, err = s.assess(s.network, s.rules, false); err != nil {
			return err
		}
	}
	s.recordStates(a)
	s.problem = nil
	return nil
}

// execute makes the changes of an assessment. It reports whether there were any.
func (s *reconciler) execute(a *assessment, explicit bool) (bool, error) {
	reverting := len(a.gone)+len(a.unwanted) > 0
	if reverting {
		err := s.revertRecords(func(r sizing.Record) bool {
			return r.NetnsID == s.network.ID() && a.interfaces[r.Index] == nil && !a.isNeeded(r)
		})
		if err != nil && explicit {
			return false, err
		}
		if err != nil {
			s.log.Warn("sizes not reverted", "netns", s.netns, "error", err)
		}
	}
	var groups []*interfaceGroup
	for _, p := range a.groups {
		if explicit || !s.failedBefore(a, p) {
			groups = append(groups, p)
		}
	}
	return reverting || len(groups) > 0, s.applyGroups(a, groups, explicit)
}

// revertRecords reverts the policy's records for which only returns true. Sizes that other
// programs have changed are kept.
func (s *reconciler) revertRecords(only func(sizing.Record) bool) error {
	done, err := s.store.Revert(func(r sizing.Record) bool { return r.Owner == sizing.ByPolicy && only(r) }, false)
	for _, r := range done {
		if r.Result == sizing.ResultReverted {
			s.log.Info("sizes reverted", events.SizesReverted, "netns", r.Netns, "interface", r.Interface)
		}
	}
	// Without a result, another process holds the lock of the records.
	if fault.Code(err) == fault.CodeConflict && len(done) > 0 {
		s.log.Warn("sizes not reverted", "netns", s.netns, "reason", err)
		return nil
	}
	return err
}

// applyGroups sets the sizes of each group, all of them or none.
func (s *reconciler) applyGroups(a *assessment, groups []*interfaceGroup, explicit bool) error {
	if len(groups) == 0 {
		return nil
	}
	// One call for all groups is cheapest and usually succeeds.
	if explicit || len(groups) > 1 {
		if err := s.applyTogether(a, groups); err == nil || explicit {
			return err
		}
	}
	for _, p := range groups {
		if err := s.applyTogether(a, []*interfaceGroup{p}); err != nil {
			s.log.Warn("sizes not set", events.SizesNotSet, "netns", s.netns, "interface", p.targets[0].Interface, "error", err)
		}
	}
	return nil
}

// failedBefore reports whether the same changes of a group were attempted before.
func (s *reconciler) failedBefore(a *assessment, p *interfaceGroup) bool {
	for _, index := range p.members {
		i := a.interfaces[index]
		if last, ok := s.attempts[index]; i.pending && (!ok || last.from != i.from || last.to != i.to) {
			return false
		}
	}
	return true
}

// applyTogether sets the sizes of several groups, all of them or none.
func (s *reconciler) applyTogether(a *assessment, groups []*interfaceGroup) error {
	var targets []sizing.Target
	force := false
	for _, p := range groups {
		targets = append(targets, p.targets...)
		force = force || p.override
	}
	_, err := s.store.Apply(s.network, sizing.ByPolicy, targets, force)
	if s.attempts == nil {
		s.attempts = make(map[int]attempt)
	}
	conflict := fault.Code(err) == fault.CodeConflict
	for _, p := range groups {
		for _, index := range p.members {
			i := a.interfaces[index]
			if conflict {
				delete(s.attempts, index)
			} else if i.pending {
				s.attempts[index] = attempt{i.from, i.to, err}
			}
		}
	}
	return err
}

// recordStates stores the states of an assessment, and logs those that differ from the
// previous ones.
func (s *reconciler) recordStates(a *assessment) {
	now := time.Now()
	for index, i := range a.interfaces {
		previous := s.interfaces[index]
		i.since = now
		if i.pending {
			i.err = errors.New("its sizes are not set yet")
			if last, ok := s.attempts[index]; ok && last.err != nil {
				i.err = last.err
			}
		}
		reported := previous != nil && previous.state == i.state
		if reported {
			i.since = previous.since
		}
		if i.state == api.SizesChanged && (!reported || previous.from != i.from) {
			s.changes++
			reported = false
		}
		if reported {
			continue
		}
		log := s.log.With("netns", s.netns, "interface", i.name)
		switch i.state {
		case api.SizesApplied:
			log.Info("sizes applied", events.SizesApplied, "gso_max_size", i.from.GSO, "gro_max_size", i.from.GRO,
				"gso_ipv4_max_size", i.from.GSOIPv4, "gro_ipv4_max_size", i.from.GROIPv4)
		case api.SizesChanged:
			log.Warn("sizes changed externally and kept", events.SizesChanged, "gso_max_size", i.from.GSO, "gro_max_size", i.from.GRO,
				"gso_ipv4_max_size", i.from.GSOIPv4, "gro_ipv4_max_size", i.from.GROIPv4, "hint", fault.Hint(i.err))
		default:
			log.Warn("sizes not set", events.SizesNotSet, "state", i.state, "error", i.err)
		}
	}
	unmatched := make(map[config.BigTCPRule]time.Time)
	for _, rule := range a.unmatched {
		if unmatched[rule] = s.unmatched[rule]; unmatched[rule].IsZero() {
			unmatched[rule] = now
		}
	}
	s.interfaces, s.unmatched = a.interfaces, unmatched
}
