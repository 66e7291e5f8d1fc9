// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"encoding/binary"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"golang.org/x/sys/unix"
)

// pinOwners is the pin of the map of owners: a map of sk_storage, which no program uses. A connection inherits the value
// of the listening socket that accepted the connection (BPF_F_CLONE, bpf_sk_storage_clone), and sock_diag returns the
// value. So one dump of sock_diag shows the member of every connection, without a scan of /proc.
const pinOwners = "owners"

// Owner identifies the process that has a connection.
type Owner struct {
	PID       int
	StartTime uint64 // clock ticks since boot, as in /proc/PID/stat
	// Steered is set if a registered listening socket accepted the connection. Otherwise the agent found the connection
	// at the process.
	Steered bool
	// Filtered is set for a UDP socket with the filter of AttachTemplateFilter.
	Filtered bool
}

const sizeofOwner = 16

const steeredFlag, filteredFlag = 1, 2

func ownersSpec() *ebpf.MapSpec {
	u32, u64 := &btf.Int{Name: "unsigned int", Size: 4}, &btf.Int{Name: "unsigned long long", Size: 8}
	return &ebpf.MapSpec{
		Name: pinOwners, Type: ebpf.SkStorage, KeySize: 4, ValueSize: sizeofOwner,
		Flags: unix.BPF_F_NO_PREALLOC | unix.BPF_F_CLONE,
		Key:   &btf.Int{Name: "int", Size: 4, Encoding: btf.Signed},
		Value: &btf.Struct{Name: "steer_owner", Size: sizeofOwner, Members: []btf.Member{
			{Name: "start_time", Type: u64, Offset: 0},
			{Name: "pid", Type: u32, Offset: 64},
			{Name: "steered", Type: u32, Offset: 96},
		}},
	}
}

// SetOwner records the owner of a socket. Connections that a listening socket accepts later have the same owner.
func (s *Steer) SetOwner(fd int, o Owner) error {
	value := make([]byte, sizeofOwner)
	binary.NativeEndian.PutUint64(value, o.StartTime)
	binary.NativeEndian.PutUint32(value[8:], uint32(o.PID))
	if o.Steered {
		value[12] |= steeredFlag
	}
	if o.Filtered {
		value[12] |= filteredFlag
	}
	if err := s.owners.Put(uint32(fd), value); err != nil {
		return fmt.Errorf("record the owner of a socket: %w", err)
	}
	return nil
}

// Owner returns the owner of a socket. ok is false if none is recorded.
func (s *Steer) Owner(fd int) (o Owner, ok bool) { return lookupOwner(s.owners, fd) }

// PinnedOwners are the owners of the sockets of a pinned service.
type PinnedOwners struct{ owners *ebpf.Map }

// OpenOwners opens the owners of the sockets of the service that is pinned in a directory. The error wraps os.ErrNotExist if it has no pins.
func OpenOwners(dir string) (*PinnedOwners, error) {
	path, err := newestOf(dir, pinOwners)
	if err != nil {
		return nil, err
	}
	m, err := ebpf.LoadPinnedMap(path, &ebpf.LoadPinOptions{ReadOnly: true})
	if err != nil {
		return nil, fmt.Errorf("open pinned map %s: %w", path, err)
	}
	return &PinnedOwners{m}, nil
}

// Owner returns the owner of a socket. ok is false if none is recorded.
func (p *PinnedOwners) Owner(fd int) (o Owner, ok bool) { return lookupOwner(p.owners, fd) }

func lookupOwner(owners *ebpf.Map, fd int) (o Owner, ok bool) {
	value, err := owners.LookupBytes(uint32(fd))
	if err != nil {
		return o, false
	}
	return ParseOwner(value)
}

// Close closes the map.
func (p *PinnedOwners) Close() { p.owners.Close() }

// OwnersFD returns the descriptor of the map of owners, for sockdiag.Query.Storage.
func (s *Steer) OwnersFD() int { return s.owners.FD() }

// ParseOwner decodes sockdiag.Socket.Storage. ok is false for a connection without an owner.
func ParseOwner(value []byte) (o Owner, ok bool) {
	if len(value) < sizeofOwner {
		return o, false
	}
	return Owner{
		PID:       int(binary.NativeEndian.Uint32(value[8:])),
		StartTime: binary.NativeEndian.Uint64(value),
		Steered:   value[12]&steeredFlag != 0,
		Filtered:  value[12]&filteredFlag != 0,
	}, true
}
