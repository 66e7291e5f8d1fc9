// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"structs"

	"sockeye/internal/bpf/pin"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// Listener is one place where a service listens, as the programs see it.
type Listener struct {
	Protocol uint8 // unix.IPPROTO_TCP or unix.IPPROTO_UDP
	Address  netip.AddrPort
	V6Only   bool // an address [::] leaves IPv4 to others
}

// Ports is a range of ports on which members bind, both ends included.
type Ports struct {
	_           structs.HostLayout
	First, Last uint16
	Protocol    uint8
	_           [3]byte
}

// SteerConfig says what the data path of one service consists of.
type SteerConfig struct {
	// Dir is the service's folder in the bpffs.
	Dir string
	// Lookup chooses sk_lookup instead of sk_reuseport.
	Lookup bool
	// Listeners by row. A zero Listener leaves its row unused.
	Listeners [MaxListeners]Listener
	// Ports are watched for members, at most MaxListeners ranges.
	Ports []Ports
	// Devices is the size of the table of devices seen; 0 turns it off.
	Devices int
	// Netns is the network namespace to which sk_lookup is attached.
	Netns *os.File
	// Cgroup is the folder of the cgroup in which members live.
	Cgroup string
}

// Steer is the data path of one service: its pinned maps, programs and links.
// It goes on without this process.
type Steer struct {
	dir    string
	lookup bool

	tables, slots, counters            *ebpf.Map
	deviceMaps, nextDevices            *ebpf.Map
	devices, pending, sockets, cookies *ebpf.Map
	events, lost, listeners            *ebpf.Map
	admission, unlisted                *ebpf.Map

	// Programs that select sockets: one a row, or one for all with sk_lookup.
	programs map[int]*ebpf.Program
	links    []link.Link
	tableFor *ebpf.MapSpec
	named    uint32 // the device map in force, as Table.Named
}

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

// ReadListeners returns the listeners of the rows of a pinned service. It
// fails with os.ErrNotExist if nothing is pinned in dir.
func ReadListeners(dir string) ([MaxListeners]Listener, error) {
	var listeners [MaxListeners]Listener
	path, err := pin.Newest(dir, pinListeners)
	if err != nil {
		return listeners, err
	}
	m, err := ebpf.LoadPinnedMap(path, &ebpf.LoadPinOptions{ReadOnly: true})
	if err != nil {
		return listeners, fmt.Errorf("open pinned map %s: %w", path, err)
	}
	defer m.Close()
	for row := range listeners {
		var v listenerOf
		if err := m.Lookup(uint32(row), &v); err != nil {
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

// Close releases this process' hold. Pinned maps, programs and links stay.
func (s *Steer) Close() error {
	var errs []error
	for _, l := range s.links {
		errs = append(errs, l.Close())
	}
	for _, p := range s.programs {
		errs = append(errs, p.Close())
	}
	for _, m := range []*ebpf.Map{
		s.tables, s.deviceMaps, s.nextDevices, s.slots, s.counters, s.devices, s.pending,
		s.sockets, s.cookies, s.events, s.lost, s.listeners, s.admission, s.unlisted,
	} {
		if m != nil {
			errs = append(errs, m.Close())
		}
	}
	return errors.Join(errs...)
}

// Retire ends a data path whose pins are gone already: its links are detached.
// Sockets that carry a reuseport program keep it until their group ends.
func (s *Steer) Retire() error {
	var errs []error
	for _, l := range s.links {
		errs = append(errs, l.Detach())
	}
	return errors.Join(append(errs, s.Close())...)
}

// Remove ends steering for a service: its links are detached, its pins gone, in
// any layout. Sockets that carry a reuseport program keep it until their group
// ends.
func Remove(dir string) error { return pin.EachLayout(dir, removeSteer) }

// Unpin removes a service's pins. What is attached stays until its last holder is
// gone.
func Unpin(dir string) error { return pin.EachLayout(dir, os.RemoveAll) }

func removeSteer(dir string) error {
	for _, name := range []string{pinLookupLink, pinReleaseLink} {
		l, err := link.LoadPinnedLink(filepath.Join(dir, name), nil)
		if err != nil {
			continue
		}
		// Detached by itself: a link that is only unpinned lives on until its
		// last holder is gone, and a little longer before Linux 5.15.
		err = errors.Join(l.Detach(), l.Unpin())
		l.Close()
		if err != nil {
			return fmt.Errorf("remove %s: %w", name, err)
		}
	}
	return os.RemoveAll(dir)
}

// Attach makes the program of a row decide for the SO_REUSEPORT group of a
// socket. It fails with EINVAL if the socket is not in a group.
func (s *Steer) Attach(row, fd int) error {
	p := s.programs[row]
	if p == nil {
		return fmt.Errorf("attach to listener %d: no such listener", row)
	}
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ATTACH_REUSEPORT_EBPF, p.FD()); err != nil {
		return fmt.Errorf("attach %s to socket: %w", programPin(s.lookup, row), err)
	}
	return nil
}

// Detach gives the SO_REUSEPORT group of a socket back to the kernel's hash.
func Detach(fd int) error {
	err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DETACH_REUSEPORT_BPF, 0)
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("detach program from socket: %w", err)
	}
	return nil
}

func index(row, slot int) uint32 { return uint32(row*MaxSlots + slot) }

// Insert registers a socket for a listener and a slot, in place of the one that
// is there. The slot is not served before SetSlot says that it is ready. EBUSY:
// the socket is registered already, here or elsewhere; EINVAL: it is not bound,
// does not listen, or was bound before SO_REUSEPORT was set.
func (s *Steer) Insert(row, slot, fd int, cookie uint64) error {
	old, err := s.Cookie(row, slot)
	if err != nil {
		return err
	}
	// A socket that the map refuses may serve another slot.
	var slotBefore uint32
	registered := s.cookies.Lookup(cookie, &slotBefore) == nil
	if err := s.cookies.Put(cookie, uint32(slot)); err != nil {
		return fmt.Errorf("note socket %#x: %w", cookie, err)
	}
	if err := s.sockets.Put(index(row, slot), uint64(fd)); err != nil {
		if registered {
			return errors.Join(err, s.cookies.Put(cookie, slotBefore))
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

// Cookie returns SO_COOKIE of the socket registered for a listener and a
// slot, or 0.
func (s *Steer) Cookie(row, slot int) (uint64, error) {
	var cookie uint64
	err := s.sockets.Lookup(index(row, slot), &cookie)
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return 0, fmt.Errorf("look up socket of listener %d, slot %d: %w", row, slot, err)
	}
	return cookie, nil
}

// Delete unregisters the socket of a listener and a slot, if there is one.
func (s *Steer) Delete(row, slot int) error {
	cookie, err := s.Cookie(row, slot)
	if err != nil || cookie == 0 {
		return err
	}
	err = s.sockets.Delete(index(row, slot))
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("unregister socket of listener %d, slot %d: %w", row, slot, err)
	}
	if err := s.cookies.Delete(cookie); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("forget socket %#x: %w", cookie, err)
	}
	return nil
}

// SetSlot says who is in a slot, and whether it is served.
func (s *Steer) SetSlot(slot int, value Slot) error {
	if err := s.slots.Put(uint32(slot), &value); err != nil {
		return fmt.Errorf("write slot %d: %w", slot, err)
	}
	return nil
}

// Slot returns who is in a slot.
func (s *Steer) Slot(slot int) (Slot, error) {
	var value Slot
	if err := s.slots.Lookup(uint32(slot), &value); err != nil {
		return value, fmt.Errorf("read slot %d: %w", slot, err)
	}
	return value, nil
}
