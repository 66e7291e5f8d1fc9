// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"maps"
	"slices"
	"time"

	"sockeye/internal/api"
	"sockeye/internal/events"
	"sockeye/internal/member"
)

// refusals contains the processes that match a rule and have the service's ports, but are not admitted: they run as
// another user, or in their own namespaces. Status shows them. The table is small and has no handles, because any user
// can start any number of such processes.
type refusals map[member.ID]refused

type refused struct {
	process *member.Process
	source  string
	refusal *member.Refusal
}

const (
	maxRefusals = 16
	// maxProbes limits the processes per scan whose descriptors are read for a refusal.
	maxProbes = 64
	// warnInterval is the minimum time between two warnings about refusals.
	warnInterval = time.Minute
)

// addRefusal records a process that matches a rule and is not admitted.
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
			s.Log.Warn("process matches a rule, but is not admitted", events.MemberRefused, "pid", p.PID, "source", source, "problem", why.Reason)
		}
	}
	s.refusals[self] = refused{p, source, why}
}

// hasPorts reports whether a process has a socket on one of the members' ports among its first descriptors
// ([member.Handle.HasSocket]).
func (s *service) hasPorts(pid int) bool {
	s.probesLeft--
	handle, err := member.Open(pid)
	if err != nil {
		return false
	}
	defer handle.Close()
	return handle.HasSocket(s.matchesListener)
}

// prune deletes the processes that have exited.
func (r refusals) prune() {
	maps.DeleteFunc(r, func(self member.ID, _ refused) bool {
		return !member.Alive(self.PID, self.StartTime)
	})
}

// list returns the running processes, sorted by process id.
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
