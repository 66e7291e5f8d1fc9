// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/testenv"
)

const (
	podUID      = "2d2b5a6e-97f1-4a4e-9f0c-6a1c5a3f8b11"
	containerID = "9c1d2e3f4a5b6c7d8e9f0a1b2c3d4e5f60718293a4b5c6d7e8f9a0b1c2d3e4f5"
)

// layouts has the cgroups that the kubelet and a container runtime create for a container, by the pattern that
// docs/kubernetes.md gives for them. The kubelet's driver is cgroupfs or systemd, which writes the UID with underscores.
var layouts = []struct {
	pattern string
	cgroups []string
}{
	{"/kubepods.slice/kubepods-pod*.slice/*.scope", []string{ // guaranteed
		"kubepods.slice/kubepods-podUID.slice/cri-containerd-ID.scope",
		"kubepods.slice/kubepods-podUID.slice/crio-ID.scope",
		"kubepods.slice/kubepods-podUID.slice/docker-ID.scope",
	}},
	{"/kubepods.slice/kubepods-*.slice/kubepods-*-pod*.slice/*.scope", []string{
		"kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podUID.slice/cri-containerd-ID.scope",
		"kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-podUID.slice/crio-ID.scope",
		"kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podUID.slice/docker-ID.scope",
	}},
	{"/kubepods.slice/kubepods-*.slice/kubepods-*-pod*.slice/crio-*.scope/container", []string{
		"kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podUID.slice/crio-ID.scope/container",
	}},
	{"/kubepods/pod*/*", []string{"kubepods/podUID/ID"}},
	{"/kubepods/*/pod*/*", []string{"kubepods/burstable/podUID/ID", "kubepods/besteffort/podUID/ID"}},
}

// inContainer starts a process in the cgroup of a container, in a cgroup and a mount namespace of its own.
func inContainer(t *testing.T, path string) func(*exec.Cmd) {
	t.Helper()
	uid := podUID
	if strings.HasPrefix(path, "kubepods.slice") {
		uid = strings.ReplaceAll(podUID, "-", "_")
	}
	path = strings.NewReplacer("UID", uid, "ID", containerID).Replace(path)
	return both(inCgroup(t, path), func(cmd *exec.Cmd) { cmd.SysProcAttr.Unshareflags = unix.CLONE_NEWCGROUP | unix.CLONE_NEWNS })
}

// startInContainer starts the agent as Kubernetes does: in a cgroup namespace of its own, with the host's cgroup v2 mount.
func (h *host) startInContainer(t *testing.T) {
	t.Helper()
	cmd := process("sockeye", h.agentArgs()...)
	inContainer(t, "kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-podAGENT.slice/cri-containerd-AGENT.scope")(cmd)
	h.startBy(cmd)
}

// TestKubernetesLayouts checks that the patterns of docs/kubernetes.md find members in the containers of all layouts of
// cgroups, by an agent on the host and by one in a container.
func TestKubernetesLayouts(t *testing.T) {
	guide, err := os.ReadFile("../../docs/kubernetes.md")
	if err != nil {
		t.Fatal(err)
	}
	policy := strings.Replace(oneService, "slots: 2", "slots: 16", 1) + "    members:\n"
	var all []string
	for _, l := range layouts {
		if !strings.Contains(string(guide), "`"+l.pattern+"`") {
			t.Errorf("docs/kubernetes.md does not have the pattern %s", l.pattern)
		}
		policy += fmt.Sprintf("      - {match: {cgroup: %q}, slot: environment, namespaces: any}\n", testenv.CgroupPath()+l.pattern)
		all = append(all, l.cgroups...)
	}
	for name, start := range map[string]func(*host, *testing.T){
		"agent on the host":    func(h *host, _ *testing.T) { h.start() },
		"agent in a container": (*host).startInContainer,
	} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t, policy)
			start(h, t)
			inSlot := func(slot int, cgroup string) int {
				pid, _ := h.member(both(inContainer(t, cgroup), func(cmd *exec.Cmd) {
					cmd.Env = append(os.Environ(), fmt.Sprintf("SOCKEYE_SLOT=%d", slot))
				}), sharedSpecs...)
				return pid
			}
			// Processes that are in no container of a pod.
			strangers := []int{inSlot(0, "system.slice/kubepods.slice/kubepods-podUID.slice/cri-containerd-ID.scope"), inSlot(0, "kubepods.slice/other.scope")}
			for slot, cgroup := range all {
				h.served(slot, inSlot(slot, cgroup), strangers...)
			}
		})
	}
}

// TestKubernetesStatefulSet checks the policy that docs/kubernetes.md recommends, by which a pod selects its slot: below
// the cgroup of all pods, whatever the pod's UID and class are.
func TestKubernetesStatefulSet(t *testing.T) {
	h := newHost(t, strings.Replace(oneService, "cgroup: CGROUP", "cgroup: CGROUP/kubepods.slice", 1)+
		"    members: [{match: {command_line: ^collector}, slot: environment, namespaces: any}]\n")
	h.startInContainer(t)
	pod := func(slot, cgroup string) (int, func()) {
		return h.member(both(inContainer(t, cgroup), func(cmd *exec.Cmd) {
			cmd.Env = append(os.Environ(), "SOCKEYE_SLOT="+slot)
		}), sharedSpecs...)
	}
	outside, _ := pod("0", "system.slice/collector.service")
	without, _ := pod("", "kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-podOTHER.slice/cri-containerd-ID.scope")
	first, end := pod("0", "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podUID.slice/cri-containerd-ID.scope")
	second, _ := pod("1", "kubepods.slice/kubepods-podUID.slice/crio-ID.scope")
	h.served(0, first, outside, without)
	h.served(1, second, outside, without)
	if got, want := h.problemOf(without), "the environment has no SOCKEYE_SLOT"; got != want {
		t.Errorf("a pod without a slot: %q, want %q", got, want)
	}
	// The next pod of the set has another UID.
	end()
	next, _ := pod("0", "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podNEXT.slice/cri-containerd-ID.scope")
	h.served(0, next, outside, without)
}

// TestHiddenCgroups checks that the agent and doctor name the missing mount if the container of the agent shows only the
// agent's own cgroup.
func TestHiddenCgroups(t *testing.T) {
	const hint = "mount the host's /sys/fs/cgroup in the container of the agent"
	h := newHost(t, "services: {}\n")
	h.startRooted()
	if log, err := os.ReadFile(h.log); err != nil || strings.Count(string(log), hint) != 1 {
		t.Errorf("the agent logs %s, %v", log, err)
	}
	for role, want := range map[string]bool{"in-cgroup": true, "sockeye": false} {
		r := h.child(func(cmd *exec.Cmd) { cmd.SysProcAttr.Unshareflags = unix.CLONE_NEWCGROUP | unix.CLONE_NEWNS }, role, "doctor", "--pins", h.pins)
		if got := strings.Contains(r.out, hint); got != want {
			t.Errorf("%s: doctor names the mount: %t, want %t:\n%s", role, got, want, r.out)
		}
	}
}

// configMap is a directory with files as the kubelet writes those of a ConfigMap: links to files below a link that the
// kubelet replaces.
type configMap struct {
	t       *testing.T
	dir     string
	version int
}

func (c *configMap) write(files map[string]string) {
	c.t.Helper()
	check := func(err error) {
		c.t.Helper()
		if err != nil {
			c.t.Fatal(err)
		}
	}
	c.version++
	version := fmt.Sprintf("..version_%d", c.version)
	check(os.MkdirAll(filepath.Join(c.dir, version), 0o755))
	for name, text := range files {
		check(os.WriteFile(filepath.Join(c.dir, version, name), []byte(text), 0o644))
	}
	check(os.Symlink(version, filepath.Join(c.dir, "..data_tmp")))
	check(os.Rename(filepath.Join(c.dir, "..data_tmp"), filepath.Join(c.dir, "..data")))
	for name := range files {
		if err := os.Symlink("..data/"+name, filepath.Join(c.dir, name)); err != nil && !os.IsExist(err) {
			c.t.Fatal(err)
		}
	}
	if c.version > 1 {
		check(os.RemoveAll(filepath.Join(c.dir, fmt.Sprintf("..version_%d", c.version-1))))
	}
}

// TestWatchedPolicy replaces the files of a ConfigMap: the agent applies the policy, and what it refuses changes nothing.
func TestWatchedPolicy(t *testing.T) {
	h := newHost(t, "")
	policy := strings.ReplaceAll(mappedService, "CGROUP", testenv.CgroupPath())
	files := map[string]string{"policy.yaml": policy, "devices.csv": "127.0.0.1,edge\n"}
	c := &configMap{t: t, dir: filepath.Join(h.dir, "config")}
	c.write(files)
	h.policy = filepath.Join(c.dir, "policy.yaml")
	h.start("--watch-policy")
	slots := func(want int) {
		t.Helper()
		h.eventually(fmt.Sprintf("the service has %d slots", want), func() bool {
			status := must[api.Status](h, "status")
			return status.Services[0].Slots == want && status.PolicyProblem == ""
		})
	}
	slots(4)
	files["policy.yaml"] = strings.Replace(policy, "slots: 4", "slots: 3", 1)
	c.write(files)
	slots(3)
	before := must[[]api.WhereStatus](h, "where", "127.0.0.9")[0].Device
	files["devices.csv"] = "127.0.0.0/24,centre\n"
	c.write(files)
	h.eventually("the device map is applied", func() bool { return must[[]api.WhereStatus](h, "where", "127.0.0.9")[0].Device == "centre" })
	if before == "centre" {
		t.Error("the device had its name before")
	}
	files["policy.yaml"] = strings.Replace(policy, "slots: 4", "slots: none", 1)
	c.write(files)
	h.eventually("the agent logs the error", func() bool {
		log, err := os.ReadFile(h.log)
		return err == nil && strings.Contains(string(log), "policy not applied")
	})
	status := must[api.Status](h, "status")
	if status.Services[0].Slots != 3 || !strings.Contains(status.PolicyProblem, "invalid and not in force") {
		t.Errorf("refused: %d slots, problem %q", status.Services[0].Slots, status.PolicyProblem)
	}
	files["policy.yaml"] = policy
	c.write(files)
	slots(4)

	// A file of the directory that is replaced again and again does not delay the policy for ever.
	stop := make(chan struct{})
	var noise sync.WaitGroup
	noise.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			case <-time.After(50 * time.Millisecond):
				name := filepath.Join(c.dir, "noise")
				_ = os.WriteFile(name+".new", fmt.Append(nil, i), 0o600)
				_ = os.Rename(name+".new", name)
			}
		}
	})
	defer noise.Wait()
	defer close(stop)
	files["policy.yaml"] = strings.Replace(policy, "slots: 4", "slots: 2", 1)
	c.write(files)
	slots(2)
}
