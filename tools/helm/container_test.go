// SPDX-License-Identifier: Apache-2.0

package helm

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/contrib/seccomp"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	"kernel.org/pub/linux/libs/security/libcap/cap"

	"sockeye/internal/api"
	"sockeye/internal/testenv"
)

// node is a network namespace with the directories that the pod mounts from its node, and one container.
type node struct {
	t       *testing.T
	cgroups string // of the tests, below the mount
	dir     string
	pod     corev1.PodSpec
	log     *os.File
	runs    int
	ended   chan struct{} // closed when the container has ended; nil without a container
}

// newNode makes the host paths of the pod in this mount namespace: the host has other mounts there.
func newNode(t *testing.T, pod corev1.PodSpec) *node {
	t.Helper()
	n := &node{t: t, dir: t.TempDir(), pod: pod, cgroups: testenv.CgroupPath()}
	mount := func(kind, at, data string) {
		t.Helper()
		n.check(os.MkdirAll(at, 0o755))
		if err := unix.Mount(kind, at, kind, 0, data); err != nil {
			t.Fatalf("mount %s at %s: %v", kind, at, err)
		}
		t.Cleanup(func() {
			if err := unix.Unmount(at, unix.MNT_DETACH); err != nil {
				t.Errorf("unmount %s: %v", at, err)
			}
		})
	}
	// Nodes of Kubernetes have cgroup v2 alone.
	mount("tmpfs", "/sys/fs/cgroup", "mode=755")
	mount("cgroup2", "/sys/fs/cgroup", "")
	mount("bpf", "/sys/fs/bpf", "mode=0700")
	mount("tmpfs", "/var/lib", "mode=755")
	mount("tmpfs", "/run", "mode=755")
	for _, v := range pod.Volumes {
		if v.HostPath != nil && *v.HostPath.Type == corev1.HostPathDirectoryOrCreate {
			n.check(os.MkdirAll(v.HostPath.Path, 0o755))
		}
	}
	log, err := os.Create(filepath.Join(n.dir, "log"))
	n.check(err)
	n.log = log
	t.Cleanup(func() {
		n.stop()
		if t.Failed() {
			text, _ := os.ReadFile(log.Name())
			t.Logf("the log of the agent:\n%s", text)
		}
		log.Close()
	})
	return n
}

func (n *node) check(err error) {
	n.t.Helper()
	if err != nil {
		n.t.Fatal(err)
	}
}

func (n *node) eventually(what string, ok func() bool) {
	n.t.Helper()
	for start := time.Now(); !ok(); time.Sleep(testenv.Backoff(start)) {
		if time.Since(start) > time.Minute {
			n.t.Fatalf("not within a minute: %s", what)
		}
	}
}

// writeConfigMap writes files as the kubelet does: it replaces the link to the directory that has all of them.
func (n *node) writeConfigMap(files map[string]string) {
	n.t.Helper()
	dir, err := os.MkdirTemp(n.mkdir("config"), "..version")
	n.check(err)
	n.check(os.Chmod(dir, 0o755))
	for name, text := range files {
		n.check(os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644))
		if err := os.Symlink("..data/"+name, n.dir+"/config/"+name); err != nil && !os.IsExist(err) {
			n.t.Fatal(err)
		}
	}
	n.check(os.Symlink(filepath.Base(dir), n.dir+"/config/..data_tmp"))
	n.check(os.Rename(n.dir+"/config/..data_tmp", n.dir+"/config/..data"))
}

func (n *node) mkdir(name string) string {
	n.t.Helper()
	dir := filepath.Join(n.dir, name)
	n.check(os.MkdirAll(dir, 0o755))
	return dir
}

// spec translates the pod to what containerd gives its runtime.
func (n *node) spec() *specs.Spec {
	n.t.Helper()
	c := n.pod.Containers[0]
	s := &specs.Spec{
		Version: "1.0.2",
		Root:    &specs.Root{Path: "rootfs", Readonly: *c.SecurityContext.ReadOnlyRootFilesystem},
		Process: &specs.Process{
			Args: append([]string{"/sockeye"}, c.Args...), Cwd: "/",
			// The kubelet sets this variable in all containers.
			Env:             []string{"PATH=/usr/bin:/bin", "KUBERNETES_SERVICE_HOST=192.0.2.1"},
			User:            specs.User{UID: uint32(*c.SecurityContext.RunAsUser), GID: uint32(*c.SecurityContext.RunAsGroup)},
			NoNewPrivileges: !*c.SecurityContext.AllowPrivilegeEscalation,
		},
		Linux: &specs.Linux{
			CgroupsPath: filepath.Join(n.cgroups, "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podAGENT.slice/cri-containerd-AGENT.scope"),
			Namespaces:  []specs.LinuxNamespace{{Type: specs.MountNamespace}, {Type: specs.CgroupNamespace}},
			// Those of containerd (oci.WithDefaultMaskedPaths).
			MaskedPaths: []string{"/proc/acpi", "/proc/asound", "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/timer_list",
				"/proc/timer_stats", "/proc/sched_debug", "/sys/firmware", "/sys/devices/virtual/powercap", "/proc/scsi"},
			ReadonlyPaths: []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"},
		},
	}
	if !slices.Equal(c.SecurityContext.Capabilities.Drop, []corev1.Capability{"ALL"}) {
		n.t.Fatal("the container keeps capabilities of the runtime")
	}
	var capabilities []string
	for _, name := range c.SecurityContext.Capabilities.Add {
		capabilities = append(capabilities, "CAP_"+string(name))
	}
	s.Process.Capabilities = &specs.LinuxCapabilities{Bounding: capabilities, Effective: capabilities, Permitted: capabilities}
	s.Linux.Seccomp = seccomp.DefaultProfile(s)
	if !n.pod.HostIPC {
		s.Linux.Namespaces = append(s.Linux.Namespaces, specs.LinuxNamespace{Type: specs.IPCNamespace})
	}
	if !n.pod.HostNetwork || !n.pod.HostPID {
		n.t.Fatal("the pod has a network or PID namespace of its own")
	}
	s.Mounts = []specs.Mount{
		{Destination: "/proc", Type: "proc", Source: "proc", Options: []string{"nosuid", "noexec", "nodev"}},
		{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "strictatime", "mode=755", "size=65536k"}},
		{Destination: "/sys", Type: "sysfs", Source: "sysfs", Options: []string{"nosuid", "noexec", "nodev", "ro"}},
	}
	for _, m := range c.VolumeMounts {
		i := slices.IndexFunc(n.pod.Volumes, func(v corev1.Volume) bool { return v.Name == m.Name })
		source := filepath.Join(n.dir, "config")
		if path := n.pod.Volumes[i].HostPath; path != nil {
			source = path.Path
		}
		mode := "rw"
		if m.ReadOnly {
			mode = "ro"
		}
		s.Mounts = append(s.Mounts, specs.Mount{Destination: m.MountPath, Type: "bind", Source: source, Options: []string{"rbind", "rprivate", mode}})
	}
	slices.SortStableFunc(s.Mounts, func(a, b specs.Mount) int {
		return cmp.Compare(strings.Count(a.Destination, "/"), strings.Count(b.Destination, "/"))
	})
	return s
}

func (n *node) runc(args ...string) *exec.Cmd {
	return exec.Command("runc", append([]string{"--root", filepath.Join(n.dir, "runc")}, args...)...)
}

func (n *node) id() string { return fmt.Sprintf("agent-%d", n.runs) }

// start starts the container, and waits until its startup probe succeeds.
func (n *node) start() {
	n.t.Helper()
	n.runs++
	bundle := n.mkdir(fmt.Sprintf("bundle-%d", n.runs))
	n.mkdir(fmt.Sprintf("bundle-%d/rootfs", n.runs))
	binary, err := os.ReadFile(sockeye)
	n.check(err)
	n.check(os.WriteFile(bundle+"/rootfs/sockeye", binary, 0o755))
	config, err := json.Marshal(n.spec())
	n.check(err)
	n.check(os.WriteFile(bundle+"/config.json", config, 0o644))
	cmd := n.runc("run", "--bundle", bundle, n.id())
	cmd.Stdout, cmd.Stderr = n.log, n.log
	n.check(cmd.Start())
	ended := make(chan struct{})
	go func() { _ = cmd.Wait(); close(ended) }()
	n.ended = ended
	probe := n.pod.Containers[0].StartupProbe.Exec.Command
	n.eventually("the startup probe succeeds", func() bool {
		select {
		case <-ended:
			n.t.Fatal("the agent has ended")
		default:
		}
		return n.exec(probe...).Run() == nil
	})
}

// exec prepares a command in the container, as "kubectl exec" does.
func (n *node) exec(command ...string) *exec.Cmd {
	return n.runc(append([]string{"exec", n.id()}, command...)...)
}

// stop stops the container as the kubelet does.
func (n *node) stop() {
	if n.ended == nil {
		return
	}
	_ = n.runc("kill", n.id(), "TERM").Run() // the container may have ended
	select {
	case <-n.ended:
	case <-time.After(time.Duration(*n.pod.TerminationGracePeriodSeconds) * time.Second):
		n.t.Error("the agent does not stop at SIGTERM")
	}
	if out, err := n.runc("delete", "--force", n.id()).CombinedOutput(); err != nil && !bytes.Contains(out, []byte("does not exist")) {
		n.t.Errorf("delete container: %v: %s", err, out)
	}
	<-n.ended
	n.ended = nil
}

// ask decodes what a command in the container prints.
func ask[T any](n *node, args ...string) T {
	n.t.Helper()
	var answer T
	out, err := n.exec(append(append([]string{"/sockeye"}, args...), "-o", "json")...).CombinedOutput()
	if err != nil {
		n.t.Fatalf("sockeye %q: %v: %s", args, err, out)
	}
	if err := json.Unmarshal(out, &answer); err != nil {
		n.t.Fatalf("sockeye %q: %v in %s", args, err, out)
	}
	return answer
}

// serve answers each datagram on [::]:4739 and each connection to [::]:1790 with the process id, as one of several
// processes that share these ports.
func serve() error {
	listen := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var failed error
		err := c.Control(func(fd uintptr) { failed = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1) })
		return errors.Join(err, failed)
	}}
	listen.SetMultipathTCP(false)
	pid := []byte(strconv.Itoa(os.Getpid()))
	listener, err := listen.Listen(context.Background(), "tcp", "[::]:1790")
	if err != nil {
		return err
	}
	packets, err := listen.ListenPacket(context.Background(), "udp", "[::]:4739")
	if err != nil {
		return err
	}
	fmt.Println("ready")
	go func() {
		buffer := make([]byte, 64)
		for {
			if _, from, err := packets.ReadFrom(buffer); err == nil {
				_, _ = packets.WriteTo(pid, from)
			}
		}
	}()
	for {
		conn, err := listener.Accept()
		if err != nil {
			return err
		}
		_, _ = conn.Write(pid)
		conn.Close()
	}
}

const memberUser = 1000

// member starts a member for a slot in the cgroup and the namespaces of a container of a pod.
func (n *node) member(slot int) *exec.Cmd {
	n.t.Helper()
	dir := filepath.Join("/sys/fs/cgroup", n.cgroups, fmt.Sprintf("kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod%d.slice/cri-containerd-%[1]d.scope", slot))
	n.check(os.MkdirAll(dir, 0o755))
	group, err := os.Open(dir)
	n.check(err)
	defer group.Close()
	cmd := exec.Command("/proc/self/exe")
	cmd.Args = []string{"nfacctd", "nfacctd"}
	cmd.Env = []string{fmt.Sprintf("SOCKEYE_SLOT=%d", slot)}
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(group.Fd()), Unshareflags: unix.CLONE_NEWNS | unix.CLONE_NEWCGROUP,
		Credential: &syscall.Credential{Uid: memberUser, Gid: memberUser}}
	out, err := cmd.StdoutPipe()
	n.check(err)
	n.check(cmd.Start())
	n.t.Cleanup(func() { end(cmd) })
	if line, _ := bufio.NewReader(out).ReadString('\n'); line != "ready\n" {
		n.t.Fatalf("member: %s", line)
	}
	return cmd
}

func end(cmd *exec.Cmd) {
	cmd.Process.Kill()
	_ = cmd.Wait()
}

const devices = 16

// answer returns the process that answers a device, or "refused" or "silent".
func answer(network string, device int) string {
	address := fmt.Sprintf("127.0.0.%d", device)
	port, local := "1790", net.Addr(&net.TCPAddr{IP: net.ParseIP(address)})
	if network == "udp" {
		port, local = "4739", &net.UDPAddr{IP: net.ParseIP(address)}
	}
	dialer := net.Dialer{LocalAddr: local, Timeout: time.Second}
	dialer.SetMultipathTCP(false)
	conn, err := dialer.Dial(network, "127.0.0.1:"+port)
	if err == nil {
		defer conn.Close()
		_ = conn.SetDeadline(time.Now().Add(time.Second))
		if network == "udp" {
			_, err = conn.Write([]byte("?"))
		}
	}
	buffer := make([]byte, 64)
	count := 0
	if err == nil {
		count, err = conn.Read(buffer)
	}
	switch {
	case err == nil:
		return string(buffer[:count])
	case errors.Is(err, unix.ECONNREFUSED):
		return "refused"
	}
	return "silent"
}

// answers returns who answers each device, over TCP and over UDP.
func answers() (all []string) {
	for device := 1; device <= devices; device++ {
		for _, network := range []string{"tcp", "udp"} {
			all = append(all, answer(network, device))
		}
	}
	return all
}

// steered returns who has to answer each device, by the slots that the agent names.
func (n *node) steered(members [2]*exec.Cmd) (all []string) {
	n.t.Helper()
	for device := 1; device <= devices; device++ {
		where := ask[[]api.WhereStatus](n, "where", fmt.Sprintf("127.0.0.%d", device))
		pid := strconv.Itoa(members[where[0].Slot].Process.Pid)
		all = append(all, pid, pid)
	}
	return all
}

func (n *node) ready(members [2]*exec.Cmd) {
	n.t.Helper()
	n.eventually("the members are ready", func() bool {
		slots := ask[[]api.SlotStatus](n, "slots")
		return slots[0].Ready && slots[1].Ready && slots[0].PID == members[0].Process.Pid && slots[1].PID == members[1].Process.Pid
	})
}

// TestContainer runs the container of the DaemonSet by runc(8), with the capabilities, mounts and namespaces of the pod and
// containerd's system call filter. The agent steers members in containers of other pods, before and after a rolling
// update, and while there is no agent.
func TestContainer(t *testing.T) {
	for _, steering := range []string{"reuseport", "lookup"} {
		t.Run(steering, func(t *testing.T) { testContainer(t, steering) })
	}
}

func testContainer(t *testing.T, steering string) {
	example, err := os.ReadFile("../../deploy/examples/nfacctd/policy.yaml")
	if err != nil {
		t.Fatal(err)
	}
	policy := strings.NewReplacer("slots: 4", "slots: 2", "steering: lookup", "steering: "+steering, "/kubepods.slice", testenv.CgroupPath()+"/kubepods.slice").Replace(string(example))
	o := mustRender(t, map[string]any{"policy": policy})
	n := newNode(t, o.DaemonSet.Spec.Template.Spec)
	n.writeConfigMap(o.ConfigMap.Data)
	members := [2]*exec.Cmd{n.member(0), n.member(1)}
	n.start()
	n.ready(members)
	before := n.steered(members)
	if got := answers(); !slices.Equal(got, before) {
		t.Errorf("steered to %v, want %v", got, before)
	}
	n.checkPrivileges()
	status := ask[api.Status](n, "status")
	if s := status.Services[0]; !s.PortsSteered || len(s.Waiting)+len(s.Refused) > 0 || status.PolicyProblem != "" {
		t.Errorf("status %+v", status)
	}
	// Without a change of the pod. The agent attaches programs to a cgroup of a read-only mount.
	pods := testenv.CgroupPath() + "/kubepods.slice"
	o = mustRender(t, map[string]any{"policy": policy + fmt.Sprintf("tune: [{name: pods, cgroup: %s, set: {nodelay: true}}]\ntrace: [{cgroup: %[1]s, connections: 1/1, messages: 1/1}]\n", pods)})
	n.writeConfigMap(o.ConfigMap.Data)
	n.eventually("the new policy is in force", func() bool {
		status := ask[api.Status](n, "status")
		return len(status.Tune) == 1 && status.Tune[0].Attached &&
			len(status.Trace) == 1 && status.Trace[0].Attached && status.PolicyProblem == ""
	})

	// A rolling update: there is no agent for a moment, and the runtime has killed the keeper with the container.
	n.stop()
	if got := answers(); !slices.Equal(got, before) {
		t.Errorf("without an agent steered to %v, want %v", got, before)
	}
	refused := slices.Clone(before)
	for i, pid := range refused {
		if pid == strconv.Itoa(members[0].Process.Pid) {
			refused[i] = "refused"
		}
	}
	end(members[0])
	if got := answers(); !slices.Equal(got, refused) {
		t.Errorf("without an agent and a member steered to %v, want %v", got, refused)
	}
	members[0] = n.member(0)
	if got := answers(); !slices.Equal(got, refused) {
		t.Errorf("without an agent, with a new member, steered to %v, want %v", got, refused)
	}
	end(members[0])
	end(members[1])
	members = [2]*exec.Cmd{n.member(0), n.member(1)}
	if got := answers(); steering == "lookup" && slices.ContainsFunc(got, func(who string) bool { return who != "refused" }) {
		t.Errorf("without an agent, with new members, answered by %v, want none", got)
	} else if steering == "reuseport" && slices.Contains(got, "refused") {
		// The program was freed with the last socket of the ports: see "Updates" in the guide.
		t.Errorf("without an agent, with new members, answered by %v, want the kernel's choice", got)
	}
	n.start()
	n.ready(members)
	if got, want := answers(), n.steered(members); !slices.Equal(got, want) {
		t.Errorf("after the update steered to %v, want %v", got, want)
	}

	// What the guide says about removal.
	o = mustRender(t, map[string]any{"policy": "services: {}\n"})
	n.writeConfigMap(o.ConfigMap.Data)
	n.eventually("nothing is pinned", func() bool {
		pins, err := os.ReadDir("/sys/fs/bpf/sockeye")
		return err == nil && len(pins) == 1 && pins[0].Name() == "schema"
	})
	n.stop()
	for i, got := range answers() {
		if !slices.Contains([]string{strconv.Itoa(members[0].Process.Pid), strconv.Itoa(members[1].Process.Pid)}, got) {
			t.Errorf("after the removal request %d: %s answers, want a member", i, got)
		}
	}
	log, err := os.ReadFile(n.log.Name())
	n.check(err)
	for line := range strings.Lines(string(log)) {
		if strings.Contains(line, "level=WARN") || strings.Contains(line, "level=ERROR") {
			t.Error(line)
		}
	}
}

// TestExtraCapabilities applies a policy that needs more capabilities than the chart gives: the agent names the value of the
// chart, and with this value the policy is in force.
func TestExtraCapabilities(t *testing.T) {
	policy := fmt.Sprintf(`services:
  syslog:
    slots: 2
    user: "1000"
    listeners: [{protocol: udp, address: "[::]:514"}]
tune: [{name: new, cgroup: %s/new, set: {nodelay: true}}]
`, testenv.CgroupPath())
	run := func(t *testing.T, values map[string]any) api.Status {
		t.Helper()
		n := newNode(t, mustRender(t, values).DaemonSet.Spec.Template.Spec)
		n.writeConfigMap(map[string]string{"policy.yaml": policy})
		n.start()
		status := ask[api.Status](n, "status")
		n.writeConfigMap(map[string]string{"policy.yaml": "services: {}\n"}) // removes the cgroup
		n.eventually("nothing is left", func() bool {
			status := ask[api.Status](n, "status")
			return len(status.Services)+len(status.Tune) == 0
		})
		if _, err := os.Stat("/sys/fs/cgroup" + testenv.CgroupPath() + "/new"); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the cgroup is still there: %v", err)
		}
		return status
	}
	t.Run("without", func(t *testing.T) {
		status := run(t, nil)
		if s := status.Services[0]; s.PortsSteered || s.Hint != "add NET_BIND_SERVICE to extraCapabilities in the values of the chart" {
			t.Errorf("service %+v", s)
		}
		if s := status.Tune[0]; s.Attached || s.Hint != "add DAC_OVERRIDE to extraCapabilities in the values of the chart" {
			t.Errorf("tune %+v", s)
		}
	})
	t.Run("with", func(t *testing.T) {
		status := run(t, map[string]any{"extraCapabilities": []any{"NET_BIND_SERVICE", "DAC_OVERRIDE"}})
		if !status.Services[0].PortsSteered || !status.Tune[0].Attached {
			t.Errorf("status %+v", status)
		}
	})
}

// checkPrivileges checks what the kernel reports of the agent's process.
func (n *node) checkPrivileges() {
	n.t.Helper()
	out, err := n.runc("state", n.id()).Output()
	n.check(err)
	var state specs.State
	n.check(json.Unmarshal(out, &state))
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", state.Pid))
	n.check(err)
	var mask uint64
	for _, name := range n.pod.Containers[0].SecurityContext.Capabilities.Add {
		value, err := cap.FromName("cap_" + strings.ToLower(string(name)))
		n.check(err)
		mask |= 1 << value
	}
	for _, want := range []string{fmt.Sprintf("CapEff:\t%016x\n", mask), fmt.Sprintf("CapBnd:\t%016x\n", mask), "NoNewPrivs:\t1\n", "Seccomp:\t2\n"} {
		if !strings.Contains(string(text), want) {
			n.t.Errorf("the agent's process has no %q:\n%s", want, text)
		}
	}
}
