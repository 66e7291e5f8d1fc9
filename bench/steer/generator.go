// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"runtime/debug"
	"sync"
	"time"

	"sockeye/lab/traffic"
)

// The generator simulates all routers in one process. It reads a load from stdin, opens the sessions, answers, waits
// for a line, sends the load, and answers. It exits when stdin is closed.

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

// routerAddr returns the address of a router. Addresses in 127.0.0.0/8 need not be added to lo.
func routerAddr(i int) netip.Addr { return netip.AddrFrom4([4]byte{127, 10, byte(i >> 8), byte(i)}) }

func routerPrefix(router, i int) netip.Prefix {
	n := router*64 + i
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{byte(20 + n>>16), byte(n >> 8), byte(n), 0}), 24)
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
	var sessions []*traffic.Session
	var exporters []*traffic.Exporter
	for i := range l.Routers {
		if l.BMP != "" {
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
			s, err := traffic.DialBMP(ctx, traffic.SessionConfig{Source: routerAddr(i), Target: netip.MustParseAddrPort(l.BMP), Routes: l.routes(i)})
			cancel()
			if err != nil {
				return err
			}
			sessions = append(sessions, s)
			time.Sleep(l.Spacing)
		}
		if l.IPFIX != "" {
			e, err := traffic.NewExporter(traffic.ExporterConfig{
				Source: routerAddr(i), Target: netip.MustParseAddrPort(l.IPFIX), Domain: uint32(i + 1),
				Messages: l.messages(i), TemplateRefresh: time.Hour,
			})
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
	if _, err := lines.ReadBytes('\n'); err != nil {
		return nil // this protocol is not part of the load
	}

	var out sent
	var wg sync.WaitGroup
	var errs [2]error
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
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	if err := answers.Encode(out); err != nil {
		return err
	}
	_, _ = lines.ReadBytes('\n') // keep the sessions open until all data is read
	return nil
}
