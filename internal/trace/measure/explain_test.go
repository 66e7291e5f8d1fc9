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
			"180 ms of 201 ms before it was sent: the congestion window, 10 packets of 1448 B with 10 in flight, had no room for the 65.2 KB to be sent",
			"that takes about 5 round trips of 21 ms", "",
		},
		"a congestion window that acknowledgements open late": {
			far(way(-1, 300*ms, 12*us, 21*ms), func(s *Sample) { s.Cwnd, s.InFlight = 60, 30 }),
			config.StageStack, CauseCwnd,
			"300 ms of 321 ms before it was sent: the congestion window, 60 packets of 1448 B with 30 in flight, had room for 43.4 KB of the 65.2 KB to be sent",
			"it took longer: what was on the way was acknowledged late", "",
		},
		"more in flight than a window that was cut": {
			far(way(-1, 60*ms, 12*us, 21*ms), func(s *Sample) { s.Cwnd, s.InFlight = 5, 10 }),
			config.StageStack, CauseCwnd, "60 ms of 81 ms before it was sent: the congestion window, 5 packets of 1448 B with 10 in flight, had no room for the 65.2 KB to be sent", "", "",
		},
		"a reader that stopped": {
			far(way(-1, 3*time.Second, 12*us, 21*ms), func(s *Sample) { s.Window, s.Outstanding, s.InFlight, s.WindowLimited = 0, 0, 0, 2980*ms }),
			config.StageStack, CauseWindow, "3 s of 3.02 s before it was sent: the peer's window was closed, with 65.2 KB to be sent; it held the connection for 2.98 s",
			"the receiving application reads too slowly", "",
		},
		"a window that is almost full": {
			far(way(-1, 25*ms, 12*us, 21*ms), func(s *Sample) { s.Window, s.Outstanding = 65536, 60000 }),
			config.StageStack, CauseWindow, "25 ms of 46 ms before it was sent: the peer's window, 65.5 KB with 60 KB on the way, had room for 5.54 KB of the 65.2 KB to be sent", "", "",
		},
		"a window that closed meanwhile": {
			far(way(-1, 800*ms, 12*us, 21*ms), func(s *Sample) { s.WindowLimited = 780 * ms }),
			config.StageStack, CauseWindow, "800 ms of 821 ms before it was sent: the peer's window closed meanwhile; it held the connection for 780 ms", "", "",
		},
		"both windows full, the kernel counted the peer's": {
			far(way(-1, 400*ms, 12*us, 21*ms), func(s *Sample) {
				s.Cwnd, s.InFlight, s.Window, s.Outstanding, s.WindowLimited = 20, 20, 28960, 28960, 390*ms
			}),
			config.StageStack, CauseWindow, "400 ms of 421 ms before it was sent: the peer's window, 29 KB with 29 KB on the way, had no room for the 65.2 KB to be sent; it held the connection for 390 ms", "", "",
		},
		"both windows full, the kernel counted nothing": {
			far(way(-1, 400*ms, 12*us, 21*ms), func(s *Sample) { s.Cwnd, s.InFlight, s.Window, s.Outstanding = 20, 20, 28960, 28960 }),
			config.StageStack, CauseCwnd, "400 ms of 421 ms before it was sent: the congestion window, 20 packets of 1448 B with 20 in flight, had no room for the 65.2 KB to be sent",
			"the peer's window had room for 0 B only, but held the connection for 0 ns of the time", "",
		},
		"one tick of a window that had room": { // it proves nothing
			far(way(-1, 5*ms, 12*us, 300*us), func(s *Sample) {
				s.Cwnd, s.InFlight, s.WindowLimited, s.SRTT, s.MinRTT = 20, 20, 4*ms, ms, 250*us
			}),
			config.StageStack, CauseCwnd, "5 ms of 5.31 ms before it was sent: the congestion window, 20 packets of 1448 B with 20 in flight, had no room for the 65.2 KB to be sent", "", "",
		},
		"the peer's window is the smaller one": {
			far(way(-1, 40*ms, 12*us, 21*ms), func(s *Sample) { s.Cwnd, s.InFlight, s.Window, s.Outstanding = 30, 20, 30000, 28960 }),
			config.StageStack, CauseWindow, "40 ms of 61 ms before it was sent: the peer's window, 30 KB with 29 KB on the way, had room for 1.04 KB of the 65.2 KB to be sent", "", "",
		},
		"the congestion window is the smaller one": {
			far(way(-1, 40*ms, 12*us, 21*ms), func(s *Sample) { s.Cwnd, s.InFlight, s.Window, s.Outstanding = 20, 20, 30000, 28960 }),
			config.StageStack, CauseCwnd, "40 ms of 61 ms before it was sent: the congestion window, 20 packets of 1448 B with 20 in flight, had no room for the 65.2 KB to be sent", "", "",
		},
		"paced": {
			far(way(-1, 50*ms, 12*us, 21*ms), func(s *Sample) { s.PacingRate = 1_250_000 }),
			config.StageStack, CausePacing, "50 ms of 71 ms before it was sent: pacing at 10 Mbit/s takes 52.1 ms for 65.2 KB", "paced at 10 Mbit/s", "",
		},
		"paced slower than the congestion window lets": {
			far(way(-1, 55*ms, 12*us, 21*ms), func(s *Sample) { s.PacingRate, s.Cwnd = 1_250_000, 40 }),
			config.StageStack, CausePacing, "55 ms of 76 ms before it was sent: pacing at 10 Mbit/s takes 52.1 ms for 65.2 KB", "", "",
		},
		"paced faster than the congestion window lets": {
			far(way(-1, 90*ms, 12*us, 21*ms), func(s *Sample) { s.PacingRate, s.Cwnd, s.InFlight = 1_250_000, 10, 10 }),
			config.StageStack, CauseCwnd, "90 ms of 111 ms before it was sent: the congestion window, 10 packets of 1448 B with 10 in flight, had no room for the 65.2 KB to be sent", "", "",
		},
		"paced, but fast": {
			far(way(-1, 50*ms, 12*us, 21*ms), func(s *Sample) { s.PacingRate = 1_250_000_000 }),
			config.StageStack, CauseUnknown, "50 ms of 71 ms before it was sent: both windows had room for it, and nothing was lost", "the next hop's address was being resolved", "",
		},
		"Nagle and a delayed acknowledgement": {
			far(way(-1, 40*ms, 12*us, 300*us), func(s *Sample) {
				s.Length, s.Unsent, s.InFlight, s.Outstanding, s.Nagle, s.SRTT, s.MinRTT = 200, 200, 1, 200, true, 300*us, 250*us
			}),
			config.StageStack, CauseNagle, "40 ms of 40.3 ms before it was sent: its last segment was not full (200 B, a full one has 1448 B), and waited for the acknowledgement of what was on the way",
			"the peer delayed its acknowledgement", "",
		},
		"Nagle of the end of a long message": {
			far(way(-1, 21*ms, 12*us, 21*ms), func(s *Sample) { s.Unsent, s.Nagle = 65000, true }),
			config.StageStack, CauseNagle, "21 ms of 42 ms before it was sent: its last segment was not full (1288 B, a full one has 1448 B), and waited for the acknowledgement of what was on the way",
			"TCP_NODELAY", "the peer delayed",
		},
		"no Nagle with nothing in flight": {
			far(way(-1, 40*ms, 12*us, 300*us), func(s *Sample) {
				s.Length, s.Unsent, s.InFlight, s.Outstanding, s.Nagle = 200, 200, 0, 0, true
			}),
			config.StageStack, CauseUnknown, "40 ms of 40.3 ms before it was sent: both windows had room for it, and nothing was lost", "", "TCP_NODELAY",
		},
		"no Nagle of full segments": {
			far(way(-1, 40*ms, 12*us, 300*us), func(s *Sample) { s.Length, s.Unsent, s.Nagle = 2896, 2896, true }),
			config.StageStack, CauseUnknown, "40 ms of 40.3 ms before it was sent: both windows had room for it, and nothing was lost", "", "",
		},
		"no Nagle for seconds": {
			far(way(-1, 3*time.Second, 12*us, 300*us), func(s *Sample) { s.Length, s.Unsent, s.Nagle = 200, 200, true }),
			config.StageStack, CauseUnknown, "3 s of 3 s before it was sent: both windows had room for it, and nothing was lost", "", "",
		},
		"no Nagle where the window is the limit": {
			far(way(-1, 40*ms, 12*us, 300*us), func(s *Sample) {
				s.Length, s.Unsent, s.Nagle, s.Window, s.Outstanding = 200, 200, true, 28960, 28960
			}),
			config.StageStack, CauseWindow, "40 ms of 40.3 ms before it was sent: the peer's window, 29 KB with 29 KB on the way, had no room for the 200 B to be sent", "", "",
		},
		"corked": {
			far(way(-1, 200*ms, 12*us, 21*ms), func(s *Sample) {
				s.Length, s.Unsent, s.Cork, s.Nagle, s.InFlight, s.Outstanding = 500, 500, true, true, 0, 0
			}),
			config.StageStack, CauseCork, "200 ms of 221 ms before it was sent: the application asked to wait for more (TCP_CORK or MSG_MORE), and the last segment of the 500 B to be sent was not full", "", "",
		},
		"behind others in a rate limit": {
			far(way(-1, 700*ms, 52*ms, 300*us), func(s *Sample) { s.Length, s.Unsent, s.Cwnd, s.SRTT, s.MinRTT = 900_000, 900_000, 1000, 60*ms, 250*us }),
			config.StageStack, CauseLocalQueue, "700 ms of 752 ms before it was sent: the kernel lets no more of a connection into a queueing discipline that is behind, as 52 ms in it show", "", "",
		},
		"a send buffer that is too small": {
			far(way(-1, 100*ms, 12*us, 21*ms), func(s *Sample) { s.BufferLimited = 80 * ms }),
			config.StageStack, CauseSendBuffer, "100 ms of 121 ms before it was sent: the send buffer was too small to keep the connection busy, for 80 ms", "", "",
		},
		"behind what was lost": {
			far(way(-1, 450*ms, 12*us, 21*ms), func(s *Sample) { s.Cwnd, s.InFlight, s.Retransmits = 40, 20, 12 }),
			config.StageStack, CauseLoss, "450 ms of 471 ms before it was sent: it waited while lost segments of the connection were sent again (12 times until its acknowledgement)",
			"without loss it would have taken about 21 ms to send", "",
		},
		"a congestion window that losses made small": {
			far(way(-1, 110*ms, 12*us, 21*ms), func(s *Sample) { s.Cwnd, s.InFlight, s.Retransmits = 10, 10, 2 }),
			config.StageStack, CauseCwnd, "110 ms of 131 ms before it was sent: the congestion window, 10 packets of 1448 B with 10 in flight, had no room for the 65.2 KB to be sent",
			"sent again 2 times, which makes the congestion window smaller", "",
		},
		"a closed window with a loss": {
			far(way(-1, 45*ms, 12*us, 300*us), func(s *Sample) { s.Window, s.Outstanding, s.Retransmits, s.SRTT, s.MinRTT = 0, 0, 1, ms, 250*us }),
			config.StageStack, CauseWindow, "45 ms of 45.3 ms before it was sent: the peer's window was closed, with 65.2 KB to be sent", "", "",
		},

		// send
		"sendmsg that waits for the buffer, and that for the peer": {
			far(way(900*ms, 30*ms, 12*us, 21*ms), func(s *Sample) { s.Window, s.Outstanding, s.Unsent = 65536, 65536, 400_000 }),
			config.StageSend, CauseSendBuffer, "900 ms of 951 ms in sendmsg: the application was blocked, most likely by a full send buffer: at the end it held 466 KB, 400 KB of them not sent yet",
			"what kept the buffer full: the peer's window, 65.5 KB with 65.5 KB on the way, had no room", "",
		},
		"sendmsg that waits for the buffer, and that for the congestion window": {
			far(way(900*ms, 30*ms, 12*us, 21*ms), func(s *Sample) { s.Cwnd, s.InFlight, s.Unsent = 20, 20, 400_000 }),
			config.StageSend, CauseSendBuffer, "900 ms of 951 ms in sendmsg: the application was blocked, most likely by a full send buffer: at the end it held 429 KB, 400 KB of them not sent yet",
			"what kept the buffer full: the congestion window", "",
		},
		"sendmsg that waits for a buffer that is too small": {
			far(way(900*ms, 30*us, 12*us, 21*ms), func(s *Sample) { s.Outstanding, s.Unsent, s.InFlight = 87_000, 1448, 60 }),
			config.StageSend, CauseSendBuffer, "900 ms of 921 ms in sendmsg: the application was blocked, most likely by a full send buffer: at the end it held 88.4 KB, 1.45 KB of them not sent yet",
			"a larger send buffer", "",
		},
		"sendmsg that waits with an empty buffer": {
			far(way(30*ms, 30*us, 12*us, 21*ms), func(s *Sample) { s.Length, s.Outstanding, s.Unsent, s.InFlight = 100, 0, 100, 0 }),
			config.StageSend, CauseUnknown, "30 ms of 51 ms in sendmsg: with 100 B in the send buffer it was hardly full: the host was short of memory or of processors, or another thread held the socket", "", "",
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
			config.StageQdisc, CauseLocalQueue, "80 ms of 101 ms in the queueing discipline: it queued on this host: a rate limit, or an interface that was busy or stopped", "", "",
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
			config.StageQdisc, CauseLocalDrop, "220 ms of 241 ms until the host sent it again: this host dropped it before a driver had it, and TCP sent it again",
			"stack 20 µs, dropped and sent again 220 ms, qdisc 300 µs, network 21 ms", "",
		},
		"requeued without a driver's stamp": { // which is no proof of a drop
			far(way(-1, 20*us, -1, -1), func(s *Sample) {
				s.Outcome, s.Repeats, s.Retransmits, s.Requeued = Retransmitted, 1, 1, 220*ms
				s.Stages[Total] = 241 * ms
			}),
			Total, CauseLoss, "241 ms of 241 ms from the queueing discipline to the acknowledgement: its last segment was lost, or its acknowledgement, and sent again once; the least round trip is 20 ms", "", "",
		},

		// network
		"the distance": {
			far(way(-1, 15*us, 12*us, 24*ms), nil),
			config.StageNetwork, CauseDistance, "24 ms of 24 ms from the driver to the acknowledgement: the connection's least round trip is 20 ms", "", "",
		},
		"the distance aside": {
			far(way(-1, 15*ms, 12*us, 21*ms), func(s *Sample) { s.Cwnd, s.InFlight = 20, 20 }),
			config.StageStack, CauseCwnd, "15 ms of 36 ms before it was sent: the congestion window, 20 packets of 1448 B with 20 in flight, had no room for the 65.2 KB to be sent", "", "",
		},
		"lost": {
			far(way(-1, 15*us, 12*us, 245*ms), func(s *Sample) { s.Outcome, s.Repeats, s.Retransmits = Retransmitted, 1, 1 }),
			config.StageNetwork, CauseLoss, "245 ms of 245 ms from the driver to the acknowledgement: its last segment was lost, or its acknowledgement, and sent again once; the least round trip is 20 ms", "", "",
		},
		"an earlier segment lost": {
			far(way(-1, 15*us, 12*us, 62*ms), func(s *Sample) { s.Retransmits = 3 }),
			config.StageNetwork, CauseLoss, "62 ms of 62 ms from the driver to the acknowledgement: segments before its last were lost and sent again, 3 times, and the acknowledgement waits for all; the least round trip is 20 ms", "", "",
		},
		"sent again without need": {
			far(way(-1, 15*us, 12*us, 22*ms), func(s *Sample) { s.Outcome, s.Repeats, s.Retransmits = Retransmitted, 1, 1 }),
			config.StageNetwork, CauseDistance, "22 ms of 22 ms from the driver to the acknowledgement: the connection's least round trip is 20 ms", "sent again once, without need", "",
		},
		"a queue on the way": {
			far(way(-1, 15*us, 12*us, 180*ms), func(s *Sample) { s.SRTT, s.Outstanding = 150*ms, 100_000 }),
			config.StageNetwork, CauseLate, "180 ms of 180 ms from the driver to the acknowledgement: 9.0 times the least round trip, 20 ms, and nothing was sent again: a queue on the way, or a peer that acknowledges late",
			"it is so for messages before too: the smoothed RTT is 150 ms", "lone segment",
		},
		"a delayed acknowledgement": {
			far(way(-1, 15*us, 12*us, 61*ms), func(s *Sample) { s.Length, s.Unsent, s.InFlight, s.Outstanding = 100, 100, 0, 0 }),
			config.StageNetwork, CauseLate, "61 ms of 61 ms from the driver to the acknowledgement: 3.0 times the least round trip, 20 ms, and nothing was sent again: a queue on the way, or a peer that acknowledges late",
			"it went out as a lone segment", "messages before",
		},
		"in the NIC": {
			far(way(-1, 15*us, 12*us, 60*ms), func(s *Sample) { s.Stages[config.StageNIC] = 39 * ms }),
			config.StageNIC, CauseLocalQueue, "60 ms of 60 ms from the driver to the acknowledgement: 39 ms of them until the NIC's timestamp, in the queues of driver and NIC",
			"network 60 ms (until the NIC's timestamp 39 ms)", "",
		},
		"a host that is not idle": {
			far(way(-1, 15*us, 12*us, 700*us), func(s *Sample) { s.SRTT, s.MinRTT = 90*us, 60*us }),
			config.StageNetwork, CauseNothing, "700 µs of 727 µs from the driver to the acknowledgement: the least round trip is 60 µs, and hosts that are not idle add so much", "", "",
		},
		"the least round trip is not known": {
			far(way(-1, 15*us, 12*us, 24*ms), func(s *Sample) { s.MinRTT = 0 }),
			config.StageNetwork, CauseNothing, "24 ms of 24 ms from the driver to the acknowledgement: round trips of the connection took 21 ms", "", "",
		},
		"late, and the least round trip is not known": {
			far(way(-1, 15*us, 12*us, 90*ms), func(s *Sample) { s.MinRTT = 0 }),
			config.StageNetwork, CauseLate, "90 ms of 90 ms from the driver to the acknowledgement: round trips of the connection took 21 ms, and nothing was sent again: a queue on the way, or a peer that acknowledges late", "", "",
		},
		"no round trip is known": {
			far(way(-1, 15*us, 12*us, 90*ms), func(s *Sample) { s.MinRTT, s.SRTT = 0, 0 }),
			config.StageNetwork, CauseUnknown, "90 ms of 90 ms from the driver to the acknowledgement: the connection's round trip is not known, and nothing was sent again", "", "",
		},
		"two causes": {
			far(way(-1, 90*ms, 70*ms, 21*ms), func(s *Sample) { s.Cwnd, s.InFlight = 10, 10 }),
			config.StageStack, CauseCwnd, "90 ms of 181 ms before it was sent: the congestion window, 10 packets of 1448 B with 10 in flight, had no room for the 65.2 KB to be sent",
			"besides, 70 ms in the queueing discipline: it queued on this host", "",
		},

		// missing stamps
		"no driver's stamp": {
			far(way(-1, 15*us, -1, -1), func(s *Sample) { s.Stages[Total] = 90 * ms }),
			Total, CauseLate, "90 ms of 90 ms from the queueing discipline to the acknowledgement: 4.5 times the least round trip, 20 ms, and nothing was sent again: a queue on the way, or a peer that acknowledges late", "stack 15 µs, not stamped 90 ms", "",
		},
		"no stamp of the queueing discipline": {
			far(way(-1, -1, -1, 21*ms), func(s *Sample) { s.Stages[Total], s.Cwnd, s.InFlight = 90*ms, 10, 10 }),
			Total, CauseCwnd, "69 ms of 90 ms before the driver had it: the congestion window, 10 packets of 1448 B with 10 in flight, had no room for the 65.2 KB to be sent", "", "",
		},
		"no stamp": {
			far(way(-1, -1, -1, -1), func(s *Sample) { s.Stages[Total] = 22 * ms }),
			Total, CauseDistance, "22 ms of 22 ms until the acknowledgement: the connection's least round trip is 20 ms", "", "",
		},

		// not acknowledged
		"given up on the way": {
			far(way(-1, 15*us, 12*us, 15*time.Second), func(s *Sample) { s.Outcome, s.Repeats, s.Retransmits = Unacknowledged, 6, 6 }),
			config.StageNetwork, CauseUnacknowledged, "given up after 15 s: the connection ended before the peer acknowledged it, after the driver had it; its last segment had been sent again 6 times", "", "",
		},
		"given up before it was sent": {
			far(way(-1, -1, -1, -1), func(s *Sample) { s.Outcome, s.Window, s.Outstanding, s.Stages[Total] = Unacknowledged, 0, 0, 20*ms }),
			config.StageStack, CauseUnacknowledged, "given up after 20 ms: the connection ended before the peer acknowledged it, and it had not been sent: the peer's window was closed, with 65.2 KB to be sent", "reads too slowly", "",
		},
		"given up without a driver's stamp": {
			far(way(-1, 15*us, -1, -1), func(s *Sample) { s.Outcome, s.Retransmits, s.Stages[Total] = Unacknowledged, 1, 2*time.Second }),
			Total, CauseUnacknowledged, "given up after 2 s: the connection ended before the peer acknowledged it, after it was sent; the driver gave no timestamp; segments of the connection had been sent again once", "", "",
		},
		"overwritten": {
			far(way(-1, -1, -1, -1), func(s *Sample) { s.Outcome = Overwritten }),
			Total, CauseUnknown, "it was not measured: a later message replaced it in its packet before it was sent", "", "",
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
