// SPDX-License-Identifier: Apache-2.0

package config

// refusals has every reason to refuse a policy, with the exact message.
var refusals = []struct{ name, doc, want string }{
	{"empty file", "", `
p.yaml: is empty`},
	{"comments only", "# nothing\n", `
p.yaml: is empty`},
	{"null document", "---\n", `
p.yaml: is empty`},
	{"not a mapping", "- services\n", `
p.yaml:1:1: must be a mapping, is a list`},
	{"syntax", "services: {a: [\n", `
p.yaml:2:1: while parsing a flow node: did not find expected node content`},
	{"tab", "services:\n\tt: {}\n", `
p.yaml:2:1: while scanning for the next token: found character that cannot start any token
  hint: indent with spaces, not with tabs`},
	{"value that begins with @", "services:\n  t: @x\n", `
p.yaml:2:6: while scanning for the next token: found character that cannot start any token
  hint: put a value that begins with @ in quotes`},
	{"value that begins with @ after other characters", "# Köln, Zürich\nservices:\n  t: {ä: @x}\n", `
p.yaml:3:10: while scanning for the next token: found character that cannot start any token
  hint: put a value that begins with @ in quotes`},
	{"escape", "services:\n  t: \"\\d\"\n", `
p.yaml:2:7: while scanning a quoted scalar: found unknown escape character
  hint: write \\ for a backslash, or use single quotes`},
	{"address without quotes of a host", "services:\n  t:\n    listeners:\n      - address: [2001:db8::1]:1790\n", `
p.yaml:4:31: while parsing a block mapping: did not find expected key
  hint: put an address that begins with [ in quotes, as in "[::]:1790"`},
	{"pattern without quotes", "services:\n  t: *.service\n", `
p.yaml:2:6: unknown anchor '.service' referenced
  hint: put a value that begins with * in quotes`},
	{"address without quotes", "services:\n  t:\n    listeners:\n      - address: [::]:1790\n", `
p.yaml:4:22: while parsing a block mapping: did not find expected key
  hint: put an address that begins with [ in quotes, as in "[::]:1790"`},
	{"address without quotes in braces", "services: {listeners: [{address: [::]:1790}]}\n", `
p.yaml:1:38: while parsing a flow mapping: did not find expected ',' or '}'
  hint: put an address that begins with [ in quotes, as in "[::]:1790"`},
	{"key in another column", "services:\n  t: 3\n u: 4\n", `
p.yaml:3:2: while parsing a block mapping: did not find expected key
  hint: begin all keys of a mapping in the same column`},
	{"key without a colon", "services:\n  t\n  u: 4\n", `
p.yaml:3:4: mapping values are not allowed in this context
  hint: write one key with its value in each line, and put a value with a colon and a space in quotes`},
	{"open list", "services: [a, b\n", `
p.yaml:2:1: while parsing a flow sequence: did not find expected ',' or ']'
  hint: close the list with ]`},
	{"open mapping", "services:\n  t: {slots: 2\n  u: 3\n", `
p.yaml:3:4: while parsing a flow mapping: did not find expected ',' or '}'
  hint: close the mapping with }`},
	{"open quotes", "services:\n  t: \"x\n  u: 4\n", `
p.yaml:4:1: while scanning a quoted scalar: found unexpected end of stream
  hint: close the quotes`},
	{"not UTF-8", "services:\n  t: \xff\n", `
p.yaml:2:6: invalid leading UTF-8 octet (value: 255)`},
	{"control character", "services: {}\n# \x01\n", `
p.yaml:2:3: control characters are not allowed (value: 1)`},
	{"several documents", `services: {}
---
services: {}
`, `
p.yaml:2:1: a second document begins here
  hint: a policy file is one document`},
	{"broken second document", `services: {}
---
a: [
`, `
p.yaml:4:1: while parsing a flow node: did not find expected node content`},
	{"depth", "services: [[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[", `
p.yaml:1:43: while increasing flow level: exceeded max depth of 32`},
	{"alias", `services: {}
metrics: &m {listen: '127.0.0.1:1'}
x: *m
`, `
p.yaml:2:10: metrics: anchors are not supported
p.yaml:3:1: x: unknown key
  hint: known keys: services, tune, trace, bigtcp, fleet, metrics, ui, events`},
	{"alias in use", minimal + `    user: &u a
    netns: *u
`, `
p.yaml:5:11: services.t.user: anchors are not supported
p.yaml:6:12: services.t.netns: aliases are not supported
  hint: write the value out`},
	{"alias as key", `services: {}
? &k metrics
: {listen: '127.0.0.1:1'}
`, `
p.yaml:2:3: anchors are not supported`},
	{"tag", minimal + "    user: !!str 5\n", `
p.yaml:5:11: services.t.user: tags are not supported`},
	{"merge key", minimal + "    <<: {slots: 3}\n", `
p.yaml:5:5: services.t: merge keys are not supported`},
	{"key that is a list", minimal + "    [a]: b\n", `
p.yaml:5:5: services.t: a key must be a string, is a list`},
	{"unknown key", minimal + "    sterring: lookup\n", `
p.yaml:5:5: services.t.sterring: unknown key
  hint: did you mean steering?`},
	{"unknown top-level key", `services: {}
colour: []
`, `
p.yaml:2:1: colour: unknown key
  hint: known keys: services, tune, trace, bigtcp, fleet, metrics, ui, events`},
	{"unknown key, long", `services: {}
kkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkk: 1
`, `
p.yaml:2:1: "kkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkk...": unknown key
  hint: known keys: services, tune, trace, bigtcp, fleet, metrics, ui, events`},
	{"duplicate key", minimal + "    slots: 5\n", `
p.yaml:5:5: services.t.slots: is given twice, first in line 3`},
	{"duplicate service", `services:
  t: {}
  t: {}
`, `
p.yaml:2:3: services.t.slots: is missing
p.yaml:2:3: services.t.listeners: is missing
p.yaml:3:3: services.t: is given twice, first in line 2`},
	{"missing keys", `services:
  t:
    listeners:
      - {}
`, `
p.yaml:2:3: services.t.slots: is missing
p.yaml:4:9: services.t.listeners[0].protocol: is missing
p.yaml:4:9: services.t.listeners[0].address: is missing`},
	{"none of services, tune, trace and bigtcp", "metrics: {listen: '127.0.0.1:1'}\n", `
p.yaml:1:1: must have services, tune, trace, bigtcp or fleet
  hint: services: {} is a policy that does nothing`},
	{"missing listen", `services: {}
metrics: {}
`, `
p.yaml:2:10: metrics: must have at least one key`},
	{"otlp", `services: {}
metrics: {otlp: {interval: 10ms, endpoint: 'collector:4318', ca: ''}}
`, `
p.yaml:2:28: metrics.otlp.interval: must be 1s to 1h, is "10ms"
p.yaml:2:44: metrics.otlp.endpoint: must be an http or https URL, is "collector:4318"
  hint: as in https://collector.example.net:4318/v1/metrics
p.yaml:2:66: metrics.otlp.ca: must not be empty`},
	{"otlp without an endpoint", `services: {}
metrics: {otlp: {interval: 10s}}
`, `
p.yaml:2:11: metrics.otlp.endpoint: is missing`},
	{"otlp with credentials", `services: {}
metrics: {otlp: {endpoint: 'https://user:secret@collector:4318'}}
`, `
p.yaml:2:28: metrics.otlp.endpoint: must not have a user or a password
  hint: put credentials into headers_file, as in Authorization: Basic ...`},
	{"otlp with a query", `services: {}
metrics: {otlp: {endpoint: 'http://[::1]:4318/v1/metrics?key=secret'}}
`, `
p.yaml:2:28: metrics.otlp.endpoint: must not have a query or a fragment
  hint: use headers_file`},
	{"otlp over another protocol", `services: {}
metrics: {otlp: {endpoint: 'grpc://collector:4317'}}
`, `
p.yaml:2:28: metrics.otlp.endpoint: must be an http or https URL, is "grpc://collector:4317"
  hint: as in https://collector.example.net:4318/v1/metrics`},
	{"service name", `services:
  Tele.metry: {slots: 0, listeners: [{protocol: tcp, address: '[::]:1'}]}
`, `
p.yaml:2:3: services."Tele.metry": is not a valid name
  hint: use 1 to 32 of a-z, 0-9, _ and -, the first of them a letter or a digit
p.yaml:2:23: services."Tele.metry".slots: must be 1 to 1024, is 0`},
	{"service empty", `services:
  t:
`, `
p.yaml:2:5: services.t: must be a mapping, is empty`},
	{"services a list", "services: [t]\n", `
p.yaml:1:11: services: must be a mapping, is a list`},
	{"listeners a mapping", "services: {t: {slots: 1, listeners: {protocol: tcp}}}\n", `
p.yaml:1:37: services.t.listeners: must be a list, is a mapping`},
	{"string for number", "services: {t: {slots: '4', listeners: [{protocol: tcp, address: '[::]:1'}]}}\n", `
p.yaml:1:23: services.t.slots: must be a decimal whole number, is "4"
  hint: write 4, without the quotes`},
	{"octal", "services: {t: {slots: 010, listeners: [{protocol: tcp, address: '[::]:1'}]}}\n", `
p.yaml:1:23: services.t.slots: must be a decimal whole number, is 010`},
	{"float", minimal + "    backlog: 1.5\n", `
p.yaml:5:14: services.t.backlog: must be a decimal whole number, is 1.5`},
	{"null for number", minimal + "    backlog:\n", `
p.yaml:5:13: services.t.backlog: must be a decimal whole number, is empty`},
	{"number for string", minimal + "    netns: 5\n", `
p.yaml:5:12: services.t.netns: must be a string, is 5
  hint: write "5", with the quotes`},
	{"boolean for string", minimal + "    device_map: true\n", `
p.yaml:5:17: services.t.device_map: must be a string, is true
  hint: write "true", with the quotes`},
	{"mapping for string", minimal + "    cgroup: {}\n", `
p.yaml:5:13: services.t.cgroup: must be a string, is a mapping`},
	{"empty string", minimal + "    device_map: ''\n", `
p.yaml:5:17: services.t.device_map: must not be empty`},
	{"control character in string", minimal + `    device_map: "a\0"
`, `
p.yaml:5:17: services.t.device_map: must not hold control characters, is "a\x00"`},
	{"slots", `services:
  telemetry:
    slots: 5000
    listeners: [{protocol: tcp, address: '[::]:1'}]
`, `
p.yaml:3:12: services.telemetry.slots: must be 1 to 1024, is 5000`},
	{"slots zero", "services: {t: {slots: 0, listeners: [{protocol: tcp, address: '[::]:1'}]}}\n", `
p.yaml:1:23: services.t.slots: must be 1 to 1024, is 0`},
	{"slots huge", "services: {t: {slots: 99999999999999999999, listeners: [{protocol: tcp, address: '[::]:1'}]}}\n", `
p.yaml:1:23: services.t.slots: must be 1 to 1024, is 99999999999999999999`},
	{"backlog", minimal + "    backlog: -1\n", `
p.yaml:5:14: services.t.backlog: must be 0 to 2147483647, is -1`},
	{"track_devices", minimal + "    track_devices: 1048577\n", `
p.yaml:5:20: services.t.track_devices: must be 0 to 1048576, is 1048577`},
	{"track_devices on", minimal + "    track_devices: on\n", `
p.yaml:5:20: services.t.track_devices: must be a decimal whole number, is "on"`},
	{"no listeners", "services: {t: {slots: 1, listeners: []}}\n", `
p.yaml:1:37: services.t.listeners: must have 1 to 16 items, has 0`},
	{"17 listeners", "services: {t: {slots: 1, listeners: [{protocol: tcp, address: '[::]:1'}, {protocol: tcp, address: '[::]:2'}, {protocol: tcp, address: '[::]:3'}, {protocol: tcp, address: '[::]:4'}, {protocol: tcp, address: '[::]:5'}, {protocol: tcp, address: '[::]:6'}, {protocol: tcp, address: '[::]:7'}, {protocol: tcp, address: '[::]:8'}, {protocol: tcp, address: '[::]:9'}, {protocol: tcp, address: '[::]:10'}, {protocol: tcp, address: '[::]:11'}, {protocol: tcp, address: '[::]:12'}, {protocol: tcp, address: '[::]:13'}, {protocol: tcp, address: '[::]:14'}, {protocol: tcp, address: '[::]:15'}, {protocol: tcp, address: '[::]:16'}, {protocol: tcp, address: '[::]:17'}]}}\n", `
p.yaml:1:37: services.t.listeners: must have 1 to 16 items, has 17`},
	{"protocol", "services: {t: {slots: 1, listeners: [{protocol: TCP, address: '[::]:1'}]}}\n", `
p.yaml:1:49: services.t.listeners[0].protocol: must be tcp or udp, is "TCP"
  hint: did you mean tcp?`},
	{"steering", minimal + "    steering: reusport\n", `
p.yaml:5:15: services.t.steering: must be reuseport or lookup, is "reusport"
  hint: did you mean reuseport?`},
	{"user", minimal + "    user: 'a:b'\n", `
p.yaml:5:11: services.t.user: is not a user's name or number: "a:b"`},
	{"user named twice", minimal + "    steering: lookup\n    user: [pmacct, nobody, pmacct]\n", `
p.yaml:6:28: services.t.user[2]: pmacct is already services.t.user[0], line 6`},
	{"uid", minimal + "    user: 4294967295\n", `
p.yaml:5:11: services.t.user: must be a name or a number of 0 to 4294967294, is 4294967295`},
	{"netns name", minimal + "    netns: telemetry\n", `
p.yaml:5:12: services.t.netns: must be an absolute path, is "telemetry"
  hint: a namespace made by ip netns is /run/netns/telemetry`},
	{"cgroup with the mount", minimal + "    cgroup: /sys/fs/cgroup/telemetry.slice\n", `
p.yaml:5:13: services.t.cgroup: must be relative to the cgroup v2 mount, is "/sys/fs/cgroup/telemetry.slice"
  hint: write /telemetry.slice`},
	{"cgroup upwards", minimal + "    cgroup: a/../../b\n", `
p.yaml:5:13: services.t.cgroup: must not hold .., is "a/../../b"`},
	{"when_empty", minimal + "    when_empty: standby\n", `
p.yaml:5:17: services.t.when_empty: must be reject, {standby: N} or {wait: 30s}, is "standby"`},
	{"slots_as of itself", minimal + "    slots_as: t\n", `
p.yaml:5:15: services.t.slots_as: is the service itself`},
	{"slots_as of none", minimal + "    slots_as: tt\n", `
p.yaml:5:15: services.t.slots_as: there is no service "tt"
  hint: did you mean t?`},
	{"slots_as of another number", sharing("slots: 5", "slots_as: a"), `
p.yaml:7:12: services.b.slots: is 5, service a has 4
  hint: services with the same slots have the same number of them`},
	{"slots_as with another device map", sharing("slots: 4", "slots_as: a\n    device_map: d.csv"), `
p.yaml:8:15: services.b.slots_as: service a has another device_map
  hint: give both the same`},
	{"slots_as with standby and adopt", sharing("slots: 4", "slots_as: a\n    when_empty: {standby: 1}\n    on_start: adopt"), `
p.yaml:9:17: services.b.when_empty: standby does not go with slots that two services share
  hint: a slot may be empty in one of them alone: use reject or wait
p.yaml:10:15: services.b.on_start: adopt does not go with slots that two services share
  hint: use reset`},
	{"slots_as of one that has it", sharing("slots: 4", "slots_as: c") + "  c:\n    slots: 4\n    slots_as: a\n    listeners: [{protocol: udp, address: \"[::]:3\"}]\n", `
p.yaml:8:15: services.b.slots_as: service c itself has the slots of a
  hint: name that one`},
	{"on_start", minimal + "    on_start: ignore\n", `
p.yaml:5:15: services.t.on_start: must be reset or adopt or report, is "ignore"`},
	{"when_empty list", minimal + "    when_empty: []\n", `
p.yaml:5:17: services.t.when_empty: must be reject, {standby: N} or {wait: 30s}, is a list`},
	{"when_empty without standby", minimal + "    when_empty: {}\n", `
p.yaml:5:17: services.t.when_empty: must be reject, {standby: N} or {wait: 30s}, is empty`},
	{"waiting room without wait", minimal + "    when_empty: {datagrams: 10}\n", `
p.yaml:5:17: services.t.when_empty.wait: is missing`},
	{"waiting room and standby", minimal + "    when_empty: {wait: 30s, standby: 1}\n", `
p.yaml:5:17: services.t.when_empty: has both standby and wait
  hint: choose one of them`},
	{"enumeration", minimal + "    templates: true\n", `
p.yaml:5:16: services.t.templates: must be keep or off, is true`},
	{"waiting room bounds", minimal + "    when_empty: {wait: 2h, datagrams: 0, bytes: 2GB}\n", `
p.yaml:5:24: services.t.when_empty.wait: must be 1s to 1h, is "2h"
p.yaml:5:39: services.t.when_empty.datagrams: must be 1 to 10000000, is 0
p.yaml:5:49: services.t.when_empty.bytes: must be 64KB to 1GB, is "2GB"`},
	{"when_empty key", minimal + "    when_empty: {stanby: 1}\n", `
p.yaml:5:18: services.t.when_empty.stanby: unknown key
  hint: did you mean standby?`},
	{"when_empty wait key", minimal + "    when_empty: {wiat: 30s}\n", `
p.yaml:5:18: services.t.when_empty.wiat: unknown key
  hint: did you mean wait?`},
	{"address name", `services:
  t:
    slots: 1
    listeners:
      - {protocol: tcp, address: 'localhost:1790'}
`, `
p.yaml:5:34: services.t.listeners[0].address: must be a literal IP:port, is "localhost:1790"
  hint: write 192.0.2.1:1790 or [2001:db8::1]:1790`},
	{"address without host", `services:
  t:
    slots: 1
    listeners:
      - {protocol: tcp, address: ':1790'}
`, `
p.yaml:5:34: services.t.listeners[0].address: must be a literal IP:port, is ":1790"
  hint: write [::]:1790 for all addresses`},
	{"address without port", `services:
  t:
    slots: 1
    listeners:
      - {protocol: tcp, address: '10.0.0.1'}
`, `
p.yaml:5:34: services.t.listeners[0].address: must be a literal IP:port, is "10.0.0.1"
  hint: write 192.0.2.1:1790 or [2001:db8::1]:1790`},
	{"address port zero", `services:
  t:
    slots: 1
    listeners:
      - {protocol: tcp, address: '10.0.0.1:0'}
`, `
p.yaml:5:34: services.t.listeners[0].address: must have a port of 1 to 65535, is "10.0.0.1:0"`},
	{"address port too large", `services:
  t:
    slots: 1
    listeners:
      - {protocol: tcp, address: '10.0.0.1:65536'}
`, `
p.yaml:5:34: services.t.listeners[0].address: must have a port of 1 to 65535, is "10.0.0.1:65536"`},
	{"address zone", `services:
  t:
    slots: 1
    listeners:
      - {protocol: tcp, address: '[fe80::1%eth0]:1790'}
`, `
p.yaml:5:34: services.t.listeners[0].address: must not be a link-local address, is "[fe80::1%eth0]:1790"
  hint: use [::]:1790`},
	{"address link-local", `services:
  t:
    slots: 1
    listeners:
      - {protocol: tcp, address: '[fe80::1]:1790'}
`, `
p.yaml:5:34: services.t.listeners[0].address: must not be a link-local address, is "[fe80::1]:1790"
  hint: use [::]:1790`},
	{"address mapped", `services:
  t:
    slots: 1
    listeners:
      - {protocol: tcp, address: '[::ffff:10.0.0.1]:1790'}
`, `
p.yaml:5:34: services.t.listeners[0].address: must not be an IPv4-mapped address, is "[::ffff:10.0.0.1]:1790"
  hint: write 10.0.0.1:1790`},
	{"address multicast", `services:
  t:
    slots: 1
    listeners:
      - {protocol: tcp, address: '239.0.0.1:4739'}
`, `
p.yaml:5:34: services.t.listeners[0].address: must not be a multicast address, is "239.0.0.1:4739"`},
	{"metrics address", `services: {}
metrics: {listen: ':9732'}
`, `
p.yaml:2:19: metrics.listen: must be a literal IP:port, is ":9732"
  hint: write [::]:9732 for all addresses`},
	{"web page", `services: {}
metrics: {listen: '127.0.0.1:9732'}
ui: {listen: '127.0.0.1:9732'}
`, `
p.yaml:3:14: ui.listen: is the address of metrics.listen
  hint: use another port`},
	{"web page for other hosts", `services: {}
ui: {listen: '[::]:9733'}
`, `
p.yaml:2:14: ui.listen: needs tls, because :: is not a loopback address
  hint: add tls: {cert: FILE, key: FILE}, or listen on 127.0.0.1
p.yaml:2:14: ui.listen: needs token_file or tls.client_ca, because :: is not a loopback address
  hint: add token_file: FILE with a token (openssl rand -hex 32), or listen on 127.0.0.1`},
	{"web page for everybody", `services: {}
ui: {listen: '192.0.2.1:9733', tls: {cert: c.pem, key: k.pem}}
`, `
p.yaml:2:14: ui.listen: needs token_file or tls.client_ca, because 192.0.2.1 is not a loopback address
  hint: add token_file: FILE with a token (openssl rand -hex 32), or listen on 127.0.0.1`},
	{"web page without a key", `services: {}
ui: {listen: '127.0.0.1:9733', tls: {cert: c.pem}}
`, `
p.yaml:2:32: ui.tls.key: is missing`},
	{"web page at a relative socket", `services: {}
ui: {listen: 'unix:ui.sock', tls: {cert: c.pem, key: k.pem}}
`, `
p.yaml:2:14: ui.listen: must have an absolute path after unix:, is "unix:ui.sock"
  hint: write unix:/run/sockeye/ui.sock`},
	{"web page at a socket with TLS", `services: {}
ui: {listen: 'unix:/run/ui.sock', tls: {cert: c.pem, key: k.pem}}
`, `
p.yaml:2:40: ui.tls: does not go with a Unix socket
  hint: let the proxy in front of the socket do TLS`},
	{"duplicate listener", `services:
  t:
    slots: 1
    listeners:
      - {protocol: tcp, address: '[::]:1790'}
      - {protocol: tcp, address: '[::]:1790'}
`, `
p.yaml:6:9: services.t.listeners[1]: tcp [::]:1790 is already services.t.listeners[0], line 5`},
	{"duplicate listener in another notation", `services:
  t:
    slots: 1
    listeners:
      - {protocol: tcp, address: '[fd00::1]:1790'}
      - {protocol: tcp, address: '[fd00:0::1]:1790'}
`, `
p.yaml:6:9: services.t.listeners[1]: tcp [fd00::1]:1790 is already services.t.listeners[0], line 5`},
	{"a listener of lookup before an address", `services:
  t:
    steering: lookup
    slots: 1
    listeners:
      - {protocol: tcp, address: '[::]:1790'}
  one:
    slots: 1
    listeners:
      - {protocol: tcp, address: '192.0.2.1:1790'}
`, `
p.yaml:10:9: services.one.listeners[0]: services.t.listeners[0] with steering: lookup takes the packets to tcp 192.0.2.1:1790
  hint: use steering: reuseport for both services, or addresses that do not overlap`},
	{"mixed any", `services:
  t:
    slots: 1
    listeners:
      - {protocol: tcp, address: '[::]:1790'}
      - {protocol: tcp, address: '0.0.0.0:1790'}
`, `
p.yaml:6:9: services.t.listeners[1]: 0.0.0.0:1790 does not go with [::]:1790 (services.t.listeners[0], line 5)
  hint: use only [::]:1790, which serves IPv4 too, or set its v6only`},
	{"v6only of one address", `services:
  t: {slots: 1, listeners: [{protocol: tcp, address: '[fd00::1]:1', v6only: true}]}
`, `
p.yaml:2:77: services.t.listeners[0].v6only: does not go with the address [fd00::1]:1
  hint: only [::] can serve IPv4 too`},
	{"v6only is not a word", `services:
  t: {slots: 1, listeners: [{protocol: tcp, address: '[::]:1', v6only: yes}]}
`, `
p.yaml:2:72: services.t.listeners[0].v6only: must be true or false, is "yes"`},
	{"listener of another service", `services:
  b: {slots: 1, listeners: [{protocol: tcp, address: '[::]:1'}]}
  a: {slots: 1, listeners: [{protocol: tcp, address: '[::]:1'}]}
`, `
p.yaml:3:29: services.a.listeners[0]: tcp [::]:1 is already services.b.listeners[0], line 2`},
	{"listener of another service, same netns", `services:
  b: {slots: 1, netns: /n, listeners: [{protocol: tcp, address: '[::]:1'}]}
  a: {slots: 1, netns: /n/, listeners: [{protocol: tcp, address: '[::]:1'}]}
`, `
p.yaml:3:41: services.a.listeners[0]: tcp [::]:1 is already services.b.listeners[0], line 2`},
	{"mixed any across services", `services:
  b: {slots: 1, listeners: [{protocol: tcp, address: '0.0.0.0:1'}]}
  a: {slots: 1, listeners: [{protocol: tcp, address: '[::]:1'}]}
`, `
p.yaml:3:29: services.a.listeners[0]: [::]:1 does not go with 0.0.0.0:1 (services.b.listeners[0], line 2)
  hint: use only [::]:1, which serves IPv4 too, or set its v6only`},
	{"standby", minimal + "    when_empty: {standby: 4}\n", `
p.yaml:5:27: services.t.when_empty.standby: must be 0 to 3, is 4
  hint: the service has 4 slots, counted from 0`},
	{"standby over the limit", minimal + "    when_empty: {standby: 1024}\n", `
p.yaml:5:27: services.t.when_empty.standby: must be 0 to 1023, is 1024`},
	{"member_ports with reuseport", "services: {t: {slots: 1, listeners: [{protocol: tcp, address: '[::]:1', member_ports: 5}]}}\n", `
p.yaml:1:87: services.t.listeners[0].member_ports: needs steering: lookup
  hint: with reuseport, members listen on the listener's own port`},
	{"member_ports reversed", `services:
  t:
    slots: 1
    steering: lookup
    listeners:
      - {protocol: tcp, address: '[::]:1', member_ports: 9-5}
`, `
p.yaml:6:58: services.t.listeners[0].member_ports: must be a port or a range of ports, is "9-5"
  hint: write 20000 or "20000-20003"`},
	{"member_ports zero", `services:
  t:
    slots: 1
    steering: lookup
    listeners:
      - {protocol: tcp, address: '[::]:1', member_ports: 0}
`, `
p.yaml:6:58: services.t.listeners[0].member_ports: must be a port or a range of ports, is 0
  hint: write 20000 or "20000-20003"`},
	{"member_ports too large", `services:
  t:
    slots: 1
    steering: lookup
    listeners:
      - {protocol: tcp, address: '[::]:1', member_ports: 65535-65536}
`, `
p.yaml:6:58: services.t.listeners[0].member_ports: must be a port or a range of ports, is "65535-65536"
  hint: write 20000 or "20000-20003"`},
	{"member_ports word", `services:
  t:
    slots: 1
    steering: lookup
    listeners:
      - {protocol: tcp, address: '[::]:1', member_ports: all}
`, `
p.yaml:6:58: services.t.listeners[0].member_ports: must be a port or a range of ports, is "all"
  hint: write 20000 or "20000-20003"`},
	{"member_ports list", `services:
  t:
    slots: 1
    steering: lookup
    listeners:
      - {protocol: tcp, address: '[::]:1', member_ports: [1]}
`, `
p.yaml:6:58: services.t.listeners[0].member_ports: must be a port or a range of ports, is a list
  hint: write 20000 or "20000-20003"`},
	{"member_ports overlap", `services:
  t:
    slots: 1
    steering: lookup
    listeners:
      - {protocol: tcp, address: '[::]:1', member_ports: 20000-20003}
      - {protocol: tcp, address: '[::]:2', member_ports: 20003}
`, `
p.yaml:7:58: services.t.listeners[1].member_ports: members' tcp port 20003 overlaps 20000-20003 of listeners[0]`},
	{"member_ports overlap of an own port", `services:
  t:
    slots: 1
    steering: lookup
    listeners:
      - {protocol: tcp, address: '[::]:1', member_ports: 2}
      - {protocol: tcp, address: '[::]:2'}
`, `
p.yaml:7:34: services.t.listeners[1].address: members' tcp port 2 overlaps 2 of listeners[0]`},
	{"members: no match", minimal + `    members:
      - {slot: free}
`, `
p.yaml:6:9: services.t.members[0].match: is missing`},
	{"members: empty match", minimal + `    members:
      - {match: {}, slot: free}
`, `
p.yaml:6:17: services.t.members[0].match: must have at least one key`},
	{"members: no slot", minimal + `    members:
      - {match: {user: a}}
`, `
p.yaml:6:9: services.t.members[0].slot: is missing`},
	{"members: unknown key", minimal + `    members:
      - {match: {exe: /x}, slot: free}
`, `
p.yaml:6:18: services.t.members[0].match.exe: unknown key
  hint: known keys: systemd_unit, cgroup, executable, command_line, user`},
	{"members: slot word", minimal + `    members:
      - {match: {user: a}, slot: fre}
`, `
p.yaml:6:34: services.t.members[0].slot: must be instance, group, environment, free or a number, is "fre"
  hint: did you mean free?`},
	{"members: slot in quotes", minimal + `    members:
      - {match: {user: a}, slot: '1'}
`, `
p.yaml:6:34: services.t.members[0].slot: must be instance, group, environment, free or a number, is "1"
  hint: write 1, without the quotes`},
	{"members: slot out of range", minimal + `    members:
      - {match: {user: a}, slot: 4}
`, `
p.yaml:6:34: services.t.members[0].slot: must be 0 to 3, is 4
  hint: the service has 4 slots, counted from 0`},
	{"members: slot negative", minimal + `    members:
      - {match: {user: a}, slot: -1}
`, `
p.yaml:6:34: services.t.members[0].slot: must be 0 to 1023, is -1`},
	{"members: same slot", minimal + `    members:
      - {match: {user: a}, slot: 1}
      - {match: {user: a}, slot: 1}
`, `
p.yaml:7:34: services.t.members[1].slot: slot 1 is already that of members[0]
  hint: a slot has one member`},
	{"members: instance without unit", minimal + `    members:
      - {match: {user: a}, slot: instance}
`, `
p.yaml:6:34: services.t.members[0].slot: instance needs a match.systemd_unit with @
  hint: as in nfacctd@*.service`},
	{"members: instance without @", minimal + `    members:
      - {match: {systemd_unit: nfacctd.service, user: a}, slot: instance}
`, `
p.yaml:6:65: services.t.members[0].slot: instance needs a match.systemd_unit with @
  hint: as in nfacctd@*.service`},
	{"members: group without command_line", minimal + `    members:
      - {match: {user: a}, slot: group}
`, `
p.yaml:6:34: services.t.members[0].slot: group needs a match.command_line with a group
  hint: as in 'nfacctd -f \S+-(\d+)\.conf'`},
	{"members: group without group", minimal + `    members:
      - {match: {command_line: 'a(?:b)', user: a}, slot: group}
`, `
p.yaml:6:58: services.t.members[0].slot: group needs a match.command_line with a group
  hint: as in 'nfacctd -f \S+-(\d+)\.conf'`},
	{"members: no user", minimal + `    members:
      - {match: {command_line: nfacctd}, slot: free}
      - {match: {user: pmacct}, slot: free}
      - {match: {executable: /usr/sbin/nfacctd, cgroup: /telemetry.slice}, slot: 1}
      - {match: {systemd_unit: "nfacctd@*.service"}, slot: instance}
`, `
p.yaml:6:17: services.t.members[0].match: any user could start a matching process and take a slot
  hint: add the user of the members to the service, as in user: pmacct
p.yaml:8:17: services.t.members[2].match: any user could start a matching process and take a slot
  hint: add the user of the members to the service, as in user: pmacct
p.yaml:9:17: services.t.members[3].match: any user could start a matching process and take a slot
  hint: add the user of the members to the service, as in user: pmacct`},
	{"members: user misspelt", minimal + `    users: pmacct
    members: [{match: {command_line: nfacctd}, slot: free}]
`, `
p.yaml:5:5: services.t.users: unknown key
  hint: did you mean user?`},
	{"required key misspelt", "services:\n  t:\n    slotz: 4\n    user: root\n    listeners: [{protocol: tcp, address: \"[::]:1790\"}]\n", `
p.yaml:3:5: services.t.slotz: unknown key
  hint: did you mean slots?`},
	{"members: no user, lookup", minimal + `    steering: lookup
    members: [{match: {command_line: nfacctd}, slot: free}]
`, `
p.yaml:6:23: services.t.members[0].match: any user could start a matching process and take a slot
  hint: add the user of the members to the service, as in user: pmacct`},
	{"members: several users", minimal + `    members:
      - {match: {user: a}, slot: free}
      - {match: {user: b}, slot: free}
`, `
p.yaml:7:24: services.t.members[1].match.user: must be a, as in the rules before it
  hint: sockets that share a port must belong to one user; steering: lookup supports several`},
	{"several users", minimal + "    user: [a, b]\n", `
p.yaml:5:11: services.t.user: must be one user with steering: reuseport, is a list
  hint: sockets that share a port must belong to one user; steering: lookup supports several`},
	{"no users", minimal + "    user: []\n", `
p.yaml:5:11: services.t.user: must have 1 to 16 items, has 0`},
	{"17 users", minimal + "    steering: lookup\n    user: [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]\n", `
p.yaml:6:11: services.t.user: must have 1 to 16 items, has 17`},
	{"users that are none", minimal + "    steering: lookup\n    user: [a/b, '', -1, {a: b}, &x a]\n", `
p.yaml:6:12: services.t.user[0]: is not a user's name or number: "a/b"
p.yaml:6:17: services.t.user[1]: must not be empty
p.yaml:6:21: services.t.user[2]: must be a name or a number of 0 to 4294967294, is -1
p.yaml:6:25: services.t.user[3]: must be a string, is a mapping
p.yaml:6:33: services.t.user[4]: anchors are not supported`},
	{"namespaces", minimal + "    members: [{match: {user: a}, slot: 0, namespaces: own}]\n", `
p.yaml:5:55: services.t.members[0].namespaces: must be host or any, is "own"`},
	{"members: bad glob", minimal + `    members:
      - {match: {systemd_unit: 'a[@'}, slot: instance}
`, `
p.yaml:6:32: services.t.members[0].match.systemd_unit: is not a valid glob: "a[@"
  hint: *, ?, [a-z] and \ have a meaning; [ needs a ]`},
	{"members: bad cgroup glob", minimal + `    members:
      - {match: {cgroup: '[]a'}, slot: free}
`, `
p.yaml:6:26: services.t.members[0].match.cgroup: is not a valid glob: "/[]a"
  hint: *, ?, [a-z] and \ have a meaning; [ needs a ]`},
	{"members: relative executable", minimal + `    members:
      - {match: {executable: nfacctd}, slot: free}
`, `
p.yaml:6:30: services.t.members[0].match.executable: must start with /, is "nfacctd"
  hint: the glob is held against the absolute path`},
	{"members: bad executable glob", minimal + `    members:
      - {match: {executable: '/a['}, slot: free}
`, `
p.yaml:6:30: services.t.members[0].match.executable: is not a valid glob: "/a["
  hint: *, ?, [a-z] and \ have a meaning; [ needs a ]`},
	{"members: bad pattern", minimal + `    members:
      - {match: {command_line: '(a'}, slot: group}
`, "p.yaml:6:32: services.t.members[0].match.command_line: is not an RE2 pattern: missing closing ): `(a`"},
	{"all errors, in order", `metrics: {port: 1}
services:
  t:
    slots: 5000
    listeners:
      - {protocol: tpc, address: '[::]:99999'}
      - {protocol: udp, address: '[::]:1', member_ports: 7}
    when_empty: {standby: 2000}
    members:
      - {match: {user: a}, slot: 1023}
      - {match: {user: a}, slot: instance}
`, `
p.yaml:1:11: metrics.port: unknown key
  hint: known keys: listen, otlp
p.yaml:4:12: services.t.slots: must be 1 to 1024, is 5000
p.yaml:6:20: services.t.listeners[0].protocol: must be tcp or udp, is "tpc"
  hint: did you mean tcp?
p.yaml:6:34: services.t.listeners[0].address: must have a port of 1 to 65535, is "[::]:99999"
p.yaml:7:58: services.t.listeners[1].member_ports: needs steering: lookup
  hint: with reuseport, members listen on the listener's own port
p.yaml:8:27: services.t.when_empty.standby: must be 0 to 1023, is 2000
p.yaml:11:34: services.t.members[1].slot: instance needs a match.systemd_unit with @
  hint: as in nfacctd@*.service`},
}

// sharing returns a policy of two services; service b has these lines.
func sharing(slots, more string) string {
	return "services:\n  a:\n    slots: 4\n    listeners: [{protocol: tcp, address: \"[::]:1\"}]\n    # and\n  b:\n    " + slots + "\n    " + more +
		"\n    listeners: [{protocol: udp, address: \"[::]:2\"}]\n"
}
