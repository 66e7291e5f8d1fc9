// SPDX-License-Identifier: Apache-2.0

// Package config parses the policy file, in YAML 1.2, into validated plain structs, or into a list of errors with line
// and column.
//
// Struct tags define the decoder and the JSON Schema: yaml (the key), doc, required, default (in the notation of the
// file), min and max (of a number, or of the length of a list or mapping), enum, keyed (a mapping decoded into a slice
// sorted by Name) and form (a value with its own notation, see forms.go, tuneforms.go, traceforms.go, bigtcpcheck.go and fleet.go).
package config

import (
	"fmt"
	"net/netip"
	"reflect"
	"regexp"
	"strings"
	"time"
)

// Policy is the contents of a policy file with all defaults. At least one of services, tune, trace, bigtcp and fleet is present.
type Policy struct {
	// Services are sorted by name.
	Services []Service `yaml:"services" keyed:"true" doc:"Services by name."`
	// Tune is in the order of the file.
	Tune []TuneRule `yaml:"tune" min:"0" max:"256" doc:"Rules that set TCP parameters of connections. The first matching rule of a cgroup applies."`
	// Trace is in the order of the file.
	Trace []TraceRule `yaml:"trace" min:"0" max:"64" doc:"Rules that select messages for latency measurement. The first matching rule of a cgroup applies."`
	// BigTCP is in the order of the file.
	BigTCP []BigTCPRule `yaml:"bigtcp" min:"0" max:"64" doc:"Rules for the maximum packet size of network interfaces (BIG TCP). The first matching rule of a network namespace applies."`
	// Fleet is nil unless other hosts share the devices.
	Fleet   *Fleet  `yaml:"fleet" doc:"Other hosts that serve the same addresses: each device has one host."`
	Metrics Metrics `yaml:"metrics" min:"1" doc:"Where metrics are served or sent; nowhere by default."`
	UI      UI      `yaml:"ui" doc:"The web page; none by default."`
	Events  Events  `yaml:"events" doc:"The record of events."`

	file   string              `yaml:"-"`
	places map[string]position `yaml:"-"` // positions of the values, by path
}

// Counts returns the names of the parts of the policy and the numbers of their entries, in turn, for a log.
func (p *Policy) Counts() []any {
	fleets := 0
	if p.Fleet != nil {
		fleets = 1
	}
	return []any{"services", len(p.Services), "tune", len(p.Tune), "trace", len(p.Trace), "bigtcp", len(p.BigTCP), "fleets", fleets}
}

// DoesNothing reports whether a policy has no part, as "services: {}" of the packages.
func (p *Policy) DoesNothing() bool {
	for field, value := range reflect.ValueOf(p).Elem().Fields() {
		if field.IsExported() && !value.IsZero() && (value.Kind() != reflect.Slice || value.Len() > 0) {
			return false
		}
	}
	return true
}

// Flaw returns an error about the value at a path such as services.telemetry.user. Callers use Flaw for a value that
// names something the host does not have.
func (p *Policy) Flaw(path, message, hint string) *Error {
	at := p.places[path]
	return &Error{p.file, at.line, at.column, path, message, hint}
}

// Metrics is where metrics are served or sent.
type Metrics struct {
	// Listen is a literal IP:port, or "" for no endpoint.
	Listen string `yaml:"listen" form:"endpoint" doc:"The address of the endpoint for Prometheus."`
	// OTLP is nil if metrics are not sent.
	OTLP *OTLP `yaml:"otlp" doc:"A collector of OpenTelemetry that the agent sends metrics to."`
}

// OTLP is a collector that receives metrics by OTLP over HTTP, as protobuf.
type OTLP struct {
	// Endpoint is an http or https URL with a host, and without a user, a query and a fragment.
	Endpoint string `yaml:"endpoint" required:"true" form:"otlp_endpoint" doc:"The URL of the collector, as in https://collector.example.net:4318/v1/metrics; the path is /v1/metrics by default."`
	// Interval is in microseconds.
	Interval int64 `yaml:"interval" form:"otlp_interval" default:"30s" doc:"The time between two exports, 1s to 1h."`
	// HeadersFile and CA are absolute paths, or "" for none.
	HeadersFile string `yaml:"headers_file" form:"file" doc:"File with HTTP headers for the collector, such as credentials, one a line as Name: value, with # comments; relative to the policy file. Only its owner may have access to the file."`
	CA          string `yaml:"ca" form:"file" doc:"File with the certificates, in PEM, of the authorities that may sign the certificate of the collector; those of the host by default; relative to the policy file."`
}

// UI is the web page.
type UI struct {
	// Listen is a literal IP:port, or unix: and an absolute path, or "" for no page.
	Listen string `yaml:"listen" required:"true" form:"ui_listen" doc:"The address of the web page: a literal IP:port, or unix:/path for a Unix socket that a proxy connects to."`
	TLS    UITLS  `yaml:"tls" doc:"TLS of the web page; required unless the address is a loopback address or a Unix socket."`
	// TokenFile is an absolute path, or "" for no token.
	TokenFile string `yaml:"token_file" form:"file" doc:"A file with a token of at least 32 characters, which users enter to see the page; relative to the policy file. The page needs a token or client certificates unless the address is a loopback address or a Unix socket."`
}

// UITLS has the files of TLS as absolute paths. Cert is "" without TLS.
type UITLS struct {
	Cert     string `yaml:"cert" required:"true" form:"file" doc:"The certificate and its chain, in PEM; relative to the policy file."`
	Key      string `yaml:"key" required:"true" form:"file" doc:"The key of the certificate, in PEM; relative to the policy file."`
	ClientCA string `yaml:"client_ca" form:"file" doc:"The certificates that sign client certificates, in PEM; relative to the policy file. With this key, a browser needs a client certificate."`
}

// SocketPath returns the path of the Unix socket, or "" for a TCP address.
func (u *UI) SocketPath() string {
	path, ok := strings.CutPrefix(u.Listen, unixPrefix)
	if !ok {
		return ""
	}
	return path
}

// DefaultEventsSize is the default of Events.Size.
const DefaultEventsSize = 64_000_000

// Events is the record of events.
type Events struct {
	// Size is in bytes.
	Size int64 `yaml:"size" form:"events_size" default:"64MB" doc:"The size of all files of events, 1MB to 10GB. The oldest events are removed."`
}

// Service is a set of listeners that share slots.
type Service struct {
	Name  string `yaml:"-"`
	Slots int    `yaml:"slots" required:"true" min:"1" max:"1024" doc:"The number of slots; each has one member."`
	// SlotsAs is another service of the policy, with the same slots and device map, or "".
	SlotsAs string `yaml:"slots_as" form:"service" doc:"Another service to share slots with: each device has the same slot number in both services, for example for a BMP daemon and an IPFIX collector. Both services need the same slots and device_map, no standby slot, and no on_start: adopt."`
	// SharesSlots is set if SlotsAs is, and for the service that another service names.
	SharesSlots bool       `yaml:"-"`
	Listeners   []Listener `yaml:"listeners" required:"true" min:"1" max:"16" doc:"The listeners of the service. A slot is ready only while its member listens on all of them."`
	Steering    Steering   `yaml:"steering" enum:"reuseport,lookup" default:"reuseport" doc:"reuseport: members share the listener's port by SO_REUSEPORT. lookup: members need no SO_REUSEPORT and may listen on ports of their own or run under different users."`
	// WhenEmpty is the zero value for reject.
	WhenEmpty WhenEmpty `yaml:"when_empty" form:"when_empty" doc:"The treatment of devices whose slot is empty: reject refuses them until the slot has a member, standby sends them to another slot in the meantime, and wait keeps their packets for the next member."`
	Templates Templates `yaml:"templates" enum:"keep,off" default:"keep" doc:"keep: the agent keeps the templates of IPFIX and NetFlow v9 exporters, and sends them to each member that newly serves the exporter. off: a member cannot decode an exporter's records until the exporter sends its templates again."`
	Takeover  bool      `yaml:"takeover" default:"false" doc:"Whether a process that matches an occupied slot takes the slot over from a process that was started earlier, as soon as all its sockets are open. The connections of the earlier process are closed."`
	OnStart   OnStart   `yaml:"on_start" enum:"reset,adopt,report" default:"reset" doc:"The treatment of a device whose TCP connections are with another member than that of its slot, when the agent starts and when a slot opens for the first time. reset: close the connections, so that the device connects to the right member. adopt: assign the device to the member that has its connections until that member exits. report: change nothing; status lists the devices."`
	OnMove    OnMove    `yaml:"on_move" enum:"reset,keep" default:"reset" doc:"The treatment of the TCP connections of a device that gets another slot. reset: close the connections, so that the device connects to the new member. keep: leave them open; until the device connects again, its TCP and UDP traffic is at two members."`
	// Pace is nil if all devices move at once.
	Pace *Pace `yaml:"pace" doc:"Moves of many devices in batches, because a device sends all its routes after it connects. Without pace, all devices move at once."`
	// DeviceMap is an absolute path, or "" for none.
	DeviceMap string `yaml:"device_map" form:"file" doc:"CSV file prefix,device that gives several addresses one device; relative to the policy file."`
	// Backlog is the backlog of each TCP listener, in connections; 0 is net.core.somaxconn.
	Backlog int `yaml:"backlog" min:"0" max:"2147483647" default:"0" doc:"The backlog of the members' TCP listeners; 0 is the kernel's somaxconn."`
	// Users has names or decimal numbers of users; at most one with Reuseport.
	Users []string `yaml:"user" form:"users" doc:"The user of the members and owner of their sockets, by name or number; a list is possible with steering: lookup. Optional if each rule of members names a user."`
	// Netns is an absolute path, or "" for the agent's own network namespace.
	Netns string `yaml:"netns" form:"netns" doc:"The network namespace, as a path; the agent's own by default."`
	// Cgroup starts with "/", which is the cgroup v2 mount, and is clean.
	Cgroup string `yaml:"cgroup" form:"cgroup" default:"/" doc:"The cgroup that contains the members, relative to the cgroup v2 mount; the whole host by default."`
	// TrackDevices is the size of the table of recent devices; 0 disables the table.
	TrackDevices int `yaml:"track_devices" form:"track_devices" min:"0" max:"1048576" default:"65536" doc:"The size of the table of recent devices; 0 or off disables the table."`
	// Members are in the order of the file: the first match wins.
	Members []Member `yaml:"members" doc:"Rules that make processes members and assign their slots. The first matching rule applies."`
}

// WhenEmpty is the treatment of devices whose slot is empty; at most one field is set.
type WhenEmpty struct {
	Standby *int  // slot that serves them
	Room    *Room // waiting room
}

// String describes the value.
func (w WhenEmpty) String() string {
	switch {
	case w.Standby != nil:
		return fmt.Sprintf("standby %d", *w.Standby)
	case w.Room != nil:
		return fmt.Sprintf("wait %s, %d datagrams, %s", time.Duration(w.Room.Wait)*time.Microsecond, w.Room.Datagrams, FormatValue(roomBytes, w.Room.Bytes))
	}
	return "reject"
}

// Templates is whether the agent keeps the templates of exporters.
type Templates string

const (
	// KeepTemplates keeps templates; it is the default.
	KeepTemplates Templates = "keep"
	// TemplatesOff does not.
	TemplatesOff Templates = "off"
)

// Room is the waiting room of each slot. Beyond the bounds, packets are refused.
type Room struct {
	// Wait is in microseconds.
	Wait      int64 `yaml:"wait" form:"room_wait" required:"true" doc:"The time for which the packets for an empty slot wait, 1s to 1h."`
	Datagrams int   `yaml:"datagrams" min:"1" max:"10000000" default:"100000" doc:"The number of datagrams that wait, per slot."`
	Bytes     int64 `yaml:"bytes" form:"room_bytes" default:"32MB" doc:"The size of the datagrams that wait, per slot, 64KB to 1GB."`
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

// OnMove is the treatment of the TCP connections of a device that gets another slot.
type OnMove string

const (
	// CloseMoved closes the connections; it is the default.
	CloseMoved OnMove = "reset"
	// KeepMoved leaves the connections open.
	KeepMoved OnMove = "keep"
)

// Pace limits the devices that move at the same time.
type Pace struct {
	Devices int `yaml:"devices" min:"1" max:"65536" default:"4" doc:"The number of devices per member that connect and send their initial dump at the same time."`
	// Timeout is in microseconds.
	Timeout int64 `yaml:"timeout" form:"pace_timeout" default:"2m" doc:"The time after which the next device moves even if an initial dump is not over, 1s to 24h."`
}

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
	// V6Only restricts a listener on [::] to IPv6, so that another listener may serve IPv4.
	V6Only bool `yaml:"v6only" default:"false" doc:"With the address [::]: IPv6 only, for members that set IPV6_V6ONLY. Another listener may use 0.0.0.0."`
	// MemberPorts is the range of ports that members listen on; zero: the port of Address.
	MemberPorts PortRange `yaml:"member_ports" form:"ports" doc:"With steering: lookup, the port or ports that members listen on for this listener; the port of the listener by default."`
}

// String returns the listener in the form tcp [::]:1790.
func (l Listener) String() string { return string(l.Protocol) + " " + l.Address.String() }

// PortRange is an inclusive range of ports. The zero value is not a range.
type PortRange struct{ First, Last uint16 }

// String returns the range in the form 20000-20003, or one number for a single port.
func (r PortRange) String() string {
	if r.First == r.Last {
		return fmt.Sprint(r.First)
	}
	return fmt.Sprintf("%d-%d", r.First, r.Last)
}

// Member is a rule that makes processes members and assigns their slots.
type Member struct {
	Match MemberMatch `yaml:"match" required:"true" min:"1" doc:"The conditions for a process. All given conditions must hold, and at least one is required."`
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

// MemberMatch has the conditions for a process; "" and nil match everything. The globs have the syntax of [path.Match],
// in which * does not match a slash.
type MemberMatch struct {
	SystemdUnit string `yaml:"systemd_unit" form:"glob" doc:"Glob on the name of the unit of the system's service manager. Of a user's own units it is user@UID.service."`
	// Cgroup starts with "/", as the paths in /proc/PID/cgroup do.
	Cgroup      string         `yaml:"cgroup" form:"cgroup_glob" doc:"Glob on the cgroup v2 path; * does not match a slash."`
	Executable  string         `yaml:"executable" form:"executable_glob" doc:"Glob on the absolute path of the executable, which must be the host's file of that path; * does not match a slash."`
	CommandLine *regexp.Regexp `yaml:"command_line" form:"regexp" doc:"RE2 pattern found anywhere in the arguments joined by spaces."`
	// User is a name or a decimal number, or "" for the users of the service.
	User string `yaml:"user" form:"user" doc:"The user, by name or number; that of the service by default."`
}

// SlotRule is the source of a member's slot number.
type SlotRule struct {
	Kind   SlotKind
	Number int // for SlotNumber only
}

// SlotKind is a kind of source of a slot number.
type SlotKind string

// The kinds of SlotRule.
const (
	SlotInstance    SlotKind = "instance"    // the instance of the systemd unit
	SlotGroup       SlotKind = "group"       // the first group of MemberMatch.CommandLine
	SlotEnvironment SlotKind = "environment" // the variable SOCKEYE_SLOT
	SlotFree        SlotKind = "free"        // the first free slot
	SlotNumber      SlotKind = "number"      // SlotRule.Number
)
