// SPDX-License-Identifier: Apache-2.0

package templates

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"slices"
	"testing"
	"time"
)

var (
	start   = time.Unix(1_800_000_000, 0)
	router  = netip.MustParseAddrPort("192.0.2.1:50000")
	another = netip.MustParseAddrPort("[2001:db8::1]:50000")
)

func be16(values ...uint16) (b []byte) {
	for _, v := range values {
		b = binary.BigEndian.AppendUint16(b, v)
	}
	return b
}

func be32(values ...uint32) (b []byte) {
	for _, v := range values {
		b = binary.BigEndian.AppendUint32(b, v)
	}
	return b
}

func join(parts ...[]byte) []byte { return bytes.Join(parts, nil) }

// setOf returns a set.
func setOf(id uint16, records ...[]byte) []byte {
	body := join(records...)
	return join(be16(id, uint16(4+len(body))), body)
}

// ipfix returns an IPFIX message.
func ipfix(domain, sequence uint32, sets ...[]byte) []byte {
	body := join(sets...)
	return join(be16(10, uint16(16+len(body))), be32(1_700_000_000, sequence, domain), body)
}

// v9 returns a NetFlow v9 packet.
func v9(domain, sequence, uptime uint32, sets ...[]byte) []byte {
	return join(be16(9, uint16(len(sets))), be32(uptime, 1_700_000_000, sequence, domain), join(sets...))
}

// flow returns a template record with n fields of 4 bytes.
func flow(id uint16, n int) []byte {
	b := be16(id, uint16(n))
	for i := range n {
		b = append(b, be16(uint16(i+1), 4)...)
	}
	return b
}

var (
	// One scope field, an enterprise element, and two elements, one of them of variable length.
	ipfixOptions = join(be16(300, 4, 1), be16(149, 4), be16(0x8000|1234, 8), be32(29305), be16(82, 65535), be16(34, 4))
	// One scope field and two options.
	v9Options = join(be16(300, 4, 8), be16(1, 4), be16(34, 4), be16(35, 1))
	padding   = []byte{0, 0}
)

func learn(t testing.TB, s *Store, source netip.AddrPort, datagram []byte, now time.Time) {
	t.Helper()
	if err := s.Learn(source, 0, datagram, now); err != nil {
		t.Fatal(err)
	}
	check(t, s)
}

func listed(s *Store) []Template { return slices.Collect(s.List()) }

// ids returns source, domain and ID of each template.
func ids(s *Store) (all []string) {
	for t := range s.List() {
		all = append(all, fmt.Sprintf("%s/%d %d", t.Source, t.Domain, t.ID))
	}
	return all
}

func expect(t *testing.T, s *Store, want ...string) {
	t.Helper()
	if got := ids(s); !slices.Equal(got, want) {
		t.Fatalf("templates %q, want %q", got, want)
	}
}

// check computes the sums, orders and bounds of a Store anew.
func check(t testing.TB, s *Store) {
	t.Helper()
	var stats Stats
	for addr, d := range s.devices {
		own := deviceCost
		for i, e := range d.sessions {
			own += sessionCost
			if len(e.templates) == 0 || i > 0 && d.sessions[i-1].key(addr).compare(e.key(addr)) >= 0 {
				t.Fatalf("session %v is empty or not in order", e.key(addr))
			}
			for j, tm := range e.templates {
				own += templateCost + len(tm.record)
				if j > 0 && e.templates[j-1].id >= tm.id {
					t.Fatalf("template %d is not in order", tm.id)
				}
			}
			stats.Templates += len(e.templates)
		}
		stats.Sessions += len(d.sessions)
		if own != d.bytes || own > s.limits.DeviceBytes || len(d.sessions) == 0 || len(d.sessions) > s.limits.Sessions {
			t.Fatalf("%s has %d sessions and %d bytes, counted as %d", addr, len(d.sessions), own, d.bytes)
		}
		stats.Bytes += own
		if !d.proven {
			stats.UnprovenBytes += own
		}
	}
	got := s.Stats()
	if got.Templates != stats.Templates || got.Sessions != stats.Sessions || got.Bytes != stats.Bytes || got.UnprovenBytes != stats.UnprovenBytes ||
		got.Bytes > s.limits.TotalBytes || s.provenOrder.Len()+s.unprovenOrder.Len() != len(s.devices) {
		t.Fatalf("stats %+v, counted %+v", got, stats)
	}
}

func TestLearn(t *testing.T) {
	s := NewStore(Limits{}, nil)
	learn(t, s, router, ipfix(7, 1, setOf(2, flow(256, 3), flow(257, 2)), setOf(3, ipfixOptions, padding)), start)
	learn(t, s, router, v9(7, 1, 1000, setOf(0, flow(256, 1)), setOf(1, v9Options, padding)), start)
	got := listed(s)
	if len(got) != 5 {
		t.Fatalf("%d templates: %v", len(got), ids(s))
	}
	options := got[4]
	if options.Version != IPFIX || !options.Options || options.Fields != 4 || options.ScopeFields != 1 || options.Length != len(ipfixOptions) || !options.Learned.Equal(start) {
		t.Fatalf("%+v", options)
	}
	want := []Field{{149, 4, 0, true}, {1234, 8, 29305, false}, {82, variableLength, 0, false}, {34, 4, 0, false}}
	if fields := options.FieldList(); !slices.Equal(fields, want) {
		t.Fatalf("fields %v, want %v", fields, want)
	}
	options = got[1]
	want = []Field{{1, 4, 0, true}, {34, 4, 0, false}, {35, 1, 0, false}}
	if fields := options.FieldList(); options.Version != NetFlow9 || !slices.Equal(fields, want) {
		t.Fatalf("%+v: fields %v, want %v", options, fields, want)
	}
}

func TestRedefinition(t *testing.T) {
	s := NewStore(Limits{}, nil)
	learn(t, s, router, ipfix(1, 1, setOf(2, flow(256, 3))), start)
	revision := s.Revision()
	learn(t, s, router, ipfix(1, 1, setOf(2, flow(256, 3))), start.Add(time.Minute))
	if stats := s.Stats(); stats.Refreshed != 1 || s.Revision() != revision {
		t.Fatalf("a refresh: %+v, revision %d after %d", stats, s.Revision(), revision)
	}
	if got := listed(s)[0]; !got.Learned.Equal(start) || !got.Refreshed.Equal(start.Add(time.Minute)) {
		t.Fatalf("%+v", got)
	}
	learn(t, s, router, ipfix(1, 1, setOf(2, flow(256, 4))), start.Add(2*time.Minute))
	learn(t, s, router, ipfix(1, 1, setOf(3, join(be16(256, 1, 1), be16(149, 4)))), start.Add(3*time.Minute))
	got := listed(s)
	if stats := s.Stats(); len(got) != 1 || !got[0].Options || stats.Redefined != 2 || s.Revision() == revision {
		t.Fatalf("%+v, %+v", got, stats)
	}
	// One that the bounds refuse must not leave the old definition.
	learn(t, s, router, ipfix(1, 1, setOf(2, flow(256, 16300))), start)
	if expect(t, s); s.Stats().RefusedDevice != 1 {
		t.Fatalf("%+v", s.Stats())
	}
}

func TestRefreshesAreSaved(t *testing.T) {
	s := NewStore(Limits{Lifetime: 4 * time.Hour}, nil)
	revisions := map[uint64]bool{}
	for i := range 60 {
		learn(t, s, router, ipfix(1, 1, setOf(2, flow(256, 3))), start.Add(time.Duration(i)*10*time.Minute))
		revisions[s.Revision()] = true
	}
	if len(revisions) != 10 { // ten hours
		t.Fatalf("%d revisions", len(revisions))
	}
}

func TestWithdrawal(t *testing.T) {
	all := []string{"192.0.2.1:50000/1 256", "192.0.2.1:50000/1 257", "192.0.2.1:50000/1 300", "192.0.2.1:50000/2 256"}
	for name, test := range map[string]struct {
		set  []byte
		want []string
	}{
		"one":                {setOf(2, be16(256, 0)), all[1:]},
		"two":                {setOf(2, be16(256, 0, 257, 0)), all[2:]},
		"unknown":            {setOf(2, be16(400, 0)), all},
		"one options":        {setOf(3, be16(300, 0)), []string{all[0], all[1], all[3]}},
		"of the other kind":  {setOf(2, be16(300, 0)), all},
		"all templates":      {setOf(2, be16(2, 0)), all[2:]},
		"all options":        {setOf(3, be16(3, 0)), []string{all[0], all[1], all[3]}},
		"all, and one anew":  {setOf(2, be16(2, 0), flow(256, 5)), []string{all[0], all[2], all[3]}},
		"all, anew, and all": {setOf(2, be16(2, 0, 2, 0), flow(256, 5), be16(2, 0)), all[2:]},
		"one and all":        {setOf(2, be16(256, 0), be16(2, 0)), all[2:]},
		"defined, withdrawn": {setOf(2, flow(400, 2), be16(400, 0)), all},
	} {
		t.Run(name, func(t *testing.T) {
			s := NewStore(Limits{}, nil)
			learn(t, s, router, ipfix(1, 1, setOf(2, flow(256, 3), flow(257, 2)), setOf(3, ipfixOptions)), start)
			learn(t, s, router, ipfix(2, 1, setOf(2, flow(256, 3))), start)
			learn(t, s, router, ipfix(1, 1, test.set), start)
			expect(t, s, test.want...)
		})
	}
	s := NewStore(Limits{}, nil)
	learn(t, s, router, v9(1, 1, 1, setOf(0, flow(256, 3)), setOf(1, v9Options, padding)), start)
	learn(t, s, router, v9(1, 1, 1, setOf(0, be16(256, 0)), setOf(1, be16(300, 0, 0), padding)), start)
	if expect(t, s); s.Stats().Withdrawn != 2 || s.Stats().Bytes != 0 {
		t.Fatalf("%+v", s.Stats())
	}
}

func TestMalformed(t *testing.T) {
	good := setOf(2, flow(256, 1))
	long := join(ipfix(1, 1, good), make([]byte, 65536))
	for name, test := range map[string]struct {
		datagram []byte
		want     Malformed
	}{
		"empty":                        {nil, TooShort},
		"header of 15 bytes":           {ipfix(1, 1)[:15], TooShort},
		"v9 header of 19 bytes":        {v9(1, 1, 1)[:19], TooShort},
		"too long":                     {long, TooLong},
		"version 5":                    {join(be16(5, 1), make([]byte, 60)), BadVersion},
		"longer than the datagram":     {ipfix(1, 1, good)[:20], BadLength},
		"shorter than the header":      {join(be16(10, 15), make([]byte, 40)), BadLength},
		"zero-length set":              {ipfix(1, 1, good, be16(256, 0)), BadSet},
		"set of 3 bytes":               {ipfix(1, 1, good, be16(2, 3, 0)), BadSet},
		"set beyond the message":       {ipfix(1, 1, good, be16(2, 9, 256, 0)), BadSet},
		"set of 65,535 bytes":          {ipfix(1, 1, good, be16(256, 65535, 1, 1)), BadSet},
		"ID 255":                       {ipfix(1, 1, good, setOf(2, flow(255, 1))), BadID},
		"ID 2 with fields":             {ipfix(1, 1, good, setOf(2, flow(2, 1))), BadID},
		"ID 3 in a template set":       {ipfix(1, 1, good, setOf(2, be16(3, 0))), BadID},
		"ID 0 before a record":         {ipfix(1, 1, good, setOf(2, be16(0, 0), flow(256, 1))), BadID},
		"v9 withdraws all":             {v9(1, 1, 1, setOf(0, be16(2, 0))), BadID},
		"65,535 fields":                {ipfix(1, 1, good, setOf(2, be16(256, 65535, 1, 4))), Truncated},
		"enterprise number cut":        {ipfix(1, 1, good, setOf(2, be16(256, 1, 0x8001, 4))), Truncated},
		"options header cut":           {ipfix(1, 1, good, setOf(3, be16(256, 1))), Truncated},
		"v9 lengths of 65,532 bytes":   {v9(1, 1, 1, setOf(1, be16(256, 65532, 65532, 1, 4))), Truncated},
		"v9 lengths not multiples":     {v9(1, 1, 1, setOf(1, be16(256, 4, 6, 1, 4, 1, 4))), BadScope},
		"more scope fields than all":   {ipfix(1, 1, setOf(3, be16(256, 1, 2, 1, 4, 1, 4))), BadScope},
		"cut after a good set of v9":   {v9(1, 1, 1, setOf(0, flow(256, 1)), be16(0, 50, 256, 1)), BadSet},
		"template cut by end of a set": {ipfix(1, 1, setOf(2, flow(256, 3)[:12]), setOf(2, flow(257, 1))), Truncated},
	} {
		t.Run(name, func(t *testing.T) {
			s := NewStore(Limits{}, nil)
			if err := s.Learn(router, 0, test.datagram, start); !errors.Is(err, test.want) {
				t.Fatalf("error %v, want %v", err, test.want)
			}
			if expect(t, s); s.Stats().Malformed[test.want] != 1 {
				t.Fatalf("%+v", s.Stats())
			}
		})
	}
}

func TestTolerated(t *testing.T) {
	for name, datagram := range map[string][]byte{
		"IPFIX with bytes behind":      join(ipfix(1, 1, setOf(2, flow(256, 1))), be16(2, 0)),
		"padding":                      ipfix(1, 1, setOf(2, flow(256, 1), make([]byte, 3))),
		"padding of 8 bytes":           v9(1, 1, 1, setOf(0, flow(256, 1), make([]byte, 8))),
		"bytes after the last set":     v9(1, 1, 1, setOf(0, flow(256, 1)), make([]byte, 3)),
		"reserved set":                 ipfix(1, 1, setOf(5, be16(1, 2)), setOf(2, flow(256, 1))),
		"no scope field":               ipfix(1, 1, setOf(3, be16(256, 1, 0, 149, 4))),
		"v9 without scope":             v9(1, 1, 1, setOf(1, be16(256, 0, 4, 34, 4), padding)),
		"data of an unknown template":  ipfix(1, 1, setOf(900, be16(1, 2)), setOf(2, flow(256, 1))),
		"fields of length 0 and 65535": ipfix(1, 1, setOf(2, be16(256, 2, 1, 0, 2, 65535)), setOf(256, []byte{0, 0, 0})),
		"template after 40 sets":       ipfix(1, 1, bytes.Repeat(setOf(300, be16(1, 2)), 40), setOf(2, flow(256, 1))),
		"data without bytes":           ipfix(1, 1, setOf(2, be16(256, 1, 1, 0)), setOf(256, make([]byte, 64))),
	} {
		t.Run(name, func(t *testing.T) {
			s := NewStore(Limits{}, nil)
			learn(t, s, router, datagram, start)
			if s.Stats().Learned != 1 {
				t.Fatalf("%+v", s.Stats())
			}
		})
	}
}

func TestSessions(t *testing.T) {
	s := NewStore(Limits{}, nil)
	datagram := func(domain uint32) []byte { return ipfix(domain, 1, setOf(2, flow(256, 3))) }
	port := netip.AddrPortFrom(router.Addr(), 49999)
	learn(t, s, router, datagram(1), start)
	learn(t, s, router, datagram(2), start)
	learn(t, s, port, datagram(1), start)
	learn(t, s, another, datagram(1), start)
	learn(t, s, router, v9(1, 1, 1, setOf(0, flow(256, 2))), start)
	learn(t, s, netip.MustParseAddrPort("[::ffff:192.0.2.1]:50000"), datagram(1), start) // the same
	if err := s.Learn(router, 1, datagram(1), start); err != nil {
		t.Fatal(err)
	}
	check(t, s)
	var got []string
	for e := range s.List() {
		got = append(got, fmt.Sprintf("%s row %d v%d domain %d", e.Source, e.Row, e.Version, e.Domain))
	}
	want := []string{
		"192.0.2.1:49999 row 0 v10 domain 1",
		"192.0.2.1:50000 row 0 v9 domain 1",
		"192.0.2.1:50000 row 0 v10 domain 1",
		"192.0.2.1:50000 row 0 v10 domain 2",
		"192.0.2.1:50000 row 1 v10 domain 1",
		"[2001:db8::1]:50000 row 0 v10 domain 1",
	}
	if !slices.Equal(got, want) {
		t.Fatalf("got\n%q, want\n%q", got, want)
	}
	for range s.List() {
		break // must not go on
	}
	learn(t, s, router, ipfix(1, 1, setOf(2, be16(2, 0))), start)
	if n := len(listed(s)); n != 5 {
		t.Fatalf("a withdrawal left %d templates, want 5", n)
	}
}

func TestLifetime(t *testing.T) {
	s := NewStore(Limits{}, nil)
	at := start
	learn(t, s, router, ipfix(1, 1, setOf(2, flow(256, 3), flow(257, 3))), at)
	learn(t, s, another, ipfix(1, 1, setOf(2, flow(256, 3))), at)
	for range 100 { // two days with a refresh each 30 minutes
		at = at.Add(30 * time.Minute)
		learn(t, s, router, ipfix(1, 1, setOf(2, flow(256, 3))), at)
		s.Expire(at)
		check(t, s)
	}
	expect(t, s, "192.0.2.1:50000/1 256")
	if s.Stats().Expired != 2 {
		t.Fatalf("%+v", s.Stats())
	}
	at = at.Add(DefaultLifetime)
	if got := s.Replay(router.Addr(), at, 0, nil); len(got) != 0 {
		t.Fatalf("expired templates replayed: %v", got)
	}
	// Without Expire: a device that returns starts anew.
	learn(t, s, router, ipfix(1, 1, setOf(2, flow(258, 3))), at)
	expect(t, s, "192.0.2.1:50000/1 258")
	// A clock that stepped back a year.
	at = at.Add(-365 * 24 * time.Hour)
	s.Expire(at)
	s.Expire(at.Add(DefaultLifetime))
	expect(t, s)
}

func TestRestart(t *testing.T) {
	const wrap = 1 << 32
	for name, test := range map[string]struct {
		before, after uint32
		elapsed       time.Duration
		restart       bool
	}{
		"goes on":                 {1_000_000, 1_600_000, 10 * time.Minute, false},
		"reordered":               {1_000_000, 950_000, time.Second, false},
		"restarted":               {1_000_000, 5_000, 10 * time.Minute, true},
		"restarted after a month": {2_600_000_000, 5_000, 10 * time.Minute, true},
		"stands still":            {1_000_000, 1_000_000, time.Hour, false},
		"wraps":                   {wrap - 300_000, 300_000, 10 * time.Minute, false},
		"wraps with a slow clock": {wrap - 300_000, 280_000, 9*time.Minute + 40*time.Second, false},
		"restarted before a wrap": {wrap - 10_000_000, 5_000, 10 * time.Minute, true},
		"clock stepped back":      {1_000_000, 1_600_000, -time.Hour, false},
	} {
		t.Run(name, func(t *testing.T) {
			s := NewStore(Limits{}, nil)
			learn(t, s, router, v9(1, 1, test.before, setOf(0, flow(256, 3), flow(257, 3))), start)
			learn(t, s, router, v9(2, 1, test.before, setOf(0, flow(256, 3))), start)
			learn(t, s, router, v9(1, 2, test.after, setOf(0, flow(256, 3))), start.Add(test.elapsed))
			if want := map[bool]int{false: 3, true: 2}[test.restart]; len(listed(s)) != want {
				t.Fatalf("%d templates, want %d", len(listed(s)), want)
			}
		})
	}
}

// TestDeviceBounds fills one device, which neither grows nor touches another one.
func TestDeviceBounds(t *testing.T) {
	s := NewStore(Limits{}, nil)
	learn(t, s, another, ipfix(1, 1, setOf(2, flow(256, 3))), start)
	other := s.devices[another.Addr()].bytes
	for id := uint16(256); id < 5000; id++ {
		learnUnchecked(t, s, router, ipfix(1, 1, setOf(2, flow(id, 10))), start)
	}
	check(t, s)
	stats := s.Stats()
	if stats.RefusedDevice == 0 || stats.RefusedTotal+stats.Displaced+stats.Stale != 0 || s.devices[router.Addr()].bytes < DefaultDeviceBytes*9/10 {
		t.Fatalf("%+v", stats)
	}
	if s.devices[another.Addr()].bytes != other {
		t.Fatal("another device has changed")
	}
	// Templates that the device no longer refreshes give way.
	learn(t, s, router, ipfix(1, 1, setOf(2, flow(60000, 10))), start.Add(DefaultLifetime/4))
	if got := s.Stats(); got.Stale == 0 || got.Templates != 2 {
		t.Fatalf("%+v", got)
	}
	expect(t, s, "192.0.2.1:50000/1 60000", "[2001:db8::1]:50000/1 256")

	for domain := range uint32(200) {
		learn(t, s, router, ipfix(domain, 1, setOf(2, flow(256, 1))), start.Add(DefaultLifetime/4))
	}
	if got := len(s.devices[router.Addr()].sessions); got != DefaultSessions {
		t.Fatalf("%d sessions", got)
	}
	// A record that no message could carry.
	s = NewStore(Limits{DeviceBytes: 1 << 20}, nil)
	learn(t, s, router, ipfix(1, 1, setOf(2, flow(256, (maxRecord-4)/4))), start)
	learn(t, s, router, ipfix(1, 1, setOf(2, flow(257, (maxRecord-4)/4+1))), start)
	if expect(t, s, "192.0.2.1:50000/1 256"); s.Stats().RefusedDevice != 1 {
		t.Fatalf("%+v", s.Stats())
	}
	if got := s.Replay(router.Addr(), start, 0, nil); len(got) != 1 || len(got[0].Data) > maxMessage {
		t.Fatalf("%d messages of %d bytes", len(got), len(got[0].Data))
	}
}

func learnUnchecked(t testing.TB, s *Store, source netip.AddrPort, datagram []byte, now time.Time) {
	t.Helper()
	if err := s.Learn(source, 0, datagram, now); err != nil {
		t.Fatal(err)
	}
}

func forged(i int) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom16([16]byte{0x20, 1, 0x0d, 0xb8, 9, 12: byte(i >> 24), 13: byte(i >> 16), 14: byte(i >> 8), 15: byte(i)}), 4000)
}

// TestForgedSources sends a template from each of a million addresses.
func TestForgedSources(t *testing.T) {
	proven := netip.MustParseAddrPort("198.51.100.1:50000")
	s := NewStore(Limits{TotalBytes: 16 << 20}, func(addr netip.Addr) bool { return addr == proven.Addr() })
	datagram := ipfix(1, 1, setOf(2, flow(256, 3)))
	before := heap()
	learn(t, s, router, datagram, start)
	for i := range 1_000_000 {
		learnUnchecked(t, s, forged(i), datagram, start)
	}
	check(t, s)
	stats := s.Stats()
	if stats.RefusedTotal == 0 || stats.Displaced != 0 || stats.UnprovenBytes > 8<<20 || stats.UnprovenBytes < 8<<20-1000 {
		t.Fatalf("%+v", stats)
	}
	if grown := heap() - before; grown > uint64(stats.Bytes) {
		t.Errorf("%d bytes on the heap, accounted as %d", grown, stats.Bytes)
	}
	t.Logf("%d sources, %d bytes, %d bytes on the heap", stats.Sources, stats.Bytes, heap()-before)
	if len(s.Replay(router.Addr(), start, 0, nil)) != 1 {
		t.Fatal("the first router has been removed")
	}
	// The reserved share is there for a proven source.
	learn(t, s, proven, datagram, start)
	if got := s.Stats(); got.ProvenSources != 1 || got.Displaced != 0 {
		t.Fatalf("%+v", got)
	}
	// Unproven sources that have expired make room, and the router that refreshes stays.
	learn(t, s, router, datagram, start.Add(DefaultLifetime-1))
	learn(t, s, netip.MustParseAddrPort("192.0.2.7:1"), datagram, start.Add(DefaultLifetime))
	expect(t, s, "192.0.2.1:50000/1 256", "192.0.2.7:1/1 256")
	runtime.KeepAlive(s)
}

func heap() uint64 {
	var stats runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&stats)
	return stats.HeapAlloc
}

// TestMemory fills the Store with sources that have removed most of what they had.
func TestMemory(t *testing.T) {
	s := NewStore(Limits{TotalBytes: 8 << 20}, nil)
	before := heap()
	var many, one [][]byte
	for id := range uint16(400) {
		many = append(many, flow(256+id, 1))
		if id > 0 {
			one = append(one, be16(256+id, 0))
		}
	}
	full, withdrawn := ipfix(1, 1, setOf(2, many...)), ipfix(1, 1, setOf(2, one...))
	for i := range 2000 {
		learnUnchecked(t, s, forged(i), full, start)
		learnUnchecked(t, s, forged(i), withdrawn, start)
	}
	check(t, s)
	if grown := heap() - before; grown > uint64(s.Stats().Bytes) {
		t.Errorf("%d bytes on the heap, accounted as %d", grown, s.Stats().Bytes)
	}
	runtime.KeepAlive(s)
}

// TestProvenDisplaces fills the Store with both classes of sources.
func TestProvenDisplaces(t *testing.T) {
	provenNow := map[netip.Addr]bool{}
	s := NewStore(Limits{TotalBytes: 64 << 10}, func(addr netip.Addr) bool { return provenNow[addr] })
	datagram := ipfix(1, 1, setOf(2, flow(256, 3)))
	for i := range 1000 {
		learn(t, s, forged(i), datagram, start)
	}
	unproven := s.Stats().Sources
	provenNow[forged(0).Addr()] = true // the oldest, which has opened its connection since
	proof := func(i int) netip.AddrPort {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte{198, 51, byte(i >> 8), byte(i)}), 1)
	}
	for i := range 1000 {
		provenNow[proof(i).Addr()] = true
		learn(t, s, proof(i), datagram, start)
	}
	stats := s.Stats()
	if stats.ProvenSources != stats.Sources || stats.Displaced != uint64(unproven-1) || stats.RefusedTotal == 0 || stats.UnprovenBytes != 0 {
		t.Fatalf("%+v", stats)
	}
	if s.devices[forged(0).Addr()] == nil {
		t.Fatal("a source that has become proven was removed")
	}
	// An unproven one gets nothing now, and a proven one that has closed its connection keeps what it has.
	learn(t, s, router, datagram, start)
	provenNow[proof(0).Addr()] = false
	learn(t, s, proof(0), datagram, start)
	learn(t, s, proof(0), ipfix(1, 1, setOf(2, flow(256, 2))), start)
	if got := s.Stats(); got.Sources != stats.Sources || got.ProvenSources != stats.Sources-1 || got.Redefined != 1 {
		t.Fatalf("%+v", got)
	}
	provenNow[router.Addr()] = true
	// What a proven source cannot get removes nothing.
	learn(t, s, router, ipfix(1, 1, setOf(2, flow(256, 300))), start)
	if got := s.Stats(); got.Displaced != stats.Displaced || got.Sources != stats.Sources {
		t.Fatalf("%+v", got)
	}
	// The source without a connection goes when there is a use.
	learn(t, s, router, datagram, start)
	if s.devices[proof(0).Addr()] != nil || s.devices[router.Addr()] == nil {
		t.Fatalf("%+v", s.Stats())
	}
}

// TestNoLongerProven closes the connection of a source that has more than the share of the unproven ones.
func TestNoLongerProven(t *testing.T) {
	connected := true
	s := NewStore(Limits{TotalBytes: 4000, ReservedBytes: 3900}, func(netip.Addr) bool { return connected })
	learn(t, s, router, ipfix(1, 1, setOf(2, flow(256, 3))), start)
	connected = false
	learn(t, s, router, ipfix(1, 1, setOf(2, flow(256, 2))), start)
	if expect(t, s, "192.0.2.1:50000/1 256"); s.Stats().Redefined != 1 || s.Stats().ProvenSources != 0 {
		t.Fatalf("%+v", s.Stats())
	}
	learn(t, s, router, ipfix(1, 1, setOf(2, flow(256, 4))), start) // longer
	if expect(t, s); s.Stats().RefusedTotal != 1 {
		t.Fatalf("%+v", s.Stats())
	}
}

func TestHasTemplates(t *testing.T) {
	data := setOf(300, be16(1, 2))
	for name, test := range map[string]struct {
		datagram []byte
		want     bool
	}{
		"empty":                    {nil, false},
		"version only":             {be16(10), false},
		"IPFIX template":           {ipfix(1, 1, data, setOf(2)), true},
		"IPFIX options template":   {ipfix(1, 1, setOf(3)), true},
		"v9 template":              {v9(1, 1, 1, data, setOf(0)), true},
		"v9 options template":      {v9(1, 1, 1, setOf(1)), true},
		"IDs of the other version": {ipfix(1, 1, setOf(0), setOf(1)), false},
		"and the reverse":          {v9(1, 1, 1, setOf(2), setOf(3)), false},
		"data":                     {ipfix(1, 1, data), false},
		"set 32":                   {ipfix(1, 1, bytes.Repeat(data, 31), setOf(2)), true},
		"set 33":                   {ipfix(1, 1, bytes.Repeat(data, 32), setOf(2)), false},
		"after a set of 3 bytes":   {ipfix(1, 1, be16(300, 3), setOf(2)), false},
		"beyond the datagram":      {ipfix(1, 1, be16(300, 65535)), false},
		"header cut":               {ipfix(1, 1, be16(2)), false},
		"length not looked at":     {ipfix(1, 1, be16(2, 0)), true},
		"version 5":                {join(be16(5, 1), make([]byte, 60)), false},
	} {
		if got := HasTemplates(test.datagram); got != test.want {
			t.Errorf("%s: %t, want %t", name, got, test.want)
		}
	}
}
