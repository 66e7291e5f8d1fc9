// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"context"
	"encoding/binary"
	"errors"
	"log/slog"
	"net/netip"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/gateway/access"
	"sockeye/internal/gateway/packet"
	"sockeye/internal/gateway/timer"
	"sockeye/internal/sockaddr"
)

// failure is the reason why a packet of the guest is not delivered.
type failure int

const (
	noNetwork failure = iota
	noHost
	noPort
	prohibited
	tooBig
)

// failures are the types and codes of ICMP (RFC 792; RFC 1812, section 5.2.7.1) and ICMPv6 (RFC 4443).
var failures = [...]struct{ type4, code4, type6, code6 uint8 }{
	noNetwork:  {3, 0, 1, 0},
	noHost:     {3, 1, 1, 3},
	noPort:     {3, 3, 1, 4},
	prohibited: {3, 13, 1, 1},
	tooBig:     {icmpUnreachable, icmpTooBig, icmp6TooBig, 0},
}

// ICMP types and codes.
const (
	icmpUnreachable = 3
	icmpTooBig      = 4 // code of icmpUnreachable
	icmp6TooBig     = 2
)

// anyDestination is the lookup of forwardErrors for a connected socket, which has one flow.
func (f endpoints) anyDestination(netip.AddrPort) (endpoints, bool) { return f, true }

const (
	icmpHeader = 8
	// maxQuote is the maximum number of bytes of a packet in an ICMP error (RFC 1812, section 4.3.2.3).
	maxQuote = 512
	// minMTU is the minimum MTU of IPv6 paths, in bytes (RFC 8200, section 5).
	minMTU = 1280
)

// forwardErrors forwards the ICMP errors in the error queue of a socket to the guest; find returns the flow of a destination. The
// result is false if the socket had no pending error: an error that a send returned then belongs to the datagram just sent.
func (g *Gateway) forwardErrors(fd int, protocol uint8, find func(to netip.AddrPort) (endpoints, bool)) (any bool) {
	var sent [icmpHeader]byte
	control := make([]byte, 256)
	for range udpBudget {
		n, controls, _, name, err := unix.Recvmsg(fd, sent[:], control, unix.MSG_ERRQUEUE|unix.MSG_DONTWAIT)
		if err != nil {
			break
		}
		messages, err := unix.ParseSocketControlMessage(control[:controls])
		if err != nil {
			continue
		}
		to := sockaddr.AddrPort(name)
		for _, m := range messages {
			e, ok := parseSocketError(&m)
			if !ok || e.origin == unix.SO_EE_ORIGIN_LOCAL {
				continue // send returned it, too
			}
			any = true
			if f, ok := find(to); ok {
				g.forwardError(&e, f, protocol, sent[:n])
			}
		}
	}
	// An error that did not fit into the queue is still in SO_ERROR.
	if errno, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR); err == nil && errno != 0 {
		any = true
	}
	return any
}

// socketError is a struct sock_extended_err and the address that follows it.
type socketError struct {
	errno              syscall.Errno
	origin, kind, code uint8
	mtu                uint32
	offender           netip.Addr // sender of the ICMP error (SO_EE_OFFENDER); the zero value if unknown
}

const socketErrorSize = 16 // bytes

// parseSocketError parses a control message of IP_RECVERR or IPV6_RECVERR.
func parseSocketError(m *unix.SocketControlMessage) (e socketError, ok bool) {
	v4 := m.Header.Level == unix.IPPROTO_IP && m.Header.Type == unix.IP_RECVERR
	v6 := m.Header.Level == unix.IPPROTO_IPV6 && m.Header.Type == unix.IPV6_RECVERR
	if !v4 && !v6 || len(m.Data) < socketErrorSize {
		return e, false
	}
	d := m.Data
	e = socketError{
		errno: syscall.Errno(binary.NativeEndian.Uint32(d)), origin: d[4], kind: d[5], code: d[6], mtu: binary.NativeEndian.Uint32(d[8:]),
	}
	name := d[socketErrorSize:]
	switch {
	case len(name) >= unix.SizeofSockaddrInet4 && binary.NativeEndian.Uint16(name) == unix.AF_INET:
		e.offender = netip.AddrFrom4([4]byte(name[4:]))
	case len(name) >= 24 && binary.NativeEndian.Uint16(name) == unix.AF_INET6: // up to the end of sin6_addr
		e.offender = netip.AddrFrom16([16]byte(name[8:])).Unmap()
	}
	return e, true
}

// forwardError sends the guest an ICMP error that quotes as much of the guest's datagram as the guest's kernel needs to find its
// socket. For an echo, sent is the header of the request.
func (g *Gateway) forwardError(e *socketError, f endpoints, protocol uint8, sent []byte) {
	from, to := f.remote.Addr(), f.guest.Addr()
	kind, code := e.kind, e.code
	if v4 := e.origin == unix.SO_EE_ORIGIN_ICMP; v4 != to.Is4() {
		// The alias of a name server may be of another family than the server.
		why, ok := failureOf(e.errno)
		if !ok {
			return
		}
		if kind, code = failures[why].type6, failures[why].code6; to.Is4() {
			kind, code = failures[why].type4, failures[why].code4
		}
	} else if a := g.remoteAddr(netip.AddrPortFrom(e.offender, 0)).Addr(); e.offender.IsValid() && a.Is4() == to.Is4() && e.offender != g.config.Outbound.Translate(f.remote).Addr() {
		from = a
	}
	ip := packet.IPv6Header
	if to.Is4() {
		ip = packet.IPv4Header
	}
	var b [packet.IPv6Header + icmpHeader]byte
	packet.WriteIP(b[:], to, f.remote.Addr(), protocol, icmpHeader)
	m := b[ip : ip+icmpHeader]
	if protocol == unix.IPPROTO_UDP {
		binary.BigEndian.PutUint16(m, f.guest.Port())
		binary.BigEndian.PutUint16(m[2:], f.remote.Port())
		binary.BigEndian.PutUint16(m[4:], packet.UDPHeader)
	} else {
		copy(m, sent)
		binary.BigEndian.PutUint16(m[4:], f.guest.Port())
	}
	g.sendICMPErrorFrom(from, to, kind, code, e.mtu, b[:ip+icmpHeader])
}

// failureOf returns the failure that corresponds to an error of a UDP or ping socket.
func failureOf(err error) (failure, bool) {
	for _, f := range []struct {
		error
		failure
	}{
		{unix.EMSGSIZE, tooBig}, {unix.ECONNREFUSED, noPort},
		{unix.EHOSTUNREACH, noHost}, {unix.EHOSTDOWN, noHost},
		{unix.ENETUNREACH, noNetwork}, {unix.EADDRNOTAVAIL, noNetwork},
		{unix.EACCES, prohibited}, {unix.EPERM, prohibited},
	} {
		if errors.Is(err, f.error) {
			return f.failure, true
		}
	}
	return 0, false
}

const (
	echoIdle    = 30 * time.Second
	echo4       = 8
	echoReply4  = 0
	echo6       = 128
	echoReply6  = 129
	maxEchoes   = 1024
	echoMessage = 65535 - packet.IPv4Header // largest ICMP message over IPv4, bytes
)

// icmpArrives processes an ICMP message of the guest. Messages other than echo requests are ignored.
func (g *Gateway) icmpArrives(s *packet.Segment) {
	v6 := s.Protocol == unix.IPPROTO_ICMPV6
	if !v6 && (s.Payload[0] != echo4 || s.Payload[1] != 0) || v6 && (s.Payload[0] != echo6 || s.Payload[1] != 0) {
		return
	}
	if !g.config.Outbound.Allowed(s.Protocol, s.To) {
		g.count(NotAllowed)
		g.sendICMPError(s, prohibited)
		return
	}
	id := binary.BigEndian.Uint16(s.Payload[4:])
	f := endpoints{withPort(s.From, id), s.To}
	e := g.echoes[f]
	if e == nil {
		if len(g.echoes) >= maxEchoes {
			g.count(TooMany)
			return
		}
		if e = g.newEcho(f, s); e == nil {
			return
		}
	}
	e.lastUsed = g.now
	e.hops.set(e.fd, s)
	// The kernel replaces the identifier.
	_, err := sendTo(e.fd, s.Payload)
	if err != nil && e.forwardErrors() {
		_, err = sendTo(e.fd, s.Payload) // the error was of an earlier request
	}
	if err != nil {
		g.refuseDatagram(s, err)
	}
}

// sendICMPError sends the guest the ICMP error of a router for one of its packets.
func (g *Gateway) sendICMPError(s *packet.Segment, why failure) {
	from, to := s.To.Addr(), s.From.Addr()
	if why == prohibited && g.log.Enabled(context.Background(), slog.LevelInfo) && !g.config.Outbound.Allowed(s.Protocol, s.To) {
		args := []any{"protocol", access.ProtocolName(s.Protocol), "to", s.To}
		switch {
		case access.Metadata(from):
			args = append(args, "why", "cloud metadata address: only --allow with exactly this address permits it")
		case g.config.Outbound.Resolver(s.To):
			args = append(args, "why", "name server of the host: with --no-dns, only --allow with exactly this address permits it")
		}
		g.log.Info("destination not allowed", args...)
	}
	f := failures[why]
	kind, code := f.type6, f.code6
	if to.Is4() {
		kind, code = f.type4, f.code4
	}
	// The source is the packet's destination, because the gateway has no address. The path's MTU is not known here.
	g.sendICMPErrorFrom(from, to, kind, code, minMTU, s.Network)
}

// sendICMPErrorFrom sends the guest an ICMP error for one of its packets. mtu is for errors with an MTU field.
func (g *Gateway) sendICMPErrorFrom(from, to netip.Addr, kind, code uint8, mtu uint32, raw []byte) {
	if from.IsMulticast() || from.IsUnspecified() {
		return
	}
	quote := raw[:min(len(raw), maxQuote)]
	length := icmpHeader + len(quote)
	var b [packet.VnetHeader + packet.IPv6Header + icmpHeader + maxQuote]byte
	ip, protocol := packet.IPv6Header, uint8(unix.IPPROTO_ICMPV6)
	if to.Is4() {
		ip, protocol = packet.IPv4Header, unix.IPPROTO_ICMP
	}
	network := b[packet.VnetHeader:]
	packet.WriteIP(network, from, to, protocol, length)
	m := network[ip : ip+length]
	m[0], m[1] = kind, code
	switch {
	case to.Is4() && kind == icmpUnreachable && code == icmpTooBig:
		binary.BigEndian.PutUint16(m[6:], uint16(min(mtu, 65535)))
	case to.Is6() && kind == icmp6TooBig:
		binary.BigEndian.PutUint32(m[4:], mtu)
	}
	copy(m[icmpHeader:], quote)
	checksum(m, packet.ICMPSum(from, to, protocol, length))
	g.send(b[:packet.VnetHeader+ip+length])
}

// echo is a ping socket of the host for one identifier and address.
type echo struct {
	g         *Gateway
	endpoints endpoints
	fd        int
	hops      hopLimit
	lastUsed  time.Time
	timer     timer.Timer
}

func (g *Gateway) newEcho(f endpoints, s *packet.Segment) *echo {
	fd, err := g.openSocket(f.remote.Addr(), unix.SOCK_DGRAM, int(s.Protocol))
	if err != nil {
		if errors.Is(err, unix.EACCES) {
			g.warn(warnEcho, "ping does not work: the host denies ping sockets to this user; see sysctl net.ipv4.ping_group_range")
		}
		g.count(Refused)
		g.refuseDatagram(s, err)
		return nil
	}
	if err := connectWithErrorQueue(fd, f.remote); err != nil {
		unix.Close(fd)
		g.refuseDatagram(s, err)
		return nil
	}
	e := &echo{g: g, endpoints: f, fd: fd}
	if err := g.register(fd, unix.EPOLLIN, e); err != nil {
		unix.Close(fd)
		return nil
	}
	g.echoes[f] = e
	e.timer.Owner = e
	g.timers.Set(&e.timer, g.now.Add(echoIdle))
	return e
}

func (e *echo) event(events uint32) {
	if events&unix.EPOLLERR != 0 {
		e.forwardErrors()
	}
	const start = packet.VnetHeader + packet.IPv6Header
	for range udpBudget {
		n, err := receive(e.fd, e.g.writeBuffer[start:start+echoMessage], unix.MSG_DONTWAIT)
		switch {
		case err != nil && (errors.Is(err, unix.EAGAIN) || !e.forwardErrors()):
			return
		case err == nil && n >= icmpHeader:
			e.reply(e.g.writeBuffer[:start+n], n)
		}
	}
}

func (e *echo) forwardErrors() bool {
	protocol := uint8(unix.IPPROTO_ICMP)
	if e.endpoints.remote.Addr().Is6() {
		protocol = unix.IPPROTO_ICMPV6
	}
	return e.g.forwardErrors(e.fd, protocol, e.endpoints.anyDestination)
}

// reply sends the guest an echo reply with the guest's identifier.
func (e *echo) reply(b []byte, n int) {
	m := b[len(b)-n:]
	from, to := e.endpoints.remote.Addr(), e.endpoints.guest.Addr()
	protocol, ip := uint8(unix.IPPROTO_ICMP), packet.IPv4Header
	if to.Is6() {
		protocol, ip = unix.IPPROTO_ICMPV6, packet.IPv6Header
	}
	if m[0] != echoReply4 && m[0] != echoReply6 {
		return
	}
	binary.BigEndian.PutUint16(m[4:], e.endpoints.guest.Port())
	checksum(m, packet.ICMPSum(from, to, protocol, n))
	if ip+n > e.g.config.MTU {
		e.g.fragment(e.endpoints, protocol, m)
		return
	}
	p := b[len(b)-n-ip-packet.VnetHeader:]
	clear(p[:packet.VnetHeader+ip])
	packet.WriteIP(p[packet.VnetHeader:], from, to, protocol, n)
	e.g.send(p)
}

// checksum sets the checksum of an ICMP message.
func checksum(m []byte, pseudo uint64) {
	m[2], m[3] = 0, 0
	binary.BigEndian.PutUint16(m[2:], ^packet.Fold(pseudo+packet.Sum(m)))
}

func (e *echo) Expired() {
	if end := e.lastUsed.Add(echoIdle); end.After(e.g.now) {
		e.g.timers.Set(&e.timer, end)
		return
	}
	delete(e.g.echoes, e.endpoints)
	e.g.closeFD(e.fd)
}
