// SPDX-License-Identifier: Apache-2.0

// Package watched attaches programs to SO_REUSEPORT groups, and notices that another process has replaced or detached one.
//
// The kernel does not tell which program a group has: SO_ATTACH_REUSEPORT_EBPF has no counterpart for getsockopt(2), and any process
// with a socket in the group can replace or detach the program. The package therefore attaches a program that only the group references. The
// program is bound to a map of its own, with one socket, the witness. If the program is replaced or detached, the kernel frees
// it, then its map, and the witness can be added to another map: a socket is in one map of type
// BPF_MAP_TYPE_REUSEPORT_SOCKARRAY at a time (reuseport_array_update_check).
package watched

import (
	"errors"
	"fmt"

	"sockeye/internal/sysctl"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// Programs are the watched programs of a service. The zero value has none. It is not safe for concurrent use.
type Programs struct {
	witnesses map[int]int // sockets by row
	other     *ebpf.Map   // map that has a socket only for an instant
}

// Close closes the descriptors of this process. Programs stay attached.
func (w *Programs) Close() error {
	var errs []error
	for _, fd := range w.witnesses {
		errs = append(errs, unix.Close(fd))
	}
	w.witnesses = nil
	if w.other != nil {
		errs = append(errs, w.other.Close())
	}
	w.other = nil
	return errors.Join(errs...)
}

// Prepare binds a program to a map with a new witness. attached notes, after the program has been attached to the group of a row, and
// before its last descriptor is closed, that the program is watched; abandon closes the witness instead.
func (w *Programs) Prepare(p *ebpf.Program) (attached func(row int), abandon func(), err error) {
	m, err := newWitnessMap()
	if err != nil {
		return nil, nil, err
	}
	defer m.Close()
	witness, err := openWitness()
	if err != nil {
		return nil, nil, fmt.Errorf("open the witness of a program: %w", err)
	}
	if err := m.Put(uint32(0), uint64(witness)); err != nil {
		unix.Close(witness)
		return nil, nil, fmt.Errorf("add the witness of a program: %w", err)
	}
	if err := p.BindMap(m); err != nil {
		unix.Close(witness)
		return nil, nil, fmt.Errorf("bind a map to a program: %w", err)
	}
	return func(row int) {
		w.Forget(row)
		if w.witnesses == nil {
			w.witnesses = make(map[int]int)
		}
		w.witnesses[row] = witness
	}, func() { unix.Close(witness) }, nil
}

// Forget ends the watch of the program of a row.
func (w *Programs) Forget(row int) {
	if fd, ok := w.witnesses[row]; ok {
		unix.Close(fd)
		delete(w.witnesses, row)
	}
}

// Has reports whether the program of a row is watched.
func (w *Programs) Has(row int) bool {
	_, ok := w.witnesses[row]
	return ok
}

// IsAttached reports whether the group of a row still has its program. It reports true for a row without a watched program.
func (w *Programs) IsAttached(row int) (bool, error) {
	witness, ok := w.witnesses[row]
	if !ok {
		return true, nil
	}
	err := w.try(witness)
	if errors.Is(err, unix.EBUSY) {
		return true, nil
	}
	if err != nil {
		return true, fmt.Errorf("find out if a program is attached: %w", err)
	}
	return false, nil
}

// IsInGroup reports whether a socket is in a SO_REUSEPORT group. A map accepts only such sockets (reuseport_array_update_check), and
// a socket of another map is in a group.
func (w *Programs) IsInGroup(fd int) (bool, error) {
	switch err := w.try(fd); {
	case err == nil, errors.Is(err, unix.EBUSY):
		return true, nil
	case errors.Is(err, unix.EINVAL):
		return false, nil
	default:
		return false, fmt.Errorf("find out if a socket is in a group: %w", err)
	}
}

// try adds a socket to a map and removes it again.
func (w *Programs) try(fd int) (err error) {
	if w.other == nil {
		if w.other, err = newWitnessMap(); err != nil {
			return err
		}
	}
	if err := w.other.Put(uint32(0), uint64(fd)); err != nil {
		return err
	}
	return w.other.Delete(uint32(0))
}

func newWitnessMap() (*ebpf.Map, error) {
	m, err := ebpf.NewMap(&ebpf.MapSpec{Name: "witness", Type: ebpf.ReusePortSockArray, KeySize: 4, ValueSize: 8, MaxEntries: 1})
	if err != nil {
		return nil, fmt.Errorf("create map witness: %w", err)
	}
	return m, nil
}

// openWitness opens a socket that a map accepts: a bound one with SO_REUSEPORT. It has a free port of the loopback interface, and
// receives nothing. A group that has a program before bind has the port for itself (udp_lib_lport_inuse).
func openWitness() (fd int, err error) {
	fd, err = unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	drop := unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K}
	filter := unix.SockFprog{Len: 1, Filter: &drop}
	for _, set := range []func() error{
		func() error { return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1) },
		func() error { return unix.SetsockoptInt(fd, unix.SOL_IP, unix.IP_FREEBIND, 1) }, // the interface may be down
		func() error { return unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &filter) },
		func() error {
			return unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_REUSEPORT_CBPF, &filter)
		},
		func() error { return unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}) },
		// The socket stays in its group, and no other socket can have its port.
		func() error { return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 0) },
	} {
		if err := set(); err != nil {
			unix.Close(fd)
			return -1, err
		}
	}
	return fd, nil
}

// CountsRuns reports whether the kernel counts the runs of programs.
func CountsRuns() bool {
	enabled, _ := sysctl.Number("kernel.bpf_stats_enabled")
	return enabled == 1
}
