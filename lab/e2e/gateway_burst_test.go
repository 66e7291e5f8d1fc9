// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"sockeye/internal/config"
	"sockeye/lab/swarm"
	devices "sockeye/lab/traffic"
)

// TestIsolatedMemberInBursts sends bursts at the maximum rate of one sender. An isolated member must lose fewer
// datagrams than a plain member, because the gateway's socket queues datagrams that exceed the member's receive buffer.
func TestIsolatedMemberInBursts(t *testing.T) {
	const datagrams, rounds = 20_000, 3
	for _, mode := range []config.Steering{config.Reuseport, config.Lookup} {
		t.Run(string(mode), func(t *testing.T) {
			h := newHost(t, mode)
			h.setPolicy(2)
			h.startAgent()
			const isolated, plain = 0, 1
			for slot := range 2 {
				var wrap []string
				if h.isolated = slot == isolated; h.isolated {
					wrap = h.isolation(slot)
				}
				r := h.spec(slot)
				r.Counts = true
				h.startReceiver(fmt.Sprintf("receiver-%d", slot), r, wrap...)
			}
			h.ready(0, 1)
			home := h.homes(2)
			var lost [2]int
			for slot := range lost {
				i := slices.IndexFunc(addresses(100), func(a netip.Addr) bool { return home(a) == slot })
				from := swarm.Address(i)
				before := h.counted(from)
				for range rounds {
					h.burst(from, datagrams)
					now := h.counted(from)
					lost[slot] += datagrams - (now - before)
					before = now
				}
			}
			t.Logf("lost datagrams of %d: isolated member %d, plain member %d", rounds*datagrams, lost[isolated], lost[plain])
			if lost[isolated] > lost[plain]/2 {
				t.Error("the isolated member lost more than half as many datagrams as the plain member")
			}
		})
	}
}

// counted returns the number of datagrams from an address that a counting receiver has read. It waits until the receiver
// has read the last datagram.
func (h *host) counted(from netip.Addr) (n int) {
	h.Helper()
	// The request may be lost, too. On a busy host the reply may take seconds, behind all datagrams of a burst.
	wait := time.Second
	h.eventually("the count", func() error {
		return h.devices.Do(func() error {
			if n = probeUDP(from, ipfixPort, wait); n < 0 {
				wait = min(2*wait, answerTime/2)
				return fmt.Errorf("%v", landing{udp: n})
			}
			return nil
		})
	})
	return n
}

// burst sends IPFIX from an address in datagrams of the maximum size.
func (h *host) burst(from netip.Addr, n int) {
	h.Helper()
	message := slices.Repeat([]devices.Flow{loadFlow}, devices.MaxDatagram/devices.RecordLen4-1)
	h.must(h.devices.Do(func() error {
		e, err := devices.NewExporter(devices.ExporterConfig{
			Source: from, Target: target(from, ipfixPort), Messages: slices.Repeat([][]devices.Flow{message}, 64),
		})
		if err != nil {
			return err
		}
		defer e.Close()
		_, err = e.Send(n - 1) // in addition to the templates
		return err
	}))
}
