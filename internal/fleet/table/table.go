// SPDX-License-Identifier: Apache-2.0

// Package table is the table of a fleet: which host serves the devices of which bucket.
//
// The bucket of a device follows from its address, or from its device map, as on a single host. The table gives each bucket
// an owner. One process, the leader, writes the table; all hosts apply the same one, which its epoch names. A bucket moves
// in three epochs, each of which begins when all hosts have applied the one before:
//
//   - prepare: Next is the new owner, and the owner hands over the templates of the devices.
//   - flip: the new owner is Owner, and the former one is Previous. A host that has not applied this epoch yet sends packets
//     to the former owner, which sends them on to the owner; the reverse holds for a host that has. The former owner applies
//     the epoch first, so that the new owner gets no packet of a device whose connection the former one has not closed.
//   - settle: no host uses the former epoch any more, and Previous is None again.
package table

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
)

const (
	// Buckets is the number of buckets, as in the table of slots of one host.
	Buckets = 1 << 14
	// None is the host of a bucket that has none in a column.
	None = 1<<16 - 1
	// MostHosts is the largest number of hosts of a table.
	MostHosts = 4096
	// MostEpoch is the largest epoch.
	MostEpoch = 1<<53 - 1
	// MostWeight is the largest weight of a host.
	MostWeight = 1000
	// mostMACs is the largest number of MAC addresses of a host: one for each interface of the policy.
	mostMACs = 16
	// mostName is the largest number of bytes in the name of a host, as that of a DNS name.
	mostName = 253
)

// Host is a host of the table.
type Host struct {
	Name string `json:"name"`
	// Weight is proportional to the share of the buckets: 1 to MostWeight.
	Weight uint32 `json:"weight"`
	// Addresses are those at which the other hosts reach this one, at most one per family.
	Addresses []netip.Addr `json:"addresses,omitempty"`
	// MACs are the link-layer addresses of the interfaces of the service, as 02:00:00:00:00:01. The host forwards packets from
	// one of them.
	MACs []string `json:"macs,omitempty"`
}

// Column has a host for each bucket, as an index of Table.Hosts, or None.
type Column [Buckets]uint16

// Table is one epoch.
type Table struct {
	// Epoch increases by 1 with each table that the leader writes. The first one is 1.
	Epoch uint64
	// Nonce is the nonce of the hash of addresses, the same on all hosts.
	Nonce uint64
	// Hosts are sorted by name.
	Hosts []Host
	// Owner has the host that serves the bucket.
	Owner Column
	// Previous has the former owner of a bucket that was moved in this epoch, or None.
	Previous Column
	// Next has the owner-to-be of a bucket that is prepared, or None.
	Next Column
}

// Equal reports whether two tables are the same one.
func (t *Table) Equal(o *Table) bool {
	return t.Epoch == o.Epoch && t.Nonce == o.Nonce && t.Owner == o.Owner && t.Previous == o.Previous && t.Next == o.Next &&
		slices.EqualFunc(t.Hosts, o.Hosts, func(a, b Host) bool {
			return a.Name == b.Name && a.Weight == b.Weight && slices.Equal(a.Addresses, b.Addresses) && slices.Equal(a.MACs, b.MACs)
		})
}

// Index returns the index of a host, or None.
func (t *Table) Index(name string) uint16 {
	if i, ok := slices.BinarySearchFunc(t.Hosts, name, func(h Host, name string) int { return strings.Compare(h.Name, name) }); ok {
		return uint16(i)
	}
	return None
}

// Shares returns the number of buckets that each host owns.
func (t *Table) Shares() []int {
	shares := make([]int, len(t.Hosts))
	for _, host := range t.Owner {
		if host != None {
			shares[host]++
		}
	}
	return shares
}

// Moving returns the number of buckets that are prepared or flipped.
func (t *Table) Moving() (n int) {
	for b := range Buckets {
		if t.Next[b] != None || t.Previous[b] != None {
			n++
		}
	}
	return n
}

// Check returns an error if no leader writes such a table.
func (t *Table) Check() error {
	if t.Epoch == 0 || t.Epoch > MostEpoch {
		return fmt.Errorf("the epoch is %d, not 1 to %d", t.Epoch, uint64(MostEpoch))
	}
	if len(t.Hosts) == 0 || len(t.Hosts) > MostHosts {
		return fmt.Errorf("%d hosts, a table has 1 to %d", len(t.Hosts), MostHosts)
	}
	for i, h := range t.Hosts {
		if err := h.Check(); err != nil {
			return err
		}
		switch {
		case i > 0 && t.Hosts[i-1].Name == h.Name:
			return fmt.Errorf("host %q occurs twice", h.Name)
		case i > 0 && t.Hosts[i-1].Name > h.Name:
			return fmt.Errorf("hosts %q and %q are not sorted by their names", t.Hosts[i-1].Name, h.Name)
		}
	}
	for b := range Buckets {
		owner, previous, next := t.Owner[b], t.Previous[b], t.Next[b]
		for _, host := range []uint16{owner, previous, next} {
			if host != None && int(host) >= len(t.Hosts) {
				return fmt.Errorf("bucket %d is at host %d of %d", b, host, len(t.Hosts))
			}
		}
		switch {
		case owner == None && (previous != None || next != None):
			return fmt.Errorf("bucket %d moves and has no owner", b)
		case previous != None && next != None:
			return fmt.Errorf("bucket %d moves twice", b)
		case owner != None && (owner == previous || owner == next):
			return fmt.Errorf("bucket %d moves from %q to the same host", b, t.Hosts[owner].Name)
		}
	}
	return nil
}

// Check returns an error if a host cannot be in a table.
func (h *Host) Check() error {
	if h.Name == "" || len(h.Name) > mostName {
		return fmt.Errorf("a host has a name of %d bytes, want 1 to %d", len(h.Name), mostName)
	}
	if i := strings.IndexFunc(h.Name, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && !strings.ContainsRune("-._", r)
	}); i >= 0 {
		return fmt.Errorf("the name %q of a host may contain only letters, digits, dots, dashes and underscores", h.Name)
	}
	if h.Weight < 1 || h.Weight > MostWeight {
		return fmt.Errorf("host %s has weight %d, want 1 to %d", h.Name, h.Weight, MostWeight)
	}
	if len(h.MACs) > mostMACs {
		return fmt.Errorf("host %s has %d MAC addresses, at most %d are possible", h.Name, len(h.MACs), mostMACs)
	}
	for _, text := range h.MACs {
		if mac, err := net.ParseMAC(text); err != nil || len(mac) != 6 || mac.String() != text {
			return fmt.Errorf("host %s has the MAC address %q, want six bytes in lower case, such as 02:00:00:00:00:01", h.Name, text)
		} else if mac[0]&1 != 0 || [6]byte(mac) == [6]byte{} {
			return fmt.Errorf("host %s has the MAC address %s, which is not that of an interface", h.Name, text)
		}
	}
	families := map[bool]bool{}
	for _, a := range h.Addresses {
		if !a.IsValid() || a.Is4In6() || a.IsUnspecified() || a.IsMulticast() || a.IsLoopback() || a.Zone() != "" {
			return fmt.Errorf("host %s cannot be reached at %v", h.Name, a)
		}
		if families[a.Is4()] {
			return fmt.Errorf("host %s has two addresses of the family of %v", h.Name, a)
		}
		families[a.Is4()] = true
	}
	return nil
}
