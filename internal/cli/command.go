// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"sockeye/internal/api"
)

// Environment is what commands touch of the world.
type Environment struct {
	Out, Err io.Writer
	In       io.Reader
	Now      func() time.Time
	// Exec replaces the process by a program, as execve(2) does.
	Exec func(path string, args, env []string) error
}

// command is one invocation.
type command struct {
	Environment
	runDir string
	output string
}

const (
	defaultRunDir   = "/run/sockeye"
	defaultStateDir = "/var/lib/sockeye"
	defaultPins     = "/sys/fs/bpf/sockeye"
	defaultPolicy   = "/etc/sockeye/policy.yaml"
)

func (c *command) client() *api.Client { return api.NewClient(api.SocketPath(c.runDir)) }

func (c *command) json(v any) error {
	var text bytes.Buffer
	e := json.NewEncoder(&text)
	e.SetIndent("", "  ")
	if err := e.Encode(v); err != nil {
		return err
	}
	_, err := c.Out.Write(escapeJSON(text.Bytes()))
	return err
}

// show prints v, a slice or what a pointer points to, as JSON, or else as the table that rows
// writes, with tabs between columns. Before that, v has its strings cleaned.
func (c *command) show(v any, rows func(w io.Writer)) error {
	if c.output == "json" {
		return c.json(v)
	}
	cleanStrings(v)
	w := tabwriter.NewWriter(c.Out, 0, 0, 2, ' ', 0)
	rows(w)
	return w.Flush()
}

// silent is an error that the command has told itself.
type silent struct{ error }

func (s *silent) Unwrap() error { return s.error }

// count is a number of things, as in 1 service and 2 services.
func count[N int | uint64](n N, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

// shorten cuts a command line to what fits a table: in the middle, as what
// tells members apart is at its end.
func shorten(s string, width int) string {
	r := []rune(s)
	if len(r) <= width {
		return s
	}
	head := width / 3
	return string(r[:head]) + "…" + string(r[len(r)-(width-head-1):])
}

func hint(w io.Writer, text string) {
	if text != "" {
		fmt.Fprintln(w, "hint:", text)
	}
}

func yesNo(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

// Version is set by the build.
var Version = "devel"
