// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"strings"
	"testing"

	"sockeye/bench/harness"
)

// TestProgramsByLaunch has launches whose rounds agree with each other and whose figures differ: the interval must show the
// difference of the launches, however many rounds they have.
func TestProgramsByLaunch(t *testing.T) {
	runs := func(name string, launches ...[]float64) *programRuns {
		return &programRuns{name: name, title: name, mode: "lookup", ns: map[string][][]float64{"cold": launches}}
	}
	set := programSet{
		runs("lookup_empty", []float64{60, 61, 61}, []float64{60, 60, 60}, []float64{70, 70, 70}),
		runs("lookup", []float64{160, 162, 161}, []float64{260, 260, 260}, []float64{220, 220, 220}),
	}
	if got, want := set[1].above(set[0], "cold"), (harness.Distribution{Median: 150, P25: 100, P75: 200, Low: 100, High: 200}); got != want {
		t.Errorf("above the empty program: %+v, want %+v", got, want)
	}
	b, err := harness.JSON(&programReport{programs: set})
	if err != nil {
		t.Fatal(err)
	}
	text := strings.Join(strings.Fields(string(b)), "")
	for _, want := range []string{`"lookup":{"cold":150,"hot":null}`, `"reuseport":{"cold":null,"hot":null}`} {
		if !strings.Contains(text, want) {
			t.Errorf("the JSON has no %s:\n%s", want, b)
		}
	}
}
