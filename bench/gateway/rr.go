// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math"
	"net/netip"
	"os"
	"runtime"
	"runtime/debug"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"sockeye/bench/harness"
)

// A round trip is a request of one byte on an open connection, and its response. Client and server of round trips are one
// thread each, in a loop of epoll_wait(2), recv(2) and send(2), as wrk and redis are: the times of package net's clients and
// servers include the Go scheduler's, which are several times the kernel's.

const (
	echoRole = "gateway-echo" // server of round trips
	echoPort = 7001
)

// Kinds of loads for the server of round trips.
const (
	roundTrips = "round trips" // on open connections
	connects   = "connects"    // connect(2), one round trip, close with a RST
)

const (
	rrWarmup = 50 * time.Millisecond
	rrWait   = 100 // ms; longest wait for an event, so that a lost response does not block the client forever
)

// rrLoads are the numbers of connections that have a request in flight.
var rrLoads = []int{1, 16, 256}

// An rrResult is the result of round trips or connects at the client: the times of a round trip, or of connect(2) until the
// socket is writable.
type rrResult struct {
	Median harness.Figure `json:"median_us"`
	P99    harness.Figure `json:"p99_us"`
	Rate   harness.Figure `json:"per_second"` // round trips, or connections with a round trip each
	CPU    harness.Figure `json:"cpu_us"`     // CPU time of the gateway for each of them
}

// events is an epoll instance.
type events struct {
	fd   int
	list []unix.EpollEvent
}

// echo serves round trips on a TCP port, of IPv4, until its stdin is closed.
func echoServer(args []string) error {
	fs := flag.NewFlagSet(echoRole, flag.ContinueOnError)
	address := fs.String("listen", "", "address and port")
	if err := fs.Parse(args); err != nil {
		return err
	}
	at, err := netip.ParseAddrPort(*address)
	if err != nil {
		return err
	}
	l, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		err = errors.Join(unix.SetsockoptInt(l, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1),
			unix.Bind(l, &unix.SockaddrInet4{Port: int(at.Port()), Addr: at.Addr().As4()}), unix.Listen(l, unix.SOMAXCONN))
	}
	if err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	events, err := newEvents()
	if err == nil {
		err = errors.Join(events.add(l, unix.EPOLLIN), events.add(unix.Stdin, unix.EPOLLIN|unix.EPOLLHUP))
	}
	if err != nil {
		return err
	}
	if err := json.NewEncoder(os.Stdout).Encode(struct{}{}); err != nil {
		return err
	}
	b := make([]byte, 64)
	for {
		ready, err := events.wait(rrWait)
		if err != nil {
			return err
		}
		for _, e := range ready {
			switch fd := int(e.Fd); fd {
			case unix.Stdin:
				return nil
			case l:
				for {
					c, _, err := unix.Accept4(l, unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
					if err != nil {
						break
					}
					if err := errors.Join(unix.SetsockoptInt(c, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1), events.add(c, unix.EPOLLIN)); err != nil {
						return err
					}
				}
			default:
				n, err := rawIO(unix.SYS_RECVFROM, fd, b)
				switch {
				case errors.Is(err, unix.EAGAIN):
					continue
				case err == nil && n > 0:
					_, err = rawIO(unix.SYS_SENDTO, fd, b[:n])
				}
				if err != nil || n == 0 {
					unix.Close(fd)
				}
			}
		}
	}
}

func (e *events) add(fd int, mask uint32) error {
	return unix.EpollCtl(e.fd, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: mask, Fd: int32(fd)})
}

// rrClient has one request in flight on each of its connections.
type rrClient struct {
	task   *task
	events *events
	begun  []int64 // by descriptor: time of the request or of connect(2), ns of CLOCK_MONOTONIC
	open   []bool  // by descriptor: connect(2) has succeeded
	times  []float64
	trips  int   // since from
	from   int64 // start of the measurement
}

// roundTrips runs a load of round trips or connects. Errors of connections, such as a refused one, end the load.
func (t *task) roundTrips() (r *rrResult, err error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	c := &rrClient{task: t, times: make([]float64, 0, 1<<20)}
	if c.events, err = newEvents(); err != nil {
		return nil, err
	}
	defer unix.Close(c.events.fd)
	defer func() {
		for fd := range c.begun {
			if c.begun[fd] != 0 {
				unix.Close(fd)
			}
		}
	}()
	c.from = math.MaxInt64
	for range t.Connections {
		if err := c.connect(); err != nil {
			return nil, err
		}
	}
	start := monotonic()
	c.from = start + int64(rrWarmup)
	end := c.from + int64(t.Duration)
	now := start
	for ; now < end; now = monotonic() {
		ready, err := c.events.wait(rrWait)
		if err != nil {
			return nil, err
		}
		for _, e := range ready {
			if err := c.event(int(e.Fd)); err != nil {
				return nil, err
			}
		}
	}
	r = &rrResult{
		Median: harness.Quantile(c.times, 0.5), P99: harness.Quantile(c.times, 0.99),
		Rate: harness.Figure(float64(c.trips) / (float64(now-c.from) / 1e9)),
	}
	return r, nil
}

func newEvents() (*events, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("make epoll: %w", err)
	}
	return &events{fd, make([]unix.EpollEvent, 512)}, nil
}

// wait returns the descriptors that are ready, none after timeout milliseconds. It does not release the Go runtime's processor.
func (e *events) wait(timeout int) ([]unix.EpollEvent, error) {
	n, _, errno := unix.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(e.fd), uintptr(unsafe.Pointer(unsafe.SliceData(e.list))), uintptr(len(e.list)),
		uintptr(timeout), 0, 0)
	if errno != 0 && errno != unix.EINTR {
		return nil, fmt.Errorf("wait for events: %w", errno)
	}
	if errno != 0 {
		n = 0
	}
	return e.list[:n], nil
}

// event processes an event of a connection: it is open, or a response has arrived.
func (c *rrClient) event(fd int) error {
	var b [64]byte
	if !c.open[fd] {
		if code, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR); err != nil || code != 0 {
			return fmt.Errorf("connect: %w", errors.Join(err, unix.Errno(code)))
		}
		c.open[fd] = true
		if c.task.Kind == connects {
			c.record(fd)
		}
		return c.request(fd)
	}
	n, err := rawIO(unix.SYS_RECVFROM, fd, b[:])
	switch {
	case errors.Is(err, unix.EAGAIN):
		return nil
	case err != nil:
		return fmt.Errorf("receive response: %w", err)
	case n == 0:
		return errors.New("receive response: the server has closed the connection")
	}
	if c.task.Kind == roundTrips {
		c.record(fd)
	}
	if monotonic() >= c.from {
		c.trips++
	}
	if c.task.Kind == roundTrips {
		return c.request(fd)
	}
	unix.Close(fd)
	c.begun[fd] = 0
	return c.connect()
}

// connect opens a connection.
func (c *rrClient) connect() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("make socket: %w", err)
	}
	for fd >= len(c.begun) {
		c.begun, c.open = append(c.begun, 0), append(c.open, false)
	}
	c.begun[fd], c.open[fd] = monotonic(), false
	err = errors.Join(unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1),
		unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}))
	if err != nil {
		return err
	}
	c.begun[fd] = monotonic()
	err = unix.Connect(fd, &unix.SockaddrInet4{Port: echoPort, Addr: c.task.Target.Addr().As4()})
	if err != nil && !errors.Is(err, unix.EINPROGRESS) {
		return fmt.Errorf("connect: %w", err)
	}
	return c.events.add(fd, unix.EPOLLIN|unix.EPOLLOUT|unix.EPOLLET)
}

func (c *rrClient) request(fd int) error {
	c.begun[fd] = monotonic()
	if _, err := rawIO(unix.SYS_SENDTO, fd, []byte{1}); err != nil {
		return fmt.Errorf("send request: %w", err)
	}
	return nil
}

// rawIO calls recv(2) or send(2).
func rawIO(trap uintptr, fd int, b []byte) (int, error) {
	n, _, errno := unix.RawSyscall6(trap, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)),
		unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL, 0, 0)
	if errno != 0 {
		return 0, errno
	}
	return int(n), nil
}

// record adds the time since the request or connect(2) to the times.
func (c *rrClient) record(fd int) {
	now := monotonic()
	if c.begun[fd] >= c.from && len(c.times) < cap(c.times) {
		c.times = append(c.times, float64(now-c.begun[fd])/1e3)
	}
}

func rrMedian(r *rrResult) float64 { return float64(r.Median) }
func rrP99(r *rrResult) float64    { return float64(r.P99) }
func rrRate(r *rrResult) float64   { return float64(r.Rate) }
func rrCPU(r *rrResult) float64    { return float64(r.CPU) }

// gatewayRR contains the round trips and connects at one number of connections and MTU, by side, round by round.
type gatewayRR struct {
	Connections int
	MTU         int
	Trips       map[string][]rrResult
	Connects    map[string][]rrResult
}

func (r *gatewayRR) String() string {
	s := "rr, " + r.name() + ": us of a round trip and of connect, median/P99:"
	for _, side := range having(r.Trips) {
		trips, opened := r.Trips[side], r.Connects[side]
		s += fmt.Sprintf(" %s %.1f/%.1f %.1f/%.1f;", side, medianOf(trips, rrMedian), medianOf(trips, rrP99),
			medianOf(opened, rrMedian), medianOf(opened, rrP99))
	}
	return s[:len(s)-1]
}

// print prints the medians of all rounds as a row of a table.
func (r *gatewayRR) print(p harness.Printf, suffix string, runs map[string][]rrResult, sides []string) {
	p("%s%s", r.name(), suffix)
	for _, column := range []struct {
		of     func(*rrResult) float64
		format string
		sides  []string
	}{{rrMedian, "%.1f", sides}, {rrP99, "%.1f", sides}, {rrRate, "%.0f", sides}, {rrCPU, "%.1f", gatewaysOf(sides)}} {
		for _, side := range column.sides {
			p("\t%s", orDash(column.format, medianOf(runs[side], column.of)))
		}
	}
	p("\n")
}

// aimTrips is the highest ratio of a median time to native's.
const aimTrips = 1.7

// medianOf returns the median of a figure over all rounds.
func medianOf(runs []rrResult, of func(*rrResult) float64) float64 {
	var v []float64
	for i := range runs {
		v = append(v, of(&runs[i]))
	}
	return harness.SpreadOf(v).Median
}

func (r *gatewayRR) name() string {
	s := fmt.Sprintf("MTU %d, %d", r.MTU, r.Connections)
	if r.Connections == 1 {
		return s + " connection"
	}
	return s + " connections"
}

// rr measures round trips and connects over a veth pair.
func (b *bench) rr(ctx context.Context) error {
	p, err := newGatewayPath(ctx, b.lab, linkTrips, b.newPasta)
	if err != nil {
		return err
	}
	for _, mtu := range b.MTUs {
		if err := b.rrMTU(ctx, p, mtu); err != nil {
			return fmt.Errorf("round trips, MTU %d: %w", mtu, err)
		}
	}
	return nil
}

func (b *bench) rrMTU(ctx context.Context, p *gatewayPath, mtu int) (err error) {
	sides, stop, err := p.newSides(ctx, b.Sides, mtu)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stop()) }()
	duration, rounds := b.rrTime()
	for _, n := range rrLoads {
		r := &gatewayRR{Connections: n, MTU: mtu, Trips: map[string][]rrResult{}, Connects: map[string][]rrResult{}}
		for range rounds {
			for _, name := range harness.Turn(b.Sides, b.round) {
				for _, kind := range harness.Turn([]string{roundTrips, connects}, b.round) {
					result, err := b.trips(p, sides[name], task{Kind: kind, Connections: n, Duration: duration})
					if err != nil {
						return err
					}
					to := r.Trips
					if kind == connects {
						to = r.Connects
					}
					to[name] = append(to[name], *result)
				}
			}
			b.round++
		}
		b.report.RR = append(b.report.RR, r)
		fmt.Fprintln(os.Stderr, r)
	}
	return nil
}

// trips runs round trips or connects on a side.
func (b *bench) trips(p *gatewayPath, s *gatewaySide, t task) (*rrResult, error) {
	t.Target = p.target()
	cpu, err := s.cpu()
	if err != nil {
		return nil, err
	}
	var result gatewayResult
	if err := s.client.Ask(t, &result); err != nil {
		return nil, err
	}
	if result.Error != "" {
		return nil, fmt.Errorf("%s of %s on %d connections: %s", t.Kind, s.name, t.Connections, result.Error)
	}
	cpuAfter, err := s.cpu()
	if err != nil {
		return nil, err
	}
	r := result.Trips
	r.CPU = harness.Figure(math.NaN())
	if n := float64(r.Rate) * (t.Duration + rrWarmup).Seconds(); s.around != nil && n > 0 {
		r.CPU = harness.Figure(float64((cpuAfter - cpu).Microseconds()) / n)
	}
	return r, nil
}

// rrTime returns the duration of a load of round trips or connects, and how often each is run.
func (o *options) rrTime() (time.Duration, int) {
	if o.Quick {
		return 200 * time.Millisecond, o.Rounds
	}
	return 400 * time.Millisecond, 5 * o.Rounds
}
