// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/config"
)

// killAgent sends SIGKILL to the agent. The keeper keeps running.
func (h *host) killAgent() {
	h.Helper()
	h.must(h.agent.Kill())
}

// killKeeper sends SIGKILL to the keeper while no agent runs that could replace it.
func (h *host) killKeeper(pid int) {
	h.Helper()
	h.endKeeper(pid, unix.SIGKILL)
}

// endKeeper sends the keeper a signal and waits until it exits.
func (h *host) endKeeper(pid int, signal unix.Signal) {
	h.Helper()
	if h.mode == config.Lookup {
		return // there is no keeper
	}
	h.eventually("the keeper to have set its name", func() error { // at its start
		name, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
		if err == nil && string(name) != "sockeye\n" {
			err = fmt.Errorf("ss -p shows the keeper as %q", name)
		}
		return err
	})
	fd, err := unix.PidfdOpen(pid, 0)
	h.must(err)
	defer unix.Close(fd)
	h.must(unix.PidfdSendSignal(fd, signal, nil, 0))
	if !readable(fd) {
		h.Fatalf("the keeper does not exit on signal %v", signal)
	}
}

// TestAgentKilled checks that steering continues after the agent is killed. Traffic of dead members is rejected, also
// after their restart, until a new agent adopts the pins.
func TestAgentKilled(t *testing.T) {
	inBothModes(t, func(t *testing.T, mode config.Steering) { up(t, mode, 4).agentKilled() })
}

func (h *host) agentKilled() {
	h.Helper()
	home := h.homes(4)
	all := addresses(100)
	open := h.connectAll(all)
	before := h.service()

	traffic := h.startTraffic(all)
	h.more(traffic, 100)
	h.killAgent()
	h.more(traffic, 300)
	for a, landed := range traffic.end() {
		for l, n := range landed {
			if l != (landing{home(a), home(a)}) {
				h.Errorf("after the agent was killed: %v: %v, %d times; home slot %d", a, l, n, home(a))
			}
		}
	}
	for a, alive := range open.alive() {
		if !alive {
			h.Errorf("connection of %v is broken", a)
		}
	}
	h.kill(1)
	h.lands("no agent, a member dead", all, home.but(1))
	if h.isolated { // sockeye run starts no member without an agent
		h.kill(0, 2, 3)
		h.lands("no agent, all members dead", all, nowhere)
		h.startAgent()
		h.start(rand.Perm(4)...)
	} else {
		h.start(1)
		h.open(1)
		h.lands("no agent, a member restarted", all, home.but(1))
		h.kill(0, 1, 2, 3)
		h.lands("no agent, all members dead", all, nowhere)
		h.start(rand.Perm(4)...)
		h.open(0, 1, 2, 3)
		h.lands("no agent, all members restarted", all, nowhere)
		h.startAgent()
	}
	h.ready(0, 1, 2, 3)
	h.lands("a new agent", all, home)
	after := h.service()
	if after.Nonce != before.Nonce || after.Keeper != before.Keeper || !after.PortsSteered {
		h.Errorf("the new agent did not adopt the members: before %+v, after %+v", before, after)
	}
	if s, err := h.askStatus(); err != nil || s.Starts != 2 {
		h.Errorf("%d starts, %v", s.Starts, err)
	}

	// Members are adopted and not registered again: their socket cookies and connections do not change.
	open = h.connectAll(all)
	slots := h.slots()
	traffic = h.startTraffic(all)
	h.more(traffic, 50)
	h.killAgent()
	h.startAgent()
	h.ready(0, 1, 2, 3)
	h.more(traffic, 100)
	for a, landed := range traffic.end() {
		for l, n := range landed {
			if l != (landing{home(a), home(a)}) {
				h.Errorf("after a new agent started: %v: %v, %d times; home slot %d", a, l, n, home(a))
			}
		}
	}
	for i, s := range h.slots() {
		for k, socket := range s.Sockets {
			if socket.Cookie != slots[i].Sockets[k].Cookie {
				h.Errorf("slot %d: %+v, before %+v", i, s.Sockets, slots[i].Sockets)
			}
		}
	}
	for a, alive := range open.alive() {
		if !alive {
			h.Errorf("connection of %v is broken", a)
		}
	}
	h.nothingMisplaced(home, 100)
}

// TestAgentAndKeeperKilled checks that the program stays in the reuseport group as long as one member exists.
func TestAgentAndKeeperKilled(t *testing.T) {
	inBothModes(t, func(t *testing.T, mode config.Steering) {
		h := up(t, mode, 4)
		home := h.homes(4)
		all := addresses(100)
		before := h.service()
		h.killAgent()
		h.killKeeper(before.Keeper)
		h.lands("no agent, no keeper", all, home)
		for _, slot := range rand.Perm(4)[:3] {
			h.kill(slot)
			h.start(slot)
			h.open(slot)
		}
		h.nothingMisplaced(home, 200)
		h.startAgent()
		h.ready(0, 1, 2, 3)
		h.lands("a new agent", all, home)
		after := h.service()
		if after.Nonce != before.Nonce || !after.PortsSteered || mode == config.Reuseport && (after.Keeper == 0 || after.Keeper == before.Keeper) {
			t.Errorf("before %+v, after %+v", before, after)
		}
		// The new keeper has sockets in the group.
		h.killAgent()
		h.kill(0, 1, 2, 3)
		h.start(0, 1, 2, 3)
		h.open(0, 1, 2, 3)
		h.lands("no agent, all members restarted", all, nowhere)
		h.startAgent()
		h.ready(0, 1, 2, 3)
		h.nothingMisplaced(home, 400)

		// The agent replaces a keeper that was terminated. systemd sends SIGTERM at shutdown.
		if mode == config.Reuseport {
			keeper := h.service().Keeper
			h.endKeeper(keeper, unix.SIGTERM)
			h.eventually("another keeper", func() error {
				if s := h.service(); s.Keeper == 0 || s.Keeper == keeper || !s.PortsSteered {
					return fmt.Errorf("%+v", s)
				}
				return nil
			})
		}
	})
}

// allKilled returns a host on which the agent, the keeper and all four members were killed. The members are the homes of
// some addresses.
func allKilled(t *testing.T, mode config.Steering) (h *host, home func(netip.Addr) int, all []netip.Addr) {
	h = up(t, mode, 4)
	home, all = h.homes(4), addresses(200)
	keeper := h.service().Keeper
	h.killAgent()
	h.killKeeper(keeper)
	h.kill(0, 1, 2, 3)
	return h, home, all
}

// TestAllKilled shows the limit of steering without an agent: agent, keeper and all members are killed. With reuseport,
// the group and its program no longer exist, and the kernel's hash distributes traffic to new members until an agent
// starts. With lookup, the link stays attached.
func TestAllKilled(t *testing.T) {
	inBothModes(t, func(t *testing.T, mode config.Steering) {
		h, home, all := allKilled(t, mode)
		h.lands("all are dead", all, nowhere)
		h.start(0, 1, 2, 3)
		h.open(0, 1, 2, 3)
		found := h.sweep(all)
		apart := 0
		for _, l := range found {
			if l.tcp != l.udp {
				apart++
			}
			if mode == config.Lookup && l != (landing{refused, refused}) {
				t.Errorf("without an agent: %v", l)
			}
		}
		if mode == config.Reuseport && apart < len(all)/2 {
			t.Errorf("the kernel's hash split only %d of %d devices: the limit may no longer exist", apart, len(all))
		}
		var open sessions
		var at map[netip.Addr]int
		if mode == config.Reuseport {
			open, at = h.connectSomewhere(all)
		}
		h.startAgent()
		h.ready(0, 1, 2, 3)
		h.eventually("connections of other members' devices, and no others, are reset", func() error {
			for a, alive := range open.alive() {
				if alive != (at[a] == home(a)) {
					return fmt.Errorf("%v: alive %t in slot %d, home %d", a, alive, at[a], home(a))
				}
			}
			return nil
		})
		h.forget()
		h.lands("a new agent", all, home)
		h.nothingMisplaced(home, 400)
	})
}

// TestAllKilledAgentFirst checks that no device is split if the agent starts before the members bind, because the agent
// holds the ports.
func TestAllKilledAgentFirst(t *testing.T) {
	inBothModes(t, func(t *testing.T, mode config.Steering) {
		h, home, all := allKilled(t, mode)
		h.startAgent()
		h.start(0, 1, 2, 3)
		h.open(0, 1, 2, 3)
		for a, l := range h.sweep(all) {
			if l.tcp >= 0 && l.tcp != home(a) || l.udp >= 0 && l.udp != home(a) {
				t.Errorf("%v: %v, home is %d", a, l, home(a))
			}
		}
		h.ready(0, 1, 2, 3)
		h.lands("all are back", all, home)
		h.nothingMisplaced(home, 400)
	})
}

// TestAgentKilledDuringRegistration kills the agent at random times while members start.
func TestAgentKilledDuringRegistration(t *testing.T) {
	inBothModes(t, func(t *testing.T, mode config.Steering) { up(t, mode, 4).agentKilledDuringRegistration() })
}

func (h *host) agentKilledDuringRegistration() {
	h.Helper()
	home := h.homes(4)
	all := addresses(40)
	h.killAgent()
	for range 10 {
		if h.isolated { // sockeye run exits if no agent runs
			for _, m := range h.members {
				h.must(m.Kill())
			}
			h.startAgent()
		} else {
			h.kill(0, 1, 2, 3)
			h.launchAgent()
		}
		h.start(rand.Perm(4)...)
		instant := time.NewTimer(time.Duration(rand.IntN(120)) * time.Millisecond)
		<-instant.C
		h.killAgent()
		for a, l := range h.sweep(all) {
			if l.tcp != l.udp && (l.tcp >= 0 || l.udp >= 0) || l.tcp >= 0 && l.tcp != home(a) {
				h.Errorf("%v: %v, home is %d", a, l, home(a))
			}
		}
	}
	h.startAgent()
	if h.isolated {
		h.eventually("members", func() (err error) {
			for _, s := range h.slots() {
				if m := h.members[s.Slot]; !m.Running() {
					h.start(s.Slot)
				}
				if !s.Ready {
					err = fmt.Errorf("slot %d is not ready", s.Slot)
				}
			}
			return err
		})
	}
	h.ready(0, 1, 2, 3)
	h.lands("at the end", all, home)
	h.nothingMisplaced(home, 2*len(all))
	if s := h.service(); !s.PortsSteered || len(s.Waiting) > 0 {
		h.Errorf("%+v", s)
	}
}

// TestUserUnknown checks a service without a user and rules. The agent does not hold the ports before root registers
// the first member, and reports this. It uses the user of the first member.
func TestUserUnknown(t *testing.T) {
	t.Parallel()
	h := newHost(t, config.Reuseport)
	h.setPolicy(2, "track_devices: off", "members: []")
	text, err := os.ReadFile(h.policyPath())
	h.must(err)
	h.must(os.WriteFile(h.policyPath(), []byte(strings.Replace(string(text), "    user: root\n", "", 1)), 0o644))
	h.startAgent()
	if s := h.service(); s.PortsSteered || s.Keeper != 0 || !strings.Contains(s.Problem, "user") || !strings.Contains(s.Hint, "user") {
		t.Errorf("before the first member: %+v", s)
	}
	home := h.homes(2)
	all := addresses(40)
	register := func(slots ...int) {
		t.Helper()
		h.open(slots...)
		for _, slot := range slots {
			if _, errs, code := h.cli("register", "--slot", fmt.Sprint(slot), "--pid", fmt.Sprint(h.members[slot].Pid())); code != 0 {
				t.Fatalf("register slot %d: exit code %d: %s", slot, code, errs)
			}
		}
	}
	h.start(0)
	register(0)
	h.ready(0)
	if s := h.service(); !s.PortsSteered || s.Keeper == 0 || s.Problem != "" {
		t.Errorf("after the first member: %+v", s)
	}
	h.start(1)
	register(1)
	h.ready(0, 1)
	h.lands("two members", all, home)
	h.killAgent()
	h.kill(0, 1)
	h.start(0, 1)
	h.open(0, 1)
	h.lands("no agent, all members restarted", all, nowhere)
	h.startAgent()
	register(0, 1)
	h.ready(0, 1)
	h.lands("a new agent", all, home)
	if s := h.service(); !s.PortsSteered {
		t.Errorf("with a new agent: %+v", s)
	}
	if out, _, code := h.cli("devices"); code != 0 || strings.Contains(out, all[0].String()) {
		t.Errorf("sockeye devices without tracking: exit code %d: %s", code, out)
	}
	h.nothingMisplaced(home, 160)
}

// TestInheritedSockets checks that the slot of a dead member closes even if a child process has inherited its sockets.
func TestInheritedSockets(t *testing.T) {
	inBothModes(t, func(t *testing.T, mode config.Steering) {
		h := up(t, mode, 2)
		home := h.homes(2)
		all := addresses(40)
		fmt.Fprintln(h.members[0].stdin, "fork")
		h.eventually("a child", func() error {
			pids, err := h.members[0].PIDs()
			if err == nil && len(pids) < 2 {
				err = fmt.Errorf("only the processes %v", pids)
			}
			return err
		})
		h.kill(0)
		h.ready(1)
		h.lands("its child has the sockets", all, home.but(0))
		if mode == config.Reuseport { // with lookup the child is on the member's own ports
			h.start(0)
			h.ready(0, 1)
			h.lands("it is back", all, home)
		}
		h.nothingMisplaced(home, 20)
	})
}

// TestMigrateReq checks that net.ipv4.tcp_migrate_req does not move connections to another slot. With this sysctl, the
// kernel moves connections in the accept queue of a closed listener to another listener of the group.
func TestMigrateReq(t *testing.T) {
	inBothModes(t, func(t *testing.T, mode config.Steering) {
		h := newHost(t, mode)
		h.must(h.collectors.Sysctl("ipv4.tcp_migrate_req", "1"))
		h.setPolicy(4)
		h.startAgent()
		h.start(0, 1, 2, 3)
		h.ready(0, 1, 2, 3)
		home := h.homes(4)
		all := addresses(100)
		for slot := range 4 {
			mine := slices.DeleteFunc(slices.Clone(all), func(a netip.Addr) bool { return home(a) != slot })
			h.hang(slot)
			queued, failed := h.rush(mine, noGreeting)
			if len(failed) > 0 {
				t.Errorf("slot %d hangs: %v", slot, failed)
			}
			h.kill(slot)
			for a, fd := range queued {
				if slot := said(fd); slot != broken {
					t.Errorf("connection of %v, which was in the accept queue of slot %d: %v", a, home(a), landing{tcp: slot})
				}
			}
			h.start(slot)
			h.ready(0, 1, 2, 3)
		}
		traffic := h.startTrafficThatWaits(all, 300*time.Millisecond)
		for range 8 {
			slot := rand.IntN(4)
			h.kill(slot)
			h.start(slot)
			h.more(traffic, 30)
		}
		traffic.end()
		h.nothingMisplaced(home, 200)
	})
}

// TestQueuedAtStandby checks that the connections which the kernel gave to the standby member, because their member exited
// before it accepted them, are closed as soon as their slot has a member again.
func TestQueuedAtStandby(t *testing.T) {
	h := newHost(t, config.Reuseport)
	h.setPolicy(2, "when_empty: {standby: 1}")
	h.startAgent()
	h.start(0, 1)
	h.ready(0, 1)
	home := h.homes(2)
	mine := slices.DeleteFunc(addresses(20), func(a netip.Addr) bool { return home(a) != 0 })
	for round := range 3 {
		h.hang(0)
		queued, failed := h.rush(mine, noGreeting)
		if len(failed) > 0 {
			t.Errorf("slot 0 hangs: %v", failed)
		}
		h.kill(0)
		for a, fd := range queued {
			if slot := said(fd); slot != 1 {
				t.Errorf("connection of %v, which was in the accept queue of slot 0: %v", a, landing{tcp: slot})
			}
		}
		h.start(0)
		h.ready(0, 1)
		// The agent closes them before it says that the slot is ready, and not a second later.
		time.Sleep(200 * time.Millisecond)
		for a, fd := range queued {
			if _, err := unix.Read(fd, make([]byte, 16)); !errors.Is(err, unix.ECONNRESET) {
				t.Errorf("round %d: the connection of %v is open at the standby member: %v", round, a, err)
			}
		}
	}
}
