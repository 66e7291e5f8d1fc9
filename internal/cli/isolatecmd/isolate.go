// SPDX-License-Identifier: Apache-2.0

// Package isolatecmd has the command sockeye isolate.
package isolatecmd

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"sockeye/internal/cli/command"
	"sockeye/internal/fault"
	"sockeye/internal/gateway"
	"sockeye/internal/gateway/access"
	"sockeye/internal/isolate"
)

// Bounds of the MTU of the guest's interface, in bytes: the minimum of IPv6, and the largest packet of a TUN.
const (
	leastMTU = 1280
	mostMTU  = 65520
)

// resolvConf names the host's name servers. behindStub names those that systemd-resolved forwards to.
const (
	resolvConf = "/etc/resolv.conf"
	behindStub = "/run/systemd/resolve/resolv.conf"
)

// Options are the options of an isolated program.
type Options struct {
	publish, Allow []string
	NoOutbound     bool
	noDNS          bool
	mtu            int
	netns          string
	pid            int
	pidGiven       bool
	verbose        bool

	// Options of the program.
	User           string
	asRoot         bool
	allowUserns    bool
	expose         []string
	read, write    []string
	requireSandbox bool
}

// commands are the commands of one invocation.
type commands struct{ *command.Command }

// New returns `sockeye isolate` and the hidden command that runs inside.
func New(c *command.Command) []*cobra.Command {
	i := &commands{c}
	return []*cobra.Command{i.isolateCommand(), i.insideCommand()}
}

func (c *commands) isolateCommand() *cobra.Command {
	var i Options
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
	i.Flags(cmd)
	cmd.Flags().StringArrayVarP(&i.publish, "publish", "p", nil, "port of the host that leads inside, as in 1790:1790/tcp; may be repeated")
	cmd.Flags().BoolVar(&i.NoOutbound, "no-outbound", false, "the program may go nowhere by itself")
	cmd.Flags().StringVar(&i.netns, "netns", "", "join a network namespace that is there, by its path")
	cmd.Flags().IntVar(&i.pid, "pid", 0, "join the network namespace of a process")
	return cmd
}

// Flags defines the options that sockeye isolate and sockeye run --isolated have in common.
func (i *Options) Flags(cmd *cobra.Command) {
	cmd.Flags().StringArrayVar(&i.Allow, "allow", nil, "where the program may go, as in 10.0.0.0/8:9092/tcp; may be repeated")
	cmd.Flags().BoolVar(&i.noDNS, "no-dns", false, "no name server inside, nor ports 53 and 853 of the host's: questions to them can carry data out")
	cmd.Flags().IntVar(&i.mtu, "mtu", mostMTU, "of the interface inside, in bytes")
	cmd.Flags().StringVar(&i.User, "user", "", "whom the program is started as, as in nobody or 1000:1000; for root only")
	cmd.Flags().BoolVar(&i.asRoot, "as-root", false, "the program is root to the host's files; for root only")
	cmd.Flags().StringArrayVar(&i.expose, "expose", nil, "socket of the host, or folder of sockets, that the program may reach; may be repeated")
	cmd.Flags().StringArrayVar(&i.read, "read", nil, "file or folder that the program may read; it may reach no others; may be repeated")
	cmd.Flags().StringArrayVar(&i.write, "write", nil, "file or folder that the program may read and write; it may reach no others; may be repeated")
	cmd.Flags().BoolVar(&i.allowUserns, "allow-userns", false, "the program may make user namespaces")
	cmd.Flags().BoolVar(&i.requireSandbox, "require-sandbox", false, "do not start the program where the kernel cannot confine it in every way")
	cmd.Flags().BoolVar(&i.verbose, "verbose", false, "tell where the program may not go and what was counted, on standard error")
}

func (c *commands) insideCommand() *cobra.Command {
	return &cobra.Command{
		Use:    isolate.InsideCommand,
		Short:  "Prepare the network of an isolated program, and become it",
		Hidden: true,
		RunE: func(*cobra.Command, []string) error {
			err := isolate.Inside()
			switch {
			case errors.Is(err, unix.EACCES):
				return &fault.Error{
					Err: err, Hint: "the program's user may not execute that path, or the interpreter that it names: see their modes, and those of the folders above",
					Code: fault.CodeNotPermitted,
				}
			case err != nil:
				return fault.Usage(err, "")
			}
			return nil
		},
	}
}

func (c *commands) isolate(ctx context.Context, i *Options, args []string) error {
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
		return fault.Usage(errors.New("PROGRAM is missing"), "name one behind --, or a namespace that is there with --netns or --pid")
	case guest.Existing != nil && len(args) > 0:
		return fault.Usage(errors.New("a namespace that is there and PROGRAM do not go together"), "start the program in it by nsenter or ip netns exec")
	case guest.Existing == nil:
		if guest.Program, err = FindProgram(args[0]); err != nil {
			return err
		}
		guest.Args, guest.Env = args, OwnEnvironment()
	}
	var who *account
	if guest.Existing != nil {
		if err := i.onlyGateway(); err != nil {
			return err
		}
	} else {
		if who, err = i.Account(""); err != nil {
			return err
		}
	}
	listen := func() ([]gateway.Forward, error) { return gateway.Listen(specs) }
	return Join(ctx, c.Command, i, &guest, who, listen)
}

// onlyGateway refuses options of a program for an existing namespace.
func (i *Options) onlyGateway() error {
	for name, given := range map[string]bool{
		"--user": i.User != "", "--as-root": i.asRoot, "--allow-userns": i.allowUserns, "--expose": len(i.expose) > 0,
		"--read": len(i.read) > 0, "--write": len(i.write) > 0,
	} {
		if given {
			return fault.Usage(fmt.Errorf("%s and a namespace that is there do not go together", name), "it is for a PROGRAM that this command starts")
		}
	}
	return nil
}

// forwards parses the published ports.
func (i *Options) forwards() (specs []access.ForwardSpec, err error) {
	for _, text := range i.publish {
		f, err := access.ParseForward(text)
		if err != nil {
			return nil, fault.Usage(fmt.Errorf("--publish %w", err), "as in 1790:1790/tcp, 127.0.0.1:8080:80 or 9000-9010/udp")
		}
		specs = append(specs, f)
	}
	if err := access.Overlap(specs); err != nil {
		return nil, fault.Usage(fmt.Errorf("--publish %w", err), "a port of the host leads to one port inside")
	}
	return specs, nil
}

// outbound parses where the program may go, and returns the text of resolv.conf inside.
func (i *Options) outbound() (out access.Outbound, resolver string, err error) {
	if i.NoOutbound && len(i.Allow) > 0 {
		return out, "", fault.Usage(errors.New("--no-outbound and --allow do not go together"), "with --allow the program may go nowhere else")
	}
	out.All = !i.NoOutbound && len(i.Allow) == 0
	out.Host = []netip.Addr{isolate.Host4, isolate.Host6}
	for _, text := range i.Allow {
		r, err := access.ParseRule(text)
		if errors.Is(err, access.ErrNeverOutside) {
			return out, "", fault.Usage(fmt.Errorf("--allow %w", err), hostHint)
		}
		if err != nil {
			return out, "", fault.Usage(fmt.Errorf("--allow %w", err), "as in 10.0.0.0/8:9092/tcp, 192.0.2.1 or [2001:db8::/32]:443")
		}
		out.Rules = append(out.Rules, r)
	}
	if i.NoOutbound {
		return out, "", nil
	}
	conf, err := readIfThere(resolvConf)
	if err != nil {
		return out, "", err
	}
	if !i.noDNS {
		out.DNS, resolver = isolate.NameServers(conf, isolate.NameServerAliases)
		return out, resolver, nil
	}
	behind, err := readIfThere(behindStub)
	if err != nil {
		return out, "", err
	}
	out.Resolvers = isolate.Resolvers(conf + "\n" + behind)
	return out, "", nil
}

// readIfThere returns the content of a file of name servers; "" if the file does not exist.
func readIfThere(path string) (string, error) {
	text, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("read name servers: %w", err)
	}
	return string(text), nil
}

// hostHint is the hint for an address that the program has itself.
var hostHint = fmt.Sprintf("the loopback addresses of the host are %v and %v inside", isolate.Host4, isolate.Host6)

// pathHint is the hint for a path that does not exist.
const pathHint = "name a path that is there, and that the program's user may reach"

// existing opens the namespace to join; nil for none.
func (i *Options) existing() (n *isolate.Namespace, err error) {
	switch {
	case i.pidGiven && i.netns != "":
		return nil, fault.Usage(errors.New("--netns and --pid do not go together"), "each names a namespace")
	case i.pidGiven:
		n, err = isolate.OpenPID(i.pid)
		switch {
		case errors.Is(err, unix.ESRCH):
			return nil, fault.Usage(fmt.Errorf("there is no process %d", i.pid), "it may have ended; name another with --pid")
		case errors.Is(err, isolate.ErrOwnNamespace):
			return nil, fault.Usage(fmt.Errorf("the network of process %d %w", i.pid, err), "name a process that has a network namespace of its own")
		case err != nil:
			return nil, notPermitted(fmt.Errorf("open network namespace of process %d: %w", i.pid, err), "the process must be your own")
		}
	case i.netns != "":
		n, err = isolate.OpenNetns(i.netns)
		switch {
		case errors.Is(err, isolate.ErrNoNamespace), errors.Is(err, isolate.ErrOwnNamespace):
			return nil, fault.Usage(fmt.Errorf("%s %w", i.netns, err), "as in /run/netns/NAME; ip netns lists them")
		case errors.Is(err, unix.ESRCH), errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENOTDIR):
			return nil, fault.Usage(fmt.Errorf("there is no namespace %s", i.netns), "as in /run/netns/NAME; ip netns lists them")
		case err != nil:
			return nil, notPermitted(fmt.Errorf("open network namespace %s: %w", i.netns, err), "it must be your own")
		}
	}
	return n, nil
}

// notPermitted adds a hint, and the exit code for missing rights, to an error of permissions.
func notPermitted(err error, hint string) error {
	if errors.Is(err, fs.ErrPermission) {
		return &fault.Error{Err: err, Hint: hint, Code: fault.CodeNotPermitted}
	}
	return err
}

// FindProgram looks a program up in PATH.
func FindProgram(name string) (string, error) {
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
	return "", fault.Usage(fmt.Errorf("find program %s: %w", name, err), "name it as in the shell, or with its path")
}

// OwnEnvironment is the environment of this process without variables of an agent.
func OwnEnvironment() (env []string) {
	for _, v := range os.Environ() {
		if !strings.HasPrefix(v, "SOCKEYE_") {
			env = append(env, v)
		}
	}
	return env
}

// refuseDirectories refuses a directory as a standard stream, from which the program could open files that are hidden.
func refuseDirectories() error {
	for fd, name := range []string{"input", "output", "error"} {
		var st unix.Stat_t
		if unix.Fstat(fd, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFDIR {
			return fault.Usage(fmt.Errorf("standard %s is a directory, which would lead out of the isolation", name), "redirect it from a file, or from /dev/null")
		}
	}
	return nil
}

// Join validates the options, runs the guest's program, or joins the existing namespace, and returns when that ends. A
// program's exit code is an error without a message. The sockets that listen opens lead inside.
func Join(ctx context.Context, c *command.Command, i *Options, guest *isolate.Guest, who *account, listen func() ([]gateway.Forward, error)) error {
	o := &isolate.Options{MTU: i.mtu, Listen: listen, RequireSandbox: i.requireSandbox}
	if err := i.complete(guest, o); err != nil {
		return err
	}
	if guest.Existing == nil {
		guest.AllowUserns, guest.Expose, guest.Read, guest.Write = i.allowUserns, i.expose, i.read, i.write
	}
	if who != nil {
		guest.Env = who.environment(guest.Env)
		o.User = &who.User
	}
	level := slog.LevelWarn
	if i.verbose {
		level = slog.LevelDebug
	}
	o.Log = slog.New(slog.NewTextHandler(c.Err, &slog.HandlerOptions{Level: level}))
	o.Warn = func(text string) { fmt.Fprintf(c.Err, "sockeye: %s\n", text) }
	o.Joined = func() { fmt.Fprintf(c.Out, "joined by %s; interrupt it to end\n", isolate.InterfaceName) }
	code, err := isolate.Run(ctx, guest, o)
	if err != nil {
		return guestError(err, guest)
	}
	if code != 0 {
		return exitCode(code)
	}
	return nil
}

// complete checks the options that do not depend on a service, and adds where the program may go and its addresses.
func (i *Options) complete(guest *isolate.Guest, o *isolate.Options) (err error) {
	if i.mtu < leastMTU || i.mtu > mostMTU {
		return fault.Usage(fmt.Errorf("--mtu is %d", i.mtu), fmt.Sprintf("%d to %d bytes", leastMTU, mostMTU))
	}
	for _, list := range []struct {
		option string
		paths  []string
	}{{"--expose", i.expose}, {"--read", i.read}, {"--write", i.write}} {
		if slices.Contains(list.paths, "") {
			return fault.Usage(fmt.Errorf("%s names no path", list.option), pathHint)
		}
	}
	if guest.Existing == nil {
		if err := refuseDirectories(); err != nil {
			return err
		}
	}
	var resolver string
	if o.Outbound, resolver, err = i.outbound(); err != nil {
		return err
	}
	if guest.Existing == nil {
		guest.ResolvConf = resolver
	}
	o.Guest4, o.Guest6 = isolate.GuestAddresses()
	for n, r := range o.Outbound.Rules {
		if a := r.Prefix.Addr(); r.Prefix.IsSingleIP() && (a == o.Guest4 || a == o.Guest6) {
			return fault.Usage(fmt.Errorf("--allow %q: the program has that address itself, as the host has", i.Allow[n]), hostHint)
		}
	}
	return nil
}
