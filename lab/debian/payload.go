// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"sockeye/lab/qemu"
)

// guestPackage has the tests that run in the guest, with the build tag debian.
const guestPackage = "sockeye/lab/debian/guest"

// earlier are the commits of the upgrade tests, by the names in these tests.
var earlier = map[string]string{
	// The first version with services, tune, trace and bigtcp in one policy.
	"all-domains": "572fe9cfd0e3ee6fbffa44c6bf0a6eac66662859",
	// The last version before a change of the layout of tune's maps.
	"tune-layout": "373bfdda41bfe2721af0622362b7275943deb70b",
}

// buildPayload creates a disk with the installation, the tests and earlier versions of Sockeye.
func buildPayload(ctx context.Context, tmp string, o *options) (string, error) {
	dir := filepath.Join(tmp, "payload")
	if err := os.Mkdir(dir, 0o755); err != nil {
		return "", err
	}
	if _, err := qemu.Output(qemu.Command(ctx, "cp", "-a", o.install, filepath.Join(dir, "install"))); err != nil {
		return "", fmt.Errorf("copy the installation: %w", err)
	}
	if _, err := qemu.Output(qemu.Command(ctx, "cp", "-a", o.packages, filepath.Join(dir, "packages"))); err != nil {
		return "", fmt.Errorf("copy the packages: %w", err)
	}
	static := func(args ...string) *exec.Cmd {
		c := qemu.Command(ctx, "go", args...)
		c.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH=amd64")
		return c
	}
	if _, err := qemu.Output(static("build", "-ldflags=-s -w", "-o", filepath.Join(dir, "debian"), "sockeye/lab/debian")); err != nil {
		return "", fmt.Errorf("build the guest's part: %w", err)
	}
	if _, err := qemu.Output(static("test", "-c", "-vet=off", "-tags=debian", "-ldflags=-s -w", "-o", filepath.Join(dir, "guest.test"), guestPackage)); err != nil {
		return "", fmt.Errorf("build the guest's tests: %w", err)
	}
	top, err := qemu.Output(qemu.Command(ctx, "go", "list", "-m", "-f", "{{.Dir}}"))
	if err != nil {
		return "", fmt.Errorf("find the sources: %w", err)
	}
	source := string(top[:len(top)-1])
	if _, err := qemu.Output(qemu.Command(ctx, "cp", "-a", filepath.Join(source, "README.md"), filepath.Join(source, "docs"), dir)); err != nil {
		return "", fmt.Errorf("copy the documents: %w", err)
	}
	for name, commit := range earlier {
		built, err := buildEarlier(ctx, filepath.Join(o.cache, "debian", "earlier"), source, commit, static)
		if errors.Is(err, errNoCommit) {
			fmt.Printf("upgrades from %s are not tested: %v (hint: git fetch --unshallow)\n", commit, err)
			continue
		}
		if err != nil {
			return "", fmt.Errorf("build %s: %w", commit, err)
		}
		if _, err := qemu.Output(qemu.Command(ctx, "cp", "-a", built, filepath.Join(dir, name))); err != nil {
			return "", fmt.Errorf("copy an earlier version: %w", err)
		}
	}
	image := filepath.Join(tmp, "payload.ext4")
	return image, makeImage(ctx, image, dir, 512<<20)
}

var errNoCommit = errors.New("this clone does not have the commit")

// buildEarlier builds sockeye of an earlier commit, or finds it in the cache. It
// returns a directory with sockeye and its unit.
func buildEarlier(ctx context.Context, cache, source, commit string, static func(...string) *exec.Cmd) (string, error) {
	built := filepath.Join(cache, commit)
	if _, err := os.Stat(built); err == nil {
		return built, nil
	}
	if qemu.Command(ctx, "git", "-C", source, "cat-file", "-e", commit+"^{commit}").Run() != nil {
		return "", errNoCommit
	}
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return "", err
	}
	tmp, err := os.MkdirTemp(cache, "tmp-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(tmp)
	tree, tar, done := filepath.Join(tmp, "tree"), filepath.Join(tmp, "tar"), filepath.Join(tmp, "done")
	if err := errors.Join(os.Mkdir(tree, 0o755), os.Mkdir(done, 0o755)); err != nil {
		return "", err
	}
	build := static("build", "-trimpath", "-ldflags=-s -w -X sockeye/internal/cli/command.Version="+commit, "-o", filepath.Join(done, "sockeye"), "./cmd/sockeye")
	build.Dir = tree
	for _, c := range []*exec.Cmd{
		qemu.Command(ctx, "git", "-C", source, "archive", "-o", tar, commit),
		qemu.Command(ctx, "tar", "-C", tree, "-xf", tar),
		build,
	} {
		if _, err := qemu.Output(c); err != nil {
			return "", err
		}
	}
	unit, err := os.ReadFile(filepath.Join(tree, "dist/sockeye.service"))
	if err != nil {
		return "", err
	}
	unit = bytes.ReplaceAll(unit, []byte("@PREFIX@"), []byte("/usr/local"))
	if err := os.WriteFile(filepath.Join(done, "sockeye.service"), unit, 0o644); err != nil {
		return "", err
	}
	return built, os.Rename(done, built)
}

// job is the configuration of the guest, in the file /job.json of the initramfs.
type job struct {
	Modules []string      // files in /modules, in load order
	Pattern string        // of the tests to run
	Timeout time.Duration // of the tests
}

// diskModules are the kernel modules that are needed to mount the root.
var diskModules = []string{"virtio_pci", "virtio_blk", "crc32c_generic", "crc32c_intel", "ext4"}

// writeInitramfs writes an initramfs that mounts the root and starts systemd.
func writeInitramfs(ctx context.Context, file string, k *qemu.Kernel, j job) error {
	f, err := os.Create(file)
	if err != nil {
		return fmt.Errorf("write the initramfs: %w", err)
	}
	defer f.Close()
	buf := bufio.NewWriterSize(f, 1<<20)
	a := qemu.NewArchive(buf)
	for _, dir := range []string{"dev", "proc", "root", "modules"} {
		a.Mkdir(dir)
	}
	a.Add("dev/console", 0o020600, nil, 5, 1)
	a.Add("dev/null", 0o020666, nil, 1, 3) // for the Go runtime, until /dev is mounted
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this program: %w", err)
	}
	a.Copy("init", self)
	modules, err := k.Load(ctx, diskModules)
	if err != nil {
		return err
	}
	for _, m := range modules {
		a.File("modules/"+m.Name, 0o644, m.Data)
		j.Modules = append(j.Modules, m.Name)
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
