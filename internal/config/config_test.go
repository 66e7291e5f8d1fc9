// SPDX-License-Identifier: Apache-2.0

package config

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v4"
)

var update = flag.Bool("update", false, "write testdata/schema.json")

// full has every key of the policy file.
const full = `
services:
  telemetry:
    slots: 4
    listeners:
      - {protocol: tcp, address: "[::]:1790", member_ports: "20000-20003"}
      - {protocol: udp, address: "10.0.0.1:4739", member_ports: 20000}
    steering: lookup
    when_empty: {standby: 3}
    on_start: adopt
    on_move: keep
    pace: {devices: 8, timeout: 90s}
    device_map: maps/../devices.csv
    backlog: 4096
    user: [1001, pmacct]
    netns: /run/netns/telemetry/
    cgroup: telemetry.slice/
    track_devices: off
    members:
      - {match: {systemd_unit: "nfacctd@*.service"}, slot: instance}
      - {match: {command_line: 'nfacctd -f \S+-(\d+)\.conf'}, slot: group}
      - {match: {executable: /usr/sbin/nfacctd, user: pmacct, cgroup: "telemetry.slice/*"}, slot: free}
      - {match: {user: 0}, slot: environment}
      - {match: {user: "65534"}, slot: 3, namespaces: any}
  bare:
    slots: 1
    listeners: [{protocol: tcp, address: "[fd00::1]:1790"}]
metrics: {listen: "127.0.0.1:9732", otlp: {endpoint: "https://collector.example.net:4318", interval: 1m, headers_file: headers, ca: /etc/ssl/ca.pem}}
ui: {listen: "[2001:db8::1]:9733", tls: {cert: /etc/ui.pem, key: /etc/ui.key, client_ca: /etc/ca.pem}, token_file: /etc/token}
`

// minimal is the shortest policy; what a test appends to it is a key of the
// service in line 5 and after it.
const minimal = `services:
  t:
    slots: 4
    listeners: [{protocol: tcp, address: "[::]:1790"}]
`

func TestParse(t *testing.T) {
	got, err := Parse([]byte(full), "/etc/sockeye/policy.yaml")
	if err != nil {
		t.Fatal(err)
	}
	want := &Policy{
		Services: []Service{{
			Name:         "bare",
			Slots:        1,
			Listeners:    []Listener{{Protocol: TCP, Address: netip.MustParseAddrPort("[fd00::1]:1790")}},
			Steering:     Reuseport,
			Templates:    KeepTemplates,
			OnStart:      Reset,
			OnMove:       CloseMoved,
			Cgroup:       "/",
			TrackDevices: 65536,
		}, {
			Name:  "telemetry",
			Slots: 4,
			Listeners: []Listener{
				{TCP, netip.MustParseAddrPort("[::]:1790"), false, PortRange{20000, 20003}},
				{UDP, netip.MustParseAddrPort("10.0.0.1:4739"), false, PortRange{20000, 20000}},
			},
			Steering:  Lookup,
			Templates: KeepTemplates,
			OnStart:   Adopt,
			OnMove:    KeepMoved,
			Pace:      &Pace{Devices: 8, Timeout: 90_000_000},
			WhenEmpty: WhenEmpty{Standby: new(3)},
			DeviceMap: "/etc/sockeye/devices.csv",
			Backlog:   4096,
			Users:     []string{"1001", "pmacct"},
			Netns:     "/run/netns/telemetry",
			Cgroup:    "/telemetry.slice",
			Members: []Member{
				{MemberMatch{SystemdUnit: "nfacctd@*.service"}, SlotRule{Kind: SlotInstance}, HostNamespaces},
				{MemberMatch{CommandLine: regexp.MustCompile(`nfacctd -f \S+-(\d+)\.conf`)}, SlotRule{Kind: SlotGroup}, HostNamespaces},
				{MemberMatch{Executable: "/usr/sbin/nfacctd", User: "pmacct", Cgroup: "/telemetry.slice/*"}, SlotRule{Kind: SlotFree}, HostNamespaces},
				{MemberMatch{User: "0"}, SlotRule{Kind: SlotEnvironment}, HostNamespaces},
				{MemberMatch{User: "65534"}, SlotRule{SlotNumber, 3}, AnyNamespaces},
			},
		}},
		Metrics: Metrics{Listen: "127.0.0.1:9732", OTLP: &OTLP{Endpoint: "https://collector.example.net:4318/v1/metrics",
			Interval: 60_000_000, HeadersFile: "/etc/sockeye/headers", CA: "/etc/ssl/ca.pem"}},
		UI: UI{Listen: "[2001:db8::1]:9733", TLS: UITLS{Cert: "/etc/ui.pem", Key: "/etc/ui.key", ClientCA: "/etc/ca.pem"}, TokenFile: "/etc/token"},
	}
	got.file, got.places = "", nil
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
}

// TestAccept tests valid policies that are almost refused.
func TestAccept(t *testing.T) {
	for name, doc := range map[string]string{
		"no services":                      "services: {}",
		"byte order mark":                  "\ufeff" + minimal,
		"CRLF":                             strings.ReplaceAll(minimal, "\n", "\r\n"),
		"end of document":                  minimal + "...\n",
		"tcp and udp on one port":          "services: {t: {slots: 1, listeners: [{protocol: tcp, address: '[::]:1'}, {protocol: udp, address: '0.0.0.0:1'}]}}",
		"any and one address":              "services: {t: {slots: 1, listeners: [{protocol: tcp, address: '[::]:1'}, {protocol: tcp, address: '10.0.0.1:1'}]}}",
		"same listener in two namespaces":  "services: {a: {slots: 1, netns: /a, listeners: [{protocol: tcp, address: '[::]:1'}]}, b: {slots: 1, netns: /b, listeners: [{protocol: tcp, address: '0.0.0.0:1'}]}}",
		"same member port, two protocols":  "services: {t: {slots: 1, steering: lookup, listeners: [{protocol: tcp, address: '[::]:1', member_ports: 5}, {protocol: udp, address: '[::]:1', member_ports: 5}]}}",
		"one port on two addresses":        "services: {t: {slots: 1, steering: lookup, listeners: [{protocol: tcp, address: '10.0.0.1:1'}, {protocol: tcp, address: '10.0.0.2:1'}]}}",
		"last slots":                       minimal + "    when_empty: {standby: 3}\n    user: a\n    members: [{match: {user: a}, slot: 0}, {match: {user: b}, slot: 3}]",
		"users of rules alone":             minimal + "    members: [{match: {user: a, systemd_unit: b}, slot: 0}, {match: {user: a}, slot: 3}]",
		"users of rules, several":          minimal + "    steering: lookup\n    members: [{match: {user: a}, slot: 0}, {match: {user: 0}, slot: 3}]",
		"one user in a list":               minimal + "    user: [root]\n    members: [{match: {command_line: a}, slot: 0}]",
		"several users":                    minimal + "    user: [0, a]\n    steering: lookup\n    members: [{match: {command_line: a}, slot: 0}]",
		"no user, no rules":                minimal + "    steering: lookup\n    members: []",
		"waiting room":                     minimal + "    when_empty: {wait: 30s, datagrams: 1000, bytes: 1MB}\n    templates: off\n    takeover: true",
		"reject written out":               minimal + "    when_empty: reject",
		"largest numbers":                  "services: {t: {slots: 1024, backlog: 2147483647, track_devices: 1048576, user: 4294967294, listeners: [{protocol: tcp, address: '[::]:65535'}]}}",
		"user named like a date":           minimal + "    user: 2026-01-01",
		"the root cgroup":                  minimal + "    cgroup: /",
		"32 characters":                    "services: {0123456789-123456789_123456789ab: {slots: 1, listeners: [{protocol: tcp, address: '[::]:1'}]}}",
		"services of numbers, not numbers": "services: {1: {slots: 1, listeners: [{protocol: tcp, address: '[::]:1'}]}}",
	} {
		if _, err := Parse([]byte(doc), "policy.yaml"); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestRefuse(t *testing.T) {
	for _, test := range slices.Concat(refusals, tuneRefusals, traceRefusals, bigTCPRefusals, fleetRefusals) {
		t.Run(test.name, func(t *testing.T) {
			p, err := Parse([]byte(test.doc), "p.yaml")
			if err == nil {
				t.Fatalf("accepted: %+v", p)
			}
			if got, want := err.Error(), strings.TrimSpace(test.want); got != want {
				t.Errorf("got\n%s\nwant\n%s", got, want)
			}
		})
	}
}

func TestErrorsAs(t *testing.T) {
	_, err := Parse([]byte("services: {}\nmetrics: {listen: x}\ncolour: []\n"), "p.yaml")
	err = fmt.Errorf("check: %w", err)
	if all, ok := errors.AsType[Errors](err); !ok || len(all) != 2 {
		t.Errorf("want two Errors in %v", err)
	}
	want := &Error{"p.yaml", 2, 19, "metrics.listen", `must be a literal IP:port, is "x"`, "write 192.0.2.1:1790 or [2001:db8::1]:1790"}
	if first, ok := errors.AsType[*Error](err); !ok || !reflect.DeepEqual(first, want) {
		t.Errorf("got  %#v\nwant %#v", first, want)
	}
}

func TestLoad(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "policy.yaml")
	if _, err := Load(path); !errors.Is(err, fs.ErrNotExist) || err.Error() != "read policy file: open "+path+": no such file or directory" {
		t.Errorf("missing file: %v", err)
	}
	if _, err := Load(dir); err == nil {
		t.Error("a directory was read")
	} else if pe, ok := errors.AsType[*fs.PathError](err); !ok || pe.Path != dir {
		t.Errorf("directory: %v", err)
	}
	if err := os.WriteFile(path, []byte(full), 0o600); err != nil {
		t.Fatal(err)
	}
	p, err := Load(path)
	if err != nil {
		t.Fatal(err)
	}
	if got, want := p.Services[1].DeviceMap, filepath.Join(dir, "devices.csv"); got != want {
		t.Errorf("device map %s, want %s", got, want)
	}
	if err := os.Truncate(path, maxSize+10); err != nil {
		t.Fatal(err)
	}
	if _, err := Load(path); err == nil || err.Error() != path+":1:1: is larger than 1048576 bytes" {
		t.Errorf("large file: %v", err)
	}
}

// TestHostile tests files of the maximum size that would take very long, or return very many errors, with a quadratic
// algorithm.
func TestHostile(t *testing.T) {
	for _, test := range []struct {
		head, repeat, tail string
		errors             int // 0: some
	}{
		{"services: {t: {slots: 1, steering: lookup, listeners: [", "{protocol: tcp, address: '[::]:1', member_ports: 1-9},", "]}}", 1 + 15 + 15*16/2},
		{"services: {t: {slots: 1, members: [", "{slot: 0},", "]}}", 0},
		{"services: {", "a: {},", "}", 0},
		{"tune: [", "{},", "]", 1 + 2*256},
		{"tune: [" + strings.Repeat("{name: a, cgroup: a, tag: x},", 255) + "{name: b, cgroup: b, tag: x, match: {port: [", "0,", "]}}]", 0},
		{"tune: [{name: b, cgroup: b, tag: x, match: {remote: [", "10.1.1.1,", "]}}]", 0},
		{"trace: [", "{},", "]", 1 + 64},
		{"trace: [{cgroup: a, group_by: [", "port,", "], stages: [stack]}]", 0},
		{"trace: [{cgroup: a, stages: [", "send,", "]}]", 0},
		{"services: {t: {", strings.Repeat("k", 100) + ": 1,", "}}", 0},
		{"a: &a [1]\nb: [", "*a,", "]", 0},
		{"services: ", "[", "", 1},
		{"services: ", "- ", "", 1},
		{"", "? ", "", 1},
		{"", "--- ", "", 1},
		{"", "'", "", 1},
	} {
		doc := test.head + strings.Repeat(test.repeat, (maxSize-100-len(test.head))/len(test.repeat)) + test.tail
		_, err := Parse([]byte(doc), "p.yaml")
		if all, _ := errors.AsType[Errors](err); len(all) == 0 || test.errors > 0 && len(all) != test.errors {
			t.Errorf("%.40s...: %d errors, want %d; the first: %v", doc, len(all), test.errors, all[:min(len(all), 3)])
		}
	}
}

func TestV6OnlyGoesWithAny4(t *testing.T) {
	p, err := Parse([]byte(`services:
  t:
    slots: 1
    listeners:
      - {protocol: tcp, address: '0.0.0.0:1790'}
      - {protocol: tcp, address: '[::]:1790', v6only: true}
`), "p.yaml")
	if err != nil || !p.Services[0].Listeners[1].V6Only {
		t.Fatalf("got %+v, %v", p, err)
	}
}

func TestListenerNames(t *testing.T) {
	for _, test := range []struct {
		protocol      Protocol
		address, text string
	}{
		{TCP, "[::]:1790", "tcp [::]:1790"},
		{UDP, "0.0.0.0:4739", "udp 0.0.0.0:4739"},
		{UDP, "10.0.0.1:4739", "udp 10.0.0.1:4739"},
		{TCP, "[fd00::1]:1790", "tcp [fd00::1]:1790"},
		{TCP, "[1:2:3:4:5:6:7:8]:9", "tcp [1:2:3:4:5:6:7:8]:9"},
	} {
		l := Listener{Protocol: test.protocol, Address: netip.MustParseAddrPort(test.address)}
		if l.String() != test.text {
			t.Errorf("got %q, want %q", l, test.text)
		}
	}
}

func TestNearest(t *testing.T) {
	known := []string{"slots", "listeners", "steering", "device_map", "user"}
	for word, want := range map[string]string{
		"slot": "slots", "sltos": "slots", "SLOTS": "slots", "listner": "listeners", "device": "device_map",
		"devicemap": "device_map", "users": "user", "tune": "", "": "", "x": "", strings.Repeat("slots", 1000): "",
	} {
		if got := Nearest(word, known); got != want {
			t.Errorf("Nearest(%q) = %q, want %q", word, got, want)
		}
	}
}

func TestSchemaGolden(t *testing.T) {
	got, err := Schema()
	if err != nil {
		t.Fatal(err)
	}
	golden := filepath.Join("testdata", "schema.json")
	if *update {
		if err := os.WriteFile(golden, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if string(got) != string(want) {
		t.Errorf("%s is out of date: go test ./internal/config -run Schema -update", golden)
	}
}

func TestSchemaAgreesWithParse(t *testing.T) {
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
	for _, doc := range []string{full, minimal, "services: {}"} {
		if v := check(doc); v != "" {
			t.Errorf("refused for %s:\n%s", v, doc)
		}
	}
	for doc, want := range map[string]string{
		"services: []":                                             "services: type",
		"metrics: {listen: '127.0.0.1:1'}":                         "anyOf",
		"services: {}\ncolour: []":                                 "additional colour",
		"services: {T: {slots: 1, listeners: []}}":                 "services: name T",
		"services: {t: {slots: 1, listeners: []}}":                 "services: t: listeners: items",
		"services: {t: {slots: '1'}}":                              "services: t: required listeners",
		minimal + "    steering: no":                               "services: t: steering: enum",
		minimal + "    when_empty: {standby: 1024}":                "services: t: when_empty: oneOf",
		minimal + "    when_empty: {}":                             "services: t: when_empty: oneOf",
		minimal + "    track_devices: on":                          "services: t: track_devices: oneOf",
		minimal + "    backlog: -1":                                "services: t: backlog: range",
		minimal + "    backlog: many":                              "services: t: backlog: type",
		minimal + "    netns: telemetry":                           "services: t: netns: pattern",
		minimal + "    members: [{match: {}, slot: free}]":         "services: t: members: match: properties",
		minimal + "    members: [{match: {user: a}, slot: first}]": "services: t: members: slot: oneOf",
	} {
		if got := check(doc); got != want {
			t.Errorf("got %q, want %q for\n%s", got, want, doc)
		}
		if _, err := Parse([]byte(doc), "p.yaml"); err == nil {
			t.Errorf("Parse accepts\n%s", doc)
		}
	}
}

// violation returns the first violation of the keywords that Schema uses, or "".
func violation(s map[string]any, v any) string {
	if all, ok := s["anyOf"].([]any); ok && !slices.ContainsFunc(all, func(one any) bool { return violation(one.(map[string]any), v) == "" }) {
		return "anyOf"
	}
	if all, ok := s["oneOf"].([]any); ok {
		matches := 0
		for _, one := range all {
			if violation(one.(map[string]any), v) == "" {
				matches++
			}
		}
		if matches != 1 {
			return "oneOf"
		}
	}
	if enum, ok := s["enum"].([]any); ok && !slices.ContainsFunc(enum, func(e any) bool { return e == v }) {
		return "enum"
	}
	kind := s["type"]
	switch v := v.(type) {
	case string:
		if kind != nil && kind != "string" {
			return "type"
		}
		if pattern, ok := s["pattern"].(string); ok && !regexp.MustCompile(pattern).MatchString(v) {
			return "pattern"
		}
		if least, ok := s["minLength"].(float64); ok && len(v) < int(least) {
			return "length"
		}
	case int:
		if kind != nil && kind != "integer" {
			return "type"
		}
		lo, okLo := s["minimum"].(float64)
		hi, okHi := s["maximum"].(float64)
		if okLo && float64(v) < lo || okHi && float64(v) > hi {
			return "range"
		}
	case bool:
		if kind != nil && kind != "boolean" {
			return "type"
		}
	case []any:
		if kind != nil && kind != "array" {
			return "type"
		}
		least, _ := s["minItems"].(float64)
		most, ok := s["maxItems"].(float64)
		if len(v) < int(least) || ok && len(v) > int(most) {
			return "items"
		}
		items, _ := s["items"].(map[string]any)
		for _, item := range v {
			if err := violation(items, item); err != "" {
				return err
			}
		}
	case map[string]any:
		if kind != nil && kind != "object" {
			return "type"
		}
		if least, ok := s["minProperties"].(float64); ok && len(v) < int(least) {
			return "properties"
		}
		required, _ := s["required"].([]any)
		for _, key := range required {
			if _, ok := v[key.(string)]; !ok {
				return "required " + key.(string)
			}
		}
		properties, _ := s["properties"].(map[string]any)
		for key, value := range v {
			if names, ok := s["propertyNames"].(map[string]any); ok && violation(names, key) != "" {
				return "name " + key
			}
			sub, ok := properties[key].(map[string]any)
			if !ok {
				if s["additionalProperties"] == false {
					return "additional " + key
				}
				sub, _ = s["additionalProperties"].(map[string]any)
			}
			if err := violation(sub, value); err != "" {
				return key + ": " + err
			}
		}
	default:
		return fmt.Sprintf("type %T", v)
	}
	return ""
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(full))
	f.Add([]byte(minimal))
	f.Add([]byte(strings.Replace(fullTune, "      remote_file: sub/prefixes.txt\n", "", 1)))
	f.Add([]byte(strings.Replace(fullTrace, "      remote_file: sub/prefixes.txt\n", "", 1)))
	for _, test := range slices.Concat(refusals, tuneRefusals, traceRefusals, bigTCPRefusals, fleetRefusals) {
		f.Add([]byte(test.doc))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		p, err := Parse(data, "/p.yaml")
		if err != nil {
			all, ok := errors.AsType[Errors](err)
			if !ok || len(all) == 0 {
				t.Fatalf("not Errors: %v", err)
			}
			for _, e := range all {
				if e.Message == "" || (e.Line < 1 || e.Column < 1) && e.Message != "is empty" {
					t.Errorf("no place or message: %#v", e)
				}
			}
			return
		}
		again, err := Parse(data, "/p.yaml")
		if err != nil || !reflect.DeepEqual(p, again) {
			t.Errorf("second time: %v\n%+v\n%+v", err, p, again)
		}
		for _, r := range p.BigTCP {
			if r.Interface == "" || r.IPv6 == 0 && r.IPv4 == 0 {
				t.Errorf("invalid rule: %+v", r)
			}
		}
		for _, s := range p.Services {
			if s.Slots == 0 || s.Cgroup[0] != '/' {
				t.Errorf("invalid service: %+v", s)
			}
		}
		for _, r := range p.Tune {
			if r.Name == "" || r.Cgroup == "" || r.Observe == "" || r.Set == nil && r.Tag == nil && r.React == nil || r.Match.String() == "" {
				t.Errorf("invalid rule: %+v", r)
			}
			settings := r.Set
			if r.React != nil {
				if r.React.Retransmits == 0 && r.React.RTOs < 0 || r.React.Sample < 1 || len(r.React.Set) == 0 {
					t.Errorf("invalid reaction: %+v", r.React)
				}
				settings = slices.Concat(settings, r.React.Set)
			}
			for _, s := range settings {
				o, ok := FindTuneOption(s.Option)
				if !ok || s.Explore == nil && (s.Value < o.Min || s.Value > o.Max) || (s.Text == "") == (o.Kind == KindText) {
					t.Errorf("invalid setting: %+v", s)
				}
				if e := s.Explore; e != nil && (len(e.Candidates) < 2 || e.Probe > e.Share || e.Bytes == 0 || e.Evidence == 0 || e.Forget == 0) {
					t.Errorf("invalid exploration: %+v", e)
				}
			}
		}
		for i, r := range p.Trace {
			if r.Name == "" || r.Cgroup == "" || r.Connections < 1 || (r.Messages.OneIn > 0) == (r.Messages.PerSecond > 0) || r.Groups < 1 || len(r.Stages) == 0 || len(r.Protocols) == 0 || r.Match.Tag != nil || r.Match.String() == "" {
				t.Errorf("invalid rule: %+v", r)
			}
			if slices.ContainsFunc(p.Trace[:i], func(other TraceRule) bool { return other.Name == r.Name }) {
				t.Errorf("two rules are called %s", r.Name)
			}
			for j, g := range r.GroupBy {
				if (g.Kind == GroupRemote) != (g.IPv4 > 0 && g.IPv6 > 0) || slices.ContainsFunc(r.GroupBy[:j], func(other TraceGroupBy) bool { return other.Kind == g.Kind }) {
					t.Errorf("invalid groups: %+v", r.GroupBy)
				}
			}
		}
	})
}
