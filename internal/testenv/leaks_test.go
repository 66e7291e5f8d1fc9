// SPDX-License-Identifier: Apache-2.0

package testenv

import (
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
)

const leakVariable = "SOCKEYE_TEST_LEAK"

func TestMain(m *testing.M) { os.Exit(Run(m)) }

// TestLeak leaks the object that the variable selects. TestLeaksAreFound runs it in a separate process.
func TestLeak(t *testing.T) {
	switch os.Getenv(leakVariable) {
	case "goroutine":
		go func() { time.Sleep(time.Minute) }()
	case "file":
		f, err := os.Open("/etc/passwd")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { kept = f })
	case "pipe":
		r, _, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { kept = r })
	}
}

var kept *os.File

func TestLeaksAreFound(t *testing.T) {
	for kind, want := range map[string]string{
		"none": "PASS", "goroutine": "leaked goroutines", "file": "/etc/passwd", "pipe": "leaked descriptor: ",
	} {
		cmd := exec.Command("/proc/self/exe", "-test.run=^TestLeak$")
		cmd.Env = append(os.Environ(), leakVariable+"="+kind)
		out, err := cmd.CombinedOutput()
		if !strings.Contains(string(out), want) || (err == nil) != (kind == "none") {
			t.Errorf("%s: %v: %s", kind, err, out)
		}
	}
}
