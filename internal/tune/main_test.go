// SPDX-License-Identifier: Apache-2.0

package tune_test

import (
	"fmt"
	"os"
	"testing"

	"github.com/cilium/ebpf/rlimit"

	"sockeye/internal/testenv"
)

func TestMain(m *testing.M) {
	// Kernels before 5.11 charge maps to RLIMIT_MEMLOCK.
	if err := rlimit.RemoveMemlock(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	// What the host remembers of its peers would have a test depend on those before.
	if testenv.Cgroup() != "" {
		if err := os.WriteFile("/proc/sys/net/ipv4/tcp_no_metrics_save", []byte("1"), 0); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	testenv.Main(m)
}

// TestServer is the process of servers that tests start.
func TestServer(t *testing.T) { testenv.Serve(t) }
