// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
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
	if err := addPrograms(ctx, a, o.programs); err != nil {
		return err
	}

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

// library matches the path of a library in the output of ldd(1).
var library = regexp.MustCompile(`(?m)(/\S+) \(0x`)

// addPrograms adds programs of the host to /bin, and the libraries that they need to their paths.
func addPrograms(ctx context.Context, a *qemu.Archive, names []string) error {
	added := map[string]bool{}
	for _, name := range names {
		file, err := exec.LookPath(name)
		if err != nil {
			return fmt.Errorf("find program: %w", err)
		}
		a.Copy("bin/"+filepath.Base(file), file)
		out, err := qemu.Command(ctx, "ldd", file).CombinedOutput()
		if err != nil && !strings.Contains(string(out), "not a dynamic executable") {
			return fmt.Errorf("find the libraries of %s: %w\n%s", name, err, out)
		}
		for _, m := range library.FindAllStringSubmatch(string(out), -1) {
			if !added[m[1]] {
				added[m[1]] = true
				a.Copy(strings.TrimPrefix(m[1], "/"), m[1])
			}
		}
	}
	return nil
}
