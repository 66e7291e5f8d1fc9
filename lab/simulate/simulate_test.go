// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"sockeye/internal/testenv"
)

func TestMain(m *testing.M) {
	if isHost() {
		return
	}
	testenv.Main(m)
}

// TestProcesses kills and stops processes and etcd for some seconds.
func TestProcesses(t *testing.T) {
	p, err := RunProcesses(t.Context(), 6, 15*time.Second, 3)
	if err != nil {
		t.Fatal(err)
	}
	t.Log(p.String())
	if p.Conflicts > 0 || p.Backwards > 0 || p.Kills+p.Stops+p.Outages == 0 || p.Epochs == 0 {
		t.Error("see above")
	}
}

func TestCommand(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "out")
	if err := run("3", 10, 1, 0, 0, dir); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(filepath.Join(dir, "simulate.json"))
	if err != nil {
		t.Fatal(err)
	}
	var got struct {
		Simulated []map[string]any `json:"simulated"`
	}
	if err := json.Unmarshal(data, &got); err != nil || len(got.Simulated) != 1 || got.Simulated[0]["hosts"] != 3.0 || got.Simulated[0]["moved_over_ideal"] == nil {
		t.Errorf("%s: %v", data, err)
	}
	for _, count := range []int{-1, 1, 501} {
		if err := run("1000", 3650, 1, count, 0, ""); err == nil || !strings.Contains(err.Error(), "2 to 500 processes") {
			t.Errorf("-processes %d: %v", count, err)
		}
	}
	for _, one := range []struct {
		hosts string
		days  int
		want  string
	}{{"2", 1, "between 3 and 2000"}, {"", 1, "between 3 and 2000"}, {"3,x", 1, "between 3 and 2000"}, {"3", 0, "-days 0"}, {"3", 9999, "-days 9999"}, {"3,,4", 1, "between 3 and 2000"}} {
		if err := run(one.hosts, one.days, 1, 0, 0, ""); err == nil || !strings.Contains(err.Error(), one.want) {
			t.Errorf("-hosts %q -days %d: %v, want %q", one.hosts, one.days, err, one.want)
		}
	}
}
