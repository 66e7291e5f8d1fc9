// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/bench/harness"
	"sockeye/internal/gateway"
	"sockeye/internal/gateway/access"
	"sockeye/internal/netns"
	confine "sockeye/internal/sandbox"
	"sockeye/internal/tun"
	"sockeye/room"
)

// The ends of a load, and the gateway between them, are separate processes. Each reads questions from stdin, one JSON
// object per line, and answers each with a line.

// Hidden commands of the processes of this benchmark.
const (
	serverRole     = "gateway-server"
	clientRole     = "gateway-client"
	gatewayRole    = "gateway-gateway"
	isolateCommand = "isolate" // command of sockeye, which this program contains

	gatewayPort  = 7000
	startOfLoad  = 10_000_000 // bytes at the start of a load, whose time is reported separately
	guestDevice  = "sockeye0"
	arrivalGrain = 20 * time.Millisecond
	dialTime     = 10 * time.Second
)

// Kinds of loads.
const (
	upload   = "upload"   // from the client
	download = "download" // to the client
)

// A task is a load for a client.
type task struct {
	Run         uint32         `json:"run"`
	Kind        string         `json:"kind"`
	Target      netip.AddrPort `json:"target"`
	CC          string         `json:"cc"` // congestion control of the server's sockets
	Connections int            `json:"connections"`
	Duration    time.Duration  `json:"duration_ns"` // since before the first connect(2)
}

// A gatewayResult is the result of a load at the client.
type gatewayResult struct {
	Start   int64     `json:"start"`   // of the load, ns of CLOCK_MONOTONIC
	Arrived *arrivals `json:"arrived"` // bytes that the client received
	Trips   *rrResult `json:"trips,omitempty"`
	Resent  uint64    `json:"resent"` // segments that the client's namespace retransmitted
	Error   string    `json:"error"`  // first error of a connection; empty without one
}

// arrivals records the bytes received by all connections of a load, over time.
type arrivals struct {
	mu sync.Mutex
	// Samples are pairs of a time (ns of CLOCK_MONOTONIC) and the number of bytes received until then.
	Samples [][2]int64 `json:"samples"`
	First   int64      `json:"first"` // time at which startOfLoad bytes had arrived; 0: never
	Longest int64      `json:"gap"`   // longest time between two received bytes in ns
	total   int64
	last    int64
}

// gap returns the longest time without a received byte in ns, including the times before the first byte and after the
// last one.
func (a *arrivals) gap(start, end int64) int64 {
	if len(a.Samples) == 0 {
		return end - start
	}
	return max(a.Longest, a.Samples[0][0]-start, end-a.Samples[len(a.Samples)-1][0])
}

// rate returns the rate between two times in bit/s.
func (a *arrivals) rate(from, to int64) float64 {
	return (a.at(to) - a.at(from)) * 8 / (float64(to-from) / 1e9)
}

// at returns the number of bytes received until a time, interpolated between samples.
func (a *arrivals) at(moment int64) float64 {
	var before [2]int64
	for _, s := range a.Samples {
		if s[0] >= moment {
			if before[0] == 0 {
				return 0
			}
			return float64(before[1]) + float64(s[1]-before[1])*float64(moment-before[0])/float64(s[0]-before[0])
		}
		before = s
	}
	return float64(before[1])
}

// gatewayServer serves loads until its stdin is closed. It answers the number of a run with the run's arrivals.
func gatewayServer(args []string) error {
	fs := flag.NewFlagSet(serverRole, flag.ContinueOnError)
	address := fs.String("listen", "", "address and port")
	if err := fs.Parse(args); err != nil {
		return err
	}
	var lc net.ListenConfig
	lc.SetMultipathTCP(false)
	l, err := lc.Listen(context.Background(), "tcp", *address)
	if err != nil {
		return err
	}
	var mu sync.Mutex
	runs := map[uint32]*arrivals{}
	arrived := func(run uint32) *arrivals {
		mu.Lock()
		defer mu.Unlock()
		if runs[run] == nil {
			runs[run] = &arrivals{}
		}
		return runs[run]
	}
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				fmt.Fprintln(os.Stderr, "accept:", err)
				os.Exit(1)
			}
			go serveLoad(conn, arrived)
		}
	}()
	lines, answers := json.NewDecoder(os.Stdin), json.NewEncoder(os.Stdout)
	if err := answers.Encode(struct{}{}); err != nil {
		return err
	}
	for {
		var run uint32
		if err := lines.Decode(&run); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return fmt.Errorf("read run: %w", err)
		}
		a := arrived(run)
		a.mu.Lock()
		err := answers.Encode(a)
		a.mu.Unlock()
		if err != nil {
			return err
		}
	}
}

// A gatewayHeader is the first data of a connection, from the client.
type gatewayHeader struct {
	Run  uint32
	Kind [16]byte
	CC   [16]byte
}

const chunk = 256 << 10

// serveLoad serves a connection until it ends. The client reports errors of the connection.
func serveLoad(conn net.Conn, arrived func(run uint32) *arrivals) {
	defer conn.Close()
	var h gatewayHeader
	if err := binary.Read(conn, binary.BigEndian, &h); err != nil {
		return
	}
	if err := chooseCC(conn, unix.ByteSliceToString(h.CC[:])); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return
	}
	b := make([]byte, chunk)
	switch unix.ByteSliceToString(h.Kind[:]) {
	case upload:
		_ = receiveLoad(conn, b, arrived(h.Run))
	case download:
		for err := error(nil); err == nil; {
			_, err = conn.Write(b)
		}
	}
}

func chooseCC(conn net.Conn, name string) error {
	raw, err := conn.(syscall.Conn).SyscallConn()
	if err == nil {
		err = errors.Join(err, raw.Control(func(fd uintptr) {
			err = unix.SetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION, name)
		}))
	}
	if err != nil {
		return fmt.Errorf("choose %s: %w", name, err)
	}
	return nil
}

// gatewayClient runs tasks until its stdin is closed.
func gatewayClient([]string) error {
	// Cached TCP metrics of one connection would change the next connection, on one side more than on another.
	if err := os.WriteFile("/proc/sys/net/ipv4/tcp_no_metrics_save", []byte("1"), 0); err != nil {
		return err
	}
	lines, answers := json.NewDecoder(os.Stdin), json.NewEncoder(os.Stdout)
	if err := answers.Encode(struct{}{}); err != nil {
		return err
	}
	for {
		var t task
		if err := lines.Decode(&t); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return fmt.Errorf("read task: %w", err)
		}
		if err := answers.Encode(t.run()); err != nil {
			return err
		}
	}
}

// run starts all connections of a load, and resets them at the end.
func (t *task) run() *gatewayResult {
	r := &gatewayResult{Start: monotonic(), Arrived: &arrivals{}}
	if t.Kind == roundTrips || t.Kind == connects {
		var err error
		if r.Trips, err = t.roundTrips(); err != nil {
			r.Error = err.Error()
		}
		return r
	}
	end := time.Now().Add(t.Duration)
	before := ownSNMP("Tcp", "RetransSegs")
	errs := make(chan error, t.Connections)
	for range t.Connections {
		go func() { errs <- t.load(end, r) }()
	}
	for range t.Connections {
		if err := <-errs; err != nil && !errors.Is(err, os.ErrDeadlineExceeded) && r.Error == "" {
			r.Error = err.Error()
		}
	}
	r.Resent = ownSNMP("Tcp", "RetransSegs") - before
	return r
}

func (t *task) load(end time.Time, r *gatewayResult) error {
	d := net.Dialer{Timeout: min(dialTime, t.Duration)}
	d.SetMultipathTCP(false)
	conn, err := d.Dial("tcp", t.Target.String())
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := conn.(*net.TCPConn).SetLinger(0); err != nil {
		return err
	}
	if err := conn.SetDeadline(end); err != nil {
		return err
	}
	if err := binary.Write(conn, binary.BigEndian, newGatewayHeader(t)); err != nil {
		return err
	}
	b := make([]byte, chunk)
	switch t.Kind {
	case upload:
		for err == nil {
			_, err = conn.Write(b)
		}
	case download:
		err = receiveLoad(conn, b, r.Arrived)
	}
	return err
}

func newGatewayHeader(t *task) (h gatewayHeader) {
	h.Run = t.Run
	copy(h.Kind[:], t.Kind)
	copy(h.CC[:], t.CC)
	return h
}

// receiveLoad reads until an error, and returns the error.
func receiveLoad(conn net.Conn, b []byte, a *arrivals) error {
	for {
		n, err := conn.Read(b)
		if n > 0 {
			a.add(n)
		}
		if err != nil {
			return err
		}
	}
}

func (a *arrivals) add(n int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	now := monotonic()
	if a.last > 0 {
		a.Longest = max(a.Longest, now-a.last)
	}
	a.last = now
	a.total += int64(n)
	if a.First == 0 && a.total >= startOfLoad {
		a.First = now
	}
	// The last sample always includes all received bytes.
	if k := len(a.Samples); k > 1 && now-a.Samples[k-2][0] < int64(arrivalGrain) {
		a.Samples[k-1] = [2]int64{now, a.total}
	} else {
		a.Samples = append(a.Samples, [2]int64{now, a.total})
	}
}

func monotonic() int64 {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &t) // cannot fail
	return t.Nano()
}

// ownSNMP returns a counter of the process's network namespace.
func ownSNMP(protocol, name string) uint64 {
	b, _ := os.ReadFile("/proc/self/net/snmp") // the counter is 0 if the file cannot be read
	return harness.SNMP(string(b), protocol, name)
}

// gatewayCounts contains the counters of a gateway since its start.
type gatewayCounts struct {
	Partial, Retransmitted uint64
}

// worker runs the gateway of a guest in a process that is confined like that of sockeye isolate, until its stdin is
// closed. It answers each line with its counters.
func worker(args []string) error {
	fs := flag.NewFlagSet(gatewayRole, flag.ContinueOnError)
	guest := fs.String("guest", "", "path of the guest's network namespace")
	address := fs.String("address", "", "address of the guest")
	mtu := fs.Int("mtu", 0, "MTU of the guest, in bytes")
	formula := fs.String("formula", "", "formula of the room of a socket; empty: that of package room")
	if err := fs.Parse(args); err != nil {
		return err
	}
	a, err := netip.ParseAddr(*address)
	if err != nil {
		return err
	}
	gateway.ConfigureRuntime()
	kernel, err := room.Calibrate()
	if err != nil {
		return err
	}
	device, err := openGuestTUN(*guest, tun.Interface{Name: guestDevice, MTU: *mtu, Addresses: []netip.Addr{a}})
	if err != nil {
		return err
	}
	out := access.Outbound{All: true}
	g, err := gateway.New(gateway.Config{
		TUN: device, MTU: *mtu, Guest4: a, Host4: netip.MustParseAddr("169.254.53.1"), Outbound: out, Kernel: kernel,
		Formula: formulas(kernel)[*formula],
	})
	if err != nil {
		return err
	}
	// The seccomp filter runs for each system call, as that of pasta does.
	missing, err := confine.Gateway{Outbound: out}.Enter()
	if err != nil {
		return err
	}
	if len(missing) > 0 {
		fmt.Fprintln(os.Stderr, "the kernel does not support these restrictions of the gateway:", missing)
	}
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- g.Run(ctx) }()
	var asked atomic.Bool
	go func() {
		defer stop()
		lines, answers := json.NewDecoder(os.Stdin), json.NewEncoder(os.Stdout)
		for err := answers.Encode(struct{}{}); err == nil; {
			var question struct{}
			if err = lines.Decode(&question); err == nil {
				c := g.Counts()
				err = answers.Encode(gatewayCounts{c[gateway.PartialSend], c[gateway.Retransmitted]})
			}
		}
		asked.Store(true)
	}()
	err = <-done
	if err == nil && !asked.Load() {
		err = errors.New("the guest's interface was removed")
	}
	return err
}

// openGuestTUN creates the TUN interface in the guest's network namespace.
func openGuestTUN(path string, i tun.Interface) (fd int, err error) {
	guest, err := netns.Open(path)
	if err != nil {
		return -1, err
	}
	defer guest.Close()
	err = netns.Do(guest, func() error {
		fd, err = tun.Open(i)
		return err
	})
	return fd, err
}
