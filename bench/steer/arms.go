// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/bench/harness"
	"sockeye/internal/netns"
)

const (
	slots          = 4
	bmpPort        = 1790
	ipfixPort      = 4739
	ownTCP         = 20000 // + slot: ports of the members that do not share ports
	ownUDP         = 21000
	furtherDevices = 10_000  // in the device map, besides the routers
	receiveBuffer  = 4 << 20 // bytes, for each UDP socket of a collector
)

// arm is one method to distribute the routers' traffic over four members.
type arm interface {
	name() string
	title() string
	// ports returns the ports of the member of a slot.
	ports(slot int) (tcp, udp uint16)
	// start starts all processes except the members, before the members.
	start(ctx context.Context, f *fleet) error
	// ready returns when traffic to bmpPort and ipfixPort reaches the running members.
	ready(ctx context.Context, f *fleet) error
}

// plainArm is the kernel's hash over a SO_REUSEPORT group.
type plainArm struct{}

func (plainArm) name() string                        { return "plain" }
func (plainArm) title() string                       { return "plain SO_REUSEPORT" }
func (plainArm) ports(int) (tcp, udp uint16)         { return bmpPort, ipfixPort }
func (plainArm) start(context.Context, *fleet) error { return nil }
func (plainArm) ready(context.Context, *fleet) error { return nil }

// proxyArm is HAProxy for TCP and nfacctd as a replicator for UDP. Each has a map of all routers, so that both streams
// of a router reach the same member.
type proxyArm struct {
	// buffer is plugin_buffer_size. 0 is the default of pmacct, as in its documentation. A larger buffer saves CPU
	// time, and delays datagrams until the buffer is full.
	buffer  int
	splice  bool // option splice-auto of HAProxy
	threads int  // of HAProxy; 0: its default, one for each CPU
	procs   []*harness.Process
}

func (p *proxyArm) name() string {
	name := "proxy"
	if p.buffer > 0 {
		name += "-buffered"
	}
	if p.splice {
		name += "-splice"
	}
	if p.threads > 0 {
		name += fmt.Sprintf("-%d", p.threads)
	}
	return name
}

func (p *proxyArm) title() string {
	if p.buffer > 0 {
		return fmt.Sprintf("the same, %d KB buffers", p.buffer>>10)
	}
	title := "HAProxy + nfacctd replicator"
	var options []string
	if p.splice {
		options = append(options, "splice-auto")
	}
	if p.threads > 0 {
		options = append(options, fmt.Sprintf("%d thread", p.threads))
	}
	if options != nil {
		title = "the same, " + strings.Join(options, ", ")
	}
	return title
}

func (*proxyArm) ports(slot int) (tcp, udp uint16) {
	return ownTCP + uint16(slot), ownUDP + uint16(slot)
}

func (p *proxyArm) start(_ context.Context, f *fleet) error {
	var byRouter, tags, receivers, backends strings.Builder
	for i := range f.devices {
		for _, address := range deviceAddrs(i) {
			fmt.Fprintf(&byRouter, "%s slot%d\n", address, i%slots)
			tag := i%slots + 1
			if address.Is6() {
				tag += slots
			}
			fmt.Fprintf(&tags, "set_tag=%d ip=%s\n", tag, address)
		}
	}
	var global, defaults string
	if p.threads > 0 {
		global = fmt.Sprintf("  nbthread %d\n", p.threads)
	}
	if p.splice {
		defaults = "  option splice-auto\n"
	}
	// nfacctd needs the router's address to join the two streams; the plain receiver does not.
	header := ""
	if f.kind == kindNfacctd {
		header = " send-proxy-v2"
	}
	for i := range slots {
		tcp, udp := p.ports(i)
		// A transparent replicator sends to an address of the router's family.
		fmt.Fprintf(&receivers, "id=%d ip=127.0.0.1:%d tag=%d\nid=%d ip=[::1]:%d tag=%d\n", i+1, udp, i+1, i+1+slots, udp, i+1+slots)
		fmt.Fprintf(&backends, "backend slot%d\n  server member 127.0.0.1:%d%s\n", i, tcp, header)
	}
	for name, text := range map[string]string{
		"routers.map": byRouter.String(), "tags.map": tags.String(), "receivers.lst": receivers.String(),
		"haproxy.cfg": fmt.Sprintf(`global
  maxconn %d
%sdefaults
  mode tcp
%s  timeout connect 5s
  timeout client 1h
  timeout server 1h
frontend bmp
  bind :::%d v4v6
  use_backend %%[src,map_ip(%s)]
%s`, 4*f.devices+100, global, defaults, bmpPort, f.path("routers.map"), backends.String()),
		"tee.conf": fmt.Sprintf(`daemonize: false
logfile: %[1]s/tee.log
nfacctd_port: %[2]d
nfacctd_pipe_size: %[4]d
pre_tag_map: %[1]s/tags.map
maps_index: true
maps_entries: %[3]d
plugins: tee[a]
plugin_pipe_size[a]: 67108864
plugin_buffer_size[a]: %[5]d
tee_receivers[a]: %[1]s/receivers.lst
tee_transparent[a]: true
`, f.dir, ipfixPort, len(deviceAddrs(0))*f.devices+slots, receiveBuffer, p.buffer),
	} {
		if err := os.WriteFile(f.path(name), []byte(text), 0o600); err != nil {
			return fmt.Errorf("write configuration of the proxy: %w", err)
		}
	}
	p.procs = nil
	for _, argv := range [][]string{
		{"haproxy", "-db", "-f", f.path("haproxy.cfg")},
		{f.b.nfacctd(), "-f", f.path("tee.conf")},
	} {
		proc, err := f.b.Start(f.group(balanceGroup), filepath.Base(argv[0]), argv...)
		if err != nil {
			return err
		}
		p.procs = append(p.procs, proc)
	}
	return nil
}

func (p *proxyArm) ready(ctx context.Context, _ *fleet) error {
	return harness.Await(ctx, "the proxy", p.procs, func() bool {
		return harness.Sockets("tcp", bmpPort) > 0 && harness.Sockets("udp", ipfixPort) > 0
	})
}

// sockeyeArm is Sockeye in one of its modes. With steering: lookup, each member listens on its own ports.
type sockeyeArm struct {
	binary    string
	steering  string
	deviceMap int    // further devices in a device map that has all routers; 0: no device map
	against   string // the name of the binary, if it is one of the flag -against
	agent     *harness.Process
}

func (s *sockeyeArm) name() string {
	if s.against != "" {
		plain := *s
		plain.against = ""
		return plain.name() + "_" + s.against
	}
	if s.deviceMap > 0 {
		return s.steering + "_device_map"
	}
	return s.steering
}

func (s *sockeyeArm) title() string {
	if s.against != "" {
		plain := *s
		plain.against = ""
		return plain.title() + ", " + s.against
	}
	if s.deviceMap > 0 {
		return "Sockeye " + s.steering + ", device map"
	}
	return "Sockeye " + s.steering
}

func (s *sockeyeArm) ports(slot int) (tcp, udp uint16) {
	if s.steering == "lookup" {
		return ownTCP + uint16(slot), ownUDP + uint16(slot)
	}
	return bmpPort, ipfixPort
}

func (s *sockeyeArm) start(_ context.Context, f *fleet) error {
	var more, tcpPorts, udpPorts string
	if s.steering == "lookup" {
		tcpPorts = fmt.Sprintf(`, member_ports: "%d-%d"`, ownTCP, ownTCP+slots-1)
		udpPorts = fmt.Sprintf(`, member_ports: "%d-%d"`, ownUDP, ownUDP+slots-1)
	}
	if s.deviceMap > 0 {
		var csv strings.Builder
		for i := range f.devices {
			for _, address := range deviceAddrs(i) {
				fmt.Fprintf(&csv, "%s,router-%d\n", netip.PrefixFrom(address, address.BitLen()), i)
			}
		}
		for i := range s.deviceMap {
			fmt.Fprintf(&csv, "%s/32,other-%d\n", netip.AddrFrom4([4]byte{172, 16 + byte(i>>16), byte(i >> 8), byte(i)}), i)
		}
		if err := os.WriteFile(f.path("devices.csv"), []byte(csv.String()), 0o600); err != nil {
			return fmt.Errorf("write device map: %w", err)
		}
		more = "\n    device_map: devices.csv"
	}
	policy := fmt.Sprintf(`services:
  bench:
    slots: %d
    listeners:
      - {protocol: tcp, address: "[::]:%d"%s}
      - {protocol: udp, address: "[::]:%d"%s}
    steering: %s%s
    user: root
    cgroup: %s
    members:
      - {match: {command_line: 'member-(\d+)'}, slot: group}
`, slots, bmpPort, tcpPorts, ipfixPort, udpPorts, s.steering, more, filepath.Join(filepath.Base(f.b.Cgroup), f.group(membersGroup)))
	if err := os.WriteFile(f.path("policy.yaml"), []byte(policy), 0o600); err != nil {
		return fmt.Errorf("write policy: %w", err)
	}
	if _, err := f.b.Group(f.group(membersGroup)); err != nil { // the agent attaches to it
		return err
	}
	var err error
	s.agent, err = f.b.Start(f.group(balanceGroup), "sockeye agent", s.binary, "agent",
		"--policy", f.path("policy.yaml"), "--state-dir", f.path("state"), "--run-dir", f.path("run"), "--pins", f.pins())
	return err
}

func (s *sockeyeArm) ready(ctx context.Context, f *fleet) error {
	var last []byte
	err := harness.Await(ctx, "Sockeye's slots", []*harness.Process{s.agent}, func() bool {
		var status struct {
			Services []struct {
				Ready int `json:"ready"`
			} `json:"services"`
		}
		cmd := exec.CommandContext(ctx, s.binary, "status", "-o", "json", "--run-dir", f.path("run"))
		last, _ = cmd.CombinedOutput()
		return json.Unmarshal(last, &status) == nil && len(status.Services) == 1 && status.Services[0].Ready == slots
	})
	if err != nil {
		return fmt.Errorf("%w\nsockeye status: %s\n%s", err, last, s.agent.LastWords())
	}
	return nil
}

const (
	kindPlain   = "plain"   // plain receivers, which only read
	kindSources = "sources" // plain receivers that count by router
	kindNfacctd = "nfacctd"

	membersGroup   = "members"
	balanceGroup   = "balance"
	generatorGroup = "generator"
)

// fleet is an arm with its members, in its own network namespace.
type fleet struct {
	b       *bench
	arm     arm
	kind    string
	devices int // number of routers that the arm knows
	net     *os.File
	dir     string
	members []*harness.Process
	killed  *harness.Process // the member that the benchmark has killed
}

func (f *fleet) path(name string) string  { return filepath.Join(f.dir, name) }
func (f *fleet) group(role string) string { return f.arm.name() + "-" + role }
func (f *fleet) pins() string             { return f.path("bpf/sockeye") }

// launch starts a fleet and does not wait until it is ready: nfacctd starts in five seconds, so several fleets start in
// parallel.
func (b *bench) launch(ctx context.Context, a arm, kind string, devices int) (*fleet, error) {
	f := &fleet{b: b, arm: a, kind: kind, devices: devices, dir: filepath.Join(b.Dir, a.name())}
	var err error
	if f.net, err = harness.EnterNew(); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(f.dir, 0o755); err != nil {
		return f, fmt.Errorf("make scratch directory: %w", err)
	}
	if err := a.start(ctx, f); err != nil {
		return f, err
	}
	for slot := range slots {
		tcp, udp := a.ports(slot)
		name := fmt.Sprintf("member-%d", slot)
		argv := []string{
			"/proc/self/exe", "receiver", "-name=" + name, fmt.Sprintf("-tcp=%d", tcp), fmt.Sprintf("-udp=%d", udp),
			fmt.Sprintf("-sources=%t", kind == kindSources),
		}
		if kind == kindNfacctd {
			if err := f.configure(slot); err != nil {
				return f, err
			}
			argv = []string{b.nfacctd(), "-f", f.path(name + ".conf")}
			if _, ok := a.(*pmacctArm); ok && slot > 0 {
				if err := harness.Pause(ctx, pmacctGap); err != nil {
					return f, err
				}
			}
		}
		p, err := b.Start(f.group(membersGroup), name, argv...)
		if err != nil {
			return f, err
		}
		f.members = append(f.members, p)
	}
	return f, nil
}

// ready waits for the sockets of the members and for the arm.
func (f *fleet) ready(ctx context.Context) error {
	if err := netns.Enter(f.net); err != nil {
		return err
	}
	waiting := map[string]map[uint16]int{"tcp": {}, "udp": {}}
	for slot := range slots {
		tcp, udp := f.arm.ports(slot)
		waiting["tcp"][tcp]++
		waiting["udp"][udp]++
	}
	if err := harness.Await(ctx, "the members' sockets", f.members, func() bool {
		for protocol, ports := range waiting {
			for port, n := range ports {
				if harness.Sockets(protocol, port) < n {
					return false
				}
			}
		}
		return true
	}); err != nil {
		return err
	}
	return f.arm.ready(ctx, f)
}

// configure writes the configuration of a collector that joins flows with BMP routes, as in normal operation of
// nfacctd, except that it writes its records only at the end.
func (f *fleet) configure(slot int) error {
	tcp, udp := f.arm.ports(slot)
	_, proxied := f.arm.(*proxyArm)
	text := fmt.Sprintf(`daemonize: false
core_proc_name: member-%[2]d
logfile: %[1]s/member-%[2]d.log
nfacctd_port: %[4]d
nfacctd_pipe_size: %[6]d
nfacctd_as: bmp
nfacctd_net: bmp
bmp_daemon: true
bmp_daemon_port: %[3]d
bmp_daemon_max_peers: %[5]d
bmp_daemon_parse_proxy_header: %[7]t
aggregate: peer_src_ip, dst_net, dst_mask, dst_as, std_comm, as_path
plugins: print
plugin_pipe_size: 67108864
plugin_buffer_size: 65536
print_output: json
print_output_file: %[1]s/records-%[2]d.json
print_refresh_time: 86400
`, f.dir, slot, tcp, udp, f.devices+1, receiveBuffer, proxied)
	if p, ok := f.arm.(*pmacctArm); ok {
		text += p.lines(slot)
	}
	if err := os.WriteFile(f.path(fmt.Sprintf("member-%d.conf", slot)), []byte(text), 0o600); err != nil {
		return fmt.Errorf("write configuration of nfacctd: %w", err)
	}
	return nil
}

// finish terminates the nfacctd of a fleet, and reads the records that they write.
func (f *fleet) finish(ctx context.Context) (records, withRoutes uint64, err error) {
	for _, p := range f.members {
		p.Signal(harness.Interrupt)
	}
	for _, p := range f.members {
		p.Stop(harness.Interrupt)
	}
	for end := time.Now().Add(harness.KillTimeout); !f.b.Empty(f.group(membersGroup)) && time.Now().Before(end); { // nfacctd's writers outlive nfacctd
		if err := harness.Pause(ctx, 20*time.Millisecond); err != nil {
			return 0, 0, err
		}
	}
	for slot := range slots {
		file, err := os.Open(f.path(fmt.Sprintf("records-%d.json", slot)))
		if os.IsNotExist(err) {
			continue // no records
		}
		if err != nil {
			return 0, 0, fmt.Errorf("read nfacctd's records: %w", err)
		}
		for dec := json.NewDecoder(file); dec.More(); {
			var r struct {
				Packets uint64 `json:"packets"`
				Comms   string `json:"comms"`
			}
			if err := dec.Decode(&r); err != nil {
				file.Close()
				return 0, 0, fmt.Errorf("read nfacctd's records: %w", err)
			}
			records += r.Packets
			if r.Comms != "" {
				withRoutes += r.Packets
			}
		}
		file.Close()
	}
	return records, withRoutes, nil
}

func (f *fleet) close() {
	f.b.KillGroups(f.group(membersGroup), f.group(balanceGroup), f.group(generatorGroup))
	_ = unix.Unmount(filepath.Dir(f.pins()), unix.MNT_DETACH) // bpffs of the agent; ignore the error if there is none
	if p, ok := f.arm.(*pmacctArm); ok {
		p.close()
	}
	f.net.Close()
}
