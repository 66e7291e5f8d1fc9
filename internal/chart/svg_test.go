// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"math"
	"slices"
	"testing"
)

func TestSpark(t *testing.T) {
	nan := math.NaN()
	for want, values := range map[string][]float64{
		"":                      {5},
		"M0 23L60 1L120 12":     {0, 4, 2},
		"M0 1h0.1M80 12L120 23": {4, nan, 2, 0},
		"M0 23h0.1M120 1h0.1":   {0, nan, 1},
		"M0 1L40 1L80 1L120 1":  {3, 3, 3, 3},
	} {
		if got := Spark(values); got != want {
			t.Errorf("%v: got %s, want %s", values, got, want)
		}
	}
	if got := Spark([]float64{0, 0, nan}); got != "" {
		t.Errorf("zeros: %s", got)
	}
}

func TestCells(t *testing.T) {
	got := Cells([][]uint8{
		{1, 1, 0, 2},
		{0, 1, 2, 1},
	}, 3)
	want := []string{"M1 1.5h1m1 0h1M0 0.5h2", "M2 1.5h1M3 0.5h1", ""}
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestGaps(t *testing.T) {
	if got, want := Gaps([]bool{false, true, false, false}), "M0 0h1v1h-1zM2 0h2v1h-2z"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}
