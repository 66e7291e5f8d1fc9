// SPDX-License-Identifier: Apache-2.0

// Package cli is the command line of Sockeye. The commands of the agent and of the whole policy are in this package,
// one file each; the commands of a domain are in a package of their own.
package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/cli/bigtcpcmd"
	"sockeye/internal/cli/command"
	"sockeye/internal/cli/fleetcmd"
	"sockeye/internal/cli/isolatecmd"
	"sockeye/internal/cli/socketscmd"
	"sockeye/internal/cli/steercmd"
	"sockeye/internal/cli/topcmd"
	"sockeye/internal/cli/tracecmd"
	"sockeye/internal/cli/tunecmd"
	"sockeye/internal/config"
	"sockeye/internal/fault"
	"sockeye/internal/journal"
)

// commands are the commands of the agent and of the whole policy.
type commands struct{ *command.Command }

// Host returns the environment of a real process.
func Host() command.Environment {
	return command.Environment{Out: os.Stdout, Err: os.Stderr, In: os.Stdin, Now: time.Now, Exec: unix.Exec}
}

// Main runs a command and returns its exit code.
func Main(args []string, env command.Environment) int {
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM)
	defer stop()
	return Run(ctx, args, env)
}

// Run runs a command until it returns or ctx is done, and returns its exit code.
func Run(ctx context.Context, args []string, env command.Environment) int {
	out, errs := &command.Screen{To: env.Out}, &command.Screen{To: env.Err}
	defer out.End()
	defer errs.End()
	env.Out, env.Err = out, errs
	c := &commands{&command.Command{Environment: env}}
	root := c.root()
	c.Output = wantedOutput(args)
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return 0
	}
	var reported *command.Reported
	if !errors.As(err, &reported) {
		c.report(err)
	}
	return fault.Code(err)
}

// wantedOutput returns the output format for errors that occur before the flags are parsed.
func wantedOutput(args []string) string {
	for i, arg := range args {
		switch {
		case arg == "--":
			return "table"
		case slices.Contains([]string{"-ojson", "-o=json", "--output=json"}, arg),
			i > 0 && arg == "json" && slices.Contains([]string{"-o", "--output"}, args[i-1]):
			return "json"
		}
	}
	return "table"
}

// Root returns the tree of commands, for generators of documentation.
func Root(env command.Environment) *cobra.Command {
	return (&commands{&command.Command{Environment: env}}).root()
}

func (c *commands) root() *cobra.Command {
	var version bool
	root := &cobra.Command{
		Use:   "sockeye",
		Short: "Steer the traffic of each router to one process, tune and trace TCP, and isolate programs",
		Long: `Sockeye steers all TCP and UDP traffic from one router to the same worker
process when several processes share its ports, and sets TCP parameters of
connections by policy. It traces the latency of messages by stage, configures
packets above 64 KB inside the host (BIG TCP), and isolates programs without
privileges. Programs need no modification.

Exit codes: 0 done, 1 failed, 2 wrong usage or policy, 3 not supported by the
kernel, 4 not permitted, 5 conflict.`,
		SilenceErrors: true,
		SilenceUsage:  true,
		Args:          command.NoCommand,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if version {
				return c.showVersion()
			}
			return cmd.Help()
		},
		PersistentPreRunE: func(*cobra.Command, []string) error {
			if c.Output != "table" && c.Output != "json" {
				return fault.Usage(fmt.Errorf("--output is %q", c.Output), "table or json")
			}
			return nil
		},
	}
	root.SetOut(c.Out)
	root.SetErr(c.Err)
	root.SetIn(c.In)
	root.PersistentFlags().StringVar(&c.RunDir, "run-dir", command.DefaultRunDir, "directory of the agent's socket")
	root.PersistentFlags().StringVarP(&c.Output, "output", "o", "table", "table or json")
	root.Flags().BoolVar(&version, "version", false, "print the version")
	root.SetFlagErrorFunc(badFlag)
	root.AddCommand(
		c.agentCommand(), c.keeperCommand(), c.initCommand(), c.resetCommand(), c.statusCommand(), c.checkCommand(), c.planCommand(), c.applyCommand(),
		c.doctorCommand(), c.eventsCommand(), c.supportCommand(), c.versionCommand(),
		tunecmd.New(c.Command), tracecmd.New(c.Command), bigtcpcmd.New(c.Command), socketscmd.New(c.Command), topcmd.New(c.Command),
	)
	root.AddCommand(steercmd.New(c.Command)...)
	root.AddCommand(isolatecmd.New(c.Command)...)
	root.AddCommand(fleetcmd.New(c.Command)...)
	root.SetHelpCommand(&cobra.Command{
		Use:   "help [COMMAND]",
		Short: "Show the description and the flags of a command",
		Args:  cobra.ArbitraryArgs,
		RunE: func(_ *cobra.Command, args []string) error {
			sub, rest, err := root.Find(args)
			if err != nil || len(rest) > 0 {
				return command.NoCommand(sub, rest)
			}
			sub.InitDefaultHelpFlag()
			return sub.Help()
		},
	})
	root.InitDefaultHelpCmd()
	root.InitDefaultCompletionCmd()
	for _, sub := range root.Commands() {
		if sub.Name() == "completion" {
			sub.Args = nil // finish adds a check with Sockeye's messages
			for _, shell := range sub.Commands() {
				shell.Args = nil
			}
		}
		finish(sub)
	}
	return root
}

// finish sets the common properties of a command and its subcommands. A command with subcommands accepts arguments only
// if it defines Args, and shows its help if it has no run function.
func finish(cmd *cobra.Command) {
	if !cmd.HasSubCommands() {
		cmd.Args = usage(cmd.Args)
		return
	}
	if cmd.Args == nil {
		cmd.Args = command.NoCommand
	}
	if !cmd.Runnable() {
		cmd.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
	}
	for _, sub := range cmd.Commands() {
		finish(sub)
	}
}

// badFlag replaces error messages of the flag parser.
func badFlag(cmd *cobra.Command, err error) error {
	hint := cmd.CommandPath() + " --help lists the flags"
	if unknown, ok := errors.AsType[*pflag.NotExistError](err); ok {
		var known []string
		cmd.Flags().VisitAll(func(f *pflag.Flag) { known = append(known, f.Name) })
		name := unknown.GetSpecifiedName()
		if near := config.Nearest(name, known); near != "" && len(name) > 1 {
			hint = "did you mean --" + near + "?"
		}
	}
	if value, ok := errors.AsType[*pflag.InvalidValueError](err); ok {
		f := value.GetFlag()
		err = fmt.Errorf("--%s is %q", f.Name, value.GetValue())
		if f.Value.Type() == "int" {
			hint = "a whole number"
		}
	}
	return fault.Usage(err, hint)
}

// usage adds the exit code to errors of arguments.
func usage(check cobra.PositionalArgs) cobra.PositionalArgs {
	if check == nil {
		check = command.Arguments(0, 0, "")
	}
	return func(cmd *cobra.Command, args []string) error {
		err := check(cmd, args)
		var own *fault.Error
		if err == nil || errors.As(err, &own) {
			return err
		}
		return fault.Usage(err, "usage: "+cmd.UseLine())
	}
}

// report prints an error, as JSON with -o json.
func (c *commands) report(err error) {
	if c.Output == "json" {
		if c.JSON(api.Failure{Error: fault.Message(err), Hint: fault.Hint(err), Code: fault.Code(err)}) == nil {
			return
		}
		// The standard output fails: the standard error has the reason.
	}
	text := fmt.Sprintf("sockeye: %s\n", fault.Message(err))
	if hint := fault.Hint(err); hint != "" {
		text += fmt.Sprintf("hint: %s\n", hint)
	}
	if c.toJournal() {
		text = journal.Lines(journal.Error, text)
	}
	fmt.Fprint(c.Err, text)
}

// toJournal reports whether errors and logs go to systemd's journal.
func (c *commands) toJournal() bool {
	f, ok := command.Underlying(c.Err).(*os.File)
	return ok && journal.Connected(f)
}
