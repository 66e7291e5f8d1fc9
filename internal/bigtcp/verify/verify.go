// SPDX-License-Identifier: Apache-2.0

// Package verify measures the packet sizes of an interface. BPF programs count the
// packets, and the state of the sockets shows why packets are small.
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
	"sockeye/internal/bigtcp/programs"
	"sockeye/internal/fault"
	"sockeye/internal/netns"
)

// MaxDuration bounds the duration of Run.
const MaxDuration = 10 * time.Minute

// Report is the result of counting an interface's packets. Bytes are those of IP
// packets; large packets have more than netif.Legacy.
type Report struct {
	Netns       string        `json:"netns,omitempty"` // path; "" for the namespace of the caller
	Interface   string        `json:"interface"`
	Index       int           `json:"index"`
	Sizes       netif.Sizes   `json:"sizes"` // at the end of the run
	Verdict     netif.Verdict `json:"verdict"`
	Since       time.Time     `json:"since"`
	Seconds     float64       `json:"seconds"`
	Interrupted bool          `json:"interrupted"` // ended early
	Method      string        `json:"method"`      // tcx or clsact
	// NoDriver is the reason why packets were not counted at the driver; "" if they
	// were.
	NoDriver string  `json:"no_driver,omitempty"`
	Counts   []Count `json:"counts"` // of each point and family with packets
	// TCPBytes and LargeBytes are the bytes of both directions; sent bytes are those
	// at the driver if counted there. Share is LargeBytes/TCPBytes; nil without TCP.
	TCPBytes   uint64   `json:"tcp_bytes"`
	LargeBytes uint64   `json:"large_bytes"`
	Share      *float64 `json:"share,omitempty"`
	// Cut is the share of the bytes that TCP sent in large packets which the kernel
	// segmented before the driver.
	Cut    float64  `json:"cut"`
	Causes []Cause  `json:"causes"` // why other packets were not large, the cause of most bytes first
	Notes  []string `json:"notes"`
}

// Point is where packets are counted.
type Point string

// The points.
const (
	Received Point = "received"
	Sent     Point = "sent"   // before the kernel segments too large packets
	Driver   Point = "driver" // sent, as the driver gets them
)

// Family is a class of packets that are counted together.
type Family string

// The families.
const (
	TCP4  Family = "ipv4" // TCP over IPv4
	TCP6  Family = "ipv6" // TCP over IPv6
	Other Family = "other"
)

var (
	pointNames  = [programs.Points]Point{programs.Ingress: Received, programs.Egress: Sent, programs.Driver: Driver}
	familyNames = [programs.Families]Family{programs.IPv4: TCP4, programs.IPv6: TCP6, programs.Other: Other}
)

// Count contains the packets of a family at a point.
type Count struct {
	Point      Point   `json:"point"`
	Family     Family  `json:"family"`
	Packets    uint64  `json:"packets"`
	Bytes      uint64  `json:"bytes"`
	Segments   uint64  `json:"segments"` // each is a packet on the wire
	LargeBytes uint64  `json:"large_bytes"`
	Largest    uint64  `json:"largest"`     // bytes
	Sizes      []Class `json:"sizes"`       // by bytes, without empty classes
	BySegments []Class `json:"by_segments"` // by segments, without empty classes
}

// Class contains the packets of more than Above and up to UpTo bytes or segments.
type Class struct {
	Above   uint32 `json:"above"`
	UpTo    uint32 `json:"up_to,omitempty"` // 0: unbounded
	Packets uint64 `json:"packets"`
	Bytes   uint64 `json:"bytes"`
}

// options are for tests.
type options struct {
	clsact   bool   // use clsact although there is TCX
	noDriver bool   // do not attach the raw tracepoint
	attached func() // called when all programs are attached
}

// Run counts the packets of an interface for a duration of at most MaxDuration, or
// until ctx ends, and finds out why those of TCP are not larger. Needs CAP_BPF and
// CAP_NET_ADMIN, and CAP_PERFMON for counting at the driver. An interface that
// vanishes meanwhile is a [fault.Error] with CodeConflict.
func Run(ctx context.Context, n *netif.Namespace, name string, during time.Duration) (*Report, error) {
	return run(ctx, n, name, during, options{})
}

func run(ctx context.Context, n *netif.Namespace, name string, during time.Duration, o options) (_ *Report, err error) {
	if during <= 0 || during > MaxDuration {
		return nil, fault.Usage(fmt.Errorf("count packets for %v", during), "at most "+MaxDuration.String())
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
	v := &verifier{network: n, before: i, flows: make(map[programs.FlowKey]*flow)}
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
	before   *netif.Interface // at the start
	result   Report
	counting *programs.Counter
	filters  *filters // nil if attached by TCX
	method   string
	noDriver string
	diag     *diag
	rttLog   uint           // sysctl tcp_tso_rtt_log
	refused  tooBigCounters // at the start
	flows    map[programs.FlowKey]*flow
}

// attach starts counting. It must run in the interface's namespace.
func (v *verifier) attach(o options) error {
	l, err := v.link()
	if err != nil {
		return err
	}
	inode, err := netns.Inode()
	if err != nil {
		return err
	}
	encapsulation := l.Attrs().EncapType
	c := programs.Config{
		Index: v.before.Index, Netns: uint32(inode),
		Ethernet: encapsulation == "ether" || encapsulation == "loopback",
	}
	for f := range c.Limits {
		c.Limits[f] = gsoSize(v.before.Sizes, familyNames[f])
	}
	if v.counting, err = programs.Open(c); err != nil {
		return fmt.Errorf("count packets of %s: %w", v.before.Name, err)
	}
	v.rttLog = tsoRTTLog()
	if v.refused, err = readTooBig(); err != nil {
		return err
	}
	if v.diag, err = openDiag(); err != nil {
		return err
	}
	// The driver's program comes first, so that it sees all packets that are counted before.
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
		v.filters, err = v.attachFilters()
	}
	if errors.Is(err, unix.ENODEV) {
		return v.vanished()
	}
	if err != nil {
		return fmt.Errorf("count packets of %s: %w", v.before.Name, err)
	}
	return nil
}

// gsoSize returns the size that bounds sent packets of a family, in bytes.
func gsoSize(s netif.Sizes, f Family) uint32 {
	switch {
	case f != TCP4:
		return s.GSO
	case s.GSOIPv4 == 0:
		return min(s.GSO, netif.Legacy)
	}
	return s.GSOIPv4
}

// groSize returns the size that bounds received packets of a family, in bytes.
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
	return fault.Conflict(fmt.Errorf("interface %s has vanished from its network namespace while its packets were counted", v.before.Name), "")
}

// sampleInterval is the time between two samples of the connections.
const sampleInterval = 500 * time.Millisecond

// watch samples the connections until the duration is over or ctx ends.
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

// link returns the interface of the kernel. It must run in the interface's namespace.
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

// report completes the report.
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

// current returns the interface as it is now, whatever its name.
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

// fillCounts adds the counters to the report.
func (v *verifier) fillCounts(counts *[programs.Points][programs.Families]programs.Counts) {
	p := &v.result
	var tcp, large [programs.Points]uint64
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
	sent := programs.Driver
	if p.NoDriver != "" {
		sent = programs.Egress
		large[sent] -= min(over, large[sent])
		p.Cut = share(over, tcp[sent])
	} else if tcp[programs.Driver] > 0 {
		// Shares are compared, because a qdisc drops or holds packets, and the tracepoint
		// was seen to miss some.
		p.Cut = max(0, share(large[programs.Egress], tcp[programs.Egress])-share(large[programs.Driver], tcp[programs.Driver]))
	}
	p.TCPBytes = tcp[programs.Ingress] + tcp[sent]
	p.LargeBytes = large[programs.Ingress] + large[sent]
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

func countOf(point Point, family Family, c *programs.Counts) Count {
	n := Count{Point: point, Family: family, Largest: c.Largest, Sizes: []Class{}, BySegments: []Class{}}
	for i, s := range c.Sizes {
		n.Packets += s.Packets
		n.Bytes += s.Bytes
		n.Segments += s.Segments
		class := classOf(programs.Sizes[:], i, s.Packets, s.Bytes)
		if class.Above >= netif.Legacy {
			n.LargeBytes += s.Bytes
		}
		if s.Packets > 0 {
			n.Sizes = append(n.Sizes, class)
		}
	}
	for i, s := range c.Segments {
		if s.Packets > 0 {
			n.BySegments = append(n.BySegments, classOf(programs.Segments[:], i, s.Packets, s.Bytes))
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

// Close detaches the programs and releases all resources.
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
