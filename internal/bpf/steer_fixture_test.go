// SPDX-License-Identifier: Apache-2.0

package bpf_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf/asm"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/placement"
	"sockeye/internal/sockaddr"
	"sockeye/internal/testenv"
)

// patience bounds the wait for an event.
const patience = time.Minute

// until polls until a condition holds.
func until(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s", patience, what)
		}
	}
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// both runs a test in both steering modes.
func both(t *testing.T, f func(t *testing.T, lookup bool)) {
	t.Run("reuseport", func(t *testing.T) { f(t, false) })
	t.Run("lookup", func(t *testing.T) { f(t, true) })
}

// listen parses listeners such as "udp [::]:4739 v6only".
func listen(t testing.TB, texts ...string) (rows [bpf.MaxListeners]bpf.Listener) {
	t.Helper()
	for row, text := range texts {
		fields := strings.Fields(text)
		rows[row] = bpf.Listener{Protocol: unix.IPPROTO_UDP, Address: netip.MustParseAddrPort(fields[1]), V6Only: len(fields) > 2}
		if fields[0] == "tcp" {
			rows[row].Protocol = unix.IPPROTO_TCP
		}
	}
	return rows
}

// config is the data path of a service in its own bpffs.
func config(t testing.TB, lookup bool, listeners ...string) bpf.SteerConfig {
	t.Helper()
	netns, err := os.Open("/proc/self/ns/net")
	check(t, err)
	t.Cleanup(func() { netns.Close() })
	return bpf.SteerConfig{
		Dir:       filepath.Join(testenv.BPFFS(t), "service"),
		Lookup:    lookup,
		Listeners: listen(t, listeners...),
		Devices:   4096,
		Netns:     netns,
		Cgroup:    testenv.Cgroup(),
	}
}

func open(t testing.TB, c bpf.SteerConfig) *bpf.Steer {
	t.Helper()
	s, err := bpf.OpenSteer(c)
	if err != nil {
		t.Fatalf("%+v", err)
	}
	t.Cleanup(func() {
		s.Close()
		// The kernel detaches a link whose pin disappears with the bpffs later, in a work queue: the program would still
		// decide in the next test.
		check(t, bpf.Remove(c.Dir))
	})
	return s
}

// service is a data path whose members are sockets of this process.
type service struct {
	*bpf.Steer
	t       testing.TB
	config  bpf.SteerConfig
	mapping *placement.Mapping
	seats   map[int]map[int]*socket // by slot and row
	keepers map[int]*socket         // keeper sockets by row; never selected
}

// serve opens a service with a keeper socket in each group.
func serve(t testing.TB, c bpf.SteerConfig, slots, standby int, devices *placement.DeviceMap) *service {
	t.Helper()
	routes(t)
	mapping, err := placement.NewMapping(slots, standby, 0x5eed_0f_50c4e7e, devices)
	check(t, err)
	s := &service{
		Steer: open(t, c), t: t, config: c, mapping: mapping,
		seats: make(map[int]map[int]*socket), keepers: make(map[int]*socket),
	}
	s.install(mapping)
	for row := range s.rows() {
		if c.Lookup {
			continue
		}
		s.keepers[row] = s.newSocket(row)
		check(t, s.Attach(row, s.keepers[row].fd))
	}
	return s
}

func (s *service) install(m *placement.Mapping) {
	s.t.Helper()
	check(s.t, setMapping(s.Steer, m))
	s.mapping = m
}

func setMapping(s *bpf.Steer, m *placement.Mapping) error {
	entries, flips := m.Entries(), 0
	flipped := func() { flips++ }
	if entries.Size() == 0 {
		return errors.Join(s.SetMapping(&m.Table, nil, flipped), onceOnly(&flips))
	}
	devices, err := bpf.NewDeviceMap(entries.Size(), entries.All())
	if err != nil {
		return err
	}
	defer devices.Close()
	return errors.Join(s.SetMapping(&m.Table, devices, flipped), onceOnly(&flips))
}

func onceOnly(flips *int) error {
	if *flips != 1 {
		return fmt.Errorf("SetMapping reported %d flips", *flips)
	}
	return nil
}

func (s *service) rows() map[int]bpf.Listener {
	rows := make(map[int]bpf.Listener)
	for row, l := range s.config.Listeners {
		if l.Address.IsValid() {
			rows[row] = l
		}
	}
	return rows
}

// newSocket opens a socket for a row: with SO_REUSEPORT on the listener's address or, with sk_lookup, without it and
// on a port of its own.
func (s *service) newSocket(row int) *socket {
	s.t.Helper()
	l := s.config.Listeners[row]
	if s.config.Lookup {
		l.Address = netip.AddrPortFrom(l.Address.Addr(), 0)
	}
	return newSocket(s.t, l, !s.config.Lookup)
}

// insert registers a new socket.
func (s *service) insert(row, slot int) *socket {
	s.t.Helper()
	k := s.newSocket(row)
	if err := s.Insert(row, bpf.Place(slot), k.fd, k.cookie()); err != nil {
		s.t.Fatalf("insert into row %d, slot %d: %v", row, slot, err)
	}
	return k
}

// seat registers sockets in slots and opens the slots.
func (s *service) seat(slots ...int) {
	s.t.Helper()
	for _, slot := range slots {
		s.seats[slot] = make(map[int]*socket)
		for row := range s.rows() {
			s.seats[slot][row] = s.insert(row, slot)
		}
		check(s.t, s.SetSlot(slot, bpf.Slot{Ready: 1, Pid: uint32(os.Getpid())}))
	}
}

// counters sums the counters over all slots and all reasons.
func (s *service) total() (served, refused uint64) {
	s.t.Helper()
	all, err := s.Counters(int(s.mapping.Table.Slots))
	check(s.t, err)
	for _, c := range all {
		served += c.Connections + c.Datagrams
		for r := range bpf.Reasons {
			refused += c.RefusedConnections[r] + c.RefusedDatagrams[r]
		}
	}
	return served, refused
}

// sourceIn returns a source address whose device maps to the slot.
func (s *service) sourceIn(slot int, v6 bool) netip.Addr {
	for n := uint64(slot) << 32; ; n++ {
		if a := source(rand.New(rand.NewPCG(n, 1)), v6); s.slotOf(a) == slot {
			return a
		}
	}
}

func (s *service) slotOf(a netip.Addr) int {
	slot, _ := s.mapping.Slot(a)
	return slot
}

// socket is the descriptor of a UDP socket or a TCP listener.
type socket struct {
	t   testing.TB
	fd  int
	tcp bool
}

func newSocket(t testing.TB, l bpf.Listener, reuseport bool) *socket {
	t.Helper()
	k := &socket{t: t, tcp: l.Protocol == unix.IPPROTO_TCP}
	kind, domain := unix.SOCK_DGRAM, unix.AF_INET6
	if k.tcp {
		kind = unix.SOCK_STREAM
	}
	if l.Address.Addr().Is4() {
		domain = unix.AF_INET
	}
	var err error
	k.fd, err = unix.Socket(domain, kind|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	check(t, err)
	t.Cleanup(k.close)
	if reuseport {
		check(t, unix.SetsockoptInt(k.fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1))
	}
	if domain == unix.AF_INET6 {
		only := 0
		if l.V6Only {
			only = 1
		}
		check(t, unix.SetsockoptInt(k.fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, only))
	}
	if err := unix.Bind(k.fd, sockaddr.Of(l.Address)); err != nil {
		t.Fatalf("bind to %s: %v", l.Address, err)
	}
	if k.tcp {
		check(t, unix.Listen(k.fd, 1024))
	}
	return k
}

func (k *socket) close() {
	if k.fd >= 0 {
		unix.Close(k.fd)
		k.fd = -1
	}
}

func (k *socket) cookie() uint64 {
	k.t.Helper()
	cookie, err := unix.GetsockoptUint64(k.fd, unix.SOL_SOCKET, unix.SO_COOKIE)
	check(k.t, err)
	return cookie
}

// receive returns the source of the first datagram, which carries its intended source address, or of the first
// connection.
func (k *socket) receive() (from netip.Addr, ok bool) {
	k.t.Helper()
	if k.tcp {
		fd, sa, err := unix.Accept4(k.fd, unix.SOCK_CLOEXEC)
		if err != nil {
			return from, false
		}
		// A connection in TIME-WAIT would keep the port from the next test.
		check(k.t, unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}))
		unix.Close(fd)
		return sockaddr.AddrPort(sa).Addr(), true
	}
	var buf [64]byte
	n, sa, err := unix.Recvfrom(k.fd, buf[:], 0)
	if err != nil {
		return from, false
	}
	from = sockaddr.AddrPort(sa).Addr()
	if string(buf[:n]) != from.String() {
		k.t.Fatalf("%q came from %s", buf[:n], from)
	}
	return from, true
}

// receipts contains the sources that each slot received.
type receipts map[int]map[netip.Addr]int

// collect receives everything at all members of a row, and fails the test if the keeper socket received anything. It
// returns after want datagrams or connections.
func (s *service) collect(row, want int) receipts {
	s.t.Helper()
	got, n := make(receipts), 0
	until(s.t, fmt.Sprintf("%d arrivals", want), func() bool {
		for slot, sockets := range s.seats {
			if sockets[row] == nil {
				continue
			}
			for from, ok := sockets[row].receive(); ok; from, ok = sockets[row].receive() {
				if got[slot] == nil {
					got[slot] = make(map[netip.Addr]int)
				}
				got[slot][from]++
				n++
			}
		}
		return n >= want
	})
	if n > want {
		s.t.Fatalf("%d arrivals, want %d", n, want)
	}
	if a := s.keepers[row]; a != nil {
		if from, ok := a.receive(); ok {
			s.t.Fatalf("the keeper socket got something from %s", from)
		}
	}
	return got
}

// expect fails the test unless each source was received once, in its own slot.
func (s *service) expect(row int, sources []netip.Addr) {
	s.t.Helper()
	for slot, from := range s.collect(row, len(sources)) {
		for a := range from {
			if want := s.slotOf(a); slot != want {
				s.t.Errorf("%s came to slot %d, want %d", a, slot, want)
			}
		}
	}
}

// source returns a random local address: of 127.0.0.0/8, or of fd00::/64, which routes makes local.
func source(rnd *rand.Rand, v6 bool) netip.Addr {
	if v6 {
		b := netip.MustParseAddr("fd00::").As16()
		binary.BigEndian.PutUint64(b[8:], rnd.Uint64()|1)
		return netip.AddrFrom16(b)
	}
	n := rnd.Uint32()
	return netip.AddrFrom4([4]byte{127, byte(n >> 16), byte(n >> 8), byte(n)%254 + 1})
}

func sources(n int, v6 bool) []netip.Addr {
	rnd := rand.New(rand.NewPCG(uint64(n), 7))
	seen := make(map[netip.Addr]bool)
	var all []netip.Addr
	for len(all) < n {
		if a := source(rnd, v6); !seen[a] {
			seen[a] = true
			all = append(all, a)
		}
	}
	return all
}

// routes makes fd00::/64 local, as "ip -6 route add local fd00::/64 dev lo" does.
func routes(t testing.TB) {
	t.Helper()
	lo, err := netlink.LinkByName("lo")
	check(t, err)
	_, dst, err := net.ParseCIDR("fd00::/64")
	check(t, err)
	err = netlink.RouteReplace(&netlink.Route{LinkIndex: lo.Attrs().Index, Dst: dst, Type: unix.RTN_LOCAL, Table: unix.RT_TABLE_LOCAL})
	if err != nil {
		t.Fatalf("make fd00::/64 local: %v", err)
	}
}

// sender sends datagrams from any local address.
type sender struct {
	t      testing.TB
	v4, v6 int
}

func newSender(t testing.TB) *sender {
	t.Helper()
	routes(t)
	s := &sender{t: t}
	for fd, domain := range map[*int]int{&s.v4: unix.AF_INET, &s.v6: unix.AF_INET6} {
		var err error
		*fd, err = unix.Socket(domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		check(t, err)
		t.Cleanup(func() { unix.Close(*fd) })
	}
	check(t, unix.SetsockoptInt(s.v6, unix.IPPROTO_IPV6, unix.IPV6_FREEBIND, 1))
	return s
}

// send sends a datagram that carries its source address.
func (s *sender) send(from netip.Addr, to netip.AddrPort) {
	s.t.Helper()
	fd, oob := s.v4, unix.PktInfo4(&unix.Inet4Pktinfo{Spec_dst: [4]byte(from.AsSlice())})
	if from.Is6() {
		fd, oob = s.v6, unix.PktInfo6(&unix.Inet6Pktinfo{Addr: from.As16()})
	}
	if err := unix.Sendmsg(fd, []byte(from.String()), oob, sockaddr.Of(to), 0); err != nil {
		s.t.Fatalf("send from %s to %s: %v", from, to, err)
	}
}

// client connects a TCP or UDP socket from an address.
func client(t testing.TB, protocol int, from netip.Addr, to netip.AddrPort) (fd int, err error) {
	t.Helper()
	kind, domain := unix.SOCK_DGRAM, unix.AF_INET
	if protocol == unix.IPPROTO_TCP {
		kind = unix.SOCK_STREAM
	}
	if from.Is6() {
		domain = unix.AF_INET6
	}
	fd, err = unix.Socket(domain, kind|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	check(t, err)
	if from.Is6() {
		check(t, unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_FREEBIND, 1))
	}
	if err := unix.Bind(fd, sockaddr.Of(netip.AddrPortFrom(from, 0))); err != nil {
		t.Fatalf("bind to %s: %v", from, err)
	}
	if err = unix.Connect(fd, sockaddr.Of(to)); errors.Is(err, unix.EINPROGRESS) {
		wait(t, fd, unix.POLLOUT)
		var value int
		value, err = unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
		if err == nil && value != 0 {
			err = unix.Errno(value)
		}
	}
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// wait waits until a descriptor is ready.
func wait(t testing.TB, fd int, events int16) {
	t.Helper()
	until(t, "a descriptor is ready", func() bool { return ready(t, fd, events, 100*time.Millisecond) })
}

// ready reports whether a descriptor is ready within a time. Signals of the Go runtime may interrupt poll(2).
func ready(t testing.TB, fd int, events int16, limit time.Duration) bool {
	t.Helper()
	for deadline := time.Now().Add(limit); ; {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: events}}, int(max(0, time.Until(deadline).Milliseconds())))
		if errors.Is(err, unix.EINTR) {
			continue
		}
		check(t, err)
		return n == 1
	}
}

// refused returns the error of a client, or nil if its SYN or datagram was accepted.
func refused(t testing.TB, protocol int, from netip.Addr, to netip.AddrPort) (err error) {
	t.Helper()
	onCPU(t, 0, func() {
		var fd int
		if fd, err = client(t, protocol, from, to); err != nil {
			return
		}
		defer unix.Close(fd)
		if protocol == unix.IPPROTO_TCP {
			return
		}
		if _, err = unix.Write(fd, []byte(from.String())); err != nil {
			return
		}
		// The packet, then the ICMP error.
		drainBacklog(t)
		drainBacklog(t)
		if _, _, err = unix.Recvfrom(fd, make([]byte, 1), unix.MSG_DONTWAIT); errors.Is(err, unix.EAGAIN) {
			err = nil
		}
	})
	return err
}

// onCPU calls f on a thread that is bound to the n-th CPU of this process.
func onCPU(t testing.TB, n int, f func()) {
	t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var before, one unix.CPUSet
	check(t, unix.SchedGetaffinity(0, &before))
	cpu := -1
	for seen := -1; seen < n; {
		if cpu++; before.IsSet(cpu) {
			seen++
		}
	}
	one.Set(cpu)
	check(t, unix.SchedSetaffinity(0, &one))
	defer func() { check(t, unix.SchedSetaffinity(0, &before)) }()
	f()
}

// drainBacklog waits until the CPU has processed the packets that were sent on it through lo. On a loaded host
// ksoftirqd processes them after the sender has returned.
func drainBacklog(t testing.TB) {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	check(t, err)
	defer unix.Close(fd)
	check(t, unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}))
	own, err := unix.Getsockname(fd)
	check(t, err)
	check(t, unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: int64(patience / time.Second)}))
	// The kernel runs no sk_lookup program for a datagram to a connected socket (__udp4_lib_lookup, Linux 6.18).
	check(t, unix.Connect(fd, own))
	_, err = unix.Write(fd, []byte("."))
	check(t, err)
	_, err = unix.Read(fd, make([]byte, 1))
	check(t, err)
}

// target returns the address at which a client of the family reaches a listener.
func target(l bpf.Listener, v6 bool) netip.AddrPort {
	switch a := l.Address.Addr(); {
	case !a.IsUnspecified():
		return l.Address
	case v6:
		return netip.AddrPortFrom(netip.IPv6Loopback(), l.Address.Port())
	}
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), l.Address.Port())
}

func returns(value int32) asm.Instructions {
	return asm.Instructions{asm.Mov.Imm(asm.R0, value), asm.Return()}
}
