// SPDX-License-Identifier: Apache-2.0

// Package notadmitted records the processes that match a rule and have the service's ports, but are not admitted: they run as another user,
// or in their own namespaces. Status shows them.
package notadmitted

import (
	"log/slog"
	"maps"
	"slices"
	"time"

	"sockeye/internal/api"
	"sockeye/internal/events"
	"sockeye/internal/member"
)

const (
	// most is the number of processes of a table.
	most = 16
	// warnInterval is the minimum time between two warnings.
	warnInterval = time.Minute
)

// Table contains the refused processes of a service. It is small and has no handles, because any user can start any number of
// such processes. The zero value is empty. It is not safe for concurrent use.
type Table struct {
	processes map[member.ID]refused
	warned    time.Time
}

type refused struct {
	process *member.Process
	source  string
	refusal *member.Refusal
}

// Add records a process that matches a rule and is not admitted. If the process is not known and the table has space, hasPorts must return true:
// the process has a socket on one of the members' ports.
func (t *Table) Add(log *slog.Logger, p *member.Process, source string, why *member.Refusal, hasPorts func() bool) {
	self := member.ID{PID: p.PID, StartTime: p.StartTime}
	if _, known := t.processes[self]; !known {
		if len(t.processes) >= most {
			t.prune()
		}
		if len(t.processes) >= most || !hasPorts() {
			return
		}
		if now := time.Now(); now.Sub(t.warned) >= warnInterval {
			t.warned = now
			log.Warn("process matches a rule, but is not admitted", events.MemberRefused, "pid", p.PID, "source", source, "problem", why.Reason)
		}
	}
	if t.processes == nil {
		t.processes = make(map[member.ID]refused)
	}
	t.processes[self] = refused{p, source, why}
}

// Delete removes a process.
func (t *Table) Delete(id member.ID) { delete(t.processes, id) }

// List returns the running processes, sorted by process id.
func (t *Table) List() []api.RefusedStatus {
	t.prune()
	list := []api.RefusedStatus{}
	for _, self := range slices.SortedFunc(maps.Keys(t.processes), func(a, b member.ID) int { return a.PID - b.PID }) {
		x := t.processes[self]
		list = append(list, api.RefusedStatus{
			PID: self.PID, Command: x.process.Command(), Source: x.source, Problem: x.refusal.Reason, Hint: x.refusal.Hint,
		})
	}
	return list
}

// prune deletes the processes that have exited.
func (t *Table) prune() {
	maps.DeleteFunc(t.processes, func(self member.ID, _ refused) bool {
		return !member.Alive(self.PID, self.StartTime)
	})
}
