// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"regexp"
	"strings"
	"testing"
)

// TestPolicyPage checks that sockeye-policy(5) has every key of the tables of docs/policy.md, and no rest of Markdown.
func TestPolicyPage(t *testing.T) {
	text, err := os.ReadFile("../../docs/policy.md")
	if err != nil {
		t.Fatal(err)
	}
	page := strings.ReplaceAll(string(policyPage(string(text))), `\-`, "-")
	keys := regexp.MustCompile("(?m)^\\| `([a-z_]+)` \\|").FindAllStringSubmatch(string(text), -1)
	if len(keys) < 30 {
		t.Fatalf("%d keys", len(keys))
	}
	for _, key := range keys {
		if !regexp.MustCompile(`(?m)\\fB`+key[1]+`\\fR: `).MatchString(page) && !strings.Contains(page, key[1]+": ") {
			t.Errorf("no %s", key[1])
		}
	}
	for _, rest := range []string{"](", "\n|", ".TS", "```"} {
		if strings.Contains(page, rest) {
			t.Errorf("the page has %q", rest)
		}
	}
	for _, want := range []string{".TH SOCKEYE-POLICY 5", "sockeye-policy - the policy file of Sockeye", "slots: 4"} {
		if !strings.Contains(page, want) {
			t.Errorf("no %q in\n%.600s", want, page)
		}
	}
}
