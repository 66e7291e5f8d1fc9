// SPDX-License-Identifier: Apache-2.0

package bpf_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/bpf/probe"
	"sockeye/internal/testenv"
)

// programName returns the name of the program that a link attaches.
func (tr *traced) programName(pin string) string {
	tr.t.Helper()
	info, err := tr.Links()[pin].Info()
	check(tr.t, err)
	p, err := ebpf.NewProgramFromID(info.Program)
	check(tr.t, err)
	defer p.Close()
	program, err := p.Info()
	check(tr.t, err)
	return program.Name
}

// TestTraceOnThisKernel traces everything with one rule and checks what each kernel can measure: received data, sent
// datagrams, and TCP messages where there are timestamps.
func TestTraceOnThisKernel(t *testing.T) {
	program, messages := "trace_sockops", uint64(5)
	err := probe.HaveTimestamps()
	if errors.Is(err, ebpf.ErrNotSupported) {
		program, messages = "trace_choose", 0
		if want := "BPF timestamping: not supported before Linux 6.15"; err.Error() != want {
			t.Errorf("%q, want %q", err, want)
		}
	} else {
		check(t, err)
	}
	tr := trace(t, rxRules(allRX|bpf.TraceRuleTX|bpf.TraceRuleUDPTX, 1))
	if name := tr.programName("link_sockops"); name != program {
		t.Errorf("%s is attached, want %s", name, program)
	}
	for protocol, sent := range map[int]uint64{unix.IPPROTO_TCP: messages, unix.IPPROTO_UDP: 5} {
		// Both ends are traced.
		e := rxEnds(t, tr.config.Cgroup, tr.config.Cgroup, protocol, false)
		for range 5 {
			e.send(t, 1, 100)
			e.read(t, 100)
		}
		tr.received(protocol).expect(t, 5, 5, 0, 0, 0, 0)
		var stats *bpf.TraceStats
		until(t, "the end of what was sent", func() bool {
			stats = tr.sentOver(protocol)
			var ended uint64
			for _, n := range stats.Outcome {
				ended += n
			}
			return ended == sent
		})
		if n := count(&stats.Stage[bpf.TraceStageQdisc]); stats.Chosen != sent || n != sent {
			t.Errorf("protocol %d: %d chosen, %d with a time in the queue, want %d", protocol, stats.Chosen, n, sent)
		}
	}
}

// sentOver returns the sent counts of a protocol's group, or zeros.
func (tr *traced) sentOver(protocol int) *bpf.TraceStats {
	tr.t.Helper()
	groups, err := tr.Groups()
	check(tr.t, err)
	for index, g := range groups {
		if int(g.Protocol) == protocol {
			stats, err := tr.Stats(index)
			check(tr.t, err)
			return stats
		}
	}
	return &bpf.TraceStats{}
}

func count(h *bpf.TraceHistogram) (n uint64) {
	for _, in := range h.Bucket {
		n += in
	}
	return n
}

// TestTraceAdopts traces a connection that was open before, from its adoption to its release; a kernel that cannot
// adopt connections reports that, and nothing is attached.
func TestTraceAdopts(t *testing.T) {
	tr := trace(t, rxRules(allRX, 1))
	check(t, tr.Close())
	check(t, bpf.RemoveTrace(tr.config.Dir))
	e := tr.ends(unix.IPPROTO_TCP, false)
	tr.open()
	exchange := func() {
		t.Helper()
		e.send(t, 1, 100)
		e.read(t, 100)
	}
	exchange()
	tr.received(unix.IPPROTO_TCP).expect(t, 0, 0, 0, 0, 0, 0)
	live, err := tr.Live()
	if errors.Is(err, ebpf.ErrNotSupported) {
		if !strings.HasPrefix(err.Error(), "trace open connections: not supported before Linux 5.15") {
			t.Error(err)
		}
		if err := unix.SetsockoptInt(e.receiver, 0x50cc, 1, 0); !errors.Is(err, unix.ENOPROTOOPT) {
			t.Errorf("the hook's own call gives %v", err)
		}
		t.Skipf("kernel: %v", err)
	}
	check(t, err)
	defer live.Close()
	check(t, live.ApplyTo(e.receiver, bpf.MatchAccept))
	exchange()
	tr.received(unix.IPPROTO_TCP).expect(t, 1, 1, 0, 0, 0, 0)
	check(t, live.Forget(e.receiver))
	exchange()
	tr.received(unix.IPPROTO_TCP).expect(t, 1, 1, 0, 0, 0, 0)
	outside := rxEnds(t, testenv.Cgroup(), testenv.Cgroup(), unix.IPPROTO_TCP, false)
	if err := live.ApplyTo(outside.receiver, bpf.MatchAccept); !errors.Is(err, unix.ENOPROTOOPT) {
		t.Errorf("a connection outside of the cgroup is adopted: %v", err)
	}
}
