// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"net/netip"
	"time"

	"sockeye/internal/gateway/access"
	"sockeye/internal/sysctl"
)

// Each TCP connection that the guest opens occupies a port of the host, and so does each UDP flow, unless it shares a socket.
const (
	// A guest may occupy 1/portDivisor of the host's port range with UDP, and as much with TCP, which has separate ports.
	portDivisor = 4
	// At most 1/aliasDivisor of the flows may lead to name servers. Each DNS query is a flow.
	aliasDivisor = 4
	// Shared sockets may occupy 1/sharedDivisor of a guest's UDP ports.
	sharedDivisor = 4
	// maxSharing is the maximum number of flows on shared sockets. Such a flow needs neither a port nor a descriptor, but 513
	// bytes of memory (measured on amd64), 34 MB in all.
	maxSharing = 1 << 16
	// defaultPorts is the size of the kernel's default port range (ip_local_port_range, 32768 to 60999).
	defaultPorts = 28232
)

// defaultOutgoing returns the number of ports that a guest may occupy: a part of net.ipv4.ip_local_port_range.
func defaultOutgoing() int {
	if ports := sysctl.Numbers("net.ipv4.ip_local_port_range"); len(ports) == 2 && 0 <= ports[0] && ports[0] <= ports[1] && ports[1] <= 65535 {
		return max(int(ports[1]-ports[0]+1)/portDivisor, 1)
	}
	return defaultPorts / portDivisor
}

// timeBudget limits the time that the gateway spends on opening flows. Without the limit, a guest that keeps sending to new
// destinations would delay its own connections and DNS queries.
type timeBudget struct {
	remaining time.Duration
	at        time.Time
}

const (
	// openingPercent is the share of elapsed time, in percent.
	openingPercent = 60
	// openingBurst is the maximum of the budget.
	openingBurst = 50 * time.Millisecond
	// longestOpening is the most that one flow is charged: in the rest of the time, the gateway has waited for a CPU.
	longestOpening = 5 * time.Millisecond
)

func (b *timeBudget) available(now time.Time) bool {
	if b.at.IsZero() {
		b.remaining = openingBurst
	}
	b.remaining = min(b.remaining+now.Sub(b.at)*openingPercent/100, openingBurst)
	b.at = now
	return b.remaining > 0
}

func (b *timeBudget) charge(d time.Duration) { b.remaining -= min(d, longestOpening) }

// class is the kind of a flow, which decides the order of eviction.
type class uint8

const (
	// classDNS: to the alias of a name server.
	classDNS class = iota
	// classTransient: to port 53 of another host, or with a single datagram so far.
	classTransient
	// classActive: all other flows.
	classActive
	classes
)

// udpFlows are the flows that the guest opened, by address and by last use.
type udpFlows struct {
	all       map[endpoints]*udpFlow
	connected flowLRU // flows with connected sockets
	shared    flowLRU // flows on shared sockets
	sources   map[netip.AddrPort]*source
	sockets   int // number of shared sockets
}

// flowLRU is a list of flows per class, in the order of their last use.
type flowLRU struct {
	class [classes]struct {
		oldest, newest *udpFlow
		n              int
	}
	n int
}

// touch marks a flow as used now. If active, a transient flow becomes classActive, except to port 53.
func (l *udpFlows) touch(u *udpFlow, now time.Time, active bool) {
	u.lastUsed = now
	to := u.class
	if active && to == classTransient && u.endpoints.remote.Port() != access.DNSPort {
		to = classActive
	}
	list := l.listOf(u)
	if to == u.class && list.class[to].newest == u {
		return
	}
	list.unlink(u)
	u.class = to
	list.link(u)
}

func (l *udpFlows) add(u *udpFlow) {
	l.all[u.endpoints] = u
	l.listOf(u).link(u)
	l.countConnected(u, 1)
}

// link adds a flow as the most recently used of its class.
func (l *flowLRU) link(u *udpFlow) {
	c := &l.class[u.class]
	u.older, u.newer = c.newest, nil
	if c.newest != nil {
		c.newest.newer = u
	} else {
		c.oldest = u
	}
	c.newest = u
	c.n++
	l.n++
}

// evictForFlow evicts flows until the limits allow one more flow of the class with a connected socket.
func (g *Gateway) evictForFlow(c class) {
	names := &g.flows.connected.class[classDNS]
	if most := max(g.config.Outgoing/aliasDivisor, 1); c == classDNS && names.n >= most {
		g.evictAndWarn(names.oldest, "flows to name servers", most)
	}
	g.evictForSocket()
}

// evictForSocket evicts a flow with a connected socket if the limit of sockets is reached. Such a flow exists, because shared
// sockets may occupy only a part of the ports.
func (g *Gateway) evictForSocket() {
	if g.flows.connected.n+g.flows.sockets >= g.config.Outgoing {
		g.evictAndWarn(g.flows.connected.victim(), "UDP flows", g.config.Outgoing)
	}
}

// victim returns the flow to evict, whose retention ends first; nil if there are no flows. Flows of classDNS have a separate limit
// (aliasDivisor) and are evicted only if there are no others.
func (l *flowLRU) victim() (first *udpFlow) {
	var end time.Time
	for c := classTransient; c < classes; c++ {
		u := l.class[c].oldest
		if u == nil {
			continue
		}
		if e := u.lastUsed.Add(c.retention()); first == nil || e.Before(end) {
			first, end = u, e
		}
	}
	if first == nil {
		return l.class[classDNS].oldest
	}
	return first
}

// retention returns how long after its last use a flow of the class is kept in preference to others. A flood of queries, or a scan,
// thereby evicts its own flows before flows in regular use.
func (c class) retention() time.Duration {
	if c == classActive {
		return udpIdle
	}
	return dnsIdle
}

func (g *Gateway) evictAndWarn(u *udpFlow, what string, limit int) {
	g.evict(u)
	g.warn(warnEvicted, "too many "+what+": the one whose retention ends first is evicted", "limit", limit)
}

func (g *Gateway) evict(u *udpFlow) {
	if g.gso.flow == u {
		g.gso.send()
	}
	g.timers.Stop(&u.timer)
	u.remove()
	g.count(Evicted)
}

func (l *udpFlows) remove(u *udpFlow) {
	delete(l.all, u.endpoints)
	l.listOf(u).unlink(u)
	l.countConnected(u, -1)
}

// listOf returns the list that contains the flow.
func (l *udpFlows) listOf(u *udpFlow) *flowLRU {
	if u.shared != nil {
		return &l.shared
	}
	return &l.connected
}

func (l *flowLRU) unlink(u *udpFlow) {
	c := &l.class[u.class]
	if u.older != nil {
		u.older.newer = u.newer
	} else {
		c.oldest = u.newer
	}
	if u.newer != nil {
		u.newer.older = u.older
	} else {
		c.newest = u.older
	}
	u.older, u.newer = nil, nil
	c.n--
	l.n--
}

// countConnected adds n to the source's number of sharable flows with connected sockets, if u is one of these.
func (l *udpFlows) countConnected(u *udpFlow, n int) {
	if u.shared != nil || !u.sharable() {
		return
	}
	l.source(u.endpoints.guest).connected += n
	l.removeUnused(u.endpoints.guest)
}
