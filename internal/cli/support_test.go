// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sockeye/internal/support"
)

// TestSupport packs an archive with and without an agent, and checks that no comment of the policy is in it.
func TestSupport(t *testing.T) {
	h := newHost(t, "# a secret\n"+oneService)
	pack := func(args ...string) supported {
		t.Helper()
		file := filepath.Join(t.TempDir(), "archive.tar.gz")
		s := must[supported](h, append([]string{"support", "--file", file, "--policy", h.policy, "--pins", h.pins}, args...)...)
		if info, err := os.Stat(file); err != nil || info.Mode() != 0o600 || s.File != file {
			t.Errorf("%+v: %v, %v", s, info, err)
		}
		text, err := exec.Command("tar", "-xzOf", file).CombinedOutput()
		if err != nil || strings.Contains(string(text), "secret") || !strings.Contains(string(text), "telemetry:") {
			t.Errorf("%v\n%s", err, text)
		}
		return s
	}
	problem := func(s supported, name string) string {
		t.Helper()
		for _, f := range s.Files {
			if f.Name == name {
				return f.Problem
			}
		}
		return "not packed"
	}
	without := pack()
	if p := problem(without, "commands/slots.json"); !strings.Contains(p, "exit code 1: no agent answers on ") {
		t.Errorf("slots without an agent: %q", p)
	}
	h.start()
	s := pack("--devices")
	for _, name := range []string{"policy.yaml", "commands/status.json", "commands/slots.json", "commands/plan.json", "commands/devices.json", "pins.txt", "host/sysctls.txt"} {
		if p := problem(s, name); p != "" && name != "commands/status.json" { // the slots have no members
			t.Errorf("%s: %s", name, p)
		}
	}
	if slices.ContainsFunc(without.Files, func(f support.File) bool { return f.Name == "commands/devices.json" }) {
		t.Error("the list of devices is packed without --devices")
	}
	used := h.write("used.tar.gz", "")
	h.refused(5, "DIR/used.tar.gz exists", "name another file with --file", nil, "support", "--file", used)
}
