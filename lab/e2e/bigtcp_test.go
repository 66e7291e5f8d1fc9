// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/bigtcp/verify"
	"sockeye/internal/config"
	"sockeye/lab"
)

// way is a path through three namespaces: a sends through its interface a0, the router has r0 and r1,
// and b receives through b0.
type way struct {
	*host
	spaces map[string]*lab.Namespace // by interface
	to     [2]netip.Addr             // b's addresses, of IPv4 and IPv6
}

func newWay(t *testing.T) *way {
	t.Helper()
	w := &way{host: newHost(t, config.Reuseport), spaces: map[string]*lab.Namespace{},
		to: [2]netip.Addr{netip.MustParseAddr("10.98.1.2"), netip.MustParseAddr("fd98:1::2")}}
	var n [3]*lab.Namespace
	for i, name := range []string{"sender", "router", "receiver"} {
		var err error
		n[i], err = w.lab.Namespace(name)
		w.must(err)
	}
	w.link("a0", n[0], "r0", n[1], 0)
	w.link("r1", n[1], "b0", n[2], 1)
	w.roomForJumbograms()
	w.must(n[1].Sysctl("ipv4.ip_forward", "1"))
	w.must(n[1].Sysctl("ipv6.conf.all.forwarding", "1"))
	for i, routes := range [][2]string{0: {"10.98.1.0/24 10.98.0.2", "fd98:1::/64 fd98::2"}, 2: {"10.98.0.0/24 10.98.1.1", "fd98::/64 fd98:1::1"}} {
		for _, route := range routes {
			if to, by, ok := strings.Cut(route, " "); ok {
				w.must(n[i].AddRoute(netip.MustParsePrefix(to), netip.MustParseAddr(by)))
			}
		}
	}
	return w
}

// link connects two namespaces with the i-th network, in which their host numbers are 1 and 2.
func (w *way) link(a string, in *lab.Namespace, b string, to *lab.Namespace, i int) {
	w.Helper()
	fd, err := unix.Open(to.Path(), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	w.must(err)
	defer unix.Close(fd)
	attrs := netlink.NewLinkAttrs()
	attrs.Name = a
	w.must(in.Netlink().LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: b, PeerNamespace: netlink.NsFd(fd)}))
	for k, end := range []struct {
		name string
		n    *lab.Namespace
	}{{a, in}, {b, to}} {
		dev, err := end.n.Netlink().LinkByName(end.name)
		w.must(err)
		w.must(end.n.Netlink().LinkSetUp(dev))
		six := fmt.Sprintf("fd98:%d::%d/64", i, k+1)
		if i == 0 {
			six = fmt.Sprintf("fd98::%d/64", k+1)
		}
		w.must(end.n.AddAddress(end.name, netip.MustParsePrefix(fmt.Sprintf("10.98.%d.%d/24", i, k+1))))
		w.must(end.n.AddAddress(end.name, netip.MustParsePrefix(six)))
		w.spaces[end.name] = end.n
	}
}

// roomForJumbograms increases the MTU of the second network. Some kernels mark large IPv6 packets as
// jumbograms, which adds 8 bytes, and do not forward such a packet if it already fills the MTU.
func (w *way) roomForJumbograms() {
	w.Helper()
	for _, name := range []string{"r1", "b0"} {
		dev, err := w.spaces[name].Netlink().LinkByName(name)
		w.must(err)
		w.must(w.spaces[name].Netlink().LinkSetMTU(dev, 1600))
	}
}

// policy writes a policy with the requested sizes of interfaces, such as "ipv6: 192KB".
func (w *way) policy(wanted map[string]string) {
	w.Helper()
	rules := []string{"bigtcp:"}
	for name, sizes := range wanted {
		rules = append(rules, fmt.Sprintf("  - {interface: %s, netns: %s, %s}", name, w.spaces[name].Path(), sizes))
	}
	text := strings.Join(rules, "\n")
	if len(wanted) == 0 {
		text = "services: {}"
	}
	w.must(os.WriteFile(w.policyPath(), []byte(text+"\n"), 0o644))
}

func (w *way) apply() {
	w.Helper()
	if _, errs, code := w.cli("apply"); code != 0 {
		w.Fatalf("apply: exit code %d: %s", code, errs)
	}
}

// sizes returns gso_max_size and gso_ipv4_max_size of an interface.
func (w *way) sizes(name string) [2]uint32 {
	w.Helper()
	dev, err := w.spaces[name].Netlink().LinkByName(name)
	w.must(err)
	return [2]uint32{dev.Attrs().GSOMaxSize, dev.Attrs().GSOIPv4MaxSize}
}

func (w *way) expectSizes(when string, six, four uint32, names ...string) {
	w.Helper()
	for _, name := range names {
		if got := w.sizes(name); got != [2]uint32{six, four} {
			w.Errorf("%s %s has %d, want %d and %d", when, name, got, six, four)
		}
	}
}

// stream sends until ctx is done, and compares the received bytes with the sent ones.
func (w *way) stream(ctx context.Context, to netip.Addr) {
	w.Helper()
	var listener net.Listener
	w.must(w.spaces["b0"].Do(func() (err error) {
		listener, err = net.Listen("tcp", netip.AddrPortFrom(to, 0).String())
		return err
	}))
	defer listener.Close()
	var c net.Conn
	w.must(w.spaces["a0"].Do(func() (err error) {
		c, err = net.DialTimeout("tcp", listener.Addr().String(), patience)
		return err
	}))
	defer c.Close()
	got := make(chan hash.Hash, 1)
	go func() {
		sum := sha256.New()
		peer, err := listener.Accept()
		if err == nil {
			_, err = io.Copy(sum, peer)
			err = errors.Join(err, peer.Close())
		}
		if err != nil {
			w.Error(err)
		}
		got <- sum
	}()
	sum := sha256.New()
	data := make([]byte, 1<<20)
	_, _ = rand.NewChaCha8([32]byte{7}).Read(data) // it never fails
	w.must(c.SetDeadline(time.Now().Add(patience)))
	for i := 0; ctx.Err() == nil; i++ {
		data[i%len(data)]++ // consecutive blocks differ
		_, err := c.Write(data)
		w.must(err)
		sum.Write(data)
		time.Sleep(5 * time.Millisecond) // large packets suffice; the full rate would slow the other tests
	}
	w.must(c.(*net.TCPConn).CloseWrite())
	if their := <-got; !slices.Equal(their.Sum(nil), sum.Sum(nil)) {
		w.Errorf("received data at %v differs from the sent data", to)
	}
}

// verify counts at interfaces while a stream flows.
func (w *way) verify(to netip.Addr, names ...string) map[string]verify.Report {
	w.Helper()
	proofs := make([]verify.Report, len(names))
	done := make(chan bool)
	for i, name := range names {
		go func() {
			defer func() { done <- true }()
			w.show(&proofs[i], "bigtcp", "verify", name, "--netns", w.spaces[name].Path(), "--for", "2s")
		}()
	}
	ctx, cancel := context.WithCancel(w.Context())
	go func() {
		defer cancel()
		for range names {
			<-done
		}
	}()
	w.stream(ctx, to)
	byName := map[string]verify.Report{}
	for i, p := range proofs {
		if p.TCPBytes < 10<<20 {
			w.Errorf("%s has seen %d bytes", names[i], p.TCPBytes)
		}
		byName[names[i]] = p
	}
	return byName
}

func share(p verify.Report) float64 { return float64(p.LargeBytes) / float64(max(p.TCPBytes, 1)) }

// TestBigTCPPath applies a policy to a path through three namespaces, and compares the report of
// verify with the path.
func TestBigTCPPath(t *testing.T) {
	w := newWay(t)
	all := []string{"a0", "r0", "r1", "b0"}
	w.expectSizes("before", 65536, 65536, all...)
	for _, to := range w.to {
		for name, p := range w.verify(to, "a0", "r1", "b0") {
			if p.LargeBytes > 0 {
				t.Errorf("before apply: %s: %d bytes to %v in large packets", name, p.LargeBytes, to)
			}
		}
	}

	wanted := map[string]string{}
	for _, name := range all {
		wanted[name] = "ipv6: 192KB, ipv4: 192KB"
	}
	w.policy(wanted)
	w.startAgent()
	w.expectSizes("applied,", 192000, 192000, all...)
	for _, to := range w.to {
		for attempt := 1; ; attempt++ { // TCP sends small packets at the start, and after losses on a busy host
			low := ""
			for name, p := range w.verify(to, "a0", "r1", "b0") {
				if share(p) < 0.9 {
					low += fmt.Sprintf("after apply: %s: %.1f %% of the bytes to %v in large packets: %+v\n", name, 100*share(p), to, p.Causes)
				}
			}
			if low == "" {
				break
			}
			if attempt == 3 {
				t.Error(low)
				break
			}
		}
	}

	// The router's second interface does not support large packets. Therefore, the router segments
	// them.
	wanted["r1"] = "ipv6: 65536, ipv4: 65536"
	w.policy(wanted)
	w.apply()
	w.expectSizes("then", 192000, 192000, "a0", "r0", "b0")
	w.expectSizes("then", 65536, 65536, "r1")
	for _, to := range w.to {
		proofs := w.verify(to, "a0", "r1", "b0")
		// Segmentation makes the router slower. It drops packets, so that the congestion window is small.
		if p := proofs["a0"]; share(p) < 0.1 {
			t.Errorf("small interface in the path: a0: %.1f %% of the bytes to %v in large packets", 100*share(p), to)
		}
		for _, name := range []string{"r1", "b0"} {
			if p := proofs[name]; share(p) > 0.01 {
				t.Errorf("after a small interface: %s: %.1f %% of the bytes to %v in large packets", name, 100*share(p), to)
			}
		}
		if p := proofs["r1"]; p.NoDriver == "" && p.Cut < 0.1 {
			t.Errorf("r1 has segmented %.1f %% of the bytes to %v", 100*p.Cut, to)
		}
	}

	// One family at a time.
	w.policy(map[string]string{"a0": "ipv6: 192KB", "b0": "ipv4: 192KB"})
	w.apply()
	w.expectSizes("IPv6 only,", 192000, 65536, "a0")
	w.expectSizes("IPv4 only,", 65536, 192000, "b0")
	w.expectSizes("without rule,", 65536, 65536, "r0", "r1")
}

// TestBigTCPCrash kills the agent. The sizes stay set, and the next agent can revert them.
func TestBigTCPCrash(t *testing.T) {
	w := newWay(t)
	w.policy(map[string]string{"a0": "ipv6: 192KB, ipv4: 192KB", "b0": "ipv6: 192KB, ipv4: 192KB"})
	w.startAgent()
	w.expectSizes("applied,", 192000, 192000, "a0", "b0")
	w.must(w.agent.Kill())
	<-w.agent.Done()
	w.expectSizes("without an agent,", 192000, 192000, "a0", "b0")
	dev, err := w.spaces["b0"].Netlink().LinkByName("b0")
	w.must(err)
	w.must(w.spaces["b0"].Netlink().LinkSetGSOMaxSize(dev, 100000)) // as another program
	w.startAgent()
	w.expectSizes("with the next agent,", 192000, 192000, "a0")
	w.expectSizes("changed externally,", 100000, 192000, "b0")
	var s api.BigTCPStatus
	w.must(w.get("/v1/bigtcp", &s))
	states := map[string]string{}
	for _, i := range s.Interfaces {
		states[i.Interface] = i.State
	}
	if states["a0"] != "applied" || states["b0"] != "changed" {
		t.Errorf("states are %v", states)
	}
	w.apply()
	w.expectSizes("applied again,", 192000, 192000, "a0", "b0")

	// A new interface with the name of a removed one.
	w.must(w.spaces["b0"].Netlink().LinkDel(dev))
	w.link("r1", w.spaces["r0"], "b0", w.spaces["b0"], 1)
	w.eventually("the new b0", func() error {
		if got := w.sizes("b0"); got != [2]uint32{192000, 192000} {
			return errors.New("it has " + strconv.Itoa(int(got[0])))
		}
		return nil
	})
	w.policy(nil)
	w.apply()
	w.expectSizes("without a rule,", 65536, 65536, "a0", "b0")
}
