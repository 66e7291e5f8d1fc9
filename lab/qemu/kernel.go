// SPDX-License-Identifier: Apache-2.0

package qemu

import (
	"bytes"
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Kernel is an unpacked Debian kernel.
type Kernel struct {
	Arch    *Arch
	Release string // as in uname -r
	Image   string // file that qemu boots
	Modules string // directory of the modules
}

// Short returns the kernel's release without the flavour of amd64. The flavour of
// another architecture names the architecture in reports.
func (k *Kernel) Short() string { return strings.TrimSuffix(k.Release, "-cloud-"+AMD64.Name) }

// FindKernel returns a kernel of an architecture from the cache. If the kernel is not
// in the cache, or if update is set, FindKernel downloads it. The name is MAJOR.MINOR,
// "newest", or a Debian release for the kernel of this release.
func FindKernel(ctx context.Context, cache string, arch *Arch, name string, update bool) (*Kernel, error) {
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return nil, fmt.Errorf("make the cache: %w", err)
	}
	entry := name
	if arch != AMD64 {
		entry += "-" + arch.Name
	}
	lock, err := Lock(filepath.Join(cache, entry+".lock"))
	if err != nil {
		return nil, err
	}
	defer lock.Close()
	dir := filepath.Join(cache, entry)
	if k, err := unpacked(arch, dir); err == nil && !update {
		return k, nil
	}
	tmp, err := os.MkdirTemp(cache, "tmp-"+entry+"-")
	if err != nil {
		return nil, fmt.Errorf("make a work folder: %w", err)
	}
	defer os.RemoveAll(tmp)
	debs, err := download(ctx, tmp, arch, name)
	if err != nil {
		return nil, err
	}
	root := filepath.Join(tmp, "root")
	for _, deb := range debs {
		if _, err := Output(Command(ctx, "dpkg-deb", "-x", deb, root)); err != nil {
			return nil, fmt.Errorf("unpack %s: %w", filepath.Base(deb), err)
		}
	}
	if _, err := unpacked(arch, root); err != nil {
		return nil, err
	}
	if err := os.RemoveAll(dir); err != nil {
		return nil, fmt.Errorf("replace the cached kernel: %w", err)
	}
	if err := os.Rename(root, dir); err != nil {
		return nil, fmt.Errorf("replace the cached kernel: %w", err)
	}
	return unpacked(arch, dir)
}

// unpacked returns the kernel in a directory with unpacked packages.
func unpacked(arch *Arch, dir string) (*Kernel, error) {
	for _, lib := range []string{"lib", "usr/lib"} {
		found, _ := filepath.Glob(filepath.Join(dir, lib, "modules", "*"))
		for _, mods := range found {
			release := filepath.Base(mods)
			for _, image := range []string{filepath.Join(dir, "boot", "vmlinuz-"+release), filepath.Join(mods, "vmlinuz")} {
				if _, err := os.Stat(image); err == nil {
					return &Kernel{Arch: arch, Release: release, Image: image, Modules: mods}, nil
				}
			}
		}
	}
	return nil, fmt.Errorf("no kernel in %s", dir)
}

// A mirror may not answer for a moment: apt-get update takes this for a warning.
const (
	updates     = 3
	updatePause = 10 * time.Second
)

// download downloads the packages of the latest kernel with a name. apt verifies
// their signatures and hashes. apt uses directories below dir, and otherwise the
// configuration of this machine, such as proxies.
func download(ctx context.Context, dir string, arch *Arch, name string) ([]string, error) {
	sources, err := Sources(ctx, arch, suitesOf(name)...)
	if err != nil {
		return nil, err
	}
	// Suites of a release after its end of life have a valid signature and an expired date.
	conf := strings.NewReplacer("DIR", dir, "ARCH", arch.Name).Replace(`
		#clear APT::Update::Pre-Invoke;
		#clear APT::Update::Post-Invoke;
		#clear APT::Update::Post-Invoke-Success;
		APT::Architecture "ARCH";
		APT::Architectures "ARCH";
		APT::Sandbox::User "root";
		Acquire::Check-Valid-Until "false";
		Acquire::Retries "3";
		Dir::Etc::SourceList "DIR/sources.list";
		Dir::Etc::SourceParts "/dev/null";
		Dir::State "DIR/state";
		Dir::State::Status "DIR/status";
		Dir::Cache "DIR/cache";
		`)
	for path, text := range map[string]string{"apt.conf": conf, "sources.list": sources, "status": ""} {
		if err := os.WriteFile(filepath.Join(dir, path), []byte(text), 0o644); err != nil {
			return nil, fmt.Errorf("write apt's settings: %w", err)
		}
	}
	for _, sub := range []string{"state/lists/partial", "cache/archives/partial"} {
		if err := os.MkdirAll(filepath.Join(dir, sub), 0o755); err != nil {
			return nil, fmt.Errorf("make apt's folders: %w", err)
		}
	}
	apt := func(tool string, args ...string) ([]byte, error) {
		c := Command(ctx, tool, append([]string{"-q", "-c", filepath.Join(dir, "apt.conf")}, args...)...)
		c.Dir = dir
		c.Env = append(os.Environ(), "LC_ALL=C")
		return Output(c)
	}
	fmt.Printf("downloading kernel %s for %s\n", name, arch.Name)
	image := ""
	for try := range updates {
		_, updateErr := apt("apt-get", "update") // may have failed for one suite only
		names, err := apt("apt-cache", "pkgnames", "linux-image-")
		if err != nil {
			return nil, fmt.Errorf("list kernels: %w", err)
		}
		if image = latest(strings.Fields(string(names)), arch, name); image != "" {
			break
		}
		if try == updates-1 {
			return nil, errors.Join(fmt.Errorf("no package of kernel %s in %s", name, strings.Join(suitesOf(name), ", ")), updateErr)
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(updatePause):
		}
	}
	// Newer packages are empty and depend on a package with the image and a package with the modules.
	record, err := apt("apt-cache", "show", "--no-all-versions", image)
	if err != nil {
		return nil, fmt.Errorf("read the record of %s: %w", image, err)
	}
	want := append([]string{"download", image}, regexp.MustCompile(`\blinux-(?:binary|modules)-\d[^ ,|]*`).FindAllString(string(record), -1)...)
	if _, err := apt("apt-get", want...); err != nil {
		return nil, fmt.Errorf("download %s: %w", image, err)
	}
	return filepath.Glob(filepath.Join(dir, "*.deb"))
}

// suitesOf returns the Debian suites that contain a kernel. A suite may be missing on
// the mirror if another suite has the kernel.
func suitesOf(name string) []string {
	switch name {
	case "5.10":
		return []string{"bullseye", "bullseye-security"}
	case "6.1":
		return []string{"bookworm", "bookworm-security"}
	case "6.12":
		return []string{"bookworm-backports", "bookworm-security"}
	case "bookworm", "trixie":
		return []string{name, name + "-security"}
	}
	return []string{"trixie-backports"}
}

// Sources returns apt sources of an architecture for Debian suites, from the mirrors that this
// machine's apt uses.
func Sources(ctx context.Context, arch *Arch, suites ...string) (string, error) {
	uris, err := Output(Command(ctx, "apt-get", "--print-uris", "update"))
	if err != nil {
		return "", fmt.Errorf("find the Debian mirror: %w", err)
	}
	sources := sourcesList(string(uris), arch, suites)
	if sources == "" {
		return "", errors.New("find the Debian mirror: no source of apt has the name of a Debian release")
	}
	return sources, nil
}

var debianURI = regexp.MustCompile(`(?m)^'([^']+)/dists/(?:bullseye|bookworm|trixie|forky|sid|(?:old)*stable|testing|unstable)(-security)?/InRelease'`)

// sourcesList returns apt sources for suites, with the mirrors in the output of
// "apt-get --print-uris update". apt ignores other archives with Debian's release
// names, because they are not signed by Debian.
func sourcesList(uris string, arch *Arch, suites []string) string {
	var mirrors, security []string
	for _, m := range debianURI.FindAllStringSubmatch(uris, -1) {
		if m[2] == "" {
			mirrors = append(mirrors, m[1])
		} else {
			security = append(security, m[1])
		}
	}
	if len(security) == 0 {
		for _, m := range mirrors {
			security = append(security, m+"-security")
		}
	}
	var b strings.Builder
	for _, suite := range suites {
		from := mirrors
		if strings.HasSuffix(suite, "-security") {
			from = security
		}
		for _, uri := range slices.Compact(slices.Sorted(slices.Values(from))) {
			fmt.Fprintf(&b, "deb [arch=%s lang=none target=Packages signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] %s %s main\n", arch.Name, uri, suite)
		}
	}
	return b.String()
}

var kernelVersion = regexp.MustCompile(`^\d+\.\d+$`)

// latest returns the package with the highest version of the kernel images with a name.
func latest(packages []string, arch *Arch, name string) string {
	version := `\d+\.\d+\.`
	if kernelVersion.MatchString(name) {
		version = regexp.QuoteMeta(name + ".")
	}
	want := regexp.MustCompile(`^linux-image-(` + version + `\d.*)-cloud-` + arch.Name + `$`)
	best, bestNumbers := "", []int(nil)
	for _, p := range packages {
		if m := want.FindStringSubmatch(p); m != nil {
			var numbers []int
			for _, s := range regexp.MustCompile(`\d+`).FindAllString(m[1], -1) {
				n, _ := strconv.Atoi(s)
				numbers = append(numbers, n)
			}
			if slices.Compare(numbers, bestNumbers) > 0 {
				best, bestNumbers = p, numbers
			}
		}
	}
	return best
}

// Module is an uncompressed kernel module.
type Module struct {
	Name string
	Data []byte
}

// Load returns the modules in load order, with their dependencies. It omits names
// without a module file. The dependencies are read from the modules, because Debian's
// packages do not contain modules.dep.
func (k *Kernel) Load(ctx context.Context, names []string) ([]Module, error) {
	paths := map[string]string{}
	err := filepath.WalkDir(k.Modules, func(path string, _ os.DirEntry, err error) error {
		if base, _, ok := strings.Cut(filepath.Base(path), ".ko"); ok {
			paths[strings.ReplaceAll(base, "-", "_")] = path
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list kernel modules: %w", err)
	}
	var mods []Module
	seen := map[string]bool{}
	var add func(name string) error
	add = func(name string) error {
		name = strings.ReplaceAll(name, "-", "_")
		path, ok := paths[name]
		if !ok || seen[name] {
			return nil
		}
		seen[name] = true
		data, depends, err := readModule(ctx, path)
		if err != nil {
			return fmt.Errorf("read kernel module %s: %w", name, err)
		}
		for _, d := range depends {
			if err := add(d); err != nil {
				return err
			}
		}
		mods = append(mods, Module{name, data})
		return nil
	}
	for _, name := range names {
		if err := add(name); err != nil {
			return nil, err
		}
	}
	return mods, nil
}

func readModule(ctx context.Context, path string) (data []byte, depends []string, err error) {
	switch filepath.Ext(path) {
	case ".xz":
		data, err = Output(Command(ctx, "xz", "-dc", path))
	case ".zst":
		data, err = Output(Command(ctx, "zstd", "-dcq", path))
	default:
		data, err = os.ReadFile(path)
	}
	if err != nil {
		return nil, nil, err
	}
	f, err := elf.NewFile(bytes.NewReader(data))
	if err != nil {
		return nil, nil, err
	}
	section := f.Section(".modinfo")
	if section == nil {
		return nil, nil, errors.New("no .modinfo section")
	}
	info, err := section.Data()
	if err != nil {
		return nil, nil, err
	}
	for field := range strings.SplitSeq(string(info), "\x00") {
		if list, ok := strings.CutPrefix(field, "depends="); ok && list != "" {
			depends = strings.Split(list, ",")
		}
	}
	return data, depends, nil
}
