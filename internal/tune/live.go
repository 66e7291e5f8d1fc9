// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math"
	"net/netip"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/bpf"
	"sockeye/internal/config"
	"sockeye/internal/match"
	"sockeye/internal/procsock"
)

// Report is what Apply did.
type Report struct {
	// Adopted counts the connections that got a rule, ByRule splits it by the
	// rule's name, and Control are those of them that the rule's trial leaves
	// alone.
	Adopted int            `json:"adopted"`
	ByRule  map[string]int `json:"by_rule"`
	Control int            `json:"control"`
	// AlreadyTuned have the rule that they would get, or one that asks for the
	// peer's tag, which is not known any more.
	AlreadyTuned int `json:"already_tuned"`
	NoRule       int `json:"no_rule"`
	// NotAsked would get a rule that the caller did not want.
	NotAsked int `json:"not_asked"`
	// Options are the settings made, the Failures left out.
	Options int `json:"options"`
	// Failures are what the kernel refused meanwhile, new connections of the same
	// rules included.
	Failures []api.TuneLiveFailure `json:"failures"`
	// Problems are sockets and processes that could not be dealt with, wholly or
	// at all, and why.
	Problems []string `json:"problems"`
	// Saved is what Revert needs.
	Saved Saved `json:"-"`
}

// Saved is what connections had before Apply, by the sockets' cookies, which
// are valid until the host is booted again.
type Saved map[uint64]SavedConnection

// SavedConnection is what one connection had.
type SavedConnection struct {
	Rule   string         `json:"rule"`
	Local  netip.AddrPort `json:"local"`
	Remote netip.AddrPort `json:"remote"`
	// Values are those that Apply changed, in the order of config.TuneOptions.
	Values []SavedValue `json:"values"`
}

// SavedValue is an option before and after; nil is what is not known.
type SavedValue struct {
	Option string   `json:"option"`
	Before *Reading `json:"before,omitempty"`
	After  *Reading `json:"after,omitempty"`
}

// Apply gives the open connections of the processes in a cgroup, given by its
// folder, and below the rules that they would have had, of those whose name only
// says yes to; nil says it to all. What a rule does at the start of a connection
// alone is left out, and so are connections that nobody has accepted yet.
// Listeners are prepared for tags.
//
// The caller keeps Report.Saved, of a Report that comes with an error, too. The
// error wraps ebpf.ErrNotSupported if the kernel cannot do it.
func Apply(t *bpf.Tune, cgroup string, only func(rule string) bool) (Report, error) {
	a := &liveApply{tune: t, only: only, plans: make(map[uint64]plan),
		report: Report{ByRule: make(map[string]int), Failures: []api.TuneLiveFailure{}, Problems: []string{}, Saved: make(Saved)}}
	var err error
	if a.rules, err = t.Rules(); err != nil {
		return a.report, err
	}
	failed, err := t.Failures()
	if err != nil {
		return a.report, err
	}
	if err := a.decide(cgroup); err != nil {
		return a.report, err
	}
	if a.live, err = t.Live(); err != nil {
		return a.report, err
	}
	problems, err := procsock.WalkOnce(cgroup, a.visit)
	for _, p := range problems {
		a.report.Problems = append(a.report.Problems, p.Error())
	}
	if a.unseen > 0 {
		a.report.Problems = append(a.report.Problems, fmt.Sprintf("%d connections have their rule, but are not counted and never react: not supported before Linux 6.12", a.unseen))
	}
	err = errors.Join(err, a.live.Close(), a.countFailures(failed))
	return a.report, err
}

// liveApply is one Apply.
type liveApply struct {
	tune  *bpf.Tune
	live  *bpf.Live
	only  func(rule string) bool
	rules map[uint32]*bpf.TuneRule
	plans map[uint64]plan
	// unseen are connections of which the kernel will not tell the program.
	unseen int
	report Report
}

// plan is what a connection is to get.
type plan struct {
	rule uint32 // 0: none
	role uint32
}

// decide asks the program which rules the connections would have.
func (a *liveApply) decide(cgroup string) error {
	listeners := make(procsock.Listeners)
	type candidate struct {
		socket *procsock.Socket
		has    *bpf.TuneConnection
	}
	var candidates []candidate
	_, err := procsock.WalkOnce(cgroup, func(s *procsock.Socket) error {
		listeners.Add(s)
		if s.MPTCP || !s.Connected() {
			return nil
		}
		has, err := a.tune.Connection(s.FD)
		candidates = append(candidates, candidate{s, has})
		return err
	})
	if err != nil {
		return err
	}
	questions := make([]bpf.MatchQuestion, len(candidates))
	for i, c := range candidates {
		s := c.socket
		questions[i] = match.Question{Local: s.Local, Remote: s.Remote, Role: listeners.Role(s)}.BPF()
		if c.has != nil {
			questions[i].Role = uint32(c.has.Role)
		}
	}
	answers, err := a.tune.Decide(questions...)
	if err != nil {
		return err
	}
	for i, c := range candidates {
		a.plans[c.socket.Cookie] = plan{rule: answers[i], role: questions[i].Role}
	}
	return nil
}

func (a *liveApply) visit(s *procsock.Socket) error {
	switch {
	case s.MPTCP && !s.Remote.IsValid():
		// What a listener accepts without MPTCP is TCP like any other.
		return nil
	case s.MPTCP:
		a.problem(s, errors.New("it is an MPTCP socket, whose connections cannot be tuned"))
		return nil
	case s.Listening:
		if err := a.live.Listen(s.FD); err != nil {
			a.problem(s, err)
		}
		return nil
	}
	plan, ok := a.plans[s.Cookie]
	if !ok || !s.Connected() {
		// It is closing, or was opened since: then it has its rule.
		return nil
	}
	rule := a.rules[plan.rule]
	if rule == nil {
		a.report.NoRule++
		return nil
	}
	if a.only != nil && !a.only(bpf.Text(rule.Name[:])) {
		a.report.NotAsked++
		return nil
	}
	has, err := a.tune.Connection(s.FD)
	if err != nil {
		return err
	}
	if has != nil && has.Rule == plan.rule {
		a.report.AlreadyTuned++
		return nil
	}
	return a.applyRule(s, plan.role, has)
}

func (a *liveApply) applyRule(s *procsock.Socket, role uint32, had *bpf.TuneConnection) error {
	before, err := readings(s)
	if err != nil {
		a.problem(s, err)
		return nil
	}
	if err := a.live.Adopt(s.FD, role); err != nil {
		a.problem(s, err)
		return nil
	}
	has, err := a.tune.Connection(s.FD)
	if err != nil {
		return err
	}
	switch {
	case has == nil:
		// The rules were replaced in between.
		a.report.NoRule++
		return nil
	case had != nil && had.Rule == has.Rule:
		a.report.AlreadyTuned++
		return nil
	}
	rule := a.rules[has.Rule]
	if rule == nil {
		if a.rules, err = a.tune.Rules(); err != nil {
			return err
		}
		if rule = a.rules[has.Rule]; rule == nil {
			return fmt.Errorf("adopt %s: its rule %d is not known", s, has.Rule)
		}
	}
	name := bpf.Text(rule.Name[:])
	saved := SavedConnection{Rule: name, Local: s.Local, Remote: s.Remote, Values: []SavedValue{}}
	a.report.Adopted++
	a.report.ByRule[name]++
	if has.Flags&bpf.TuneConnectionUnseen != 0 {
		a.unseen++
	}
	if int(has.Arm) == bpf.TuneArmControl {
		a.report.Control++
		a.report.Saved[s.Cookie] = saved
		return nil
	}
	set := liveOptions(rule, s.Family)
	a.report.Options += len(set)
	after, err := readings(s)
	if err != nil {
		a.problem(s, err)
	}
	for _, o := range AllOptions() {
		v := SavedValue{Option: o.Name, Before: before[o.Name], After: after[o.Name]}
		_, unreadable := defaults[o.Name]
		switch {
		case o.Name == "window_clamp" && !set[o.Name] && set["rcvbuf"]:
			// The kernel computes it anew from the buffer, when it comes to it.
			v.After = nil
		case !set[o.Name] && (o.Name != "priority" || !set["tos"]):
			// IP_TOS sets the priority, too.
			continue
		case v.Before == nil && !unreadable, v.Before != nil && sameReading(v.Before, v.After):
			continue
		}
		saved.Values = append(saved.Values, v)
	}
	a.report.Saved[s.Cookie] = saved
	return nil
}

// countFailures adds what the kernel refused since.
func (a *liveApply) countFailures(before map[bpf.TuneFailure]uint64) error {
	now, err := a.tune.Failures()
	if err != nil {
		return err
	}
	for f, count := range now {
		rule := a.rules[f.Rule]
		if count <= before[f] || rule == nil || a.report.ByRule[bpf.Text(rule.Name[:])] == 0 {
			continue
		}
		count -= before[f]
		failure := api.TuneLiveFailure{Rule: bpf.Text(rule.Name[:]), Error: unix.Errno(f.Error).Error(), Count: count}
		if int(f.Option) < len(config.TuneOptions) {
			failure.Option = config.TuneOptions[f.Option].Name
		}
		a.report.Failures = append(a.report.Failures, failure)
		a.report.Options -= min(int(count), a.report.Options)
	}
	slices.SortFunc(a.report.Failures, func(a, b api.TuneLiveFailure) int {
		return cmp.Or(cmp.Compare(a.Rule, b.Rule), cmp.Compare(a.Option, b.Option), cmp.Compare(a.Error, b.Error))
	})
	return nil
}

func (a *liveApply) problem(s *procsock.Socket, err error) {
	a.report.Problems = append(a.report.Problems, problem(s, err))
}

// problem says why a socket could not be dealt with.
func problem(s *procsock.Socket, err error) string {
	if errors.Is(err, unix.ENOPROTOOPT) {
		err = errors.New("it was opened in another cgroup, whose it stays")
	}
	return fmt.Sprintf("%s: %v", s, err)
}

// liveOptions are the options that a rule sets on open connections.
func liveOptions(rule *bpf.TuneRule, family int) map[string]bool {
	names := make(map[string]bool)
	all := AllOptions()
	for _, o := range rule.Option[:rule.Options] {
		if o.Phases&bpf.TunePhaseLive != 0 && int(o.Id) < len(all) && all[o.Id].isFor(family) {
			names[all[o.Id].Name] = true
		}
	}
	return names
}

// readings are the values of all options that can be set on open connections,
// as far as they can be read.
func readings(s *procsock.Socket) (map[string]*Reading, error) {
	values := make(map[string]*Reading)
	for _, o := range AllOptions() {
		if o.Phases&bpf.TunePhaseLive == 0 || !o.isFor(s.Family) {
			continue
		}
		r, ok, err := o.read(s.FD)
		if err != nil {
			return values, err
		}
		if ok {
			values[o.Name] = &r
		}
	}
	return values, nil
}

// Reverted is what Revert did.
type Reverted struct {
	// Connections lost their rule, and had Options set back.
	Connections int `json:"connections"`
	Options     int `json:"options"`
	// Gone are closed, or not among the sockets of the cgroup any more.
	Gone int `json:"gone"`
	// Left is what was not taken back, or not wholly, and why.
	Left     []api.TuneNotReverted `json:"left"`
	Problems []string              `json:"problems"`
	// Remaining are connections that were not found while there were problems:
	// they may be among what could not be read.
	Remaining Saved `json:"-"`
}

// Why options are left.
const (
	leftChanged = "changed since, by the application or by another program"
	leftPacing  = "the rate is not bounded any more; pacing goes on, which the kernel does not end"
	leftBBR     = "pacing goes on, which bbr began and the kernel does not end"
	leftClamp   = "the bound is gone; slow start begins anew, as its threshold cannot be set alone"
	leftDefault = "set to 200ms, the kernel's default, as this kernel does not tell what it was"
)

// defaults are the kernel's, of options that no kernel or older ones cannot
// read: snd_cwnd_clamp, which takes no larger value by BPF and starts at ^0;
// TCP_DELACK_MAX and TCP_RTO_MIN (include/net/tcp.h, Linux 6.18).
var defaults = map[string]struct {
	value  int32
	reason string
}{
	"cwnd_clamp": {math.MaxInt32, leftClamp},
	"delack_max": {200 * 1000, leftDefault},
	"rto_min":    {200 * 1000, leftDefault},
}

// Revert takes back what Apply did to the connections in saved: values that are
// still as Apply set them become what they were, autotuned buffers are tuned
// again, and no rule counts the connections any more. Connections that had a
// rule from their start are not touched.
func Revert(t *bpf.Tune, cgroup string, saved Saved) (Reverted, error) {
	r := &liveRevert{saved: maps.Clone(saved), left: make(map[api.TuneNotReverted]int),
		report: Reverted{Left: []api.TuneNotReverted{}, Problems: []string{}, Remaining: make(Saved)}}
	live, err := t.Live()
	if err != nil {
		return r.report, err
	}
	r.live = live
	problems, err := procsock.WalkOnce(cgroup, r.visit)
	for _, p := range problems {
		r.report.Problems = append(r.report.Problems, p.Error())
	}
	if err != nil || len(problems) > 0 {
		r.report.Remaining = r.saved
	} else {
		r.report.Gone += len(r.saved)
	}
	for left, n := range r.left {
		left.Connections = n
		r.report.Left = append(r.report.Left, left)
	}
	slices.SortFunc(r.report.Left, func(a, b api.TuneNotReverted) int {
		return cmp.Or(cmp.Compare(a.Rule, b.Rule), cmp.Compare(optionIndex(a.Option), optionIndex(b.Option)), cmp.Compare(a.Reason, b.Reason))
	})
	return r.report, errors.Join(err, live.Close())
}

// liveRevert is one Revert.
type liveRevert struct {
	live   *bpf.Live
	saved  Saved
	left   map[api.TuneNotReverted]int
	report Reverted
}

func (r *liveRevert) visit(s *procsock.Socket) error {
	saved, ok := r.saved[s.Cookie]
	if !ok {
		return nil
	}
	delete(r.saved, s.Cookie)
	if !s.Connected() {
		r.report.Gone++
		return nil
	}
	// Looked at before anything is set: one may change another.
	var values []SavedValue
	buffer := false
	for _, v := range saved.Values {
		if r.unchanged(s, saved.Rule, v, buffer) {
			values = append(values, v)
			buffer = buffer || v.Option == "rcvbuf"
		}
	}
	// In the order of setting them: IP_TOS sets the priority, which comes after.
	for _, v := range values {
		if err := r.restore(s, saved.Rule, v); err != nil {
			r.recordLeft(saved.Rule, v.Option, err.Error())
			continue
		}
		r.report.Options++
	}
	if err := r.recordPacing(s, saved.Rule, values); err != nil {
		r.report.Problems = append(r.report.Problems, problem(s, err))
	}
	if err := r.live.Forget(s.FD); err != nil {
		r.report.Problems = append(r.report.Problems, problem(s, err))
		return nil
	}
	r.report.Connections++
	return nil
}

// unchanged tells whether an option is still as Apply left it. The bound of the
// window, which the kernel computes from the receive buffer, goes with the
// buffer: it would stay at what the smaller buffer has made of it.
func (r *liveRevert) unchanged(s *procsock.Socket, rule string, v SavedValue, buffer bool) bool {
	o, ok := FindOption(v.Option)
	if !ok {
		return false
	}
	if v.Before == nil {
		return true
	}
	now, ok, err := o.read(s.FD)
	switch {
	case err != nil:
		r.recordLeft(rule, v.Option, err.Error())
	case ok && (v.After != nil && now == *v.After || o.Name == "window_clamp" && buffer && now.Number < v.Before.Number):
		return true
	case v.After != nil:
		r.recordLeft(rule, v.Option, leftChanged)
	}
	return false
}

// restore sets an option back.
func (r *liveRevert) restore(s *procsock.Socket, rule string, v SavedValue) error {
	o, _ := FindOption(v.Option)
	if v.Before == nil {
		back := defaults[o.Name]
		if err := r.live.Set(s.FD, o.Level, o.Number, back.value); err != nil {
			return err
		}
		r.recordLeft(rule, o.Name, back.reason)
		return nil
	}
	return os.NewSyscallError("setsockopt", o.restore(s.FD, *v.Before))
}

// recordPacing tells if a connection paces what it sends, as it did not before:
// once begun, for a bound of the rate or by bbr, the kernel never ends it.
func (r *liveRevert) recordPacing(s *procsock.Socket, rule string, restored []SavedValue) error {
	congestion, _ := FindOption("congestion")
	now, _, err := congestion.read(s.FD)
	if err != nil || now.Text == "bbr" {
		return err
	}
	for _, v := range restored {
		switch {
		case v.Option == "pacing_rate" && v.Before != nil && v.Before.Number < 0:
			r.recordLeft(rule, v.Option, leftPacing)
		case v.Option == "congestion" && v.After != nil && v.After.Text == "bbr":
			r.recordLeft(rule, v.Option, leftBBR)
		}
	}
	return nil
}

func (r *liveRevert) recordLeft(rule, option, reason string) {
	r.left[api.TuneNotReverted{Rule: rule, Option: option, Reason: reason}]++
}

// set gives an option the value that was read.
func (o Option) restore(fd int, r Reading) error {
	number := readable[o.Name].number
	switch o.Name {
	case "congestion":
		return unix.SetsockoptString(fd, unix.SOL_TCP, number, r.Text)
	case "pacing_rate":
		return unix.SetsockoptUint64(fd, int(o.Level), number, uint64(r.Number))
	case "sndbuf":
		return restoreBuffer(fd, unix.SO_SNDBUFFORCE, o.lock(), r)
	case "rcvbuf":
		return restoreBuffer(fd, unix.SO_RCVBUFFORCE, o.lock(), r)
	}
	return unix.SetsockoptInt(fd, int(o.Level), number, int(r.Number/o.Unit))
}

// restoreBuffer gives a buffer its size, whatever the sysctls say, and lets the
// kernel tune it again if it did.
func restoreBuffer(fd, name, lock int, r Reading) error {
	// The kernel doubles it.
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, name, int(r.Number+1)/2); err != nil {
		return err
	}
	if r.Locked {
		return nil
	}
	locks, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_BUF_LOCK)
	if err != nil {
		return err
	}
	return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_BUF_LOCK, locks&^lock)
}

// Merge adds what a later Apply has saved, so that Revert goes back to what was
// there before the first.
func (s Saved) Merge(later Saved) {
	for cookie, c := range later {
		earlier, ok := s[cookie]
		if !ok {
			s[cookie] = c
			continue
		}
		c.Values = slices.Clone(c.Values)
		for _, before := range earlier.Values {
			i := slices.IndexFunc(c.Values, func(v SavedValue) bool { return v.Option == before.Option })
			switch {
			case i < 0:
				c.Values = append(c.Values, before)
			case before.After == nil, sameReading(before.After, c.Values[i].Before):
				c.Values[i].Before = before.Before
			}
		}
		slices.SortStableFunc(c.Values, func(a, b SavedValue) int {
			return cmp.Compare(optionIndex(a.Option), optionIndex(b.Option))
		})
		s[cookie] = c
	}
}

func sameReading(a, b *Reading) bool {
	return a == nil && b == nil || a != nil && b != nil && *a == *b
}

func optionIndex(name string) int {
	return slices.IndexFunc(config.TuneOptions, func(o config.TuneOption) bool { return o.Name == name })
}
