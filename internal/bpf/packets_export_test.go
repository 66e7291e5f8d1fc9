// SPDX-License-Identifier: Apache-2.0

package bpf

import "github.com/cilium/ebpf"

// ProgramIDs are the numbers of the programs.
func (p *Packets) ProgramIDs() (ids []ebpf.ProgramID) {
	for _, program := range p.collection.Programs {
		if info, err := program.Info(); err == nil {
			if id, ok := info.ID(); ok {
				ids = append(ids, id)
			}
		}
	}
	return ids
}

// RenameTracepoint has OpenPackets look for another tracepoint.
func RenameTracepoint(from, to string) (restore func()) {
	for i := range packetTracepoints {
		if t := &packetTracepoints[i]; t.tracepoint == from {
			t.tracepoint = to
			return func() { t.tracepoint = from }
		}
	}
	panic("no tracepoint " + from)
}
