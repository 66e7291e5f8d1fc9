// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"sockeye/internal/config"
)

// upIsolated returns a host with isolated members. All guarantees of steering apply to them.
func upIsolated(t *testing.T, mode config.Steering, slots int) *host {
	t.Helper()
	h := newHost(t, mode)
	h.isolated = true
	h.up(slots)
	return h
}

func TestIsolatedMembersAreStable(t *testing.T) {
	t.Parallel()
	inBothModes(t, func(t *testing.T, mode config.Steering) { upIsolated(t, mode, 4).stable() })
}

func TestIsolatedMembersFailAlone(t *testing.T) {
	t.Parallel()
	inBothModes(t, func(t *testing.T, mode config.Steering) { upIsolated(t, mode, 4).faults() })
}

func TestIsolatedMembersRestart(t *testing.T) {
	t.Parallel()
	inBothModes(t, func(t *testing.T, mode config.Steering) {
		h := newHost(t, mode)
		h.isolated = true
		h.restarts()
	})
}

func TestIsolatedMembersOutliveTheAgent(t *testing.T) {
	t.Parallel()
	inBothModes(t, func(t *testing.T, mode config.Steering) { upIsolated(t, mode, 4).agentKilled() })
}

func TestIsolatedMembersStartWhileTheAgentIsKilled(t *testing.T) {
	t.Parallel()
	inBothModes(t, func(t *testing.T, mode config.Steering) { upIsolated(t, mode, 4).agentKilledDuringRegistration() })
}

// TestIsolatedLoadNfacctd connects 512 routers to four isolated nfacctd processes at the same time.
func TestIsolatedLoadNfacctd(t *testing.T) {
	for _, mode := range []config.Steering{config.Reuseport, config.Lookup} {
		t.Run(string(mode), func(t *testing.T) {
			h := newHost(t, mode)
			h.isolated = true
			h.loadsNfacctd()
		})
	}
}

// TestIsolatedMemberCloses checks that the slot closes for both protocols if the program closes a socket of the
// service, and that the gateway exits with its program.
func TestIsolatedMemberCloses(t *testing.T) {
	inBothModes(t, func(t *testing.T, mode config.Steering) {
		h := upIsolated(t, mode, 3)
		home := h.homes(3)
		all := addresses(60)
		h.lands("with three members", all, home)
		h.closes(all, home)
		gateway := h.members[2]
		h.must(unix.Kill(child(t, gateway.Pid()), unix.SIGKILL))
		<-gateway.Done()
		h.lands("without a member", all, nowhere)
		h.start(2)
		h.ready(2)
		h.lands("with a member back", all, home.but(0, 1))
		h.nothingMisplaced(home, 60)
	})
}

// TestIsolatedMemberIsTheServicesUser checks that the gateway, whose sockets are registered, and the isolated program
// run as the service's user if root starts the member.
func TestIsolatedMemberIsTheServicesUser(t *testing.T) {
	i := newIsolated(t) // with a TUN device that all users may open
	h := newHost(t, config.Reuseport)
	h.isolated = true
	h.setPolicy(2, fmt.Sprintf("user: %q", "nobody"))
	h.startAgent()
	// The user can find the program in this directory.
	exe, err := os.ReadFile("/proc/self/exe")
	h.must(err)
	copied := filepath.Join(i.dir, "receiver")
	h.must(os.WriteFile(copied, exe, 0o755))
	h.must(os.Chmod(i.dir, 0o755))
	wrap := slices.DeleteFunc(h.isolation(0), func(s string) bool { return s == "--as-root" })
	m := h.startReceiver("receiver-0", h.spec(0), append(wrap, "sh", "-c", "exec "+copied)...)
	h.ready(0)
	all := addresses(20)
	h.lands("isolated as the service's user", all, h.homes(2).but(1))
	for _, pid := range []int{m.Pid(), child(t, m.Pid()), child(t, child(t, m.Pid()))} {
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		h.must(err)
		if !strings.Contains(string(status), fmt.Sprintf("\nUid:\t%[1]d\t%[1]d\t%[1]d\t%[1]d\n", user)) || !strings.Contains(string(status), "\nGroups:\t \n") {
			t.Errorf("process %d:\n%s", pid, status)
		}
	}
	for _, who := range [][]string{{"--as-root"}, {"--user", "daemon"}} {
		args := append([]string{"run", "--isolated"}, append(who, "--", "true")...)
		h.refuse(5, []string{"is not the members' user nobody", "the program runs as nobody"}, args...)
	}
	// An exit logs no warning.
	h.must(m.Signal(unix.SIGTERM))
	<-m.Done()
	if said := m.LogTail(100); strings.Contains(said, "WARN") {
		t.Errorf("output of the gateway at its exit:\n%s", said)
	}
}

// child returns the only child of a process, started by any of its threads.
func child(t *testing.T, pid int) int {
	t.Helper()
	paths, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	for _, path := range paths {
		if text, err := os.ReadFile(path); err == nil { // a thread may exit
			all = append(all, strings.Fields(string(text))...)
		}
	}
	if len(all) != 1 {
		t.Fatalf("children of process %d: %q", pid, all)
	}
	n, err := strconv.Atoi(all[0])
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// TestIsolatedNfacctd runs Debian's nfacctd isolated, with BMP of FRR and IPFIX. Both streams of each router reach it
// with the router's address. A dead collector empties only its own slot.
func TestIsolatedNfacctd(t *testing.T) {
	t.Parallel()
	inBothModes(t, func(t *testing.T, mode config.Steering) {
		h := newHostWith(t, mode, 6)
		h.isolated = true
		n := networkOf(h)
		n.together()
		// The rule of the policy for nfacctd's command line also matches the processes inside.
		if waiting := h.service().Waiting; len(waiting) > 0 {
			t.Errorf("processes inside are listed as waiting: %+v", waiting)
		}
		n.kill(2)
		n.refuses("it is dead", 2)
		n.startCollector(2, 10)
		n.collect(0, 1, 2, 3)
		n.together()
	})
}

// TestIsolatedProgramIsNoMember checks a rule of the policy that also matches the isolated program. The gateway is the
// member. The program is not a member and is not listed as a candidate, even while the slot is not ready.
func TestIsolatedProgramIsNoMember(t *testing.T) {
	t.Parallel()
	h := newHost(t, config.Reuseport)
	h.isolated = true
	exe, err := os.Executable()
	h.must(err)
	h.up(1, fmt.Sprintf("members: [{match: {command_line: '%s$'}, slot: 0}]", regexp.QuoteMeta(exe)))
	fmt.Fprintln(h.members[0].stdin, "close udp")
	h.eventually("the slot to close", func() error {
		if h.slots()[0].Ready {
			return errors.New("it is ready")
		}
		return nil
	})
	h.killAgent()
	h.startAgent()
	h.eventually("the agent to examine all processes", func() error {
		waiting := h.service().Waiting
		if len(waiting) == 0 {
			return errors.New("the member does not wait")
		}
		for _, w := range waiting {
			if w.PID != h.members[0].Pid() {
				h.Fatalf("process %d waits: %s", w.PID, w.Problem)
			}
		}
		return nil
	})
}
