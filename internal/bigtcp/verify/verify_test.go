// SPDX-License-Identifier: Apache-2.0

package verify_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math"
	"net"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/internal/bigtcp/netif"
	"sockeye/internal/bigtcp/netif/netiftest"
	"sockeye/internal/bigtcp/verify"
	"sockeye/internal/fault"
	"sockeye/internal/testenv"
)

// large is the size that the tests set, in bytes.
const large = 196608

// verifyPatience bounds the wait for an event.
const verifyPatience = time.Minute

// host is a named network namespace.
type host struct {
	*netif.Namespace
	t      testing.TB
	path   string
	kernel *netlink.Handle
}

func newHost(t testing.TB, name string) *host {
	t.Helper()
	path := netiftest.NamedNetns(t, name)
	h := &host{Namespace: netiftest.Open(t, path), t: t, path: path, kernel: netiftest.Kernel(t, path)}
	h.up("lo")
	// TSO packets hold 1 ms of the pacing rate, plus the largest size if the minimal RTT is short (tcp_tso_autosize,
	// since Linux 5.18). A pause of the host during the handshake would lengthen the minimal RTT; with a limit of
	// 2^20 us, the sizes of packets do not depend on such a pause.
	must(t, h.Do(func() error {
		err := os.WriteFile("/proc/sys/net/ipv4/tcp_tso_rtt_log", []byte("20"), 0)
		if errors.Is(err, os.ErrNotExist) {
			return nil
		}
		return err
	}))
	return h
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func (h *host) link(name string) netlink.Link {
	h.t.Helper()
	l, err := h.kernel.LinkByName(name)
	must(h.t, err)
	return l
}

// up sets an interface up with addresses.
func (h *host) up(name string, addresses ...string) {
	h.t.Helper()
	l := h.link(name)
	for _, a := range addresses {
		address, err := netlink.ParseAddr(a)
		must(h.t, err)
		address.Flags |= unix.IFA_F_NODAD
		must(h.t, h.kernel.AddrAdd(l, address))
	}
	must(h.t, h.kernel.LinkSetUp(l))
}

// set sets the sizes of an interface in both directions.
func (h *host) set(name string, ipv6, ipv4 uint32) {
	h.t.Helper()
	must(h.t, h.Set(h.link(name).Attrs().Index, netif.Sizes{GSO: ipv6, GRO: ipv6, GSOIPv4: ipv4, GROIPv4: ipv4}))
}

// pair returns two hosts with a veth pair between them: va with 10.9.0.1 and fd09::1, vb with 10.9.0.2 and fd09::2.
func pair(t testing.TB) (a, b *host) {
	t.Helper()
	a, b = newHost(t, "verify-a"), newHost(t, "verify-b")
	netiftest.AddVeth(t, a.kernel, "va", "vb", netiftest.OpenFile(t, b.path))
	for h, name := range map[*host]string{a: "va", b: "vb"} {
		// When duplicate address detection ends for a link-local address, routes are looked up again.
		must(t, h.Do(func() error {
			return os.WriteFile("/proc/sys/net/ipv6/conf/"+name+"/addr_gen_mode", []byte("1"), 0)
		}))
	}
	a.up("va", "10.9.0.1/24", "fd09::1/64")
	b.up("vb", "10.9.0.2/24", "fd09::2/64")
	return a, b
}

// connection has both ends of a TCP connection; from sends.
type connection struct {
	t        testing.TB
	from, to *net.TCPConn
}

// connect opens a connection from one host to an address of another host. prepare is called with both sockets before.
func connect(t testing.TB, from, to *host, address string, prepare ...func(fd int) error) *connection {
	t.Helper()
	control := func(_, _ string, c syscall.RawConn) (err error) {
		for _, f := range prepare {
			inner := c.Control(func(fd uintptr) { err = f(int(fd)) })
			if err = errors.Join(inner, err); err != nil {
				return err
			}
		}
		return nil
	}
	c := &connection{t: t}
	var l net.Listener
	must(t, to.Do(func() (err error) {
		config := net.ListenConfig{Control: control}
		config.SetMultipathTCP(false)
		l, err = config.Listen(t.Context(), "tcp", net.JoinHostPort(address, "0"))
		return err
	}))
	defer l.Close()
	must(t, from.Do(func() error {
		d := net.Dialer{Control: control}
		d.SetMultipathTCP(false)
		conn, err := d.DialContext(t.Context(), "tcp", l.Addr().String())
		if err == nil {
			c.from = conn.(*net.TCPConn)
		}
		return err
	}))
	t.Cleanup(func() { c.from.Close() })
	conn, err := l.Accept()
	must(t, err)
	c.to = conn.(*net.TCPConn)
	t.Cleanup(func() { c.to.Close() })
	return c
}

// send sends bytes in writes of the given size, and compares the received data.
func (c *connection) send(bytes, write int) {
	c.t.Helper()
	deadline := time.Now().Add(verifyPatience)
	must(c.t, errors.Join(c.from.SetDeadline(deadline), c.to.SetDeadline(deadline)))
	sent, received := crc32.NewIEEE(), crc32.NewIEEE()
	var wait sync.WaitGroup
	wait.Go(func() {
		if _, err := io.CopyN(received, c.to, int64(bytes)); err != nil {
			c.t.Error(err)
		}
	})
	block := make([]byte, write)
	for i := range block {
		block[i] = byte(i * i >> 7)
	}
	// The checksum is computed before, so that the send queue stays full.
	for left := bytes; left > 0; left -= write {
		sent.Write(block[:min(left, write)])
	}
	for left := bytes; left > 0; left -= write {
		_, err := c.from.Write(block[:min(left, write)])
		must(c.t, err)
	}
	wait.Wait()
	if sent.Sum32() != received.Sum32() {
		c.t.Error("what was received differs from what was sent")
	}
}

// prove runs verify on an interface while f runs.
func prove(t testing.TB, h *host, name string, o verify.Options, f func()) *verify.Report {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	attached := make(chan struct{})
	o.Attached = func() { close(attached) }
	type outcome struct {
		*verify.Report
		error
	}
	done := make(chan outcome, 1)
	go func() {
		p, err := verify.RunWith(ctx, h.Namespace, name, verify.MaxDuration, o)
		done <- outcome{p, err}
	}()
	select {
	case <-attached:
		f()
		stop()
	case o := <-done:
		t.Fatalf("verify ends: %v", o.error)
	}
	o2 := <-done
	must(t, o2.error)
	if !o2.Interrupted {
		t.Error("it is not told that the proof was interrupted")
	}
	return o2.Report
}

// needs skips a test of a family for which the kernel has no sizes.
func needs(t testing.TB, h *host, address string) {
	t.Helper()
	if !h.Support().IPv4 && netip.MustParseAddr(address).Is4() {
		t.Skip("kernel: no sizes of IPv4 before Linux 6.3")
	}
}

// method returns how programs are attached.
var method = sync.OnceValue(func() string {
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, License: "GPL", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, next), asm.Return()}})
	if err != nil {
		return err.Error()
	}
	defer program.Close()
	l, err := link.AttachTCX(link.TCXOptions{Interface: 1, Program: program, Attach: ebpf.AttachTCXIngress})
	switch {
	case errors.Is(err, ebpf.ErrNotSupported):
		return "clsact"
	case err != nil:
		return err.Error()
	}
	l.Close()
	return "tcx"
})

func shareOf(t testing.TB, p *verify.Report) float64 {
	t.Helper()
	if p.Share == nil {
		t.Fatalf("no share: %s", text(t, p))
	}
	return *p.Share
}

func text(t testing.TB, p *verify.Report) string {
	t.Helper()
	short := *p
	short.Counts = slices.Clone(p.Counts)
	for i := range short.Counts {
		short.Counts[i].Sizes, short.Counts[i].BySegments = nil, nil
	}
	b, err := json.Marshal(short)
	must(t, err)
	return string(b)
}

// first checks the name and the share of the first cause.
func first(t testing.TB, p *verify.Report, name string, least float64) {
	t.Helper()
	if len(p.Causes) == 0 || p.Causes[0].Name != name || p.Causes[0].Share < least {
		t.Errorf("want %s for %.0f %% of the bytes, got %s", name, 100*least, text(t, p))
	}
}

const stream = 100 << 20

// TestVerifyStreams checks that no bytes of a stream are in large packets before the sizes are set, and nearly all
// afterwards, in each family alone and in both, at both ends.
func TestVerifyStreams(t *testing.T) {
	const v4, v6 = "10.9.0.2", "fd09::2"
	for _, test := range []struct {
		name       string
		ipv6, ipv4 uint32
		large      map[string]bool
	}{
		{"off", netif.Legacy, netif.Legacy, nil},
		{"IPv6", large, netif.Legacy, map[string]bool{v6: true}},
		{"IPv4", netif.Legacy, large, map[string]bool{v4: true}},
		{"both", large, large, map[string]bool{v4: true, v6: true}},
	} {
		for _, address := range []string{v4, v6} {
			t.Run(test.name+" to "+address, func(t *testing.T) {
				a, b := pair(t)
				needs(t, a, address)
				a.set("va", test.ipv6, test.ipv4)
				b.set("vb", test.ipv6, test.ipv4)
				for name, h := range map[string]*host{"va": a, "vb": b} {
					p := prove(t, h, name, verify.Options{}, func() { connect(t, a, b, address).send(stream, 1<<20) })
					share := shareOf(t, p)
					if !test.large[address] {
						if share != 0 {
							t.Errorf("at %s: %s", name, text(t, p))
						}
						first(t, p, "off", 0.9)
						continue
					}
					if share < 0.9 || share > 1 || p.Cut > 0.01 || p.NoDriver != "" || p.Method != method() {
						t.Errorf("at %s: %s", name, text(t, p))
					}
					checkCounts(t, p, name == "va", address)
				}
			})
		}
	}
}

// checkCounts compares the sums of the counts.
func checkCounts(t testing.TB, p *verify.Report, sends bool, address string) {
	t.Helper()
	family, data := verify.TCP4, verify.Received
	if netip.MustParseAddr(address).Is6() {
		family = verify.TCP6
	}
	if sends {
		data = verify.Driver
	}
	found := false
	for _, c := range p.Counts {
		var bytes, packets, bySegments uint64
		for _, s := range c.Sizes {
			bytes += s.Bytes
			packets += s.Packets
		}
		for _, s := range c.BySegments {
			bySegments += s.Packets
		}
		if bytes != c.Bytes || packets != c.Packets || bySegments != c.Packets || c.Segments < c.Packets {
			t.Errorf("%+v does not add up", c)
		}
		if c.Point == data && c.Family == family {
			found = true
			// The tracepoint missed one packet in some thousands in earlier runs.
			if c.Bytes < stream-stream/50 || c.Bytes > stream*11/10 || c.Largest > large || c.Largest < 2*netif.Legacy || c.Segments < stream/1600 {
				t.Errorf("%+v of %s", c, text(t, p))
			}
		}
	}
	if !found {
		t.Errorf("no %s of %s: %s", data, family, text(t, p))
	}
}

// TestVerifyOldConnection changes the sizes while a connection is open: its packets stay at up to 64 KB and verify
// reports it; a new connection beside it has large packets.
func TestVerifyOldConnection(t *testing.T) {
	for _, address := range []string{"10.9.0.2", "fd09::2"} {
		t.Run(address, func(t *testing.T) {
			a, b := pair(t)
			needs(t, a, address)
			a.set("va", netif.Legacy, netif.Legacy)
			old := connect(t, a, b, address)
			old.send(stream/8, 1<<20)
			a.set("va", large, large)
			p := prove(t, a, "va", verify.Options{}, func() { old.send(stream, 1<<20) })
			if share := shareOf(t, p); share != 0 {
				t.Errorf("share %v: %s", share, text(t, p))
			}
			first(t, p, "old_connection", 0.95)
			p = prove(t, a, "va", verify.Options{}, func() {
				old.send(stream, 1<<20)
				connect(t, a, b, address).send(stream, 1<<20)
			})
			if share := shareOf(t, p); share < 0.4 || share > 0.55 {
				t.Errorf("share %v, want about half: %s", share, text(t, p))
			}
			first(t, p, "old_connection", 0.45)
		})
	}
}

// TestVerifySmallWrites uses a program that waits for a reply to each write.
func TestVerifySmallWrites(t *testing.T) {
	a, b := pair(t)
	a.set("va", large, large)
	c := connect(t, a, b, "fd09::2")
	p := prove(t, a, "va", verify.Options{}, func() {
		for range 3000 {
			c.send(2000, 2000)
		}
	})
	if share := shareOf(t, p); share != 0 {
		t.Errorf("share %v: %s", share, text(t, p))
	}
	first(t, p, "small_writes", 0.8)
}

// TestVerifyReceiveWindow uses a receiver with a small buffer, which verify reports at both ends.
func TestVerifyReceiveWindow(t *testing.T) {
	small := func(fd int) error { return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, 10000) }
	for _, address := range []string{"10.9.0.2", "fd09::2"} {
		t.Run(address, func(t *testing.T) {
			a, b := pair(t)
			needs(t, a, address)
			a.set("va", large, large)
			b.set("vb", large, large)
			c := connect(t, a, b, address, small)
			p := prove(t, a, "va", verify.Options{}, func() { c.send(stream/8, 1<<20) })
			if share := shareOf(t, p); share != 0 {
				t.Errorf("share %v: %s", share, text(t, p))
			}
			first(t, p, "receive_window", 0.9)
			if !b.Support().IPv4 {
				t.Skip("kernel: before Linux 6.2 a receiver does not tell its window")
			}
			p = prove(t, b, "vb", verify.Options{}, func() { c.send(stream/8, 1<<20) })
			first(t, p, "receive_window", 0.9)
		})
	}
}

// routed returns two hosts with a router between them: va with 10.9.0.1 and fd09::1 to ra, rb to vb with 10.9.1.1 and
// fd09:0:0:1::1.
func routed(t testing.TB) (a, router, b *host) {
	t.Helper()
	a, router, b = newHost(t, "verify-a"), newHost(t, "verify-router"), newHost(t, "verify-b")
	netiftest.AddVeth(t, a.kernel, "va", "ra", netiftest.OpenFile(t, router.path))
	netiftest.AddVeth(t, b.kernel, "vb", "rb", netiftest.OpenFile(t, router.path))
	a.up("va", "10.9.0.1/24", "fd09::1/64")
	b.up("vb", "10.9.1.1/24", "fd09:0:0:1::1/64")
	router.up("ra", "10.9.0.2/24", "fd09::2/64")
	router.up("rb", "10.9.1.2/24", "fd09:0:0:1::2/64")
	must(t, router.Do(func() error {
		return errors.Join(
			os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0),
			os.WriteFile("/proc/sys/net/ipv6/conf/all/forwarding", []byte("1"), 0))
	}))
	for h, ways := range map[*host][]string{a: {"10.9.0.2", "fd09::2"}, b: {"10.9.1.2", "fd09:0:0:1::2"}} {
		for _, way := range ways {
			must(t, h.kernel.RouteAdd(&netlink.Route{Gw: net.ParseIP(way)}))
		}
	}
	return a, router, b
}

// TestVerifyForwarded sends through a router from an interface with large sizes to one with small sizes: large
// packets are segmented between the queue and the driver, and the data arrives unmodified.
func TestVerifyForwarded(t *testing.T) {
	for _, address := range []string{"10.9.1.1", "fd09:0:0:1::1"} {
		t.Run(address, func(t *testing.T) {
			a, router, b := routed(t)
			needs(t, a, address)
			// A kernel that marks large IPv6 packets as jumbograms counts 8 bytes more, and does not forward packets
			// that fill the MTU.
			for h, name := range map[*host]string{router: "rb", b: "vb"} {
				must(t, h.kernel.LinkSetMTU(h.link(name), 1600))
			}
			a.set("va", large, large)
			router.set("ra", large, large)
			for _, o := range []verify.Options{{}, {NoDriver: true}} {
				p := prove(t, router, "rb", o, func() { connect(t, a, b, address).send(stream/2, 1<<20) })
				if share := shareOf(t, p); share != 0 || p.Cut < 0.3 || (p.NoDriver != "") != o.NoDriver {
					t.Errorf("share %v, cut %v: %s", share, p.Cut, text(t, p))
				}
				// How much of the rest was merged depends on the load of the host.
				if i := slices.IndexFunc(p.Causes, func(c verify.Cause) bool { return c.Name == "cut" }); i < 0 || p.Causes[i].Share < 0.3 {
					t.Errorf("want cut for 30 %% of the bytes, got %s", text(t, p))
				}
				for _, c := range p.Counts {
					if part := float64(c.LargeBytes) / float64(c.Bytes); c.Point == verify.Sent && c.Bytes > stream/4 && math.Abs(part-p.Cut) > 0.05 {
						t.Errorf("%v of what was queued was large, and %v cut: %s", part, p.Cut, text(t, p))
					}
					if c.Point == verify.Driver && c.LargeBytes > 0 {
						t.Errorf("at the driver: %+v", c)
					}
				}
			}
			p := prove(t, router, "ra", verify.Options{}, func() { connect(t, a, b, address).send(stream/2, 1<<20) })
			if share := shareOf(t, p); share < 0.3 {
				t.Errorf("where it comes in: %s", text(t, p))
			}
			// The sender's packets are small, and the router can only forward them.
			a.set("va", netif.Legacy, netif.Legacy)
			router.set("rb", large, large)
			p = prove(t, router, "rb", verify.Options{}, func() { connect(t, a, b, address).send(stream/4, 1<<20) })
			first(t, p, "forwarded", 0.9)
		})
	}
}

// TestVerifyRefusedByRouter sends large IPv6 packets that fill the MTU of a router, which some kernels do not
// forward: then verify reports it at the router and at the sender.
func TestVerifyRefusedByRouter(t *testing.T) {
	a, router, b := routed(t)
	a.set("va", large, large)
	router.set("ra", large, large)
	router.set("rb", large, large)
	tooBigs := func() string {
		text, err := os.ReadFile("/proc/thread-self/net/snmp6")
		must(t, err)
		return regexp.MustCompile(`Ip6InTooBigErrors\s+\d+`).FindString(string(text))
	}
	var before, after string
	for h, name := range map[*host]string{router: "ra", a: "va"} {
		p := prove(t, h, name, verify.Options{}, func() {
			must(t, router.Do(func() error { before = tooBigs(); return nil }))
			connect(t, a, b, "fd09:0:0:1::1").send(2<<20, 1<<20)
			must(t, router.Do(func() error { after = tooBigs(); return nil }))
		})
		told := slices.ContainsFunc(p.Notes, func(note string) bool {
			return strings.Contains(note, "dropped") && strings.Contains(note, "IPv6 packets as too big") ||
				strings.Contains(note, "rejected") && strings.Contains(note, "IPv6 packets as too big")
		})
		t.Logf("at the router: before %s, after %s", before, after)
		if told != (before != after) {
			t.Errorf("at %s: before %s, after %s: %s", name, before, after, text(t, p))
		}
	}
}

// TestVerifyNothing sees no packet, and reports that nothing is proven.
func TestVerifyNothing(t *testing.T) {
	n := netiftest.Open(t, "")
	k := netiftest.Kernel(t, "")
	netiftest.AddVeth(t, k, "silent", "silent-peer", nil) // down
	p, err := verify.Run(t.Context(), n, "silent", time.Millisecond)
	must(t, err)
	if p.Share != nil || p.Interrupted || len(p.Counts) > 0 || len(p.Causes) > 0 || len(p.Notes) == 0 || !strings.Contains(p.Notes[0], "nothing is proven") {
		t.Error(text(t, p))
	}
}

// TestVerifyTun counts on an interface without link-layer headers.
func TestVerifyTun(t *testing.T) {
	h := newHost(t, "verify-tun")
	must(t, h.Do(func() error {
		return netlink.LinkAdd(&netlink.Tuntap{LinkAttrs: netiftest.Named("tun0"), Mode: netlink.TUNTAP_MODE_TUN})
	}))
	h.up("tun0", "10.8.0.1/24")
	p := prove(t, h, "tun0", verify.Options{NoDriver: true}, func() {
		must(t, h.Do(func() error {
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return err
			}
			defer unix.Close(fd)
			err = unix.Connect(fd, &unix.SockaddrInet4{Port: 1790, Addr: [4]byte{10, 8, 0, 2}})
			if !errors.Is(err, unix.EINPROGRESS) {
				return fmt.Errorf("connect: %w", err)
			}
			return nil
		}))
	})
	for _, c := range p.Counts {
		if c.Point == verify.Sent && c.Family == verify.TCP4 {
			if c.Largest != 60 || c.Bytes != 60*c.Packets {
				t.Errorf("a SYN: %+v", c)
			}
			return
		}
	}
	t.Error(text(t, p))
}

// TestVerifyTwoNamespaces uses an interface of the same name and index in another namespace, whose stream is not
// counted.
func TestVerifyTwoNamespaces(t *testing.T) {
	a, b := pair(t)
	other := newHost(t, "verify-other")
	p := prove(t, other, "lo", verify.Options{}, func() {
		connect(t, a, b, "10.9.0.2").send(stream/8, 1<<20)
		connect(t, a, a, "127.0.0.1").send(stream/8, 1<<20)
	})
	if len(p.Counts) > 0 {
		t.Error(text(t, p))
	}
}

// TestVerifyVanishes deletes, moves and renames the interface during verify.
func TestVerifyVanishes(t *testing.T) {
	for _, clsact := range []bool{false, true} {
		for name, vanish := range map[string]func(t *testing.T, h *host) error{
			"removed": func(_ *testing.T, h *host) error { return h.kernel.LinkDel(h.link("va")) },
			"moved": func(t *testing.T, h *host) error {
				other := newHost(t, "verify-c")
				return h.kernel.LinkSetNsFd(h.link("va"), int(netiftest.OpenFile(t, other.path).Fd()))
			},
		} {
			t.Run(fmt.Sprintf("%s, clsact %v", name, clsact), func(t *testing.T) {
				a, _ := pair(t)
				_, err := verify.RunWith(t.Context(), a.Namespace, "va", time.Minute, verify.Options{Clsact: clsact, Attached: func() { must(t, vanish(t, a)) }})
				var refused *fault.Error
				if !errors.As(err, &refused) || refused.Code != fault.CodeConflict || !strings.Contains(err.Error(), "va has vanished") {
					t.Errorf("error %v", err)
				}
			})
		}
	}
	t.Run("renamed", func(t *testing.T) {
		a, b := pair(t)
		p := prove(t, a, "va", verify.Options{}, func() {
			must(t, a.kernel.LinkSetDown(a.link("va"))) // older kernels rename no other
			must(t, a.kernel.LinkSetName(a.link("va"), "vz"))
			must(t, a.kernel.LinkSetUp(a.link("vz")))
			connect(t, a, b, "10.9.0.2").send(stream/8, 1<<20)
		})
		if p.TCPBytes < stream/8 {
			t.Error(text(t, p))
		}
	})
}

// TestVerifyRefuses checks wrong arguments and missing capabilities.
func TestVerifyRefuses(t *testing.T) {
	n := netiftest.Open(t, "")
	for _, during := range []time.Duration{0, -1, verify.MaxDuration + 1} {
		_, err := verify.Run(t.Context(), n, "lo", during)
		var refused *fault.Error
		if !errors.As(err, &refused) || refused.Code != fault.CodeUsage {
			t.Errorf("for %v: %v", during, err)
		}
	}
	var refused *fault.Error
	if _, err := verify.Run(t.Context(), n, "loo", time.Second); !errors.As(err, &refused) || refused.Code != fault.CodeUsage {
		t.Errorf("no such interface: %v", err)
	}
	testenv.WithoutRights(t, func() {
		if _, err := verify.Run(t.Context(), n, "lo", time.Second); !errors.Is(err, os.ErrPermission) {
			t.Errorf("without rights: %v", err)
		}
	})
}

// TestVerifyChanged expects a note about sizes that changed during the run.
func TestVerifyChanged(t *testing.T) {
	a, b := pair(t)
	p := prove(t, a, "va", verify.Options{}, func() {
		connect(t, a, b, "10.9.0.2").send(stream/8, 1<<20)
		a.set("va", large, large)
	})
	if p.Sizes.GSO != large || !slices.ContainsFunc(p.Notes, func(note string) bool { return strings.Contains(note, "the sizes changed during the run") }) {
		t.Error(text(t, p))
	}
}
