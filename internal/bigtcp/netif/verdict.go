// SPDX-License-Identifier: Apache-2.0

package netif

import (
	"cmp"
	"fmt"
	"strings"
)

// Bound returns the largest GSO size in bytes that the interface and all its lower
// interfaces support, and the name of the interface with the lowest tso_max_size; of
// equal ones the lowest interface. The size is 0 if the kernel does not report
// tso_max_size.
func (i *Interface) Bound() (size uint32, by string) {
	least := i.LimitedBy()
	return least.TSOMaxSize, least.FullName()
}

const (
	lacksIPv4  = " (IPv4 needs Linux 6.3)"
	withoutTSO = "TSO is off: the kernel segments packets to the MTU before the driver"
)

// Verdict returns the state of BIG TCP on an interface, with the reason. s is the support
// of the kernel.
func (i *Interface) Verdict(s Support) Verdict {
	if !s.IPv6 && !s.IPv4 {
		return Verdict{State: Impossible, Text: "impossible: needs Linux 5.19 for IPv6, 6.3 for IPv4"}
	}
	least := i.LimitedBy()
	v := Verdict{State: Off}
	if least.TSOMaxSize > Legacy {
		v.UpTo = least.TSOMaxSize
	}
	families := i.families(s)
	on := 0
	for _, f := range families {
		on += f.directions()
	}
	if on == 0 {
		v.State, v.Text = i.offVerdict(least)
		if v.State == Off && !s.IPv4 {
			v.Text += lacksIPv4
		}
		return v
	}
	v.State = Partly
	obstacles := i.obstacles(least)
	if on == 2*len(families) && len(obstacles) == 0 {
		v.State = On
	}
	v.Text = string(v.State) + ": " + sizesText(families)
	if !s.IPv4 {
		v.Text += lacksIPv4
	}
	if len(obstacles) > 0 {
		v.Text += "; but " + strings.Join(obstacles, "; ")
	}
	return v
}

// LimitedBy returns the interface of [Interface.Bound], with the bound as its
// TSOMaxSize.
func (i *Interface) LimitedBy() Related {
	least := Related{Name: i.Name, Kind: i.Kind, Driver: i.Driver, TSOMaxSize: i.TSOMaxSize, LegacyTunnel: i.LegacyTunnel}
	least.TSOMaxSize = least.maxEncapsulated()
	for _, r := range i.Related {
		if size := r.maxEncapsulated(); r.Relation == Lower && size != 0 && size <= least.TSOMaxSize {
			least = r
			least.TSOMaxSize = size
		}
	}
	return least
}

// maxEncapsulated returns tso_max_size, or Legacy for a tunnel that damages larger
// packets: the kernel gives such a tunnel the tso_max_size of its lower interface, and
// then writes truncated lengths into the outer headers.
func (r *Related) maxEncapsulated() uint32 {
	if r.LegacyTunnel {
		return min(r.TSOMaxSize, Legacy)
	}
	return r.TSOMaxSize
}

// offVerdict returns the verdict on an interface whose sizes are all Legacy or less.
func (i *Interface) offVerdict(least Related) (State, string) {
	switch {
	case least.TSOMaxSize == 0:
		return Off, "off"
	case least.TSOMaxSize <= Legacy:
		return Impossible, "impossible: " + i.limitText(least)
	}
	text := fmt.Sprintf("off, possible up to %d bytes", least.TSOMaxSize)
	if least.TSOMaxSize < i.TSOMaxSize {
		text += ", the tso_max_size of " + least.FullName()
	}
	if !i.Offloads.TSO {
		text += "; but " + withoutTSO
	}
	return Off, text
}

// obstacles returns the reasons why packets are not large although the sizes are set.
func (i *Interface) obstacles(least Related) []string {
	var obstacles []string
	if least.TSOMaxSize != 0 && least.TSOMaxSize <= Legacy {
		obstacles = append(obstacles, i.limitText(least))
	}
	sends := max(i.Sizes.GSO, i.Sizes.GSOIPv4) > Legacy
	var smaller []Related
	for _, r := range i.Related {
		if r.Relation == Lower && r.Sizes.GSO != 0 && i.Sizes.exceeds(r.Sizes) {
			smaller = append(smaller, r)
		}
	}
	if len(smaller) > 0 {
		obstacles = append(obstacles, lowerSizesText(smaller))
	}
	if sends {
		obstacles = append(obstacles, i.sendObstacles()...)
	}
	if hardware := i.Kind == "" && i.Driver != ""; hardware && !i.Offloads.GRO && max(i.Sizes.GRO, i.Sizes.GROIPv4) > Legacy {
		obstacles = append(obstacles, "GRO is off: received packets are not merged")
	}
	return obstacles
}

// limitText names the interface that bounds GSO sizes.
func (i *Interface) limitText(least Related) string {
	what := cmp.Or(least.Driver, least.Kind)
	name := least.FullName()
	switch {
	case least.Relation == Lower && what != "":
		name = fmt.Sprintf("its lower interface %s (%s)", name, what)
	case least.Relation == Lower:
		name = fmt.Sprintf("its lower interface %s", name)
	case what != "":
		name = fmt.Sprintf("%s (%s)", name, what)
	}
	return fmt.Sprintf("%s supports packets of at most %d bytes", name, least.TSOMaxSize)
}

// sendObstacles returns the obstacles of sent packets in the interface itself.
func (i *Interface) sendObstacles() []string {
	var obstacles []string
	if most := uint64(i.TSOMaxSegs) * uint64(i.MTU); most != 0 && most < uint64(max(i.Sizes.GSO, i.Sizes.GSOIPv4)) {
		obstacles = append(obstacles, fmt.Sprintf("it supports at most %d segments per packet, %d bytes at an MTU of %d", i.TSOMaxSegs, most, i.MTU))
	}
	if !i.Offloads.TSO {
		obstacles = append(obstacles, withoutTSO)
	}
	return obstacles
}

// exceeds reports whether the kernel segments packets of GSO size s at a lower interface
// with the sizes below.
func (s Sizes) exceeds(below Sizes) bool {
	return s.GSO > Legacy && s.GSO > below.GSO ||
		s.GSOIPv4 > Legacy && s.GSOIPv4 > below.GSOIPv4
}

func lowerSizesText(below []Related) string {
	name, s := below[0].FullName(), below[0].Sizes
	size := fmt.Sprintf("%d", s.GSO)
	if s.GSOIPv4 != 0 && s.GSOIPv4 != s.GSO {
		size = fmt.Sprintf("%d (IPv4 %d)", s.GSO, s.GSOIPv4)
	}
	switch others := len(below) - 1; {
	case others == 1:
		name += " and another one"
	case others > 1:
		name += fmt.Sprintf(" and %d others", others)
	}
	return fmt.Sprintf("the kernel segments packets above %s bytes to the MTU at %s", size, name)
}

// FullName returns the name of the interface, with its namespace if it is in another one.
func (r *Related) FullName() string {
	if r.Netns == "" {
		return r.Name
	}
	return r.Name + " in " + r.Netns
}

// family contains the sizes of an IP family, in bytes.
type family struct {
	name           string
	sent, received uint32
}

func (i *Interface) families(s Support) []family {
	var list []family
	if s.IPv6 {
		list = append(list, family{"IPv6", i.Sizes.GSO, i.Sizes.GRO})
	}
	if s.IPv4 {
		list = append(list, family{"IPv4", i.Sizes.GSOIPv4, i.Sizes.GROIPv4})
	}
	return list
}

func sizesText(families []family) string {
	var on, off []string
	for _, f := range families {
		if f.directions() > 0 {
			on = append(on, f.name+" "+f.text())
		} else {
			off = append(off, f.name)
		}
	}
	text := strings.Join(on, ", ")
	if len(off) > 0 {
		text = strings.Replace(text, " ", " only: ", 1)
	}
	return text
}

// directions counts the directions with a size above Legacy.
func (f family) directions() int {
	n := 0
	if f.sent > Legacy {
		n++
	}
	if f.received > Legacy {
		n++
	}
	return n
}

func (f family) text() string {
	if f.sent == f.received {
		return fmt.Sprintf("%d bytes", f.sent)
	}
	return fmt.Sprintf("%d bytes sent, %d received", f.sent, f.received)
}
