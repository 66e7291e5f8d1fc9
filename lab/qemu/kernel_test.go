// SPDX-License-Identifier: Apache-2.0

package qemu

import (
	"slices"
	"strings"
	"testing"
)

func TestLatest(t *testing.T) {
	packages := []string{
		"linux-image-6.12.91+deb12-cloud-arm64", "linux-image-6.1.0-59-arm64",
		"linux-image-cloud-amd64", "linux-image-6.12-cloud-amd64", "linux-image-6.1.0-9-cloud-amd64",
		"linux-image-6.1.0-56-cloud-amd64", "linux-image-6.1.0-57-cloud-amd64-unsigned", "linux-image-6.1.0-58-amd64",
		"linux-image-6.12.90+deb12-cloud-amd64", "linux-image-6.12.90+deb12.1-cloud-amd64", "linux-image-6.12.9+deb12-cloud-amd64",
		"linux-image-6.12.90+deb12.1-cloud-amd64-dbg", "linux-image-6.9.7+deb12-cloud-amd64",
	}
	for name, want := range map[string]string{
		"6.1":    "linux-image-6.1.0-56-cloud-amd64",
		"6.12":   "linux-image-6.12.90+deb12.1-cloud-amd64",
		"newest": "linux-image-6.12.90+deb12.1-cloud-amd64",
		"5.10":   "",
		"trixie": "linux-image-6.12.90+deb12.1-cloud-amd64",
	} {
		if got := latest(packages, AMD64, name); got != want {
			t.Errorf("latest of %s is %q, want %q", name, got, want)
		}
	}
	if got, want := latest(packages, ARM64, "newest"), "linux-image-6.12.91+deb12-cloud-arm64"; got != want {
		t.Errorf("latest for arm64 is %q, want %q", got, want)
	}
}

func TestSourcesList(t *testing.T) {
	const main = "'http://a.example/debian/dists/bookworm/InRelease' a_InRelease 0 \n" +
		"'http://a.example/debian/dists/bookworm-updates/InRelease' b_InRelease 0 \n" +
		"'http://a.example/debian/dists/bookworm/main/binary-amd64/Packages.xz' c 0 \n" +
		"'https://tools.example/apt/dists/tools-bookworm/InRelease' d_InRelease 0 \n"
	const security = "'http://b.example/sec/dists/bookworm-security/InRelease' e_InRelease 0 \n"
	for uris, want := range map[string][]string{
		main + security: {"http://a.example/debian bullseye main", "http://b.example/sec bullseye-security main"},
		main:            {"http://a.example/debian bullseye main", "http://a.example/debian-security bullseye-security main"},
		"":              nil,
	} {
		var got []string
		for line := range strings.Lines(sourcesList(uris, ARM64, []string{"bullseye", "bullseye-security"})) {
			options, source, _ := strings.Cut(strings.TrimSpace(line), "] ")
			if !strings.HasPrefix(options, "deb [arch=arm64 ") {
				t.Errorf("source for another architecture: %s", line)
			}
			got = append(got, source)
		}
		if !slices.Equal(got, want) {
			t.Errorf("sources for\n%s are %q, want %q", uris, got, want)
		}
	}
}
