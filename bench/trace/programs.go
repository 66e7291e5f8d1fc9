// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
)

//go:generate go tool bpf2go -target bpfel -no-global-types benchTrace ../../bpf/bench_trace.bpf.c

// others contains the programs of each state in which no agent runs.
var others = map[string][]string{
	called:        {"bench_called"},
	marking:       {"bench_marking"},
	fentry:        {"bench_fentry"},
	fentryReading: {"bench_reading"},
	kprobe:        {"bench_kprobe", "bench_kretprobe"},
}

// forbidden returns why the programs of a state cannot be attached here, or "". Hosts may forbid fentry and kprobes.
func (t *bench) forbidden(state string) string {
	err := errors.Join(t.attachOthers(state), t.detachOthers())
	if err == nil {
		return ""
	}
	line, _, _ := strings.Cut(err.Error(), "\n")
	return line
}

// attachOthers attaches the programs of a state. Those of sockops belong to the cgroup of the load, the others to the
// host.
func (t *bench) attachOthers(state string) error {
	spec, err := loadBenchTrace()
	if err != nil {
		return fmt.Errorf("load programs: %w", err)
	}
	wanted := map[string]*ebpf.ProgramSpec{}
	for _, name := range others[state] {
		wanted[name] = spec.Programs[name]
	}
	spec.Programs = wanted
	c, err := ebpf.NewCollection(spec)
	if err != nil {
		return fmt.Errorf("load programs: %w", err)
	}
	defer c.Close()
	for name, p := range c.Programs {
		var l link.Link
		switch p.Type() {
		case ebpf.SockOps:
			l, err = link.AttachCgroup(link.CgroupOptions{Path: filepath.Join(t.Lab.Cgroup(), tracedGroup), Attach: ebpf.AttachCGroupSockOps, Program: p})
		case ebpf.Tracing:
			l, err = link.AttachTracing(link.TracingOptions{Program: p})
		case ebpf.Kprobe:
			if wanted[name].SectionName == "kretprobe/tcp_sendmsg" {
				l, err = link.Kretprobe("tcp_sendmsg", p, nil)
			} else {
				l, err = link.Kprobe("tcp_sendmsg", p, nil)
			}
		}
		if err != nil {
			return errors.Join(fmt.Errorf("attach %s: %w", name, err), t.detachOthers())
		}
		t.others = append(t.others, l)
	}
	return nil
}

func (t *bench) detachOthers() error {
	var errs []error
	for _, l := range t.others {
		errs = append(errs, l.Close())
	}
	t.others = nil
	return errors.Join(errs...)
}
