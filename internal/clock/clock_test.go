// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"testing"
	"time"
)

func TestStartedAt(t *testing.T) {
	boot := time.Unix(1000, 0)
	if got, want := startedAt(250, boot), time.Unix(1002, 5e8); !got.Equal(want) {
		t.Errorf("got %v, want %v", got, want)
	}
	s := uint64(0)
	now := time.Now()
	if got := bootTime(); got.After(now) || got.Before(now.AddDate(-10, 0, 0)) {
		t.Errorf("boot at %v, start time %d", got, s)
	}
}
