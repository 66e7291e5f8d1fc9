// SPDX-License-Identifier: Apache-2.0

package sockdiag_test

import (
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/sockdiag"
	"sockeye/room"
)

// sending returns a connection with open windows: 100 packets may be in flight, and the buffer has 1 MB.
func sending(change func(*sockdiag.Socket)) *sockdiag.Socket {
	s := &sockdiag.Socket{State: sockdiag.Established, Congestion: "cubic", HasInfo: true, HasMemory: true, Buffer: 1 << 20,
		Info: unix.TCPInfo{State: uint8(sockdiag.Established), Snd_mss: 1000, Snd_cwnd: 100, Snd_wnd: 1 << 20, Rtt: 100_000}}
	change(s)
	return s
}

// queue sets the number of packets of 1000 bytes in flight, and the number of unsent bytes.
func queue(s *sockdiag.Socket, packets, unsent uint32) {
	s.Info.Unacked, s.Info.Notsent_bytes = packets, unsent
	s.Payload = packets*1000 + unsent
	s.Queued = int(s.Payload) * 5 / 4
}

// spent sets the times, in milliseconds.
func spent(s *sockdiag.Socket, busy, window, buffer uint64) {
	s.Info.Busy_time, s.Info.Rwnd_limited, s.Info.Sndbuf_limited = busy*1000, window*1000, buffer*1000
}

func TestJudge(t *testing.T) {
	for _, test := range []struct {
		name   string
		change func(*sockdiag.Socket)
		want   sockdiag.Limit
		share  float64
	}{
		{"idle", func(s *sockdiag.Socket) { spent(s, 1000, 900, 0) }, sockdiag.Application, -1},
		{"all data in flight", func(s *sockdiag.Socket) { queue(s, 50, 0) }, sockdiag.Application, -1},
		{"all data in flight, mostly limited by the buffer", func(s *sockdiag.Socket) { queue(s, 50, 0); spent(s, 1000, 0, 400) }, sockdiag.SendBuffer, 0.4},
		{"all data in flight, mostly limited by the peer", func(s *sockdiag.Socket) { queue(s, 50, 0); spent(s, 1000, 500, 400) }, sockdiag.ReceiveWindow, 0.5},
		{"cwnd", func(s *sockdiag.Socket) { queue(s, 100, 100_000); spent(s, 1000, 0, 900) }, sockdiag.CongestionWindow, -1},
		{"cwnd, some lost", func(s *sockdiag.Socket) {
			queue(s, 120, 100_000)
			s.Info.Lost, s.Info.Sacked, s.Info.Retrans = 20, 10, 10
		}, sockdiag.CongestionWindow, -1},
		{"window", func(s *sockdiag.Socket) { queue(s, 50, 100_000); s.Info.Snd_wnd = 50_500 }, sockdiag.ReceiveWindow, -1},
		{"window, with its times", func(s *sockdiag.Socket) { queue(s, 50, 100_000); s.Info.Snd_wnd = 50_500; spent(s, 1000, 700, 0) }, sockdiag.ReceiveWindow, 0.7},
		{"zero window", func(s *sockdiag.Socket) { queue(s, 0, 100_000); s.Info.Snd_wnd, s.Info.Probes = 0, 1 }, sockdiag.ReceiveWindow, -1},
		{"the last bytes fit", func(s *sockdiag.Socket) { queue(s, 50, 400); s.Info.Snd_wnd = 50_500 }, sockdiag.Transmit, -1},
		{"corked", func(s *sockdiag.Socket) { queue(s, 0, 400) }, sockdiag.Transmit, -1},
		{"the application's last bytes", func(s *sockdiag.Socket) { queue(s, 10, 400); s.AppLimited = true }, sockdiag.Application, -1},
		{"paced by BBR", func(s *sockdiag.Socket) { queue(s, 50, 100_000); s.Congestion = "bbr" }, sockdiag.CongestionWindow, -1},
		{"full", func(s *sockdiag.Socket) { queue(s, 80, 0); s.Buffer = 100_000 }, sockdiag.SendBuffer, -1},
		{"buffer full, cwnd full", func(s *sockdiag.Socket) { queue(s, 100, 0); s.Buffer = 100_000 }, sockdiag.SendBuffer, -1},
		{"buffer full, much larger than cwnd", func(s *sockdiag.Socket) { queue(s, 100, 200_000); s.Buffer = 300_000 }, sockdiag.CongestionWindow, -1},
		{"listener", func(s *sockdiag.Socket) { s.State = sockdiag.Listening }, "", -1},
		{"no TCP_INFO", func(s *sockdiag.Socket) { s.HasInfo = false }, "", -1},
		{"no memory information", func(s *sockdiag.Socket) { queue(s, 80, 0); s.HasMemory, s.Buffer = false, 0 }, sockdiag.Application, -1},
	} {
		if v := sending(test.change).Judge(); v != (sockdiag.Verdict{By: test.want, Share: test.share}) {
			t.Errorf("%s: %+v, want %s %v", test.name, v, test.want, test.share)
		}
	}
}

func TestJudgeSince(t *testing.T) {
	begin := time.Unix(1000, 0)
	earlier := sending(func(s *sockdiag.Socket) { queue(s, 100, 100_000); spent(s, 5000, 5000, 0) }).Look(begin)
	for _, test := range []struct {
		name   string
		change func(*sockdiag.Socket)
		want   sockdiag.Limit
		share  float64
	}{
		{"no data sent between the readings", func(s *sockdiag.Socket) { spent(s, 5000, 5000, 0) }, sockdiag.Application, 1},
		{"a little", func(s *sockdiag.Socket) { queue(s, 100, 100_000); spent(s, 5400, 5000, 0) }, sockdiag.Application, 0.6},
		{"the buffer", func(s *sockdiag.Socket) { spent(s, 6000, 5000, 750) }, sockdiag.SendBuffer, 0.75},
		{"the window", func(s *sockdiag.Socket) { spent(s, 6000, 5500, 250) }, sockdiag.ReceiveWindow, 0.5},
		{"rest like the earlier reading", func(s *sockdiag.Socket) { s.AppLimited = true; spent(s, 6000, 5125, 0) }, sockdiag.CongestionWindow, 0.875},
		{"rest like the earlier reading, between two packets", func(s *sockdiag.Socket) { queue(s, 50, 100_000); spent(s, 6000, 5125, 0) }, sockdiag.CongestionWindow, 0.875},
		{"reading of another connection", func(s *sockdiag.Socket) { spent(s, 10, 0, 0) }, sockdiag.Application, 1},
		{"closing", func(s *sockdiag.Socket) { s.State = sockdiag.FinWait1; spent(s, 6000, 5000, 750) }, "", -1},
	} {
		s := sending(test.change)
		if v := s.JudgeSince(earlier, s.Look(begin.Add(time.Second))); v != (sockdiag.Verdict{By: test.want, Share: test.share}) {
			t.Errorf("%s: %+v, want %s %v", test.name, v, test.want, test.share)
		}
	}
	s := sending(func(s *sockdiag.Socket) { queue(s, 80, 0); s.Buffer = 100_000 })
	if v := s.JudgeSince(earlier, s.Look(begin)); v.By != sockdiag.SendBuffer || v.Share != -1 {
		t.Errorf("two readings at the same time: %+v", v)
	}
}

func TestAdvise(t *testing.T) {
	settings := sockdiag.Settings{WriteMemory: [3]int{4096, 16384, 4194304}, NotSentLowat: 1<<32 - 1}
	full := func(buffer int) *sockdiag.Socket {
		return sending(func(s *sockdiag.Socket) { s.Buffer, s.Queued, s.Payload = buffer, buffer, uint32(buffer)*4/5 })
	}
	waited := sockdiag.Times{Busy: time.Second, SendBuffer: 700 * time.Millisecond}
	fixed, free := &sockdiag.Asked{Fixed: true}, &sockdiag.Asked{}
	for _, test := range []struct {
		name  string
		s     *sockdiag.Socket
		times sockdiag.Times
		asked *sockdiag.Asked
		want  sockdiag.Cause
		told  string
	}{
		{"larger than the kernel's maximum", full(8 << 20), waited, nil, sockdiag.FixedBuffer, "net.core.wmem_max"},
		{"smaller than the kernel's initial size", full(20000), waited, nil, sockdiag.FixedBuffer, "buffer of 20000 bytes, at most 1.6 Mbit/s with an RTT of 100ms"},
		{"maximum size", full(4194304), waited, nil, sockdiag.WriteMemory, "tcp_wmem='4096 16384 8388608'"},
		{"maximum size, SO_SNDBUF set", full(4194304), waited, fixed, sockdiag.FixedBuffer, "SO_SNDBUF"},
		{"waiting writer, no growth", full(500000), waited, nil, sockdiag.FixedBuffer, "probably"},
		{"no waiting writer", full(500000), sockdiag.Times{Busy: time.Second}, nil, sockdiag.NotGrown, "--processes"},
		{"no waiting writer, descriptor read", full(500000), sockdiag.Times{Busy: time.Second}, free, sockdiag.NotArmed, "poll(2)"},
		{"SO_SNDBUF set, descriptor read", full(500000), sockdiag.Times{Busy: time.Second}, fixed, sockdiag.FixedBuffer, "500000 bytes"},
		{"small buffer, SO_SNDBUF not set", full(20000), waited, free, sockdiag.NotArmed, "poll(2)"},
		{"unsent data limited", sending(func(*sockdiag.Socket) {}), waited, &sockdiag.Asked{NotSentLowat: 16384}, sockdiag.NotSentLowat, "limits unsent data to 16384 bytes"},
	} {
		a := test.s.Advise(settings, room.Kernel{Overhead: 832}, test.times, test.asked)
		if a.Cause != test.want || !strings.Contains(a.Detail+a.Hint, test.told) || strings.ContainsAny(a.Detail+a.Hint, "\n%") {
			t.Errorf("%s: %+v, want %s", test.name, a, test.want)
		}
	}
	near := sending(func(s *sockdiag.Socket) { s.Info.Rtt = 100; s.Buffer = 20000; s.Queued = 20000 })
	if a := near.Advise(settings, room.Kernel{Overhead: 832}, waited, nil); strings.Contains(a.Detail, "bit/s") {
		t.Errorf("maximum rate of a connection without delay: %+v", a)
	}
	if a := full(20000).Advise(sockdiag.Settings{}, room.Kernel{}, waited, nil); strings.Contains(a.Detail+a.Hint, " 0 bytes") {
		t.Errorf("without settings: %+v", a)
	}
}
