// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"sockeye/bench/harness"
	"sockeye/internal/stats"
	"sockeye/lab"
)

// load is what the sender sends.
type load struct {
	name, title string
	bytes       int // payload of a datagram; 0: a TCP stream
}

var loads = []load{
	{"udp_64", "Datagrams of 64 bytes", 64},
	{"udp_200", "Datagrams of 200 bytes", 200},
	{"udp_1400", "Datagrams of 1400 bytes", 1400},
	{"tcp", "A TCP stream of large GSO packets", 0},
}

// sample is one run of a load.
type sample struct {
	Rate  float64 `json:"per_second"`     // packets; of a stream: bits
	CPU   float64 `json:"cpu_ns"`         // per packet
	Bytes float64 `json:"packet_bytes"`   // mean, as they arrive
	Lost  float64 `json:"lost,omitempty"` // share of the datagrams
	Busy  float64 `json:"cpu_share"`      // CPU time by elapsed time
}

// round contains the samples by arm and load.
type round map[string]map[string]sample

// ratePart contains the rounds of each launch.
type ratePart struct {
	launches [][]round
	left     map[string]string // arms that this host does not have, with the reason
}

// meter binds threads to a CPU, and reads the clocks of a run.
type meter struct {
	cpu       int
	processes []int // whose CPU time is read
}

// rates measures all arms in lanes of their own, one after the other in each round. All work for a packet is on one CPU: that of
// the sender, of the hosts, and of the receiver. The placement of lanes and programs in memory changes the ratios by more than the
// variation between rounds, so the benchmark makes them again for each launch.
func (b *bench) rates(ctx context.Context) (part, error) {
	p := &ratePart{left: map[string]string{}}
	cpu, err := lastCPU()
	if err != nil {
		return nil, err
	}
	m := &meter{cpu: cpu, processes: append(harness.SoftirqThread(cpu), os.Getpid())}
	defer debug.SetGCPercent(debug.SetGCPercent(-1)) // during a run nothing collects the garbage, of some thousand system calls
	for range b.Launches {
		runtime.GC()
		if err := p.launch(ctx, b, m); err != nil {
			return nil, err
		}
		fmt.Fprint(os.Stderr, ".")
	}
	return p, nil
}

// launch makes the lanes in a lab of its own, and measures them.
func (p *ratePart) launch(ctx context.Context, b *bench, m *meter) (err error) {
	own := &bench{options: b.options}
	if own.lab, err = lab.New(ctx, lab.Options{Dir: b.lab.Dir()}); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, own.lab.Close()) }()
	if err := own.mountPins(); err != nil {
		return err
	}
	lanes, err := p.lanes(ctx, own, m)
	if err != nil {
		return err
	}
	var rounds []round
	for number := range b.Rounds {
		r := round{}
		for _, l := range harness.Turn(lanes, len(p.launches)*b.Rounds+number) {
			r[l.arm.name] = map[string]sample{}
			for _, load := range loads {
				if err := ctx.Err(); err != nil {
					return err
				}
				if load.bytes == 0 && l.arm.name == armDropped {
					continue
				}
				s, err := l.measure(m, load, b.Slice)
				if err != nil {
					return fmt.Errorf("%s, %s: %w", l.arm.name, load.name, err)
				}
				r[l.arm.name][load.name] = s
			}
		}
		rounds = append(rounds, r)
	}
	p.launches = append(p.launches, rounds)
	return nil
}

// lanes makes a lane for each arm that this host has.
func (p *ratePart) lanes(ctx context.Context, b *bench, m *meter) (lanes []*lane, err error) {
	for i := range arms {
		a := &arms[i]
		if p.left[a.name] != "" {
			continue
		}
		l, err := b.newLane(a)
		if err == nil {
			err = a.set(ctx, b, l)
		}
		if missing, ok := errors.AsType[*missingError](err); ok {
			p.left[a.name] = missing.reason
			continue
		}
		if err == nil {
			err = l.check(m)
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", a.name, err)
		}
		lanes = append(lanes, l)
	}
	return lanes, nil
}

// lastCPU returns the last CPU that this process may use.
func lastCPU() (last int, err error) {
	var all unix.CPUSet
	if err := unix.SchedGetaffinity(0, &all); err != nil {
		return 0, fmt.Errorf("find own CPUs: %w", err)
	}
	for cpu := range len(all) * 64 {
		if all.IsSet(cpu) {
			last = cpu
		}
	}
	return last, nil
}

const (
	// sendBatch is the number of datagrams of a system call. The kernel sends 64 at a time, as many as it receives at a time.
	sendBatch = 1024
	xdpLive   = 1 << 1 // BPF_F_TEST_XDP_LIVE_FRAMES of include/uapi/linux/bpf.h
)

// check sends some datagrams, of which all must arrive, and a stream.
func (l *lane) check(m *meter) error {
	var before, after uint64
	var err error
	if l.forwarded != nil {
		if before, err = l.forwarded(); err != nil {
			return err
		}
	}
	s, err := l.measure(m, loads[0], time.Millisecond)
	if err != nil {
		return err
	}
	if s.Lost > 0.01 {
		return fmt.Errorf("%.1f %% of the datagrams are lost", 100*s.Lost)
	}
	if l.forwarded != nil {
		if after, err = l.forwarded(); err != nil {
			return err
		}
		if after-before < sendBatch {
			return fmt.Errorf("the program has forwarded %d packets", after-before)
		}
	}
	if l.arm.name != armDropped {
		_, err = l.stream(m, time.Millisecond)
	}
	return err
}

func (l *lane) measure(m *meter, load load, slice time.Duration) (s sample, err error) {
	if load.bytes == 0 {
		return l.stream(m, slice)
	}
	if err := l.dropping.Set(uint32(1)); err != nil {
		return s, fmt.Errorf("drop datagrams: %w", err)
	}
	err = m.on(l.sender, func() error {
		s, err = l.datagrams(m, load.bytes, slice)
		return err
	})
	return s, errors.Join(err, l.dropping.Set(uint32(0)))
}

// datagrams sends datagrams for a time from the calling thread, after a tenth of that time without measurement.
func (l *lane) datagrams(m *meter, size int, slice time.Duration) (s sample, err error) {
	frame := make([]byte, headerBytes+size)
	// struct xdp_md
	about := struct{ Data, DataEnd, DataMeta, Ingress, Queue, Egress uint32 }{DataEnd: uint32(len(frame)), Ingress: uint32(l.out)}
	var sent uint64
	send := func(d time.Duration) error {
		for end := time.Now().Add(d); time.Now().Before(end); sent += sendBatch {
			options := &ebpf.RunOptions{Data: frame, Context: about, Repeat: sendBatch, Flags: xdpLive}
			if _, err := l.send.Run(options); err != nil {
				return fmt.Errorf("send datagrams: %w", err)
			}
		}
		return nil
	}
	if err := send(slice / 10); err != nil {
		return s, err
	}
	sent = 0
	s, arrived, err := l.inPieces(m, slice, send)
	s.Lost = max(0, 1-float64(arrived)/float64(sent)) // other packets arrive too, such as IPv6 router solicitations
	return s, err
}

// writeSize is the size of the writes to a stream.
const writeSize = 256 << 10

// stream sends a TCP stream for a time from a device to host second, after as much time without measurement, at least 20 ms.
func (l *lane) stream(m *meter, slice time.Duration) (s sample, err error) {
	listening, received := make(chan struct{}), make(chan error, 1)
	go func() { received <- m.on(l.second, func() error { return receive(listening) }) }()
	select {
	case <-listening:
	case err := <-received:
		return s, err
	}
	err = m.on(l.sender, func() error {
		fd, err := connection()
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		data := make([]byte, writeSize)
		write := func(d time.Duration) error {
			for end := time.Now().Add(d); time.Now().Before(end); {
				if _, err := uninterrupted(func() (int, error) { return unix.Write(fd, data) }); err != nil {
					return fmt.Errorf("send stream: %w", err)
				}
			}
			return nil
		}
		if err := write(max(slice, 20*time.Millisecond)); err != nil {
			return err
		}
		if s, _, err = l.inPieces(m, slice, write); err == nil {
			s.Rate *= 8 * s.Bytes
		}
		return err
	})
	return s, errors.Join(err, <-received)
}

// on runs f on a thread in a namespace that is bound to the CPU.
func (m *meter) on(n *lab.Namespace, f func() error) error {
	return n.Do(func() error {
		var one unix.CPUSet
		one.Set(m.cpu)
		if err := unix.SchedSetaffinity(0, &one); err != nil {
			return fmt.Errorf("bind to CPU %d: %w", m.cpu, err)
		}
		return f()
	})
}

// pieces is the number of pieces of a run. A figure is the median of the pieces, so that short disturbances are excluded.
const pieces = 25

// inPieces sends for a time, and returns the sample and the number of packets that have arrived.
func (l *lane) inPieces(m *meter, slice time.Duration, send func(time.Duration) error) (s sample, arrived uint64, err error) {
	first, err := l.read(m)
	if err != nil {
		return s, 0, err
	}
	before := first
	var rates, cpus, sizes, shares []float64
	for range pieces {
		if err := send(slice / pieces); err != nil {
			return s, 0, err
		}
		after, err := l.read(m)
		if err != nil {
			return s, 0, err
		}
		packets := float64(after.packets - before.packets)
		elapsed, cpu := after.until.at.Sub(before.from.at).Seconds(), (after.until.cpu - before.from.cpu).Seconds()
		if packets == 0 {
			continue // the time counts with the next piece
		}
		rates, cpus = append(rates, packets/elapsed), append(cpus, cpu*1e9/packets)
		sizes, shares = append(sizes, float64(after.bytes-before.bytes)/packets), append(shares, cpu/elapsed)
		before = after
	}
	if len(rates) == 0 {
		return s, 0, errors.New("no packet has arrived")
	}
	return sample{Rate: stats.Median(rates), CPU: stats.Median(cpus), Bytes: stats.Median(sizes), Busy: stats.Median(shares)}, before.packets - first.packets, nil
}

// reading is what has arrived at the end of a lane, with the clocks before and after the counters were read.
type reading struct {
	packets, bytes uint64
	until, from    clocks
}

type clocks struct {
	at  time.Time
	cpu time.Duration
}

func (l *lane) read(m *meter) (r reading, err error) {
	if r.until, err = m.now(); err != nil {
		return r, err
	}
	in, err := l.end.Netlink().LinkByIndex(l.in)
	if err != nil {
		return r, fmt.Errorf("read counters: %w", err)
	}
	r.packets, r.bytes = in.Attrs().Statistics.RxPackets, in.Attrs().Statistics.RxBytes
	r.from, err = m.now()
	return r, err
}

func (m *meter) now() (c clocks, err error) {
	c.at = time.Now()
	c.cpu, err = harness.CPUTime(m.processes...)
	return c, err
}

// patience is the longest time that an end of a stream waits for the other one.
var patience = unix.Timeval{Sec: 20}

// connection connects a device to the service.
func connection() (fd int, err error) {
	if fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0); err != nil {
		return -1, fmt.Errorf("open socket: %w", err)
	}
	// An interrupted connect cannot be called again, and with a timeout the kernel does not restart it.
	if err = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_SYNCNT, 3); err == nil {
		err = unix.Bind(fd, &unix.SockaddrInet4{Addr: device(1).As4()})
	}
	if err == nil {
		err = unix.Connect(fd, &unix.SockaddrInet4{Addr: service.As4(), Port: port})
	}
	if err == nil {
		err = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &patience)
	}
	if err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("connect: %w", err)
	}
	return fd, nil
}

// receive accepts a connection and discards what it receives, without copying it. It closes listening when it listens.
func receive(listening chan<- struct{}) error {
	listener, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open socket: %w", err)
	}
	defer unix.Close(listener)
	if err = unix.SetsockoptInt(listener, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err == nil {
		err = unix.SetsockoptTimeval(listener, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &patience)
	}
	if err == nil {
		err = unix.Bind(listener, &unix.SockaddrInet4{Addr: service.As4(), Port: port})
	}
	if err == nil {
		err = unix.Listen(listener, 1)
	}
	if err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	close(listening)
	fd, err := uninterrupted(func() (int, error) {
		fd, _, err := unix.Accept4(listener, unix.SOCK_CLOEXEC)
		return fd, err
	})
	if err != nil {
		return fmt.Errorf("accept: %w", err)
	}
	defer unix.Close(fd)
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &patience); err != nil {
		return fmt.Errorf("set timeout: %w", err)
	}
	data := make([]byte, 4*writeSize)
	for {
		n, err := uninterrupted(func() (int, error) {
			n, _, err := unix.Recvfrom(fd, data, unix.MSG_TRUNC)
			return n, err
		})
		if err != nil {
			return fmt.Errorf("receive stream: %w", err)
		}
		if n == 0 {
			return nil
		}
	}
}

// uninterrupted repeats a system call that a signal of the Go runtime has interrupted.
func uninterrupted(call func() (int, error)) (n int, err error) {
	for {
		if n, err = call(); !errors.Is(err, unix.EINTR) {
			return n, err
		}
	}
}

func rateOf(s sample) float64  { return s.Rate }
func cpuOf(s sample) float64   { return s.CPU }
func bytesOf(s sample) float64 { return s.Bytes }
func lostOf(s sample) float64  { return s.Lost }

// ratios returns the distribution of the ratio of an arm to another one, computed within each round.
func (p *ratePart) ratios(arm, to, load string, figure func(sample) float64) harness.Distribution {
	return harness.DistributionOf(p.medians(func(r round) (float64, bool) {
		mine, ok := r[arm][load]
		others, both := r[to][load]
		return figure(mine) / figure(others), ok && both
	}))
}

// above returns the distribution of the CPU time per packet of an arm, less that of packets that are dropped at host first,
// computed within each round.
func (p *ratePart) above(arm, load string) harness.Distribution {
	return harness.DistributionOf(p.medians(func(r round) (float64, bool) {
		mine, ok := r[arm][load]
		return mine.CPU - r[armDropped][load].CPU, ok
	}))
}

// measured returns the arms that were run with a load.
func (p *ratePart) measured(load string) []arm {
	return slices.DeleteFunc(slices.Clone(arms), func(a arm) bool { return len(p.samples(a.name, load, rateOf)) == 0 })
}

// samples returns a figure of an arm with a load, by launch.
func (p *ratePart) samples(arm, load string, figure func(sample) float64) []float64 {
	return p.medians(func(r round) (float64, bool) {
		s, ok := r[arm][load]
		return figure(s), ok
	})
}

// medians returns, for each launch, the median of the values of its rounds. The rounds of a launch are not independent. value
// returns false for a round without a value.
func (p *ratePart) medians(value func(round) (float64, bool)) (v []float64) {
	for _, rounds := range p.launches {
		var values []float64
		for _, r := range rounds {
			if x, ok := value(r); ok {
				values = append(values, x)
			}
		}
		if len(values) > 0 {
			v = append(v, stats.Median(values))
		}
	}
	return v
}
