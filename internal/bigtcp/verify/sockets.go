// SPDX-License-Identifier: Apache-2.0

package verify

import (
	"net/netip"

	"golang.org/x/sys/unix"

	"sockeye/internal/sockdiag"
)

// diag finds TCP sockets of a namespace by sock_diag(7).
type diag struct{ *sockdiag.Conn }

// openDiag must run in the namespace.
func openDiag() (*diag, error) {
	c, err := sockdiag.Open()
	if err != nil {
		return nil, err
	}
	return &diag{c}, nil
}

// find returns the state of the TCP socket with these two ends, or nil if there is
// none or the socket is closing. Link-local addresses are those of the interface with
// the index.
func (d *diag) find(local, remote netip.AddrPort, index int) (*unix.TCPInfo, error) {
	s, err := d.Find(local, remote, index)
	if err != nil || s == nil || !s.HasInfo {
		return nil, err
	}
	return &s.Info, nil
}
