// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"io"
	"testing"

	"sockeye/internal/gateway/packet"
)

// TestDelayedAck checks that the response to a request carries the acknowledgement, once the peer has responded in time, and that an
// acknowledgement delayed in vain ends this for many responses.
func TestDelayedAck(t *testing.T) {
	p := newPuppet(t, everywhere)
	l := p.dial(listenOn(t, host4))
	p.stopClock()
	request := func() {
		t.Helper()
		l.say(packet.ACK|packet.PSH, []byte("request"))
		p.turn(0)
		b := make([]byte, len("request"))
		if _, err := io.ReadFull(l.conn, b); err != nil || string(b) != "request" {
			t.Fatalf("received %q, error %v", b, err)
		}
	}
	respond := func() {
		t.Helper()
		l.write([]byte("response"))
		s := l.hear()
		if string(s.Payload) != "response" || s.Ack != l.seq {
			t.Errorf("response: %v, want ack %d", s, l.seq)
		}
		l.ack += uint32(len(s.Payload))
	}
	request()
	l.acknowledged() // at once: no response is known
	respond()
	for range 40 { // more than minSinglePackets
		request()
		p.quiet()
		respond()
	}
	p.wait(ackDelay)
	p.quiet() // the response has acknowledged the request
	request()
	p.wait(ackDelay / 2)
	p.quiet()
	p.wait(ackDelay / 2)
	if s := l.hear(); s.Ack != l.seq || s.Length() != 0 {
		t.Errorf("delayed acknowledgement: %v, want ack %d", s, l.seq)
	}
	respond()
	request()
	l.acknowledged() // at once: the last response was late
	respond()
	for range delayPenalty {
		request()
		l.acknowledged()
		respond()
	}
	request()
	p.quiet()
	respond()
	// A window of which half is used is recomputed and advertised.
	c := p.g.conns[endpoints{l.local, l.remote}]
	c.rcv.lastWindow = 2*c.rcv.wnd() + 1
	request()
	l.acknowledged()
	if c.rcv.lastWindow > c.rcv.wnd() {
		t.Errorf("the window of %d bytes was not recomputed", c.rcv.wnd())
	}
	l.say(packet.RST, nil)
	p.ended()
}

// TestSinglePackets checks that packets that arrive together are read in few turns after turns that read one packet each.
func TestSinglePackets(t *testing.T) {
	p := newPuppet(t, everywhere)
	l := p.dial(listenOn(t, host4))
	for range 3 * minSinglePackets {
		l.say(packet.ACK|packet.PSH, []byte("x"))
		p.turn(0)
	}
	const packets = 3 * minSinglePackets
	for range packets {
		l.say(packet.ACK|packet.PSH, []byte("y"))
	}
	for range minSinglePackets {
		p.turn(0)
	}
	if got := p.g.conns[endpoints{l.local, l.remote}].nextSequence(); got != l.seq {
		t.Errorf("%d bytes are not read after %d turns", l.seq-got, minSinglePackets)
	}
	l.acknowledged()
	l.say(packet.RST, nil)
	p.ended()
}
