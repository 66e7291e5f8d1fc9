// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"sockeye/internal/bigtcp"
	"sockeye/internal/bpf"
	"sockeye/internal/fault"
	"sockeye/internal/reset"
	"sockeye/internal/statedir"
)

// footprint is what did not exist on the host before a start of the agent. If the start fails, erase removes it, so that
// nothing is left half done. What an earlier agent left is not in it: steering continues with the pins of that agent.
type footprint struct {
	pins, stateDir string   // "" if the directory existed
	bpffs          string   // mount point without a bpffs; "" if there was one
	dirs           []string // missing directories, each before its parent
}

func newFootprint(o *Options) *footprint {
	f := &footprint{}
	if missing(o.Pins) {
		f.pins = o.Pins
	}
	if missing(o.StateDir) {
		f.stateDir = o.StateDir
	}
	if dir := filepath.Dir(o.Pins); !bpf.IsBPFFS(dir) {
		f.bpffs = dir
	}
	for _, dir := range []string{o.Pins, o.StateDir, o.RunDir} {
		for ; missing(dir) && !slices.Contains(f.dirs, dir); dir = filepath.Dir(dir) {
			f.dirs = append(f.dirs, dir)
		}
	}
	return f
}

func missing(path string) bool {
	_, err := os.Lstat(path)
	return errors.Is(err, fs.ErrNotExist)
}

// erase removes pins, programs, keepers, cgroups, sizes of interfaces, the mount and the directories that were created
// since newFootprint. The pin directory must not be locked.
func (f *footprint) erase() error {
	var errs []error
	if f.pins != "" {
		_, err := reset.Pins(f.pins)
		errs = append(errs, err)
	}
	if f.stateDir != "" && statedir.Is(f.stateDir) == nil {
		_, err := bigtcp.Revert(f.stateDir)
		errs = append(errs, err)
		if err == nil {
			errs = append(errs, statedir.Remove(f.stateDir))
		}
	}
	if f.bpffs != "" && bpf.IsBPFFS(f.bpffs) {
		if err := unix.Unmount(f.bpffs, 0); err != nil {
			errs = append(errs, fmt.Errorf("unmount %s: %w", f.bpffs, err))
		}
	}
	for _, dir := range f.dirs {
		_ = unix.Rmdir(dir) // a directory that has files of others stays
	}
	return fault.Join(errs...)
}
