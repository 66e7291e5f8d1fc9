// SPDX-License-Identifier: Apache-2.0

package command

import (
	"bytes"
	"encoding/json"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"
	"time"

	"sockeye/internal/cli/clitest"
)

// onScreen returns the bytes that a terminal receives for a text that is written in pieces.
func onScreen(t *testing.T, text []byte, piece int) string {
	t.Helper()
	var out bytes.Buffer
	s := &Screen{To: &out}
	for rest := text; len(rest) > 0; {
		n := min(piece, len(rest))
		if wrote, err := s.Write(rest[:n]); wrote != n || err != nil {
			t.Fatal(wrote, err)
		}
		rest = rest[n:]
	}
	s.End()
	return out.String()
}

func TestScreen(t *testing.T) {
	for in, want := range map[string]string{
		"":                         "",
		"plain\ttext\n":            "plain\ttext\n",
		"é…µ 漢字 😀 ñ":               "é…µ 漢字 😀 ñ",
		"a\x1b[2Jb":                "a�[2Jb",
		"\x1b]0;x\x07":             "�]0;x�",
		"\u009b1m\x9b1m":           "�1m�1m",
		"user\u202egpj.exe":        "user�gpj.exe",
		"one\r\x7f\u2028\u200btwo": "one����two",
		"cut \xe2\x80":             "cut �",
	} {
		for _, piece := range []int{1, 2, 3, 1000} {
			if got := onScreen(t, []byte(in), piece); got != want {
				t.Errorf("%q by %d bytes: %q, want %q", in, piece, got, want)
			}
		}
	}
}

// FuzzScreen checks that output does not contain control sequences, also if it is written in several pieces.
func FuzzScreen(f *testing.F) {
	for i, c := range clitest.Commands {
		f.Add([]byte("a"+c+"b"), uint8(i))
	}
	f.Add([]byte(strings.Join(clitest.Commands, "")), uint8(1))
	f.Fuzz(func(t *testing.T, data []byte, piece uint8) {
		if out := onScreen(t, data, int(piece)+1); !clitest.Safe(out) {
			t.Errorf("%q becomes %q", data, out)
		}
		if p := Printable(string(data)); !clitest.Safe(p) || strings.ContainsAny(p, "\n\t") {
			t.Errorf("%q is printed as %q", data, p)
		}
		text, err := json.Marshal(map[string]string{"a": string(data), string(data): "b"})
		if err != nil {
			t.Fatal(err)
		}
		var before, after map[string]string
		if err := json.Unmarshal(text, &before); err != nil {
			t.Fatal(err)
		}
		escaped := EscapeJSON(text)
		if err := json.Unmarshal(escaped, &after); err != nil || !reflect.DeepEqual(before, after) || !clitest.Safe(string(escaped)) {
			t.Errorf("%q becomes %q, %v", text, escaped, err)
		}
	})
}

// TestScreenProperty checks mixtures of clitest.Commands and of pieces of them.
func TestScreenProperty(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for range 20000 {
		var data []byte
		for range random.IntN(6) {
			part := clitest.Commands[random.IntN(len(clitest.Commands))]
			data = append(data, part[random.IntN(len(part)):]...)
			data = append(data, byte(random.Uint32()))
		}
		if out := onScreen(t, data, 1+random.IntN(5)); !clitest.Safe(out) {
			t.Fatalf("%q becomes %q", data, out)
		}
	}
}

// TestCleanStrings checks that strings are cleaned everywhere in an answer.
func TestCleanStrings(t *testing.T) {
	type inner struct {
		Name   string
		Labels map[string][]string
		When   time.Time
		Any    any
		hidden string
	}
	type outer struct {
		List  []inner
		Array [2]string
		Next  *inner
		Raw   []byte
	}
	answer := outer{
		List:  []inner{{Name: "a\nb", Labels: map[string][]string{"k\x1b": {"\t"}}, Any: map[string]any{"x\r": "y\n"}, hidden: "\n", When: time.Unix(1, 0)}},
		Array: [2]string{"\x1b", "é"}, Next: &inner{Name: "\u202e"}, Raw: []byte("\n"),
	}
	want := outer{
		List:  []inner{{Name: "a�b", Labels: map[string][]string{"k�": {"�"}}, Any: map[string]any{"x�": "y�"}, hidden: "\n", When: time.Unix(1, 0)}},
		Array: [2]string{"�", "é"}, Next: &inner{Name: "�"}, Raw: []byte("\n"),
	}
	if cleanStrings(&answer); !reflect.DeepEqual(answer, want) {
		t.Errorf("%+v", answer)
	}
	cleanStrings(nil)
}
