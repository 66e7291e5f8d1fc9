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

// pollInterval bounds the delay with which a change of sizes is noticed.
const pollInterval = 5 * time.Second

// Watch signals that interfaces have appeared, vanished or changed, until ctx ends,
// when the channel is closed. Several changes may be one signal. The namespace must
// stay open until then. The kernel (6.18) sends no notification for a change of sizes,
// so that these are polled every five seconds.
func (n *Namespace) Watch(ctx context.Context) (<-chan struct{}, error) {
	var events *os.File
	err := n.Do(func() error {
		var err error
		events, err = subscribe()
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("watch interfaces: %w", err)
	}
	return n.follow(ctx, events, pollInterval)
}

// follow implements Watch with a socket, which it closes, and an interval for polling
// sizes.
func (n *Namespace) follow(ctx context.Context, events *os.File, every time.Duration) (<-chan struct{}, error) {
	known, err := n.links()
	if err != nil {
		events.Close()
		return nil, err
	}
	changes := make(chan struct{}, 1)
	closed := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(closed)
		events.Close()
	})
	go func() {
		defer close(changes)
		defer func() {
			if stop() {
				events.Close()
			} else { // a second Close returns before the first one has closed the descriptor
				<-closed
			}
		}()
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
			case err != nil && !errors.Is(err, unix.ENOBUFS): // ENOBUFS: messages were lost
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

// subscribe opens a netlink socket in the thread's namespace that joins RTNLGRP_LINK.
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
