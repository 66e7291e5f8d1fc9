// SPDX-License-Identifier: Apache-2.0

package command

import "testing"

func TestMeasured(t *testing.T) {
	for want, got := range map[string]string{
		"0 µs": Microseconds(0), "0.25 µs": Microseconds(0.25), "9.99 µs": Microseconds(9.99), "10 µs": Microseconds(9.999), "99.9 µs": Microseconds(99.9),
		"100 µs": Microseconds(99.96), "999 µs": Microseconds(999.4), "1 ms": Microseconds(999.5), "1.5 ms": Microseconds(1500), "1 s": Microseconds(999_999),
		"123456 s": Microseconds(123_456e6),
		"0 %":      Percentage(0), "< 0.01 %": Percentage(0.00001), "0.01 %": Percentage(0.0001), "8.33 %": Percentage(1.0 / 12), "100 %": Percentage(1),
	} {
		if got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
