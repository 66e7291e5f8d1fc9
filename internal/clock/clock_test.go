// SPDX-License-Identifier: Apache-2.0

package clock

import (
	"testing"
	"time"
)

func TestStartedAt(t *testing.T) {
	boot := time.Unix(1000, 0)
	if got, want := StartedAt(250, boot), time.Unix(1002, 5e8); !got.Equal(want) {
		t.Errorf("got %v, want %v", got, want)
	}
	now := time.Now()
	if got := BootTime(); got.After(now) || got.Before(now.AddDate(-10, 0, 0)) {
		t.Errorf("boot at %v", got)
	}
}
