// SPDX-License-Identifier: Apache-2.0

package steercmd

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/cli/command"
	"sockeye/internal/cli/isolatecmd"
	"sockeye/internal/fault"
	"sockeye/internal/gateway"
	"sockeye/internal/isolate"
)

func (c *commands) runCommand() *cobra.Command {
	var service string
	var slot int
	var isolated bool
	var i isolatecmd.Options
	cmd := &cobra.Command{
		Use:   "run [--service S] [--slot N] [--isolated] -- PROGRAM [ARGUMENT...]",
		Short: "Start a program as a member of a service",
		Long: `Run reserves a slot and executes the program. The agent registers the program
when it listens on all listeners of the service. The program and its sockets
must belong to a user of the service. The program gets no additional privileges.
The variables SOCKEYE_SERVICE and SOCKEYE_SLOT are added to its environment.

With --isolated, the program runs in its own network namespace without
privileges, as with sockeye isolate. The sockeye process is the gateway, and
its sockets are the member's sockets in the slot. Connections and datagrams
reach the ports of the service inside the namespace with the addresses of the
peers. The program must listen on the ports of the service, preferably on all
addresses, even if the policy assigns other ports to members. The slot is ready
when the program listens on all of these ports. It closes permanently when the
program closes one of them or exits. The program is terminated when the sockeye
process exits.

With --isolated, outbound connections are allowed only to the destinations of
--allow. If --allow is given, the name servers of the host are allowed too,
unless --no-dns is given: a program can exfiltrate data in DNS queries. The
description of --no-dns in sockeye isolate --help lists the remaining risks. If
root starts the command, gateway and program run as the user of the service or
of --user. --as-root is required if the service has no user or its user is root.
All restrictions of sockeye isolate apply.`,
		Example: `  sockeye run --service telemetry --slot 2 -- nfacctd -f /etc/pmacct/nfacctd-2.conf
  sockeye run --slot 2 --isolated --allow 10.0.0.7:9092/tcp -- nfacctd -f /etc/pmacct/nfacctd-2.conf`,
		Args: command.Arguments(1, -1, "PROGRAM"),
		RunE: func(cmd *cobra.Command, args []string) error {
			path, err := isolatecmd.FindProgram(args[0])
			if err != nil {
				return err
			}
			if !isolated {
				for _, name := range []string{"allow", "no-dns", "mtu", "verbose", "user", "as-root", "expose", "read", "write", "allow-userns", "require-sandbox"} {
					if cmd.Flags().Changed(name) {
						return fault.Usage(fmt.Errorf("--%s requires --isolated", name), "without --isolated the program uses the host's network")
					}
				}
			}
			m := api.Membership{Service: service}
			if cmd.Flags().Changed("slot") {
				m.Slot = &slot
			}
			var got api.ClaimedSlot
			if err := c.postToNewAgent(cmd.Context(), "/v1/run", m, &got); err != nil {
				return err
			}
			if got.Slot == nil {
				return errors.New("run member: the agent returned no slot")
			}
			env := append(isolatecmd.OwnEnvironment(), "SOCKEYE_SERVICE="+got.Service, fmt.Sprintf("SOCKEYE_SLOT=%d", *got.Slot))
			if isolated {
				return c.runIsolated(cmd.Context(), &i, &got, isolate.Setup{Program: path, Args: args, Env: env, Watched: true})
			}
			if err := c.Exec(path, args, env); err != nil {
				return fmt.Errorf("start %s: %w", path, err)
			}
			return nil
		},
	}
	cmd.Flags().SetInterspersed(false)
	cmd.Flags().StringVar(&service, "service", "", "service; optional if there is only one")
	cmd.Flags().IntVar(&slot, "slot", 0, "slot number; default: first free slot")
	cmd.Flags().BoolVar(&isolated, "isolated", false, "run the program in its own network namespace, without privileges")
	i.Flags(cmd)
	return cmd
}

// agentTimeout is the time that run waits for the agent, for scripts that start both.
const agentTimeout = 5 * time.Second

// postToNewAgent sends a POST request. While no agent listens, it retries for agentTimeout.
func (c *commands) postToNewAgent(ctx context.Context, path string, body, into any) error {
	for deadline := time.Now().Add(agentTimeout); ; {
		err := c.Client().Post(ctx, path, body, into)
		if !errors.Is(err, api.ErrNoAgent) || time.Now().After(deadline) {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// runIsolated runs the gateway of the program in this process, which is the member.
func (c *commands) runIsolated(ctx context.Context, i *isolatecmd.Options, m *api.ClaimedSlot, program isolate.Setup) error {
	protocols := map[string]uint8{"tcp": unix.IPPROTO_TCP, "udp": unix.IPPROTO_UDP}
	var sockets []gateway.MemberSocket
	for _, l := range m.Listeners {
		sockets = append(sockets, gateway.MemberSocket{
			Protocol: protocols[l.Protocol], Address: l.Address, V6Only: l.V6Only, First: l.First, Last: l.Last,
		})
	}
	if len(sockets) == 0 {
		return fault.Usage(errors.New("run member: the agent returned no listeners"), "the agent may be an older version than this command: restart the agent")
	}
	who, err := i.Account(m.User)
	if err != nil {
		return err
	}
	if err := who.IsMember(m.User); err != nil {
		return err
	}
	i.NoOutbound = len(i.Allow) == 0
	listen := func() ([]gateway.Forward, error) { return gateway.ListenAsMember(sockets, *m.Slot) }
	return isolatecmd.Join(ctx, c.Command, i, &isolate.Guest{Setup: program}, who, listen)
}
