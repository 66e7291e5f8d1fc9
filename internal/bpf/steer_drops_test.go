// SPDX-License-Identifier: Apache-2.0

package bpf_test

import (
	"errors"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/placement"
)

// TestDropsBySource compares the counts by source with the kernel's count of the socket, for both families and modes. Other
// sockets are not counted.
func TestDropsBySource(t *testing.T) {
	both(t, func(t *testing.T, lookup bool) {
		c := config(t, lookup, "udp [::]:4739")
		s := serve(t, c, 1, bpf.NoSlot, nil)
		s.seat(0)
		drops, err := s.Drops()
		if errors.Is(err, bpf.ErrNoDrops) {
			t.Skipf("kernel: %v", err)
		}
		check(t, err)
		defer drops.Close()
		other := newSocket(t, listen(t, "udp [::]:4740")[0], false)
		member := s.seats[0][0]
		for _, k := range []*socket{member, other} {
			check(t, unix.SetsockoptInt(k.fd, unix.SOL_SOCKET, unix.SO_RCVBUF, 0)) // the minimum
		}
		routes(t)
		sender := newSender(t)
		four, six, quiet := netip.MustParseAddr("127.0.1.1"), netip.MustParseAddr("fd00::7"), netip.MustParseAddr("127.0.1.2")
		send := func(from netip.Addr, port uint16, n int) {
			to := netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), port)
			if from.Is6() {
				to = netip.AddrPortFrom(netip.IPv6Loopback(), port)
			}
			for range n {
				sender.send(from, to)
			}
		}
		send(quiet, 4739, 1)
		send(four, 4739, 100)
		send(six, 4739, 50)
		send(four, 4740, 100)
		total := member.drops()
		if total == 0 || other.drops() == 0 {
			t.Fatalf("%d and %d drops, want some at both sockets", total, other.drops())
		}
		counts, err := drops.BySource()
		check(t, err)
		v4, v6 := counts[placement.Address(four)], counts[placement.Address(six)]
		if v4+v6 != total || v6 != 50 || v4 > 100 || len(counts) != 2 || drops.Source(placement.Address(four)) != v4 || drops.Source(placement.Address(quiet)) != 0 {
			t.Errorf("%v, want %d in total, and 50 of %s", counts, total, six)
		}
	})
}
