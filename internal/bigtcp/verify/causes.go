// SPDX-License-Identifier: Apache-2.0

package verify

import (
	"cmp"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"

	"sockeye/internal/bigtcp/netif"
)

// Cause is a reason why bytes did not travel in large packets.
type Cause struct {
	// Name is a fixed identifier: off, kernel, driver, offload_off, cut,
	// old_connection, receive_window, congestion_window, pacing, loss, small_writes,
	// varied, nfqueue, tunnel, forwarded, sender, ended.
	Name        string  `json:"name"`
	Share       float64 `json:"share"` // of Proof.TCPBytes
	Bytes       uint64  `json:"bytes"`
	Connections int     `json:"connections,omitempty"` // each direction counts
	Detail      string  `json:"detail"`                // figures are those of the connection with most bytes
	Example     string  `json:"example,omitempty"`     // that connection
	Hint        string  `json:"hint"`
}

const (
	maxCauses = 5
	// minShare is the least share of a reported cause.
	minShare = 0.005
	// maxSampled bounds the connections whose sockets are read in one sample.
	maxSampled = 200
	// maxFlows bounds the flows that are kept.
	maxFlows = 16384
	// pacingShift is the default of sk_pacing_shift: packets of about a millisecond.
	pacingShift = 10
)

// evidence is the data from which causes are derived.
type evidence struct {
	*netif.Interface
	support netif.Support
	verdict netif.Verdict
	locals  map[netip.Addr]bool
	queued  bool // a program receives packets from NFQUEUE
}

// causes returns at most maxCauses causes, those with the most bytes.
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

// sentBytes returns the bytes that TCP sent, at the driver if counted there.
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

// cut is the cause of packets that are large before the driver and not at the driver.
func (s *evidence) cut() Cause {
	c := Cause{
		Name:   "cut",
		Detail: fmt.Sprintf("the kernel segments packets before the driver: the sizes of the interface are %s", sizesOf(s.Sizes)),
		Hint:   "give the interface the sizes of the one from which the packets come (sockeye bigtcp apply), if its tso_max_size permits",
	}
	if !s.Offloads.TSO {
		c.Detail = "the kernel segments packets before the driver: TSO is off"
		c.Hint = "turn TSO on: ethtool -K " + s.Name + " tso on"
	}
	return c
}

// cause returns why the packets of a flow are not larger.
func (s *evidence) cause(f *flow) Cause {
	if f.sent && f.socket == nil && !s.locals[f.source.Addr()] {
		return Cause{
			Name:   "forwarded",
			Detail: fmt.Sprintf("the packets are forwarded, with at most %d bytes: the incoming interface decides their size", f.Largest),
			Hint:   "verify the incoming interface (sockeye bigtcp verify): it merges received packets up to its GRO sizes",
		}
	}
	if !f.sent {
		return s.receivedCause(f)
	}
	return s.sentCause(f)
}

// limit is a bound of the packet size of a flow, in bytes.
type limit struct {
	size  uint64
	cause Cause
}

const lossHint = "look for loss on the path (nstat TcpRetransSegs)"

func (s *evidence) sentCause(f *flow) Cause {
	base := s.base(f)
	if f.socket == nil {
		if f.NearlyBytes*2 >= f.Bytes {
			return base.cause
		}
		return Cause{
			Name:   "ended",
			Detail: "the connections closed before their sockets could be read: short connections send small packets during slow start",
			Hint:   "reuse connections for many transfers",
		}
	}
	k := f.socket
	mean := f.Bytes / max(f.Packets, 1)
	window := limit{k.window / 2, Cause{
		Name:   "receive_window",
		Detail: fmt.Sprintf("the receive window of the peer is at most %d bytes, and a packet has at most half of it", k.window),
		Hint:   "raise net.ipv4.tcp_rmem at the receiver, do not set SO_RCVBUF there, and read faster",
	}}
	congestion := limit{k.congestion / 2, Cause{
		Name:   "congestion_window",
		Detail: fmt.Sprintf("the congestion window is at most %d bytes, and a packet has at most half of it", k.congestion),
		Hint:   lossHint + "; after idle periods set net.ipv4.tcp_slow_start_after_idle=0; raise the initial window of the route (ip route ... initcwnd)",
	}}
	pacing := limit{k.pacing, Cause{
		Name:   "pacing",
		Detail: fmt.Sprintf("at the pacing rate and round trip of the connection a packet has about %d bytes, the bytes of a millisecond", k.pacing),
		Hint:   "this is intended on long paths; for a round trip below half a millisecond see net.ipv4.tcp_tso_rtt_log",
	}}
	if s.queued && k.unsent > 0 && f.Mss == 0 {
		return Cause{
			Name:   "nfqueue",
			Detail: "a program receives packets from netfilter (NFQUEUE), for which the kernel segments them",
			Hint:   "request whole packets in the program (NFQA_CFG_F_GSO), or accept such connections before the queue",
		}
	}
	if k.window/2 <= netif.Legacy && k.byWindow*2 > k.busy {
		return window.cause
	}
	limits := []limit{window, congestion, pacing}
	// With BIG TCP off, two segments of a large MTU may exceed Legacy.
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
			Detail: fmt.Sprintf("their connections have large packets too, of up to %d bytes, but retransmitted some: after a loss the congestion window is small", f.Largest),
			Hint:   lossHint,
		}
	case f.Largest > netif.Legacy:
		return variedCause(f)
	}
	return Cause{
		Name:   "small_writes",
		Detail: fmt.Sprintf("the application writes less at a time: packets have %d bytes on average, and no window or rate limits them", mean),
		Hint:   "write more at a time (writev, MSG_MORE, TCP_CORK); small messages do not benefit from BIG TCP",
	}
}

// base is the bound if the connection has none.
func (s *evidence) base(f *flow) limit {
	size := gsoSize(s.Sizes, f.family)
	l := limit{size: netif.Legacy}
	switch {
	case netif.IsTunnel(s.Kind):
		l.cause = Cause{
			Name:   "tunnel",
			Detail: fmt.Sprintf("%s is a tunnel (%s), which encapsulates packets of at most %d bytes", s.Name, s.Kind, netif.Legacy),
			Hint:   "packets outside a tunnel can be larger",
		}
	case f.family == TCP4 && !s.support.IPv4:
		l.cause = Cause{Name: "kernel", Detail: "this kernel does not support BIG TCP for IPv4", Hint: "Linux 6.3 does"}
	case size <= netif.Legacy && s.verdict.State == netif.Impossible:
		l.cause = Cause{Name: "driver", Detail: s.verdict.Text, Hint: "use another interface or driver; sockeye bigtcp shows what bounds each interface"}
	case size <= netif.Legacy:
		l.cause = s.off(fmt.Sprintf("BIG TCP is off for %s packets that %s sends", familyText(f.family), s.Name), s.Name)
	default:
		l.cause = Cause{
			Name:   "old_connection",
			Detail: fmt.Sprintf("their packets have up to %d bytes, although %d are allowed: connections older than the change keep their size until their route is looked up again", f.Largest, size),
			Hint:   "close the connections (restart the program, or ss -K); new ones have the new size",
		}
	}
	return l
}

func (s *evidence) off(detail, name string) Cause {
	return Cause{Name: "off", Detail: detail, Hint: "sockeye bigtcp apply " + name}
}

// receivedCause is the cause of received packets.
func (s *evidence) receivedCause(f *flow) Cause {
	if f.Largest > netif.Legacy {
		return variedCause(f)
	}
	if f.socket != nil && f.socket.ownWindow > 0 && f.socket.ownWindow/2 < netif.Legacy {
		return Cause{
			Name:   "receive_window",
			Detail: fmt.Sprintf("the receive window of this host is at most %d bytes, and a packet has at most half of it", f.socket.ownWindow),
			Hint:   "raise net.ipv4.tcp_rmem here, do not set SO_RCVBUF in the program, and read faster",
		}
	}
	for _, r := range s.Related {
		if r.Relation == netif.Peer && r.Sizes.GSO != 0 && gsoSize(r.Sizes, f.family) <= netif.Legacy {
			return s.off(fmt.Sprintf("BIG TCP is off for %s packets that the peer %s sends", familyText(f.family), r.FullName()), r.Name)
		}
	}
	if s.Name == "lo" && gsoSize(s.Sizes, f.family) <= netif.Legacy {
		return s.off(fmt.Sprintf("BIG TCP is off for %s packets that lo sends, to itself", familyText(f.family)), s.Name)
	}
	if s.isVirtual() {
		return Cause{
			Name:   "sender",
			Detail: fmt.Sprintf("the sender sends packets of at most %d bytes", f.Largest),
			Hint:   "run sockeye bigtcp verify on the sending interface",
		}
	}
	switch {
	case f.family == TCP4 && !s.support.IPv4:
		return Cause{Name: "kernel", Detail: "this kernel does not support BIG TCP for IPv4", Hint: "Linux 6.3 does"}
	case !s.Offloads.GRO:
		return Cause{Name: "offload_off", Detail: "GRO is off: received packets are not merged", Hint: "turn GRO on: ethtool -K " + s.Name + " gro on"}
	case groSize(s.Sizes, f.family) <= netif.Legacy:
		return s.off(fmt.Sprintf("BIG TCP is off for %s packets that %s receives", familyText(f.family), s.Name), s.Name)
	}
	return Cause{
		Name:   "sender",
		Detail: fmt.Sprintf("received packets were merged to at most %d bytes: the sender sends less at a time, or the interface delivers few packets at a time", f.Largest),
		Hint:   "verify the sender; on this host ethtool -C (rx-usecs) and net.core.netdev_budget decide how many packets are delivered at a time",
	}
}

func variedCause(f *flow) Cause {
	return Cause{
		Name:   "varied",
		Detail: fmt.Sprintf("their connections have large packets too, of up to %d bytes: the others are from slow start and from small writes", f.Largest),
		Hint:   "this is normal; if the share is large, write more at a time",
	}
}

func familyText(f Family) string {
	if f == TCP4 {
		return "IPv4"
	}
	return "IPv6"
}

// isVirtual reports whether the received packets are those that another interface of
// this host sent.
func (s *evidence) isVirtual() bool { return s.Kind != "" || s.Name == "lo" }

func sizesOf(s netif.Sizes) string {
	if s.GSOIPv4 == 0 {
		return fmt.Sprintf("%d bytes", s.GSO)
	}
	return fmt.Sprintf("%d bytes of IPv6, %d of IPv4", s.GSO, s.GSOIPv4)
}
