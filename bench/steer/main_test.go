// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"os"
	"slices"
	"testing"

	"sockeye/bench/harness"
	"sockeye/internal/testenv"
)

// TestMain also runs the benchmark and its workers: a virtual machine of lab/vm has no other binary of it.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && (slices.Contains([]string{"inside", Benchmark.Name}, os.Args[1]) || Benchmark.Workers[os.Args[1]] != nil) {
		os.Exit(harness.RunCommand(os.Args[1:], Benchmark))
	}
	os.Exit(testenv.Run(m))
}
