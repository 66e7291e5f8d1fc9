// SPDX-License-Identifier: Apache-2.0

// Package command has the shared parts of all commands: the environment, the client of the agent,
// output as JSON, table or text, and the checks of arguments.
package command

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"sockeye/internal/api"
)

// Environment has the external dependencies of commands. Tests replace it.
type Environment struct {
	Out, Err io.Writer
	In       io.Reader
	Now      func() time.Time
	// Exec replaces this process with a program (execve(2)).
	Exec func(path string, args, env []string) error
}

// Command is one invocation of sockeye.
type Command struct {
	Environment
	RunDir string // directory of the agent's socket
	Output string // "table" or "json"
}

// Defaults of the options that name paths.
const (
	DefaultRunDir   = "/run/sockeye"
	DefaultStateDir = "/var/lib/sockeye"
	DefaultPins     = "/sys/fs/bpf/sockeye"
	DefaultPolicy   = "/etc/sockeye/policy.yaml"
)

// Client returns a client of the agent.
func (c *Command) Client() *api.Client { return api.NewClient(api.SocketPath(c.RunDir)) }

// Show prints v as JSON, or as the table that rows writes with a tab between columns. v is a slice
// or a pointer: Show replaces unprintable characters in the strings of v before it calls rows.
func (c *Command) Show(v any, rows func(w io.Writer)) error {
	if c.Output == "json" {
		return c.JSON(v)
	}
	cleanStrings(v)
	w := tabwriter.NewWriter(c.Out, 0, 0, 2, ' ', 0)
	rows(w)
	return w.Flush()
}

// JSON prints v as JSON that is safe for a terminal.
func (c *Command) JSON(v any) error {
	var text bytes.Buffer
	e := json.NewEncoder(&text)
	e.SetIndent("", "  ")
	if err := e.Encode(v); err != nil {
		return err
	}
	_, err := c.Out.Write(EscapeJSON(text.Bytes()))
	return err
}

// Reported is an error that the caller does not print: the command has printed it, or the exit code
// is sufficient.
type Reported struct{ Err error }

func (r *Reported) Error() string { return r.Err.Error() }

// Unwrap returns the error, which has the exit code.
func (r *Reported) Unwrap() error { return r.Err }

// OrDash returns s, or "-" if s is empty.
func OrDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

// Shorten cuts a command line to width columns. It removes the middle, because members of a
// service often differ only at the end.
func Shorten(s string, width int) string {
	r := []rune(s)
	if len(r) <= width {
		return s
	}
	head := width / 3
	return string(r[:head]) + "…" + string(r[len(r)-(width-head-1):])
}

// Hint prints the line "hint: text" if text is not empty.
func Hint(w io.Writer, text string) {
	if text != "" {
		fmt.Fprintln(w, "hint:", text)
	}
}

// YesNo returns "yes" or "no".
func YesNo(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

// Version is the version of the binary, set by the linker (-X).
var Version = "devel"
