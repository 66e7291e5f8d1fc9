// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/bpf"
	"sockeye/internal/config"
	"sockeye/internal/fault"
	"sockeye/internal/match"
	"sockeye/internal/netns"
	"sockeye/internal/procsock"
	"sockeye/internal/sockdiag"
)

// describeSubflows adds the subflows of an MPTCP socket to the view. The program runs for
// the subflows, which have no descriptor: sock_diag(7) returns the rule of each subflow and
// some of its options.
func (t *tuner) describeSubflows(s *procsock.Socket, view *api.TuneSocket) error {
	ends, fellBack, err := s.Subflows()
	if errors.Is(err, procsock.ErrNoSubflows) {
		return &fault.Error{Err: err, Hint: "it needs Linux 5.16 or later", Code: fault.CodeUnsupported}
	}
	if err != nil {
		return err
	}
	view.MPTCP = api.MPTCPMultipath
	if fellBack {
		view.MPTCP = api.MPTCPFallback
	}
	diag, err := diagOf(s)
	if err != nil {
		return fmt.Errorf("read subflows of %s: %w", s, err)
	}
	defer diag.Close()
	for _, end := range ends {
		subflow, c, err := t.findSubflow(diag, end)
		if errors.Is(err, fs.ErrNotExist) {
			continue // it has ended since
		}
		if err != nil {
			return fmt.Errorf("read subflow %s -> %s of %s: %w", end.Local, end.Remote, s, err)
		}
		f := api.TuneSubflow{Local: end.Local.String(), Remote: end.Remote.String()}
		q := match.Question{Local: end.Local, Remote: end.Remote, Role: s.Role}
		f.Role, f.Tuned, err = t.describeRule(q, c, func(rule config.TuneRule) ([]api.TuneValue, error) {
			return EffectiveSubflow(s, subflow, fellBack, rule, c)
		})
		if err != nil {
			return err
		}
		view.Subflows = append(view.Subflows, f)
	}
	return nil
}

// findSubflow returns a subflow and its entry in the program's map of connections, which is
// nil if no rule matches the subflow. The error wraps fs.ErrNotExist if there is no such
// subflow.
func (t *tuner) findSubflow(diag *sockdiag.Conn, end procsock.Subflow) (subflow *sockdiag.Socket, c *bpf.TuneConnection, err error) {
	var value []byte
	q := sockdiag.Query{States: sockdiag.Connected, LocalPort: end.Local.Port(), RemotePort: end.Remote.Port(), Options: true, Storage: t.tune.Storage()}
	reset := func() { subflow, value = nil, nil }
	err = diag.Dump(q, reset, func(s *sockdiag.Socket) {
		if s.Local.Addr().WithZone("") == end.Local.Addr() && s.Remote.Addr().WithZone("") == end.Remote.Addr() {
			found := *s
			subflow, value = &found, slices.Clone(s.Storage)
		}
	})
	if err == nil && subflow == nil {
		err = fs.ErrNotExist
	}
	if err != nil {
		return nil, nil, err
	}
	c, err = bpf.DecodeConnection(value)
	return subflow, c, err
}

// diagOf opens sock_diag in the network namespace of a socket. Another one than the
// agent's needs CAP_SYS_ADMIN.
func diagOf(s *procsock.Socket) (conn *sockdiag.Conn, err error) {
	fd, err := unix.IoctlRetInt(s.FD, unix.SIOCGSKNS)
	if err != nil {
		return nil, fmt.Errorf("find its network namespace: %w", err)
	}
	network := os.NewFile(uintptr(fd), fmt.Sprintf("of pid %d", s.PID))
	defer network.Close()
	here, err := netns.IsCurrent(network)
	if err != nil {
		return nil, fmt.Errorf("find its network namespace: %w", err)
	}
	where := network
	if here {
		where = nil
	}
	err = netns.Do(where, func() error {
		conn, err = sockdiag.Open()
		return err
	})
	return conn, err
}
