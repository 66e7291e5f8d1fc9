// SPDX-License-Identifier: Apache-2.0

package watch

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/lab"
)

// member receives datagrams, and answers each question with their number.
func member([]string) error {
	fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		err = errors.Join(unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1), unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, 4<<20),
			unix.Bind(fd, &unix.SockaddrInet6{Port: port}))
	}
	if err != nil {
		return fmt.Errorf("open socket: %w", err)
	}
	var received atomic.Uint64
	go func() {
		buf := make([]byte, 64)
		for {
			if _, _, err := unix.Recvfrom(fd, buf, 0); err == nil {
				received.Add(1)
			}
		}
	}()
	answers := json.NewEncoder(os.Stdout)
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		if err := answers.Encode(received.Load()); err != nil {
			return err
		}
	}
	return nil
}

// order is the task of a sender.
type order struct {
	Refused float64         `json:"refused"` // datagrams per second to the empty slot
	Served  float64         `json:"served"`  // datagrams per second to the member
	Time    time.Duration   `json:"time"`
	Sources [2][]netip.Addr `json:"sources"` // of the empty slot, and of the member's slot
}

// sender sends datagrams of both rates, and answers with the number of those to the member.
func sender([]string) error {
	lines := bufio.NewReader(os.Stdin)
	text, err := lines.ReadBytes('\n')
	if err != nil {
		return fmt.Errorf("read order: %w", err)
	}
	var o order
	if err := json.Unmarshal(text, &o); err != nil {
		return fmt.Errorf("read order: %w", err)
	}
	empty, err := open(o.Sources[0])
	if err != nil {
		return err
	}
	full, err := open(o.Sources[1])
	if err != nil {
		return err
	}
	var refused sync.WaitGroup
	const threads = 2
	for part := range threads {
		refused.Go(func() {
			paced(o.Refused/threads, o.Time, func(i int) {
				_, _ = empty[(i*threads+part)%len(empty)].WriteToUDPAddrPort([]byte{'r'}, to)
			})
		})
	}
	sent := paced(o.Served, o.Time, func(i int) { _, _ = full[i%len(full)].WriteToUDPAddrPort([]byte{'s'}, to) })
	refused.Wait()
	if err := json.NewEncoder(os.Stdout).Encode(sent); err != nil {
		return err
	}
	_, _ = io.Copy(io.Discard, lines)
	return nil
}

// paced calls f at a rate per second for some time, and returns the number of calls.
func paced(rate float64, length time.Duration, f func(i int)) (n int) {
	for begun := time.Now(); time.Since(begun) < length; time.Sleep(time.Millisecond) {
		for due := int(rate * time.Since(begun).Seconds()); n < due; n++ {
			f(n)
		}
	}
	return n
}

var to = netip.AddrPortFrom(lab.CollectorIPv4, port)

// open opens a socket for each source. The sockets are not connected: otherwise sendmsg(2) would fail instead of sending
// after a port unreachable.
func open(sources []netip.Addr) (list []*net.UDPConn, err error) {
	for _, a := range sources {
		c, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.AddrPortFrom(a, 0)))
		if err != nil {
			return nil, fmt.Errorf("open socket of device %s: %w", a, err)
		}
		list = append(list, c)
	}
	return list, nil
}
