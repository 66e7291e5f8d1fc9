// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"math"
	"math/big"
	"regexp"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v4"
)

// unit is a unit of a notation, and its size in the smallest unit.
type unit struct {
	name string
	size int64
}

// notation is the notation of a kind of values.
type notation struct {
	noun  string // name of the kind, with an example
	whole string // unit of Setting.Value, for messages
	scale int64  // number of smallest units per unit of Setting.Value
	units []unit // format prefers the first of two units with equally short texts
}

// notations has the kinds of values that have a unit.
var notations = map[TuneKind]notation{
	KindSize: {"a size such as 150KB", "whole bytes", 1, []unit{
		{"GB", 1e9}, {"MB", 1e6}, {"KB", 1e3}, {"B", 1}, {"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10},
	}},
	KindDuration: {"a duration such as 10ms", "whole microseconds", 1, []unit{
		{"d", 24 * 60 * minute}, {"h", 60 * minute}, {"m", minute}, {"s", 1e6}, {"ms", 1e3}, {"us", 1},
	}},
	KindRate: {"a rate such as 2Gbit/s", "whole bytes a second", 8, []unit{
		{"Gbit/s", 1e9}, {"Mbit/s", 1e6}, {"kbit/s", 1e3}, {"bit/s", 1},
	}},
}

// maxDecimals is the maximum number of decimals of a value.
const maxDecimals = 9

var (
	quantityText   = regexp.MustCompile(`^([0-9]{1,18}(?:\.[0-9]{1,9})?)([A-Za-z/]*)$`)
	percentageText = regexp.MustCompile(`^([0-9]{1,3}(?:\.[0-9]{1,9})?)%$`)
	wholeNumber    = regexp.MustCompile(`^(-?(0|[1-9][0-9]*)|0x[0-9a-fA-F]+)$`)
)

// pattern returns the regular expression of values with a unit.
func (n notation) pattern() string {
	return `^[0-9]{1,18}(\.[0-9]{1,9})?(` + strings.ReplaceAll(n.names(), ", ", "|") + `)$`
}

// formatPercentage returns a share of 0 to 1 as a percentage with at most maxDecimals decimals.
func formatPercentage(share float64) string {
	const precision = 1e9 // maxDecimals
	return strconv.FormatFloat(math.Round(share*100*precision)/precision, 'f', -1, 64) + "%"
}

// bounds returns the range of an option's values as a text.
func bounds(o TuneOption) string {
	return FormatValue(o, o.Min) + " to " + FormatValue(o, o.Max)
}

// FormatValue returns the exact text of an option's value in the notation of the policy file: 150KB, 10ms, 2Gbit/s, 100,
// true. value is in the unit of [Setting]. Options of kind text have no such value.
func FormatValue(o TuneOption, value int64) string {
	if o.Kind == KindSwitch {
		return strconv.FormatBool(value != 0)
	}
	if n, ok := notations[o.Kind]; ok {
		return n.format(value)
	}
	return strconv.FormatInt(value, 10)
}

// format returns the shortest exact text of a value.
func (n notation) format(value int64) string {
	shortest := ""
	value *= n.scale
	for _, u := range n.units {
		if value < u.size && u.size > 1 {
			continue
		}
		text := strconv.FormatInt(value/u.size, 10)
		rest := value % u.size
		for i := 0; i < maxDecimals && rest > 0; i++ {
			if i == 0 {
				text += "."
			}
			text += strconv.FormatInt(rest*10/u.size, 10)
			rest = rest * 10 % u.size
		}
		if text += u.name; rest <= 0 && (shortest == "" || len(text) < len(shortest)) {
			shortest = text
		}
	}
	return shortest
}

// quantity decodes a value with a unit in the range of the option.
func (d *decoder) quantity(path string, n *yaml.Node, o TuneOption) (int64, bool) {
	notation := notations[o.Kind]
	value, bare, ok := notation.parse(n.Value)
	if bare {
		ok = o.Kind == KindSize && n.ShortTag() != "!!str" && decimal.MatchString(n.Value)
	}
	if !ok || n.Kind != yaml.ScalarNode {
		hint := "units: " + notation.names()
		switch near := notation.nearest(n.Value); {
		case o.Kind == KindSize && unquote(n) != "":
			hint = unquote(n)
		case near != "":
			hint = "write " + near
		}
		d.refuse(path, positionOf(n), "must be "+notation.noun+", is "+describe(n), hint)
		return 0, false
	}
	if !value.IsInt() {
		d.refuse(path, positionOf(n), "must be "+notation.whole+", is "+describe(n), "")
		return 0, false
	}
	if i := value.Num(); !i.IsInt64() || i.Int64() < o.Min || i.Int64() > o.Max {
		d.refuse(path, positionOf(n), "must be "+bounds(o)+", is "+describe(n), "")
		return 0, false
	}
	return value.Num().Int64(), true
}

// names returns the list of the units.
func (n notation) names() string {
	names := make([]string, len(n.units))
	for i, u := range n.units {
		names[i] = u.name
	}
	return strings.Join(names, ", ")
}

// parse parses a number, which may have decimals, with or without a unit. A bare number is in the smallest unit.
func (n notation) parse(s string) (value *big.Rat, bare, ok bool) {
	parts := quantityText.FindStringSubmatch(s)
	if parts == nil {
		return nil, false, false
	}
	value, _ = new(big.Rat).SetString(parts[1])
	value.Quo(value, big.NewRat(n.scale, 1))
	if parts[2] == "" {
		return value, true, true
	}
	for _, u := range n.units {
		if u.name == parts[2] {
			return value.Mul(value, big.NewRat(u.size, 1)), false, true
		}
	}
	return nil, false, false
}

// nearest returns the value with the correct case of its unit, or "" if the unit is unknown.
func (n notation) nearest(s string) string {
	if parts := quantityText.FindStringSubmatch(s); parts != nil {
		for _, u := range n.units {
			if strings.EqualFold(u.name, parts[2]) {
				return parts[1] + u.name
			}
		}
	}
	return ""
}

// number decodes a decimal or hexadecimal number in the range of the option.
func (d *decoder) number(path string, n *yaml.Node, o TuneOption) (int64, bool) {
	isNumber := n.Kind == yaml.ScalarNode && wholeNumber.MatchString(n.Value)
	if !isNumber || n.Style&(yaml.SingleQuotedStyle|yaml.DoubleQuotedStyle) != 0 {
		hint := ""
		if isNumber {
			hint = "write " + n.Value + ", without the quotes"
		}
		d.refuse(path, positionOf(n), "must be a whole number, decimal or 0x hexadecimal, is "+describe(n), hint)
		return 0, false
	}
	i, err := strconv.ParseInt(n.Value, 0, 64)
	if err != nil || i < o.Min || i > o.Max {
		d.refuse(path, positionOf(n), fmt.Sprintf("must be %s, is %s", bounds(o), describe(n)), "")
		return 0, false
	}
	return i, true
}

// parsePercentage parses 0.1% as 0.001.
func parsePercentage(s string) (share float64, ok bool) {
	parts := percentageText.FindStringSubmatch(s)
	if parts == nil {
		return 0, false
	}
	value, _ := new(big.Rat).SetString(parts[1])
	share, _ = value.Quo(value, big.NewRat(100, 1)).Float64()
	return share, true
}
