// SPDX-License-Identifier: Apache-2.0

package sizing

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"sockeye/internal/bigtcp/netif"
	"sockeye/internal/fault"
	"sockeye/internal/sysctl"
)

func TestStoreIsPrivate(t *testing.T) {
	h := newChangeHost(t)
	h.veth("big0")
	if got, err := h.Records(); err != nil || got != nil {
		t.Errorf("without a state directory, records are %v, %v", got, err)
	}
	if got := h.revert(); len(got) > 0 {
		t.Errorf("without a state directory, reverted are %v", got)
	}
	if changes, err := h.Plan(h.network, ByCommand, []Target{{"big0", wantOn}}, false); err != nil || len(changes) != 1 {
		t.Errorf("without a state directory, the plan is %v, %v", changes, err)
	}
	if _, err := os.Stat(h.state); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("to look has made the state directory: %v", err)
	}
	h.apply(Target{"big0", wantOn})
	for _, path := range []string{h.state, filepath.Join(h.state, "bigtcp")} {
		if info, err := os.Stat(path); err != nil || info.Mode() != fs.ModeDir|0o700 {
			t.Errorf("%s is %v, %v", path, info.Mode(), err)
		}
	}
	files := h.files()
	if len(files) != 1 {
		t.Fatalf("files are %v", files)
	}
	if info, err := os.Stat(filepath.Join(h.state, "bigtcp", files[0])); err != nil || info.Mode() != 0o600 {
		t.Errorf("the record is %v, %v", info.Mode(), err)
	}
	// Another user has opened it.
	if err := os.Chmod(filepath.Join(h.state, "bigtcp"), 0o777); err != nil {
		t.Fatal(err)
	}
	h.apply(Target{"big0", Want{IPv6: netif.MaxSize}})
	if info, err := os.Stat(filepath.Join(h.state, "bigtcp")); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("the folder is %v, %v", info.Mode(), err)
	}
	h.revert()
	if files := h.files(); len(files) != 0 {
		t.Errorf("files are left: %v", files)
	}
}

// TestStoreRefuses opens state directories that are not directories, or belong to another user.
func TestStoreRefuses(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	linked := t.TempDir()
	if err := os.Symlink(t.TempDir(), filepath.Join(linked, "bigtcp")); err != nil {
		t.Fatal(err)
	}
	taken := t.TempDir()
	if err := os.WriteFile(filepath.Join(taken, "bigtcp"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, dir := range map[string]string{"none": "", "a file": file, "in a file": file + "/state", "a symlink": linked, "a file in it": taken} {
		_, err := OpenStore(dir)
		if err == nil {
			t.Errorf("%s is opened", name)
			continue
		}
		failsAs(t, err, fault.CodeUsage)
	}

	h := newChangeHost(t)
	h.veth("big0")
	theirs := filepath.Join(h.state, "bigtcp")
	err := os.MkdirAll(theirs, 0o700)
	if err == nil {
		err = os.Chown(theirs, 65534, 65534)
	}
	if err != nil {
		t.Fatal(err)
	}
	_, err = h.Apply(h.network, ByCommand, []Target{{"big0", wantOn}}, false)
	failsAs(t, err, fault.CodeUsage)
	_, err = h.Revert(nil, true)
	failsAs(t, err, fault.CodeUsage)
	_, err = h.Records()
	failsAs(t, err, fault.CodeUsage)
	h.is(sizesOff, "big0")

	// The directory is replaced after the store was opened.
	if err := errors.Join(os.Remove(theirs), os.Symlink(t.TempDir(), theirs)); err != nil {
		t.Fatal(err)
	}
	if _, err = h.Apply(h.network, ByCommand, []Target{{"big0", wantOn}}, false); !errors.Is(err, unix.ENOTDIR) && !errors.Is(err, unix.ELOOP) {
		t.Errorf("with a symlink, error is %v", err)
	}
	h.is(sizesOff, "big0")
}

func mount(t *testing.T, dir, options string) {
	t.Helper()
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, options); err != nil {
		t.Fatalf("mount at %s: %v", dir, err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Errorf("unmount %s: %v", dir, err)
		}
	})
}

// TestReadOnly uses a state directory on a file system that becomes read-only.
func TestReadOnly(t *testing.T) {
	h := newChangeHost(t)
	h.veth("big0")
	h.veth("big1")
	mount(t, h.state, "")
	remount := func(flags uintptr) {
		t.Helper()
		if err := unix.Mount("", h.state, "", unix.MS_REMOUNT|flags, ""); err != nil {
			t.Fatal(err)
		}
	}
	remount(unix.MS_RDONLY)
	refused := func() {
		t.Helper()
		if _, err := h.Apply(h.network, ByCommand, []Target{{"big0", wantOn}}, false); !errors.Is(err, unix.EROFS) {
			t.Errorf("error is %v", err)
		}
		h.is(sizesOff, "big0")
	}
	refused()
	remount(0)
	h.apply(Target{"big1", wantOn})
	remount(unix.MS_RDONLY)
	refused()
	if got := fmt.Sprint(h.recorded()); got != "[big1]" {
		t.Errorf("recorded are %s", got)
	}
	// The sizes are reverted; the store notices that when it can delete the record.
	if _, err := h.Revert(nil, false); !errors.Is(err, unix.EROFS) {
		t.Errorf("error is %v", err)
	}
	h.is(sizesOff, "big1")
	remount(0)
	if got := fmt.Sprint(h.revert()); got != "map[big1:already]" {
		t.Errorf("reverted are %s", got)
	}
}

// TestDiskFull has space for fewer records than there are interfaces.
func TestDiskFull(t *testing.T) {
	h := newChangeHost(t)
	var targets []Target
	for n := range 4 {
		name := fmt.Sprintf("big%d", n)
		h.veth(name)
		targets = append(targets, Target{name, wantOn})
	}
	for pages := range 5 {
		mount(t, h.state, fmt.Sprintf("nr_blocks=%d", pages+1))
		_, err := h.Apply(h.network, ByCommand, targets, false)
		if err == nil {
			h.is(sizesOn, "big0", "big1", "big2", "big3")
			h.revert()
		} else if !errors.Is(err, unix.ENOSPC) {
			t.Errorf("error is %v", err)
		}
		if enough := pages+1 > len(targets); enough != (err == nil) {
			t.Errorf("with %d pages, error is %v", pages+1, err)
		}
		h.is(sizesOff, "big0", "big1", "big2", "big3")
		if files := h.files(); len(files) > 0 {
			t.Errorf("with %d pages, files are left: %v", pages+1, files)
		}
	}
}

// TestGarbage has files of every kind in the place of the records.
func TestGarbage(t *testing.T) {
	h := newChangeHost(t)
	h.veth("big0")
	h.veth("big1")
	h.apply(Target{"big0", wantOn}, Target{"big1", wantOn})
	dir := filepath.Join(h.state, "bigtcp")
	good := filepath.Join(dir, fileName(h.network.ID(), h.link("big0").Attrs().Index))
	data, err := os.ReadFile(good)
	if err != nil {
		t.Fatal(err)
	}
	secret := filepath.Join(t.TempDir(), "secret")
	write := func(name string, data []byte) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(secret, data, 0o600); err != nil {
		t.Fatal(err)
	}
	write("1-9.json", nil) // as after a loss of power
	write("1-1.json", []byte("\x00"))
	write("1-2.json", data[:len(data)/2])
	write("1-3.json", []byte("\x00\xff{}"))
	write("1-4.json", []byte("{}"))
	write("1-5.json", data) // of another interface
	write("1-6.json", []byte(strings.Repeat(" ", maxRecordSize)+string(data)))
	write("1-7.json", []byte(`{"boot_id":"x","index":-7}`))
	write("99999999999999999999999999-1.json", []byte("[]"))
	if err := errors.Join(os.Symlink(secret, filepath.Join(dir, "2-1.json")), os.Symlink("2-2.json", filepath.Join(dir, "2-2.json")),
		unix.Mkfifo(filepath.Join(dir, "2-3.json"), 0o600), os.Mkdir(filepath.Join(dir, "2-4.json"), 0o700),
		unix.Mknod(filepath.Join(dir, "2-5.json"), unix.S_IFSOCK|0o600, 0)); err != nil {
		t.Fatal(err)
	}
	damaged := []string{"1-1", "1-2", "1-3", "1-4", "1-5", "1-6", "1-7", "2-1", "2-2", "2-3", "2-4", "2-5", "99999999999999999999999999-1"}
	write(".1-1.json.ABC234", data)
	others := []string{"README", "x.json", "-1.json", "1-1.json.old"}
	for _, name := range others {
		write(name, []byte("anything"))
	}

	if got := h.recorded(); !slices.Equal(got, []string{"big0", "big1"}) && !slices.Equal(got, []string{"big1", "big0"}) {
		t.Errorf("recorded are %v", got)
	}
	var want []string
	for _, name := range damaged {
		want = append(want, filepath.Join(dir, name+".json.damaged"))
	}
	slices.Sort(want)
	got, err := h.Damaged()
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("damaged are %v, %v", got, err)
	}
	for _, name := range []string{".1-1.json.ABC234", "1-9.json"} {
		if _, err := os.Lstat(filepath.Join(dir, name)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s, which a killed writer left, is still there: %v", name, err)
		}
	}
	if after, err := os.ReadFile(secret); err != nil || string(after) != string(data) {
		t.Errorf("what a symlink leads to has changed: %v", err)
	}

	// Revert reports each unreadable record once, and reverts the others.
	write(filepath.Base(good), data[1:])
	done, err := h.Revert(nil, false)
	if want := "revert damaged records: " + good + ".damaged"; err == nil || err.Error() != want {
		t.Errorf("error is %v, not %q", err, want)
	}
	if got := fmt.Sprint(results(done)); got != "map[big1:reverted]" {
		t.Errorf("reverted are %s", got)
	}
	h.is(sizesOff, "big1")
	h.is(sizesOn, "big0")
	if got := h.revert(); len(got) > 0 {
		t.Errorf("reverted again are %v", got)
	}
	for _, name := range others {
		if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
			t.Errorf("a file of another user: %v", err)
		}
	}
}

// TestGarbageInTheWay uses another file where a record is to be written.
func TestGarbageInTheWay(t *testing.T) {
	h := newChangeHost(t)
	h.veth("big0")
	dir := filepath.Join(h.state, "bigtcp")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, fileName(h.network.ID(), h.link("big0").Attrs().Index))
	victim := filepath.Join(t.TempDir(), "victim")
	for name, put := range map[string]func() error{
		"a symlink": func() error { return os.Symlink(victim, path) },
		"a folder":  func() error { return os.MkdirAll(path+"/x", 0o700) },
		"a pipe":    func() error { return unix.Mkfifo(path, 0o600) },
		"a file":    func() error { return os.WriteFile(path, []byte("x"), 0o600) },
	} {
		for range 2 {
			if err := put(); err != nil {
				t.Fatal(err)
			}
			h.apply(Target{"big0", wantOn})
			h.is(sizesOn, "big0")
			if got := fmt.Sprint(h.revert()); got != "map[big0:reverted]" {
				t.Errorf("with %s, reverted are %s", name, got)
			}
			h.is(sizesOff, "big0")
		}
	}
	if _, err := os.Lstat(victim); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("it was written through a symlink: %v", err)
	}
}

// FuzzRecord parses arbitrary files: each is a record, damaged, or void.
func FuzzRecord(f *testing.F) {
	id, err := sysctl.Read("kernel.random.boot_id")
	if err != nil {
		f.Fatal(err)
	}
	f.Add([]byte(fmt.Sprintf(`{"boot_id":%q,"netns_id":"1","interface":"eth0","index":2,"owner":"command","before":{"gso_max_size":65536},"applied":{"gso_max_size":65536}}`, id)))
	f.Add([]byte(`{"boot_id":"earlier","netns_id":"1","index":2,"owner":"x","before":{"gso_max_size":1},"applied":{"gso_max_size":1}}`))
	f.Add([]byte(`{"netns_id":1e99}`))
	f.Add([]byte{})
	dir := f.TempDir()
	s, err := OpenStore(dir)
	if err != nil {
		f.Fatal(err)
	}
	d, err := s.create()
	if err != nil {
		f.Fatal(err)
	}
	defer d.Close()
	f.Fuzz(func(t *testing.T, data []byte) {
		if err := os.WriteFile(filepath.Join(dir, "bigtcp", "1-2.json"), data, 0o600); err != nil {
			t.Fatal(err)
		}
		r, err := d.read("1-2.json")
		var damage *damageError
		switch {
		case err == nil && (r.BootID != id || r.NetnsID != 1 || r.Index != 2 || r.Before.GSO == 0):
			t.Errorf("%q is read as %+v", data, r)
		case err != nil && !errors.Is(err, errEarlierBoot) && !errors.As(err, &damage):
			t.Errorf("%q: %v", data, err)
		}
	})
}

// TestLeavesNothingOpen uses every function of the store and counts descriptors.
func TestLeavesNothingOpen(t *testing.T) {
	h := newChangeHost(t)
	h.veth("big0")
	path := newNamespace(t)
	n, err := netif.OpenNamespace(path)
	if err != nil {
		t.Fatal(err)
	}
	open := func() int {
		entries, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(entries)
	}
	work := func() {
		h.apply(Target{"big0", wantOn})
		if _, err := h.Apply(n, ByCommand, []Target{{"lo", wantOn}}, false); err != nil {
			t.Fatal(err)
		}
		if _, err := h.Apply(n, ByPolicy, []Target{{"lo", wantOn}}, false); err == nil {
			t.Error("another owner's interface is taken")
		}
		if _, err := h.Plan(n, ByCommand, []Target{{"lo", wantOn}}, false); err != nil {
			t.Error(err)
		}
		if _, err := h.Check(n); err != nil {
			t.Error(err)
		}
		h.revert()
	}
	work() // the first use opens what the runtime keeps
	before := open()
	work()
	if after := open(); after > before {
		t.Errorf("%d descriptors are open, %d before", after, before)
	}
	if _, err := h.Apply(n, ByCommand, []Target{{"lo", wantOn}}, false); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(n.Close(), unix.Unmount(path, 0)); err != nil {
		t.Fatal(err)
	}
	before = open()
	if got := fmt.Sprint(h.revert()); got != "map[lo:gone]" {
		t.Errorf("reverted are %s", got)
	}
	if after := open(); after > before {
		t.Errorf("%d descriptors are open, %d before", after, before)
	}
}
