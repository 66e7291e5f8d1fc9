// SPDX-License-Identifier: Apache-2.0

// Package otlp sends metrics to a collector of OpenTelemetry, by OTLP over HTTP.
package otlp

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	bridge "go.opentelemetry.io/contrib/bridges/prometheus"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlpmetric/otlpmetrichttp"
	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	"go.opentelemetry.io/otel/sdk/resource"
	"golang.org/x/net/http/httpguts"
	"golang.org/x/sys/unix"

	"sockeye/internal/config"
	"sockeye/internal/fault"
)

const (
	// mostExportTime is the maximum time of one export, which is also less than the interval.
	mostExportTime = 10 * time.Second
	// mostCollectorAnswer is the maximum size of an answer of the collector in bytes.
	mostCollectorAnswer = 64 << 10
	// mostCollectorText is the number of characters of an answer that a log line has.
	mostCollectorText = 200
	// mostHeadersFile is the maximum size of headers_file and of ca in bytes.
	mostHeadersFile = 1 << 20
)

// Export sends the metrics to a collector of OpenTelemetry: all of them, at an interval, one export at a time. An
// export that fails is not repeated, because the next one has the same counters. A collector that is down costs one log
// line when it goes down, and one when it is back.
type Export struct {
	log      *slog.Logger
	endpoint string
	interval time.Duration
	exporter *otlpmetrichttp.Exporter
	producer metric.Producer
	resource *resource.Resource
	gathered error // of the last call of the producer
	failing  bool  // the last export has failed, and this was logged

	cancel context.CancelFunc // nil: not started
	done   chan struct{}      // closed at the end
}

// New returns an export of the metrics of a gatherer, or nil if the policy names no collector. It reads the files that the
// policy names, and sends nothing.
func New(c *config.OTLP, gatherer prometheus.Gatherer, version string, log *slog.Logger) (*Export, error) {
	if c == nil {
		return nil, nil
	}
	transport := &http.Transport{Proxy: http.ProxyFromEnvironment, MaxIdleConnsPerHost: 1, ForceAttemptHTTP2: true,
		TLSHandshakeTimeout: mostExportTime, IdleConnTimeout: 2 * time.Duration(c.Interval) * time.Microsecond}
	if c.CA != "" {
		pool, err := readAuthorities(c.CA)
		if err != nil {
			return nil, err
		}
		transport.TLSClientConfig = &tls.Config{RootCAs: pool}
	}
	headers := make(map[string]string)
	if c.HeadersFile != "" {
		var err error
		if headers, err = readHeaders(c.HeadersFile); err != nil {
			return nil, err
		}
	}
	interval := time.Duration(c.Interval) * time.Microsecond
	exporter, err := otlpmetrichttp.New(context.Background(),
		otlpmetrichttp.WithEndpointURL(c.Endpoint),
		otlpmetrichttp.WithHeaders(headers),
		otlpmetrichttp.WithCompression(otlpmetrichttp.GzipCompression),
		otlpmetrichttp.WithRetry(otlpmetrichttp.RetryConfig{Enabled: false}),
		otlpmetrichttp.WithMaxResponseSize(mostCollectorAnswer),
		otlpmetrichttp.WithTimeout(mostExportTime),
		otlpmetrichttp.WithHTTPClient(&http.Client{
			Transport: transport,
			// The headers are for this collector only.
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		}))
	if err != nil {
		return nil, fmt.Errorf("export metrics to %s: %w", c.Endpoint, err)
	}
	e := &Export{log: log, endpoint: c.Endpoint, interval: interval, exporter: exporter, done: make(chan struct{})}
	// The bridge would report an error to a global handler, and drop the metrics that were gathered.
	e.producer = bridge.NewMetricProducer(bridge.WithGatherer(prometheus.GathererFunc(func() (all []*dto.MetricFamily, err error) {
		all, e.gathered = gatherer.Gather()
		return all, nil
	})))
	host, _ := os.Hostname() // "" without one
	e.resource = resource.NewSchemaless(attribute.String("service.name", "sockeye"), attribute.String("service.version", version),
		attribute.String("service.instance.id", host), attribute.String("host.name", host))
	return e, nil
}

// readAuthorities reads certificates in PEM.
func readAuthorities(path string) (*x509.CertPool, error) {
	data, err := readSecret(path, "ca", false)
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(data) {
		return nil, fault.Usage(fmt.Errorf("read ca: %s has no certificate in PEM", path), "a file that begins with -----BEGIN CERTIFICATE-----")
	}
	return pool, nil
}

// readHeaders reads HTTP headers, one a line. Errors do not quote values, which are secrets.
func readHeaders(path string) (map[string]string, error) {
	data, err := readSecret(path, "headers_file", true)
	if err != nil {
		return nil, err
	}
	headers := make(map[string]string)
	lines := bufio.NewScanner(bytes.NewReader(data))
	lines.Buffer(nil, mostHeadersFile+1)
	for n := 1; lines.Scan(); n++ {
		line := strings.TrimSpace(lines.Text())
		if line == "" || line[0] == '#' {
			continue
		}
		name, value, ok := strings.Cut(line, ":")
		name, value = strings.TrimSpace(name), strings.TrimSpace(value)
		if !ok || !httpguts.ValidHeaderFieldName(name) || !httpguts.ValidHeaderFieldValue(value) {
			return nil, fault.Usage(fmt.Errorf("read headers_file %s: line %d is not a header", path, n), "Name: value, as in Authorization: Bearer ...")
		}
		headers[name] = value
	}
	return headers, lines.Err()
}

// readSecret reads a file of the policy. With private, others must not have access to the file.
func readSecret(path, what string, private bool) ([]byte, error) {
	// O_NONBLOCK: opening a FIFO must not block.
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, fault.Unreadable(fmt.Errorf("read %s: %w", what, err), "create the file, or correct metrics.otlp")
	}
	defer f.Close()
	info, err := f.Stat()
	switch {
	case err != nil:
		return nil, fmt.Errorf("read %s: %w", what, err)
	case !info.Mode().IsRegular():
		return nil, fault.Usage(fmt.Errorf("read %s: %s is not a regular file", what, path), "correct metrics.otlp")
	case private && info.Mode().Perm()&0o077 != 0:
		return nil, fault.Usage(fmt.Errorf("read %s: others have access to %s", what, path), "chmod 600 "+path)
	}
	data, err := io.ReadAll(io.LimitReader(f, mostHeadersFile+1))
	if err == nil && len(data) > mostHeadersFile {
		err = fault.Usage(errors.New("the file is larger than 1 MiB"), "correct metrics.otlp")
	}
	if err != nil {
		return nil, fault.In("read "+what+" "+path, err)
	}
	return data, nil
}

// Start sends the metrics at once, and then at the interval, until Stop.
func (e *Export) Start() {
	ctx, cancel := context.WithCancel(context.Background())
	e.cancel = cancel
	go func() {
		defer close(e.done)
		defer func() { _ = e.exporter.Shutdown(context.Background()) }() // it has nothing to send
		tick := time.NewTicker(e.interval)
		defer tick.Stop()
		for {
			e.report(ctx, e.send(ctx))
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
		}
	}()
}

// Stop ends an export that was started, also one that waits for the collector, and returns after its last call of the
// gatherer. The caller holds no lock that the gatherer needs.
func (e *Export) Stop() {
	e.cancel()
	<-e.done
}

// send sends all metrics once.
func (e *Export) send(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, min(mostExportTime, e.interval))
	defer cancel()
	scopes, err := e.producer.Produce(ctx)
	if err != nil {
		return err
	}
	// Without a metric that failed, the others are sent, as in a scrape.
	return errors.Join(e.exporter.Export(ctx, &metricdata.ResourceMetrics{Resource: e.resource, ScopeMetrics: scopes}), e.gathered)
}

// report logs a change between success and failure.
func (e *Export) report(ctx context.Context, err error) {
	switch {
	case ctx.Err() != nil:
	case err != nil && !e.failing:
		e.log.Warn("metrics not exported", "endpoint", e.endpoint, "error", shortened(err))
		e.failing = true
	case err == nil && e.failing:
		e.log.Info("metrics exported again", "endpoint", e.endpoint)
		e.failing = false
	}
}

// shortened returns an error in one short line: it may have the answer of the collector.
func shortened(err error) string {
	text := strings.Join(strings.Fields(err.Error()), " ")
	if utf8.RuneCountInString(text) > mostCollectorText {
		text = string([]rune(text)[:mostCollectorText]) + "…"
	}
	return text
}

// Describe describes an export in a plan.
func Describe(c *config.OTLP) string {
	if c == nil {
		return "none"
	}
	return fmt.Sprintf("%s every %s", c.Endpoint, time.Duration(c.Interval)*time.Microsecond)
}
