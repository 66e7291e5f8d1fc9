// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"bytes"
	"fmt"
	"path/filepath"

	"github.com/cilium/ebpf"
)

// Scope is a record that goes with the pins of a cgroup: what they are of. It
// is of the caller's making, at most 4096 bytes.
type Scope []byte

const (
	pinScope = "scope"
	maxScope = 4096
)

// SetScope keeps a record with the pins in dir.
func SetScope(dir string, s Scope) error {
	if len(s) > maxScope {
		return fmt.Errorf("keep scope: %d bytes, at most %d", len(s), maxScope)
	}
	m, err := openMap(dir, &ebpf.MapSpec{Name: pinScope, Type: ebpf.Array, KeySize: 4, ValueSize: maxScope, MaxEntries: 1})
	if err != nil {
		return err
	}
	defer m.Close()
	if err := m.Put(uint32(0), append(bytes.Clone(s), make([]byte, maxScope-len(s))...)); err != nil {
		return fmt.Errorf("keep scope: %w", err)
	}
	return nil
}

// ReadScope reads the record of the pins in dir. It fails with os.ErrNotExist
// if there is none.
func ReadScope(dir string) (Scope, error) {
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
