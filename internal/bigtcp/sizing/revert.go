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
)

// The results of reverting.
const (
	ResultReverted = "reverted"
	ResultAlready  = "already" // it had the sizes from before
	ResultGone     = "gone"    // the interface or its namespace has vanished
	ResultChanged  = "changed" // by somebody else, and left
)

// Reverted is what became of an interface that was to be taken back.
type Reverted struct {
	Change
	Result string `json:"result"`
}

// Revert gives back what was there before, for the records that only selects, nil for
// all. Only sees an interface that was renamed by the name that it has now. A device
// that was changed for the sake of others above it, and was not asked for itself, goes
// with the last of these; selecting it alone does nothing, unless force.
//
// What somebody else has changed since is left, and its record kept, unless force:
// then the error is one of KindConflict. A failure does not keep others from being
// taken back. It may be called again at any time, also after a call was cut short.
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
		err = joined(err, fmt.Errorf("take back what is in damaged records: %s", strings.Join(damaged, ", ")))
	}
	return done, err
}

// and joins two errors in one line; either may be nil.
func joined(a, b error) error {
	if a == nil || b == nil {
		return errors.Join(a, b)
	}
	return fmt.Errorf("%w; %w", a, b)
}

// place is a network namespace, and what is in it.
type namespace struct {
	network    *netif.Namespace // nil if it has vanished, or where err
	interfaces []netif.Interface
	err        error // why it cannot be said whether it has vanished
}

// places are the namespaces of records, by their IDs.
type namespaces map[uint64]namespace

func (p namespaces) close() {
	for _, place := range p {
		if place.network != nil {
			place.network.Close()
		}
	}
}

// item is a record that is dealt with.
type item struct {
	*Record
	namespace
	current *netif.Interface // nil if it has vanished, or where err
	dropped bool             // the record
}

// locate finds the interface of a record. It gives the record the interface's name of
// now.
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

// find looks for the namespace with an ID: at its path, else the caller's own, those
// that have names and those of processes.
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

// among opens the one of the namespaces that has the ID; nil if none has it. What can
// not be entered may be that one, and is an error then.
func findAmong(paths []string, id uint64) (*netif.Namespace, error) {
	var failed error
	for _, path := range paths {
		n, err := netif.OpenNamespace(path)
		var none *netif.Error
		switch {
		case errors.As(err, &none): // it has vanished
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

// choose finds the items that are to be taken back.
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
				// It had its sizes already.
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

// asked tells whether the interface was asked for itself, not only what is above it.
func (r *Record) requested() bool { return len(r.For) == 0 || slices.Contains(r.For, r.Index) }

// giveBack takes items back, and drops their records.
func (d *folder) revert(items []*item, force bool) ([]Reverted, error) {
	steps := make([]step, len(items))
	for n, i := range items {
		p := step{Change: Change{Netns: i.Netns, Interface: i.Interface, Index: i.Index, To: i.Before}}
		if i.current != nil {
			p = *newStep(i.current)
			p.Netns, p.To = i.network.Path(), i.Before
			if bound := i.current.TSOMaxSize; bound != 0 && max(p.To.GSO, p.To.GSOIPv4) > bound {
				p.note("it supports packets of at most %d bytes now", bound)
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
		failed = joined(failed, netif.NewError(netif.KindConflict, "force gives back all the same what was there before",
			"somebody else has changed since: %s", strings.Join(changed, ", ")))
	}
	return done, failed
}

func (d *folder) revertOne(p step, force bool) (result string, err error) {
	i := p.item
	switch {
	case i.err != nil:
		return "", fmt.Errorf("take back %s: %w", i.Interface, i.err)
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

// release takes out of the records that stay the interfaces for which they are not
// needed any more.
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

// isGone tells the error of an interface that has vanished.
func isGone(err error) bool { return errors.Is(err, unix.ENODEV) }
