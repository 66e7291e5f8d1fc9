// SPDX-License-Identifier: Apache-2.0

package templates

import (
	"encoding/binary"
	"net/netip"
	"time"
)

// DefaultMessageSize is the size of replayed messages in bytes, which fit into a packet of 1500 bytes with IPv6.
const DefaultMessageSize = 1400

const (
	// maxMessage is the size of a message with a single large record in bytes.
	maxMessage = 65000
	// maxRecord is the longest template record in bytes that a message has room for.
	maxRecord = maxMessage - headerSize9 - setHeader - 3 // padding
)

// Message is a datagram to send from Session.Source to the listener of Session.Row.
type Message struct {
	Session
	Data []byte
	// Refreshed is when the exporter has sent a template of the message last, for [Store.Insert].
	Refreshed time.Time
}

// Replay returns messages that teach a collector all templates of a source address, in the order of the sessions. A
// message has at most size bytes, or [DefaultMessageSize] if size is 0; a single record that is longer has a message of
// its own of up to 65,000 bytes. It contains template sets, then options template sets, and no data.
//
// The times in the headers are those of the last message from which templates were learned, advanced by the time since.
//
// A collector derives losses from sequence numbers, so a replay must fit the message that the collector receives next
// from the exporter. next contains the sequence numbers of these messages, as [Sequence] reads them, if the caller has
// them; the expected number of a session without an entry is computed from the last message with templates. It is
// exact if no message has followed, and too low otherwise, so that the collector reports losses once.
//
//   - The sequence number of IPFIX counts data records before the message (RFC 7011 section 3.1). Messages without data do
//     not advance it: all messages of a session carry the expected number. It is computed from the last message and the
//     number of data records in it; if these cannot be counted, because their template is not known, they count as none.
//   - The sequence number of NetFlow v9 counts messages (RFC 3954 section 5.1). The n messages of a session carry the n
//     numbers before the expected one, so that the exporter's next message follows without a gap.
func (s *Store) Replay(addr netip.Addr, now time.Time, size int, next map[Session]uint32) []Message {
	d := s.devices[normalize(addr)]
	if d == nil {
		return nil
	}
	if size <= 0 {
		size = DefaultMessageSize
	}
	var messages []Message
	for _, e := range d.sessions {
		expected, ok := next[e.key(d.addr)]
		if !ok {
			expected = e.next
		}
		sent := e.encode(min(size, maxMessage), now.UnixNano(), s.limits.Lifetime)
		for i, m := range sent {
			sequence := expected
			if e.version == NetFlow9 {
				sequence -= uint32(len(sent) - i)
			}
			binary.BigEndian.PutUint32(m.Data[headerSize(e.version)-8:], sequence) // the last but one field of both headers
			m.Session = e.key(d.addr)
			messages = append(messages, m)
		}
	}
	return messages
}

// Replayed notes that the messages for the listener of a row have been sent. It does not change the revision.
func (s *Store) Replayed(addr netip.Addr, row int, when time.Time) {
	d := s.devices[normalize(addr)]
	if d == nil {
		return
	}
	for _, e := range d.sessions {
		if int(e.row) == row {
			e.replayed = when.UnixNano()
			e.replays++
		}
	}
}

// writer builds the messages of a session.
type writer struct {
	*session
	elapsed  int64 // nanoseconds since the last message
	messages []Message
	message  []byte // being built, or empty
	set      int    // index of its open set, or 0
	options  bool   // the open set is for options templates
	count    uint16 // records in the message
	newest   int64  // last refresh of a record
}

// encode returns the templates that have not expired as messages without session and sequence numbers.
func (e *session) encode(size int, now int64, lifetime time.Duration) []Message {
	w := writer{session: e, elapsed: max(0, now-e.seen)}
	for _, options := range []bool{false, true} {
		for i := range e.templates {
			if t := &e.templates[i]; t.options == options && now-t.refreshed < int64(lifetime) {
				w.add(t, size)
			}
		}
	}
	w.endMessage()
	return w.messages
}

func (w *writer) add(t *template, size int) {
	if w.set != 0 && w.options != t.options {
		w.endSet()
	}
	need := len(t.record) + 3 // padding
	if w.set == 0 {
		need += setHeader
	}
	if len(w.message)+need > size {
		w.endMessage()
	}
	if len(w.message) == 0 {
		w.startMessage()
	}
	if w.set == 0 {
		id := uint16(0) // NetFlow v9
		if w.version == IPFIX {
			id = 2
		}
		if t.options {
			id++
		}
		w.set, w.options = len(w.message), t.options
		w.message = binary.BigEndian.AppendUint16(w.message, id)
		w.message = binary.BigEndian.AppendUint16(w.message, 0)
	}
	w.message = append(w.message, t.record...)
	w.count++
	w.newest = max(w.newest, t.refreshed)
}

// startMessage appends a header without length, count and sequence number.
func (w *writer) startMessage() {
	b := binary.BigEndian.AppendUint16(w.message, w.version)
	b = binary.BigEndian.AppendUint16(b, 0)
	if w.version == NetFlow9 {
		b = binary.BigEndian.AppendUint32(b, w.uptime+uint32(w.elapsed/int64(time.Millisecond)))
	}
	b = binary.BigEndian.AppendUint32(b, w.seconds+uint32(w.elapsed/int64(time.Second)))
	b = binary.BigEndian.AppendUint32(b, 0)
	w.message = binary.BigEndian.AppendUint32(b, w.domain)
}

func (w *writer) endMessage() {
	if len(w.message) == 0 {
		return
	}
	if w.set != 0 {
		w.endSet()
	}
	length := uint16(len(w.message))
	if w.version == NetFlow9 {
		length = w.count
	}
	binary.BigEndian.PutUint16(w.message[2:], length)
	w.messages = append(w.messages, Message{Data: w.message, Refreshed: fromNano(w.newest)})
	w.message, w.count, w.newest = nil, 0, 0
}

// endSet writes the length of the set. Only version 9 has padding: RFC 3954 section 6.1 asks for it, and some IPFIX
// collectors take it for a record.
func (w *writer) endSet() {
	for w.version == NetFlow9 && len(w.message)%4 != 0 {
		w.message = append(w.message, 0)
	}
	binary.BigEndian.PutUint16(w.message[w.set+2:], uint16(len(w.message)-w.set))
	w.set = 0
}
