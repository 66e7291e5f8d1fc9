// SPDX-License-Identifier: Apache-2.0

package packets

import (
	"slices"
	"strconv"
	"time"

	"sockeye/internal/trace/capture"
)

// Clock is CLOCK_REALTIME minus CLOCK_MONOTONIC.
type Clock time.Duration

// Limits of the assemblers.
const (
	// DefaultWindow is the default maximum number of remembered packets.
	DefaultWindow = 16384
	// maxPointers is the maximum number of segment positions per packet.
	maxPointers = 1024
	// maxCluster is the maximum number of overlapping packets that are distinguished. TCP rarely creates more.
	maxCluster = 256
)

// recorder is the common part of the assemblers.
type recorder struct {
	clock  Clock
	window int
	emit   func(*Packet) error

	order   []*packet // packets not yet emitted, from Number emitted+1
	emitted int
	now     int64 // time of the last event
	names   map[uint32]string
	summary Summary
}

// Summary counts the events and packets of a capture.
type Summary struct {
	From            time.Time    `json:"from,omitzero"` // time of the first event
	To              time.Time    `json:"to,omitzero"`   // time of the last event
	Sent            int          `json:"sent"`          // packets
	Received        int          `json:"received"`
	SentBytes       int64        `json:"sent_bytes"` // payload, with retransmissions
	ReceivedBytes   int64        `json:"received_bytes"`
	Segments        int          `json:"segments"` // segments of sent packets that reached drivers
	Retransmissions int          `json:"retransmissions"`
	Fates           map[Fate]int `json:"fates"` // sent packets by fate, except those without one
	// Unseen counts sequence numbers between those of sent packets for which no packet was seen: events were lost
	// or missing.
	Unseen int64 `json:"unseen,omitempty"`
	// Strays counts parts of packets whose start was not seen. Unreadable counts packets without a readable TCP header,
	// such as encrypted packets.
	Strays     int `json:"strays,omitempty"`
	Unreadable int `json:"unreadable,omitempty"`
	// Unfinished counts packets that were evicted from memory before they were complete; their fate is incomplete.
	Unfinished int `json:"unfinished,omitempty"`
	// Read counts the datagrams that the application received, Unread those that waited at the end, ReceivedDropped those
	// that the host dropped after they had reached the socket, and ReceivedUnseen those with Received.Unseen. EarlierReads
	// counts receive operations of datagrams whose arrival was not seen, as before the capture.
	Read            int    `json:"read,omitempty"`
	Unread          int    `json:"unread,omitempty"`
	ReceivedDropped int    `json:"received_dropped,omitempty"`
	ReceivedUnseen  int    `json:"received_unseen,omitempty"`
	EarlierReads    int    `json:"earlier_reads,omitempty"`
	Events          uint64 `json:"events"`
	State           string `json:"state,omitempty"` // last seen state of the connection

	// The caller sets the following fields.
	LostEvents uint64   `json:"lost_events"`       // events lost because the buffer was full
	Missing    []string `json:"missing,omitempty"` // tracepoints that the kernel does not have
	Stopped    Reason   `json:"stopped,omitempty"`
}

func newRecorder(clock Clock, window int, emit func(*Packet) error) recorder {
	if window <= 0 {
		window = DefaultWindow
	}
	return recorder{clock: clock, window: window, emit: emit, names: make(map[uint32]string), summary: Summary{Fates: make(map[Fate]int)}}
}

// observe counts an event.
func (a *recorder) observe(h *capture.Header) {
	a.summary.Events++
	at := int64(h.Time)
	if a.summary.From.IsZero() {
		a.summary.From = a.clock.Time(at)
	}
	a.now = max(a.now, at)
	a.summary.To = a.clock.Time(a.now)
}

// add creates a packet for an event with sequence numbers.
func (a *recorder) add(e *capture.Event) *packet {
	// Read the name now: later hops may be in another network namespace.
	if e.Ifindex != 0 && e.Name[0] != 0 {
		a.names[e.Ifindex] = name(&e.Header)
	}
	p := &packet{Packet: Packet{
		Number:    a.emitted + len(a.order) + 1,
		Time:      a.clock.Time(int64(e.Time)),
		Interface: a.interfaceName(e.Ifindex),
		Index:     int(e.Ifindex),
		RawSeq:    e.Seq,
		RawAck:    e.Ack,
		Length:    int(e.Length),
		Size:      int(e.Size),
		Flags:     Flags(e.Tcp),
		Window:    int(e.Window),
		Header:    slices.Clone(e.Bytes),
	}, at: int64(e.Time), options: parseOptions(e.Bytes)}
	a.order = append(a.order, p)
	return p
}

func name(h *capture.Header) string {
	b := make([]byte, 0, len(h.Name))
	for _, c := range h.Name {
		if c == 0 {
			break
		}
		b = append(b, byte(c))
	}
	return string(b)
}

func (a *recorder) interfaceName(index uint32) string {
	if name := a.names[index]; name != "" || index == 0 {
		return name
	}
	return "if" + strconv.Itoa(int(index))
}

// describeSent sets the times, the hops and the segments of a sent packet.
func (a *recorder) describeSent(p *packet) {
	s := p.Sent
	s.Driver = a.clock.Time(p.driver)
	if p.driver != 0 {
		s.Qdisc = time.Duration(p.driver - p.at)
	}
	wire := 0
	for _, h := range p.hops {
		h.Queued, h.Driver = a.clock.Time(h.queued), a.clock.Time(h.driver)
		s.Hops = append(s.Hops, h.Hop)
		if h.wire > 0 {
			wire = h.wire
		}
	}
	a.summary.Segments += wire
	if p.split {
		s.Split = &Split{Segments: wire, Size: int(p.gso), By: ByHost}
		if p.device {
			s.Split.By = ByDevice
		}
	}
}

// Time converts nanoseconds of CLOCK_MONOTONIC to the real time; 0 is the zero time.
func (c Clock) Time(monotonic int64) time.Time {
	if monotonic == 0 {
		return time.Time{}
	}
	return time.Unix(0, monotonic+int64(c)).UTC()
}

// flush emits packets up to the first one that is not complete.
func (a *recorder) flush(finished func(*packet) bool, conclude func(*packet), all bool) error {
	for len(a.order) > 0 {
		p := a.order[0]
		done := finished(p)
		if !done && !all && len(a.order) <= a.window {
			return nil
		}
		if !done && !all {
			a.summary.Unfinished++
		}
		a.order[0] = nil
		a.order = a.order[1:]
		a.emitted++
		p.emitted = true
		conclude(p)
		if err := a.emit(&p.Packet); err != nil {
			return err
		}
	}
	return nil
}
