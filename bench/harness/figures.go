// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"

	"sockeye/internal/stats"
)

// Figure is a measured value. A value that was not measured is NaN, and null in JSON.
type Figure float64

// MarshalJSON writes a number with at most four decimals, or null.
func (f Figure) MarshalJSON() ([]byte, error) { return json.Marshal(Number(float64(f))) }

// Number returns v with four decimals, and nil, which is null in JSON, for NaN and infinities.
func Number(v float64) *float64 {
	if math.IsNaN(v) || math.IsInf(v, 0) {
		return nil
	}
	v = rounded(v)
	return &v
}

// rounded keeps four decimals.
func rounded(v float64) float64 { return math.Round(v*1e4) / 1e4 }

// Quantile returns the quantile q of v, 0 to 1, by the nearest rank, and NaN if v is empty.
func Quantile(v []float64, q float64) Figure { return Figure(stats.Quantile(v, q)) }

// Spread describes the values of several rounds.
type Spread struct {
	Median float64 `json:"median"`
	Min    float64 `json:"min"`
	Max    float64 `json:"max"`
}

// SpreadOf returns the spread of v, and NaN for all fields if v is empty.
func SpreadOf(v []float64) Spread {
	if len(v) == 0 {
		return Spread{math.NaN(), math.NaN(), math.NaN()}
	}
	return Spread{stats.Median(v), slices.Min(v), slices.Max(v)}
}

// Format formats the spread as "median [min .. max]", each number by verb, and as "-" if nothing was measured.
func (s Spread) Format(verb string) string {
	if math.IsNaN(s.Median) {
		return "-"
	}
	return fmt.Sprintf(verb+" ["+verb+" .. "+verb+"]", s.Median, s.Min, s.Max)
}

// Rounded returns the spread with four decimals.
func (s Spread) Rounded() Spread { return Spread{rounded(s.Median), rounded(s.Min), rounded(s.Max)} }

// Distribution describes the ratios of many rounds. Low and High are the 95 % confidence interval of the median.
type Distribution struct {
	Median Figure `json:"median"`
	P25    Figure `json:"p25"`
	P75    Figure `json:"p75"`
	Low    Figure `json:"low"`
	High   Figure `json:"high"`
}

// DistributionOf returns the distribution of v.
func DistributionOf(v []float64) Distribution {
	low, high := stats.MedianInterval(v)
	return Distribution{Figure(stats.Median(v)), Quantile(v, 0.25), Quantile(v, 0.75), Figure(low), Figure(high)}
}

// String formats the distribution as "median [p25 .. p75]".
func (d Distribution) String() string {
	return fmt.Sprintf("%.3f [%.3f .. %.3f]", d.Median, d.P25, d.P75)
}

// Format formats the distribution as "median [low .. high]", each number by verb, and as "-" if nothing was measured.
func (d Distribution) Format(verb string) string {
	if math.IsNaN(float64(d.Median)) {
		return "-"
	}
	return fmt.Sprintf(verb+" ["+verb+" .. "+verb+"]", d.Median, d.Low, d.High)
}

// Verdict returns whether the median is at least aim.
func (d Distribution) Verdict(aim float64) string {
	switch a := Figure(aim); {
	case math.IsNaN(float64(d.Median)):
		return "not measured"
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
