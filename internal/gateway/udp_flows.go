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
)

// Each UDP flow that the guest begins takes a port of the host, unless it shares a socket, and so does each TCP connection.
const (
	// portShare is the part of the host's port range that one guest may take for UDP, and
	// the same again for TCP, whose ports are others.
	portShare = 4
	// aliasShare is the part of its flows that may lead to name servers: each question is
	// a flow.
	aliasShare = 4
	// sharedShare is the part of a guest's ports for UDP that sockets which flows share may take.
	sharedShare = 4
	// maxSharing bounds the flows that share sockets, which take neither ports nor descriptors, but 513 bytes of memory
	// each (measured on amd64): 34 MB.
	maxSharing = 1 << 16
	// defaultPorts is how many the range has by default (ip_local_port_range, 32768 to 60999).
	defaultPorts = 28232
	// warnEvery bounds how often the log tells of a bound that is reached.
	warnEvery = time.Minute
)

// defaultOutgoing is how many ports a guest may take: a share of the range that the host's
// network namespace chooses from.
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

// timeShare bounds the time that the gateway spends on opening flows: a guest that sends to ever other places would
// have its own connections and questions to name servers wait behind them, or be lost with them.
type timeShare struct {
	remaining time.Duration
	at        time.Time
}

const (
	// openingPercent is in percent of all time.
	openingPercent = 60
	// openingBurst is what may be spent at once.
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

// class is what kind of flow it is: which one is evicted first depends on it.
type class uint8

const (
	// naming: to the alias of a name server.
	naming class = iota
	// passing: to another port of name servers, or one datagram was sent and none came.
	passing
	// lasting: all others.
	lasting
	classes
)

// patience is how long a flow of a class that is idle is worth more than new ones. A
// flood of questions, or a scan, so evicts its own flows before one that has been used for long.
func (c class) patience() time.Duration {
	if c == lasting {
		return udpIdle
	}
	return dnsIdle
}

// udpFlows are those of UDP that the guest began: by name, and by when they were used last.
type udpFlows struct {
	all     map[flow]*udpFlow
	own     flowLRU // those with a socket of their own
	sharing flowLRU // those that share one
	sources map[netip.AddrPort]*source
	sockets int // that flows share
}

// flowLRU is flows by when they were used last, those of each class by themselves.
type flowLRU struct {
	class [classes]struct {
		oldest, newest *udpFlow
		n              int
	}
	n int
}

// order is the one that a flow is in.
func (l *udpFlows) order(u *udpFlow) *flowLRU {
	if u.shared != nil {
		return &l.sharing
	}
	return &l.own
}

// link has a flow be the one of its class that was used last.
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

// used notes that a flow is in use, and whether it has shown to last.
func (l *udpFlows) used(u *udpFlow, now time.Time, lasts bool) {
	u.lastUsed = now
	to := u.class
	if lasts && to == passing && u.addresses.remote.Port() != dnsPort {
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

// countOwn counts a flow among those of its source that have sockets of their own, if it is one.
func (l *udpFlows) countOwn(u *udpFlow, n int) {
	if u.shared != nil || !u.sharable() {
		return
	}
	l.source(u.addresses.guest).own += n
	l.tidy(u.addresses.guest)
}

// first is the flow whose patience ends first; nil if there are none. Questions to name servers are bounded by
// themselves (aliasShare): no other flow takes the place of one that waits for its answer, while there are others.
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

// makeRoomForFlow evicts the flows in whose place one of a class comes, which has a socket of its own.
func (g *Gateway) makeRoomForFlow(c class) {
	names := &g.flows.own.class[naming]
	if most := max(g.config.Outgoing/aliasShare, 1); c == naming && names.n >= most {
		g.evict(names.oldest, "flows to name servers", most)
	}
	g.makeRoomForSocket()
}

// makeRoomForSocket evicts the flow in whose place a socket comes. There is one: of the ports, most are left to flows
// with sockets of their own.
func (g *Gateway) makeRoomForSocket() {
	if g.flows.own.n+g.flows.sockets >= g.config.Outgoing {
		g.evict(g.flows.own.first(), "UDP flows", g.config.Outgoing)
	}
}

// evict forgets a flow before its time.
func (g *Gateway) evict(u *udpFlow, what string, most int) {
	g.endFlow(u)
	g.warn(warnEvicted, "too many "+what+": the oldest is forgotten", "most", most)
}

func (g *Gateway) endFlow(u *udpFlow) {
	if g.gso.flow == u {
		g.gso.send()
	}
	g.timers.stop(&u.timer)
	u.end()
	g.count(Evicted)
}

// openSocket makes a socket of the host's. Where the process has no descriptor left, the UDP
// flow that is worth least gives up its own, or those that share one give up that: datagrams to many places keep neither
// connections nor questions to name servers from going on.
func (g *Gateway) openSocket(to netip.Addr, kind, protocol int) (fd int, err error) {
	kind |= unix.SOCK_NONBLOCK | unix.SOCK_CLOEXEC
	fd, err = unix.Socket(domain(to), kind, protocol)
	if noDescriptor(err) && g.freeDescriptor() {
		fd, err = unix.Socket(domain(to), kind, protocol)
	}
	return fd, err
}

// freeDescriptor warns that there is no descriptor left, and tells whether a UDP flow had one to give.
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

// warning is a kind of them.
type warning int

const (
	warnEvicted warning = iota
	warnOpening
	warnRefused
	warnFiles
	warnEcho
	warnings
)

// warn logs a warning, from time to time.
func (g *Gateway) warn(kind warning, text string, args ...any) {
	if last := g.warned[kind]; !last.IsZero() && g.now.Sub(last) < warnEvery {
		return
	}
	g.warned[kind] = g.now
	g.log.Warn(text, args...)
}
