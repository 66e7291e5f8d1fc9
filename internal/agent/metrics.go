// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"sockeye/internal/bpf"
	"sockeye/internal/fault"
)

// Counters are totals since the pins were made: an agent's restart does not
// reset them.
var (
	descReady = prometheus.NewDesc("sockeye_slot_ready",
		"1 while the slot has a member that listens on all listeners.", []string{"service", "slot"}, nil)
	descConnections = prometheus.NewDesc("sockeye_connections_total",
		"TCP connection requests steered to the slot.", []string{"service", "slot"}, nil)
	descDatagrams = prometheus.NewDesc("sockeye_datagrams_total",
		"UDP datagrams steered to the slot.", []string{"service", "slot"}, nil)
	descDiverted = prometheus.NewDesc("sockeye_diverted_total",
		"Connection requests and datagrams meant for the slot that the standby slot got.", []string{"service", "slot"}, nil)
	descRefused = prometheus.NewDesc("sockeye_refused_total",
		"Connection requests (tcp) and datagrams (udp) refused, by the slot that they were meant for, which has no name where none was found.",
		[]string{"service", "slot", "protocol", "reason"}, nil)
	descRegistrations = prometheus.NewDesc("sockeye_registrations_total",
		"Members registered since the agent started.", []string{"service"}, nil)
	descWaiting = prometheus.NewDesc("sockeye_members_waiting",
		"Processes that would be members and lack something.", []string{"service"}, nil)
	descHeld = prometheus.NewDesc("sockeye_service_held",
		"1 while the service's ports stay steered even if all members end.", []string{"service"}, nil)
	descUnlisted = prometheus.NewDesc("sockeye_unlisted_total",
		"Connection requests and datagrams from sources for which the table of devices had no place.", []string{"service"}, nil)
	descRuns = prometheus.NewDesc("sockeye_program_runs_total",
		"Runs of the steering programs; counted while kernel.bpf_stats_enabled is 1.", []string{"service"}, nil)
	descRunSeconds = prometheus.NewDesc("sockeye_program_run_seconds_total",
		"Time spent in the steering programs; counted while kernel.bpf_stats_enabled is 1.", []string{"service"}, nil)
	descSplit = prometheus.NewDesc("sockeye_devices_split",
		"Devices whose TCP connections are at another member than that of their slot.", []string{"service"}, nil)
	descAdopted = prometheus.NewDesc("sockeye_devices_adopted",
		"Devices that stay with a member that is not that of their slot by the hash.", []string{"service"}, nil)
	descInForce = prometheus.NewDesc("sockeye_policy_in_force",
		"1 while the policy file is the policy that the agent works by.", nil, nil)
	descStarts = prometheus.NewDesc("sockeye_agent_starts_total",
		"Starts of the agent since its state directory was made.", nil, nil)
	descBuild = prometheus.NewDesc("sockeye_build_info",
		"1, with the agent's version.", []string{"version"}, nil)
)

// Describe leaves the descriptions to Collect, as services come and go.
func (a *Agent) Describe(chan<- *prometheus.Desc) {}

// Collect gives the metrics of the agent and its services. A service that
// fails gives none, the others theirs.
func (a *Agent) Collect(out chan<- prometheus.Metric) {
	out <- prometheus.MustNewConstMetric(descBuild, prometheus.GaugeValue, 1, a.options.Version)
	problem, _ := a.policyProblem()
	out <- prometheus.MustNewConstMetric(descInForce, prometheus.GaugeValue, number(problem == ""))
	out <- prometheus.MustNewConstMetric(descStarts, prometheus.CounterValue, float64(a.starts))
	services, err := a.selected("")
	if err != nil {
		a.log.Error("metrics failed", "error", err)
		return
	}
	for _, s := range services {
		if err := s.collect(out); err != nil {
			a.log.Error("metrics failed", "service", s.config.Name, "error", err)
		}
	}
	tuners, err := a.tunersOf("")
	if err != nil {
		a.log.Error("metrics failed", "error", err)
		return
	}
	for _, t := range tuners {
		if err := t.collect(out); err != nil {
			a.log.Error("metrics failed", "cgroup", t.name, "error", err)
		}
	}
	tracers, err := a.tracersOf("")
	if err != nil {
		a.log.Error("metrics failed", "error", err)
		return
	}
	for _, t := range tracers {
		if err := t.collect(out); err != nil {
			a.log.Error("metrics failed", "cgroup", t.name, "error", err)
		}
	}
	for _, s := range a.allSizers() {
		s.collect(out)
	}
	if err := a.collectSockets(out); err != nil {
		a.log.Error("metrics failed", "error", err)
	}
}

func (s *service) collect(out chan<- prometheus.Metric) error {
	status := s.status()
	s.mu.Lock()
	defer s.mu.Unlock()
	counters, err := s.path.Counters(s.config.Slots)
	if err != nil {
		return err
	}
	stats, err := s.path.RunStats()
	if err != nil {
		return err
	}
	unlisted, err := s.path.Unlisted()
	if err != nil {
		return err
	}
	name := s.config.Name
	gauge := func(desc *prometheus.Desc, value float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, value, append([]string{name}, labels...)...)
	}
	counter := func(desc *prometheus.Desc, value float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(desc, prometheus.CounterValue, value, append([]string{name}, labels...)...)
	}
	counter(descRegistrations, float64(s.registrations))
	gauge(descWaiting, float64(len(status.Waiting)))
	gauge(descHeld, number(status.Held))
	gauge(descSplit, float64(status.SplitDevices))
	gauge(descAdopted, float64(status.AdoptedDevices))
	counter(descUnlisted, float64(unlisted))
	counter(descRuns, float64(stats.Runs))
	counter(descRunSeconds, time.Duration(stats.Nanoseconds).Seconds())
	for i, c := range counters {
		slot := strconv.Itoa(i)
		if i == s.config.Slots {
			slot = ""
		} else {
			gauge(descReady, number(s.seats[i] != nil), slot)
			counter(descConnections, float64(c.Connections), slot)
			counter(descDatagrams, float64(c.Datagrams), slot)
			counter(descDiverted, float64(c.Diverted), slot)
		}
		for reason, text := range bpf.Reasons {
			if (slot != "") != bpf.ReasonOfSlot(reason) {
				continue
			}
			counter(descRefused, float64(c.RefusedConnections[reason]), slot, "tcp", text)
			counter(descRefused, float64(c.RefusedDatagrams[reason]), slot, "udp", text)
		}
	}
	return nil
}

func number(b bool) float64 {
	if b {
		return 1
	}
	return 0
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
	mux.Handle("GET /metrics", oneAtATime(promhttp.HandlerFor(registry, promhttp.HandlerOpts{})))
	m := &metricsServer{&http.Server{Handler: mux, ReadTimeout: 5 * time.Second, WriteTimeout: 30 * time.Second, MaxHeaderBytes: 16 << 10,
		ErrorLog: slog.NewLogLogger(a.log.Handler(), slog.LevelWarn)}}
	g := &gate{Listener: listener, name: "metrics", log: a.log, most: share(metricsShare, leastMetrics, mostMetrics), pushes: true}
	g.guard(m.http)
	go func() {
		if err := m.http.Serve(g); !errors.Is(err, http.ErrServerClosed) {
			a.log.Error("metrics failed", "error", err)
		}
	}()
	a.log.Info("metrics served", "address", listener.Addr().String())
	return m, nil
}

// scrapeTime bounds how long a scrape waits for the one before.
const scrapeTime = 10 * time.Second

// oneAtATime has one request answered at a time: scrapes read the kernel's maps. Their answers
// are written afterwards, so that a slow reader keeps nobody waiting.
func oneAtATime(next http.Handler) http.Handler {
	turn := make(chan struct{}, 1)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		late := time.NewTimer(scrapeTime)
		defer late.Stop()
		select {
		case turn <- struct{}{}:
		case <-r.Context().Done():
			return
		case <-late.C:
			http.Error(w, "too many scrapes", http.StatusServiceUnavailable)
			return
		}
		answer := &heldAnswer{ResponseWriter: w, status: http.StatusOK}
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
type heldAnswer struct {
	http.ResponseWriter
	status int
	body   bytes.Buffer
}

// WriteHeader keeps the status.
func (k *heldAnswer) WriteHeader(status int) { k.status = status }

// Write keeps a part of the answer.
func (k *heldAnswer) Write(p []byte) (int, error) { return k.body.Write(p) }

func (m *metricsServer) close() {
	if m.http != nil {
		m.http.Close()
	}
}
