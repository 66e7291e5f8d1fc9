// SPDX-License-Identifier: Apache-2.0

package programs_test

import (
	"testing"

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
