// SPDX-License-Identifier: Apache-2.0

package tune_test

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/config"
	"sockeye/internal/netns"
	"sockeye/internal/sockaddr"
	"sockeye/internal/testenv"
	"sockeye/internal/tune"
)

// probeRole makes the test binary a process that probes all the time, in the directories that it names.
const probeRole = "TUNE_TEST_PROBE"

// init runs the role of a separate process.
func init() {
	if folders := os.Getenv(probeRole); folders != "" {
		cgroup, pins, _ := strings.Cut(folders, " ")
		for {
			if _, err := tune.Probe(cgroup, pins); err != nil {
				fmt.Fprintln(os.Stderr, err)
				os.Exit(1)
			}
		}
	}
}

// probeFolders are the cgroup of this process and a directory in a bpffs.
func probeFolders(t testing.TB) (cgroup, pins string) {
	t.Helper()
	return testenv.Cgroup(), testenv.BPFFS(t)
}

// leftovers returns pins, and programs attached to a cgroup.
func leftovers(t testing.TB, cgroup, pins string) (left []string) {
	t.Helper()
	entries, err := os.ReadDir(pins)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if e.IsDir() {
			left = append(left, filepath.Join(pins, e.Name()))
		}
	}
	ids, err := bpf.SockOps(cgroup)
	if err != nil {
		t.Fatal(err)
	}
	for _, id := range ids {
		left = append(left, fmt.Sprintf("program %d", id))
	}
	return left
}

func expectProbed(t testing.TB, mount, pins string) {
	t.Helper()
	probed, err := tune.Probe(mount, pins)
	if err != nil {
		t.Fatalf("%+v", err)
	}
	for _, o := range config.TuneOptions {
		err, ok := probed[o.Name]
		if !ok {
			t.Errorf("%s: no answer", o.Name)
		}
		if err != nil && !errors.Is(err, ebpf.ErrNotSupported) {
			t.Errorf("%s: %v", o.Name, err)
		}
		if err == nil {
			continue
		}
		t.Logf("%s: %v", o.Name, err)
		if known, _ := tune.FindOption(o.Name); !olderThan(t, known.Since) {
			t.Errorf("%s is not supported, on a kernel that is not older than %s", o.Name, known.Since)
		}
	}
	if len(probed) != len(config.TuneOptions) {
		t.Errorf("%d answers, want %d", len(probed), len(config.TuneOptions))
	}
	if left := leftovers(t, mount, pins); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

// TestProbe compares the results with the effect of setting each option by a rule for a port of its own.
func TestProbe(t *testing.T) {
	mount, pins := probeFolders(t)
	expectProbed(t, mount, pins)
	probed, err := tune.Probe(mount, pins)
	if err != nil {
		t.Fatal(err)
	}
	k := newTuning(t, "")
	networks := newNetworks(t)
	listeners, taken := make(map[netip.AddrPort]int), make(map[uint16]bool)
	var rules []config.TuneRule
	for _, o := range config.TuneOptions {
		setting := config.Setting{Option: o.Name, Value: o.Max, Text: "reno"}
		if o.Name == "bind_ifindex" {
			setting.Value = 0
		}
		rule := config.TuneRule{Name: o.Name, Set: []config.Setting{setting}}
		for _, n := range networks {
			fd, at := listenSocket(t, n.domain, n.addr)
			for taken[at.Port()] {
				fd, at = listenSocket(t, n.domain, n.addr)
			}
			listeners[at], taken[at.Port()] = fd, true
			rule.Match.Ports = append(rule.Match.Ports, config.PortRange{First: at.Port(), Last: at.Port()})
		}
		rules = append(rules, rule)
	}
	k.installRules(rules...)
	for at, fd := range listeners {
		connectSockets(t, fd, at)
	}
	refused := make(map[string]bool)
	for failure := range k.failed() {
		rule, _, _ := strings.Cut(failure, "/")
		refused[rule] = true
	}
	for _, o := range config.TuneOptions {
		if k.stats(o.Name, 0).Established != 4 {
			t.Errorf("%s: the rule has %d ends of connections, want 4", o.Name, k.stats(o.Name, 0).Established)
		}
		if refused[o.Name] != (probed[o.Name] != nil) {
			t.Errorf("%s: probed %v, but refused when set: %v", o.Name, probed[o.Name], refused[o.Name])
		}
	}
}

// TestProbeWithoutSysAdmin probes with the capabilities that an agent keeps.
func TestProbeWithoutSysAdmin(t *testing.T) {
	mount, pins := probeFolders(t)
	testenv.WithRights(t, []int{unix.CAP_BPF, unix.CAP_NET_ADMIN, unix.CAP_PERFMON}, func() {
		expectProbed(t, mount, pins)
	})
}

func TestProbeWithoutRights(t *testing.T) {
	mount, pins := probeFolders(t)
	testenv.WithoutRights(t, func() {
		if probed, err := tune.Probe(mount, pins); err == nil {
			t.Errorf("probed %v", probed)
		}
	})
	if left := leftovers(t, mount, pins); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

func setLo(t testing.TB, up bool) {
	t.Helper()
	lo, err := netlink.LinkByName("lo")
	if err == nil && up {
		err = netlink.LinkSetUp(lo)
	} else if err == nil {
		err = netlink.LinkSetDown(lo)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func TestProbeFails(t *testing.T) {
	cgroup, pins := probeFolders(t)
	plain := t.TempDir()
	other := filepath.Join(cgroup, "other")
	if err := os.Mkdir(other, 0o755); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Rmdir(other); err != nil {
			t.Error(err)
		}
	}()
	for name, folders := range map[string][2]string{
		"no cgroup":            {filepath.Join(cgroup, "nonesuch"), pins},
		"not a cgroup":         {plain, pins},
		"cgroup of others":     {other, pins},
		"not a bpffs":          {cgroup, plain},
		"pins below a file":    {cgroup, filepath.Join(cgroup, "cgroup.procs")},
		"a file, not a cgroup": {filepath.Join(cgroup, "cgroup.procs"), pins},
	} {
		if probed, err := tune.Probe(folders[0], folders[1]); err == nil {
			t.Errorf("%s: probed %v", name, probed)
		} else if strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: error of several lines: %v", name, err)
		}
		if left := leftovers(t, cgroup, pins); len(left) > 0 {
			t.Errorf("%s: left behind: %v", name, left)
		}
	}
	if entries, err := os.ReadDir(plain); err != nil || len(entries) > 0 {
		t.Errorf("left behind: %v, %v", entries, err)
	}
}

// TestProbeReadOnlyCgroups probes with a read-only cgroup file system, as with ProtectControlGroups= of systemd,
// where no process can be started in a cgroup.
func TestProbeReadOnlyCgroups(t *testing.T) {
	cgroup, pins := probeFolders(t)
	err := netns.Thread(func() error {
		// The mounts belong to the thread, and are undone when it exits.
		if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
			return os.NewSyscallError("unshare", err)
		}
		mount := filepath.Dir(cgroup)
		if err := unix.Mount(mount, mount, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
			return os.NewSyscallError("mount", err)
		}
		if err := unix.Mount("", mount, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, ""); err != nil {
			return os.NewSyscallError("remount", err)
		}
		if err := os.Mkdir(filepath.Join(cgroup, "written"), 0o755); !errors.Is(err, unix.EROFS) {
			return fmt.Errorf("the cgroup file system is not read-only: %w", err)
		}
		expectProbed(t, cgroup, pins)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestProbeLeavesOthersAlone opens connections in the same cgroup during probes: none gets an option of the probe.
func TestProbeLeavesOthersAlone(t *testing.T) {
	cgroup, pins := probeFolders(t)
	n := newNetworks(t)[0]
	fd, at := listenSocket(t, n.domain, n.addr)
	before := make([]byte, 0, 64)
	done, stopped := make(chan struct{}), make(chan error, 1)
	go func() {
		for {
			select {
			case <-done:
				stopped <- nil
				return
			default:
			}
			client, server, err := pairOf(fd, n.domain, at)
			if err != nil {
				stopped <- err
				return
			}
			for _, end := range []int{client, server} {
				congestion, err := unix.GetsockoptString(end, unix.IPPROTO_TCP, unix.TCP_CONGESTION)
				priority, failed := unix.GetsockoptInt(end, unix.SOL_SOCKET, unix.SO_PRIORITY)
				idle, last := unix.GetsockoptInt(end, unix.IPPROTO_TCP, unix.TCP_KEEPIDLE)
				got := fmt.Sprint(congestion, priority, idle, errors.Join(err, failed, last))
				if len(before) == 0 {
					before = append(before, got...)
				}
				if got != string(before) {
					stopped <- fmt.Errorf("a connection of others has %s, before the probe %s", got, before)
					unix.Close(client)
					unix.Close(server)
					return
				}
			}
			unix.Close(client)
			unix.Close(server)
		}
	}()
	for range 5 {
		expectProbed(t, cgroup, pins)
	}
	close(done)
	if err := <-stopped; err != nil {
		t.Error(err)
	}
}

// pairOf connects to a listener.
func pairOf(listener, domain int, at netip.AddrPort) (client, server int, err error) {
	client, err = unix.Socket(domain, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
	if err != nil {
		return -1, -1, err
	}
	if err := unix.Connect(client, sockaddr.Of(at)); err != nil {
		unix.Close(client)
		return -1, -1, err
	}
	server, _, err = unix.Accept4(listener, unix.SOCK_CLOEXEC)
	if err != nil {
		unix.Close(client)
		return -1, -1, err
	}
	return client, server, nil
}

// TestProbeConnectionsFail turns loopback off.
func TestProbeConnectionsFail(t *testing.T) {
	mount, pins := probeFolders(t)
	setLo(t, false)
	defer setLo(t, true)
	if probed, err := tune.Probe(mount, pins); err == nil || !strings.Contains(err.Error(), "127.0.0.1") {
		t.Errorf("probed %v: %v", probed, err)
	}
	if left := leftovers(t, mount, pins); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

// TestProbeWithoutIPv6Address probes IPv6 sockets without an IPv6 address.
func TestProbeWithoutIPv6Address(t *testing.T) {
	mount, pins := probeFolders(t)
	sysctl(t, "net/ipv6/conf/lo/disable_ipv6", "1")
	expectProbed(t, mount, pins)
}

// TestProbeKilled kills probes at different moments: the next probe removes what they left.
func TestProbeKilled(t *testing.T) {
	cgroup, pins := probeFolders(t)
	for _, after := range []time.Duration{20, 100, 300, 700} {
		cmd := exec.Command("/proc/self/exe")
		cmd.Env = append(os.Environ(), probeRole+"="+cgroup+" "+pins)
		var errs bytes.Buffer
		cmd.Stderr = &errs
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		time.AfterFunc(after*time.Millisecond, func() { cmd.Process.Kill() })
		_ = cmd.Wait() // of the kill
		if errs.Len() > 0 {
			t.Error(errs.String())
		}
		left := leftovers(t, cgroup, pins)
		t.Logf("killed after %dms: left %v", after, left)
	}
	if _, err := tune.Probe(cgroup, pins); err != nil {
		t.Fatal(err)
	}
	// The kernel frees the resources of a process some time after its exit.
	testenv.Within(t, "the end of what was left", func() bool { return len(leftovers(t, cgroup, pins)) == 0 })
}
