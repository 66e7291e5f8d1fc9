// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"errors"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/sockaddr"
	"sockeye/room"

	"sockeye/internal/gateway/timer"
)

// listener accepts connections of the host for a port of the guest.
type listener struct {
	g *Gateway
	Forward
	timer timer.Timer
}

const (
	// acceptBudget is the maximum number of connections accepted in a turn.
	acceptBudget = 64
	// acceptPause is the delay before the next accept(2) after one failed for lack of descriptors or memory.
	acceptPause = 100 * time.Millisecond
)

func (l *listener) event(uint32) {
	for range acceptBudget {
		fd, peer, err := unix.Accept4(l.FD, unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
		switch {
		case err == nil:
			l.accepted(fd, peer)
		case errors.Is(err, unix.EAGAIN):
			return
		case errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE), errors.Is(err, unix.ENOBUFS), errors.Is(err, unix.ENOMEM),
			errors.Is(err, unix.EINVAL):
			if noDescriptor(err) && l.g.freeDescriptor() {
				continue
			}
			l.g.count(TooMany)
			l.watch(0)
			l.timer.Owner = l
			l.g.timers.Set(&l.timer, l.g.now.Add(acceptPause))
			return
		}
		// Other errors belong to the accepted connection, which no longer exists (accept(2)).
	}
}

// Expired resumes accepting connections after acceptPause.
func (l *listener) Expired() { l.watch(unix.EPOLLIN) }

func (l *listener) watch(events uint32) {
	// epoll_ctl(2) fails only for a descriptor that is not registered.
	_ = l.g.watch(unix.EPOLL_CTL_MOD, l.FD, events)
}

// aliasPorts is the number of source ports to try for a connection from the host itself: all addresses of the host have one
// alias inside.
const aliasPorts = 64

// accepted opens a connection to the guest for a connection that the host has accepted.
func (l *listener) accepted(fd int, peer unix.Sockaddr) {
	from := sockaddr.AddrPort(peer)
	remote := l.g.remoteAddr(from)
	guest := l.g.guestAddr(remote.Addr())
	f := endpoints{netip.AddrPortFrom(guest, l.Port), remote}
	if remote != from {
		// Since several addresses of the host have one alias, two connections may have the same address pair.
		for i := 1; i < aliasPorts && l.g.conns[f] != nil; i++ {
			f.remote = withPort(remote, max(remote.Port()+uint16(i), 1))
		}
	}
	switch c := l.g.conns[f]; {
	case c == nil:
	case c.state == timeWait:
		c.remove()
	case c.hostError != hostOK: // the guest has not been told yet
		c.abort()
	}
	if !from.IsValid() || !guest.IsValid() || len(l.g.conns) >= l.g.config.Connections || l.g.conns[f] != nil {
		l.g.count(TooMany)
		resetOnClose(fd)
		unix.Close(fd)
		return
	}
	c := l.g.newConn(f, fd, synSent)
	if c == nil {
		return
	}
	c.snd.nxt = c.snd.iss + 1
	c.windowScaling = true        // offered; the SYN-ACK accepts or declines
	s, _ := room.ReadSnapshot(fd) // as in resendSYN
	c.sendSYN(s)
}
