// SPDX-License-Identifier: Apache-2.0

package netif

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"sockeye/internal/fault"
)

// Namespace is an open network namespace. Its methods are safe for concurrent use.
type Namespace struct {
	path    string
	netns   *os.File // nil for the namespace of the caller
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
	// O_NONBLOCK keeps a FIFO that is named by mistake from blocking.
	netns, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrPermission) {
		return nil, fmt.Errorf("open network namespace: %w", err)
	}
	if err != nil {
		return nil, fault.Usage(fmt.Errorf("open network namespace: %w", err), namedHint)
	}
	kind, err := unix.IoctlRetInt(int(netns.Fd()), unix.NS_GET_NSTYPE)
	if err != nil || kind != unix.CLONE_NEWNET {
		netns.Close()
		return nil, fault.Usage(fmt.Errorf("open network namespace: %s is not a network namespace", path), namedHint)
	}
	return openNamespace(path, netns)
}

const namedHint = "give the path of a network namespace, as in /run/netns/NAME"

// openNamespace takes ownership of netns, also if it fails.
func openNamespace(path string, netns *os.File) (*Namespace, error) {
	n := &Namespace{path: path, netns: netns}
	if err := n.Do(n.open); err != nil {
		if netns != nil {
			netns.Close()
		}
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
	n.id, err = namespaceID(socket.GetFd())
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

// namespaceID returns the cookie of a socket's network namespace (SO_NETNS_COOKIE), or
// the inode of the thread's before Linux 5.14.
func namespaceID(socket int) (uint64, error) {
	id, err := unix.GetsockoptUint64(socket, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	if !errors.Is(err, unix.ENOPROTOOPT) {
		return id, err
	}
	var stat unix.Stat_t
	err = unix.Stat("/proc/thread-self/ns/net", &stat)
	return stat.Ino, err
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
	if n.netns == nil {
		return nil
	}
	return n.netns.Close()
}

// Do calls f on a thread that is in the namespace.
func (n *Namespace) Do(f func() error) error {
	if n.netns == nil {
		return f()
	}
	runtime.LockOSThread()
	home, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("open the thread's network namespace: %w", err)
	}
	defer home.Close()
	if err := unix.Setns(int(n.netns.Fd()), unix.CLONE_NEWNET); err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("enter network namespace %s: %w", n.path, err)
	}
	err = f()
	// A thread that cannot return stays locked and ends with its goroutine.
	if back := unix.Setns(int(home.Fd()), unix.CLONE_NEWNET); back != nil {
		back = fmt.Errorf("leave network namespace %s: %w", n.path, back)
		if err != nil {
			return fmt.Errorf("%w; %w", err, back)
		}
		return back
	}
	runtime.UnlockOSThread()
	return err
}

// request returns a request on the rtnetlink socket of the namespace.
func (n *Namespace) request(kind, flags int) *nl.NetlinkRequest {
	r := nl.NewNetlinkRequest(kind, flags)
	r.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_ROUTE: n.rtnl}
	return r
}
