// SPDX-License-Identifier: Apache-2.0

//go:build vm

package steer

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// TestPeersInGuest measures the balancers of this kernel. bench steer runs it in a virtual machine if its own kernel has no
// IPVS, and reads the line that begins with guestMark.
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
	var line bytes.Buffer
	if err := compact(&line, figures); err != nil {
		t.Fatal(err)
	}
	fmt.Printf("%s%s\n", guestMark, line.Bytes())
}
