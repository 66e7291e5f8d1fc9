// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/netip"
	"os"
	"slices"
	"sort"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"sockeye/internal/fault"
)

// Limits of a device map.
const (
	MaxDevicePrefixes = 4 << 20   // prefixes
	MaxDeviceMapSize  = 512 << 20 // bytes of the file
	MaxDeviceName     = 128       // bytes of a name

	maxDeviceMapLine   = 64 << 10 // bytes
	maxDeviceMapErrors = 20       // listed; the rest are counted
)

// DeviceMap maps addresses to names of devices. A DeviceMap is immutable; a nil *DeviceMap is valid and empty.
type DeviceMap struct {
	devices  []string
	prefixes []devicePrefix // sorted by compare
}

// devicePrefix is a prefix of 128 bits, with IPv4 mapped to ::ffff:0:0/96. An IPv6 prefix of 96 or more bits in that
// range is converted to IPv4, so that the bits determine the family.
type devicePrefix struct {
	hi, lo uint64
	bits   uint8
	device uint32
	line   uint32 // line number in the file
	parent uint32 // index of the longest prefix that contains this one, or noParent
}

const noParent = 1<<32 - 1

// DeviceMapError is one error in a device map.
type DeviceMapError struct {
	File    string
	Line    int // counts from 1; 0 for the whole file
	Message string
	Hint    string // often empty
}

// Explain returns the exit code, and no hint: the text of the error has the hint.
func (e *DeviceMapError) Explain() (hint string, code int) { return "", fault.CodeUsage }

// Error returns one line, followed by a line "  hint: ..." if there is a hint.
func (e *DeviceMapError) Error() string {
	s := e.File + ": " + e.Message
	if e.Line > 0 {
		s = fmt.Sprintf("%s:%d: %s", e.File, e.Line, e.Message)
	}
	if e.Hint != "" {
		s += "\n  hint: " + e.Hint
	}
	return s
}

// DeviceMapErrors has up to 20 errors in a device map, in the order of the file, and the number of the others.
type DeviceMapErrors struct {
	Errors []*DeviceMapError
	More   int
}

func (e *DeviceMapErrors) Error() string {
	var b strings.Builder
	for i, err := range e.Errors {
		if i > 0 {
			b.WriteByte('\n')
		}
		b.WriteString(err.Error())
	}
	if e.More > 0 {
		fmt.Fprintf(&b, "\nand %d more", e.More)
	}
	return b.String()
}

// Unwrap makes errors.As find the first [*DeviceMapError].
func (e *DeviceMapErrors) Unwrap() []error {
	errs := make([]error, len(e.Errors))
	for i, err := range e.Errors {
		errs[i] = err
	}
	return errs
}

// LoadDeviceMap reads the device map at path; see [ParseDeviceMap].
func LoadDeviceMap(path string) (*DeviceMap, error) {
	// O_NONBLOCK: opening a FIFO must not block.
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("read device map: %w", err)
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		return nil, fmt.Errorf("read device map: %w", &os.PathError{Op: "read", Path: path, Err: errors.New("not a regular file")})
	}
	return ParseDeviceMap(f, path)
}

type deviceMapParser struct {
	name        string
	maxSize     int64
	maxPrefixes int

	m      DeviceMap
	ids    map[string]uint32
	errs   DeviceMapErrors
	header bool // no line with fields was read yet, so the next may be the header
}

// ParseDeviceMap reads lines of the form prefix,device. A prefix is an IPv4 or IPv6 prefix or a single address;
// IPv4-mapped IPv6 is IPv4. A device is 1 to 128 bytes of printable UTF-8 without commas. Spaces around both fields are
// ignored, and both fields may be in double quotes, as in encoding/csv. A # at the start of a line or after a space
// starts a comment. Empty lines and a first line prefix,device are ignored. The order of the lines has no meaning.
//
// A prefix may occur several times with one device, but not with two devices. The error is a [*DeviceMapErrors] that
// calls the file name, or wraps the error of r.
func ParseDeviceMap(r io.Reader, name string) (*DeviceMap, error) {
	p := &deviceMapParser{name: name, ids: map[string]uint32{}, maxSize: MaxDeviceMapSize, maxPrefixes: MaxDevicePrefixes}
	return p.parse(r)
}

// Equal reports whether two device maps have the same prefixes with the same devices and ids.
func (m *DeviceMap) Equal(o *DeviceMap) bool {
	if m == o {
		return true
	}
	return m.Len() == o.Len() && slices.Equal(m.Devices(), o.Devices()) &&
		(m.Len() == 0 || slices.EqualFunc(m.prefixes, o.prefixes, func(a, b devicePrefix) bool {
			return a.compare(b) == 0 && a.device == b.device
		}))
}

// Len returns the number of different prefixes.
func (m *DeviceMap) Len() int {
	if m == nil {
		return 0
	}
	return len(m.prefixes)
}

// Devices returns the distinct names in the order of their first line. The index of a name is the id of the device. The
// caller must not change the slice.
func (m *DeviceMap) Devices() []string {
	if m == nil {
		return nil
	}
	return m.devices
}

// All yields every prefix once with the id of its device, sorted by address (IPv4 as IPv4-mapped) and then by length.
// No prefix is IPv4-mapped or has bits set after its length.
func (m *DeviceMap) All() iter.Seq2[netip.Prefix, uint32] {
	return func(yield func(netip.Prefix, uint32) bool) {
		if m == nil {
			return
		}
		for _, p := range m.prefixes {
			if !yield(p.prefix(), p.device) {
				return
			}
		}
	}
}

// Prefix returns the longest prefix that contains addr. ok is false if there is none.
func (m *DeviceMap) Prefix(addr netip.Addr) (prefix netip.Prefix, ok bool) {
	if _, ok := m.Lookup(addr); !ok {
		return prefix, false
	}
	addr = addr.Unmap().WithZone("")
	for bits := addr.BitLen(); bits >= 0; bits-- {
		prefix, _ = addr.Prefix(bits) // the length is in range
		want := newDevicePrefix(prefix)
		if _, ok := slices.BinarySearchFunc(m.prefixes, want, devicePrefix.compare); ok {
			return prefix, true
		}
	}
	return prefix, false
}

// Lookup returns the id of the device with the longest prefix that contains addr. An IPv4-mapped IPv6 address is its
// IPv4 address, which no IPv6 prefix contains.
func (m *DeviceMap) Lookup(addr netip.Addr) (id uint32, ok bool) {
	if m == nil || !addr.IsValid() {
		return 0, false
	}
	addr = addr.Unmap() // PrefixFrom drops the zone
	host := newDevicePrefix(netip.PrefixFrom(addr, addr.BitLen()))
	// Consider the last prefix that does not start after addr. Either that prefix contains addr, or the longest
	// prefix that contains addr is one of its parents.
	after := sort.Search(len(m.prefixes), func(i int) bool {
		p := &m.prefixes[i]
		return p.hi > host.hi || p.hi == host.hi && p.lo > host.lo
	})
	return m.longest(uint32(after)-1, host)
}

// Covers returns the id of the device with the longest prefix that contains all addresses of a prefix. IPv4 prefixes are
// never IPv4-mapped.
func (m *DeviceMap) Covers(prefix netip.Prefix) (id uint32, ok bool) {
	if m == nil {
		return 0, false
	}
	inner := newDevicePrefix(prefix)
	after := sort.Search(len(m.prefixes), func(i int) bool { return m.prefixes[i].compare(inner) > 0 })
	return m.longest(uint32(after)-1, inner)
}

// longest returns the device of the prefix with an index, or of the nearest of its parents, that contains inner.
func (m *DeviceMap) longest(at uint32, inner devicePrefix) (id uint32, ok bool) {
	for ; at != noParent; at = m.prefixes[at].parent {
		if p := &m.prefixes[at]; p.holds(inner) && p.is4() == inner.is4() {
			return p.device, true
		}
	}
	return 0, false
}

func (p devicePrefix) is4() bool { return p.hi == 0 && p.lo>>32 == 0xffff && p.bits >= 96 }

// problem is a message and a hint.
type problem struct{ message, hint string }

func (p *deviceMapParser) parse(r io.Reader) (*DeviceMap, error) {
	limited := &io.LimitedReader{R: r, N: p.maxSize + 1}
	lines := bufio.NewReaderSize(limited, maxDeviceMapLine)
	p.header = true
	for n := 1; ; n++ {
		line, err := lines.ReadSlice('\n')
		if limited.N == 0 {
			p.refuse(0, problem{fmt.Sprintf("is larger than %d bytes", p.maxSize), ""})
			break
		}
		if errors.Is(err, bufio.ErrBufferFull) {
			p.refuse(n, problem{fmt.Sprintf("line is longer than %d bytes", maxDeviceMapLine), ""})
			for errors.Is(err, bufio.ErrBufferFull) {
				_, err = lines.ReadSlice('\n')
			}
			line = nil
		}
		if err != nil && err != io.EOF {
			return nil, fmt.Errorf("read device map %s: %w", p.name, err)
		}
		if n == 1 {
			line = bytes.TrimPrefix(line, []byte("\ufeff"))
		}
		if what := p.line(n, line); what.message != "" {
			p.refuse(n, what)
		}
		if len(p.m.prefixes) > p.maxPrefixes {
			p.refuse(n, problem{fmt.Sprintf("more than %d prefixes", p.maxPrefixes), ""})
			break
		}
		if err == io.EOF {
			break
		}
	}
	p.finish()
	if len(p.errs.Errors) > 0 {
		slices.SortStableFunc(p.errs.Errors, func(a, b *DeviceMapError) int { return cmp.Compare(a.Line, b.Line) })
		return nil, &p.errs
	}
	m := p.m // not &p.m, which would keep the parser's names
	return &m, nil
}

// line parses one line of the file.
func (p *deviceMapParser) line(n int, line []byte) problem {
	var fields [2]string
	count, what := splitDeviceLine(line, &fields)
	if what.message != "" || count == 0 {
		return what
	}
	isHeader := p.header && count == 2 && strings.EqualFold(fields[0], "prefix") && strings.EqualFold(fields[1], "device")
	p.header = false
	if isHeader {
		return problem{}
	}
	if count != 2 {
		return problem{fmt.Sprintf("must have 2 fields, prefix,device: has %d", count), ""}
	}
	prefix, what := parseDevicePrefix(fields[0])
	if what.message == "" {
		what = checkDeviceName(fields[1])
	}
	if what.message != "" {
		return what
	}
	id, ok := p.ids[fields[1]]
	if !ok {
		id = uint32(len(p.m.devices))
		p.ids[fields[1]] = id
		p.m.devices = append(p.m.devices, fields[1])
	}
	entry := newDevicePrefix(prefix)
	entry.device, entry.line = id, uint32(n)
	p.m.prefixes = append(p.m.prefixes, entry)
	return problem{}
}

func newDevicePrefix(p netip.Prefix) devicePrefix {
	a := p.Addr().As16()
	bits := p.Bits()
	if p.Addr().Is4() {
		bits += 96
	}
	return devicePrefix{
		hi:     binary.BigEndian.Uint64(a[:8]),
		lo:     binary.BigEndian.Uint64(a[8:]),
		bits:   uint8(bits),
		parent: noParent,
	}
}

// finish sorts the prefixes, deletes duplicates, and finds the parents.
func (p *deviceMapParser) finish() {
	all := p.m.prefixes
	slices.SortFunc(all, func(a, b devicePrefix) int { return cmp.Or(a.compare(b), cmp.Compare(a.line, b.line)) })
	var conflicts [][2]devicePrefix
	kept := all[:0]
	for _, e := range all {
		if last := len(kept) - 1; last >= 0 && kept[last].compare(e) == 0 {
			if kept[last].device != e.device {
				conflicts = append(conflicts, [2]devicePrefix{kept[last], e})
			}
			continue
		}
		// The parent of e is the last prefix before e, or one of the parents of that prefix.
		for at := uint32(len(kept)) - 1; at != noParent; at = kept[at].parent {
			if kept[at].holds(e) {
				e.parent = at
				break
			}
		}
		kept = append(kept, e)
	}
	p.m.prefixes = kept
	slices.SortFunc(conflicts, func(a, b [2]devicePrefix) int { return cmp.Compare(a[1].line, b[1].line) })
	for _, c := range conflicts {
		p.refuse(int(c[1].line), problem{
			fmt.Sprintf("%s is given to %s, but line %d gives it to %s", c[1].prefix(), strconv.Quote(p.m.devices[c[1].device]), c[0].line, strconv.Quote(p.m.devices[c[0].device])),
			"a prefix belongs to one device",
		})
	}
}

func (p devicePrefix) prefix() netip.Prefix {
	var a [16]byte
	binary.BigEndian.PutUint64(a[:8], p.hi)
	binary.BigEndian.PutUint64(a[8:], p.lo)
	if p.is4() {
		return netip.PrefixFrom(netip.AddrFrom16(a).Unmap(), int(p.bits)-96)
	}
	return netip.PrefixFrom(netip.AddrFrom16(a), int(p.bits))
}

// compare compares addresses, then lengths.
func (p devicePrefix) compare(q devicePrefix) int {
	switch {
	case p.hi != q.hi:
		return cmp.Compare(p.hi, q.hi)
	case p.lo != q.lo:
		return cmp.Compare(p.lo, q.lo)
	}
	return cmp.Compare(p.bits, q.bits)
}

// holds reports whether p contains q as prefixes of 128 bits, regardless of the families.
func (p devicePrefix) holds(q devicePrefix) bool {
	hi := ^uint64(0) << (64 - min(p.bits, 64)) // << 64 gives 0
	lo := ^uint64(0) << (128 - max(p.bits, 64))
	return p.bits <= q.bits && (p.hi^q.hi)&hi == 0 && (p.lo^q.lo)&lo == 0
}

func (p *deviceMapParser) refuse(line int, what problem) {
	if len(p.errs.Errors) == maxDeviceMapErrors {
		p.errs.More++
		return
	}
	p.errs.Errors = append(p.errs.Errors, &DeviceMapError{p.name, line, what.message, what.hint})
}

// splitDeviceLine splits a line into fields without spaces, quotes and the comment. It stores the first two fields, and
// returns the number of fields: 0 for an empty line.
func splitDeviceLine(line []byte, fields *[2]string) (count int, what problem) {
	rest := bytes.TrimSpace(line)
	if len(rest) == 0 || rest[0] == '#' {
		return 0, problem{}
	}
	for more := true; more; count++ {
		var field []byte
		rest = bytes.TrimLeft(rest, " \t")
		if len(rest) > 0 && rest[0] == '"' {
			if field, rest, what = unquoteDeviceField(rest); what.message != "" {
				return 0, what
			}
		} else {
			end := endOfField(rest)
			field, rest = rest[:end], rest[end:]
			if bytes.IndexByte(field, '"') >= 0 {
				return 0, problem{`a " inside a field`, `put the whole field in quotes and write "" for each quote`}
			}
		}
		if count < len(fields) {
			fields[count] = string(bytes.TrimSpace(field))
		}
		more = len(rest) > 0 && rest[0] == ','
		if more {
			rest = rest[1:]
		}
	}
	return count, problem{}
}

// endOfField returns the index of the end of a field without quotes: a comma, a comment or the end of the line.
func endOfField(s []byte) int {
	for i, c := range s {
		if c == ',' || c == '#' && (i == 0 || s[i-1] == ' ' || s[i-1] == '\t') {
			return i
		}
	}
	return len(s)
}

// unquoteDeviceField returns a field in quotes and the rest of the line.
func unquoteDeviceField(s []byte) (field, rest []byte, what problem) {
	for s = s[1:]; ; s = s[1:] {
		end := bytes.IndexByte(s, '"')
		if end < 0 {
			return nil, nil, problem{`a field in quotes has no end`, `add the closing "`}
		}
		field = append(field, s[:end]...)
		if s = s[end+1:]; len(s) == 0 || s[0] != '"' {
			break
		}
		field = append(field, '"')
	}
	after := bytes.TrimLeft(s, " \t")
	isComment := len(after) > 0 && after[0] == '#' && len(after) < len(s)
	if len(after) > 0 && after[0] != ',' && !isComment {
		return nil, nil, problem{`text after a field in quotes`, `write "" for a quote inside a field`}
	}
	return field, after, problem{}
}

// parseDevicePrefix parses a prefix or an address, and converts IPv4-mapped IPv6 to IPv4.
func parseDevicePrefix(s string) (netip.Prefix, problem) {
	var p netip.Prefix
	var err error
	if strings.IndexByte(s, '/') >= 0 {
		p, err = netip.ParsePrefix(s)
	} else {
		var a netip.Addr
		if a, err = netip.ParseAddr(s); err == nil && a.Zone() != "" {
			err = errors.New("zone")
		}
		p = netip.PrefixFrom(a, a.BitLen())
	}
	if err != nil {
		return p, problem{shortQuote(s) + " is not an address or prefix", "as in 192.0.2.1 or 2001:db8:1::/48"}
	}
	if masked := p.Masked(); masked != p {
		hint := "write " + unmapPrefix(masked).String()
		if p.Addr().Is4In6() && p.Bits() < 96 {
			hint = "the length of an IPv4-mapped prefix counts from ::, so it is 96 or more"
		}
		return p, problem{s + " has bits set after its length", hint}
	}
	return unmapPrefix(p), problem{}
}

func unmapPrefix(p netip.Prefix) netip.Prefix {
	if p.Addr().Is4In6() && p.Bits() >= 96 {
		return netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-96)
	}
	return p
}

func checkDeviceName(s string) problem {
	switch {
	case s == "":
		return problem{"the device has no name", ""}
	case len(s) > MaxDeviceName:
		return problem{fmt.Sprintf("device %s is longer than %d bytes", shortQuote(s), MaxDeviceName), ""}
	case !utf8.ValidString(s) || strings.ContainsFunc(s, func(r rune) bool { return r == ',' || !unicode.IsPrint(r) }):
		return problem{"device " + shortQuote(s) + " must be printable UTF-8 without commas", ""}
	}
	return problem{}
}

// shortQuote quotes a value for a message.
func shortQuote(s string) string {
	if len(s) > 64 {
		s = strings.ToValidUTF8(s[:61], "") + "..."
	}
	return strconv.Quote(s)
}
