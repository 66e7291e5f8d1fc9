// SPDX-License-Identifier: Apache-2.0

package config

// bigTCPRefusals has every reason to refuse a bigtcp section, with the exact message.
var bigTCPRefusals = []struct{ name, doc, want string }{
	{"bigtcp: a mapping", `bigtcp: {interface: eth0}
`, `
p.yaml:1:9: bigtcp: must be a list, is a mapping`},
	{"bigtcp: nothing given", `bigtcp:
  - {}
`, `
p.yaml:2:5: bigtcp[0].interface: is missing`},
	{"bigtcp: no size", `bigtcp:
  - {interface: eth0}
`, `
p.yaml:2:5: bigtcp[0]: must have ipv6, ipv4 or both
  hint: ipv6: 192KB; an omitted family is unchanged`},
	{"bigtcp: unknown key", `bigtcp:
  - {interface: eth0, ip6: 192KB}
`, `
p.yaml:2:5: bigtcp[0]: must have ipv6, ipv4 or both
  hint: ipv6: 192KB; an omitted family is unchanged
p.yaml:2:23: bigtcp[0].ip6: unknown key
  hint: did you mean ipv6?`},
	{"bigtcp: too small", `bigtcp: [{interface: eth0, ipv6: 65535}]
`, `
p.yaml:1:34: bigtcp[0].ipv6: must be off or 65536 to 524280 bytes, is 65535`},
	{"bigtcp: too large", `bigtcp: [{interface: eth0, ipv4: 512KiB}]
`, `
p.yaml:1:34: bigtcp[0].ipv4: must be off or 65536 to 524280 bytes, is "512KiB"`},
	{"bigtcp: larger than any number", `bigtcp: [{interface: eth0, ipv4: 999999999999999999GiB}]
`, `
p.yaml:1:34: bigtcp[0].ipv4: must be off or 65536 to 524280 bytes, is "999999999999999999GiB"`},
	{"bigtcp: parts of a byte", `bigtcp: [{interface: eth0, ipv4: 100000.5B}]
`, `
p.yaml:1:34: bigtcp[0].ipv4: must be whole bytes, is "100000.5B"`},
	{"bigtcp: unit", `bigtcp: [{interface: eth0, ipv4: 192kb}]
`, `
p.yaml:1:34: bigtcp[0].ipv4: must be off or a size such as 192KB, is "192kb"
  hint: write 192KB`},
	{"bigtcp: a number in quotes", `bigtcp: [{interface: eth0, ipv4: "192000"}]
`, `
p.yaml:1:34: bigtcp[0].ipv4: must be off or a size such as 192KB, is "192000"
  hint: write 192000, without the quotes`},
	{"bigtcp: on", `bigtcp: [{interface: eth0, ipv6: on}]
`, `
p.yaml:1:34: bigtcp[0].ipv6: must be off or a size such as 192KB, is "on"
  hint: units: GB, MB, KB, B, GiB, MiB, KiB`},
	{"bigtcp: a list of sizes", `bigtcp: [{interface: eth0, ipv6: [192KB]}]
`, `
p.yaml:1:34: bigtcp[0].ipv6: must be off or a size such as 192KB, is a list`},
	{"bigtcp: no size, empty", `bigtcp: [{interface: eth0, ipv6: }]
`, `
p.yaml:1:34: bigtcp[0].ipv6: must be off or a size such as 192KB, is empty
  hint: units: GB, MB, KB, B, GiB, MiB, KiB`},
	{"bigtcp: several interfaces", `bigtcp: [{interface: "eth0, eth1", ipv6: 192KB}]
`, `
p.yaml:1:22: bigtcp[0].interface: is not an interface name: "eth0, eth1"
  hint: one name, or a glob with *, ? or [a-z]`},
	{"bigtcp: interface a path", `bigtcp: [{interface: /sys/class/net/*, ipv6: 192KB}]
`, `
p.yaml:1:22: bigtcp[0].interface: is not an interface name: "/sys/class/net/*"
  hint: one name, or a glob with *, ? or [a-z]`},
	{"bigtcp: interface a number", `bigtcp: [{interface: 2, ipv6: 192KB}]
`, `
p.yaml:1:22: bigtcp[0].interface: must be a string, is 2
  hint: write "2", with the quotes`},
	{"bigtcp: interface too long", `bigtcp: [{interface: interface-number, ipv6: 192KB}]
`, `
p.yaml:1:22: bigtcp[0].interface: is longer than an interface name, 15 bytes: "interface-number"
  hint: one name, or a glob with *, ? or [a-z]`},
	{"bigtcp: glob", `bigtcp: [{interface: "eth[0", ipv6: 192KB}]
`, `
p.yaml:1:22: bigtcp[0].interface: is not a valid glob: "eth[0"
  hint: *, ?, [a-z] and \ have a meaning; [ needs a ]`},
	{"bigtcp: netns a name", `bigtcp: [{interface: eth0, netns: blue, ipv6: 192KB}]
`, `
p.yaml:1:35: bigtcp[0].netns: must be an absolute path, is "blue"
  hint: a namespace made by ip netns is /run/netns/blue`},
	{"bigtcp: an interface twice", `bigtcp:
  - {interface: eth0, ipv6: 192KB}
  - {interface: eth0, netns: /run/netns/x, ipv4: 192KB}
  - {interface: eth0, ipv4: 192KB}
`, `
p.yaml:4:17: bigtcp[2].interface: "eth0" is already bigtcp[0], line 2
  hint: give both families in one rule`},
	{"bigtcp: a glob before a name", `bigtcp:
  - {interface: "eth*", ipv6: 192KB}
  - {interface: eth0, ipv6: off}
`, `
p.yaml:3:17: bigtcp[1].interface: "eth0" is matched by bigtcp[0], line 2, which decides
  hint: put it first`},
	{"bigtcp: wrong namespaces are not the same", `bigtcp:
  - {interface: eth0, netns: a, ipv6: 192KB}
  - {interface: eth0, netns: b, ipv6: off}
`, `
p.yaml:2:30: bigtcp[0].netns: must be an absolute path, is "a"
  hint: a namespace made by ip netns is /run/netns/a
p.yaml:3:30: bigtcp[1].netns: must be an absolute path, is "b"
  hint: a namespace made by ip netns is /run/netns/b`},
}
