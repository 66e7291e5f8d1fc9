// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/config"
)

// ProbeCommand is the hidden command that makes the connections on which Probe
// tries the options. It calls ProbeConnections, and prints what that returns.
const ProbeCommand = "probe"

const (
	probePrefix  = "sockeye-probe-"
	probeTimeout = 10 * time.Second
	// enotsupp is no errno of user space; the kernel's bpf_setsockopt returns it.
	enotsupp = unix.Errno(524)
)

// Probe tries every option on the running kernel, by the program itself: in a
// cgroup of its own below the cgroup folder, on connections over loopback. The
// directory pins is in a bpffs; no two probes may use it at the same time. The
// error of an option wraps ebpf.ErrNotSupported if the kernel lacks it.
//
// A probe that is killed leaves at most its empty cgroup and pins, which the
// next one removes.
func Probe(folder, pins string) (_ map[string]error, err error) {
	removeStaleProbes(folder)
	cgroup := filepath.Join(folder, fmt.Sprintf("%s%d", probePrefix, os.Getpid()))
	// One that is there was left by a process that had the same number.
	if err := os.Mkdir(cgroup, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return nil, fmt.Errorf("create cgroup: %w", err)
	}
	defer func() {
		if failed := unix.Rmdir(cgroup); failed != nil {
			err = errors.Join(err, fmt.Errorf("remove cgroup %s: %w", cgroup, failed))
		}
	}()
	t, err := openProbe(filepath.Join(pins, bpf.TunePins+"probe"), cgroup)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, t.Close()) }()
	rules, err := Compile([]config.TuneRule{probeRule()}, nil, nil)
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
	if err := checkProbed(t, ipv6); err != nil {
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
			return nil, fmt.Errorf("read failures: option %d is not known", f.Option)
		}
		name := options[f.Option].Name
		result[name] = probeError(name, unix.Errno(f.Error))
	}
	return result, nil
}

// openProbe opens a tuning that ends with this process: its pins go at once.
func openProbe(dir, cgroup string) (*bpf.Tune, error) {
	if err := bpf.RemoveTune(dir); err != nil {
		return nil, err
	}
	t, err := bpf.OpenTune(bpf.TuneConfig{Dir: dir, Cgroup: cgroup})
	if err != nil {
		return nil, errors.Join(err, bpf.RemoveTune(dir))
	}
	if err := t.Unpin(); err != nil {
		return nil, errors.Join(err, t.Close())
	}
	return t, nil
}

// probeError is why an option could not be set. Its value is one that every
// kernel takes that knows the option.
func probeError(option string, errno unix.Errno) error {
	switch errno {
	case unix.ENOPROTOOPT, unix.EINVAL, unix.EOPNOTSUPP, enotsupp:
		return fmt.Errorf("set %s: %w: %w", option, ebpf.ErrNotSupported, errno)
	}
	return fmt.Errorf("set %s: %w", option, errno)
}

// checkProbed fails unless the program has seen both ends of the connections:
// nothing fails that is not tried.
func checkProbed(t *bpf.Tune, ipv6 bool) error {
	rules, err := t.Rules()
	if err != nil {
		return err
	}
	var established uint64
	for id := range rules {
		s, err := t.Stats(id, int(bpf.TuneArmTreated))
		if err != nil {
			return err
		}
		established += s.Established
	}
	want := uint64(2)
	if ipv6 {
		want = 4
	}
	if established < want {
		return fmt.Errorf("try options: the program has seen %d ends of connections, of %d", established, want)
	}
	return nil
}

// removeStaleProbes removes what probes that were killed left behind.
func removeStaleProbes(folder string) {
	left, err := os.ReadDir(folder)
	if err != nil {
		return
	}
	for _, e := range left {
		owner, ok := strings.CutPrefix(e.Name(), probePrefix)
		if !ok {
			continue
		}
		if _, err := os.Stat(filepath.Join("/proc", owner)); errors.Is(err, os.ErrNotExist) {
			// One whose command is still ending is left to the next probe.
			_ = unix.Rmdir(filepath.Join(folder, e.Name()))
		}
	}
}

// probeRule sets everything, to the largest values, which bound least. A mark or
// an interface could lead elsewhere.
func probeRule() config.TuneRule {
	rule := config.TuneRule{Name: "probe", Observe: config.ObserveOff}
	for _, o := range config.TuneOptions {
		s := config.Setting{Option: o.Name, Value: o.Max}
		switch {
		case o.Name == "congestion":
			s.Text = "reno" // built into every kernel
		case o.Name == "mark", o.Name == "bind_ifindex":
			s.Value = 0
		case o.Kind == config.KindSwitch:
			s.Value = 1
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
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(dir.Fd()), Pdeathsig: unix.SIGKILL}
	// It is the end of the thread that ends the command.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	output, err := cmd.CombinedOutput()
	if ctx.Err() != nil {
		err = ctx.Err()
	}
	if err != nil {
		return false, fmt.Errorf("make connections to try options on: %w: %s", err, strings.TrimSpace(string(output)))
	}
	return strings.Contains(string(output), "ipv6"), nil
}

// ProbeConnections makes a connection over loopback with each family, and
// returns those that worked. Without IPv4 it fails.
func ProbeConnections() (families []string, err error) {
	loopback := netip.MustParseAddr("127.0.0.1")
	if err := probeConnection(unix.AF_INET, loopback); err != nil {
		return nil, err
	}
	err = probeConnection(unix.AF_INET6, netip.IPv6Loopback())
	if err != nil {
		// A host may have the sockets, but no address.
		err = probeConnection(unix.AF_INET6, netip.AddrFrom16(loopback.As16()))
	}
	if err != nil {
		return []string{"ipv4"}, nil
	}
	return []string{"ipv4", "ipv6"}, nil
}

func probeConnection(domain int, addr netip.Addr) error {
	l, err := probeSocket(domain)
	if err != nil {
		return err
	}
	defer unix.Close(l)
	if err := unix.Bind(l, probeAddress(addr)); err != nil {
		return fmt.Errorf("bind to %s: %w", addr, err)
	}
	if err := unix.Listen(l, 1); err != nil {
		return fmt.Errorf("listen on %s: %w", addr, err)
	}
	at, err := unix.Getsockname(l)
	if err != nil {
		return fmt.Errorf("read address of listener: %w", err)
	}
	c, err := probeSocket(domain)
	if err != nil {
		return err
	}
	defer unix.Close(c)
	// What a signal interrupts goes on, and is accepted when it is done.
	if err := unix.Connect(c, at); err != nil && !errors.Is(err, unix.EINTR) {
		return fmt.Errorf("connect to %s: %w", addr, err)
	}
	a, _, err := unix.Accept4(l, unix.SOCK_CLOEXEC)
	for errors.Is(err, unix.EINTR) {
		a, _, err = unix.Accept4(l, unix.SOCK_CLOEXEC)
	}
	if err != nil {
		return fmt.Errorf("accept on %s: %w", addr, err)
	}
	return unix.Close(a)
}

// probeSocket makes a TCP socket that waits for a while only.
func probeSocket(domain int) (int, error) {
	fd, err := unix.Socket(domain, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
	if err != nil {
		return -1, fmt.Errorf("create socket: %w", err)
	}
	wait := unix.NsecToTimeval((probeTimeout / 4).Nanoseconds())
	for _, name := range []int{unix.SO_RCVTIMEO, unix.SO_SNDTIMEO} {
		if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, name, &wait); err != nil {
			unix.Close(fd)
			return -1, fmt.Errorf("bound waiting: %w", err)
		}
	}
	return fd, nil
}

// probeAddress is an address, with any port.
func probeAddress(addr netip.Addr) unix.Sockaddr {
	if addr.Is4() {
		return &unix.SockaddrInet4{Addr: addr.As4()}
	}
	return &unix.SockaddrInet6{Addr: addr.As16()}
}
