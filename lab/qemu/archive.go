// SPDX-License-Identifier: Apache-2.0

package qemu

import (
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
)

// Archive writes an initramfs in the cpio format "newc". After an error, all further
// calls do nothing, and Close returns the error.
type Archive struct {
	w    io.Writer
	made map[string]bool // directories
	ino  int
	err  error
}

// NewArchive returns an archive that is written to w.
func NewArchive(w io.Writer) *Archive {
	return &Archive{w: w, made: map[string]bool{".": true}}
}

// Close writes the end of the archive and returns the first error of all calls. It
// does not close the writer.
func (a *Archive) Close() error {
	a.Add("TRAILER!!!", 0, nil, 0, 0)
	return a.err
}

// CopyTree adds a directory of the host, if it exists.
func (a *Archive) CopyTree(name, from string) {
	if _, err := os.Stat(from); err != nil {
		return
	}
	err := filepath.WalkDir(from, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(from, p)
		if err != nil {
			return err
		}
		if d.IsDir() {
			a.Mkdir(path.Join(name, rel))
		} else {
			a.Copy(path.Join(name, rel), p)
		}
		return nil
	})
	if a.err == nil {
		a.err = err
	}
}

// Copy adds a file of the host with its permissions.
func (a *Archive) Copy(name, from string) {
	info, err := os.Stat(from)
	if err == nil {
		var data []byte
		if data, err = os.ReadFile(from); err == nil {
			a.File(name, int(info.Mode().Perm()), data)
		}
	}
	if a.err == nil {
		a.err = err
	}
}

// File adds a regular file.
func (a *Archive) File(name string, mode int, data []byte) {
	a.Mkdir(path.Dir(name))
	a.Add(name, 0o100000|mode, data, 0, 0)
}

// Mkdir adds a directory and its parents, once.
func (a *Archive) Mkdir(name string) {
	if !a.made[name] {
		a.made[name] = true
		a.Mkdir(path.Dir(name))
		a.Add(name, 0o040755, nil, 0, 0)
	}
}

// Add adds a file. mode is its type and permissions; devices also have major and minor
// numbers.
func (a *Archive) Add(name string, mode int, data []byte, major, minor int) {
	if a.err != nil {
		return
	}
	a.ino++
	head := "070701"
	for _, v := range []int{a.ino, mode, 0, 0, 1, 0, len(data), 0, 0, major, minor, len(name) + 1, 0} {
		head += fmt.Sprintf("%08x", v)
	}
	head += name + "\x00"
	for _, part := range [][]byte{[]byte(head), data} {
		_, err := a.w.Write(append(part[:len(part):len(part)], make([]byte, -len(part)&3)...))
		if err != nil {
			a.err = err
			return
		}
	}
}
