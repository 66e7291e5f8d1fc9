// SPDX-License-Identifier: Apache-2.0

// Package linux reads the release and the version of the running kernel.
package linux

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

// Version is a version of Linux as kernel.org numbers it: major, minor, patch.
type Version [3]int

func (v Version) String() string {
	return fmt.Sprintf("%d.%d.%d", v[0], v[1], v[2])
}

// Before reports whether v is older than w.
func (v Version) Before(w Version) bool {
	return slices.Compare(v[:], w[:]) < 0
}

// Release returns the release of the running kernel for people to read, or "unknown".
func Release() string {
	release, _, err := Uname()
	if err != nil {
		return "unknown"
	}
	return release
}

// Running returns the version of the running kernel. The version is read once.
var Running = sync.OnceValues(readKernel)

func readKernel() (Version, error) {
	release, version, err := Uname()
	if err != nil {
		return Version{}, err
	}
	// The release of Ubuntu ends in .0 whatever the upstream version is.
	signature, err := os.ReadFile("/proc/version_signature")
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return Version{}, fmt.Errorf("read kernel version: %w", err)
	}
	v, ok := kernelOf(release, version, string(signature))
	if !ok {
		return Version{}, fmt.Errorf("read kernel version: %q is not a version", release)
	}
	return v, nil
}

// Uname returns the release and the version of the running kernel, as uname -r and uname -v.
func Uname() (release, version string, err error) {
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return "", "", fmt.Errorf("read kernel version: %w", err)
	}
	return unix.ByteSliceToString(name.Release[:]), unix.ByteSliceToString(name.Version[:]), nil
}

// kernelOf returns the upstream version of a kernel, from the release and version of
// uname(2) and from Ubuntu's /proc/version_signature.
func kernelOf(release, version, signature string) (Version, bool) {
	if fields := strings.Fields(signature); len(fields) == 3 {
		if v, ok := parseVersion(fields[2]); ok {
			return v, true
		}
	}
	// Debian writes the upstream version into the version of uname(2), as in "#1 SMP Debian 6.1.158-1 (2025-11-09)".
	if _, after, found := strings.Cut(version, " Debian "); found {
		if v, ok := parseVersion(after); ok {
			return v, true
		}
	}
	return parseVersion(release)
}

// parseVersion parses a version of two or three numbers and ignores the rest.
func parseVersion(text string) (v Version, ok bool) {
	rest := text
	for k := range v {
		digits := len(rest) - len(strings.TrimLeft(rest, "0123456789"))
		number, err := strconv.ParseUint(rest[:digits], 10, 31)
		if err != nil {
			return Version{}, false
		}
		v[k], rest = int(number), rest[digits:]
		after, dot := strings.CutPrefix(rest, ".")
		if k > 0 && (!dot || after == "" || after[0] < '0' || after[0] > '9') {
			return v, true
		}
		if !dot {
			return Version{}, false
		}
		rest = after
	}
	return v, true
}
