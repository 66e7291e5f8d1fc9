// SPDX-License-Identifier: Apache-2.0

package room_test

import (
	"errors"
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
	// A peer with a large window, and segments of 1448 bytes: a full packet has 45.
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
		// 15 packets fit whole, of a 16th 57743 bytes in whole segments; the kernel begins
		// a packet as long as a byte is free.
		{"nothing queued", open, 0, 15*goal + 39*1448, 16 * goal},
		{"a byte free", with(func(s *room.Snapshot) { s.Queued, s.Payload = 1<<20-1, 1<<20-1-overhead }), 0, 0, goal},
		{"nothing free", with(func(s *room.Snapshot) { s.Queued = 1 << 20 }), 0, 0, 0},
		{"more queued than the buffer has", with(func(s *room.Snapshot) { s.Queued = 2 << 20 }), 0, 0, 0},
		{"the last packet has room, the buffer none", with(func(s *room.Snapshot) {
			s.Queued, s.Payload, s.Unsent = 1<<20, 1<<20-20*overhead, 1448
		}), 0, 0, goal - 1448},
		// A byte a packet: what it costs is the overhead.
		{"small writes", open, 1, 0, 16 * goal},
		{"writes of a segment", open, 1448, (1 << 20) / (1448 + overhead) * 1448, 16 * goal},
		{"small writes behind unsent data", with(func(s *room.Snapshot) { s.Queued, s.Payload, s.Unsent = goal+overhead, goal, goal }), 1,
			14*goal + 39*1448, 15 * goal},
		// Half of a window of 64 KB.
		{"a small window", with(func(s *room.Snapshot) { s.SendBuffer, s.SendWindow = 69120, 65160 }), 0, 46 * 1448, 3 * 22 * 1448},
		{"TCP_NOTSENT_LOWAT", with(func(s *room.Snapshot) { s.NotSentLowat = 100000 }), 0, 69 * 1448, 2 * goal},
		{"TCP_NOTSENT_LOWAT is reached", with(func(s *room.Snapshot) {
			s.NotSentLowat, s.Unsent, s.Queued, s.Payload = goal, goal, goal+overhead, goal
		}), 0, 0, 0},
		// The first packet leaves in two halves of the congestion window; what they leave
		// behind is filled again.
		{"a new connection", with(func(s *room.Snapshot) {
			s.SendBuffer, s.SendWindow, s.Sendable, s.Burst = 69120, 65160, 14480, 7240
		}), 0, 44 * 1448, 2*22*1448 + 14480},
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

// TestLargestPacket has a tracker know of BIG TCP.
func TestLargestPacket(t *testing.T) {
	var tracker room.Tracker
	s := room.Snapshot{SendBuffer: 4 << 20, MSS: 1448, SendWindow: 1 << 20}
	if e := kernel.Estimate(s, 0, &tracker); e.Goal != 45*1448 {
		t.Errorf("a full packet has %d bytes", e.Goal)
	}
	tracker.LargestPacket(196608)
	if e := kernel.Estimate(s, 0, &tracker); e.Goal != 135*1448 {
		t.Errorf("a full packet has %d bytes", e.Goal)
	}
}

// TestTracker remembers the largest window, and how full the last packet is.
func TestTracker(t *testing.T) {
	const goal = 45 * 1448
	var tracker room.Tracker
	s := room.Snapshot{SendBuffer: 1 << 20, MSS: 1448, SendWindow: 1 << 20}
	tail := func() int { return kernel.Estimate(s, 0, &tracker).Tail }
	tail()
	s.SendWindow = 10000
	if e := kernel.Estimate(s, 0, &tracker); e.Goal != goal {
		t.Errorf("a full packet has %d bytes when the window has become smaller", e.Goal)
	}
	tracker.Wrote(1000, 1000)
	s.Unsent = 1000
	if got := tail(); got != goal-1000 {
		t.Errorf("room of %d bytes behind 1000", got)
	}
	tracker.Wrote(goal, goal)
	s.Unsent += goal
	if got := tail(); got != goal-1000 {
		t.Errorf("room of %d bytes in the packet after", got)
	}
	tracker.Wrote(5000, 100000)
	s.Unsent += 5000
	if got := tail(); got != 0 {
		t.Errorf("room of %d bytes after a partial write, which fills the last packet", got)
	}
	s.Unsent = 300 // of the last packet
	if got := tail(); got != goal-300 {
		t.Errorf("room of %d bytes behind what is left of it", got)
	}
	s.Unsent = 0
	if got := tail(); got != 0 {
		t.Errorf("room of %d bytes though all is sent", got)
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

// pair is a connection over loopback; nobody reads.
func pair(t *testing.T) (from, to *net.TCPConn) {
	t.Helper()
	l, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	check(t, err)
	defer l.Close()
	check(t, l.SetDeadline(time.Now().Add(10*time.Second)))
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

// TestCalibrate holds the overhead against connections in any state: what is queued is
// payload and a whole number of overheads.
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
		s, err := room.TakeConn(from)
		check(t, err)
		if rest := (s.Queued - s.Payload) % k.Overhead; rest != 0 {
			t.Fatalf("%d bytes queued with a payload of %d: no multiple of %d in between", s.Queued, s.Payload, k.Overhead)
		}
	}
}

// TestArmWritable tells a socket with room from one without.
func TestArmWritable(t *testing.T) {
	from, _ := pair(t)
	if writable, err := room.ArmConn(from); err != nil || !writable {
		t.Errorf("a new connection: %v, %v", writable, err)
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
	s, err := room.TakeRaw(raw)
	check(t, err)
	if writable, err := room.ArmRaw(raw); err != nil || writable || !s.Arming() {
		t.Errorf("a full one: %v, %v, %+v", writable, err, s)
	}
}

// TestArm has the kernel grow the buffer of a connection that never failed to send.
func TestArm(t *testing.T) {
	grown := func(arm bool) int {
		s := scene{cc: "cubic", family: unix.AF_INET}
		s.link.MTU, s.link.Delay, s.link.Rate = 1500, 10*time.Millisecond, 1e9
		fd := s.connect(t)
		k, err := room.Calibrate()
		check(t, err)
		data := make([]byte, 1<<20)
		var largest int
		for end := time.Now().Add(2 * time.Second); time.Now().Before(end) && largest < 1<<20; {
			snapshot, err := room.Take(fd)
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
				t.Fatalf("%d of %d bytes taken", n, safe)
			}
		}
		return largest
	}
	with, without := grown(true), grown(false)
	if with < 4*without {
		t.Errorf("the buffer grew to %d bytes with, and %d without", with, without)
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
		if _, err := room.Take(fd); !errors.Is(err, test.want) && !errors.Is(err, unix.ENOPROTOOPT) {
			t.Errorf("%s: %v, want %v", test.name, err, test.want)
		}
		unix.Close(fd)
	}
	if _, err := room.Take(-1); !errors.Is(err, unix.EBADF) {
		t.Errorf("no descriptor: %v", err)
	}
	if _, err := room.Arm(1 << 20); !errors.Is(err, unix.EBADF) {
		t.Errorf("arm no descriptor: %v", err)
	}
	l, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	check(t, err)
	defer l.Close()
	if s, err := room.TakeConn(l); err != nil || !s.Closed {
		t.Errorf("a listener: %+v, %v", s, err)
	}
	from, _ := pair(t)
	check(t, from.CloseWrite())
	s, err := room.TakeConn(from)
	check(t, err)
	if e := kernel.Estimate(s, 0, nil); !s.Closed || e.Safe != 0 || e.Exact != 0 {
		t.Errorf("after shutdown: %+v, %+v", s, e)
	}
	from.Close()
	if _, err := room.TakeConn(from); err == nil {
		t.Error("a closed connection has a state")
	}
}
