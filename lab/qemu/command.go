// SPDX-License-Identifier: Apache-2.0

// Package qemu has common functions of the programs that boot Linux kernels under
// qemu: Debian's kernels and mirrors, initramfs archives, and child processes that
// are killed when their parent exits.
package qemu

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Command prepares a program that is killed when this process exits for any reason.
func Command(ctx context.Context, name string, args ...string) *exec.Cmd {
	c := exec.CommandContext(ctx, name, args...)
	c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	c.WaitDelay = 2 * time.Second
	return c
}

// Output runs a command and returns its standard output. The error includes the
// standard error.
func Output(c *exec.Cmd) ([]byte, error) {
	var stderr bytes.Buffer
	c.Stderr = &stderr
	out, err := c.Output()
	if err != nil {
		return nil, fmt.Errorf("%s: %w\n%s", strings.Join(c.Args, " "), err, bytes.TrimSpace(stderr.Bytes()))
	}
	return out, nil
}

// ErrInterrupted is the cancellation cause of a context of Interruptible.
var ErrInterrupted = errors.New("interrupted")

// Interruptible returns a context that is canceled by a signal, and by the exit of
// the parent "go run". SIGTERM and SIGKILL to "go run" do not reach this process.
func Interruptible() context.Context {
	ctx, cancel := context.WithCancelCause(context.Background())
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	go func() {
		<-signals
		cancel(ErrInterrupted)
	}()
	parent := os.Getppid()
	if exe, _ := os.Readlink(fmt.Sprintf("/proc/%d/exe", parent)); filepath.Base(exe) != "go" {
		return ctx
	}
	if fd, err := unix.PidfdOpen(parent, 0); err == nil {
		go func() {
			var err error = unix.EINTR
			for err == unix.EINTR {
				_, err = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, -1)
			}
			cancel(ErrInterrupted)
		}()
	}
	return ctx
}

// Lock creates a file if necessary, and waits for an exclusive lock on it. Closing
// the file releases the lock.
func Lock(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, fmt.Errorf("lock the cache: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		f.Close()
		return nil, fmt.Errorf("lock the cache: %w", err)
	}
	return f, nil
}
