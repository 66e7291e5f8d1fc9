// SPDX-License-Identifier: Apache-2.0

// Package spoof sends UDP datagrams to a socket of this host with the source address and port of their sender.
//
// The package uses raw sockets with IP_HDRINCL and IPV6_HDRINCL (CAP_NET_RAW). A UDP socket with IP_TRANSPARENT would have to
// be bound to the address of the sender: that fails if the sender runs on this host, and needs one socket per sender.
package spoof

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"
)

// Datagram is a UDP datagram. Both addresses are of the same family, and IPv4 addresses are not mapped to IPv6.
type Datagram struct {
	From, To netip.AddrPort
	Payload  []byte
}

const (
	udpHeader  = 8
	ipv4Header = 20
	ipv6Header = 40
)

// Sender sends datagrams. Its methods must not be called concurrently.
type Sender struct {
	ttl      byte
	v4, v6   int
	packet   []byte
	v6Opened error
}

// Open opens the raw sockets in the network namespace of the thread. ttl is the TTL or hop limit of the datagrams. Hosts
// without IPv6 can send IPv4.
func Open(ttl int) (*Sender, error) {
	v4, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.IPPROTO_RAW)
	if err != nil {
		return nil, fmt.Errorf("open raw socket: %w", err)
	}
	s := &Sender{ttl: byte(ttl), v4: v4, packet: make([]byte, 0, 1<<16)}
	s.v6, s.v6Opened = unix.Socket(unix.AF_INET6, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.IPPROTO_RAW)
	if s.v6Opened == nil {
		s.v6Opened = unix.SetsockoptInt(s.v6, unix.IPPROTO_IPV6, unix.IPV6_HDRINCL, 1)
	}
	return s, nil
}

// Close closes the sockets.
func (s *Sender) Close() error {
	err := unix.Close(s.v4)
	if s.v6 >= 0 {
		err = errors.Join(err, unix.Close(s.v6))
	}
	return err
}

// Send sends a datagram. It wraps EMSGSIZE for a datagram that the loopback interface cannot carry, and EAGAIN while the
// send buffer is full.
func (s *Sender) Send(d Datagram) error {
	from, to := d.From.Addr(), d.To.Addr()
	if from.Is4() != to.Is4() || !from.IsValid() {
		return fmt.Errorf("replay a datagram from %s to %s: different families", d.From, d.To)
	}
	length := udpHeader + len(d.Payload)
	if length > 1<<16-1 || from.Is4() && length+ipv4Header > 1<<16-1 {
		return fmt.Errorf("replay a datagram of %d bytes: %w", len(d.Payload), unix.EMSGSIZE)
	}
	var err error
	if from.Is4() {
		s.packet = appendIPv4(s.packet[:0], from, to, s.ttl, length)
		s.packet = appendUDP(s.packet, d)
		err = unix.Sendto(s.v4, s.packet, 0, &unix.SockaddrInet4{Addr: to.As4()})
	} else {
		if s.v6Opened != nil {
			return fmt.Errorf("replay a datagram: open raw socket: %w", s.v6Opened)
		}
		s.packet = appendIPv6(s.packet[:0], from, to, s.ttl, length)
		s.packet = appendUDP(s.packet, d)
		err = unix.Sendto(s.v6, s.packet, 0, &unix.SockaddrInet6{Addr: to.As16()})
	}
	if err != nil {
		return fmt.Errorf("replay a datagram from %s to %s: %w", d.From, d.To, err)
	}
	return nil
}

// appendIPv4 appends an IPv4 header. The kernel sets the checksum and, because it is 0, the identification (raw(7)).
func appendIPv4(b []byte, from, to netip.Addr, ttl byte, length int) []byte {
	b = append(b, 4<<4|ipv4Header/4, 0)
	b = binary.BigEndian.AppendUint16(b, uint16(ipv4Header+length))
	b = append(b, 0, 0, 0, 0, ttl, unix.IPPROTO_UDP, 0, 0)
	source, destination := from.As4(), to.As4()
	return append(append(b, source[:]...), destination[:]...)
}

func appendIPv6(b []byte, from, to netip.Addr, ttl byte, length int) []byte {
	b = append(b, 6<<4, 0, 0, 0)
	b = binary.BigEndian.AppendUint16(b, uint16(length))
	b = append(b, unix.IPPROTO_UDP, ttl)
	source, destination := from.As16(), to.As16()
	return append(append(b, source[:]...), destination[:]...)
}

// appendUDP appends the UDP header with the checksum (RFC 768, RFC 8200 section 8.1), and the payload.
func appendUDP(b []byte, d Datagram) []byte {
	at := len(b)
	length := uint16(udpHeader + len(d.Payload))
	b = binary.BigEndian.AppendUint16(b, d.From.Port())
	b = binary.BigEndian.AppendUint16(b, d.To.Port())
	b = binary.BigEndian.AppendUint16(b, length)
	b = append(b, 0, 0)
	b = append(b, d.Payload...)
	total := uint64(length) + unix.IPPROTO_UDP
	total = sum(total, d.From.Addr().AsSlice())
	total = sum(total, d.To.Addr().AsSlice())
	total = sum(total, b[at:])
	for total>>16 != 0 {
		total = total&0xffff + total>>16
	}
	checksum := ^uint16(total)
	if checksum == 0 {
		checksum = 0xffff
	}
	binary.BigEndian.PutUint16(b[at+6:], checksum)
	return b
}

// sum adds the 16-bit words of b to the sum of the Internet checksum.
func sum(total uint64, b []byte) uint64 {
	for ; len(b) >= 4; b = b[4:] {
		total += uint64(binary.BigEndian.Uint32(b))
	}
	if len(b) >= 2 {
		total += uint64(binary.BigEndian.Uint16(b))
		b = b[2:]
	}
	if len(b) == 1 {
		total += uint64(b[0]) << 8
	}
	return total
}
