// SPDX-License-Identifier: Apache-2.0

package bigtcp

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// kernelVersion is one of Linux.
type kernelVersion struct{ major, minor, patch int }

func (v kernelVersion) String() string {
	return fmt.Sprintf("%d.%d.%d", v.major, v.minor, v.patch)
}

func (v kernelVersion) before(w kernelVersion) bool {
	return slices.Compare([]int{v.major, v.minor, v.patch}, []int{w.major, w.minor, w.patch}) < 0
}

// cutsIPv4Alone says whether gso_features_check compares packets of IPv4 with
// gso_max_size: since commit 24ab059d2ebd (6.7, 6.6.9) and until e609c959a939
// (6.12, 6.11.3, 6.10.14, 6.6.55).
func (v kernelVersion) cutsIPv4Alone() bool {
	for _, r := range []struct{ from, until kernelVersion }{
		{kernelVersion{6, 6, 9}, kernelVersion{6, 6, 55}},
		{kernelVersion{6, 7, 0}, kernelVersion{6, 10, 14}},
		{kernelVersion{6, 11, 0}, kernelVersion{6, 11, 3}},
	} {
		if !v.before(r.from) && v.before(r.until) {
			return true
		}
	}
	return false
}

// runningKernel is the version of the running kernel, as kernel.org numbers it.
var runningKernel = sync.OnceValues(readKernel)

func readKernel() (kernelVersion, error) {
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return kernelVersion{}, fmt.Errorf("read kernel version: %w", err)
	}
	// Ubuntu's release ends in .0 whatever it was made of.
	signature, err := os.ReadFile("/proc/version_signature")
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return kernelVersion{}, fmt.Errorf("read kernel version: %w", err)
	}
	release := unix.ByteSliceToString(name.Release[:])
	v, ok := kernelOf(release, unix.ByteSliceToString(name.Version[:]), string(signature))
	if !ok {
		return kernelVersion{}, fmt.Errorf("read kernel version: %q is none", release)
	}
	return v, nil
}

// kernelOf is the version behind the release and version of uname(2) and Ubuntu's
// /proc/version_signature.
func kernelOf(release, version, signature string) (kernelVersion, bool) {
	if fields := strings.Fields(signature); len(fields) == 3 {
		if v, ok := parseVersion(fields[2]); ok {
			return v, true
		}
	}
	// Debian's, as in "#1 SMP Debian 6.1.158-1 (2025-11-09)".
	if _, after, found := strings.Cut(version, " Debian "); found {
		if v, ok := parseVersion(after); ok {
			return v, true
		}
	}
	return parseVersion(release)
}

// parseVersion reads a version of two or three numbers, whatever follows.
func parseVersion(text string) (v kernelVersion, ok bool) {
	rest := text
	for k, to := range []*int{&v.major, &v.minor, &v.patch} {
		digits := len(rest) - len(strings.TrimLeft(rest, "0123456789"))
		number, err := strconv.ParseUint(rest[:digits], 10, 31)
		if err != nil {
			return kernelVersion{}, false
		}
		*to, rest = int(number), rest[digits:]
		after, dot := strings.CutPrefix(rest, ".")
		if k > 0 && (!dot || after == "" || after[0] < '0' || after[0] > '9') {
			return v, true
		}
		if !dot {
			return kernelVersion{}, false
		}
		rest = after
	}
	return v, true
}
