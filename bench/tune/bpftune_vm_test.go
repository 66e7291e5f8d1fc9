// SPDX-License-Identifier: Apache-2.0

//go:build vm

package tune

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// bpftuneDir has bpftune (github.com/oracle/bpftune) and its libraries in the virtual machine: bin/bpftune, and lib with
// the dynamic linker. See tools/bpftune.
const bpftuneDir = "/files"

// bpftuneGrace is the time that bpftune has to start or to exit.
const bpftuneGrace = time.Minute

// startBPFTune starts bpftune, and returns when its programs are attached. It attaches to the root of cgroup v2 and to the
// kernel, so that it tunes all processes and namespaces. stop lets it restore the sysctls.
func startBPFTune(ctx context.Context) (stop func() error, err error) {
	// It makes a directory there.
	if err := os.MkdirAll("/var/run", 0o755); err != nil {
		return nil, fmt.Errorf("start bpftune: %w", err)
	}
	lib := filepath.Join(bpftuneDir, "lib")
	cmd := exec.CommandContext(ctx, filepath.Join(lib, "ld-linux-x86-64.so.2"), "--library-path", lib, filepath.Join(bpftuneDir, "bin", "bpftune"), "-s", "-R")
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stdout
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start bpftune: %w", err)
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	for end := time.Now().Add(bpftuneGrace); !catches(cmd.Process.Pid, syscall.SIGTERM); {
		select {
		case err := <-done:
			return nil, fmt.Errorf("start bpftune: it exited: %v", err)
		case <-time.After(20 * time.Millisecond):
		}
		if time.Now().After(end) {
			return nil, fmt.Errorf("start bpftune: not ready after %v", bpftuneGrace)
		}
	}
	return func() error {
		if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
			return fmt.Errorf("stop bpftune: %w", err)
		}
		select {
		case err := <-done:
			return err
		case <-time.After(bpftuneGrace):
			return fmt.Errorf("stop bpftune: it runs after %v", bpftuneGrace)
		}
	}, nil
}

// catches returns whether a process has a handler for a signal. bpftune has one for SIGTERM when its tuners run.
func catches(pid int, signal syscall.Signal) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return false
	}
	for line := range strings.Lines(string(b)) {
		if mask, ok := strings.CutPrefix(line, "SigCgt:"); ok {
			caught, err := strconv.ParseUint(strings.TrimSpace(mask), 16, 64)
			return err == nil && caught&(1<<(signal-1)) != 0
		}
	}
	return false
}
