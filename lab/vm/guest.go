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
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/lab/qemu"
)

// guest is process 1 in the virtual machine. The host kills the machine when guest
// sends the event Done.
func guest() {
	qemu.Must(unix.Mount("dev", "/dev", "devtmpfs", 0, "mode=0755"), "mount /dev")
	p := qemu.OpenPort(qemu.GuestPort())
	func() {
		defer func() {
			if e := recover(); e != nil {
				p.Send(qemu.Event{Error: fmt.Sprint(e)})
			}
		}()
		setUp()
		var j job
		text, err := os.ReadFile("/job.json")
		qemu.Must(err, "read the job")
		qemu.Must(json.Unmarshal(text, &j), "read the job")
		for _, name := range j.Modules {
			qemu.LoadModule(filepath.Join("/modules", name))
		}
		for i, s := range j.Suites {
			p.Send(qemu.Event{Start: &i})
			end := s.run(p)
			p.Send(qemu.Event{End: &end})
		}
	}()
	p.Send(qemu.Event{Done: true})
	for {
		_ = unix.Pause()
	}
}

// setUp prepares the guest like a host with systemd, as far as tests of network
// programs need it. RLIMIT_MEMLOCK is the default of the kernel: before Linux 5.11,
// a program that does not raise it fails.
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
		if !strings.HasPrefix(m[1], "/sys") { // directories in sysfs are created by the kernel
			qemu.Must(os.MkdirAll(m[1], 0o755), "make a mount point")
		}
		qemu.Must(unix.Mount(m[0], m[1], m[0], 0, m[2]), "mount ", m[1])
	}
	qemu.Must(os.Symlink("/proc/self/fd", "/dev/fd"), "make /dev/fd")
	qemu.Must(unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 1024, Max: 524288}), "limit open files")
	qemu.Must(unix.Sethostname([]byte("vm")), "set the host's name")

	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	qemu.Must(err, "set lo up")
	defer unix.Close(s)
	lo, err := unix.NewIfreq("lo")
	qemu.Must(err, "set lo up")
	lo.SetUint16(unix.IFF_UP)
	qemu.Must(unix.IoctlIfreq(s, unix.SIOCSIFFLAGS, lo), "set lo up")
}

// run runs a test binary until it exits, and then kills its remaining processes. It
// returns the error of the test binary, or "".
func (s suite) run(output io.Writer) string {
	r, w, err := os.Pipe()
	qemu.Must(err, "make a pipe")
	defer r.Close()
	null, err := os.Open(os.DevNull)
	qemu.Must(err, "open standard input")
	defer null.Close()
	pid, err := syscall.ForkExec(s.Args[0], s.Args, &syscall.ProcAttr{
		Dir:   s.Dir,
		Env:   []string{"PATH=/bin", "HOME=/root", "USER=root", "TMPDIR=/tmp", "PWD=" + s.Dir},
		Files: []uintptr{null.Fd(), w.Fd(), w.Fd()},
	})
	w.Close()
	qemu.Must(err, "start the tests of ", s.Package)
	copied := make(chan struct{})
	go func() {
		defer close(copied)
		_, _ = io.Copy(output, r)
	}()

	// Process 1 also reaps orphaned processes.
	var status syscall.WaitStatus
	for {
		if p, err := syscall.Wait4(-1, &status, 0, nil); p == pid {
			break
		} else if !errors.Is(err, syscall.EINTR) {
			qemu.Must(err, "wait for the tests of ", s.Package)
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
