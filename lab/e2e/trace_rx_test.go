// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"bytes"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/config"
	"sockeye/internal/trace/measure"
	"sockeye/lab"
)

// received waits until n messages that match a selector were received and are complete.
func (h *tuned) received(selector string, n uint64) (r measure.Result) {
	h.Helper()
	h.eventually("the messages to be received", func() error {
		r = h.results(selector)
		if ended(r.RXOutcomes) < n || r.RXWaiting > 0 {
			return fmt.Errorf("%d wait, %v, want %d", r.RXWaiting, r.RXOutcomes, n)
		}
		return nil
	})
	if r.RXChosen != ended(r.RXOutcomes) {
		h.Errorf("%s: received %d, ended %v", selector, r.RXChosen, r.RXOutcomes)
	}
	return r
}

// TestTraceReader checks that the reader stage shows a stopped reader of TCP and UDP, and the unread queue while the
// reader is stopped.
func TestTraceReader(t *testing.T) {
	t.Parallel()
	h := newTuned(t, lab.LinkOptions{Delay: time.Millisecond})
	near := h.makeGroup("near")
	h.setTrace("{name: all, cgroup: " + near + ", messages: 1/1, stages: [rx_stack, reader], protocols: [tcp, udp]}")
	h.startAgent()
	p, far := h.startNear("near"), h.startFar()
	p.listen(tracePort)
	p.do(order{Do: "bind", At: netip.AddrPortFrom(wildcard, tracePort)})
	far.connect(2, at(tracePort, near4, near6)...)
	send := func() {
		far.exchanges(5)
		far.do(order{Do: "datagrams", To: at(tracePort, near4, near6), traceOrder: traceOrder{Count: 10, Size: 500}})
	}
	send()
	for protocol, n := range map[string]uint64{"tcp": 12, "udp": 20} {
		r := h.received("protocol="+protocol, n)
		// On a busy host, a whole burst may wait until the reader is scheduled.
		again := func() measure.Result {
			send()
			return h.received("protocol="+protocol, n)
		}
		h.took(protocol+", running", r, config.StageRXStack, 0, again)
		h.took(protocol+", running", r, config.StageReader, 0, again)
		if r.RXChosen < n || r.RXOutcomes[measure.Read] != r.RXChosen || r.Chosen != 0 {
			t.Errorf("%s, running: %+v", protocol, r)
		}
	}
	if out, _, code := h.cli("trace"); code != 0 || !strings.Contains(out, "the reader is not behind") {
		t.Errorf("sockeye trace, running: exit code %d:\n%s", code, out)
	}

	// The reader is stopped.
	const stopped = 300 * time.Millisecond
	h.stopPeer(p)
	answer := far.order(order{Do: "exchanges", Parallel: 2, Up: 1000, traceOrder: traceOrder{Count: 1}})
	far2 := h.startPeer(h.devices, "others", "far2")
	far2.do(order{Do: "datagrams", To: at(tracePort, near4, near6), traceOrder: traceOrder{Count: 3, Size: 500}})
	for protocol, n := range map[string]uint64{"tcp": 2, "udp": 6} {
		var r measure.Result
		h.eventually("the reader to be behind", func() error {
			r = h.results("protocol=" + protocol)
			if r.RXWaiting != n || r.RXOldest < stopped {
				return fmt.Errorf("%s: %d wait for %v", protocol, r.RXWaiting, r.RXOldest)
			}
			return nil
		})
		if r.RXOldest > patience {
			t.Errorf("%s: age of the oldest unread data: %v", protocol, r.RXOldest)
		}
	}
	if out, _, code := h.cli("trace"); code != 0 || !strings.Contains(out, "2 waiting; the reader is ") || !strings.Contains(out, "6 waiting; the reader is ") {
		t.Errorf("sockeye trace, stopped: exit code %d:\n%s", code, out)
	}
	h.must(p.Signal(unix.SIGCONT))
	answer()
	for protocol, n := range map[string]uint64{"tcp": 14, "udp": 26} {
		r := h.received("protocol="+protocol, n)
		if late := r.Stages[config.StageReader]; time.Duration(late.Max) < stopped {
			t.Errorf("%s, stopped: maximum of the reader stage %v", protocol, time.Duration(late.Max))
		}
		h.took(protocol+", stopped", r, config.StageRXStack, 0)
	}

	// The measurement continues without an agent, except for the times of arrival, which the agent enables in the
	// kernel.
	h.killAgent()
	far.exchanges(2)
	h.startAgent()
	r := h.received("protocol=tcp", 18)
	if r.RXChosen < 18 || r.RXUnstamped > 4 {
		t.Errorf("without an agent: %+v", r)
	}
	// The kernel enables timestamps in a work queue (net_enable_timestamp).
	h.eventually("arrivals to be stamped", func() error {
		before := r
		far.exchanges(1)
		r = h.received("protocol=tcp", before.RXChosen+2)
		if r.RXUnstamped > before.RXUnstamped {
			return fmt.Errorf("%d of %d are not stamped", r.RXUnstamped-before.RXUnstamped, r.RXChosen-before.RXChosen)
		}
		return nil
	})
	before := r
	far.exchanges(3)
	if r = h.received("protocol=tcp", before.RXChosen+6); r.RXChosen < before.RXChosen+6 || r.RXUnstamped > before.RXUnstamped {
		t.Errorf("a new agent: %+v, before %+v", r, before)
	}
	// No program is attached for rules without the stage.
	if n := len(h.links()); n < 5 {
		t.Errorf("%d programs are attached", n)
	}
	h.applyTrace("{name: all, cgroup: " + near + ", messages: 1/1}")
	if links := h.links(); len(links) != 1 {
		t.Errorf("without receive stages, programs %v are attached", links)
	}
	h.setPolicyText("trace: []\n")
	var plan api.Plan
	h.show(&plan, "apply")
	if links := h.links(); len(links) > 0 || len(h.tracePins()) > 0 {
		t.Errorf("without rules, programs %v are attached, pins are %v", links, h.tracePins())
	}
}

var programID = regexp.MustCompile(`(?m)^prog_id:\s+(\d+)$`)

// links returns the ids of the programs that the agent has attached.
func (h *tuned) links() (programs []ebpf.ProgramID) {
	h.Helper()
	infos, err := filepath.Glob(fmt.Sprintf("/proc/%d/fdinfo/*", h.agent.Pid()))
	h.must(err)
	for _, path := range infos {
		b, err := os.ReadFile(path)
		if err != nil || !bytes.Contains(b, []byte("link_type:")) {
			continue // closed in the meantime, or not a program
		}
		id, err := strconv.Atoi(string(programID.FindSubmatch(b)[1]))
		h.must(err)
		programs = append(programs, ebpf.ProgramID(id))
	}
	return programs
}

// stopPeer stops a peer with SIGSTOP.
func (h *tuned) stopPeer(p *peer) {
	h.Helper()
	h.members[0] = &member{Process: p.Process}
	h.hang(0)
	delete(h.members, 0)
}

// TestTraceUnread checks the outcomes of unread messages.
func TestTraceUnread(t *testing.T) {
	t.Parallel()
	h := newTuned(t, lab.LinkOptions{})
	near := h.makeGroup("near")
	h.setTrace("{name: all, cgroup: " + near + ", messages: 1/1, stages: [reader], protocols: [tcp, udp]}")
	h.startAgent()
	p, far := h.startNear("near"), h.startFar()
	p.listen(tracePort)
	p.do(order{Do: "bind", At: netip.AddrPortFrom(wildcard, tracePort), traceOrder: traceOrder{Size: 20_000}})
	far.connect(4, at(tracePort, near4)...)
	h.received("protocol=tcp", 4)
	h.stopPeer(p)
	far.order(order{Do: "exchanges", Parallel: 4, Up: 1000, traceOrder: traceOrder{Count: 1}})
	const datagrams = 200
	far2 := h.startPeer(h.devices, "others", "far2")
	far2.do(order{Do: "datagrams", To: at(tracePort, near4), traceOrder: traceOrder{Count: datagrams, Size: 1000}})
	h.eventually("datagrams to be dropped", func() error {
		if r := h.results("protocol=udp"); r.RXChosen != datagrams || r.RXOutcomes[measure.Dropped]+r.RXWaiting != datagrams {
			return fmt.Errorf("%d chosen, %v, %d wait", r.RXChosen, r.RXOutcomes, r.RXWaiting)
		}
		if r := h.results("protocol=tcp"); r.RXWaiting != 4 {
			return fmt.Errorf("%d wait", r.RXWaiting)
		}
		return nil
	})
	h.must(p.Kill())
	r := h.received("protocol=tcp", 8)
	if r.RXOutcomes[measure.Unread] != 4 || r.RXOutcomes[measure.Read] != 4 {
		t.Errorf("tcp: %v", r.RXOutcomes)
	}
	r = h.received("protocol=udp", datagrams)
	if r.RXOutcomes[measure.Dropped] == 0 || r.RXOutcomes[measure.Unread] == 0 || r.RXOutcomes[measure.Read] != 0 {
		t.Errorf("udp: %v", r.RXOutcomes)
	}
}

// TestTraceDatagrams checks that sent datagrams are measured until they reach the driver.
func TestTraceDatagrams(t *testing.T) {
	t.Parallel()
	const rate, burst, size, count = 500_000, 2000, 1000, 20 // bytes a second, bytes
	h := newTuned(t, lab.LinkOptions{})
	near := h.makeGroup("near")
	h.setTrace("{name: all, cgroup: " + near + ", messages: 1/1, stages: [stack, qdisc], protocols: udp, group_by: port}")
	h.startAgent()
	p, far := h.startNear("near"), h.startFar()
	const rounds = 10
	for port := range uint16(1 + rounds) {
		far.do(order{Do: "bind", At: netip.AddrPortFrom(wildcard, tracePort+port)})
	}
	p.do(order{Do: "datagrams", To: at(tracePort, far4, far6), traceOrder: traceOrder{Count: 10, Size: size}})
	r := h.ended(fmt.Sprintf("port=%d", tracePort), 20)
	h.took("no rate limit", r, config.StageQdisc, 0)
	h.took("no rate limit", r, config.StageStack, 0)
	// The last datagram of a burst waits for all others, unless a busy host sends them slowly or dequeues late.
	const longest = (count*(size+28) - burst) * time.Second / rate
	var took []time.Duration
	for round := range uint16(rounds) {
		port := tracePort + 1 + round
		remove := h.tokenBucket(rate, burst)
		p.do(order{Do: "datagrams", To: at(port, far4), traceOrder: traceOrder{Count: count, Size: size}})
		r = h.ended(fmt.Sprintf("port=%d", port), count)
		remove()
		if r.Chosen != count {
			t.Errorf("a rate limit: %+v", r)
		}
		stats := r.Stages[config.StageQdisc]
		if stats == nil || stats.Count == 0 {
			t.Fatalf("rate limit: no qdisc stage: %+v", r.Outcomes)
		}
		most := time.Duration(stats.Max)
		took = append(took, most)
		if most < longest*4/5 || most > longest+longest/5+20*time.Millisecond {
			continue
		}
		h.took("a rate limit", r, config.StageStack, 0)
		return
	}
	t.Errorf("rate limit: the longest times in qdisc are %v, want %v", took, longest)
}
