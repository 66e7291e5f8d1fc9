// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"os"
	"path/filepath"
	"testing"

	"sockeye/internal/testenv"
)

func TestTuneOpens(t *testing.T) {
	dir := filepath.Join(testenv.BPFFS(t), "tune_x")
	cg := filepath.Join(testenv.Cgroup(), "tune")
	if err := os.Mkdir(cg, 0o755); err != nil {
		t.Fatal(err)
	}
	defer os.Remove(cg)
	tune, err := OpenTune(TuneConfig{Dir: dir, Cgroup: cg})
	if err != nil {
		t.Fatalf("%+v", err)
	}
	defer tune.Close()
	if err := tune.Install(&TuneRules{}); err != nil {
		t.Fatal(err)
	}
	live, err := tune.Live()
	if err != nil {
		t.Fatalf("%+v", err)
	}
	live.Close()
	if _, err := tune.Decide(TuneQuestion{}); err != nil {
		t.Fatalf("%+v", err)
	}
	if err := RemoveTune(dir); err != nil {
		t.Fatal(err)
	}
}
