// SPDX-License-Identifier: Apache-2.0

package config

import (
	"cmp"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v4"
)

// fullTrace has every key of the trace section.
const fullTrace = `
services:
  telemetry: {slots: 1, listeners: [{protocol: tcp, address: '[::]:1790'}, {protocol: udp, address: '[::]:4739'}]}
trace:
  - name: replies
    cgroup: telemetry.slice
    match:
      remote: [10.0.0.0/8, "!10.1.0.0/16"]
      remote_file: sub/prefixes.txt
      local: "2001:db8::1"
      port: [1790, "20000-20003"]
      remote_port: 443
      local_port: 1024-65535
      role: connect
      same_prefix: 44
    connections: 1/10
    messages: 100/s
    group_by: [arm, rule, {remote: {ipv4: 20, ipv6: 64}}, port, cgroup, service]
    groups: 1024
    stages: [reader, network, rx_stack, nic, send, qdisc, stack]
    protocols: [udp, tcp]
  - cgroup: telemetry.slice
    match: {service: telemetry, role: accept}
    messages: 1/1
    group_by: remote/24
    stages: reader
    protocols: tcp
  - cgroup: /
`

func TestParseTrace(t *testing.T) {
	policy := writePrefixes(t, "198.51.100.0/24\n")
	got, err := Parse([]byte(fullTrace), policy)
	if err != nil {
		t.Fatal(err)
	}
	want := []TraceRule{{
		Name:   "replies",
		Cgroup: "telemetry.slice",
		Match: Match{
			Remote:      []PrefixTerm{term("10.0.0.0/8"), term("!10.1.0.0/16"), term("198.51.100.0/24")},
			RemoteFile:  filepath.Join(filepath.Dir(policy), "sub/prefixes.txt"),
			Local:       []PrefixTerm{term("2001:db8::1/128")},
			Ports:       []PortRange{{1790, 1790}, {20000, 20003}},
			RemotePorts: []PortRange{{443, 443}},
			LocalPorts:  []PortRange{{1024, 65535}},
			Role:        RoleConnect,
			SamePrefix:  &SamePrefix{-1, 44},
		},
		Connections: 10,
		Messages:    TraceSampling{PerSecond: 100},
		GroupBy:     []TraceGroupBy{{Kind: GroupArm}, {Kind: GroupRule}, {GroupRemote, 20, 64}, {Kind: GroupPort}, {Kind: GroupCgroup}, {Kind: GroupService}},
		Groups:      1024,
		Stages:      []Stage{StageSend, StageStack, StageQdisc, StageNIC, StageNetwork, StageRXStack, StageReader},
		Protocols:   []Protocol{TCP, UDP},
	}, {
		Name:        "telemetry.slice",
		Cgroup:      "telemetry.slice",
		Match:       Match{Service: "telemetry", Role: RoleAccept},
		Connections: 1,
		Messages:    TraceSampling{OneIn: 1},
		GroupBy:     []TraceGroupBy{{GroupRemote, 24, 48}},
		Groups:      64,
		Stages:      []Stage{StageReader},
		Protocols:   []Protocol{TCP},
	}, {
		Name:        "/",
		Cgroup:      "/",
		Connections: 1,
		Messages:    TraceSampling{OneIn: 100},
		Groups:      64,
		Stages:      []Stage{StageStack, StageQdisc, StageNIC, StageNetwork},
		Protocols:   []Protocol{TCP},
	}}
	for i := range want {
		if !reflect.DeepEqual(got.Trace[i], want[i]) {
			t.Errorf("got  %+v\nwant %+v", got.Trace[i], want[i])
		}
	}
	if len(got.Trace) != len(want) || len(got.Services) != 1 {
		t.Errorf("%d rules, %d services", len(got.Trace), len(got.Services))
	}
}

// tracing returns n rules of a cgroup, one per line.
func tracing(cgroup string, n, groups int) string {
	rules := ""
	for i := range n {
		rules += fmt.Sprintf("  - {name: %.1s%d, cgroup: %s, match: {port: %d}, groups: %d}\n", cgroup, i, cgroup, i+1, groups)
	}
	return rules
}

// TestAcceptTrace tests valid policies that are almost refused.
func TestAcceptTrace(t *testing.T) {
	for name, doc := range map[string]string{
		"no rules":                        "trace: []",
		"no services, no tune":            traced,
		"all three":                       "services: {}\ntune: []\ntrace: []",
		"32 rules of a cgroup":            "trace:\n" + tracing("a.slice", 32, 127),
		"64 rules of two cgroups":         "trace:\n" + tracing("a.slice", 32, 127) + tracing("b.slice", 32, 127),
		"largest numbers":                 traced + "    connections: 1/1000000\n    messages: 1/1000000\n    groups: 1024",
		"most a second":                   traced + "    messages: 100000/s",
		"least a second":                  traced + "    messages: 1/s",
		"longest prefixes":                traced + "    group_by: remote/32",
		"shortest prefixes":               traced + "    group_by: [remote/1]",
		"longest prefixes of a mapping":   traced + "    group_by: {remote: {ipv4: 32, ipv6: 128}}",
		"names of tune and trace":         "tune: [{name: a, cgroup: g, tag: x}]\ntrace: [{name: a, cgroup: g}]",
		"a name and a cgroup":             "trace: [{name: a, cgroup: g}, {cgroup: a}, {cgroup: g}]",
		"one unit, two notations":         "trace: [{cgroup: g.slice}, {cgroup: /g.slice}]",
		"datagrams":                       traced + "    protocols: udp",
		"one stage of datagrams":          traced + "    protocols: udp\n    stages: [send, rx_stack]",
		"stages of TCP, both protocols":   traced + "    protocols: [tcp, udp]\n    stages: [send, nic, network]",
		"service with both protocols":     tracedService + "    match: {service: telemetry}\n    protocols: [tcp, udp]",
		"service with the rest":           tracedService + "    match: {service: telemetry, role: accept, remote: 10.0.0.0/8, remote_port: 5, same_prefix: 8}",
		"grouped by what policy has none": traced + "    group_by: [service, rule, arm]",
	} {
		if _, err := Parse([]byte(doc), "policy.yaml"); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestTooManyTraceRules(t *testing.T) {
	doc := "trace:\n"
	for i := range 65 {
		doc += fmt.Sprintf("  - {cgroup: c%d}\n", i)
	}
	_, err := Parse([]byte(doc), "p.yaml")
	if want := "p.yaml:2:3: trace: must have 0 to 64 items, has 65"; err == nil || err.Error() != want {
		t.Errorf("got  %v\nwant %s", err, want)
	}
}

// TestTraceLimits tests the limits of the rules of one cgroup, with rules of another cgroup between them.
func TestTraceLimits(t *testing.T) {
	for _, test := range []struct{ name, doc, want string }{
		{"33 rules", "trace:\n" + tracing("a.slice", 34, 1) + "  - {cgroup: b.slice}\n", `
p.yaml:34:5: trace[32]: is rule 33 of "a.slice", at most 32
  hint: a match may have lists of prefixes and ports`},
		{"4097 groups", "trace:\n" + tracing("a.slice", 3, 1024) + "  - {cgroup: b.slice, groups: 1024}\n  - {name: last, cgroup: a.slice, groups: 1021}\n", `
p.yaml:6:43: trace[4].groups: makes 4097 groups of "a.slice" with the rules before it, at most 4096
  hint: each rule has one more, for other`},
		{"groups by default", "trace:\n" + tracing("a.slice", 3, 1024) + "  - {name: s, cgroup: a.slice, groups: 1000}\n  - {cgroup: a.slice}\n  - {name: t, cgroup: a.slice}\n", `
p.yaml:6:5: trace[4]: makes 4141 groups of "a.slice" with the rules before it, at most 4096
  hint: each rule has one more, for other`},
	} {
		_, err := Parse([]byte(test.doc), "p.yaml")
		if want := strings.TrimSpace(test.want); err == nil || err.Error() != want {
			t.Errorf("%s: got\n%v\nwant\n%s", test.name, err, want)
		}
	}
	if _, err := Parse([]byte("trace:\n"+tracing("a.slice", 3, 1024)+"  - {cgroup: a.slice, groups: 1020}\n"), "p.yaml"); err != nil {
		t.Errorf("4096 groups: %v", err)
	}
}

// TestTraceTexts tests the texts of values; a text that is valid in the file, under key, is parsed again.
func TestTraceTexts(t *testing.T) {
	for _, test := range []struct {
		key  string
		text fmt.Stringer
		want string
	}{
		{"messages", TraceSampling{OneIn: 1}, "1/1"},
		{"messages", TraceSampling{OneIn: 1000000}, "1/1000000"},
		{"messages", TraceSampling{PerSecond: 100}, "100/s"},
		{"group_by", TraceGroupBy{GroupRemote, 24, 48}, "remote/24"},
		{"group_by", TraceGroupBy{GroupRemote, 32, 64}, "remote/32"},
		{"group_by", TraceGroupBy{Kind: GroupArm}, "arm"},
		{"", TraceGroupBy{GroupRemote, 24, 56}, "remote ipv4/24 ipv6/56"},
	} {
		if got := test.text.String(); got != test.want {
			t.Errorf("got  %s\nwant %s", got, test.want)
		}
		if test.key == "" {
			continue
		}
		p, err := Parse([]byte(traced+"    "+test.key+": "+test.want+"\n"), "p.yaml")
		if err != nil {
			t.Error(err)
			continue
		}
		var read fmt.Stringer = p.Trace[0].Messages
		if test.key == "group_by" {
			read = p.Trace[0].GroupBy[0]
		}
		if read != test.text {
			t.Errorf("%s is read as %+v", test.want, read)
		}
	}
}

func TestTraceSchema(t *testing.T) {
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
	for _, doc := range []string{fullTrace, "trace: []", "trace:\n" + tracing("a.slice", 32, 127)} {
		if v := check(doc); v != "" {
			t.Errorf("refused for %s:\n%s", v, doc)
		}
	}
	for doc, want := range map[string]string{
		"trace: {}":                                  "trace: type",
		"trace: [{name: a}]":                         "trace: required cgroup",
		"trace: [{name: A, cgroup: a}]":              "trace: name: pattern",
		traced + "    sample: 1/10":                  "trace: additional sample",
		traced + "    connections: 1/0":              "trace: connections: pattern",
		traced + "    messages: 1/0":                 "trace: messages: pattern",
		traced + "    messages: 0/s":                 "trace: messages: pattern",
		traced + "    messages: 100":                 "trace: messages: type",
		traced + "    groups: 1025":                  "trace: groups: range",
		traced + "    group_by: []":                  "trace: group_by: oneOf",
		traced + "    group_by: remote":              "trace: group_by: oneOf",
		traced + "    group_by: remote/0":            "trace: group_by: oneOf",
		traced + "    group_by: remote/33":           "trace: group_by: oneOf",
		traced + "    group_by: [ports]":             "trace: group_by: oneOf",
		traced + "    group_by: {remote: {ipv4: 0}}": "trace: group_by: oneOf",
		traced + "    group_by: {remote: {}}":        "trace: group_by: oneOf",
		traced + "    group_by: {}":                  "trace: group_by: oneOf",
		traced + "    stages: []":                    "trace: stages: oneOf",
		traced + "    stages: all":                   "trace: stages: oneOf",
		traced + "    stages: [total]":               "trace: stages: oneOf",
		traced + "    protocols: [sctp]":             "trace: protocols: oneOf",
	} {
		if got := check(doc); got != want {
			t.Errorf("got %q, want %q for\n%s", got, want, doc)
		}
		if _, err := Parse([]byte(doc), "p.yaml"); err == nil {
			t.Errorf("Parse accepts\n%s", doc)
		}
	}
}

// docsTable returns the rows of the table in section Trace of docs/policy.md that begins with head.
func docsTable(t *testing.T, head string) [][]string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("..", "..", "docs", "policy.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(data), "\n## Trace\n")
	section, _, _ = strings.Cut(section, "\n## ")
	_, table, ok := strings.Cut(section, head+"\n"+strings.Repeat("|---", strings.Count(head, "|")-1)+"|\n")
	if !ok {
		t.Fatalf("docs/policy.md has no table in the section Trace that begins %s", head)
	}
	table, _, _ = strings.Cut(table, "\n\n")
	var rows [][]string
	for line := range strings.SplitSeq(strings.TrimSpace(table), "\n") {
		rows = append(rows, strings.Split(strings.TrimSuffix(strings.TrimPrefix(line, "| "), " |"), " | "))
	}
	return rows
}

func TestTraceDocs(t *testing.T) {
	defaults := map[string]string{
		"name": "the cgroup", "match": "all of the cgroup", "group_by": "none", "protocols": "`tcp`",
		"stages": "`" + joinWords(standardStages(), "and") + "`",
	}
	keys := docsTable(t, "| key | meaning | default |")
	fields := fieldsOf(reflect.TypeFor[TraceRule]())
	if len(keys) != len(fields) {
		t.Fatalf("%d keys in docs/policy.md, %d in the policy", len(keys), len(fields))
	}
	for i, f := range fields {
		key := f.Tag.Get("yaml")
		want := defaults[key]
		if value := f.Tag.Get("default"); value != "" {
			want = "`" + value + "`"
		}
		if f.Tag.Get("required") != "" {
			want = "required"
		}
		if row := keys[i]; len(row) != 3 || row[0] != "`"+key+"`" || row[2] != want {
			t.Errorf("row %d of the keys is %q, want %s and the default %s", i, row, key, want)
		}
	}
	var stages []string
	for _, s := range traceStages {
		protocols := cmp.Or(map[bool]string{true: "tcp, udp"}[s.udp], "tcp")
		stages = append(stages, fmt.Sprintf("`%s` | %s | %s | %s", s.stage, s.doc, protocols, map[bool]string{true: "yes"}[s.standard]))
	}
	var got []string
	for _, row := range docsTable(t, "| stage | measures | protocols | default |") {
		got = append(got, strings.Join(row, " | "))
	}
	if !slices.Equal(got, stages) {
		t.Errorf("the rows of the stages are\n%s\nand must be\n%s", strings.Join(got, "\n"), strings.Join(stages, "\n"))
	}
	kinds := []string{"`remote/N`"}
	for _, k := range groupKinds {
		kinds = append(kinds, "`"+string(k)+"`")
	}
	got = nil
	for _, row := range docsTable(t, "| group_by | a group has the messages of |") {
		got = append(got, row[0])
	}
	if !slices.Equal(got, kinds) {
		t.Errorf("the kinds of groups are %s, want %s", got, kinds)
	}
}
