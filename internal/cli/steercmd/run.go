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
		Long: `Run reserves a slot for this process and becomes the program, which is
registered when it listens on all of the service's listeners. It and its sockets
must belong to a user of the service. The program has no rights that it would
not have otherwise; SOCKEYE_SERVICE and SOCKEYE_SLOT in its environment say
where it is.

With --isolated the program runs in a network of its own, as by sockeye isolate,
without any privilege: this process takes the slot with sockets of its own, and
is the gateway. Connections and datagrams reach the ports of the service inside,
with the peers' addresses. The program listens on the service's own ports, best
on all addresses, also where members have ports of their own; the slot opens
when it listens on all of them. It may go nowhere by itself, but to where
--allow lets it, and then to the host's name servers unless --no-dns is given:
questions to them can carry data out; sockeye isolate --help says what --no-dns
leaves. The slot closes for good
when the program closes one of them or ends, and the program ends with this
process. Started by root, both become the user of the service, or --user; with a
service that has no user, or root, say --as-root. The program is confined as by
sockeye isolate.`,
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
						return fault.Usage(fmt.Errorf("--%s goes with --isolated", name), "without it the program has the host's network")
					}
				}
			}
			m := api.Membership{Service: service}
			if cmd.Flags().Changed("slot") {
				m.Slot = &slot
			}
			var got api.Place
			if err := c.postToNewAgent(cmd.Context(), "/v1/run", m, &got); err != nil {
				return err
			}
			if got.Slot == nil {
				return errors.New("run member: the agent named no slot")
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
	cmd.Flags().StringVar(&service, "service", "", "service; may be left out where there is only one")
	cmd.Flags().IntVar(&slot, "slot", 0, "slot; the first free one by default")
	cmd.Flags().BoolVar(&isolated, "isolated", false, "in a network of its own, without any privilege")
	i.Flags(cmd)
	return cmd
}

// patienceForAgent is how long a program waits for an agent that was started beside it, as by one script.
const patienceForAgent = 5 * time.Second

func (c *commands) postToNewAgent(ctx context.Context, path string, body, into any) error {
	for end := time.Now().Add(patienceForAgent); ; {
		err := c.Client().Post(ctx, path, body, into)
		if !errors.Is(err, api.ErrNoAgent) || time.Now().After(end) {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// runIsolated is the member itself, and the gateway of the program.
func (c *commands) runIsolated(ctx context.Context, i *isolatecmd.Options, m *api.Place, program isolate.Setup) error {
	protocols := map[string]uint8{"tcp": unix.IPPROTO_TCP, "udp": unix.IPPROTO_UDP}
	var sockets []gateway.MemberSocket
	for _, l := range m.Listeners {
		sockets = append(sockets, gateway.MemberSocket{
			Protocol: protocols[l.Protocol], Address: l.Address, V6Only: l.V6Only, First: l.First, Last: l.Last,
		})
	}
	if len(sockets) == 0 {
		return fault.Usage(errors.New("run member: the agent does not say what it listens on"), "the agent may be older than this command: restart it")
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
