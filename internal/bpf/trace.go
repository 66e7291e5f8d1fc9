// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"sockeye/internal/bpf/pin"
	"sockeye/internal/clock"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
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
	// Groups is the number of group indexes of the rules, with one "other" per rule; at most TraceGroups.
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

// OpenTrace creates the tracing of a cgroup, or adopts the pins in c.Dir in the layout of this version. Without BPF
// timestamping (HaveTimestamps), nothing sent is measured. Pins of other layouts are removed after the new programs
// are attached.
//
// The error is a *pin.IncompatibleError for a pin that this version cannot use.
func OpenTrace(c TraceConfig) (_ *Trace, err error) {
	base := c.Dir
	if c.Dir, err = pin.InLayout(base, traceLayout); err != nil {
		return nil, err
	}
	t := &Trace{dir: c.Dir, cgroup: c.Cgroup, links: make(map[string]link.Link),
		banks: banks{maps: make(map[string]*ebpf.Map), inner: make(map[string]*ebpf.MapSpec)}}
	defer func() {
		if err != nil {
			t.Close()
		}
	}()
	cgroup, err := os.Open(c.Cgroup)
	if err != nil {
		return nil, fmt.Errorf("open cgroup: %w", err)
	}
	defer cgroup.Close()
	if !c.Adopt {
		err = removeTrace(c.Dir)
	} else if _, err = os.Stat(c.Dir); errors.Is(err, os.ErrNotExist) {
		err = &pin.IncompatibleError{Path: base, Err: errors.New("another layout")}
	}
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(c.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("create pin directory: %w", err)
	}
	spec, err := loadTraceSockops()
	if err != nil {
		return nil, err
	}
	if err := t.openMaps(c, spec); err != nil {
		return nil, err
	}
	if c.Adopt {
		// The reader of samples has exited.
		err = t.endSamples()
	} else {
		err = t.install(c.Rules)
	}
	if err != nil {
		return nil, err
	}
	program := "trace_sockops"
	switch err := HaveTimestamps(); {
	case errors.Is(err, ebpf.ErrNotSupported):
		program = "trace_choose"
		if spec, err = loadTraceChoose(); err != nil {
			return nil, err
		}
	case err != nil:
		return nil, err
	}
	p, err := t.load(spec, program)
	if err != nil {
		return nil, err
	}
	defer p.Close()
	if err := t.attach(pinTraceLink, ebpf.AttachCGroupSockOps, p, cgroup); err != nil {
		return nil, err
	}
	if err := t.openRX(c); err != nil {
		return nil, err
	}
	if c.Send {
		if err := t.openSend(); err != nil {
			return nil, err
		}
	}
	others, err := pin.OtherLayouts(base, c.Dir)
	if err != nil {
		return nil, err
	}
	for _, other := range others {
		if err := removeTrace(other); err != nil {
			return nil, err
		}
	}
	return t, nil
}

// SetScope stores a record with the pins.
func (t *Trace) SetScope(s Scope) error { return setScope(t.dir, s) }

// MoveTrace renames the pin directory in all layouts.
func MoveTrace(from, to string) error {
	return pin.EachLayout(from, func(dir string) error {
		if err := os.Rename(dir, to+strings.TrimPrefix(dir, from)); err != nil {
			return fmt.Errorf("move pins: %w", err)
		}
		return nil
	})
}

// load loads a program with the maps of this tracing.
func (t *Trace) load(spec *ebpf.CollectionSpec, program string) (*ebpf.Program, error) {
	for name, m := range spec.Maps {
		if of := t.maps[name]; of != nil {
			m.MaxEntries = of.MaxEntries()
		}
	}
	if timestamps := spec.Variables["timestamps"]; timestamps != nil {
		err := HaveTimestamps()
		if err != nil && !errors.Is(err, ebpf.ErrNotSupported) {
			return nil, err
		}
		if err := timestamps.Set(err == nil); err != nil {
			return nil, err
		}
	}
	return loadProgram(spec, program, t.maps)
}

func (t *Trace) openMaps(c TraceConfig, spec *ebpf.CollectionSpec) (err error) {
	indexes := uint32(max(c.Rules.Groups, 1))
	for _, name := range []string{"groups", "stats", "slowest"} {
		spec.Maps[name].MaxEntries = indexes
	}
	if c.Tuning != "" {
		if t.maps[tunedMap], err = openTuneConnections(c.Tuning); err != nil {
			return err
		}
	}
	for name, m := range spec.Maps {
		if m.Type == ebpf.ArrayOfMaps {
			t.inner[name] = m.InnerMap
		}
		if pin.IsVariables(name) || t.maps[name] != nil {
			continue
		}
		if name == tunedMap {
			// An empty map replaces that of the cgroup's tuning.
			t.maps[name], err = ebpf.NewMap(m)
		} else {
			t.maps[name], err = pin.OpenMap(c.Dir, m)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// install writes the rules into new maps.
func (t *Trace) install(r *TraceRules) error {
	ids := make([]uint32, len(r.Rules))
	for i := range r.Rules {
		ids[i] = uint32(i + 1)
		if err := t.maps["rules"].Put(uint32(i), &r.Rules[i]); err != nil {
			return fmt.Errorf("write rule: %w", err)
		}
	}
	for listener, id := range r.Services {
		if err := t.maps["services"].Put(listener, id); err != nil {
			return fmt.Errorf("write listener of a service: %w", err)
		}
	}
	if err := t.setState(func(s *TraceState) { s.Seed = randomSeed() }); err != nil {
		return err
	}
	return t.banks.install(&r.MatchRules, ids)
}

// attach attaches a program to the cgroup and pins its link.
func (t *Trace) attach(pin string, at ebpf.AttachType, p *ebpf.Program, cgroup *os.File) error {
	kept, err := p.Clone()
	if err != nil {
		return fmt.Errorf("keep program: %w", err)
	}
	h := attachedHook{pin, at, kept}
	t.attached = append(t.attached, h)
	t.links[pin], err = t.linkOf(h, cgroup)
	if err != nil {
		delete(t.links, pin)
	}
	return err
}

func (t *Trace) linkOf(h attachedHook, cgroup *os.File) (link.Link, error) {
	return pin.EnsureLink(t.dir, h.pin, h.program, cgroup, func() (link.Link, error) {
		return link.AttachCgroup(link.CgroupOptions{Path: cgroup.Name(), Attach: h.at, Program: h.program})
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

// openSend attaches to tcp_sendmsg, for all connections of the host.
func (t *Trace) openSend() error {
	spec, err := loadTraceSend()
	if err != nil {
		return err
	}
	p, err := t.load(spec, "trace_send")
	if err != nil {
		return err
	}
	defer p.Close()
	l, err := link.AttachTracing(link.TracingOptions{Program: p})
	if err != nil {
		return fmt.Errorf("attach trace_send: %w", err)
	}
	if err := pin.Replace(l.Pin, filepath.Join(t.dir, pinSendLink)); err != nil {
		l.Close()
		return fmt.Errorf("pin %s: %w", pinSendLink, err)
	}
	t.links[pinSendLink] = l
	return nil
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

func newNonce() uint64 {
	var b [8]byte
	rand.Read(b[:])
	return binary.LittleEndian.Uint64(b[:])
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
