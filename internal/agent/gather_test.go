// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
)

// TestSharedGatherer checks that callers that wait share one result, that no caller gets metrics that are older than its
// call, and that no result is kept without callers.
func TestSharedGatherer(t *testing.T) {
	const callers = 500
	var gathered atomic.Int32
	start := time.Now()
	g := &sharedGatherer{}
	g.from = prometheus.GathererFunc(func() ([]*dto.MetricFamily, error) {
		at := float64(time.Since(start))
		for gathered.Add(1) == 1 && g.waiting.Load() < callers {
			gathered.Add(-1)
			time.Sleep(time.Millisecond)
		}
		return []*dto.MetricFamily{{Metric: []*dto.Metric{{Gauge: &dto.Gauge{Value: &at}}}}}, nil
	})
	var running sync.WaitGroup
	for range callers {
		running.Go(func() {
			called := time.Since(start)
			families, err := g.Gather()
			if err != nil {
				t.Error(err)
			} else if at := time.Duration(families[0].Metric[0].Gauge.GetValue()); at < called {
				t.Errorf("a caller at %v got metrics of %v", called, at)
			}
		})
	}
	running.Wait()
	if n := gathered.Load(); n != 2 {
		t.Errorf("gathered %d times, want 2", n)
	}
	if g.families != nil {
		t.Error("a result is kept")
	}
}
