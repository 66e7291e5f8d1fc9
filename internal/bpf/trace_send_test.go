// SPDX-License-Identifier: Apache-2.0

package bpf_test

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/cilium/ebpf"

	"sockeye/internal/bpf"
	"sockeye/internal/testenv"
)

// TestHaveSend checks that a privileged process learns whether the kernel supports it, and that an unprivileged one
// gets an error about its permissions.
func TestHaveSend(t *testing.T) {
	err := bpf.HaveSend()
	t.Logf("%v", err)
	if err != nil && !errors.Is(err, ebpf.ErrNotSupported) {
		t.Errorf("%+v", err)
	}
	testenv.WithoutRights(t, func() {
		if err := bpf.HaveSend(); !errors.Is(err, os.ErrPermission) || errors.Is(err, ebpf.ErrNotSupported) {
			t.Errorf("without rights: %v", err)
		}
	})
}

// TestTraceSendOpens checks that the entry of sendmsg is recorded until tracing ends, whichever process holds it.
func TestTraceSendOpens(t *testing.T) {
	if err := bpf.HaveSend(); errors.Is(err, ebpf.ErrNotSupported) {
		t.Skipf("kernel: %v", err)
	}
	c := bpf.TraceConfig{Dir: filepath.Join(testenv.BPFFS(t), "trace_test"), Cgroup: subgroup(t, "send"), Rules: traceAll(), Send: true}
	use := func() {
		first := openTrace(t, c)
		adopted := c
		adopted.Adopt = true
		check(t, first.Close())
		again := openTrace(t, adopted)
		if programs := again.Programs(); !slices.Contains(programs, "trace_send") {
			t.Errorf("attached are %q", programs)
		}
		kept := kernelObjects(t, again)
		check(t, bpf.RemoveTrace(c.Dir))
		check(t, again.Close())
		for what, gone := range kept {
			await(t, "the end of "+what, gone)
		}
	}
	use() // what is opened once for all
	opened := testenv.Opened(t)
	for range opens {
		use()
	}
	opened()
}
