// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/lab"
)

// answerTime is the maximum response time of a member on a busy machine.
const answerTime = 20 * time.Second

// Destinations other than slots.
const (
	refused = -1 // RST, or port unreachable
	silent  = -2 // no response
	broken  = -3 // a connection that was established and reset
)

// landing has the destinations of a device's two streams.
type landing struct{ tcp, udp int }

func (l landing) String() string {
	name := func(slot int) string {
		return map[int]string{refused: "refused", silent: "silent", broken: "broken"}[slot]
	}
	text := func(slot int) string {
		if s := name(slot); s != "" {
			return s
		}
		return strconv.Itoa(slot)
	}
	return "tcp " + text(l.tcp) + " udp " + text(l.udp)
}

func target(from netip.Addr, port uint16) netip.AddrPort {
	if from.Is4() {
		return netip.AddrPortFrom(lab.CollectorIPv4, port)
	}
	return netip.AddrPortFrom(lab.CollectorIPv6, port)
}

// answer reads the slot in a receiver's response, for at most wait.
func answer(c net.Conn, err error, wait time.Duration) int {
	line := make([]byte, 16)
	n := 0
	if err == nil {
		_ = c.SetReadDeadline(time.Now().Add(wait))
		n, err = c.Read(line)
	}
	switch {
	case errors.Is(err, unix.ECONNREFUSED):
		return refused
	case errors.Is(err, unix.ECONNRESET), errors.Is(err, io.EOF):
		return broken
	case os.IsTimeout(err):
		return silent
	case err != nil:
		panic(fmt.Sprintf("probe: %v", err))
	}
	slot, err := strconv.Atoi(strings.TrimSpace(string(line[:n])))
	if err != nil {
		panic(fmt.Sprintf("probe: answer %q", line[:n]))
	}
	return slot
}

// connect opens a connection from an address. The caller must be in the namespace of the address.
func connect(from netip.Addr, port uint16, wait time.Duration) (net.Conn, int) {
	d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(from, 0)), Timeout: answerTime} // includes a retransmission of the SYN
	c, err := d.Dial("tcp", target(from, port).String())
	return c, answer(c, err, wait)
}

func probeTCP(from netip.Addr, port uint16, wait time.Duration) int {
	c, slot := connect(from, port, wait)
	if c != nil {
		_ = c.(*net.TCPConn).SetLinger(0)
		c.Close()
	}
	return slot
}

// probeUDP accepts a response from any port, because members may have ports of their own.
func probeUDP(from netip.Addr, port uint16, wait time.Duration) int {
	level, option := unix.IPPROTO_IP, unix.IP_RECVERR
	if from.Is6() {
		level, option = unix.IPPROTO_IPV6, unix.IPV6_RECVERR
	}
	c := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) error {
		var set error
		err := raw.Control(func(fd uintptr) { set = unix.SetsockoptInt(int(fd), level, option, 1) })
		return errors.Join(err, set)
	}}
	p, err := c.ListenPacket(context.Background(), "udp", netip.AddrPortFrom(from, 0).String())
	if err != nil {
		panic(fmt.Sprintf("probe: %v", err))
	}
	defer p.Close()
	// The kernel guarantees neither the datagram nor an ICMP error. On a busy host it drops datagrams that it cannot
	// queue, and sends no ICMP error while it sends another one (icmp_xmit_lock, Linux 6.18). Therefore, the probe is
	// repeated.
	tries := 1
	if wait >= answerTime {
		tries = 4
	}
	slot := silent
	for range tries {
		_, err = p.WriteTo([]byte("?"), net.UDPAddrFromAddrPort(target(from, port)))
		if slot = answer(p.(*net.UDPConn), err, wait/time.Duration(tries)); slot != silent {
			break
		}
	}
	return slot
}

func probe(from netip.Addr, wait time.Duration) landing {
	return landing{probeTCP(from, bmpPort, wait), probeUDP(from, ipfixPort, wait)}
}

// fromDevices runs f for each address, some at a time, in the devices' namespace.
func (h *host) fromDevices(all []netip.Addr, f func(netip.Addr)) {
	const workers = 4
	var wait sync.WaitGroup
	for w := range workers {
		wait.Go(func() {
			err := h.devices.Do(func() error {
				for i := w; i < len(all); i += workers {
					f(all[i])
				}
				return nil
			})
			if err != nil {
				h.Error(err)
			}
		})
	}
	wait.Wait()
}

// sweep sends from each address by both protocols.
func (h *host) sweep(all []netip.Addr) map[netip.Addr]landing {
	var mu sync.Mutex
	found := map[netip.Addr]landing{}
	h.fromDevices(all, func(a netip.Addr) {
		l := probe(a, answerTime)
		mu.Lock()
		defer mu.Unlock()
		found[a] = l
	})
	return found
}

// lands sends from each address by both protocols, and fails the test for wrong destinations.
func (h *host) lands(when string, all []netip.Addr, where home) {
	h.Helper()
	wrong := 0
	for a, l := range h.sweep(all) {
		if want := where(a); l != (landing{want, want}) {
			if wrong++; wrong <= 5 {
				h.Errorf("%s: %v: %v, want both %v", when, a, l, landing{want, want})
			}
		}
	}
	if wrong > 0 {
		h.Fatalf("%s: %d of %d devices reached a wrong destination", when, wrong, len(all))
	}
}

// but overrides the destinations of devices while some slots are empty.
func (home home) but(empty ...int) home {
	return func(a netip.Addr) int {
		slot := home(a)
		for _, e := range empty {
			if slot == e {
				return refused
			}
		}
		return slot
	}
}

func nowhere(netip.Addr) int { return refused }

// sessions are open connections.
type sessions map[netip.Addr]net.Conn

func (h *host) connectAll(all []netip.Addr) sessions {
	h.Helper()
	s, _ := h.connectSomewhere(all)
	return s
}

// connectSomewhere also returns the slots of the connections.
func (h *host) connectSomewhere(all []netip.Addr) (sessions, map[netip.Addr]int) {
	h.Helper()
	var mu sync.Mutex
	s, at := sessions{}, map[netip.Addr]int{}
	h.fromDevices(all, func(a netip.Addr) {
		c, slot := connect(a, bmpPort, answerTime)
		if slot < 0 {
			h.Errorf("connection of %v: %v", a, landing{tcp: slot})
			return
		}
		mu.Lock()
		defer mu.Unlock()
		s[a], at[a] = c, slot
	})
	h.Cleanup(func() {
		for _, c := range s {
			c.Close()
		}
	})
	return s, at
}

// alive returns the connections that carry data in both directions.
func (s sessions) alive() map[netip.Addr]bool {
	alive := map[netip.Addr]bool{}
	for a, c := range s {
		_ = c.SetDeadline(time.Now().Add(answerTime))
		b := []byte{'?'}
		_, err := c.Write(b)
		if err == nil {
			_, err = io.ReadFull(c, b)
		}
		alive[a] = err == nil
	}
	return alive
}

// traffic is a continuous load: each device sends its next message after the response to the previous one.
type traffic struct {
	mu      sync.Mutex
	landed  map[netip.Addr]map[landing]int
	stop    func()
	stopped sync.WaitGroup
}

func (h *host) startTraffic(all []netip.Addr) *traffic {
	return h.startTrafficThatWaits(all, answerTime)
}

// startTrafficThatWaits sets the maximum wait for a response. Killed members do not respond to messages that they have
// received.
func (h *host) startTrafficThatWaits(all []netip.Addr, wait time.Duration) *traffic {
	ctx, stop := context.WithCancel(h.Context())
	t := &traffic{landed: map[netip.Addr]map[landing]int{}, stop: stop}
	h.Cleanup(func() { t.end() })
	t.stopped.Go(func() {
		for ctx.Err() == nil {
			h.fromDevices(all, func(a netip.Addr) {
				if ctx.Err() != nil {
					return
				}
				l := probe(a, wait)
				time.Sleep(2 * time.Millisecond) // some thousand messages a second; more would slow the other tests
				t.mu.Lock()
				defer t.mu.Unlock()
				if t.landed[a] == nil {
					t.landed[a] = map[landing]int{}
				}
				t.landed[a][l]++
			})
		}
	})
	return t
}

func (t *traffic) count() (n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, landed := range t.landed {
		for _, k := range landed {
			n += k
		}
	}
	return n
}

// more waits until n more messages were sent.
func (h *host) more(t *traffic, n int) {
	h.Helper()
	from := t.count()
	h.eventually("traffic", func() error {
		if sent := t.count() - from; sent < n {
			return fmt.Errorf("sent %d of %d", sent, n)
		}
		return nil
	})
}

func (t *traffic) end() map[netip.Addr]map[landing]int {
	t.stop()
	t.stopped.Wait()
	return maps.Clone(t.landed)
}

// flood sends datagrams without waiting for responses.
func (h *host) flood(all []netip.Addr, n int) {
	h.Helper()
	h.must(h.devices.Do(func() error {
		var open []*net.UDPConn
		for _, a := range all {
			c, err := net.DialUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(a, 0)), net.UDPAddrFromAddrPort(target(a, ipfixPort)))
			if err != nil {
				return err
			}
			defer c.Close()
			open = append(open, c)
		}
		for i := range n {
			if _, err := open[i%len(open)].Write([]byte("?")); err != nil {
				return err
			}
		}
		return nil
	}))
}

// rush opens connections from all addresses at the same time, writes a greeting on each, and returns their states (slot,
// refused, silent or broken) when no connection is in the handshake.
func (h *host) rush(all []netip.Addr, greeting func(netip.Addr) []byte) (open map[netip.Addr]int, failed map[netip.Addr]int) {
	h.Helper()
	open, failed = map[netip.Addr]int{}, map[netip.Addr]int{}
	h.must(h.devices.Do(func() error {
		for _, a := range all {
			domain, to := unix.AF_INET, target(a, bmpPort)
			var from, at unix.Sockaddr
			if a.Is4() {
				from, at = &unix.SockaddrInet4{Addr: a.As4()}, &unix.SockaddrInet4{Addr: to.Addr().As4(), Port: bmpPort}
			} else {
				domain = unix.AF_INET6
				from, at = &unix.SockaddrInet6{Addr: a.As16()}, &unix.SockaddrInet6{Addr: to.Addr().As16(), Port: bmpPort}
			}
			fd, err := unix.Socket(domain, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return err
			}
			open[a] = fd
			if err := unix.Bind(fd, from); err != nil {
				return err
			}
			if err := unix.Connect(fd, at); err != nil && !errors.Is(err, unix.EINPROGRESS) {
				return err
			}
		}
		return nil
	}))
	deadline := time.Now().Add(patience)
	for a, fd := range open {
		if !poll(fd, unix.POLLOUT, deadline) {
			failed[a] = silent
			continue
		}
		code, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
		h.must(err)
		if unix.Errno(code) == unix.ECONNREFUSED {
			failed[a] = refused
		} else if _, err := unix.Write(fd, greeting(a)); code != 0 || err != nil {
			failed[a] = broken
		}
	}
	h.Cleanup(func() {
		for _, fd := range open {
			unix.Close(fd)
		}
	})
	return open, failed
}

func noGreeting(netip.Addr) []byte { return nil }

func poll(fd int, events int16, deadline time.Time) bool {
	for {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: events}}, int(max(0, time.Until(deadline).Milliseconds())))
		if !errors.Is(err, unix.EINTR) {
			return n == 1 && err == nil
		}
	}
}

// readable waits until data can be read, or a connection is closed, or a process has exited.
func readable(fd int) bool { return poll(fd, unix.POLLIN, time.Now().Add(patience)) }

// said returns the slot in the response to a connection of rush.
func said(fd int) int {
	if !readable(fd) {
		return silent
	}
	line := make([]byte, 16)
	n, _ := unix.Read(fd, line)
	slot, err := strconv.Atoi(strings.TrimSpace(string(line[:max(0, n)])))
	if err != nil {
		return broken
	}
	return slot
}
