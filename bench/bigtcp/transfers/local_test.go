// SPDX-License-Identifier: Apache-2.0

package transfers

import (
	"context"
	"errors"
	"math"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"sockeye/internal/bigtcp/netif"
	"sockeye/internal/fault"
)

func TestLocal(t *testing.T) {
	before, err := net.Interfaces()
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range Paths {
		for _, two := range []bool{false, true} {
			if two && path != PathVeth {
				continue
			}
			o := quick()
			o.Rounds = 1
			o.Path, o.TwoCPUs = path, two
			// Longer than a retransmission timeout, 200 ms: a lost packet must not use up the whole time.
			o.For, o.Warmup = 300*time.Millisecond, 20*time.Millisecond
			told := 0
			o.Progress = func(done, of int) {
				if told++; done != told || of != o.Rounds*runsPerRound*2 {
					t.Errorf("%s: progress %d of %d, after %d", path, done, of, told-1)
				}
			}
			r, err := Local(t.Context(), o)
			// A receiver that gets no CPU leaves its buffer full. The kernel then drops a whole packet, and TCP waits longer
			// after each one: a load may transfer nothing in its time.
			for attempt := 1; attempt < 4 && (stalled(r, err) || !largerPackets(r)); attempt++ {
				t.Logf("%s: stalled: %v", path, err)
				told = 0
				r, err = Local(t.Context(), o)
			}
			if err != nil {
				t.Fatalf("%s: %v", path, err)
			}
			if told != o.Rounds*runsPerRound*2 || len(r.Families) != 2 {
				t.Fatalf("%s: %d runs of %d families", path, told, len(r.Families))
			}
			for _, f := range r.Families {
				if len(f.Rows) != len(measures(o.Message)) || len(f.Runs) != o.Rounds*runsPerRound {
					t.Errorf("%s, %s: %d rows of %d runs", path, f.Family, len(f.Rows), len(f.Runs))
				}
				for _, row := range f.Rows {
					for _, v := range []float64{row.Off, row.On, row.Ratio, row.Low, row.High} {
						if v <= 0 || math.IsInf(v, 0) || math.IsNaN(v) {
							t.Errorf("%s, %s: %+v", path, f.Family, row)
						}
					}
				}
				packets, _ := r.Row(f.Family, "stream_packet")
				if packets.Off > netif.Legacy || packets.On <= netif.Legacy {
					t.Errorf("%s, %s: packets of %.0f bytes off, %.0f on", path, f.Family, packets.Off, packets.On)
				}
				if packets, _ := r.Row(f.Family, "rr_packets"); packets.Off < 4 || packets.On < 2 || packets.On >= packets.Off {
					t.Errorf("%s, %s: %.2f packets a transaction off, %.2f on", path, f.Family, packets.Off, packets.On)
				}
				for _, s := range f.Runs {
					if s.Load == loadRR && !(s.Min <= s.P50 && s.P50 <= s.P90 && s.P90 <= s.P99 && s.P99 <= s.Max) {
						t.Errorf("%s, %s: quantiles of %+v", path, f.Family, s)
					}
				}
			}
		}
	}
	after, err := net.Interfaces()
	if err != nil {
		t.Fatal(err)
	}
	if len(after) != len(before) {
		t.Errorf("interfaces are left: %v, were %v", after, before)
	}
}

// largerPackets reports whether the packets were larger with the larger sizes. After a loss, TCP sends small packets for a while.
func largerPackets(r *Result) bool {
	for _, f := range r.Families {
		stream, _ := r.Row(f.Family, "stream_packet")
		requests, _ := r.Row(f.Family, "rr_packets")
		if stream.On <= netif.Legacy || requests.On >= requests.Off {
			return false
		}
	}
	return true
}

// stalled reports whether a load of a run transferred nothing for some time.
func stalled(r *Result, err error) bool {
	if err != nil {
		return strings.Contains(err.Error(), "no progress in") || strings.Contains(err.Error(), "no data was transferred")
	}
	for _, f := range r.Families {
		for _, row := range f.Rows {
			if row.Off == 0 || row.On == 0 {
				return true
			}
		}
	}
	return false
}

// retried is Local, again if a load transferred nothing: see TestLocal.
func retried(ctx context.Context, o Options) (r *Result, err error) {
	r, err = Local(ctx, o)
	for attempt := 1; attempt < 4 && stalled(r, err); attempt++ {
		r, err = Local(ctx, o)
	}
	return r, err
}

// TestSegmentation compares packets of the MTU with packets of up to 65536 bytes.
func TestSegmentation(t *testing.T) {
	o := quick()
	o.Rounds, o.For, o.Warmup, o.Segmentation = 1, 300*time.Millisecond, 20*time.Millisecond, true
	r, err := retried(t.Context(), o)
	small := func() bool { // a loss, or a busy host, keeps the packets of a short load small
		return slices.ContainsFunc(Families, func(family string) bool { row, ok := r.Row(family, "stream_packet"); return ok && row.On < 3000 })
	}
	for attempt := 1; attempt < 4 && err == nil && small(); attempt++ {
		r, err = retried(t.Context(), o)
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, family := range Families {
		if row, ok := r.Row(family, "stream_packet"); !ok || row.Off > 1514 || row.On < 3000 || row.On > 65550 {
			t.Errorf("%s: packets of %.0f bytes off and %.0f on", family, row.Off, row.On)
		}
	}
	if text := strings.Join(r.Text(), "\n"); !strings.Contains(text, "packets of the MTU (off) and up to 65536 bytes (on)") {
		t.Errorf("text:\n%s", text)
	}
}

// TestLocalInterrupted checks that Local leaves nothing behind, also if it is interrupted.
func TestLocalInterrupted(t *testing.T) {
	// Descriptors that the Go runtime opens once are open then.
	if _, err := retried(t.Context(), quick()); err != nil {
		t.Fatal(err)
	}
	open := descriptors(t)
	for _, at := range []int{0, 1, 7} {
		ctx, cancel := context.WithCancelCause(t.Context())
		why := errors.New("interrupted")
		o := quick()
		o.Path = PathBridge
		o.Progress = func(done, _ int) {
			if done == at {
				cancel(why)
			}
		}
		if at == 0 {
			cancel(why)
		}
		if _, err := retried(ctx, o); !errors.Is(err, why) {
			t.Errorf("interrupted after %d runs: %v", at, err)
		}
	}
	if left := descriptors(t); !slices.Equal(left, open) {
		t.Errorf("open are\n%s\nwere\n%s", strings.Join(left, "\n"), strings.Join(open, "\n"))
	}
}

func TestOptions(t *testing.T) {
	for name, change := range map[string]func(*Options){
		"size of off":     func(o *Options) { o.Size = netif.Legacy },
		"size":            func(o *Options) { o.Size = netif.MaxSize + 1 },
		"no message":      func(o *Options) { o.Message = 0 },
		"small message":   func(o *Options) { o.Message = sequenceSize + checkedSize - 1 },
		"large message":   func(o *Options) { o.Message = maxMessage + 1 },
		"no rounds":       func(o *Options) { o.Rounds = 0 },
		"many rounds":     func(o *Options) { o.Rounds = maxRounds + 1 },
		"no time":         func(o *Options) { o.For = 0 },
		"long time":       func(o *Options) { o.For = maxFor + 1 },
		"negative warmup": func(o *Options) { o.Warmup = -1 },
		"long warmup":     func(o *Options) { o.Warmup = maxWarmup + 1 },
		"path":            func(o *Options) { o.Path = "moon" },
	} {
		o := quick()
		change(&o)
		_, err := Local(t.Context(), o)
		if code, ok := codeOf(err); !ok || code != fault.CodeUsage {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestMessages uses messages of the smallest and the largest size.
func TestMessages(t *testing.T) {
	for _, size := range []int{sequenceSize + checkedSize, 1000, maxMessage} {
		o := quick()
		o.Message, o.Rounds = size, 1
		if size == maxMessage {
			o.For = time.Second // on a busy machine, a transaction of 2 MiB may take longer than 100 ms
		}
		if _, err := retried(t.Context(), o); err != nil {
			t.Errorf("%d bytes: %v", size, err)
		}
	}
}
