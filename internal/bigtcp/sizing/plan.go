// SPDX-License-Identifier: Apache-2.0

// Package sizing plans, applies, records and reverts changes of the GSO and GRO
// maximum sizes of interfaces and of their lower interfaces. A change is applied as a
// whole or not at all. Its record in the state directory is written first, so that the
// change of a killed process can be reverted.
package sizing

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"sockeye/internal/bigtcp/netif"
	"sockeye/internal/fault"
)

// Target is an interface and the sizes that it is to get.
type Target struct {
	Interface string // name
	Want      Want
}

// Plan returns the changes that give the targets their sizes: the targets and their
// lower interfaces, in the order of the changes. Interfaces that have their sizes
// already are included. Returns a [fault.Error], with CodeUsage for unknown interfaces
// and invalid sizes, and with CodeUnsupported for sizes that the kernel or an interface
// does not support.
func Plan(n *netif.Namespace, targets []Target) ([]Change, error) {
	ifaces, err := n.Interfaces()
	if err != nil {
		return nil, err
	}
	if targets, err = canonical(n, ifaces, targets); err != nil {
		return nil, err
	}
	steps, err := plan(ifaces, n.Support(), targets, nil)
	if err != nil {
		return nil, err
	}
	return changes(n, steps), nil
}

// canonical replaces alternative names of interfaces. Returns a [fault.Error] with
// CodeUsage for an unknown name.
func canonical(n *netif.Namespace, ifaces []netif.Interface, targets []Target) ([]Target, error) {
	targets = slices.Clone(targets)
	for i, t := range targets {
		if byName(ifaces, t.Interface) != nil {
			continue
		}
		found, err := n.Interface(t.Interface)
		if err != nil {
			return nil, err
		}
		targets[i].Interface = found.Name
	}
	return targets, nil
}

// step is the change of one interface.
type step struct {
	Change
	requested bool  // for itself, not only for upper interfaces
	want      Want  // for itself, now or before
	forUpper  Want  // what the upper targets need
	upper     []int // indexes of the upper targets
	depth     int   // number of lower interfaces
	item      *item // of a revert
}

func changes(n *netif.Namespace, steps []step) []Change {
	list := make([]Change, len(steps))
	for i, s := range steps {
		list[i] = s.Change
		list[i].Netns = n.Path()
	}
	return list
}

// plan implements Plan. held has the recorded requests by index: a lower interface of
// a target keeps its own request.
func plan(ifaces []netif.Interface, s netif.Support, targets []Target, held map[int]Want) ([]step, error) {
	steps := map[int]*step{}
	tops := map[int]Want{}
	for _, t := range targets {
		if err := checkSizes(t); err != nil {
			return nil, err
		}
		i := byName(ifaces, t.Interface)
		if i == nil {
			return nil, fault.Usage(fmt.Errorf("there is no interface %q", t.Interface), "")
		}
		if err := checkPossible(i, t.Want, s); err != nil {
			return nil, err
		}
		tops[i.Index] = t.Want
		p := steps[i.Index]
		if p == nil {
			p = newStep(i)
			steps[i.Index] = p
		}
		if p.requested && p.want != t.Want {
			return nil, fault.Usage(fmt.Errorf("two different sizes are requested for %s", t.Interface), "")
		}
		p.requested, p.want = true, t.Want
	}
	for _, index := range slices.Sorted(maps.Keys(tops)) {
		target := byIndex(ifaces, index)
		for _, r := range target.Related {
			if r.Relation == netif.Lower {
				addLower(ifaces, target, r, tops[index], steps)
			}
		}
	}
	for index, p := range steps {
		i := byIndex(ifaces, index)
		if !p.requested {
			p.want = held[index]
			p.keepForOthers(ifaces, i, steps)
		}
		p.chooseSizes(i, s)
	}
	ordered := make([]step, 0, len(steps))
	for _, p := range steps {
		ordered = append(ordered, *p)
	}
	sortSteps(ordered)
	return ordered, nil
}

// addLower adds a lower interface of a target to the plan.
func addLower(ifaces []netif.Interface, target *netif.Interface, r netif.Related, want Want, steps map[int]*step) {
	top := steps[target.Index]
	if r.Netns != "" {
		name := r.Name
		if name == "" {
			name = fmt.Sprintf("interface %d", r.Index)
		}
		top.note("its lower interface %s in another network namespace (%s) is not changed", name, r.Netns)
		return
	}
	i := byIndex(ifaces, r.Index)
	if i == nil {
		return // it is newer than the list of interfaces
	}
	p := steps[i.Index]
	if p == nil {
		p = newStep(i)
		p.UpperInterface = target.Name
		steps[i.Index] = p
	}
	p.upper = append(p.upper, target.Index)
	p.forUpper.IPv6 = max(p.forUpper.IPv6, want.IPv6)
	p.forUpper.IPv4 = max(p.forUpper.IPv4, want.IPv4)
}

func newStep(i *netif.Interface) *step {
	p := &step{Change: Change{Interface: i.Name, Index: i.Index, From: i.Sizes, To: i.Sizes}}
	for _, r := range i.Related {
		if r.Relation == netif.Lower {
			p.depth++
		}
	}
	return p
}

// keepForOthers keeps a lower interface as large as the upper interfaces outside the
// plan are.
func (p *step) keepForOthers(ifaces []netif.Interface, i *netif.Interface, steps map[int]*step) {
	for j := range ifaces {
		above := &ifaces[j]
		if steps[above.Index] != nil || !sendsThrough(above, i) {
			continue
		}
		for _, f := range []struct {
			family   string
			forUpper *uint32
			size     uint32
		}{
			{"IPv6", &p.forUpper.IPv6, min(above.Sizes.GSO, i.Sizes.GSO)},
			{"IPv4", &p.forUpper.IPv4, min(above.Sizes.GSOIPv4, i.Sizes.GSOIPv4)},
		} {
			if *f.forUpper != 0 && *f.forUpper < f.size {
				*f.forUpper = f.size
				p.note("keeps %d bytes for %s, which its upper interface %s has", f.size, f.family, above.Name)
			}
		}
	}
}

// sendsThrough reports whether other is a lower interface of i in the same namespace.
func sendsThrough(i, other *netif.Interface) bool {
	return slices.ContainsFunc(i.Related, func(r netif.Related) bool {
		return r.Relation == netif.Lower && r.Netns == "" && r.Index == other.Index
	})
}

// chooseSizes sets the new sizes, as far as the kernel and the interfaces support
// them. Sizes of a family that does not change are written too, because the kernel
// resets the sizes of IPv4 when a GSO or GRO size becomes Legacy or less.
func (p *step) chooseSizes(i *netif.Interface, s netif.Support) {
	least := i.LimitedBy()
	size6 := p.size("IPv6", p.want.IPv6, p.forUpper.IPv6)
	size4 := p.size("IPv4", p.want.IPv4, p.forUpper.IPv4)
	switch {
	case s.IPv6 && size6 != 0:
		p.To.GSO, p.To.GRO = bounded(&least, size6), size6
	case size6 > netif.Legacy:
		p.note("IPv6 is not changed: %s", missingSupport(s))
	}
	switch {
	case s.IPv4 && size4 != 0:
		p.To.GSOIPv4, p.To.GROIPv4 = bounded(&least, size4), size4
	case size4 > netif.Legacy:
		p.note("IPv4 is not changed: %s", missingSupport(s))
	}
	if size := max(size6, size4); size > netif.Legacy && bounded(&least, size) < size {
		p.note("sends packets of at most %d bytes, the tso_max_size of %s", least.TSOMaxSize, described(&least))
	}
}

// size returns the size of a family: a request for the interface itself takes
// precedence.
func (p *step) size(family string, want, carry uint32) uint32 {
	if want == 0 || carry == 0 {
		return max(want, carry)
	}
	if !p.requested && want != carry {
		p.note("keeps %d bytes for %s, which were requested for it", want, family)
	}
	if want < carry {
		p.note("the kernel segments larger %s packets of its upper interfaces", family)
	}
	return want
}

// bounded returns a GSO size of at most tso_max_size.
func bounded(r *netif.Related, size uint32) uint32 {
	if r.TSOMaxSize == 0 {
		return size
	}
	return min(size, r.TSOMaxSize)
}

func (p *step) note(format string, args ...any) {
	p.Notes = append(p.Notes, fmt.Sprintf(format, args...))
}

// checkSizes rejects invalid sizes.
func checkSizes(t Target) error {
	if t.Want == (Want{}) {
		return fault.Usage(fmt.Errorf("no size is requested for %s", t.Interface), "")
	}
	for _, f := range []struct {
		family string
		size   uint32
	}{{"IPv6", t.Want.IPv6}, {"IPv4", t.Want.IPv4}} {
		if f.size != 0 && (f.size < netif.Legacy || f.size > netif.MaxSize) {
			return fault.Usage(fmt.Errorf("%s size of %s: %d is not from %d to %d bytes", f.family, t.Interface, f.size, netif.Legacy, netif.MaxSize),
				fmt.Sprintf("%d turns BIG TCP off", netif.Legacy))
		}
	}
	return nil
}

// checkPossible rejects a request of which nothing is possible.
func checkPossible(i *netif.Interface, w Want, s netif.Support) error {
	large6, large4 := w.IPv6 > netif.Legacy, w.IPv4 > netif.Legacy
	if !large6 && !large4 {
		return nil
	}
	lacks6, lacks4 := large6 && !s.IPv6, large4 && !s.IPv4
	if (w.IPv6 == 0 || lacks6) && (w.IPv4 == 0 || lacks4) {
		hint := ""
		if s.IPv6 {
			hint = "this kernel supports BIG TCP for IPv6"
		}
		return fault.Unsupported(fmt.Errorf("%s: %s", i.Name, missingSupport(s)), hint)
	}
	if least := i.LimitedBy(); least.TSOMaxSize != 0 && least.TSOMaxSize <= netif.Legacy {
		hint := ""
		if least.FullName() != i.Name {
			hint = fmt.Sprintf("%s is a lower interface of %s", least.FullName(), i.Name)
		}
		return fault.Unsupported(fmt.Errorf("%s supports packets of at most %d bytes", described(&least), least.TSOMaxSize), hint)
	}
	return nil
}

// described returns the name of the interface, with its driver or kind.
func described(r *netif.Related) string {
	if driver := cmp.Or(r.Driver, r.Kind); driver != "" {
		return fmt.Sprintf("%s (%s)", r.FullName(), driver)
	}
	return r.FullName()
}

// missingSupport names the first feature that the kernel does not have.
func missingSupport(s netif.Support) string {
	if s.IPv6 {
		return fmt.Sprintf("IPv4 packets above %d bytes need Linux 6.3", netif.Legacy)
	}
	return fmt.Sprintf("packets above %d bytes need Linux 5.19", netif.Legacy)
}

// sortSteps puts growing interfaces first, the lowest first, so that no interface
// sends what its lower interfaces do not support, and then shrinking interfaces, the
// highest first.
func sortSteps(steps []step) {
	slices.SortStableFunc(steps, func(a, b step) int {
		shrinkA, shrinkB := shrinks(a.From, a.To), shrinks(b.From, b.To)
		switch {
		case shrinkA != shrinkB && shrinkA:
			return 1
		case shrinkA != shrinkB:
			return -1
		case shrinkA:
			return cmp.Or(cmp.Compare(b.depth, a.depth), cmp.Compare(a.Index, b.Index))
		}
		return cmp.Or(cmp.Compare(a.depth, b.depth), cmp.Compare(a.Index, b.Index))
	})
}

// shrinks reports whether some sizes decrease and none increases.
func shrinks(from, to netif.Sizes) bool {
	larger := to.GSO > from.GSO || to.GRO > from.GRO || to.GSOIPv4 > from.GSOIPv4 || to.GROIPv4 > from.GROIPv4
	return from != to && !larger
}

func byName(ifaces []netif.Interface, name string) *netif.Interface {
	for i := range ifaces {
		if ifaces[i].Name == name {
			return &ifaces[i]
		}
	}
	return nil
}

func byIndex(ifaces []netif.Interface, index int) *netif.Interface {
	for i := range ifaces {
		if ifaces[i].Index == index {
			return &ifaces[i]
		}
	}
	return nil
}
