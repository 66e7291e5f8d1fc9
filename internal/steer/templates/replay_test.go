// SPDX-License-Identifier: Apache-2.0

package templates

import (
	"bytes"
	"encoding/binary"
	"maps"
	"net/netip"
	"reflect"
	"testing"
	"time"

	"github.com/netsampler/goflow2/v2/decoders/netflow"
)

// decoded is what an independent decoder knows after messages.
type decoded struct {
	templates netflow.NetFlowTemplateSystem
	v9        []netflow.NFv9Packet
	ipfix     []netflow.IPFIXPacket
}

func decode(t *testing.T, datagrams ...[]byte) *decoded {
	t.Helper()
	d := &decoded{templates: netflow.CreateTemplateSystem()}
	for _, datagram := range datagrams {
		var v9 netflow.NFv9Packet
		var ipfix netflow.IPFIXPacket
		if err := netflow.DecodeMessageVersion(bytes.NewBuffer(datagram), d.templates, &v9, &ipfix); err != nil {
			t.Fatal(err)
		}
		if v9.Version == 9 {
			d.v9 = append(d.v9, v9)
		} else {
			d.ipfix = append(d.ipfix, ipfix)
		}
	}
	return d
}

func data(messages []Message) (all [][]byte) {
	for _, m := range messages {
		all = append(all, m.Data)
	}
	return all
}

// TestReplayDecoded sends the same datagrams and their replay to a decoder, which must learn the same templates.
func TestReplayDecoded(t *testing.T) {
	var many [][]byte
	for id := range uint16(200) {
		many = append(many, flow(1000+id, 1+int(id)%30))
	}
	originals := [][]byte{
		ipfix(7, 100, setOf(2, flow(256, 3), flow(257, 2)), setOf(3, ipfixOptions)),
		ipfix(8, 100, setOf(2, many...)),
		ipfix(9, 100, setOf(2, join(be16(256, 3), be16(0x8000|7, 65535), be32(9), be16(82, 65535), be16(1, 8)))),
		v9(7, 100, 5000, setOf(0, flow(256, 1)), setOf(1, v9Options, padding), setOf(0, flow(258, 400))),
		v9(8, 100, 5000, setOf(1, v9Options, padding)),
	}
	s := NewStore(Limits{}, nil)
	for _, datagram := range originals {
		learn(t, s, router, datagram, start)
	}
	want := decode(t, originals...).templates.GetTemplates()
	for _, size := range []int{1, 200, 500, 0, 9000, 1 << 20} {
		sent := s.Replay(router.Addr(), start, size, nil)
		if got := decode(t, data(sent)...).templates.GetTemplates(); !reflect.DeepEqual(got, want) {
			t.Fatalf("size %d: the decoder has\n%v, want\n%v", size, got, want)
		}
		if size == 0 {
			size = DefaultMessageSize
		}
		again := NewStore(Limits{}, nil)
		for _, m := range sent {
			records := 0
			parsed, err := parseMessage(m.Data)
			if err != nil {
				t.Fatal(err)
			}
			if err := parsed.parse(func(record) { records++ }, func(set) {}); err != nil {
				t.Fatal(err)
			}
			if records == 0 || len(m.Data) > size && records > 1 || len(m.Data) > maxMessage {
				t.Errorf("size %d: a message of %d bytes has %d templates", size, len(m.Data), records)
			}
			if m.Source != router || !HasTemplates(m.Data) {
				t.Errorf("message %+v", m)
			}
			learn(t, again, m.Source, m.Data, start)
		}
		for i, template := range listed(again) {
			if template != listed(s)[i] {
				t.Fatalf("%+v, want %+v", template, listed(s)[i])
			}
		}
	}
}

// TestReplayBytes compares whole messages.
func TestReplayBytes(t *testing.T) {
	s := NewStore(Limits{}, nil)
	learn(t, s, router, ipfix(7, 100, setOf(3, ipfixOptions, padding), setOf(2, flow(257, 2)), setOf(2, flow(256, 1))), start)
	learn(t, s, another, v9(7, 100, 5000, setOf(1, v9Options, padding), setOf(0, flow(256, 1))), start)
	at := start.Add(90*time.Second + 500*time.Millisecond)
	got := s.Replay(router.Addr(), at, 0, nil)
	want := ipfix(7, 100, setOf(2, flow(256, 1), flow(257, 2)), setOf(3, ipfixOptions))
	binary.BigEndian.PutUint32(want[4:], 1_700_000_090)
	if len(got) != 1 || !bytes.Equal(got[0].Data, want) {
		t.Fatalf("got %x, want %x", data(got), want)
	}
	got = s.Replay(another.Addr(), at, 0, nil)
	want = v9(7, 100, 95_500, setOf(0, flow(256, 1)), setOf(1, v9Options, padding))
	binary.BigEndian.PutUint32(want[8:], 1_700_000_090)
	if len(got) != 1 || !bytes.Equal(got[0].Data, want) {
		t.Fatalf("got %x, want %x", data(got), want)
	}
	// A clock that stepped back does not turn the times back.
	got = s.Replay(router.Addr(), start.Add(-time.Hour), 0, nil)
	if at := binary.BigEndian.Uint32(got[0].Data[4:]); at != 1_700_000_000 {
		t.Fatalf("export time %d", at)
	}
}

func TestReplaySequences(t *testing.T) {
	variable := join(be16(400, 2), be16(82, 65535), be16(1, 2))
	long := join([]byte{255}, be16(300), make([]byte, 300), be16(1))
	zero := join(be16(401, 2), be16(82, 65535), be16(1, 0))
	for name, test := range map[string]struct {
		sets []([]byte)
		want uint32
	}{
		"no data":             {[][]byte{setOf(2, flow(256, 2))}, 100},
		"3 records":           {[][]byte{setOf(2, flow(256, 2)), setOf(256, make([]byte, 24))}, 103},
		"records and padding": {[][]byte{setOf(2, flow(256, 2)), setOf(256, make([]byte, 23))}, 102},
		"several sets":        {[][]byte{setOf(256, make([]byte, 8)), setOf(2, flow(256, 2)), setOf(256, make([]byte, 8))}, 100},
		"unknown template":    {[][]byte{setOf(2, flow(256, 2)), setOf(256, make([]byte, 24)), setOf(900, be32(1))}, 100},
		"options data":        {[][]byte{setOf(3, join(be16(256, 2, 1), be16(149, 4, 34, 4))), setOf(256, make([]byte, 16))}, 102},
		"variable length":     {[][]byte{setOf(2, variable), setOf(400, []byte{2, 'a', 'b', 0, 1, 0, 0, 1}, long, []byte{0, 0})}, 103},
		"beyond the set":      {[][]byte{setOf(2, variable), setOf(400, []byte{9, 'a', 'b', 0, 1})}, 100},
		"length cut":          {[][]byte{setOf(2, variable), setOf(400, []byte{255, 1, 0})}, 100},
		"with empty fields":   {[][]byte{setOf(2, zero), setOf(401, []byte{0, 1, 7, 0})}, 103},
		"less than a record":  {[][]byte{setOf(2, flow(256, 2)), setOf(256, be32(1))}, 100},
		"fields without end":  {[][]byte{setOf(2, join(be16(256, 4001, 1, 65535), bytes.Repeat(be16(1, 0), 4000))), setOf(256, make([]byte, 20000))}, 100},
	} {
		t.Run(name, func(t *testing.T) {
			s := NewStore(Limits{}, nil)
			learn(t, s, router, ipfix(7, 100, test.sets...), start)
			sent := s.Replay(router.Addr(), start, 0, nil)
			if _, domain, got, ok := Sequence(sent[0].Data); !ok || domain != 7 || got != test.want {
				t.Fatalf("sequence number %d of domain %d, want %d", got, domain, test.want)
			}
		})
	}
}

// TestReplaySeveral checks the numbers of several messages of one session, and those that the caller supplies.
func TestReplaySeveral(t *testing.T) {
	s := NewStore(Limits{}, nil)
	sets := setOf(2, flow(256, 50), flow(257, 50), flow(258, 50))
	sets9 := setOf(0, flow(256, 50), flow(257, 50), flow(258, 50))
	learn(t, s, router, ipfix(1, 4_000_000_000, sets), start)
	learn(t, s, router, ipfix(2, 100, sets), start)
	learn(t, s, router, v9(1, 4_000_000_000, 1, sets9), start)
	learn(t, s, router, v9(2, 0, 1, sets9), start)
	follows := ipfix(1, 77, setOf(256, make([]byte, 200)))
	version, domain, sequence, ok := Sequence(follows)
	if !ok {
		t.Fatal("no sequence number")
	}
	next := map[Session]uint32{
		{Source: router, Version: version, Domain: domain}: sequence,
		{Source: router, Version: NetFlow9, Domain: 1}:     5000,
	}
	var got []uint32
	for _, m := range s.Replay(router.Addr(), start, 300, next) {
		_, _, sequence, _ := Sequence(m.Data)
		got = append(got, sequence)
	}
	want := []uint32{4997, 4998, 4999, 1<<32 - 2, 1<<32 - 1, 0, 77, 77, 77, 100, 100, 100}
	if !reflect.DeepEqual(got, want) {
		t.Fatalf("sequence numbers %d, want %d", got, want)
	}
	for _, b := range [][]byte{nil, be16(10), make([]byte, 40), v9(1, 1, 1)[:19]} {
		if _, _, _, ok := Sequence(b); ok {
			t.Errorf("%x has a sequence number", b)
		}
	}
}

func TestReplayed(t *testing.T) {
	s := NewStore(Limits{}, nil)
	learn(t, s, router, ipfix(1, 1, setOf(2, flow(256, 3))), start)
	if err := s.Learn(router, 1, ipfix(1, 1, setOf(2, flow(256, 3))), start); err != nil {
		t.Fatal(err)
	}
	revision := s.Revision()
	s.Replayed(router.Addr(), 1, start.Add(time.Minute))
	s.Replayed(router.Addr(), 1, start.Add(time.Hour))
	s.Replayed(another.Addr(), 1, start)
	got := listed(s)
	if got[0].Replays != 0 || !got[0].Replayed.IsZero() || got[1].Replays != 2 || !got[1].Replayed.Equal(start.Add(time.Hour)) || s.Revision() != revision {
		t.Fatalf("%+v", got)
	}
	if s.Replay(another.Addr(), start, 0, nil) != nil {
		t.Fatal("messages of an unknown device")
	}
}

// TestAdopt is that a Store takes the templates of another one, without those that it has received later itself, and that the order in which
// it takes those of several Stores has no effect.
func TestAdopt(t *testing.T) {
	now := start.Add(time.Hour)
	old, mid, recent := start, start.Add(10*time.Minute), start.Add(20*time.Minute)
	adopt := func(to, from *Store) {
		t.Helper()
		for _, m := range from.Replay(router.Addr(), now, 0, nil) {
			if err := to.Insert(m.Source, m.Row, m.Data, m.Refreshed, now); err != nil {
				t.Fatal(err)
			}
		}
		check(t, to)
	}
	fields := func(s *Store) map[uint16]int {
		n := make(map[uint16]int)
		for e := range s.List() {
			n[e.ID] = e.Fields
		}
		return n
	}
	// Two hosts had the exporter before this one: the first one knows an earlier definition of 256, and both know others.
	first, second := NewStore(Limits{}, nil), NewStore(Limits{}, nil)
	learn(t, first, router, ipfix(1, 0, setOf(2, flow(256, 1), flow(257, 1))), old)
	learn(t, second, router, ipfix(1, 0, setOf(2, flow(256, 2), flow(258, 2))), mid)
	for _, order := range [][]*Store{{first, second}, {second, first}} {
		s := NewStore(Limits{}, nil)
		learn(t, s, router, ipfix(1, 0, setOf(2, flow(258, 3))), recent)
		expected := s.devices[router.Addr()].sessions[0].next
		for _, from := range order {
			adopt(s, from)
		}
		if want := map[uint16]int{256: 2, 257: 1, 258: 3}; !maps.Equal(fields(s), want) {
			t.Errorf("fields by ID: %v, want %v", fields(s), want)
		}
		if got := s.devices[router.Addr()].sessions[0].next; got != expected {
			t.Errorf("the next sequence number is %d, and was %d", got, expected)
		}
	}
	// The definition of the first one has changed since.
	s := NewStore(Limits{}, nil)
	adopt(s, first)
	if since := now.Add(time.Nanosecond); s.LearnedSince(router.Addr(), since) || !s.LearnedSince(router.Addr(), now) || s.LearnedSince(netip.MustParseAddr("192.0.2.200"), start) {
		t.Error("templates are learned when they are adopted")
	}
	learn(t, first, router, ipfix(1, 0, setOf(2, flow(256, 5))), recent)
	adopt(s, first)
	if got := fields(s)[256]; got != 5 {
		t.Errorf("%d fields, want those of the later definition", got)
	}
	// A NetFlow v9 exporter that has restarted since.
	v, before := NewStore(Limits{}, nil), NewStore(Limits{}, nil)
	learn(t, before, router, v9(1, 0, 900_000_000, setOf(0, flow(256, 1))), old)
	learn(t, v, router, v9(1, 0, 1000, setOf(0, flow(256, 2))), recent)
	adopt(v, before)
	learn(t, v, router, v9(1, 0, 2000, setOf(0, flow(257, 2))), now)
	if want := map[uint16]int{256: 2, 257: 2}; !maps.Equal(fields(v), want) {
		t.Errorf("fields by ID: %v, want %v", fields(v), want)
	}
	// A session of several messages: the sequence number of the last one counts.
	many, copied := NewStore(Limits{}, nil), NewStore(Limits{}, nil)
	for id := range uint16(20) {
		learn(t, many, router, v9(1, uint32(id), 1000, setOf(0, flow(256+id, 60))), recent)
	}
	if n := len(many.Replay(router.Addr(), now, 0, nil)); n < 3 {
		t.Fatalf("%d messages", n)
	}
	adopt(copied, many)
	if got, want := copied.devices[router.Addr()].sessions[0].next, many.devices[router.Addr()].sessions[0].next; got != want || len(fields(copied)) != 20 {
		t.Errorf("the next sequence number is %d, want %d, with %d templates", got, want, len(fields(copied)))
	}
	// What other hosts say about ages is not trusted.
	one := first.Replay(router.Addr(), now, 0, nil)[0]
	for _, refreshed := range []time.Time{now.Add(-DefaultLifetime), now.Add(-1 << 62), now.Add(1 << 62)} {
		s := NewStore(Limits{}, nil)
		if err := s.Insert(one.Source, one.Row, one.Data, refreshed, now); err != nil {
			t.Fatal(err)
		}
		for e := range s.List() {
			if e.Refreshed.After(now) || now.Sub(e.Refreshed) >= DefaultLifetime {
				t.Errorf("refreshed at %v: kept with %v", refreshed, e.Refreshed)
			}
		}
	}
	if err := s.Insert(router, 0, []byte("rubbish"), now, now); err == nil {
		t.Error("rubbish is adopted")
	}
}
