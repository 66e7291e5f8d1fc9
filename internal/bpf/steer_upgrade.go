// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"sockeye/internal/bpf/pin"
)

// replacePin replaces the pin of a map, or records it for pinAll. A nil map removes the pin.
func (s *Steer) replacePin(name string, m *ebpf.Map) error {
	if s.unpinned != nil {
		return s.pinLater(name, m)
	}
	return s.pinMap(s.names[name], m)
}

// pinLater records a map that pinAll pins. A nil map removes the pin.
func (s *Steer) pinLater(name string, m *ebpf.Map) error {
	// Cloned: a map that knows its pin would move it.
	clone, err := m.Clone()
	if err != nil {
		return fmt.Errorf("pin map %s: %w", name, err)
	}
	name = s.names[name]
	s.unpinned[name].Close()
	s.unpinned[name] = clone
	return nil
}

// pinAll pins the maps and programs that are not pinned yet. The programs come last: as long as the pins are those of
// the programs of another version, the next OpenSteer creates the maps of the mapping again.
func (s *Steer) pinAll(c SteerConfig) error {
	names := slices.SortedFunc(maps.Keys(s.unpinned), func(a, b string) int {
		if ma, mb := isMapping(a), isMapping(b); ma != mb {
			if ma {
				return 1
			}
			return -1
		}
		return strings.Compare(a, b)
	})
	for _, name := range names {
		if err := s.pinMap(name, s.unpinned[name]); err != nil {
			return err
		}
	}
	for _, m := range s.unpinned {
		m.Close()
	}
	s.unpinned = nil
	for row, p := range s.programs {
		if p.IsPinned() {
			continue // adopted
		}
		name := programPin(s.lookup, row)
		if err := pin.Replace(p.Pin, filepath.Join(s.dir, name)); err != nil {
			return fmt.Errorf("pin program %s: %w", name, err)
		}
	}
	for row, l := range c.Listeners {
		// The row is unused now. Its group keeps the program.
		if !s.lookup && !l.Address.IsValid() {
			if err := pin.Remove(filepath.Join(s.dir, programPin(s.lookup, row))); err != nil {
				return err
			}
		}
	}
	return nil
}

func (s *Steer) pinMap(name string, m *ebpf.Map) error {
	path := filepath.Join(s.dir, name)
	if m == nil {
		return pin.Remove(path)
	}
	if err := pin.Replace(m.Pin, path); err != nil {
		return fmt.Errorf("pin map %s: %w", name, err)
	}
	return nil
}

func isMapping(pinned string) bool {
	name, _, _ := strings.Cut(pinned, pin.LayoutMark)
	return slices.Contains(steerMapping, name)
}

// copyMembers fills new maps of slots and cookies from those of another layout, if the sockets are shared. It returns the
// other layout's map of slots, for closeCopied; nil: the slots are not copied.
func (s *Steer) copyMembers(c SteerConfig) (from *ebpf.Map, err error) {
	if s.created[pinSockets] {
		return nil, nil
	}
	if s.created[pinCookies] {
		for row := range MaxListeners {
			for place := range Place(2 * MaxSlots) {
				cookie, err := s.Cookie(row, place)
				if err == nil && cookie != 0 {
					err = s.cookies.Put(cookie, uint32(place))
				}
				if err != nil {
					return nil, fmt.Errorf("copy map %s: %w", pinCookies, err)
				}
			}
		}
	}
	if !s.created[pinSlots] {
		return nil, nil
	}
	for _, dir := range append(slices.Clone(s.others), s.dir) {
		paths, err := pinsOf(dir, pinSlots)
		if err != nil {
			return nil, err
		}
		for _, path := range paths {
			if from != nil {
				from.Close()
			}
			if from, err = ebpf.LoadPinnedMap(path, nil); err != nil {
				return nil, &pin.IncompatibleError{Path: path, Err: err}
			}
		}
	}
	if from == nil {
		return nil, nil
	}
	for slot := range min(MaxSlots, int(from.MaxEntries())) {
		value, err := readSlot(from, slot)
		if err == nil && value != (Slot{}) {
			err = s.copySlot(c, slot, value)
		}
		if err != nil {
			from.Close()
			return nil, fmt.Errorf("copy map %s: %w", pinSlots, err)
		}
	}
	return from, nil
}

// closeCopied closes copied slots whose sockets were closed meanwhile: the other version's release hook has closed only
// the slots of its own map.
func (s *Steer) closeCopied(c SteerConfig, from *ebpf.Map) error {
	if from == nil {
		return nil
	}
	defer from.Close()
	for slot := range min(MaxSlots, int(from.MaxEntries())) {
		before, err := readSlot(from, slot)
		if err != nil {
			return err
		}
		value, err := s.Slot(slot)
		if err == nil && value.Ready != 0 {
			value.Ready = before.Ready
			err = s.copySlot(c, slot, value)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// slotPrefix is the number of bytes at the beginning of a slot that are the same in all layouts: ready, the process and
// its start time (struct steer_slot).
const slotPrefix = 16

// readSlot reads the slot of a map of any layout.
func readSlot(m *ebpf.Map, slot int) (value Slot, err error) {
	bytes, err := m.LookupBytes(uint32(slot))
	if err == nil && len(bytes) < slotPrefix {
		err = fmt.Errorf("%d bytes", len(bytes))
	}
	if err == nil {
		_, err = binary.Decode(bytes[:slotPrefix], binary.NativeEndian, &value)
	}
	if err != nil {
		return value, fmt.Errorf("read slot %d: %w", slot, err)
	}
	return value, nil
}

// copySlot writes the value of another layout. The slot is not ready if it lacks a socket: its release hook may have
// closed a slot of a map that is not pinned, in an upgrade that was interrupted.
func (s *Steer) copySlot(c SteerConfig, slot int, value Slot) error {
	for row, l := range c.Listeners {
		if !l.Address.IsValid() {
			continue
		}
		cookie, err := s.Cookie(row, PlaceOf(slot, value.Ready))
		if err != nil {
			return err
		}
		if cookie == 0 {
			value.Ready = 0
		}
	}
	return s.SetSlot(slot, value)
}

// removeOthers removes the pins of other layouts. Maps that are shared stay.
func (s *Steer) removeOthers() error {
	for _, other := range s.others {
		if err := errors.Join(s.takeSockets(other), removeSteer(other)); err != nil {
			return err
		}
	}
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		return fmt.Errorf("read pin directory: %w", err)
	}
	for _, e := range entries {
		name, _, _ := strings.Cut(e.Name(), pin.LayoutMark)
		if own, ok := s.names[name]; ok && e.Name() != own {
			if err := pin.Remove(filepath.Join(s.dir, e.Name())); err != nil {
				return err
			}
		}
	}
	return nil
}

// takeSockets removes all sockets from the array of another layout, unless it is shared: a program of a group may keep
// the array.
func (s *Steer) takeSockets(dir string) error {
	m, err := ebpf.LoadPinnedMap(filepath.Join(dir, pinSockets), nil)
	if err != nil {
		return nil // no usable array
	}
	defer m.Close()
	if same, err := sameMap(m, s.sockets); err != nil || same {
		return err
	}
	if s.refusedSince.IsZero() {
		s.refusedSince = time.Now()
	}
	for key := range m.MaxEntries() {
		err := m.Delete(key)
		// The errors for an empty entry, by type of map.
		if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) && !errors.Is(err, unix.EINVAL) {
			return fmt.Errorf("remove sockets from %s: %w", filepath.Base(dir), err)
		}
	}
	return nil
}

// sameMap reports whether two descriptors belong to the same map.
func sameMap(a, b *ebpf.Map) (bool, error) {
	var ids [2]ebpf.MapID
	for i, m := range []*ebpf.Map{a, b} {
		info, err := m.Info()
		if err != nil {
			return false, fmt.Errorf("read map: %w", err)
		}
		ids[i], _ = info.ID()
	}
	return ids[0] == ids[1], nil
}
