// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"sockeye/internal/api"
)

// collectorPorts are the sockets of a collector that can share its ports.
var collectorPorts = []string{"tcp [::]:1790 reuseport", "udp [::]:4739 reuseport"}

const noneShared = "no processes of this host share a port by SO_REUSEPORT"

// TestInit checks that init writes a policy that the agent accepts, and that gives each process a slot.
func TestInit(t *testing.T) {
	h := newHost(t, "# A policy that does nothing.\nservices: {}\n")
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	name := filepath.Base(program)
	h.refused(1, noneShared, "start at least two processes that listen on the same ports with SO_REUSEPORT, as nfacctd does", nil, "init")
	first, endFirst := h.member(nil, collectorPorts...)
	h.refused(1, noneShared, name+" (process PID) could share its ports: start another one", []int{first}, "init")
	// The second one has another socket, which the first one does not share.
	second, endSecond := h.member(nil, append([]string{"tcp 127.0.0.1:9000 reuseport"}, collectorPorts...)...)

	shown := must[initial](h, "init", "--policy", h.policy)
	if len(shown.Services) != 1 || shown.Written || shown.File != h.policy {
		t.Fatalf("%+v", shown)
	}
	if s := shown.Services[0]; s.Slots != 2 || s.User != "root" || fmt.Sprint(s.Listeners) != "[tcp [::]:1790 udp [::]:4739]" ||
		len(s.Processes) != 2 || s.Processes[0].Executable != program {
		t.Errorf("%+v", s)
	} else if pids := []int{s.Processes[0].PID, s.Processes[1].PID}; !slices.Equal(pids, []int{min(first, second), max(first, second)}) {
		// The second process has the lower id after kernel.pid_max.
		t.Errorf("processes %v, want %d and %d", pids, first, second)
	}
	if r := h.sockeye("init"); r.code != 0 || r.out != shown.Policy || r.err != "" || !strings.Contains(r.out, "# not all of them listen on tcp 127.0.0.1:9000") {
		t.Errorf("%+v, want %s", r, shown.Policy)
	}
	if text, err := os.ReadFile(h.policy); err != nil || strings.Contains(string(text), "slots") {
		t.Errorf("init without --write has written %s, %v", text, err)
	}
	if r := h.sockeye("init", "--policy", h.policy); r.code != 0 || r.out != shown.Policy || r.err != "hint: "+h.policy+" is not written without --write\n" {
		t.Errorf("init with a file and without --write: %d: %s%s", r.code, r.out, r.err)
	}
	if r := h.sockeye("init", "--write", "--policy", h.policy); r.code != 0 || r.out != h.policy+" written\n" ||
		r.err != "hint: read it, then: sockeye doctor --policy "+h.policy+"; sockeye agent --policy "+h.policy+"\n" {
		t.Errorf("%+v", r)
	}
	text, err := os.ReadFile(h.policy)
	if err != nil || string(text) != shown.Policy {
		t.Errorf("written: %s, %v", text, err)
	}
	if info, err := os.Stat(h.policy); err != nil || info.Mode() != 0o644 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	h.refused(5, "DIR/policy.yaml exists and has 1 service", "name another file with --policy", nil, "init", "--write", "--policy", h.policy)
	h.write("metrics.yaml", "services: {}\nmetrics: {listen: \"127.0.0.1:9732\"}\n")
	h.refused(5, "DIR/metrics.yaml exists and has metrics", "name another file with --policy", nil, "init", "--write", "--policy", h.dir+"/metrics.yaml")
	h.write("broken.yaml", "services: 7\n")
	if r := h.sockeye("init", "--write", "--policy", h.dir+"/broken.yaml"); r.code != 5 || !strings.Contains(r.err, "is not a valid policy") {
		t.Errorf("%+v", r)
	}
	h.refused(2, "write policy: stat DIR/new: no such file or directory", "make the directory, or name another file with --policy", nil, "init", "--write", "--policy", h.dir+"/new/policy.yaml")
	if r := h.child(asNobody, "sockeye", "init"); r.code != 4 || r.err != "sockeye: the sockets of other processes cannot be read\nhint: run it as root\n" {
		t.Errorf("as nobody: %+v", r)
	}

	// The agent of the tests searches in their cgroup.
	h.write("policy.yaml", strings.Replace(shown.Policy, "    user: root\n", "    user: root\n    cgroup: CGROUP\n", 1))
	h.start()
	h.eventually("members", func() bool { return must[api.Status](h, "status").Services[0].Ready == 2 })

	// Keepers hold the ports now, but are not members of a policy.
	endFirst()
	endSecond()
	h.refused(1, noneShared, "start at least two processes that listen on the same ports with SO_REUSEPORT, as nfacctd does", nil, "init")
}

// TestInitUnits checks the rules for processes of units.
func TestInitUnits(t *testing.T) {
	h := newHost(t, "services: {}\n")
	wants := func(lines ...string) {
		t.Helper()
		r := h.child(func(cmd *exec.Cmd) { cmd.SysProcAttr.Cloneflags = unix.CLONE_NEWCGROUP | unix.CLONE_NEWNS }, "in-cgroup", "init")
		for _, line := range lines {
			if !strings.Contains(r.out, line) {
				t.Errorf("no %q in %+v", line, r)
			}
		}
	}
	h.member(inCgroup(t, "collector@3.service"), collectorPorts...)
	_, end := h.member(inCgroup(t, "collector@0.service"), collectorPorts...)
	wants("slots: 4\n", `- {match: {systemd_unit: "collector@*.service"}, slot: instance}`)
	end()
	h.member(inCgroup(t, "collector.service"), collectorPorts...)
	wants("slots: 2\n", `- {match: {systemd_unit: "collector.service"}, slot: 0}`, `- {match: {systemd_unit: "collector@3.service"}, slot: 1}`)
}
