// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"sockeye/lab/qemu"
)

// releases are the tested Debian releases.
var releases = []string{"bookworm", "trixie"}

// kernelOf maps a release to the name of its kernel for qemu.FindKernel.
var kernelOf = map[string]string{"bookworm": "6.1", "trixie": "trixie"}

// packages are the packages of a collector host in addition to Debian's essential
// packages. udev, initramfs-tools and kernel packages are not included, because they
// would double the boot time.
var packages = []string{
	"systemd", "systemd-sysv", "dbus", "dbus-user-session", "libpam-systemd", "iproute2", "kmod", "procps",
	"pmacct", "python3-minimal", "nftables",
}

// findRoot returns an ext4 image of a release's root and the kernel whose modules are
// in it. If the image is not in the cache, findRoot builds it.
func findRoot(ctx context.Context, cache, release string, update bool) (string, *qemu.Kernel, error) {
	k, err := qemu.FindKernel(ctx, filepath.Join(cache, "vm"), qemu.AMD64, kernelOf[release], update)
	if err != nil {
		return "", nil, fmt.Errorf("get its kernel: %w", err)
	}
	dir := filepath.Join(cache, "debian")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", nil, fmt.Errorf("make the cache: %w", err)
	}
	lock, err := qemu.Lock(filepath.Join(dir, release+".lock"))
	if err != nil {
		return "", nil, err
	}
	defer lock.Close()
	hash := sha256.Sum256([]byte(strings.Join(append([]string{"2", k.Release}, packages...), " ")))
	image := filepath.Join(dir, fmt.Sprintf("%s-%x.ext4", release, hash[:6]))
	if _, err := os.Stat(image); err == nil && !update {
		return image, k, nil
	}
	if os.Geteuid() != 0 {
		return "", nil, errors.New("root is required to build a root file system")
	}
	tmp, err := os.MkdirTemp(dir, "tmp-"+release+"-")
	if err != nil {
		return "", nil, fmt.Errorf("make a work directory: %w", err)
	}
	defer os.RemoveAll(tmp)
	root := filepath.Join(tmp, "root")
	if err := bootstrap(ctx, tmp, root, release, k); err != nil {
		return "", nil, err
	}
	made := filepath.Join(tmp, "ext4")
	if err := makeImage(ctx, made, root, 1<<30); err != nil {
		return "", nil, err
	}
	old, _ := filepath.Glob(filepath.Join(dir, release+"-*.ext4"))
	for _, path := range old {
		_ = os.Remove(path) // running machines have the file open
	}
	if err := os.Rename(made, image); err != nil {
		return "", nil, fmt.Errorf("put the image into the cache: %w", err)
	}
	return image, k, nil
}

// bootstrap installs the release's packages and the kernel's modules in root.
func bootstrap(ctx context.Context, tmp, root, release string, k *qemu.Kernel) error {
	sources, err := qemu.Sources(ctx, qemu.AMD64, release, release+"-security")
	if err != nil {
		return err
	}
	list := filepath.Join(tmp, "sources.list")
	if err := os.WriteFile(list, []byte(sources), 0o644); err != nil {
		return fmt.Errorf("write apt's sources: %w", err)
	}
	fmt.Printf("building a root of Debian %s\n", release)
	_, err = qemu.Output(qemu.Command(ctx, "mmdebstrap", "--mode=root", "--variant=minbase", "--format=directory",
		"--include="+strings.Join(packages, ","),
		"--aptopt=Acquire::Retries \"3\"",
		"--dpkgopt=path-exclude=/usr/share/doc/*", "--dpkgopt=path-exclude=/usr/share/man/*", "--dpkgopt=path-exclude=/usr/share/locale/*",
		"--customize-hook=mkdir -p \"$1/usr/lib/modules\" && cp -a '"+k.Modules+"' \"$1/usr/lib/modules/\" && chroot \"$1\" depmod "+k.Release,
		"--customize-hook=echo debian > \"$1/etc/hostname\"; echo '127.0.0.1 localhost debian' > \"$1/etc/hosts\"; : > \"$1/etc/resolv.conf\"",
		// Without these files, systemd would assume a first boot and enable all units, or an update.
		"--customize-hook=chroot \"$1\" systemd-machine-id-setup && touch \"$1/etc/.updated\" \"$1/var/.updated\"",
		"--customize-hook=mkdir -p \"$1/payload\" \"$1/var/log/journal\"",
		release, root, list))
	if err != nil {
		return fmt.Errorf("run mmdebstrap: %w", err)
	}
	return nil
}

// makeImage creates an ext4 image of a directory, as a sparse file of size bytes.
func makeImage(ctx context.Context, image, dir string, size int64) error {
	f, err := os.Create(image)
	if err != nil {
		return fmt.Errorf("make an image: %w", err)
	}
	if err := errors.Join(f.Truncate(size), f.Close()); err != nil {
		return fmt.Errorf("make an image: %w", err)
	}
	if _, err := qemu.Output(qemu.Command(ctx, "mke2fs", "-q", "-F", "-t", "ext4", "-O", "^has_journal", "-m", "0", "-d", dir, image)); err != nil {
		return fmt.Errorf("make an image: %w", err)
	}
	return nil
}
