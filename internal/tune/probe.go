// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/config"
	"sockeye/internal/sockaddr"
)

// enotsupp is ENOTSUPP, a kernel-internal errno that bpf_setsockopt returns.
const enotsupp = unix.Errno(524)

// probeWait is the timeout of each call on a probe's sockets.
const probeWait = 2500 * time.Millisecond

// Probe tries every option on the running kernel: the program sets the options on loopback connections of this process.
// cgroup is the directory of the cgroup of this process. During the probe, the program is attached to it with a rule
// that only matches the ports of the probe. Probe writes nothing to the cgroup file system. The directory pins is in a
// bpffs and must not be used by two probes at the same time. The error of an option wraps ebpf.ErrNotSupported if the
// kernel does not support the option.
//
// A probe that is killed leaves only its pins, which the next probe removes.
func Probe(cgroup, pins string) (_ map[string]error, err error) {
	t, err := openProbe(filepath.Join(pins, bpf.TunePins+"probe"), cgroup)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, t.Close()) }()
	listeners, err := probeListeners()
	if err != nil {
		return nil, err
	}
	defer func() {
		for _, l := range listeners {
			unix.Close(l.fd)
		}
	}()
	rules, err := Compile([]config.TuneRule{probeRule(listeners)}, nil, nil)
	if err != nil {
		return nil, err
	}
	if err := t.Install(rules); err != nil {
		return nil, err
	}
	ipv6 := false
	for _, l := range listeners {
		if err := l.connect(); err != nil {
			return nil, fmt.Errorf("open connections for the probe: %w", err)
		}
		ipv6 = ipv6 || l.domain == unix.AF_INET6
	}
	if err := checkProbed(t, len(listeners)); err != nil {
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

// openProbe opens a tuning and removes its pins immediately, so that it is detached when this process exits.
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

// probeError returns why an option could not be set. The probe uses a value that every kernel with the option
// accepts.
func probeError(option string, errno unix.Errno) error {
	switch errno {
	case unix.ENOPROTOOPT, unix.EINVAL, unix.EOPNOTSUPP, enotsupp:
		return fmt.Errorf("set %s: %w: %w", option, ebpf.ErrNotSupported, errno)
	}
	return fmt.Errorf("set %s: %w", option, errno)
}

// checkProbed returns an error unless the program has seen both ends of the connections, because untried options
// report no failure.
func checkProbed(t *bpf.Tune, connections int) error {
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
	if want := uint64(2 * connections); established < want {
		return fmt.Errorf("probe options: the program has seen %d of %d ends of connections", established, want)
	}
	return nil
}

// probeRule sets every option to its largest value, which limits least, except for the mark and the interface, which
// could change the route. The rule matches the connections of the probe only, because the cgroup has others.
func probeRule(listeners []*probeListener) config.TuneRule {
	rule := config.TuneRule{Name: "probe", Observe: config.ObserveOff}
	for _, l := range listeners {
		port := l.at.Port()
		rule.Match.Ports = append(rule.Match.Ports, config.PortRange{First: port, Last: port})
		addr := l.at.Addr().Unmap()
		rule.Match.Local = append(rule.Match.Local, config.PrefixTerm{Prefix: netip.PrefixFrom(addr, addr.BitLen())})
	}
	for _, o := range config.TuneOptions {
		s := config.Setting{Option: o.Name, Value: o.Max}
		switch {
		case o.Name == "congestion":
			s.Text = "reno" // always built in
		case o.Name == "mark", o.Name == "bind_ifindex":
			s.Value = 0
		case o.Kind == config.KindSwitch:
			s.Value = 1
		}
		rule.Set = append(rule.Set, s)
	}
	return rule
}

// probeListener is a listening TCP socket on loopback.
type probeListener struct {
	fd     int
	domain int
	at     netip.AddrPort
}

// probeListeners listens on loopback with each address family of the host. It returns an error without IPv4.
func probeListeners() ([]*probeListener, error) {
	loopback := netip.MustParseAddr("127.0.0.1")
	v4, err := listenProbe(unix.AF_INET, loopback)
	if err != nil {
		return nil, err
	}
	v6, err := listenProbe(unix.AF_INET6, netip.IPv6Loopback())
	if err != nil {
		// The host may support IPv6 sockets and have no IPv6 loopback address.
		v6, err = listenProbe(unix.AF_INET6, netip.AddrFrom16(loopback.As16()))
	}
	if err != nil {
		return []*probeListener{v4}, nil
	}
	return []*probeListener{v4, v6}, nil
}

func listenProbe(domain int, addr netip.Addr) (_ *probeListener, err error) {
	fd, err := probeSocket(domain)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			unix.Close(fd)
		}
	}()
	if err := unix.Bind(fd, sockaddr.Of(netip.AddrPortFrom(addr, 0))); err != nil {
		return nil, fmt.Errorf("bind to %s: %w", addr, err)
	}
	if err := unix.Listen(fd, 1); err != nil {
		return nil, fmt.Errorf("listen on %s: %w", addr, err)
	}
	at, err := unix.Getsockname(fd)
	if err != nil {
		return nil, fmt.Errorf("read address of listener: %w", err)
	}
	return &probeListener{fd, domain, netip.AddrPortFrom(addr, sockaddr.AddrPort(at).Port())}, nil
}

// connect connects to the listener and closes both ends.
func (l *probeListener) connect() error {
	c, err := probeSocket(l.domain)
	if err != nil {
		return err
	}
	defer unix.Close(c)
	// An interrupted connect continues and can be accepted.
	if err := unix.Connect(c, sockaddr.Of(l.at)); err != nil && !errors.Is(err, unix.EINTR) {
		return fmt.Errorf("connect to %s: %w", l.at, err)
	}
	a, _, err := unix.Accept4(l.fd, unix.SOCK_CLOEXEC)
	for errors.Is(err, unix.EINTR) {
		a, _, err = unix.Accept4(l.fd, unix.SOCK_CLOEXEC)
	}
	if err != nil {
		return fmt.Errorf("accept on %s: %w", l.at, err)
	}
	return unix.Close(a)
}

// probeSocket returns a TCP socket with timeouts.
func probeSocket(domain int) (int, error) {
	fd, err := unix.Socket(domain, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
	if err != nil {
		return -1, fmt.Errorf("create socket: %w", err)
	}
	wait := unix.NsecToTimeval(probeWait.Nanoseconds())
	for _, name := range []int{unix.SO_RCVTIMEO, unix.SO_SNDTIMEO} {
		if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, name, &wait); err != nil {
			unix.Close(fd)
			return -1, fmt.Errorf("bound waiting: %w", err)
		}
	}
	return fd, nil
}
