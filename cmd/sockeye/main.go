// SPDX-License-Identifier: Apache-2.0

// Command sockeye makes every network device's traffic return to the same
// process.
package main

import (
	"os"

	"sockeye/internal/cli"
)

func main() {
	os.Exit(cli.Main(os.Args[1:], cli.Host()))
}
