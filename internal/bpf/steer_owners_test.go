// SPDX-License-Identifier: Apache-2.0

package bpf_test

import (
	"errors"
	"net/netip"
	"os"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/placement"
	"sockeye/internal/sockaddr"
	"sockeye/internal/sockdiag"
)

// owners returns the owners of the connections of a port, by remote address.
func (s *service) owners(port uint16) map[netip.Addr][]sockdiag.Socket {
	s.t.Helper()
	conn, err := sockdiag.Open()
	check(s.t, err)
	defer conn.Close()
	all := make(map[netip.Addr][]sockdiag.Socket)
	query := sockdiag.Query{States: sockdiag.Connected, LocalPort: port, Storage: s.OwnersFD()}
	check(s.t, conn.Dump(query, func() { clear(all) }, func(socket *sockdiag.Socket) {
		one := *socket
		one.Storage = slices.Clone(socket.Storage)
		all[socket.Remote.Addr()] = append(all[socket.Remote.Addr()], one)
	}))
	return all
}

// TestOwners checks that a connection inherits the owner of the listening socket that accepted it, before accept(2) and
// after it, that a later value of the listener does not change earlier connections, that the owner of a connection can
// be set, and that SOCK_DESTROY closes connections that no process has accepted.
func TestOwners(t *testing.T) {
	both(t, func(t *testing.T, lookup bool) {
		newSender(t)
		s := serve(t, config(t, lookup, pair...), 4, bpf.NoSlot, nil)
		s.seat(0, 1, 2, 3)
		const row, port = 1, 1790
		for _, v6 := range []bool{false, true} {
			slot := map[bool]int{false: 2, true: 3}[v6]
			address, to := s.sourceIn(slot, v6), netip.MustParseAddrPort("127.0.0.1:1790")
			if v6 {
				to = netip.AddrPortFrom(address, port)
			}
			listener := s.seats[slot][row].fd
			first := bpf.Owner{PID: os.Getpid(), StartTime: 1 << 40, Steered: true}
			check(t, s.SetOwner(listener, first))
			a, err := client(t, unix.IPPROTO_TCP, address, to)
			check(t, err)
			defer unix.Close(a)
			second := bpf.Owner{PID: 1 << 30, StartTime: 7, Steered: true}
			check(t, s.SetOwner(listener, second))
			b, err := client(t, unix.IPPROTO_TCP, address, to)
			check(t, err)
			defer unix.Close(b)
			want := func(when string, owners ...bpf.Owner) []sockdiag.Socket {
				t.Helper()
				list := s.owners(port)[address]
				var got []bpf.Owner
				for _, one := range list {
					if o, ok := bpf.ParseOwner(one.Storage); ok {
						got = append(got, o)
					}
				}
				for _, o := range owners {
					if !slices.Contains(got, o) || len(list) != len(owners) {
						t.Errorf("%s: the owners of %d connections are %+v, want %+v", when, len(list), got, owners)
					}
				}
				return list
			}
			want("in the backlog", first, second)
			accepted, _, err := unix.Accept(listener)
			check(t, err)
			defer unix.Close(accepted)
			// A connection in TIME-WAIT would keep the port from the next test.
			check(t, unix.SetsockoptLinger(accepted, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}))
			list := want("one accepted", first, second)
			third := bpf.Owner{PID: 5, StartTime: 6}
			check(t, s.SetOwner(accepted, third))
			want("after SetOwner", third, second)
			conn, err := sockdiag.Open()
			check(t, err)
			defer conn.Close()
			for i := range list {
				if list[i].Inode == 0 {
					check(t, conn.Destroy(&list[i]))
				}
			}
			wait(t, b, unix.POLLIN)
			if value, err := unix.GetsockoptInt(b, unix.SOL_SOCKET, unix.SO_ERROR); err != nil || unix.Errno(value) != unix.ECONNRESET {
				t.Errorf("the connection in the backlog ended with %v, %v", unix.Errno(value), err)
			}
			want("after SOCK_DESTROY", third)
		}
		if _, ok := bpf.ParseOwner(nil); ok {
			t.Error("a connection without a value has an owner")
		}
	})
}

// TestPinned checks that pinned prefixes have their slots in the kernel, also slots without a bucket.
func TestPinned(t *testing.T) {
	both(t, func(t *testing.T, lookup bool) {
		s := serve(t, config(t, lookup, pair...), 4, bpf.NoSlot, deviceMap(t, "127.9.0.0/16,a"))
		s.seat(0, 1, 2, 3, 7)
		m := s.mapping.WithPins(placement.Pins{
			Names:    map[string]int{"a": 7},
			Prefixes: map[netip.Prefix]int{netip.MustParsePrefix("127.1.0.0/16"): 1, netip.MustParsePrefix("127.1.2.3/32"): 7, netip.MustParsePrefix("fd00::/64"): 2},
		})
		s.install(m)
		from := newSender(t)
		var all []netip.Addr
		for _, text := range []string{"127.9.0.1", "127.9.255.254", "127.1.2.3", "127.1.2.4", "127.2.0.1", "fd00::77"} {
			a := netip.MustParseAddr(text)
			to := netip.MustParseAddrPort("127.0.0.1:4739")
			if a.Is6() {
				to = netip.AddrPortFrom(a, 4739)
			}
			from.send(a, to)
			all = append(all, a)
		}
		s.expect(0, all)
	})
}

// TestGated checks that the gate drops SYNs silently and passes datagrams, that the SYN of an admitted device and of
// other buckets pass, that held SYNs are recorded, and that the gate is open without its socket.
func TestGated(t *testing.T) {
	both(t, func(t *testing.T, lookup bool) {
		from := newSender(t)
		s := serve(t, config(t, lookup, pair...), 4, bpf.NoSlot, nil)
		s.seat(0, 1, 2, 3)
		const row = 1
		gate := s.newSocket(row)
		filter := unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K}
		check(t, unix.SetsockoptSockFprog(gate.fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: 1, Filter: &filter}))
		check(t, s.InsertGate(row, gate.fd))
		for _, v6 := range []bool{false, true} {
			held, free := s.sourceIn(1, v6), s.sourceIn(2, v6)
			to := func(a netip.Addr, port uint16) netip.AddrPort {
				if v6 {
					return netip.AddrPortFrom(a, port)
				}
				return netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), port)
			}
			table := s.mapping.Table
			table.Bucket[s.mapping.Locate(held).Bucket] |= bpf.Gated
			check(t, s.SetTable(&table, func() {}))
			pinned, err := bpf.ReadTable(s.config.Dir)
			if err != nil || pinned.Bucket != s.mapping.Table.Bucket {
				t.Errorf("the pinned table has flags, or %v", err)
			}
			from.send(held, to(held, 4739))
			s.expect(0, []netip.Addr{held})

			fd, err := unix.Socket(map[bool]int{false: unix.AF_INET, true: unix.AF_INET6}[v6], unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
			check(t, err)
			defer unix.Close(fd)
			if v6 {
				check(t, unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_FREEBIND, 1))
			}
			check(t, unix.Bind(fd, sockaddr.Of(netip.AddrPortFrom(held, 0))))
			if err := unix.Connect(fd, sockaddr.Of(to(held, 1790))); !errors.Is(err, unix.EINPROGRESS) {
				t.Fatalf("connect: %v", err)
			}
			until(t, "the held SYN is recorded", func() bool {
				for address, seen := range s.Devices() {
					if placement.Addr(address) == held && seen.Held > 0 && seen.Connections == 0 && seen.Refused == 0 {
						return true
					}
				}
				return false
			})
			if ready(t, fd, unix.POLLOUT|unix.POLLIN, 200*time.Millisecond) {
				t.Error("the held connection has ended or is established")
			}
			other, err := client(t, unix.IPPROTO_TCP, free, to(free, 1790))
			check(t, err)
			defer unix.Close(other)
			s.expect(row, []netip.Addr{free})
			if v6 {
				gate.close() // like the death of the agent
			} else {
				check(t, s.SetTable(&s.mapping.Table, func() {}))
			}
			// The next SYN, after 1 s.
			wait(t, fd, unix.POLLOUT)
			s.expect(row, []netip.Addr{held})
		}
		if _, refused := s.total(); refused != 0 {
			counters, err := s.Counters(int(s.mapping.Table.Slots))
			t.Errorf("%d packets were refused: %+v, %v; devices: %+v", refused, counters, err, s.Devices())
		}
	})
}
