// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/config"
	"sockeye/internal/fault"
	process "sockeye/internal/member"
	"sockeye/internal/netns"
	"sockeye/lab"
)

// TestMembersByCommand checks run, register and unregister, and that refused calls do not change existing members.
func TestMembersByCommand(t *testing.T) {
	inBothModes(t, func(t *testing.T, mode config.Steering) {
		h := newHost(t, mode)
		h.setPolicy(3)
		h.startAgent()
		home := h.homes(3)
		all := addresses(60)
		run := func(slot int, flags ...string) *member {
			return h.startReceiver(fmt.Sprintf("run-%d", slot), h.spec(slot),
				append([]string{os.Getenv(binaryEnv), "run", "--run-dir", h.dir, "--service", "telemetry"}, append(flags, "--")...)...)
		}
		run(2, "--slot", "2")
		h.ready(2)
		run(0) // the first free slot
		h.ready(0, 2)
		environ, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", h.members[0].Pid()))
		h.must(err)
		if e := strings.Split(string(environ), "\x00"); !slices.Contains(e, "SOCKEYE_SLOT=0") || !slices.Contains(e, "SOCKEYE_SERVICE=telemetry") {
			t.Errorf("environment: %q", e)
		}
		h.lands("two members by run", all, home.but(1))

		// The slot is occupied: by run, by register, and by a rule.
		h.refuse(5, []string{"slot 2 is ", "hint:"}, "run", "--slot", "2", "--", "true")
		first := h.members[2]
		rival := h.spec(2)
		if mode == config.Lookup { // otherwise it finds no free port
			rival.Sockets = h.spec(12).Sockets
		}
		other := h.startReceiver("other", rival) // no rule names it
		h.open(2)
		h.refuse(5, []string{"slot 2 is ", strconv.Itoa(first.Pid()), "hint:"}, "register", "--slot", "2", "--pid", strconv.Itoa(other.Pid()))
		h.must(other.Kill())
		h.startReceiver("receiver-2", rival)
		h.open(2)
		h.must(h.members[2].Kill())
		h.members[2] = first
		h.ready(0, 2)
		h.lands("after others wanted the slot", all, home.but(1))

		for _, slot := range []string{"3", "-1", "70000"} {
			h.refuse(2, []string{"slot " + slot + " is out of range", "hint:"}, "register", "--slot", slot, "--pid", strconv.Itoa(os.Getpid()))
			h.refuse(2, []string{"slot " + slot + " is out of range", "hint:"}, "run", "--slot", slot, "--", "true")
			h.refuse(2, []string{"slot " + slot + " is out of range", "hint:"}, "unregister", "--slot", slot)
		}
		h.refuse(2, []string{"there is no process 4000000"}, "register", "--slot", "1", "--pid", "4000000")
		h.refuse(2, []string{`there is no service "telemetri"`, "telemetry"}, "register", "--service", "telemetri", "--slot", "1", "--pid", "1")
		h.refuse(5, []string{"slot 1 is empty", "hint:"}, "unregister", "--slot", "1")

		// In another network namespace, by command and by a rule.
		p := h.startReceiverIn(h.devices, "receiver-1", h.spec(1))
		h.open(1)
		h.refuse(5, []string{"another network namespace", "hint:", "netns"}, "register", "--slot", "1", "--pid", strconv.Itoa(p.Pid()))
		// If the kernel provides the network namespace of a bind, this bind is not reported, because any user can bind in
		// a private namespace. The next agent finds the process in a scan.
		h.killAgent()
		h.startAgent()
		h.eventually("a process that waits", func() error {
			for _, w := range h.service().Waiting {
				if w.PID == p.Pid() && strings.Contains(w.Problem, "another network namespace") {
					return nil
				}
			}
			return fmt.Errorf("waiting: %+v", h.service().Waiting)
		})
		h.must(p.Kill())

		one := h.startReceiver("one", h.spec(1))
		h.open(1)
		h.lands("before register", all, home.but(1))
		var m api.Membership
		h.show(&m, "register", "--slot", "1", "--pid", strconv.Itoa(one.Pid()))
		if m.PID != one.Pid() || m.Slot == nil || *m.Slot != 1 || m.Service != "telemetry" {
			t.Errorf("register: %+v", m)
		}
		h.ready(0, 1, 2)
		h.lands("after register", all, home)
		h.killAgent()
		h.startAgent()
		h.ready(0, 1, 2)
		h.lands("after a new agent", all, home)

		// The member stays unregistered, also after a restart of the agent.
		h.show(&m, "unregister", "--slot", "1")
		h.ready(0, 2)
		h.lands("after unregister", all, home.but(1))
		h.killAgent()
		h.startAgent()
		h.ready(0, 2)
		h.lands("after unregister and a new agent", all, home.but(1))
		h.show(&m, "register", "--slot", "1", "--pid", strconv.Itoa(one.Pid()))
		h.lands("registered again", all, home)
		h.kill(0, 1, 2)
		h.nothingMisplaced(home, 200)
	})
}

var metricNames = []string{
	"sockeye_agent_starts_total", "sockeye_build_info", "sockeye_bypass_sockets", "sockeye_connections_total", "sockeye_datagrams_total", "sockeye_devices_adopted",
	"sockeye_devices_moving", "sockeye_devices_one_stream", "sockeye_devices_split", "sockeye_diverted_total", "sockeye_events_bytes",
	"sockeye_events_lost_total", "sockeye_events_recorded_total", "sockeye_keeper_running",
	"sockeye_member_accept_backlog", "sockeye_member_accept_queue", "sockeye_member_drops_total", "sockeye_member_receive_buffer_bytes",
	"sockeye_member_receive_queue_bytes", "sockeye_members_refused", "sockeye_members_waiting", "sockeye_policy_in_force",
	"sockeye_program_run_seconds_total", "sockeye_program_runs_total", "sockeye_programs_replaced_total", "sockeye_refused_total", "sockeye_registrations_total",
	"sockeye_service_ports_steered", "sockeye_sessions_closed_total", "sockeye_slot_ready", "sockeye_slot_share", "sockeye_slot_state",
	"sockeye_slot_weight", "sockeye_sockets", "sockeye_sockets_payload_bytes", "sockeye_sockets_queued_bytes", "sockeye_sockets_room_bytes",
	"sockeye_sockets_unread_bytes", "sockeye_sockets_unsent_bytes", "sockeye_sockets_zero_window", "sockeye_template_datagrams_total", "sockeye_template_exporters",
	"sockeye_template_malformed_total", "sockeye_template_replays_total", "sockeye_templates", "sockeye_templates_lost_total",
	"sockeye_templates_refused_total", "sockeye_unlisted_total",
}

// TestShown checks that the output of read-only commands matches the state of the kernel.
func TestShown(t *testing.T) {
	inBothModes(t, func(t *testing.T, mode config.Steering) {
		h := newHost(t, mode)
		h.setPolicy(4)
		h.serveMetrics()
		h.startAgent()
		h.start(0, 1, 2, 3)
		h.ready(0, 1, 2, 3)
		home := h.homes(4)
		all := addresses(100)
		const rounds = 3
		for range rounds {
			h.lands("four members", all, home)
		}
		h.kill(1)
		h.lands("three members", all, home.but(1))
		h.ready(0, 2, 3)
		share := map[int]uint64{}
		for _, a := range all {
			share[home(a)]++
		}

		var status api.Status
		h.show(&status, "status")
		if s := status.Services[0]; status.PID != h.agent.Pid() || s.Ready != 3 || s.Slots != 4 || !s.PortsSteered ||
			s.Steering != string(mode) || s.Problem != "" || len(s.Waiting) > 0 || s.WhenEmpty != "reject" ||
			!slices.Equal(s.Listeners, []string{"tcp [::]:1790", "udp [::]:4739"}) {
			t.Errorf("status: %+v", status)
		}
		var slots []api.SlotStatus
		h.show(&slots, "slots")
		metrics := h.scrape("127.0.0.1:9732")
		metric := func(name string, labels ...any) uint64 {
			full := "sockeye_" + name + fmt.Sprintf(labels[0].(string), labels[1:]...)
			value, ok := metrics[full]
			if !ok {
				t.Errorf("there is no %s", full)
			}
			return uint64(value)
		}
		for i, s := range slots {
			sent, lost := (rounds+1)*share[i], uint64(0)
			if i == 1 {
				sent, lost = rounds*share[i], 2*share[i]
			}
			if s.Slot != i || !about(s.Connections, sent) || !about(s.Datagrams, sent) || !about(s.Refused["empty_slot"], lost) || s.Diverted != 0 ||
				s.Ready != (i != 1) || i != 1 && (s.PID != h.members[i].Pid() || len(s.Sockets) != 2 || s.Sockets[0].Cookie == 0) {
				t.Errorf("slot %d: %+v; want %d sent by each protocol, %d refused", i, s, sent, lost)
			}
			label := `{service="telemetry",slot="%d"}`
			ready := metric("slot_ready", label, i) == 1
			if metric("registrations_total", label, i) != 1 {
				t.Errorf("slot %d: %d registrations", i, metric("registrations_total", label, i))
			}
			if metric("connections_total", label, i) != s.Connections || metric("datagrams_total", label, i) != s.Datagrams || ready != s.Ready {
				t.Errorf("metrics of slot %d are not %+v", i, s)
			}
			refused := uint64(0)
			for _, protocol := range []string{"tcp", "udp"} {
				n := metric("refused_total", `{protocol="%s",reason="empty_slot",service="telemetry",slot="%d"}`, protocol, i)
				if refused += n; !about(n, lost/2) {
					t.Errorf("metrics: slot %d refused %d of %s, want %d", i, n, protocol, lost/2)
				}
			}
			if refused != s.Refused["empty_slot"] {
				t.Errorf("metrics: slot %d refused %d, want %d", i, refused, s.Refused["empty_slot"])
			}
		}
		if metric("service_ports_steered", `{service="telemetry"}`) != 1 ||
			metric("agent_starts_total", "") != 1 || metric("members_waiting", `{service="telemetry"}`) != 0 {
			t.Errorf("metrics: %v", metrics)
		}
		var names []string
		for full := range metrics {
			if name, _, _ := strings.Cut(full, "{"); strings.HasPrefix(name, "sockeye_") {
				names = append(names, name)
			}
		}
		slices.Sort(names)
		want := slices.Clone(metricNames)
		if mode == config.Lookup { // without waiting rooms, lookup needs no keeper
			want = slices.DeleteFunc(want, func(name string) bool { return name == "sockeye_keeper_running" })
		}
		if names = slices.Compact(names); !slices.Equal(names, want) {
			t.Errorf("metrics are\n%q, want\n%q", names, want)
		}

		var devices []api.DeviceStatus
		h.show(&devices, "devices")
		if len(devices) != len(all) {
			t.Errorf("%d devices", len(devices))
		}
		for _, d := range devices {
			want := api.DeviceStatus{Connections: rounds + 1, Datagrams: rounds + 1}
			if home(d.Address) == 1 {
				want = api.DeviceStatus{Connections: rounds, Datagrams: rounds, Refused: 2}
			}
			served := d.LastSlot != nil && *d.LastSlot == home(d.Address)
			if !about(d.Connections, want.Connections) || !about(d.Datagrams, want.Datagrams) || !about(d.Refused, want.Refused) ||
				d.Slot != home(d.Address) || served == (home(d.Address) == 1) {
				t.Errorf("device %+v, want %+v", d, want)
			}
		}
		var where []api.WhereStatus
		h.show(&where, "where", all[0].String(), "::ffff:"+all[0].String(), all[1].String())
		for i, a := range []netip.Addr{all[0], all[0], all[1]} {
			if w := where[i]; w.Address != a || w.Slot != home(a) || w.Ready == nil || *w.Ready != (home(a) != 1) {
				t.Errorf("where: %+v", w)
			}
		}
		var why []api.Why
		h.show(&why, "why", all[0].String())
		if w := why[0]; len(why) != 1 || w.Slot != home(all[0]) || w.Seen == nil || (w.Effect == "reach") != (home(all[0]) != 1) ||
			w.Effect == "reach" && (w.Member == nil || w.Member.PID != h.members[w.Slot].Pid()) {
			t.Errorf("why: %+v", why)
		}
		// The text output has the same content.
		for command, word := range map[string]string{"status": "3 of 4", "slots": strconv.Itoa(h.members[0].Pid()), "devices": all[1].String()} {
			if out, errs, code := h.cli(command); code != 0 || !strings.Contains(out, word) {
				t.Errorf("sockeye %s: exit code %d, without %q: %s%s", command, code, word, out, errs)
			}
		}
	})
}

// serveMetrics adds the address of the metrics to the policy file.
func (h *host) serveMetrics() {
	h.Helper()
	text, err := os.ReadFile(h.policyPath())
	h.must(err)
	h.replaceFile(h.policyPath(), string(text)+"metrics: {listen: \"127.0.0.1:9732\"}\n")
}

// scrape reads metrics in the collectors' namespace.
func (h *host) scrape(address string) map[string]float64 {
	h.Helper()
	values := map[string]float64{}
	h.must(h.collectors.Do(func() error {
		c, err := net.Dial("tcp", address)
		if err != nil {
			return err
		}
		defer c.Close()
		if _, err := fmt.Fprintf(c, "GET /metrics HTTP/1.0\r\n\r\n"); err != nil {
			return err
		}
		response, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil {
			return err
		}
		body, err := io.ReadAll(response.Body)
		if err != nil || response.StatusCode != http.StatusOK {
			return fmt.Errorf("%s: %w", response.Status, err)
		}
		for line := range strings.Lines(string(body)) {
			name, value, ok := strings.Cut(strings.TrimSpace(line), " ")
			if !ok || strings.HasPrefix(line, "#") {
				continue
			}
			if i := strings.LastIndexByte(line, ' '); i > len(name) { // labels may contain spaces
				name, value = line[:i], strings.TrimSpace(line[i:])
			}
			if values[name], err = strconv.ParseFloat(value, 64); err != nil {
				return err
			}
		}
		return nil
	}))
	return values
}

// TestReset checks that reset removes all pins, and fails while an agent runs.
func TestReset(t *testing.T) {
	inBothModes(t, func(t *testing.T, mode config.Steering) {
		h := up(t, mode, 4, "takeover: true") // the keeper has waiting rooms
		home, nonce := h.homes(4), h.service().Nonce
		all := addresses(200)
		h.refuse(5, []string{"hint:"}, "reset", "--pins", h.pins)
		h.lands("after a reset that was refused", all, home)

		h.must(h.agent.Signal(unix.SIGTERM))
		if err := h.agent.Wait(); err != nil {
			t.Errorf("the agent exited with %v", err)
		}
		h.lands("the agent has stopped", all, home)
		out, errs, code := h.cli("reset", "--pins", h.pins)
		if code != 0 {
			t.Fatalf("reset: exit code %d: %s%s", code, out, errs)
		}
		if left, err := os.ReadDir(h.pins); !os.IsNotExist(err) {
			t.Errorf("pins still exist: %v, %v", left, err)
		}
		if pids, err := h.agent.PIDs(); err != nil || len(pids) > 0 {
			t.Errorf("processes are still running: %v, %v", pids, err)
		}
		apart := 0
		for a, l := range h.sweep(all) {
			if (mode == config.Lookup) != (l == landing{refused, refused}) {
				t.Errorf("after reset: %v: %v", a, l)
			}
			if l.tcp != l.udp {
				apart++
			}
		}
		if mode == config.Reuseport && apart < len(all)/2 {
			t.Errorf("after reset, only %d of %d devices are split", apart, len(all))
		}
		h.startAgent()
		h.ready(0, 1, 2, 3)
		if now := h.service().Nonce; now != nonce {
			t.Errorf("nonce %s, before reset %s", now, nonce)
		}
		h.lands("a new agent", all, home)
	})
}

// TestNothingLeft checks that a closed host leaves no process, cgroup, namespace, pin or program.
func TestNothingLeft(t *testing.T) {
	inBothModes(t, func(t *testing.T, mode config.Steering) {
		var processes []*process.Process
		var programs []ebpf.ProgramID
		var namespace, cgroup, pins string
		var cookie uint64 // of the namespace: the next one may get its inode number
		t.Run("host", func(t *testing.T) {
			h := up(t, mode, 4)
			h.lands("at the start", addresses(20), h.homes(4))
			h.killAgent()
			h.startAgent()
			for _, p := range append([]*lab.Process{h.agent}, h.members[0].Process, h.members[3].Process) {
				processes = append(processes, processesOf(t, p)...)
			}
			if want := map[config.Steering]int{config.Reuseport: 4, config.Lookup: 3}[mode]; len(processes) != want {
				t.Errorf("%d processes, want %d", len(processes), want)
			}
			found, err := filepath.Glob(filepath.Join(h.pins, "steer_telemetry", "prog_*"))
			h.must(err)
			for _, path := range found {
				p, err := ebpf.LoadPinnedProgram(path, nil)
				h.must(err)
				info, err := p.Info()
				h.must(err)
				id, _ := info.ID()
				programs = append(programs, id)
				p.Close()
			}
			if len(programs) == 0 {
				t.Error("no program is pinned")
			}
			namespace, err = os.Readlink(h.collectors.Path())
			h.must(err)
			cookie, err = cookieOf(h.collectors.Path())
			h.must(err)
			cgroup, pins = h.lab.Cgroup(), h.pins
		})
		host := &host{T: t}
		host.eventually("everything to go", func() error {
			if err := allEnded(processes); err != nil {
				return err
			}
			for _, id := range programs {
				if p, err := ebpf.NewProgramFromID(id); err == nil {
					p.Close()
					return fmt.Errorf("program %d", id)
				}
			}
			for _, path := range []string{cgroup, pins} {
				if _, err := os.Stat(path); !os.IsNotExist(err) {
					return fmt.Errorf("%s is still there", path)
				}
			}
			holders, _ := filepath.Glob("/proc/[0-9]*/task/*/ns/net")
			own, _ := filepath.Glob("/proc/self/fd/*")
			for _, path := range append(holders, own...) {
				if to, err := os.Readlink(path); err != nil || to != namespace {
					continue
				}
				if c, err := cookieOf(path); err == nil && c == cookie {
					return fmt.Errorf("%s is %s", path, namespace)
				}
			}
			return nil
		})
	})
}

// processesOf returns the processes of a lab's process.
func processesOf(t *testing.T, p *lab.Process) (list []*process.Process) {
	t.Helper()
	pids, err := p.PIDs()
	if err != nil {
		t.Fatal(err)
	}
	for _, pid := range pids {
		one, err := process.Read(pid)
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, one)
	}
	return list
}

// allEnded returns an error for a process that still runs. Another process may have got its PID.
func allEnded(processes []*process.Process) error {
	for _, p := range processes {
		if process.Alive(p.PID, p.StartTime) {
			return fmt.Errorf("process %d: %s", p.PID, p.Command())
		}
	}
	return nil
}

// cookieOf returns the cookie of the network namespace at a path.
func cookieOf(path string) (uint64, error) {
	f, err := os.Open(path)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	return netns.Cookie(f)
}

// TestIsolatedAsks checks that the agent refuses requests of an isolated program, even with UID 0.
func TestIsolatedAsks(t *testing.T) {
	h := newHost(t, config.Reuseport)
	h.setPolicy(2)
	h.startAgent()
	for _, args := range [][]string{{"status"}, {"apply"}, {"run", "--service", "telemetry", "--", "true"}} {
		inside := append([]string{"isolate", "--as-root", "--", os.Getenv(binaryEnv), "--run-dir", h.dir}, args...)
		h.refuse(fault.CodeNotPermitted, []string{"another user namespace", "hint:"}, inside...)
	}
	var s api.Status
	h.show(&s, "status")
}

// about reports whether a count is a number, or a few more: a probe that gets no answer from a busy host is repeated, and so is a SYN.
func about(n, want uint64) bool {
	const further = 6
	return n >= want && n <= want+further
}
