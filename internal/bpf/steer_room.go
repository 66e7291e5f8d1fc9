// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// Migrates reports whether the connections that wait at a closing listener migrate to the member of their device
// (SO_REUSEPORT, Linux 5.14).
func (s *Steer) Migrates() bool { return s.migrates }

// InsertRoom registers the socket of the waiting room of a listener, and replaces the previous one. port is the port of the
// room of a UDP listener with sk_lookup: datagrams to that port of the loopback address go to the member of their device,
// also before its slot is ready. Otherwise port is 0.
func (s *Steer) InsertRoom(row, fd int, port uint16) error {
	if err := s.roomPorts.Put(uint32(row), uint32(port)); err != nil {
		return fmt.Errorf("write port of the waiting room of listener %d: %w", row, err)
	}
	if err := s.rooms.Put(uint32(row), uint64(fd)); err != nil {
		return fmt.Errorf("register waiting room of listener %d: %w", row, err)
	}
	return nil
}

// RemoveRoom removes the socket of the waiting room of a listener, if there is one.
func (s *Steer) RemoveRoom(row int) error {
	if err := s.roomPorts.Put(uint32(row), uint32(0)); err != nil {
		return fmt.Errorf("write port of the waiting room of listener %d: %w", row, err)
	}
	err := s.rooms.Delete(uint32(row))
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("remove waiting room of listener %d: %w", row, err)
	}
	return nil
}

// RoomCookie returns SO_COOKIE of the socket of the waiting room of a listener, or 0.
func (s *Steer) RoomCookie(row int) (uint64, error) {
	var cookie uint64
	if err := s.rooms.Lookup(uint32(row), &cookie); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return 0, fmt.Errorf("look up waiting room of listener %d: %w", row, err)
	}
	return cookie, nil
}

// SetWait sets the waiting room of a slot.
func (s *Steer) SetWait(slot int, w Wait) error {
	if err := s.waits.Put(uint32(slot), &w); err != nil {
		return fmt.Errorf("write waiting room of slot %d: %w", slot, err)
	}
	return nil
}

// Wait returns the waiting room of a slot, and the packets that it has received.
func (s *Steer) Wait(slot int) (w Wait, r Room, err error) {
	err = s.waits.Lookup(uint32(slot), &w)
	if err == nil {
		err = s.stored.Lookup(uint32(slot), &r)
	}
	if err != nil {
		err = fmt.Errorf("read waiting room of slot %d: %w", slot, err)
	}
	return w, r, err
}

// ReadRooms returns the cookies of the sockets of the waiting rooms of a pinned service. The error wraps os.ErrNotExist if
// dir has no pins.
func ReadRooms(dir string) (map[uint64]bool, error) {
	path, err := newestOf(dir, pinRooms)
	if err != nil {
		return nil, err
	}
	m, err := ebpf.LoadPinnedMap(path, &ebpf.LoadPinOptions{ReadOnly: true})
	if err != nil {
		return nil, fmt.Errorf("open pinned map %s: %w", path, err)
	}
	defer m.Close()
	rooms := make(map[uint64]bool)
	for row := range m.MaxEntries() {
		var cookie uint64
		if m.Lookup(row, &cookie) == nil && cookie != 0 {
			rooms[cookie] = true
		}
	}
	return rooms, nil
}
