// SPDX-License-Identifier: Apache-2.0

// Package room tells how many bytes a TCP socket takes right now without a partial
// send.
//
// The kernel takes data as long as the memory of what is queued, sk_wmem_queued,
// is below the send buffer, sk_sndbuf. Memory is not payload: each packet that
// is queued (an skb) costs a fixed overhead besides its bytes, and is filled up to
// a goal of many segments before the next is begun (tcp_sendmsg_locked in
// net/ipv4/tcp.c, Linux 6.18). So the room is a number of whole packets, not a
// share of the buffer:
//
//	kernel, err := room.Calibrate()          // once
//	s, err := room.Take(fd)                  // a moment
//	e := kernel.Estimate(s, len(next), nil)  // arithmetic only
//	if s.Arming() { _, err = room.Arm(fd) }  // have the kernel grow the buffer
//
// Nothing here changes a socket's settings: setting SO_SNDBUF would end the
// kernel's own tuning of the buffer.
package room

import "math"

// Snapshot is what the kernel said of a TCP socket, all in bytes. SendBuffer and
// Queued are of one moment; Payload was read just after that, the rest just before. So an
// acknowledgement between them makes the estimate smaller, not larger.
type Snapshot struct {
	SendBuffer int // sk_sndbuf
	Queued     int // sk_wmem_queued: what is queued, sent or not, with its overhead
	Payload    int // of what is queued: SIOCOUTQ
	Unsent     int // of the payload: SIOCOUTQNSD
	MSS        int // tcpi_snd_mss
	SendWindow int // tcpi_snd_wnd; 0 before Linux 5.4
	// Sendable is what the windows let out now, Burst how large the packets are that
	// leave at once: by the pacing rate (tcp_tso_autosize), and at most half of the
	// congestion window.
	Sendable int
	Burst    int
	// Quota is how many segments more the congestion window lets out now, Flying how many
	// are on the way.
	Quota, Flying int
	// Recovering: the peer acknowledges selectively, or packets were lost. What it has then
	// lets others leave before its memory is free.
	Recovering bool
	// NotSentLowat is TCP_NOTSENT_LOWAT, or the sysctl's value where the socket has
	// none of its own. 0: not known.
	NotSentLowat int
	// Closed: the socket is not connected, or takes no data any more.
	Closed bool
	// Guessed: the kernel has no SO_MEMINFO (before 4.12), and Queued is the most that
	// it can be.
	Guessed bool
}

// Estimate is how much a socket takes, and what that was computed from. All are
// bytes.
type Estimate struct {
	// Safe is what can be promised to somebody: the kernel takes so much, if the
	// writes that follow are as large as was said to Estimate, or larger. It is a
	// multiple of the MSS.
	Safe int
	// Exact predicts what one large write takes now. The kernel takes more if
	// acknowledgements come while it does, and less if what leaves is paced, unless a
	// Tracker was told.
	Exact int

	Overhead int // of a packet that is queued
	Goal     int // payload of a full packet: size_goal of the kernel
	Tail     int // room in the last packet that is not sent yet
	Free     int // SendBuffer less Queued, at least 0
}

// Kernel is what has to be known of the running kernel; see Calibrate.
type Kernel struct {
	// Overhead is the memory that a packet costs besides its payload, in bytes: the
	// truesize of an skb with room for headers, SKB_TRUESIZE(MAX_TCP_HEADER).
	Overhead int
}

// mostHeader is what the kernel keeps free for headers in the largest packet, in
// bytes: MAX_TCP_HEADER, where it is largest (include/net/tcp.h).
const mostHeader = 320

// packetStructs is what sk_buff and skb_shared_info take of a packet's overhead on
// 64-bit kernels, in bytes.
const packetStructs = 256 + 320

// header is MAX_TCP_HEADER in bytes, which depends on what the kernel was built with:
// the rest of the overhead, where that is one of the values that it can have.
func (k Kernel) header() int {
	switch h := k.Overhead - packetStructs; h {
	case 192, 256:
		return h
	}
	return mostHeader
}

// legacyGSO is the largest packet that the kernel builds, in bytes, without BIG TCP
// (GSO_LEGACY_MAX_SIZE).
const legacyGSO = 65536

// smallWindow is TCP_MSS_DEFAULT, in bytes: windows no larger than this are not
// halved (tcp_bound_to_half_wnd).
const smallWindow = 536

// A Tracker knows what a snapshot does not show: how full the last packet is that
// is not sent yet, the largest window that the peer has had, and whether TCP paces the
// socket. It is for one socket and one writer; the zero value is ready. Without one,
// Estimate takes what is certain, and no pacing: of the largest window, that it is no smaller than the
// present one, than what is on the way, or than the packets that are not sent.
type Tracker struct {
	tail   int // payload of the last packet not sent
	goal   int // of the last Estimate
	window int // the largest seen
	gso    int
	paced  bool
}

// LargestPacket tells of the interface's largest packet for the socket's family, in
// bytes with headers: gso_max_size or gso_ipv4_max_size. By default 65536.
func (t *Tracker) LargestPacket(bytes int) { t.gso = bytes }

// Paced tells that TCP itself spaces out what it sends, one burst at a time
// (tcp_pacing_check); see the function of this name. Exact may be megabytes too large
// where that is so and was not told. By default false.
func (t *Tracker) Paced(paced bool) { t.paced = paced }

// Wrote tells of a write that took n bytes of those that were offered, after an
// Estimate by this tracker.
func (t *Tracker) Wrote(n, offered int) {
	if t.goal == 0 || n <= 0 {
		return
	}
	if n < offered {
		// The kernel fills the last packet before it ends, to a goal that may have grown
		// since; the next Estimate knows.
		t.tail = math.MaxInt
		return
	}
	if free := t.goal - t.tail; t.tail > 0 && n <= free {
		t.tail += n
		return
	} else if t.tail > 0 && free > 0 {
		n -= free
	}
	if t.tail = n % t.goal; t.tail == 0 {
		t.tail = t.goal
	}
}

// Estimate computes the room from a snapshot. The next writes are of at least next
// bytes each; 0 stands for full packets. The tracker may be nil.
func (k Kernel) Estimate(s Snapshot, next int, t *Tracker) Estimate {
	if s.Closed || s.MSS <= 0 {
		return Estimate{}
	}
	// The peer's largest window was at least what is on the way now.
	window, largest := max(s.SendWindow, s.Payload-s.Unsent), legacyGSO
	if t != nil {
		t.window = max(t.window, window)
		window = t.window
		if t.gso > 0 {
			largest = t.gso
		}
	}
	most := largest - k.header() - 1
	e := Estimate{
		Overhead: k.Overhead, Goal: min(max(goal(s.MSS, window), k.filled(s, largest)), max(most-most%s.MSS, s.MSS)),
		Free: max(s.SendBuffer-s.Queued, 0),
	}
	e.Tail = s.tail(t, e.Goal)
	e.Exact = k.exact(s, e.Goal, e.Tail, window/2, t != nil && t.paced)
	safe, free := 0, max(e.Free-k.splits(s), 0)
	if next > 0 && next < e.Goal {
		packet := next
		if next > s.MSS {
			// With Nagle's algorithm, what exceeds whole segments leaves with the next write.
			packet -= next % s.MSS
		}
		n := min(s.alone(packet), free/(packet+k.Overhead))
		safe, free = n*packet, free-n*(packet+k.Overhead)
	}
	whole, rest := free/(e.Goal+k.Overhead), free%(e.Goal+k.Overhead)
	safe += whole*e.Goal + max(rest-k.Overhead, 0)
	if s.NotSentLowat > 0 {
		safe = min(safe, max(s.NotSentLowat-s.Unsent, 0))
	}
	e.Safe = safe - safe%s.MSS
	return e
}

// splits is the memory that queued packets may take in addition when they are sent:
// the kernel cuts them to what may leave at once.
func (k Kernel) splits(s Snapshot) int {
	leaves := min(s.leaving(), s.Unsent+max(s.SendBuffer-s.Queued, 0))
	if leaves <= 0 {
		return 0
	}
	return (leaves/max(s.Burst, 2*s.MSS) + 1) * k.Overhead
}

// leaving is how much may leave before the memory of anything is free.
func (s *Snapshot) leaving() int {
	if !s.Recovering {
		return s.Sendable
	}
	flying := s.Payload - s.Unsent
	most := s.Sendable + flying
	if s.SendWindow > 0 {
		most = min(most, max(s.SendWindow-flying, s.Sendable))
	}
	return most
}

// alone is how many packets of so many bytes the writes to come may leave in, each with its
// overhead: as many as the windows let out behind what is not sent yet. Later writes share a packet.
// An acknowledgement lets another one out, and frees the memory of one packet at least.
// The congestion window counts packets, the peer's window bytes.
func (s *Snapshot) alone(packet int) int {
	quota := s.Quota - s.segments(s.Unsent)
	if s.Recovering {
		quota += s.Flying
	}
	n := max(quota, 0) / s.segments(packet)
	if s.SendWindow > 0 {
		n = min(n, max(s.SendWindow-s.Payload, 0)/packet)
	}
	return n + 1
}

func (s *Snapshot) segments(bytes int) int { return (bytes + s.MSS - 1) / s.MSS }

// goal is the payload of a full packet by the peer's largest window (tcp_xmit_size_goal), or less where
// only a smaller window was seen.
func goal(mss, window int) int {
	if window > smallWindow {
		window /= 2
	}
	return max(window-window%mss, mss)
}

// filled is how full the packets are that are not sent, on average, in whole segments: the kernel fills
// them so far. The first of them does not count: it grows up to the largest packet while it waits for
// the window (tcp_grow_skb, Linux 6.18). What is sent has at least one packet, too.
func (k Kernel) filled(s Snapshot, largest int) int {
	packets := (s.Queued-s.Payload+k.Overhead-1)/k.Overhead - 1
	if s.Payload > s.Unsent {
		packets--
	}
	if s.Guessed || packets <= 0 || s.Unsent <= largest {
		return 0
	}
	return (s.Unsent - largest) / packets / s.MSS * s.MSS
}

// tail is the room in the last packet not sent.
func (s *Snapshot) tail(t *Tracker, goal int) int {
	switch {
	case s.Unsent == 0:
		if t != nil {
			t.tail, t.goal = 0, goal
		}
		return 0
	case t == nil || t.goal == 0:
		// It has at most all that is not sent.
		return max(goal-s.Unsent, 0)
	}
	t.tail, t.goal = min(t.tail, s.Unsent, goal), goal
	return goal - t.tail
}

// exact goes the way of tcp_sendmsg_locked: the last packet not sent is filled
// without a look at the buffer, a new one is begun only while the buffer has room. What
// becomes full and is the first to be sent leaves at once, as far as it may, and what it
// leaves behind is filled again. When a write has filled more than half of the peer's largest
// window since it began, all that may leave does (forced_push), and there is nothing to fill.
func (k Kernel) exact(s Snapshot, goal, tail, half int, paced bool) (taken int) {
	queued, unsent, sendable := s.Queued, s.Unsent, s.Sendable
	burst := max(s.Burst, 2*s.MSS)
	if paced {
		// A whole segment that the windows let out, and that is not sent, waits for the
		// timer of the burst before.
		if sendable = min(sendable, burst, goal); unsent >= s.MSS {
			sendable = 0
		}
	}
	last := 0 // payload of the last packet not sent
	if unsent > 0 {
		last = goal - tail
	}
	pushed := 0 // of what is taken, at the last forced push
	filled := false
	fill := func() {
		n := goal - last
		filled = n > 0
		queued, unsent, taken, last = queued+n, unsent+n, taken+n, goal
	}
	if last > 0 {
		fill()
	}
	for {
		switch {
		case !filled || unsent != goal || sendable < s.MSS:
		case burst >= goal && sendable >= goal:
			sendable, unsent = sendable-goal, 0
		default:
			// Each burst leaves a packet behind, which is filled again. A part of a segment
			// does not leave alone (tcp_snd_wnd_test).
			b := min(burst, goal)
			bursts, rest := sendable/b, sendable%b
			if rest >= s.MSS {
				bursts++
			} else {
				sendable -= rest
			}
			if n := max(half-taken+pushed+b, 0) / b; half > 0 && n*b+goal <= sendable {
				// A forced push comes first, after n bursts.
				queued, taken, sendable = queued+n*(b+k.Overhead), taken+n*b, sendable-n*b
				queued, sendable, unsent, pushed = queued+(goal-1)/b*k.Overhead, sendable-goal, 0, taken
				break
			}
			queued, taken, sendable = queued+sendable+bursts*k.Overhead, taken+sendable, 0
		}
		if queued >= s.SendBuffer || s.NotSentLowat > 0 && unsent >= s.NotSentLowat {
			return taken
		}
		queued, last = queued+k.Overhead, 0
		fill()
	}
}

// Arming tells whether the buffer is so full that Arm has an effect: the kernel
// calls a socket writable as long as at most two thirds are queued
// (sk_stream_is_writeable).
func (s *Snapshot) Arming() bool { return !s.Closed && s.Queued > s.SendBuffer/3*2 }
