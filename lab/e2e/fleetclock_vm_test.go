// SPDX-License-Identifier: Apache-2.0

//go:build vm

package e2e_test

import (
	"fmt"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	labfleet "sockeye/lab/fleet"
	"sockeye/lab/swarm"
)

// TestFleetClock is that nothing moves, and no connection is lost, when the wall clock of all hosts and of etcd jumps, and that a
// drain and the death of a host then take as long as they do otherwise. Only a virtual machine has a clock that a test may set.
func TestFleetClock(t *testing.T) {
	f := newFleet(t, labfleet.Options{})
	a, b, c := f.addHost(), f.addHost(), f.addHost()
	f.await("the first table", f.Hosts, labfleet.Shared("a", "b", "c"))
	f.route(a, b, c)
	const devices = 8
	begun := f.load(devices, 10)
	f.pause()
	status, err := a.Status(t.Context())
	f.must(err)
	before, closed := status.Epoch, f.closed()
	unchanged := func(when string) {
		t.Helper()
		for _, h := range f.Hosts {
			s, err := h.Status(t.Context())
			f.must(err)
			if !s.Connected || !s.Healthy || s.Epoch != before || len(s.Problems) > 0 {
				t.Errorf("%s: host %s: connected %v, healthy %v, epoch %d, before %d: %v", when, h.Name, s.Connected, s.Healthy, s.Epoch, before, s.Problems)
			}
		}
		if now := f.closed(); now != closed {
			t.Errorf("%s: %d connections were closed", when, now-closed)
		}
	}
	const day = 24 * time.Hour
	for _, jump := range []time.Duration{time.Hour, -2 * time.Hour, 400 * day, -399 * day} {
		f.jump(jump)
		time.Sleep(labfleet.Lease + 2*time.Second) // the test is about this time
		unchanged(fmt.Sprintf("after a jump of %v", jump))
	}

	f.set(a, b, "drain")
	f.jump(-time.Hour)
	f.await("host b to drain", f.Hosts, labfleet.Shared("a", "c"))
	f.set(b, b, "ready")
	f.jump(time.Hour)
	f.await("host b to return", f.Hosts, labfleet.Shared("a", "b", "c"))
	f.pause()
	quiet := swarm.Now()
	f.pause() // what was sent until now has arrived

	f.jump(-day)
	time.Sleep(2 * time.Second) // etcd 3.4 knows the end of a lease by the wall clock until the next renewal (etcd issue 12291)
	died := swarm.Now()
	f.must(b.Cut())
	f.route(a, c)
	f.await("the death of b", []*labfleet.Host{a, c}, labfleet.Shared("a", "c"))
	took := swarm.Now() - died
	if waited := f.waited(swarm.Interval{From: died, To: died + took}); took-waited > 2*labfleet.Lease {
		t.Errorf("the death of a host was noticed after %v, %v of them without the waits for a CPU", took, took-waited)
	}
	t.Logf("the death of a host was noticed after %v", took.Round(time.Millisecond))
	f.finish(quiet)
	for _, at := range f.analysis.Missing() {
		if at < quiet {
			t.Fatalf("a datagram was lost %v after the beginning, and the host died after %v", at-begun, died-begun)
		}
	}
}

// jump sets the wall clock of the virtual machine forward, or back.
func (f *fleet) jump(by time.Duration) {
	f.Helper()
	now := unix.NsecToTimespec(time.Now().Add(by).UnixNano())
	if err := unix.ClockSettime(unix.CLOCK_REALTIME, &now); err != nil {
		f.Fatalf("set the clock: %v", err)
	}
}
