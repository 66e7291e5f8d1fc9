// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/features"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"sockeye/internal/bpf/pin"
	"sockeye/internal/netns"
)

// OpenSteer creates the data path of a service, or adopts the pins in c.Dir: maps keep their contents, and programs
// and links are replaced atomically if they differ. OpenSteer attaches sk_lookup to the network namespace and the
// member hooks to the cgroup. Attach attaches a reuseport program to its group.
//
// Pins of another layout are replaced. Their sockets are removed from the map, because a socket can be in one map at
// a time, and must be registered again; until then their slots refuse. ReadNonce returns the nonce of the replaced
// pins.
//
// The error is a *pin.IncompatibleError for a pin that this version cannot use.
func OpenSteer(c SteerConfig) (_ *Steer, err error) {
	base := c.Dir
	if c.Dir, err = steerDir(base, c.Lookup); err != nil {
		return nil, err
	}
	others, err := pin.OtherLayouts(base, c.Dir)
	if err != nil {
		return nil, err
	}
	s := &Steer{dir: c.Dir, lookup: c.Lookup, programs: make(map[int]*ebpf.Program)}
	defer func() {
		if err != nil {
			s.Close()
		}
	}()
	if err := os.MkdirAll(c.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("create pin directory: %w", err)
	}

	load := loadSteerReuseport
	if c.Lookup {
		load = loadSteerLookup
	}
	steering, err := load()
	if err != nil {
		return nil, err
	}
	members, err := loadSteerMembers()
	if err != nil {
		return nil, err
	}
	staleDevices, err := s.openMaps(c, steering, members)
	if err != nil {
		return nil, err
	}
	if err := s.checkPins(c); err != nil {
		return nil, err
	}
	if err := s.makeKeys(); err != nil {
		return nil, err
	}
	if err := s.readNamed(); err != nil {
		return nil, err
	}
	if err := s.recordListeners(c); err != nil {
		return nil, err
	}
	if err := s.openPrograms(c, steering); err != nil {
		return nil, err
	}
	if err := s.openHooks(c, members); err != nil {
		return nil, err
	}
	if staleDevices {
		if err := pin.Replace(s.devices.Pin, filepath.Join(c.Dir, pinDevices)); err != nil {
			return nil, fmt.Errorf("pin map %s: %w", pinDevices, err)
		}
	}
	for _, other := range others {
		if err := errors.Join(takeSockets(other), removeSteer(other)); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// takeSockets removes all sockets from the array of another layout, because a program of a group may keep the array.
func takeSockets(dir string) error {
	m, err := ebpf.LoadPinnedMap(filepath.Join(dir, pinSockets), nil)
	if err != nil {
		return nil // no usable array
	}
	defer m.Close()
	for key := range m.MaxEntries() {
		err := m.Delete(key)
		// The errors for an empty entry, by type of map.
		if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) && !errors.Is(err, unix.EINVAL) {
			return fmt.Errorf("remove sockets from %s: %w", filepath.Base(dir), err)
		}
	}
	return nil
}

func listenersSpec() (*ebpf.MapSpec, error) {
	lookup, err := loadSteerLookup()
	if err != nil {
		return nil, err
	}
	var listener *btf.Struct
	if err := lookup.Types.TypeByName("steer_listener", &listener); err != nil {
		return nil, err
	}
	return &ebpf.MapSpec{
		Name: pinListeners, Type: ebpf.Array, KeySize: 4,
		ValueSize: listener.Size, MaxEntries: uint32(MaxListeners),
		Key: &btf.Int{Name: "unsigned int", Size: 4}, Value: listener,
	}, nil
}

// openMaps creates or adopts the maps. A devices map of another size is created again, and pinned when the programs
// use it.
func (s *Steer) openMaps(c SteerConfig, steering, members *ebpf.CollectionSpec) (staleDevices bool, err error) {
	steering.Maps[pinDevices].MaxEntries = uint32(max(c.Devices, 1))
	s.tableFor = steering.Maps["tables"].InnerMap
	listeners, err := listenersSpec()
	if err != nil {
		return false, err
	}
	for _, m := range []struct {
		spec *ebpf.MapSpec
		to   **ebpf.Map
	}{
		{steering.Maps["tables"], &s.tables},
		{steering.Maps["device_maps"], &s.deviceMaps},
		{steering.Maps["next_devices"], &s.nextDevices},
		{steering.Maps["slots"], &s.slots},
		{steering.Maps["counters"], &s.counters},
		{steering.Maps[pinDevices], &s.devices},
		{steering.Maps["pending"], &s.pending},
		{steering.Maps["admission"], &s.admission},
		{steering.Maps["unlisted"], &s.unlisted},
		{steering.Maps[pinSockets], &s.sockets},
		{members.Maps["cookies"], &s.cookies},
		{members.Maps["events"], &s.events},
		{members.Maps["lost_events"], &s.lost},
		{listeners, &s.listeners},
	} {
		pinned, err := pin.OpenMap(c.Dir, m.spec)
		var incompatible *pin.IncompatibleError
		if errors.As(err, &incompatible) && m.spec.Name == pinDevices && incompatible.Kind == m.spec.Type {
			staleDevices = true
			if pinned, err = ebpf.NewMap(m.spec); err != nil {
				return false, fmt.Errorf("create map %s: %w", m.spec.Name, err)
			}
		}
		if err != nil {
			return false, err
		}
		*m.to = pinned
	}
	return staleDevices, nil
}

// checkPins checks the pinned programs and links before any is replaced, so that a failure leaves the service
// unchanged.
func (s *Steer) checkPins(c SteerConfig) error {
	check := func(name string, load func(path string) (io.Closer, error)) error {
		path := filepath.Join(s.dir, name)
		pinned, err := load(path)
		if errors.Is(err, os.ErrNotExist) {
			return nil
		}
		if err != nil {
			return &pin.IncompatibleError{Path: path, Err: err}
		}
		return pinned.Close()
	}
	for row := range c.Listeners {
		err := check(programPin(s.lookup, row), func(path string) (io.Closer, error) {
			return ebpf.LoadPinnedProgram(path, nil)
		})
		if err != nil {
			return err
		}
	}
	for _, name := range []string{pinLookupLink, pinReleaseLink} {
		err := check(name, func(path string) (io.Closer, error) {
			return link.LoadPinnedLink(path, nil)
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// recordListeners writes the listeners by row, for the next agent and bpftool.
func (s *Steer) recordListeners(c SteerConfig) error {
	for row, l := range c.Listeners {
		if err := s.listeners.Put(uint32(row), listenerValue(l)); err != nil {
			return fmt.Errorf("write row %d of map %s: %w", row, pinListeners, err)
		}
	}
	return nil
}

// makeKeys initializes the secret keys of the hash of pending counts.
func (s *Steer) makeKeys() error {
	var a steerReuseportSteerAdmission
	if err := s.admission.Lookup(uint32(0), &a); err != nil {
		return fmt.Errorf("read map admission: %w", err)
	}
	if a.Key != [4]uint64{} {
		return nil
	}
	for i := range a.Key {
		a.Key[i] = newNonce()
	}
	if err := s.admission.Put(uint32(0), &a); err != nil {
		return fmt.Errorf("write map admission: %w", err)
	}
	return nil
}

func (s *Steer) replacements() map[string]*ebpf.Map {
	return map[string]*ebpf.Map{
		"tables": s.tables, "device_maps": s.deviceMaps, "next_devices": s.nextDevices, "slots": s.slots,
		"counters": s.counters, pinDevices: s.devices, "pending": s.pending, pinSockets: s.sockets,
		"admission": s.admission, "unlisted": s.unlisted,
	}
}

func (s *Steer) openPrograms(c SteerConfig, spec *ebpf.CollectionSpec) error {
	if err := setDevices(spec, c.Devices); err != nil {
		return err
	}
	if !c.Lookup {
		return s.openReuseport(c, spec)
	}

	var listeners [MaxListeners]listenerOf
	count := 0
	for row, l := range c.Listeners {
		listeners[row] = listenerValue(l)
		if l.Address.IsValid() {
			count = row + 1
		}
	}
	if err := spec.Variables["listeners"].Set(listeners); err != nil {
		return err
	}
	if err := spec.Variables["listener_count"].Set(uint32(count)); err != nil {
		return err
	}
	p, err := s.openProgram(spec, "steer_lookup", 0)
	if err != nil {
		return err
	}
	return s.keepLink(pinLookupLink, p, c.Netns, func() (link.Link, error) {
		return link.AttachNetNs(int(c.Netns.Fd()), p)
	})
}

// admitGather limits the admission of new devices to the table: half of the table immediately, the whole table within 2
// * admitGather. A flood of forged sources fills half of the table and replaces the rest slowly. Known devices, which
// are looked up in the meantime, remain: the kernel evicts entries that were not looked up.
const admitGather = 1024 * time.Second

func setDevices(spec *ebpf.CollectionSpec, devices int) error {
	every := 2 * admitGather / time.Duration(max(devices, 1))
	return errors.Join(
		spec.Variables["track_devices"].Set(devices > 0),
		spec.Variables["admit_every"].Set(uint64(every)),
		spec.Variables["admit_gather"].Set(uint64(admitGather)))
}

func (s *Steer) openReuseport(c SteerConfig, spec *ebpf.CollectionSpec) error {
	name := "steer_migrate"
	switch err := probeMigration(); {
	case errors.Is(err, ebpf.ErrNotSupported):
		name = "steer_reuseport"
	case err != nil:
		return fmt.Errorf("probe sk_reuseport migration: %w", err)
	}
	for row, l := range c.Listeners {
		if !l.Address.IsValid() {
			// The row is unused now. Its group keeps the program.
			if err := pin.Remove(filepath.Join(s.dir, programPin(s.lookup, row))); err != nil {
				return err
			}
			continue
		}
		spec := spec.Copy()
		if err := spec.Variables["listener"].Set(uint32(row)); err != nil {
			return err
		}
		if _, err := s.openProgram(spec, name, row); err != nil {
			return err
		}
	}
	return nil
}

// openProgram loads and pins the named program, unless the same program is pinned.
func (s *Steer) openProgram(spec *ebpf.CollectionSpec, name string, row int) (*ebpf.Program, error) {
	spec = spec.Copy()
	for other := range spec.Programs {
		if other != name {
			delete(spec.Programs, other)
		}
	}
	fresh, err := loadProgram(spec, name, s.replacements())
	if err != nil {
		return nil, err
	}
	path := filepath.Join(s.dir, programPin(s.lookup, row))
	pinned, err := ebpf.LoadPinnedProgram(path, nil)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		fresh.Close()
		return nil, &pin.IncompatibleError{Path: path, Err: err}
	}
	if err == nil && sameProgram(pinned, fresh) {
		fresh.Close()
		s.programs[row] = pinned
		return pinned, nil
	}
	if err == nil {
		pinned.Close()
	}
	s.programs[row] = fresh
	if err := pin.Replace(fresh.Pin, path); err != nil {
		return nil, fmt.Errorf("pin program %s: %w", name, err)
	}
	return fresh, nil
}

// keepLink is pin.EnsureLink for a link of the service.
func (s *Steer) keepLink(name string, p *ebpf.Program, target *os.File, attach func() (link.Link, error)) error {
	l, err := pin.EnsureLink(s.dir, name, p, target, attach)
	if err == nil {
		s.links = append(s.links, l)
	}
	return err
}

// netnsCookie returns the cookie of a network namespace, or 0 if it is unknown: before Linux 5.14, without a
// namespace, or without CAP_SYS_ADMIN, which only other namespaces need.
func netnsCookie(namespace *os.File) (uint64, error) {
	if namespace == nil {
		return 0, nil
	}
	cookie, err := netns.Cookie(namespace)
	var enter *netns.EnterError
	if errors.As(err, &enter) && errors.Is(err, unix.EPERM) || errors.Is(err, unix.ENOPROTOOPT) {
		return 0, nil
	}
	return cookie, err
}

// openHooks attaches the member hooks. Only the release hook is pinned: it closes slots without an agent. The other
// hooks report to the agent only.
func (s *Steer) openHooks(c SteerConfig, spec *ebpf.CollectionSpec) error {
	var ports [MaxListeners]Ports
	if copy(ports[:], c.Ports) < len(c.Ports) {
		return fmt.Errorf("watch %d port ranges, at most %d", len(c.Ports), MaxListeners)
	}
	if err := spec.Variables["ports"].Set(ports); err != nil {
		return err
	}
	if err := spec.Variables["port_count"].Set(uint32(len(c.Ports))); err != nil {
		return err
	}
	cookie, err := netnsCookie(c.Netns)
	if err != nil {
		return err
	}
	if err := spec.Variables["netns_cookie"].Set(cookie); err != nil {
		return err
	}
	known := features.HaveProgramHelper(ebpf.SockOps, asm.FnGetNetnsCookie)
	if known != nil && !errors.Is(known, ebpf.ErrNotSupported) {
		return fmt.Errorf("probe bpf_get_netns_cookie of sockops: %w", known)
	}
	if err := spec.Variables["listen_has_netns"].Set(known == nil); err != nil {
		return err
	}
	var served [MaxListeners]Ports
	count := uint32(0)
	for _, l := range c.Listeners {
		if l.Address.IsValid() {
			served[count] = Ports{First: l.Address.Port(), Last: l.Address.Port(), Protocol: l.Protocol}
			count++
		}
	}
	if err := errors.Join(spec.Variables["served"].Set(served), spec.Variables["served_count"].Set(count), setDevices(spec, c.Devices)); err != nil {
		return err
	}
	used := map[string]*ebpf.Map{"cookies": s.cookies, "events": s.events, "lost_events": s.lost}
	for name, m := range s.replacements() {
		if spec.Maps[name] != nil {
			used[name] = m
			// The map was created with this size.
			spec.Maps[name].MaxEntries = m.MaxEntries()
		}
	}
	collection, err := loadCollection(spec, used)
	if err != nil {
		return loadError("member hooks", err)
	}
	defer collection.Close()
	attach := func(name string, at ebpf.AttachType) (link.Link, error) {
		return link.AttachCgroup(link.CgroupOptions{
			Path: c.Cgroup, Attach: at, Program: collection.Programs[name],
		})
	}
	for name, at := range map[string]ebpf.AttachType{
		"steer_bind4":  ebpf.AttachCGroupInet4PostBind,
		"steer_bind6":  ebpf.AttachCGroupInet6PostBind,
		"steer_listen": ebpf.AttachCGroupSockOps,
	} {
		l, err := attach(name, at)
		if err != nil {
			return fmt.Errorf("attach %s to cgroup %s: %w", name, c.Cgroup, err)
		}
		s.links = append(s.links, l)
	}
	cgroup, err := os.Open(c.Cgroup)
	if err != nil {
		return fmt.Errorf("open cgroup: %w", err)
	}
	defer cgroup.Close()
	return s.keepLink(pinReleaseLink, collection.Programs["steer_release"], cgroup, func() (link.Link, error) {
		return attach("steer_release", ebpf.AttachCgroupInetSockRelease)
	})
}
