// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"strings"
	"testing"
	"time"

	"sockeye/bench/harness"
)

func TestSeries(t *testing.T) {
	second := func(end float64, length, used time.Duration, memory float64, dropped uint64) sample {
		return sample{
			Second: end, Length: length, Dropped: dropped, Memory: map[string]float64{membersGroup: memory},
			Usage: map[string]harness.Usage{membersGroup: {User: used, System: used / 2}},
		}
	}
	r := &seriesReport{
		arms: []armTitle{{"plain", "plain"}, {"nft", "not run"}},
		series: seriesSet{{Arm: "plain", Sent: []sent{{Datagrams: 10}, {Datagrams: 20}}, Samples: []sample{
			second(1, time.Second, 200*time.Millisecond, 7, 1), second(3, 2*time.Second, 700*time.Millisecond, 5, 2),
		}}},
	}
	// The mean weighs the samples by their length: 0.9 s of 3 s.
	text := strings.Join(strings.Fields(harness.Text(r)), " ")
	if want := "plain 0.300 0.150 0.000 0.000 0.000 0.000 7.0 0.0 0.0 30 3"; !strings.Contains(text, want) || strings.Contains(text, "not run") {
		t.Errorf("no %q in %s", want, text)
	}
	members := r.series.chart(r.arms, &r.Options).Panels[0]
	if len(members.Lines) != 1 || members.Lines[0].Values[1] != 0.525 {
		t.Errorf("lines %+v, want one with 1.05 s of 2 s in its second sample", members.Lines)
	}
}
