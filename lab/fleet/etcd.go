// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"path/filepath"
	"strings"

	"sockeye/lab"
)

// Server is an etcd server.
type Server struct {
	*lab.Process // of the last start
	Namespace    *lab.Namespace
	Address      netip.Addr

	fleet *Fleet
	name  string
}

// makeEtcd makes the namespaces of the servers.
func (f *Fleet) makeEtcd() error {
	if _, err := exec.LookPath("etcd"); err != nil {
		return errors.New("find etcd: not installed (Debian package etcd-server: apt-get install etcd-server)")
	}
	for i := range f.o.Servers {
		s := &Server{fleet: f, name: fmt.Sprintf("etcd-%d", i), Address: netip.AddrFrom4([4]byte{10, 77, 0, byte(231 + i)})}
		var err error
		if s.Namespace, err = f.Attach(s.name, netip.PrefixFrom(s.Address, 24)); err != nil {
			return err
		}
		if err := s.Namespace.AddRoute(hosts4, Front4); err != nil {
			return err
		}
		f.Etcd = append(f.Etcd, s)
	}
	return nil
}

// hosts4 has the addresses of all hosts.
var hosts4 = netip.MustParsePrefix("10.79.0.0/16")

// Start starts the server, with the data of its previous run.
func (s *Server) Start() error {
	client, peer := func(x *Server) string { return "http://" + netip.AddrPortFrom(x.Address, 2379).String() }, func(x *Server) string { return "http://" + netip.AddrPortFrom(x.Address, 2380).String() }
	var cluster []string
	for _, other := range s.fleet.Etcd {
		cluster = append(cluster, other.name+"="+peer(other))
	}
	s.Process = s.Namespace.Command(context.Background(), "etcd", "--name", s.name, "--data-dir", filepath.Join(s.fleet.Dir(), s.name+".data"),
		"--listen-client-urls", client(s), "--advertise-client-urls", client(s), "--listen-peer-urls", peer(s),
		"--initial-advertise-peer-urls", peer(s), "--initial-cluster", strings.Join(cluster, ","), "--unsafe-no-fsync")
	s.Name = s.name
	return s.Process.Start()
}

// endpoints returns the URLs of all servers, as in a policy.
func (f *Fleet) endpoints() string {
	var urls []string
	for _, s := range f.Etcd {
		urls = append(urls, fmt.Sprintf("%q", "http://"+netip.AddrPortFrom(s.Address, 2379).String()))
	}
	return "[" + strings.Join(urls, ", ") + "]"
}
