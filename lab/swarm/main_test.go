// SPDX-License-Identifier: Apache-2.0

package swarm

import (
	"fmt"
	"os"
	"testing"

	"sockeye/internal/testenv"
)

func TestMain(m *testing.M) {
	if HasRole() {
		if err := Run(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	testenv.Main(m)
}
