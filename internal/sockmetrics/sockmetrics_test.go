// SPDX-License-Identifier: Apache-2.0

package sockmetrics

import (
	"errors"
	"log/slog"
	"net"
	"os"
	"regexp"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	"golang.org/x/sys/unix"

	"sockeye/internal/config"
	"sockeye/internal/domain"
	"sockeye/internal/domain/domaintest"
	"sockeye/internal/steer"
	"sockeye/internal/testenv"
	"sockeye/internal/tune"
)

const socketsPolicy = `services:
  telemetry:
    slots: 2
    listeners:
      - {protocol: tcp, address: "[::]:1790"}
      - {protocol: udp, address: "[::]:4739"}
    user: root
    cgroup: CGROUP
tune: [{name: rest, cgroup: CGROUP, set: {congestion: reno}}]
`

// TestSocketMetrics checks that connections are counted by service, cgroup and bottleneck.
func TestSocketMetrics(t *testing.T) {
	const address = "127.0.0.1:9734"
	h := domaintest.Host(t, t.TempDir(), testenv.BPFFS(t)+"/sockeye", slog.DiscardHandler)
	services, tuning := steer.New(h), tune.New(h)
	sockets := New(h, services.EachService, tuning.Paths)
	sockets.Calibrate(&Calibration{})
	a := domaintest.New(h, services, tuning)
	a.Extra = func(out chan<- prometheus.Metric) {
		if err := sockets.Collect(out); err != nil {
			t.Error(err)
		}
	}
	defer a.Stop()
	a.Start(t, domaintest.Policy(socketsPolicy))
	defer a.Retire(t)
	defer a.Serve(t, address)()
	text := domaintest.Scrape(t, address)
	share := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var err error
		return errors.Join(c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1) }), err)
	}}
	share.SetMultipathTCP(false)
	l, err := share.Listen(t.Context(), "tcp", "[::1]:1790")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	conn, err := net.Dial("tcp", "[::1]:1790")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()

	value := func(text, metric string) int {
		t.Helper()
		m := regexp.MustCompile(`(?m)^` + regexp.QuoteMeta(metric) + ` (\S+)$`).FindStringSubmatch(text)
		if m == nil {
			t.Fatalf("metric %s not found in\n%s", metric, text)
		}
		n, err := strconv.ParseFloat(m[1], 64)
		if err != nil {
			t.Fatal(err)
		}
		return int(n)
	}
	accepted := `sockeye_sockets{cgroup="` + testenv.CgroupPath() + `",limit="application",service="telemetry"}`
	other := `sockeye_sockets{cgroup="` + testenv.CgroupPath() + `",limit="application",service=""}`
	// Within cacheTime, a scrape does not dump the sockets again.
	for range 2 {
		if strings.Contains(text, accepted) {
			t.Errorf("unexpected connections:\n%s", text)
		}
		text = domaintest.Scrape(t, address)
	}
	before := value(text, other)
	sockets.mu.Lock()
	sockets.last = nil
	sockets.mu.Unlock()
	text = domaintest.Scrape(t, address)
	if n := value(text, accepted); n != 1 {
		t.Errorf("%d connections", n)
	}
	if n := value(text, other); n <= before {
		t.Errorf("%d connections of the cgroup, %d before the new connection", n, before)
	}
	if n := value(text, strings.Replace(strings.Replace(accepted, "sockets{", "sockets_room_bytes{", 1), `limit="application",`, "", 1)); n < 1000 {
		t.Errorf("room of %d bytes", n)
	}
	if n := value(text, `sockeye_sockets{cgroup="",limit="application",service="telemetry"}`); n != 0 {
		t.Errorf("%d connections of the service without a cgroup", n)
	}

	text = strings.Join(regexp.MustCompile(`(?m)^(# (HELP|TYPE) )?sockeye_sockets.*\n`).FindAllString(text, -1), "")
	problems, err := promlint.New(strings.NewReader(text)).Lint()
	if err != nil || len(problems) > 0 {
		t.Errorf("promlint: %v %v", problems, err)
	}
	got := regexp.MustCompile(`(?m)^(sockeye_.*) \S+$`).ReplaceAllString(text, "$1 N")
	got = strings.ReplaceAll(got, testenv.CgroupPath(), "CGROUP")
	const file = "testdata/metrics.golden"
	if os.Getenv("UPDATE") != "" {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("the metrics changed; if this is intended, run with UPDATE=1 and update docs/metrics.md.\ngot\n%s\nwant\n%s", got, want)
	}
}

// TestDumpThatWaits checks that a dump that does not end, as while a process holds the lock of a connection, costs a scrape its metrics and no
// more, and that no second dump begins.
func TestDumpThatWaits(t *testing.T) {
	release := make(chan struct{})
	var dumps atomic.Int32
	m := New(&domain.Host{Log: slog.New(slog.DiscardHandler)}, func(func(config.Service, map[uint32]bool, uint64, *os.File)) {
		dumps.Add(1)
		<-release
	})
	out := make(chan prometheus.Metric, 100)
	for range 3 {
		if err := m.Collect(out); !errors.Is(err, errWaits) {
			t.Errorf("%v, want %v", err, errWaits)
		}
	}
	close(release)
	<-m.next.done
	if err := m.Collect(out); err != nil {
		t.Errorf("after the end of the dump: %v", err)
	}
	if n := dumps.Load(); n != 1 {
		t.Errorf("%d dumps, want 1", n)
	}
}
