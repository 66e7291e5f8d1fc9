// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"reflect"
	"strconv"

	"go.yaml.in/yaml/v4"
)

// decodeBigTCPSize decodes a size with or without a unit.
func decodeBigTCPSize(d *decoder, path string, n *yaml.Node, _ reflect.StructTag) any {
	if n.Kind != yaml.ScalarNode {
		d.refuse(path, positionOf(n), "must be off or a size such as 192KB, is "+describe(n), "")
		return nil
	}
	if hint := unquote(n); hint != "" {
		d.refuse(path, positionOf(n), "must be off or a size such as 192KB, is "+describe(n), hint)
		return nil
	}
	size, message, hint := parseBigTCPSize(n.Value)
	if message != "" {
		d.refuse(path, positionOf(n), message+", is "+describe(n), hint)
		return nil
	}
	return size
}

// bigTCPSizeSchema has no range for values with a unit, because a schema can restrict only numbers.
func bigTCPSizeSchema() schema {
	return schema{OneOf: []schema{
		{Type: "integer", Minimum: new(bigTCPOff), Maximum: new(bigTCPMost)},
		{Type: "string", Pattern: notations[KindSize].pattern()},
		{Enum: []string{"off"}},
	}}
}

// checkBigTCP refuses rules that set nothing or can never apply.
func (d *decoder) checkBigTCP(p *Policy) {
	for i, r := range p.BigTCP {
		path := fmt.Sprintf("bigtcp[%d]", i)
		if !d.given(path+".ipv6") && !d.given(path+".ipv4") && d.given(path+".interface") {
			d.refuseAt(path, "must have ipv6, ipv4 or both", "ipv6: 192KB; an omitted family is unchanged")
		}
		if r.Interface == "" || d.bad[path+".netns"] {
			continue
		}
		for j, first := range p.BigTCP[:i] {
			if first.Netns != r.Netns || d.bad[fmt.Sprintf("bigtcp[%d].netns", j)] {
				continue
			}
			switch at := fmt.Sprintf("bigtcp[%d]", j); {
			case first.Interface == r.Interface:
				d.refuseAt(path+".interface", fmt.Sprintf("%s is already %s, line %d", strconv.Quote(r.Interface), at, d.at[at].line),
					"give both families in one rule")
			case first.Interface != "" && r.Named() && first.Matches(r.Interface):
				d.refuseAt(path+".interface", fmt.Sprintf("%s is matched by %s, line %d, which decides", strconv.Quote(r.Interface), at, d.at[at].line),
					"put it first")
			default:
				continue
			}
			break
		}
	}
}
