// SPDX-License-Identifier: Apache-2.0

package sizing

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"sockeye/internal/bigtcp/netif"
	"sockeye/internal/fault"
)

// The results of reverting.
const (
	ResultReverted = "reverted"
	ResultAlready  = "already" // it has its previous sizes
	ResultGone     = "gone"    // the interface or its namespace has vanished
	ResultChanged  = "changed" // changed externally; not reverted
)

// Reverted is the result of reverting one interface.
type Reverted struct {
	Change
	Result string `json:"result"`
}

// namespace is the network namespace of a record, with its interfaces.
type namespace struct {
	network    *netif.Namespace // nil if it has vanished, or if err is set
	interfaces []netif.Interface
	err        error // why it is unknown whether it has vanished
}

// namespaces are the network namespaces of records, by ID.
type namespaces map[uint64]namespace

// item is a record that is processed.
type item struct {
	*Record
	namespace
	current *netif.Interface // nil if it has vanished, or if err is set
	dropped bool             // the record was removed
}

// Revert restores the previous sizes of the interfaces of the records for which only
// returns true; nil selects all. Records have the current names of their interfaces. A
// lower interface that was changed for its upper interfaces alone is reverted with the
// last of these; selecting only the lower interface has no effect, unless force is
// set.
//
// Sizes that were changed externally are not reverted, and their record is kept,
// unless force is set; the error then has CodeConflict. A failure does not keep
// other interfaces from being reverted. Revert may be repeated at any time, also after
// an interrupted call.
func (s *Store) Revert(only func(Record) bool, force bool) ([]Reverted, error) {
	d, err := s.open()
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer d.Close()
	if err := s.lock(d); err != nil {
		return nil, err
	}
	records, damaged, err := d.clean()
	if err != nil {
		return nil, err
	}
	if only == nil {
		only = func(Record) bool { return true }
	}
	places := namespaces{}
	defer places.close()
	items := make([]*item, len(records))
	for i := range records {
		items[i] = places.locate(&records[i])
	}
	done, err := d.revert(selectItems(items, only, force), force)
	err = joined(err, d.dropReferences(items))
	if len(damaged) > 0 {
		err = joined(err, fmt.Errorf("revert damaged records: %s", strings.Join(damaged, ", ")))
	}
	return done, err
}

func (p namespaces) close() {
	for _, place := range p {
		if place.network != nil {
			place.network.Close()
		}
	}
}

// locate finds the interface of a record and updates its name in the record.
func (p namespaces) locate(r *Record) *item {
	there, known := p[r.NetnsID]
	if !known {
		there = findNamespace(r.Netns, r.NetnsID)
		p[r.NetnsID] = there
	}
	i := &item{Record: r, namespace: there, current: byIndex(there.interfaces, r.Index)}
	if i.current != nil {
		r.Interface = i.current.Name
	}
	return i
}

// findNamespace searches the namespace with an ID: at its recorded path, then that of
// the caller, then all namespaces with a name or a process.
func findNamespace(path string, id uint64) namespace {
	n, err := findAmong([]string{path, ""}, id)
	if n == nil {
		var others error
		n, others = findAmong(netif.AllNamespaces(), id)
		err = joined(err, others)
	}
	if n == nil {
		return namespace{err: err}
	}
	ifaces, err := n.Interfaces()
	if err != nil {
		n.Close()
		return namespace{err: err}
	}
	return namespace{network: n, interfaces: ifaces}
}

// findAmong opens the namespace with an ID among paths; nil if none has the ID. The ID
// of a namespace that cannot be entered is unknown, which is an error then.
func findAmong(paths []string, id uint64) (*netif.Namespace, error) {
	var failed error
	for _, path := range paths {
		n, err := netif.OpenNamespace(path)
		switch {
		case fault.Code(err) == fault.CodeUsage: // the namespace has vanished
		case err != nil:
			failed = err
		case n.ID() == id:
			return n, nil
		default:
			n.Close()
		}
	}
	return nil, failed
}

// selectItems returns the items that are to be reverted.
func selectItems(items []*item, only func(Record) bool, force bool) []*item {
	type key struct {
		netns uint64
		index int
	}
	chosen := map[key]bool{}
	for _, i := range items {
		if i.requested() {
			chosen[key{i.NetnsID, i.Index}] = only(*i.Record)
		}
	}
	return slices.DeleteFunc(slices.Clone(items), func(i *item) bool {
		if i.requested() {
			return !chosen[key{i.NetnsID, i.Index}]
		}
		itself := only(*i.Record)
		needed, above := false, 0
		for _, index := range i.For {
			there := byIndex(i.interfaces, index)
			if there == nil {
				continue
			}
			above++
			goes, recorded := chosen[key{i.NetnsID, index}]
			if !recorded {
				// It has no record because it had its sizes already.
				stand := *i.Record
				stand.Interface, stand.Index = there.Name, index
				goes = itself || only(stand)
			}
			needed = needed || !goes
		}
		if above == 0 || force && itself {
			return !itself
		}
		return needed
	})
}

// requested reports whether the sizes were requested for the interface itself.
func (r *Record) requested() bool { return len(r.For) == 0 || slices.Contains(r.For, r.Index) }

// revert reverts items and removes their records.
func (d *folder) revert(items []*item, force bool) ([]Reverted, error) {
	steps := make([]step, len(items))
	for n, i := range items {
		p := step{Change: Change{Netns: i.Netns, Interface: i.Interface, Index: i.Index, To: i.Before}}
		if i.current != nil {
			p = *newStep(i.current)
			p.Netns, p.To = i.network.Path(), i.Before
			if bound := i.current.TSOMaxSize; bound != 0 && max(p.To.GSO, p.To.GSOIPv4) > bound {
				p.note("its tso_max_size is %d bytes now", bound)
				p.To.GSO, p.To.GSOIPv4 = min(p.To.GSO, bound), min(p.To.GSOIPv4, bound)
			}
		}
		p.item = i
		steps[n] = p
	}
	sortSteps(steps)
	done := []Reverted{}
	var failed error
	var changed []string
	for _, p := range steps {
		result, err := d.revertOne(p, force)
		if err != nil {
			failed = joined(failed, err)
			continue
		}
		if result == ResultChanged {
			changed = append(changed, fmt.Sprintf("%s (%s)", p.Interface, difference(p.item.Applied, p.From)))
		}
		done = append(done, Reverted{p.Change, result})
	}
	if len(changed) > 0 {
		failed = joined(failed, fault.Conflict(fmt.Errorf("sizes changed externally: %s", strings.Join(changed, ", ")),
			"force restores the previous sizes"))
	}
	return done, failed
}

// joined joins two errors in one line; either may be nil.
func joined(a, b error) error {
	if a == nil || b == nil {
		return errors.Join(a, b)
	}
	return fmt.Errorf("%w; %w", a, b)
}

func (d *folder) revertOne(p step, force bool) (result string, err error) {
	i := p.item
	switch {
	case i.err != nil:
		return "", fmt.Errorf("revert %s: %w", i.Interface, i.err)
	case i.current == nil:
		result = ResultGone
	case p.From == i.Before:
		result = ResultAlready
	case !i.isOurs(p.From) && !force:
		return ResultChanged, nil
	default:
		d.before()
		err := i.network.Set(i.Index, p.To)
		if err != nil && !isGone(err) {
			return "", err
		}
		result = ResultReverted
		if err != nil {
			result = ResultGone
		}
	}
	i.dropped = true
	return result, d.remove(i.Record)
}

// dropReferences removes interfaces that were reverted or have vanished from For of
// the remaining records.
func (d *folder) dropReferences(items []*item) error {
	for _, i := range items {
		if i.dropped || i.network == nil {
			continue
		}
		needed := slices.DeleteFunc(slices.Clone(i.For), func(index int) bool {
			return byIndex(i.interfaces, index) == nil || slices.ContainsFunc(items, func(above *item) bool {
				return above.dropped && above.NetnsID == i.NetnsID && above.Index == index
			})
		})
		if len(needed) == len(i.For) || len(needed) == 0 {
			continue
		}
		i.For = needed
		if err := d.write(i.Record, false); err != nil {
			return err
		}
	}
	return nil
}

// isGone reports whether an interface has vanished.
func isGone(err error) bool { return errors.Is(err, unix.ENODEV) }
