// SPDX-License-Identifier: Apache-2.0

//go:build debian

package guest

import (
	"fmt"
	"net/netip"
	"net/url"
	"strings"
	"testing"
	"time"

	"sockeye/internal/api"
)

// TestReboot runs in the second boot. It checks that systemd starts the agent and, after
// it, the members.
func TestReboot(t *testing.T) {
	prepareHost(t)
	w := startRouters(t)
	t.Run("after a reboot every router is with the member that it had", func(t *testing.T) {
		waitReady(t, 0, 1, 2, 3)
		same(t, notedPlaces(t), w.places(t))
		noProblem(t)
	})
	t.Run("a member's unit starts after the agent's", func(t *testing.T) {
		agentUp := property(t, "sockeye", "ActiveEnterTimestampMonotonic")
		for slot := range members {
			unit := fmt.Sprintf("nfacctd@%d", slot)
			if up := property(t, unit, "ExecMainStartTimestampMonotonic"); len(up) < len(agentUp) || len(up) == len(agentUp) && up < agentUp {
				t.Errorf("%s started at %s µs, the agent was ready at %s µs", unit, up, agentUp)
			}
		}
	})
	t.Run("no unit of Sockeye held up the shutdown", func(t *testing.T) {
		for line := range strings.Lines(must(t, "journalctl", "-b", "-1", "-o", "cat", "--no-pager", "_PID=1")) {
			if strings.Contains(line, "sockeye-keeper") && (strings.Contains(line, "timed out") || strings.Contains(line, "SIGKILL")) {
				t.Error(line)
			}
		}
	})
	t.Run("the next boot starts members without the agent", func(t *testing.T) {
		var kept []string
		for line := range strings.Lines(read(t, "/etc/systemd/system/nfacctd@.service")) {
			if strings.HasPrefix(line, "After=") || strings.HasPrefix(line, "Wants=") {
				line = strings.ReplaceAll(line, "sockeye.service", "")
			}
			kept = append(kept, line)
		}
		write(t, "/etc/systemd/system/nfacctd@.service", strings.Join(kept, ""))
		must(t, "systemctl", "disable", "--no-reload", "sockeye")
	})
}

// TestMembersBeforeAgent starts members and routers before the agent, so that the kernel
// distributes the routers over the members by its own hash.
func TestMembersBeforeAgent(t *testing.T) {
	prepareHost(t)
	if state := run(t, "systemctl", "is-active", "sockeye").stdout; strings.TrimSpace(state) == "active" {
		t.Fatal("the agent is already running")
	}
	w := startRouters(t)
	spread := func(t *testing.T) map[netip.Addr]int {
		t.Helper()
		found := map[netip.Addr]int{}
		wait(t, "every router has a session", func() string {
			sessions, err := owners()
			if err != nil {
				return err.Error()
			}
			clear(found)
			for _, r := range w.routers {
				slot, ok := sessions[netip.AddrPortFrom(r.address, r.port())]
				if !ok {
					return fmt.Sprintf("%v has none", r.address)
				}
				found[r.address] = slot
			}
			return ""
		})
		return found
	}
	// begin starts members and routers without an agent, until some router's session is not with the member that the
	// agent would select. The modes report and adopt keep this.
	begin := func(t *testing.T, onStart string) {
		t.Helper()
		policy := strings.Replace(firstPolicy(t), "slots: 4", "slots: 4\n    on_start: "+onStart, 1)
		run(t, "systemctl", "stop", "sockeye")
		must(t, binary, "reset", "--state") // otherwise devices remain adopted
		// Without the agent, members without a session also receive IPFIX, and write records.
		w.whenever(t, never)
		write(t, policyPath, policy)
		time.Sleep(5 * time.Second)
		for range 5 {
			found := spread(t)
			slots := map[int]bool{}
			for _, slot := range found {
				slots[slot] = true
			}
			if len(slots) > 1 {
				return
			}
			for slot := range slots {
				unit := fmt.Sprintf("nfacctd@%d", slot)
				must(t, "systemctl", "reset-failed", unit) // otherwise systemd limits the starts
				must(t, "systemctl", "restart", unit)
			}
		}
		t.Fatal("the kernel assigned all routers to one member")
	}
	split := func(t *testing.T) int {
		t.Helper()
		sessions, err := owners()
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		for _, r := range w.routers {
			where := query[[]api.WhereStatus](t, "/v1/where", url.Values{"address": {r.address.String()}})
			if slot, ok := sessions[netip.AddrPortFrom(r.address, r.port())]; !ok || slot != where[0].Slot {
				n++
			}
		}
		return n
	}

	t.Run("on_start report names routers that are not with their slot's member", func(t *testing.T) {
		begin(t, "report") // the state after the boot
		must(t, "systemctl", "start", "sockeye")
		waitReady(t, 0, 1, 2, 3)
		if split(t) == 0 {
			t.Fatal("all routers are at the members of their slots")
		}
		sessions := w.sessions()
		wait(t, "status reports the routers", func() string {
			s := waitAgent(t)
			if s.Services[0].Problem == "" {
				return run(t, binary, "status").String()
			}
			return ""
		})
		w.unchanged(t, sessions)
	})
	t.Run("on_start adopt leaves each router where its session is", func(t *testing.T) {
		begin(t, "adopt")
		before := spread(t)
		sessions := w.sessions()
		must(t, "systemctl", "start", "sockeye")
		waitReady(t, 0, 1, 2, 3)
		wait(t, "the agent has adopted routers", func() string {
			if s := waitAgent(t).Services[0]; s.AdoptedDevices == 0 {
				return fmt.Sprintf("%+v", s)
			}
			return ""
		})
		w.whenever(t, withSession)
		same(t, before, w.places(t))
		w.unchanged(t, sessions)
		noProblem(t)
	})
	t.Run("on_start reset brings TCP and UDP of each router to one member", func(t *testing.T) {
		begin(t, "reset")
		must(t, "systemctl", "start", "sockeye")
		waitReady(t, 0, 1, 2, 3)
		w.whenever(t, withSession)
		w.places(t)
		if n := split(t); n != 0 {
			t.Errorf("%d routers are not at the member of their slot", n)
		}
		noProblem(t)
	})
}
