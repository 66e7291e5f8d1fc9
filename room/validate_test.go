// SPDX-License-Identifier: Apache-2.0

package room_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"net/netip"
	"os"
	"strings"
	"testing"
	"text/tabwriter"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/lab"
	"sockeye/room"
)

var (
	senders   = []netip.Prefix{netip.MustParsePrefix("10.94.0.1/24"), netip.MustParsePrefix("fd94::1/64")}
	receivers = []netip.Prefix{netip.MustParsePrefix("10.94.0.2/24"), netip.MustParsePrefix("fd94::2/64")}
)

// A formula returns the number of bytes that a socket accepts, with and without a tracker.
type formula struct {
	name string
	of   func(s room.Snapshot, tracked, fresh room.Estimate) int
}

// smallWrites is the index of the formula that is given the size of the next writes, and is compared with such writes.
const smallWrites = 5

// formulas are those of Sockeye; that of passt, 75 to 100 % of SO_SNDBUF less SIOCOUTQ; and that of a patch to passt,
// which scales by the observed overhead.
var formulas = []formula{
	{"safe", func(_ room.Snapshot, e, _ room.Estimate) int { return e.Safe }},
	{"exact", func(_ room.Snapshot, e, _ room.Estimate) int { return e.Exact }},
	{"safe, without a tracker", func(_ room.Snapshot, _, e room.Estimate) int { return e.Safe }},
	{"75-100 % of SO_SNDBUF less SIOCOUTQ", func(s room.Snapshot, _, _ room.Estimate) int {
		return max(scaled(s.SendBuffer)-s.Payload, 0)
	}},
	{"(sndbuf - wmem_queued) * sendq / wmem_queued", func(s room.Snapshot, _, _ room.Estimate) int {
		if s.Queued == 0 || s.Payload == 0 {
			return s.SendBuffer / 4 * 3
		}
		return int(int64(max(s.SendBuffer-s.Queued, 0)) * int64(s.Payload) / int64(s.Queued))
	}},
	smallWrites: {name: "safe, small writes"},
}

// scaled returns the whole buffer if it is at most 128 KiB, and three quarters of a buffer of 4 MiB.
func scaled(buffer int) int {
	const small, large = 128 << 10, 4 << 20
	switch {
	case buffer <= small:
		return buffer
	case buffer >= large:
		return buffer / 4 * 3
	}
	return buffer - int(int64(buffer)*int64(buffer-small)/(large-small)/4)
}

// score is the result of a formula.
type score struct {
	states, over     int
	most             float64 // largest over-estimate in segments
	bytes            int     // largest over-estimate in bytes
	taken, predicted int64   // bytes accepted by the kernel, and the predicted part of them
	promised         int64
}

func (s *score) add(said, took, mss int) {
	s.states++
	if said > took {
		s.over++
		s.most = max(s.most, float64(said-took)/float64(mss))
		s.bytes = max(s.bytes, said-took)
	}
	s.promised += int64(said)
	s.taken += int64(took)
	s.predicted += int64(min(said, took))
}

func (s *score) join(o score) {
	s.states += o.states
	s.over += o.over
	s.most = max(s.most, o.most)
	s.bytes = max(s.bytes, o.bytes)
	s.taken += o.taken
	s.predicted += o.predicted
	s.promised += o.promised
}

func (s *score) overShare() float64   { return float64(s.over) / float64(max(s.states, 1)) }
func (s *score) utilisation() float64 { return float64(s.predicted) / float64(max(s.taken, 1)) }

// A scene is a kind of connection and of its use.
type scene struct {
	cc     string
	family int
	link   lab.LinkOptions
	most   int           // maximum size of a write in bytes, at least 1
	pause  time.Duration // of the reader after each read
	buffer int           // SO_RCVBUF of the peer; 0: the kernel's default
	whole  bool          // TCP_NODELAY: each write is sent separately
}

func (s scene) String() string {
	family := map[int]string{unix.AF_INET: "IPv4", unix.AF_INET6: "IPv6"}[s.family]
	text := fmt.Sprintf("%s %s mtu %d rtt %v loss %g writes to %d", s.cc, family, s.link.MTU, 2*s.link.Delay, s.link.Loss, s.most)
	if s.pause > 0 {
		text += " slow reader"
	}
	if s.buffer > 0 {
		text += fmt.Sprintf(" rcvbuf %d", s.buffer)
	}
	if s.whole {
		text += " nodelay"
	}
	return text
}

// scenes returns all combinations, or a selection for a quick run that includes combinations whose packets grow while
// they wait for the window.
func scenes(all bool) (list []scene) {
	n := 0
	add := func(s scene) {
		grow := s.buffer > 0 && s.link.MTU == 1500 && s.link.Delay == 0
		if n++; all || n%37 == 0 || grow {
			s.link.Seed = uint64(n)
			list = append(list, s)
			if !all {
				s.whole = true
				list = append(list, s)
			}
		}
	}
	for _, cc := range []string{"cubic", "bbr", "reno"} {
		for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
			for _, mtu := range []int{1280, 1500, 9000, 65520} {
				for _, rtt := range []time.Duration{0, 15 * time.Millisecond, 100 * time.Millisecond} {
					for _, loss := range []float64{0, 0.001} {
						for _, most := range []int{1400, 1 << 20} {
							for _, pause := range []time.Duration{0, 5 * time.Millisecond} {
								add(scene{cc, family, lab.LinkOptions{MTU: mtu, Delay: rtt / 2, Loss: loss, Rate: 1e9}, most, pause, 0, false})
								// Peers with small buffers close the window repeatedly.
								if cc != "reno" && family == unix.AF_INET && loss == 0 && (mtu == 1500 || mtu == 65520) {
									for _, buffer := range []int{4000, 20000} {
										add(scene{cc, family, lab.LinkOptions{MTU: mtu, Delay: rtt / 2, Rate: 1e9}, most, pause, buffer, false})
									}
								}
							}
						}
					}
				}
			}
		}
	}
	return list
}

// TestEstimate compares the estimates with the number of bytes that the kernel then accepts, in thousands of states.
// SOCKEYE_ROOM=all runs all scenes and prints the table of docs/room.md; SOCKEYE_ROOM=full runs three times as many
// states, in about a quarter of an hour.
func TestEstimate(t *testing.T) {
	kernel, err := room.Calibrate()
	if err != nil {
		t.Fatal(err)
	}
	states, all := map[string]int{"all": 100, "full": 300}[os.Getenv("SOCKEYE_ROOM")]
	if !all {
		states = 40
	}
	total := make([]score, len(formulas))
	by := map[string][]score{}
	var order []string
	for _, s := range scenes(all) {
		t.Run(s.String(), func(t *testing.T) {
			scores := s.run(t, kernel, states)
			for _, key := range s.keys() {
				if by[key] == nil {
					by[key] = make([]score, len(formulas))
					order = append(order, key)
				}
				for i := range scores {
					by[key][i].join(scores[i])
				}
			}
			for i := range scores {
				total[i].join(scores[i])
			}
			if n := scores[0].states; n < least {
				t.Errorf("%d states", n)
			}
			for _, i := range []int{0, 2, smallWrites} {
				if most := scores[i].most; most > 1 {
					t.Errorf("%s is too large by up to %.1f segments", formulas[i].name, most)
				}
			}
			if scores[1].bytes > 2*65536 {
				t.Errorf("exact is too large by up to %d bytes, more than two packets", scores[1].bytes)
			}
		})
	}
	for _, i := range []int{0, 2, smallWrites} {
		if share := total[i].overShare(); share >= 0.005 {
			t.Errorf("%s is too large in %.2f %% of %d states", formulas[i].name, 100*share, total[i].states)
		}
	}
	if u := total[1].utilisation(); u <= 0.99 {
		t.Errorf("exact predicts a share of %.4f of the bytes that the kernel accepts", u)
	}
	var text strings.Builder
	print(&text, "all", total)
	for _, key := range order {
		print(&text, key, by[key])
	}
	t.Logf("\n%s", text.String())
}

// keys returns the groups to which a scene belongs.
func (s scene) keys() []string {
	return []string{
		s.cc, map[int]string{unix.AF_INET: "IPv4", unix.AF_INET6: "IPv6"}[s.family],
		fmt.Sprintf("MTU %d", s.link.MTU), fmt.Sprintf("RTT %v", 2*s.link.Delay), fmt.Sprintf("loss %g %%", 100*s.link.Loss),
		fmt.Sprintf("writes of 1 to %d bytes", s.most), fmt.Sprintf("reader pauses %v", s.pause),
		fmt.Sprintf("peer's SO_RCVBUF %d", s.buffer),
	}
}

func print(w *strings.Builder, name string, scores []score) {
	tab := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintf(tab, "%s\tstates\ttoo large\tmaximum excess\tpredicted share\n", name)
	for i, f := range formulas {
		s := scores[i]
		fmt.Fprintf(tab, "  %s\t%d\t%.2f %%\t%.1f segments\t%.4f\n", f.name, s.states, 100*s.overShare(), s.most, s.utilisation())
	}
	_ = tab.Flush() // to a strings.Builder
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

var errNoCongestionControl = errors.New("congestion control not available")

// connect opens a connection over a link between two namespaces, with a reader at its end.
func (s scene) connect(t *testing.T) (fd int) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	l, err := lab.New(ctx, lab.Options{Dir: t.TempDir()})
	check(t, err)
	t.Cleanup(func() { check(t, l.Close()) })
	a, err := l.Namespace("a")
	check(t, err)
	b, err := l.Namespace("b")
	check(t, err)
	_, err = l.Connect(a, b, s.link, senders, receivers)
	check(t, err)
	var at unix.Sockaddr = &unix.SockaddrInet4{Addr: receivers[0].Addr().As4(), Port: 7000}
	if s.family == unix.AF_INET6 {
		at = &unix.SockaddrInet6{Addr: receivers[1].Addr().As16(), Port: 7000}
	}
	var listener int
	check(t, b.Do(func() (err error) {
		if listener, err = unix.Socket(s.family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		if s.buffer > 0 {
			err = unix.SetsockoptInt(listener, unix.SOL_SOCKET, unix.SO_RCVBUF, s.buffer)
		}
		return errors.Join(err, unix.Bind(listener, at), unix.Listen(listener, 1))
	}))
	defer unix.Close(listener)
	err = a.Do(func() (err error) {
		if fd, err = unix.Socket(s.family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		if err := unix.SetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION, s.cc); errors.Is(err, unix.ENOENT) {
			return errNoCongestionControl
		} else if err != nil {
			return err
		}
		return unix.Connect(fd, at)
	})
	if errors.Is(err, errNoCongestionControl) {
		t.Skipf("kernel: no %s", s.cc)
	}
	check(t, err)
	to, _, err := unix.Accept4(listener, unix.SOCK_CLOEXEC)
	check(t, err)
	check(t, unix.SetNonblock(fd, true))
	if s.whole {
		check(t, unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1))
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer unix.Close(to)
		buffer := make([]byte, 1<<20)
		for {
			if n, err := unix.Read(to, buffer); n <= 0 || err != nil {
				return
			}
			time.Sleep(s.pause)
		}
	}()
	t.Cleanup(func() {
		// close(2) must not wait for queued data.
		_ = unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
		check(t, unix.Close(fd))
		_ = unix.Shutdown(to, unix.SHUT_RDWR) // the link may have lost the RST
		<-done
	})
	return fd
}

// least is the minimum number of states per scene. On a busy host, few states remain unchanged until the comparison.
const least = 20

// run moves the connection into different states by random writes and pauses, and sometimes offers more data than the
// connection can accept.
func (s scene) run(t *testing.T, kernel room.Kernel, states int) []score {
	fd := s.connect(t)
	paced, err := room.Paced(fd)
	check(t, err)
	if want := s.cc == "bbr"; paced != want {
		t.Errorf("%s is paced: %v", s.cc, paced)
	}
	var tracker room.Tracker
	tracker.Paced(paced)
	rng := rand.New(rand.NewPCG(s.link.Seed, 0))
	data := make([]byte, 16<<20)
	scores := make([]score, len(formulas))
	look := func(next int) (room.Snapshot, room.Estimate) {
		snapshot, err := room.ReadSnapshot(fd)
		check(t, err)
		return snapshot, kernel.Estimate(snapshot, next, &tracker)
	}
	write := func(offered int) int {
		n, err := unix.Write(fd, data[:offered])
		if errors.Is(err, unix.EAGAIN) {
			n = 0
		} else {
			check(t, err)
		}
		tracker.Wrote(n, offered)
		return n
	}
	for start := time.Now(); scores[0].states < states && (time.Since(start) < 3*time.Second || scores[0].states < least && time.Since(start) < time.Minute); {
		next := 0
		kind := rng.IntN(7)
		if kind == 6 {
			next = int(math.Exp(rng.Float64() * math.Log(1400)))
		}
		// Data that is acknowledged in the meantime changes the state, and so does a SACK: the kernel splits packets
		// for it, with an overhead for each.
		delivered := func() uint32 {
			info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
			check(t, err)
			return info.Delivered
		}
		before := delivered()
		snapshot, estimate := look(next)
		if snapshot.Arming() {
			_, err := room.Arm(fd)
			check(t, err)
		}
		same := func(took int) bool {
			after, err := room.ReadSnapshot(fd)
			return err == nil && after.Payload == snapshot.Payload+took && delivered() == before
		}
		switch kind {
		case 0, 1:
			took := write(min(estimate.Exact+3*estimate.Goal, len(data)))
			if !same(took) {
				break
			}
			fresh := kernel.Estimate(snapshot, 0, nil)
			for i, f := range formulas[:smallWrites] {
				scores[i].add(f.of(snapshot, estimate, fresh), took, snapshot.MSS)
			}
		case 2, 3:
			for range rng.IntN(20) {
				write(int(math.Exp(rng.Float64() * math.Log(float64(s.most)))))
				look(0)
			}
		case 4, 5:
			time.Sleep(time.Duration(rng.ExpFloat64() * float64(2*time.Millisecond)))
		case 6:
			took, refused := 0, false
			for range 10000 {
				n := write(next)
				if took += n; n < next {
					refused = true
					break
				}
				look(next)
			}
			if refused && same(took) {
				scores[smallWrites].add(estimate.Safe, took, snapshot.MSS)
			}
		}
	}
	return scores
}
