// SPDX-License-Identifier: Apache-2.0

package rooms

import (
	"errors"
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
	detach := func(s *member.Socket) bool {
		for _, o := range owners {
			if owner, ok := o.Owner(s.FD()); !ok || !owner.Filtered || s.Protocol != unix.IPPROTO_UDP {
				continue
			}
			if err := bpf.DetachFilter(s.FD()); err != nil && !errors.Is(err, unix.EPERM) { // EPERM: SO_LOCK_FILTER of the program
				errs = append(errs, err)
			}
		}
		return false // no socket stays open here
	}
	for _, p := range processes {
		if handle, err := member.Open(p.PID); err == nil { // otherwise it has ended
			_, _ = handle.Sockets(detach) // without the right to its sockets: none
			handle.Close()
		}
	}
	return fault.Join(errs...)
}
