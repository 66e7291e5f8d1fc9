// SPDX-License-Identifier: Apache-2.0

package traffic

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"
)

// Message types of RFC 7854, section 4.1.
const (
	bmpVersion         = 3
	bmpRouteMonitoring = 0
	bmpPeerUp          = 3
	bmpInitiation      = 4
	bmpTermination     = 5

	bmpHeaderLen  = 6
	bmpPerPeerLen = 42
	bmpTimeAt     = bmpHeaderLen + 34 // offset of the timestamp in the per-peer header

	bgpMaxLen     = 4096
	bgpOpen       = 1
	bgpUpdate     = 2
	bgpPort       = 179
	bgpASTrans    = 23456
	bgpHoldTime   = 180
	bgpUnicast    = 1
	bgpFamilyIPv4 = 1
	bgpFamilyIPv6 = 2
)

// Peer is a BGP speaker.
type Peer struct {
	Address netip.Addr
	AS      uint32
	ID      netip.Addr // BGP identifier, an IPv4 address
}

// Route is the content of one BGP UPDATE. Its prefixes and its next hop have the
// same address family.
type Route struct {
	Prefixes    []netip.Prefix
	NextHop     netip.Addr
	ASPath      []uint32
	Communities []uint32 // RFC 1997: AS number << 16 | value
}

// Community returns the standard community as:value (RFC 1997).
func Community(as, value uint16) uint32 { return uint32(as)<<16 | uint32(value) }

func appendBMPHeader(b []byte, kind byte) []byte {
	return append(b, bmpVersion, 0, 0, 0, 0, kind)
}

// SessionConfig configures the BMP session of a router with one BGP peer.
type SessionConfig struct {
	Source netip.Addr     // must be an address of the network namespace
	Port   uint16         // source port, 0 for any
	Target netip.AddrPort // the collector
	Name   string         // sysName; default: the source address
	Local  Peer           // the router itself; address and ID default to Source (to 192.0.2.1 if that is IPv6)
	Peer   Peer           // default: 192.0.2.2, AS 64512
	Routes []Route        // announced at the start, and again by Announce
}

// Session is a BMP session. Announce and Close are not safe for concurrent use with
// each other. WaitClosed may run concurrently with both.
type Session struct {
	conn     net.Conn
	messages [][]byte // Route Monitoring, one per route
	prefixes []int
	next     int
	buf      []byte
	stats    SessionStats
}

// SessionStats counts the sent messages of a Session.
type SessionStats struct {
	Messages uint64 // Route Monitoring without End-of-RIB
	Routes   uint64 // prefixes in them
	Bytes    uint64
}

// DialBMP opens a session and sends Initiation, Peer Up, each route once, and
// End-of-RIB.
func DialBMP(ctx context.Context, c SessionConfig) (*Session, error) {
	router := netip.AddrFrom4([4]byte{192, 0, 2, 1})
	if c.Source.Is4() {
		router = c.Source
	}
	if c.Name == "" {
		c.Name = c.Source.String()
	}
	if !c.Peer.Address.IsValid() {
		c.Peer.Address = netip.AddrFrom4([4]byte{192, 0, 2, 2})
	}
	for _, p := range []*Peer{&c.Local, &c.Peer} {
		if !p.Address.IsValid() {
			p.Address = router
		}
		if !p.ID.IsValid() {
			p.ID = router
			if p.Address.Is4() {
				p.ID = p.Address
			}
		}
		if !p.ID.Is4() {
			return nil, fmt.Errorf("make bmp session of %s: BGP identifier %s is not an IPv4 address", c.Source, p.ID)
		}
		if p.AS == 0 {
			p.AS = 64512
		}
	}
	now := time.Now()
	s := &Session{}
	s.buf = AppendInitiation(s.buf, "sockeye lab/traffic", c.Name)
	s.buf = AppendPeerUp(s.buf, c.Peer, c.Local, now)
	for _, r := range c.Routes {
		u, err := AppendUpdate(nil, r)
		if err != nil {
			return nil, fmt.Errorf("make bmp session of %s: %w", c.Source, err)
		}
		m := AppendRouteMonitoring(nil, c.Peer, now, u)
		s.messages = append(s.messages, m)
		s.prefixes = append(s.prefixes, len(r.Prefixes))
		s.buf = append(s.buf, m...)
		s.stats.Messages++
		s.stats.Routes += uint64(len(r.Prefixes))
	}
	s.buf = AppendRouteMonitoring(s.buf, c.Peer, now, appendEndOfRIB(nil))

	d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(c.Source, c.Port))}
	conn, err := d.DialContext(ctx, "tcp", c.Target.String())
	if err != nil {
		return nil, fmt.Errorf("open bmp session of %s: %w", c.Source, err)
	}
	s.conn = conn
	if deadline, ok := ctx.Deadline(); ok {
		_ = conn.SetWriteDeadline(deadline)
	}
	if _, err := conn.Write(s.buf); err != nil {
		conn.Close()
		return nil, fmt.Errorf("open bmp session of %s: %w", c.Source, err)
	}
	_ = conn.SetWriteDeadline(time.Time{})
	s.stats.Bytes += uint64(len(s.buf))
	return s, nil
}

// AppendInitiation appends a BMP Initiation message (RFC 7854, 4.3).
func AppendInitiation(b []byte, sysDescr, sysName string) []byte {
	start := len(b)
	b = appendBMPHeader(b, bmpInitiation)
	b = appendTLV(b, 1, sysDescr)
	b = appendTLV(b, 2, sysName)
	return finishBMP(b, start)
}

// AppendPeerUp appends a BMP Peer Up message (RFC 7854, 4.10) about a session between
// local and peer that was established at the time at. local and peer must have the
// same address family.
func AppendPeerUp(b []byte, peer, local Peer, at time.Time) []byte {
	start := len(b)
	b = appendBMPHeader(b, bmpPeerUp)
	b = appendPerPeer(b, peer, at)
	b = appendAddr16(b, local.Address)
	b = binary.BigEndian.AppendUint16(b, bgpPort)
	b = binary.BigEndian.AppendUint16(b, 49152) // the peer's port
	b = appendOpen(b, local)
	b = appendOpen(b, peer)
	return finishBMP(b, start)
}

// AppendRouteMonitoring appends a BMP Route Monitoring message (RFC 7854, 4.6) with
// update, a complete BGP UPDATE.
func AppendRouteMonitoring(b []byte, peer Peer, at time.Time, update []byte) []byte {
	start := len(b)
	b = appendBMPHeader(b, bmpRouteMonitoring)
	b = appendPerPeer(b, peer, at)
	b = append(b, update...)
	return finishBMP(b, start)
}

func appendPerPeer(b []byte, p Peer, at time.Time) []byte {
	var flags byte
	if p.Address.Is6() {
		flags = 0x80 // V
	}
	b = append(b, 0, flags)           // global instance peer, pre-policy, 4-byte AS path
	b = append(b, make([]byte, 8)...) // distinguisher
	b = appendAddr16(b, p.Address)
	b = binary.BigEndian.AppendUint32(b, p.AS)
	b = append(b, p.ID.AsSlice()...)
	b = binary.BigEndian.AppendUint32(b, uint32(at.Unix()))
	return binary.BigEndian.AppendUint32(b, uint32(at.Nanosecond()/1000))
}

// appendAddr16 appends an address in the format of BMP: an IPv4 address is in the
// last four of 16 bytes.
func appendAddr16(b []byte, a netip.Addr) []byte {
	if a.Is4() {
		b = append(b, make([]byte, 12)...)
	}
	return append(b, a.AsSlice()...)
}

func appendOpen(b []byte, p Peer) []byte {
	start := len(b)
	b = appendBGPHeader(b, bgpOpen)
	as := p.AS
	if as > 0xffff {
		as = bgpASTrans
	}
	b = append(b, 4)
	b = binary.BigEndian.AppendUint16(b, uint16(as))
	b = binary.BigEndian.AppendUint16(b, bgpHoldTime)
	b = append(b, p.ID.AsSlice()...)
	caps := []byte{
		1, 4, 0, bgpFamilyIPv4, 0, bgpUnicast,
		1, 4, 0, bgpFamilyIPv6, 0, bgpUnicast,
		65, 4, byte(p.AS >> 24), byte(p.AS >> 16), byte(p.AS >> 8), byte(p.AS),
	}
	b = append(b, byte(len(caps)+2), 2, byte(len(caps)))
	b = append(b, caps...)
	finishLength(b, start, 16)
	return b
}

// AppendUpdate appends a BGP UPDATE (RFC 4271, RFC 4760) with 4-byte AS numbers.
// It returns an error if the route mixes address families or the message exceeds 4096
// bytes.
func AppendUpdate(b []byte, r Route) ([]byte, error) {
	v4 := r.NextHop.Is4()
	for _, p := range r.Prefixes {
		if !p.IsValid() || p.Addr().Is4() != v4 {
			return b, fmt.Errorf("make update: prefix %s and next hop %s are of different families", p, r.NextHop)
		}
	}
	const optional, transitive = 0x80, 0x40
	attrs := appendAttr(nil, transitive, 1, []byte{0}) // ORIGIN IGP
	var path []byte
	if len(r.ASPath) > 0 {
		if len(r.ASPath) > 255 {
			return b, fmt.Errorf("make update: AS path of %d numbers, at most 255", len(r.ASPath))
		}
		path = append(path, 2, byte(len(r.ASPath))) // AS_SEQUENCE
		for _, as := range r.ASPath {
			path = binary.BigEndian.AppendUint32(path, as)
		}
	}
	attrs = appendAttr(attrs, transitive, 2, path)
	if v4 {
		attrs = appendAttr(attrs, transitive, 3, r.NextHop.AsSlice())
	}
	if len(r.Communities) > 0 {
		var c []byte
		for _, v := range r.Communities {
			c = binary.BigEndian.AppendUint32(c, v)
		}
		attrs = appendAttr(attrs, optional|transitive, 8, c)
	}
	if !v4 {
		reach := []byte{0, bgpFamilyIPv6, bgpUnicast, 16}
		reach = append(reach, r.NextHop.AsSlice()...)
		reach = append(reach, 0)
		attrs = appendAttr(attrs, optional, 14, appendPrefixes(reach, r.Prefixes))
	}
	start := len(b)
	b = appendBGPHeader(b, bgpUpdate)
	b = binary.BigEndian.AppendUint16(b, 0) // withdrawn
	b = binary.BigEndian.AppendUint16(b, uint16(len(attrs)))
	b = append(b, attrs...)
	if v4 {
		b = appendPrefixes(b, r.Prefixes)
	}
	if len(b)-start > bgpMaxLen {
		return b[:start], fmt.Errorf("make update: %d bytes, at most %d", len(b)-start, bgpMaxLen)
	}
	finishLength(b, start, 16)
	return b, nil
}

func appendAttr(b []byte, flags, kind byte, value []byte) []byte {
	if len(value) > 255 {
		b = append(b, flags|0x10, kind)
		b = binary.BigEndian.AppendUint16(b, uint16(len(value)))
	} else {
		b = append(b, flags, kind, byte(len(value)))
	}
	return append(b, value...)
}

func appendPrefixes(b []byte, prefixes []netip.Prefix) []byte {
	for _, p := range prefixes {
		b = append(b, byte(p.Bits()))
		b = append(b, p.Masked().Addr().AsSlice()[:(p.Bits()+7)/8]...)
	}
	return b
}

// appendEndOfRIB appends the End-of-RIB marker for IPv4 unicast (RFC 4724), an empty
// UPDATE.
func appendEndOfRIB(b []byte) []byte {
	start := len(b)
	b = append(appendBGPHeader(b, bgpUpdate), 0, 0, 0, 0)
	finishLength(b, start, 16)
	return b
}

func appendBGPHeader(b []byte, kind byte) []byte {
	for range 16 {
		b = append(b, 0xff)
	}
	return append(b, 0, 0, kind)
}

// Announce sends n Route Monitoring messages in one write, cycling through the
// routes. Their timestamp is the time of sending. It returns n or an error.
func (s *Session) Announce(n int) (int, error) {
	if len(s.messages) == 0 {
		return 0, errors.New("announce: the session has no routes")
	}
	now := time.Now()
	s.buf = s.buf[:0]
	for range n {
		at := len(s.buf) + bmpTimeAt
		s.buf = append(s.buf, s.messages[s.next]...)
		binary.BigEndian.PutUint32(s.buf[at:], uint32(now.Unix()))
		binary.BigEndian.PutUint32(s.buf[at+4:], uint32(now.Nanosecond()/1000))
		s.stats.Routes += uint64(s.prefixes[s.next])
		s.next = (s.next + 1) % len(s.messages)
	}
	if _, err := s.conn.Write(s.buf); err != nil {
		return 0, fmt.Errorf("announce: %w", err)
	}
	s.stats.Messages += uint64(n)
	s.stats.Bytes += uint64(len(s.buf))
	return n, nil
}

// WaitClosed waits until the session is closed. It returns io.EOF if the collector
// closed the session, net.ErrClosed after Close, or another error of the connection.
func (s *Session) WaitClosed() error {
	var b [512]byte
	for {
		if _, err := s.conn.Read(b[:]); err != nil {
			return err
		}
	}
}

// LocalAddr returns the source address and port of the session.
func (s *Session) LocalAddr() netip.AddrPort {
	return s.conn.LocalAddr().(*net.TCPAddr).AddrPort()
}

// Stats returns the current counts.
func (s *Session) Stats() SessionStats { return s.stats }

// Close sends Termination and closes the connection.
func (s *Session) Close() error {
	_ = s.conn.SetWriteDeadline(time.Now().Add(time.Second))
	_, err := s.conn.Write(AppendTermination(nil, 0))
	return errors.Join(err, s.conn.Close())
}

// AppendTermination appends a BMP Termination message with a reason code
// (RFC 7854, 4.5); 0 is "administratively closed".
func AppendTermination(b []byte, reason uint16) []byte {
	start := len(b)
	b = appendBMPHeader(b, bmpTermination)
	b = appendTLV(b, 1, string([]byte{byte(reason >> 8), byte(reason)}))
	return finishBMP(b, start)
}

func finishBMP(b []byte, start int) []byte {
	binary.BigEndian.PutUint32(b[start+1:], uint32(len(b)-start))
	return b
}

func appendTLV(b []byte, kind uint16, value string) []byte {
	b = binary.BigEndian.AppendUint16(b, kind)
	b = binary.BigEndian.AppendUint16(b, uint16(len(value)))
	return append(b, value...)
}
