// SPDX-License-Identifier: Apache-2.0

//go:build debian

package guest

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/netns"
	"sockeye/lab/traffic"
)

const (
	bmpPort   = 1790
	ipfixPort = 4739
	routers   = 8
	// link is the host's end of the link to the routers' network namespace.
	link = "routers0"
)

// router is a device in the namespace "routers" that keeps a BMP session open and sends IPFIX from two ports.
type router struct {
	address netip.Addr
	exports atomic.Bool

	mu      sync.Mutex
	session *traffic.Session // nil without an open session
	opened  int              // sessions since the start
	refused int              // failed attempts to open a session
}

// world has the routers and their links.
type world struct {
	routers []*router
	last    map[netip.Addr]int // last result of places; nil after a reset
	ipfix   atomic.Int32
}

// Conditions for sending IPFIX. A thread of nfacctd allocates two million BMP tables, while another one opens the IPFIX
// socket after 5 s. Under emulation this is too early, and a datagram crashes nfacctd 1.7.7.
const (
	withSession int32 = iota // once nfacctd has accepted their sessions
	always
	never
)

// whenever sets the condition under which routers send until the test ends.
func (w *world) whenever(t *testing.T, mode int32) {
	w.ipfix.Store(mode)
	t.Cleanup(func() { w.ipfix.Store(withSession) })
}

// watchSessions enables and disables the sending of each router.
func (w *world) watchSessions(ctx context.Context) {
	for ; ctx.Err() == nil; sleep(ctx, 250*time.Millisecond) {
		accepted, err := connections()
		if err != nil {
			panic(err)
		}
		mode := w.ipfix.Load()
		for _, r := range w.routers {
			// Connections in the accept queue have inode 0.
			inode := accepted[netip.AddrPortFrom(r.address, r.port())]
			r.exports.Store(mode == always || mode == withSession && inode != "" && inode != "0")
		}
	}
}

// target returns the collector host's address for a router.
func target(router netip.Addr, port uint16) netip.AddrPort {
	if router.Is4() {
		return netip.AddrPortFrom(netip.MustParseAddr("10.77.0.254"), port)
	}
	return netip.AddrPortFrom(netip.MustParseAddr("fd77::fe"), port)
}

// startRouters creates the routers' network and runs the routers until the test ends.
func startRouters(t *testing.T) *world {
	t.Helper()
	for _, c := range []string{
		"ip netns add routers",
		"ip link add " + link + " type veth peer name up netns routers",
		"ip addr add 10.77.0.254/24 dev " + link,
		"ip addr add fd77::fe/64 dev " + link + " nodad",
		"ip link set " + link + " up",
		"ip -n routers link set lo up",
		"ip -n routers link set dev up up",
	} {
		must(t, strings.Fields(c)...)
	}
	w := &world{}
	for i := range routers {
		r := &router{address: netip.AddrFrom4([4]byte{10, 77, 0, byte(i + 1)})}
		if i%2 == 1 {
			r.address = netip.MustParseAddr(fmt.Sprintf("fd77::%x", i+1))
			must(t, "ip", "-n", "routers", "addr", "add", r.address.String()+"/64", "dev", "up", "nodad")
		} else {
			must(t, "ip", "-n", "routers", "addr", "add", r.address.String()+"/24", "dev", "up")
		}
		w.routers = append(w.routers, r)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var all sync.WaitGroup
	all.Go(func() { w.watchSessions(ctx) })
	for i, r := range w.routers {
		all.Add(2)
		go func() {
			defer all.Done()
			inRouters(func() { r.keepSession(ctx, i) })
		}()
		go func() {
			defer all.Done()
			inRouters(func() { r.export(ctx, t, i) })
		}()
	}
	t.Cleanup(func() {
		cancel()
		all.Wait()
		run(t, "ip", "netns", "del", "routers")
	})
	return w
}

// inRouters runs f on a thread in the routers' namespace.
func inRouters(f func()) {
	namespace, err := netns.Open("/run/netns/routers")
	if err == nil {
		defer namespace.Close()
		err = netns.Do(namespace, func() error {
			f()
			return nil
		})
	}
	if err != nil {
		panic(fmt.Sprintf("enter the routers' namespace: %v", err))
	}
}

// keepSession keeps a BMP session open and sends a message every second.
func (r *router) keepSession(ctx context.Context, i int) {
	as := uint32(65000 + i)
	route := traffic.Route{
		Prefixes: []netip.Prefix{netip.PrefixFrom(netip.AddrFrom4([4]byte{203, 0, byte(i), 0}), 24)},
		NextHop:  netip.AddrFrom4([4]byte{192, 0, 2, byte(i + 1)}), ASPath: []uint32{as},
	}
	for ctx.Err() == nil {
		dial, cancel := context.WithTimeout(ctx, 10*time.Second)
		s, err := traffic.DialBMP(dial, traffic.SessionConfig{
			Source: r.address, Target: target(r.address, bmpPort),
			Peer: traffic.Peer{Address: route.NextHop, AS: as}, Routes: []traffic.Route{route},
		})
		cancel()
		if err != nil {
			r.mu.Lock()
			r.refused++
			r.mu.Unlock()
			sleep(ctx, 500*time.Millisecond)
			continue
		}
		r.mu.Lock()
		r.session = s
		r.opened++
		r.mu.Unlock()
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			_ = s.WaitClosed()
		}()
		for open := true; open; {
			select {
			case <-ended:
				open = false
			case <-ctx.Done():
				open = false
			case <-time.After(time.Second):
				_, err := s.Announce(1)
				open = err == nil
			}
		}
		r.mu.Lock()
		r.session = nil
		r.mu.Unlock()
		_ = s.Close()
		<-ended
	}
}

// export sends IPFIX from two ports, four messages a second from each.
func (r *router) export(ctx context.Context, t *testing.T, i int) {
	flow := traffic.Flow{
		Src: netip.AddrFrom4([4]byte{198, 51, 100, byte(i)}), Dst: netip.AddrFrom4([4]byte{203, 0, byte(i), 1}),
		SrcPort: 1000, DstPort: 443, Protocol: 6, Packets: 1, Octets: 100, Start: time.Now(), End: time.Now(),
	}
	var cards []*traffic.Exporter
	for domain := range uint32(2) {
		e, err := traffic.NewExporter(traffic.ExporterConfig{
			Source: r.address, Target: target(r.address, ipfixPort), Domain: domain, TemplateRefresh: time.Second,
			Messages: [][]traffic.Flow{{flow}},
		})
		if err != nil {
			t.Errorf("export of %v: %v", r.address, err)
			return
		}
		defer e.Close()
		cards = append(cards, e)
	}
	for ctx.Err() == nil {
		for _, e := range cards {
			if !r.exports.Load() {
				break
			}
			_, _ = e.Send(1) // a refused datagram is an error, and the next datagram may succeed
		}
		sleep(ctx, 250*time.Millisecond)
	}
}

func sleep(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// sessions returns the number of sessions that each router has opened.
func (w *world) sessions() []int {
	var all []int
	for _, r := range w.routers {
		r.mu.Lock()
		all = append(all, r.opened)
		r.mu.Unlock()
	}
	return all
}

// port returns the source port of the router's open session, or 0.
func (r *router) port() uint16 {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.session == nil {
		return 0
	}
	return r.session.LocalAddr().Port()
}

// owners returns the members that have each BMP connection open, read from the kernel's tables instead of Sockeye's
// output. Connections have the port that the router connected to, also with steering: lookup.
func owners() (map[netip.AddrPort]int, error) {
	inodes := map[string]int{} // slots by inode
	for slot := range members {
		procs, err := os.ReadFile(filepath.Join("/sys/fs/cgroup", cgroupOf(slot), "cgroup.procs"))
		if err != nil {
			continue // not running
		}
		for pid := range strings.FieldsSeq(string(procs)) {
			links, _ := filepath.Glob("/proc/" + pid + "/fd/*")
			for _, l := range links {
				if name, err := os.Readlink(l); err == nil && strings.HasPrefix(name, "socket:[") {
					inodes[strings.Trim(name, "socket:[]")] = slot
				}
			}
		}
	}
	found := map[netip.AddrPort]int{}
	all, err := connections()
	for remote, inode := range all {
		if slot, ok := inodes[inode]; ok {
			found[remote] = slot
		}
	}
	return found, err
}

// connections returns the inodes of the open BMP connections by source address.
func connections() (map[netip.AddrPort]string, error) {
	found := map[netip.AddrPort]string{}
	for _, table := range []string{"/proc/1/net/tcp", "/proc/1/net/tcp6"} {
		text, err := os.ReadFile(table)
		if err != nil {
			return nil, err
		}
		for line := range strings.Lines(string(text)) {
			fields := strings.Fields(line)
			if len(fields) < 10 || fields[3] != "01" {
				continue
			}
			if socketAddress(fields[1]).Port() == bmpPort {
				found[socketAddress(fields[2])] = fields[9]
			}
		}
	}
	return found, nil
}

// cgroupOf returns the cgroup of a member's unit.
func cgroupOf(slot int) string {
	for _, slice := range []string{"telemetry.slice", "system.slice", "system.slice/system-nfacctd.slice"} {
		dir := filepath.Join(slice, fmt.Sprintf("nfacctd@%d.service", slot))
		if exists(filepath.Join("/sys/fs/cgroup", dir)) {
			return dir
		}
	}
	return "none"
}

// socketAddress reads an address of /proc/net/tcp: 32-bit words in the host's
// byte order, little endian.
func socketAddress(text string) netip.AddrPort {
	host, port, _ := strings.Cut(text, ":")
	n, _ := strconv.ParseUint(port, 16, 16)
	var b []byte
	for len(host) >= 8 {
		word, _ := strconv.ParseUint(host[:8], 16, 32)
		b = append(b, byte(word), byte(word>>8), byte(word>>16), byte(word>>24))
		host = host[8:]
	}
	a, _ := netip.AddrFromSlice(b)
	return netip.AddrPortFrom(a.Unmap(), uint16(n))
}

// records has the read offsets of the members' flow records.
type records struct{ offsets [members]int64 }

func recordsNow() *records {
	r := &records{}
	for slot := range members {
		if info, err := os.Stat(recordsPath(slot)); err == nil {
			r.offsets[slot] = info.Size()
		}
	}
	return r
}

// read returns which members have written records of which routers.
func (r *records) read() map[netip.Addr]map[int]bool {
	found := map[netip.Addr]map[int]bool{}
	for slot := range members {
		f, err := os.Open(recordsPath(slot))
		if err != nil {
			continue
		}
		_, _ = f.Seek(r.offsets[slot], 0)
		for sc := bufio.NewScanner(f); sc.Scan(); {
			var line struct {
				Router netip.Addr `json:"peer_ip_src"`
			}
			if json.Unmarshal(sc.Bytes(), &line) == nil && line.Router.IsValid() {
				a := line.Router.Unmap()
				if found[a] == nil {
					found[a] = map[int]bool{}
				}
				found[a][slot] = true
			}
		}
		f.Close()
	}
	return found
}

// places waits until one member has the session and writes the flow records of each router, and returns the member of
// each router.
func (w *world) places(t *testing.T) map[netip.Addr]int {
	t.Helper()
	from := recordsNow()
	begin := time.Now()
	places := map[netip.Addr]int{}
	why := ""
	waitFor(t, 2*patience, "TCP and UDP of each router reach one member", func() string {
		if time.Since(begin) > patience/2 {
			from, begin = recordsNow(), time.Now() // ignore records that are written late
			t.Logf("after %v: %s\n%s%s", patience/2, why, run(t, binary, "slots"), run(t, binary, "devices"))
			return why
		}
		if why = w.look(from, places); why != "" {
			restartHung(t)
		}
		return why
	})
	w.last = places
	return places
}

// restartHung restarts members whose print plugin does not write its log every 2 s. nfacctd forks the plugin while the
// BMP thread runs, which sometimes leaves a locked mutex in the child. Such a member receives and writes nothing.
func restartHung(t *testing.T) {
	t.Helper()
	for slot := range members {
		unit := fmt.Sprintf("nfacctd@%d.service", slot)
		info, err := os.Stat(logPath(slot))
		if err != nil || time.Since(info.ModTime()) < 20*time.Second || mainPID(t, unit) == 0 {
			continue
		}
		t.Logf("the print plugin of %s hangs: restart", unit)
		must(t, "systemctl", "restart", unit)
	}
}

// look fills places and returns the reason why they are not complete. From has the offsets of new records.
func (w *world) look(from *records, places map[netip.Addr]int) string {
	sessions, err := owners()
	if err != nil {
		return err.Error()
	}
	flows := from.read()
	clear(places)
	for _, r := range w.routers {
		slot, ok := sessions[netip.AddrPortFrom(r.address, r.port())]
		if !ok {
			return fmt.Sprintf("%v has no session with a member", r.address)
		}
		if len(flows[r.address]) != 1 || !flows[r.address][slot] {
			return fmt.Sprintf("%v has its session with member %d, and its flow records with %v", r.address, slot, flows[r.address])
		}
		places[r.address] = slot
	}
	return ""
}

// before returns the members of the routers at the start of a test, which are the members at the end of the previous test.
func (w *world) before(t *testing.T) map[netip.Addr]int {
	t.Helper()
	if w.last == nil {
		return w.places(t)
	}
	return w.last
}

// unchanged fails if a router lost its session since before.
func (w *world) unchanged(t *testing.T, before []int) {
	t.Helper()
	if after := w.sessions(); !slices.Equal(before, after) {
		t.Errorf("routers lost connections: sessions opened before %v, after %v", before, after)
	}
}

// alive reports whether a process exists.
func alive(pid int) bool { return unix.Kill(pid, 0) == nil }
