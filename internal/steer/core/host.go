// SPDX-License-Identifier: Apache-2.0

package core

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"

	"sockeye/internal/bpf"
	"sockeye/internal/domain"
	"sockeye/internal/steer/keeper"
	"sockeye/internal/steer/stored"
)

// Host contains the resources that the services share.
type Host struct {
	*domain.Host
	Descriptors fdReserve
	Systemd     *keeper.Manager
	// Fleet is nil unless other hosts serve some of the devices.
	Fleet atomic.Pointer[Fleet]
}

// Fleet says which host serves a device.
type Fleet struct {
	// Addresses are the local addresses at which the hosts share the devices.
	Addresses []netip.Addr
	// Host returns the host of a device, "" for none, and whether this host may have its connections.
	Host func(device netip.Addr) (name string, here bool)
}

// Elsewhere reports whether another host serves the connections of a device to a local address.
func (f *Fleet) Elsewhere(local, device netip.Addr) bool {
	if f == nil || !slices.Contains(f.Addresses, local.Unmap()) {
		return false
	}
	_, here := f.Host(device)
	return !here
}

// StateFile returns the path of the state file of a service.
func (h *Host) StateFile(service string) string {
	return filepath.Join(h.StateDir, service+".json")
}

// LookupNonce returns the nonce of a service of this host: the pinned nonce, or else the one in the state file. known
// is false if there is neither.
func (h *Host) LookupNonce(name string) (nonce uint64, known bool, err error) {
	switch nonce, err := bpf.ReadNonce(h.Root.Service(name)); {
	case err == nil:
		return nonce, true, nil
	case !errors.Is(err, os.ErrNotExist):
		return 0, false, err
	}
	s, known, err := stored.Load(h.StateFile(name))
	return s.Nonce, known, err
}

// EnsureNonce returns the nonce of a service. A missing nonce is created and saved.
func (h *Host) EnsureNonce(name string) (uint64, error) {
	nonce, known, err := h.LookupNonce(name)
	if err != nil || known {
		return nonce, err
	}
	s, _, err := stored.Load(h.StateFile(name))
	if err != nil {
		return 0, err
	}
	s.Nonce = bpf.NewNonce()
	return s.Nonce, s.Save(h.StateFile(name))
}
