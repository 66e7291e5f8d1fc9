// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"sockeye/internal/bpf/load"
	"sockeye/internal/bpf/pin"
)

// hook is a program and its tracepoint, or its hook of the cgroup.
type hook struct {
	program, tracepoint string
	cgroup              ebpf.AttachType
}

// pin returns the name of the link's pin.
func (h hook) pin() string { return linkPin + h.program[len("trace_"):] }

// Hooks of the receive path. In each list, the programs that end a sample precede those that begin it.
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

// openRX attaches the programs for received data and for sent datagrams that the rules need.
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
		bySocket, err := load.HaveTracepoint("sock_recv_length")
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
		// No samples wait.
		for _, name := range []string{"waiting", "readers"} {
			spec.Maps[name].MaxEntries = 1
		}
	}
	return t.openHooks(c, spec, append(hooks, rxHook))
}

// openHooks loads programs with shared maps, and pins their links.
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
	collection, err := load.Collection(spec, used)
	if err != nil {
		return load.Explain("programs for what is received", err)
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
	// The program of a tracepoint's link cannot be replaced. For a moment both programs are attached: the first
	// one that ends a sample counts it.
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

// Receives reports whether a rule measures received data.
func (t *Trace) Receives() bool { return t.maps["rx_stats"] != nil }
