// SPDX-License-Identifier: Apache-2.0

package sockdiag

import (
	"fmt"
	"math"
	"strings"
	"time"

	"sockeye/room"
)

// Limit is the bottleneck of a connection.
type Limit string

// The limits. Application: no more data to send. CongestionWindow includes the pacing of BBR. Transmit: data waits
// although both windows are open, for pacing, for more data (Nagle's algorithm, TCP_CORK), or for queues of the host.
const (
	Application      Limit = "application"
	ReceiveWindow    Limit = "receive_window"
	CongestionWindow Limit = "congestion_window"
	SendBuffer       Limit = "send_buffer"
	Transmit         Limit = "transmit"
)

// Limits lists all limits.
var Limits = []Limit{Application, ReceiveWindow, CongestionWindow, SendBuffer, Transmit}

// Times contains the times that the kernel counts for a connection (tcp_chrono_type).
type Times struct {
	Busy          time.Duration `json:"busy_ns"`           // data was queued
	ReceiveWindow time.Duration `json:"receive_window_ns"` // part of Busy: the peer's window was full
	SendBuffer    time.Duration `json:"send_buffer_ns"`    // part of Busy: all data was sent, and the application waited for the send buffer
}

// Look is a reading of a connection, for a later comparison.
type Look struct {
	At    time.Time
	Times Times
	now   Limit
}

// Look returns a reading of the connection.
func (s *Socket) Look(at time.Time) Look {
	now, _ := s.Now()
	return Look{at, s.Times(), now}
}

// Verdict is the bottleneck of a connection, with its evidence.
type Verdict struct {
	By Limit // "" for a socket that cannot send
	// Share is the share of the time between two readings, or of the busy time since the start of the connection, that
	// the kernel attributes to the limit, 0 to 1; negative if unknown.
	Share float64
}

// JudgeSince returns the bottleneck between two readings.
func (s *Socket) JudgeSince(earlier, look Look) Verdict {
	interval, now := look.At.Sub(earlier.At), look.now
	if now == "" || interval <= 0 {
		return s.Judge()
	}
	t := look.Times.Since(earlier.Times)
	share := func(part time.Duration) float64 { return min(max(float64(part)/float64(interval), 0), 1) }
	if t.Busy < interval/2 {
		return Verdict{Application, 1 - share(t.Busy)}
	}
	if by, part := t.mostly(); by != "" {
		return Verdict{by, share(part)}
	}
	// The kernel does not divide the rest of the busy time. A reading without data to send, or between an
	// acknowledgement that opens the window and the next packet, is not evidence.
	switch {
	case now == Transmit && earlier.now == CongestionWindow:
		now = CongestionWindow
	case now != Application:
	case earlier.now != "" && earlier.now != Application:
		now = earlier.now
	case !s.AppLimited:
		now = CongestionWindow
	}
	return Verdict{now, share(t.Busy - t.ReceiveWindow - t.SendBuffer)}
}

// Since returns the times since an earlier reading.
func (t Times) Since(earlier Times) Times {
	return Times{
		max(t.Busy-earlier.Busy, 0), max(t.ReceiveWindow-earlier.ReceiveWindow, 0), max(t.SendBuffer-earlier.SendBuffer, 0),
	}
}

// Judge returns the current bottleneck, or the bottleneck of most of the busy time if the current one is not certain.
func (s *Socket) Judge() Verdict {
	now, sure := s.Now()
	t := s.Times()
	share := func(part time.Duration) float64 {
		if t.Busy <= 0 {
			return -1
		}
		return min(float64(part)/float64(t.Busy), 1)
	}
	if now == "" {
		return Verdict{Share: -1}
	}
	if !sure {
		if by, _ := t.mostly(); by != "" {
			now = by
		} else if s.AppLimited {
			now = Application
		}
	}
	switch now {
	case SendBuffer:
		return Verdict{now, share(t.SendBuffer)}
	case ReceiveWindow:
		return Verdict{now, share(t.ReceiveWindow)}
	}
	return Verdict{now, -1}
}

// Times returns the times since the start of the connection.
func (s *Socket) Times() Times {
	micro := func(n uint64) time.Duration {
		return time.Duration(min(n, math.MaxInt64/1000)) * time.Microsecond
	}
	return Times{micro(s.Info.Busy_time), micro(s.Info.Rwnd_limited), micro(s.Info.Sndbuf_limited)}
}

// Now returns the current bottleneck, or "" for a connection that cannot send. sure is false if a single reading is not
// sufficient.
func (s *Socket) Now() (by Limit, sure bool) {
	i := &s.Info
	switch {
	case !Sending.Has(s.State) || !s.HasInfo:
		return "", true
	case s.Payload == 0:
		return Application, true
	}
	flying := int64(i.Unacked) + int64(i.Retrans) - int64(i.Sacked) - int64(i.Lost)
	full := flying >= int64(i.Snd_cwnd)
	sent := int64(s.Payload) - int64(i.Notsent_bytes)
	// The windows will soon allow more than the unsent data: the send buffer would be the next limit.
	dry := s.crowded() && 2*int64(i.Notsent_bytes) < sent
	// The next segment must fit completely, as in tcp_snd_wnd_test.
	next := int64(min(i.Notsent_bytes, i.Snd_mss))
	closed := i.Snd_wnd > 0 && sent+next > int64(i.Snd_wnd) || i.Snd_wnd == 0 && i.Probes > 0
	switch {
	case i.Notsent_bytes == 0 && dry:
		return SendBuffer, true
	case i.Notsent_bytes == 0 && full:
		return CongestionWindow, false
	case i.Notsent_bytes == 0:
		return Application, false
	case full && !dry:
		return CongestionWindow, true
	case closed && !full:
		return ReceiveWindow, true
	case dry:
		return SendBuffer, false
	case next == int64(i.Snd_mss) && strings.HasPrefix(s.Congestion, "bbr"):
		return CongestionWindow, false // limited by pacing
	}
	return Transmit, false
}

// Cause is the reason for a small send buffer.
type Cause string

// The causes.
const (
	FixedBuffer  Cause = "fixed_buffer"  // the application has set SO_SNDBUF
	WriteMemory  Cause = "tcp_wmem"      // maximum of tcp_wmem
	NotArmed     Cause = "not_armed"     // no write waits, so the kernel does not grow the buffer
	NotGrown     Cause = "not_grown"     // FixedBuffer or NotArmed
	NotSentLowat Cause = "notsent_lowat" // the buffer is not full, but unsent data is limited
)

// Advice is the remedy for a connection that its send buffer limits.
type Advice struct {
	Cause  Cause  `json:"cause"`
	Detail string `json:"detail"`
	Hint   string `json:"hint"`
}

// Asked contains the options of a descriptor that sock_diag does not report.
type Asked struct {
	Fixed        bool // SO_BUF_LOCK has SOCK_SNDBUF_LOCK
	NotSentLowat int  // TCP_NOTSENT_LOWAT in bytes; 0: the value of the namespace
}

// Advise returns the cause and the remedy for a connection that its send buffer limits. t are the times of the
// verdict; asked is nil if the descriptor could not be read.
func (s *Socket) Advise(settings Settings, kernel room.Kernel, t Times, asked *Asked) Advice {
	most := settings.WriteMemory[2]
	lowat := settings.NotSentLowat
	if asked != nil && asked.NotSentLowat > 0 {
		lowat = asked.NotSentLowat
	}
	fixed := Advice{FixedBuffer, fmt.Sprintf("the application set SO_SNDBUF to a buffer of %d bytes%s", s.Buffer, s.ceiling()),
		"without SO_SNDBUF the kernel auto-tunes the buffer, up to net.ipv4.tcp_wmem"}
	switch {
	case most > 0 && s.Buffer >= most:
		fixed.Hint = "set a larger buffer, up to net.core.wmem_max; without SO_SNDBUF the kernel auto-tunes the buffer, up to net.ipv4.tcp_wmem"
	case most > 0:
		fixed.Hint = fmt.Sprintf("without SO_SNDBUF the kernel auto-tunes the buffer, up to %d bytes (net.ipv4.tcp_wmem)", most)
	}
	// The initial size of the kernel is larger (tcp_init_buffer_space). A smaller buffer was set by the application.
	const firstSegments = 2 * 10
	least := firstSegments * (int(s.Info.Snd_mss) + kernel.Overhead)
	by, _ := t.mostly()
	switch {
	case !s.crowded() && lowat > 0 && lowat < s.Buffer:
		return Advice{NotSentLowat, fmt.Sprintf("the buffer is not full, but TCP_NOTSENT_LOWAT limits unsent data to %d bytes", lowat),
			"set a larger TCP_NOTSENT_LOWAT, or net.ipv4.tcp_notsent_lowat"}
	case asked != nil && asked.Fixed:
		return fixed
	case asked == nil && most > 0 && (s.Buffer > most || s.Buffer < min(least, most)):
		return fixed
	case most > 0 && s.Buffer >= most:
		return Advice{WriteMemory, fmt.Sprintf("the buffer has the maximum size of net.ipv4.tcp_wmem, %d bytes%s", most, s.ceiling()),
			fmt.Sprintf("sysctl -w net.ipv4.tcp_wmem='%d %d %d' doubles the maximum", settings.WriteMemory[0], settings.WriteMemory[1], 2*most)}
	case asked == nil && by == SendBuffer:
		fixed.Detail = fmt.Sprintf("the application waits for buffer space, but the kernel does not grow the buffer of %d bytes%s: SO_SNDBUF was probably set", s.Buffer, s.ceiling())
		return fixed
	case asked == nil:
		return Advice{NotGrown, fmt.Sprintf("the buffer of %d bytes is full of data in flight%s; if the kernel does not grow it, SO_SNDBUF was set, or no write waits for buffer space", s.Buffer, s.ceiling()),
			"change the application: do not set SO_SNDBUF, and wait in poll(2) or write(2); --processes distinguishes the two causes, and needs the right to trace the process"}
	}
	return Advice{NotArmed, fmt.Sprintf("the buffer of %d bytes is full of data in flight%s, and the kernel grows it only for a writer that waits for buffer space", s.Buffer, s.ceiling()),
		"change the application: wait in poll(2), or write until write(2) returns EAGAIN"}
}

// crowded returns whether the send buffer is so full that a writer waits.
func (s *Socket) crowded() bool {
	snapshot := s.Snapshot(Settings{})
	return snapshot.Arming()
}

// muchOfBusy is the minimum share of the busy time for a limit to be the bottleneck. A connection limited by congestion
// control always has data to send and almost no such time, while a connection limited by its buffer or by the peer's
// window also spends time on sending.
const muchOfBusy = 0.25

// mostly returns the limit with a large share of the busy time, and its time, or "".
func (t Times) mostly() (by Limit, part time.Duration) {
	if by, part = SendBuffer, t.SendBuffer; t.ReceiveWindow > part {
		by, part = ReceiveWindow, t.ReceiveWindow
	}
	if t.Busy <= 0 || float64(part) < muchOfBusy*float64(t.Busy) {
		return "", 0
	}
	return by, part
}

// ceiling describes the maximum rate of the connection with its buffer, with a leading comma, or returns "".
func (s *Socket) ceiling() string {
	rtt := time.Duration(s.Info.Rtt) * time.Microsecond
	if rtt < time.Millisecond {
		return ""
	}
	rate := float64(s.Buffer) * 8 / rtt.Seconds()
	for _, unit := range []struct {
		name string
		size float64
	}{{"Gbit/s", 1e9}, {"Mbit/s", 1e6}, {"kbit/s", 1e3}} {
		if rate >= unit.size || unit.size == 1e3 {
			return fmt.Sprintf(", at most %.3g %s with an RTT of %v", rate/unit.size, unit.name, rtt.Round(100*time.Microsecond))
		}
	}
	return ""
}
