// SPDX-License-Identifier: Apache-2.0

// Package dist_test checks the unit and its drop-ins with systemd-analyze(1).
package dist_test

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"sockeye/tools/security/exposure"
)

// install copies the unit and drop-ins to the paths of make install below a temporary
// root, and returns the paths of the root and of the unit.
func install(t *testing.T, dropIns ...string) (root, unit string) {
	t.Helper()
	root = t.TempDir()
	unit, err := exposure.Install(root, ".", dropIns...)
	if err != nil {
		t.Fatal(err)
	}
	return root, unit
}

// analyze returns the exposure score (0 to 10) and the names of the settings that are not
// safe.
func analyze(t *testing.T, root string) (score float64, unsafe []string) {
	t.Helper()
	score, unsafe, err := exposure.Analyze(root, "sockeye.service")
	if err != nil {
		t.Fatal(err)
	}
	return score, unsafe
}

// TestUnitScore checks that the exposure score of the unit is at most 3.0, and that important
// settings are safe.
func TestUnitScore(t *testing.T) {
	root, _ := install(t)
	score, unsafe := analyze(t, root)
	t.Logf("score %.1f, not safe: %s", score, strings.Join(unsafe, " "))
	if score > 3.0 {
		t.Errorf("the unit scores %.1f, want 3.0 or less", score)
	}
	for _, field := range []string{
		"CapabilityBoundingSet_CAP_SYS_ADMIN", "CapabilityBoundingSet_CAP_SYS_NICE", "NoNewPrivileges",
		"ProtectSystem", "ProtectControlGroups", "ProtectKernelTunables", "MemoryDenyWriteExecute", "RestrictSUIDSGID",
		"PrivateTmp", "PrivateDevices", "UMask", "RestrictNamespaces_user", "RestrictNamespaces_net", "SystemCallFilter_mount",
	} {
		if slices.Contains(unsafe, field) {
			t.Errorf("%s is not safe", field)
		}
	}
}

// TestDropInsCombine checks that each drop-in, and all drop-ins together, add exactly the
// intended privileges.
func TestDropInsCombine(t *testing.T) {
	root, _ := install(t)
	_, base := analyze(t, root)
	gives := map[string][]string{
		"netns.conf":   {"CapabilityBoundingSet_CAP_SYS_ADMIN", "RestrictNamespaces_net"},
		"cgroups.conf": {"ProtectControlGroups"},
		"ports.conf":   nil, // systemd-analyze has one field for CAP_NET_BIND_SERVICE and CAP_NET_RAW, which the unit has
	}
	files, err := filepath.Glob("sockeye.service.d/*.conf")
	if err != nil || len(files) != len(gives) {
		t.Fatalf("drop-ins %v, %v", files, err)
	}
	var all, given []string
	check := func(wanted []string, names ...string) {
		t.Helper()
		root, _ := install(t, names...)
		score, unsafe := analyze(t, root)
		var more []string
		for _, field := range unsafe {
			if !slices.Contains(base, field) {
				more = append(more, field)
			}
		}
		slices.Sort(more)
		slices.Sort(wanted)
		t.Logf("%v: score %.1f", names, score)
		if !slices.Equal(more, wanted) {
			t.Errorf("%v: added privileges %v, want %v", names, more, wanted)
		}
		if score > 4 {
			t.Errorf("%v: score %.1f", names, score)
		}
	}
	for _, file := range files {
		name := filepath.Base(file)
		all, given = append(all, name), append(given, gives[name]...)
		check(gives[name], name)
	}
	check(given, all...)
}

// installExample copies the unit of an example to a directory, as instance 0, and returns the path. A program that is not
// in Debian is replaced by true(1), because systemd-analyze looks for it.
func installExample(t *testing.T, dir, example string) (unit string) {
	t.Helper()
	text, err := os.ReadFile(example)
	if err != nil {
		t.Fatal(err)
	}
	text = bytes.ReplaceAll(text, []byte("=/usr/local/bin/goflow2 "), []byte("=/usr/bin/true "))
	unit = filepath.Join(dir, strings.Replace(filepath.Base(example), "@.", "@0.", 1))
	if err := os.WriteFile(unit, text, 0o644); err != nil {
		t.Fatal(err)
	}
	return unit
}

// TestUnitVerifies checks that systemd-analyze verify accepts the unit, with and without
// its drop-ins, and the units of the examples without warnings.
func TestUnitVerifies(t *testing.T) {
	examples, err := filepath.Glob("../examples/*/etc/systemd/system/*@.service")
	if err != nil || len(examples) < 4 {
		t.Fatalf("units of examples: %q, %v", examples, err)
	}
	for _, dropIns := range [][]string{nil, {"netns.conf", "cgroups.conf", "ports.conf"}} {
		_, unit := install(t, dropIns...)
		arguments := []string{"verify", "--man=no", unit}
		for _, example := range examples {
			arguments = append(arguments, installExample(t, filepath.Dir(unit), example))
		}
		out, err := exec.Command("systemd-analyze", arguments...).CombinedOutput()
		if err != nil || len(out) > 0 {
			t.Errorf("drop-ins %v: %v\n%s", dropIns, err, out)
		}
	}
}

// TestExampleUnitsArePlain checks that the units of the examples run nothing outside of their sandbox: a command of root in a
// directory of the service's user follows the links of this user.
func TestExampleUnitsArePlain(t *testing.T) {
	units, err := filepath.Glob("../examples/*/etc/systemd/system/*@.service")
	if err != nil || len(units) < 2 {
		t.Fatalf("units of examples: %q, %v", units, err)
	}
	for _, unit := range units {
		text, err := os.ReadFile(unit)
		if err != nil {
			t.Fatal(err)
		}
		keys := map[string][]string{}
		for line := range strings.Lines(string(text)) {
			key, value, ok := strings.Cut(strings.TrimSpace(line), "=")
			if !ok || strings.HasPrefix(line, "#") {
				continue
			}
			keys[key] = append(keys[key], value)
			// systemd.service(5), "Special executable prefixes".
			if prefix := value[:len(value)-len(strings.TrimLeft(value, "@-:+!|"))]; strings.HasPrefix(key, "Exec") && strings.ContainsAny(prefix, "+!") {
				t.Errorf("%s runs a command with privileges that the service does not have: %s", unit, line)
			}
		}
		for key, want := range map[string]string{
			"CapabilityBoundingSet": "", "NoNewPrivileges": "yes", "PrivateDevices": "yes", "PrivateTmp": "yes", "ProtectControlGroups": "yes", "ProtectHome": "yes",
			"ProtectKernelModules": "yes", "ProtectKernelTunables": "yes", "ProtectSystem": "strict", "RestrictNamespaces": "yes", "RestrictSUIDSGID": "yes",
			"SystemCallFilter": "@system-service", "UMask": "0077",
		} {
			if got := keys[key]; len(got) == 0 || got[0] != want {
				t.Errorf("%s: %s=%s, want %s", unit, key, got, want)
			}
		}
		if user := keys["User"]; len(user) != 1 || user[0] == "root" {
			t.Errorf("%s runs as root", unit)
		}
		// Besides those of the policy, the units and the user, a directory has configurations.
		dirs, err := filepath.Glob(filepath.Join(filepath.Dir(unit), "../../*"))
		if err != nil {
			t.Fatal(err)
		}
		if len(dirs) > 3 && len(keys["LoadCredential"]) == 0 {
			t.Errorf("%s has no LoadCredential=: its user could not read a configuration of mode 0600", unit)
		}
		root := t.TempDir()
		dir := filepath.Join(root, "etc/systemd/system")
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		name := filepath.Base(installExample(t, dir, unit))
		score, unsafe, err := exposure.Analyze(root, name)
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("%s: score %.1f, not safe: %s", name, score, strings.Join(unsafe, " "))
		if score > 2.5 {
			t.Errorf("%s scores %.1f, want 2.5 or less", unit, score)
		}
	}
}

// TestAgentRestartsFirst checks that systemd restarts the agent before the members, so that the agent holds the ports
// before the members bind them.
func TestAgentRestartsFirst(t *testing.T) {
	restart := func(unit string) time.Duration {
		t.Helper()
		text, err := os.ReadFile(unit)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(text)) {
			value, ok := strings.CutPrefix(strings.TrimSpace(line), "RestartSec=")
			if !ok {
				continue
			}
			if _, err := strconv.Atoi(value); err == nil {
				value += "s"
			}
			wait, err := time.ParseDuration(value)
			if err != nil {
				t.Fatal(err)
			}
			return wait
		}
		t.Fatalf("%s has no RestartSec", unit)
		return 0
	}
	if agent, member := restart("sockeye.service"), restart("../examples/nfacctd/etc/systemd/system/nfacctd@.service"); agent > member/2 {
		t.Errorf("the agent restarts after %v, a member after %v", agent, member)
	}
}
