// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/config"
	"sockeye/internal/placement"
	"sockeye/internal/testenv"
	"sockeye/lab"
	"sockeye/lab/swarm"
)

const (
	bmpPort   = 1790
	ipfixPort = 4739
	patience  = 90 * time.Second // timeout on a busy machine for operations that need milliseconds
)

var wildcard = netip.IPv6Unspecified()

// inBothModes runs a test for each way of steering.
func inBothModes(t *testing.T, f func(t *testing.T, mode config.Steering)) {
	for _, mode := range []config.Steering{config.Reuseport, config.Lookup} {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			f(t, mode)
		})
	}
}

// host is a collector host, with an agent, and the devices that send to it.
//
// With lookup, each member has ports of its own, and every second member has another user, so that only Sockeye can
// deliver a packet to it.
type host struct {
	*testing.T
	lab        *lab.Lab
	collectors *lab.Namespace
	devices    *lab.Namespace
	mode       config.Steering
	dir        string // policy, state, socket
	pins       string
	agent      *lab.Process
	binary     string // of the agent
	members    map[int]*member
	prefix     string // of the names of processes, with a slash: a host of a fleet
	isolated   bool   // members run in their own network namespaces with sockeye run as the gateway

	mu    sync.Mutex
	got   map[arrival]int
	ports uint16 // added to the ports of members with lookup
	// texts contains what receivers with Records have received, in order.
	texts map[arrival][]string
	// textsOf contains the same by process.
	textsOf map[arrival]map[int][]string
}

// arrival is a connection or datagram that a member received.
type arrival struct {
	slot     int
	protocol string
	from     netip.Addr
}

// member is a running receiver.
type member struct {
	*lab.Process
	slot  int
	stdin io.Writer
	open  chan struct{} // closed when all sockets of the member are open
}

func newHost(t *testing.T, mode config.Steering) *host {
	t.Helper()
	return newHostWith(t, mode, 0)
}

func newHostWith(t *testing.T, mode config.Steering, routers int) *host {
	t.Helper()
	testenv.AwaitCPU(t)
	log := slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelWarn}))
	l, err := lab.New(t.Context(), lab.Options{Routers: routers, Log: log})
	if err != nil {
		t.Fatal(err)
	}
	h := &host{T: t, lab: l, mode: mode, pins: filepath.Join(testenv.BPFFS(t), "sockeye"), dir: l.Dir(),
		binary:  os.Getenv(binaryEnv),
		members: map[int]*member{}, got: map[arrival]int{}, texts: map[arrival][]string{}, textsOf: map[arrival]map[int][]string{}}
	t.Cleanup(func() {
		if t.Failed() && h.agent != nil {
			t.Logf("end of the agent's log:\n%s", h.agent.LogTail(40))
			ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
			defer cancel()
			if err := h.ask(ctx, "/v1/status", &api.Status{}); err != nil && h.agent.Running() {
				_ = h.agent.Signal(unix.SIGQUIT)
				<-h.agent.Done()
				t.Logf("the agent does not answer (%v):\n%s", err, h.agent.LogTail(300))
			}
		}
		cgroup := l.Cgroup()
		h.must(l.Close())
		if _, err := os.Stat(cgroup); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the lab's cgroup still exists: %v", err)
		}
	})
	if h.collectors, err = l.Namespace("collector"); err != nil {
		t.Fatal(err)
	}
	if h.devices, err = swarm.Attach(l); err != nil {
		t.Fatal(err)
	}
	return h
}

func addresses(n int) []netip.Addr {
	all := make([]netip.Addr, n)
	for i := range all {
		all[i] = swarm.Address(i)
	}
	return all
}

func (h *host) must(err error) {
	h.Helper()
	if err != nil {
		h.Fatal(err)
	}
}

// eventually waits until f returns no error.
func (h *host) eventually(what string, f func() error) {
	h.Helper()
	ctx, cancel := context.WithTimeout(h.Context(), patience)
	defer cancel()
	for start := time.Now(); ; {
		err := f()
		if err == nil {
			return
		}
		select {
		case <-ctx.Done():
			h.Fatalf("timeout: wait for %s: %v", what, err)
		case <-time.After(testenv.Backoff(start)):
		}
	}
}

// policyPath is the agent's policy file.
func (h *host) policyPath() string { return filepath.Join(h.dir, "policy.yaml") }

// setPolicy writes the policy file with the service telemetry. lines replace and add keys of the service.
func (h *host) setPolicy(slots int, lines ...string) {
	h.Helper()
	keys := []string{
		fmt.Sprintf("slots: %d", slots),
		fmt.Sprintf("steering: %s", h.mode),
		fmt.Sprintf("cgroup: /%s", filepath.Join(h.lab.CgroupPath(), h.prefix)),
		`members: [{match: {command_line: '^receiver-(\d+)$'}, slot: group}, {match: {command_line: 'nfacctd -f \S+-(\d+)\.conf'}, slot: group}]`,
	}
	if h.mode == config.Reuseport {
		keys = append(keys, `listeners: [{protocol: tcp, address: "[::]:1790"}, {protocol: udp, address: "[::]:4739"}]`, "user: root")
	} else {
		keys = append(keys, `listeners: [{protocol: tcp, address: "[::]:1790", member_ports: 20000-20099}, {protocol: udp, address: "[::]:4739", member_ports: 21000-21099}]`,
			"user: [root, 7001, 7002, 7003]")
	}
	for _, line := range lines {
		key, _, _ := strings.Cut(line, ":")
		keys = slices.DeleteFunc(keys, func(k string) bool { return strings.HasPrefix(k, key+":") })
	}
	text := "services:\n  telemetry:\n    " + strings.Join(append(keys, lines...), "\n    ") + "\n"
	h.replaceFile(h.policyPath(), text)
}

// replaceFile replaces a file at once, because a command may read it at the same time.
func (h *host) replaceFile(path, text string) {
	h.Helper()
	h.must(os.WriteFile(path+".new", []byte(text), 0o644))
	h.must(os.Rename(path+".new", path))
}

// startAgent starts the agent and waits until it answers.
func (h *host) startAgent() {
	h.Helper()
	h.launchAgent()
	h.eventually("the agent", func() error {
		if err := h.agent.Err(); err != nil {
			h.Fatal(err)
		}
		_, err := h.askStatus()
		return err
	})
}

func (h *host) launchAgent() {
	h.Helper()
	h.agent = h.collectors.Command(context.Background(), h.binary, "agent", "--log-level", "debug",
		"--policy", h.policyPath(), "--state-dir", filepath.Join(h.dir, "state"), "--run-dir", h.dir, "--pins", h.pins)
	h.agent.Name = h.prefix + "agent"
	h.must(h.agent.Start())
}

func (h *host) ask(ctx context.Context, path string, into any) error {
	return api.NewClient(api.SocketPath(h.dir)).Get(ctx, path, nil, into)
}

func (h *host) get(path string, into any) error {
	ctx, cancel := context.WithTimeout(h.Context(), patience)
	defer cancel()
	return h.ask(ctx, path, into)
}

func (h *host) askStatus() (s api.Status, err error) { return s, h.get("/v1/status", &s) }

// service returns the status of the service telemetry.
func (h *host) service() api.ServiceStatus {
	h.Helper()
	s, err := h.askStatus()
	h.must(err)
	if len(s.Services) != 1 {
		h.Fatalf("%d services", len(s.Services))
	}
	return s.Services[0]
}

func (h *host) slots() []api.SlotStatus {
	h.Helper()
	var s []api.SlotStatus
	h.must(h.get("/v1/slots", &s))
	return s
}

// cli runs sockeye and returns its output.
func (h *host) cli(args ...string) (stdout, stderr string, code int) {
	h.Helper()
	cmd := exec.CommandContext(h.Context(), os.Getenv(binaryEnv), append([]string{"--run-dir", h.dir}, args...)...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); cmd.ProcessState == nil {
		h.Fatal(err)
	}
	return out.String(), errs.String(), cmd.ProcessState.ExitCode()
}

// show runs sockeye with -o json, which must succeed.
func (h *host) show(into any, args ...string) {
	h.Helper()
	out, errs, code := h.cli(append(args, "-o", "json")...)
	if code != 0 {
		h.Fatalf("sockeye %v: exit code %d: %s%s", args, code, out, errs)
	}
	if err := json.Unmarshal([]byte(out), into); err != nil {
		h.Fatalf("sockeye %v: %v: %s", args, err, out)
	}
}

// refuse runs sockeye, which must fail with the code, and with an error and a hint that contain the words.
func (h *host) refuse(code int, words []string, args ...string) {
	h.Helper()
	_, errs, got := h.cli(args...)
	if got != code {
		h.Errorf("sockeye %v: exit code %d, want %d: %s", args, got, code, errs)
	}
	for _, word := range words {
		if !strings.Contains(errs, word) {
			h.Errorf("sockeye %v lacks %q: %s", args, word, errs)
		}
	}
}

// spec returns a receiver that is a member of the service in this mode.
func (h *host) spec(slot int) receiver {
	tcp, udp := uint16(bmpPort), uint16(ipfixPort)
	if h.mode == config.Lookup && !h.isolated {
		tcp, udp = 20000+h.ports+uint16(slot), 21000+h.ports+uint16(slot)
	}
	return receiver{Slot: slot, Sockets: []socket{
		{"tcp", netip.AddrPortFrom(wildcard, tcp), false, h.mode == config.Lookup || h.isolated},
		{"udp", netip.AddrPortFrom(wildcard, udp), false, h.mode == config.Lookup || h.isolated},
	}}
}

func (h *host) user(slot int) string {
	if h.mode == config.Lookup && slot%4 > 0 {
		return fmt.Sprint(7000 + slot%4)
	}
	return "root"
}

// start starts receivers without waiting for them.
func (h *host) start(slots ...int) {
	h.Helper()
	for _, slot := range slots {
		var wrap []string
		if h.isolated {
			wrap = h.isolation(slot)
		}
		h.startReceiver(fmt.Sprintf("receiver-%d", slot), h.spec(slot), wrap...)
	}
}

// isolation returns the prefix of the command of an isolated member.
func (h *host) isolation(slot int) []string {
	return []string{os.Getenv(binaryEnv), "--run-dir", h.dir, "run", "--slot", fmt.Sprint(slot), "--isolated", "--as-root", "--"}
}

// startReceiver starts a receiver with this name as its command line, after the words of wrap.
func (h *host) startReceiver(name string, r receiver, wrap ...string) *member {
	h.Helper()
	return h.startReceiverIn(h.collectors, name, r, wrap...)
}

func (h *host) startReceiverIn(namespace *lab.Namespace, name string, r receiver, wrap ...string) *member {
	h.Helper()
	spec, err := json.Marshal(r)
	h.must(err)
	// Other users cannot access the original path.
	p := namespace.Command(h.Context(), "/proc/self/exe")
	p.Cmd.Args[0] = name
	p.Name, p.User = name, h.user(r.Slot)
	if len(wrap) > 0 {
		exe, err := os.Executable()
		h.must(err)
		p.Cmd, p.User = exec.CommandContext(h.Context(), wrap[0], append(wrap[1:], exe)...), "root"
	}
	p.Cmd.Env = append(os.Environ(), receiverEnv+"="+string(spec), "GOMAXPROCS=1")
	out, in, err := os.Pipe()
	h.must(err)
	p.Cmd.Stdout = in
	stdin, err := p.Cmd.StdinPipe()
	h.must(err)
	h.must(p.Start())
	in.Close()
	m := &member{p, r.Slot, stdin, make(chan struct{})}
	go func() {
		defer out.Close()
		for lines := bufio.NewScanner(out); lines.Scan(); {
			protocol, from, ok := strings.Cut(lines.Text(), " ")
			if !ok {
				close(m.open)
				continue
			}
			from, text, _ := strings.Cut(from, " ")
			h.mu.Lock()
			a := arrival{r.Slot, protocol, netip.MustParseAddr(from)}
			h.got[a]++
			if b, err := hex.DecodeString(text); err == nil && text != "" {
				h.texts[a] = append(h.texts[a], string(b))
				if h.textsOf[a] == nil {
					h.textsOf[a] = make(map[int][]string)
				}
				h.textsOf[a][m.Pid()] = append(h.textsOf[a][m.Pid()], string(b))
			}
			h.mu.Unlock()
		}
	}()
	h.members[r.Slot] = m
	return m
}

// open waits until members have opened their sockets, registered or not.
func (h *host) open(slots ...int) {
	h.Helper()
	for _, slot := range slots {
		m := h.members[slot]
		select {
		case <-m.open:
		case <-m.Done():
			h.Fatal(m.Err())
		}
	}
}

// kill sends SIGKILL to members.
func (h *host) kill(slots ...int) {
	h.Helper()
	for _, slot := range slots {
		h.must(h.members[slot].Err())
		h.must(h.members[slot].Signal(unix.SIGKILL))
	}
	for _, slot := range slots {
		<-h.members[slot].Done()
	}
}

// hang stops a member (SIGSTOP) and waits until all its threads have stopped.
func (h *host) hang(slot int) {
	h.Helper()
	h.must(h.members[slot].Signal(unix.SIGSTOP))
	h.eventually("a member to stop", func() error {
		threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", h.members[slot].Pid()))
		h.must(err)
		for _, path := range threads {
			if b, err := os.ReadFile(path); err != nil || !strings.Contains(string(b), ") T ") {
				return fmt.Errorf("%s", b)
			}
		}
		return nil
	})
}

// ready waits until the slots have their members and all other slots are empty.
func (h *host) ready(slots ...int) {
	h.Helper()
	h.eventually(fmt.Sprintf("slots %v", slots), func() error {
		for _, s := range h.slots() {
			want := 0
			if slices.Contains(slots, s.Slot) {
				m := h.members[s.Slot]
				if err := m.Err(); err != nil {
					h.Fatal(err)
				}
				want = m.Pid()
			}
			if s.PID != want || s.Ready != (want != 0) {
				return fmt.Errorf("slot %d: process %d, ready %v, want process %d; waiting: %+v", s.Slot, s.PID, s.Ready, want, h.service().Waiting)
			}
		}
		return nil
	})
}

// mapping returns the home slots of addresses, computed from the nonce of the service.
func (h *host) mapping(slots int, devices *placement.DeviceMap) *placement.Mapping {
	h.Helper()
	var nonce uint64
	_, err := fmt.Sscanf(h.service().Nonce, "0x%x", &nonce)
	h.must(err)
	m, err := placement.NewMapping(slots, 0, nonce, devices)
	h.must(err)
	return m
}

// home returns the home slot of an address.
type home func(netip.Addr) int

func (h *host) homes(slots int) home {
	h.Helper()
	m := h.mapping(slots, nil)
	return func(a netip.Addr) int { slot, _ := m.Slot(a); return slot }
}

// forget deletes the recorded arrivals.
func (h *host) forget() {
	h.mu.Lock()
	defer h.mu.Unlock()
	clear(h.got)
}

// arrivals returns the number of arrivals, and the arrivals that were not at their home slot.
func (h *host) arrivals(home home) (all int, misplaced []arrival) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for a, n := range h.got {
		all += n
		if home(a.from) != a.slot {
			misplaced = append(misplaced, a)
		}
	}
	return all, misplaced
}

// nothingMisplaced fails the test if an arrival was not at its home slot, or if there were fewer than enough arrivals.
func (h *host) nothingMisplaced(home home, enough int) {
	h.Helper()
	h.eventually("arrivals", func() error { // the output of members is read with a delay
		all, misplaced := h.arrivals(home)
		if len(misplaced) > 0 {
			h.Fatalf("%d arrivals, %d misplaced, such as %v", all, len(misplaced), misplaced[:min(10, len(misplaced))])
		}
		if all < enough {
			return fmt.Errorf("%d, want %d or more", all, enough)
		}
		return nil
	})
}

// up returns a host with a policy, an agent and members in all slots.
func up(t *testing.T, mode config.Steering, slots int, policy ...string) *host {
	t.Helper()
	h := newHost(t, mode)
	h.up(slots, policy...)
	return h
}

func (h *host) up(slots int, policy ...string) {
	h.Helper()
	h.setPolicy(slots, policy...)
	h.startAgent()
	h.start(upTo(slots)...)
	h.ready(upTo(slots)...)
}

func upTo(n int) []int {
	all := make([]int, n)
	for i := range all {
		all[i] = i
	}
	return all
}
