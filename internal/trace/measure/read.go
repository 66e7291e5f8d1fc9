// SPDX-License-Identifier: Apache-2.0

package measure

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/clock"
	"sockeye/internal/config"
)

// Names maps the numbers of the programs to names.
type Names struct {
	Rules    []config.TraceRule
	Services []config.Service
	TuneRule func(id uint32) string // "" if unknown
	Cgroup   func(id uint64) string // path below the mount; "" if it was removed
}

// txStages are the stages in the order of the programs' counters.
var txStages = [...]config.Stage{
	bpf.TraceStageSend: config.StageSend, bpf.TraceStageStack: config.StageStack, bpf.TraceStageQdisc: config.StageQdisc,
	bpf.TraceStageNIC: config.StageNIC, bpf.TraceStageNetwork: config.StageNetwork, bpf.TraceStageTotal: Total,
}

// Results reads the measurements since the rules came into force. It omits groups without messages.
func (n Names) Results(t *bpf.Trace, rules []bpf.TraceRule) ([]Result, error) {
	groups, err := n.Indexes(t, rules)
	if err != nil {
		return nil, err
	}
	waiting, err := t.RXWaiting()
	if err != nil {
		return nil, err
	}
	received := t.Receives()
	results := []Result{}
	for index, group := range groups {
		r := Result{Group: group, Outcomes: make(map[Outcome]uint64), Stages: make(map[config.Stage]*Histogram)}
		stages := n.stages(group.Rule)
		stats, err := t.Stats(index)
		if err != nil {
			return nil, err
		}
		r.addSent(stats, stages)
		if received {
			rx, err := t.RXStats(index)
			if err != nil {
				return nil, err
			}
			r.addReceived(rx, waiting[index].Oldest, stages)
		}
		if r.Chosen > 0 || r.RXChosen > 0 {
			results = append(results, r)
		}
	}
	slices.SortFunc(results, func(a, b Result) int { return cmp.Compare(a.Group.Label(), b.Group.Label()) })
	return results, nil
}

// stages returns the stages of a rule, and total if the rule measures a stage of sent messages.
func (n Names) stages(rule string) []config.Stage {
	i := slices.IndexFunc(n.Rules, func(r config.TraceRule) bool { return r.Name == rule })
	if i < 0 {
		return nil
	}
	return append([]config.Stage{Total}, n.Rules[i].Stages...)
}

func (r *Result) addSent(s *bpf.TraceStats, stages []config.Stage) {
	r.Bytes, r.Unqueued, r.Undriven = s.Bytes, s.Unqueued, s.Undriven
	ended := countEnds(s.Outcome[:], Outcomes, r.Outcomes)
	// The counters are read while messages are sent: an outcome may be visible before its choice.
	r.Chosen = max(s.Chosen, ended)
	r.InFlight = r.Chosen - ended
	for i, stage := range txStages {
		if slices.Contains(stages, stage) {
			r.addStage(stage, &s.Stage[i])
		}
	}
}

// rxStages are the receive stages in the order of the programs' counters.
var rxStages = [...]config.Stage{bpf.TraceRXStack: config.StageRXStack, bpf.TraceRXReader: config.StageReader}

func (r *Result) addReceived(s *bpf.TraceRXStats, oldest time.Duration, stages []config.Stage) {
	r.RXUnstamped, r.RXOldest = s.Unstamped, oldest
	r.RXOutcomes = make(map[Outcome]uint64)
	ended := countEnds(s.Outcome[:], RXOutcomes, r.RXOutcomes)
	r.RXChosen = max(s.Chosen, ended)
	r.RXWaiting = r.RXChosen - ended
	for i, stage := range rxStages {
		if slices.Contains(stages, stage) {
			r.addStage(stage, (*bpf.TraceHistogram)(&s.Stage[i]))
		}
	}
}

// countEnds reads the counts of outcomes into a map and returns their sum.
func countEnds(counts []uint64, names []Outcome, into map[Outcome]uint64) (sum uint64) {
	for i, outcome := range names {
		if counts[i] > 0 {
			into[outcome] = counts[i]
		}
		sum += counts[i]
	}
	return sum
}

func (r *Result) addStage(stage config.Stage, from *bpf.TraceHistogram) {
	h := histogramOf(from)
	if h.Count > 0 {
		r.Stages[stage] = h
	}
}

func histogramOf(from *bpf.TraceHistogram) *Histogram {
	h := &Histogram{Sum: from.Sum, Max: from.Max, Buckets: from.Bucket}
	for _, n := range from.Bucket {
		h.Count += n
	}
	return h
}

// Slowest reads the slowest messages of the last minutes, slowest first.
func (n Names) Slowest(t *bpf.Trace, rules []bpf.TraceRule) ([]Sample, error) {
	groups, err := n.Indexes(t, rules)
	if err != nil {
		return nil, err
	}
	translate, err := n.translator(groups)
	if err != nil {
		return nil, err
	}
	slowest := []Sample{}
	for index := range groups {
		samples, err := t.Slowest(index)
		if err != nil {
			return nil, err
		}
		for i := range samples {
			slowest = append(slowest, translate(&samples[i]))
		}
	}
	slices.SortFunc(slowest, func(a, b Sample) int { return cmp.Compare(b.Stages[Total], a.Stages[Total]) })
	return slowest, nil
}

// Translator returns a function that converts samples. For a group that was created later, only the name of the rule is
// known.
func (n Names) Translator(t *bpf.Trace, rules []bpf.TraceRule) (func(*bpf.TraceSample) Sample, error) {
	groups, err := n.Indexes(t, rules)
	if err != nil {
		return nil, err
	}
	return n.translator(groups)
}

// Indexes returns all groups of a tracing by index. Several indexes have the same name if cgroups or tune rules were
// removed.
func (n Names) Indexes(t *bpf.Trace, rules []bpf.TraceRule) (map[uint32]Group, error) {
	keys, err := t.Groups()
	if err != nil {
		return nil, err
	}
	groups := make(map[uint32]Group, len(keys)+len(rules))
	for index, key := range keys {
		groups[index] = n.group(key)
	}
	for i, rule := range rules {
		groups[rule.First] = Group{Rule: n.Rules[i].Name, Other: true}
	}
	return groups, nil
}

// arms are the arms of tune's trials; none is a connection without a tune rule.
var arms = [...]string{"none", "treated", "control"}

// group returns the group of a key.
func (n Names) group(key bpf.TraceGroup) Group {
	g := Group{Protocol: config.TCP, Port: key.Port}
	if key.Protocol == unix.IPPROTO_UDP {
		g.Protocol = config.UDP
	}
	if int(key.Rule) < 1 || int(key.Rule) > len(n.Rules) {
		return g
	}
	rule := n.Rules[key.Rule-1]
	g.Rule = rule.Name
	for _, by := range rule.GroupBy {
		switch by.Kind {
		case config.GroupRemote:
			bits := by.IPv6
			if key.Ipv4 != 0 {
				bits = by.IPv4
			}
			g.Remote = netip.PrefixFrom(bpf.UnmappedAddress(key.Remote), bits)
		case config.GroupService:
			g.Service = "none"
			if key.Service > 0 && int(key.Service) <= len(n.Services) {
				g.Service = n.Services[key.Service-1].Name
			}
		case config.GroupCgroup:
			if g.Cgroup = n.Cgroup(key.Cgroup); g.Cgroup == "" {
				g.Cgroup = fmt.Sprintf("id %d", key.Cgroup)
			}
		case config.GroupRule:
			g.TuneRule = "none"
			if key.TuneRule != 0 {
				if g.TuneRule = n.TuneRule(key.TuneRule); g.TuneRule == "" {
					g.TuneRule = fmt.Sprintf("id %d", key.TuneRule)
				}
			}
		case config.GroupArm:
			g.Arm = arms[min(int(key.Arm), len(arms)-1)]
		}
	}
	return g
}

func (n Names) translator(groups map[uint32]Group) (func(*bpf.TraceSample) Sample, error) {
	hz, err := clock.Hz()
	if err != nil {
		return nil, err
	}
	tick := time.Second / time.Duration(hz)
	clock := clock.Offset()
	return func(s *bpf.TraceSample) Sample {
		group, ok := groups[s.Group]
		if !ok && s.Rule > 0 && int(s.Rule) <= len(n.Rules) {
			group = Group{Rule: n.Rules[s.Rule-1].Name, Protocol: config.TCP}
		}
		return n.sample(s, group, clock, tick)
	}, nil
}

// sample converts a message that has ended. clock is CLOCK_REALTIME - CLOCK_MONOTONIC.
func (n Names) sample(s *bpf.TraceSample, group Group, clock time.Duration, tick time.Duration) Sample {
	m := &s.Message
	out := Sample{
		Ended: time.Unix(0, int64(s.Ended)).Add(clock), Group: group, Cookie: s.Cookie,
		Local:  netip.AddrPortFrom(bpf.UnmappedAddress(s.Tuple.Local), s.Tuple.LocalPort),
		Remote: netip.AddrPortFrom(bpf.UnmappedAddress(s.Tuple.Remote), s.Tuple.RemotePort),
		Role:   config.RoleConnect, Key: m.Key, Length: m.Length,
		Cwnd: m.Cwnd, InFlight: m.InFlight, Outstanding: m.Outstanding, Unsent: m.Unsent, Window: m.Window, MSS: m.Mss,
		SRTT: time.Duration(m.Srtt) * time.Microsecond, MinRTT: time.Duration(m.MinRtt) * time.Microsecond,
		Nagle: m.Flags&bpf.TraceMessageNagle != 0, Cork: m.Flags&bpf.TraceMessageCork != 0,
		Retransmits: m.Retransmits, Repeats: m.Repeats,
	}
	if uint32(s.Role) == bpf.MatchAccept {
		out.Role = config.RoleAccept
	}
	if int(s.Outcome) < len(Outcomes) {
		out.Outcome = Outcomes[s.Outcome]
	}
	// The kernel has no minimum before the first RTT sample, and ^0 also means none.
	if m.MinRtt == ^uint32(0) {
		out.MinRTT = 0
	}
	if m.Flags&bpf.TraceMessagePaced != 0 && m.Pacing != ^uint64(0) {
		out.PacingRate = m.Pacing
	}
	if m.Queued != 0 {
		out.WindowLimited = time.Duration(m.WindowLimited) * tick
		out.BufferLimited = time.Duration(m.BufferLimited) * tick
	}
	out.Stages = stagesOf(m, s.Ended)
	out.Stages[Total] = time.Duration(s.Total)
	if m.Requeued != 0 {
		out.Requeued = time.Duration(m.Requeued - m.Queued)
	}
	return out
}
