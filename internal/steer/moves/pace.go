// SPDX-License-Identifier: Apache-2.0

package moves

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"sockeye/internal/config"
	"sockeye/internal/format"
	"sockeye/internal/steer/session"
)

// With pace, a device with open sessions moves when there is room for its initial dump at the target member, and makes room for the next
// device when the dump is over.

// move is a device that has moved, until its initial dump is over.
type move struct {
	device   string
	slot     int
	gated    bool // the device was admitted at the gate of the slot
	since    time.Time
	sent     time.Time // of the first sample with data; zero: the device has not connected yet
	sampled  time.Time
	received uint64  // bytes at the last sample
	rate     float64 // bytes per second of the last sample
	peak     float64
	quiet    time.Time // time since when the rate is low; zero: the rate is not low
}

const (
	// moveInterval is the time between two samples of the sessions of moving devices.
	moveInterval = 500 * time.Millisecond
	// quietTime is the time for which the receive rate must be low at the end of an initial dump.
	quietTime = 2 * time.Second
	// silentTime is the time for which a connected device may send nothing before the next device moves.
	silentTime = 10 * time.Second
	// A rate is low if it is less than peak/quietShare or than quietRate bytes per second.
	quietShare = 16
	quietRate  = 2048
)

// maxFlip is the number of devices with sessions that move by one write of the table. To close the connections of more
// devices takes so long that the last of them would be split for more than 100 ms.
const maxFlip = 256

// limitFlip returns the buckets that move by the next write of the table: all, or those without sessions and those of
// maxFlip devices. In the second case, m.more is set.
func (m *Moves) limitFlip(buckets []int) []int {
	if len(buckets) <= maxFlip || m.Events == nil || m.Config.OnMove != config.CloseMoved {
		return buckets
	}
	list, err := m.ReadSessions()
	if err != nil {
		return buckets
	}
	inBucket := make(map[int]int)
	for _, d := range session.ByDevice(m.Mapping, list) {
		if !d.Location.Pinned {
			inBucket[d.Location.Bucket]++
		}
	}
	var now []int
	devices := 0
	for _, bucket := range buckets {
		if n := inBucket[bucket]; n > 0 {
			if devices >= maxFlip {
				m.more = true
				continue
			}
			devices += n
		}
		now = append(now, bucket)
	}
	return now
}

// admit chooses the buckets and pins that move now: those without sessions, and for each target slot as many devices as
// pace permits.
func (m *Moves) admit(buckets, pins []int) (chosenBuckets, chosenPins []int) {
	list, err := m.ReadSessions()
	if err != nil {
		m.Log.Warn("sessions not read, moving without pace", "error", err)
		return buckets, pins
	}
	inBucket, devices := make(map[int][]string), session.ByDevice(m.Mapping, list)
	for _, key := range slices.Sorted(maps.Keys(devices)) {
		if at := devices[key].Location; !at.Pinned {
			inBucket[at.Bucket] = append(inBucket[at.Bucket], key)
		}
	}
	free := m.freeMoves()
	take := func(slot int, keys []string) bool {
		if len(keys) > 0 && free[slot] <= 0 {
			m.waiting += len(keys)
			return false
		}
		free[slot] -= len(keys)
		for _, key := range keys {
			m.running[key] = &move{device: devices[key].String(), slot: slot, since: time.Now()}
		}
		return true
	}
	for _, bucket := range buckets {
		if take(int(m.Target.Table.Bucket[bucket]), inBucket[bucket]) {
			if len(inBucket[bucket]) > 0 {
				m.gate.admitted[uint16(bucket)] = true
			}
			chosenBuckets = append(chosenBuckets, bucket)
		}
	}
	for _, i := range pins {
		one := &m.State.Pins[i]
		var keys []string
		for _, key := range slices.Sorted(maps.Keys(devices)) {
			d := devices[key]
			if d.Location.Slot != one.Slot && (one.Device != "" && d.Name == one.Device || one.Device == "" && d.Name == "" && one.Prefix.Contains(d.Address)) {
				keys = append(keys, key)
			}
		}
		if take(one.Slot, keys) {
			chosenPins = append(chosenPins, i)
		}
	}
	return chosenBuckets, chosenPins
}

// freeMoves returns the number of devices that may begin to move to each slot.
func (m *Moves) freeMoves() map[int]int {
	free := make(map[int]int)
	for slot := range m.Config.Slots {
		free[slot] = m.Config.Pace.Devices
	}
	for _, one := range m.running {
		free[one.slot]--
	}
	return free
}

// sampleMoves measures the receive rates of the moving devices, and deletes those whose initial dump is over.
func (m *Moves) sampleMoves() {
	list, err := m.ReadSessions()
	if err != nil {
		m.Log.Warn("sessions not read", "error", err)
	}
	received, now := make(map[string]uint64), time.Now()
	connected := session.ByDevice(m.Mapping, list)
	ended := make(map[string]bool) // devices one of whose connections has ended meanwhile
	for key := range m.running {
		if d := connected[key]; d != nil {
			for i := range d.Sessions {
				socket, gone := m.Ask(&d.Sessions[i])
				ended[key] = ended[key] || gone
				if socket != nil {
					received[key] += socket.Info.Bytes_received
				}
			}
		}
	}
	timeout := time.Duration(m.timeoutOfMoves()) * time.Microsecond
	for key, one := range m.running {
		if !ended[key] && one.sample(connected[key] != nil, received[key], now) || one.late(now, timeout) || one.gated && connected[key] == nil {
			delete(m.running, key)
			m.done++
		}
	}
}

// timeoutOfMoves returns pace.timeout; 0 if the policy has no pace any more.
func (m *Moves) timeoutOfMoves() int64 {
	if m.Config.Pace == nil {
		return 0
	}
	return m.Config.Pace.Timeout
}

// sample updates the rate of a device, and reports whether its initial dump is over.
func (m *move) sample(connected bool, received uint64, now time.Time) bool {
	if received < m.received {
		m.quiet, m.received = time.Time{}, 0 // another connection
	}
	if !m.sampled.IsZero() {
		m.rate = float64(received-m.received) / now.Sub(m.sampled).Seconds()
		m.peak = max(m.peak, m.rate)
	}
	m.received, m.sampled = received, now
	if received > 0 && m.sent.IsZero() {
		m.sent = now
	}
	switch {
	case !connected || m.rate >= quietRate && m.rate >= m.peak/quietShare:
		m.quiet = time.Time{}
	case m.quiet.IsZero():
		m.quiet = now
	}
	quiet := quietTime
	if received == 0 {
		quiet = silentTime // the dump may not have begun
	}
	return !m.quiet.IsZero() && now.Sub(m.quiet) >= quiet
}

// late reports whether a device has used its time. It has the timeout for its dump, and before that the same time for its
// connection, because many routers wait 30 to 120 s before they connect again.
func (m *move) late(now time.Time, timeout time.Duration) bool {
	begin := m.sent
	if begin.IsZero() {
		begin = m.since
	}
	return now.Sub(begin) >= timeout
}

// PaceText returns the pace of a policy as text.
func PaceText(p *config.Pace) string {
	if p == nil {
		return "unset"
	}
	return fmt.Sprintf("%s per member, timeout %s", format.Count(p.Devices, "device", "devices"), time.Duration(p.Timeout)*time.Microsecond)
}
