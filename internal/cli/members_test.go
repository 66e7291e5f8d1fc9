// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"os/exec"
	"reflect"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"sockeye/internal/api"
)

// TestServiceInAnotherNamespace runs a service in the network namespace that the policy names: its members are found
// there and its ports are held there, while the agent stays in its own namespace.
func TestServiceInAnotherNamespace(t *testing.T) {
	for _, steering := range []string{"reuseport", "lookup"} {
		t.Run(steering, func(t *testing.T) {
			h := newHost(t, "services: {}\n")
			sockets := []string{"tcp [::]:1790", "udp [::]:4739"}
			pid, end := h.member(func(cmd *exec.Cmd) { cmd.SysProcAttr.Cloneflags = unix.CLONE_NEWNET }, sockets...)
			stranger, _ := h.member(nil, sockets...) // in the agent's own
			netns := fmt.Sprintf("steering: %s\n    netns: /proc/%d/ns/net\n    members: [{match: {command_line: ^collector}, slot: free}]", steering, pid)
			h.write("policy.yaml", strings.Replace(oneService, "user: root", "user: root\n    "+netns, 1))
			h.start()
			slots := must[[]api.SlotStatus](h, "slots")
			if !slots[0].Ready || slots[0].PID != pid || slots[1].Ready {
				t.Errorf("slots: %+v, want process %d in slot 0 alone", slots, pid)
			}
			status := must[api.Status](h, "status").Services[0]
			if !status.PortsSteered || len(status.Waiting) != 1 || status.Waiting[0].PID != stranger ||
				status.Waiting[0].Problem != "it is in another network namespace than the service" {
				t.Errorf("status: %+v, want the ports held and process %d waiting", status, stranger)
			}
			if live := must[api.Frame](h, "top").Services[0].Waiting; !reflect.DeepEqual(live, status.Waiting) {
				t.Errorf("top has %+v waiting, status %+v", live, status.Waiting)
			}
			line := fmt.Sprintf("is not ready: %s\n", status.Waiting[0].Problem)
			for _, args := range [][]string{{"status"}, {"top", "--once"}} {
				if r := h.sockeye(args...); !strings.Contains(r.out, fmt.Sprintf("telemetry: process %d (", stranger)) || !strings.Contains(r.out, line) {
					t.Errorf("%q lacks %q: %+v", args, line, r)
				}
			}
			// This namespace has no steering program: requests reach the other server.
			if got := ask("tcp", "127.0.0.1"); got != fmt.Sprint(stranger) {
				t.Errorf("in the agent's namespace %s answers, want %d", got, stranger)
			}
			end()
			h.eventually("the slot is empty", func() bool { return !must[[]api.SlotStatus](h, "slots")[0].Ready })
		})
	}
}

const oneService = `services:
  telemetry:
    slots: 2
    listeners:
      - {protocol: tcp, address: "[::]:1790"}
      - {protocol: udp, address: "[::]:4739"}
    user: root
    cgroup: CGROUP
`

// TestRuleForEverybody checks that the agent and the keeper, which have sockets on the members' ports, never become
// members, even if a rule matches all processes.
func TestRuleForEverybody(t *testing.T) {
	h := newHost(t, oneService+"    members: [{match: {user: root}, slot: free}]\n")
	h.start()
	pid, _ := h.member(nil, "tcp [::]:1790", "udp [::]:4739")
	ready := func() bool { return must[[]api.SlotStatus](h, "slots")[0].PID == pid }
	h.eventually("the member is registered", ready)
	h.kill()
	h.start() // adopts the keeper
	if slots := must[[]api.SlotStatus](h, "slots"); !ready() || slots[1].Ready {
		t.Errorf("slots: %+v, want process %d in slot 0 alone", slots, pid)
	}
}

// TestNamedLate checks that a process that changes its command line after it has opened its sockets becomes a member if
// the new command line matches, although no event reports the change.
func TestNamedLate(t *testing.T) {
	h := newHost(t, oneService+"    members: [{match: {command_line: ^late}, slot: 1}]\n")
	h.start()
	pid, _ := h.as("renamed", nil, "tcp [::]:1790", "udp [::]:4739")
	h.eventually("the member is registered", func() bool { return must[[]api.SlotStatus](h, "slots")[1].PID == pid })
}

// TestListenerRemoved checks that Sockeye holds no socket on the port of a listener that was removed from the policy.
func TestListenerRemoved(t *testing.T) {
	third := "      - {protocol: tcp, address: \"[::]:1799\"}\n"
	without := oneService + "    members: [{match: {command_line: ^collector}, slot: 0}]\n"
	h := newHost(t, strings.Replace(without, "    user: root\n", third+"    user: root\n", 1))
	h.start()
	pid, _ := h.member(nil, "tcp [::]:1790", "udp [::]:4739", "tcp [::]:1799")
	ready := func() bool { return must[[]api.SlotStatus](h, "slots")[0].PID == pid }
	h.eventually("the member is registered", ready)
	h.write("policy.yaml", without)
	if r := h.sockeye("apply"); r.code != 0 {
		t.Fatalf("apply: %+v", r)
	}
	if !ready() || !must[api.Status](h, "status").Services[0].PortsSteered {
		t.Error("the member has lost its slot, or the other ports are not held")
	}
	for i := range 32 {
		if got := dial("tcp", fmt.Sprintf("127.0.0.%d", i+1), "1799"); got != fmt.Sprint(pid) {
			t.Errorf("connection %d: %s answers, want %d", i, got, pid)
		}
	}
}
