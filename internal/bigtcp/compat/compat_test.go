// SPDX-License-Identifier: Apache-2.0

package compat

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"sockeye/internal/bigtcp/netif"
	"sockeye/internal/linux"
	"sockeye/internal/testenv"
)

func TestIPv4Alone(t *testing.T) {
	for version, cut := range map[linux.Version]bool{
		{6, 3, 0}: false, {6, 5, 13}: false, {6, 6, 8}: false,
		{6, 6, 9}: true, {6, 6, 54}: true, {6, 6, 55}: false, {6, 6, 120}: false,
		{6, 7, 0}: true, {6, 8, 12}: true, {6, 9, 12}: true, {6, 10, 13}: true, {6, 10, 14}: false,
		{6, 11, 0}: true, {6, 11, 2}: true, {6, 11, 3}: false, {6, 12, 0}: false, {6, 18, 44}: false, {7, 1, 0}: false,
	} {
		for sizes, matters := range map[netif.Sizes]bool{
			{GSO: 65536, GRO: 65536, GSOIPv4: 196608, GROIPv4: 196608}:   true,
			{GSO: 100000, GRO: 65536, GSOIPv4: 196608, GROIPv4: 65536}:   true,
			{GSO: 196608, GRO: 196608, GSOIPv4: 196608, GROIPv4: 196608}: false,
			{GSO: 196608, GRO: 196608, GSOIPv4: 65536, GROIPv4: 65536}:   false,
			{GSO: 30000, GRO: 65536, GSOIPv4: 65536, GROIPv4: 65536}:     false,
		} {
			i := &netif.Interface{Name: "eth0", Sizes: sizes}
			got := checkIPv4Alone(i, netif.Support{IPv6: true, IPv4: true}, version, "/run/netns/x")
			if len(got) > 0 != (cut && matters) {
				t.Errorf("%v with %+v: %+v", version, sizes, got)
			}
			for _, x := range got {
				wantFound(t, got, ipv4Alone, version.String())
				if want := fmt.Sprintf("sockeye bigtcp apply eth0 --ipv6 %d --ipv4 %[1]d --netns /run/netns/x;", sizes.GSOIPv4); !strings.HasPrefix(x.Hint, want) {
					t.Errorf("the hint is %q, not %q", x.Hint, want)
				}
			}
		}
	}
}

func TestDriver(t *testing.T) {
	lower := []netif.Related{{Relation: netif.Lower, Index: 2, Name: "eth0", Driver: "virtio_net", TSOMaxSize: 65536}}
	for _, c := range []struct {
		i    netif.Interface
		want string // in the detail; "" for none
	}{
		{netif.Interface{Driver: "virtio_net", TSOMaxSize: 65536, TSOMaxSegs: 65535, MTU: 1500}, "virtio_net supports packets of at most 65536 bytes"},
		{netif.Interface{Kind: "tun", TSOMaxSize: 65536, TSOMaxSegs: 65535, MTU: 1500}, "tun supports packets of at most 65536 bytes"},
		{netif.Interface{Driver: "r8169", TSOMaxSize: 64000, TSOMaxSegs: 64, MTU: 1500}, "r8169 supports packets of at most 64000 bytes"},
		{netif.Interface{Driver: "mlx5_core", TSOMaxSize: 524280, TSOMaxSegs: 65535, MTU: 1500}, ""},
		{netif.Interface{Driver: "few", TSOMaxSize: 524280, TSOMaxSegs: 40, MTU: 1500}, "few supports at most 40 segments per packet (tso_max_segs), 57920 bytes"},
		{netif.Interface{Driver: "few", TSOMaxSize: 524280, TSOMaxSegs: 40, MTU: 9000}, ""},
		{netif.Interface{Driver: "old", MTU: 1500}, ""}, // before 5.19 the kernel does not say
		{netif.Interface{Kind: "vlan", TSOMaxSize: 65536, TSOMaxSegs: 65535, MTU: 1500, Related: lower}, ""},
		{netif.Interface{Kind: "gre", TSOMaxSize: 65536, TSOMaxSegs: 65535, MTU: 1476}, ""}, // reported as a tunnel
	} {
		got := checkDriver(&c.i)
		if c.want == "" {
			wantNotFound(t, got, driver)
		} else {
			wantFound(t, got, driver, c.want)
		}
	}
}

func TestOffloads(t *testing.T) {
	large := netif.Sizes{GSO: 196608, GRO: 196608}
	for _, c := range []struct {
		i    netif.Interface
		want []string
	}{
		{netif.Interface{Sizes: large, Offloads: netif.Offloads{GSO: true, TSO: true, GRO: true}}, nil},
		{netif.Interface{Sizes: large, Offloads: netif.Offloads{GSO: false, TSO: true, GRO: true}}, nil},
		{netif.Interface{Sizes: large, Offloads: netif.Offloads{GSO: true, GRO: true}}, []string{"TSO is off"}},
		{netif.Interface{Sizes: large, Offloads: netif.Offloads{GSO: true, TSO: true}}, []string{"GRO is off"}},
		{netif.Interface{Sizes: netif.Sizes{GSO: 65536, GRO: 65536}, Offloads: netif.Offloads{TSO: true}}, nil},
		{netif.Interface{Sizes: large}, []string{"TSO is off", "GRO is off"}},
		{netif.Interface{Kind: "veth", Sizes: large, Offloads: netif.Offloads{TSO: true}}, nil}, // it gets what the peer built
	} {
		got := checkOffloads(&c.i)
		if len(got) != len(c.want) {
			t.Errorf("%+v: %+v", c.i, got)
		}
		for _, w := range c.want {
			wantFound(t, got, offloadOff, w)
		}
	}
}

func TestTunnels(t *testing.T) {
	now, then := linux.Version{6, 18, 0}, linux.Version{7, 3, 0}
	for _, c := range []struct {
		i      netif.Interface
		kernel linux.Version
		want   string
	}{
		{netif.Interface{Kind: "vxlan", TSOMaxSize: 524280, Sizes: netif.Sizes{GSO: 65536}}, now, "vxlan encapsulates packets of at most 65536 bytes"},
		{netif.Interface{Kind: "vxlan", TSOMaxSize: 524280, Sizes: netif.Sizes{GSO: 65536}}, then, ""},
		{netif.Interface{Kind: "vxlan", TSOMaxSize: 65536, Sizes: netif.Sizes{GSO: 65536}}, then, "vxlan encapsulates packets of at most 65536 bytes"},
		{netif.Interface{Kind: "vxlan", TSOMaxSize: 524280, Sizes: netif.Sizes{GSO: 192000}}, now, "can be many times slower"},
		{netif.Interface{Kind: "vxlan", TSOMaxSize: 524280, Sizes: netif.Sizes{GSO: 65536, GSOIPv4: 192000}}, now, "can be many times slower"},
		{netif.Interface{Kind: "geneve", TSOMaxSize: 524280, Sizes: netif.Sizes{GSO: 192000}}, then, ""},
		{netif.Interface{Kind: "wireguard", TSOMaxSize: 65536, Sizes: netif.Sizes{GSO: 65536}}, then, "wireguard encapsulates packets of at most 65536 bytes"},
		{netif.Interface{Kind: "veth", TSOMaxSize: 524280}, now, ""},
		{netif.Interface{Driver: "mlx5_core", TSOMaxSize: 524280}, now, ""},
	} {
		got := checkTunnels(&c.i, nil, c.kernel)
		if c.want == "" {
			wantNotFound(t, got, tunnel)
		} else {
			wantFound(t, got, tunnel, c.want)
		}
	}
	var ifaces []netif.Interface
	for k := range 7 {
		ifaces = append(ifaces, netif.Interface{Index: 10 + k, Name: fmt.Sprintf("gre%d", k), Kind: "gre", TSOMaxSize: 65536,
			Related: []netif.Related{{Relation: netif.Lower, Index: 2, Name: "eth0"}}})
	}
	ifaces = append(ifaces, netif.Interface{Index: 20, Name: "gre7", Kind: "gre", Related: []netif.Related{{Relation: netif.Lower, Index: 2, Netns: "/run/netns/x"}}})
	over := tunnelsByLower(ifaces, now)
	wantFound(t, checkTunnels(&netif.Interface{Index: 2, Name: "eth0"}, over[2], now), tunnel, "(gre0, gre1, gre2, gre3, gre4 and 2 more)")
}

func TestCompareFragments(t *testing.T) {
	with := func(size uint32) []netif.Interface {
		return []netif.Interface{{Sizes: netif.Sizes{GSO: 65536}}, {Sizes: netif.Sizes{GSOIPv4: size}}}
	}
	for _, c := range []struct {
		frags, page uint64
		ifaces      []netif.Interface
		want        string
	}{
		{17, 4096, nil, "17: a packet"},
		{17, 4096, with(192000), "17: a packet"},
		{17, 4096, with(69632), ""},
		{17, 4096, with(69633), "of 4096 bytes, 69632 bytes"},
		{45, 4096, with(192000), "45: a packet"},
		{45, 4096, with(184320), ""},
		{17, 65536, with(524280), ""},
	} {
		got := compareFragments(c.frags, c.page, c.ifaces)
		if c.want == "" {
			wantNotFound(t, got, smallFrags)
		} else {
			wantFound(t, got, smallFrags, c.want)
		}
	}
}

func TestPacketSockets(t *testing.T) {
	const table = `sk               RefCnt Type Proto  Iface R Rmem   User   Inode
000000004a7a449d 3      3    0003   2     1 0      0      32331023
00000000aaaaaaaa 3      3    88cc   2     1 0      0      1
00000000bbbbbbbb 3      2    0800   0     1 0      0      22
00000000cccccccc 3      3    0003   0     0 0      0      3
00000000dddddddd 3      3    86dd   7     1 0      0      44
garbage
`
	want := map[string]int{"32331023": 2, "22": 0, "44": 7}
	got := packetSockets(table)
	if len(got) != len(want) {
		t.Errorf("got %v, not %v", got, want)
	}
	for inode, index := range want {
		if got[inode] != index {
			t.Errorf("got %v, not %v", got, want)
		}
	}
}

// TestNothingWrong checks a veth pair without incompatibilities.
func TestNothingWrong(t *testing.T) {
	a, _ := newPair(t)
	host, byInterface := findAll(t, a)
	for _, x := range host {
		// These concern the whole host.
		if x.Name != smallFrags {
			t.Errorf("incompatibility %+v", x)
		}
	}
	if len(byInterface) != 0 {
		t.Errorf("incompatibilities %+v", byInterface)
	}
}

func TestCaptures(t *testing.T) {
	a, b := newPair(t)
	open := func(name string) {
		t.Helper()
		var socket int
		inside(t, a, func() (err error) {
			protocol := binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, unix.ETH_P_ALL))
			socket, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, int(protocol))
			if err != nil || name == "" {
				return err
			}
			link, err := net.InterfaceByName(name)
			if err != nil {
				return err
			}
			return unix.Bind(socket, &unix.SockaddrLinklayer{Protocol: protocol, Ifindex: link.Index})
		})
		t.Cleanup(func() { must(t, unix.Close(socket)) })
	}
	name, err := os.ReadFile("/proc/self/comm")
	must(t, err)
	us := fmt.Sprintf("packet sockets are open in %s (%d):", strings.TrimSpace(string(name)), os.Getpid())
	open("va")
	host, byInterface := findAll(t, a)
	wantFound(t, byInterface["va"], capture, us)
	wantNotFound(t, byInterface["lo"], capture)
	wantNotFound(t, host, capture)
	open("")
	host, _ = findAll(t, a)
	wantFound(t, host, capture, us)
	host, byInterface = findAll(t, b)
	wantNotFound(t, host, capture)
	wantNotFound(t, byInterface["vb"], capture)
}

func TestTSOOff(t *testing.T) {
	a, _ := newPair(t)
	inside(t, a, func() error {
		socket, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(socket)
		value := struct{ command, data uint32 }{unix.ETHTOOL_STSO, 0}
		request := struct {
			name [unix.IFNAMSIZ]byte
			data unsafe.Pointer
			_    [16]byte
		}{data: unsafe.Pointer(&value)}
		copy(request.name[:], "va")
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(socket), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&request))); errno != 0 {
			return errno
		}
		return nil
	})
	_, byInterface := findAll(t, a)
	wantFound(t, byInterface["va"], offloadOff, "TSO is off")
}

func TestIPsec(t *testing.T) {
	n := newNamespace(t)
	policy := func(dir netlink.Dir) {
		err := n.Do(func() error {
			return netlink.XfrmPolicyAdd(&netlink.XfrmPolicy{
				Src: &net.IPNet{IP: net.IP{10, 0, 0, 1}, Mask: net.CIDRMask(32, 32)},
				Dst: &net.IPNet{IP: net.IP{10, 0, 0, 2}, Mask: net.CIDRMask(32, 32)},
				Dir: dir,
				Tmpls: []netlink.XfrmPolicyTmpl{{
					Src: net.IP{10, 0, 0, 1}, Dst: net.IP{10, 0, 0, 2}, Proto: netlink.XFRM_PROTO_ESP, Mode: netlink.XFRM_MODE_TUNNEL,
				}},
			})
		})
		if errors.Is(err, unix.EPROTONOSUPPORT) {
			t.Skip("kernel: it has no IPsec")
		}
		must(t, err)
	}
	policy(netlink.XFRM_DIR_IN)
	host, _ := findAll(t, n)
	wantNotFound(t, host, ipsec)
	policy(netlink.XFRM_DIR_OUT)
	host, _ = findAll(t, n)
	wantFound(t, host, ipsec, "1 outbound IPsec policies")
}

// TestVXLAN sends through a tunnel, with sizes that the kernel accepts and with sizes that
// the tunnel supports.
func TestVXLAN(t *testing.T) {
	kernel := mustKernel(t)
	if kernel.Before(linux.Version{6, 3, 0}) {
		t.Skip("kernel: there are no large packets of IPv4 before 6.3")
	}
	a, b := newPair(t)
	for k, n := range []*netif.Namespace{a, b} {
		device, other, address := "va", net.IP{10, 9, 0, 2}, "10.8.0.1/24"
		if k == 1 {
			device, other, address = "vb", net.IP{10, 9, 0, 1}, "10.8.0.2/24"
		}
		inside(t, n, func() error {
			below, err := net.InterfaceByName(device)
			if err != nil {
				return err
			}
			return netlink.LinkAdd(&netlink.Vxlan{LinkAttrs: netlink.LinkAttrs{Name: "vx"}, VxlanId: 7, Group: other, Port: 4789, VtepDevIndex: below.Index})
		})
		setUp(t, n, "vx", 0, address)
	}
	largeOf := func(protocol byte) []*nl.RtAttr {
		return slices.Concat([]*nl.RtAttr{payload(network, 9, 1), compare(unix.NFT_CMP_EQ, protocol)}, longer(65535), []*nl.RtAttr{counter()})
	}
	// The outer packets are UDP, the inner ones TCP.
	nftTable(t, b, unix.NFPROTO_IPV4, unix.NF_INET_LOCAL_IN, largeOf(unix.IPPROTO_UDP), largeOf(unix.IPPROTO_TCP))
	small := kernel.Before(linux.Version{7, 3, 0})
	_, byInterface := findAll(t, a)
	if small {
		wantFound(t, byInterface["vx"], tunnel, "vxlan encapsulates packets of at most 65536 bytes")
		wantFound(t, byInterface["va"], tunnel, "lower interface of tunnels (vx)")
	}
	legacy := stream(t, a, b, "10.8.0.2", time.Second)
	setSizes(t, a, "vx", 196608)
	setSizes(t, b, "vx", 196608)
	_, byInterface = findAll(t, a)
	large := stream(t, a, b, "10.8.0.2", time.Second)
	if small {
		wantFound(t, byInterface["vx"], tunnel, "can be many times slower")
	} else {
		wantNotFound(t, byInterface["vx"], tunnel)
		wantNotFound(t, byInterface["va"], tunnel)
	}
	counters := nftCounters(t, b, unix.NFPROTO_IPV4)
	arrived, unwrapped := counters[2], counters[3]
	t.Logf("%d bytes arrive in a second with sizes of 65536, %d with 196608, of which %d packets above 65535 bytes arrive and %d come out",
		legacy, large, arrived, unwrapped)
	if arrived == 0 {
		t.Error("no packet above 65535 bytes is wrapped")
	}
	if small != (unwrapped == 0) {
		t.Errorf("%d packets above 65535 bytes come out of the tunnel", unwrapped)
	}
}

// TestShaper sends through token buckets with bursts below and above the sizes.
func TestShaper(t *testing.T) {
	kernel := mustKernel(t)
	if kernel.Before(linux.Version{6, 3, 0}) {
		t.Skip("kernel: there are no large packets of IPv4 before 6.3")
	}
	a, b := newPair(t)
	nftTable(t, b, unix.NFPROTO_IPV4, unix.NF_INET_LOCAL_IN, append(longer(65535), counter()))
	for _, c := range []struct {
		burst uint32
		cut   bool
	}{{60_000, true}, {190_000, true}, {400_000, false}} {
		inside(t, a, func() error {
			link, err := netlink.LinkByName("va")
			if err != nil {
				return err
			}
			const rate = 1 << 30 // bytes a second
			err = netlink.QdiscReplace(&netlink.Tbf{
				QdiscAttrs: netlink.QdiscAttrs{LinkIndex: link.Attrs().Index, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT},
				Rate:       rate, Limit: 10 << 20, Buffer: netlink.Xmittime(rate, c.burst),
			})
			if errors.Is(err, unix.ENOENT) {
				t.Skip("kernel: it has no token bucket filter")
			}
			return err
		})
		_, byInterface := findAll(t, a)
		if c.cut {
			wantFound(t, byInterface["va"], shaperQdisc, "tbf segments packets")
		} else {
			wantNotFound(t, byInterface["va"], shaperQdisc)
		}
		shapers, err := shapers(a)
		must(t, err)
		for _, of := range shapers {
			// The kernel counts time in ticks of 64 ns.
			if got, want := float64(of[0].burst), float64(c.burst); got < 0.95*want || got > 1.05*want {
				t.Errorf("a burst of %v is %v", want, got)
			}
		}
		if len(shapers) != 1 {
			t.Errorf("shapers: %+v", shapers)
		}
		before := nftCounters(t, b, unix.NFPROTO_IPV4)[2]
		stream(t, a, b, "10.9.0.2", 500*time.Millisecond)
		passed := nftCounters(t, b, unix.NFPROTO_IPV4)[2] - before
		// A burst between 65536 bytes and the GSO size passes some large packets.
		if c.burst < netif.Legacy && passed > 0 || !c.cut && passed == 0 {
			t.Errorf("with a burst of %d, %d packets above 65535 bytes pass", c.burst, passed)
		}
	}
}

func TestCheckShapers(t *testing.T) {
	const index = 7
	message := func(kind string, options ...*nl.RtAttr) []byte {
		m := (&nl.TcMsg{Ifindex: index}).Serialize()
		m = append(m, nl.NewRtAttr(nl.TCA_KIND, nl.ZeroTerminated(kind)).Serialize()...)
		list := nl.NewRtAttr(nl.TCA_OPTIONS, nil)
		for _, o := range options {
			list.AddChild(o)
		}
		return append(m, list.Serialize()...)
	}
	split := func(on uint32) *nl.RtAttr { return nl.NewRtAttr(tcaCakeSplitGSO, nl.Uint32Attr(on)) }
	for _, c := range []struct {
		message []byte
		size    uint32
		want    string
	}{
		{message("cake", split(1)), 196608, "cake segments all packets"},
		{message("cake", split(1)), 65536, ""},
		{message("cake", split(0)), 196608, ""},
		{message("cake"), 196608, ""},
		{message("fq", split(1)), 196608, ""},
		{message("tbf"), 196608, ""},
	} {
		var shapers []shaper
		if got, s, ok := parseShaper(c.message); ok {
			if got != index {
				t.Errorf("the index is %d, not %d", got, index)
			}
			shapers = append(shapers, s)
		}
		found := checkShapers(&netif.Interface{Name: "eth0", Sizes: netif.Sizes{GSO: c.size}}, shapers)
		if c.want == "" {
			wantNotFound(t, found, shaperQdisc)
		} else {
			wantFound(t, found, shaperQdisc, c.want)
		}
	}
}

func FuzzParseShaper(f *testing.F) {
	f.Add((&nl.TcMsg{}).Serialize())
	m := (&nl.TcMsg{Ifindex: 1}).Serialize()
	m = append(m, nl.NewRtAttr(nl.TCA_KIND, nl.ZeroTerminated("tbf")).Serialize()...)
	options := nl.NewRtAttr(nl.TCA_OPTIONS, nil)
	options.AddRtAttr(nl.TCA_TBF_PARMS, slices.Repeat([]byte{1}, nl.SizeofTcTbfQopt))
	options.AddRtAttr(nl.TCA_TBF_RATE64, slices.Repeat([]byte{1}, 8))
	f.Add(append(m, options.Serialize()...))
	f.Fuzz(func(t *testing.T, m []byte) {
		if _, s, ok := parseShaper(m); ok && s.kind != "tbf" && s.kind != "cake" {
			t.Errorf("%q is a shaper", s.kind)
		}
	})
}

// TestWithoutRights runs the checks that need no privileges.
func TestWithoutRights(t *testing.T) {
	socket, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
	if errors.Is(err, unix.EPROTONOSUPPORT) {
		t.Skip("kernel: it has no packet filters")
	}
	must(t, err)
	must(t, unix.Close(socket))
	n, err := netif.OpenNamespace("")
	must(t, err)
	defer n.Close()
	ifaces, err := n.Interfaces()
	must(t, err)
	testenv.WithoutRights(t, func() {
		host, _, err := Find(n, ifaces, n.Support())
		if err != nil {
			t.Error(err)
			return
		}
		wantFound(t, host, lengthFilter, "packet filters cannot be inspected")
	})
}

func TestLeavesNothingOpen(t *testing.T) {
	n := newNamespace(t)
	findAll(t, n)
	count := func() int {
		list, err := os.ReadDir("/proc/self/fd")
		must(t, err)
		return len(list)
	}
	before := count()
	for range 20 {
		findAll(t, n)
	}
	if after := count(); after > before {
		t.Errorf("%d descriptors are open, %d before", after, before)
	}
}

func TestListed(t *testing.T) {
	words := strings.Fields("a b c d e f g")
	for n, want := range map[int]string{1: "a", 5: "a; b; c; d; e", 6: "a; b; c; d; e and 1 more", 7: "a; b; c; d; e and 2 more"} {
		if got := joinFirst(slices.Clone(words[:n]), "; "); got != want {
			t.Errorf("%d: %q, not %q", n, got, want)
		}
	}
}
