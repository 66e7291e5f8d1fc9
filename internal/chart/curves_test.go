// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"encoding/xml"
	"errors"
	"io"
	"strings"
	"testing"
)

func TestCumulative(t *testing.T) {
	// Of two samples, one is at most 5, and both are at most 10 of a scale of 20.
	if got, want := cumulative([]float64{10, 5}, 20, 100, 0, 200), "M100 160H150V80H200V0H300"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

func TestRoundStep(t *testing.T) {
	for v, want := range map[float64]float64{0: 1, 0.07: 0.1, 1: 1, 1.1: 2, 30: 50, 51: 100} {
		if got := roundStep(v); got != want {
			t.Errorf("%v: got %v, want %v", v, got, want)
		}
	}
}

func TestChartOfSamples(t *testing.T) {
	svg := string(Chart{Title: "t", Legend: []string{"a", "b"}, Panels: []Panel{{Title: "p", Samples: [][]float64{{1, 2}, nil}}, {Title: "q", Samples: [][]float64{{4}, {3}}}}}.SVG())
	for d := xml.NewDecoder(strings.NewReader(svg)); ; {
		if _, err := d.Token(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
	if n := strings.Count(svg, `class="curve curve0"`); n != 2 {
		t.Errorf("%d curves of a, want 2", n)
	}
	if n := strings.Count(svg, `class="curve curve1"`); n != 1 {
		t.Errorf("%d curves of b, want 1: the first panel has no samples of b", n)
	}
}
