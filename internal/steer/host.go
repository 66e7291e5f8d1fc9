// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"errors"
	"os"
	"path/filepath"

	"sockeye/internal/bpf"
	"sockeye/internal/domain"
	"sockeye/internal/steer/keeper"
	"sockeye/internal/steer/stored"
)

// steerHost contains the resources that the services share.
type steerHost struct {
	*domain.Host
	descriptors fdReserve
	systemd     *keeper.Manager
}

func (h *steerHost) statePath(service string) string {
	return filepath.Join(h.StateDir, service+".json")
}

// lookupNonce returns the nonce of a service of this host: the pinned nonce, or else the one in the state file. known
// is false if there is neither.
func (h *steerHost) lookupNonce(name string) (nonce uint64, known bool, err error) {
	switch nonce, err := bpf.ReadNonce(h.Root.Service(name)); {
	case err == nil:
		return nonce, true, nil
	case !errors.Is(err, os.ErrNotExist):
		return 0, false, err
	}
	s, known, err := stored.Load(h.statePath(name))
	return s.Nonce, known, err
}

// ensureNonce returns the nonce of a service. A missing nonce is created and saved.
func (h *steerHost) ensureNonce(name string) (uint64, error) {
	nonce, known, err := h.lookupNonce(name)
	if err != nil || known {
		return nonce, err
	}
	s, _, err := stored.Load(h.statePath(name))
	if err != nil {
		return 0, err
	}
	s.Nonce = stored.NewNonce()
	return s.Nonce, s.Save(h.statePath(name))
}
