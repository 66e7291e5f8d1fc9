// SPDX-License-Identifier: Apache-2.0

// Package isolatecmd implements the command sockeye isolate.
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

// resolvConf has the host's name servers. behindStub has the name servers to which systemd-resolved forwards.
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

// commands has the dependencies of one invocation.
type commands struct{ *command.Command }

// New returns `sockeye isolate` and the hidden command of the process inside.
func New(c *command.Command) []*cobra.Command {
	i := &commands{c}
	return []*cobra.Command{i.isolateCommand(), i.insideCommand()}
}

func (c *commands) isolateCommand() *cobra.Command {
	var i Options
	cmd := &cobra.Command{
		Use:   "isolate [-p [ADDRESS:]PORT[:PORT][/udp]] ... [-- PROGRAM [ARGUMENT...]]",
		Short: "Run a program in its own network, process and mount namespaces",
		Long: `Isolate runs a program in new user, network, mount, PID and IPC namespaces with
one interface, sockeye0. The sockeye process remains outside and is the gateway:
it forwards TCP, UDP and ICMP echo of the program through ordinary sockets of
the host. Traffic to a published port reaches the program with the source
address of the peer. No privileges are needed; the gateway drops all privileges
that it does not need.

User. If an ordinary user starts the command, the program runs as this user.
Root must choose a user. --user NAME, --user UID or --user UID:GID sets the user
of both processes, without supplementary groups. The group must not be root's
group. Ports of the host below 1024 can still be published. With --as-root, the
program keeps root's access to the host's files, and loses only the network and
the capabilities.

Inbound. -p [ADDRESS:]PORT[-PORT][:PORT[-PORT]][/tcp|/udp] publishes ports of
the host. Defaults: all addresses, TCP, and the same port inside. Ports of the
host below 1024 need the usual privilege. Inside, no port needs a privilege.

Outbound. By default, all destinations are allowed except the host's loopback
addresses. An address that is assigned to both the host and the program refers
to the program. --allow PREFIX[:PORT[-PORT]][/tcp|/udp|/icmp] allows only the
given destinations and the host's name servers; --no-outbound allows only
replies. Inside, the address of the host is 169.254.53.1 or
fd53:6f63:6b65:7965::1: connections from the host have this source address, and
--allow 169.254.53.1:6379 is required for connections to 127.0.0.1:6379 of the
host. The metadata services of clouds, at addresses such as 169.254.169.254 and
fd00:ec2::254, return credentials of the host. They are allowed only if --allow
has this exact address; a larger prefix is not sufficient. UDP flows and TCP
connections of the program are each limited to a quarter of the host's port
range. At the limit, a new UDP flow evicts the flow that expires first, and new
TCP connections are refused.

DNS. Inside, /etc/resolv.conf lists 169.254.53.53 to 169.254.53.55, which are
aliases of the host's name servers, over UDP and TCP. The aliases are available
with --allow, too: a program can exfiltrate data in DNS queries. --no-dns
removes the aliases, and closes ports 53 and 853 of the name servers in the
host's /etc/resolv.conf and of the name servers of systemd-resolved, unless
--allow has the exact address of the server. Other name servers and DNS over
HTTPS remain reachable if outbound traffic to them is allowed: use --no-dns with
--allow. With --no-dns, with --no-outbound, and in an existing namespace,
/etc/resolv.conf is the host's file.

Confinement. The program inherits the working directory, the standard streams
and the terminal, but no other descriptors. It inherits the environment except
SOCKEYE_* and variables that refer to hidden sockets. It has no capabilities and
cannot gain any (no_new_privs: sudo and ping with file capabilities do not work;
ping with datagram sockets works). It cannot change its user or groups. The
supplementary groups of an ordinary user still apply to files, and appear as
nogroup. The program sees only its own processes in /proc, and cannot send
signals to other processes (since Linux 6.12, this includes processes of its
process group outside). A system call filter allows sockets of the families
unix, inet, inet6 and netlink; denies io_uring, keyrings, bpf, perf,
userfaultfd, kernel modules and mounts; kills 32-bit programs; and denies input
into the terminal (TIOCSTI). Browsers and container tools create user
namespaces, which need --allow-userns.

Unix sockets of the host are hidden in their usual locations: /run itself,
/run/user, /run/dbus, /run/systemd, /run/docker, /run/containerd, /run/podman,
/run/nscd, directories of databases and others; sockets of the X server, tmux
and ssh-agent in /tmp; and sockets that SSH_AUTH_SOCK, DBUS_SESSION_BUS_ADDRESS,
DOCKER_HOST and similar variables refer to. The socket of the system log remains
visible. --expose PATH makes a socket or a directory of sockets visible. All
other files are the host's files, with the access rights of the user. With
--read PATH or --write PATH (since Linux 5.13), the program can open only these
paths, its own file, /usr, and the files that programs need to start and to
resolve names (libraries, certificates, some files of /etc, /proc, /dev/null and
similar devices).

If the kernel does not support a restriction, a warning is printed to standard
error, one line per restriction. With --require-sandbox, the program does not
start in this case.

Signals to the sockeye process and signals of the terminal are forwarded to the
program. If either process exits, for any reason, the other is terminated, and
with the program all processes that it has started. Therefore, the program must
stay in the foreground.

With --netns or --pid, the gateway joins an existing network namespace until it
is interrupted, the path is removed or the process exits. An ordinary user can
join a namespace if its user namespace maps the user to root, as with unshare
-rn and rootless podman. This needs nsenter, and the namespace must not have a
default route.

The exit code is the exit code of the program, or 128 plus the number of the
signal that terminated it. Exit codes before the program starts: 1 failed, 2
wrong usage, or the program, user, process or namespace does not exist, 3 not
supported by the kernel, 4 not permitted, 5 a port is in use, or the namespace
has an interface sockeye0 or a default route.`,
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
	cmd.Flags().StringArrayVarP(&i.publish, "publish", "p", nil, "publish a port of the host, as in 1790:1790/tcp; can be repeated")
	cmd.Flags().BoolVar(&i.NoOutbound, "no-outbound", false, "allow only replies, no outbound connections of the program")
	cmd.Flags().StringVar(&i.netns, "netns", "", "join an existing network namespace, as in /run/netns/NAME")
	cmd.Flags().IntVar(&i.pid, "pid", 0, "join the network namespace of a process")
	return cmd
}

// Flags defines the options that sockeye isolate and sockeye run --isolated have in common.
func (i *Options) Flags(cmd *cobra.Command) {
	cmd.Flags().StringArrayVar(&i.Allow, "allow", nil, "allow only this destination, as in 10.0.0.0/8:9092/tcp; can be repeated")
	cmd.Flags().BoolVar(&i.noDNS, "no-dns", false, "disable name servers inside, and close ports 53 and 853 of the host's name servers (DNS queries can exfiltrate data)")
	cmd.Flags().IntVar(&i.mtu, "mtu", mostMTU, "MTU of the interface inside, in bytes")
	cmd.Flags().StringVar(&i.User, "user", "", "user of the program, as in nobody or 1000:1000 (root only)")
	cmd.Flags().BoolVar(&i.asRoot, "as-root", false, "keep root's access to the host's files (root only)")
	cmd.Flags().StringArrayVar(&i.expose, "expose", nil, "keep this socket of the host, or directory of sockets, visible; can be repeated")
	cmd.Flags().StringArrayVar(&i.read, "read", nil, "restrict file access, and allow reading this file or directory; can be repeated")
	cmd.Flags().StringArrayVar(&i.write, "write", nil, "restrict file access, and allow reading and writing this file or directory; can be repeated")
	cmd.Flags().BoolVar(&i.allowUserns, "allow-userns", false, "allow the program to create user namespaces")
	cmd.Flags().BoolVar(&i.requireSandbox, "require-sandbox", false, "do not start the program if the kernel does not support all restrictions")
	cmd.Flags().BoolVar(&i.verbose, "verbose", false, "log denied destinations and counters to standard error")
}

func (c *commands) insideCommand() *cobra.Command {
	return &cobra.Command{
		Use:    isolate.InsideCommand,
		Short:  "Prepare the namespaces of an isolated program and start it",
		Hidden: true,
		RunE: func(*cobra.Command, []string) error {
			err := isolate.Inside()
			switch {
			case errors.Is(err, unix.EACCES):
				return &fault.Error{
					Err: err, Hint: "the program's user may not execute that path or its interpreter: check the modes of both and of their parent directories",
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
		return fault.Usage(errors.New("PROGRAM is missing"), "name a program after --, or an existing namespace with --netns or --pid")
	case guest.Existing != nil && len(args) > 0:
		return fault.Usage(errors.New("PROGRAM and an existing namespace are mutually exclusive"), "start the program in the namespace with nsenter or ip netns exec")
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

// onlyGateway returns an error for options that apply only to a program that this command starts.
func (i *Options) onlyGateway() error {
	for name, given := range map[string]bool{
		"--user": i.User != "", "--as-root": i.asRoot, "--allow-userns": i.allowUserns, "--expose": len(i.expose) > 0,
		"--read": len(i.read) > 0, "--write": len(i.write) > 0,
	} {
		if given {
			return fault.Usage(fmt.Errorf("%s and an existing namespace are mutually exclusive", name), "the option is for a PROGRAM that this command starts")
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
		return nil, fault.Usage(fmt.Errorf("--publish %w", err), "publish each port of the host once")
	}
	return specs, nil
}

// existing opens the namespace to join; nil for none.
func (i *Options) existing() (n *isolate.Namespace, err error) {
	switch {
	case i.pidGiven && i.netns != "":
		return nil, fault.Usage(errors.New("--netns and --pid are mutually exclusive"), "name one namespace")
	case i.pidGiven:
		n, err = isolate.OpenPID(i.pid)
		switch {
		case errors.Is(err, unix.ESRCH):
			return nil, fault.Usage(fmt.Errorf("there is no process %d", i.pid), "it may have ended; name another with --pid")
		case errors.Is(err, isolate.ErrOwnNamespace):
			return nil, fault.Usage(fmt.Errorf("the network namespace of process %d %w", i.pid, err), "name a process in another network namespace")
		case err != nil:
			return nil, notPermitted(fmt.Errorf("open network namespace of process %d: %w", i.pid, err), "the process must belong to you")
		}
	case i.netns != "":
		n, err = isolate.OpenNetns(i.netns)
		switch {
		case errors.Is(err, isolate.ErrNoNamespace), errors.Is(err, isolate.ErrOwnNamespace):
			return nil, fault.Usage(fmt.Errorf("%s %w", i.netns, err), "as in /run/netns/NAME; ip netns lists them")
		case errors.Is(err, unix.ESRCH), errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENOTDIR):
			return nil, fault.Usage(fmt.Errorf("there is no namespace %s", i.netns), "as in /run/netns/NAME; ip netns lists them")
		case err != nil:
			return nil, notPermitted(fmt.Errorf("open network namespace %s: %w", i.netns, err), "the namespace must belong to you")
		}
	}
	return n, nil
}

// notPermitted adds a hint and the exit code 4 to a permission error.
func notPermitted(err error, hint string) error {
	if errors.Is(err, fs.ErrPermission) {
		return &fault.Error{Err: err, Hint: hint, Code: fault.CodeNotPermitted}
	}
	return err
}

// FindProgram searches a program in PATH and returns its path.
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
	return "", fault.Usage(fmt.Errorf("find program %s: %w", name, err), "name a program in PATH, or a path")
}

// OwnEnvironment returns the environment of this process without SOCKEYE_* variables.
func OwnEnvironment() (env []string) {
	for _, v := range os.Environ() {
		if !strings.HasPrefix(v, "SOCKEYE_") {
			env = append(env, v)
		}
	}
	return env
}

// Join validates the options, and runs the guest's program or joins the existing namespace. It returns when the program has exited or
// the namespace is removed. A non-zero exit code of the program is an error without a message. The sockets that listen opens are
// published.
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
	o.Joined = func() { fmt.Fprintf(c.Out, "joined by %s; interrupt to stop\n", isolate.InterfaceName) }
	code, err := isolate.Run(ctx, guest, o)
	if err != nil {
		return guestError(err, guest)
	}
	if code != 0 {
		return exitCode(code)
	}
	return nil
}

// hostHint is the hint for an address that is assigned to the program itself inside.
var hostHint = fmt.Sprintf("the loopback addresses of the host are %v and %v inside", isolate.Host4, isolate.Host6)

// pathHint is the hint for a path that does not exist.
const pathHint = "name an existing path that the program's user can access"

// complete checks the options that do not depend on a service, and sets the outbound rules and the addresses.
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
		if err := refuseStreams(); err != nil {
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
			return fault.Usage(fmt.Errorf("--allow %q: the address belongs to the program itself inside", i.Allow[n]), hostHint)
		}
	}
	return nil
}

// outbound parses the allowed destinations and returns the content of resolv.conf inside; "" for the host's file.
func (i *Options) outbound() (out access.Outbound, resolver string, err error) {
	if i.NoOutbound && len(i.Allow) > 0 {
		return out, "", fault.Usage(errors.New("--no-outbound and --allow are mutually exclusive"), "--allow alone denies all other destinations")
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
	conf, err := readOptional(resolvConf)
	if err != nil {
		return out, "", err
	}
	if !i.noDNS {
		out.DNS, resolver = isolate.NameServers(conf, isolate.NameServerAliases)
		return out, resolver, nil
	}
	behind, err := readOptional(behindStub)
	if err != nil {
		return out, "", err
	}
	out.Resolvers = isolate.Resolvers(conf + "\n" + behind)
	return out, "", nil
}

// readOptional returns the content of a file of name servers; "" if the file does not exist.
func readOptional(path string) (string, error) {
	text, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("read name servers: %w", err)
	}
	return string(text), nil
}

// refuseStreams returns an error if a standard stream is a directory, through which the program could open hidden files, or a
// socket of the host's network namespace, which the program could connect to any address.
func refuseStreams() error {
	for fd, name := range []string{"input", "output", "error"} {
		var st unix.Stat_t
		if unix.Fstat(fd, &st) != nil {
			continue
		}
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFDIR:
			return fault.Usage(fmt.Errorf("standard %s is a directory, which would make hidden files accessible", name), "redirect it from a file, or from /dev/null")
		case unix.S_IFSOCK:
			if family, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN); err != nil || family != unix.AF_UNIX {
				return fault.Usage(fmt.Errorf("standard %s is a network socket of the host, which the program could connect to any address", name),
					"let the program listen, and publish its port with -p")
			}
		}
	}
	return nil
}
