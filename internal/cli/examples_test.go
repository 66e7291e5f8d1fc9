// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// policies returns the policies in a text: blocks of YAML, and in transcripts of commands everything from "services:"
// on.
func policies(text string) (found []string) {
	for _, block := range regexp.MustCompile("(?ms)^```(\\w*)\n(.*?)^```$").FindAllStringSubmatch(text, -1) {
		switch block[1] {
		case "yaml":
			found = append(found, block[2])
		case "console":
			for _, part := range strings.Split(block[2], "\n\n") {
				if strings.HasPrefix(part, "services:") {
					found = append(found, part+"\n")
				}
			}
		}
	}
	return found
}

// TestExamplesAreSafe checks that each example policy of the documents is accepted by check without warnings.
func TestExamplesAreSafe(t *testing.T) {
	documents := []string{"../../README.md", "../../KNOWN-ISSUES.md", "../../ARCHITECTURE.md"}
	for _, pattern := range []string{"../../docs/*.md", "../../docs/decisions/*.md", "../../SECURITY.md"} {
		more, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		documents = append(documents, more...)
	}
	h := newHost(t, "services: {}\n")
	// The host does not have the users of the examples.
	users, err := os.ReadFile("/etc/passwd")
	if err != nil {
		t.Fatal(err)
	}
	passwd := h.write("passwd", strings.TrimRight(string(users), "\n")+"\npmacct:x:7999:7999::/:/bin/false\nbmp:x:7998:7998::/:/bin/false\ngoflow2:x:7997:7997::/:/bin/false\nsyslog-collector:x:7996:7996::/:/bin/false\nradius:x:7995:7995::/:/bin/false\n")
	if err := unix.Mount(passwd, "/etc/passwd", "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount("/etc/passwd", unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	for _, name := range []string{"prefixes.txt", "devices.csv"} { // examples refer to these files
		h.write(name, "")
	}
	h.write("prefixes.txt", "192.0.2.0/24\n")
	for name, text := range map[string]string{"ui.token": strings.Repeat("0123456789abcdef", 4), "otlp-headers": "Authorization: Bearer example"} {
		if err := os.Chmod(h.write(name, text+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.Command("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=example", "-keyout", "ui.key", "-out", "ui.pem")
	cmd.Dir = filepath.Dir(h.policy)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("openssl: %v\n%s", err, out)
	}
	certificate, err := os.ReadFile(filepath.Join(cmd.Dir, "ui.pem"))
	if err != nil {
		t.Fatal(err)
	}
	h.write("clients.pem", string(certificate))
	key, err := os.ReadFile(filepath.Join(cmd.Dir, "ui.key"))
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string][]byte{"collector-ca.pem": certificate, "etcd-ca.pem": certificate, "etcd.pem": certificate, "etcd.key": key} {
		h.write(name, string(text))
	}
	services := 0
	for _, document := range documents {
		text, err := os.ReadFile(document)
		if err != nil {
			t.Fatal(err)
		}
		for i, policy := range policies(string(text)) {
			file := h.write(fmt.Sprintf("%s-%d.yaml", filepath.Base(document), i), policy)
			if r := h.sockeye("check", file); r.code != 0 {
				t.Errorf("%s: %s%s in\n%s", document, r.out, r.err, policy)
			}
			if strings.Contains(policy, "members:") {
				services++
				without := regexp.MustCompile(`(?m)^ *user: .*\n`).ReplaceAllString(policy, "")
				if r := h.sockeye("check", h.write("without.yaml", without)); r.code != 2 || !strings.Contains(r.err, "any user could start a matching process") {
					t.Errorf("%s: without a user: exit code of check %d, %s, for\n%s", document, r.code, r.err, without)
				}
			}
		}
	}
	policyFiles, err := filepath.Glob("../../examples/*/etc/sockeye/policy.yaml")
	if err != nil || len(policyFiles) < 4 {
		t.Errorf("policies of the examples: %q, %v", policyFiles, err)
	}
	for _, file := range append(policyFiles, "../../dist/package/policy.yaml") {
		if r := h.sockeye("check", file); r.code != 0 {
			t.Errorf("%s: %s%s", file, r.out, r.err)
		}
	}
	installed, err := os.ReadFile("../../examples/nfacctd/etc/sockeye/policy.yaml")
	if err != nil {
		t.Fatal(err)
	}
	readme, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	if _, policy, _ := strings.Cut(string(installed), "services:"); !strings.Contains(string(readme), "services:"+policy) {
		t.Error("examples/nfacctd/etc/sockeye/policy.yaml is not README's first policy")
	}
	if services < 3 { // the parser may no longer find the examples
		t.Errorf("%d examples of services", services)
	}
}
