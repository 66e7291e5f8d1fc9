// SPDX-License-Identifier: Apache-2.0

package helm

import (
	"fmt"
	"os"
	"testing"

	"sockeye/internal/testenv"
)

// sockeye is the binary that "make test-helm" builds.
const sockeye = "../../bin/sockeye"

// TestMain runs the tests in namespaces of their own, and members, which are found by process id.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "nfacctd" {
		fmt.Println(serve())
		os.Exit(1)
	}
	if _, err := os.Stat(sockeye); err != nil {
		fmt.Println("run make test-helm, which builds the binary:", err)
		os.Exit(1)
	}
	testenv.Main(m)
}
