// SPDX-License-Identifier: Apache-2.0

// Package clsact attaches BPF programs to interfaces by filters of the clsact queueing discipline, for kernels without TCX
// links (before Linux 6.6). Filters outlive the process that adds them, and are found again by their names.
package clsact

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/internal/fault"
)

// Hook is where the programs of a filter run.
type Hook uint32

// The hooks of an interface.
const (
	Ingress = Hook(netlink.HANDLE_MIN_INGRESS)
	Egress  = Hook(netlink.HANDLE_MIN_EGRESS)
)

const (
	// prefix begins the names of all filters of Sockeye.
	prefix = "sockeye-"
	// mark ends the names of filters on interfaces that had no clsact before.
	mark = "/q"
)

// Filters are the filters of Sockeye in a network namespace.
type Filters struct{ handle *netlink.Handle }

// Open opens the filters of the namespace of the calling thread. The methods work from any namespace.
func Open() (*Filters, error) {
	handle, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open route socket: %w", err)
	}
	return &Filters{handle}, nil
}

// Close closes the socket. The filters stay.
func (f *Filters) Close() { f.handle.Close() }

// Attach adds a filter with a program to a hook of an interface, before the existing filters as far as their priorities permit.
// If there is a filter with this name, its program is replaced in one step. Names begin with "sockeye-". Attach adds the
// queueing discipline if the interface has none. The error matches unix.ENODEV if there is no such interface.
func (f *Filters) Attach(index int, hook Hook, program *ebpf.Program, name string) (err error) {
	added, err := f.addQdisc(index)
	if err != nil {
		return err
	}
	if added {
		defer func() {
			if err != nil {
				err = errors.Join(err, f.removeQdisc(index))
			}
		}()
	}
	marked := added
	for _, h := range []Hook{Ingress, Egress} {
		filters, err := f.list(index, h)
		if err != nil {
			return err
		}
		marked = marked || slices.ContainsFunc(filters, func(l netlink.Filter) bool { return strings.HasSuffix(nameOf(l), mark) })
	}
	filters, err := f.list(index, hook)
	if err != nil {
		return err
	}
	filter := &netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{LinkIndex: index, Parent: uint32(hook), Priority: freePriority(filters), Protocol: unix.ETH_P_ALL},
		Fd:          program.FD(), Name: name, DirectAction: true,
	}
	if marked {
		filter.Name += mark
	}
	for _, l := range filters {
		if baseName(l) == name {
			filter.Priority, filter.Handle = l.Attrs().Priority, l.Attrs().Handle
		}
	}
	if err := f.handle.FilterReplace(filter); err != nil {
		return fmt.Errorf("add filter to interface %d: %w", index, err)
	}
	return nil
}

// Has reports whether a hook of an interface has a filter with this name.
func (f *Filters) Has(index int, hook Hook, name string) (bool, error) {
	filters, err := f.list(index, hook)
	return slices.ContainsFunc(filters, func(l netlink.Filter) bool { return baseName(l) == name }), err
}

// Interfaces returns the interfaces that have a clsact queueing discipline.
func (f *Filters) Interfaces() ([]int, error) {
	qdiscs, err := f.handle.QdiscList(nil)
	if err != nil {
		return nil, fmt.Errorf("list qdiscs: %w", err)
	}
	var indexes []int
	for _, q := range qdiscs {
		if q.Type() == "clsact" {
			indexes = append(indexes, q.Attrs().LinkIndex)
		}
	}
	return indexes, nil
}

// Detach removes the filters of Sockeye on an interface that unwanted selects. It removes the queueing discipline with the last
// filter if Attach has added it. An interface that has vanished has no filters.
func (f *Filters) Detach(index int, unwanted func(hook Hook, name string) bool) error {
	left, added := 0, false
	for _, hook := range []Hook{Ingress, Egress} {
		filters, err := f.list(index, hook)
		if err != nil {
			return err
		}
		for _, l := range filters {
			if name := baseName(l); name == "" || !unwanted(hook, name) {
				left++
				continue
			}
			added = added || strings.HasSuffix(nameOf(l), mark)
			if err := f.handle.FilterDel(l); err != nil && !errors.Is(err, unix.ENOENT) {
				return fmt.Errorf("remove filter from interface %d: %w", index, err)
			}
		}
	}
	if !added || left > 0 {
		return nil
	}
	return f.removeQdisc(index)
}

// list returns all filters of a hook. An interface without hooks has none.
func (f *Filters) list(index int, hook Hook) ([]netlink.Filter, error) {
	filters, err := f.handle.FilterList(&netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: index}}, uint32(hook))
	if errors.Is(err, unix.ENODEV) || errors.Is(err, unix.EINVAL) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list filters of interface %d: %w", index, err)
	}
	return filters, nil
}

func qdisc(index int) *netlink.Clsact {
	return &netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT}}
}

func (f *Filters) removeQdisc(index int) error {
	err := f.handle.QdiscDel(qdisc(index))
	if err != nil && !errors.Is(err, unix.ENODEV) && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("remove clsact from interface %d: %w", index, err)
	}
	return nil
}

// addQdisc adds the queueing discipline, unless the interface has one.
func (f *Filters) addQdisc(index int) (added bool, err error) {
	err = f.handle.QdiscAdd(qdisc(index))
	if err == nil {
		return true, nil
	}
	if !errors.Is(err, unix.EEXIST) {
		return false, fmt.Errorf("add clsact to interface %d: %w", index, err)
	}
	qdiscs, err := f.handle.QdiscList(&netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: index}})
	if err != nil {
		return false, fmt.Errorf("list qdiscs of interface %d: %w", index, err)
	}
	for _, q := range qdiscs {
		if q.Type() == "ingress" {
			return false, fault.Conflict(fmt.Errorf("attach to interface %d: the interface has an ingress qdisc, which excludes clsact", index),
				"replace it by clsact, which has an ingress hook too; Linux 6.6 needs neither")
		}
	}
	return false, nil
}

// freePriority returns the first priority that is free, or is used by bpf filters for all protocols.
func freePriority(filters []netlink.Filter) uint16 {
	for priority := uint16(1); ; priority++ {
		taken := slices.ContainsFunc(filters, func(f netlink.Filter) bool {
			a := f.Attrs()
			return a.Priority == priority && (f.Type() != "bpf" || a.Protocol != unix.ETH_P_ALL)
		})
		if !taken {
			return priority
		}
	}
}

// baseName is nameOf without the mark.
func baseName(f netlink.Filter) string { return strings.TrimSuffix(nameOf(f), mark) }

// nameOf returns the name of a filter of Sockeye; "": it is one of others.
func nameOf(f netlink.Filter) string {
	if b, ok := f.(*netlink.BpfFilter); ok && strings.HasPrefix(b.Name, prefix) {
		return b.Name
	}
	return ""
}
