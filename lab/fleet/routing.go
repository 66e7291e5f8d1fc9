// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"sockeye/lab"
)

// Daemon is a routing daemon on the hosts, which announces the addresses of the service.
type Daemon string

// The daemons of the example fleet.
const (
	FRR   Daemon = "frr"
	GoBGP Daemon = "gobgp"
)

// announce starts the routing daemon of the host, and the script of the example that announces the addresses of the service while
// the host is healthy.
func (h *Host) announce(ctx context.Context) error {
	f := h.fleet
	files := map[string]string{"configuration": "frr.conf", "announce.env": "announce.env"}
	if f.o.Daemon == GoBGP {
		files["configuration"] = "gobgpd.conf"
	}
	for name, file := range files {
		text, err := f.example(h, string(f.o.Daemon), file)
		if err != nil {
			return err
		}
		files[name] = text
	}
	var dir string
	var err error
	if f.o.Daemon == GoBGP {
		dir, err = f.startGoBGP(h.Namespace, h.Name, files["configuration"])
	} else {
		dir, err = f.startFRR(ctx, h.Namespace, h.Name, files["configuration"])
	}
	if err != nil {
		return err
	}
	environment := filepath.Join(h.Dir, "announce.env")
	text := strings.ReplaceAll(files["announce.env"], "vtysh ", "vtysh --vty_socket "+dir+" ")
	if err := os.WriteFile(environment, []byte(text), 0o644); err != nil {
		return err
	}
	script, err := filepath.Abs(filepath.Join(f.o.Examples, "fleet/etc/sockeye/announce"))
	if err != nil {
		return err
	}
	p := h.Namespace.Command(context.Background(), "sh", "-c", fmt.Sprintf("set -a; . %s; exec sh %s", environment, script))
	p.Name = h.Name + "/announce"
	p.Cmd.Env = append(os.Environ(), "HEALTH="+f.o.Binary+" --run-dir "+h.Dir+" health")
	f.routing = append(f.routing, p)
	return p.Start()
}

// startFRR starts FRR in a namespace: zebra, bgpd and bfdd, with a configuration.
func (f *Fleet) startFRR(ctx context.Context, n *lab.Namespace, name, configuration string) (dir string, err error) {
	path, err := f.WriteConfig(name+".frr", "frr.conf", "frr", configuration)
	if err != nil {
		return "", fmt.Errorf("start FRR of %s: %w", name, err)
	}
	dir = filepath.Dir(path)
	// Without this option, zebra removes an IPv6 route before it adds the next one: for 40 us, the router drops packets.
	arguments := map[string][]string{"zebra": {"--v6-rr-semantics"}, "bgpd": {"-p", "179"}, "bfdd": {"--bfdctl", filepath.Join(dir, "bfdctl.sock")}}
	for _, daemon := range []string{"zebra", "bfdd", "bgpd"} {
		program, err := lab.FRR(daemon)
		if err != nil {
			return "", err
		}
		p := n.Command(context.Background(), append([]string{program, "--log", "stdout", "-f", "/dev/null", "-P", "0", "-i", filepath.Join(dir, daemon+".pid"),
			"-z", filepath.Join(dir, "zserv.api"), "--vty_socket", dir}, arguments[daemon]...)...)
		p.Name = name + "/" + daemon
		if err := p.Start(); err != nil {
			return "", err
		}
		f.routing = append(f.routing, p)
		err = f.WaitFor(ctx, p.Name, func() (bool, error) {
			_, err := os.Stat(filepath.Join(dir, daemon+".vty"))
			return err == nil, p.Err()
		})
		if err != nil {
			return "", err
		}
	}
	f.vtys = append(f.vtys, dir)
	if out, err := exec.CommandContext(ctx, "vtysh", "--vty_socket", dir, "-f", path).CombinedOutput(); err != nil {
		return "", fmt.Errorf("configure FRR of %s: %w: %s", name, err, out)
	}
	return dir, nil
}

// client is the line of bgpd in the list of zebra's clients, with the times since its connection and its last message.
var client = regexp.MustCompile(`(?m)^bgp +(\S+) +(\S+)`)

// settleFRR waits until bgpd has learned the interfaces from zebra. bgpd 8.4 may miss the address of an interface that appears meanwhile, and
// then closes all sessions at this interface ("nexthop_set failed").
func (f *Fleet) settleFRR(ctx context.Context, dir string) error {
	return f.WaitFor(ctx, "the routing daemons of the front router", func() (bool, error) {
		out, err := exec.CommandContext(ctx, "vtysh", "--vty_socket", dir, "-c", "show zebra client summary").CombinedOutput()
		if err != nil {
			return false, fmt.Errorf("vtysh: %w: %s", err, out)
		}
		times := client.FindSubmatch(out)
		return times != nil && string(times[1]) != "00:00:00" && string(times[2]) != "00:00:00", nil
	})
}

// startGoBGP starts gobgpd in a namespace, with a configuration.
func (f *Fleet) startGoBGP(n *lab.Namespace, name, configuration string) (dir string, err error) {
	program, err := exec.LookPath("gobgpd")
	if err != nil {
		return "", errors.New("find gobgpd: not installed (Debian package gobgpd: apt-get install gobgpd)")
	}
	dir = filepath.Join(f.Dir(), name)
	path := filepath.Join(dir, "gobgpd.conf")
	if err := os.WriteFile(path, []byte(configuration), 0o644); err != nil {
		return "", fmt.Errorf("start gobgpd of %s: %w", name, err)
	}
	p := n.Command(context.Background(), program, "-f", path, "--api-hosts", "127.0.0.1:50051", "--log-plain")
	p.Name = name + "/gobgpd"
	f.routing = append(f.routing, p)
	return dir, p.Start()
}

// example returns a file of the example with the addresses of the lab in place of those of the documentation. The result for the
// front router has those of all hosts.
func (f *Fleet) example(h *Host, path ...string) (string, error) {
	text, err := os.ReadFile(filepath.Join(append([]string{f.o.Examples, "fleet"}, path...)...))
	if err != nil {
		return "", fmt.Errorf("read example: %w", err)
	}
	all4, all6, number := "10.79.0.0/24", "fd79::/64", 0
	if f.o.Routed {
		all4, all6 = "10.79.0.0/16", "fd79::/48"
	}
	own := netip.MustParseAddr("10.79.0.1")
	if h != nil {
		number, own = h.Number, h.addresses()[0].Addr()
	}
	router := gateway(number, f.o.Routed)
	// A busy machine lets the daemons wait for a CPU: BFD detects a death after 3 s instead of 0.9 s.
	return strings.NewReplacer("detect-multiplier 3", "detect-multiplier 10", "10.0.0.0/24", all4, "fd00::/64", all6, "10.0.0.11", own.String(), "10.0.0.1", router[0].Addr().String(),
		"fd00::1", router[1].Addr().String(), "hostname collector1", "hostname "+hostname(h)).Replace(string(text)), nil
}

func hostname(h *Host) string {
	if h == nil {
		return "front"
	}
	return "host-" + h.Name
}

// ExplainRouting returns the ends of the logs of the routing daemons and of the scripts that announce routes, and the sessions of
// each FRR.
func (f *Fleet) ExplainRouting() string {
	var text strings.Builder
	for _, p := range f.routing {
		fmt.Fprintf(&text, "%s:\n%s\n", p.Name, p.LogTail(20))
	}
	for _, dir := range f.vtys {
		const limit = 10 * time.Second
		ctx, cancel := context.WithTimeout(context.Background(), limit)
		out, err := exec.CommandContext(ctx, "vtysh", "--vty_socket", dir, "-c", "show bgp summary", "-c", "show bfd peers brief", "-c", "show running-config bgpd").CombinedOutput()
		cancel()
		fmt.Fprintf(&text, "vtysh of %s: %v\n%s\n", filepath.Base(dir), err, out)
	}
	return text.String()
}
