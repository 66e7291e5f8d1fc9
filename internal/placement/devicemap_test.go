// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/iotest"

	"golang.org/x/sys/unix"
)

func parseMap(t testing.TB, text string) *DeviceMap {
	t.Helper()
	m, err := ParseDeviceMap(strings.NewReader(text), "devices.csv")
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// lines returns the entries of m in the form prefix,device.
func lines(m *DeviceMap) []string {
	var all []string
	for p, id := range m.All() {
		all = append(all, p.String()+","+m.Devices()[id])
	}
	return all
}

func TestDeviceMapFormat(t *testing.T) {
	for name, test := range map[string]struct {
		text string
		want []string
	}{
		"empty":             {"", nil},
		"only comments":     {"# a\n\n  \t\n  # b", nil},
		"any order":         {"10.1.0.0/16,b\n2001:db8::/32,c\n10.0.0.0/8,a\n", []string{"10.0.0.0/8,a", "10.1.0.0/16,b", "2001:db8::/32,c"}},
		"addresses":         {"10.0.0.1,a\n2001:db8::1,b", []string{"10.0.0.1/32,a", "2001:db8::1/128,b"}},
		"mapped":            {"::ffff:10.0.0.0/104,a\n::ffff:192.0.2.1,b\n::ffff:0:0/96,c", []string{"0.0.0.0/0,c", "10.0.0.0/8,a", "192.0.2.1/32,b"}},
		"around mapped":     {"::/0,a\n::fffe:0:0/95,b", []string{"::/0,a", "::fffe:0:0/95,b"}},
		"CRLF":              {"10.0.0.1,a\r\n\r\n10.0.0.2,b\r\n", []string{"10.0.0.1/32,a", "10.0.0.2/32,b"}},
		"byte order mark":   {"\ufeffprefix,device\n10.0.0.1,a", []string{"10.0.0.1/32,a"}},
		"header":            {"# routers\n Prefix , \"Device\" # names\n10.0.0.1,a", []string{"10.0.0.1/32,a"}},
		"spaces":            {" \t10.0.0.1 ,\t core router 1 \n", []string{"10.0.0.1/32,core router 1"}},
		"trailing comment":  {"10.0.0.1,a # one\n10.0.0.2,\"b\"\t# two", []string{"10.0.0.1/32,a", "10.0.0.2/32,b"}},
		"hash in a name":    {"10.0.0.1,a#1\n10.0.0.2,\"b #2\"", []string{"10.0.0.1/32,a#1", "10.0.0.2/32,b #2"}},
		"quotes":            {`"10.0.0.1" , "the ""core""" ` + "\n10.0.0.2,\"\"\"\"", []string{`10.0.0.1/32,the "core"`, `10.0.0.2/32,"`}},
		"twice, one device": {"10.0.0.1,a\n10.0.0.1/32,a\n::ffff:10.0.0.1,a", []string{"10.0.0.1/32,a"}},
		"UTF-8":             {"10.0.0.1,Zürich ①", []string{"10.0.0.1/32,Zürich ①"}},
		"longest name":      {"10.0.0.1," + strings.Repeat("é", 64), []string{"10.0.0.1/32," + strings.Repeat("é", 64)}},
		"long comment":      {"10.0.0.1,a #" + strings.Repeat("-", maxDeviceMapLine-20), []string{"10.0.0.1/32,a"}},
	} {
		if got := lines(parseMap(t, test.text)); !slices.Equal(got, test.want) {
			t.Errorf("%s: got %q, want %q", name, got, test.want)
		}
	}
}

func TestDeviceMapIDs(t *testing.T) {
	m := parseMap(t, "10.0.0.3,c\n10.0.0.1,a\n10.0.0.2,c\n10.0.0.4,b\n")
	if got, want := m.Devices(), []string{"c", "a", "b"}; !slices.Equal(got, want) {
		t.Errorf("devices %q, want %q", got, want)
	}
	if m.Len() != 4 {
		t.Errorf("%d prefixes, want 4", m.Len())
	}
}

// addressHint is the hint for a text that is not an address.
const addressHint = "\n  hint: as in 192.0.2.1 or 2001:db8:1::/48"

func TestDeviceMapRefuses(t *testing.T) {
	for name, test := range map[string]struct{ text, want string }{
		"not an address":     {"10.0.0.300,a", `devices.csv:1: "10.0.0.300" is not an address or prefix` + addressHint},
		"not a prefix":       {"10.0.0.0/33,a", `devices.csv:1: "10.0.0.0/33" is not an address or prefix` + addressHint},
		"zone":               {"fe80::1%eth0,a", `devices.csv:1: "fe80::1%eth0" is not an address or prefix` + addressHint},
		"no prefix":          {",a", `devices.csv:1: "" is not an address or prefix` + addressHint},
		"header later":       {"10.0.0.1,a\nprefix,device", `devices.csv:2: "prefix" is not an address or prefix` + addressHint},
		"host bits":          {"# x\n10.1.2.3/16,a", "devices.csv:2: 10.1.2.3/16 has bits set after its length\n  hint: write 10.1.0.0/16"},
		"host bits, IPv6":    {"2001:db8::1/64,a", "devices.csv:1: 2001:db8::1/64 has bits set after its length\n  hint: write 2001:db8::/64"},
		"host bits, mapped":  {"::ffff:10.1.0.0/104,a", "devices.csv:1: ::ffff:10.1.0.0/104 has bits set after its length\n  hint: write 10.0.0.0/8"},
		"mapped, IPv4 bits":  {"::ffff:10.0.0.0/8,a", "devices.csv:1: ::ffff:10.0.0.0/8 has bits set after its length\n  hint: the length of an IPv4-mapped prefix counts from ::, so it is 96 or more"},
		"one field":          {"10.0.0.1", "devices.csv:1: must have 2 fields, prefix,device: has 1"},
		"three fields":       {"10.0.0.1,a,b", "devices.csv:1: must have 2 fields, prefix,device: has 3"},
		"no name":            {"10.0.0.1, # a", "devices.csv:1: the device has no name"},
		"empty quoted name":  {`10.0.0.1,""`, "devices.csv:1: the device has no name"},
		"long name":          {"10.0.0.1," + strings.Repeat("x", 129), "devices.csv:1: device \"" + strings.Repeat("x", 61) + "...\" is longer than 128 bytes"},
		"comma in a name":    {`10.0.0.1,"a,b"`, `devices.csv:1: device "a,b" must be printable UTF-8 without commas`},
		"control character":  {"10.0.0.1,a\x00b", `devices.csv:1: device "a\x00b" must be printable UTF-8 without commas`},
		"not UTF-8":          {"10.0.0.1,\xff", `devices.csv:1: device "\xff" must be printable UTF-8 without commas`},
		"open quote":         {"10.0.0.1,\"a\n10.0.0.2,b", "devices.csv:1: a field in quotes has no end\n  hint: add the closing \""},
		"quote inside":       {`10.0.0.1,a"b`, "devices.csv:1: a \" inside a field\n  hint: put the whole field in quotes and write \"\" for each quote"},
		"text after a quote": {`10.0.0.1,"a"b`, "devices.csv:1: text after a field in quotes\n  hint: write \"\" for a quote inside a field"},
		"two devices": {"10.0.0.0/8,a\n10.1.0.0/16,b\n::ffff:10.0.0.0/104,b\n10.0.0.0/8,c\n",
			"devices.csv:3: 10.0.0.0/8 is given to \"b\", but line 1 gives it to \"a\"\n  hint: a prefix belongs to one device\n" +
				"devices.csv:4: 10.0.0.0/8 is given to \"c\", but line 1 gives it to \"a\"\n  hint: a prefix belongs to one device"},
		"in order of lines": {"9.0.0.1,a\n9.0.0.1,b\n?,c\n", "devices.csv:2: 9.0.0.1/32 is given to \"b\", but line 1 gives it to \"a\"\n  hint: a prefix belongs to one device\n" +
			`devices.csv:3: "?" is not an address or prefix` + addressHint},
		"long line": {"10.0.0.1,a\n#" + strings.Repeat("x", 3*maxDeviceMapLine) + "\n10.0.0.2\n",
			"devices.csv:2: line is longer than 65536 bytes\ndevices.csv:3: must have 2 fields, prefix,device: has 1"},
		"many": {strings.Repeat("x\n", 1000), strings.TrimPrefix(func() string {
			var b strings.Builder
			for i := range 20 {
				fmt.Fprintf(&b, "\ndevices.csv:%d: must have 2 fields, prefix,device: has 1", i+1)
			}
			return b.String()
		}(), "\n") + "\nand 980 more"},
	} {
		m, err := ParseDeviceMap(strings.NewReader(test.text), "devices.csv")
		if err == nil {
			t.Errorf("%s: accepted as %q", name, lines(m))
		} else if err.Error() != test.want {
			t.Errorf("%s: got\n%v\nwant\n%s", name, err, test.want)
		}
	}
}

func TestDeviceMapLimits(t *testing.T) {
	parse := func(text string) error {
		p := &deviceMapParser{name: "devices.csv", ids: map[string]uint32{}, maxSize: 24, maxPrefixes: 2}
		_, err := p.parse(strings.NewReader(text))
		return err
	}
	for text, want := range map[string]string{
		"::1,a\n::2,a\n#-----------":  "",
		"::1,a\n::2,a\n#------------": "devices.csv: is larger than 24 bytes",
		"::1,a\n::2,a\n::3,a\n":       "devices.csv:3: more than 2 prefixes",
	} {
		if err := parse(text); want == "" && err != nil || want != "" && (err == nil || err.Error() != want) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
}

func TestDeviceMapErrors(t *testing.T) {
	_, err := ParseDeviceMap(strings.NewReader("10.0.0.1/8,a\nx\n"), "devices.csv")
	want := DeviceMapError{"devices.csv", 1, "10.0.0.1/8 has bits set after its length", "write 10.0.0.0/8"}
	if got, ok := errors.AsType[*DeviceMapError](fmt.Errorf("reload: %w", err)); !ok || *got != want {
		t.Errorf("got %#v, want %#v", got, want)
	}
	cause := errors.New("disk on fire")
	r := io.MultiReader(strings.NewReader("10.0.0.1,a\n"), iotest.ErrReader(cause))
	if _, err := ParseDeviceMap(r, "devices.csv"); !errors.Is(err, cause) || err.Error() != "read device map devices.csv: disk on fire" {
		t.Errorf("read error: %v", err)
	}
}

func TestLoadDeviceMap(t *testing.T) {
	path := filepath.Join(t.TempDir(), "devices.csv")
	if _, err := LoadDeviceMap(path); !errors.Is(err, fs.ErrNotExist) || err.Error() != "read device map: open "+path+": no such file or directory" {
		t.Errorf("missing file: %v", err)
	}
	if _, err := LoadDeviceMap(filepath.Dir(path)); err == nil {
		t.Error("a directory was read")
	}
	if err := os.WriteFile(path, []byte("10.0.0.1,a\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	m, err := LoadDeviceMap(path)
	if err != nil || m.Len() != 1 {
		t.Errorf("%d prefixes, %v", m.Len(), err)
	}
}

func TestDeviceMapLookup(t *testing.T) {
	m := parseMap(t, `
		0.0.0.0/0,default
		10.0.0.0/8,ten
		10.1.0.0/16,one
		10.1.255.255,last
		::/0,six
		2001:db8::/32,doc
		2001:db8::8000:0:0:0/65,half
		2001:db8::1,host`)
	for addr, want := range map[string]string{
		"9.255.255.255": "default", "10.0.0.0": "ten", "10.1.0.0": "one", "10.1.255.254": "one", "10.1.255.255": "last",
		"10.2.0.0": "ten", "255.255.255.255": "default", "::ffff:10.1.2.3": "one", "::": "six", "::1": "six", "::fffe:ffff:ffff": "six",
		"::1:0:0:0": "six", "2001:db8::": "doc", "2001:db8::1": "host", "2001:db8::2%eth0": "doc", "2001:db8:0:0:8000::": "half", "ffff::": "six",
	} {
		id, ok := m.Lookup(netip.MustParseAddr(addr))
		if !ok || m.Devices()[id] != want {
			t.Errorf("%s: %d, %v; want %s", addr, id, ok, want)
		}
	}
	m = parseMap(t, "::/0,six\n10.0.0.0/8,ten\n")
	for _, addr := range []string{"9.0.0.1", "11.0.0.1", "::ffff:11.0.0.1"} {
		if id, ok := m.Lookup(netip.MustParseAddr(addr)); ok {
			t.Errorf("%s is %s: IPv6 prefixes hold no IPv4", addr, m.Devices()[id])
		}
	}
	if _, ok := m.Lookup(netip.Addr{}); ok {
		t.Error("the zero address was found")
	}
}

func TestDeviceMapNil(t *testing.T) {
	var m *DeviceMap
	for range m.All() {
		t.Error("a nil map contains an entry")
	}
	if _, ok := m.Lookup(netip.MustParseAddr("10.0.0.1")); ok || m.Len() != 0 || len(m.Devices()) != 0 {
		t.Error("a nil map is not empty")
	}
}

// TestDeviceMapAgainstScan compares Lookup with a scan of all prefixes, on dense maps with deeply nested prefixes, some
// near the IPv4-mapped range.
func TestDeviceMapAgainstScan(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	bases := []string{"::ffff:10.0.0.0", "::ffff:10.128.0.0", "::ffff:0.0.0.0", "::ffff:255.255.255.255", "::", "::fffe:ffff:fff0", "::1:0:0:0", "2001:db8::", "2001:db8::ffff:ffff", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"}
	random := func() netip.Addr {
		a := netip.MustParseAddr(bases[rnd.IntN(len(bases))]).As16()
		for range rnd.IntN(4) {
			bit := rnd.IntN(128)
			if rnd.IntN(2) == 0 {
				bit = 96 + rnd.IntN(32)
			}
			a[bit/8] ^= 0x80 >> (bit % 8)
		}
		return netip.AddrFrom16(a)
	}
	found := 0
	for range 2000 {
		want := map[netip.Prefix]string{}
		var text strings.Builder
		for range rnd.IntN(24) {
			p := unmapPrefix(netip.PrefixFrom(random(), rnd.IntN(129)).Masked())
			if want[p] == "" {
				want[p] = fmt.Sprintf("d%d", rnd.IntN(8))
			}
			fmt.Fprintf(&text, "%s,%s\n", p, want[p])
		}
		m := parseMap(t, text.String())
		if m.Len() != len(want) {
			t.Fatalf("%d prefixes, want %d in\n%s", m.Len(), len(want), &text)
		}
		for range 100 {
			addr := random()
			device, bits := "", -1
			for p, d := range want {
				if p.Contains(addr.Unmap()) && p.Bits() > bits {
					device, bits = d, p.Bits()
				}
			}
			got := ""
			if id, ok := m.Lookup(addr); ok {
				got = m.Devices()[id]
				found++
			}
			if got != device {
				t.Fatalf("%s is %q, want %q in\n%s", addr, got, device, &text)
			}
		}
	}
	if found < 10000 {
		t.Errorf("only %d addresses were in a prefix", found)
	}
}

func FuzzDeviceMap(f *testing.F) {
	f.Add([]byte("\ufeffprefix,device\r\n# routers\n10.0.0.0/8,a # x\n\"::ffff:10.1.0.0/112\" , \"b \"\"#\"\"\"\n"))
	f.Add([]byte("10.0.0.1/8,a\n::1,b,c\n\"\n10.0.0.1,a\n10.0.0.1,b\n"))
	f.Add([]byte("::/0,a\n0.0.0.0/0,b\n::ffff:0:0/95,c"))
	f.Fuzz(func(t *testing.T, data []byte) {
		m, err := ParseDeviceMap(bytes.NewReader(data), "f")
		if err != nil {
			e, ok := errors.AsType[*DeviceMapErrors](err)
			if !ok || len(e.Errors) == 0 || len(e.Errors) > maxDeviceMapErrors {
				t.Fatalf("%T: %v", err, err)
			}
			for _, e := range e.Errors {
				if e.Line < 1 || e.Message == "" {
					t.Errorf("no line or message: %#v", e)
				}
			}
			return
		}
		var text strings.Builder
		for p, id := range m.All() {
			if p != p.Masked() || p != unmapPrefix(p) {
				t.Errorf("%s is not normalized", p)
			}
			if _, ok := m.Lookup(p.Addr()); !ok {
				t.Errorf("%s is not found", p.Addr())
			}
			fmt.Fprintf(&text, "%s,\"%s\"\n", p, strings.ReplaceAll(m.Devices()[id], `"`, `""`))
		}
		if again := parseMap(t, text.String()); !slices.Equal(lines(again), lines(m)) {
			t.Errorf("written and read again: %q, was %q", lines(again), lines(m))
		}
	})
}

// millionLines returns a device map of a million lines in random order: half IPv4 addresses, half IPv6 prefixes, two of
// each per device.
func millionLines() []byte {
	var b bytes.Buffer
	for _, i := range rand.New(rand.NewPCG(1, 2)).Perm(1_000_000) {
		if i%2 == 0 {
			fmt.Fprintf(&b, "10.%d.%d.%d,router-%d\n", i>>16, i>>8&255, i&255, i/4)
		} else {
			fmt.Fprintf(&b, "2001:db8:%x:%x::/64,router-%d\n", i>>16, i&0xffff, i/4)
		}
	}
	return b.Bytes()
}

func BenchmarkParseDeviceMap(b *testing.B) {
	data := millionLines()
	b.SetBytes(int64(len(data)))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := ParseDeviceMap(bytes.NewReader(data), "devices.csv"); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkDeviceMapLookup(b *testing.B) {
	m, err := ParseDeviceMap(bytes.NewReader(millionLines()), "devices.csv")
	if err != nil {
		b.Fatal(err)
	}
	rnd := rand.New(rand.NewPCG(3, 4))
	addrs := make([]netip.Addr, 1<<16)
	for i := range addrs {
		n := 2 * rnd.IntN(500_000)
		addrs[i] = netip.AddrFrom4([4]byte{10, byte(n >> 16), byte(n >> 8), byte(n)})
	}
	for i := 0; b.Loop(); i++ {
		if _, ok := m.Lookup(addrs[i%len(addrs)]); !ok {
			b.Fatal("not found: ", addrs[i%len(addrs)])
		}
	}
}

func TestDeviceMapMustBeAFile(t *testing.T) {
	dir := t.TempDir()
	fifo := filepath.Join(dir, "fifo")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{fifo, dir} {
		_, err := LoadDeviceMap(path)
		if want := "read device map: read " + path + ": not a regular file"; err == nil || err.Error() != want {
			t.Errorf("got %v, want %s", err, want)
		}
	}
}

// TestDeviceMapPrefix checks the longest prefix of addresses of both families.
func TestDeviceMapPrefix(t *testing.T) {
	m, err := ParseDeviceMap(strings.NewReader("0.0.0.0/0,rest\n10.0.0.0/8,ten\n10.1.0.0/16,one\n10.1.2.3,host\n2001:db8::/32,six\n"), "map")
	if err != nil {
		t.Fatal(err)
	}
	for address, want := range map[string]string{
		"10.1.2.3": "10.1.2.3/32", "::ffff:10.1.2.4": "10.1.0.0/16", "10.2.0.0": "10.0.0.0/8", "192.0.2.1": "0.0.0.0/0",
		"2001:db8::1": "2001:db8::/32", "2001:db9::1": "none", "fe80::1%1": "none",
	} {
		got := "none"
		if prefix, ok := m.Prefix(netip.MustParseAddr(address)); ok {
			got = prefix.String()
		}
		if got != want {
			t.Errorf("%s: %s, want %s", address, got, want)
		}
	}
	if _, ok := (*DeviceMap)(nil).Prefix(netip.MustParseAddr("10.1.2.3")); ok {
		t.Error("an empty map has a prefix")
	}
}
