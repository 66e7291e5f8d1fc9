// SPDX-License-Identifier: Apache-2.0

package pin

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/cilium/ebpf"
)

// Scope is a record of the caller that is stored with the pins of a cgroup, at most 4096 bytes.
type Scope []byte

const (
	scopePin = "scope"
	maxScope = 4096
)

// SetScope stores a record with the pins in dir.
func SetScope(dir string, s Scope) error {
	if len(s) > maxScope {
		return fmt.Errorf("keep scope: %d bytes, at most %d", len(s), maxScope)
	}
	m, err := OpenMap(dir, &ebpf.MapSpec{Name: scopePin, Type: ebpf.Array, KeySize: 4, ValueSize: maxScope, MaxEntries: 1})
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
	dirs, err := Layouts(base)
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
	path := filepath.Join(dir, scopePin)
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
