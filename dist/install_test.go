// SPDX-License-Identifier: Apache-2.0

package dist_test

import (
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestInstall checks that make uninstall removes each file that make install has written, and no other one.
func TestInstall(t *testing.T) {
	root := t.TempDir()
	out := t.TempDir()
	run := func(target string) {
		t.Helper()
		cmd := exec.Command("make", "--no-print-directory", "-C", "..", target, "DESTDIR="+root, "PREFIX=/usr", "OUT="+out)
		if text, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("make %s: %v\n%s", target, err, text)
		}
	}
	files := func() (list []string) {
		t.Helper()
		if err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if err == nil && !d.IsDir() {
				list = append(list, strings.TrimPrefix(path, root))
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
		return list
	}
	run("install")
	installed := files()
	for _, want := range []string{
		"/usr/bin/sockeye", "/usr/share/man/man1/sockeye.1", "/usr/share/man/man1/sockeye-init.1", "/usr/share/man/man5/sockeye-policy.5",
		"/etc/systemd/system/sockeye.service", "/usr/share/bash-completion/completions/sockeye", "/usr/share/sockeye/examples/nfacctd/etc/sockeye/policy.yaml",
		"/usr/share/sockeye/prometheus/sockeye.rules.yml", "/usr/share/sockeye/grafana/sockeye-overview.json", "/usr/share/doc/sockeye/runbook.md",
	} {
		if !slices.Contains(installed, want) {
			t.Errorf("no %s in %q", want, installed)
		}
	}
	link := regexp.MustCompile(`\]\(([^):#]+)[^):]*\)`)
	for _, name := range installed {
		if filepath.Ext(name) != ".md" {
			continue
		}
		text, err := os.ReadFile(root + name)
		if err != nil {
			t.Fatal(err)
		}
		for _, target := range link.FindAllStringSubmatch(string(text), -1) {
			if _, err := os.Stat(filepath.Join(filepath.Dir(root+name), target[1])); err != nil {
				t.Errorf("%s has a link to %s, which is not installed", name, target[1])
			}
		}
	}
	run("uninstall")
	if left := files(); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}
