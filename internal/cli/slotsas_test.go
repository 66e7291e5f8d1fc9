// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"strings"
	"testing"

	"sockeye/internal/api"
)

const twoParts = `services:
  bmp:
    slots: 4
    user: root
    cgroup: CGROUP
    listeners: [{protocol: tcp, address: "[::]:1790"}]
  ipfix:
    slots: 4
    user: root
    cgroup: CGROUP
    listeners: [{protocol: udp, address: "[::]:4739"}]
`

// TestSlotsAs checks two services that share their slots: a slot has one process of each service, and both services
// map each device to the same slot.
func TestSlotsAs(t *testing.T) {
	h := newHost(t, twoParts)
	h.start()
	var addresses []string
	for i := range 200 {
		addresses = append(addresses, fmt.Sprintf("192.0.2.%d", i))
	}
	// apart counts the addresses that the two services map to different slots.
	apart := func(list []api.WhereStatus) (n int) {
		slots := map[string]int{}
		for _, w := range list {
			if slot, ok := slots[w.Address.String()]; ok && slot != w.Slot {
				n++
			}
			slots[w.Address.String()] = w.Slot
		}
		return n
	}
	where := func(args ...string) []api.WhereStatus {
		t.Helper()
		return must[[]api.WhereStatus](h, append(append([]string{"where"}, args...), addresses...)...)
	}
	if n := apart(where()); n == 0 {
		t.Fatal("separate services map all devices to the same slots")
	}
	for slot := range 4 {
		pid, _ := h.member(nil, sharedSpecs...)
		for _, service := range []string{"bmp", "ipfix"} {
			if r := h.sockeye("register", "--service", service, "--slot", fmt.Sprint(slot), "--pid", fmt.Sprint(pid)); r.code != 0 {
				t.Fatalf("%+v", r)
			}
		}
	}
	for i := range 20 { // seen, so that the plan counts them
		ask("udp", fmt.Sprintf("127.0.1.%d", i))
	}
	next := strings.Replace(twoParts, "  ipfix:\n", "  ipfix:\n    slots_as: bmp\n", 1)
	file := h.write("next.yaml", next)
	if n := apart(where("--plan", file)); n != 0 {
		t.Errorf("according to plan, %d addresses have two slots", n)
	}
	if r := h.sockeye("plan", file); r.code != 0 || !strings.Contains(r.out, "slots_as: unset -> bmp") || !strings.Contains(r.out, "seen move") {
		t.Errorf("plan: %+v", r)
	}
	if n := apart(where()); n == 0 {
		t.Error("a plan changes slots")
	}
	more := h.write("more.yaml", strings.ReplaceAll(strings.ReplaceAll(twoParts, "slots: 4", "slots: 5"), "  ipfix:\n", "  ipfix:\n    slots_as: bmp\n"))
	if r := h.sockeye("plan", more); r.code != 0 || strings.Count(r.out, "the devices of slot 4 are refused until a member is registered there") != 2 {
		t.Errorf("plan of another slot: %+v", r)
	}
	h.write("policy.yaml", next)
	if r := h.sockeye("apply"); r.code != 0 {
		t.Fatalf("%+v", r)
	}
	together := func(when string) {
		t.Helper()
		if n := apart(where()); n != 0 {
			t.Errorf("%s, %d addresses have two slots", when, n)
		}
		for i := range 20 {
			address := fmt.Sprintf("127.0.1.%d", i)
			if tcp, udp := ask("tcp", address), ask("udp", address); tcp != udp || tcp == "" {
				t.Errorf("%s, TCP of %s reaches %s, UDP %s", when, address, tcp, udp)
			}
		}
		for _, s := range must[api.Status](h, "status").Services {
			if want := map[string]string{"ipfix": "bmp"}[s.Name]; s.SlotsAs != want {
				t.Errorf("service %s has the slots of %q", s.Name, s.SlotsAs)
			}
		}
	}
	together("after apply")
	h.kill()
	h.start()
	together("after the agent's restart")
	// A change of one service is a change of both.
	first := where("--service", "bmp")[0]
	away := (first.Slot + 1) % 4
	for _, change := range []struct {
		args  string
		check func(api.SlotStatus) bool
	}{
		{"slot set 2 drain --service ipfix", func(s api.SlotStatus) bool { return s.Slot != 2 || s.State == "drain" && s.Share == 0 }},
		{"slot set 3 --weight 10 --service bmp", func(s api.SlotStatus) bool { return s.Slot != 3 || s.Weight == 10 && s.Share < 0.2 }},
		{"slot set 2 ready --service bmp", func(s api.SlotStatus) bool { return s.Slot != 2 || s.State == "ready" && s.Share > 0.2 }},
		{fmt.Sprintf("move %s %d --service ipfix", first.Address, away), func(s api.SlotStatus) bool { return (s.Slot == away) == (len(s.Pins) == 1) }},
		{"slot set 3 --weight 100 --service ipfix", func(s api.SlotStatus) bool { return s.Share == 0.25 }},
		{fmt.Sprintf("move %s home --service bmp", first.Address), func(s api.SlotStatus) bool { return len(s.Pins) == 0 }},
	} {
		if plan := must[api.Plan](h, strings.Fields(change.args)...); len(plan.Changes) != 2 {
			t.Errorf("%s: %+v", change.args, plan)
		}
		for _, s := range must[[]api.SlotStatus](h, "slots") {
			if !change.check(s) {
				t.Errorf("%s: %+v", change.args, s)
			}
		}
		together(change.args)
	}
	h.refused(5, "service bmp: the slots are shared with another service", "move devices by sockeye move, which moves them in both services", nil, "rebalance", "--service", "bmp")
	// The service whose slots the other one shares comes first, and is alone in the file at first.
	if r := h.sockeye("apply", h.write("back.yaml", twoParts)); r.code != 0 {
		t.Fatalf("%+v", r)
	}
	if n := apart(where()); n != 0 {
		t.Error("a service without slots_as does not keep its devices")
	}
}

// TestSlotsAsFromTheStart creates both services at once, and the service that comes first by name shares the slots of
// the other one.
func TestSlotsAsFromTheStart(t *testing.T) {
	h := newHost(t, strings.Replace(twoParts, "  bmp:\n", "  bmp:\n    slots_as: ipfix\n", 1))
	h.start()
	s := must[api.Status](h, "status").Services
	if s[0].Nonce != s[1].Nonce {
		t.Errorf("nonces %s and %s", s[0].Nonce, s[1].Nonce)
	}
}
