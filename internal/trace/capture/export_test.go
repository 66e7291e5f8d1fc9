// SPDX-License-Identifier: Apache-2.0

package capture

import (
	"testing"

	"github.com/cilium/ebpf"
)

// ProgramIDs returns the ids of the programs.
func (p *Capture) ProgramIDs() (ids []ebpf.ProgramID) {
	for _, program := range p.collection.Programs {
		if info, err := program.Info(); err == nil {
			if id, ok := info.ID(); ok {
				ids = append(ids, id)
			}
		}
	}
	return ids
}

// RenameTracepoint makes Open look for another tracepoint.
func RenameTracepoint(from, to string) (restore func()) {
	for i := range tracepoints {
		if t := &tracepoints[i]; t.tracepoint == from {
			t.tracepoint = to
			return func() { t.tracepoint = from }
		}
	}
	panic("no tracepoint " + from)
}

// LeaveOut detaches all programs at a tracepoint except one, which has the effect of the kernel skipping them because
// one was interrupted.
func (p *Capture) LeaveOut(tb testing.TB, tracepoint string, but int) {
	tb.Helper()
	seen := 0
	for i, t := range tracepoints {
		if t.tracepoint != tracepoint {
			continue
		}
		if seen++; seen-1 == but {
			continue
		}
		if err := p.links[i].Close(); err != nil {
			tb.Fatal(err)
		}
	}
	if seen < 2 {
		tb.Fatalf("%d programs at %s", seen, tracepoint)
	}
}
