// SPDX-License-Identifier: Apache-2.0

// Package programs counts the packets of an interface by size, in BPF programs.
package programs

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"sockeye/internal/bpf/load"
)

// Points and families of Counter (bpf/include/bigtcp.h).
//
//revive:disable:exported
const (
	Ingress = int(bigtcpCountBigtcpPointBIGTCP_INGRESS)
	Egress  = int(bigtcpCountBigtcpPointBIGTCP_EGRESS)
	Driver  = int(bigtcpCountBigtcpPointBIGTCP_DRIVER)
	Points  = int(bigtcpCountBigtcpPointBIGTCP_POINTS)

	IPv4     = int(bigtcpCountBigtcpFamilyBIGTCP_TCP4)
	IPv6     = int(bigtcpCountBigtcpFamilyBIGTCP_TCP6)
	Other    = int(bigtcpCountBigtcpFamilyBIGTCP_OTHER)
	Families = int(bigtcpCountBigtcpFamilyBIGTCP_FAMILIES)

	Legacy = uint32(bigtcpCountBigtcpLimitBIGTCP_LEGACY)
	Nearly = uint32(bigtcpCountBigtcpLimitBIGTCP_NEARLY)

	bigtcpSizes    = int(bigtcpCountBigtcpLimitBIGTCP_SIZES)
	bigtcpSegments = int(bigtcpCountBigtcpLimitBIGTCP_SEGMENTS)
)

//revive:enable:exported

// Sizes and Segments are the upper bounds of the size classes, in bytes of IP packets and in segments.
// The last class is unbounded.
var (
	Sizes = [bigtcpSizes - 1]uint32{
		128, 1500, 4096, 9216, 16384, 32768, Nearly, Legacy,
		98304, 131072, 163840, 196608, 262144, 393216, 524288,
	}
	Segments = [bigtcpSegments - 1]uint32{1, 4, 16, 45, 90, 180, 360}
)

// Counts are the counts of the packets of a family at a point.
type Counts = bigtcpCountBigtcpCounts

// FlowKey identifies one direction of a connection.
type FlowKey = bigtcpCountBigtcpFlowKey

// Flow contains the counts of packets with payload of one direction of a connection.
type Flow = bigtcpCountBigtcpFlow

// Ends returns the addresses and ports of a flow. IPv4-mapped addresses are unmapped.
func (k *bigtcpCountBigtcpFlowKey) Ends() (source, destination netip.AddrPort) {
	end := func(address [16]uint8, port uint16) netip.AddrPort {
		var order [2]byte
		binary.NativeEndian.PutUint16(order[:], port)
		return netip.AddrPortFrom(netip.AddrFrom16(address).Unmap(), binary.BigEndian.Uint16(order[:]))
	}
	return end(k.Source, k.SourcePort), end(k.Destination, k.DestinationPort)
}

// Config is the configuration of Counter.
type Config struct {
	Index    int    // interface index
	Netns    uint32 // inode of the network namespace
	Ethernet bool   // packets start with an Ethernet header
	// Limits are sizes of sent packets of several segments, with the Ethernet header; packets of at least this
	// size are counted as over the limit. 0 means no limit.
	Limits [Families]uint32
	Flows  int // maximum number of flows
}

// Counter counts the packets of an interface by size. Nothing is pinned: the programs end with this process.
type Counter struct {
	config Config
	count  *ebpf.Collection
	driver *ebpf.Collection
	links  []link.Link
}

// Open loads the programs without attaching them. It needs CAP_BPF and CAP_NET_ADMIN.
func Open(c Config) (*Counter, error) {
	spec, err := loadBigtcpCount()
	if err != nil {
		return nil, err
	}
	if err := setEdges(spec); err != nil {
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
	count, err := load.Collection(spec, nil)
	if err != nil {
		return nil, fmt.Errorf("load programs that count packets: %w", err)
	}
	return &Counter{config: c, count: count}, nil
}

// Programs returns the sched_cls programs, which pass every packet on (TCX_NEXT).
func (b *Counter) Programs() (ingress, egress *ebpf.Program) {
	return b.count.Programs["bigtcp_ingress"], b.count.Programs["bigtcp_egress"]
}

// AttachTCX attaches the programs to the interface, before all others. The caller is in the namespace of the
// interface. The error wraps ebpf.ErrNotSupported before Linux 6.6.
func (b *Counter) AttachTCX() error {
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

// AttachDriver also counts at the driver. It needs CAP_PERFMON. The error wraps ebpf.ErrNotSupported if the kernel
// has no such tracepoint, no BTF, or forbids programs to read its memory.
func (b *Counter) AttachDriver() error {
	spec, err := loadBigtcpDriver()
	if err != nil {
		return err
	}
	if err := setEdges(spec); err != nil {
		return err
	}
	if err := spec.Variables["ifindex"].Set(uint32(b.config.Index)); err != nil {
		return err
	}
	if err := spec.Variables["netns"].Set(b.config.Netns); err != nil {
		return err
	}
	driver, err := load.Collection(spec, map[string]*ebpf.Map{"counts": b.count.Maps["counts"]})
	if load.LacksHelper(err) {
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

func setEdges(spec *ebpf.CollectionSpec) error {
	var sizes [bigtcpSizes]uint32
	var segments [bigtcpSegments]uint32
	copy(sizes[:], Sizes[:])
	copy(segments[:], Segments[:])
	if err := spec.Variables["size_edges"].Set(sizes); err != nil {
		return err
	}
	return spec.Variables["segment_edges"].Set(segments)
}

// Counts returns the counts by point and family, summed over all CPUs.
func (b *Counter) Counts() (all [Points][Families]Counts, err error) {
	for point := range all {
		for family := range all[point] {
			var each []Counts
			if err := b.count.Maps["counts"].Lookup(uint32(point*Families+family), &each); err != nil {
				return all, fmt.Errorf("read counts of packets: %w", err)
			}
			sum := &all[point][family]
			for i := range each {
				add(sum, &each[i])
			}
		}
	}
	return all, nil
}

func add(sum, c *Counts) {
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

// Flows calls f for each flow. Flows that are created or evicted concurrently may be missing or repeated.
func (b *Counter) Flows(f func(*FlowKey, *Flow)) error {
	var key FlowKey
	var flow Flow
	all := b.count.Maps["flows"].Iterate()
	for all.Next(&key, &flow) {
		f(&key, &flow)
	}
	if err := all.Err(); err != nil && !errors.Is(err, ebpf.ErrIterationAborted) {
		return fmt.Errorf("read flows: %w", err)
	}
	return nil
}

// Close detaches and unloads the programs. The caller of Programs detaches its own attachments.
func (b *Counter) Close() error {
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
