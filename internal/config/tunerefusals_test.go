// SPDX-License-Identifier: Apache-2.0

package config

// tuned is the start of a policy with one rule. A test appends keys of the rule, from line 4.
const tuned = `tune:
  - name: r
    cgroup: a.slice
`

// tunedService is the same with services and a set; keys follow in line 8.
const tunedService = `services:
  telemetry: {slots: 1, listeners: [{protocol: tcp, address: '[::]:1790'}, {protocol: udp, address: '[::]:4739'}]}
  flows: {slots: 1, listeners: [{protocol: udp, address: '[::]:2055'}]}
tune:
  - name: r
    cgroup: a.slice
    set: {nodelay: true}
`

// tuneRefusals has every reason to refuse a tune section, with the exact message.
var tuneRefusals = []struct{ name, doc, want string }{
	{"tune: a mapping", `tune: {name: a}
`, `
p.yaml:1:7: tune: must be a list, is a mapping`},
	{"tune: missing keys", `tune:
  - {}
`, `
p.yaml:2:5: tune[0].name: is missing
p.yaml:2:5: tune[0].cgroup: is missing`},
	{"tune: null rule", `tune:
  -
`, `
p.yaml:2:4: tune[0]: must be a mapping, is empty`},
	{"tune: unknown key", tuned + `    set: {nodelay: true}
    mtach: {}
`, `
p.yaml:5:5: tune[0].mtach: unknown key
  hint: did you mean match?`},
	{"tune: name", `tune:
  - {name: Same Datacentre, cgroup: a, tag: x}
`, `
p.yaml:2:12: tune[0].name: is not a valid name
  hint: use 1 to 32 of a-z, 0-9, _ and -, the first of them a letter or a digit`},
	{"tune: name a number", `tune:
  - {name: 1, cgroup: a, tag: x}
`, `
p.yaml:2:12: tune[0].name: must be a string, is 1
  hint: write "1", with the quotes`},
	{"tune: name twice", `tune:
  - {name: r, cgroup: a, tag: x}
  - {name: s, cgroup: b, tag: x}
  - {name: r, cgroup: c, tag: x}
`, `
p.yaml:4:12: tune[2].name: "r" is already tune[0].name, line 2`},
	{"tune: cgroup with the mount", `tune:
  - {name: r, cgroup: /sys/fs/cgroup/a, tag: x}
`, `
p.yaml:2:23: tune[0].cgroup: must be relative to the cgroup v2 mount, is "/sys/fs/cgroup/a"
  hint: write /a`},
	{"tune: cgroup upwards", `tune:
  - {name: r, cgroup: ../a.slice, tag: x}
`, `
p.yaml:2:23: tune[0].cgroup: must not hold .., is "../a.slice"`},
	{"tune: cgroup empty", `tune:
  - {name: r, cgroup: '', tag: x}
`, `
p.yaml:2:23: tune[0].cgroup: must not be empty`},
	{"tune: nothing to do", tuned, `
p.yaml:2:5: tune[0]: must have set, tag or react
  hint: as in set: {sndbuf: 150KB}`},
	{"tune: only a trial", tuned + `    trial: {control: 10%}
`, `
p.yaml:2:5: tune[0]: must have set, tag or react
  hint: as in set: {sndbuf: 150KB}`},
	{"tune: trial of a reaction", tuned + `    react: {rtos: '> 2', set: {congestion: reno}}
    trial: {control: 10%}
`, `
p.yaml:5:12: tune[0].trial: needs set or tag
  hint: a trial compares connections with them and without`},
	{"tune: optional", tuned + `    set: {nodelay: true}
    optional: 1
`, `
p.yaml:5:15: tune[0].optional: must be true or false, is 1`},
	{"tune: observe", tuned + `    set: {nodelay: true}
    observe: on
`, `
p.yaml:5:14: tune[0].observe: must be live or close or off, is "on"`},
	{"tune: observe off with trial", tuned + `    set: {nodelay: true}
    trial: {control: 10%}
    observe: off
`, `
p.yaml:6:14: tune[0].observe: off does not go with trial
  hint: a trial compares what is observed: write live or close`},
	{"tune: observe off with explore", tuned + `    set: {initial_cwnd: {explore: [10, 20]}}
    observe: off
`, `
p.yaml:5:14: tune[0].observe: off does not go with explore
  hint: windows are learned from what is observed: write live or close`},
	{"tune: match null", tuned + `    set: {nodelay: true}
    match:
`, `
p.yaml:5:11: tune[0].match: must be a mapping, is empty`},
	{"tune: match unknown key", tuned + `    set: {nodelay: true}
    match: {remotes: 10.0.0.0/8}
`, `
p.yaml:5:13: tune[0].match.remotes: unknown key
  hint: did you mean remote?`},
	{"tune: remote no prefix", tuned + `    set: {nodelay: true}
    match: {remote: example.net}
`, `
p.yaml:5:21: tune[0].match.remote: must be an address or a prefix, is "example.net"
  hint: write 10.0.0.0/8 or 2001:db8::/32`},
	{"tune: remote length", tuned + `    set: {nodelay: true}
    match: {remote: [10.0.0.0/33, '2001:db8::/129', 10.0.0.0/]}
`, `
p.yaml:5:22: tune[0].match.remote[0]: must be an address or a prefix, is "10.0.0.0/33"
  hint: write 10.0.0.0/8 or 2001:db8::/32
p.yaml:5:35: tune[0].match.remote[1]: must be an address or a prefix, is "2001:db8::/129"
  hint: write 10.0.0.0/8 or 2001:db8::/32
p.yaml:5:53: tune[0].match.remote[2]: must be an address or a prefix, is "10.0.0.0/"
  hint: write 10.0.0.0/8 or 2001:db8::/32`},
	{"tune: remote host bits", tuned + `    set: {nodelay: true}
    match: {remote: [10.0.0.1/8, '!2001:db8::1/32']}
`, `
p.yaml:5:22: tune[0].match.remote[0]: has bits set after its length: "10.0.0.1/8"
  hint: write 10.0.0.0/8
p.yaml:5:34: tune[0].match.remote[1]: has bits set after its length: "!2001:db8::1/32"
  hint: write "!2001:db8::/32"`},
	{"tune: remote mapped", tuned + `    set: {nodelay: true}
    match: {remote: ['::ffff:10.0.0.0/104', '!::ffff:10.0.0.1', '::ffff:0:0/95']}
`, `
p.yaml:5:22: tune[0].match.remote[0]: must not be IPv4-mapped, is "::ffff:10.0.0.0/104"
  hint: write 10.0.0.0/8
p.yaml:5:45: tune[0].match.remote[1]: must not be IPv4-mapped, is "!::ffff:10.0.0.1"
  hint: write "!10.0.0.1/32"
p.yaml:5:65: tune[0].match.remote[2]: must not be IPv4-mapped, is "::ffff:0:0/95"`},
	{"tune: remote zone", tuned + `    set: {nodelay: true}
    match: {remote: ['fe80::1%eth0', 'fe80::%eth0/64']}
`, `
p.yaml:5:22: tune[0].match.remote[0]: must be an address or a prefix, is "fe80::1%eth0"
  hint: write 10.0.0.0/8 or 2001:db8::/32
p.yaml:5:38: tune[0].match.remote[1]: must be an address or a prefix, is "fe80::%eth0/64"
  hint: write 10.0.0.0/8 or 2001:db8::/32`},
	{"tune: remote number", tuned + `    set: {nodelay: true}
    match: {remote: [10]}
`, `
p.yaml:5:22: tune[0].match.remote[0]: must be a string, is 10
  hint: write "10", with the quotes`},
	{"tune: remote mapping", tuned + `    set: {nodelay: true}
    match: {remote: {a: b}}
`, `
p.yaml:5:21: tune[0].match.remote: must be a string, is a mapping`},
	{"tune: remote list in a list", tuned + `    set: {nodelay: true}
    match: {remote: [[10.0.0.0/8]]}
`, `
p.yaml:5:22: tune[0].match.remote[0]: must be a string, is a list`},
	{"tune: remote empty", tuned + `    set: {nodelay: true}
    match: {remote: []}
`, `
p.yaml:5:21: tune[0].match.remote: must not be empty
  hint: leave it out to match everything`},
	{"tune: remote null", tuned + `    set: {nodelay: true}
    match: {remote: }
`, `
p.yaml:5:21: tune[0].match.remote: must not be empty`},
	{"tune: remote without quotes", tuned + `    set: {nodelay: true}
    match: {remote: [10.0.0.0/8, !10.1.0.0/16]}
`, `
p.yaml:5:34: tune[0].match.remote[1]: tags are not supported
  hint: write "!10.1.0.0/16", with the quotes`},
	{"tune: remote twice", tuned + `    set: {nodelay: true}
    match:
      remote:
        - 10.0.0.0/8
        - 192.0.2.1
        - '!10.0.0.0/8'
        - 192.0.2.1/32
`, `
p.yaml:9:11: tune[0].match.remote[2]: 10.0.0.0/8 is already tune[0].match.remote[0], line 7
p.yaml:10:11: tune[0].match.remote[3]: 192.0.2.1/32 is already tune[0].match.remote[1], line 8`},
	{"tune: remote alias", tuned + `    set: {nodelay: true}
    match: {remote: [&a 10.0.0.0/8, *a]}
`, `
p.yaml:5:22: tune[0].match.remote[0]: anchors are not supported
p.yaml:5:37: tune[0].match.remote[1]: aliases are not supported
  hint: write the value out`},
	{"tune: remote only taken out", tuned + `    set: {nodelay: true}
    match: {remote: '!10.0.0.0/8'}
`, `
p.yaml:5:21: tune[0].match.remote: must have a prefix without !
  hint: add 0.0.0.0/0 or ::/0 for all other addresses`},
	{"tune: local only taken out", tuned + `    set: {nodelay: true}
    match: {local: ['!10.0.0.0/8', '!2001:db8::/32']}
`, `
p.yaml:5:20: tune[0].match.local: must have a prefix without !
  hint: add 0.0.0.0/0 or ::/0 for all other addresses`},
	{"tune: remote wrong and taken out", tuned + `    set: {nodelay: true}
    match: {remote: [10.0.0.0/33, '!10.0.0.0/8']}
`, `
p.yaml:5:22: tune[0].match.remote[0]: must be an address or a prefix, is "10.0.0.0/33"
  hint: write 10.0.0.0/8 or 2001:db8::/32`},
	{"tune: remote_file missing", tuned + `    set: {nodelay: true}
    match: {remote_file: /nonexistent/prefixes.txt}
`, `
p.yaml:5:26: tune[0].match.remote_file: open /nonexistent/prefixes.txt: no such file or directory`},
	{"tune: remote_file a directory", tuned + `    set: {nodelay: true}
    match: {remote_file: /}
`, `
p.yaml:5:26: tune[0].match.remote_file: read /: not a regular file`},
	{"tune: remote_file a device", tuned + `    set: {nodelay: true}
    match: {remote_file: /dev/zero}
`, `
p.yaml:5:26: tune[0].match.remote_file: read /dev/zero: not a regular file`},
	{"tune: port", tuned + `    set: {nodelay: true}
    match: {port: [1790, 0, 70000, 9-5, bgp]}
`, `
p.yaml:5:26: tune[0].match.port[1]: must be a port or a range of ports, is 0
  hint: write 20000 or "20000-20003"
p.yaml:5:29: tune[0].match.port[2]: must be a port or a range of ports, is 70000
  hint: write 20000 or "20000-20003"
p.yaml:5:36: tune[0].match.port[3]: must be a port or a range of ports, is "9-5"
  hint: write 20000 or "20000-20003"
p.yaml:5:41: tune[0].match.port[4]: must be a port or a range of ports, is "bgp"
  hint: write 20000 or "20000-20003"`},
	{"tune: remote_port", tuned + `    set: {nodelay: true}
    match: {remote_port: 65536}
`, `
p.yaml:5:26: tune[0].match.remote_port: must be a port or a range of ports, is 65536
  hint: write 20000 or "20000-20003"`},
	{"tune: local_port", tuned + `    set: {nodelay: true}
    match: {local_port: {a: 1}}
`, `
p.yaml:5:25: tune[0].match.local_port: must be a port or a range of ports, is a mapping
  hint: write 20000 or "20000-20003"`},
	{"tune: port empty", tuned + `    set: {nodelay: true}
    match: {port: []}
`, `
p.yaml:5:19: tune[0].match.port: must not be empty
  hint: leave it out to match everything`},
	{"tune: role", tuned + `    set: {nodelay: true}
    match: {role: acept}
`, `
p.yaml:5:19: tune[0].match.role: must be connect or accept, is "acept"
  hint: did you mean accept?`},
	{"tune: same_prefix", tuned + `    set: {nodelay: true}
    match: {same_prefix: 0}
`, `
p.yaml:5:26: tune[0].match.same_prefix: must be 1 to 128, is 0`},
	{"tune: same_prefix too long", tuned + `    set: {nodelay: true}
    match: {same_prefix: 129}
`, `
p.yaml:5:26: tune[0].match.same_prefix: must be 1 to 128, is 129`},
	{"tune: same_prefix in quotes", tuned + `    set: {nodelay: true}
    match: {same_prefix: '44'}
`, `
p.yaml:5:26: tune[0].match.same_prefix: must be a decimal whole number, is "44"
  hint: write 44, without the quotes`},
	{"tune: same_prefix empty", tuned + `    set: {nodelay: true}
    match: {same_prefix: {}}
`, `
p.yaml:5:26: tune[0].match.same_prefix: must have ipv4 or ipv6`},
	{"tune: same_prefix by family", tuned + `    set: {nodelay: true}
    match: {same_prefix: {ipv4: 33, ipv6: -1, ip: 4}}
`, `
p.yaml:5:33: tune[0].match.same_prefix.ipv4: must be 0 to 32, is 33
p.yaml:5:43: tune[0].match.same_prefix.ipv6: must be 0 to 128, is -1
p.yaml:5:47: tune[0].match.same_prefix.ip: unknown key
  hint: did you mean ipv4?`},
	{"tune: same_prefix list", tuned + `    set: {nodelay: true}
    match: {same_prefix: [24]}
`, `
p.yaml:5:26: tune[0].match.same_prefix: must be a decimal whole number, is a list`},
	{"tune: service unknown", tunedService + `    match: {service: telemetri}
`, `
p.yaml:8:22: tune[0].match.service: is not a service of this policy: "telemetri"
  hint: did you mean telemetry?`},
	{"tune: service far off", tunedService + `    match: {service: x}
`, `
p.yaml:8:22: tune[0].match.service: is not a service of this policy: "x"
  hint: services: telemetry, flows`},
	{"tune: service without services", tuned + `    set: {nodelay: true}
    match: {service: telemetry}
`, `
p.yaml:5:22: tune[0].match.service: is not a service of this policy: "telemetry"
  hint: it has no services`},
	{"tune: service of UDP", tunedService + `    match: {service: flows}
`, `
p.yaml:8:22: tune[0].match.service: service flows has no TCP listener
  hint: the rule is for TCP alone`},
	{"tune: service with role connect", tunedService + `    match: {service: telemetry, role: connect}
`, `
p.yaml:8:22: tune[0].match.service: does not go with role connect
  hint: it stands for the connections that the service accepts`},
	{"tune: service with ports and local", tunedService + `    match: {service: telemetry, port: 1, local_port: 2, local: 10.0.0.1}
`, `
p.yaml:8:39: tune[0].match.port: does not go with service
  hint: the service's listeners say it
p.yaml:8:54: tune[0].match.local_port: does not go with service
  hint: the service's listeners say it
p.yaml:8:64: tune[0].match.local: does not go with service
  hint: the service's listeners say it`},
	{"tune: service number", tunedService + `    match: {service: 5}
`, `
p.yaml:8:22: tune[0].match.service: must be a string, is 5
  hint: write "5", with the quotes`},
	{"tune: tag too long", tuned + `    tag: 12345678901234567
`, `
p.yaml:4:10: tune[0].tag: must be a string, is 12345678901234567
  hint: write "12345678901234567", with the quotes`},
	{"tune: tag of 17 characters", tuned + `    tag: rack-123456789012
`, `
p.yaml:4:10: tune[0].tag: must be 1 to 16 printable ASCII characters, is "rack-123456789012"
  hint: write other bytes as 0x5eed00`},
	{"tune: tag not ASCII", tuned + `    tag: räck
`, `
p.yaml:4:10: tune[0].tag: must be 1 to 16 printable ASCII characters, is "räck"
  hint: write other bytes as 0x5eed00`},
	{"tune: tag empty", tuned + `    tag: ''
`, `
p.yaml:4:10: tune[0].tag: must not be empty`},
	{"tune: tag list", tuned + `    tag: [a]
`, `
p.yaml:4:10: tune[0].tag: must be a string, is a list`},
	{"tune: tag half a byte", tuned + `    tag: 0x5
`, `
p.yaml:4:10: tune[0].tag: must be 0x and 1 to 16 bytes of two hexadecimal digits, is 0x5`},
	{"tune: tag no hexadecimal", tuned + `    tag: 0xrack
`, `
p.yaml:4:10: tune[0].tag: must be 0x and 1 to 16 bytes of two hexadecimal digits, is "0xrack"`},
	{"tune: tag of 17 bytes", tuned + `    tag: 0x0102030405060708090a0b0c0d0e0f1011
`, `
p.yaml:4:10: tune[0].tag: must be 0x and 1 to 16 bytes of two hexadecimal digits, is "0x0102030405060708090a0b0c0d0e0f1011"`},
	{"tune: tag of no bytes", tuned + `    tag: 0x
`, `
p.yaml:4:10: tune[0].tag: must be 0x and 1 to 16 bytes of two hexadecimal digits, is "0x"`},
	{"tune: peer's tag", tuned + `    set: {nodelay: true}
    match: {tag: 5}
`, `
p.yaml:5:18: tune[0].match.tag: must be a string, is 5
  hint: write "5", with the quotes`},
	{"tune: set empty", tuned + `    set: {}
`, `
p.yaml:4:10: tune[0].set: must have at least one option`},
	{"tune: set list", tuned + `    set: [nodelay]
`, `
p.yaml:4:10: tune[0].set: must be a mapping, is a list`},
	{"tune: option unknown", tuned + `    set: {sndbuff: 150KB}
`, `
p.yaml:4:11: tune[0].set.sndbuff: unknown option
  hint: did you mean sndbuf?`},
	{"tune: option far off", tuned + `    set: {x: 1}
`, `
p.yaml:4:11: tune[0].set.x: unknown option
  hint: known options: syn_rto, synack_rto, initial_rwnd, ecn, base_rtt, sndbuf, rcvbuf, rcvlowat, pacing_rate, mark, keepalive, reuse_address, bind_ifindex, txrehash, congestion, initial_cwnd, cwnd_clamp, delack_max, rto_min, rto_max, notsent_lowat, window_clamp, user_timeout, keepalive_idle, keepalive_interval, keepalive_probes, syn_retries, nodelay, mss, thin_linear_timeouts, tos, traffic_class, priority, auto_flow_label, flow_label`},
	{"tune: option twice", tuned + `    set: {nodelay: true, nodelay: false}
`, `
p.yaml:4:26: tune[0].set.nodelay: is given twice, first in line 4`},
	{"tune: size unit", tuned + `    set: {sndbuf: 150kb, rcvbuf: 150 KB, rcvlowat: 5XB, notsent_lowat: 1.5Kib}
`, `
p.yaml:4:19: tune[0].set.sndbuf: must be a size such as 150KB, is "150kb"
  hint: write 150KB
p.yaml:4:34: tune[0].set.rcvbuf: must be a size such as 150KB, is "150 KB"
  hint: units: GB, MB, KB, B, GiB, MiB, KiB
p.yaml:4:52: tune[0].set.rcvlowat: must be a size such as 150KB, is "5XB"
  hint: units: GB, MB, KB, B, GiB, MiB, KiB
p.yaml:4:72: tune[0].set.notsent_lowat: must be a size such as 150KB, is "1.5Kib"
  hint: write 1.5KiB`},
	{"tune: size in quotes", tuned + `    set: {sndbuf: '150000'}
`, `
p.yaml:4:19: tune[0].set.sndbuf: must be a size such as 150KB, is "150000"
  hint: write 150000, without the quotes`},
	{"tune: size without unit", tuned + `    set: {sndbuf: 1.5, rcvbuf: -1, rcvlowat: 010}
`, `
p.yaml:4:19: tune[0].set.sndbuf: must be a size such as 150KB, is 1.5
  hint: units: GB, MB, KB, B, GiB, MiB, KiB
p.yaml:4:32: tune[0].set.rcvbuf: must be a size such as 150KB, is -1
  hint: units: GB, MB, KB, B, GiB, MiB, KiB
p.yaml:4:46: tune[0].set.rcvlowat: must be a size such as 150KB, is 010
  hint: units: GB, MB, KB, B, GiB, MiB, KiB`},
	{"tune: size no number", tuned + `    set: {sndbuf: KB, rcvbuf: , rcvlowat: [1KB], notsent_lowat: .5KB}
`, `
p.yaml:4:19: tune[0].set.sndbuf: must be a size such as 150KB, is "KB"
  hint: units: GB, MB, KB, B, GiB, MiB, KiB
p.yaml:4:31: tune[0].set.rcvbuf: must be a size such as 150KB, is empty
  hint: units: GB, MB, KB, B, GiB, MiB, KiB
p.yaml:4:43: tune[0].set.rcvlowat: must be a size such as 150KB, is a list
  hint: units: GB, MB, KB, B, GiB, MiB, KiB
p.yaml:4:65: tune[0].set.notsent_lowat: must be a size such as 150KB, is ".5KB"
  hint: units: GB, MB, KB, B, GiB, MiB, KiB`},
	{"tune: size not whole", tuned + `    set: {sndbuf: 4.0001KB}
`, `
p.yaml:4:19: tune[0].set.sndbuf: must be whole bytes, is "4.0001KB"`},
	{"tune: size bounds", tuned + `    set: {sndbuf: 2047, rcvbuf: 1GiB, rcvlowat: 0B, notsent_lowat: 999999999999999999GB}
`, `
p.yaml:4:19: tune[0].set.sndbuf: must be 2KiB to 1GB, is 2047
p.yaml:4:33: tune[0].set.rcvbuf: must be 1KiB to 1GB, is "1GiB"
p.yaml:4:49: tune[0].set.rcvlowat: must be 1B to 1GB, is "0B"
p.yaml:4:68: tune[0].set.notsent_lowat: must be 1B to 2147483647B, is "999999999999999999GB"`},
	{"tune: duration without unit", tuned + `    set: {syn_rto: 10, synack_rto: '10', user_timeout: 0.5}
`, `
p.yaml:4:20: tune[0].set.syn_rto: must be a duration such as 10ms, is 10
  hint: units: d, h, m, s, ms, us
p.yaml:4:36: tune[0].set.synack_rto: must be a duration such as 10ms, is "10"
  hint: units: d, h, m, s, ms, us
p.yaml:4:56: tune[0].set.user_timeout: must be a duration such as 10ms, is 0.5
  hint: units: d, h, m, s, ms, us`},
	{"tune: duration unit", tuned + `    set: {syn_rto: 10MS, synack_rto: 10sec, user_timeout: 1h30m}
`, `
p.yaml:4:20: tune[0].set.syn_rto: must be a duration such as 10ms, is "10MS"
  hint: write 10ms
p.yaml:4:38: tune[0].set.synack_rto: must be a duration such as 10ms, is "10sec"
  hint: units: d, h, m, s, ms, us
p.yaml:4:59: tune[0].set.user_timeout: must be a duration such as 10ms, is "1h30m"
  hint: units: d, h, m, s, ms, us`},
	{"tune: duration not whole", tuned + `    set: {syn_rto: 1.0000001s}
`, `
p.yaml:4:20: tune[0].set.syn_rto: must be whole microseconds, is "1.0000001s"`},
	{"tune: duration bounds", tuned + `    set: {syn_rto: 999us, synack_rto: 121s, delack_max: 300ms, rto_min: 4ms, rto_max: 500ms, user_timeout: 2d, keepalive_idle: 10h, base_rtt: 0s}
`, `
p.yaml:4:20: tune[0].set.syn_rto: must be 1ms to 2m, is "999us"
p.yaml:4:39: tune[0].set.synack_rto: must be 1ms to 2m, is "121s"
p.yaml:4:57: tune[0].set.delack_max: must be 8ms to 200ms, is "300ms"
p.yaml:4:73: tune[0].set.rto_min: must be 8ms to 200ms, is "4ms"
p.yaml:4:87: tune[0].set.rto_max: must be 1s to 2m, is "500ms"
p.yaml:4:108: tune[0].set.user_timeout: must be 1ms to 1d, is "2d"
p.yaml:4:128: tune[0].set.keepalive_idle: must be 1s to 32767s, is "10h"
p.yaml:4:143: tune[0].set.base_rtt: must be 1us to 10s, is "0s"`},
	{"tune: rate", tuned + `    set: {pacing_rate: 2Gbps}
`, `
p.yaml:4:24: tune[0].set.pacing_rate: must be a rate such as 2Gbit/s, is "2Gbps"
  hint: units: Gbit/s, Mbit/s, kbit/s, bit/s`},
	{"tune: rate without unit", tuned + `    set: {pacing_rate: 1000000}
`, `
p.yaml:4:24: tune[0].set.pacing_rate: must be a rate such as 2Gbit/s, is 1000000
  hint: units: Gbit/s, Mbit/s, kbit/s, bit/s`},
	{"tune: rate unit", tuned + `    set: {pacing_rate: 2gbit/s}
`, `
p.yaml:4:24: tune[0].set.pacing_rate: must be a rate such as 2Gbit/s, is "2gbit/s"
  hint: write 2Gbit/s`},
	{"tune: rate not whole", tuned + `    set: {pacing_rate: 10001bit/s}
`, `
p.yaml:4:24: tune[0].set.pacing_rate: must be whole bytes a second, is "10001bit/s"`},
	{"tune: rate bounds", tuned + `    set: {pacing_rate: 35Gbit/s}
`, `
p.yaml:4:24: tune[0].set.pacing_rate: must be 8kbit/s to 34Gbit/s, is "35Gbit/s"`},
	{"tune: number", tuned + `    set: {priority: 7, mark: 0x100000000, tos: -1, mss: 1e3, cwnd_clamp: '100', traffic_class: '0x10', flow_label: 0x, keepalive_probes: 010, syn_retries: }
`, `
p.yaml:4:21: tune[0].set.priority: must be 0 to 6, is 7
p.yaml:4:30: tune[0].set.mark: must be 0 to 4294967295, is 0x100000000
p.yaml:4:48: tune[0].set.tos: must be 0 to 255, is -1
p.yaml:4:57: tune[0].set.mss: must be a whole number, decimal or 0x hexadecimal, is 1e3
p.yaml:4:74: tune[0].set.cwnd_clamp: must be a whole number, decimal or 0x hexadecimal, is "100"
  hint: write 100, without the quotes
p.yaml:4:96: tune[0].set.traffic_class: must be a whole number, decimal or 0x hexadecimal, is "0x10"
  hint: write 0x10, without the quotes
p.yaml:4:116: tune[0].set.flow_label: must be a whole number, decimal or 0x hexadecimal, is "0x"
p.yaml:4:138: tune[0].set.keepalive_probes: must be a whole number, decimal or 0x hexadecimal, is 010
p.yaml:4:156: tune[0].set.syn_retries: must be a whole number, decimal or 0x hexadecimal, is empty`},
	{"tune: number mapping", tuned + `    set: {cwnd_clamp: {explore: [1, 2]}}
`, `
p.yaml:4:23: tune[0].set.cwnd_clamp: must be a whole number, decimal or 0x hexadecimal, is a mapping`},
	{"tune: switch", tuned + `    set: {nodelay: 1, ecn: yes, txrehash: {}}
`, `
p.yaml:4:20: tune[0].set.nodelay: must be true or false, is 1
p.yaml:4:28: tune[0].set.ecn: must be true or false, is "yes"
p.yaml:4:43: tune[0].set.txrehash: must be true or false, is a mapping`},
	{"tune: congestion", tuned + `    set: {congestion: CUBIC}
`, `
p.yaml:4:23: tune[0].set.congestion: must be 1 to 15 of a-z, 0-9, _ and -, is "CUBIC"`},
	{"tune: congestion too long", tuned + `    set: {congestion: abcdefghijklmnop}
`, `
p.yaml:4:23: tune[0].set.congestion: must be 1 to 15 of a-z, 0-9, _ and -, is "abcdefghijklmnop"`},
	{"tune: congestion number", tuned + `    set: {congestion: 5}
`, `
p.yaml:4:23: tune[0].set.congestion: must be a string, is 5
  hint: write "5", with the quotes`},
	{"tune: option tag and alias", tuned + `    set: {sndbuf: !!int 5000, rcvbuf: &r 5000, rcvlowat: *r}
`, `
p.yaml:4:19: tune[0].set.sndbuf: tags are not supported
p.yaml:4:39: tune[0].set.rcvbuf: anchors are not supported
p.yaml:4:58: tune[0].set.rcvlowat: aliases are not supported
  hint: write the value out`},
	{"tune: initial_cwnd", tuned + `    set: {initial_cwnd: 0}
`, `
p.yaml:4:25: tune[0].set.initial_cwnd: must be 1 to 32768, is 0`},
	{"tune: initial_cwnd list", tuned + `    set: {initial_cwnd: [10, 16]}
`, `
p.yaml:4:25: tune[0].set.initial_cwnd: must be a whole number, decimal or 0x hexadecimal, is a list`},
	{"tune: explore missing", tuned + `    set: {initial_cwnd: {}}
`, `
p.yaml:4:25: tune[0].set.initial_cwnd.explore: is missing`},
	{"tune: explore unknown key", tuned + `    set: {initial_cwnd: {explore: [10, 16], every: 1}}
`, `
p.yaml:4:45: tune[0].set.initial_cwnd.every: unknown key
  hint: known keys: explore, by, share, probe, bytes, evidence, forget`},
	{"tune: explore one", tuned + `    set: {initial_cwnd: {explore: [10]}}
`, `
p.yaml:4:35: tune[0].set.initial_cwnd.explore: must be a list of 2 to 8 windows, is a list of 1
  hint: write [10, 16, 24, 40]`},
	{"tune: explore nine", tuned + `    set: {initial_cwnd: {explore: [1, 2, 3, 4, 5, 6, 7, 8, 9]}}
`, `
p.yaml:4:35: tune[0].set.initial_cwnd.explore: must be a list of 2 to 8 windows, is a list of 9
  hint: write [10, 16, 24, 40]`},
	{"tune: explore number", tuned + `    set: {initial_cwnd: {explore: 10}}
`, `
p.yaml:4:35: tune[0].set.initial_cwnd.explore: must be a list of 2 to 8 windows, is 10
  hint: write [10, 16, 24, 40]`},
	{"tune: explore order", tuned + `    set: {initial_cwnd: {explore: [10, 16, 16, 12]}}
`, `
p.yaml:4:44: tune[0].set.initial_cwnd.explore[2]: must be above the one before it, 16, is 16
p.yaml:4:48: tune[0].set.initial_cwnd.explore[3]: must be above the one before it, 16, is 12`},
	{"tune: explore bounds", tuned + `    set: {initial_cwnd: {explore: [0, 32769, '16']}}
`, `
p.yaml:4:36: tune[0].set.initial_cwnd.explore[0]: must be 1 to 32768, is 0
p.yaml:4:39: tune[0].set.initial_cwnd.explore[1]: must be 1 to 32768, is 32769
p.yaml:4:46: tune[0].set.initial_cwnd.explore[2]: must be a decimal whole number, is "16"
  hint: write 16, without the quotes`},
	{"tune: explore by", tuned + `    set: {initial_cwnd: {explore: [10, 16], by: remote/33}}
`, `
p.yaml:4:49: tune[0].set.initial_cwnd.by: must be remote/N, N from 0 to 32, or {ipv4: N, ipv6: N}, is "remote/33"
  hint: remote/24 has 24 bits of IPv4 addresses and 48 of IPv6`},
	{"tune: explore by local", tuned + `    set: {initial_cwnd: {explore: [10, 16], by: local/24}}
`, `
p.yaml:4:49: tune[0].set.initial_cwnd.by: must be remote/N, N from 0 to 32, or {ipv4: N, ipv6: N}, is "local/24"
  hint: remote/24 has 24 bits of IPv4 addresses and 48 of IPv6`},
	{"tune: explore by family", tuned + `    set: {initial_cwnd: {explore: [10, 16], by: {ipv4: 33, ipv6: 129}}}
`, `
p.yaml:4:56: tune[0].set.initial_cwnd.by.ipv4: must be 0 to 32, is 33
p.yaml:4:66: tune[0].set.initial_cwnd.by.ipv6: must be 0 to 128, is 129`},
	{"tune: explore by nothing", tuned + `    set: {initial_cwnd: {explore: [10, 16], by: {}}}
`, `
p.yaml:4:49: tune[0].set.initial_cwnd.by: must have ipv4 or ipv6`},
	{"tune: explore share", tuned + `    set: {initial_cwnd: {explore: [10, 16], share: 0.05%}}
`, `
p.yaml:4:52: tune[0].set.initial_cwnd.share: must be 0.1% to 100%, is "0.05%"`},
	{"tune: explore share above all", tuned + `    set: {initial_cwnd: {explore: [10, 16], share: 101%}}
`, `
p.yaml:4:52: tune[0].set.initial_cwnd.share: must be 0.1% to 100%, is "101%"`},
	{"tune: explore share without %", tuned + `    set: {initial_cwnd: {explore: [10, 16], share: 10, probe: 0.1}}
`, `
p.yaml:4:52: tune[0].set.initial_cwnd.share: must be a percentage such as 10%, is 10
  hint: write 10%
p.yaml:4:63: tune[0].set.initial_cwnd.probe: must be a percentage such as 10%, is 0.1`},
	{"tune: explore probe", tuned + `    set: {initial_cwnd: {explore: [10, 16], probe: 11%}}
`, `
p.yaml:4:52: tune[0].set.initial_cwnd.probe: probe must not be above share: is 11% of 10%`},
	{"tune: explore share below probe", tuned + `    set: {initial_cwnd: {explore: [10, 16], share: 1%}}
`, `
p.yaml:4:52: tune[0].set.initial_cwnd.share: probe must not be above share: is 2% of 1%
  hint: set probe too`},
	{"tune: explore bytes", tuned + `    set: {initial_cwnd: {explore: [10, 16], bytes: 17MB}}
`, `
p.yaml:4:52: tune[0].set.initial_cwnd.bytes: must be 1KB to 16MB, is "17MB"`},
	{"tune: explore evidence", tuned + `    set: {initial_cwnd: {explore: [10, 16], evidence: 1}}
`, `
p.yaml:4:55: tune[0].set.initial_cwnd.evidence: must be 2 to 1000, is 1`},
	{"tune: explore forget", tuned + `    set: {initial_cwnd: {explore: [10, 16], forget: 366d}}
`, `
p.yaml:4:53: tune[0].set.initial_cwnd.forget: must be 1s to 365d, is "366d"`},
	{"tune: trial", tuned + `    set: {nodelay: true}
    trial: 10%
`, `
p.yaml:5:12: tune[0].trial: must be a mapping, is "10%"`},
	{"tune: trial empty", tuned + `    set: {nodelay: true}
    trial: {}
`, `
p.yaml:5:5: tune[0].trial.control: is missing`},
	{"tune: trial control", tuned + `    set: {nodelay: true}
    trial: {control: 91%}
`, `
p.yaml:5:22: tune[0].trial.control: must be 0.1% to 90%, is "91%"`},
	{"tune: trial control too small", tuned + `    set: {nodelay: true}
    trial: {control: 0.01%}
`, `
p.yaml:5:22: tune[0].trial.control: must be 0.1% to 90%, is "0.01%"`},
	{"tune: trial control no percentage", tuned + `    set: {nodelay: true}
    trial: {control: 1/10}
`, `
p.yaml:5:22: tune[0].trial.control: must be a percentage such as 10%, is "1/10"`},
	{"tune: react", tuned + `    react: []
`, `
p.yaml:4:12: tune[0].react: must be a mapping, is a list`},
	{"tune: react without condition", tuned + `    react: {set: {congestion: reno}}
`, `
p.yaml:4:12: tune[0].react: must have retransmits or rtos
  hint: as in {retransmits: "> 2%", set: {congestion: reno}}`},
	{"tune: react without set", tuned + `    react: {rtos: '> 2'}
`, `
p.yaml:4:12: tune[0].react.set: is missing`},
	{"tune: react empty set", tuned + `    react: {rtos: '> 2', set: {}}
`, `
p.yaml:4:31: tune[0].react.set: must have at least one option`},
	{"tune: react set", tuned + `    react: {rtos: '> 2', set: {syn_rto: 1s, snd: 5, initial_cwnd: 5}}
`, `
p.yaml:4:32: tune[0].react.set.syn_rto: cannot be set by a reaction
  hint: a reaction can set sndbuf, rcvbuf, rcvlowat, pacing_rate, mark, keepalive, txrehash, congestion, cwnd_clamp, delack_max, rto_min, rto_max, notsent_lowat, window_clamp, user_timeout, keepalive_idle, keepalive_interval, keepalive_probes, nodelay, thin_linear_timeouts, tos, traffic_class, priority, flow_label
p.yaml:4:45: tune[0].react.set.snd: unknown option
  hint: known options: sndbuf, rcvbuf, rcvlowat, pacing_rate, mark, keepalive, txrehash, congestion, cwnd_clamp, delack_max, rto_min, rto_max, notsent_lowat, window_clamp, user_timeout, keepalive_idle, keepalive_interval, keepalive_probes, nodelay, thin_linear_timeouts, tos, traffic_class, priority, flow_label
p.yaml:4:53: tune[0].react.set.initial_cwnd: cannot be set by a reaction
  hint: a reaction can set sndbuf, rcvbuf, rcvlowat, pacing_rate, mark, keepalive, txrehash, congestion, cwnd_clamp, delack_max, rto_min, rto_max, notsent_lowat, window_clamp, user_timeout, keepalive_idle, keepalive_interval, keepalive_probes, nodelay, thin_linear_timeouts, tos, traffic_class, priority, flow_label`},
	{"tune: react retransmits", tuned + `    react: {retransmits: 2%, set: {congestion: reno}}
`, `
p.yaml:4:26: tune[0].react.retransmits: must be a condition such as "> 2%", is "2%"
  hint: write "> 2%", with the quotes`},
	{"tune: react retransmits without %", tuned + `    react: {retransmits: '> 2', set: {congestion: reno}}
`, `
p.yaml:4:26: tune[0].react.retransmits: must be a condition such as "> 2%", is "> 2"
  hint: write "> 2%", with the quotes`},
	{"tune: react retransmits bounds", tuned + `    react: {retransmits: '> 51%', set: {congestion: reno}}
`, `
p.yaml:4:26: tune[0].react.retransmits: must be > 0.1% to > 50%, is "> 51%"`},
	{"tune: react retransmits too small", tuned + `    react: {retransmits: '> 0.01%', set: {congestion: reno}}
`, `
p.yaml:4:26: tune[0].react.retransmits: must be > 0.1% to > 50%, is "> 0.01%"`},
	{"tune: react rtos", tuned + `    react: {rtos: 2, set: {congestion: reno}}
`, `
p.yaml:4:19: tune[0].react.rtos: must be a condition such as "> 2", is 2
  hint: write "> 2", with the quotes`},
	{"tune: react rtos bounds", tuned + `    react: {rtos: '> 101', set: {congestion: reno}}
`, `
p.yaml:4:19: tune[0].react.rtos: must be > 0 to > 100, is "> 101"`},
	{"tune: react rtos negative", tuned + `    react: {rtos: '> -1', set: {congestion: reno}}
`, `
p.yaml:4:19: tune[0].react.rtos: must be a condition such as "> 2", is "> -1"
  hint: write "> 2", with the quotes`},
	{"tune: react sample", tuned + `    react: {rtos: '> 2', sample: 1%, set: {congestion: reno}}
`, `
p.yaml:4:34: tune[0].react.sample: must be 1/1 to 1/1000000, is "1%"
  hint: 1/100 watches one of a hundred connections`},
	{"tune: react sample bounds", tuned + `    react: {rtos: '> 2', sample: 1/1000001, set: {congestion: reno}}
`, `
p.yaml:4:34: tune[0].react.sample: must be 1/1 to 1/1000000, is "1/1000001"
  hint: 1/100 watches one of a hundred connections`},
	{"tune: condition without quotes", tuned + `    react: {rtos: > 2, set: {congestion: reno}}
`, `
p.yaml:4:19: while scanning for the next token: found character that cannot start any token
  hint: put a value that begins with > in quotes`},
	{"tune: condition without quotes in a block", tuned + `    react:
      rtos: > 2
      set: {congestion: reno}
`, `
p.yaml:5:15: while scanning a block scalar: did not find expected comment or line break
  hint: put a value that begins with > in quotes`},
	{"tune: condition as an empty block", tuned + `    react:
      rtos: >2
      set: {congestion: reno}
`, `
p.yaml:5:13: tune[0].react.rtos: must be a condition such as "> 2", is ""
  hint: write "> 2", with the quotes`},
	{"tune: handshake with the peer's tag", tuned + `    match: {tag: a}
    set:
      syn_rto: 10ms
      synack_rto: 10ms
      initial_rwnd: 40
      ecn: true
      mss: 1000
      syn_retries: 3
      initial_cwnd: 40
`, `
p.yaml:6:16: tune[0].set.syn_rto: has no effect with match.tag
  hint: the peer's tag is known only after the handshake
p.yaml:7:19: tune[0].set.synack_rto: has no effect with match.tag
  hint: the peer's tag is known only after the handshake
p.yaml:8:21: tune[0].set.initial_rwnd: has no effect with match.tag
  hint: the peer's tag is known only after the handshake
p.yaml:9:12: tune[0].set.ecn: has no effect with match.tag
  hint: the peer's tag is known only after the handshake
p.yaml:10:12: tune[0].set.mss: has no effect with match.tag
  hint: the peer's tag is known only after the handshake
p.yaml:11:20: tune[0].set.syn_retries: has no effect with match.tag
  hint: the peer's tag is known only after the handshake`},
	{"tune: connecting options with role accept", tuned + `    match: {role: accept}
    set:
      syn_rto: 10ms
      synack_rto: 10ms
      mss: 1000
      syn_retries: 3
`, `
p.yaml:6:16: tune[0].set.syn_rto: has no effect on connections that are accepted
  hint: it is for role connect
p.yaml:8:12: tune[0].set.mss: has no effect on connections that are accepted
  hint: it is for role connect
p.yaml:9:20: tune[0].set.syn_retries: has no effect on connections that are accepted
  hint: it is for role connect`},
	{"tune: connecting options with service", `services: {t: {slots: 1, listeners: [{protocol: tcp, address: '[::]:1'}]}}
tune:
  - name: r
    cgroup: a
    match: {service: t}
    set: {syn_rto: 10ms, syn_retries: 3, mss: 1000, synack_rto: 10ms}
`, `
p.yaml:6:20: tune[0].set.syn_rto: has no effect on connections that are accepted
  hint: it is for role connect
p.yaml:6:39: tune[0].set.syn_retries: has no effect on connections that are accepted
  hint: it is for role connect
p.yaml:6:47: tune[0].set.mss: has no effect on connections that are accepted
  hint: it is for role connect`},
	{"tune: synack_rto with role connect", tuned + `    match: {role: connect}
    set: {syn_rto: 10ms, synack_rto: 10ms}
`, `
p.yaml:5:38: tune[0].set.synack_rto: has no effect with role connect
  hint: it is for role accept`},
	{"tune: flow labels", tuned + `    set: {flow_label: 5, auto_flow_label: true}
`, `
p.yaml:4:43: tune[0].set.auto_flow_label: does not go with flow_label`},
	{"tune: clamp", tuned + `    set: {cwnd_clamp: 30, initial_cwnd: 40}
`, `
p.yaml:4:41: tune[0].set.initial_cwnd: must not be above cwnd_clamp: is 40 of 30`},
	{"tune: clamp of explored", tuned + `    set: {cwnd_clamp: 30, initial_cwnd: {explore: [10, 30, 40, 64]}}
`, `
p.yaml:4:60: tune[0].set.initial_cwnd.explore[2]: must not be above cwnd_clamp: is 40 of 30
p.yaml:4:64: tune[0].set.initial_cwnd.explore[3]: must not be above cwnd_clamp: is 64 of 30`},
	{"tune: after a rule for all", `tune:
  - {name: all, cgroup: a, match: {}, tag: x}
  - {name: some, cgroup: /a/, match: {port: 5}, tag: x}
`, `
p.yaml:3:5: tune[1]: can never match, rule all before it matches all its connections
  hint: put it first`},
	{"tune: after the same match", `tune:
  - {name: first, cgroup: a.slice, match: {remote: [10.0.0.0/8], port: 5, tag: a, same_prefix: 24}, tag: x}
  - {name: other, cgroup: b.slice, match: {remote: 10.0.0.0/8, port: [5], tag: 0x61, same_prefix: 24}, tag: x}
  - {name: second, cgroup: a.slice, match: {remote: 10.0.0.0/8, port: [5], tag: 0x61, same_prefix: {ipv4: 24, ipv6: 24}}, tag: y}
`, `
p.yaml:4:5: tune[2]: can never match, rule first before it matches all its connections
  hint: both match the same: make them one`},
	{"tune: same bad file, no second error", `tune:
  - {name: a, cgroup: a, tag: x, match: {remote_file: /nonexistent/file}}
  - {name: b, cgroup: a, tag: x, match: {remote_file: /nonexistent/file}}
  - {name: c, cgroup: a, tag: x, match: {port: 1}}
`, `
p.yaml:2:55: tune[0].match.remote_file: open /nonexistent/file: no such file or directory`},
	{"tune: after a rule without a name", `tune:
  - {name: '', cgroup: /, tag: x}
  - {name: b, cgroup: /, tag: x, match: {role: accept}}
`, `
p.yaml:2:12: tune[0].name: must not be empty
p.yaml:3:5: tune[1]: can never match, rule tune[0] before it matches all its connections
  hint: put it first`},
	{"tune: nothing twice", `tune:
  - {name: '', cgroup: a, match: {port: 0}, tag: x}
  - {name: '', cgroup: a, match: {port: 0}, tag: x}
  - {name: r, cgroup: '', tag: x}
  - {name: s, cgroup: '', tag: x}
`, `
p.yaml:2:12: tune[0].name: must not be empty
p.yaml:2:41: tune[0].match.port: must be a port or a range of ports, is 0
  hint: write 20000 or "20000-20003"
p.yaml:3:12: tune[1].name: must not be empty
p.yaml:3:41: tune[1].match.port: must be a port or a range of ports, is 0
  hint: write 20000 or "20000-20003"
p.yaml:4:23: tune[2].cgroup: must not be empty
p.yaml:5:23: tune[3].cgroup: must not be empty`},
}
