// SPDX-License-Identifier: Apache-2.0

package sockdiag

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"strconv"
	"unsafe"

	"golang.org/x/sys/unix"

	"sockeye/internal/nlattr"
	"sockeye/room"
)

// Constants of linux/inet_diag.h: attributes, and the sizes of struct inet_diag_req_v2 and struct inet_diag_msg.
const (
	attrInfo         = 2
	attrCongestion   = 4
	attrTOS          = 5
	attrTrafficClass = 6
	attrMemory       = 7
	attrMark         = 15
	attrClassID      = 17
	attrStorages     = 20
	attrCgroup       = 21

	requestStorages = 2 // INET_DIAG_REQ_SK_BPF_STORAGES

	sizeofRequest = 56
	sizeofMessage = 72
)

// Constants of linux/sock_diag.h: attributes of BPF storage.
const (
	requestStorageMap = 1
	storageOfMap      = 1
	storageValue      = 3
)

// Socket is a TCP or UDP socket as reported by sock_diag. Sizes are in bytes.
type Socket struct {
	Family uint8 // unix.AF_INET or AF_INET6
	State  State
	// In Local and Remote, IPv4-mapped addresses are IPv4 addresses. The zone of a link-local address is its interface
	// index.
	Local, Remote netip.AddrPort
	Interface     uint32 // index of the bound interface; 0 for none
	Cookie        uint64
	UID           uint32
	Inode         uint32 // 0 if no process has the socket
	Cgroup        uint64 // id of the cgroup of the socket; 0 before Linux 5.8

	Congestion string // name of the congestion control
	// Payload is the written and unacknowledged data (SIOCOUTQ); for a listener, the backlog.
	Payload uint32
	// Unread is the received and unread data; for a listener, the number of waiting connections.
	Unread uint32
	// Buffer is sk_sndbuf and Queued sk_wmem_queued; both are 0 unless HasMemory.
	HasMemory      bool
	Buffer, Queued int
	ReceiveBuffer  int // sk_rcvbuf; 0 unless HasMemory
	// ReceiveQueued is the memory of the receive queue (sk_rmem_alloc), and Dropped the number of packets that the kernel
	// has dropped at the socket (sk_drops); both are 0 unless HasMemory.
	ReceiveQueued int
	Dropped       uint32
	// Info is TCP_INFO, and zero unless HasInfo: connections in TIME_WAIT and handshakes have no TCP_INFO. The length
	// depends on the kernel.
	HasInfo bool
	Info    unix.TCPInfo
	// ZeroWindow is set if the socket has closed its receive window, because the application does not read. The kernel
	// reports the window since Linux 6.2.
	ZeroWindow bool
	// AppLimited is set if the application limited the last measured delivery rate.
	AppLimited bool
	// Options are set with Query.Options.
	Options Options
	// Storage is the value of the socket in the map of Query.Storage, or nil. The next socket overwrites it.
	Storage []byte
}

// Options are socket options that sock_diag reports.
type Options struct {
	TOS          Option // sockets of both families
	TrafficClass Option // IPv6 sockets
	Mark         Option // needs CAP_NET_ADMIN in the network namespace
	// Priority is the class of the cgroup v1 controller net_cls if the socket has one.
	Priority Option
}

// Option is the value of a socket option.
type Option struct {
	Value uint32
	Known bool // reported by sock_diag
}

// Snapshot returns the input of the room estimator.
func (s *Socket) Snapshot(settings Settings) room.Snapshot {
	if !s.HasInfo || !s.HasMemory {
		return room.Snapshot{Closed: true}
	}
	snapshot := room.FromInfo(&s.Info, s.Buffer, s.Queued, int(s.Payload))
	snapshot.NotSentLowat = settings.NotSentLowat
	return snapshot
}

// parse parses a struct inet_diag_msg and its attributes.
func (c *Conn) parse(b []byte, s *Socket) error {
	if len(b) < sizeofMessage {
		return fmt.Errorf("malformed reply: socket message of %d bytes", len(b))
	}
	*s = Socket{Family: b[0], State: State(b[1])}
	if s.Family != unix.AF_INET && s.Family != unix.AF_INET6 {
		return fmt.Errorf("malformed reply: socket of family %d", s.Family)
	}
	ifindex := binary.NativeEndian.Uint32(b[40:])
	s.Local = end(s.Family, b[8:], b[4:], ifindex)
	s.Remote = end(s.Family, b[24:], b[6:], ifindex)
	s.Interface = ifindex
	s.Cookie = uint64(binary.NativeEndian.Uint32(b[44:])) | uint64(binary.NativeEndian.Uint32(b[48:]))<<32
	s.Unread = binary.NativeEndian.Uint32(b[56:])
	s.Payload = binary.NativeEndian.Uint32(b[60:])
	s.UID = binary.NativeEndian.Uint32(b[64:])
	s.Inode = binary.NativeEndian.Uint32(b[68:])
	if err := nlattr.Visit(b[sizeofMessage:], func(kind uint16, value []byte) { c.attribute(s, kind, value) }); err != nil {
		return fmt.Errorf("malformed reply: %w", err)
	}
	return nil
}

func end(family uint8, address, port []byte, ifindex uint32) netip.AddrPort {
	p := binary.BigEndian.Uint16(port)
	if family == unix.AF_INET {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte(address)), p)
	}
	a := netip.AddrFrom16([16]byte(address)).Unmap()
	if ifindex != 0 && a.IsLinkLocalUnicast() && a.Is6() {
		a = a.WithZone(strconv.FormatUint(uint64(ifindex), 10))
	}
	return netip.AddrPortFrom(a, p)
}

// attribute parses one attribute. It ignores short and unknown attributes.
func (c *Conn) attribute(s *Socket, kind uint16, value []byte) {
	switch kind {
	case attrInfo:
		const bitfields = 7 // byte of tcpi_delivery_rate_app_limited
		if len(value) <= bitfields {
			return
		}
		s.HasInfo = true
		copy((*[unsafe.Sizeof(s.Info)]byte)(unsafe.Pointer(&s.Info))[:], value)
		s.AppLimited = value[bitfields]&lowestBit != 0
		s.ZeroWindow = s.State == Established && len(value) >= int(unsafe.Offsetof(s.Info.Rehash)) && s.Info.Rcv_wnd == 0
	case attrCongestion:
		for i, b := range value {
			if b == 0 {
				value = value[:i]
				break
			}
		}
		name, known := c.names[string(value)]
		if !known {
			name = string(value)
			if len(c.names) < mostNames {
				c.names[name] = name
			}
		}
		s.Congestion = name
	case attrMemory:
		if len(value) < (unix.SK_MEMINFO_WMEM_QUEUED+1)*4 {
			return
		}
		s.HasMemory = true
		s.Buffer = int(int32(binary.NativeEndian.Uint32(value[unix.SK_MEMINFO_SNDBUF*4:])))
		s.Queued = int(int32(binary.NativeEndian.Uint32(value[unix.SK_MEMINFO_WMEM_QUEUED*4:])))
		s.ReceiveBuffer = int(int32(binary.NativeEndian.Uint32(value[unix.SK_MEMINFO_RCVBUF*4:])))
		s.ReceiveQueued = int(int32(binary.NativeEndian.Uint32(value[unix.SK_MEMINFO_RMEM_ALLOC*4:])))
		if len(value) >= (unix.SK_MEMINFO_DROPS+1)*4 {
			s.Dropped = binary.NativeEndian.Uint32(value[unix.SK_MEMINFO_DROPS*4:])
		}
	case attrTOS:
		s.Options.TOS = option(value)
	case attrTrafficClass:
		s.Options.TrafficClass = option(value)
	case attrMark:
		s.Options.Mark = option(value)
	case attrClassID:
		s.Options.Priority = option(value)
	case attrStorages:
		// With malformed nested attributes, the socket has no value.
		for kind, of := range nlattr.Attributes(value).All {
			if kind == storageOfMap {
				s.Storage = nlattr.Find(of, storageValue)
			}
		}
	case attrCgroup:
		if len(value) >= 8 {
			s.Cgroup = binary.NativeEndian.Uint64(value)
		}
	}
}

// option decodes a number of one or four bytes.
func option(value []byte) Option {
	switch len(value) {
	case 1:
		return Option{uint32(value[0]), true}
	case 4:
		return Option{binary.NativeEndian.Uint32(value), true}
	}
	return Option{}
}

// mostNames is an upper bound for the number of congestion controls of a kernel.
const mostNames = 64

// lowestBit is the position of the first bit field of a byte with this compiler's ABI.
var lowestBit = func() byte {
	if binary.NativeEndian.Uint16([]byte{1, 0}) == 1 {
		return 1
	}
	return 0x80
}()
