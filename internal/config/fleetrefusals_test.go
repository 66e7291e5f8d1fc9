// SPDX-License-Identifier: Apache-2.0

package config

import (
	"net/netip"
	"reflect"
	"testing"
)

// fleetDoc returns a policy with keys of a fleet.
func fleetDoc(keys string) string { return "services: {}\nfleet:\n  {" + keys + "}\n" }

const fleetMinimal = "interfaces: [eth0], addresses: [192.0.2.53], file: hosts.yaml"

// fleetRefusals has every reason to refuse a fleet, with the exact message.
var fleetRefusals = []struct{ name, doc, want string }{
	{"fleet: nothing given", fleetDoc(""), `
p.yaml:2:1: fleet.interfaces: is missing
p.yaml:2:1: fleet.addresses: is missing
p.yaml:3:3: fleet: must have etcd or file
  hint: etcd: {endpoints: [https://etcd1.example.net:2379]}`},
	{"fleet: two stores", fleetDoc(fleetMinimal + ", etcd: {endpoints: ['http://a:1']}"), `
p.yaml:3:55: fleet.file: does not go with etcd
  hint: choose one of them`},
	{"fleet: one interface", fleetDoc("interfaces: eth0, addresses: [192.0.2.53], file: a"), `
p.yaml:3:16: fleet.interfaces: must be a list, is "eth0"
  hint: write [eth0]`},
	{"fleet: no interface", fleetDoc("interfaces: [], addresses: [192.0.2.53], file: a"), `
p.yaml:3:16: fleet.interfaces: must have 1 to 16 items, has 0`},
	{"fleet: a glob", fleetDoc("interfaces: ['eth*'], addresses: [192.0.2.53], file: a"), `
p.yaml:3:17: fleet.interfaces[0]: must be the name of one interface, is "eth*"`},
	{"fleet: not an interface", fleetDoc("interfaces: [a/b], addresses: [192.0.2.53], file: a"), `
p.yaml:3:17: fleet.interfaces[0]: is not an interface name: "a/b"
  hint: one name, or a glob with *, ? or [a-z]`},
	{"fleet: twice", fleetDoc("interfaces: [a, a], addresses: [192.0.2.53, 192.0.2.53], file: a"), `
p.yaml:3:20: fleet.interfaces[1]: a is given twice
p.yaml:3:48: fleet.addresses[1]: 192.0.2.53 is given twice`},
	{"fleet: addresses", fleetDoc("interfaces: [a], addresses: [192.0.2.0/24, x, '::ffff:192.0.2.1', '::', 'fe80::1', 127.0.0.1], file: a"), `
p.yaml:3:33: fleet.addresses[0]: must be an IP address, is "192.0.2.0/24"
  hint: write 192.0.2.0
p.yaml:3:47: fleet.addresses[1]: must be an IP address, is "x"
p.yaml:3:50: fleet.addresses[2]: must not be an IPv4-mapped address, is "::ffff:192.0.2.1"
  hint: write 192.0.2.1
p.yaml:3:70: fleet.addresses[3]: must be an address that routers can reach, is "::"
p.yaml:3:76: fleet.addresses[4]: must be an address that routers can reach, is "fe80::1"
p.yaml:3:87: fleet.addresses[5]: must be an address that routers can reach, is "127.0.0.1"`},
	{"fleet: endpoints", fleetDoc("interfaces: [a], addresses: [192.0.2.53], etcd: {endpoints: ['a:1', 'http://a', 'https://a:0', 'https://a:1/x', 'https://[::1]:1']}"), `
p.yaml:3:65: fleet.etcd.endpoints[0]: must be an http or https URL, is "a:1"
  hint: as in https://etcd1.example.net:2379
p.yaml:3:72: fleet.etcd.endpoints[1]: must be a URL with host and port, is "http://a"
  hint: as in https://etcd1.example.net:2379
p.yaml:3:84: fleet.etcd.endpoints[2]: must be a URL with host and port, is "https://a:0"
  hint: as in https://etcd1.example.net:2379
p.yaml:3:99: fleet.etcd.endpoints[3]: must be a URL with host and port, is "https://a:1/x"
  hint: as in https://etcd1.example.net:2379`},
	{"fleet: half of the credentials", fleetDoc("interfaces: [a], addresses: [192.0.2.53], etcd: {endpoints: ['https://a:1'], cert: c, user: u}"), `
p.yaml:3:52: fleet.etcd: must have both cert and key, or none
p.yaml:3:52: fleet.etcd: must have both user and password_file, or none`},
	{"fleet: endpoints with and without TLS", fleetDoc("interfaces: [a], addresses: [192.0.2.53], etcd: {endpoints: ['http://a:1', 'https://b:1']}"), `
p.yaml:3:64: fleet.etcd.endpoints: must all have https, or all http`},
	{"fleet: certificate without TLS", fleetDoc("interfaces: [a], addresses: [192.0.2.53], etcd: {endpoints: ['http://a:1'], ca: c}"), `
p.yaml:3:84: fleet.etcd.ca: needs endpoints with https`},
	{"fleet: numbers and words", fleetDoc(fleetMinimal + ", host: a b, weight: 1001, min_hosts: 0, settle: 2h, on_host_death: wiat, name: A"), `
p.yaml:3:73: fleet.host: is not a valid name of a host: "a b"
  hint: letters, digits, dots, dashes and underscores
p.yaml:3:86: fleet.weight: must be 1 to 1000, is 1001
p.yaml:3:103: fleet.min_hosts: must be 1 to 4096, is 0
p.yaml:3:114: fleet.settle: must be 100ms to 1h, is "2h"
p.yaml:3:133: fleet.on_host_death: must be next or wait, is "wiat"
  hint: did you mean wait?
p.yaml:3:145: fleet.name: is not a valid name
  hint: use 1 to 32 of a-z, 0-9, _ and -, the first of them a letter or a digit`},
	{"fleet: services do not fit", `services:
  a: {slots: 1, user: x, device_map: a.csv, listeners: [{protocol: tcp, address: "[::]:1"}]}
  b: {slots: 1, user: x, device_map: b.csv, listeners: [{protocol: udp, address: "192.0.2.53:2"}]}
  c: {slots: 1, user: x, netns: /run/netns/x, listeners: [{protocol: udp, address: "0.0.0.0:3"}]}
  d: {slots: 1, user: x, device_map: c.csv, listeners: [{protocol: udp, address: "192.0.2.1:4"}]}
fleet: {` + fleetMinimal + `}
`, `
p.yaml:3:6: services.b: has another device_map than service a of the fleet
  hint: all services of a fleet have the same: a device has one host
p.yaml:4:33: services.c.netns: does not go with the addresses of the fleet
  hint: the interfaces of the fleet are in the agent's network namespace`},
	{"fleet: no service", `services:
  a: {slots: 1, user: x, listeners: [{protocol: tcp, address: "192.0.2.1:1"}, {protocol: tcp, address: "[::]:1", v6only: true}]}
fleet: {` + fleetMinimal + `}
`, `
p.yaml:3:40: fleet.addresses: no service listens on them
  hint: a listener on [::] serves all addresses`},
}

// TestFleet checks the values and the defaults of a fleet.
func TestFleet(t *testing.T) {
	p, err := Parse([]byte(`services:
  a: {slots: 1, user: x, listeners: [{protocol: tcp, address: "[::]:1"}, {protocol: udp, address: "0.0.0.0:2"}, {protocol: udp, address: "[::]:2", v6only: true}]}
fleet:
  interfaces: [eth0, eth1.100]
  addresses: [192.0.2.53, "2001:DB8::53"]
  etcd: {endpoints: ["https://a.example.net:2379/", "https://[2001:db8::1]:2379"], ca: ca.pem, cert: c.pem, key: /k.pem, user: sockeye, password_file: p}
`), "/etc/sockeye/policy.yaml")
	if err != nil {
		t.Fatal(err)
	}
	v4, v6 := netip.MustParseAddr("192.0.2.53"), netip.MustParseAddr("2001:db8::53")
	want := &Fleet{Name: "main", Weight: 100, Interfaces: []string{"eth0", "eth1.100"}, Addresses: []netip.Addr{v4, v6}, MinHosts: 1, Settle: 10_000_000, OnHostDeath: NextHost,
		Etcd: &FleetEtcd{Endpoints: []string{"https://a.example.net:2379", "https://[2001:db8::1]:2379"}, CA: "/etc/sockeye/ca.pem", Cert: "/etc/sockeye/c.pem", Key: "/k.pem", User: "sockeye", PasswordFile: "/etc/sockeye/p"}}
	if !reflect.DeepEqual(p.Fleet, want) {
		t.Errorf("got %+v\n%+v", p.Fleet, p.Fleet.Etcd)
	}
	for i, served := range [][]netip.Addr{{v4, v6}, {v4}, {v6}} {
		if got := p.Fleet.Served(p.Services[0].Listeners[i]); !reflect.DeepEqual(got, served) {
			t.Errorf("%v serves %v, want %v", p.Services[0].Listeners[i], got, served)
		}
	}
}
