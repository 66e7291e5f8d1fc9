// SPDX-License-Identifier: Apache-2.0

package config

import (
	"cmp"
	"fmt"
	"net/netip"
	"net/url"
	"path"
	"path/filepath"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"unicode"

	"go.yaml.in/yaml/v4"
)

// form is a notation of a value: its schema and its decoder.
type form struct {
	schema schema
	// decode returns nil after an error, and for the zero value.
	decode func(d *decoder, path string, n *yaml.Node, tag reflect.StructTag) any
}

// standby is the mapping form of when_empty.
type standby struct {
	Standby int `yaml:"standby" required:"true" min:"0" max:"1023" doc:"The slot that serves the devices of empty slots."`
}

// formOf returns the form with a name. A map would have an initialization cycle: when_empty needs formOf.
func formOf(name string) form {
	text := schema{Type: "string", MinLength: 1}
	switch name {
	case "address":
		return form{text, textForm(func(s string) (any, string, string) {
			addr, message, hint := parseAddress(s)
			if message != "" {
				return nil, message, hint
			}
			return addr, "", ""
		})}
	case "endpoint":
		return form{text, textForm(func(s string) (any, string, string) {
			addr, message, hint := parseAddress(s)
			return addr.String(), message, hint
		})}
	case "otlp_endpoint":
		return form{schema{Type: "string", Pattern: "^https?://[^/?#@]+(/[^?#]*)?$"}, textForm(parseCollector)}
	case "ui_listen":
		return form{text, textForm(parseUIListen)}
	case "ports":
		return form{schema{OneOf: []schema{
			{Type: "integer", Minimum: new(1), Maximum: new(65535)},
			{Type: "string", Pattern: `^[1-9][0-9]{0,4}(-[1-9][0-9]{0,4})?$`},
		}}, decodePorts}
	case "when_empty":
		return form{schema{Default: "reject", OneOf: []schema{{Enum: []string{"reject"}}, schemaOf(reflect.TypeFor[standby](), ""), schemaOf(reflect.TypeFor[Room](), "")}}, decodeWhenEmpty}
	case "track_devices":
		return form{schema{OneOf: []schema{
			{Type: "integer", Minimum: new(0), Maximum: new(1 << 20)},
			{Enum: []string{"off"}},
		}}, decodeTrackDevices}
	case "slot":
		return form{schema{OneOf: []schema{
			{Enum: slotWords},
			{Type: "integer", Minimum: new(0), Maximum: new(1023)},
		}}, decodeSlot}
	case "user":
		return form{userSchema(), decodeUser}
	case "users":
		list := userSchema()
		return form{schema{OneOf: append(list.OneOf, schema{Type: "array", Items: &list, MinItems: 1, MaxItems: maxUsers})}, decodeUsers}
	case "file":
		return form{text, decodeFile}
	case "netns":
		return form{schema{Type: "string", Pattern: "^/"}, textForm(func(s string) (any, string, string) {
			if !strings.HasPrefix(s, "/") {
				return nil, "must be an absolute path, is " + strconv.Quote(s), "a namespace made by ip netns is /run/netns/" + path.Base(s)
			}
			return path.Clean(s), "", ""
		})}
	case "cgroup":
		return form{text, textForm(parseCgroup)}
	case "glob":
		return form{text, textForm(parseGlob)}
	case "cgroup_glob":
		return form{text, textForm(func(s string) (any, string, string) {
			return parseGlob("/" + strings.TrimPrefix(s, "/"))
		})}
	case "executable_glob":
		return form{schema{Type: "string", Pattern: "^/"}, textForm(func(s string) (any, string, string) {
			if !strings.HasPrefix(s, "/") {
				return nil, "must start with /, is " + strconv.Quote(s), "the glob is held against the absolute path"
			}
			return parseGlob(s)
		})}
	case "regexp":
		return form{text, textForm(func(s string) (any, string, string) {
			re, err := regexp.Compile(s)
			if err != nil {
				return nil, "is not an RE2 pattern: " + strings.TrimPrefix(err.Error(), "error parsing regexp: "), ""
			}
			return re, "", ""
		})}
	case "interface":
		return form{text, textForm(parseInterface)}
	case "bigtcp_size":
		return form{bigTCPSizeSchema(), decodeBigTCPSize}
	case "fleet_host", "fleet_interfaces", "fleet_addresses", "fleet_endpoints", "fleet_settle":
		return fleetFormOf(name)
	case "trace_sampling", "trace_group_by", "trace_stages", "trace_protocols":
		return traceFormOf(name)
	}
	return tuneFormOf(name)
}

// textForm returns a decoder for strings. parse returns the value, or a message and a hint.
func textForm(parse func(string) (x any, message, hint string)) func(*decoder, string, *yaml.Node, reflect.StructTag) any {
	return func(d *decoder, path string, n *yaml.Node, _ reflect.StructTag) any {
		s, ok := d.text(path, n)
		if !ok {
			return nil
		}
		x, message, hint := parse(s)
		if message != "" {
			d.refuse(path, positionOf(n), message, hint)
			return nil
		}
		return x
	}
}

// parseCollector parses the URL of a collector, and adds the default path.
func parseCollector(s string) (x any, message, hint string) {
	u, err := url.Parse(s)
	switch {
	case err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "" || u.Opaque != "":
		return nil, "must be an http or https URL, is " + strconv.Quote(s), "as in https://collector.example.net:4318/v1/metrics"
	case u.User != nil:
		return nil, "must not have a user or a password", "put credentials into headers_file, as in Authorization: Basic ..."
	case u.RawQuery != "" || u.ForceQuery || u.Fragment != "":
		return nil, "must not have a query or a fragment", "use headers_file"
	}
	if u.Path == "" {
		u.Path = "/v1/metrics"
	}
	return u.String(), "", ""
}

// unixPrefix begins the address of a Unix socket.
const unixPrefix = "unix:"

// maxSocketPath is the longest path of a Unix socket in bytes (unix(7)).
const maxSocketPath = 107

// parseUIListen parses an IP:port, or unix: and a path.
func parseUIListen(s string) (x any, message, hint string) {
	path, ok := strings.CutPrefix(s, unixPrefix)
	switch {
	case !ok:
		addr, message, hint := parseAddress(s)
		return addr.String(), message, hint
	case !filepath.IsAbs(path) || filepath.Clean(path) == "/":
		return nil, "must have an absolute path after unix:, is " + strconv.Quote(s), "write unix:/run/sockeye/ui.sock"
	case len(filepath.Clean(path)) > maxSocketPath:
		return nil, fmt.Sprintf("must have a path of at most %d bytes, has %d", maxSocketPath, len(filepath.Clean(path))), ""
	}
	return unixPrefix + filepath.Clean(path), "", ""
}

// badPort matches an address with a port of 5 or more digits, for the message when netip.ParseAddrPort fails.
var badPort = regexp.MustCompile(`^([0-9.]+|\[[0-9a-fA-F:.]+\]):[0-9]{5,}$`)

// parseAddress parses an address that a server can bind to in any network namespace.
func parseAddress(s string) (a netip.AddrPort, message, hint string) {
	a, err := netip.ParseAddrPort(s)
	addr := a.Addr()
	switch {
	case err != nil && badPort.MatchString(s) || err == nil && a.Port() == 0:
		return a, "must have a port of 1 to 65535, is " + strconv.Quote(s), ""
	case err != nil:
		hint = "write 192.0.2.1:1790 or [2001:db8::1]:1790"
		if port, ok := strings.CutPrefix(s, ":"); ok && decimal.MatchString(port) {
			hint = "write [::]:" + port + " for all addresses"
		}
		return a, "must be a literal IP:port, is " + strconv.Quote(s), hint
	case addr.Zone() != "" || addr.Is6() && addr.IsLinkLocalUnicast():
		return a, "must not be a link-local address, is " + strconv.Quote(s), fmt.Sprintf("use [::]:%d", a.Port())
	case addr.Is4In6():
		return a, "must not be an IPv4-mapped address, is " + strconv.Quote(s), "write " + netip.AddrPortFrom(addr.Unmap(), a.Port()).String()
	case addr.IsMulticast():
		return a, "must not be a multicast address, is " + strconv.Quote(s), ""
	}
	return a, "", ""
}

func parseCgroup(s string) (any, string, string) {
	if rest, ok := strings.CutPrefix(s, "/sys/fs/cgroup"); ok && (rest == "" || rest[0] == '/') {
		// With cgroup v1, systemd mounts v2 at this path.
		if below, ok := strings.CutPrefix(rest, "/unified"); ok && (below == "" || below[0] == '/') {
			rest = below
		}
		return nil, "must be relative to the cgroup v2 mount, is " + strconv.Quote(s), "write " + path.Clean("/"+rest)
	}
	for part := range strings.SplitSeq(s, "/") {
		if part == ".." {
			return nil, "must not hold .., is " + strconv.Quote(s), ""
		}
	}
	return path.Clean("/" + s), "", ""
}

func parseGlob(s string) (any, string, string) {
	if _, err := path.Match(s, ""); err != nil {
		return nil, "is not a valid glob: " + strconv.Quote(s), `*, ?, [a-z] and \ have a meaning; [ needs a ]`
	}
	return s, "", ""
}

func decodePorts(d *decoder, path string, n *yaml.Node, _ reflect.StructTag) any {
	first, last, isRange := strings.Cut(n.Value, "-")
	if !isRange {
		last = first
	}
	a, errA := strconv.ParseUint(first, 10, 16)
	b, errB := strconv.ParseUint(last, 10, 16)
	if n.Kind != yaml.ScalarNode || !decimal.MatchString(first) || !decimal.MatchString(last) || errA != nil || errB != nil || a == 0 || b < a {
		d.refuse(path, positionOf(n), "must be a port or a range of ports, is "+describe(n), `write 20000 or "20000-20003"`)
		return nil
	}
	return PortRange{uint16(a), uint16(b)}
}

func decodeWhenEmpty(d *decoder, path string, n *yaml.Node, _ reflect.StructTag) any {
	switch {
	case n.Kind == yaml.MappingNode && len(n.Content) == 0:
		d.refuse(path, positionOf(n), "must be reject, {standby: N} or {wait: 30s}, is empty", "")
	case n.Kind == yaml.MappingNode && hasKey(n, "wait") && hasKey(n, "standby"):
		d.refuse(path, positionOf(n), "has both standby and wait", "choose one of them")
	case n.Kind == yaml.MappingNode && (hasKey(n, "wait") || hasKey(n, "datagrams") || hasKey(n, "bytes")):
		room := new(Room)
		d.decode(path, n, room)
		return WhenEmpty{Room: room}
	case n.Kind == yaml.MappingNode && !hasKey(n, "standby"):
		var any struct { // of both forms: no key is known
			Standby   int    `yaml:"standby"`
			Wait      string `yaml:"wait"`
			Datagrams int    `yaml:"datagrams"`
			Bytes     string `yaml:"bytes"`
		}
		d.decode(path, n, &any)
	case n.Kind == yaml.MappingNode:
		var s standby
		d.decode(path, n, &s)
		return WhenEmpty{Standby: &s.Standby}
	case n.Value != "reject":
		d.refuse(path, positionOf(n), "must be reject, {standby: N} or {wait: 30s}, is "+describe(n), "")
	}
	return nil
}

func hasKey(n *yaml.Node, key string) bool {
	for i := 0; i+1 < len(n.Content); i += 2 {
		if n.Content[i].Value == key {
			return true
		}
	}
	return false
}

func decodeTrackDevices(d *decoder, path string, n *yaml.Node, tag reflect.StructTag) any {
	if n.Value == "off" {
		return 0
	}
	if i, ok := d.integer(path, n, tag); ok {
		return i
	}
	return nil
}

var slotWords = []string{string(SlotInstance), string(SlotGroup), string(SlotEnvironment), string(SlotFree)}

func decodeSlot(d *decoder, path string, n *yaml.Node, _ reflect.StructTag) any {
	if n.Kind == yaml.ScalarNode && n.ShortTag() != "!!str" && decimal.MatchString(n.Value) {
		if i, ok := d.integer(path, n, `min:"0" max:"1023"`); ok {
			return SlotRule{SlotNumber, i}
		}
		return nil
	}
	for _, word := range slotWords {
		if n.Value == word {
			return SlotRule{Kind: SlotKind(word)}
		}
	}
	d.refuse(path, positionOf(n), fmt.Sprintf("must be %s or a number, is %s", strings.Join(slotWords, ", "), describe(n)), cmp.Or(unquote(n), didYouMean(n.Value, slotWords)))
	return nil
}

// maxUsers is the maximum number of users of a service.
const maxUsers = 16

func userSchema() schema {
	return schema{OneOf: []schema{
		{Type: "integer", Minimum: new(0), Maximum: new(maxUID)},
		{Type: "string", MinLength: 1},
	}}
}

// decodeUsers decodes one user or a list of users.
func decodeUsers(d *decoder, path string, n *yaml.Node, tag reflect.StructTag) any {
	if n.Kind != yaml.SequenceNode {
		if user := decodeUser(d, path, n, tag); user != nil {
			return []string{user.(string)}
		}
		return nil
	}
	if len(n.Content) == 0 || len(n.Content) > maxUsers {
		d.refuse(path, positionOf(n), fmt.Sprintf("must have 1 to %d items, has %d", maxUsers, len(n.Content)), "")
		return nil
	}
	var users []string
	seen := make(map[string]string)
	for i, item := range n.Content {
		sub := fmt.Sprintf("%s[%d]", path, i)
		d.at[sub] = positionOf(item)
		if !d.plain(sub, item) {
			continue
		}
		if user, ok := decodeUser(d, sub, item, tag).(string); ok && once(d, sub, item, user, seen) {
			users = append(users, user)
		}
	}
	return users
}

const maxUID = 1<<32 - 2 // 1<<32 - 1 means no user in chown(2) and setreuid(2)

func decodeUser(d *decoder, path string, n *yaml.Node, _ reflect.StructTag) any {
	if n.Kind == yaml.ScalarNode && decimal.MatchString(n.Value) {
		if uid, err := strconv.ParseInt(n.Value, 10, 64); err != nil || uid < 0 || uid > maxUID {
			d.refuse(path, positionOf(n), fmt.Sprintf("must be a name or a number of 0 to %d, is %s", maxUID, describe(n)), "")
			return nil
		}
		return n.Value
	}
	s, ok := d.text(path, n)
	if !ok {
		return nil
	}
	if strings.ContainsFunc(s, func(r rune) bool { return r == ':' || r == '/' || unicode.IsSpace(r) }) {
		d.refuse(path, positionOf(n), "is not a user's name or number: "+describe(n), "")
		return nil
	}
	return s
}

// decodeFile decodes a path, relative to the directory of the policy file, into an absolute one.
func decodeFile(d *decoder, path string, n *yaml.Node, _ reflect.StructTag) any {
	s, ok := d.text(path, n)
	if !ok {
		return nil
	}
	if !filepath.IsAbs(s) {
		s = filepath.Join(filepath.Dir(d.file), s)
	}
	abs, err := filepath.Abs(s)
	if err != nil {
		d.refuse(path, positionOf(n), "make path absolute: "+err.Error(), "")
		return nil
	}
	return abs
}
