// SPDX-License-Identifier: Apache-2.0

package swarm

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"net/netip"
	"time"

	"sockeye/lab/traffic"
)

// A session starts with Initiation and Peer Up, then the initial dump: Route Monitoring messages of one route each, and
// End-of-RIB. Further Route Monitoring messages follow. The BGP identifier of the peer is the number of the device. The
// prefix of a route is the number of its message in the session, from 1.

const (
	bmpHeaderLen       = 6
	bmpKindAt          = 5
	bmpRouteMonitoring = 0
	bmpPeerIDAt        = 36
	bmpEndOfRIBLen     = 48 + 23
)

// greeting returns the messages before the dump.
func greeting(device int) []byte {
	b := traffic.AppendInitiation(nil, "sockeye lab/swarm", fmt.Sprintf("device-%d", device))
	router := netip.AddrFrom4([4]byte{192, 0, 2, 1})
	return traffic.AppendPeerUp(b, peerOf(device), traffic.Peer{Address: router, AS: 64512, ID: router}, time.Now())
}

// routeOf returns a Route Monitoring message whose last four bytes are its number.
func routeOf(device int) ([]byte, error) {
	peer := peerOf(device)
	update, err := traffic.AppendUpdate(nil, traffic.Route{
		Prefixes: []netip.Prefix{netip.PrefixFrom(netip.AddrFrom4([4]byte{0, 0, 0, 1}), 32)}, NextHop: peer.Address,
		ASPath: []uint32{64512, 65550}, Communities: []uint32{traffic.Community(64512, uint16(device))},
	})
	if err != nil {
		return nil, err
	}
	return traffic.AppendRouteMonitoring(nil, peer, time.Now(), update), nil
}

// endOfRIB returns the End-of-RIB marker for IPv4 unicast (RFC 4724).
func endOfRIB(device int) []byte {
	update := make([]byte, 23)
	for i := range 16 {
		update[i] = 0xff
	}
	update[17], update[18] = 23, 2
	return traffic.AppendRouteMonitoring(nil, peerOf(device), time.Now(), update)
}

func peerOf(device int) traffic.Peer {
	return traffic.Peer{
		Address: netip.AddrFrom4([4]byte{192, 0, 2, 2}), AS: 64512,
		ID: netip.AddrFrom4([4]byte{10, byte(device >> 16), byte(device >> 8), byte(device)}),
	}
}

// readBMP reads a message.
func readBMP(r *bufio.Reader) ([]byte, error) {
	header, err := r.Peek(bmpHeaderLen)
	if err != nil {
		return nil, err
	}
	n := binary.BigEndian.Uint32(header[1:])
	if header[0] != 3 || n < bmpHeaderLen || n > 1<<16 {
		return nil, fmt.Errorf("read BMP message: header % x", header)
	}
	b := make([]byte, n)
	_, err = io.ReadFull(r, b)
	return b, err
}

// session checks the messages of a session.
type session struct {
	device int
	routes uint32
}

// next checks a message. dumped reports that the initial dump is complete.
func (s *session) next(b []byte) (dumped bool, err error) {
	if b[bmpKindAt] != bmpRouteMonitoring {
		return false, nil
	}
	if device := int(binary.BigEndian.Uint32(b[bmpPeerIDAt:]) & 0xffffff); device != s.device {
		return false, fmt.Errorf("session of device %d has a message of device %d", s.device, device)
	}
	if len(b) == bmpEndOfRIBLen {
		return true, nil
	}
	s.routes++
	if number := binary.BigEndian.Uint32(b[len(b)-4:]); number != s.routes {
		return false, fmt.Errorf("session of device %d: message %d instead of %d", s.device, number, s.routes)
	}
	return false, nil
}
