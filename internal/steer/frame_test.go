// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"testing"
	"time"

	"sockeye/internal/bpf"
)

// TestFrameWaits checks that a frame has the end of the wait of an empty slot before any packet waits, and none after it.
func TestFrameWaits(t *testing.T) {
	_, s, _ := startService(t, "reuseport", "    when_empty: {wait: 30s}")
	one, _, err := s.frame(1)
	if err != nil {
		t.Fatal(err)
	}
	for _, v := range one.Slots {
		if v.PID != 0 || v.Waiting != 0 || v.WaitUntil == nil || time.Until(*v.WaitUntil) > 30*time.Second {
			t.Errorf("slot %d: %+v", v.Slot, v)
		}
	}
	s.Mu.Lock()
	err = s.Path.SetWait(0, bpf.Wait{Length: uint64(30 * time.Second), Until: 1})
	s.Mu.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	if one, _, err = s.frame(1); err != nil || one.Slots[0].WaitUntil != nil {
		t.Errorf("after the wait: %+v, %v", one.Slots, err)
	}
}
