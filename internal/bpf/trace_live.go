// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"fmt"
	"os"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"sockeye/internal/bpf/load"
)

// TraceLive applies the rules to open connections.
type TraceLive struct {
	nonce uint64
	link  link.Link
}

// Live attaches the hook by which the agent reaches open connections. The error wraps ebpf.ErrNotSupported before
// Linux 5.15.
func (t *Trace) Live() (*TraceLive, error) {
	l := &TraceLive{nonce: NewNonce()}
	spec, err := loadTraceLive()
	if err != nil {
		return nil, err
	}
	if err := spec.Variables["nonce"].Set(l.nonce); err != nil {
		return nil, err
	}
	hook, err := t.load(spec, "trace_live")
	if load.LacksHelper(err) {
		return nil, fmt.Errorf("trace open connections: %w before Linux 5.15: %w", ebpf.ErrNotSupported, err)
	}
	if err != nil {
		return nil, err
	}
	defer hook.Close()
	l.link, err = link.AttachCgroup(link.CgroupOptions{Path: t.cgroup, Attach: ebpf.AttachCGroupSetsockopt, Program: hook})
	if err != nil {
		return nil, fmt.Errorf("attach trace_live to cgroup %s: %w", t.cgroup, err)
	}
	return l, nil
}

// Close detaches the hook.
func (l *TraceLive) Close() error { return l.link.Close() }

// ApplyTo applies the rules to a connection that they have not chosen.
func (l *TraceLive) ApplyTo(fd int, role uint32) error {
	return l.call(fd, traceLiveAdopt, traceLiveTraceLiveRequest{Role: role})
}

// Forget clears the choice of a connection.
func (l *TraceLive) Forget(fd int) error {
	return l.call(fd, traceLiveForget, traceLiveTraceLiveRequest{})
}

func (l *TraceLive) call(fd int, name uint32, r traceLiveTraceLiveRequest) error {
	r.Nonce = l.nonce
	value := unsafe.String((*byte)(unsafe.Pointer(&r)), unsafe.Sizeof(r))
	// A socket outside of the hook's cgroup gives ENOPROTOOPT.
	return os.NewSyscallError("setsockopt", unix.SetsockoptString(fd, traceLiveLevel, int(name), value))
}
