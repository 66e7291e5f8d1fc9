// SPDX-License-Identifier: Apache-2.0

package netif

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// lookEvery bounds how late a change of sizes is seen.
const lookEvery = 5 * time.Second

// Watch tells of interfaces that appear, vanish or change, perhaps of several changes
// at once, until ctx ends; then the channel is closed. The network must stay open for
// so long. The kernel (6.18) has no message for a change of sizes, so these are read
// every five seconds.
func (n *Network) Watch(ctx context.Context) (<-chan struct{}, error) {
	var events *os.File
	err := n.Do(func() error {
		var err error
		events, err = subscribe()
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("watch interfaces: %w", err)
	}
	return n.follow(ctx, events, lookEvery)
}

// follow is Watch, with a socket that it closes and a time for looking at sizes.
func (n *Network) follow(ctx context.Context, events *os.File, every time.Duration) (<-chan struct{}, error) {
	known, err := n.links()
	if err != nil {
		events.Close()
		return nil, err
	}
	changes := make(chan struct{}, 1)
	stop := context.AfterFunc(ctx, func() { events.Close() })
	go func() {
		defer close(changes)
		defer events.Close()
		defer stop()
		var message [1 << 16]byte
		for events.SetReadDeadline(time.Now().Add(every)) == nil {
			_, err := events.Read(message[:])
			switch {
			case errors.Is(err, os.ErrDeadlineExceeded):
				now, err := n.links()
				if err == nil && slices.EqualFunc(known, now, sameSizes) {
					continue
				}
				known = now
			case err != nil && !errors.Is(err, unix.ENOBUFS): // an overrun
				return
			}
			select {
			case changes <- struct{}{}:
			default:
			}
		}
	}()
	return changes, nil
}

func sameSizes(a, b link) bool {
	return a.Index == b.Index && a.Sizes == b.Sizes && a.TSOMaxSize == b.TSOMaxSize
}

// subscribe opens a socket, in the thread's namespace, that gets a message for every
// interface that appears, vanishes or changes.
func subscribe() (*os.File, error) {
	socket, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, err
	}
	address := &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: 1 << (unix.RTNLGRP_LINK - 1)}
	if err := unix.Bind(socket, address); err != nil {
		unix.Close(socket)
		return nil, err
	}
	return os.NewFile(uintptr(socket), "netlink"), nil
}
