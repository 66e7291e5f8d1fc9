// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/config"
	process "sockeye/internal/member"
	"sockeye/lab/swarm"
)

// TestMembersReplaced replaces the member of a slot under traffic: by a restart, by a start after which the new member is
// killed, and another time the agent, while the slot fills, and by a successor. Seen from the devices and the members, no
// datagram is lost, each is decoded, each is at a member with the routes of its device, and no SYN is refused.
func TestMembersReplaced(t *testing.T) {
	inBothModes(t, func(t *testing.T, mode config.Steering) {
		r := newReplaced(t, mode)
		h := r.host
		r.kill(0)
		time.Sleep(800 * time.Millisecond)
		r.start(0)
		h.ready(0, 1)
		time.Sleep(300 * time.Millisecond)

		r.kill(0)
		r.startPausing(0, fillPause)
		r.fills(0)
		r.kill(0)
		time.Sleep(200 * time.Millisecond)
		r.start(0)
		h.ready(0, 1)
		time.Sleep(300 * time.Millisecond)

		r.kill(0)
		r.startPausing(0, fillPause)
		r.fills(0)
		h.must(h.agent.Kill())
		h.startAgent()
		h.ready(0, 1)
		time.Sleep(300 * time.Millisecond)

		former := r.receivers[0]
		h.ports += 10
		r.start(0)
		h.ready(0, 1)
		time.Sleep(300 * time.Millisecond)
		r.end(former)
		time.Sleep(300 * time.Millisecond)
		r.judge(true)
	})
}

// TestDrainedWhileWaiting drains a slot whose packets wait: the datagrams and connections go to the other member at once.
func TestDrainedWhileWaiting(t *testing.T) {
	inBothModes(t, func(t *testing.T, mode config.Steering) {
		r := newReplaced(t, mode)
		r.kill(0)
		time.Sleep(time.Second)
		if out, stderr, code := r.cli("slot", "set", "0", "drain", "--wait"); code != 0 {
			t.Fatal(out, stderr)
		}
		r.eventually("what waited to be at slot 1", func() error {
			all := r.slots()
			from, to := all[0].Room, all[1]
			if from.Waiting > 0 || from.Lost > 0 || from.Datagrams == 0 || to.Room.Replayed != from.Datagrams || to.Sessions != replacedDevices {
				return fmt.Errorf("room of the drained slot: %+v, of the other one: %+v, %d devices", from, to.Room, to.Sessions)
			}
			return nil
		})
		r.judge(false)
	})
}

// TestMovedWhileWaiting moves one device of a slot whose packets wait, and then ends the wait: each datagram is counted once.
func TestMovedWhileWaiting(t *testing.T) {
	inBothModes(t, func(t *testing.T, mode config.Steering) {
		const devices, each = 5, 3
		h := newHost(t, mode)
		h.setPolicy(2, "when_empty: {wait: 60s}")
		h.startAgent()
		h.start(0, 1)
		h.ready(0, 1)
		home := h.homes(2)
		h.kill(1)
		h.ready(0)
		var waiting []netip.Addr
		for _, a := range addresses(100) {
			if home(a) == 1 && len(waiting) < devices {
				waiting = append(waiting, a)
			}
		}
		h.must(h.devices.Do(func() error {
			for _, a := range waiting {
				c, err := net.DialUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(a, 0)), net.UDPAddrFromAddrPort(target(a, ipfixPort)))
				if err != nil {
					return err
				}
				for range each {
					_, err = c.Write([]byte("waits"))
					h.must(err)
				}
				c.Close()
			}
			return nil
		}))
		counts := func(when string, replayed, waits, lost uint64) {
			h.Helper()
			h.eventually(when, func() error {
				from, to := h.slots()[1].Room, h.slots()[0].Room
				if to.Replayed != replayed || from.Waiting != waits || from.Lost != lost || from.Datagrams != devices*each || to.Waiting != 0 {
					return fmt.Errorf("from %+v to %+v", from, to)
				}
				return nil
			})
		}
		counts("before the move", 0, devices*each, 0)
		h.show(new(any), "move", waiting[0].String(), "0")
		counts("after the move", each, (devices-1)*each, 0)
		h.show(new(any), "slot", "set", "1", "maint")
		counts("after the end of the wait", each, 0, (devices-1)*each)
	})
}

// fillPause is the time in which a test finds a slot that fills, on a busy machine.
const fillPause = 5 * time.Second

const (
	replacedDevices   = 24
	replacedExporters = 2
)

// replacedRate is the number of datagrams per second of each device.
func replacedRate() float64 {
	if emulated {
		return 5
	}
	return 50
}

// newReplaced starts two members, and devices with connections that send datagrams.
func newReplaced(t *testing.T, mode config.Steering) *replaced {
	t.Helper()
	h := newHost(t, mode)
	h.setPolicy(2, "when_empty: {wait: 60s}", "takeover: true")
	h.startAgent()
	r := &replaced{host: h}
	var err error
	r.swarm, err = swarm.New(h.lab, h.devices)
	h.must(err)
	for slot := range r.receivers {
		r.start(slot)
	}
	h.ready(0, 1)
	h.must(r.swarm.StartDevices(t.Context(), swarm.Load{
		Devices: replacedDevices, TCP: bmpPort, UDP: ipfixPort, Rate: replacedRate(), Exporters: replacedExporters, Routes: 50, Noted: true,
	}))
	r.analysis.Period = time.Duration(replacedExporters / replacedRate() * float64(time.Second))
	h.eventually("the dumps", func() error {
		h.must(r.swarm.Read(&r.analysis))
		if n := r.analysis.Dumped(); n != replacedDevices {
			return fmt.Errorf("%d of %d devices", n, replacedDevices)
		}
		return nil
	})
	begun, err := r.swarm.Send()
	h.must(err)
	r.analysis.Begin = begun.At
	time.Sleep(300 * time.Millisecond)
	return r
}

// replaced is a service whose members are replaced.
type replaced struct {
	*host
	swarm     *swarm.Swarm
	analysis  swarm.Analysis
	receivers [2]*swarm.Process
	ended     []killed
}

// killed is a member that was killed.
type killed struct {
	id   int
	from time.Duration // before the signal
	to   time.Duration // after the exit
}

func (r *replaced) start(slot int) { r.startPausing(slot, 0) }

// startPausing starts a member that accepts no connection for a time: its slot fills for longer than that.
func (r *replaced) startPausing(slot int, pause time.Duration) {
	r.Helper()
	spec := r.spec(slot)
	m := swarm.Member{Slot: slot, Pause: pause, TCP: spec.Sockets[0].Address.Port(), UDP: spec.Sockets[1].Address.Port(), Plain: spec.Sockets[0].Plain}
	p, err := r.swarm.StartMember(m, fmt.Sprintf("receiver-%d", slot), r.user(slot))
	r.must(err)
	r.receivers[slot], r.members[slot] = p, &member{Process: p.Process, slot: slot}
}

func (r *replaced) kill(slot int) {
	r.Helper()
	r.end(r.receivers[slot])
}

func (r *replaced) end(p *swarm.Process) {
	r.Helper()
	const busy = time.Second // a busy machine does not run a member for a while
	r.awaitEmptyQueue(p.Pid())
	signalled := swarm.Now()
	r.must(p.Signal(unix.SIGKILL))
	<-p.Done()
	r.ended = append(r.ended, killed{p.ID, signalled - busy, swarm.Now() + 2*time.Millisecond})
}

// awaitEmptyQueue waits until a process has read all datagrams: those in its queue are lost when it is killed, and on a
// busy machine they can be many.
func (r *replaced) awaitEmptyQueue(pid int) {
	r.Helper()
	handle, err := process.Open(pid)
	r.must(err)
	defer handle.Close()
	sockets, err := handle.Sockets(func(s *process.Socket) bool { return s.Protocol == unix.IPPROTO_UDP })
	r.must(err)
	defer process.CloseAll(sockets) // a copy would keep the socket open when the process has ended
	r.eventually("an empty receive queue", func() error {
		for _, s := range sockets {
			switch next, err := unix.IoctlGetInt(s.FD(), unix.SIOCINQ); {
			case err != nil:
				return os.NewSyscallError("ioctl", err)
			case next > 0:
				return fmt.Errorf("a datagram of %d bytes waits in %s", next, s)
			}
		}
		return nil
	})
}

// fills waits until the new member of a slot receives the waiting packets.
func (r *replaced) fills(slot int) {
	r.Helper()
	r.eventually("a filling slot", func() error {
		s := r.slots()[slot]
		switch {
		case s.PID != r.receivers[slot].Pid(): // the agent may not have noticed the exit of the last member
			return errors.New("not yet")
		case s.Ready:
			r.Fatalf("slot %d is ready at once", slot)
		case !s.Room.Filling:
			return errors.New("not yet")
		}
		return nil
	})
}

// TestDrainedWhileFilling drains a slot whose new member does not have the datagrams yet: they go to the other member.
func TestDrainedWhileFilling(t *testing.T) {
	inBothModes(t, func(t *testing.T, mode config.Steering) {
		r := newReplaced(t, mode)
		r.kill(0)
		r.startPausing(0, fillPause)
		r.fills(0)
		if out, stderr, code := r.cli("slot", "set", "0", "drain", "--wait"); code != 0 {
			t.Fatal(out, stderr)
		}
		// Slot 0 is ready as soon as nothing waits for its member any more.
		if s := r.slots(); s[1].Room.Replayed == 0 {
			t.Errorf("room of slot 1: %+v", s[1].Room)
		}
		r.ready(0, 1)
		time.Sleep(300 * time.Millisecond)
		r.judge(false)
	})
}

// reordered is the time by which a datagram of one port may arrive later than one of another port that was sent after it.
const reordered = 10 * time.Millisecond

// judge checks that no datagram is lost, and that no SYN was refused. routes is set if each datagram must be at a member with
// the templates and routes of its device: after a move, the templates follow within milliseconds.
func (r *replaced) judge(routes bool) {
	r.Helper()
	stopped, err := r.swarm.Stop()
	r.must(err)
	r.analysis.End = stopped.At
	r.eventually("all datagrams", func() error {
		r.must(r.swarm.Read(&r.analysis))
		missing := r.analysis.Missing()
		all := uint64(len(missing))
		// The kernel had passed these to a process that had not read or counted them when it was killed: all since its last one.
		missing = slices.DeleteFunc(missing, func(at time.Duration) bool {
			return slices.ContainsFunc(r.ended, func(e killed) bool {
				return at > max(e.from, r.analysis.LastDatagram(e.id)-reordered) && at < e.to
			})
		})
		if len(missing) > 0 {
			var rooms []string
			for _, s := range r.slots() {
				rooms = append(rooms, fmt.Sprintf("%+v, %d datagrams, refused %v", *s.Room, s.Datagrams, s.Refused))
			}
			return fmt.Errorf("%d of %d datagrams are missing, sent at %v; %d refused; members ended at %v; rooms %q",
				len(missing), stopped.Sent, missing[:min(5, len(missing))], stopped.Refused, r.ended, rooms)
		}
		if lost := stopped.Sent - r.analysis.Datagrams(); lost > all {
			return fmt.Errorf("%d of %d datagrams are missing: %d at the ends of members, the others after the last one of their port", lost, stopped.Sent, all)
		}
		return nil
	})
	r.analysis.Finish()
	if a := &r.analysis; routes && (a.Undecodable > 0 || a.WithoutRoutes > 0) || a.Refused > 0 || stopped.Refused > 0 {
		r.Errorf("of %d datagrams, %d could not be decoded, and %d were at a member without routes; %d SYNs and %d datagrams were refused",
			a.Received, a.Undecodable, a.WithoutRoutes, a.Refused, stopped.Refused)
		for _, u := range a.Unrouted() {
			r.Logf("without routes: %v", u)
		}
		r.Logf("members ended at %v, the devices stalled at %v", r.ended, a.Stalls)
	}
	for _, s := range r.slots() {
		if s.Room.Lost > 0 || s.Room.Full > 0 {
			r.Errorf("slot %d: %+v", s.Slot, s.Room)
		}
	}
}
