// SPDX-License-Identifier: Apache-2.0

package bigtcp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"unsafe"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// From linux/inet_diag.h.
const (
	inetDiagInfo    = 2
	inetDiagMsgSize = 72
)

// diag asks the kernel of the TCP sockets of a namespace (sock_diag(7)).
type diag struct{ socket *nl.SocketHandle }

// openDiag is to run in the namespace.
func openDiag() (*diag, error) {
	socket, err := nl.Subscribe(unix.NETLINK_INET_DIAG)
	if err != nil {
		return nil, fmt.Errorf("open diag socket: %w", err)
	}
	// Neither of these two is asked by the kernel.
	_ = socket.SetSendTimeout(&nl.SocketTimeoutTv)
	_ = socket.SetReceiveTimeout(&nl.SocketTimeoutTv)
	return &diag{&nl.SocketHandle{Socket: socket}}, nil
}

func (d *diag) Close() { d.socket.Close() }

// find gives the TCP socket with these two ends; nil if there is none. Link-local ones
// are of the interface with that index.
func (d *diag) find(local, remote netip.AddrPort, index int) (*unix.TCPInfo, error) {
	r := nl.NewNetlinkRequest(nl.SOCK_DIAG_BY_FAMILY, 0)
	r.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_INET_DIAG: d.socket}
	r.AddRawData(diagRequest(local, remote, index))
	answer, err := r.Execute(unix.NETLINK_INET_DIAG, 0)
	if errors.Is(err, unix.ENOENT) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("look up socket %s to %s: %w", local, remote, err)
	}
	if len(answer) == 0 || len(answer[0]) < inetDiagMsgSize {
		return nil, nil
	}
	return parseDiag(answer[0])
}

// diagRequest is a struct inet_diag_req_v2.
func diagRequest(local, remote netip.AddrPort, index int) []byte {
	b := make([]byte, 8, 56)
	b[0] = unix.AF_INET
	if local.Addr().Is6() {
		b[0] = unix.AF_INET6
	}
	b[1] = unix.IPPROTO_TCP
	b[2] = 1 << (inetDiagInfo - 1)
	binary.NativeEndian.PutUint32(b[4:], ^uint32(0)) // all states
	b = binary.BigEndian.AppendUint16(b, local.Port())
	b = binary.BigEndian.AppendUint16(b, remote.Port())
	for _, a := range []netip.Addr{local.Addr(), remote.Addr()} {
		b = append(b, append(a.AsSlice(), make([]byte, 12)...)[:16]...)
	}
	if !local.Addr().IsLinkLocalUnicast() && !remote.Addr().IsLinkLocalUnicast() {
		index = 0 // any
	}
	b = binary.NativeEndian.AppendUint32(b, uint32(index))
	return binary.NativeEndian.AppendUint64(b, ^uint64(0)) // any cookie
}

// parseDiag reads a struct inet_diag_msg and what follows it. It is nil for a socket
// that is about to go, of which nothing is told.
func parseDiag(m []byte) (*unix.TCPInfo, error) {
	attributes, err := nl.ParseRouteAttr(m[inetDiagMsgSize:])
	if err != nil {
		return nil, fmt.Errorf("read answer of sock_diag: %w", err)
	}
	for _, a := range attributes {
		if a.Attr.Type == inetDiagInfo {
			i := &unix.TCPInfo{}
			// Kernels have more or less of it at its end.
			copy((*[unsafe.Sizeof(*i)]byte)(unsafe.Pointer(i))[:], a.Value)
			return i, nil
		}
	}
	return nil, nil
}
