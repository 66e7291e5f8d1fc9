// SPDX-License-Identifier: Apache-2.0

// Command debian tests Sockeye on whole Debian systems, under systemd.
//
//	go run ./lab/debian -install DIR -packages DIR [-releases bookworm,trixie] [-run REGEXP] [-update] [-timeout 25m]
//
// It builds a minimal root file system of each release with mmdebstrap, from the
// Debian mirror that this machine's apt uses, and keeps it in a cache. It boots a
// copy of each root under qemu's software emulation with that release's kernel, all
// releases in parallel. The first boot installs the Debian package in -packages, and the
// others the files that "make install" has installed into -install. Then the tests of lab/debian/guest run in the guest as a service of
// systemd, in several boots.
//
// The host needs root, Go, git, apt, mmdebstrap, e2fsprogs, qemu-utils,
// debian-archive-keyring, xz-utils and qemu-system-x86.
//
// Exit codes: 0 all tests passed on all releases, 1 a test failed, 2 wrong usage.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"sockeye/lab/qemu"
)

type options struct {
	releases []string
	install  string
	packages string
	out      string
	cache    string
	run      string
	boots    int
	timeout  time.Duration
	update   bool
}

func main() {
	switch {
	case os.Getpid() == 1:
		initramfs()
	case len(os.Args) == 2 && os.Args[1] == guestCommand:
		guest()
		return
	}
	o, err := parse(os.Args[1:])
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "debian:", err)
		os.Exit(2)
	}
	ctx, cancel := context.WithTimeoutCause(qemu.Interruptible(), o.timeout, fmt.Errorf("not done within %v", o.timeout))
	defer cancel()
	if err := run(ctx, o); err != nil {
		fmt.Fprintln(os.Stderr, "debian:", err)
		os.Exit(1)
	}
}

func parse(args []string) (*options, error) {
	o := &options{}
	fs := flag.NewFlagSet("debian", flag.ContinueOnError)
	fs.SetOutput(io.Discard)
	fs.Usage = func() {
		fmt.Fprintln(os.Stderr, "usage: debian [FLAG]...")
		fs.SetOutput(os.Stderr)
		fs.PrintDefaults()
	}
	list := fs.String("releases", strings.Join(releases, ","), "Debian `releases`")
	fs.StringVar(&o.install, "install", "", "`directory`: DESTDIR of make install")
	fs.StringVar(&o.packages, "packages", "", "`directory` with two versions of the Debian package")
	fs.StringVar(&o.out, "out", "out", "`directory` for the journals of guests in which tests failed")
	fs.StringVar(&o.cache, "cache", "", "`directory` of roots, kernels and earlier versions (default $XDG_CACHE_HOME/sockeye)")
	fs.StringVar(&o.run, "run", "", "run only the subtests that match `REGEXP`")
	fs.IntVar(&o.boots, "boots", len(boots), "maximum number of boots")
	fs.DurationVar(&o.timeout, "timeout", 25*time.Minute, "timeout of all tests")
	fs.BoolVar(&o.update, "update", false, "rebuild the roots and search for newer kernels")
	if err := fs.Parse(args); err != nil {
		return nil, err
	}
	if fs.NArg() > 0 {
		return nil, fmt.Errorf("unexpected argument %q", fs.Arg(0))
	}
	o.releases = strings.Split(*list, ",")
	for _, r := range o.releases {
		if !slices.Contains(releases, r) {
			return nil, fmt.Errorf("-releases: unknown release %q, want %s", r, strings.Join(releases, " and "))
		}
	}
	if _, err := regexp.Compile(o.run); err != nil {
		return nil, fmt.Errorf("-run: %w", err)
	}
	if o.boots < 1 || o.boots > len(boots) {
		return nil, fmt.Errorf("-boots is %d, want 1 to %d", o.boots, len(boots))
	}
	if _, err := os.Stat(filepath.Join(o.install, "etc/systemd/system/sockeye.service")); err != nil {
		return nil, fmt.Errorf("-install: no installation in %q: %w", o.install, err)
	}
	if debs, err := filepath.Glob(filepath.Join(o.packages, "*.deb")); err != nil || len(debs) != 2 {
		return nil, fmt.Errorf("-packages: %d packages in %q, want 2", len(debs), o.packages)
	}
	if o.cache == "" {
		dir, err := os.UserCacheDir()
		if err != nil {
			return nil, fmt.Errorf("find the cache directory: %w", err)
		}
		o.cache = filepath.Join(dir, "sockeye")
	}
	var err error
	o.cache, err = filepath.Abs(o.cache)
	return o, err
}

func run(ctx context.Context, o *options) error {
	// The kernel kills children when the thread that started them exits (see
	// qemu.Command). Therefore, each goroutine with children locks its thread.
	runtime.LockOSThread()
	tmp, err := os.MkdirTemp("", "sockeye-debian-")
	if err != nil {
		return fmt.Errorf("make a work directory: %w", err)
	}
	defer os.RemoveAll(tmp)
	payload, err := buildPayload(ctx, tmp, o)
	if err != nil {
		return err
	}
	begin := time.Now()
	reports, errs := make([]*qemu.Report, len(o.releases)), make([]error, len(o.releases))
	var all sync.WaitGroup
	for i, release := range o.releases {
		all.Add(1)
		go func() {
			defer all.Done()
			runtime.LockOSThread()
			reports[i], errs[i] = test(ctx, filepath.Join(tmp, release), release, payload, o)
		}()
	}
	all.Wait()
	if ctx.Err() != nil {
		errs = append(errs, context.Cause(ctx))
	}
	fmt.Println()
	for i, r := range reports {
		if r == nil {
			continue
		}
		r.Print(os.Stdout)
		if r.Failed() {
			errs = append(errs, fmt.Errorf("tests failed in %s, the journal is in %s", o.releases[i], journalPath(o, o.releases[i])))
		}
	}
	fmt.Printf("%.0f s\n", time.Since(begin).Seconds())
	return errors.Join(errs...)
}

func journalPath(o *options, release string) string {
	return filepath.Join(o.out, "debian-"+release+".journal")
}

// test runs all boots of one release.
func test(ctx context.Context, tmp, release, payload string, o *options) (_ *qemu.Report, err error) {
	if err := os.Mkdir(tmp, 0o755); err != nil {
		return nil, err
	}
	root, k, err := findRoot(ctx, o.cache, release, o.update)
	if err != nil {
		return nil, fmt.Errorf("build %s: %w", release, err)
	}
	disk := filepath.Join(tmp, "disk.qcow2")
	if _, err := qemu.Output(qemu.Command(ctx, "qemu-img", "create", "-q", "-f", "qcow2", "-b", root, "-F", "raw", disk)); err != nil {
		return nil, fmt.Errorf("make the disk of %s: %w", release, err)
	}
	r := qemu.NewReport(release)
	r.Brief = true
	if err := os.MkdirAll(o.out, 0o755); err != nil {
		return nil, fmt.Errorf("make the output directory: %w", err)
	}
	journal, err := os.Create(journalPath(o, release))
	if err != nil {
		return nil, fmt.Errorf("write the journal of %s: %w", release, err)
	}
	defer func() {
		if closeErr := journal.Close(); err == nil {
			err = closeErr
		}
		if err == nil && !r.Failed() {
			err = os.Remove(journal.Name())
		}
	}()
	r.Journal = journal
	for i, boot := range boots[:o.boots] {
		m := &qemu.Machine{
			Kernel: k, Initramfs: filepath.Join(tmp, "initramfs"), Console: filepath.Join(tmp, "console"),
			CPUs: 1, // emulated CPUs run one at a time
			// Each of the four nfacctd processes needs up to 250 MB.
			Memory: 3072,
			// Programs that use cmpxchg16b are slow or wrong under emulation.
			Args: []string{"-cpu", "max,-cx16",
				"-drive", "if=virtio,format=qcow2,cache=unsafe,file=" + disk,
				"-drive", "if=virtio,format=raw,readonly=on,file=" + payload},
			// Without udev, systemd cannot find the console for a login. Slow jobs are shown on the console.
			Append: "quiet systemd.show_status=auto systemd.getty_auto=no systemd.mask=dev-hugepages.mount systemd.mask=modprobe@drm.service systemd.mask=modprobe@fuse.service" +
				" systemd.mask=modprobe@efi_pstore.service systemd.mask=modprobe@configfs.service systemd.mask=sys-kernel-debug.mount",
			Suites: []string{guestPackage}, BootTimeout: 4 * time.Minute, Timeout: boot.timeout, ShutdownTimeout: 2 * time.Minute,
		}
		pattern := "^" + boot.test + "$"
		if o.run != "" {
			pattern += "/(" + o.run + ")" // go test splits the pattern at a | outside parentheses
		}
		if err := writeInitramfs(ctx, m.Initramfs, k, job{Pattern: pattern, Timeout: boot.timeout}); err != nil {
			return r, err
		}
		fmt.Printf("%s | boot %d\n", release, i+1)
		if err := m.Run(ctx, r); err != nil {
			return r, fmt.Errorf("boot %s: %w", release, err)
		}
		if ctx.Err() != nil || r.Broken() {
			break
		}
	}
	return r, nil
}
