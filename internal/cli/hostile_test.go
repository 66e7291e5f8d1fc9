// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"sockeye/internal/api"
	"sockeye/internal/cli/clitest"
	"sockeye/internal/cli/command"
	"sockeye/internal/fault"
)

// TestHostileCommandLines gives a member and a candidate command lines that contain escape sequences and look like
// table rows. No command prints them unescaped.
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
	name := strings.ReplaceAll("collector\n\x1b[2J\t1"+strings.Join(clitest.Commands, ""), "\x00", "")
	hostile := func(cmd *exec.Cmd) {
		cmd.Args[0] = name
		cmd.ExtraFiles = []*os.File{file}
	}
	pid, _ := h.member(hostile, "tcp [::]:1790", "udp [::]:4739")
	h.eventually("the member is registered", func() bool { return must[[]api.SlotStatus](h, "slots")[0].PID == pid })
	h.member(hostile, "tcp [::]:1790")
	h.eventually("another one waits", func() bool { return len(must[api.Status](h, "status").Services[0].Waiting) == 1 })
	for _, args := range [][]string{
		{"slots"}, {"status"}, {"tune", "explain", "--socket", fmt.Sprintf("%d:3", pid)}, {"sockets", "--processes"}, {"doctor"}, {"where", "192.0.2.1"}, {"why", "192.0.2.1"},
	} {
		table := h.sockeye(args...)
		if !clitest.Safe(table.out+table.err) || strings.Contains(table.out, "collector\n") || table.code != 0 && args[0] != "doctor" {
			t.Errorf("sockeye %q: code %d, %q %q", args, table.code, table.out, table.err)
		}
		if slices.Contains([]string{"slots", "status", "tune"}, args[0]) && !strings.Contains(table.out, "collector") {
			t.Errorf("sockeye %q does not show it: %q", args, table.out)
		}
		asJSON := h.sockeye(append(args, "-o", "json")...)
		if !clitest.Safe(asJSON.out + asJSON.err) {
			t.Errorf("sockeye %q -o json: %q %q", args, asJSON.out, asJSON.err)
		}
	}
	// JSON contains the unmodified command line.
	if got, want := must[[]api.SlotStatus](h, "slots")[0].Command, strings.ToValidUTF8(name, "�"); !strings.HasPrefix(got, want[:60]) {
		t.Errorf("command line in JSON: %q", got)
	}
	h.refused(fault.CodeUsage, `unknown command "\x1b[2J"`, "sockeye --help lists the commands", nil, "\x1b[2J")
	if r := h.sockeye("check", "/\x1b[2J\u202e\xff"); !clitest.Safe(r.err) || r.code == 0 {
		t.Errorf("check: %d %q", r.code, r.err)
	}
	text, err := os.ReadFile(h.log)
	if err != nil || !clitest.Safe(string(text)) {
		t.Errorf("the agent's log: %v %q", err, text)
	}
}

// connected holds both ends of a connection.
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

// TestScreenLeavesOurOwn checks that completion scripts, the schema and help texts are printed unmodified.
func TestScreenLeavesOurOwn(t *testing.T) {
	for _, args := range [][]string{
		{"completion", "bash"}, {"completion", "zsh"}, {"completion", "fish"}, {"completion", "powershell"}, {"check", "--schema"}, {"help", "isolate"},
	} {
		var out bytes.Buffer
		code := Run(t.Context(), args, command.Environment{Out: &out, Err: io.Discard, Now: time.Now})
		if code != 0 || out.Len() == 0 || strings.ContainsRune(out.String(), utf8.RuneError) {
			t.Errorf("%q: code %d, %d bytes, something is replaced: %v", args, code, out.Len(), strings.ContainsRune(out.String(), utf8.RuneError))
		}
	}
}
