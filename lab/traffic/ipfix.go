// SPDX-License-Identifier: Apache-2.0

package traffic

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"sockeye/internal/sockaddr"
)

// Flow is the content of an IPFIX data record. Src and Dst are both IPv4 or both
// IPv6.
type Flow struct {
	Src, Dst         netip.Addr
	SrcPort, DstPort uint16
	Protocol         uint8
	TOS              uint8
	In, Out          uint32 // ifIndex
	Packets, Octets  uint64
	Start, End       time.Time // sent in milliseconds
}

const (
	ipfixVersion   = 10
	ipfixHeaderLen = 16
	setTemplate    = 2
	template4      = 256
	template6      = 257

	// MaxDatagram is the largest IPFIX message of an Exporter in bytes. RFC 7011,
	// 10.3.3, requires messages below the path MTU.
	MaxDatagram = 1400
)

type field struct{ id, length uint16 }

// fields are the information elements of a record after the two addresses, in this
// order: IANA number and length.
var fields = []field{
	{7, 2}, {11, 2}, // source, destination port
	{4, 1}, {5, 1}, // protocol, type of service
	{10, 4}, {14, 4}, // ingress, egress interface
	{2, 8}, {1, 8}, // packets, octets
	{152, 8}, {153, 8}, // flow start, end in milliseconds
}

// RecordLen4 and RecordLen6 are the lengths of one data record in bytes.
const (
	RecordLen4 = 2*4 + 46
	RecordLen6 = 2*16 + 46
)

func finishLength(b []byte, start, at int) {
	binary.BigEndian.PutUint16(b[start+at:], uint16(len(b)-start))
}

// ExporterConfig configures an IPFIX exporter of one observation domain.
type ExporterConfig struct {
	Source netip.Addr     // must be an address of the network namespace
	Port   uint16         // source port, 0 for any
	Target netip.AddrPort // the collector
	Domain uint32         // observation domain ("source id")
	// TemplateRefresh is the interval after which the templates are sent again
	// before the next data message; 0 means 10 minutes. The first message has the
	// templates.
	TemplateRefresh time.Duration
	// Messages has the records of each message. Send cycles through the messages.
	// At least one message is required. A message must not exceed MaxDatagram.
	Messages [][]Flow
}

// ExporterStats counts the sent messages of an Exporter.
type ExporterStats struct {
	Messages  uint64 // with data records, without template messages
	Records   uint64 // data records
	Templates uint64 // template messages
	Refused   uint64 // sends that failed because of an ICMP port unreachable message, and were retried
}

// Exporter sends IPFIX over UDP from one source address. It sends many datagrams in
// one sendmmsg call, without segmentation offload. It is not safe for concurrent use.
type Exporter struct {
	fd        int
	port      uint16
	refresh   time.Duration
	domain    uint32
	sequence  uint32
	templates time.Time // time of the last template message
	now       func() time.Time

	next    int
	bufs    [][]byte
	records []uint32
	iov     []unix.Iovec
	msgs    []mmsghdr
	stats   ExporterStats
}

// mmsghdr is struct mmsghdr, which package x/sys/unix does not define.
type mmsghdr struct {
	hdr unix.Msghdr
	len uint32
	_   [4]byte
}

// NewExporter opens a UDP socket bound to the source and connected to the
// target.
func NewExporter(c ExporterConfig) (*Exporter, error) {
	if len(c.Messages) == 0 {
		return nil, errors.New("make exporter: no messages")
	}
	if c.Source.Is4() != c.Target.Addr().Unmap().Is4() {
		return nil, fmt.Errorf("make exporter: source %s and target %s are of different families", c.Source, c.Target)
	}
	e := &Exporter{fd: -1, refresh: c.TemplateRefresh, domain: c.Domain, now: time.Now}
	if e.refresh == 0 {
		e.refresh = 10 * time.Minute
	}
	n := len(c.Messages)
	e.iov, e.msgs = make([]unix.Iovec, n), make([]mmsghdr, n)
	for i, flows := range c.Messages {
		b := AppendData(nil, time.Unix(0, 0), 0, c.Domain, flows)
		if len(flows) == 0 || len(b) > MaxDatagram {
			return nil, fmt.Errorf("make exporter: message %d has %d records and %d bytes, want 1 record or more and %d bytes or less", i, len(flows), len(b), MaxDatagram)
		}
		e.bufs = append(e.bufs, b)
		e.records = append(e.records, uint32(len(flows)))
		e.iov[i].Base = &b[0]
		e.iov[i].SetLen(len(b))
		e.msgs[i].hdr.Iov = &e.iov[i]
		e.msgs[i].hdr.SetIovlen(1)
	}
	fd, err := udpSocket(netip.AddrPortFrom(c.Source, c.Port), c.Target)
	if err != nil {
		return nil, fmt.Errorf("make exporter: %w", err)
	}
	e.fd = fd
	local, err := unix.Getsockname(fd)
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("make exporter: read the port: %w", err)
	}
	e.port = sockaddr.AddrPort(local).Port()
	return e, nil
}

// AppendData appends an IPFIX message with one data record per flow. Consecutive
// flows of one address family share a set. sequence is the same as in
// AppendTemplates.
func AppendData(b []byte, export time.Time, sequence, domain uint32, flows []Flow) []byte {
	start := len(b)
	b = appendIPFIXHeader(b, export, sequence, domain)
	for len(flows) > 0 {
		id, v4 := uint16(template6), flows[0].Src.Is4()
		if v4 {
			id = template4
		}
		set := len(b)
		b = binary.BigEndian.AppendUint16(b, id)
		b = binary.BigEndian.AppendUint16(b, 0)
		for len(flows) > 0 && flows[0].Src.Is4() == v4 {
			f := &flows[0]
			b = append(b, f.Src.AsSlice()...)
			b = append(b, f.Dst.AsSlice()...)
			b = binary.BigEndian.AppendUint16(b, f.SrcPort)
			b = binary.BigEndian.AppendUint16(b, f.DstPort)
			b = append(b, f.Protocol, f.TOS)
			b = binary.BigEndian.AppendUint32(b, f.In)
			b = binary.BigEndian.AppendUint32(b, f.Out)
			b = binary.BigEndian.AppendUint64(b, f.Packets)
			b = binary.BigEndian.AppendUint64(b, f.Octets)
			b = binary.BigEndian.AppendUint64(b, uint64(f.Start.UnixMilli()))
			b = binary.BigEndian.AppendUint64(b, uint64(f.End.UnixMilli()))
			flows = flows[1:]
		}
		finishLength(b, set, 2)
	}
	finishLength(b, start, 2)
	return b
}

func udpSocket(source, target netip.AddrPort) (int, error) {
	family := unix.AF_INET6
	if source.Addr().Is4() {
		family = unix.AF_INET
	}
	fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("open udp socket: %w", err)
	}
	if err := unix.Bind(fd, sockaddr.Of(source)); err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("bind udp socket to %s: %w", source, err)
	}
	if err := unix.Connect(fd, sockaddr.Of(netip.AddrPortFrom(target.Addr().Unmap(), target.Port()))); err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("connect udp socket of %s to %s: %w", source, target, err)
	}
	return fd, nil
}

// Send sends the next n messages, preceded by the templates if these are due. It
// returns the number of sent messages: n, or less with an error. A closed port of the
// collector is not an error (see ExporterStats.Refused).
func (e *Exporter) Send(n int) (int, error) {
	now := e.now()
	if e.stats.Templates == 0 || now.Sub(e.templates) >= e.refresh {
		if err := e.SendTemplates(); err != nil {
			return 0, err
		}
	}
	sent := 0
	for sent < n {
		batch := min(n-sent, len(e.bufs)-e.next)
		sequence := e.sequence
		for i := e.next; i < e.next+batch; i++ {
			binary.BigEndian.PutUint32(e.bufs[i][4:], uint32(now.Unix()))
			binary.BigEndian.PutUint32(e.bufs[i][8:], sequence)
			sequence += e.records[i]
		}
		r, _, errno := unix.Syscall6(unix.SYS_SENDMMSG, uintptr(e.fd), uintptr(unsafe.Pointer(&e.msgs[e.next])), uintptr(batch), 0, 0, 0)
		switch errno {
		case 0:
		case unix.ECONNREFUSED: // ICMP error of an earlier datagram; no datagram was sent
			e.stats.Refused++
			continue
		case unix.EINTR, unix.EAGAIN:
			continue
		default:
			return sent, fmt.Errorf("send %d messages: %w", batch, errno)
		}
		for i := e.next; i < e.next+int(r); i++ {
			e.sequence += e.records[i]
			e.stats.Records += uint64(e.records[i])
		}
		e.stats.Messages += uint64(r)
		e.next = (e.next + int(r)) % len(e.bufs)
		sent += int(r)
	}
	return sent, nil
}

// SendTemplates sends the templates now.
func (e *Exporter) SendTemplates() error {
	now := e.now()
	b := AppendTemplates(nil, now, e.sequence, e.domain)
	for try := 0; ; try++ {
		_, err := unix.Write(e.fd, b)
		switch {
		case err == nil:
			e.templates = now
			e.stats.Templates++
			return nil
		case err == unix.ECONNREFUSED && try < 3: // ICMP error of an earlier datagram; this datagram was not sent
			e.stats.Refused++
		case err == unix.EINTR || err == unix.EAGAIN:
		default:
			return fmt.Errorf("send templates: %w", err)
		}
	}
}

// AppendTemplates appends an IPFIX message (RFC 7011, section 3) with the two
// templates of AppendData: 256 for IPv4 and 257 for IPv6. sequence is the number of
// data records sent before, modulo 2^32. A template message does not increase it.
func AppendTemplates(b []byte, export time.Time, sequence, domain uint32) []byte {
	start := len(b)
	b = appendIPFIXHeader(b, export, sequence, domain)
	set := len(b)
	b = binary.BigEndian.AppendUint16(b, setTemplate)
	b = binary.BigEndian.AppendUint16(b, 0)
	for _, t := range []struct {
		id   uint16
		addr [2]field
	}{
		{template4, [2]field{{8, 4}, {12, 4}}},
		{template6, [2]field{{27, 16}, {28, 16}}},
	} {
		b = binary.BigEndian.AppendUint16(b, t.id)
		b = binary.BigEndian.AppendUint16(b, uint16(len(t.addr)+len(fields)))
		for _, f := range append(t.addr[:], fields...) {
			b = binary.BigEndian.AppendUint16(b, f.id)
			b = binary.BigEndian.AppendUint16(b, f.length)
		}
	}
	finishLength(b, set, 2)
	finishLength(b, start, 2)
	return b
}

func appendIPFIXHeader(b []byte, export time.Time, sequence, domain uint32) []byte {
	b = binary.BigEndian.AppendUint16(b, ipfixVersion)
	b = binary.BigEndian.AppendUint16(b, 0) // length, set by finishLength
	b = binary.BigEndian.AppendUint32(b, uint32(export.Unix()))
	b = binary.BigEndian.AppendUint32(b, sequence)
	return binary.BigEndian.AppendUint32(b, domain)
}

// Port returns the source port.
func (e *Exporter) Port() uint16 { return e.port }

// Sequence returns the sequence number of the next message.
func (e *Exporter) Sequence() uint32 { return e.sequence }

// Stats returns the current counts.
func (e *Exporter) Stats() ExporterStats { return e.stats }

// Close closes the socket.
func (e *Exporter) Close() error { return unix.Close(e.fd) }
