// SPDX-License-Identifier: Apache-2.0

package sizing

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/internal/bigtcp/netif"
	"sockeye/internal/bigtcp/netif/netiftest"
	"sockeye/internal/sysctl"
	"sockeye/internal/testenv"
)

// TestServer is the entry point of a process in its own namespace.
func TestServer(t *testing.T) { testenv.Serve(t) }

func (h *changeHost) link(name string) netlink.Link {
	h.Helper()
	l, err := netlink.LinkByName(name)
	if err != nil {
		h.Fatalf("find %s: %v", name, err)
	}
	return l
}

func (h *changeHost) remove(name string) {
	h.Helper()
	if err := netlink.LinkDel(h.link(name)); err != nil {
		h.Fatalf("remove %s: %v", name, err)
	}
}

func (h *changeHost) rename(from, to string) {
	h.Helper()
	if err := netlink.LinkSetName(h.link(from), to); err != nil {
		h.Fatalf("rename %s: %v", from, err)
	}
}

// TestVanished deletes one of two interfaces and creates another one with its name.
func TestVanished(t *testing.T) {
	for _, again := range []bool{false, true} {
		t.Run(fmt.Sprint(again), func(t *testing.T) {
			h := newChangeHost(t)
			h.veth("big0")
			h.veth("big1")
			h.apply(Target{"big0", wantOn}, Target{"big1", wantOn})
			h.remove("big0")
			theirs := netiftest.Sizes(100000, 100000, 100000, 100000)
			if again {
				h.veth("big0")
				h.set("big0", theirs)
			}
			status, err := h.Check(h.network)
			if err != nil || len(status) != 2 || status[0].State != StatusGone || status[1].State != StatusOK {
				t.Errorf("status is %v, %v", status, err)
			}
			if got := fmt.Sprint(h.revert()); got != "map[big0:gone big1:reverted]" {
				t.Errorf("reverted are %s", got)
			}
			h.is(sizesOff, "big1")
			if again {
				h.is(theirs, "big0")
			}
			if got := h.recorded(); len(got) > 0 {
				t.Errorf("recorded are %v", got)
			}
		})
	}
}

// TestVanishedAndApplied applies sizes to a new interface with the name of a recorded one.
func TestVanishedAndApplied(t *testing.T) {
	h := newChangeHost(t)
	h.veth("big0")
	h.apply(Target{"big0", wantOn})
	h.remove("big0")
	h.veth("big0")
	theirs := netiftest.Sizes(100000, 100000, 100000, 100000)
	h.set("big0", theirs)
	h.apply(Target{"big0", wantOn})
	h.is(sizesOn, "big0")
	done, err := h.Revert(nil, false)
	if err != nil || len(done) != 2 || done[0].Result+done[1].Result != "gonereverted" {
		t.Errorf("reverted are %+v, %v", done, err)
	}
	h.is(theirs, "big0")
}

func TestRenamed(t *testing.T) {
	h := newChangeHost(t)
	h.veth("big0")
	h.apply(Target{"big0", wantOn})
	h.rename("big0", "bigname")
	defer h.rename("bigname", "big0")
	h.veth("big1")
	if status, err := h.Check(h.network); err != nil || len(status) != 1 || status[0].State != StatusOK || status[0].Interface != "bigname" {
		t.Errorf("status is %v, %v", status, err)
	}
	h.apply(Target{"bigname", Want{IPv6: netif.MaxSize}})
	if got := h.revert("big0"); len(got) > 0 {
		t.Errorf("reverted by the old name: %v", got)
	}
	if got := fmt.Sprint(h.revert("bigname")); got != "map[bigname:reverted]" {
		t.Errorf("reverted are %s", got)
	}
	h.is(sizesOff, "bigname")
}

// sizesIn reads the sizes of lo in another namespace.
func sizesIn(t *testing.T, n *netif.Namespace) netif.Sizes {
	t.Helper()
	var s netif.Sizes
	err := n.Do(func() error {
		lo, err := netlink.LinkByName("lo")
		if err == nil {
			s = attributesOf(lo)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// TestNamespaces applies sizes to interfaces of the same name and index in three namespaces.
func TestNamespaces(t *testing.T) {
	h := newChangeHost(t)
	networks := []*netif.Namespace{openTestNetwork(t, newNamespace(t)), openTestNetwork(t, newNamespace(t)), h.network}
	for _, n := range networks {
		changes, err := h.Apply(n, ByCommand, []Target{{"lo", wantOn}}, false)
		if err != nil || len(changes) != 1 || changes[0].Netns != n.Path() {
			t.Fatal(changes, err)
		}
	}
	for _, n := range networks {
		if got := sizesIn(t, n); got != sizesOn {
			t.Errorf("sizes in %q are %v", n.Path(), got)
		}
		if status, err := h.Check(n); err != nil || len(status) != 1 || status[0].State != StatusOK || status[0].Netns != n.Path() {
			t.Errorf("status in %q is %v, %v", n.Path(), status, err)
		}
	}
	done, err := h.Revert(func(r Record) bool { return r.Netns == networks[0].Path() }, false)
	if err != nil || len(done) != 1 || done[0].Netns != networks[0].Path() || done[0].Result != ResultReverted {
		t.Errorf("reverted are %v, %v", done, err)
	}
	if got := [3]netif.Sizes{sizesIn(t, networks[0]), sizesIn(t, networks[1]), sizesIn(t, networks[2])}; got != [3]netif.Sizes{sizesOff, sizesOn, sizesOn} {
		t.Errorf("sizes are %v", got)
	}
	if done, err := h.Revert(nil, false); err != nil || len(done) != 2 {
		t.Errorf("reverted are %v, %v", done, err)
	}
	for _, n := range networks {
		if got := sizesIn(t, n); got != sizesOff {
			t.Errorf("sizes in %q are %v", n.Path(), got)
		}
	}
}

// TestNamespaceVanished deletes a namespace and mounts another one at its path.
func TestNamespaceVanished(t *testing.T) {
	for _, again := range []bool{false, true} {
		t.Run(fmt.Sprint(again), func(t *testing.T) {
			h := newChangeHost(t)
			h.veth("big0")
			h.apply(Target{"big0", wantOn})
			path := newNamespace(t)
			n, err := netif.OpenNamespace(path)
			if err != nil {
				t.Fatal(err)
			}
			_, err = h.Apply(n, ByCommand, []Target{{"lo", wantOn}}, false)
			n.Close()
			if err == nil {
				err = unix.Unmount(path, 0)
			}
			if err != nil {
				t.Fatal(err)
			}
			if again {
				bindNamespace(t, path)
				other := openTestNetwork(t, path)
				if err := other.Set(1, sizesOn); err != nil {
					t.Fatal(err)
				}
				defer func() {
					if got := sizesIn(t, other); got != sizesOn {
						t.Errorf("sizes in another namespace at the path are %v", got)
					}
				}()
			}
			if got := fmt.Sprint(h.revert()); got != "map[big0:reverted lo:gone]" {
				t.Errorf("reverted are %s", got)
			}
			h.is(sizesOff, "big0")
			if got := h.recorded(); len(got) > 0 {
				t.Errorf("recorded are %v", got)
			}
		})
	}
}

// TestNamespaceMoved finds a namespace without a name by a process in it.
func TestNamespaceMoved(t *testing.T) {
	h := newChangeHost(t)
	process := testenv.StartServer(t, testenv.Cgroup(), "127.0.0.1:0", unix.CLONE_NEWNET)
	there := fmt.Sprintf("/proc/%d/ns/net", process.Process.Pid)
	path := filepath.Join(t.TempDir(), "netns")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount(there, path, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	n := openTestNetwork(t, path)
	_, err := h.Apply(n, ByCommand, []Target{{"lo", wantOn}}, false)
	if err := errors.Join(err, unix.Unmount(path, unix.MNT_DETACH)); err != nil {
		t.Fatal(err)
	}
	done, err := h.Revert(nil, false)
	if err != nil || len(done) != 1 || done[0].Result != ResultReverted || !strings.HasPrefix(done[0].Netns, "/proc/") {
		t.Errorf("reverted are %+v, %v", done, err)
	}
	if got := sizesIn(t, n); got != sizesOff {
		t.Errorf("sizes are %v", got)
	}
}

// TestOtherCaller reverts from another namespace; the record has no path for the caller's namespace.
func TestOtherCaller(t *testing.T) {
	h := newChangeHost(t)
	n := openTestNetwork(t, newNamespace(t))
	h.veth("big0")
	h.apply(Target{"big0", wantOn})
	// For this caller the first namespace is not its own; a process is in it.
	testenv.StartServer(t, testenv.Cgroup(), "127.0.0.1:0", 0)
	err := n.Do(func() error {
		if _, err := h.Apply(openTestNetwork(t, ""), ByCommand, []Target{{"lo", wantOn}}, false); err != nil {
			return err
		}
		done, err := h.Revert(func(r Record) bool { return r.Interface == "big0" }, false)
		if len(done) != 1 || done[0].Result != ResultReverted {
			t.Errorf("reverted are %+v", done)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	h.is(sizesOff, "big0")
	if got := sizesIn(t, n); got != sizesOn {
		t.Errorf("sizes in the other namespace are %v", got)
	}
}

// TestReboot checks that records from before a reboot are void.
func TestReboot(t *testing.T) {
	h := newChangeHost(t)
	h.veth("big0")
	h.apply(Target{"big0", wantOn})
	h.rebooted()
	if got := h.recorded(); len(got) > 0 {
		t.Errorf("recorded are %v", got)
	}
	if left := h.files(); len(left) > 0 {
		t.Errorf("files are left: %v", left)
	}

	h.set("big0", sizesOff)
	h.apply(Target{"big0", wantOn})
	h.rebooted()
	h.before = func() {
		// The record can be deleted.
		h.is(sizesOn, "big0")
	}
	if got := h.revert(); len(got) > 0 {
		t.Errorf("reverted are %v", got)
	}
	h.is(sizesOn, "big0")
	if left := h.files(); len(left) > 0 {
		t.Errorf("files are left: %v", left)
	}

	// A new record can replace it.
	h.before = func() {}
	theirs := netiftest.Sizes(100000, 100000, 100000, 100000)
	h.set("big0", sizesOff)
	h.apply(Target{"big0", wantOn})
	h.rebooted()
	h.set("big0", theirs)
	h.apply(Target{"big0", wantOn})
	h.revert()
	h.is(theirs, "big0")
}

// rebooted changes the boot id in the records.
func (h *changeHost) rebooted() {
	h.Helper()
	id, err := sysctl.Read("kernel.random.boot_id")
	if err != nil {
		h.Fatal(err)
	}
	for _, name := range h.files() {
		path := filepath.Join(h.state, "bigtcp", name)
		data, err := os.ReadFile(path)
		if err == nil {
			err = os.WriteFile(path, []byte(strings.ReplaceAll(string(data), id, "earlier")), 0o600)
		}
		if err != nil {
			h.Fatal(err)
		}
	}
}

// files returns the names of the files of the store.
func (h *changeHost) files() []string {
	h.Helper()
	entries, err := os.ReadDir(filepath.Join(h.state, "bigtcp"))
	if err != nil {
		h.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// TestVanishesMeanwhile deletes an interface during its revert.
func TestVanishesMeanwhile(t *testing.T) {
	h := newChangeHost(t)
	for at := 1; ; at++ {
		h.veth("big0")
		h.veth("big1")
		h.apply(Target{"big0", wantOn}, Target{"big1", wantOn})
		step, first := 0, ""
		h.before = func() {
			if step++; step == at {
				first = fmt.Sprint(h.sizes("big0") == sizesOff)
				h.remove("big0")
			}
		}
		got := fmt.Sprint(h.revert())
		h.before = func() {}
		h.is(sizesOff, "big1")
		if left := h.recorded(); len(left) > 0 {
			t.Errorf("at %d: recorded are %v", at, left)
		}
		want := map[string]string{"": "reverted", "true": "reverted", "false": "gone"}[first]
		if got != fmt.Sprintf("map[big0:%s big1:reverted]", want) {
			t.Errorf("at %d: reverted are %s", at, got)
		}
		h.remove("big1")
		if first == "" {
			h.remove("big0")
			return
		}
	}
}

// TestNotPermitted calls everything without CAP_NET_ADMIN.
func TestNotPermitted(t *testing.T) {
	h := newChangeHost(t)
	h.veth("big0")
	h.veth("big1")
	h.apply(Target{"big1", wantOn})
	records := h.sortedRecords()

	runtime.LockOSThread()
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var all [2]unix.CapUserData
	if err := unix.Capget(&header, &all[0]); err != nil {
		t.Fatal(err)
	}
	less := all
	less[0].Effective &^= 1 << unix.CAP_NET_ADMIN
	if err := unix.Capset(&header, &less[0]); err != nil {
		t.Fatal(err)
	}
	_, errApply := h.Apply(h.network, ByCommand, []Target{{"big0", wantOn}}, false)
	_, errAgain := h.Apply(h.network, ByCommand, []Target{{"big1", Want{IPv6: netif.MaxSize}}}, false)
	_, errRevert := h.Revert(nil, false)
	_, errCheck := h.Check(h.network)
	if err := unix.Capset(&header, &all[0]); err != nil {
		t.Fatal(err)
	}
	runtime.UnlockOSThread()

	for _, err := range []error{errApply, errAgain, errRevert} {
		if !errors.Is(err, fs.ErrPermission) {
			t.Errorf("error is %v", err)
		}
	}
	if errCheck != nil {
		t.Error(errCheck)
	}
	h.is(sizesOff, "big0")
	h.is(sizesOn, "big1")
	if got := h.sortedRecords(); got != records {
		t.Errorf("records are\n%s\nnot\n%s", got, records)
	}
}
