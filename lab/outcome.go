// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"
)

// RouterOutcome has the collectors of a router's two streams.
type RouterOutcome struct {
	Address    netip.Addr `json:"address"`    // of its BMP session
	TCPSlot    int        `json:"tcp_slot"`   // the collector with its BMP session; -1: none
	UDPSlot    int        `json:"udp_slot"`   // the collector with most of its flow records; -1: none
	UDPSlots   []int      `json:"udp_slots"`  // all collectors with any of its flow records
	Records    int        `json:"records"`    // its flow records, of all its exporters
	WithBMP    int        `json:"with_bmp"`   // of these, records that the collector in TCPSlot wrote
	Correlated int        `json:"correlated"` // of these, records with communities or an AS path from BMP
}

// Together reports whether both streams reached the same collector completely.
func (r RouterOutcome) Together() bool {
	return r.TCPSlot >= 0 && r.TCPSlot == r.UDPSlot && len(r.UDPSlots) == 1
}

// Outcome is the result of Measure.
type Outcome struct {
	Routers         []RouterOutcome `json:"routers"`          // routers with bgpd, in order
	CorrelatedShare float64         `json:"correlated_share"` // of all their flow records, 0 to 1; 0 without records
}

// Measure counts the flow records that the collectors write during a duration (at least 1 s), and finds the BMP
// sessions at its end. Call WaitBGP and WaitSessions before. The first records may lack the fields of BMP; WaitRecords
// skips them.
func (l *Lab) Measure(ctx context.Context, during time.Duration) (Outcome, error) {
	m, err := l.NewMeter()
	if err != nil {
		return Outcome{}, err
	}
	select {
	case <-time.After(during):
	case <-ctx.Done():
		return Outcome{}, fmt.Errorf("measure: %w", context.Cause(ctx))
	}
	return m.Read()
}

// Meter counts flow records since its creation. It is not safe for concurrent use.
type Meter struct {
	lab     *Lab
	offsets map[int]int64
	count   map[netip.Addr]map[int][2]int // by router and slot: all records, correlated records
}

// Read returns the outcome since NewMeter, with the current sessions.
func (m *Meter) Read() (Outcome, error) {
	for _, c := range m.lab.Collectors() {
		records, next, err := c.Records(m.offsets[c.Slot])
		if err != nil {
			return Outcome{}, err
		}
		m.offsets[c.Slot] = next
		for _, r := range records {
			if m.count[r.Peer] == nil {
				m.count[r.Peer] = map[int][2]int{}
			}
			n := m.count[r.Peer][c.Slot]
			n[0]++
			if r.Correlated() {
				n[1]++
			}
			m.count[r.Peer][c.Slot] = n
		}
	}
	sessions, err := m.lab.Sessions()
	if err != nil {
		return Outcome{}, err
	}
	var o Outcome
	all, correlated := 0, 0
	for _, r := range m.lab.routers {
		if r.BGP == nil {
			continue
		}
		out := RouterOutcome{Address: r.BMP, TCPSlot: -1, UDPSlot: -1, UDPSlots: []int{}}
		if slot, ok := sessions[r.BMP]; ok {
			out.TCPSlot = slot
		}
		slots := map[int]int{}
		for _, export := range r.Exports {
			for slot, n := range m.count[export] {
				slots[slot] += n[0]
				out.Correlated += n[1]
			}
		}
		out.UDPSlots = slices.AppendSeq(out.UDPSlots, maps.Keys(slots))
		slices.Sort(out.UDPSlots)
		for _, slot := range out.UDPSlots {
			out.Records += slots[slot]
			if out.UDPSlot < 0 || slots[slot] > slots[out.UDPSlot] {
				out.UDPSlot = slot
			}
		}
		out.WithBMP = slots[out.TCPSlot]
		all, correlated = all+out.Records, correlated+out.Correlated
		o.Routers = append(o.Routers, out)
	}
	if all > 0 {
		o.CorrelatedShare = float64(correlated) / float64(all)
	}
	return o, nil
}

// WaitRecords waits until the collectors have written new flow records of each router with bgpd and an exporter.
func (l *Lab) WaitRecords(ctx context.Context) error {
	m, err := l.NewMeter()
	if err != nil {
		return fmt.Errorf("wait for flow records: %w", err)
	}
	return l.WaitFor(ctx, "flow records", func() (bool, error) {
		o, err := m.Read()
		if err != nil {
			return false, err
		}
		for _, r := range l.routers {
			for _, e := range r.Exporters {
				if err := e.Err(); err != nil {
					return false, err
				}
			}
			if len(r.Exporters) > 0 && slices.ContainsFunc(o.Routers, func(x RouterOutcome) bool { return x.Address == r.BMP && x.Records == 0 }) {
				return false, nil
			}
		}
		return true, nil
	})
}

// NewMeter starts counting.
func (l *Lab) NewMeter() (*Meter, error) {
	m := &Meter{lab: l, offsets: map[int]int64{}, count: map[netip.Addr]map[int][2]int{}}
	for _, c := range l.Collectors() {
		end, err := c.output.End(c.records)
		if err != nil {
			return nil, fmt.Errorf("start to count records of %s: %w", c.Name, err)
		}
		m.offsets[c.Slot] = end
	}
	return m, nil
}
