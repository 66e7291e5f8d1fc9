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

	"sockeye/internal/config"
	"sockeye/internal/testenv"
	"sockeye/internal/tune"
)

// probeRole has a process probe all the time, in the folders that it names.
const probeRole = "TUNE_TEST_PROBE"

// init plays the parts that are processes of their own. A probe starts this
// program as itself, with nothing but the name of the command.
func init() {
	if folders := os.Getenv(probeRole); folders != "" {
		mount, pins, _ := strings.Cut(folders, " ")
		for {
			if _, err := tune.Probe(mount, pins); err != nil {
				fmt.Fprintln(os.Stderr, err)
				os.Exit(1)
			}
		}
	}
	if len(os.Args) < 2 || os.Args[1] != tune.ProbeCommand {
		return
	}
	families, err := tune.ProbeConnections()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println(families)
	os.Exit(0)
}

// probeFolders are a cgroup and a directory in a bpffs.
func probeFolders(t testing.TB) (mount, pins string) {
	t.Helper()
	mount = filepath.Join(testenv.Cgroup(), "probes")
	if err := os.Mkdir(mount, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Rmdir(mount); err != nil {
			t.Error(err)
		}
	})
	return mount, testenv.BPFFS(t)
}

// leftovers are cgroups below a folder, and pins.
func leftovers(t testing.TB, mount, pins string) (left []string) {
	t.Helper()
	for _, folder := range []string{mount, pins} {
		entries, err := os.ReadDir(folder)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			if e.IsDir() {
				left = append(left, filepath.Join(folder, e.Name()))
			}
		}
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

// TestProbe compares the answers with what setting each option says, which has
// a rule and ports of its own.
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

// TestProbeWithoutSysAdmin has the capabilities alone that an agent keeps.
func TestProbeWithoutSysAdmin(t *testing.T) {
	mount, pins := probeFolders(t)
	err := testenv.OnThread(func() error {
		header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var caps [2]unix.CapUserData
		for _, c := range []int{unix.CAP_BPF, unix.CAP_NET_ADMIN, unix.CAP_PERFMON} {
			caps[c/32].Permitted |= 1 << (c % 32)
			caps[c/32].Effective |= 1 << (c % 32)
		}
		if err := unix.Capset(&header, &caps[0]); err != nil {
			return os.NewSyscallError("capset", err)
		}
		expectProbed(t, mount, pins)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
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
	mount, pins := probeFolders(t)
	plain := t.TempDir()
	for name, folders := range map[string][2]string{
		"no cgroup":          {filepath.Join(mount, "nonesuch"), pins},
		"not a cgroup":       {plain, pins},
		"not a bpffs":        {mount, plain},
		"pins below a file":  {mount, filepath.Join(mount, "cgroup.procs")},
		"cgroup of the host": {filepath.Join(mount, "cgroup.procs"), pins},
	} {
		if probed, err := tune.Probe(folders[0], folders[1]); err == nil {
			t.Errorf("%s: probed %v", name, probed)
		} else if strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: error of several lines: %v", name, err)
		}
		if left := leftovers(t, mount, pins); len(left) > 0 {
			t.Errorf("%s: left behind: %v", name, left)
		}
	}
	if left := leftovers(t, plain, plain); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
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

// TestProbeWithoutIPv6Address still has sockets of IPv6.
func TestProbeWithoutIPv6Address(t *testing.T) {
	mount, pins := probeFolders(t)
	sysctl(t, "net/ipv6/conf/lo/disable_ipv6", "1")
	expectProbed(t, mount, pins)
}

// TestProbeKilled kills probes at different moments: what they leave is gone
// after the next one, and what is another's stays.
func TestProbeKilled(t *testing.T) {
	mount, pins := probeFolders(t)
	for _, after := range []time.Duration{20, 100, 300, 700} {
		cmd := exec.Command("/proc/self/exe")
		cmd.Env = append(os.Environ(), probeRole+"="+mount+" "+pins)
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
		left := leftovers(t, mount, pins)
		t.Logf("killed after %dms: left %v", after, left)
	}
	theirs := filepath.Join(mount, "sockeye-probe-1")
	if err := os.Mkdir(theirs, 0o755); err != nil {
		t.Fatal(err)
	}
	within(t, "the end of the last command", func() bool {
		groups, err := filepath.Glob(filepath.Join(mount, "*/cgroup.procs"))
		check(t, err)
		for _, path := range groups {
			procs, err := os.ReadFile(path)
			check(t, err)
			if len(procs) > 0 {
				return false
			}
		}
		return true
	})
	// The first one may find that the kernel is not done with it yet.
	for range 2 {
		if _, err := tune.Probe(mount, pins); err != nil {
			t.Fatal(err)
		}
	}
	if left := leftovers(t, mount, pins); len(left) != 1 || left[0] != theirs {
		t.Errorf("left behind: %v, want the one of process 1 alone", left)
	}
	if err := unix.Rmdir(theirs); err != nil {
		t.Error(err)
	}
}
