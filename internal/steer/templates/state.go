// SPDX-License-Identifier: Apache-2.0

package templates

import (
	"bufio"
	"bytes"
	"container/list"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"net/netip"
	"time"
)

// A state is a line with the version, the devices, and a CRC-32C of all before it. Integers are big-endian, times are
// nanoseconds since 1970. Devices are in the order of their last refresh, the unproven ones first.
//
//	device:   address (16), flags (1; 1 is proven), sessions (2)
//	session:  port (2), row (4), version (2), domain (4), next (4), seconds (4), uptime (4), seen (8), replayed (8),
//	          replays (8), templates (2)
//	template: options (1), learned (8), refreshed (8), length (2), record
const (
	stateHeader = "sockeye templates 1\n"
	stateSum    = 4 // bytes
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Save writes all templates in the order that Load keeps.
func (s *Store) Save(w io.Writer) error {
	if err := s.save(w); err != nil {
		return fmt.Errorf("save templates: %w", err)
	}
	return nil
}

func (s *Store) save(w io.Writer) error {
	sum := crc32.New(castagnoli)
	out := bufio.NewWriterSize(io.MultiWriter(w, sum), 64<<10)
	if _, err := out.WriteString(stateHeader); err != nil {
		return err
	}
	var b []byte
	for _, order := range []*list.List{s.unprovenOrder, s.provenOrder} {
		for element := order.Front(); element != nil; element = element.Next() {
			b = element.Value.(*device).append(b[:0])
			if _, err := out.Write(b); err != nil {
				return err
			}
		}
	}
	if err := out.Flush(); err != nil {
		return err
	}
	_, err := w.Write(binary.BigEndian.AppendUint32(nil, sum.Sum32()))
	return err
}

// append appends a device to a state.
func (d *device) append(b []byte) []byte {
	u16, u32, u64 := binary.BigEndian.AppendUint16, binary.BigEndian.AppendUint32, binary.BigEndian.AppendUint64
	addr := d.addr.As16()
	b = append(b, addr[:]...)
	b = append(b, flag(d.proven))
	b = u16(b, uint16(len(d.sessions)))
	for _, e := range d.sessions {
		b = u32(u16(u32(u16(b, e.port), uint32(e.row)), e.version), e.domain)
		b = u32(u32(u32(b, e.next), e.seconds), e.uptime)
		b = u64(u64(u64(b, uint64(e.seen)), uint64(e.replayed)), e.replays)
		b = u16(b, uint16(len(e.templates)))
		for i := range e.templates {
			t := &e.templates[i]
			b = append(b, flag(t.options))
			b = u64(u64(b, uint64(t.learned)), uint64(t.refreshed))
			b = u16(b, uint16(len(t.record)))
			b = append(b, t.record...)
		}
	}
	return b
}

func flag(set bool) byte {
	if set {
		return 1
	}
	return 0
}

var errDamaged = errors.New("damaged")

// reader reads integers from a state. After the end it returns zeros, and failed is set.
type reader struct {
	b      []byte
	failed bool
}

// Load replaces all templates by those of a state that Save has written. It drops templates whose lifetime is over at
// now, and refuses those that exceed the limits; times in the future become now. The counters of Stats stay, except
// those of refused templates. If the state is damaged or larger than Limits.TotalBytes, Load returns an error and
// changes nothing.
//
// A source that was proven when it was saved is proven until its next datagram.
func (s *Store) Load(r io.Reader, now time.Time) error {
	limit := s.limits.TotalBytes + len(stateHeader) + stateSum // a device takes fewer bytes in a state than in memory
	data, err := io.ReadAll(io.LimitReader(r, int64(limit)+1))
	if err != nil {
		return fmt.Errorf("load templates: %w", err)
	}
	if len(data) > limit {
		return fmt.Errorf("load templates: more than %d bytes", limit)
	}
	rest, ok := bytes.CutPrefix(data, []byte(stateHeader))
	if !ok {
		return errors.New("load templates: not a state of this version")
	}
	if len(rest) < stateSum {
		return fmt.Errorf("load templates: %w", errDamaged)
	}
	body := len(data) - stateSum
	if crc32.Checksum(data[:body], castagnoli) != binary.BigEndian.Uint32(data[body:]) {
		return fmt.Errorf("load templates: %w: wrong checksum", errDamaged)
	}
	loaded := NewStore(s.limits, s.isProven)
	in := reader{b: rest[:len(rest)-stateSum]}
	for len(in.b) > 0 {
		if err := loaded.loadDevice(&in, now.UnixNano()); err != nil {
			return fmt.Errorf("load templates: %w", err)
		}
	}
	s.replaceBy(loaded, now.UnixNano())
	return nil
}

// replaceBy replaces the contents by those of a loaded Store, which is not used afterwards.
func (s *Store) replaceBy(o *Store, now int64) {
	s.devices, s.provenOrder, s.unprovenOrder = o.devices, o.provenOrder, o.unprovenOrder
	s.stats.Sessions, s.stats.Templates = o.stats.Sessions, o.stats.Templates
	s.stats.Bytes, s.stats.UnprovenBytes = o.stats.Bytes, o.stats.UnprovenBytes
	s.stats.RefusedDevice += o.stats.RefusedDevice
	s.stats.RefusedTotal += o.stats.RefusedTotal
	s.changed(now)
}

func (r *reader) u8() byte    { return r.next(1)[0] }
func (r *reader) u16() uint16 { return binary.BigEndian.Uint16(r.next(2)) }
func (r *reader) u32() uint32 { return binary.BigEndian.Uint32(r.next(4)) }
func (r *reader) u64() uint64 { return binary.BigEndian.Uint64(r.next(8)) }

func (r *reader) next(n int) []byte {
	if len(r.b) < n {
		r.failed, r.b = true, nil
		return make([]byte, n)
	}
	taken := r.b[:n]
	r.b = r.b[n:]
	return taken
}

func (s *Store) loadDevice(r *reader, now int64) error {
	addr := netip.AddrFrom16([16]byte(r.next(16))).Unmap()
	proven := r.u8() != 0
	sessions := r.u16()
	if r.failed || sessions == 0 || s.devices[addr] != nil {
		return fmt.Errorf("%w: device %s", errDamaged, addr)
	}
	var last Session
	for i := range sessions {
		l := learner{Store: s, now: now, proven: proven, swept: true}
		port := r.u16()
		l.key = Session{Source: netip.AddrPortFrom(addr, port), Row: int(int32(r.u32())), Version: r.u16(), Domain: r.u32()}
		saved := session{next: r.u32(), seconds: r.u32(), uptime: r.u32(), seen: r.time(now), replayed: r.time(now), replays: r.u64()}
		templates := r.u16()
		valid := l.key.Version == NetFlow9 || l.key.Version == IPFIX
		if r.failed || !valid || templates == 0 || i > 0 && last.compare(l.key) >= 0 {
			return fmt.Errorf("%w: session %v", errDamaged, l.key)
		}
		last = l.key
		if err := l.loadTemplates(r, int(templates)); err != nil {
			return err
		}
		if _, e := l.find(); e != nil {
			e.next, e.seconds, e.uptime = saved.next, saved.seconds, saved.uptime
			e.seen, e.replayed, e.replays = saved.seen, saved.replayed, saved.replays
		}
	}
	return nil
}

func (l *learner) loadTemplates(r *reader, n int) error {
	last := 0
	for range n {
		options := r.u8() != 0
		learned, refreshed := r.time(l.now), r.time(l.now)
		raw := r.next(int(r.u16()))
		if r.failed || len(raw) < 4 {
			return fmt.Errorf("%w: template of %v", errDamaged, l.key)
		}
		rec, err := parseRecord(l.key.Version, options, raw)
		if err != nil || len(rec.raw) != len(raw) || rec.fields == 0 || int(rec.id) <= last {
			return fmt.Errorf("%w: template %d of %v", errDamaged, rec.id, l.key)
		}
		last = int(rec.id)
		if l.now-refreshed >= int64(l.limits.Lifetime) {
			continue
		}
		l.stamp = refreshed
		l.put(rec)
		if _, e := l.find(); e != nil {
			if i, ok := e.template(rec.id); ok {
				e.templates[i].learned = learned
			}
		}
	}
	return nil
}

// time reads a time, and returns now for a time in the future or before 1970.
func (r *reader) time(now int64) int64 {
	if t := int64(r.u64()); t >= 0 && t < now {
		return t
	}
	return now
}
