// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"errors"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/gateway/access"
)

// Each UDP flow that the guest opens occupies a port of the host, unless the flow shares a socket, and so does each TCP
// connection.
const (
	// portShare is the part (one in so many) of the host's port range that a guest may occupy with UDP, and the same again with
	// TCP, which has its own ports.
	portShare = 4
	// aliasShare is the part of the flows that may lead to name servers, as each query is a flow.
	aliasShare = 4
	// sharedShare is the part of a guest's UDP ports that shared sockets may occupy.
	sharedShare = 4
	// maxSharing bounds the flows on shared sockets. These need no port and no descriptor, but 513 bytes of memory each (measured
	// on amd64): 34 MB.
	maxSharing = 1 << 16
	// defaultPorts is the size of the kernel's default port range (ip_local_port_range, 32768 to 60999).
	defaultPorts = 28232
	// warnEvery is the shortest time between two warnings of a kind.
	warnEvery = time.Minute
)

// defaultOutgoing is how many ports a guest may occupy: a share of the port range of the host's network namespace.
func defaultOutgoing() int {
	text, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range")
	if fields := strings.Fields(string(text)); err == nil && len(fields) == 2 {
		first, err1 := strconv.Atoi(fields[0])
		last, err2 := strconv.Atoi(fields[1])
		if err1 == nil && err2 == nil && 0 <= first && first <= last && last <= 65535 {
			return max((last-first+1)/portShare, 1)
		}
	}
	return defaultPorts / portShare
}

// timeShare bounds the time that the gateway spends on opening flows. Otherwise a guest that sends to ever new destinations would
// delay its own connections and DNS queries.
type timeShare struct {
	remaining time.Duration
	at        time.Time
}

const (
	// openingPercent is the share of all time, in percent.
	openingPercent = 60
	// openingBurst is how much time may be spent at once.
	openingBurst = 50 * time.Millisecond
)

func (o *timeShare) allows(now time.Time) bool {
	if o.at.IsZero() {
		o.remaining = openingBurst
	}
	o.remaining = min(o.remaining+now.Sub(o.at)*openingPercent/100, openingBurst)
	o.at = now
	return o.remaining > 0
}

func (o *timeShare) spend(d time.Duration) { o.remaining -= d }

// class is the kind of a flow, on which the order of eviction depends.
type class uint8

const (
	// naming: to the alias of a name server.
	naming class = iota
	// passing: to port 53 elsewhere, or the guest sent one datagram and got none.
	passing
	// lasting: all other flows.
	lasting
	classes
)

// patience is how long an idle flow of the class is preferred to a new one. A flood of queries, or a scan, thereby evicts its own
// flows before one that is in regular use.
func (c class) patience() time.Duration {
	if c == lasting {
		return udpIdle
	}
	return dnsIdle
}

// udpFlows are the flows that the guest opened, by address and by last use.
type udpFlows struct {
	all     map[flow]*udpFlow
	own     flowLRU // flows with a socket of their own
	sharing flowLRU // flows on shared sockets
	sources map[netip.AddrPort]*source
	sockets int // number of shared sockets
}

// flowLRU has a list of flows per class, in the order of their last use.
type flowLRU struct {
	class [classes]struct {
		oldest, newest *udpFlow
		n              int
	}
	n int
}

// order returns the lists that a flow is in.
func (l *udpFlows) order(u *udpFlow) *flowLRU {
	if u.shared != nil {
		return &l.sharing
	}
	return &l.own
}

// link adds a flow as the last used of its class.
func (all *flowLRU) link(u *udpFlow) {
	o := &all.class[u.class]
	u.older, u.newer = o.newest, nil
	if o.newest != nil {
		o.newest.newer = u
	} else {
		o.oldest = u
	}
	o.newest = u
	o.n++
	all.n++
}

func (all *flowLRU) unlink(u *udpFlow) {
	o := &all.class[u.class]
	if u.older != nil {
		u.older.newer = u.newer
	} else {
		o.oldest = u.newer
	}
	if u.newer != nil {
		u.newer.older = u.older
	} else {
		o.newest = u.older
	}
	u.older, u.newer = nil, nil
	o.n--
	all.n--
}

// used marks a flow as used now. With lasts it becomes a flow of the class lasting.
func (l *udpFlows) used(u *udpFlow, now time.Time, lasts bool) {
	u.lastUsed = now
	to := u.class
	if lasts && to == passing && u.addresses.remote.Port() != access.DNSPort {
		to = lasting
	}
	all := l.order(u)
	if to == u.class && all.class[to].newest == u {
		return
	}
	all.unlink(u)
	u.class = to
	all.link(u)
}

func (l *udpFlows) add(u *udpFlow) {
	l.all[u.addresses] = u
	l.order(u).link(u)
	l.countOwn(u, 1)
}

func (l *udpFlows) remove(u *udpFlow) {
	delete(l.all, u.addresses)
	l.order(u).unlink(u)
	l.countOwn(u, -1)
}

// countOwn adds n to the number of the source's flows with own sockets, if the flow is one of these.
func (l *udpFlows) countOwn(u *udpFlow, n int) {
	if u.shared != nil || !u.sharable() {
		return
	}
	l.source(u.addresses.guest).own += n
	l.tidy(u.addresses.guest)
}

// first returns the flow whose patience ends first; nil if there are none. Queries to name servers have a bound of their own
// (aliasShare): no other flow evicts a query while there are other flows.
func (all *flowLRU) first() (first *udpFlow) {
	var end time.Time
	for c := passing; c < classes; c++ {
		u := all.class[c].oldest
		if u == nil {
			continue
		}
		if e := u.lastUsed.Add(c.patience()); first == nil || e.Before(end) {
			first, end = u, e
		}
	}
	if first == nil {
		return all.class[naming].oldest
	}
	return first
}

// makeRoomForFlow evicts flows to make room for one of a class with a socket of its own.
func (g *Gateway) makeRoomForFlow(c class) {
	names := &g.flows.own.class[naming]
	if most := max(g.config.Outgoing/aliasShare, 1); c == naming && names.n >= most {
		g.evict(names.oldest, "flows to name servers", most)
	}
	g.makeRoomForSocket()
}

// makeRoomForSocket evicts a flow with an own socket if no further socket is allowed. There is such a flow, because shared
// sockets may occupy only a part of the ports.
func (g *Gateway) makeRoomForSocket() {
	if g.flows.own.n+g.flows.sockets >= g.config.Outgoing {
		g.evict(g.flows.own.first(), "UDP flows", g.config.Outgoing)
	}
}

// evict removes a flow, and warns.
func (g *Gateway) evict(u *udpFlow, what string, most int) {
	g.endFlow(u)
	g.warn(warnEvicted, "too many "+what+": the oldest is forgotten", "most", most)
}

func (g *Gateway) endFlow(u *udpFlow) {
	if g.gso.flow == u {
		g.gso.send()
	}
	g.timers.Stop(&u.timer)
	u.end()
	g.count(Evicted)
}

// openSocket opens a socket of the host. If the process has no descriptor left, UDP flows are closed to free one, so that
// datagrams to many destinations stop neither connections nor DNS queries.
func (g *Gateway) openSocket(to netip.Addr, kind, protocol int) (fd int, err error) {
	kind |= unix.SOCK_NONBLOCK | unix.SOCK_CLOEXEC
	fd, err = unix.Socket(domain(to), kind, protocol)
	if noDescriptor(err) && g.freeDescriptor() {
		fd, err = unix.Socket(domain(to), kind, protocol)
	}
	return fd, err
}

// freeDescriptor warns that no descriptor is left, and returns whether a UDP flow could be closed to free one.
func (g *Gateway) freeDescriptor() bool {
	g.warn(warnFiles, "no file descriptors left: UDP flows end early, and more connections are refused; raise ulimit -n", "most", g.maxFiles)
	if u := g.flows.own.first(); u != nil {
		g.endFlow(u)
		return true
	}
	if u := g.flows.sharing.first(); u != nil {
		for _, other := range u.shared.byPeer {
			g.endFlow(other)
		}
		return true
	}
	return false
}

func noDescriptor(err error) bool { return errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) }

// warning is a kind of warning.
type warning int

const (
	warnEvicted warning = iota
	warnOpening
	warnRefused
	warnFiles
	warnEcho
	warnings
)

// warn logs a warning, at most once per warnEvery and kind.
func (g *Gateway) warn(kind warning, text string, args ...any) {
	if last := g.warned[kind]; !last.IsZero() && g.now.Sub(last) < warnEvery {
		return
	}
	g.warned[kind] = g.now
	g.log.Warn(text, args...)
}
