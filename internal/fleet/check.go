// SPDX-License-Identifier: Apache-2.0

// The check of a policy with a fleet, before an agent applies it. Whether a host can serve is in health.go.

package fleet

import (
	"context"
	"slices"

	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/config"
	"sockeye/internal/fleet/forward"
	"sockeye/internal/placement"
)

// listenersOf returns the entries of a listener: one for each address at which it receives packets, and one for the
// fragments to the address.
func listenersOf(f *config.Fleet, l config.Listener) (list []forward.Listener) {
	for _, a := range f.Served(l) {
		var entry forward.Listener
		entry.Address.Word = placement.Address(a).Word
		list = append(list, entry)
		entry.Port = l.Address.Port()>>8 | l.Address.Port()<<8 // network byte order
		entry.Protocol = unix.IPPROTO_UDP
		if l.Protocol == config.TCP {
			entry.Protocol = unix.IPPROTO_TCP
		}
		list = append(list, entry)
	}
	return list
}

// CheckPolicy checks the files that the fleet of a policy names. The interfaces may be those of another host, or appear later: the notes
// name one that this host lacks.
func CheckPolicy(_ context.Context, _ *api.Client, policy *config.Policy) (notes []string, err error) {
	if policy.Fleet == nil {
		return nil, nil
	}
	s, err := newSettings(policy)
	if err != nil {
		return nil, err
	}
	if err := s.checkStore(); err != nil {
		return nil, err
	}
	if _, err, _ := findInterfaces(policy.Fleet.Interfaces, nil); err != nil {
		notes = append(notes, "sockeye apply refuses the policy on this host: fleet.interfaces: "+err.Error())
	}
	return notes, nil
}

// distinct returns listeners without repetitions.
func distinct(list []forward.Listener) []forward.Listener {
	var kept []forward.Listener
	for _, l := range list {
		if !slices.Contains(kept, l) {
			kept = append(kept, l)
		}
	}
	return kept
}
