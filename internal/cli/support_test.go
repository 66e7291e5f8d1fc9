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
	for _, name := range []string{"policy.yaml", "commands/status.json", "commands/slots.json", "commands/plan.json", "commands/devices.json", "commands/events.json", "pins.txt", "host/sysctls.txt"} {
		if p := problem(s, name); p != "" && name != "commands/status.json" { // the slots have no members
			t.Errorf("%s: %s", name, p)
		}
	}
	if slices.ContainsFunc(without.Files, func(f support.File) bool { return f.Name == "commands/devices.json" }) {
		t.Error("the list of devices is packed without --devices")
	}
	dir, err := os.MkdirTemp("", "support") // the parent of t.TempDir() is closed to other users
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chown(dir, 65534, 65534); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "archive.tar.gz")
	r := h.child(asNobody, "sockeye", "support", "--run-dir", h.run, "--policy", h.policy, "--pins", h.pins, "--file", file)
	if hint := "\nhint: the archive is incomplete, because only root may read the journal, the pins and the whole state: run it as root\n"; r.code != 0 || !strings.HasSuffix(r.err, hint) {
		t.Errorf("as nobody: %+v", r)
	}
	used := h.write("used.tar.gz", "")
	h.refused(5, "DIR/used.tar.gz exists", "name another file with --file", nil, "support", "--file", used)
}
