// SPDX-License-Identifier: Apache-2.0

package sizing

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/internal/bigtcp/netif"
	"sockeye/internal/bigtcp/netif/netiftest"
	"sockeye/internal/fault"
)

// large is the size that the tests request, in bytes.
const large = 196608

var (
	sizesOff = netiftest.Sizes(netif.Legacy, netif.Legacy, netif.Legacy, netif.Legacy)
	sizesOn  = netiftest.Sizes(large, large, large, large)
	wantOn   = Want{IPv6: large, IPv4: large}
)

// changeHost has a store and the tests' network namespace.
type changeHost struct {
	*Store
	*testing.T
	network *netif.Namespace
	state   string
}

func newChangeHost(t *testing.T) *changeHost {
	t.Helper()
	state := filepath.Join(t.TempDir(), "state")
	s, err := OpenStore(state)
	if err != nil {
		t.Fatal(err)
	}
	h := &changeHost{s, t, openTestNetwork(t, ""), state}
	if s := h.network.Support(); !s.IPv4 {
		t.Skip("kernel: no sizes of IPv4 before Linux 6.3")
	}
	return h
}

func openTestNetwork(t *testing.T, path string) *netif.Namespace {
	t.Helper()
	n, err := netif.OpenNamespace(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { n.Close() })
	return n
}

// add creates an interface and deletes it when the test ends.
func (h *changeHost) add(l netlink.Link) netlink.Link {
	h.Helper()
	name := l.Attrs().Name
	if err := netlink.LinkAdd(l); err != nil {
		h.Fatalf("add %s: %v", name, err)
	}
	h.Cleanup(func() {
		if l, err := netlink.LinkByName(name); err == nil {
			if err := netlink.LinkDel(l); err != nil {
				h.Errorf("remove %s: %v", name, err)
			}
		}
	})
	found, err := netlink.LinkByName(name)
	if err != nil {
		h.Fatal(err)
	}
	return found
}

// veth creates a pair NAME and NAMEp.
func (h *changeHost) veth(name string) netlink.Link {
	h.Helper()
	return h.add(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: name + "p"})
}

// bridge creates a bridge over existing ports.
func (h *changeHost) bridge(name string, ports ...string) netlink.Link {
	h.Helper()
	b := h.add(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: name}})
	for _, port := range ports {
		l, err := netlink.LinkByName(port)
		if err == nil {
			err = netlink.LinkSetMaster(l, b)
		}
		if err != nil {
			h.Fatalf("make %s a port of %s: %v", port, name, err)
		}
	}
	return b
}

// macvlan creates a macvlan over another interface.
func (h *changeHost) macvlan(name string, lower netlink.Link) netlink.Link {
	h.Helper()
	return h.add(&netlink.Macvlan{
		LinkAttrs: netlink.LinkAttrs{Name: name, ParentIndex: lower.Attrs().Index},
		Mode:      netlink.MACVLAN_MODE_BRIDGE,
	})
}

// sizes reads the sizes of an interface without the package.
func (h *changeHost) sizes(name string) netif.Sizes {
	h.Helper()
	l, err := netlink.LinkByName(name)
	if err != nil {
		h.Fatalf("find %s: %v", name, err)
	}
	return attributesOf(l)
}

func attributesOf(l netlink.Link) netif.Sizes {
	a := l.Attrs()
	return netiftest.Sizes(a.GSOMaxSize, a.GROMaxSize, a.GSOIPv4MaxSize, a.GROIPv4MaxSize)
}

// is checks the sizes of interfaces.
func (h *changeHost) is(want netif.Sizes, names ...string) {
	h.Helper()
	for _, name := range names {
		if got := h.sizes(name); got != want {
			h.Errorf("sizes of %s are %v, not %v", name, got, want)
		}
	}
}

// set sets sizes as another program would.
func (h *changeHost) set(name string, s netif.Sizes) {
	h.Helper()
	l, err := netlink.LinkByName(name)
	if err != nil {
		h.Fatalf("find %s: %v", name, err)
	}
	for _, f := range []struct {
		set  func(netlink.Link, int) error
		size uint32
	}{
		{netlink.LinkSetGSOMaxSize, s.GSO}, {netlink.LinkSetGROMaxSize, s.GRO},
		{netlink.LinkSetGSOIPv4MaxSize, s.GSOIPv4}, {netlink.LinkSetGROIPv4MaxSize, s.GROIPv4},
	} {
		if err := f.set(l, int(f.size)); err != nil {
			h.Fatalf("set sizes of %s to %v: %v", name, s, err)
		}
	}
}

// apply applies sizes on behalf of a command.
func (h *changeHost) apply(targets ...Target) []Change {
	h.Helper()
	changes, err := h.Apply(h.network, ByCommand, targets, false)
	if err != nil {
		h.Fatalf("apply %v: %v", targets, err)
	}
	return changes
}

// revert reverts the named interfaces, or all, and returns the results as text.
func (h *changeHost) revert(names ...string) map[string]string {
	h.Helper()
	done, err := h.Revert(named(names...), false)
	if err != nil {
		h.Fatalf("revert %v: %v", names, err)
	}
	return results(done)
}

func named(names ...string) func(Record) bool {
	if len(names) == 0 {
		return nil
	}
	return func(r Record) bool {
		for _, name := range names {
			if r.Interface == name {
				return true
			}
		}
		return false
	}
}

func results(done []Reverted) map[string]string {
	words := map[string]string{}
	for _, r := range done {
		words[r.Interface] = r.Result
	}
	return words
}

// recorded returns the names in the records.
func (h *changeHost) recorded() []string {
	h.Helper()
	records, err := h.Records()
	if err != nil {
		h.Fatal(err)
	}
	names := []string{}
	for _, r := range records {
		names = append(names, r.Interface)
	}
	return names
}

// failsAs checks the code of an error and returns its hint.
func failsAs(t *testing.T, err error, code int) string {
	t.Helper()
	var e *fault.Error
	if !errors.As(err, &e) || e.Code != code {
		t.Fatalf("error %v does not have code %d", err, code)
	}
	return e.Hint
}

// newNamespace creates a network namespace, mounts it at a name in the directory of the test, and returns the path.
func newNamespace(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "netns")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	bindNamespace(t, path)
	t.Cleanup(func() {
		if err := unix.Unmount(path, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) {
			t.Errorf("unmount %s: %v", path, err)
		}
	})
	return path
}

// bindNamespace mounts a new network namespace over a file.
func bindNamespace(t *testing.T, path string) {
	t.Helper()
	netiftest.InNewNetns(t, func() error { return unix.Mount("/proc/thread-self/ns/net", path, "", unix.MS_BIND, "") })
}
