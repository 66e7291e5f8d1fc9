// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"github.com/cilium/ebpf"

	"sockeye/internal/bpf/load"
)

// RXPrograms returns the ids of the programs of openRX, by name.
func (t *Trace) RXPrograms() (map[string]ebpf.ProgramID, error) {
	ids := make(map[string]ebpf.ProgramID)
	for pin, l := range t.links {
		info, err := l.Info()
		if err != nil {
			return nil, err
		}
		ids[pin] = info.Program
	}
	for _, pin := range []string{pinTraceLink, pinSendLink} {
		delete(ids, pin)
	}
	return ids, nil
}

// Readers returns the number of sockets in the map of sockets whose readers have or had waiting samples.
func (t *Trace) Readers() (n int) {
	var key uint64
	entries := t.maps["readers"].Iterate()
	for value := new([]byte); entries.Next(&key, value); n++ {
	}
	return n
}

// HaveTracepoint reports whether the kernel has a tracepoint.
var HaveTracepoint = load.HaveTracepoint
