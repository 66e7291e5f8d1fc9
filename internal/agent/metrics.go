// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"sockeye/internal/domain"
	"sockeye/internal/fault"
	"sockeye/internal/format"
)

var (
	descInForce = prometheus.NewDesc("sockeye_policy_in_force",
		"1 while the policy file is the policy that the agent works by.", nil, nil)
	descStarts = prometheus.NewDesc("sockeye_agent_starts_total",
		"Starts of the agent since its state directory was made.", nil, nil)
	descBuild = prometheus.NewDesc("sockeye_build_info",
		"1, with the agent's version.", []string{"version"}, nil)
)

// Describe leaves the descriptions to Collect, as services come and go.
func (a *Agent) Describe(chan<- *prometheus.Desc) {}

// Collect gives the metrics of the agent, of its domains, and of sockets.
func (a *Agent) Collect(out chan<- prometheus.Metric) {
	out <- prometheus.MustNewConstMetric(descBuild, prometheus.GaugeValue, 1, a.options.Version)
	problem, _ := a.policyProblem()
	out <- prometheus.MustNewConstMetric(descInForce, prometheus.GaugeValue, format.Bool(problem == ""))
	out <- prometheus.MustNewConstMetric(descStarts, prometheus.CounterValue, float64(a.starts))
	for _, d := range a.domains {
		d.Collect(out)
	}
	if err := a.sockets.Collect(out); err != nil {
		a.log.Error("metrics failed", "error", err)
	}
}

type metricsServer struct {
	http *http.Server
}

// serveMetrics opens the endpoint; "" means none.
func (a *Agent) serveMetrics(address string) (*metricsServer, error) {
	if address == "" {
		return &metricsServer{}, nil
	}
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fault.WithHint(fmt.Errorf("serve metrics: %w", err), "set metrics.listen to a free address")
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(a, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", serialize(promhttp.HandlerFor(registry, promhttp.HandlerOpts{})))
	m := &metricsServer{&http.Server{Handler: mux, ReadTimeout: 5 * time.Second, WriteTimeout: 30 * time.Second, MaxHeaderBytes: 16 << 10,
		ErrorLog: slog.NewLogLogger(a.log.Handler(), slog.LevelWarn)}}
	g := &gate{Listener: listener, name: "metrics", log: a.log, limit: domain.ShareOfDescriptors(metricsShare, leastMetrics, mostMetrics), evictsOldest: true}
	g.wrap(m.http)
	go func() {
		if err := m.http.Serve(g); !errors.Is(err, http.ErrServerClosed) {
			a.log.Error("metrics failed", "error", err)
		}
	}()
	a.log.Info("metrics served", "address", listener.Addr().String())
	return m, nil
}

// scrapeTime bounds how long a scrape waits for the one before.
const scrapeTimeout = 10 * time.Second

// oneAtATime has one request answered at a time: scrapes read the kernel's maps. Their answers
// are written afterwards, so that a slow reader keeps nobody waiting.
func serialize(next http.Handler) http.Handler {
	turn := make(chan struct{}, 1)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		late := time.NewTimer(scrapeTimeout)
		defer late.Stop()
		select {
		case turn <- struct{}{}:
		case <-r.Context().Done():
			return
		case <-late.C:
			http.Error(w, "too many scrapes", http.StatusServiceUnavailable)
			return
		}
		answer := &bufferedResponse{ResponseWriter: w, status: http.StatusOK}
		func() {
			defer func() { <-turn }()
			next.ServeHTTP(answer, r)
		}()
		w.WriteHeader(answer.status)
		// The caller may be gone; nothing is to be done about that.
		_, _ = w.Write(answer.body.Bytes())
	})
}

// heldAnswer is an answer that is not written yet.
type bufferedResponse struct {
	http.ResponseWriter
	status int
	body   bytes.Buffer
}

// WriteHeader keeps the status.
func (k *bufferedResponse) WriteHeader(status int) { k.status = status }

// Write keeps a part of the answer.
func (k *bufferedResponse) Write(p []byte) (int, error) { return k.body.Write(p) }

func (m *metricsServer) close() {
	if m != nil && m.http != nil {
		m.http.Close()
	}
}
