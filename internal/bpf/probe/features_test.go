// SPDX-License-Identifier: Apache-2.0

package probe_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/bpf/probe"
	"sockeye/internal/linux"
	"sockeye/internal/testenv"
)

// TestFeatures compares each probe with the kernel's version.
func TestFeatures(t *testing.T) {
	release, _, err := linux.Uname()
	if err != nil {
		t.Fatal(err)
	}
	running := version(t, release)
	for _, f := range probe.Features(bpf.HaveSend) {
		err := f.Probe()
		if err != nil && !errors.Is(err, ebpf.ErrNotSupported) {
			t.Errorf("%s: %v", f.Name, err)
		}
		if errors.Is(err, unix.EPERM) {
			t.Logf("%s: %v", f.Name, err)
			continue
		}
		if has := running >= version(t, f.Since); has != (err == nil) {
			t.Errorf("%s came with %s, this is %s: %v", f.Name, f.Since, release, err)
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
	for _, f := range probe.Features(bpf.HaveSend) {
		known[f.Name] = f.Probe()
	}
	testenv.WithoutRights(t, func() {
		for _, f := range probe.Features(bpf.HaveSend) {
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
