// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"maps"
	"slices"
	"time"

	"sockeye/internal/api"
	"sockeye/internal/member"
)

// refusals are processes that a rule describes, that have the service's ports, and that are no members:
// of another user, or in namespaces of their own. They are kept to be shown, no handle of them is
// held, and there are few: any user can start as many as he likes.
type refusals map[member.ID]refused

type refused struct {
	process *member.Process
	source  string
	refusal *member.Refusal
}

const (
	maxRefusals = 16
	// maxProbes bounds how many processes a scan looks into for a refusal.
	maxProbes = 64
	// warnInterval is how often refusals are logged.
	warnInterval = time.Minute
)

// refuse notes a process that only looks like a member.
func (s *service) addRefusal(p *member.Process, source string, why *member.Refusal) {
	if s.isRelated(p) || s.isIsolatedProgram(p) {
		return
	}
	self := member.ID{PID: p.PID, StartTime: p.StartTime}
	if _, known := s.refusals[self]; !known {
		if len(s.refusals) >= maxRefusals {
			s.refusals.prune()
		}
		if len(s.refusals) >= maxRefusals || s.probesLeft == 0 || !s.hasPorts(p.PID) {
			return
		}
		if now := time.Now(); now.Sub(s.lastRefusalLog) >= warnInterval {
			s.lastRefusalLog = now
			s.log.Warn("process refused, it only looks like a member", "pid", p.PID, "source", source, "problem", why.Reason)
		}
	}
	s.refusals[self] = refused{p, source, why}
}

// hasPorts tells whether a process has a socket on one of the ports of members, as far as a bounded look at
// its descriptors shows.
func (s *service) hasPorts(pid int) bool {
	s.probesLeft--
	handle, err := member.Open(pid)
	if err != nil {
		return false
	}
	defer handle.Close()
	return handle.HasSocket(s.matchesListener)
}

// prune forgets those that have ended.
func (r refusals) prune() {
	maps.DeleteFunc(r, func(self member.ID, _ refused) bool {
		return !member.Alive(self.PID, self.StartTime)
	})
}

// list gives them by process id.
func (r refusals) list() []api.RefusedStatus {
	r.prune()
	list := []api.RefusedStatus{}
	for _, self := range slices.SortedFunc(maps.Keys(r), func(a, b member.ID) int { return a.PID - b.PID }) {
		x := r[self]
		list = append(list, api.RefusedStatus{
			PID: self.PID, Command: x.process.Command(), Source: x.source, Problem: x.refusal.Reason, Hint: x.refusal.Hint,
		})
	}
	return list
}
