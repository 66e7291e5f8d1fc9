// SPDX-License-Identifier: Apache-2.0

package swarm

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/lab"
	"sockeye/lab/traffic"
)

// Load is the traffic of devices. One process sends it.
type Load struct {
	Devices  int    `json:"devices"`
	TCP, UDP uint16 // ports of the service
	// Service4 and Service6 are the addresses of the service; by default those of the namespace "collector".
	Service4 netip.Addr `json:"service4,omitzero"`
	Service6 netip.Addr `json:"service6,omitzero"`
	// Rate is the number of datagrams per second of each device. Each has one flow record.
	Rate float64 `json:"rate"`
	// Exporters is the number of UDP ports of each device. Default: 1.
	Exporters int `json:"exporters"`
	// Routes is the number of routes in the initial dump of a session.
	Routes int `json:"routes"`
	// DumpRate is the number of routes that a device sends per second during its dump. 0: no limit.
	DumpRate float64 `json:"dump_rate"`
	// Interval is the time between the updates after the dump. Default: 200 ms.
	Interval time.Duration `json:"interval_ns"`
	// Noted devices record each datagram that they send, and connections as closed when their RST arrives: a process on a busy host
	// notices it later. This needs CAP_NET_RAW.
	Noted bool `json:"noted"`
}

// DevicesState is the answer of the devices to each line on their standard input.
type DevicesState struct {
	At      time.Duration `json:"at_ns"`
	Open    int           `json:"open"`    // devices with a connection
	Sent    uint64        `json:"sent"`    // datagrams with data
	Refused uint64        `json:"refused"` // ICMP errors for datagrams
}

// Commands of the devices: cmdSend starts the datagrams, cmdStop stops them for good.
const (
	cmdSend  = "send"
	cmdStop  = "stop"
	cmdState = "state"
)

const (
	// A refused device waits for firstRetry, and twice as long after each further refusal, at most for lastRetry.
	firstRetry = 10 * time.Millisecond
	lastRetry  = 160 * time.Millisecond
	// dialTimeout includes two retransmissions of a SYN.
	dialTimeout = 4 * time.Second
	// Each connection of a device has another port, until all have been used.
	firstPort = 10_000
	ports     = 50_000

	// A thread that sleeps for stallSleep and wakes up stallLimit later was stalled.
	stallSleep = 5 * time.Millisecond
	stallLimit = 15 * time.Millisecond
)

type sender struct {
	Load
	records recorder
	open    atomic.Int64
	ports   []atomic.Uint32 // of the open connections by device; 0: none
}

// present reports whether a port is that of the open connection of a device.
func (s *sender) present(device int, port uint16) bool {
	return device < s.Devices && s.ports[device].Load() == uint32(port)
}

func (l *Load) run(records recorder) error {
	s := &sender{Load: *l, records: records}
	s.Exporters, s.Interval = max(1, s.Exporters), max(s.Interval, 0)
	if s.Interval == 0 {
		s.Interval = 200 * time.Millisecond
	}
	exporters, err := s.exporters()
	if err != nil {
		return err
	}
	failed := make(chan error, s.Devices+3)
	s.ports = make([]atomic.Uint32, s.Devices)
	if s.Noted {
		resets, err := openResets()
		if err != nil {
			return err
		}
		go func() { failed <- watchResets(resets, records, s.present) }()
	}
	for i := range s.Devices {
		go func() { failed <- s.connect(i) }()
	}
	go func() { failed <- s.watchStalls() }()
	lines := make(chan string)
	go func() {
		for in := bufio.NewScanner(os.Stdin); in.Scan(); {
			lines <- in.Text()
		}
		close(lines)
	}()

	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	sending := make(chan error, 1)
	answers := json.NewEncoder(os.Stdout)
	for {
		var line string
		select {
		case err := <-failed:
			return err
		case text, more := <-lines:
			if !more {
				return nil
			}
			line = text
		}
		state := DevicesState{At: Now(), Open: int(s.open.Load())}
		switch line {
		case cmdSend:
			go func() {
				limit := traffic.Limit{Rate: s.Rate * float64(s.Devices), Batch: 1}
				_, err := traffic.Drive(ctx, limit, len(exporters), func(i, n int) (int, error) {
					if err := s.noteSent(i, exporters[i]); err != nil {
						return 0, err
					}
					return exporters[i].Send(n)
				})
				sending <- err
			}()
		case cmdStop:
			cancel()
			if err := <-sending; err != nil {
				return err
			}
			state.At = Now()
			for _, e := range exporters {
				state.Sent += e.Stats().Messages
				state.Refused += e.Stats().Refused
			}
		case cmdState:
		default:
			return fmt.Errorf("unknown command %q", line)
		}
		if err := answers.Encode(state); err != nil {
			return err
		}
	}
}

// noteSent records the next datagram of an exporter.
func (s *sender) noteSent(i int, e *traffic.Exporter) error {
	if !s.Noted {
		return nil
	}
	return s.records.note(Record{At: Now(), Device: uint32(i % s.Devices), Port: e.Port(), Value: e.Sequence(), Kind: Sent})
}

// exporters returns the exporters of all devices. Consecutive exporters are those of different devices.
func (s *sender) exporters() (all []*traffic.Exporter, err error) {
	flow := traffic.Flow{Src: netip.AddrFrom4([4]byte{198, 51, 100, 1}), Dst: netip.AddrFrom4([4]byte{203, 0, 113, 1}), Protocol: unix.IPPROTO_TCP, Packets: 1, Octets: 1000}
	for domain := range s.Exporters {
		for i := range s.Devices {
			a := Address(i)
			e, err := traffic.NewExporter(traffic.ExporterConfig{
				Source: a, Target: s.target(a, s.UDP), Domain: uint32(domain), Messages: [][]traffic.Flow{{flow}},
			})
			if err != nil {
				return nil, err
			}
			all = append(all, e)
		}
	}
	return all, nil
}

// connect holds the connection of a device.
func (s *sender) connect(device int) error {
	route, err := routeOf(device)
	if err != nil {
		return err
	}
	a := Address(device)
	for n, retry := 0, firstRetry; ; n++ {
		port := uint16(firstPort + n%ports)
		d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(a, port)), Timeout: dialTimeout}
		conn, err := d.Dial("tcp", s.target(a, s.TCP).String())
		r := Record{At: Now(), Device: uint32(device), Port: port, Kind: Connected}
		if err != nil {
			if errors.Is(err, unix.EADDRINUSE) {
				continue
			}
			r.Kind, r.Value = Refused, errno(err)
			if r.Value == 0 {
				r.Value = uint32(unix.ETIMEDOUT)
			}
			if err := s.records.note(r); err != nil {
				return err
			}
			time.Sleep(retry)
			retry = min(2*retry, lastRetry)
			continue
		}
		retry = firstRetry
		if err := s.records.note(r); err != nil {
			return err
		}
		s.open.Add(1)
		s.ports[device].Store(uint32(port))
		closed := make(chan struct{})
		written := make(chan struct{})
		go func() {
			defer close(written)
			s.write(conn, device, route, closed)
		}()
		var b [1]byte
		_, err = conn.Read(b[:]) // members do not write
		r.At, r.Kind, r.Value = Now(), Closed, errno(err)
		s.ports[device].Store(0)
		s.open.Add(-1)
		close(closed)
		conn.Close()
		if err := s.records.note(r); err != nil {
			return err
		}
		<-written
	}
}

func (l *Load) target(from netip.Addr, port uint16) netip.AddrPort {
	service, otherwise := l.Service4, lab.CollectorIPv4
	if from.Is6() {
		service, otherwise = l.Service6, lab.CollectorIPv6
	}
	if !service.IsValid() {
		service = otherwise
	}
	return netip.AddrPortFrom(service, port)
}

// write sends the initial dump, and updates until the connection is closed.
func (s *sender) write(conn net.Conn, device int, route []byte, closed <-chan struct{}) {
	const pause = 10 * time.Millisecond
	number := uint32(0)
	routes := func(b []byte, n int) []byte {
		for range n {
			number++
			b = append(b, route...)
			binary.BigEndian.PutUint32(b[len(b)-4:], number)
		}
		return b
	}
	wait := func(d time.Duration) bool {
		select {
		case <-closed:
			return false
		case <-time.After(d):
			return true
		}
	}
	const chunk = 512 // routes in a write
	share := chunk
	if s.DumpRate > 0 {
		share = max(1, min(chunk, int(s.DumpRate*pause.Seconds())))
	}
	// Each write is due at a time from the start of the dump, so that a late write does not reduce the rate.
	begin := time.Now()
	b := greeting(device)
	for int(number) < s.Routes {
		if s.DumpRate > 0 {
			if due := time.Duration(float64(number) / s.DumpRate * float64(time.Second)); time.Since(begin) < due && !wait(due-time.Since(begin)) {
				return
			}
		}
		b = routes(b, min(share, s.Routes-int(number)))
		if _, err := conn.Write(b); err != nil {
			return
		}
		b = b[:0]
	}
	b = append(b, endOfRIB(device)...)
	for {
		if _, err := conn.Write(b); err != nil || !wait(s.Interval) {
			return
		}
		b = routes(b[:0], 1)
	}
}

// watchStalls records the times in which this process did not run although it was due.
func (s *sender) watchStalls() error {
	runtime.LockOSThread()
	sleep := unix.NsecToTimespec(int64(stallSleep))
	for {
		due := Now() + stallSleep
		_ = unix.Nanosleep(&sleep, nil)
		if late := Now() - due; late > stallLimit {
			if err := s.records.note(Record{At: due + late, Value: uint32(late.Microseconds()), Kind: Stalled}); err != nil {
				return err
			}
		}
	}
}
