// SPDX-License-Identifier: Apache-2.0

package verify

import (
	"net/netip"

	"golang.org/x/sys/unix"

	"sockeye/internal/sockdiag"
)

// diag asks the kernel of the TCP sockets of a namespace (sock_diag(7)).
type diag struct{ *sockdiag.Conn }

// openDiag is to run in the namespace.
func openDiag() (*diag, error) {
	c, err := sockdiag.Open()
	if err != nil {
		return nil, err
	}
	return &diag{c}, nil
}

// find gives what is known of the TCP socket with these two ends; nil if there is none, or
// if it is about to go, when nothing is told of it. Link-local ones are of the interface with
// that index.
func (d *diag) find(local, remote netip.AddrPort, index int) (*unix.TCPInfo, error) {
	s, err := d.Find(local, remote, index)
	if err != nil || s == nil || !s.HasInfo {
		return nil, err
	}
	return &s.Info, nil
}
