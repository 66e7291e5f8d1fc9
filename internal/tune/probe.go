// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/config"
)

// ProbeCommand is the hidden command that makes the connections on which Probe
// tries the options. It calls ProbeConnections.
const ProbeCommand = "probe"

const (
	probePrefix  = "sockeye-probe-"
	probeTimeout = 10 * time.Second
)

// Probe tries every option on the running kernel, by the program itself: in a
// cgroup of its own below the cgroup v2 mount, on connections over loopback. Its
// pins are in a folder of the directory pins, which is in a bpffs, for that time
// only. The error of an option wraps ebpf.ErrNotSupported if the kernel lacks it.
func Probe(mount, pins string) (_ map[string]error, err error) {
	removeStaleProbes(mount)
	name := fmt.Sprintf("%s%d", probePrefix, os.Getpid())
	cgroup := filepath.Join(mount, name)
	if err := os.Mkdir(cgroup, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return nil, fmt.Errorf("create cgroup: %w", err)
	}
	defer func() {
		if failed := os.Remove(cgroup); failed != nil && err == nil {
			err = fmt.Errorf("remove cgroup: %w", failed)
		}
	}()
	dir := filepath.Join(pins, bpf.TunePins+"probe")
	if err := bpf.RemoveTune(dir); err != nil {
		return nil, err
	}
	t, err := bpf.OpenTune(bpf.TuneConfig{Dir: dir, Cgroup: cgroup})
	if err != nil {
		return nil, err
	}
	defer func() {
		err = errors.Join(err, bpf.RemoveTune(dir), t.Close())
	}()
	rule := probeRule()
	rules, err := Compile([]config.TuneRule{rule}, nil, nil)
	if err != nil {
		return nil, err
	}
	if err := t.Install(rules); err != nil {
		return nil, err
	}
	ipv6, err := runProbe(cgroup)
	if err != nil {
		return nil, err
	}
	failures, err := t.Failures()
	if err != nil {
		return nil, err
	}
	result := make(map[string]error)
	options := AllOptions()
	for _, o := range options {
		result[o.Name] = nil
		if o.Phases&bpf.TunePhaseIPv6 != 0 && !ipv6 {
			result[o.Name] = fmt.Errorf("set %s: there is no IPv6: %w", o.Name, ebpf.ErrNotSupported)
		}
	}
	for f := range failures {
		if int(f.Option) >= len(options) {
			continue
		}
		errno := unix.Errno(f.Error)
		err := fmt.Errorf("set %s: %w", options[f.Option].Name, errno)
		if errno == unix.ENOPROTOOPT || errno == unix.EINVAL || errno == unix.EOPNOTSUPP {
			err = fmt.Errorf("%w: %w", ebpf.ErrNotSupported, err)
		}
		result[options[f.Option].Name] = err
	}
	return result, nil
}

// removeStaleProbes removes what probes that were killed left behind.
func removeStaleProbes(mount string) {
	left, err := filepath.Glob(filepath.Join(mount, probePrefix+"*"))
	if err != nil {
		return
	}
	for _, dir := range left {
		owner := strings.TrimPrefix(filepath.Base(dir), probePrefix)
		if _, err := os.Stat(filepath.Join("/proc", owner)); errors.Is(err, os.ErrNotExist) {
			// A probe that is still ending removes it itself.
			_ = os.Remove(dir)
		}
	}
}

// probeRule sets everything, to values that every kernel takes that knows the
// option.
func probeRule() config.TuneRule {
	rule := config.TuneRule{Name: "probe", Observe: config.ObserveOff}
	for _, o := range config.TuneOptions {
		s := config.Setting{Option: o.Name, Value: o.Min}
		switch o.Name {
		case "congestion":
			s.Text = "reno" // built into every kernel
		case "mss", "cwnd_clamp", "notsent_lowat":
			s.Value = 1000
		case "window_clamp":
			s.Value = 1 << 16
		case "flow_label":
			s.Value = 1
		case "delack_max", "rto_min":
			s.Value = o.Max
		}
		rule.Set = append(rule.Set, s)
	}
	return rule
}

// runProbe makes connections from inside a cgroup.
func runProbe(cgroup string) (ipv6 bool, err error) {
	dir, err := os.Open(cgroup)
	if err != nil {
		return false, fmt.Errorf("open cgroup: %w", err)
	}
	defer dir.Close()
	ctx, cancel := context.WithTimeout(context.Background(), probeTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, "/proc/self/exe", ProbeCommand)
	cmd.Args[0] = "sockeye"
	cmd.Dir = "/"
	cmd.Env = []string{"GOMAXPROCS=1"}
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(dir.Fd())}
	output, err := cmd.CombinedOutput()
	if err != nil {
		return false, fmt.Errorf("make connections to try options on: %w: %s", err, strings.TrimSpace(string(output)))
	}
	return strings.Contains(string(output), "ipv6"), nil
}

// ProbeConnections makes a connection over loopback with each family, and
// returns those that worked. Without IPv4 it fails.
func ProbeConnections() (families []string, err error) {
	for _, f := range []struct{ name, address string }{{"ipv4", "127.0.0.1:0"}, {"ipv6", "[::1]:0"}} {
		err := probeConnection(f.address)
		if err == nil {
			families = append(families, f.name)
		} else if f.name == "ipv4" {
			return nil, err
		}
	}
	return families, nil
}

func probeConnection(address string) error {
	ctx, cancel := context.WithTimeout(context.Background(), probeTimeout/4)
	defer cancel()
	var listen net.ListenConfig
	listen.SetMultipathTCP(false)
	l, err := listen.Listen(ctx, "tcp", address)
	if err != nil {
		return err
	}
	defer l.Close()
	var d net.Dialer
	d.SetMultipathTCP(false)
	c, err := d.DialContext(ctx, "tcp", l.Addr().String())
	if err != nil {
		return err
	}
	defer c.Close()
	a, err := l.Accept()
	if err != nil {
		return err
	}
	return a.Close()
}
