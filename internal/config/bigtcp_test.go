// SPDX-License-Identifier: Apache-2.0

package config

import (
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v4"
)

const fullBigTCP = `
bigtcp:
  - {interface: eth0, ipv6: off}
  - {interface: "eth*", ipv6: 192KB, ipv4: 192KiB}
  - {interface: eth0, netns: /run/netns//x, ipv4: 65536}
  - interface: '*'
    netns: /run/netns/x
    ipv6: 524280
    ipv4: 0.1MB
`

func TestParseBigTCP(t *testing.T) {
	p, err := Parse([]byte(fullBigTCP), "policy.yaml")
	if err != nil {
		t.Fatal(err)
	}
	want := []BigTCPRule{
		{Interface: "eth0", IPv6: 65536},
		{Interface: "eth*", IPv6: 192000, IPv4: 196608},
		{Interface: "eth0", Netns: "/run/netns/x", IPv4: 65536},
		{Interface: "*", Netns: "/run/netns/x", IPv6: 524280, IPv4: 100000},
	}
	if !slices.Equal(p.BigTCP, want) {
		t.Errorf("got  %+v\nwant %+v", p.BigTCP, want)
	}
	texts := []string{"eth0: ipv6 off", "eth*: ipv6 192KB, ipv4 192KiB", "eth0 of /run/netns/x: ipv4 off", "* of /run/netns/x: ipv6 524280B, ipv4 100KB"}
	for i, rule := range p.BigTCP {
		if got := rule.String(); got != texts[i] {
			t.Errorf("got  %s\nwant %s", got, texts[i])
		}
	}
}

// TestAcceptBigTCP tests valid policies that are almost refused.
func TestAcceptBigTCP(t *testing.T) {
	for name, doc := range map[string]string{
		"no rules":                       "bigtcp: []",
		"all four":                       "services: {}\ntune: []\ntrace: []\nbigtcp: []",
		"smallest and largest":           "bigtcp: [{interface: a, ipv6: 64KiB, ipv4: 524280B}]",
		"64 rules":                       "bigtcp:\n" + numbered(64),
		"longest name":                   "bigtcp: [{interface: abcdefghijklmno, ipv6: off}]",
		"a glob longer than names":       "bigtcp: [{interface: '[abcdefghijklmno]*', ipv6: off}]",
		"a name before a glob":           "bigtcp: [{interface: eth0, ipv6: off}, {interface: 'eth*', ipv6: 192KB}]",
		"globs that match the same":      "bigtcp: [{interface: 'e*', ipv6: off}, {interface: 'eth*', ipv6: 192KB}]",
		"a VLAN, an alternative of dots": "bigtcp: [{interface: eth0.100, ipv6: off}]",
	} {
		if _, err := Parse([]byte(doc), "policy.yaml"); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := Parse([]byte("bigtcp:\n"+numbered(65)), "p.yaml"); err == nil || !strings.Contains(err.Error(), "must have 0 to 64 items, has 65") {
		t.Errorf("65 rules: %v", err)
	}
}

// numbered returns n rules, one per line.
func numbered(n int) string {
	rules := ""
	for i := range n {
		rules += "  - {interface: " + strings.Repeat("a", i/15+1) + string(rune('a'+i%15)) + ", ipv6: 192KB}\n"
	}
	return rules
}

func TestBigTCPMatches(t *testing.T) {
	for _, test := range []struct {
		rule  string
		named bool
		yes   []string
		no    []string
	}{
		{"eth0", true, []string{"eth0"}, []string{"eth01", "eth", "Eth0"}},
		{"eth*", false, []string{"eth", "eth0", "eth0.100"}, []string{"veth0"}},
		{"veth[0-9]", false, []string{"veth0"}, []string{"veth10", "vetha"}},
		{"*", false, []string{"lo", "eth0"}, nil},
	} {
		r := BigTCPRule{Interface: test.rule}
		if r.Named() != test.named {
			t.Errorf("%s: named is %t", test.rule, r.Named())
		}
		for _, name := range test.yes {
			if !r.Matches(name) {
				t.Errorf("%s does not match %s", test.rule, name)
			}
		}
		for _, name := range test.no {
			if r.Matches(name) {
				t.Errorf("%s matches %s", test.rule, name)
			}
		}
	}
}

func TestParseBigTCPSize(t *testing.T) {
	for text, want := range map[string]uint32{
		"off": 65536, "64KiB": 65536, "65536": 65536, "192KB": 192000, "192KiB": 196608, "185000": 185000, "524280B": 524280, "0.1MB": 100000,
	} {
		if got, err := ParseBigTCPSize(text); err != nil || got != want {
			t.Errorf("%s: %d, %v; want %d", text, got, err, want)
		}
	}
	for text, want := range map[string]string{
		"":        `size "" must be off or a size such as 192KB; units: GB, MB, KB, B, GiB, MiB, KiB`,
		"192kb":   `size "192kb" must be off or a size such as 192KB; write 192KB`,
		"0x20000": `size "0x20000" must be off or a size such as 192KB; units: GB, MB, KB, B, GiB, MiB, KiB`,
		"65535":   `size "65535" must be off or 65536 to 524280 bytes`,
		"-1":      `size "-1" must be off or a size such as 192KB; units: GB, MB, KB, B, GiB, MiB, KiB`,
		"1GB":     `size "1GB" must be off or 65536 to 524280 bytes`,
	} {
		if got, err := ParseBigTCPSize(text); err == nil || err.Error() != want {
			t.Errorf("%s: %d, %v; want %s", text, got, err, want)
		}
	}
}

func TestBigTCPSchema(t *testing.T) {
	data, err := Schema()
	if err != nil {
		t.Fatal(err)
	}
	var s map[string]any
	if err := json.Unmarshal(data, &s); err != nil {
		t.Fatal(err)
	}
	check := func(doc string) string {
		var v any
		if err := yaml.Unmarshal([]byte(doc), &v); err != nil {
			t.Fatalf("%s: %v", doc, err)
		}
		return violation(s, v)
	}
	for _, doc := range []string{fullBigTCP, "bigtcp: []", "bigtcp:\n" + numbered(64)} {
		if v := check(doc); v != "" {
			t.Errorf("refused for %s:\n%s", v, doc)
		}
	}
	for doc, want := range map[string]string{
		"bigtcp: {}":                                        "bigtcp: type",
		"bigtcp: [{ipv6: 192KB}]":                           "bigtcp: required interface",
		"bigtcp: [{interface: '', ipv6: 192KB}]":            "bigtcp: interface: length",
		"bigtcp: [{interface: a, ipv6: 192kb}]":             "bigtcp: ipv6: oneOf",
		"bigtcp: [{interface: a, ipv6: 1000}]":              "bigtcp: ipv6: oneOf",
		"bigtcp: [{interface: a, ipv4: 524281}]":            "bigtcp: ipv4: oneOf",
		"bigtcp: [{interface: a, ipv4: '192000'}]":          "bigtcp: ipv4: oneOf",
		"bigtcp: [{interface: a, ipv4: 192KB, netns: x}]":   "bigtcp: netns: pattern",
		"bigtcp: [{interface: a, ipv4: 192KB, gso: 192KB}]": "bigtcp: additional gso",
		"bigtcp:\n" + numbered(65):                          "bigtcp: items",
	} {
		if got := check(doc); got != want {
			t.Errorf("got %q, want %q for\n%s", got, want, doc)
		}
		if _, err := Parse([]byte(doc), "p.yaml"); err == nil {
			t.Errorf("Parse accepts\n%s", doc)
		}
	}
}

// The table in section BIG TCP of docs/policy.md lists every key.
func TestBigTCPDocs(t *testing.T) {
	data, err := os.ReadFile(filepath.Join("..", "..", "docs", "policy.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(data), "\n## BIG TCP\n")
	_, table, ok := strings.Cut(section, "| key | meaning | default |\n|---|---|---|\n")
	if !ok {
		t.Fatal("docs/policy.md has no table of keys in the section BIG TCP")
	}
	table, _, _ = strings.Cut(table, "\n\n")
	var want, got []string
	for line := range strings.SplitSeq(table, "\n") {
		columns := strings.Split(line, " | ")
		got = append(got, columns[0]+" "+strings.TrimSuffix(columns[len(columns)-1], " |"))
	}
	defaults := map[string]string{"interface": "required", "netns": "the agent's", "ipv6": "left as it is", "ipv4": "left as it is"}
	for _, f := range fieldsOf(reflect.TypeFor[BigTCPRule]()) {
		key := f.Tag.Get("yaml")
		want = append(want, "| `"+key+"` "+defaults[key])
	}
	if !slices.Equal(got, want) {
		t.Errorf("the keys and defaults of the table are %q, want %q", got, want)
	}
}
