// SPDX-License-Identifier: Apache-2.0

package moves

import (
	"testing"
	"time"
)

// TestEndOfDump feeds the received bytes of a device and checks when its initial dump is over.
func TestEndOfDump(t *testing.T) {
	const second = time.Second
	for _, test := range []struct {
		name   string
		silent bool // connected without a byte
		// received is the total of the session, every half second.
		received []uint64
		end      time.Duration // 0: not over
	}{
		{"no session", false, make([]uint64, 40), 0},
		{"a session without a byte", true, make([]uint64, 40), 10 * second},
		{"a dump of 3 s, then keepalives", false, []uint64{0, 0, 1e6, 2e6, 3e6, 4e6, 5e6, 6e6, 6e6 + 50, 6e6 + 50, 6e6 + 100, 6e6 + 100, 6e6 + 100, 6e6 + 150}, 6 * second},
		{"a dump with a pause", false, []uint64{1e6, 2e6, 2e6, 2e6, 4e6, 5e6, 6e6, 6e6, 6e6, 6e6, 6e6, 6e6, 6e6}, 5*second + second/2},
		{"a steady flow of updates after the dump", false, []uint64{1e7, 2e7, 3e7, 3e7 + 1e5, 3e7 + 2e5, 3e7 + 3e5, 3e7 + 4e5, 3e7 + 5e5, 3e7 + 6e5}, 3*second + second/2},
		{"only an initiation message", false, []uint64{0, 200, 200, 200, 200, 200, 200}, 2*second + second/2},
		{"a new connection begins anew", false, []uint64{1e6, 2e6, 2e6, 2e6, 5e3, 1e6, 2e6, 3e6, 3e6, 3e6, 3e6, 3e6, 3e6}, 6 * second},
	} {
		m, now := &move{}, time.Now()
		var end time.Duration
		for i, received := range test.received {
			at := time.Duration(i) * moveInterval
			if m.sample(received > 0 || test.silent, received, now.Add(at)) {
				end = at
				break
			}
		}
		if end != test.end {
			t.Errorf("%s: over after %v, want %v", test.name, end, test.end)
		}
	}
}

// TestTimeoutOfMove checks that a device that needs long to connect has the whole timeout for its dump.
func TestTimeoutOfMove(t *testing.T) {
	const timeout = time.Minute
	begin := time.Now()
	for _, test := range []struct {
		name  string
		first time.Duration // first data; 0: none
		at    time.Duration
		want  bool
	}{
		{"not connected", 0, 59 * time.Second, false},
		{"not connected in time", 0, timeout, true},
		{"connected late", 55 * time.Second, 110 * time.Second, false},
		{"a long dump", 55 * time.Second, 115 * time.Second, true},
	} {
		m := &move{since: begin}
		if test.first > 0 {
			m.sample(true, 1, begin.Add(test.first))
		}
		m.sample(false, 0, begin.Add(test.at)) // the connection was lost
		if got := m.late(begin.Add(test.at), timeout); got != test.want {
			t.Errorf("%s: %v, want %v", test.name, got, test.want)
		}
	}
}

// TestPendingSYNs follows the SYNs that take room at a gate, interval by interval.
func TestPendingSYNs(t *testing.T) {
	for _, test := range []struct {
		name            string
		passed, arrived []int
		want            []int
	}{
		{"connected in the interval", []int{2, 0}, []int{2, 0}, []int{0, 0}},
		{"connected in the next interval", []int{2, 0, 0}, []int{0, 2, 0}, []int{2, 0, 0}},
		{"forged", []int{2, 0, 2, 0}, []int{0, 0, 0, 0}, []int{2, 0, 2, 0}},
		{"late devices before those of the interval", []int{1, 1, 0}, []int{0, 1, 1}, []int{1, 1, 0}},
		{"forged, and connected later", []int{1, 0, 0}, []int{0, 0, 1}, []int{1, 0, 0}},
	} {
		pending := 0
		for i, passed := range test.passed {
			if pending = pendingSYNs(pending, passed, test.arrived[i]); pending != test.want[i] {
				t.Errorf("%s, interval %d: %d pending, want %d", test.name, i, pending, test.want[i])
			}
		}
	}
}
