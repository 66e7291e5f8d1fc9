// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"sockeye/internal/bpf/load"
)

// Live applies rules to open sockets. It is attached to the cgroup until Close.
type Live struct {
	link  link.Link
	nonce uint64
}

// Live attaches the hook. The error wraps ebpf.ErrNotSupported if the hook cannot set options on this kernel.
func (t *Tune) Live() (_ *Live, err error) {
	l := &Live{}
	defer func() {
		if err != nil {
			l.Close()
		}
	}()
	var b [8]byte
	rand.Read(b[:])
	l.nonce = binary.LittleEndian.Uint64(b[:])
	hook, err := t.loadLive("tune_live", l.nonce)
	if load.LacksHelper(err) {
		return nil, fmt.Errorf("set options of open connections: %w before Linux 5.15: %w", ebpf.ErrNotSupported, err)
	}
	if err != nil {
		return nil, err
	}
	defer hook.Close()
	l.link, err = link.AttachCgroup(link.CgroupOptions{Path: t.cgroup, Attach: ebpf.AttachCGroupSetsockopt, Program: hook})
	if err != nil {
		return nil, fmt.Errorf("attach tune_live to cgroup %s: %w", t.cgroup, err)
	}
	return l, nil
}

// Close detaches the hook.
func (l *Live) Close() error {
	if l.link == nil {
		return nil
	}
	return l.link.Close()
}

// ApplyTo assigns to a connection the rule that it would have got at its start, and sets the options that can be set on
// open connections. Tune.Connection returns the rule.
func (l *Live) ApplyTo(fd int, role uint32) error {
	return l.call(fd, TuneLiveAdopt, TuneLiveRequest{Role: role})
}

// Set sets an option by bpf_setsockopt.
func (l *Live) Set(fd int, level, name uint32, value int32) error {
	return l.call(fd, TuneLiveSet, TuneLiveRequest{Level: level, Name: name, Value: value})
}

// Forget removes the rule from a connection. Options that were set stay set.
func (l *Live) Forget(fd int) error { return l.call(fd, TuneLiveForget, TuneLiveRequest{}) }

// Listen prepares a listener for tags. The error wraps ebpf.ErrNotSupported if the kernel only lets the listener read
// tags.
func (l *Live) Listen(fd int) error {
	err := l.call(fd, TuneLiveListen, TuneLiveRequest{})
	if errors.Is(err, unix.EPERM) {
		// The error of the hook if callbacks cannot be enabled.
		return fmt.Errorf("write tags into SYN-ACKs of an open listener: %w before Linux 6.12: %w", ebpf.ErrNotSupported, err)
	}
	return err
}

func (l *Live) call(fd int, name uint32, r TuneLiveRequest) error {
	r.Nonce = l.nonce
	value := unsafe.String((*byte)(unsafe.Pointer(&r)), unsafe.Sizeof(r))
	// A socket outside of the hook's cgroup gives ENOPROTOOPT.
	return os.NewSyscallError("setsockopt", unix.SetsockoptString(fd, TuneLiveLevel, int(name), value))
}

// Decide returns the rules that connections would get, by the code of the program; 0 is none.
func (t *Tune) Decide(questions ...MatchQuestion) ([]uint32, error) {
	p, err := t.loadLive("tune_decide", 0)
	if err != nil {
		return nil, err
	}
	defer p.Close()
	answers := make([]uint32, len(questions))
	for i := range questions {
		packet := make([]byte, 14, 14+unsafe.Sizeof(questions[i]))
		packet = append(packet, unsafe.Slice((*byte)(unsafe.Pointer(&questions[i])), unsafe.Sizeof(questions[i]))...)
		if answers[i], _, err = p.Test(packet); err != nil {
			return nil, fmt.Errorf("ask tune_decide: %w", err)
		}
	}
	return answers, nil
}

func (t *Tune) loadLive(name string, nonce uint64) (*ebpf.Program, error) {
	spec, err := loadTuneLive()
	if err != nil {
		return nil, err
	}
	if err := spec.Variables["nonce"].Set(nonce); err != nil {
		return nil, err
	}
	for other := range spec.Programs {
		if other != name {
			delete(spec.Programs, other)
		}
	}
	return load.Program(spec, name, t.maps)
}
