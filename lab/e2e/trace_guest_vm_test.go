// SPDX-License-Identifier: Apache-2.0

//go:build vm

package e2e_test

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/bench/harness"
)

// TestTracedGuest traces requests in a virtual machine and prints what trace save writes, for bench trace-vm. The file /files/name has the
// name of the machine.
func TestTracedGuest(t *testing.T) {
	const connections, rounds, each = 4, 60, 50
	name, err := os.ReadFile("/files/name")
	if err != nil {
		t.Skip("kernel: the machine has no name") // of make test-vm
	}
	if err := unix.Sethostname(name); err != nil {
		t.Fatal(err)
	}
	h := newTraced(t, time.Millisecond)
	h.setTrace("{name: requests, cgroup: " + h.group("near") + ", messages: 1/1, group_by: port}")
	h.startAgent()
	begun := time.Now()
	p, far := h.startNear("near"), h.startFar()
	far.listen(tracePort)
	p.connect(connections, at(tracePort, far4)...)
	for range rounds { // 60 rounds of 50 pauses of 20 ms take a minute and more of the machine's clock: six slices of the agent
		p.do(order{Do: "exchanges", Parallel: connections, Up: 1000, traceOrder: traceOrder{Count: each, Gap: 20 * time.Millisecond}})
	}
	h.ended("rule=requests", connections*rounds*each)
	file := filepath.Join(t.TempDir(), "guest.json")
	if out, errs, code := h.cli("trace", "save", file, "--since", time.Since(begun).Truncate(time.Second).String()); code != 0 {
		t.Fatalf("%s%s", out, errs)
	}
	saved, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := harness.PrintFigures(saved); err != nil {
		t.Fatal(err)
	}
}
