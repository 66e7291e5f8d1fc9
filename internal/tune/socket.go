// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"slices"
	"strconv"

	"sockeye/internal/api"
	"sockeye/internal/bpf"
	"sockeye/internal/cgroup"
	"sockeye/internal/config"
	"sockeye/internal/fault"
	"sockeye/internal/match"
	"sockeye/internal/procsock"
)

// Socket returns an open connection with the values that its rule requests and the values that are in effect.
func (d *Domain) Socket(r *http.Request) (*api.TuneSocket, error) {
	tuners, err := d.tunersOf(r.URL.Query().Get("cgroup"))
	if err != nil {
		return nil, err
	}
	t, socket, err := findSocket(tuners, r)
	if err != nil {
		return nil, err
	}
	defer socket.Close()
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.describe(socket)
}

const socketHint = "name an open TCP connection of a process in a cgroup that is tuned, as ss -tnp shows them"

// findSocket finds the socket that a request names.
func findSocket(tuners []*tuner, r *http.Request) (*tuner, *procsock.Socket, error) {
	q := r.URL.Query()
	if q.Get("pid") != "" || q.Get("fd") != "" {
		pid, errPID := strconv.Atoi(q.Get("pid"))
		fd, errFD := strconv.Atoi(q.Get("fd"))
		if errPID != nil || errFD != nil || pid <= 0 || fd < 0 {
			return nil, nil, fault.Usage(fmt.Errorf("%q is not a socket", q.Get("pid")+":"+q.Get("fd")), "as in 812:7, process and descriptor")
		}
		path, err := cgroup.Of(pid)
		if errors.Is(err, fs.ErrNotExist) {
			return nil, nil, fault.Usage(fmt.Errorf("there is no process %d", pid), socketHint)
		}
		if err != nil {
			return nil, nil, err
		}
		i := slices.IndexFunc(tuners, func(t *tuner) bool { return t.contains(path) })
		if i < 0 {
			return nil, nil, fault.Usage(fmt.Errorf("process %d is in cgroup %s, which is not tuned", pid, path), socketHint)
		}
		socket, err := procsock.Take(pid, fd)
		if errors.Is(err, fs.ErrNotExist) {
			return nil, nil, fault.Usage(err, socketHint)
		}
		return tuners[i], socket, err
	}
	local, err := api.ParseEndpoint("local", q.Get("local"))
	if err != nil {
		return nil, nil, err
	}
	remote, err := api.ParseEndpoint("remote", q.Get("remote"))
	if err != nil {
		return nil, nil, err
	}
	for _, t := range tuners {
		if t.path() == "" {
			continue
		}
		socket, err := procsock.Find(t.path(), local, remote)
		if err == nil {
			return t, socket, nil
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return nil, nil, err
		}
	}
	return nil, nil, fault.Usage(fmt.Errorf("no process of a cgroup that is tuned has the connection %s -> %s", local, remote), socketHint)
}

func (t *tuner) describe(s *procsock.Socket) (*api.TuneSocket, error) {
	view := &api.TuneSocket{
		PID: s.PID, FD: s.Number, Command: s.Command, Local: s.Local.String(), Remote: s.Remote.String(),
		Role: string(s.Role), Cgroup: t.name, Tuned: api.Tuned{Values: []api.TuneValue{}, Steps: []match.Step{}},
	}
	if s.Listening || !s.Remote.IsValid() {
		return nil, fault.Usage(fmt.Errorf("%v is not a connection", s), socketHint)
	}
	if t.tune == nil {
		return nil, fault.Conflict(fmt.Errorf("cgroup %s is not tuned now", t.name), "see sockeye tune")
	}
	if s.MPTCP {
		return view, t.describeSubflows(s, view)
	}
	c, err := t.tune.Connection(s.FD)
	if err != nil {
		return nil, err
	}
	q := match.Question{Local: s.Local, Remote: s.Remote, Role: s.Role}
	view.Role, view.Tuned, err = t.describeRule(q, c, func(rule config.TuneRule) ([]api.TuneValue, error) { return Effective(s, rule, c) })
	return view, err
}

// describeRule returns the rule of a connection and its role. c is the state of the connection in the program, nil if
// no rule has matched; effective reads the values of a rule.
func (t *tuner) describeRule(q match.Question, c *bpf.TuneConnection, effective func(config.TuneRule) ([]api.TuneValue, error)) (role string, view api.Tuned, err error) {
	view = api.Tuned{Values: []api.TuneValue{}, Steps: Explain(t.rules, t.services, q)}
	if c == nil {
		return string(q.Role), view, nil
	}
	_, _, all, err := t.ruleIDs()
	if err != nil {
		return "", view, err
	}
	role = string(config.RoleConnect)
	if uint32(c.Role) == bpf.MatchAccept {
		role = string(config.RoleAccept)
	}
	view.TunedLive = c.Flags&bpf.TuneConnectionAdopted != 0
	view.Reacted = c.Flags&bpf.TuneConnectionReacted != 0
	view.Arm = tuneArms[min(int(c.Arm), len(tuneArms)-1)]
	rule := all[c.Rule]
	if rule == nil {
		return role, view, nil
	}
	view.Rule, view.Current = bpf.Text(rule.Name[:]), rule.Retired == 0
	i := slices.IndexFunc(t.rules, func(r config.TuneRule) bool { return r.Name == view.Rule })
	if i < 0 || !view.Current {
		return role, view, nil
	}
	if e := exploreOf(t.rules[i]); e != nil && int(c.Candidate) < len(e.Candidates) {
		view.Candidate = &e.Candidates[c.Candidate]
	}
	view.Values, err = effective(t.rules[i])
	return role, view, err
}
