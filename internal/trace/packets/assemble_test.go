// SPDX-License-Identifier: Apache-2.0

package packets

import (
	"encoding/binary"
	"encoding/json"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"sockeye/internal/trace/capture"
)

// script creates events like the kernel. Times are in milliseconds; sequence numbers are relative and start at 1.
type script struct {
	t       testing.TB
	a       *Assembler
	got     []*Packet
	isn     uint32 // sequence number 0
	stamps  bool   // TCP timestamps, with one tick per millisecond
	window  uint32
	summary *Summary
}

const (
	peerISN = 5000
	boot    = 1e9 // CLOCK_MONOTONIC at 0 ms
)

func newScript(t testing.TB) *script {
	s := &script{t: t, isn: 1 << 31, window: 65536}
	s.a = NewAssembler(-boot, 1024, func(p *Packet) error {
		s.got = append(s.got, p)
		return nil
	})
	return s
}

func (s *script) add(ms float64, kind uint8, set func(e *capture.Event)) {
	s.t.Helper()
	e := &capture.Event{}
	e.Time, e.Kind, e.Flags = uint64(ms*1e6)+boot, kind, capture.TCP
	set(e)
	e.Captured = uint16(len(e.Bytes))
	if err := s.a.Add(e); err != nil {
		s.t.Fatal(err)
	}
}

// header returns an IPv4 and a TCP header with options.
func header(seq, ack uint32, flags uint8, options ...byte) []byte {
	for len(options)%4 != 0 {
		options = append(options, optionNop)
	}
	b := make([]byte, 40, 40+len(options))
	b[0], b[9], b[32], b[33] = 0x45, protocolTCP, byte(20+len(options))<<2, flags
	binary.BigEndian.PutUint32(b[24:], seq)
	binary.BigEndian.PutUint32(b[28:], ack)
	return append(b, options...)
}

func stamp(value, reply float64) []byte {
	b := []byte{optionTimestamp, 10}
	b = binary.BigEndian.AppendUint32(b, uint32(value))
	return binary.BigEndian.AppendUint32(b, uint32(reply))
}

const mss = 1000

type device struct {
	name string
	id   uint32
}

var eth0, bond0 = device{"eth0", 2}, device{"bond0", 3}

func (d device) set(e *capture.Event) {
	e.Ifindex, e.Device = d.id, d.id
	for i, c := range []byte(d.name) {
		e.Name[i] = int8(c)
	}
}

// sent describes a sent packet: sequence numbers from seq to end, and the address of its sk_buff.
type sent struct {
	seq, end int64
	skb      uint64
	flags    Flags
}

func (s *script) fill(e *capture.Event, p sent) {
	length := uint32(p.end - p.seq)
	e.Skb, e.Seq, e.Ack, e.Length, e.Tcp = p.skb, s.isn+uint32(p.seq), peerISN+1, length, uint8(p.flags|FlagACK)
	e.Size, e.Window = length+40, 1000
	if length > mss {
		e.GsoSize, e.GsoSegments = mss, uint16((length+mss-1)/mss)
	}
}

func (s *script) queue(ms float64, p sent) { s.t.Helper(); s.queueAt(ms, p, eth0) }

func (s *script) queueAt(ms float64, p sent, d device) {
	s.t.Helper()
	s.add(ms, capture.Queue, func(e *capture.Event) {
		s.fill(e, p)
		d.set(e)
		var options []byte
		if s.stamps {
			options = stamp(ms, 0)
		}
		e.Bytes = header(e.Seq, e.Ack, e.Tcp, options...)
	})
}

func (s *script) drive(ms float64, p sent) { s.t.Helper(); s.driveAt(ms, p, eth0) }

func (s *script) driveAt(ms float64, p sent, d device) {
	s.t.Helper()
	s.add(ms, capture.Driver, func(e *capture.Event) {
		s.fill(e, p)
		d.set(e)
	})
}

// send is queue, followed by drive 10 µs later.
func (s *script) send(ms float64, p sent) {
	s.t.Helper()
	s.queue(ms, p)
	s.drive(ms+0.01, p)
}

func (s *script) retransmit(ms float64, p sent, congestion uint8) {
	s.t.Helper()
	s.add(ms, capture.Retransmit, func(e *capture.Event) {
		e.Seq, e.Length, e.Congestion = s.isn+uint32(p.seq), uint32(p.end-p.seq), congestion
	})
}

// ack receives an acknowledgement that echoes a timestamp, with SACK blocks.
func (s *script) ack(ms float64, ack int64, reply float64, blocks ...Block) {
	s.t.Helper()
	s.add(ms, capture.Receive, func(e *capture.Event) {
		e.Skb, e.Seq, e.Ack, e.Tcp, e.Size, e.Window = 99, peerISN+1, s.isn+uint32(ack), uint8(FlagACK), 40, s.window
		var options []byte
		if s.stamps {
			options = append(options, stamp(ms, reply)...)
		}
		if len(blocks) > 0 {
			options = append(options, optionSACK, byte(2+8*len(blocks)))
			for _, b := range blocks {
				options = binary.BigEndian.AppendUint32(options, s.isn+uint32(b.Start))
				options = binary.BigEndian.AppendUint32(options, s.isn+uint32(b.End))
			}
		}
		e.Bytes = header(e.Seq, e.Ack, e.Tcp, options...)
	})
}

func (s *script) close() {
	s.t.Helper()
	var err error
	if s.summary, err = s.a.Close(); err != nil {
		s.t.Fatal(err)
	}
	checkEmpty(s.t, s.a)
	if n := s.summary.Sent + s.summary.Received; n != len(s.got) {
		s.t.Errorf("%d packets were emitted, %d counted", len(s.got), n)
	}
}

// checkEmpty checks that an assembler keeps no packets after Close.
func checkEmpty(t testing.TB, a *Assembler) {
	t.Helper()
	if len(a.order)+len(a.flight)+len(a.resent)+len(a.byPointer) != 0 {
		t.Errorf("after Close: %d packets, %d in flight, %d retransmitted, %d pointers", len(a.order), len(a.flight), len(a.resent), len(a.byPointer))
	}
}

// comments returns the comments of the sent or received packets.
func (s *script) comments(sent bool) string {
	var all []string
	for _, p := range s.got {
		if (p.Sent != nil) == sent {
			all = append(all, p.Comment())
		}
	}
	return strings.Join(all, "\n")
}

func TestAssemble(t *testing.T) {
	p := sent{1, 1001, 1, 0}
	q := sent{1001, 2001, 2, 0}
	r := sent{2001, 3001, 3, 0}
	big := sent{1, 10001, 1, 0}
	for _, test := range []struct {
		name           string
		run            func(s *script)
		sent, received string
		fates          map[Fate]int
	}{
		{"acknowledged", func(s *script) {
			s.send(0.5, p)
			s.ack(11, 1001, 0)
		}, "qdisc 10 µs, driver to ACK 10.5 ms", "acknowledges packet 1, 1000 bytes",
			map[Fate]int{Acknowledged: 1}},
		{"ACKs of parts", func(s *script) {
			s.send(0, big)
			s.ack(10, 4001, 0)
			s.ack(12, 10001, 0)
		}, "qdisc 10 µs, driver to ACK 12 ms; 10 segments of 1000 bytes, split by the device",
			"acknowledges 4000 bytes\nacknowledges packet 1, 6000 bytes",
			map[Fate]int{Acknowledged: 1}},
		{"ACK of a part only", func(s *script) {
			s.send(0, big)
			s.ack(10, 4001, 0)
		}, "qdisc 10 µs, driver to ACK 9.99 ms; 10 segments of 1000 bytes, split by the device; 4000 of 10000 bytes acknowledged",
			"acknowledges 4000 bytes",
			map[Fate]int{Unacknowledged: 1}},
		{"split by the host, the parts out of order", func(s *script) {
			s.queue(0, big)
			for i := range int64(5) {
				s.drive(1+float64(i), sent{1 + (4-i)*2000, 2001 + (4-i)*2000 - 1000, uint64(20 + 2*i), 0})
				s.drive(1+float64(i), sent{1001 + (4-i)*2000, 2001 + (4-i)*2000, uint64(21 + 2*i), 0})
			}
			s.ack(15, 10001, 0)
		}, "qdisc 5 ms, driver to ACK 10 ms; 10 segments of 1000 bytes, split by the host",
			"acknowledges packet 1, 10000 bytes",
			map[Fate]int{Acknowledged: 1}},
		{"several packets, one ACK", func(s *script) {
			s.send(0, p)
			s.send(1, q)
			s.send(2, r)
			s.ack(11, 3001, 0)
		}, "qdisc 10 µs, driver to ACK 11 ms\nqdisc 10 µs, driver to ACK 9.99 ms\nqdisc 10 µs, driver to ACK 8.99 ms",
			"acknowledges packet 1-3, 3000 bytes",
			map[Fate]int{Acknowledged: 3}},
		{"SACK and fast retransmit", func(s *script) {
			s.send(0, p)
			s.send(0.1, q)
			s.send(0.2, r)
			s.ack(10, 1, 0, Block{1001, 2001})
			s.ack(10.1, 1, 0, Block{1001, 3001})
			again := sent{1, 1001, 4, 0}
			s.send(11, again)
			s.retransmit(11.02, again, 3)
			s.ack(21, 3001, 0)
		}, "qdisc 10 µs; lost; retransmitted as packet 6\n" +
			"qdisc 10 µs, driver to ACK 9.89 ms; acknowledged by SACK\n" +
			"qdisc 10 µs, driver to ACK 9.89 ms; acknowledged by SACK\n" +
			"qdisc 10 µs, driver to ACK 9.99 ms; retransmission 1 of seq 1 after 11 ms (fast)",
			"acknowledges packet 2, 1000 bytes; SACK 1001-2001\n" +
				"acknowledges packet 3, 1000 bytes; duplicate ACK; SACK 1001-3001\n" +
				"acknowledges packet 6, 1000 bytes",
			map[Fate]int{Lost: 1, Acknowledged: 3}},
		{"one of ten segments lost", func(s *script) {
			s.send(0, big)
			s.ack(10, 2001, 0)
			s.ack(10.1, 2001, 0, Block{3001, 10001})
			again := sent{2001, 3001, 4, 0}
			s.send(11, again)
			s.ack(21, 10001, 0)
		}, "qdisc 10 µs, driver to ACK 10.1 ms; 10 segments of 1000 bytes, split by the device; 1000 of 10000 bytes lost; retransmitted as packet 4; acknowledged by SACK\n" +
			"qdisc 10 µs, driver to ACK 9.99 ms; retransmission 1 of seq 2001 after 11 ms",
			"acknowledges 2000 bytes\nacknowledges 7000 bytes; duplicate ACK; SACK 3001-10001\nacknowledges packet 4, 1000 bytes",
			map[Fate]int{PartlyLost: 1, Acknowledged: 1}},
		{"two timeouts", func(s *script) {
			s.send(0, p)
			s.send(200, p)
			s.retransmit(200.02, p, 4)
			s.send(600, p)
			s.retransmit(600.02, p, 4)
			s.ack(610, 1001, 0)
		}, "qdisc 10 µs; lost; retransmitted as packet 2\n" +
			"qdisc 10 µs; retransmission 1 of seq 1 after 200 ms (timeout); lost; retransmitted as packet 3\n" +
			"qdisc 10 µs, driver to ACK 9.99 ms; retransmission 2 of seq 1 after 400 ms (timeout)",
			"acknowledges packet 3, 1000 bytes",
			map[Fate]int{Lost: 2, Acknowledged: 1}},
		{"needless retransmission, detected by time", func(s *script) {
			s.send(0, p)
			s.ack(40, 1001, 0)
			s.send(100, q)
			s.send(300, q)
			s.ack(305, 2001, 0) // much earlier than an answer to the retransmission
		}, "qdisc 10 µs, driver to ACK 40 ms\n" +
			"qdisc 10 µs, driver to ACK 205 ms; retransmitted as packet 4\n" +
			"qdisc 10 µs; retransmission 1 of seq 1001 after 200 ms; needless: already received",
			"acknowledges packet 1, 1000 bytes\nacknowledges packet 3, 1000 bytes",
			map[Fate]int{Acknowledged: 2, Needless: 1}},
		{"needless retransmission, detected by the timestamp", func(s *script) {
			s.stamps = true
			s.ack(0, 1, 0)
			s.send(100, p)
			s.send(300, p)
			s.ack(350, 1001, 100)
		}, "qdisc 10 µs, driver to ACK 250 ms; retransmitted as packet 3\n" +
			"qdisc 10 µs; retransmission 1 of seq 1 after 200 ms; needless: already received",
			"\nacknowledges packet 2, 1000 bytes",
			map[Fate]int{Acknowledged: 1, Needless: 1}},
		{"necessary retransmission, confirmed by the timestamp", func(s *script) {
			s.stamps = true
			s.ack(0, 1, 0)
			s.send(100, p)
			s.send(300, p)
			s.ack(350, 1001, 300)
		}, "qdisc 10 µs; lost; retransmitted as packet 3\n" +
			"qdisc 10 µs, driver to ACK 50 ms; retransmission 1 of seq 1 after 200 ms",
			"\nacknowledges packet 3, 1000 bytes",
			map[Fate]int{Acknowledged: 1, Lost: 1}},
		{"D-SACK", func(s *script) {
			s.send(0, p)
			s.send(200, p)
			s.ack(210, 1001, 0)
			s.ack(215, 1001, 0, Block{1, 1001})
		}, "qdisc 10 µs; retransmitted as packet 2; received twice (D-SACK)\n" +
			"qdisc 10 µs, driver to ACK 9.99 ms; retransmission 1 of seq 1 after 200 ms; received twice (D-SACK)",
			"acknowledges packet 2, 1000 bytes\nD-SACK 1-1001",
			map[Fate]int{Acknowledged: 2}},
		{"dropped by this host", func(s *script) {
			s.queue(0, p)
			s.send(1, q)
			s.ack(11, 1, 0, Block{1001, 2001})
			s.send(12, p)
			s.ack(22, 2001, 0)
		}, "not passed to a driver; dropped by this host; retransmitted as packet 4\n" +
			"qdisc 10 µs, driver to ACK 9.99 ms; acknowledged by SACK\n" +
			"qdisc 10 µs, driver to ACK 9.99 ms; retransmission 1 of seq 1 after 12 ms",
			"acknowledges packet 2, 1000 bytes; SACK 1001-2001\nacknowledges packet 4, 1000 bytes",
			map[Fate]int{Dropped: 1, Acknowledged: 2}},
		{"first transmission before the capture", func(s *script) {
			s.send(0, q)
			s.retransmit(0.02, q, 0)
			s.ack(10, 2001, 0)
		}, "qdisc 10 µs, driver to ACK 9.99 ms; retransmission 1 of seq 1 (probe)",
			"acknowledges packet 1, 1000 bytes",
			map[Fate]int{Acknowledged: 1}},
		{"other data between", func(s *script) {
			s.send(0, p)
			s.retransmit(150, p, 4) // no data of this range was sent
			s.ack(160, 1001, 0)
		}, "qdisc 10 µs, driver to ACK 160 ms", "acknowledges packet 1, 1000 bytes",
			map[Fate]int{Acknowledged: 1}},
		{"through two devices", func(s *script) {
			s.queueAt(0, big, bond0)
			for i := range int64(10) {
				part := sent{1 + i*1000, 1001 + i*1000, uint64(20 + i), 0}
				s.driveAt(1, part, bond0)
				s.queueAt(1.001, part, eth0)
			}
			for i := range int64(10) {
				s.driveAt(2, sent{1 + i*1000, 1001 + i*1000, uint64(20 + i), 0}, eth0)
			}
			s.ack(12, 10001, 0)
		}, "qdisc 2 ms, driver to ACK 10 ms; by bond0 1 ms, eth0 999 µs; 10 segments of 1000 bytes, split by the host",
			"acknowledges packet 1, 10000 bytes",
			map[Fate]int{Acknowledged: 1}},
		{"sk_buff address reused later on another device", func(s *script) {
			s.queueAt(0, p, bond0)
			s.driveAt(0.01, p, bond0)
			s.queueAt(300, p, eth0)
			s.driveAt(300.01, p, eth0)
			s.ack(310, 1001, 0)
		}, "qdisc 10 µs; lost; retransmitted as packet 2\n" +
			"qdisc 10 µs, driver to ACK 9.99 ms; retransmission 1 of seq 1 after 300 ms",
			"acknowledges packet 2, 1000 bytes",
			map[Fate]int{Lost: 1, Acknowledged: 1}},
		{"tunnel that hides the TCP header", func(s *script) {
			s.queueAt(0, p, bond0)
			s.driveAt(0.1, p, bond0)
			for _, kind := range []uint8{capture.Queue, capture.Driver} {
				s.add(0.2, kind, func(e *capture.Event) {
					s.fill(e, p)
					eth0.set(e)
					e.Flags, e.Seq, e.Length = 0, 0, 0
				})
			}
			s.ack(10.2, 1001, 0)
		}, "qdisc 200 µs, driver to ACK 10 ms; by bond0 100 µs, eth0 0 ns",
			"acknowledges packet 1, 1000 bytes",
			map[Fate]int{Acknowledged: 1}},
		{"pure acknowledgements", func(s *script) {
			s.send(0, sent{1, 1, 1, 0})
			s.queue(1, sent{1, 1, 2, 0})
			s.send(1500, p)
			s.ack(1510, 1001, 0)
		}, "qdisc 10 µs\nnot passed to a driver; dropped by this host\nqdisc 10 µs, driver to ACK 9.99 ms",
			"acknowledges packet 3, 1000 bytes",
			map[Fate]int{Dropped: 1, Acknowledged: 1}},
		{"FIN has a sequence number, but no payload", func(s *script) {
			s.send(0, sent{1, 1001, 1, FlagFIN})
			s.ack(10, 1001, 0)
			s.ack(11, 1002, 0)
		}, "qdisc 10 µs, driver to ACK 11 ms", "acknowledges 1000 bytes\nacknowledges packet 1, 0 bytes",
			map[Fate]int{Acknowledged: 1}},
		{"acknowledgement known from SND.UNA only", func(s *script) {
			s.send(0, p)
			s.add(10, capture.State, func(e *capture.Event) { e.Ack, e.State = s.isn+1001, 5 })
		}, "qdisc 10 µs, driver to ACK 9.99 ms", "", map[Fate]int{Acknowledged: 1}},
		{"old and duplicate acknowledgements", func(s *script) {
			s.send(0, p)
			s.send(0, q)
			s.ack(10, 1001, 0)
			s.ack(11, 1, 0)
			s.ack(12, 1001, 0)
			s.window = 1
			s.ack(13, 1001, 0) // window update
		}, "qdisc 10 µs, driver to ACK 9.99 ms\nqdisc 10 µs; not acknowledged",
			"acknowledges packet 1, 1000 bytes\n\nduplicate ACK\n",
			map[Fate]int{Acknowledged: 1, Unacknowledged: 1}},
		{"parts of a packet that was not seen", func(s *script) {
			s.drive(0, p)
			s.send(1, q)
			s.drive(1.1, sent{1, 900, 7, 0})
			s.ack(11, 2001, 0)
		}, "qdisc 10 µs, driver to ACK 9.99 ms", "acknowledges packet 1, 1000 bytes",
			map[Fate]int{Acknowledged: 1}},
		{"received on two devices", func(s *script) {
			s.send(0, p)
			for i, d := range []device{eth0, bond0} {
				s.add(10+float64(i), capture.Receive, func(e *capture.Event) {
					e.Skb, e.Seq, e.Ack, e.Tcp, e.Flags = 99, peerISN+1, s.isn+1001, uint8(FlagACK), capture.TCP|capture.Early
					d.set(e)
				})
			}
		}, "qdisc 10 µs, driver to ACK 9.99 ms", "acknowledges packet 1, 1000 bytes",
			map[Fate]int{Acknowledged: 1}},
	} {
		t.Run(test.name, func(t *testing.T) {
			// In the last script, the sequence numbers wrap in the first packet.
			for _, isn := range []uint32{0, 1 << 31, 1<<32 - 400} {
				s := newScript(t)
				s.isn = isn
				test.run(s)
				s.close()
				if got := s.comments(true); got != test.sent {
					t.Errorf("first sequence number %d: sent\n%s\nwant\n%s", isn, got, test.sent)
				}
				if got := s.comments(false); got != test.received {
					t.Errorf("first sequence number %d: received\n%s\nwant\n%s", isn, got, test.received)
				}
				if !reflect.DeepEqual(s.summary.Fates, test.fates) {
					t.Errorf("fates %v, want %v", s.summary.Fates, test.fates)
				}
			}
		})
	}
}

// TestAssembleFields checks the fields from which the comments are made.
func TestAssembleFields(t *testing.T) {
	s := newScript(t)
	s.send(100, sent{1, 10001, 1, FlagPSH})
	s.ack(110, 4001, 0)
	s.ack(112, 10001, 0)
	s.close()
	at := func(ms float64) time.Time { return time.Unix(0, int64(ms*1e6)).UTC() }
	want := &Packet{
		Number: 1, Time: at(100), Interface: "eth0", Index: 2, Seq: 1, Ack: 1, RawSeq: s.isn + 1, RawAck: peerISN + 1,
		Length: 10000, Size: 10040, Flags: FlagPSH | FlagACK, Window: 1000, Header: header(s.isn+1, peerISN+1, uint8(FlagPSH|FlagACK)),
		Sent: &Sent{
			Fate: Acknowledged, Driver: at(100.01), FirstAcked: at(110), Acked: at(112), AckedBy: 3,
			Qdisc: 10 * time.Microsecond, Network: 11990 * time.Microsecond, AckedBytes: 10000,
			Split: &Split{Segments: 10, Size: mss, By: ByDevice},
			Hops:  []Hop{{Interface: "eth0", Index: 2, Queued: at(100), Driver: at(100.01), Segments: 1}},
		},
	}
	if !reflect.DeepEqual(s.got[0], want) {
		t.Errorf("got\n%+v\n%+v\nwant\n%+v\n%+v", s.got[0], s.got[0].Sent, want, want.Sent)
	}
	wantSummary := &Summary{From: at(100), To: at(112), Sent: 1, Received: 2, SentBytes: 10000, Segments: 10, Fates: map[Fate]int{Acknowledged: 1}, Events: 4}
	if !reflect.DeepEqual(s.summary, wantSummary) {
		t.Errorf("got\n%+v\nwant\n%+v", s.summary, wantSummary)
	}
	text, err := json.Marshal(s.got)
	if err != nil {
		t.Fatal(err)
	}
	var back []*Packet
	if err := json.Unmarshal(text, &back); err != nil || !reflect.DeepEqual(back, s.got) {
		t.Errorf("by JSON: %v\n%s", err, text)
	}
}

func TestFlags(t *testing.T) {
	for f := range Flags(255) {
		var back Flags
		if err := back.UnmarshalText([]byte(f.String())); err != nil || back != f {
			t.Errorf("flags %d: text %q, parsed as %d: %v", f, f, back, err)
		}
	}
	var f Flags
	if err := f.UnmarshalText([]byte("ACK,XYZ")); err == nil || !strings.Contains(err.Error(), `"XYZ"`) {
		t.Errorf("error for an unknown flag: %v", err)
	}
}

func TestShort(t *testing.T) {
	for d, want := range map[time.Duration]string{
		0: "0 ns", 999: "999 ns", 1000: "1 µs", 12345: "12.3 µs", 999499: "999 µs", 999500: "1 ms", 204 * time.Millisecond: "204 ms",
		999600 * time.Microsecond: "1 s", 90 * time.Second: "90 s", time.Hour: "3600 s", -5 * time.Millisecond: "-5 ms",
	} {
		if got := short(d); got != want {
			t.Errorf("%d: %q, want %q", d, got, want)
		}
	}
}

// TestWrap sends more than 4 GiB.
func TestWrap(t *testing.T) {
	s := newScript(t)
	const size = 100 << 20
	var seq int64 = 1
	for i := range 60 {
		p := sent{seq, seq + size, 1, 0}
		s.send(float64(i), p)
		seq += size
		s.ack(float64(i)+0.5, seq, 0)
	}
	s.close()
	if last := s.got[len(s.got)-2]; last.Seq != 59*size+1 || last.Sent.AckedBytes != size || s.summary.Fates[Acknowledged] != 60 || s.summary.Retransmissions != 0 {
		t.Errorf("last %+v %+v, summary %+v", last, last.Sent, s.summary)
	}
}

// TestWindow sends packets that are never acknowledged: memory is bounded, and every packet is emitted.
func TestWindow(t *testing.T) {
	s := newScript(t)
	s.a.window = 64
	for i := range int64(1000) {
		s.send(float64(i), sent{1 + i*1000, 1001 + i*1000, uint64(i), 0})
		if n := len(s.a.order); n > 64 {
			t.Fatalf("%d packets in memory, limit 64", n)
		}
	}
	s.close()
	for i, p := range s.got {
		if p.Number != i+1 || p.Sent.Fate != Unacknowledged {
			t.Fatalf("packet %d: %+v %+v", i, p, p.Sent)
		}
	}
	if s.summary.Unfinished != 1000-64 || s.summary.Fates[Unacknowledged] != 1000 {
		t.Errorf("summary %+v", s.summary)
	}
}

// TestUnseen counts the bytes for which no packet was seen.
func TestUnseen(t *testing.T) {
	s := newScript(t)
	s.send(0, sent{1, 1001, 1, 0})
	s.send(1, sent{3001, 4001, 2, FlagFIN})
	s.ack(10, 4002, 0)
	s.close()
	if s.summary.Unseen != 2000 || s.summary.Retransmissions != 0 || s.summary.Fates[Acknowledged] != 2 {
		t.Errorf("%+v", s.summary)
	}
}

// TestStreaming checks that packets are emitted as soon as they are complete.
func TestStreaming(t *testing.T) {
	s := newScript(t)
	for i := range int64(10) {
		s.send(float64(20*i), sent{1 + i*1000, 1001 + i*1000, uint64(i), 0})
		s.ack(float64(20*i+10), 1001+i*1000, 0)
		if n := int(2*i + 2); len(s.got) != n {
			t.Fatalf("%d packets emitted, want %d", len(s.got), n)
		}
	}
}

// TestRandomLoss compares the assembler's conclusions with a simulated path. Each segment is delayed by 10 ms in each
// direction or lost, and the sender retransmits according to the received acknowledgements.
func TestRandomLoss(t *testing.T) {
	for seed := range uint64(50) {
		rnd := rand.New(rand.NewPCG(seed, 1))
		s := newScript(t)
		s.isn = rnd.Uint32()
		type flying struct {
			p  sent
			at float64
		}
		lost := make(map[int64]int) // number of losses by sequence number
		arrived := make(map[int64]bool)
		var path []flying
		skb, now := uint64(1), 0.0
		transmit := func(seq int64) {
			p := sent{seq, seq + 1000, skb, 0}
			skb++
			s.send(now, p)
			if rnd.Float64() < 0.2 {
				lost[seq]++
			} else {
				path = append(path, flying{p, now + 10})
			}
		}
		const n = 60
		for i := range int64(n) {
			transmit(1 + i*1000)
			now += 0.1
		}
		for len(arrived) < n {
			// One round: segments in flight arrive and are acknowledged, then missing segments are retransmitted.
			slices.SortStableFunc(path, func(a, b flying) int { return int(1000 * (a.at - b.at)) })
			for _, f := range path {
				arrived[f.p.seq] = true
				ack := int64(1)
				for arrived[ack] {
					ack += 1000
				}
				now = max(now, f.at+10)
				if f.p.seq > ack {
					s.ack(now, ack, 0, Block{f.p.seq, f.p.end})
				} else {
					s.ack(now, ack, 0)
				}
			}
			path = nil
			for i := range int64(n) {
				if seq := 1 + i*1000; !arrived[seq] {
					now += 0.1
					transmit(seq)
				}
			}
		}
		s.close()
		got := make(map[int64]int)
		for _, p := range s.got {
			if p.Sent == nil {
				continue
			}
			switch p.Sent.Fate {
			case Lost:
				got[p.Seq]++
			case Acknowledged:
				if p.Sent.Network < 19*time.Millisecond {
					t.Errorf("seed %d: packet %d took %v", seed, p.Number, p.Sent.Network)
				}
			default:
				t.Errorf("seed %d: packet %d is %s", seed, p.Number, p.Sent.Fate)
			}
		}
		if !reflect.DeepEqual(got, lost) {
			t.Fatalf("seed %d: lost %v, want %v", seed, got, lost)
		}
	}
}

// FuzzAssemble adds events in any order and with any content.
func FuzzAssemble(f *testing.F) {
	seed := make([]byte, 0, 400)
	for i := range byte(40) {
		seed = append(seed, 1+i%5, i/4, i%3, i, 1, 0x10, 0x45, 3, i/8, 9)
	}
	f.Add(seed)
	f.Add(slices.Repeat([]byte{1, 0, 0, 1, 1, 16, 1, 2, 3, 4, 4, 0, 0, 2, 1, 16, 1, 2, 3, 4}, 100))
	f.Fuzz(func(t *testing.T, data []byte) {
		const window = 32
		var got []*Packet
		a := NewAssembler(1, window, func(p *Packet) error {
			got = append(got, p)
			return nil
		})
		now := uint64(1)
		for len(data) >= 10 {
			e := &capture.Event{}
			now += uint64(data[8]) << (data[9] % 32)
			e.Time, e.Kind, e.Skb = now, data[0], uint64(data[1]%8)
			e.Seq = uint32(data[2]%16)*500 - 4000 + uint32(data[7])<<25
			e.Ack = uint32(data[3]%16)*500 - 4000
			e.Length = uint32(data[4]%8) * 500
			e.Tcp, e.Flags = data[5], data[6]|data[7]&1
			e.Ifindex, e.Device, e.GsoSize, e.GsoSegments = uint32(data[6]%3), uint32(data[6]%3), uint16(data[4]), uint16(data[4]%4)
			e.State, e.Congestion = data[3], data[4]
			data = data[10:]
			if e.Kind%8 == capture.Receive || e.Kind%8 == capture.Queue {
				n := min(len(data), int(e.Skb)*12)
				e.Bytes = append(header(e.Seq, e.Ack, e.Tcp), data[:n]...)
				e.Bytes[32] = first(data, 0x50)
			}
			e.Kind %= 8
			if err := a.Add(e); err != nil {
				t.Fatal(err)
			}
			if len(a.order) > window || len(a.flight) > window || len(a.resent) > window || len(a.byPointer) > window*maxPointers {
				t.Fatalf("%d packets in memory, %d in flight, %d retransmitted", len(a.order), len(a.flight), len(a.resent))
			}
			if !slices.IsSortedFunc(a.flight, byStart) {
				t.Fatal("the packets in flight are not in order")
			}
		}
		s, err := a.Close()
		if err != nil {
			t.Fatal(err)
		}
		checkEmpty(t, a)
		if s.Sent+s.Received != len(got) {
			t.Fatalf("%d packets emitted, %d counted", len(got), s.Sent+s.Received)
		}
		for i, p := range got {
			if p.Number != i+1 || (p.Sent == nil) == (p.Received == nil) {
				t.Fatalf("packet %d: %+v", i+1, p)
			}
			if x := p.Sent; x != nil && (x.AckedBytes < 0 || x.LostBytes < 0 || x.AckedBytes+x.LostBytes > p.Length || x.Again == p.Number) {
				t.Fatalf("packet %d: %+v of %d bytes", i+1, x, p.Length)
			}
			p.Comment()
		}
	})
}

func first(b []byte, otherwise byte) byte {
	if len(b) == 0 {
		return otherwise
	}
	return b[0]
}
