// SPDX-License-Identifier: Apache-2.0

package rooms

import (
	"path/filepath"

	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/fault"
	"sockeye/internal/member"
)

// DetachFilters removes the filters that copy templates from the sockets of all processes, for all services that are pinned under a directory.
// Without the pins, nothing tells these filters from those of the programs, and the next agent would keep no templates.
func DetachFilters(pins string) error {
	services, err := bpf.PinnedNames(pins, bpf.ServicePrefix)
	if err != nil {
		return err
	}
	var owners []*bpf.PinnedOwners
	for _, name := range services {
		o, err := bpf.OpenOwners(filepath.Join(pins, bpf.ServicePrefix+name))
		if err != nil {
			continue // pins of another version, or half removed
		}
		defer o.Close()
		owners = append(owners, o)
	}
	if len(owners) == 0 {
		return nil
	}
	processes, err := member.All()
	if err != nil {
		return err
	}
	var errs []error
	for _, p := range processes {
		handle, err := member.Open(p.PID)
		if err != nil {
			continue // has ended
		}
		sockets, _ := handle.Sockets(func(s *member.Socket) bool { return s.Protocol == unix.IPPROTO_UDP }) // without the right to its sockets: none
		for _, s := range sockets {
			for _, o := range owners {
				if owner, ok := o.Owner(s.FD()); ok && owner.Filtered {
					errs = append(errs, bpf.DetachFilter(s.FD()))
				}
			}
		}
		member.CloseAll(sockets)
		handle.Close()
	}
	return fault.Join(errs...)
}
