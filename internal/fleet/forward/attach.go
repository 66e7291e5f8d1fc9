// SPDX-License-Identifier: Apache-2.0

package forward

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"sockeye/internal/bpf/pin"
	"sockeye/internal/clsact"
)

// Pins of links.
const (
	ingressPrefix = "ingress_"
	egressPrefix  = "egress_"
	tunnelLink    = "tunnel"
)

// filterPrefix begins the names of filters.
const filterPrefix = "sockeye-fleet/"

// hook is a place of a program: a pinned TCX link, or a filter on kernels without TCX.
type hook struct {
	pin     string
	program *ebpf.Program
	tcx     ebpf.AttachType
	filter  filter
}

type filter struct {
	index int
	hook  clsact.Hook
	name  string
}

func (p *Path) tunnelHook(index int) *hook {
	return &hook{tunnelLink, p.tunnel, ebpf.AttachTCXIngress, filter{index, clsact.Ingress, filterPrefix + "tunnel"}}
}

// Attach attaches the programs to interfaces, by index, and to the tunnel unless that is 0. It detaches them from all others.
// A program that is attached stays so, and is replaced by the one of this version in one step. Before Linux 6.6, the programs
// are filters of clsact, in the namespace of the calling thread.
//
// A tunnel that exists keeps its program, and an error elsewhere does not prevent that: without it, anybody could send packets to
// this host in the tunnel.
func (p *Path) Attach(interfaces []int, tunnel int) (err error) {
	if tunnel == 0 {
		if tunnel, err = tunnelIndex(); err != nil {
			return err
		}
	}
	p.hooks = p.hooksOf(interfaces, tunnel)
	if tunnel != 0 {
		err = p.attachTunnel(tunnel)
	}
	pins, filters := make(map[string]bool), make(map[filter]bool)
	for i := range p.hooks {
		h := &p.hooks[i]
		pins[h.pin], filters[h.filter] = true, true
		if h.pin == tunnelLink {
			continue
		}
		if failed := p.ensure(h); err == nil {
			err = failed // the others are attached all the same
		}
	}
	if err != nil {
		return err
	}
	if p.filters != nil {
		if _, err := detachFilters(p.filters, filters); err != nil {
			return err
		}
	}
	entries, err := os.ReadDir(p.dir)
	if err != nil {
		return fmt.Errorf("read pin directory: %w", err)
	}
	for _, e := range entries {
		if name := e.Name(); !pins[name] && isLink(name) {
			if err := p.detach(name); err != nil {
				return err
			}
		}
	}
	for _, dir := range p.others {
		if err := removeDir(dir); err != nil {
			return err
		}
	}
	p.others = nil
	return nil
}

// hooksOf returns the hooks of interfaces and of the tunnel.
func (p *Path) hooksOf(interfaces []int, tunnel int) (all []hook) {
	for _, index := range interfaces {
		n := strconv.Itoa(index)
		all = append(all, hook{ingressPrefix + n, p.ingress, ebpf.AttachTCXIngress, filter{index, clsact.Ingress, filterPrefix + "ingress"}})
		if tunnel != 0 {
			all = append(all, hook{egressPrefix + n, p.egress, ebpf.AttachTCXEgress, filter{index, clsact.Egress, filterPrefix + "egress"}})
		}
	}
	if tunnel != 0 {
		all = append(all, *p.tunnelHook(tunnel))
	}
	return all
}

// IsAttached reports whether all programs are where Attach has put them. Other programs can remove filters, with the queueing
// discipline of an interface, but not links.
func (p *Path) IsAttached() (bool, error) {
	if p.filters == nil {
		return true, nil
	}
	for i := range p.hooks {
		f := &p.hooks[i].filter
		if has, err := p.filters.Has(f.index, f.hook, f.name); err != nil || !has {
			return false, err
		}
	}
	return true, nil
}

// isLink reports whether a pin is a link, also one that was not renamed.
func isLink(name string) bool {
	return strings.HasPrefix(name, ingressPrefix) || strings.HasPrefix(name, egressPrefix) || strings.HasPrefix(name, tunnelLink)
}

// ensure attaches a program to an interface, unless the pinned link does that already, and pins the link.
func (p *Path) ensure(h *hook) error {
	index := h.filter.index
	if l := p.links[h.pin]; l != nil {
		if attachedTo(l, index) {
			return nil
		}
		l.Close()
		delete(p.links, h.pin)
	}
	path := filepath.Join(p.dir, h.pin)
	for _, dir := range append([]string{p.dir}, p.others...) {
		l, err := link.LoadPinnedLink(filepath.Join(dir, h.pin), nil)
		if err != nil {
			continue // none, or none that can be used
		}
		if !attachedTo(l, index) || l.Update(h.program) != nil {
			l.Close()
			continue
		}
		if dir != p.dir {
			if err := os.Rename(filepath.Join(dir, h.pin), path); err != nil {
				l.Close()
				return fmt.Errorf("move pin %s: %w", h.pin, err)
			}
		}
		p.links[h.pin] = l
		return nil
	}
	l, err := link.Link(nil), ebpf.ErrNotSupported
	if p.filters == nil {
		l, err = link.AttachTCX(link.TCXOptions{Interface: index, Program: h.program, Attach: h.tcx, Anchor: link.Head()})
	}
	if errors.Is(err, ebpf.ErrNotSupported) {
		return p.addFilter(h)
	}
	if err != nil {
		return fmt.Errorf("attach to interface %d: %w", index, err)
	}
	if err := pin.Replace(l.Pin, path); err != nil {
		l.Close()
		return fmt.Errorf("pin %s: %w", h.pin, err)
	}
	p.links[h.pin] = l
	return nil
}

func (p *Path) addFilter(h *hook) (err error) {
	if p.filters == nil {
		if p.filters, err = clsact.Open(); err != nil {
			return err
		}
	}
	return p.filters.Attach(h.filter.index, h.filter.hook, h.program, h.filter.name)
}

// attachedTo reports whether a link is attached to an interface. The kernel clears the index of a link whose interface is
// removed.
func attachedTo(l link.Link, index int) bool {
	info, err := l.Info()
	if err != nil {
		return false
	}
	tcx := info.TCX()
	return tcx != nil && tcx.Ifindex == uint32(index)
}

func (p *Path) detach(name string) error {
	if l := p.links[name]; l != nil {
		l.Close()
		delete(p.links, name)
	}
	return pin.Remove(filepath.Join(p.dir, name))
}

// Retire removes what no pin holds: the interface of the tunnel, which must not be up without its filter, and filters. It returns
// what it has removed.
func Retire() (removed []string, err error) {
	removed, failed := removeTunnel()
	f, err := clsact.Open()
	if err != nil {
		return removed, errors.Join(failed, err)
	}
	defer f.Close()
	from, err := detachFilters(f, nil)
	for _, index := range from {
		name := strconv.Itoa(index)
		if l, err := netlink.LinkByIndex(index); err == nil {
			name = l.Attrs().Name
		}
		removed = append(removed, "filters of interface "+name)
	}
	return removed, errors.Join(failed, err)
}

// detachFilters removes all filters but those that are kept, and returns the interfaces that had some.
func detachFilters(f *clsact.Filters, kept map[filter]bool) (from []int, err error) {
	indexes, err := f.Interfaces()
	if err != nil {
		return nil, err
	}
	for _, index := range indexes {
		removed := false
		err := f.Detach(index, func(at clsact.Hook, name string) bool {
			unwanted := strings.HasPrefix(name, filterPrefix) && !kept[filter{index, at, name}]
			removed = removed || unwanted
			return unwanted
		})
		if err != nil {
			return from, err
		}
		if removed {
			from = append(from, index)
		}
	}
	return from, nil
}
