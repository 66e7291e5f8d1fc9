// SPDX-License-Identifier: Apache-2.0

package verify

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/internal/bigtcp/netif"
	"sockeye/internal/bpf"
)

// Cause is why bytes did not travel in large packets.
type Cause struct {
	// Name is a short fixed one: off, kernel, driver, offload_off, cut, old_connection,
	// receive_window, congestion_window, pacing, loss, small_writes, varied, nfqueue, tunnel, forwarded,
	// sender, ended.
	Name        string  `json:"name"`
	Share       float64 `json:"share"` // of Proof.TCPBytes
	Bytes       uint64  `json:"bytes"`
	Connections int     `json:"connections,omitempty"` // each direction by itself
	Detail      string  `json:"detail"`                // of that with most bytes, where it has figures
	Example     string  `json:"example,omitempty"`     // that connection
	Hint        string  `json:"hint"`
}

const (
	maxCauses = 5
	// leastCause is the least share that a cause is told of for.
	minShare = 0.005
	// mostLooked bounds the connections whose sockets are looked at, at a time.
	maxSampled = 200
	// mostFlows bounds those that are remembered.
	maxFlows = 16384
	// pacingShift is that of sk_pacing_shift: packets of a millisecond or so.
	pacingShift = 10
)

// flow is a connection in one direction.
type flow struct {
	bpf.BigTCPFlow
	source, destination netip.AddrPort
	sent                bool // not received
	family              Family
	socket              *socketHistory // nil: none was found
}

// socketSeen is what was seen of the end of a connection that is in the namespace:
// of all but the times the largest. Sizes are in bytes; 0 is not known.
type socketHistory struct {
	window     uint64 // of the receiver, as the sender knows it
	ownWindow  uint64 // offered by this end
	congestion uint64 // window
	pacing     uint64 // packet that pacing allows; math.MaxUint64 for all
	unsent     uint64
	resent     bool
	first      *unix.TCPInfo
	// Since it was first seen, time that it had data under way, and of that the time
	// that it was held up by the receiver's window.
	busy, byWindow time.Duration
}

// see adds what the kernel tells now. gso is the size in bytes that the interface
// allows, rttLog the sysctl tcp_tso_rtt_log.
func (s *socketHistory) add(i *unix.TCPInfo, gso uint32, rttLog uint) {
	if s.first == nil {
		s.first = i
	}
	s.window = max(s.window, uint64(i.Snd_wnd))
	s.ownWindow = max(s.ownWindow, uint64(i.Rcv_wnd))
	s.congestion = max(s.congestion, uint64(i.Snd_cwnd)*uint64(i.Snd_mss))
	s.unsent = max(s.unsent, uint64(i.Notsent_bytes))
	s.resent = s.resent || i.Total_retrans > s.first.Total_retrans
	s.pacing = max(s.pacing, pacedSize(i.Pacing_rate, i.Min_rtt, gso, rttLog))
	since := func(now, then uint64) time.Duration {
		return time.Duration(now-min(then, now)) * time.Microsecond
	}
	s.busy = since(i.Busy_time, s.first.Busy_time)
	s.byWindow = since(i.Rwnd_limited, s.first.Rwnd_limited)
}

// pacedSize is the packet that tcp_tso_autosize makes: of a rate in bytes a second,
// and a round trip in microseconds.
func pacedSize(rate uint64, minRTT, gso uint32, rttLog uint) uint64 {
	if rate == math.MaxUint64 {
		return rate
	}
	size := rate >> pacingShift
	if shift := minRTT >> min(rttLog, 31); shift < 32 {
		size += uint64(gso) >> shift
	}
	return size
}

// look reads the flows, and looks at the sockets of those with most bytes in packets
// that are not large.
func (v *verifier) sampleFlows() error {
	err := v.counting.Flows(func(k *bpf.BigTCPFlowKey, f *bpf.BigTCPFlow) {
		known := v.flows[*k]
		if known == nil {
			if len(v.flows) >= maxFlows {
				return
			}
			known = &flow{sent: int(k.Point) == bpf.BigTCPEgress, family: familyNames[k.Family]}
			known.source, known.destination = k.Ends()
			v.flows[*k] = known
		}
		known.BigTCPFlow = *f
	})
	if err != nil {
		return err
	}
	all := make([]*flow, 0, len(v.flows))
	for _, f := range v.flows {
		all = append(all, f)
	}
	slices.SortFunc(all, func(a, b *flow) int { return cmp.Compare(b.small(), a.small()) })
	for _, f := range all[:min(len(all), maxSampled)] {
		local, remote := f.source, f.destination
		if !f.sent {
			local, remote = remote, local
		}
		i, err := v.diag.find(local, remote, v.before.Index)
		if err != nil {
			return err
		}
		if i == nil {
			continue
		}
		if f.socket == nil {
			f.socket = &socketHistory{}
		}
		f.socket.add(i, gsoSize(v.before.Sizes, f.family), v.rttLog)
	}
	return nil
}

// small are the bytes in packets that are not large.
func (f *flow) small() uint64 { return f.Bytes - min(f.LargeBytes, f.Bytes) }

func (f *flow) String() string { return f.source.String() + " to " + f.destination.String() }

// localAddresses are those of the namespace's interfaces.
func (v *verifier) localAddresses() (map[netip.Addr]bool, error) {
	locals := make(map[netip.Addr]bool)
	err := v.network.Do(func() error {
		all, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
		if err != nil {
			return fmt.Errorf("list addresses: %w", err)
		}
		for _, a := range all {
			if ip, ok := netip.AddrFromSlice(a.IP); ok {
				locals[ip.Unmap()] = true
			}
		}
		return nil
	})
	return locals, err
}

// hasQueues tells whether a program takes packets from netfilter in the namespace. It
// runs there.
func hasQueues() bool {
	queues, err := os.ReadFile("/proc/thread-self/net/netfilter/nfnetlink_queue")
	return err == nil && len(bytes.TrimSpace(queues)) > 0
}

// tsoRTTLog is the sysctl tcp_tso_rtt_log, of Linux 5.18. It runs in the namespace.
func tsoRTTLog() uint {
	text, err := os.ReadFile("/proc/sys/net/ipv4/tcp_tso_rtt_log")
	if err != nil {
		return 0
	}
	n, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 8)
	if err != nil {
		return 0
	}
	return uint(n)
}

// scene is all that causes are found by.
type evidence struct {
	*netif.Interface
	support netif.Support
	verdict netif.Verdict
	locals  map[netip.Addr]bool
	queued  bool // a program takes packets from netfilter
}

// why names the causes, with at most mostCauses of the most bytes.
func (s *evidence) causes(flows []*flow, p *Report) []Cause {
	byName := make(map[string]*Cause)
	most := make(map[string]uint64)
	for _, f := range flows {
		n := f.small()
		if n == 0 {
			continue
		}
		found := s.cause(f)
		c := byName[found.Name]
		if c == nil {
			c = &Cause{Name: found.Name}
			byName[found.Name] = c
		}
		c.Bytes += n
		c.Connections++
		if n > most[c.Name] {
			most[c.Name] = n
			c.Detail, c.Hint, c.Example = found.Detail, found.Hint, f.String()
		}
	}
	if p.Cut > 0 {
		c := s.cut()
		c.Bytes = uint64(p.Cut * float64(p.sentBytes()))
		byName[c.Name] = &c
	}
	causes := []Cause{}
	for _, c := range byName {
		if c.Share = share(c.Bytes, p.TCPBytes); c.Share >= minShare {
			causes = append(causes, *c)
		}
	}
	slices.SortFunc(causes, func(a, b Cause) int {
		return cmp.Or(cmp.Compare(b.Bytes, a.Bytes), strings.Compare(a.Name, b.Name))
	})
	return causes[:min(len(causes), maxCauses)]
}

// sentBytes are those of TCP, as the driver got them if that was counted.
func (p *Report) sentBytes() (n uint64) {
	at := Driver
	if p.NoDriver != "" {
		at = Sent
	}
	for _, c := range p.Counts {
		if c.Point == at && c.Family != Other {
			n += c.Bytes
		}
	}
	return n
}

// cut is for packets that are large before the driver and not at it.
func (s *evidence) cut() Cause {
	c := Cause{
		Name:   "cut",
		Detail: fmt.Sprintf("the kernel cuts packets before the driver: the interface takes at most %s", sizesOf(s.Sizes)),
		Hint:   "give it the sizes of the interface from which they come (sockeye bigtcp apply), if its device takes them",
	}
	if !s.Offloads.TSO {
		c.Detail = "the kernel cuts packets before the driver: segmentation by the device (TSO) is off"
		c.Hint = "turn it on: ethtool -K " + s.Name + " tso on"
	}
	return c
}

func sizesOf(s netif.Sizes) string {
	if s.GSOIPv4 == 0 {
		return fmt.Sprintf("%d bytes", s.GSO)
	}
	return fmt.Sprintf("%d bytes of IPv6, %d of IPv4", s.GSO, s.GSOIPv4)
}

// limit is what bounds the size of a flow's packets, in bytes.
type limit struct {
	size  uint64
	cause Cause
}

// cause finds why a flow's packets are not larger.
func (s *evidence) cause(f *flow) Cause {
	if f.sent && f.socket == nil && !s.locals[f.source.Addr()] {
		return Cause{
			Name:   "forwarded",
			Detail: fmt.Sprintf("they pass through this host, in packets of at most %d bytes: where they come in decides", f.Largest),
			Hint:   "look at the interface on which they come in (sockeye bigtcp verify there): what it receives is joined up to its gro sizes",
		}
	}
	if !f.sent {
		return s.receivedCause(f)
	}
	return s.sentCause(f)
}

func (s *evidence) sentCause(f *flow) Cause {
	base := s.base(f)
	if f.socket == nil {
		if f.NearlyBytes*2 >= f.Bytes {
			return base.cause
		}
		return Cause{
			Name:   "ended",
			Detail: "they had ended before their sockets could be looked at: short connections send small packets, as they start slowly",
			Hint:   "keep connections open, for many transfers",
		}
	}
	k := f.socket
	mean := f.Bytes / max(f.Packets, 1)
	window := limit{k.window / 2, Cause{
		Name:   "receive_window",
		Detail: fmt.Sprintf("the receiver's window is at most %d bytes, and a packet has at most half of it", k.window),
		Hint:   "a larger receive buffer there: net.ipv4.tcp_rmem, and no SO_RCVBUF in the program; and a program that reads faster",
	}}
	congestion := limit{k.congestion / 2, Cause{
		Name:   "congestion_window",
		Detail: fmt.Sprintf("the congestion window is at most %d bytes, and a packet has at most half of it", k.congestion),
		Hint:   lossHint + "; for pauses, net.ipv4.tcp_slow_start_after_idle=0; a larger initial window on the route (ip route ... initcwnd)",
	}}
	pacing := limit{k.pacing, Cause{
		Name:   "pacing",
		Detail: fmt.Sprintf("at its pacing rate and round trip a packet has about %d bytes, what it sends in a millisecond", k.pacing),
		Hint:   "this is meant for long ways; for paths below half a millisecond see net.ipv4.tcp_tso_rtt_log",
	}}
	if s.queued && k.unsent > 0 && f.Mss == 0 {
		return Cause{
			Name:   "nfqueue",
			Detail: "a program takes packets from netfilter (NFQUEUE), for which the kernel cuts them into segments",
			Hint:   "the program can ask for whole packets (NFQA_CFG_F_GSO); or let such connections pass by it",
		}
	}
	if k.window/2 <= netif.Legacy && k.byWindow*2 > k.busy {
		return window.cause
	}
	limits := []limit{window, congestion, pacing}
	// Two segments that fill a large MTU are more than an interface that is off takes.
	if f.Largest <= netif.Legacy || gsoSize(s.Sizes, f.family) <= netif.Legacy {
		limits = append(limits, base)
	}
	least := limit{size: math.MaxUint64}
	for _, l := range limits {
		if l.size != 0 && l.size <= netif.Legacy && l.size < least.size {
			least = l
		}
	}
	switch {
	case least.size <= netif.Legacy && uint64(f.Largest)*5 >= least.size*3 && mean*4 >= least.size:
		return least.cause
	case f.Largest > netif.Legacy && k.resent:
		return Cause{
			Name:   "loss",
			Detail: fmt.Sprintf("their connections have large packets too, of up to %d bytes, but sent some again: after a loss the congestion window is small", f.Largest),
			Hint:   lossHint,
		}
	case f.Largest > netif.Legacy:
		return variedCause(f)
	}
	return Cause{
		Name:   "small_writes",
		Detail: fmt.Sprintf("the program gives less at a time: packets have %d bytes on average, and nothing holds them up", mean),
		Hint:   "larger writes, or several in one (writev, MSG_MORE, TCP_CORK); for what is small by nature BIG TCP changes nothing",
	}
}

func variedCause(f *flow) Cause {
	return Cause{
		Name:   "varied",
		Detail: fmt.Sprintf("their connections have large packets too, of up to %d bytes: the others are from slow beginnings, and of what the program had to send just then", f.Largest),
		Hint:   "nothing is wrong; if it is much, larger writes help",
	}
}

// base is what bounds packets if nothing of the connection does.
func (s *evidence) base(f *flow) limit {
	size := gsoSize(s.Sizes, f.family)
	l := limit{size: netif.Legacy}
	switch {
	case netif.IsTunnel(s.Kind):
		l.cause = Cause{
			Name:   "tunnel",
			Detail: fmt.Sprintf("%s is a tunnel (%s): what it wraps is to fit into a packet of %d bytes", s.Name, s.Kind, netif.Legacy),
			Hint:   "without a tunnel packets can be larger",
		}
	case f.family == TCP4 && !s.support.IPv4:
		l.cause = Cause{Name: "kernel", Detail: "this kernel has no BIG TCP for IPv4", Hint: "Linux 6.3 has it"}
	case size <= netif.Legacy && s.verdict.State == netif.Impossible:
		l.cause = Cause{Name: "driver", Detail: s.verdict.Text, Hint: "another device or driver; sockeye bigtcp shows what bounds each interface"}
	case size <= netif.Legacy:
		l.cause = s.off(fmt.Sprintf("BIG TCP is off for %s packets that %s sends", familyText(f.family), s.Name), s.Name)
	default:
		l.cause = Cause{
			Name:   "old_connection",
			Detail: fmt.Sprintf("they fill packets up to %d bytes and never more, though %d are allowed: connections older than the change keep their size until their route is looked up again", f.Largest, size),
			Hint:   "close them and connect again (restart the program, or ss -K); new connections have the new size",
		}
	}
	return l
}

func (s *evidence) off(detail, name string) Cause {
	return Cause{Name: "off", Detail: detail, Hint: "sockeye bigtcp apply " + name}
}

func familyText(f Family) string {
	if f == TCP4 {
		return "IPv4"
	}
	return "IPv6"
}

// receivedCause is for what the interface receives.
func (s *evidence) receivedCause(f *flow) Cause {
	if f.Largest > netif.Legacy {
		return variedCause(f)
	}
	if f.socket != nil && f.socket.ownWindow > 0 && f.socket.ownWindow/2 < netif.Legacy {
		return Cause{
			Name:   "receive_window",
			Detail: fmt.Sprintf("the window that this host offers is at most %d bytes, and a packet has at most half of it", f.socket.ownWindow),
			Hint:   "a larger receive buffer here: net.ipv4.tcp_rmem, and no SO_RCVBUF in the program; and a program that reads faster",
		}
	}
	for _, r := range s.Related {
		if r.Relation == netif.Peer && r.Sizes.GSO != 0 && gsoSize(r.Sizes, f.family) <= netif.Legacy {
			return s.off(fmt.Sprintf("BIG TCP is off for %s packets that the other end, %s, sends", familyText(f.family), r.Place()), r.Name)
		}
	}
	if s.Name == "lo" && gsoSize(s.Sizes, f.family) <= netif.Legacy {
		return s.off(fmt.Sprintf("BIG TCP is off for %s packets that lo sends, to itself", familyText(f.family)), s.Name)
	}
	if s.isVirtual() {
		return Cause{
			Name:   "sender",
			Detail: fmt.Sprintf("the sender makes packets of at most %d bytes", f.Largest),
			Hint:   "look at its side: sockeye bigtcp verify there, on the interface that sends",
		}
	}
	switch {
	case f.family == TCP4 && !s.support.IPv4:
		return Cause{Name: "kernel", Detail: "this kernel has no BIG TCP for IPv4", Hint: "Linux 6.3 has it"}
	case !s.Offloads.GRO:
		return Cause{Name: "offload_off", Detail: "joining of received packets (GRO) is off", Hint: "turn it on: ethtool -K " + s.Name + " gro on"}
	case groSize(s.Sizes, f.family) <= netif.Legacy:
		return s.off(fmt.Sprintf("BIG TCP is off for %s packets that %s receives", familyText(f.family), s.Name), s.Name)
	}
	return Cause{
		Name:   "sender",
		Detail: fmt.Sprintf("what comes in at a time was joined to at most %d bytes: the sender sends less in one go, or the device gives the kernel few packets at a time", f.Largest),
		Hint:   "look at the sender's side; on this one ethtool -C (rx-usecs) and net.core.netdev_budget decide how many packets come at a time",
	}
}

// isVirtual tells whether packets come as another interface of this host sent them.
func (s *evidence) isVirtual() bool { return s.Kind != "" || s.Name == "lo" }

// notes are what else is to be known to read the proof.
func (p *Report) notes(before *netif.Interface, refused tooBigCounters) []string {
	notes := []string{}
	var other, all uint64
	for _, c := range p.Counts {
		if c.Point == Driver {
			continue
		}
		all += c.Bytes
		if c.Family == Other {
			other += c.Bytes
		}
	}
	switch {
	case all == 0:
		notes = append(notes, "no packet was seen: nothing is proven")
	case other == all:
		notes = append(notes, "no TCP was seen, and nothing else has large packets: nothing is proven")
	case other*2 > all:
		notes = append(notes, fmt.Sprintf("%.0f %% of all bytes are not TCP (UDP, or what tunnels wrap): such packets are not made larger", 100*share(other, all)))
	}
	if p.Sizes != before.Sizes {
		notes = append(notes, fmt.Sprintf("the sizes were changed meanwhile: before, the interface took at most %s", sizesOf(before.Sizes)))
	}
	if refused.byUs > 0 {
		notes = append(notes, fmt.Sprintf("this host refused to forward %d IPv6 packets as too big (Ip6InTooBigErrors): %s", refused.byUs, jumbogramText))
	}
	if refused.byOthers > 0 {
		notes = append(notes, fmt.Sprintf("routers on the way refused %d IPv6 packets as too big (Icmp6InPktTooBigs): if they are Linux, %s", refused.byOthers, jumbogramText))
	}
	if p.NoDriver != "" {
		notes = append(notes, "what the driver gets was not counted: what the kernel cuts before it is judged by the interface's sizes")
	}
	return notes
}

const lossHint = "look for loss on the path (nstat TcpRetransSegs)"

const jumbogramText = "kernels before 2026 mark large IPv6 packets by a header of 8 bytes, and count it when they forward them, so that those whose segments fill the MTU are lost; turn BIG TCP for IPv6 off where these packets begin or are joined, or make the MTU of the way out larger by 8"

// tooBig are IPv6 packets that were refused for their size, in a namespace.
type tooBigCounters struct{ byUs, byOthers uint64 }

// readTooBig reads the counters. It runs in the namespace.
func readTooBig() (n tooBigCounters, err error) {
	text, err := os.ReadFile("/proc/thread-self/net/snmp6")
	if errors.Is(err, os.ErrNotExist) {
		return n, nil // a kernel without IPv6
	}
	if err != nil {
		return n, fmt.Errorf("read counters of IPv6: %w", err)
	}
	for line := range strings.Lines(string(text)) {
		fields := strings.Fields(line)
		if len(fields) != 2 {
			continue
		}
		value, err := strconv.ParseUint(fields[1], 10, 64)
		if err != nil {
			continue
		}
		switch fields[0] {
		case "Ip6InTooBigErrors":
			n.byUs = value
		case "Icmp6InPktTooBigs":
			n.byOthers = value
		}
	}
	return n, nil
}
