// SPDX-License-Identifier: Apache-2.0

// Package room computes how many bytes the kernel accepts on a TCP socket right now
// without a partial send.
//
// The kernel accepts data as long as the memory of the send queue, sk_wmem_queued, is
// below the send buffer, sk_sndbuf. Memory is not payload: each queued packet (skb) has a
// fixed overhead in addition to its payload, and the kernel fills a packet up to a goal of
// many segments before it allocates the next one (tcp_sendmsg_locked in net/ipv4/tcp.c,
// Linux 6.18). The room is therefore a number of whole packets, not a share of the buffer:
//
//	kernel, err := room.Calibrate()              // once: the overhead of a packet
//	s, err := room.ReadSnapshot(fd)              // the state of the socket
//	e := kernel.Estimate(s, len(next), &tracker) // arithmetic only
//	offered := min(e.Safe, len(next))
//	n, err := unix.Write(fd, next[:offered])
//	tracker.Wrote(n, offered)
//	if s.Arming() {
//		_, err = room.Arm(fd) // makes the kernel grow the buffer
//	}
//
// The package does not change settings of a socket: SO_SNDBUF would disable the kernel's
// auto-tuning of the buffer. It requires Linux and no privilege.
//
// The module has no import path that "go get" can fetch. Another module can replace it by
// a checkout,
//
//	go mod edit -require=sockeye@v0.0.0 -replace=sockeye=../sockeye
//
// or copy room.go, socket.go and calibrate.go, which import only the standard library and
// golang.org/x/sys/unix.
package room

import "math"

// Snapshot is the state of a TCP socket as reported by the kernel. All sizes are in bytes.
// SendBuffer and Queued are read by one system call; Payload is read after that call, the
// other fields before it. An acknowledgement between the calls makes the estimate smaller,
// never larger.
type Snapshot struct {
	SendBuffer int // sk_sndbuf
	Queued     int // sk_wmem_queued: memory of the send queue, sent and unsent packets with their overhead
	Payload    int // SIOCOUTQ: payload of the send queue
	Unsent     int // SIOCOUTQNSD: payload that was never sent
	MSS        int // tcpi_snd_mss
	SendWindow int // tcpi_snd_wnd; 0 before Linux 5.4
	// Sendable is the number of bytes that both windows allow TCP to send now.
	Sendable int
	// Burst is the size of the packets that TCP sends, given by the pacing rate
	// (tcp_tso_autosize). It is at most half of the congestion window.
	Burst int
	// Quota is the number of segments that the congestion window allows TCP to send now.
	// Flying is the number of segments in flight.
	Quota, Flying int
	// Recovering is set if segments were acknowledged by SACK or packets were lost. A segment
	// acknowledged by SACK lets TCP send another one before the memory of the first is free.
	Recovering bool
	// NotSentLowat is TCP_NOTSENT_LOWAT, or the value of net.ipv4.tcp_notsent_lowat if the
	// socket does not set the option. 0: unknown.
	NotSentLowat int
	// Closed is set if the socket is not connected, or was shut down for writing.
	Closed bool
	// Guessed is set if the kernel does not support SO_MEMINFO (before Linux 4.12). Queued
	// is then an upper bound.
	Guessed bool
}

// Estimate is the number of bytes that the kernel accepts on a socket, with intermediate
// results of the computation. All values are in bytes.
type Estimate struct {
	// Safe is a lower bound and a multiple of the MSS: the kernel accepts at least this
	// number of bytes if each of the next writes has at least the size that was passed to
	// Kernel.Estimate.
	Safe int
	// Exact predicts the number of bytes that the kernel accepts now from one large write.
	// The kernel accepts more if acknowledgements arrive during the write, and less if TCP
	// paces the socket and the Tracker is not set accordingly: see Tracker.Paced.
	Exact int

	Overhead int // memory of a queued packet in addition to its payload
	Goal     int // payload of a full packet: size_goal of the kernel
	Tail     int // free space in the last unsent packet
	Free     int // SendBuffer less Queued, at least 0
}

// Kernel contains the properties of the running kernel that Estimate needs; see Calibrate.
type Kernel struct {
	// Overhead is the memory of a packet in addition to its payload, in bytes: the truesize
	// of an skb with space for headers, SKB_TRUESIZE(MAX_TCP_HEADER).
	Overhead int
}

// mostHeader is the maximum of MAX_TCP_HEADER (include/net/tcp.h) in bytes: the space that
// the kernel reserves for headers in the largest packet.
const mostHeader = 320

// packetStructs is the size of sk_buff and skb_shared_info on 64-bit kernels, in bytes.
// Both are part of a packet's overhead.
const packetStructs = 256 + 320

// A Tracker contains the state that a snapshot does not contain: the fill level of the
// last unsent packet, the largest window that the peer has advertised, and whether TCP
// paces the socket. A Tracker is for one socket with one writer. The zero value is ready
// to use. Without a Tracker, Estimate assumes no pacing, and uses a lower bound of the
// largest window: the current window, the bytes in flight, or the size of the unsent
// packets.
type Tracker struct {
	tail   int // payload of the last unsent packet, bytes
	goal   int // Goal of the last Estimate
	window int // largest window seen, bytes
	gso    int // see LargestPacket; 0: legacyGSO
	paced  bool
}

// LargestPacket sets the largest packet of the interface for the socket's address family,
// in bytes with headers: gso_max_size or gso_ipv4_max_size. The default is 65536.
func (t *Tracker) LargestPacket(bytes int) { t.gso = bytes }

// Paced sets whether TCP itself paces the socket, one burst at a time (tcp_pacing_check);
// the function Paced returns this state. The default is false. If TCP paces the socket and
// Paced was not set, Exact may be too large by megabytes.
func (t *Tracker) Paced(paced bool) { t.paced = paced }

// Wrote records that a write of offered bytes was accepted up to n bytes. Call Wrote for
// each write after an Estimate with this Tracker.
func (t *Tracker) Wrote(n, offered int) {
	if t.goal == 0 || n <= 0 {
		return
	}
	if n < offered {
		// Before a partial write returns, the kernel fills the last packet, up to a goal
		// that may have grown since: the next Estimate computes the goal.
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

// legacyGSO is the size in bytes of the largest packet that the kernel builds without BIG
// TCP (GSO_LEGACY_MAX_SIZE).
const legacyGSO = 65536

// Estimate computes the number of bytes that the kernel accepts from a snapshot. Each of
// the next writes must have at least next bytes; 0 stands for full packets. The tracker
// may be nil. The result is zero for a closed socket.
func (k Kernel) Estimate(s Snapshot, next int, t *Tracker) Estimate {
	if s.Closed || s.MSS <= 0 {
		return Estimate{}
	}
	// The peer's largest window was at least as large as the bytes in flight.
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
			// Nagle's algorithm delays the part that exceeds whole segments until the next write.
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

// header returns MAX_TCP_HEADER in bytes, which depends on the kernel's configuration: the
// overhead less packetStructs if MAX_TCP_HEADER can have this value, otherwise mostHeader.
func (k Kernel) header() int {
	switch h := k.Overhead - packetStructs; h {
	case 192, 256:
		return h
	}
	return mostHeader
}

// splits returns the additional memory of queued packets, in bytes, if the kernel splits
// them to the size of a burst when it sends them.
func (k Kernel) splits(s Snapshot) int {
	leaves := min(s.leaving(), s.Unsent+max(s.SendBuffer-s.Queued, 0))
	if leaves <= 0 {
		return 0
	}
	return (leaves/max(s.Burst, 2*s.MSS) + 1) * k.Overhead
}

// leaving returns the number of bytes that TCP may send before the memory of any packet is
// freed.
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

// alone returns the maximum number of the next writes that are sent in separate packets,
// each with its overhead, if each write has packet bytes: the number that the windows
// allow after the unsent data. Later writes share packets. An acknowledgement allows one
// more separate packet, but frees the memory of at least one packet. The congestion window
// counts packets, the peer's window bytes.
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

// filled returns the average payload of the unsent packets, in whole segments and bytes:
// a lower bound of the goal. The first unsent packet does not count, as it grows up to the
// largest packet while it waits for the window (tcp_grow_skb, Linux 6.18). Data in flight
// has at least one packet too.
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

// tail returns the free space in the last unsent packet, in bytes.
func (s *Snapshot) tail(t *Tracker, goal int) int {
	switch {
	case s.Unsent == 0:
		if t != nil {
			t.tail, t.goal = 0, goal
		}
		return 0
	case t == nil || t.goal == 0:
		// The last packet contains at most all unsent bytes.
		return max(goal-s.Unsent, 0)
	}
	t.tail, t.goal = min(t.tail, s.Unsent, goal), goal
	return goal - t.tail
}

// exact simulates tcp_sendmsg_locked. The kernel fills the last unsent packet without
// checking the buffer, and allocates a new packet only while the buffer has space. A
// packet that becomes full and is first in the queue is sent immediately, as far as the
// windows allow; its unsent rest becomes the last packet, and is filled again. After a
// write has filled more than half of the peer's largest window, the kernel sends all data
// that the windows allow (forced_push), and no packet remains to be filled.
func (k Kernel) exact(s Snapshot, goal, tail, half int, paced bool) (taken int) {
	queued, unsent, sendable := s.Queued, s.Unsent, s.Sendable
	burst := max(s.Burst, 2*s.MSS)
	if paced {
		// An unsent segment that the windows allow waits for the pacing timer.
		if sendable = min(sendable, burst, goal); unsent >= s.MSS {
			sendable = 0
		}
	}
	last := 0 // payload of the last unsent packet
	if unsent > 0 {
		last = goal - tail
	}
	pushed := 0 // value of taken at the last forced push
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
			// Each burst leaves a rest, which is filled again. TCP does not send a part of a
			// segment (tcp_snd_wnd_test).
			b := min(burst, goal)
			bursts, rest := sendable/b, sendable%b
			if rest >= s.MSS {
				bursts++
			} else {
				sendable -= rest
			}
			if n := max(half-taken+pushed+b, 0) / b; half > 0 && n*b+goal <= sendable {
				// The forced push comes after n bursts, before the windows are full.
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

// smallWindow is TCP_MSS_DEFAULT, in bytes: windows no larger than this are not
// halved (tcp_bound_to_half_wnd).
const smallWindow = 536

// goal returns the payload of a full packet, in bytes, given by the peer's largest window
// (tcp_xmit_size_goal). The result is too small if a larger window was not seen.
func goal(mss, window int) int {
	if window > smallWindow {
		window /= 2
	}
	return max(window-window%mss, mss)
}

// Arming returns whether the buffer is so full that Arm has an effect: the kernel reports
// a socket as writable while at most two thirds of the buffer are in use
// (sk_stream_is_writeable).
func (s *Snapshot) Arming() bool { return !s.Closed && s.Queued > s.SendBuffer/3*2 }
