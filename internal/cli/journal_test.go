// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestJournal runs agents with standard error connected to the file that JOURNAL_STREAM names, as systemd does for a
// service: each line has its priority and no timestamp.
func TestJournal(t *testing.T) {
	h := newHost(t, "services: {}\n")
	run := func(stream bool, args ...string) (text string, code int) {
		t.Helper()
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		var stat unix.Stat_t
		if err := unix.Fstat(int(w.Fd()), &stat); err != nil {
			t.Fatal(err)
		}
		cmd := process("sockeye", args...)
		cmd.Stderr = w
		inode := stat.Ino
		if !stream {
			inode++ // another file
		}
		cmd.Env = append(os.Environ(), fmt.Sprintf("JOURNAL_STREAM=%d:%d", stat.Dev, inode))
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		w.Close()
		if args[0] == "agent" && h.policy == args[len(args)-1] {
			h.eventually("the agent answers", func() bool { return h.sockeye("status").code == 0 })
			h.write("policy.yaml", "services: [\n")
			if err := cmd.Process.Signal(unix.SIGHUP); err != nil {
				t.Fatal(err)
			}
			buffer := make([]byte, 1<<16)
			for !strings.Contains(text, "not applied") {
				n, err := r.Read(buffer)
				if err != nil {
					t.Fatal(err)
				}
				text += string(buffer[:n])
			}
			h.write("policy.yaml", "services: {}\n")
			if err := cmd.Process.Signal(unix.SIGTERM); err != nil {
				t.Fatal(err)
			}
		}
		var rest bytes.Buffer
		if _, err := rest.ReadFrom(r); err != nil {
			t.Fatal(err)
		}
		r.Close()
		var exit *exec.ExitError
		if err := cmd.Wait(); err != nil && !errors.As(err, &exit) {
			t.Fatal(err)
		}
		return text + rest.String(), cmd.ProcessState.ExitCode()
	}
	text, _ := run(true, h.agentArgs()...)
	t.Cleanup(func() {
		if r := h.sockeye("reset", "--state-dir", h.state, "--pins", h.pins); r.code != 0 {
			t.Errorf("reset: %+v", r)
		}
	})
	line := regexp.MustCompile(`^<[3467]>(msg=|sockeye: |hint: |  hint: )`)
	for l := range strings.Lines(text) {
		if !line.MatchString(l) || strings.Contains(l, "time=") || strings.Contains(l, "level=") {
			t.Errorf("journal: %q", l)
		}
	}
	for _, want := range []string{"<6>msg=\"agent started\"", "<3>msg=\"policy not applied\"", "<6>msg=\"agent stops"} {
		if !strings.Contains(text, want) {
			t.Errorf("%q is not in %s", want, text)
		}
	}
	if text, _ := run(false, h.agentArgs()...); !strings.HasPrefix(text, "time=") || strings.Contains(text, "<") {
		t.Errorf("not the journal: %s", text)
	}
	// The last error of an agent that does not start has several lines.
	broken := h.write("broken.yaml", "services: {a: {slots: none}, b: {slots: none}}\n")
	text, code := run(true, "agent", "--run-dir", h.run, "--state-dir", h.dir+"/other", "--pins", h.pins, "--policy", broken)
	if code != 2 || strings.Count(text, "\n") < 2 {
		t.Errorf("code %d: %s", code, text)
	}
	for l := range strings.Lines(text) {
		if !strings.HasPrefix(l, "<3>") {
			t.Errorf("journal: %q", l)
		}
	}
}
