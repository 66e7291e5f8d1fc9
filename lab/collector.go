// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// CollectorConfig configures an nfacctd. Collectors with the same ports form a SO_REUSEPORT group (nfacctd sets the
// option) and need the same user.
type CollectorConfig struct {
	Slot      int            // the collector's number in the lab; a second start with the same number replaces the first
	BMP       netip.AddrPort // default [::]:1790
	IPFIX     netip.AddrPort // default [::]:4739
	User      string         // name or number; default: root
	Nice      int            // niceness, -20 to 19
	MaxPeers  int            // maximum number of BMP sessions; nfacctd allocates 2.2 MB for each. Default: two for each router of the lab, at least 4
	Refresh   time.Duration  // interval of writing records, in whole seconds; default 1 s
	Namespace *Namespace     // default: the namespace "collector"
	Env       []string       // added to the environment
	Wrap      []string       // prefix of nfacctd's command; must end with exec, as sockeye run --slot 0 -- does
	Extra     []string       // additional lines of configuration
	Prefix    string         // of the names of process and cgroup, as a host of a fleet has, with a slash
	Records   string         // name of its records; default: nfacctd-SLOT
	Output    Output         // where it writes records; default: the file RecordsPath
}

// Output stores the flow records of collectors. The records of each collector have a name.
type Output interface {
	// Config returns the lines of nfacctd's configuration that select the plugin and its target. A plugin writes records
	// every refresh seconds.
	Config(name string, refresh int) []string
	// Records returns the records after an offset (0: all) and the offset for the next call.
	Records(name string, from int64) ([]Record, int64, error)
	// End returns the offset of the next record.
	End(name string) (int64, error)
}

// Collector is a running nfacctd.
type Collector struct {
	*Process
	Slot       int
	BMP, IPFIX netip.AddrPort
	// The base names are nfacctd-SLOT.conf and nfacctd-SLOT.json. nfacctd appends one JSON object per line to the
	// records. RecordsPath is empty if the collector has another output.
	ConfigPath, RecordsPath string

	output  Output
	records string // name in the output
}

// files is the default output: one file per collector in this directory, with an offset in bytes.
type files string

// StartCollector starts Debian's unmodified nfacctd, which correlates IPFIX flows with BMP routes. nfacctd binds its
// IPFIX socket after 5 s, because it sleeps after the start of its BMP thread (see WaitCollectors). It overwrites its
// command line with "nfacctd: Core Process [nfacctd-SLOT]".
func (l *Lab) StartCollector(c CollectorConfig) (*Collector, error) {
	nfacctd, err := nfacctdPath()
	if err != nil {
		return nil, err
	}
	if !c.BMP.IsValid() {
		c.BMP = netip.AddrPortFrom(netip.IPv6Unspecified(), 1790)
	}
	if !c.IPFIX.IsValid() {
		c.IPFIX = netip.AddrPortFrom(netip.IPv6Unspecified(), 4739)
	}
	if c.MaxPeers == 0 {
		c.MaxPeers = max(4, 2*len(l.routers))
	}
	if c.Namespace == nil {
		if c.Namespace, err = l.Namespace("collector"); err != nil {
			return nil, err
		}
	}
	name := fmt.Sprintf("nfacctd-%d", c.Slot)
	dir := filepath.Join(l.dir, name)
	out := &Collector{
		Slot: c.Slot, BMP: c.BMP, IPFIX: c.IPFIX,
		ConfigPath: filepath.Join(dir, name+".conf"), output: c.Output, records: cmp.Or(c.Records, name),
	}
	if out.output == nil {
		files := files(dir)
		out.output, out.RecordsPath = files, files.path(out.records)
	}
	conf := []string{
		"daemonize: false",
		"core_proc_name: " + name,
		fmt.Sprintf("nfacctd_port: %d", c.IPFIX.Port()),
		fmt.Sprintf("bmp_daemon_port: %d", c.BMP.Port()),
		"bmp_daemon: true",
		fmt.Sprintf("bmp_daemon_max_peers: %d", c.MaxPeers),
		"nfacctd_as: bmp",
		"nfacctd_net: bmp",
		"aggregate: peer_src_ip, src_host, dst_host, dst_net, dst_as, std_comm, as_path",
	}
	conf = append(conf, out.output.Config(out.records, max(1, int(c.Refresh/time.Second)))...)
	// Without an address, nfacctd binds [::], which includes IPv4.
	if a := c.IPFIX.Addr(); a != netip.IPv6Unspecified() {
		conf = append(conf, fmt.Sprintf("nfacctd_ip: %v", a))
	}
	if a := c.BMP.Addr(); a != netip.IPv6Unspecified() {
		conf = append(conf, fmt.Sprintf("bmp_daemon_ip: %v", a))
	}
	if _, err := l.writeConfig(dir, name+".conf", c.User, append(conf, c.Extra...)...); err != nil {
		return nil, fmt.Errorf("start collector %d: %w", c.Slot, err)
	}
	out.Process = c.Namespace.Command(context.Background(), append(slices.Clone(c.Wrap), nfacctd, "-f", out.ConfigPath)...)
	out.Name, out.User, out.Nice = c.Prefix+name, c.User, c.Nice
	// nfacctd 1.7.7 crashes if IPFIX arrives before its BMP thread has allocated its 2 million tables (KNOWN-ISSUES.md). The
	// allocations are faster in the main arena of malloc, in large steps.
	out.Cmd.Env = append(append(os.Environ(), "MALLOC_ARENA_MAX=1", "MALLOC_TOP_PAD_=67108864"), c.Env...)
	if err := out.Start(); err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.collectors[c.Slot] = out
	return out, nil
}

// RemoveCollector lets the lab forget the collector of a slot, which has ended on purpose.
func (l *Lab) RemoveCollector(slot int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.collectors, slot)
}

// WaitListeners waits until all collectors have bound their BMP listeners. Routers can connect afterwards, and the
// kernel's hash selects among all collectors.
func (l *Lab) WaitListeners(ctx context.Context) error {
	return l.waitBound(ctx, "BMP listeners", func(bmp, _ bool) bool { return bmp })
}

// WaitCollectors waits until all collectors have bound both sockets.
func (l *Lab) WaitCollectors(ctx context.Context) error {
	return l.waitBound(ctx, "collectors", func(bmp, ipfix bool) bool { return bmp && ipfix })
}

func (l *Lab) waitBound(ctx context.Context, what string, enough func(bmp, ipfix bool) bool) error {
	return l.WaitFor(ctx, what, func() (bool, error) {
		for _, c := range l.Collectors() {
			if bmp, ipfix, err := c.Bound(); err != nil || !enough(bmp, ipfix) {
				return false, err
			}
		}
		return true, nil
	})
}

const (
	tcpEstablished = 1
	tcpListen      = 10
)

// Bound reports whether the collector's main process has bound its BMP listener and its IPFIX socket.
func (c *Collector) Bound() (bmp, ipfix bool, err error) {
	if err := c.Err(); err != nil {
		return false, false, err
	}
	own := socketInodes(c.Pid())
	err = c.ns.Do(func() error {
		tcp, err := sockets(netlink.SocketDiagTCP)
		if err != nil {
			return err
		}
		udp, err := sockets(netlink.SocketDiagUDP)
		for _, s := range tcp {
			bmp = bmp || s.State == tcpListen && s.ID.SourcePort == c.BMP.Port() && own[s.INode]
		}
		for _, s := range udp {
			ipfix = ipfix || s.ID.SourcePort == c.IPFIX.Port() && own[s.INode]
		}
		return err
	})
	return bmp, ipfix, err
}

// Record is a flow record in nfacctd's JSON output.
type Record struct {
	Peer    netip.Addr `json:"peer_ip_src"` // address of the exporting router
	Src     netip.Addr `json:"ip_src"`
	Dst     netip.Addr `json:"ip_dst"`
	DstNet  string     `json:"net_dst"`
	DstAS   uint32     `json:"as_dst"`
	Comms   string     `json:"comms"`   // "65002:100_65003:100"; empty without the router's routes
	ASPath  string     `json:"as_path"` // "65002_65003"; empty without the router's routes
	Packets uint64     `json:"packets"`
	Bytes   uint64     `json:"bytes"`
}

// Correlated reports whether the record has fields that only BMP provides.
func (r Record) Correlated() bool { return r.Comms != "" || r.ASPath != "" }

// Records returns the collector's records after an offset (0: all) and the offset for the next call.
func (c *Collector) Records(from int64) ([]Record, int64, error) {
	records, next, err := c.output.Records(c.records, from)
	if err != nil {
		err = fmt.Errorf("read records of %s: %w", c.Name, err)
	}
	return records, next, err
}

func (dir files) path(name string) string { return filepath.Join(string(dir), name+".json") }

func (dir files) Config(name string, refresh int) []string {
	return []string{
		"plugins: print",
		"print_output: json",
		"print_output_file: " + dir.path(name),
		"print_output_file_append: true",
		fmt.Sprintf("print_refresh_time: %d", refresh),
		// The default, 4 MB, is the space for some 4,000 records. When the plugin of a busy host falls behind by more, nfacctd overwrites them all
		// without a message.
		"plugin_pipe_size: 33554432",
		// The default, 16411, costs each collector 50 MB.
		"print_cache_entries: 4093",
	}
}

// Records skips incomplete lines of killed writers.
func (dir files) Records(name string, from int64) ([]Record, int64, error) {
	f, err := os.Open(dir.path(name))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, from, nil
	}
	if err != nil {
		return nil, from, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.NewSectionReader(f, from, 1<<40))
	if err != nil {
		return nil, from, err
	}
	b = b[:bytes.LastIndexByte(b, '\n')+1] // the last line may be incomplete
	var records []Record
	for line := range bytes.Lines(b) {
		if r, err := ParseRecord(line); err == nil {
			records = append(records, r)
		}
	}
	return records, from + int64(len(b)), nil
}

// ParseRecord parses a flow record in nfacctd's JSON output.
func ParseRecord(text []byte) (r Record, err error) {
	err = json.Unmarshal(text, &r)
	r.Peer = r.Peer.Unmap()
	return r, err
}

func (dir files) End(name string) (int64, error) {
	fi, err := os.Stat(dir.path(name))
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	return fi.Size(), nil
}

// WaitSessions waits until every started router has a BMP session.
func (l *Lab) WaitSessions(ctx context.Context) error {
	missing := ""
	err := l.WaitFor(ctx, "BMP sessions", func() (bool, error) {
		sessions, err := l.Sessions()
		if err != nil {
			return false, err
		}
		missing = ""
		for _, r := range l.routers {
			if r.BGP == nil {
				continue
			}
			if err := r.BGP.Err(); err != nil {
				return false, err
			}
			if _, ok := sessions[r.BMP]; !ok {
				missing += " " + r.BMP.String()
			}
		}
		return missing == "", nil
	})
	if err != nil && missing != "" {
		err = fmt.Errorf("%w; without a session:%s", err, missing)
		for _, c := range l.Collectors() {
			err = errors.Join(err, c.Err())
		}
	}
	return err
}

// Sessions returns the slot of the collector that has the BMP session of each remote address. Connections in an accept
// queue and connections of exited collectors are not sessions. If an address has several sessions, the highest slot is
// returned.
func (l *Lab) Sessions() (map[netip.Addr]int, error) {
	found := map[netip.Addr]int{}
	for _, c := range l.Collectors() {
		// Child processes do not count: plugins inherit existing sessions, never read them, and keep them open for a
		// second after a crash.
		own := socketInodes(c.Pid())
		err := c.ns.Do(func() error {
			all, err := sockets(netlink.SocketDiagTCP)
			for _, s := range all {
				// All local ports are included, because sk_lookup steers sessions to collectors that listen on another port.
				// nfacctd has no other connections.
				if s.State == tcpEstablished && own[s.INode] {
					a, _ := netip.AddrFromSlice(s.ID.Destination)
					found[a.Unmap()] = c.Slot
				}
			}
			return err
		})
		if err != nil {
			return nil, err
		}
	}
	return found, nil
}

// Collectors returns the most recently started collector of each slot.
func (l *Lab) Collectors() []*Collector {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.SortedFunc(maps.Values(l.collectors), func(a, b *Collector) int { return a.Slot - b.Slot })
}

func sockets(dump func(family uint8) ([]*netlink.Socket, error)) ([]*netlink.Socket, error) {
	var all []*netlink.Socket
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		s, err := dump(family)
		if err != nil {
			return nil, fmt.Errorf("list sockets: %w", err)
		}
		all = append(all, s...)
	}
	return all, nil
}

// socketInodes returns the socket inodes of a process, none if the process has exited.
func socketInodes(pid int) map[uint32]bool {
	inodes := map[uint32]bool{}
	fds, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	for _, fd := range fds {
		target, _ := os.Readlink(fd)
		if s, ok := strings.CutPrefix(target, "socket:["); ok {
			if n, err := strconv.ParseUint(strings.TrimSuffix(s, "]"), 10, 32); err == nil {
				inodes[uint32(n)] = true
			}
		}
	}
	return inodes
}
