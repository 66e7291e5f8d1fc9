// SPDX-License-Identifier: Apache-2.0

package transfers

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"sockeye/internal/fault"
	"sockeye/internal/testenv"
)

func TestMain(m *testing.M) {
	testenv.Main(m)
}

// quick returns options of runs that take a fraction of a second together.
func quick() Options {
	o := Defaults()
	o.Rounds, o.For, o.Warmup, o.Path = 2, 100*time.Millisecond, 10*time.Millisecond, PathVeth
	return o
}

func codeOf(err error) (int, bool) {
	known, ok := errors.AsType[*fault.Error](err)
	if !ok {
		return 0, false
	}
	return known.Code, true
}

// descriptors returns the open descriptors of this process.
func descriptors(t *testing.T) []string {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	var open []string
	for _, e := range entries {
		// The descriptor of the directory itself is closed by now.
		if target, err := os.Readlink(filepath.Join("/proc/self/fd", e.Name())); err == nil {
			open = append(open, e.Name()+" "+target)
		}
	}
	slices.Sort(open)
	return open
}
