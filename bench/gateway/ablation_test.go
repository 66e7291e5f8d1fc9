// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"encoding/json"
	"strings"
	"testing"

	"sockeye/bench/harness"
	"sockeye/room"
)

func TestFormulas(t *testing.T) {
	const mss, overhead = 1448, 832
	f := formulas(room.Kernel{Overhead: overhead})
	for _, c := range []struct {
		name string
		s    room.Snapshot
		want int
	}{
		{formulaPasst, room.Snapshot{SendBuffer: 46080, Payload: 20000, SendWindow: 1 << 20}, 26080},
		{formulaPasst, room.Snapshot{SendBuffer: 46080, Payload: 50000, SendWindow: 1 << 20}, 0},
		{formulaPasst, room.Snapshot{SendBuffer: 8 << 20, SendWindow: 16 << 20}, 6 << 20},
		{formulaPasst, room.Snapshot{SendBuffer: 8 << 20, SendWindow: 1000}, 1000},
		{formulaPatch, room.Snapshot{SendBuffer: 46080, Queued: 30000, Payload: 20000, SendWindow: 1 << 20}, 16080 * 2 / 3},
		{formulaPatch, room.Snapshot{SendBuffer: 46080, Queued: 50000, Payload: 20000, SendWindow: 1 << 20}, 0},
		{formulaPatch, room.Snapshot{SendBuffer: 46080, SendWindow: 1 << 20}, 34560},
		{formulaPatch, room.Snapshot{SendBuffer: 46080, Queued: 30000, Payload: 20000, SendWindow: 1000}, 1000},
		{formulaSegments, room.Snapshot{SendBuffer: 46080, Queued: 46080 - 2*(mss+overhead) - 1, MSS: mss, SendWindow: 1 << 20}, 2 * mss},
		{formulaSegments, room.Snapshot{SendBuffer: 46080, Queued: 50000, MSS: mss, SendWindow: 1 << 20}, 0},
	} {
		if got := f[c.name].Space(c.s); got != c.want || f[c.name].Polls || !f[c.name+polled].Polls {
			t.Errorf("%s of %+v: %d, want %d", c.name, c.s, got, c.want)
		}
	}
	if other := f[formulaRoom+unpolled]; other == nil || other.Space != nil || other.Polls {
		t.Errorf("room without polling: %+v", other)
	}
	if f[formulaRoom] != nil || f[""] != nil {
		t.Error("package room has a formula")
	}
	if got := scaledBuffer((4<<20 + 128<<10) / 2); got != (4<<20+128<<10)/16*7 {
		t.Errorf("the share of a buffer between both limits is %d", got)
	}
}

func TestAblationReport(t *testing.T) {
	r := &ablationReport{Cost: 800, Runs: []*ablationRun{{RTT: 15, Formula: formulaSegments, Mbit: 42, Seconds: []int{40, 42}, Partial: 7, CPU: 5.5}}}
	if text := harness.Text(r); !strings.Contains(text, "15 ms, segments  42      7              5.50       40 42\n") || !strings.Contains(text, " 800 ns") {
		t.Errorf("report:\n%s", text)
	}
	b, err := harness.JSON(r)
	if err != nil {
		t.Fatal(err)
	}
	var got struct {
		Ablation []ablationRun `json:"ablation"`
		Cost     float64       `json:"snapshot_ns"`
	}
	if err := json.Unmarshal(b, &got); err != nil {
		t.Fatal(err)
	}
	if len(got.Ablation) != 1 || got.Ablation[0].RTT != 15 || got.Ablation[0].Formula != formulaSegments || got.Ablation[0].Mbit != 42 || got.Cost != 800 {
		t.Errorf("JSON = %+v", got)
	}
	if ns, err := snapshotCost(); err != nil || ns < 100 {
		t.Errorf("a snapshot takes %v ns, error %v", ns, err)
	}
}
