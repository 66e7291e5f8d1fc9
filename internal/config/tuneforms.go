// SPDX-License-Identifier: Apache-2.0

package config

import (
	"cmp"
	"encoding/hex"
	"fmt"
	"net/netip"
	"path"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v4"
)

// exploring is the mapping form of initial_cwnd.
type exploring struct {
	Candidates []int      `yaml:"explore" required:"true" form:"candidates" doc:"The initial windows to try, ascending: 2 to 8 of 1 to 32768."`
	By         SamePrefix `yaml:"by" form:"by" default:"remote/24" doc:"What a window is learned for: prefixes of the remote address. remote/N: N bits of IPv4 addresses, 48 of IPv6. {ipv4: N, ipv6: N}: 24 and 48 where they are left out."`
	Share      float64    `yaml:"share" form:"percentage" min:"0.1%" max:"100%" default:"10%" doc:"The share of a prefix' connections that try a window before it has settled, 0.1% to 100%."`
	Probe      float64    `yaml:"probe" form:"percentage" min:"0%" max:"100%" default:"2%" doc:"The same share after it has settled, 0% to share."`
	Bytes      int64      `yaml:"bytes" form:"flight" default:"64KB" doc:"How many bytes are the first flight, which is timed: 1KB to 16MB."`
	Evidence   int        `yaml:"evidence" min:"2" max:"1000" default:"8" doc:"How many connections a window needs to be judged."`
	Forget     int64      `yaml:"forget" form:"forget" default:"1h" doc:"The half-life of evidence, 1s to 365d."`
}

// Values of explore in the notation of options.
var (
	flight = TuneOption{Kind: KindSize, Min: 1000, Max: 16 * 1000 * 1000}
	forget = TuneOption{Kind: KindDuration, Min: 1000 * 1000, Max: 365 * 24 * 60 * minute}

	// roomWait and roomBytes are values of when_empty of a service.
	roomWait = TuneOption{Kind: KindDuration, Min: 1000 * 1000, Max: 60 * minute}
	// eventsSize is a value of events.
	eventsSize = TuneOption{Kind: KindSize, Min: 1000 * 1000, Max: 10 * 1000 * 1000 * 1000}
	roomBytes  = TuneOption{Kind: KindSize, Min: 64 * 1000, Max: 1000 * 1000 * 1000}
	// otlpInterval is the value of metrics.otlp.interval.
	otlpInterval = TuneOption{Kind: KindDuration, Min: 1000 * 1000, Max: 60 * minute}
	// fleetSettle is the value of fleet.settle.
	fleetSettle = TuneOption{Kind: KindDuration, Min: 100 * 1000, Max: 60 * minute}
	// paceTimeout is the value of pace.timeout of a service.
	paceTimeout = TuneOption{Kind: KindDuration, Min: 1000 * 1000, Max: 24 * 60 * minute}
)

const (
	exploreIPv4 = 24 // default prefix lengths
	exploreIPv6 = 48
)

var (
	aboveText      = regexp.MustCompile(`^> ?(.*)$`)
	byText         = regexp.MustCompile(`^remote/(0|[1-9][0-9]?)$`)
	congestionText = regexp.MustCompile(`^[a-z0-9_-]{1,15}$`)
	sampleText     = regexp.MustCompile(`^1/([1-9][0-9]{0,6})$`)
	tagText        = regexp.MustCompile(`^[ -~]{1,16}$`)
)

// tuneFormOf returns the form of tune with a name.
func tuneFormOf(name string) form {
	text := schema{Type: "string", MinLength: 1}
	percentage := schema{Type: "string", Pattern: percentageText.String()}
	switch name {
	case "name":
		return form{schema{Type: "string", Pattern: serviceName.String()}, textForm(func(s string) (any, string, string) {
			if !serviceName.MatchString(s) {
				return nil, "is not a valid name", nameHint
			}
			return s, "", ""
		})}
	case "tune_cgroup":
		return form{text, textForm(parseTuneCgroup)}
	case "service":
		return form{text, textForm(func(s string) (any, string, string) { return s, "", "" })}
	case "prefixes":
		return form{oneOrMore(text), decodePrefixes}
	case "port_list":
		return form{oneOrMore(formOf("ports").schema), decodePortList}
	case "same_prefix":
		return form{schema{OneOf: []schema{
			{Type: "integer", Minimum: new(1), Maximum: new(128)},
			schemaOf(reflect.TypeFor[SamePrefix](), `min:"1"`),
		}}, decodeSamePrefix}
	case "tag":
		// 0x5eed00 is a number in YAML.
		return form{schema{OneOf: []schema{{Type: "string", Pattern: `^([ -~]{1,16}|0x([0-9a-fA-F]{2}){1,16})$`}, {Type: "integer"}}}, decodeTag}
	case "settings", "reactions":
		return form{settingsSchema(name == "reactions"), decodeSettings(name == "reactions")}
	case "react":
		return form{schemaOf(reflect.TypeFor[React](), ""), decodeReact}
	case "percentage":
		return form{percentage, decodePercentage}
	case "above_percentage":
		percentage.Pattern = strings.Replace(percentage.Pattern, "^", "^> ?", 1)
		return form{percentage, decodeAbovePercentage}
	case "above_number":
		return form{schema{Type: "string", Pattern: `^> ?[0-9]{1,3}$`}, decodeAboveNumber}
	case "sample":
		return form{schema{Type: "string", Pattern: sampleText.String()}, decodeSample}
	case "candidates":
		return form{schema{Type: "array", Items: &schema{Type: "integer", Minimum: new(1), Maximum: new(1 << 15)}, MinItems: 2, MaxItems: 8}, decodeCandidates}
	case "by":
		return form{schema{OneOf: []schema{
			{Type: "string", Pattern: byText.String()},
			schemaOf(reflect.TypeFor[SamePrefix](), `min:"1"`),
		}}, decodeBy}
	case "flight":
		return form{valueSchema(flight), quantityForm(flight)}
	case "pace_timeout":
		return form{valueSchema(paceTimeout), quantityForm(paceTimeout)}
	case "otlp_interval":
		return form{valueSchema(otlpInterval), quantityForm(otlpInterval)}
	case "room_wait":
		return form{valueSchema(roomWait), quantityForm(roomWait)}
	case "events_size":
		return form{valueSchema(eventsSize), quantityForm(eventsSize)}
	case "room_bytes":
		return form{valueSchema(roomBytes), quantityForm(roomBytes)}
	case "forget":
		return form{valueSchema(forget), quantityForm(forget)}
	}
	panic("config: unknown form " + name)
}

// oneOrMore returns the schema of a value or a list of such values.
func oneOrMore(one schema) schema {
	return schema{OneOf: []schema{one, {Type: "array", Items: &one, MinItems: 1}}}
}

// parseTuneCgroup parses the path of a cgroup or the name of a systemd unit.
func parseTuneCgroup(s string) (any, string, string) {
	if !strings.Contains(s, "/") {
		switch suffix := path.Ext(s); suffix {
		case ".slice", ".service", ".scope":
			if s != suffix {
				return s, "", ""
			}
		}
	}
	return parseCgroup(s)
}

func decodePrefixes(d *decoder, path string, n *yaml.Node, _ reflect.StructTag) any {
	var terms []PrefixTerm
	seen := map[netip.Prefix]string{}
	d.each(path, n, func(path string, n *yaml.Node) {
		s, ok := d.text(path, n)
		if !ok {
			return
		}
		term, message, hint := parsePrefixTerm(s)
		if message != "" {
			d.refuse(path, positionOf(n), message, hint)
			return
		}
		if first, ok := seen[term.Prefix]; ok {
			d.refuse(path, positionOf(n), fmt.Sprintf("%s is already %s, line %d", term.Prefix, first, d.at[first].line), "")
			return
		}
		seen[term.Prefix] = path
		terms = append(terms, term)
	})
	return terms
}

// parsePrefixTerm parses an address or a prefix after an optional !.
func parsePrefixTerm(s string) (t PrefixTerm, message, hint string) {
	text, not := strings.CutPrefix(s, "!")
	var p netip.Prefix
	var err error
	if strings.Contains(text, "/") {
		p, err = netip.ParsePrefix(text)
	} else if a, e := netip.ParseAddr(text); e != nil || a.Zone() != "" {
		err = fmt.Errorf("parse address: %w", cmp.Or(e, fmt.Errorf("zone %s", a.Zone())))
	} else {
		p = netip.PrefixFrom(a, a.BitLen())
	}
	t = PrefixTerm{p, not}
	switch {
	case err != nil:
		return t, "must be an address or a prefix, is " + quoteShort(s), "write 10.0.0.0/8 or 2001:db8::/32"
	case p.Addr().Is4In6():
		if p.Bits() >= 96 {
			hint = writeTerm(PrefixTerm{netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-96).Masked(), not})
		}
		return t, "must not be IPv4-mapped, is " + quoteShort(s), hint
	case p != p.Masked():
		return t, "has bits set after its length: " + quoteShort(s), writeTerm(PrefixTerm{p.Masked(), not})
	}
	return t, "", ""
}

// writeTerm returns the hint to write a term. A term with ! needs quotes in YAML.
func writeTerm(t PrefixTerm) string {
	if t.Not {
		return "write " + strconv.Quote(t.String())
	}
	return "write " + t.String()
}

// quoteShort quotes a value for a message.
func quoteShort(s string) string {
	return describe(&yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: s})
}

func decodePortList(d *decoder, path string, n *yaml.Node, tag reflect.StructTag) any {
	var ports []PortRange
	d.each(path, n, func(path string, n *yaml.Node) {
		if r, ok := decodePorts(d, path, n, tag).(PortRange); ok {
			ports = append(ports, r)
		}
	})
	return ports
}

func decodeSamePrefix(d *decoder, path string, n *yaml.Node, _ reflect.StructTag) any {
	if n.Kind == yaml.MappingNode {
		bits := SamePrefix{-1, -1}
		d.families(path, n, &bits)
		return &bits
	}
	bits, ok := d.integer(path, n, `min:"1" max:"128"`)
	switch {
	case !ok:
		return nil
	case bits > 32:
		return &SamePrefix{-1, bits}
	}
	return &SamePrefix{bits, bits}
}

func decodeTag(d *decoder, path string, n *yaml.Node, _ reflect.StructTag) any {
	if !strings.HasPrefix(n.Value, "0x") { // a number in YAML
		if _, ok := d.text(path, n); !ok {
			return nil
		}
	}
	tag, message, hint := parseTag(n.Value)
	if message != "" {
		d.refuse(path, positionOf(n), message+", is "+describe(n), hint)
		return nil
	}
	return tag
}

// ParseTag parses a tag in the notation of the policy file: 1 to 16 printable ASCII characters, or 0x and 1 to 16 bytes
// in hexadecimal.
func ParseTag(s string) ([]byte, error) {
	tag, message, _ := parseTag(s)
	if message != "" {
		return nil, fmt.Errorf("parse tag: %s %s", quoteShort(s), message)
	}
	return tag, nil
}

func parseTag(s string) (tag []byte, message, hint string) {
	if digits, ok := strings.CutPrefix(s, "0x"); ok {
		tag, err := hex.DecodeString(digits)
		if err != nil || len(tag) < 1 || len(tag) > 16 {
			return nil, "must be 0x and 1 to 16 bytes of two hexadecimal digits", ""
		}
		return tag, "", ""
	}
	if !tagText.MatchString(s) {
		return nil, "must be 1 to 16 printable ASCII characters", "write other bytes as 0x5eed00"
	}
	return []byte(s), "", ""
}

const initialCwnd = "initial_cwnd"

func settingsSchema(reaction bool) schema {
	s := schema{Type: "object", Properties: map[string]schema{}, AdditionalProperties: false, MinProperties: 1}
	for _, o := range TuneOptions {
		if reaction && !o.React {
			continue
		}
		value := valueSchema(o)
		if o.Name == initialCwnd {
			value = schema{Description: o.Doc, OneOf: []schema{value, schemaOf(reflect.TypeFor[exploring](), "")}}
			value.OneOf[0].Description = ""
		}
		s.Properties[o.Name] = value
	}
	return s
}

// valueSchema returns the schema of the values of an option. The description has the range of values with a unit,
// because a schema can restrict only numbers.
func valueSchema(o TuneOption) schema {
	s := schema{Description: strings.TrimSpace(o.Doc + " " + bounds(o) + ".")}
	number := schema{Type: "integer", Minimum: new(int(o.Min)), Maximum: new(int(o.Max))}
	switch o.Kind {
	case KindSize:
		s.OneOf = []schema{number, {Type: "string", Pattern: notations[o.Kind].pattern()}}
	case KindDuration, KindRate:
		s.Type, s.Pattern = "string", notations[o.Kind].pattern()
	case KindNumber:
		number.Description = o.Doc
		return number
	case KindSwitch:
		return schema{Description: o.Doc, Type: "boolean"}
	case KindText:
		return schema{Description: o.Doc, Type: "string", Pattern: congestionText.String()}
	}
	return s
}

// decodeSettings decodes a mapping of options to values into the order of TuneOptions.
func decodeSettings(reaction bool) func(*decoder, string, *yaml.Node, reflect.StructTag) any {
	return func(d *decoder, path string, n *yaml.Node, _ reflect.StructTag) any {
		var known []string
		order := map[string]int{}
		for i, o := range TuneOptions {
			order[o.Name] = i
			if o.React || !reaction {
				known = append(known, o.Name)
			}
		}
		var settings []Setting
		complete := d.mapping(path, n, func(name string, k, value *yaml.Node) {
			sub := join(path, name)
			d.at[sub] = positionOf(value)
			o, ok := FindTuneOption(name)
			switch {
			case !ok:
				d.refuse(sub, positionOf(k), "unknown option", cmp.Or(didYouMean(name, known), "known options: "+strings.Join(known, ", ")))
			case reaction && !o.React:
				d.refuse(sub, positionOf(k), "cannot be set by a reaction", "a reaction can set "+strings.Join(known, ", "))
			case d.plain(sub, value):
				if s, ok := d.setting(sub, value, o); ok {
					settings = append(settings, s)
				}
			}
		})
		if complete && len(n.Content) == 0 {
			d.refuse(path, positionOf(n), "must have at least one option", "")
		}
		slices.SortFunc(settings, func(a, b Setting) int { return cmp.Compare(order[a.Option], order[b.Option]) })
		return settings
	}
}

// setting decodes the value of an option.
func (d *decoder) setting(path string, n *yaml.Node, o TuneOption) (Setting, bool) {
	s := Setting{Option: o.Name}
	ok := false
	switch o.Kind {
	case KindSize, KindDuration, KindRate:
		s.Value, ok = d.quantity(path, n, o)
	case KindNumber:
		if o.Name == initialCwnd && n.Kind == yaml.MappingNode {
			s.Explore, ok = d.explore(path, n), true
			break
		}
		s.Value, ok = d.number(path, n, o)
	case KindSwitch:
		var on bool
		if on, ok = d.boolean(path, n); on {
			s.Value = 1
		}
	case KindText:
		if s.Text, ok = d.text(path, n); ok && !congestionText.MatchString(s.Text) {
			d.refuse(path, positionOf(n), "must be 1 to 15 of a-z, 0-9, _ and -, is "+describe(n), "")
			ok = false
		}
	}
	return s, ok
}

func (d *decoder) explore(path string, n *yaml.Node) *Explore {
	var e exploring
	d.decode(path, n, &e)
	if e.Probe > e.Share && e.Share > 0 {
		at, hint := path+".probe", ""
		if !d.given(at) {
			at, hint = path+".share", "set probe too"
		}
		d.refuseAt(at, fmt.Sprintf("probe must not be above share: is %s of %s", formatPercentage(e.Probe), formatPercentage(e.Share)), hint)
	}
	return &Explore{e.Candidates, e.By.IPv4, e.By.IPv6, e.Share, e.Probe, e.Bytes, e.Evidence, e.Forget}
}

func decodeCandidates(d *decoder, path string, n *yaml.Node, _ reflect.StructTag) any {
	if n.Kind != yaml.SequenceNode || len(n.Content) < 2 || len(n.Content) > 8 {
		is := describe(n)
		if n.Kind == yaml.SequenceNode {
			is += fmt.Sprintf(" of %d", len(n.Content))
		}
		d.refuse(path, positionOf(n), "must be a list of 2 to 8 windows, is "+is, "write [10, 16, 24, 40]")
		return nil
	}
	var candidates []int
	d.each(path, n, func(path string, n *yaml.Node) {
		i, ok := d.integer(path, n, `min:"1" max:"32768"`)
		switch last := len(candidates) - 1; {
		case !ok:
		case last >= 0 && i <= candidates[last]:
			d.refuse(path, positionOf(n), fmt.Sprintf("must be above the one before it, %d, is %d", candidates[last], i), "")
		default:
			candidates = append(candidates, i)
		}
	})
	return candidates
}

// each calls f for the items of a list, or for a single value.
func (d *decoder) each(path string, n *yaml.Node, f func(path string, n *yaml.Node)) {
	if n.Kind != yaml.SequenceNode {
		f(path, n)
		return
	}
	if len(n.Content) == 0 {
		d.refuse(path, positionOf(n), "must not be empty", "leave it out to match everything")
	}
	for i, item := range n.Content {
		sub := fmt.Sprintf("%s[%d]", path, i)
		d.at[sub] = positionOf(item)
		if d.plain(sub, item) {
			f(sub, item)
		}
	}
}

func decodeBy(d *decoder, path string, n *yaml.Node, _ reflect.StructTag) any {
	bits := SamePrefix{exploreIPv4, exploreIPv6}
	if n.Kind == yaml.MappingNode {
		d.families(path, n, &bits)
		return bits
	}
	parts := byText.FindStringSubmatch(n.Value)
	if parts != nil {
		bits.IPv4, _ = strconv.Atoi(parts[1]) // two digits
	}
	if parts == nil || bits.IPv4 > 32 {
		d.refuse(path, positionOf(n), "must be remote/N, N from 0 to 32, or {ipv4: N, ipv6: N}, is "+describe(n), "remote/24 has 24 bits of IPv4 addresses and 48 of IPv6")
		return nil
	}
	return bits
}

// families decodes {ipv4: N, ipv6: N}. An omitted family is unchanged.
func (d *decoder) families(path string, n *yaml.Node, bits *SamePrefix) {
	d.decode(path, n, bits)
	if len(n.Content) == 0 {
		d.refuse(path, positionOf(n), "must have ipv4 or ipv6", "")
	}
}

func quantityForm(o TuneOption) func(*decoder, string, *yaml.Node, reflect.StructTag) any {
	return func(d *decoder, path string, n *yaml.Node, _ reflect.StructTag) any {
		if value, ok := d.quantity(path, n, o); ok {
			return value
		}
		return nil
	}
}

// decodePercentage decodes a percentage in the range of the tag.
func decodePercentage(d *decoder, path string, n *yaml.Node, tag reflect.StructTag) any {
	share, ok := parsePercentage(n.Value)
	if n.Kind != yaml.ScalarNode || !ok {
		hint := ""
		if decimal.MatchString(n.Value) {
			hint = "write " + n.Value + "%"
		}
		d.refuse(path, positionOf(n), "must be a percentage such as 10%, is "+describe(n), hint)
		return nil
	}
	lo, _ := parsePercentage(tag.Get("min"))
	hi, _ := parsePercentage(tag.Get("max"))
	if share < lo || share > hi {
		d.refuse(path, positionOf(n), fmt.Sprintf("must be %s to %s, is %s", tag.Get("min"), tag.Get("max"), describe(n)), "")
		return nil
	}
	return share
}

func decodeAbovePercentage(d *decoder, path string, n *yaml.Node, _ reflect.StructTag) any {
	s, ok := d.above(path, n, "> 2%", percentageText.MatchString)
	if !ok {
		return nil
	}
	share, _ := parsePercentage(s)
	if share < 0.001 || share > 0.5 {
		d.refuse(path, positionOf(n), "must be > 0.1% to > 50%, is "+describe(n), "")
		return nil
	}
	return share
}

func decodeAboveNumber(d *decoder, path string, n *yaml.Node, tag reflect.StructTag) any {
	s, ok := d.above(path, n, "> 2", func(s string) bool { return decimal.MatchString(s) && s[0] != '-' })
	if !ok {
		return nil
	}
	lo, hi, _ := limits(tag)
	i, err := strconv.Atoi(s)
	if err != nil || i < lo || i > hi {
		d.refuse(path, positionOf(n), fmt.Sprintf("must be > %d to > %d, is %s", lo, hi, describe(n)), "")
		return nil
	}
	return i
}

// above returns the value of a condition after its >.
func (d *decoder) above(path string, n *yaml.Node, example string, valid func(string) bool) (string, bool) {
	parts := aboveText.FindStringSubmatch(n.Value)
	if n.Kind == yaml.ScalarNode && parts != nil && valid(parts[1]) {
		return parts[1], true
	}
	hint := fmt.Sprintf("write %q, with the quotes", example)
	if n.Kind == yaml.ScalarNode && valid(n.Value) {
		hint = fmt.Sprintf("write %q, with the quotes", "> "+n.Value)
	}
	d.refuse(path, positionOf(n), fmt.Sprintf("must be a condition such as %q, is %s", example, describe(n)), hint)
	return "", false
}

func decodeSample(d *decoder, path string, n *yaml.Node, tag reflect.StructTag) any {
	parts := sampleText.FindStringSubmatch(n.Value)
	lo, hi, _ := limits(tag)
	i := 0
	if parts != nil {
		i, _ = strconv.Atoi(parts[1]) // 7 digits
	}
	if n.Kind != yaml.ScalarNode || i < lo || i > hi {
		d.refuse(path, positionOf(n), fmt.Sprintf("must be 1/%d to 1/%d, is %s", lo, hi, describe(n)), "1/100 watches one of a hundred connections")
		return nil
	}
	return i
}

func decodeReact(d *decoder, path string, n *yaml.Node, _ reflect.StructTag) any {
	r := React{RTOs: -1}
	d.decode(path, n, &r)
	if n.Kind == yaml.MappingNode && !d.given(path+".retransmits") && !d.given(path+".rtos") {
		d.refuse(path, positionOf(n), "must have retransmits or rtos", `as in {retransmits: "> 2%", set: {congestion: reno}}`)
	}
	return &r
}
