// SPDX-License-Identifier: Apache-2.0

package traffic

import (
	"cmp"
	"context"
	"log/slog"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/clock"
	"sockeye/internal/events"
	"sockeye/internal/placement"
)

const (
	// refusalsInterval is the time between two reads of the ring of refusals.
	refusalsInterval = time.Second
	// summaryInterval is the time between two summaries of refusals.
	summaryInterval = 10 * time.Second
)

// refusalCounts are refused packets, SYNs and datagrams, by reason.
type refusalCounts [len(bpf.Reasons)]uint64

// refusalWatch records the refusals of one data path until end is closed.
type refusalWatch struct {
	reader *bpf.RefusalReader
	end    chan struct{}
	// before are the counts at the time of the last summary. The lock of the service guards them.
	before refusalCounts
	summed time.Time
}

// watchRefusals records the refusals of devices, and a summary of all refusals. The caller holds the lock.
func (t *Traffic) watchRefusals() error {
	before, err := t.countRefusals()
	if err != nil {
		return err
	}
	reader, err := t.Path.Refusals()
	if err != nil {
		return err
	}
	t.refusals = &refusalWatch{reader: reader, end: make(chan struct{}), before: before, summed: time.Now()}
	go t.recordRefusals(t.refusals)
	return nil
}

// endRefusals ends the goroutine of watchRefusals, after a last summary. The caller holds the lock.
func (t *Traffic) endRefusals() {
	if t.refusals == nil {
		return
	}
	if t.Path != nil {
		t.summarizeRefusals(t.refusals)
	}
	close(t.refusals.end)
	t.refusals = nil
}

func (t *Traffic) recordRefusals(w *refusalWatch) {
	defer w.reader.Close()
	tick := time.NewTicker(refusalsInterval)
	defer tick.Stop()
	for {
		select {
		case <-w.end:
			return
		case <-tick.C:
		}
		list, err := w.reader.Read()
		if err != nil {
			t.Log.Warn("refusals not recorded", "error", err)
			return
		}
		t.Mu.Lock()
		if t.refusals == w {
			t.logRefusals(list)
			if time.Since(w.summed) >= summaryInterval {
				t.summarizeRefusals(w)
			}
		}
		t.Mu.Unlock()
	}
}

func (t *Traffic) logRefusals(list []bpf.Refusal) {
	zero := clock.MonotonicZero()
	for i := range list {
		r := &list[i]
		address := placement.Addr(r.Address)
		at := t.Mapping.Locate(address)
		record := slog.NewRecord(zero.Add(time.Duration(r.Time)), slog.LevelInfo, "packets of the device are refused", 0)
		record.Add(events.DeviceRefused, "device", cmp.Or(at.Device, address.String()), "address", address.String(),
			"protocol", map[uint8]string{unix.IPPROTO_TCP: "tcp", unix.IPPROTO_UDP: "udp"}[r.Protocol])
		if int(r.Slot) < bpf.MaxSlots {
			record.Add("slot", r.Slot)
		}
		if int(r.Reason) < len(bpf.Reasons) {
			record.Add("reason", bpf.Reasons[r.Reason])
		}
		_ = t.Log.Handler().Handle(context.Background(), record) // logging has no place for errors
	}
}

// summarizeRefusals records the number of refusals since the last summary. The caller holds the lock.
func (t *Traffic) summarizeRefusals(w *refusalWatch) {
	now, err := t.countRefusals()
	if err != nil {
		return // the next summary has them
	}
	total := uint64(0)
	attrs := []any{events.Refusals}
	for reason, name := range bpf.Reasons {
		if now[reason] > w.before[reason] {
			n := now[reason] - w.before[reason]
			total += n
			attrs = append(attrs, slog.String(name, strconv.FormatUint(n, 10)))
		}
	}
	if total > 0 {
		t.Log.Info("packets refused", append(attrs, "packets", total, "in", time.Since(w.summed).Round(time.Second).String())...)
	}
	w.before, w.summed = now, time.Now()
}

// countRefusals returns the refused packets of all slots.
func (t *Traffic) countRefusals() (sum refusalCounts, err error) {
	counters, err := t.Path.Counters(bpf.MaxSlots)
	for _, c := range counters {
		for reason := range sum {
			sum[reason] += c.RefusedConnections[reason] + c.RefusedDatagrams[reason]
		}
	}
	return sum, err
}
