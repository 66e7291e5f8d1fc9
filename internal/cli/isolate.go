// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"sockeye/internal/agent"
	"sockeye/internal/gateway"
	"sockeye/internal/isolate"
	"sockeye/internal/sandbox"
	"sockeye/internal/tun"
)

// Addresses that stand for something else inside.
var (
	// nameServers stand for the host's name servers.
	nameServers = []netip.Addr{
		netip.MustParseAddr("169.254.53.53"), netip.MustParseAddr("169.254.53.54"), netip.MustParseAddr("169.254.53.55"),
	}
	// host4 and host6 are from where connections of the host itself come.
	host4 = netip.MustParseAddr("169.254.53.1")
	host6 = netip.MustParseAddr("fd53:6f63:6b65:7965::1")
	// fallback4 and fallback6 are the guest's where the host has none.
	fallback4 = netip.MustParseAddr("169.254.53.2")
	fallback6 = netip.MustParseAddr("fd53:6f63:6b65:7965::2")
)

// Of the guest's interface, in bytes: the least that IPv6 needs, and the largest that
// TUN takes with whole packets.
const (
	leastMTU = 1280
	mostMTU  = 65520
)

// lingerTime is how long the gateway goes on when the program has ended, for what that has
// sent and the host's sockets have not taken yet.
const lingerTime = 5 * time.Second

// interfaceName is that of the guest's interface.
const interfaceName = "sockeye0"

// resolvConf is where the host's name servers are, and behindStub where systemd-resolved names
// those that it asks itself.
const (
	resolvConf = "/etc/resolv.conf"
	behindStub = "/run/systemd/resolve/resolv.conf"
)

// isolation is what a program in a network of its own is given.
type isolation struct {
	publish, allow []string
	noOutbound     bool
	noDNS          bool
	mtu            int
	netns          string
	pid            int
	pidGiven       bool
	verbose        bool

	// Of the program.
	user           string
	asRoot         bool
	allowUserns    bool
	expose         []string
	read, write    []string
	requireSandbox bool
}

func (c *command) isolateCommand() *cobra.Command {
	var i isolation
	cmd := &cobra.Command{
		Use:   "isolate [-p [ADDRESS:]PORT[:PORT][/udp]] ... [-- PROGRAM [ARGUMENT...]]",
		Short: "Run a program in a network of its own, joined to the host's sockets",
		Long: `Isolate runs a program in a user and a network namespace of their own, with one
interface, sockeye0. This process, outside, is its gateway: what the program
sends over TCP, UDP and ICMP echo goes through ordinary sockets of the host, and
what comes to a published port goes inside, with the peer's own address. No
privilege is needed, and the gateway gives up all that it does not need.

User. An ordinary user's program has that user. Root must say who the program
is: --user NAME, --user UID or --user UID:GID has both processes become that
user, without supplementary groups, with ports below 1024 of the host open
before; the group must not be root's, either. --as-root leaves the program root
to the host's files, and takes only the network and the capabilities away.

Inbound. -p [ADDRESS:]PORT[-PORT][:PORT[-PORT]][/tcp|/udp] publishes ports of
the host, by default on all its addresses, over TCP, and to the same port
inside. Ports below 1024 of the host need the rights that they always need;
inside, all are free to use.

Outbound. The program may go everywhere by default, except to the host's own
loopback addresses; an address of the host that the program has too is its own.
With --allow PREFIX[:PORT[-PORT]][/tcp|/udp|/icmp] it may go only there and to
the host's name servers; with --no-outbound nowhere, and it only answers. The
host itself is 169.254.53.1, or fd53:6f63:6b65:7965::1, inside: connections from
it come from there, and --allow 169.254.53.1:6379 leads to its 127.0.0.1:6379.
No other rule, and no default, does. The metadata addresses of clouds, such as
169.254.169.254 and fd00:ec2::254, give away the host's credentials: only an
--allow of the address itself leads there, not one of a larger prefix. UDP flows
and TCP connections of the program take at most a quarter of the host's port
range each: then the oldest flow is forgotten, and connections are refused.

Names. Inside, /etc/resolv.conf names 169.254.53.53 to 169.254.53.55, which
stand for the host's name servers, over UDP and TCP. So they do with --allow,
too: a program can send data to anybody in the names that it asks for. With
--no-dns there are none of these, and ports 53 and 853 of the name servers that
the host's /etc/resolv.conf and systemd-resolved name are closed, unless an
--allow names that very address, not a larger prefix. Other name servers, and
DNS over HTTPS, are reached where the program may go: give --allow as well. With
--no-dns, --no-outbound, and for a namespace that is there already, the file is
the host's, as it is.

Confinement. The program keeps the working directory, the environment without
SOCKEYE_* and without what names a hidden socket, standard input, output and
error, and the terminal, but no other descriptors. It has no capability, can
gain none (no_new_privs: sudo and ping with file capabilities do not work, ping
over datagram sockets does), and cannot change its user or groups; an ordinary
user's supplementary groups count for files, and show as nogroup. It sees its
own processes only, in a /proc of its own, and may send signals to no other
(from Linux 6.12 also not to those of its process group outside). A filter of
system calls leaves it sockets of the families unix, inet, inet6 and netlink;
denies io_uring, keyrings, bpf, perf, userfaultfd, kernel modules and mounts;
ends 32-bit programs; and keeps it from typing into the terminal (TIOCSTI). It
may make no user namespaces, which browsers and container tools ask for, but
with --allow-userns.

Sockets of the host that are files are hidden where they usually are: in /run
itself, in /run/user, /run/dbus, /run/systemd, /run/docker, /run/containerd,
/run/podman, /run/nscd, those of databases and a few more, of the X server, tmux
and ssh-agent in /tmp, and where SSH_AUTH_SOCK, DBUS_SESSION_BUS_ADDRESS,
DOCKER_HOST and the like lead. The system's log stays. --expose PATH leaves a
socket, or a folder of them. Other files are the host's, with the rights of the
user. With --read PATH or --write PATH (from Linux 5.13) the program reaches
only what these name, itself, /usr and what else programs need to start and to
find names (libraries, certificates, files of /etc for names, /proc, /dev/null
and the like).

What the kernel cannot do of this is said on standard error, a line each; with
--require-sandbox the program does not start then.

Signals that this process gets go to the program, as the terminal's do. Either
ends with the other, however that ends, and all processes that the program has
left behind end with it: it must stay in the foreground.

With --netns or --pid the gateway joins a network namespace that is there, until
it is interrupted, the path is removed or the process ends. An ordinary user may
join a namespace of its own if the user namespace maps the user to root, as
those of unshare -rn and rootless podman do. It needs nsenter, and no default
route inside.

The exit code is that of the program, or 128 and the number of the signal that
ended it. Before the program starts: 1 failed, 2 wrong usage or no such program,
user, process or namespace, 3 the kernel cannot, 4 not permitted, 5 a port is in
use, or the namespace has an interface sockeye0 or a default route.`,
		Example: `  sockeye isolate -- curl https://example.net/
  sockeye isolate -p 8080:80 -- python3 -m http.server 80
  sockeye isolate --no-outbound -p 1790 -p 127.0.0.1:4739/udp -- nfacctd -f nfacctd.conf
  sockeye isolate --allow 10.0.0.0/8:9092/tcp --allow '[2001:db8::/32]:443' -- ./exporter
  sockeye isolate --user nobody --read /etc/exporter --write /var/lib/exporter -- ./exporter   # by root
  sockeye isolate --netns /run/netns/lab -p 9000-9010`,
		Args: cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			i.pidGiven = cmd.Flags().Changed("pid")
			return c.isolate(cmd.Context(), &i, args)
		},
	}
	cmd.Flags().SetInterspersed(false)
	i.flags(cmd)
	cmd.Flags().StringArrayVarP(&i.publish, "publish", "p", nil, "port of the host that leads inside, as in 1790:1790/tcp; may be repeated")
	cmd.Flags().BoolVar(&i.noOutbound, "no-outbound", false, "the program may go nowhere by itself")
	cmd.Flags().StringVar(&i.netns, "netns", "", "join a network namespace that is there, by its path")
	cmd.Flags().IntVar(&i.pid, "pid", 0, "join the network namespace of a process")
	return cmd
}

// flags are those that every isolated program has.
func (i *isolation) flags(cmd *cobra.Command) {
	cmd.Flags().StringArrayVar(&i.allow, "allow", nil, "where the program may go, as in 10.0.0.0/8:9092/tcp; may be repeated")
	cmd.Flags().BoolVar(&i.noDNS, "no-dns", false, "no name server inside, nor ports 53 and 853 of the host's: questions to them can carry data out")
	cmd.Flags().IntVar(&i.mtu, "mtu", mostMTU, "of the interface inside, in bytes")
	cmd.Flags().StringVar(&i.user, "user", "", "whom the program is started as, as in nobody or 1000:1000; for root only")
	cmd.Flags().BoolVar(&i.asRoot, "as-root", false, "the program is root to the host's files; for root only")
	cmd.Flags().StringArrayVar(&i.expose, "expose", nil, "socket of the host, or folder of sockets, that the program may reach; may be repeated")
	cmd.Flags().StringArrayVar(&i.read, "read", nil, "file or folder that the program may read; it may reach no others; may be repeated")
	cmd.Flags().StringArrayVar(&i.write, "write", nil, "file or folder that the program may read and write; it may reach no others; may be repeated")
	cmd.Flags().BoolVar(&i.allowUserns, "allow-userns", false, "the program may make user namespaces")
	cmd.Flags().BoolVar(&i.requireSandbox, "require-sandbox", false, "do not start the program where the kernel cannot confine it in every way")
	cmd.Flags().BoolVar(&i.verbose, "verbose", false, "tell where the program may not go and what was counted, on standard error")
}

func (c *command) insideCommand() *cobra.Command {
	return &cobra.Command{
		Use:    isolate.InsideCommand,
		Short:  "Prepare the network of an isolated program, and become it",
		Hidden: true,
		RunE: func(*cobra.Command, []string) error {
			err := isolate.Inside()
			switch {
			case errors.Is(err, unix.EACCES):
				return &agent.Error{
					Err: err, Hint: "the program's user may not execute that path, or the interpreter that it names: see their modes, and those of the folders above",
					Code: agent.CodeNotPermitted,
				}
			case err != nil:
				return agent.Usage(err, "")
			}
			return nil
		},
	}
}

func (c *command) isolate(ctx context.Context, i *isolation, args []string) error {
	specs, err := i.forwards()
	if err != nil {
		return err
	}
	var guest isolate.Guest
	if guest.Existing, err = i.existing(); err != nil {
		return err
	}
	if guest.Existing != nil {
		defer guest.Existing.Close()
	}
	switch {
	case guest.Existing == nil && len(args) == 0:
		return agent.Usage(errors.New("PROGRAM is missing"), "name one behind --, or a namespace that is there with --netns or --pid")
	case guest.Existing != nil && len(args) > 0:
		return agent.Usage(errors.New("a namespace that is there and PROGRAM do not go together"), "start the program in it by nsenter or ip netns exec")
	case guest.Existing == nil:
		if guest.Program, err = findProgram(args[0]); err != nil {
			return err
		}
		guest.Args, guest.Env = args, ownEnvironment()
	}
	var who *account
	if guest.Existing != nil {
		if err := i.onlyGateway(); err != nil {
			return err
		}
	} else {
		if who, err = i.account(""); err != nil {
			return err
		}
	}
	listen := func() ([]gateway.Forward, error) { return gateway.Listen(specs) }
	return c.join(ctx, i, &guest, who, listen)
}

// onlyGateway refuses what is of a program, where there is none.
func (i *isolation) onlyGateway() error {
	for name, given := range map[string]bool{
		"--user": i.user != "", "--as-root": i.asRoot, "--allow-userns": i.allowUserns, "--expose": len(i.expose) > 0,
		"--read": len(i.read) > 0, "--write": len(i.write) > 0,
	} {
		if given {
			return agent.Usage(fmt.Errorf("%s and a namespace that is there do not go together", name), "it is for a PROGRAM that this command starts")
		}
	}
	return nil
}

// forwards reads what is published.
func (i *isolation) forwards() (specs []gateway.ForwardSpec, err error) {
	for _, text := range i.publish {
		f, err := gateway.ParseForward(text)
		if err != nil {
			return nil, agent.Usage(fmt.Errorf("--publish %w", err), "as in 1790:1790/tcp, 127.0.0.1:8080:80 or 9000-9010/udp")
		}
		specs = append(specs, f)
	}
	if err := gateway.Overlap(specs); err != nil {
		return nil, agent.Usage(fmt.Errorf("--publish %w", err), "a port of the host leads to one port inside")
	}
	return specs, nil
}

// outbound reads where the program may go, and what it finds in resolv.conf.
func (i *isolation) outbound() (out gateway.Outbound, resolver string, err error) {
	if i.noOutbound && len(i.allow) > 0 {
		return out, "", agent.Usage(errors.New("--no-outbound and --allow do not go together"), "with --allow the program may go nowhere else")
	}
	out.All = !i.noOutbound && len(i.allow) == 0
	out.Host = []netip.Addr{host4, host6}
	for _, text := range i.allow {
		r, err := gateway.ParseRule(text)
		if errors.Is(err, gateway.ErrNeverOutside) {
			return out, "", agent.Usage(fmt.Errorf("--allow %w", err), hostHint)
		}
		if err != nil {
			return out, "", agent.Usage(fmt.Errorf("--allow %w", err), "as in 10.0.0.0/8:9092/tcp, 192.0.2.1 or [2001:db8::/32]:443")
		}
		out.Rules = append(out.Rules, r)
	}
	if i.noOutbound {
		return out, "", nil
	}
	conf, err := readIfThere(resolvConf)
	if err != nil {
		return out, "", err
	}
	if !i.noDNS {
		out.DNS, resolver = isolate.NameServers(conf, nameServers)
		return out, resolver, nil
	}
	behind, err := readIfThere(behindStub)
	if err != nil {
		return out, "", err
	}
	out.Resolvers = isolate.Resolvers(conf + "\n" + behind)
	return out, "", nil
}

// readIfThere reads a file of name servers, "" if there is none.
func readIfThere(path string) (string, error) {
	text, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("read name servers: %w", err)
	}
	return string(text), nil
}

// hostHint is for who names an address that the program has itself, inside.
var hostHint = fmt.Sprintf("the loopback addresses of the host are %v and %v inside", host4, host6)

// pathHint is for who names what is no file or folder of the host.
const pathHint = "name a path that is there, and that the program's user may reach"

// existing opens the namespace that is to be joined, nil for none.
func (i *isolation) existing() (n *isolate.Namespace, err error) {
	switch {
	case i.pidGiven && i.netns != "":
		return nil, agent.Usage(errors.New("--netns and --pid do not go together"), "each names a namespace")
	case i.pidGiven:
		n, err = isolate.OpenPID(i.pid)
		switch {
		case errors.Is(err, unix.ESRCH):
			return nil, agent.Usage(fmt.Errorf("there is no process %d", i.pid), "it may have ended; name another with --pid")
		case errors.Is(err, isolate.ErrOwnNamespace):
			return nil, agent.Usage(fmt.Errorf("the network of process %d %w", i.pid, err), "name a process that has a network namespace of its own")
		case err != nil:
			return nil, notPermitted(fmt.Errorf("open network namespace of process %d: %w", i.pid, err), "the process must be your own")
		}
	case i.netns != "":
		n, err = isolate.OpenNetns(i.netns)
		switch {
		case errors.Is(err, isolate.ErrNoNamespace), errors.Is(err, isolate.ErrOwnNamespace):
			return nil, agent.Usage(fmt.Errorf("%s %w", i.netns, err), "as in /run/netns/NAME; ip netns lists them")
		case errors.Is(err, unix.ESRCH), errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENOTDIR):
			return nil, agent.Usage(fmt.Errorf("there is no namespace %s", i.netns), "as in /run/netns/NAME; ip netns lists them")
		case err != nil:
			return nil, notPermitted(fmt.Errorf("open network namespace %s: %w", i.netns, err), "it must be your own")
		}
	}
	return n, nil
}

// notPermitted gives an error a hint, and its code if it is one of rights.
func notPermitted(err error, hint string) error {
	if errors.Is(err, fs.ErrPermission) {
		return &agent.Error{Err: err, Hint: hint, Code: agent.CodeNotPermitted}
	}
	return err
}

// findProgram finds a program as the shell does.
func findProgram(name string) (string, error) {
	path, err := exec.LookPath(name)
	if err == nil {
		return path, nil
	}
	if lookup, ok := errors.AsType[*exec.Error](err); ok {
		err = lookup.Err
	}
	if file, ok := errors.AsType[*fs.PathError](err); ok {
		err = file.Err
	}
	return "", agent.Usage(fmt.Errorf("find program %s: %w", name, err), "name it as in the shell, or with its path")
}

// ownEnvironment is that of this process, without what an agent told it.
func ownEnvironment() (env []string) {
	for _, v := range os.Environ() {
		if !strings.HasPrefix(v, "SOCKEYE_") {
			env = append(env, v)
		}
	}
	return env
}

// refuseDirectories refuses a directory as a standard stream: the program could open what is hidden from there.
func refuseDirectories() error {
	for fd, name := range []string{"input", "output", "error"} {
		var st unix.Stat_t
		if unix.Fstat(fd, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFDIR {
			return agent.Usage(fmt.Errorf("standard %s is a directory, which would lead out of the isolation", name), "redirect it from a file, or from /dev/null")
		}
	}
	return nil
}

// join makes a guest and is its gateway, until the guest's program ends, or the namespace that
// was there already. The program's exit code is an error without a message. The sockets that
// listen opens lead inside; they are open before the program starts. Both processes become who, unless it is nil.
func (c *command) join(ctx context.Context, i *isolation, guest *isolate.Guest, who *account, listen func() ([]gateway.Forward, error)) (err error) {
	if i.mtu < leastMTU || i.mtu > mostMTU {
		return agent.Usage(fmt.Errorf("--mtu is %d", i.mtu), fmt.Sprintf("%d to %d bytes", leastMTU, mostMTU))
	}
	for _, list := range []struct {
		option string
		paths  []string
	}{{"--expose", i.expose}, {"--read", i.read}, {"--write", i.write}} {
		if slices.Contains(list.paths, "") {
			return agent.Usage(fmt.Errorf("%s names no path", list.option), pathHint)
		}
	}
	if guest.Existing == nil {
		if err := refuseDirectories(); err != nil {
			return err
		}
	}
	out, resolver, err := i.outbound()
	if err != nil {
		return err
	}
	if guest.Existing == nil {
		guest.ResolvConf = resolver
	}
	got := make(chan os.Signal, 8)
	if guest.Existing == nil {
		// From here on they are the program's; what nohup(1) has ignored, it ignores.
		for _, s := range isolate.PassedSignals {
			if !signal.Ignored(s) {
				signal.Notify(got, s)
			}
		}
		defer signal.Stop(got)
	}
	level := slog.LevelWarn
	if i.verbose {
		level = slog.LevelDebug
	}
	log := slog.New(slog.NewTextHandler(c.Err, &slog.HandlerOptions{Level: level}))
	if guest.Existing == nil {
		guest.AllowUserns, guest.Expose, guest.Read, guest.Write = i.allowUserns, i.expose, i.read, i.write
	}
	if who != nil {
		guest.Env = who.environment(guest.Env)
		if err := who.become(); err != nil {
			return err
		}
	}
	a4, a6 := isolate.HostAddresses()
	if !a4.IsValid() {
		a4 = fallback4
	}
	if !a6.IsValid() {
		a6 = fallback6
	}
	for n, r := range out.Rules {
		if a := r.Prefix.Addr(); r.Prefix.IsSingleIP() && (a == a4 || a == a6) {
			return agent.Usage(fmt.Errorf("--allow %q: the program has that address itself, as the host has", i.allow[n]), hostHint)
		}
	}
	guest.Interface = tun.Interface{Name: interfaceName, MTU: i.mtu, Addresses: []netip.Addr{a4, a6}}
	forwards, err := listen()
	if err != nil {
		return listenError(err, guest.Watched)
	}
	p, err := guest.Prepare([]string{"/proc/self/exe", isolate.InsideCommand})
	if err != nil {
		select {
		case s := <-got:
			// A key of the terminal has ended the process inside, too, before it was ready for that.
			if number, ok := s.(unix.Signal); ok {
				return exitCode(128 + int(number))
			}
		default:
		}
		return guestError(err, guest.Existing != nil)
	}
	if err := c.lacks(i, p.Missing); err != nil {
		p.Kill()
		return err
	}
	for _, w := range p.Warnings {
		fmt.Fprintf(c.Err, "sockeye: %s\n", w)
	}
	linger := lingerTime
	if guest.Existing != nil {
		linger = 0 // its programs go on, and their connections
	}
	g, err := gateway.New(gateway.Config{
		TUN: p.TUN, MTU: i.mtu, Guest4: a4, Guest6: a6, Host4: host4, Host6: host6,
		Forwards: forwards, Diag: p.Diag, Outbound: out, Kernel: p.Kernel, Log: log,
		Linger: linger,
	})
	if err != nil {
		p.Kill()
		return tooManyFiles(err)
	}
	box := sandbox.Gateway{Outbound: out, Listens: guest.Watched}
	if guest.Existing == nil {
		box.Child = p.PID()
	}
	terminal := openTerminal()
	gateway.OwnProcess()
	missing, err := box.Enter()
	if err != nil {
		p.Kill()
		return err
	}
	for n, name := range missing {
		missing[n] = "the gateway is not confined by " + name
	}
	if err := c.lacks(i, missing); err != nil {
		p.Kill()
		return err
	}
	defer g.LogCounts(log, "ended")
	log.Info("joined", "interface", interfaceName, "ipv4", a4, "ipv6", a6, "ports", len(forwards))
	if guest.Existing != nil {
		fmt.Fprintf(c.Out, "joined by %s; interrupt it to end\n", interfaceName)
		return serve(ctx, g, guest.Existing.Ended)
	}
	if ctx.Err() != nil && len(got) == 0 {
		// By a signal from before they were the program's.
		p.Kill()
		return errors.New("interrupted before the program started")
	}
	return serve(context.WithoutCancel(ctx), g, func(running context.Context) error {
		return runProgram(running, p, got, terminal)
	})
}

// lacks says by what the kernel does not confine the program or its gateway, or fails if all was asked for.
func (c *command) lacks(i *isolation, missing []string) error {
	if len(missing) > 0 && i.requireSandbox {
		return &agent.Error{
			Err:  fmt.Errorf("the sandbox is incomplete: %s", strings.Join(missing, "; ")),
			Hint: "without --require-sandbox the program starts nonetheless", Code: agent.CodeUnsupported,
		}
	}
	for _, m := range missing {
		fmt.Fprintf(c.Err, "sockeye: the sandbox is incomplete: %s\n", m)
	}
	return nil
}

// serve is the gateway until work has ended, or ctx. If the gateway ends before, the context
// of work ends.
func serve(ctx context.Context, g *gateway.Gateway, work func(context.Context) error) error {
	running, stop := context.WithCancel(ctx)
	defer stop()
	ended := make(chan error, 1)
	go func() {
		defer stop()
		ended <- g.Run(running)
	}()
	err := work(running)
	stop()
	if failed := <-ended; failed != nil {
		return failed
	}
	return err
}

// runProgram starts the program that was prepared, and stands for it until it ends.
func runProgram(ctx context.Context, p *isolate.Prepared, got <-chan os.Signal, terminal terminal) error {
	if terminal.foreground() { // asked before a shell inside takes it
		defer terminal.take()
	}
	if err := p.Go(); err != nil {
		p.Kill()
		return err
	}
	early := len(got)
	pass := make(chan os.Signal, 8)
	go func() {
		for s := range got {
			// What a key makes, the terminal has sent to the program too, if that was there.
			key := s == unix.SIGINT || s == unix.SIGQUIT
			if early--; early < 0 && key && terminal.foreground() {
				continue
			}
			pass <- s
		}
	}()
	code, err := p.Wait(ctx, pass)
	if err == nil && code != 0 {
		return exitCode(code)
	}
	return err
}

// exitCode is the end of the program, which needs no words.
func exitCode(code int) error {
	return &silent{&agent.Error{Err: errors.New("the program failed"), Code: code}}
}

// terminal is the terminal that controls this process.
type terminal struct {
	file  *os.File // nil if there is none
	group int      // of processes, this one's
}

func openTerminal() terminal {
	f, err := os.OpenFile("/dev/tty", os.O_RDONLY|unix.O_NOCTTY, 0)
	if err != nil {
		return terminal{}
	}
	return terminal{f, unix.Getpgrp()}
}

// foreground tells whether its keys make signals for this process, and the program.
func (t terminal) foreground() bool {
	if t.file == nil {
		return false
	}
	group, err := unix.IoctlGetInt(int(t.file.Fd()), unix.TIOCGPGRP)
	return err == nil && group == t.group
}

// take gives the keys back to this process' group, which had them. A shell inside gave itself a group of its own, and does
// not know the number of the one from before, which is outside its namespace.
func (t terminal) take() {
	signal.Ignore(unix.SIGTTOU)
	_ = unix.IoctlSetPointerInt(int(t.file.Fd()), unix.TIOCSPGRP, t.group)
}

// listenError says what to do about a port of the host that could not be had, of a member's
// service or published.
func listenError(err error, member bool) error {
	failed, ok := errors.AsType[*gateway.ListenError](err)
	if !ok {
		return err
	}
	port := int(failed.At.Port())
	another := fmt.Sprintf("publish another port of the host, as in -p %d:%d", freePort(port), port)
	switch {
	case errors.Is(err, unix.EADDRINUSE):
		if member {
			another = "the members of a service are of one user, and no other program may have the port"
		}
		return &agent.Error{Err: err, Hint: another, Code: agent.CodeConflict}
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		var hints []string
		if first, ok := readSysctl("net/ipv4/ip_unprivileged_port_start"); ok && port < first {
			hints = append(hints, fmt.Sprintf("ports below %d are for root (sysctl net.ipv4.ip_unprivileged_port_start)", first))
		}
		if !member {
			hints = append(hints, another)
		}
		return &agent.Error{Err: err, Hint: strings.Join(hints, "; "), Code: agent.CodeNotPermitted}
	case errors.Is(err, unix.EADDRNOTAVAIL):
		return agent.Usage(err, "the host has no such address")
	case errors.Is(err, unix.EAFNOSUPPORT):
		return &agent.Error{Err: err, Hint: "this kernel has no IPv6", Code: agent.CodeUnsupported}
	}
	return tooManyFiles(err)
}

// freePort is another port that an ordinary user may have, to name in a hint.
func freePort(port int) int {
	if port < 57536 {
		return port + 8000
	}
	return port - 8000
}

func tooManyFiles(err error) error {
	if errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) {
		return &agent.Error{Err: err, Hint: "publish fewer ports, or raise the limit of open files (ulimit -Hn)", Code: agent.CodeFailed}
	}
	return err
}

func readSysctl(name string) (int, bool) {
	text, err := os.ReadFile("/proc/sys/" + name)
	if err != nil {
		return 0, false
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(text)))
	return n, err == nil
}

// guestError says what to do about a guest that could not be made. If it exists already,
// it is its own kernel that refuses.
func guestError(err error, exists bool) error {
	if ended, ok := errors.AsType[*isolate.EndedError](err); ok && slices.Contains(isolate.PassedSignals, os.Signal(ended.Signal)) {
		return exitCode(128 + int(ended.Signal)) // by a key of the terminal
	}
	failed, ok := errors.AsType[*isolate.StepError](err)
	if !ok {
		return tooManyFiles(err)
	}
	refused := errors.Is(err, fs.ErrPermission)
	hint, code := "", agent.CodeFailed
	switch failed.Step {
	case isolate.StepNamespaces, isolate.StepRights:
		switch {
		case refused, errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EUSERS):
			hint, code = userNamespaceHint(), agent.CodeNotPermitted
		case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOSYS):
			hint, code = "the kernel has no user namespaces (CONFIG_USER_NS)", agent.CodeUnsupported
		}
	case isolate.StepDevice:
		switch {
		case refused:
			hint, code = "it is open to all on most hosts: chmod 0666 /dev/net/tun", agent.CodeNotPermitted
		case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENODEV), errors.Is(err, unix.ENXIO):
			hint, code = "load it by modprobe tun; in a container, give it the device", agent.CodeUnsupported
		}
	case isolate.StepInterface:
		switch {
		case refused && exists:
			hint, code = "you must be root in the namespace's user namespace", agent.CodeNotPermitted
		case refused:
			hint, code = userNamespaceHint(), agent.CodeNotPermitted
		case errors.Is(err, unix.EBUSY), errors.Is(err, fs.ErrExist):
			hint, code = "it must have no interface "+interfaceName+", as another gateway makes, and no default route", agent.CodeConflict
		}
	case isolate.StepExpose, isolate.StepFiles:
		hint, code = pathHint, agent.CodeUsage
	case isolate.StepLandlock:
		hint, code = "--read and --write need landlock, of Linux 5.13", agent.CodeUnsupported
	case isolate.StepResolver:
		hint = "--no-dns leaves it as it is"
	case isolate.StepJoin:
		hint, code = "you must be root in the namespace's user namespace", agent.CodeNotPermitted
		if errors.Is(err, exec.ErrNotFound) {
			hint, code = "install util-linux", agent.CodeFailed
		}
	}
	return &agent.Error{Err: err, Hint: hint, Code: code}
}

// userNamespaceHint names the sysctl that forbids user namespaces, or those that may.
func userNamespaceHint() string {
	for _, c := range []struct {
		name   string
		forbid int
		hint   string
	}{
		{"kernel/unprivileged_userns_clone", 0, "set sysctl kernel.unprivileged_userns_clone to 1"},
		{"user/max_user_namespaces", 0, "raise sysctl user.max_user_namespaces, which is 0; or, inside an isolated program, start that one with --allow-userns"},
		{"user/max_pid_namespaces", 0, "raise sysctl user.max_pid_namespaces, which is 0"},
		{"user/max_net_namespaces", 0, "raise sysctl user.max_net_namespaces, which is 0"},
		{"user/max_mnt_namespaces", 0, "raise sysctl user.max_mnt_namespaces, which is 0"},
		{"user/max_ipc_namespaces", 0, "raise sysctl user.max_ipc_namespaces, which is 0"},
		{"kernel/apparmor_restrict_unprivileged_userns", 1, "set sysctl kernel.apparmor_restrict_unprivileged_userns to 0, or allow it to sockeye by an AppArmor profile"},
	} {
		if v, ok := readSysctl(c.name); ok && v == c.forbid {
			return c.hint
		}
	}
	return "user namespaces may be forbidden: see sysctls kernel.unprivileged_userns_clone, user.max_user_namespaces and kernel.apparmor_restrict_unprivileged_userns"
}
