// SPDX-License-Identifier: Apache-2.0

package testenv

import (
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
)

// TestRightsAreNotRemembered loads a program without capabilities, then a program
// with capabilities. After the first load, the BPF library must not assume that the
// kernel does not support BTF and object names.
func TestRightsAreNotRemembered(t *testing.T) {
	number := &btf.Int{Name: "int", Size: 4, Encoding: btf.Signed}
	function := &btf.Func{Name: "typed", Type: &btf.FuncProto{Return: number}, Linkage: btf.GlobalFunc}
	load := func() (*ebpf.Program, error) {
		return ebpf.NewProgram(&ebpf.ProgramSpec{
			Name: "typed", Type: ebpf.CGroupSockAddr, AttachType: ebpf.AttachCGroupInet4Connect, License: "Apache-2.0",
			Instructions: asm.Instructions{
				btf.WithFuncMetadata(asm.Mov.Imm(asm.R0, 1).WithSymbol(function.Name), function),
				asm.Return(),
			},
		})
	}
	WithoutRights(t, func() {
		if p, err := load(); err == nil {
			p.Close()
			t.Error("a program was loaded without capabilities")
		}
	})
	p, err := load()
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	info, err := p.Info()
	if err != nil {
		t.Fatal(err)
	}
	if _, ok := info.BTFID(); !ok || info.Name != "typed" {
		t.Errorf("loaded program: name %q, BTF %v", info.Name, ok)
	}
}
