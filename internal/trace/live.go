// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"fmt"

	"sockeye/internal/bpf"
	"sockeye/internal/config"
	"sockeye/internal/procsock"
)

// Selected is the result of SelectOpen.
type Selected struct {
	Chosen   int      `json:"chosen"`   // connections that are traced now
	Problems []string `json:"problems"` // processes and sockets that could not be read
}

// SelectOpen applies the rules to the open connections of a cgroup directory. Connections that the rules selected
// before remain traced.
func SelectOpen(t *bpf.Trace, cgroup string) (Selected, error) {
	live, err := t.Live()
	if err != nil {
		return Selected{}, err
	}
	defer live.Close()
	a := Selected{Problems: []string{}}
	problems, err := procsock.Walk(cgroup, func(s *procsock.Socket) error {
		if !s.Connected() || s.MPTCP {
			return nil
		}
		role := bpf.MatchConnect
		if s.Role == config.RoleAccept {
			role = bpf.MatchAccept
		}
		err := live.ApplyTo(s.FD, role)
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

// DeselectOpen clears the flag of the open connections of a cgroup directory, so that the kernel no longer calls the
// program for them.
func DeselectOpen(t *bpf.Trace, cgroup string) error {
	live, err := t.Live()
	if err != nil {
		return err
	}
	defer live.Close()
	// A socket that cannot be opened only causes unnecessary calls of the program.
	_, err = procsock.Walk(cgroup, func(s *procsock.Socket) error {
		if !s.Listening && !s.MPTCP {
			_ = live.Forget(s.FD)
		}
		return nil
	})
	return err
}
