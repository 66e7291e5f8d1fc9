// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/api"
)

var gaps = regexp.MustCompile(`  +`)

var processOf = regexp.MustCompile(`process \d+ \(collector\)`)

// shows compares the output of a command with want. Runs of spaces count as two spaces.
func (h *host) shows(want string, pids []int, args ...string) {
	h.t.Helper()
	r := h.sockeye(args...)
	got := gaps.ReplaceAllString(h.plain(r.out, pids...), "  ")
	got = regexp.MustCompile(`\b\d+s ago`).ReplaceAllString(got, "0s ago")
	if want = strings.TrimPrefix(want, "\n"); got != want || r.code != 0 || r.err != "" {
		h.t.Errorf("sockeye %q: %d %s\n%s\nwant\n%s", args, r.code, r.err, got, want)
	}
}

// TestTables checks the tables of the read-only commands, from a host without services on.
func TestTables(t *testing.T) {
	h := newHost(t, twoServices)
	h.write("devices.csv", "127.0.0.1,edge\n")
	h.start()
	agentPID := h.agent.Process.Pid
	age := regexp.MustCompile(`up \d+s`)
	r := h.sockeye("status")
	if got := age.ReplaceAllString(gaps.ReplaceAllString(h.plain(r.out, agentPID), "  "), "up 0s"); got != `agent devel, pid PID, up 0s, policy DIR/policy.yaml

SERVICE  STEERING  READY  WHEN EMPTY  HELD  LISTENERS
spare  reuseport  0 of 2  reject  no  tcp [::]:1791, udp [::]:4740
telemetry  reuseport  0 of 4  reject  yes  tcp [::]:1790, udp [::]:4739

spare: slots 0, 1 are empty: the packets of their devices are refused

spare: the members' user is not known before the first member; until then the ports are not held
hint: set user of the service

telemetry: device map DIR/devices.csv, 1 prefix of 1 device

telemetry: slots 0, 1, 2, 3 are empty: the packets of their devices are refused
` {
		t.Errorf("status:\n%s", got)
	}
	h.shows("no devices seen yet (a service with track_devices off records no devices)\n", nil, "devices")
	h.shows("nothing would change\n", nil, "plan")
	h.shows("nothing changed\n", nil, "apply")
	h.shows("DIR/policy.yaml is valid, 2 services\n", nil, "check", h.policy)
	h.shows(`
SERVICE  SLOT  STATE  WEIGHT  SHARE  READY  PID  SESSIONS  CONNECTIONS  DATAGRAMS  REFUSED  DIVERTED  COMMAND
spare  0  ready  100  50 %  no  -  0  0  0  0  0  -
spare  1  ready  100  50 %  no  -  0  0  0  0  0  -
`, nil, "slots", "--service", "spare")

	var pids []int
	for range 4 {
		pid, _ := h.member(nil, "tcp [::]:1790", "udp [::]:4739")
		h.shows("process PID registered in slot "+strconv.Itoa(len(pids))+" of telemetry\n", []int{pid},
			"register", "--service", "telemetry", "--pid", strconv.Itoa(pid))
		pids = append(pids, pid)
	}
	slot := must[[]api.WhereStatus](h, "where", "127.0.0.1", "--service", "telemetry")[0].Slot
	for _, network := range []string{"tcp", "udp"} {
		if got, want := ask(network, "127.0.0.1"), strconv.Itoa(pids[slot]); got != want {
			t.Errorf("%s: %s answers, want %s", network, got, want)
		}
	}
	number := strconv.Itoa(slot)
	h.shows("SERVICE  ADDRESS  DEVICE  SLOT  LAST SLOT  SESSIONS  CONNECTIONS  DATAGRAMS  REFUSED  LAST SEEN\n"+
		"telemetry  127.0.0.1  edge  "+number+"  "+number+"  0  1  1  0  0s ago\n", nil, "devices")
	row := regexp.MustCompile(`(?m)^telemetry  ` + number + `  ready  100  25 %  yes  PID  0  1  1  0  0  collector member tcp \[::\]:1790 udp \[::\]:4739$`)
	if r := h.sockeye("slots"); !row.MatchString(gaps.ReplaceAllString(h.plain(r.out, pids...), "  ")) {
		t.Errorf("slots:\n%s", r.out)
	}
	live := h.sockeye("where", "127.0.0.1", "::ffff:127.0.0.1", "2001:db8::1", "--service", "telemetry")
	columns := regexp.MustCompile(`^SERVICE +ADDRESS +DEVICE +BUCKET +SLOT +PINNED +READY
telemetry +127.0.0.1 +edge +(\d+) +` + number + ` +no +yes
telemetry +127.0.0.1 +edge +(\d+) +` + number + ` +no +yes
telemetry +2001:db8::1 +- +\d+ +\d +no +yes
$`)
	if m := columns.FindStringSubmatch(live.out); m == nil || m[1] != m[2] {
		t.Errorf("where:\n%s", live.out)
	}
	// All forms of the argument select the same device.
	nonce := must[api.Status](h, "status").Services[1].Nonce
	for _, way := range [][]string{
		{"--offline", "--pins", h.pins, "--service", "telemetry"},
		{"--plan", h.policy, "--service", "telemetry"},
		{"--slots", "4", "--nonce", nonce, "--device-map", h.dir + "/devices.csv"},
	} {
		addresses := []string{"where", "127.0.0.1", "127.0.0.9", "2001:db8::1"}
		want := must[[]api.WhereStatus](h, append(addresses, "--service", "telemetry")...)
		for i, got := range must[[]api.WhereStatus](h, append(addresses, way...)...) {
			if got.Slot != want[i].Slot || got.Bucket != want[i].Bucket {
				t.Errorf("where %q: %+v, want %+v", way, got, want[i])
			}
		}
	}

	h.write("policy.yaml", strings.Replace(twoServices, "slots: 4", "slots: 3\n    when_empty: {standby: 0}", 1))
	moves := "0"
	if after := must[[]api.WhereStatus](h, "where", "127.0.0.1", "--plan", h.policy, "--service", "telemetry"); after[0].Slot != slot {
		moves = "1"
	}
	steps := `
WHERE  ACTION  WHAT  EFFECT
telemetry  change  slots: 4 -> 3  ` + moves + ` of 1 device seen move; 1 member loses its slot
telemetry  change  when_empty: reject -> standby 0  -
`
	h.shows(steps, nil, "plan")
	h.shows(steps, nil, "apply")
	h.shows(`
WHERE  ACTION  WHAT  EFFECT
telemetry  change  slots: 3 -> 4  `+moves+` of 1 device seen move; the devices of slot 3 stay until a member is registered there
telemetry  change  when_empty: standby 0 -> reject  -
`, nil, "apply", "--previous")
	h.shows("slot 1 of telemetry is empty\n", nil, "unregister", "--service", "telemetry", "--slot", "1")
	if r := h.sockeye("version"); !regexp.MustCompile(`^sockeye devel, go1\S+ \w+, pin schema \d+, Linux \S+\n$`).MatchString(r.out) {
		t.Errorf("version: %q", r.out)
	}
}

// TestRun checks that run executes the program in the first slot without a running process.
func TestRun(t *testing.T) {
	h := newHost(t, twoServices)
	h.write("devices.csv", "")
	h.start()
	start := func(args ...string) *exec.Cmd {
		cmd := process("sockeye", append([]string{"--run-dir", h.run, "run", "--service", "telemetry"}, args...)...)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
		return cmd
	}
	in := func(slot int, cmd *exec.Cmd) {
		t.Helper()
		h.eventually("the program is registered", func() bool {
			s := must[[]api.SlotStatus](h, "slots", "--service", "telemetry")[slot]
			return s.PID == cmd.Process.Pid && s.Ready && s.Source == "run" && strings.HasSuffix(s.Command, "exe member tcp [::]:1790 udp [::]:4739")
		})
	}
	program := []string{"--", "/proc/self/exe", "member", "tcp [::]:1790", "udp [::]:4739"}
	var cmds []*exec.Cmd
	for slot := range 4 {
		cmds = append(cmds, start(program...))
		in(slot, cmds[slot])
	}
	for _, slot := range []int{2, 0, 2} {
		cmds[slot].Process.Kill()
		cmds[slot].Wait()
		cmds[slot] = start(program...)
		in(slot, cmds[slot])
	}
	// A program that cannot be started leaves its slot free.
	cmds[3].Process.Kill()
	cmds[3].Wait()
	file := h.write("program", "neither a script nor a program")
	if err := unix.Chmod(file, 0o755); err != nil {
		t.Fatal(err)
	}
	h.isFailure(h.child(nil, "sockeye", "--run-dir", h.run, "-o", "json", "run", "--service", "telemetry", "--", file), 1,
		"start DIR/program: exec format error", "")
	in(3, start(append([]string{"--slot", "3"}, program...)...))
}

// TestWaiting checks that a process that has not opened all sockets is shown with the missing listeners.
func TestWaiting(t *testing.T) {
	h := newHost(t, strings.Replace(twoServices, "    user: root\n", "    user: root\n    members:\n      - {match: {command_line: 'member tcp \\[::\\]:1790'}, slot: 2}\n", 1))
	h.write("devices.csv", "")
	h.start()
	pid, end := h.member(nil, "tcp [::]:1790 mptcp")
	h.eventually("the member waits", func() bool {
		return strings.Contains(h.plain(h.sockeye("status").out, pid), `
telemetry: process PID (collector member tcp [::]:1790 mptcp) is not ready: its socket mptcp [::]:1790 is MPTCP, which the kernel does not steer
hint: programs in Go: GODEBUG=multipathtcp=0, or ListenConfig.SetMultipathTCP(false)
`)
	})
	end()
	h.eventually("the member is forgotten", func() bool { return !strings.Contains(h.sockeye("status").out, "not ready") })
}

func TestSome(t *testing.T) {
	list := []string{"a", "b", "c", "d", "e"}
	for n, want := range []string{"", "a", "a, b", "a, b, c", "a, b, c, d", "a, b, c and 2 more"} {
		if got := some(list[:n], 4); got != want {
			t.Errorf("%d: %q, want %q", n, got, want)
		}
	}
}

func TestHelpAndCompletion(t *testing.T) {
	h := newHost(t, twoServices)
	for _, shell := range []string{"bash", "zsh", "fish"} {
		if r := h.sockeye("completion", shell); r.code != 0 || !strings.Contains(r.out, "sockeye") || r.err != "" {
			t.Errorf("completion %s: %+v", shell, r)
		}
	}
	for _, args := range [][]string{{}, {"help"}, {"--help"}, {"help", "where"}, {"where", "--help"}, {"completion"}, {"help", "completion", "zsh"}} {
		if r := h.sockeye(args...); r.code != 0 || !strings.Contains(r.out, "Usage:\n") || r.err != "" {
			t.Errorf("%q: %+v", args, r)
		}
	}
	if a, b := h.sockeye("help", "where").out, h.sockeye("where", "--help").out; a != b {
		t.Errorf("help where:\n%s\nwhere --help:\n%s", a, b)
	}
	root := Root(Host())
	for _, cmd := range root.Commands() {
		if cmd.Short == "" || !cmd.Hidden && cmd.Name() != "completion" && strings.HasSuffix(cmd.Short, ".") {
			t.Errorf("%s: %q", cmd.Name(), cmd.Short)
		}
		for line := range strings.Lines(cmd.Long) {
			if len(line) > 81 && cmd.Name() != "completion" {
				t.Errorf("%s: a line of %d characters: %s", cmd.Name(), len(line), line)
			}
		}
	}
}

// TestAgentRestart checks that services stay in force when the agent exits.
func TestAgentRestart(t *testing.T) {
	h, _ := running(t)
	before := h.standing()
	h.kill()
	if steering := ask("tcp", "127.0.0.3"); !strings.Contains(before, `"tcp 127.0.0.3": "`+steering+`"`) {
		t.Errorf("without the agent %s answers", steering)
	}
	h.start()
	h.unchanged(before)
	if err := h.agent.Process.Signal(unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- h.agent.Wait() }()
	select {
	case err := <-done:
		if err != nil {
			t.Errorf("the agent's end: %v", err)
		}
	case <-time.After(patience):
		t.Fatal("the agent does not stop")
	}
	h.start()
	h.unchanged(before)
}
