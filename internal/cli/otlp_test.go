// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"compress/gzip"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	collectorpb "go.opentelemetry.io/proto/otlp/collector/metrics/v1"
	"google.golang.org/protobuf/proto"

	"sockeye/internal/api"
)

// otlpReceiver is a collector of OpenTelemetry, which keeps the number of exports and the last one by name of the metric.
type otlpReceiver struct {
	mu      sync.Mutex
	exports int
	points  map[string]int // number of data points
	tenant  string
}

func (o *otlpReceiver) ServeHTTP(_ http.ResponseWriter, r *http.Request) {
	unzipped, err := gzip.NewReader(r.Body)
	if err != nil {
		return
	}
	body, err := io.ReadAll(unzipped)
	var request collectorpb.ExportMetricsServiceRequest
	if err != nil || proto.Unmarshal(body, &request) != nil {
		return
	}
	points := make(map[string]int)
	for _, resource := range request.ResourceMetrics {
		for _, scope := range resource.ScopeMetrics {
			for _, m := range scope.Metrics {
				points[m.Name] = len(m.GetGauge().GetDataPoints()) + len(m.GetSum().GetDataPoints())
			}
		}
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.exports, o.points, o.tenant = o.exports+1, points, r.Header.Get("X-Tenant")
}

func (o *otlpReceiver) last() (exports int, points map[string]int, tenant string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.exports, o.points, o.tenant
}

// secret writes a file that only its owner may read.
func (h *host) secret(name, text string) string {
	h.t.Helper()
	path := filepath.Join(h.dir, name)
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		h.t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		h.t.Fatal(err)
	}
	return path
}

// TestOTLP runs an agent in the sandbox of the unit, which exports metrics to a collector until a policy ends that.
func TestOTLP(t *testing.T) {
	receiver := &otlpReceiver{}
	server := httptest.NewServer(receiver)
	defer server.Close()
	policy := twoServices + "metrics: {otlp: {endpoint: '" + server.URL + "', interval: 1s, headers_file: headers}}\n"
	h := newHost(t, policy)
	h.write("devices.csv", "127.0.0.1,edge\n")
	headers := h.secret("headers", "X-Tenant: seven\n")
	h.sandbox = h.harden()
	h.start()
	h.eventually("metrics are exported", func() bool {
		_, points, tenant := receiver.last()
		return points["sockeye_slot_ready"] == 6 && points["sockeye_build_info"] == 1 && points["sockeye_datagrams_total"] == 6 && tenant == "seven"
	})
	// Changed headers are a change of the policy, and in force after an apply.
	h.secret("headers", "X-Tenant: eight\n")
	if status := must[api.Status](h, "status"); !strings.Contains(status.PolicyProblem, headers) {
		t.Errorf("policy problem: %q", status.PolicyProblem)
	}
	must[api.Plan](h, "apply")
	h.eventually("the new headers are sent", func() bool { _, _, tenant := receiver.last(); return tenant == "eight" })

	if err := os.Chmod(headers, 0o644); err != nil {
		t.Fatal(err)
	}
	h.refused(2, "read headers_file: others have access to DIR/headers", "chmod 600 DIR/headers", nil, "plan")
	h.refused(2, "read headers_file: others have access to DIR/headers", "chmod 600 DIR/headers", nil, "apply")

	h.write("policy.yaml", twoServices)
	plan := must[api.Plan](h, "apply")
	if len(plan.Changes) != 1 || plan.Changes[0].What != "metrics.otlp: "+server.URL+"/v1/metrics every 1s -> none" {
		t.Errorf("plan: %+v", plan.Changes)
	}
	h.why("127.0.0.1") // the receiver counts an export that was under way
	before, _, _ := receiver.last()
	h.why("127.0.0.1") // takes longer than the interval
	h.why("127.0.0.1")
	if after, _, _ := receiver.last(); after != before {
		t.Errorf("%d exports after the end", after-before)
	}
}
