// SPDX-License-Identifier: Apache-2.0

package capture_test

import (
	"fmt"
	"os"
	"testing"
	"time"

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

// patience bounds the wait for an event.
const patience = time.Minute

// until polls until a condition holds.
func until(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s", patience, what)
		}
	}
}
