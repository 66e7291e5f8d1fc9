// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"encoding/xml"
	"errors"
	"io"
	"math"
	"strings"
	"testing"
)

func TestChart(t *testing.T) {
	svg := string(Chart{
		Title: "a < b", Legend: []string{"one", "two"},
		Panels: []Panel{{Title: "p", Bars: []Bar{{"x & y", "3", []float64{1, 2}}, {"z", "6", []float64{6, 0}}}}},
	}.SVG())
	for d := xml.NewDecoder(strings.NewReader(svg)); ; {
		if _, err := d.Token(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
	// The longest bar fills the space for bars, the others are in proportion.
	for _, want := range []string{"a &lt; b", "x &amp; y", `class="part0" x="230.0" y="92" width="63.3"`, `class="part1" x="293.3" y="92" width="126.7"`,
		`class="part0" x="230.0" y="122" width="380.0"`} {
		if !strings.Contains(svg, want) {
			t.Errorf("%s is not in\n%s", want, svg)
		}
	}
}

func TestLines(t *testing.T) {
	svg := string(Chart{Title: "t", Panels: []Panel{{Title: "p", Step: "s", Lines: []Line{
		{"a & b", []float64{0, 5, math.NaN(), 10, 0}}, {"c", nil},
	}}}}.SVG())
	for d := xml.NewDecoder(strings.NewReader(svg)); ; {
		if _, err := d.Token(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
	// The highest value is at the top, the last one at the right end; the missing one is a gap.
	for _, want := range []string{`points="60.0,242.0 182.5,167.0"`, `points="427.5,92.0 550.0,242.0"`, ">10<", ">4 s<", "a &amp; b"} {
		if !strings.Contains(svg, want) {
			t.Errorf("%s is not in\n%s", want, svg)
		}
	}
}

// TestShort checks the numbers beside an axis.
func TestShort(t *testing.T) {
	for v, want := range map[float64]string{7667.1: "7667", 1000: "1000", 999.4: "999", 1.144: "1.14", 0.2941: "0.294"} {
		if got := short(v); got != want {
			t.Errorf("%v is %s, want %s", v, got, want)
		}
	}
}
