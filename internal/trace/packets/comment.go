// SPDX-License-Identifier: Apache-2.0

package packets

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

// Comment describes the packet in one line, such as "qdisc 12.3 us, driver to ACK 10.2 ms; retransmission 1 of seq
// 1001 after 204 ms".
func (p *Packet) Comment() string {
	if p.Sent != nil {
		return strings.Join(p.sentParts(), "; ")
	}
	if p.Received != nil {
		if p.Peer.IsValid() {
			return p.Received.datagram()
		}
		return strings.Join(p.Received.parts(), "; ")
	}
	return ""
}

func (p *Packet) sentParts() []string {
	s := p.Sent
	var times []string
	if s.Driver.IsZero() {
		times = append(times, "not passed to a driver")
	} else {
		times = append(times, "qdisc "+short(s.Qdisc))
		if !s.Acked.IsZero() {
			times = append(times, "driver to ACK "+short(s.Network))
		}
	}
	parts := []string{strings.Join(times, ", ")}
	if len(s.Hops) > 1 {
		var hops []string
		for _, h := range s.Hops {
			text := h.Interface
			if !h.Queued.IsZero() && !h.Driver.IsZero() {
				text += " " + short(h.Driver.Sub(h.Queued))
			}
			hops = append(hops, text)
		}
		parts = append(parts, "by "+strings.Join(hops, ", "))
	}
	if r := s.Retransmission; r != nil {
		text := fmt.Sprintf("retransmission %d of seq %d", r.Ordinal, p.Seq)
		if r.Of != 0 {
			text += " after " + short(r.After)
		}
		if r.Cause != "" {
			text += " (" + string(r.Cause) + ")"
		}
		parts = append(parts, text)
	}
	if s.Split != nil {
		parts = append(parts, fmt.Sprintf("%d segments of %d bytes, split by the %s", s.Split.Segments, s.Split.Size, s.Split.By))
	}
	if f := p.Fragment; f != nil {
		text := fmt.Sprintf("fragment at byte %d", f.Offset)
		if f.Offset > 0 && f.Of > 0 {
			text += " of the datagram of packet " + strconv.Itoa(f.Of)
		}
		parts = append(parts, text)
	}
	switch s.Fate {
	case Lost:
		parts = append(parts, "lost")
	case PartlyLost:
		parts = append(parts, fmt.Sprintf("%d of %d bytes lost", s.LostBytes, p.Length))
	case Dropped:
		parts = append(parts, "dropped by this host"+because(s.Reason))
	case Needless:
		parts = append(parts, "needless: already received")
	case Unacknowledged:
		text := "not acknowledged"
		if s.AckedBytes > 0 {
			text = fmt.Sprintf("%d of %d bytes acknowledged", s.AckedBytes, p.Length)
		}
		parts = append(parts, text)
	}
	if s.Again != 0 {
		parts = append(parts, "retransmitted as packet "+strconv.Itoa(s.Again))
	}
	if s.Sacked {
		parts = append(parts, "acknowledged by SACK")
	}
	if s.Twice {
		parts = append(parts, "received twice (D-SACK)")
	}
	return parts
}

// datagram describes a received datagram.
func (r *Received) datagram() string {
	switch {
	case r.Dropped:
		return "dropped by this host" + because(r.Reason)
	case r.Unseen:
		return "left the queue, the event was lost"
	case r.Read.IsZero():
		return "not read"
	}
	return "read after " + short(r.Waited)
}

func because(reason string) string {
	if reason == "" {
		return ""
	}
	return " (" + reason + ")"
}

func (r *Received) parts() []string {
	var parts []string
	if len(r.Packets) > 0 {
		var ranges []string
		for _, p := range r.Packets {
			text := strconv.Itoa(p.First)
			if p.Last != p.First {
				text += "-" + strconv.Itoa(p.Last)
			}
			ranges = append(ranges, text)
		}
		parts = append(parts, fmt.Sprintf("acknowledges packet %s, %d bytes", strings.Join(ranges, ", "), r.Acked))
	} else if r.Acked > 0 {
		parts = append(parts, fmt.Sprintf("acknowledges %d bytes", r.Acked))
	}
	if r.Duplicate {
		parts = append(parts, "duplicate ACK")
	}
	if len(r.Selective) > 0 {
		var blocks []string
		for _, b := range r.Selective {
			blocks = append(blocks, b.String())
		}
		parts = append(parts, "SACK "+strings.Join(blocks, ", "))
	}
	if r.Twice != nil {
		parts = append(parts, "D-SACK "+r.Twice.String())
	}
	return parts
}

func (b Block) String() string { return fmt.Sprintf("%d-%d", b.Start, b.End) }

// short formats a duration with three digits.
func short(d time.Duration) string {
	value, unit := float64(d), "ns"
	for _, larger := range []struct {
		factor float64
		unit   string
	}{{1e3, "µs"}, {1e3, "ms"}, {1e3, "s"}} {
		// 999.5 is rounded to four digits.
		if value < 999.5 && value > -999.5 {
			break
		}
		value, unit = value/larger.factor, larger.unit
	}
	if value >= 999.5 || value <= -999.5 {
		return fmt.Sprintf("%.0f %s", value, unit)
	}
	return fmt.Sprintf("%.3g %s", value, unit)
}
