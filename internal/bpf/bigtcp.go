// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// Where BigTCP counts packets, and which it tells apart; see bpf/include/bigtcp.h.
//
//revive:disable:exported
const (
	BigTCPIngress = int(bigtcpCountBigtcpPointBIGTCP_INGRESS)
	BigTCPEgress  = int(bigtcpCountBigtcpPointBIGTCP_EGRESS)
	BigTCPDriver  = int(bigtcpCountBigtcpPointBIGTCP_DRIVER)
	BigTCPPoints  = int(bigtcpCountBigtcpPointBIGTCP_POINTS)

	BigTCPIPv4     = int(bigtcpCountBigtcpFamilyBIGTCP_TCP4)
	BigTCPIPv6     = int(bigtcpCountBigtcpFamilyBIGTCP_TCP6)
	BigTCPOther    = int(bigtcpCountBigtcpFamilyBIGTCP_OTHER)
	BigTCPFamilies = int(bigtcpCountBigtcpFamilyBIGTCP_FAMILIES)

	BigTCPLegacy = uint32(bigtcpCountBigtcpLimitBIGTCP_LEGACY)
	BigTCPNearly = uint32(bigtcpCountBigtcpLimitBIGTCP_NEARLY)

	bigtcpSizes    = int(bigtcpCountBigtcpLimitBIGTCP_SIZES)
	bigtcpSegments = int(bigtcpCountBigtcpLimitBIGTCP_SEGMENTS)
)

//revive:enable:exported

// BigTCPSizes and BigTCPSegments are the largest of each class of sizes, in bytes
// of IP packets, and of segments. The last class has no bound.
var (
	BigTCPSizes = [bigtcpSizes - 1]uint32{
		128, 1500, 4096, 9216, 16384, 32768, BigTCPNearly, BigTCPLegacy,
		98304, 131072, 163840, 196608, 262144, 393216, 524288,
	}
	BigTCPSegments = [bigtcpSegments - 1]uint32{1, 4, 16, 45, 90, 180, 360}
)

// BigTCPCounts are the packets of a family that were seen at a point.
type BigTCPCounts = bigtcpCountBigtcpCounts

// BigTCPFlowKey is a connection in one direction.
type BigTCPFlowKey = bigtcpCountBigtcpFlowKey

// BigTCPFlow is what it sent in packets that carry data.
type BigTCPFlow = bigtcpCountBigtcpFlow

// Ends are the addresses and ports of a flow. An IPv4 address is one.
func (k *bigtcpCountBigtcpFlowKey) Ends() (source, destination netip.AddrPort) {
	end := func(address [16]uint8, port uint16) netip.AddrPort {
		var order [2]byte
		binary.NativeEndian.PutUint16(order[:], port)
		return netip.AddrPortFrom(netip.AddrFrom16(address).Unmap(), binary.BigEndian.Uint16(order[:]))
	}
	return end(k.Source, k.SourcePort), end(k.Destination, k.DestinationPort)
}

// BigTCPConfig is what is counted.
type BigTCPConfig struct {
	Index    int    // of the interface
	Netns    uint32 // inode of its network namespace
	Ethernet bool   // its packets begin with a header of Ethernet, not of IP
	// Limits are for packets of several segments that are sent, with the header of
	// Ethernet: those of so many bytes or more are counted as over it. 0: none is.
	Limits [BigTCPFamilies]uint32
	Flows  int // connections, each direction by itself, that are told apart at a time
}

// BigTCP counts the packets of an interface by their size. Nothing of it is
// pinned: it ends with this process.
type BigTCP struct {
	config BigTCPConfig
	count  *ebpf.Collection
	driver *ebpf.Collection
	links  []link.Link
}

// OpenBigTCP loads the programs, attached nowhere yet. It needs CAP_BPF and
// CAP_NET_ADMIN.
func OpenBigTCP(c BigTCPConfig) (*BigTCP, error) {
	spec, err := loadBigtcpCount()
	if err != nil {
		return nil, err
	}
	if err := setBigTCPEdges(spec); err != nil {
		return nil, err
	}
	if err := spec.Variables["ethernet"].Set(c.Ethernet); err != nil {
		return nil, err
	}
	if err := spec.Variables["limits"].Set(c.Limits); err != nil {
		return nil, err
	}
	if c.Flows > 0 {
		spec.Maps["flows"].MaxEntries = uint32(c.Flows)
	}
	count, err := loadCollection(spec, nil)
	if err != nil {
		return nil, fmt.Errorf("load programs that count packets: %w", err)
	}
	return &BigTCP{config: c, count: count}, nil
}

func setBigTCPEdges(spec *ebpf.CollectionSpec) error {
	var sizes [bigtcpSizes]uint32
	var segments [bigtcpSegments]uint32
	copy(sizes[:], BigTCPSizes[:])
	copy(segments[:], BigTCPSegments[:])
	if err := spec.Variables["size_edges"].Set(sizes); err != nil {
		return err
	}
	return spec.Variables["segment_edges"].Set(segments)
}

// Programs are those of the sched_cls type. They let every packet go on to what
// comes next.
func (b *BigTCP) Programs() (ingress, egress *ebpf.Program) {
	return b.count.Programs["bigtcp_ingress"], b.count.Programs["bigtcp_egress"]
}

// AttachTCX attaches them to the interface, before all others; run it in the
// interface's namespace. The error wraps ebpf.ErrNotSupported before Linux 6.6.
func (b *BigTCP) AttachTCX() error {
	ingress, egress := b.Programs()
	for _, a := range []struct {
		at      ebpf.AttachType
		program *ebpf.Program
	}{{ebpf.AttachTCXIngress, ingress}, {ebpf.AttachTCXEgress, egress}} {
		l, err := link.AttachTCX(link.TCXOptions{
			Interface: b.config.Index, Program: a.program, Attach: a.at, Anchor: link.Head(),
		})
		if err != nil {
			return fmt.Errorf("attach %v to interface %d: %w", a.at, b.config.Index, err)
		}
		b.links = append(b.links, l)
	}
	return nil
}

// AttachDriver counts what the driver gets, too. It needs CAP_PERFMON. The error
// wraps ebpf.ErrNotSupported if the kernel has no such tracepoint, or no BTF, or
// keeps its memory from programs.
func (b *BigTCP) AttachDriver() error {
	spec, err := loadBigtcpDriver()
	if err != nil {
		return err
	}
	if err := setBigTCPEdges(spec); err != nil {
		return err
	}
	if err := spec.Variables["ifindex"].Set(uint32(b.config.Index)); err != nil {
		return err
	}
	if err := spec.Variables["netns"].Set(b.config.Netns); err != nil {
		return err
	}
	driver, err := loadCollection(spec, map[string]*ebpf.Map{"counts": b.count.Maps["counts"]})
	if lacksHelper(err) {
		return fmt.Errorf("load program at the driver: %w: lockdown keeps the kernel's memory from programs: %w", ebpf.ErrNotSupported, err)
	}
	if err != nil {
		return fmt.Errorf("load program at the driver: %w", err)
	}
	l, err := link.AttachRawTracepoint(link.RawTracepointOptions{
		Name: "net_dev_start_xmit", Program: driver.Programs["bigtcp_driver"],
	})
	if err != nil {
		driver.Close()
		if errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("attach bigtcp_driver: %w: the kernel has no tracepoint net_dev_start_xmit", ebpf.ErrNotSupported)
		}
		return fmt.Errorf("attach bigtcp_driver to tracepoint net_dev_start_xmit: %w", err)
	}
	b.driver = driver
	b.links = append(b.links, l)
	return nil
}

// Counts sums over all CPUs, by point and family.
func (b *BigTCP) Counts() (all [BigTCPPoints][BigTCPFamilies]BigTCPCounts, err error) {
	for point := range all {
		for family := range all[point] {
			var each []BigTCPCounts
			if err := b.count.Maps["counts"].Lookup(uint32(point*BigTCPFamilies+family), &each); err != nil {
				return all, fmt.Errorf("read counts of packets: %w", err)
			}
			sum := &all[point][family]
			for i := range each {
				addBigTCP(sum, &each[i])
			}
		}
	}
	return all, nil
}

func addBigTCP(sum, c *BigTCPCounts) {
	for i := range c.Sizes {
		sum.Sizes[i].Packets += c.Sizes[i].Packets
		sum.Sizes[i].Bytes += c.Sizes[i].Bytes
		sum.Sizes[i].Segments += c.Sizes[i].Segments
	}
	for i := range c.Segments {
		sum.Segments[i].Packets += c.Segments[i].Packets
		sum.Segments[i].Bytes += c.Segments[i].Bytes
	}
	sum.Largest = max(sum.Largest, c.Largest)
	sum.OverBytes += c.OverBytes
}

// Flows calls f for each connection and direction. One that begins or is
// forgotten meanwhile may be left out, or come twice.
func (b *BigTCP) Flows(f func(*BigTCPFlowKey, *BigTCPFlow)) error {
	var key BigTCPFlowKey
	var flow BigTCPFlow
	all := b.count.Maps["flows"].Iterate()
	for all.Next(&key, &flow) {
		f(&key, &flow)
	}
	if err := all.Err(); err != nil && !errors.Is(err, ebpf.ErrIterationAborted) {
		return fmt.Errorf("read flows: %w", err)
	}
	return nil
}

// Close detaches and unloads. What was attached by others is theirs to detach.
func (b *BigTCP) Close() error {
	var errs []error
	for _, l := range b.links {
		errs = append(errs, l.Close())
	}
	b.links = nil
	if b.driver != nil {
		b.driver.Close()
	}
	b.count.Close()
	return errors.Join(errs...)
}
