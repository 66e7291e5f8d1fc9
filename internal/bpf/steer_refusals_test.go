// SPDX-License-Identifier: Apache-2.0

package bpf_test

import (
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/member"
	"sockeye/internal/placement"
)

// refusals returns the addresses whose refusals were reported, and checks their slot and reason.
func (s *service) refusals(reader *bpf.RefusalReader, protocol uint8) (addresses []netip.Addr) {
	s.t.Helper()
	list, err := reader.Read()
	check(s.t, err)
	for _, r := range list {
		address := placement.Addr(r.Address)
		if int(r.Slot) != s.slotOf(address) || bpf.Reasons[r.Reason] != "empty_slot" || r.Protocol != protocol {
			s.t.Errorf("refusal of %s, which has slot %d: %+v", address, s.slotOf(address), r)
		}
		addresses = append(addresses, address)
	}
	return addresses
}

// TestReportedRefusals checks that a device is reported when its packets begin to be refused, and that a flood does not report more
// than the limit.
func TestReportedRefusals(t *testing.T) {
	both(t, func(t *testing.T, lookup bool) {
		s := serve(t, config(t, lookup, pair...), 2, bpf.NoSlot, nil)
		s.seat(1)
		reader, err := s.Refusals()
		check(t, err)
		defer reader.Close()
		udp := newSender(t)
		to := netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), 4739)
		one := func(what string, want netip.Addr, protocol uint8) {
			t.Helper()
			if got := s.refusals(reader, protocol); len(got) != 1 || got[0] != want {
				t.Errorf("%s: reported %v, want %s", what, got, want)
			}
		}
		none := func(what string) {
			t.Helper()
			if got := s.refusals(reader, 0); len(got) > 0 {
				t.Errorf("%s: reported %v", what, got)
			}
		}
		exporter, served := s.sourceIn(0, false), s.sourceIn(1, false)
		for range 3 {
			udp.send(exporter, to)
			udp.send(served, to)
		}
		one("datagrams to an empty slot", exporter, unix.IPPROTO_UDP)

		router := netip.MustParseAddr("127.9.0.1")
		for s.slotOf(router) != 0 {
			router = router.Next()
		}
		for range 3 {
			if connectWithin(t, router, netip.AddrPortFrom(to.Addr(), 1790), patience) {
				t.Fatal("an empty slot accepts a connection")
			}
		}
		one("connections to an empty slot", router, unix.IPPROTO_TCP)

		s.seat(0)
		udp.send(exporter, to)
		none("a served device")
		check(t, s.SetSlot(0, bpf.Slot{}))
		udp.send(exporter, to)
		udp.send(exporter, to)
		one("after datagrams that were served", exporter, unix.IPPROTO_UDP)

		const forgedDevices = 4000
		begin := time.Now()
		f := newFlooder(t, unix.IPPROTO_UDP, 4739)
		f.send(0, forgedDevices, nil)
		most := 1000 + int(time.Since(begin)/(20*time.Millisecond)) + 8
		reported := len(s.refusals(reader, unix.IPPROTO_UDP))
		if _, refused := s.total(); refused < forgedDevices/3 {
			t.Fatalf("%d packets refused", refused)
		}
		if reported < 100 || reported > most {
			t.Errorf("%d refusals of a flood reported, want at most %d", reported, most)
		}
	})
}

// TestExitStatus ends members in several ways: the release event says how.
func TestExitStatus(t *testing.T) {
	both(t, func(t *testing.T, lookup bool) {
		for _, test := range []struct {
			name   string
			signal unix.Signal
			exit   int // -1: by the signal
		}{
			{"exit", unix.SIGUSR1, memberExit},
			{"kill", unix.SIGKILL, -1},
			{"terminate", unix.SIGTERM, -1},
		} {
			t.Run(test.name, func(t *testing.T) {
				s := serve(t, config(t, lookup, "udp [::]:4739"), 2, bpf.NoSlot, nil)
				next := s.events()
				port := "udp [::]:4739"
				if lookup {
					port = "udp [::]:20000"
				}
				cmd := startMember(t, !lookup, port)
				handle, err := member.Open(cmd.Process.Pid)
				check(t, err)
				defer handle.Close()
				sockets, err := handle.Sockets(func(*member.Socket) bool { return true })
				check(t, err)
				cookie := sockets[0].Cookie
				member.CloseAll(sockets)
				s.register(0, cmd)()
				check(t, cmd.Process.Signal(test.signal))
				_ = cmd.Wait() // the status is in the event
				e := next(bpf.EventRelease, cookie)
				status, ok := bpf.ExitStatus(e)
				switch {
				case !ok:
					t.Errorf("event %+v has no exit status", e)
				case test.exit >= 0 && (!status.Exited() || status.ExitStatus() != test.exit),
					test.exit < 0 && (!status.Signaled() || status.Signal() != test.signal):
					t.Errorf("status %#x, exited %v %d, signal %v", uint32(status), status.Exited(), status.ExitStatus(), status.Signal())
				}
			})
		}
		s := serve(t, config(t, lookup, "udp [::]:4739"), 2, bpf.NoSlot, nil)
		next := s.events()
		k := s.insert(0, 0)
		cookie := k.cookie()
		k.close()
		if status, ok := bpf.ExitStatus(next(bpf.EventRelease, cookie)); ok {
			t.Errorf("a process that goes on has the status %#x", uint32(status))
		}
	})
}
