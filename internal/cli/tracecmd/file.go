// SPDX-License-Identifier: Apache-2.0

package tracecmd

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"sockeye/internal/cli/command"
	"sockeye/internal/fault"
)

// newFile is a file with a temporary name in the directory of its path. finish renames the file to its path.
type newFile struct {
	*os.File
	path string
	flag uint // flag of renameat2
}

func (f *newFile) taken() error {
	return fault.Usage(fmt.Errorf("%s exists", f.path), "name another file, or use --force to replace it")
}

// writeMeasurements writes the measurements that --since and --select choose to a new file, and returns what write returns.
func writeMeasurements[T any](cmd *cobra.Command, path, selector string, force bool,
	write func(ctx context.Context, file *newFile, since time.Duration, selector string) (*T, error)) (*T, error) {
	since, err := command.Interval(cmd, "since")
	if err != nil {
		return nil, err
	}
	if err := selection("--select", selector); err != nil {
		return nil, err
	}
	if path == "" {
		return nil, fault.Usage(fmt.Errorf("FILE is %q", path), "usage: "+cmd.UseLine())
	}
	file, err := createFile(path, force, 0o666)
	if err != nil {
		return nil, err
	}
	defer file.discard()
	written, err := write(cmd.Context(), file, since, selector)
	if err != nil {
		return nil, err
	}
	return written, file.finish()
}

// createFile creates a temporary file for a path, with a mode before umask. With force, finish replaces an existing regular
// file. createFile returns an error for an existing file without force, and for a path that is not a regular file.
func createFile(path string, force bool, mode os.FileMode) (*newFile, error) {
	f := &newFile{path: path, flag: unix.RENAME_NOREPLACE}
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return nil, f.failed(err)
	case !info.Mode().IsRegular():
		return nil, fault.Usage(fmt.Errorf("%s exists and is not a regular file", path), "name another file")
	case !force:
		return nil, f.taken()
	}
	if force {
		f.flag = 0
	}
	f.File, err = os.OpenFile(filepath.Join(filepath.Dir(path), fmt.Sprintf(".%s.%d", filepath.Base(path), os.Getpid())), os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
	if err != nil {
		return nil, f.failed(err)
	}
	return f, nil
}

// failed replaces the temporary name in an error by the path.
func (f *newFile) failed(err error) error {
	if wrapped, ok := errors.AsType[*fs.PathError](err); ok {
		err = wrapped.Err
	}
	return fault.Unreadable(fmt.Errorf("write %s: %w", f.path, err), "name a file in an existing directory")
}

// finish renames the file to its path.
func (f *newFile) finish() error {
	if err := f.Close(); err != nil {
		return fmt.Errorf("write %s: %w", f.path, err)
	}
	err := unix.Renameat2(unix.AT_FDCWD, f.Name(), unix.AT_FDCWD, f.path, f.flag)
	if errors.Is(err, unix.EINVAL) && f.flag != 0 {
		// The file system does not support RENAME_NOREPLACE (renameat2(2)). createFile has checked that the
		// path does not exist.
		err = unix.Rename(f.Name(), f.path)
	}
	if errors.Is(err, unix.EEXIST) {
		return f.taken()
	}
	if err != nil {
		return fmt.Errorf("write %s: %w", f.path, err)
	}
	return nil
}

// discard removes an unfinished file.
func (f *newFile) discard() {
	// After finish, both calls fail: the file is closed and renamed.
	_ = f.Close()
	_ = os.Remove(f.Name())
}
