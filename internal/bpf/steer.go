// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"structs"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/ringbuf"
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

// Names of pins besides the maps, which have their own names.
const (
	pinLookupLink  = "link_lookup"
	pinReleaseLink = "link_release"
	pinListeners   = "listeners"
	pinTable       = "table"
	pinDeviceMap   = "device_map"
	pinDevices     = "devices"
)

func programPin(lookup bool, row int) string {
	if lookup {
		return "prog_lookup"
	}
	return fmt.Sprintf("prog_reuseport_%d", row)
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
	path, err := newestPin(dir, pinListeners)
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
			return listeners, &IncompatibleError{Path: path, Err: err}
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
func Remove(dir string) error { return eachLayout(dir, removeSteer) }

// Unpin removes a service's pins. What is attached stays until its last holder is
// gone.
func Unpin(dir string) error { return eachLayout(dir, os.RemoveAll) }

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

// DeviceTrie is a device map as the kernel looks it up, not yet in force.
type DeviceTrie struct{ m *ebpf.Map }

// NewDeviceTrie makes a device map that SetMapping can put in force. size bounds the
// number of prefixes.
func NewDeviceTrie(size int, prefixes iter.Seq2[Prefix, DeviceID]) (_ *DeviceTrie, err error) {
	steering, err := loadSteerReuseport()
	if err != nil {
		return nil, err
	}
	spec := namedSpec(steering.Maps["device_maps"].InnerMap, pinDeviceMap)
	spec.MaxEntries = uint32(size)
	m, err := ebpf.NewMap(spec)
	if err != nil {
		return nil, fmt.Errorf("create device map of %d prefixes: %w", size, err)
	}
	for prefix, id := range prefixes {
		if err := m.Put(&prefix, &id); err != nil {
			m.Close()
			return nil, fmt.Errorf("write device map: %w", err)
		}
	}
	return &DeviceTrie{m}, nil
}

// Close ends this process' hold. What is in force stays.
func (d *DeviceTrie) Close() error { return d.m.Close() }

// SetMapping replaces the bucket table and the device map in one step: every
// packet sees the old ones or the new ones. Without devices there is no device
// map.
func (s *Steer) SetMapping(t *Table, devices *DeviceTrie) error {
	path := filepath.Join(s.dir, pinDeviceMap)
	if devices == nil {
		err := s.setTable(t, 0)
		// The kernel has waited for programs that work with the table before (maybe_wait_bpf_programs).
		if err == nil {
			err = errors.Join(emptyMap(s.deviceMaps), emptyMap(s.nextDevices))
		}
		return errors.Join(err, removePin(path))
	}
	if s.named != 0 {
		if err := s.nextDevices.Put(uint32(0), devices.m); err != nil {
			return fmt.Errorf("install device map: %w", err)
		}
		if err := s.setTable(t, nextDevices); err != nil {
			return err
		}
	}
	if err := s.deviceMaps.Put(uint32(0), devices.m); err != nil {
		return fmt.Errorf("install device map: %w", err)
	}
	err := s.setTable(t, 1)
	if err == nil {
		err = emptyMap(s.nextDevices)
	}
	if err != nil {
		return err
	}
	if err := replacePin(devices.m.Pin, path); err != nil {
		return fmt.Errorf("pin device map: %w", err)
	}
	return nil
}

// emptyMap takes the one entry out of a map of maps.
func emptyMap(m *ebpf.Map) error {
	if err := m.Delete(uint32(0)); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("remove device map: %w", err)
	}
	return nil
}

// SetTable replaces the bucket table in one step; the device map stays.
func (s *Steer) SetTable(t *Table) error { return s.setTable(t, s.named) }

func (s *Steer) setTable(t *Table, named uint32) error {
	table := *t
	table.Named = named
	inner, err := ebpf.NewMap(namedSpec(s.tableFor, pinTable))
	if err != nil {
		return fmt.Errorf("create bucket table: %w", err)
	}
	defer inner.Close()
	if err := inner.Put(uint32(0), &table); err != nil {
		return fmt.Errorf("write bucket table: %w", err)
	}
	if err := s.tables.Put(uint32(0), inner); err != nil {
		return fmt.Errorf("install bucket table: %w", err)
	}
	s.named = named
	if err := replacePin(inner.Pin, filepath.Join(s.dir, pinTable)); err != nil {
		return fmt.Errorf("pin bucket table: %w", err)
	}
	return nil
}

// readNamed finds which device map is in force. Where an agent was killed as it changed
// that, the next change takes two steps.
func (s *Steer) readNamed() error {
	table, err := ReadTable(s.dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err == nil {
		s.named = table.Named
	}
	return err
}

// newestPin finds a pin of a service: in a layout with a hash, which is newer,
// or in the one without. It fails with os.ErrNotExist if there is none.
func newestPin(base, name string) (string, error) {
	dirs, err := layouts(base)
	if err != nil {
		return "", err
	}
	for _, dir := range slices.Backward(dirs) {
		path := filepath.Join(dir, name)
		if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
			return path, err
		}
	}
	return "", fmt.Errorf("open pinned map %s: %w", filepath.Join(base, name), os.ErrNotExist)
}

// ReadNonce returns the nonce of a pinned service's bucket table, in any layout:
// it comes first in each. It fails with os.ErrNotExist if there is none.
func ReadNonce(dir string) (uint64, error) {
	path, err := newestPin(dir, pinTable)
	if err != nil {
		return 0, err
	}
	m, err := ebpf.LoadPinnedMap(path, &ebpf.LoadPinOptions{ReadOnly: true})
	if err != nil {
		return 0, fmt.Errorf("open pinned map %s: %w", path, err)
	}
	defer m.Close()
	value, err := m.LookupBytes(uint32(0))
	if err != nil || len(value) < 8 {
		return 0, &IncompatibleError{Path: path, Err: cmp.Or(err, errors.New("no nonce"))}
	}
	return binary.NativeEndian.Uint64(value), nil
}

// ReadTable returns the bucket table of a pinned service. It fails with
// os.ErrNotExist if there is none.
func ReadTable(dir string) (*Table, error) {
	path, err := newestPin(dir, pinTable)
	if err != nil {
		return nil, err
	}
	m, err := ebpf.LoadPinnedMap(path, &ebpf.LoadPinOptions{ReadOnly: true})
	if err != nil {
		return nil, fmt.Errorf("open pinned map %s: %w", path, err)
	}
	defer m.Close()
	t := new(Table)
	if err := m.Lookup(uint32(0), t); err != nil {
		return nil, &IncompatibleError{Path: path, Err: err}
	}
	return t, nil
}

// ReadDeviceHash looks an address up in the device map of a pinned service.
// Without a device map, or outside it, found is false.
func ReadDeviceHash(dir string, address Address) (hash uint32, found bool, err error) {
	path, err := newestPin(dir, pinDeviceMap)
	if errors.Is(err, os.ErrNotExist) {
		return 0, false, nil
	}
	if err != nil {
		return 0, false, err
	}
	m, err := ebpf.LoadPinnedMap(path, &ebpf.LoadPinOptions{ReadOnly: true})
	if err != nil {
		return 0, false, fmt.Errorf("open pinned map %s: %w", path, err)
	}
	defer m.Close()
	var id DeviceID
	err = m.Lookup(&Prefix{Prefixlen: 128, Address: address}, &id)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return 0, false, nil
	}
	return id.Hash, err == nil && id.Device != NoDevice, err
}

func namedSpec(spec *ebpf.MapSpec, name string) *ebpf.MapSpec {
	spec = spec.Copy()
	spec.Name = name
	return spec
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

// Counters returns the sums over all CPUs, by slot; the last entry counts
// what belongs to no slot.
func (s *Steer) Counters(slots int) ([]Counters, error) {
	sums := make([]Counters, slots+1)
	for i := range sums {
		key := uint32(i)
		if i == slots {
			key = uint32(MaxSlots)
		}
		var perCPU []Counters
		if err := s.counters.Lookup(key, &perCPU); err != nil {
			return nil, fmt.Errorf("read counters of slot %d: %w", i, err)
		}
		for _, c := range perCPU {
			sums[i].Connections += c.Connections
			sums[i].Datagrams += c.Datagrams
			sums[i].Diverted += c.Diverted
			for r := range Reasons {
				sums[i].RefusedConnections[r] += c.RefusedConnections[r]
				sums[i].RefusedDatagrams[r] += c.RefusedDatagrams[r]
			}
		}
	}
	return sums, nil
}

// Devices walks the table of devices seen. Entries that the kernel evicts
// meanwhile may be missing.
func (s *Steer) Devices() iter.Seq2[Address, Seen] {
	return func(yield func(Address, Seen) bool) {
		pending := s.pendingDatagrams()
		var (
			address Address
			seen    Seen
		)
		entries := s.devices.Iterate()
		for entries.Next(&address, &seen) {
			seen.Datagrams += pending[address]
			if !yield(address, seen) {
				return
			}
		}
	}
}

// Unlisted counts the datagrams and SYNs from sources that the table of devices
// had no place for.
func (s *Steer) Unlisted() (sum uint64, err error) {
	var perCPU []uint64
	if err := s.unlisted.Lookup(uint32(0), &perCPU); err != nil {
		return 0, fmt.Errorf("read unlisted packets: %w", err)
	}
	for _, n := range perCPU {
		sum += n
	}
	return sum, nil
}

// pendingDatagrams are those that CPUs have not added to the table yet.
func (s *Steer) pendingDatagrams() map[Address]uint64 {
	sum := make(map[Address]uint64)
	for i := range pendingSize {
		var perCPU []Pending
		if err := s.pending.Lookup(uint32(i), &perCPU); err != nil {
			continue
		}
		for _, p := range perCPU {
			sum[p.Address] += uint64(p.Datagrams)
		}
	}
	return sum
}

// RunStats are the kernel's figures of the steering programs of a service.
type RunStats struct {
	Runs        uint64
	Nanoseconds uint64
}

// RunStats sums over the service's programs. The kernel counts only while
// kernel.bpf_stats_enabled is set.
func (s *Steer) RunStats() (RunStats, error) {
	var sum RunStats
	for row, p := range s.programs {
		stats, err := p.Stats()
		if err != nil {
			return sum, fmt.Errorf("read statistics of %s: %w", programPin(s.lookup, row), err)
		}
		sum.Runs += stats.RunCount
		sum.Nanoseconds += uint64(stats.Runtime)
	}
	return sum, nil
}

// Events reads what the member hooks report.
type Events struct {
	reader *ringbuf.Reader
}

// Events opens the ring. There is one reader at a time.
func (s *Steer) Events() (*Events, error) {
	reader, err := ringbuf.NewReader(s.events)
	if err != nil {
		return nil, fmt.Errorf("open event ring: %w", err)
	}
	return &Events{reader}, nil
}

// Next waits for an event. It fails with os.ErrClosed after Close.
func (e *Events) Next() (Event, error) {
	var record ringbuf.Record
	err := os.ErrDeadlineExceeded
	for errors.Is(err, os.ErrDeadlineExceeded) {
		// Go 1.26 (seen with 1.26.8) at times misses a thread that enters a
		// system call just when it stops the world, for AllThreadsSyscall or
		// the garbage collector, and waits for the call to end.
		e.reader.SetDeadline(time.Now().Add(time.Second))
		record, err = e.reader.Read()
	}
	if err != nil {
		return Event{}, err
	}
	if len(record.RawSample) < 16 {
		return Event{}, fmt.Errorf("read event: %d bytes, want 16", len(record.RawSample))
	}
	return Event{
		Cookie: binary.LittleEndian.Uint64(record.RawSample),
		Kind:   binary.LittleEndian.Uint32(record.RawSample[8:]),
		Pid:    binary.LittleEndian.Uint32(record.RawSample[12:]),
	}, nil
}

// Close ends Next.
func (e *Events) Close() error { return e.reader.Close() }

// LostEvents counts the events that found the ring full since it was made.
func (s *Steer) LostEvents() (uint64, error) {
	var lost uint64
	if err := s.lost.Lookup(uint32(0), &lost); err != nil {
		return 0, fmt.Errorf("read lost events: %w", err)
	}
	return lost, nil
}

// ProgramIDs are the numbers of the programs that links attach.
func (s *Steer) ProgramIDs() ([]uint32, error) {
	var ids []uint32
	for _, l := range s.links {
		info, err := l.Info()
		if err != nil {
			return nil, fmt.Errorf("read link: %w", err)
		}
		ids = append(ids, uint32(info.Program))
	}
	return ids, nil
}
