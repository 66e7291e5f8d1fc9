// SPDX-License-Identifier: Apache-2.0

// Package statedir reads and writes files of the agent's state directory, which outlives a reboot.
package statedir

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"sockeye/internal/fault"
	"sockeye/internal/sysctl"
)

// Write replaces a file atomically: after a crash, the file has either the old or the new contents.
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

// BootID returns the kernel's random id of the current boot, or "" if it cannot be read.
func BootID() string {
	id, _ := sysctl.Read("kernel.random.boot_id")
	return id
}

// Claim makes a directory that of an agent: nobody else may read it. The error is a usage error for a directory without the mark of an agent that
// has files of others.
func Claim(dir string) error {
	info, err := os.Stat(dir)
	if err != nil {
		return fmt.Errorf("read state directory: %w", err)
	}
	names, err := contents(dir)
	if err != nil {
		return err
	}
	if Is(dir) != nil && !onlyRecords(dir) {
		open := info.Mode().Perm()&0o077 != 0 // an agent writes nothing before the directory is its own
		if i := slices.IndexFunc(names, func(name string) bool { return open || isForeign(dir, name) }); i >= 0 {
			return fault.Usage(fmt.Errorf("the state directory %s has files that are not of an agent, for example %s", dir, names[i]),
				"name a directory of the agent's own with --state-dir")
		}
	}
	if err := os.Chmod(dir, 0o700); err != nil {
		return fmt.Errorf("set mode of state directory: %w", err)
	}
	return nil
}

// isForeign reports whether a file of a directory without a mark is not of an agent. Other programs have JSON files too: the file of a service has a
// nonce.
func isForeign(dir, name string) bool {
	if foreign(name) {
		return true
	}
	if strings.HasPrefix(name, ".") || filepath.Ext(name) != ".json" {
		return false
	}
	if info, err := os.Lstat(filepath.Join(dir, name)); err != nil || !info.Mode().IsRegular() {
		return true // to read a FIFO would block
	}
	data, err := os.ReadFile(filepath.Join(dir, name))
	return err != nil || !bytes.Contains(data, []byte(`"nonce"`))
}

// records is the subdirectory of the records of sizes (internal/bigtcp/sizing).
const records = "bigtcp"

// Remove removes an agent's state directory, or one that has only had records of sizes, and no directory that has files of others.
func Remove(dir string) (err error) {
	if err := CheckRemove(dir); err != nil {
		return err
	}
	if onlyRecords(dir) { // without records, which describe changed interfaces
		if err = os.Remove(filepath.Join(dir, records)); err == nil {
			err = os.Remove(dir)
		}
	} else {
		err = os.RemoveAll(dir)
	}
	if err != nil {
		return fmt.Errorf("remove state directory: %w", err)
	}
	return nil
}

// CheckRemove returns an error if Remove does not remove a directory.
func CheckRemove(dir string) error {
	if err := Is(dir); err != nil && !onlyRecords(dir) {
		return fault.Usage(fmt.Errorf("%s is not the state directory of an agent: %w", dir, err), "name the agent's directory with --state-dir")
	}
	names, err := contents(dir)
	if err != nil {
		return err
	}
	if i := slices.IndexFunc(names, foreign); i >= 0 {
		return fault.Usage(fmt.Errorf("%s has files that are not of an agent, for example %s", dir, names[i]),
			"move them to another directory, or leave --state out")
	}
	return nil
}

// AgentFile is the name of the file that marks a directory as an agent's state directory.
const AgentFile = ".agent.json"

// Is returns an error if a directory is not an agent's state directory.
func Is(dir string) error {
	_, err := os.Lstat(filepath.Join(dir, AgentFile))
	return err
}

// contents returns the names in a directory, without the one that a file system of its own has.
func contents(dir string) (names []string, err error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("read state directory: %w", err)
	}
	for _, e := range entries {
		if e.Name() != "lost+found" {
			names = append(names, e.Name())
		}
	}
	return names, nil
}

// patterns match the names of all that agents write to a state directory.
var patterns = []string{
	AgentFile, ".applied.yaml*", ".previous.yaml*", "events", "frames",
	records,
	"fleet.table", "fleet.instance",
	"*.json", "*.templates", "*.devices", // of a service
	".*.live.json", ".*.live.journal", // of a cgroup with tune rules
}

// foreign reports whether no agent has written a file with a name.
func foreign(name string) bool {
	if hidden, ok := strings.CutPrefix(name, "."); ok { // Write leaves its temporary file in a crash
		if ext := filepath.Ext(hidden); len(ext) > 1 && strings.Trim(ext[1:], "0123456789") == "" {
			name = strings.TrimSuffix(hidden, ext)
		}
	}
	return !slices.ContainsFunc(patterns, func(pattern string) bool { ok, _ := filepath.Match(pattern, name); return ok })
}

// onlyRecords reports whether a directory has only records of sizes: sockeye bigtcp apply keeps them also without an agent.
func onlyRecords(dir string) bool {
	entries, err := os.ReadDir(dir)
	return err == nil && len(entries) == 1 && entries[0].Name() == records && entries[0].IsDir()
}

// reserved is the free space in bytes that records leave for the state, unless an eighth of the file system is less.
const reserved = 4 << 20

// CheckSpace returns an error if the rest of the file system of a file is reserved for the state of the agent, without
// which no policy can be applied. Records, which are useful only, are not written then.
func CheckSpace(f *os.File) error {
	var stat unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &stat); err != nil {
		return fmt.Errorf("read free space: %w", err)
	}
	if free, all := stat.Bavail*uint64(stat.Bsize), stat.Blocks*uint64(stat.Bsize); free < min(reserved, all/8) {
		return fmt.Errorf("the last %d bytes of the file system are for the state of the agent: %w", free, unix.ENOSPC)
	}
	return nil
}
