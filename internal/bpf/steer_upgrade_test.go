// SPDX-License-Identifier: Apache-2.0

package bpf_test

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/bpf/pin"
	"sockeye/internal/placement"
	"sockeye/internal/testenv"
)

// TestSteerLayouts detects a changed layout. Earlier versions, which do not share maps, adopt the pins of this version
// only if the directory has no hash; a downgrade to such a version registers all members again otherwise. A map of
// another layout is pinned under another name; see steerUnhashed.
func TestSteerLayouts(t *testing.T) {
	both(t, func(t *testing.T, lookup bool) {
		dir, names := bpf.SteerPins(t, "base", lookup)
		if dir != "base" {
			t.Errorf("directory %s", dir)
		}
		for name, pinned := range names {
			if pinned != name {
				t.Errorf("map %s is pinned as %s", name, pinned)
			}
		}
		for _, name := range []string{"slots", "cookies", "listeners", "sockets", "counters"} {
			bpf.DoubleMaps(t, name)
			dir, names := bpf.SteerPins(t, "base", lookup)
			if (dir == "base") != (name == "counters") {
				t.Errorf("another layout of %s: directory %s", name, dir)
			}
			if (names[name] == name) != (name == "sockets") {
				t.Errorf("another layout of %s: pinned as %s", name, names[name])
			}
		}
	})
}

// flow sends datagrams from a source in each slot and family, and receives them, until it is ended.
type flow struct {
	*service
	from      []netip.Addr
	stop      chan struct{}
	done      sync.WaitGroup
	sent, got atomic.Int64
}

func (s *service) stream(slots int) *flow {
	s.t.Helper()
	f := &flow{service: s, stop: make(chan struct{})}
	for slot := range slots {
		f.from = append(f.from, s.sourceIn(slot, false), s.sourceIn(slot, true))
	}
	udp := newSender(s.t)
	to := map[bool]netip.AddrPort{false: netip.MustParseAddrPort("127.0.0.1:4739"), true: netip.MustParseAddrPort("[::1]:4739")}
	f.done.Go(func() {
		tick := time.NewTicker(200 * time.Microsecond)
		defer tick.Stop()
		for {
			select {
			case <-f.stop:
				return
			case <-tick.C:
				from := f.from[int(f.sent.Load())%len(f.from)]
				udp.send(from, to[from.Is6()])
				f.sent.Add(1)
				f.receive()
			}
		}
	})
	return f
}

// receive receives everything that has arrived. The queues of the sockets are small.
func (f *flow) receive() {
	for slot, sockets := range f.seats {
		for from, ok := sockets[0].receive(); ok; from, ok = sockets[0].receive() {
			f.got.Add(1)
			if want := f.slotOf(from); slot != want {
				f.t.Errorf("a datagram of %s came to slot %d, want %d", from, slot, want)
			}
		}
	}
}

// more waits until each source has sent a few datagrams more.
func (f *flow) more() {
	f.t.Helper()
	enough := f.sent.Load() + int64(3*len(f.from))
	until(f.t, "datagrams are sent", func() bool { return f.sent.Load() >= enough })
}

// end fails the test unless every datagram was received in its slot.
func (f *flow) end() {
	f.t.Helper()
	close(f.stop)
	f.done.Wait()
	until(f.t, fmt.Sprintf("%d datagrams arrive", f.sent.Load()), func() bool {
		f.receive()
		return f.got.Load() >= f.sent.Load()
	})
	for _, k := range f.keepers {
		if from, ok := k.receive(); ok {
			f.t.Errorf("the keeper socket got something from %s", from)
		}
	}
}

// reopen opens the service as another version, which doubles the named maps.
func (s *service) reopen(doubled string) {
	s.t.Helper()
	bpf.DoubleMaps(s.t, doubled)
	if s.Steer != nil {
		check(s.t, s.Close())
	}
	c := s.config
	c.Ready = func(path *bpf.Steer) error { return setMapping(path, s.mapping) }
	s.Steer = open(s.t, c)
	for row, k := range s.keepers {
		check(s.t, s.Attach(row, k.fd))
	}
}

const oneSlot = 2 // the slot that a test asks for

// TestSteerUpgrade replaces a service by one of another layout, and that one by the first, under traffic: no datagram is
// lost or misdirected, and the slots keep their members.
func TestSteerUpgrade(t *testing.T) {
	const slots = 4
	for i, doubled := range []string{
		"counters", "devices", "events,lost_events", "tables", "tables,device_maps,next_devices,host_maps,next_hosts",
		"slots", "cookies", "listeners", "slots,cookies,listeners,counters,tables,device_maps,next_devices,host_maps,next_hosts,events,lost_events,pending,admission,unlisted",
	} {
		if i%layoutStep > 0 {
			continue
		}
		t.Run(doubled, func(t *testing.T) {
			both(t, func(t *testing.T, lookup bool) {
				s := serve(t, config(t, lookup, pair...), slots, bpf.NoSlot, deviceMap(t, "127.1.0.0/16,a"))
				s.seat(allSlots(slots)...)
				base := s.config.Dir
				for _, version := range []string{doubled, "", doubled} {
					before, err := s.Cookie(0, oneSlot)
					check(t, err)
					f := s.stream(slots)
					f.more()
					s.reopen(version)
					f.more()
					f.end()
					dir, names := bpf.SteerPins(t, base, lookup)
					if dirs, err := pin.Layouts(base); err != nil || !slices.Equal(dirs, []string{dir}) {
						t.Errorf("directories %q, want %s: %v", dirs, dir, err)
					}
					for name := range pinned(t, dir) {
						if of, _, _ := strings.Cut(name, pin.LayoutMark); names[of] != "" && names[of] != name {
							t.Errorf("pin %s of another layout", name)
						}
					}
					if got, err := s.Cookie(0, oneSlot); got != before || err != nil {
						t.Errorf("cookie %#x, was %#x: %v", got, before, err)
					}
					if got, err := s.Slot(oneSlot); got != (bpf.Slot{Ready: 1, Pid: uint32(os.Getpid())}) {
						t.Errorf("slot %+v: %v", got, err)
					}
					if !s.RefusedSince().IsZero() {
						t.Error("refused")
					}
					if rows, err := bpf.ReadListeners(base); err != nil || rows != s.config.Listeners {
						t.Errorf("listeners %v: %v", rows, err)
					}
					if nonce, err := bpf.ReadNonce(base); err != nil || nonce != s.mapping.Table.Nonce {
						t.Errorf("nonce %#x, %v", nonce, err)
					}
					if table, err := bpf.ReadTable(base); err != nil || table.Nonce != s.mapping.Table.Nonce || table.Named != 1 {
						t.Errorf("table: %v", err)
					}
					if ids, err := bpf.ReadDevices(base, []bpf.Address{placement.Address(netip.MustParseAddr("127.1.2.3"))}); err != nil || ids[0] == nil {
						t.Errorf("device map: %v, %v", ids, err)
					}
				}
				// The release hook of the last version closes slots of its own maps.
				s.seats[oneSlot][0].close()
				until(t, "the slot is closed", func() bool {
					got, err := s.Slot(oneSlot)
					check(t, err)
					return got.Ready == 0
				})
			})
		})
	}
}

// TestSteerUpgradeOfSockets has another layout of the map of sockets: slots refuse until their sockets are registered
// again, and devices keep their slots.
func TestSteerUpgradeOfSockets(t *testing.T) {
	const slots = 4
	both(t, func(t *testing.T, lookup bool) {
		s := serve(t, config(t, lookup, pair...), slots, bpf.NoSlot, nil)
		s.seat(allSlots(slots)...)
		for _, version := range []string{"sockets", "", "sockets,slots"} {
			s.reopen(version)
			if s.RefusedSince().IsZero() {
				t.Error("nothing was refused")
			}
			if uses, err := bpf.UsesLookup(s.config.Dir); err != nil || uses != lookup {
				t.Errorf("lookup %v: %v", uses, err)
			}
			for slot, sockets := range s.seats {
				if cookie, err := s.Cookie(0, bpf.Place(slot)); err != nil || cookie != 0 {
					t.Errorf("slot %d: cookie %#x, %v", slot, cookie, err)
				}
				for row, k := range sockets {
					check(t, s.Insert(row, bpf.Place(slot), k.fd, k.cookie()))
				}
				check(t, s.SetSlot(slot, bpf.Slot{Ready: 1, Pid: uint32(os.Getpid())}))
			}
			f := s.stream(slots)
			f.more()
			f.end()
		}
	})
}

// TestSteerUpgradeFails stops an upgrade before and after the new data path is built. Packets continue to be steered by the
// old one, and the next attempt succeeds.
func TestSteerUpgradeFails(t *testing.T) {
	const slots, everything = 4, "slots,cookies,listeners,counters,tables,device_maps,next_devices,host_maps,next_hosts"
	both(t, func(t *testing.T, lookup bool) {
		s := serve(t, config(t, lookup, pair...), slots, bpf.NoSlot, deviceMap(t, "127.1.0.0/16,a"))
		s.seat(allSlots(slots)...)
		check(t, s.Close())
		before, boom := pinned(t, s.config.Dir), errors.New("boom")
		bpf.DoubleMaps(t, everything)
		f := s.stream(slots)
		for _, full := range []bool{false, true} {
			c := s.config
			c.Ready = func(path *bpf.Steer) error {
				if full {
					check(t, setMapping(path, s.mapping))
				}
				return boom
			}
			opened := testenv.Opened(t)
			if _, err := bpf.OpenSteer(c); !errors.Is(err, boom) {
				t.Fatalf("opened: %v", err)
			}
			opened()
			if got := changed(before, pinned(t, s.config.Dir)); got != nil {
				t.Errorf("changed: %q", got)
			}
		}
		s.Steer = nil
		s.reopen(everything)
		f.more()
		f.end()
	})
}

// TestSteerOtherPrograms adopts the maps of a version with other programs and the same layout. The mapping is not shared:
// the other version's programs do not see a mapping of this version.
func TestSteerOtherPrograms(t *testing.T) {
	const slots = 4
	both(t, func(t *testing.T, lookup bool) {
		s := serve(t, config(t, lookup, pair...), slots, bpf.NoSlot, deviceMap(t, "127.1.0.0/16,a"))
		s.seat(allSlots(slots)...)
		kind, name := ebpf.SkReuseport, "prog_reuseport_0"
		spec := &ebpf.ProgramSpec{Type: kind, License: "GPL", Instructions: returns(1)}
		if lookup {
			name = "prog_lookup"
			spec.Type, spec.AttachType = ebpf.SkLookup, ebpf.AttachSkLookup
		}
		p, err := ebpf.NewProgram(spec)
		check(t, err)
		defer p.Close()
		path := filepath.Join(s.config.Dir, name)
		check(t, os.Remove(path))
		check(t, p.Pin(path))
		before := pinned(t, s.config.Dir)
		f := s.stream(slots)
		f.more()
		s.reopen("")
		f.more()
		f.end()
		want := []string{"device_map", "device_maps", "host_maps", "next_devices", "next_hosts", name, "table", "tables"}
		if !lookup {
			want = slices.Insert(want, 4, "prog_reuseport_1")
		}
		slices.Sort(want)
		if got := changed(before, pinned(t, s.config.Dir)); !slices.Equal(got, want) {
			t.Errorf("changed: %q, want %q", got, want)
		}
	})
}

// TestSteerInterrupted repeats an upgrade or a downgrade that was killed while it replaced pins, after each of them.
func TestSteerInterrupted(t *testing.T) {
	const slots, everything = 2, "slots,cookies,listeners,counters,tables,device_maps,next_devices,host_maps,next_hosts"
	both(t, func(t *testing.T, lookup bool) {
		s := serve(t, config(t, lookup, pair...), slots, bpf.NoSlot, deviceMap(t, "127.1.0.0/16,a"))
		s.seat(allSlots(slots)...)
		dirOf := func(version string) string {
			bpf.DoubleMaps(t, version)
			dir, _ := bpf.SteerPins(t, s.config.Dir, lookup)
			return dir
		}
		from, to := "", everything
		n := 0 // the order of the pins is the same in both modes
		if lookup {
			n = 1
		}
		for ; ; n += pinStep {
			// A version with both directories: the old one complete, the new one with its first n pins.
			dir, next := dirOf(from), dirOf(to)
			old := s.config.Dir + "_old"
			copyPins(t, dir, old, -1)
			f := s.stream(slots)
			f.more()
			s.reopen(to)
			total := len(pinned(t, next))
			copyPins(t, next, next+"_new", n)
			check(t, os.RemoveAll(next))
			check(t, os.Rename(next+"_new", next))
			check(t, os.Rename(old, dir))
			s.reopen(to)
			f.more()
			f.end()
			if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
				t.Fatalf("after %d pins: the old pins: %v", n, err)
			}
			if n >= total {
				return
			}
			from, to = to, from
		}
	})
}

// copyPins pins the first n maps and programs of a directory in another one, in the order in which OpenSteer pins them,
// and moves the links.
func copyPins(t testing.TB, from, to string, n int) {
	t.Helper()
	check(t, os.Mkdir(to, 0o700))
	order := func(name string) int {
		switch {
		case strings.HasPrefix(name, "link_"):
			return 0
		case strings.HasPrefix(name, "prog_"):
			return 3
		case strings.HasPrefix(name, "table"), strings.HasPrefix(name, "device_map"), strings.HasPrefix(name, "next_"):
			return 2
		}
		return 1
	}
	var names []string
	for name := range pinned(t, from) {
		names = append(names, name)
	}
	slices.SortFunc(names, func(a, b string) int {
		return strings.Compare(fmt.Sprint(order(a), a), fmt.Sprint(order(b), b))
	})
	for i, name := range names {
		if n >= 0 && i >= n && order(name) > 0 {
			return
		}
		source, target := filepath.Join(from, name), filepath.Join(to, name)
		switch order(name) {
		case 0:
			// Links have one pin.
			if n >= 0 {
				check(t, os.Rename(source, target))
			}
		case 3:
			p, err := ebpf.LoadPinnedProgram(source, nil)
			check(t, err)
			again, err := p.Clone()
			check(t, err)
			check(t, errors.Join(p.Close(), again.Pin(target), again.Close()))
		default:
			m, err := ebpf.LoadPinnedMap(source, nil)
			check(t, err)
			again, err := m.Clone()
			check(t, err)
			check(t, errors.Join(m.Close(), again.Pin(target), again.Close()))
		}
	}
}

// TestSteerConnectionsSurvive checks that connections and accept queues are not touched by an upgrade.
func TestSteerConnectionsSurvive(t *testing.T) {
	const slots = 4
	both(t, func(t *testing.T, lookup bool) {
		s := serve(t, config(t, lookup, pair...), slots, bpf.NoSlot, nil)
		s.seat(allSlots(slots)...)
		row := 1 // TCP
		connected := make(map[netip.Addr]int)
		connect := func(slot int, v6 bool) {
			a := s.sourceIn(slot, v6)
			if _, ok := connected[a]; ok {
				return
			}
			fd, err := client(t, unix.IPPROTO_TCP, a, target(s.config.Listeners[row], v6))
			if err != nil {
				t.Fatalf("connect from %s: %v", a, err)
			}
			connected[a] = fd
		}
		for slot := range slots {
			connect(slot, false)
		}
		s.reopen("slots,cookies,tables,counters")
		for slot := range slots {
			connect(slot, true)
		}
		var all []netip.Addr
		for a, fd := range connected {
			all = append(all, a)
			if _, err := unix.Write(fd, []byte("x")); err != nil {
				t.Errorf("connection of %s: %v", a, err)
			}
			defer unix.Close(fd)
		}
		s.expect(row, all)
	})
}
