// SPDX-License-Identifier: Apache-2.0

package bpf_test

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/placement"
	"sockeye/internal/sockaddr"
)

func deviceMap(t testing.TB, lines ...string) *placement.DeviceMap {
	t.Helper()
	m, err := placement.ParseDeviceMap(strings.NewReader(strings.Join(lines, "\n")), "devices.csv")
	check(t, err)
	return m
}

func allSlots(n int) []int {
	all := make([]int, n)
	for i := range all {
		all[i] = i
	}
	return all
}

// TestDevicesLandInTheirSlots sends datagrams and SYNs from thousands of addresses: each reaches the slot that the
// reference model returns.
func TestDevicesLandInTheirSlots(t *testing.T) {
	const slots = 16
	for name, listeners := range map[string][]string{
		"IPv4":       {"udp 0.0.0.0:4739", "tcp 0.0.0.0:1790"},
		"IPv6":       {"udp [::]:4739 v6only", "tcp [::]:1790 v6only"},
		"dual-stack": {"udp [::]:4739", "tcp [::]:1790"},
		"two rows":   {"udp 0.0.0.0:4739", "tcp 0.0.0.0:1790", "udp [::]:4739 v6only", "tcp [::]:1790 v6only"},
		"an address": {"udp 127.0.0.7:4739", "tcp 127.0.0.7:1790"},
	} {
		t.Run(name, func(t *testing.T) {
			both(t, func(t *testing.T, lookup bool) {
				devices := deviceMap(t, "127.16.0.0/12,a", "127.32.0.0/11,b", "fd00::/66,c", "::/0,d")
				for _, m := range []*placement.DeviceMap{nil, devices} {
					s := serve(t, config(t, lookup, listeners...), slots, bpf.NoSlot, m)
					s.seat(allSlots(slots)...)
					udp := newSender(t)
					for row, l := range s.rows() {
						families := []bool{false, true}
						if a := l.Address.Addr(); a.Is4() {
							families = families[:1]
						} else if l.V6Only {
							families = families[1:]
						}
						for _, v6 := range families {
							n := datagrams
							if l.Protocol == unix.IPPROTO_TCP {
								n = connections
							}
							from := sources(n, v6)
							for chunk := range slices.Chunk(from, 100) { // of what the buffers hold
								for _, a := range chunk {
									if l.Protocol == unix.IPPROTO_UDP {
										udp.send(a, target(l, v6))
									} else if err := refused(t, unix.IPPROTO_TCP, a, target(l, v6)); err != nil {
										t.Fatalf("connect from %s: %v", a, err)
									}
								}
								s.expect(row, chunk)
							}
						}
					}
					if _, refused := s.total(); refused != 0 {
						t.Errorf("%d were refused", refused)
					}
					closeAll(s)
				}
			})
		})
	}
}

// closeAll closes a service before its test ends.
func closeAll(s *service) {
	for _, sockets := range s.seats {
		for _, k := range sockets {
			k.close()
		}
	}
	for _, k := range s.keepers {
		k.close()
	}
	check(s.t, s.Close())
	check(s.t, bpf.Remove(s.config.Dir))
}

var pair = []string{"udp [::]:4739", "tcp [::]:1790"}

// clients returns the four kinds of clients of a service: both protocols and both families.
func clients(f func(row, protocol int, v6 bool)) {
	for row, protocol := range []int{unix.IPPROTO_UDP, unix.IPPROTO_TCP} {
		for _, v6 := range []bool{false, true} {
			f(row, protocol, v6)
		}
	}
}

// TestRefusals closes slots in every way and checks the client's error and the counters, and that no other member
// receives the packet.
func TestRefusals(t *testing.T) {
	const (
		slots         = 4
		empty         = 1
		noSlot        = slots // index of what belongs to no slot
		reasonEmpty   = "empty_slot"
		reasonSocket  = "unusable_socket"
		reasonNoTable = "no_table"
	)
	for _, test := range []struct {
		name    string
		prepare func(s *service)
		reason  string
		index   int
		served  int // the protocol that is not refused
	}{
		{"never filled", func(*service) {}, reasonEmpty, empty, 0},
		{"ready is 0", func(s *service) {
			s.seat(empty)
			check(s.t, s.SetSlot(empty, bpf.Slot{}))
		}, reasonEmpty, empty, 0},
		{"ready without sockets", func(s *service) {
			check(s.t, s.SetSlot(empty, bpf.Slot{Ready: 1}))
		}, reasonSocket, empty, 0},
		{"ready without the datagram socket", func(s *service) {
			s.seats[empty] = map[int]*socket{1: s.insert(1, empty)}
			check(s.t, s.SetSlot(empty, bpf.Slot{Ready: 1}))
		}, reasonSocket, empty, unix.IPPROTO_TCP},
		{"the listener is shut down", func(s *service) {
			s.seat(empty)
			check(s.t, unix.Shutdown(s.seats[empty][1].fd, unix.SHUT_RDWR))
		}, reasonSocket, empty, unix.IPPROTO_UDP},
		{"the datagram socket is connected", func(s *service) {
			s.seat(empty)
			check(s.t, unix.Connect(s.seats[empty][0].fd, sockaddr.Of(netip.MustParseAddrPort("[::1]:9"))))
		}, reasonSocket, empty, unix.IPPROTO_TCP},
		{"deleted", func(s *service) {
			s.seat(empty)
			for row := range s.rows() {
				check(s.t, s.Delete(row, empty))
				check(s.t, s.Delete(row, empty))
			}
		}, reasonSocket, empty, 0},
		{"a socket closes", func(s *service) {
			s.seat(empty)
			s.seats[empty][0].close()
		}, reasonEmpty, empty, 0},
		{"the other socket closes", func(s *service) {
			s.seat(empty)
			s.seats[empty][1].close()
		}, reasonEmpty, empty, 0},
		{"no table", func(s *service) {
			check(s.t, s.Maps()[0].Delete(uint32(0)))
		}, reasonNoTable, noSlot, 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			both(t, func(t *testing.T, lookup bool) {
				s := serve(t, config(t, lookup, pair...), slots, bpf.NoSlot, nil)
				s.seat(0, 2, 3)
				test.prepare(s)
				clients(func(row, protocol int, v6 bool) {
					from := s.sourceIn(empty, v6)
					err := refused(t, protocol, from, target(s.config.Listeners[row], v6))
					if protocol == test.served {
						if err != nil {
							t.Errorf("protocol %d from %s: %v", protocol, from, err)
						}
						s.expect(row, []netip.Addr{from})
						return
					}
					if !errors.Is(err, unix.ECONNREFUSED) {
						t.Errorf("protocol %d from %s: %v, want %v", protocol, from, err, unix.ECONNREFUSED)
					}
					s.collect(row, 0)
				})
				all, err := s.Counters(slots)
				check(t, err)
				want := make([]bpf.Counters, slots+1)
				for r, reason := range bpf.Reasons {
					if reason == test.reason {
						want[test.index].RefusedDatagrams[r] = 2
						want[test.index].RefusedConnections[r] = 2
					}
					switch test.served {
					case unix.IPPROTO_TCP:
						want[test.index].Connections = 2
						want[test.index].RefusedConnections[r] = 0
					case unix.IPPROTO_UDP:
						want[test.index].Datagrams = 2
						want[test.index].RefusedDatagrams[r] = 0
					}
				}
				if !slices.Equal(all, want) {
					t.Errorf("counted %+v, want %+v", all, want)
				}
			})
		})
	}
}

// TestStandby sends the devices of an empty slot to the standby slot.
func TestStandby(t *testing.T) {
	both(t, func(t *testing.T, lookup bool) {
		const slots, standby, empty = 4, 3, 1
		s := serve(t, config(t, lookup, pair...), slots, standby, nil)
		s.seat(0, 2)
		for _, step := range []struct {
			does string
			do   func()
			slot int // that gets it; -1: refused
		}{
			{"home and standby are empty", func() {}, -1},
			{"standby is filled", func() { s.seat(standby) }, standby},
			{"home is filled", func() { s.seat(empty) }, empty},
			{"home closes", func() { s.seats[empty][0].close() }, standby},
			{"standby closes", func() { s.seats[standby][1].close() }, -1},
		} {
			step.do()
			clients(func(row, protocol int, v6 bool) {
				from := s.sourceIn(empty, v6)
				err := refused(t, protocol, from, target(s.config.Listeners[row], v6))
				if step.slot < 0 {
					if !errors.Is(err, unix.ECONNREFUSED) {
						t.Errorf("%s: %v, want %v", step.does, err, unix.ECONNREFUSED)
					}
					s.collect(row, 0)
					return
				}
				if err != nil {
					t.Errorf("%s: %v", step.does, err)
				}
				if got := s.collect(row, 1); got[step.slot][from] != 1 {
					t.Errorf("%s: came to %v, want slot %d", step.does, got, step.slot)
				}
			})
		}
		all, err := s.Counters(slots)
		check(t, err)
		want := make([]bpf.Counters, slots+1)
		want[standby] = bpf.Counters{Connections: 4, Datagrams: 4}
		want[empty] = bpf.Counters{Connections: 2, Datagrams: 2, Diverted: 8}
		want[empty].RefusedConnections[0], want[empty].RefusedDatagrams[0] = 4, 4
		if !slices.Equal(all, want) {
			t.Errorf("counted %+v, want %+v", all, want)
		}
	})
}

// TestConnectedSocketOfTheGroup uses a connected socket beside the members, for which the kernel looks for a better
// match than the program's selection.
func TestConnectedSocketOfTheGroup(t *testing.T) {
	const slots, empty = 4, 1
	s := serve(t, config(t, false, pair...), slots, bpf.NoSlot, nil)
	s.seat(0, 2, 3)
	udp := newSender(t)
	k := s.newSocket(0)
	peer := s.sourceIn(0, true)
	check(t, unix.Connect(k.fd, sockaddr.Of(netip.AddrPortFrom(peer, 9))))
	for _, v6 := range []bool{false, true} {
		to := target(s.config.Listeners[0], v6)
		var from []netip.Addr
		for _, a := range sources(50, v6) {
			if s.slotOf(a) != empty {
				from = append(from, a)
				udp.send(a, to)
			}
		}
		s.expect(0, from)
		if err := refused(t, unix.IPPROTO_UDP, s.sourceIn(empty, v6), to); !errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("to an empty slot: %v, want %v", err, unix.ECONNREFUSED)
		}
		s.collect(0, 0)
	}
	if from, ok := k.receive(); ok {
		t.Errorf("the connected socket got something from %s", from)
	}
}

// TestRunStats counts the runs of all rows' programs.
func TestRunStats(t *testing.T) {
	both(t, func(t *testing.T, lookup bool) {
		s := serve(t, config(t, lookup, pair...), 1, bpf.NoSlot, nil)
		s.seat(0)
		stats, err := ebpf.EnableStats(unix.BPF_STATS_RUN_TIME)
		check(t, err)
		defer stats.Close()
		clients(func(row, protocol int, _ bool) {
			check(t, refused(t, protocol, s.sourceIn(0, false), target(s.config.Listeners[row], false)))
			s.collect(row, 1)
		})
		if got, err := s.RunStats(); err != nil || got.Runs != 4 || got.Nanoseconds == 0 {
			t.Errorf("%+v, %v, want 4 runs", got, err)
		}
	})
}

// TestLookupMembers has members that reuseport does not support: of several users, on their own ports and addresses,
// without SO_REUSEPORT.
func TestLookupMembers(t *testing.T) {
	const slots = 4
	s := serve(t, config(t, true, pair...), slots, bpf.NoSlot, nil)
	udp := newSender(t)
	for slot := range slots {
		s.seats[slot] = make(map[int]*socket)
		for row, l := range s.rows() {
			l.Address = netip.MustParseAddrPort(fmt.Sprintf("[::]:%d", 20000+slot))
			k := newSocket(t, l, false)
			check(t, unix.Fchown(k.fd, 1000+slot, -1))
			check(t, s.Insert(row, bpf.Place(slot), k.fd, k.cookie()))
			s.seats[slot][row] = k
		}
		check(t, s.SetSlot(slot, bpf.Slot{Ready: 1}))
	}
	clients(func(row, protocol int, v6 bool) {
		from := sources(50, v6)
		for _, a := range from {
			to := target(s.config.Listeners[row], v6)
			if protocol == unix.IPPROTO_UDP {
				udp.send(a, to)
			} else if err := refused(t, protocol, a, to); err != nil {
				t.Fatalf("connect from %s: %v", a, err)
			}
		}
		s.expect(row, from)
	})

	t.Run("of the wrong family", func(t *testing.T) {
		from := s.sourceIn(0, true)
		check(t, s.Delete(0, 0))
		k := newSocket(t, listen(t, "udp 127.0.0.1:0")[0], false)
		check(t, s.Insert(0, 0, k.fd, k.cookie()))
		if err := refused(t, unix.IPPROTO_UDP, from, target(s.config.Listeners[0], true)); !errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("IPv6 to an IPv4 socket: %v, want %v", err, unix.ECONNREFUSED)
		}
		udp.send(s.sourceIn(0, false), target(s.config.Listeners[0], false))
		until(t, "IPv4 to it", func() bool { _, ok := k.receive(); return ok })
	})
}

// TestLookupSparesOthers checks that sockets on other ports and addresses are found as without sk_lookup, and that a
// socket on the listener's own port never is.
func TestLookupSparesOthers(t *testing.T) {
	s := serve(t, config(t, true, "udp 127.0.0.7:4739", "tcp 127.0.0.7:1790"), 2, bpf.NoSlot, nil)
	udp := newSender(t)
	from := netip.MustParseAddr("127.9.9.9")
	for _, test := range []struct {
		listener string
		to       string
		found    bool
	}{
		{"udp 127.0.0.7:4740", "127.0.0.7:4740", true},
		{"udp 127.0.0.8:4739", "127.0.0.8:4739", true},
		{"udp 0.0.0.0:1790", "127.0.0.7:1790", true}, // tcp is the service's
		{"tcp 127.0.0.7:1791", "127.0.0.7:1791", true},
		{"tcp 127.0.0.8:1790", "127.0.0.8:1790", true},
		{"tcp 127.0.0.7:4739", "127.0.0.7:4739", true}, // udp is the service's
		{"udp [::1]:4739", "[::1]:4739", true},
		{"udp 127.0.0.7:4739", "127.0.0.7:4739", false},
		{"tcp 127.0.0.7:1790", "127.0.0.7:1790", false},
	} {
		k := newSocket(t, listen(t, test.listener)[0], false)
		to := netip.MustParseAddrPort(test.to)
		from := from
		if to.Addr().Is6() {
			from = netip.MustParseAddr("fd00::9")
		}
		switch {
		case !test.found:
			protocol := unix.IPPROTO_UDP
			if k.tcp {
				protocol = unix.IPPROTO_TCP
			}
			if err := refused(t, protocol, from, to); !errors.Is(err, unix.ECONNREFUSED) {
				t.Errorf("%s: %v, want %v", test.listener, err, unix.ECONNREFUSED)
			}
			if _, ok := k.receive(); ok {
				t.Errorf("%s got what the service refuses", test.listener)
			}
		default:
			if !k.tcp {
				udp.send(from, to)
			} else if err := refused(t, unix.IPPROTO_TCP, from, to); err != nil {
				t.Errorf("%s: %v", test.listener, err)
			}
			until(t, test.listener, func() bool { _, ok := k.receive(); return ok })
		}
		k.close()
	}
	if served, refused := s.total(); served != 0 || refused != 2 {
		t.Errorf("%d served and %d refused, want 0 and 2", served, refused)
	}
}

// TestMostSpecificListenerWins has rows for one address and for the unspecified address.
func TestMostSpecificListenerWins(t *testing.T) {
	both(t, func(t *testing.T, lookup bool) {
		for _, order := range [][]string{
			{"udp 127.0.0.7:4739", "udp 0.0.0.0:4739", "tcp 127.0.0.7:1790", "tcp 0.0.0.0:1790"},
			{"udp 0.0.0.0:4739", "udp 127.0.0.7:4739", "tcp 0.0.0.0:1790", "tcp 127.0.0.7:1790"},
		} {
			s := serve(t, config(t, lookup, order...), 4, bpf.NoSlot, nil)
			s.seat(allSlots(4)...)
			udp := newSender(t)
			from := sources(20, false)
			for row, l := range s.rows() {
				for _, a := range from {
					if l.Protocol == unix.IPPROTO_UDP {
						udp.send(a, target(l, false))
					} else if err := refused(t, unix.IPPROTO_TCP, a, target(l, false)); err != nil {
						t.Fatal(err)
					}
				}
				s.expect(row, from)
			}
			closeAll(s)
		}
	})
}

// TestTablesFlipAtomically replaces tables and device maps while datagrams are sent: each reaches one of its two
// slots, and none is refused.
func TestTablesFlipAtomically(t *testing.T) {
	const slots = 4
	var port atomic.Uint32
	port.Store(5000)
	mapping := func(nonce uint64, devices *placement.DeviceMap) *placement.Mapping {
		m, err := placement.NewMapping(slots, bpf.NoSlot, nonce, devices)
		check(t, err)
		return m
	}
	for _, test := range []struct {
		name  string
		flips int
		two   [2]*placement.Mapping
		flip  func(s *bpf.Steer, m *placement.Mapping) error
	}{
		{"tables", flips, [2]*placement.Mapping{mapping(1, nil), mapping(2, nil)}, func(s *bpf.Steer, m *placement.Mapping) error {
			return s.SetTable(&m.Table, func() {})
		}},
		{"device maps", flips / 5, [2]*placement.Mapping{
			mapping(1, deviceMap(t, "127.0.0.0/10,a", "127.64.0.0/10,b", "127.128.0.0/9,c")),
			mapping(1, deviceMap(t, "127.0.0.0/9,d", "127.128.0.0/10,e")),
		}, setMapping},
		// The table of one state with the device map of the other would map devices to a third slot.
		{"both", flips / 5, [2]*placement.Mapping{
			mapping(1, deviceMap(t, "127.0.0.0/10,a", "127.64.0.0/10,b", "127.128.0.0/9,c")),
			mapping(2, deviceMap(t, "127.0.0.0/9,d", "127.128.0.0/10,e")),
		}, setMapping},
		{"with and without a device map", flips / 5, [2]*placement.Mapping{
			mapping(1, deviceMap(t, "127.0.0.0/8,a")), mapping(2, nil),
		}, setMapping},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			both(t, func(t *testing.T, lookup bool) {
				t.Parallel() // the kernel waits in every flip for all CPUs
				s := serve(t, config(t, lookup, fmt.Sprintf("udp [::]:%d", port.Add(1))), slots, bpf.NoSlot, nil)
				s.install(test.two[0])
				s.seat(allSlots(slots)...)
				udp := newSender(t)
				from := sources(64, false)
				// The flips go on until datagrams have met both states; few may be sent between two flips.
				done, stop := make(chan error, 1), make(chan struct{})
				var flipped atomic.Int64
				go func() {
					for i := 0; ; i++ {
						select {
						case <-stop:
							done <- nil
							return
						default:
						}
						if err := test.flip(s.Steer, test.two[(i+1)%2]); err != nil {
							done <- err
							return
						}
						flipped.Add(1)
					}
				}()
				sent, moved := 0, 0
				enough := func() bool { return flipped.Load() >= int64(test.flips) && moved > 0 && moved < sent }
				for begin := time.Now(); !enough() && time.Since(begin) < time.Minute && len(done) == 0; {
					time.Sleep(5 * time.Millisecond) // eight senders without pauses delay the flips
					for _, a := range from {
						udp.send(a, target(s.config.Listeners[0], false))
					}
					sent += len(from)
					for slot, got := range s.collect(0, len(from)) {
						for a := range got {
							first, _ := test.two[0].Slot(a)
							second, _ := test.two[1].Slot(a)
							if slot != first && slot != second {
								t.Fatalf("%s came to slot %d, want %d or %d", a, slot, first, second)
							}
							if slot != first {
								moved++
							}
						}
					}
				}
				close(stop)
				check(t, <-done)
				if served, refused := s.total(); served != uint64(sent) || refused != 0 {
					t.Errorf("%d served and %d refused of %d", served, refused, sent)
				}
				if !enough() {
					t.Errorf("after %d flips %d of %d came to the second slot", flipped.Load(), moved, sent)
				}
				t.Logf("%d datagrams, %d to their second slot", sent, moved)
			})
		})
	}
}

// TestDevicesSeen checks the entry of each address.
func TestDevicesSeen(t *testing.T) {
	both(t, func(t *testing.T, lookup bool) {
		const slots, empty = 4, 1
		s := serve(t, config(t, lookup, pair...), slots, bpf.NoSlot, nil)
		s.seat(0, 2, 3)
		udp := newSender(t)
		now := func() uint64 {
			var ts unix.Timespec
			check(t, unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts))
			return uint64(ts.Nano())
		}
		begin := now() - uint64(50*time.Millisecond) // the coarse clock's tick
		want := make(map[netip.Addr]bpf.Seen)
		clients(func(row, protocol int, v6 bool) {
			to := target(s.config.Listeners[row], v6)
			for _, slot := range []int{0, 2} {
				from := s.sourceIn(slot, v6)
				seen := want[from]
				seen.Slot = uint32(slot)
				for range 3 {
					if protocol == unix.IPPROTO_UDP {
						udp.send(from, to)
						seen.Datagrams++
					} else {
						check(t, refused(t, protocol, from, to))
						seen.Connections++
					}
				}
				want[from] = seen
			}
			from := s.sourceIn(empty, v6)
			if err := refused(t, protocol, from, to); err == nil {
				t.Errorf("%s was not refused", from)
			}
			seen := want[from]
			seen.Slot, seen.Refused = uint32(bpf.NoSlot), seen.Refused+1
			want[from] = seen
		})
		end := now()
		got := make(map[netip.Addr]bpf.Seen)
		for a, seen := range s.Devices() {
			if seen.LastSeen < begin || seen.LastSeen > end {
				t.Errorf("%s was last seen at %d, not in %d to %d", placement.Addr(a), seen.LastSeen, begin, end)
			}
			seen.LastSeen = 0
			got[placement.Addr(a)] = seen
		}
		for a := range want {
			if got[a] != want[a] {
				t.Errorf("%s: %+v, want %+v", a, got[a], want[a])
			}
		}
		if len(got) != len(want) {
			t.Errorf("%d devices, want %d", len(got), len(want))
		}
	})
}

// TestDevicesSeenAreBounded uses more addresses than the table has entries.
func TestDevicesSeenAreBounded(t *testing.T) {
	for _, size := range []int{0, 1, 64} {
		c := config(t, false, pair[0])
		c.Devices = size
		s := serve(t, c, 1, bpf.NoSlot, nil)
		s.seat(0)
		udp := newSender(t)
		from := sources(200, false)
		for _, a := range from {
			udp.send(a, target(c.Listeners[0], false))
		}
		s.expect(0, from)
		if n := seen(s); n > size || n == 0 && size > 1 {
			t.Errorf("%d devices in a table of %d", n, size)
		}
		closeAll(s)
	}
}

// TestHostMaps checks that the prefixes of one address, and no others, are in the hash that the programs look up first,
// that the hash changes with the device map, and that it decides.
func TestHostMaps(t *testing.T) {
	both(t, func(t *testing.T, lookup bool) {
		const slots = 4
		s := serve(t, config(t, lookup, pair...), slots, bpf.NoSlot, nil)
		s.seat(allSlots(slots)...)
		udp := newSender(t)
		for _, test := range []struct {
			devices string
			hosts   []string
		}{
			{"", nil},
			{"127.1.0.0/16,a\n127.1.0.1/32,b\n127.1.0.2,c\n::1,d", []string{"127.1.0.1", "127.1.0.2", "::1"}},
			{"127.1.0.0/16,a\n127.1.0.1,a", []string{"127.1.0.1"}},
			{"127.1.0.0/16,a", nil},
			{"127.1.0.3,b", []string{"127.1.0.3"}},
			{"", nil},
		} {
			var devices *placement.DeviceMap
			if test.devices != "" {
				devices = deviceMap(t, test.devices)
			}
			m, err := placement.NewMapping(slots, bpf.NoSlot, 0x5eed_0f_50c4e7e, devices)
			check(t, err)
			s.install(m)
			kernel, next := s.Hosts(t)
			hosts := make(map[bpf.Address]bpf.DeviceID)
			if kernel != nil {
				var address bpf.Address
				var id bpf.DeviceID
				for entries := kernel.Iterate(); entries.Next(&address, &id); {
					hosts[address] = id
				}
			}
			want := make(map[bpf.Address]bool)
			for _, text := range test.hosts {
				want[bpf.Address(bpf.MappedAddress(netip.MustParseAddr(text)))] = true
			}
			for address := range hosts {
				if !want[address] {
					t.Errorf("%q: %v is in the hash", test.devices, address)
				}
			}
			if len(hosts) != len(want) || next {
				t.Errorf("%q: %d addresses in the hash, want %d; next_hosts has a map: %v", test.devices, len(hosts), len(want), next)
			}
			for _, text := range []string{"127.1.0.1", "127.1.0.2", "127.1.0.3", "127.1.0.4"} {
				from := netip.MustParseAddr(text)
				udp.send(from, target(s.rows()[0], false))
				s.expect(0, []netip.Addr{from})
			}
			if kernel == nil {
				continue
			}
			// The programs look up the hash before the trie, which has another slot.
			from := netip.MustParseAddr(test.hosts[0])
			if !from.Is4() {
				continue
			}
			other := (s.slotOf(from) + 1) % slots
			check(t, kernel.Put(bpf.Address(bpf.MappedAddress(from)), bpf.DeviceID{Device: bpf.Pinned, Hash: uint32(other)}))
			udp.send(from, target(s.rows()[0], false))
			if got := s.collect(0, 1)[other]; len(got) != 1 {
				t.Errorf("%q: %s did not come to slot %d of the hash", test.devices, from, other)
			}
		}
	})
}
