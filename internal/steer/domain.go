// SPDX-License-Identifier: Apache-2.0

// Package steer applies the services of the policy. For each service, the package finds the member processes, registers
// their sockets in slots, and keeps the ports steered while no member runs. No packet passes through this package.
//
// A policy change goes from Domain.Plan (which lists the changes) through Domain.applyChange to service.applyTarget,
// which switches to the new target or back.
package steer

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"

	"sockeye/internal/api"
	"sockeye/internal/bpf"
	"sockeye/internal/bpf/pin"
	"sockeye/internal/config"
	"sockeye/internal/domain"
	"sockeye/internal/events"
	"sockeye/internal/fault"
	"sockeye/internal/member"
	"sockeye/internal/placement"
	"sockeye/internal/rights"
	"sockeye/internal/steer/core"
	"sockeye/internal/steer/keeper"
	"sockeye/internal/sysctl"
)

// Domain implements [domain.Domain] for the services of the policy.
type Domain struct {
	host *core.Host
	log  *slog.Logger

	// changing is held while a command or a policy changes services, so that the services that share slots get the same
	// settings. It is locked before mu and before the lock of a service.
	changing sync.Mutex

	mu       sync.Mutex
	closed   bool // the agent exits
	services map[string]*service
	order    []string // names of the services in the order of the policy
}

var (
	_ domain.Retirer   = (*Domain)(nil)
	_ domain.Explainer = (*Domain)(nil)
)

// New returns the domain without any services.
func New(h *domain.Host) *Domain {
	d := &Domain{host: &core.Host{Host: h, Systemd: keeper.FindManager()}, log: h.Log, services: make(map[string]*service)}
	d.host.Listeners = d.listenersIn
	h.AddPrograms(d.programIDs)
	return d
}

// Check returns an error if a service names a user, a device map, a cgroup or a network namespace that the host does
// not have, or a listener that another agent steers.
func (d *Domain) Check(policy *config.Policy) error {
	if err := member.CheckUsers(policy); err != nil {
		return err
	}
	devices, err := readDeviceMaps(policy)
	if err != nil {
		return err
	}
	for _, c := range policy.Services {
		if _, err := (&service{Service: core.Service{Host: d.host}}).resolveTarget(c, devices[c.Name]); err != nil {
			return core.OfService(c.Name, err)
		}
	}
	return keeper.CheckOthers(d.host.Root.Dir, policy.Services)
}

// Start removes the services of an earlier agent that are not in the policy, and restores or creates the services of
// the policy.
func (d *Domain) Start(policy *config.Policy) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.host.Descriptors.Fill()
	pinned, err := d.host.Root.Services()
	if err != nil {
		return err
	}
	for _, name := range pinned {
		if !slices.ContainsFunc(policy.Services, func(c config.Service) bool { return c.Name == name }) {
			if err := d.removeLeftover(name); err != nil {
				return err
			}
		}
	}
	for _, c := range policy.Services {
		devices, err := core.ReadDevices(c)
		if err != nil {
			return core.OfService(c.Name, err)
		}
		if err := d.addService(c, devices); err != nil {
			return err
		}
	}
	d.order = namesOf(policy)
	return nil
}

// removeLeftover retires a service that is pinned and not in the policy.
func (d *Domain) removeLeftover(name string) error {
	keepers, err := keeper.Find(d.host.Root.Dir, name, nil, keeper.PinnedRows(d.host.Root.Dir))
	if err != nil {
		return err
	}
	for _, k := range keepers {
		for _, socket := range k.Sockets {
			if err := bpf.Detach(socket.FD()); err != nil {
				d.log.Warn("program not detached", "service", name, "error", err)
			}
		}
		if err := k.Kill(); err != nil {
			return err
		}
	}
	d.log.Info("service removed: not in the policy", events.ServiceRemoved, "service", name)
	return bpf.Remove(d.host.Root.Service(name))
}

// serviceChange is the change of one service by a new policy.
type serviceChange struct {
	name    string
	config  *config.Service      // nil if the policy removes the service
	devices *placement.DeviceMap // device map of the new policy
}

// Plan compares the services of a policy with those in force, and checks that the host has what the policy names.
func (d *Domain) Plan(policy *config.Policy) ([]domain.Step, error) {
	if err := member.CheckUsers(policy); err != nil {
		return nil, err
	}
	// The lock is not held: a large device map takes seconds.
	devices, err := readDeviceMaps(policy)
	if err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	var steps []domain.Step
	var changes []serviceChange
	prepare := sync.OnceValues(func() (map[string]*target, error) { return d.resolveTargets(policy, changes) })
	add := func(c serviceChange, what ...api.Change) {
		changes = append(changes, c)
		steps = append(steps, domain.Step{Changes: what, Apply: func() (func() error, error) {
			targets, err := prepare()
			if err != nil {
				return nil, err
			}
			rollback, err := d.applyChange(c, targets[c.name])
			if err != nil {
				closeTargets(targets)
			}
			return rollback, err
		}})
	}
	for _, name := range slices.Sorted(maps.Keys(d.services)) {
		if !slices.ContainsFunc(policy.Services, func(c config.Service) bool { return c.Name == name }) {
			add(serviceChange{name: name}, api.Change{Service: name, Action: "remove", What: "service", Effect: "the kernel's hash decides from then on"})
		}
	}
	for _, c := range policy.Services {
		change := serviceChange{c.Name, &c, devices[c.Name]}
		s := d.services[c.Name]
		if s == nil {
			if _, err := (&service{Service: core.Service{Host: d.host}}).resolveTarget(c, devices[c.Name]); err != nil {
				return nil, core.OfService(c.Name, err)
			}
			add(change, api.Change{Service: c.Name, Action: "add", What: "service"})
			continue
		}
		t, err := s.resolveTarget(c, devices[c.Name])
		if err != nil {
			return nil, core.OfService(c.Name, err)
		}
		if diff := s.plan(t); len(diff) > 0 {
			add(change, diff...)
		}
	}
	return steps, keeper.CheckOthers(d.host.Root.Dir, policy.Services)
}

// readDeviceMaps reads the device maps of a policy, by service. A large map takes seconds, so the caller does not hold
// the lock.
func readDeviceMaps(policy *config.Policy) (map[string]*placement.DeviceMap, error) {
	all := make(map[string]*placement.DeviceMap)
	for _, c := range policy.Services {
		devices, err := core.ReadDevices(c)
		if err != nil {
			return nil, core.OfService(c.Name, err)
		}
		all[c.Name] = devices
	}
	return all, nil
}

// resolveTargets resolves the targets of all changed services before the first change is applied. Building a large
// device map for the kernel takes seconds, and services that share slots (slots_as) must change at nearly the same
// time. resolveTargets also creates the missing nonces of services that others share slots with.
func (d *Domain) resolveTargets(policy *config.Policy, changes []serviceChange) (targets map[string]*target, err error) {
	targets = make(map[string]*target)
	defer func() {
		if err != nil {
			closeTargets(targets)
		}
	}()
	for _, c := range policy.Services {
		if c.SlotsAs == "" {
			continue
		}
		if _, err := d.host.EnsureNonce(c.SlotsAs); err != nil {
			return nil, core.OfService(c.SlotsAs, err)
		}
	}
	for _, c := range changes {
		d.mu.Lock()
		s := d.services[c.name]
		d.mu.Unlock()
		if s == nil || c.config == nil {
			continue
		}
		t, err := s.resolveTarget(*c.config, c.devices)
		if err == nil {
			t.pendingDevices, err = s.prebuildDeviceMap(*c.config, c.devices)
		}
		if err != nil {
			return nil, core.OfService(c.name, err)
		}
		targets[c.name] = t
	}
	return targets, nil
}

// closeTargets closes the device maps of targets that were not applied.
func closeTargets(targets map[string]*target) {
	for _, t := range targets {
		t.pendingDevices.close()
	}
}

// errStopping ends an apply that runs when the agent exits: the services keep the data path that they have.
var errStopping = errors.New("the agent is stopping")

// applyChange applies the change of one service and returns a function that rolls the change back. If applyChange
// fails, the service is unchanged.
func (d *Domain) applyChange(c serviceChange, t *target) (rollback func() error, err error) {
	d.changing.Lock()
	defer d.changing.Unlock()
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil, errStopping
	}
	var undo func() error
	switch s := d.services[c.name]; {
	case c.config == nil:
		before, err := s.retire()
		undo = func() error { return d.addService(before.config, before.mapping.Devices) }
		delete(d.services, c.name)
		if err != nil {
			return nil, core.OfService(c.name, fault.Join(err, undo()))
		}
	case s == nil:
		undo = func() error {
			s := d.services[c.name]
			delete(d.services, c.name)
			_, err := s.retire()
			return err
		}
		if err := d.addService(*c.config, c.devices); err != nil {
			if _, others := errors.AsType[*pin.IncompatibleError](err); !others { // pins that were there before
				err = fault.Join(err, keeper.Retire(d.host.Root.Dir, c.name), bpf.Remove(d.host.Root.Service(c.name)))
			}
			return nil, err
		}
	default:
		before, err := s.applyTarget(t)
		if err != nil {
			return nil, core.OfService(c.name, err)
		}
		undo = func() error {
			_, err := s.applyTarget(before)
			return err
		}
	}
	return func() error {
		d.changing.Lock()
		defer d.changing.Unlock()
		d.mu.Lock()
		defer d.mu.Unlock()
		if d.closed {
			return errStopping
		}
		return undo()
	}, nil
}

func (d *Domain) addService(c config.Service, devices *placement.DeviceMap) error {
	s, err := openService(d.host, d.log, c, devices)
	if err != nil {
		return core.OfService(c.Name, err)
	}
	d.services[c.Name] = s
	return nil
}

// Applied scans for members that no event has reported.
func (d *Domain) Applied(policy *config.Policy, _ api.Candidate, _ *api.Plan) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.order = namesOf(policy)
	for _, s := range d.services {
		s.Mu.Lock()
		s.scanRateLimited()
		s.Mu.Unlock()
	}
	return nil
}

func namesOf(policy *config.Policy) []string {
	names := make([]string, len(policy.Services))
	for i, c := range policy.Services {
		names[i] = c.Name
	}
	return names
}

// Close closes the descriptors of all services. Pinned programs stay attached.
func (d *Domain) Close() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.closed = true
	for _, s := range d.services {
		s.close()
	}
}

// listenersIn returns the listeners of the services in a network namespace.
func (d *Domain) listenersIn(netns uint64) (all []config.Listener) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, s := range d.services {
		s.Mu.Lock()
		if s.NetnsInode == netns {
			all = append(all, s.Config.Listeners...)
		}
		s.Mu.Unlock()
	}
	return all
}

// programIDs returns the ids of the sock_ops programs of the services.
func (d *Domain) programIDs() ([]uint32, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	var ids []uint32
	for _, s := range d.services {
		s.Mu.Lock()
		var of []uint32
		var err error
		if s.CheckOpen() == nil {
			of, err = s.Path.ProgramIDs()
		}
		s.Mu.Unlock()
		if err != nil {
			return nil, err
		}
		ids = append(ids, of...)
	}
	return ids, nil
}

// EachService calls f for each service, in the order of the policy, with the users whose processes may be members, and the network namespace
// of the service: its inode, and a file to enter the namespace with (nil for the agent's own).
func (d *Domain) EachService(f func(c config.Service, users map[uint32]bool, inode uint64, enter *os.File)) {
	services, _ := d.selectServices("") // cannot fail for all services
	for _, s := range services {
		s.Mu.Lock()
		if s.CheckOpen() == nil {
			_, users := s.Processes()
			f(s.Config, users, s.NetnsInode, s.SocketNetns())
		}
		s.Mu.Unlock()
	}
}

// Status adds the state of the services.
func (d *Domain) Status(status *api.Status) error {
	services, err := d.selectServices("")
	if err != nil {
		return err
	}
	status.Services = []api.ServiceStatus{}
	for _, s := range services {
		status.Services = append(status.Services, s.status())
	}
	return nil
}

// selectServices returns the named service, or all services in the order of the policy for "".
func (d *Domain) selectServices(name string) ([]*service, error) {
	if name != "" {
		s, err := d.findService(name)
		return []*service{s}, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	var all []*service
	for _, name := range d.order {
		if s := d.services[name]; s != nil {
			all = append(all, s)
		}
	}
	return all, nil
}

// findService returns the service with a name. The name may be "" if there is only one service.
func (d *Domain) findService(name string) (*service, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if name == "" && len(d.services) == 1 {
		for _, s := range d.services {
			return s, nil
		}
	}
	if s := d.services[name]; s != nil {
		return s, nil
	}
	const first = "sockeye init prints services for the collectors of this host"
	if len(d.services) == 0 && name == "" {
		return nil, fault.Usage(errors.New("the policy has no services"), first)
	}
	if len(d.services) == 0 {
		return nil, fault.Usage(fmt.Errorf("there is no service %q", name), "the policy has no services; "+first)
	}
	known := make([]string, 0, len(d.services))
	for name := range d.services {
		known = append(known, name)
	}
	slices.Sort(known)
	hint := "the policy has " + strings.Join(known, ", ")
	if near := config.Nearest(name, known); near != "" {
		hint = "did you mean " + near + "?"
	}
	if name == "" {
		return nil, fault.Usage(errors.New("no service given"), "name one with --service; "+hint)
	}
	return nil, fault.Usage(fmt.Errorf("there is no service %q", name), hint)
}

// Needs lists the capabilities that the services of a policy need beyond those of the unit.
func (d *Domain) Needs(policy *config.Policy) []rights.Need { return Needs(policy) }

// Needs lists the capabilities that the services of a policy need beyond those of the unit.
func Needs(policy *config.Policy) []rights.Need {
	var needs []rights.Need
	for _, s := range policy.Services {
		if s.Netns != "" {
			needs = append(needs, rights.Need{Right: rights.SysAdmin, For: "netns of service " + s.Name})
		}
		if s.Steering == config.Lookup {
			continue // the sockets of waiting rooms with lookup have ports of their own
		}
		for _, l := range s.Listeners {
			if int(l.Address.Port()) < sysctl.FirstUnprivilegedPort() {
				needs = append(needs, rights.Need{Right: rights.NetBindService, For: fmt.Sprintf("listener %s of service %s, which the agent holds", l, s.Name)})
			}
		}
	}
	return needs
}
