// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"testing"

	"sockeye/internal/gateway/packet"
	"sockeye/room"
)

// TestFormula checks that a formula replaces the estimate of package room, and is computed again after a while.
func TestFormula(t *testing.T) {
	size := 4096 * 3
	c := everywhere
	c.Formula = &Formula{Space: func(room.Snapshot) int { return size }}
	p := newPuppet(t, c)
	l := p.dial(listenOn(t, host4))
	l.say(packet.ACK|packet.PSH, []byte("x"))
	l.acknowledged()
	if got := int(l.adv - l.acked); got != size {
		t.Errorf("a window of %d bytes, want %d", got, size)
	}
	size *= 4
	p.wait(windowInterval)
	l.hear()
	if got := int(l.adv - l.acked); got != size {
		t.Errorf("a window of %d bytes, want %d", got, size)
	}
	l.say(packet.RST, nil)
	p.g.timers.Stop(&p.g.windows.timer)
	p.ended()
}
