// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/lab"
)

// lane is the network of an arm: a sender, two hosts, and three links.
//
//	sender out 10.90.1.1 --- 10.90.1.2 in first next 10.90.2.1 --- 10.90.2.2 in second
//	sender back 10.90.3.1 ----------------------------------------- 10.90.3.2 back second
//
// Host second has the address of the service, and answers directly.
type lane struct {
	arm                   *arm
	sender, first, second *lab.Namespace
	send                  *ebpf.Program          // see bench_fleet.bpf.c
	dropping              *ebpf.Variable         // of bench_drop
	out                   int                    // index of the interface of sender
	end                   *lab.Namespace         // where datagrams are counted and dropped: second, or first of armDropped
	in                    int                    // index of the interface there
	forwarded             func() (uint64, error) // packets that Sockeye has forwarded; nil: there is no Sockeye
}

var (
	senderOut, firstIn     = netip.MustParseAddr("10.90.1.1"), netip.MustParseAddr("10.90.1.2")
	firstNext, secondIn    = netip.MustParseAddr("10.90.2.1"), netip.MustParseAddr("10.90.2.2")
	senderBack, secondBack = netip.MustParseAddr("10.90.3.1"), netip.MustParseAddr("10.90.3.2")
	sources                = netip.PrefixFrom(device(0), 24) // of the datagrams
)

// newLane makes the lane of an arm, without what forwards its packets.
func (b *bench) newLane(a *arm) (*lane, error) {
	l := &lane{arm: a}
	for _, n := range []struct {
		to   **lab.Namespace
		name string
	}{{&l.sender, "sender"}, {&l.first, "first"}, {&l.second, "second"}} {
		made, err := b.lab.Namespace(a.name + "-" + n.name)
		if err != nil {
			return nil, err
		}
		// The answers take another way than the packets.
		if err := errors.Join(made.Sysctl("ipv4.conf.all.rp_filter", "0"), made.Sysctl("ipv4.conf.default.rp_filter", "0")); err != nil {
			return nil, err
		}
		*n.to = made
	}
	for _, c := range []struct {
		one, two         *lab.Namespace
		oneName, twoName string
		oneIP, twoIP     netip.Addr
	}{
		{l.sender, l.first, "out", "in", senderOut, firstIn},
		{l.first, l.second, "next", "in", firstNext, secondIn},
		{l.sender, l.second, "back", "back", senderBack, secondBack},
	} {
		if err := connect(c.one, c.oneName, c.oneIP, c.two, c.twoName, c.twoIP); err != nil {
			return nil, err
		}
	}
	address, via := netip.PrefixFrom(service, 32), netip.PrefixFrom(device(0), 24)
	if err := errors.Join(
		l.second.AddAddress("lo", address),
		l.sender.Own(sources), l.sender.AddRoute(address, firstIn), l.first.AddRoute(via, senderOut), l.second.AddRoute(via, senderBack),
		// As a network card: the receiver polls, and merges segments. It also makes the interface receive XDP frames.
		l.first.Do(func() error { return mergeSegments("in") }),
	); err != nil {
		return nil, err
	}
	return l, l.load(b)
}

// connect connects two namespaces. Their neighbors are permanent, so that the kernel does not look for them during a run.
func connect(one *lab.Namespace, oneName string, oneIP netip.Addr, two *lab.Namespace, twoName string, twoIP netip.Addr) error {
	ends := [2]lab.VethEnd{
		{Namespace: one, Name: oneName, Addresses: []netip.Prefix{netip.PrefixFrom(oneIP, 24)}},
		{Namespace: two, Name: twoName, Addresses: []netip.Prefix{netip.PrefixFrom(twoIP, 24)}},
	}
	if err := lab.ConnectVeth(ends[0], ends[1]); err != nil {
		return err
	}
	for i, end := range ends {
		_, mac, err := interfaceOf(ends[1-i].Namespace, ends[1-i].Name)
		if err != nil {
			return err
		}
		if err := addNeighbor(end.Namespace, end.Name, ends[1-i].Addresses[0].Addr(), mac); err != nil {
			return err
		}
	}
	return nil
}

func addNeighbor(n *lab.Namespace, name string, address netip.Addr, mac [6]byte) error {
	index, _, err := interfaceOf(n, name)
	if err == nil {
		err = n.Netlink().NeighSet(&netlink.Neigh{LinkIndex: index, IP: address.AsSlice(), HardwareAddr: mac[:], State: netlink.NUD_PERMANENT})
	}
	if err != nil {
		return fmt.Errorf("add neighbor %v in %s: %w", address, n.Name(), err)
	}
	return nil
}

// mergeSegments turns GRO of an interface on.
func mergeSegments(name string) error {
	socket, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("set GRO of %s: %w", name, err)
	}
	defer unix.Close(socket)
	value := struct{ command, data uint32 }{unix.ETHTOOL_SGRO, 1}
	request := struct {
		name [unix.IFNAMSIZ]byte
		data unsafe.Pointer
		_    [16]byte
	}{data: unsafe.Pointer(&value)}
	copy(request.name[:], name)
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(socket), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&request))); errno != 0 {
		return fmt.Errorf("set GRO of %s: %w", name, errno)
	}
	return nil
}

// load loads the sender and the receiver of datagrams.
func (l *lane) load(b *bench) (err error) {
	var mac, next [6]byte
	if l.out, mac, err = interfaceOf(l.sender, "out"); err != nil {
		return err
	}
	if _, next, err = interfaceOf(l.first, "in"); err != nil {
		return err
	}
	l.end = l.second
	if l.arm.name == armDropped {
		l.end = l.first
	}
	if l.in, _, err = interfaceOf(l.end, "in"); err != nil {
		return err
	}
	spec, err := loadBenchFleet()
	if err != nil {
		return err
	}
	frame, sum := headersOf(mac, next)
	if err := errors.Join(spec.Variables["headers"].Set(frame), spec.Variables["sum"].Set(sum)); err != nil {
		return fmt.Errorf("set headers: %w", err)
	}
	c, err := ebpf.NewCollection(spec)
	if err != nil {
		return fmt.Errorf("load programs: %w", err)
	}
	b.lab.AtClose(func() error { c.Close(); return nil })
	l.send, l.dropping = c.Programs["bench_send"], c.Variables["dropping"]
	lo, _, err := interfaceOf(l.sender, "lo")
	if err != nil {
		return err
	}
	return errors.Join(l.sender.Do(func() error {
		// No packet is on lo. The dispatcher of the kernel knows the programs that are attached; that of another program changes at
		// the beginning and at the end of each run, and the run waits for two grace periods of RCU (bpf_prog_test_run_xdp).
		at, err := link.AttachXDP(link.XDPOptions{Interface: lo, Program: l.send, Flags: link.XDPGenericMode})
		if err != nil {
			return fmt.Errorf("attach sender: %w", err)
		}
		b.lab.AtClose(at.Close)
		return nil
	}), l.end.Do(func() error {
		at, err := link.AttachTCX(link.TCXOptions{Interface: l.in, Program: c.Programs["bench_drop"], Attach: ebpf.AttachTCXIngress})
		if err != nil {
			return fmt.Errorf("attach receiver: %w", err)
		}
		b.lab.AtClose(at.Close)
		return nil
	}))
}

// interfaceOf returns the index and the link-layer address of an interface.
func interfaceOf(n *lab.Namespace, name string) (index int, mac [6]byte, err error) {
	l, err := n.Netlink().LinkByName(name)
	if err != nil {
		return 0, mac, fmt.Errorf("find interface %s in %s: %w", name, n.Name(), err)
	}
	copy(mac[:], l.Attrs().HardwareAddr) // lo has none
	return l.Attrs().Index, mac, nil
}

// headerBytes is the size of the headers of Ethernet, IPv4 and UDP.
const headerBytes = 14 + 20 + 8

// headersOf returns the headers of the datagrams up to the length of UDP, which the program sets, and the sum of the IP header.
func headersOf(from, to [6]byte) (words [headerBytes / 8]uint64, sum uint32) {
	frame := append(to[:], from[:]...)
	frame = append(frame, 0x08, 0x00)
	ip := append([]byte{0x45, 0, 0, 0, 0, 0, 0, 0, 64, unix.IPPROTO_UDP, 0, 0}, sources.Addr().AsSlice()...)
	ip = append(ip, service.AsSlice()...)
	for i := 0; i < len(ip); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(ip[i:]))
	}
	sum = sum&0xffff + sum>>16
	frame = append(append(frame, ip...), 0x80, 0, port>>8, port&0xff, 0, 0)
	for i := range words {
		words[i] = binary.NativeEndian.Uint64(frame[8*i:])
	}
	return words, sum
}
