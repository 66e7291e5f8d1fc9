// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"io"
	"runtime"

	"github.com/spf13/cobra"

	"sockeye/internal/bpf"
	"sockeye/internal/cli/command"
	"sockeye/internal/linux"
)

// version is the JSON output of version.
type version struct {
	Version string `json:"version"`
	Go      string `json:"go"`
	Arch    string `json:"arch"`
	Schema  uint32 `json:"pin_schema"`
	Kernel  string `json:"kernel"`
}

func (c *commands) versionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Show the version",
		RunE:  func(*cobra.Command, []string) error { return c.showVersion() },
	}
}

func (c *commands) showVersion() error {
	v := version{command.Version, runtime.Version(), runtime.GOARCH, bpf.Schema, linux.Release()}
	return c.Show(&v, func(w io.Writer) {
		fmt.Fprintf(w, "sockeye %s, %s %s, pin schema %d, Linux %s\n", v.Version, v.Go, v.Arch, v.Schema, v.Kernel)
	})
}
