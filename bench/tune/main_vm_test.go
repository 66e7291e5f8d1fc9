// SPDX-License-Identifier: Apache-2.0

//go:build vm

package tune

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"sockeye/internal/cli"
)

// TestMain runs the test binary also as the agent and as the workers: a virtual machine of lab/vm has no Go.
func TestMain(m *testing.M) {
	if filepath.Base(os.Args[0]) == "sockeye" {
		os.Exit(cli.Main(os.Args[1:], cli.Host()))
	}
	if len(os.Args) > 1 && Benchmark.Workers[os.Args[1]] != nil {
		if err := Benchmark.Workers[os.Args[1]](os.Args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}
