// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"

	"sockeye/internal/stats"
)

// A Figure is NaN if it was not measured, and then null in JSON.
type Figure float64

// MarshalJSON writes a number of at most four decimals, or null.
func (f Figure) MarshalJSON() ([]byte, error) { return json.Marshal(Number(float64(f))) }

// Number is nil, JSON's null, for what was not measured.
func Number(v float64) *float64 {
	if math.IsNaN(v) || math.IsInf(v, 0) {
		return nil
	}
	v = math.Round(v*1e4) / 1e4
	return &v
}

// Rounded keeps four decimals.
func rounded(v float64) float64 { return math.Round(v*1e4) / 1e4 }

// Quantile of v, 0 to 1, by the nearest rank; NaN if there is none.
func Quantile(v []float64, q float64) Figure { return Figure(stats.Quantile(v, q)) }

// A Spread is what the rounds gave.
type Spread struct {
	Median float64 `json:"median"`
	Min    float64 `json:"min"`
	Max    float64 `json:"max"`
}

func SpreadOf(v []float64) Spread {
	if len(v) == 0 {
		return Spread{math.NaN(), math.NaN(), math.NaN()}
	}
	return Spread{stats.Median(v), slices.Min(v), slices.Max(v)}
}

func (s Spread) Format(verb string) string {
	if math.IsNaN(s.Median) {
		return "-"
	}
	return fmt.Sprintf(verb+" ["+verb+" .. "+verb+"]", s.Median, s.Min, s.Max)
}

func (s Spread) Rounded() Spread { return Spread{rounded(s.Median), rounded(s.Min), rounded(s.Max)} }

// A Distribution is of the rounds' ratios. The median of ever more rounds would
// lie between Low and High, with a confidence of 95 %.
type Distribution struct {
	Median Figure `json:"median"`
	P25    Figure `json:"p25"`
	P75    Figure `json:"p75"`
	Low    Figure `json:"low"`
	High   Figure `json:"high"`
}

func DistributionOf(v []float64) Distribution {
	low, high := stats.MedianInterval(v)
	return Distribution{Figure(stats.Median(v)), Quantile(v, 0.25), Quantile(v, 0.75), Figure(low), Figure(high)}
}

func (d Distribution) String() string {
	return fmt.Sprintf("%.3f [%.3f .. %.3f]", d.Median, d.P25, d.P75)
}

// Verdict holds a distribution against an aim, which is a least value.
func (d Distribution) Verdict(aim float64) string {
	switch a := Figure(aim); {
	case d.Low >= a:
		return "met"
	case d.High < a:
		return "missed"
	case d.Median >= a:
		return "met, within the noise"
	default:
		return "missed, within the noise"
	}
}
