// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"os"
	"path/filepath"
	"runtime"
	"time"

	"github.com/cilium/ebpf"

	"sockeye/internal/bpf/pin"
)

// DeviceMap is a device map in the kernel.
type DeviceMap struct {
	trie  *ebpf.Map // all prefixes
	hosts *ebpf.Map // the prefixes of one address; nil if there are none
}

// NewDeviceMap creates a device map for SetMapping. size is the maximum number of prefixes.
func NewDeviceMap(size int, prefixes iter.Seq2[Prefix, DeviceID]) (_ *DeviceMap, err error) {
	steering, err := loadSteerReuseport()
	if err != nil {
		return nil, err
	}
	d := new(DeviceMap)
	defer func() {
		if err != nil {
			d.Close()
		}
	}()
	create := func(name, outer string, entries int) (*ebpf.Map, error) {
		spec := namedSpec(steering.Maps[outer].InnerMap, name)
		spec.MaxEntries = uint32(entries)
		m, err := ebpf.NewMap(spec)
		if err != nil {
			return nil, fmt.Errorf("create device map of %d prefixes: %w", entries, err)
		}
		return m, nil
	}
	if d.trie, err = create(pinDeviceMap, "device_maps", size); err != nil {
		return nil, err
	}
	hosts := make(map[Address]DeviceID)
	for prefix, id := range prefixes {
		if err := d.trie.Put(&prefix, &id); err != nil {
			return nil, fmt.Errorf("write device map: %w", err)
		}
		if prefix.Prefixlen == hostLength {
			hosts[prefix.Address] = id
		}
	}
	if len(hosts) == 0 {
		return d, nil
	}
	if d.hosts, err = create("device_hosts", "host_maps", len(hosts)); err != nil {
		return nil, err
	}
	for address, id := range hosts {
		if err := d.hosts.Put(&address, &id); err != nil {
			return nil, fmt.Errorf("write device map: %w", err)
		}
	}
	return d, nil
}

// Close closes the descriptors. A device map in force stays.
func (d *DeviceMap) Close() error { return errors.Join(d.trie.Close(), d.hosts.Close()) }

// hostLength is the length of a prefix of one address, in bits.
const hostLength = 128

// SetMapping replaces the bucket table and the device map atomically: every packet is steered by the old ones or by
// the new ones. If devices is nil, the service has no device map. SetMapping calls flipped as soon as the new ones are in
// force: the kernel waits for grace periods of RCU afterwards, each of which takes 10 to 250 ms.
func (s *Steer) SetMapping(t *Table, devices *DeviceMap, flipped func()) error {
	if devices == nil {
		err := s.setTable(t, 0, flipped)
		// The kernel has waited for programs that use the previous table (maybe_wait_bpf_programs).
		if err == nil {
			err = errors.Join(RemoveDeviceMap(s.deviceMaps, s.hostMaps), s.emptyNext())
		}
		return errors.Join(err, s.replacePin(pinDeviceMap, nil))
	}
	again := func() {}
	if s.named == 0 {
		again = flipped
	} else {
		if err := devices.Install(s.nextDevices, s.nextHosts); err != nil {
			return err
		}
		if err := s.setTable(t, nextDevices, flipped); err != nil {
			return err
		}
	}
	if err := devices.Install(s.deviceMaps, s.hostMaps); err != nil {
		return err
	}
	err := s.setTable(t, 1, again)
	if err == nil {
		err = s.emptyNext()
	}
	if err != nil {
		return err
	}
	return s.replacePin(pinDeviceMap, devices.trie)
}

// Install stores the two maps of a device map in maps of maps that are not in force.
func (d *DeviceMap) Install(tries, hosts *ebpf.Map) error {
	if err := tries.Put(uint32(0), d.trie); err != nil {
		return fmt.Errorf("install device map: %w", err)
	}
	if d.hosts == nil {
		return emptyMap(hosts)
	}
	if err := hosts.Put(uint32(0), d.hosts); err != nil {
		return fmt.Errorf("install device map: %w", err)
	}
	return nil
}

func (s *Steer) emptyNext() error { return RemoveDeviceMap(s.nextDevices, s.nextHosts) }

// RemoveDeviceMap removes what Install has stored.
func RemoveDeviceMap(tries, hosts *ebpf.Map) error {
	return errors.Join(emptyMap(tries), emptyMap(hosts))
}

// emptyMap removes the entry of a map of maps.
func emptyMap(m *ebpf.Map) error {
	if err := m.Delete(uint32(0)); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("remove device map: %w", err)
	}
	return nil
}

// SetTable replaces the bucket table atomically, and calls flipped as soon as the new one is in force. The device map
// stays.
func (s *Steer) SetTable(t *Table, flipped func()) error { return s.setTable(t, s.named, flipped) }

func (s *Steer) setTable(t *Table, named uint32, flipped func()) error {
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
	if err := PutTable(s.tables, inner, flipped); err != nil {
		return fmt.Errorf("install bucket table: %w", err)
	}
	s.named = named
	return s.replacePin(pinTable, inner)
}

// PutTable installs a table in a map of maps with one entry, and calls flipped as soon as the table is in force. The kernel replaces the table at
// once, and the system call returns after a grace period of RCU (maybe_wait_bpf_programs), so another goroutine makes the call.
func PutTable(tables, inner *ebpf.Map, flipped func()) error {
	info, err := inner.Info()
	if err != nil {
		return err
	}
	id, known := info.ID()
	put := make(chan struct{})
	begun := time.Now()
	go func() { err = tables.Put(uint32(0), inner); close(put) }()
	defer func() { <-put }() // the caller may close inner, also if flipped does not return
	// The caller closes connections after the flip, so the wait begins without sleep.
	const interval, awake = 100 * time.Microsecond, time.Millisecond
	for {
		var current uint32
		if known && tables.Lookup(uint32(0), &current) == nil && ebpf.MapID(current) == id {
			flipped()
			<-put
			return err
		}
		pause := interval
		if time.Since(begun) < awake {
			pause = 0
			runtime.Gosched()
		}
		select {
		case <-time.After(pause):
		case <-put:
			if err == nil {
				flipped()
			}
			return err
		}
	}
}

// readNamed reads which device map is in force. If an agent was killed during a change, the next change takes two
// steps.
func (s *Steer) readNamed() error {
	table, err := readTable(filepath.Join(s.dir, s.names[pinTable]))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err == nil {
		s.named = table.Named
	}
	return err
}

// ReadNonce returns the nonce in the bucket table of a pinned service, in any layout: a table begins with it. The error
// wraps os.ErrNotExist if there is none.
func ReadNonce(dir string) (uint64, error) {
	path, err := newestOf(dir, pinTable)
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
		return 0, &pin.IncompatibleError{Path: path, Err: cmp.Or(err, errors.New("no nonce"))}
	}
	return binary.NativeEndian.Uint64(value), nil
}

// ReadTable returns the bucket table of a pinned service, without the flag Gated. The error wraps os.ErrNotExist if there
// is none.
func ReadTable(dir string) (*Table, error) {
	path, err := newestOwn(dir, pinTable)
	if err != nil {
		return nil, err
	}
	return readTable(path)
}

func readTable(path string) (*Table, error) {
	m, err := ebpf.LoadPinnedMap(path, &ebpf.LoadPinOptions{ReadOnly: true})
	if err != nil {
		return nil, fmt.Errorf("open pinned map %s: %w", path, err)
	}
	defer m.Close()
	t := new(Table)
	if err := m.Lookup(uint32(0), t); err != nil {
		return nil, &pin.IncompatibleError{Path: path, Err: err}
	}
	for bucket := range t.Bucket {
		t.Bucket[bucket] &^= Gated
	}
	return t, nil
}

// ReadDevices looks up addresses in the device map of a pinned service. An element of the result is nil if no prefix
// matches or there is no device map.
func ReadDevices(dir string, addresses []Address) ([]*DeviceID, error) {
	ids := make([]*DeviceID, len(addresses))
	path, err := newestOwn(dir, pinDeviceMap)
	if errors.Is(err, os.ErrNotExist) {
		return ids, nil
	}
	if err != nil {
		return nil, err
	}
	m, err := ebpf.LoadPinnedMap(path, &ebpf.LoadPinOptions{ReadOnly: true})
	if err != nil {
		return nil, fmt.Errorf("open pinned map %s: %w", path, err)
	}
	defer m.Close()
	for i, address := range addresses {
		var id DeviceID
		err := m.Lookup(&Prefix{Prefixlen: hostLength, Address: address}, &id)
		if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return nil, fmt.Errorf("read pinned map %s: %w", path, err)
		}
		if err == nil && id.Device != NoDevice {
			ids[i] = &id
		}
	}
	return ids, nil
}

func namedSpec(spec *ebpf.MapSpec, name string) *ebpf.MapSpec {
	spec = spec.Copy()
	spec.Name = name
	return spec
}
