// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/api"
)

// becomeParent opens sockets and starts a child that inherits them and outlives it.
func becomeParent(specs []string) {
	for _, spec := range specs {
		if err := openAs(spec); err != nil {
			fmt.Println(spec, err)
			os.Exit(1)
		}
	}
	child := exec.Command("/proc/self/exe", "paused")
	child.Args[0] = "collector"
	if err := child.Start(); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	pause()
}

// becomeTwin runs a member that opens its first socket a second time on SIGUSR1.
func becomeTwin(specs []string) {
	again := make(chan os.Signal, 1)
	signal.Notify(again, unix.SIGUSR1)
	go func() {
		<-again
		_ = openAs(specs[0])
	}()
	becomeMember(specs)
}

func collector(cmd *exec.Cmd) { cmd.Args[0] = "collector" }

// childOf waits for the first child of a process, and ends the child with the test.
func childOf(h *host, parent int) (child int) {
	h.t.Helper()
	h.eventually("the process has a child", func() bool {
		stats, _ := filepath.Glob("/proc/[0-9]*/stat")
		for _, path := range stats {
			text, _ := os.ReadFile(path)
			_, rest, _ := strings.Cut(string(text), ") ")
			if f := strings.Fields(rest); len(f) > 1 && f[1] == strconv.Itoa(parent) {
				child, _ = strconv.Atoi(filepath.Base(filepath.Dir(path)))
				return true
			}
		}
		return false
	})
	h.t.Cleanup(func() {
		_ = unix.Kill(child, unix.SIGKILL) // may have exited
	})
	return child
}

// TestOrphan checks a child that still holds the sockets of a member that has exited. It does not become the member,
// whether the agent was running at that time or not.
func TestOrphan(t *testing.T) {
	for _, agentFirst := range []bool{true, false} {
		t.Run(map[bool]string{true: "the agent ends first", false: "the member ends first"}[agentFirst], func(t *testing.T) {
			h := newHost(t, theft(sharedPorts, "user: root", "cgroup: CGROUP", "members: [{match: {command_line: ^collector}, slot: 0}]"))
			h.start()
			parent, end := h.as("parent", collector, sharedSpecs...)
			child := childOf(h, parent)
			h.served(0, parent, child)
			if agentFirst {
				h.kill()
				end()
			} else {
				end()
				h.eventually("the slot is empty", func() bool { return !must[[]api.SlotStatus](h, "slots")[0].Ready })
				h.kill()
			}
			for range 2 { // also with the next agent, which has not seen the exit
				h.start()
				time.Sleep(1500 * time.Millisecond) // the agent examines a process again one second after a bind
				if s := must[[]api.SlotStatus](h, "slots")[0]; s.Ready {
					t.Fatalf("slot 0 has process %d, whose parent %d was the member", s.PID, parent)
				}
				h.kill()
			}
			h.start()
			member, _ := h.member(nil, sharedSpecs...)
			h.served(0, member, child)
			// A registration by command makes it the member.
			if r := h.sockeye("unregister", "--slot", "0"); r.code != 0 {
				t.Fatalf("%+v", r)
			}
			if r := h.sockeye("register", "--slot", "0", "--pid", strconv.Itoa(child)); r.code != 0 {
				t.Errorf("%+v", r)
			}
		})
	}
}

// TestDuplicateSockets checks that a process with two sockets for one listener is refused, and that a member that
// opens a second one later is reported: a slot has one socket per listener.
func TestDuplicateSockets(t *testing.T) {
	h := newHost(t, theft(sharedPorts, "user: root", "cgroup: CGROUP", "members: [{match: {command_line: ^collector}, slot: 0}]"))
	h.start()
	pid, end := h.member(nil, append([]string{sharedSpecs[0]}, sharedSpecs...)...)
	want := "it has more than one socket tcp [::]:1790: a slot has one socket per listener, the others would get no traffic"
	h.eventually("the agent reports: "+want, func() bool { return h.problemOf(pid) == want })
	end()
	pid, _ = h.as("duplicate", collector, sharedSpecs...)
	h.served(0, pid)
	if err := unix.Kill(pid, unix.SIGUSR1); err != nil {
		t.Fatal(err)
	}
	want = fmt.Sprintf("process %d in slot 0 has another socket tcp [::]:1790, which gets no traffic: a slot has one socket per listener", pid)
	h.eventually("status names the socket", func() bool { return h.service().Problem == want })
	if s := must[[]api.SlotStatus](h, "slots")[0]; !s.Ready || s.PID != pid {
		t.Errorf("the member lost its slot: %+v", s)
	}
}

// TestRunBesideAgent checks that run waits for an agent that is started at the same time.
func TestRunBesideAgent(t *testing.T) {
	h := newHost(t, theft(sharedPorts, "user: root", "cgroup: CGROUP"))
	run := func() (pid int, ended chan struct{}) {
		cmd := process("sockeye", "run", "--run-dir", h.run, "--slot", "0", "--", "/proc/self/exe", "member", sharedSpecs[0], sharedSpecs[1])
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		ended = make(chan struct{})
		go func() {
			cmd.Wait()
			close(ended)
		}()
		t.Cleanup(func() {
			cmd.Process.Kill()
			<-ended
		})
		return cmd.Process.Pid, ended
	}
	pid, ended := run()
	h.start()
	select {
	case <-ended: // a busy host may need longer for the start of the agent than run waits
		pid, _ = run()
	default:
	}
	h.served(0, pid)
}

// TestWaitingAnew checks that status examines a candidate again: no event reports that its user has changed.
func TestWaitingAnew(t *testing.T) {
	h := newHost(t, theft(sharedPorts, "user: nobody", "cgroup: CGROUP"))
	h.start()
	cmd := process("sockeye", "run", "--run-dir", h.run, "--slot", "0", "--", "setpriv", "--reuid=65534", "--clear-groups", "sleep", "60")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	const want = "it has not opened tcp [::]:1790 yet"
	h.eventually("status shows the new problem", func() bool {
		w := h.service().Waiting
		return len(w) == 1 && w[0].Problem == want && strings.Contains(w[0].Hint, "compare the ports")
	})
}

// TestDoctorNamesStrangers checks that doctor names a process of the members' user that has sockets on the service's
// ports and matches no rule.
func TestDoctorNamesStrangers(t *testing.T) {
	h := newHost(t, theft(sharedPorts, "user: root", "cgroup: CGROUP", "members: [{match: {command_line: ^collector}, slot: 0}]"))
	h.start()
	member, _ := h.member(nil, sharedSpecs...)
	h.served(0, member)
	stranger, _ := h.member(func(cmd *exec.Cmd) { cmd.Args[0] = "other" }, sharedSpecs...)
	r := h.sockeye("doctor", "--policy", h.policy, "--pins", h.pins)
	for _, socket := range sharedSpecs {
		if want := fmt.Sprintf("%s of process %d (other) is in no slot, and receives nothing from the service", socket, stranger); !strings.Contains(r.out, want) {
			t.Errorf("doctor does not report: %s", want)
		}
	}
	if strings.Count(r.out, "is in no slot") != 2 || !strings.Contains(r.out, fmt.Sprintf("sockeye register --service telemetry --pid %d", stranger)) {
		t.Errorf("doctor:\n%s", r.out)
	}
}
