// SPDX-License-Identifier: Apache-2.0

package statedir

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

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
