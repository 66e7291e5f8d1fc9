// SPDX-License-Identifier: Apache-2.0

// Package fleet makes this host one of several hosts that share the devices of their services: each device has one host,
// whichever host the routers choose for its packets.
//
// The subpackages are: table, the assignment of devices to hosts; lead, which computes the next table; store, which keeps the
// registrations of the hosts and the table; follow, which applies the tables of the store on one host; and forward, the data path.
// This package connects them with the policy, the services, the interfaces and the API.
package fleet

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"sync"
	"sync/atomic"
	"time"

	"sockeye/internal/api"
	"sockeye/internal/bpf"
	"sockeye/internal/config"
	"sockeye/internal/domain"
	"sockeye/internal/fault"
	"sockeye/internal/fleet/forward"
	"sockeye/internal/fleet/lead"
	"sockeye/internal/fleet/store"
	"sockeye/internal/placement"
	"sockeye/internal/rights"
	"sockeye/internal/sockdiag"
)

// Services is what the fleet needs of the services of this host.
type Services interface {
	// SetFleet says which host serves which device, at which local addresses. host returns the name, "" for none, the bucket of the
	// device, and whether this host may have its connections; it is nil before the first table. Without addresses, this host serves
	// all.
	SetFleet(addresses []netip.Addr, host func(device netip.Addr) (name string, bucket int, here bool))
	// FindLeaving finds the connections of devices that leave this host when SetFleet is called with the same arguments. closing closes them,
	// in their order, and returns a function that logs this.
	FindLeaving(addresses []netip.Addr, host func(device netip.Addr) (name string, bucket int, here bool)) (connections []sockdiag.Socket, closing func() (log func()))
	// CanServe returns an error if a selected service has no ready slot.
	CanServe(selected func(*config.Service) bool) error
	// Where returns the slots of addresses by service, as GET /v1/where does.
	Where(addresses []netip.Addr) []api.WhereStatus
	// HandOver returns the templates of the exporters that leave this host, and that have a new template since a time, by address, for
	// TakeOver on another host, which sends them to members, with changed those that are new there. IsTakingOver reports whether members still receive them.
	HandOver(leaves func(netip.Addr) bool, since time.Time) (map[netip.Addr][]byte, error)
	TakeOver(handed map[netip.Addr][]byte, changed bool)
	IsTakingOver() bool
	// CopyTemplates returns the templates of exporters with an established TCP connection, as HandOver does: of those that are wanted, and that
	// have a new template since a time, or with refreshed any template that was sent since. It returns at most a number of them.
	CopyTemplates(wanted func(netip.Addr) (since time.Time, refreshed, wanted bool), most int) (map[netip.Addr][]byte, error)
}

// Domain implements [domain.Domain] for the key fleet of the policy.
type Domain struct {
	host     *domain.Host
	log      *slog.Logger
	services Services

	mu     sync.Mutex                    // of changes, which may wait for etcd
	part   atomic.Pointer[participation] // nil without a fleet
	closed bool
	broken atomic.Bool // there is no participation, because a change of the fleet runs or has failed

	ended *participation // by a change of the policy that runs
}

var (
	_ domain.Reverter       = (*Domain)(nil)
	_ domain.HealthReporter = (*Domain)(nil)
)

// New returns a domain without a fleet.
func New(h *domain.Host, services Services) *Domain {
	return &Domain{host: h, log: h.Log, services: services}
}

// Needs returns no capabilities: those of the unit suffice.
func Needs(*config.Policy) []rights.Need { return nil }

// Needs returns no capabilities: those of the unit suffice.
func (d *Domain) Needs(policy *config.Policy) []rights.Need { return Needs(policy) }

// Check returns an error if the device map cannot be used. Interfaces and the files of etcd may appear later.
func (d *Domain) Check(policy *config.Policy) error {
	if policy.Fleet == nil {
		return nil
	}
	_, err := newSettings(policy)
	return err
}

// settings are what the domain makes of a policy.
type settings struct {
	config.Fleet
	host      string               // name of this host
	listeners []forward.Listener   // at the addresses of the fleet
	devices   *placement.DeviceMap // of the services; nil: none
	deviceMap string               // its file
	selects   func(*config.Service) bool
	digests   lead.Digests
}

// equal reports whether two settings have the same effect, apart from the contents of the device map.
func (s *settings) equal(o *settings) bool {
	return reflect.DeepEqual(s.Fleet, o.Fleet) && s.host == o.host && s.digests.Listeners == o.digests.Listeners && s.devices.Equal(o.devices)
}

// sharesTable reports whether the table with one of two settings goes on with the other.
func (s *settings) sharesTable(o *settings) bool {
	return s.Name == o.Name && s.host == o.host && (s.Etcd == nil) == (o.Etcd == nil)
}

// Start continues the fleet of an earlier agent, removes it, or begins one.
func (d *Domain) Start(policy *config.Policy) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if policy.Fleet == nil {
		return d.removeLeftover()
	}
	s, err := newSettings(policy)
	if err != nil {
		return err
	}
	return d.joinAnew(s, false)
}

func (d *Domain) pins() string { return filepath.Join(d.host.Root.Dir, bpf.FleetPins) }

// newSettings resolves a policy with a fleet, and reads the files that it names.
func newSettings(policy *config.Policy) (*settings, error) {
	f := *policy.Fleet
	s := &settings{Fleet: f, host: f.Host, selects: f.Serves}
	if s.host == "" {
		name, err := os.Hostname()
		if err != nil {
			return nil, fmt.Errorf("fleet: %w", err)
		}
		s.host = name
	}
	for i := range policy.Services {
		if c := &policy.Services[i]; f.Serves(c) {
			s.deviceMap = c.DeviceMap
			for _, l := range c.Listeners {
				s.listeners = append(s.listeners, listenersOf(&f, l)...)
			}
		}
	}
	if len(s.listeners) > forward.MostListeners {
		return nil, policy.Flaw("fleet.addresses", fmt.Sprintf("%d listeners at the addresses of the fleet, at most %d are possible", len(s.listeners), forward.MostListeners), "")
	}
	if s.deviceMap != "" {
		var err error
		if s.devices, err = placement.LoadDeviceMap(s.deviceMap); err != nil {
			return nil, fault.In("fleet", err)
		}
	}
	s.setDigests()
	return s, nil
}

// checkStore returns an error if the files of the store cannot be used now: those of etcd, or the file of hosts. An agent starts all the same: they
// may be renewed later.
func (s *settings) checkStore() error {
	if s.Etcd == nil {
		return inFleet(store.CheckFile(s.File, s.host))
	}
	_, err := etcdConfig(&s.Fleet)
	return inFleet(err)
}

// errStopping ends an apply that runs when the agent exits.
var errStopping = errors.New("the agent is stopping")

// change replaces the participation in a fleet. The data path stays if there is one before and after.
func (d *Domain) change(to *settings) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	part := d.part.Load()
	switch {
	case d.closed:
		return errStopping
	case part == nil && to == nil && !d.broken.Load():
		return nil
	case to == nil && part != nil:
		err := d.leaveFleet()
		d.broken.Store(err != nil)
		return inFleet(err)
	case to == nil:
		d.services.SetFleet(nil, nil)
		err := d.removeLeftover()
		d.broken.Store(err != nil)
		return inFleet(err)
	case part == nil:
		err := d.joinAnew(to, !d.broken.Load())
		if err == nil {
			d.broken.Store(false)
		}
		return err
	}
	d.broken.Store(true)
	join, serves, before := d.join, part.serves, part.settings
	defer func() { d.ended = nil }()
	if !before.sharesTable(to) { // the last table is of no use
		if err := d.leaveFleet(); err != nil {
			return fault.In("fleet", err)
		}
		join, serves = d.joinAnew, true
	} else if err := part.end(false); err != nil {
		d.log.Warn("fleet not ended", "error", err)
	}
	d.ended = part
	d.part.Store(nil)
	err := join(to, serves)
	if err != nil {
		err = fault.Join(err, join(before, serves))
	}
	d.broken.Store(d.part.Load() == nil)
	return err
}

func inFleet(err error) error {
	if err == nil {
		return nil
	}
	return fault.In("fleet", err)
}

// joinAnew begins the participation in a fleet of which the services know no table. A host that serves alone goes on serving what
// reaches it until the first table. The caller holds mu.
func (d *Domain) joinAnew(s *settings, serves bool) error {
	if serves {
		return d.join(s, true)
	}
	d.services.SetFleet(s.Addresses, nil)
	err := d.join(s, false)
	if err != nil {
		d.services.SetFleet(nil, nil)
	}
	return err
}

// join begins or continues the participation in a fleet. The caller holds mu.
func (d *Domain) join(s *settings, serves bool) error {
	p, err := d.participate(s, serves)
	if err != nil {
		return fault.In("fleet", err)
	}
	d.part.Store(p)
	return nil
}

// leaveFleet ends the participation, and removes the data path: this host serves all devices whose packets reach it.
func (d *Domain) leaveFleet() error {
	err := d.part.Load().end(true)
	d.part.Store(nil)
	d.services.SetFleet(nil, nil)
	return errors.Join(err, d.removeLeftover())
}

// removeLeftover removes the data path of an earlier agent, and the files of the fleet.
func (d *Domain) removeLeftover() error {
	_, err := forward.Retire()
	if err := errors.Join(forward.Remove(d.pins()), err); err != nil {
		return fault.In("fleet", err)
	}
	for _, name := range []string{tableFile, instanceFile} {
		if err := os.Remove(filepath.Join(d.host.StateDir, name)); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fault.In("fleet", err)
		}
	}
	return nil
}

// Applied does nothing.
func (d *Domain) Applied(*config.Policy, api.Candidate, *api.Plan) error { return nil }

// Close ends the participation. The programs stay attached with the last table, and the registration ends with its lease,
// unless another agent renews it.
func (d *Domain) Close() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.closed = true
	if part := d.part.Load(); part != nil {
		if err := part.end(false); err != nil {
			d.log.Warn("fleet not ended", "error", err)
		}
		d.part.Store(nil)
	}
}

// Retire removes the tunnel and filters, for reset.
func Retire(string) error {
	_, err := forward.Retire()
	return err
}

// Revert removes the tunnel and filters.
func (d *Domain) Revert() ([]string, error) { return forward.Retire() }
