// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"os"
	"slices"
	"strings"
	"testing"
)

func TestKernelOf(t *testing.T) {
	for _, c := range []struct {
		release, version, signature string
		want                        Version
	}{
		{"6.18.44-fc-v669", "#1 SMP PREEMPT_DYNAMIC @0", "", Version{6, 18, 44}},
		{"5.19.0", "", "", Version{5, 19, 0}},
		{"6.7-rc3", "", "", Version{6, 7, 0}},
		{"6.7.", "", "", Version{6, 7, 0}},
		{"6.7.x", "", "", Version{6, 7, 0}},
		{"7.0", "", "", Version{7, 0, 0}},
		{"6.11.3+", "", "", Version{6, 11, 3}},
		{"5.14.0-427.13.1.el9_4.x86_64", "#1 SMP PREEMPT_DYNAMIC Wed May 1", "", Version{5, 14, 0}},
		{"6.1.0-46-cloud-amd64", "#1 SMP PREEMPT_DYNAMIC Debian 6.1.158-1 (2025-11-09)", "", Version{6, 1, 158}},
		{"6.12.48+deb13-amd64", "#1 SMP PREEMPT_DYNAMIC Debian 6.12.48-1 (2025-09-20)", "", Version{6, 12, 48}},
		{"6.8.0-45-generic", "#45-Ubuntu SMP", "Ubuntu 6.8.0-45.45-generic 6.8.12\n", Version{6, 8, 12}},
		{"6.8.0-45-generic", "#45-Ubuntu SMP", "garbage", Version{6, 8, 0}},
		{"6.6.9", "# Debian", "", Version{6, 6, 9}},
		{"6.6.9", " Debian garbage", "a b c", Version{6, 6, 9}},
	} {
		got, ok := kernelOf(c.release, c.version, c.signature)
		if !ok || got != c.want {
			t.Errorf("%q, %q, %q: %v (%v), not %v", c.release, c.version, c.signature, got, ok, c.want)
		}
	}
	for _, release := range []string{"", "6", "6.", "x", "6.x", "six.7", "-6.7", ".6.7", "99999999999.1", " 6.7"} {
		if got, ok := kernelOf(release, "", ""); ok {
			t.Errorf("%q: %v", release, got)
		}
	}
}

// TestRelease compares the release with that of procfs.
func TestRelease(t *testing.T) {
	text, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		t.Fatal(err)
	}
	if got, want := Release(), strings.TrimSpace(string(text)); got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func FuzzKernelOf(f *testing.F) {
	f.Add("6.1.0-46-cloud-amd64", "#1 SMP Debian 6.1.158-1 (2025-11-09)", "Ubuntu 6.8.0-45.45-generic 6.8.12")
	f.Fuzz(func(t *testing.T, release, version, signature string) {
		if v, ok := kernelOf(release, version, signature); ok && (slices.Min(v[:]) < 0) {
			t.Errorf("%q, %q, %q: %v", release, version, signature, v)
		}
	})
}
