// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"fmt"
	"os"
	"path/filepath"

	"sockeye/internal/bpf/pin"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
)

// hook is a program and where it is attached: to a tracepoint, or to the cgroup.
type hook struct {
	program, tracepoint string
	cgroup              ebpf.AttachType
}

// pin is the name of its link's pin.
func (h hook) pin() string { return linkPin + h.program[len("trace_"):] }

// The hooks by which it is seen that what was received is read. What begins a
// sample comes after what ends it, in all of these lists.
var (
	segmentHooks = []hook{
		{program: "trace_closed", tracepoint: "tcp_destroy_sock"},
		{program: "trace_segment", tracepoint: "tcp_rcv_space_adjust"},
	}
	datagramHooks = []hook{
		{program: "trace_dropped", tracepoint: "kfree_skb"},
		{program: "trace_release", cgroup: ebpf.AttachCgroupInetSockRelease},
		{program: "trace_datagrams", tracepoint: "sock_recv_length"},
	}
	// Before Linux 6.3.
	oldDatagramHooks = []hook{
		{program: "trace_dropped", tracepoint: "kfree_skb"},
		{program: "trace_consumed", tracepoint: "consume_skb"},
	}
	rxHook   = hook{program: "trace_rx", cgroup: ebpf.AttachCGroupInetIngress}
	udpHooks = []hook{
		{program: "trace_udp_drop", tracepoint: "kfree_skb"},
		{program: "trace_udp_split", tracepoint: "consume_skb"},
		{program: "trace_udp_xmit", tracepoint: "net_dev_start_xmit"},
		{program: "trace_udp_queue", tracepoint: "net_dev_queue"},
		{program: "trace_udp", cgroup: ebpf.AttachCGroupInetEgress},
	}
)

// openRX attaches what measures what is received, and datagrams sent, if a rule
// asks for it: only what the rules need.
func (t *Trace) openRX(c TraceConfig) error {
	var rx, segments, datagrams, udp bool
	for _, r := range c.Rules.Rules {
		rx = rx || r.Flags&TraceRuleRX != 0
		reader := r.Flags&TraceRuleRX != 0 && r.Flags&TraceRuleReader != 0
		segments = segments || reader && r.Flags&TraceRuleTCP != 0
		datagrams = datagrams || reader && r.Flags&TraceRuleUDP != 0
		udp = udp || r.Flags&TraceRuleUDPTX != 0
	}
	if rx {
		if err := t.openReceived(c, segments, datagrams); err != nil {
			return err
		}
	}
	if udp {
		spec, err := loadTraceUDP()
		if err != nil {
			return err
		}
		return t.openHooks(c, spec, udpHooks)
	}
	return nil
}

func (t *Trace) openReceived(c TraceConfig, segments, datagrams bool) error {
	if err := t.RefreshClock(); err != nil {
		return err
	}
	spec, err := loadTraceRX()
	if err != nil {
		return err
	}
	var hooks []hook
	if segments {
		hooks = append(hooks, segmentHooks...)
	}
	if datagrams {
		bySocket, err := haveTracepoint("sock_recv_length")
		if err != nil {
			return err
		}
		if err := spec.Variables["by_socket"].Set(bySocket); err != nil {
			return err
		}
		if bySocket {
			hooks = append(hooks, datagramHooks...)
		} else {
			hooks = append(hooks, oldDatagramHooks...)
		}
	}
	if !segments && !datagrams {
		// Nothing waits.
		for _, name := range []string{"waiting", "readers"} {
			spec.Maps[name].MaxEntries = 1
		}
	}
	return t.openHooks(c, spec, append(hooks, rxHook))
}

// openHooks loads programs, with the maps that they share, and keeps their links
// pinned.
func (t *Trace) openHooks(c TraceConfig, spec *ebpf.CollectionSpec, hooks []hook) error {
	cgroup, err := os.Open(c.Cgroup)
	if err != nil {
		return fmt.Errorf("open cgroup: %w", err)
	}
	defer cgroup.Close()
	if m := spec.Maps["rx_stats"]; m != nil {
		m.MaxEntries = uint32(max(c.Rules.Groups, 1))
	}
	for name, m := range spec.Maps {
		if pin.IsVariables(name) {
			continue
		}
		if of := t.maps[name]; of != nil {
			m.MaxEntries = of.MaxEntries()
		} else if t.maps[name], err = pin.OpenMap(c.Dir, m); err != nil {
			return err
		}
	}
	wanted := make(map[string]bool)
	for _, h := range hooks {
		wanted[h.program] = true
	}
	for name := range spec.Programs {
		if !wanted[name] {
			delete(spec.Programs, name)
		}
	}
	used := make(map[string]*ebpf.Map)
	for name, m := range t.maps {
		if spec.Maps[name] != nil {
			used[name] = m
		}
	}
	collection, err := loadCollection(spec, used)
	if err != nil {
		return loadError("programs for what is received", err)
	}
	defer collection.Close()
	for _, h := range hooks {
		if err := t.openHook(h, collection.Programs[h.program], cgroup); err != nil {
			return err
		}
	}
	return nil
}

func (t *Trace) openHook(h hook, p *ebpf.Program, cgroup *os.File) (err error) {
	if h.tracepoint == "" {
		return t.attach(h.pin(), h.cgroup, p, cgroup)
	}
	// A tracepoint's link cannot be given another program. For a moment both are
	// attached: who ends a sample first counts it.
	l, err := link.AttachRawTracepoint(link.RawTracepointOptions{Name: h.tracepoint, Program: p})
	if err != nil {
		return fmt.Errorf("attach %s to tracepoint %s: %w", h.program, h.tracepoint, err)
	}
	if err := pin.Replace(l.Pin, filepath.Join(t.dir, h.pin())); err != nil {
		l.Close()
		return fmt.Errorf("pin %s: %w", h.pin(), err)
	}
	t.links[h.pin()] = l
	return nil
}

// Receives tells whether a rule asks for what is received.
func (t *Trace) Receives() bool { return t.maps["rx_stats"] != nil }
