// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// maxPolicyPrefixes is the maximum number of prefixes of all rules together.
const maxPolicyPrefixes = 4 * 1000 * 1000

// checkTune reads the files that rules name, and refuses invalid combinations of values.
func (d *decoder) checkTune(p *Policy) {
	names := map[string]string{}
	total := 0                         // number of prefixes
	sound := make([]bool, len(p.Tune)) // rules with a valid match
	for i := range p.Tune {
		r, path := &p.Tune[i], fmt.Sprintf("tune[%d]", i)
		if first, ok := names[r.Name]; ok && r.Name != "" {
			d.refuseAt(path+".name", fmt.Sprintf("%q is already %s, line %d", r.Name, first, d.at[first].line), "")
		} else {
			names[r.Name] = path + ".name"
		}
		whole := d.checkPrefixes(path+".match", &r.Match, &total)
		d.checkMatch(path+".match", r.Match, []Protocol{TCP}, p.Services)
		d.checkEffects(path, r)
		d.checkSettings(path+".set", r)
		sound[i] = r.Cgroup != "" && whole && !d.bad[path+".match"]
		if sound[i] {
			d.checkReach(path, p.Tune[:i], sound, r)
		}
	}
}

// checkPrefixes adds the prefixes of the file to those of the rule, and adds their number to total. checkPrefixes
// reports whether the rule has all its prefixes.
func (d *decoder) checkPrefixes(path string, m *Match, total *int) bool {
	remote, file := path+".remote", path+".remote_file"
	var terms []PrefixTerm
	if m.RemoteFile != "" {
		terms = d.prefixFile(file, m.RemoteFile)
	}
	within := *total <= maxPolicyPrefixes
	*total += len(m.Remote) + len(terms) + len(m.Local)
	if *total > maxPolicyPrefixes {
		if within {
			d.refuseAt(path, fmt.Sprintf("has, with the rules before it, more than %d prefixes", maxPolicyPrefixes), "")
		}
		return false
	}
	d.mergeFile(file, m, terms)
	if !d.given(remote) {
		remote = file
	}
	if !d.bad[remote] && !d.bad[file] {
		d.checkSet(remote, m.Remote)
	}
	if local := path + ".local"; !d.bad[local] {
		d.checkSet(local, m.Local)
	}
	return m.RemoteFile == "" || terms != nil
}

// mergeFile appends the terms of the file. Several rules may share the slice of the terms.
func (d *decoder) mergeFile(path string, m *Match, terms []PrefixTerm) {
	if len(m.Remote) == 0 {
		m.Remote = terms
		return
	}
	inline := map[netip.Prefix]bool{}
	for _, t := range m.Remote {
		inline[t.Prefix] = true
	}
	for _, t := range terms {
		if inline[t.Prefix] {
			d.refuseAt(path, fmt.Sprintf("%s: %s is already in remote", m.RemoteFile, t.Prefix), "")
		}
	}
	m.Remote = slices.Concat(m.Remote, terms)
}

// checkSet checks that a set includes at least one prefix.
func (d *decoder) checkSet(path string, terms []PrefixTerm) {
	if len(terms) > 0 && !slices.ContainsFunc(terms, func(t PrefixTerm) bool { return !t.Not }) {
		d.refuseAt(path, "must have a prefix without !", "add 0.0.0.0/0 or ::/0 for all other addresses")
	}
}

func (d *decoder) checkMatch(path string, m Match, protocols []Protocol, services []Service) {
	if m.Service == "" {
		return
	}
	at := path + ".service"
	names := make([]string, len(services))
	for i, s := range services {
		names[i] = s.Name
	}
	if i := slices.Index(names, m.Service); i < 0 {
		hint := "it has no services"
		if len(names) > 0 {
			known := names[:min(len(names), 16)]
			hint = cmp.Or(didYouMean(m.Service, known), "services: "+strings.Join(known, ", "))
		}
		d.refuseAt(at, "is not a service of this policy: "+quoteShort(m.Service), hint)
	} else if l := services[i].Listeners; len(l) > 0 && len(protocols) > 0 && !slices.ContainsFunc(l, func(l Listener) bool { return l.Protocol == "" || slices.Contains(protocols, l.Protocol) }) {
		d.refuseAt(at, "service "+m.Service+" has no "+joinWords(upper(protocols), "or")+" listener", "the rule is for "+joinWords(upper(protocols), "and")+" alone")
	}
	if m.Role == RoleConnect {
		d.refuseAt(at, "does not go with role connect", "it stands for the connections that the service accepts")
	}
	for _, key := range []string{"port", "local_port", "local"} {
		if d.given(path + "." + key) {
			d.refuseAt(path+"."+key, "does not go with service", "the service's listeners say it")
		}
	}
}

// checkEffects refuses rules and keys without an effect.
func (d *decoder) checkEffects(path string, r *TuneRule) {
	set, tag, react := d.given(path+".set"), d.given(path+".tag"), d.given(path+".react")
	if !set && !tag && !react && (r.Name != "" || r.Cgroup != "") {
		d.refuseAt(path, "must have set, tag or react", "as in set: {sndbuf: 150KB}")
	}
	if r.Trial != nil && react && !set && !tag {
		d.refuseAt(path+".trial", "needs set or tag", "a trial compares connections with them and without")
	}
	if r.Observe != ObserveOff {
		return
	}
	if r.Trial != nil {
		d.refuseAt(path+".observe", "off does not go with trial", "a trial compares what is observed: write live or close")
	}
	if s := r.setting(initialCwnd); s != nil && s.Explore != nil {
		d.refuseAt(path+".observe", "off does not go with explore", "windows are learned from what is observed: write live or close")
	}
}

// checkSettings refuses options that have no effect on the connections of the rule.
func (d *decoder) checkSettings(path string, r *TuneRule) {
	accepts := r.Match.Role == RoleAccept || r.Match.Service != ""
	for _, s := range r.Set {
		at := path + "." + s.Option
		switch s.Option {
		case "syn_rto", "syn_retries", "mss":
			if accepts {
				d.refuseAt(at, "has no effect on connections that are accepted", "it is for role connect")
			}
		case "synack_rto":
			if r.Match.Role == RoleConnect {
				d.refuseAt(at, "has no effect with role connect", "it is for role accept")
			}
		}
		if o, _ := FindTuneOption(s.Option); o.Handshake && r.Match.Tag != nil {
			d.refuseAt(at, "has no effect with match.tag", "the peer's tag is known only after the handshake")
		}
	}
	if label := "flow_label"; r.setting(label) != nil && r.setting("auto_flow_label") != nil {
		d.refuseAt(path+".auto_flow_label", "does not go with "+label, "")
	}
	clamp, window := r.setting("cwnd_clamp"), r.setting(initialCwnd)
	if clamp == nil || window == nil {
		return
	}
	at := path + "." + initialCwnd
	if window.Explore == nil {
		d.checkClamp(at, window.Value, clamp.Value)
		return
	}
	for i, c := range window.Explore.Candidates {
		d.checkClamp(fmt.Sprintf("%s.explore[%d]", at, i), int64(c), clamp.Value)
	}
}

// setting returns the setting of an option, or nil if the rule does not set it.
func (r *TuneRule) setting(option string) *Setting {
	for i := range r.Set {
		if r.Set[i].Option == option {
			return &r.Set[i]
		}
	}
	return nil
}

func (d *decoder) checkClamp(path string, window, clamp int64) {
	if window > clamp {
		d.refuseAt(path, fmt.Sprintf("must not be above cwnd_clamp: is %d of %d", window, clamp), "")
	}
}

// checkReach refuses a rule that can never apply because an earlier rule matches everything, or has the same match.
func (d *decoder) checkReach(path string, before []TuneRule, sound []bool, r *TuneRule) {
	for i := range before {
		first := &before[i]
		if !sound[i] || first.Cgroup != r.Cgroup {
			continue
		}
		hint := ""
		switch {
		case first.Match.equal(&r.Match):
			hint = "both match the same: make them one"
		case first.Match.equal(&Match{}):
			hint = "put it first"
		default:
			continue
		}
		name := first.Name
		if name == "" {
			name = fmt.Sprintf("tune[%d]", i)
		}
		d.refuseAt(path, "can never match, rule "+name+" before it matches all its connections", hint)
		return
	}
}

// equal reports whether two matches are the same. The cheap comparisons are first.
func (m *Match) equal(o *Match) bool {
	same := m.SamePrefix == o.SamePrefix || m.SamePrefix != nil && o.SamePrefix != nil && *m.SamePrefix == *o.SamePrefix
	return same && m.Role == o.Role && m.Service == o.Service && bytes.Equal(m.Tag, o.Tag) &&
		slices.Equal(m.Ports, o.Ports) && slices.Equal(m.RemotePorts, o.RemotePorts) && slices.Equal(m.LocalPorts, o.LocalPorts) &&
		slices.Equal(m.Local, o.Local) && slices.Equal(m.Remote, o.Remote)
}

// upper returns the names of protocols in upper case.
func upper(protocols []Protocol) []string {
	names := make([]string, len(protocols))
	for i, p := range protocols {
		names[i] = strings.ToUpper(string(p))
	}
	return names
}
