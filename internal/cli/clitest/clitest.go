// SPDX-License-Identifier: Apache-2.0

// Package clitest has golden files and hostile text for the tests of all commands.
package clitest

import (
	"os"
	"regexp"
	"strings"
	"testing"
	"unicode/utf8"
)

// Safe reports whether a terminal only displays a text.
func Safe(text string) bool {
	for _, r := range text {
		switch {
		case r == '\n', r == '\t':
		case r < ' ', r >= 0x7f && r <= 0x9f, r >= 0x202a && r <= 0x202e, r >= 0x2066 && r <= 0x2069, r == 0x200e, r == 0x200f, r == 0x61c,
			r == 0x2028, r == 0x2029, r >= 0x200b && r <= 0x200d, r == 0xfeff, r == 0xad:
			return false
		}
	}
	return utf8.ValidString(text)
}

// GoldenText compares the output of write with a golden file, and checks that the output is
// printable and that no line exceeds 100 columns.
func GoldenText[T any, P interface {
	*T
	String() string
}](t *testing.T, name string, write func(P)) {
	t.Helper()
	var got T
	write(&got)
	text := P(&got).String()
	Golden(t, name, text)
	PrintableOnly(t, text)
	for line := range strings.Lines(text) {
		if n := utf8.RuneCountInString(strings.TrimSuffix(line, "\n")); n > 100 {
			t.Errorf("%d columns: %s", n, line)
		}
	}
}

// Golden compares got with a file in testdata. With UPDATE in the environment, it writes the file.
func Golden(t testing.TB, name, got string) {
	t.Helper()
	file := "testdata/" + name + ".golden"
	if os.Getenv("UPDATE") != "" {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s: got\n%s\nwant\n%s", name, got, want)
	}
}

var control = regexp.MustCompile(`[\x00-\x09\x0b-\x1f\x7f\x{80}-\x9f\x{202a}-\x{202e}\x{2066}-\x{2069}]`)

// PrintableOnly fails the test if out contains characters that a terminal interprets.
func PrintableOnly(t testing.TB, out string) {
	t.Helper()
	if bad := control.FindString(out); bad != "" {
		t.Errorf("%q is in the output:\n%q", bad, out)
	}
}

// Hostile is a name with escape sequences and control characters.
const Hostile = "a\x1b[2J\x07\nb\u202ec\u009b31m\xff"

// Commands are escape sequences, control characters and invisible characters in all encodings.
var Commands = []string{
	"\x1b[2J", "\x1b]0;title\x07", "\x1b]52;c;eA==\x1b\\", "\x1bP", "\x1bc", "\x08\x08", "\r", "\x00", "\x0b\x0c", "\x0e\x0f", "\x7f",
	"\u009b31m", "\u009d0;x\u009c", "\u0085", "\x9b31m", "\x9d", // C1, as characters and as bytes
	"\u202a", "\u202b", "\u202c", "\u202d", "\u202e", "\u2066", "\u2067", "\u2068", "\u2069", "\u200e", "\u200f", "\u061c", // directions
	"\u2028", "\u2029", "\u200b", "\u200c", "\u200d", "\ufeff", "\u00ad", "\u180e", "\U000e0041", "\ue000", "\u00a0",
	"\xff", "\xc0\x9b", "\xe2\x80", "\xed\xa0\x80", "\xf0\x9f",
}
