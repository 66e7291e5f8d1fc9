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

// A formula says how much a socket takes, in bytes.
type formula struct {
	name string
	of   func(s room.Snapshot, e room.Estimate) int
}

// formulas are ours; that of passt, 75 to 100 % of SO_SNDBUF less SIOCOUTQ; and the
// one of a patch to it, which scales by the overhead that it sees.
var formulas = []formula{
	{"safe", func(_ room.Snapshot, e room.Estimate) int { return e.Safe }},
	{"exact", func(_ room.Snapshot, e room.Estimate) int { return e.Exact }},
	{"75-100 % of SO_SNDBUF less SIOCOUTQ", func(s room.Snapshot, _ room.Estimate) int {
		return max(scaled(s.SendBuffer)-s.Payload, 0)
	}},
	{"(sndbuf - wmem_queued) * sendq / wmem_queued", func(s room.Snapshot, _ room.Estimate) int {
		if s.Queued == 0 || s.Payload == 0 {
			return s.SendBuffer / 4 * 3
		}
		return int(int64(max(s.SendBuffer-s.Queued, 0)) * int64(s.Payload) / int64(s.Queued))
	}},
}

// scaled is all of a buffer of up to 128 KiB, three quarters of one of 4 MiB.
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

// score is how a formula did, in bytes.
type score struct {
	states, over     int
	most             float64 // over-estimate in segments
	bytes            int     // the same in bytes
	taken, predicted int64   // by the kernel; what of it was predicted
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

// A scene is a connection and how it is used.
type scene struct {
	cc     string
	family int
	link   lab.LinkOptions
	most   int           // bytes of a write, at least 1
	pause  time.Duration // of the reader after each read
}

func (s scene) String() string {
	family := map[int]string{unix.AF_INET: "IPv4", unix.AF_INET6: "IPv6"}[s.family]
	text := fmt.Sprintf("%s %s mtu %d rtt %v loss %g writes to %d", s.cc, family, s.link.MTU, 2*s.link.Delay, s.link.Loss, s.most)
	if s.pause > 0 {
		text += " slow reader"
	}
	return text
}

// scenes are all combinations, or for a quick run one of each seven.
func scenes(all bool) (list []scene) {
	n := 0
	for _, cc := range []string{"cubic", "bbr", "reno"} {
		for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
			for _, mtu := range []int{1280, 1500, 9000, 65520} {
				for _, rtt := range []time.Duration{0, 15 * time.Millisecond, 100 * time.Millisecond} {
					for _, loss := range []float64{0, 0.001} {
						for _, most := range []int{1400, 1 << 20} {
							for _, pause := range []time.Duration{0, 5 * time.Millisecond} {
								if n++; !all && n%37 != 0 {
									continue
								}
								link := lab.LinkOptions{MTU: mtu, Delay: rtt / 2, Loss: loss, Rate: 1e9, Seed: uint64(n)}
								list = append(list, scene{cc, family, link, most, pause})
							}
						}
					}
				}
			}
		}
	}
	return list
}

// TestEstimate holds the estimates against what the kernel then takes, in thousands
// of states. With SOCKEYE_ROOM=all it goes through all scenes, and prints the table of
// docs/room.md; with SOCKEYE_ROOM=full with three times the states, which takes a quarter
// of an hour.
func TestEstimate(t *testing.T) {
	kernel, err := room.Calibrate()
	if err != nil {
		t.Fatal(err)
	}
	states, all := map[string]int{"all": 100, "full": 300}[os.Getenv("SOCKEYE_ROOM")]
	if !all {
		states = 60
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
			if n := scores[0].states; n < 20 {
				t.Errorf("%d states", n)
			}
			if most := scores[0].most; most > 1 {
				t.Errorf("safe is up to %.1f segments too large", most)
			}
			if scores[1].bytes > 2*65536 {
				t.Errorf("exact is up to %d bytes too large, more than two packets", scores[1].bytes)
			}
		})
	}
	if share := total[0].overShare(); share >= 0.005 {
		t.Errorf("safe is too large in %.2f %% of %d states", 100*share, total[0].states)
	}
	if u := total[1].utilisation(); u <= 0.99 {
		t.Errorf("exact predicts %.4f of what the kernel takes", u)
	}
	var text strings.Builder
	print(&text, "all", total)
	for _, key := range order {
		print(&text, key, by[key])
	}
	t.Logf("\n%s", text.String())
}

// keys are the groups that a scene is counted in.
func (s scene) keys() []string {
	return []string{
		s.cc, map[int]string{unix.AF_INET: "IPv4", unix.AF_INET6: "IPv6"}[s.family],
		fmt.Sprintf("MTU %d", s.link.MTU), fmt.Sprintf("RTT %v", 2*s.link.Delay), fmt.Sprintf("loss %g %%", 100*s.link.Loss),
		fmt.Sprintf("writes of 1 to %d bytes", s.most), fmt.Sprintf("reader pauses %v", s.pause),
	}
}

func print(w *strings.Builder, name string, scores []score) {
	tab := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintf(tab, "%s, %d states\ttoo large\tby at most\tpredicts\n", name, scores[0].states)
	for i, f := range formulas {
		s := scores[i]
		fmt.Fprintf(tab, "  %s\t%.2f %%\t%.1f segments\t%.4f\n", f.name, 100*s.overShare(), s.most, s.utilisation())
	}
	_ = tab.Flush() // to a strings.Builder
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

var errNoCongestionControl = errors.New("no such congestion control")

// connect makes a connection over a link between two namespaces, with a reader at its end.
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
		return errors.Join(unix.Bind(listener, at), unix.Listen(listener, 1))
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
		// What is queued is not waited for.
		_ = unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
		check(t, unix.Close(fd))
		<-done
	})
	return fd
}

// run brings the connection into ever other states by writes and pauses at random,
// and now and then offers more than it can take.
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
	look := func() (room.Snapshot, room.Estimate) {
		snapshot, err := room.Take(fd)
		check(t, err)
		return snapshot, kernel.Estimate(snapshot, 0, &tracker)
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
	for end := time.Now().Add(3 * time.Second); scores[0].states < states && time.Now().Before(end); {
		snapshot, estimate := look()
		if snapshot.Arming() {
			_, err := room.Arm(fd)
			check(t, err)
		}
		switch rng.IntN(3) {
		case 0:
			took := write(min(estimate.Exact+3*estimate.Goal, len(data)))
			// What was acknowledged meanwhile makes it another state.
			if after, err := room.Take(fd); err != nil || after.Payload != snapshot.Payload+took {
				break
			}
			for i, f := range formulas {
				scores[i].add(f.of(snapshot, estimate), took, snapshot.MSS)
			}
		case 1:
			for range rng.IntN(20) {
				write(int(math.Exp(rng.Float64() * math.Log(float64(s.most)))))
				look()
			}
		case 2:
			time.Sleep(time.Duration(rng.ExpFloat64() * float64(2*time.Millisecond)))
		}
	}
	return scores
}
