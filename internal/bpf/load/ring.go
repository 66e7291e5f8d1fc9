// SPDX-License-Identifier: Apache-2.0

package load

import (
	"errors"
	"fmt"
	"os"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// BufferError is the error for an invalid size of a ring buffer, or one that the kernel cannot allocate.
type BufferError struct {
	Size   int    // size in bytes
	Advice string // hint
	Err    error  // error of the kernel; nil if the size is invalid
}

func (e *BufferError) Error() string {
	if e.Err == nil {
		return fmt.Sprintf("make ring buffer of %d bytes: %s", e.Size, e.Advice)
	}
	return fmt.Sprintf("make ring buffer of %d bytes: %v: %s", e.Size, e.Err, e.Advice)
}

func (e *BufferError) Unwrap() error { return e.Err }

// maxRing is the maximum size of a ring buffer: the largest power of two in the 32 bits of max_entries.
const maxRing = 1 << 31

// NewRing creates a ring buffer of a size in bytes: a power of two, at least a page. The error is a *BufferError.
func NewRing(spec *ebpf.MapSpec, size int) (*ebpf.Map, error) {
	page := os.Getpagesize()
	if size < page || size > maxRing || size&(size-1) != 0 {
		near := page
		for near < size && near < maxRing {
			near *= 2
		}
		return nil, &BufferError{Size: size, Advice: fmt.Sprintf("the size is to be a power of two, %d to %d: take %d", page, maxRing, near)}
	}
	spec.MaxEntries = uint32(size)
	ring, err := ebpf.NewMap(spec)
	switch {
	case err == nil:
		return ring, nil
	case errors.Is(err, unix.EPERM) && mapsAllowed():
		var limit unix.Rlimit
		if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &limit); err != nil {
			return nil, fmt.Errorf("read limit of locked memory: %w", err)
		}
		return nil, &BufferError{Size: size, Err: unix.EPERM, Advice: fmt.Sprintf(
			"the limit of locked memory is %d bytes, raise it (ulimit -l, LimitMEMLOCK= of a unit) or take a smaller buffer", limit.Cur)}
	case errors.Is(err, unix.ENOMEM):
		return nil, &BufferError{Size: size, Err: unix.ENOMEM, Advice: "take a smaller buffer, or give the host or this cgroup more memory"}
	}
	return nil, fmt.Errorf("make ring buffer of %d bytes: %w", size, err)
}

// mapsAllowed reports whether this process may create small maps.
func mapsAllowed() bool {
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	if err != nil {
		return false
	}
	m.Close()
	return true
}
