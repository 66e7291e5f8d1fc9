// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"slices"
)

// Limits of the rules of one cgroup.
const (
	maxTraceRules  = 32
	maxTraceGroups = 4096 // including the group other of each rule
)

// checkTrace sets the defaults that depend on other values, reads the files that rules name, and refuses invalid
// combinations of values.
func (d *decoder) checkTrace(p *Policy) {
	names := map[string]string{}
	cgroups := map[string]*tracedCgroup{}
	prefixes := 0
	for i := range p.Trace {
		r, path := &p.Trace[i], fmt.Sprintf("trace[%d]", i)
		d.completeTrace(path, r)
		d.checkTraceName(path, r, names)
		d.checkPrefixes(path+".match", &r.Match, &prefixes)
		d.checkTraceMatch(path, r, p.Services)
		d.checkTraceStages(path, r)
		if r.Cgroup == "" {
			continue
		}
		if cgroups[r.Cgroup] == nil {
			cgroups[r.Cgroup] = &tracedCgroup{}
		}
		d.checkTraceLimits(path, r, cgroups[r.Cgroup])
	}
}

// completeTrace sets the defaults of omitted values.
func (d *decoder) completeTrace(path string, r *TraceRule) {
	if !d.given(path + ".name") {
		r.Name = r.Cgroup
	}
	if !d.given(path + ".stages") {
		r.Stages = standardStages()
	}
	if !d.given(path + ".protocols") {
		r.Protocols = []Protocol{TCP}
	}
}

// checkTraceName checks that names are unique. A given name cannot equal that of a cgroup, which has a slash or a dot.
func (d *decoder) checkTraceName(path string, r *TraceRule, names map[string]string) {
	if r.Name == "" {
		return
	}
	first, twice := names[r.Name]
	switch at := path + ".name"; {
	case !twice:
		names[r.Name] = path
	case d.given(at):
		d.refuseAt(at, fmt.Sprintf("%q is already %s.name, line %d", r.Name, first, d.at[first+".name"].line), "")
	default:
		d.refuse(at, d.at[path], fmt.Sprintf("is missing: %s, line %d, has the name of the cgroup already", first, d.at[first].line),
			"give the rules of "+quoteShort(r.Cgroup)+" names")
	}
}

// checkTraceMatch refuses matches that no connection of the rule's protocols satisfies.
func (d *decoder) checkTraceMatch(path string, r *TraceRule, services []Service) {
	if r.Match.Tag != nil {
		d.refuseAt(path+".match.tag", "does not go with trace", "match on addresses, ports or a service")
	}
	d.checkMatch(path+".match", r.Match, r.Protocols, services)
}

// checkTraceStages checks that a rule for UDP only has a stage that exists for UDP.
func (d *decoder) checkTraceStages(path string, r *TraceRule) {
	var tcp, both []Stage
	for _, s := range traceStages {
		if s.udp {
			both = append(both, s.stage)
		} else {
			tcp = append(tcp, s.stage)
		}
	}
	at := path + ".stages"
	if d.udpOnly(path, r) && !d.bad[at] && !slices.ContainsFunc(r.Stages, func(s Stage) bool { return slices.Contains(both, s) }) {
		d.refuseAt(at, joinWords(tcp, "and")+" are not measured of udp", "add "+joinWords(both, "or")+", or tcp to protocols")
	}
}

func (d *decoder) udpOnly(path string, r *TraceRule) bool {
	return slices.Equal(r.Protocols, []Protocol{UDP}) && !d.bad[path+".protocols"]
}

// tracedCgroup has the totals of the rules of one cgroup.
type tracedCgroup struct{ rules, groups int }

// checkTraceLimits adds a rule to the totals of its cgroup, and refuses the first rule beyond a limit.
func (d *decoder) checkTraceLimits(path string, r *TraceRule, c *tracedCgroup) {
	if c.rules++; c.rules == maxTraceRules+1 {
		d.refuseAt(path, fmt.Sprintf("is rule %d of %s, at most %d", c.rules, quoteShort(r.Cgroup), maxTraceRules), "a match may have lists of prefixes and ports")
	}
	within := c.groups <= maxTraceGroups
	if r.Groups > 0 {
		c.groups += r.Groups + 1
	}
	if within && c.groups > maxTraceGroups {
		at := path + ".groups"
		if !d.given(at) {
			at = path
		}
		d.refuseAt(at, fmt.Sprintf("makes %d groups of %s with the rules before it, at most %d", c.groups, quoteShort(r.Cgroup), maxTraceGroups),
			"each rule has one more, for other")
	}
}
