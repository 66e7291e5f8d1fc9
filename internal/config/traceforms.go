// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v4"
)

// traceStages has all stages, in the order of the path of a message.
var traceStages = []struct {
	stage    Stage
	udp      bool // also measured for datagrams
	standard bool // measured by default
	doc      string
}{
	{StageSend, false, false, "start to end of sendmsg(2), which includes waiting for room in the send buffer; only on kernels that permit fentry programs"},
	{StageStack, true, true, "end of sendmsg(2) to the queueing discipline: waiting for a window, pacing"},
	{StageQdisc, true, true, "queueing discipline to the driver"},
	{StageNIC, false, true, "driver to the hardware timestamp, if the NIC provides one"},
	{StageNetwork, false, true, "driver to the peer's acknowledgement"},
	{StageRXStack, true, false, "received data: arrival at the host to the socket's receive queue"},
	{StageReader, true, false, "received data: receive queue of the socket to the application's read"},
}

// groupKinds has all kinds except remote, which has a notation of its own.
var groupKinds = []GroupKind{GroupPort, GroupService, GroupCgroup, GroupRule, GroupArm}

// groupRemote is the mapping form of an item of group_by.
type groupRemote struct {
	Remote groupBits `yaml:"remote" required:"true" min:"1" doc:"Prefixes of the remote address; 24 and 48 bits where a family is left out."`
}

type groupBits struct {
	IPv4 int `yaml:"ipv4" min:"1" max:"32" default:"24" doc:"Leading bits of IPv4 addresses."`
	IPv6 int `yaml:"ipv6" min:"1" max:"128" default:"48" doc:"Leading bits of IPv6 addresses."`
}

// Limits of the sampling of messages.
const (
	maxOneIn     = 1000 * 1000
	maxPerSecond = 100 * 1000
)

var (
	perSecondText = regexp.MustCompile(`^([1-9][0-9]{0,5})/s$`)
	noneText      = regexp.MustCompile(`^(0+(/.*)?|[0-9]+/0+)$`)
)

// traceFormOf returns the form of trace with a name.
func traceFormOf(name string) form {
	switch name {
	case "trace_sampling":
		return form{schema{Type: "string", Pattern: `^(1/[1-9][0-9]{0,6}|[1-9][0-9]{0,5}/s)$`}, decodeTraceSampling}
	case "trace_group_by":
		words := make([]string, len(groupKinds))
		for i, k := range groupKinds {
			words[i] = string(k)
		}
		return form{oneOrMore(schema{OneOf: []schema{
			{Type: "string", Pattern: `^(remote/([1-9]|[12][0-9]|3[0-2])|` + strings.Join(words, "|") + `)$`},
			schemaOf(reflect.TypeFor[groupRemote](), ""),
		}}), decodeGroupBy}
	case "trace_stages":
		stages, standard := make([]Stage, len(traceStages)), standardStages()
		for i, s := range traceStages {
			stages[i] = s.stage
		}
		f := wordsForm(stages, "leave it out for "+joinWords(standard, "and"))
		f.schema.Default = standard
		return f
	case "trace_protocols":
		f := wordsForm([]Protocol{TCP, UDP}, "leave it out for tcp")
		f.schema.Default = []Protocol{TCP}
		return f
	}
	panic("config: unknown form " + name)
}

// standardStages returns the stages that a rule measures by default.
func standardStages() []Stage {
	var stages []Stage
	for _, s := range traceStages {
		if s.standard {
			stages = append(stages, s.stage)
		}
	}
	return stages
}

// wordsForm returns the form of one or more distinct known words, in any order. The result has the order of known. hint
// is the hint for an empty list.
func wordsForm[T ~string](known []T, hint string) form {
	names := make([]string, len(known))
	for i, k := range known {
		names[i] = string(k)
	}
	return form{oneOrMore(schema{Enum: names}), func(d *decoder, path string, n *yaml.Node, _ reflect.StructTag) any {
		if d.emptyList(path, n, hint) {
			return nil
		}
		seen := map[T]string{}
		d.each(path, n, func(path string, n *yaml.Node) {
			s, ok := d.text(path, n)
			switch {
			case !ok:
			case !slices.Contains(names, s):
				d.refuse(path, positionOf(n), fmt.Sprintf("must be %s, is %s", joinWords(names, "or"), describe(n)), nearWord(s, names))
			default:
				once(d, path, n, T(s), seen)
			}
		})
		return slices.DeleteFunc(slices.Clone(known), func(k T) bool { return seen[k] == "" })
	}}
}

func decodeTraceSampling(d *decoder, path string, n *yaml.Node, _ reflect.StructTag) any {
	if n.Kind == yaml.ScalarNode {
		if parts := sampleText.FindStringSubmatch(n.Value); parts != nil {
			if i, _ := strconv.Atoi(parts[1]); i <= maxOneIn { // 7 digits
				return TraceSampling{OneIn: i}
			}
		}
		if parts := perSecondText.FindStringSubmatch(n.Value); parts != nil {
			if i, _ := strconv.Atoi(parts[1]); i <= maxPerSecond { // 6 digits
				return TraceSampling{PerSecond: i}
			}
		}
	}
	d.refuse(path, positionOf(n), fmt.Sprintf("must be 1/1 to 1/%d, or 1/s to %d/s, is %s", maxOneIn, maxPerSecond, describe(n)), samplingHint(n.Value))
	return nil
}

// samplingHint returns the hint for an invalid sampling s.
func samplingHint(s string) string {
	switch {
	case noneText.MatchString(s):
		return "leave the rule out to trace nothing"
	case decimal.MatchString(s) && len(s) <= 5 && s[0] != '-':
		return fmt.Sprintf("write 1/%s for one of %s messages, %s/s for that many a second", s, s, s)
	}
	return "1/100 traces one of a hundred messages, 100/s at most a hundred a second"
}

func decodeGroupBy(d *decoder, path string, n *yaml.Node, _ reflect.StructTag) any {
	if d.emptyList(path, n, "leave it out to count all together") {
		return nil
	}
	var by []TraceGroupBy
	seen := map[GroupKind]string{}
	d.each(path, n, func(path string, n *yaml.Node) {
		if g, ok := d.groupBy(path, n); ok && once(d, path, n, g.Kind, seen) {
			by = append(by, g)
		}
	})
	return by
}

// emptyList refuses a list without items.
func (d *decoder) emptyList(path string, n *yaml.Node, hint string) bool {
	empty := n.Kind == yaml.SequenceNode && len(n.Content) == 0
	if empty {
		d.refuse(path, positionOf(n), "must not be empty", hint)
	}
	return empty
}

// once records the path of a word in seen, and refuses a second occurrence. once returns true for the first.
func once[T ~string](d *decoder, path string, n *yaml.Node, word T, seen map[T]string) bool {
	if first, twice := seen[word]; twice {
		d.refuse(path, positionOf(n), fmt.Sprintf("%s is already %s, line %d", word, first, d.at[first].line), "")
		return false
	}
	seen[word] = path
	return true
}

func (d *decoder) groupBy(path string, n *yaml.Node) (g TraceGroupBy, ok bool) {
	if n.Kind == yaml.MappingNode {
		var r groupRemote
		d.decode(path, n, &r)
		return TraceGroupBy{GroupRemote, r.Remote.IPv4, r.Remote.IPv6}, !d.bad[path]
	}
	s, ok := d.text(path, n)
	if !ok {
		return g, false
	}
	if s == string(GroupRemote) || strings.HasPrefix(s, "remote/") {
		return d.groupRemote(path, n)
	}
	if g.Kind = GroupKind(s); slices.Contains(groupKinds, g.Kind) {
		return g, true
	}
	known := []string{"remote/24"}
	for _, k := range groupKinds {
		known = append(known, string(k))
	}
	d.refuse(path, positionOf(n), fmt.Sprintf("must be remote/N, %s, is %s", joinWords(groupKinds, "or"), describe(n)), nearWord(s, known))
	return g, false
}

// joinWords returns a list of words in the form a, b or c.
func joinWords[T ~string](words []T, last string) string {
	var b strings.Builder
	for i, w := range words {
		switch i {
		case 0:
		case len(words) - 1:
			b.WriteString(" " + last + " ")
		default:
			b.WriteString(", ")
		}
		b.WriteString(string(w))
	}
	return b.String()
}

// nearWord returns the hint for an unknown word.
func nearWord(word string, known []string) string {
	if strings.Contains(word, ",") {
		return "write a list as in [" + strings.Join(known[:2], ", ") + "]"
	}
	return didYouMean(word, known)
}

// groupRemote decodes remote/N.
func (d *decoder) groupRemote(path string, n *yaml.Node) (g TraceGroupBy, ok bool) {
	bits := 0
	if parts := byText.FindStringSubmatch(n.Value); parts != nil {
		bits, _ = strconv.Atoi(parts[1]) // two digits
	}
	if bits >= 1 && bits <= 32 {
		return TraceGroupBy{GroupRemote, bits, 2 * bits}, true
	}
	hint := "remote/24 has 24 bits of IPv4 addresses and 48 of IPv6"
	switch n.Value {
	case "remote":
		hint = "groups need a bound: " + hint
	case "remote/0":
		hint = "groups need a bound: " + hint + "; leave it out for all addresses together"
	}
	d.refuse(path, positionOf(n), "must be remote/N, N from 1 to 32, or {remote: {ipv4: N, ipv6: N}}, is "+describe(n), hint)
	return g, false
}
