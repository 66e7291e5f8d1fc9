// SPDX-License-Identifier: Apache-2.0

package main

import (
	"slices"
	"strings"
	"testing"
)

const head = "# Security\n\n| id | attacker | attack | defence | test |\n|---|---|---|---|---|\n"

func TestReadTable(t *testing.T) {
	got, err := readTable(head +
		"| 1 | a local user | takes a slot | the user is compared | `internal/agent TestTheft`, `lab/e2e TestTheft/lookup mode` |\n" +
		"| 2a | a peer | floods | bounded | `bench FuzzFlood` |\n" +
		"\n| other | table |\n|---|---|\n| 3 | x |\n")
	want := []finding{{"1", "internal/agent TestTheft"}, {"1", "lab/e2e TestTheft/lookup mode"}, {"2a", "bench FuzzFlood"}}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("%v, %v, want %v", got, err, want)
	}
	for text, want := range map[string]string{
		"":                                  "no table",
		head:                                "no table",
		head + "| 1 | a | b | c |\n":        "line 5: 4 columns",
		head + "| 1 | a | b | | `x T` |\n":  "line 5: an empty column",
		head + "| 1 | a | b | c | soon |\n": "finding 1 names no test",
	} {
		if _, err := readTable(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
}

func TestTestExists(t *testing.T) {
	t.Chdir("../..")
	if err := testExists("tools/security TestTestExists/of it"); err != nil {
		t.Error(err)
	}
	for _, name := range []string{"tools/security TestTest", "tools/none TestTestExists"} {
		if err := testExists(name); err == nil {
			t.Errorf("%s exists", name)
		}
	}
}
