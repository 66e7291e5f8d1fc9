// SPDX-License-Identifier: Apache-2.0

package tune_test

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/config"
	"sockeye/internal/linux"
	"sockeye/internal/procsock"
	"sockeye/internal/sockaddr"
	"sockeye/internal/testenv"
	"sockeye/internal/tune"
)

// tuning is the tuning of the tests' own cgroup.
type tuning struct {
	*bpf.Tune
	t     testing.TB
	rules []config.TuneRule
	// unseen: Apply has reported that connections cannot be counted.
	unseen bool
}

// newTuning starts tuning with the rules of a policy, or without rules for "".
func newTuning(t testing.TB, policy string) *tuning {
	t.Helper()
	dir := filepath.Join(testenv.BPFFS(t), "tune_test")
	b, err := bpf.OpenTune(bpf.TuneConfig{Dir: dir, Cgroup: testenv.Cgroup()})
	if err != nil {
		t.Fatalf("%+v", err)
	}
	t.Cleanup(func() {
		if err := bpf.RemoveTune(dir); err != nil {
			t.Error(err)
		}
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	})
	k := &tuning{Tune: b, t: t}
	if policy != "" {
		k.install(policy)
	}
	return k
}

// install applies the rules of a policy; CGROUP stands for the tests' cgroup.
func (k *tuning) install(policy string) {
	k.t.Helper()
	p := parse(k.t, policy)
	rules, err := tune.Compile(p.Tune, p.Services, nil)
	if err != nil {
		k.t.Fatal(err)
	}
	if err := k.Install(rules); err != nil {
		k.t.Fatal(err)
	}
	k.rules = p.Tune
}

func parse(t testing.TB, policy string) *config.Policy {
	t.Helper()
	p, err := config.Parse([]byte(strings.ReplaceAll(policy, "CGROUP", testenv.CgroupPath())), "policy.yaml")
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// oneRule returns a policy with a rule r that applies set to all connections.
func oneRule(set string) string {
	return "tune: [{name: r, cgroup: CGROUP, set: {" + set + "}}]\n"
}

// id returns the number of an installed rule by its name.
func (k *tuning) id(name string) uint32 {
	k.t.Helper()
	rules, err := k.Rules()
	if err != nil {
		k.t.Fatal(err)
	}
	for id, r := range rules {
		if bpf.Text(r.Name[:]) == name && r.Retired == 0 {
			return id
		}
	}
	k.t.Fatalf("no rule %s", name)
	return 0
}

// stats returns the sum of both arms of a rule.
func (k *tuning) stats(name string, arm int) *bpf.TuneStats {
	k.t.Helper()
	s, err := k.Stats(k.id(name), arm)
	if err != nil {
		k.t.Fatal(err)
	}
	return s
}

// pair is a connection over loopback: the connecting and the accepting side.
type pair struct{ connected, accepted *net.TCPConn }

var families = map[string]string{"ipv4": "127.0.0.1:0", "ipv6": "[::1]:0"}

// connect connects to a listener.
func connect(t testing.TB, l *net.TCPListener) pair {
	t.Helper()
	return connectTo(t, l, l.Addr().String())
}

func connectTo(t testing.TB, l *net.TCPListener, address string) pair {
	t.Helper()
	connected, accepted := testenv.Connect(t, l, address)
	return pair{connected, accepted}
}

// control calls f with the descriptor of a connection.
func control(t testing.TB, c *net.TCPConn, f func(fd int)) {
	t.Helper()
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if err := raw.Control(func(fd uintptr) { f(int(fd)) }); err != nil {
		t.Fatal(err)
	}
}

// option reads a numeric option.
func option(t testing.TB, c *net.TCPConn, level, name int) (value int) {
	t.Helper()
	control(t, c, func(fd int) {
		var err error
		if value, err = unix.GetsockoptInt(fd, level, name); err != nil {
			t.Fatal(os.NewSyscallError("getsockopt", err))
		}
	})
	return value
}

// ruleOf returns the name of a connection's rule, "" for none.
func (k *tuning) ruleOf(c *net.TCPConn) (name string) {
	k.t.Helper()
	control(k.t, c, func(fd int) {
		connection, err := k.Connection(fd)
		if err != nil {
			k.t.Fatal(err)
		}
		if connection == nil {
			return
		}
		rules, err := k.Rules()
		if err != nil {
			k.t.Fatal(err)
		}
		if rule := rules[connection.Rule]; rule != nil {
			name = bpf.Text(rule.Name[:])
		}
	})
	return name
}

// network contains the addresses of one family.
type network struct {
	name   string
	domain int
	addr   netip.Addr
	mss    int // of lo as newNetworks sets it
}

// newNetworks sets the MTU of lo to 1500 until the test ends.
func newNetworks(t testing.TB) []network {
	t.Helper()
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.LinkSetMTU(lo, 1500); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := netlink.LinkSetMTU(lo, lo.Attrs().MTU); err != nil {
			t.Error(err)
		}
	})
	return []network{
		{"ipv4", unix.AF_INET, netip.MustParseAddr("127.0.0.1"), 1460},
		{"ipv6", unix.AF_INET6, netip.IPv6Loopback(), 1440},
	}
}

// sysctl sets a sysctl until the test ends.
func sysctl(t testing.TB, name, value string) {
	t.Helper()
	path := "/proc/sys/" + name
	before, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(value), 0); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.WriteFile(path, before, 0); err != nil {
			t.Error(err)
		}
	})
}

// installRules applies rules to the tests' cgroup. Unlike the rules of a policy, they can have values that the kernel
// refuses, in any order.
func (k *tuning) installRules(rules ...config.TuneRule) {
	k.t.Helper()
	for i := range rules {
		rules[i].Cgroup = testenv.CgroupPath()
		slices.SortFunc(rules[i].Set, func(a, b config.Setting) int { return cmp.Compare(optionID(k.t, a), optionID(k.t, b)) })
	}
	compiled, err := tune.Compile(rules, nil, nil)
	if err != nil {
		k.t.Fatal(err)
	}
	if err := k.Install(compiled); err != nil {
		k.t.Fatal(err)
	}
	k.rules = rules
}

func optionID(t testing.TB, s config.Setting) int {
	t.Helper()
	o, ok := tune.FindOption(s.Option)
	if !ok {
		t.Fatalf("no option %s", s.Option)
	}
	return o.ID
}

// failed counts the options of installed rules that could not be set, by rule/option/errno.
func (k *tuning) failed() map[string]uint64 {
	k.t.Helper()
	failures, err := k.Failures()
	if err != nil {
		k.t.Fatal(err)
	}
	rules, err := k.Rules()
	if err != nil {
		k.t.Fatal(err)
	}
	named := make(map[string]uint64)
	for f, count := range failures {
		if rule := rules[f.Rule]; rule != nil && rule.Retired == 0 {
			errno := unix.ErrnoName(unix.Errno(f.Error))
			if errno == "" {
				errno = fmt.Sprint(f.Error)
			}
			named[bpf.Text(rule.Name[:])+"/"+config.TuneOptions[f.Option].Name+"/"+errno] = count
		}
	}
	return named
}

// lacking skips a test for a feature that the kernel lacks. On a kernel of the version that added the feature, or a
// newer one, it fails the test.
func lacking(t testing.TB, since string, reason error) {
	t.Helper()
	if !olderThan(t, since) {
		t.Fatalf("%+v, on a kernel that is not older than %s", reason, since)
	}
	t.Skipf("kernel: %v", reason)
}

// olderThan compares the kernel's version with a version such as 6.12.
func olderThan(t testing.TB, version string) bool {
	t.Helper()
	release, _, err := linux.Uname()
	check(t, err)
	var running, wanted [2]int
	for text, to := range map[string]*[2]int{release: &running, version: &wanted} {
		if _, err := fmt.Sscanf(text, "%d.%d", &to[0], &to[1]); err != nil {
			t.Fatalf("kernel version %q: %v", text, err)
		}
	}
	return slices.Compare(running[:], wanted[:]) < 0
}

// probed returns the result of Probe, which is run once.
var probed struct {
	once    sync.Once
	options map[string]error
	err     error
}

// lacks returns why the kernel cannot set an option, or nil.
func lacks(t testing.TB, option string) error {
	t.Helper()
	probed.once.Do(func() { probed.options, probed.err = tune.Probe(probeFolders(t)) })
	check(t, probed.err)
	return probed.options[option]
}

// needs skips a test if the kernel cannot set an option.
func needs(t testing.TB, option string) {
	t.Helper()
	if err := lacks(t, option); err != nil {
		o, _ := tune.FindOption(option)
		lacking(t, o.Since, err)
	}
}

// has returns the settings of a rule that the kernel can set, and logs the others.
func has(t testing.TB, set string) string {
	t.Helper()
	var kept []string
	for setting := range strings.SplitSeq(set, ",") {
		name, _, _ := strings.Cut(strings.TrimSpace(setting), ":")
		if err := lacks(t, name); err != nil {
			t.Logf("kernel: %v", err)
			continue
		}
		kept = append(kept, setting)
	}
	return strings.Join(kept, ",")
}

// tells reports whether getsockopt(2) knows an option of TCP sockets.
func tells(t testing.TB, level, name int) bool {
	t.Helper()
	_, err := unix.GetsockoptInt(testenv.TCPSocket(t, unix.AF_INET), level, name)
	if err != nil && !errors.Is(err, unix.ENOPROTOOPT) {
		t.Fatal(os.NewSyscallError("getsockopt", err))
	}
	return err == nil
}

// tellsWindow reports whether TCP_INFO has the window that a socket offers.
func tellsWindow(t testing.TB) bool {
	t.Helper()
	var info unix.TCPInfo
	length := uint32(unsafe.Sizeof(info))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(testenv.TCPSocket(t, unix.AF_INET)), unix.SOL_TCP, unix.TCP_INFO,
		uintptr(unsafe.Pointer(&info)), uintptr(unsafe.Pointer(&length)), 0)
	if errno != 0 {
		t.Fatal(os.NewSyscallError("getsockopt", errno))
	}
	return uintptr(length) > unsafe.Offsetof(info.Rcv_wnd)
}

// ends are the sockets of a connection. Unlike the sockets of package net, they have default options.
type ends struct{ connected, accepted int }

// listenSocket opens a listener at an address, and returns its port too.
func listenSocket(t testing.TB, domain int, addr netip.Addr) (fd int, at netip.AddrPort) {
	t.Helper()
	fd = testenv.TCPSocket(t, domain)
	if err := unix.Bind(fd, sockaddr.Of(netip.AddrPortFrom(addr, 0))); err != nil {
		t.Fatal(os.NewSyscallError("bind", err))
	}
	if err := unix.Listen(fd, 128); err != nil {
		t.Fatal(os.NewSyscallError("listen", err))
	}
	return fd, netip.AddrPortFrom(addr, testenv.Port(t, fd))
}

// connectSockets connects to a listener.
func connectSockets(t testing.TB, listener int, at netip.AddrPort) ends {
	t.Helper()
	domain := unix.AF_INET6
	if at.Addr().Is4() {
		domain = unix.AF_INET
	}
	fd := testenv.TCPSocket(t, domain)
	if _, err := retry(func() (int, error) { return 0, unix.Connect(fd, sockaddr.Of(at)) }); err != nil {
		t.Fatal(os.NewSyscallError("connect", err))
	}
	return ends{fd, acceptSocket(t, listener)}
}

// connectDeaf starts a connection that receives nothing from the other side.
func connectDeaf(t testing.TB, at netip.AddrPort) int {
	t.Helper()
	domain := unix.AF_INET6
	if at.Addr().Is4() {
		domain = unix.AF_INET
	}
	fd := testenv.TCPSocket(t, domain)
	attachFilter(t, fd, unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K})
	if err := unix.SetNonblock(fd, true); err != nil {
		t.Fatal(err)
	}
	if err := unix.Connect(fd, sockaddr.Of(at)); !errors.Is(err, unix.EINPROGRESS) {
		t.Fatal(os.NewSyscallError("connect", err))
	}
	return fd
}

func attachFilter(t testing.TB, fd int, filter ...unix.SockFilter) {
	t.Helper()
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	if err := unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &program); err != nil {
		t.Fatal(os.NewSyscallError("setsockopt", err))
	}
}

func acceptSocket(t testing.TB, listener int) int {
	t.Helper()
	fd, err := retry(func() (int, error) {
		fd, _, err := unix.Accept4(listener, unix.SOCK_CLOEXEC)
		return fd, err
	})
	if err != nil {
		t.Fatal(os.NewSyscallError("accept", err))
	}
	t.Cleanup(func() { unix.Close(fd) })
	return fd
}

// retry repeats a call that was interrupted by a signal, as calls with a timeout are.
func retry(call func() (int, error)) (int, error) {
	for {
		n, err := call()
		if !errors.Is(err, unix.EINTR) {
			return n, err
		}
	}
}

// send writes all of b.
func send(fd int, b []byte) error {
	for len(b) > 0 {
		n, err := retry(func() (int, error) { return unix.Write(fd, b) })
		if err != nil {
			return os.NewSyscallError("write", err)
		}
		b = b[n:]
	}
	return nil
}

// receive fills b.
func receive(fd int, b []byte) error {
	for got := 0; got < len(b); {
		n, err := retry(func() (int, error) { return unix.Read(fd, b[got:]) })
		if err != nil || n == 0 {
			return fmt.Errorf("read %d of %d bytes: %w", got, len(b), err)
		}
		got += n
	}
	return nil
}

// transfer sends bytes from one socket to another and checks that they arrive.
func transfer(t testing.TB, from, to int, bytes int) {
	t.Helper()
	sent, got := make([]byte, bytes), make([]byte, bytes)
	for i := range sent {
		sent[i] = byte(i % 251)
	}
	failed := make(chan error, 1)
	go func() { failed <- send(from, sent) }()
	if err := receive(to, got); err != nil {
		t.Fatal(err)
	}
	if err := <-failed; err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(sent, got) {
		t.Fatalf("%d bytes arrived, and not as they were sent", bytes)
	}
}

func sockopt(t testing.TB, fd, level, name int) int {
	t.Helper()
	value, err := unix.GetsockoptInt(fd, level, name)
	if err != nil {
		t.Fatal(os.NewSyscallError("getsockopt", err))
	}
	return value
}

func tcpInfo(t testing.TB, fd int) *unix.TCPInfo {
	t.Helper()
	info, err := unix.GetsockoptTCPInfo(fd, unix.SOL_TCP, unix.TCP_INFO)
	if err != nil {
		t.Fatal(os.NewSyscallError("getsockopt", err))
	}
	return info
}

// wire captures the TCP segments on lo.
type wire struct {
	t  testing.TB
	fd int
}

// segment is a captured TCP segment.
type segment struct {
	at             time.Time
	source, target netip.AddrPort
	class          uint8  // IPv4 type of service, IPv6 traffic class
	label          uint32 // IPv6 flow label
	seq, ack       uint32
	flags          uint8
	window         uint16
	mss            int // of a SYN
	data           int // bytes
}

const (
	flagSYN = 1 << 1
	flagACK = 1 << 4
	flagECE = 1 << 6
	flagCWR = 1 << 7
)

// watchWire starts a capture. With a hash, it captures only flows with that hash in the kernel.
func watchWire(t testing.TB, hash uint32) *wire {
	t.Helper()
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(os.NewSyscallError("socket", err))
	}
	t.Cleanup(func() { unix.Close(fd) })
	if hash != 0 {
		const rxhash = 1<<32 - 0x1000 + 32 // SKF_AD_OFF + SKF_AD_RXHASH
		attachFilter(t, fd,
			unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: rxhash},
			unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: hash, Jf: 1},
			unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: 1 << 17},
			unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K})
	}
	lo, err := net.InterfaceByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	for _, err := range []error{
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TIMESTAMPNS, 1),
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 32<<20),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 60}),
		unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: 3 << 8, Ifindex: lo.Index}), // ETH_P_ALL
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	awaitStamps(t)
	return &wire{t, fd}
}

// awaitStamps waits until the kernel stamps packets when they are sent. SO_TIMESTAMPNS enables this in a work queue
// (net_enable_timestamp in net/core/dev.c, Linux 6.18); a packet that was sent before has the time at which it is read.
func awaitStamps(t testing.TB) {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(os.NewSyscallError("socket", err))
	}
	defer unix.Close(fd)
	local := &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}
	if err := unix.Bind(fd, local); err != nil {
		t.Fatal(os.NewSyscallError("bind", err))
	}
	self, err := unix.Getsockname(fd)
	if err != nil {
		t.Fatal(os.NewSyscallError("getsockname", err))
	}
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TIMESTAMPNS, 1); err != nil {
		t.Fatal(os.NewSyscallError("setsockopt", err))
	}
	control := make([]byte, 128)
	for deadline := time.Now().Add(time.Minute); ; {
		if err := unix.Sendto(fd, []byte{0}, 0, self); err != nil {
			t.Fatal(os.NewSyscallError("sendto", err))
		}
		time.Sleep(time.Millisecond)
		reading := time.Now()
		_, n, _, _, err := unix.Recvmsg(fd, make([]byte, 1), control, 0)
		if err != nil {
			t.Fatal(os.NewSyscallError("recvmsg", err))
		}
		switch {
		case stamp(t, control[:n]).Before(reading):
			return
		case reading.After(deadline):
			t.Fatal("packets are not stamped when they are sent")
		}
	}
}

// stamp returns the time of SO_TIMESTAMPNS.
func stamp(t testing.TB, control []byte) time.Time {
	t.Helper()
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil || len(messages) != 1 {
		t.Fatalf("packet without a time: %v", err)
	}
	data := messages[0].Data
	return time.Unix(int64(binary.NativeEndian.Uint64(data)), int64(binary.NativeEndian.Uint64(data[8:])))
}

// next waits for the next wanted segment.
func (w *wire) next(wanted func(s *segment) bool) *segment {
	w.t.Helper()
	packet, control := make([]byte, 1<<16+64), make([]byte, 128)
	for {
		n, c, _, from, err := unix.Recvmsg(w.fd, packet, control, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			w.t.Fatalf("no such segment: %v", err)
		}
		if from.(*unix.SockaddrLinklayer).Pkttype != unix.PACKET_OUTGOING {
			continue
		}
		s := parseSegment(packet[14:n])
		if s == nil || !wanted(s) {
			continue
		}
		s.at = stamp(w.t, control[:c])
		return s
	}
}

// parseSegment parses an IP packet and returns nil if it has no TCP header.
func parseSegment(b []byte) *segment {
	s := &segment{}
	var source, target []byte
	switch {
	case len(b) >= 40 && b[0] == 0x45 && b[9] == unix.IPPROTO_TCP:
		s.class, source, target = b[1], b[12:16], b[16:20]
		b = b[20:binary.BigEndian.Uint16(b[2:])]
	case len(b) >= 60 && b[0]>>4 == 6 && b[6] == unix.IPPROTO_TCP:
		first := binary.BigEndian.Uint32(b)
		s.class, s.label, source, target = uint8(first>>20), first&0xfffff, b[8:24], b[24:40]
		b = b[40 : 40+int(binary.BigEndian.Uint16(b[4:]))]
	default:
		return nil
	}
	from, _ := netip.AddrFromSlice(source)
	to, _ := netip.AddrFromSlice(target)
	s.source = netip.AddrPortFrom(from, binary.BigEndian.Uint16(b))
	s.target = netip.AddrPortFrom(to, binary.BigEndian.Uint16(b[2:]))
	s.seq, s.ack = binary.BigEndian.Uint32(b[4:]), binary.BigEndian.Uint32(b[8:])
	s.flags, s.window = b[13], binary.BigEndian.Uint16(b[14:])
	header := int(b[12]>>4) * 4
	s.data = len(b) - header
	if s.flags&flagSYN != 0 && header >= 24 && b[20] == 2 {
		s.mss = int(binary.BigEndian.Uint16(b[22:]))
	}
	return s
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func descriptors(t testing.TB) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	check(t, err)
	return len(entries)
}

func protocolOf(t testing.TB, c syscall.Conn) (protocol int) {
	t.Helper()
	raw, err := c.SyscallConn()
	check(t, err)
	check(t, raw.Control(func(fd uintptr) { protocol, err = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_PROTOCOL) }))
	check(t, err)
	return protocol
}

// openSockets returns the number of TCP sockets in the tests' cgroup.
func openSockets(t testing.TB) (n int) {
	t.Helper()
	problems, err := procsock.WalkOnce(testenv.Cgroup(), func(*procsock.Socket) error {
		n++
		return nil
	})
	if err != nil || len(problems) > 0 {
		t.Fatalf("%v, problems %v", err, problems)
	}
	return n
}
