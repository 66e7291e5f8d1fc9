// SPDX-License-Identifier: Apache-2.0

package testenv

import (
	"errors"
	"net"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
)

// NeedTCX skips a test on kernels without TCX, before Linux 6.6.
func NeedTCX(t testing.TB) {
	t.Helper()
	lo, err := net.InterfaceByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, License: "GPL", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, -1), asm.Return()}})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	l, err := link.AttachTCX(link.TCXOptions{Interface: lo.Index, Program: p, Attach: ebpf.AttachTCXIngress})
	if errors.Is(err, ebpf.ErrNotSupported) {
		t.Skipf("kernel: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
}
