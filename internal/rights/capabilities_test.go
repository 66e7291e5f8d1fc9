// SPDX-License-Identifier: Apache-2.0

package rights

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// dropEnv has the test binary drop capabilities, and print the state of its threads.
const dropEnv = "SOCKEYE_TEST_DROP"

// RunTests runs the tests, or drops capabilities.
func RunTests(run func() int) {
	var err error
	switch os.Getenv(dropEnv) {
	case "":
		os.Exit(run())
	case "some":
		startThreads()
		err = Drop(unix.CAP_SYS_ADMIN)
	case "all":
		startThreads()
		err = DropAll()
	}
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	files, _ := filepath.Glob("/proc/self/task/*/status")
	for _, file := range files {
		text, _ := os.ReadFile(file)
		fmt.Print(string(text))
	}
	missing, err := Missing()
	fmt.Println(missing, err, Has(unix.CAP_SYS_ADMIN), Has(unix.CAP_SYS_CHROOT), Has(63))
}

// startThreads starts four threads that stay.
func startThreads() {
	started := make(chan bool)
	for range 4 {
		go func() {
			runtime.LockOSThread()
			started <- true
			select {}
		}()
		<-started
	}
}

func TestDrop(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	all, _, err := Of(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	some := uint64(1)<<unix.CAP_SYS_ADMIN | 1<<unix.CAP_NET_BIND_SERVICE
	for _, c := range kept {
		some |= 1 << c.Value
	}
	for how, test := range map[string]struct {
		mask uint64
		last string
	}{
		"some": {some & all, "[] <nil> true false false"},
		"all":  {0, "[CAP_BPF CAP_NET_ADMIN CAP_NET_RAW CAP_PERFMON CAP_SYS_PTRACE CAP_DAC_READ_SEARCH CAP_CHOWN] <nil> false false false"},
	} {
		child := exec.Command("/proc/self/exe")
		child.Env = append(os.Environ(), dropEnv+"="+how)
		out, err := child.Output()
		if err != nil {
			t.Fatalf("%s: %v: %s", how, err, out)
		}
		text := string(out)
		threads := strings.Count(text, "\nPid:\t")
		for _, line := range []string{"CapPrm:\t%016x\n", "CapEff:\t%016x\n"} {
			if n := strings.Count(text, fmt.Sprintf(line, test.mask)); n != threads || threads < 5 {
				t.Errorf("%s: %d of %d threads have "+line, how, n, threads, test.mask)
			}
		}
		if n := strings.Count(text, "NoNewPrivs:\t1"); n != threads {
			t.Errorf("%s: %d of %d threads have no_new_privs", how, n, threads)
		}
		lines := strings.Split(strings.TrimSpace(text), "\n")
		if last := lines[len(lines)-1]; last != test.last {
			t.Errorf("%s: %s, want %s", how, last, test.last)
		}
	}
}
