// SPDX-License-Identifier: Apache-2.0

package core

import (
	"errors"
	"os"
	"path/filepath"
	"sync/atomic"

	"sockeye/internal/bpf"
	"sockeye/internal/config"
	"sockeye/internal/domain"
	"sockeye/internal/steer/keeper"
	"sockeye/internal/steer/stored"
)

// Host contains the resources that the services share.
type Host struct {
	*domain.Host
	Descriptors fdReserve
	Systemd     *keeper.Manager
	// Listeners returns the listeners of all services in a network namespace. The caller holds no lock of a service.
	Listeners func(netns uint64) []config.Listener
	// Fleet is nil unless other hosts serve some of the devices.
	Fleet atomic.Pointer[Fleet]
}

// StateFile returns the path of the state file of a service.
func (h *Host) StateFile(service string) string {
	return filepath.Join(h.StateDir, service+".json")
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
