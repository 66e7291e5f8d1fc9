// SPDX-License-Identifier: Apache-2.0

package procsock

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Constants of include/uapi/linux/mptcp.h and include/linux/socket.h, Linux 6.18.
const (
	solMPTCP          = 284
	subflowAddresses  = 3       // MPTCP_SUBFLOW_ADDRS
	sizeofSubflowData = 16      // struct mptcp_subflow_data
	sizeofAddress     = 128     // struct __kernel_sockaddr_storage
	sizeofSubflow     = 2 * 128 // struct mptcp_subflow_addrs
)

// usualSubflows is the maximum number of subflows of the kernel's path manager (MPTCP_SUBFLOWS_MAX in net/mptcp,
// Linux 6.18). Other path managers may create more.
const usualSubflows = 8

// Subflow is a TCP subflow of an MPTCP connection. It has no descriptor.
type Subflow struct {
	// In Local and Remote, IPv4-mapped addresses are IPv4 addresses.
	Local, Remote netip.AddrPort
}

// ErrNoSubflows is returned on kernels before 5.16, which do not list subflows.
var ErrNoSubflows = errors.New("listing the subflows of an MPTCP connection requires Linux 5.16")

// has returns whether a connection or one of its subflows has these addresses.
func (s *Socket) has(local, remote netip.AddrPort) bool {
	if s.Local == local && s.Remote == remote {
		return true
	}
	if !s.MPTCP {
		return false
	}
	// A connection whose subflows cannot be read does not match.
	list, _, _ := s.Subflows()
	return slices.Contains(list, Subflow{local, remote})
}

// Subflows returns the current subflows of an MPTCP connection. fellBack is true after a permanent fallback to TCP,
// with one subflow. The error is ErrNoSubflows if the kernel does not list subflows.
func (s *Socket) Subflows() (list []Subflow, fellBack bool, err error) {
	list, err = readSubflows(s.FD)
	if err == nil {
		return list, false, nil
	}
	if !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.ENOPROTOOPT) {
		return nil, false, fmt.Errorf("read subflows of %s: %w", s, os.NewSyscallError("getsockopt", err))
	}
	// After a fallback, the kernel passes TCP options to the subflow, and does not support MPTCP options
	// (mptcp_getsockopt, Linux 6.18).
	if _, err := unix.GetsockoptInt(s.FD, unix.SOL_TCP, unix.TCP_WINDOW_CLAMP); err != nil {
		return nil, false, fmt.Errorf("read subflows of %s: %w", s, ErrNoSubflows)
	}
	return []Subflow{{s.Local, s.Remote}}, true, nil
}

func readSubflows(fd int) ([]Subflow, error) {
	for room := usualSubflows; ; {
		b := make([]byte, sizeofSubflowData+room*sizeofSubflow)
		binary.NativeEndian.PutUint32(b, sizeofSubflowData)
		binary.NativeEndian.PutUint32(b[12:], sizeofSubflow)
		length := uint32(len(b))
		_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), solMPTCP, subflowAddresses,
			uintptr(unsafe.Pointer(&b[0])), uintptr(unsafe.Pointer(&length)), 0)
		if errno != 0 {
			return nil, errno
		}
		count := int(binary.NativeEndian.Uint32(b[4:]))
		if count > room {
			room = count
			continue
		}
		list := make([]Subflow, count)
		for i := range list {
			at := b[sizeofSubflowData+i*sizeofSubflow:]
			list[i] = Subflow{address(at), address(at[sizeofAddress:])}
		}
		return list, nil
	}
}

// address decodes a struct sockaddr_in or sockaddr_in6.
func address(b []byte) netip.AddrPort {
	port := binary.BigEndian.Uint16(b[2:])
	if binary.NativeEndian.Uint16(b) == unix.AF_INET {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[4:])), port)
	}
	return plain(netip.AddrPortFrom(netip.AddrFrom16([16]byte(b[8:])), port))
}
