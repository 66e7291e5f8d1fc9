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

// DeviceMap gives addresses the name of the device that they belong to. It is
// immutable; a nil *DeviceMap is valid and empty.
type DeviceMap struct {
	devices  []string
	prefixes []devicePrefix // sorted by compare
}

// devicePrefix is a prefix as 128 bits, IPv4 mapped to ::ffff:0:0/96. IPv6
// prefixes of 96 bits and more in there were turned into IPv4, so that the bits
// tell the family.
type devicePrefix struct {
	hi, lo uint64
	bits   uint8
	device uint32
	line   uint32 // of the file
	parent uint32 // index of the longest prefix that holds this one, or noParent
}

const noParent = 1<<32 - 1

// DeviceMapError is one thing wrong with a device map.
type DeviceMapError struct {
	File    string
	Line    int // counts from 1; 0 for the file as a whole
	Message string
	Hint    string // often empty
}

// Explain returns the exit code of the error, which has its hint in its text.
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

// DeviceMapErrors is what is wrong with a device map: up to 20 errors, in the order
// of the file, and how many more there are.
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

// Unwrap lets errors.As find the first [*DeviceMapError].
func (e *DeviceMapErrors) Unwrap() []error {
	errs := make([]error, len(e.Errors))
	for i, err := range e.Errors {
		errs[i] = err
	}
	return errs
}

// LoadDeviceMap reads the device map at path; see [ParseDeviceMap].
func LoadDeviceMap(path string) (*DeviceMap, error) {
	// A pipe must not block the reader, whoever it is.
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

// ParseDeviceMap reads lines of the form prefix,device. A prefix is IPv4 or IPv6,
// an address without a length stands for itself, and IPv4-mapped IPv6 is IPv4. A
// device is 1 to 128 bytes of printable UTF-8 without commas. Spaces around both
// do not count, and both may stand in double quotes, as in encoding/csv. What
// follows a # is a comment if the # begins the line or follows a space. Empty
// lines and a first line prefix,device are passed over. The order has no meaning.
//
// A prefix may be there twice for one device, not for two. The error is a
// [*DeviceMapErrors], in which name stands for the file, or wraps that of r.
func ParseDeviceMap(r io.Reader, name string) (*DeviceMap, error) {
	p := &deviceMapParser{name: name, ids: map[string]uint32{}, maxSize: MaxDeviceMapSize, maxPrefixes: MaxDevicePrefixes}
	return p.parse(r)
}

// Len returns the number of different prefixes.
func (m *DeviceMap) Len() int {
	if m == nil {
		return 0
	}
	return len(m.prefixes)
}

// Devices returns the different names in the order of their first line. The index
// of a name is the device's id. The caller must not change the slice.
func (m *DeviceMap) Devices() []string {
	if m == nil {
		return nil
	}
	return m.devices
}

// Equal tells whether two device maps give each address the same device, under the same id.
func (m *DeviceMap) Equal(o *DeviceMap) bool {
	if m == o {
		return true
	}
	return m.Len() == o.Len() && slices.Equal(m.Devices(), o.Devices()) &&
		(m.Len() == 0 || slices.EqualFunc(m.prefixes, o.prefixes, func(a, b devicePrefix) bool {
			return a.compare(b) == 0 && a.device == b.device
		}))
}

// All yields every prefix once, with the id of its device, ordered by address (IPv4
// as if it were IPv4-mapped), the shorter of two prefixes at one address first.
// No prefix is IPv4-mapped, and none has bits set after its length.
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

// Lookup returns the id of the device with the longest prefix that holds addr. An
// IPv4-mapped IPv6 address is its IPv4 address, which no IPv6 prefix holds.
func (m *DeviceMap) Lookup(addr netip.Addr) (id uint32, ok bool) {
	if m == nil || !addr.IsValid() {
		return 0, false
	}
	addr = addr.Unmap() // PrefixFrom drops the zone
	host := newDevicePrefix(netip.PrefixFrom(addr, addr.BitLen()))
	// The last prefix that does not begin after addr holds addr, or else the
	// longest prefix that does is among those that hold that prefix.
	after := sort.Search(len(m.prefixes), func(i int) bool {
		p := &m.prefixes[i]
		return p.hi > host.hi || p.hi == host.hi && p.lo > host.lo
	})
	for at := uint32(after) - 1; at != noParent; at = m.prefixes[at].parent {
		if p := &m.prefixes[at]; p.holds(host) && p.is4() == host.is4() {
			return p.device, true
		}
	}
	return 0, false
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

func (p devicePrefix) is4() bool { return p.hi == 0 && p.lo>>32 == 0xffff && p.bits >= 96 }

func (p devicePrefix) prefix() netip.Prefix {
	var a [16]byte
	binary.BigEndian.PutUint64(a[:8], p.hi)
	binary.BigEndian.PutUint64(a[8:], p.lo)
	if p.is4() {
		return netip.PrefixFrom(netip.AddrFrom16(a).Unmap(), int(p.bits)-96)
	}
	return netip.PrefixFrom(netip.AddrFrom16(a), int(p.bits))
}

// compare orders by address, then by length.
func (p devicePrefix) compare(q devicePrefix) int {
	switch {
	case p.hi != q.hi:
		return cmp.Compare(p.hi, q.hi)
	case p.lo != q.lo:
		return cmp.Compare(p.lo, q.lo)
	}
	return cmp.Compare(p.bits, q.bits)
}

// holds reports whether the 128 bits of q lie in p, whatever the families.
func (p devicePrefix) holds(q devicePrefix) bool {
	hi := ^uint64(0) << (64 - min(p.bits, 64)) // << 64 gives 0
	lo := ^uint64(0) << (128 - max(p.bits, 64))
	return p.bits <= q.bits && (p.hi^q.hi)&hi == 0 && (p.lo^q.lo)&lo == 0
}

type deviceMapParser struct {
	name        string
	maxSize     int64
	maxPrefixes int

	m      DeviceMap
	ids    map[string]uint32
	errs   DeviceMapErrors
	header bool // the header may still come
}

// problem is a message and a hint.
type problem struct{ message, hint string }

func (p *deviceMapParser) refuse(line int, what problem) {
	if len(p.errs.Errors) == maxDeviceMapErrors {
		p.errs.More++
		return
	}
	p.errs.Errors = append(p.errs.Errors, &DeviceMapError{p.name, line, what.message, what.hint})
}

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

// line takes in one line of the file.
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

// finish sorts the prefixes, drops those that are there twice, and finds parents.
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
		// What was kept last may hold e; if not, one of those that hold it may.
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

// splitDeviceLine splits a line into fields without the spaces, quotes and
// comment, and returns how many there are; 0 for an empty line. It keeps the
// first two.
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

// endOfField returns where a field without quotes ends: at a comma, at a comment
// or at the end of the line.
func endOfField(s []byte) int {
	for i, c := range s {
		if c == ',' || c == '#' && (i == 0 || s[i-1] == ' ' || s[i-1] == '\t') {
			return i
		}
	}
	return len(s)
}

// unquoteDeviceField returns a field in quotes, and what follows it.
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

// parseDevicePrefix parses a prefix or an address, and makes IPv4-mapped IPv6 IPv4.
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
		return p, problem{shortQuote(s) + " is not an address or prefix", ""}
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
