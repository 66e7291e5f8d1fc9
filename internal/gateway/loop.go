// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// ConfigureRuntime sets GOMAXPROCS to 1, for a process that only runs a gateway: with more, the Go runtime spends a fifth of the CPU
// time on looking for work for idle processors.
func ConfigureRuntime() { runtime.GOMAXPROCS(1) }

// Run processes packets until ctx ends or the guest's interface is removed, which is not an error. Run closes all descriptors.
func (g *Gateway) Run(ctx context.Context) error {
	defer g.close()
	woken := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(woken)
		var one = [8]byte{1}
		_, _ = unix.Write(g.wake, one[:]) // the counter cannot overflow
	})
	defer func() {
		if !stop() {
			<-woken
		}
	}()
	events := make([]unix.EpollEvent, 256)
	var end time.Time // of lingering; zero: ctx has not ended
	for {
		if ctx.Err() != nil && end.IsZero() {
			g.stopping, end = true, g.clock().Add(g.config.Linger)
			g.ignore(g.wake)
		}
		n, err := g.runTurn(events, g.timeout(end))
		switch {
		case errors.Is(err, errInterfaceGone):
			return nil
		case err != nil:
			return err
		case !end.IsZero() && (!g.now.Before(end) || n == 0 && !g.unfinished()):
			return nil
		}
	}
}

// errInterfaceGone is returned by runTurn when the guest's interface is removed.
var errInterfaceGone = errors.New("the guest's interface was removed")

// runTurn runs one turn of the loop: it waits up to timeout milliseconds for events (-1: without limit), handles the events, and
// completes the turn. It returns the number of events.
func (g *Gateway) runTurn(events []unix.EpollEvent, timeout int) (n int, err error) {
	n, g.now, err = g.poller.wait(events, timeout, g.clock)
	if err != nil && !errors.Is(err, unix.EINTR) {
		return 0, fmt.Errorf("wait for events: %w", err)
	}
	n = max(n, 0)
	g.onlyEvent = n == 1
	for _, e := range events[:n] {
		h := g.handlers[e.Fd]
		if h.handler == nil || h.number != e.Pad {
			continue // the descriptor was closed in this turn
		}
		if e.Fd == int32(g.config.TUN) && e.Events&(unix.EPOLLERR|unix.EPOLLHUP) != 0 && e.Events&unix.EPOLLIN == 0 {
			return 0, errInterfaceGone
		}
		h.event(e.Events)
	}
	g.finishTurn()
	return n, g.failed
}

// lingerInterval is how often a lingering Run checks whether all connections are finished.
const lingerInterval = 20 * time.Millisecond

// timeout returns the timeout for epoll_wait(2), in milliseconds; -1: none.
func (g *Gateway) timeout(end time.Time) int {
	if len(g.outputQueue) > 0 || len(g.deferredSYNs) > 0 {
		return 0
	}
	next, ok := g.timers.Next()
	if len(g.delayedAcks) > 0 {
		if due := g.delayedAcks[0].due; !ok || due.Before(next) {
			next, ok = due, true
		}
	}
	if !end.IsZero() {
		soon := g.clock().Add(lingerInterval)
		if soon.After(end) {
			soon = end
		}
		if !ok || soon.Before(next) {
			next, ok = soon, true
		}
	}
	if !ok {
		return -1
	}
	return int(max(next.Sub(g.clock())+time.Millisecond-1, 0) / time.Millisecond)
}

// unfinished returns whether the guest has not sent a FIN on some connection. A connection in synPending has no data to deliver.
func (g *Gateway) unfinished() bool {
	for _, c := range g.conns {
		if c.fd >= 0 && !c.state.finReceived() && c.state != synPending {
			return true
		}
	}
	return false
}

// finishTurn completes a turn of the loop: acknowledgements, deferred SYNs, output of connections that exceeded their budget, timers.
func (g *Gateway) finishTurn() {
	for _, c := range g.ackQueue {
		c.queued.ack = false
		if c.fd >= 0 {
			c.acknowledgeTurn()
		}
	}
	clear(g.ackQueue)
	g.ackQueue = g.ackQueue[:0]
	g.resumeSYNs()
	g.sendDelayedAcks()
	g.outputQueue, g.outputTurn = g.outputTurn[:0], g.outputQueue
	for _, c := range g.outputTurn {
		c.queued.output = false
		if c.fd >= 0 {
			c.output()
		}
	}
	clear(g.outputTurn)
	g.timers.Run(g.now)
}

// handler handles the events of a descriptor.
type handler interface{ event(events uint32) }

// registered is the handler of a descriptor. Events carry the number of the registration, so that an event of a closed descriptor
// does not reach the handler of a new descriptor with the same number.
type registered struct {
	handler
	number int32
}

type wakeHandler struct{}

func (wakeHandler) event(uint32) {}

// register adds a descriptor to epoll(7).
func (g *Gateway) register(fd int, events uint32, h handler) error {
	for fd >= len(g.handlers) {
		g.handlers = append(g.handlers, registered{})
	}
	g.registrations++
	g.handlers[fd] = registered{h, g.registrations}
	if err := g.watch(unix.EPOLL_CTL_ADD, fd, events); err != nil {
		g.handlers[fd] = registered{}
		return fmt.Errorf("watch descriptor: %w", err)
	}
	return nil
}

// watch calls epoll_ctl(2) for a registered descriptor.
func (g *Gateway) watch(operation, fd int, events uint32) error {
	return unix.EpollCtl(g.poller.epoll, operation, fd, &unix.EpollEvent{Events: events, Fd: int32(fd), Pad: g.handlers[fd].number})
}

// ignore removes a descriptor from epoll(7).
func (g *Gateway) ignore(fd int) {
	g.handlers[fd] = registered{}
	// epoll_ctl(2) fails only for a descriptor that is not registered.
	_ = unix.EpollCtl(g.poller.epoll, unix.EPOLL_CTL_DEL, fd, nil)
}

// closeFD closes a descriptor and removes its handler.
func (g *Gateway) closeFD(fd int) {
	if fd < len(g.handlers) {
		g.handlers[fd] = registered{}
	}
	unix.Close(fd)
}
