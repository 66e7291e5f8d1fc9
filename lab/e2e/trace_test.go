// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/config"
	"sockeye/internal/trace/measure"
	"sockeye/lab"
)

// TestTraceNetwork checks that the delay of a link is in the network stage only.
func TestTraceNetwork(t *testing.T) {
	t.Parallel()
	h := newTraced(t, 0)
	near := h.group("near")
	h.setTrace("{name: all, cgroup: " + near + ", messages: 1/1, group_by: port}")
	h.startAgent()
	p, far := h.startNear("near"), h.startFar()
	for i, delay := range []time.Duration{2 * time.Millisecond, 10 * time.Millisecond, 40 * time.Millisecond} {
		o := h.link.Options()
		o.Delay = delay
		h.must(h.link.Set(o))
		port := tracePort + uint16(i)
		far.listen(port)
		p.connect(4, at(port, far4, far6)...)
		n := uint64(4)
		more := func() measure.Result {
			p.do(order{Do: "exchanges", Parallel: 4, Up: 1000, traceOrder: traceOrder{Count: 10}})
			n += 40
			return h.ended(fmt.Sprintf("port=%d", port), n)
		}
		what := fmt.Sprintf("a delay of %v", delay)
		r := more()
		h.took(what, r, config.StageNetwork, 2*delay, more)
		h.took(what, r, measure.Total, 2*delay, more)
		h.took(what, r, config.StageStack, 0)
		h.took(what, r, config.StageQdisc, 0)
		if r.Outcomes[measure.Acked]+r.Outcomes[measure.Retransmitted] != 44 || r.Bytes != 44*1008 {
			t.Errorf("%s: %v, %d bytes", what, r.Outcomes, r.Bytes)
		}
		p.do(order{Do: "close"})
	}
}

// explained returns the slowest message of the length that matches a selector, and fails the test unless its
// explanation is as expected.
func (h *tuned) explained(selector string, length uint32, stage config.Stage, cause measure.Cause, words ...string) (m api.TraceSlow) {
	h.Helper()
	list := h.slowest(selector, 100)
	i := slices.IndexFunc(list, func(m api.TraceSlow) bool { return m.Length == length })
	if i < 0 {
		h.Fatalf("%s: no slow message of %d bytes: %+v", selector, length, list)
	}
	m = list[i]
	if m.Explanation.Stage != stage || m.Explanation.Cause != cause {
		h.Errorf("%s: the slowest message is explained by %s in %s, want %s in %s: %+v", selector, m.Explanation.Cause, m.Explanation.Stage, cause, stage, m)
	}
	// The text output has the same content.
	out, errs, code := h.cli("trace", "slow", "-n", "100", "--select", selector)
	for _, word := range append(words, m.Explanation.Text, m.Local.String(), m.Remote.String()) {
		if code != 0 || !strings.Contains(out, word) {
			h.Errorf("sockeye trace slow: exit code %d, without %q:\n%s%s", code, word, out, errs)
		}
	}
	return m
}

// TestTraceStack checks that the stack stage shows and explains delays by the congestion window, the peer's receive
// window, and pacing, which tune rules set on the same connections.
func TestTraceStack(t *testing.T) {
	t.Parallel()
	const delay, size = 10 * time.Millisecond, 100_000
	h := newTraced(t, delay)
	near := h.group("near")
	const cwnd, paced, window = tracePort, tracePort + 1, tracePort + 2
	h.setPolicyText(policySection("tune",
		fmt.Sprintf("{name: cwnd, cgroup: %s, match: {port: %d}, set: {cwnd_clamp: 10, sndbuf: 1MB}}", near, cwnd),
		fmt.Sprintf("{name: paced, cgroup: %s, match: {port: %d}, set: {pacing_rate: 4Mbit/s, sndbuf: 1MB, initial_cwnd: 200}}", near, paced),
		fmt.Sprintf("{name: window, cgroup: %s, match: {port: %d}, set: {sndbuf: 1MB, initial_cwnd: 200}}", near, window),
	) + traceText("{name: all, cgroup: "+near+", messages: 1/1, group_by: [port, rule]}"))
	h.startAgent()
	p := h.startNear("near")
	h.sink(h.farListener(cwnd, nil))
	h.sink(h.farListener(paced, nil))
	shut := h.farListener(window, func(fd int) error { return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, 8000) })
	// connect opens a connection and returns a function that sends messages and waits until they are complete.
	connect := func(rule string, port uint16, count int) (send func() measure.Result) {
		t.Helper()
		p.do(order{Do: "connect", N: 1, To: at(port, far4), Keep: true})
		n := uint64(0)
		return func() (r measure.Result) {
			t.Helper()
			for range count {
				p.do(order{Do: "send", traceOrder: traceOrder{Count: 1, Size: size}})
				n++
				r = h.ended("tune_rule="+rule, n)
			}
			return r
		}
	}

	// 100 KB with 10 packets of 1448 bytes in each round trip: the last packet is sent in the 7th.
	send := connect("cwnd", cwnd, 3)
	r := send()
	h.tookRounds("a small congestion window", r, 6, 2*delay, send)
	h.took("a small congestion window", r, config.StageNetwork, 2*delay, send)
	p.do(order{Do: "close"})
	m := h.explained(fmt.Sprintf("port=%d", cwnd), size, config.StageStack, measure.CauseCwnd, "the congestion window, 10 packets of 1448 B")
	if m.Group.TuneRule != "cwnd" || m.Cwnd != 10 || m.Length != size || m.Role != config.RoleConnect {
		t.Errorf("a small congestion window: %+v", m)
	}

	// Pacing of 500 KB/s.
	send = connect("paced", paced, 2)
	h.took("pacing", send(), config.StageStack, 180*time.Millisecond, send)
	p.do(order{Do: "close"})
	h.explained("tune_rule=paced", size, config.StageStack, measure.CausePacing, "pacing at ", "Mbit/s")

	// The reader is stopped for a time.
	const stopped = 400 * time.Millisecond
	var reader sync.WaitGroup
	reader.Go(func() {
		c, err := shut.AcceptTCP()
		if err != nil {
			t.Error(err)
			return
		}
		defer c.Close()
		// The time starts when the message is in transit.
		if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
			t.Error(err)
			return
		}
		time.Sleep(stopped)
		n, err := io.Copy(io.Discard, c)
		if err != nil || n != size-1 {
			t.Errorf("%d bytes more: %v", n, err)
		}
	})
	r = connect("window", window, 1)()
	p.do(order{Do: "close"})
	reader.Wait()
	if stack := r.Stages[config.StageStack]; stack == nil || stack.Quantile(0.5) < stopped-50*time.Millisecond {
		t.Errorf("a closed window: %+v", r)
	}
	m = h.explained("tune_rule=window", size, config.StageStack, measure.CauseWindow, "the peer's window")
	if m.WindowLimited < stopped/2 || m.Window > 8000 {
		t.Errorf("a closed window: %+v", m)
	}
}

// TestTraceQdisc checks that the qdisc stage shows the queueing delay of a rate limit on this host.
func TestTraceQdisc(t *testing.T) {
	t.Parallel()
	const rate, burst, size, connections = 200_000, 3000, 1000, 20 // bytes a second, bytes
	h := newTraced(t, time.Millisecond)
	h.setTrace("{name: all, cgroup: " + h.group("near") + ", messages: 1/1, group_by: port}")
	h.startAgent()
	p := h.startNear("near")
	// All messages are queued at the same time, so that the last message waits for all others, unless a busy host sends
	// them slowly, dequeues late, or delays the message after the queue.
	const longest = (connections*(size+52) - burst) * time.Second / rate
	var took []string
	for round := range uint16(10) {
		port := tracePort + round
		h.sink(h.farListener(port, nil))
		p.do(order{Do: "connect", N: connections, Parallel: 8, To: at(port, far4), Keep: true})
		remove := h.tokenBucket(rate, burst)
		p.do(order{Do: "send", Parallel: connections, traceOrder: traceOrder{Count: 1, Size: size}})
		r := h.ended(fmt.Sprintf("port=%d", port), connections)
		remove()
		p.do(order{Do: "close"})
		most := func(stage config.Stage) time.Duration { return time.Duration(r.Stages[stage].Max) }
		queued, transit, stack := most(config.StageQdisc), most(config.StageNetwork), most(config.StageStack)
		took = append(took, fmt.Sprintf("%v in qdisc, %v in network, %v in stack", queued, transit, stack))
		if queued < longest-longest/20 || queued > longest+longest/20+5*time.Millisecond || transit > 3*longest/4 || stack > longest/4 {
			continue
		}
		h.took("a rate limit", r, config.StageStack, 0)
		h.took("a rate limit", r, config.StageNetwork, 2*time.Millisecond)
		h.explained(fmt.Sprintf("port=%d", port), size, config.StageQdisc, measure.CauseLocalQueue, "queued on this host")
		h.sink(h.farListener(port+100, nil))
		p.do(order{Do: "connect", N: connections, Parallel: 8, To: at(port+100, far4), Keep: true})
		p.do(order{Do: "send", Parallel: connections, traceOrder: traceOrder{Count: 1, Size: size}})
		h.took("no rate limit", h.ended(fmt.Sprintf("port=%d", port+100), connections), config.StageQdisc, 0)
		return
	}
	t.Errorf("rate limit: the longest times are %q, want %v in qdisc", took, longest)
}

// TestTraceLoss checks the explanations of losses: of the message's last segment, of an earlier segment, and of an
// acknowledged segment.
func TestTraceLoss(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	var lose func(n int) bool // of data segments, from 1
	n := 0
	h := newTuned(t, lab.LinkOptions{Delay: 10 * time.Millisecond, Drop: onlyData(func(segment) bool {
		mu.Lock()
		defer mu.Unlock()
		n++
		return lose != nil && lose(n)
	})})
	h.must(h.collectors.Sysctl("ipv4.tcp_early_retrans", "0")) // no tail loss probes, which a busy host sends unnecessarily
	losing := func(f func(n int) bool) {
		mu.Lock()
		defer mu.Unlock()
		lose, n = f, 0
	}
	h.makeGroup("near")
	h.setTrace("{name: all, cgroup: " + h.group("near") + ", messages: 1/1, group_by: port}")
	h.startAgent()
	p := h.startNear("near")
	const size = 10_000 // 7 segments
	var sinks []net.Listener
	for i := range uint16(3) {
		l := h.farListener(tracePort+i, nil)
		sinks = append(sinks, l)
		if i < 2 {
			h.sink(l)
		}
	}
	// send drops segments of one message of a connection, after messages that measure the RTT.
	const before = 5
	send := func(port uint16, which func(n int) bool) {
		t.Helper()
		p.do(order{Do: "connect", N: 1, To: at(port, far4), Keep: true})
		for i := range uint64(before) {
			p.do(order{Do: "send", traceOrder: traceOrder{Count: 1, Size: 100}})
			h.ended(fmt.Sprintf("port=%d", port), i+1)
		}
		losing(which)
		p.do(order{Do: "send", traceOrder: traceOrder{Count: 1, Size: size}})
	}
	// On a busy host, the retransmission timer of 0.2 s would repeat segments before their acknowledgements arrive.
	h.must(h.collectors.Sysctl("ipv4.tcp_rto_min_us", "2000000"))
	send(tracePort, func(n int) bool { return n == 7 })
	r := h.ended(fmt.Sprintf("port=%d", tracePort), before+1)
	losing(nil)
	if r.Outcomes[measure.Retransmitted] != 1 {
		t.Errorf("the last segment is lost: %v", r.Outcomes)
	}
	m := h.explained(fmt.Sprintf("port=%d", tracePort), size, config.StageNetwork, measure.CauseLoss, "its last segment, or the acknowledgement, was lost", "retransmitted")
	if m.Repeats == 0 || m.Outcome != measure.Retransmitted {
		t.Errorf("the last segment is lost: %+v", m)
	}
	p.do(order{Do: "close"})

	send(tracePort+1, func(n int) bool { return n == 3 })
	r = h.ended(fmt.Sprintf("port=%d", tracePort+1), before+1)
	losing(nil)
	h.must(h.collectors.Sysctl("ipv4.tcp_rto_min_us", "200000"))
	if r.Outcomes[measure.Acked] != before+1 {
		t.Errorf("a segment before the last is lost: %v", r.Outcomes)
	}
	m = h.explained(fmt.Sprintf("port=%d", tracePort+1), size, config.StageNetwork, measure.CauseLoss, "earlier segments were lost")
	if m.Retransmits == 0 || m.Repeats != 0 {
		t.Errorf("a segment before the last is lost: %+v", m)
	}
	p.do(order{Do: "close"})

	// The peer stops responding.
	send(tracePort+2, func(int) bool { return true })
	h.eventually("the message to be retransmitted", func() error {
		mu.Lock()
		defer mu.Unlock()
		if n < 9 {
			return fmt.Errorf("%d segments", n)
		}
		return nil
	})
	h.must(p.Kill())
	losing(nil)
	c := h.accept(sinks[2].(*net.TCPListener))
	h.must(c.SetLinger(0))
	c.Close()
	r = h.ended(fmt.Sprintf("port=%d", tracePort+2), before+1)
	if r.Outcomes[measure.Unacknowledged] != 1 || r.Bytes != before*100 {
		t.Errorf("the peer vanishes: %v", r.Outcomes)
	}
	h.explained(fmt.Sprintf("port=%d", tracePort+2), size, config.StageNetwork, measure.CauseUnacknowledged, "unacknowledged after")
}
