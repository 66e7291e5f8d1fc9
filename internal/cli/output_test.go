// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"sockeye/internal/api"
	"sockeye/internal/fault"
)

// commands are what terminals obey, or show as something else, in all forms.
var commands = []string{
	"\x1b[2J", "\x1b]0;title\x07", "\x1b]52;c;eA==\x1b\\", "\x1bP", "\x1bc", "\x08\x08", "\r", "\x00", "\x0b\x0c", "\x0e\x0f", "\x7f",
	"\u009b31m", "\u009d0;x\u009c", "\u0085", "\x9b31m", "\x9d", // C1, as characters and as bytes
	"\u202a", "\u202b", "\u202c", "\u202d", "\u202e", "\u2066", "\u2067", "\u2068", "\u2069", "\u200e", "\u200f", "\u061c", // directions
	"\u2028", "\u2029", "\u200b", "\u200c", "\u200d", "\ufeff", "\u00ad", "\u180e", "\U000e0041", "\ue000", "\u00a0",
	"\xff", "\xc0\x9b", "\xe2\x80", "\xed\xa0\x80", "\xf0\x9f",
}

// safe tells whether a terminal shows a text and does nothing else.
func safe(text string) bool {
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

// onScreen is what a terminal gets of a text that is written in pieces.
func onScreen(t *testing.T, text []byte, piece int) string {
	t.Helper()
	var out bytes.Buffer
	s := &screen{to: &out}
	for rest := text; len(rest) > 0; {
		n := min(piece, len(rest))
		if wrote, err := s.Write(rest[:n]); wrote != n || err != nil {
			t.Fatal(wrote, err)
		}
		rest = rest[n:]
	}
	s.end()
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

// FuzzScreen: whatever is printed, and in what pieces, no terminal obeys it.
func FuzzScreen(f *testing.F) {
	for i, c := range commands {
		f.Add([]byte("a"+c+"b"), uint8(i))
	}
	f.Add([]byte(strings.Join(commands, "")), uint8(1))
	f.Fuzz(func(t *testing.T, data []byte, piece uint8) {
		if out := onScreen(t, data, int(piece)+1); !safe(out) {
			t.Errorf("%q becomes %q", data, out)
		}
		if p := printable(string(data)); !safe(p) || strings.ContainsAny(p, "\n\t") {
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
		escaped := escapeJSON(text)
		if err := json.Unmarshal(escaped, &after); err != nil || !reflect.DeepEqual(before, after) || !safe(string(escaped)) {
			t.Errorf("%q becomes %q, %v", text, escaped, err)
		}
	})
}

// TestScreenProperty: no mixture of commands, and of their pieces, passes.
func TestScreenProperty(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for range 20000 {
		var data []byte
		for range random.IntN(6) {
			part := commands[random.IntN(len(commands))]
			data = append(data, part[random.IntN(len(part)):]...)
			data = append(data, byte(random.Uint32()))
		}
		if out := onScreen(t, data, 1+random.IntN(5)); !safe(out) {
			t.Fatalf("%q becomes %q", data, out)
		}
	}
}

// A string can be anywhere in an answer.
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
		List:  []inner{{Name: "a\nb", Labels: map[string][]string{"k\x1b": {"\t"}}, Any: map[string]any{"x\r": "y\n"}, hidden: "\n", When: noon}},
		Array: [2]string{"\x1b", "é"}, Next: &inner{Name: "\u202e"}, Raw: []byte("\n"),
	}
	want := outer{
		List:  []inner{{Name: "a�b", Labels: map[string][]string{"k�": {"�"}}, Any: map[string]any{"x�": "y�"}, hidden: "\n", When: noon}},
		Array: [2]string{"�", "é"}, Next: &inner{Name: "�"}, Raw: []byte("\n"),
	}
	if cleanStrings(&answer); !reflect.DeepEqual(answer, want) {
		t.Errorf("%+v", answer)
	}
	cleanStrings(nil)
}

// TestHostileCommandLines: a member and a process that would be one are called like
// commands to the terminal, and like rows of the table. No command passes that on.
func TestHostileCommandLines(t *testing.T) {
	h := newHost(t, oneService+`    members: [{match: {command_line: ^collector}, slot: free}]
tune:
  - {name: all, cgroup: CGROUP, set: {nodelay: true}}
`)
	h.start()
	ours, theirs := connected(t)
	for _, end := range []net.Conn{ours, theirs} {
		defer end.Close()
	}
	file, err := ours.(*net.TCPConn).File()
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	name := strings.ReplaceAll("collector\n\x1b[2J\t1"+strings.Join(commands, ""), "\x00", "")
	hostile := func(cmd *exec.Cmd) {
		cmd.Args[0] = name
		cmd.ExtraFiles = []*os.File{file}
	}
	pid, _ := h.member(hostile, "tcp [::]:1790", "udp [::]:4739")
	h.eventually("the member is registered", func() bool { return must[[]api.SlotStatus](h, "slots")[0].PID == pid })
	h.member(hostile, "tcp [::]:1790")
	h.eventually("another one waits", func() bool { return len(must[api.Status](h, "status").Services[0].Waiting) == 1 })
	for _, args := range [][]string{
		{"slots"}, {"status"}, {"tune", "explain", "--socket", fmt.Sprintf("%d:3", pid)}, {"sockets", "--processes"}, {"doctor"}, {"where", "192.0.2.1"},
	} {
		table := h.sockeye(args...)
		if !safe(table.out+table.err) || strings.Contains(table.out, "collector\n") || table.code != 0 && args[0] != "doctor" {
			t.Errorf("sockeye %q: code %d, %q %q", args, table.code, table.out, table.err)
		}
		if slices.Contains([]string{"slots", "status", "tune"}, args[0]) && !strings.Contains(table.out, "collector") {
			t.Errorf("sockeye %q does not show it: %q", args, table.out)
		}
		asJSON := h.sockeye(append(args, "-o", "json")...)
		if !safe(asJSON.out + asJSON.err) {
			t.Errorf("sockeye %q -o json: %q %q", args, asJSON.out, asJSON.err)
		}
	}
	// A program still gets what the process is called.
	if got, want := must[[]api.SlotStatus](h, "slots")[0].Command, strings.ToValidUTF8(name, "�"); !strings.HasPrefix(got, want[:60]) {
		t.Errorf("JSON says %q", got)
	}
	h.refused(fault.CodeUsage, `there is no command "\x1b[2J"`, "sockeye --help lists the commands", nil, "\x1b[2J")
	if r := h.sockeye("check", "/\x1b[2J\u202e\xff"); !safe(r.err) || r.code == 0 {
		t.Errorf("check: %d %q", r.code, r.err)
	}
	text, err := os.ReadFile(h.log)
	if err != nil || !safe(string(text)) {
		t.Errorf("the agent's log: %v %q", err, text)
	}
}

// connected are the ends of a connection.
func connected(t *testing.T) (a, b net.Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if a, err = net.Dial("tcp", l.Addr().String()); err == nil {
		b, err = l.Accept()
	}
	if err != nil {
		t.Fatal(err)
	}
	return a, b
}

// Scripts for shells, the schema and help pass the screen as they are.
func TestScreenLeavesOurOwn(t *testing.T) {
	for _, args := range [][]string{
		{"completion", "bash"}, {"completion", "zsh"}, {"completion", "fish"}, {"completion", "powershell"}, {"check", "--schema"}, {"help", "isolate"},
	} {
		var out bytes.Buffer
		code := Run(t.Context(), args, Environment{Out: &out, Err: io.Discard, Now: time.Now})
		if code != 0 || out.Len() == 0 || strings.ContainsRune(out.String(), utf8.RuneError) {
			t.Errorf("%q: code %d, %d bytes, something is replaced: %v", args, code, out.Len(), strings.ContainsRune(out.String(), utf8.RuneError))
		}
	}
}
