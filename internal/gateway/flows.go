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

// Each UDP flow that the guest begins, and each TCP connection, takes a port of the host.
const (
	// portShare is the part of the host's port range that one guest may take for UDP, and
	// the same again for TCP, whose ports are others.
	portShare = 4
	// aliasShare is the part of its flows that may lead to name servers: each question is
	// a flow.
	aliasShare = 4
	// defaultPorts is how many the range has by default (ip_local_port_range, 32768 to 60999).
	defaultPorts = 28232
	// warnEvery bounds how often the log tells of a bound that is reached.
	warnEvery = time.Minute
)

// portsOf is how many ports a guest may take: a share of the range that the host's
// network namespace chooses from.
func portsOf() int {
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

// opening bounds the time that the gateway spends on opening flows: a guest that sends to ever other places would
// have its own connections and questions to name servers wait behind them, or be lost with them.
type opening struct {
	left time.Duration
	at   time.Time
}

const (
	// openingShare is in percent of all time.
	openingShare = 60
	// openingBurst is what may be spent at once.
	openingBurst = 50 * time.Millisecond
)

func (o *opening) allows(now time.Time) bool {
	if o.at.IsZero() {
		o.left = openingBurst
	}
	o.left = min(o.left+now.Sub(o.at)*openingShare/100, openingBurst)
	o.at = now
	return o.left > 0
}

func (o *opening) spend(d time.Duration) { o.left -= d }

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

// flows are those of UDP that the guest began: by name, and those of each class by when
// they were used last.
type flows struct {
	by    map[flow]*udpFlow
	order [classes]struct {
		oldest, newest *udpFlow
		n              int
	}
}

// link has a flow be the one of its class that was used last.
func (l *flows) link(u *udpFlow) {
	o := &l.order[u.class]
	u.older, u.newer = o.newest, nil
	if o.newest != nil {
		o.newest.newer = u
	} else {
		o.oldest = u
	}
	o.newest = u
	o.n++
}

func (l *flows) unlink(u *udpFlow) {
	o := &l.order[u.class]
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
}

// used notes that a flow is in use, and whether it has shown to last.
func (l *flows) used(u *udpFlow, now time.Time, lasts bool) {
	u.seen = now
	to := u.class
	if lasts && to == passing && u.flow.remote.Port() != dnsPort {
		to = lasting
	}
	if to == u.class && l.order[to].newest == u {
		return
	}
	l.unlink(u)
	u.class = to
	l.link(u)
}

func (l *flows) add(u *udpFlow) {
	l.by[u.flow] = u
	l.link(u)
}

func (l *flows) remove(u *udpFlow) {
	delete(l.by, u.flow)
	l.unlink(u)
}

// first is the flow whose patience ends first; nil if there are none.
func (l *flows) first() (first *udpFlow) {
	var end time.Time
	for c := range classes {
		u := l.order[c].oldest
		if u == nil {
			continue
		}
		if e := u.seen.Add(c.patience()); first == nil || e.Before(end) {
			first, end = u, e
		}
	}
	return first
}

// makeRoom evicts the flows in whose place one of a class comes.
func (g *Gateway) makeRoom(c class) {
	names := &g.datagram.order[naming]
	if most := max(g.config.Outgoing/aliasShare, 1); c == naming && names.n >= most {
		g.evict(names.oldest, "flows to name servers", most)
	}
	if len(g.datagram.by) >= g.config.Outgoing {
		g.evict(g.datagram.first(), "UDP flows", g.config.Outgoing)
	}
}

// evict forgets a flow before its time.
func (g *Gateway) evict(u *udpFlow, what string, most int) {
	g.giveUp(u)
	g.warnOf(warnEvicted, "too many "+what+": the oldest is forgotten", "most", most)
}

func (g *Gateway) giveUp(u *udpFlow) {
	if g.train.of == u {
		g.train.send()
	}
	g.timers.stop(&u.timer)
	g.datagram.remove(u)
	g.forget(u.fd)
	g.count(Evicted)
}

// hostSocket makes a socket of the host's. Where the process has no descriptor left, the UDP
// flow that is worth least gives up its own: datagrams to many places keep neither
// connections nor questions to name servers from going on.
func (g *Gateway) hostSocket(to netip.Addr, kind, protocol int) (fd int, err error) {
	kind |= unix.SOCK_NONBLOCK | unix.SOCK_CLOEXEC
	fd, err = unix.Socket(domain(to), kind, protocol)
	if noDescriptor(err) && g.spare() {
		fd, err = unix.Socket(domain(to), kind, protocol)
	}
	return fd, err
}

// spare warns that there is no descriptor left, and tells whether a UDP flow had one to give.
func (g *Gateway) spare() bool {
	g.warnOf(warnFiles, "no file descriptors left: UDP flows end early, and more connections are refused; raise ulimit -n", "most", g.files)
	u := g.datagram.first()
	if u != nil {
		g.giveUp(u)
	}
	return u != nil
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

// warnOf logs a warning, from time to time.
func (g *Gateway) warnOf(kind warning, text string, args ...any) {
	if last := g.warned[kind]; !last.IsZero() && g.now.Sub(last) < warnEvery {
		return
	}
	g.warned[kind] = g.now
	g.log.Warn(text, args...)
}
