// SPDX-License-Identifier: Apache-2.0

package sockdiag

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"sockeye/internal/nlattr"
)

// Message lengths.
const (
	HeaderSize  = unix.SizeofNlMsghdr        // length of a message header in bytes
	RequestSize = HeaderSize + sizeofRequest // length of a Request in bytes
)

// Request is a request for sockets of AF_INET or AF_INET6: a struct nlmsghdr and a struct inet_diag_req_v2.
type Request struct {
	Type       uint16 // unix.SOCK_DIAG_BY_FAMILY or sockDestroy
	Flags      uint16 // NLM_F_DUMP, NLM_F_ACK; NLM_F_REQUEST is always set
	Sequence   uint32
	Family     uint8 // unix.AF_INET or AF_INET6
	Protocol   uint8 // unix.IPPROTO_TCP or IPPROTO_UDP
	Attributes uint8 // idiag_ext: bit n-1 requests attribute n
	States     States
	// Source and Destination are the addresses of the socket. A dump only uses the ports; 0 matches any. To find a UDP
	// socket, use the addresses of a datagram that the socket would receive (udp_dump_one).
	Source, Destination netip.AddrPort
	Interface           uint32 // interface index; 0 matches any
	Cookie              uint64 // AnyCookie matches any
}

// AnyCookie matches any cookie (INET_DIAG_NOCOOKIE).
const AnyCookie = ^uint64(0)

// WithReceiveMemory requests the attribute that ReceiveMemory reads.
const WithReceiveMemory = 1 << (attrMemory - 1)

// Append appends the encoded request to b. It does not allocate if b has a spare capacity of RequestSize bytes.
func (r *Request) Append(b []byte) []byte {
	b = binary.NativeEndian.AppendUint32(b, RequestSize)
	b = binary.NativeEndian.AppendUint16(b, r.Type)
	b = binary.NativeEndian.AppendUint16(b, unix.NLM_F_REQUEST|r.Flags)
	b = binary.NativeEndian.AppendUint32(b, r.Sequence)
	b = binary.NativeEndian.AppendUint32(b, 0) // port id of the kernel
	b = append(b, r.Family, r.Protocol, r.Attributes, 0)
	b = binary.NativeEndian.AppendUint32(b, uint32(r.States))
	b = binary.BigEndian.AppendUint16(b, r.Source.Port())
	b = binary.BigEndian.AppendUint16(b, r.Destination.Port())
	b = r.appendAddress(b, r.Source.Addr())
	b = r.appendAddress(b, r.Destination.Addr())
	b = binary.NativeEndian.AppendUint32(b, r.Interface)
	b = binary.NativeEndian.AppendUint32(b, uint32(r.Cookie))
	return binary.NativeEndian.AppendUint32(b, uint32(r.Cookie>>32))
}

// appendAddress appends 16 bytes. An IPv4 address is IPv4-mapped in a request for AF_INET6, and uses four bytes in a
// request for AF_INET.
func (r *Request) appendAddress(b []byte, a netip.Addr) []byte {
	var bytes [16]byte
	if r.Family == unix.AF_INET && a.Is4() {
		v4 := a.As4()
		copy(bytes[:], v4[:])
	} else {
		bytes = a.As16()
	}
	return append(b, bytes[:]...)
}

// Message is a netlink message of the kernel.
type Message struct {
	Type, Flags uint16
	Sequence    uint32
	Body        []byte // part of the argument of NextMessage
}

// NextMessage splits the first message off b, which has at least HeaderSize bytes.
func NextMessage(b []byte) (m Message, rest []byte, err error) {
	length := int(binary.NativeEndian.Uint32(b))
	if length < HeaderSize || length > len(b) {
		return Message{}, nil, fmt.Errorf("malformed reply: message of %d bytes in %d bytes", length, len(b))
	}
	m = Message{
		Type: binary.NativeEndian.Uint16(b[4:]), Flags: binary.NativeEndian.Uint16(b[6:]), Sequence: binary.NativeEndian.Uint32(b[8:]),
		Body: b[HeaderSize:length],
	}
	return m, b[min((length+unix.NLMSG_ALIGNTO-1)&^(unix.NLMSG_ALIGNTO-1), len(b)):], nil
}

// Errno returns the error of a message of type NLMSG_ERROR or NLMSG_DONE, or 0.
func (m *Message) Errno() unix.Errno {
	if len(m.Body) < 4 {
		return 0
	}
	return unix.Errno(max(-int32(binary.NativeEndian.Uint32(m.Body)), 0))
}

// Ports returns the local and the remote port of the socket that a message of type SOCK_DIAG_BY_FAMILY describes.
func (m *Message) Ports() (local, remote uint16, ok bool) {
	if m.Type != unix.SOCK_DIAG_BY_FAMILY || len(m.Body) < sizeofMessage {
		return 0, 0, false
	}
	return binary.BigEndian.Uint16(m.Body[4:]), binary.BigEndian.Uint16(m.Body[6:]), true
}

// ReceiveMemory returns the allocated bytes of the receive buffer (sk_rmem_alloc) and its size (sk_rcvbuf). ok is
// false for an error message, and without WithReceiveMemory in the request.
func (m *Message) ReceiveMemory() (allocated, limit int, ok bool) {
	if m.Type != unix.SOCK_DIAG_BY_FAMILY || len(m.Body) < sizeofMessage {
		return 0, 0, false
	}
	value := nlattr.Find(m.Body[sizeofMessage:], attrMemory)
	if len(value) < 4*(unix.SK_MEMINFO_RCVBUF+1) {
		return 0, 0, false
	}
	allocated = int(binary.NativeEndian.Uint32(value[4*unix.SK_MEMINFO_RMEM_ALLOC:]))
	limit = int(binary.NativeEndian.Uint32(value[4*unix.SK_MEMINFO_RCVBUF:]))
	return allocated, limit, true
}

// OpenSocket opens a non-blocking sock_diag socket in the network namespace of the calling thread, for a caller with
// its own event loop that sends Requests and reads Messages. With watch, the kernel also sends a message of type
// SOCK_DIAG_BY_FAMILY, without NLM_F_MULTI, for each TCP or UDP socket that is closed.
func OpenSocket(watch bool) (fd int, err error) {
	fd, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_SOCK_DIAG)
	if err != nil {
		return -1, fmt.Errorf("open sock_diag: %w", err)
	}
	if !watch {
		return fd, nil
	}
	var groups uint32
	for _, g := range []int{unix.SKNLGRP_INET_TCP_DESTROY, unix.SKNLGRP_INET_UDP_DESTROY, unix.SKNLGRP_INET6_TCP_DESTROY, unix.SKNLGRP_INET6_UDP_DESTROY} {
		groups |= 1 << (g - 1)
	}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: groups}); err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("watch sockets: %w", err)
	}
	return fd, nil
}
