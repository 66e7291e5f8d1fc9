// SPDX-License-Identifier: Apache-2.0

// Package config reads the policy file: YAML 1.2 in, validated plain structs or
// a list of errors with line and column out.
//
// The structs carry all that the decoder and the JSON Schema need, in tags:
// yaml (the key), doc, required, default (as the file would give it), min and max
// (of a number, or the length of a list or mapping), enum, keyed (a mapping decoded
// into a slice sorted by Name) and form (a value with a notation of its own, see
// forms.go, tuneforms.go, traceforms.go and bigtcpcheck.go).
package config

import (
	"fmt"
	"net/netip"
	"regexp"
)

// Policy is a whole policy file, with the defaults filled in. It has at least one
// of services, tune, trace and bigtcp.
type Policy struct {
	// Services are sorted by name.
	Services []Service `yaml:"services" keyed:"true" doc:"Services by name."`
	// Tune is in the order of the file.
	Tune []TuneRule `yaml:"tune" min:"0" max:"256" doc:"TCP parameters of connections, by rules. Of the rules of one cgroup the first that matches decides."`
	// Trace is in the order of the file.
	Trace []TraceRule `yaml:"trace" min:"0" max:"64" doc:"Where messages spend their time, by rules. Of the rules of one cgroup the first that matches decides."`
	// BigTCP is in the order of the file.
	BigTCP  []BigTCPRule `yaml:"bigtcp" min:"0" max:"64" doc:"How large the packets of interfaces may be inside the host (BIG TCP), by rules. Of the rules of one network namespace the first that matches an interface decides."`
	Metrics Metrics      `yaml:"metrics" doc:"The metrics endpoint. There is none unless it is given."`

	file   string              `yaml:"-"`
	places map[string]position `yaml:"-"` // of values, by path
}

// Flaw is an error about the value at a path, as in services.telemetry.user: for who finds that the host
// lacks what the value names.
func (p *Policy) Flaw(path, message, hint string) *Error {
	at := p.places[path]
	return &Error{p.file, at.line, at.column, path, message, hint}
}

// Metrics is the HTTP endpoint for metrics.
type Metrics struct {
	// Listen is a literal IP:port, or "" for no endpoint.
	Listen string `yaml:"listen" required:"true" form:"endpoint" doc:"The address of the metrics endpoint."`
}

// Service is a set of listeners that share slots.
type Service struct {
	Name  string `yaml:"-"`
	Slots int    `yaml:"slots" required:"true" min:"1" max:"1024" doc:"The number of slots; each takes one member."`
	// SlotsAs is another service of the policy, with the same slots and device map, or "".
	SlotsAs   string     `yaml:"slots_as" form:"service" doc:"Another service whose slots this one has: every device gets the same slot number in both, so that a slot is one process of each, as a BMP daemon and an IPFIX collector. Both need the same slots and device_map, when_empty: reject, and no on_start: adopt."`
	Listeners []Listener `yaml:"listeners" required:"true" min:"1" max:"16" doc:"What the service listens on. A slot is ready only while its member listens on all of them."`
	Steering  Steering   `yaml:"steering" enum:"reuseport,lookup" default:"reuseport" doc:"reuseport: members share the listener's port by SO_REUSEPORT. lookup: members need no SO_REUSEPORT and may listen on ports of their own or run under different users."`
	// Standby is the slot that serves the devices of empty slots; nil rejects them.
	Standby *int    `yaml:"when_empty" form:"when_empty" doc:"What becomes of the devices of an empty slot: reject refuses them until its member is back, standby gives them to another slot for that time."`
	OnStart OnStart `yaml:"on_start" enum:"reset,adopt,report" default:"reset" doc:"What the agent does, when it starts and when a slot opens for the first time, about a device whose TCP connections are at another member than that of its slot. reset: closes them, so that the device connects to the right one. adopt: the device stays with the member that has its connections until that ends. report: nothing; status names them."`
	// DeviceMap is an absolute path, or "" for none.
	DeviceMap string `yaml:"device_map" form:"file" doc:"CSV file prefix,device that gives several addresses one device; relative to the policy file."`
	// Backlog is that of every TCP listener, in connections; 0 is the kernel's somaxconn.
	Backlog int `yaml:"backlog" min:"0" max:"2147483647" default:"0" doc:"The backlog of the members' TCP listeners; 0 is the kernel's somaxconn."`
	// Users are names or numbers in decimal, of which there is one with Reuseport.
	Users []string `yaml:"user" form:"users" doc:"The user, by name or number, to whom the members and their sockets belong; with steering: lookup it may be a list. May be left out where each rule of members names one."`
	// Netns is an absolute path, or "" for the agent's own network namespace.
	Netns string `yaml:"netns" form:"netns" doc:"The network namespace, as a path; the agent's own by default."`
	// Cgroup starts with "/", which is the cgroup v2 mount, and is clean.
	Cgroup string `yaml:"cgroup" form:"cgroup" default:"/" doc:"The cgroup below which members are looked for, relative to the cgroup v2 mount; the whole host by default."`
	// TrackDevices is the number of devices that the table of devices seen holds; 0 turns it off.
	TrackDevices int `yaml:"track_devices" form:"track_devices" min:"0" max:"1048576" default:"65536" doc:"The size of the table of devices seen; 0 or off turns it off."`
	// Members are in the order of the file: the first match wins.
	Members []Member `yaml:"members" doc:"Which processes are members and what slot each takes. The first rule that matches wins."`
}

// Steering is how the kernel is made to choose a member's socket.
type Steering string

const (
	// Reuseport steers by SO_REUSEPORT; it is the default.
	Reuseport Steering = "reuseport"
	// Lookup steers by sk_lookup.
	Lookup Steering = "lookup"
)

// OnStart is what becomes of devices whose TCP connections are at another member
// than that of their slot.
type OnStart string

const (
	// Reset closes the connections; it is the default.
	Reset OnStart = "reset"
	// Adopt gives the device the slot of the member that has its connections.
	Adopt OnStart = "adopt"
	// Report changes nothing.
	Report OnStart = "report"
)

// Protocol is a transport protocol.
type Protocol string

// The protocols of listeners.
const (
	TCP Protocol = "tcp"
	UDP Protocol = "udp"
)

// Listener is an address that a service serves.
type Listener struct {
	Protocol Protocol `yaml:"protocol" required:"true" enum:"tcp,udp" doc:"The transport protocol."`
	// Address is never IPv4-mapped, multicast or zoned, and its port is not 0.
	Address netip.AddrPort `yaml:"address" required:"true" form:"address" doc:"A literal IP:port. [::] serves IPv4 too."`
	// V6Only goes with the address [::] and leaves IPv4 to another listener.
	V6Only bool `yaml:"v6only" default:"false" doc:"With the address [::]: IPv6 only, as members have it that set IPV6_V6ONLY. Leaves 0.0.0.0 to another listener."`
	// MemberPorts is where members listen instead; zero: on the port of Address.
	MemberPorts PortRange `yaml:"member_ports" form:"ports" doc:"With steering: lookup, the port or ports on which members listen in this listener's place; the listener's own port by default."`
}

// String gives the listener as tcp [::]:1790.
func (l Listener) String() string { return string(l.Protocol) + " " + l.Address.String() }

// PortRange is a range of ports, both ends included. The zero value is no range.
type PortRange struct{ First, Last uint16 }

// String gives the range as 20000-20003, or as one number where it is one port.
func (r PortRange) String() string {
	if r.First == r.Last {
		return fmt.Sprint(r.First)
	}
	return fmt.Sprintf("%d-%d", r.First, r.Last)
}

// Member is a rule that makes processes members and says what slot each takes.
type Member struct {
	Match MemberMatch `yaml:"match" required:"true" min:"1" doc:"What a process must be. All keys that are given must hold, and one must be given."`
	Slot  SlotRule    `yaml:"slot" required:"true" form:"slot" doc:"The slot: instance is the number after @ in the unit's name, group the first group of command_line, environment the variable SOCKEYE_SLOT, free the first free slot; or a fixed number."`
	// Namespaces is where the process may run.
	Namespaces Namespaces `yaml:"namespaces" enum:"host,any" default:"host" doc:"host: the process is in the host's user namespace, and in its mount namespace unless it is of a systemd_unit of the system. any: the process may be in namespaces of its own, as in a container."`
}

// Namespaces says in which namespaces a process may run.
type Namespaces string

const (
	// HostNamespaces are those of the host; it is the default.
	HostNamespaces Namespaces = "host"
	// AnyNamespaces are those of containers, too.
	AnyNamespaces Namespaces = "any"
)

// MemberMatch is what a process must be; "" and nil match everything. The globs
// are those of [path.Match], in which * does not match a slash.
type MemberMatch struct {
	SystemdUnit string `yaml:"systemd_unit" form:"glob" doc:"Glob on the name of the unit of the system's service manager. Of a user's own units it is user@UID.service."`
	// Cgroup starts with "/", as the paths in /proc/PID/cgroup do.
	Cgroup      string         `yaml:"cgroup" form:"cgroup_glob" doc:"Glob on the cgroup v2 path; * does not match a slash."`
	Executable  string         `yaml:"executable" form:"executable_glob" doc:"Glob on the absolute path of the executable, which must be the host's file of that path; * does not match a slash."`
	CommandLine *regexp.Regexp `yaml:"command_line" form:"regexp" doc:"RE2 pattern found anywhere in the arguments joined by spaces."`
	// User is a name or a number in decimal, or "" for those of the service.
	User string `yaml:"user" form:"user" doc:"The user, by name or number; that of the service by default."`
}

// SlotRule says what slot a member takes.
type SlotRule struct {
	Kind   SlotKind
	Number int // with SlotNumber only
}

// SlotKind is where a member's slot number comes from.
type SlotKind string

// The kinds of SlotRule.
const (
	SlotInstance    SlotKind = "instance"    // the instance of the systemd unit
	SlotGroup       SlotKind = "group"       // the first group of MemberMatch.CommandLine
	SlotEnvironment SlotKind = "environment" // the variable SOCKEYE_SLOT
	SlotFree        SlotKind = "free"        // the first free slot
	SlotNumber      SlotKind = "number"      // SlotRule.Number
)
