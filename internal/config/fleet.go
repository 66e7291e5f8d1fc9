// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v4"
)

// Fleet is this host as one of several hosts that share the devices of their services.
type Fleet struct {
	// Name is that of the fleet, the same on all hosts.
	Name string `yaml:"name" form:"name" default:"main" doc:"The name of the fleet; its hosts share the keys sockeye/NAME/ and sockeye/NAME.templates/ of etcd."`
	// Host is the name of this host, or "" for its host name.
	Host   string `yaml:"host" form:"fleet_host" doc:"The name of this host in the fleet; its host name by default."`
	Weight int    `yaml:"weight" min:"1" max:"1000" default:"100" doc:"The share of this host relative to the weights of the others. The command sockeye host set overrides the value."`
	// Interfaces are names of Ethernet interfaces in the agent's network namespace.
	Interfaces []string `yaml:"interfaces" required:"true" form:"fleet_interfaces" doc:"The Ethernet interfaces on which packets to the services arrive; a VLAN, bond or bridge by its own name. The other hosts of the fleet are on the link of one of them, or are reached by routes."`
	// Addresses are neither IPv4-mapped nor zoned.
	Addresses []netip.Addr `yaml:"addresses" required:"true" form:"fleet_addresses" doc:"The addresses of the services, the same on all hosts, which all of them announce. Packets to other addresses of the host are not touched."`
	// Etcd is nil with File.
	Etcd *FleetEtcd `yaml:"etcd" doc:"The etcd cluster in which the hosts find each other and the table."`
	// File is an absolute path, or "" with Etcd.
	File     string `yaml:"file" form:"file" doc:"Instead of etcd: a file with the hosts and the epoch, deployed to all hosts; relative to the policy file."`
	MinHosts int    `yaml:"min_hosts" min:"1" max:"4096" default:"1" doc:"The number of living hosts without which no first table is made, and no device moves, also not from a dead host."`
	// Settle is in microseconds.
	Settle int64 `yaml:"settle" form:"fleet_settle" default:"10s" doc:"The time for which a host must be alive before it gets devices, 100ms to 1h."`
	// OnHostDeath is the treatment of the devices of a host that has died.
	OnHostDeath OnHostDeath `yaml:"on_host_death" enum:"next,wait" default:"next" doc:"next: the devices of a host that does not renew its lease move to the other hosts. wait: they wait for their host, or for sockeye host set NAME drain or removed."`
}

// OnHostDeath is the treatment of the devices of a host that has died.
type OnHostDeath string

const (
	// NextHost moves them to the other hosts; it is the default.
	NextHost OnHostDeath = "next"
	// WaitForHost leaves them where they are.
	WaitForHost OnHostDeath = "wait"
)

// FleetEtcd is an etcd cluster.
type FleetEtcd struct {
	// Endpoints are URLs with host and port.
	Endpoints []string `yaml:"endpoints" required:"true" form:"fleet_endpoints" doc:"The servers, as in https://etcd1.example.net:2379."`
	// CA, Cert, Key and PasswordFile are absolute paths, or "" for none.
	CA           string `yaml:"ca" form:"file" doc:"File with the certificates, in PEM, of the authorities that may sign the certificates of the servers; those of the host by default; relative to the policy file."`
	Cert         string `yaml:"cert" form:"file" doc:"The certificate of this host, in PEM; relative to the policy file."`
	Key          string `yaml:"key" form:"file" doc:"The key of the certificate, in PEM; relative to the policy file."`
	User         string `yaml:"user" form:"service" doc:"The user of etcd; none by default."`
	PasswordFile string `yaml:"password_file" form:"file" doc:"File with the password of the user, which only its owner may read; relative to the policy file."`
}

// Limits of a fleet.
const (
	maxFleetInterfaces = 16
	maxFleetAddresses  = 16
	maxEndpoints       = 16
	maxFleetHost       = 253
)

// fleetFormOf returns the forms of the key fleet.
func fleetFormOf(name string) form {
	switch name {
	case "fleet_host":
		return form{schema{Type: "string", MinLength: 1}, textForm(parseFleetHost)}
	case "fleet_interfaces":
		return textListForm(maxFleetInterfaces, func(s string) (string, string, string) {
			if _, message, hint := parseInterface(s); message != "" {
				return "", message, hint
			}
			if !(BigTCPRule{Interface: s}).Named() {
				return "", "must be the name of one interface, is " + strconv.Quote(s), ""
			}
			return s, "", ""
		})
	case "fleet_addresses":
		return textListForm(maxFleetAddresses, parseFleetAddress)
	case "fleet_endpoints":
		return textListForm(maxEndpoints, parseEndpoint)
	case "fleet_settle":
		return form{valueSchema(fleetSettle), quantityForm(fleetSettle)}
	}
	panic("config: unknown form " + name)
}

// textListForm is the form of a list of different texts. parse returns the value, or a message and a hint.
func textListForm[T comparable](most int, parse func(string) (value T, message, hint string)) form {
	one := schema{Type: "string", MinLength: 1}
	return form{schema{Type: "array", Items: &one, MinItems: 1, MaxItems: most}, func(d *decoder, path string, n *yaml.Node, _ reflect.StructTag) any {
		if n.Kind != yaml.SequenceNode {
			d.refuse(path, positionOf(n), "must be a list, is "+describe(n), "write ["+n.Value+"]")
			return nil
		}
		if len(n.Content) == 0 || len(n.Content) > most {
			d.refuse(path, positionOf(n), fmt.Sprintf("must have 1 to %d items, has %d", most, len(n.Content)), "")
			return nil
		}
		var values []T
		d.each(path, n, func(path string, n *yaml.Node) {
			s, ok := d.text(path, n)
			if !ok {
				return
			}
			value, message, hint := parse(s)
			switch {
			case message != "":
				d.refuse(path, positionOf(n), message, hint)
			case slices.Contains(values, value):
				d.refuse(path, positionOf(n), fmt.Sprintf("%v is given twice", value), "")
			default:
				values = append(values, value)
			}
		})
		return values
	}}
}

func parseFleetHost(s string) (any, string, string) {
	if len(s) > maxFleetHost || strings.ContainsFunc(s, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && !strings.ContainsRune("-._", r)
	}) {
		return nil, "is not a valid name of a host: " + quoteShort(s), "letters, digits, dots, dashes and underscores"
	}
	return s, "", ""
}

func parseFleetAddress(s string) (a netip.Addr, message, hint string) {
	a, err := netip.ParseAddr(s)
	switch {
	case err != nil:
		if prefix, err := netip.ParsePrefix(s); err == nil {
			hint = "write " + prefix.Addr().String()
		}
		return a, "must be an IP address, is " + strconv.Quote(s), hint
	case a.Is4In6():
		return a, "must not be an IPv4-mapped address, is " + strconv.Quote(s), "write " + a.Unmap().String()
	case a.Zone() != "" || a.IsUnspecified() || a.IsMulticast() || a.IsLoopback() || a.IsLinkLocalUnicast():
		return a, "must be an address that routers can reach, is " + strconv.Quote(s), ""
	}
	return a, "", ""
}

func parseEndpoint(s string) (endpoint, message, hint string) {
	const form = "as in https://etcd1.example.net:2379"
	rest, secure := strings.CutPrefix(s, "https://")
	if !secure {
		rest = strings.TrimPrefix(s, "http://")
	}
	if rest == s {
		return "", "must be an http or https URL, is " + strconv.Quote(s), form
	}
	host, port, ok := strings.Cut(strings.TrimSuffix(rest, "/"), ":")
	if bracket := strings.LastIndex(rest, "]:"); bracket > 0 { // IPv6
		host, port, ok = rest[:bracket+1], strings.TrimSuffix(rest[bracket+2:], "/"), true
	}
	if n, err := strconv.ParseUint(port, 10, 16); !ok || err != nil || n == 0 || host == "" || strings.ContainsAny(host, "/@?# ") {
		return "", "must be a URL with host and port, is " + strconv.Quote(s), form
	}
	return strings.TrimSuffix(s, "/"), "", ""
}

// checkFleet refuses a fleet without a store, and services that do not fit together.
func (d *decoder) checkFleet(p *Policy) {
	f := p.Fleet
	if f == nil {
		return
	}
	etcd, file := d.given("fleet.etcd"), d.given("fleet.file")
	switch {
	case etcd && file:
		d.refuseAt("fleet.file", "does not go with etcd", "choose one of them")
	case !etcd && !file:
		d.refuseAt("fleet", "must have etcd or file", "etcd: {endpoints: [https://etcd1.example.net:2379]}")
	}
	if e := f.Etcd; e != nil {
		tls := slices.ContainsFunc(e.Endpoints, func(s string) bool { return strings.HasPrefix(s, "https:") })
		plain := slices.ContainsFunc(e.Endpoints, func(s string) bool { return strings.HasPrefix(s, "http:") })
		if tls && plain { // the client of etcd takes the scheme of the first one for all
			d.refuseAt("fleet.etcd.endpoints", "must all have https, or all http", "")
		}
		for key, value := range map[string]string{"ca": e.CA, "cert": e.Cert, "key": e.Key} {
			if value != "" && len(e.Endpoints) > 0 && !tls {
				d.refuseAt("fleet.etcd."+key, "needs endpoints with https", "")
			}
		}
		if (e.Cert == "") != (e.Key == "") && !d.bad["fleet.etcd.cert"] && !d.bad["fleet.etcd.key"] {
			d.refuseAt("fleet.etcd", "must have both cert and key, or none", "")
		}
		if (e.User == "") != (e.PasswordFile == "") && !d.bad["fleet.etcd.user"] && !d.bad["fleet.etcd.password_file"] {
			d.refuseAt("fleet.etcd", "must have both user and password_file, or none", "")
		}
	}
	first := -1
	for i, s := range p.Services {
		if !f.Serves(&s) {
			continue
		}
		path := join("services", s.Name)
		switch {
		case s.Netns != "":
			d.refuseAt(path+".netns", "does not go with the addresses of the fleet", "the interfaces of the fleet are in the agent's network namespace")
		case first >= 0 && p.Services[first].DeviceMap != s.DeviceMap:
			d.refuseAt(path, fmt.Sprintf("has another device_map than service %s of the fleet", p.Services[first].Name), "all services of a fleet have the same: a device has one host")
		case first < 0:
			first = i
		}
	}
	if first < 0 && len(p.Services) > 0 && len(f.Addresses) > 0 {
		d.refuseAt("fleet.addresses", "no service listens on them", "a listener on [::] serves all addresses")
	}
}

// Serves reports whether a listener of a service has an address of the fleet.
func (f *Fleet) Serves(s *Service) bool {
	return slices.ContainsFunc(s.Listeners, func(l Listener) bool { return len(f.Served(l)) > 0 })
}

// Served returns the addresses of the fleet at which a listener receives packets.
func (f *Fleet) Served(l Listener) (served []netip.Addr) {
	at := l.Address.Addr()
	for _, a := range f.Addresses {
		if a == at || at.IsUnspecified() && (a.Is4() == at.Is4() || at.Is6() && !l.V6Only) {
			served = append(served, a)
		}
	}
	return served
}
