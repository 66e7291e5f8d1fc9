// SPDX-License-Identifier: Apache-2.0

package tune_test

import (
	"fmt"
	"os"
	"testing"

	"sockeye/internal/testenv"
)

func TestMain(m *testing.M) {
	// With the metrics cache of peers, tests would depend on earlier tests.
	if testenv.Cgroup() != "" {
		if err := os.WriteFile("/proc/sys/net/ipv4/tcp_no_metrics_save", []byte("1"), 0); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	testenv.MainWithMaps(m)
}

// TestServer is the entry point of the server processes of tests.
func TestServer(t *testing.T) { testenv.Serve(t) }
