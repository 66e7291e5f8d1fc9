// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"fmt"

	"sockeye/internal/bpf"
	"sockeye/internal/config"
	"sockeye/internal/procsock"
)

// Adopted is what Adopt did.
type Adopted struct {
	Chosen   int      `json:"chosen"`   // connections that are traced from now on
	Problems []string `json:"problems"` // processes and sockets that could not be read
}

// Adopt has the rules decide on the connections that are open in a cgroup, given
// by its folder. Those that the rules have chosen before go on.
func Adopt(t *bpf.Trace, cgroup string) (Adopted, error) {
	live, err := t.Live()
	if err != nil {
		return Adopted{}, err
	}
	defer live.Close()
	a := Adopted{Problems: []string{}}
	problems, err := procsock.Walk(cgroup, func(s *procsock.Socket) error {
		if !s.Connected() || s.MPTCP {
			return nil
		}
		role := bpf.MatchConnect
		if s.Role == config.RoleAccept {
			role = bpf.MatchAccept
		}
		err := live.Adopt(s.FD, role)
		var c *bpf.TraceConnection
		if err == nil {
			c, err = t.Connection(s.FD)
		}
		if err != nil {
			a.Problems = append(a.Problems, fmt.Sprintf("%s: %v", s, err))
		}
		if c != nil {
			a.Chosen++
		}
		return nil
	})
	for _, p := range problems {
		a.Problems = append(a.Problems, p.Error())
	}
	return a, err
}

// Release lets go of the connections that are open in a cgroup, so that the
// kernel does not call for them any more.
func Release(t *bpf.Trace, cgroup string) error {
	live, err := t.Live()
	if err != nil {
		return err
	}
	defer live.Close()
	// A socket that cannot be had costs a call that does nothing.
	_, err = procsock.Walk(cgroup, func(s *procsock.Socket) error {
		if !s.Listening && !s.MPTCP {
			_ = live.Forget(s.FD)
		}
		return nil
	})
	return err
}
