// SPDX-License-Identifier: Apache-2.0

package sizing

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/internal/bigtcp/netif"
	"sockeye/internal/bigtcp/netif/netiftest"
	"sockeye/internal/fault"
)

// childVariable makes the test binary a process that has locked a store.
const childVariable = "SOCKEYE_TEST_STORE"

// childWork is the work of such a process.
type childWork struct {
	State   string
	Owner   Owner
	Targets []Target // none: it reverts
	// KillAt is the number of the change before which the process kills itself; 0 means never.
	KillAt int
	// Hold makes the process print a line before the first change and wait until its standard input is closed.
	Hold bool
}

// TestStoreChild is the entry point of these processes.
func TestStoreChild(t *testing.T) {
	data := os.Getenv(childVariable)
	if data == "" {
		return
	}
	var w childWork
	if err := json.Unmarshal([]byte(data), &w); err != nil {
		t.Fatal(err)
	}
	s, err := OpenStore(w.State)
	if err != nil {
		t.Fatal(err)
	}
	changes := 0
	s.before = func() {
		if changes++; changes == w.KillAt {
			_ = unix.Kill(os.Getpid(), unix.SIGKILL)
		}
		if changes == 1 && w.Hold {
			fmt.Println("holding")
			_, _ = io.Copy(io.Discard, os.Stdin)
		}
	}
	if len(w.Targets) == 0 {
		_, err = s.Revert(nil, false)
	} else {
		_, err = s.Apply(openTestNetwork(t, ""), w.Owner, w.Targets, false)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func (h *changeHost) child(w childWork) *exec.Cmd {
	h.Helper()
	w.State = h.state
	data, err := json.Marshal(w)
	if err != nil {
		h.Fatal(err)
	}
	cmd := exec.Command("/proc/self/exe", "-test.run=^TestStoreChild$")
	cmd.Env = append(os.Environ(), childVariable+"="+string(data))
	return cmd
}

// killed runs a child that kills itself, and reports whether it reached that change.
func (h *changeHost) killed(w childWork) bool {
	h.Helper()
	out, err := h.child(w).CombinedOutput()
	if err == nil {
		return false
	}
	if !strings.Contains(err.Error(), "signal: killed") {
		h.Fatalf("the child ends with %v: %s", err, out)
	}
	return true
}

// TestKilled kills a process before each of its changes. The interrupted work can then be reverted, repeated, or
// replaced with other work.
func TestKilled(t *testing.T) {
	h := newChangeHost(t)
	h.veth("big0")
	h.bridge("bigbr", "big0")
	names := []string{"big0", "bigbr"}
	first := []Target{{"bigbr", wantOn}}
	tests := map[string]struct {
		before []Target // applied beforehand
		work   childWork
		least  int // changes that the work takes
	}{
		"apply": {nil, childWork{Owner: ByCommand, Targets: first}, 2 * 5},
		"apply again": {first, childWork{Owner: ByCommand, Targets: []Target{
			{"bigbr", Want{IPv6: netif.MaxSize}}, {"big0", Want{IPv6: 100000, IPv4: 100000}}}}, 2 * 5},
		"give up": {first, childWork{Owner: ByPolicy, Targets: []Target{{"bigbr", Want{IPv6: large}}}}, 2 * 5},
		"revert":  {first, childWork{Owner: ByCommand}, 2 * 2},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			h.T = t
			w := test.work
			apply := func(targets []Target) {
				t.Helper()
				if len(targets) == 0 {
					return
				}
				if _, err := h.Apply(h.network, w.Owner, targets, false); err != nil {
					t.Fatal(err)
				}
			}
			now := func() string { return fmt.Sprint(h.sizes("big0"), h.sizes("bigbr")) }
			apply(test.before)
			apply(w.Targets)
			after := now()
			h.revert()
			for _, then := range []string{"nothing", "the same", "another"} {
				for w.KillAt = 1; ; w.KillAt++ {
					apply(test.before)
					if !h.killed(w) {
						break
					}
					status, err := h.Check(h.network)
					if err != nil {
						t.Fatal(err)
					}
					for _, s := range status {
						// Nothing records that a revert has started.
						if s.State != StatusOK && s.State != StatusUnfinished && len(w.Targets) > 0 {
							t.Errorf("killed at %d: %s is %s", w.KillAt, s.Interface, s.State)
						}
					}
					switch then {
					case "another":
						third := Want{IPv6: 80000, IPv4: netif.MaxSize}
						apply([]Target{{"bigbr", third}, {"big0", third}})
						h.is(netiftest.Sizes(80000, 80000, netif.MaxSize, netif.MaxSize), names...)
					case "the same":
						apply(w.Targets)
						if got := now(); got != after && len(w.Targets) > 0 {
							t.Errorf("killed at %d, and done again, sizes are %s, not %s", w.KillAt, got, after)
						}
					}
					h.revert()
					h.is(sizesOff, names...)
					if files := h.files(); len(files) > 0 {
						t.Errorf("killed at %d: files are left: %v", w.KillAt, files)
					}
					if t.Failed() {
						t.FailNow()
					}
				}
				if w.KillAt <= test.least {
					t.Errorf("it took no more than %d changes", w.KillAt-1)
				}
				h.revert()
				h.is(sizesOff, names...)
			}
		})
	}
}

// TestKilledTakingBack kills a process that rolls back because a part of its change failed.
func TestKilledTakingBack(t *testing.T) {
	h := newChangeHost(t)
	h.veth("big0")
	h.veth("big1")
	for at := 1; ; at++ {
		// The last of the three interfaces is deleted as soon as the plan exists.
		h.veth("big2")
		w := childWork{Owner: ByCommand, Targets: []Target{{"big0", wantOn}, {"big1", wantOn}, {"big2", wantOn}}, Hold: true, KillAt: at}
		if at == 1 {
			w.KillAt = 0 // it would never hold
		}
		cmd, hold := h.holding(w)
		h.remove("big2")
		hold.Close()
		killed := strings.Contains(fmt.Sprint(cmd.Wait()), "signal: killed")
		if !killed {
			h.is(sizesOff, "big0", "big1")
			if got := h.recorded(); len(got) > 0 {
				t.Errorf("recorded are %v", got)
			}
		}
		h.revert()
		h.is(sizesOff, "big0", "big1")
		if files := h.files(); len(files) > 0 {
			t.Fatalf("killed at %d: files are left: %v", at, files)
		}
		if !killed && at > 1 {
			if at < 14 {
				t.Errorf("it took no more than %d changes", at-1)
			}
			return
		}
	}
}

// holding starts a child that holds the lock of the store until its input is closed.
func (h *changeHost) holding(w childWork) (*exec.Cmd, io.Closer) {
	h.Helper()
	cmd := h.child(w)
	in, err := cmd.StdinPipe()
	if err != nil {
		h.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		h.Fatal(err)
	}
	h.Cleanup(func() {
		in.Close()
		cmd.Process.Kill()
		cmd.Wait()
	})
	lines := bufio.NewReader(out)
	if line, err := lines.ReadString('\n'); err != nil || line != "holding\n" {
		h.Fatalf("the child says %q, %v", line, err)
	}
	go func() { _, _ = io.Copy(io.Discard, lines) }()
	return cmd, in
}

// TestTwoProcesses uses the store in two processes.
func TestTwoProcesses(t *testing.T) {
	h := newChangeHost(t)
	h.veth("big0")
	h.veth("big1")
	h.apply(Target{"big0", wantOn})
	cmd, hold := h.holding(childWork{Owner: ByCommand, Targets: []Target{{"big1", wantOn}}, Hold: true})
	h.wait = time.Millisecond
	name, err := os.ReadFile("/proc/self/comm")
	if err != nil {
		t.Fatal(err)
	}
	who := fmt.Sprintf("process %d (%s) has locked %s", cmd.Process.Pid, strings.TrimSpace(string(name)), h.dir)
	_, err = h.Apply(h.network, ByCommand, []Target{{"big0", Want{IPv6: netif.MaxSize}}}, false)
	failsAs(t, err, fault.CodeConflict)
	if err.Error() != who {
		t.Errorf("error is %q, not %q", err, who)
	}
	_, err = h.Revert(nil, true)
	failsAs(t, err, fault.CodeConflict)
	h.is(sizesOn, "big0")
	// Reading is possible.
	if got := fmt.Sprint(h.recorded()); got != "[big0]" {
		t.Errorf("recorded are %s", got)
	}
	if _, err := h.Plan(h.network, ByCommand, []Target{{"big0", wantOn}}, false); err != nil {
		t.Error(err)
	}

	// A waiting process gets the lock when the other one releases it, unless it has given up.
	h.wait = time.Minute
	done := make(chan error, 1)
	go func() {
		_, err := h.Apply(h.network, ByCommand, []Target{{"big0", Want{IPv6: netif.MaxSize}}}, false)
		done <- err
	}()
	hold.Close()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	h.is(netiftest.Sizes(netif.MaxSize, netif.MaxSize, large, large), "big0")
	h.revert()

	// The lock is free after the other process was killed.
	cmd, _ = h.holding(childWork{Owner: ByCommand, Targets: []Target{{"big1", wantOn}}, Hold: true})
	cmd.Process.Kill()
	h.apply(Target{"big0", wantOn})
	h.is(sizesOn, "big0")
	h.revert()
	h.is(sizesOff, "big0", "big1")
}

// TestManyAtOnce runs several processes on one store: each completes its work.
func TestManyAtOnce(t *testing.T) {
	h := newChangeHost(t)
	lower := h.veth("big0")
	h.macvlan("bigmac", lower)
	var workers sync.WaitGroup
	for range 4 {
		workers.Go(func() {
			s, err := OpenStore(h.state)
			if err != nil {
				t.Error(err)
				return
			}
			for range 10 {
				if _, err := s.Apply(h.network, ByCommand, []Target{{"bigmac", wantOn}}, false); err != nil {
					t.Error(err)
				}
				if _, err := s.Check(h.network); err != nil {
					t.Error(err)
				}
				if _, err := s.Revert(nil, false); err != nil {
					t.Error(err)
				}
			}
		})
	}
	workers.Wait()
	h.is(sizesOff, "big0", "bigmac")
	if files := h.files(); len(files) > 0 {
		t.Errorf("files are left: %v", files)
	}
}

// TestBetween changes an interface between the plan and the setting of its sizes.
func TestBetween(t *testing.T) {
	tests := map[string]struct {
		change func(h *changeHost)
		fails  bool
	}{
		"vanished": {func(h *changeHost) { h.remove("big1") }, true},
		"another by its name": {func(h *changeHost) {
			h.remove("big1")
			h.veth("big1")
		}, true},
		"renamed": {func(h *changeHost) { h.rename("big1", "bigname") }, false},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			h := newChangeHost(t)
			h.veth("big0")
			h.veth("big1")
			h.veth("big2")
			step := 0
			for at := 1; ; at++ {
				done := false
				step = 0
				h.before = func() {
					if step++; step == at {
						done = true
						test.change(h)
					}
				}
				_, err := h.Apply(h.network, ByCommand, []Target{{"big0", wantOn}, {"big1", wantOn}, {"big2", wantOn}}, false)
				h.before = func() {}
				if !done {
					h.revert()
					return
				}
				l, missing := netlink.LinkByName("big1")
				switch {
				case err != nil && !test.fails:
					t.Errorf("at %d: %v", at, err)
				case err != nil:
					if !isGone(err) {
						t.Errorf("at %d: %v", at, err)
					}
					h.is(sizesOff, "big0", "big2")
					if got := h.recorded(); len(got) > 0 {
						t.Errorf("at %d: recorded are %v", at, got)
					}
				default:
					h.is(sizesOn, "big0", "big2")
				}
				if missing == nil && attributesOf(l) != sizesOff {
					t.Errorf("at %d: the other interface has %v", at, attributesOf(l))
				}
				h.revert()
				h.is(sizesOff, "big0", "big2")
				if test.fails && missing != nil {
					h.veth("big1")
				}
				if !test.fails {
					h.is(sizesOff, "bigname")
					h.rename("bigname", "big1")
				}
			}
		})
	}
}

// TestFails lets the kernel refuse the last of several changes: the changes before it are rolled back.
func TestFails(t *testing.T) {
	h := newChangeHost(t)
	h.veth("big0")
	h.veth("big1")
	bridge := h.bridge("bigbr", "big1")
	before := netiftest.Sizes(70000, 70000, 70000, 70000)
	for _, again := range []bool{false, true} {
		h.set("big0", before)
		h.set("big1", before)
		if again {
			h.apply(Target{"big0", wantOn}, Target{"big1", wantOn})
		}
		then := map[string]netif.Sizes{"big0": h.sizes("big0"), "big1": h.sizes("big1")}
		files := h.sortedRecords()
		tap := netlink.Link(nil)
		h.before = func() {
			if tap == nil {
				tap = h.add(&netlink.Tuntap{LinkAttrs: netlink.LinkAttrs{Name: fmt.Sprintf("bigtap%v", again)}, Mode: netlink.TUNTAP_MODE_TAP})
				if err := netlink.LinkSetMaster(tap, bridge); err != nil {
					t.Error(err)
				}
			}
		}
		_, err := h.Apply(h.network, ByCommand, []Target{{"big0", Want{IPv6: netif.MaxSize}}, {"big1", Want{IPv6: netif.MaxSize}}, {"bigbr", Want{IPv6: netif.MaxSize}}}, false)
		h.before = func() {}
		if err == nil || !strings.Contains(err.Error(), "set sizes of bigbr: ") {
			t.Errorf("error is %v", err)
		}
		for name, s := range then {
			h.is(s, name)
		}
		if got := h.sortedRecords(); got != files {
			t.Errorf("records are\n%s\nnot\n%s", got, files)
		}
		h.remove(tap.Attrs().Name)
		h.revert()
		h.is(before, "big0", "big1")
	}
}

// sortedRecords returns all records as one text.
func (h *changeHost) sortedRecords() string {
	h.Helper()
	records, err := h.Records()
	if err != nil {
		h.Fatal(err)
	}
	data, err := json.Marshal(records)
	if err != nil {
		h.Fatal(err)
	}
	return string(data)
}
