// SPDX-License-Identifier: Apache-2.0

package statedir

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestClaim makes directories an agent's own, but not one of others.
func TestClaim(t *testing.T) {
	for name, c := range map[string]struct {
		mode  os.FileMode
		files []string
		want  string
	}{
		"empty":                     {0o755, nil, ""},
		"a file system":             {0o755, []string{"lost+found"}, ""},
		"of an agent":               {0o755, []string{AgentFile, "other"}, ""},
		"of an earlier agent":       {0o700, []string{"applied.yaml"}, ""},
		"records of sizes":          {0o755, []string{"bigtcp/"}, ""},
		"of others":                 {0o755, []string{"data"}, "has files that are not of an agent, for example data"},
		"of others, with the group": {0o750, []string{"data"}, "has files that are not of an agent, for example data"},
	} {
		dir := t.TempDir()
		for _, f := range c.files {
			create := func(path string) error { return os.WriteFile(path, nil, 0o600) }
			if strings.HasSuffix(f, "/") {
				create = func(path string) error { return os.Mkdir(path, 0o700) }
			}
			if err := create(filepath.Join(dir, f)); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.Chmod(dir, c.mode); err != nil {
			t.Fatal(err)
		}
		err := Claim(dir)
		info, failed := os.Stat(dir)
		if failed != nil {
			t.Fatal(failed)
		}
		want := os.FileMode(0o700)
		if c.want != "" {
			want = c.mode
		}
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) || info.Mode().Perm() != want {
			t.Errorf("%s: %v, mode %o", name, err, info.Mode().Perm())
		}
	}
}

// TestCheckSpace fills a file system: the last eighth of a small one is reserved.
func TestCheckSpace(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("small", dir, "tmpfs", 0, "size=800k"); err != nil {
		t.Fatal(err)
	}
	defer unix.Unmount(dir, unix.MNT_DETACH)
	f, err := os.Create(filepath.Join(dir, "record"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	written := 0
	for ; CheckSpace(f) == nil; written += 4096 {
		if _, err := f.Write(make([]byte, 4096)); err != nil {
			t.Fatalf("after %d bytes: %v", written, err)
		}
	}
	if err := CheckSpace(f); !errors.Is(err, unix.ENOSPC) || written < 600<<10 {
		t.Errorf("after %d bytes: %v", written, err)
	}
	if err := Write(filepath.Join(dir, "state"), make([]byte, 50<<10)); err != nil {
		t.Errorf("the state has no space: %v", err)
	}
}
