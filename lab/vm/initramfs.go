// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
)

// A job is what the guest has to do; it stands in /job.json.
type job struct {
	Modules []string // in /modules, in the order in which they load
	Suites  []suite
}

// writeInitramfs packs the guest's whole file system.
func writeInitramfs(ctx context.Context, file, tmp string, k *kernel, suites []suite, o *options) (err error) {
	f, err := os.Create(file)
	if err != nil {
		return fmt.Errorf("write the initramfs: %w", err)
	}
	defer f.Close()
	buf := bufio.NewWriterSize(f, 1<<20)
	a := &archive{w: buf, made: map[string]bool{".": true}}

	for _, dir := range []string{"dev", "proc", "sys", "tmp", "run", "root", "src", "modules", "tests"} {
		a.mkdir(dir)
	}
	a.add("dev/console", 0o020600, nil, 5, 1)
	a.add("dev/null", 0o020666, nil, 1, 3) // for the Go runtime, until /dev is mounted
	a.file("etc/passwd", 0o644, []byte("root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/bin/false\n"))
	a.file("etc/group", 0o644, []byte("root:x:0:\nnogroup:x:65534:\n"))
	a.file("etc/hosts", 0o644, []byte("127.0.0.1 localhost\n::1 localhost\n"))
	a.copy("init", filepath.Join(tmp, "init"))

	mods, err := k.load(ctx, o.modules)
	if err != nil {
		return err
	}
	j := job{Suites: suites}
	for _, m := range mods {
		a.file("modules/"+m.name, 0o644, m.data)
		j.Modules = append(j.Modules, m.name)
	}
	for _, s := range suites {
		dir := strings.TrimPrefix(s.Dir, "/")
		a.copy(strings.TrimPrefix(s.Args[0], "/"), s.hostBinary)
		a.mkdir(dir)
		a.copyTree(dir+"/testdata", filepath.Join(s.hostDir, "testdata"))
	}
	text, err := json.Marshal(j)
	if err != nil {
		return fmt.Errorf("write the job: %w", err)
	}
	a.file("job.json", 0o644, text)
	a.add("TRAILER!!!", 0, nil, 0, 0)
	if a.err == nil {
		a.err = buf.Flush()
	}
	if a.err != nil {
		return fmt.Errorf("write the initramfs: %w", a.err)
	}
	return nil
}

// An archive writes the cpio format "newc". Its first error stays.
type archive struct {
	w    io.Writer
	made map[string]bool // folders
	ino  int
	err  error
}

func (a *archive) add(name string, mode int, data []byte, major, minor int) {
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

func (a *archive) mkdir(name string) {
	if !a.made[name] {
		a.made[name] = true
		a.mkdir(path.Dir(name))
		a.add(name, 0o040755, nil, 0, 0)
	}
}

func (a *archive) file(name string, mode int, data []byte) {
	a.mkdir(path.Dir(name))
	a.add(name, 0o100000|mode, data, 0, 0)
}

// copy adds a file of the host with its permissions.
func (a *archive) copy(name, from string) {
	info, err := os.Stat(from)
	if err == nil {
		var data []byte
		if data, err = os.ReadFile(from); err == nil {
			a.file(name, int(info.Mode().Perm()), data)
		}
	}
	if a.err == nil {
		a.err = err
	}
}

// copyTree adds a folder of the host, if there is one.
func (a *archive) copyTree(name, from string) {
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
			a.mkdir(path.Join(name, rel))
		} else {
			a.copy(path.Join(name, rel), p)
		}
		return nil
	})
	if a.err == nil {
		a.err = err
	}
}
