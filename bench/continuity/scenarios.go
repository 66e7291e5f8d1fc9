// SPDX-License-Identifier: Apache-2.0

package continuity

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/bench/harness"
	"sockeye/lab/swarm"
)

// splitLimit is the time for which a device may be split by a change.
const splitLimit = 100 * time.Millisecond

// A datagram that was sent from endBefore before the signal that ended a member to endAfter after its exit, and that no member
// has counted, is one that this member had not read or counted: a busy machine does not run a member for a while.
const (
	endBefore = time.Second
	endAfter  = 2 * time.Millisecond
)

// scenario is a series of changes under load.
type scenario struct {
	name, title string
	// plain and change are the changes without and with Sockeye. Without plain, nothing is changed, because plain
	// SO_REUSEPORT has nothing to change.
	plain, change func(ctx context.Context, s *service) error
	// needs is the command of Sockeye without which the scenario is not run.
	needs string
	// restarts is set if the scenario replaces a member, with restartArms.
	restarts bool
}

func (s *scenario) arms() []arm {
	if s.restarts {
		return restartArms
	}
	return arms
}

// startSlots is the number of slots before the changes.
const startSlots = 4

// replaced is the slot whose member is replaced.
const replaced = 1

func restartMember(ctx context.Context, s *service) error {
	p := s.members[replaced]
	return inOrder(
		func() error { return s.end(p, unix.SIGKILL) },
		func() error { return harness.Pause(ctx, s.Down) },
		s.starting(replaced), s.readying(ctx, startSlots),
	)
}

func upgradeMember(ctx context.Context, s *service) error {
	former := s.members[replaced]
	return inOrder(
		func() error { return s.startSuccessor(replaced) },
		s.pausing(ctx), s.readying(ctx, startSlots),
		func() error { return s.end(former, unix.SIGTERM) },
		s.readying(ctx, startSlots),
	)
}

func (s *service) starting(slot int) func() error { return func() error { return s.startMember(slot) } }
func (s *service) stopping(slot int) func() error { return func() error { return s.stopMember(slot) } }
func (s *service) moving(ctx context.Context) func() error {
	return func() error { return s.moved(ctx) }
}
func (s *service) pausing(ctx context.Context) func() error {
	return func() error { return harness.Pause(ctx, s.Pause) }
}
func (s *service) readying(ctx context.Context, slots int) func() error {
	return func() error { return s.ready(ctx, slots) }
}
func (s *service) applying(ctx context.Context, slots int, lines ...string) func() error {
	return func() error { return s.apply(ctx, slots, lines...) }
}
func (s *service) running(ctx context.Context, args ...string) func() error {
	return func() error { _, err := s.cli(ctx, args...); return err }
}

var scenarios = []scenario{
	{
		name: "resize", title: "4 to 5 slots, and 5 to 3",
		plain: func(ctx context.Context, s *service) error {
			return inOrder(s.starting(4), s.pausing(ctx), s.stopping(4), s.stopping(3))
		},
		change: func(ctx context.Context, s *service) error {
			return inOrder(
				s.applying(ctx, 5), s.starting(4), s.readying(ctx, 5), s.moving(ctx), s.pausing(ctx),
				s.applying(ctx, 3), s.moving(ctx), s.pausing(ctx), s.stopping(4), s.stopping(3),
			)
		},
	},
	{
		name: "drain", title: "slot 2 drained, and ready again", needs: "slot set",
		plain: func(ctx context.Context, s *service) error {
			return inOrder(s.stopping(2), s.pausing(ctx), s.starting(2))
		},
		change: func(ctx context.Context, s *service) error {
			drain := []string{"slot", "set", "2", "drain", "--wait"}
			if s.arm.onMove == "keep" { // the sessions never leave
				drain = drain[:len(drain)-1]
			}
			return inOrder(s.running(ctx, drain...), s.pausing(ctx), s.running(ctx, "slot", "set", "2", "ready", "--wait"))
		},
	},
	{
		name: "map", title: "a device map added, and removed",
		change: func(ctx context.Context, s *service) error {
			var csv strings.Builder
			for i := range s.Devices {
				a := swarm.Address(i)
				fmt.Fprintf(&csv, "%v/%d,router-%d\n", a, a.BitLen(), i)
			}
			if err := os.WriteFile(s.path("devices.csv"), []byte(csv.String()), 0o600); err != nil {
				return fmt.Errorf("write device map: %w", err)
			}
			return inOrder(
				s.applying(ctx, startSlots, "device_map: devices.csv"), s.moving(ctx), s.pausing(ctx),
				s.applying(ctx, startSlots), s.moving(ctx),
			)
		},
	},
	{
		name: "upgrade", title: "the agent killed and replaced, and restarted",
		change: func(ctx context.Context, s *service) error {
			replace := func(signal unix.Signal) func() error {
				return func() error {
					return inOrder(func() error { return s.killAgent(signal) }, func() error { return s.startAgent(ctx, s.Next) }, s.readying(ctx, startSlots))
				}
			}
			return inOrder(replace(unix.SIGKILL), s.pausing(ctx), replace(unix.SIGTERM))
		},
	},
	{
		name: "rebalance", title: "the measured load evened out", needs: "rebalance",
		change: func(ctx context.Context, s *service) error {
			return inOrder(s.running(ctx, "rebalance", "--apply", "--measure", "1s"), s.moving(ctx))
		},
	},
	{
		name: "restart", title: "a member killed, and started again", restarts: true,
		plain: restartMember, change: restartMember,
	},
	{
		name: "upgrade_member", title: "a second process started for a slot, and the first one terminated", restarts: true,
		plain: upgradeMember, change: upgradeMember,
	},
}

func scenarioNames() (names []string) {
	for _, s := range scenarios {
		names = append(names, s.name)
	}
	return names
}

func inMS(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// measurement is one run of a scenario in one arm.
type measurement struct {
	Scenario string `json:"scenario"`
	Arm      string `json:"arm"`
	Round    int    `json:"round"`

	Sent          uint64  `json:"sent"`           // datagrams
	Lost          uint64  `json:"lost"`           // of these, not received by any member, and not InProcess
	InProcess     uint64  `json:"in_process"`     // received by the kernel for a process that was ended before it read or counted them
	Overflowed    uint64  `json:"overflowed"`     // of these, dropped at a full queue of the kernel or of a member
	Refused       uint64  `json:"refused"`        // ICMP errors that devices received
	WithoutRoutes uint64  `json:"without_routes"` // datagrams at a member without the routes of the device
	Undecodable   uint64  `json:"undecodable"`    // datagrams at a member without their template
	Undecoded     float64 `json:"undecoded_s"`    // longest time in which no datagram of a UDP port was decoded
	Split         int     `json:"split"`          // devices split for longer than splitLimit
	SplitEver     int     `json:"split_ever"`     // devices split at any time
	SplitMS       float64 `json:"split_ms_max"`
	Closed        int     `json:"sessions_closed"`
	Needless      int     `json:"closed_needlessly"`
	GapMS         float64 `json:"gap_ms_max"`
	Retries       int     `json:"connections_refused"`
	Memory        int     `json:"member_memory_peak_bytes"`
	StalledMS     float64 `json:"stalled_ms_max"` // longest time in which the devices' process did not run although it was due
}

// measure runs a scenario.
func (b *bench) measure(ctx context.Context, sc scenario, a arm) (m measurement, err error) {
	s, err := b.launch(ctx, a, startSlots)
	defer func() { err = errors.Join(err, s.close()) }()
	if err != nil {
		return m, err
	}
	if err := s.swarm.StartDevices(ctx, b.load(b.Rate, 20)); err != nil {
		return m, err
	}
	analysis := &swarm.Analysis{Silence: b.silence(), Period: time.Duration(float64(b.Exporters) / b.Rate * float64(time.Second))}
	if err := s.dumped(ctx, analysis, b.Devices); err != nil {
		return m, err
	}
	m, err = s.watch(ctx, analysis, func() error {
		change := sc.change
		if !a.agent {
			change = sc.plain
		}
		if err := harness.Pause(ctx, b.Pause/2); err != nil {
			return err
		}
		if change == nil { // as long as with a change
			change = func(ctx context.Context, s *service) error { return harness.Pause(ctx, s.Pause) }
		}
		return inOrder(func() error { return change(ctx, s) }, s.pausing(ctx))
	})
	m.Scenario, m.Arm = sc.name, a.name
	return m, err
}

// inOrder runs steps until one fails.
func inOrder(steps ...func() error) error {
	for _, f := range steps {
		if err := f(); err != nil {
			return err
		}
	}
	return nil
}

// silence is the time without datagrams after which a device is not split.
func (b *bench) silence() time.Duration {
	return max(splitLimit, time.Duration(5/b.Rate*float64(time.Second)))
}

// dumped waits until the members have processed the initial dumps of that many devices.
func (s *service) dumped(ctx context.Context, a *swarm.Analysis, devices int) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	err := s.Lab.WaitFor(ctx, "initial dumps", func() (bool, error) {
		err := s.swarm.Read(a)
		return a.Dumped() == devices, err
	})
	if err != nil {
		err = fmt.Errorf("%w: %d of %d devices", err, a.Dumped(), devices)
	}
	return err
}

// load is the load of all devices.
func (b *bench) load(rate float64, routes int) swarm.Load {
	return swarm.Load{Devices: b.Devices, TCP: bmpPort, UDP: ipfixPort, Rate: rate, Exporters: b.Exporters, Routes: routes}
}

// watch sends datagrams during a change, and counts.
func (s *service) watch(ctx context.Context, a *swarm.Analysis, change func() error) (m measurement, err error) {
	overflowed, err := s.overflowed()
	if err != nil {
		return m, err
	}
	begun, err := s.swarm.Send()
	if err != nil {
		return m, err
	}
	a.Begin = begun.At
	if err := change(); err != nil {
		return m, err
	}
	ended, err := s.swarm.Stop()
	if err != nil {
		return m, err
	}
	a.End = ended.At
	if err := s.readAll(ctx, a); err != nil {
		return m, err
	}
	for _, p := range s.members {
		if err := s.peaks(p); err != nil {
			return m, err
		}
	}
	if m.Overflowed, err = s.overflowed(); err != nil {
		return m, err
	}
	m.Overflowed -= overflowed
	a.Finish()
	split, _ := a.SplitDevices(splitLimit)
	ever, longest := a.SplitDevices(-1)
	m.Split, m.SplitEver, m.SplitMS = split, ever, inMS(longest)
	m.Sent, m.Refused, m.WithoutRoutes, m.Undecodable = ended.Sent, ended.Refused, a.WithoutRoutes, a.Undecodable
	m.Undecoded = (a.Undecoded.To - a.Undecoded.From).Seconds()
	if a.Datagrams() > ended.Sent {
		return m, fmt.Errorf("%d datagrams received, and only %d sent", a.Datagrams(), ended.Sent)
	}
	m.Lost = ended.Sent - a.Datagrams()
	for _, at := range a.Missing() {
		if slices.ContainsFunc(s.ended, func(i swarm.Interval) bool { return at > i.From && at < i.To }) {
			m.InProcess++
			m.Lost--
		}
	}
	m.Closed, m.Needless, m.Retries = a.Closed, len(a.Needless), a.Refused
	m.GapMS, m.Memory = inMS(a.LongestGap()), s.memory
	for _, i := range a.Stalls {
		if i.From >= a.Begin && i.To <= a.End {
			m.StalledMS = max(m.StalledMS, inMS(i.To-i.From))
		}
	}
	return m, nil
}

// overflowed returns the number of packets that the kernel has dropped because a receive buffer of the members'
// namespace or the backlog of a CPU was full. The latter counts packets of all namespaces.
func (b *bench) overflowed() (n uint64, err error) {
	collectors, err := b.Lab.Namespace("collector")
	if err != nil {
		return 0, err
	}
	err = collectors.Do(func() error {
		for _, x := range []struct{ file, protocol, counter string }{
			{"snmp", "Udp", "RcvbufErrors"}, {"snmp6", "", "Udp6RcvbufErrors"},
		} {
			text, err := os.ReadFile("/proc/thread-self/net/" + x.file)
			if err != nil {
				return err
			}
			if x.protocol != "" {
				n += harness.SNMP(string(text), x.protocol, x.counter)
				continue
			}
			for line := range strings.Lines(string(text)) {
				if f := strings.Fields(line); len(f) == 2 && f[0] == x.counter {
					v, _ := strconv.ParseUint(f[1], 10, 64)
					n += v
				}
			}
		}
		text, err := os.ReadFile("/proc/thread-self/net/softnet_stat")
		for line := range strings.Lines(string(text)) { // a line for each CPU: processed, dropped ...
			if f := strings.Fields(line); len(f) > 1 {
				v, _ := strconv.ParseUint(f[1], 16, 64)
				n += v
			}
		}
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("count dropped packets: %w", err)
	}
	return n, nil
}

// readAll reads records until the members have received nothing for a while.
func (s *service) readAll(ctx context.Context, a *swarm.Analysis) error {
	const calm = 200 * time.Millisecond
	if err := s.swarm.Read(a); err != nil {
		return err
	}
	for {
		before := a.Datagrams()
		if err := harness.Pause(ctx, calm); err != nil {
			return err
		}
		if err := s.swarm.Read(a); err != nil {
			return err
		}
		if a.Datagrams() == before {
			return nil
		}
	}
}
