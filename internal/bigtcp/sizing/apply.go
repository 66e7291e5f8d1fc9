// SPDX-License-Identifier: Apache-2.0

package sizing

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"time"

	"sockeye/internal/bigtcp/netif"
	"sockeye/internal/fault"
	"sockeye/internal/sysctl"
)

// job is a step and the record of its interface.
type job struct {
	step
	old    *Record // nil if there is none
	record *Record // nil if nothing is to be recorded
}

// Plan returns the changes that Apply would make, or the error that Apply would
// return.
func (s *Store) Plan(n *netif.Namespace, owner Owner, targets []Target, force bool) ([]Change, error) {
	d, err := s.open()
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	if d != nil {
		defer d.Close()
	}
	jobs, err := prepare(d, n, owner, targets, force)
	if err != nil {
		return nil, err
	}
	return changes(n, stepsOf(jobs)), nil
}

// Apply gives the targets and their lower interfaces their sizes, all of them or none,
// and records the previous sizes. It returns the changes in the order in which they
// were made, with the interfaces that had their sizes already; these have no record,
// because there is nothing to revert.
//
// Returns a [fault.Error] with CodeConflict if another process holds the lock of the
// store for more than ten seconds, and, unless force is set, if the sizes of an
// interface differ from its record or the record has another owner. Errors with
// CodeUsage and CodeUnsupported are those of [Plan]. A family that a policy does not
// request any more is reverted; for other owners it does not change.
func (s *Store) Apply(n *netif.Namespace, owner Owner, targets []Target, force bool) ([]Change, error) {
	d, err := s.create()
	if err != nil {
		return nil, err
	}
	defer d.Close()
	if err := s.lock(d); err != nil {
		return nil, err
	}
	jobs, err := prepare(d, n, owner, targets, force)
	if err != nil {
		return nil, err
	}
	if err := d.applyJobs(n, jobs); err != nil {
		return nil, err
	}
	return changes(n, stepsOf(jobs)), nil
}

func stepsOf(jobs []job) []step {
	steps := make([]step, len(jobs))
	for i, j := range jobs {
		steps[i] = j.step
	}
	return steps
}

// prepare plans the steps and makes the new records. d is nil if there are no records.
func prepare(d *folder, n *netif.Namespace, owner Owner, targets []Target, force bool) ([]job, error) {
	ifaces, err := n.Interfaces()
	if err != nil {
		return nil, err
	}
	if targets, err = canonical(n, ifaces, targets); err != nil {
		return nil, err
	}
	records := map[int]*Record{}
	if d != nil {
		if records, err = d.recordsOf(n, ifaces, targets); err != nil {
			return nil, err
		}
	}
	held := map[int]Want{}
	for index, r := range records {
		if slices.Contains(r.For, index) {
			held[index] = r.Want
		}
	}
	steps, err := plan(ifaces, n.Support(), targets, held)
	if err != nil {
		return nil, err
	}
	boot, err := sysctl.Read("kernel.random.boot_id")
	if err != nil {
		return nil, err
	}
	if owner == ByPolicy {
		for i := range steps {
			if r := records[steps[i].Index]; r != nil && r.Owner == owner {
				steps[i].restoreUnwanted(r)
			}
		}
		sortSteps(steps)
	}
	jobs := make([]job, len(steps))
	for i, p := range steps {
		j := job{step: p, old: records[p.Index]}
		if err := j.checkOwner(owner, force); err != nil {
			return nil, err
		}
		j.makeRecord(n, boot, owner)
		jobs[i] = j
	}
	return jobs, nil
}

// recordsOf returns the records of the targets and of their lower interfaces, by
// index.
func (d *folder) recordsOf(n *netif.Namespace, ifaces []netif.Interface, targets []Target) (map[int]*Record, error) {
	records := map[int]*Record{}
	for _, t := range targets {
		i := byName(ifaces, t.Interface)
		if i == nil {
			continue
		}
		indexes := []int{i.Index}
		for _, r := range i.Related {
			if r.Relation == netif.Lower && r.Netns == "" {
				indexes = append(indexes, r.Index)
			}
		}
		for _, index := range indexes {
			if records[index] != nil {
				continue
			}
			r, err := d.find(n.ID(), index)
			if err != nil {
				return nil, err
			}
			if r != nil {
				records[index] = r
			}
		}
	}
	return records, nil
}

// restoreUnwanted reverts the families that are not requested any more, unless the
// interface has them for upper interfaces outside the plan.
func (p *step) restoreUnwanted(r *Record) {
	for _, index := range r.For {
		if index != p.Index && !slices.Contains(p.upper, index) || index == p.Index && !p.requested {
			return
		}
	}
	// The process that restored the family may have been killed after it wrote the
	// record.
	unfinished := r.From != (netif.Sizes{})
	if (r.Want.IPv6 != 0 || unfinished) && p.want.IPv6 == 0 && p.forUpper.IPv6 == 0 {
		p.To.GSO, p.To.GRO = r.Before.GSO, r.Before.GRO
	}
	if (r.Want.IPv4 != 0 || unfinished) && p.want.IPv4 == 0 && p.forUpper.IPv4 == 0 {
		p.To.GSOIPv4, p.To.GROIPv4 = r.Before.GSOIPv4, r.Before.GROIPv4
	}
}

// checkOwner rejects a change of sizes that belong to another owner.
func (j *job) checkOwner(owner Owner, force bool) error {
	changed := j.From != j.To
	switch {
	case j.old == nil || force || !changed && !j.requested:
		return nil
	case j.old.Owner != owner:
		return fault.Conflict(fmt.Errorf("sizes of %s were set by %s", j.Interface, j.old.Owner.words()),
			"force takes it over; its previous sizes stay recorded")
	case changed && !j.old.isOurs(j.From):
		return fault.Conflict(fmt.Errorf("the sizes of %s were changed externally: %s", j.Interface, difference(j.old.Applied, j.From)),
			"force overwrites them; its previous sizes stay recorded")
	}
	return nil
}

func (o Owner) words() string {
	switch o {
	case ByCommand:
		return "a command (sockeye bigtcp apply)"
	case ByPolicy:
		return "the agent's policy"
	}
	return string(o)
}

// isOurs reports whether sizes are of this record: applied, from before, or those of an
// interrupted change.
func (r *Record) isOurs(now netif.Sizes) bool {
	return now == r.Applied || now == r.Before || r.From != (netif.Sizes{}) && now == r.From
}

// difference lists the sizes that differ.
func difference(was, is netif.Sizes) string {
	var list []string
	for _, f := range []struct {
		name    string
		was, is uint32
	}{
		{"gso_max_size", was.GSO, is.GSO},
		{"gro_max_size", was.GRO, is.GRO},
		{"gso_ipv4_max_size", was.GSOIPv4, is.GSOIPv4},
		{"gro_ipv4_max_size", was.GROIPv4, is.GROIPv4},
	} {
		if f.was != f.is {
			list = append(list, fmt.Sprintf("%s %d instead of %d", f.name, f.is, f.was))
		}
	}
	return strings.Join(list, ", ")
}

// makeRecord makes the new record. An interface that had its sizes already gets none,
// and an interface of another owner that does not change keeps that record.
func (j *job) makeRecord(n *netif.Namespace, boot string, owner Owner) {
	changed := j.From != j.To
	if j.old == nil && !changed || j.old != nil && j.old.Owner != owner && !changed && !j.requested {
		return
	}
	r := Record{
		BootID: boot, Netns: n.Path(), NetnsID: n.ID(), Interface: j.Interface, Index: j.Index, Owner: owner,
		Before: j.From, From: j.From, Applied: j.To, For: slices.Clone(j.upper), Since: time.Now(),
	}
	if j.old != nil {
		r.Before = j.old.Before
		if !changed && j.old.Applied == j.To {
			r.Since = j.old.Since
		}
	}
	if j.requested {
		r.For, r.Want = append(r.For, j.Index), j.want
	} else {
		r.Want = j.forUpper
	}
	if j.old != nil && j.old.Owner == owner {
		switch asked := j.old.requested(); {
		case asked && !j.requested:
			r.Want = j.old.Want
		case asked == j.requested && owner != ByPolicy:
			r.Want = merge(r.Want, j.old.Want)
		}
		r.For = append(r.For, j.old.For...)
	}
	slices.Sort(r.For)
	r.For = slices.Compact(r.For)
	j.record = &r
}

// merge adds the families of old that w does not request.
func merge(w, old Want) Want {
	if w.IPv6 == 0 {
		w.IPv6 = old.IPv6
	}
	if w.IPv4 == 0 {
		w.IPv4 = old.IPv4
	}
	return w
}

// applyJobs writes the records, sets the sizes, and completes the records. If a step
// fails, all steps are rolled back.
func (d *folder) applyJobs(n *netif.Namespace, jobs []job) (err error) {
	var written, set []job
	defer func() {
		if err != nil {
			err = d.rollBack(n, written, set, err)
		}
	}()
	for _, j := range jobs {
		if j.record == nil || j.From == j.To {
			continue
		}
		written = append(written, j)
		if err := d.write(j.record, true); err != nil {
			return err
		}
	}
	for _, j := range jobs {
		if j.From == j.To {
			continue
		}
		d.before()
		if err := n.Set(j.Index, j.To); err != nil {
			return err
		}
		set = append(set, j)
	}
	for _, j := range jobs {
		changed := j.From != j.To
		if j.record == nil || !changed && j.old != nil && sameRecord(j.old, j.record.completed()) {
			continue
		}
		if !changed {
			written = append(written, j)
		}
		if err := d.write(j.record.completed(), false); err != nil {
			return err
		}
	}
	return nil
}

// completed returns the record after its sizes have been set.
func (r *Record) completed() *Record {
	s := *r
	s.From = netif.Sizes{}
	return &s
}

func sameRecord(a, b *Record) bool {
	return a.Netns == b.Netns && a.Interface == b.Interface && a.Owner == b.Owner && a.Want == b.Want &&
		a.Before == b.Before && a.Applied == b.Applied && a.From == b.From && slices.Equal(a.For, b.For)
}

// rollBack reverts sizes and then records, the latest first. The record of an
// interface whose sizes cannot be reverted is kept.
func (d *folder) rollBack(n *netif.Namespace, written, set []job, why error) error {
	stuck := map[int]bool{}
	for _, j := range slices.Backward(set) {
		d.before()
		if err := n.Set(j.Index, j.From); err != nil && !isGone(err) {
			stuck[j.Index] = true
			why = fmt.Errorf("%w; and the change could not be rolled back: %w", why, err)
		}
	}
	for _, j := range slices.Backward(written) {
		if stuck[j.Index] {
			continue
		}
		undo := d.remove
		if j.old != nil {
			undo = func(*Record) error { return d.write(j.old, false) }
		}
		if err := undo(j.record); err != nil {
			why = fmt.Errorf("%w; and the change could not be rolled back: %w", why, err)
		}
	}
	return why
}
