// SPDX-License-Identifier: Apache-2.0

package continuity

import (
	"encoding/binary"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"sockeye/bench/harness"
	"sockeye/internal/bpf"
)

const (
	templatesPart = "templates"
	// templateLimit is the goal for the cost of a datagram, in nanoseconds.
	templateLimit = 10
)

// templateCost is the cost of the socket filter that copies templates, above that of a filter that does nothing.
type templateCost struct {
	IPFIX harness.Distribution `json:"ipfix_ns"` // a datagram with one data set
	Other harness.Distribution `json:"other_ns"` // a datagram that is neither IPFIX nor NetFlow v9
}

// measureTemplates runs both filters in turns (BPF_PROG_TEST_RUN).
func (b *bench) measureTemplates() (cost *templateCost, err error) {
	const datagrams = 200_000
	rounds := 60
	if b.Quick {
		rounds = 20
	}
	filter, unload, err := bpf.LoadTemplateFilter()
	if err != nil {
		return nil, err
	}
	defer unload()
	empty, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.SocketFilter, License: "Dual BSD/GPL", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, -1), asm.Return()},
	})
	if err != nil {
		return nil, fmt.Errorf("load empty filter: %w", err)
	}
	defer empty.Close()
	// The kernel runs a filter on the bytes after the Ethernet header: here, the UDP header.
	const headers, message, set = 14 + 8, 216, 200
	other := make([]byte, headers+message)
	ipfix := make([]byte, headers+message)
	binary.BigEndian.PutUint16(ipfix[headers:], 10)
	binary.BigEndian.PutUint16(ipfix[headers+16:], 256)
	binary.BigEndian.PutUint16(ipfix[headers+18:], set)
	run := func(p *ebpf.Program, frame []byte) (float64, error) {
		_, each, err := p.Benchmark(frame, datagrams, nil)
		if err != nil {
			return 0, fmt.Errorf("run socket filter: %w", err)
		}
		return float64(each.Nanoseconds()), nil
	}
	var above [2][]float64
	for range rounds {
		for i, frame := range [][]byte{ipfix, other} {
			without, err := run(empty, frame)
			if err != nil {
				return nil, err
			}
			with, err := run(filter, frame)
			if err != nil {
				return nil, err
			}
			above[i] = append(above[i], with-without)
		}
	}
	return &templateCost{harness.DistributionOf(above[0]), harness.DistributionOf(above[1])}, nil
}
