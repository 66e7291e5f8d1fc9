// SPDX-License-Identifier: Apache-2.0

// Command man writes the manual pages of sockeye to a directory.
package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra/doc"

	"sockeye/internal/cli"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: man DIRECTORY")
		os.Exit(2)
	}
	root := cli.Root(cli.Host())
	root.DisableAutoGenTag = true
	if err := doc.GenManTree(root, &doc.GenManHeader{Title: "SOCKEYE", Section: "1", Source: "Sockeye"}, os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "man:", err)
		os.Exit(1)
	}
}
