// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"fmt"
	"slices"

	"sockeye/bench/harness"
)

// Targets implements harness.Report.
func (r *gatewayReport) Targets() (all []harness.Target) {
	for _, a := range gatewayAims {
		points, missed := r.held(a)
		if points == 0 {
			continue
		}
		t := harness.Target{Claim: "transfers: " + a.title, Goal: "at every point", Measured: fmt.Sprintf("%d of %d points", points-len(missed), points), Verdict: "met"}
		if len(missed) > 0 {
			t.Verdict = "missed"
		}
		all = append(all, t)
	}
	return append(append(all, r.tripTargets()...), r.programTargets()...)
}

// tripTargets returns the goals of round trips and connects.
func (r *gatewayReport) tripTargets() (all []harness.Target) {
	for _, x := range r.RR {
		for _, kind := range []struct {
			name string
			runs map[string][]rrResult
		}{{"round trip", x.Trips}, {"connect", x.Connects}} {
			for _, figure := range []struct {
				name string
				of   func(*rrResult) float64
			}{{"median", rrMedian}, {"P99", rrP99}} {
				for _, to := range []struct {
					side, title string
					goal        float64
				}{{sideNative, "native's", aimTrips}, {sidePastaNew, "the newest pasta's", 1}} {
					if !slices.Contains(r.Options.Sides, to.side) || !slices.Contains(r.Options.Sides, sideSockeye) {
						continue
					}
					d := harness.DistributionOf(ratiosOf(kind.runs, sideSockeye, to.side, figure.of))
					claim := fmt.Sprintf("%s of a %s to %s, %s", figure.name, kind.name, to.title, x.name())
					all = append(all, harness.AtMost(claim, "%.2f", to.goal, d))
				}
			}
		}
	}
	return all
}

// ratiosOf returns the ratios of a figure of two sides, computed within each round.
func ratiosOf(runs map[string][]rrResult, side, to string, of func(*rrResult) float64) (ratios []float64) {
	for i := range min(len(runs[side]), len(runs[to])) {
		ratios = append(ratios, of(&runs[side][i])/of(&runs[to][i]))
	}
	return ratios
}
