// SPDX-License-Identifier: Apache-2.0

package topcmd

import (
	"fmt"
	"os"
	"strings"
	"testing"
)

// TestDocument checks that docs/top.md shows the screen as it is, and all keys.
func TestDocument(t *testing.T) {
	const path = "../../../docs/top.md"
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	s := newScreen(t, 100, 9, sample(60))
	var lines []string
	for line := range strings.Lines(s.text()) {
		lines = append(lines, strings.TrimRight(line, " \n"))
	}
	want := "```text\n" + strings.Join(lines, "\n") + "\n```\n\n"
	if !strings.Contains(string(text), want) {
		t.Errorf("%s lacks\n%s", path, want)
	}
	live := s.keys()
	s.replay = &replay{}
	for _, l := range append(live, s.keys()...) {
		key, action := strings.TrimSpace(l.text[:17]), l.text[17:]
		if row := fmt.Sprintf("| `%s` | %s |\n", strings.ReplaceAll(key, ", ", "`, `"), action); l.style == plain && !strings.Contains(string(text), row) {
			t.Errorf("%s lacks %q", path, row)
		}
	}
}
