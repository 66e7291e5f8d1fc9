// SPDX-License-Identifier: Apache-2.0

package bpf_test

import (
	"testing"

	"github.com/cilium/ebpf"

	"sockeye/internal/bpf/probe"
)

// TestForeignPrograms lists a program of another service and of another kind, but not our own.
func TestForeignPrograms(t *testing.T) {
	both(t, func(t *testing.T, lookup bool) {
		c := config(t, lookup, pair...)
		s := open(t, c)
		own, err := s.Program(0).Info()
		check(t, err)
		ownID, _ := own.ID()
		p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
			Name: "somebody", Type: ebpf.SkReuseport, License: "GPL", Instructions: returns(1),
		})
		check(t, err)
		defer p.Close()
		info, err := p.Info()
		check(t, err)
		id, _ := info.ID()
		foreign, err := probe.ForeignPrograms(int(c.Netns.Fd()))
		check(t, err)
		found := false
		for _, f := range foreign {
			found = found || f == probe.Foreign{ID: uint32(id), Name: "somebody", Kind: "SkReuseport"}
			if f.ID == uint32(ownID) {
				t.Errorf("our own program is foreign: %+v", f)
			}
		}
		if !found {
			t.Errorf("no program %d in %+v", id, foreign)
		}
	})
}
