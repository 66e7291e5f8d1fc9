// SPDX-License-Identifier: Apache-2.0

package bpf_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/sockaddr"
)

// floodSources is the number of forged sources, each of which sends one packet: ten million in "make bench-flood".
func floodSources(t testing.TB, most int) int {
	text := os.Getenv("SOCKEYE_FLOOD_SOURCES")
	if text == "" {
		return most
	}
	n, err := strconv.Atoi(text)
	check(t, err)
	return n
}

// flooder sends packets from forged sources in 10.0.0.0/8 to an address of this host. Replies leave through a TUN
// device that nobody reads.
type flooder struct {
	t    testing.TB
	fd   int
	port uint16
	tcp  bool
}

var flooded = netip.MustParseAddr("192.0.2.1")

func newFlooder(t testing.TB, protocol int, port uint16) *flooder {
	t.Helper()
	f := &flooder{t: t, port: port, tcp: protocol == unix.IPPROTO_TCP}
	lo, err := netlink.LinkByName("lo")
	check(t, err)
	address, err := netlink.ParseAddr(flooded.String() + "/32")
	check(t, err)
	check(t, netlink.AddrReplace(lo, address))
	tun := &netlink.Tuntap{LinkAttrs: netlink.LinkAttrs{Name: "sink"}, Mode: netlink.TUNTAP_MODE_TUN, Flags: netlink.TUNTAP_DEFAULTS, Queues: 1}
	if err := netlink.LinkAdd(tun); errors.Is(err, fs.ErrNotExist) {
		t.Skipf("kernel: no TUN devices: %v", err)
	} else if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, queue := range tun.Fds {
			queue.Close()
		}
		check(t, netlink.LinkDel(tun))
	})
	check(t, netlink.LinkSetUp(tun))
	route := &netlink.Route{LinkIndex: tun.Index, Dst: netlink.NewIPNet([]byte{10, 0, 0, 0})}
	route.Dst.Mask = []byte{255, 0, 0, 0}
	check(t, netlink.RouteReplace(route))
	f.fd, err = unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
	check(t, err)
	t.Cleanup(func() { unix.Close(f.fd) })
	check(t, unix.SetsockoptInt(f.fd, unix.SOL_SOCKET, unix.SO_SNDBUF, 1<<20))
	return f
}

type mmsghdr struct {
	unix.Msghdr
	n uint32
	_ [4]byte
}

// send sends n packets from consecutive sources, starting at first. It returns early once stop is set, with the
// number of packets sent.
func (f *flooder) send(first, n int, stop *atomic.Bool) int {
	const batch = 64
	to := unix.RawSockaddrInet4{Family: unix.AF_INET, Addr: flooded.As4()}
	var (
		packets [batch][40]byte
		iovs    [batch]unix.Iovec
		heads   [batch]mmsghdr
	)
	size := 29
	if f.tcp {
		size = 40
	}
	for i := range batch {
		iovs[i] = unix.Iovec{Base: &packets[i][0], Len: uint64(size)}
		heads[i].Msghdr = unix.Msghdr{Name: (*byte)(unsafe.Pointer(&to)), Namelen: unix.SizeofSockaddrInet4, Iov: &iovs[i], Iovlen: 1}
	}
	sent := 0
	for sent < n && (stop == nil || !stop.Load()) {
		count := min(batch, n-sent)
		for i := range count {
			f.packet(packets[i][:size], uint32(first+sent+i))
		}
		for done := 0; done < count; {
			k, _, errno := unix.Syscall6(unix.SYS_SENDMMSG, uintptr(f.fd), uintptr(unsafe.Pointer(&heads[done])), uintptr(count-done), 0, 0, 0)
			if errno != 0 && errno != unix.EINTR && errno != unix.ENOBUFS {
				f.t.Errorf("flood: %v", errno)
				return sent
			}
			if errno == 0 {
				done += int(k)
			}
		}
		sent += count
	}
	runtime.KeepAlive(&to)
	return sent
}

// packet writes a datagram or a SYN whose source has a number below 2^24.
func (f *flooder) packet(b []byte, number uint32) {
	clear(b)
	b[0], b[8] = 0x45, 64
	// The factor is odd, so that no source occurs twice.
	source := 10<<24 | number*2654435761&0xffffff
	binary.BigEndian.PutUint32(b[12:], source)
	copy(b[16:], flooded.AsSlice())
	transport := b[20:]
	binary.BigEndian.PutUint16(transport, uint16(1024+number%60000))
	binary.BigEndian.PutUint16(transport[2:], f.port)
	if !f.tcp {
		b[9] = unix.IPPROTO_UDP
		binary.BigEndian.PutUint16(transport[4:], uint16(len(transport)))
		return
	}
	b[9] = unix.IPPROTO_TCP
	binary.BigEndian.PutUint32(transport[4:], number)
	transport[12], transport[13] = 5<<4, 2 // SYN
	binary.BigEndian.PutUint16(transport[14:], 64240)
	sum := uint32(unix.IPPROTO_TCP + len(transport))
	for i := 12; i < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for sum>>16 != 0 {
		sum = sum&0xffff + sum>>16
	}
	binary.BigEndian.PutUint16(transport[16:], ^uint16(sum))
}

// drops returns the number of datagrams dropped at full sockets.
func (k *socket) drops() uint64 {
	k.t.Helper()
	const soMeminfo, drops = 55, 8
	var info [9]uint32
	size := uint32(unsafe.Sizeof(info))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(k.fd), unix.SOL_SOCKET, soMeminfo, uintptr(unsafe.Pointer(&info)), uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 {
		k.t.Fatal(errno)
	}
	return uint64(info[drops])
}

// drain receives everything at the members until it is stopped, and fails the test for each source in a wrong slot.
func (s *service) drain(row int) (end func() uint64) {
	var received, stopped atomic.Uint64
	done := make(chan struct{})
	go func() {
		defer close(done)
		var buf [64]byte
		for {
			last, idle := stopped.Load() != 0, true
			for slot, sockets := range s.seats {
				for range 256 {
					_, sa, err := unix.Recvfrom(sockets[row].fd, buf[:], unix.MSG_DONTWAIT)
					if err != nil {
						break
					}
					idle = false
					received.Add(1)
					if from := sockaddr.AddrPort(sa).Addr(); s.slotOf(from) != slot {
						s.t.Errorf("%s came to slot %d", from, slot)
					}
				}
			}
			if last && idle {
				return
			}
			if idle {
				time.Sleep(time.Millisecond)
			}
		}
	}()
	return func() uint64 {
		stopped.Store(1)
		<-done
		return received.Load()
	}
}

func (s *service) kernelMemory() (sum uint64) {
	for _, m := range s.Maps() {
		info, err := m.Info()
		check(s.t, err)
		bytes, _ := info.Memlock()
		sum += bytes
	}
	return sum
}

// TestFloodOfDatagrams checks that a flood of datagrams from forged sources adds devices to the list at the permitted
// rate only: real devices keep their slots and their entries, with all of their counts.
func TestFloodOfDatagrams(t *testing.T) {
	const slots = 4
	both(t, func(t *testing.T, lookup bool) {
		n := floodSources(t, forged)
		s := serve(t, config(t, lookup, pair...), slots, bpf.NoSlot, nil)
		s.seat(allSlots(slots)...)
		udp := newSender(t)
		f := newFlooder(t, unix.IPPROTO_UDP, 4739)
		to := netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), 4739)
		bmp := netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), 1790)
		var exporters, silent, late []netip.Addr
		for i := range byte(16) {
			exporters = append(exporters, netip.AddrFrom4([4]byte{127, 1, 0, i + 1}))
			silent = append(silent, netip.AddrFrom4([4]byte{127, 2, 0, i + 1}))
			late = append(late, netip.AddrFrom4([4]byte{127, 3, 0, i + 1}))
		}
		connect := func(devices []netip.Addr) {
			for _, a := range devices {
				if err := refused(t, unix.IPPROTO_TCP, a, bmp); err != nil {
					t.Errorf("connect from %s: %v", a, err)
				}
			}
			s.expect(1, devices)
		}
		connect(silent)

		end := s.drain(0)
		before, full := s.kernelMemory(), backlogFull(t)
		sent := make(map[netip.Addr]uint64)
		each := func() {
			for _, a := range exporters {
				udp.send(a, to)
				sent[a]++
			}
		}
		each()
		var flooded atomic.Int64
		done := make(chan struct{})
		start := time.Now()
		go func() {
			defer close(done)
			flooded.Store(int64(f.send(0, n, nil)))
		}()
		for alive := true; alive; {
			select {
			case <-done:
				alive = false
			case <-time.After(10 * time.Millisecond):
			}
			each()
		}
		took := time.Since(start)
		connect(late)
		received := end()

		all, err := s.Counters(slots)
		check(t, err)
		var steered, dropped, real uint64
		for slot := range slots {
			steered += all[slot].Datagrams
			dropped += s.seats[slot][0].drops()
		}
		if _, refused := s.total(); refused != 0 {
			t.Errorf("%d refused", refused)
		}
		for _, count := range sent {
			real += count
		}
		// On a busy host, the backlog of loopback overflows.
		lost := backlogFull(t) - full
		if want := uint64(flooded.Load()) + real; steered > want || steered+lost < want || received+dropped != steered {
			t.Errorf("of %d datagrams %d were steered, %d found the backlog full, %d received and %d found a socket full", want, steered, lost, received, dropped)
		}
		listed := make(map[netip.Addr]bpf.Seen)
		for address, seen := range s.Devices() {
			a := addrOf(address)
			listed[a] = seen
		}
		for _, a := range exporters {
			if seen, ok := listed[a]; !ok || seen.Datagrams > sent[a] || seen.Datagrams+lost < sent[a] || int(seen.Slot) != s.slotOf(a) {
				t.Errorf("%s: listed %v, %+v; it sent %d", a, ok, seen, sent[a])
			}
		}
		for _, devices := range [][]netip.Addr{silent, late} {
			for _, a := range devices {
				// A segment that comes after its connection has ended is looked up too, and sk_lookup does not see whether it is a SYN.
				if seen, ok := listed[a]; !ok || seen.Connections < 1 || seen.Connections > 1 && !lookup || int(seen.Slot) != s.slotOf(a) {
					t.Errorf("%s: listed %v, %+v; it has connected once", a, ok, seen)
				}
			}
		}
		if after := s.kernelMemory(); after != before {
			t.Errorf("%d bytes of maps, before %d", after, before)
		}
		unlisted, err := s.Unlisted()
		check(t, err)
		t.Logf("%d forged sources in %v (%.0f/s): 0 misdirected, 0 refused, %d found a socket full; %d of %d places used, %d packets not listed; maps %d bytes before and after",
			flooded.Load(), took.Round(time.Millisecond), float64(flooded.Load())/took.Seconds(), dropped, len(listed), s.config.Devices, unlisted, before)
	})
}

func addrOf(a bpf.Address) netip.Addr {
	var b [16]byte
	for i, word := range a.Word {
		binary.NativeEndian.PutUint32(b[4*i:], word)
	}
	return netip.AddrFrom16(b).Unmap()
}

// TestPlaceOfCountsIsSecret checks that addresses that share a count cannot be found without the nonce: the addresses
// in this test shared one while the place was a function of the address alone.
func TestPlaceOfCountsIsSecret(t *testing.T) {
	both(t, func(t *testing.T, lookup bool) {
		// 200 addresses share 256 places per CPU. Two addresses collide for 1 of 256 keys, but for some keys addresses that
		// differ in one word only fall into few places: into fewer than 40 for 1 of 210 keys, in a simulation of 60,000.
		const enough, keys = 40, 4
		used := 0
		for key := 0; key < keys && used < enough; key++ {
			t.Run(fmt.Sprintf("key %d", key), func(t *testing.T) { used = placesOfCollidingAddresses(t, lookup) })
		}
		if used < enough {
			t.Errorf("200 addresses take %d places", used)
		}
	})
}

// placesOfCollidingAddresses sends datagrams from 200 addresses that would share a place if its hash had no secret key, and
// returns the number of places that they take with a new key.
func placesOfCollidingAddresses(t *testing.T, lookup bool) int {
	s := serve(t, config(t, lookup, pair...), 4, bpf.NoSlot, nil)
	s.seat(allSlots(4)...)
	place := func(a netip.Addr) uint32 {
		b := a.As16()
		return (binary.NativeEndian.Uint32(b[12:]) ^ binary.NativeEndian.Uint32(b[4:])) * 0x9e3779b1 >> 24
	}
	udp := newSender(t)
	victim := netip.MustParseAddr("127.1.0.1")
	var sent []netip.Addr
	for i := uint32(0); len(sent) < 200; i++ {
		a := netip.AddrFrom4([4]byte{127, 5, byte(i >> 8), byte(i)})
		if place(a) == place(victim) {
			sent = append(sent, a)
			udp.send(a, netip.MustParseAddrPort("127.0.0.1:4739"))
		}
	}
	s.expect(0, sent)
	return s.PendingPlaces(t)
}

// backlogFull returns the number of packets that the kernel dropped because the backlog of a CPU was full
// (net.core.netdev_max_backlog): the second column of /proc/net/softnet_stat.
func backlogFull(t *testing.T) (dropped uint64) {
	t.Helper()
	text, err := os.ReadFile("/proc/net/softnet_stat")
	check(t, err)
	for line := range strings.Lines(string(text)) {
		fields := strings.Fields(line)
		n, err := strconv.ParseUint(fields[1], 16, 64)
		check(t, err)
		dropped += n
	}
	return dropped
}

// TestFloodOfSYNs checks that during a flood of SYNs from forged sources, with SYN cookies, every device connects to
// its own member and is listed with one connection.
func TestFloodOfSYNs(t *testing.T) {
	const slots, cookies = 4, "/proc/sys/net/ipv4/tcp_syncookies"
	was, err := os.ReadFile(cookies)
	check(t, err)
	t.Cleanup(func() { check(t, os.WriteFile(cookies, was, 0)) })
	both(t, func(t *testing.T, lookup bool) {
		for mode := range 3 {
			t.Run(fmt.Sprintf("cookies %d", mode), func(t *testing.T) {
				check(t, os.WriteFile(cookies, []byte(strconv.Itoa(mode)), 0))
				s := serve(t, config(t, lookup, pair...), slots, bpf.NoSlot, nil)
				s.seat(allSlots(slots)...)
				f := newFlooder(t, unix.IPPROTO_TCP, 1790)
				// Half-open connections end with the listeners.
				defer closeAll(s)
				before, full := s.kernelMemory(), backlogFull(t)
				var (
					stop    atomic.Bool
					flooded atomic.Int64
				)
				done := make(chan struct{})
				go func() {
					defer close(done)
					flooded.Store(int64(f.send(0, floodSources(t, 5*forged), &stop)))
				}()
				until(t, "the allowance is used", func() bool {
					unlisted, err := s.Unlisted()
					return err == nil && unlisted > forged/4
				})
				start := time.Now()
				var connected []netip.Addr
				var slowest time.Duration
				devices, limit := 32, patience // with cookies all connect, sooner or later
				if mode == 0 {
					devices, limit = 4, 250*time.Millisecond
				}
				for i := range byte(devices) {
					time.Sleep(10 * time.Millisecond) // the flood goes on
					a := netip.AddrFrom4([4]byte{127, 4, 0, i + 1})
					begun := time.Now()
					if connectWithin(t, a, netip.MustParseAddrPort("127.0.0.1:1790"), limit) {
						connected = append(connected, a)
						slowest = max(slowest, time.Since(begun))
					}
				}
				took := time.Since(start)
				stop.Store(os.Getenv("SOCKEYE_FLOOD_SOURCES") == "") // else all of them
				<-done
				// No connection from 10.0.0.0/8 was accepted.
				s.expect(1, connected)
				if mode != 0 && len(connected) != devices {
					t.Errorf("%d of %d devices connected", len(connected), devices)
				}
				listed := make(map[netip.Addr]bpf.Seen)
				for address, seen := range s.Devices() {
					listed[addrOf(address)] = seen
				}
				for _, a := range connected {
					// A device that has an entry before its handshake completes is also counted for the
					// acknowledgement of a cookie, for which no flags are available. Without cookies, each SYN that a
					// full queue dropped is counted.
					seen, ok := listed[a]
					most := uint64(1)
					if lookup && mode != 0 {
						most = 2
					}
					if !ok || seen.Connections < 1 || mode != 0 && seen.Connections > most || int(seen.Slot) != s.slotOf(a) {
						t.Errorf("%s: listed %v, %+v; it has connected once", a, ok, seen)
					}
				}
				if after := s.kernelMemory(); after != before {
					t.Errorf("%d bytes of maps, before %d", after, before)
				}
				// The last SYNs may still wait for ksoftirqd.
				var counted, dropped uint64
				sent := uint64(flooded.Load())
				until(t, "all SYNs are counted", func() bool {
					all, err := s.Counters(slots)
					check(t, err)
					counted = 0
					for slot := range slots {
						counted += all[slot].Connections
					}
					dropped = backlogFull(t) - full
					return counted+dropped >= sent
				})
				if !lookup && mode != 0 && counted > sent+uint64(devices) {
					t.Errorf("%d connections counted, of %d SYNs, of which %d at most were dropped before", counted, sent+uint64(devices), dropped)
				}
				t.Logf("%d SYNs flooded, %d of %d devices connected in %v, the slowest in %v; counted %d connections, %d of %d places used",
					flooded.Load(), len(connected), devices, took.Round(time.Millisecond), slowest.Round(time.Microsecond), counted, len(listed), s.config.Devices)
			})
		}
	})
}

// connectWithin connects and closes the connection at once.
func connectWithin(t testing.TB, from netip.Addr, to netip.AddrPort, limit time.Duration) bool {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	check(t, err)
	defer unix.Close(fd)
	check(t, unix.Bind(fd, sockaddr.Of(netip.AddrPortFrom(from, 0))))
	if err := unix.Connect(fd, sockaddr.Of(to)); err != nil && err != unix.EINPROGRESS {
		t.Fatal(err)
	}
	if !ready(t, fd, unix.POLLOUT, limit) {
		return false
	}
	value, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
	return err == nil && value == 0
}
