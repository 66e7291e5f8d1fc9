// SPDX-License-Identifier: Apache-2.0

package testenv

import (
	"encoding/json"
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// Record adds measured values to a JSON file in the directory OUT, which other tests may write to at the same time. Without
// OUT, Record does nothing.
func Record(t testing.TB, name string, values map[string]any) {
	t.Helper()
	dir := os.Getenv("OUT")
	if dir == "" {
		return
	}
	if err := Merge(dir, name, values); err != nil {
		t.Errorf("record %s: %v", name, err)
	}
}

// Merge adds values to a JSON file in a directory, which other processes may write to at the same time.
func Merge(dir, name string, values map[string]any) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	lock, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer lock.Close()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return err
	}
	all := make(map[string]any)
	path := filepath.Join(dir, name)
	text, err := os.ReadFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return err
	default:
		if err := json.Unmarshal(text, &all); err != nil {
			return err
		}
	}
	maps.Copy(all, values)
	if text, err = json.MarshalIndent(all, "", "  "); err != nil {
		return err
	}
	return os.WriteFile(path, append(text, '\n'), 0o644)
}
