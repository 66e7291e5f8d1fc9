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
	dto "github.com/prometheus/client_model/go"

	"sockeye/internal/domain"
	"sockeye/internal/fault"
	"sockeye/internal/format"
)

var (
	descInForce = prometheus.NewDesc("sockeye_policy_in_force",
		"1 while the policy file is the policy in force.", nil, nil)
	descStarts = prometheus.NewDesc("sockeye_agent_starts_total",
		"Starts of the agent since the creation of its state directory.", nil, nil)
	descEvents = prometheus.NewDesc("sockeye_events_recorded_total",
		"Events that were recorded since the start of the agent.", nil, nil)
	descEventsLost = prometheus.NewDesc("sockeye_events_lost_total",
		"Events that could not be recorded since the start of the agent, as on a full disk.", nil, nil)
	descEventsBytes = prometheus.NewDesc("sockeye_events_bytes",
		"Size of the files of events.", nil, nil)
	descBuild = prometheus.NewDesc("sockeye_build_info",
		"1, with the agent's version.", []string{"version"}, nil)
)

// Describe sends no descriptions: the metrics depend on the policy in force.
func (a *Agent) Describe(chan<- *prometheus.Desc) {}

// Collect sends the metrics of the agent, of its domains, and of sockets.
func (a *Agent) Collect(out chan<- prometheus.Metric) {
	out <- prometheus.MustNewConstMetric(descBuild, prometheus.GaugeValue, 1, a.options.Version)
	problem, _ := a.policyProblem()
	out <- prometheus.MustNewConstMetric(descInForce, prometheus.GaugeValue, format.Bool(problem == ""))
	out <- prometheus.MustNewConstMetric(descStarts, prometheus.CounterValue, float64(a.starts))
	recorded := a.events.Stats()
	out <- prometheus.MustNewConstMetric(descEvents, prometheus.CounterValue, float64(recorded.Recorded))
	out <- prometheus.MustNewConstMetric(descEventsLost, prometheus.CounterValue, float64(recorded.Lost))
	out <- prometheus.MustNewConstMetric(descEventsBytes, prometheus.GaugeValue, float64(recorded.Bytes))
	for _, d := range a.domains {
		d.Collect(out)
	}
	if err := a.sockets.Collect(out); err != nil {
		a.log.Error("metrics failed", "error", err)
	}
}

// gatherer returns a gatherer of all metrics, which works for one caller at a time: a scrape and an export read the same
// kernel maps.
func (a *Agent) gatherer() prometheus.Gatherer {
	registry := prometheus.NewRegistry()
	registry.MustRegister(a, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return prometheus.GathererFunc(func() ([]*dto.MetricFamily, error) {
		a.gathering.Lock()
		defer a.gathering.Unlock()
		return registry.Gather()
	})
}

type metricsServer struct {
	http *http.Server
}

// serveMetrics starts the metrics server on an address. The result for "" is an empty server.
func (a *Agent) serveMetrics(address string) (*metricsServer, error) {
	if address == "" {
		return &metricsServer{}, nil
	}
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fault.WithHint(fmt.Errorf("serve metrics: %w", err), "set metrics.listen to a free address")
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", serialize(promhttp.HandlerFor(a.gatherer(), promhttp.HandlerOpts{})))
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

// scrapeTimeout is the longest time that a scrape waits for the previous one.
const scrapeTimeout = 10 * time.Second

// serialize runs one request at a time, because a scrape reads many kernel maps. Each answer is buffered and written
// after the next request may start, so that a slow client does not block others.
func serialize(next http.Handler) http.Handler {
	semaphore := make(chan struct{}, 1)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		timeout := time.NewTimer(scrapeTimeout)
		defer timeout.Stop()
		select {
		case semaphore <- struct{}{}:
		case <-r.Context().Done():
			return
		case <-timeout.C:
			http.Error(w, "too many scrapes", http.StatusServiceUnavailable)
			return
		}
		answer := &bufferedResponse{ResponseWriter: w, status: http.StatusOK}
		func() {
			defer func() { <-semaphore }()
			next.ServeHTTP(answer, r)
		}()
		w.WriteHeader(answer.status)
		// The client may have disconnected.
		_, _ = w.Write(answer.body.Bytes())
	})
}

// bufferedResponse keeps an answer in memory.
type bufferedResponse struct {
	http.ResponseWriter
	status int
	body   bytes.Buffer
}

// WriteHeader stores the status.
func (k *bufferedResponse) WriteHeader(status int) { k.status = status }

// Write appends to the body.
func (k *bufferedResponse) Write(p []byte) (int, error) { return k.body.Write(p) }

func (m *metricsServer) close() {
	if m != nil && m.http != nil {
		m.http.Close()
	}
}
