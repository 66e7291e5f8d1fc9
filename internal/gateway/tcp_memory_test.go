// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"slices"
	"testing"
	"time"

	"sockeye/internal/gateway/packet"
	"sockeye/room"
)

// queued returns the memory of the send queues of the host's sockets.
func (p *puppet) queued() (total int) {
	p.Helper()
	for _, c := range p.g.conns {
		if c.fd < 0 {
			continue
		}
		s, err := room.ReadSnapshot(c.fd)
		if err != nil {
			p.Fatal(err)
		}
		total += s.Queued
	}
	return total
}

// hearAll receives all pending segments and processes them on their connections.
func hearAll(p *puppet, links []*link) {
	p.Helper()
	for s, ok := p.receive(); ok; s, ok = p.receive() {
		i := slices.IndexFunc(links, func(l *link) bool { return l.local == s.To })
		if i < 0 {
			p.Fatalf("segment to an unknown connection: %v", s.To)
		}
		links[i].note(s)
	}
}

// TestMemoryBound checks that uploads to peers that do not read use a bounded amount of the host's TCP memory, and
// continue when the peers read.
func TestMemoryBound(t *testing.T) {
	const uploads, memory = 24, 8 << 20
	c := everywhere
	c.Memory = memory
	p := newPuppet(t, c)
	var links []*link
	for range uploads {
		links = append(links, p.dial(slow(t, host4)))
	}
	data := text(64 << 20)
	sent := make([]int, uploads)
	for more := true; more; {
		more = false
		for i, l := range links {
			hearAll(p, links)
			n := l.top(data[sent[i]:min(sent[i]+1<<18, len(data))], 60_000)
			sent[i] += n
			more = more || n > 0
		}
		if !more {
			p.until("the host's kernel", func() bool {
				return !slices.ContainsFunc(links, func(l *link) bool { return !l.settled() })
			})
			hearAll(p, links)
			more = slices.ContainsFunc(links, func(l *link) bool { return packet.Before(l.seq, l.adv) })
		}
		p.wait(memoryInterval)
	}
	total := 0
	for i, n := range sent {
		if n < minQueued/2 {
			t.Errorf("upload %d: %d bytes sent", i, n)
		}
		total += n
	}
	// See sendMemory: as much as the limit may be queued, and as much may be advertised.
	const most = 2*memory + uploads*(minWindow+minQueued)
	if held := p.queued(); held > most {
		t.Errorf("the sockets hold %d bytes, want at most %d", held, most)
	}
	if m := p.g.memory; m.queued > most || len(m.waiting) == 0 {
		t.Errorf("%d bytes are counted, %d connections wait", m.queued, len(m.waiting))
	}
	t.Logf("%d bytes sent, %d in the send queues", total, p.queued())
	// The peers read one after the other, and all uploads continue.
	for i, l := range links {
		l.read(sent[i])
	}
	for range 20 {
		p.wait(memoryInterval)
		time.Sleep(time.Millisecond)
		hearAll(p, links)
	}
	for i, l := range links {
		if l.adv-l.seq < minQueued/2 {
			t.Errorf("upload %d: window of %d bytes", i, l.adv-l.seq)
		}
		l.say(packet.RST, nil)
	}
	p.turn(10)
	hearAll(p, links)
	p.ended()
	if m := p.g.memory; m.queued != 0 || m.advertised != 0 || len(m.waiting) != 0 {
		t.Errorf("without connections: %d bytes queued, %d advertised, %d waiting", m.queued, m.advertised, len(m.waiting))
	}
}

// TestEndResetsGuest checks that an exiting gateway resets the connections of the guest. Otherwise the sockets of a
// program that has exited would keep their memory.
func TestEndResetsGuest(t *testing.T) {
	p := newPuppet(t, everywhere)
	l := p.dial(slow(t, host4))
	l.fill(text(8<<20), 60_000)
	p.quiet()
	p.g.resetConnections()
	s, ok := p.receive()
	for ok && s.Flags&packet.RST == 0 {
		s, ok = p.receive()
	}
	if !ok || s.Seq != l.ack {
		t.Errorf("got %v, want a RST at %d", s, l.ack)
	}
}
