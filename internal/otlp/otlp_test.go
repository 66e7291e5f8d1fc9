// SPDX-License-Identifier: Apache-2.0

package otlp

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/pem"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	collectorpb "go.opentelemetry.io/proto/otlp/collector/metrics/v1"
	commonpb "go.opentelemetry.io/proto/otlp/common/v1"
	metricspb "go.opentelemetry.io/proto/otlp/metrics/v1"
	"google.golang.org/protobuf/proto"

	"sockeye/internal/config"
	"sockeye/internal/fault"
)

// collector receives metrics by OTLP, and answers with a status.
type collector struct {
	t      *testing.T
	mu     sync.Mutex
	status int
	body   string
	got    []*metricspb.ResourceMetrics
	header http.Header
	paths  []string
}

func (c *collector) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.paths, c.header = append(c.paths, r.Method+" "+r.URL.Path), r.Header
	if c.status != 0 {
		w.Header().Set("Location", "/elsewhere")
		w.WriteHeader(c.status)
		_, _ = io.WriteString(w, c.body)
		return
	}
	unzipped, err := gzip.NewReader(r.Body)
	if err != nil {
		c.t.Error(err)
		return
	}
	body, err := io.ReadAll(unzipped)
	var request collectorpb.ExportMetricsServiceRequest
	if err == nil {
		err = proto.Unmarshal(body, &request)
	}
	if err != nil {
		c.t.Error(err)
	}
	c.got = append(c.got, request.ResourceMetrics...)
	w.Header().Set("Content-Type", "application/x-protobuf")
}

func (c *collector) answer(status int, body string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.status, c.body = status, body
}

// attributes returns attributes as text.
func attributes(list []*commonpb.KeyValue) map[string]string {
	all := make(map[string]string)
	for _, a := range list {
		all[a.Key] = a.Value.GetStringValue()
	}
	return all
}

// testExport returns an export of a registry to a collector, and its log.
func testExport(t *testing.T, c *config.OTLP, gatherer prometheus.Gatherer) (*Export, *bytes.Buffer) {
	t.Helper()
	var log bytes.Buffer
	if c.Interval == 0 {
		c.Interval = 30_000_000
	}
	e, err := New(c, gatherer, "1.2.3", slog.New(slog.NewTextHandler(&log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	return e, &log
}

// TestExport compares what a collector decodes with the metrics of a registry.
func TestExport(t *testing.T) {
	registry := prometheus.NewRegistry()
	ready := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "ready", Help: "Ready."}, []string{"service", "slot"})
	packets := prometheus.NewCounter(prometheus.CounterOpts{Name: "packets_total", Help: "Packets."})
	sizes := prometheus.NewHistogram(prometheus.HistogramOpts{Name: "sizes", Buckets: []float64{1, 10}})
	registry.MustRegister(ready, packets, sizes)
	ready.WithLabelValues("telemetry", "2").Set(1)
	packets.Add(7)
	sizes.Observe(5)
	c := &collector{t: t}
	server := httptest.NewServer(c)
	defer server.Close()
	headers := filepath.Join(t.TempDir(), "headers")
	if err := os.WriteFile(headers, []byte("# a comment\n\nAuthorization: Bearer a:b\nX-Tenant:7\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	e, log := testExport(t, &config.OTLP{Endpoint: server.URL + "/v1/metrics", HeadersFile: headers}, registry)
	for range 2 {
		e.report(t.Context(), e.send(t.Context()))
		packets.Add(2)
	}
	if log.Len() > 0 || len(c.got) != 2 || c.paths[0] != "POST /v1/metrics" || c.header.Get("Authorization") != "Bearer a:b" || c.header.Get("X-Tenant") != "7" {
		t.Fatalf("log %q, %d exports to %v, header %v", log, len(c.got), c.paths, c.header)
	}
	host, _ := os.Hostname()
	if got, want := attributes(c.got[1].Resource.Attributes), (map[string]string{"service.name": "sockeye", "service.version": "1.2.3", "service.instance.id": host, "host.name": host}); !maps.Equal(got, want) {
		t.Errorf("resource %v, want %v", got, want)
	}
	metrics := make(map[string]*metricspb.Metric)
	for _, m := range c.got[1].ScopeMetrics[0].Metrics {
		metrics[m.Name] = m
	}
	if points := metrics["ready"].GetGauge().GetDataPoints(); len(points) != 1 || points[0].GetAsDouble() != 1 ||
		!maps.Equal(attributes(points[0].Attributes), map[string]string{"service": "telemetry", "slot": "2"}) {
		t.Errorf("ready: %v", metrics["ready"])
	}
	if sum := metrics["packets_total"].GetSum(); len(sum.GetDataPoints()) != 1 || sum.DataPoints[0].GetAsDouble() != 9 || !sum.IsMonotonic ||
		sum.AggregationTemporality != metricspb.AggregationTemporality_AGGREGATION_TEMPORALITY_CUMULATIVE || metrics["packets_total"].Description != "Packets." {
		t.Errorf("packets: %v", metrics["packets_total"])
	}
	if points := metrics["sizes"].GetHistogram().GetDataPoints(); len(points) != 1 || points[0].Count != 1 || points[0].GetSum() != 5 || len(points[0].BucketCounts) != 3 || points[0].BucketCounts[1] != 1 {
		t.Errorf("sizes: %v", metrics["sizes"])
	}
}

// TestExportFails checks that a collector that fails costs one log line for each change, and that its answer is cut.
func TestExportFails(t *testing.T) {
	c := &collector{t: t}
	server := httptest.NewServer(c)
	registry := prometheus.NewRegistry()
	registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "one"}, func() float64 { return 1 }))
	broken := errorCollector{prometheus.NewDesc("broken", "", nil, nil), false}
	registry.MustRegister(&broken)
	e, log := testExport(t, &config.OTLP{Endpoint: server.URL + "/v1/metrics"}, registry)
	expect := func(when, want string) {
		t.Helper()
		for range 3 {
			e.report(t.Context(), e.send(t.Context()))
		}
		text := log.String()
		log.Reset()
		switch {
		case want == "" && text != "", want != "" && strings.Count(text, "\n") != 1, !strings.Contains(text, want), len(text) > 500:
			t.Errorf("%s: log %q, want one line with %q", when, text, want)
		}
	}
	expect("a collector that answers", "")
	c.answer(http.StatusServiceUnavailable, strings.Repeat("line\n", 5000))
	expect("a collector that refuses", `msg="metrics not exported"`)
	c.answer(http.StatusTemporaryRedirect, "")
	expect("another failure", "")
	c.answer(0, "")
	expect("the collector is back", `msg="metrics exported again"`)
	c.answer(http.StatusTemporaryRedirect, "")
	expect("a redirection", "307")
	for _, path := range c.paths {
		if path != "POST /v1/metrics" {
			t.Errorf("%s was requested", path)
		}
	}
	c.answer(0, "")
	expect("back", "again")
	got := len(c.got)
	broken.fails = true
	expect("a metric that fails", "cannot be read")
	if len(c.got) != got+3 || len(c.got[got].ScopeMetrics[0].Metrics) != 1 {
		t.Errorf("without the metric that fails: %d exports, want %d: %v", len(c.got), got+3, c.got[got:])
	}
	broken.fails = false
	expect("all metrics again", "again")
	server.Close()
	expect("no collector", `msg="metrics not exported"`) // connection refused, or EOF of a connection that was idle
	c.t = nil
}

// errorCollector is a metric that can fail.
type errorCollector struct {
	desc  *prometheus.Desc
	fails bool
}

func (c *errorCollector) Describe(out chan<- *prometheus.Desc) { out <- c.desc }

func (c *errorCollector) Collect(out chan<- prometheus.Metric) {
	if c.fails {
		out <- prometheus.NewInvalidMetric(c.desc, os.NewSyscallError("cannot be read", os.ErrInvalid))
	}
}

// TestExportEnds checks that an export ends while a collector does not answer.
func TestExportEnds(t *testing.T) {
	asked, ended := make(chan struct{}), make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body) // the server notices the end of the connection after the body only
		close(asked)
		<-r.Context().Done()
		close(ended)
	}))
	defer server.Close()
	e, log := testExport(t, &config.OTLP{Endpoint: server.URL}, prometheus.NewRegistry())
	e.Start()
	<-asked
	e.Stop()
	<-ended
	if log.Len() > 0 {
		t.Errorf("log: %s", log)
	}
}

// TestExportCA checks that the certificate of the collector must be signed by the authority of the policy.
func TestExportCA(t *testing.T) {
	c := &collector{t: t}
	server := httptest.NewTLSServer(c)
	defer server.Close()
	server.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	ca := filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}), 0o644); err != nil {
		t.Fatal(err)
	}
	e, _ := testExport(t, &config.OTLP{Endpoint: server.URL, CA: ca}, prometheus.NewRegistry())
	if err := e.send(context.Background()); err != nil {
		t.Error(err)
	}
	e, _ = testExport(t, &config.OTLP{Endpoint: server.URL}, prometheus.NewRegistry())
	if err := e.send(context.Background()); err == nil || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("an unknown authority: %v", err)
	}
}

// TestExportFiles checks that files of the policy are refused, without their secrets in the error.
func TestExportFiles(t *testing.T) {
	dir := t.TempDir()
	for _, one := range []struct {
		name, text string
		mode       os.FileMode
		want       string
	}{
		{"headers", "Authorization: secret\n", 0o644, "others have access"},
		{"headers", "Authorization: ok\nsecret\n", 0o600, "line 2 is not a header"},
		{"headers", "X: secret\x01\n", 0o600, "line 1 is not a header"},
		{"headers", strings.Repeat("#\n", mostHeadersFile/2+1), 0o600, "larger than 1 MiB"},
		{"ca", "secret", 0o644, "no certificate in PEM"},
		{"missing", "", 0, "no such file"},
		{"directory", "", 0, "not a regular file"},
	} {
		path := filepath.Join(dir, one.name)
		switch {
		case one.mode != 0:
			if err := os.WriteFile(path, []byte(one.text), 0o600); err != nil {
				t.Fatal(err)
			}
			if err := os.Chmod(path, one.mode); err != nil {
				t.Fatal(err)
			}
		case one.name == "directory":
			path = dir
		}
		c := &config.OTLP{Endpoint: "http://127.0.0.1:1", Interval: 1_000_000}
		if one.name == "ca" {
			c.CA = path
		} else {
			c.HeadersFile = path
		}
		_, err := New(c, prometheus.NewRegistry(), "", slog.Default())
		if err == nil || fault.Code(err) != fault.CodeUsage || !strings.Contains(err.Error(), one.want) || strings.Contains(err.Error(), "secret") || fault.Hint(err) == "" {
			t.Errorf("%s: %v (%d, %s), want %s", one.name, err, fault.Code(err), fault.Hint(err), one.want)
		}
	}
}
