// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/domain"
	"sockeye/internal/fault"
	"sockeye/internal/member"
	"sockeye/internal/scope"
	"sockeye/internal/statedir"
)

// missingDirs returns the directories that a start creates, each before its parent.
func missingDirs(o *Options) (dirs []string) {
	for _, dir := range []string{o.Pins, o.StateDir, o.RunDir} {
		for ; missing(dir) && !slices.Contains(dirs, dir); dir = filepath.Dir(dir) {
			dirs = append(dirs, dir)
		}
	}
	return dirs
}

func missing(path string) bool {
	_, err := os.Lstat(path)
	return errors.Is(err, fs.ErrNotExist)
}

// removeEmpty removes the directories that are empty.
func removeEmpty(dirs []string) {
	for _, dir := range dirs {
		_ = unix.Rmdir(dir) // a directory that has files of others stays
	}
}

// unmountEmpty unmounts a bpffs without pins: those of others would end with it. The kernel adds two files to each bpffs (bpf_preload).
func unmountEmpty(dir string) (done bool) {
	entries, err := os.ReadDir(dir)
	pinned := slices.ContainsFunc(entries, func(e fs.DirEntry) bool { return e.Name() != "maps.debug" && e.Name() != "progs.debug" })
	return err == nil && !pinned && unix.Unmount(dir, 0) == nil
}

// footprint is what a start of the agent leaves on a host that no earlier agent has used. If the start fails, erase removes
// it, so that nothing is half done. The lock of the pin directory protects both functions from other agents.
type footprint struct {
	root     *bpf.Root
	domains  []domain.Domain
	stateDir string // "" if an earlier agent has left its state
}

// newFootprint returns nil if an earlier agent has left pins: steering continues with them, also if the start fails.
func newFootprint(o *Options, root *bpf.Root, domains []domain.Domain) (*footprint, error) {
	if isNew, err := root.IsNew(); err != nil || !isNew {
		return nil, err
	}
	f := &footprint{root: root, domains: domains}
	entries, err := os.ReadDir(o.StateDir)
	if err == nil && len(entries) == 0 || errors.Is(err, fs.ErrNotExist) {
		f.stateDir = o.StateDir // a directory that cannot be read is refused, and the pins are erased
	}
	return f, nil
}

// erase removes pins, programs, processes and cgroups of this start, and reverts the state. It removes nothing if a process
// of an earlier agent runs: its service may still be steered.
func (f *footprint) erase() error {
	self, err := member.Read(os.Getpid())
	if err != nil {
		return err
	}
	retirers := domain.With[domain.Retirer](f.domains)
	for _, d := range retirers {
		if earlier, err := d.Outlives(self.StartTime); err != nil || earlier {
			return err
		}
	}
	scopes := scope.Scopes(f.root.Dir)
	var errs []error
	for _, d := range retirers {
		errs = append(errs, d.Retire())
	}
	if err := fault.Join(append(errs, f.root.Clear())...); err != nil {
		return err
	}
	return fault.Join(scope.RemoveCreated(scopes), f.eraseState())
}

// eraseState reverts what the domains have recorded and empties the state directory, unless an agent with another pin directory
// has recorded a start there.
func (f *footprint) eraseState() error {
	if f.stateDir == "" {
		return nil
	}
	var record startRecord
	data, err := os.ReadFile(filepath.Join(f.stateDir, statedir.AgentFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil // the start was not recorded, and has changed nothing
	}
	if err != nil {
		return fmt.Errorf("read state: %w", err)
	}
	if err := json.Unmarshal(data, &record); err != nil || record.Starts != 1 {
		return nil
	}
	for _, d := range domain.With[domain.Reverter](f.domains) {
		if _, err := d.Revert(); err != nil {
			return err
		}
	}
	entries, err := os.ReadDir(f.stateDir)
	if err != nil {
		return fmt.Errorf("read state directory: %w", err)
	}
	var errs []error
	for _, e := range entries {
		errs = append(errs, os.RemoveAll(filepath.Join(f.stateDir, e.Name())))
	}
	return fault.Join(errs...)
}
