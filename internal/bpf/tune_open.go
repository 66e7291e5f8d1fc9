// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"fmt"
	"os"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"sockeye/internal/bpf/load"
	"sockeye/internal/bpf/pin"
	"sockeye/internal/clock"
)

// OpenTune creates the tuning of a cgroup, or adopts the pins in c.Dir in the layout of this version: maps keep their
// contents. In a new tuning, connections get no rule before Install.
//
// Pins of another layout are replaced: their link gets the new program atomically, then they are removed. Learned
// windows are kept if their own layout is the same. Rules, their counts and the rules of open connections are not
// kept; options that were set stay set.
//
// The error is a *pin.IncompatibleError for a pin that this version cannot use.
func OpenTune(c TuneConfig) (_ *Tune, err error) {
	dir, err := pin.InLayout(c.Dir, tuneLayout)
	if err != nil {
		return nil, err
	}
	t := &Tune{dir: dir, cgroup: c.Cgroup, banks: banks{maps: make(map[string]*ebpf.Map), inner: make(map[string]*ebpf.MapSpec)}}
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
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("create pin directory: %w", err)
	}
	spec, err := loadTuneSockops()
	if err != nil {
		return nil, err
	}
	others, err := pin.OtherLayouts(c.Dir, dir)
	if err != nil {
		return nil, err
	}
	for name, m := range spec.Maps {
		if m.Type == ebpf.ArrayOfMaps {
			t.inner[name] = m.InnerMap
		}
		if pin.IsVariables(name) {
			continue
		}
		pinned := name
		if name == "learned" {
			pinned += pin.LayoutMark + pin.LayoutHash(map[string]*ebpf.MapSpec{name: m}, nil)
			if err := pin.Share(pinned, dir, others); err != nil {
				return nil, err
			}
		}
		if t.maps[name], err = pin.OpenMapAs(dir, pinned, m); err != nil {
			return nil, err
		}
	}
	hz, err := clock.Hz()
	if err != nil {
		return nil, err
	}
	if err := spec.Variables["hz"].Set(hz); err != nil {
		return nil, err
	}
	if t.program, err = load.Program(spec, "tune_sockops", t.maps); err != nil {
		return nil, err
	}
	if c.Ready != nil {
		if err := c.Ready(t); err != nil {
			return nil, err
		}
	}
	for _, other := range others {
		if err := pin.TakeLink(other, t.dir, pinTuneLink, t.program, cgroup); err != nil {
			return nil, err
		}
		if err := removeTune(other); err != nil {
			return nil, err
		}
	}
	t.link, err = t.attach(cgroup)
	return t, err
}

func (t *Tune) attach(cgroup *os.File) (link.Link, error) {
	return pin.EnsureLink(t.dir, pinTuneLink, t.program, cgroup, func() (link.Link, error) {
		return link.AttachCgroup(link.CgroupOptions{Path: cgroup.Name(), Attach: ebpf.AttachCGroupSockOps, Program: t.program})
	})
}
