// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"fmt"
	"iter"

	"github.com/cilium/ebpf"
)

// Counters returns the counters by slot, summed over all CPUs. The last entry has the counts without a slot.
func (s *Steer) Counters(slots int) ([]Counters, error) {
	sums := make([]Counters, slots+1)
	for i := range sums {
		key := uint32(i)
		if i == slots {
			key = uint32(MaxSlots)
		}
		var perCPU []Counters
		if err := s.counters.Lookup(key, &perCPU); err != nil {
			return nil, fmt.Errorf("read counters of slot %d: %w", i, err)
		}
		for _, c := range perCPU {
			sums[i].Connections += c.Connections
			sums[i].Datagrams += c.Datagrams
			sums[i].Diverted += c.Diverted
			for r := range Reasons {
				sums[i].RefusedConnections[r] += c.RefusedConnections[r]
				sums[i].RefusedDatagrams[r] += c.RefusedDatagrams[r]
			}
		}
	}
	return sums, nil
}

// Datagrams returns the number of datagrams that were steered to a slot.
func (s *Steer) Datagrams(slot int) (n uint64, err error) {
	var perCPU []Counters
	if err := s.counters.Lookup(uint32(slot), &perCPU); err != nil {
		return 0, fmt.Errorf("read counters of slot %d: %w", slot, err)
	}
	for _, c := range perCPU {
		n += c.Datagrams
	}
	return n, nil
}

// devicesBatch is the number of devices that one call of the kernel returns. A hash bucket must fit into a batch.
const devicesBatch = 4096

// Devices yields the table of seen devices. Entries that the kernel evicts concurrently may be missing.
func (s *Steer) Devices() iter.Seq2[Address, Seen] {
	return func(yield func(Address, Seen) bool) {
		pending := s.pendingDatagrams()
		var cursor ebpf.MapBatchCursor
		addresses, all := make([]Address, devicesBatch), make([]Seen, devicesBatch)
		for {
			n, err := s.devices.BatchLookup(&cursor, addresses, all, nil)
			for i, address := range addresses[:n] {
				all[i].Datagrams += pending[address]
				if !yield(address, all[i]) {
					return
				}
			}
			if err != nil { // ErrKeyNotExist: the end
				return
			}
		}
	}
}

// Unlisted returns the number of datagrams and SYNs from sources without an entry in the table of devices.
func (s *Steer) Unlisted() (sum uint64, err error) {
	var perCPU []uint64
	if err := s.unlisted.Lookup(uint32(0), &perCPU); err != nil {
		return 0, fmt.Errorf("read unlisted packets: %w", err)
	}
	for _, n := range perCPU {
		sum += n
	}
	return sum, nil
}

// RunStats contains the kernel's run statistics of the steering programs of a service.
type RunStats struct {
	Runs        uint64
	Nanoseconds uint64
}

// RunStats returns the sum over the programs of the service. The kernel counts only while kernel.bpf_stats_enabled is
// set.
func (s *Steer) RunStats() (RunStats, error) {
	var sum RunStats
	for row, p := range s.programs {
		stats, err := p.Stats()
		if err != nil {
			return sum, fmt.Errorf("read statistics of %s: %w", programPin(s.lookup, row), err)
		}
		sum.Runs += stats.RunCount
		sum.Nanoseconds += uint64(stats.Runtime)
	}
	return sum, nil
}

// ProgramIDs returns the ids of the programs that are attached by links.
func (s *Steer) ProgramIDs() ([]uint32, error) {
	var ids []uint32
	for _, l := range s.links {
		info, err := l.Info()
		if err != nil {
			return nil, fmt.Errorf("read link: %w", err)
		}
		ids = append(ids, uint32(info.Program))
	}
	return ids, nil
}

// Device returns the entry of one address in the table of devices. found is false if the table has none.
func (s *Steer) Device(address Address) (seen Seen, found bool) {
	if s.devices.Lookup(address, &seen) != nil {
		return Seen{}, false
	}
	seen.Datagrams += s.pendingDatagrams()[address]
	return seen, true
}

// pendingDatagrams returns the datagrams that the CPUs have not added to the table yet.
func (s *Steer) pendingDatagrams() map[Address]uint64 {
	sum := make(map[Address]uint64)
	for i := range pendingSize {
		var perCPU []Pending
		if err := s.pending.Lookup(uint32(i), &perCPU); err != nil {
			continue
		}
		for _, p := range perCPU {
			sum[p.Address] += uint64(p.Datagrams)
		}
	}
	return sum
}
