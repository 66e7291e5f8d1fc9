// SPDX-License-Identifier: Apache-2.0

// Package verify proves how large the packets of an interface are. BPF programs count
// the packets, and the sockets of the connections explain the small ones.
package verify

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/internal/bigtcp/netif"
	"sockeye/internal/bpf"
)

// VerifyLongest is the longest that Verify counts.
const MaxDuration = 10 * time.Minute

// Proof is what was seen of an interface's packets. Bytes are those of IP packets;
// large ones have more than Legacy.
type Report struct {
	Netns       string        `json:"netns,omitempty"` // path; "" for that of the caller
	Interface   string        `json:"interface"`
	Index       int           `json:"index"`
	Sizes       netif.Sizes   `json:"sizes"` // at the end
	Verdict     netif.Verdict `json:"verdict"`
	Since       time.Time     `json:"since"`
	Seconds     float64       `json:"seconds"`
	Interrupted bool          `json:"interrupted"` // before its time
	Method      string        `json:"method"`      // tcx or clsact
	// NoDriver says why what the driver gets was not counted; "" if it was.
	NoDriver string  `json:"no_driver,omitempty"`
	Counts   []Count `json:"counts"` // of each point and family that had packets
	// TCPBytes and LargeBytes are of both directions; of what was sent as the driver
	// got it, where that was counted. Share is LargeBytes of TCPBytes; nil without any.
	TCPBytes   uint64   `json:"tcp_bytes"`
	LargeBytes uint64   `json:"large_bytes"`
	Share      *float64 `json:"share,omitempty"`
	// Cut is the share of the bytes sent by TCP that were in large packets, and were
	// cut by the kernel before the driver.
	Cut    float64  `json:"cut"`
	Causes []Cause  `json:"causes"` // why the others were not in large packets, the one with most bytes first
	Notes  []string `json:"notes"`
}

// Point is where packets are counted.
type Point string

// The points.
const (
	Received Point = "received"
	Sent     Point = "sent"   // before the kernel cuts what is too large
	Driver   Point = "driver" // sent, as the driver gets it
)

// Family is which packets are counted together.
type Family string

// The families.
const (
	TCP4  Family = "ipv4" // TCP over IPv4
	TCP6  Family = "ipv6" // TCP over IPv6
	Other Family = "other"
)

var (
	pointNames  = [bpf.BigTCPPoints]Point{bpf.BigTCPIngress: Received, bpf.BigTCPEgress: Sent, bpf.BigTCPDriver: Driver}
	familyNames = [bpf.BigTCPFamilies]Family{bpf.BigTCPIPv4: TCP4, bpf.BigTCPIPv6: TCP6, bpf.BigTCPOther: Other}
)

// Count are the packets of a family at a point.
type Count struct {
	Point      Point   `json:"point"`
	Family     Family  `json:"family"`
	Packets    uint64  `json:"packets"`
	Bytes      uint64  `json:"bytes"`
	Segments   uint64  `json:"segments"` // of which they are made; each is a packet on the wire
	LargeBytes uint64  `json:"large_bytes"`
	Largest    uint64  `json:"largest"`     // bytes
	Sizes      []Class `json:"sizes"`       // by bytes, those with packets
	BySegments []Class `json:"by_segments"` // by segments, those with packets
}

// Class are packets of more than Above, up to UpTo, bytes or segments.
type Class struct {
	Above   uint32 `json:"above"`
	UpTo    uint32 `json:"up_to,omitempty"` // 0: no bound
	Packets uint64 `json:"packets"`
	Bytes   uint64 `json:"bytes"`
}

// verifyOptions are for tests.
type options struct {
	clsact   bool   // as if there were no TCX
	noDriver bool   // as if raw tracepoints were refused
	attached func() // called once packets are counted
}

// Verify counts the packets of an interface for a time, at most VerifyLongest, or
// until ctx ends, and finds out why those of TCP are not larger. It needs CAP_BPF,
// CAP_NET_ADMIN and, for what the driver gets, CAP_PERFMON. An interface that
// vanishes meanwhile is an [Error] of KindConflict.
func Run(ctx context.Context, n *netif.Namespace, name string, during time.Duration) (*Report, error) {
	return run(ctx, n, name, during, options{})
}

func run(ctx context.Context, n *netif.Namespace, name string, during time.Duration, o options) (_ *Report, err error) {
	if during <= 0 || during > MaxDuration {
		return nil, netif.NewError(netif.KindUsage, "at most "+MaxDuration.String(), "count packets for %v", during)
	}
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	changes, err := n.Watch(ctx)
	if err != nil {
		return nil, err
	}
	i, err := n.Interface(name)
	if err != nil {
		return nil, err
	}
	v := &verifier{network: n, before: i, flows: make(map[bpf.BigTCPFlowKey]*flow)}
	defer func() { err = errors.Join(err, v.Close()) }()
	if err := n.Do(func() error { return v.attach(o) }); err != nil {
		return nil, err
	}
	v.result = Report{
		Netns: n.Path(), Interface: i.Name, Index: i.Index, Since: time.Now(),
		Method: v.method, NoDriver: v.noDriver, Counts: []Count{}, Causes: []Cause{},
	}
	if o.attached != nil {
		o.attached()
	}
	if err := v.watch(ctx, changes, during); err != nil {
		return nil, err
	}
	return v.report()
}

type verifier struct {
	network  *netif.Namespace
	before   *netif.Interface // as it was at the beginning
	result   Report
	counting *bpf.BigTCP
	filters  *clsact // nil: attached by TCX
	method   string
	noDriver string
	diag     *diag
	rttLog   uint           // sysctl tcp_tso_rtt_log
	refused  tooBigCounters // at the beginning
	flows    map[bpf.BigTCPFlowKey]*flow
}

// attach begins to count. It runs in the interface's namespace.
func (v *verifier) attach(o options) error {
	l, err := v.link()
	if err != nil {
		return err
	}
	var stat unix.Stat_t
	if err := unix.Stat("/proc/thread-self/ns/net", &stat); err != nil {
		return fmt.Errorf("identify network namespace: %w", err)
	}
	encapsulation := l.Attrs().EncapType
	c := bpf.BigTCPConfig{
		Index: v.before.Index, Netns: uint32(stat.Ino),
		Ethernet: encapsulation == "ether" || encapsulation == "loopback",
	}
	for f := range c.Limits {
		c.Limits[f] = gsoSize(v.before.Sizes, familyNames[f])
	}
	if v.counting, err = bpf.OpenBigTCP(c); err != nil {
		return fmt.Errorf("count packets of %s: %w", v.before.Name, err)
	}
	v.rttLog = tsoRTTLog()
	if v.refused, err = readTooBig(); err != nil {
		return err
	}
	if v.diag, err = openDiag(); err != nil {
		return err
	}
	// The driver comes first, so that nothing that is sent is missing there.
	err = ebpf.ErrNotSupported
	if !o.noDriver {
		err = v.counting.AttachDriver()
	}
	if err != nil {
		v.noDriver = err.Error()
	}
	v.method, err = "tcx", ebpf.ErrNotSupported
	if !o.clsact {
		err = v.counting.AttachTCX()
	}
	if errors.Is(err, ebpf.ErrNotSupported) {
		v.method = "clsact"
		ingress, egress := v.counting.Programs()
		v.filters, err = attachClsact(v.before.Index, ingress, egress)
	}
	if errors.Is(err, unix.ENODEV) {
		return v.vanished()
	}
	if err != nil {
		return fmt.Errorf("count packets of %s: %w", v.before.Name, err)
	}
	return nil
}

// gsoSize is the size that bounds what is sent of a family, in bytes.
func gsoSize(s netif.Sizes, f Family) uint32 {
	switch {
	case f != TCP4:
		return s.GSO
	case s.GSOIPv4 == 0:
		return min(s.GSO, netif.Legacy)
	}
	return s.GSOIPv4
}

// groSize is the same of what is received.
func groSize(s netif.Sizes, f Family) uint32 {
	switch {
	case f != TCP4:
		return s.GRO
	case s.GROIPv4 == 0:
		return min(s.GRO, netif.Legacy)
	}
	return s.GROIPv4
}

func (v *verifier) vanished() error {
	return netif.NewError(netif.KindConflict, "", "interface %s has vanished from its network namespace while its packets were counted", v.before.Name)
}

// lookEverySockets is how often connections are looked at.
const sampleInterval = 500 * time.Millisecond

// watch looks at the connections until the time is over or ctx ends.
func (v *verifier) watch(ctx context.Context, changes <-chan struct{}, during time.Duration) error {
	end := time.NewTimer(during)
	defer end.Stop()
	look := time.NewTicker(sampleInterval)
	defer look.Stop()
	for {
		select {
		case <-ctx.Done():
			v.result.Interrupted = true
			return v.sampleFlows()
		case <-end.C:
			return v.sampleFlows()
		case <-look.C:
			if err := v.sampleFlows(); err != nil {
				return err
			}
		case _, open := <-changes:
			if !open {
				changes = nil
			}
			err := v.network.Do(func() error {
				_, err := v.link()
				return err
			})
			if err != nil {
				return err
			}
		}
	}
}

// link is the interface as the kernel has it. It runs in the interface's namespace.
func (v *verifier) link() (netlink.Link, error) {
	l, err := netlink.LinkByIndex(v.before.Index)
	if _, missing := errors.AsType[netlink.LinkNotFoundError](err); missing || errors.Is(err, unix.ENODEV) {
		return nil, v.vanished()
	}
	if err != nil {
		return nil, fmt.Errorf("look for interface %s: %w", v.before.Name, err)
	}
	return l, nil
}

// finish says what was seen.
func (v *verifier) report() (*Report, error) {
	p := &v.result
	p.Seconds = time.Since(p.Since).Seconds()
	counts, err := v.counting.Counts()
	if err != nil {
		return nil, err
	}
	after, err := v.current()
	if err != nil {
		return nil, err
	}
	p.Sizes, p.Verdict = after.Sizes, after.Verdict(v.network.Support())
	v.fillCounts(&counts)
	locals, err := v.localAddresses()
	if err != nil {
		return nil, err
	}
	var inUse bool
	var refused tooBigCounters
	err = v.network.Do(func() (err error) {
		inUse = hasQueues()
		refused, err = readTooBig()
		return err
	})
	if err != nil {
		return nil, err
	}
	s := &evidence{Interface: after, support: v.network.Support(), verdict: p.Verdict, locals: locals, queued: inUse}
	p.Causes = s.causes(slices.Collect(maps.Values(v.flows)), p)
	p.Notes = p.notes(v.before, tooBigCounters{refused.byUs - v.refused.byUs, refused.byOthers - v.refused.byOthers})
	return p, nil
}

// after is the interface as it is now, under whatever name.
func (v *verifier) current() (*netif.Interface, error) {
	all, err := v.network.Interfaces()
	if err != nil {
		return nil, err
	}
	for i := range all {
		if all[i].Index == v.before.Index {
			return &all[i], nil
		}
	}
	return nil, v.vanished()
}

// tell fills in the counts.
func (v *verifier) fillCounts(counts *[bpf.BigTCPPoints][bpf.BigTCPFamilies]bpf.BigTCPCounts) {
	p := &v.result
	var tcp, large [bpf.BigTCPPoints]uint64
	var over uint64
	for point := range counts {
		for family := range counts[point] {
			c := countOf(pointNames[point], familyNames[family], &counts[point][family])
			if c.Packets == 0 {
				continue
			}
			p.Counts = append(p.Counts, c)
			if c.Family == Other {
				continue
			}
			tcp[point] += c.Bytes
			large[point] += c.LargeBytes
			over += counts[point][family].OverBytes
		}
	}
	sent := bpf.BigTCPDriver
	if p.NoDriver != "" {
		sent = bpf.BigTCPEgress
		large[sent] -= min(over, large[sent])
		p.Cut = share(over, tcp[sent])
	} else if tcp[bpf.BigTCPDriver] > 0 {
		// By shares: what a queueing discipline drops or holds was not cut, nor was a
		// packet that the tracepoint misses, which it was seen to do.
		p.Cut = max(0, share(large[bpf.BigTCPEgress], tcp[bpf.BigTCPEgress])-share(large[bpf.BigTCPDriver], tcp[bpf.BigTCPDriver]))
	}
	p.TCPBytes = tcp[bpf.BigTCPIngress] + tcp[sent]
	p.LargeBytes = large[bpf.BigTCPIngress] + large[sent]
	if p.TCPBytes > 0 {
		all := share(p.LargeBytes, p.TCPBytes)
		p.Share = &all
	}
}

func share(part, whole uint64) float64 {
	if whole == 0 {
		return 0
	}
	return float64(part) / float64(whole)
}

func countOf(point Point, family Family, c *bpf.BigTCPCounts) Count {
	n := Count{Point: point, Family: family, Largest: c.Largest, Sizes: []Class{}, BySegments: []Class{}}
	for i, s := range c.Sizes {
		n.Packets += s.Packets
		n.Bytes += s.Bytes
		n.Segments += s.Segments
		class := classOf(bpf.BigTCPSizes[:], i, s.Packets, s.Bytes)
		if class.Above >= netif.Legacy {
			n.LargeBytes += s.Bytes
		}
		if s.Packets > 0 {
			n.Sizes = append(n.Sizes, class)
		}
	}
	for i, s := range c.Segments {
		if s.Packets > 0 {
			n.BySegments = append(n.BySegments, classOf(bpf.BigTCPSegments[:], i, s.Packets, s.Bytes))
		}
	}
	return n
}

func classOf(edges []uint32, i int, packets, bytes uint64) Class {
	c := Class{Packets: packets, Bytes: bytes}
	if i > 0 {
		c.Above = edges[i-1]
	}
	if i < len(edges) {
		c.UpTo = edges[i]
	}
	return c
}

// Close ends the counting, and takes away what it needed.
func (v *verifier) Close() error {
	var errs []error
	if v.filters != nil {
		errs = append(errs, v.filters.Close())
	}
	if v.counting != nil {
		errs = append(errs, v.counting.Close())
	}
	if v.diag != nil {
		v.diag.Close()
	}
	return errors.Join(errs...)
}
