// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"

	"sockeye/internal/stats"
)

// A figure is NaN if it was not measured, and then null in JSON.
type figure float64

// MarshalJSON writes a number of at most four decimals, or null.
func (f figure) MarshalJSON() ([]byte, error) { return json.Marshal(number(float64(f))) }

// number is nil, JSON's null, for what was not measured.
func number(v float64) *float64 {
	if math.IsNaN(v) || math.IsInf(v, 0) {
		return nil
	}
	v = math.Round(v*1e4) / 1e4
	return &v
}

// rounded keeps four decimals.
func rounded(v float64) float64 { return math.Round(v*1e4) / 1e4 }

// quantile of v, 0 to 1, by the nearest rank; NaN if there is none.
func quantile(v []float64, q float64) figure { return figure(stats.Quantile(v, q)) }

// A spread is what the rounds gave.
type spread struct {
	Median float64 `json:"median"`
	Min    float64 `json:"min"`
	Max    float64 `json:"max"`
}

func spreadOf(v []float64) spread {
	if len(v) == 0 {
		return spread{math.NaN(), math.NaN(), math.NaN()}
	}
	return spread{stats.Median(v), slices.Min(v), slices.Max(v)}
}

func (s spread) format(verb string) string {
	if math.IsNaN(s.Median) {
		return "-"
	}
	return fmt.Sprintf(verb+" ["+verb+" .. "+verb+"]", s.Median, s.Min, s.Max)
}

func (s spread) rounded() spread { return spread{rounded(s.Median), rounded(s.Min), rounded(s.Max)} }

// A distribution is of the rounds' ratios. The median of ever more rounds would
// lie between Low and High, with a confidence of 95 %.
type distribution struct {
	Median figure `json:"median"`
	P25    figure `json:"p25"`
	P75    figure `json:"p75"`
	Low    figure `json:"low"`
	High   figure `json:"high"`
}

func distributionOf(v []float64) distribution {
	low, high := stats.MedianInterval(v)
	return distribution{figure(stats.Median(v)), quantile(v, 0.25), quantile(v, 0.75), figure(low), figure(high)}
}

func (d distribution) String() string {
	return fmt.Sprintf("%.3f [%.3f .. %.3f]", d.Median, d.P25, d.P75)
}

// verdict holds a distribution against an aim, which is a least value.
func (d distribution) verdict(aim float64) string {
	switch a := figure(aim); {
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
