// SPDX-License-Identifier: Apache-2.0

package swarm

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// Offsets in packets, from the IP header on.
const (
	ipv4HeaderLen = 20
	ipv6HeaderLen = 40
	tcpFlagsAt    = 13
	tcpRST        = 0x04
)

// openResets opens a packet socket that receives TCP segments with RST, without IPv6 extension headers.
func openResets() (*os.File, error) {
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("open packet socket: %w", err)
	}
	program, err := bpf.Assemble([]bpf.Instruction{
		bpf.LoadExtension{Num: bpf.ExtProto},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.ETH_P_IP, SkipFalse: 5},
		bpf.LoadAbsolute{Off: 9, Size: 1},
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: unix.IPPROTO_TCP, SkipTrue: 9},
		bpf.LoadMemShift{Off: 0},
		bpf.LoadIndirect{Off: tcpFlagsAt, Size: 1},
		bpf.Jump{Skip: 4},
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: unix.ETH_P_IPV6, SkipTrue: 5},
		bpf.LoadAbsolute{Off: 6, Size: 1},
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: unix.IPPROTO_TCP, SkipTrue: 3},
		bpf.LoadAbsolute{Off: ipv6HeaderLen + tcpFlagsAt, Size: 1},
		bpf.JumpIf{Cond: bpf.JumpBitsNotSet, Val: tcpRST, SkipTrue: 1},
		bpf.RetConstant{Val: 128},
		bpf.RetConstant{Val: 0},
	})
	filter := make([]unix.SockFilter, len(program))
	for i, one := range program {
		filter[i] = unix.SockFilter{Code: one.Op, Jt: one.Jt, Jf: one.Jf, K: one.K}
	}
	if err == nil {
		err = unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]})
	}
	if err == nil {
		err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TIMESTAMPNS, 1)
	}
	if err == nil {
		all := binary.BigEndian.AppendUint16(nil, unix.ETH_P_ALL)
		err = unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: binary.NativeEndian.Uint16(all)}) // of all interfaces
	}
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("receive RST: %w", err)
	}
	return os.NewFile(uintptr(fd), "packets"), nil
}

// watchResets records connections of devices as closed when a RST to the device is sent or received here. present reports whether a device
// has a connection from a port.
func watchResets(packets *os.File, records recorder, present func(device int, port uint16) bool) error {
	raw, err := packets.SyscallConn()
	if err != nil {
		return err
	}
	b, control := make([]byte, 128), make([]byte, 128)
	for {
		var n, controlLen int
		var failed error
		err := raw.Read(func(fd uintptr) bool {
			n, controlLen, _, _, failed = unix.Recvmsg(int(fd), b, control, 0)
			return !errors.Is(failed, unix.EAGAIN)
		})
		if err = errors.Join(err, failed); errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return fmt.Errorf("receive RST: %w", err)
		}
		to, ok := destination(b[:n])
		if !ok {
			continue
		}
		device, ok := Device(to.Addr())
		if !ok || !present(device, to.Port()) {
			continue // of another connection
		}
		at, err := received(control[:controlLen])
		if err != nil {
			return err
		}
		if err := records.note(Record{At: at, Device: uint32(device), Port: to.Port(), Value: uint32(unix.ECONNRESET), Kind: Closed}); err != nil {
			return err
		}
	}
}

// destination returns the destination of a TCP segment, of a packet from the IP header on.
func destination(b []byte) (to netip.AddrPort, ok bool) {
	if len(b) < ipv4HeaderLen {
		return to, false
	}
	header, address := int(b[0]&0xf)*4, b[16:20]
	if b[0]>>4 == 6 {
		if len(b) < ipv6HeaderLen {
			return to, false
		}
		header, address = ipv6HeaderLen, b[24:40]
	}
	if len(b) < header+4 {
		return to, false
	}
	a, ok := netip.AddrFromSlice(address)
	return netip.AddrPortFrom(a, binary.BigEndian.Uint16(b[header+2:])), ok
}
