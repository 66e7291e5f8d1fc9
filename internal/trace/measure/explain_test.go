// SPDX-License-Identifier: Apache-2.0

//go:build !vm

package measure

import (
	"encoding/json"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"sockeye/internal/config"
)

// way returns the stages of a message, with the whole as their sum; -1 means unknown.
func way(send, stack, qdisc, network time.Duration) map[config.Stage]time.Duration {
	stages := map[config.Stage]time.Duration{}
	for stage, d := range map[config.Stage]time.Duration{
		config.StageSend: send, config.StageStack: stack, config.StageQdisc: qdisc, config.StageNetwork: network,
	} {
		if d >= 0 {
			stages[stage] = d
			stages[Total] += d
		}
	}
	return stages
}

const (
	us = time.Microsecond
	ms = time.Millisecond
)

// far is a message of 64 KB over a path of 20 ms without any other limit.
func far(stages map[config.Stage]time.Duration, change func(*Sample)) *Sample {
	s := &Sample{
		Outcome: Acked, Length: 65160, Stages: stages,
		Cwnd: 100, InFlight: 20, Outstanding: 28960, Unsent: 65160, Window: 1 << 20, MSS: 1448, SRTT: 21 * ms, MinRTT: 20 * ms,
	}
	if change != nil {
		change(s)
	}
	return s
}

func TestExplain(t *testing.T) {
	for name, test := range map[string]struct {
		sample *Sample
		stage  config.Stage
		cause  Cause
		text   string
		has    string // in a detail
		lacks  string // in all details
	}{
		// stack
		"a small congestion window": {
			far(way(-1, 180*ms, 12*us, 21*ms), func(s *Sample) { s.Cwnd, s.InFlight, s.Outstanding = 10, 10, 14480 }),
			config.StageStack, CauseCwnd,
			"180 ms of 201 ms before transmission: the congestion window, 10 packets of 1448 B with 10 in flight, allowed none of 65.2 KB unsent",
			"that takes about 5 round trips of 21 ms", "",
		},
		"a congestion window that acknowledgements open late": {
			far(way(-1, 300*ms, 12*us, 21*ms), func(s *Sample) { s.Cwnd, s.InFlight = 60, 30 }),
			config.StageStack, CauseCwnd,
			"300 ms of 321 ms before transmission: the congestion window, 60 packets of 1448 B with 30 in flight, allowed 43.4 KB of 65.2 KB unsent",
			"it took longer: data in flight was acknowledged late", "",
		},
		"more in flight than a window that was cut": {
			far(way(-1, 60*ms, 12*us, 21*ms), func(s *Sample) { s.Cwnd, s.InFlight = 5, 10 }),
			config.StageStack, CauseCwnd, "60 ms of 81 ms before transmission: the congestion window, 5 packets of 1448 B with 10 in flight, allowed none of 65.2 KB unsent", "", "",
		},
		"a reader that stopped": {
			far(way(-1, 3*time.Second, 12*us, 21*ms), func(s *Sample) { s.Window, s.Outstanding, s.InFlight, s.WindowLimited = 0, 0, 0, 2980*ms }),
			config.StageStack, CauseWindow, "3 s of 3.02 s before transmission: the peer's window was closed, with 65.2 KB unsent; it limited the connection for 2.98 s",
			"the receiving application reads too slowly", "",
		},
		"a window that is almost full": {
			far(way(-1, 25*ms, 12*us, 21*ms), func(s *Sample) { s.Window, s.Outstanding = 65536, 60000 }),
			config.StageStack, CauseWindow, "25 ms of 46 ms before transmission: the peer's window, 65.5 KB with 60 KB in flight, allowed 5.54 KB of 65.2 KB unsent", "", "",
		},
		"a window that closed meanwhile": {
			far(way(-1, 800*ms, 12*us, 21*ms), func(s *Sample) { s.WindowLimited = 780 * ms }),
			config.StageStack, CauseWindow, "800 ms of 821 ms before transmission: the peer's window closed in the meantime; it limited the connection for 780 ms", "", "",
		},
		"both windows full, the kernel counted the peer's": {
			far(way(-1, 400*ms, 12*us, 21*ms), func(s *Sample) {
				s.Cwnd, s.InFlight, s.Window, s.Outstanding, s.WindowLimited = 20, 20, 28960, 28960, 390*ms
			}),
			config.StageStack, CauseWindow, "400 ms of 421 ms before transmission: the peer's window, 29 KB with 29 KB in flight, allowed none of 65.2 KB unsent; it limited the connection for 390 ms", "", "",
		},
		"both windows full, the kernel counted nothing": {
			far(way(-1, 400*ms, 12*us, 21*ms), func(s *Sample) { s.Cwnd, s.InFlight, s.Window, s.Outstanding = 20, 20, 28960, 28960 }),
			config.StageStack, CauseCwnd, "400 ms of 421 ms before transmission: the congestion window, 20 packets of 1448 B with 20 in flight, allowed none of 65.2 KB unsent",
			"the peer's window allowed only 0 B, but limited the connection for 0 ns of the time", "",
		},
		"one tick of an open window": { // one tick is not evidence
			far(way(-1, 5*ms, 12*us, 300*us), func(s *Sample) {
				s.Cwnd, s.InFlight, s.WindowLimited, s.SRTT, s.MinRTT = 20, 20, 4*ms, ms, 250*us
			}),
			config.StageStack, CauseCwnd, "5 ms of 5.31 ms before transmission: the congestion window, 20 packets of 1448 B with 20 in flight, allowed none of 65.2 KB unsent", "", "",
		},
		"the peer's window is the smaller one": {
			far(way(-1, 40*ms, 12*us, 21*ms), func(s *Sample) { s.Cwnd, s.InFlight, s.Window, s.Outstanding = 30, 20, 30000, 28960 }),
			config.StageStack, CauseWindow, "40 ms of 61 ms before transmission: the peer's window, 30 KB with 29 KB in flight, allowed 1.04 KB of 65.2 KB unsent", "", "",
		},
		"the congestion window is the smaller one": {
			far(way(-1, 40*ms, 12*us, 21*ms), func(s *Sample) { s.Cwnd, s.InFlight, s.Window, s.Outstanding = 20, 20, 30000, 28960 }),
			config.StageStack, CauseCwnd, "40 ms of 61 ms before transmission: the congestion window, 20 packets of 1448 B with 20 in flight, allowed none of 65.2 KB unsent", "", "",
		},
		"paced": {
			far(way(-1, 50*ms, 12*us, 21*ms), func(s *Sample) { s.PacingRate = 1_250_000 }),
			config.StageStack, CausePacing, "50 ms of 71 ms before transmission: pacing at 10 Mbit/s takes 52.1 ms for 65.2 KB", "paced at 10 Mbit/s", "",
		},
		"paced slower than the congestion window lets": {
			far(way(-1, 55*ms, 12*us, 21*ms), func(s *Sample) { s.PacingRate, s.Cwnd = 1_250_000, 40 }),
			config.StageStack, CausePacing, "55 ms of 76 ms before transmission: pacing at 10 Mbit/s takes 52.1 ms for 65.2 KB", "", "",
		},
		"paced faster than the congestion window lets": {
			far(way(-1, 90*ms, 12*us, 21*ms), func(s *Sample) { s.PacingRate, s.Cwnd, s.InFlight = 1_250_000, 10, 10 }),
			config.StageStack, CauseCwnd, "90 ms of 111 ms before transmission: the congestion window, 10 packets of 1448 B with 10 in flight, allowed none of 65.2 KB unsent", "", "",
		},
		"paced, but fast": {
			far(way(-1, 50*ms, 12*us, 21*ms), func(s *Sample) { s.PacingRate = 1_250_000_000 }),
			config.StageStack, CauseUnknown, "50 ms of 71 ms before transmission: both windows allowed it, and nothing was lost", "the next hop's address was being resolved", "",
		},
		"Nagle and a delayed acknowledgement": {
			far(way(-1, 40*ms, 12*us, 300*us), func(s *Sample) {
				s.Length, s.Unsent, s.InFlight, s.Outstanding, s.Nagle, s.SRTT, s.MinRTT = 200, 200, 1, 200, true, 300*us, 250*us
			}),
			config.StageStack, CauseNagle, "40 ms of 40.3 ms before transmission: its last segment was not full (200 B, full: 1448 B), and waited for the acknowledgement of data in flight",
			"the peer delayed its acknowledgement", "",
		},
		"Nagle of the end of a long message": {
			far(way(-1, 21*ms, 12*us, 21*ms), func(s *Sample) { s.Unsent, s.Nagle = 65000, true }),
			config.StageStack, CauseNagle, "21 ms of 42 ms before transmission: its last segment was not full (1288 B, full: 1448 B), and waited for the acknowledgement of data in flight",
			"TCP_NODELAY", "the peer delayed",
		},
		"no Nagle with nothing in flight": {
			far(way(-1, 40*ms, 12*us, 300*us), func(s *Sample) {
				s.Length, s.Unsent, s.InFlight, s.Outstanding, s.Nagle = 200, 200, 0, 0, true
			}),
			config.StageStack, CauseUnknown, "40 ms of 40.3 ms before transmission: both windows allowed it, and nothing was lost", "", "TCP_NODELAY",
		},
		"no Nagle of full segments": {
			far(way(-1, 40*ms, 12*us, 300*us), func(s *Sample) { s.Length, s.Unsent, s.Nagle = 2896, 2896, true }),
			config.StageStack, CauseUnknown, "40 ms of 40.3 ms before transmission: both windows allowed it, and nothing was lost", "", "",
		},
		"no Nagle for seconds": {
			far(way(-1, 3*time.Second, 12*us, 300*us), func(s *Sample) { s.Length, s.Unsent, s.Nagle = 200, 200, true }),
			config.StageStack, CauseUnknown, "3 s of 3 s before transmission: both windows allowed it, and nothing was lost", "", "",
		},
		"no Nagle where the window is the limit": {
			far(way(-1, 40*ms, 12*us, 300*us), func(s *Sample) {
				s.Length, s.Unsent, s.Nagle, s.Window, s.Outstanding = 200, 200, true, 28960, 28960
			}),
			config.StageStack, CauseWindow, "40 ms of 40.3 ms before transmission: the peer's window, 29 KB with 29 KB in flight, allowed none of 200 B unsent", "", "",
		},
		"corked": {
			far(way(-1, 200*ms, 12*us, 21*ms), func(s *Sample) {
				s.Length, s.Unsent, s.Cork, s.Nagle, s.InFlight, s.Outstanding = 500, 500, true, true, 0, 0
			}),
			config.StageStack, CauseCork, "200 ms of 221 ms before transmission: the application requested to wait for more data (TCP_CORK or MSG_MORE), and the last segment of 500 B unsent was not full", "", "",
		},
		"behind others in a rate limit": {
			far(way(-1, 700*ms, 52*ms, 300*us), func(s *Sample) { s.Length, s.Unsent, s.Cwnd, s.SRTT, s.MinRTT = 900_000, 900_000, 1000, 60*ms, 250*us }),
			config.StageStack, CauseLocalQueue, "700 ms of 752 ms before transmission: TCP small queues limit the data of a connection in a slow queueing discipline, where this message spent 52 ms", "", "",
		},
		"a send buffer that is too small": {
			far(way(-1, 100*ms, 12*us, 21*ms), func(s *Sample) { s.BufferLimited = 80 * ms }),
			config.StageStack, CauseSendBuffer, "100 ms of 121 ms before transmission: the send buffer was too small to keep the connection busy, for 80 ms", "", "",
		},
		"behind what was lost": {
			far(way(-1, 450*ms, 12*us, 21*ms), func(s *Sample) { s.Cwnd, s.InFlight, s.Retransmits = 40, 20, 12 }),
			config.StageStack, CauseLoss, "450 ms of 471 ms before transmission: it waited while lost segments of the connection were retransmitted (12 times until its acknowledgement)",
			"without loss it would have taken about 21 ms to send", "",
		},
		"a congestion window that losses made small": {
			far(way(-1, 110*ms, 12*us, 21*ms), func(s *Sample) { s.Cwnd, s.InFlight, s.Retransmits = 10, 10, 2 }),
			config.StageStack, CauseCwnd, "110 ms of 131 ms before transmission: the congestion window, 10 packets of 1448 B with 10 in flight, allowed none of 65.2 KB unsent",
			"retransmitted 2 times, which reduces the congestion window", "",
		},
		"a closed window with a loss": {
			far(way(-1, 45*ms, 12*us, 300*us), func(s *Sample) { s.Window, s.Outstanding, s.Retransmits, s.SRTT, s.MinRTT = 0, 0, 1, ms, 250*us }),
			config.StageStack, CauseWindow, "45 ms of 45.3 ms before transmission: the peer's window was closed, with 65.2 KB unsent", "", "",
		},

		// send
		"sendmsg that waits for the buffer, and that for the peer": {
			far(way(900*ms, 30*ms, 12*us, 21*ms), func(s *Sample) { s.Window, s.Outstanding, s.Unsent = 65536, 65536, 400_000 }),
			config.StageSend, CauseSendBuffer, "900 ms of 951 ms in sendmsg: the application was blocked, most likely by a full send buffer: at the end it held 466 KB, 400 KB of them unsent",
			"reason for the full buffer: the peer's window, 65.5 KB with 65.5 KB in flight, allowed none of 400 KB unsent", "",
		},
		"sendmsg that waits for the buffer, and that for the congestion window": {
			far(way(900*ms, 30*ms, 12*us, 21*ms), func(s *Sample) { s.Cwnd, s.InFlight, s.Unsent = 20, 20, 400_000 }),
			config.StageSend, CauseSendBuffer, "900 ms of 951 ms in sendmsg: the application was blocked, most likely by a full send buffer: at the end it held 429 KB, 400 KB of them unsent",
			"reason for the full buffer: the congestion window", "",
		},
		"sendmsg that waits for a buffer that is too small": {
			far(way(900*ms, 30*us, 12*us, 21*ms), func(s *Sample) { s.Outstanding, s.Unsent, s.InFlight = 87_000, 1448, 60 }),
			config.StageSend, CauseSendBuffer, "900 ms of 921 ms in sendmsg: the application was blocked, most likely by a full send buffer: at the end it held 88.4 KB, 1.45 KB of them unsent",
			"a larger send buffer", "",
		},
		"sendmsg that waits with an empty buffer": {
			far(way(30*ms, 30*us, 12*us, 21*ms), func(s *Sample) { s.Length, s.Outstanding, s.Unsent, s.InFlight = 100, 0, 100, 0 }),
			config.StageSend, CauseUnknown, "30 ms of 51 ms in sendmsg: the send buffer held only 100 B: the host was short of memory or CPU time, or another thread held the socket lock", "", "",
		},
		"sendmsg that copies": {
			far(way(2*ms, 10*us, 12*us, 300*us), func(s *Sample) {
				s.Length, s.Unsent, s.Cwnd, s.SRTT, s.MinRTT = 1_000_000, 1_000_000, 1000, 300*us, 250*us
			}),
			config.StageSend, CauseNothing, "2 ms of 2.32 ms in sendmsg: copying 1 MB", "", "",
		},

		// qdisc
		"a rate limit": {
			far(way(-1, 20*us, 80*ms, 21*ms), nil),
			config.StageQdisc, CauseLocalQueue, "80 ms of 101 ms in the queueing discipline: it was queued on this host: a rate limit, or an interface that was busy or stopped", "", "",
		},
		"fq": {
			far(way(-1, 20*us, 48*ms, 21*ms), func(s *Sample) { s.PacingRate = 1_250_000 }),
			config.StageQdisc, CausePacing, "48 ms of 69 ms in the queueing discipline: pacing at 10 Mbit/s takes 54.4 ms for 68.1 KB", "fq", "",
		},
		"dropped by the host": {
			far(way(-1, 20*us, 300*us, 21*ms), func(s *Sample) {
				s.Outcome, s.Repeats, s.Retransmits, s.Requeued = Retransmitted, 1, 1, 220*ms
				s.Stages[Total] += s.Requeued
			}),
			config.StageQdisc, CauseLocalDrop, "220 ms of 241 ms until the retransmission: this host dropped it before a driver, and TCP retransmitted it",
			"stack 20 µs, dropped and retransmitted 220 ms, qdisc 300 µs, network 21 ms", "",
		},
		"requeued without a driver's stamp": { // which is not proof of a drop
			far(way(-1, 20*us, -1, -1), func(s *Sample) {
				s.Outcome, s.Repeats, s.Retransmits, s.Requeued = Retransmitted, 1, 1, 220*ms
				s.Stages[Total] = 241 * ms
			}),
			Total, CauseLoss, "241 ms of 241 ms from the queueing discipline to the acknowledgement: its last segment, or the acknowledgement, was lost; retransmitted once; the minimum RTT is 20 ms", "", "",
		},

		// network
		"the distance": {
			far(way(-1, 15*us, 12*us, 24*ms), nil),
			config.StageNetwork, CauseDistance, "24 ms of 24 ms from the driver to the acknowledgement: the minimum RTT of the connection is 20 ms", "", "",
		},
		"the distance aside": {
			far(way(-1, 15*ms, 12*us, 21*ms), func(s *Sample) { s.Cwnd, s.InFlight = 20, 20 }),
			config.StageStack, CauseCwnd, "15 ms of 36 ms before transmission: the congestion window, 20 packets of 1448 B with 20 in flight, allowed none of 65.2 KB unsent", "", "",
		},
		"lost": {
			far(way(-1, 15*us, 12*us, 245*ms), func(s *Sample) { s.Outcome, s.Repeats, s.Retransmits = Retransmitted, 1, 1 }),
			config.StageNetwork, CauseLoss, "245 ms of 245 ms from the driver to the acknowledgement: its last segment, or the acknowledgement, was lost; retransmitted once; the minimum RTT is 20 ms", "", "",
		},
		"an earlier segment lost": {
			far(way(-1, 15*us, 12*us, 62*ms), func(s *Sample) { s.Retransmits = 3 }),
			config.StageNetwork, CauseLoss, "62 ms of 62 ms from the driver to the acknowledgement: earlier segments were lost and retransmitted 3 times, and the acknowledgement is cumulative; the minimum RTT is 20 ms", "", "",
		},
		"needless retransmission": {
			far(way(-1, 15*us, 12*us, 22*ms), func(s *Sample) { s.Outcome, s.Repeats, s.Retransmits = Retransmitted, 1, 1 }),
			config.StageNetwork, CauseDistance, "22 ms of 22 ms from the driver to the acknowledgement: the minimum RTT of the connection is 20 ms", "retransmitted once without need", "",
		},
		"a queue in the network": {
			far(way(-1, 15*us, 12*us, 180*ms), func(s *Sample) { s.SRTT, s.Outstanding = 150*ms, 100_000 }),
			config.StageNetwork, CauseLate, "180 ms of 180 ms from the driver to the acknowledgement: 9.0 times the minimum RTT, 20 ms, and nothing was retransmitted: a queue in the network, or a peer that acknowledges late",
			"earlier messages were also late: the smoothed RTT is 150 ms", "lone segment",
		},
		"a delayed acknowledgement": {
			far(way(-1, 15*us, 12*us, 61*ms), func(s *Sample) { s.Length, s.Unsent, s.InFlight, s.Outstanding = 100, 100, 0, 0 }),
			config.StageNetwork, CauseLate, "61 ms of 61 ms from the driver to the acknowledgement: 3.0 times the minimum RTT, 20 ms, and nothing was retransmitted: a queue in the network, or a peer that acknowledges late",
			"it was sent as a single segment", "earlier messages",
		},
		"in the NIC": {
			far(way(-1, 15*us, 12*us, 60*ms), func(s *Sample) { s.Stages[config.StageNIC] = 39 * ms }),
			config.StageNIC, CauseLocalQueue, "60 ms of 60 ms from the driver to the acknowledgement: 39 ms of them until the NIC's timestamp, in the queues of driver and NIC",
			"network 60 ms (until the NIC's timestamp 39 ms)", "",
		},
		"a host that is not idle": {
			far(way(-1, 15*us, 12*us, 700*us), func(s *Sample) { s.SRTT, s.MinRTT = 90*us, 60*us }),
			config.StageNetwork, CauseNothing, "700 µs of 727 µs from the driver to the acknowledgement: the minimum RTT is 60 µs, and the difference is normal on a busy host", "", "",
		},
		"unknown minimum RTT": {
			far(way(-1, 15*us, 12*us, 24*ms), func(s *Sample) { s.MinRTT = 0 }),
			config.StageNetwork, CauseNothing, "24 ms of 24 ms from the driver to the acknowledgement: the RTT of the connection was 21 ms", "", "",
		},
		"late, and unknown minimum RTT": {
			far(way(-1, 15*us, 12*us, 90*ms), func(s *Sample) { s.MinRTT = 0 }),
			config.StageNetwork, CauseLate, "90 ms of 90 ms from the driver to the acknowledgement: the RTT of the connection was 21 ms, and nothing was retransmitted: a queue in the network, or a peer that acknowledges late", "", "",
		},
		"no round trip is known": {
			far(way(-1, 15*us, 12*us, 90*ms), func(s *Sample) { s.MinRTT, s.SRTT = 0, 0 }),
			config.StageNetwork, CauseUnknown, "90 ms of 90 ms from the driver to the acknowledgement: the RTT of the connection is unknown, and nothing was retransmitted", "", "",
		},
		"two causes": {
			far(way(-1, 90*ms, 70*ms, 21*ms), func(s *Sample) { s.Cwnd, s.InFlight = 10, 10 }),
			config.StageStack, CauseCwnd, "90 ms of 181 ms before transmission: the congestion window, 10 packets of 1448 B with 10 in flight, allowed none of 65.2 KB unsent",
			"besides, 70 ms in the queueing discipline: it was queued on this host", "",
		},

		// missing stamps
		"no driver's stamp": {
			far(way(-1, 15*us, -1, -1), func(s *Sample) { s.Stages[Total] = 90 * ms }),
			Total, CauseLate, "90 ms of 90 ms from the queueing discipline to the acknowledgement: 4.5 times the minimum RTT, 20 ms, and nothing was retransmitted: a queue in the network, or a peer that acknowledges late", "stack 15 µs, not stamped 90 ms", "",
		},
		"no stamp of the queueing discipline": {
			far(way(-1, -1, -1, 21*ms), func(s *Sample) { s.Stages[Total], s.Cwnd, s.InFlight = 90*ms, 10, 10 }),
			Total, CauseCwnd, "69 ms of 90 ms before the driver: the congestion window, 10 packets of 1448 B with 10 in flight, allowed none of 65.2 KB unsent", "", "",
		},
		"no stamp": {
			far(way(-1, -1, -1, -1), func(s *Sample) { s.Stages[Total] = 22 * ms }),
			Total, CauseDistance, "22 ms of 22 ms until the acknowledgement: the minimum RTT of the connection is 20 ms", "", "",
		},

		// not acknowledged
		"unacknowledged in the network": {
			far(way(-1, 15*us, 12*us, 15*time.Second), func(s *Sample) { s.Outcome, s.Repeats, s.Retransmits = Unacknowledged, 6, 6 }),
			config.StageNetwork, CauseUnacknowledged, "unacknowledged after 15 s: the connection closed before the acknowledgement, after the driver received it; its last segment was retransmitted 6 times", "", "",
		},
		"unacknowledged before transmission": {
			far(way(-1, -1, -1, -1), func(s *Sample) { s.Outcome, s.Window, s.Outstanding, s.Stages[Total] = Unacknowledged, 0, 0, 20*ms }),
			config.StageStack, CauseUnacknowledged, "unacknowledged after 20 ms: the connection closed before the acknowledgement, before transmission: the peer's window was closed, with 65.2 KB unsent", "reads too slowly", "",
		},
		"unacknowledged without a timestamp of the driver": {
			far(way(-1, 15*us, -1, -1), func(s *Sample) { s.Outcome, s.Retransmits, s.Stages[Total] = Unacknowledged, 1, 2*time.Second }),
			Total, CauseUnacknowledged, "unacknowledged after 2 s: the connection closed before the acknowledgement, after transmission; no timestamp of the driver; segments of the connection were retransmitted once", "", "",
		},
		"overwritten": {
			far(way(-1, -1, -1, -1), func(s *Sample) { s.Outcome = Overwritten }),
			Total, CauseUnknown, "it was not measured: a later message in the same packet replaced its timestamp request before transmission", "", "",
		},
	} {
		t.Run(name, func(t *testing.T) {
			e := Explain(test.sample)
			if e.Stage != test.stage || e.Cause != test.cause {
				t.Errorf("got %s, %s, want %s, %s", e.Stage, e.Cause, test.stage, test.cause)
			}
			if e.Text != test.text {
				t.Errorf("got  %s\nwant %s", e.Text, test.text)
			}
			all := strings.Join(e.Details, "\n")
			if !strings.Contains(all, test.has) || test.lacks != "" && strings.Contains(all, test.lacks) {
				t.Errorf("want %q, not %q, in\n%s", test.has, test.lacks, all)
			}
		})
	}
}

func TestExplainUnmeasured(t *testing.T) {
	for _, outcome := range Outcomes {
		e := Explain(&Sample{Outcome: outcome})
		_, none := unmeasured[outcome]
		if want := !slices.Contains(append(slices.Clone(Stamped), Unacknowledged, Discarded, Split), outcome); none != want || e.Text == "" || e.Details == nil {
			t.Errorf("%s: %+v", outcome, e)
		}
	}
}

func TestExplainOfNothing(t *testing.T) {
	if e := Explain(&Sample{}); e.Stage != Total || e.Cause != CauseUnknown || len(e.Details) != 1 {
		t.Errorf("got %+v", e)
	}
}

func FuzzExplain(f *testing.F) {
	add := func(s *Sample) {
		b, err := json.Marshal(s)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	add(far(way(900*ms, 30*ms, 12*us, 21*ms), nil))
	add(&Sample{Stages: way(-5, math.MaxInt64, math.MinInt64, 1), Requeued: math.MinInt64, SRTT: math.MaxInt64, Cwnd: math.MaxUint32, MSS: 1, Unsent: math.MaxUint32, PacingRate: 1})
	add(&Sample{Outcome: Unacknowledged, MinRTT: -1, Nagle: true, InFlight: 1, MSS: 7, Unsent: 1, Retransmits: 1, Repeats: 9})
	f.Fuzz(func(t *testing.T, b []byte) {
		var s Sample
		if json.Unmarshal(b, &s) != nil {
			return
		}
		if e := Explain(&s); e.Stage == "" || e.Cause == "" || e.Text == "" || len(e.Details) == 0 || strings.ContainsAny(e.Text, "\n") {
			t.Errorf("%s: %+v", b, e)
		}
	})
}

func TestFormatDuration(t *testing.T) {
	for d, want := range map[time.Duration]string{
		0: "0 ns", 1: "1 ns", 999: "999 ns", 1000: "1 µs", 1230: "1.23 µs", 12345: "12.3 µs", 123456: "123 µs", 999499: "999 µs", 999500: "1 ms",
		20100 * us: "20.1 ms", 1500 * ms: "1.5 s", 100 * time.Second: "100 s", 2 * time.Hour: "7200 s", -5 * ms: "-5 ms", math.MinInt64: "-0 ns",
	} {
		if got := FormatDuration(d); got != want {
			t.Errorf("%d ns: got %s, want %s", int64(d), got, want)
		}
	}
}
