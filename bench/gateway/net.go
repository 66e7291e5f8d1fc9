// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/bench/harness"
	"sockeye/internal/netns"
	"sockeye/lab"
)

// Sides to compare: the client of a load runs in the namespace of the host, or in a guest of one gateway.
const (
	sideNative  = "native"
	sideSockeye = "sockeye"
	sidePasta   = "pasta"
	// sidePastaNew is the pasta of Debian sid, which tools/pasta-sid unpacks.
	sidePastaNew = "pasta_new"
)

var gatewaySides = []string{sideNative, sideSockeye, sidePasta, sidePastaNew}

// having returns the sides that have values, in the order of gatewaySides.
func having[V any](values map[string]V) (sides []string) {
	for _, side := range gatewaySides {
		if _, ok := values[side]; ok {
			sides = append(sides, side)
		}
	}
	return sides
}

// Paths between host and server.
const (
	linkVeth    = "veth"
	linkLimited = "1gbit"
	linkSeed    = "seed" // rate-limited link, larger socket buffers
	// linkDatagrams is a veth pair for the UDP loads, and linkTrips one for round trips.
	linkDatagrams = "udp"
	linkTrips     = "rr"
	linkRoom      = "room"     // as linkSeed, for the comparison of formulas
	linkPrograms  = "programs" // veth pair
	linkCore      = "10gbit"
)

// gatewayPath is a host with gateways and a remote server.
type gatewayPath struct {
	lab       *lab.Lab
	name      string
	host, far *lab.Namespace
	addresses [2]netip.Addr // of host and far
	device    string        // interface of the host
	link      *lab.Link     // nil for a veth pair
	server    *harness.Worker
	echo      *harness.Worker // server of round trips
	newPasta  string          // directory of tools/pasta-sid; empty: there is no side sidePastaNew
	formula   string          // of Sockeye's gateway; empty: that of package room
	started   int             // number of sides started so far
}

const gatewayRate = 1e9 // bits/s of the link

// newGatewayPath creates a path with servers of loads and of round trips.
func newGatewayPath(ctx context.Context, l *lab.Lab, link, newPasta string) (p *gatewayPath, err error) {
	p = &gatewayPath{lab: l, name: link, device: "eth0", newPasta: newPasta}
	subnet := byte(slices.Index([]string{linkVeth, linkLimited, linkSeed, linkDatagrams, linkTrips, linkRoom, linkPrograms, linkCore}, link))
	for i := range p.addresses {
		p.addresses[i] = netip.AddrFrom4([4]byte{10, 84, subnet, byte(1 + i)})
	}
	var hosts [2]*lab.Namespace
	for i, role := range []string{"host-", "far-"} {
		if hosts[i], err = l.Namespace(role + link); err != nil {
			return nil, err
		}
		if err := hosts[i].Sysctl("ipv4.tcp_no_metrics_save", "1"); err != nil {
			return nil, err
		}
	}
	p.host, p.far = hosts[0], hosts[1]
	var prefixes [2][]netip.Prefix
	for i, a := range p.addresses {
		prefixes[i] = []netip.Prefix{netip.PrefixFrom(a, 24)}
	}
	if slices.Contains([]string{linkVeth, linkDatagrams, linkTrips, linkPrograms}, link) {
		err = lab.ConnectVeth(lab.VethEnd{Namespace: p.host, Name: p.device, Addresses: prefixes[0]}, lab.VethEnd{Namespace: p.far, Name: p.device, Addresses: prefixes[1]})
	} else {
		p.device = "link0"
		options := lab.LinkOptions{Name: p.device, Rate: gatewayRate, Offload: true}
		if link == linkCore {
			options.Rate = coreRate
		}
		p.link, err = l.Connect(hosts[0], hosts[1], options, prefixes[0], prefixes[1])
	}
	if err != nil {
		return nil, err
	}
	// pasta needs a default route.
	if err := p.host.AddRoute(netip.MustParsePrefix("0.0.0.0/0"), p.addresses[1]); err != nil {
		return nil, err
	}
	start := func(role string, port uint16) (w *harness.Worker, err error) {
		at := netip.AddrPortFrom(p.addresses[1], port)
		if w, err = harness.StartWorker(ctx, l, p.far, role+"-"+link, "/proc/self/exe", role, "-listen", at.String()); err != nil {
			return nil, err
		}
		return w, w.Answer(&struct{}{})
	}
	if p.server, err = start(serverRole, gatewayPort); err != nil {
		return nil, err
	}
	p.echo, err = start(echoRole, echoPort)
	return p, err
}

func (p *gatewayPath) target() netip.AddrPort { return netip.AddrPortFrom(p.addresses[1], gatewayPort) }

// choose sets the congestion control of the host's sockets (chooseByRoute).
func (p *gatewayPath) choose(cc string) error {
	return chooseByRoute(p.host.Netlink(), p.device, p.addresses[1], cc)
}

func (p *gatewayPath) delay(rtt time.Duration) error {
	if p.link == nil {
		return nil
	}
	o := p.link.Options()
	o.Delay = rtt / 2
	return p.link.Set(o)
}

// resent returns the number of segments that host and server have retransmitted.
func (p *gatewayPath) resent() (n uint64, err error) {
	for _, h := range []*lab.Namespace{p.host, p.far} {
		err := h.Do(func() error {
			b, err := os.ReadFile("/proc/thread-self/net/snmp")
			n += harness.SNMP(string(b), "Tcp", "RetransSegs")
			return err
		})
		if err != nil {
			return 0, fmt.Errorf("count retransmissions of %s: %w", h.Name(), err)
		}
	}
	return n, nil
}

// gatewaySide is a client, and the gateway between client and host.
type gatewaySide struct {
	name    string
	client  *harness.Worker
	gateway *harness.Worker // worker that reports its counters; nil: none
	around  *lab.Process    // its cgroup contains the gateway; nil: none
	in      *lab.Namespace  // namespace in which the command was started
	device  string          // interface in the client's namespace
}

// newSide starts a side with its own guest and a client in the guest. The caller must stop the returned side, also
// after an error.
func (p *gatewayPath) newSide(ctx context.Context, side string, mtu int) (s *gatewaySide, err error) {
	if s, err = p.startSide(ctx, side, mtu, 0, clientRole); err != nil {
		return s, err
	}
	return s, s.client.Answer(&struct{}{})
}

// startSide starts a side whose client is a role of this program. The gateway forwards a UDP port to the client. With
// port 0 it forwards no port, and Sockeye's gateway is a worker that reports its counters. The caller must stop the
// returned side, also after an error.
func (p *gatewayPath) startSide(ctx context.Context, side string, mtu int, port uint16, role ...string) (s *gatewaySide, err error) {
	s = &gatewaySide{name: side, device: p.device, in: p.host}
	group := fmt.Sprintf("%s-%s-%d-%d", side, p.name, mtu, p.started)
	p.started++
	exe, err := os.Executable()
	if err != nil {
		return s, err
	}
	client := append([]string{exe}, role...)
	switch {
	case side == sideSockeye && port != 0:
		s.device = guestDevice
		client = append([]string{exe, isolateCommand, "--as-root", "--mtu", strconv.Itoa(mtu), "-p", fmt.Sprintf("%d/udp", port), "--"}, client...)
	case side == sideSockeye:
		if s.in, err = p.lab.Namespace("guest-" + group); err != nil {
			return s, err
		}
		s.device = guestDevice
		s.gateway, err = harness.StartWorker(ctx, p.lab, p.host, group+"-gateway", exe, gatewayRole,
			"-guest", s.in.Path(), "-address", p.addresses[0].String(), "-mtu", strconv.Itoa(mtu), "-formula", p.formula)
		if err == nil {
			err = s.gateway.Answer(&struct{}{})
		}
		if err != nil {
			return s, err
		}
		s.around = s.gateway.Process
	case side == sidePasta || side == sidePastaNew:
		client = append(p.pasta(side, mtu, port), client...)
	}
	if s.client, err = harness.StartWorker(ctx, p.lab, s.in, group, client...); err != nil {
		return s, err
	}
	if side != sideNative && s.around == nil {
		s.around = s.client.Process
	}
	return s, nil
}

// choose sets the congestion control of the client's sockets.
func (s *gatewaySide) choose(to netip.Addr, cc string) error {
	pid, err := s.program()
	if err != nil {
		return err
	}
	inside, err := netns.Open(fmt.Sprintf("/proc/%d/ns/net", pid))
	if err != nil {
		return fmt.Errorf("of %s: %w", s.name, err)
	}
	defer inside.Close()
	return netns.Do(inside, func() error {
		nl, err := netlink.NewHandle(unix.NETLINK_ROUTE)
		if err != nil {
			return fmt.Errorf("open route socket of %s: %w", s.name, err)
		}
		defer nl.Close()
		return chooseByRoute(nl, s.device, to, cc)
	})
}

// chooseByRoute sets the congestion control of sockets that connect to an address, by a route: the sysctl of a
// namespace only accepts congestion controls that the host allows for ordinary users, and a program in pasta may not
// set it.
func chooseByRoute(nl *netlink.Handle, device string, to netip.Addr, cc string) error {
	dev, err := nl.LinkByName(device)
	if err == nil {
		err = nl.RouteReplace(&netlink.Route{
			LinkIndex: dev.Attrs().Index, Scope: unix.RT_SCOPE_LINK, Congctl: cc,
			Dst: &net.IPNet{IP: to.AsSlice(), Mask: net.CIDRMask(32, 32)},
		})
	}
	if err != nil {
		return fmt.Errorf("choose %s on %s: %w", cc, device, err)
	}
	return nil
}

// program returns the process of a side that is not the gateway.
func (s *gatewaySide) program() (int, error) {
	pids, err := s.client.PIDs()
	if err != nil {
		return 0, err
	}
	for _, pid := range pids {
		if !s.isGateway(pid) {
			return pid, nil
		}
	}
	return 0, fmt.Errorf("find the program of %s: no such process", s.name)
}

// pasta returns the prefix of a command that runs a program in a side's pasta as root, because pasta otherwise switches to the
// user nobody. pasta forwards one UDP port, or none if port is 0.
func (p *gatewayPath) pasta(side string, mtu int, port uint16) []string {
	program := []string{"pasta"}
	if side == sidePastaNew {
		file := func(name string) string { return filepath.Join(p.newPasta, name) }
		// Root may not map its own ID in a user namespace without CAP_SETFCAP, which this pasta drops before.
		program = []string{file("pasta.avx2"), "--library-path", file("lib"), "--argv0", "pasta", file("program"), "--netns-only"}
	}
	inside := "none"
	if port != 0 {
		inside = strconv.Itoa(int(port))
	}
	return append(program,
		"--config-net", "--no-map-gw", "--runas", "0", "--mtu", strconv.Itoa(mtu), "--mac-addr", "02:00:00:00:00:01",
		"-t", "none", "-u", inside, "-T", "none", "-U", "none", "--",
	)
}

// stop terminates the processes of the side.
func (s *gatewaySide) stop() error {
	var errs []error
	for _, w := range []*harness.Worker{s.client, s.gateway} {
		if w != nil && w.Cmd.Process != nil {
			if err := w.In.Close(); !errors.Is(err, os.ErrClosed) { // ErrClosed: the worker has exited
				errs = append(errs, err)
			}
			errs = append(errs, w.Stop(time.Second))
		}
	}
	return errors.Join(errs...)
}

// cpu returns the CPU time of the gateway's processes in user and kernel mode; 0 without a gateway.
func (s *gatewaySide) cpu() (sum time.Duration, err error) {
	if s.around == nil {
		return 0, nil
	}
	pids, err := s.around.PIDs()
	if err != nil {
		return 0, err
	}
	for _, pid := range pids {
		if !s.isGateway(pid) {
			continue
		}
		t, err := harness.CPUTime(pid)
		if err != nil {
			return 0, fmt.Errorf("read CPU time of %s: %w", s.name, err)
		}
		sum += t
	}
	return sum, nil
}

// isGateway returns whether a process belongs to the gateway: the started process, a process of pasta outside its PID
// namespace, or the first process of the PID namespace that sockeye isolate creates. The first process of pasta's PID
// namespace is the program.
func (s *gatewaySide) isGateway(pid int) bool {
	if s.around == nil || pid == s.around.Pid() {
		return s.around != nil
	}
	if s.name == sideSockeye {
		return isInit(pid)
	}
	name, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid)) // the process may have exited
	return strings.HasPrefix(string(name), "pas")
}

// isInit returns whether a process is the first process of a PID namespace below this one.
func isInit(pid int) bool {
	status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid)) // the process may have exited
	for line := range strings.Lines(string(status)) {
		if numbers, ok := strings.CutPrefix(line, "NSpid:"); ok {
			fields := strings.Fields(numbers)
			return len(fields) > 1 && fields[len(fields)-1] == "1"
		}
	}
	return false
}

func (s *gatewaySide) counts() (c gatewayCounts, err error) {
	if s.gateway != nil {
		err = s.gateway.Ask(struct{}{}, &c)
	}
	return c, err
}
