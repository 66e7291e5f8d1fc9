// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/features"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"sockeye/internal/bpf/load"
	"sockeye/internal/bpf/pin"
	"sockeye/internal/bpf/probe"
	"sockeye/internal/netns"
)

// OpenSteer creates the data path of a service, or adopts the pins in c.Dir: maps keep their contents, and programs
// and links are replaced atomically if they differ. OpenSteer attaches sk_lookup to the network namespace and the
// member hooks to the cgroup. Attach attaches a reuseport program to its group.
//
// The data path of another version of Sockeye is replaced without an interruption: maps of the same layout are shared,
// above all those of the members' sockets. The maps of the mapping are always new, because another version may
// interpret them differently; c.Ready fills them. Then the links are updated, and at last the pins are replaced, those
// of the programs after all others: if the process is killed before, the next OpenSteer repeats everything.
//
// If the map of sockets has another layout, its sockets are removed, because a socket can be in one map at a time, and
// must be registered again; until then their slots refuse (RefusedSince).
//
// The error is a *pin.IncompatibleError for a pin that this version cannot use.
func OpenSteer(c SteerConfig) (_ *Steer, err error) {
	base := c.Dir
	layout, err := steerLayout(c.Lookup)
	if err != nil {
		return nil, err
	}
	c.Dir = layout.dir(base)
	others, err := pin.OtherLayouts(base, c.Dir)
	if err != nil {
		return nil, err
	}
	s := &Steer{
		dir: c.Dir, lookup: c.Lookup, names: layout.names, others: others,
		programs: make(map[int]*ebpf.Program), unpinned: make(map[string]*ebpf.Map), created: make(map[string]bool),
	}
	defer func() {
		if err != nil {
			s.Close()
		}
	}()
	if err := os.MkdirAll(c.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("create pin directory: %w", err)
	}
	if err := s.openMaps(c, layout); err != nil {
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
	if err := s.openPrograms(c, layout.steering); err != nil {
		return nil, err
	}
	if err := s.openTemplates(layout.templates); err != nil {
		return nil, err
	}
	copied, err := s.copyMembers(c)
	if err != nil {
		return nil, err
	}
	if s.created[pinSockets] && len(others) > 0 {
		s.refusedSince = time.Now()
	}
	if c.Lookup {
		p := s.programs[0]
		err := s.keepLink(pinLookupLink, p, c.Netns, func() (link.Link, error) {
			return link.AttachNetNs(int(c.Netns.Fd()), p)
		})
		if err != nil {
			return nil, err
		}
	}
	if err := s.openHooks(c, layout.members); err != nil {
		return nil, err
	}
	if err := s.closeCopied(c, copied); err != nil {
		return nil, err
	}
	if err := s.pinAll(c); err != nil {
		return nil, err
	}
	return s, s.removeOthers()
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

// openMaps creates or adopts the maps. A devices map of another size is created again.
func (s *Steer) openMaps(c SteerConfig, l *steerMaps) error {
	devices := l.steering.Maps[pinDevices]
	devices.MaxEntries = uint32(max(c.Devices, 1))
	s.tableFor = l.steering.Maps["tables"].InnerMap
	for _, m := range []struct {
		spec *ebpf.MapSpec
		to   **ebpf.Map
	}{
		{l.steering.Maps["tables"], &s.tables},
		{l.steering.Maps["device_maps"], &s.deviceMaps},
		{l.steering.Maps["next_devices"], &s.nextDevices},
		{l.steering.Maps["host_maps"], &s.hostMaps},
		{l.steering.Maps["next_hosts"], &s.nextHosts},
		{l.steering.Maps[pinSlots], &s.slots},
		{l.steering.Maps["counters"], &s.counters},
		{devices, &s.devices},
		{l.steering.Maps["pending"], &s.pending},
		{l.steering.Maps["admission"], &s.admission},
		{l.steering.Maps["unlisted"], &s.unlisted},
		{l.steering.Maps[pinSockets], &s.sockets},
		{l.members.Maps[pinCookies], &s.cookies},
		{l.members.Maps["events"], &s.events},
		{l.members.Maps["lost_events"], &s.lost},
		{l.listeners, &s.listeners},
		{l.steering.Maps[pinGates], &s.gates},
		{l.steering.Maps[pinPasses], &s.passes},
		{l.steering.Maps[pinRooms], &s.rooms},
		{l.steering.Maps[pinWaits], &s.waits},
		{l.steering.Maps[pinStored], &s.stored},
		{l.steering.Maps["room_ports"], &s.roomPorts},
		{l.steering.Maps[pinSuccessors], &s.successors},
		{l.steering.Maps["refusals"], &s.refusals},
		{l.steering.Maps["reports"], &s.reports},
		{l.owners, &s.owners},
		{l.templates.Maps[pinTemplateSets], &s.templateSets},
		{l.templates.Maps[pinLostTemplates], &s.lostTemplates},
	} {
		if err := s.openMap(m.spec, m.to); err != nil {
			return err
		}
	}
	return nil
}

// openMap adopts a pinned map of the same layout, from another layout's directory if necessary, or creates the map. An
// adopted map of another directory and a new map are pinned by pinAll.
func (s *Steer) openMap(spec *ebpf.MapSpec, to **ebpf.Map) (err error) {
	*to, err = pin.LoadMap(filepath.Join(s.dir, s.names[spec.Name]), spec)
	incompatible, ok := errors.AsType[*pin.IncompatibleError](err)
	switch {
	case ok && spec.Name == pinDevices && incompatible.Kind == spec.Type: // another size
	case !errors.Is(err, os.ErrNotExist):
		return err
	case !slices.Contains(steerMapping, spec.Name):
		for _, other := range slices.Backward(s.others) {
			if m, err := pin.LoadMap(filepath.Join(other, s.names[spec.Name]), spec); err == nil {
				*to = m
				return s.pinLater(spec.Name, m)
			}
		}
	}
	return s.createMap(spec, to)
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
		a.Key[i] = NewNonce()
	}
	if err := s.admission.Put(uint32(0), &a); err != nil {
		return fmt.Errorf("write map admission: %w", err)
	}
	return nil
}

// openPrograms adopts or loads the programs. If the pinned programs are those of another version, or if programs or maps
// of the mapping are missing, openPrograms creates the maps of the mapping, and calls c.Ready.
func (s *Steer) openPrograms(c SteerConfig, spec *ebpf.CollectionSpec) error {
	if err := errors.Join(setDevices(spec, c.Devices), s.setRoom(c, spec)); err != nil {
		return err
	}
	same, err := s.loadPrograms(c, spec)
	if err != nil || same && !slices.ContainsFunc(steerMapping, func(name string) bool { return s.created[name] }) {
		return err
	}
	for _, p := range s.programs {
		p.Close()
	}
	clear(s.programs)
	for name, to := range map[string]**ebpf.Map{
		"tables": &s.tables, "device_maps": &s.deviceMaps, "next_devices": &s.nextDevices, "host_maps": &s.hostMaps, "next_hosts": &s.nextHosts,
	} {
		if err := s.createMap(spec.Maps[name], to); err != nil {
			return err
		}
	}
	s.named = 0
	if _, err := s.loadPrograms(c, spec); err != nil || c.Ready == nil {
		return err
	}
	return c.Ready(s)
}

func (s *Steer) createMap(spec *ebpf.MapSpec, to **ebpf.Map) error {
	m, err := ebpf.NewMap(spec)
	if err != nil {
		return fmt.Errorf("create map %s: %w", spec.Name, err)
	}
	if *to != nil {
		(*to).Close()
	}
	*to, s.created[spec.Name] = m, true
	return s.pinLater(spec.Name, m)
}

// version is the version of a pinned program.
type version int

const (
	noVersion version = iota // no program is pinned
	sameVersion
	otherVersion // other instructions
)

// loadPrograms adopts pinned programs that are the same, and loads the others. It returns whether all pinned programs,
// and at least one, have the instructions of this version.
func (s *Steer) loadPrograms(c SteerConfig, spec *ebpf.CollectionSpec) (same bool, err error) {
	if !c.Lookup {
		return s.loadReuseport(c, spec)
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
		return false, err
	}
	if err := spec.Variables["listener_count"].Set(uint32(count)); err != nil {
		return false, err
	}
	version, err := s.openProgram(spec, "steer_lookup", 0)
	return version == sameVersion, err
}

// setRoom sets the bounds of the waiting rooms, and what the kernel has for them.
func (s *Steer) setRoom(c SteerConfig, spec *ebpf.CollectionSpec) error {
	err := errors.Join(
		spec.Variables["room_datagrams"].Set(c.RoomDatagrams),
		spec.Variables["room_bytes"].Set(c.RoomBytes))
	if c.Lookup {
		return err
	}
	switch probed := probe.HaveMigration(); {
	case errors.Is(probed, ebpf.ErrNotSupported):
	case probed != nil:
		return fmt.Errorf("probe sk_reuseport migration: %w", probed)
	default:
		s.migrates = true
	}
	return errors.Join(err, spec.Variables["room_accepts"].Set(s.migrates))
}

func (s *Steer) loadReuseport(c SteerConfig, spec *ebpf.CollectionSpec) (same bool, err error) {
	name := "steer_reuseport"
	if s.migrates {
		name = "steer_migrate"
	}
	found := make(map[version]bool)
	for row, l := range c.Listeners {
		if !l.Address.IsValid() {
			continue
		}
		spec, err := specOfRow(spec, name, row)
		if err != nil {
			return false, err
		}
		v, err := s.openProgram(spec, name, row)
		if err != nil {
			return false, err
		}
		found[v] = true
	}
	s.loadCopy = func(row int) (*ebpf.Program, error) {
		spec, err := specOfRow(spec, name, row)
		if err != nil {
			return nil, err
		}
		return load.Program(spec, name, s.replacements())
	}
	return found[sameVersion] && !found[otherVersion], nil
}

// specOfRow returns a copy of a spec with one program, that of the listener of a row.
func specOfRow(spec *ebpf.CollectionSpec, name string, row int) (*ebpf.CollectionSpec, error) {
	spec = spec.Copy()
	maps.DeleteFunc(spec.Programs, func(other string, _ *ebpf.ProgramSpec) bool { return other != name })
	return spec, spec.Variables["listener"].Set(uint32(row))
}

// openProgram adopts the pinned program of a row, or loads the named one if another program or none is pinned.
func (s *Steer) openProgram(spec *ebpf.CollectionSpec, name string, row int) (version, error) {
	fresh, err := load.Program(spec, name, s.replacements())
	if err != nil {
		return noVersion, err
	}
	path := filepath.Join(s.dir, programPin(s.lookup, row))
	pinned, err := ebpf.LoadPinnedProgram(path, nil)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		fresh.Close()
		return noVersion, &pin.IncompatibleError{Path: path, Err: err}
	}
	if err != nil {
		s.programs[row] = fresh
		return noVersion, nil
	}
	if load.SameProgram(pinned, fresh) {
		fresh.Close()
		s.programs[row] = pinned
		return sameVersion, nil
	}
	defer pinned.Close()
	s.programs[row] = fresh
	if load.SameInstructions(pinned, fresh) {
		return sameVersion, nil
	}
	return otherVersion, nil
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
	hasTask, err := haveExitStatus()
	if err != nil {
		return err
	}
	if err := spec.Variables["release_has_task"].Set(hasTask); err != nil {
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
	used := map[string]*ebpf.Map{pinCookies: s.cookies, "events": s.events, "lost_events": s.lost}
	for name, m := range s.replacements() {
		if spec.Maps[name] != nil {
			used[name] = m
			// The map was created with this size.
			spec.Maps[name].MaxEntries = m.MaxEntries()
		}
	}
	collection, err := load.Collection(spec, used)
	if err != nil {
		return load.Explain("member hooks", err)
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

func (s *Steer) replacements() map[string]*ebpf.Map {
	return map[string]*ebpf.Map{
		"tables": s.tables, "device_maps": s.deviceMaps, "next_devices": s.nextDevices, "host_maps": s.hostMaps, "next_hosts": s.nextHosts, pinSlots: s.slots,
		"counters": s.counters, pinDevices: s.devices, "pending": s.pending, pinSockets: s.sockets, pinGates: s.gates, pinPasses: s.passes,
		"admission": s.admission, "unlisted": s.unlisted, pinRooms: s.rooms, pinWaits: s.waits, pinStored: s.stored,
		"room_ports": s.roomPorts, pinSuccessors: s.successors, "refusals": s.refusals, "reports": s.reports,
	}
}

// admitGather limits the admission of new devices to the table: half of the table immediately, the whole table within 2
// * admitGather. A flood of forged sources fills half of the table and replaces the rest slowly. Known devices, which
// are looked up in the meantime, remain: the kernel evicts entries that were not looked up.
const admitGather = 1024 * time.Second

func setDevices(spec *ebpf.CollectionSpec, devices int) error {
	every := 2 * admitGather / time.Duration(max(devices, 1))
	return errors.Join(
		spec.Variables["track_devices"].Set(devices > 0),
		spec.Variables["report_every"].Set(uint64(reportEvery)),
		spec.Variables["report_gather"].Set(uint64(reportBurst*reportEvery)),
		spec.Variables["admit_every"].Set(uint64(every)),
		spec.Variables["admit_gather"].Set(uint64(admitGather)))
}

// keepLink is pin.EnsureLink for a link of the service, which another layout may have pinned.
func (s *Steer) keepLink(name string, p *ebpf.Program, target *os.File, attach func() (link.Link, error)) error {
	for _, other := range s.others {
		if err := pin.TakeLink(other, s.dir, name, p, target); err != nil {
			return err
		}
	}
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

// haveExitStatus reports whether sock_release programs can read the exit status of a process.
func haveExitStatus() (bool, error) {
	for _, helper := range []asm.BuiltinFunc{asm.FnGetCurrentTask, asm.FnProbeReadKernel} {
		err := features.HaveProgramHelper(ebpf.CGroupSock, helper)
		if errors.Is(err, ebpf.ErrNotSupported) {
			return false, nil
		}
		if err != nil {
			return false, fmt.Errorf("probe %v of sock_release: %w", helper, err)
		}
	}
	return true, nil
}
