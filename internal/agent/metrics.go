// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	dto "github.com/prometheus/client_model/go"

	"sockeye/internal/config"
	"sockeye/internal/connlimit"
	"sockeye/internal/domain"
	"sockeye/internal/fault"
	"sockeye/internal/format"
	"sockeye/internal/otlp"
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

// sharedGatherer gathers once for all callers that wait.
type sharedGatherer struct {
	from    prometheus.Gatherer
	waiting atomic.Int32 // callers, with the one that gathers

	mu       sync.Mutex
	begun    time.Time // of the last gathering; its result is kept while callers wait
	families []*dto.MetricFamily
	err      error
}

// gatherer returns a gatherer of all metrics, which reads the kernel maps for one caller at a time: a scrape and an export
// read the same ones. Callers that wait share the next result, so that a flood of scrapes delays a scrape by two results,
// and not by one for each request before it.
func (a *Agent) gatherer() *sharedGatherer {
	registry := prometheus.NewRegistry()
	registry.MustRegister(a, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return &sharedGatherer{from: registry}
}

// Gather returns metrics that were gathered after the call began. The result is shared: the caller does not change it.
func (g *sharedGatherer) Gather() ([]*dto.MetricFamily, error) {
	called := time.Now()
	g.waiting.Add(1)
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.begun.After(called) {
		g.begun = time.Now()
		g.families, g.err = g.from.Gather()
	}
	families, err := g.families, g.err
	if g.waiting.Add(-1) == 0 {
		g.begun, g.families, g.err = time.Time{}, nil, nil
	}
	return families, err
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
	mux.Handle("GET /metrics", promhttp.HandlerFor(a.gathered, promhttp.HandlerOpts{}))
	for _, d := range domain.With[domain.HealthReporter](a.domains) {
		mux.HandleFunc("GET /health", domain.ServeHealth(d))
	}
	m := &metricsServer{&http.Server{Handler: mux, ReadTimeout: 5 * time.Second, WriteTimeout: 30 * time.Second, MaxHeaderBytes: 16 << 10,
		ErrorLog: slog.NewLogLogger(a.log.Handler(), slog.LevelWarn)}}
	g := &connlimit.Listener{Listener: listener, Name: "metrics", Log: a.log, Limit: domain.ShareOfDescriptors(metricsShare, leastMetrics, mostMetrics), EvictsOldest: true}
	g.Wrap(m.http)
	go func() {
		if err := m.http.Serve(g); !errors.Is(err, http.ErrServerClosed) {
			a.log.Error("metrics failed", "error", err)
		}
	}()
	a.log.Info("metrics served", "address", listener.Addr().String())
	return m, nil
}

func (m *metricsServer) close() {
	if m != nil && m.http != nil {
		m.http.Close()
	}
}

// newExport returns the export that a policy names, or nil for none.
func (a *Agent) newExport(policy *config.Policy) (*otlp.Export, error) {
	return otlp.New(policy.Metrics.OTLP, a.gathered, a.options.Version, a.log)
}

// startExport starts the export of the first policy. An export that fails is logged: steering works without metrics.
func (a *Agent) startExport(policy *config.Policy) {
	export, err := a.newExport(policy)
	if err != nil {
		a.log.Error("metrics are not exported", "error", err, "hint", fault.Hint(err))
	}
	a.replaceExport(export)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.exportProblem = err
}

// stopExport ends the export.
func (a *Agent) stopExport() { a.replaceExport(nil) }

// replaceExport ends the export in force and starts another one, or none for nil. The caller does not hold a.mu, which
// an export needs to end.
func (a *Agent) replaceExport(export *otlp.Export) {
	a.mu.Lock()
	old := a.export
	a.export, a.exportProblem = export, nil
	a.mu.Unlock()
	if old != nil {
		old.Stop()
	}
	if export != nil {
		export.Start()
	}
}
