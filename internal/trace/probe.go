// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/cilium/ebpf"

	"sockeye/internal/api"
	"sockeye/internal/bpf"
	"sockeye/internal/bpf/probe"
	"sockeye/internal/config"
)

// stageProbe determines the stages that the kernel can measure, and caches whether it allows fentry programs.
type stageProbe struct {
	mu     sync.Mutex
	probed bool
	err    error
}

// lackingStages returns the stages of each rule that the kernel cannot measure.
func (p *stageProbe) lackingStages(rules []config.TraceRule) (map[string][]api.TraceSkipped, error) {
	skipped := make(map[string][]api.TraceSkipped)
	for _, rule := range rules {
		for _, stage := range rule.Stages {
			needs, err := p.requirement(rule, stage)
			if err != nil {
				return nil, err
			}
			if needs != "" {
				skipped[rule.Name] = append(skipped[rule.Name], api.TraceSkipped{Stage: string(stage), Needs: needs})
			}
		}
	}
	return skipped, nil
}

// requirement returns the requirement of a TCP stage that the kernel does not meet, or "".
func (p *stageProbe) requirement(rule config.TraceRule, stage config.Stage) (string, error) {
	if !slices.Contains(rule.Protocols, config.TCP) {
		return "", nil
	}
	switch stage {
	case config.StageRXStack, config.StageReader:
		return "", nil
	case config.StageStack, config.StageQdisc:
		if slices.Contains(rule.Protocols, config.UDP) {
			return "", nil
		}
	case config.StageSend:
		err := p.probeSend()
		if errors.Is(err, ebpf.ErrNotSupported) {
			return "fentry programs, which this kernel does not allow", nil
		}
		if err != nil {
			return "", fmt.Errorf("probe fentry: %w", err)
		}
	}
	err := probe.HaveTimestamps()
	if errors.Is(err, ebpf.ErrNotSupported) {
		return "BPF timestamping, Linux 6.15 or later", nil
	}
	return "", err
}

// probeSend probes the stage send and caches the result, except for errors that may pass, such as a lack of memory.
func (p *stageProbe) probeSend() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.probed {
		p.err = bpf.HaveSend()
		p.probed = p.err == nil || errors.Is(p.err, ebpf.ErrNotSupported)
	}
	return p.err
}
