// SPDX-License-Identifier: Apache-2.0

package rooms

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	"sockeye/internal/config"
	"sockeye/internal/domain"
	"sockeye/internal/member"
	"sockeye/internal/steer/core"
	"sockeye/internal/steer/spoof"
	"sockeye/internal/steer/templates"
)

// TestQueueBounds checks that the datagrams in memory do not exceed the size of a waiting room: with sk_lookup, the data path
// limits only the number of datagrams.
func TestQueueBounds(t *testing.T) {
	const size = 10 * (1000 + overhead/2)
	r := New(&core.Service{Config: config.Service{Steering: config.Lookup, Slots: 2, WhenEmpty: config.WhenEmpty{Room: &config.Room{Bytes: size / 2}}}})
	r.filling[1], r.filling[2] = &fill{}, &fill{}
	of := func(port uint16) waitingDatagram {
		from := netip.AddrPortFrom(netip.MustParseAddr("192.0.2.1"), port)
		return waitingDatagram{Datagram: spoof.Datagram{From: from, Payload: make([]byte, 1000)}, stored: 1}
	}
	for i := range 12 {
		r.deliver(1+i%2, of(uint16(i)))
	}
	if r.memory[0] != size || r.lost[1] != 1 || r.lost[2] != 1 || r.left[1].Datagrams != 2 {
		t.Errorf("%d bytes of %d, lost %v, left %v", r.memory[0], size, r.lost, r.left)
	}
	// What is put back is never lost, and comes first again.
	first, _ := r.dequeue(1)
	r.deliver(1, of(12))
	r.requeue(1, first)
	for _, want := range []uint16{0, 2, 4, 6, 8, 12} {
		if d, ok := r.dequeue(1); !ok || d.From.Port() != want {
			t.Errorf("datagram %d, %v, want %d", d.From.Port(), ok, want)
		}
	}
	if _, ok := r.dequeue(1); ok || r.queued[1].len() != 0 || r.memory[0] != size/2 {
		t.Errorf("an empty queue: %v, %d bytes", ok, r.memory[0])
	}
	// In front of a queue from which nothing was removed.
	r.requeue(2, of(13))
	if all := r.takeQueue(2); len(all) != 6 || all[0].From.Port() != 13 || all[1].From.Port() != 1 || r.memory[0] != 0 {
		t.Errorf("%d datagrams, %d bytes", len(all), r.memory[0])
	}
	for i := range 3 * fillBatch {
		r.enqueue(1, of(uint16(i)))
	}
	for i := range 3 * fillBatch {
		if d, ok := r.dequeue(1); !ok || d.From.Port() != uint16(i) {
			t.Fatalf("datagram %d, want %d", d.From.Port(), i)
		}
	}
	if r.memory[0] != 0 {
		t.Errorf("%d bytes of no datagram", r.memory[0])
	}
}

// TestForgetRow discards what came for a listener that the policy no longer has.
func TestForgetRow(t *testing.T) {
	r := New(&core.Service{Config: config.Service{Slots: 1}})
	for i := range 6 {
		r.enqueue(0, waitingDatagram{row: i % 2})
	}
	r.ForgetRow(1)
	if r.lost[0] != 3 || r.memory[1] != 0 {
		t.Errorf("lost %v, memory %v", r.lost, r.memory[:2])
	}
	if left := r.takeQueue(0); len(left) != 3 || slices.ContainsFunc(left, func(d waitingDatagram) bool { return d.row != 0 }) {
		t.Errorf("%d datagrams are left", len(left))
	}
}

// TestSavedRows checks that the templates are saved again when the policy changes the listeners: the state file names them, and
// templates for other listeners are discarded.
func TestSavedRows(t *testing.T) {
	r := New(&core.Service{Listeners: map[int]config.Listener{0: {Protocol: config.UDP}}, Host: &core.Host{Host: &domain.Host{StateDir: t.TempDir()}}})
	r.kept.store = templates.NewStore(templates.Limits{}, nil)
	r.saveTemplates()
	if !r.areTemplatesSaved() {
		t.Error("the templates are not saved")
	}
	r.Listeners[1] = config.Listener{Protocol: config.UDP}
	if r.areTemplatesSaved() {
		t.Error("the state file has other listeners")
	}
	r.saveTemplates()
	next := New(&core.Service{Listeners: r.Listeners, Host: r.Host})
	next.kept.store = templates.NewStore(templates.Limits{}, nil)
	next.loadTemplates()
	if !next.areTemplatesSaved() {
		t.Error("the next agent does not take the templates over")
	}
}

// TestStale checks that no datagram is discarded for one whose wait has ended when the rooms have been read to their end.
func TestStale(t *testing.T) {
	r := New(&core.Service{Config: config.Service{Slots: 1}})
	r.stale[0] = 3
	if _, ok := r.nextUnread(0); ok || r.stale[0] != 0 {
		t.Errorf("%v, stale %v", ok, r.stale)
	}
}

// TestRowsOf checks which listeners receive the templates of another host, whose policy may write the same listener in another way.
func TestRowsOf(t *testing.T) {
	listener := func(protocol config.Protocol, address string, only6 bool) config.Listener {
		return config.Listener{Protocol: protocol, Address: netip.MustParseAddrPort(address), V6Only: only6}
	}
	r := New(&core.Service{Listeners: map[int]config.Listener{
		0: listener(config.UDP, "[::]:4739", false), 1: listener(config.UDP, "[::]:2055", true), 2: listener(config.UDP, "0.0.0.0:2055", false),
		3: listener(config.UDP, "192.0.2.53:9995", false), 4: listener(config.UDP, "[2001:db8::53]:9995", false), 5: listener(config.TCP, "[::]:4739", false),
	}})
	const four, six = "198.51.100.1:7", "[2001:db8::1]:7"
	for _, c := range []struct {
		listener, source string
		want             []int
	}{
		{"udp [::]:4739", four, []int{0}}, {"udp 192.0.2.53:4739", four, []int{0}}, {"udp [2001:db8::53]:4739", six, []int{0}},
		{"udp [::]:2055", four, []int{2}}, {"udp [::]:2055", six, []int{1}},
		{"udp [::]:9995", four, []int{3}}, {"udp 192.0.2.53:9995", four, []int{3}}, {"udp 192.0.2.54:9995", four, nil}, {"udp [2001:db8::53]:9995", six, []int{4}},
		{"udp [::]:1", four, nil}, {"tcp [::]:9995", four, nil}, {"udp x", four, nil}, {"", four, nil},
	} {
		if got := r.rowsOf(Handed{Listener: c.listener, Source: netip.MustParseAddrPort(c.source)}); !slices.Equal(got, c.want) {
			t.Errorf("%s from %s: rows %v, want %v", c.listener, c.source, got, c.want)
		}
	}
}

// TestNextSYN compares the times with the SYNs of a device that began to connect when its slot became empty, or later.
func TestNextSYN(t *testing.T) {
	empty := time.Now()
	at := func(s float64) time.Time { return empty.Add(time.Duration(s * float64(time.Second))) }
	for _, c := range []struct{ waited, now, want float64 }{
		{0, 0.2, 1.5}, {0, 0.99, 1.5}, {0, 1, 3.5}, {0, 2.9, 3.5}, {0, 3.1, 7.5}, {0, 10, 15.5},
		// An earlier member was killed before it had received all that waited.
		{0.4, 0.5, 2.5}, {0.4, 3.3, 8.1}, {2, 3.3, 8.1},
	} {
		if got := nextSYN(at(0), at(c.waited), at(c.now)); got.Sub(at(c.want)).Abs() > time.Microsecond {
			t.Errorf("waited %v, now %v: %v, want %v", c.waited, c.now, got.Sub(empty), c.want)
		}
		for first := 0.0; first <= c.waited; first += 0.1 { // seconds from the begin to the first SYN
			next := first
			for k := 1.0; next <= c.now; k *= 2 {
				next += k
			}
			if got := nextSYN(at(0), at(c.waited), at(c.now)); got.Before(at(next)) {
				t.Errorf("waited %v, now %v: %v, and a device sends its next SYN at %v", c.waited, c.now, got.Sub(empty), next)
			}
		}
	}
	if got := nextSYN(time.Time{}, at(0), at(2)); got != at(3.5) {
		t.Errorf("of a slot that another agent has seen: %v", got.Sub(empty))
	}
}

// TestCopyTemplates is that only exporters with a TCP connection, to any service, have copies, and that these say when they were written, so that the
// host that reads them hours later knows their age, also from a host whose clock is ahead.
func TestCopyTemplates(t *testing.T) {
	listeners := map[int]config.Listener{0: {Protocol: config.UDP, Address: netip.MustParseAddrPort("[::]:4739")}}
	r, sessions := New(&core.Service{Config: config.Service{Slots: 1}, Listeners: listeners}), New(&core.Service{Config: config.Service{Slots: 1}})
	each := func(f func(*Rooms)) { f(r); f(sessions) }
	always := func(netip.Addr) (time.Time, bool, bool) { return time.Time{}, false, true }
	datagram := []byte{0, 10, 0, 28, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 2, 0, 12, 1, 0, 0, 1, 0, 8, 0, 4}
	now := time.Now()
	r.kept.store = templates.NewStore(templates.Limits{}, nil)
	source, other, third := netip.MustParseAddrPort("192.0.2.1:7"), netip.MustParseAddrPort("192.0.2.2:7"), netip.MustParseAddrPort("192.0.2.3:7")
	for _, from := range []netip.AddrPort{source, other, third} {
		if err := r.kept.store.Insert(from, 0, datagram, now.Add(-time.Minute), now); err != nil {
			t.Fatal(err)
		}
	}
	handed, err := HandOver(each, func(a netip.Addr) bool { return a != third.Addr() }, time.Time{})
	if list, _ := DecodeHanded(handed); err != nil || len(list) != 2 || !list[0].Written.IsZero() {
		t.Errorf("%+v, %v", list, err)
	}
	copies := func(wanted func(netip.Addr) (time.Time, bool, bool), most int) []Handed {
		t.Helper()
		encoded, err := CopyTemplates(each, wanted, most)
		list, damaged := DecodeHanded(encoded)
		if err != nil || damaged > 0 {
			t.Errorf("%d damaged, %v", damaged, err)
		}
		return list
	}
	if got := copies(always, 9); len(got) > 0 {
		t.Errorf("exporters without a connection: %+v", got)
	}
	sessions.kept.proven, r.kept.vouched[other.Addr()] = map[netip.Addr]bool{source.Addr(): true}, true
	list := copies(always, 9)
	if len(list) != 2 || len(copies(always, 1)) != 1 || slices.ContainsFunc(list, func(h Handed) bool { return h.Source == third || now.Sub(h.Written).Abs() > time.Minute }) {
		t.Errorf("%+v", list)
	}
	for _, c := range []struct {
		since     time.Duration
		refreshed bool
		want      int
	}{{-time.Second, false, 2}, {time.Second, false, 0}, {time.Second, true, 0}, {-time.Hour, true, 2}} {
		if got := copies(func(netip.Addr) (time.Time, bool, bool) { return now.Add(c.since), c.refreshed, true }, 9); len(got) != c.want {
			t.Errorf("since %v, refreshed %v: %+v", c.since, c.refreshed, got)
		}
	}
	if err := r.kept.store.Learn(source, 0, datagram, now.Add(time.Second)); err != nil { // the same template again
		t.Fatal(err)
	}
	if got := copies(func(netip.Addr) (time.Time, bool, bool) { return now.Add(time.Millisecond), true, true }, 9); len(got) != 1 || got[0].Source != source {
		t.Errorf("refreshed: %+v", got)
	}

	for shift, want := range map[time.Duration]time.Duration{-time.Hour: 61 * time.Minute, time.Hour: time.Minute} {
		one := list[slices.IndexFunc(list, func(h Handed) bool { return h.Source == other })]
		one.Written = one.Written.Add(shift)
		next := New(&core.Service{Config: config.Service{Slots: 1}, Listeners: listeners})
		next.kept.store = templates.NewStore(templates.Limits{}, func(a netip.Addr) bool { return next.kept.vouched[a] })
		next.insertTemplates([]Handed{one}, true)
		n := 0
		for kept := range next.kept.store.List() {
			if age := now.Sub(kept.Refreshed); (age-want).Abs() > 10*time.Second || !kept.Proven {
				t.Errorf("written %v from now: age %v, want %v, proven %v", shift, age, want, kept.Proven)
			}
			n++
		}
		if n != 1 {
			t.Errorf("%d templates", n)
		}
	}
}

// TestReplayAgain is that templates that are being sent do not count as sent when another host hands over later ones, and that those that
// are not new are not sent again.
func TestReplayAgain(t *testing.T) {
	r := New(&core.Service{Config: config.Service{Slots: 2}, Listeners: map[int]config.Listener{0: {Protocol: config.UDP, Address: netip.MustParseAddrPort("[::]:4739")}}})
	r.kept.store = templates.NewStore(templates.Limits{}, nil)
	source, other := netip.MustParseAddrPort("192.0.2.1:7"), netip.MustParseAddr("192.0.2.2")
	message := func(fields ...byte) []byte {
		b := []byte{0, 10, 0, byte(24 + len(fields)*4), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 2, 0, byte(8 + len(fields)*4), 1, 0, 0, byte(len(fields))}
		for _, f := range fields {
			b = append(b, 0, f, 0, 4)
		}
		return b
	}
	first := Handed{Listener: "udp [::]:4739", Source: source, Data: message(8), Age: time.Minute}
	adopt := func(h Handed) {
		t.Helper()
		if r.insertTemplates([]Handed{h}, true); r.kept.store.Stats().Templates != 1 {
			t.Fatalf("%+v", r.kept.store.Stats())
		}
	}
	adopt(first)
	known := member.ID{PID: 7}
	running, filling := &fill{addresses: []netip.Addr{other, source.Addr()}}, &fill{addresses: []netip.Addr{source.Addr()}}
	r.kept.running[0], r.filling[1], r.kept.replayedTo[source.Addr()] = running, filling, known
	for _, h := range []Handed{first, {Listener: first.Listener, Source: source, Data: message(9), Age: time.Hour},
		{Listener: first.Listener, Source: source, Data: message(9), Written: time.Now().Add(-time.Hour)}, {Listener: first.Listener, Source: source, Data: []byte("rubbish")}} {
		adopt(h)
		if running.again || filling.again || r.kept.replayedTo[source.Addr()] != known {
			t.Errorf("sent again after %+v", h)
		}
	}
	if r.insertTemplates([]Handed{first}, false); !running.again || len(r.kept.replayedTo) > 0 {
		t.Error("the templates of an exporter that comes are not sent")
	}
	running.addresses, running.again, r.kept.replayedTo[source.Addr()] = []netip.Addr{other, source.Addr()}, false, known
	filling.addresses, filling.again = []netip.Addr{source.Addr()}, false
	adopt(Handed{Listener: first.Listener, Source: source, Data: message(8, 12)})
	if !running.again || !filling.again || !slices.Equal(running.addresses, []netip.Addr{other}) || len(filling.addresses) > 0 || len(r.kept.replayedTo) > 0 {
		t.Errorf("after a later template: %v and %v, known to %v", running.addresses, filling.addresses, r.kept.replayedTo)
	}
}
