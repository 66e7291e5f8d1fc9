// SPDX-License-Identifier: Apache-2.0

// Command man writes the manual pages of sockeye to a directory.
package main

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra/doc"

	"sockeye/internal/cli"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: man DIRECTORY, in the root of the source")
		os.Exit(2)
	}
	if err := write(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "man:", err)
		os.Exit(1)
	}
}

func write(dir string) error {
	root := cli.Root(cli.Host())
	root.DisableAutoGenTag = true
	if err := doc.GenManTree(root, &doc.GenManHeader{Section: "1", Source: "Sockeye"}, dir); err != nil {
		return err
	}
	policy, err := os.ReadFile("docs/policy.md")
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "sockeye-policy.5"), policyPage(string(policy)), 0o644)
}
