// SPDX-License-Identifier: Apache-2.0

// Package cli is Sockeye's command line: one file a command.
package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"sockeye/internal/agent"
)

// Environment is what commands touch of the world.
type Environment struct {
	Out, Err io.Writer
	In       io.Reader
	Now      func() time.Time
	// Exec replaces the process by a program, as execve(2) does.
	Exec func(path string, args, env []string) error
}

// Host is the environment of a real process.
func Host() Environment {
	return Environment{Out: os.Stdout, Err: os.Stderr, In: os.Stdin, Now: time.Now, Exec: unix.Exec}
}

// Main runs a command and returns its exit code.
func Main(args []string, env Environment) int {
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM)
	defer stop()
	return Run(ctx, args, env)
}

// Run runs a command until it is done or ctx ends, and returns its exit code.
func Run(ctx context.Context, args []string, env Environment) int {
	c := &command{Environment: env}
	root := c.root()
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return 0
	}
	var reported *silent
	if !errors.As(err, &reported) {
		c.report(err)
	}
	return agent.Code(err)
}

// silent is an error that the command has told itself.
type silent struct{ error }

func (s *silent) Unwrap() error { return s.error }

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

func (c *command) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "sockeye",
		Short: "Make every network device's traffic return to the same process",
		Long: `Sockeye steers all streams of a network device, TCP and UDP, to one process of
several that serve the same ports. The kernel does it, for unmodified programs.

Exit codes: 0 done, 1 failed, 2 wrong usage or policy, 3 the kernel cannot,
4 not permitted, 5 in conflict with what is there.`,
		SilenceErrors: true,
		SilenceUsage:  true,
		Args:          noCommand,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return cmd.Help()
		},
		PersistentPreRunE: func(*cobra.Command, []string) error {
			if c.output != "table" && c.output != "json" {
				return agent.Usage(fmt.Errorf("--output is %q", c.output), "table or json")
			}
			return nil
		},
	}
	root.SetOut(c.Out)
	root.SetErr(c.Err)
	root.SetIn(c.In)
	root.PersistentFlags().StringVar(&c.runDir, "run-dir", defaultRunDir, "directory of the agent's socket")
	root.PersistentFlags().StringVarP(&c.output, "output", "o", "table", "table or json")
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return agent.Usage(err, cmd.CommandPath()+" --help")
	})
	root.AddCommand(
		c.agentCommand(), c.holdCommand(), c.resetCommand(),
		c.runCommand(), c.registerCommand(), c.unregisterCommand(),
		c.statusCommand(), c.slotsCommand(), c.devicesCommand(), c.whereCommand(),
		c.checkCommand(), c.planCommand(), c.applyCommand(),
		c.doctorCommand(), c.versionCommand(),
	)
	for _, sub := range root.Commands() {
		sub.Args = usage(sub.Args)
	}
	return root
}

// noCommand refuses words that are not commands, with the nearest one.
func noCommand(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	hint := "sockeye --help lists the commands"
	if near := cmd.SuggestionsFor(args[0]); len(near) > 0 {
		hint = "did you mean " + strings.Join(near, " or ") + "?"
	}
	return agent.Usage(fmt.Errorf("there is no command %q", args[0]), hint)
}

// usage gives errors of arguments their exit code.
func usage(check cobra.PositionalArgs) cobra.PositionalArgs {
	if check == nil {
		check = cobra.NoArgs
	}
	return func(cmd *cobra.Command, args []string) error {
		err := check(cmd, args)
		var own *agent.Error
		if err == nil || errors.As(err, &own) {
			return err
		}
		return agent.Usage(err, cmd.UseLine())
	}
}

// report tells a person, or with -o json a program, what went wrong.
func (c *command) report(err error) {
	if c.output == "json" {
		c.json(agent.Failure{Error: err.Error(), Hint: agent.Hint(err), Code: agent.Code(err)})
		return
	}
	fmt.Fprintf(c.Err, "sockeye: %v\n", err)
	if hint := agent.Hint(err); hint != "" {
		fmt.Fprintf(c.Err, "hint: %s\n", hint)
	}
}

func (c *command) client() *agent.Client { return agent.NewClient(agent.SocketPath(c.runDir)) }

func (c *command) json(v any) error {
	e := json.NewEncoder(c.Out)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

// show prints v as JSON, or else as the table that rows writes, with tabs
// between columns.
func (c *command) show(v any, rows func(w io.Writer)) error {
	if c.output == "json" {
		return c.json(v)
	}
	w := tabwriter.NewWriter(c.Out, 0, 0, 2, ' ', 0)
	rows(w)
	return w.Flush()
}

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

// shorten cuts a command line to what fits a table.
func shorten(s string, width int) string {
	if r := []rune(s); len(r) > width {
		return string(r[:width-1]) + "…"
	}
	return s
}
