// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/gateway/access"
	"sockeye/internal/sockdiag"
	"sockeye/lab"
)

// behind is the gateway of a puppet that acts as a member in its own network namespace; the test acts as its program.
type behind struct {
	*puppet
	inside *lab.Namespace
}

// Ports of the service on which the program inside listens.
const (
	serviceTCP = 1790
	serviceUDP = 4739
)

func standFor(t *testing.T, sockets ...MemberSocket) *behind {
	t.Helper()
	forwards, err := ListenAsMember(sockets, 2)
	if err != nil {
		t.Fatal(err)
	}
	return standBehind(t, true, forwards...)
}

// standBehind creates the gateway. Without watches, it watches the guest's sockets only if a forward is deferred.
func standBehind(t *testing.T, watches bool, forwards ...Forward) *behind {
	t.Helper()
	l, err := lab.New(t.Context(), lab.Options{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	b := &behind{}
	if b.inside, err = l.Namespace("guest"); err != nil {
		t.Fatal(err)
	}
	c := Config{Forwards: forwards}
	if err := b.inside.Do(func() (err error) {
		c.Diag, err = sockdiag.OpenSocket(watches)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	b.puppet = newPuppet(t, c)
	return b
}

// member returns a forward of a service on the host's addresses with a choice of ports.
func member(protocol uint8, first, last uint16) MemberSocket {
	port := uint16(serviceTCP)
	if protocol == unix.IPPROTO_UDP {
		port = serviceUDP
	}
	return MemberSocket{Protocol: protocol, Address: netip.AddrPortFrom(netip.IPv6Unspecified(), port), First: first, Last: last}
}

// program opens a socket inside.
func (b *behind) program(protocol uint8) interface{ Close() error } {
	b.Helper()
	var c interface{ Close() error }
	if err := b.inside.Do(func() (err error) {
		if protocol == unix.IPPROTO_UDP {
			c, err = net.ListenPacket("udp", fmt.Sprintf(":%d", serviceUDP))
			return err
		}
		var l net.ListenConfig
		l.SetMultipathTCP(false)
		c, err = l.Listen(b.Context(), "tcp", fmt.Sprintf(":%d", serviceTCP))
		return err
	}); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { c.Close() })
	return c
}

// asked waits until the gateway has dumped the guest's sockets several times.
func (b *behind) asked() {
	b.Helper()
	for range 3 {
		b.wait(dumpInterval)
		b.turn(1)
	}
}

// reachable returns whether the host's TCP and UDP ports are open.
func reachable(t testing.TB, tcp, udp uint16) [2]bool {
	t.Helper()
	var open [2]bool
	c, err := net.DialTimeout("tcp", fmt.Sprintf("127.0.0.1:%d", tcp), patience)
	if err == nil {
		open[0] = true
		c.Close()
	} else if !errors.Is(err, unix.ECONNREFUSED) {
		t.Fatal(err)
	}
	u, err := net.Dial("udp", fmt.Sprintf("127.0.0.1:%d", udp))
	if err != nil {
		t.Fatal(err)
	}
	defer u.Close()
	for range 2 { // the second write returns the ICMP error of the first
		_, err = u.Write([]byte("?"))
	}
	open[1] = !errors.Is(err, unix.ECONNREFUSED)
	return open
}

// TestMemberListensWithItsProgram checks that the host's ports are closed before the program listens on all ports and
// after it has closed one of them.
func TestMemberListensWithItsProgram(t *testing.T) {
	for _, closes := range []uint8{unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
		t.Run(access.ProtocolName(closes), func(t *testing.T) {
			b := standFor(t, member(unix.IPPROTO_TCP, 21790, 21790), member(unix.IPPROTO_UDP, 24739, 24739))
			expect := func(when string, want bool) {
				t.Helper()
				if got := reachable(t, 21790, 24739); got != [2]bool{want, want} {
					t.Errorf("%s: TCP and UDP ports open: %v, want both %v", when, got, want)
				}
			}
			b.asked()
			expect("before the program listens", false)
			open := map[uint8]interface{ Close() error }{unix.IPPROTO_TCP: b.program(unix.IPPROTO_TCP)}
			b.asked()
			expect("with the TCP socket only", false)
			open[unix.IPPROTO_UDP] = b.program(unix.IPPROTO_UDP)
			b.until("the gateway to listen", func() bool { return b.g.guestSockets.listening })
			expect("with both sockets", true)
			open[closes].Close()
			b.until("the gateway to close", func() bool { return b.g.guestSockets.closed })
			expect("without "+access.ProtocolName(closes), false)
			b.program(closes)
			b.asked()
			expect("after one socket was closed", false)
		})
	}
}

// TestMemberClosesWarns checks that the gateway logs a warning when the program closes a socket, unless the program
// has exited.
func TestMemberClosesWarns(t *testing.T) {
	for ended, want := range map[bool]string{true: "level=INFO", false: "level=WARN"} {
		b := standFor(t, member(unix.IPPROTO_UDP, 24741, 24741))
		var said bytes.Buffer
		b.g.log = slog.New(slog.NewTextHandler(&said, nil))
		program := b.program(unix.IPPROTO_UDP)
		b.until("the gateway to listen", func() bool { return b.g.guestSockets.listening })
		program.Close()
		b.until("the gateway to close", func() bool { return b.g.guestSockets.closed })
		if strings.Contains(said.String(), "nothing more") {
			t.Errorf("logged before the grace period: %s", said.String())
		}
		b.g.stopping = ended
		b.wait(exitGracePeriod)
		b.turn(1)
		b.asked()
		if n := strings.Count(said.String(), want+` msg="published ports closed" reason="a socket of the program was closed"`); n != 1 {
			t.Errorf("program exited: %v: %d lines with %s\n%s", ended, n, want, said.String())
		}
	}
}

// TestMemberPorts checks that a member uses a free port of its range, and prefers the port of its slot.
func TestMemberPorts(t *testing.T) {
	for _, network := range []string{"tcp", "udp"} {
		for _, port := range []int{22002, 22003} {
			if network == "udp" {
				c, err := net.ListenPacket(network, fmt.Sprintf(":%d", port))
				if err != nil {
					t.Fatal(err)
				}
				defer c.Close()
				continue
			}
			c, err := net.Listen(network, fmt.Sprintf(":%d", port))
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
		}
	}
	b := standFor(t, member(unix.IPPROTO_TCP, 22000, 22004), member(unix.IPPROTO_UDP, 22000, 22004))
	b.program(unix.IPPROTO_TCP)
	b.program(unix.IPPROTO_UDP)
	b.until("the gateway to listen", func() bool { return b.g.guestSockets.listening })
	if got := reachable(t, 22004, 22004); got != [2]bool{true, true} {
		t.Errorf("TCP and UDP ports open on the first free port: %v", got)
	}
}

// TestMemberPortTaken checks that the gateway waits, for a limited time, for a port that the previous member still
// uses.
func TestMemberPortTaken(t *testing.T) {
	before := take(t, 23739)
	b := standFor(t, member(unix.IPPROTO_UDP, 23739, 23739))
	b.program(unix.IPPROTO_UDP)
	b.asked()
	if b.g.guestSockets.listening {
		t.Error("the gateway listens on a port that is in use")
	}
	before.Close()
	b.until("the port", func() bool { b.wait(dumpInterval); return b.g.guestSockets.listening })

	before = take(t, 23740)
	defer before.Close()
	b = standFor(t, member(unix.IPPROTO_UDP, 23740, 23740))
	b.program(unix.IPPROTO_UDP)
	b.asked()
	b.later += bindTimeout
	var failed *ListenError
	for end := time.Now().Add(patience); failed == nil; {
		if _, err := b.g.runTurn(b.events, 1); err != nil && !errors.As(err, &failed) {
			t.Fatal(err)
		}
		if time.Now().After(end) {
			t.Fatal("the gateway continues without a port")
		}
		b.later += dumpInterval
	}
	if !errors.Is(failed, unix.EADDRINUSE) || failed.At.Port() != 23740 {
		t.Errorf("Run returned %v", failed)
	}
}

func take(t *testing.T, port int) net.PacketConn {
	t.Helper()
	c, err := net.ListenPacket("udp", fmt.Sprintf(":%d", port))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// TestMemberRefused checks that a TCP port in use is reported at once, and that no socket remains open.
func TestMemberRefused(t *testing.T) {
	l, err := net.Listen("tcp", ":24790")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	before := descriptors(t)
	_, err = ListenAsMember([]MemberSocket{member(unix.IPPROTO_UDP, 24791, 24791), member(unix.IPPROTO_TCP, 24790, 24790)}, 0)
	var failed *ListenError
	if !errors.As(err, &failed) || !errors.Is(err, unix.EADDRINUSE) || failed.At.Port() != 24790 {
		t.Errorf("error %v", err)
	}
	if n := descriptors(t); n != before {
		t.Errorf("%d descriptors before, %d after", before, n)
	}
}

// TestMemberWithoutDiag checks that the gateway exits if the guest's kernel does not support sock_diag.
func TestMemberWithoutDiag(t *testing.T) {
	b := standFor(t, member(unix.IPPROTO_UDP, 24740, 24740))
	b.g.guestSockets.sendDump()
	message := make([]byte, unix.NLMSG_HDRLEN+4)
	binary.NativeEndian.PutUint32(message, uint32(len(message)))
	binary.NativeEndian.PutUint16(message[4:], unix.NLMSG_ERROR)
	code := -int32(unix.ENOENT)
	binary.NativeEndian.PutUint32(message[unix.NLMSG_HDRLEN:], uint32(code))
	b.g.guestSockets.read(message)
	if _, err := b.g.runTurn(b.events, 0); !errors.Is(err, unix.ENOENT) {
		t.Errorf("the gateway continues: %v", err)
	}
	for n := range message { // truncated messages must not cause a panic
		b.g.guestSockets.read(message[:n])
	}
}
