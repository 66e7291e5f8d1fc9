// SPDX-License-Identifier: Apache-2.0

package continuity

import (
	"context"
	"errors"
	"time"

	"sockeye/bench/harness"
	"sockeye/lab/swarm"
)

// The comparison of memory: each device sends an initial dump of many routes when it connects. A member reads all dumps
// at once, and processes their messages at a limited rate. The rest waits in its memory.

const (
	memoryPart  = "memory"
	memorySlots = 3
	// memoryRate is the number of datagrams per second of each device in this comparison.
	memoryRate = 10
)

// memory is the result of the comparison of memory in one arm.
type memory struct {
	// Cold are the members that start while all devices try to connect, and Move is the member of a slot that is added.
	Cold peak `json:"cold_start"`
	Move peak `json:"move"`
	measurement
}

// peak contains the peaks of one member, the largest of several.
type peak struct {
	Memory  int     `json:"memory_bytes"` // resident set
	Queue   int     `json:"queue_bytes"`  // messages that waited to be processed
	Seconds float64 `json:"seconds"`      // until all dumps were processed
}

func (b *bench) measureMemory(ctx context.Context, a arm) (m memory, err error) {
	s, err := b.newService(ctx, a, memorySlots)
	s.process, s.keepsSlots = b.Dump.Process, true
	defer func() { err = errors.Join(err, s.close()) }()
	if err != nil {
		return m, err
	}
	load := b.load(memoryRate, b.Dump.Routes)
	load.Devices, load.DumpRate = b.Dump.Devices, b.Dump.Rate
	connected := make(chan error, 1)
	go func() { connected <- s.swarm.StartDevices(ctx, load) }()
	if err := harness.Pause(ctx, time.Second/2); err != nil {
		return m, errors.Join(err, <-connected)
	}
	begun := swarm.Now()
	for slot := range memorySlots {
		if err := s.startMember(slot); err != nil {
			return m, errors.Join(err, s.swarm.Kill(), <-connected)
		}
	}
	if err := <-connected; err != nil {
		return m, err
	}
	dumps := &swarm.Analysis{}
	if err := s.dumped(ctx, dumps, load.Devices); err != nil {
		return m, err
	}
	m.Cold.Seconds = (dumps.LastDump() - begun).Seconds()
	for _, p := range s.members {
		if err := m.Cold.add(p); err != nil {
			return m, err
		}
	}
	m.measurement, err = s.watch(ctx, dumps, func() error {
		begun := swarm.Now()
		err := inOrder(
			s.applying(ctx, memorySlots+1), s.starting(memorySlots), s.readying(ctx, memorySlots+1), s.moving(ctx),
			s.pausing(ctx), // until the devices that move have noticed that their connections are closed
			func() error { return s.dumped(ctx, dumps, load.Devices) },
		)
		if err != nil {
			return err
		}
		m.Move.Seconds = max(0, (dumps.LastDump() - begun).Seconds()) // 0 if no device has moved its connection
		return m.Move.add(s.members[memorySlots])
	})
	m.Scenario, m.Arm = memoryPart, a.name
	return m, err
}

func (p *peak) add(m *swarm.Process) error {
	memory, err := m.PeakMemory()
	if err != nil {
		return err
	}
	state, err := m.State()
	p.Memory, p.Queue = max(p.Memory, memory), max(p.Queue, state.QueuePeak)
	return err
}
