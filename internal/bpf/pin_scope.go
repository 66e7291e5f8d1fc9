// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/cilium/ebpf"

	"sockeye/internal/bpf/pin"
)

// Scope is a record of the caller that is stored with the pins of a cgroup, at most 4096 bytes.
type Scope []byte

const (
	pinScope = "scope"
	maxScope = 4096
)

// setScope stores a record with the pins in dir.
func setScope(dir string, s Scope) error {
	if len(s) > maxScope {
		return fmt.Errorf("keep scope: %d bytes, at most %d", len(s), maxScope)
	}
	m, err := pin.OpenMap(dir, &ebpf.MapSpec{Name: pinScope, Type: ebpf.Array, KeySize: 4, ValueSize: maxScope, MaxEntries: 1})
	if err != nil {
		return err
	}
	defer m.Close()
	if err := m.Put(uint32(0), append(bytes.Clone(s), make([]byte, maxScope-len(s))...)); err != nil {
		return fmt.Errorf("keep scope: %w", err)
	}
	return nil
}

// ReadScope reads the record of the pins of a cgroup, in the layout of this version or in an earlier one. The error
// wraps os.ErrNotExist if there is none.
func ReadScope(base string) (Scope, error) {
	dirs, err := pin.Layouts(base)
	if err != nil {
		return nil, err
	}
	// A layout with a hash is newer than one without.
	for _, dir := range slices.Backward(dirs) {
		s, err := readScope(dir)
		if !errors.Is(err, os.ErrNotExist) {
			return s, err
		}
	}
	return nil, fmt.Errorf("read scope of %s: %w", filepath.Base(base), os.ErrNotExist)
}

func readScope(dir string) (Scope, error) {
	path := filepath.Join(dir, pinScope)
	m, err := ebpf.LoadPinnedMap(path, nil)
	if err != nil {
		return nil, fmt.Errorf("open pinned map %s: %w", path, err)
	}
	defer m.Close()
	value, err := m.LookupBytes(uint32(0))
	if err != nil {
		return nil, fmt.Errorf("read scope: %w", err)
	}
	return bytes.TrimRight(value, "\x00"), nil
}
