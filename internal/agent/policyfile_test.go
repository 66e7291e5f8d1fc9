// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/config"
	"sockeye/internal/domain"
	"sockeye/internal/fault"
	"sockeye/internal/testenv"
)

// changing is a domain that changes a file after the other domains have read it.
type changing struct {
	domain.Domain
	change func()
}

func (c *changing) Start(policy *config.Policy) error {
	c.change()
	return c.Domain.Start(policy)
}

func (c *changing) Plan(policy *config.Policy) ([]domain.Step, error) {
	c.change()
	return c.Domain.Plan(policy)
}

// TestFileChangesMeanwhile changes a file that the policy names while the policy is applied, and while the agent starts: the agent
// notices that what it has read is not in the file any more.
func TestFileChangesMeanwhile(t *testing.T) {
	for _, c := range []struct{ name, policy, columns string }{
		{"device_map", strings.Replace(onePolicy, "slots: 4", "slots: 4\n    device_map: file.csv", 1), ",edge"},
		{"remote_file", "tune:\n  - {name: a, cgroup: CGROUP/x, match: {remote_file: file.csv}, set: {sndbuf: 100KB}}\n", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			file := filepath.Join(dir, "file.csv")
			prefix := byte('0')
			write := func() {
				t.Helper()
				prefix++
				if err := os.WriteFile(file, []byte("192.0.2."+string(prefix)+"/32"+c.columns+"\n"), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			write()
			a := testAgent(t, dir, testenv.BPFFS(t)+"/sockeye")
			defer a.stop()
			last := &changing{Domain: a.domains[len(a.domains)-1], change: write}
			a.domains[len(a.domains)-1] = last
			text := policyText(c.policy)
			if err := os.WriteFile(a.options.Policy, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			a.begin(t, text)
			defer func() {
				last.change = func() {}
				retire(t, a)
			}()
			const want = "file.csv, which the policy names, has changed since it was applied"
			if problem, _ := a.policyProblem(); !strings.HasSuffix(problem, want) {
				t.Errorf("changed at the start: %q", problem)
			}
			if _, err := a.Apply(api.Candidate{}); err != nil {
				t.Fatal(err)
			}
			if problem, _ := a.policyProblem(); !strings.HasSuffix(problem, want) {
				t.Errorf("changed during apply: %q", problem)
			}
			last.change = func() {}
			if _, err := a.Apply(api.Candidate{}); err != nil {
				t.Fatal(err)
			}
			if problem, _ := a.policyProblem(); problem != "" {
				t.Errorf("applied: %q", problem)
			}
		})
	}
}

// TestPolicyNotSaved applies a policy that cannot be saved: the policy is in force, and the error and status say what is missing.
func TestPolicyNotSaved(t *testing.T) {
	dir := t.TempDir()
	a := testAgent(t, dir, testenv.BPFFS(t)+"/sockeye")
	defer a.stop()
	a.begin(t, policyText(onePolicy))
	defer retire(t, a)
	if err := unix.Mount("", dir, "tmpfs", 0, "size=256k"); err != nil {
		t.Fatal(err)
	}
	mounted := true
	unmount := func() {
		if mounted {
			mounted = false
			if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
				t.Error(err)
			}
		}
	}
	defer unmount()
	full, err := os.Create(filepath.Join(dir, "full"))
	if err != nil {
		t.Fatal(err)
	}
	defer full.Close()
	if _, err := full.Write(make([]byte, 224<<10)); err != nil {
		t.Fatal(err)
	}
	two := policyText(onePolicy, "slots: 4", "slots: 5") + strings.Repeat("# comment\n", 4<<10) // the state of the service is smaller
	_, err = a.Apply(api.Candidate{Text: two, Path: a.options.Policy})
	if err == nil || !strings.Contains(err.Error(), "the policy is in force, but not saved: ") || fault.Hint(err) != "sockeye apply saves it" {
		t.Fatalf("%v, hint %q", err, fault.Hint(err))
	}
	if s := servicesOf(t, a); len(s) != 1 || s[0].Slots != 5 {
		t.Errorf("%+v", s)
	}
	if err := os.Truncate(full.Name(), 0); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(a.options.Policy, []byte(two), 0o600); err != nil {
		t.Fatal(err)
	}
	if problem, hint := a.policyProblem(); !strings.HasPrefix(problem, "the policy in force is not saved: ") || hint != "sockeye apply saves it" {
		t.Errorf("problem %q, hint %q", problem, hint)
	}
	if _, err := a.Apply(api.Candidate{}); err != nil {
		t.Fatal(err)
	}
	if problem, _ := a.policyProblem(); problem != "" {
		t.Errorf("saved: %q", problem)
	}
	saved, err := os.ReadFile(filepath.Join(dir, appliedFile))
	if err != nil || string(saved) != two {
		t.Errorf("%q, %v", saved, err)
	}
}
