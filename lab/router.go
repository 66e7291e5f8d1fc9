// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Router is a router namespace and its programs.
type Router struct {
	Index            int // from 0
	Name             string
	Namespace        *Namespace
	IPv4, IPv6       netip.Addr   // of the device, for BMP, IPFIX and all other traffic except BGP
	BGP4, BGP6       netip.Addr   // of its BGP sessions
	Prefix4, Prefix6 netip.Prefix // announced by BGP; the router owns all addresses of the prefixes
	ASN              uint32
	Community        string // of its own prefixes

	BGP       *Process     // set by StartRouter
	BMP       netip.Addr   // source address of BMP; set by StartRouter
	Exporters []*Process   // appended by StartExporter
	Exports   []netip.Addr // source addresses of the exporters, without duplicates

	dir string
}

func newRouter(l *Lab, i int) *Router {
	name := fmt.Sprintf("router-%d", i)
	v6 := func(s string) netip.Addr { return netip.MustParseAddr(s) }
	return &Router{
		Index: i, Name: name, dir: filepath.Join(l.dir, name),
		IPv4: netip.AddrFrom4([4]byte{10, 77, 0, byte(1 + i)}), IPv6: v6(fmt.Sprintf("fd77::%x", 1+i)),
		BGP4: netip.AddrFrom4([4]byte{10, 76, 0, byte(1 + i)}), BGP6: v6(fmt.Sprintf("fd76::%x", 1+i)),
		Prefix4: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 78, byte(i), 0}), 24),
		Prefix6: netip.PrefixFrom(v6(fmt.Sprintf("fd78:0:%x::", i)), 64),
		ASN:     uint32(65001 + i), Community: fmt.Sprintf("%d:100", 65001+i),
	}
}

// Router returns router i, 0 to Options.Routers-1.
func (l *Lab) Router(i int) *Router { return l.routers[i] }

// Routers returns all routers.
func (l *Lab) Routers() []*Router { return slices.Clone(l.routers) }

// RouterConfig configures bgpd in a router's namespace.
type RouterConfig struct {
	Router    int
	Collector netip.AddrPort // destination of BMP, over IPv4 or IPv6. Default: [CollectorIPv4]:1790
	Neighbors []int          // BGP neighbours; nil: the routers before and after it, in a ring
	Stats     time.Duration  // interval of BMP statistics reports, 100 ms or more; 0: none
	Extra     []string       // additional lines of configuration
}

// StartRouter starts FRR's bgpd, as user frr and without zebra. bgpd peers with its neighbours over IPv4 and IPv6,
// announces the router's prefixes with the router's community, and sends the post-policy routes of its neighbours by
// BMP. It retries a failed BMP connection after 0.5 to 2 s.
func (l *Lab) StartRouter(c RouterConfig) (*Process, error) {
	bgpd, err := bgpdPath()
	if err != nil {
		return nil, err
	}
	if c.Router < 0 || c.Router >= len(l.routers) {
		return nil, fmt.Errorf("start router %d: the lab has %d", c.Router, len(l.routers))
	}
	r := l.routers[c.Router]
	if !c.Collector.IsValid() {
		c.Collector = netip.AddrPortFrom(CollectorIPv4, 1790)
	}
	if n := len(l.routers); c.Neighbors == nil && n > 1 {
		c.Neighbors = []int{(c.Router + 1) % n}
		if n > 2 {
			c.Neighbors = append(c.Neighbors, (c.Router+n-1)%n)
		}
	}
	if p := r.vtySocket(); len(p) > 107 {
		return nil, fmt.Errorf("start %s: path %s is too long for a Unix socket; choose a shorter Options.Dir", r.Name, p)
	}

	conf := []string{
		"hostname " + r.Name,
		"log stdout informational",
		fmt.Sprintf("router bgp %d", r.ASN),
		fmt.Sprintf(" bgp router-id %v", r.IPv4),
		" no bgp ebgp-requires-policy",
		" no bgp network import-check", // without zebra, bgpd has no kernel routes
		" no bgp default ipv4-unicast",
	}
	families := map[string][]string{
		"ipv4": {fmt.Sprintf("  network %v route-map own", r.Prefix4)},
		"ipv6": {fmt.Sprintf("  network %v route-map own", r.Prefix6)},
	}
	for _, i := range c.Neighbors {
		n := l.routers[i]
		for family, a := range map[string]netip.Addr{"ipv4": n.BGP4, "ipv6": n.BGP6} {
			conf = append(conf,
				fmt.Sprintf(" neighbor %v remote-as %d", a, n.ASN),
				fmt.Sprintf(" neighbor %v timers connect 1", a),
				fmt.Sprintf(" neighbor %v advertisement-interval 0", a))
			if i < c.Router {
				// Only one of two neighbours connects. If both connect at once, BMP may never report the routes of that
				// neighbour.
				conf = append(conf, fmt.Sprintf(" neighbor %v passive", a))
			}
			families[family] = append(families[family], fmt.Sprintf("  neighbor %v activate", a))
		}
	}
	conf = append(conf, " bmp targets lab")
	if c.Stats > 0 {
		conf = append(conf, fmt.Sprintf("  bmp stats interval %d", c.Stats.Milliseconds()))
	}
	conf = append(conf,
		"  bmp monitor ipv4 unicast post-policy",
		"  bmp monitor ipv6 unicast post-policy",
		fmt.Sprintf("  bmp connect %v port %d min-retry 500 max-retry 2000", c.Collector.Addr().Unmap(), c.Collector.Port()),
		" exit")
	for _, family := range []string{"ipv4", "ipv6"} {
		conf = append(conf, " address-family "+family+" unicast")
		conf = append(conf, families[family]...)
		conf = append(conf, " exit-address-family")
	}
	conf = append(conf, "exit", "route-map own permit 10", " set community "+r.Community, "exit")
	conf = append(conf, c.Extra...)

	path, err := l.writeConfig(r.dir, "bgpd.conf", "frr", conf...)
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", r.Name, err)
	}
	// The process starts as this user, because a change of the uid clears PDEATHSIG. bgpd accepts this with -S.
	p := r.Namespace.Command(context.Background(), bgpd, "-n", "-Z", "-S", "-M", "bmp", "-P", "0", "-f", path,
		"-i", filepath.Join(r.dir, "bgpd.pid"), "--vty_socket", r.dir)
	p.Name, p.User = r.Name+"-bgpd", "frr"
	p.Cmd.SysProcAttr = &syscall.SysProcAttr{AmbientCaps: []uintptr{unix.CAP_NET_BIND_SERVICE, unix.CAP_NET_RAW}}
	if err := p.Start(); err != nil {
		return nil, err
	}
	r.BGP, r.BMP = p, r.address(c.Collector.Addr())
	return p, nil
}

// address of the family of a.
func (r *Router) address(a netip.Addr) netip.Addr {
	if a.Unmap().Is4() {
		return r.IPv4
	}
	return r.IPv6
}

func (r *Router) vtySocket() string { return filepath.Join(r.dir, "bgpd.vty") }

// WaitBGP waits until every started router has the prefixes of all started routers.
func (l *Lab) WaitBGP(ctx context.Context) error {
	var started []*Router
	for _, r := range l.routers {
		if r.BGP != nil {
			started = append(started, r)
		}
	}
	done := map[int]bool{}
	return l.WaitFor(ctx, "BGP to converge", func() (bool, error) {
		for _, r := range started {
			if err := r.BGP.Err(); err != nil {
				return false, err
			}
			if done[r.Index] {
				continue
			}
			v4, v6, err := r.Prefixes()
			if err != nil || v4 < len(started) || v6 < len(started) { // an error occurs if bgpd has not created its socket yet
				return false, nil
			}
			done[r.Index] = true
		}
		return true, nil
	})
}

// Prefixes returns the number of IPv4 and IPv6 prefixes in bgpd's table, including the router's own.
func (r *Router) Prefixes() (v4, v6 int, err error) {
	for family, n := range map[string]*int{"ipv4": &v4, "ipv6": &v6} {
		out, err := r.Vty("show bgp " + family + " unicast json")
		if err != nil {
			return 0, 0, err
		}
		var table struct {
			Routes map[string]json.RawMessage `json:"routes"`
		}
		if err := json.Unmarshal([]byte(out), &table); err != nil {
			return 0, 0, fmt.Errorf("read %s table of %s: %w", family, r.Name, err)
		}
		*n = len(table.Routes)
	}
	return v4, v6, nil
}

// Vty runs a command in bgpd, such as "show bgp summary json", and returns the output.
func (r *Router) Vty(command string) (string, error) {
	c, err := net.DialTimeout("unix", r.vtySocket(), time.Second)
	if err != nil {
		return "", fmt.Errorf("run %q in %s: %w", command, r.Name, err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(5 * time.Second))
	in := bufio.NewReader(c)
	var out string
	for _, s := range []string{"enable", command} {
		if _, err = c.Write(append([]byte(s), 0)); err != nil {
			break
		}
		// The reply is text followed by three zero bytes and a status byte.
		var b strings.Builder
		for !strings.HasSuffix(b.String(), "\x00\x00\x00") {
			var x byte
			if x, err = in.ReadByte(); err != nil {
				break
			}
			b.WriteByte(x)
		}
		var status byte
		if err == nil {
			status, err = in.ReadByte()
		}
		out = strings.TrimRight(b.String(), "\x00")
		if err == nil && status != 0 {
			err = fmt.Errorf("status %d: %s", status, strings.TrimSpace(out))
		}
		if err != nil {
			break
		}
	}
	if err != nil {
		return "", fmt.Errorf("run %q in %s: %w", command, r.Name, err)
	}
	return out, nil
}

// ExporterConfig configures pmacctd in a router's namespace.
type ExporterConfig struct {
	Router    int
	Instance  int            // number of the exporter in its router. Exporters of one router have their own sockets and export the same flows
	Collector netip.AddrPort // destination of IPFIX. Default: port 4739 of the collector's address in the address family of Source
	Source    netip.Addr     // default: the router's BMP address after StartRouter, otherwise its IPv4 address
	Extra     []string       // additional lines of configuration
}

// StartExporter starts pmacctd with nfprobe. It exports outgoing flows from the router's own prefixes, one datagram per
// packet, from one UDP socket. Incoming flows are excluded, because no neighbour announces their destinations.
func (l *Lab) StartExporter(c ExporterConfig) (*Process, error) {
	pmacctd, err := pmacctdPath()
	if err != nil {
		return nil, err
	}
	if c.Router < 0 || c.Router >= len(l.routers) {
		return nil, fmt.Errorf("start exporter of router %d: the lab has %d", c.Router, len(l.routers))
	}
	r := l.routers[c.Router]
	if !c.Source.IsValid() {
		if c.Source = r.BMP; !c.Source.IsValid() {
			c.Source = r.IPv4
		}
	}
	if !c.Collector.IsValid() {
		a := CollectorIPv4
		if c.Source.Is6() {
			a = CollectorIPv6
		}
		c.Collector = netip.AddrPortFrom(a, 4739)
	}
	conf := []string{
		"daemonize: false",
		"pcap_interface: eth0",
		fmt.Sprintf("pcap_filter: src net %v or src net %v", r.Prefix4, r.Prefix6),
		"plugins: nfprobe",
		"aggregate: src_host, dst_host, src_port, dst_port, proto",
		"nfprobe_version: 10",
		fmt.Sprintf("nfprobe_engine: %d", c.Instance), // the observation domain
		fmt.Sprintf("nfprobe_receiver: %v", c.Collector),
		// Each packet is exported at once. nfprobe sends its templates, which a restarted collector needs for decoding,
		// every 18 datagrams. With the minimum flow duration of 1 s, this takes half a minute.
		"nfprobe_dont_cache: true",
	}
	if c.Source.Is4() {
		conf = append(conf, fmt.Sprintf("nfprobe_source_ip: %v", c.Source))
	} else if netip.PrefixFrom(r.IPv6, 64).Contains(c.Collector.Addr()) {
		// pmacct 1.7.7 cannot bind an IPv6 source address ("bind() failed: Invalid argument"). The route to a collector behind
		// another router has a source address.
		if err := r.Namespace.PreferSource(c.Collector.Addr(), c.Source); err != nil {
			return nil, fmt.Errorf("start exporter of %s: %w", r.Name, err)
		}
	}
	path, err := l.writeConfig(r.dir, fmt.Sprintf("pmacctd-%d.conf", c.Instance), "", append(conf, c.Extra...)...)
	if err != nil {
		return nil, fmt.Errorf("start exporter of %s: %w", r.Name, err)
	}
	p := r.Namespace.Command(context.Background(), pmacctd, "-f", path)
	p.Name = fmt.Sprintf("%s-pmacctd-%d", r.Name, c.Instance)
	if err := p.Start(); err != nil {
		return nil, err
	}
	r.Exporters = append(r.Exporters, p)
	if !slices.Contains(r.Exports, c.Source) {
		r.Exports = append(r.Exports, c.Source)
	}
	return p, nil
}
