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
	"sockeye/internal/fault"
	"sockeye/internal/rights"
)

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

// close lets go of the namespace. What is set stays.
func (s *sizer) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.exit()
}

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
