// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"

	"go.yaml.in/yaml/v4"
)

// fullTune has every key of the tune section.
const fullTune = `
services:
  telemetry: {slots: 1, listeners: [{protocol: tcp, address: '[::]:1790'}]}
tune:
  - name: same-datacentre
    cgroup: telemetry.slice
    match:
      remote: [10.0.0.0/8, "!10.1.0.0/16", "2001:db8::/32", 192.0.2.1]
      remote_file: sub/prefixes.txt
      local: "2001:db8::1"
      port: [1790, "20000-20003"]
      remote_port: 443
      local_port: 1024-65535
      role: connect
      same_prefix: 44
      tag: rack-12
    set: {flow_label: 0, sndbuf: 150KB, cwnd_clamp: 100, pacing_rate: 2Gbit/s, congestion: cubic, nodelay: true, tos: 0x10, initial_cwnd: 40, rcvbuf: 1.5MB}
    tag: 0x5eed00
    trial: {control: 10%}
    react: {retransmits: "> 2%", rtos: "> 2", sample: 1/100, set: {nodelay: false, congestion: reno}}
    observe: close
    optional: true
  - name: learn
    cgroup: a/b/
    match: {role: accept, service: telemetry, same_prefix: {ipv6: 48}}
    set:
      initial_cwnd: {explore: [10, 16, 24, 40, 64], by: {ipv4: 20}, share: 12.5%, probe: 0%, bytes: 32KiB, evidence: 2, forget: 7d}
      synack_rto: 10ms
  - name: defaults
    cgroup: /
    match: {}
    set: {initial_cwnd: {explore: [1, 32768]}}
    react: {rtos: ">0", set: {mark: 4294967295}}
`

// writePrefixes writes the file that fullTune names, and returns the path of a policy in the same directory.
func writePrefixes(t *testing.T, text string) (policy string) {
	t.Helper()
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "sub"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "sub", "prefixes.txt"), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return filepath.Join(dir, "policy.yaml")
}

func term(s string) PrefixTerm {
	text, not := strings.CutPrefix(s, "!")
	return PrefixTerm{netip.MustParsePrefix(text), not}
}

func TestParseTune(t *testing.T) {
	policy := writePrefixes(t, "\ufeff# ours\r\n\r\n198.51.100.0/24 # a site\r\n!198.51.100.7\r\n\t::1#x\n2001:db8:1::/48")
	got, err := Parse([]byte(fullTune), policy)
	if err != nil {
		t.Fatal(err)
	}
	want := []TuneRule{{
		Name:   "same-datacentre",
		Cgroup: "telemetry.slice",
		Match: Match{
			Remote: []PrefixTerm{
				term("10.0.0.0/8"), term("!10.1.0.0/16"), term("2001:db8::/32"), term("192.0.2.1/32"),
				term("198.51.100.0/24"), term("!198.51.100.7/32"), term("::1/128"), term("2001:db8:1::/48"),
			},
			RemoteFile:  filepath.Join(filepath.Dir(policy), "sub/prefixes.txt"),
			Local:       []PrefixTerm{term("2001:db8::1/128")},
			Ports:       []PortRange{{1790, 1790}, {20000, 20003}},
			RemotePorts: []PortRange{{443, 443}},
			LocalPorts:  []PortRange{{1024, 65535}},
			Role:        RoleConnect,
			SamePrefix:  &SamePrefix{-1, 44},
			Tag:         []byte("rack-12"),
		},
		Set: []Setting{
			{Option: "sndbuf", Value: 150000},
			{Option: "rcvbuf", Value: 1500000},
			{Option: "pacing_rate", Value: 250000000},
			{Option: "congestion", Text: "cubic"},
			{Option: "initial_cwnd", Value: 40},
			{Option: "cwnd_clamp", Value: 100},
			{Option: "nodelay", Value: 1},
			{Option: "tos", Value: 16},
			{Option: "flow_label", Value: 0},
		},
		React:    &React{Retransmits: 0.02, RTOs: 2, Sample: 100, Set: []Setting{{Option: "congestion", Text: "reno"}, {Option: "nodelay"}}},
		Trial:    &Trial{0.1},
		Tag:      []byte{0x5e, 0xed, 0},
		Observe:  ObserveClose,
		Optional: true,
	}, {
		Name:   "learn",
		Cgroup: "/a/b",
		Match:  Match{Role: RoleAccept, Service: "telemetry", SamePrefix: &SamePrefix{-1, 48}},
		Set: []Setting{
			{Option: "synack_rto", Value: 10000},
			{Option: "initial_cwnd", Explore: &Explore{[]int{10, 16, 24, 40, 64}, 20, 48, 0.125, 0, 32768, 2, 7 * 24 * 3600 * 1000000}},
		},
		Observe: ObserveLive,
	}, {
		Name:    "defaults",
		Cgroup:  "/",
		Set:     []Setting{{Option: "initial_cwnd", Explore: &Explore{[]int{1, 32768}, 24, 48, 0.1, 0.02, 64000, 8, 3600 * 1000000}}},
		React:   &React{RTOs: 0, Sample: 1, Set: []Setting{{Option: "mark", Value: 1<<32 - 1}}},
		Observe: ObserveLive,
	}}
	for i := range want {
		if !reflect.DeepEqual(got.Tune[i], want[i]) {
			t.Errorf("got  %+v\nwant %+v", got.Tune[i], want[i])
		}
	}
	if len(got.Tune) != len(want) || len(got.Services) != 1 {
		t.Errorf("%d rules, %d services", len(got.Tune), len(got.Services))
	}
}

// TestAcceptTune tests valid policies that are almost refused.
func TestAcceptTune(t *testing.T) {
	rules := func(n int) string {
		doc := "tune:\n"
		for i := range n {
			doc += fmt.Sprintf("  - {name: r%d, cgroup: a, tag: x, match: {port: %d}}\n", i, i+1)
		}
		return doc
	}
	for name, doc := range map[string]string{
		"no rules":                         "tune: []",
		"no services":                      rules(1),
		"services and no rules":            "services: {}\ntune: []",
		"256 rules":                        rules(256),
		"only a tag":                       tuned + "    tag: x\n    trial: {control: 0.1%}",
		"only a reaction, not observed":    tuned + "    react: {retransmits: '> 0.1%', set: {sndbuf: 5000}}\n    observe: off",
		"largest shares":                   tuned + "    set: {initial_cwnd: {explore: [1, 2], share: 100%, probe: 100%}}\n    trial: {control: 90%}\n    react: {retransmits: '> 50%', rtos: '> 100', sample: 1/1000000, set: {nodelay: true}}",
		"bounds of explore":                tuned + "    set: {initial_cwnd: {explore: [1, 2, 3, 4, 5, 6, 7, 8], by: remote/0, share: 0.1%, probe: 0.1%, bytes: 16MB, evidence: 1000, forget: 365d}}",
		"rule for all, last":               "tune:\n  - {name: a, cgroup: g, match: {port: 1}, tag: x}\n  - {name: b, cgroup: g, tag: x}",
		"rules for all of two groups":      "tune:\n  - {name: a, cgroup: g, tag: x}\n  - {name: b, cgroup: g.slice, tag: x}\n  - {name: c, cgroup: /g.slice, tag: x}",
		"one match in two groups":          "tune:\n  - {name: a, cgroup: g, match: {port: 1}, tag: x}\n  - {name: b, cgroup: h, match: {port: 1}, tag: x}",
		"matches that differ a little":     "tune:\n  - {name: a, cgroup: g, match: {remote: 10.0.0.0/8}, tag: x}\n  - {name: b, cgroup: g, match: {remote: 10.0.0.0/9}, tag: x}\n  - {name: c, cgroup: g, match: {local: 10.0.0.0/8}, tag: x}\n  - {name: d, cgroup: g, match: {same_prefix: 24}, tag: x}\n  - {name: e, cgroup: g, match: {same_prefix: {ipv4: 24}}, tag: x}",
		"nested prefixes":                  tuned + "    tag: x\n    match: {remote: [0.0.0.0/0, '!10.0.0.0/8', 10.1.0.0/16, '!10.1.1.0/24', '::/0']}",
		"every address of a family":        tuned + "    tag: x\n    match: {remote: '::/0'}",
		"syn_rto without a role":           tuned + "    set: {syn_rto: 10ms, synack_rto: 10ms, syn_retries: 2, mss: 1000}",
		"both roles' own options":          "tune:\n  - {name: a, cgroup: g, match: {role: connect}, set: {syn_rto: 10ms, syn_retries: 2, mss: 1000}}\n  - {name: b, cgroup: g, match: {role: accept}, set: {synack_rto: 10ms, initial_rwnd: 40, ecn: true}}",
		"window as large as the clamp":     tuned + "    set: {cwnd_clamp: 40, initial_cwnd: 40}",
		"candidates as large as the clamp": tuned + "    set: {cwnd_clamp: 40, initial_cwnd: {explore: [10, 40]}}",
		"service with the rest":            tunedService + "    match: {service: telemetry, role: accept, remote: 10.0.0.0/8, remote_port: 5, same_prefix: 8, tag: a}",
		"tag of 16":                        tuned + "    tag: 0x000102030405060708090A0B0C0D0E0F\n    match: {tag: '0123456789 ~+-/:'}",
		"options of the peer's tag":        tuned + "    match: {tag: a}\n    set: {initial_cwnd: 40, sndbuf: 5000}",
		"observe off":                      tuned + "    set: {initial_cwnd: 40}\n    observe: off",
		"units":                            tuned + "    set: {sndbuf: 4096, rcvbuf: 1.25KB, rcvlowat: 1GB, notsent_lowat: 0.5MiB, syn_rto: 0.5s, user_timeout: 1h, keepalive_idle: 1.5h, pacing_rate: 12345.6kbit/s, mark: 0xFFFFFFFF}",
		"systemd units":                    "tune:\n  - {name: a, cgroup: -.slice, tag: x}\n  - {name: b, cgroup: 'nfacctd@1.service', tag: x}\n  - {name: c, cgroup: session-1.scope, tag: x}",
	} {
		if _, err := Parse([]byte(doc), "policy.yaml"); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestTuneCgroups(t *testing.T) {
	for given, want := range map[string]string{
		"telemetry.slice": "telemetry.slice", "nfacctd@1.service": "nfacctd@1.service", "a.scope": "a.scope",
		"telemetry": "/telemetry", "a/b": "/a/b", "/a//b/": "/a/b", "/": "/", ".": "/", "/a.slice": "/a.slice", "a.slice/b.service": "/a.slice/b.service",
		".slice": "/.slice", "a.socket": "/a.socket",
	} {
		p, err := Parse([]byte(fmt.Sprintf("tune: [{name: r, cgroup: %q, tag: x}]", given)), "p.yaml")
		if err != nil || p.Tune[0].Cgroup != want {
			t.Errorf("%s: got %+v, %v, want %s", given, p, err, want)
		}
	}
}

func TestSamePrefix(t *testing.T) {
	for given, want := range map[string]SamePrefix{
		"1": {1, 1}, "32": {32, 32}, "33": {-1, 33}, "128": {-1, 128}, "{ipv4: 0}": {0, -1}, "{ipv6: 44}": {-1, 44}, "{ipv4: 24, ipv6: 44}": {24, 44},
	} {
		p, err := Parse([]byte(tuned+"    tag: x\n    match: {same_prefix: "+given+"}"), "p.yaml")
		if err != nil || *p.Tune[0].Match.SamePrefix != want {
			t.Errorf("%s: got %+v, %v, want %+v", given, p, err, want)
		}
	}
}

func TestTooManyRules(t *testing.T) {
	doc := "tune:\n" + strings.Repeat("  - {name: r, cgroup: a, tag: x}\n", 257)
	_, err := Parse([]byte(doc), "p.yaml")
	if err == nil || !strings.HasPrefix(err.Error(), "p.yaml:2:3: tune: must have 0 to 256 items, has 257\n") {
		t.Errorf("got %v", err)
	}
}

// one returns a policy of one rule with one option.
func one(option, value string) []byte {
	return []byte(tuned + "    set: {" + option + ": " + value + "}\n")
}

// TestOptionBounds tests the minimum and the maximum of each option, and their notation in the message about other
// values.
func TestOptionBounds(t *testing.T) {
	for _, o := range TuneOptions {
		if o.Kind == KindText {
			continue
		}
		for _, value := range []int64{o.Min, o.Max} {
			p, err := Parse(one(o.Name, FormatValue(o, value)), "p.yaml")
			if err != nil || p.Tune[0].Set[0].Value != value || p.Tune[0].Set[0].Option != o.Name {
				t.Errorf("%s %s: %+v, %v", o.Name, FormatValue(o, value), p, err)
			}
		}
		if o.Kind == KindSwitch {
			continue
		}
		for _, value := range []int64{o.Min - 1, o.Max + 1} {
			if value < 0 && o.Kind != KindNumber {
				continue
			}
			_, err := Parse(one(o.Name, FormatValue(o, value)), "p.yaml")
			want := fmt.Sprintf("tune[0].set.%s: must be %s to %s, is ", o.Name, FormatValue(o, o.Min), FormatValue(o, o.Max))
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s %s: got %v, want %s", o.Name, FormatValue(o, value), err, want)
			}
		}
	}
}

func TestOptionTable(t *testing.T) {
	seen := map[string]bool{}
	for _, o := range TuneOptions {
		if seen[o.Name] || o.Doc == "" || !strings.HasSuffix(o.Doc, ".") || o.Min > o.Max || o.React && o.Handshake {
			t.Errorf("%+v", o)
		}
		seen[o.Name] = true
		if o.Max >= 1<<32 && o.Kind != KindDuration {
			t.Errorf("%s: %d does not go into the 32 bits of an option", o.Name, o.Max)
		}
		if found, ok := FindTuneOption(o.Name); !ok || found != o {
			t.Errorf("%s is not found", o.Name)
		}
	}
	if _, ok := FindTuneOption("sndbu"); ok {
		t.Error("sndbu is found")
	}
}

// TestSetOrder tests a rule with all options in reverse order.
func TestSetOrder(t *testing.T) {
	doc, want := tuned+"    set:\n", []string{}
	for _, o := range slices.Backward(TuneOptions) {
		value := FormatValue(o, o.Max)
		switch o.Name {
		case "congestion":
			value = "cubic"
		case "auto_flow_label":
			continue
		}
		doc += fmt.Sprintf("      %s: %s\n", o.Name, value)
		want = append(want, o.Name)
	}
	slices.Reverse(want)
	p, err := Parse([]byte(doc), "p.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, s := range p.Tune[0].Set {
		got = append(got, s.Option)
	}
	if !slices.Equal(got, want) {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

func TestReactions(t *testing.T) {
	for _, o := range TuneOptions {
		value := FormatValue(o, o.Max)
		if o.Kind == KindText {
			value = "reno"
		}
		_, err := Parse([]byte(tuned+"    react: {rtos: '> 2', set: {"+o.Name+": "+value+"}}\n"), "p.yaml")
		if refused := err != nil && strings.Contains(err.Error(), "cannot be set by a reaction"); refused == o.React || o.React && err != nil {
			t.Errorf("%s: %v", o.Name, err)
		}
	}
}

func TestFormatValue(t *testing.T) {
	for _, test := range []struct {
		kind  TuneKind
		value int64
		want  string
	}{
		{KindSize, 0, "0B"}, {KindSize, 1, "1B"}, {KindSize, 999, "999B"}, {KindSize, 1000, "1KB"}, {KindSize, 1024, "1KiB"}, {KindSize, 1500, "1.5KB"},
		{KindSize, 150000, "150KB"}, {KindSize, 1500000, "1.5MB"}, {KindSize, 65536, "64KiB"}, {KindSize, 425984, "416KiB"}, {KindSize, 4194304, "4MiB"},
		{KindSize, 1<<30 - 1, "1073741823B"}, {KindSize, 1 << 30, "1GiB"}, {KindSize, 2e9, "2GB"}, {KindSize, -1, "-1B"},
		{KindDuration, 0, "0us"}, {KindDuration, 10, "10us"}, {KindDuration, 10000, "10ms"}, {KindDuration, 1500, "1.5ms"}, {KindDuration, 1500000, "1.5s"},
		{KindDuration, 200000, "200ms"}, {KindDuration, 90000000, "90s"}, {KindDuration, 120000000, "2m"}, {KindDuration, 3600000000, "1h"}, {KindDuration, 86400000000, "1d"},
		{KindDuration, 1234567, "1.234567s"}, {KindDuration, 100000000, "100s"},
		{KindRate, 250000000, "2Gbit/s"}, {KindRate, 1, "8bit/s"}, {KindRate, 125, "1kbit/s"}, {KindRate, 1543200, "12.3456Mbit/s"},
		{KindNumber, 0, "0"}, {KindNumber, 16, "16"}, {KindSwitch, 0, "false"}, {KindSwitch, 1, "true"},
	} {
		if got := FormatValue(TuneOption{Kind: test.kind}, test.value); got != test.want {
			t.Errorf("%s %d: got %s, want %s", test.kind, test.value, got, test.want)
		}
	}
}

// FuzzFormatValue formats values and parses the texts.
func FuzzFormatValue(f *testing.F) {
	for _, v := range []int64{0, 1, 999, 1000, 1023, 1024, 1<<30 - 1, 86400000001, 1<<45 + 1} {
		f.Add(v)
	}
	f.Fuzz(func(t *testing.T, v int64) {
		v = int64(uint64(v) % (1 << 50))
		for kind := range notations {
			o := TuneOption{Kind: kind, Max: 1 << 50}
			text := FormatValue(o, v)
			d := &decoder{bad: map[string]bool{}}
			got, ok := d.quantity("", &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: text}, o)
			if !ok || got != v {
				t.Errorf("%s %d: %s gives %d, %v", kind, v, text, got, d.errs)
			}
		}
	})
}

func TestTuneTexts(t *testing.T) {
	p, err := Parse([]byte(fullTune), writePrefixes(t, "198.51.100.0/24\n"))
	if err != nil {
		t.Fatal(err)
	}
	first, learn, defaults := p.Tune[0], p.Tune[1], p.Tune[2]
	for _, test := range []struct {
		got  fmt.Stringer
		want string
	}{
		{first.Match, `remote 10.0.0.0/8, 4 more; local 2001:db8::1/128; port 1790, 1 more; remote_port 443; local_port 1024-65535; role connect; same_prefix 44; tag "rack-12"`},
		{learn.Match, "role accept; same_prefix 48; service telemetry"},
		{defaults.Match, "all"},
		{first.Match.Remote[1], "!10.1.0.0/16"},
		{first.Match.Remote[3], "192.0.2.1/32"},
		{first.Set[0], "sndbuf 150KB"},
		{first.Set[2], "pacing_rate 2Gbit/s"},
		{first.Set[3], "congestion cubic"},
		{first.Set[4], "initial_cwnd 40"},
		{first.Set[6], "nodelay true"},
		{learn.Set[0], "synack_rto 10ms"},
		{learn.Set[1], "initial_cwnd explore 10, 16, 24, 40, 64 by remote/20, share 12.5%, probe 0%, bytes 32KiB, evidence 2, forget 7d"},
		{defaults.Set[0].Explore, "explore 1, 32768 by remote/24, share 10%, probe 2%, bytes 64KB, evidence 8, forget 1h"},
		{first.React, "retransmits > 2%, rtos > 2, sample 1/100: congestion reno, nodelay false"},
		{defaults.React, "rtos > 0: mark 4294967295"},
		{first.Trial, "control 10%"},
		{Trial{0.07}, "control 7%"},
		{Trial{0.001}, "control 0.1%"},
		{Explore{[]int{1, 2}, 24, 56, 0.1, 0.02, 64000, 8, 3600 * 1000000}, "explore 1, 2 by ipv4 24, ipv6 56, share 10%, probe 2%, bytes 64KB, evidence 8, forget 1h"},
		{SamePrefix{24, 24}, "24"},
		{SamePrefix{24, 44}, "ipv4 24, ipv6 44"},
		{SamePrefix{24, -1}, "ipv4 24"},
		{SamePrefix{-1, 24}, "ipv6 24"},
	} {
		if got := test.got.String(); got != test.want {
			t.Errorf("got  %s\nwant %s", got, test.want)
		}
	}
	for tag, want := range map[string]string{"rack-12": `"rack-12"`, "\x5e\xed\x00": "0x5eed00", "0x41": "0x30783431", "": ""} {
		if got := FormatTag([]byte(tag)); got != want {
			t.Errorf("tag %q: got %s, want %s", tag, got, want)
		}
	}
}

func TestParseTag(t *testing.T) {
	for given, want := range map[string]string{"rack-12": "rack-12", "0x5eed00": "\x5e\xed\x00", "0X5e": "0X5e"} {
		if tag, err := ParseTag(given); err != nil || string(tag) != want {
			t.Errorf("%s: got %q, %v", given, tag, err)
		}
	}
	for given, want := range map[string]string{
		"":                  `parse tag: "" must be 1 to 16 printable ASCII characters`,
		"0x5":               `parse tag: "0x5" must be 0x and 1 to 16 bytes of two hexadecimal digits`,
		"12345678901234567": `parse tag: "12345678901234567" must be 1 to 16 printable ASCII characters`,
	} {
		if tag, err := ParseTag(given); err == nil || err.Error() != want {
			t.Errorf("%s: got %q, %v, want %s", given, tag, err, want)
		}
	}
}

func TestPrefixFile(t *testing.T) {
	doc := []byte("tune:\n  - name: r\n    cgroup: a\n    match: {remote: 10.0.0.0/8, remote_file: sub/prefixes.txt}\n    tag: x\n")
	policy := writePrefixes(t, "")
	file := filepath.Join(filepath.Dir(policy), "sub/prefixes.txt")
	for _, test := range []struct{ name, text, want string }{
		{"lines", "192.0.2.0/24\n# 1\nexample.net\n\n10.0.0.1/8 # 2\n!::ffff:192.0.2.1\n192.0.2.0/24\n192.0.2.1 192.0.2.2\n! 192.0.2.3\n", `
FILE:3: must be an address or a prefix, is "example.net"
  hint: write 10.0.0.0/8 or 2001:db8::/32
FILE:5: has bits set after its length: "10.0.0.1/8"
  hint: write 10.0.0.0/8
FILE:6: must not be IPv4-mapped, is "!::ffff:192.0.2.1"
  hint: write "!192.0.2.1/32"
FILE:7: 192.0.2.0/24 is already in line 1
FILE:8: must be an address or a prefix, is "192.0.2.1 192.0.2.2"
  hint: write 10.0.0.0/8 or 2001:db8::/32
FILE:9: must be an address or a prefix, is "! 192.0.2.3"
  hint: write 10.0.0.0/8 or 2001:db8::/32`},
		{"no end of line", "192.0.2.0/24\nx", `
FILE:2: must be an address or a prefix, is "x"
  hint: write 10.0.0.0/8 or 2001:db8::/32`},
		{"long line", "192.0.2.1\n" + strings.Repeat(" ", maxPrefixLine) + "x\n192.0.2.2\nx\n", `
FILE:2: line is longer than 4096 bytes
FILE:4: must be an address or a prefix, is "x"
  hint: write 10.0.0.0/8 or 2001:db8::/32`},
		{"many wrong lines", strings.Repeat("# x\n::ffff:0:0/95\n", 22), "\nFILE:2: must not be IPv4-mapped, is \"::ffff:0:0/95\"" + func() (s string) {
			for i := 2; i <= maxPrefixErrors; i++ {
				s += fmt.Sprintf("\nFILE:%d: must not be IPv4-mapped, is \"::ffff:0:0/95\"", 2*i)
			}
			return s
		}() + "\nFILE: 2 more lines are wrong"},
		{"in remote too", "192.0.2.0/24\n!10.0.0.0/8\n", "\nFILE: 10.0.0.0/8 is already in remote"},
		{"empty", "", "\nFILE: has no prefix\n  hint: leave remote_file out to match everything"},
		{"comments", "# none\n", "\nFILE: has no prefix\n  hint: leave remote_file out to match everything"},
		{"too many lines", strings.Repeat("\n", maxPrefixLines) + "192.0.2.1", "\nread FILE: more than 1000000 lines"},
		{"too large", "192.0.2.1 #" + strings.Repeat(strings.Repeat("x", 1<<20)+"\n#", 64), "\nread FILE: larger than 67108864 bytes"},
	} {
		t.Run(test.name, func(t *testing.T) {
			if err := os.WriteFile(file, []byte(test.text), 0o644); err != nil {
				t.Fatal(err)
			}
			_, err := Parse(doc, policy)
			if err == nil {
				t.Fatal("accepted")
			}
			got := "\n" + strings.NewReplacer(policy+":4:46: tune[0].match.remote_file: ", "", file, "FILE").Replace(err.Error())
			if got != test.want {
				t.Errorf("got%s\nwant%s", got, test.want)
			}
		})
	}
	only := []byte("tune:\n  - name: r\n    cgroup: a\n    match: {remote_file: sub/prefixes.txt}\n    tag: x\n")
	if err := os.WriteFile(file, []byte("!10.0.0.0/8\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	want := policy + ":4:26: tune[0].match.remote_file: must have a prefix without !\n  hint: add 0.0.0.0/0 or ::/0 for all other addresses"
	if _, err := Parse(only, policy); err == nil || err.Error() != want {
		t.Errorf("got %v\nwant %s", err, want)
	}
	if p, err := Parse(doc, policy); err == nil {
		t.Errorf("10.0.0.0/8 with and without !: %+v", p)
	}
}

// TestLargePrefixFile tests a file with the maximum number of prefixes, and too many rules that name it.
func TestLargePrefixFile(t *testing.T) {
	policy := writePrefixes(t, "")
	f, err := os.Create(filepath.Join(filepath.Dir(policy), "sub/prefixes.txt"))
	if err != nil {
		t.Fatal(err)
	}
	w := bufio.NewWriter(f)
	for i := range maxPrefixLines {
		fmt.Fprintf(w, "10.%d.%d.%d\n", i>>16, i>>8&255, i&255)
	}
	if err := errors.Join(w.Flush(), f.Close()); err != nil {
		t.Fatal(err)
	}
	doc := "tune:\n"
	for i := range 4 {
		doc += fmt.Sprintf("  - {name: r%d, cgroup: a, tag: x, match: {port: %d, remote_file: sub/prefixes.txt}}\n", i, i+1)
	}
	p, err := Parse([]byte(doc), policy)
	if err != nil {
		t.Fatal(err)
	}
	last := p.Tune[3].Match.Remote
	if len(last) != maxPrefixLines || last[maxPrefixLines-1] != term("10.15.66.63/32") {
		t.Errorf("%d prefixes, the last %v", len(last), last[len(last)-1])
	}
	doc += "  - {name: r4, cgroup: a, tag: x, match: {remote: 192.0.2.1, port: 5}}\n  - {name: r5, cgroup: a, tag: x, match: {local: 192.0.2.1, port: 6}}\n"
	want := policy + ":6:42: tune[4].match: has, with the rules before it, more than 4000000 prefixes"
	if _, err := Parse([]byte(doc), policy); err == nil || err.Error() != want {
		t.Errorf("got %v\nwant %s", err, want)
	}
}

func TestTuneSchema(t *testing.T) {
	data, err := Schema()
	if err != nil {
		t.Fatal(err)
	}
	var s map[string]any
	if err := json.Unmarshal(data, &s); err != nil {
		t.Fatal(err)
	}
	check := func(doc []byte) string {
		var v any
		if err := yaml.Unmarshal(doc, &v); err != nil {
			t.Fatalf("%s: %v", doc, err)
		}
		return violation(s, v)
	}
	if v := check([]byte(fullTune)); v != "" {
		t.Errorf("full policy refused for %s", v)
	}
	at := func(keys ...string) map[string]any {
		here := s["properties"].(map[string]any)["tune"].(map[string]any)["items"].(map[string]any)
		for _, k := range keys {
			here = here["properties"].(map[string]any)[k].(map[string]any)
		}
		return here
	}
	for _, o := range TuneOptions {
		property, ok := at("set")["properties"].(map[string]any)[o.Name].(map[string]any)
		if !ok {
			t.Errorf("%s is not in the schema", o.Name)
			continue
		}
		if text, _ := property["description"].(string); !strings.HasPrefix(text, o.Doc) {
			t.Errorf("%s is described as %q", o.Name, text)
		}
		if _, ok := at("react", "set")["properties"].(map[string]any)[o.Name]; ok != o.React {
			t.Errorf("%s is in the schema of reactions: %v", o.Name, ok)
		}
		least, most := FormatValue(o, o.Min), FormatValue(o, o.Max)
		if o.Kind == KindText {
			least, most = "a", "abcdefghijklmno"
		}
		for _, value := range []string{least, most} {
			if v := check(one(o.Name, value)); v != "" {
				t.Errorf("%s %s is refused for %s", o.Name, value, v)
			}
		}
		wrong := []string{"[]", "''"}
		switch o.Kind {
		case KindSize:
			wrong = append(wrong, strconv.FormatInt(o.Min-1, 10), strconv.FormatInt(o.Max+1, 10), "5ms")
		case KindNumber:
			wrong = append(wrong, strconv.FormatInt(o.Min-1, 10), strconv.FormatInt(o.Max+1, 10), "five")
		case KindDuration, KindRate:
			wrong = append(wrong, "5000", "5KB")
		case KindText:
			wrong = append(wrong, "CUBIC", "abcdefghijklmnop")
		case KindSwitch:
			wrong = append(wrong, "1")
		}
		for _, value := range wrong {
			if check(one(o.Name, value)) == "" {
				t.Errorf("%s %s is accepted by the schema", o.Name, value)
			}
			if _, err := Parse(one(o.Name, value), "p.yaml"); err == nil {
				t.Errorf("%s %s is accepted by Parse", o.Name, value)
			}
		}
	}
	for doc, want := range map[string]string{
		"tune: {}":                                             "tune: type",
		"tune: [{name: a}]":                                    "tune: required cgroup",
		"tune: [{name: A, cgroup: a}]":                         "tune: name: pattern",
		tuned + "    set: {}":                                  "tune: set: properties",
		tuned + "    set: {sndbuff: 1}":                        "tune: set: additional sndbuff",
		tuned + "    tag: ''":                                  "tune: tag: oneOf",
		tuned + "    observe: on":                              "tune: observe: enum",
		tuned + "    trial: {control: 10}":                     "tune: trial: control: type",
		tuned + "    react: {rtos: '2', set: {nodelay: true}}": "tune: react: rtos: pattern",
		tuned + "    react: {rtos: '> 2'}":                     "tune: react: required set",
		tuned + "    match: {remote: []}":                      "tune: match: remote: oneOf",
		tuned + "    match: {port: [0]}":                       "tune: match: port: oneOf",
		tuned + "    match: {role: both}":                      "tune: match: role: enum",
		tuned + "    match: {same_prefix: {}}":                 "tune: match: same_prefix: oneOf",
		tuned + "    match: {same_prefix: 129}":                "tune: match: same_prefix: oneOf",
	} {
		if got := check([]byte(doc)); got != want {
			t.Errorf("got %q, want %q for\n%s", got, want, doc)
		}
		if _, err := Parse([]byte(doc), "p.yaml"); err == nil {
			t.Errorf("Parse accepts\n%s", doc)
		}
	}
}

// optionRow returns the row of an option in the table of docs/policy.md.
func optionRow(o TuneOption) string {
	values := FormatValue(o, o.Min) + " to " + FormatValue(o, o.Max)
	switch o.Kind {
	case KindSwitch:
		values = "switch"
	case KindText:
		values = "a name"
	}
	react := ""
	if o.React {
		react = "yes"
	}
	return fmt.Sprintf("| `%s` | %s | %s | %s |", o.Name, values, o.Doc, react)
}

func TestTuneDocs(t *testing.T) {
	data, err := os.ReadFile(filepath.Join("..", "..", "docs", "policy.md"))
	if err != nil {
		t.Fatal(err)
	}
	doc := string(data)
	const head = "| option | values | what it does | react |\n|---|---|---|---|\n"
	_, table, ok := strings.Cut(doc, head)
	if !ok {
		t.Fatalf("docs/policy.md has no table that begins\n%s", head)
	}
	table, _, _ = strings.Cut(table, "\n\n")
	want := make([]string, len(TuneOptions))
	for i, o := range TuneOptions {
		want[i] = optionRow(o)
	}
	if got := strings.Split(table, "\n"); !slices.Equal(got, want) {
		t.Errorf("the table of options in docs/policy.md must be\n%s%s", head, strings.Join(want, "\n"))
	}
}

// TestDocsExamples tests the policies in the documentation.
func TestDocsExamples(t *testing.T) {
	data, err := os.ReadFile(filepath.Join("..", "..", "docs", "policy.md"))
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "prefixes.txt"), []byte("203.0.113.0/24\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	blocks := strings.Split(string(data), "```")
	examples := 0
	for _, b := range blocks {
		if text, ok := strings.CutPrefix(b, "yaml\n"); ok {
			examples++
			if _, err := Parse([]byte(text), filepath.Join(dir, "policy.yaml")); err != nil {
				t.Errorf("%v in\n%s", err, text)
			}
		}
	}
	if examples < 2 {
		t.Errorf("%d examples", examples)
	}
}
