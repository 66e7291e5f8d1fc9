// SPDX-License-Identifier: Apache-2.0

//go:build vm

package tune

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"sockeye/bench/harness"
	"sockeye/lab"
)

// The scale of the incast in a virtual machine with virtual time, whose CPU runs 10^9 instructions a second. Queue and
// clamp are those of the host, in packets.
const (
	vmRate    = 100e6 // bits per second
	vmQueue   = 600   // packets
	vmBuffers = 150_000
	vmClamp   = 16
	vmSeconds = 2.5
	vmWarmup  = 1500 * time.Millisecond
	// vmMark is the time in the queue after which it marks packets: that of 65 packets, the threshold of the DCTCP paper
	// for 10 Gbit/s (K = 65).
	vmMark = 65 * packetSize * 8 * time.Second / vmRate
)

var vmX = []int{1, 4, 8, 16}

// TestIncastWithPeers is the incast with the arms that a host may not support: DCTCP, and bpftune if the guest has it in
// /files. It prints the report and a line with its JSON.
func TestIncastWithPeers(t *testing.T) {
	ctx := t.Context()
	l, err := lab.New(ctx, lab.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	}()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	o := options{
		Rounds: 1, Seconds: vmSeconds, Warmup: vmWarmup, Rate: vmRate, Queue: vmQueue, Buffers: vmBuffers, Clamp: vmClamp, Mark: vmMark,
		X: vmX, Only: incastPart, Binary: filepath.Join(l.Dir(), "sockeye"), Arms: []string{baseline, tuned, byRoute, byApp, byDCTCP, appDCTCP},
	}
	if err := os.Symlink(self, o.Binary); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(bpftuneDir, "bin", "bpftune")); err == nil {
		o.Arms = append(o.Arms, byBPFTune)
	}
	b := &bench{options: o, LabBench: harness.LabBench{Lab: l}, startBPFTune: startBPFTune}
	r := &report{Options: o, Run: harness.Begin()}
	if err := b.startAgent(ctx); err != nil {
		t.Fatal(err)
	}
	if r.incast, err = b.incast(ctx); err != nil {
		t.Fatal(err)
	}
	if r.rules, err = b.rules(ctx); err != nil {
		t.Fatal(err)
	}
	r.End()
	fmt.Print(harness.Text(r))
	figures, err := harness.JSON(r)
	if err != nil {
		t.Fatal(err)
	}
	var line bytes.Buffer
	if err := json.Compact(&line, figures); err != nil {
		t.Fatal(err)
	}
	fmt.Printf("bench-tune-vm.json: %s\n", &line)
	for _, arm := range o.Arms {
		if !slices.ContainsFunc(r.incast, func(run incastRun) bool { return run.Arm == arm && run.Segments > 0 }) {
			t.Errorf("arm %s has sent nothing", arm)
		}
	}
	for _, arm := range []string{byDCTCP, appDCTCP} {
		if p := r.point(arm, o.X[0]); p.Marks == 0 {
			t.Errorf("the bottleneck has marked no packet of %s", arm)
		}
	}
}
