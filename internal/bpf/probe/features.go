// SPDX-License-Identifier: Apache-2.0

// Package probe asks the kernel which features it has, and which programs of other owners are loaded.
package probe

import (
	"errors"
	"fmt"
	"runtime"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/features"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"sockeye/internal/bpf/load"
	"sockeye/internal/fault"
)

// HaveSend loads and attaches trace_send, whose collection the caller has. It returns an error that wraps
// ebpf.ErrNotSupported if the kernel does not support fentry programs, or does not permit them to any user.
func HaveSend(spec *ebpf.CollectionSpec) error {
	// Whoever may load raw tracepoint programs may load fentry programs.
	if err := probeProgram(ebpf.RawTracepoint, ebpf.AttachNone); err != nil {
		return fmt.Errorf("load program that reads the kernel: %w", err)
	}
	collection, err := load.Collection(spec, nil)
	switch {
	case errors.Is(err, unix.EPERM):
		return fmt.Errorf("fentry: %w: this kernel permits no user to load such programs: %w", ebpf.ErrNotSupported, err)
	case load.LacksHelper(err):
		return fmt.Errorf("storage of sockets for fentry: %w before Linux %s: %w", ebpf.ErrNotSupported, fentrySince(), err)
	case err != nil:
		return fmt.Errorf("load program trace_send: %w", err)
	}
	defer collection.Close()
	l, err := link.AttachTracing(link.TracingOptions{Program: collection.Programs["trace_send"]})
	if err != nil {
		return fmt.Errorf("attach trace_send: %w", err)
	}
	return l.Close()
}

// Feature is a kernel feature that Sockeye uses.
type Feature struct {
	Name  string
	Since string // kernel version
	// Needed describes what needs the feature.
	Needed string
	// Optional reports that Sockeye works without the feature, with the limit in Needed.
	Optional bool
	Probe    func() error
}

// Hint explains the error of a probe.
func (f *Feature) Hint(err error) string {
	if errors.Is(err, unix.EPERM) {
		return "this kernel, or its lockdown, forbids them"
	}
	return "needs Linux " + f.Since
}

// CheckKernel returns a *load.UnavailableError if this process cannot call bpf(2), or an error that lists the features
// without which Sockeye does not work and that the kernel lacks. A probe that fails for another reason is not an error.
func CheckKernel() error {
	if err := load.Available(); err != nil {
		return err
	}
	var missing []string
	// Fentry programs are optional, so their probe is not called.
	for _, f := range Features(nil) {
		if !f.Optional && errors.Is(f.Probe(), ebpf.ErrNotSupported) {
			missing = append(missing, fmt.Sprintf("%s (Linux %s)", f.Name, f.Since))
		}
	}
	if len(missing) > 0 {
		return fault.Unsupported(fmt.Errorf("this kernel lacks %s", strings.Join(missing, ", ")), "Sockeye needs Linux 5.10 or later; sockeye doctor shows all features")
	}
	return nil
}

// Features lists the kernel features that Sockeye uses. The error of a probe wraps ebpf.ErrNotSupported if the kernel
// lacks the feature; any other error means that the probe failed. The caller passes bpf.HaveSend as the probe of fentry
// programs: it loads a program of package bpf, which imports this one.
func Features(send func() error) []Feature {
	return []Feature{
		{"sk_reuseport programs", "4.19", "steering: reuseport", false, func() error {
			return probeProgram(ebpf.SkReuseport, ebpf.AttachNone)
		}},
		{"sk_reuseport migration", "5.14", "without it a connection that waits in a closing listener's queue is reset", true, HaveMigration},
		{"sk_lookup programs", "5.9", "steering: lookup", false, func() error {
			return probeProgram(ebpf.SkLookup, ebpf.AttachSkLookup)
		}},
		{"cgroup bind hooks", "4.17", "detecting members", false, func() error {
			return probeProgram(ebpf.CGroupSock, ebpf.AttachCGroupInet4PostBind)
		}},
		{"cgroup release hook", "5.9", "closing a slot when a socket closes", false, func() error {
			return probeProgram(ebpf.CGroupSock, ebpf.AttachCgroupInetSockRelease)
		}},
		{"sockops programs", "4.13", "detecting members, tune", false, func() error {
			return probeProgram(ebpf.SockOps, ebpf.AttachCGroupSockOps)
		}},
		{"socket storage for sockops", "5.4", "tune", false, func() error {
			return features.HaveProgramHelper(ebpf.SockOps, asm.FnSkStorageGet)
		}},
		{"TCP header options for sockops", "5.10", "tags of tune", false, func() error {
			return features.HaveProgramHelper(ebpf.SockOps, asm.FnStoreHdrOpt)
		}},
		{"setsockopt for cgroup/setsockopt", "5.15", "without it apply --live is not possible", true, func() error {
			return probeLive()
		}},
		{"BPF timestamping", "6.15", "without it trace measures only what is received, and packets", true, HaveTimestamps},
		{"fentry programs", fentrySince(), "without them trace has no stage send", true, send},
		{"raw tracepoints", "4.17", "without them trace has no stage reader, no packets, and nothing of what is sent over UDP", true, func() error {
			return probeProgram(ebpf.RawTracepoint, ebpf.AttachNone)
		}},
		{"BPF ring buffer", "5.8", "detecting members, samples and packets of trace", false, func() error {
			return features.HaveMapType(ebpf.RingBuf)
		}},
		{"BPF links", "5.7", "steering without an agent", false, func() error {
			return probeLinks()
		}},
		{"pidfd_getfd", "5.6", "taking members' sockets", false, func() error {
			_, err := unix.PidfdGetfd(-1, -1, 0)
			if errors.Is(err, unix.ENOSYS) {
				return fmt.Errorf("pidfd_getfd: %w", ebpf.ErrNotSupported)
			}
			return nil
		}},
	}
}

// HaveTimestamps returns an error that wraps ebpf.ErrNotSupported if the kernel has no BPF timestamping (Linux 6.15).
func HaveTimestamps() error {
	kernel, err := load.KernelTypes.Kernel()
	if err != nil {
		return fmt.Errorf("read types of the kernel: %w", err)
	}
	var f *btf.Func
	err = kernel.TypeByName("bpf_sock_ops_enable_tx_tstamp", &f)
	if errors.Is(err, btf.ErrNotFound) {
		return fmt.Errorf("BPF timestamping: %w before Linux 6.15", ebpf.ErrNotSupported)
	}
	return err
}

// HaveMigration returns an error that wraps ebpf.ErrNotSupported if sk_reuseport programs cannot move connections of a
// closing listener. It loads a program that reads migrating_sk, which the verifier of older kernels rejects.
func HaveMigration() error {
	const migratingSk = 48 // offset in struct sk_reuseport_md
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.SkReuseport, AttachType: ebpf.AttachSkReuseportSelectOrMigrate, License: "Dual BSD/GPL",
		Instructions: asm.Instructions{
			asm.LoadMem(asm.R2, asm.R1, migratingSk, asm.DWord),
			asm.Mov.Imm(asm.R0, 1), asm.Return(),
		},
	})
	if err == nil {
		return p.Close()
	}
	if errors.Is(err, unix.EACCES) || errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("%w: %w", ebpf.ErrNotSupported, err)
	}
	return err
}

// fentrySince returns the release from which fentry programs can use the storage of sockets. On arm64, they attach to
// functions of the kernel since it has direct calls of ftrace (kernel commit 2aa6ac03516d).
func fentrySince() string {
	if runtime.GOARCH == "arm64" {
		return "6.4"
	}
	return "5.11"
}

// probeProgram loads a program that accepts everything.
func probeProgram(kind ebpf.ProgramType, attach ebpf.AttachType) error {
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: kind, AttachType: attach, License: "Dual BSD/GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 1), asm.Return()},
	})
	if err == nil {
		return p.Close()
	}
	if errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("%w: %w", ebpf.ErrNotSupported, err)
	}
	return err
}

// probeLive loads a program that calls bpf_setsockopt without arguments. A kernel that allows the helper rejects the
// arguments, others the helper.
func probeLive() error {
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.CGroupSockopt, AttachType: ebpf.AttachCGroupSetsockopt, License: "Dual BSD/GPL",
		Instructions: asm.Instructions{asm.FnSetsockopt.Call(), asm.Mov.Imm(asm.R0, 1), asm.Return()},
	})
	if err == nil {
		return p.Close()
	}
	if errors.Is(err, unix.EACCES) {
		return nil
	}
	if errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("%w: %w", ebpf.ErrNotSupported, err)
	}
	return err
}

// probeLinks creates a link with an invalid target. A kernel with links returns EBADF.
func probeLinks() error {
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.CGroupSock, AttachType: ebpf.AttachCGroupInet4PostBind, License: "Dual BSD/GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 1), asm.Return()},
	})
	if err != nil {
		return err
	}
	defer p.Close()
	l, err := link.AttachRawLink(link.RawLinkOptions{Target: ^(-1 << 30), Program: p, Attach: ebpf.AttachCGroupInet4PostBind})
	if err == nil {
		return l.Close()
	}
	if errors.Is(err, unix.EBADF) {
		return nil
	}
	if errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("%w: %w", ebpf.ErrNotSupported, err)
	}
	return err
}
