// SPDX-License-Identifier: Apache-2.0

package bpf_test

import (
	"fmt"
	"os"
	"testing"

	"github.com/cilium/ebpf/rlimit"

	"sockeye/internal/testenv"
)

func TestMain(m *testing.M) {
	if listeners := os.Getenv(memberVariable); listeners != "" {
		runMember(listeners)
	}
	// Before Linux 5.11, maps are charged to RLIMIT_MEMLOCK.
	if err := rlimit.RemoveMemlock(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	testenv.Main(m)
}
