// SPDX-License-Identifier: Apache-2.0

package programs_test

import (
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"sockeye/internal/bigtcp/programs"
	"sockeye/internal/testenv"
)

// netnsInode is the inode of the tests' network namespace.
func netnsInode(t testing.TB) uint32 {
	t.Helper()
	info, err := os.Stat("/proc/self/ns/net")
	check(t, err)
	return uint32(info.Sys().(*syscall.Stat_t).Ino)
}

func openBigTCP(t testing.TB, c programs.Config) *programs.Counter {
	t.Helper()
	b, err := programs.Open(c)
	if err != nil {
		t.Fatalf("%+v", err)
	}
	t.Cleanup(func() { check(t, b.Close()) })
	return b
}

func counts(t testing.TB, b *programs.Counter) [programs.Points][programs.Families]programs.Counts {
	t.Helper()
	all, err := b.Counts()
	check(t, err)
	return all
}

func flows(t testing.TB, b *programs.Counter) map[programs.FlowKey]programs.Flow {
	t.Helper()
	all := make(map[programs.FlowKey]programs.Flow)
	check(t, b.Flows(func(k *programs.FlowKey, f *programs.Flow) { all[*k] = *f }))
	return all
}

// give runs the program on a packet and checks that the packet is passed on.
func give(t testing.TB, p *ebpf.Program, packet []byte, segments, mss uint32) {
	t.Helper()
	skb := make([]byte, 192) // struct __sk_buff
	binary.NativeEndian.PutUint32(skb[164:], segments)
	binary.NativeEndian.PutUint32(skb[176:], mss)
	verdict, err := p.Run(&ebpf.RunOptions{Data: packet, Context: skb})
	check(t, err)
	if int32(verdict) != -1 { // TC_ACT_UNSPEC
		t.Errorf("verdict %d", int32(verdict))
	}
}

// tcpSegment returns a TCP header with options and the given bytes of data.
func tcpSegment(data int) []byte {
	b := make([]byte, 32+data)
	binary.BigEndian.PutUint16(b, 1790)
	binary.BigEndian.PutUint16(b[2:], 40000)
	b[12], b[13] = 8<<4, 0x10
	return b
}

func ipv4Packet(protocol byte, offset uint16, payload []byte) []byte {
	b := make([]byte, 20, 20+len(payload))
	b[0], b[8], b[9] = 0x45, 64, protocol
	binary.BigEndian.PutUint16(b[2:], uint16(20+len(payload)))
	binary.BigEndian.PutUint16(b[6:], offset)
	copy(b[12:], []byte{10, 0, 0, 1, 192, 0, 2, 7})
	return append(b, payload...)
}

func ipv6Packet(next byte, payload []byte) []byte {
	b := make([]byte, 40, 40+len(payload))
	b[0], b[6], b[7] = 6<<4, next, 64
	binary.BigEndian.PutUint16(b[4:], uint16(len(payload)))
	a, z := netip.MustParseAddr("2001:db8::1").As16(), netip.MustParseAddr("2001:db8::7").As16()
	copy(b[8:], a[:])
	copy(b[24:], z[:])
	return append(b, payload...)
}

// extension is an IPv6 extension header.
func extension(next byte, length int, rest []byte) []byte {
	b := make([]byte, length)
	b[0], b[1] = next, byte(length/8-1)
	return append(b, rest...)
}

func ethernet(protocol uint16, tags []uint16, packet []byte) []byte {
	b := make([]byte, 12)
	for _, tag := range tags {
		b = binary.BigEndian.AppendUint16(b, tag)
		b = binary.BigEndian.AppendUint16(b, 7)
	}
	b = binary.BigEndian.AppendUint16(b, protocol)
	return append(b, packet...)
}

// TestBigTCPPackets runs the programs on packets of all forms and checks the family, the length without the
// link-layer header, and the flow of packets with data.
func TestBigTCPPackets(t *testing.T) {
	const ip4, ip6, vlan, qinq = 0x800, 0x86dd, 0x8100, 0x88a8
	jumbo := ipv6Packet(0, extension(6, 8, tcpSegment(1500)))
	jumbo[4], jumbo[5] = 0, 0 // its option has the length
	padded := append(ipv4Packet(6, 0, tcpSegment(0)[:20]), make([]byte, 6)...)
	padded[20+12] = 5 << 4
	for _, test := range []struct {
		name   string
		packet []byte
		ether  bool
		family int
		length int
		flow   bool
	}{
		{"TCP over IPv4", ethernet(ip4, nil, ipv4Packet(6, 0, tcpSegment(100))), true, programs.IPv4, 152, true},
		{"TCP over IPv6", ethernet(ip6, nil, ipv6Packet(6, tcpSegment(100))), true, programs.IPv6, 172, true},
		{"a jumbogram", ethernet(ip6, nil, jumbo), true, programs.IPv6, 40 + 8 + 32 + 1500, true},
		{"several extensions", ethernet(ip6, nil, ipv6Packet(0, extension(60, 16, extension(43, 24, extension(6, 8, tcpSegment(9)))))), true, programs.IPv6, 40 + 48 + 41, true},
		{"a VLAN", ethernet(ip4, []uint16{vlan}, ipv4Packet(6, 0, tcpSegment(10))), true, programs.IPv4, 62, true},
		{"two VLANs", ethernet(ip6, []uint16{qinq, vlan}, ipv6Packet(6, tcpSegment(10))), true, programs.IPv6, 82, true},
		{"without a link header", ipv6Packet(6, tcpSegment(10)), false, programs.IPv6, 82, true},
		{"no data", ethernet(ip4, nil, ipv4Packet(6, 0, tcpSegment(0))), true, programs.IPv4, 52, false},
		{"no data, padded", ethernet(ip4, nil, padded), true, programs.IPv4, 46, false},
		{"UDP over IPv4", ethernet(ip4, nil, ipv4Packet(17, 0, make([]byte, 30))), true, programs.Other, 50, false},
		{"UDP over IPv6", ethernet(ip6, nil, ipv6Packet(17, make([]byte, 30))), true, programs.Other, 70, false},
		{"a later fragment", ethernet(ip4, nil, ipv4Packet(6, 185, tcpSegment(10))), true, programs.Other, 62, false},
		{"ARP", ethernet(0x806, nil, make([]byte, 28)), true, programs.Other, 28, false},
		{"cut in TCP", ethernet(ip4, nil, ipv4Packet(6, 0, tcpSegment(0)[:8])), true, programs.IPv4, 28, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := programs.Config{Index: 1, Ethernet: test.ether}
			c.Limits[test.family] = uint32(len(test.packet))
			b := openBigTCP(t, c)
			ingress, egress := b.Programs()
			give(t, ingress, test.packet, 0, 0)
			give(t, egress, test.packet, 3, 700)
			give(t, egress, test.packet, 200, 700)
			all := counts(t, b)
			size := 0
			for size < len(programs.Sizes) && test.length > int(programs.Sizes[size]) {
				size++
			}
			for family := range programs.Families {
				var in, out programs.Counts
				if family == test.family {
					n := uint64(test.length)
					in.Largest, out.Largest = n, n
					in.Sizes[size].Packets, in.Sizes[size].Bytes, in.Sizes[size].Segments = 1, n, 1
					out.Sizes[size].Packets, out.Sizes[size].Bytes, out.Sizes[size].Segments = 2, 2*n, 203
					in.Segments[0].Packets, in.Segments[0].Bytes = 1, n
					out.OverBytes = 2 * n
					out.Segments[1].Packets, out.Segments[1].Bytes = 1, n
					out.Segments[6].Packets, out.Segments[6].Bytes = 1, n
				}
				if got := all[programs.Ingress][family]; got != in {
					t.Errorf("family %d at ingress: %+v", family, got)
				}
				if got := all[programs.Egress][family]; got != out {
					t.Errorf("family %d at egress: %+v", family, got)
				}
			}
			found := flows(t, b)
			if !test.flow {
				if len(found) > 0 {
					t.Errorf("flows %+v", found)
				}
				return
			}
			if len(found) != 2 {
				t.Fatalf("flows %+v", found)
			}
			from, to := "10.0.0.1:1790", "192.0.2.7:40000"
			if test.family == programs.IPv6 {
				from, to = "[2001:db8::1]:1790", "[2001:db8::7]:40000"
			}
			for key, f := range found {
				source, destination := key.Ends()
				if source.String() != from || destination.String() != to || int(key.Family) != test.family {
					t.Errorf("flow from %s to %s, family %d", source, destination, key.Family)
				}
				want := programs.Flow{Packets: 1, Bytes: uint64(test.length), Largest: uint32(test.length)}
				if int(key.Point) == programs.Egress {
					want.Packets, want.Bytes, want.Mss = 2, 2*uint64(test.length), 700
				}
				if f != want {
					t.Errorf("point %d: %+v, want %+v", key.Point, f, want)
				}
			}
		})
	}
}

// TestBigTCPForgets uses more flows than entries: the table stays bounded, and the counts include all flows.
func TestBigTCPForgets(t *testing.T) {
	b := openBigTCP(t, programs.Config{Index: 1, Flows: 64})
	_, egress := b.Programs()
	const n = 5000
	for i := range n {
		segment := tcpSegment(10)
		binary.BigEndian.PutUint16(segment, uint16(i))
		give(t, egress, ipv4Packet(6, 0, segment), 0, 0)
	}
	if got := counts(t, b)[programs.Egress][programs.IPv4].Sizes[0].Packets; got != n {
		t.Errorf("%d packets counted, want %d", got, n)
	}
	if found := len(flows(t, b)); found == 0 || found > 1000 { // the kernel rounds up, by its CPUs
		t.Errorf("%d flows", found)
	}
}

// stream sends bytes from one end of a connection to the other.
func stream(t testing.TB, from, to net.Conn, n int64) {
	t.Helper()
	var wait sync.WaitGroup
	wait.Go(func() {
		if _, err := io.CopyN(io.Discard, to, n); err != nil {
			t.Error(err)
		}
	})
	block := make([]byte, 1<<20)
	for left := n; left > 0; left -= int64(len(block)) {
		_, err := from.Write(block[:min(left, int64(len(block)))])
		check(t, err)
	}
	wait.Wait()
}

// TestBigTCPAttached counts a stream through lo, at each point to which the kernel can attach.
func TestBigTCPAttached(t *testing.T) {
	for _, test := range []struct {
		name, address string
		family        int
	}{{"IPv4", "127.0.0.1", programs.IPv4}, {"IPv6", "::1", programs.IPv6}} {
		t.Run(test.name, func(t *testing.T) {
			// With two segments, the smallest number, packets are large at lo's own MTU.
			lo, err := netlink.LinkByIndex(1)
			check(t, err)
			check(t, netlink.LinkSetMTU(lo, 1500))
			t.Cleanup(func() { check(t, netlink.LinkSetMTU(lo, lo.Attrs().MTU)) })
			b := openBigTCP(t, programs.Config{Index: 1, Netns: netnsInode(t), Ethernet: true})
			points := []int{programs.Driver}
			check(t, b.AttachDriver())
			switch err := b.AttachTCX(); {
			case err == nil:
				points = []int{programs.Ingress, programs.Egress, programs.Driver}
			case !errors.Is(err, ebpf.ErrNotSupported):
				t.Fatal(err)
			}
			const n = 20 << 20
			client, server := testenv.TCPPair(t, test.address, test.address)
			stream(t, client, server, n)
			all := counts(t, b)
			for _, point := range points {
				var bytes uint64
				for _, s := range all[point][test.family].Sizes {
					bytes += s.Bytes
				}
				// The tracepoint missed one packet in some thousands in earlier runs.
				if bytes < n-n/50 || bytes > n+n/10 {
					t.Errorf("point %d: %d bytes of %d: %+v", point, bytes, n, all[point])
				}
			}
			if len(points) == 1 {
				return
			}
			// Nothing is segmented on the way, so the driver gets the packets that were sent.
			if sent, driver := all[programs.Egress][test.family], all[programs.Driver][test.family]; driver.Largest != sent.Largest {
				t.Errorf("egress %+v, driver %+v", sent, driver)
			}
			local, remote := client.LocalAddr().String(), client.RemoteAddr().String()
			found := 0
			for key, f := range flows(t, b) {
				if from, to := key.Ends(); from.String() == local && to.String() == remote {
					found++
					if f.Bytes < n || f.Mss == 0 || f.Largest > programs.Legacy || f.NearlyBytes < n/2 || f.LargeBytes > 0 {
						t.Errorf("flow %+v", f)
					}
				}
			}
			if found != 2 {
				t.Errorf("%d flows, want the stream at ingress and at egress", found)
			}
		})
	}
}

// TestBigTCPOtherNamespace uses an interface of the same index in another namespace, whose packets are not counted.
func TestBigTCPOtherNamespace(t *testing.T) {
	b := openBigTCP(t, programs.Config{Index: 1, Netns: netnsInode(t) + 1, Ethernet: true})
	check(t, b.AttachDriver())
	client, server := testenv.TCPPair(t, "127.0.0.1", "127.0.0.1")
	stream(t, client, server, 1<<20)
	if got := counts(t, b); got != ([programs.Points][programs.Families]programs.Counts{}) {
		t.Errorf("counts %+v", got)
	}
}

// TestBigTCPRights checks that missing capabilities are reported as such, not as a missing feature.
func TestBigTCPRights(t *testing.T) {
	testenv.WithoutRights(t, func() {
		_, err := programs.Open(programs.Config{Index: 1})
		if !errors.Is(err, os.ErrPermission) {
			t.Errorf("without rights: %v", err)
		}
	})
}

// BenchmarkBigTCP measures the cost of the programs per packet.
func BenchmarkBigTCP(b *testing.B) {
	counting, err := programs.Open(programs.Config{Index: 1, Ethernet: true})
	check(b, err)
	defer counting.Close()
	ingress, _ := counting.Programs()
	for name, packet := range map[string][]byte{
		"TCP over IPv4": ethernet(0x800, nil, ipv4Packet(6, 0, tcpSegment(1400))),
		"TCP over IPv6": ethernet(0x86dd, nil, ipv6Packet(6, tcpSegment(1400))),
		"ACK":           ethernet(0x800, nil, ipv4Packet(6, 0, tcpSegment(0))),
		"UDP":           ethernet(0x800, nil, ipv4Packet(17, 0, make([]byte, 1400))),
	} {
		b.Run(name, func(b *testing.B) {
			_, took, err := ingress.Benchmark(packet, 1_000_000, nil)
			check(b, err)
			b.ReportMetric(float64(took)/float64(time.Nanosecond), "ns/packet")
			b.ReportMetric(0, "ns/op")
		})
	}
}

// BenchmarkBigTCPDriver measures the program at the driver with BPF statistics, minus the time of an empty program.
func BenchmarkBigTCPDriver(b *testing.B) {
	for name, index := range map[string]int{"counted": 1, "of others": 99} {
		b.Run(name, func(b *testing.B) {
			counting, err := programs.Open(programs.Config{Index: index, Netns: netnsInode(b), Ethernet: true})
			check(b, err)
			defer counting.Close()
			stats, err := ebpf.EnableStats(0) // BPF_STATS_RUN_TIME
			check(b, err)
			defer stats.Close()
			empty, err := ebpf.NewProgram(&ebpf.ProgramSpec{
				Type: ebpf.RawTracepoint, License: "GPL", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()},
			})
			check(b, err)
			defer empty.Close()
			l, err := link.AttachRawTracepoint(link.RawTracepointOptions{Name: "net_dev_start_xmit", Program: empty})
			check(b, err)
			defer l.Close()
			check(b, counting.AttachDriver())
			client, server := testenv.TCPPair(b, "127.0.0.1", "127.0.0.1")
			stream(b, client, server, 1<<30)
			took := func(p *ebpf.Program) float64 {
				s, err := p.Stats()
				check(b, err)
				return float64(s.Runtime.Nanoseconds()) / float64(s.RunCount)
			}
			b.ReportMetric(took(counting.Driver())-took(empty), "ns/packet")
			b.ReportMetric(0, "ns/op")
		})
	}
}
