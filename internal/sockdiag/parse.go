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

// From linux/inet_diag.h: attributes, and the sizes of struct inet_diag_req_v2 and struct
// inet_diag_msg.
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

// From linux/sock_diag.h: what is nested in the attributes about BPF storage.
const (
	requestStorageMap = 1
	storageOfMap      = 1
	storageValue      = 3
)

// Socket is a TCP socket as the kernel describes it. Sizes are bytes.
type Socket struct {
	Family uint8 // unix.AF_INET or AF_INET6
	State  State
	// Local and Remote have IPv4-mapped addresses as IPv4. A link-local address has the
	// index of the interface as its zone.
	Local, Remote netip.AddrPort
	Device        uint32 // index of the interface that it is bound to; 0 for none
	Cookie        uint64
	UID           uint32
	Inode         uint32 // 0 of a socket that no process has any more
	Cgroup        uint64 // id of the socket's cgroup; 0: not known, before Linux 5.8

	Congestion string // name of the congestion control
	// Payload is what the application wrote and the peer has not acknowledged (SIOCOUTQ);
	// of a listener, how many connections may wait.
	Payload uint32
	// Unread is what was received and not read; of a listener, how many connections wait.
	Unread uint32
	// Buffer is sk_sndbuf and Queued sk_wmem_queued, both 0 unless HasMemory.
	HasMemory      bool
	Buffer, Queued int
	ReceiveBuffer  int // sk_rcvbuf; 0 unless HasMemory
	// Info is TCP_INFO, and zero unless HasInfo: of a connection in TIME_WAIT or a
	// handshake there is none. Kernels have more or less of it.
	HasInfo bool
	Info    unix.TCPInfo
	// AppLimited: the last rate that was measured was the application's.
	AppLimited bool
	// Options are there with Query.Options.
	Options Options
	// Storage is the value that the map of Query.Storage has for the socket, nil for
	// none. It is overwritten after the visit.
	Storage []byte
}

// Options are socket options as sock_diag tells them.
type Options struct {
	TOS          Option // of sockets of both families
	TrafficClass Option // of IPv6 sockets
	Mark         Option // needs CAP_NET_ADMIN over the network namespace
	// Priority is the class of the controller net_cls of cgroup v1 instead, where the
	// socket has one.
	Priority Option
}

// Option is the value of a socket option.
type Option struct {
	Value uint32
	Known bool // sock_diag told it
}

// Snapshot is what room has to know of the socket.
func (s *Socket) Snapshot(settings Settings) room.Snapshot {
	if !s.HasInfo || !s.HasMemory {
		return room.Snapshot{Closed: true}
	}
	snapshot := room.FromInfo(&s.Info, s.Buffer, s.Queued, int(s.Payload))
	snapshot.NotSentLowat = settings.NotSentLowat
	return snapshot
}

// parse reads a struct inet_diag_msg and the attributes that follow it.
func (c *Conn) parse(b []byte, s *Socket) error {
	if len(b) < sizeofMessage {
		return fmt.Errorf("an answer about a socket has %d bytes", len(b))
	}
	*s = Socket{Family: b[0], State: State(b[1])}
	if s.Family != unix.AF_INET && s.Family != unix.AF_INET6 {
		return fmt.Errorf("an answer about a socket is of family %d", s.Family)
	}
	device := binary.NativeEndian.Uint32(b[40:])
	s.Local = end(s.Family, b[8:], b[4:], device)
	s.Remote = end(s.Family, b[24:], b[6:], device)
	s.Device = device
	s.Cookie = uint64(binary.NativeEndian.Uint32(b[44:])) | uint64(binary.NativeEndian.Uint32(b[48:]))<<32
	s.Unread = binary.NativeEndian.Uint32(b[56:])
	s.Payload = binary.NativeEndian.Uint32(b[60:])
	s.UID = binary.NativeEndian.Uint32(b[64:])
	s.Inode = binary.NativeEndian.Uint32(b[68:])
	if err := nlattr.Visit(b[sizeofMessage:], func(kind uint16, value []byte) { c.attribute(s, kind, value) }); err != nil {
		return fmt.Errorf("an answer about a socket is malformed: %w", err)
	}
	return nil
}

func end(family uint8, address, port []byte, device uint32) netip.AddrPort {
	p := binary.BigEndian.Uint16(port)
	if family == unix.AF_INET {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte(address)), p)
	}
	a := netip.AddrFrom16([16]byte(address)).Unmap()
	if device != 0 && a.IsLinkLocalUnicast() && a.Is6() {
		a = a.WithZone(strconv.FormatUint(uint64(device), 10))
	}
	return netip.AddrPortFrom(a, p)
}

// attribute reads one attribute; what is too short or not known is left out.
func (c *Conn) attribute(s *Socket, kind uint16, value []byte) {
	switch kind {
	case attrInfo:
		const bitfields = 7 // where tcpi_delivery_rate_app_limited is
		if len(value) <= bitfields {
			return
		}
		s.HasInfo = true
		copy((*[unsafe.Sizeof(s.Info)]byte)(unsafe.Pointer(&s.Info))[:], value)
		s.AppLimited = value[bitfields]&lowestBit != 0
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
	case attrTOS:
		s.Options.TOS = option(value)
	case attrTrafficClass:
		s.Options.TrafficClass = option(value)
	case attrMark:
		s.Options.Mark = option(value)
	case attrClassID:
		s.Options.Priority = option(value)
	case attrStorages:
		// The socket counts as one without a value if what is nested is broken.
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

// option reads a number of one byte or four.
func option(value []byte) Option {
	switch len(value) {
	case 1:
		return Option{uint32(value[0]), true}
	case 4:
		return Option{binary.NativeEndian.Uint32(value), true}
	}
	return Option{}
}

// mostNames is more congestion controls than a kernel has.
const mostNames = 64

// lowestBit is where the compiler puts the first bit field of a byte.
var lowestBit = func() byte {
	if binary.NativeEndian.Uint16([]byte{1, 0}) == 1 {
		return 1
	}
	return 0x80
}()
