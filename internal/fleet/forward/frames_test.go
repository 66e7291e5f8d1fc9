// SPDX-License-Identifier: Apache-2.0

package forward_test

import (
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/internal/fleet/forward"
	"sockeye/internal/fleet/table"
	"sockeye/internal/testenv"
)

// sum16 is the sum of the checksums of IP.
func sum16(b []byte) uint16 {
	sum := uint32(0)
	for i := 0; i+1 < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for sum > 0xffff {
		sum = sum&0xffff + sum>>16
	}
	return ^uint16(sum)
}

// datagram4 is a packet of a device to the service, without a checksum of UDP.
func datagram4(from netip.Addr, payload []byte) []byte {
	ip := []byte{0x45, 0, 0, 0, 0, 0, 0, 0, 64, unix.IPPROTO_UDP, 0, 0}
	ip = append(append(ip, from.AsSlice()...), service4.AsSlice()...)
	binary.BigEndian.PutUint16(ip[2:], uint16(len(ip)+8+len(payload)))
	binary.BigEndian.PutUint16(ip[10:], sum16(ip))
	ip = binary.BigEndian.AppendUint16(ip, 40000)
	ip = binary.BigEndian.AppendUint16(ip, port)
	ip = binary.BigEndian.AppendUint16(ip, uint16(8+len(payload)))
	return append(append(ip, 0, 0), payload...)
}

// segment4 is an acknowledgement of a device to the service, of a connection that no host has.
func segment4(from netip.Addr) []byte {
	p := datagram4(from, make([]byte, 12))[:20+20]
	p[9] = unix.IPPROTO_TCP
	p[10], p[11] = 0, 0
	binary.BigEndian.PutUint16(p[10:], sum16(p[:20]))
	tcp := p[20:]
	clear(tcp[4:])
	binary.BigEndian.PutUint32(tcp[8:], 1)
	tcp[12], tcp[13] = 5<<4, 0x10
	pseudo := append(append([]byte{}, p[12:20]...), 0, unix.IPPROTO_TCP, 0, 20)
	binary.BigEndian.PutUint16(tcp[16:], sum16(append(pseudo, tcp...)))
	return p
}

// sendTagged sends a frame with an 802.1Q tag from the router to a host.
func (f *fleet) sendTagged(t testing.TB, to *node, tci uint16, packet []byte) {
	t.Helper()
	f.sendFrame(t, to.mac, packet, tci)
}

// sendFrame sends a frame with 802.1Q tags from the router to a MAC address.
func (f *fleet) sendFrame(t testing.TB, to [6]byte, packet []byte, tags ...uint16) {
	t.Helper()
	frame := append(append([]byte{}, to[:]...), f.router.mac[:]...)
	for _, tci := range tags {
		frame = binary.BigEndian.AppendUint16(frame, unix.ETH_P_8021Q)
		frame = binary.BigEndian.AppendUint16(frame, tci)
	}
	frame = append(binary.BigEndian.AppendUint16(frame, unix.ETH_P_IP), packet...)
	f.router.do(t, func() error {
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		return unix.Sendto(fd, frame, 0, &unix.SockaddrLinklayer{Ifindex: f.router.index, Halen: 6})
	})
}

// TestPriorityTag is that frames with VLAN ID 0, which the kernel gives to the interface itself, are forwarded, on the link and
// through the tunnel, where a tag would not fit. Frames of a VLAN are left to the interface of the VLAN.
func TestPriorityTag(t *testing.T) {
	const (
		priority = 5 << 13
		room     = 1430
	)
	f := newFleet(t, 2)
	a, b := f.hosts[0], f.hosts[1]
	f.setAll(t, f.table())
	from := device(4, 0)
	for i := 0; f.owner(from) != b; i++ {
		from = device(4, i)
	}
	arrives := func(what string, tci uint16, payload []byte) {
		t.Helper()
		before := counts(t, a)
		f.sendTagged(t, a, 5|tci, datagram4(from, []byte("of a VLAN")))
		f.sendTagged(t, a, tci, datagram4(from, payload))
		if at := f.receive(t, from, payload); at != b {
			t.Errorf("%s: at %v, want b; a counts %v, b %v", what, at, counts(t, a), counts(t, b))
		}
		before[forward.Forwarded]++
		if after := counts(t, a); after != before {
			t.Errorf("%s: counts %v, want %v", what, after, before)
		}
	}
	large := make([]byte, room-28)
	arrives("VLAN ID 0", 0, []byte("without a priority"))
	arrives("VLAN ID 0 with a priority", priority, []byte("with a priority"))
	mine := device(4, 0)
	for i := 0; f.owner(mine) != a; i++ {
		mine = device(4, i)
	}
	f.sendTagged(t, a, 0, datagram4(mine, []byte("mine")))
	if at := f.receive(t, mine, []byte("mine")); at != a || counts(t, a)[forward.Local] != 1 {
		t.Errorf("of this host: at %v, counts %v", at, counts(t, a))
	}
	to := f.table()
	for _, n := range f.hosts {
		index := n.openTunnel(t)
		n.do(t, func() error {
			return n.path.Set(to, n.name, func(h *table.Host) forward.Next {
				return forward.Next{Addresses: h.Addresses[1:], Interface: index, Sources: h.Addresses, VNI: forward.VNI(to.Nonce), Room: room}
			}, nil, forward.Flip{})
		})
	}
	arrives("through the tunnel", priority, large)
	testenv.Within(t, "the counters of b", func() bool { return counts(t, b)[forward.Local]+counts(t, b)[forward.Disagreed] >= 3 })
	if n := counts(t, b); n[forward.Untrusted] > 0 {
		t.Errorf("b counts %v", n)
	}
}

// TestFramesPastTheProgram is that no host serves frames that the kernel would give to every host, or that hide their packet from the
// program: a sender on the link cannot give the packets of a device to another host.
func TestFramesPastTheProgram(t *testing.T) {
	f := newFleet(t, 2)
	a, b := f.hosts[0], f.hosts[1]
	f.setAll(t, f.table())
	from := f.deviceOf(b)
	for what, frame := range map[string]struct {
		to   [6]byte
		tags int
	}{
		"broadcast": {[6]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, 0},
		"multicast": {[6]byte{1, 0, 0x5e, 0, 0, 1}, 0},
		"two tags":  {a.mac, 2},
		"four tags": {a.mac, 4},
	} {
		before := counts(t, a)
		f.sendFrame(t, frame.to, datagram4(from, []byte(what)), make([]uint16, frame.tags)...)
		testenv.Within(t, what+" at the program of a", func() bool { return counts(t, a)[forward.Untrusted] == before[forward.Untrusted]+1 })
	}
	f.sendFrame(t, a.mac, datagram4(from, []byte("last"))) // the others would come before
	if at := f.receive(t, from, []byte("last")); at != b {
		t.Errorf("at %v", at)
	}
}

// deviceOf returns a device with an IPv4 address whose owner is a host.
func (f *fleet) deviceOf(owner *node) netip.Addr {
	for i := 0; ; i++ {
		if from := device(4, i); f.owner(from) == owner {
			return from
		}
	}
}

// TestIPOptions is that a datagram with options of IPv4 is forwarded by its ports, which follow the options.
func TestIPOptions(t *testing.T) {
	f := newFleet(t, 2)
	a, b := f.hosts[0], f.hosts[1]
	f.setAll(t, f.table())
	from, payload := f.deviceOf(b), []byte("behind options")
	plain := datagram4(from, payload)
	packet := append(append(plain[:20:20], 1, 1, 1, 0), plain[20:]...) // three NOPs and the end of the options
	packet[0] = 0x46
	packet[10], packet[11] = 0, 0
	binary.BigEndian.PutUint16(packet[2:], uint16(len(packet)))
	binary.BigEndian.PutUint16(packet[10:], sum16(packet[:24]))
	f.sendTagged(t, a, 0, packet)
	if at := f.receive(t, from, payload); at != b || counts(t, a)[forward.Forwarded] != 1 {
		t.Errorf("at %v, a counts %v, b %v", at, counts(t, a), counts(t, b))
	}
	// To another port, it is of no service: bytes of the options are not ports.
	binary.BigEndian.PutUint16(packet[26:], port+1)
	before := counts(t, a)
	f.sendTagged(t, a, 0, packet)
	f.sendTagged(t, a, 0, datagram4(from, payload))
	if at := f.receive(t, from, payload); at != b {
		t.Errorf("after a packet to another port: at %v", at)
	}
	before[forward.Forwarded]++
	if after := counts(t, a); after != before {
		t.Errorf("a packet to another port: counts %v, want %v", after, before)
	}
}

// TestVLAN is that the interface of a VLAN is an interface of a fleet like others: packets with its tag are forwarded over the VLAN.
func TestVLAN(t *testing.T) {
	f := newFleet(t, 2)
	a, b := f.hosts[0], f.hosts[1]
	vlans := make(map[*node]int)
	addresses := map[string]netip.Addr{a.name: netip.MustParseAddr("10.5.0.1"), b.name: netip.MustParseAddr("10.5.0.2")}
	for _, n := range f.hosts {
		err := n.nl.LinkAdd(&netlink.Vlan{LinkAttrs: netlink.LinkAttrs{Name: "eth0.5", ParentIndex: n.index}, VlanId: 5})
		if errors.Is(err, unix.EOPNOTSUPP) {
			t.Skip("kernel: no VLANs (8021q)")
		}
		check(t, err)
		vlan, err := n.nl.LinkByName("eth0.5")
		check(t, err)
		check(t, n.nl.AddrAdd(vlan, &netlink.Addr{IPNet: prefix(addresses[n.name], 24)}))
		check(t, n.nl.LinkSetUp(vlan))
		vlans[n] = vlan.Attrs().Index
		n.do(t, func() error {
			for _, name := range []string{"all", "eth0.5"} { // the route to the devices is through eth0
				if err := os.WriteFile("/proc/sys/net/ipv4/conf/"+name+"/rp_filter", []byte("0"), 0); err != nil {
					return err
				}
			}
			return n.path.Attach([]int{vlans[n]}, 0)
		})
	}
	to := f.table()
	for _, n := range f.hosts {
		n.do(t, func() error {
			return n.path.Set(to, n.name, func(h *table.Host) forward.Next {
				next := forward.Next{Addresses: []netip.Addr{addresses[h.Name]}, Interface: vlans[n]}
				for _, other := range f.hosts {
					if other.name == h.Name {
						next.MAC = other.mac
					}
				}
				return next
			}, nil, forward.Flip{})
		})
	}
	from, payload := f.deviceOf(b), []byte("of a VLAN")
	f.sendTagged(t, a, 5, datagram4(from, payload))
	if at := f.receive(t, from, payload); at != b || counts(t, a)[forward.Forwarded] != 1 || counts(t, b)[forward.Local] != 1 {
		t.Errorf("at %v, a counts %v, b %v", at, counts(t, a), counts(t, b))
	}
}

// TestSegmentsAreCounted is that a packet of generic segmentation offload counts as its segments.
func TestSegmentsAreCounted(t *testing.T) {
	f := newFleet(t, 2)
	a, b := f.hosts[0], f.hosts[1]
	f.setAll(t, f.table())
	f.route(t, a)
	client := f.connect(t, f.deviceOf(b))
	defer client.Close()
	check(t, b.tcp[0].SetDeadline(time.Now().Add(10*time.Second)))
	server, err := b.tcp[0].Accept()
	check(t, err)
	defer server.Close()
	const sent, segment = 2_000_000, 1460
	go func() {
		_, _ = client.Write(make([]byte, sent))
		_ = client.(*net.TCPConn).CloseWrite()
	}()
	check(t, server.SetDeadline(time.Now().Add(30*time.Second)))
	if n, err := io.Copy(io.Discard, server); err != nil || n != sent {
		t.Fatalf("%d bytes, %v", n, err)
	}
	packets, err := linkPackets(a)
	check(t, err)
	if n := counts(t, a)[forward.Forwarded]; n < sent/segment || packets > sent/segment/2 {
		t.Errorf("%d segments counted in %d packets, want at least %d in less than half as many", n, packets, sent/segment)
	}
}

// linkPackets returns the number of packets that have arrived at eth0.
func linkPackets(n *node) (uint64, error) {
	link, err := n.nl.LinkByIndex(n.index)
	if err != nil {
		return 0, err
	}
	return link.Attrs().Statistics.RxPackets, nil
}

// extended is a frame of IPv6 with some extension headers before a datagram. Its MAC addresses are zeros, as those of lo, with
// which the kernel runs a program for a test.
func extended(from, to netip.Addr, at uint16, extensions ...byte) []byte {
	b := make([]byte, 12, 128)
	b = binary.BigEndian.AppendUint16(b, unix.ETH_P_IPV6)
	next := append(extensions, unix.IPPROTO_UDP)
	b = append(b, 0x60, 0, 0, 0)
	b = binary.BigEndian.AppendUint16(b, uint16(8*len(extensions)+8))
	b = append(append(append(b, next[0], 64), from.AsSlice()...), to.AsSlice()...)
	for i := range extensions {
		b = append(b, next[i+1], 0, 0, 0, 0, 0, 0, 0) // a fragment header of 8 bytes is that of the first and only fragment
	}
	b = binary.BigEndian.AppendUint16(b, 40000)
	b = binary.BigEndian.AppendUint16(b, at)
	return append(b, 0, 8, 0, 0)
}

// unreachable is an error about a packet of the service, which it quotes without its frame.
func unreachable(from netip.Addr, quoted []byte) []byte {
	b := extended(from, service6, 0)[:54]
	b[14+6] = unix.IPPROTO_ICMPV6
	return append(append(b, 1, 0, 0, 0, 0, 0, 0, 0), quoted[14:]...)
}

// TestExtensionHeaders is that the ports decide behind at most four extension headers of IPv6, and the addresses alone behind
// more of them, as for fragments: all packets of a device reach one host.
func TestExtensionHeaders(t *testing.T) {
	const (
		passed, redirected = 1<<32 - 1, 7 // TC_ACT_UNSPEC, TC_ACT_REDIRECT
		hop, routing       = unix.IPPROTO_HOPOPTS, unix.IPPROTO_ROUTING
		options, fragment  = unix.IPPROTO_DSTOPTS, unix.IPPROTO_FRAGMENT
		authentication     = unix.IPPROTO_AH
		other              = port + 1
	)
	f := newFleet(t, 2)
	f.setAll(t, f.table())
	a := f.hosts[0]
	from := device(6, 0)
	for i := 0; f.owner(from) == a; i++ {
		from = device(6, i)
	}
	stranger := netip.MustParseAddr("2001:db8::54")
	for name, c := range map[string]struct {
		frame []byte
		want  uint32
	}{
		"none":                                   {extended(from, service6, port), redirected},
		"none, another port":                     {extended(from, service6, other), passed},
		"four":                                   {extended(from, service6, port, hop, options, routing, options), redirected},
		"four, another port":                     {extended(from, service6, other, hop, options, routing, options), passed},
		"four, the last one of a fragment":       {extended(from, service6, other, hop, options, routing, fragment), redirected},
		"five":                                   {extended(from, service6, port, hop, options, options, routing, options), redirected},
		"five, another port":                     {extended(from, service6, other, hop, options, options, routing, options), redirected},
		"five, the last one of a fragment":       {extended(from, service6, other, hop, options, options, routing, fragment), redirected},
		"five, the last one for routing":         {extended(from, service6, other, hop, options, options, options, routing), redirected},
		"eight":                                  {extended(from, service6, port, hop, options, options, options, options, options, options, options), redirected},
		"five, another address":                  {extended(from, stranger, port, hop, options, options, options, options), passed},
		"four and another header":                {extended(from, service6, port, hop, options, options, options, authentication), passed},
		"five, without the fifth":                {extended(from, service6, port, hop, options, options, options, options)[:14+40+4*8], redirected},
		"four, without the fourth":               {extended(from, service6, port, hop, options, options, options)[:14+40+3*8], passed},
		"four, without the fourth of a fragment": {extended(from, service6, port, hop, options, options, fragment)[:14+40+3*8], passed},
		"error about none":                       {unreachable(device(6, 199), quoted(from, port)), redirected},
		"error about none, another port":         {unreachable(device(6, 199), quoted(from, other)), passed},
		"error about five":                       {unreachable(device(6, 199), quoted(from, other, hop, options, options, options, options)), redirected},
	} {
		result, err := a.path.Ingress().Run(&ebpf.RunOptions{Data: c.frame})
		check(t, err)
		if result != c.want {
			t.Errorf("%s: verdict %d, want %d", name, int32(result), int32(c.want))
		}
	}
}

// quoted is a packet of the service to a device, from a port.
func quoted(to netip.Addr, from uint16, extensions ...byte) []byte {
	b := extended(service6, to, 40000, extensions...)
	binary.BigEndian.PutUint16(b[len(b)-8:], from)
	return b
}
