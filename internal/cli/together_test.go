// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/api"
)

// together is a service with members and devices that connect after the agent has started.
type together struct {
	*host
	t        *testing.T
	steering string
	policy   string
	ends     map[int]func()
	devices  []*early
}

// steered starts an agent, members in slots, and devices with IPv4 and IPv6 addresses. extra is added to the service.
func steered(t *testing.T, steering, extra string, members ...int) *together {
	t.Helper()
	policy := strings.NewReplacer("STEERING", steering, "ADDRESS", "[::]", "    on_start: ON_START\n", extra).Replace(onStartPolicy)
	h := &together{host: newHost(t, policy), t: t, steering: steering, policy: policy, ends: make(map[int]func())}
	h.start()
	for _, slot := range members {
		h.join(slot)
	}
	if len(members) == 0 {
		return h
	}
	for _, address := range addresses(t, true) {
		h.devices = append(h.devices, connectEarly(t, address))
	}
	return h
}

// join starts the member of a slot.
func (h *together) join(slot int) {
	h.t.Helper()
	pid, end := h.member(nil, "tcp [::]:1796", fmt.Sprintf("udp [::]:4746 slot%d", slot))
	h.ends[slot] = end
	h.eventually(fmt.Sprintf("slot %d has its member", slot), func() bool {
		return slices.ContainsFunc(must[[]api.SlotStatus](h.host, "slots"), func(s api.SlotStatus) bool { return s.Slot == slot && s.PID == pid })
	})
}

// change replaces text in the policy and applies it.
func (h *together) change(pairs ...string) {
	h.t.Helper()
	h.policy = strings.NewReplacer(pairs...).Replace(h.policy)
	h.write("policy.yaml", h.policy)
	must[api.Plan](h.host, "apply")
}

// settle checks that each device whose member has changed is reset, that the others are not, and that TCP and UDP of
// each device are at one member afterwards. It returns the number of devices that moved. gone are the members whose
// connections have ended for another reason.
func (h *together) settle(when string, gone ...string) (moved int) {
	h.t.Helper()
	for i, d := range h.devices {
		rightful := h.rightful(d.address)
		if d.pid == rightful && !slices.Contains(gone, d.pid) {
			if !d.lives(h.t) {
				h.t.Errorf("%s: %s was reset, although its slot has not changed", when, d.address)
				d.pid = ""
			} else {
				continue
			}
		}
		moved++
		h.eventually(when+": "+d.address+" is reset", func() bool { return !d.lives(h.t) })
		again := connectEarly(h.t, d.address)
		if udp := datagram(h.t, d.address); again.pid != rightful || udp != rightful {
			h.t.Errorf("%s: %s: TCP at %s, UDP at %s, should be at %s", when, d.address, again.pid, udp, rightful)
		}
		h.devices[i] = again
	}
	h.eventually(when+": no device is split", func() bool { return must[api.Status](h.host, "status").Services[0].SplitDevices == 0 })
	return moved
}

// fullest returns the slot with the most sessions, which has at least a quarter of them.
func (h *together) fullest() string {
	h.t.Helper()
	slots := must[[]api.SlotStatus](h.host, "slots")
	return strconv.Itoa(slices.MaxFunc(slots, func(a, b api.SlotStatus) int { return a.Sessions - b.Sessions }).Slot)
}

func inBothModes(t *testing.T, test func(t *testing.T, steering string)) {
	for _, steering := range []string{"reuseport", "lookup"} {
		t.Run(steering, func(t *testing.T) { test(t, steering) })
	}
}

// TestTogetherResize changes the number of slots. A new slot gets devices when its member is registered, and not before.
func TestTogetherResize(t *testing.T) {
	inBothModes(t, func(t *testing.T, steering string) {
		h := steered(t, steering, "", 0, 1, 2, 3)
		h.change("slots: 4", "slots: 5")
		if moved := h.settle("slots: 5, slot 4 empty"); moved != 0 {
			t.Errorf("%d devices moved to a slot without a member", moved)
		}
		for _, d := range h.devices {
			if udp := datagram(t, d.address); udp != d.pid {
				t.Errorf("%s: UDP at %s, TCP at %s", d.address, udp, d.pid)
			}
		}
		if m := must[[]api.MovesStatus](h.host, "moves"); m[0].State != "blocked" || len(m[0].Blocked) != 1 || m[0].Blocked[0].Slot != 4 {
			t.Errorf("moves: %+v", m)
		}
		if plan := h.sockeye("move", h.devices[0].address, "0", "--dry-run"); !strings.Contains(plan.out, "0 of 36 devices seen move") && !strings.Contains(plan.out, "1 of 36 devices seen move; 1 session is closed") {
			t.Errorf("the effect of a pin while slot 4 is empty: %+v", plan)
		}
		h.join(4)
		if moved := h.settle("slots: 5"); moved == 0 || moved == len(h.devices) {
			t.Errorf("%d of %d devices moved to slot 4", moved, len(h.devices))
		}
		h.change("slots: 5", "slots: 3")
		if moved := h.settle("slots: 3"); moved == 0 || moved == len(h.devices) {
			t.Errorf("%d of %d devices moved from slots 3 and 4", moved, len(h.devices))
		}
		if slots := must[[]api.SlotStatus](h.host, "slots"); len(slots) != 3 {
			t.Errorf("%d slots", len(slots))
		}
	})
}

// TestTogetherDeviceMap installs a device map that moves devices.
func TestTogetherDeviceMap(t *testing.T) {
	inBothModes(t, func(t *testing.T, steering string) {
		h := steered(t, steering, "", 0, 1, 2, 3)
		h.write("devices.csv", "prefix,device\n127.0.1.0/28,a\n127.0.1.16/28,b\nfd00::/16,c\n")
		h.change("slots: 4", "slots: 4\n    device_map: devices.csv")
		if moved := h.settle("device map"); moved == 0 {
			t.Error("no device moved")
		}
		h.change("    device_map: devices.csv\n", "")
		if moved := h.settle("no device map"); moved == 0 {
			t.Error("no device moved")
		}
	})
}

// TestTogetherStandby lets a standby slot take over the devices of a slot, and give them back.
func TestTogetherStandby(t *testing.T) {
	inBothModes(t, func(t *testing.T, steering string) {
		h := steered(t, steering, "    when_empty: {standby: 3}\n", 0, 1, 2, 3)
		standby := ""
		for _, s := range must[[]api.SlotStatus](h.host, "slots") {
			if s.Slot == 3 {
				standby = strconv.Itoa(s.PID)
			}
		}
		atStandby := func(when string, slot int) {
			t.Helper()
			for i, d := range h.devices {
				if must[[]api.WhereStatus](h.host, "where", d.address)[0].Slot != slot {
					if !d.lives(t) {
						t.Errorf("%s: %s was reset", when, d.address)
					}
					continue
				}
				h.eventually(when+": "+d.address+" is reset", func() bool { return !d.lives(t) })
				h.devices[i] = connectEarly(t, d.address)
				if udp := datagram(t, d.address); udp != standby || h.devices[i].pid != standby {
					t.Errorf("%s: %s: UDP at %s, TCP at %s, want standby %s", when, d.address, udp, h.devices[i].pid, standby)
				}
			}
		}
		h.ends[0]()
		atStandby("member 0 exits", 0)
		h.join(0)
		if moved := h.settle("member 0 returns"); moved == 0 {
			t.Error("no device returned")
		}
		// The process of slot 1 lives on.
		must[api.Membership](h.host, "unregister", "--slot", "1")
		atStandby("unregister", 1)
	})
}

// TestOnMoveKeep checks that on_move: keep leaves sessions open, and that devices, status and metrics show the split
// devices. An agent with on_move: reset closes the sessions, as after the death of an agent between a change and the
// close.
func TestOnMoveKeep(t *testing.T) {
	inBothModes(t, func(t *testing.T, steering string) {
		h := steered(t, steering, "    on_move: keep\n", 0, 1, 2, 3)
		h.change("slots: 4", "slots: 3")
		split := 0
		for _, d := range h.devices {
			if d.pid != h.rightful(d.address) {
				split++
			}
			if !d.lives(t) {
				t.Errorf("%s was reset", d.address)
			}
		}
		var status api.ServiceStatus
		h.eventually("status counts the split devices", func() bool {
			status = must[api.Status](h.host, "status").Services[0]
			return status.SplitDevices == split
		})
		if split == 0 || !strings.Contains(status.Hint, "on_move: reset") {
			t.Errorf("%d split: %+v", split, status)
		}
		marked := 0
		for _, d := range must[[]api.DeviceStatus](h.host, "devices") {
			if d.Split {
				marked++
				if d.Sessions != 1 || !slices.Equal(d.SessionSlots, []int{-1}) {
					t.Errorf("split device: %+v", d)
				}
			}
		}
		if n, _ := ofDevices(t); n != split || marked != split {
			t.Errorf("%d devices split, metric %d, marked %d", split, n, marked)
		}
		if r := h.sockeye("devices"); strings.Count(r.out, " SPLIT at ?") != split {
			t.Errorf("devices: %s", r.out)
		}
		// The sessions stay, so that the command does not wait for their end.
		must[api.Plan](h.host, "slot", "set", "0", "drain", "--wait", "--timeout", "20s")
		must[api.Plan](h.host, "slot", "set", "0", "ready", "--wait", "--timeout", "20s")
		h.kill()
		h.write("policy.yaml", strings.Replace(h.policy, "on_move: keep", "on_move: reset", 1))
		h.start()
		h.settle("the next agent")
	})
}

// TestSlotStates sets states and weights of slots.
func TestSlotStates(t *testing.T) {
	inBothModes(t, func(t *testing.T, steering string) {
		h := steered(t, steering, "", 0, 1, 2, 3)
		before := make(map[string]string)
		for _, d := range h.devices {
			before[d.address] = d.pid
		}
		dry := must[api.Plan](h.host, "slot", "set", "2", "drain", "--dry-run")
		if len(dry.Changes) != 1 || dry.Changes[0].What != "slot 2: ready -> drain" || !strings.Contains(dry.Changes[0].Effect, "are closed") {
			t.Errorf("dry run: %+v", dry)
		}
		if moved := h.settle("dry run"); moved != 0 {
			t.Errorf("a dry run moved %d devices", moved)
		}
		done := must[api.Plan](h.host, "slot", "set", "2", "drain", "--wait", "--timeout", "20s")
		if done.Changes[0] != dry.Changes[0] {
			t.Errorf("drain: %+v, dry run %+v", done, dry)
		}
		moved := h.settle("drain")
		if !strings.HasPrefix(dry.Changes[0].Effect, fmt.Sprintf("%d of ", moved)) {
			t.Errorf("%d devices moved, dry run: %s", moved, dry.Changes[0].Effect)
		}
		slots := must[[]api.SlotStatus](h.host, "slots")
		if s := slots[2]; s.State != "drain" || s.Share != 0 || s.Sessions != 0 || !s.Ready {
			t.Errorf("slot 2: %+v", s)
		}
		h.kill()
		h.start()
		if moved := h.settle("the next agent"); moved != 0 {
			t.Errorf("%d devices moved with the next agent", moved)
		}
		must[api.Plan](h.host, "slot", "set", "2", "ready")
		h.settle("ready")
		for _, d := range h.devices {
			if before[d.address] != d.pid {
				t.Errorf("%s is at %s, before the drain it was at %s", d.address, d.pid, before[d.address])
			}
		}
		must[api.Plan](h.host, "slot", "set", "0", "--weight", "10")
		h.settle("weight")
		if share := must[[]api.SlotStatus](h.host, "slots")[0].Share; share < 0.032 || share > 0.0325 {
			t.Errorf("slot 0 has %v of the devices", share)
		}
		must[api.Plan](h.host, "slot", "set", "0", "--weight", "100")
		h.settle("weight 100")

		must[api.Plan](h.host, "slot", "set", "1", "maint")
		for i, d := range h.devices {
			if must[[]api.WhereStatus](h.host, "where", d.address)[0].Slot != 1 {
				if !d.lives(t) {
					t.Errorf("maint: %s was reset", d.address)
				}
				continue
			}
			h.eventually("maint: "+d.address+" is reset", func() bool { return !d.lives(t) })
			if udp := datagram(t, d.address); !strings.Contains(udp, "refused") {
				t.Errorf("maint: %s: UDP at %s", d.address, udp)
			}
			h.devices[i].pid = ""
		}
		h.kill()
		h.start()
		if s := must[[]api.SlotStatus](h.host, "slots")[1]; s.State != "maint" || s.Ready || s.PID == 0 {
			t.Errorf("maint after a restart: %+v", s)
		}
		must[api.Plan](h.host, "slot", "set", "1", "ready")
		h.settle("after maint")
	})
}

// TestMovePins pins devices by address, by prefix and by name.
func TestMovePins(t *testing.T) {
	inBothModes(t, func(t *testing.T, steering string) {
		h := steered(t, steering, "", 0, 1, 2, 3)
		before := make(map[string]string)
		for _, d := range h.devices {
			before[d.address] = d.pid
		}
		where := func(address string) api.WhereStatus { return must[[]api.WhereStatus](h.host, "where", address)[0] }
		one := h.devices[0].address
		to := (where(one).Slot + 1) % 4
		must[api.Plan](h.host, "move", one, strconv.Itoa(to))
		if moved := h.settle("move"); moved != 1 || where(one).Slot != to || !where(one).Pinned {
			t.Errorf("%d devices moved; %+v", moved, where(one))
		}
		must[api.Plan](h.host, "move", "127.0.1.0/24", "3", "--for", "1h")
		h.settle("prefix")
		for _, d := range h.devices {
			want := 3
			if d.address == one {
				want = to // the longer prefix applies
			} else if strings.Contains(d.address, ":") {
				continue
			}
			if at := where(d.address); at.Slot != want {
				t.Errorf("%s: %+v, want slot %d", d.address, at, want)
			}
		}
		pins := must[[]api.SlotStatus](h.host, "slots")[3].Pins
		if i := slices.IndexFunc(pins, func(p api.PinStatus) bool { return p.Device == "127.0.1.0/24" }); i < 0 || pins[i].Until == nil || !pins[i].InForce {
			t.Errorf("pins of slot 3: %+v", pins)
		}
		h.kill()
		h.start()
		if moved := h.settle("the next agent"); moved != 0 {
			t.Errorf("%d devices moved with the next agent", moved)
		}
		must[api.Plan](h.host, "slot", "set", "1", "--weight", "20")
		h.settle("weight")
		h.write("next.yaml", strings.Replace(h.policy, "slots: 4", "slots: 5", 1))
		planned := make(map[string]int)
		for _, d := range h.devices {
			planned[d.address] = must[[]api.WhereStatus](h.host, "where", d.address, "--plan", h.dir+"/next.yaml")[0].Slot
		}
		h.change("slots: 4", "slots: 5")
		h.join(4)
		h.settle("slots: 5")
		for _, d := range h.devices {
			for _, offline := range [][]string{nil, {"--offline", "--pins", h.pins}} {
				if at := must[[]api.WhereStatus](h.host, append([]string{"where", d.address}, offline...)...)[0]; at.Slot != planned[d.address] {
					t.Errorf("%s is in slot %d (%v), where --plan said %d", d.address, at.Slot, offline, planned[d.address])
				}
			}
		}
		h.change("slots: 5", "slots: 4")
		must[api.Plan](h.host, "slot", "set", "1", "--weight", "100")
		h.settle("slots: 4")
		// A device map that names the address replaces its pin.
		h.write("devices.csv", one+",edge\n")
		h.write("next.yaml", strings.Replace(h.policy, "slots: 4", "slots: 4\n    device_map: devices.csv", 1))
		overridden := "the pin of " + one + " has no effect: the device map names it edge"
		if plan := must[api.Plan](h.host, "plan", h.dir+"/next.yaml"); !strings.HasSuffix(plan.Changes[0].Effect, "; "+overridden) {
			t.Errorf("%+v", plan)
		}
		h.change("slots: 4", "slots: 4\n    device_map: devices.csv")
		h.settle("device map")
		pins = must[[]api.SlotStatus](h.host, "slots")[to].Pins
		if i := slices.IndexFunc(pins, func(p api.PinStatus) bool { return p.Device == one }); i < 0 || pins[i].InForce || pins[i].Problem != "the device map names it edge" {
			t.Errorf("pins of slot %d: %+v", to, pins)
		}
		if notes := must[api.Status](h.host, "status").Services[0].Notes; !slices.Contains(notes, overridden) {
			t.Errorf("%q", notes)
		}
		h.change("    device_map: devices.csv\n", "")
		h.settle("no device map")
		if pins := must[[]api.SlotStatus](h.host, "slots")[to].Pins; slices.ContainsFunc(pins, func(p api.PinStatus) bool { return p.Problem != "" }) || where(one).Slot != to {
			t.Errorf("pins of slot %d: %+v; %+v", to, pins, where(one))
		}
		must[api.Plan](h.host, "move", "127.0.1.0/24", "home")
		must[api.Plan](h.host, "move", one, "home")
		h.settle("home")
		for _, d := range h.devices {
			if before[d.address] != d.pid {
				t.Errorf("%s is at %s, before the pins it was at %s", d.address, d.pid, before[d.address])
			}
		}
		must[api.Plan](h.host, "move", one, strconv.Itoa(to), "--for", "4s")
		h.settle("move for 4 s")
		h.eventually("the pin has ended", func() bool { return !where(one).Pinned })
		h.settle("after 4 s")

		h.write("devices.csv", "127.0.1.0/28,a\nfd00::/16,c\n")
		h.change("slots: 4", "slots: 4\n    device_map: devices.csv")
		h.settle("device map")
		must[api.Plan](h.host, "move", "a", "2")
		h.settle("name")
		if at := where("127.0.1.3"); at.Slot != 2 || !at.Pinned || at.Device != "a" {
			t.Errorf("%+v", at)
		}
		for _, d := range []string{"127.0.1.0/30", "127.0.1.9"} {
			if r := h.sockeye("move", d, "1"); r.code != 5 || !strings.Contains(r.err, `belongs to device "a"`) {
				t.Errorf("move %s: %+v", d, r)
			}
		}
	})
}

// TestPace drains a slot in batches, stops and continues the moves, and kills the agent in between.
func TestPace(t *testing.T) {
	inBothModes(t, func(t *testing.T, steering string) {
		h := steered(t, steering, "", 0, 1, 2, 3)
		h.change("    slots: 4\n", "    slots: 4\n    pace: {devices: 1, timeout: 1s}\n")
		moves := func() api.MovesStatus { return must[[]api.MovesStatus](h.host, "moves")[0] }
		reset := func() (n int) {
			for _, d := range h.devices {
				if !d.lives(t) {
					n++
				}
			}
			return n
		}
		slot := h.fullest()
		must[api.Plan](h.host, "slot", "set", slot, "drain")
		first := moves()
		total := first.Done + len(first.Running) + first.Waiting
		buckets := make(map[int]bool) // whose devices move together
		for _, d := range first.Running {
			buckets[must[[]api.WhereStatus](h.host, "where", d.Device)[0].Bucket] = true
		}
		if first.State != "running" || !first.Paced || len(buckets) > 3 || total < 5 {
			t.Fatalf("moves: %+v", first)
		}
		if r := h.sockeye("move", h.devices[0].address, map[bool]string{true: "1", false: "0"}[slot == "0"]); r.code != 5 || !strings.Contains(r.err, "devices move because of another change (slot "+slot+": ready -> drain)") {
			t.Errorf("move during a drain: %+v", r)
		}
		if r := h.sockeye("slot", "set", map[bool]string{true: "1", false: "0"}[slot == "0"], "drain"); r.code != 5 {
			t.Errorf("another drain: %+v", r)
		}
		if r := h.sockeye("moves"); r.code != 0 || !strings.Contains(r.out, "telemetry: [") || !strings.Contains(r.out, "waiting") {
			t.Errorf("moves: %+v", r)
		}
		stopped := must[api.MovesStatus](h.host, "moves", "--cancel")
		if stopped.State != "stopped" || stopped.Waiting == 0 {
			t.Errorf("after --cancel: %+v", stopped)
		}
		if r := h.sockeye("moves", "--wait"); r.code != 5 || !strings.Contains(r.err, "are stopped") {
			t.Errorf("moves --wait: %+v", r)
		}
		if notes := must[api.Status](h.host, "status").Services[0].Notes; len(notes) != 2 || notes[0] != "slot "+slot+" drains" || !strings.Contains(notes[1], "moves are stopped") {
			t.Errorf("notes: %q", notes)
		}
		before := reset()
		if before == 0 || before == total {
			t.Errorf("%d of %d devices were reset before --cancel", before, total)
		}
		h.kill()
		h.start()
		_ = unix.Nanosleep(&unix.Timespec{Sec: 2}, nil)
		if after := reset(); after != before {
			t.Errorf("%d devices were reset before --cancel, %d after it", before, after)
		}
		for _, d := range h.devices {
			if udp := datagram(t, d.address); d.lives(t) && udp != d.pid {
				t.Errorf("stopped: %s: UDP at %s, TCP at %s", d.address, udp, d.pid)
			}
		}
		must[api.MovesStatus](h.host, "moves", "--resume")
		began := time.Now()
		must[[]api.MovesStatus](h.host, "moves", "--wait", "--timeout", "60s")
		if took := time.Since(began); took < time.Second {
			t.Errorf("the moves took %v", took)
		}
		h.settle("drain")
		for _, s := range must[[]api.SlotStatus](h.host, "slots") {
			if strconv.Itoa(s.Slot) == slot && (s.Sessions != 0 || s.Share != 0) {
				t.Errorf("the slot that drains: %+v", s)
			}
		}
	})
}

// TestGate connects devices to a new member at the same time. With pace, they are admitted in turn, and none is refused;
// datagrams pass.
func TestGate(t *testing.T) {
	inBothModes(t, func(t *testing.T, steering string) {
		h := steered(t, steering, "    pace: {devices: 1, timeout: 1s}\n")
		h.join(0)
		h.join(1)
		var mine []string
		for i := range 250 {
			address := fmt.Sprintf("127.0.1.%d", i+1)
			if at := must[[]api.WhereStatus](h.host, "where", address)[0]; at.Slot == 0 {
				mine = append(mine, address)
			}
			if len(mine) == 5 {
				break
			}
		}
		if len(mine) < 5 {
			t.Fatalf("devices of slot 0: %v", mine)
		}
		results := make(chan time.Duration, len(mine))
		began := time.Now()
		var dials sync.WaitGroup
		t.Cleanup(dials.Wait)
		for _, address := range mine {
			dials.Go(func() {
				d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(address)}, Timeout: patience}
				d.SetMultipathTCP(false)
				conn, err := d.DialContext(t.Context(), "tcp", target(address, "1796"))
				if err != nil {
					t.Errorf("%s: %v", address, err)
				} else {
					t.Cleanup(func() { conn.Close() })
				}
				results <- time.Since(began)
			})
		}
		var waiting bool
		h.eventually("devices wait at the gate", func() bool {
			m := must[[]api.MovesStatus](h.host, "moves")[0]
			waiting = waiting || m.Waiting > 0 && len(m.Running) == 1
			return waiting
		})
		if udp := datagram(t, mine[len(mine)-1]); strings.Contains(udp, "refused") {
			t.Errorf("UDP while the gate is closed: %s", udp)
		}
		var times []time.Duration
		for range mine {
			times = append(times, <-results)
		}
		slices.Sort(times)
		t.Logf("connected after %v", times)
		if times[1] < 900*time.Millisecond || // the second SYN is sent after a second
			times[len(times)-1] < 3*time.Second {
			t.Errorf("the devices connected after %v", times)
		}
		refused := uint64(0)
		for _, s := range must[[]api.SlotStatus](h.host, "slots") {
			for reason, n := range s.Refused {
				if s.Slot < 2 && reason != "empty_slot" {
					refused += n
				}
			}
		}
		if refused > 0 {
			t.Errorf("%d SYNs were refused", refused)
		}
		// The gate opens when no further device comes.
		h.eventually("the gate is open", func() bool { return len(must[[]api.MovesStatus](h.host, "moves")[0].Gates) == 0 })
		for _, address := range mine[:2] {
			// A gate that is closed holds the first SYN for a second, each time. A busy host takes as long sometimes.
			took := connectTime(t, address)
			for tries := 4; tries > 0 && took > 900*time.Millisecond; tries-- {
				took = connectTime(t, address)
			}
			if took > 900*time.Millisecond {
				t.Errorf("%s: connected after %v through an open gate", address, took)
			}
		}
	})
}

// connectTime returns the time that a connection takes.
func connectTime(t *testing.T, address string) time.Duration {
	t.Helper()
	began := time.Now()
	connectEarly(t, address)
	return time.Since(began)
}

// TestChangeRefusals checks that bad input to the commands that move devices changes nothing.
func TestChangeRefusals(t *testing.T) {
	h := steered(t, "reuseport", "", 0, 1, 2, 3)
	h.write("devices.csv", "127.9.0.0/16,edge\n")
	h.change("slots: 4", "slots: 4\n    device_map: devices.csv")
	must[api.Plan](h.host, "slot", "set", "3", "drain")
	must[api.Plan](h.host, "slot", "set", "2", "--weight", "0")
	h.settle("before")
	before, mapping := h.standing(), h.sockeye("slots").out
	const telemetry = "service telemetry: "
	for _, test := range []struct {
		args          string
		code          int
		message, hint string
	}{
		{"slot set 4 drain", 2, telemetry + "slot 4 is out of range", "service telemetry has slots 0 to 3"},
		{"slot set -1 drain", 2, `unknown shorthand flag: '1' in -1`, "sockeye slot set --help lists the flags"},
		{"slot set x drain", 2, `"x" is not a slot`, "a number, as sockeye slots lists them"},
		{"slot set 1 drained", 2, `there is no state "drained"`, "did you mean drain?"},
		{"slot set 1", 2, "no state and no weight given", "as in sockeye slot set 2 drain, or sockeye slot set 2 --weight 50"},
		{"slot set 1 --weight 257", 2, "weight 257 is out of range", "0 to 256; the default is 100"},
		{"slot set 1 --weight -1", 2, "weight -1 is out of range", "0 to 256; the default is 100"},
		{"slot set 1 drain --timeout 5s", 2, "--timeout requires --wait", "usage: sockeye slot set SLOT [ready|drain|maint] [--weight N] [--service S] [flags]"},
		{"slot set 1 drain --wait --timeout 5", 2, `--timeout is "5"`, "a duration, as in 90s, 5m or 1h"},
		{"slot set 1 drain --wait --dry-run", 2, "--wait and --dry-run are mutually exclusive", "usage: sockeye slot set SLOT [ready|drain|maint] [--weight N] [--service S] [flags]"},
		{"slot set 1 drain --service other", 2, `there is no service "other"`, "the policy has telemetry"},
		{"move 127.0.1.1 4", 2, telemetry + "slot 4 is out of range", "service telemetry has slots 0 to 3"},
		{"move 127.0.1.1 3", 5, telemetry + "slot 3 is in drain", "name another slot, or sockeye slot set 3 ready"},
		{"move 127.0.1.1 away", 2, `"away" is not a slot`, "a number, as sockeye slots lists them, or home"},
		{"move --all 1", 2, "--all requires home", "as in sockeye move --all home"},
		{"move --all 127.0.1.1 home", 2, "--all requires home", "as in sockeye move --all home"},
		{"move 127.0.1.1", 2, "no slot given", "usage: sockeye move DEVICE SLOT|home [--for DURATION] | --all home [--service S] [flags]"},
		{"move egde 1", 2, telemetry + `there is no device "egde"`, "did you mean edge?"},
		{"move 127.9.1.1 1", 5, telemetry + `127.9.1.1 belongs to device "edge" of the device map`, "move that device by its name: all its addresses have one slot"},
		{"move 127.0.1.1/24 1", 2, telemetry + "127.0.1.1/24 has bits set after its length", "write 127.0.1.0/24"},
		{"move ::ffff:10.0.0.0/104 1", 2, telemetry + "::ffff:10.0.0.0/104 is an IPv4-mapped prefix", "write the IPv4 prefix"},
		{"move 127.0.1.1 1 --for 0s", 2, `--for is "0s"`, "a duration, as in 90s, 5m or 1h"},
		{"move 127.0.1.1 home --for 1h", 2, "--for needs a slot and a positive duration", "as in --for 2h"},
		{"moves --cancel", 5, "no devices move", "sockeye moves shows the moves"},
		{"moves --resume", 5, "the moves are not stopped", "sockeye moves shows the moves"},
		{"moves --cancel --wait", 2, "--wait, --cancel and --resume are mutually exclusive", "usage: sockeye moves [--wait | --cancel | --resume] [--service S] [flags]"},
		{"rebalance --measure 1m", 2, `--measure is "1m"`, "1s to 45s, as in 10s"},
	} {
		h.refused(test.code, test.message, test.hint, nil, strings.Fields(test.args)...)
	}
	must[api.Plan](h.host, "slot", "set", "1", "drain")
	h.settle("drain 1")
	h.refused(5, telemetry+"no other slot takes the devices of slot 0", "set another slot ready, with a weight, first", nil, "slot", "set", "0", "drain")
	h.refused(5, telemetry+"no other slot takes the devices of slot 0", "set another slot ready, with a weight, first", nil, "slot", "set", "0", "--weight", "0")
	must[api.Plan](h.host, "slot", "set", "1", "maint")
	h.settle("maint 1")
	h.refused(5, telemetry+"no other slot takes the devices of slot 0", "set another slot ready, with a weight, first", nil, "slot", "set", "0", "drain")
	must[api.Plan](h.host, "slot", "set", "1", "ready")
	h.settle("ready 1")
	h.unchanged(before)
	if after := h.sockeye("slots").out; strings.Count(after, "drain") != strings.Count(mapping, "drain") {
		t.Errorf("before\n%s\nafter\n%s", mapping, after)
	}
	// A policy with fewer slots, which all drain.
	h.change("slots: 4", "slots: 4") // as in force
	must[api.Plan](h.host, "slot", "set", "0", "drain")
	must[api.Plan](h.host, "slot", "set", "3", "ready")
	h.settle("slots 1 and 3")
	h.write("policy.yaml", strings.Replace(h.policy, "slots: 4", "slots: 1", 1))
	if r := h.sockeye("apply"); r.code != 5 || !strings.Contains(r.err, "every slot is drained or has weight 0") {
		t.Errorf("apply: %+v", r)
	}
	h.kill()
	h.start()
	if s := must[[]api.SlotStatus](h.host, "slots"); s[0].Share != 1 {
		t.Errorf("slots after a start with one slot, which drains: %+v", s)
	}
}

// TestTwoTerminals changes slots and devices from several terminals at the same time: every change succeeds as a whole,
// or is refused, and the result is that of one order.
func TestTwoTerminals(t *testing.T) {
	h := steered(t, "reuseport", "", 0, 1, 2, 3)
	var all sync.WaitGroup
	var mu sync.Mutex
	codes := make(map[int]int)
	for i := range 40 {
		all.Go(func() {
			args := [][]string{
				{"slot", "set", "1", "drain"}, {"slot", "set", "1", "ready"}, {"slot", "set", "2", "--weight", "50"}, {"slot", "set", "2", "--weight", "100"},
				{"move", "127.0.1.1", "3"}, {"move", "127.0.1.1", "home"}, {"slot", "set", "3", "drain"}, {"slot", "set", "3", "ready"},
			}[i%8]
			r := h.sockeye(args...)
			mu.Lock()
			defer mu.Unlock()
			codes[r.code]++
			if r.code != 0 && (r.code != 5 || strings.Count(r.err, "\n") != 2) {
				t.Errorf("sockeye %q: %+v", args, r)
			}
		})
	}
	all.Wait()
	h.eventually("no device is split", func() bool { return must[api.Status](h.host, "status").Services[0].SplitDevices == 0 })
	for _, d := range h.devices { // a device may have moved and returned
		if !d.lives(t) {
			d = connectEarly(t, d.address)
		}
		if rightful, udp := h.rightful(d.address), datagram(t, d.address); d.pid != rightful || udp != rightful {
			t.Errorf("%s: TCP at %s, UDP at %s, should be at %s", d.address, d.pid, udp, rightful)
		}
	}
	slots := must[[]api.SlotStatus](h.host, "slots")
	for _, s := range slots {
		if s.State == "drain" && s.Share > 0 || s.State == "ready" && s.Share == 0 {
			t.Errorf("slot %d is in %s and has %v of the devices", s.Slot, s.State, s.Share)
		}
	}
	t.Logf("exit codes: %v", codes)
}

// TestRebalance lets some devices of one slot send much more than the others, and moves devices until the load is even.
func TestRebalance(t *testing.T) {
	h := steered(t, "lookup", "", 0, 1, 2, 3)
	stop := make(chan struct{})
	var sending sync.WaitGroup
	defer sending.Wait()
	defer close(stop)
	const heavy = 4
	var at1 []*early
	slotOf := func(address string) int { return must[[]api.WhereStatus](h.host, "where", address)[0].Slot }
	for _, d := range h.devices {
		if slotOf(d.address) == 1 {
			at1 = append(at1, d)
		}
	}
	for i := 1; len(at1) < heavy; i++ { // the hash gave the slot fewer devices
		if address := fmt.Sprintf("127.0.9.%d", i); slotOf(address) == 1 {
			d := connectEarly(t, address)
			h.devices, at1 = append(h.devices, d), append(at1, d)
		}
	}
	for _, d := range at1[:heavy] {
		conn, err := net.Dial("udp", target(d.address, "4746"))
		if err != nil {
			t.Fatal(err)
		}
		conn.Close()
		from := net.Dialer{LocalAddr: &net.UDPAddr{IP: net.ParseIP(d.address)}}
		if conn, err = from.Dial("udp", target(d.address, "4746")); err != nil {
			t.Fatal(err)
		}
		sending.Go(func() {
			defer conn.Close()
			for tick := time.NewTicker(2 * time.Millisecond); ; {
				select {
				case <-stop:
					return
				case <-tick.C:
					_, _ = conn.Write([]byte("?"))
				}
			}
		})
	}
	proposed := must[[]api.Rebalance](h.host, "rebalance", "--measure", "2s")[0]
	if len(proposed.Moves) != 3 || proposed.Applied || proposed.Slots[1].Before < 0.9 || proposed.Slots[1].After > 0.35 {
		t.Errorf("proposed: %+v", proposed)
	}
	if moved := h.settle("proposal"); moved != 0 {
		t.Errorf("a proposal moved %d devices", moved)
	}
	applied := must[[]api.Rebalance](h.host, "rebalance", "--measure", "2s", "--apply")[0]
	if moved := h.settle("rebalance"); moved != len(applied.Moves) || !applied.Applied {
		t.Errorf("%d devices moved: %+v", moved, applied)
	}
	if again := must[[]api.Rebalance](h.host, "rebalance", "--measure", "3s")[0]; len(again.Moves) != 0 {
		t.Errorf("after rebalance: %+v", again)
	}
	if r := h.sockeye("rebalance", "--measure", "1s"); r.code != 0 || !strings.Contains(r.out, "LOAD AFTER") {
		t.Errorf("rebalance: %+v", r)
	}
	must[api.Plan](h.host, "move", "--all", "home")
	if moved := h.settle("move --all home"); moved != len(applied.Moves) {
		t.Errorf("%d devices returned, %d were pinned", moved, len(applied.Moves))
	}
	for _, d := range h.devices {
		if must[[]api.WhereStatus](h.host, "where", d.address)[0].Pinned {
			t.Errorf("%s is pinned", d.address)
		}
	}
}

// TestMemberPortsChange checks that a member whose sockets are not on the ports of a new policy loses its slot.
func TestMemberPortsChange(t *testing.T) {
	h := newHost(t, `services:
  telemetry:
    slots: 2
    steering: lookup
    user: root
    cgroup: CGROUP
    listeners:
      - {protocol: tcp, address: "0.0.0.0:1796", member_ports: 20000-20001}
      - {protocol: udp, address: "0.0.0.0:4746", member_ports: 20000-20001}
    members: [{match: {user: root, command_line: "slot(.)$"}, slot: group}]
`)
	h.start()
	h.member(nil, "tcp 0.0.0.0:20000", "udp 0.0.0.0:20000 slot0")
	ready := func() int { return must[api.Status](h, "status").Services[0].Ready }
	h.eventually("the member is registered", func() bool { return ready() == 1 })
	text, err := os.ReadFile(h.policy)
	if err != nil {
		t.Fatal(err)
	}
	h.write("policy.yaml", strings.ReplaceAll(string(text), "20000-20001", "21000-21001"))
	must[api.Plan](h, "apply")
	if n := ready(); n != 0 {
		t.Errorf("%d slots are ready, and no socket is on a port of the policy", n)
	}
	h.write("policy.yaml", string(text))
	must[api.Plan](h, "apply")
	h.eventually("the member is registered again", func() bool { return ready() == 1 })
}

// TestTogetherEmptySlots adds a slot while another slot has no member: the devices of the empty slot stay there until
// the new slot has a member, so that they are served when the member of the empty slot returns.
func TestTogetherEmptySlots(t *testing.T) {
	h := steered(t, "lookup", "")
	for slot := range 3 {
		h.join(slot)
	}
	h.change("slots: 4", "slots: 5")
	h.join(3)
	for _, s := range must[[]api.SlotStatus](h.host, "slots") {
		if want := map[int]float64{4: 0}[s.Slot]; s.Slot == 4 && s.Share != want || s.Slot < 4 && s.Share != 0.25 {
			t.Errorf("slot 4 has no member: %+v", s)
		}
	}
	h.join(4)
	for _, s := range must[[]api.SlotStatus](h.host, "slots") {
		if s.Share < 0.19 || s.Share > 0.21 {
			t.Errorf("slot 4 has a member: %+v", s)
		}
	}
}

// TestUnrelatedConnections checks that connections of programs that are not members are neither counted nor closed: from
// the service's port to another program, and to a program that listens on a more specific address with the service's port.
func TestUnrelatedConnections(t *testing.T) {
	h := newHost(t, strings.NewReplacer("STEERING", "reuseport", "ADDRESS", "0.0.0.0", "ON_START", "reset").Replace(onStartPolicy))
	reuse := func(_, _ string, raw syscall.RawConn) (err error) {
		control := raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1) })
		return errors.Join(control, err)
	}
	listen := net.ListenConfig{Control: reuse}
	listen.SetMultipathTCP(false)
	specific, err := listen.Listen(t.Context(), "tcp", "127.0.0.5:1796")
	if err != nil {
		t.Fatal(err)
	}
	defer specific.Close()
	other, err := listen.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	var unrelated []net.Conn
	dial := func(from, to string) {
		t.Helper()
		local, err := net.ResolveTCPAddr("tcp", from)
		if err != nil {
			t.Fatal(err)
		}
		d := net.Dialer{LocalAddr: local, Control: reuse, Timeout: patience}
		d.SetMultipathTCP(false)
		conn, err := d.Dial("tcp", to)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		unrelated = append(unrelated, conn)
	}
	for i := range 12 {
		dial(fmt.Sprintf("127.0.1.%d:0", i+1), "127.0.0.5:1796")
		accepted, err := specific.Accept()
		if err != nil {
			t.Fatal(err)
		}
		defer accepted.Close()
	}
	dial("127.0.0.77:1796", other.Addr().String())
	for slot := range 4 {
		h.member(nil, "tcp 0.0.0.0:1796", fmt.Sprintf("udp 0.0.0.0:4746 slot%d", slot))
	}
	h.start()
	h.eventually("the members are registered", func() bool { return must[api.Status](h, "status").Services[0].Ready == 4 })
	const devices = 8
	for i := range devices {
		connectEarly(t, fmt.Sprintf("127.0.1.%d", i+1))
	}
	dry := must[api.Plan](h, "slot", "set", "1", "drain", "--dry-run").Changes[0].Effect
	for _, slot := range []string{"1", "2"} {
		must[api.Plan](h, "slot", "set", slot, "drain")
	}
	_ = unix.Nanosleep(&unix.Timespec{Sec: 2}, nil)
	if !strings.Contains(dry, fmt.Sprintf(" of %d devices seen", devices)) {
		t.Errorf("dry run: %s", dry)
	}
	for _, conn := range unrelated {
		if err := conn.SetReadDeadline(time.Now().Add(20 * time.Millisecond)); err != nil {
			t.Fatal(err)
		}
		if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("the connection from %s to %s has ended: %v", conn.LocalAddr(), conn.RemoteAddr(), err)
		}
	}
}

// forgeSYN sends a SYN with a forged source address over a raw socket. The answer leads to a RST, and not to a
// connection.
func forgeSYN(t *testing.T, raw int, from [4]byte, port uint16) {
	t.Helper()
	to := [4]byte{127, 0, 0, 1}
	tcp := make([]byte, 20)
	binary.BigEndian.PutUint16(tcp, 40000)
	binary.BigEndian.PutUint16(tcp[2:], port)
	binary.BigEndian.PutUint32(tcp[4:], 1)
	tcp[12], tcp[13] = 5<<4, 2 // header length and SYN
	binary.BigEndian.PutUint16(tcp[14:], 65535)
	sum := uint32(unix.IPPROTO_TCP + len(tcp))
	for _, part := range [][]byte{from[:], to[:], tcp} {
		for i := 0; i < len(part); i += 2 {
			sum += uint32(binary.BigEndian.Uint16(part[i:]))
		}
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	binary.BigEndian.PutUint16(tcp[16:], ^uint16(sum))
	ip := append([]byte{0x45, 0, 0, 0, 0, 0, 0, 0, 64, unix.IPPROTO_TCP, 0, 0}, from[:]...)
	if err := unix.Sendto(raw, append(append(ip, to[:]...), tcp...), 0, &unix.SockaddrInet4{Addr: to}); err != nil {
		t.Error(err)
	}
}

// TestGateFlood sends SYNs from 2,000 forged sources to a gate: the agent finds that they lead to no connection and opens
// the gate, and the devices connect.
func TestGateFlood(t *testing.T) {
	inBothModes(t, func(t *testing.T, steering string) {
		h := steered(t, steering, "    pace: {devices: 4, timeout: 2m}\n")
		raw, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(raw)
		stop := make(chan struct{})
		var flood sync.WaitGroup
		defer flood.Wait()
		defer close(stop)
		flood.Go(func() {
			tick := time.NewTicker(5 * time.Millisecond)
			defer tick.Stop()
			for i := 0; ; i = (i + 1) % 2000 {
				select {
				case <-stop:
					return
				case <-tick.C:
					forgeSYN(t, raw, [4]byte{127, 66, byte(i / 250), byte(i%250 + 1)}, 1796)
				}
			}
		})
		for slot := range 4 {
			h.join(slot)
		}
		results := make(chan error)
		for i := range 12 {
			go func() {
				d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 1, byte(i+1))}, Timeout: patience}
				d.SetMultipathTCP(false)
				conn, err := d.Dial("tcp", "127.0.0.1:1796")
				if err == nil {
					t.Cleanup(func() { conn.Close() })
				}
				results <- err
			}()
		}
		for range 12 {
			if err := <-results; err != nil {
				t.Error(err)
			}
		}
		h.eventually("the gates are open", func() bool { return len(must[[]api.MovesStatus](h.host, "moves")[0].Gates) == 0 })
	})
}

// TestRemovedWhileProcessWaits removes a service while a process waits for an occupied slot. The process must not become a
// member in the middle of the removal, which would attach the program again: the kernel's hash decides from then on.
func TestRemovedWhileProcessWaits(t *testing.T) {
	h := steered(t, "reuseport", "")
	h.join(0)
	pid, _ := h.member(nil, "tcp [::]:1796", "udp [::]:4746 slot0")
	h.eventually("a process waits", func() bool {
		waiting := must[api.Status](h.host, "status").Services[0].Waiting
		return len(waiting) == 1 && waiting[0].PID == pid
	})
	h.write("policy.yaml", "services: {}\n")
	must[api.Plan](h.host, "apply")
	byBoth := make(map[string]bool)
	for _, address := range addresses(t, true) {
		byBoth[connectEarly(t, address).pid] = true
	}
	if len(byBoth) != 2 {
		t.Errorf("connections at %v, want both processes", byBoth)
	}
}
