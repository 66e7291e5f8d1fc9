// SPDX-License-Identifier: Apache-2.0

// Package pin keeps BPF maps and links in a bpffs: it creates and adopts pins, and names directories of pins by the layout
// of their maps, so that two versions of Sockeye never share maps of different types.
package pin

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"sockeye/internal/bpf/load"
	"sockeye/internal/fault"
)

// OpenMap opens the map that is pinned in dir under the name of the spec, or creates and pins it. It returns an
// *IncompatibleError if the pinned map has another type, size or flags.
func OpenMap(dir string, spec *ebpf.MapSpec) (*ebpf.Map, error) {
	return OpenMapAs(dir, spec.Name, spec)
}

// OpenMapAs is OpenMap with another name for the pin.
func OpenMapAs(dir, pin string, spec *ebpf.MapSpec) (*ebpf.Map, error) {
	path := filepath.Join(dir, pin)
	pinned, err := LoadMap(path, spec)
	if !errors.Is(err, os.ErrNotExist) {
		return pinned, err
	}
	fresh, err := ebpf.NewMap(spec)
	if err != nil {
		return nil, fmt.Errorf("create map %s: %w", spec.Name, err)
	}
	if err := fresh.Pin(path); err != nil {
		fresh.Close()
		return nil, fmt.Errorf("pin map %s: %w", spec.Name, err)
	}
	return fresh, nil
}

// IncompatibleError is the error for a pin that cannot be used. Another version or another program has created the pin,
// unless Err wraps EPERM: bpf(2) is not permitted then.
type IncompatibleError struct {
	Path string
	Err  error
	Kind ebpf.MapType // of the pin, if it is a map
}

// LoadMap opens a pinned map. It returns an *IncompatibleError if the map has another type, size or flags than the
// spec, and an error that wraps os.ErrNotExist if there is no pin.
func LoadMap(path string, spec *ebpf.MapSpec) (*ebpf.Map, error) {
	pinned, err := ebpf.LoadPinnedMap(path, nil)
	if errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	if err != nil {
		return nil, &IncompatibleError{Path: path, Err: err}
	}
	if err := spec.Compatible(pinned); err != nil {
		kind := pinned.Type()
		pinned.Close()
		return nil, &IncompatibleError{Path: path, Err: err, Kind: kind}
	}
	return pinned, nil
}

// besideMark ends the name of a pin that Replace has not renamed yet.
const besideMark = "_new"

// IsBeside reports whether a name is that of a pin that Replace has not renamed.
func IsBeside(name string) bool { return strings.HasSuffix(name, besideMark) }

// EnsureLink opens the link that is pinned in dir under a name and updates its program to p if the link is attached to
// target, an open cgroup directory or network namespace. Otherwise EnsureLink attaches p and replaces the pin.
func EnsureLink(dir, name string, p *ebpf.Program, target *os.File, attach func() (link.Link, error)) (link.Link, error) {
	path := filepath.Join(dir, name)
	pinned, err := link.LoadPinnedLink(path, nil)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, &IncompatibleError{Path: path, Err: err}
	}
	if err == nil {
		same, err := AttachedTo(pinned, target)
		if err != nil {
			pinned.Close()
			return nil, &IncompatibleError{Path: path, Err: err}
		}
		if same {
			if err := pinned.Update(p); err != nil {
				pinned.Close()
				return nil, fmt.Errorf("update %s: %w", name, err)
			}
			return pinned, nil
		}
		// The old link is closed, and thereby detached, after the new one is pinned.
		defer pinned.Close()
	}
	fresh, err := attach()
	if err != nil {
		return nil, fmt.Errorf("attach %s: %w", name, err)
	}
	if err := Replace(fresh.Pin, path); err != nil {
		fresh.Close()
		return nil, fmt.Errorf("pin %s: %w", name, err)
	}
	return fresh, nil
}

// Replace replaces the pin at path atomically: pin creates a pin beside it, which is renamed.
func Replace(pin func(string) error, path string) error {
	beside := path + besideMark
	if err := Remove(beside); err != nil {
		return err
	}
	if err := pin(beside); err != nil {
		return err
	}
	return os.Rename(beside, path)
}

// Remove removes a pin. A missing pin is not an error.
func Remove(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove pin: %w", err)
	}
	return nil
}

// TakeLink updates the link that is pinned in the directory from to p, in one step, and moves its pin to the directory to.
// It does nothing if to has such a pin, or if there is no link that is attached to target.
func TakeLink(from, to, name string, p *ebpf.Program, target *os.File) error {
	if _, err := os.Stat(filepath.Join(to, name)); !errors.Is(err, os.ErrNotExist) {
		return err
	}
	pinned, err := link.LoadPinnedLink(filepath.Join(from, name), nil)
	if err != nil {
		return nil // none, or none that can be used
	}
	defer pinned.Close()
	if same, err := AttachedTo(pinned, target); err != nil || !same {
		return nil
	}
	if err := pinned.Update(p); err != nil {
		return fmt.Errorf("update %s: %w", name, err)
	}
	if err := os.Rename(filepath.Join(from, name), filepath.Join(to, name)); err != nil {
		return fmt.Errorf("move %s: %w", name, err)
	}
	return nil
}

// AttachedTo reports whether a link is attached to target, an open cgroup directory or network namespace.
func AttachedTo(l link.Link, target *os.File) (bool, error) {
	var stat unix.Stat_t
	if err := unix.Fstat(int(target.Fd()), &stat); err != nil {
		return false, err
	}
	info, err := l.Info()
	if err != nil {
		return false, err
	}
	if netns := info.NetNs(); netns != nil {
		return uint64(netns.NetnsInode) == stat.Ino, nil
	}
	if cgroup := info.Cgroup(); cgroup != nil {
		return cgroup.CgroupId == stat.Ino, nil
	}
	return false, fmt.Errorf("link of type %v", info.Type)
}

// Share pins a map in dir that is pinned under the same name in one of the other directories. An existing pin in dir
// stays.
func Share(name, dir string, others []string) error {
	path := filepath.Join(dir, name)
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		return err
	}
	for _, other := range others {
		m, err := ebpf.LoadPinnedMap(filepath.Join(other, name), nil)
		if err != nil {
			continue // none, or none that can be used
		}
		// Cloned: a map that knows its pin would move it.
		clone, err := m.Clone()
		m.Close()
		if err != nil {
			return fmt.Errorf("adopt map %s: %w", name, err)
		}
		err = clone.Pin(path)
		clone.Close()
		if err != nil {
			return fmt.Errorf("pin map %s: %w", name, err)
		}
		return nil
	}
	return nil
}

func (e *IncompatibleError) Error() string {
	return fmt.Sprintf("adopt pin %s: %v", e.Path, e.Err)
}

func (e *IncompatibleError) Unwrap() error { return e.Err }

// Explain returns the hint and the exit code of the error.
func (e *IncompatibleError) Explain() (hint string, code int) {
	if errors.Is(e.Err, unix.EPERM) {
		return load.Forbidden().Explain()
	}
	return "sockeye reset removes the pins of another version; steering stops until the agent starts again", fault.CodeConflict
}
