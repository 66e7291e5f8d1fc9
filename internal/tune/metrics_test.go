// SPDX-License-Identifier: Apache-2.0

//go:build !vm

package tune

import (
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"

	"sockeye/internal/domain/domaintest"
	"sockeye/internal/testenv"
)

// TestTuneMetrics checks names and labels of the metrics, and that the counters continue after a restart of the
// agent.
func TestTuneMetrics(t *testing.T) {
	dir, pins := t.TempDir(), testenv.BPFFS(t)+"/sockeye"
	policy := domaintest.Policy(tunePolicy, "/telemetry\n", "\n", "    set: {congestion", "    trial: {control: 50%}\n    set: {congestion")
	a := testRunner(t, dir, pins)
	a.Start(t, policy)
	const address = "127.0.0.1:9733"
	stop := a.Serve(t, address)
	text := ""
	for range 2 { // the first connections are of the scrape itself
		text = domaintest.Scrape(t, address)
	}
	mine := regexp.MustCompile(`(?m)^(# (HELP|TYPE) )?sockeye_tune_.*\n`)
	text = strings.Join(mine.FindAllString(text, -1), "")
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
	stop()
	a.Stop()
	b := testRunner(t, dir, pins)
	defer b.Stop()
	b.Start(t, policy)
	defer b.Serve(t, address)()
	if after := connections(domaintest.Scrape(t, address)); after <= before {
		t.Errorf("%d connections after a restart, %d before", after, before)
	}
	b.Retire(t)
}
