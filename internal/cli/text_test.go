// SPDX-License-Identifier: Apache-2.0

package cli

import "testing"

func TestMeasured(t *testing.T) {
	for want, got := range map[string]string{
		"0 µs": microseconds(0), "0.25 µs": microseconds(0.25), "9.99 µs": microseconds(9.99), "10 µs": microseconds(9.999), "99.9 µs": microseconds(99.9),
		"100 µs": microseconds(99.96), "999 µs": microseconds(999.4), "1 ms": microseconds(999.5), "1.5 ms": microseconds(1500), "1 s": microseconds(999_999),
		"123456 s": microseconds(123_456e6),
		"0 %":      percentage(0), "< 0.01 %": percentage(0.00001), "0.01 %": percentage(0.0001), "8.33 %": percentage(1.0 / 12), "100 %": percentage(1),
	} {
		if got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
