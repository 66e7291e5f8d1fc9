// SPDX-License-Identifier: Apache-2.0

package packets

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"sockeye/internal/trace/capture"
)

// FuzzDatagrams adds events in any order, with few different packets.
func FuzzDatagrams(f *testing.F) {
	kinds := []byte{capture.Queue, capture.Driver, capture.Receive, capture.Read, capture.Drop}
	seed := make([]byte, 0, 400)
	for i := range byte(60) {
		seed = append(seed, i, i/4, i%3, i, capture.UDP|i%4<<4, 1, i/8, 9)
	}
	f.Add(seed)
	f.Fuzz(func(t *testing.T, data []byte) {
		const window = 32
		var got []*Packet
		a := NewDatagramAssembler(1, window, map[uint32]string{1: "full"}, func(p *Packet) error {
			got = append(got, p)
			return nil
		})
		now := uint64(1)
		for len(data) >= 8 {
			e := &capture.Event{}
			now += uint64(data[6]) << (data[7] % 32)
			e.Time, e.Kind, e.Skb = now, kinds[int(data[0])%len(kinds)], uint64(data[1]%8)
			e.Seq, e.Ack, e.Peer = uint32(data[2]%3)*1480, uint32(data[3]%4), uint32(data[3]%3)
			e.Length = uint32(data[3]%8) * 500
			e.Size, e.Flags = e.Length+28, data[4]
			e.Device, e.GsoSize, e.GsoSegments = uint32(data[5]%3), uint16(data[5]%2)*500, uint16(data[5]%4)
			e.Reason = uint32(data[5] % 3)
			data = data[8:]
			e.Bytes = data[:min(len(data), int(e.Skb)*12)]
			if err := a.Add(e); err != nil {
				t.Fatal(err)
			}
			if len(a.order) > window || len(a.sending) > window*maxPointers || len(a.arrived) > window || len(a.unread) > window {
				t.Fatalf("%d packets in memory, %d sent, %d received, %d not read", len(a.order), len(a.sending), len(a.arrived), len(a.unread))
			}
		}
		s, err := a.Close()
		if err != nil {
			t.Fatal(err)
		}
		if len(a.sending)+len(a.arrived)+len(a.unread)+len(a.order) > 0 {
			t.Fatalf("packets are left: %d, %d, %d, %d", len(a.sending), len(a.arrived), len(a.unread), len(a.order))
		}
		if s.Sent+s.Received != len(got) || s.Read+s.Unread+s.ReceivedDropped+s.ReceivedUnseen != s.Received {
			t.Fatalf("%d packets emitted: %+v", len(got), s)
		}
		for i, p := range got {
			if p.Number != i+1 || (p.Sent == nil) == (p.Received == nil) {
				t.Fatalf("packet %d: %+v", i+1, p)
			}
			p.Comment()
		}
	})
}

// datagramEvents adds events that are one microsecond apart, with the same reasons as the fuzz test's.
func datagramEvents(t *testing.T, events []capture.Header) ([]*Packet, *Summary) {
	t.Helper()
	var got []*Packet
	a := NewDatagramAssembler(0, 0, map[uint32]string{1: "qdisc_drop", 2: "netfilter_drop", 3: "socket_rcvbuff"}, func(p *Packet) error {
		got = append(got, p)
		return nil
	})
	for i, h := range events {
		h.Time += uint64(i+1) * uint64(time.Microsecond)
		if h.Kind != capture.Read && h.Kind != capture.Receive {
			h.Flags |= capture.UDP
		}
		if err := a.Add(&capture.Event{Header: h}); err != nil {
			t.Fatal(err)
		}
	}
	s, err := a.Close()
	if err != nil {
		t.Fatal(err)
	}
	return got, s
}

// TestReusedBuffers checks datagrams whose skb is at the address of an earlier one.
func TestReusedBuffers(t *testing.T) {
	queue := func(device, peer, n uint32) capture.Header {
		return capture.Header{Kind: capture.Queue, Skb: 1, Device: device, Peer: peer, Length: n, Size: n + 28}
	}
	of := func(kind uint8, h capture.Header) capture.Header { h.Kind = kind; return h }
	drop := func(reason uint32, h capture.Header) capture.Header {
		h.Kind, h.Reason = capture.Drop, reason
		return h
	}
	segment := func(kind uint8, skb uint64) capture.Header {
		return capture.Header{Kind: kind, Skb: skb, Device: 1, Peer: 1, Length: 500, Reason: 1}
	}
	gso := queue(1, 1, 1500)
	gso.GsoSize, gso.GsoSegments = 500, 3
	a, b := queue(1, 1, 100), queue(2, 2, 30)
	for name, test := range map[string]struct {
		events []capture.Header
		want   []string // fate, reason, hops and lost bytes
	}{
		"another interface":             {[]capture.Header{a, of(capture.Driver, a), b, of(capture.Driver, b)}, []string{" 1 0", " 1 0"}},
		"a lower interface":             {[]capture.Header{a, of(capture.Driver, a), queue(2, 1, 100), of(capture.Driver, queue(2, 1, 100))}, []string{" 2 0"}},
		"a drop of another":             {[]capture.Header{a, of(capture.Driver, a), drop(2, b)}, []string{" 1 0", "dropped netfilter_drop 0 0"}},
		"a drop before a driver":        {[]capture.Header{a, of(capture.Driver, a), drop(2, a)}, []string{" 1 0", "dropped netfilter_drop 0 0"}},
		"a drop by the driver":          {[]capture.Header{a, of(capture.Driver, a), drop(0, a)}, []string{"dropped 1 0"}},
		"a drop in another's qdisc":     {[]capture.Header{a, of(capture.Driver, a), b, drop(1, b)}, []string{" 1 0", "dropped qdisc_drop 1 0"}},
		"two drops":                     {[]capture.Header{a, drop(1, a), a, drop(1, a)}, []string{"dropped qdisc_drop 1 0", "dropped qdisc_drop 1 0"}},
		"a segment is dropped":          {[]capture.Header{gso, segment(capture.Driver, 2), segment(capture.Drop, 3), segment(capture.Driver, 4)}, []string{"partly_lost qdisc_drop 1 500"}},
		"all segments are dropped":      {[]capture.Header{gso, segment(capture.Drop, 2), segment(capture.Drop, 3), segment(capture.Drop, 4)}, []string{"dropped qdisc_drop 1 1500"}},
		"a segment of the next is lost": {[]capture.Header{gso, segment(capture.Driver, 2), segment(capture.Driver, 3), segment(capture.Driver, 4), gso, segment(capture.Drop, 2)}, []string{" 1 0", "partly_lost qdisc_drop 1 500"}},
	} {
		t.Run(name, func(t *testing.T) {
			got, s := datagramEvents(t, test.events)
			var texts []string
			for _, p := range got {
				text := string(p.Sent.Fate) + " "
				if p.Sent.Reason != "" {
					text += p.Sent.Reason + " "
				}
				texts = append(texts, text+fmt.Sprint(len(p.Sent.Hops), p.Sent.LostBytes))
			}
			if !slices.Equal(texts, test.want) || s.Strays > 0 {
				t.Errorf("%q, want %q; %+v", texts, test.want, s)
			}
		})
	}
}

// TestArrivalsOfTwoCPUs checks datagrams that are queued in another order than that of their events.
func TestArrivalsOfTwoCPUs(t *testing.T) {
	receive := func(skb uint64) capture.Header { return capture.Header{Kind: capture.Receive, Skb: skb} }
	read := func(left uint64) capture.Header {
		return capture.Header{Kind: capture.Read, Skb: left, Flags: capture.Left}
	}
	got, s := datagramEvents(t, []capture.Header{receive(1), read(0), receive(2), receive(3), read(2), read(0)})
	if s.Read != 3 || s.EarlierReads != 0 || s.Unread != 0 || s.ReceivedUnseen != 0 {
		t.Errorf("%+v", s)
	}
	for i, want := range []time.Duration{1, 3, 1} { // the third is read before the second
		if p := got[i]; p.Received.Waited != want*time.Microsecond {
			t.Errorf("packet %d: %+v", p.Number, p.Received)
		}
	}
	// At the start, a datagram may have been read that arrived before.
	if _, s := datagramEvents(t, []capture.Header{receive(2), receive(3), read(2), read(3), read(0)}); s.Read != 2 || s.EarlierReads != 1 {
		t.Errorf("%+v", s)
	}
}

// TestLostReads checks that datagrams whose reads were lost do not shift the reads of later ones.
func TestLostReads(t *testing.T) {
	var events []capture.Header
	at := time.Duration(0)
	add := func(kind uint8, skb uint64, flags uint8) {
		events = append(events, capture.Header{Kind: kind, Skb: skb, Flags: flags, Length: 0, Time: uint64(at)})
	}
	const lost, read = 50, 20
	for i := range lost {
		add(capture.Receive, uint64(i+1), 0)
	}
	for i := range read {
		at += 20 * time.Millisecond
		add(capture.Receive, uint64(i+100), 0)
		add(capture.Read, 0, capture.Left)
	}
	got, s := datagramEvents(t, events)
	// The first read may be that of any.
	if s.Read != read || s.ReceivedUnseen+s.Unread != lost || s.Unread > 1 || s.EarlierReads != 0 {
		t.Errorf("%+v", s)
	}
	for _, p := range got[lost+1:] {
		if p.Received.Waited != time.Microsecond {
			t.Errorf("packet %d: %+v", p.Number, p.Received)
		}
	}
}
