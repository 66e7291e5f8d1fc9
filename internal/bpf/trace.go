// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"sockeye/internal/bpf/pin"
	"sockeye/internal/clock"
)

// TraceConfig is the configuration of the tracing of one cgroup.
type TraceConfig struct {
	// Dir is the pin directory.
	Dir string
	// Cgroup is the directory of the traced cgroup.
	Cgroup string
	// Rules are the trace rules, which never change.
	Rules *TraceRules
	// Adopt adopts the pins in Dir, which have these rules. Otherwise they are removed. Pins of another layout
	// give a *pin.IncompatibleError.
	Adopt bool
	// Tuning is the pin directory of the cgroup's tuning, or "".
	Tuning string
	// Send records the start of sendmsg(2) by a program that runs for every connection of the host.
	Send bool
}

// TraceRules is a compiled list of rules.
type TraceRules struct {
	MatchRules
	Rules []TraceRule
	// Services maps the listeners of services to the numbers of the services, from 1.
	Services map[TraceListener]uint32
	// Groups is the number of group indexes of the rules, with one "other" per rule; at most TRACE_GROUPS.
	Groups int
}

// Trace is the tracing of one cgroup: pinned maps and links, which stay attached without this process.
type Trace struct {
	dir    string
	cgroup string
	banks
	links map[string]link.Link
	// attached are the programs that are attached to the cgroup.
	attached []attachedHook
}

// attachedHook is a program and its hook.
type attachedHook struct {
	pin     string
	at      ebpf.AttachType
	program *ebpf.Program
}

// SetScope stores a record with the pins.
func (t *Trace) SetScope(s pin.Scope) error { return pin.SetScope(t.dir, s) }

// MoveTrace renames the pin directory in all layouts.
func MoveTrace(from, to string) error {
	return pin.EachLayout(from, func(dir string) error {
		if err := os.Rename(dir, to+strings.TrimPrefix(dir, from)); err != nil {
			return fmt.Errorf("move pins: %w", err)
		}
		return nil
	})
}

// Move attaches the loaded programs to another cgroup directory, which was created in place of the previous one. If
// Move fails, some programs may be moved.
func (t *Trace) Move(path string) error {
	cgroup, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("open cgroup: %w", err)
	}
	defer cgroup.Close()
	var errs []error
	for _, h := range t.attached {
		l, err := t.linkOf(h, cgroup)
		if err != nil {
			return err
		}
		errs = append(errs, t.links[h.pin].Close())
		t.links[h.pin] = l
	}
	t.cgroup = path
	return errors.Join(errs...)
}

// Close closes the descriptors of this process. Pinned maps and links stay.
func (t *Trace) Close() error {
	var errs []error
	for _, l := range t.links {
		errs = append(errs, l.Close())
	}
	for _, h := range t.attached {
		errs = append(errs, h.program.Close())
	}
	for _, m := range t.maps {
		if m != nil {
			errs = append(errs, m.Close())
		}
	}
	return errors.Join(errs...)
}

// RemoveTrace detaches the programs and removes the pins of a tracing, in any layout.
func RemoveTrace(dir string) error { return pin.EachLayout(dir, removeTrace) }

func removeTrace(dir string) error {
	pins, err := filepath.Glob(filepath.Join(dir, linkPin+"*"))
	if err != nil {
		return err
	}
	for _, path := range pins {
		// A link that cannot be opened is removed with its pin.
		if l, err := link.LoadPinnedLink(path, nil); err == nil {
			err := errors.Join(detach(l), l.Unpin())
			l.Close()
			if err != nil {
				return fmt.Errorf("remove %s: %w", filepath.Base(path), err)
			}
		}
	}
	return os.RemoveAll(dir)
}

// detach detaches a link immediately if its type supports it. Other links are detached with their last reference.
func detach(l link.Link) error {
	if err := l.Detach(); err != nil && !errors.Is(err, ebpf.ErrNotSupported) {
		return err
	}
	return nil
}

// Attached reports whether the cgroup directory is still the traced cgroup: it may have been removed and created
// again.
func (t *Trace) Attached() bool {
	cgroup, err := os.Open(t.cgroup)
	if err != nil {
		return false
	}
	defer cgroup.Close()
	same, err := pin.AttachedTo(t.links[pinTraceLink], cgroup)
	return err == nil && same
}

func (t *Trace) counts() (TraceCounts, error) {
	var c TraceCounts
	if err := t.maps["counts"].Lookup(uint32(0), &c); err != nil {
		return c, fmt.Errorf("read counts: %w", err)
	}
	return c, nil
}

// Connection returns the state of a chosen connection, or nil.
func (t *Trace) Connection(fd int) (*TraceConnection, error) {
	var c TraceConnection
	err := t.maps["connections"].Lookup(uint32(fd), &c)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read connection: %w", err)
	}
	return &c, nil
}

// ProgramID returns the id of the attached sock_ops program.
func (t *Trace) ProgramID() (uint32, error) {
	info, err := t.links[pinTraceLink].Info()
	if err != nil {
		return 0, fmt.Errorf("read link: %w", err)
	}
	return uint32(info.Program), nil
}

// Programs returns the sorted names of the attached programs.
func (t *Trace) Programs() []string {
	var names []string
	for pin := range t.links {
		names = append(names, "trace_"+strings.TrimPrefix(pin, linkPin))
	}
	slices.Sort(names)
	return names
}

// RefreshClock updates the programs' offset of CLOCK_REALTIME, which receive timestamps use, from CLOCK_MONOTONIC.
// The offset changes only when the clock is set.
func (t *Trace) RefreshClock() error {
	return t.setState(func(s *TraceState) { s.Clock = int64(clock.Offset()) })
}

func (t *Trace) setState(change func(*TraceState)) error {
	var s TraceState
	if err := t.maps["state"].Lookup(uint32(0), &s); err != nil {
		return fmt.Errorf("read state: %w", err)
	}
	change(&s)
	if err := t.maps["state"].Put(uint32(0), s); err != nil {
		return fmt.Errorf("write state: %w", err)
	}
	return nil
}
