// SPDX-License-Identifier: Apache-2.0

package packets

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"
	"unicode/utf8"
)

// pcapng is the content of a file, parsed according to the specification of the format, independently of Writer.
type pcapng struct {
	comment, program string
	interfaces       []string
	packets          []pcapngPacket
	drops            uint64
}

type pcapngPacket struct {
	at        time.Time
	name      string
	data      []byte
	length    uint32
	comment   string
	direction uint32 // 1 in, 2 out
}

type reader struct {
	b   []byte
	err error
}

func (r *reader) take(n int) []byte {
	if r.err == nil && n > len(r.b) {
		r.err = fmt.Errorf("%d bytes left, want %d", len(r.b), n)
	}
	if r.err != nil {
		return make([]byte, n)
	}
	b := r.b[:n]
	r.b = r.b[n:]
	return b
}

func (r *reader) u16() uint16 { return binary.LittleEndian.Uint16(r.take(2)) }
func (r *reader) u32() uint32 { return binary.LittleEndian.Uint32(r.take(4)) }

func (r *reader) options() map[uint16][]byte {
	all := make(map[uint16][]byte)
	for r.err == nil {
		code, length := r.u16(), int(r.u16())
		if code == 0 {
			if length != 0 || len(r.b) != 0 {
				r.err = errors.New("data after opt_endofopt")
			}
			return all
		}
		all[code] = r.take(length)
		r.take(-length & 3)
	}
	return all
}

func parse(b []byte) (*pcapng, error) {
	f := &pcapng{}
	for n := 0; len(b) > 0; n++ {
		head := &reader{b: b}
		kind, length := head.u32(), int(head.u32())
		if head.err != nil || length < 12 || length%4 != 0 || length > len(b) || binary.LittleEndian.Uint32(b[length-4:]) != uint32(length) {
			return nil, fmt.Errorf("block %d: length %d of %d bytes", n, length, len(b))
		}
		r := &reader{b: b[8 : length-4]}
		b = b[length:]
		if (kind == 0x0a0d0d0a) != (n == 0) {
			return nil, fmt.Errorf("block %d: type %#x", n, kind)
		}
		switch kind {
		case 0x0a0d0d0a:
			magic, version := r.u32(), r.u32()
			r.take(8)
			if magic != 0x1a2b3c4d || version != 1 {
				return nil, fmt.Errorf("magic %#x, version %#x", magic, version)
			}
			o := r.options()
			f.comment, f.program = string(o[1]), string(o[4])
		case 1:
			link, _, snap := r.u16(), r.u16(), r.u32()
			o := r.options()
			if link != 101 || snap != 192 || !bytes.Equal(o[9], []byte{9}) {
				return nil, fmt.Errorf("interface: link type %d, snapshot length %d, resolution %v", link, snap, o[9])
			}
			f.interfaces = append(f.interfaces, string(o[2]))
		case 6:
			var p pcapngPacket
			id := r.u32()
			p.at = time.Unix(0, int64(uint64(r.u32())<<32|uint64(r.u32()))).UTC()
			captured := r.u32()
			p.length = r.u32()
			if int(id) >= len(f.interfaces) || captured > 192 || captured > p.length {
				return nil, fmt.Errorf("packet: interface %d, %d of %d bytes", id, captured, p.length)
			}
			p.name = f.interfaces[id]
			p.data = r.take(int(captured))
			r.take(-int(captured) & 3)
			o := r.options()
			p.comment = string(o[1])
			if len(o[2]) == 4 {
				p.direction = binary.LittleEndian.Uint32(o[2])
			}
			f.packets = append(f.packets, p)
		case 5:
			r.take(12)
			f.drops = binary.LittleEndian.Uint64(append(r.options()[5], make([]byte, 8)...))
		default:
			return nil, fmt.Errorf("block %d: type %#x", n, kind)
		}
		if r.err != nil {
			return nil, fmt.Errorf("block %d of type %#x: %w", n, kind, r.err)
		}
	}
	return f, nil
}

func TestPcapng(t *testing.T) {
	s := newScript(t)
	s.send(1.5, sent{1, 10001, 1, FlagPSH})
	s.queueAt(2, sent{10001, 10001, 2, 0}, bond0)
	s.ack(12, 10001, 0)
	s.close()
	s.got = append(s.got, &Packet{Sent: &Sent{}}) // no header was captured
	var b bytes.Buffer
	w, err := NewWriter(&b, "192.0.2.1:1 -> 192.0.2.2:1790", "sockeye 1.0")
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range s.got {
		if err := w.Write(p); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(&Summary{LostEvents: 3}); err != nil {
		t.Fatal(err)
	}
	got, err := parse(b.Bytes())
	if err != nil {
		t.Fatal(err)
	}
	at := func(ms float64) time.Time { return time.Unix(0, int64(ms*1e6)).UTC() }
	want := &pcapng{
		comment: "192.0.2.1:1 -> 192.0.2.2:1790", program: "sockeye 1.0",
		interfaces: []string{"eth0", "bond0", "unknown"},
		packets: []pcapngPacket{
			{at(1.5), "eth0", s.got[0].Header, 10040, "qdisc 10 µs, driver to ACK 10.5 ms; 10 segments of 1000 bytes, split by the device", 2},
			{at(2), "bond0", s.got[1].Header, 40, "not passed to a driver", 2},
			{at(12), "unknown", s.got[2].Header, 40, "acknowledges packet 1, 10000 bytes", 1},
		},
		drops: 3,
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got\n%+v\nwant\n%+v", got, want)
	}
}

// TestPcapngFails checks that write errors are returned.
func TestPcapngFails(t *testing.T) {
	full := errors.New("full")
	for n := range 4 {
		left := n
		w, err := NewWriter(writerFunc(func(b []byte) (int, error) {
			if left--; left < 0 {
				return 0, full
			}
			return len(b), nil
		}), "", "")
		if err == nil {
			err = w.Write(&Packet{Header: make([]byte, 20)})
		}
		if err == nil {
			err = w.Close(&Summary{LostEvents: 1})
		}
		if !errors.Is(err, full) {
			t.Errorf("after %d blocks: %v", n, err)
		}
	}
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(b []byte) (int, error) { return f(b) }

// FuzzPcapng parses files written from arbitrary packets.
func FuzzPcapng(f *testing.F) {
	f.Add("eth0", "about", []byte{0x45, 1, 2}, 1500, int64(1e18), 7, true)
	f.Add("", "\xff\x00"+strings.Repeat("é", 40000), []byte{}, 0, int64(0), 0, false)
	f.Fuzz(func(t *testing.T, name, about string, header []byte, size int, at int64, index int, out bool) {
		header = header[:min(len(header), 192)]
		size = max(0, min(size, 1<<24))
		at = max(at, 0)
		p := &Packet{Interface: name, Index: index, Size: size, Time: time.Unix(0, at).UTC(), Header: header, Received: &Received{}}
		direction := uint32(1)
		if out {
			p.Sent, p.Received, direction = &Sent{Fate: Lost, Hops: []Hop{{Interface: name}, {Interface: about}}}, nil, 2
		}
		var b bytes.Buffer
		w, err := NewWriter(&b, about, name)
		if err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if err := w.Write(p); err != nil {
				t.Fatal(err)
			}
		}
		if err := w.Close(&Summary{}); err != nil {
			t.Fatal(err)
		}
		got, err := parse(b.Bytes())
		if err != nil {
			t.Fatal(err)
		}
		if !utf8.ValidString(got.comment) || len(about) < 1000 && utf8.ValidString(about) && got.comment != about {
			t.Errorf("comment %q, want %q", got.comment, about)
		}
		if len(header) == 0 {
			return
		}
		if len(got.packets) != 2 || len(got.interfaces) != 1 {
			t.Fatalf("%+v", got)
		}
		for _, g := range got.packets {
			if !g.at.Equal(p.Time) || !bytes.Equal(g.data, header) || int(g.length) != max(size, len(header)) || g.direction != direction || !utf8.ValidString(g.comment) {
				t.Errorf("got %+v, want %+v", g, p)
			}
		}
	})
}
