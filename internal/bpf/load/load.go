// SPDX-License-Identifier: Apache-2.0

// Package load loads BPF programs and maps, and explains why the kernel refuses one.
package load

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"

	"sockeye/internal/fault"
)

// RefusedError is the error for a program that the kernel's verifier rejects: a fault of Sockeye or of the kernel,
// independent of the caller's rights.
type RefusedError struct {
	What string // name of the program
	Err  *ebpf.VerifierError
}

// Error contains the verifier's reason instead of its errno, which is EACCES for code that it cannot follow. The
// reason is the last line of the log with "invalid", or else the last non-empty line: newer kernels add explanations
// after the reason.
func (e *RefusedError) Error() string {
	reason := ""
	for _, line := range slices.Backward(e.Err.Log) {
		line = strings.TrimSpace(line)
		if strings.Contains(line, "invalid") {
			reason = line
			break
		}
		if reason == "" && !strings.HasPrefix(line, "processed ") {
			reason = line
		}
	}
	return fmt.Sprintf("load %s: refused by the kernel's verifier: %s", e.What, reason)
}

func (e *RefusedError) Unwrap() error { return e.Err }

// Explain returns the hint and the exit code of the error.
func (e *RefusedError) Explain() (hint string, code int) {
	return "this kernel and this version of Sockeye do not fit together: report the message with what uname -r and sockeye version print", fault.CodeUnsupported
}

// collectionError is an error of the library.
type collectionError struct{ err error }

// Error leaves out the library's advice to programmers: the agent raises RLIMIT_MEMLOCK where the kernel needs that.
func (e *collectionError) Error() string {
	return strings.ReplaceAll(e.err.Error(), " (MEMLOCK may be too low, consider rlimit.RemoveMemlock)", "")
}

func (e *collectionError) Unwrap() error { return e.err }

// Program loads one program of a collection, with maps that exist by name.
func Program(spec *ebpf.CollectionSpec, name string, maps map[string]*ebpf.Map) (*ebpf.Program, error) {
	used := make(map[string]*ebpf.Map)
	for name, m := range maps {
		if spec.Maps[name] != nil {
			used[name] = m
		}
	}
	collection, err := Collection(spec, used)
	if err != nil {
		return nil, Explain("program "+name, err)
	}
	defer collection.Close()
	return collection.DetachProgram(name), nil
}

// Explain wraps an error of loading programs.
func Explain(what string, err error) error {
	// An error without a log is not from the verifier.
	if refused, ok := errors.AsType[*ebpf.VerifierError](err); ok && len(refused.Log) > 0 {
		return &RefusedError{what, refused}
	}
	return fmt.Errorf("load %s: %w", what, err)
}

// KernelTypes caches the kernel's BTF. Decoding it takes longer than loading a program.
var KernelTypes = btf.NewCache()

// Collection loads programs and maps. Maps of the given names replace those of the spec.
func Collection(spec *ebpf.CollectionSpec, maps map[string]*ebpf.Map) (*ebpf.Collection, error) {
	collection, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{MapReplacements: maps, Cache: KernelTypes})
	if err != nil {
		return nil, &collectionError{err}
	}
	return collection, nil
}

// SameProgram reports whether instructions, maps and constants of two programs are equal.
func SameProgram(a, b *ebpf.Program) bool {
	ia, errA := a.Info()
	ib, errB := b.Info()
	if errA != nil || errB != nil || !SameInstructions(a, b) {
		return false
	}
	ma, okA := ia.MapIDs()
	mb, okB := ib.MapIDs()
	if !okA || !okB || len(ma) != len(mb) {
		return false
	}
	for i := range ma {
		if ma[i] != mb[i] && !sameConstants(ma[i], mb[i]) {
			return false
		}
	}
	return true
}

// SameInstructions reports whether two programs are the same, apart from their maps and constants.
func SameInstructions(a, b *ebpf.Program) bool {
	ia, errA := a.Info()
	ib, errB := b.Info()
	return errA == nil && errB == nil && ia.Tag == ib.Tag && ia.Type == ib.Type
}

func sameConstants(a, b ebpf.MapID) bool {
	read := func(id ebpf.MapID) ([]byte, bool) {
		m, err := ebpf.NewMapFromID(id)
		if err != nil {
			return nil, false
		}
		defer m.Close()
		info, err := m.Info()
		if err != nil || !info.Frozen() || m.Type() != ebpf.Array {
			return nil, false
		}
		value, err := m.LookupBytes(uint32(0))
		return value, err == nil
	}
	va, okA := read(a)
	vb, okB := read(b)
	return okA && okB && bytes.Equal(va, vb)
}

// LacksHelper reports whether the verifier rejected a helper or kfunc.
func LacksHelper(err error) bool {
	var refused *ebpf.VerifierError
	return errors.As(err, &refused) && slices.ContainsFunc(refused.Log, func(line string) bool {
		return strings.Contains(line, "unknown func") || strings.Contains(line, "cannot use helper")
	})
}

// HaveTracepoint reports whether the kernel has a tracepoint.
func HaveTracepoint(name string) (bool, error) {
	kernel, err := KernelTypes.Kernel()
	if err != nil {
		return false, fmt.Errorf("read types of the kernel: %w", err)
	}
	var of *btf.Typedef
	err = kernel.TypeByName("btf_trace_"+name, &of)
	if errors.Is(err, btf.ErrNotFound) {
		return false, nil
	}
	return err == nil, err
}
