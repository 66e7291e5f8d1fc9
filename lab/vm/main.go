// SPDX-License-Identifier: Apache-2.0

// Command vm runs Go tests on other Linux kernels.
//
//	go run ./lab/vm [-arch amd64] [-kernels 5.10,newest] [-run REGEXP] [-bench REGEXP] [-leave-out "REGEXP: REASON"]... [-cache DIR]
//	                [-timeout 5m] [-files DIR] [-virtual-time [-slower N]] [-modules NAMES] [-programs NAMES] [-memory MIB] PACKAGE...
//
// It downloads Debian's cloud kernels (amd64 or arm64) from the Debian mirror that this
// machine's apt uses, and unpacks them into a cache without installing them. It
// boots each kernel under qemu's software emulation, as many at the same time as the
// host has CPUs, with the static test binaries of the packages and their testdata in
// an initramfs. Tests are built with the tag "vm" and run as root, one package after
// the other, in the directory of the package below /src.
//
// With -virtual-time, the guest's clock counts instructions instead of time: durations that a guest measures do not depend
// on the speed of the emulation or on other load of the host. -slower N makes the guest's CPU 2^N times slower.
//
// The host needs Go, apt, dpkg, debian-archive-keyring, xz-utils and
// qemu-system-x86, or qemu-system-arm for arm64.
//
// Exit codes: 0 each test passed, or was skipped because the kernel does not support
// it; 1 a test failed, was skipped for another reason or did not return, no test ran,
// or the machine crashed or hung; 2 wrong usage.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"sync"
	"time"

	"sockeye/lab/qemu"
)

// modules are the kernel modules that the guest loads with their dependencies, unless
// they are built into the kernel.
const modules = "veth,tun,dummy,ifb,bridge,vrf,macvlan,vxlan,8021q,sch_ingress,cls_bpf,sch_codel,sch_fq,sch_htb,sch_tbf,sch_netem," +
	"tcp_bbr,tcp_dctcp,tcp_nv,tcp_diag,udp_diag"

type options struct {
	arch     *qemu.Arch
	kernels  []string
	modules  []string
	packages []string
	programs []string
	memory   int // MiB
	run      string
	bench    string
	leftOut  []exclusion
	cache    string
	timeout  time.Duration
	update   bool
	// files is a directory of the host that the guest has as /files, or "".
	files string
	// virtual lets the clock of the guest advance by 2^slower nanoseconds per instruction.
	virtual bool
	slower  int
}

// exclusion leaves tests out.
type exclusion struct{ tests, reason string }

var kernelName = regexp.MustCompile(`^(newest|\d+\.\d+)$`)

func main() {
	if os.Getpid() == 1 {
		guest()
	}
	// The kernel kills children when the thread that started them exits (see
	// qemu.Command). Therefore, the main thread starts all of them.
	runtime.LockOSThread()
	o, err := parse(os.Args[1:])
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "vm:", err)
		os.Exit(2)
	}
	if err := run(qemu.Interruptible(), o); err != nil {
		fmt.Fprintln(os.Stderr, "vm:", err)
		os.Exit(1)
	}
}

func parse(args []string) (*options, error) {
	o := &options{}
	fs := flag.NewFlagSet("vm", flag.ContinueOnError)
	fs.SetOutput(io.Discard)
	fs.Usage = func() {
		fmt.Fprintln(os.Stderr, "usage: vm [FLAG]... PACKAGE...")
		fs.SetOutput(os.Stderr)
		fs.PrintDefaults()
	}
	arch := fs.String("arch", "amd64", "`architecture` of the machines: amd64 or arm64")
	kernels := fs.String("kernels", "5.10,newest", "kernel `versions`, each MAJOR.MINOR or newest")
	mods := fs.String("modules", modules, "`names` of kernel modules to load")
	programs := fs.String("programs", "", "`files` of the host to copy into the guest's /bin, with the libraries that they need")
	fs.IntVar(&o.memory, "memory", 1024, "memory of a machine in `MiB`")
	fs.StringVar(&o.run, "run", "", "run only the tests that match `REGEXP`")
	fs.StringVar(&o.bench, "bench", "", "run the benchmarks that match `REGEXP`, too, once each")
	fs.Func("leave-out", "leave out the tests that match a regular expression, `REGEXP: REASON`; may be repeated", func(s string) error {
		tests, reason, _ := strings.Cut(s, ": ")
		if _, err := regexp.Compile(tests); err != nil {
			return err
		}
		if tests == "" || reason == "" {
			return errors.New("want REGEXP: REASON")
		}
		o.leftOut = append(o.leftOut, exclusion{tests, reason})
		return nil
	})
	fs.StringVar(&o.cache, "cache", "", "`directory` for unpacked kernels (default $XDG_CACHE_HOME/sockeye/vm)")
	fs.DurationVar(&o.timeout, "timeout", 5*time.Minute, "timeout of the tests of one package")
	fs.StringVar(&o.files, "files", "", "`directory` that the guest has as /files")
	fs.BoolVar(&o.virtual, "virtual-time", false, "count instructions: the guest has one CPU of 10^9 instructions a second of its clock, however long they take; -timeout is by both clocks")
	fs.IntVar(&o.slower, "slower", 0, "with -virtual-time: the CPU has 10^9 / 2^`N` instructions a second of the guest's clock")
	fs.BoolVar(&o.update, "update", false, "search for newer kernels than in the cache")
	if err := fs.Parse(args); err != nil {
		return nil, err
	}
	o.kernels, o.modules, o.packages = strings.Split(*kernels, ","), strings.Split(*mods, ","), fs.Args()
	if *programs != "" {
		o.programs = strings.Split(*programs, ",")
	}
	if o.slower < 0 || o.slower > 10 || o.slower > 0 && !o.virtual { // 10 is the most that qemu accepts
		return nil, fmt.Errorf("-slower is %d, want 0 to 10, and more than 0 only with -virtual-time", o.slower)
	}
	if o.memory < 256 {
		return nil, fmt.Errorf("-memory is %d, want at least 256", o.memory)
	}
	for _, k := range o.kernels {
		if !kernelName.MatchString(k) {
			return nil, fmt.Errorf("kernel %q: want MAJOR.MINOR or \"newest\"", k)
		}
	}
	var err error
	if o.arch, err = qemu.FindArch(*arch); err != nil {
		return nil, fmt.Errorf("-arch: %w", err)
	}
	for name, pattern := range map[string]string{"run": o.run, "bench": o.bench} {
		if _, err := regexp.Compile(pattern); err != nil {
			return nil, fmt.Errorf("-%s: %w", name, err)
		}
	}
	if o.timeout < time.Second {
		return nil, fmt.Errorf("-timeout is %v, want at least 1s", o.timeout)
	}
	if len(o.packages) == 0 {
		return nil, errors.New("no package given")
	}
	if o.files != "" {
		if _, err := os.ReadDir(o.files); err != nil {
			return nil, fmt.Errorf("-files: %w", err)
		}
	}
	if o.cache == "" {
		dir, err := os.UserCacheDir()
		if err != nil {
			return nil, fmt.Errorf("find the cache directory: %w", err)
		}
		o.cache = filepath.Join(dir, "sockeye", "vm")
	}
	o.cache, err = filepath.Abs(o.cache)
	return o, err
}

func run(ctx context.Context, o *options) error {
	tmp, err := os.MkdirTemp("", "sockeye-vm-")
	if err != nil {
		return fmt.Errorf("make a work folder: %w", err)
	}
	defer os.RemoveAll(tmp)

	suites, err := build(ctx, tmp, o)
	if err != nil {
		return err
	}
	kernels := make([]*qemu.Kernel, len(o.kernels))
	for i, name := range o.kernels {
		if kernels[i], err = qemu.FindKernel(ctx, o.cache, o.arch, name, o.update); err != nil {
			return fmt.Errorf("get kernel %s: %w", name, err)
		}
	}
	reports, err := bootAll(ctx, tmp, kernels, suites, o)
	if err != nil {
		return err
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	failed := false
	fmt.Println()
	for _, r := range reports {
		r.Print(os.Stdout)
		failed = failed || r.Failed()
	}
	for _, e := range o.leftOut {
		fmt.Printf("left out %s: %s\n", e.tests, e.reason)
	}
	if failed {
		return errors.New("tests failed")
	}
	return nil
}

// bootAll runs all suites on each kernel. qemu emulates all CPUs of a machine in one thread: as many machines run at the
// same time as the host has CPUs.
func bootAll(ctx context.Context, tmp string, kernels []*qemu.Kernel, suites []suite, o *options) ([]*qemu.Report, error) {
	reports, errs := make([]*qemu.Report, len(kernels)), make([]error, len(kernels))
	free := make(chan bool, runtime.NumCPU())
	var all sync.WaitGroup
	for i, k := range kernels {
		free <- true
		all.Go(func() {
			defer func() { <-free }()
			// The kernel kills qemu when this thread exits (see qemu.Command). The goroutine keeps the thread until qemu has
			// exited.
			runtime.LockOSThread()
			var err error
			if reports[i], err = boot(ctx, tmp, k, suites, o); err != nil {
				errs[i] = fmt.Errorf("run kernel %s: %w", k.Release, err)
			}
		})
	}
	all.Wait()
	return reports, errors.Join(errs...)
}

// suite is the test binary of one package. The guest reads it from its initramfs.
type suite struct {
	Package string   // import path
	Dir     string   // working directory in the guest
	Args    []string // the binary and its arguments

	hostDir, hostBinary string
}

// build compiles the test binaries, and this program as the guest's /init.
func build(ctx context.Context, tmp string, o *options) ([]suite, error) {
	static := func(args ...string) *exec.Cmd {
		c := qemu.Command(ctx, "go", args...)
		c.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH="+o.arch.Name)
		return c
	}
	const stripped = "-ldflags=-s -w"
	if _, err := qemu.Output(static("build", stripped, "-o", filepath.Join(tmp, "init"), "sockeye/lab/vm")); err != nil {
		return nil, fmt.Errorf("build the guest's init: %w", err)
	}
	list, err := qemu.Output(static(append([]string{"list", "-tags=vm", "-json=Dir,ImportPath,Module,TestGoFiles,XTestGoFiles"}, o.packages...)...))
	if err != nil {
		return nil, fmt.Errorf("list packages: %w", err)
	}
	var skip []string
	for _, e := range o.leftOut {
		skip = append(skip, e.tests)
	}
	var suites []suite
	for dec := json.NewDecoder(bytes.NewReader(list)); ; {
		var p struct {
			Dir, ImportPath           string
			Module                    struct{ Dir string }
			TestGoFiles, XTestGoFiles []string
		}
		if err := dec.Decode(&p); err == io.EOF {
			break
		} else if err != nil {
			return nil, fmt.Errorf("list packages: %w", err)
		}
		if len(p.TestGoFiles)+len(p.XTestGoFiles) == 0 {
			continue
		}
		rel, err := filepath.Rel(p.Module.Dir, p.Dir)
		if err != nil {
			return nil, fmt.Errorf("list packages: %w", err)
		}
		bin := fmt.Sprintf("%d.test", len(suites))
		s := suite{
			Package: p.ImportPath, Dir: filepath.Join("/src", rel), hostDir: p.Dir, hostBinary: filepath.Join(tmp, bin),
			Args: []string{"/tests/" + bin, "-test.v=test2json", "-test.timeout=" + o.timeout.String(), "-test.run=" + o.run, "-test.bench=" + o.bench, "-test.benchtime=1x", "-test.skip=" + strings.Join(skip, "|"), "-test.paniconexit0"},
		}
		if _, err := qemu.Output(static("test", "-c", "-vet=off", "-tags=vm", stripped, "-o", s.hostBinary, p.ImportPath)); err != nil {
			return nil, fmt.Errorf("build the tests of %s: %w", p.ImportPath, err)
		}
		suites = append(suites, s)
	}
	if len(suites) == 0 {
		return nil, fmt.Errorf("no tests in %s", strings.Join(o.packages, " "))
	}
	return suites, nil
}
