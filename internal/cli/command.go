// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"sockeye/internal/api"
	"sockeye/internal/config"
	"sockeye/internal/fault"
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

// arguments bounds the number of a command's arguments, which are called
// name; most is -1 for no bound.
func arguments(least, most int, name string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		switch {
		case len(args) < least:
			return fault.Usage(fmt.Errorf("%s is missing", name), "usage: "+cmd.UseLine())
		case most >= 0 && len(args) > most:
			return fault.Usage(fmt.Errorf("there is one argument too many: %q", args[most]), "usage: "+cmd.UseLine())
		}
		return nil
	}
}

// noCommand refuses words that are not commands, with the nearest one.
func noCommand(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	hint := cmd.CommandPath() + " --help lists the commands"
	var known []string
	for _, sub := range cmd.Commands() {
		if sub.IsAvailableCommand() {
			known = append(known, sub.Name())
		}
	}
	if near := config.Nearest(args[0], known); near != "" {
		hint = fmt.Sprintf("did you mean %s %s?", cmd.CommandPath(), near)
	}
	return fault.Usage(fmt.Errorf("there is no command %q", args[0]), hint)
}

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
