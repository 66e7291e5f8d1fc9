// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"sockeye/bench/harness"
	"sockeye/internal/chart"
	"sockeye/internal/gateway"
	"sockeye/room"
)

// The ablation runs one upload through gateways that differ in the formula of the window, and in whether full sockets are polled, over
// the path of the iperf3 loads.

const (
	formulaPasst    = "passt"    // until April 2026
	formulaPatch    = "patch"    // to passt, of April 2026: https://archives.passt.top/passt-dev/20260422135131.5806f34f@elisabeth/T/
	formulaSegments = "segments" // of the review of the patch
	formulaRoom     = "room"     // package room, and polling of full sockets
)

// polled follows the name of a formula with polling, and unpolled that of package room without.
const polled, unpolled = "-polled", "-unpolled"

var ablationFormulas = []string{
	formulaPasst, formulaPasst + polled, formulaPatch, formulaPatch + polled, formulaSegments, formulaSegments + polled, formulaRoom + unpolled, formulaRoom,
}

// formulas returns the formulas by name; formulaRoom is none.
func formulas(k room.Kernel) map[string]*gateway.Formula {
	all := map[string]*gateway.Formula{formulaRoom + unpolled: {}}
	for name, space := range spaces(k) {
		all[name], all[name+polled] = &gateway.Formula{Space: space}, &gateway.Formula{Space: space, Polls: true}
	}
	return all
}

func spaces(k room.Kernel) map[string]func(room.Snapshot) int {
	return map[string]func(room.Snapshot) int{
		formulaPasst: func(s room.Snapshot) int {
			return min(s.SendWindow, max(scaledBuffer(s.SendBuffer)-s.Payload, 0))
		},
		formulaPatch: func(s room.Snapshot) int {
			left := max(s.SendBuffer-s.Queued, 0)
			if s.Payload == 0 || s.Queued <= s.Payload {
				return min(s.SendWindow, left/4*3) // the overhead cannot be observed
			}
			return min(s.SendWindow, int(int64(left)*int64(s.Payload)/int64(s.Queued)))
		},
		formulaSegments: func(s room.Snapshot) int {
			if s.MSS <= 0 {
				return 0
			}
			return min(s.SendWindow, max(s.SendBuffer-s.Queued, 0)/(s.MSS+k.Overhead)*s.MSS)
		},
	}
}

// scaledBuffer returns a buffer of at most 128 KiB whole, three quarters of one from 4 MiB on, and a share between these of others.
func scaledBuffer(buffer int) int {
	const small, large = 128 << 10, 4 << 20
	above := min(max(buffer-small, 0), large-small)
	return buffer - int(int64(buffer)*int64(above)/(large-small)/4)
}

// ablationRun is an upload with one formula.
type ablationRun struct {
	RTT     int            `json:"rtt_ms"`
	Formula string         `json:"formula"`
	Mbit    harness.Figure `json:"mbit"` // received, without the first half
	Seconds []int          `json:"seconds_mbit"`
	Partial uint64         `json:"partial_sends"`
	Resent  uint64         `json:"retransmits_guest"`
	CPU     harness.Figure `json:"cpu_s_per_gb"`
}

func (r *ablationRun) String() string {
	return fmt.Sprintf("%d ms, %s\t%.0f\t%d\t%.2f\t%s", r.RTT, r.Formula, r.Mbit, r.Partial, r.CPU, strings.Trim(fmt.Sprint(r.Seconds), "[]"))
}

type ablationReport struct {
	harness.Run
	Rounds int            `json:"rounds"`
	Runs   []*ablationRun `json:"runs"`
	Cost   float64        `json:"-"` // of a snapshot in ns
}

// Print implements harness.Report.
func (r *ablationReport) Print(p harness.Printf) {
	p("\nOne upload through a gateway with the window of a formula, 1 Gbit/s, cubic, MTU %d; Linux %s; the median run of %d\n", seedMTU, r.Kernel, r.Rounds)
	p("\tMbit/s\tpartial sends\tCPU, s/GB\tMbit/s in each second\n")
	for _, x := range r.medians() {
		p("%v\n", x)
	}
	p("Polled: with polling of full sockets, for which the kernel grows their buffers, as with room. One snapshot of a socket takes %.0f ns.\n", r.Cost)
}

// Figures implements harness.Report.
func (r *ablationReport) Figures() any {
	return struct {
		Ablation []*ablationRun  `json:"ablation"`
		Cost     harness.Figure  `json:"snapshot_ns"`
		Run      *ablationReport `json:"run"`
	}{r.medians(), harness.Figure(r.Cost), r}
}

// medians returns the run with the median rate of each round-trip time and formula; of an even number, that of the slower half.
func (r *ablationReport) medians() (list []*ablationRun) {
	for _, rtt := range seeds {
		for _, name := range ablationFormulas {
			var runs []*ablationRun
			for _, x := range r.Runs {
				if x.RTT == rtt && x.Formula == name {
					runs = append(runs, x)
				}
			}
			slices.SortFunc(runs, func(x, y *ablationRun) int { return cmp.Compare(x.Mbit, y.Mbit) })
			if len(runs) > 0 {
				list = append(list, runs[(len(runs)-1)/2])
			}
		}
	}
	return list
}

// Charts implements harness.Report.
func (r *ablationReport) Charts() map[string]chart.Chart { return nil }

// ablation compares the formulas and writes bench-room.json.
func (b *bench) ablation(ctx context.Context) error {
	p, err := newGatewayPath(ctx, b.lab, linkRoom, "")
	if err != nil {
		return err
	}
	if err := errors.Join(enlarge(p.host), enlarge(p.far)); err != nil {
		return err
	}
	report := &ablationReport{Run: harness.Begin(), Rounds: b.Rounds}
	if report.Cost, err = snapshotCost(); err != nil {
		return err
	}
	for round := range b.Rounds {
		for _, name := range harness.Turn(ablationFormulas, round) {
			if err := b.ablate(ctx, p, name, report); err != nil {
				return fmt.Errorf("formula %s: %w", name, err)
			}
		}
	}
	report.End()
	return harness.Publish(partRoom, report)
}

// snapshotCost returns the time of room.ReadSnapshot for an idle connection in nanoseconds: that of the fastest series, because
// other processes interrupt some.
func snapshotCost() (ns float64, err error) {
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		return 0, fmt.Errorf("measure snapshot: %w", err)
	}
	defer l.Close()
	var d net.Dialer
	d.SetMultipathTCP(false)
	conn, err := d.Dial("tcp4", l.Addr().String())
	if err != nil {
		return 0, fmt.Errorf("measure snapshot: %w", err)
	}
	defer conn.Close()
	raw, err := conn.(syscall.Conn).SyscallConn()
	if err != nil {
		return 0, fmt.Errorf("measure snapshot: %w", err)
	}
	const series, times = 50, 200
	var failed error
	ns = math.Inf(1)
	err = raw.Control(func(fd uintptr) {
		for range series {
			start := time.Now()
			for range times {
				if _, failed = room.ReadSnapshot(int(fd)); failed != nil {
					return
				}
			}
			ns = min(ns, float64(time.Since(start).Nanoseconds())/times)
		}
	})
	return ns, errors.Join(err, failed)
}

// ablate runs the uploads of a round with one formula.
func (b *bench) ablate(ctx context.Context, p *gatewayPath, name string, report *ablationReport) (err error) {
	p.formula = name
	s, err := p.newSide(ctx, sideSockeye, seedMTU)
	defer func() { err = errors.Join(err, s.stop()) }()
	if err == nil {
		err = errors.Join(enlarge(s.in), choose(p, map[string]*gatewaySide{sideSockeye: s}, "cubic"))
	}
	if err != nil {
		return err
	}
	for _, rtt := range seeds {
		delay := time.Duration(rtt) * time.Millisecond
		if err := p.delay(delay); err != nil {
			return err
		}
		all := 5*time.Second + 20*delay
		if b.Quick {
			all = 2*time.Second + 10*delay
		}
		r, err := b.load(p, s, task{Kind: upload, CC: "cubic", Connections: 1, Duration: all}, all/2)
		if err != nil {
			return err
		}
		if r.Error != "" {
			return errors.New(r.Error)
		}
		x := &ablationRun{rtt, name, harness.Figure(r.Mbit), r.Seconds, r.Partial, r.Inside, harness.Figure(r.CPU)}
		report.Runs = append(report.Runs, x)
		fmt.Fprintln(os.Stderr, strings.ReplaceAll(x.String(), "\t", " "))
		time.Sleep(2*delay + 100*time.Millisecond)
	}
	return nil
}
