// SPDX-License-Identifier: Apache-2.0

package config

// traced is the start of a policy with one rule. A test appends keys of the rule, from line 3.
const traced = `trace:
  - cgroup: a.slice
`

// tracedService is the same with services; keys follow in line 6.
const tracedService = `services:
  telemetry: {slots: 1, listeners: [{protocol: tcp, address: '[::]:1790'}, {protocol: udp, address: '[::]:4739'}]}
  flows: {slots: 1, listeners: [{protocol: udp, address: '[::]:2055'}]}
trace:
  - cgroup: a.slice
`

// traceRefusals has every reason to refuse a trace section, with the exact message.
var traceRefusals = []struct{ name, doc, want string }{
	{"trace: a mapping", `trace: {cgroup: a}
`, `
p.yaml:1:8: trace: must be a list, is a mapping`},
	{"trace: missing keys", `trace:
  - {}
`, `
p.yaml:2:5: trace[0].cgroup: is missing`},
	{"trace: null rule", `trace:
  -
`, `
p.yaml:2:4: trace[0]: must be a mapping, is empty`},
	{"trace: unknown key", traced + `    message: 1/10
`, `
p.yaml:3:5: trace[0].message: unknown key
  hint: did you mean messages?`},
	{"trace: name", traced + `    name: All Replies
`, `
p.yaml:3:11: trace[0].name: is not a valid name
  hint: use 1 to 32 of a-z, 0-9, _ and -, the first of them a letter or a digit`},
	{"trace: cgroup upwards", `trace: [{cgroup: ../a.slice}]
`, `
p.yaml:1:18: trace[0].cgroup: must not hold .., is "../a.slice"`},
	{"trace: cgroup with the mount", `trace: [{cgroup: /sys/fs/cgroup/a}]
`, `
p.yaml:1:18: trace[0].cgroup: must be relative to the cgroup v2 mount, is "/sys/fs/cgroup/a"
  hint: write /a`},
	{"trace: cgroup with the mount beside cgroup v1", `trace: [{cgroup: /sys/fs/cgroup/unified/a/b}]
`, `
p.yaml:1:18: trace[0].cgroup: must be relative to the cgroup v2 mount, is "/sys/fs/cgroup/unified/a/b"
  hint: write /a/b`},
	{"trace: name twice", `trace:
  - {name: r, cgroup: a}
  - {name: s, cgroup: b}
  - {name: r, cgroup: c}
`, `
p.yaml:4:12: trace[2].name: "r" is already trace[0].name, line 2`},
	{"trace: two without a name", `trace:
  - {cgroup: a.slice, match: {port: 1}}
  - {name: r, cgroup: a.slice, match: {port: 2}}
  - {cgroup: a.slice}
`, `
p.yaml:4:5: trace[2].name: is missing: trace[0], line 2, has the name of the cgroup already
  hint: give the rules of "a.slice" names`},
	{"trace: wrong names of one cgroup", `trace:
  - {name: '', cgroup: a}
  - {name: '', cgroup: a}
  - {cgroup: a}
`, `
p.yaml:2:12: trace[0].name: must not be empty
p.yaml:3:12: trace[1].name: must not be empty`},
	{"trace: connections one of none", traced + `    connections: 1/0
`, `
p.yaml:3:18: trace[0].connections: must be 1/1 to 1/1000000, is "1/0"
  hint: 1/100 watches one of a hundred connections`},
	{"trace: connections none of one", traced + `    connections: 0/1
`, `
p.yaml:3:18: trace[0].connections: must be 1/1 to 1/1000000, is "0/1"
  hint: 1/100 watches one of a hundred connections`},
	{"trace: connections a second", traced + `    connections: 10/s
`, `
p.yaml:3:18: trace[0].connections: must be 1/1 to 1/1000000, is "10/s"
  hint: 1/100 watches one of a hundred connections`},
	{"trace: connections bounds", traced + `    connections: 1/1000001
`, `
p.yaml:3:18: trace[0].connections: must be 1/1 to 1/1000000, is "1/1000001"
  hint: 1/100 watches one of a hundred connections`},
	{"trace: messages one of none", traced + `    messages: 1/0
`, `
p.yaml:3:15: trace[0].messages: must be 1/1 to 1/1000000, or 1/s to 100000/s, is "1/0"
  hint: leave the rule out to trace nothing`},
	{"trace: messages none of one", traced + `    messages: 0/1
`, `
p.yaml:3:15: trace[0].messages: must be 1/1 to 1/1000000, or 1/s to 100000/s, is "0/1"
  hint: leave the rule out to trace nothing`},
	{"trace: messages none a second", traced + `    messages: 0/s
`, `
p.yaml:3:15: trace[0].messages: must be 1/1 to 1/1000000, or 1/s to 100000/s, is "0/s"
  hint: leave the rule out to trace nothing`},
	{"trace: messages none", traced + `    messages: 0
`, `
p.yaml:3:15: trace[0].messages: must be 1/1 to 1/1000000, or 1/s to 100000/s, is 0
  hint: leave the rule out to trace nothing`},
	{"trace: messages a number", traced + `    messages: 100
`, `
p.yaml:3:15: trace[0].messages: must be 1/1 to 1/1000000, or 1/s to 100000/s, is 100
  hint: write 1/100 for one of 100 messages, 100/s for that many a second`},
	{"trace: messages share bounds", traced + `    messages: 1/1000001
`, `
p.yaml:3:15: trace[0].messages: must be 1/1 to 1/1000000, or 1/s to 100000/s, is "1/1000001"
  hint: 1/100 traces one of a hundred messages, 100/s at most a hundred a second`},
	{"trace: messages rate bounds", traced + `    messages: 100001/s
`, `
p.yaml:3:15: trace[0].messages: must be 1/1 to 1/1000000, or 1/s to 100000/s, is "100001/s"
  hint: 1/100 traces one of a hundred messages, 100/s at most a hundred a second`},
	{"trace: messages unit", traced + `    messages: 100/m
`, `
p.yaml:3:15: trace[0].messages: must be 1/1 to 1/1000000, or 1/s to 100000/s, is "100/m"
  hint: 1/100 traces one of a hundred messages, 100/s at most a hundred a second`},
	{"trace: messages share of more", traced + `    messages: 2/3
`, `
p.yaml:3:15: trace[0].messages: must be 1/1 to 1/1000000, or 1/s to 100000/s, is "2/3"
  hint: 1/100 traces one of a hundred messages, 100/s at most a hundred a second`},
	{"trace: messages percentage", traced + `    messages: 1%
`, `
p.yaml:3:15: trace[0].messages: must be 1/1 to 1/1000000, or 1/s to 100000/s, is "1%"
  hint: 1/100 traces one of a hundred messages, 100/s at most a hundred a second`},
	{"trace: messages hexadecimal", traced + `    messages: 0x10
`, `
p.yaml:3:15: trace[0].messages: must be 1/1 to 1/1000000, or 1/s to 100000/s, is 0x10
  hint: 1/100 traces one of a hundred messages, 100/s at most a hundred a second`},
	{"trace: messages number too large", traced + `    messages: 100001
`, `
p.yaml:3:15: trace[0].messages: must be 1/1 to 1/1000000, or 1/s to 100000/s, is 100001
  hint: 1/100 traces one of a hundred messages, 100/s at most a hundred a second`},
	{"trace: messages negative", traced + `    messages: -1
`, `
p.yaml:3:15: trace[0].messages: must be 1/1 to 1/1000000, or 1/s to 100000/s, is -1
  hint: 1/100 traces one of a hundred messages, 100/s at most a hundred a second`},
	{"trace: messages empty", traced + `    messages:
`, `
p.yaml:3:14: trace[0].messages: must be 1/1 to 1/1000000, or 1/s to 100000/s, is empty
  hint: 1/100 traces one of a hundred messages, 100/s at most a hundred a second`},
	{"trace: messages list", traced + `    messages: [1/10]
`, `
p.yaml:3:15: trace[0].messages: must be 1/1 to 1/1000000, or 1/s to 100000/s, is a list
  hint: 1/100 traces one of a hundred messages, 100/s at most a hundred a second`},
	{"trace: group_by remote without a bound", traced + `    group_by: remote
`, `
p.yaml:3:15: trace[0].group_by: must be remote/N, N from 1 to 32, or {remote: {ipv4: N, ipv6: N}}, is "remote"
  hint: groups need a bound: remote/24 has 24 bits of IPv4 addresses and 48 of IPv6`},
	{"trace: group_by remote/0", traced + `    group_by: [port, remote/0]
`, `
p.yaml:3:22: trace[0].group_by[1]: must be remote/N, N from 1 to 32, or {remote: {ipv4: N, ipv6: N}}, is "remote/0"
  hint: groups need a bound: remote/24 has 24 bits of IPv4 addresses and 48 of IPv6; leave it out for all addresses together`},
	{"trace: group_by remote too long", traced + `    group_by: remote/33
`, `
p.yaml:3:15: trace[0].group_by: must be remote/N, N from 1 to 32, or {remote: {ipv4: N, ipv6: N}}, is "remote/33"
  hint: remote/24 has 24 bits of IPv4 addresses and 48 of IPv6`},
	{"trace: group_by remote no number", traced + `    group_by: [remote/a, remote/, remote/024]
`, `
p.yaml:3:16: trace[0].group_by[0]: must be remote/N, N from 1 to 32, or {remote: {ipv4: N, ipv6: N}}, is "remote/a"
  hint: remote/24 has 24 bits of IPv4 addresses and 48 of IPv6
p.yaml:3:26: trace[0].group_by[1]: must be remote/N, N from 1 to 32, or {remote: {ipv4: N, ipv6: N}}, is "remote/"
  hint: remote/24 has 24 bits of IPv4 addresses and 48 of IPv6
p.yaml:3:35: trace[0].group_by[2]: must be remote/N, N from 1 to 32, or {remote: {ipv4: N, ipv6: N}}, is "remote/024"
  hint: remote/24 has 24 bits of IPv4 addresses and 48 of IPv6`},
	{"trace: group_by unknown", traced + `    group_by: [ports, local/24]
`, `
p.yaml:3:16: trace[0].group_by[0]: must be remote/N, port, service, cgroup, rule or arm, is "ports"
  hint: did you mean port?
p.yaml:3:23: trace[0].group_by[1]: must be remote/N, port, service, cgroup, rule or arm, is "local/24"`},
	{"trace: group_by near remote", traced + `    group_by: remot/24
`, `
p.yaml:3:15: trace[0].group_by: must be remote/N, port, service, cgroup, rule or arm, is "remot/24"
  hint: did you mean remote/24?`},
	{"trace: group_by twice", traced + `    group_by:
      - port
      - remote/24
      - port
      - {remote: {ipv4: 8}}
`, `
p.yaml:6:9: trace[0].group_by[2]: port is already trace[0].group_by[0], line 4
p.yaml:7:9: trace[0].group_by[3]: remote is already trace[0].group_by[1], line 5`},
	{"trace: group_by empty", traced + `    group_by: []
`, `
p.yaml:3:15: trace[0].group_by: must not be empty
  hint: leave it out to count all together`},
	{"trace: group_by no list", traced + `    group_by: port, arm
`, `
p.yaml:3:15: trace[0].group_by: must be remote/N, port, service, cgroup, rule or arm, is "port, arm"
  hint: write a list as in [remote/24, port]`},
	{"trace: group_by null", traced + `    group_by:
`, `
p.yaml:3:14: trace[0].group_by: must not be empty`},
	{"trace: group_by number", traced + `    group_by: [24]
`, `
p.yaml:3:16: trace[0].group_by[0]: must be a string, is 24
  hint: write "24", with the quotes`},
	{"trace: group_by list in a list", traced + `    group_by: [[port]]
`, `
p.yaml:3:16: trace[0].group_by[0]: must be a string, is a list`},
	{"trace: group_by mapping of nothing", traced + `    group_by: {}
`, `
p.yaml:3:15: trace[0].group_by.remote: is missing`},
	{"trace: group_by no family", traced + `    group_by: {remote: {}}
`, `
p.yaml:3:24: trace[0].group_by.remote: must have at least one key`},
	{"trace: group_by families without a bound", traced + `    group_by: {remote: {ipv4: 0, ipv6: 0}}
`, `
p.yaml:3:31: trace[0].group_by.remote.ipv4: must be 1 to 32, is 0
p.yaml:3:40: trace[0].group_by.remote.ipv6: must be 1 to 128, is 0`},
	{"trace: group_by families too long", traced + `    group_by: [{remote: {ipv4: 33, ipv6: 129}}]
`, `
p.yaml:3:32: trace[0].group_by[0].remote.ipv4: must be 1 to 32, is 33
p.yaml:3:42: trace[0].group_by[0].remote.ipv6: must be 1 to 128, is 129`},
	{"trace: group_by twice, both wrong", traced + `    group_by: [{remote: {ipv4: 0}}, {remote: {ipv4: 33}}]
`, `
p.yaml:3:32: trace[0].group_by[0].remote.ipv4: must be 1 to 32, is 0
p.yaml:3:53: trace[0].group_by[1].remote.ipv4: must be 1 to 32, is 33`},
	{"trace: group_by families no mapping", traced + `    group_by: {remote: 24}
`, `
p.yaml:3:24: trace[0].group_by.remote: must be a mapping, is 24`},
	{"trace: group_by unknown mapping", traced + `    group_by: [{remotes: {ipv4: 24}}]
`, `
p.yaml:3:17: trace[0].group_by[0].remotes: unknown key
  hint: did you mean remote?`},
	{"trace: group_by unknown family", traced + `    group_by: {remote: {ip4: 24}}
`, `
p.yaml:3:25: trace[0].group_by.remote.ip4: unknown key
  hint: did you mean ipv4?`},
	{"trace: groups none", traced + `    groups: 0
`, `
p.yaml:3:13: trace[0].groups: must be 1 to 1024, is 0`},
	{"trace: groups bounds", traced + `    groups: 1025
`, `
p.yaml:3:13: trace[0].groups: must be 1 to 1024, is 1025`},
	{"trace: stage unknown", traced + `    stages: [stack, qdsic, nework]
`, `
p.yaml:3:21: trace[0].stages[1]: must be send, stack, qdisc, nic, network, rx_stack or reader, is "qdsic"
  hint: did you mean qdisc?
p.yaml:3:28: trace[0].stages[2]: must be send, stack, qdisc, nic, network, rx_stack or reader, is "nework"
  hint: did you mean network?`},
	{"trace: stage far off", traced + `    stages: total
`, `
p.yaml:3:13: trace[0].stages: must be send, stack, qdisc, nic, network, rx_stack or reader, is "total"`},
	{"trace: stage twice", traced + `    stages: [stack, reader, stack]
`, `
p.yaml:3:29: trace[0].stages[2]: stack is already trace[0].stages[0], line 3`},
	{"trace: stages empty", traced + `    stages: []
`, `
p.yaml:3:13: trace[0].stages: must not be empty
  hint: leave it out for stack, qdisc, nic and network`},
	{"trace: stages null", traced + `    stages:
`, `
p.yaml:3:12: trace[0].stages: must not be empty`},
	{"trace: stages no list", traced + `    stages: stack, qdisc
`, `
p.yaml:3:13: trace[0].stages: must be send, stack, qdisc, nic, network, rx_stack or reader, is "stack, qdisc"
  hint: write a list as in [send, stack]`},
	{"trace: stages mapping", traced + `    stages: {stack: true}
`, `
p.yaml:3:13: trace[0].stages: must be a string, is a mapping`},
	{"trace: stages number", traced + `    stages: [1]
`, `
p.yaml:3:14: trace[0].stages[0]: must be a string, is 1
  hint: write "1", with the quotes`},
	{"trace: protocol unknown", traced + `    protocols: [tpc, sctp]
`, `
p.yaml:3:17: trace[0].protocols[0]: must be tcp or udp, is "tpc"
  hint: did you mean tcp?
p.yaml:3:22: trace[0].protocols[1]: must be tcp or udp, is "sctp"
  hint: did you mean tcp?`},
	{"trace: protocol twice", traced + `    protocols: [udp, udp]
`, `
p.yaml:3:22: trace[0].protocols[1]: udp is already trace[0].protocols[0], line 3`},
	{"trace: protocols empty", traced + `    protocols: []
`, `
p.yaml:3:16: trace[0].protocols: must not be empty
  hint: leave it out for tcp`},
	{"trace: protocols no list", traced + `    protocols: tcp,udp
`, `
p.yaml:3:16: trace[0].protocols: must be tcp or udp, is "tcp,udp"
  hint: write a list as in [tcp, udp]`},
	{"trace: stages of TCP for datagrams", traced + `    stages: [send, nic, network]
    protocols: udp
`, `
p.yaml:3:13: trace[0].stages: send, nic and network are not measured of udp
  hint: add stack, qdisc, rx_stack or reader, or tcp to protocols`},
	{"trace: stage wrong for datagrams", traced + `    stages: [send, qdsic]
    protocols: udp
`, `
p.yaml:3:20: trace[0].stages[1]: must be send, stack, qdisc, nic, network, rx_stack or reader, is "qdsic"
  hint: did you mean qdisc?`},
	{"trace: protocol wrong and stages of TCP", traced + `    stages: send
    protocols: [udp, tpc]
`, `
p.yaml:4:22: trace[0].protocols[1]: must be tcp or udp, is "tpc"
  hint: did you mean tcp?`},
	{"trace: match tag", traced + `    match: {tag: rack-12}
`, `
p.yaml:3:18: trace[0].match.tag: does not go with trace
  hint: match on addresses, ports or a service`},
	{"trace: match tag wrong", traced + `    match: {tag: 5}
`, `
p.yaml:3:18: trace[0].match.tag: must be a string, is 5
  hint: write "5", with the quotes`},
	{"trace: match", traced + `    match:
      remote: [10.0.0.1/8, '!10.1.0.0/16']
      local: '!10.0.0.0/8'
      port: 0
      role: both
      same_prefix: 129
`, `
p.yaml:4:16: trace[0].match.remote[0]: has bits set after its length: "10.0.0.1/8"
  hint: write 10.0.0.0/8
p.yaml:5:14: trace[0].match.local: must have a prefix without !
  hint: add 0.0.0.0/0 or ::/0 for all other addresses
p.yaml:6:13: trace[0].match.port: must be a port or a range of ports, is 0
  hint: write 20000 or "20000-20003"
p.yaml:7:13: trace[0].match.role: must be connect or accept, is "both"
p.yaml:8:20: trace[0].match.same_prefix: must be 1 to 128, is 129`},
	{"trace: match null", traced + `    match:
`, `
p.yaml:3:11: trace[0].match: must be a mapping, is empty`},
	{"trace: match remote_file", traced + `    match: {remote_file: /nonexistent/prefixes.txt}
`, `
p.yaml:3:26: trace[0].match.remote_file: open /nonexistent/prefixes.txt: no such file or directory`},
	{"trace: match service unknown", tracedService + `    match: {service: telemetri}
`, `
p.yaml:6:22: trace[0].match.service: is not a service of this policy: "telemetri"
  hint: did you mean telemetry?`},
	{"trace: match service without services", traced + `    match: {service: telemetry}
`, `
p.yaml:3:22: trace[0].match.service: is not a service of this policy: "telemetry"
  hint: it has no services`},
	{"trace: match service of UDP", tracedService + `    match: {service: flows}
`, `
p.yaml:6:22: trace[0].match.service: service flows has no TCP listener
  hint: the rule is for TCP alone`},
	{"trace: match service without listeners", `services: {t: {slots: 1}}
trace: [{cgroup: a, match: {service: t}}]
`, `
p.yaml:1:12: services.t.listeners: is missing`},
	{"trace: match service with the rest", tracedService + `    match: {service: telemetry, role: connect, port: 1, local_port: 2, local: 10.0.0.1}
`, `
p.yaml:6:22: trace[0].match.service: does not go with role connect
  hint: it stands for the connections that the service accepts
p.yaml:6:54: trace[0].match.port: does not go with service
  hint: the service's listeners say it
p.yaml:6:69: trace[0].match.local_port: does not go with service
  hint: the service's listeners say it
p.yaml:6:79: trace[0].match.local: does not go with service
  hint: the service's listeners say it`},
}
