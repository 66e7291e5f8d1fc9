// SPDX-License-Identifier: Apache-2.0

package rooms

import (
	"testing"

	"sockeye/internal/config"
	"sockeye/internal/steer/core"
	"sockeye/internal/steer/replay"
)

// TestQueueBounds checks that the bytes of the datagrams in memory are limited per slot: with sk_lookup, the data path
// limits only the number of datagrams.
func TestQueueBounds(t *testing.T) {
	r := New(&core.Service{Config: config.Service{Steering: config.Lookup, WhenEmpty: config.WhenEmpty{Room: &config.Room{Bytes: 1000}}}})
	r.filling[1], r.filling[2] = &fill{}, &fill{}
	of := func(size int) waitingDatagram {
		return waitingDatagram{Datagram: replay.Datagram{Payload: make([]byte, size)}, stored: 1}
	}
	for _, size := range []int{600, 300, 101, 100} {
		r.deliver(1, of(size))
	}
	r.deliver(2, of(500)) // another slot has its own limit
	if r.queuedBytes(1) != 1000 || r.queuedBytes(2) != 500 || r.lost[1] != 1 || r.lost[2] != 0 || r.left[1].Datagrams != 1 {
		t.Errorf("%d and %d bytes, lost %v, left %v", r.queuedBytes(1), r.queuedBytes(2), r.lost, r.left)
	}
	first, _ := r.dequeue(1)
	r.deliver(1, of(500))
	r.requeue(1, first)
	if r.queuedBytes(1) != 1500 {
		t.Errorf("%d bytes, want 1500: what is put back is never lost", r.queuedBytes(1))
	}
	for _, want := range []int{600, 300, 100, 500} {
		if d, ok := r.dequeue(1); !ok || len(d.Payload) != want {
			t.Errorf("%d bytes, %v, want %d", len(d.Payload), ok, want)
		}
	}
	if d, ok := r.dequeue(1); ok || r.queuedBytes(1) != 0 || r.queued[1] != nil {
		t.Errorf("an empty queue has %d bytes", len(d.Payload))
	}
}
