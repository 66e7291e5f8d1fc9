// SPDX-License-Identifier: Apache-2.0

package steer

import "sockeye/internal/member"

// maxProbes limits the processes per scan whose descriptors are read for a refusal.
const maxProbes = 64

// addRefusal records a process that matches a rule and is not admitted. In another network namespace, a process has no sockets of the
// service.
func (s *service) addRefusal(p *member.Process, source string, why *member.Refusal) {
	if p.Netns == s.NetnsInode && !s.isRelated(p) {
		s.notAdmitted.Add(s.Log, p, source, why, func() bool { return s.probesLeft > 0 && s.hasPorts(p.PID) })
	}
}

// hasPorts reports whether a process has a socket on one of the members' ports among its first descriptors
// ([member.Handle.HasSocket]).
func (s *service) hasPorts(pid int) bool {
	s.probesLeft--
	handle, err := member.Open(pid)
	if err != nil {
		return false
	}
	defer handle.Close()
	return handle.HasSocket(s.matchesListener)
}
