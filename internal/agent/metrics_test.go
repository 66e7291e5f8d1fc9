// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"

	"sockeye/internal/domain/domaintest"
	"sockeye/internal/testenv"
)

// scrape reads the metrics over HTTP.
const metricsPolicy = onePolicy + "metrics: {listen: \"127.0.0.1:9732\"}\n"

// Metric names and labels are stable, and counters continue after a restart of the agent.
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
	text := strings.Join(mine.FindAllString(domaintest.Scrape(t, "127.0.0.1:9732"), -1), "")

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
	text = domaintest.Scrape(t, "127.0.0.1:9732")
	if tcp, udp := sum(text, "tcp"), sum(text, "udp"); tcp != 1 || udp != 3 {
		t.Errorf("after a restart refused %d and %d, want 1 and 3\n%s", tcp, udp, text)
	}
}

// The documentation lists the metrics of the golden files and no others.
func TestMetricsDocumented(t *testing.T) {
	files, err := filepath.Glob("../*/testdata/metrics*.golden")
	if err != nil || len(files) != 6 {
		t.Fatalf("%q, %v", files, err)
	}
	var golden []byte
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		golden = append(golden, text...)
	}
	docs, err := os.ReadFile("../../docs/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	// Nothing fails in the test, so the golden file has no failure counters.
	names := map[string]bool{"sockeye_tune_options_failed_total": true}
	// Its policy has no waiting rooms; they are documented alone.
	for _, name := range []string{"full_total", "limit_datagrams", "lost_total", "replayed_total", "stored_total", "waiting_datagrams"} {
		names["sockeye_room_"+name] = true
	}
	// There are no members either.
	for _, name := range []string{"accept_backlog", "accept_queue", "drops_total", "receive_buffer_bytes", "receive_queue_bytes"} {
		names["sockeye_member_"+name] = true
	}
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
