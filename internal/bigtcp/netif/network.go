// SPDX-License-Identifier: Apache-2.0

package netif

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Network is a network namespace, by sockets that were opened in it. Its methods
// may be called from several goroutines.
type Network struct {
	path  string
	netns *os.File // nil for the caller's own
	id    uint64
	has   Support
	rtnl  *nl.SocketHandle
}

// OpenNetwork opens the network namespace of a path, as in /run/netns/NAME; "" is
// the caller's own. Another one needs CAP_SYS_ADMIN. What is no network namespace
// is an [Error] of KindUsage.
func OpenNetwork(path string) (*Network, error) {
	if path == "" {
		return openNetwork("", nil)
	}
	// A FIFO that is named by mistake must not be waited for.
	netns, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrPermission) {
		return nil, fmt.Errorf("open network namespace: %w", err)
	}
	if err != nil {
		return nil, Refuse(KindUsage, namedHint, "open network namespace: %w", err)
	}
	kind, err := unix.IoctlRetInt(int(netns.Fd()), unix.NS_GET_NSTYPE)
	if err != nil || kind != unix.CLONE_NEWNET {
		netns.Close()
		return nil, Refuse(KindUsage, namedHint, "open network namespace: %s is none", path)
	}
	return openNetwork(path, netns)
}

const namedHint = "name one by its path, as in /run/netns/NAME"

// openNetwork takes netns, and closes it if it fails.
func openNetwork(path string, netns *os.File) (*Network, error) {
	n := &Network{path: path, netns: netns}
	if err := n.Do(n.open); err != nil {
		if netns != nil {
			netns.Close()
		}
		return nil, err
	}
	var err error
	if n.has, err = n.readSupport(); err != nil {
		n.Close()
		return nil, err
	}
	return n, nil
}

func (n *Network) open() error {
	socket, err := nl.Subscribe(unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("open route socket: %w", err)
	}
	// They only remember it.
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

func namespaceID(socket int) (uint64, error) {
	id, err := unix.GetsockoptUint64(socket, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	if !errors.Is(err, unix.ENOPROTOOPT) {
		return id, err
	}
	var stat unix.Stat_t
	err = unix.Stat("/proc/thread-self/ns/net", &stat)
	return stat.Ino, err
}

// Path is what the namespace was opened by; "" for the caller's own.
func (n *Network) Path() string { return n.path }

// ID tells the namespace from others of this life of the host: its cookie
// (SO_NETNS_COOKIE), or before Linux 5.14 its inode.
func (n *Network) ID() uint64 { return n.id }

// Close closes the sockets.
func (n *Network) Close() error {
	n.rtnl.Close()
	if n.netns == nil {
		return nil
	}
	return n.netns.Close()
}

// Do runs f with the thread in the namespace.
func (n *Network) Do(f func() error) error {
	if n.netns == nil {
		return f()
	}
	runtime.LockOSThread()
	home, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("remember network namespace: %w", err)
	}
	defer home.Close()
	if err := unix.Setns(int(n.netns.Fd()), unix.CLONE_NEWNET); err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("enter network namespace %s: %w", n.path, err)
	}
	err = f()
	// A thread that cannot come back stays locked, and ends with its goroutine.
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

// request is a message to the kernel's routing sockets, in the namespace.
func (n *Network) request(kind, flags int) *nl.NetlinkRequest {
	r := nl.NewNetlinkRequest(kind, flags)
	r.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_ROUTE: n.rtnl}
	return r
}

// namedDirs are where ip-netns(8) names namespaces; mostly both are one.
var namedDirs = []string{"/run/netns", "/var/run/netns"}

// NetworkPaths lists the network namespaces that have names, each once.
func NetworkPaths() ([]string, error) {
	var paths []string
	seen := map[uint64]bool{}
	for _, dir := range namedDirs {
		entries, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("list network namespaces: %w", err)
		}
		for _, e := range entries {
			path := filepath.Join(dir, e.Name())
			if inode, ok := namespaceInode(path); ok && !seen[inode] {
				seen[inode] = true
				paths = append(paths, path)
			}
		}
	}
	slices.Sort(paths)
	return paths, nil
}

// namespaceInode is the inode of the namespace at a path; false if there is none.
func namespaceInode(path string) (uint64, bool) {
	var fs unix.Statfs_t
	var stat unix.Stat_t
	if unix.Statfs(path, &fs) != nil || fs.Type != unix.NSFS_MAGIC || unix.Stat(path, &stat) != nil {
		return 0, false
	}
	return stat.Ino, true
}
