// SPDX-License-Identifier: Apache-2.0

package templates

import (
	"bytes"
	"net/netip"
	"testing"
	"time"
)

func seeds() [][]byte {
	return [][]byte{
		ipfix(7, 100, setOf(2, flow(256, 3), flow(257, 2)), setOf(3, ipfixOptions, padding), setOf(256, make([]byte, 24))),
		ipfix(7, 100, setOf(2, be16(256, 0, 257, 0)), setOf(3, be16(3, 0))),
		ipfix(7, 100, setOf(2, be16(2, 0)), setOf(2, join(be16(256, 2), be16(82, 65535, 1, 0))), setOf(256, []byte{2, 1, 1, 0})),
		v9(7, 100, 5_000_000, setOf(0, flow(256, 1)), setOf(1, v9Options, padding), setOf(300, make([]byte, 9))),
		v9(7, 100, 5, setOf(0, flow(256, 1), be16(257, 0))),
		ipfix(1, 1, setOf(2, be16(256, 65535, 1, 4))),
	}
}

// FuzzLearn learns two datagrams, the second of which may be cut, in a small Store with other devices.
func FuzzLearn(f *testing.F) {
	for i, seed := range seeds() {
		f.Add(seed, seeds()[(i+1)%len(seeds())], uint8(i), int64(time.Minute)<<(3*i))
	}
	f.Fuzz(func(t *testing.T, first, second []byte, flags uint8, elapsed int64) {
		proven := func(addr netip.Addr) bool { return addr.Is4() == (flags&1 == 0) }
		s := NewStore(Limits{TotalBytes: 4000, DeviceBytes: 2000, Sessions: 3}, proven)
		at := start
		for i := range 4 {
			learn(t, s, forged(i), ipfix(1, 1, setOf(2, flow(256, 3))), at)
		}
		sources := []netip.AddrPort{router, another}
		for i, datagram := range [][]byte{first, second, first} {
			source := sources[int(flags)>>(i+1)&1]
			before := s.Stats()
			err := s.Learn(source, i&int(flags>>4), datagram, at)
			check(t, s)
			after := s.Stats()
			if err != nil && (before.Templates != after.Templates || before.Learned != after.Learned) {
				t.Fatalf("a malformed datagram has changed %+v to %+v", before, after)
			}
			if after.Learned > before.Learned && !HasTemplates(datagram) && len(datagram) < 16+4*maxFilterSets {
				t.Fatal("HasTemplates overlooks a template set")
			}
			at = at.Add(time.Duration(elapsed % int64(24*time.Hour)))
		}
		for _, source := range sources {
			for _, size := range []int{0, 100} {
				again := NewStore(Limits{}, nil)
				for _, m := range s.Replay(source.Addr(), at, size, nil) {
					if err := again.Learn(m.Source, m.Row, m.Data, at); err != nil {
						t.Fatalf("replay of %x: %v", m.Data, err)
					}
				}
				s.Expire(at)
				check(t, s)
				want := ids(s)
				got := 0
				for template := range again.List() {
					if template.Source.Addr() != source.Addr() {
						t.Fatalf("replay of %v", template)
					}
					got++
				}
				n := 0
				for template := range s.List() {
					if template.Source.Addr() == source.Addr() {
						n++
						if len(template.FieldList()) != template.Fields {
							t.Fatalf("%+v has fields %v", template, template.FieldList())
						}
					}
				}
				if n != got {
					t.Fatalf("%d templates of %s replayed, want %d of %q", got, source, n, want)
				}
			}
		}
		state := saved(t, s)
		loaded := NewStore(s.limits, proven)
		if err := loaded.Load(bytes.NewReader(state), at.Add(time.Second)); err != nil {
			t.Fatal(err)
		}
		check(t, loaded)
	})
}

// FuzzLoad loads bytes as they are, and as the body of a state with the right checksum.
func FuzzLoad(f *testing.F) {
	state := saved(f, example(f))
	f.Add(state)
	f.Add(state[len(stateHeader) : len(state)-stateSum])
	f.Add([]byte(stateHeader))
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, state := range [][]byte{b, summed(b)} {
			for _, limits := range []Limits{{}, {TotalBytes: 3000, DeviceBytes: 1000, Sessions: 2}} {
				s := NewStore(limits, nil)
				if err := s.Load(bytes.NewReader(state), start.Add(time.Hour)); err != nil {
					if len(listed(s)) != 0 {
						t.Fatal("a damaged state was loaded in part")
					}
					continue
				}
				check(t, s)
				for template := range s.List() {
					s.Replay(template.Source.Addr(), start.Add(time.Hour), 0, nil)
				}
				again := NewStore(limits, nil)
				if err := again.Load(bytes.NewReader(saved(t, s)), start.Add(time.Hour)); err != nil {
					t.Fatal(err)
				}
				if !bytes.Equal(saved(t, s), saved(t, again)) {
					t.Fatal("the second state differs from the first")
				}
			}
		}
	})
}

func BenchmarkLearn(b *testing.B) {
	var many [][]byte
	for id := range uint16(20) {
		many = append(many, flow(256+id, 15))
	}
	refresh := ipfix(7, 100, setOf(2, many...), setOf(3, ipfixOptions))
	b.Run("refresh", func(b *testing.B) { benchmarkLearn(b, refresh) })
	// Each operation of the others is one of 1400 bytes at a device that has as many templates as it may.
	hostile := func(name string, record func(i uint16) []byte) {
		b.Run(name, func(b *testing.B) {
			var fill, records [][]byte
			for i := range uint16(500) {
				fill = append(fill, flow(60000+i, 1))
			}
			for i, n := uint16(0), 0; n+20 < 1400; i++ {
				records = append(records, record(i))
				n += len(records[i])
			}
			benchmarkLearn(b, ipfix(7, 100, setOf(2, records...)), ipfix(7, 100, setOf(2, records...), setOf(2, fill...)))
		})
	}
	hostile("define and withdraw", func(i uint16) []byte { return join(flow(50000-i, 1), be16(50000-i, 0)) })
	hostile("withdraw unknown", func(i uint16) []byte { return be16(50000-i, 0) })
	hostile("refuse", func(i uint16) []byte { return flow(50000-i, 1) })
	hostile("redefine two", func(i uint16) []byte { return flow(50000, int(i)%3+1) })
}

// benchmarkLearn learns all datagrams once, and then the first one again and again.
func benchmarkLearn(b *testing.B, datagrams ...[]byte) {
	s := NewStore(Limits{}, nil)
	for _, datagram := range datagrams {
		learnUnchecked(b, s, router, datagram, start)
	}
	b.ReportAllocs()
	b.SetBytes(int64(len(datagrams[0])))
	for b.Loop() {
		learnUnchecked(b, s, router, datagrams[0], start)
	}
}

func BenchmarkHasTemplates(b *testing.B) {
	datagrams := map[string][]byte{
		"first":   ipfix(7, 100, setOf(2, flow(256, 15))),
		"none":    ipfix(7, 100, setOf(256, make([]byte, 1300))),
		"32 sets": ipfix(7, 100, bytes.Repeat(setOf(256, make([]byte, 32)), 40)),
	}
	for name, datagram := range datagrams {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				HasTemplates(datagram)
			}
		})
	}
}
