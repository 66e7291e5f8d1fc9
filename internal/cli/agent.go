// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"log/slog"

	"github.com/spf13/cobra"

	"sockeye/internal/agent"
	"sockeye/internal/cli/command"
	"sockeye/internal/fault"
	"sockeye/internal/journal"
	"sockeye/internal/steer/keeper"
)

func (c *commands) agentCommand() *cobra.Command {
	o := agent.Options{Version: command.Version}
	var level, format string
	cmd := &cobra.Command{
		Use:   "agent",
		Short: "Run the agent, which applies and maintains the policy",
		Long: `The agent loads the BPF programs, finds members, and registers their sockets.
It can be stopped, killed or upgraded at any time: pinned programs stay
attached, and the next agent adopts them. On SIGHUP, the agent applies the
policy file again; with --watch-policy also when the file is replaced. If the
policy file is invalid at startup, the agent starts with the last applied
policy, logs an error, and reports the error in sockeye status. If the last
applied policy is invalid too, for example after an upgrade, the agent does not
start.

Log lines to the systemd journal have a priority prefix and no timestamp.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var l slog.Level
			if err := l.UnmarshalText([]byte(level)); err != nil {
				return fault.Usage(fmt.Errorf("--log-level is %q", level), "debug, info, warn or error")
			}
			options := &slog.HandlerOptions{Level: l}
			switch {
			case format != "text" && format != "json":
				return fault.Usage(fmt.Errorf("--log-format is %q", format), "text or json")
			case c.toJournal():
				o.Log = slog.New(journal.NewHandler(c.Err, l, format == "json"))
			case format == "json":
				o.Log = slog.New(slog.NewJSONHandler(c.Err, options))
			default:
				o.Log = slog.New(slog.NewTextHandler(c.Err, options))
			}
			o.RunDir = c.RunDir
			return agent.Run(cmd.Context(), o)
		},
	}
	cmd.Flags().StringVar(&o.Policy, "policy", command.DefaultPolicy, "policy file")
	cmd.Flags().StringVar(&o.StateDir, "state-dir", command.DefaultStateDir, "persistent state directory")
	cmd.Flags().StringVar(&o.Pins, "pins", command.DefaultPins, "pin directory, in a bpffs")
	cmd.Flags().StringVar(&o.Group, "group", "", "group with access to the agent's socket, for read-only commands and run")
	cmd.Flags().BoolVar(&o.WatchPolicy, "watch-policy", false, "apply the policy when a file of its directory is replaced, as the kubelet replaces those of a ConfigMap")
	cmd.Flags().StringVar(&level, "log-level", "info", "debug, info, warn or error")
	cmd.Flags().StringVar(&format, "log-format", "text", "text or json")
	return cmd
}

func (c *commands) keeperCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:    keeper.Command,
		Short:  "Keep the keeper sockets of a service open (started by the agent)",
		Hidden: true,
		RunE:   func(cmd *cobra.Command, _ []string) error { return keeper.Run(cmd.Context()) },
	}
	// The next agent reads these flags in /proc/PID/cmdline.
	cmd.Flags().String("pins", "", "")
	cmd.Flags().String("service", "", "")
	return cmd
}
