// SPDX-License-Identifier: Apache-2.0

//go:build vm

package steer

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"sockeye/bench/harness"
)

// guestArguments are the arguments of bench in the machine: rates that the emulated CPUs can send, and CPU times that an
// idle Go program has on them. The host compares Sockeye with nftables, and the machine nftables with IPVS.
var guestArguments = []string{
	command, "-peers", "-quick", "-seconds=1", "-idle=100ms", "-property-routers=64", "-property-time=20s", "-plain-datagrams=1000", "-plain-updates=1000", "-without=reuseport,lookup,reuseport_device_map,lookup_device_map",
}

// TestPeersInGuest measures the balancers of this kernel. bench steer runs it in a virtual machine if its own kernel has no
// IPVS, and reads the figures.
func TestPeersInGuest(t *testing.T) {
	if _, err := os.Stat("/proc/net/ip_vs"); err != nil {
		t.Skip("kernel: no IPVS")
	}
	out := t.TempDir()
	cmd := exec.Command("/proc/self/exe", guestArguments...)
	cmd.Env = append(os.Environ(), "OUT="+out)
	if text, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	figures, err := os.ReadFile(filepath.Join(out, "bench-"+command+"-peers.json"))
	if err != nil {
		t.Fatal(err)
	}
	if err := harness.PrintFigures(figures); err != nil {
		t.Fatal(err)
	}
}
