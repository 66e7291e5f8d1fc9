// SPDX-License-Identifier: Apache-2.0

package harness

import "testing"

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
