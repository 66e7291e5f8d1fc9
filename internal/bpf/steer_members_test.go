// SPDX-License-Identifier: Apache-2.0

package bpf_test

import (
	"bufio"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/member"
	"sockeye/internal/sockaddr"
)

// memberVariable makes the test binary a member: it opens the listeners in the variable, prints a line, and waits for
// its end. SIGUSR1 makes it exit with the status memberExit.
const (
	memberVariable = "SOCKEYE_TEST_MEMBER"
	memberExit     = 3
)

func runMember(listeners string) {
	t := &testing.T{}
	for i, l := range listen(t, strings.Split(listeners, ",")...) {
		if !l.Address.IsValid() {
			break
		}
		reuseport := os.Getenv(memberVariable+"_REUSEPORT") != ""
		newSocket(t, l, reuseport)
		fmt.Println(i)
	}
	end := make(chan os.Signal, 1)
	signal.Notify(end, unix.SIGUSR1)
	fmt.Println("ready")
	<-end
	os.Exit(memberExit)
}

// startMember starts a member in the tests' cgroup.
func startMember(t testing.TB, reuseport bool, listeners ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), memberVariable+"="+strings.Join(listeners, ","))
	if reuseport {
		cmd.Env = append(cmd.Env, memberVariable+"_REUSEPORT=1")
	}
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	check(t, err)
	check(t, cmd.Start())
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	for lines := bufio.NewScanner(out); ; {
		if !lines.Scan() {
			t.Fatalf("the member ends: %v", lines.Err())
		}
		if lines.Text() == "ready" {
			return cmd
		}
	}
}

// register copies a member's sockets and registers them in a slot. The copies stay open until release is called.
func (s *service) register(slot int, cmd *exec.Cmd) (release func()) {
	s.t.Helper()
	handle, err := member.Open(cmd.Process.Pid)
	check(s.t, err)
	defer handle.Close()
	sockets, err := handle.Sockets(func(*member.Socket) bool { return true })
	check(s.t, err)
	for row, l := range s.rows() {
		for _, k := range sockets {
			if k.Protocol == int(l.Protocol) {
				check(s.t, s.Insert(row, bpf.Place(slot), k.FD(), k.Cookie))
			}
		}
	}
	check(s.t, s.SetSlot(slot, bpf.Slot{Ready: 1, Pid: uint32(cmd.Process.Pid)}))
	return func() { member.CloseAll(sockets) }
}

// TestKilledMember kills a process with registered sockets: its whole slot closes without user space, although one of
// the sockets is still open.
func TestKilledMember(t *testing.T) {
	both(t, func(t *testing.T, lookup bool) {
		for _, survivor := range []string{"none", "tcp"} {
			s := serve(t, config(t, lookup, pair...), 2, bpf.NoSlot, nil)
			s.seat(1)
			ports := pair
			if lookup {
				ports = []string{"udp [::]:20000", "tcp [::]:20000"}
			}
			cmd := startMember(t, !lookup, ports...)
			release := s.register(0, cmd)
			if survivor == "none" {
				release()
			} else { // as a plugin that inherited the listener
				handle, err := member.Open(cmd.Process.Pid)
				check(t, err)
				copies, err := handle.Sockets(func(k *member.Socket) bool { return k.Protocol == unix.IPPROTO_TCP })
				check(t, err)
				handle.Close()
				release()
				defer member.CloseAll(copies)
			}
			check(t, s.Close()) // no agent
			outcome := func(protocol int) error {
				return refused(t, protocol, s.sourceIn(0, false), target(s.config.Listeners[map[int]int{unix.IPPROTO_TCP: 1}[protocol]], false))
			}
			for _, protocol := range []int{unix.IPPROTO_UDP, unix.IPPROTO_TCP} {
				if err := outcome(protocol); err != nil {
					t.Errorf("before: protocol %d: %v", protocol, err)
				}
			}
			check(t, cmd.Process.Kill())
			cmd.Wait()
			for _, protocol := range []int{unix.IPPROTO_UDP, unix.IPPROTO_TCP} {
				until(t, fmt.Sprintf("protocol %d is refused", protocol), func() bool {
					return errors.Is(outcome(protocol), unix.ECONNREFUSED)
				})
			}
			s.Steer = open(t, s.config)
			if slot, err := s.Slot(0); err != nil || slot.Ready != 0 || slot.Pid != uint32(cmd.Process.Pid) {
				t.Errorf("slot %+v, %v", slot, err)
			}
			s.collect(0, 0)
			s.collect(1, 0)
			closeAll(s)
		}
	})
}

// events reads the events of the hooks.
func (s *service) events() func(kind bpf.EventKind, cookie uint64) bpf.Event {
	s.t.Helper()
	events, err := s.Events()
	check(s.t, err)
	all := make(chan bpf.Event, 1024)
	ended := make(chan error, 1)
	go func() {
		for {
			e, err := events.Next()
			if err != nil {
				ended <- err
				return
			}
			all <- e
		}
	}()
	s.t.Cleanup(func() {
		events.Close()
		if err := <-ended; !errors.Is(err, os.ErrClosed) {
			s.t.Errorf("events ended: %v", err)
		}
	})
	return func(kind bpf.EventKind, cookie uint64) bpf.Event {
		s.t.Helper()
		select {
		case e := <-all:
			if e.Kind != uint32(kind) || e.Cookie != cookie {
				s.t.Errorf("event %+v, want kind %d of socket %#x", e, kind, cookie)
			}
			return e
		case <-time.After(patience):
			s.t.Fatalf("no event of kind %d of socket %#x", kind, cookie)
		}
		return bpf.Event{}
	}
}

// TestEvents binds, listens and closes, on watched ports and others.
func TestEvents(t *testing.T) {
	c := config(t, true, pair...)
	c.Ports = []bpf.Ports{
		{First: 20000, Last: 20003, Protocol: unix.IPPROTO_TCP},
		{First: 20002, Last: 20002, Protocol: unix.IPPROTO_UDP},
	}
	s := serve(t, c, 4, bpf.NoSlot, nil)
	next := s.events()
	pid := uint32(os.Getpid())
	for _, test := range []struct {
		listener string
		told     bool
	}{
		{"udp [::]:20001", false},
		{"udp [::]:20002", true},
		{"udp 127.0.0.1:20002", true},
		{"udp [::1]:20002 v6only", true},
		{"udp [::]:20003", false},
		{"tcp [::]:19999", false},
		{"tcp [::]:20000", true},
		{"tcp 127.0.0.1:20003", true},
		{"tcp [::1]:20003", true},
		{"tcp 0.0.0.0:20004", false},
	} {
		k := newSocket(t, listen(t, test.listener)[0], false)
		if test.told {
			if e := next(bpf.EventBind, k.cookie()); e.Pid != pid {
				t.Errorf("%s: bound by %d, want %d", test.listener, e.Pid, pid)
			}
			if k.tcp {
				next(bpf.EventListen, k.cookie())
			}
		}
		k.close() // no event: it is not registered
	}

	cmd := startMember(t, false, "udp [::]:20002", "tcp [::]:20001")
	handle, err := member.Open(cmd.Process.Pid)
	check(t, err)
	defer handle.Close()
	sockets, err := handle.Sockets(func(*member.Socket) bool { return true })
	check(t, err)
	for _, k := range sockets { // in the order of their descriptors
		if e := next(bpf.EventBind, k.Cookie); e.Pid != uint32(cmd.Process.Pid) {
			t.Errorf("%s: bound by %d, want %d", k, e.Pid, cmd.Process.Pid)
		}
		if k.Protocol == unix.IPPROTO_TCP {
			next(bpf.EventListen, k.Cookie)
		}
	}
	member.CloseAll(sockets)

	k := s.insert(0, 0)
	cookie := k.cookie()
	k.close()
	next(bpf.EventRelease, cookie)
}

// TestEventsOfAnotherCgroup checks that there are no events for another cgroup.
func TestEventsOfAnotherCgroup(t *testing.T) {
	c := config(t, true, pair...)
	c.Cgroup += "/below"
	check(t, os.Mkdir(c.Cgroup, 0o755))
	t.Cleanup(func() { os.Remove(c.Cgroup) })
	c.Ports = []bpf.Ports{{First: 20000, Last: 20000, Protocol: unix.IPPROTO_UDP}}
	s := serve(t, c, 4, bpf.NoSlot, nil)
	next := s.events()
	newSocket(t, listen(t, "udp [::]:20000")[0], false).close()
	join := func(dir string) { check(t, os.WriteFile(dir+"/cgroup.procs", []byte("0"), 0)) }
	join(c.Cgroup)
	k := newSocket(t, listen(t, "udp [::]:20000")[0], false)
	join(c.Cgroup + "/..")
	next(bpf.EventBind, k.cookie())
}

// TestLostEvents fills the ring: lost events are counted.
func TestLostEvents(t *testing.T) {
	c := config(t, true, pair...)
	c.Ports = []bpf.Ports{{First: 20000, Last: 20000, Protocol: unix.IPPROTO_UDP}}
	s := serve(t, c, 4, bpf.NoSlot, nil)
	const all = 256<<10/24 + 100
	for range all {
		newSocket(discard{t}, listen(t, "udp 127.0.0.1:20000")[0], false).close()
	}
	lost, err := s.LostEvents()
	check(t, err)
	if lost < 50 || lost > 200 {
		t.Errorf("%d of %d events were lost", lost, all)
	}
	events, err := s.Events()
	check(t, err)
	defer events.Close()
	for range all - lost {
		_, err := events.Next()
		check(t, err)
	}
}

// discard is a testing.TB whose sockets are closed before the test ends.
type discard struct{ testing.TB }

func (discard) Cleanup(func()) {}

// TestInsert tries to register sockets that must be refused: the registered sockets stay.
func TestInsert(t *testing.T) {
	s := serve(t, config(t, false, pair...), 4, bpf.NoSlot, nil)
	s.seat(0, 1)
	for _, test := range []struct {
		name string
		k    func() *socket
		row  int
		slot int
		want error
	}{
		{"again", func() *socket { return s.seats[0][0] }, 0, 0, unix.EBUSY},
		{"into another slot", func() *socket { return s.seats[0][0] }, 0, 2, unix.EBUSY},
		{"into a slot that is taken", func() *socket { return s.seats[0][0] }, 0, 1, unix.EBUSY},
		{"without SO_REUSEPORT", func() *socket { return newSocket(t, listen(t, "udp [::]:1")[0], false) }, 0, 2, unix.EINVAL},
		{"SO_REUSEPORT set late", func() *socket {
			k := newSocket(t, listen(t, "udp [::]:1")[0], false)
			check(t, unix.SetsockoptInt(k.fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1))
			return k
		}, 0, 2, unix.EINVAL},
		{"not listening", func() *socket {
			fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
			check(t, err)
			k := &socket{t: t, fd: fd}
			t.Cleanup(k.close)
			check(t, unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1))
			check(t, unix.Bind(fd, sockaddr.Of(s.config.Listeners[1].Address)))
			return k
		}, 1, 2, unix.EINVAL},
	} {
		k := test.k()
		if err := s.Insert(test.row, bpf.Place(test.slot), k.fd, k.cookie()); !errors.Is(err, test.want) {
			t.Errorf("%s: %v, want %v", test.name, err, test.want)
		}
		if k != s.seats[0][0] {
			k.close()
		}
	}
	for _, slot := range []int{0, 1} {
		from := s.sourceIn(slot, false)
		if err := refused(t, unix.IPPROTO_UDP, from, target(s.config.Listeners[0], false)); err != nil {
			t.Errorf("slot %d: %v", slot, err)
		}
		s.expect(0, []netip.Addr{from})
	}
	// The hook still knows the slot of the socket.
	s.seats[0][0].close()
	for slot, ready := range []uint32{0, 1} {
		if state, err := s.Slot(slot); err != nil || state.Ready != ready {
			t.Errorf("slot %d: ready %d, want %d: %v", slot, state.Ready, ready, err)
		}
	}
}

// TestReplace replaces a socket while its slot is open: no packet is refused, and closing the old socket does not
// close the slot.
func TestReplace(t *testing.T) {
	both(t, func(t *testing.T, lookup bool) {
		s := serve(t, config(t, lookup, pair...), 2, bpf.NoSlot, nil)
		s.seat(0, 1)
		old := s.seats[0]
		s.seats[0] = map[int]*socket{0: s.insert(0, 0), 1: s.insert(1, 0)}
		for range 2 {
			clients(func(row, protocol int, v6 bool) {
				from := s.sourceIn(0, v6)
				if err := refused(t, protocol, from, target(s.config.Listeners[row], v6)); err != nil {
					t.Errorf("protocol %d: %v", protocol, err)
				}
				s.expect(row, []netip.Addr{from})
			})
			old[0].close()
			old[1].close()
		}
		s.seats[0][0].close()
		if state, err := s.Slot(0); err != nil || state.Ready != 0 {
			t.Errorf("the slot of a closed socket: %+v, %v", state, err)
		}
	})
}

// TestMigration closes a listener with a connection in its accept queue.
func TestMigration(t *testing.T) {
	const slots = 4
	lacks := lacking(t, "sk_reuseport migration")
	for _, test := range []struct {
		name    string
		standby int
		replace bool // by a new socket in the same slot
		want    int  // slot; -1: reset
	}{
		{"nobody else in the slot", bpf.NoSlot, false, -1},
		{"a successor in the slot", bpf.NoSlot, true, 1},
		{"a standby slot", 3, false, 3},
	} {
		for _, sysctl := range []string{"0", "1"} {
			for _, v6 := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s/tcp_migrate_req=%s/v6=%v", test.name, sysctl, v6), func(t *testing.T) {
					if lacks != nil {
						if sysctl == "1" {
							t.Skipf("kernel: %v", lacks)
						}
						test.want = -1
					} else {
						const path = "/proc/sys/net/ipv4/tcp_migrate_req"
						check(t, os.WriteFile(path, []byte(sysctl), 0))
						defer func() { check(t, os.WriteFile(path, []byte("0"), 0)) }()
					}
					s := serve(t, config(t, false, pair...), slots, test.standby, nil)
					s.seat(allSlots(slots)...)
					from := s.sourceIn(1, v6)
					fd, err := client(t, unix.IPPROTO_TCP, from, target(s.config.Listeners[1], v6))
					check(t, err)
					defer unix.Close(fd)
					old := s.seats[1][1]
					if test.replace {
						s.seats[1][1] = s.insert(1, 1)
					} else {
						delete(s.seats[1], 1)
					}
					old.close()
					if test.want >= 0 {
						if got := s.collect(1, 1); got[test.want][from] != 1 {
							t.Errorf("moved to %v, want slot %d", got, test.want)
						}
						return
					}
					wait(t, fd, unix.POLLIN)
					if _, err := unix.Read(fd, make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
						t.Errorf("read: %v, want %v", err, unix.ECONNRESET)
					}
					s.collect(1, 0)
				})
			}
		}
	}
}
