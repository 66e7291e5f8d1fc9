// SPDX-License-Identifier: Apache-2.0

package programs_test

import (
	"fmt"
	"os"
	"testing"

	"github.com/cilium/ebpf/rlimit"

	"sockeye/internal/testenv"
)

func TestMain(m *testing.M) {
	// Before Linux 5.11, maps are charged to RLIMIT_MEMLOCK.
	if err := rlimit.RemoveMemlock(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	testenv.Main(m)
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
