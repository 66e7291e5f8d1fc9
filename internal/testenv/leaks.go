// SPDX-License-Identifier: Apache-2.0

package testenv

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// Run runs the tests of a package and returns the exit code. If the tests pass but leak goroutines or descriptors, the
// exit code is 1.
func Run(m *testing.M) int {
	before := openFiles()
	code := m.Run()
	if code != 0 {
		return code
	}
	// Find waits for goroutines that are about to exit.
	if err := goleak.Find(goleak.IgnoreTopFunction("os/signal.loop")); err != nil {
		fmt.Println("testenv: leaked goroutines:", err)
		return 1
	}
	leaked := leakedFiles(before)
	for _, file := range leaked {
		fmt.Println("testenv: leaked descriptor:", file)
	}
	if len(leaked) > 0 {
		return 1
	}
	return 0
}

// leakedFiles returns the open files that are not in before. Pipes are checked after garbage collections, because
// package net keeps the pipes of splice(2) in a sync.Pool. All other files are checked before the first garbage
// collection, which would close unreferenced files, too.
func leakedFiles(before map[string]string) (leaked []string) {
	pipes := 0
	after := openFiles()
	for _, fd := range slices.Sorted(maps.Keys(after)) {
		switch file := after[fd]; {
		case before[fd] == file || ofRuntime(file):
		case strings.HasPrefix(file, "pipe:"):
			pipes++
		default:
			leaked = append(leaked, fd+" "+file)
		}
	}
	for attempt := 0; pipes > 0; attempt++ {
		runtime.GC()
		time.Sleep(10 * time.Millisecond) // cleanups run in a goroutine
		pipes = 0
		for fd, file := range openFiles() {
			if before[fd] != file && strings.HasPrefix(file, "pipe:") {
				pipes++
				if attempt == 100 {
					leaked = append(leaked, fd+" "+file)
				}
			}
		}
		if attempt == 100 {
			break
		}
	}
	return leaked
}

// Opened returns a function that fails the test for each file that was opened since and is still open. A file of an
// earlier test may be closed in between.
func Opened(t testing.TB) (check func()) {
	before := openFiles()
	return func() {
		t.Helper()
		for fd, file := range openFiles() {
			if before[fd] != file && !ofRuntime(file) {
				t.Errorf("descriptor %s is open: %s", fd, file)
			}
		}
	}
}

// openFiles returns the open files of this process by descriptor, with their names in /proc/PID/fd.
func openFiles() map[string]string {
	files := make(map[string]string)
	const dir = "/proc/self/fd"
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil
	}
	for _, e := range entries {
		// Readlink fails for the descriptor of ReadDir, which is closed.
		if file, err := os.Readlink(filepath.Join(dir, e.Name())); err == nil {
			files[e.Name()] = file
		}
	}
	return files
}

// ofRuntime reports whether the Go runtime or the test binary opens the file once and keeps it open: the network poller,
// the source of random numbers, and the topology of the CPUs.
func ofRuntime(file string) bool {
	return file == "anon_inode:[eventpoll]" || file == "anon_inode:[eventfd]" || file == "/dev/urandom" || strings.HasPrefix(file, "/sys/devices/system/cpu/")
}
