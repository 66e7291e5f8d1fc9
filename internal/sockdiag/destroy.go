// SPDX-License-Identifier: Apache-2.0

package sockdiag

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"
)

// sockDestroy is SOCK_DESTROY of linux/sock_diag.h.
const sockDestroy = 21

// ErrCannotDestroy is of a kernel that closes no connection of another process:
// before Linux 4.9, or without CONFIG_INET_DIAG_DESTROY.
var ErrCannotDestroy = errors.New("this kernel closes no connections of other processes (CONFIG_INET_DIAG_DESTROY)")

// Destroy closes a connection, whoever has it: the peer gets a RST, the process
// ECONNABORTED. One that has ended meanwhile is no error; its cookie tells it from
// another one with the same ends. It needs CAP_NET_ADMIN, and fails with
// ErrCannotDestroy if the kernel cannot.
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

// CanDestroy returns nil if the kernel can close connections and the caller may,
// and ErrCannotDestroy if it cannot. It asks for a connection that there is none of.
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
	b := header(unix.NLM_F_ACK, c.seq, s.Family, ^States(0))
	binary.NativeEndian.PutUint16(b[4:], sockDestroy)
	b = binary.BigEndian.AppendUint16(b, s.Local.Port())
	b = binary.BigEndian.AppendUint16(b, s.Remote.Port())
	for _, a := range []netip.Addr{s.Local.Addr(), s.Remote.Addr()} {
		if s.Family == unix.AF_INET6 {
			mapped := a.As16()
			b = append(b, mapped[:]...)
			continue
		}
		b = append(b, append(a.AsSlice(), make([]byte, 12)...)...)
	}
	b = binary.NativeEndian.AppendUint32(b, s.Device)
	b = binary.NativeEndian.AppendUint32(b, uint32(s.Cookie))
	b = binary.NativeEndian.AppendUint32(b, uint32(s.Cookie>>32))
	if err := c.send(b); err != nil {
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
