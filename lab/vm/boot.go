// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"sockeye/lab/qemu"
)

// bootTimeout is the maximum time from power on to the first suite.
const bootTimeout = 90 * time.Second

// boot runs all suites in a virtual machine. Errors in the guest are in the report;
// boot returns errors of the host.
func boot(ctx context.Context, tmp string, k *qemu.Kernel, suites []suite, o *options) (*qemu.Report, error) {
	dir, err := os.MkdirTemp(tmp, "machine-")
	if err != nil {
		return nil, err
	}
	m := &qemu.Machine{
		Kernel: k, Initramfs: filepath.Join(dir, "initramfs"), Console: filepath.Join(dir, "console"),
		CPUs: 2, Memory: o.memory, Args: []string{"-cpu", k.Arch.CPU}, BootTimeout: bootTimeout, Timeout: o.timeout,
	}
	if o.virtual {
		// With sleep=off, the clock jumps to the next timer while the guest is idle.
		m.CPUs, m.Args = 1, append(m.Args, "-icount", fmt.Sprintf("shift=%d,sleep=off", o.slower))
	}
	for _, s := range suites {
		m.Suites = append(m.Suites, s.Package)
	}
	if err := writeInitramfs(ctx, m.Initramfs, tmp, k, suites, o); err != nil {
		return nil, err
	}
	r := qemu.NewReport(k.Short())
	return r, m.Run(ctx, r)
}
