// SPDX-License-Identifier: Apache-2.0

package continuity

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/lab"
	"sockeye/lab/swarm"
)

const (
	bmpPort   = 1790
	ipfixPort = 4739
	ownTCP    = 20000 // + slot: ports of members with lookup
	ownUDP    = 21000
	maxSlots  = 16
	// patience is the timeout of an operation that needs less than a second.
	patience = 30 * time.Second
	// grace is the time in which a process exits on SIGTERM.
	grace = 10 * time.Second
)

func (b *bench) bpffs() string           { return filepath.Join(b.Lab.Dir(), "bpf") }
func (b *bench) pins() string            { return filepath.Join(b.bpffs(), "sockeye") }
func (b *bench) stateDir() string        { return filepath.Join(b.Lab.Dir(), "state") }
func (b *bench) path(name string) string { return filepath.Join(b.Lab.Dir(), name) }
func (b *bench) policyPath() string      { return b.path("policy.yaml") }
func memberName(slot int) string         { return fmt.Sprintf("receiver-%d", slot) }
func (b *bench) lookup() bool            { return b.Steering == "lookup" }
func (b *bench) agentArgs() []string {
	return []string{"agent", "--policy", b.policyPath(), "--state-dir", b.stateDir(), "--run-dir", b.RunDir(), "--pins", b.pins()}
}

// probe finds out which keys and commands the binary knows.
func (b *bench) probe(ctx context.Context) error {
	b.keys = map[string]bool{}
	for key, lines := range map[string][]string{
		"": nil, "on_move": {"on_move: keep"}, "pace": {"pace: {devices: 4, timeout: 2m}"}, "takeover": restartLines,
	} {
		if err := b.writePolicy(4, lines...); err != nil {
			return err
		}
		_, err := b.cli(ctx, "check", b.policyPath())
		if err != nil && key == "" {
			return err
		}
		b.keys[key] = err == nil
	}
	b.commands = map[string]bool{}
	for _, c := range []string{"slot set", "moves", "rebalance"} {
		text, err := b.cli(ctx, append(strings.Fields(c), "--help")...)
		b.commands[c] = err == nil && strings.Contains(text, "sockeye "+c)
	}
	return nil
}

// service is the service of one run: an agent, unless the arm has none, members and devices.
type service struct {
	*bench
	arm     arm
	swarm   *swarm.Swarm
	process float64 // swarm.Member.Process
	agent   *lab.Process
	members map[int]*swarm.Process
	// keepsSlots keeps the state of the agent, so that devices have the same slots in the next run.
	keepsSlots bool
	ended      []swarm.Interval // in which missing datagrams were lost in a member that was ended
	// memory and queue are the peaks of members that have exited.
	memory, queue int
}

// launch starts agent and members.
func (b *bench) launch(ctx context.Context, a arm, slots int) (*service, error) {
	s, err := b.newService(ctx, a, slots)
	if err != nil {
		return s, err
	}
	for slot := range slots {
		if err := s.startMember(slot); err != nil {
			return s, err
		}
	}
	return s, s.ready(ctx, slots)
}

// newService starts an agent.
func (b *bench) newService(ctx context.Context, a arm, slots int) (*service, error) {
	s := &service{bench: b, arm: a, members: map[int]*swarm.Process{}}
	var err error
	if s.swarm, err = swarm.New(b.Lab, b.devices, role); err != nil {
		return s, err
	}
	if !a.agent {
		return s, nil
	}
	if err := s.policy(slots); err != nil {
		return s, err
	}
	return s, s.startAgent(ctx, b.Binary)
}

func (s *service) apply(ctx context.Context, slots int, lines ...string) error {
	if err := s.policy(slots, lines...); err != nil {
		return err
	}
	_, err := s.cli(ctx, "apply")
	return err
}

// policy writes the policy of the arm.
func (s *service) policy(slots int, lines ...string) error {
	if s.arm.onMove != "" && s.keys["on_move"] {
		lines = append(lines, "on_move: "+s.arm.onMove)
	}
	if s.arm.pace != "" {
		lines = append(lines, "pace: "+s.arm.pace)
	}
	lines = append(lines, s.arm.lines...)
	return s.writePolicy(slots, lines...)
}

// writePolicy writes the policy with further lines of the service.
func (b *bench) writePolicy(slots int, lines ...string) error {
	var tcp, udp string
	if b.lookup() {
		tcp = fmt.Sprintf(", member_ports: %d-%d", ownTCP, ownTCP+maxSlots-1)
		udp = fmt.Sprintf(", member_ports: %d-%d", ownUDP, ownUDP+maxSlots-1)
	}
	listeners := fmt.Sprintf(`{protocol: tcp, address: "[::]:%d"%s}`, bmpPort, tcp)
	if !b.onlyBMP {
		listeners += fmt.Sprintf(`, {protocol: udp, address: "[::]:%d"%s}`, ipfixPort, udp)
	}
	text := fmt.Sprintf(`services:
  telemetry:
    slots: %d
    listeners: [%s]
    steering: %s
    user: root
    cgroup: /%s
    members:
      - {match: {command_line: '%s'}, slot: group}
`, slots, listeners, b.Steering, b.Lab.CgroupPath(), b.match)
	for _, line := range lines {
		if line != "" {
			text += "    " + line + "\n"
		}
	}
	if err := os.WriteFile(b.policyPath(), []byte(text), 0o600); err != nil {
		return fmt.Errorf("write policy: %w", err)
	}
	return nil
}

func (s *service) startAgent(ctx context.Context, binary string) error {
	n, err := s.Lab.Namespace("collector")
	if err != nil {
		return err
	}
	s.agent = n.Command(context.Background(), append([]string{binary}, s.agentArgs()...)...)
	s.agent.Name = "agent"
	if err := s.agent.Start(); err != nil {
		return err
	}
	return s.Lab.WaitFor(ctx, "the agent", func() (bool, error) {
		err := s.Ask(ctx, "/v1/status", &api.Status{})
		return err == nil, s.agent.Err()
	})
}

// killAgent sends a signal to the agent, whose keeper goes on.
func (s *service) killAgent(signal unix.Signal) error {
	if err := s.agent.Signal(signal); err != nil {
		return fmt.Errorf("stop agent: %w", err)
	}
	_ = s.agent.Wait() // the status of a killed process
	return nil
}

func (s *service) startMember(slot int) error { return s.startProcess(slot, 0) }

// startSuccessor starts a second process for a slot.
func (s *service) startSuccessor(slot int) error { return s.startProcess(slot, maxSlots/2) }

// startProcess starts a member whose own ports, with lookup, have an offset.
func (s *service) startProcess(slot, offset int) error {
	m := swarm.Member{Slot: slot, TCP: bmpPort, UDP: ipfixPort, Process: s.process}
	if s.arm.agent && s.lookup() {
		m.TCP, m.UDP, m.Plain = ownTCP+uint16(slot+offset), ownUDP+uint16(slot+offset), true
	}
	p, err := s.swarm.StartMember(m, memberName(slot), "")
	if err != nil {
		return err
	}
	s.members[slot] = p
	return p.Listening()
}

// stopMember terminates a member.
func (s *service) stopMember(slot int) error {
	p := s.members[slot]
	delete(s.members, slot)
	return s.end(p, unix.SIGTERM)
}

// end sends a signal to a member that ends the process.
func (s *service) end(p *swarm.Process, signal unix.Signal) error {
	if err := s.peaks(p); err != nil {
		return err
	}
	ended := swarm.Now()
	if err := p.Signal(signal); err != nil {
		return fmt.Errorf("stop %s: %w", p.Name, err)
	}
	_ = p.Wait() // the status of a terminated process
	s.ended = append(s.ended, swarm.Interval{From: ended - endBefore, To: swarm.Now() + endAfter})
	return nil
}

// peaks reads the peaks of a member.
func (s *service) peaks(p *swarm.Process) error {
	memory, err := p.PeakMemory()
	if err != nil {
		return err
	}
	state, err := p.State()
	s.memory, s.queue = max(s.memory, memory), max(s.queue, state.QueuePeak)
	return err
}

// ready waits until the first slots have their members.
func (s *service) ready(ctx context.Context, slots int) error {
	if !s.arm.agent {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	return s.Lab.WaitFor(ctx, fmt.Sprintf("%d ready slots", slots), func() (bool, error) {
		var all []api.SlotStatus
		if err := s.Ask(ctx, "/v1/slots", &all); err != nil {
			return false, err
		}
		for _, slot := range all {
			if slot.Slot < slots && !slot.Ready {
				return false, s.agent.Err()
			}
		}
		return len(all) >= slots, nil
	})
}

// moved waits until no device is left to move.
func (s *service) moved(ctx context.Context) error {
	if !s.arm.agent || !s.commands["moves"] {
		return nil
	}
	_, err := s.cli(ctx, "moves", "--wait")
	return err
}

// cli runs a command of Sockeye.
func (b *bench) cli(ctx context.Context, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	out, err := exec.CommandContext(ctx, b.Binary, append([]string{"--run-dir", b.RunDir()}, args...)...).CombinedOutput()
	if err != nil {
		return string(out), fmt.Errorf("sockeye %s: %w\n%s", strings.Join(args, " "), err, out)
	}
	return string(out), nil
}

// close ends all processes and removes what the agent left.
func (s *service) close() error {
	var errs []error
	if s.swarm != nil {
		errs = append(errs, s.swarm.Kill())
	}
	if s.agent != nil {
		errs = append(errs, s.agent.Stop(grace), s.reset())
	}
	return errors.Join(errs...)
}

// reset removes what the agent has attached and stored.
func (s *service) reset() error {
	n, err := s.Lab.Namespace("collector")
	if err != nil {
		return err
	}
	args := []string{s.Binary, "reset", "--pins", s.pins(), "--state-dir", s.stateDir()}
	if !s.keepsSlots {
		args = append(args, "--state")
	}
	p := n.Command(context.Background(), args...)
	p.Name = "reset"
	if err := p.Start(); err != nil {
		return err
	}
	if err := p.Wait(); err != nil {
		return fmt.Errorf("reset: %w\n%s", err, p.LogTail(15))
	}
	return nil
}
