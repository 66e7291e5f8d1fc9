// SPDX-License-Identifier: Apache-2.0

package sockdiag

import (
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"
)

// sockDestroy is SOCK_DESTROY of linux/sock_diag.h.
const sockDestroy = 21

// ErrCannotDestroy is returned on kernels before Linux 4.9, or without CONFIG_INET_DIAG_DESTROY.
var ErrCannotDestroy = errors.New("this kernel cannot close connections of other processes (CONFIG_INET_DIAG_DESTROY)")

// Destroy closes a connection of any process (SOCK_DESTROY): the peer receives a RST, and the process ECONNABORTED. It
// returns nil if the connection has closed concurrently; the cookie distinguishes the connection from a later one with
// the same addresses. Destroy needs CAP_NET_ADMIN. It returns ErrCannotDestroy if the kernel does not support it.
func (c *Conn) Destroy(s *Socket) error {
	err := c.destroy(s)
	switch {
	case errors.Is(err, unix.ESTALE), errors.Is(err, ErrUnsupported): // ENOENT
		return nil
	case errors.Is(err, unix.EOPNOTSUPP):
		err = ErrCannotDestroy
	}
	if err != nil {
		return fmt.Errorf("close connection %s to %s: %w", s.Local, s.Remote, err)
	}
	return nil
}

// CanDestroy returns nil if the kernel supports SOCK_DESTROY and the caller may use it, or ErrCannotDestroy. It tries
// to destroy a connection that does not exist.
func (c *Conn) CanDestroy() error {
	nowhere := netip.AddrPortFrom(netip.IPv4Unspecified(), 0)
	err := c.destroy(&Socket{Family: unix.AF_INET, Local: nowhere, Remote: nowhere, Cookie: 1})
	switch {
	case errors.Is(err, ErrUnsupported), errors.Is(err, unix.ESTALE): // ENOENT
		return nil
	case errors.Is(err, unix.EOPNOTSUPP):
		return ErrCannotDestroy
	}
	return err
}

func (c *Conn) destroy(s *Socket) error {
	c.seq++
	r := tcpRequest(c.seq, s.Family, unix.NLM_F_ACK)
	r.Type, r.States = sockDestroy, ^States(0)
	r.Source, r.Destination, r.Interface, r.Cookie = s.Local, s.Remote, s.Interface, s.Cookie
	if err := c.send(r.Append(nil)); err != nil {
		return err
	}
	var unused Socket
	for {
		n, _, err := c.receive()
		if err != nil {
			return err
		}
		done, _, err := c.messages(c.buffer[:n], &unused, func(*Socket) {})
		if done || err != nil {
			return err
		}
	}
}
