// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"bytes"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/gateway/access"
	"sockeye/internal/gateway/packet"
)

// slow returns a listener whose connections have a receive buffer of fixed size.
func slow(t *testing.T, a netip.Addr) *net.TCPListener {
	t.Helper()
	l := listenOn(t, a)
	raw, err := l.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if err := raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, 128<<10) }); err != nil {
		t.Fatal(err)
	}
	return l
}

// pour sends data up to the window, in segments of up to size bytes, until the window remains closed. It returns the
// number of bytes sent.
func (l *link) pour(data []byte, size int) (n int) {
	l.Helper()
	for n < len(data) {
		if l.adv == l.seq {
			l.until("an acknowledgement", l.mostAcked)
		}
		room := int(int32(l.adv - l.seq))
		if room <= 0 {
			return n
		}
		part := data[n:min(n+size, n+room, len(data))]
		l.say(packet.ACK, part)
		n += len(part)
		l.turn(0)
		l.allAcked()
	}
	l.until("an acknowledgement", l.mostAcked)
	return n
}

// mostAcked returns whether the gateway has acknowledged all data except less than one unit of its window scale.
func (l *link) mostAcked() bool {
	l.allAcked()
	return l.seq-l.acked < 1<<max(l.scale, 0)
}

// top calls pour, and probes the window, until the host's socket accepts no more data.
func (l *link) top(data []byte, size int) (n int) {
	l.Helper()
	for more := 1; more > 0; {
		for range 10 {
			l.turn(2)
		}
		l.sayAt(l.seq-1, packet.ACK, nil) // window probe
		l.turn(0)
		l.allAcked()
		more = l.pour(data[n:], size)
		n += more
	}
	return n
}

// fill calls top until the host's socket accepts no more data and its kernel has processed all of it.
func (l *link) fill(data []byte, size int) (n int) {
	l.Helper()
	for more := 1; more > 0; {
		for end := time.Now().Add(patience); !l.settled() && !l.dropped(); l.turn(1) {
			if time.Now().After(end) {
				l.Fatalf("the host's kernel still moves data: %+v", *l.hostInfo())
			}
		}
		more = l.top(data[n:], size)
		n += more
	}
	return n
}

// settled returns whether no data moves between the gateway's socket and the host's end: all data is delivered, or the
// rest waits for a closed window. If the window is not completely closed, the host's kernel sends the data that fits
// only after a timeout.
func (l *link) settled() bool {
	info := l.hostInfo()
	return info.Unacked == 0 && (info.Notsent_bytes == 0 || info.Snd_wnd == 0)
}

// dropped returns whether the host's end drops, for lack of memory, a segment that fits into its window. TCP then
// retransmits the segment with exponential backoff until the program reads.
func (l *link) dropped() bool {
	l.Helper()
	info := l.hostInfo()
	return info.Unacked > 0 && info.Backoff >= 2
}

// hostInfo returns TCP_INFO of the gateway's socket.
func (l *link) hostInfo() *unix.TCPInfo {
	l.Helper()
	c := l.g.conns[endpoints{l.local, l.remote}]
	if c == nil {
		l.Fatal("the gateway has removed the connection")
	}
	info, err := unix.GetsockoptTCPInfo(c.fd, unix.IPPROTO_TCP, unix.TCP_INFO)
	if err != nil {
		l.Fatal(err)
	}
	return info
}

// allAcked returns whether the gateway has acknowledged all data, after receiving all of its segments.
func (l *link) allAcked() bool {
	for s, ok := l.receive(); ok; s, ok = l.receive() {
		l.note(s)
	}
	return l.acked == l.seq
}

// TestHostStops checks that the window of the guest closes when a peer of the host stops reading, before the gateway
// has to buffer data, and that the guest receives a window update when the peer reads again.
func TestHostStops(t *testing.T) {
	for _, c := range []struct {
		name  string
		host  netip.Addr
		size  int
		scale bool
	}{
		{"large segments", host4, 60_000, true},
		{"Ethernet-sized segments", host6, 1440, true},
		{"odd segments", host4, 1333, true},
		{"no scale", host4, 1333, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := newPuppet(t, everywhere)
			l := p.dialWith(slow(t, c.host), c.scale)
			data := text(64 << 20)
			sent := 0
			for round := range 2 {
				n := l.fill(data[sent:], c.size)
				sent += n
				if n == 0 || sent == len(data) {
					t.Fatalf("round %d: %d bytes accepted", round, n)
				}
				if got := p.g.Counts()[PartialSend]; got != 0 {
					t.Errorf("%d partial sends", got)
				}
				// The gateway must reply to a window probe, with or without a byte. Meanwhile the window may have
				// opened, because the host's kernel sent data.
				l.sayAt(l.seq-1, packet.ACK, nil)
				if s := l.hear(); s.Ack != l.seq {
					t.Errorf("reply to a window probe: %v", s)
				}
				l.sayAt(l.seq, packet.ACK|packet.PSH, []byte{data[sent]})
				s := l.hear()
				switch taken := s.Ack - l.seq; {
				case taken == 0 && l.adv == l.seq:
				case taken == 1:
					l.seq, sent, n = l.seq+1, sent+1, n+1
				default:
					t.Errorf("reply to a window probe with a byte: %v", s)
				}
				// The gateway may have announced a window that has opened.
				if got := l.read(n); !bytes.Equal(got, data[sent-n:sent]) {
					t.Fatal("wrong data")
				}
				if s := l.hear(); s.Window == 0 || s.Length() != 0 {
					t.Errorf("after reading: %v", s)
				}
			}
			l.say(packet.RST, nil)
			p.ended()
		})
	}
}

// TestBeyondWindow checks that data beyond the advertised window is neither buffered nor written to the socket.
func TestBeyondWindow(t *testing.T) {
	p := newPuppet(t, everywhere)
	l := p.dial(slow(t, host4))
	data := text(64 << 20)
	sent := l.fill(data, 60_000)
	for range 1000 {
		l.sayAt(l.seq+100_000, packet.ACK|packet.FIN, data[sent+100_000:sent+101_400])
		l.sayAt(l.acked, packet.ACK, data[sent+int(l.acked-l.seq):][:60_000])
		p.turn(0)
		l.allAcked()
		if c := p.g.conns[endpoints{l.local, l.remote}]; c == nil || c.rcv.finPending || c.state.finReceived() {
			t.Fatal("a FIN beyond the window was accepted")
		}
	}
	if counts := p.g.Counts(); p.g.backlog != 0 || counts[PartialSend] != 0 {
		t.Errorf("%d bytes in the backlog, %d partial sends", p.g.backlog, counts[PartialSend])
	}
	l.seq = l.acked
	l.say(packet.RST, nil)
	p.ended()
}

// TestBacklog checks that no data is lost if the socket accepts a part of a send, even if the guest has sent more than
// the advertised window.
func TestBacklog(t *testing.T) {
	p := newPuppet(t, everywhere)
	l := p.dial(slow(t, host4))
	data := text(64 << 20)
	sent := l.fill(data, 60_000)
	c := p.g.conns[endpoints{l.local, l.remote}]
	c.rcv.adv = l.seq + maxBacklog // simulates a larger advertised window
	l.adv = c.rcv.adv
	more := maxBacklog/40_000*40_000 + 40_000
	for i := 0; i < more; i += 40_000 {
		l.say(packet.ACK, data[sent+i:sent+i+40_000])
	}
	for range 10 {
		p.turn(1)
	}
	if len(c.rcv.backlog) == 0 || len(c.rcv.backlog) > maxBacklog || p.g.backlog != len(c.rcv.backlog) {
		t.Errorf("%d bytes in the backlog, %d in all backlogs", len(c.rcv.backlog), p.g.backlog)
	}
	if got := p.g.Counts()[PartialSend]; got == 0 {
		t.Error("PartialSend counter is 0")
	}
	done := make(chan []byte)
	go func() {
		b := make([]byte, sent+more)
		if _, err := io.ReadFull(l.conn, b); err != nil {
			b = nil
		}
		done <- b
	}()
	var got []byte
	turns := 0
	p.until("the data", func() bool {
		if turns++; !l.allAcked() && turns%50 == 0 { // retransmit dropped data, as after a timeout
			rest := data[sent+more-int(l.seq-l.acked) : sent+more]
			l.sayAt(l.acked, packet.ACK, rest[:min(len(rest), 40_000)])
		}
		select {
		case got = <-done:
			return true
		default:
			return false
		}
	})
	if !bytes.Equal(got, data[:sent+more]) {
		t.Error("wrong data")
	}
	l.say(packet.FIN|packet.ACK, nil)
	l.acknowledged()
	l.conn.Close()
	l.fin()
	p.ended()
}

// TestTurn checks that segments that arrive together are written to the socket in one call, in order and before a FIN
// in the same turn, and that the rest of a partial write is not lost.
func TestTurn(t *testing.T) {
	t.Run("end", func(t *testing.T) {
		p := newPuppet(t, everywhere)
		l := p.dial(listenOn(t, host4))
		data := text(200_000)
		for part := range slices.Chunk(data, 30_000) {
			l.say(packet.ACK, part)
		}
		l.say(packet.ACK|packet.FIN, nil)
		p.turn(0)
		if s := l.hear(); s.Ack != l.seq {
			t.Errorf("got %v, want ack %d", s, l.seq)
		}
		if err := l.conn.CloseWrite(); err != nil {
			t.Fatal(err)
		}
		if got, err := io.ReadAll(l.conn); err != nil || !bytes.Equal(got, data) {
			t.Errorf("%d bytes, error %v", len(got), err)
		}
		l.fin()
		p.ended()
	})
	t.Run("reset", func(t *testing.T) {
		p := newPuppet(t, everywhere)
		l := p.dial(listenOn(t, host4))
		raw, err := l.conn.SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		l.say(packet.ACK, []byte("said "))
		l.say(packet.ACK, []byte("before"))
		l.say(packet.RST, nil)
		p.turn(0)
		p.ended()
		var info *unix.TCPInfo
		if err := raw.Control(func(fd uintptr) { info, err = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO) }); err != nil {
			t.Fatal(err)
		}
		if info.Bytes_received != 11 {
			t.Errorf("%d bytes received before the RST", info.Bytes_received)
		}
	})
	t.Run("no room", func(t *testing.T) {
		p := newPuppet(t, everywhere)
		l := p.dial(slow(t, host4))
		c := p.g.conns[endpoints{l.local, l.remote}]
		if err := unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_SNDBUF, 64<<10); err != nil { // disables auto-tuning
			t.Fatal(err)
		}
		data := text(64 << 20)
		sent := l.fill(data, 60_000)
		c.rcv.adv = l.seq + 2*maxBacklog // simulates a larger advertised window
		l.adv = c.rcv.adv
		more := maxBacklog + 200_000
		for part := range slices.Chunk(data[sent:sent+more], 50_000) {
			l.say(packet.ACK, part)
		}
		l.say(packet.ACK|packet.FIN, nil)
		p.turn(0)
		if c.rcv.finPending || c.state.finReceived() || len(c.rcv.backlog) == 0 || len(c.rcv.backlog) > maxBacklog || p.g.backlog != len(c.rcv.backlog) {
			t.Errorf("FIN processed: %v, %d bytes in the backlog, %d in all backlogs", c.rcv.finPending || c.state.finReceived(), len(c.rcv.backlog), p.g.backlog)
		}
		if got := p.g.Counts()[PartialSend]; got != 1 {
			t.Errorf("%d partial sends", got)
		}
		done := make(chan []byte)
		go func() {
			b, err := io.ReadAll(l.conn)
			if err != nil {
				b = nil
			}
			done <- b
		}()
		var got []byte
		turns := 0
		p.until("the end", func() bool {
			if turns++; !l.allAcked() && turns%50 == 0 { // retransmit dropped data, as after a timeout
				rest := data[min(sent+more+1-int(l.seq-l.acked), sent+more) : sent+more]
				if len(rest) > 40_000 {
					l.sayAt(l.acked, packet.ACK, rest[:40_000])
				} else {
					l.sayAt(l.acked, packet.ACK|packet.FIN, rest)
				}
			}
			select {
			case got = <-done:
				return true
			default:
				return false
			}
		})
		if !bytes.Equal(got, data[:sent+more]) {
			t.Errorf("%d bytes, want %d", len(got), sent+more)
		}
		l.conn.Close()
		l.say(packet.RST, nil)
		p.ended()
	})
}

// TestGuestStops checks that the gateway probes a guest with a closed window at increasing intervals, and sends no data
// beyond the window.
func TestGuestStops(t *testing.T) {
	p := newPuppet(t, everywhere)
	l := p.dial(listenOn(t, host4))
	p.stopClock() // a pause of the host must not expire a timer
	l.window = 10 // << 7 bytes
	l.say(packet.ACK|packet.PSH, []byte("x"))
	l.acknowledged()
	want := text(5000)
	l.write(want)
	got := append([]byte(nil), l.hear().Payload...)
	if len(got) != 1280 {
		t.Fatalf("%d bytes into a window of 1280", len(got))
	}
	l.ack += uint32(len(got))
	l.window = 0
	l.say(packet.ACK, nil)
	p.quiet()
	wait := initialRTO
	for range maxTimeouts + 5 { // a guest that responds may keep its window closed indefinitely
		p.wait(wait + time.Millisecond)
		s := l.hear()
		if s.Seq != l.ack-1 || s.Length() != 0 {
			t.Fatalf("zero-window probe: %v", s)
		}
		l.say(packet.ACK, nil)
		p.quiet()
		wait = min(2*wait, maxRTO)
	}
	l.window = 100
	l.say(packet.ACK, nil)
	got = append(got, l.take(5000-len(got))...)
	if !bytes.Equal(got, want) {
		t.Error("wrong data")
	}
	// A window that opens in small steps must not cause silly-window segments while data are in flight.
	l.write(want)
	first := l.hear().Payload
	if len(first) != 5000 {
		t.Fatalf("%d bytes", len(first))
	}
	l.ack += 1
	l.window = 5100 >> 7
	l.say(packet.ACK, nil)
	l.write([]byte("more")) // after the window, in whatever order a turn handles its events
	p.quiet()
	l.ack += 4999
	l.say(packet.ACK, nil)
	if got := l.take(4); string(got) != "more" {
		t.Errorf("got %q", got)
	}
	l.say(packet.RST, nil)
	p.ended()
}

// TestLossToGuest checks that the gateway retransmits lost segments, and no others, to the guest.
func TestLossToGuest(t *testing.T) {
	const packets = 6
	start := func(t *testing.T) (*link, []seen, []byte) {
		p := newPuppet(t, everywhere)
		l := p.dial(listenOn(t, host4))
		p.stopClock()
		l.window = 65535
		var sent []seen
		var data []byte
		for i := range packets {
			part := bytes.Repeat([]byte{byte('a' + i)}, 1000)
			data = append(data, part...)
			l.write(part)
			s := l.hear()
			for len(s.Payload) == 0 {
				s = l.hear()
			}
			sent = append(sent, s)
		}
		return l, sent, data
	}
	finish := func(l *link) {
		l.say(packet.FIN|packet.ACK, nil)
		l.acknowledged()
		l.conn.Close()
		l.fin()
		l.ended()
	}
	t.Run("timeout", func(t *testing.T) {
		l, sent, data := start(t)
		wait := initialRTO
		for range 4 {
			l.wait(wait + time.Millisecond)
			if s := l.hear(); s.Seq != sent[0].Seq || len(s.Payload) == 0 {
				t.Fatalf("retransmission: %v, want %v", s, sent[0])
			}
			l.quiet()
			wait *= 2
		}
		l.wait(wait)
		s := l.hear()
		l.ack += uint32(len(s.Payload))
		for int(l.ack-sent[0].Seq) < len(data) { // no further timeout
			l.say(packet.ACK, nil)
			s := l.hear()
			if s.Seq != l.ack {
				t.Fatalf("got %v, want seq %d", s, l.ack)
			}
			l.ack += uint32(len(s.Payload))
		}
		l.say(packet.ACK, nil)
		l.quiet()
		finish(l)
	})
	t.Run("three duplicates", func(t *testing.T) {
		l, sent, data := start(t)
		l.ack += 1000 // the second packet is lost
		for range 1 + 3 {
			l.say(packet.ACK, nil)
		}
		s := l.hear()
		if s.Seq != sent[1].Seq {
			t.Fatalf("retransmission: %v, want %v", s, sent[1])
		}
		for range 20 {
			l.say(packet.ACK, nil)
		}
		l.quiet() // no second retransmission
		l.ack = sent[0].Seq + uint32(len(data))
		l.say(packet.ACK, nil)
		l.quiet()
		if got := l.g.Counts()[Retransmitted]; got != 1 {
			t.Errorf("%d retransmissions", got)
		}
		finish(l)
	})
	// Data of the guest in the other direction is not lost.
	t.Run("with data", func(t *testing.T) {
		l, sent, data := start(t)
		l.ack += 1000
		for range 1 + 3 {
			l.say(packet.ACK, nil)
		}
		if s := l.hear(); s.Seq != sent[1].Seq {
			t.Fatalf("retransmission: %v, want %v", s, sent[1])
		}
		l.ack += 1000
		l.say(packet.ACK|packet.PSH, []byte("hello"))
		if s := l.hear(); s.Seq != sent[2].Seq {
			t.Fatalf("retransmission: %v, want %v", s, sent[2])
		}
		l.acknowledged()
		if got := l.read(5); string(got) != "hello" {
			t.Errorf("host read %q", got)
		}
		l.ack = sent[0].Seq + uint32(len(data))
		l.say(packet.ACK, nil)
		finish(l)
	})
	t.Run("late acknowledgement", func(t *testing.T) {
		l, sent, data := start(t)
		l.wait(initialRTO + time.Millisecond)
		l.hear()
		l.ack = sent[0].Seq + uint32(len(data)) // the guest had received all data
		l.say(packet.ACK, nil)
		l.quiet()
		l.write([]byte("next"))
		if got := l.take(4); string(got) != "next" {
			t.Errorf("got %q", got)
		}
		finish(l)
	})
	t.Run("FIN", func(t *testing.T) {
		l, sent, data := start(t)
		l.conn.Close()
		if s := l.hear(); s.Flags&packet.FIN == 0 {
			t.Fatal(s)
		}
		l.wait(initialRTO + time.Millisecond)
		s := l.hear()
		if s.Seq != sent[0].Seq || len(s.Payload) != len(data) || s.Flags&packet.FIN == 0 || !bytes.Equal(s.Payload, data) {
			t.Fatalf("again: %v", s)
		}
		l.ack += uint32(len(data))
		l.say(packet.ACK, nil) // acknowledges all data, but not the FIN
		if s := l.hear(); s.Flags&packet.FIN == 0 || s.Seq != l.ack {
			t.Fatalf("again: %v", s)
		}
		l.ack++
		l.say(packet.ACK|packet.FIN, nil)
		l.acknowledged()
		l.ended()
	})
}

// TestDisorder sends guest segments that are lost, duplicated, resegmented and reordered.
func TestDisorder(t *testing.T) {
	p := newPuppet(t, everywhere)
	l := p.dial(listenOn(t, host6))
	rng := rand.New(rand.NewPCG(1, 2))
	data := make([]byte, 300_000)
	for i := range data {
		data[i] = byte(rng.Uint32())
	}
	got := make(chan []byte)
	go func() {
		b, _ := io.ReadAll(l.conn)
		got <- b
	}()
	base := l.seq
	for done := 0; done < len(data); {
		// Send a burst of segments around the gateway's RCV.NXT.
		for range rng.IntN(8) {
			at := min(max(done+rng.IntN(6000)-2000, 0), len(data))
			n := min(rng.IntN(3000), len(data)-at)
			flags := uint8(packet.ACK)
			if at+n == len(data) {
				flags |= packet.FIN
			}
			l.sayAt(base+uint32(at), flags, data[at:at+n])
		}
		p.turn(0)
		l.allAcked()
		done = max(done, int(int32(l.acked-base)))
	}
	b := <-got
	if !bytes.Equal(b, data) {
		t.Errorf("the host read %d of %d bytes, or wrong data", len(b), len(data))
	}
	if p.g.Counts()[OutOfOrder] == 0 {
		t.Error("no out-of-order segment counted")
	}
	l.seq = base + uint32(len(data)) + 1
	l.conn.Close()
	l.fin()
	p.ended()
}

// TestSegmentSize checks that the gateway uses the guest's MSS, and offers an MSS that fits into the guest's windows.
func TestSegmentSize(t *testing.T) {
	for _, mtu := range []int{1500, 65520} {
		p := newPuppet(t, Config{Outbound: access.Outbound{All: true}, MTU: mtu})
		listener := listenOn(t, host4)
		l := p.syn(listener.Addr().(*net.TCPAddr).AddrPort(), true)
		s := l.hear()
		if got := int(s.Options.MSS); got < 536 || got > mtu-40 {
			t.Errorf("MTU %d: MSS %d", mtu, got)
		}
		l.ack, l.scale = s.Seq+1, int(s.Options.WindShift)
		l.say(packet.ACK, nil)
		c, err := listener.AcceptTCP()
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		l.conn = c
		l.write(text(200_000))
		want := min(1460, mtu-40)
		for n := 0; n < 200_000; {
			s := l.hear()
			if s.gso != 0 && s.gso != want {
				t.Fatalf("MTU %d: segments of %d bytes", mtu, s.gso)
			}
			if s.gso == 0 && len(s.Payload) > want {
				t.Fatalf("MTU %d: a segment of %d bytes", mtu, len(s.Payload))
			}
			n += len(s.Payload)
			l.ack += uint32(len(s.Payload))
			l.say(packet.ACK, nil)
		}
		l.say(packet.RST, nil)
		p.ended()
	}
}

// TestSmallBuffer checks that a socket with the smallest send buffer accepts a segment.
func TestSmallBuffer(t *testing.T) {
	p := newPuppet(t, everywhere)
	l := p.dial(listenOn(t, host4))
	c := p.g.conns[endpoints{l.local, l.remote}]
	if err := unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_SNDBUF, 1); err != nil {
		t.Fatal(err)
	}
	data := text(1 << 20)
	got := make(chan []byte)
	go func() {
		b, _ := io.ReadAll(l.conn)
		got <- b
	}()
	for sent := 0; sent < len(data); {
		n := l.pour(data[sent:], 1400)
		sent += n
		if n == 0 { // until the window opens
			l.hear()
		}
	}
	l.say(packet.FIN|packet.ACK, nil)
	l.acknowledged()
	if b := <-got; !bytes.Equal(b, data) {
		t.Error("wrong data")
	}
	l.say(packet.RST, nil)
	p.ended()
}

// TestWithoutPeekOffset runs the gateway without SO_PEEK_OFF for TCP, as on older kernels.
func TestWithoutPeekOffset(t *testing.T) {
	p := newPuppet(t, everywhere)
	listener := listenOn(t, host4)
	dial := func() *link {
		l := p.dial(listener)
		c := p.g.conns[endpoints{l.local, l.remote}]
		c.snd.peekOffset = false
		if err := unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_PEEK_OFF, -1); err != nil {
			t.Fatal(err)
		}
		return l
	}
	t.Run("end", func(t *testing.T) {
		l := dial()
		l.window = 100 // small, so that each acknowledgement permits more data
		l.say(packet.ACK, nil)
		p.turn(0)
		want := text(300_000)
		go func() {
			_, _ = l.conn.Write(want)
			l.conn.Close()
		}()
		first := l.hear()
		for len(first.Payload) == 0 {
			first = l.hear()
		}
		l.wait(initialRTO + time.Millisecond) // the first segment is lost
		var got []byte
		ended := false
		for !ended {
			s := l.hear()
			if s.Seq == l.ack && s.Length() > 0 {
				got = append(got, s.Payload...)
				l.ack += s.Length()
				ended = s.Flags&packet.FIN != 0
			}
			l.say(packet.ACK, nil)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("the guest received %d of %d bytes, or wrong data", len(got), len(want))
		}
		l.say(packet.FIN|packet.ACK, nil)
		l.acknowledged()
		p.ended()
	})
	t.Run("reset", func(t *testing.T) {
		l := dial()
		l.say(packet.ACK|packet.PSH, []byte("x")) // the host does not read it
		l.acknowledged()
		l.write([]byte("data"))
		for s := l.hear(); len(s.Payload) == 0; s = l.hear() {
		}
		l.conn.Close()
		if s := l.rst(); s.Seq != l.ack+4 {
			t.Errorf("got %v, data begins at %d", s, l.ack)
		}
		p.ended()
	})
}

// TestTUNFull checks that the gateway retransmits segments that the full queue of the guest's interface dropped.
func TestTUNFull(t *testing.T) {
	p := newPuppet(t, everywhere)
	l := p.dial(listenOn(t, host4))
	if err := unix.SetsockoptInt(p.g.config.TUN, unix.SOL_SOCKET, unix.SO_SNDBUF, 100_000); err != nil {
		t.Fatal(err)
	}
	want := text(1 << 20)
	go func() {
		_, _ = l.conn.Write(want)
		l.conn.Close()
	}()
	p.until("a full interface", func() bool { return p.g.Counts()[TUNFull] > 0 })
	var got []byte
	for ended := false; !ended; {
		s, ok := p.receive()
		if !ok {
			p.wait(maxRTO)
			p.turn(1)
			continue
		}
		l.note(s)
		if s.Seq == l.ack && s.Length() > 0 {
			got = append(got, s.Payload...)
			l.ack += s.Length()
			ended = s.Flags&packet.FIN != 0
		}
		l.say(packet.ACK, nil)
		p.turn(0)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("the guest received %d of %d bytes, or wrong data", len(got), len(want))
	}
	l.say(packet.FIN|packet.ACK, nil)
	p.turn(1)
	p.ended()
}
