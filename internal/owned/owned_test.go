// SPDX-License-Identifier: Apache-2.0

package owned

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

const nobody = 65534

// below makes a directory with an owner and a mode.
func below(t *testing.T, parent, name string, uid int, mode fs.FileMode) string {
	t.Helper()
	dir := filepath.Join(parent, name)
	if err := errors.Join(os.Mkdir(dir, 0o700), os.Chown(dir, uid, -1), os.Chmod(dir, mode)); err != nil {
		t.Fatal(err)
	}
	return dir
}

func link(t *testing.T, target, name string, uid int) string {
	t.Helper()
	if err := errors.Join(os.Symlink(target, name), os.Lchown(name, uid, -1)); err != nil {
		t.Fatal(err)
	}
	return name
}

func TestCheck(t *testing.T) {
	top := t.TempDir()
	roots := below(t, top, "roots", 0, 0o755)
	shared := below(t, top, "shared", 0, 0o777|fs.ModeSticky)
	loose := below(t, top, "loose", 0, 0o777)
	theirs := below(t, top, "theirs", nobody, 0o755)
	inner := func(dir string) string { return below(t, dir, "inner", 0, 0o700) }
	loop := filepath.Join(top, "loop")
	link(t, "loop", loop, 0)
	for _, c := range []struct {
		name, path string
		untrusted  string // the path that is; "" for none
	}{
		{"root", "/", ""},
		{"root's", roots, ""},
		{"below root's", inner(roots), ""},
		{"readable for a group only", below(t, top, "group", 0, 0o750), ""},
		{"writable for a group", below(t, top, "groups", 0, 0o775), filepath.Join(top, "groups")},
		{"like /tmp", shared, shared},
		{"below /tmp", inner(shared), ""},
		{"writable without the sticky bit", loose, loose},
		{"below such", inner(loose), loose},
		{"of a user", theirs, theirs},
		{"below a user's", inner(theirs), theirs},
		{"a user's below /tmp", below(t, shared, "guest", nobody, 0o700), filepath.Join(shared, "guest")},
		{"root's link", link(t, roots, filepath.Join(top, "link"), 0), ""},
		{"root's relative link", link(t, "../roots/./inner", filepath.Join(roots, "relative"), 0), ""},
		{"through root's link", link(t, "roots", filepath.Join(top, "via"), 0) + "/inner", ""},
		{"root's link below /tmp", link(t, roots, filepath.Join(shared, "link"), 0), ""},
		{"a user's link below /tmp", link(t, roots, filepath.Join(shared, "guests"), nobody), filepath.Join(shared, "guests")},
		{"a link to a user's", link(t, theirs, filepath.Join(top, "astray"), 0), theirs},
	} {
		err := Check(c.path)
		var untrusted *UntrustedError
		if errors.As(err, &untrusted); c.untrusted == "" && err != nil ||
			c.untrusted != "" && (untrusted == nil || untrusted.Path != c.untrusted) {
			t.Errorf("%s: %v, want %q", c.name, err, c.untrusted)
		}
		if made := Make(c.path, 0o755); (made == nil) != (err == nil) {
			t.Errorf("%s: make: %v", c.name, made)
		}
		dir, opened := Open(c.path)
		if (opened == nil) != (err == nil) {
			t.Errorf("%s: open: %v", c.name, opened)
		}
		if opened == nil {
			dir.Close()
		}
	}
	if err := Check(loop); !errors.Is(err, unix.ELOOP) {
		t.Errorf("a loop: %v", err)
	}
	if err := Check(filepath.Join(roots, "none")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("nothing: %v", err)
	}
	if err := Check("relative"); err == nil {
		t.Error("a relative path was accepted")
	}
	file := filepath.Join(roots, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := Check(file); !errors.Is(err, unix.ENOTDIR) {
		t.Errorf("a file: %v", err)
	}
}

func TestMake(t *testing.T) {
	top := t.TempDir()
	shared := below(t, top, "shared", 0, 0o777|fs.ModeSticky)
	for _, path := range []string{filepath.Join(top, "a/b/c"), filepath.Join(shared, "a/b")} {
		if err := Make(path, 0o755); err != nil {
			t.Error(err)
		}
		if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o755 {
			t.Errorf("%v, %v", info, err)
		}
	}
	theirs := below(t, top, "theirs", nobody, 0o755)
	if err := Make(filepath.Join(theirs, "a/b"), 0o755); err == nil {
		t.Error("a directory was made below a user's")
	}
	if entries, _ := os.ReadDir(theirs); len(entries) > 0 {
		t.Errorf("left %v", entries)
	}
}
