// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// bpftuneDir has bpftune and its libraries in a virtual machine: bin/bpftune, and lib with the dynamic linker.
const bpftuneDir = "/files"

// startBPFTune starts bpftune (github.com/oracle/bpftune), and returns when its programs are attached. It attaches to the
// root of cgroup v2 and to the kernel, so that it tunes all processes. stop lets it restore the sysctls.
func (t *bench) startBPFTune(ctx context.Context) (stop func() error, err error) {
	n, err := t.Lab.Namespace("bpftune")
	if err != nil {
		return nil, err
	}
	lib := filepath.Join(bpftuneDir, "lib")
	p := n.Command(ctx, filepath.Join(lib, "ld-linux-x86-64.so.2"), "--library-path", lib, filepath.Join(bpftuneDir, "bin", "bpftune"), "-s", "-R")
	p.Name = "bpftune"
	if err := p.Start(); err != nil {
		return nil, err
	}
	// It handles SIGTERM once its tuners run.
	err = t.Lab.WaitFor(ctx, "bpftune", func() (bool, error) {
		if !p.Running() {
			return false, fmt.Errorf("%w; last lines of its log:\n%s", p.Err(), p.LogTail(15))
		}
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.Pid()))
		if errors.Is(err, os.ErrNotExist) {
			return false, nil
		}
		for line := range strings.Lines(string(b)) {
			if mask, ok := strings.CutPrefix(line, "SigCgt:"); ok {
				caught, err := strconv.ParseUint(strings.TrimSpace(mask), 16, 64)
				return caught&(1<<(unix.SIGTERM-1)) != 0, err
			}
		}
		return false, err
	})
	if err != nil {
		return nil, err
	}
	return func() error {
		fmt.Fprintf(os.Stderr, "\nlast lines of bpftune's log:\n%s\n", p.LogTail(40))
		return p.Stop(bpftuneGrace)
	}, nil
}

// bpftuneGrace is the time that bpftune has to exit.
const bpftuneGrace = 30 * time.Second
