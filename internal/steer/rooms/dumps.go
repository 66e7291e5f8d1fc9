// SPDX-License-Identifier: Apache-2.0

package rooms

import (
	"time"

	"sockeye/internal/bpf"
	"sockeye/internal/config"
	"sockeye/internal/member"
	"sockeye/internal/placement"
	"sockeye/internal/steer/session"
)

// A collector has the routes of a device while the BMP session of the device is open. So a new member of a slot gets the
// connections first, and the datagrams that have waited when the member has read what the routers had sent: the records
// have routes then. With pace the gate admits the devices in turn, which takes longer than datagrams can wait: the datagrams
// come first.
//
// The connections wait for the end of the start of the member. Programs start threads and processes after they have opened their
// sockets: nfacctd forks its plugins (load_plugins of nfacctd.c, 1.7.7) while a thread already accepts BMP sessions, and a plugin
// that is forked while this thread has a lock of libc never gets the lock. A program that has started waits for its packets, so
// its first thread sleeps.

const (
	// startInterval is the time between two samples of the first thread, which must sleep in startSamples of them in a row.
	startInterval = 20 * time.Millisecond
	startSamples  = 3
	// startWork is the CPU time between two samples from which the thread counts as working.
	startWork = startInterval / 10
	// startLimit is the maximum time for which the connections wait. The first thread of some programs never sleeps.
	startLimit = 2 * time.Second

	// dumpInterval is the time between two samples of the connections.
	dumpInterval = 100 * time.Millisecond
	// dumpLimit is the maximum time for which datagrams wait for the routes. It is shorter if the wait of the policy is
	// less than twice as long, or if the waiting room is half full.
	dumpLimit = 10 * time.Second
	// takeoverDumpLimit is the same for a takeover.
	takeoverDumpLimit = 2500 * time.Millisecond
	// returnTime is the time in which devices connect again whose connections were closed. Later ones are not waited for.
	returnTime = 2 * time.Second
)

// dumps are the connections of the devices of a filling slot.
type dumps struct {
	expected map[string]bool // devices that were connected before, by session.Key
	returnBy time.Time       // end of the wait for these devices
	limit    time.Time
	over     int             // samples in which no data was unread
	sent     map[uint64]bool // connections on which the device has sent data, by their cookies
}

// hasStarted reports whether the member of a filling slot waits for its packets, or is not waited for any longer.
func (r *Rooms) hasStarted(f *fill) bool {
	asleep, ran, err := member.Sleeps(f.seat.Process.PID)
	// A thread that works may sleep for an instant, as for a lock.
	if err == nil && (!asleep || ran-f.ran > startWork) {
		f.slept = 0
	} else {
		f.slept++
	}
	f.ran = ran
	return f.slept >= startSamples || time.Since(f.began) > min(startLimit, f.dumpLimit/2)
}

// beginDumps lets the connections of the devices of a slot pass to its new member.
func (r *Rooms) beginDumps(f *fill) error {
	if list, err := r.ReadSessions(); err == nil {
		r.NoteConnected(list) // of the former member
	}
	f.connects = true
	expected := make(map[string]bool)
	misses, known := r.connected[f.seat.Slot]
	for key := range misses {
		expected[key] = true
	}
	if !known { // this agent has not seen the former member
		for address, seen := range r.Path.Devices() {
			addr := placement.Addr(address)
			if at := r.Mapping.Locate(addr); at.Slot == f.seat.Slot && seen.Connections > 0 {
				expected[session.Key(at.Device, addr)] = true
			}
		}
	}
	f.dumps = &dumps{expected: expected, sent: make(map[uint64]bool), returnBy: f.waited.Add(returnTime), limit: f.began.Add(f.dumpLimit)}
	if !r.acceptsWaiting() {
		since, seen := r.vacated[f.seat.Slot]
		if !seen && f.before.Filling != 0 {
			f.dumps.returnBy = f.dumps.limit // an earlier agent has begun to fill the slot, and waited is the begin of this fill
		} else if next := nextSYN(since, f.waited, time.Now()); next.After(f.dumps.returnBy) {
			f.dumps.returnBy = next
		}
	}
	wait, _, err := r.Path.Wait(f.seat.Slot)
	if err != nil {
		return err
	}
	wait.Filling |= bpf.Connect
	if err := r.Path.SetWait(f.seat.Slot, wait); err != nil {
		return err
	}
	return r.rotateRooms()
}

// NoteConnected records, for each ready slot, the devices that have an established connection. For a slot without a member, the devices of
// the last member stay recorded. Unfinished handshakes do not count, because forged SYNs would delay the datagrams. A device is
// forgotten after two passes without a connection, because the connections of a member that exits may close before the agent notices the exit.
func (r *Rooms) NoteConnected(list []session.Session) {
	connected := make(map[int]map[string]bool)
	for key, d := range session.ByDevice(r.Mapping, list) {
		slot := d.Location.Slot
		if connected[slot] == nil {
			connected[slot] = make(map[string]bool)
		}
		connected[slot][key] = true
	}
	for slot := range r.Config.Slots {
		if state, err := r.Path.Slot(slot); err != nil || state.Ready == 0 || !r.IsReady(slot) {
			continue
		}
		misses := r.connected[slot]
		if misses == nil {
			misses = make(map[string]int)
			r.connected[slot] = misses
		}
		for key := range misses {
			if misses[key]++; misses[key] > 1 && !connected[slot][key] {
				delete(misses, key)
			}
		}
		for key := range connected[slot] {
			misses[key] = 0
		}
	}
}

// nextSYN returns the time by which the devices of a slot have sent a SYN after now, and some time for the handshake. Retransmissions follow
// 1, 3, 7 s after the first SYN, and so on (RFC 6298); Linux sends more (net.ipv4.tcp_syn_linear_timeouts). The devices have sent the first one
// when the slot became empty (waited). If the slot was empty before, since an earlier member has not received all that waited, they
// have sent the first one at any time since then.
func nextSYN(since, waited, now time.Time) time.Time {
	const handshake = time.Second / 2
	if !since.IsZero() && since.Before(waited) {
		return now.Add(now.Sub(since) + time.Second + handshake)
	}
	next := time.Second
	for next <= now.Sub(waited) {
		next = 2*next + time.Second
	}
	return waited.Add(next + handshake)
}

// hasSessions reports whether the devices have connections whose routes the datagrams wait for.
func (r *Rooms) hasSessions() bool {
	if r.Gateable() {
		return false
	}
	for _, l := range r.Listeners {
		if l.Protocol == config.TCP {
			return true
		}
	}
	return false
}

// endDumps reports whether the member has read what the devices had sent, or the datagrams wait no longer.
func (r *Rooms) endDumps(f *fill) bool {
	d, now := f.dumps, time.Now()
	wait, room, err := r.Path.Wait(f.seat.Slot)
	bounds := r.Room()
	full := (room.Datagrams-wait.Left)*2 > uint64(bounds.Datagrams) || (room.Bytes-wait.LeftBytes)*2 > uint64(bounds.Bytes)
	if err != nil || full || now.After(d.limit) {
		return true
	}
	list, err := r.ReadSessions()
	if err != nil {
		r.Log.Warn("sessions not read", "error", err)
		return true
	}
	reads, back := true, 0 // handshakes do not count: forged SYNs would delay the datagrams
	for _, device := range session.ByDevice(r.Mapping, list) {
		if device.Location.Slot != f.seat.Slot {
			continue
		}
		connected := false
		for i := range device.Sessions {
			one := &device.Sessions[i]
			if one.Owned && one.OwnerID() != f.seat.ID() {
				continue // of the former member
			}
			connected = true
			reads = reads && one.Inode != 0 && one.Unread == 0 && (now.After(d.returnBy) || r.hasSent(d, one))
		}
		if connected && d.expected[session.Key(device.Name, device.Address)] {
			back++
		}
	}
	if !reads || back < len(d.expected) && now.Before(d.returnBy) {
		d.over = 0
		return false
	}
	d.over++
	return d.over > 1
}

// hasSent reports whether a device has sent data on a connection. A router begins to send at once. A client that does not is not waited
// for longer than for a device.
func (r *Rooms) hasSent(d *dumps, one *session.Session) bool {
	if !d.sent[one.Cookie] {
		socket, _ := r.Ask(one)
		d.sent[one.Cookie] = socket != nil && socket.Info.Bytes_received > 0
	}
	return d.sent[one.Cookie]
}
