// SPDX-License-Identifier: Apache-2.0

package netif

import (
	"cmp"
	"fmt"
	"strings"
)

// Bound is the largest size in bytes of packets that the interface and all devices
// below it take, and the name of the one that takes the least: of equal ones the
// lowest, from which the others have it. The size is 0 where the kernel does not say.
func (i *Interface) Bound() (size uint32, by string) {
	least := i.LimitedBy()
	return least.TSOMaxSize, least.Place()
}

func (i *Interface) LimitedBy() Related {
	least := Related{Name: i.Name, Kind: i.Kind, Driver: i.Driver, TSOMaxSize: i.TSOMaxSize, LegacyTunnel: i.LegacyTunnel}
	least.TSOMaxSize = least.takes()
	for _, r := range i.Related {
		if size := r.takes(); r.Relation == Lower && size != 0 && size <= least.TSOMaxSize {
			least = r
			least.TSOMaxSize = size
		}
	}
	return least
}

// takes is the largest packet that comes out whole, in bytes: the kernel lets tunnels
// have the size of the device below, and then writes lengths that do not fit into what
// they put around a packet.
func (r *Related) takes() uint32 {
	if r.LegacyTunnel {
		return min(r.TSOMaxSize, Legacy)
	}
	return r.TSOMaxSize
}

// place is the name, with the namespace if that is another one.
func (r *Related) Place() string {
	if r.Netns == "" {
		return r.Name
	}
	return r.Name + " in " + r.Netns
}

// Judge says what is to be said of an interface.
func Judge(i *Interface, s Support) Verdict {
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
		v.State, v.Text = i.judgeOff(least)
		if v.State == Off && !s.IPv4 {
			v.Text += lacksIPv4
		}
		return v
	}
	v.State = Partly
	flaws := i.flaws(least)
	if on == 2*len(families) && len(flaws) == 0 {
		v.State = On
	}
	v.Text = string(v.State) + ": " + sizesText(families)
	if !s.IPv4 {
		v.Text += lacksIPv4
	}
	if len(flaws) > 0 {
		v.Text += "; but " + strings.Join(flaws, "; ")
	}
	return v
}

const (
	lacksIPv4  = " (IPv4 needs Linux 6.3)"
	withoutTSO = "TSO is off: the kernel cuts packets to the MTU before the device gets them"
)

// judgeOff is for an interface with all sizes at Legacy or below.
func (i *Interface) judgeOff(least Related) (State, string) {
	switch {
	case least.TSOMaxSize == 0:
		return Off, "off"
	case least.TSOMaxSize <= Legacy:
		return Impossible, "impossible: " + i.limit(least)
	}
	text := fmt.Sprintf("off, possible up to %d bytes", least.TSOMaxSize)
	if least.TSOMaxSize < i.TSOMaxSize {
		text += ", as many as " + least.Place() + " takes"
	}
	if !i.Offloads.TSO {
		text += "; but " + withoutTSO
	}
	return Off, text
}

// limit says which device bounds what is sent.
func (i *Interface) limit(least Related) string {
	what := cmp.Or(least.Driver, least.Kind)
	name := least.Place()
	switch {
	case least.Relation == Lower && what != "":
		name = fmt.Sprintf("it sends through %s (%s), which", name, what)
	case least.Relation == Lower:
		name = fmt.Sprintf("it sends through %s, which", name)
	case what != "":
		name = fmt.Sprintf("%s is %s, which", name, what)
	}
	return fmt.Sprintf("%s takes packets of at most %d bytes", name, least.TSOMaxSize)
}

// flaws are why large packets do not get through though the sizes are set.
func (i *Interface) flaws(least Related) []string {
	var flaws []string
	if least.TSOMaxSize != 0 && least.TSOMaxSize <= Legacy {
		flaws = append(flaws, i.limit(least))
	}
	sends := max(i.Sizes.GSO, i.Sizes.GSOIPv4) > Legacy
	var smaller []Related
	for _, r := range i.Related {
		if r.Relation == Lower && r.Sizes.GSO != 0 && i.Sizes.exceed(r.Sizes) {
			smaller = append(smaller, r)
		}
	}
	if len(smaller) > 0 {
		flaws = append(flaws, smallerText(smaller))
	}
	if sends {
		flaws = append(flaws, i.ownFlaws()...)
	}
	if hardware := i.Kind == "" && i.Driver != ""; hardware && !i.Offloads.GRO && max(i.Sizes.GRO, i.Sizes.GROIPv4) > Legacy {
		flaws = append(flaws, "GRO is off: received packets are not joined")
	}
	return flaws
}

// ownFlaws are those of the interface itself, for packets that are sent.
func (i *Interface) ownFlaws() []string {
	var flaws []string
	if most := uint64(i.TSOMaxSegs) * uint64(i.MTU); most != 0 && most < uint64(max(i.Sizes.GSO, i.Sizes.GSOIPv4)) {
		flaws = append(flaws, fmt.Sprintf("it takes at most %d segments, %d bytes at an MTU of %d", i.TSOMaxSegs, most, i.MTU))
	}
	if !i.Offloads.TSO {
		flaws = append(flaws, withoutTSO)
	}
	return flaws
}

// exceed tells whether packets of these sizes are sent that are too large for a
// device below: at its GSO sizes the kernel cuts.
func (s Sizes) exceed(below Sizes) bool {
	return s.GSO > Legacy && s.GSO > below.GSO ||
		s.GSOIPv4 > Legacy && s.GSOIPv4 > below.GSOIPv4
}

func smallerText(below []Related) string {
	name, s := below[0].Place(), below[0].Sizes
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
	return fmt.Sprintf("the kernel cuts those above %s bytes to the MTU at %s", size, name)
}

// family is what is set for one, in bytes.
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

// directions counts those in which packets may be large.
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
