// SPDX-License-Identifier: Apache-2.0

package templates

import "encoding/binary"

// Versions of the export protocols, as in the first two bytes of a message.
const (
	NetFlow9 = 9  // RFC 3954
	IPFIX    = 10 // RFC 7011
)

const (
	maxDatagram = 65535 // bytes, the largest UDP datagram and more

	headerSize9  = 20 // bytes, RFC 3954 section 5.1
	headerSize10 = 16 // bytes, RFC 7011 section 3.1
	setHeader    = 4  // bytes, both versions

	firstID = 256 // the smallest template ID, which is also the smallest ID of a data set

	// variableLength is the field length of an information element of variable length (RFC 7011 section 7).
	variableLength = 65535

	// maxFilterSets is the number of sets that HasTemplates looks at, as the BPF program does.
	maxFilterSets = 32
)

// Malformed is the reason why a datagram was discarded as a whole, as RFC 7011 section 9 demands.
type Malformed uint8

// Reasons, in the order of [Stats.Malformed].
const (
	TooShort   Malformed = iota // shorter than the header of a message
	TooLong                     // longer than a UDP datagram can be
	BadVersion                  // neither NetFlow v9 nor IPFIX
	BadLength                   // an IPFIX message longer than its datagram, or shorter than its header
	BadSet                      // a set shorter than its header, or longer than the rest of the message
	BadID                       // a template ID below 256
	Truncated                   // a template record longer than its set
	BadScope                    // an options template with more scope fields than fields, or lengths not multiples of 4
	numReasons = iota
)

var reasonNames = [numReasons]string{
	"too_short", "too_long", "bad_version", "bad_length", "bad_set", "bad_id", "truncated", "bad_scope",
}

func (m Malformed) Error() string { return "malformed datagram: " + m.String() }

// String returns the reason as a metric's label.
func (m Malformed) String() string {
	if int(m) < len(reasonNames) {
		return reasonNames[m]
	}
	return "unknown"
}

// Sequence returns version, observation domain ID (source ID of NetFlow v9) and sequence number of a datagram. ok is
// false if the datagram has no header of NetFlow v9 or IPFIX. The sets are not looked at.
func Sequence(datagram []byte) (version uint16, domain, sequence uint32, ok bool) {
	m, err := parseMessage(datagram)
	return m.version, m.domain, m.sequence, err == nil
}

// message is a NetFlow v9 packet or an IPFIX message with a valid header.
type message struct {
	version  uint16
	domain   uint32 // observation domain ID, or source ID of version 9
	sequence uint32
	seconds  uint32 // export time, since 1970
	uptime   uint32 // milliseconds since the exporter started; version 9 only
	sets     []byte
}

// parseMessage reads the header. Bytes after the length of an IPFIX message are ignored. The count of a NetFlow v9
// header is ignored, because exporters disagree on what it counts.
func parseMessage(b []byte) (message, error) {
	switch {
	case len(b) < 2:
		return message{}, TooShort
	case len(b) > maxDatagram:
		return message{}, TooLong
	}
	u32 := func(at int) uint32 { return binary.BigEndian.Uint32(b[at:]) }
	switch m := (message{version: binary.BigEndian.Uint16(b)}); m.version {
	case NetFlow9:
		if len(b) < headerSize9 {
			return message{}, TooShort
		}
		m.uptime, m.seconds, m.sequence, m.domain, m.sets = u32(4), u32(8), u32(12), u32(16), b[headerSize9:]
		return m, nil
	case IPFIX:
		if len(b) < headerSize10 {
			return message{}, TooShort
		}
		length := int(binary.BigEndian.Uint16(b[2:]))
		if length < headerSize10 || length > len(b) {
			return message{}, BadLength
		}
		m.seconds, m.sequence, m.domain, m.sets = u32(4), u32(8), u32(12), b[headerSize10:length]
		return m, nil
	}
	return message{}, BadVersion
}

// HasTemplates reports whether a template set or an options template set is among the first 32 sets of a datagram. It
// is the reference for the BPF program that selects the datagrams for [Store.Learn]: it walks to the end of the
// datagram, reads no other field of the header than the version, and does not look into the set that it finds.
func HasTemplates(datagram []byte) bool {
	if len(datagram) < 2 {
		return false
	}
	version := binary.BigEndian.Uint16(datagram)
	if version != NetFlow9 && version != IPFIX {
		return false
	}
	at := headerSize(version)
	for range maxFilterSets {
		if at > len(datagram)-setHeader {
			return false
		}
		id, length := binary.BigEndian.Uint16(datagram[at:]), binary.BigEndian.Uint16(datagram[at+2:])
		if isTemplates, _ := templateSet(version, id); isTemplates {
			return true
		}
		if length < setHeader {
			return false
		}
		at += int(length)
	}
	return false
}

func headerSize(version uint16) int {
	if version == NetFlow9 {
		return headerSize9
	}
	return headerSize10
}

// set is a set of a message, called FlowSet by RFC 3954.
type set struct {
	id   uint16
	body []byte // with padding
}

// record is a template record or an options template record. A record without fields is a withdrawal.
type record struct {
	id      uint16 // below firstID for the withdrawal of all templates of the kind
	options bool
	raw     []byte // as in the datagram, without padding
	fields  int    // scope fields included
	scope   int
	// minLength is the length of the shortest data record in bytes: a field of variable length counts 1.
	minLength int
	variable  bool // there is a field of variable length
}

// parse calls template for each template record of a message, and data for each data set. It returns a Malformed at the
// first error. Up to 3 bytes after the last set are padding.
func (m *message) parse(template func(record), data func(set)) error {
	for rest := m.sets; len(rest) >= setHeader; {
		id, length := binary.BigEndian.Uint16(rest), int(binary.BigEndian.Uint16(rest[2:]))
		if length < setHeader || length > len(rest) {
			return BadSet
		}
		s := set{id, rest[setHeader:length]}
		rest = rest[length:]
		if templates, options := templateSet(m.version, id); templates {
			if err := parseRecords(m.version, options, s.body, template); err != nil {
				return err
			}
		} else if id >= firstID {
			data(s)
		}
	}
	return nil
}

// templateSet tells whether a set contains templates, and whether these are options templates.
func templateSet(version, id uint16) (templates, options bool) {
	first := uint16(0) // version 9
	if version == IPFIX {
		first = 2
	}
	return id == first || id == first+1, id == first+1
}

// parseRecords calls template for each record of a template set. Padding is up to 3 bytes of any value, or zeros.
func parseRecords(version uint16, options bool, b []byte, template func(record)) error {
	for len(b) >= 4 {
		if b[0] == 0 && b[1] == 0 && isZero(b) {
			return nil
		}
		r, err := parseRecord(version, options, b)
		if err != nil {
			return err
		}
		template(r)
		b = b[len(r.raw):]
	}
	return nil
}

func isZero(b []byte) bool {
	for _, c := range b {
		if c != 0 {
			return false
		}
	}
	return true
}

// countRecords returns the number of data records of a data set of IPFIX, given the template record. It visits at most
// budget fields, and subtracts those that it visits. ok is false if the records cannot be counted.
func countRecords(t *template, body []byte, budget *int) (n int, ok bool) {
	minLength := int(t.minLength)
	if minLength == 0 || len(body) < minLength {
		return 0, false
	}
	if !t.variable {
		return len(body) / minLength, true
	}
	if *budget -= len(t.record) / 4; *budget < 0 {
		return 0, false
	}
	fields := parseFields(IPFIX, t.options, []byte(t.record))
	for ; len(body) >= minLength; n++ { // less is padding
		if *budget -= len(fields); *budget < 0 {
			return 0, false
		}
		for _, f := range fields {
			length := int(f.Length)
			if f.Length == variableLength {
				if len(body) < 1 {
					return 0, false
				}
				length, body = int(body[0]), body[1:]
				if length == 255 {
					if len(body) < 2 {
						return 0, false
					}
					length, body = int(binary.BigEndian.Uint16(body)), body[2:]
				}
			}
			if length > len(body) {
				return 0, false
			}
			body = body[length:]
		}
	}
	return n, true
}

// Field is a field specifier of a template record (RFC 7011 section 3.2, RFC 3954 section 5.2).
type Field struct {
	// Element is the information element without the enterprise bit. NetFlow v9 has no such bit: all 16 bits count.
	Element uint16
	// Length in bytes; 65535 is a variable length in IPFIX.
	Length uint16
	// Enterprise is the private enterprise number; 0 is an element of IANA.
	Enterprise uint32
	Scope      bool // a scope field of an options template
}

// parseFields returns the fields of a record that parseRecord has accepted.
func parseFields(version uint16, options bool, raw []byte) []Field {
	r, err := parseRecord(version, options, raw)
	if err != nil {
		return nil
	}
	at := 4
	if options {
		at = 6
	}
	fields := make([]Field, 0, r.fields)
	for i := range r.fields {
		f, size := parseField(version, raw[at:])
		f.Scope = i < r.scope
		fields = append(fields, f)
		at += size
	}
	return fields
}

// parseRecord parses the template record at the start of b, which has at least 4 bytes.
func parseRecord(version uint16, options bool, b []byte) (record, error) {
	r := record{id: binary.BigEndian.Uint16(b), options: options}
	count := int(binary.BigEndian.Uint16(b[2:])) // in bytes of the scope for an options template of version 9
	if r.id < firstID {
		// RFC 7011 section 8.1: the set's own ID withdraws all.
		if all := version == IPFIX && count == 0 && (r.id == 3) == options && (r.id == 2) == !options; !all {
			return r, BadID
		}
		r.raw = b[:4]
		return r, nil
	}
	if version == IPFIX && count == 0 {
		r.raw = b[:4] // a withdrawal has no scope field count
		return r, nil
	}
	at := 4
	r.fields = count
	if options {
		if at = 6; len(b) < at {
			return r, Truncated
		}
		second := int(binary.BigEndian.Uint16(b[4:]))
		if version == NetFlow9 {
			if count%4 != 0 || second%4 != 0 {
				return r, BadScope
			}
			r.scope, r.fields = count/4, (count+second)/4
		} else {
			r.scope = second
		}
		if r.scope > r.fields {
			return r, BadScope
		}
	}
	for range r.fields { // at most 32,766, and each takes 4 bytes
		f, size := parseField(version, b[at:])
		if size == 0 {
			return r, Truncated
		}
		at += size
		if version == IPFIX && f.Length == variableLength {
			r.variable = true
			r.minLength++
		} else {
			r.minLength += int(f.Length)
		}
	}
	r.raw = b[:at]
	return r, nil
}

// parseField parses the field specifier at the start of b. The size is 0 if b is too short.
func parseField(version uint16, b []byte) (f Field, size int) {
	if len(b) < 4 {
		return Field{}, 0
	}
	f = Field{Element: binary.BigEndian.Uint16(b), Length: binary.BigEndian.Uint16(b[2:])}
	if version == NetFlow9 || f.Element&0x8000 == 0 {
		return f, 4
	}
	if len(b) < 8 {
		return Field{}, 0
	}
	f.Element &^= 0x8000
	f.Enterprise = binary.BigEndian.Uint32(b[4:])
	return f, 8
}
