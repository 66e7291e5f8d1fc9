// SPDX-License-Identifier: Apache-2.0

package trace_test

import (
	"testing"

	"sockeye/internal/testenv"
)

func TestMain(m *testing.M) {
	testenv.MainWithMaps(m)
}

// TestServer is the entry point of the server processes of tests.
func TestServer(t *testing.T) { testenv.Serve(t) }
