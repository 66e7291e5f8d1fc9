// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"time"

	"sockeye/internal/gateway/timer"
	"sockeye/room"
)

// Formula replaces the estimate of package room or the polling of full sockets, for comparisons. With a formula, the gateway
// recomputes all windows every windowInterval, the interval of passt (ACK_INTERVAL).
type Formula struct {
	// Space returns the number of bytes that a host's socket is assumed to accept; nil: the estimate of package room.
	Space func(s room.Snapshot) int
	// Polls is set if full sockets are polled, for which the kernel then grows their buffers.
	Polls bool
}

const windowInterval = 10 * time.Millisecond

// windowTimer recomputes the windows.
type windowTimer struct {
	g     *Gateway
	timer timer.Timer
}

func (w *windowTimer) start(g *Gateway) {
	w.g, w.timer.Owner = g, w
	w.Expired()
}

// Expired recomputes all windows.
func (w *windowTimer) Expired() {
	for _, c := range w.g.conns {
		if c.fd >= 0 && c.state >= established {
			c.sendWindowUpdate()
		}
	}
	w.g.timers.Set(&w.timer, w.g.now.Add(windowInterval))
}
