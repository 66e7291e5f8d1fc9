// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"sockeye/internal/bpf/load"
	"sockeye/internal/bpf/pin"
	"sockeye/internal/bpf/probe"
)

// OpenTrace creates the tracing of a cgroup, or adopts the pins in c.Dir in the layout of this version. Without BPF
// timestamping (probe.HaveTimestamps), nothing sent is measured. Pins of other layouts are removed after the new programs
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
	switch err := probe.HaveTimestamps(); {
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

// load loads a program with the maps of this tracing.
func (t *Trace) load(spec *ebpf.CollectionSpec, program string) (*ebpf.Program, error) {
	for name, m := range spec.Maps {
		if of := t.maps[name]; of != nil {
			m.MaxEntries = of.MaxEntries()
		}
	}
	if timestamps := spec.Variables["timestamps"]; timestamps != nil {
		err := probe.HaveTimestamps()
		if err != nil && !errors.Is(err, ebpf.ErrNotSupported) {
			return nil, err
		}
		if err := timestamps.Set(err == nil); err != nil {
			return nil, err
		}
	}
	return load.Program(spec, program, t.maps)
}

// HaveSend returns an error that wraps ebpf.ErrNotSupported if the start of sendmsg(2) cannot be recorded: the kernel
// does not support fentry programs, or does not permit them to any user.
func HaveSend() error {
	spec, err := loadTraceSend()
	if err != nil {
		return err
	}
	return probe.HaveSend(spec)
}

// NewNonce returns a random number that nobody can guess.
func NewNonce() uint64 {
	var b [8]byte
	rand.Read(b[:])
	return binary.LittleEndian.Uint64(b[:])
}
