// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"sockeye/internal/bpf/pin"
	"sockeye/internal/fault"
	"sockeye/internal/owned"
)

// Root is the pin directory of an agent in a bpffs.
type Root struct {
	Dir  string
	lock *os.File
}

// ErrLocked is the error for a pin directory that another agent uses.
var ErrLocked error = &fault.Error{Err: errors.New("another agent holds the pin directory"), Code: fault.CodeConflict,
	Hint: "one agent works with a pin directory; see sockeye status"}

const pinSchema = "schema"

// OpenRoot locks the pin directory. It mounts a bpffs on the parent if that is missing or empty, creates dir with
// mode 0700, locks dir and checks its schema version. The error is ErrLocked, a *pin.IncompatibleError for a
// directory of another version, or an *owned.UntrustedError if users other than root can change dir: a bpffs may be
// writable for everybody, and an agent must not adopt the pins of others.
func OpenRoot(dir string) (_ *Root, err error) {
	if err := ensureBPFFS(filepath.Dir(dir)); err != nil {
		return nil, err
	}
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return nil, fmt.Errorf("create pin directory: %w", err)
	}
	lock, err := owned.Open(dir)
	if err != nil {
		return nil, fmt.Errorf("open pin directory: %w", err)
	}
	defer func() {
		if err != nil {
			lock.Close()
		}
	}()
	// A directory that an administrator created may be readable for others.
	if err := lock.Chmod(0o700); err != nil {
		return nil, fmt.Errorf("set mode of pin directory: %w", err)
	}
	if err := lockRoot(lock); err != nil {
		return nil, err
	}
	if err := checkSchema(filepath.Join(dir, pinSchema)); err != nil {
		return nil, err
	}
	return &Root{Dir: dir, lock: lock}, nil
}

// ServicePrefix is the prefix of the pin directory of a service.
const ServicePrefix = "steer_"

// Service returns the pin directory of a service.
func (r *Root) Service(name string) string { return filepath.Join(r.Dir, ServicePrefix+name) }

// TunePins is the prefix of the pin directory of a tuning.
const TunePins = "tune_"

// Tuning returns the pin directory of a cgroup's tuning without its layout.
func (r *Root) Tuning(name string) string { return filepath.Join(r.Dir, TunePins+name) }

// TracePins is the prefix of the pin directory of a tracing.
const TracePins = "trace_"

// Tracing returns the pin directory of a cgroup's tracing without its layout.
func (r *Root) Tracing(name string) string { return filepath.Join(r.Dir, TracePins+name) }

// FleetPins is the name of the pin directory of a fleet without its layout.
const FleetPins = "fleet"

// Services lists the services with pins, unsorted.
func (r *Root) Services() ([]string, error) { return PinnedNames(r.Dir, ServicePrefix) }

// Tunings lists the tunings with pins, unsorted.
func (r *Root) Tunings() ([]string, error) { return PinnedNames(r.Dir, TunePins) }

// Tracings lists the tracings with pins, unsorted.
func (r *Root) Tracings() ([]string, error) { return PinnedNames(r.Dir, TracePins) }

// IsNew reports whether no agent has left pins in the directory.
func (r *Root) IsNew() (bool, error) {
	entries, err := os.ReadDir(r.Dir)
	if err != nil {
		return false, fmt.Errorf("read pin directory: %w", err)
	}
	return !slices.ContainsFunc(entries, func(e os.DirEntry) bool { return e.Name() != pinSchema }), nil
}

// Close unlocks the directory. The pins stay.
func (r *Root) Close() error { return r.lock.Close() }

func ensureBPFFS(dir string) error {
	var fs unix.Statfs_t
	err := unix.Statfs(dir, &fs)
	if err == nil && fs.Type == unix.BPF_FS_MAGIC {
		return nil
	}
	if err := owned.Make(dir, 0o755); err != nil {
		return fmt.Errorf("create mount point of bpffs: %w", err)
	}
	if entries, err := os.ReadDir(dir); err != nil {
		return fmt.Errorf("mount bpffs at %s: %w", dir, err)
	} else if len(entries) > 0 {
		return fmt.Errorf("mount bpffs at %s: the folder is not empty", dir)
	}
	err = unix.Mount("bpffs", dir, "bpf", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0700")
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.ENODEV):
		return fault.Unsupported(fmt.Errorf("mount bpffs at %s: the kernel has none", dir), "Sockeye needs a kernel with CONFIG_BPF_SYSCALL")
	}
	return fault.WithHint(fmt.Errorf("mount bpffs at %s: %w", dir, err), "as root, before the agent starts: mount -t bpf -o mode=0700 bpffs "+dir)
}

func checkSchema(path string) error {
	m, err := ebpf.LoadPinnedMap(path, nil)
	if errors.Is(err, os.ErrNotExist) {
		m, err = ebpf.NewMap(&ebpf.MapSpec{
			Name: "sockeye_schema", Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1,
			Contents: []ebpf.MapKV{{Key: uint32(0), Value: Schema}},
		})
		if err != nil {
			return fmt.Errorf("create schema version: %w", err)
		}
		defer m.Close()
		if err := m.Pin(path); err != nil {
			return fmt.Errorf("pin schema version: %w", err)
		}
		return nil
	}
	if err != nil {
		return &pin.IncompatibleError{Path: path, Err: err}
	}
	defer m.Close()
	var version uint32
	if err := m.Lookup(uint32(0), &version); err != nil {
		return &pin.IncompatibleError{Path: path, Err: err}
	}
	if version != Schema {
		return &pin.IncompatibleError{Path: path, Err: fmt.Errorf("schema version %d, this sockeye reads %d", version, Schema)}
	}
	return nil
}

// RemoveRoot calls before and removes a pin directory of any version with its contents. The error is ErrLocked while
// an agent uses the directory, or an *owned.UntrustedError as in OpenRoot.
func RemoveRoot(dir string, before func() error) error {
	lock, err := owned.Open(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open pin directory: %w", err)
	}
	defer lock.Close()
	if err := lockRoot(lock); err != nil {
		return err
	}
	if err := before(); err != nil {
		return err
	}
	if err := removePins(dir); err != nil {
		return err
	}
	return os.RemoveAll(dir)
}

// lockWait is the time for which lockRoot waits for the lock: the lock of an agent that was killed lasts until the kernel has closed
// the files of the process.
const lockWait = 500 * time.Millisecond

func lockRoot(dir *os.File) error {
	const interval = 10 * time.Millisecond
	for deadline := time.Now().Add(lockWait); ; time.Sleep(interval) {
		err := unix.Flock(int(dir.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		switch {
		case err == nil:
			return nil
		case !errors.Is(err, unix.EWOULDBLOCK):
			return fmt.Errorf("lock %s: %w", dir.Name(), err)
		case time.Now().After(deadline):
			return fmt.Errorf("lock %s: %w", dir.Name(), ErrLocked)
		}
	}
}

// Clear removes what is in the directory: pins, programs and the schema version. The directory stays locked.
func (r *Root) Clear() error {
	if err := removePins(r.Dir); err != nil {
		return err
	}
	if err := os.Remove(filepath.Join(r.Dir, pinSchema)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove schema version: %w", err)
	}
	return nil
}

// removePins removes the pins of all services, tunings and tracings, which detaches their programs.
func removePins(dir string) error {
	for prefix, remove := range map[string]func(string) error{ServicePrefix: Remove, TunePins: RemoveTune, TracePins: RemoveTrace} {
		names, err := PinnedNames(dir, prefix)
		if err != nil {
			return err
		}
		for _, name := range names {
			if err := remove(filepath.Join(dir, prefix+name)); err != nil {
				return err
			}
		}
	}
	return nil
}

// PinnedNames lists the names with pins in a directory by the prefix of their kind, unsorted.
func PinnedNames(dir, prefix string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("read pin directory: %w", err)
	}
	var names []string
	for _, e := range entries {
		name, _, _ := strings.Cut(e.Name(), pin.LayoutMark)
		if name, ok := strings.CutPrefix(name, prefix); ok && e.IsDir() && !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return names, nil
}

// IsBPFFS reports whether dir is in a bpffs.
func IsBPFFS(dir string) bool {
	var fs unix.Statfs_t
	return unix.Statfs(dir, &fs) == nil && fs.Type == unix.BPF_FS_MAGIC
}
