// SPDX-License-Identifier: Apache-2.0

package bpf_test

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/bpf/pin"
	"sockeye/internal/bpf/probe"
	"sockeye/internal/netns"
	"sockeye/internal/placement"
	"sockeye/internal/testenv"
)

// pinned returns the pinned objects below a directory: kind and id by path.
func pinned(t testing.TB, dir string) map[string]string {
	t.Helper()
	all := make(map[string]string)
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || filepath.Ext(path) == ".debug" { // the kernel's own
			return err
		}
		name, err := filepath.Rel(dir, path)
		check(t, err)
		all[name] = describe(t, path)
		return nil
	})
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	return all
}

func describe(t testing.TB, path string) string {
	t.Helper()
	if m, err := ebpf.LoadPinnedMap(path, nil); err == nil {
		defer m.Close()
		info, err := m.Info()
		check(t, err)
		id, _ := info.ID()
		return fmt.Sprintf("map %d", id)
	}
	if p, err := ebpf.LoadPinnedProgram(path, nil); err == nil {
		defer p.Close()
		info, err := p.Info()
		check(t, err)
		id, _ := info.ID()
		return fmt.Sprintf("program %d", id)
	}
	l, err := link.LoadPinnedLink(path, nil)
	check(t, err)
	defer l.Close()
	info, err := l.Info()
	check(t, err)
	return fmt.Sprintf("link %d", info.ID)
}

// changed returns the names that differ.
func changed(a, b map[string]string) []string {
	var names []string
	for name := range a {
		if a[name] != b[name] {
			names = append(names, name)
		}
	}
	for name := range b {
		if _, ok := a[name]; !ok {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// TestAdoption opens a service again, unchanged or changed, while its first opener still has it open and after the
// first opener has exited.
func TestAdoption(t *testing.T) {
	const slots = 4
	both(t, func(t *testing.T, lookup bool) {
		programs := []string{"prog_reuseport_0", "prog_reuseport_1"}
		if lookup {
			programs = []string{"prog_lookup"}
		}
		for _, test := range []struct {
			name   string
			change func(c *bpf.SteerConfig)
			want   []string // pins that change
			port   uint16   // where the datagrams go after that
		}{
			{"the same", func(*bpf.SteerConfig) {}, nil, 4739},
			{"another size of the table of devices", func(c *bpf.SteerConfig) { c.Devices = 64 }, append([]string{"devices"}, programs...), 4739},
			{"no table of devices", func(c *bpf.SteerConfig) { c.Devices = 0 }, append([]string{"devices"}, programs...), 4739},
			{"another listener", func(c *bpf.SteerConfig) {
				c.Listeners[2] = listen(t, "udp [::]:4740")[0]
			}, map[bool][]string{false: {"prog_reuseport_2"}, true: {"prog_lookup"}}[lookup], 4739},
			{"a listener less", func(c *bpf.SteerConfig) {
				c.Listeners[1] = bpf.Listener{}
			}, map[bool][]string{false: {"prog_reuseport_1"}, true: {"prog_lookup"}}[lookup], 4739},
			{"other ports to watch", func(c *bpf.SteerConfig) { c.Ports = []bpf.Ports{{First: 1, Last: 2, Protocol: 6}} }, nil, 4739},
		} {
			for _, alive := range []bool{true, false} {
				t.Run(fmt.Sprintf("%s/%v", test.name, alive), func(t *testing.T) {
					s := serve(t, config(t, lookup, pair...), slots, bpf.NoSlot, deviceMap(t, "127.1.0.0/16,a"))
					s.seat(0, 2)
					udp := newSender(t)
					send := func(port uint16) {
						t.Helper()
						for _, slot := range []int{0, 2} {
							from := s.sourceIn(slot, false)
							udp.send(from, netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), port))
							s.expect(0, []netip.Addr{from})
						}
					}
					send(4739)
					before := pinned(t, s.config.Dir)
					cookie, err := s.Cookie(0, 2)
					check(t, err)
					if cookie != s.seats[2][0].cookie() {
						t.Errorf("cookie %#x, want %#x", cookie, s.seats[2][0].cookie())
					}
					if !alive {
						check(t, s.Close())
						send(4739)
					}
					c := s.config
					test.change(&c)
					s.Steer = open(t, c)
					if got := changed(before, pinned(t, c.Dir)); !slices.Equal(got, test.want) {
						t.Errorf("changed: %q, want %q", got, test.want)
					}
					if again, err := s.Cookie(0, 2); again != cookie {
						t.Errorf("cookie %#x, was %#x: %v", again, cookie, err)
					}
					if slot, err := s.Slot(2); slot != (bpf.Slot{Ready: 1, Pid: uint32(os.Getpid())}) {
						t.Errorf("slot %+v: %v", slot, err)
					}
					table, err := bpf.ReadTable(c.Dir)
					want := s.mapping.Table
					want.Named = 1
					if err != nil || *table != want {
						t.Errorf("another table: %v", err)
					}
					if got, err := bpf.ReadListeners(c.Dir); got != c.Listeners {
						t.Errorf("listeners %v: %v", got, err)
					}
					if !lookup {
						check(t, s.Attach(0, s.keepers[0].fd))
					}
					send(test.port)
					if served, refused := s.total(); refused != 0 || served < 4 {
						t.Errorf("counted %d and %d refused", served, refused)
					}
					if n := seen(s); n > c.Devices {
						t.Errorf("%d devices in a table of %d", n, c.Devices)
					}
					// Counts of the spare map are added to a new table later.
					until(t, "devices are seen", func() bool {
						send(test.port)
						return seen(s) > 0 || c.Devices == 0
					})
					closeAll(s)
				})
			}
		}
	})
}

// seen returns the number of devices seen.
func seen(s *service) (n int) {
	for range s.Devices() {
		n++
	}
	return n
}

// TestLookupMovesToAnotherNamespace attaches the program again after it was attached to another namespace.
func TestLookupMovesToAnotherNamespace(t *testing.T) {
	c := config(t, true, pair...)
	open(t, c)
	before := pinned(t, c.Dir)
	check(t, netns.Thread(func() error {
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil {
			c.Netns, err = os.Open("/proc/thread-self/ns/net")
		}
		return err
	}))
	defer c.Netns.Close()
	open(t, c)
	if got := changed(before, pinned(t, c.Dir)); !slices.Equal(got, []string{"link_lookup"}) {
		t.Errorf("changed: %q, want the link", got)
	}
	l, err := link.LoadPinnedLink(filepath.Join(c.Dir, "link_lookup"), nil)
	check(t, err)
	defer l.Close()
	info, err := l.Info()
	check(t, err)
	var stat unix.Stat_t
	check(t, unix.Fstat(int(c.Netns.Fd()), &stat))
	if got := info.NetNs().NetnsInode; uint64(got) != stat.Ino {
		t.Errorf("attached to namespace %d, want %d", got, stat.Ino)
	}
}

// TestIncompatiblePins replaces each pin with another object.
func TestIncompatiblePins(t *testing.T) {
	both(t, func(t *testing.T, lookup bool) {
		c := config(t, lookup, pair...)
		check(t, open(t, c).Close())
		for name := range pinned(t, c.Dir) {
			t.Run(name, func(t *testing.T) {
				path := filepath.Join(c.Dir, name)
				check(t, os.Rename(path, path+"_kept"))
				defer func() { check(t, os.Rename(path+"_kept", path)) }()
				other, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Hash, KeySize: 4, ValueSize: 5, MaxEntries: 7})
				check(t, err)
				defer other.Close()
				check(t, other.Pin(path))
				defer os.Remove(path)
				before, opened := pinned(t, c.Dir), testenv.Opened(t)
				c := c
				c.Listeners[3] = listen(t, "udp [::]:9999")[0]
				_, err = bpf.OpenSteer(c)
				incompatible, ok := errors.AsType[*pin.IncompatibleError](err)
				if !ok || incompatible.Path != path {
					t.Fatalf("%v, want an incompatible %s", err, path)
				}
				if got := changed(before, pinned(t, c.Dir)); got != nil {
					t.Errorf("changed: %q", got)
				}
				if got, err := bpf.ReadListeners(c.Dir); name != "listeners" && (err != nil || got[3].Address.IsValid()) {
					t.Errorf("listeners %v: %v", got, err)
				}
				opened()
			})
		}
		check(t, open(t, c).Close())
	})
}

func TestReadWithoutPins(t *testing.T) {
	dir := testenv.BPFFS(t)
	if _, err := bpf.ReadTable(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("table: %v", err)
	}
	if _, err := bpf.ReadListeners(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("listeners: %v", err)
	}
	if ids, err := bpf.ReadDevices(dir, []bpf.Address{{}}); err != nil || ids[0] != nil {
		t.Errorf("device: %v, %v", ids, err)
	}
}

// TestListenersAreRecorded writes listeners of every kind and reads them back.
func TestListenersAreRecorded(t *testing.T) {
	c := config(t, false, "udp 0.0.0.0:1", "udp [::]:2", "udp [::]:3 v6only", "tcp 127.0.0.1:4", "tcp [fd00::1]:65535")
	c.Listeners[15] = listen(t, "tcp [::1]:5")[0]
	s := open(t, c)
	if got, err := bpf.ReadListeners(c.Dir); err != nil || got != c.Listeners {
		t.Errorf("read %v, %v", got, err)
	}
	if err := s.Attach(7, 0); err == nil {
		t.Error("a row without a listener has a program")
	}
}

// TestReadDevices compares the lookup in the pinned device map with the reference model.
func TestReadDevices(t *testing.T) {
	m := deviceMap(t, "127.1.0.0/16,a", "::/0,b", "0.0.0.0/1,c")
	s := serve(t, config(t, false, pair[0]), 4, bpf.NoSlot, m)
	var all []netip.Addr
	var keys []bpf.Address
	found := []bool{true, true, false, true}
	for _, text := range []string{"127.1.2.3", "127.2.0.0", "128.0.0.1", "::1"} {
		all = append(all, netip.MustParseAddr(text))
		keys = append(keys, placement.Address(all[len(all)-1]))
	}
	ids, err := bpf.ReadDevices(s.config.Dir, keys)
	check(t, err)
	for i, id := range ids {
		if found[i] != (id != nil) {
			t.Errorf("%s: found %v", all[i], id != nil)
		} else if id != nil && int(s.mapping.Table.Bucket[id.Hash%uint32(bpf.Buckets)]) != s.slotOf(all[i]) {
			t.Errorf("%s: another slot", all[i])
		}
	}
	check(t, s.SetMapping(&s.mapping.Table, nil, func() {}))
	check(t, s.SetMapping(&s.mapping.Table, nil, func() {}))
	if ids, err := bpf.ReadDevices(s.config.Dir, keys); err != nil || ids[0] != nil {
		t.Errorf("without a device map: %v, %v", ids, err)
	}
}

// TestNothingLeaks opens, uses and closes everything.
func TestNothingLeaks(t *testing.T) {
	both(t, func(t *testing.T, lookup bool) {
		c := config(t, lookup, pair...)
		dir := filepath.Join(filepath.Dir(c.Dir), "sockeye")
		use := func() {
			root, err := bpf.OpenRoot(dir)
			check(t, err)
			c.Dir = root.Service("x")
			s := serve(t, c, 4, bpf.NoSlot, deviceMap(t, "127.0.0.0/8,a"))
			s.seat(0, 1)
			events, err := s.Events()
			check(t, err)
			check(t, events.Close())
			for range s.Devices() {
			}
			_, err = s.RunStats()
			check(t, err)
			_, err = bpf.ReadTable(c.Dir)
			check(t, err)
			_, err = bpf.ReadListeners(c.Dir)
			check(t, err)
			_, err = bpf.ReadDevices(c.Dir, []bpf.Address{{}})
			check(t, err)
			_, err = probe.ForeignPrograms(int(c.Netns.Fd()))
			check(t, err)
			again := open(t, c)
			check(t, again.Close())
			for _, k := range s.keepers {
				check(t, bpf.Detach(k.fd))
				check(t, bpf.Detach(k.fd))
			}
			closeAll(s)
			check(t, root.Close())
		}
		use() // what is opened once for all
		opened := testenv.Opened(t)
		for range 3 {
			use()
		}
		opened()
	})
}

func TestRoot(t *testing.T) {
	parent := testenv.BPFFS(t)
	dir := filepath.Join(parent, "sockeye")
	mask := unix.Umask(0)
	root, err := bpf.OpenRoot(dir)
	unix.Umask(mask)
	check(t, err)
	mode := func() fs.FileMode {
		info, err := os.Stat(dir)
		check(t, err)
		return info.Mode().Perm()
	}
	if mode() != 0o700 {
		t.Errorf("mode %o", mode())
	}
	if _, err := bpf.OpenRoot(dir); !errors.Is(err, bpf.ErrLocked) {
		t.Errorf("opened twice: %v", err)
	}
	// The lock of an agent that was killed ends a moment later.
	ended, killed := make(chan error), root
	go func() {
		time.Sleep(50 * time.Millisecond)
		ended <- killed.Close()
	}()
	root, err = bpf.OpenRoot(dir)
	check(t, errors.Join(err, <-ended))
	if err := bpf.RemoveRoot(dir, func() error { t.Error("called"); return nil }); !errors.Is(err, bpf.ErrLocked) {
		t.Errorf("removed while open: %v", err)
	}
	c := config(t, true, pair...)
	for _, name := range []string{"a", "b"} {
		c.Dir = root.Service(name)
		check(t, open(t, c).Close())
		if info, err := os.Stat(c.Dir); err != nil || info.Mode().Perm() != 0o700 {
			t.Errorf("mode of a service: %v, %v", info.Mode(), err)
		}
	}
	names, err := root.Services()
	slices.Sort(names)
	if err != nil || !slices.Equal(names, []string{"a", "b"}) {
		t.Errorf("services %q, %v", names, err)
	}
	before := pinned(t, dir)
	check(t, root.Close())

	check(t, os.Chmod(dir, 0o755))
	root, err = bpf.OpenRoot(dir)
	check(t, err)
	if got := changed(before, pinned(t, dir)); got != nil || mode() != 0o700 {
		t.Errorf("opened again: changed %q, mode %o", got, mode())
	}
	check(t, root.Close())

	boom := errors.New("boom")
	if err := bpf.RemoveRoot(dir, func() error { return boom }); !errors.Is(err, boom) {
		t.Errorf("removed: %v", err)
	}
	if got := changed(before, pinned(t, dir)); got != nil {
		t.Errorf("changed: %q", got)
	}
	check(t, bpf.RemoveRoot(dir, func() error { return nil }))
	if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) || len(pinned(t, parent)) > 0 {
		t.Errorf("left %v, %v", pinned(t, parent), err)
	}
	check(t, bpf.RemoveRoot(dir, func() error { return nil }))
	attached, err := link.QueryPrograms(link.QueryOptions{Target: int(c.Netns.Fd()), Attach: ebpf.AttachSkLookup})
	check(t, err)
	if len(attached.Programs) > 0 {
		t.Errorf("still attached: %v", attached.Programs)
	}
}

func TestRootOfAnotherVersion(t *testing.T) {
	for name, spec := range map[string]*ebpf.MapSpec{
		"a later version": {Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1, Contents: []ebpf.MapKV{{Key: uint32(0), Value: bpf.Schema + 1}}},
		"another type":    {Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1},
		"no entry":        {Type: ebpf.Hash, KeySize: 4, ValueSize: 4, MaxEntries: 1},
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(testenv.BPFFS(t), "sockeye")
			check(t, os.Mkdir(dir, 0o700))
			path := filepath.Join(dir, "schema")
			m, err := ebpf.NewMap(spec)
			check(t, err)
			defer m.Close()
			check(t, m.Pin(path))
			before, opened := pinned(t, dir), testenv.Opened(t)
			for range 2 { // the first leaves no lock
				_, err = bpf.OpenRoot(dir)
				incompatible, ok := errors.AsType[*pin.IncompatibleError](err)
				if !ok || incompatible.Path != path {
					t.Fatalf("%v, want an incompatible %s", err, path)
				}
			}
			if got := changed(before, pinned(t, dir)); got != nil {
				t.Errorf("changed: %q", got)
			}
			opened()
			check(t, bpf.RemoveRoot(dir, func() error { return nil }))
			root, err := bpf.OpenRoot(dir)
			check(t, err)
			check(t, root.Close())
		})
	}
}

// TestRootMountsBPFFS mounts a bpffs on an empty directory, but never over files.
func TestRootMountsBPFFS(t *testing.T) {
	parent := filepath.Join(t.TempDir(), "new", "bpf")
	root, err := bpf.OpenRoot(filepath.Join(parent, "sockeye"))
	check(t, err)
	defer unix.Unmount(parent, unix.MNT_DETACH)
	defer root.Close()
	var stat unix.Statfs_t
	check(t, unix.Statfs(parent, &stat))
	if stat.Type != unix.BPF_FS_MAGIC {
		t.Errorf("file system %#x", stat.Type)
	}

	full := t.TempDir()
	check(t, os.WriteFile(filepath.Join(full, "file"), nil, 0o600))
	if _, err := bpf.OpenRoot(filepath.Join(full, "sockeye")); err == nil {
		unix.Unmount(full, unix.MNT_DETACH)
		t.Error("a bpffs was mounted over a file")
	}
	if names := slices.Collect(maps.Keys(pinned(t, parent))); !slices.Equal(names, []string{"sockeye/schema"}) {
		t.Errorf("pinned: %q", names)
	}
}
