// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"bufio"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/config"
)

// numbered sends numbered datagrams from devices, about 1000 a second.
type numbered struct {
	h      *host
	paused sync.Mutex // held: no datagram is sent
	stop   chan struct{}
	once   sync.Once
	done   sync.WaitGroup
	sent   map[netip.Addr]int
}

func (h *host) sendNumbered(all []netip.Addr) *numbered {
	n := &numbered{h: h, stop: make(chan struct{}), sent: make(map[netip.Addr]int)}
	h.Cleanup(n.finish)
	n.done.Go(func() {
		err := h.devices.Do(func() error {
			var conns []*net.UDPConn
			for _, a := range all {
				c, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(a, 2055)))
				if err != nil {
					return err
				}
				defer c.Close()
				conns = append(conns, c)
			}
			for {
				for i, a := range all {
					select {
					case <-n.stop:
						return nil
					case <-time.After(time.Millisecond):
					}
					n.paused.Lock()
					n.sent[a]++
					_, err := fmt.Fprintf(writer{conns[i], target(a, ipfixPort)}, "%d", n.sent[a])
					n.paused.Unlock()
					if err != nil {
						return fmt.Errorf("send datagram %d from %v: %w", n.sent[a], a, err)
					}
				}
			}
		})
		if err != nil {
			h.Error(err)
		}
	})
	return n
}

type writer struct {
	*net.UDPConn
	to netip.AddrPort
}

func (w writer) Write(b []byte) (int, error) { return w.WriteToUDPAddrPort(b, w.to) }

func (n *numbered) finish() {
	n.once.Do(func() { close(n.stop) })
	n.done.Wait()
}

// end stops the datagrams, and checks that the member of each device has received all of them in their order.
func (n *numbered) end(where home) {
	n.h.Helper()
	n.finish()
	for a, sent := range n.sent {
		var want []string
		for i := range sent {
			want = append(want, fmt.Sprint(i+1))
		}
		var got []string
		n.h.eventually(fmt.Sprintf("all %d datagrams of %v", sent, a), func() error {
			n.h.mu.Lock()
			defer n.h.mu.Unlock()
			// The texts of the processes that had the slot come through pipes of their own.
			got = nil
			first := func(texts []string) int { n, _ := strconv.Atoi(texts[0]); return n }
			for _, texts := range slices.SortedFunc(maps.Values(n.h.textsOf[arrival{where(a), "udp", a}]), func(a, b []string) int { return first(a) - first(b) }) {
				got = append(got, texts...)
			}
			if len(got) < sent {
				return fmt.Errorf("%d arrived: %v", len(got), got)
			}
			return nil
		})
		if !slices.Equal(got, want) {
			n.h.Errorf("%v: %d datagrams arrived in the order %v", a, len(got), got)
		}
	}
}

// upRecording returns a host whose slots have receivers that log what they receive.
func upRecording(t *testing.T, mode config.Steering, slots int, line string) *host {
	t.Helper()
	h := newHost(t, mode)
	h.setPolicy(slots, line)
	h.startAgent()
	var all []int
	for slot := range slots {
		h.recording(slot)
		all = append(all, slot)
	}
	h.ready(all...)
	return h
}

// recording returns a receiver that logs what it receives.
func (h *host) recording(slot int) *member {
	h.Helper()
	spec := h.spec(slot)
	spec.Records = true
	return h.startReceiver(fmt.Sprintf("receiver-%d", slot), spec)
}

// TestWaitingRoom kills a member, and starts it again a second later. No datagram is lost, and no device is refused.
func TestWaitingRoom(t *testing.T) {
	inBothModes(t, func(t *testing.T, mode config.Steering) {
		h := upRecording(t, mode, 2, "when_empty: {wait: 20s}")
		all := addresses(24)
		where := h.homes(2)
		n := h.sendNumbered(all)
		time.Sleep(300 * time.Millisecond)
		n.paused.Lock()
		h.eventually("the member to read what it has received", func() error {
			h.mu.Lock()
			defer h.mu.Unlock()
			for a, sent := range n.sent {
				if got := len(h.texts[arrival{0, "udp", a}]); where(a) == 0 && got < sent {
					return fmt.Errorf("%v: %d of %d", a, got, sent)
				}
			}
			return nil
		})
		h.kill(0)
		n.paused.Unlock()
		time.Sleep(200 * time.Millisecond)
		// All devices connect while slot 0 is empty. The connections of slot 0 stay in one listener until the slot has a
		// member: a listener that is shut down while a handshake ends resets the connection.
		began, migrated := time.Now(), h.migrated()
		var wait sync.WaitGroup
		wait.Go(func() { h.connectAndGreet(all) })
		time.Sleep(800 * time.Millisecond)
		if n := h.migrated(); n != migrated {
			t.Errorf("%d connections migrated while their slot was empty", n-migrated)
		}
		h.recording(0)
		h.ready(0, 1)
		t.Logf("ready after %v", time.Since(began))
		wait.Wait()
		time.Sleep(300 * time.Millisecond)
		n.end(where)
		for _, a := range all {
			h.eventually(fmt.Sprintf("the connection of %v", a), func() error {
				h.mu.Lock()
				defer h.mu.Unlock()
				if got := h.texts[arrival{where(a), "tcp", a}]; !slices.Equal(got, []string{"hello"}) {
					return fmt.Errorf("%v", got)
				}
				return nil
			})
		}
	})
}

// migrated returns the number of connections that the kernel has given to another listener.
func (h *host) migrated() (n int) {
	h.Helper()
	h.must(h.collectors.Do(func() error {
		b, err := os.ReadFile("/proc/thread-self/net/netstat")
		if err != nil {
			return err
		}
		lines := strings.Split(string(b), "\n") // names, then values
		names, values := strings.Fields(lines[0]), strings.Fields(lines[1])
		i := slices.Index(names, "TCPMigrateReqSuccess")
		if i < 0 {
			return nil // before Linux 5.14
		}
		n, err = strconv.Atoi(values[i])
		return err
	}))
	return n
}

// TestQueuedAtExit kills a member that has not accepted the connections of its devices. They wait for the next member, although
// no SYN has come to the waiting room.
func TestQueuedAtExit(t *testing.T) {
	h := upRecording(t, config.Reuseport, 2, "when_empty: {wait: 20s}")
	where := h.homes(2)
	all := slices.DeleteFunc(addresses(24), func(a netip.Addr) bool { return where(a) != 0 })[:3] // as many as its queue takes
	h.hang(0)
	var wait sync.WaitGroup
	wait.Go(func() { h.connectAndGreet(all) })
	h.eventually("all connections in the queue of the member", func() error {
		if n := h.slots()[0].Sessions; n != len(all) {
			return fmt.Errorf("%d of %d", n, len(all))
		}
		return nil
	})
	h.kill(0)
	time.Sleep(300 * time.Millisecond)
	if r := h.slots()[0].Room; r.Connections > 0 {
		t.Errorf("%d SYNs came to the room", r.Connections)
	}
	h.recording(0)
	h.ready(0, 1)
	wait.Wait()
}

// connectAndGreet opens a connection from each address, sends a line, and expects an answer.
func (h *host) connectAndGreet(all []netip.Addr) {
	h.fromDevices(all, func(a netip.Addr) {
		d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(a, 0)), Timeout: patience}
		c, err := d.Dial("tcp", target(a, bmpPort).String())
		if err != nil {
			h.Errorf("%v: %v", a, err)
			return
		}
		defer c.Close()
		if _, err := c.Write([]byte("hello\n")); err != nil {
			h.Errorf("%v: %v", a, err)
		}
		_ = c.SetReadDeadline(time.Now().Add(patience))
		if _, err := bufio.NewReader(c).ReadString('\n'); err != nil {
			h.Errorf("%v: %v", a, err)
		}
	})
}

// TestTakeover starts successors of a member under traffic. No datagram is lost or overtakes another one, connections are
// closed and return to the successor, and the former member may exit at any time.
func TestTakeover(t *testing.T) {
	inBothModes(t, func(t *testing.T, mode config.Steering) {
		h := upRecording(t, mode, 2, "takeover: true")
		all := addresses(24)
		where := h.homes(2)
		open := h.connectAll(all)
		n := h.sendNumbered(all)
		former := h.members[0]
		for range 3 {
			time.Sleep(300 * time.Millisecond)
			former = h.members[0]
			h.successor(0)
			h.ready(0, 1)
			if s := h.service(); len(s.Formers) == 0 || s.Formers[len(s.Formers)-1].Slot != 0 ||
				!strings.Contains(strings.Join(s.Notes, "\n"), fmt.Sprintf("process %d was the member of slot 0", former.Pid())) {
				t.Errorf("formers: %+v, notes %q", s.Formers, s.Notes)
			}
		}
		h.eventually("the connections of slot 0 to be closed", func() error {
			for a, alive := range open.alive() {
				if alive != (where(a) == 1) {
					return fmt.Errorf("%v: %v", a, alive)
				}
			}
			return nil
		})
		time.Sleep(300 * time.Millisecond)
		h.must(former.Signal(unix.SIGKILL))
		<-former.Done()
		time.Sleep(300 * time.Millisecond)
		n.end(where)
		h.connectAndGreet(all)
		// The successor exits: the processes before it are still there, and one gets the slot back.
		h.must(h.members[0].Signal(unix.SIGKILL))
		<-h.members[0].Done()
		h.eventually("a former member to return", func() error {
			if s := h.slots()[0]; !s.Ready {
				return fmt.Errorf("%+v", s)
			}
			return nil
		})
	})
}

// TestTakeoverPlanned checks that plan says what becomes of a process that waits for an occupied slot, before a policy with
// takeover gives the slot to it.
func TestTakeoverPlanned(t *testing.T) {
	inBothModes(t, func(t *testing.T, mode config.Steering) {
		h := upRecording(t, mode, 1, "takeover: false")
		h.successor(0)
		h.eventually("a process that waits", func() error {
			if waiting := h.service().Waiting; len(waiting) != 1 || waiting[0].PID != h.members[0].Pid() {
				return fmt.Errorf("%+v", waiting)
			}
			return nil
		})
		h.setPolicy(1, "takeover: true")
		h.plans("takeover: false -> true", "processes that wait for an occupied slot take the slot over, which closes its sessions")
		h.show(new(any), "apply")
		h.ready(0)
		if s := h.service(); len(s.Formers) != 1 || len(s.Waiting) != 0 {
			t.Errorf("%+v", s)
		}
	})
}

// plans checks that the policy file makes one change.
func (h *host) plans(what, effect string) {
	h.Helper()
	var plan api.Plan
	h.show(&plan, "plan")
	if len(plan.Changes) != 1 || plan.Changes[0].What != what || plan.Changes[0].Effect != effect {
		h.Errorf("plan: %+v, want %s: %s", plan.Changes, what, effect)
	}
}

// successor starts another process for a slot.
func (h *host) successor(slot int) {
	h.Helper()
	h.ports += 10
	h.recording(slot)
}

// sendMany sends datagrams from a device, and ignores that they are refused.
func (h *host) sendMany(from netip.Addr, to netip.AddrPort, n int) {
	h.Helper()
	h.must(h.devices.Do(func() error {
		c, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(from, 0)))
		if err != nil {
			return err
		}
		defer c.Close()
		for range n {
			if _, err := c.WriteToUDPAddrPort([]byte("?"), to); err != nil {
				return err
			}
		}
		return nil
	}))
}

// TestWaitingRoomStarting gives a slot a member that goes on with its start when its sockets are open, as nfacctd does: no
// connection reaches the member before its first thread waits.
func TestWaitingRoomStarting(t *testing.T) {
	inBothModes(t, func(t *testing.T, mode config.Steering) {
		h := upRecording(t, mode, 1, "when_empty: {wait: 20s}")
		all := addresses(12)
		h.kill(0)
		var wait sync.WaitGroup
		wait.Go(func() { h.connectAndGreet(all) })
		time.Sleep(300 * time.Millisecond)
		spec := h.spec(0)
		spec.Records, spec.Starts = true, 300*time.Millisecond
		h.startReceiver("receiver-0", spec)
		h.ready(0)
		wait.Wait()
		for _, a := range all {
			h.eventually(fmt.Sprintf("the connection of %v", a), func() error {
				h.mu.Lock()
				defer h.mu.Unlock()
				if got := h.texts[arrival{0, "tcp", a}]; !slices.Equal(got, []string{"hello"}) {
					return fmt.Errorf("%v", got)
				}
				return nil
			})
		}
	})
}

// TestWaitingRoomDeaf gives a slot a member that reads nothing. When its time is over, the slot is ready, and what the member
// has not received is lost, and counted.
func TestWaitingRoomDeaf(t *testing.T) {
	inBothModes(t, func(t *testing.T, mode config.Steering) {
		const sent = 1000
		h := upRecording(t, mode, 1, "when_empty: {wait: 10s}")
		device := addresses(1)
		h.kill(0)
		h.sendMany(device[0], target(device[0], ipfixPort), sent)
		spec := h.spec(0)
		spec.Deaf = true
		h.startReceiver("receiver-0", spec)
		h.ready(0)
		if r := h.slots()[0].Room; r.Lost == 0 || r.Replayed == 0 || r.Lost+r.Replayed != sent {
			t.Errorf("%d datagrams: %+v", sent, r)
		}
	})
}

// TestWaitingRoomEnds applies a policy without a waiting room while a slot is filling, whose member reads nothing: the slot is ready
// at once, not at the end of the wait.
func TestWaitingRoomEnds(t *testing.T) {
	inBothModes(t, func(t *testing.T, mode config.Steering) {
		const sent = 1000
		h := upRecording(t, mode, 1, "when_empty: {wait: 1h}")
		device := addresses(1)
		h.kill(0)
		h.sendMany(device[0], target(device[0], ipfixPort), sent)
		spec := h.spec(0)
		spec.Deaf = true
		h.startReceiver("receiver-0", spec)
		h.eventually("a slot that fills", func() error {
			if r := h.slots()[0].Room; !r.Filling || r.Replayed == 0 {
				return fmt.Errorf("%+v", r)
			}
			return nil
		})
		h.setPolicy(1, "when_empty: reject")
		h.show(new(any), "apply")
		h.ready(0)
		h.kill(0)
		h.recording(0)
		h.ready(0)
		h.lands("after the change", device, func(netip.Addr) int { return 0 })
	})
}

// TestWaitingRoomPolicy changes the policy while datagrams wait: without a waiting room they are discarded, and counted. A room
// that is opened again works.
func TestWaitingRoomPolicy(t *testing.T) {
	inBothModes(t, func(t *testing.T, mode config.Steering) {
		h := upRecording(t, mode, 1, "when_empty: {wait: 60s}")
		device := addresses(1)
		h.kill(0)
		h.sendMany(device[0], target(device[0], ipfixPort), 50)
		h.eventually("a note about the datagrams", func() error { // when the agent has noticed the exit of the member
			if notes := h.service().Notes; len(notes) != 1 || !regexp.MustCompile(`^slot 0 waits for its next member, for another \S+: 50 datagrams wait$`).MatchString(notes[0]) {
				return fmt.Errorf("%q", notes)
			}
			return nil
		})
		if out, stderr, code := h.cli("slot", "set", "0", "maint"); code != 0 {
			t.Error(out, stderr)
		}
		if room := h.slots()[0].Room; room.Waiting != 0 || room.Lost != 50 {
			t.Errorf("in maint: %+v", room)
		}
		if out, stderr, code := h.cli("slot", "set", "0", "ready"); code != 0 {
			t.Error(out, stderr)
		}
		h.sendMany(device[0], target(device[0], ipfixPort), 50)
		h.setPolicy(1, "when_empty: reject")
		if out, _, _ := h.cli("plan"); !strings.Contains(out, "50 datagrams that wait are discarded") {
			t.Errorf("plan: %s", out)
		}
		apply := func(line string) {
			h.setPolicy(1, line)
			h.show(new(any), "apply")
		}
		apply("when_empty: reject")
		h.lands("reject", device, nowhere)
		apply("when_empty: {wait: 60s}")
		if r := h.slots()[0].Room; r.Waiting != 0 || r.Lost != 100 {
			t.Errorf("after reject: %+v", r)
		}
		// The first wait of the slot begins with the new policy.
		h.sendMany(device[0], target(device[0], ipfixPort), 20)
		h.recording(0)
		h.ready(0)
		h.eventually("the datagrams of the second room", func() error {
			if got := h.datagramsOf(device[0]); got != 20 {
				return fmt.Errorf("%d", got)
			}
			return nil
		})
	})
}

// TestWaitingRoomPort floods the port that a waiting room has with steering by sk_lookup, from another host. Nothing of that
// occupies the room.
func TestWaitingRoomPort(t *testing.T) {
	h := upRecording(t, config.Lookup, 1, "when_empty: {wait: 60s}")
	device := addresses(1)
	open := func() (ports []uint16, queued int) {
		h.Helper()
		h.must(h.collectors.Do(func() error {
			table, err := os.ReadFile("/proc/thread-self/net/udp6")
			if err != nil {
				return err
			}
			for line := range strings.Lines(string(table)) {
				var port, tx, rx int
				if fields := strings.Fields(line); len(fields) > 4 {
					_, local, _ := strings.Cut(fields[1], ":")
					if _, err := fmt.Sscanf(local, "%x", &port); err != nil {
						continue // the heading
					}
					if _, err := fmt.Sscanf(fields[4], "%x:%x", &tx, &rx); err != nil {
						return err
					}
					ports, queued = append(ports, uint16(port)), queued+rx
				}
			}
			return nil
		}))
		return ports, queued
	}
	ports, _ := open()
	if len(ports) < 2 { // the member's and the room's
		t.Fatalf("ports %v", ports)
	}
	h.hang(0)
	_, before := open()
	for _, port := range ports {
		if port != h.spec(0).Sockets[1].Address.Port() {
			h.sendMany(device[0], netip.AddrPortFrom(target(device[0], 0).Addr(), port), 500)
		}
	}
	if _, after := open(); after != before {
		t.Errorf("%d bytes are queued, %d before", after, before)
	}
	h.must(h.members[0].Signal(unix.SIGCONT))
}

// TestWaitingRoomBounds checks the bounds of a waiting room, what slots shows, the end of the wait, and that what waits
// outlives the agent.
func TestWaitingRoomBounds(t *testing.T) {
	inBothModes(t, func(t *testing.T, mode config.Steering) {
		h := upRecording(t, mode, 1, "when_empty: {wait: 60s, datagrams: 100}")
		device := addresses(1)
		room := func() *api.RoomStatus { return h.slots()[0].Room }
		// The agent is dead when the member exits, and comes back. The packets wait.
		h.killAgent()
		h.kill(0)
		h.flood(device, 60)
		h.startAgent()
		if r := room(); r == nil || r.Until == nil || r.Waiting != 60 {
			t.Fatalf("the next agent: %+v", r)
		}
		h.recording(0)
		h.ready(0)
		h.eventually("the datagrams", func() error {
			if got := h.datagramsOf(device[0]); got != 60 {
				return fmt.Errorf("%d", got)
			}
			return nil
		})
		// Beyond the bound, datagrams are refused.
		h.setPolicy(1, "when_empty: {wait: 12s, datagrams: 100}")
		h.show(new(any), "apply")
		h.ready(0)
		h.kill(0)
		h.eventually("the slot to be empty", func() error {
			if s := h.slots()[0]; s.PID != 0 {
				return fmt.Errorf("%+v", s)
			}
			return nil
		})
		h.sendMany(device[0], target(device[0], ipfixPort), 250)
		r := room()
		if r.Waiting != 100 || r.Full != 150 || r.Until == nil {
			t.Errorf("a full room: %+v", r)
		}
		out, _, _ := h.cli("slots")
		if !strings.Contains(out, "waits") || !strings.Contains(out, "WAITING ROOM") {
			t.Errorf("slots: %s", out)
		}
		// After the wait, devices are refused again.
		h.eventually("the end of the wait", func() error {
			if r := room(); r.Until != nil || r.Lost != 100 || r.Waiting != 0 {
				return fmt.Errorf("%+v", r)
			}
			return nil
		})
		h.lands("after the wait", device, nowhere)
		if notes, want := h.service().Notes, "slot 0 has no member, and its wait is over: its devices are refused"; !slices.Contains(notes, want) {
			t.Errorf("notes %q, want %q", notes, want)
		}
		h.recording(0)
		h.ready(0)
		h.lands("with a member again", device, func(netip.Addr) int { return 0 })
	})
}

// datagramsOf returns the number of datagrams that members have received from a device.
func (h *host) datagramsOf(device netip.Addr) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.got[arrival{0, "udp", device}]
}

// TestWaitingRoomAgents restarts the agent while the datagrams of two slots wait, also right after a member has returned.
// The datagrams of the other slot stay.
func TestWaitingRoomAgents(t *testing.T) {
	inBothModes(t, func(t *testing.T, mode config.Steering) {
		h := upRecording(t, mode, 2, "when_empty: {wait: 60s}")
		all, where := addresses(20), h.homes(2)
		h.kill(0, 1)
		n := h.sendNumbered(all)
		restart := func(signal unix.Signal) {
			h.must(h.agent.Signal(signal))
			<-h.agent.Done()
			h.startAgent()
		}
		time.Sleep(200 * time.Millisecond)
		restart(unix.SIGKILL)
		time.Sleep(200 * time.Millisecond)
		restart(unix.SIGTERM)
		restart(unix.SIGKILL)
		n.finish()
		h.recording(0)
		h.ready(0)
		restart(unix.SIGTERM)
		h.recording(1)
		h.ready(0, 1)
		n.end(where)
	})
}
