// SPDX-License-Identifier: Apache-2.0

// Package trace measures the latency of messages by stage.
package trace

import (
	"fmt"
	"slices"
	"time"

	"sockeye/internal/bpf"
	"sockeye/internal/config"
	"sockeye/internal/match"
)

// Compile compiles the rules of one cgroup, in their order, for the BPF programs. services are the services of the
// policy; a group refers to a service by its index, starting at 1.
func Compile(rules []config.TraceRule, services []config.Service) (*bpf.TraceRules, error) {
	matches, protocols := make([]config.Match, len(rules)), make([][]config.Protocol, len(rules))
	compiled := &bpf.TraceRules{Services: make(map[bpf.TraceListener]uint32)}
	for i, rule := range rules {
		matches[i], protocols[i] = rule.Match, rule.Protocols
		r := bpf.TraceRule{
			Connections: uint32(rule.Connections), Messages: uint32(rule.Messages.OneIn),
			Flags: flagsOf(rule), First: uint32(compiled.Groups), Groups: uint32(rule.Groups),
		}
		if rule.Messages.PerSecond > 0 {
			r.Interval = uint64(time.Second) / uint64(rule.Messages.PerSecond)
		}
		for _, by := range rule.GroupBy {
			r.GroupBy |= groupBits[by.Kind]
			if by.Kind == config.GroupRemote {
				r.Bits4, r.Bits6 = uint8(96+by.IPv4), uint8(by.IPv6)
			}
		}
		compiled.Rules = append(compiled.Rules, r)
		compiled.Groups += rule.Groups + 1
	}
	sets, err := match.Compile(matches, protocols, services)
	if err != nil {
		return nil, err
	}
	compiled.MatchRules = *sets
	for i, service := range services {
		for _, l := range service.Listeners {
			key := bpf.TraceListener{Port: l.Address.Port(), Protocol: protocolNumbers[l.Protocol]}
			if !l.Address.Addr().IsUnspecified() {
				key.Address = bpf.MappedAddress(l.Address.Addr())
			}
			if _, ok := compiled.Services[key]; !ok {
				compiled.Services[key] = uint32(i + 1)
			}
		}
	}
	if len(compiled.Services) > bpf.TraceServices {
		return nil, fmt.Errorf("compile services: %d listeners, maximum %d", len(compiled.Services), bpf.TraceServices)
	}
	return compiled, nil
}

var groupBits = map[config.GroupKind]uint32{
	config.GroupRemote: bpf.TraceByRemote, config.GroupPort: bpf.TraceByPort, config.GroupService: bpf.TraceByService,
	config.GroupCgroup: bpf.TraceByCgroup, config.GroupRule: bpf.TraceByRule, config.GroupArm: bpf.TraceByArm,
}

// Protocol numbers of IANA.
var protocolNumbers = map[config.Protocol]uint8{config.TCP: 6, config.UDP: 17}

func flagsOf(rule config.TraceRule) uint32 {
	asks := func(stages ...config.Stage) bool {
		return slices.ContainsFunc(stages, func(s config.Stage) bool { return slices.Contains(rule.Stages, s) })
	}
	tcp, udp := slices.Contains(rule.Protocols, config.TCP), slices.Contains(rule.Protocols, config.UDP)
	var flags uint32
	for _, f := range []struct {
		set  bool
		flag uint32
	}{
		{tcp, bpf.TraceRuleTCP},
		{udp, bpf.TraceRuleUDP},
		{tcp && asks(config.StageSend, config.StageStack, config.StageQdisc, config.StageNIC, config.StageNetwork), bpf.TraceRuleTX},
		{udp && asks(config.StageStack, config.StageQdisc), bpf.TraceRuleUDPTX},
		{asks(config.StageRXStack, config.StageReader), bpf.TraceRuleRX},
		{asks(config.StageReader), bpf.TraceRuleReader},
	} {
		if f.set {
			flags |= f.flag
		}
	}
	return flags
}
