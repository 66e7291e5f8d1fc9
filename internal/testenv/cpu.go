// SPDX-License-Identifier: Apache-2.0

package testenv

import (
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"testing"
	"time"
)

// AwaitCPU waits until the host has time for another test: until fewer than six threads per CPU are runnable, in the mean of some samples,
// or for a minute. Tests of many processes that all run at once take as long together as a few at a time, but each one takes several
// times as long, and measures mainly how long its processes wait for a CPU.
func AwaitCPU(t testing.TB) {
	t.Helper()
	const (
		most    = 6 // per CPU
		samples = 5
		longest = time.Minute
	)
	for begun := time.Now(); time.Since(begun) < longest; {
		sum := 0
		for range samples {
			n, err := runnable()
			if err != nil {
				t.Fatal(err)
			}
			sum += n
			time.Sleep(time.Duration(20+rand.IntN(20)) * time.Millisecond)
		}
		if sum < samples*most*runtime.NumCPU() {
			return
		}
	}
}

// runnable returns the number of threads of the host that run or wait for a CPU.
func runnable() (n int, err error) {
	text, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return 0, err
	}
	var loads [3]float64
	if _, err := fmt.Sscanf(string(text), "%f %f %f %d/", &loads[0], &loads[1], &loads[2], &n); err != nil {
		return 0, fmt.Errorf("read /proc/loadavg: %w", err)
	}
	return n, nil
}
