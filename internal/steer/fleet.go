// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"sockeye/internal/api"
	"sockeye/internal/config"
	"sockeye/internal/sockdiag"
	"sockeye/internal/steer/core"
	"sockeye/internal/steer/rooms"
)

// SetFleet says which host serves which device, at which local addresses: see core.Fleet. All connections of devices of other
// hosts are closed, now and later. Without addresses, this host serves all devices.
func (d *Domain) SetFleet(addresses []netip.Addr, host func(device netip.Addr) (name string, bucket int, here bool)) {
	fleet := &core.Fleet{Addresses: addresses, Host: host}
	if len(addresses) == 0 {
		fleet = nil
	}
	d.host.Fleet.Store(fleet)
	d.eachOpen(func(s *service) {
		s.checks.Moved() // at once: the packets of the devices already reach their hosts
		s.checks.Soon()
	})
}

// FindLeaving finds the connections of devices that leave this host when SetFleet is called with the same arguments. closing closes them,
// in their order, and returns a function that logs this.
func (d *Domain) FindLeaving(addresses []netip.Addr, host func(device netip.Addr) (name string, bucket int, here bool)) (connections []sockdiag.Socket, closing func() (log func())) {
	fleet := &core.Fleet{Addresses: addresses, Host: host}
	var all []func() func()
	services, _ := d.selectServices("") // cannot fail for all services
	for _, s := range services {
		found, one := s.checks.FindLeaving(fleet)
		connections, all = append(connections, found...), append(all, one)
	}
	return connections, func() func() {
		var logs []func()
		for _, one := range all {
			logs = append(logs, one())
		}
		return func() {
			for _, one := range logs {
				one()
			}
		}
	}
}

// CanServe returns an error if a selected service has no ready slot.
func (d *Domain) CanServe(selected func(*config.Service) bool) error {
	services, _ := d.selectServices("") // cannot fail for all services
	for _, s := range services {
		s.Mu.Lock()
		ready := !selected(&s.Config) || s.CheckOpen() == nil && slices.ContainsFunc(slices.Collect(maps.Keys(s.Seats)), s.IsReady)
		s.Mu.Unlock()
		if !ready {
			return fmt.Errorf("service %s has no ready slot", s.Name)
		}
	}
	return nil
}

// Where returns the slots of addresses by service.
func (d *Domain) Where(addresses []netip.Addr) (list []api.WhereStatus) {
	services, _ := d.selectServices("") // cannot fail for all services
	for _, s := range services {
		list = append(list, s.where(addresses)...)
	}
	return list
}

// HandOver returns the templates of exporters that leave this host and have a new one since a time, by address, for TakeOver of another host.
func (d *Domain) HandOver(leaves func(netip.Addr) bool, since time.Time) (map[netip.Addr][]byte, error) {
	return rooms.HandOver(d.eachRooms, leaves, since)
}

// CopyTemplates is HandOver for copies of the templates of exporters with an established TCP connection.
func (d *Domain) CopyTemplates(wanted func(netip.Addr) (since time.Time, refreshed, wanted bool), most int) (map[netip.Addr][]byte, error) {
	return rooms.CopyTemplates(d.eachRooms, wanted, most)
}

// eachRooms calls f for the rooms of each service that is open, with its lock.
func (d *Domain) eachRooms(f func(*rooms.Rooms)) { d.eachOpen(func(s *service) { f(s.rooms) }) }

// TakeOver keeps the templates that another host has handed over, and sends them to the members of their exporters; with changed, only those
// that are new.
func (d *Domain) TakeOver(handed map[netip.Addr][]byte, changed bool) {
	all, damaged := rooms.DecodeHanded(handed)
	if damaged > 0 {
		d.log.Warn("templates of another host are damaged", "devices", damaged)
	}
	d.eachOpen(func(s *service) { s.rooms.TakeOver(all, changed) })
}

// IsTakingOver reports whether members still receive templates.
func (d *Domain) IsTakingOver() (is bool) {
	d.eachOpen(func(s *service) { is = is || s.rooms.IsReplaying() })
	return is
}

// eachOpen calls f for each service that is open, with its lock.
func (d *Domain) eachOpen(f func(*service)) {
	services, _ := d.selectServices("") // cannot fail for all services
	for _, s := range services {
		s.Mu.Lock()
		if s.CheckOpen() == nil {
			f(s)
		}
		s.Mu.Unlock()
	}
}
