// SPDX-License-Identifier: Apache-2.0

package netif_test

import (
	"io"
	"os"
	"testing"

	"sockeye/internal/testenv"
)

// waitEnv has the process do nothing until its input ends.
const waitEnv = "BIGTCP_TEST_WAIT"

func TestMain(m *testing.M) {
	if os.Getenv(waitEnv) != "" {
		// Whatever ends it.
		_, _ = io.Copy(io.Discard, os.Stdin)
		return
	}
	testenv.Main(m)
}
