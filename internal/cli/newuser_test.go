// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/cli/command"
)

// runIn runs a command without an agent.
func runIn(t *testing.T, args ...string) result {
	t.Helper()
	var out, errs bytes.Buffer
	code := Run(t.Context(), args, command.Environment{Out: &out, Err: &errs, In: strings.NewReader(""), Now: time.Now})
	return result{code, out.String(), errs.String()}
}

// TestFullOutput writes the output of commands to a full device.
func TestFullOutput(t *testing.T) {
	for _, args := range [][]string{{"version"}, {"version", "-o", "json"}, {"nosuch", "-o", "json"}} {
		full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
		if err != nil {
			t.Fatal(err)
		}
		var errs bytes.Buffer
		code := Run(t.Context(), args, command.Environment{Out: full, Err: &errs, In: strings.NewReader(""), Now: time.Now})
		full.Close()
		want := unix.ENOSPC.Error()
		if args[0] == "nosuch" {
			want = `unknown command "nosuch"`
		}
		if code == 0 || !strings.HasPrefix(errs.String(), "sockeye: ") || !strings.Contains(errs.String(), want) {
			t.Errorf("%q: code %d, %q", args, code, errs.String())
		}
	}
}

// TestCheckExport checks the files of metrics.otlp.
func TestCheckExport(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "policy.yaml")
	for key, want := range map[string]string{"headers_file": "read headers_file", "ca": "read ca"} {
		policy := "services: {}\nmetrics: {otlp: {endpoint: \"https://127.0.0.1:4318\", " + key + ": missing}}\n"
		if err := os.WriteFile(file, []byte(policy), 0o644); err != nil {
			t.Fatal(err)
		}
		if r := runIn(t, "check", file); r.code != 2 || !strings.HasPrefix(r.err, "sockeye: "+want) || !strings.Contains(r.err, "\nhint: ") {
			t.Errorf("%s: %+v", key, r)
		}
	}
	if err := os.WriteFile(file, []byte("services: {}\nmetrics: {otlp: {endpoint: \"https://127.0.0.1:4318\"}}\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if r := runIn(t, "check", file); r.code != 0 || r.out != file+" is valid, metrics\n" {
		t.Errorf("%+v", r)
	}
}

// TestResetRecords removes a state directory that has only had records of sizes, and refuses others before it changes anything.
func TestResetRecords(t *testing.T) {
	dir := t.TempDir()
	state := filepath.Join(dir, "state")
	reset := []string{"reset", "--state", "--state-dir", state, "--pins", filepath.Join(dir, "pins")}
	if err := os.MkdirAll(filepath.Join(state, "bigtcp"), 0o700); err != nil {
		t.Fatal(err)
	}
	if r := runIn(t, reset...); r.code != 0 || r.out != "removed "+state+"\n" {
		t.Errorf("%+v", r)
	}
	if _, err := os.Stat(state); !os.IsNotExist(err) {
		t.Errorf("the directory: %v", err)
	}
	for _, file := range []string{"file", "bigtcp/file"} {
		if err := os.MkdirAll(filepath.Join(state, "bigtcp"), 0o700); err != nil {
			t.Fatal(err)
		}
		foreign := filepath.Join(state, file)
		if err := os.WriteFile(foreign, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if r := runIn(t, reset...); r.code == 0 || !strings.HasPrefix(r.err, "sockeye: ") {
			t.Errorf("%s: %+v", file, r)
		}
		if err := os.Remove(foreign); err != nil {
			t.Errorf("%s: %v", file, err)
		}
	}
}

// TestWaitTells drains a slot whose devices cannot all move, because another slot has no member: the command says so while it waits.
func TestWaitTells(t *testing.T) {
	h, _ := running(t)
	drain := []string{"slot", "set", "0", "drain", "--service", "telemetry", "--wait", "--timeout", "3s"}
	if r := h.sockeye(drain...); r.code != 1 || !strings.HasPrefix(r.err, "waiting: slot 3 has no member") {
		t.Errorf("%+v", r)
	}
	if r := h.sockeye(append(drain, "-o", "json")...); r.code != 1 || strings.Contains(r.err, "waiting: ") {
		t.Errorf("JSON: %+v", r)
	}
}
