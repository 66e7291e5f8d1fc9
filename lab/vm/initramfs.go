// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"sockeye/lab/qemu"
)

// job is the configuration of the guest, in the file /job.json.
type job struct {
	Modules []string // files in /modules, in load order
	Suites  []suite
}

// writeInitramfs writes the complete file system of the guest.
func writeInitramfs(ctx context.Context, file, tmp string, k *qemu.Kernel, suites []suite, o *options) (err error) {
	f, err := os.Create(file)
	if err != nil {
		return fmt.Errorf("write the initramfs: %w", err)
	}
	defer f.Close()
	buf := bufio.NewWriterSize(f, 1<<20)
	a := qemu.NewArchive(buf)

	for _, dir := range []string{"dev", "proc", "sys", "tmp", "run", "root", "src", "modules", "tests"} {
		a.Mkdir(dir)
	}
	a.Add("dev/console", 0o020600, nil, 5, 1)
	a.Add("dev/null", 0o020666, nil, 1, 3) // for the Go runtime, until /dev is mounted
	a.File("etc/passwd", 0o644, []byte("root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/bin/false\n"))
	a.File("etc/group", 0o644, []byte("root:x:0:\nnogroup:x:65534:\n"))
	a.File("etc/hosts", 0o644, []byte("127.0.0.1 localhost\n::1 localhost\n"))
	a.Copy("init", filepath.Join(tmp, "init"))

	mods, err := k.Load(ctx, o.modules)
	if err != nil {
		return err
	}
	j := job{Suites: suites}
	for _, m := range mods {
		a.File("modules/"+m.Name, 0o644, m.Data)
		j.Modules = append(j.Modules, m.Name)
	}
	for _, s := range suites {
		dir := strings.TrimPrefix(s.Dir, "/")
		a.Copy(strings.TrimPrefix(s.Args[0], "/"), s.hostBinary)
		a.Mkdir(dir)
		a.CopyTree(dir+"/testdata", filepath.Join(s.hostDir, "testdata"))
	}
	if o.files != "" {
		a.CopyTree("files", o.files)
	}
	text, err := json.Marshal(j)
	if err != nil {
		return fmt.Errorf("write the job: %w", err)
	}
	a.File("job.json", 0o644, text)
	if err = a.Close(); err == nil {
		err = buf.Flush()
	}
	if err != nil {
		return fmt.Errorf("write the initramfs: %w", err)
	}
	return nil
}
