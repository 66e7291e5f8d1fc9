// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"sockeye/internal/cgroup"
)

func TestDistribution(t *testing.T) {
	var v []float64
	for i := range 100 {
		v = append(v, float64(100-i))
	}
	// The 95 % confidence interval of 100 coin tosses is 40 to 60 heads.
	if got, want := DistributionOf(v), (Distribution{Median: 50.5, P25: 25, P75: 75, Low: 40, High: 61}); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
	if got, want := DistributionOf([]float64{2, 1, 3}), (Distribution{Median: 2, P25: 1, P75: 3, Low: 1, High: 3}); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
	for _, x := range []struct {
		d    Distribution
		want string
	}{
		{Distribution{Low: 0.99, Median: 1, High: 1.01}, "met"},
		{Distribution{Low: 0.98, Median: 0.99, High: 1}, "met, within the noise"},
		{Distribution{Low: 0.97, Median: 0.98, High: 0.99}, "missed, within the noise"},
		{Distribution{Low: 0.96, Median: 0.97, High: 0.98}, "missed"},
	} {
		if got := x.d.Verdict(0.99); got != x.want {
			t.Errorf("%+v: %s, want %s", x.d, got, x.want)
		}
	}
}

func TestTurn(t *testing.T) {
	arms := []string{"native", "sockeye", "pasta"}
	first, behind := map[string]int{}, map[[2]string]int{}
	for round := range 2 * len(arms) {
		o := Turn(arms, round)
		first[o[0]]++
		for i := range o[1:] {
			behind[[2]string(o[i:i+2])]++
		}
		if !slices.Equal(slices.Sorted(slices.Values(o)), slices.Sorted(slices.Values(arms))) {
			t.Errorf("round %d has %v", round, o)
		}
	}
	for _, a := range arms {
		if first[a] != 2 {
			t.Errorf("%s begins %d rounds, not 2", a, first[a])
		}
		for _, b := range arms {
			if n := behind[[2]string{a, b}]; a != b && n != 2 {
				t.Errorf("%s comes %d times behind %s, not twice", b, n, a)
			}
		}
	}
}

func TestDispatch(t *testing.T) {
	var ran []string
	note := func(name string) func([]string) error {
		return func(args []string) error {
			ran = append(ran, strings.Join(append([]string{name}, args...), " "))
			return nil
		}
	}
	all := []Benchmark{
		{Name: "a", Run: note("run a"), Workers: map[string]func([]string) error{"worker": note("worker")}},
		{Name: "b", Run: note("run b"), Sandboxed: true},
	}
	for _, args := range []string{"a", "a -quick", "inside b -quick", "worker 1 2"} {
		if status := RunCommand(strings.Fields(args), all...); status != 0 {
			t.Errorf("%s: status %d", args, status)
		}
	}
	for _, args := range []string{"", "c", "inside", "inside worker", "inside c"} {
		if status := RunCommand(strings.Fields(args), all...); status != 2 {
			t.Errorf("%s: status %d", args, status)
		}
	}
	if want := []string{"run a", "run a -quick", "run b -quick", "worker 1 2"}; !slices.Equal(ran, want) {
		t.Errorf("ran %q, want %q", ran, want)
	}
}

// TestUsage reads the CPU time and the memory of a process that uses both.
func TestUsage(t *testing.T) {
	root, err := cgroup.Mount()
	if err != nil {
		t.Skip("kernel: no cgroup v2: ", err)
	}
	if os.Geteuid() != 0 {
		t.Fatal("needs root")
	}
	dir, err := cgroup.Make(root, "sockeye-bench-test-", "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { removeCgroup(dir) })
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	s := &Sandbox{Dir: t.TempDir(), Cgroup: dir, groups: map[string]int{}}
	const mib = 64
	p, err := s.Start("busy", "busy", "/bin/sh", "-c", fmt.Sprintf("x=$(head -c %d /dev/zero | tr '\\0' x); echo 1; read line", mib<<20))
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Ask("", new(int)); err != nil {
		t.Fatal(err)
	}
	u := s.Usage("busy")
	if u.User <= 0 || u.System <= 0 || u.Total() != s.CPU("busy") {
		t.Errorf("usage %+v, total %v", u, s.CPU("busy"))
	}
	if later := s.Usage("busy").Sub(u); later.Total() < 0 || later.Total() > u.Total() {
		t.Errorf("usage since the first reading: %+v", later)
	}
	if m := s.Memory("busy"); m < mib<<20 || m > 8*mib<<20 {
		t.Errorf("memory %d bytes of a process that has a string of %d", m, mib<<20)
	}
	if m := s.BPFMemory("busy"); m != 0 {
		t.Errorf("%d bytes of BPF maps of a shell", m)
	}
	p.Stop(unix.SIGKILL)
	s.KillGroups("busy")
}
