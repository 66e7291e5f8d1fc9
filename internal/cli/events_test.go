// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"testing"
	"time"
)

func TestSinceTime(t *testing.T) {
	now := time.Date(2026, 1, 31, 12, 0, 0, 0, time.UTC)
	for text, want := range map[string]time.Time{
		"90s": now.Add(-90 * time.Second), "1h30m": now.Add(-90 * time.Minute), "2d": now.AddDate(0, 0, -2), "0s": now,
		"2026-01-02T15:04:05Z": time.Date(2026, 1, 2, 15, 4, 5, 0, time.UTC),
	} {
		if got, err := sinceTime(text, now); err != nil || !got.Equal(want) {
			t.Errorf("%s: %v, %v, want %v", text, got, err, want)
		}
	}
	for _, text := range []string{"", "-1h", "-1d", "d", "1.5d", "1", "99999999d", "yesterday", "2026-01-02"} {
		if got, err := sinceTime(text, now); err == nil {
			t.Errorf("%q: %v", text, got)
		}
	}
}
