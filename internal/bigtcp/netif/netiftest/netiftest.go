// SPDX-License-Identifier: Apache-2.0

// Package netiftest creates network namespaces and interfaces for tests.
package netiftest

import (
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/vishvananda/netlink"
	vnetns "github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"sockeye/internal/bigtcp/netif"
	"sockeye/internal/netns"
)

// Sizes returns sizes in bytes.
func Sizes(gso, gro, gsoIPv4, groIPv4 uint32) netif.Sizes {
	return netif.Sizes{GSO: gso, GRO: gro, GSOIPv4: gsoIPv4, GROIPv4: groIPv4}
}

// NamedDir is the directory of named network namespaces.
const NamedDir = "/run/netns"

// hideNamed mounts an empty directory over the host's named namespaces.
var hideNamed = sync.OnceValue(func() error {
	if err := os.MkdirAll(NamedDir, 0o755); err != nil {
		return err
	}
	return unix.Mount("tmpfs", NamedDir, "tmpfs", 0, "mode=0755")
})

// NamedNetns creates a network namespace with a name, as ip netns add does, and returns
// its path.
func NamedNetns(t testing.TB, name string) string {
	t.Helper()
	if err := hideNamed(); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(NamedDir, name)
	if err := os.WriteFile(path, nil, 0o444); err != nil {
		t.Fatal(err)
	}
	InNewNetns(t, func() error { return unix.Mount("/proc/thread-self/ns/net", path, "", unix.MS_BIND, "") })
	t.Cleanup(func() { RemoveNetns(path) })
	return path
}

// RemoveNetns removes a named network namespace.
func RemoveNetns(path string) {
	unix.Unmount(path, unix.MNT_DETACH)
	os.Remove(path)
}

// HeldNetns creates a network namespace that only a descriptor refers to: the namespace
// has no name and no process.
func HeldNetns(t testing.TB) *os.File {
	t.Helper()
	var held *os.File
	InNewNetns(t, func() (err error) {
		held, err = os.Open("/proc/thread-self/ns/net")
		return err
	})
	t.Cleanup(func() { held.Close() })
	return held
}

// InNewNetns calls f on a thread in a new network namespace.
func InNewNetns(t testing.TB, f func() error) {
	t.Helper()
	err := netns.Thread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return err
		}
		return f()
	})
	if err != nil {
		t.Fatal(err)
	}
}

// Open opens a namespace, or with "" the namespace of the test.
func Open(t testing.TB, path string) *netif.Namespace {
	t.Helper()
	n, err := netif.OpenNamespace(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { n.Close() })
	return n
}

// Kernel returns a netlink handle of a namespace, which is independent of the tested code.
func Kernel(t testing.TB, path string) *netlink.Handle {
	t.Helper()
	at := vnetns.None()
	if path != "" {
		var err error
		if at, err = vnetns.GetFromPath(path); err != nil {
			t.Fatal(err)
		}
		defer at.Close()
	}
	h, err := netlink.NewHandleAt(at, unix.NETLINK_ROUTE)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(h.Close)
	return h
}

// AddVeth adds a veth pair for the duration of the test: name in the namespace of h, and
// peer in the namespace other, or also in that of h if other is nil.
func AddVeth(t testing.TB, h *netlink.Handle, name, peer string, other *os.File) {
	t.Helper()
	v := &netlink.Veth{LinkAttrs: Named(name), PeerName: peer}
	if other != nil {
		v.PeerNamespace = netlink.NsFd(int(other.Fd()))
	}
	Add(t, h, v)
}

// Add adds an interface for the duration of the test.
func Add(t testing.TB, h *netlink.Handle, l netlink.Link) {
	t.Helper()
	if err := h.LinkAdd(l); err != nil {
		t.Fatalf("add %s %s: %v", l.Type(), l.Attrs().Name, err)
	}
	// The interface may have vanished with its namespace.
	t.Cleanup(func() { _ = h.LinkDel(l) })
}

// Named returns the attributes of a new interface with a name.
func Named(name string) netlink.LinkAttrs {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = name
	return attrs
}

// OpenFile opens a file for the duration of the test.
func OpenFile(t testing.TB, path string) *os.File {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

// Descriptors counts the open descriptors of this process.
func Descriptors(t testing.TB) int {
	t.Helper()
	open, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(open)
}
