// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"sockeye/internal/bpf/pin"
	"sockeye/internal/bpf/probe"
)

// TuneConfig is the configuration of the tuning of one cgroup.
type TuneConfig struct {
	// Dir is the pin directory without its layout.
	Dir string
	// Cgroup is the directory of the tuned cgroup.
	Cgroup string
	// Ready prepares the maps, unless nil: no program of this layout runs before Ready returns. If Ready fails,
	// nothing is attached or replaced.
	Ready func(*Tune) error
}

// TuneRules is a compiled list of rules, for Install.
type TuneRules struct {
	MatchRules
	// Rules have no Seed: Install sets this field.
	Rules []TuneRule
}

// Tune is the tuning of one cgroup: pinned maps and a pinned link, which stay attached without this process.
type Tune struct {
	dir    string
	cgroup string
	banks
	link    link.Link
	program *ebpf.Program
}

// Move attaches the loaded program with its rules to another cgroup directory, which was created in place of the
// previous one.
func (t *Tune) Move(path string) error {
	cgroup, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("open cgroup: %w", err)
	}
	defer cgroup.Close()
	l, err := t.attach(cgroup)
	if err != nil {
		return err
	}
	old := t.link
	t.link, t.cgroup = l, path
	return old.Close()
}

// Close closes the descriptors of this process. Pinned maps and the link stay.
func (t *Tune) Close() error {
	var errs []error
	if t.link != nil {
		errs = append(errs, t.link.Close())
	}
	if t.program != nil {
		errs = append(errs, t.program.Close())
	}
	for _, m := range t.maps {
		if m != nil {
			errs = append(errs, m.Close())
		}
	}
	return errors.Join(errs...)
}

// RemoveTune detaches the program and removes the pins of a tuning, in any layout. Open connections keep their
// options.
func RemoveTune(dir string) error { return pin.EachLayout(dir, removeTune) }

func removeTune(dir string) error {
	path := filepath.Join(dir, pinTuneLink)
	l, err := link.LoadPinnedLink(path, nil)
	if err == nil {
		err = errors.Join(l.Detach(), l.Unpin())
		l.Close()
		if err != nil {
			return fmt.Errorf("remove %s: %w", pinTuneLink, err)
		}
	}
	return os.RemoveAll(dir)
}

// Unpin removes the pins, so that the tuning ends with this process.
func (t *Tune) Unpin() error {
	if err := os.RemoveAll(t.dir); err != nil {
		return fmt.Errorf("remove pins: %w", err)
	}
	return nil
}

// SetScope stores a record with the pins.
func (t *Tune) SetScope(s pin.Scope) error { return pin.SetScope(t.dir, s) }

// TuningID returns the id of the map of connections, which identifies the tuning that is pinned in dir.
func TuningID(dir string) (ebpf.MapID, error) {
	m, err := openTuneConnections(dir)
	if err != nil {
		return 0, err
	}
	defer m.Close()
	info, err := m.Info()
	if err != nil {
		return 0, fmt.Errorf("read tuning: %w", err)
	}
	id, _ := info.ID() // cannot fail since Linux 4.13
	return id, nil
}

// Attached reports whether the cgroup directory is still the tuned cgroup: it may have been removed and created
// again.
func (t *Tune) Attached() bool {
	cgroup, err := os.Open(t.cgroup)
	if err != nil {
		return false
	}
	defer cgroup.Close()
	same, err := pin.AttachedTo(t.link, cgroup)
	return err == nil && same
}

// Connection returns the state of a socket's connection, or nil if no rule has matched.
func (t *Tune) Connection(fd int) (*TuneConnection, error) {
	var c TuneConnection
	err := t.maps[pinTuneConnections].Lookup(int32(fd), &c)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read rule of socket: %w", err)
	}
	return &c, nil
}

// Storage returns the descriptor of the sk_storage map that Connection reads. sock_diag(7) reads the map for sockets
// without a descriptor (see DecodeConnection).
func (t *Tune) Storage() int { return t.maps[pinTuneConnections].FD() }

// DecodeConnection decodes a value of the map of Storage; nil for an empty value.
func DecodeConnection(value []byte) (*TuneConnection, error) {
	if len(value) == 0 {
		return nil, nil
	}
	var c TuneConnection
	n, err := binary.Decode(value, binary.NativeEndian, &c)
	if err == nil && n != len(value) {
		err = fmt.Errorf("it has %d bytes, want %d", len(value), n)
	}
	if err != nil {
		return nil, fmt.Errorf("read rule of socket: %w", err)
	}
	return &c, nil
}

// ProgramID returns the id of the attached program.
func (t *Tune) ProgramID() (uint32, error) {
	info, err := t.link.Info()
	if err != nil {
		return 0, fmt.Errorf("read link: %w", err)
	}
	return uint32(info.Program), nil
}

// SockOps returns the ids of the sock_ops programs that are attached to a cgroup itself, in the order in which they
// run. It needs CAP_NET_ADMIN.
func SockOps(cgroup string) ([]uint32, error) {
	dir, err := os.Open(cgroup)
	if err != nil {
		return nil, fmt.Errorf("open cgroup: %w", err)
	}
	defer dir.Close()
	attached, err := probe.QueryPrograms(link.QueryOptions{Target: int(dir.Fd()), Attach: ebpf.AttachCGroupSockOps})
	if err != nil {
		return nil, fmt.Errorf("list sock_ops programs of cgroup %s: %w", cgroup, err)
	}
	ids := make([]uint32, len(attached.Programs))
	for i, p := range attached.Programs {
		ids[i] = uint32(p.ID)
	}
	return ids, nil
}
