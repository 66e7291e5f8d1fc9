// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/config"
)

// top starts sockeye top in a terminal.
func (h *host) top(width, height int, env []string, args ...string) *terminal {
	h.Helper()
	return startIn(h.T, width, height, env, append([]string{os.Getenv(binaryEnv), "--run-dir", h.dir, "top"}, args...)...)
}

// on waits until texts are on the screen.
func (h *host) on(s *terminal, texts ...string) {
	h.Helper()
	h.eventually(fmt.Sprintf("%q", texts), func() error {
		return s.lacks(texts...)
	})
}

// off waits until a text is no longer on the screen.
func (h *host) off(s *terminal, text string) {
	h.Helper()
	h.eventually(fmt.Sprintf("no %q", text), func() error {
		if s.lacks(text) == nil {
			return fmt.Errorf("the screen still has %q:\n%s", text, s.text())
		}
		return nil
	})
}

// ends waits for the end of the program, which leaves the terminal as it was.
func (h *host) ends(s *terminal) {
	h.Helper()
	done := make(chan error, 1)
	go func() { done <- s.cmd.Wait() }()
	select {
	case err := <-done:
		if err != nil {
			h.Errorf("the end of top: %v", err)
		}
	case <-time.After(patience):
		h.Fatalf("top does not end:\n%s", s.text())
	}
	if after := s.settings(); after != s.before {
		h.Errorf("the settings of the terminal are %+v, before %+v", after, s.before)
	}
	h.eventually("the end of the output", func() error {
		out := s.output()
		for on, off := range map[string]string{"\x1b[?1049h": "\x1b[?1049l", "\x1b[?25l": "\x1b[?25h"} {
			if strings.LastIndex(out, on) < 0 || strings.LastIndex(out, off) < strings.LastIndex(out, on) {
				return fmt.Errorf("%q is not undone by %q", on, off)
			}
		}
		return nil
	})
}

// row returns the fields of the row of a slot on the screen: SLOT STATE DEVS SESS DGRAM/s and so on, and the process
// last.
func row(screen string, slot int) []string {
	for line := range strings.Lines(screen) {
		fields := strings.Fields(strings.TrimPrefix(line, ">"))
		if len(fields) > 10 && fields[0] == fmt.Sprint(slot) {
			return fields
		}
	}
	return nil
}

// agrees compares the slots on the screen with those that the other commands show.
func (h *host) agrees(s *terminal) {
	h.Helper()
	h.eventually("the numbers of the slots", func() error {
		var slots []api.SlotStatus
		var devices []api.DeviceStatus
		var status api.Status
		h.show(&slots, "slots")
		h.show(&devices, "devices")
		h.show(&status, "status")
		text := s.text()
		if want := fmt.Sprintf("%d of %d ready", status.Services[0].Ready, status.Services[0].Slots); !strings.Contains(text, want) {
			return fmt.Errorf("no %q:\n%s", want, text)
		}
		for _, v := range slots {
			n := 0
			for _, d := range devices {
				if d.Slot == v.Slot {
					n++
				}
			}
			want := []string{fmt.Sprint(v.Slot), v.State, fmt.Sprint(n), fmt.Sprint(v.Sessions)}
			got := row(text, v.Slot)
			if got == nil || strings.Join(got[:4], " ") != strings.Join(want, " ") {
				return fmt.Errorf("slot %d: %q, want %q:\n%s", v.Slot, got, want, text)
			}
			if pid := got[10]; pid != fmt.Sprint(v.PID) {
				return fmt.Errorf("slot %d: process %s, want %d", v.Slot, pid, v.PID)
			}
		}
		return nil
	})
}

// TestTop uses sockeye top as a person does, with members and devices.
func TestTop(t *testing.T) {
	h := up(t, config.Reuseport, 2)
	home := h.homes(2)
	all := addresses(20)
	h.connectAll(all)
	h.flood(all, 100)
	s := h.top(80, 24, nil)
	h.on(s, "telemetry  2 of 2 ready", "[1 slots (2)]  2 devices (20)", "? keys  q quit  tab list")
	h.agrees(s)
	if !color.MatchString(s.output()) {
		t.Error("the screen has no colors")
	}

	s.keys("\r")
	h.on(s, fmt.Sprintf("member        %d receiver-0", h.members[0].Pid()), "telemetry slot 0: member registered")
	s.keys("q")
	h.on(s, "SLOT STATE")

	// The rates are those of the datagrams that members receive.
	sending := make(chan struct{})
	sent := make(chan error, 1)
	go func() { sent <- h.stream(all, sending) }()
	h.eventually("rates", func() error {
		for slot := range 2 {
			if got := row(s.text(), slot); got == nil || got[4] == "0" {
				return fmt.Errorf("slot %d: %q", slot, got)
			}
		}
		return nil
	})

	// A device and its page.
	device := all[7]
	s.keys("2")
	h.on(s, "[2 devices (20)]", "ADDRESS")
	s.keys("/" + device.String())
	h.on(s, "filter: "+device.String()+"\n")
	s.keys("\r")
	h.on(s, "s sort")
	s.keys("\r")
	h.on(s, "device      "+device.String(), fmt.Sprintf("slot        %d, ready, member %d receiver-%d", home(device), h.members[home(device)].Pid(), home(device)), "sessions    1", "events")
	close(sending)
	h.must(<-sent)

	// A change needs the name.
	other := 1 - home(device)
	s.keys("m")
	h.on(s, "move "+device.String()+" from slot")
	s.keys(fmt.Sprint(other) + "\r")
	h.on(s, "its sessions elsewhere are closed", "esc: cancel")
	s.keys("yes\r")
	h.on(s, "nothing was changed")
	s.keys("m" + fmt.Sprint(other) + "\r")
	h.on(s, "its sessions elsewhere are closed", "esc: cancel")
	s.keys(device.String() + "\r")
	h.on(s, device.String()+" is pinned to slot")
	h.on(s, fmt.Sprintf("slot        %d, ready", other), " pinned")
	var where []api.WhereStatus
	h.show(&where, "where", device.String())
	if where[0].Slot != other || !where[0].Pinned {
		t.Errorf("%+v", where)
	}

	// So does a change of a slot.
	s.keys("q")
	h.on(s, "enter page")
	s.keys("\x1b")
	h.off(s, "filter: ")
	s.keys("1")
	h.on(s, "[1 slots (2)]")
	s.keys("d")
	h.on(s, "drain slot 0 of telemetry")
	s.keys("1\r")
	h.on(s, "nothing was changed")
	s.keys("d")
	h.on(s, "drain slot 0 of telemetry", "esc: cancel")
	s.keys("0\r")
	h.on(s, "slot 0 is set to drain")
	h.eventually("the slot to drain", func() error {
		if state := h.slots()[0].State; state != "drain" {
			return errors.New(state)
		}
		return nil
	})
	s.keys("\r")
	h.on(s, "slot          0 of telemetry, drain")
	s.keys("d")
	h.on(s, "from drain to ready")
	s.keys("0\r")
	h.on(s, "slot 0 is set to ready", "slot          0 of telemetry, ready")
	s.keys("q")
	h.on(s, "SLOT STATE")

	// Another size.
	s.resize(200, 50)
	h.on(s, "BACKLOG UNREAD WAITING", fmt.Sprintf("%d receiver-1", h.members[1].Pid()))
	s.resize(10, 5)
	h.on(s, "SLOT STA…", "? keys")
	s.resize(80, 24)
	h.on(s, "SLOT STATE ", "[1 slots (2)]  2 devices (20)")
	h.agrees(s)

	// Pause, and another agent.
	s.keys(" ")
	h.on(s, "PAUSED")
	s.keys(" ")
	h.off(s, "PAUSED")
	h.must(h.agent.Signal(unix.SIGKILL))
	<-h.agent.Done()
	h.on(s, "no agent, tried again each second", "telemetry  2 of 2 ready")
	h.startAgent()
	h.off(s, "no agent")
	h.agrees(s)
	s.keys("q")
	h.ends(s)
}

// stream sends datagrams from all addresses until done is closed.
func (h *host) stream(all []netip.Addr, done <-chan struct{}) error {
	pace := time.NewTicker(20 * time.Millisecond)
	defer pace.Stop()
	for {
		select {
		case <-done:
			return nil
		case <-pace.C:
		}
		h.flood(all, len(all))
	}
}

var color = regexp.MustCompile(`\x1b\[[0-9;:]*[1-9][0-9;:]*m`)

// TestTopEnds checks that top ends without colors if they are not wanted, by a signal, and with its terminal.
func TestTopEnds(t *testing.T) {
	h := up(t, config.Reuseport, 1)
	h.refuse(2, []string{"the standard output is not a terminal", "hint: ", "--once"}, "top")
	s := h.top(80, 24, []string{"NO_COLOR=1"})
	h.on(s, "telemetry  1 of 1 ready")
	s.keys("2")
	h.on(s, "[2 devices")
	s.keys("?")
	h.on(s, "KEY              ACTION")
	h.must(s.cmd.Process.Signal(unix.SIGTERM))
	h.ends(s)
	if got := color.FindString(s.output()); got != "" {
		t.Errorf("with NO_COLOR: %q", got)
	}
	s = h.top(80, 24, nil)
	h.on(s, "telemetry  1 of 1 ready")
	s.keys("\x03")
	h.ends(s)
	s = h.top(80, 24, nil)
	h.on(s, "telemetry  1 of 1 ready")
	s.hangUp()
	_ = s.cmd.Wait() // the signal HUP ends top

	// Before the screen, errors are as those of other commands.
	s = h.top(80, 24, nil, "--service", "nosuch")
	h.on(s, `sockeye: there is no service "nosuch"`, "hint: the policy has telemetry")
	_ = s.cmd.Wait()
	if code := s.cmd.ProcessState.ExitCode(); code != 2 {
		t.Errorf("exit code %d", code)
	}
	s = h.top(80, 24, []string{"TERM=dumb"})
	h.on(s, "sockeye: the terminal cannot move the cursor (TERM is dumb)")
}

// TestTopReplay checks that top shows what the agent has recorded, also that of an agent before.
func TestTopReplay(t *testing.T) {
	h := up(t, config.Reuseport, 1)
	h.connectAll(addresses(3))
	h.recorded(1)
	h.must(h.agent.Signal(unix.SIGKILL))
	<-h.agent.Done()
	h.startAgent()
	h.recorded(2)
	s := h.top(80, 24, nil, "--replay")
	h.on(s, "REPLAY 1/", "at 10x", "q quit  space play  left/right step")
	s.keys("e")
	h.on(s, "1 of 1 ready", "[1 slots (1)]  2 devices (3)")
	s.keys("b")
	h.on(s, "REPLAY 1/")
	s.keys("d")
	h.on(s, "a replay changes nothing")
	s.keys("\x1b[C") // right
	h.on(s, "REPLAY 2/", "PAUSED")
	s.keys("q")
	h.ends(s)
}

// recorded waits until the agent has recorded a number of states of three sessions.
func (h *host) recorded(enough int) {
	h.Helper()
	h.eventually("recorded states", func() error {
		n := 0
		h.frames("1h", func(f *api.Frame) bool {
			if f.Services[0].Slots[0].Sessions == 3 {
				n++
			}
			return true
		})
		if n < enough {
			return fmt.Errorf("%d, want %d", n, enough)
		}
		return nil
	})
}

// frames passes frames to f until f returns false, or the stream ends. replay is the duration of a replay, or "".
func (h *host) frames(replay string, f func(*api.Frame) bool) {
	h.Helper()
	q := map[string][]string{}
	if replay != "" {
		q["replay"] = []string{replay}
	}
	ctx, cancel := context.WithTimeout(h.Context(), patience)
	defer cancel()
	stream, err := api.NewClient(api.SocketPath(h.dir)).Stream(ctx, "/v1/live", q)
	h.must(err)
	defer stream.Close()
	for {
		var frame api.Frame
		if err := stream.Next(&frame); err != nil {
			if replay == "" {
				h.Fatal(err)
			}
			return
		}
		if !f(&frame) {
			return
		}
	}
}

// TestTopCounts checks that the rates of all states add up to what was sent.
func TestTopCounts(t *testing.T) {
	inBothModes(t, func(t *testing.T, mode config.Steering) {
		h := newHost(t, mode)
		h.up(2)
		home := h.homes(2)
		all := addresses(10)
		h.connectAll(all[:4])
		h.flood(all, len(all))
		const sent = 400
		var want, slots [2]float64
		for _, a := range all {
			want[home(a)] += sent / float64(len(all))
		}
		var devices float64
		var last time.Time
		h.frames("", func(f *api.Frame) bool {
			v := &f.Services[0]
			if len(v.Devices) < len(all) {
				return true
			}
			// A client that is late misses states.
			if last.IsZero() || f.Time.Sub(last).Seconds() > f.Seconds+0.1 {
				last, slots, devices = f.Time, [2]float64{}, 0
				h.flood(all, sent)
				return true
			}
			last = f.Time
			for slot := range slots {
				slots[slot] += v.Slots[slot].Datagrams * f.Seconds
			}
			for i := range v.Devices {
				devices += v.Devices[i].Datagrams * f.Seconds
			}
			return math.Round(slots[0]+slots[1]) < sent || math.Round(devices) < sent
		})
		for slot := range want {
			if got := math.Round(slots[slot]); got != want[slot] {
				t.Errorf("slot %d has received %v datagrams, want %v", slot, got, want[slot])
			}
		}
		if math.Round(devices) != sent {
			t.Errorf("the devices have sent %v datagrams, want %d", devices, sent)
		}
	})
}

// TestTopStuck checks that a member that does not read has closed windows, and that the connections are listed.
func TestTopStuck(t *testing.T) {
	h := up(t, config.Reuseport, 2)
	home := h.homes(2)
	device := addresses(1)[0]
	open := h.connectAll([]netip.Addr{device})[device]
	slot := home(device)
	h.hang(slot)
	written := make(chan error, 1)
	go func() {
		_, err := open.Write(make([]byte, 64<<20)) // more than both buffers
		written <- err
	}()
	s := h.top(140, 24, nil)
	h.on(s, "4 stuck (1)")
	h.must(open.SetWriteDeadline(time.Now()))
	if err := <-written; !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatal(err)
	}
	const zeroWindows = 13 // the column, at this width
	for at, want := range map[int]string{slot: "1", 1 - slot: "0"} {
		h.eventually("the row of a slot", func() error { // the screen comes in pieces
			if got := row(s.text(), at); got == nil || got[3] != want || got[zeroWindows] != want {
				return fmt.Errorf("%q", got)
			}
			return nil
		})
	}
	s.keys("4")
	h.on(s, "[4 stuck (1)]", "zero_window", device.String(), fmt.Sprint(h.members[slot].Pid()))
	var frame api.Frame
	h.show(&frame, "top")
	v := frame.Services[0].Slots[slot]
	if len(frame.Stuck) != 1 || v.ZeroWindows != 1 || frame.Services[0].Slots[1-slot].ZeroWindows != 0 || frame.Stuck[0].Bytes != v.Unread || v.Unread < 4096 || frame.Stuck[0].Remote.Addr() != device {
		t.Errorf("%+v, %+v", v, frame.Stuck)
	}
	// A status has the note, too.
	h.eventually("note of closed windows", func() error {
		want := fmt.Sprintf("the member of slot %d does not read from 1 connection: the receive windows are closed", slot)
		if notes := h.service().Notes; !slices.Contains(notes, want) {
			return fmt.Errorf("notes %q", notes)
		}
		return nil
	})
	s.keys("1")
	h.on(s, "[1 slots (2)]")
	s.keys("/receiver-" + fmt.Sprint(slot) + "\r")
	h.on(s, "s sort")
	s.keys("\r")
	h.on(s, "zero windows  1")
	// A member that reads again, and whose answers the device reads, is not listed.
	go func() { _, _ = io.Copy(io.Discard, open) }()
	h.must(h.members[slot].Signal(unix.SIGCONT))
	h.on(s, "zero windows  0", "4 stuck (0)")
	s.keys("\x03")
	h.ends(s)
}

// TestTopGroups checks the tuned and traced groups, and the lag of a traced member that does not read.
func TestTopGroups(t *testing.T) {
	h := newHost(t, config.Reuseport)
	h.setPolicy(2)
	text, err := os.ReadFile(h.policyPath())
	h.must(err)
	h.replaceFile(h.policyPath(), string(text)+fmt.Sprintf(`tune:
  - {name: bulk, cgroup: /%[1]s, set: {nodelay: true}}
trace:
  - {name: arrivals, cgroup: /%[1]s, messages: 1/1, stages: [rx_stack, reader], protocols: [tcp, udp], group_by: cgroup}
`, h.lab.CgroupPath()))
	h.startAgent()
	h.start(0, 1)
	h.ready(0, 1)
	all := addresses(10)
	h.connectAll(all)
	s := h.top(120, 24, nil)
	h.on(s, "[1 slots (2)]")
	if s.lacks(" LAG ") == nil {
		t.Error("there is a lag before the first measurement")
	}
	const stopped = 0
	h.hang(stopped)
	h.flood(all, 100)
	var frame api.Frame
	h.eventually("the lag of the stopped member", func() error {
		h.show(&frame, "top")
		for _, v := range frame.Services[0].Slots {
			if lag := v.ReaderLag; lag == nil || (*lag > int64(time.Second)) != (v.Slot == stopped) {
				return fmt.Errorf("slot %d: %v", v.Slot, lag)
			}
		}
		return nil
	})
	h.on(s, " LAG MEMBER")
	s.keys("3")
	h.on(s, "[3 groups (3)]")
	h.on(s, " bulk\n", " arrivals ")
	s.keys("/bulk\r")
	h.off(s, " arrivals ")
	s.keys("q")
	h.ends(s)
}
