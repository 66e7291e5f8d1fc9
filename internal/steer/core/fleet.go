// SPDX-License-Identifier: Apache-2.0

package core

import (
	"net/netip"
	"slices"

	"sockeye/internal/api"
	"sockeye/internal/config"
)

// Fleet says which host serves a device.
type Fleet struct {
	// Addresses are the local addresses at which the hosts share the devices.
	Addresses []netip.Addr
	// Host returns the host of a device, "" for none, the bucket of the device in the table of the fleet, and whether this host
	// may have its connections. It is nil before the first table.
	Host func(device netip.Addr) (name string, bucket int, here bool)
}

// Elsewhere reports whether another host serves the connections of a device to a local address.
func (f *Fleet) Elsewhere(local, device netip.Addr) bool {
	if f == nil || f.Host == nil || !slices.Contains(f.Addresses, local.Unmap()) {
		return false
	}
	_, _, here := f.Host(device)
	return !here
}

// ServedBy says which host serves a device of a service.
type ServedBy struct {
	// Here is set if this host does, or if the service has no address of a fleet.
	Here bool
	// Host is the name of the host in the fleet, or "".
	Host string
	// Unknown is why Host is "" although the service is one of a fleet.
	Unknown string
	// Bucket is that of the device in the table of the fleet; nil without a table.
	Bucket *int
}

// ServedBy returns which host serves a device of a service.
func (h *Host) ServedBy(c *config.Service, device netip.Addr) ServedBy {
	f := h.Fleet.Load()
	switch {
	case f == nil || !(&config.Fleet{Addresses: f.Addresses}).Serves(c):
		return ServedBy{Here: true}
	case f.Host == nil:
		return ServedBy{Unknown: "this host has no table of the fleet yet"}
	}
	name, bucket, here := f.Host(device)
	p := ServedBy{Here: here, Host: name, Bucket: &bucket}
	if name == "" {
		p.Unknown = "no host of the fleet serves the device"
	}
	return p
}

// Effects of the serving host on the packets to the addresses of the fleet, as in api.Why.
const (
	Elsewhere = "elsewhere" // another host receives them
	Dropped   = "dropped"   // none does
)

// Explain sets the host of a device in an explanation and, unless this host serves the device, what becomes of its packets.
func (p *ServedBy) Explain(w *api.Why) {
	w.Host, w.FleetBucket = p.Host, p.Bucket
	switch {
	case p.Here:
	case p.Host == "":
		w.Effect, w.Reason = Dropped, p.Unknown
	default:
		w.Effect, w.Reason = Elsewhere, "host "+p.Host+" of the fleet serves the device"
	}
}
