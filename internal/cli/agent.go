// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"log/slog"

	"github.com/spf13/cobra"

	"sockeye/internal/agent"
)

func (c *command) agentCommand() *cobra.Command {
	o := agent.Options{Version: Version}
	var level, format string
	cmd := &cobra.Command{
		Use:   "agent",
		Short: "Keep the host as the policy file says",
		Long: `The agent loads the programs, finds members, and registers their sockets. It
may be stopped, killed or upgraded at any time: steering goes on without it,
and the next agent takes over what it finds. SIGHUP applies the policy file.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var l slog.Level
			if err := l.UnmarshalText([]byte(level)); err != nil {
				return agent.Usage(fmt.Errorf("--log-level is %q", level), "debug, info, warn or error")
			}
			options := &slog.HandlerOptions{Level: l}
			switch format {
			case "text":
				o.Log = slog.New(slog.NewTextHandler(c.Err, options))
			case "json":
				o.Log = slog.New(slog.NewJSONHandler(c.Err, options))
			default:
				return agent.Usage(fmt.Errorf("--log-format is %q", format), "text or json")
			}
			o.RunDir = c.runDir
			return agent.Run(cmd.Context(), o)
		},
	}
	cmd.Flags().StringVar(&o.Policy, "policy", defaultPolicy, "policy file")
	cmd.Flags().StringVar(&o.StateDir, "state-dir", defaultStateDir, "directory of what is kept over reboots")
	cmd.Flags().StringVar(&o.Pins, "pins", defaultPins, "directory of the pins, in a bpffs")
	cmd.Flags().StringVar(&o.Group, "group", "", "group that may use the agent's socket: show all, and run members")
	cmd.Flags().StringVar(&level, "log-level", "info", "debug, info, warn or error")
	cmd.Flags().StringVar(&format, "log-format", "text", "text or json")
	return cmd
}

func (c *command) holdCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:    agent.KeeperCommand,
		Short:  "Hold the sockets that the agent hands over, while it is away",
		Hidden: true,
		RunE:   func(*cobra.Command, []string) error { return agent.Hold() },
	}
	// Read by the next agent in /proc, not here.
	cmd.Flags().String("pins", "", "")
	cmd.Flags().String("service", "", "")
	return cmd
}
