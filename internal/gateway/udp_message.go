// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"encoding/binary"
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"

	"sockeye/internal/gateway/packet"
)

// receiveBatchSize is the maximum number of datagrams that one recvmmsg(2) reads.
const receiveBatchSize = 16

// receiveBatch reads several datagrams by one system call. The payload follows the headroom of a buffer.
type receiveBatch struct {
	messages [receiveBatchSize]unix.Mmsghdr
	vectors  [receiveBatchSize]unix.Iovec
	names    [receiveBatchSize]unix.RawSockaddrInet6 // large enough for IPv4
	controls [receiveBatchSize][controlSpace]byte
	buffers  [receiveBatchSize][]byte
}

// controlSpace is the space for one control message of IP_PKTINFO or IPV6_PKTINFO, in bytes.
const controlSpace = 64

func newReceiveBatch() *receiveBatch {
	in := &receiveBatch{}
	all := make([]byte, receiveBatchSize*(headroom+packet.MaxSize))
	for i := range in.messages {
		in.buffers[i], all = all[:headroom+packet.MaxSize:headroom+packet.MaxSize], all[headroom+packet.MaxSize:]
		in.vectors[i].Base = &in.buffers[i][headroom]
		in.vectors[i].SetLen(packet.MaxSize)
		h := &in.messages[i].Hdr
		h.Name = (*byte)(unsafe.Pointer(&in.names[i]))
		h.Iov = &in.vectors[i]
		h.SetIovlen(1)
		h.Control = &in.controls[i][0]
	}
	return in
}

// read calls recvmmsg(2) for at most that many datagrams, without blocking.
func (in *receiveBatch) read(fd, most int) (int, error) {
	for i := range in.messages[:most] {
		h := &in.messages[i].Hdr
		h.Namelen = unix.SizeofSockaddrInet6
		h.SetControllen(controlSpace)
	}
	for {
		n, _, errno := unix.RawSyscall6(unix.SYS_RECVMMSG, uintptr(fd), uintptr(unsafe.Pointer(&in.messages[0])), uintptr(most), unix.MSG_DONTWAIT, 0, 0)
		switch errno {
		case 0:
			return int(n), nil
		case unix.EINTR:
		default:
			return 0, errno
		}
	}
}

// name returns the source of a datagram as struct sockaddr.
func (in *receiveBatch) name(i int) []byte {
	return unsafe.Slice(in.messages[i].Hdr.Name, in.messages[i].Hdr.Namelen)
}

// peer returns the source of a datagram; an IPv4-mapped address becomes its IPv4 address.
func (in *receiveBatch) peer(i int) netip.AddrPort {
	name := in.name(i)
	switch {
	case len(name) >= unix.SizeofSockaddrInet4 && in.names[i].Family == unix.AF_INET:
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte(name[4:])), binary.BigEndian.Uint16(name[2:]))
	case len(name) >= unix.SizeofSockaddrInet6 && in.names[i].Family == unix.AF_INET6:
		return netip.AddrPortFrom(netip.AddrFrom16([16]byte(name[8:])).Unmap(), binary.BigEndian.Uint16(name[2:]))
	}
	return netip.AddrPort{}
}

// control returns the control message with which a reply has the datagram's destination as its source; nil if there is none.
func (in *receiveBatch) control(i int) []byte {
	b := in.controls[i][:in.messages[i].Hdr.Controllen]
	if len(b) < unix.SizeofCmsghdr {
		return nil
	}
	h := (*unix.Cmsghdr)(unsafe.Pointer(&b[0]))
	data := b[min(unix.CmsgLen(0), len(b)):]
	switch {
	case h.Level == unix.IPPROTO_IP && h.Type == unix.IP_PKTINFO && len(data) >= unix.SizeofInet4Pktinfo:
		// ipi_spec_dst is an address of the host even if the packet's destination is a broadcast address.
		clear(data[:4]) // any interface
	case h.Level == unix.IPPROTO_IPV6 && h.Type == unix.IPV6_PKTINFO && len(data) >= unix.SizeofInet6Pktinfo:
		if a := netip.AddrFrom16([16]byte(data)).Unmap(); a.IsMulticast() || a == netip.AddrFrom4([4]byte{255, 255, 255, 255}) {
			return nil
		} else if !a.IsLinkLocalUnicast() {
			clear(data[16:20])
		}
	default:
		return nil
	}
	return b
}

// destination is the destination of sendmsg(2).
type destination struct {
	name    []byte // struct sockaddr
	control []byte // control message with the source address; may be empty
}

// messageTo returns the struct sockaddr of an address; with v6, IPv4 addresses are mapped.
func messageTo(v6 bool, a netip.AddrPort) []byte {
	if !v6 {
		name := make([]byte, unix.SizeofSockaddrInet4)
		binary.NativeEndian.PutUint16(name, unix.AF_INET)
		binary.BigEndian.PutUint16(name[2:], a.Port())
		copy(name[4:], a.Addr().AsSlice())
		return name
	}
	name := make([]byte, unix.SizeofSockaddrInet6)
	binary.NativeEndian.PutUint16(name, unix.AF_INET6)
	binary.BigEndian.PutUint16(name[2:], a.Port())
	to := a.Addr().As16()
	copy(name[8:], to[:])
	return name
}

// send sends a datagram.
func (m *destination) send(fd int, p []byte) error {
	vector := unix.Iovec{Base: unsafe.SliceData(p)}
	vector.SetLen(len(p))
	h := unix.Msghdr{Name: unsafe.SliceData(m.name), Namelen: uint32(len(m.name)), Iov: &vector}
	h.SetIovlen(1)
	if len(m.control) > 0 {
		h.Control = &m.control[0]
		h.SetControllen(len(m.control))
	}
	_, err := sendMessage(fd, &h)
	return err
}

// sendMessage calls sendmsg(2), without blocking and without SIGPIPE.
func sendMessage(fd int, h *unix.Msghdr) (int, error) {
	for {
		n, _, errno := unix.RawSyscall(unix.SYS_SENDMSG, uintptr(fd), uintptr(unsafe.Pointer(h)), unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
		switch errno {
		case 0:
			return int(n), nil
		case unix.EINTR:
		default:
			return 0, errno
		}
	}
}
