// SPDX-License-Identifier: Apache-2.0

package trace_test

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/testenv"
	"sockeye/internal/trace"
	"sockeye/internal/trace/measure"
	"sockeye/lab"
)

// Kinds of timestamps: SCM_TSTAMP_* of linux/errqueue.h.
const (
	stampDriver = iota
	stampQueue
	stampACK
)

// stamp is a timestamp of SO_TIMESTAMPING as an application reads it.
type stamp struct {
	kind int
	key  uint32
}

var kinds = [...]string{stampDriver: "driver", stampQueue: "queue", stampACK: "ack"}

func (s stamp) String() string { return fmt.Sprintf("%s of %d", kinds[s.kind], s.key) }

// application uses SO_TIMESTAMPING on a connection: keys are bytes since the option was set.
type application struct {
	t  testing.TB
	fd int
}

const asked = unix.SOF_TIMESTAMPING_TX_SCHED | unix.SOF_TIMESTAMPING_TX_SOFTWARE | unix.SOF_TIMESTAMPING_TX_ACK

// newApplication enables reports of timestamps, and timestamps of every message or, without always, of the messages
// for which send requests them.
func newApplication(t testing.TB, fd int, always bool) *application {
	t.Helper()
	const optIDTCP = 1 << 16 // SOF_TIMESTAMPING_OPT_ID_TCP
	flags := unix.SOF_TIMESTAMPING_SOFTWARE | unix.SOF_TIMESTAMPING_OPT_ID | unix.SOF_TIMESTAMPING_OPT_TSONLY | optIDTCP
	if always {
		flags |= asked
	}
	with(unix.SOL_SOCKET, unix.SO_TIMESTAMPING, flags)(t, fd)
	return &application{t, fd}
}

// send sends one message and requests its timestamps.
func (a *application) send(b []byte, flags int) {
	a.t.Helper()
	control := make([]byte, unix.CmsgSpace(4))
	header := unix.Cmsghdr{Level: unix.SOL_SOCKET, Type: unix.SO_TIMESTAMPING}
	header.SetLen(unix.CmsgLen(4))
	binary.NativeEndian.PutUint64(control, header.Len)
	binary.NativeEndian.PutUint32(control[8:], uint32(header.Level))
	binary.NativeEndian.PutUint32(control[12:], uint32(header.Type))
	binary.NativeEndian.PutUint32(control[unix.CmsgLen(0):], asked)
	n, err := retry(func() (int, error) { return unix.SendmsgN(a.fd, b, control, nil, flags|unix.MSG_NOSIGNAL) })
	if err != nil || n != len(b) {
		a.t.Fatalf("%d bytes of %d, %v", n, len(b), os.NewSyscallError("sendmsg", err))
	}
}

// stamps reads the error queue until it is empty.
func (a *application) stamps() (all []stamp, at map[stamp]time.Time) {
	a.t.Helper()
	at = make(map[stamp]time.Time)
	control := make([]byte, 512)
	for {
		_, n, _, _, err := unix.Recvmsg(a.fd, nil, control, unix.MSG_ERRQUEUE|unix.MSG_DONTWAIT)
		if errors.Is(err, unix.EAGAIN) {
			return all, at
		}
		check(a.t, os.NewSyscallError("recvmsg", err))
		messages, err := unix.ParseSocketControlMessage(control[:n])
		check(a.t, err)
		var (
			s    stamp
			when time.Time
		)
		for _, m := range messages {
			switch {
			case m.Header.Level == unix.SOL_SOCKET && m.Header.Type == unix.SO_TIMESTAMPING:
				when = time.Unix(int64(binary.NativeEndian.Uint64(m.Data)), int64(binary.NativeEndian.Uint64(m.Data[8:])))
			case m.Header.Type == unix.IP_RECVERR || m.Header.Type == unix.IPV6_RECVERR:
				// struct sock_extended_err
				s = stamp{int(binary.NativeEndian.Uint32(m.Data[8:])), binary.NativeEndian.Uint32(m.Data[12:])}
			}
		}
		all = append(all, s)
		if _, again := at[s]; !again {
			at[s] = when
		}
	}
}

// realtime returns CLOCK_REALTIME - CLOCK_MONOTONIC with an error of at most half a microsecond.
func realtime(t testing.TB) (offset time.Duration) {
	t.Helper()
	best := time.Hour
	for range 1000 {
		var before, real, after unix.Timespec
		check(t, errors.Join(unix.ClockGettime(unix.CLOCK_MONOTONIC, &before), unix.ClockGettime(unix.CLOCK_REALTIME, &real),
			unix.ClockGettime(unix.CLOCK_MONOTONIC, &after)))
		if took := time.Duration(after.Nano() - before.Nano()); took < best {
			best = took
			offset = time.Duration(real.Nano() - before.Nano() - int64(took)/2)
		}
	}
	return offset
}

// TestAgainstTimestamping measures messages with trace and with SO_TIMESTAMPING: the keys and the times are the same.
func TestAgainstTimestamping(t *testing.T) {
	const (
		messages = 300
		first    = 0xffffc000
	)
	k := newTracing(t, everything)
	s := k.samples()
	w := linked(t, lab.LinkOptions{Delay: 2 * time.Millisecond})
	for _, domain := range []int{unix.AF_INET, unix.AF_INET6} {
		c := w.connect(domain, noDelay, firstSeq(first))
		a := newApplication(t, c.connected, true)
		done := drain(c.accepted)
		offset := realtime(t)
		at := make(map[stamp]time.Time)
		for i := range messages {
			check(t, send(c.connected, make([]byte, 1+i*10), 0))
			acknowledged(t, c.connected)
			// The error queue is short.
			_, of := a.stamps()
			maps.Copy(of, at) // the first is of the first time that it was sent
			at = of
		}
		if len(at) != 3*messages {
			t.Errorf("%d stamps of %d messages", len(at), messages)
		}
		samples := s.wait(messages)
		late := make(map[int][]time.Duration) // of the application's stamps, after ours
		for _, sample := range samples {
			m := sample.Message
			for kind, ours := range map[int]uint64{stampQueue: m.Queued, stampDriver: m.Driver, stampACK: sample.Ended} {
				theirs, ok := at[stamp{kind, m.Key - first}]
				if !ok {
					t.Fatalf("message of key %#x has no timestamp of kind %d", m.Key, kind)
				}
				late[kind] = append(late[kind], theirs.Sub(time.Unix(0, int64(ours)).Add(offset)))
			}
		}
		for kind, all := range late {
			slices.Sort(all)
			least, middle, high := all[0], all[len(all)/2], all[len(all)*9/10]
			t.Logf("%s: the application's stamp is later by %v, %v, %v (least, p50, p90)", kinds[kind], least, middle, high)
			// The program records its time when the kernel records the other one. When an acknowledgement arrives,
			// the kernel has done all of its work.
			most := 10 * time.Microsecond
			if kind == stampACK {
				most = 30 * time.Microsecond
			}
			most *= slower
			if least < -2*time.Microsecond || middle > most || high > 10*most {
				t.Errorf("%s: the application's stamp is later by %v to %v, p50 %v", kinds[kind], least, high, middle)
			}
		}
		shut(c.connected)
		<-done
	}
	// The host may be slow to acknowledge.
	if r := k.settled(); r.Outcomes[measure.Acked]+r.Outcomes[measure.Retransmitted] != r.Chosen {
		t.Errorf("%s, want all to be acked", account(r))
	}
}

// TestTimestampingIsLeftAlone checks that an application gets the timestamps that it would get without tracing, with
// messages that share packets or do not.
func TestTimestampingIsLeftAlone(t *testing.T) {
	needsTimestamps(t)
	every := func(n int) func(int) bool { return func(i int) bool { return i%n == 0 } }
	for _, test := range []struct {
		name string
		// run sends messages, some with timestamps of the application, and returns when all are acknowledged.
		run func(t *testing.T, w *world, c ends, lost func(bool), one func(i int))
		// joined: packets are retransmitted. Timing decides which of them are merged; the last of a number of
		// messages always has its timestamps.
		joined   int
		messages int
	}{
		{"one by one", func(t *testing.T, _ *world, c ends, _ func(bool), one func(i int)) {
			for i := range 60 {
				one(i)
				acknowledged(t, c.connected)
			}
		}, 0, 60},
		{"in one packet", func(t *testing.T, _ *world, c ends, _ func(bool), one func(i int)) {
			for i := range 60 {
				with(unix.SOL_TCP, unix.TCP_CORK, 1)(t, c.connected)
				for j := range 5 {
					one(5*i + j)
				}
				with(unix.SOL_TCP, unix.TCP_CORK, 0)(t, c.connected)
				acknowledged(t, c.connected)
			}
		}, 0, 300},
		{"joined when sent again", func(t *testing.T, w *world, c ends, lost func(bool), one func(i int)) {
			for i := range 42 {
				switch before := w.link.Counts().AToB.Dropped; {
				case i%14 < 8: // opens the congestion window
					one(i)
					acknowledged(t, c.connected)
				case i%14 < 13:
					lost(true)
					one(i)
				default:
					one(i)
					testenv.Within(t, "packets that are lost", func() bool { return w.link.Counts().AToB.Dropped > before })
					lost(false)
					acknowledged(t, c.connected)
				}
			}
		}, 14, 42},
		{"held by the congestion window", func(t *testing.T, w *world, c ends, lost func(bool), one func(i int)) {
			lost(true)
			before := w.link.Counts().AToB.Dropped
			for i := range 30 {
				one(i)
			}
			testenv.Within(t, "packets that are lost", func() bool { return w.link.Counts().AToB.Dropped >= before+10 })
			lost(false)
			acknowledged(t, c.connected)
		}, 30, 30},
	} {
		w, lost := hole(t, lab.LinkOptions{})
		for _, asks := range []struct {
			name string
			of   func(int) bool
		}{{"every", every(1)}, {"every 2nd", every(2)}, {"every 3rd", every(3)}} {
			t.Run(test.name+", stamps of "+asks.name, func(t *testing.T) {
				w := &world{t, w.link, w.a, w.b}
				var wanted []stamp
				for _, policy := range []string{
					"", // no tracing
					everything,
					"trace: [{cgroup: CGROUP, match: {role: connect}, messages: 1/3}]",
				} {
					var k *tracing
					if policy != "" {
						k = newTracing(t, policy)
					}
					c := w.connect(unix.AF_INET, noDelay)
					done := drain(c.accepted)
					a := newApplication(t, c.connected, false)
					test.run(t, w, c, lost.Store, func(i int) {
						b := make([]byte, size)
						if asks.of(i) {
							a.send(b, 0)
						} else {
							check(t, send(c.connected, b, 0))
						}
					})
					stamps, _ := a.stamps()
					slices.SortFunc(stamps, compareStamps)
					// A slow host may retransmit packets that are in flight.
					stamps = slices.CompactFunc(stamps, func(a, b stamp) bool { return a == b && a.kind != stampACK })
					switch {
					case test.joined > 0:
						checkStamps(t, stamps, test.messages, test.joined, asks.of)
					case wanted == nil:
						wanted = stamps
					case !slices.Equal(stamps, wanted):
						t.Errorf("%s: the application received other timestamps: %v", policy, difference(stamps, wanted))
					}
					shut(c.connected)
					<-done
					if k == nil {
						continue
					}
					r := k.settled()
					t.Log(account(r))
					if policy == everything && r.Chosen != uint64(test.messages) {
						t.Errorf("%s, want %d to be chosen", account(r), test.messages)
					}
					if n := r.Outcomes[measure.Coalesced]; n > 0 && test.joined == 0 {
						t.Errorf("%d are coalesced, though no packets are joined", n)
					}
					if policy == everything && asks.name == "every" && r.Outcomes[measure.Application] > 0 {
						t.Errorf("%s, though the application's keys are the messages'", account(r))
					}
					check(t, bpf.RemoveTrace(k.dir))
				}
			})
		}
	}
}

// TestTimestampingAdopted adopts a connection while a timestamp of the application is pending.
func TestTimestampingAdopted(t *testing.T) {
	needsTimestamps(t)
	w, lost := hole(t, lab.LinkOptions{})
	listener, at := w.listen(unix.AF_INET)
	c := w.connectTo(listener, at, noDelay)
	done := drain(c.accepted)
	a := newApplication(t, c.connected, false)
	lost.Store(true)
	a.send(make([]byte, size), 0)
	k := newTracing(t, everything)
	adopted, err := trace.SelectOpen(k.Trace, k.cgroup)
	check(t, err)
	if adopted.Chosen != 1 {
		t.Errorf("%d connections adopted, want 1: %v", adopted.Chosen, adopted.Problems)
	}
	for range 4 {
		check(t, send(c.connected, make([]byte, size), 0))
	}
	lost.Store(false)
	acknowledged(t, c.connected)
	for range 4 {
		check(t, send(c.connected, make([]byte, size), 0))
		acknowledged(t, c.connected)
	}
	stamps, _ := a.stamps()
	checkStamps(t, stamps, 9, 9, func(i int) bool { return i == 0 })
	shut(c.connected)
	<-done
	// Messages that were sent together with it are left to the application.
	if r := k.settled(); r.Chosen != 8 || r.Outcomes[measure.Application] != 4 {
		t.Errorf("%s, want 4 of 8 to be left to the application", account(r))
	}
}

// size is the size of each message in TestTimestampingIsLeftAlone.
const size = 100

// checkStamps checks that an application has timestamps of the messages for which it requested them only, of the last
// of a number of messages in any case, and one for each ACK.
func checkStamps(t testing.TB, stamps []stamp, messages, last int, asked func(int) bool) {
	t.Helper()
	had := make(map[stamp]int)
	for _, s := range stamps {
		if i := int(s.key) / size; s.key%size != size-1 || i >= messages || !asked(i) {
			t.Errorf("unrequested timestamp: %v", s)
		}
		had[s]++
	}
	for s, n := range had {
		if s.kind == stampACK && n > 1 {
			t.Errorf("%d times: %v", n, s)
		}
	}
	for first := 0; first < messages; first += last {
		i := first + last - 1
		for !asked(i) {
			i--
		}
		for kind := range kinds {
			if s := (stamp{kind, uint32(i*size + size - 1)}); had[s] == 0 {
				t.Errorf("missing: %v", s)
			}
		}
	}
}

func compareStamps(a, b stamp) int {
	return cmp.Or(cmp.Compare(a.key, b.key), cmp.Compare(a.kind, b.kind))
}

// difference returns the timestamps that one application has more often than the other.
func difference(have, want []stamp) string {
	count := make(map[stamp]int)
	for _, s := range have {
		count[s]++
	}
	for _, s := range want {
		count[s]--
	}
	maps.DeleteFunc(count, func(_ stamp, n int) bool { return n == 0 })
	return fmt.Sprint(count)
}
