// SPDX-License-Identifier: Apache-2.0

package match_test

import (
	"net/netip"
	"testing"

	"sockeye/internal/config"
	"sockeye/internal/match"
)

const judgedPolicy = `
services:
  telemetry:
    slots: 1
    listeners:
      - {protocol: udp, address: "[::]:4739"}
      - {protocol: tcp, address: "[::]:1790"}
      - {protocol: tcp, address: "192.0.2.7:1791"}
  six: {slots: 1, listeners: [{protocol: tcp, address: "[::]:1900", v6only: true}]}
  four: {slots: 1, listeners: [{protocol: tcp, address: "0.0.0.0:1901"}]}
tune:
`

// TestJudge evaluates single rules.
func TestJudge(t *testing.T) {
	const accept, connect = config.RoleAccept, config.RoleConnect
	for _, test := range []struct {
		match         string
		local, remote string
		role          config.Role
		tag           string
		matches       bool
		why           string
	}{
		{"{}", "10.0.0.1:1", "10.0.0.2:2", accept, "", true, "the rule matches all connections"},
		{"{role: accept}", "10.0.0.1:1", "10.0.0.2:2", connect, "", false, "role is connect, not accept"},
		{"{role: connect}", "10.0.0.1:1", "10.0.0.2:2", accept, "", false, "role is accept, not connect"},
		{"{role: connect}", "10.0.0.1:1", "10.0.0.2:2", connect, "", true, "role is connect"},

		{"{port: 1790}", "10.0.0.1:1790", "10.0.0.2:80", connect, "", false, "port 80 is not 1790"},
		{"{port: 1790}", "10.0.0.1:1790", "10.0.0.2:80", accept, "", true, "port is 1790"},
		{"{port: 20-30}", "10.0.0.1:31", "10.0.0.2:25", accept, "", false, "port 31 is not in 20-30"},
		{"{port: 20-30}", "10.0.0.1:31", "10.0.0.2:25", connect, "", true, "port 25 is in 20-30"},
		{"{remote_port: [1, 5-9, 70]}", "10.0.0.1:7", "10.0.0.2:10", accept, "", false, "remote port 10 is not in any of 3 ranges"},
		{"{local_port: [1, 5-9, 70]}", "10.0.0.1:9", "10.0.0.2:10", connect, "", true, "local port 9 is in 5-9"},

		{"{remote: 10.0.0.0/8}", "192.0.2.9:1", "10.1.2.3:2", accept, "", true, "remote 10.1.2.3 is in 10.0.0.0/8"},
		{"{remote: 10.0.0.0/8}", "10.0.0.1:1", "192.0.2.1:2", accept, "", false, "remote 192.0.2.1 is not in 10.0.0.0/8"},
		{"{remote: [10.0.0.0/8, '2001:db8::/32', 192.0.2.2]}", "10.0.0.1:1", "192.0.2.1:2", accept, "", false, "remote 192.0.2.1 is not in any of 3 prefixes"},
		{"{remote: [192.0.0.0/16, '!192.0.2.0/24']}", "10.0.0.1:1", "192.0.2.1:2", accept, "", false, "remote 192.0.2.1 is in !192.0.2.0/24"},
		{"{remote: [192.0.2.1, '!192.0.2.0/24']}", "10.0.0.1:1", "192.0.2.1:2", accept, "", true, "remote 192.0.2.1 is in 192.0.2.1/32"},
		{"{local: '::/0'}", "10.0.0.1:1", "192.0.2.1:2", accept, "", false, "local 10.0.0.1 is not in ::/0"},
		{"{local: 10.0.0.0/8}", "[::ffff:10.0.0.1]:1", "[::ffff:192.0.2.1]:2", accept, "", true, "local 10.0.0.1 is in 10.0.0.0/8"},
		{"{remote: 'fe80::/10'}", "[fe80::1%eth0]:1", "[fe80::2%eth0]:2", accept, "", true, "remote fe80::2 is in fe80::/10"},

		{"{same_prefix: 44}", "[2001:db8:1::1]:1", "[2001:db8:8000::1]:2", accept, "", false, "addresses share 32 bits, not 44"},
		{"{same_prefix: 44}", "[2001:db8:1::1]:1", "[2001:db8:e::1]:2", accept, "", true, "addresses share 44 bits"},
		{"{same_prefix: 44}", "10.0.0.1:1", "10.0.0.1:2", accept, "", false, "address family is IPv4, same_prefix requires IPv6"},
		{"{same_prefix: {ipv4: 8}}", "[::1]:1", "[::1]:2", accept, "", false, "address family is IPv6, same_prefix requires IPv4"},
		{"{same_prefix: 24}", "10.0.0.1:1", "10.0.0.1:2", accept, "", true, "addresses share 32 bits"},
		{"{same_prefix: 24}", "10.0.0.1:1", "10.0.1.1:2", accept, "", false, "addresses share 23 bits, not 24"},

		{"{service: telemetry}", "10.0.0.1:1790", "10.0.0.2:1790", connect, "", false, "role is connect, service telemetry requires accept"},
		{"{service: telemetry}", "10.0.0.1:1790", "10.0.0.2:2", accept, "", true, "local 10.0.0.1:1790 is listener tcp [::]:1790 of service telemetry"},
		{"{service: telemetry}", "10.0.0.1:4739", "10.0.0.2:2", accept, "", false, "local 10.0.0.1:4739 is not a listener of service telemetry"},
		{"{service: telemetry}", "192.0.2.7:1791", "10.0.0.2:2", accept, "", true, "local 192.0.2.7:1791 is listener tcp 192.0.2.7:1791 of service telemetry"},
		{"{service: telemetry}", "192.0.2.8:1791", "10.0.0.2:2", accept, "", false, "local 192.0.2.8:1791 is not a listener of service telemetry"},
		{"{service: six}", "192.0.2.8:1900", "10.0.0.2:2", accept, "", false, "local 192.0.2.8:1900 is not a listener of service six"},
		{"{service: four}", "[::1]:1901", "[::1]:2", accept, "", false, "local [::1]:1901 is not a listener of service four"},
		{"{service: four}", "127.0.0.1:1901", "127.0.0.1:2", accept, "", true, "local 127.0.0.1:1901 is listener tcp 0.0.0.0:1901 of service four"},

		{"{tag: rack-12}", "10.0.0.1:1", "10.0.0.2:2", accept, "", false, "the peer sent no tag"},
		{"{tag: rack-12}", "10.0.0.1:1", "10.0.0.2:2", accept, "rack-1", false, `the peer's tag is "rack-1", not "rack-12"`},
		{"{tag: 0x5eed00}", "10.0.0.1:1", "10.0.0.2:2", accept, "\x5e\xed\x00", true, "the peer's tag is 0x5eed00"},

		{"{role: accept, port: 7, remote: 10.0.0.0/8}", "10.0.0.1:7", "10.0.0.2:2", accept, "", true, "role is accept, port is 7, remote 10.0.0.2 is in 10.0.0.0/8"},
		{"{role: accept, port: 7, remote: 10.0.0.0/8}", "10.0.0.1:8", "11.0.0.2:2", accept, "", false, "port 8 is not 7"},
	} {
		p, err := config.Parse([]byte(judgedPolicy+"  - {name: r, cgroup: /x, set: {nodelay: true}, match: "+test.match+"}\n"), "policy.yaml")
		if err != nil {
			t.Fatal(err)
		}
		q := match.Question{Local: netip.MustParseAddrPort(test.local), Remote: netip.MustParseAddrPort(test.remote), Role: test.role}
		if test.tag != "" {
			q.Tag = []byte(test.tag)
		}
		want := match.Step{Rule: "r", Matches: test.matches, Why: test.why}
		if got := match.Judge(q, "r", p.Tune[0].Match, p.Services); got != want {
			t.Errorf("%s, %v from %v, %s: got %+v, want %+v", test.match, q.Local, q.Remote, q.Role, got, want)
		}
	}
}
