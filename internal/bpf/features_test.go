// SPDX-License-Identifier: Apache-2.0

package bpf_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/testenv"
)

// TestFeatures compares each probe with the kernel's version.
func TestFeatures(t *testing.T) {
	var name unix.Utsname
	check(t, unix.Uname(&name))
	running := version(t, unix.ByteSliceToString(name.Release[:]))
	for _, f := range bpf.Features {
		err := f.Probe()
		if err != nil && !errors.Is(err, ebpf.ErrNotSupported) {
			t.Errorf("%s: %v", f.Name, err)
		}
		if errors.Is(err, unix.EPERM) {
			t.Logf("%s: %v", f.Name, err)
			continue
		}
		if has := running >= version(t, f.Since); has != (err == nil) {
			t.Errorf("%s came with %s, this is %s: %v", f.Name, f.Since, unix.ByteSliceToString(name.Release[:]), err)
		}
		if hint := f.Hint(unix.EPERM); hint == f.Hint(unix.EINVAL) {
			t.Errorf("%s: hint %q also where the kernel forbids it", f.Name, hint)
		}
		if f.Needed == "" {
			t.Errorf("%s: nothing needs it", f.Name)
		}
	}
}

// TestProbesTellLackOfRights probes without capabilities, which must not be reported as missing features.
func TestProbesTellLackOfRights(t *testing.T) {
	known := make(map[string]error)
	for _, f := range bpf.Features {
		known[f.Name] = f.Probe()
	}
	testenv.WithoutRights(t, func() {
		for _, f := range bpf.Features {
			if known[f.Name] != nil {
				continue
			}
			if err := f.Probe(); errors.Is(err, ebpf.ErrNotSupported) {
				t.Errorf("%s: %v", f.Name, err)
			}
		}
	})
}

func version(t testing.TB, s string) int {
	t.Helper()
	var major, minor int
	if _, err := fmt.Sscanf(s, "%d.%d", &major, &minor); err != nil {
		t.Fatalf("version %q: %v", s, err)
	}
	return major<<16 | minor
}

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
		foreign, err := bpf.ForeignPrograms(int(c.Netns.Fd()))
		check(t, err)
		found := false
		for _, f := range foreign {
			found = found || f == bpf.Foreign{ID: uint32(id), Name: "somebody", Kind: "SkReuseport"}
			if f.ID == uint32(ownID) {
				t.Errorf("our own program is foreign: %+v", f)
			}
		}
		if !found {
			t.Errorf("no program %d in %+v", id, foreign)
		}
	})
}
