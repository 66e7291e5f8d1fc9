// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"hash"
	"slices"

	"sockeye/internal/bpf"
	"sockeye/internal/fleet/lead"
	"sockeye/internal/placement"
)

// The hosts of a fleet must have the same listeners at its addresses, and the same device map: otherwise a host does not forward
// packets that another one steers, or two hosts take each other for the host of a device. A host registers digests of both, so that
// the others see a difference.

// setDigests computes the digests of the settings.
func (s *settings) setDigests() {
	listeners, devices := sha256.New(), sha256.New()
	var lines []string
	for _, l := range distinct(s.listeners) {
		lines = append(lines, fmt.Sprintln(placement.Addr(bpf.Address{Word: l.Address.Word}), l.Protocol, l.Port))
	}
	slices.Sort(lines)
	for _, line := range lines {
		listeners.Write([]byte(line))
	}
	names := s.devices.Devices()
	for prefix, id := range s.devices.All() {
		fmt.Fprintln(devices, prefix, names[id])
	}
	short := func(h hash.Hash) string { return hex.EncodeToString(h.Sum(nil)[:8]) }
	s.digests = lead.Digests{Listeners: short(listeners), Devices: short(devices)}
}

// differences tells which hosts that live have other listeners or another device map.
func (s *settings) differences(hosts []lead.Host) (list []string) {
	differ := func(theirs, own string) bool { return theirs != "" && theirs != own }
	for i := range hosts {
		h := &hosts[i]
		if h.Name == s.host || !h.Alive {
			continue
		}
		if differ(h.Digests.Listeners, s.digests.Listeners) {
			list = append(list, fmt.Sprintf("host %s has other listeners at the addresses of the fleet than this host: compare the key addresses, and the listeners of the services", h.Name))
		}
		if differ(h.Digests.Devices, s.digests.Devices) {
			list = append(list, fmt.Sprintf("host %s has another device map than this host, and disagrees about the devices that differ: apply the same device map to both", h.Name))
		}
	}
	return list
}

// differences tells which hosts would differ from this one with other settings.
func (p *participation) differences(to *settings) []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.state.Snapshot == nil {
		return nil
	}
	return to.differences(p.state.Hosts)
}
