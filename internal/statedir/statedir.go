// SPDX-License-Identifier: Apache-2.0

// Package statedir reads and writes files of the state directory, which is kept over reboots.
package statedir

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"sockeye/internal/fault"
)

// Write replaces a file in one step, so that a crash leaves the old
// contents or the new.
func Write(path string, data []byte) (err error) {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	defer func() {
		f.Close()
		if err != nil {
			os.Remove(f.Name())
		}
	}()
	if _, err := f.Write(data); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	if err := f.Sync(); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}

// BootID returns the id of this boot, or "" if /proc does not have the id.
func BootID() string {
	id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(id))
}

// AgentFile is in every agent's state directory.
const AgentFile = ".agent.json"

// Is fails if a directory is not an agent's state directory.
func Is(dir string) error {
	_, err := os.Lstat(filepath.Join(dir, AgentFile))
	return err
}

// Remove removes an agent's state directory, and no other directory.
func Remove(dir string) error {
	if err := Is(dir); err != nil {
		return fault.Usage(fmt.Errorf("%s is not the state directory of an agent: %w", dir, err), "name the agent's directory with --state-dir")
	}
	if err := os.RemoveAll(dir); err != nil {
		return fmt.Errorf("remove state directory: %w", err)
	}
	return nil
}
