// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"runtime/debug"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/lab/traffic"
)

// The generator simulates all routers in one process. It reads a load from stdin, opens the sessions, and answers. For each
// following line it sends the load, and answers. It exits when stdin is closed.

// A load describes the traffic of the routers. Rates are totals of all routers.
type load struct {
	Routers   int           `json:"routers"`
	BMP       string        `json:"bmp,omitempty"` // destination; no BMP if empty
	IPFIX     string        `json:"ipfix,omitempty"`
	Records   int           `json:"records_per_datagram"`
	Prefixes  int           `json:"prefixes_per_router"`
	Datagrams float64       `json:"datagrams_per_second"` // 0: no limit
	Updates   float64       `json:"updates_per_second"`   // 0: only the initial updates
	Duration  time.Duration `json:"duration_ns"`
	// Spacing is the interval between the starts of sessions. nfacctd's listeners have a backlog of 1, and HAProxy,
	// which connects to them at once, closes a session if the backlog is full.
	Spacing time.Duration `json:"spacing_ns"`
	// Within is the time in which a session must be open if all sessions start at once; 0: they start one after the other,
	// and an error ends the load.
	Within time.Duration `json:"within_ns,omitempty"`
	From   addresses     `json:"from,omitempty"`
}

// addresses selects the source addresses of a router.
type addresses string

const (
	fromOne  addresses = ""       // routerAddr
	fromTwo  addresses = "second" // routerAddr for BMP, secondAddr for IPFIX
	fromIPv6 addresses = "ipv6"   // routerAddr6
)

// routerAddr returns the address of a router. Addresses in 127.0.0.0/8 need not be added to lo.
func routerAddr(i int) netip.Addr { return netip.AddrFrom4([4]byte{127, 10, byte(i >> 8), byte(i)}) }

// secondAddr returns the second address of a router.
func secondAddr(i int) netip.Addr { return netip.AddrFrom4([4]byte{127, 11, byte(i >> 8), byte(i)}) }

// deviceAddrs returns all addresses of a router.
func deviceAddrs(i int) []netip.Addr {
	return []netip.Addr{routerAddr(i), secondAddr(i), routerAddr6(i)}
}

func generator([]string) error {
	debug.SetGCPercent(400)
	lines, answers := bufio.NewReader(os.Stdin), json.NewEncoder(os.Stdout)
	line, err := lines.ReadBytes('\n')
	if err != nil {
		return fmt.Errorf("read load: %w", err)
	}
	var l load
	if err := json.Unmarshal(line, &l); err != nil {
		return fmt.Errorf("read load: %w", err)
	}
	if l.Within > 0 {
		return l.atOnce(lines, answers)
	}
	var sessions []*traffic.Session
	var exporters []*traffic.Exporter
	for i := range l.Routers {
		if l.BMP != "" {
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
			s, err := l.session(ctx, i)
			cancel()
			if err != nil {
				return err
			}
			sessions = append(sessions, s)
			time.Sleep(l.Spacing)
		}
		if l.IPFIX != "" {
			e, err := l.exporter(i)
			if err != nil {
				return err
			}
			if err := e.SendTemplates(); err != nil {
				return err
			}
			exporters = append(exporters, e)
		}
	}
	if err := answers.Encode(struct{}{}); err != nil {
		return err
	}
	for { // sessions stay open from one line to the next
		if _, err := lines.ReadBytes('\n'); err != nil {
			return nil // this protocol is not part of the load
		}
		out, err := l.drive(sessions, exporters)
		if err != nil {
			return err
		}
		if err := answers.Encode(out); err != nil {
			return err
		}
	}
}

// sent contains the number of items sent within the duration, and the elapsed time.
type sent struct {
	Datagrams uint64        `json:"datagrams"`
	Records   uint64        `json:"flow_records"`
	Refused   uint64        `json:"refused"`
	Updates   uint64        `json:"updates"`      // Route Monitoring messages of one prefix each
	Bytes     uint64        `json:"stream_bytes"` // of all BMP sessions, including their start
	Elapsed   time.Duration `json:"elapsed_ns"`
	CPU       time.Duration `json:"cpu_ns"`
}

// drive sends the load once.
func (l load) drive(sessions []*traffic.Session, exporters []*traffic.Exporter) (sent, error) {
	var out sent
	var wg sync.WaitGroup
	var errs [2]error
	for _, e := range exporters {
		out.Records -= e.Stats().Records
		out.Refused -= e.Stats().Refused
	}
	start, cpu := time.Now(), ownCPU()
	if l.Updates > 0 {
		wg.Go(func() {
			limit := traffic.Limit{Rate: l.Updates, Duration: l.Duration, Batch: 4}
			r, err := traffic.Drive(context.Background(), limit, len(sessions), func(i, n int) (int, error) { return sessions[i].Announce(n) })
			out.Updates, errs[0] = r.Messages, err
		})
	}
	if len(exporters) > 0 {
		wg.Go(func() {
			limit := traffic.Limit{Rate: l.Datagrams, Duration: l.Duration}
			r, err := traffic.Drive(context.Background(), limit, len(exporters), func(i, n int) (int, error) { return exporters[i].Send(n) })
			out.Datagrams, errs[1] = r.Messages, err
		})
	}
	wg.Wait()
	out.Elapsed, out.CPU = time.Since(start), ownCPU()-cpu
	for _, e := range exporters {
		out.Records += e.Stats().Records
		out.Refused += e.Stats().Refused
	}
	for _, s := range sessions {
		out.Bytes += s.Stats().Bytes
	}
	return out, errors.Join(errs[:]...)
}

// onset contains the state of sessions that started at once, and the datagrams sent.
type onset struct {
	Open      int    `json:"open"`
	Pending   int    `json:"pending"` // not open yet, within the time
	Refused   int    `json:"refused"` // not open within the time, or refused
	Closed    int    `json:"closed"`  // by the other end, after they were open
	Datagrams uint64 `json:"datagrams"`
	Sending   bool   `json:"sending"`
}

// atOnce opens the exporters and answers. After a line it starts all sessions at once, and sends datagrams for the
// duration of the load. It answers this line and each following one with the state. The line "again" sends datagrams for
// this duration again.
func (l load) atOnce(lines *bufio.Reader, answers *json.Encoder) error {
	var exporters []*traffic.Exporter
	for i := range l.Routers {
		e, err := l.exporter(i)
		if err != nil {
			return err
		}
		exporters = append(exporters, e)
	}
	if err := answers.Encode(struct{}{}); err != nil {
		return err
	}
	if _, err := lines.ReadBytes('\n'); err != nil {
		return nil // this protocol is not part of the load
	}
	var mu sync.Mutex
	state := onset{Pending: l.Routers}
	change := func(f func(*onset)) {
		mu.Lock()
		defer mu.Unlock()
		f(&state)
	}
	ctx, cancel := context.WithTimeout(context.Background(), l.Within)
	defer cancel()
	start := make(chan struct{})
	for i := range l.Routers {
		go func() {
			<-start
			s, err := l.session(ctx, i)
			if err != nil {
				change(func(o *onset) { o.Pending--; o.Refused++ })
				return
			}
			change(func(o *onset) { o.Pending--; o.Open++ })
			_ = s.WaitClosed() // whatever ends the session
			change(func(o *onset) { o.Open--; o.Closed++ })
		}()
	}
	failed := make(chan error, 1)
	send := func() {
		change(func(o *onset) { o.Sending = true })
		go func() {
			// By number: on emulated CPUs, the start of the sessions takes most of a second.
			limit := traffic.Limit{Rate: l.Datagrams, Count: uint64(l.Datagrams * l.Duration.Seconds()), Duration: max(l.Duration, l.Within), Batch: 1}
			r, err := traffic.Drive(context.Background(), limit, len(exporters), func(i, n int) (int, error) {
				sent, err := exporters[i].Send(n)
				if errors.Is(err, unix.EPERM) { // IPVS drops what has no member
					return n, nil
				}
				return sent, err
			})
			if err != nil {
				failed <- err
			}
			change(func(o *onset) { o.Sending = false; o.Datagrams += r.Messages })
		}()
	}
	close(start)
	send()
	for {
		select {
		case err := <-failed:
			return err
		default:
		}
		mu.Lock()
		now := state
		mu.Unlock()
		if err := answers.Encode(now); err != nil {
			return err
		}
		line, err := lines.ReadString('\n')
		if err != nil {
			return nil
		}
		if line == "again\n" {
			send()
		}
	}
}

// session opens the BMP session of a router. Its sysName is routerAddr, whatever its source.
func (l load) session(ctx context.Context, router int) (*traffic.Session, error) {
	source, _ := l.From.of(router)
	return traffic.DialBMP(ctx, traffic.SessionConfig{
		Source: source, Target: netip.MustParseAddrPort(l.BMP), Name: routerAddr(router).String(), Routes: l.routes(router),
	})
}

func (l load) routes(router int) []traffic.Route {
	var routes []traffic.Route
	for i := range l.Prefixes {
		as := uint16(64600)
		routes = append(routes, traffic.Route{
			Prefixes: []netip.Prefix{routerPrefix(router, i)}, NextHop: routerAddr(router),
			ASPath:      []uint32{uint32(as), 65550, uint32(65600 + router)},
			Communities: []uint32{traffic.Community(as, uint16(router)), traffic.Community(as, uint16(i))},
		})
	}
	return routes
}

func (l load) exporter(router int) (*traffic.Exporter, error) {
	_, source := l.From.of(router)
	return traffic.NewExporter(traffic.ExporterConfig{
		Source: source, Target: netip.MustParseAddrPort(l.IPFIX), Domain: uint32(router + 1),
		Messages: l.messages(router), TemplateRefresh: time.Hour,
	})
}

// of returns the addresses of a router for its streams.
func (a addresses) of(router int) (bmp, ipfix netip.Addr) {
	switch a {
	case fromTwo:
		return routerAddr(router), secondAddr(router)
	case fromIPv6:
		return routerAddr6(router), routerAddr6(router)
	}
	return routerAddr(router), routerAddr(router)
}

// addresses6 has the IPv6 addresses of the routers.
var addresses6 = netip.MustParsePrefix("fd00:10::/64")

func routerAddr6(i int) netip.Addr {
	a := addresses6.Addr().As16()
	a[14], a[15] = byte(i>>8), byte(i)
	return netip.AddrFrom16(a)
}

// messages returns 16 datagrams with flows to the router's prefixes.
func (l load) messages(router int) [][]traffic.Flow {
	now := time.Now()
	messages := make([][]traffic.Flow, 16)
	for i := range messages {
		for j := range l.Records {
			n := i*l.Records + j
			messages[i] = append(messages[i], traffic.Flow{
				Src: netip.AddrFrom4([4]byte{198, 18, byte(router), byte(n)}), Dst: routerPrefix(router, n%l.Prefixes).Addr().Next(),
				SrcPort: uint16(1024 + n), DstPort: 443, Protocol: 6, In: 1, Out: 2,
				Packets: 1, Octets: 1000, Start: now.Add(-time.Second), End: now,
			})
		}
	}
	return messages
}

func routerPrefix(router, i int) netip.Prefix {
	n := router*64 + i
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{byte(20 + n>>16), byte(n >> 8), byte(n), 0}), 24)
}
