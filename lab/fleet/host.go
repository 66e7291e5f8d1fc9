// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/cgroup"
	"sockeye/lab"
)

// Host is a collector host. Its processes have names that begin with the host's name and a slash, and their cgroups are in the
// cgroup with this name.
type Host struct {
	Name      string // a, b, c ...
	Number    int    // from 0
	Namespace *lab.Namespace
	Dir       string       // policy, state and socket of the agent
	Agent     *lab.Process // of the last start

	fleet *Fleet
}

// NewHost makes a further host with its policy, and starts nothing.
func (f *Fleet) NewHost() (*Host, error) {
	h := &Host{Name: string(rune('a' + len(f.Hosts))), Number: len(f.Hosts), fleet: f}
	h.Dir = filepath.Join(f.Dir(), h.Name)
	if err := h.attach(); err != nil {
		return nil, fmt.Errorf("make host %s: %w", h.Name, err)
	}
	if err := h.WritePolicy(); err != nil {
		return nil, fmt.Errorf("make host %s: %w", h.Name, err)
	}
	f.Hosts = append(f.Hosts, h)
	return h, nil
}

// Start starts the agent, which answers when Start returns, and with a Daemon the announcement of the addresses.
func (h *Host) Start(ctx context.Context) error {
	if err := h.StartAgent(ctx); err != nil || h.fleet.o.Daemon == "" {
		return err
	}
	return h.announce(ctx)
}

// StartCollector starts an nfacctd in a slot of the host.
func (h *Host) StartCollector(slot int) (*lab.Collector, error) {
	return h.fleet.StartCollector(lab.CollectorConfig{Slot: h.Collector(slot), Namespace: h.Namespace, Prefix: h.Name + "/"})
}

// attach makes the namespace, and the directories of the host.
func (h *Host) attach() (err error) {
	f := h.fleet
	if h.Namespace, err = f.Namespace("host-" + h.Name); err != nil {
		return err
	}
	front, own := lab.VethEnd{Namespace: f.Front, Name: h.frontLink()}, lab.VethEnd{Namespace: h.Namespace, Name: "eth0", Addresses: h.addresses()}
	if f.o.Routed {
		front.Addresses = gateway(h.Number, true)
		err = lab.ConnectVeth(front, own)
	} else {
		err = f.Front.Port(hostsLink, "port-"+h.Name, h.Namespace, own.Name)
		for _, a := range own.Addresses {
			if err == nil {
				err = h.Namespace.AddAddress(own.Name, a)
			}
		}
	}
	for _, a := range []netip.Addr{Service4, Service6} {
		if err == nil {
			err = h.Namespace.AddAddress("lo", netip.PrefixFrom(a, a.BitLen()))
		}
	}
	if err == nil {
		err = errors.Join(h.defaultRoutes(), h.Namespace.UnlimitErrors(), f.makeDirectories(h.Name))
	}
	return err
}

// Cgroup returns the cgroup of the processes of the host.
func (h *Host) Cgroup() string { return filepath.Join(h.fleet.Cgroup(), h.Name) }

// frontLink is the interface of the front router to the host.
func (h *Host) frontLink() string {
	if h.fleet.o.Routed {
		return "host-" + h.Name
	}
	return hostsLink
}

// PolicyPath is the policy file of the agent.
func (h *Host) PolicyPath() string { return filepath.Join(h.Dir, "policy.yaml") }

// WritePolicy writes the policy: the service telemetry, whose members are the receivers of a swarm and the collectors of the lab,
// and the fleet.
func (h *Host) WritePolicy() error {
	return h.writeFleetPolicy(append([]string{fmt.Sprintf("etcd: {endpoints: %s}", h.fleet.endpoints()), "settle: 1s"}, h.fleet.o.Fleet...)...)
}

// WriteFilePolicy is WritePolicy with a file of hosts, below Dir, instead of etcd.
func (h *Host) WriteFilePolicy(file string) error { return h.writeFleetPolicy("file: " + file) }

// writeFleetPolicy writes the policy with further lines of the fleet.
func (h *Host) writeFleetPolicy(lines ...string) error {
	fleet := append([]string{"host: " + h.Name, "interfaces: [eth0]", fmt.Sprintf("addresses: [%v, %q]", Service4, Service6)}, lines...)
	return h.write(h.service() + "fleet:\n  " + strings.Join(fleet, "\n  ") + "\n")
}

// FileEntry returns the host as an item of a file of hosts, with a state.
func (h *Host) FileEntry(state string) (entry string, err error) {
	return entry, h.Namespace.Do(func() error {
		link, err := netlink.LinkByName("eth0")
		if err != nil {
			return fmt.Errorf("find eth0 of host %s: %w", h.Name, err)
		}
		own := h.addresses()
		entry = fmt.Sprintf("{name: %s, state: %s, addresses: [%v, %q], macs: [%q]}", h.Name, state, own[0].Addr(), own[1].Addr(), link.Attrs().HardwareAddr)
		return nil
	})
}

// WriteServicePolicy writes a policy without the fleet.
func (h *Host) WriteServicePolicy() error { return h.write(h.service()) }

// service returns the part of the policy about the service.
func (h *Host) service() string {
	members := []string{`- {match: {command_line: '^receiver-(\d+)( |$)'}, slot: group}`}
	for slot := range h.fleet.o.Slots {
		members = append(members, fmt.Sprintf(`- {match: {command_line: 'nfacctd-%d(\.conf|\])'}, slot: %d}`, h.Collector(slot), slot))
	}
	service := append([]string{
		fmt.Sprintf("slots: %d", h.fleet.o.Slots), "user: root", "cgroup: /" + filepath.Join(h.fleet.CgroupPath(), h.Name),
		fmt.Sprintf(`listeners: [{protocol: tcp, address: "[::]:%d"}, {protocol: udp, address: "[::]:%d"}]`, BMP, IPFIX),
		"members:\n      " + strings.Join(members, "\n      "),
	}, h.fleet.o.Service...)
	return "services:\n  telemetry:\n    " + strings.Join(service, "\n    ") + "\n"
}

func (h *Host) write(policy string) error {
	if err := os.WriteFile(h.PolicyPath()+".new", []byte(policy), 0o600); err != nil {
		return err
	}
	return os.Rename(h.PolicyPath()+".new", h.PolicyPath())
}

// Collector returns the number in the lab (lab.CollectorConfig.Slot) of the collector in a slot of the host.
func (h *Host) Collector(slot int) int { return h.Number*h.fleet.o.Slots + slot }

// StartAgent starts the agent, and waits until it answers.
func (h *Host) StartAgent(ctx context.Context) error {
	h.Agent = h.Namespace.Command(context.Background(), h.fleet.o.Binary, "agent", "--log-level", "debug", "--policy", h.PolicyPath(),
		"--state-dir", filepath.Join(h.Dir, "state"), "--run-dir", h.Dir, "--pins", h.fleet.o.Pins(h.Name))
	h.Agent.Name = h.Name + "/agent"
	if err := h.Agent.Start(); err != nil {
		return err
	}
	return h.fleet.WaitFor(ctx, "the agent of host "+h.Name, func() (bool, error) {
		bounded, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		err := api.NewClient(api.SocketPath(h.Dir)).Get(bounded, "/v1/status", nil, new(api.Status))
		return err == nil, h.Agent.Err()
	})
}

// Status returns the fleet as the host sees it.
func (h *Host) Status(ctx context.Context) (s api.FleetStatus, err error) {
	return s, api.NewClient(api.SocketPath(h.Dir)).Get(ctx, "/v1/fleet", nil, &s)
}

// Events returns the events of a kind that the agents of the host have recorded.
func (h *Host) Events(ctx context.Context, kind string) (list []api.Event, err error) {
	stdout, stderr, err := h.Command(ctx, "events", "-o", "jsonl", "--since", "1d", "--kind", kind)
	if err != nil {
		return nil, fmt.Errorf("read events of host %s: %w: %s", h.Name, err, stderr)
	}
	for line := range strings.Lines(stdout) {
		var e api.Event
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			return nil, fmt.Errorf("read events of host %s: %w", h.Name, err)
		}
		list = append(list, e)
	}
	return list, nil
}

// Set changes the state of a host of the fleet by a command on this host.
func (h *Host) Set(ctx context.Context, name, state string) error {
	if _, stderr, err := h.Command(ctx, "host", "set", name, state); err != nil {
		return fmt.Errorf("sockeye host set %s %s: %w: %s", name, state, err, stderr)
	}
	return nil
}

// Command runs a command of Sockeye on the host. err is an *exec.ExitError if the command fails.
func (h *Host) Command(ctx context.Context, args ...string) (stdout, stderr string, err error) {
	cmd := exec.CommandContext(ctx, h.fleet.o.Binary, append([]string{"--run-dir", h.Dir}, args...)...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err = cmd.Run()
	return out.String(), errs.String(), err
}

// Kill ends all processes of the host at once, as a loss of power does, and cuts its link.
func (h *Host) Kill() error { return errors.Join(h.Cut(), cgroup.Kill(h.Cgroup())) }

// Cut sets the interface of the host down: the host loses all of its peers at once, and its peers notice nothing by the link,
// which stays up on their side in a fleet with one link.
func (h *Host) Cut() error {
	if err := h.Namespace.Sysctl("ipv6.conf.eth0.keep_addr_on_down", "1"); err != nil {
		return err
	}
	return h.setLink(netlink.LinkSetDown)
}

// Mend undoes Cut.
func (h *Host) Mend() error {
	if err := h.setLink(netlink.LinkSetUp); err != nil {
		return err
	}
	if err := awaitAddresses(h.Namespace, h.addresses()); err != nil {
		return err
	}
	return h.defaultRoutes() // the kernel has removed them
}

// defaultRoutes adds the routes through the front router.
func (h *Host) defaultRoutes() error {
	var errs []error
	for _, a := range gateway(h.Number, h.fleet.o.Routed) {
		everything := netip.PrefixFrom(netip.IPv4Unspecified(), 0)
		if a.Addr().Is6() {
			everything = netip.PrefixFrom(netip.IPv6Unspecified(), 0)
		}
		errs = append(errs, h.Namespace.AddRoute(everything, a.Addr()))
	}
	return errors.Join(errs...)
}

// addresses returns the addresses of a host: IPv4 and IPv6.
func (h *Host) addresses() []netip.Prefix {
	subnet, number := 0, 11+h.Number
	if h.fleet.o.Routed {
		subnet, number = 1+h.Number, 2
	}
	return []netip.Prefix{
		netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 79, byte(subnet), byte(number)}), 24),
		netip.PrefixFrom(netip.MustParseAddr(fmt.Sprintf("fd79:0:0:%x::%x", subnet, number)), 64),
	}
}

func (h *Host) setLink(set func(netlink.Link) error) error {
	return h.Namespace.Do(func() error {
		link, err := netlink.LinkByName("eth0")
		if err == nil {
			err = set(link)
		}
		if err != nil {
			return fmt.Errorf("set eth0 of host %s: %w", h.Name, err)
		}
		return nil
	})
}

// Isolate cuts the host off from all etcd servers, and from nothing else, or ends that.
func (h *Host) Isolate(on bool) error {
	for _, s := range h.fleet.Etcd {
		route := &netlink.Route{Dst: &net.IPNet{IP: s.Address.AsSlice(), Mask: net.CIDRMask(32, 32)}, Type: unix.RTN_BLACKHOLE}
		change := h.Namespace.Netlink().RouteDel
		if on {
			change = h.Namespace.Netlink().RouteReplace
		}
		if err := change(route); err != nil {
			return fmt.Errorf("isolate host %s from %s: %w", h.Name, s.name, err)
		}
	}
	return nil
}
