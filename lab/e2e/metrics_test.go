// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"sockeye/internal/config"
)

// TestMetricsOfQueues checks that datagrams and connections that a member does not take are in its queues, and that those
// without space there are counted.
func TestMetricsOfQueues(t *testing.T) {
	inBothModes(t, func(t *testing.T, mode config.Steering) {
		h := newHost(t, mode)
		h.setPolicy(2)
		h.serveMetrics()
		const backlog = 3 // the agent raises the backlog of a member to this limit
		h.must(h.collectors.Sysctl("core.somaxconn", fmt.Sprint(backlog)))
		h.startAgent()
		h.start(0)
		deaf := h.spec(1)
		deaf.Slot, deaf.Deaf = 1, true
		h.startReceiver("receiver-1", deaf)
		h.ready(0, 1)
		home := h.homes(2)
		all := addresses(40)
		h.flood(all, 4000)
		var unread, open int
		for _, a := range all {
			if home(a) == 1 {
				unread += 4000 / len(all)
			}
		}
		h.must(h.devices.Do(func() error {
			for _, a := range all {
				d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(a, 0)), Timeout: 200 * time.Millisecond}
				if home(a) == 0 || open == backlog+3 {
					continue
				}
				open++
				if c, err := d.Dial("tcp", target(a, bmpPort).String()); err == nil {
					h.Cleanup(func() { c.Close() })
				}
			}
			return nil
		}))
		if unread < 500 || open < backlog+3 {
			t.Fatalf("only %d datagrams and %d connections are for slot 1", unread, open)
		}
		h.eventually("the queues", func() error {
			metrics := h.scrape("127.0.0.1:9732")
			value := func(slot int, name, more string) float64 {
				full := fmt.Sprintf("sockeye_member_%s{%sservice=\"telemetry\",slot=\"%d\"}", name, more, slot)
				v, ok := metrics[full]
				if !ok {
					t.Fatalf("there is no %s", full)
				}
				return v
			}
			if used, limit := value(1, "receive_queue_bytes", ""), value(1, "receive_buffer_bytes", ""); used < limit/2 {
				return fmt.Errorf("%v of %v bytes in the queue of slot 1", used, limit)
			}
			if drops := value(1, "drops_total", `protocol="udp",`); drops < 10 || drops >= float64(unread) {
				return fmt.Errorf("%v of %d datagrams dropped", drops, unread)
			}
			// The kernel accepts one connection more than the backlog.
			if used, limit := value(1, "accept_queue", ""), value(1, "accept_backlog", ""); used != backlog+1 || limit != backlog {
				return fmt.Errorf("%v connections wait, with a backlog of %v", used, limit)
			}
			if drops := value(1, "drops_total", `protocol="tcp",`); drops < 2 {
				return fmt.Errorf("%v connection requests dropped", drops)
			}
			if used, accept := value(0, "receive_queue_bytes", ""), value(0, "accept_queue", ""); used > 0 || accept > 0 {
				return fmt.Errorf("slot 0 has %v bytes and %v connections in its queues", used, accept)
			}
			return nil
		})
	})
}

// TestMetricsOfStreams checks that devices with only one stream are counted, and others are not.
func TestMetricsOfStreams(t *testing.T) {
	h := newHost(t, config.Reuseport)
	h.setPolicy(2)
	h.serveMetrics()
	h.startAgent()
	h.start(0, 1)
	h.ready(0, 1)
	all := addresses(30)
	h.connectAll(all[:20]) // 10 with TCP alone
	h.flood(all[10:], 200) // 10 with UDP alone
	// Reads the streams: the metrics may have those of the first frame of the live views, which are up to 30 s old.
	h.must(h.get("/v1/missing", new(any)))
	metrics := h.scrape("127.0.0.1:9732")
	for stream, want := range map[string]float64{"tcp": 10, "udp": 10} {
		if got := metrics[fmt.Sprintf("sockeye_devices_one_stream{service=\"telemetry\",stream=\"%s\"}", stream)]; got != want {
			t.Errorf("%v devices with %s alone, want %v", got, stream, want)
		}
	}
}
