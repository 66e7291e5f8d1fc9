// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// What became of what is received, its stages, and the outcomes of datagrams
// sent; see bpf/include/trace.h.
//
//revive:disable:exported
const (
	TraceBehind = int(traceSockopsTraceLimitTRACE_BEHIND)

	TraceRXStack  = int(traceRXTraceRxStageTRACE_RX_STACK)
	TraceRXReader = int(traceRXTraceRxStageTRACE_RX_READER)

	TraceRXRead    = int(traceRXTraceRxOutcomeTRACE_RX_READ)
	TraceRXDropped = int(traceRXTraceRxOutcomeTRACE_RX_DROPPED)
	TraceRXUnread  = int(traceRXTraceRxOutcomeTRACE_RX_UNREAD)
	TraceRXFull    = int(traceRXTraceRxOutcomeTRACE_RX_FULL)

	TraceMissed  = int(traceSockopsTraceOutcomeTRACE_MISSED)
	TraceSent    = int(traceSockopsTraceOutcomeTRACE_SENT)
	TraceDropped = int(traceSockopsTraceOutcomeTRACE_DROPPED)
	TraceSplit   = int(traceSockopsTraceOutcomeTRACE_SPLIT)
)

type TraceRXStats = traceRXTraceRxStats

//revive:enable:exported

// hook is a program and where it is attached: to a tracepoint, or to the cgroup.
type hook struct {
	program, tracepoint string
	cgroup              ebpf.AttachType
}

// pin is the name of its link's pin.
func (h hook) pin() string { return "link_" + h.program[len("trace_"):] }

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
		if isVariables(name) {
			continue
		}
		if of := t.maps[name]; of != nil {
			m.MaxEntries = of.MaxEntries()
		} else if t.maps[name], err = openMap(c.Dir, m); err != nil {
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
	if err := replacePin(l.Pin, filepath.Join(t.dir, h.pin())); err != nil {
		l.Close()
		return fmt.Errorf("pin %s: %w", h.pin(), err)
	}
	t.links[h.pin()] = l
	return nil
}

// haveTracepoint tells whether the kernel has a tracepoint.
func haveTracepoint(name string) (bool, error) {
	kernel, err := kernelTypes.Kernel()
	if err != nil {
		return false, fmt.Errorf("read types of the kernel: %w", err)
	}
	var of *btf.Typedef
	err = kernel.TypeByName("btf_trace_"+name, &of)
	if errors.Is(err, btf.ErrNotFound) {
		return false, nil
	}
	return err == nil, err
}

// Receives tells whether a rule asks for what is received.
func (t *Trace) Receives() bool { return t.maps["rx_stats"] != nil }

// RXStats are the counts of what a group received, of all CPUs. It is for a
// tracing that Receives.
func (t *Trace) RXStats(group uint32) (*TraceRXStats, error) {
	m := t.maps["rx_stats"]
	var each []TraceRXStats
	if err := m.Lookup(group, &each); err != nil {
		return nil, fmt.Errorf("read what group %d received: %w", group, err)
	}
	sum := &each[0]
	for i := range each[1:] {
		s := &each[i+1]
		sum.Chosen += s.Chosen
		sum.Unstamped += s.Unstamped
		for k := range s.Outcome {
			sum.Outcome[k] += s.Outcome[k]
		}
		for k := range s.Stage {
			addHistogram((*TraceHistogram)(&sum.Stage[k]), (*TraceHistogram)(&s.Stage[k]))
		}
	}
	return sum, nil
}

// TraceWaiting is what of a group's samples waits: for an application that reads,
// or for a driver.
type TraceWaiting struct {
	Count  uint64
	Oldest time.Duration // how long the oldest has waited
}

// RXWaiting is what was received, is followed, and was not read until now, by
// group.
func (t *Trace) RXWaiting() (map[uint32]TraceWaiting, error) {
	return readWaiting[traceRXTraceWaitingKey](t.maps["waiting"], func(w *traceRXTraceWaiting) (group uint32, since uint64) {
		return w.Group, w.Socket
	})
}

// Sending is what of the datagrams sent no driver had until now, by group.
func (t *Trace) Sending() (map[uint32]TraceWaiting, error) {
	return readWaiting[uint64](t.maps["sending"], func(d *traceUDPTraceSending) (group uint32, since uint64) {
		return d.Group, d.Sent
	})
}

// readWaiting reads a map of samples, which is nil if there are none.
func readWaiting[K, V any](m *ebpf.Map, of func(*V) (group uint32, since uint64)) (map[uint32]TraceWaiting, error) {
	waiting := make(map[uint32]TraceWaiting)
	if m == nil {
		return waiting, nil
	}
	const batch = 512
	var (
		cursor ebpf.MapBatchCursor
		keys   = make([]K, batch)
		values = make([]V, batch)
	)
	for {
		n, err := m.BatchLookup(&cursor, keys, values, nil)
		if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return nil, fmt.Errorf("read samples that wait: %w", err)
		}
		now := monotonic()
		for i := range values[:n] {
			group, since := of(&values[i])
			w := waiting[group]
			w.Count++
			w.Oldest = max(w.Oldest, time.Duration(now-int64(since)))
			waiting[group] = w
		}
		if err != nil {
			return waiting, nil
		}
	}
}

// Stamping has the kernel note when packets reach the host, as long as it is
// open: for all packets of the host, and all network namespaces.
type Stamping struct{ fd int }

// OpenStamping needs no privilege.
func OpenStamping() (*Stamping, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open socket for arrival times: %w", err)
	}
	// It need not be bound (sock_enable_timestamp in net/core/sock.c).
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TIMESTAMPNS, 1); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("ask for arrival times: %w", os.NewSyscallError("setsockopt", err))
	}
	return &Stamping{fd}, nil
}

// Close lets the kernel stop, unless another socket asks for arrival times.
func (s *Stamping) Close() error { return unix.Close(s.fd) }

// RefreshClock tells the programs how CLOCK_REALTIME, in which arrivals are
// stamped, relates to CLOCK_MONOTONIC. It changes only when the clock is set.
func (t *Trace) RefreshClock() error {
	return t.setState(func(s *TraceState) { s.Clock = int64(ClockOffset()) })
}

// ClockOffset is CLOCK_REALTIME less CLOCK_MONOTONIC, to a fraction of a
// microsecond: of some tries, the one that took least.
func ClockOffset() time.Duration {
	const tries = 16
	var offset, least int64
	for i := range tries {
		before, real, after := monotonic(), clock(unix.CLOCK_REALTIME), monotonic()
		if took := after - before; i == 0 || took < least {
			least, offset = took, real-before-took/2
		}
	}
	return time.Duration(offset)
}

// monotonic is CLOCK_MONOTONIC in nanoseconds, as bpf_ktime_get_ns reads it.
func monotonic() int64 { return clock(unix.CLOCK_MONOTONIC) }

func clock(id int32) int64 {
	var now unix.Timespec
	// It cannot fail for a clock that every kernel has.
	_ = unix.ClockGettime(id, &now)
	return now.Nano()
}
