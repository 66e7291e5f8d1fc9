// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"sockeye/internal/bpf/load"
)

// Drops counts the datagrams that the sockets of a service's members have no space for, by source. It is neither pinned nor
// shared: it ends with the process.
type Drops struct {
	counts *ebpf.Map
	hook   link.Link
}

// ErrNoDrops means that the kernel does not report the datagrams that it drops: Linux 6.10 or later does.
var ErrNoDrops = errors.New("the kernel does not report which datagrams it drops; that needs Linux 6.10")

// Drops begins to count. It returns ErrNoDrops if the kernel is too old.
func (s *Steer) Drops() (*Drops, error) {
	spec, err := loadSteerDrops()
	if err != nil {
		return nil, fmt.Errorf("read program: %w", err)
	}
	collection, err := load.Collection(spec, map[string]*ebpf.Map{pinCookies: s.cookies})
	if err != nil {
		return nil, load.Explain("count of dropped datagrams", err)
	}
	defer collection.Close()
	hook, err := link.AttachRawTracepoint(link.RawTracepointOptions{Name: "udp_fail_queue_rcv_skb", Program: collection.Programs["steer_count_drop"]})
	// ENOENT: there is no such tracepoint. EINVAL: it has fewer arguments.
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EINVAL) {
		return nil, ErrNoDrops
	}
	if err != nil {
		return nil, fmt.Errorf("attach to tracepoint udp_fail_queue_rcv_skb: %w", err)
	}
	d := &Drops{counts: collection.Maps["dropped"], hook: hook}
	delete(collection.Maps, "dropped")
	return d, nil
}

// BySource returns the datagrams that were dropped since Drops, by source: of the 4096 sources with the latest drops, or a
// few less.
func (d *Drops) BySource() (map[Address]uint64, error) {
	counts := make(map[Address]uint64)
	var source Address
	var n uint64
	all := d.counts.Iterate()
	for all.Next(&source, &n) {
		counts[source] = n
	}
	// The kernel evicts entries meanwhile.
	if err := all.Err(); err != nil && !errors.Is(err, ebpf.ErrIterationAborted) {
		return nil, fmt.Errorf("read dropped datagrams: %w", err)
	}
	return counts, nil
}

// Source returns the datagrams of one source that were dropped since Drops.
func (d *Drops) Source(address Address) (n uint64) {
	_ = d.counts.Lookup(address, &n) // 0 without an entry
	return n
}

// Close ends the count.
func (d *Drops) Close() error { return errors.Join(d.hook.Close(), d.counts.Close()) }
