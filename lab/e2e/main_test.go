// SPDX-License-Identifier: Apache-2.0

// Package e2e_test has the end-to-end tests: they run the built binary in a lab
// with an agent, members and devices, and check which member receives which
// traffic. Members are nfacctd processes in tests of real collectors, otherwise
// receivers: processes that log all arrivals and respond with their slot.
package e2e_test

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"sockeye/internal/cli" // a dependency of the binary: invalidates the test cache if the binary changes
	"sockeye/internal/testenv"
	"sockeye/lab/swarm"
)

const binaryEnv = "SOCKEYE_E2E_BINARY"

// TestMain runs the role of this process. Each role other than the tests is selected by one environment variable.
func TestMain(m *testing.M) {
	if filepath.Base(os.Args[0]) == "sockeye" { // see build in binary_vm_test.go
		os.Exit(cli.Main(os.Args[1:], cli.Host()))
	}
	if os.Getenv(receiverEnv) != "" {
		fmt.Fprintln(os.Stderr, receive(os.Getenv(receiverEnv)))
		os.Exit(1)
	}
	if swarm.HasRole() {
		if err := swarm.Run(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if os.Getenv(peerEnv) != "" {
		fmt.Fprintln(os.Stderr, bePeer())
		os.Exit(1)
	}
	if testenv.Cgroup() == "" {
		if err := build(); err != nil {
			fmt.Fprintln(os.Stderr, "build sockeye:", err)
			os.Exit(1)
		}
	}
	testenv.Main(m)
}
