// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"math"
	"testing"
)

func TestVersionNumber(t *testing.T) {
	for output, want := range map[string]string{
		"HAProxy version 2.6.12-1+deb12u2 2024/06/18 - https://haproxy.org/":   "2.6.12-1+deb12u2",
		"NetFlow Accounting Daemon, nfacctd 1.7.8-git (20221231-0 (723b0cb2))": "1.7.8-git",
		"pasta 0.0~git20230309.7c7625d-1\nCopyright Red Hat":                   "0.0~git20230309.7c7625d-1",
		"passt 2026_10_02.0123abc":                                             "2026_10_02.0123abc",
		"nftables v1.0.6 (Lester Gooch #5)":                                    "1.0.6",
		"usage: no version":                                                    "",
	} {
		if got := versionNumber.FindString(output); got != want {
			t.Errorf("%q: version %q, want %q", output, got, want)
		}
	}
}

func TestTargets(t *testing.T) {
	d := Distribution{Low: 1.9, Median: 2, High: 2.1}
	for _, x := range []struct{ got, want Target }{
		{AtLeast("rate", "%.1f", 1.5, d), Target{"rate", "at least 1.5", "2.0 [1.9 .. 2.1]", "met"}},
		{AtLeast("rate", "%.1f", 2.5, d), Target{"rate", "at least 2.5", "2.0 [1.9 .. 2.1]", "missed"}},
		{AtMost("time", "%.1f ns", 1.5, d), Target{"time", "at most 1.5 ns", "2.0 ns [1.9 ns .. 2.1 ns]", "missed"}},
		{AtMost("time", "%.1f ns", 2.05, d), Target{"time", "at most 2.0 ns", "2.0 ns [1.9 ns .. 2.1 ns]", "met, within the noise"}},
		{AtMost("time", "%.0f", 1, Distribution{Median: Figure(math.NaN())}), Target{"time", "at most 1", "not measured", "not measured"}},
	} {
		if x.got != x.want {
			t.Errorf("%+v, want %+v", x.got, x.want)
		}
	}
}
