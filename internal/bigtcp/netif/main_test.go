// SPDX-License-Identifier: Apache-2.0

package netif_test

import (
	"io"
	"os"
	"testing"

	"sockeye/internal/testenv"
)

// waitEnv makes the test binary wait until its standard input is closed.
const waitEnv = "BIGTCP_TEST_WAIT"

func TestMain(m *testing.M) {
	if os.Getenv(waitEnv) != "" {
		// Any end of the input is expected.
		_, _ = io.Copy(io.Discard, os.Stdin)
		return
	}
	testenv.Main(m)
}
