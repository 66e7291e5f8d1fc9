// SPDX-License-Identifier: Apache-2.0

//go:build linux

package room

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// pair contains the descriptors of both ends of a TCP connection.
type pair struct{ from, to int }

// Calibrate measures the overhead of a packet on this kernel, by a TCP connection over
// loopback with both ends in this process. It needs a network namespace in which lo is up;
// the result is the same in every namespace. Without SO_MEMINFO (before Linux 4.12) the
// result is an upper bound.
func Calibrate() (k Kernel, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("calibrate: %w", err)
		}
	}()
	for _, c := range []func() (*pair, error){connect4, connect6} {
		var p *pair
		if p, err = c(); err != nil {
			continue // the namespace may support a single family
		}
		k, err = p.measure()
		p.close()
		return k, err
	}
	return k, err
}

func connect4() (*pair, error) {
	return connect(unix.AF_INET, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}})
}

func connect6() (*pair, error) {
	return connect(unix.AF_INET6, &unix.SockaddrInet6{Addr: [16]byte{15: 1}})
}

func connect(family int, at unix.Sockaddr) (_ *pair, err error) {
	listener, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(listener)
	if err := unix.Bind(listener, at); err != nil {
		return nil, err
	}
	if err := unix.Listen(listener, 1); err != nil {
		return nil, err
	}
	if at, err = unix.Getsockname(listener); err != nil {
		return nil, err
	}
	p := &pair{-1, -1}
	defer func() {
		if err != nil {
			p.close()
		}
	}()
	if p.from, err = unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0); err != nil {
		return nil, err
	}
	if err := unix.SetsockoptInt(p.from, unix.IPPROTO_TCP, unix.TCP_CORK, 1); err != nil {
		return nil, err
	}
	if err := unix.Connect(p.from, at); err != nil {
		return nil, err
	}
	if p.to, _, err = unix.Accept4(listener, unix.SOCK_CLOEXEC); err != nil {
		return nil, err
	}
	return p, nil
}

func (p *pair) close() {
	unix.Close(p.from)
	unix.Close(p.to)
}

// measure queues one byte, which TCP_CORK prevents from being sent.
func (p *pair) measure() (k Kernel, err error) {
	if _, err := unix.Write(p.from, []byte{0}); err != nil {
		return k, err
	}
	s, err := ReadSnapshot(p.from)
	if err != nil {
		return k, err
	}
	if s.Guessed {
		return Kernel{Overhead: mostOverhead}, nil
	}
	if s.Unsent != 1 || s.Queued <= 1 || s.Queued-1 > mostOverhead {
		return k, fmt.Errorf("a packet with 1 byte uses %d bytes of memory, with %d unsent bytes", s.Queued, s.Unsent)
	}
	return Kernel{Overhead: s.Queued - 1}, nil
}
