// SPDX-License-Identifier: Apache-2.0

package trace_test

import (
	"errors"
	"os"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/config"
	"sockeye/internal/testenv"
	"sockeye/internal/trace/measure"
)

// newSending starts tracing with the stage send.
func newSending(t testing.TB, policy string) *tracing {
	t.Helper()
	k := newTracing(t, policy)
	if err := bpf.HaveSend(); errors.Is(err, ebpf.ErrNotSupported) {
		t.Skipf("kernel: %v", err)
	} else {
		check(t, err)
	}
	k.sending()
	return k
}

// sending continues tracing with the stage send.
func (k *tracing) sending() {
	k.t.Helper()
	check(k.t, k.Close())
	k.open(bpf.TraceConfig{Dir: k.dir, Cgroup: k.cgroup, Rules: k.compiled, Adopt: true, Send: true})
}

const everySend = "trace: [{cgroup: CGROUP, match: {role: connect}, messages: 1/1, stages: [send, stack, qdisc, network]}]"

// now returns CLOCK_MONOTONIC in nanoseconds, as in samples.
func now(t testing.TB) uint64 {
	t.Helper()
	var ts unix.Timespec
	check(t, os.NewSyscallError("clock_gettime", unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts)))
	return uint64(ts.Nano())
}

// full is a connection whose send buffer is full until its peer reads.
func full(t testing.TB, w *world) ends {
	t.Helper()
	listener, at := w.listen(unix.AF_INET)
	with(unix.SOL_SOCKET, unix.SO_RCVBUF, 4096)(t, listener)
	c := w.connectTo(listener, at, with(unix.SOL_SOCKET, unix.SO_SNDBUF, 1<<15))
	shut(listener)
	b := make([]byte, 1<<12)
	for {
		_, err := retry(func() (int, error) { return unix.SendmsgN(c.connected, b, nil, nil, unix.MSG_DONTWAIT) })
		if errors.Is(err, unix.EAGAIN) {
			return c
		}
		check(t, os.NewSyscallError("sendmsg", err))
	}
}

// TestSend blocks sendmsg until the peer reads: the wait is counted in the stage send, and the whole starts with it.
func TestSend(t *testing.T) {
	k := newSending(t, everySend)
	s := k.samples()
	c := full(t, loopback(t))
	const length = 1<<16 + 1
	type call struct{ began, ended uint64 }
	calls := make(chan call)
	go func() {
		began := now(t)
		if err := send(c.connected, make([]byte, length), 0); err != nil {
			t.Error(err)
		}
		calls <- call{began, now(t)}
	}()
	// The call waits at least that long by the kernel's own account.
	const least = 100 * time.Millisecond
	limited := func() time.Duration { return time.Duration(tcpInfo(t, c.connected).Rwnd_limited) * time.Microsecond }
	before := limited()
	testenv.Within(t, "a closed window", func() bool { return limited() > before+2*least })
	done := drain(c.accepted)
	sent := <-calls
	acknowledged(t, c.connected)
	shut(c.connected)
	<-done
	r := k.settled()
	t.Log(account(r))
	raw := s.wait(int(r.Chosen - r.Outcomes[measure.Full]))
	checkSamples(t, k, raw)
	translate, err := k.names.Translator(k.Trace, k.compiled.Rules)
	check(t, err)
	var found bool
	for i := range raw {
		m := &raw[i].Message
		if m.Length != length {
			continue
		}
		found = true
		if m.Started < sent.began || m.Sent > sent.ended {
			t.Errorf("from %d to %d, but sendmsg from %d to %d", m.Started, m.Sent, sent.began, sent.ended)
		}
		sample := translate(&raw[i])
		if took := sample.Stages[config.StageSend]; took < least {
			t.Errorf("%v in sendmsg, want at least %v", took, least)
		}
		if total := sample.Stages[measure.Total]; total != time.Duration(raw[i].Ended-m.Started) {
			t.Errorf("%v in all, from %d to %d", total, m.Started, raw[i].Ended)
		}
		if e := measure.Explain(&sample); e.Stage != config.StageSend || e.Cause != measure.CauseSendBuffer {
			t.Errorf("it is explained as %s in %s: %s", e.Cause, e.Stage, e.Text)
		}
	}
	if !found {
		t.Errorf("no sample of the message that waited, of %s", account(r))
	}
	checkSendHistogram(t, r)
	if longest := time.Duration(r.Stages[config.StageSend].Max); longest < least {
		t.Errorf("the longest was %v in sendmsg, want %v at least", longest, least)
	}
}

// checkSendHistogram checks that every message in the histogram of the whole has the stage send.
func checkSendHistogram(t testing.TB, r measure.Result) {
	t.Helper()
	send, total := r.Stages[config.StageSend], r.Stages[measure.Total]
	if send == nil || total == nil || send.Count != total.Count || send.Sum > total.Sum || send.Max > total.Max {
		t.Errorf("histogram of send %+v, of the whole %+v", send, total)
	}
}

// TestSendRefused lets calls fail for lack of space: the next message starts with its own call.
func TestSendRefused(t *testing.T) {
	k := newSending(t, everySend)
	s := k.samples()
	c := full(t, loopback(t))
	done := drain(c.accepted)
	acknowledged(t, c.connected)
	began := now(t)
	const length = 1<<12 + 1
	check(t, send(c.connected, make([]byte, length), 0))
	ended := now(t)
	acknowledged(t, c.connected)
	shut(c.connected)
	<-done
	r := k.settled()
	checkSendHistogram(t, r)
	last := s.wait(int(r.Chosen - r.Outcomes[measure.Full]))
	m := last[len(last)-1].Message
	if m.Length != length || m.Started < began || m.Sent > ended {
		t.Errorf("%d bytes from %d to %d, want %d from %d to %d", m.Length, m.Started, m.Sent, length, began, ended)
	}
}

// TestSendOfOthers sends on connections that are not sampled: nothing is recorded for them. A sampled connection
// beside them is measured.
func TestSendOfOthers(t *testing.T) {
	inside := testenv.Subgroup(t, "inside")
	k := newSending(t, "trace: [{cgroup: CGROUP, match: {role: connect, port: 7000}, messages: 1/1, stages: [send, stack, network]}]")
	w := loopback(t)
	listener := newSocket(t, unix.AF_INET)
	at := &unix.SockaddrInet4{Port: 7000, Addr: [4]byte{127, 0, 0, 1}}
	check(t, unix.Bind(listener, at))
	check(t, unix.Listen(listener, 1))
	chosen := newSocket(t, unix.AF_INET)
	check(t, connect(chosen, at))
	peer := accept(t, listener)
	var below ends
	inCgroup(t, inside, func() { below = w.connect(unix.AF_INET) })
	other := w.connect(unix.AF_INET)
	const messages = 20
	for _, way := range [][2]int{{chosen, peer}, {peer, chosen}, {other.connected, other.accepted}, {below.connected, below.accepted}} {
		b := make([]byte, 100)
		for range messages {
			check(t, send(way[0], b, 0))
			_, err := retry(func() (int, error) { return unix.Read(way[1], b) })
			check(t, err)
		}
		connection, err := k.Connection(way[0])
		check(t, err)
		if want := way[0] == chosen; (connection != nil) != want {
			t.Errorf("record of the connection exists: %v, want %v", connection != nil, want)
		}
	}
	acknowledged(t, chosen)
	r := k.settled()
	if r.Chosen != messages {
		t.Errorf("%s, want %d", account(r), messages)
	}
	checkSendHistogram(t, r)
}

// TestSendBegins adds the stage send to a traced connection that has already sent: messages have the stage from then
// on, until tracing ends.
func TestSendBegins(t *testing.T) {
	k := newTracing(t, everySend)
	if err := bpf.HaveSend(); errors.Is(err, ebpf.ErrNotSupported) {
		t.Skipf("kernel: %v", err)
	}
	s := k.samples()
	c := loopback(t).connect(unix.AF_INET, noDelay)
	b := make([]byte, 100)
	exchange := func() bpf.TraceMessage {
		t.Helper()
		check(t, send(c.connected, b, 0))
		_, err := retry(func() (int, error) { return unix.Read(c.accepted, b) })
		check(t, err)
		return s.wait(1)[0].Message
	}
	if m := exchange(); m.Started != 0 {
		t.Errorf("start of sendmsg recorded: %d, want none", m.Started)
	}
	s.close()
	for range 2 {
		k.sending()
		s = k.samples()
		if m := exchange(); m.Started == 0 || m.Started > m.Sent {
			t.Errorf("sendmsg from %d to %d", m.Started, m.Sent)
		}
		s.close()
	}
	r := k.settled()
	if n := r.Stages[config.StageSend].Count; n != 2 || r.Chosen != 3 {
		t.Errorf("%d messages with the stage send, of %s", n, account(r))
	}
}
