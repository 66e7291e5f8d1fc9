// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"sockeye/internal/config"
	"sockeye/internal/sockdiag"
	"sockeye/lab/swarm"
)

const (
	// togetherVariable is the duration of TestTogether, for both modes together.
	togetherVariable = "SOCKEYE_TOGETHER"
	// togetherSeedVariable repeats the changes of an earlier run.
	togetherSeedVariable = "SOCKEYE_TOGETHER_SEED"
)

const (
	togetherDefault = 20 * time.Second
	togetherDevices = 32
	togetherRate    = 50 // datagrams per second of each device
	togetherMembers = 6
	// splitLimit is the time for which a change may split a device.
	splitLimit = 100 * time.Millisecond
	// silence is the time without datagrams after which a device is not split: five datagrams.
	silence = 5 * time.Second / togetherRate
	// judgeDelay is the time after which all records of an instant are written.
	judgeDelay = time.Second
	// quietTime is the time after a change in which nothing may be split any more.
	quietTime = 300 * time.Millisecond
	// maxViolations is the number of violations after which the test ends.
	maxViolations = 5
)

// TestTogether checks from outside that all TCP and UDP of a device is at one member, through random changes under
// traffic, in both modes, for IPv4 and IPv6, with kills of the agent in between. It judges what the members received, and
// the owners of sockets. A device may be split for 100 ms, without the time in which no agent runs.
//
// SOCKEYE_TOGETHER=1h makes it run for an hour, and SOCKEYE_TOGETHER_SEED=N repeats the changes of an earlier run (their
// times differ). Run it with -timeout 2h -v to see the progress.
func TestTogether(t *testing.T) {
	during, seed := togetherDefault, rand.Uint64()
	if text := os.Getenv(togetherVariable); text != "" {
		var err error
		if during, err = time.ParseDuration(text); err != nil {
			t.Fatalf("%s: %v", togetherVariable, err)
		}
	}
	if text := os.Getenv(togetherSeedVariable); text != "" {
		var err error
		if seed, err = strconv.ParseUint(text, 10, 64); err != nil {
			t.Fatalf("%s: %v", togetherSeedVariable, err)
		}
	}
	for i, mode := range []config.Steering{config.Reuseport, config.Lookup} {
		t.Run(string(mode), func(t *testing.T) {
			t.Logf("seed %d", seed)
			h := newHost(t, mode)
			w := &changes{host: h, random: rand.New(rand.NewPCG(seed, uint64(i))), settings: settings{slotCount: 4, standby: -1}, inForce: true, unregistered: map[int]bool{}, done: map[string]int{}, refusals: map[string]refusals{}}
			w.run(during / 2)
		})
	}
}

// changes is the state of a service that changes at random.
type changes struct {
	*host
	random   *rand.Rand
	swarm    *swarm.Swarm
	analysis swarm.Analysis
	supports map[string]bool // commands and keys of the policy

	settings
	receivers    map[int]*swarm.Process // by slot
	processes    map[int]int            // of all receivers by ID: PIDs
	unregistered map[int]bool
	inForce      bool // the settings are in force

	dead       []swarm.Interval // times without an agent
	waits      waits
	log        []change
	done       map[string]int      // successful changes
	refusals   map[string]refusals // by kind and exit code
	judged     int                 // splits that were judged
	long       map[int]bool        // devices whose present split was reported
	checks     int                 // comparisons with the owners of sockets
	longest    time.Duration       // split, without the times without an agent
	longestNet time.Duration       // ... without the times in which the agent waited for a CPU
	divided    int                 // splits
	violations int
}

// settings are the settings of the policy that change.
type settings struct {
	slotCount int
	standby   int                   // -1: none
	names     map[netip.Addr]string // device map
	pace      bool
}

// refusals are refused changes.
type refusals struct {
	n       int
	example string
}

// change is a change in the log.
type change struct {
	at   time.Duration
	text string
}

// kind is a kind of change.
type kind struct {
	name   string
	weight int
	needs  string // command or key
	// args returns the command of a change. It returns nil if it has made the change itself, and no words if the kind is
	// not applicable now.
	args func() []string
}

func (w *changes) note(format string, args ...any) {
	w.log = append(w.log, change{swarm.Now(), fmt.Sprintf(format, args...)})
	w.log = w.log[max(0, len(w.log)-200):]
}

func (w *changes) run(during time.Duration) {
	w.Helper()
	w.receivers, w.processes, w.long = map[int]*swarm.Process{}, map[int]int{}, map[int]bool{}
	var err error
	w.swarm, err = swarm.New(w.lab, w.devices)
	w.must(err)
	w.probe()
	w.policy()
	w.startAgent()
	w.waits.pid.Store(int64(w.agent.Pid()))
	stop := make(chan struct{})
	var sampling sync.WaitGroup
	sampling.Go(func() { w.waits.sample(stop) })
	defer sampling.Wait()
	defer close(stop)
	for slot := range togetherMembers {
		w.startReceiverOf(slot)
	}
	w.eventually("members", func() error {
		for _, s := range w.slots() {
			if !s.Ready {
				return fmt.Errorf("slot %d is not ready", s.Slot)
			}
		}
		return nil
	})
	w.must(w.swarm.StartDevices(w.Context(), swarm.Load{Devices: togetherDevices, TCP: bmpPort, UDP: ipfixPort, Rate: togetherRate, Exporters: 2, Routes: 10}))
	begun, err := w.swarm.Send()
	w.must(err)
	w.analysis.Begin, w.analysis.Silence = begun.At, silence

	// A change takes seconds while other tests have the CPUs: the number of changes is the measure, not their rate.
	begin, enough := time.Now(), int(during/(2*time.Second))
	progress, observed := begin, begin
	for time.Since(begin) < during || w.changed() < enough && time.Since(begin) < 10*during {
		w.change()
		w.sleep(time.Duration(w.random.IntN(100)) * time.Millisecond)
		w.judge(swarm.Now() - judgeDelay)
		if time.Since(observed) > 3*time.Second {
			w.observe()
			observed = time.Now()
		}
		if time.Since(progress) > time.Minute {
			w.progress()
			progress = time.Now()
		}
		if w.violations >= maxViolations {
			break
		}
	}
	w.observe()
	stopped, err := w.swarm.Stop()
	w.must(err)
	w.sleep(judgeDelay)
	w.analysis.End = stopped.At
	w.must(w.swarm.Read(&w.analysis))
	w.analysis.Finish()
	w.judgeSplits()
	w.progress()
	for _, kind := range slices.Sorted(maps.Keys(w.refusals)) {
		w.Logf("refused %d times: %s, such as %s", w.refusals[kind].n, kind, w.refusals[kind].example)
	}
	// The test must have changed something, and the devices must have reached members.
	if w.changed() < enough || w.analysis.Received < stopped.Sent/20 || w.checks == 0 {
		w.Errorf("%d changes, want %d; %d of %d datagrams received, %d comparisons with owners of sockets", w.changed(), enough, w.analysis.Received, stopped.Sent, w.checks)
	}
}

// changed returns the number of changes that succeeded.
func (w *changes) changed() int {
	sum := 0
	for _, n := range w.done {
		sum += n
	}
	return sum
}

// violate reports a violation. The first ones tell enough.
func (w *changes) violate(format string, args ...any) {
	w.Helper()
	if w.violations++; w.violations <= maxViolations {
		w.Errorf(format, args...)
	}
}

func (w *changes) progress() {
	w.Logf("%d changes %v, %d kills of the agent, %d datagrams at members, %d connections closed, %d splits, longest %v (%v without the agent's waits for a CPU), %d comparisons with owners of sockets, %d violations",
		w.changed(), w.done, len(w.dead), w.analysis.Received, w.analysis.Closed, w.divided, w.longest.Round(100*time.Microsecond), w.longestNet.Round(100*time.Microsecond), w.checks, w.violations)
}

func (w *changes) sleep(d time.Duration) {
	select {
	case <-time.After(d):
	case <-w.Context().Done():
		w.Fatal("interrupted")
	}
}

// probe finds out which commands and keys the binary knows.
func (w *changes) probe() {
	w.Helper()
	w.supports = map[string]bool{"": true}
	for _, c := range []string{"slot set", "move", "rebalance"} {
		out, _, code := w.cli(append(strings.Fields(c), "--help")...)
		w.supports[c] = code == 0 && strings.Contains(out, "sockeye "+c)
	}
	w.setPolicy(4, "pace: {devices: 4, timeout: 5s}")
	_, _, code := w.cli("check", w.policyPath())
	w.supports["pace"] = code == 0
}

// policy writes the policy of the present state.
func (w *changes) policy() {
	w.Helper()
	var lines []string
	if w.standby >= 0 {
		lines = append(lines, fmt.Sprintf("when_empty: {standby: %d}", w.standby))
	}
	if w.pace {
		lines = append(lines, "pace: {devices: 4, timeout: 5s}")
	}
	if w.names != nil {
		var csv strings.Builder
		for _, a := range slices.SortedFunc(maps.Keys(w.names), netip.Addr.Compare) {
			fmt.Fprintf(&csv, "%v/%d,%s\n", a, a.BitLen(), w.names[a])
		}
		w.replaceFile(filepath.Join(w.dir, "devices.csv"), csv.String())
		lines = append(lines, "device_map: devices.csv")
	}
	w.setPolicy(w.slotCount, lines...)
}

func (w *changes) startReceiverOf(slot int) {
	w.Helper()
	r := w.spec(slot)
	m := swarm.Member{Slot: slot, TCP: r.Sockets[0].Address.Port(), UDP: r.Sockets[1].Address.Port(), Plain: r.Sockets[0].Plain}
	p, err := w.swarm.StartMember(m, fmt.Sprintf("receiver-%d", slot), w.user(slot))
	w.must(err)
	w.receivers[slot], w.processes[p.ID] = p, p.Pid()
	delete(w.unregistered, slot)
}

func (w *changes) kinds() []kind {
	slot := func() int { return w.random.IntN(w.slotCount) }
	apply := func(f func()) func() []string {
		return func() []string {
			f()
			w.policy()
			return []string{"apply"}
		}
	}
	return []kind{
		{"slots", 4, "", apply(func() {
			w.slotCount = 2 + w.random.IntN(togetherMembers-1)
			if w.standby >= w.slotCount {
				w.standby = -1
			}
		})},
		{"device map", 2, "", apply(func() {
			w.names = nil
			if w.random.IntN(3) > 0 {
				w.names = map[netip.Addr]string{}
				for _, a := range addresses(togetherDevices) {
					w.names[a] = fmt.Sprintf("router-%d", w.random.IntN(togetherDevices))
				}
			}
		})},
		{"standby", 2, "", apply(func() {
			if w.standby = -1; w.random.IntN(2) > 0 {
				w.standby = slot()
			}
		})},
		{"pace", 1, "pace", apply(func() { w.pace = !w.pace })},
		{"unregister", 2, "", func() []string {
			n := slot()
			w.unregistered[n] = true
			return []string{"unregister", "--slot", fmt.Sprint(n)}
		}},
		{"register", 3, "", func() []string {
			for _, n := range slices.Sorted(maps.Keys(w.unregistered)) {
				if n < w.slotCount {
					delete(w.unregistered, n)
					return []string{"register", "--slot", fmt.Sprint(n), "--pid", fmt.Sprint(w.receivers[n].Pid())}
				}
			}
			return []string{}
		}},
		{"restart of a member", 3, "", func() []string {
			w.restartMember()
			return nil
		}},
		{"state of a slot", 4, "slot set", func() []string {
			state := []string{"ready", "ready", "drain", "maint"}[w.random.IntN(4)]
			return []string{"slot", "set", fmt.Sprint(slot()), state}
		}},
		{"weight", 2, "slot set", func() []string {
			return []string{"slot", "set", fmt.Sprint(slot()), "--weight", fmt.Sprint([]int{0, 1, 64, 256}[w.random.IntN(4)])}
		}},
		{"move", 4, "move", func() []string {
			a := swarm.Address(w.random.IntN(togetherDevices))
			args := []string{"move", cmp.Or(w.names[a], a.String()), fmt.Sprint(slot())}
			switch w.random.IntN(4) {
			case 0:
				args[2] = "home"
			case 1:
				args = append(args, "--for", "1s")
			}
			return args
		}},
		{"rebalance", 1, "rebalance", func() []string { return []string{"rebalance", "--apply", "--measure", "1s"} }},
		{"restart of the agent", 2, "", func() []string {
			w.replaceAgent(time.Duration(w.random.IntN(300)) * time.Millisecond)
			return nil
		}},
	}
}

// command is a running command of Sockeye.
type command struct {
	kind, text string
	apply      bool
	before     settings // before an apply
	cmd        *exec.Cmd
	out        bytes.Buffer
}

// begin begins a random change. It returns nil if the change is over, or none was applicable.
func (w *changes) begin() *command {
	w.Helper()
	var kinds []kind
	for _, k := range w.kinds() {
		for range k.weight {
			if w.supports[k.needs] {
				kinds = append(kinds, k)
			}
		}
	}
	k, before := kinds[w.random.IntN(len(kinds))], w.settings
	args := k.args()
	if args == nil {
		w.done[k.name]++
	}
	if len(args) == 0 {
		return nil
	}
	c := &command{kind: k.name, text: strings.Join(args, " "), apply: args[0] == "apply", before: before}
	if c.apply {
		c.text = fmt.Sprintf("apply: slots %d, standby %d, device map %t, pace %t", w.slotCount, w.standby, w.names != nil, w.pace)
	}
	w.start(c, args...)
	return c
}

func (w *changes) start(c *command, args ...string) {
	w.Helper()
	w.note("%s", c.text)
	c.cmd = exec.CommandContext(w.Context(), os.Getenv(binaryEnv), append([]string{"--run-dir", w.dir}, args...)...)
	c.cmd.Stdout, c.cmd.Stderr = &c.out, &c.out
	w.must(c.cmd.Start())
}

// end waits for a command, and reports whether it succeeded.
func (w *changes) end(c *command) bool {
	err := c.cmd.Wait()
	w.note("%s: %v", c.text, cmp.Or(err, errors.New("done")))
	if err == nil {
		w.done[c.kind]++
	}
	return err == nil
}

// change makes a random change. One of six is a change during which the agent is killed, and one of six consists of two
// changes at the same time, of which one may be refused.
func (w *changes) change() {
	w.Helper()
	first := w.begin()
	if first == nil {
		return
	}
	commands := []*command{first}
	dice := w.random.IntN(6)
	switch dice {
	case 0:
		w.sleep(time.Duration(w.random.IntN(60)) * time.Millisecond)
		w.replaceAgent(time.Duration(w.random.IntN(200)) * time.Millisecond)
	case 1:
		if second := w.begin(); second != nil {
			commands = append(commands, second)
		}
	}
	refused, applies := 0, 0
	for _, c := range commands {
		if c.apply {
			applies++
		}
		if w.end(c) {
			continue
		}
		if refused++; dice == 0 {
			continue // the agent was killed
		}
		line, _, _ := strings.Cut(c.out.String(), "\n")
		refusal := fmt.Sprintf("%s, exit code %d", c.kind, c.cmd.ProcessState.ExitCode())
		r := w.refusals[refusal]
		w.refusals[refusal] = refusals{r.n + 1, line}
		if !strings.HasPrefix(line, "sockeye: ") {
			w.violate("sockeye %s: %s", c.text, c.out.String())
		}
	}
	switch {
	case applies == 0:
	case refused == 0:
		w.inForce = true
	case dice > 1: // refused, for example because all remaining slots are drained
		w.settings = first.before
		w.policy()
	default: // the policy in force is unknown until the next apply
		w.inForce = false
	}
}

func (w *changes) restartMember() {
	w.Helper()
	n := w.random.IntN(togetherMembers)
	w.note("member %d is killed", n)
	w.must(w.receivers[n].Err())
	w.must(w.receivers[n].Kill())
	w.sleep(time.Duration(w.random.IntN(100)) * time.Millisecond)
	w.startReceiverOf(n)
	w.note("member %d started", n)
}

// replaceAgent kills the agent, and starts another one after a while. It kills the keeper, too, one time of four, and
// restarts a member meanwhile, one time of three.
func (w *changes) replaceAgent(after time.Duration) {
	w.Helper()
	keeper := 0
	if w.random.IntN(4) == 0 {
		keeper = w.service().Keeper
	}
	from := swarm.Now()
	w.killAgent()
	w.note("the agent is killed")
	if keeper != 0 {
		w.killKeeper(keeper)
		w.note("the keeper is killed")
	}
	if w.random.IntN(3) == 0 {
		w.restartMember()
	}
	w.sleep(after)
	w.startAgent()
	w.waits.pid.Store(int64(w.agent.Pid()))
	w.dead = append(w.dead, swarm.Interval{From: from, To: swarm.Now()})
	w.note("another agent answers")
}

// waits samples how long a thread of the agent has waited for a CPU. On a busy host, the agent cannot be faster.
type waits struct {
	pid     atomic.Int64
	mu      sync.Mutex
	samples []waited
}

// waited is the total of these times at an instant.
type waited struct{ at, total time.Duration }

const waitInterval = 10 * time.Millisecond

// sample runs until stop is closed.
func (w *waits) sample(stop <-chan struct{}) {
	tick := time.NewTicker(waitInterval)
	defer tick.Stop()
	total, pid, threads := time.Duration(0), int64(0), map[string]*thread{}
	end := func() {
		for name, one := range threads {
			one.schedstat.Close()
			delete(threads, name)
		}
	}
	defer end()
	for {
		select {
		case <-stop:
			return
		case <-tick.C:
		}
		started := w.pid.Load() != pid // the waits of an agent that starts do not count
		if started {
			pid = w.pid.Load()
			end()
		}
		tasks := fmt.Sprintf("/proc/%d/task", pid)
		entries, _ := os.ReadDir(tasks) // none between two agents
		longest := time.Duration(0)     // threads wait at the same time
		for name, one := range threads {
			if !slices.ContainsFunc(entries, func(e os.DirEntry) bool { return e.Name() == name }) {
				one.schedstat.Close()
				delete(threads, name)
			}
		}
		for _, e := range entries {
			one := threads[e.Name()]
			if one == nil {
				f, err := os.Open(filepath.Join(tasks, e.Name(), "schedstat"))
				if err != nil {
					continue
				}
				one = &thread{schedstat: f}
				threads[e.Name()] = one
			}
			if sum, ok := one.waitTime(); ok { // otherwise the thread exits
				longest = max(longest, sum-one.waited)
				one.waited = sum
			}
		}
		if !started {
			total += longest
		}
		w.mu.Lock()
		w.samples = append(w.samples, waited{swarm.Now(), total})
		if len(w.samples) > 20_000 {
			w.samples = slices.Clone(w.samples[10_000:])
		}
		w.mu.Unlock()
	}
}

// thread is a thread of an agent. Its file stays open: opening files of /proc takes most of the time of a sample.
type thread struct {
	schedstat *os.File
	waited    time.Duration
}

// waitTime returns the time for which the thread has waited for a CPU: the second number of schedstat.
func (t *thread) waitTime() (time.Duration, bool) {
	var text [64]byte
	n, _ := t.schedstat.ReadAt(text[:], 0)
	fields := strings.Fields(string(text[:n]))
	if len(fields) < 2 {
		return 0, false
	}
	sum, err := strconv.ParseInt(fields[1], 10, 64)
	return time.Duration(sum), err == nil
}

// between returns the time that a thread waited in an interval. A wait is known when it is over.
func (w *waits) between(i swarm.Interval) time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	var from, to time.Duration
	for _, s := range w.samples {
		if s.at <= i.From {
			from = s.total
		}
		to = s.total
		if s.at > i.To+2*waitInterval {
			break
		}
	}
	return to - from
}

// judge judges what the members received before an instant.
func (w *changes) judge(until time.Duration) {
	w.Helper()
	w.must(w.swarm.Read(&w.analysis))
	w.analysis.Judge(until)
	w.judgeSplits()
}

func (w *changes) judgeSplits() {
	w.Helper()
	ended := w.analysis.Splits[w.judged:]
	w.judged = len(w.analysis.Splits)
	w.divided += len(ended)
	for _, s := range ended {
		w.judgeSplit(s)
		delete(w.long, s.Device)
	}
	for _, s := range w.analysis.Open() {
		w.judgeSplit(s)
	}
}

func (w *changes) judgeSplit(s swarm.Split) {
	w.Helper()
	length, waited := s.Length(slices.Concat(w.dead, w.analysis.Stalls)...), w.waits.between(s.Interval)
	w.longest, w.longestNet = max(w.longest, length), max(w.longestNet, length-waited)
	if length-waited <= splitLimit || w.long[s.Device] {
		return
	}
	w.long[s.Device] = true
	var log strings.Builder
	for _, c := range w.log {
		if c.at > s.From-time.Second && c.at < s.To+100*time.Millisecond {
			fmt.Fprintf(&log, "\n  %+8.1f ms: %s", float64((c.at-s.From).Microseconds())/1000, c.text)
		}
	}
	member := func(id int) string {
		for slot, p := range w.receivers {
			if p.ID == id {
				return fmt.Sprintf("member %d of slot %d", id, slot)
			}
		}
		return fmt.Sprintf("member %d, which has exited", id)
	}
	log.WriteString("\n  what members had of the device:")
	last := ""
	for _, e := range w.analysis.History(s.Device) {
		if e.At < s.From-500*time.Millisecond || e.At > s.To+500*time.Millisecond {
			continue
		}
		text := fmt.Sprintf("connection from port %d closed at member %d", e.Port, e.Member)
		switch e.Kind {
		case swarm.Datagram:
			text = fmt.Sprintf("datagrams at member %d", e.Member)
		case swarm.Accepted:
			text = fmt.Sprintf("connection from port %d opened at member %d", e.Port, e.Member)
		}
		if text != last { // of consecutive datagrams at one member, the first one
			fmt.Fprintf(&log, "\n  %+8.1f ms: %s", float64((e.At-s.From).Microseconds())/1000, text)
		}
		last = text
	}
	if w.violations == 0 {
		fmt.Fprintf(&log, "\n  end of the agent's log:\n%s", w.agent.LogTail(30))
	}
	w.violate("split for %v, of which the agent waited %v for a CPU: %v\n  (datagrams: %s; connection: %s); changes, relative to its begin:%s", length, waited, s, member(s.Datagrams), member(s.Connection), &log)
}

// owned is a connection of a device and the process that has it, as sock_diag and /proc show.
type owned struct {
	port uint16
	pid  int
}

// owners returns the established connections of the devices to members.
func (w *changes) owners() map[int][]owned {
	w.Helper()
	found := map[int][]owned{}
	w.must(w.collectors.Do(func() error {
		diag, err := sockdiag.Open()
		if err != nil {
			return err
		}
		defer diag.Close()
		type remote struct {
			device int
			port   uint16
		}
		inodes := map[uint32]remote{}
		err = diag.Dump(sockdiag.Query{States: sockdiag.States(0).With(sockdiag.Established)}, func() { clear(inodes) }, func(s *sockdiag.Socket) {
			if device, ok := swarm.Device(s.Remote.Addr()); ok && s.Inode != 0 {
				inodes[s.Inode] = remote{device, s.Remote.Port()}
			}
		})
		if err != nil {
			return err
		}
		processes, _, err := sockdiag.ReadProcesses(func(inode uint32) bool { _, ok := inodes[inode]; return ok })
		for inode, of := range processes {
			for _, p := range of {
				r := inodes[inode]
				found[r.device] = append(found[r.device], owned{r.port, p.PID})
			}
		}
		return err
	}))
	return found
}

// observe waits until the effects of the last change are over, and compares the owners of the sockets with the members
// that received the datagrams of the same time.
func (w *changes) observe() {
	w.Helper()
	w.sleep(quietTime)
	before, from := w.owners(), swarm.Now()
	w.sleep(100 * time.Millisecond)
	to, after := swarm.Now(), w.owners()
	w.sleep(judgeDelay / 2)
	w.judge(to)
	byName := map[string]owned{}
	for device, connections := range after {
		// The owners are those of both dumps: a member may have exited, or a device connected, in between.
		if len(connections) != 1 || !slices.Equal(before[device], connections) {
			if len(connections) > 1 && slices.Equal(before[device], connections) {
				w.violate("device %d has connections at several members: %v", device, connections)
			}
			continue
		}
		w.checks++
		c := connections[0]
		if seen := w.analysis.LastSeen(device); seen.Member != swarm.FromDevices && seen.At > from && w.processes[seen.Member] != c.pid {
			w.violate("device %d: process %d has its connection, process %d received its datagrams", device, c.pid, w.processes[seen.Member])
		}
		name := w.names[swarm.Address(device)]
		if other, ok := byName[name]; ok && name != "" && w.inForce && other.pid != c.pid {
			w.violate("%s: processes %d and %d have connections of its addresses", name, other.pid, c.pid)
		}
		byName[name] = c
	}
}
