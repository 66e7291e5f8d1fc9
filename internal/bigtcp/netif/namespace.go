// SPDX-License-Identifier: Apache-2.0

package netif

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"sockeye/internal/fault"
	"sockeye/internal/netns"
)

// Namespace is an open network namespace. Its methods are safe for concurrent use.
type Namespace struct {
	path    string
	file    *os.File // nil for the namespace of the caller
	id      uint64
	support Support
	rtnl    *nl.SocketHandle
}

// OpenNamespace opens the network namespace at a path, as in /run/netns/NAME; "" is
// the namespace of the caller. Another namespace needs CAP_SYS_ADMIN. A path without a
// network namespace is a [fault.Error] with CodeUsage.
func OpenNamespace(path string) (*Namespace, error) {
	if path == "" {
		return openNamespace("", nil)
	}
	file, err := netns.Open(path)
	if errors.Is(err, fs.ErrPermission) {
		return nil, err
	}
	if err != nil {
		return nil, fault.Usage(err, namedHint)
	}
	return openNamespace(path, file)
}

const namedHint = "give the path of a network namespace, as in /run/netns/NAME"

// openNamespace takes ownership of file, also if it fails.
func openNamespace(path string, file *os.File) (*Namespace, error) {
	n := &Namespace{path: path, file: file}
	if err := n.Do(n.open); err != nil {
		file.Close() // nothing for the namespace of the caller
		return nil, err
	}
	var err error
	if n.support, err = n.readSupport(); err != nil {
		n.Close()
		return nil, err
	}
	return n, nil
}

func (n *Namespace) open() error {
	socket, err := nl.Subscribe(unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("open route socket: %w", err)
	}
	// These calls only store the timeout.
	_ = socket.SetSendTimeout(&nl.SocketTimeoutTv)
	_ = socket.SetReceiveTimeout(&nl.SocketTimeoutTv)
	n.id, err = namespaceID()
	if err == nil {
		err = socket.SetExtAck(true)
	}
	if err != nil {
		socket.Close()
		return fmt.Errorf("identify network namespace: %w", err)
	}
	n.rtnl = &nl.SocketHandle{Socket: socket}
	return nil
}

// namespaceID returns the cookie of the thread's network namespace, or its inode before
// Linux 5.14.
func namespaceID() (uint64, error) {
	id, err := netns.Cookie(nil)
	if errors.Is(err, unix.ENOPROTOOPT) {
		return netns.Inode()
	}
	return id, err
}

// Path returns the path with which the namespace was opened; "" for that of the
// caller.
func (n *Namespace) Path() string { return n.path }

// ID identifies the namespace until the next boot: its cookie (SO_NETNS_COOKIE), or
// before Linux 5.14 its inode.
func (n *Namespace) ID() uint64 { return n.id }

// Close closes the socket and the namespace.
func (n *Namespace) Close() error {
	n.rtnl.Close()
	if n.file == nil {
		return nil
	}
	return n.file.Close()
}

// Do calls f on a thread that is in the namespace.
func (n *Namespace) Do(f func() error) error {
	err := netns.Do(n.file, f)
	// The hint of an EnterError is that of a service.
	var entering *netns.EnterError
	if errors.As(err, &entering) {
		return fmt.Errorf("enter network namespace %s: %w", n.path, entering.Err)
	}
	return err
}

// request returns a request on the rtnetlink socket of the namespace.
func (n *Namespace) request(kind, flags int) *nl.NetlinkRequest {
	r := nl.NewNetlinkRequest(kind, flags)
	r.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_ROUTE: n.rtnl}
	return r
}
