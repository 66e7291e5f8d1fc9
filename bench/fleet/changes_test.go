// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"math"
	"testing"
	"time"

	"sockeye/lab/swarm"
)

// TestJudge judges records made by hand: a device that moves from member 1 to member 2 with one misdirected datagram, one that loses
// a datagram in between, and one whose member 1 dies.
func TestJudge(t *testing.T) {
	const period = 40 * time.Millisecond
	at := func(n int) time.Duration { return time.Second + time.Duration(n)*period }
	a := &swarm.Analysis{Begin: time.Second, Silence: silence, Period: period}
	var records [3][]swarm.Record // of the devices, and of members 1 and 2
	note := func(from int, kind swarm.Kind, when time.Duration, device, port, value int) {
		records[max(from, 0)] = append(records[max(from, 0)], swarm.Record{Kind: kind, At: when, Device: uint32(device), Port: uint16(port), Value: uint32(value)})
	}
	const devices, udp, first, second = 0, 9, 100, 101
	// Device 4 moves between datagrams 10 and 11; its connection is closed half a period after the first datagram at member 2, and the device
	// notices it half a period after the second one.
	// Device 6 stays, and loses datagram 12. Device 8 loses its member at 40 and has another one 3 s later.
	for _, d := range []int{4, 6, 8} {
		note(1, swarm.Accepted, at(0), d, first, 0)
		note(1, swarm.Dumped, at(0), d, first, 0)
	}
	dead, back := at(40), at(40)+3*time.Second
	for n := range 200 {
		for _, d := range []int{4, 6, 8} {
			note(devices, swarm.Sent, at(n), d, udp, n)
			member := 1
			switch {
			case d == 6 && n == 12, d == 8 && at(n) >= dead && at(n) < back:
				continue
			case d == 4 && n > 10, d == 8 && at(n) >= back:
				member = 2
			}
			note(member, swarm.Datagram, at(n)+time.Millisecond, d, udp, n)
		}
	}
	closed, noticed := at(11)+period/2, at(12)+period/2
	note(1, swarm.Closed, closed, 4, first, 0)
	note(devices, swarm.Closed, noticed, 4, first, 0)
	note(2, swarm.Accepted, noticed+time.Millisecond, 4, second, 0)
	note(2, swarm.Accepted, back-period/2, 8, second, 0)
	note(devices, swarm.Closed, back-period, 8, first, 0)
	for from, list := range records {
		if from == devices {
			from = swarm.FromDevices
		}
		a.Add(from, list)
	}
	a.End = at(200)
	p := &changesPart{changes: []change{
		{Name: "join", Interval: swarm.Interval{From: at(5), To: at(20)}},
		{Name: "kill", Interval: swarm.Interval{From: dead, To: at(150)}, dead: []int{1}},
	}}
	p.judge(a)
	join, kill := p.changes[0], p.changes[1]
	if join.Sent != 45 || join.Lost != 1 || join.Misdirected != 1 || join.Overtook != 1 || math.Abs(join.Early-19) > 0.001 || join.Reconnected != 1 || math.Abs(join.Gap-0.08) > 0.001 {
		t.Errorf("join: %+v", join)
	}
	if kill.Lost != 75 || kill.Misdirected != 0 || math.Abs(kill.Gap-3.04) > 0.05 {
		t.Errorf("kill: %+v", kill)
	}
}

// TestForwardedShare counts the packets of the interval, and those of a host that has started in it.
func TestForwardedShare(t *testing.T) {
	before := map[string]map[string]uint64{"a": {"local": 100, "forwarded": 50}}
	now := map[string]map[string]uint64{"a": {"local": 130, "forwarded": 60, "ttl": 1}, "b": {"local": 9, "disagreed": 1, "second_chance": 10}}
	if share := forwardedShare(before, now); share != 0.5 {
		t.Errorf("share %v, want 0.5", share)
	}
	if share := forwardedShare(nil, nil); share != 0 {
		t.Errorf("without packets: %v", share)
	}
}
