// SPDX-License-Identifier: Apache-2.0

package bpf_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/cilium/ebpf"

	"sockeye/internal/bpf"
	"sockeye/internal/bpf/probe"
)

// TestProgramsLoad loads every program of every object separately.
func TestProgramsLoad(t *testing.T) {
	for name, load := range map[string]func() (*ebpf.CollectionSpec, error){
		"reuseport": bpf.LoadSteerReuseport, "lookup": bpf.LoadSteerLookup, "members": bpf.LoadSteerMembers,
	} {
		all, err := load()
		if err != nil {
			t.Fatal(err)
		}
		for program := range all.Programs {
			t.Run(name+"/"+program, func(t *testing.T) {
				spec := all.Copy()
				for other := range spec.Programs {
					if other != program {
						delete(spec.Programs, other)
					}
				}
				loaded, err := ebpf.NewCollection(spec)
				if program == "steer_migrate" {
					if lacks := lacking(t, "sk_reuseport migration"); lacks != nil {
						if err == nil {
							t.Fatalf("loads, but the probe says %v", lacks)
						}
						t.Skipf("kernel: %v", lacks)
					}
				}
				if err != nil {
					t.Fatalf("%+v", err)
				}
				loaded.Close()
			})
		}
	}
}

// lacking returns an error if the kernel lacks the feature with the given name.
func lacking(t testing.TB, name string) error {
	t.Helper()
	for _, f := range probe.Features(bpf.HaveSend) {
		if f.Name != name {
			continue
		}
		err := f.Probe()
		if err != nil && !errors.Is(err, ebpf.ErrNotSupported) {
			t.Fatalf("probe %s: %v", name, err)
		}
		if err != nil {
			return fmt.Errorf("no %s before %s", name, f.Since)
		}
		return nil
	}
	t.Fatalf("no feature %s", name)
	return nil
}
