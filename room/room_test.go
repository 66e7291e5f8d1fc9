// SPDX-License-Identifier: Apache-2.0

package room_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/room"
)

const overhead = 832

var kernel = room.Kernel{Overhead: overhead}

func TestArithmetic(t *testing.T) {
	// goal is the payload of a full packet for a peer with a large window and a MSS of 1448 bytes: 45 segments.
	const goal = 45 * 1448
	open := room.Snapshot{SendBuffer: 1 << 20, MSS: 1448, SendWindow: 1 << 20}
	with := func(change func(*room.Snapshot)) room.Snapshot {
		s := open
		change(&s)
		return s
	}
	for _, test := range []struct {
		name        string
		s           room.Snapshot
		next        int
		safe, exact int
	}{
		// 15 whole packets fit, and 57743 bytes of a 16th packet in whole segments; the kernel allocates a packet if a
		// single byte is free.
		{"nothing queued", open, 0, 15*goal + 39*1448, 16 * goal},
		{"one byte free", with(func(s *room.Snapshot) { s.Queued, s.Payload = 1<<20-1, 1<<20-1-overhead }), 0, 0, goal},
		{"nothing free", with(func(s *room.Snapshot) { s.Queued = 1 << 20 }), 0, 0, 0},
		{"more memory queued than the send buffer", with(func(s *room.Snapshot) { s.Queued = 2 << 20 }), 0, 0, 0},
		{"space in the last packet, buffer full", with(func(s *room.Snapshot) {
			s.Queued, s.Payload, s.Unsent = 1<<20, 1<<20-20*overhead, 1448
		}), 0, 0, goal - 1448},
		// Ten bytes are sent in separate packets; the others wait in full packets.
		{"small writes", with(func(s *room.Snapshot) { s.Quota, s.Sendable, s.Burst = 10, 10*1448, goal }), 1, 15*goal + 33*1448, 16*goal + 14480},
		// One byte per packet: the cost is the overhead.
		{"small writes, all sent", with(func(s *room.Snapshot) { s.Quota, s.Sendable, s.Burst = 10000, 10000*1448, goal }), 1, 0, 16 * goal},
		{"writes of a segment", with(func(s *room.Snapshot) { s.Quota, s.Sendable, s.Burst = 100, 100*1448, goal }), 1448, 101*1448 + 12*goal + 15*1448, 16*goal + 14480},
		// One segment of each packet is sent, and the rest of the packet is sent with the next one.
		{"writes larger than a segment", with(func(s *room.Snapshot) { s.Quota, s.Sendable, s.Burst = 100, 100*1448, goal }), 2000, 101*1448 + 12*goal + 15*1448, 16*goal + 14480},
		// The peer's window has space for ten segments, or for 144 writes of 100 bytes.
		{"small writes into a small window", with(func(s *room.Snapshot) {
			s.SendBuffer, s.SendWindow, s.Quota, s.Sendable, s.Burst = 100000, 14480, 200, 14480, goal
		}), 100, 7 * 1448, 65 * 1448},
		// All data in flight may be acknowledged by SACK, which allows TCP to send other packets.
		{"small writes while packets are lost", with(func(s *room.Snapshot) {
			s.Sendable, s.Burst, s.Recovering, s.Queued, s.Payload = 10*1448, goal, true, 10*(goal+overhead), 10*goal
			s.Quota, s.Flying = 10, 450
		}), 1448, 168 * 1448, 405440},
		{"small writes behind unsent data", with(func(s *room.Snapshot) { s.Queued, s.Payload, s.Unsent = goal+overhead, goal, goal }), 1,
			14*goal + 39*1448, 15 * goal},
		// The peer's largest window is unknown: only one segment per packet is certain.
		{"zero window", with(func(s *room.Snapshot) { s.SendBuffer, s.SendWindow = 69120, 0 }), 0, 30 * 1448, 31 * 1448},
		// The window had space for 20 segments, which are in flight.
		{"full window", with(func(s *room.Snapshot) {
			s.SendBuffer, s.SendWindow, s.Queued, s.Payload = 69120, 0, 20*1448+2*overhead, 20*1448
		}), 0, 24 * 1448, 30 * 1448},
		// Sixty packets of ten segments wait. The first may have grown; the others have at least nine.
		{"packets of half the window", with(func(s *room.Snapshot) {
			s.SendBuffer, s.SendWindow, s.Queued, s.Payload, s.Unsent = 2<<20, 0, 60*(14480+overhead), 60*14480, 60*14480
		}), 0, 764 * 1448, 85 * 9 * 1448},
		// Twelve packets of three segments on average wait, and the first has grown meanwhile: new packets have one
		// segment.
		{"a packet that has grown", with(func(s *room.Snapshot) {
			s.SendBuffer, s.SendWindow, s.Queued, s.Payload, s.Unsent = 311040, 2896, 62204, 52220, 49324
		}), 0, 109 * 1448, 110 * 1448},
		// The window is 64 KB; packets fill half of it.
		{"a small window", with(func(s *room.Snapshot) { s.SendBuffer, s.SendWindow = 69120, 65160 }), 0, 46 * 1448, 3 * 22 * 1448},
		{"TCP_NOTSENT_LOWAT", with(func(s *room.Snapshot) { s.NotSentLowat = 100000 }), 0, 69 * 1448, 2 * goal},
		{"TCP_NOTSENT_LOWAT is reached", with(func(s *room.Snapshot) {
			s.NotSentLowat, s.Unsent, s.Queued, s.Payload = goal, goal, goal+overhead, goal
		}), 0, 0, 0},
		// The first packet is sent in two halves of the congestion window; the space that they free is filled again.
		{"a new connection", with(func(s *room.Snapshot) {
			s.SendBuffer, s.SendWindow, s.Sendable, s.Burst = 69120, 65160, 14480, 7240
		}), 0, 44 * 1448, 2*22*1448 + 14480},
		{"a window that ends within a segment", with(func(s *room.Snapshot) {
			s.SendBuffer, s.SendWindow, s.Sendable, s.Burst = 69120, 65160, 8000, 7240
		}), 0, 44 * 1448, 2*22*1448 + 7240},
		// Data is pushed only because of the fill level.
		{"full packet that is not sent", with(func(s *room.Snapshot) {
			s.Queued, s.Payload, s.Unsent, s.Sendable, s.Burst = 1<<20, 1<<20-20*overhead, goal, 14480, 7240
		}), 0, 0, 0},
		// More than half of the window of 1 MB is filled after 64 bursts. Then everything is sent, and there is no
		// room for a new packet.
		{"a forced push", with(func(s *room.Snapshot) {
			s.SendBuffer, s.Sendable, s.Burst = 100000, 1<<20, 7240
		}), 0, 59 * 1448, goal + 64*7240},
		{"closed", room.Snapshot{SendBuffer: 1 << 20, MSS: 1448, Closed: true}, 0, 0, 0},
		{"no segments", room.Snapshot{SendBuffer: 1 << 20}, 0, 0, 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			e := kernel.Estimate(test.s, test.next, nil)
			if e.Safe != test.safe || e.Exact != test.exact {
				t.Errorf("safe %d, exact %d, want %d and %d", e.Safe, e.Exact, test.safe, test.exact)
			}
		})
	}
}

// TestPacing sets a tracker to pacing by TCP.
func TestPacing(t *testing.T) {
	const goal = 22 * 1448
	var tracker room.Tracker
	exact := func(s room.Snapshot) int { return kernel.Estimate(s, 0, &tracker).Exact }
	s := room.Snapshot{SendBuffer: 60000, MSS: 1448, SendWindow: 65160, Sendable: 20 * 1448, Burst: 5 * 1448}
	if got := exact(s); got != goal+20*1448 {
		t.Errorf("four bursts are sent, and %d bytes are accepted", got)
	}
	tracker.Paced(true)
	if got := exact(s); got != 2*goal+5*1448 {
		t.Errorf("one burst is sent, and %d bytes are accepted", got)
	}
	// Data that the windows allow and that is not sent waits for the pacing timer.
	tracker.Wrote(2*1448, 2*1448)
	s.Unsent, s.Queued, s.Payload = 2*1448, 60000, 60000-10*overhead
	if got := exact(s); got != goal-2*1448 {
		t.Errorf("no burst is sent, and %d bytes are accepted", got)
	}
	tracker.Paced(false)
	if got := exact(s); got != goal-2*1448+20*1448 {
		t.Errorf("four bursts are sent again, and %d bytes are accepted", got)
	}
}

// TestLargestPacket sets a tracker to the packet size of BIG TCP.
func TestLargestPacket(t *testing.T) {
	var tracker room.Tracker
	s := room.Snapshot{SendBuffer: 4 << 20, MSS: 1448, SendWindow: 1 << 20}
	if e := kernel.Estimate(s, 0, &tracker); e.Goal != 45*1448 {
		t.Errorf("payload of a full packet: %d bytes", e.Goal)
	}
	tracker.LargestPacket(196608)
	if e := kernel.Estimate(s, 0, &tracker); e.Goal != 135*1448 {
		t.Errorf("payload of a full packet: %d bytes", e.Goal)
	}
}

// TestGoal checks an IPv6 packet with an MTU of 1280: 54 segments if the kernel reserves 256 bytes for headers, 53 if
// it reserves more.
func TestGoal(t *testing.T) {
	s := room.Snapshot{SendBuffer: 1 << 20, MSS: 1208, SendWindow: 1 << 20}
	for overhead, segments := range map[int]int{832: 54, 896: 53, 1280: 53} {
		if e := (room.Kernel{Overhead: overhead}).Estimate(s, 0, nil); e.Goal != segments*1208 {
			t.Errorf("overhead %d: payload of a full packet: %d bytes", overhead, e.Goal)
		}
	}
}

// TestTracker checks that the tracker remembers the largest window and the fill level of the last packet.
func TestTracker(t *testing.T) {
	const goal = 45 * 1448
	var tracker room.Tracker
	s := room.Snapshot{SendBuffer: 1 << 20, MSS: 1448, SendWindow: 1 << 20}
	tail := func() int { return kernel.Estimate(s, 0, &tracker).Tail }
	tail()
	s.SendWindow = 10000
	if e := kernel.Estimate(s, 0, &tracker); e.Goal != goal {
		t.Errorf("payload of a full packet after the window shrank: %d bytes", e.Goal)
	}
	tracker.Wrote(1000, 1000)
	s.Unsent = 1000
	if got := tail(); got != goal-1000 {
		t.Errorf("room of %d bytes after 1000 unsent bytes", got)
	}
	tracker.Wrote(goal, goal)
	s.Unsent += goal
	if got := tail(); got != goal-1000 {
		t.Errorf("room of %d bytes in the next packet", got)
	}
	tracker.Wrote(5000, 100000)
	s.Unsent += 5000
	if got := tail(); got != 0 {
		t.Errorf("room of %d bytes after a partial write, which fills the last packet", got)
	}
	s.Unsent = 300 // a part of the last packet
	if got := tail(); got != goal-300 {
		t.Errorf("room of %d bytes after the rest of the packet", got)
	}
	s.Unsent = 0
	if got := tail(); got != 0 {
		t.Errorf("room of %d bytes although all data is sent", got)
	}
	// The window grew before the write, as the size of the packets shows; the snapshot was read after the write.
	var grown room.Tracker
	s = room.Snapshot{SendBuffer: 1 << 20, MSS: 1448, SendWindow: 72400}
	kernel.Estimate(s, 0, &grown)
	grown.Wrote(3*37648, 1<<20)
	s.SendWindow, s.Unsent = 75296, 3*37648
	if e := kernel.Estimate(s, 0, &grown); e.Goal != 37648 || e.Tail != 0 {
		t.Errorf("room of %d of %d bytes after a partial write", e.Tail, e.Goal)
	}
}

// TestZeroWindow checks peers that do not read and whose window is 0 in the first snapshot: the kernel fills packets to
// half of the largest window of the peer.
func TestZeroWindow(t *testing.T) {
	kernel, err := room.Calibrate()
	check(t, err)
	random := rand.New(rand.NewPCG(8, 1))
	data := make([]byte, 16<<20)
	for _, buffer := range []int{20000, 4000, 0} {
		t.Run(fmt.Sprintf("SO_RCVBUF %d", buffer), func(t *testing.T) {
			states, exact := 0, 0
			for range 40 {
				from, _ := pairWith(t, buffer)
				raw, err := from.SyscallConn()
				check(t, err)
				check(t, raw.Control(func(fd uintptr) {
					write := func(n int) int {
						n, err := unix.Write(int(fd), data[:n])
						if err != nil && !errors.Is(err, unix.EAGAIN) {
							t.Fatal(err)
						}
						return max(n, 0)
					}
					write(1 << 20) // more than the window
					for range random.IntN(8) {
						write(1 + random.IntN(30000))
					}
					var s room.Snapshot
					for end := time.Now().Add(200 * time.Millisecond); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
						var err error
						s, err = room.ReadSnapshot(int(fd))
						check(t, err)
						if s.SendWindow == 0 && s.Payload == s.Unsent {
							break
						}
					}
					e := kernel.Estimate(s, 0, nil)
					took := write(max(e.Exact, e.Safe) + 1<<20)
					if after, err := room.ReadSnapshot(int(fd)); err != nil || after.Payload != s.Payload+took {
						return // data was acknowledged during the write
					}
					states++
					if e.Exact > took {
						exact++
					}
					if e.Safe > took {
						t.Errorf("safe is %d, the kernel accepted %d: %+v", e.Safe, took, s)
					}
				}))
			}
			t.Logf("%d states, exact was too large in %d", states, exact)
			if states < 10 {
				t.Errorf("only %d states were compared", states)
			}
		})
	}
}

func FuzzEstimate(f *testing.F) {
	f.Add(int32(1<<20), int32(0), int32(0), int32(0), int32(1448), int32(1<<20), int32(14480), int32(7240), int32(0), int32(0), int32(10))
	f.Add(int32(46080), int32(50000), int32(40000), int32(1), int32(1), int32(1), int32(1<<30), int32(1), int32(1), int32(1), int32(0))
	f.Fuzz(func(t *testing.T, buffer, queued, payload, unsent, mss, window, sendable, burst, lowat, next, wrote int32) {
		s := room.Snapshot{SendBuffer: int(buffer), Queued: int(queued), Payload: int(payload), Unsent: int(unsent), MSS: int(mss),
			SendWindow: int(window), Sendable: int(sendable), Burst: int(burst), NotSentLowat: int(lowat)}
		var tracker room.Tracker
		for _, tr := range []*room.Tracker{nil, &tracker, &tracker} {
			e := kernel.Estimate(s, int(next), tr)
			if e.Safe < 0 || e.Exact < 0 || e.Tail < 0 || e.Free < 0 {
				t.Fatalf("%+v of %+v", e, s)
			}
			if mss > 0 && e.Safe%int(mss) != 0 {
				t.Fatalf("safe is %d, with segments of %d bytes", e.Safe, mss)
			}
			tracker.Wrote(int(wrote), int(wrote)+int(next))
		}
	})
}

// pair returns a connection over loopback whose peer does not read.
func pair(t *testing.T) (from, to *net.TCPConn) { return pairWith(t, 0) }

// pairWith sets SO_RCVBUF of the peer before it connects, unless it is 0.
func pairWith(t *testing.T, buffer int) (from, to *net.TCPConn) {
	t.Helper()
	l, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	check(t, err)
	defer l.Close()
	check(t, l.SetDeadline(time.Now().Add(10*time.Second)))
	if buffer > 0 {
		raw, err := l.SyscallConn()
		check(t, err)
		check(t, raw.Control(func(fd uintptr) {
			check(t, unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, buffer))
		}))
	}
	c, err := net.Dial("tcp4", l.Addr().String())
	check(t, err)
	accepted, err := l.AcceptTCP()
	check(t, err)
	from, to = c.(*net.TCPConn), accepted
	t.Cleanup(func() {
		from.Close()
		to.Close()
	})
	return from, to
}

// TestCalibrate compares the overhead with connections in any state: the queue consists of payload and a whole number
// of overheads.
func TestCalibrate(t *testing.T) {
	k, err := room.Calibrate()
	check(t, err)
	from, _ := pair(t)
	rng := rand.New(rand.NewPCG(1, 1))
	check(t, from.SetWriteDeadline(time.Now().Add(500*time.Millisecond)))
	for range 200 {
		if _, err := from.Write(make([]byte, 1+rng.IntN(100000))); err != nil {
			break
		}
		s, err := room.ReadSnapshotConn(from)
		check(t, err)
		if rest := (s.Queued - s.Payload) % k.Overhead; rest != 0 {
			t.Fatalf("%d bytes queued with a payload of %d: the difference is not a multiple of %d", s.Queued, s.Payload, k.Overhead)
		}
	}
}

// TestArmWritable checks that Arm distinguishes a writable socket from a full one.
func TestArmWritable(t *testing.T) {
	from, _ := pair(t)
	if writable, err := room.ArmConn(from); err != nil || !writable {
		t.Errorf("new connection: %v, %v", writable, err)
	}
	raw, err := from.SyscallConn()
	check(t, err)
	data := make([]byte, 1<<20)
	check(t, raw.Write(func(fd uintptr) bool {
		for err == nil {
			_, err = unix.Write(int(fd), data)
		}
		return true
	}))
	s, err := room.ReadSnapshotRaw(raw)
	check(t, err)
	if writable, err := room.ArmRaw(raw); err != nil || writable || !s.Arming() {
		t.Errorf("full send buffer: %v, %v, %+v", writable, err, s)
	}
}

// TestArm checks that the kernel grows the send buffer of a connection on which no send has failed.
func TestArm(t *testing.T) {
	grown := func(arm bool, enough int, patience time.Duration) int {
		s := scene{cc: "cubic", family: unix.AF_INET}
		s.link.MTU, s.link.Delay, s.link.Rate = 1500, 10*time.Millisecond, 1e9
		fd := s.connect(t)
		k, err := room.Calibrate()
		check(t, err)
		data := make([]byte, 1<<20)
		var largest int
		for end := time.Now().Add(patience); time.Now().Before(end) && largest < enough; {
			snapshot, err := room.ReadSnapshot(fd)
			check(t, err)
			largest = max(largest, snapshot.SendBuffer)
			if arm && snapshot.Arming() {
				_, err := room.Arm(fd)
				check(t, err)
			}
			safe := min(k.Estimate(snapshot, 0, nil).Safe, len(data))
			if safe == 0 {
				time.Sleep(100 * time.Microsecond)
				continue
			}
			n, err := unix.Write(fd, data[:safe])
			check(t, err)
			if n != safe {
				t.Fatalf("%d of %d bytes accepted", n, safe)
			}
		}
		return largest
	}
	without := grown(false, 1<<20, 200*time.Millisecond)
	if with := grown(true, 4*without, time.Minute); with < 4*without {
		t.Errorf("the buffer grew to %d bytes with Arm, and %d without", with, without)
	}
}

// TestPaced uses a congestion window much larger than the buffer, an empty queue, and a pacing rate: one burst is sent
// during the write, and the rest must fit into the buffer.
func TestPaced(t *testing.T) {
	k, err := room.Calibrate()
	check(t, err)
	s := scene{cc: "reno", family: unix.AF_INET6}
	s.link.MTU, s.link.Delay, s.link.Rate = 1280, 10*time.Millisecond, 1e9
	fd := s.connect(t)
	if paced, err := room.Paced(fd); err != nil || paced {
		t.Errorf("reno is paced: %v, %v", paced, err)
	}
	end := time.Now().Add(time.Minute)
	until := func(what string, ready func(s room.Snapshot) bool) {
		for {
			now, err := room.ReadSnapshot(fd)
			check(t, err)
			if ready(now) {
				return
			}
			if time.Now().After(end) {
				t.Fatalf("timeout: %s, %+v", what, now)
			}
			time.Sleep(100 * time.Microsecond)
		}
	}
	data := make([]byte, 8<<20)
	until("a large congestion window", func(now room.Snapshot) bool {
		if _, err := unix.Write(fd, data); err != nil && !errors.Is(err, unix.EAGAIN) {
			t.Fatal(err)
		}
		return now.Sendable+now.Payload-now.Unsent > 1<<20
	})
	until("all acknowledged", func(now room.Snapshot) bool { return now.Payload == 0 })
	check(t, unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, 100_000))
	check(t, unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MAX_PACING_RATE, 20_000_000))
	paced, err := room.Paced(fd)
	check(t, err)
	if !paced {
		t.Error("Paced is false with SO_MAX_PACING_RATE")
	}
	for attempt := 1; ; attempt++ {
		now, err := room.ReadSnapshot(fd)
		check(t, err)
		var tracker room.Tracker
		tracker.Paced(paced)
		e := k.Estimate(now, 0, &tracker)
		took, err := unix.Write(fd, data)
		check(t, err)
		over := e.Exact - took
		if over <= e.Goal && -over <= e.Goal {
			return
		}
		// If the write waits for a CPU for longer than the RTT, the first packets are acknowledged meanwhile.
		t.Logf("the kernel accepted %d bytes; snapshot %+v, estimate %+v", took, now, e)
		if attempt == 5 {
			t.Fatal("no estimate was right")
		}
		until("all acknowledged", func(now room.Snapshot) bool { return now.Payload == 0 })
	}
}

// TestForcedPush uses a congestion window much larger than the buffer, and bursts smaller than a packet: written data
// is sent until the kernel sends the last packet completely.
func TestForcedPush(t *testing.T) {
	k, err := room.Calibrate()
	check(t, err)
	s := scene{cc: "reno", family: unix.AF_INET}
	s.link.MTU, s.link.Delay, s.link.Rate = 9000, 100*time.Millisecond, 1e9
	fd := s.connect(t)
	data := make([]byte, 8<<20)
	var tracker room.Tracker
	end, grown := time.Now().Add(time.Minute), false
	// settle waits until the congestion window is large and nothing is queued.
	settle := func() room.Snapshot {
		for {
			now, err := room.ReadSnapshot(fd)
			check(t, err)
			k.Estimate(now, 0, &tracker)
			if grown = grown || now.Sendable+now.Payload-now.Unsent > 3<<19; grown && now.Payload == 0 {
				return now
			}
			if time.Now().After(end) {
				t.Fatalf("no large congestion window: %+v", now)
			}
			if !grown {
				n, err := unix.Write(fd, data)
				if err != nil && !errors.Is(err, unix.EAGAIN) {
					t.Fatal(err)
				}
				tracker.Wrote(n, len(data))
			}
			time.Sleep(100 * time.Microsecond)
		}
	}
	settle()
	check(t, unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, 100_000))
	for attempt := 1; ; attempt++ {
		now := settle()
		e := k.Estimate(now, 0, &tracker)
		took, err := unix.Write(fd, data)
		check(t, err)
		tracker.Wrote(took, len(data))
		over := e.Exact - took
		if over <= e.Goal && -over <= e.Goal {
			return
		}
		// If the write waits for a CPU for longer than the RTT, the first packets are acknowledged meanwhile.
		t.Logf("the kernel accepted %d bytes; snapshot %+v, estimate %+v", took, now, e)
		if attempt == 5 {
			t.Fatal("the estimate is wrong in all attempts")
		}
	}
}

func TestPacedConn(t *testing.T) {
	from, _ := pair(t)
	raw, err := from.SyscallConn()
	check(t, err)
	for _, test := range []struct {
		name string
		set  func(fd int) error
		want bool
	}{
		{"reno", func(fd int) error {
			return unix.SetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION, "reno")
		}, false},
		{"SO_MAX_PACING_RATE", func(fd int) error {
			return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MAX_PACING_RATE, 1_000_000)
		}, true},
	} {
		check(t, raw.Control(func(fd uintptr) { err = test.set(int(fd)) }))
		check(t, err)
		if got, err := room.PacedConn(from); err != nil || got != test.want {
			t.Errorf("%s: paced %v, %v", test.name, got, err)
		}
	}
}

func TestNoConnection(t *testing.T) {
	for _, test := range []struct {
		name         string
		domain, kind int
		want         error
	}{
		{"UDP", unix.AF_INET, unix.SOCK_DGRAM, unix.EOPNOTSUPP},
		{"Unix", unix.AF_UNIX, unix.SOCK_STREAM, unix.EOPNOTSUPP},
	} {
		fd, err := unix.Socket(test.domain, test.kind|unix.SOCK_CLOEXEC, 0)
		check(t, err)
		if _, err := room.ReadSnapshot(fd); !errors.Is(err, test.want) && !errors.Is(err, unix.ENOPROTOOPT) {
			t.Errorf("%s: %v, want %v", test.name, err, test.want)
		}
		unix.Close(fd)
	}
	if _, err := room.ReadSnapshot(-1); !errors.Is(err, unix.EBADF) {
		t.Errorf("invalid descriptor: %v", err)
	}
	if _, err := room.Paced(-1); !errors.Is(err, unix.EBADF) {
		t.Errorf("pacing of an invalid descriptor: %v", err)
	}
	if _, err := room.Arm(1 << 20); !errors.Is(err, unix.EBADF) {
		t.Errorf("arm an invalid descriptor: %v", err)
	}
	l, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	check(t, err)
	defer l.Close()
	if s, err := room.ReadSnapshotConn(l); err != nil || !s.Closed {
		t.Errorf("a listener: %+v, %v", s, err)
	}
	from, _ := pair(t)
	check(t, from.CloseWrite())
	s, err := room.ReadSnapshotConn(from)
	check(t, err)
	if e := kernel.Estimate(s, 0, nil); !s.Closed || e.Safe != 0 || e.Exact != 0 {
		t.Errorf("after shutdown: %+v, %+v", s, e)
	}
	from.Close()
	if _, err := room.ReadSnapshotConn(from); err == nil {
		t.Error("ReadSnapshot succeeds for a closed connection")
	}
}
