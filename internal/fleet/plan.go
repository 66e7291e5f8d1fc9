// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"reflect"
	"slices"
	"strings"
	"time"

	"sockeye/internal/api"
	"sockeye/internal/config"
	"sockeye/internal/domain"
	"sockeye/internal/fault"
	"sockeye/internal/fleet/lead"
	"sockeye/internal/fleet/store"
)

// Plan compares the fleet of a policy with the one in force.
func (d *Domain) Plan(policy *config.Policy) ([]domain.Step, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	var before, after *settings
	part := d.part.Load()
	if part != nil {
		before = part.settings
	}
	if policy.Fleet != nil {
		var err error
		if after, err = newSettings(policy); err != nil {
			return nil, err
		}
		// The file of hosts may follow the policy: a host that serves alone goes on, and one with a table keeps it. Another file
		// replaces the table.
		err = after.checkStore()
		if err != nil && (after.Etcd != nil || before != nil && (before.File != after.File || !errors.Is(err, fs.ErrNotExist))) {
			return nil, err
		}
		if _, err, _ := findInterfaces(after.Interfaces, nil); err != nil {
			return nil, policy.Flaw("fleet.interfaces", err.Error(), fault.Hint(err))
		}
	}
	change := api.Change{What: "fleet"}
	switch {
	case before == nil && after == nil && !d.broken.Load(), before != nil && after != nil && before.equal(after):
		return nil, nil
	case before == nil && after == nil:
		change.Action = "remove"
		change.Effect = "this host serves all devices that reach it"
	case before == nil:
		change.Action = "add"
		change.What = fmt.Sprintf("fleet %s, as host %s", after.Name, after.host)
		change.Effect = "this host serves what reaches it until it has the table"
		if d.broken.Load() {
			change.Effect = "this host serves its devices again when it has the table"
		}
		if err := absentAddress(after.Addresses); err != nil {
			change.Effect += "; " + err.Error() + ", until then this host is not healthy"
		}
	case after == nil:
		change.Action = "remove"
		change.What = "fleet " + before.Name
		change.Effect = part.leaveEffect() + "; afterwards this host serves what reaches it, so stop the announcement first"
	default:
		change.Action = "change"
		change.What = "fleet " + after.Name
		if before.Name != after.Name || before.host != after.host {
			change.What = fmt.Sprintf("fleet %s, as host %s -> fleet %s, as host %s", before.Name, before.host, after.Name, after.host)
		}
		if settings := describeSettings(before, after); len(settings) > 0 {
			change.What += ": " + strings.Join(settings, ", ")
		}
		effects := append(part.differences(after), part.warnings(before, after)...)
		if before.sharesTable(after) {
			if before.Weight != after.Weight {
				effects = append(effects, part.weightEffect(after))
			}
		} else {
			effects = append(effects, part.leaveEffect(), "this host serves what reaches it until it has the table as host "+after.host)
		}
		change.Effect = strings.Join(append(effects, addressEffects(before, after)...), "; ")
	}
	return []domain.Step{{Changes: []api.Change{change}, Apply: func() (func() error, error) {
		if err := d.change(after); err != nil {
			return nil, err
		}
		return func() error { return d.change(before) }, nil
	}}}, nil
}

// warnings tells what would keep this host from serving devices with other settings.
func (p *participation) warnings(before, after *settings) (list []string) {
	if err := absentAddress(after.Addresses); err != nil && !slices.Equal(before.Addresses, after.Addresses) {
		list = append(list, err.Error()+"; until then this host is not healthy, and its devices move to the others")
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.state.Snapshot == nil || !p.state.Connected || before.Etcd == nil || after.Etcd == nil {
		return list
	}
	if after.host != before.host && after.Name == before.Name && slices.ContainsFunc(p.state.Hosts, func(h lead.Host) bool { return h.Name == after.host && h.Alive }) {
		list = append(list, "host "+after.host+" is alive: with its name, this host is not healthy and has no devices")
	}
	if living := lead.Living(p.state.Hosts); living < after.MinHosts && after.MinHosts != before.MinHosts {
		list = append(list, fmt.Sprintf("no device moves until %d hosts are alive, now %d", after.MinHosts, living))
	}
	if !reflect.DeepEqual(before.Etcd, after.Etcd) && after.OnHostDeath == config.NextHost {
		list = append(list, fmt.Sprintf("if etcd does not answer with these settings, the others take over the devices of this host after %v", store.DefaultLease))
	}
	return list
}

// describeSettings returns the settings that differ, one by one, but for the names of the fleet and of the host.
func describeSettings(before, after *settings) (list []string) {
	note := func(name string, was, is any) {
		if before, after := fmt.Sprint(was), fmt.Sprint(is); before != after {
			list = append(list, name+" "+before+" -> "+after)
		}
	}
	unnamed := func(name string, same bool) {
		if !same {
			list = append(list, name)
		}
	}
	delay := func(s *settings) time.Duration { return time.Duration(s.Settle) * time.Microsecond }
	note("weight", before.Weight, after.Weight)
	note("interfaces", before.Interfaces, after.Interfaces)
	note("addresses", before.Addresses, after.Addresses)
	if was, is := before.Etcd, after.Etcd; was != nil && is != nil {
		note("endpoints", was.Endpoints, is.Endpoints)
		unnamed("credentials of etcd", was.CA == is.CA && was.Cert == is.Cert && was.Key == is.Key && was.User == is.User && was.PasswordFile == is.PasswordFile)
	}
	note("store", before.storeName(), after.storeName())
	if before.host == after.host {
		note("host", cmp.Or(before.Host, "(host name)"), cmp.Or(after.Host, "(host name)"))
	}
	note("min_hosts", before.MinHosts, after.MinHosts)
	note("settle", delay(before), delay(after))
	note("on_host_death", before.OnHostDeath, after.OnHostDeath)
	unnamed("listeners at the addresses", before.digests.Listeners == after.digests.Listeners || !slices.Equal(before.Addresses, after.Addresses) && slices.Equal(before.ports(), after.ports()))
	unnamed("device map", before.devices.Equal(after.devices))
	return list
}

// storeName returns etcd, or the file of hosts.
func (s *settings) storeName() string { return cmp.Or(s.File, "etcd") }

// ports returns the protocols and ports of the listeners.
func (s *settings) ports() (list []string) {
	for _, l := range s.listeners {
		list = append(list, fmt.Sprint(l.Protocol, " ", l.Port))
	}
	slices.Sort(list)
	return slices.Compact(list)
}

// addressEffects tells what happens to packets to addresses that the fleet gets or loses.
func addressEffects(before, after *settings) (list []string) {
	for _, a := range after.Addresses {
		if !slices.Contains(before.Addresses, a) {
			list = append(list, fmt.Sprintf("the devices at %v move to their hosts", a))
		}
	}
	for _, a := range before.Addresses {
		if !slices.Contains(after.Addresses, a) {
			list = append(list, fmt.Sprintf("this host serves the devices that reach it at %v", a))
		}
	}
	return list
}

// leaveEffect tells what happens to the devices of this host if it leaves the fleet.
func (p *participation) leaveEffect() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.table != nil && p.owns() == 0 {
		return "the others take over no device: this host has none"
	}
	return p.settings.leaveEffect()
}

// leaveEffect tells what happens to the devices of a host that has some.
func (s *settings) leaveEffect() string {
	drain := "sockeye host set " + s.host + " drain"
	switch {
	case s.Etcd == nil:
		return "the other hosts send devices to this host until " + s.File + " says otherwise"
	case s.OnHostDeath == config.WaitForHost:
		return "the others take over the devices of this host only after " + drain + "; run it first, and nothing is lost"
	}
	return "the devices of this host move to the others at once; run " + drain + " first, and nothing is lost"
}
