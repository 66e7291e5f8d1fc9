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

// Report is the result of Apply.
type Report struct {
	// TunedLive is the number of connections that received a rule. ByRule contains this number by rule name. Control is
	// the number of connections in the control arm of a trial.
	TunedLive int            `json:"tuned_live"`
	ByRule    map[string]int `json:"by_rule"`
	Control   int            `json:"control"`
	// AlreadyTuned is the number of connections that already have the rule, or a rule that matches the tag of the peer,
	// which is only known during the handshake.
	AlreadyTuned int `json:"already_tuned"`
	NoRule       int `json:"no_rule"`
	// NotAsked is the number of connections of rules that the caller did not select.
	NotAsked int `json:"not_asked"`
	// Options is the number of options that were set, without Failures.
	Options int `json:"options"`
	// Failures are the options that the kernel refused during Apply, also on new connections of the same rules.
	Failures []api.TuneLiveFailure `json:"failures"`
	// Problems lists sockets and processes that could not be read or changed completely, with the reason.
	Problems []string `json:"problems"`
	// Saved contains the previous values, for Revert.
	Saved Saved `json:"-"`
}

// Saved contains the values of connections before Apply, by socket cookie. Cookies are valid until the next boot.
type Saved map[uint64]SavedConnection

// SavedConnection contains the previous values of one connection.
type SavedConnection struct {
	Rule   string         `json:"rule"`
	Local  netip.AddrPort `json:"local"`
	Remote netip.AddrPort `json:"remote"`
	// Values are the changed values, in the order of config.TuneOptions.
	Values []SavedValue `json:"values"`
	// Unfinished is set before the connection is changed: the values after Apply are not known, and the connection may
	// still have the rule Had (0: none).
	Unfinished bool   `json:"unfinished,omitempty"`
	Had        uint32 `json:"had,omitempty"`
}

// SavedValue is the value of an option before and after Apply; nil if unknown.
type SavedValue struct {
	Option string   `json:"option"`
	Before *Reading `json:"before,omitempty"`
	After  *Reading `json:"after,omitempty"`
}

// liveApply is the state of one Apply.
type liveApply struct {
	tune  *bpf.Tune
	live  *bpf.Live
	only  func(rule string) bool
	begin func(cookie uint64, c SavedConnection) error
	rules map[uint32]*bpf.InstalledRule
	plans map[uint64]plan
	// unseen counts connections for which the kernel does not run the program.
	unseen int
	report Report
}

// plan is the planned change of one connection.
type plan struct {
	rule uint32 // 0: none
	role uint32
}

// Apply applies rules to the open connections of the processes in a cgroup directory and below: each connection gets
// the rule that it would have got at its start, if only reports true for the name of the rule (nil: for all rules).
// Settings that act only at the start of a connection, and connections that are not accepted yet, are left out.
// Listeners are prepared for tags.
//
// Apply calls begin with the previous values of each connection before it changes the connection; an error of begin ends
// Apply. The caller keeps Report.Saved also if Apply returns an error. The error wraps ebpf.ErrNotSupported if the
// kernel lacks the hook.
func Apply(t *bpf.Tune, cgroup string, only func(rule string) bool, begin func(cookie uint64, c SavedConnection) error) (Report, error) {
	a := &liveApply{tune: t, only: only, begin: begin, plans: make(map[uint64]plan),
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

// decide asks the program for the rule of each connection.
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
		// The listener's own connections without MPTCP are plain TCP connections.
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
		// The connection is closing, or was opened since and has its rule.
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
	return a.applyRule(s, plan, rule, has)
}

func (a *liveApply) applyRule(s *procsock.Socket, plan plan, rule *bpf.InstalledRule, had *bpf.TuneConnection) error {
	before, err := readings(s)
	if err != nil {
		a.problem(s, err)
		return nil
	}
	begun := SavedConnection{Rule: bpf.Text(rule.Name[:]), Local: s.Local, Remote: s.Remote, Unfinished: true,
		Values: changedValues(liveOptions(&rule.TuneRule, s.Family), before, nil)}
	if had != nil {
		begun.Had = had.Rule
	}
	if err := a.begin(s.Cookie, begun); err != nil {
		return err
	}
	if err := a.live.ApplyTo(s.FD, plan.role); err != nil {
		a.problem(s, err)
		return nil
	}
	has, err := a.tune.Connection(s.FD)
	if err != nil {
		return err
	}
	switch {
	case has == nil:
		// The rules were replaced concurrently.
		a.report.NoRule++
		return nil
	case had != nil && had.Rule == has.Rule:
		a.report.AlreadyTuned++
		return nil
	}
	if rule = a.rules[has.Rule]; rule == nil {
		if a.rules, err = a.tune.Rules(); err != nil {
			return err
		}
		if rule = a.rules[has.Rule]; rule == nil {
			return fmt.Errorf("tune %s: unknown rule %d", s, has.Rule)
		}
	}
	name := bpf.Text(rule.Name[:])
	saved := SavedConnection{Rule: name, Local: s.Local, Remote: s.Remote, Values: []SavedValue{}}
	a.report.TunedLive++
	a.report.ByRule[name]++
	if has.Flags&bpf.TuneConnectionUnseen != 0 {
		a.unseen++
	}
	if int(has.Arm) == bpf.TuneArmControl {
		a.report.Control++
		a.report.Saved[s.Cookie] = saved
		return nil
	}
	set := liveOptions(&rule.TuneRule, s.Family)
	a.report.Options += len(set)
	after, err := readings(s)
	if err != nil {
		a.problem(s, err)
	}
	saved.Values = changedValues(set, before, after)
	a.report.Saved[s.Cookie] = saved
	return nil
}

// Reasons why options are not reverted.
const (
	leftChanged = "changed since, by the application or by another program"
	leftPacing  = "the rate is not bounded any more; pacing goes on, which the kernel does not end"
	leftBBR     = "pacing goes on, which bbr began and the kernel does not end"
	leftClamp   = "the bound is gone; slow start begins anew, as its threshold cannot be set alone"
	leftDefault = "set to 200ms, the kernel's default: this kernel does not report the previous value"
)

// defaults are the kernel's default values of options that older kernels or no kernel can read: snd_cwnd_clamp, which
// starts at ^0 (BPF can set no larger value than the policy's), TCP_DELACK_MAX and TCP_RTO_MIN (include/net/tcp.h,
// Linux 6.18).
var defaults = map[string]struct {
	value  int32
	reason string
}{
	"cwnd_clamp": {math.MaxInt32, leftClamp},
	"delack_max": {200 * 1000, leftDefault},
	"rto_min":    {200 * 1000, leftDefault},
}

// changedValues returns the values of options that a rule has set, and that differ.
func changedValues(set map[string]bool, before, after map[string]*Reading) []SavedValue {
	values := []SavedValue{}
	for _, o := range AllOptions() {
		v := SavedValue{Option: o.Name, Before: before[o.Name], After: after[o.Name]}
		_, unreadable := defaults[o.Name]
		switch {
		case o.Name == "window_clamp" && !set[o.Name] && set["rcvbuf"]:
			// The kernel computes the value from the buffer when it is needed.
			v.After = nil
		case !set[o.Name] && (o.Name != "priority" || !set["tos"]):
			// IP_TOS also sets the priority.
			continue
		case v.Before == nil && !unreadable, v.Before != nil && sameReading(v.Before, v.After):
			continue
		}
		values = append(values, v)
	}
	return values
}

// countFailures adds the options that the kernel has refused since before.
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

// liveOptions returns the options that a rule sets on open connections.
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

// readings reads all options that can be set on open connections and that the kernel reports.
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

// Reverted is the result of Revert.
type Reverted struct {
	// Connections lost their rule; Options were set back.
	Connections int `json:"connections"`
	Options     int `json:"options"`
	// Gone counts connections that are closed, or no longer among the sockets of the cgroup.
	Gone int `json:"gone"`
	// Left lists the options that were not reverted, or not completely, with the reason.
	Left     []api.TuneNotReverted `json:"left"`
	Problems []string              `json:"problems"`
	// Remaining contains the connections that were not found while some processes could not be read.
	Remaining Saved `json:"-"`
}

// liveRevert is the state of one Revert.
type liveRevert struct {
	tune   *bpf.Tune
	live   *bpf.Live
	saved  Saved
	left   map[api.TuneNotReverted]int
	report Reverted
}

// Revert reverts the changes of Apply to the connections in saved: values that are still those of Apply become the
// previous ones, buffers that the kernel tuned are tuned again, and no rule counts the connections any more.
// Connections that had a rule from their start are not changed.
func Revert(t *bpf.Tune, cgroup string, saved Saved) (Reverted, error) {
	r := &liveRevert{tune: t, saved: maps.Clone(saved), left: make(map[api.TuneNotReverted]int),
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
	if saved.Unfinished {
		has, err := r.tune.Connection(s.FD)
		if err != nil {
			return err
		}
		saved.Unfinished = has != nil && has.Rule != saved.Had
		if !saved.Unfinished && !slices.ContainsFunc(saved.Values, func(v SavedValue) bool { return v.After != nil }) {
			return nil // Apply has not changed the connection
		}
	}
	// All values are compared before any is set, because setting one may change another.
	var values []SavedValue
	buffer := false
	for _, v := range saved.Values {
		if r.unchanged(s, &saved, v, buffer) {
			values = append(values, v)
			buffer = buffer || v.Option == "rcvbuf"
		}
	}
	// In the order of Apply: IP_TOS sets the priority, which follows.
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

// problem describes why a socket could not be changed.
func problem(s *procsock.Socket, err error) string {
	if errors.Is(err, unix.ENOPROTOOPT) {
		err = errors.New("it belongs to the cgroup in which it was opened")
	}
	return fmt.Sprintf("%s: %v", s, err)
}

// unchanged reports whether an option still has the value that Apply set, or another value than before an Apply that did
// not end. TCP_WINDOW_CLAMP, which the kernel computes from the receive buffer, is reverted with the buffer.
func (r *liveRevert) unchanged(s *procsock.Socket, c *SavedConnection, v SavedValue, buffer bool) bool {
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
		r.recordLeft(c.Rule, v.Option, err.Error())
	case ok && c.Unfinished && now != *v.Before:
		return true
	case ok && (v.After != nil && now == *v.After || o.Name == "window_clamp" && buffer && now.Number < v.Before.Number):
		return true
	case v.After != nil && !c.Unfinished:
		r.recordLeft(c.Rule, v.Option, leftChanged)
	}
	return false
}

// restore sets an option to its previous value.
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

// recordPacing records that a connection still paces and did not before Apply: the kernel never stops pacing once it
// has begun, for a maximum rate or with bbr.
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

// restore sets an option to the value of a reading.
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

// restoreBuffer sets the size of a buffer, regardless of the sysctls, and lets the kernel tune the buffer again if it
// did before.
func restoreBuffer(fd, name, lock int, r Reading) error {
	// The kernel doubles the value.
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

// Merge adds the previous values of a later Apply, so that Revert restores the values before the first.
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
			if i >= 0 && c.Unfinished {
				c.Values[i].After = before.After
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
