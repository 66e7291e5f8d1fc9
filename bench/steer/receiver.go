// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"bufio"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"runtime/debug"
	"strings"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The receiver is a minimal collector, which only reads. It answers each line on stdin with its counters. It exits when
// stdin is closed.

// received contains the counters of a receiver since its start.
type received struct {
	Datagrams   uint64        `json:"datagrams"` // with IPFIX data, without templates
	Templates   uint64        `json:"templates"`
	Bytes       uint64        `json:"bytes"` // UDP payload
	Connections uint64        `json:"connections"`
	StreamBytes uint64        `json:"stream_bytes"`
	CPU         time.Duration `json:"cpu_ns"`
	// The process and its UDP socket, for the arms whose program selects that socket.
	PID int `json:"pid"`
	FD  int `json:"fd"`
	// With -sources: counts by source. TCP sessions are counted by the sysName of their BMP Initiation, which a proxy
	// does not change.
	UDP map[string]uint64 `json:"udp,omitempty"`
	TCP map[string]uint64 `json:"tcp,omitempty"`
	// Kept is the number of TCP sessions whose peer has the address that is their sysName.
	Kept uint64 `json:"kept,omitempty"`
}

func receiver(args []string) error {
	fs := flag.NewFlagSet("receiver", flag.ContinueOnError)
	tcp := fs.Uint("tcp", 0, "TCP port")
	udp := fs.Uint("udp", 0, "UDP port")
	_ = fs.String("name", "", "name of the member in the command line, by which the agent matches it")
	sources := fs.Bool("sources", false, "count by source")
	if err := fs.Parse(args); err != nil {
		return err
	}
	// The two loops block in raw system calls and keep their P and thread. This avoids the runtime's overhead for each
	// call, but garbage collection would wait for the loops.
	debug.SetGCPercent(-1)
	runtime.GOMAXPROCS(4)
	l, err := listen(unix.SOCK_STREAM, uint16(*tcp))
	if err != nil {
		return err
	}
	u, err := listen(unix.SOCK_DGRAM, uint16(*udp))
	if err != nil {
		return err
	}
	var d datagramCounters
	var s streamCounters
	failed := make(chan error, 2)
	go func() { failed <- d.read(u, *sources) }()
	go func() { failed <- s.read(l, *sources) }()
	answer := make(chan bool)
	go func() {
		for sc := bufio.NewScanner(os.Stdin); sc.Scan(); {
			answer <- true
		}
		close(answer)
	}()
	enc := json.NewEncoder(os.Stdout)
	for {
		select {
		case err := <-failed:
			return err
		case _, more := <-answer:
			if !more {
				return nil
			}
		}
		r := received{
			Datagrams: d.datagrams.Load(), Templates: d.templates.Load(), Bytes: d.bytes.Load(),
			Connections: s.connections.Load(), StreamBytes: s.bytes.Load(), CPU: ownCPU(),
			PID: os.Getpid(), FD: u,
		}
		if *sources {
			r.UDP, r.TCP, r.Kept = *d.sources.Load(), *s.sources.Load(), s.kept.Load()
		}
		if err := enc.Encode(r); err != nil {
			return err
		}
	}
}

func ownCPU() time.Duration {
	var r unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_SELF, &r)
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}

// listen creates a dual-stack socket on all addresses, as nfacctd does. It uses system calls because package net
// creates MPTCP listeners.
func listen(kind int, port uint16) (int, error) {
	fd, err := unix.Socket(unix.AF_INET6, kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("open socket: %w", err)
	}
	for _, o := range [][3]int{
		{unix.SOL_SOCKET, unix.SO_REUSEPORT, 1},
		{unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 0},
		{unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, receiveBuffer},
	} {
		if kind == unix.SOCK_STREAM && o[1] == unix.SO_RCVBUFFORCE {
			continue // TCP has receive buffer auto-tuning
		}
		if err := unix.SetsockoptInt(fd, o[0], o[1], o[2]); err != nil {
			return -1, fmt.Errorf("set option %d of port %d: %w", o[1], port, err)
		}
	}
	if err := unix.Bind(fd, &unix.SockaddrInet6{Port: int(port)}); err != nil {
		return -1, fmt.Errorf("bind port %d: %w", port, err)
	}
	if kind == unix.SOCK_STREAM {
		if err := unix.Listen(fd, 4096); err != nil {
			return -1, fmt.Errorf("listen on port %d: %w", port, err)
		}
	}
	return fd, nil
}

type mmsghdr struct {
	hdr unix.Msghdr
	len uint32
	_   [4]byte
}

type datagramCounters struct {
	datagrams, templates, bytes atomic.Uint64
	sources                     atomic.Pointer[map[string]uint64]
}

func (c *datagramCounters) read(fd int, bySource bool) error {
	const batch, size = 64, 2048
	var (
		bufs  [batch][size]byte
		names [batch]unix.RawSockaddrInet6
		iov   [batch]unix.Iovec
		msgs  [batch]mmsghdr
	)
	for i := range msgs {
		iov[i].Base = &bufs[i][0]
		iov[i].SetLen(size)
		msgs[i].hdr.Iov = &iov[i]
		msgs[i].hdr.SetIovlen(1)
	}
	seen := map[string]uint64{}
	c.sources.Store(&map[string]uint64{})
	for {
		if bySource {
			for i := range msgs {
				msgs[i].hdr.Name = (*byte)(unsafe.Pointer(&names[i]))
				msgs[i].hdr.Namelen = unix.SizeofSockaddrInet6
			}
		}
		n, _, errno := unix.RawSyscall6(unix.SYS_RECVMMSG, uintptr(fd), uintptr(unsafe.Pointer(&msgs[0])), batch, unix.MSG_WAITFORONE, 0, 0)
		if errno == unix.EINTR || errno == unix.EAGAIN {
			continue
		}
		if errno != 0 {
			return fmt.Errorf("read datagrams: %w", errno)
		}
		var templates, bytes uint64
		for i := range int(n) {
			bytes += uint64(msgs[i].len)
			if bufs[i][17] == 2 && bufs[i][16] == 0 { // ID of the first set
				templates++
			} else if bySource {
				seen[netip.AddrFrom16(names[i].Addr).Unmap().String()]++
			}
		}
		c.bytes.Add(bytes)
		c.templates.Add(templates)
		c.datagrams.Add(uint64(n) - templates)
		if bySource {
			copied := make(map[string]uint64, len(seen))
			for k, v := range seen {
				copied[k] = v
			}
			c.sources.Store(&copied)
		}
	}
}

type streamCounters struct {
	connections, bytes, kept atomic.Uint64
	sources                  atomic.Pointer[map[string]uint64]
}

func (c *streamCounters) read(listener int, bySource bool) error {
	ep, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return fmt.Errorf("read streams: %w", err)
	}
	watch := func(fd int) error {
		return unix.EpollCtl(ep, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(fd)})
	}
	if err := watch(listener); err != nil {
		return fmt.Errorf("read streams: %w", err)
	}
	c.sources.Store(&map[string]uint64{})
	fresh := map[int]string{} // peer addresses of the connections of which nothing was read
	events, buf := make([]unix.EpollEvent, 128), make([]byte, 64<<10)
	for {
		n, _, errno := unix.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(ep), uintptr(unsafe.Pointer(&events[0])), uintptr(len(events)), ^uintptr(0), 0, 0)
		if errno == unix.EINTR {
			continue
		}
		if errno != 0 {
			return fmt.Errorf("read streams: %w", errno)
		}
		for _, e := range events[:n] {
			fd := int(e.Fd)
			if fd == listener {
				conn, peer, err := unix.Accept4(listener, unix.SOCK_CLOEXEC)
				if err == nil {
					err = watch(conn)
				}
				if err != nil && !errors.Is(err, unix.ECONNABORTED) && !errors.Is(err, unix.EINTR) {
					return fmt.Errorf("accept: %w", err)
				}
				c.connections.Add(1)
				if from, ok := peer.(*unix.SockaddrInet6); ok && bySource {
					fresh[conn] = netip.AddrFrom16(from.Addr).Unmap().String()
				}
				continue
			}
			n, _, errno := unix.RawSyscall(unix.SYS_READ, uintptr(fd), uintptr(unsafe.Pointer(&buf[0])), uintptr(len(buf)))
			if errno != 0 || n == 0 { // level-triggered: an EINTR loses no event
				if errno != unix.EINTR {
					unix.Close(fd)
					delete(fresh, fd)
				}
				continue
			}
			c.bytes.Add(uint64(n))
			if peer, ok := fresh[fd]; ok {
				delete(fresh, fd)
				name := initiationName(buf[:n])
				if name == peer {
					c.kept.Add(1)
				}
				copied := map[string]uint64{name: 1}
				for k, v := range *c.sources.Load() {
					copied[k] += v
				}
				c.sources.Store(&copied)
			}
		}
	}
}

// initiationName returns the sysName of a BMP Initiation, which may follow a PROXY header of version 2.
func initiationName(b []byte) string {
	if strings.HasPrefix(string(b), "\r\n\r\n\x00\r\nQUIT\n") && len(b) > 16 {
		b = b[min(len(b), 16+int(b[14])<<8+int(b[15])):]
	}
	for t := b[min(len(b), 6):]; len(t) >= 4; {
		kind, n := t[1], int(t[2])<<8+int(t[3])
		if n > len(t)-4 {
			break
		}
		if kind == 2 {
			return string(t[4 : 4+n])
		}
		t = t[4+n:]
	}
	return "?"
}
