// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/config"
)

// events returns the events that a command prints.
func (h *host) events(args ...string) (list []api.Event) {
	h.Helper()
	out, errs, code := h.cli(append([]string{"events", "-o", "jsonl"}, args...)...)
	if code != 0 {
		h.Fatalf("sockeye events %v: exit code %d: %s", args, code, errs)
	}
	for line := range strings.Lines(out) {
		var e api.Event
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			h.Fatalf("sockeye events %v: %v: %s", args, err, line)
		}
		list = append(list, e)
	}
	return list
}

// event waits for an event of a kind that meets a condition.
func (h *host) event(kind string, meets func(api.Event) bool) (found api.Event) {
	h.Helper()
	h.eventually("event "+kind, func() error {
		all := h.events("--kind", kind, "--last", "1000")
		i := slices.IndexFunc(all, meets)
		if i < 0 {
			return fmt.Errorf("%d others of the kind: %+v", len(all), all)
		}
		found = all[i]
		return nil
	})
	return found
}

// badPolicy writes a policy that is refused to a file of its own.
func (h *host) badPolicy() string {
	h.Helper()
	path := h.dir + "/bad.yaml"
	h.replaceFile(path, "services: {t: {slots: 1, on_start: leave, listeners: [{protocol: tcp, address: \"[::]:1790\"}]}}\n")
	return path
}

func ofSlot(slot int) func(api.Event) bool {
	return func(e api.Event) bool { return e.Slot != nil && *e.Slot == slot }
}

// TestEvents records members, slots that close, refusals, moves and policies, across agents that are killed.
func TestEvents(t *testing.T) {
	inBothModes(t, func(t *testing.T, mode config.Steering) {
		h := up(t, mode, 3)
		all := addresses(24)
		homes := h.homes(3)
		registered := h.event("member_registered", ofSlot(1))
		if registered.PID != h.members[1].Pid() || registered.Service != "telemetry" || registered.Details["source"] == "" {
			t.Errorf("registration: %+v", registered)
		}

		h.kill(1)
		closed := h.event("slot_closed", ofSlot(1))
		if closed.Details["reason"] != "process ended by SIGKILL" || closed.PID != registered.PID {
			t.Errorf("end of the member: %+v", closed)
		}
		h.lands("slot 1 is empty", all, homes.but(1))
		if notes := h.service().Notes; len(notes) != 1 || notes[0] != "slot 1 is empty: the packets of its devices are refused" {
			t.Errorf("notes %q", notes)
		}
		lost := slices.IndexFunc(all, func(a netip.Addr) bool { return homes(a) == 1 })
		device := all[lost].Unmap().String()
		refused := h.event("device_refused", func(e api.Event) bool { return e.Device == device })
		if !ofSlot(1)(refused) || refused.Details["reason"] != "empty_slot" || refused.Details["protocol"] == "" {
			t.Errorf("refusal: %+v", refused)
		}
		if kept := slices.IndexFunc(h.events("--kind", "device_refused", "--last", "1000"), func(e api.Event) bool { return !ofSlot(1)(e) }); kept >= 0 {
			t.Errorf("refusal of a device of another slot")
		}
		total := h.event("refusals", func(e api.Event) bool { return e.Details["packets"] != "" })
		if n, err := strconv.Atoi(total.Details["packets"]); err != nil || n < 2 {
			t.Errorf("summary: %+v", total)
		}

		// The devices of slot 0 can only move to slot 2 then.
		if out, errs, code := h.cli("slot", "set", "1", "drain"); code != 0 {
			t.Fatal(out, errs)
		}
		kept := slices.DeleteFunc(slices.Clone(all), func(a netip.Addr) bool { return homes(a) != 0 })
		h.connectAll(kept)
		const pace = "pace: {devices: 1, timeout: 2m}"
		h.setPolicy(3, pace)
		if out, errs, code := h.cli("apply"); code != 0 {
			t.Fatal(out, errs)
		}

		follow := exec.CommandContext(t.Context(), h.binary, "--run-dir", h.dir, "events", "--follow", "--last", "1", "-o", "jsonl")
		pipe, err := follow.StdoutPipe()
		h.must(err)
		h.must(follow.Start())
		lines := bufio.NewScanner(pipe)
		if !lines.Scan() { // an old event: the command follows now
			t.Fatal("no line")
		}
		if out, errs, code := h.cli("slot", "set", "0", "drain"); code != 0 {
			t.Fatal(out, errs)
		}
		var live []string
		for lines.Scan() {
			var e api.Event
			h.must(json.Unmarshal(lines.Bytes(), &e))
			live = append(live, e.Kind)
			if e.Kind == "requested" {
				if e.Details["user"] != "root" || !strings.Contains(e.Details["command"], "slot set 0 drain") {
					t.Errorf("request: %+v", e)
				}
				break
			}
		}
		h.event("slot_changed", ofSlot(0))
		if !slices.Contains(live, "slot_changed") {
			t.Errorf("followed events: %q", live)
		}
		h.must(follow.Process.Signal(unix.SIGINT))
		h.must(follow.Wait())

		moved := h.event("device_moved", func(e api.Event) bool { return e.Details["from"] == "0" })
		if !ofSlot(2)(moved) || moved.Details["connections"] != "1" || !slices.Contains(kept, netip.MustParseAddr(moved.Address)) {
			t.Errorf("move: %+v", moved)
		}
		h.event("moves_begun", func(e api.Event) bool { return strings.Contains(e.Details["cause"], "drain") })

		h.setPolicy(3, pace, "on_start: report")
		if out, errs, code := h.cli("apply"); code != 0 {
			t.Fatal(out, errs)
		}
		h.refuse(2, []string{"on_start"}, "apply", h.badPolicy())
		h.event("policy_not_applied", func(e api.Event) bool { return strings.Contains(e.Details["error"], "on_start") })
		h.event("policy_applied", func(e api.Event) bool { return strings.Contains(e.Details["what"], "on_start") })

		follow = exec.CommandContext(t.Context(), h.binary, "--run-dir", h.dir, "events", "--follow", "--last", "1", "-o", "jsonl")
		pipe, err = follow.StdoutPipe()
		h.must(err)
		h.must(follow.Start())
		lines = bufio.NewScanner(pipe)
		if !lines.Scan() {
			t.Fatal("no line")
		}
		before := h.events("--last", "1000")
		h.killAgent()
		h.startAgent()
		for kind := ""; kind != "agent_started"; {
			if !lines.Scan() {
				t.Fatal("the command does not follow the new agent")
			}
			var e api.Event
			h.must(json.Unmarshal(lines.Bytes(), &e))
			kind = e.Kind
		}
		h.must(follow.Process.Signal(unix.SIGINT))
		h.must(follow.Wait())
		h.event("member_restored", ofSlot(2))
		after := h.events("--last", "1000")
		if len(after) <= len(before) || after[0].ID != before[0].ID || after[len(before)-1].ID != before[len(before)-1].ID {
			t.Errorf("a new agent has %d events, the killed one had %d", len(after), len(before))
		}
		for i := range after[1:] {
			if after[i+1].ID != after[i].ID+1 {
				t.Errorf("event %d follows %d", after[i+1].ID, after[i].ID)
			}
		}

		for _, e := range h.events("--slot", "1", "--last", "1000") {
			if !ofSlot(1)(e) {
				t.Errorf("--slot 1 shows %+v", e)
			}
		}
		if of := h.events("--device", device, "--since", "1h"); len(of) != 1 || of[0].Kind != "device_refused" {
			t.Errorf("--device %s shows %+v", device, of)
		}
		text, _, _ := h.cli("events", "--kind", "slot_closed")
		if !strings.Contains(text, "telemetry slot 1: slot cleared") || !strings.Contains(text, "reason process ended by SIGKILL") {
			t.Errorf("events as text:\n%s", text)
		}
		h.refuse(2, []string{"--kind", "member"}, "events", "--kind", "nonsense")
		h.refuse(2, []string{"--since", "1h"}, "events", "--since", "yesterday")
		h.refuse(2, []string{"slot"}, "events", "--slot", "-1")
		h.refuse(2, []string{"last"}, "events", "--last", "0")
		h.refuse(2, []string{"--output"}, "events", "-o", "yaml")
	})
}

// TestEventsDamaged starts an agent whose files of events are damaged: it records further events and says that some are missing.
func TestEventsDamaged(t *testing.T) {
	h := up(t, config.Reuseport, 2)
	before := h.events("--last", "1000")
	h.killAgent()
	path := h.dir + "/state/events/1.jsonl"
	// Line 2 is overwritten, and the last one is cut.
	h.must(exec.Command("sed", "-i", "2s/.*/\\x00{{{/", path).Run())
	h.must(exec.Command("truncate", "-s", "-10", path).Run())
	h.startAgent()
	h.event("member_restored", ofSlot(1))
	after := h.events("--last", "1000")
	if after[0].ID != before[0].ID || after[1].Kind != api.EventsMissing || after[1].Details["count"] != "1" || after[2].ID != before[2].ID {
		t.Errorf("events of a damaged file: %+v", after[:min(3, len(after))])
	}
	last := uint64(0)
	for _, e := range after {
		if e.ID > 0 && e.ID <= last {
			t.Errorf("event %d follows %d", e.ID, last)
		}
		last = max(last, e.ID)
	}
}

// TestEventsNotRecorded starts an agent that cannot record events: status says so, and steering works.
func TestEventsNotRecorded(t *testing.T) {
	h := newHost(t, config.Reuseport)
	h.setPolicy(2)
	h.must(os.MkdirAll(h.dir+"/state", 0o700))
	h.must(os.WriteFile(h.dir+"/state/events", nil, 0o600))
	h.startAgent()
	h.start(0, 1)
	h.ready(0, 1)
	h.lands("without events", addresses(8), h.homes(2))
	if text, _, code := h.cli("status"); code != 0 || !strings.Contains(text, "events are not recorded: ") {
		t.Errorf("status, exit code %d:\n%s", code, text)
	}
	h.refuse(1, []string{"cannot record events", "log"}, "events")
}
