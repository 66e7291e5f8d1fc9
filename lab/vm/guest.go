// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// An event is one line that the guest writes to its second serial port, which
// the kernel's console does not use. One field is set.
type event struct {
	Start  *int    `json:",omitempty"` // a suite begins: its index in the job
	Output []byte  `json:",omitempty"` // of the suite that runs
	End    *string `json:",omitempty"` // a suite has ended: how, or "" for exit code 0
	Error  string  `json:",omitempty"` // something is wrong with the guest
	Done   bool    `json:",omitempty"` // all suites have ended
}

// must ends process 1, and with it the machine, on an error that leaves it
// without a port to report it on; later, guest recovers and reports it.
func must(err error, what ...any) {
	if err != nil {
		panic(fmt.Sprintf("%s: %v", fmt.Sprint(what...), err))
	}
}

// guest is process 1 in the virtual machine, which the host ends once it is
// told that all is done.
func guest() {
	must(unix.Mount("dev", "/dev", "devtmpfs", 0, "mode=0755"), "mount /dev")
	p := openPort("/dev/ttyS1")
	func() {
		defer func() {
			if e := recover(); e != nil {
				p.send(event{Error: fmt.Sprint(e)})
			}
		}()
		setUp()
		var j job
		text, err := os.ReadFile("/job.json")
		must(err, "read the job")
		must(json.Unmarshal(text, &j), "read the job")
		for _, name := range j.Modules {
			loadModule(name)
		}
		for i, s := range j.Suites {
			p.send(event{Start: &i})
			end := s.run(p)
			p.send(event{End: &end})
		}
	}()
	p.send(event{Done: true})
	for {
		_ = unix.Pause()
	}
}

type port struct {
	mu sync.Mutex
	f  *os.File
}

func openPort(path string) *port {
	f, err := os.OpenFile(path, os.O_WRONLY|unix.O_NOCTTY, 0)
	must(err, "open the port")
	tio, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	must(err, "set the port up")
	tio.Oflag &^= unix.OPOST
	must(unix.IoctlSetTermios(int(f.Fd()), unix.TCSETS, tio), "set the port up")
	return &port{f: f}
}

func (p *port) send(e event) {
	p.mu.Lock()
	defer p.mu.Unlock()
	line, err := json.Marshal(e)
	must(err, "encode an event")
	_, err = p.f.Write(append(line, '\n'))
	must(err, "write to the port")
}

// Write sends a suite's output.
func (p *port) Write(b []byte) (int, error) {
	p.send(event{Output: b})
	return len(b), nil
}

// setUp makes the guest look like a host that systemd has booted, as far as
// tests of network programs need it. RLIMIT_MEMLOCK stays the kernel's own, so
// that a program that has to raise it, before Linux 5.11, fails here if it does not.
func setUp() {
	for _, m := range [][3]string{
		{"proc", "/proc"},
		{"sysfs", "/sys"},
		{"cgroup2", "/sys/fs/cgroup"},
		{"bpf", "/sys/fs/bpf", "mode=0700"},
		{"debugfs", "/sys/kernel/debug"},
		{"tracefs", "/sys/kernel/tracing"},
		{"devpts", "/dev/pts", "mode=0620,ptmxmode=0666"},
		{"tmpfs", "/dev/shm", "mode=1777"},
		{"tmpfs", "/run", "mode=0755"},
		{"tmpfs", "/tmp", "mode=1777"},
	} {
		if !strings.HasPrefix(m[1], "/sys") { // there, folders are the kernel's
			must(os.MkdirAll(m[1], 0o755), "make a mount point")
		}
		must(unix.Mount(m[0], m[1], m[0], 0, m[2]), "mount ", m[1])
	}
	must(os.Symlink("/proc/self/fd", "/dev/fd"), "make /dev/fd")
	must(unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 1024, Max: 524288}), "limit open files")
	must(unix.Sethostname([]byte("vm")), "set the host's name")

	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	must(err, "set lo up")
	defer unix.Close(s)
	lo, err := unix.NewIfreq("lo")
	must(err, "set lo up")
	lo.SetUint16(unix.IFF_UP)
	must(unix.IoctlIfreq(s, unix.SIOCSIFFLAGS, lo), "set lo up")
}

func loadModule(name string) {
	f, err := os.Open(filepath.Join("/modules", name))
	must(err, "load kernel module ", name)
	defer f.Close()
	if err := unix.FinitModule(int(f.Fd()), "", 0); !errors.Is(err, unix.EEXIST) {
		must(err, "load kernel module ", name)
	}
}

// run runs one test binary to its end, and then kills whatever it left behind.
// It says why the end was not a good one.
func (s suite) run(output io.Writer) string {
	r, w, err := os.Pipe()
	must(err, "make a pipe")
	defer r.Close()
	null, err := os.Open(os.DevNull)
	must(err, "open standard input")
	defer null.Close()
	pid, err := syscall.ForkExec(s.Args[0], s.Args, &syscall.ProcAttr{
		Dir:   s.Dir,
		Env:   []string{"PATH=/bin", "HOME=/root", "USER=root", "TMPDIR=/tmp", "PWD=" + s.Dir},
		Files: []uintptr{null.Fd(), w.Fd(), w.Fd()},
	})
	w.Close()
	must(err, "start the tests of ", s.Package)
	copied := make(chan struct{})
	go func() {
		defer close(copied)
		_, _ = io.Copy(output, r)
	}()

	// Process 1 reaps orphans, too.
	var status syscall.WaitStatus
	for {
		if p, err := syscall.Wait4(-1, &status, 0, nil); p == pid {
			break
		} else if !errors.Is(err, syscall.EINTR) {
			must(err, "wait for the tests of ", s.Package)
		}
	}
	_ = syscall.Kill(-1, syscall.SIGKILL)
	for err = nil; !errors.Is(err, syscall.ECHILD); {
		_, err = syscall.Wait4(-1, nil, 0, nil)
	}
	select {
	case <-copied:
	case <-time.After(10 * time.Second):
		return "its output does not end"
	}
	switch {
	case status.Signaled():
		return fmt.Sprintf("killed by %v", status.Signal())
	case status.ExitStatus() != 0:
		return fmt.Sprintf("exit status %d", status.ExitStatus())
	}
	return ""
}
