// SPDX-License-Identifier: Apache-2.0

package capture_test

import (
	"testing"
	"time"

	"sockeye/internal/testenv"
)

func TestMain(m *testing.M) {
	testenv.MainWithMaps(m)
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
