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

// unit is a unit of a notation, and how many of the smallest one it is.
type unit struct {
	name string
	size int64
}

// notation is how values of a kind are written.
type notation struct {
	noun  string // with an example
	whole string // what a value must be a whole number of
	scale int64  // of the smallest unit, that make 1 in Setting.Value
	units []unit // of two that give equally short texts, the first is written
}

// notations has the kinds of values that are written with a unit.
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

// maxDecimals bounds the digits after the point of a value.
const maxDecimals = 9

var (
	quantityText   = regexp.MustCompile(`^([0-9]{1,18}(?:\.[0-9]{1,9})?)([A-Za-z/]*)$`)
	percentageText = regexp.MustCompile(`^([0-9]{1,3}(?:\.[0-9]{1,9})?)%$`)
	wholeNumber    = regexp.MustCompile(`^(-?(0|[1-9][0-9]*)|0x[0-9a-fA-F]+)$`)
)

// names lists the units.
func (n notation) names() string {
	names := make([]string, len(n.units))
	for i, u := range n.units {
		names[i] = u.name
	}
	return strings.Join(names, ", ")
}

// pattern is the regular expression of values with a unit.
func (n notation) pattern() string {
	return `^[0-9]{1,18}(\.[0-9]{1,9})?(` + strings.ReplaceAll(n.names(), ", ", "|") + `)$`
}

// parse reads a number with or without a unit, which need not be whole. Without
// one it counts the smallest.
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

// nearest corrects the case of a value's unit; "" where that is not what is wrong.
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

// format writes a value as exactly and as shortly as the units allow.
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

// FormatValue writes a value of an option, in the unit of [Setting], as the policy
// file does: 150KB, 10ms, 2Gbit/s, 100, true. It is exact. An option of kind text
// has no such value.
func FormatValue(o TuneOption, value int64) string {
	if o.Kind == KindSwitch {
		return strconv.FormatBool(value != 0)
	}
	if n, ok := notations[o.Kind]; ok {
		return n.format(value)
	}
	return strconv.FormatInt(value, 10)
}

// formatPercentage writes a share of 1, to as many decimals as are read.
func formatPercentage(share float64) string {
	const precision = 1e9 // maxDecimals
	return strconv.FormatFloat(math.Round(share*100*precision)/precision, 'f', -1, 64) + "%"
}

// bounds names the range of an option's values.
func bounds(o TuneOption) string {
	return FormatValue(o, o.Min) + " to " + FormatValue(o, o.Max)
}

// quantity decodes a value with a unit, within the bounds of the option.
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

// number decodes a decimal or hexadecimal number, within the bounds of the option.
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

// parsePercentage reads 0.1% as 0.001.
func parsePercentage(s string) (share float64, ok bool) {
	parts := percentageText.FindStringSubmatch(s)
	if parts == nil {
		return 0, false
	}
	value, _ := new(big.Rat).SetString(parts[1])
	share, _ = value.Quo(value, big.NewRat(100, 1)).Float64()
	return share, true
}
