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
	places := places{}
	defer places.close()
	items := make([]*item, len(records))
	for i := range records {
		items[i] = places.locate(&records[i])
	}
	done, err := d.giveBack(choose(items, only, force), force)
	err = and(err, d.release(items))
	if len(damaged) > 0 {
		err = and(err, fmt.Errorf("take back what is in damaged records: %s", strings.Join(damaged, ", ")))
	}
	return done, err
}

// and joins two errors in one line; either may be nil.
func and(a, b error) error {
	if a == nil || b == nil {
		return errors.Join(a, b)
	}
	return fmt.Errorf("%w; %w", a, b)
}

// place is a network namespace, and what is in it.
type place struct {
	network *netif.Network // nil if it has vanished, or where err
	ifaces  []netif.Interface
	err     error // why it cannot be said whether it has vanished
}

// places are the namespaces of records, by their IDs.
type places map[uint64]place

func (p places) close() {
	for _, place := range p {
		if place.network != nil {
			place.network.Close()
		}
	}
}

// item is a record that is dealt with.
type item struct {
	*Record
	place
	here    *netif.Interface // nil if it has vanished, or where err
	dropped bool             // the record
}

// locate finds the interface of a record. It gives the record the interface's name of
// now.
func (p places) locate(r *Record) *item {
	there, known := p[r.NetnsID]
	if !known {
		there = find(r.Netns, r.NetnsID)
		p[r.NetnsID] = there
	}
	i := &item{Record: r, place: there, here: byIndex(there.ifaces, r.Index)}
	if i.here != nil {
		r.Interface = i.here.Name
	}
	return i
}

// find looks for the namespace with an ID: at its path, else the caller's own, those
// that have names and those of processes.
func find(path string, id uint64) place {
	n, err := among([]string{path, ""}, id)
	if n == nil {
		var others error
		n, others = among(netif.AllNetworkPaths(), id)
		err = and(err, others)
	}
	if n == nil {
		return place{err: err}
	}
	ifaces, err := n.Interfaces()
	if err != nil {
		n.Close()
		return place{err: err}
	}
	return place{network: n, ifaces: ifaces}
}

// among opens the one of the namespaces that has the ID; nil if none has it. What can
// not be entered may be that one, and is an error then.
func among(paths []string, id uint64) (*netif.Network, error) {
	var failed error
	for _, path := range paths {
		n, err := netif.OpenNetwork(path)
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
func choose(items []*item, only func(Record) bool, force bool) []*item {
	type key struct {
		netns uint64
		index int
	}
	chosen := map[key]bool{}
	for _, i := range items {
		if i.asked() {
			chosen[key{i.NetnsID, i.Index}] = only(*i.Record)
		}
	}
	return slices.DeleteFunc(slices.Clone(items), func(i *item) bool {
		if i.asked() {
			return !chosen[key{i.NetnsID, i.Index}]
		}
		itself := only(*i.Record)
		needed, above := false, 0
		for _, index := range i.For {
			there := byIndex(i.ifaces, index)
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
func (r *Record) asked() bool { return len(r.For) == 0 || slices.Contains(r.For, r.Index) }

// giveBack takes items back, and drops their records.
func (d *folder) giveBack(items []*item, force bool) ([]Reverted, error) {
	steps := make([]step, len(items))
	for n, i := range items {
		p := step{Change: Change{Netns: i.Netns, Interface: i.Interface, Index: i.Index, To: i.Before}}
		if i.here != nil {
			p = *newStep(i.here)
			p.Netns, p.To = i.network.Path(), i.Before
			if bound := i.here.TSOMaxSize; bound != 0 && max(p.To.GSO, p.To.GSOIPv4) > bound {
				p.note("it takes packets of at most %d bytes now", bound)
				p.To.GSO, p.To.GSOIPv4 = min(p.To.GSO, bound), min(p.To.GSOIPv4, bound)
			}
		}
		p.item = i
		steps[n] = p
	}
	order(steps)
	done := []Reverted{}
	var failed error
	var changed []string
	for _, p := range steps {
		result, err := d.giveBackOne(p, force)
		if err != nil {
			failed = and(failed, err)
			continue
		}
		if result == ResultChanged {
			changed = append(changed, fmt.Sprintf("%s (%s)", p.Interface, difference(p.item.Applied, p.From)))
		}
		done = append(done, Reverted{p.Change, result})
	}
	if len(changed) > 0 {
		failed = and(failed, netif.Refuse(netif.KindConflict, "force gives back all the same what was there before",
			"somebody else has changed since: %s", strings.Join(changed, ", ")))
	}
	return done, failed
}

func (d *folder) giveBackOne(p step, force bool) (result string, err error) {
	i := p.item
	switch {
	case i.err != nil:
		return "", fmt.Errorf("take back %s: %w", i.Interface, i.err)
	case i.here == nil:
		result = ResultGone
	case p.From == i.Before:
		result = ResultAlready
	case !i.set(p.From) && !force:
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
	return result, d.drop(i.Record)
}

// release takes out of the records that stay the interfaces for which they are not
// needed any more.
func (d *folder) release(items []*item) error {
	for _, i := range items {
		if i.dropped || i.network == nil {
			continue
		}
		needed := slices.DeleteFunc(slices.Clone(i.For), func(index int) bool {
			return byIndex(i.ifaces, index) == nil || slices.ContainsFunc(items, func(above *item) bool {
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
