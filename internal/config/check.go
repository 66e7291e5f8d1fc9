// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// check refuses invalid combinations of values. Zero values are skipped: they were refused before, or are not given.
func (d *decoder) check(p *Policy) {
	seen, v6only := map[listenerAddress]string{}, map[string]bool{}
	for _, s := range p.Services {
		path := join("services", s.Name)
		d.checkConflicts(path, s, seen, v6only)
		d.checkMemberPorts(path, s)
		if s.WhenEmpty.Standby != nil {
			d.checkSlot(path+".when_empty.standby", *s.WhenEmpty.Standby, s.Slots)
		}
		d.checkMembers(path, s)
		d.checkUsers(path, s)
		d.checkSlotsAs(path, s, p.Services)
		d.checkReached(path, s, p.Services)
	}
	d.checkTune(p)
	d.checkTrace(p)
	d.checkBigTCP(p)
	d.checkFleet(p)
	d.checkUI(p)
}

// checkUI checks that only users of this host see the page without TLS and without authentication.
func (d *decoder) checkUI(p *Policy) {
	u := &p.UI
	if u.Listen == "" {
		return
	}
	if u.SocketPath() != "" {
		if u.TLS != (UITLS{}) {
			d.refuseAt("ui.tls", "does not go with a Unix socket", "let the proxy in front of the socket do TLS")
		}
		return
	}
	at, err := netip.ParseAddrPort(u.Listen)
	if err != nil {
		return // refused before
	}
	if m := p.Metrics.Listen; m == u.Listen {
		d.refuseAt("ui.listen", "is the address of metrics.listen", "use another port")
	}
	if at.Addr().IsLoopback() {
		return
	}
	if !d.given("ui.tls") {
		d.refuseAt("ui.listen", "needs tls, because "+at.Addr().String()+" is not a loopback address", "add tls: {cert: FILE, key: FILE}, or listen on 127.0.0.1")
	}
	if !d.given("ui.tls.client_ca") && !d.given("ui.token_file") {
		d.refuseAt("ui.listen", "needs token_file or tls.client_ca, because "+at.Addr().String()+" is not a loopback address", "add token_file: FILE with a token (openssl rand -hex 32), or listen on 127.0.0.1")
	}
}

// checkSlotsAs checks that two services with shared slots place each device in the same slot at all times.
func (d *decoder) checkSlotsAs(path string, s Service, services []Service) {
	if s.SlotsAs == "" {
		return
	}
	at, names := path+".slots_as", []string{}
	i := slices.IndexFunc(services, func(o Service) bool {
		names = append(names, o.Name)
		return o.Name == s.SlotsAs
	})
	switch {
	case s.SlotsAs == s.Name:
		d.refuseAt(at, "is the service itself", "")
		return
	case i < 0:
		d.refuseAt(at, fmt.Sprintf("there is no service %q", s.SlotsAs), didYouMean(s.SlotsAs, names))
		return
	}
	other := services[i]
	services[i].SharesSlots = true
	services[slices.IndexFunc(services, func(o Service) bool { return o.Name == s.Name })].SharesSlots = true
	if other.SlotsAs != "" {
		d.refuseAt(at, fmt.Sprintf("service %s itself has the slots of %s", other.Name, other.SlotsAs), "name that one")
	}
	if s.Slots != 0 && other.Slots != 0 && s.Slots != other.Slots {
		d.refuseAt(path+".slots", fmt.Sprintf("is %d, service %s has %d", s.Slots, other.Name, other.Slots), "services with the same slots have the same number of them")
	}
	if s.DeviceMap != other.DeviceMap {
		d.refuseAt(at, fmt.Sprintf("service %s has another device_map", other.Name), "give both the same")
	}
	for _, one := range []struct {
		path string
		Service
	}{{path, s}, {join("services", other.Name), other}} {
		if one.WhenEmpty.Standby != nil {
			d.refuseAt(one.path+".when_empty", "standby does not go with slots that two services share", "a slot may be empty in one of them alone: use reject or wait")
		}
		if one.OnStart == Adopt {
			d.refuseAt(one.path+".on_start", "adopt does not go with slots that two services share", "use reset")
		}
		if one.Pace != nil {
			d.refuseAt(one.path+".pace", "does not go with slots that two services share", "the devices of both services move at once")
		}
	}
}

// listenerAddress identifies an address that only one listener of a host can have.
type listenerAddress struct {
	netns    string
	protocol Protocol
	address  netip.AddrPort
}

// checkConflicts checks that the listeners of a service do not conflict with each other or with those of earlier services.
func (d *decoder) checkConflicts(path string, s Service, seen map[listenerAddress]string, v6only map[string]bool) {
	netns := s.Netns
	if netns == "" && d.given(path+".netns") {
		netns = path // invalid, so treated as a namespace of its own
	}
	for i, l := range s.Listeners {
		if l.Protocol == "" || !l.Address.IsValid() {
			continue
		}
		sub := fmt.Sprintf("%s.listeners[%d]", path, i)
		here := listenerAddress{netns, l.Protocol, l.Address}
		v6only[sub] = l.V6Only
		if first, ok := seen[here]; ok {
			d.refuseAt(sub, fmt.Sprintf("%s is already %s, line %d", l, first, d.at[first].line), "")
			continue
		}
		seen[here] = sub
		if l.V6Only && l.Address.Addr() != netip.IPv6Unspecified() {
			d.refuseAt(sub+".v6only", fmt.Sprintf("does not go with the address %s", l.Address), "only [::] can serve IPv4 too")
		}
		other := here
		switch l.Address.Addr() {
		case netip.IPv4Unspecified():
			other.address = netip.AddrPortFrom(netip.IPv6Unspecified(), l.Address.Port())
		case netip.IPv6Unspecified():
			other.address = netip.AddrPortFrom(netip.IPv4Unspecified(), l.Address.Port())
		default:
			continue
		}
		if first, ok := seen[other]; ok && !l.V6Only && !v6only[first] {
			d.refuseAt(sub, fmt.Sprintf("%s does not go with %s (%s, line %d)", l.Address, other.address, first, d.at[first].line),
				fmt.Sprintf("use only [::]:%d, which serves IPv4 too, or set its v6only", l.Address.Port()))
		}
	}
}

// checkReached checks that the packets to a listener with a specific address reach its service: sk_lookup, by which another service with the
// unspecified address steers, comes before the lookup of sockets.
func (d *decoder) checkReached(path string, s Service, services []Service) {
	for i, l := range s.Listeners {
		if !l.Address.IsValid() || l.Address.Addr().IsUnspecified() {
			continue
		}
		for _, other := range services {
			if other.Name == s.Name || other.Steering != Lookup || other.Netns != s.Netns {
				continue
			}
			for j, o := range other.Listeners {
				if o.Protocol == l.Protocol && o.Address.Port() == l.Address.Port() && o.Address.Addr().IsUnspecified() && o.Receives(l.Address.Addr().WithZone("")) {
					d.refuseAt(fmt.Sprintf("%s.listeners[%d]", path, i), fmt.Sprintf("%s.listeners[%d] with steering: lookup takes the packets to %s", join("services", other.Name), j, l), "use steering: reuseport for both services, or addresses that do not overlap")
				}
			}
		}
	}
}

// Receives reports whether packets to an address, without a zone, reach the listener.
func (l Listener) Receives(address netip.Addr) bool {
	switch l.Address.Addr() {
	case netip.IPv4Unspecified():
		return address.Is4()
	case netip.IPv6Unspecified():
		return !l.V6Only || address.Is6()
	}
	return l.Address.Addr().WithZone("") == address
}

// checkMemberPorts checks that protocol and port of a member's socket identify its listener.
func (d *decoder) checkMemberPorts(path string, s Service) {
	for i, l := range s.Listeners {
		sub := fmt.Sprintf("%s.listeners[%d]", path, i)
		if l.MemberPorts != (PortRange{}) && s.Steering == Reuseport {
			d.refuseAt(sub+".member_ports", "needs steering: lookup", "with reuseport, members listen on the listener's own port")
		}
		if s.Steering != Lookup || !l.Address.IsValid() {
			continue
		}
		for j, other := range s.Listeners[:i] {
			if l.Protocol != other.Protocol || !other.Address.IsValid() || l.MemberPorts == (PortRange{}) && other.MemberPorts == (PortRange{}) {
				continue
			}
			a, b := memberPorts(l), memberPorts(other)
			if a.First > b.Last || b.First > a.Last {
				continue
			}
			at := sub + ".member_ports"
			if l.MemberPorts == (PortRange{}) {
				at = sub + ".address"
			}
			d.refuseAt(at, fmt.Sprintf("members' %s port %s overlaps %s of listeners[%d]", l.Protocol, a, b, j), "")
		}
	}
}

// memberPorts returns the range of ports that members listen on.
func memberPorts(l Listener) PortRange {
	if l.MemberPorts == (PortRange{}) {
		return PortRange{l.Address.Port(), l.Address.Port()}
	}
	return l.MemberPorts
}

func (d *decoder) checkMembers(path string, s Service) {
	fixed := map[int]int{}
	for i, m := range s.Members {
		sub := fmt.Sprintf("%s.members[%d]", path, i)
		switch m.Slot.Kind {
		case SlotInstance:
			if unit := sub + ".match.systemd_unit"; !strings.Contains(m.Match.SystemdUnit, "@") && (m.Match.SystemdUnit != "" || !d.given(unit)) {
				d.refuseAt(sub+".slot", "instance needs a match.systemd_unit with @", "as in nfacctd@*.service")
			}
		case SlotGroup:
			re := m.Match.CommandLine
			if re == nil && !d.given(sub+".match.command_line") || re != nil && re.NumSubexp() == 0 {
				d.refuseAt(sub+".slot", "group needs a match.command_line with a group", `as in 'nfacctd -f \S+-(\d+)\.conf'`)
			}
		case SlotNumber:
			d.checkSlot(sub+".slot", m.Slot.Number, s.Slots)
			if first, ok := fixed[m.Slot.Number]; ok {
				d.refuseAt(sub+".slot", fmt.Sprintf("slot %d is already that of members[%d]", m.Slot.Number, first), "a slot has one member")
				continue
			}
			fixed[m.Slot.Number] = i
		}
	}
}

// checkUsers refuses rules without a user: any user of the host could start a matching program. Without rules, only
// users of the agent's socket can add members.
func (d *decoder) checkUsers(path string, s Service) {
	if len(s.Users) > 1 && s.Steering == Reuseport {
		d.refuseAt(path+".user", "must be one user with steering: reuseport, is a list",
			"sockets that share a port must belong to one user; steering: lookup supports several")
	}
	if d.given(path+".user") || d.misspelt[path+".user"] {
		return
	}
	first := ""
	for i, m := range s.Members {
		sub := fmt.Sprintf("%s.members[%d].match", path, i)
		switch user := m.Match.User; {
		case !d.given(sub) || d.bad[sub]:
		case user == "":
			d.refuseAt(sub, "any user could start a matching process and take a slot",
				"add the user of the members to the service, as in user: pmacct")
		case first == "":
			first = user
		case first != user && s.Steering == Reuseport:
			d.refuseAt(sub+".user", fmt.Sprintf("must be %s, as in the rules before it", first),
				"sockets that share a port must belong to one user; steering: lookup supports several")
		}
	}
}

func (d *decoder) checkSlot(path string, slot, slots int) {
	if slots > 0 && slot >= slots {
		d.refuseAt(path, fmt.Sprintf("must be 0 to %d, is %d", slots-1, slot), fmt.Sprintf("the service has %d slots, counted from 0", slots))
	}
}
