// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"structs"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"sockeye/internal/bpf/pin"
	"sockeye/internal/bpf/watched"
)

// Listener is a listener of a service in the form of the programs.
type Listener struct {
	Protocol uint8 // unix.IPPROTO_TCP or unix.IPPROTO_UDP
	Address  netip.AddrPort
	V6Only   bool // with address [::], IPv4 is excluded
}

// Ports is a range of ports that members bind, both ends included.
type Ports struct {
	_           structs.HostLayout
	First, Last uint16
	Protocol    uint8
	_           [3]byte
}

// SteerConfig is the configuration of the data path of one service.
type SteerConfig struct {
	// Dir is the pin directory of the service.
	Dir string
	// Lookup selects sk_lookup instead of sk_reuseport.
	Lookup bool
	// Listeners contains the listeners by row. A zero Listener is an unused row.
	Listeners [MaxListeners]Listener
	// Ports are the ports on which the hooks report members, at most MaxListeners ranges.
	Ports []Ports
	// RoomDatagrams and RoomBytes are the bounds of the waiting room of each slot.
	RoomDatagrams, RoomBytes uint64
	// Devices is the size of the table of seen devices; 0 disables the table.
	Devices int
	// Netns is the network namespace of sk_lookup.
	Netns *os.File
	// Cgroup is the directory of the members' cgroup.
	Cgroup string
	// Ready is called before the programs of this version replace those of another version or are attached for the first
	// time. The new data path has no mapping: Ready installs one.
	Ready func(*Steer) error
}

// Steer is the data path of one service: pinned maps, programs and links, which stay attached without this process.
type Steer struct {
	dir    string
	lookup bool
	names  map[string]string // pins of this layout, by the names of the maps
	others []string          // directories of other layouts

	tables, slots, counters            *ebpf.Map
	deviceMaps, nextDevices            *ebpf.Map
	hostMaps, nextHosts                *ebpf.Map
	devices, pending, sockets, cookies *ebpf.Map
	events, lost, listeners            *ebpf.Map
	admission, unlisted, owners, gates *ebpf.Map
	passes, rooms, waits, stored       *ebpf.Map
	roomPorts, successors              *ebpf.Map
	templateSets, lostTemplates        *ebpf.Map
	refusals, reports                  *ebpf.Map

	// Programs that select sockets: one per row, or one for all rows with sk_lookup.
	programs  map[int]*ebpf.Program
	templates *ebpf.Program // socket filter; see AttachTemplateFilter
	links     []link.Link
	loadCopy  func(row int) (*ebpf.Program, error) // of a row of programs
	watched   watched.Programs
	migrates  bool // see Migrates
	tableFor  *ebpf.MapSpec
	named     uint32 // device map in force (Table.Named)

	created      map[string]bool      // maps that no pin of this layout existed for
	unpinned     map[string]*ebpf.Map // maps for pinAll by the names of their pins; nil removes a pin
	refusedSince time.Time
}

// RefusedSince returns the time since which slots have been refusing because their sockets had to be removed from the
// map of another layout. It is zero if none had to.
func (s *Steer) RefusedSince() time.Time { return s.refusedSince }

// listenerOf is struct steer_listener.
type listenerOf struct {
	_        structs.HostLayout
	Address  [16]byte
	Port     uint16
	Protocol uint8
	Family   uint8
}

func listenerValue(l Listener) listenerOf {
	if !l.Address.IsValid() {
		return listenerOf{}
	}
	v := listenerOf{Port: l.Address.Port(), Protocol: l.Protocol}
	addr := l.Address.Addr()
	switch {
	case !addr.IsUnspecified():
		v.Address = addr.As16()
	case addr.Is4():
		v.Family = unix.AF_INET
	case l.V6Only:
		v.Family = unix.AF_INET6
	}
	return v
}

// UsesLookup reports whether the pinned data path in dir is that of steering by sk_lookup. The error wraps ErrNotExist if
// no map of sockets is pinned.
func UsesLookup(dir string) (bool, error) {
	path, err := pin.Newest(dir, pinSockets)
	if err != nil {
		return false, err
	}
	sockets, err := ebpf.LoadPinnedMap(path, nil)
	if err != nil {
		return false, fmt.Errorf("open pin %s: %w", path, err)
	}
	defer sockets.Close()
	if kind := sockets.Type(); kind != ebpf.SockMap && kind != ebpf.ReusePortSockArray {
		return false, fmt.Errorf("open pin %s: it is a map of type %s", path, kind)
	}
	return sockets.Type() == ebpf.SockMap, nil
}

// ReadListeners returns the listeners of a pinned service by row, in any layout: each begins with the fields of this
// version. The error wraps os.ErrNotExist if dir has no pins.
func ReadListeners(dir string) ([MaxListeners]Listener, error) {
	var listeners [MaxListeners]Listener
	path, err := newestOf(dir, pinListeners)
	if err != nil {
		return listeners, err
	}
	m, err := ebpf.LoadPinnedMap(path, &ebpf.LoadPinOptions{ReadOnly: true})
	if err != nil {
		return listeners, fmt.Errorf("open pinned map %s: %w", path, err)
	}
	defer m.Close()
	for row := range min(len(listeners), int(m.MaxEntries())) {
		var v listenerOf
		value, err := m.LookupBytes(uint32(row))
		if err == nil {
			_, err = binary.Decode(value, binary.NativeEndian, &v)
		}
		if err != nil {
			return listeners, &pin.IncompatibleError{Path: path, Err: err}
		}
		if v.Port == 0 {
			continue
		}
		addr := netip.AddrFrom16(v.Address).Unmap()
		if v.Family == unix.AF_INET {
			addr = netip.IPv4Unspecified()
		}
		listeners[row] = Listener{
			Protocol: v.Protocol,
			Address:  netip.AddrPortFrom(addr, v.Port),
			V6Only:   v.Family == unix.AF_INET6,
		}
	}
	return listeners, nil
}

// DetachLinks detaches the links of a data path whose pins are removed. A reuseport program stays attached until its group
// ends.
func (s *Steer) DetachLinks() error {
	var errs []error
	for _, l := range s.links {
		errs = append(errs, l.Detach())
	}
	return errors.Join(append(errs, s.Close())...)
}

// Close closes the descriptors of this process. Pinned maps, programs and links stay.
func (s *Steer) Close() error {
	var errs []error
	for _, l := range s.links {
		errs = append(errs, l.Close())
	}
	for _, p := range s.programs {
		errs = append(errs, p.Close())
	}
	errs = append(errs, s.watched.Close())
	if s.templates != nil {
		errs = append(errs, s.templates.Close())
	}
	for _, m := range []*ebpf.Map{
		s.tables, s.deviceMaps, s.nextDevices, s.hostMaps, s.nextHosts, s.slots, s.counters, s.devices, s.pending,
		s.sockets, s.cookies, s.events, s.lost, s.listeners, s.admission, s.unlisted, s.owners, s.gates, s.passes,
		s.rooms, s.waits, s.stored, s.roomPorts, s.successors, s.templateSets, s.lostTemplates, s.refusals, s.reports,
	} {
		if m != nil {
			errs = append(errs, m.Close())
		}
	}
	for _, m := range s.unpinned {
		errs = append(errs, m.Close())
	}
	return errors.Join(errs...)
}

// Remove detaches the links of a service and removes its pins, in any layout. A reuseport program stays attached
// until its group ends.
func Remove(dir string) error { return pin.EachLayout(dir, removeSteer) }

// Unpin removes the pins of a service. Programs stay attached until their last reference is closed.
func Unpin(dir string) error { return pin.EachLayout(dir, os.RemoveAll) }

func removeSteer(dir string) error {
	for _, name := range []string{pinLookupLink, pinReleaseLink} {
		l, err := link.LoadPinnedLink(filepath.Join(dir, name), nil)
		if err != nil {
			continue
		}
		// A link that is only unpinned stays attached until its last reference is closed, and a little longer
		// before Linux 5.15.
		err = errors.Join(l.Detach(), l.Unpin())
		l.Close()
		if err != nil {
			return fmt.Errorf("remove %s: %w", name, err)
		}
	}
	return os.RemoveAll(dir)
}

// Place is the place of a member's sockets: the slot, or the slot + MaxSlots for a member that took over from another one. In
// this way one write of the slot replaces the sockets of all listeners.
type Place int

// PlaceOf returns the place of a slot's sockets for a value of Slot.Ready other than 0.
func PlaceOf(slot int, ready uint32) Place {
	if ready == 2 {
		return Place(slot + MaxSlots)
	}
	return Place(slot)
}

// Slot returns the slot of the place.
func (p Place) Slot() int { return int(p) % MaxSlots }

// Ready returns the value of Slot.Ready for the place.
func (p Place) Ready() uint32 { return uint32(1 + int(p)/MaxSlots) }

// Other returns the other place of the slot.
func (p Place) Other() Place { return (p + Place(MaxSlots)) % Place(2*MaxSlots) }

// Insert registers a socket for a listener and a place and replaces the previous socket. The slot receives traffic
// after SetSlot. The error is EBUSY if the socket is registered already, and EINVAL if the socket is not bound, does
// not listen, or was bound before SO_REUSEPORT was set.
func (s *Steer) Insert(row int, place Place, fd int, cookie uint64) error {
	old, err := s.Cookie(row, place)
	if err != nil {
		return err
	}
	// A socket that the map refuses may be registered for another slot.
	var placeBefore uint32
	registered := s.cookies.Lookup(cookie, &placeBefore) == nil
	if err := s.cookies.Put(cookie, uint32(place)); err != nil {
		return fmt.Errorf("note socket %#x: %w", cookie, err)
	}
	m, index := s.socketOf(row, place)
	if err := m.Put(index, uint64(fd)); err != nil {
		if registered {
			return errors.Join(err, s.cookies.Put(cookie, placeBefore))
		}
		return errors.Join(err, s.cookies.Delete(cookie))
	}
	if old == 0 || old == cookie {
		return nil
	}
	if err := s.cookies.Delete(old); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("forget socket %#x: %w", old, err)
	}
	return nil
}

// Delete removes the socket of a listener and a place, if there is one.
func (s *Steer) Delete(row int, place Place) error {
	cookie, err := s.Cookie(row, place)
	if err != nil || cookie == 0 {
		return err
	}
	m, index := s.socketOf(row, place)
	err = m.Delete(index)
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("unregister socket of listener %d, slot %d: %w", row, place.Slot(), err)
	}
	if err := s.cookies.Delete(cookie); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("forget socket %#x: %w", cookie, err)
	}
	return nil
}

// Cookie returns SO_COOKIE of the socket of a listener and a place, or 0.
func (s *Steer) Cookie(row int, place Place) (uint64, error) {
	var cookie uint64
	m, index := s.socketOf(row, place)
	err := m.Lookup(index, &cookie)
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return 0, fmt.Errorf("look up socket of listener %d, slot %d: %w", row, place.Slot(), err)
	}
	return cookie, nil
}

// socketOf returns the map and the index of a socket.
func (s *Steer) socketOf(row int, place Place) (*ebpf.Map, uint32) {
	m := s.sockets
	if place.Ready() == 2 {
		m = s.successors
	}
	return m, uint32(row*MaxSlots + place.Slot())
}

// InsertGate registers the socket of a closed gate for a listener. The gate is open again once the socket is closed.
func (s *Steer) InsertGate(row, fd int) error {
	if err := s.gates.Put(uint32(row), uint64(fd)); err != nil {
		return fmt.Errorf("register gate of listener %d: %w", row, err)
	}
	return nil
}

// Passes returns the number of SYNs that the closed gate of a slot still lets pass.
func (s *Steer) Passes(slot int) (int, error) {
	var left int64
	if err := s.passes.Lookup(uint32(slot), &left); err != nil {
		return 0, fmt.Errorf("read passes of slot %d: %w", slot, err)
	}
	return int(max(left, 0)), nil
}

// SetPasses sets the number of SYNs that the closed gate of a slot lets pass.
func (s *Steer) SetPasses(slot, n int) error {
	if err := s.passes.Put(uint32(slot), int64(n)); err != nil {
		return fmt.Errorf("write passes of slot %d: %w", slot, err)
	}
	return nil
}

// SetSlot sets the member of a slot and its ready flag.
func (s *Steer) SetSlot(slot int, value Slot) error {
	if err := s.slots.Put(uint32(slot), &value); err != nil {
		return fmt.Errorf("write slot %d: %w", slot, err)
	}
	return nil
}

// Slot returns the member of a slot and its ready flag.
func (s *Steer) Slot(slot int) (Slot, error) {
	var value Slot
	if err := s.slots.Lookup(uint32(slot), &value); err != nil {
		return value, fmt.Errorf("read slot %d: %w", slot, err)
	}
	return value, nil
}
