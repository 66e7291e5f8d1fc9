// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"sockeye/internal/agent"
	"sockeye/internal/bigtcp/bench"
	"sockeye/internal/bigtcp/netif"
	"sockeye/internal/bigtcp/sizing"
	"sockeye/internal/config"
)

// benchPort is where a server listens by default, and a client looks for it.
const benchPort = 7734

// benchServing is what bigtcp bench --serve prints with -o json.
type benchServing struct {
	Listen string `json:"listen"`
	Key    string `json:"key"`
}

// bigtcpBench is what bigtcp bench was asked for.
type bigtcpBench struct {
	bench.Options
	place        bigtcpPlace
	serve, local bool
	listen, key  string
	size         string
	port         uint16
}

func (c *command) bigtcpBenchCommand() *cobra.Command {
	b := &bigtcpBench{Options: bench.Defaults()}
	cmd := &cobra.Command{
		Use:   "bench [HOST]",
		Short: "Measure what larger packets give, to another host or within this one",
		Long: `Bench measures request and response, and streams, with large packets off and on
in turns, and prints latency, transactions, throughput and CPU of both, with the
ratio of on to off, for IPv6 and for IPv4.

Start it with --serve on one host; it prints a key. On the other, name the first
one and the key. Both set the sizes of the interface between them while they
measure, and give back what was there before, also when they are interrupted or
the other one vanishes; after a kill -9, sockeye bigtcp revert does. The server
serves who knows the key, one at a time. What the two say is not encrypted.

With --local it measures between two network namespaces of its own, of which
nothing is left.

CPU is what the two threads that send and receive have worked, with what the
kernel does in interrupts on their back, and the softirq thread of their CPU.`,
		Example: `  sockeye bigtcp bench --serve
  sockeye bigtcp bench 192.0.2.7 --key 5kz7x2n4mqh3xsw7yqjz4c2e
  sockeye bigtcp bench --local --rounds 20`,
		Args: func(cmd *cobra.Command, args []string) error {
			if b.serve || b.local {
				return arguments(0, 0, "")(cmd, args)
			}
			return arguments(1, 1, "HOST")(cmd, args)
		},
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := b.read(cmd); err != nil {
				return err
			}
			switch {
			case b.serve:
				return c.benchServe(cmd, b)
			case b.local:
				return c.benchLocal(cmd, b)
			}
			return c.benchRemote(cmd, b, args[0])
		},
	}
	b.place.flags(cmd)
	flags := cmd.Flags()
	flags.BoolVar(&b.serve, "serve", false, "be the other end of a bench, until Ctrl-C")
	flags.StringVar(&b.listen, "listen", fmt.Sprintf("[::]:%d", benchPort), "address to serve at")
	flags.StringVar(&b.key, "key", "", "the key that the server printed")
	flags.Uint16Var(&b.port, "port", benchPort, "the server's port")
	flags.BoolVar(&b.local, "local", false, "measure between two network namespaces of this host")
	flags.StringVar(&b.Path, "path", b.Path, "with --local, what is between the two: bridge, veth (nothing) or router")
	flags.BoolVar(&b.TwoCPUs, "two-cpus", false, "with --local, each end on a CPU of its own")
	flags.StringVar(&b.size, "size", fmt.Sprint(b.Size), "largest packet while on, as in 192KB")
	flags.IntVar(&b.Message, "message", b.Message, "bytes of a request, and of its response")
	flags.IntVar(&b.Rounds, "rounds", b.Rounds, "how often everything is measured")
	flags.String("for", b.For.String(), "how long a run is measured, as in 1s")
	completeFlag(cmd, "path", bench.Paths...)
	for _, free := range []string{"listen", "key", "port", "size", "message", "rounds", "for"} {
		completeFlag(cmd, free)
	}
	return cmd
}

// benchFlags are those of one way to use bench, which the others may not have.
var benchFlags = map[string][]string{
	"--serve": {"listen", "netns", "state-dir"},
	"--local": {"path", "two-cpus", "size", "message", "rounds", "for"},
	"HOST":    {"key", "port", "netns", "state-dir", "size", "message", "rounds", "for"},
}

// read makes options of the flags.
func (b *bigtcpBench) read(cmd *cobra.Command) error {
	way := "HOST"
	switch {
	case b.serve && b.local:
		return agent.Usage(errors.New("--serve and --local do not go together"), "--local needs no other end")
	case b.serve:
		way = "--serve"
	case b.local:
		way = "--local"
	}
	var other string
	cmd.Flags().Visit(func(f *pflag.Flag) {
		for _, flags := range benchFlags {
			if other == "" && slices.Contains(flags, f.Name) && !slices.Contains(benchFlags[way], f.Name) {
				other = f.Name
			}
		}
	})
	if other != "" {
		return agent.Usage(fmt.Errorf("--%s and %s do not go together", other, way), cmd.CommandPath()+" --help says what does")
	}
	if b.serve {
		return nil
	}
	if way == "HOST" && b.key == "" {
		return agent.Usage(errors.New("--key is missing"), "it is what sockeye bigtcp bench --serve prints on the other host")
	}
	size, err := config.ParseBigTCPSize(b.size)
	if err != nil {
		return agent.Usage(fmt.Errorf("--size: %w", err), "")
	}
	b.Size = size
	during, err := span(cmd, "for")
	if err != nil {
		return err
	}
	if during > 0 {
		b.For = during
		b.Warmup = min(b.Warmup, during)
	}
	return b.Check()
}

func (c *command) benchServe(cmd *cobra.Command, b *bigtcpBench) error {
	network, store, err := b.place.open()
	if err != nil {
		return err
	}
	defer network.Close()
	log := func(format string, args ...any) {
		fmt.Fprintf(c.Err, "sockeye: %s\n", printable(fmt.Sprintf(format, args...)))
	}
	server, err := bench.Listen(network, store, b.listen, log)
	if err != nil {
		return err
	}
	serving := benchServing{server.Address().String(), server.Key()}
	if err := c.print(serving, func(t *text) {
		t.line("serves at %s, until Ctrl-C; on the other host:", serving.Listen)
		t.line("  sockeye bigtcp bench HOST --key %s%s", serving.Key, benchPortFlag(serving.Listen))
	}); err != nil {
		return err
	}
	return server.Serve(cmd.Context())
}

// benchPortFlag is what a client needs for a server that listens elsewhere.
func benchPortFlag(listen string) string {
	if at, err := end(listen); err == nil && at.Port() != benchPort {
		return fmt.Sprintf(" --port %d", at.Port())
	}
	return ""
}

// open opens the namespace and the store.
func (p *bigtcpPlace) open() (*netif.Network, *sizing.Store, error) {
	network, err := netif.OpenNetwork(p.netns)
	if err != nil {
		return nil, nil, err
	}
	store, err := sizing.OpenStore(p.state)
	if err != nil {
		network.Close()
		return nil, nil, err
	}
	return network, store, nil
}

func (c *command) benchLocal(cmd *cobra.Command, b *bigtcpBench) error {
	defer c.benchProgress(b, len(bench.Families))()
	result, err := bench.Local(cmd.Context(), b.Options)
	return c.benched(result, err)
}

func (c *command) benchRemote(cmd *cobra.Command, b *bigtcpBench, host string) error {
	network, store, err := b.place.open()
	if err != nil {
		return err
	}
	defer network.Close()
	defer c.benchProgress(b, 1)()
	result, err := bench.Run(cmd.Context(), network, store, host, b.port, b.key, b.Options)
	return c.benched(result, err)
}

// benchProgress shows on a terminal how far it is, until its result is called.
func (c *command) benchProgress(b *bigtcpBench, families int) (end func()) {
	file, ok := behind(c.Err).(*os.File)
	if !ok {
		return func() {}
	}
	if _, err := unix.IoctlGetWinsize(int(file.Fd()), unix.TIOCGWINSZ); err != nil {
		return func() {}
	}
	b.Progress = func(done, of int) {
		left := time.Duration(of-done) * (b.For + b.Warmup)
		_ = toTerminal(c.Err, fmt.Sprintf("\r%d of %d runs, %v left%s", done, of, left.Round(time.Second), clearLine))
	}
	b.Progress(0, 4*b.Rounds*families)
	return func() { _ = toTerminal(c.Err, "\r"+clearLine) }
}

func (c *command) benched(result *bench.Result, err error) error {
	if err != nil {
		return err
	}
	return c.print(result, func(t *text) {
		for _, line := range result.Text() {
			t.line("%s", line)
		}
	})
}
