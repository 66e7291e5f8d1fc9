// SPDX-License-Identifier: Apache-2.0

package traffic

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"
)

func unhex(t *testing.T, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(strings.Join(strings.Fields(s), ""))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

var (
	at    = time.Unix(0x65000000, 7_000)
	peer  = Peer{netip.MustParseAddr("192.0.2.2"), 65002, netip.MustParseAddr("192.0.2.2")}
	local = Peer{netip.MustParseAddr("192.0.2.1"), 70000, netip.MustParseAddr("192.0.2.1")}
	route = Route{
		Prefixes:    []netip.Prefix{netip.MustParsePrefix("203.0.113.0/24"), netip.MustParsePrefix("10.128.0.0/9")},
		NextHop:     netip.MustParseAddr("192.0.2.2"),
		ASPath:      []uint32{65002, 70000},
		Communities: []uint32{Community(65002, 100)},
	}
	flow4 = Flow{
		Src: netip.MustParseAddr("198.51.100.1"), Dst: netip.MustParseAddr("203.0.113.9"), SrcPort: 1000, DstPort: 443,
		Protocol: 6, TOS: 8, In: 1, Out: 2, Packets: 3, Octets: 4000, Start: time.UnixMilli(0x10), End: time.UnixMilli(0x20),
	}
)

func TestBMPBytes(t *testing.T) {
	const perPeer = "00 00 0000000000000000 000000000000000000000000c0000202 0000fdea c0000202 65000000 00000007"
	const marker = "ffffffffffffffffffffffffffffffff"
	update, err := AppendUpdate(nil, route)
	if err != nil {
		t.Fatal(err)
	}
	const updateHex = marker + `003d 02 0000 001f
		40 01 01 00
		40 02 0a 02 02 0000fdea 00011170
		40 03 04 c0000202
		c0 08 04 fdea0064
		18 cb0071 09 0a80`
	for _, c := range []struct {
		name string
		got  []byte
		want string
	}{
		{"initiation", AppendInitiation(nil, "ab", "r1"), "03 00000012 04  0001 0002 6162  0002 0002 7231"},
		{"termination", AppendTermination(nil, 3), "03 0000000c 05  0001 0002 0003"},
		{"update", update, updateHex},
		{"route monitoring", AppendRouteMonitoring(nil, peer, at, update), "03 0000006d 00" + perPeer + updateHex},
		{"peer up", AppendPeerUp(nil, peer, local, at), "03 000000a6 03" + perPeer +
			"000000000000000000000000c0000201 00b3 c000" +
			// 70000 exceeds 16 bits: AS_TRANS in the header, the number in the capability
			marker + "0031 01 04 5ba0 00b4 c0000201 14 02 12 0104 00010001 0104 00020001 4104 00011170" +
			marker + "0031 01 04 fdea 00b4 c0000202 14 02 12 0104 00010001 0104 00020001 4104 0000fdea"},
		{"end of rib", appendEndOfRIB(nil), marker + "0017 02 0000 0000"},
	} {
		if want := unhex(t, c.want); !bytes.Equal(c.got, want) {
			t.Errorf("%s:\n got %x\nwant %x", c.name, c.got, want)
		}
	}
}

func TestUpdateIPv6(t *testing.T) {
	got, err := AppendUpdate(nil, Route{
		Prefixes: []netip.Prefix{netip.MustParsePrefix("2001:db8::/32")},
		NextHop:  netip.MustParseAddr("fd00::2"),
		ASPath:   []uint32{1},
	})
	if err != nil {
		t.Fatal(err)
	}
	want := unhex(t, `ffffffffffffffffffffffffffffffff 0041 02 0000 002a
		40 01 01 00
		40 02 06 02 01 00000001
		80 0e 1a 0002 01 10 fd000000000000000000000000000002 00 20 20010db8`)
	if !bytes.Equal(got, want) {
		t.Errorf("\n got %x\nwant %x", got, want)
	}
}

func TestUpdateRefused(t *testing.T) {
	mixed := route
	mixed.NextHop = netip.MustParseAddr("fd00::2")
	long := route
	for range 2000 {
		long.Communities = append(long.Communities, 1)
	}
	for _, r := range []Route{mixed, long} {
		if b, err := AppendUpdate([]byte("x"), r); err == nil || string(b) != "x" {
			t.Errorf("AppendUpdate: %d bytes, error %v; want an unchanged buffer and an error", len(b), err)
		}
	}
}

func TestIPFIXBytes(t *testing.T) {
	const common = "0007 0002 000b 0002 0004 0001 0005 0001 000a 0004 000e 0004 0002 0008 0001 0008 0098 0008 0099 0008"
	want := unhex(t, "000a 007c 65000000 00000005 0000002a  0002 006c"+
		"0100 000c 0008 0004 000c 0004"+common+"0101 000c 001b 0010 001c 0010"+common)
	if got := AppendTemplates(nil, at, 5, 42); !bytes.Equal(got, want) {
		t.Errorf("templates:\n got %x\nwant %x", got, want)
	}
	flow6 := flow4
	flow6.Src, flow6.Dst = netip.MustParseAddr("fd00::1"), netip.MustParseAddr("fd00::2")
	const rest = "03e8 01bb 06 08 00000001 00000002 0000000000000003 0000000000000fa0 0000000000000010 0000000000000020"
	const rec4 = "c6336401 cb007109" + rest
	want = unhex(t, "000a 00d2 65000000 00000005 0000002a  0100 0070"+rec4+rec4+
		"0101 0052 fd000000000000000000000000000001 fd000000000000000000000000000002"+rest)
	if got := AppendData(nil, at, 5, 42, []Flow{flow4, flow4, flow6}); !bytes.Equal(got, want) {
		t.Errorf("data:\n got %x\nwant %x", got, want)
	}
	if RecordLen4 != len(unhex(t, rec4)) || RecordLen6 != RecordLen4+24 {
		t.Error("RecordLen4 or RecordLen6 does not match the template")
	}
}

func udpListener(t *testing.T, addr string) (*net.UDPConn, netip.AddrPort) {
	t.Helper()
	c, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.MustParseAddrPort(addr)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c, c.LocalAddr().(*net.UDPAddr).AddrPort()
}

func TestExporter(t *testing.T) {
	l, target := udpListener(t, "127.0.0.1:0")
	source := netip.MustParseAddr("127.77.0.9")
	e, err := NewExporter(ExporterConfig{
		Source: source, Target: target, Domain: 7, TemplateRefresh: time.Minute,
		Messages: [][]Flow{{flow4}, {flow4, flow4}, {flow4, flow4, flow4}},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	clock := time.Unix(1000, 0)
	e.now = func() time.Time { return clock }
	for _, step := range []struct {
		advance time.Duration
		n       int
	}{{0, 1}, {59 * time.Second, 4}, {time.Second, 2}} { // messages of 1 | 2 3 1 2 | 3 1 records
		clock = clock.Add(step.advance)
		if n, err := e.Send(step.n); n != step.n || err != nil {
			t.Fatalf("Send(%d) = %d, %v", step.n, n, err)
		}
	}
	const T = 0 // a template message
	_ = l.SetReadDeadline(time.Now().Add(time.Minute))
	var b [2000]byte
	sequence := uint32(0)
	for i, records := range []uint32{T, 1, 2, 3, 1, 2, T, 3, 1} {
		n, from, err := l.ReadFromUDPAddrPort(b[:])
		if err != nil {
			t.Fatalf("datagram %d: %v", i, err)
		}
		if from.Addr().Unmap() != source {
			t.Errorf("datagram %d: source %s, want %s", i, from, source)
		}
		at, want := []uint32{1000, 1059, 1060}[min(2, (i+2)/4)], uint16(template4)
		if i == 1 {
			at = 1000
		}
		if records == T {
			want = setTemplate
		}
		if got := binary.BigEndian.Uint16(b[16:]); got != want {
			t.Errorf("datagram %d has set %d, want %d", i, got, want)
		}
		if got := binary.BigEndian.Uint16(b[2:]); int(got) != n {
			t.Errorf("datagram %d has %d bytes, its length field is %d", i, n, got)
		}
		if got := binary.BigEndian.Uint32(b[8:]); got != sequence {
			t.Errorf("datagram %d has sequence number %d, want %d", i, got, sequence)
		}
		if got := binary.BigEndian.Uint32(b[12:]); got != 7 {
			t.Errorf("datagram %d has domain %d, want 7", i, got)
		}
		if got := binary.BigEndian.Uint32(b[4:]); got != at {
			t.Errorf("datagram %d was exported at %d, want %d", i, got, at)
		}
		sequence += records
	}
	if got, want := e.Stats(), (ExporterStats{Messages: 7, Records: 13, Templates: 2}); got != want {
		t.Errorf("stats %+v, want %+v", got, want)
	}
}

func TestExporterSurvivesDeadCollector(t *testing.T) {
	l, target := udpListener(t, "127.0.0.1:0")
	l.Close()
	e, err := NewExporter(ExporterConfig{Source: netip.MustParseAddr("127.77.0.9"), Target: target, Messages: [][]Flow{{flow4}, {flow4}}})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	if n, err := e.Send(10); n != 10 || err != nil {
		t.Errorf("Send(10) = %d, %v; want 10 and no error", n, err)
	}
	if e.Stats().Refused == 0 {
		t.Error("no refused datagrams, although the port is closed")
	}
}

func TestExporterRefuses(t *testing.T) {
	target := netip.MustParseAddrPort("127.0.0.1:9")
	src := netip.MustParseAddr("127.0.0.1")
	for name, c := range map[string]ExporterConfig{
		"no messages": {Source: src, Target: target},
		"no records":  {Source: src, Target: target, Messages: [][]Flow{{flow4}, {}}},
		"too long":    {Source: src, Target: target, Messages: [][]Flow{slices.Repeat([]Flow{flow4}, 26)}},
		"families":    {Source: netip.MustParseAddr("::1"), Target: target, Messages: [][]Flow{{flow4}}},
		"not local":   {Source: netip.MustParseAddr("192.0.2.77"), Target: target, Messages: [][]Flow{{flow4}}},
	} {
		if e, err := NewExporter(c); err == nil {
			e.Close()
			t.Errorf("%s: no error", name)
		}
	}
}

func TestSession(t *testing.T) {
	lc := net.ListenConfig{}
	lc.SetMultipathTCP(false)
	l, err := lc.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	got := make(chan []byte, 1)
	from := make(chan string, 1)
	go func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		from <- c.RemoteAddr().String()
		b, _ := io.ReadAll(c)
		c.Close()
		got <- b
	}()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	other := route
	other.Communities = []uint32{Community(1, 2)}
	s, err := DialBMP(ctx, SessionConfig{
		Source: netip.MustParseAddr("127.77.0.9"), Target: l.Addr().(*net.TCPAddr).AddrPort(), Peer: peer, Routes: []Route{route, other},
	})
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if n, err := s.Announce(1); n != 1 || err != nil {
			t.Fatalf("Announce(1) = %d, %v", n, err)
		}
	}
	if want := (SessionStats{Messages: 5, Routes: 10}); s.Stats().Messages != want.Messages || s.Stats().Routes != want.Routes {
		t.Errorf("stats %+v, want %+v", s.Stats(), want)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if err := s.WaitClosed(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("WaitClosed after Close: %v", err)
	}
	if a := <-from; a != s.conn.LocalAddr().String() || !strings.HasPrefix(a, "127.77.0.9:") {
		t.Errorf("the source of the session is %s", a)
	}
	var kinds []byte
	var communities []uint32
	for b := <-got; len(b) > 0; {
		n := binary.BigEndian.Uint32(b[1:])
		kinds = append(kinds, b[5])
		if b[5] == bmpRouteMonitoring && n > 100 {
			i := bytes.Index(b[:n], []byte{0xc0, 8, 4})
			communities = append(communities, binary.BigEndian.Uint32(b[i+3:]))
		}
		b = b[n:]
	}
	if want := []byte{4, 3, 0, 0, 0, 0, 0, 0, 5}; !bytes.Equal(kinds, want) { // the third 0 is End-of-RIB
		t.Errorf("message types %v, want %v", kinds, want)
	}
	r, o := route.Communities[0], other.Communities[0]
	if want := []uint32{r, o, r, o, r}; !slices.Equal(communities, want) {
		t.Errorf("communities %x, want %x", communities, want)
	}
}

func TestDrive(t *testing.T) {
	var per [3]int
	send := func(i, n int) (int, error) { per[i] += n; return n, nil }
	r, err := Drive(t.Context(), Limit{Count: 100, Batch: 7}, 3, send)
	if err != nil || r.Messages != 100 || per[0]+per[1]+per[2] != 100 {
		t.Errorf("%d messages (%v), %v", r.Messages, per, err)
	}
	for _, n := range per {
		if n < 28 || n > 42 {
			t.Errorf("the sources had %v messages", per)
		}
	}
	r, err = Drive(t.Context(), Limit{Rate: 10000, Duration: 200 * time.Millisecond}, 3, send)
	if err != nil || r.Messages > 2100 || r.Messages == 0 || r.Elapsed < 200*time.Millisecond {
		t.Errorf("at 10000/s for 200 ms: %+v, %v", r, err)
	}
	r, err = Drive(t.Context(), Limit{Rate: 10000, Count: 1000}, 3, send)
	if err != nil || r.Messages != 1000 || r.Elapsed < 100*time.Millisecond {
		t.Errorf("1000 at 10000/s: %+v, %v", r, err)
	}
	if _, err = Drive(t.Context(), Limit{}, 1, func(int, int) (int, error) { return 0, io.ErrClosedPipe }); !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("error of send: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if r, err := Drive(ctx, Limit{}, 1, send); err != nil || r.Messages != 0 {
		t.Errorf("cancelled: %+v, %v", r, err)
	}
}
