// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"

	"sockeye/internal/testenv"
)

// scrape reads the metrics over HTTP.
func scrape(t *testing.T, address string) string {
	t.Helper()
	client := &http.Client{Timeout: time.Minute, Transport: &http.Transport{DisableKeepAlives: true}}
	answer, err := client.Get("http://" + address + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err != nil || answer.StatusCode != http.StatusOK {
		t.Fatalf("%s: %v\n%s", answer.Status, err, text)
	}
	return string(text)
}

const metricsPolicy = onePolicy + "metrics: {listen: \"127.0.0.1:9732\"}\n"

// The names and labels of the metrics are an interface; the counters go on
// over a restart of the agent.
func TestMetrics(t *testing.T) {
	dir, pins := t.TempDir(), testenv.BPFFS(t)+"/sockeye"
	a := testAgent(t, dir, pins)
	a.begin(t, policyText(metricsPolicy, "slots: 4", "slots: 2"))
	stopped := false
	defer func() {
		if !stopped {
			a.stop()
		}
	}()
	refused := func(network, address string) {
		t.Helper()
		conn, err := net.Dial(network, address)
		if network == "udp" && err == nil {
			err = conn.SetDeadline(time.Now().Add(time.Minute))
			_, sent := conn.Write([]byte("?"))
			_, read := conn.Read(make([]byte, 1))
			err = errors.Join(err, sent, read)
			conn.Close()
		}
		if err == nil || !strings.Contains(err.Error(), "connection refused") {
			t.Errorf("%s: %v", network, err)
		}
	}
	refused("tcp", "127.0.0.1:1790")
	refused("udp", "127.0.0.1:4739")
	refused("udp", "127.0.0.1:4739")
	mine := regexp.MustCompile(`(?m)^(# (HELP|TYPE) )?sockeye_.*\n`)
	text := strings.Join(mine.FindAllString(scrape(t, "127.0.0.1:9732"), -1), "")

	problems, err := promlint.New(strings.NewReader(text)).Lint()
	if err != nil || len(problems) > 0 {
		t.Errorf("promlint: %v %v", problems, err)
	}
	values := regexp.MustCompile(`(?m)^(sockeye_.*) \S+$`)
	got := values.ReplaceAllString(text, "$1 N")
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
		t.Errorf("the metrics changed; run with UPDATE=1 if they should, and mend docs/metrics.md.\ngot\n%s\nwant\n%s", got, want)
	}

	sum := func(text, protocol string) (n int) {
		for _, m := range regexp.MustCompile(`sockeye_refused_total\{protocol="`+protocol+`",reason="empty_slot",.* (\d+)\n`).FindAllStringSubmatch(text, -1) {
			one, err := strconv.Atoi(m[1])
			if err != nil {
				t.Error(err)
			}
			n += one
		}
		return n
	}
	if tcp, udp := sum(text, "tcp"), sum(text, "udp"); tcp != 1 || udp != 2 {
		t.Errorf("refused %d and %d, want 1 and 2\n%s", tcp, udp, text)
	}
	if !strings.Contains(text, "sockeye_agent_starts_total 7\n") || !strings.Contains(text, `sockeye_build_info{version="1.2.3"} 1`) {
		t.Error(text)
	}

	a.stop()
	stopped = true
	refused("udp", "127.0.0.1:4739") // nobody looks, it counts all the same
	b := testAgent(t, dir, pins)
	defer b.stop()
	b.begin(t, policyText(metricsPolicy, "slots: 4", "slots: 2"))
	defer retire(t, b)
	text = scrape(t, "127.0.0.1:9732")
	if tcp, udp := sum(text, "tcp"), sum(text, "udp"); tcp != 1 || udp != 3 {
		t.Errorf("after a restart refused %d and %d, want 1 and 3\n%s", tcp, udp, text)
	}
}

// The same for tuning, where counts go on over a restart of the agent too.
func TestTuneMetrics(t *testing.T) {
	dir, pins := t.TempDir(), testenv.BPFFS(t)+"/sockeye"
	policy := policyText(tunePolicy, "/telemetry\n", "\n", "    set: {congestion", "    trial: {control: 50%}\n    set: {congestion",
		"tune:", "metrics: {listen: \"127.0.0.1:9733\"}\ntune:")
	a := testAgent(t, dir, pins)
	a.begin(t, policy)
	address := "127.0.0.1:9733"
	text := ""
	for range 2 { // the first connections are of the scrape itself
		text = scrape(t, address)
	}
	mine := regexp.MustCompile(`(?m)^(# (HELP|TYPE) )?sockeye_tune_.*\n`)
	text = strings.Join(mine.FindAllString(text, -1), "")
	problems, err := promlint.New(strings.NewReader(text)).Lint()
	if err != nil || len(problems) > 0 {
		t.Errorf("promlint: %v %v", problems, err)
	}
	got := regexp.MustCompile(`(?m)^(sockeye_.*) \S+$`).ReplaceAllString(text, "$1 N")
	got = strings.ReplaceAll(got, testenv.CgroupPath(), "CGROUP")
	const file = "testdata/metrics-tune.golden"
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
		t.Errorf("the metrics changed; run with UPDATE=1 if they should, and mend docs/metrics.md.\ngot\n%s\nwant\n%s", got, want)
	}

	connections := func(text string) (n int) {
		for _, m := range regexp.MustCompile(`sockeye_tune_connections_total\{.*rule="rest"\} (\d+)\n`).FindAllStringSubmatch(text, -1) {
			one, err := strconv.Atoi(m[1])
			if err != nil {
				t.Error(err)
			}
			n += one
		}
		return n
	}
	before := connections(text)
	if before < 2 {
		t.Errorf("%d connections", before)
	}
	a.stop()
	b := testAgent(t, dir, pins)
	defer b.stop()
	b.begin(t, policy)
	if after := connections(scrape(t, address)); after <= before {
		t.Errorf("%d connections after a restart, %d before", after, before)
	}
	b.endTuning(t)
}

// Every metric of the golden files is in the documentation, and no other.
func TestMetricsDocumented(t *testing.T) {
	golden, err := os.ReadFile("testdata/metrics.golden")
	if err != nil {
		t.Fatal(err)
	}
	tuning, err := os.ReadFile("testdata/metrics-tune.golden")
	if err != nil {
		t.Fatal(err)
	}
	tracing, err := os.ReadFile("testdata/metrics-trace.golden")
	if err != nil {
		t.Fatal(err)
	}
	sizing, err := os.ReadFile("testdata/metrics-bigtcp.golden")
	if err != nil {
		t.Fatal(err)
	}
	sockets, err := os.ReadFile("testdata/metrics-sockets.golden")
	if err != nil {
		t.Fatal(err)
	}
	golden = slices.Concat(golden, tuning, tracing, sizing, sockets)
	docs, err := os.ReadFile("../../docs/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	// The golden file has none, as nothing fails there.
	names := map[string]bool{"sockeye_tune_options_failed_total": true}
	for _, m := range regexp.MustCompile(`(?m)^# TYPE (\S+)`).FindAllStringSubmatch(string(golden), -1) {
		names[m[1]] = true
		if !strings.Contains(string(docs), "| `"+m[1]+"` |") {
			t.Errorf("docs/metrics.md lacks %s", m[1])
		}
	}
	for _, m := range regexp.MustCompile("(?m)^\\| `(sockeye_\\w+)` \\|").FindAllStringSubmatch(string(docs), -1) {
		if !names[m[1]] {
			t.Errorf("docs/metrics.md has %s, which does not exist", m[1])
		}
	}
}
