// SPDX-License-Identifier: Apache-2.0

package bpf_test

import (
	"os"
	"testing"

	"sockeye/internal/testenv"
)

func TestMain(m *testing.M) {
	if listeners := os.Getenv(memberVariable); listeners != "" {
		runMember(listeners)
	}
	testenv.MainWithMaps(m)
}
